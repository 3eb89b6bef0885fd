"""The ledger of one device: who holds it and who waits, in one file that all users share.

The file decides nothing by what it says: an entry counts only while its author holds a lock on the
entry's bytes, and the kernel drops that lock when the author dies, however it dies. So there is
nothing to clean after a crash, a reused process id means nothing, and whoever looks next wipes the
dead entries. The file itself stays, empty while nobody claims: it is never removed, so that no two
processes can ever lock two different files of one name.

Locks are open-file-description locks on byte ranges (``fcntl(2)``, "Open file description locks"):
one byte far behind the entries orders all reading and writing, one byte per entry says that its
author lives. The descriptor is closed on exec and in forked children, so no child keeps a lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from routewise.errors import RoutewiseError
from routewise.lock import WITHOUT_LOCKS, no_locks

#: Bytes of one entry: JSON, filled up with spaces.
ENTRY_BYTES = 4096
MAX_ENTRIES = 4096
_TURN_BYTE = 1 << 40
_FLOCK = struct.Struct("@hhqqi0q")
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_ALL_MAY_LOCK = 0o666
#: Where locks of two hosts do not see each other, or not always.
_SHARED_FILE_SYSTEMS = {
    *("afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "gfs2"),
    *("glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2"),
    *("smb3", "smbfs"),
}
_MODE_PATIENCE_S = 1.0
#: Nobody keeps a ledger locked for longer than some microseconds, unless it is stopped meanwhile.
SAY_AFTER_S = 30.0
_CLOSE_PATIENCE_S = 1.0
_TURN_POLL_S = 0.001

#: Descriptors of this process, for a forked child to close.
_descriptors: set[int] = set()


class LedgerGone(Exception):
    """The file that this process has locked is no longer the one of its name."""


@dataclass(frozen=True)
class Entry:
    """One claim, waiting or granted. Times are seconds of the host's clock since boot.

    ``wants`` are the keys of the units that would do, in order of liking; ``whole`` asks for all of
    them; ``units`` are those granted, empty while it waits. ``n_units`` is how many the device has
    by the claim's declaration (0: not told), ``named`` what it calls them (empty: it does not).
    """

    ticket: int
    label: str
    wants: tuple[str, ...]
    whole: bool
    limit_s: float
    user: str
    pid: int
    start_ticks: int
    arrived_s: float
    granted_s: float | None = None
    units: tuple[str, ...] = ()
    n_units: int = 0
    named: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether the claim is granted."""
        return self.granted_s is not None

    def is_overdue(self, now_s: float) -> bool:
        """Return whether it is held for longer than its limit."""
        return self.granted_s is not None and now_s - self.granted_s > self.limit_s


def free_units(entry: Entry, entries: list[Entry]) -> tuple[str, ...]:
    """Return the units that a waiting ``entry`` may take now; empty: it has to wait.

    First come, first served for every unit: one that an earlier claim could take is left to it,
    even where it is free at this moment. So a claim on all units is not starved, and a claim is
    overtaken only by those that take nothing it could use.
    """
    taken = {unit for other in entries if other.holds for unit in other.units}
    promised = {
        unit
        for other in entries
        if not other.holds and other.ticket < entry.ticket
        for unit in other.wants
    }
    free = tuple(unit for unit in entry.wants if unit not in taken and unit not in promised)
    if entry.whole:
        return free if free == entry.wants else ()
    return free[:1]


def is_hardware_id(unit: str) -> bool:
    """Return whether a unit's key is the hardware's own identifier, the same for every job."""
    return unit.startswith(("GPU-", "MIG-"))


def contradicts(entry: Entry, other: Entry) -> bool:
    """Return whether two claims on one device declare it so that one unit may have two keys.

    Where both know their units by the hardware's identifier, other units are other hardware, and
    nothing contradicts. Else both must declare as many units, under the same names; where only one
    gives names, what the other may use must be among them.
    """
    if not entry.n_units or not other.n_units:
        return False
    known = [any(map(is_hardware_id, claim.wants)) for claim in (entry, other)]
    if any(known):
        return not all(known)
    if entry.n_units != other.n_units:
        return True
    if entry.named and other.named:
        return set(entry.named) != set(other.named)
    if entry.named or other.named:
        named = entry.named or other.named
        return not set(other.wants if entry.named else entry.wants) <= set(named)
    return False


def boot_s() -> float:
    """Return the seconds since boot, the same clock for all processes of the host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def user_name() -> str:
    """Return the name of the user that this process acts for, or its number."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class Ledger:
    """The open ledger of one device, and this process's own entry in it.

    Parameters
    ----------
    folder
        A folder as ``check_folder`` accepts it.
    name
        The file's name in it. The file is made where it is missing, open to all users whatever the
        umask. A link or anything else but a plain file of one name is refused, because a folder
        that all may write is where links to other people's files are planted.

    Raises RoutewiseError where the file cannot be used.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._own: int | None = None
        self._pid = os.getpid()
        self._descriptor = _open(folder, name)
        _descriptors.add(self._descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the ledger for the moment of reading or writing it.

        Raises LedgerGone where the file was removed or replaced since it was opened.
        """
        while not self._take_turn(SAY_AFTER_S):
            print(
                f"routewise: {self.path} has been locked for {SAY_AFTER_S:.0f} s by a process that "
                "does not go on; is one stopped (ps -eo pid,stat,args, state T)?",
                file=sys.stderr,
                flush=True,
            )
        try:
            if not self.is_in_place():
                raise LedgerGone(self.path)
            yield
        finally:
            _lock(self._descriptor, fcntl.F_UNLCK, _TURN_BYTE)

    def is_in_place(self) -> bool:
        """Return whether the open file still is the one of its name."""
        own = os.fstat(self._descriptor)
        try:
            named = self.path.lstat()
        except FileNotFoundError:
            return False
        return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)

    def entries(self) -> list[Entry]:
        """Return the living entries by ticket, and wipe the dead ones. Call it while locked."""
        living = self._read()
        self._wipe(set(living))
        return sorted(living.values(), key=lambda entry: entry.ticket)

    def arrive(self, entry: Entry) -> Entry:
        """Write this process's entry with the next ticket and return it. Call it while locked."""
        living = self._read()
        index = next(index for index in range(len(living) + 1) if index not in living)
        if index >= MAX_ENTRIES:
            raise RoutewiseError(f"{self.path} holds {MAX_ENTRIES} claims, and takes no more")
        ticket = max((other.ticket for other in living.values()), default=0) + 1
        arrived = replace(entry, ticket=ticket)
        _lock(self._descriptor, fcntl.F_WRLCK, index * ENTRY_BYTES)
        self._own = index
        try:
            self.write(arrived)
        except BaseException:
            self._give_up()  # a living entry without words would stop everyone
            raise
        return arrived

    def write(self, entry: Entry) -> None:
        """Write this process's entry anew. Call it while locked."""
        assert self._own is not None, "write comes after arrive"
        content = json.dumps(asdict(entry), ensure_ascii=False).encode()
        if len(content) >= ENTRY_BYTES:
            raise RoutewiseError(
                f"a claim of {len(entry.wants)} units needs {len(content)} bytes, and "
                f"{ENTRY_BYTES - 1} is the most",
                "claim fewer units, or give them shorter ids",
            )
        os.pwrite(self._descriptor, content.ljust(ENTRY_BYTES - 1) + b"\n", self._own * ENTRY_BYTES)

    def close(self) -> None:
        """Give up this process's entry and close the file; in a forked child, do nothing."""
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        try:
            # a kill from here on leaves a dead entry, and the next to look wipes it
            if self._own is not None and self._take_turn(_CLOSE_PATIENCE_S):
                self._give_up()
                self._wipe({index for index in range(self._count()) if self._lives(index)})
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            _descriptors.discard(descriptor)
            os.close(descriptor)

    def _take_turn(self, patience_s: float) -> bool:
        ends_s = time.monotonic() + patience_s
        while True:
            try:
                _lock(self._descriptor, fcntl.F_WRLCK, _TURN_BYTE)
                return True
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= ends_s:
                    return False
            time.sleep(_TURN_POLL_S)

    def _give_up(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            _lock(self._descriptor, fcntl.F_UNLCK, own * ENTRY_BYTES)

    def _count(self) -> int:
        size = os.fstat(self._descriptor).st_size
        if size > MAX_ENTRIES * ENTRY_BYTES:
            raise RoutewiseError(
                f"{self.path} is {size} bytes long: this is no file of claims",
                "remove it once nobody claims this device",
            )
        return -(-size // ENTRY_BYTES)

    def _lives(self, index: int) -> bool:
        return index == self._own or _is_locked(self._descriptor, index * ENTRY_BYTES)

    def _read(self) -> dict[int, Entry]:
        end = self._count() * ENTRY_BYTES
        if _is_locked(self._descriptor, end, _TURN_BYTE - end):
            raise self._unreadable(end // ENTRY_BYTES)  # cut off by a stranger to this code
        return {
            index: self._parse(os.pread(self._descriptor, ENTRY_BYTES, index * ENTRY_BYTES), index)
            for index in range(self._count())
            if self._lives(index)
        }

    def _parse(self, content: bytes, index: int) -> Entry:
        try:
            fields: dict[str, Any] = json.loads(content)
            entry = Entry(
                **{
                    **fields,
                    **{key: tuple(fields.get(key, ())) for key in ("wants", "units", "named")},
                }
            )
            _check_types(entry)
            return entry
        except (ValueError, TypeError, KeyError):
            raise self._unreadable(index) from None

    def _unreadable(self, index: int) -> RoutewiseError:
        # whoever wrote it may hold the device, so going on would not be safe
        return RoutewiseError(
            f"{self.path}: claim {index} is not readable, though the process that made it runs",
            "see whose file and process it is (fuser -v), or whether two versions of Routewise "
            "share the folder",
        )

    def _wipe(self, living: set[int]) -> None:
        count = self._count()
        last = max(living, default=-1)
        if last + 1 < count:
            os.ftruncate(self._descriptor, (last + 1) * ENTRY_BYTES)
        for index in set(range(last)) - living:
            if os.pread(self._descriptor, 1, index * ENTRY_BYTES) != b" ":
                os.pwrite(self._descriptor, b"\n".rjust(ENTRY_BYTES, b" "), index * ENTRY_BYTES)


def check_folder(folder: Path) -> None:
    """Make a folder of ledgers, open to all users, where it is missing, and check it.

    Raises RoutewiseError where it cannot be made, is no folder, may be written by all without the
    sticky bit (anyone could then replace a ledger), or lies on a file system shared by hosts.
    """
    hint = (
        "set ROUTEWISE_CLAIMS to a folder of this host's own disk or memory, the same for all of "
        "its users (mkdir FOLDER; chmod 1777 FOLDER)"
    )
    try:
        try:
            folder.mkdir()
            folder.chmod(0o1777)
        except FileExistsError:
            pass
        status = folder.stat()
    except OSError as error:
        raise RoutewiseError(
            f"claims cannot be kept in {folder}: {error.strerror}", hint
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise RoutewiseError(f"claims cannot be kept in {folder}: it is not a folder", hint)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise RoutewiseError(
            f"claims cannot be kept in {folder}: all users may write it and it has no sticky bit, "
            "so that anyone could replace a claim",
            f"chmod 1777 {folder}",
        )
    if not os.access(folder, os.X_OK, effective_ids=True):
        raise RoutewiseError(
            f"claims cannot be kept in {folder}: it is closed to this user ({user_name()})", hint
        )
    kind = file_system_of(status.st_dev, Path("/proc/self/mountinfo").read_text())
    if kind in _SHARED_FILE_SYSTEMS:
        raise RoutewiseError(
            f"claims cannot be kept in {folder}: it is on {kind}, and a claim is about one host",
            hint,
        )


def file_system_of(device: int, mounts: str) -> str | None:
    """Return the type of a device's file system from the text of ``/proc/self/mountinfo``."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return None


def _check_types(entry: Entry) -> None:
    """Raise TypeError where an entry was not written by this code: any user can write the file."""
    texts = (entry.label, entry.user, *entry.wants, *entry.units, *entry.named)
    whole = (entry.ticket, entry.pid, entry.start_ticks, entry.n_units)
    times_s = (entry.limit_s, entry.arrived_s, *filter(None, [entry.granted_s]))
    if not (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) for number in whole)
        and all(isinstance(time_s, int | float) for time_s in times_s)
    ):
        raise TypeError


def _open(folder: Path, name: str) -> int:
    path = folder / name
    patience_ends_s = time.monotonic() + _MODE_PATIENCE_S
    while True:
        try:
            # without O_CREAT: on hosts with fs.protected_regular the kernel refuses to open
            # another user's file in a sticky folder with it
            descriptor = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            _make(folder, name)
            continue
        except PermissionError as error:
            if time.monotonic() < patience_ends_s:  # its maker may be about to open it to all
                time.sleep(0.02)
                continue
            raise RoutewiseError(
                f"{path} is not open to this user ({user_name()})",
                f"its owner or root runs: chmod 666 {path}",
            ) from error
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            raise _refused(path) from error
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            _open_to_all(descriptor, status)
            return descriptor
        os.close(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise _refused(path)


def _refused(path: Path) -> RoutewiseError:
    return RoutewiseError(
        f"{path} is a link or no plain file, and claims are not written through it",
        f"see whose it is (ls -l {path}) and remove it",
    )


def _open_to_all(descriptor: int, status: os.stat_result) -> None:
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != _ALL_MAY_LOCK:
        os.fchmod(descriptor, _ALL_MAY_LOCK)


def _make(folder: Path, name: str) -> None:
    """Make the ledger, complete with its mode at the moment that its name appears."""
    try:
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _ALL_MAY_LOCK)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            _make_plainly(folder / name)
            return
        try:
            os.fchmod(descriptor, _ALL_MAY_LOCK)
            # with a folder's descriptor Python calls linkat, which follows the link in /proc
            place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                with suppress(FileExistsError):
                    os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=place)
            finally:
                os.close(place)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RoutewiseError(
            f"claims cannot be kept in {folder}: {error.strerror}",
            "set ROUTEWISE_CLAIMS to a folder that this user may write, the same for all users of "
            "the host",
        ) from error


def _make_plainly(path: Path) -> None:
    # for file systems without O_TMPFILE: under a strict umask there is a moment in which other
    # users cannot open the file, and they try again for a second
    with suppress(FileExistsError):
        descriptor = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, _ALL_MAY_LOCK)
        try:
            os.fchmod(descriptor, _ALL_MAY_LOCK)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, kind: int, start: int) -> None:
    asked = _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0)
    _control(descriptor, fcntl.F_OFD_SETLK, asked)


def _is_locked(descriptor: int, start: int, length: int = 1) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    answer = _control(descriptor, fcntl.F_OFD_GETLK, asked)
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _control(descriptor: int, command: int, asked: bytes) -> bytes:
    try:
        return fcntl.fcntl(descriptor, command, asked)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent
        raise no_locks(
            folder,
            error,
            "set ROUTEWISE_CLAIMS to a folder of this host's own disk or memory, the same for all "
            "of its users",
        ) from error


def _close_in_child() -> None:
    # a fork shares the open file description, and with it the locks: a child that lives on would
    # keep the device held after the holder's death
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
