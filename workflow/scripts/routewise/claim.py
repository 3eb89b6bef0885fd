"""Claims: an exclusive, fair, crash-safe hold on a device, for the length of one job.

Fair: first come, first served, across processes and users, for each unit of the device (one of two
GPUs). Crash-safe: the kernel ends a claim with its holder, also after SIGKILL, and nothing is left
to clean. ``ledger`` keeps who holds and who waits; this module waits, minds the time limit, names
the unit to the job's programs, and goes through a box's own hold command where it has one.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from routewise.errors import EXIT_NOT_MEASURED, RoutewiseError
from routewise.ledger import (
    Entry,
    Ledger,
    LedgerGone,
    boot_s,
    check_folder,
    contradicts,
    free_units,
    is_hardware_id,
    user_name,
)
from routewise.progress import duration
from routewise.watch import start_ticks_of, stat_fields, wait_for_end

FOLDER = "ROUTEWISE_CLAIMS"
#: The variables through which programs of a device family are told which units they may use.
VISIBLE_VARIABLES: dict[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "hip": ("HIP_VISIBLE_DEVICES",),
    "hrx": ("ROCR_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES",),
    "vulkan": ("GGML_VK_VISIBLE_DEVICES",),
}
POLL_S = 0.1
SAY_EVERY_S = 30.0
#: How long a job may take to end by itself once its limit has passed.
GRACE_S = 60.0

_DEFAULT_FOLDERS = ("/run/lock", "/var/lock", "/tmp")
_DEVICE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.IGNORECASE)
_LABEL_CHARACTERS = 120
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_GUARD = "ROUTEWISE_UNDER_HOLD_"
_QUERY_LIMIT_S = 20.0
_PR_SET_PDEATHSIG = 1
#: The first process-id namespace of a host has this inode (``PROC_PID_INIT_INO`` of Linux).
_HOST_PID_NAMESPACE = 0xEFFFFFFC

#: (folder, device) of the claims that this process holds or waits for.
_own_claims: set[tuple[Path, str]] = set()
_own_claims_lock = threading.Lock()
#: Device → seconds that the box's hold command made this job wait.
_hold_wait_s: dict[str, float] = {}


@dataclass(frozen=True)
class ClaimSpec:
    """How a route's device is claimed.

    Parameters
    ----------
    device
        The claim's name: routes that use the same hardware share it. Letters, digits, ``.-_``.
    units
        How many interchangeable units the device has; a claim takes one that is free.
    limit_minutes
        How long one job may hold it.
    hold
        The box's own hold command, as a prefix: ``("gpu-hold", "-l", "{label}", "-t", "{minutes}",
        "--")``.
    visible
        The environment variables that narrow a program to its unit; empty: those known for the
        device's name (``VISIBLE_VARIABLES``).
    unit_ids
        What the units are called there; empty: what the environment's own such variable allows
        already, or 0, 1, ….
    whole
        Claim all units at once.

    Raises RoutewiseError where a value cannot be.
    """

    device: str
    units: int = 1
    limit_minutes: float = 120
    hold: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    unit_ids: tuple[str, ...] = ()
    whole: bool = False

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ClaimSpec:
        """Make a claim of JSON values: its sequences are tuples."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list | tuple) else value
            for key, value in document.items()
        }
        return cls(**values)

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise RoutewiseError(
                f"device {self.device!r} cannot be claimed: letters, digits and .-_ are wanted, "
                "64 at most",
                "name it cuda, cpu, hrx, npu, …",
            )
        if self.units < 1:
            raise RoutewiseError(f"device {self.device} has {self.units} units; 1 is the least")
        if not (self.limit_minutes > 0 and math.isfinite(self.limit_minutes)):
            raise RoutewiseError(
                f"device {self.device}: limit_minutes is {self.limit_minutes}; a number above 0 is "
                "wanted",
                "give the minutes that one job may take at most",
            )
        ids = self.unit_ids
        if ids and (len(ids) != self.units or len(set(ids)) != len(ids) or not all(ids)):
            raise RoutewiseError(
                f"device {self.device} has {self.units} units, and unit_ids is {list(ids)}; "
                f"{self.units} different ids are wanted"
            )
        unknown = {name for part in self.hold for name in _PLACEHOLDER.findall(part)}
        unknown -= {"label", "minutes"}
        if unknown:
            raise RoutewiseError(
                f"hold command of {self.device}: {{{min(unknown)}}} is not known",
                "use {label} and {minutes}",
            )

    @property
    def variables(self) -> tuple[str, ...]:
        """Return the names of the variables that narrow a program to its unit."""
        return self.visible or VISIBLE_VARIABLES.get(self.device, ())


@dataclass(frozen=True)
class Claim:
    """One line of the view. ``place`` is 0 for a holder and counts the queue from 1."""

    device: str
    place: int
    units: tuple[str, ...]
    label: str
    user: str
    pid: int
    since: float
    passed_s: float
    limit_s: float
    overdue: bool


class Held:
    """A device held by this process.

    Attributes
    ----------
    device
        The claim's name.
    unit
        The id of the unit held, or None where all are (``whole`` with several).
    units
        The ids of all units held.
    wait_s
        Seconds waited, in the box's hold command and in our own queue.
    environment
        The variables that narrow a program to what is held.
    """

    def __init__(self, spec: ClaimSpec, entry: Entry, ids: dict[str, str], wait_s: float) -> None:
        self.device = spec.device
        self.label = entry.label
        self.limit_s = entry.limit_s
        self.units = tuple(ids[key] for key in entry.units)
        self.unit = self.units[0] if len(self.units) == 1 else None
        self.wait_s = wait_s
        self.environment = _environment_of(spec, self.units)
        self._keys = entry.units
        self._start_s = boot_s()
        self._end_s: float | None = None

    @property
    def hold_s(self) -> float:
        """Return the seconds held: up to now, or to the release."""
        return (boot_s() if self._end_s is None else self._end_s) - self._start_s

    def count_others(self) -> int | None:
        """Return how many processes of others compute on the held units, or None: nobody can tell.

        Told by the vendor's tool for CUDA devices. This process and those it started do not count.
        None for ``cpu``: every process uses it, and ``machine.other_cpu_share`` measures how much.
        """
        if "CUDA_VISIBLE_DEVICES" not in self.environment:
            return None
        try:
            rows = _nvidia("--query-compute-apps=gpu_uuid,pid")
        except (OSError, subprocess.SubprocessError):
            return None
        return count_strangers(rows, self._keys, _family(os.getpid()))


# --- holding -----------------------------------------------------------------------------------


@contextmanager
def hold_device(
    spec: ClaimSpec,
    label: str,
    folder: Path | None = None,
    *,
    on_limit: Callable[[Held], None] | None = None,
    stream: TextIO | None = None,
) -> Iterator[Held]:
    """Wait for the device, hold it, and release it at the end of the ``with`` block.

    While it waits, lines on ``stream`` (stderr) say who holds it, since when, and this job's place.
    When the limit passes, that is said there, the block is ended as Ctrl-C would end it, so that
    servers are stopped and files closed, and RoutewiseError comes out; a job that has not ended
    60 s later is ended by force. With ``on_limit`` this is called instead, from another thread.

    Raises RoutewiseError where this process claims the device already, or waits for a process that
    waits for it; where claims cannot be kept; where no unit is visible; where an earlier claim
    declares other units of the device.
    """
    if spec.hold and spec.device not in _hold_wait_s:
        raise RuntimeError(f"{spec.device} has a hold command: call run_under_hold first")
    if on_limit is None and threading.current_thread() is not threading.main_thread():
        raise RuntimeError("outside the main thread a claim needs on_limit")
    stream = sys.stderr if stream is None else stream
    start_s = boot_s()
    folder = (claims_folder() if folder is None else folder).resolve()
    check_folder(folder)
    ids = _units_of(spec, os.environ)
    wanted = Entry(
        ticket=0,
        label=printable(label)[:_LABEL_CHARACTERS],
        wants=tuple(ids),
        whole=spec.whole,
        limit_s=spec.limit_minutes * 60,
        user=user_name(),
        pid=os.getpid(),
        start_ticks=start_ticks_of(os.getpid()),
        arrived_s=start_s,
        n_units=spec.units,
        named=spec.unit_ids,
    )
    with _only_once(folder, spec.device):
        ledger, entry = _wait_turn(folder, spec.device, wanted, stream)
        try:
            wait_s = boot_s() - start_s + _hold_wait_s.get(spec.device, 0.0)
            if spec.device in _hold_wait_s:
                _hold_wait_s[spec.device] = 0.0  # counted once
            held = Held(spec, entry, ids, wait_s)
            watch = _LimitWatch(held, on_limit, stream)
            try:
                watch.start()
                yield held
            except _LimitPassed as passed:
                if passed.watch is not watch:  # of a claim around this one
                    raise
            finally:
                watch.stop()
                held._end_s = boot_s()
                if not ledger.is_in_place():
                    _say(
                        stream,
                        f"{ledger.path} was removed while {spec.device} was held: another "
                        "job may have used the device at the same time",
                    )
        finally:
            ledger.close()
    if watch.passed and on_limit is None:
        raise RoutewiseError(
            f"{held.label}: held {held.device} for {duration(held.hold_s)}, longer than its limit "
            f"of {duration(held.limit_s)}",
            "run it again, what was measured is kept; or raise limit_minutes of the claim",
        )


def _forget_in_child() -> None:
    global _own_claims_lock
    _own_claims_lock = threading.Lock()  # another thread may have had it at the fork
    _own_claims.clear()
    _watches.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def claims_folder() -> Path:
    """Return the folder of the ledgers: ``ROUTEWISE_CLAIMS``, or one that every host has.

    The choice looks at the folders' modes and not at what this user may do, so that all users of
    a host come to the same one, whatever their temporary folder. Raises RoutewiseError.
    """
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    for name in _DEFAULT_FOLDERS:
        try:
            mode = os.stat(name).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) and mode & stat.S_ISVTX and mode & stat.S_IWOTH:
            return Path(name)
    raise RoutewiseError(
        f"no folder for claims: none of {', '.join(_DEFAULT_FOLDERS)} is open to all users",
        f"make one on this host (mkdir FOLDER; chmod 1777 FOLDER) and set {FOLDER} to it",
    )


def claimed_devices(folder: Path) -> list[str]:
    """Return the names of the devices that were ever claimed through a folder, sorted."""
    return sorted(
        path.name.removeprefix("routewise-").removesuffix(".claims")
        for path in folder.glob(_ledger_name("*"))
    )


def read_claims(folder: Path, device: str) -> list[Claim]:
    """Return all claims on a device: holders first, then the queue in order.

    Raises RoutewiseError where the ledger cannot be read.
    """
    return _claims_of(device, _read_entries(folder, _ledger_name(device)))


def printable(text: str) -> str:
    """Return a label without characters that would move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _ledger_name(device: str) -> str:
    return f"routewise-{device}.claims"


def _read_entries(folder: Path, name: str) -> list[Entry]:
    ledger = Ledger(folder, name)
    try:
        with ledger.locked():
            return ledger.entries()
    except LedgerGone:
        return []
    finally:
        ledger.close()


def _claims_of(device: str, entries: list[Entry]) -> list[Claim]:
    now_s, now = boot_s(), time.time()
    claims = []
    n_waiting = 0
    for entry in sorted(entries, key=lambda entry: (not entry.holds, entry.ticket)):
        n_waiting += not entry.holds
        start_s = entry.arrived_s if entry.granted_s is None else entry.granted_s
        claims.append(
            Claim(
                device=device,
                place=0 if entry.holds else n_waiting,
                units=entry.units if entry.holds else entry.wants,
                label=printable(entry.label),
                user=printable(entry.user),
                pid=entry.pid,
                since=now - (now_s - start_s),
                passed_s=now_s - start_s,
                limit_s=entry.limit_s,
                overdue=entry.is_overdue(now_s),
            )
        )
    return claims


@contextmanager
def _only_once(folder: Path, device: str) -> Iterator[None]:
    with _own_claims_lock:
        if (folder, device) in _own_claims:
            raise RoutewiseError(
                f"this process claims {device} already: it would wait for itself",
                "claim it once around all that uses it, or ask for whole=True",
            )
        _own_claims.add((folder, device))
    try:
        yield
    finally:
        with _own_claims_lock:
            _own_claims.discard((folder, device))


def _wait_turn(folder: Path, device: str, wanted: Entry, stream: TextIO) -> tuple[Ledger, Entry]:
    """Queue up and wait; return the open ledger and the granted entry."""
    said = ""
    said_s = -math.inf
    ledger = Ledger(folder, _ledger_name(device))
    entry = None
    try:
        while True:
            try:
                with ledger.locked():
                    if entry is None:
                        entry = ledger.arrive(wanted)
                        _refuse_contradiction(device, entry, ledger.entries())
                    entries = ledger.entries()
                    units = free_units(entry, entries)
                    if units:
                        entry = replace(entry, units=units, granted_s=boot_s())
                        ledger.write(entry)
                        return ledger, entry
            except LedgerGone:
                if entry is not None:
                    _say(stream, f"{ledger.path} was removed while this job waited; queueing anew")
                ledger.close()
                ledger, entry = Ledger(folder, _ledger_name(device)), None
                continue
            _refuse_own_ancestor(device, entry, entries)
            claims = _claims_of(device, entries)
            line = _queue_line(device, claims, [e.ticket for e in entries if not e.holds], entry)
            now_s = time.monotonic()
            if line != said or now_s - said_s >= SAY_EVERY_S:
                waited = duration(boot_s() - wanted.arrived_s)
                _say(stream, f"{line}" + (f"; waited {waited}" if said else ""))
                said, said_s = line, now_s
            time.sleep(POLL_S)
    except BaseException:
        ledger.close()
        raise


def _queue_line(device: str, claims: list[Claim], waiting: list[int], entry: Entry) -> str:
    holders = [
        claim for claim in claims if claim.place == 0 and set(claim.units) & set(entry.wants)
    ]
    by = ", ".join(
        f"{claim.label!r} ({claim.user}, process {claim.pid}) since {clock(claim.since)}, limit "
        f"{duration(claim.limit_s)}{' PASSED' if claim.overdue else ''}"
        for claim in holders
    )
    place = f"place {waiting.index(entry.ticket) + 1} of {len(waiting)}"
    return f"waiting for {device}, {place}; " + (f"held by {by}" if by else "the next is coming")


def clock(moment: float) -> str:
    """Return a moment (seconds of the epoch) for people: the time, and the day if not today."""
    then, today = time.localtime(moment), time.localtime()
    same_day = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def _say(stream: TextIO, text: str) -> None:
    print(f"routewise: {text}", file=stream, flush=True)


def _refuse_contradiction(device: str, entry: Entry, entries: list[Entry]) -> None:
    """Raise where an earlier claim counts or calls the device's units otherwise.

    The two might be given one unit under two names.
    """
    for other in entries:
        if other.ticket < entry.ticket and contradicts(entry, other):
            raise RoutewiseError(
                f"{device} is declared in two ways, so that two jobs could get one unit: this job "
                f"says {_declaration(entry)}; {printable(other.label)!r} "
                f"({printable(other.user)}, process {other.pid}) says {_declaration(other)}",
                f"give all routes that claim {device} the same units and unit_ids (with CUDA, "
                "check that nvidia-smi runs for both), or other hardware another device name",
            )


def _declaration(entry: Entry) -> str:
    names = entry.named or entry.wants
    return f"units: {entry.n_units}, unit_ids: [{', '.join(map(printable, names))}]" + (
        "" if entry.named else " (by default)"
    )


def _refuse_own_ancestor(device: str, entry: Entry, entries: list[Entry]) -> None:
    """Raise where this process waits for units that processes it descends from will not free."""
    ancestors = _ancestors()
    holders = [
        other for other in entries if other.holds and (other.pid, other.start_ticks) in ancestors
    ]
    kept = {unit for other in holders for unit in other.units} & set(entry.wants)
    if kept and (entry.whole or kept == set(entry.wants)):
        raise RoutewiseError(
            f"{device} is held by {holders[0].label!r}, process {holders[0].pid}, which started "
            "this one: it would wait for itself",
            "claim the device in one of the two only",
        )


def _ancestors() -> set[tuple[int, int]]:
    """Return (process id, start in ticks) of the processes that this one descends from."""
    found = set()
    pid = os.getppid()
    while pid > 0:
        try:
            fields = stat_fields(pid)
        except OSError:
            break
        found.add((pid, int(fields[19])))
        pid = int(fields[1])
    return found


# --- the time limit ----------------------------------------------------------------------------


class _LimitPassed(SystemExit):
    """Ends the block of a claim. A SystemExit, because asyncio swallows other exceptions."""

    def __init__(self, watch: _LimitWatch) -> None:
        super().__init__(EXIT_NOT_MEASURED)
        self.watch = watch


class _LimitWatch:
    """Notices, from a thread, that a claim's limit has passed."""

    def __init__(self, held: Held, on_limit: Callable[[Held], None] | None, stream: TextIO) -> None:
        self.passed = False
        self.active = True
        self.ending = False
        self._held = held
        self._on_limit = on_limit
        self._stream = stream
        self._over = threading.Event()
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        if self._on_limit is None:
            _watches.append(self)
            self._previous = signal.signal(signal.SIGUSR2, _end_block)
        self._thread.start()

    def stop(self) -> None:
        self.active = False
        if self in _watches:
            _watches.remove(self)
        self._over.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        if self._previous is not None:
            signal.signal(signal.SIGUSR2, self._previous)

    def _run(self) -> None:
        if self._over.wait(self._held.limit_s):
            return
        self.passed = True
        _say(
            self._stream,
            f"the claim of {self._held.label!r} on {self._held.device} has passed its limit of "
            f"{duration(self._held.limit_s)}"
            + ("" if self._on_limit else "; ending this job, what was measured is kept"),
        )
        if self._on_limit is not None:
            self._on_limit(self._held)
            return
        ends_s = time.monotonic() + GRACE_S
        while time.monotonic() < ends_s and not self._over.is_set():
            # again and again, for the first may fall into the end of a claim inside this one
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            self._over.wait(min(1.0, GRACE_S))
        if self._over.is_set():
            return
        _say(self._stream, f"the job did not end within {duration(GRACE_S)}; ending it by force")
        os._exit(EXIT_NOT_MEASURED)


#: The watches of the claims that the main thread holds, the outermost first.
_watches: list[_LimitWatch] = []


def _end_block(_number: int, _frame: FrameType | None) -> None:
    if any(watch.ending for watch in _watches):
        return  # what a block does to end itself is left alone
    for watch in _watches:
        if watch.passed and watch.active:
            watch.ending = True
            raise _LimitPassed(watch)


# --- units -------------------------------------------------------------------------------------


def visible_units(spec: ClaimSpec) -> tuple[str, ...]:
    """Return the ids of the units that a claim of this process could get.

    Raises RoutewiseError where there is none.
    """
    return tuple(_units_of(spec, os.environ).values())


def _units_of(spec: ClaimSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return key → id of the units that this process may use, the key being the same everywhere.

    A scheduler may have narrowed the environment to some units; with control groups it may even
    count them from 0 in each job, and then only the hardware's own identifier tells them apart.
    """
    ids = list(spec.unit_ids) or [str(index) for index in range(spec.units)]
    for name in spec.variables:
        if name not in environment:
            continue
        allowed = [part.strip() for part in environment[name].split(",") if part.strip()]
        ids = [unit for unit in ids if unit in allowed] if spec.unit_ids else allowed[: spec.units]
        if not ids or "-1" in ids:
            raise RoutewiseError(
                f"no unit of {spec.device} is visible: {name} is {environment[name]!r}"
                + (
                    f", and the claim's unit_ids are {list(spec.unit_ids)}" if spec.unit_ids else ""
                ),
                f"unset {name}, or name units in it that the claim has",
            )
    keys = _nvidia_keys(ids) if "CUDA_VISIBLE_DEVICES" in spec.variables else {}
    return {keys.get(unit, unit): unit for unit in ids}


def _environment_of(spec: ClaimSpec, units: tuple[str, ...]) -> dict[str, str]:
    environment = {name: ",".join(units) for name in spec.variables}
    if "CUDA_VISIBLE_DEVICES" in environment:
        # the numbers of nvidia-smi and of schedulers; CUDA's own default puts the fastest first
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment


def _nvidia_keys(ids: list[str]) -> dict[str, str]:
    """Return id → UUID for numbers and shortened UUIDs; empty without the vendor's tool."""
    try:
        rows = _nvidia("--query-gpu=index,uuid")
    except FileNotFoundError:
        return {}
    except (OSError, subprocess.SubprocessError) as error:
        # not without it: a job that names a unit otherwise than the others would not see them
        raise RoutewiseError(
            f"nvidia-smi does not tell which units there are: {error}",
            "run nvidia-smi --query-gpu=index,uuid --format=csv and mend what it says",
        ) from error
    keys = {}
    for index, uuid in rows:
        for unit in ids:
            if unit == index or (unit.startswith("GPU-") and uuid.startswith(unit)):
                keys[unit] = uuid
    return keys


def _nvidia(query: str) -> list[list[str]]:
    """Return the rows of an nvidia-smi query. Raises OSError, subprocess.SubprocessError."""
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=_QUERY_LIMIT_S,
        check=True,
    )
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line]


def count_strangers(rows: list[list[str]], units: tuple[str, ...], family: set[int]) -> int | None:
    """Return how many of nvidia-smi's (unit UUID, process id) rows are others on these units.

    Units without a UUID cannot be told apart: then all rows count. None where a row has no process
    id, or one that this process cannot see from inside a container, where it might be its own.
    """
    known = {unit for unit in units if is_hardware_id(unit)}
    n_others = 0
    in_container = os.stat("/proc/self/ns/pid").st_ino != _HOST_PID_NAMESPACE
    for row in rows:
        if len(row) != 2 or not row[1].isdigit():
            return None
        uuid, pid = row[0], int(row[1])
        if len(known) == len(units) and uuid not in known:
            continue
        if pid in family:
            continue
        if in_container and not Path(f"/proc/{pid}").exists():
            return None
        n_others += 1
    return n_others


def _family(root: int) -> set[int]:
    """Return a process and all its descendants, those too that nobody has reaped yet.

    The device may still list one that has just ended, and it is no stranger.
    """
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            parents[int(entry)] = int(stat_fields(int(entry))[1])
    family = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            return family
        family |= more


# --- a box's own hold command ------------------------------------------------------------------


def hold_prefix(spec: ClaimSpec, label: str) -> list[str]:
    """Return the hold command with label and minutes (whole ones, rounded up) filled in."""
    values = {"label": printable(label), "minutes": str(math.ceil(spec.limit_minutes))}
    return [_PLACEHOLDER.sub(lambda match: values[match[1]], part) for part in spec.hold]


def run_under_hold(spec: ClaimSpec, label: str) -> None:
    """Have this job run under its device's hold command; to be called first in a job's script.

    Without a hold command nothing happens. Otherwise the process that was started runs itself anew
    under the command, with the same arguments, folder and streams, waits for the end and ends with
    the job's exit code (SystemExit). In the job itself the call returns, and ``hold_device`` counts
    the seconds that the command took to start it as waiting. SIGTERM and SIGHUP are passed on, and
    the job ends when this process is gone.

    Raises RoutewiseError where the command cannot be started, or ends without starting the job.
    """
    if not spec.hold:
        return
    guard = _GUARD + re.sub(r"\W", "_", spec.device).upper()
    if guard in os.environ:
        if spec.device not in _hold_wait_s:
            _start_under_hold(spec.device, json.loads(os.environ[guard]))
        return
    prefix = hold_prefix(spec, label)
    shown = " ".join(prefix)
    hint = f"try it by hand: {shown} true"
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        message = {
            "pid": os.getpid(),
            "start_ticks": start_ticks_of(os.getpid()),
            "pipe": writer,
            "exec_s": boot_s(),
        }
        code = _run_passing_signals(
            [*prefix, sys.executable, *sys.orig_argv[1:]],
            {**os.environ, guard: json.dumps(message)},
            f"the hold command of {spec.device}, {shown!r},",
            hint,
        )
        try:
            started = os.read(reader, 1) != b""
        except BlockingIOError:
            started = False
    finally:
        os.close(reader)
        os.close(writer)
    if not started:
        raise RoutewiseError(
            f"the hold command of {spec.device}, {shown!r}, ended with exit code {code} before the "
            "job started",
            f"what it wrote stands above; {hint}",
        )
    raise SystemExit(code)


def _run_passing_signals(
    command: list[str], environment: dict[str, str], what: str, hint: str
) -> int:
    # a terminal sends Ctrl-C to the job too, so the waiting process only must not die of it
    passed_on = {signal.SIGTERM: True, signal.SIGHUP: True, signal.SIGINT: False}
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not passed_on[signal.Signals(number)]:
            return
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    control = ctypes.CDLL(None).prctl
    previous = {number: signal.signal(number, pass_on) for number in passed_on}
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=lambda: control(_PR_SET_PDEATHSIG, int(signal.SIGTERM)),
        )
        for number in early:
            process.send_signal(number)
        code = process.wait()
    except OSError as error:
        raise RoutewiseError(f"{what} cannot be started: {error.strerror}", hint) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _start_under_hold(device: str, message: dict[str, float]) -> None:
    """Note the wait, tell the process that ran the hold command, and end when that ends."""
    _hold_wait_s[device] = max(0.0, boot_s() - message["exec_s"])
    pid = int(message["pid"])
    try:
        handle = os.pidfd_open(pid)
        if start_ticks_of(pid) != int(message["start_ticks"]):
            return
        with open(f"/proc/{pid}/fd/{int(message['pipe'])}", "wb") as pipe:
            pipe.write(b"1")
    except OSError:
        return  # the process is gone, or the command put the job where it cannot be seen
    threading.Thread(target=_end_with, args=(handle,), daemon=True).start()


def _end_with(handle: int) -> None:
    wait_for_end(handle)
    _say(sys.stderr, "the process that started this job's hold command is gone; stopping")
    os._exit(EXIT_NOT_MEASURED)
