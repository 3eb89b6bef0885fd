"""Locks of a killed Snakemake are removed, those of a live one are not."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from routewise.takeover import take_over

HOLDER = """
import sys
from pathlib import Path
from routewise.takeover import take_over
take_over(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Start a process that holds the folder, until its input ends or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def lock(folder: Path) -> Path:
    path = folder / ".snakemake/locks/0.input.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("results/a\n")
    return path


def test_locks_of_the_dead_are_removed(tmp_path: Path) -> None:
    process = hold(tmp_path)
    left = lock(tmp_path)
    process.kill()
    process.wait()
    assert take_over(tmp_path) == [left]
    assert not left.exists()
    assert take_over(tmp_path) == []


def test_locks_of_the_living_stay(tmp_path: Path) -> None:
    first = hold(tmp_path)
    held = lock(tmp_path)
    second = hold(tmp_path)  # both at once: neither waits, neither removes
    assert held.exists()
    first.stdin.close()  # type: ignore[union-attr]
    first.wait()
    third = hold(tmp_path)  # the second is still there
    assert held.exists()
    for process in (second, third):
        process.kill()
        process.wait()
    assert take_over(tmp_path) == [held]


def test_a_folder_that_cannot_be_written_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".snakemake").write_text("a file")
    assert take_over(tmp_path) == []


def test_locks_of_another_host_are_left_to_people(tmp_path: Path) -> None:
    """Its run may live, and a file system may keep locks of the kernel to each host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for index, (last, taken) in enumerate(
        (
            ("another-host\n00000000-0000-0000-0000-000000000000", False),
            (f"another-name\n{boot}", True),  # a container of this host
            (platform.node(), True),  # started again since
            ("", True),
        )
    ):
        folder = tmp_path / str(index)
        held = lock(folder)
        (folder / ".snakemake/routewise.lock").write_text(last)
        assert take_over(folder) == ([held] if taken else [])
        assert held.exists() is not taken


def test_a_folder_without_locks_passes_to_another_host(tmp_path: Path) -> None:
    last = tmp_path / ".snakemake/routewise.lock"
    last.parent.mkdir()
    last.write_text("another-host")
    process = hold(tmp_path)
    assert "another-host" not in last.read_text()
    held = lock(tmp_path)
    process.kill()
    process.wait()
    assert take_over(tmp_path) == [held]
