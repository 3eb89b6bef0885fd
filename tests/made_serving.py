"""A study of serving sweeps made up for tests: real cell files whose differences are known.

Three routes: ``cpu-stock`` gives other answers in company, ``cpu-exact`` the same ones always, and
``npu`` sends no token ids and loads requantised weights. What is chosen here is no measurement.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from made_replies import (
    Answer,
    Row,
    copies_block,
    diverged,
    make_answer,
    probe_block,
    provenance,
    shifted,
    solo_block,
    without_ids,
    write_replies,
)
from routewise.pair import PairCell, compare_pair
from routewise.table import build_tables, write_tables

MODEL = "small-q4_k_m"
N_PROMPTS = 3
ANSWERS = tuple(make_answer(seed, n_tokens=40) for seed in range(N_PROMPTS))
ROUTES = ("cpu-stock", "cpu-exact", "npu")
CACHES = ("off", "cold", "warm")
WIDTH = 4
ROUNDS = 3

PROMPT = ("prompt_index", "prompt_id", "category")

Edit = Callable[[list[Row]], list[Row]]


def study() -> dict[str, Any]:
    """Return the study's declaration, defaults filled in."""
    common = {"models": [MODEL], "prompts": "demo", "n_probs": 10, "n_tokens": None}
    return {
        "schema_version": 1,
        "study": "serving",
        "models": {MODEL: {"kind": "quantize", "type": "Q4_K_M"}},
        "routes": {"cpu-stock": {"build": "s"}, "cpu-exact": {"build": "e"}, "npu": {}},
        "sweeps": {
            "repeat": {
                **common,
                "routes": list(ROUTES),
                "repeats": ROUNDS,
                "lives": 2,
                "cache": list(CACHES),
                "expect": dict.fromkeys(ROUTES, "exact"),
            },
            "batched": {
                **common,
                "routes": ["cpu-stock", "cpu-exact"],
                "parallel": [1, WIDTH],
                "widths": [1, WIDTH],
                "mixes": ["copies", "neighbours", "fillers"],
                "prefill": ["together", "apart"],
                "rounds": ROUNDS,
                "seed": 1,
                "expect": {"cpu-stock": "differs-somewhere", "cpu-exact": "exact"},
            },
            "agree": {
                **common,
                "routes": list(ROUTES),
                "widths": [1, WIDTH],
                "rounds": 2,
                "expect": {"cpu-stock|cpu-exact": {"w1": "exact", f"w{WIDTH}": "differs"}},
            },
        },
    }


def moved(answer: Answer, seed: int) -> Answer:
    """Return one of three other states of an answer: other bits, or another text after token 20."""
    return (shifted(answer, 5, 0.125), diverged(answer, 20), shifted(answer, 9, 0.25))[seed % 3]


def answers_of(route: str) -> tuple[Answer, ...]:
    """Return what a route says alone."""
    if route != "npu":
        return ANSWERS
    near = [shifted(answer, 0, 0.03125) for answer in ANSWERS]
    return (without_ids(near[0]), *(without_ids(diverged(answer, 30)) for answer in near[1:]))


def in_company(route: str, prompt: int, seed: int) -> Answer:
    """Return what a route says to a prompt in company."""
    alone = answers_of(route)[prompt]
    return moved(alone, seed) if route == "cpu-stock" else alone


def block(row: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the block of a row, as a cell's job records it."""
    names = ("life", "cache", "mix", "prefill", "parallel", "width")
    return {name: row[name] for name in names} | {"rounds": rounds}


def repeat_rows(route: str) -> list[Row]:
    """Return the replies of a repeat cell: each cache in two lives."""
    cached = {"off": (0, 20), "cold": (1, 19), "warm": (19, 1)}
    return [
        row
        for life in (0, 1)
        for cache, (cache_n, prompt_n) in cached.items()
        for row in solo_block(
            answers_of(route), ROUNDS, life=life, cache=cache, cache_n=cache_n, prompt_n=prompt_n
        )
    ]


def batched_rows(route: str, parallel: int) -> list[Row]:
    """Return the replies of a batched cell of one server."""
    rows: list[Row] = []
    for prefill in ("together", "apart"):
        seen = {"prefill": prefill, "parallel": parallel}
        seen |= {"cache_n": 19, "prompt_n": 1} if prefill == "apart" else {}
        rows += solo_block(answers_of(route), ROUNDS, **seen)
        if parallel == 1:
            continue
        for prompt in range(N_PROMPTS):
            copies = [
                [in_company(route, prompt, one_round + copy) for copy in range(WIDTH)]
                for one_round in range(ROUNDS)
            ]
            rows += copies_block(copies, prompt, busy_per_decode=3.875, **seen)
            for mix in ("neighbours", "fillers"):
                probes = [in_company(route, prompt, one_round) for one_round in range(ROUNDS)]
                others = [answers_of(route)[(prompt + step) % N_PROMPTS] for step in (1, 2, 1)]
                busy = 3.5 if mix == "neighbours" else 2.25
                beside = probe_block(probes, others, mix, prompt, busy_per_decode=busy, **seen)
                for row in beside:  # a job names the rows of a round after its probe
                    row |= {name: beside[0][name] for name in PROMPT}
                rows += beside
    return rows


def agree_capture(route: str, width: int) -> list[Row]:
    """Return the replies of a capture: width 1 in two lives, a wider one in one."""
    if width == 1:
        return [row for life in (0, 1) for row in solo_block(answers_of(route), 2, life=life)]
    return [
        row
        for prompt in range(N_PROMPTS)
        for row in copies_block(
            [[in_company(route, prompt, copy) for copy in range(width)] for _ in range(2)],
            prompt,
            busy_per_decode=3.875,
        )
    ]


class MadeServing:
    """A serving study's cells; the rows and provenance of each may be changed before they are
    written. A cell is named by (sweep, route, variant).
    """

    def __init__(self, folder: Path, declared: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.declared = copy.deepcopy(dict(declared or study()))
        self.edits: dict[tuple[str, str, str], Edit] = {}
        self.changes: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.twice_widths: tuple[int, ...] = ()  # at which a route is asked twice in company
        self.second_pick: dict[str, int] = {}  # of both sides, where it is not the usual one
        self.left_out: set[tuple[str, str, str]] = set()
        self.captures: dict[tuple[str, int], Path] = {}

    def edit(self, sweep: str, route: str, variant: str, change: Edit) -> MadeServing:
        """Change the rows of one cell of replies."""
        self.edits[(sweep, route, variant)] = change
        return self

    def record(self, sweep: str, route: str, variant: str, **changes: Any) -> MadeServing:
        """Change what one cell's job records."""
        self.changes[(sweep, route, variant)] = changes
        return self

    def refuse(self, sweep: str, route: str, variant: str, reason: str) -> MadeServing:
        """Make a cell one that its route cannot do: no rows, and the reason."""
        self.record(sweep, route, variant, unsupported=reason)
        return self.edit(sweep, route, variant, lambda rows: [])

    def leave_out(self, sweep: str, route: str, variant: str) -> MadeServing:
        """Do not write one cell."""
        self.left_out.add((sweep, route, variant))
        return self

    def write(self) -> list[Path]:
        """Write the cells; return their paths."""
        sweeps = self.declared["sweeps"]
        paths = []
        for route in sweeps.get("repeat", {}).get("routes", []):
            paths += self._replies("repeat", route, "solo", 1, repeat_rows(route))
        for route in sweeps.get("batched", {}).get("routes", []):
            for parallel in sweeps["batched"]["parallel"]:
                rows = batched_rows(route, parallel)
                paths += self._replies("batched", route, f"p{parallel}", parallel, rows)
        if "agree" in sweeps:
            for route in sweeps["agree"]["routes"]:
                for width in sweeps["agree"]["widths"]:
                    rows = agree_capture(route, width)
                    paths += self._replies("agree", route, f"p{width}", width, rows)
            paths += self._pairs(sweeps["agree"])
        return paths

    def _replies(
        self, sweep: str, route: str, variant: str, parallel: int, rows: list[Row]
    ) -> list[Path]:
        name = (sweep, route, variant)
        later = 10**12 * (1 + (ROUTES.index(route) if route in ROUTES else len(ROUTES)))
        rows = [
            row | {key: row[key] + later + at for key in ("released_ns", "done_ns")}
            for at, row in enumerate(rows)
        ]
        blocks = {repr(block(row, 0)): block(row, _rounds_of(row, rows)) for row in rows}
        rows = self.edits.get(name, lambda same: same)(rows)
        document = provenance(
            route,
            MODEL,
            variant,
            sweep=sweep,
            parallel=parallel,
            weights="requantised" if route == "npu" else "same",
            match="text" if route == "npu" else "ids",
            blocks=list(blocks.values()),
            refused_blocks=[],
            unsupported=None,
        ) | self.changes.get(name, {})
        if name in self.left_out:
            return []
        path = self.folder / "cells" / f"{sweep}.{route}.{MODEL}.{variant}.parquet"
        if sweep == "agree":
            self.captures[(route, parallel)] = path
        return [write_replies(path, rows, document)]

    def _pairs(self, sweep: Mapping[str, Any]) -> list[Path]:
        routes: Sequence[str] = sweep["routes"]
        pairs = [(one, two) for at, one in enumerate(routes) for two in routes[at + 1 :]]
        wanted = [(one, two, width) for one, two in pairs for width in sweep["widths"]]
        wanted += [(route, route, 1) for route in routes]
        wanted += [(route, route, width) for route in routes for width in self.twice_widths]
        paths = []
        for one, two, width in wanted:
            pair, variant = f"{one}|{two}", f"w{width}"
            a, b = (self.captures.get((route, width)) for route in (one, two))
            if ("agree", pair, variant) in self.left_out or a is None or b is None:
                continue
            cell = PairCell(
                sweep="agree",
                route=pair,
                model=MODEL,
                variant=variant,
                prompts="demo",
                digest="0" * 16,
                pick_a={"life": 0, "round": 0},
                pick_b=self.second_pick
                or {"life": int(one == two and width == 1), "round": int(one == two and width > 1)},
            )
            path = self.folder / "cells" / f"agree.{one}+{two}.{MODEL}.{variant}.parquet"
            compare_pair(cell, a, b, "c" * 64, path)
            paths.append(path)
        return paths

    def tables(self) -> Path:
        """Write cells and tables; return the tables' folder."""
        folder = self.folder / "tables"
        write_tables(folder, self.declared, build_tables(self.declared, self.write()))
        return folder


def _rounds_of(row: Row, rows: Sequence[Row]) -> int:
    same = block(row, 0)
    return 1 + max(other["round"] for other in rows if block(other, 0) == same)
