"""Who runs in a working folder: a record for each run, which ends with the run.

Snakemake's own lock names nobody, and a run that ends takes the locks of all others with it. So
each run that has something to make keeps a record of who it is and what it makes, and a kernel's
lock on that record. Where such locks do not reach (two hosts on a network file system), a record of
another host counts as that of a living run until a person removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from routewise.errors import RoutewiseError, not_allowed
from routewise.ledger import user_name
from routewise.lock import WITHOUT_LOCKS, no_locks
from routewise.watch import boot_id, start_ticks_of

RECORDS = Path(".snakemake/routewise")
_PID_NAMESPACE = "/proc/self/ns/pid"
#: Output files of another run that a message names.
_SHOWN = 3


@dataclass(frozen=True)
class Run:
    """One run of Snakemake in a working folder.

    ``boot`` names the start of a host's kernel and ``machine`` its installation, ``start_ticks``
    counts from the boot (clock ticks), ``since_s`` is the host's clock (seconds since 1970), and
    ``outputs`` are the files that it makes.
    """

    user: str
    host: str
    boot: str
    pid_namespace: str
    pid: int
    start_ticks: int
    since_s: float
    study: str
    outputs: tuple[str, ...] = ()
    machine: str = ""

    def who(self) -> str:
        """Return who it is, in words."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        return f"{self.user} on {self.host}, process {self.pid}, since {since}, study {self.study}"


@dataclass(frozen=True)
class Other:
    """The record of another run. ``certain``: it lives; else it is of a host not to be seen.

    ``run`` is None where the record cannot be read, as one of a newer Routewise.
    """

    path: Path
    run: Run | None
    certain: bool

    def who(self) -> str:
        """Return who it is, in words."""
        return self.run.who() if self.run else f"its record {self.path} cannot be read"

    def advice(self) -> str:
        """Return what to do about it."""
        wait = "wait for its end, or run in a working folder of your own"
        if self.certain:
            return wait
        if self.run is None:
            return f"{wait}. Where nobody runs here, remove {self.path}"
        return (
            f"{wait}. Nobody here can see processes of {self.run.host}: where `ps -p "
            f"{self.run.pid}` shows there that it is gone, remove {self.path}"
        )


def check_open(folder: Path = Path(".")) -> None:
    """Check that Snakemake can keep its notes in a working folder, as it does for a look too.

    Raises RoutewiseError that names whose it is.
    """
    state = folder / RECORDS.parent
    place = state if state.is_dir() else folder
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        raise not_allowed(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place)))


def own_run(study: str, outputs: Iterable[str] = ()) -> Run:
    """Return the record of this process."""
    return Run(
        user=user_name(),
        host=platform.node() or "an unnamed host",
        boot=boot_id(),
        pid_namespace=_own_pid_namespace(),
        pid=os.getpid(),
        start_ticks=start_ticks_of(os.getpid()),
        since_s=time.time(),
        study=study,
        outputs=tuple(sorted(outputs)),
        machine=_machine(),
    )


def other_runs(folder: Path = Path(".")) -> list[Other]:
    """Return the runs of others in a working folder that live or may live, oldest record first.

    Records of the dead are removed: of runs that this kernel saw end, and of this host before it
    was started anew.
    """
    found = []
    for path in sorted((folder / RECORDS).glob("*.json")):
        run = _read(path)
        if run is None:
            if path.exists():
                found.append(Other(path, None, certain=_is_locked(path) is True))
            continue
        if _is_self(run):
            continue
        state = _lives(path, run)
        if state is False:
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        found.append(Other(path, run, certain=state is True))
    return sorted(found, key=lambda other: other.run.since_s if other.run else 0.0)


def begin_run(study: str, outputs: Iterable[str], folder: Path = Path(".")) -> Path:
    """Keep the record of this run until this process ends; return its file.

    Raises RoutewiseError where another run makes one of the same files, where the folder cannot be
    written to, and where its file system has no locks.
    """
    own = own_run(study, outputs)
    try:
        path = _write(folder, own)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            raise no_locks(
                folder,
                error,
                "run in a working folder of a local disk, or have the file system mounted with "
                "locks (NFS: not nolock; Lustre: flock)",
            ) from error
        raise RoutewiseError(
            f"{(folder / RECORDS).absolute()}: {user_name()} cannot write there ({error.strerror})",
            "have its owner open the working folder to you, or run in one of your own",
        ) from error
    # written first and looked round then: of two that begin at once, at least one sees the other
    for other in other_runs(folder):
        if other.run is None:
            path.unlink(missing_ok=True)
            raise RoutewiseError(
                f"another run may make the same files: {other.who()}. Nothing was run",
                other.advice(),
            )
        shared = sorted(set(other.run.outputs) & set(own.outputs))
        if shared:
            path.unlink(missing_ok=True)
            told = ", ".join(shared[:_SHOWN])
            more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
            live = "is making" if other.certain else "may be making"
            raise RoutewiseError(
                f"another run {live} the same files ({told}{more}): {other.run.who()}. "
                "Nothing was run",
                other.advice(),
            )
    return path


def _write(folder: Path, own: Run) -> Path:
    records = folder / RECORDS
    records.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # all who may write the working folder run there
        records.chmod(records.stat().st_mode | (folder.stat().st_mode & 0o022))
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{own.host}-{own.pid}-{own.start_ticks}")
    handle, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=records)
    path = records / f"{name}.json"
    try:
        # locked before it has its name: nobody ever sees a live record without its lock
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, json.dumps(asdict(own)).encode())
        os.fchmod(handle, 0o644)
        os.replace(part, path)
    except BaseException:
        os.close(handle)
        Path(part).unlink(missing_ok=True)
        raise
    # the handle stays open, and with it the lock, until this process ends
    atexit.register(_end, path, os.getpid())
    return path.absolute()


def _end(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            path.unlink()


def _read(path: Path) -> Run | None:
    """Return a record, without what a newer Routewise may have added; None where it is none."""
    try:
        said = json.loads(path.read_text())
        values = {one.name: said[one.name] for one in fields(Run) if one.name in said}
        run = Run(**{**values, "outputs": tuple(values["outputs"])})
        run = replace(run, since_s=float(run.since_s))
        run.who()  # with a time that is one
    except (OSError, OverflowError, ValueError, TypeError, KeyError):
        return None
    texts = (run.user, run.host, run.boot, run.pid_namespace, run.study, run.machine, *run.outputs)
    numbers = (run.pid, run.start_ticks)
    whole = all(isinstance(one, str) for one in texts) and all(type(one) is int for one in numbers)
    return run if whole else None


def _machine() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def _is_self(run: Run) -> bool:
    return (run.boot, run.pid_namespace, run.pid) == (
        boot_id(),
        _own_pid_namespace(),
        os.getpid(),
    )


def _lives(path: Path, run: Run) -> bool | None:
    """Return whether a run lives; None where nobody can tell."""
    locked = _is_locked(path)
    if locked or (locked is False and run.boot == boot_id()):
        return locked  # within one kernel the lock tells, also of one that is killed and not reaped
    if run.boot != boot_id():
        # this host before its last start, or a host whose locks may not reach here
        return False if (run.host, run.machine) == (platform.node(), _machine()) else None
    if run.pid_namespace == _own_pid_namespace():
        try:
            return start_ticks_of(run.pid) == run.start_ticks
        except OSError:
            return False
    return None  # of another container on this kernel


def _is_locked(path: Path) -> bool | None:
    """Return whether another process holds a file's lock; None where there are no locks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def _own_pid_namespace() -> str:
    try:
        return os.readlink(_PID_NAMESPACE)
    except OSError:
        return ""
