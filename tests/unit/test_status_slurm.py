"""What cluster-generic is told of a job: only what Slurm says of it, never that Slurm is silent."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
DISABLED = "Slurm accounting storage is disabled"
NO_DATABASE = "sacct: error: Problem talking to the database: Connection refused"


def ask(repository: Path, folder: Path, **programs: tuple[int, str]) -> str:
    """Return what the script says where these programs, and no others of Slurm, are there."""
    for name in ("bash", "grep", "head", "tail"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    for name, (code, text) in programs.items():
        fake = folder / name
        to = ">&2" if code else ""
        fake.write_text(f"#!/bin/sh\nprintf '%b' {shlex.quote(text)} {to}\nexit {code}\n")
        fake.chmod(0o755)
    command = [str(folder / "bash"), str(repository / "profiles/cluster-generic/status-slurm"), "7"]
    environment = {"PATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("COMPLETED", "success"),
        ("PENDING", "running"),
        ("RUNNING", "running"),
        ("NODE_FAIL", "failed"),
        ("CANCELLED", "failed"),
    ],
)
def test_the_state_of_a_job_in_the_words_of_the_generic_executor(
    repository: Path, tmp_path: Path, state: str, said: str
) -> None:
    shown = f"JobId=7 JobName=x JobState={state} Reason=None\n"
    assert ask(repository, tmp_path, scontrol=(0, shown)) == said


@pytest.mark.parametrize("why", [AWAY, "slurm_load_jobs error: Socket timed out", ""])
def test_a_controller_that_is_away_fails_no_job(repository: Path, tmp_path: Path, why: str) -> None:
    assert ask(repository, tmp_path, scontrol=(1, why), sacct=(0, "FAILED\n")) == "running"


@pytest.mark.parametrize(
    ("sacct", "said"),
    [
        ((0, "COMPLETED\n"), "success"),
        ((0, "CANCELLED by 1000\n"), "failed"),
        ((0, "RUNNING\n"), "running"),
        ((0, ""), "failed"),  # nobody knows it
        ((1, DISABLED), "failed"),
        ((1, NO_DATABASE), "running"),
        (None, "failed"),
    ],
)
def test_of_a_job_that_the_controller_forgot_the_accounting_is_asked(
    repository: Path, tmp_path: Path, sacct: tuple[int, str] | None, said: str
) -> None:
    programs = {"scontrol": (1, FORGOTTEN), **({"sacct": sacct} if sacct else {})}
    assert ask(repository, tmp_path, **programs) == said


def test_without_slurm_it_says_so(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        ask(repository, tmp_path)
    assert "no scontrol on this host" in error.value.stderr
