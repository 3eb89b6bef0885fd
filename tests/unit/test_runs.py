"""Who runs in a working folder is known, the dead are forgotten, another host's are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from routewise import takeover
from routewise.errors import RoutewiseError
from routewise.ledger import user_name
from routewise.runs import RECORDS, begin_run, other_runs, own_run
from routewise.takeover import take_over

RUNNER = """
import sys
from pathlib import Path
from routewise.runs import begin_run
begin_run("demo", sys.argv[2:], Path(sys.argv[1]))
print("runs", flush=True)
sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a starter of processes that run in the folder until they are ended."""
    started: list[subprocess.Popen[str]] = []

    def run(*outputs: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(tmp_path), *outputs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def records(folder: Path) -> list[Path]:
    return sorted((folder / RECORDS).iterdir())


def leave(folder: Path, **changes: Any) -> Path:
    """Leave the record of a run that is not this one, with no lock on it."""
    values: dict[str, Any] = {"pid": 1, "start_ticks": 0, "outputs": ("results/a",), **changes}
    path = folder / RECORDS / "left.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(replace(own_run("demo"), **values))))
    return path


def left_lock(folder: Path) -> Path:
    path = folder / ".snakemake/locks/0.output.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("results/a\n")
    return path


def test_the_second_is_told_who_makes_the_same_files(tmp_path: Path, start: Start) -> None:
    first = start("results/a", "results/b")
    with pytest.raises(RoutewiseError, match="is making the same files") as error:
        begin_run("demo", ["results/b", "results/c"], tmp_path)
    problem = error.value.problem
    assert "(results/b)" in problem
    assert f"{user_name()} on " in problem
    assert f"process {first.pid}, since {time.strftime('%Y-', time.gmtime())}" in problem
    assert "wait for its end" in str(error.value.hint)
    assert "remove" not in str(error.value.hint)
    assert len(records(tmp_path)) == 1  # the refused one leaves nothing, the first one its own


def test_two_that_make_other_files_run_beside_each_other(tmp_path: Path, start: Start) -> None:
    first = start("results/a")
    path = begin_run("other", ["results/b"], tmp_path)
    assert [other.run.pid for other in other_runs(tmp_path) if other.run] == [first.pid]
    path.unlink()


@pytest.mark.parametrize("end", ["by itself", "killed"])
def test_the_dead_are_forgotten(tmp_path: Path, start: Start, end: str) -> None:
    process = start("results/a")
    [other] = other_runs(tmp_path)
    assert other.certain
    assert process.stdin is not None
    if end == "killed":
        process.kill()
    else:
        process.stdin.close()
    process.wait()
    assert bool(records(tmp_path)) == (end == "killed")
    assert other_runs(tmp_path) == []
    assert records(tmp_path) == []
    begin_run("demo", ["results/a"], tmp_path).unlink()


def test_a_process_id_used_again_is_not_the_run(tmp_path: Path) -> None:
    left = leave(tmp_path, pid=1, start_ticks=-5)  # process 1 lives, and began at another time
    assert other_runs(tmp_path) == []
    assert not left.exists()


def test_a_run_of_before_a_boot_is_dead(tmp_path: Path) -> None:
    lock = left_lock(tmp_path)
    left = leave(tmp_path, boot="another-boot")
    assert take_over(tmp_path) == [lock]
    assert not left.exists()


def test_a_run_of_another_host_is_never_taken_for_dead(tmp_path: Path) -> None:
    lock = left_lock(tmp_path)
    left = leave(tmp_path, boot="another-boot", host="node7", pid=4242, user="ann")
    assert take_over(tmp_path) == []
    assert lock.exists()
    [other] = other_runs(tmp_path)
    assert not other.certain
    with pytest.raises(RoutewiseError, match="may be making the same files") as error:
        begin_run("demo", ["results/a"], tmp_path)
    assert "ann on node7, process 4242, since 20" in error.value.problem
    assert "ps -p 4242" in str(error.value.hint)
    assert f"remove {left}" in str(error.value.hint)
    left.unlink()  # as the message says
    os.close(takeover._HELD.pop())  # as the end of the process that looked first
    assert take_over(tmp_path) == [lock]
    begin_run("demo", ["results/a"], tmp_path).unlink()


def test_clocks_that_differ_change_nothing(tmp_path: Path) -> None:
    for skew_s in (-86400.0, 86400.0):
        left = leave(tmp_path, boot="b", host="node7", since_s=time.time() + skew_s)
        assert len(other_runs(tmp_path)) == 1
        left.unlink()


def test_another_machine_of_the_same_name_is_no_earlier_boot(tmp_path: Path) -> None:
    leave(tmp_path, boot="another-boot", machine="a clone")
    [other] = other_runs(tmp_path)
    assert not other.certain


@pytest.mark.parametrize(
    "said", ["{", "[]", '{"since_s": "now"}', '{"since_s": 1e20}', '{"since_s": null}', None]
)
def test_a_record_that_cannot_be_read_may_be_a_run(tmp_path: Path, said: str | None) -> None:
    lock = left_lock(tmp_path)
    left = leave(tmp_path, boot="b", host="node7")
    document = json.loads(left.read_text())
    if said is None:
        document["pid"] = "many"
    elif said.startswith('{"'):
        document |= json.loads(said)
    left.write_text(json.dumps(document) if said not in ("{", "[]") else str(said))
    [other] = other_runs(tmp_path)
    assert (other.run, other.certain) == (None, False)
    assert take_over(tmp_path) == []
    assert lock.exists()
    with pytest.raises(RoutewiseError, match="cannot be read") as error:
        begin_run("demo", ["results/z"], tmp_path)
    assert f"remove {left}" in str(error.value.hint)
    assert records(tmp_path) == [left]


def test_a_record_of_a_newer_routewise_is_read(tmp_path: Path) -> None:
    left = leave(tmp_path, boot="b", host="node7")
    left.write_text(json.dumps({**json.loads(left.read_text()), "purpose": "new"}))
    [other] = other_runs(tmp_path)
    assert other.run is not None
    assert other.run.host == "node7"
