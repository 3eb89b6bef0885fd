"""What belongs to somebody else is named: which file, whose, and who was refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from routewise.errors import EXIT_NOT_MEASURED, not_allowed, report_errors


def refused(path: Path | None) -> PermissionError:
    text = os.strerror(errno.EACCES)
    return PermissionError(errno.EACCES, text, None if path is None else str(path))


def test_the_path_its_owner_and_who_was_refused_are_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    error = not_allowed(refused(tmp_path / "not" / "there"))
    assert str(tmp_path / "not" / "there") in error.problem
    owner = tmp_path.stat().st_uid
    assert f"{tmp_path} belongs to user {owner}, mode 750" in error.problem
    assert f"for user {os.geteuid()}" in error.problem
    assert "umask 002" in str(error.hint)


def test_a_refusal_that_names_nothing_is_still_told() -> None:
    assert "Permission denied" in not_allowed(refused(None)).problem


def test_a_script_says_it_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @report_errors
    def main() -> None:
        raise refused(tmp_path)

    assert main() == EXIT_NOT_MEASURED
    assert "belongs to user" in capsys.readouterr().err
