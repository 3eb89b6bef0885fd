"""The keeper of a server: a process of its own, between the job and the server that it started.

A job that is killed with SIGKILL can stop nothing any more, and a parent-death signal alone is not
enough: it is bound to the thread that started the server, and what the server itself started would
live on. The keeper has one thread, watches the job, and adopts every descendant of the server
(child subreaper), also one in a session of its own. When the job ends, or the server does, it kills
what is left, removes the server's temporary folder, and says on its standard output what it found.
Should the keeper be killed, the parent-death signal ends the server.

Run by :mod:`routewise.server` as a program, with nothing but the standard library:
``keeper.py JOB_PID TEMPORARY_FOLDER COMMAND...``. It writes JSON lines: ``pid`` once the server
runs (or ``what`` kept it from running), and at the end ``exit_code``, ``n_strays`` and ``n_left``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXIT_NOT_STARTED = 2
SWEEP_LIMIT_S = 10.0
STRAY_GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Start the command, watch it and the job, and leave nothing behind."""
    job_pid, folder, command = int(arguments[0]), arguments[1], arguments[2:]
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Ctrl-C is meant for the job, which then asks the server to stop; SIGTERM ends all at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_NOT_STARTED))
    try:
        job = os.pidfd_open(job_pid)
        if os.getppid() != job_pid:
            return EXIT_NOT_STARTED
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=sys.stderr,
                start_new_session=True,
                preexec_fn=_dies_with(library, os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            _say(what=(error.strerror if isinstance(error, OSError) else None) or str(error))
            return EXIT_NOT_STARTED
        _say(pid=server.pid)
        running = os.pidfd_open(server.pid)
        poll = select.poll()
        poll.register(job, select.POLLIN)
        poll.register(running, select.POLLIN)
        ended = {handle for handle, _ in poll.poll()}
        if running not in ended:
            server.kill()
        code = server.wait()
        n_strays, n_left = sweep(STRAY_GRACE_S if running in ended else 0)
        shutil.rmtree(folder, ignore_errors=True)
        _say(exit_code=code, n_strays=n_strays, n_left=n_left)
        return 0
    finally:
        sweep()
        shutil.rmtree(folder, ignore_errors=True)


def sweep(grace_s: float = 0.0) -> tuple[int, int]:
    """Kill and reap every descendant; return how many were killed, and how many are left.

    What a stopped server started may be about to end by itself, and has ``grace_s`` for it.
    """
    killed: set[int] = set()
    started_s = time.monotonic()
    while True:
        _reap()
        left = descendants(os.getpid())
        now_s = time.monotonic()
        if not left or now_s > started_s + grace_s + SWEEP_LIMIT_S:
            return len(killed), len(left)
        if now_s < started_s + grace_s:
            time.sleep(0.01)
            continue
        killed.update(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def descendants(root: int) -> list[int]:
    """Return the process ids below ``root``; a zombie that somebody else must reap is none."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # the name in field 2 may hold spaces and brackets
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
        states[int(entry)] = fields[0]
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += [pid for pid in below if states[pid] not in "ZX"]
        waiting += below
    return sorted(found)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _dies_with(library: ctypes.CDLL, keeper: int) -> Callable[[], None]:
    def arrange() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(EXIT_NOT_STARTED)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return arrange


def _say(**words: Any) -> None:
    with contextlib.suppress(OSError):  # the job is gone: nobody listens
        print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
