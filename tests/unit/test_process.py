"""Temporary folders of servers: whose job was killed goes, whose job lives stays."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest
from routewise.process import remove_stale_folders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = tmp_path / "routewise-server-abc"
    made.mkdir()
    (made / "left").write_text("by a server")
    return made


def grow_old(path: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


def test_a_dead_job_s_folder_goes(folder: Path) -> None:
    grow_old(folder)
    remove_stale_folders()
    assert not folder.exists()


def test_a_living_job_s_folder_stays(folder: Path) -> None:
    grow_old(folder)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    remove_stale_folders()
    assert folder.exists()
    os.close(lock)
    remove_stale_folders()
    assert not folder.exists()


def test_a_young_folder_and_other_folders_stay(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "somebody-else"
    other.mkdir()
    grow_old(other)
    remove_stale_folders()
    assert folder.exists()
    assert other.exists()


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("keep")
    link = tmp_path / "routewise-server-link"
    link.symlink_to(target)
    grow_old(target)
    remove_stale_folders()
    assert (target / "file").exists()
