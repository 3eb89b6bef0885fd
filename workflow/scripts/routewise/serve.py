"""A serving cell: one job that holds a device, starts a server, asks it, and proves it gone.

The cell is one canonical JSON value, written by the plan. Each (block, prompt) is a fragment of the
result store, so that what was answered before a kill is not asked again; only the lives of a server
with something missing are started at all. The rows are replies (schema/replies.py), with everything
that the server said of itself in the file's metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from routewise.block import Block, Prepared, prepare_round, prompt_refusal
from routewise.claim import Held
from routewise.client import Client, Round, is_fair_witness
from routewise.device import kind_of_device, read_state
from routewise.digest import digest_of
from routewise.errors import RoutewiseError
from routewise.hold import before_it_is_held, held_for_job, identify_held
from routewise.identity import Identity
from routewise.launch import launch_of
from routewise.machine import describe_machine, device_scope
from routewise.progress import Progress
from routewise.reply import Ask, Reply
from routewise.schema.file import read_table, table_of, write_table
from routewise.schema.prompts import PROMPTS
from routewise.schema.replies import REPLIES
from routewise.serve_cell import ServeCell, ServeInputs
from routewise.server import Server, attach, serve
from routewise.store import Store, fragment_key

_REPLY_COLUMNS = tuple(field.name for field in fields(Reply))
_SLOWEST_TOKEN_S = 10.0
#: How often a fragment is asked where the server's own count says that a round was not shared as it
#: was meant to be. What was answered plays no part in that.
_TRIES = 3

#: A round, and the columns that say how the device was held when it ended.
Asked = tuple[Round, dict[str, Any]]


@dataclass(frozen=True)
class Fragment:
    """One prompt in one block: what is asked, and the key of its rows in the store."""

    block: Block
    prompt_index: int
    rounds: tuple[Prepared, ...]
    key_inputs: dict[str, Any]
    key: str


def measure_serving(cell: ServeCell, inputs: ServeInputs, output: Path) -> None:
    """Ask what is missing of a cell, and write all of it to ``output``.

    Raises RoutewiseError where the server cannot be started, is not the one asked for, dies, or
    makes no progress; what was answered until then is in the store.
    """
    started_at = datetime.now(UTC)
    table, prompt_provenance = read_table(inputs.prompts, PROMPTS)
    prompts = table.to_pylist()
    job = ServingJob(cell, inputs, prompts)
    job.look_up()
    n_adopted = len(job.rows)
    if job.missing:
        with held_device(cell) as held:
            job.know(held)
            job.take_stored()
            n_adopted = len(job.rows)
            for life in sorted({fragment.block.life for fragment in job.missing}):
                job.measure_life(life, held)
    parts = [
        _placed(job.rows[fragment.key], prompts[fragment.prompt_index])
        for fragment in job.fragments
    ]
    rows = pa.concat_tables(parts) if parts else table_of(REPLIES, _no_columns())
    notes = [job.notes[fragment.key] for fragment in job.fragments]
    stored = [] if cell.kind == "endpoint" else [fragment.key for fragment in job.fragments]
    provenance = serving_provenance(job, started_at, prompt_provenance) | {
        "fragments": stored,
        "n_measured": len(job.fragments) - n_adopted,
        "n_adopted": n_adopted,
        "n_asked_again": sum(note.get("n_tries", 1) > 1 for note in notes),
        "measure_s": round(sum(note["measure_s"] for note in notes if not note["adopted"]), 3),
    }
    write_table(output, REPLIES, rows, provenance)


def serving_provenance(
    job: ServingJob, started_at: datetime, prompts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that a serving cell's file says of its making.

    ``prompts`` is the provenance of the prompts' file.
    """
    cell = job.cell
    refused = [*cell.refused, *job.refused]
    notes = list(job.notes.values())
    return {
        "cell": {
            key: getattr(cell, key)
            for key in ("sweep", "route", "model", "variant", "prompts", "digest")
        },
        "settings": {**_applied(cell), "env": cell.env, "n_probs": cell.n_probs},
        "serving": {
            **cell.serving.document(),
            "kind": cell.kind,
            "parallel": cell.parallel,
            "match": "ids" if cell.serving.speech.token_ids else "text",
            "lives": _unique(note["life"] for note in notes),
            "stops": job.stops,  # of the servers that this job started
        },
        "blocks": [block.document() for block in cell.blocks],
        "refused_blocks": refused,
        "unsupported": refused[0]["reason"] if refused and not job.fragments else None,
        "invalid_reasons": sorted({one for note in notes for one in note["invalid_reasons"]}),
        "build": job.identity,
        "model": job.inputs.model_record,
        "prompts": {"name": cell.prompts, "digest": prompts["prompt_set_digest"]},
        "machine": job.machine,
        "device": job.device,
        "device_state": job.states,  # at start and end of each life of a server
        "code_digest": job.inputs.code_digest,
        "inputs": job.inputs.planned,
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _applied(cell: ServeCell) -> dict[str, Any]:
    """Return the route's settings, without those that its server was never told."""
    settings = asdict(cell.settings)
    if cell.kind == "build":
        return settings
    told = {name for name in settings if any(f"{{{name}}}" in word for word in cell.serving.argv)}
    return {name: value if name in told else None for name, value in settings.items()}


class ServingJob:
    """One run of a cell: its fragments, and what is known of them so far."""

    def __init__(
        self, cell: ServeCell, inputs: ServeInputs, prompts: Sequence[dict[str, Any]]
    ) -> None:
        self.cell = cell
        self.inputs = inputs
        self.prompts = prompts
        self.machine = describe_machine()
        #: What is known of the device; at first of one that it may turn out to be.
        self.device: dict[str, Any] = {}
        self.launch = launch_of(cell, inputs)
        self.identity = self.launch.identity
        self.store = Store(inputs.store)
        self.refused: list[dict[str, Any]] = []
        self.fragments = list(self._plan())
        self.stops: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []
        self.rows: dict[str, pa.Table] = {}
        self.notes: dict[str, dict[str, Any]] = {}
        self.progress = Progress(
            f"{cell.name}:", sum(len(one.rounds) for one in self.fragments), "rounds"
        )
        for device in before_it_is_held(cell.serving.device, cell.serving.claim)[:1]:
            self._take_for(device)

    @property
    def missing(self) -> list[Fragment]:
        """What is still to be asked, in the order of the blocks."""
        return [fragment for fragment in self.fragments if fragment.key not in self.rows]

    def _plan(self) -> Iterator[Fragment]:
        cell = self.cell
        for block in cell.blocks:
            if reason := prompt_refusal(block, cell.serving, self.prompts):
                self.refused.append({"block": block.document(), "reason": reason})
                continue
            for index in range(len(self.prompts)):
                rounds = tuple(
                    prepare_round(
                        block,
                        round_index,
                        index,
                        self.prompts,
                        serving=cell.serving,
                        context=cell.settings.context,
                        n_probs=cell.n_probs,
                        n_tokens=cell.n_tokens,
                        seed=cell.seed,
                    )
                    for round_index in range(block.rounds)
                )
                key_inputs = self._key_inputs(block, rounds)
                yield Fragment(block, index, rounds, key_inputs, fragment_key(key_inputs))

    def _key_inputs(self, block: Block, rounds: Sequence[Prepared]) -> dict[str, Any]:
        cell = self.cell
        serving = cell.serving.document()
        for name in ("start_limit_s", "stall_s", "claim", "health", "dispatch", "weights"):
            del serving[name]  # they decide whether there is an answer, and not which
        return {
            "table": "replies",
            "block": block.document(),
            "requests": digest_of([asdict(one) for one in rounds]),
            "settings": asdict(cell.settings),
            "env": cell.env,
            "serving": serving,
            "fingerprint": self.identity["fingerprint"],
            "model": self.inputs.model_record["sha256"],
            "code": self.inputs.code_digest,
            "artefact": self.identity.get("artefact"),
            "programs": self.identity.get("programs"),
            "device": self._scope(),
        }

    def _scope(self) -> dict[str, Any]:
        return {**device_scope(self.machine), **kind_of_device(self.device)}

    def look_up(self) -> None:
        """Adopt what is stored, of the kind of unit of which all is, where there is such a kind."""
        for device in before_it_is_held(self.cell.serving.device, self.cell.serving.claim):
            self._take_for(device)
            self.take_stored()
            if not self.missing:
                return

    def know(self, held: Held | None) -> None:
        """Go by the units that are held: only what was answered on their kind counts."""
        self._take_for(identify_held(self.cell.serving.device, held))

    def _take_for(self, device: dict[str, Any]) -> None:
        """Take ``device`` for the one that answers: fragments get its keys, and no row is kept."""
        self.device = device
        self.rows.clear()
        self.notes.clear()
        self.progress.start_at(0)
        scope, fragments = self._scope(), self.fragments
        self.fragments = []
        for one in fragments:
            inputs = {**one.key_inputs, "device": scope}
            self.fragments.append(replace(one, key_inputs=inputs, key=fragment_key(inputs)))

    def take_stored(self) -> None:
        """Adopt what the store has. Of an endpoint nothing is: what answers may be another."""
        if self.cell.kind == "endpoint":
            return
        for fragment in self.fragments:
            found = self.store.get(fragment.key, REPLIES)
            if found is not None:
                rows, note = found
                self._keep(fragment, rows, {**note, "adopted": True})
                self.progress.start_at(self.progress.done + len(fragment.rounds))

    def measure_life(self, life: int, held: Held | None) -> None:
        """Start the server once and ask it for every missing fragment of that life."""
        missing = [fragment for fragment in self.missing if fragment.block.life == life]
        self.progress.start_at(self.progress.done)  # the wait for the device is no part of the rate
        with self.server(life, held) as server:
            device, units = self.cell.serving.device, () if held is None else held.units
            start = read_state(device, units)
            asyncio.run(self._ask_all(server, missing, held, life))
            self.states.append({"life": life, "start": start, "end": read_state(device, units)})

    @contextlib.contextmanager
    def server(self, life: int, held: Held | None, *, logging: bool = False) -> Iterator[Server]:
        """Start a server for a ``with`` block, and prove it gone after it.

        ``logging`` makes it log which kernels ran, where the route can.
        """
        cell = self.cell
        if cell.serving.endpoint is not None:
            with attach(
                cell.serving.endpoint,
                self.launch.probe,
                health=cell.serving.health,
                identity=Identity(props=cell.serving.props),
                stall_s=cell.serving.stall_s,
            ) as server:
                yield server
            return
        with serve(self.launch.start(self.log_of(life), held, logging)) as server:
            yield server
        assert server.proof is not None  # serve proved it
        self.stops.append({"life": life, **asdict(server.proof)})

    def log_of(self, life: int) -> Path:
        """Return where the log of a server's life is kept."""
        cell = self.cell
        return self.inputs.logs / f"{cell.digest}.{cell.route}.{cell.variant}.life{life}.log"

    async def _ask_all(
        self, server: Server, missing: Sequence[Fragment], held: Held | None, life: int
    ) -> None:
        cell = self.cell
        said = {
            "index": life,
            "start_s": round(server.start_s, 3),
            "found": server.found,
            "props": _said_of_itself(server.props),
        }
        stall_s = cell.serving.stall_s
        async with Client(server.url, cell.serving.speech, stall_s=stall_s) as client:
            for fragment in missing:
                start = time.perf_counter()
                server.note_progress()
                server.check()
                await client.wait_idle(stall_s)  # a slot may be busy with the last cell's
                n_tries, rounds = 0, []
                while n_tries < _TRIES:
                    n_tries += 1
                    rounds = [
                        (await self.ask_round(server, client, prepared), _seen(held))
                        for prepared in fragment.rounds
                    ]
                    if _was_shared(fragment.block, rounds):
                        break
                self.progress.advance(len(fragment.rounds))
                rows = self._rows(fragment, rounds)
                note = {
                    "life": said,
                    "n_tries": n_tries,
                    "invalid_reasons": [],
                    "measure_s": time.perf_counter() - start,
                    "machine": self.machine,
                    "build": self.identity,
                }
                server.check_ours()  # or these replies may be somebody else's
                if cell.kind != "endpoint" and _is_worth_keeping(fragment, rounds):
                    self.store.put(fragment.key_inputs, REPLIES, rows, note)
                self._keep(fragment, rows, {**note, "adopted": False})

    async def ask_round(self, server: Server, client: Client, prepared: Prepared) -> Round:
        """Ask one round.

        Raises RoutewiseError where a request got no reply: the server died, stands still, or
        refuses it. What was answered before is stored, and the next run goes on there.
        """
        for ask in prepared.before:
            before = await client.release([ask], self._limit_s([ask]))
            self._check_answered(server, before.fault)
            (reply,) = before.replies
            if reply.status != "ok":
                raise RoutewiseError(
                    f"{self.cell.name}: the request before a round failed: {reply.reason}",
                    f"look into the server's log in {self.inputs.logs}",
                )
        one = await client.release(prepared.asks, self._limit_s(prepared.asks))
        self._check_answered(server, one.fault)
        return one

    def _check_answered(self, server: Server, fault: str | None) -> None:
        if fault is None:
            return
        server.note_progress()  # the client has minded that: only a death is asked for
        server.check()
        tail = server.tail()
        shown = "".join(f"\n    {line}" for line in tail.splitlines())
        raise RoutewiseError(
            f"{self.cell.name}: a request got no reply: {fault}"
            + (f"\n  the last lines of the server's log:{shown}" if tail else ""),
            "run the same command again, what was answered is kept; where one pass takes longer "
            "than the route's stall_s, raise that",
        )

    def _limit_s(self, asks: Sequence[Ask]) -> float:
        """Return how long a server that does not count its passes may take for these requests."""
        slowest_s = _SLOWEST_TOKEN_S * sum(ask.n_tokens for ask in asks)
        return self.cell.serving.stall_s + slowest_s

    def _keep(self, fragment: Fragment, rows: pa.Table, note: dict[str, Any]) -> None:
        self.rows[fragment.key] = rows.replace_schema_metadata(None)
        self.notes[fragment.key] = note

    def _rows(self, fragment: Fragment, rounds: Sequence[Asked]) -> pa.Table:
        prompt = self.prompts[fragment.prompt_index]
        columns = _no_columns()
        asked = [prepared.roles for prepared in fragment.rounds]
        for index, ((one, seen), roles) in enumerate(zip(rounds, asked, strict=True)):
            for copy, reply in enumerate(one.replies):
                row = {
                    **{name: prompt[name] for name in ("prompt_index", "prompt_id", "category")},
                    **{k: v for k, v in fragment.block.document().items() if k != "rounds"},
                    "round": index,
                    "copy": copy,
                    "role": roles[copy],
                    **{name: getattr(reply, name) for name in _REPLY_COLUMNS},
                    "released_ns": one.released_ns[copy],
                    "done_ns": one.done_ns[copy],
                    "release_spread_ms": one.release_spread_ms,
                    "n_decodes": one.n_decodes,
                    "busy_per_decode": one.busy_per_decode,
                    **seen,
                }
                for name, value in row.items():
                    columns[name].append(value)
        return table_of(REPLIES, columns)


def _placed(rows: pa.Table, prompt: Mapping[str, Any]) -> pa.Table:
    """Give a fragment's rows the place and name that their prompt has in this set."""
    for name in ("prompt_index", "prompt_id", "category"):
        field = rows.schema.field(name)
        column = pa.array([prompt[name]] * rows.num_rows, field.type)
        rows = rows.set_column(rows.schema.get_field_index(name), field, column)
    return rows


def _was_shared(block: Block, rounds: Sequence[Asked]) -> bool:
    """Say whether each round was in the server with its own requests, and with no others."""
    return all(
        is_fair_witness(block.width, one.n_decodes, one.busy_per_decode) for one, _ in rounds
    )


def _is_worth_keeping(fragment: Fragment, rounds: Sequence[Asked]) -> bool:
    """Say whether a fragment may be adopted later: whole, and shared as it was meant to be.

    A round that was crowded, hardly shared or not counted stands in the cell as it is, and is
    asked again when the cell is.
    """
    whole = all(reply.status == "ok" for one, _ in rounds for reply in one.replies)
    return whole and _was_shared(fragment.block, rounds)


@contextlib.contextmanager
def held_device(cell: ServeCell) -> Iterator[Held | None]:
    """Hold the route's device for a ``with`` block; None where the route claims none.

    Raises RoutewiseError where this host does not have it.
    """
    device = None if cell.kind == "endpoint" else cell.serving.device
    with held_for_job(device, cell.serving.claim, cell.name) as held:
        yield held


def _seen(held: Held | None) -> dict[str, Any]:
    """Return the columns that say how the device was held when a round ended."""
    if held is None:
        return {"claim_wait_s": 0.0, "claim_hold_s": 0.0, "n_others": None}
    return {
        "claim_wait_s": held.wait_s,
        "claim_hold_s": held.hold_s,
        "n_others": held.count_others(),
    }


def _no_columns() -> dict[str, list[Any]]:
    return {name: [] for name in REPLIES.arrow.names}


def _said_of_itself(props: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what of ``/props`` says how the server was set; each reply says how it was asked."""
    kept = ("total_slots", "model_ftype", "build_info")
    return None if props is None else {key: props[key] for key in kept if key in props}


def _unique(lives: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for life in lives:
        found.setdefault(digest_of(life), life)
    return list(found.values())
