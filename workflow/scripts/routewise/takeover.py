"""Take a working folder over from a Snakemake that was killed.

Snakemake locks its working folder and, killed with SIGKILL, leaves the lock behind: every later
run would stop and ask for ``--unlock``. Each run of ours therefore holds a lock of the kernel's
beside Snakemake's own, which ends with its process however that ended. Where nobody holds it, and
no record says that another host's run may live (``runs.py``), Snakemake's locks belong to the dead.

A shared file system may keep such locks to each host. So the file also holds who had it last, and
the locks of another host are left to Snakemake and to people: nobody here knows whether it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from pathlib import Path

from routewise.runs import other_runs
from routewise.watch import boot_id

STATE = Path(".snakemake")
_HELD: list[int] = []


def take_over(folder: Path = Path(".")) -> list[Path]:
    """Remove the locks that dead runs left in ``folder``; return them.

    Does nothing while another run of ours lives there, or may live on a host whose locks do not
    reach here: then Snakemake's own lock decides. The kernel's lock is held, shared, until this
    process ends. A folder that cannot be written to, or has no locks, is left as it is: a run that
    has something to make says so (``runs.begin_run``).
    """
    state = folder / STATE
    try:
        state.mkdir(exist_ok=True)
        handle = _open(state / "routewise.lock")
    except OSError:
        return []
    _HELD.append(handle)
    stale: list[Path] = []
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    except OSError:
        return []
    else:
        last = set(os.pread(handle, 1000, 0).decode(errors="replace").split())
        left = sorted((state / "locks").glob("*.lock"))
        if not other_runs(folder) and (not left or not last or last & _host()):
            with contextlib.suppress(OSError):  # another user's file
                os.ftruncate(handle, 0)
                os.pwrite(handle, "\n".join(sorted(_host())).encode(), 0)
            for path in left:
                with contextlib.suppress(OSError):  # of another user, in a folder that is not ours
                    path.unlink()
                    stale.append(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError:
        return stale
    return stale


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # another user's: enough for a lock


def _host() -> set[str]:
    """Return what tells this host from others: its name, and its boot, which containers share."""
    return {name for name in (platform.node(), boot_id()) if name}
