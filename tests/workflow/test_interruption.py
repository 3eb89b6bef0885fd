"""Killed at any moment, a run leaves no process and no torn file, and the next one goes on.

Snakemake and its jobs are killed with SIGKILL at seeded random moments while cells are measured;
in the end every cell holds the rows of a run that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from workbench import Bench, eventually, provenance_of

from .conftest import STOCK, MakeBench

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

N_KILLS = 10
MEASURING = "measure_replay.py"
RECEIPT = "results/long/receipt.json"


@pytest.fixture(scope="module")
def long_study(stock_study: dict[str, Any]) -> dict[str, Any]:
    """Return a study of many cells, two of which run at a time."""
    study = {**stock_study, "study": "long"}
    route = {**stock_study["routes"][STOCK], "threads": 1}
    replay = {
        **stock_study["sweeps"]["replay"],
        "widths": [2, 3, 4, 8],
        "shapes": ["ragged", "rollback", "neighbours"],
        "neighbours": 3,
    }
    return {**study, "routes": {STOCK: route}, "sweeps": {"replay": replay}}


@pytest.fixture(scope="module")
def long_prompts() -> list[dict[str, Any]]:
    """Return a prompt set of many fragments."""
    return [
        {
            "id": f"p{index}",
            "category": "ids",
            "n_tokens": 160,
            "token_ids": [(7 * index + 3 * place) % 290 + 3 for place in range(20 + 20 * index)],
        }
        for index in range(12)
    ]


@pytest.fixture(scope="module")
def undisturbed(
    session_bench: MakeBench, long_study: dict[str, Any], long_prompts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the rows of every cell of a run that nobody disturbed."""
    bench = session_bench(long_study, long_prompts)
    bench.snakemake(RECEIPT).check()
    return rows_of(bench)


@pytest.fixture
def bench(
    session_bench: MakeBench, long_study: dict[str, Any], long_prompts: list[dict[str, Any]]
) -> Bench:
    """Return a fresh working folder of the long study, up to the token ids."""
    return session_bench(long_study, long_prompts)


def rows_of(bench: Bench) -> dict[str, Any]:
    """Return the rows of every cell, the provenance aside (it holds times)."""
    return {
        name: pq.read_table(path).replace_schema_metadata(None)
        for name, path in bench.cells().items()
    }


def check_files(bench: Bench) -> None:
    """Every Parquet file is whole; what was half written has a hidden name."""
    for path in bench.results.rglob("*.parquet"):
        pq.read_table(path)
        assert provenance_of(path)["schema_version"] == 1
    for path in bench.results.rglob("*.part"):
        assert path.name.startswith(".")


def check_equal(bench: Bench, undisturbed: dict[str, Any]) -> None:
    found = rows_of(bench)
    assert list(found) == list(undisturbed)
    for name, rows in undisturbed.items():
        assert found[name].equals(rows), f"{name}: other rows after interruptions"


def fragments_of(bench: Bench) -> list[Path]:
    return sorted((bench.results / "store").glob("*/*.parquet"))


def forget(bench: Bench) -> None:
    """Remove all that was measured, and what was made of it (else nothing is left to do)."""
    for name in ("cells", "store", bench.study["study"]):
        shutil.rmtree(bench.results / name, ignore_errors=True)


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_ten_kills_and_the_rows_are_those_of_an_undisturbed_run(
    bench: Bench, undisturbed: dict[str, Any]
) -> None:
    moments = random.Random(2)
    kills = 0
    fragments = 0
    while kills < N_KILLS:
        with bench.running(RECEIPT) as run:
            if not run.wait_for(MEASURING):
                run.wait().check()
                # finished between two kills: begin again, so that each kill meets a measuring run
                forget(bench)
                fragments = 0
                continue
            time.sleep(moments.uniform(0, 2))
            if run.over:
                continue
            victims = [run.process.pid]
            if kills % 2:  # Snakemake alone, or its jobs at the same moment
                victims = [*bench.processes(MEASURING), *victims]
            kill(*victims)
            assert run.process.wait() == -signal.SIGKILL
            bench.wait_until_none_is_left()
        kills += 1
        check_files(bench)
        kept = len(fragments_of(bench))
        assert kept >= fragments  # nothing whole is lost
        fragments = kept
    bench.snakemake(RECEIPT).check()
    check_files(bench)
    check_equal(bench, undisturbed)
    assert bench.jobs_left(RECEIPT) == {}
    forget(bench)  # and a run after this one would measure again, as the loop above relies on
    assert bench.jobs_left(RECEIPT)["measure_replay"] == len(undisturbed) - 1


def test_a_cell_does_not_outlive_its_snakemake(
    session_bench: MakeBench, stock_study: dict[str, Any]
) -> None:
    """Of work for a minute and more, a job whose Snakemake is killed leaves most undone."""
    prompts = [
        {"id": f"p{index}", "category": "ids", "n_tokens": 250, "token_ids": [index % 300, 5, 6]}
        for index in range(600)
    ]
    bench = session_bench(stock_study, prompts)
    with bench.running(RECEIPT.replace("long", "stock")) as run:
        eventually(lambda: bool(fragments_of(bench)) or run.over, 600)
        kill(run.process.pid)
        bench.wait_until_none_is_left()
    # 300 token ids stand there twice, and are measured once
    assert 0 < len(fragments_of(bench)) < 300
    assert not bench.cells()
    check_files(bench)


def test_a_killed_job_fails_the_run_and_the_next_one_adopts_its_prompts(
    bench: Bench, undisturbed: dict[str, Any]
) -> None:
    with bench.running(RECEIPT) as run:
        eventually(lambda: bool(fragments_of(bench)) or run.over, 600)
        kill(*bench.processes(MEASURING))
        outcome = run.wait()
    assert outcome.code != 0
    assert "Traceback" not in outcome.text
    bench.wait_until_none_is_left()
    check_files(bench)
    kept = fragments_of(bench)
    assert 0 < len(kept) < 12, "the plain cell was to be killed in the middle"
    assert not bench.cells()
    dates = {path: path.stat().st_mtime_ns for path in kept}
    bench.snakemake(RECEIPT).check()
    check_equal(bench, undisturbed)
    plain = provenance_of(bench.cells()["replay.cpu-stock.small.plain"])
    assert (plain["n_adopted"], plain["n_measured"]) == (len(kept), 12 - len(kept))
    assert {path: path.stat().st_mtime_ns for path in kept} == dates


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_control_c_ends_everything_and_the_next_run_goes_on(
    sign: signal.Signals, bench: Bench, undisturbed: dict[str, Any]
) -> None:
    with bench.running(RECEIPT) as run:
        assert run.wait_for(MEASURING)
        time.sleep(1)
        os.killpg(run.process.pid, sign)
        outcome = run.wait()
        assert outcome.code != 0
        bench.wait_until_none_is_left()
    assert "Traceback" not in outcome.text, outcome.text
    assert "the same command goes on from there" in outcome.text
    check_files(bench)
    bench.snakemake(RECEIPT).check()
    check_equal(bench, undisturbed)


def test_a_killed_cost_job_takes_its_workers_with_it(chain: Bench, tmp_path: Path) -> None:
    """Two worker processes, one build in each; none outlives Snakemake or the job."""
    bench = chain.copy(tmp_path / "copy")
    bench.study["sweeps"]["cost"]["rounds"] = 100_000
    with bench.running() as run:
        eventually(lambda: len(bench.processes("--worker")) == 2 or run.over, 600)
        workers = bench.processes("--worker")
        assert len(workers) == 2, run.wait().text
        eventually(lambda: all(builds_mapped(pid) for pid in workers), 120)
        mapped = [builds_mapped(pid) for pid in workers]
        assert [len(builds) for builds in mapped] == [1, 1]
        assert mapped[0] != mapped[1]
        kill(run.process.pid)
        bench.wait_until_none_is_left()
    with bench.running() as run:
        eventually(lambda: len(bench.processes("--worker")) == 2 or run.over, 600)
        [job] = {parent_of(pid) for pid in bench.processes("--worker")}
        kill(job)
        outcome = run.wait()
        assert outcome.code != 0
        bench.wait_until_none_is_left()
    with bench.running() as run:
        eventually(lambda: len(bench.processes("--worker")) == 2 or run.over, 600)
        kill(bench.processes("--worker")[0])
        outcome = run.wait()
        assert outcome.code != 0
        assert "the worker of route cpu-" in outcome.text
        assert "Traceback" not in outcome.text
        bench.wait_until_none_is_left()
    assert not list(bench.results.glob("cells/*/.cost*"))


def test_a_killed_build_leaves_no_compiler(
    session_bench: MakeBench, stock_study: dict[str, Any]
) -> None:
    bench = session_bench(stock_study)
    for name in ("builds", "work"):  # nothing was compiled here
        (bench.results / name).unlink()
    log = bench.results / "logs/build_engine"
    with bench.running(RECEIPT.replace("long", "stock")) as run:
        eventually(
            lambda: any("] Building" in p.read_text() for p in log.glob("*")) or run.over, 600
        )
        assert not run.over, run.wait().text
        kill(run.process.pid)
        bench.wait_until_none_is_left()
    assert not list(bench.results.glob("builds/*/build.json"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def builds_mapped(pid: int) -> set[str]:
    """Return the build folders of the llama.cpp libraries that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = [Path("/" + line.partition("/")[2]) for line in maps if "/" in line]
    return {str(path.parent) for path in paths if path.name.startswith(("libggml", "libllama"))}
