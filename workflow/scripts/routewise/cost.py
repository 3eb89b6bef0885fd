"""The cost sweep: the time of a pass by width, routes interleaved in one job.

Each route has a worker process of its own (two builds cannot share one), with the model loaded
and the same tokens in its cache. The job releases them in turn, A B A B, one pass at a time: the
others sleep, so that no arm pays for another's spinning threads. Before it counts, every width is
warmed up. Every sample is kept. What others used of the processors is measured for each round,
and a round in which they used more than :data:`CONTENDED_CORES` is marked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from routewise.claim import ClaimSpec, Held
from routewise.device import read_state
from routewise.engine import Context, Settings, check_identity, load_engine
from routewise.errors import RoutewiseError
from routewise.gguf_check import GgufHeader, read_header
from routewise.hold import held_for_job, identify_held
from routewise.machine import (
    clock_mhz,
    describe_machine,
    other_cpu_share,
    read_load,
    set_engine_environment,
)
from routewise.progress import Progress
from routewise.replay import prefill
from routewise.schema.cost import COST
from routewise.schema.file import table_of, write_table
from routewise.watch import end_with_parent

#: A round is marked where others used more than this many cores' worth of time.
CONTENDED_CORES = 0.1
#: Threads of an OpenMP build spin for about a millisecond after a pass before they sleep.
_SETTLE_S = 0.005


@dataclass(frozen=True)
class Arm:
    """One route of a cost cell; ``claim`` is the name under which its device is held."""

    route: str
    build: Path  # folder with lib/ and build.json
    settings: Settings
    env: dict[str, str]
    device: str = "cpu"
    claim: str | None = None


@dataclass(frozen=True)
class CostCell:
    """What one cost job measures: one model, its routes interleaved."""

    model: str
    digest: str
    arms: tuple[Arm, ...]
    widths: tuple[int, ...]
    depth: int
    rounds: int
    warmup: int
    claims: tuple[ClaimSpec, ...] = ()  # of the arms' devices, whole; in the order of their names
    seed: int = 1

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> CostCell:
        """Read a cell back from the JSON value that :meth:`document` made."""
        arms = tuple(
            Arm(**{**a, "build": Path(a["build"]), "settings": Settings(**a["settings"])})
            for a in document["arms"]
        )
        claims = tuple(map(ClaimSpec.from_document, document["claims"]))
        widths = tuple(document["widths"])
        return cls(**{**document, "arms": arms, "widths": widths, "claims": claims})

    def document(self) -> dict[str, Any]:
        """Return the cell as plain values, for JSON."""
        arms = [{**asdict(arm), "build": str(arm.build)} for arm in self.arms]
        return {**asdict(self), "arms": arms, "widths": list(self.widths)}


class Worker:
    """One route's process, as the job sees it: one JSON line out, one back."""

    def __init__(self, arm: Arm, command: Sequence[str]) -> None:
        self.arm = arm
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; RoutewiseError where the worker failed."""
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None:
            raise ValueError("a worker is started with pipes")
        try:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            if code < 0:
                raise RoutewiseError(
                    f"the worker of route {self.arm.route} was killed by "
                    f"{signal.Signals(-code).name}",
                    "something outside ended it (a kill, or out of memory: see dmesg); run again",
                )
            raise RoutewiseError(
                f"the worker of route {self.arm.route} ended (code {code})",
                "its message stands above; run the same command again",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RoutewiseError(f"route {self.arm.route}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the worker and wait until it is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve_arm(arm: Arm, model: Path, depth: int, width_max: int, seed: int, parent: int) -> None:
    """Be a worker: open the arm's build and model, then time the passes asked for on stdin."""
    end_with_parent(parent)
    set_engine_environment(arm.env)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else writes among the answers

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")

    try:
        engine = load_engine(arm.build / "lib")
        build = check_identity(engine, arm.build / "build.json")
        opened = engine.open_model(model, arm.settings.gpu_layers)
        random = np.random.default_rng(seed)
        tokens = random.integers(0, opened.n_vocab, depth + width_max).tolist()
        context = opened.open_context(arm.settings)
        prefill(context, tokens[:depth], arm.settings.micro_batch)
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "describe":
                bandwidth = engine.copy_bandwidth(arm.settings.gpu_layers > 0, arm.settings.threads)
                answer({"build": build, "readback": context.readback, "bandwidth": bandwidth})
            elif request["do"] == "uncovered":
                answer({"uncovered": engine.uncovered()})
            else:
                answer({"pass_ns": _time_pass(context, tokens, depth, request["width"])})
    except RoutewiseError as error:
        answer({"error": str(error)})


def _time_pass(context: Context, tokens: list[int], depth: int, width: int) -> int:
    pass_ns = context.decode(tokens[depth : depth + width], range(depth, depth + width))
    context.remove(0, depth)
    return pass_ns


@contextmanager
def _claims(cell: CostCell) -> Iterator[list[Held]]:
    with ExitStack() as stack:
        label = f"cost {cell.model}"
        for arm in cell.arms:  # whether the device is there is asked of all, before any is held
            stack.enter_context(held_for_job(arm.device, None, label))
        yield [
            held
            for spec in cell.claims
            if (held := stack.enter_context(held_for_job(None, spec, label))) is not None
        ]


def identify_arms(cell: CostCell, claims: Sequence[Held]) -> dict[str, dict[str, Any]]:
    """Return what is known of each arm's device, by route: of the units that are held for it."""
    held = {one.device: one for one in claims}
    return {
        arm.route: identify_held(arm.device, held.get(arm.claim) if arm.claim else None)
        for arm in cell.arms
    }


def read_states(cell: CostCell, claims: Sequence[Held]) -> dict[str, Any]:
    """Return the state of each device of the arms now, by device; None where nobody can tell."""
    held = {one.device: one.units for one in claims}
    return {arm.device: read_state(arm.device, held.get(arm.claim or "", ())) for arm in cell.arms}


def bytes_read(header: GgufHeader, depth: int, kv_type: str) -> int | None:
    """Return the bytes that a pass behind ``depth`` tokens must read: weights, keys and values.

    Of an embedding table only some rows are gathered, so it counts only where it is the output
    head too. None for models of which not every weight is read by every pass (experts), and where
    the header does not say what the cache holds.
    """
    name = header.architecture
    told = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items()}
    names = {tensor.name for tensor in header.tensors}
    n_heads, n_embd = told.get("attention.head_count"), told.get("embedding_length")
    n_kv = told.get("attention.head_count_kv", n_heads)
    n_layer = header.n_layer
    if told.get("expert_count") or not (
        isinstance(n_layer, int)
        and isinstance(n_heads, int)
        and isinstance(n_embd, int)
        and isinstance(n_kv, int)
        and n_heads > 0
    ):
        return None
    gathered = {"token_embd.weight"} if "output.weight" in names else set()
    weights = sum(tensor.n_bytes for tensor in header.tensors if tensor.name not in gathered)
    head = n_embd // n_heads
    length = told.get("attention.key_length", head) + told.get("attention.value_length", head)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kv_type.upper()]]
    return weights + n_layer * depth * n_kv * length * block_bytes // block


@contextmanager
def _workers(cell: CostCell, model: Path, script: Path) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        workers = []
        for index, arm in enumerate(cell.arms):
            command = [sys.executable, str(script), "--cell", json.dumps(cell.document())]
            command += ["--model", str(model), "--worker", str(index), "--parent", str(os.getpid())]
            worker = Worker(arm, command)
            stack.callback(worker.close)
            workers.append(worker)
        yield workers


def measure_cost(
    cell: CostCell,
    model: Path,
    model_record: dict[str, Any],
    code_digest: str,
    output: Path,
    script: Path,
    planned: Mapping[str, Any] | None = None,
) -> None:
    """Measure a cost cell and write it to ``output``; ``script`` is what a worker is started by.

    ``planned`` are the inputs of the cell as planned, for a later plan to read.

    The devices of all arms are held for it, so that nobody else who claims them runs beside it.
    """
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        claims = stack.enter_context(_claims(cell))
        for held in claims:
            os.environ.update(held.environment)  # the workers learn from it which units are theirs
        devices = identify_arms(cell, claims)
        states = {"start": read_states(cell, claims)}
        workers = stack.enter_context(_workers(cell, model, script))
        started_at = datetime.now(UTC)
        described = {w.arm.route: w.ask({"do": "describe"}) for w in workers}
        header = read_header(model)
        floors = {
            arm.route: {
                "read_bytes": bytes_read(header, cell.depth, arm.settings.kv_type),
                "copy_bytes_per_s": described[arm.route]["bandwidth"],
            }
            for arm in cell.arms
        }
        for width in cell.widths:
            for _ in range(cell.warmup):
                for worker in workers:
                    worker.ask({"do": "pass", "width": width})
        pids = [os.getpid(), *(worker.pid for worker in workers)]
        random = np.random.default_rng(cell.seed)
        progress = Progress(f"cost {cell.model}:", cell.rounds, "rounds")
        for round_index in range(cell.rounds):
            before = read_load(pids)
            taken = _one_round(cell, workers, round_index, random, len(samples))
            share = other_cpu_share(before, read_load(pids))
            load_1min, mhz = os.getloadavg()[0], clock_mhz()
            for sample in taken:
                sample |= {
                    "other_cpu_share": share,
                    "contended": share > CONTENDED_CORES,
                    "load_1min": load_1min,
                    "clock_mhz": mhz,
                    **floors[sample["route"]],
                }
            samples += taken
            progress.advance(1)
        progress.finish()
        states["end"] = read_states(cell, claims)
        uncovered = {w.arm.route: w.ask({"do": "uncovered"})["uncovered"] for w in workers}
    columns = {key: [sample[key] for sample in samples] for key in samples[0]}
    provenance = {
        "cell": {
            "sweep": "cost",
            "routes": [arm.route for arm in cell.arms],
            "model": cell.model,
            "digest": cell.digest,
        },
        "settings": {
            "depth": cell.depth,
            "rounds": cell.rounds,
            "warmup": cell.warmup,
            "routes": {arm.route: {**asdict(arm.settings), "env": arm.env} for arm in cell.arms},
        },
        "readback": {route: said["readback"] for route, said in described.items()},
        "builds": {route: said["build"] for route, said in described.items()},
        "coverage_report": "\n".join(sorted({text for text in uncovered.values() if text})),
        "invalid_reasons": [],
        "model": model_record,
        "machine": describe_machine(),
        "device": devices,
        "device_state": states,
        "claims": [
            {"device": held.device, "wait_s": held.wait_s, "hold_s": held.hold_s} for held in claims
        ],
        "code_digest": code_digest,
        "inputs": dict(planned or {}),
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_table(output, COST, table_of(COST, columns), provenance)


def _one_round(
    cell: CostCell,
    workers: list[Worker],
    round_index: int,
    random: np.random.Generator,
    order: int,
) -> list[dict[str, Any]]:
    """Time every width once on every route; the routes' order turns round from round to round."""
    turn = workers if round_index % 2 == 0 else workers[::-1]
    taken: list[dict[str, Any]] = []
    for width in random.permutation(cell.widths).tolist():
        for worker in turn:
            time.sleep(_SETTLE_S)
            pass_ns = worker.ask({"do": "pass", "width": width})["pass_ns"]
            taken.append(
                {
                    "route": worker.arm.route,
                    "model": cell.model,
                    "width": width,
                    "round": round_index,
                    "order": order + len(taken),
                    "depth": cell.depth,
                    "pass_ns": pass_ns,
                }
            )
    return taken
