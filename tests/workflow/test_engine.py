"""One process holds one build, and it is the one that was asked for; bad numbers are no verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from routewise.gguf_check import check_gguf
from routewise.plan import CellPlan, StudyPlan, plan_study
from routewise.study import check_study
from small_gguf import make_gguf
from workbench import REPOSITORY, TIMEOUT_S, Bench, Outcome

from .conftest import STOCK, MakeBench

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

MIB = 2**20


def plan_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> StudyPlan:
    """Plan a working folder's study as its Snakefile does."""
    monkeypatch.chdir(bench.folder)
    return plan_study(check_study(bench.study, "study.yaml"), Path("results"), REPOSITORY)


def replay_command(
    plan: StudyPlan, variant: str, output: Path, build: Path | None = None
) -> list[str]:
    """Return the command of one replay cell, as its rule calls it, into a store of its own."""
    [cell] = [c for c in plan.cells.values() if c.cell.variant == variant]
    assert isinstance(cell, CellPlan)
    command = [sys.executable, str(REPOSITORY / "workflow/scripts/measure_replay.py")]
    options: dict[str, Any] = {
        "cell": cell.document,
        "build": build or plan.builds[cell.build].engine_dir,
        "model": plan.models[cell.cell.model].path,
        "prompts": cell.prompts.path,
        "store": output.parent / "store",
        "code-digest": plan.code["measure_replay"],
        "output": output,
    }
    if cell.plain is not None:
        options["plain"] = cell.plain
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


def run(command: list[str], folder: Path, **environment: str) -> Outcome:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Outcome(done.returncode, done.stdout)


def refused(outcome: Outcome, *parts: str) -> None:
    assert outcome.code == 2, outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    for part in parts:
        assert part in outcome.text, outcome.text


@pytest.fixture
def another_build(stock: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the stock build's folder."""
    folder = plan_of(stock, monkeypatch).builds[STOCK].engine_dir
    return Path(shutil.copytree(folder, tmp_path / "another"))


# -------------------------------------------------------------------------------- the right build

TWO_BUILDS = """
import sys
from pathlib import Path
from routewise.engine import load_engine
from routewise.errors import report_errors

@report_errors
def main():
    first = load_engine(Path(sys.argv[1]))
    assert load_engine(Path(sys.argv[1])) is first
    load_engine(Path(sys.argv[2]))
    print("both loaded")

raise SystemExit(main())
"""


def test_two_builds_in_one_process_are_refused(
    stock: Bench, another_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (plan_of(stock, monkeypatch).builds[STOCK].engine_dir / "lib").resolve()
    outcome = run(
        [sys.executable, "-c", TWO_BUILDS, str(first), str(another_build / "lib")], stock.folder
    )
    refused(
        outcome,
        f"{another_build / 'lib'}: this process already holds the build in {first}",
        "use one process for each build",
    )
    assert "both loaded" not in outcome.text


def test_a_build_measures_by_hand(
    stock: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands below differ from this one in one thing each."""
    output = tmp_path / "cell.parquet"
    plan = plan_of(stock, monkeypatch)
    assert run(replay_command(plan, "w4", output), stock.folder).check()
    kept = pq.read_table(stock.cells()["replay.cpu-stock.small.w4"])
    assert pq.read_table(output).equals(kept)


def test_a_library_with_one_byte_changed_is_refused(
    stock: Bench, another_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [library] = (another_build / "lib").glob("libggml-cpu.so*")
    content = bytearray(library.read_bytes())
    place = content.index(b"ggml_")  # some name: the library still loads and computes
    content[place] ^= 0x20
    text = content.find(b"GGML_ASSERT(")
    if text > 0:  # better a message that nobody reads
        content[place] ^= 0x20
        content[text] ^= 0x20
    library.write_bytes(content)
    output = tmp_path / "cell.parquet"
    command = replay_command(plan_of(stock, monkeypatch), "w4", output, another_build)
    refused(run(command, stock.folder), "build.json: fingerprint is", "delete", "run again")
    assert not output.exists()


def test_a_document_of_another_build_is_refused(
    stock: Bench, another_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads((another_build / "build.json").read_text())
    document["identity"] = "0" * 64
    (another_build / "build.json").write_text(json.dumps(document))
    output = tmp_path / "cell.parquet"
    command = replay_command(plan_of(stock, monkeypatch), "w4", output, another_build)
    refused(run(command, stock.folder), "build.json: identity is 0000")
    assert not output.exists()


def test_a_preloaded_library_is_refused(
    stock: Bench, another_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "cell.parquet"
    command = replay_command(plan_of(stock, monkeypatch), "w4", output)
    [stranger] = (another_build / "lib").glob("libggml-base.so*")
    outcome = run(command, stock.folder, LD_PRELOAD=str(stranger))
    refused(outcome, str(stranger), "LD_PRELOAD")
    assert not output.exists()


def test_libraries_on_the_search_path_are_refused_or_not_used(
    stock: Bench, another_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever the linker prefers, what is measured is the build that was asked for."""
    output = tmp_path / "cell.parquet"
    command = replay_command(plan_of(stock, monkeypatch), "w4", output)
    outcome = run(command, stock.folder, LD_LIBRARY_PATH=str(another_build / "lib"))
    if outcome.code:
        refused(outcome, "mapped instead of the library in", "unset LD_LIBRARY_PATH")
        assert not output.exists()
    else:
        kept = pq.read_table(stock.cells()["replay.cpu-stock.small.w4"])
        assert pq.read_table(output).equals(kept)


def test_a_build_without_its_shim_is_named(
    stock: Bench, another_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (another_build / "lib/libroutewise_shim.so").unlink()
    command = replay_command(plan_of(stock, monkeypatch), "w4", tmp_path / "c", another_build)
    refused(run(command, stock.folder), "libroutewise_shim.so: no such library", "try:")


# ------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_makes_rows_invalid(
    session_bench: MakeBench, stock_study: dict[str, Any], tmp_path: Path, value: float
) -> None:
    """One row of the head holds it: every logits row has one bad entry, equal in both arms."""
    broken = make_gguf(tmp_path / "broken.gguf", tokenizer="tiny")
    [head] = [t for t in check_gguf(broken).tensors if t.name == "output.weight"]
    with broken.open("r+b") as stream:
        stream.seek(head.offset + 7 * 256 * 2)
        stream.write(np.float16(value).tobytes())
    bench = session_bench(stock_study)
    bench.study["models"] = {"small": {"kind": "path", "path": str(broken)}}
    bench.snakemake("results/stock/receipt.json").check()
    plain = pq.read_table(bench.cells()["replay.cpu-stock.small.plain"])
    assert set(plain["status"].to_pylist()) == {"invalid"}
    for variant in ("w1", "w4"):
        rows = pq.read_table(bench.cells()[f"replay.cpu-stock.small.{variant}"])
        assert set(rows["status"].to_pylist()) == {"invalid"}
        assert set(rows["bits_equal"].to_pylist()) == {None}
    receipt = bench.receipt
    assert {claim["verdict"] for claim in receipt["claims"]} == {"invalid"}
    assert "104 of 104 rows hold a NaN or an infinity" in receipt["claims"][0]["reasons"]
    assert {control["verdict"] for control in receipt["controls"]} == {"invalid"}
    assert receipt["claims"][0]["n"]["positions"] == 0
    assert bench.snakemake("check").code != 0


# ---------------------------------------------------------------------------------------- memory

ENGINE_ALONE = """
import json, re, sys
from pathlib import Path
from routewise.engine import Settings, load_engine

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = resident()
model = load_engine(Path(sys.argv[1])).open_model(Path(sys.argv[2]))
context = model.open_context(Settings(**json.loads(sys.argv[3])))
tokens = list(range(3, 19))
context.decode(tokens, range(16))
for step in range(32):
    context.decode([5], [16 + step])
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print("engine KiB:", peak - before)
"""

#: Runs a script and tells its peak. What wait4() tells counts the parent's pages at the fork too.
WITH_PEAK = """
import re, runpy, sys
from pathlib import Path

sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    print("peak KiB:", peak)
"""


def test_the_harness_adds_little_memory_to_the_engine(
    session_bench: MakeBench,
    stock_study: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vocabulary of 152k and 256 positions: under 600 MiB, Python and all libraries included."""
    model = make_gguf(tmp_path / "wide.gguf", n_vocab=152_064, n_layer=1, tied=True)
    prompt = {"id": "p", "category": "ids", "n_tokens": 256, "token_ids": [*range(3, 19)]}
    bench = session_bench(stock_study, [prompt, {**prompt, "id": "q", "token_ids": [5, 6]}])
    bench.study["models"] = {"small": {"kind": "path", "path": str(model)}}
    plan = plan_of(bench, monkeypatch)
    plain = next(cell for cell in plan.cells.values() if cell.cell.variant == "plain")
    bench.snakemake(str(plain.path)).check()

    engine = plan.builds[STOCK].engine_dir / "lib"
    settings = json.dumps(vars(plain.cell.settings))
    alone = run(
        [sys.executable, "-c", ENGINE_ALONE, str(engine), str(model), settings], bench.folder
    )
    engine_kib = int(alone.check().text.rpartition("engine KiB:")[2])
    assert engine_kib > 152_064 * 256 * 2 / 1024 / 2  # the weights were counted

    cell = replay_command(plan, "w4", tmp_path / "cell.parquet")
    watched = run([cell[0], "-c", WITH_PEAK, *cell[1:]], bench.folder).check()
    rows = pq.read_table(tmp_path / "cell.parquet")
    assert rows.num_rows == 2 * 256
    added = (int(watched.text.rpartition("peak KiB:")[2]) - engine_kib) / 1024
    print(f"engine {engine_kib / 1024:.0f} MiB, harness adds {added:.0f} MiB")
    assert added < 600, f"the harness adds {added:.0f} MiB"


# ------------------------------------------------------------------------------------ contention


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Keep every core busy with something else."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    time.sleep(0.2)
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("busy_machine")
def test_samples_of_a_busy_machine_are_marked(
    session_bench: MakeBench, stock_study: dict[str, Any]
) -> None:
    bench = session_bench(stock_study)
    bench.study["routes"][STOCK]["threads"] = 1
    bench.study["sweeps"] = {
        "cost": {
            "routes": [STOCK],
            "models": ["small"],
            "widths": [1, 4, 16],
            "depth": 64,
            "rounds": 12,
            "warmup": 1,
        }
    }
    outcome = bench.snakemake("results/stock/receipt.json").check()
    rows = pq.read_table(bench.cells()["cost.small"])
    assert rows.num_rows == 3 * 12
    contended = rows["contended"].to_pylist()
    shares = rows["other_cpu_share"].to_pylist()
    assert [share > 0.1 for share in shares] == contended
    assert sum(contended) > 0.8 * len(contended), shares
    for row in bench.receipt["price"]:
        assert row["n"] + row["n_contended"] == 12
        assert row["n"] < 5
        assert row["ratio"] is None or row["n"] > 0
        assert "quiet" in row["note"], outcome.text
