"""Cells made up for tests: real Parquet files of a small study whose differences are known.

The rows keep the rules that a real cell keeps (hashes follow bits, passes hold together); which
widths differ, and by how much, is chosen here and is no measurement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from routewise.schema.file import table_of, write_table
from routewise.schema.study import TABLES
from routewise.table import build_tables, write_tables

N_VOCAB = 320
CATEGORIES = ("prose", "code", "mathematics", "dialogue")

Edit = Callable[[pd.DataFrame], pd.DataFrame]


def study(**changes: Any) -> dict[str, Any]:
    """Return a study of two routes, one model, three widths and three shapes."""
    declared: dict[str, Any] = {
        "schema_version": 1,
        "study": "demo",
        "models": {"small-q4_k_m": {"kind": "quantize", "type": "Q4_K_M"}},
        "routes": {
            "cpu-stock": {"build": "cpu-stock", "threads": 2},
            "cpu-exact": {"build": "cpu-exact", "threads": 2, "reference": "cpu-stock"},
        },
        "sweeps": {
            "replay": {
                "routes": ["cpu-stock", "cpu-exact"],
                "models": ["small-q4_k_m"],
                "prompts": "demo",
                "widths": [2, 4, 8],
                "shapes": ["ragged", "rollback", "neighbours"],
                "expect": {"cpu-exact": "exact", "cpu-stock": "differs-somewhere"},
            },
            "cost": {
                "routes": ["cpu-stock", "cpu-exact"],
                "models": ["small-q4_k_m"],
                "widths": [1, 2, 4, 8],
                "depth": 256,
                "rounds": 30,
            },
        },
    }
    return declared | changes


def provenance(route: str, model: str, variant: str, **changes: Any) -> dict[str, Any]:
    """Return what a cell's job records."""
    return {
        "cell": {
            "sweep": "replay",
            "route": route,
            "model": model,
            "variant": variant,
            "prompts": "demo",
            "digest": "0" * 16,
        },
        "settings": {
            "threads": 2,
            "context": 1024,
            "micro_batch": 512,
            "flash_attention": True,
            "kv_type": "f16",
            "seed": 1,
        },
        "readback": {"threads": 2},
        "invalid_reasons": [],
        "coverage_report": "",
        "build": build(route),
        "model": {
            "name": model,
            "sha256": "a" * 64,
            "n_bytes": 98362432,
            "tensor_types": {"F32": 9, "Q4_K": 16, "Q6_K": 2},
            "derived_from": {"name": "small", "type": "Q4_K_M"},
        },
        "prompts": {"name": "demo", "digest": "b" * 64},
        "machine": {
            "kind": "2-core x86-64 with AVX-512",
            "cpu_model": "made up",
            "n_cores": 2,
            "hostname": "must-not-leave",
        },
        "code_digest": "c" * 64,
        "started_at": "2026-11-30T12:00:00+00:00",
        "ended_at": "2026-11-30T12:00:09+00:00",
        "n_measured": 4,
        "n_adopted": 0,
        "measure_s": 9.0,
        "compare_s": 0.5,
    } | changes


def build(route: str) -> dict[str, Any]:
    """Return what a cell records of its build."""
    return {
        "name": route,
        "backend": "cpu",
        "patch": "cpu-exact" if route.endswith("exact") else None,
        "identity": f"identity-{route}",
        "digest": hashlib.sha256(route.encode()).hexdigest()[:12],
        "fingerprint": hashlib.sha256(f"libraries of {route}".encode()).hexdigest(),
        "libraries": {"libggml-cpu.so": "d" * 64},
    }


def plain_rows(
    n_prompts: int = 4, n_steps: int = 24, starts: Sequence[int] = (20,)
) -> pd.DataFrame:
    """Return plain rows: ``n_steps`` decoded rows after step 0 for each prompt."""
    random = np.random.default_rng(7)
    rows = []
    for prompt in range(n_prompts):
        start = starts[prompt % len(starts)] + prompt
        token = int(random.integers(N_VOCAB))
        for step in range(n_steps + 1):
            margin = np.float32(random.gamma(1.2, 1.6))
            top = np.sort(random.choice(N_VOCAB, 3, replace=False))
            logits = np.array([12.0, 12.0 - margin, 11.5 - margin], dtype=np.float32)
            chosen = int(top[0])
            rows.append(
                {
                    "prompt_index": prompt,
                    "prompt_id": f"{CATEGORIES[prompt % len(CATEGORIES)]}-{prompt}",
                    "category": CATEGORIES[prompt % len(CATEGORIES)],
                    "step": step,
                    "kv_position": start + step,
                    "input_token_id": token,
                    "token_id": chosen,
                    "status": "ok",
                    "n_nonfinite": 0,
                    "logits_hash": _hash("plain", prompt, step),
                    "top_ids": top.tolist(),
                    "top_logits": logits.tolist(),
                    "top_bits": logits.view(np.uint32).tolist(),
                    "margin": float(margin),
                    "n_vocab": N_VOCAB,
                }
            )
            token = chosen
    return pd.DataFrame(rows)


def replay_rows(
    variant: str, plain: pd.DataFrame, delta: float = 0.0, share: float = 0.0
) -> pd.DataFrame:
    """Return replay rows of a variant; about ``share`` of them differ, by about ``delta``."""
    random = np.random.default_rng(sum(variant.encode()))
    rows = []
    for _, prompt in plain[plain["step"] >= 1].groupby("prompt_index"):
        for plan in _passes(variant, len(prompt), random):
            for offset, place in enumerate(plan["rows"]):
                row = prompt.iloc[place]
                differs = bool(random.random() < share)
                size = float(np.float32(random.gamma(2.0, delta / 2))) if differs else 0.0
                flip = differs and bool(row["margin"] < 0.6 * size)
                first = int(row["kv_position"]) - offset
                last = first + plan["tokens"] - 1
                rows.append(
                    {
                        **{key: row[key] for key in ("prompt_index", "prompt_id", "category")},
                        **{key: row[key] for key in ("step", "kv_position", "input_token_id")},
                        "pass_index": plan["index"],
                        "pass_width": len(plan["rows"]),
                        "pass_tokens": plan["tokens"],
                        "batch_offset": offset,
                        "crosses_128": first // 128 != last // 128,
                        "crosses_256": first // 256 != last // 256,
                        "status": "ok",
                        "bits_equal": not differs,
                        "n_differing": N_VOCAB if differs else 0,
                        "n_zero_sign": 0,
                        "logit_delta_max": size,
                        "logit_delta_max_id": 5 if differs else None,
                        "argmax_flip": flip,
                        "plain_token_id": row["token_id"],
                        "replay_token_id": row["top_ids"][1] if flip else row["token_id"],
                        "kl_nats": size**2 / 50,
                        "plain_margin": row["margin"],
                        "replay_margin": abs(row["margin"] - size) if flip else row["margin"],
                        "plain_hash": row["logits_hash"],
                        "replay_hash": _hash(variant, row["prompt_id"], row["step"])
                        if differs
                        else row["logits_hash"],
                        "plain_repeat_equal": True,
                    }
                )
    frame = pd.DataFrame(rows)
    return frame.astype({"logit_delta_max_id": "Int32"})


def _passes(variant: str, n_rows: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Return the passes that push ``n_rows`` recorded tokens back: their rows and all tokens."""
    passes: list[dict[str, Any]] = []
    place = 0
    while place < n_rows:
        if variant.startswith("w"):
            width, extra = int(variant[1:]), 0
        elif variant == "neighbours":
            width, extra = 1, 7
        else:
            width = 1 + int(random.integers(5)) if place else 2 + len(passes)
            extra = 2 if variant == "rollback" else 0
        rows = list(range(place, min(place + width, n_rows)))
        passes.append({"index": len(passes), "rows": rows, "tokens": len(rows) + extra})
        place += width
    return passes


def cost_rows(
    routes: Mapping[str, Sequence[float]],
    widths: Sequence[int],
    model: str = "small-q4_k_m",
    rounds: int = 30,
    contended: float = 0.1,
    noise: float = 0.03,
) -> pd.DataFrame:
    """Return cost samples: pass times in ms by route and width, about ``contended`` of them so."""
    random = np.random.default_rng(11)
    rows: list[dict[str, Any]] = []
    for one_round in range(rounds):
        drift = 1 + 0.2 * np.sin(one_round / 5)
        for width_at, width in enumerate(widths):
            for route, times in routes.items():
                slow = bool(random.random() < contended)
                factor = drift * (1 + noise * abs(random.standard_normal())) * (4 if slow else 1)
                rows.append(
                    {
                        "route": route,
                        "model": model,
                        "width": width,
                        "round": one_round,
                        "order": len(rows),
                        "depth": 256,
                        "pass_ns": int(times[width_at] * factor * 1e6),
                        "load_1min": 1.0,
                        "other_cpu_share": 0.6 if slow else 0.01,
                        "contended": slow,
                        "clock_mhz": None,
                        "read_bytes": None,
                        "copy_bytes_per_s": None,
                    }
                )
    return pd.DataFrame(rows)


def write_cell(path: Path, name: str, rows: pd.DataFrame, document: Mapping[str, Any]) -> Path:
    """Write rows as a cell file."""
    columns = {field: _column(rows[field]) for field in TABLES[name].arrow.names}
    write_table(path, TABLES[name], table_of(TABLES[name], columns), dict(document))
    return path


def _column(series: pd.Series) -> list[Any]:
    return [None if not isinstance(value, list) and pd.isna(value) else value for value in series]


class MadeStudy:
    """A study's cells on disk; each may be edited before the tables are built."""

    def __init__(self, folder: Path, declared: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.declared = dict(declared or study())
        self.plain = plain_rows()
        self.replay_edits: dict[tuple[str, str], Edit] = {}
        self.plain_edits: dict[str, Edit] = {}
        self.changes: dict[tuple[str, str], dict[str, Any]] = {}
        self.left_out: set[tuple[str, str]] = set()
        self.cost: pd.DataFrame | None = cost_rows(
            {"cpu-stock": (4.0, 5.2, 6.0, 9.0), "cpu-exact": (4.0, 5.0, 6.6, 10.5)}, (1, 2, 4, 8)
        )
        self.cost_changes: dict[str, Any] = {}

    def edit(self, route: str, variant: str, change: Edit) -> MadeStudy:
        """Change the rows of one replay cell before it is written."""
        self.replay_edits[(route, variant)] = change
        return self

    def edit_plain(self, route: str, change: Edit) -> MadeStudy:
        """Change the rows of a route's plain cell before it is written."""
        self.plain_edits[route] = change
        return self

    def record(self, route: str, variant: str, **changes: Any) -> MadeStudy:
        """Change what one cell's job records."""
        self.changes[(route, variant)] = changes
        return self

    def leave_out(self, route: str, variant: str) -> MadeStudy:
        """Do not write one cell."""
        self.left_out.add((route, variant))
        return self

    def write(self) -> list[Path]:
        """Write the cells; return their paths."""
        nothing: dict[str, Any] = {"routes": [], "models": [], "widths": [], "shapes": []}
        sweep = self.declared["sweeps"].get("replay", nothing)
        variants = [f"w{width}" for width in (1, *sweep["widths"])] + list(sweep["shapes"])
        paths = []
        for route in sweep["routes"]:
            for model in sweep["models"]:
                for variant in ["plain", *variants]:
                    if (route, variant) in self.left_out:
                        continue
                    rows = self._rows(route, variant)
                    document = provenance(
                        route, model, variant, **self.changes.get((route, variant), {})
                    )
                    path = self.folder / "cells" / f"replay.{route}.{model}.{variant}.parquet"
                    name = "plain" if variant == "plain" else "replay"
                    paths.append(write_cell(path, name, rows, document))
        if self.cost is not None:
            path = self.folder / "cells" / "cost.small-q4_k_m.parquet"
            routes = self.declared["sweeps"]["cost"]["routes"]
            document = provenance("", "small-q4_k_m", "") | {
                "cell": {"sweep": "cost", "model": "small-q4_k_m", "digest": "0" * 16},
                "build": None,
                "builds": {route: build(route) for route in routes},
            }
            paths.append(write_cell(path, "cost", self.cost, document | self.cost_changes))
        return paths

    def _rows(self, route: str, variant: str) -> pd.DataFrame:
        if variant == "plain":
            return self.plain_edits.get(route, _same)(self.plain.copy())
        moved = route.endswith("stock") and (variant in ("w4", "w8") or not variant.startswith("w"))
        rows = replay_rows(
            variant, self.plain, delta=0.6 if moved else 0.0, share=0.97 if moved else 0.0
        )
        return self.replay_edits.get((route, variant), _same)(rows)

    def tables(self) -> Path:
        """Write cells and tables; return the tables' folder."""
        folder = self.folder / "tables"
        write_tables(folder, self.declared, build_tables(self.declared, self.write()))
        return folder


def _same(rows: pd.DataFrame) -> pd.DataFrame:
    return rows


def _hash(*parts: Any) -> bytes:
    return hashlib.md5(repr(parts).encode(), usedforsecurity=False).digest()
