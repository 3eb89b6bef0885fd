"""A measuring process ends when the Snakemake that started it ends, however that ended.

Snakemake killed with SIGKILL leaves its jobs running: the cell, its workers and what they hold
would go on into the next run. The Snakefile announces its own process in the environment, and
every measuring process watches it from a thread.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from pathlib import Path

WATCHED = "ROUTEWISE_WATCHED_PROCESS"
EXIT_ORPHANED = 75
_PR_SET_PDEATHSIG = 1


def announce() -> None:
    """Name this process as the one that its measuring processes must not outlive."""
    os.environ[WATCHED] = f"{os.getpid()}:{start_ticks_of(os.getpid())}:{boot_id()}"


def end_with_snakemake() -> None:
    """Watch the announced process, if one is, and end this one at once when it is gone.

    Without an announcement (a cell run by hand), and with one of another host, whose processes
    nobody sees here, nothing is watched.
    """
    announced = os.environ.get(WATCHED)
    if announced is None:
        return
    parts = announced.split(":")
    if parts[2:] not in ([], [boot_id()]):
        return
    pid, start_ticks = int(parts[0]), int(parts[1])
    try:
        handle = os.pidfd_open(pid)
        alive = start_ticks_of(pid) == start_ticks
    except OSError:
        alive = False
    if not alive:
        _end()
    threading.Thread(target=_end_after, args=(handle,), daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, of process id ``parent``, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def wait_for_end(handle: int) -> None:
    """Wait until a process, known by its pidfd, has ended."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while not poll.poll():
        pass


def boot_id() -> str:
    """Return the name of this start of the host's kernel; empty where it does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def stat_fields(pid: int) -> list[str]:
    """Return ``/proc/PID/stat`` from the state on: [1] parent, [11] and [12] ticks, [19] start.

    Raises OSError where the process is gone.
    """
    # the name before it may hold spaces and brackets: counted from the last bracket
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _end_after(handle: int) -> None:
    wait_for_end(handle)
    _end()


def _end() -> None:
    print("routewise: the Snakemake that started this job is gone; stopping", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_ORPHANED)


def start_ticks_of(pid: int) -> int:
    """Return when a process began, in clock ticks since boot. Raises OSError where it is gone."""
    return int(stat_fields(pid)[19])
