"""A file system without locks is named, with what to use instead."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from routewise.errors import RoutewiseError
from routewise.ledger import Ledger
from routewise.lock import WITHOUT_LOCKS, take_lock
from routewise.runs import begin_run
from routewise.takeover import take_over


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.fixture
def handle(tmp_path: Path) -> int:
    return os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)


def test_a_lock_is_a_lock(handle: int, tmp_path: Path) -> None:
    take_lock(handle, fcntl.LOCK_EX, tmp_path, "never said")
    other = os.open(tmp_path / "file", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        take_lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB, tmp_path, "never said")


@pytest.mark.parametrize("number", sorted(WITHOUT_LOCKS))
def test_the_folder_and_what_else_to_use_are_named(
    handle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    without_locks(monkeypatch, number)
    with pytest.raises(RoutewiseError, match="has no locks") as error:
        take_lock(handle, fcntl.LOCK_EX, tmp_path, "use another")
    assert str(tmp_path) in error.value.problem
    assert error.value.hint == "use another"


def test_another_fault_stays_what_it_is(
    handle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        take_lock(handle, fcntl.LOCK_EX, tmp_path, "never said")


def test_claims_name_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path, "routewise-cuda.claims")
    without_locks(monkeypatch, errno.ENOLCK)
    with pytest.raises(RoutewiseError, match="has no locks") as error, ledger.locked():
        pass
    assert str(tmp_path) in error.value.problem
    assert "ROUTEWISE_CLAIMS" in str(error.value.hint)


def test_a_run_is_refused_and_a_look_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".snakemake/locks/0.input.lock"
    left.parent.mkdir(parents=True)
    left.write_text("results/a\n")
    without_locks(monkeypatch, errno.ENOLCK)
    assert take_over(tmp_path) == []
    assert left.exists()
    with pytest.raises(RoutewiseError, match="has no locks") as error:
        begin_run("demo", ["results/a"], tmp_path)
    assert str(tmp_path) in error.value.problem
    assert "local disk" in str(error.value.hint)
    assert not list((tmp_path / ".snakemake/routewise").iterdir())
