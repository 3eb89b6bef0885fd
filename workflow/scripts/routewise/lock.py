"""Locks of the kernel's on files, and what to say where a file system has none."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

from routewise.errors import RoutewiseError

#: What a file system without locks answers: no lock daemon, or no such operation.
WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


def take_lock(handle: int, kind: int, folder: Path, instead: str) -> None:
    """Lock an open file as ``fcntl.flock`` does; ``instead`` says what else to use.

    Raises RoutewiseError that names ``folder`` where its file system has no locks, and
    BlockingIOError where ``kind`` holds ``LOCK_NB`` and another has the lock.
    """
    try:
        fcntl.flock(handle, kind)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            raise no_locks(folder, error, instead) from error
        raise


def no_locks(folder: Path, error: OSError, instead: str) -> RoutewiseError:
    """Return the error for a folder whose file system refuses locks."""
    return RoutewiseError(
        f"{folder.absolute()}: its file system has no locks ({error.strerror}), and files that "
        "two may write at once are locked",
        instead,
    )
