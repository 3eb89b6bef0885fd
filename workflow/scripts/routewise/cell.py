"""A cell: one job of one sweep, measured prompt by prompt through the result store.

A cell is described by one canonical JSON value, which the plan wrote and the job reads back: what
is not in it does not decide what is measured. The job opens the build that it names, checks that
the libraries mapped are that build's, takes each prompt's fragment from the store or measures it,
and writes one Parquet file with provenance in its metadata.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from routewise.claim import ClaimSpec, Held
from routewise.compare import RowSummary
from routewise.device import identify_device, kind_of_device, read_state
from routewise.engine import Context, Engine, Model, Settings, check_identity, load_engine
from routewise.errors import RoutewiseError
from routewise.hold import before_it_is_held, held_for_job, identify_held
from routewise.machine import describe_machine, device_scope
from routewise.progress import Progress
from routewise.replay import PlainRun, ReplayRun, plan_passes, run_plain, run_replay
from routewise.schema.file import TableSchema, read_table, table_of, write_table
from routewise.schema.prompts import PROMPTS
from routewise.schema.replay import PLAIN, REPLAY
from routewise.store import Store, fragment_key

PLAIN_VARIANT = "plain"
#: A replay keeps the top-two margin of its rows; the plain cell keeps the top k.
_TOP_K_MARGIN = 2


@dataclass(frozen=True)
class Cell:
    """What one job measures.

    ``parameters`` are those of the sweep that the variant depends on (seed, top_k, neighbours);
    ``env`` is the engine's environment, all of it. ``device`` is what the route computes on, and
    ``claim`` how the job holds it; a replay on the processor holds nothing: others cost it time,
    and no bit.
    """

    sweep: str
    route: str
    model: str
    variant: str
    prompts: str
    digest: str
    settings: Settings
    parameters: dict[str, Any]
    env: dict[str, str]
    device: str = "cpu"
    claim: ClaimSpec | None = None

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Cell:
        """Read a cell back from the JSON value that :meth:`document` made."""
        claim = document["claim"]
        claim = None if claim is None else ClaimSpec.from_document(claim)
        return cls(**{**document, "settings": Settings(**document["settings"]), "claim": claim})

    def document(self) -> dict[str, Any]:
        """Return the cell as plain values, for JSON."""
        return asdict(self)

    @property
    def name(self) -> str:
        """Return the cell's name for people."""
        return f"{self.sweep} {self.route} {self.model} {self.variant}"


@dataclass(frozen=True)
class Inputs:
    """The files that a cell is measured from, and the store that it is measured through."""

    build: Path  # folder with lib/ and build.json
    model: Path
    model_record: dict[str, Any]  # of the model: name, sha256, ...
    prompts: Path
    store: Path
    code_digest: str
    planned: dict[str, Any] = field(default_factory=dict)  # by inputs.py, for a later plan to read


class Bench:
    """An opened build, and the model once it is needed.

    ``device`` is the identity of the units that are held; without it all of the device are asked.
    """

    def __init__(self, cell: Cell, inputs: Inputs, device: dict[str, Any] | None = None) -> None:
        self.cell = cell
        self.inputs = inputs
        self.engine: Engine = load_engine(inputs.build / "lib")
        self.build = check_identity(self.engine, inputs.build / "build.json")
        self.machine = describe_machine()
        self.device = identify_device(cell.device) if device is None else device
        self._model: Model | None = None
        self._room: npt.NDArray[np.float32] | None = None

    @property
    def model(self) -> Model:
        """The loaded model; loading waits until a fragment is missing."""
        if self._model is None:
            self._model = self.engine.open_model(self.inputs.model, self.cell.settings.gpu_layers)
        return self._model

    def room(self, n_rows: int) -> npt.NDArray[np.float32]:
        """Return room for at least ``n_rows`` logits rows, the same for each prompt."""
        if self._room is None or len(self._room) < n_rows:
            self._room = np.empty((n_rows, self.model.n_vocab), np.float32)
        return self._room

    def key_inputs(self, table: str, prompt_digest: str) -> dict[str, Any]:
        """Return everything that a fragment of this cell depends on."""
        scope = {**device_scope(self.machine), **kind_of_device(self.device)}
        return _key_inputs(
            self.cell, self.inputs, self.build["fingerprint"], scope, table, prompt_digest
        )


def _key_inputs(
    cell: Cell,
    inputs: Inputs,
    fingerprint: Any,
    scope: dict[str, Any],
    table: str,
    prompt_digest: str,
) -> dict[str, Any]:
    return {
        "table": table,
        "variant": cell.variant,
        "settings": asdict(cell.settings),
        "env": cell.env,
        "parameters": cell.parameters,
        "fingerprint": fingerprint,
        "model": inputs.model_record["sha256"],
        "prompt": prompt_digest,
        "code": inputs.code_digest,
        "device": scope,
    }


Measure = Callable[[Bench, dict[str, Any]], tuple[pa.Table, dict[str, Any]]]


def measure_cell(cell: Cell, inputs: Inputs, output: Path, plain_path: Path | None = None) -> None:
    """Measure a plain cell, or a replay cell beside its plain cell, and write it to ``output``.

    Raises RoutewiseError where the build mapped is not the one named, or the engine refuses.
    """
    started_at = datetime.now(UTC)
    prompts, prompt_provenance = read_table(inputs.prompts, PROMPTS)
    lines = prompts.to_pylist()
    if cell.variant == PLAIN_VARIANT:
        table, measure = PLAIN, _measure_plain
    else:
        if plain_path is None:
            raise RoutewiseError(f"{cell.name}: a replay needs its plain cell", "give --plain")
        table, measure = REPLAY, _measure_replay
    # what is wrong with the plain cell is said before anything is measured
    plain_bits = None if plain_path is None or table is PLAIN else _stored_bits(plain_path)
    with _held(cell, inputs, table, lines) as (held, device):
        bench = Bench(cell, inputs, device)
        may_measure = held is not None or cell.claim is None
        units = () if held is None else held.units
        states = {"start": read_state(cell.device, units) if may_measure else None}
        parts, notes = _gather(bench, table, measure, lines, may_measure)
        states["end"] = read_state(cell.device, units) if may_measure else None
    rows = pa.concat_tables(parts)
    reasons = sorted({reason for note in notes for reason in note["invalid_reasons"]})
    if plain_bits is not None:
        rows = _check_plain_repeat(rows, plain_bits)
    provenance = {
        "cell": {
            key: getattr(cell, key)
            for key in ("sweep", "route", "model", "variant", "prompts", "digest")
        },
        "settings": {**asdict(cell.settings), **cell.parameters, "env": cell.env},
        "readback": notes[0]["readback"] if notes else {},
        "system_info": bench.engine.system_info,
        "invalid_reasons": reasons,
        "coverage_report": "\n".join(sorted({n["uncovered"] for n in notes if n["uncovered"]})),
        "build": bench.build,
        "model": inputs.model_record,
        "prompts": {"name": cell.prompts, "digest": prompt_provenance["prompt_set_digest"]},
        "machine": bench.machine,
        "device": bench.device,
        "device_state": states,
        "claims": []
        if held is None
        else [{"device": held.device, "wait_s": held.wait_s, "hold_s": held.hold_s}],
        "code_digest": inputs.code_digest,
        "inputs": inputs.planned,
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fragments": [note["key"] for note in notes],  # in the store
        "n_measured": sum(not note["adopted"] for note in notes),
        "n_adopted": sum(note["adopted"] for note in notes),
        "measure_s": round(sum(note["measure_s"] for note in notes), 3),
        "compare_s": round(sum(note["compare_s"] for note in notes), 3),
    }
    write_table(output, table, rows, provenance)


@contextlib.contextmanager
def _held(
    cell: Cell, inputs: Inputs, table: TableSchema, prompts: list[dict[str, Any]]
) -> Iterator[tuple[Held | None, dict[str, Any]]]:
    """Hold the cell's device for a ``with`` block, unless all its fragments are stored.

    The engine is loaded within: programs learn from the environment which unit is theirs. Gives
    what is held, None where nothing is, and the identity of the device that the fragments are of.
    """
    if cell.device == "cpu":
        yield None, {}
        return
    if (stored := _stored_for(cell, inputs, table, prompts)) is not None:
        yield None, stored
        return
    with held_for_job(cell.device, cell.claim, cell.name) as held:
        if held is not None:
            os.environ.update(held.environment)
        yield held, identify_held(cell.device, held)


def _stored_for(
    cell: Cell, inputs: Inputs, table: TableSchema, prompts: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the kind of unit of which every fragment is stored, as far as the build's record says.

    None where there is no such kind: fragments of two kinds of unit are never joined in one cell.
    What is adopted in the end is looked up once more, under the libraries that are really mapped.
    """
    try:
        fingerprint = json.loads((inputs.build / "build.json").read_text())["fingerprint"]
    except (OSError, ValueError, KeyError):
        return None
    store = Store(inputs.store)
    machine = device_scope(describe_machine())

    def is_stored(device: dict[str, Any], digest: str) -> bool:
        scope = {**machine, **kind_of_device(device)}
        key = fragment_key(_key_inputs(cell, inputs, fingerprint, scope, table.name, digest))
        return store.get(key, table) is not None

    for device in before_it_is_held(cell.device, cell.claim):
        if all(is_stored(device, one["digest"]) for one in prompts):
            return device
    return None


def _gather(
    bench: Bench,
    table: TableSchema,
    measure: Measure,
    prompts: list[dict[str, Any]],
    may_measure: bool,
) -> tuple[list[pa.Table], list[dict[str, Any]]]:
    store = Store(bench.inputs.store)
    progress = Progress(f"{bench.cell.name}:", sum(p["n_asked"] for p in prompts), "positions")
    parts, notes = [], []
    for prompt in prompts:
        key_inputs = bench.key_inputs(table.name, prompt["digest"])
        key = fragment_key(key_inputs)
        found = store.get(key, table)
        if found is None and not may_measure:
            raise RoutewiseError(
                f"{bench.cell.name}: a stored fragment is gone, and the device is not held",
                "run the same command again",
            )
        if found is None:
            start = time.perf_counter()
            rows, note = measure(bench, prompt)
            note |= {
                "measure_s": time.perf_counter() - start,
                "uncovered": bench.engine.uncovered(),
                "machine": bench.machine,
                "build": bench.build,
            }
            store.put(key_inputs, table, rows, note)
            notes.append({**note, "key": key, "adopted": False})
        else:
            rows, note = found
            progress.start_at(progress.done + prompt["n_asked"])
            notes.append({**note, "adopted": True, "measure_s": 0.0, "compare_s": 0.0})
            parts.append(_placed(rows, prompt))
            continue
        progress.advance(prompt["n_asked"])
        parts.append(_placed(rows, prompt))
    progress.finish()
    return parts, notes


def _measure_plain(bench: Bench, prompt: dict[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    plain, note = _plain_run(bench, prompt)
    return _plain_rows(plain, prompt), note


def _measure_replay(bench: Bench, prompt: dict[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    plain, note = _plain_run(bench, prompt)
    cell = bench.cell
    plan = plan_passes(
        cell.variant,
        plain.prompt_ids,
        plain.token_ids,
        bench.model.n_vocab,
        n_neighbours=cell.parameters.get("neighbours", 0),
        context=cell.settings.context,
        seed=cell.parameters.get("seed", 0),
    )
    with bench.model.open_context(cell.settings, 1 + len(plan.neighbours)) as context:
        reasons = _readback_reasons(context, cell.settings)
        replay = run_replay(
            context,
            plain,
            plan,
            micro_batch=cell.settings.micro_batch,
            top_k=_TOP_K_MARGIN,
        )
    if not replay.prefill_equal:
        reasons.append(f"prompt {prompt['prompt_id']}: the prefill differs from the plain arm's")
    note["invalid_reasons"] += reasons
    note["compare_s"] = replay.compare_s
    note["engine_s"] += replay.engine_s
    return _replay_rows(plain, replay, prompt), note


def _plain_run(bench: Bench, prompt: dict[str, Any]) -> tuple[PlainRun, dict[str, Any]]:
    settings = bench.cell.settings
    with bench.model.open_context(settings) as context:
        plain = run_plain(
            context,
            prompt["token_ids"],
            prompt["n_asked"],
            micro_batch=settings.micro_batch,
            top_k=bench.cell.parameters.get("top_k", _TOP_K_MARGIN),
            room=bench.room(prompt["n_asked"] + 1),
        )
        note = {
            "readback": context.readback,
            "invalid_reasons": _readback_reasons(context, settings),
            "engine_s": plain.engine_s,
            "compare_s": 0.0,
        }
    return plain, note


def _readback_reasons(context: Context, settings: Settings) -> list[str]:
    readback = context.readback
    wanted = {
        "micro_batch": settings.micro_batch,
        "threads": settings.threads,
        "threads_batch": settings.threads,
        "flash_attention": "enabled" if settings.flash_attention else "disabled",
        "kv_unified": "true" if settings.kv_unified else "false",
        "kv_types": [settings.kv_type, settings.kv_type],
    }
    reasons = [
        f"asked for {key} {value}, the engine says {readback[key]}"
        for key, value in wanted.items()
        if readback[key] != value
    ]
    said = readback["context"]
    if not isinstance(said, int) or said < settings.context:
        reasons.append(f"asked for context {settings.context}, the engine says {said}")
    return reasons


def _placed(rows: pa.Table, prompt: dict[str, Any]) -> pa.Table:
    """Give a fragment's rows the prompt's place and name in this prompt set."""
    for name in ("prompt_index", "prompt_id", "category"):
        place = rows.schema.get_field_index(name)
        column = pa.array([prompt[name]] * rows.num_rows, rows.schema.field(name).type)
        rows = rows.set_column(place, rows.schema.field(name), column)
    return rows.replace_schema_metadata(None)


def _stored_bits(plain_path: Path) -> dict[tuple[str, int], str]:
    """Return the digest of each logits row of a plain cell, by prompt and step."""
    plain, _ = read_table(plain_path, PLAIN)
    return {
        (prompt_id, step): digest
        for prompt_id, step, digest in zip(
            plain["prompt_id"].to_pylist(),
            plain["step"].to_pylist(),
            plain["logits_hash"].to_pylist(),
            strict=True,
        )
    }


def _check_plain_repeat(rows: pa.Table, stored: dict[tuple[str, int], str]) -> pa.Table:
    """Say of each row whether this job's plain arm gave the bits of the plain cell."""
    equal = [
        stored.get((prompt_id, step)) == digest
        for prompt_id, step, digest in zip(
            rows["prompt_id"].to_pylist(),
            rows["step"].to_pylist(),
            rows["plain_hash"].to_pylist(),
            strict=True,
        )
    ]
    place = rows.schema.get_field_index("plain_repeat_equal")
    return rows.set_column(
        place, rows.schema.field("plain_repeat_equal"), pa.array(equal, pa.bool_())
    )


def _prompt_columns(prompt: dict[str, Any], n: int) -> dict[str, Any]:
    return {name: [prompt[name]] * n for name in ("prompt_index", "prompt_id", "category")}


def _status(valid: bool) -> str:
    return "ok" if valid else "invalid"


def _plain_rows(plain: PlainRun, prompt: dict[str, Any]) -> pa.Table:
    summaries = plain.summaries
    n = len(summaries)
    inputs = [plain.prompt_ids[-1], *plain.token_ids]
    return table_of(
        PLAIN,
        {
            **_prompt_columns(prompt, n),
            "step": range(n),
            "kv_position": [len(plain.prompt_ids) - 1 + step for step in range(n)],
            "input_token_id": inputs,
            "token_id": [s.token_id for s in summaries],
            "status": [_status(s.valid) for s in summaries],
            "n_nonfinite": [s.n_nonfinite for s in summaries],
            "logits_hash": [s.digest for s in summaries],
            "top_ids": [s.top_ids for s in summaries],
            "top_logits": [s.top_logits for s in summaries],
            "top_bits": [s.top_logits.view(np.uint32) for s in summaries],
            "margin": [s.margin for s in summaries],
            "n_vocab": [plain.rows.shape[1]] * n,
        },
    )


def _replay_rows(plain: PlainRun, replay: ReplayRun, prompt: dict[str, Any]) -> pa.Table:
    rows = replay.rows
    n = len(rows)
    kept: list[RowSummary] = [plain.summaries[row.step] for row in rows]
    positions = [len(plain.prompt_ids) + row.step - 1 for row in rows]
    spans: dict[int, tuple[int, int]] = {}
    for row, position in zip(rows, positions, strict=True):
        low, high = spans.get(row.pass_index, (position, position))
        spans[row.pass_index] = (min(low, position), max(high, position))

    def crosses(block: int) -> list[bool]:
        return [
            spans[row.pass_index][0] // block != spans[row.pass_index][1] // block for row in rows
        ]

    comparisons = [row.comparison for row in rows]
    return table_of(
        REPLAY,
        {
            **_prompt_columns(prompt, n),
            "step": [row.step for row in rows],
            "kv_position": positions,
            "input_token_id": [plain.token_ids[row.step - 1] for row in rows],
            "pass_index": [row.pass_index for row in rows],
            "pass_width": [row.pass_width for row in rows],
            "pass_tokens": [row.pass_tokens for row in rows],
            "batch_offset": [row.batch_offset for row in rows],
            "crosses_128": crosses(128),
            "crosses_256": crosses(256),
            "status": [_status(c.valid) for c in comparisons],
            "bits_equal": [c.bits_equal for c in comparisons],
            "n_differing": [c.n_differing for c in comparisons],
            "n_zero_sign": [c.n_zero_sign for c in comparisons],
            "logit_delta_max": [c.logit_delta_max for c in comparisons],
            "logit_delta_max_id": [c.logit_delta_max_id for c in comparisons],
            "argmax_flip": [c.argmax_flip for c in comparisons],
            "plain_token_id": [s.token_id for s in kept],
            "replay_token_id": [row.summary.token_id for row in rows],
            "kl_nats": [c.kl_nats for c in comparisons],
            "plain_margin": [s.margin for s in kept],
            "replay_margin": [row.summary.margin for row in rows],
            "plain_hash": [s.digest for s in kept],
            "replay_hash": [row.summary.digest for row in rows],
            "plain_repeat_equal": [False] * n,  # known only beside the plain cell
        },
    )
