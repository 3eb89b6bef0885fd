"""Take a working folder over from a Snakemake that was killed.

Snakemake locks its working folder and, killed with SIGKILL, leaves the lock behind: every later
run would stop and ask for ``--unlock``. Each run of ours therefore holds a lock of the kernel's
beside Snakemake's own, which ends with its process however that ended. Where nobody holds it,
Snakemake's locks belong to the dead.

A shared file system may keep such locks to each host. So it also holds who had it last, and the
locks of another host are left to Snakemake and to people: nobody here knows whether it lives.
"""

from __future__ import annotations

import fcntl
import os
import platform
from pathlib import Path

STATE = Path(".snakemake")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HELD: list[int] = []


def take_over(folder: Path = Path(".")) -> list[Path]:
    """Remove the locks that dead runs of this host left in ``folder``; return them.

    Does nothing while another run of ours lives there: then Snakemake's own lock decides. The
    kernel's lock is held, shared, until this process ends. A folder that cannot be written to is
    left to Snakemake's own complaint.
    """
    state = folder / STATE
    try:
        state.mkdir(exist_ok=True)
        handle = os.open(state / "routewise.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return []
    _HELD.append(handle)
    stale: list[Path] = []
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        last = set(os.pread(handle, 1000, 0).decode(errors="replace").split())
        stale = sorted((state / "locks").glob("*.lock"))
        if stale and last and not last & _host():
            stale = []
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, "\n".join(sorted(_host())).encode(), 0)
        for path in stale:
            path.unlink()
    fcntl.flock(handle, fcntl.LOCK_SH)
    return stale


def _host() -> set[str]:
    """Return what tells this host from others: its name, and its boot, which containers share."""
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else ""
    return {name for name in (platform.node(), boot) if name}
