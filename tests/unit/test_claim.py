"""A device is held by one job at a time, in the order of arrival, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise import claim, ledger
from routewise.claim import ClaimSpec, claimed_devices, hold_device, read_claims
from routewise.claims_view import print_claims
from routewise.errors import RoutewiseError
from routewise.ledger import Entry, Ledger, free_units

PATIENCE_S = 30.0
CPU = ClaimSpec("cpu")
NOBODY = 65534

#: One fighter: takes the claim when told, notes it, and leaves when told (or after `stay_s`).
FIGHTER = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
from routewise import claim

folder, log, name, units, fault, stay_s = sys.argv[1:]
real = claim.free_units
claim.POLL_S = 0.02
if fault == "newest first":
    def turned(entry):
        return replace(entry, ticket=-entry.ticket)
    claim.free_units = lambda own, others: real(turned(own), [turned(o) for o in others])
if fault == "no lock":
    claim.free_units = lambda own, others: own.wants[:1]

def note(word, unit):
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{word} {name} {unit}\\n".encode())
    os.close(file)

sys.stdin.readline()
spec = claim.ClaimSpec("cpu", units=int(units))
with claim.hold_device(spec, name, Path(folder)) as held:
    note("enter", held.unit)
    time.sleep(float(stay_s)) if stay_s else sys.stdin.readline()
    note("leave", held.unit)
"""


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition`` holds, far longer than any loaded machine needs."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_s, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "claims"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user may write, and which lies in no private one."""
    place = Path(tempfile.mkdtemp(prefix="routewise-test-", dir="/tmp"))
    place.chmod(0o755)
    folder = place / "claims"
    ledger.check_folder(folder)
    yield folder
    shutil.rmtree(place)


def all_claims(folder: Path) -> list[claim.Claim]:
    return [found for device in claimed_devices(folder) for found in read_claims(folder, device)]


def kernel_locks(path: Path) -> list[str]:
    """Return the kernel's own list of the locks on a file."""
    wanted = f":{path.stat().st_ino} "
    return [line for line in Path("/proc/locks").read_text().splitlines() if wanted in line]


def assert_nothing_left(folder: Path) -> None:
    assert all_claims(folder) == []
    for path in folder.iterdir():
        assert re.fullmatch(r"routewise-[a-z]+\.claims", path.name)
        assert path.stat().st_size == 0
        assert kernel_locks(path) == []


# --- the fight ---------------------------------------------------------------------------------


def inside(lines: list[str]) -> dict[str, str]:
    """Return name → unit of those that entered, have not left and were not killed."""
    found: dict[str, str] = {}
    killed = set()
    for line in lines:
        word, name, *unit = line.split()
        if word == "enter" and name not in killed:
            found[name] = unit[0]
        elif word != "enter":
            found.pop(name, None)
            killed |= {name} if word == "kill" else set()
    return found


def fight_faults(lines: list[str], arrivals: list[str]) -> list[str]:
    """Return what is wrong in a fight's log: units held twice, names granted out of order.

    ``kill NAME`` stands in the log before the kill; from there on NAME may still get the claim and
    die with it, which counts as nothing. Without ``arrivals`` the order is not looked at.
    """
    faults = []
    ahead = list(arrivals)
    dead = set()
    for index, line in enumerate(lines):
        word, name, *_ = line.split()
        if word == "kill":
            dead.add(name)
        if word != "enter" or name in dead:
            continue
        before = inside(lines[:index])
        unit = line.split()[2]
        if unit in before.values():
            faults.append(f"{name} entered unit {unit}, held by {', '.join(before)}")
        if arrivals:
            ahead = ahead[ahead.index(name) :] if name in ahead else ahead
            overtaken = [
                other
                for other in arrivals[: arrivals.index(name)]
                if other not in dead and not any(f"enter {other} " in old for old in lines[:index])
            ]
            faults += [f"{name} entered before {other}" for other in overtaken]
    return faults


class Fight:
    """Fighters around one device, a log that all of them append to, and what to do with them."""

    def __init__(self, folder: Path, units: int = 1, fault: str = "", stay_s: str = "") -> None:
        self.folder = folder
        self.log = folder.parent / "log"
        self.log.touch()
        self.said = folder.parent / "said"
        self.arrivals: list[str] = []
        self.fighters: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments = (str(units), fault, stay_s)

    def __enter__(self) -> Fight:
        return self

    def __exit__(self, *_: object) -> None:
        for fighter in self.fighters.values():
            fighter.kill()
            fighter.wait()
            assert fighter.stdin is not None
            fighter.stdin.close()

    def start(self, names: list[str]) -> None:
        for name in names:
            with self.said.open("ab") as said:
                self.fighters[name] = subprocess.Popen(
                    [sys.executable, "-c", FIGHTER, self.folder, self.log, name, *self._arguments],
                    stdin=subprocess.PIPE,
                    stderr=said,
                    bufsize=0,
                )

    def tell(self, name: str) -> None:
        stdin = self.fighters[name].stdin
        assert stdin is not None
        stdin.write(b"\n")

    def arrive(self, name: str) -> None:
        """Let a fighter queue, and return when it is seen there."""
        self.tell(name)
        wait_for(lambda: name in {found.label for found in all_claims(self.folder)}, name)
        self.arrivals.append(name)

    def kill(self, name: str) -> None:
        with self.log.open("a") as log:
            log.write(f"kill {name}\n")
        self.fighters[name].send_signal(signal.SIGKILL)
        self.fighters[name].wait()

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def run(self, victims: set[str], chance: random.Random) -> None:
        """Let one holder after the other leave or die, and kill waiting victims in between."""
        present = list(self.arrivals)
        while present:
            wait_for(lambda: inside(self.lines()), "the next to enter")
            for name in victims & set(present) - set(inside(self.lines())):
                if chance.random() < 0.2:
                    self.kill(name)
                    present.remove(name)
            holders = [name for name in inside(self.lines()) if name in present]
            if not holders:
                continue
            holder = chance.choice(holders)
            if holder in victims:
                self.kill(holder)
            else:
                self.tell(holder)
                self.fighters[holder].wait()
            present.remove(holder)


@contextmanager
def other_holder(folder: Path, name: str) -> Iterator[Fight]:
    """Have another process hold the device ``cpu`` under a label, and then let it leave."""
    with Fight(folder) as holder:
        holder.start([name])
        holder.arrive(name)
        wait_for(lambda: name in inside(holder.lines()), name)
        yield holder
        holder.tell(name)
        assert holder.fighters[name].wait(PATIENCE_S) == 0, holder.said.read_text()


NAMES = [f"f{index:02}" for index in range(20)]


def fight(folder: Path, fault: str, units: int, seed: int, names: list[str]) -> Fight:
    chance = random.Random(seed)
    victims = set(chance.sample(names, len(names) // 2))
    with Fight(folder, units, fault) as result:
        result.start(names)
        for name in names:
            result.arrive(name)
        result.run(victims, chance)
    return result


def test_twenty_fight_for_one_claim_and_ten_are_killed(folder: Path) -> None:
    done = fight(folder, "", 1, random.randrange(1 << 30), NAMES)
    lines = done.lines()
    assert fight_faults(lines, done.arrivals) == [], lines
    assert sum(line.startswith("kill") for line in lines) == 10
    assert sum(line.startswith("leave") for line in lines) >= 10
    assert_nothing_left(folder)


def test_two_units_serve_two_at_once_in_order(folder: Path) -> None:
    names = NAMES[:8]
    with Fight(folder, units=2) as pair:
        pair.start(names)
        for name in names[:2]:
            pair.arrive(name)
            wait_for(lambda name=name: name in inside(pair.lines()), name)  # type: ignore[misc]
        for name in names[2:]:
            pair.arrive(name)
        assert inside(pair.lines()) == {"f00": "0", "f01": "1"}
        for index in range(2, 8):
            leaver = random.choice(sorted(inside(pair.lines())))
            pair.kill(leaver) if index % 2 else pair.tell(leaver)
            wait_for(lambda index=index: names[index] in inside(pair.lines()), "the next")  # type: ignore[misc]
            assert len(inside(pair.lines())) == 2
        assert fight_faults(pair.lines(), pair.arrivals) == []
    assert_nothing_left(folder)


def test_all_at_once_and_killed_at_any_moment(folder: Path) -> None:
    """Kills fall into arriving, waiting, holding and leaving, with nobody stepping them."""
    names = NAMES[:12]
    with Fight(folder, stay_s="0.005") as free:
        free.start(names)
        for name in names:
            free.tell(name)
        for name in random.sample(names, 6):
            seen = len(free.lines())
            wait_for(lambda seen=seen: len(free.lines()) > seen or not all_claims(folder), "a move")  # type: ignore[misc]
            free.kill(name)
        for fighter in free.fighters.values():
            assert fighter.wait(PATIENCE_S) in (0, -signal.SIGKILL)
        assert fight_faults(free.lines(), []) == []
    assert_nothing_left(folder)


@pytest.mark.parametrize(
    ("fault", "found"), [("newest first", "entered before"), ("no lock", "held by")]
)
def test_broken_claims_are_found(folder: Path, fault: str, found: str) -> None:
    done = fight(folder, fault, 1, 1, NAMES[:6])
    assert any(found in problem for problem in fight_faults(done.lines(), done.arrivals))


def test_checker_reads_logs_rightly() -> None:
    arrivals = ["a", "b", "c"]
    good = ["enter a 0", "kill b", "leave a 0", "enter c 0", "leave c 0"]
    assert fight_faults(good, arrivals) == []
    # granted at the moment of its death
    assert fight_faults(["enter a 0", "leave a 0", "kill b", "enter b 0", "enter c 0"], []) == []
    assert fight_faults(["enter a 0", "leave a 0", "enter c 0"], arrivals) == ["c entered before b"]
    assert len(fight_faults(["enter a 0", "enter b 0"], arrivals)) == 1
    assert fight_faults(["enter a 0", "enter b 1"], arrivals) == []


# --- who is next -------------------------------------------------------------------------------


def made_entry(ticket: int, wants: str, whole: bool = False, units: str = "") -> Entry:
    return Entry(
        ticket=ticket,
        label=f"job {ticket}",
        wants=tuple(wants),
        whole=whole,
        limit_s=60.0,
        user="someone",
        pid=1,
        start_ticks=1,
        arrived_s=0.0,
        granted_s=1.0 if units else None,
        units=tuple(units),
    )


def test_units_are_granted_in_order() -> None:
    holder = made_entry(1, "01", units="0")
    second, third = made_entry(2, "01"), made_entry(3, "01")
    assert free_units(second, [holder, second, third]) == ("1",)
    assert free_units(third, [holder, second, third]) == ()  # unit 1 is the second's


def test_claim_on_all_units_waits_for_all_and_is_not_starved() -> None:
    holder = made_entry(1, "01", units="0")
    whole, later = made_entry(2, "01", whole=True), made_entry(3, "01")
    assert free_units(whole, [holder, whole, later]) == ()
    assert free_units(later, [holder, whole, later]) == ()
    assert free_units(whole, [whole, later]) == ("0", "1")


def test_claim_may_pass_one_that_wants_other_units() -> None:
    holder = made_entry(1, "0", units="0")
    first, second = made_entry(2, "0"), made_entry(3, "1")
    assert free_units(first, [holder, first, second]) == ()
    assert free_units(second, [holder, first, second]) == ("1",)


wanted_units = st.sets(st.sampled_from("0123"), min_size=1).map(
    lambda units: "".join(sorted(units))
)


@given(st.lists(st.tuples(wanted_units, st.booleans()), min_size=1, max_size=8), st.randoms())
def test_every_claim_is_granted_alone_and_in_turn(
    jobs: list[tuple[str, bool]], chance: random.Random
) -> None:
    entries = [made_entry(ticket, wants, whole) for ticket, (wants, whole) in enumerate(jobs, 1)]
    n_done = 0
    while entries:
        entry = chance.choice(entries)
        if entry.holds:
            entries.remove(entry)
            n_done += 1
            continue
        units = free_units(entry, entries)
        if units:
            held = {unit for other in entries for unit in other.units}
            assert not held & set(units)
            assert set(units) <= set(entry.wants)
            assert len(units) == (len(entry.wants) if entry.whole else 1)
            for other in entries:
                assert (
                    other.holds or other.ticket >= entry.ticket or not set(units) & set(other.wants)
                )
            entries[entries.index(entry)] = replace(entry, units=units, granted_s=1.0)
        elif not any(other.holds for other in entries):
            # with nothing held somebody can go on: no deadlock
            assert any(free_units(other, entries) for other in entries)
    assert n_done == len(jobs)


# --- holding -----------------------------------------------------------------------------------


def test_held_tells_what_is_held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(folder))  # no vendor tool
    with hold_device(ClaimSpec("cuda", units=2), "a job", folder) as held:
        assert (held.device, held.unit, held.units) == ("cuda", "0", ("0",))
        assert held.environment == {
            "CUDA_VISIBLE_DEVICES": "0",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        assert held.count_others() is None
        assert 0 <= held.wait_s < PATIENCE_S
        first_s = held.hold_s
        wait_for(lambda: held.hold_s > first_s, "the clock")
    assert held.hold_s == held.hold_s
    with hold_device(CPU, "a job", folder) as held:
        assert (held.environment, held.count_others()) == ({}, None)
    with hold_device(ClaimSpec("cuda", units=2, whole=True), "a job", folder) as held:
        assert (held.unit, held.units) == (None, ("0", "1"))
        assert held.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert_nothing_left(folder)


def test_same_process_cannot_claim_twice(folder: Path) -> None:
    with hold_device(CPU, "outer", folder):
        with (
            pytest.raises(RoutewiseError, match="claims cpu already"),
            hold_device(CPU, "inner", folder),
        ):
            pass
        with hold_device(ClaimSpec("npu"), "another device", folder):
            assert len(all_claims(folder)) == 2
    with hold_device(CPU, "again", folder):
        pass
    assert (folder / "routewise-cpu.claims").stat().st_size == 0


NESTED = """
import sys
from pathlib import Path
from routewise.claim import ClaimSpec, hold_device
from routewise.errors import report_errors

@report_errors
def main():
    with hold_device(ClaimSpec("cpu", units=int(sys.argv[2])), "inner", Path(sys.argv[1])) as held:
        print("unit", held.unit)

raise SystemExit(main())
"""


def test_child_cannot_wait_for_its_parent(folder: Path) -> None:
    def run_inner(units: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", NESTED, str(folder), str(units)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    with hold_device(CPU, "outer", folder):
        done = run_inner(1)
        assert done.returncode == 2
        assert "held by 'outer'" in done.stderr
        assert "would wait for itself" in done.stderr
    with hold_device(ClaimSpec("cpu", units=2), "outer", folder):
        assert run_inner(2).stdout == "unit 1\n"
    assert_nothing_left(folder)


PARENT = """
import fcntl, os, subprocess, sys, time
from pathlib import Path
from routewise import ledger
from routewise.claim import ClaimSpec, hold_device

with hold_device(ClaimSpec("cpu"), "parent", Path(sys.argv[1])):
    if sys.argv[2] == "inherited":
        for descriptor in ledger._descriptors:
            os.set_inheritable(descriptor, True)
    server = subprocess.Popen(["sleep", "1000"], close_fds=False, stdout=subprocess.DEVNULL)
    forked = os.fork()
    if forked == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        while True:
            time.sleep(1000)
    print(server.pid, forked, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["closed", "inherited"])
def test_holders_death_frees_it_though_children_live(folder: Path, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), how], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        children = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        parent.kill()
        parent.wait()
        assert [Path(f"/proc/{pid}").exists() for pid in children] == [True, True]
        if how == "closed":  # at once, but for a forked child that has not run yet
            wait_for(lambda: not all_claims(folder), "the children to let go")
        else:  # a lock that a child has taken over is seen by this test
            assert [found.label for found in all_claims(folder)] == ["parent"]
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not all_claims(folder), "the kernel")
    assert_nothing_left(folder)


def test_forked_child_does_not_release(folder: Path) -> None:
    def claim_in_child() -> None:
        with hold_device(ClaimSpec("npu"), "child", folder):
            assert len(all_claims(folder)) == 2
        with (
            pytest.raises(RoutewiseError, match="which started this one"),
            hold_device(CPU, "child", folder),
        ):
            pass

    with hold_device(CPU, "parent", folder):
        child = os.fork()
        if child == 0:
            as_user(None, claim_in_child)
        assert os.waitpid(child, 0)[1] == 0
        assert [found.label for found in all_claims(folder)] == ["parent"]


WAITER = """
import signal, sys
from pathlib import Path
from routewise.claim import ClaimSpec, hold_device
signal.signal(signal.SIGINT, signal.default_int_handler)
with hold_device(ClaimSpec("cpu"), "waiter", Path(sys.argv[1])) as held:
    print("granted", held.wait_s > 0)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_waiting_says_for_whom_and_ends_at_a_signal(folder: Path, number: signal.Signals) -> None:
    with other_holder(folder, "long-job"):
        waiter = subprocess.Popen(
            [sys.executable, "-c", WAITER, str(folder)], stderr=subprocess.PIPE, text=True
        )
        assert waiter.stderr is not None
        with waiter.stderr:
            line = waiter.stderr.readline()
            waiter.send_signal(number)
            waiter.stderr.read()
        # Python turns Ctrl-C in a -c program into exit code 1, or into the signal
        assert waiter.wait(PATIENCE_S) in (-number, {signal.SIGINT: 1}.get(number))
        assert re.search(
            r"waiting for cpu, place 1 of 1; held by 'long-job' \(\S+, process \d+\) "
            r"since \d\d:\d\d:\d\d, limit 2 h 0 min$",
            line.strip(),
        ), line
        assert [found.label for found in all_claims(folder)] == ["long-job"]
        size = (folder / "routewise-cpu.claims").stat().st_size
        assert size == ledger.ENTRY_BYTES
    assert_nothing_left(folder)


def test_waiting_counts(folder: Path) -> None:
    with other_holder(folder, "first"):
        waiter = subprocess.Popen(
            [sys.executable, "-c", WAITER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        wait_for(lambda: len(all_claims(folder)) == 2, "the waiter")
    assert waiter.communicate(timeout=PATIENCE_S)[0] == "granted True\n"


# --- the view ----------------------------------------------------------------------------------


def view(folder: Path) -> str:
    stream = io.StringIO()
    print_claims(stream, folder)
    return stream.getvalue()


def test_view_shows_holders_and_queue(folder: Path) -> None:
    assert view(folder) == f"Nothing is held, and nobody waits (claims are kept in {folder}).\n"
    with (
        hold_device(ClaimSpec("npu"), "long \x1b[2J job", folder),
        other_holder(folder, "long-job") as queue,
    ):
        queue.start(["f00", "f01"])
        queue.arrive("f00")
        queue.arrive("f01")
        rows = [re.split(r"  +", line) for line in view(folder).splitlines()]
        assert rows[0] == [
            *("device", "unit", "state", "since", "for", "limit", "user", "process", "label")
        ]
        assert [row[:3] for row in rows[1:]] == [
            ["cpu", "0", "held"],
            ["cpu", "0", "waits, place 1"],
            ["cpu", "0", "waits, place 2"],
            ["npu", "0", "held"],
        ]
        assert [row[-1] for row in rows[1:]] == ["long-job", "f00", "f01", "long ?[2J job"]
        assert rows[4][6:8] == [ledger.user_name(), str(os.getpid())]
        for name in ("f00", "f01"):
            queue.tell(name)
    wait_for(lambda: view(folder).startswith("Nothing is held"), "the end of all")


def test_view_marks_a_holder_whose_limit_has_passed(folder: Path) -> None:
    over = threading.Event()
    spec = ClaimSpec("cpu", limit_minutes=0.0005)
    with hold_device(spec, "slow", folder, on_limit=lambda held: over.set(), stream=io.StringIO()):
        assert over.wait(PATIENCE_S)
        wait_for(lambda: all_claims(folder)[0].overdue, "the limit")
        assert "OVERDUE" in view(folder)
    with hold_device(CPU, "quick", folder):
        assert "OVERDUE" not in view(folder)


def test_view_names_a_ledger_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with hold_device(CPU, "job", folder):
        (folder / "routewise-bad.claims").symlink_to(tmp_path / "victim")
        shown = view(folder)
    assert "job" in shown
    assert "bad: " in shown
    assert not (tmp_path / "victim").exists()


# --- the time limit ----------------------------------------------------------------------------

LIMITED = """
import asyncio, sys, time
from pathlib import Path
from routewise import claim
from routewise.errors import report_errors

async def serve():
    try:
        while True:
            try:
                time.sleep(0.001)  # the limit passes here, in the midst of a task
                await asyncio.sleep(0)
            except Exception:
                pass
    finally:
        print("task ended")

def work(kind):
    if kind == "async":
        asyncio.run(serve())
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            if kind != "deaf":
                raise

@report_errors
def main(folder, kind):
    if kind == "deaf":
        claim.GRACE_S = 0.1
    spec = claim.ClaimSpec("cpu", limit_minutes=0.0005)
    with claim.hold_device(spec, "slow job", Path(folder)):
        try:
            work(kind)
        finally:
            print("cleaned up", flush=True)

raise SystemExit(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("kind", "printed"),
    [("plain", "cleaned up\n"), ("async", "task ended\ncleaned up\n"), ("deaf", "")],
)
def test_job_ends_when_its_limit_has_passed(folder: Path, kind: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder), kind],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, printed), done.stderr
    assert "claim of 'slow job' on cpu has passed its limit of 0.0 s" in done.stderr
    assert ("by force" in done.stderr) == (kind == "deaf")
    if kind != "deaf":
        assert "slow job: held cpu for" in done.stderr
        assert "what was measured is kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_left(folder)


def test_limit_in_this_process_leaves_no_handler(folder: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    spec = ClaimSpec("cpu", limit_minutes=0.0005)
    with (
        pytest.raises(RoutewiseError, match="longer than its limit"),
        hold_device(spec, "slow", folder, stream=io.StringIO()),
    ):
        threading.Event().wait(PATIENCE_S)
    assert signal.getsignal(signal.SIGUSR2) is before
    with hold_device(CPU, "quick", folder):  # a limit that has not passed says nothing
        pass
    assert_nothing_left(folder)


@pytest.mark.parametrize(
    "limited", [{"cpu"}, {"npu"}, {"cpu", "npu"}], ids=["outer", "inner", "both"]
)
def test_limit_of_one_of_two_claims_ends_that_one(folder: Path, limited: set[str]) -> None:
    outer, inner = (
        ClaimSpec(device, limit_minutes=0.0005 if device in limited else 60)
        for device in ("cpu", "npu")
    )
    ended: list[str] = []

    def work() -> None:
        try:
            with hold_device(inner, "inner", folder, stream=io.StringIO()):
                try:
                    threading.Event().wait(PATIENCE_S)
                finally:
                    # cleaning up takes longer than the other limit, and is not disturbed
                    ends_s = time.monotonic() + 0.2
                    while time.monotonic() < ends_s:
                        time.sleep(0.01)
                    ended.append("cleaned up")
        finally:
            ended.extend(found.device for found in all_claims(folder))

    with (
        pytest.raises(RoutewiseError, match=f"held ({'|'.join(limited)}) for"),
        hold_device(outer, "outer", folder, stream=io.StringIO()),
    ):
        work()
    assert ended == ["cleaned up", "cpu"]
    assert_nothing_left(folder)


def test_limit_of_a_task_is_not_swallowed_here(folder: Path) -> None:
    spec = ClaimSpec("cpu", limit_minutes=0.0005)
    with (
        pytest.raises(RoutewiseError, match="longer than its limit"),
        hold_device(spec, "slow", folder, stream=io.StringIO()),
    ):
        asyncio.run(asyncio.sleep(PATIENCE_S))


def test_other_thread_needs_a_callback(folder: Path) -> None:
    caught: list[BaseException] = []

    def claim_it() -> None:
        try:
            with hold_device(CPU, "thread", folder):
                pass
        except RuntimeError as error:
            caught.append(error)
        with hold_device(CPU, "thread", folder, on_limit=lambda held: None):
            pass

    thread = threading.Thread(target=claim_it)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "on_limit" in str(caught[0])


# --- folders, users, planted files -------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def as_user(user: int | None, action: Callable[[], None]) -> NoReturn:
    """Become another user, run ``action`` and end this process."""
    code = 1
    try:
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        action()
        code = 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def in_child(action: Callable[[], None], user: int) -> int:
    """Run ``action`` in a forked child as another user; return its exit code."""
    child = os.fork()
    if child == 0:
        as_user(user, action)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("tmpfile", [True, False], ids=["at-once", "in-two-steps"])
def test_files_are_open_to_all_whatever_the_umask(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmpfile: bool
) -> None:
    if not tmpfile:  # as on a file system that knows no nameless files
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    with umask(0o077), hold_device(CPU, "private", folder):
        # complete at the moment that its name appears, or from its maker's first steps
        ledger._make(folder, "routewise-npu.claims")
    assert stat.S_IMODE((folder / "routewise-npu.claims").stat().st_mode) == 0o666
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    path = folder / "routewise-cpu.claims"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    path.chmod(0o600)  # its maker was killed half-way
    with umask(0o077), hold_device(CPU, "private", folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert_nothing_left(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for two users")
def test_two_users_share_a_claim(open_folder: Path) -> None:
    def as_nobody() -> None:
        os.umask(0o077)
        with hold_device(CPU, "nobody's", open_folder):
            pass

    # nobody makes the file, root uses it, and the other way round
    assert in_child(as_nobody, NOBODY) == 0
    assert (open_folder / "routewise-cpu.claims").stat().st_uid == NOBODY
    with umask(0o077), hold_device(ClaimSpec("npu"), "root's", open_folder):
        pass
    with other_holder(open_folder, "root's"):
        waiter = os.fork()
        if waiter == 0:
            as_user(NOBODY, as_nobody)
        wait_for(lambda: len(all_claims(open_folder)) == 2, "nobody's claim")
        assert [found.user for found in all_claims(open_folder)] == ["root", "nobody"]
    assert os.waitstatus_to_exitcode(os.waitpid(waiter, 0)[1]) == 0
    assert in_child(lambda: use_npu(open_folder), NOBODY) == 0
    assert_nothing_left(open_folder)


def use_npu(folder: Path) -> None:
    with hold_device(ClaimSpec("npu"), "nobody's", folder):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for two users")
def test_folder_or_file_closed_to_a_user_is_named(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_MODE_PATIENCE_S", 0.05)
    path = open_folder / "routewise-cpu.claims"
    path.touch(0o600)

    def refused(match: str) -> Callable[[], None]:
        def attempt() -> None:
            with pytest.raises(RoutewiseError, match=match), hold_device(CPU, "x", open_folder):
                pass

        return attempt

    assert in_child(refused("is not open to this user"), NOBODY) == 0
    path.unlink()
    open_folder.chmod(0o755)
    assert in_child(refused("claims cannot be kept in .*: Permission denied"), NOBODY) == 0
    open_folder.chmod(0o700)
    assert in_child(refused("closed to this user"), NOBODY) == 0


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "pipe", "folder"])
def test_planted_file_is_refused_and_left_alone(folder: Path, tmp_path: Path, kind: str) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    victim = tmp_path / "victim"
    path = folder / "routewise-cpu.claims"
    if kind != "dangling":
        victim.write_text("precious")
        victim.chmod(0o644)
    if kind in ("link", "dangling"):
        path.symlink_to(victim)
    elif kind == "hard link":
        path.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with (
        pytest.raises(RoutewiseError, match=r"is a link or no plain file"),
        hold_device(CPU, "x", folder),
    ):
        pass
    if kind == "dangling":
        assert not victim.exists()
    else:
        assert victim.read_text() == "precious"
        assert stat.S_IMODE(victim.stat().st_mode) == 0o644


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(RoutewiseError) as caught, hold_device(CPU, "x", folder):
            pass
        return str(caught.value)

    assert "No such file" in refusal(Path("/proc/claims"))
    assert "ROUTEWISE_CLAIMS" in refusal(tmp_path / "no" / "parent")
    (tmp_path / "file").touch()
    assert "not a folder" in refusal(tmp_path / "file")
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose").chmod(0o777)
    assert "no sticky bit" in refusal(tmp_path / "loose")


def test_shared_file_system_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "36 35 0:52 / /net rw,noatime shared:1 - nfs4 server:/x rw\n"
    assert ledger.file_system_of(os.makedev(0, 52), mounts) == "nfs4"
    assert ledger.file_system_of(os.makedev(0, 53), mounts) is None
    monkeypatch.setattr(ledger, "file_system_of", lambda device, mounts: "nfs4")
    with pytest.raises(RoutewiseError, match="it is on nfs4"), hold_device(CPU, "x", folder):
        pass


def test_folder_is_chosen_by_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(tmp_path / name) for name in ("missing", "private", "open")]
    monkeypatch.setattr(claim, "_DEFAULT_FOLDERS", names)
    monkeypatch.delenv("ROUTEWISE_CLAIMS", raising=False)
    for name in names[1:]:
        Path(name).mkdir()
    with pytest.raises(RoutewiseError, match="no folder for claims"):
        claim.claims_folder()
    Path(names[2]).chmod(0o1777)
    assert claim.claims_folder() == Path(names[2])
    monkeypatch.setenv("ROUTEWISE_CLAIMS", names[1])
    assert claim.claims_folder() == Path(names[1])


def test_existing_file_is_never_opened_as_a_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts with fs.protected_regular refuse O_CREAT on another user's file in a sticky folder."""
    with hold_device(CPU, "makes it", folder):
        pass
    flags: list[int] = []
    real = os.open

    def recording(path: os.PathLike[str], how: int, *rest: int, **more: int) -> int:
        flags.append(how)
        return real(path, how, *rest, **more)

    monkeypatch.setattr(os, "open", recording)
    with hold_device(CPU, "uses it", folder):
        pass
    assert flags
    assert not [how for how in flags if how & os.O_CREAT]


def test_removed_ledger_is_noticed(folder: Path) -> None:
    with other_holder(folder, "holder") as queue:
        queue.start(["f00"])
        queue.arrive("f00")
        (folder / "routewise-cpu.claims").unlink()
        # the one who waits queues anew in the new file
        wait_for(lambda: [found.label for found in all_claims(folder)] == ["f00"], "f00")
    said = queue.said.read_text()
    assert "was removed while this job waited; queueing anew" in said
    assert "was removed while cpu was held" in said


def test_dead_entries_are_wiped_and_living_ones_stay(folder: Path) -> None:
    ledger.check_folder(folder)
    authors = [Ledger(folder, "routewise-cpu.claims") for _ in range(4)]
    tickets = []
    for author in authors:
        with author.locked():
            tickets.append(author.arrive(made_entry(0, "0")).ticket)
    assert tickets == [1, 2, 3, 4]
    path = folder / "routewise-cpu.claims"
    for index in (0, 3):  # dead: their descriptors are closed by nobody's code
        os.close(authors[index]._descriptor)
        ledger._descriptors.discard(authors[index]._descriptor)
    assert path.stat().st_size == 4 * ledger.ENTRY_BYTES
    assert [found.pid for found in read_claims(folder, "cpu")] == [1, 1]
    assert path.stat().st_size == 3 * ledger.ENTRY_BYTES
    assert path.read_bytes()[: ledger.ENTRY_BYTES].isspace()
    with authors[1].locked():
        assert [entry.ticket for entry in authors[1].entries()] == [2, 3]
    with Ledger(folder, "routewise-cpu.claims").locked():
        pass
    late = Ledger(folder, "routewise-cpu.claims")
    with late.locked():
        assert late.arrive(made_entry(0, "0")).ticket == 4  # in the first place, last in the queue
        assert [entry.ticket for entry in late.entries()] == [2, 3, 4]
    for author in (authors[1], authors[2], late):
        author.close()
    assert_nothing_left(folder)


def test_process_stopped_in_the_ledger_is_pointed_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "SAY_AFTER_S", 0.01)
    monkeypatch.setattr(ledger, "_CLOSE_PATIENCE_S", 0.01)
    ledger.check_folder(folder)
    stopped, author = (Ledger(folder, "routewise-cpu.claims") for _ in range(2))
    with author.locked():
        author.arrive(made_entry(0, "0"))
    assert capfd.readouterr().err == ""
    said: list[str] = []
    with stopped.locked():
        reader = threading.Thread(target=lambda: said.extend(view(folder).splitlines()))
        reader.start()
        wait_for(lambda: "does not go on" in capfd.readouterr().err, "the message")
        author.close()  # gives up its claim without the ledger
    reader.join(PATIENCE_S)
    assert said == [f"Nothing is held, and nobody waits (claims are kept in {folder})."]
    stopped.close()
    assert_nothing_left(folder)


def test_unreadable_living_entry_stops_and_dead_one_does_not(folder: Path) -> None:
    path = folder / "routewise-cpu.claims"
    with hold_device(CPU, "holder", folder):
        content = path.read_bytes()
        for bad in (b"x" * 10, content.replace(b'"ticket": 1', b'"ticket": []'), b""):
            path.write_bytes(bad)
            with pytest.raises(RoutewiseError, match="claim 0 is not readable"):
                read_claims(folder, "cpu")
            path.write_bytes(content)
    path.write_bytes(b"x" * 10000)
    with hold_device(CPU, "next", folder):
        assert [found.label for found in all_claims(folder)] == ["next"]


# --- units and other processes -----------------------------------------------------------------


def units_of(spec: ClaimSpec, **environment: str) -> dict[str, str]:
    return claim._units_of(spec, environment)


def test_units_respect_a_narrowed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    two = ClaimSpec("cuda", units=2)
    assert list(units_of(two)) == ["0", "1"]
    assert list(units_of(two, CUDA_VISIBLE_DEVICES="1")) == ["1"]
    assert list(units_of(two, CUDA_VISIBLE_DEVICES="2,3")) == ["2", "3"]
    named = ClaimSpec("hrx", units=2, unit_ids=("4", "7"))
    assert list(units_of(named)) == ["4", "7"]
    assert list(units_of(named, ROCR_VISIBLE_DEVICES="7, 9")) == ["7"]
    own = ClaimSpec("npu", visible=("NPU_VISIBLE",))
    assert list(units_of(own, NPU_VISIBLE="3", CUDA_VISIBLE_DEVICES="5")) == ["3"]
    for spec, name, value in (
        (two, "CUDA_VISIBLE_DEVICES", ""),
        (two, "CUDA_VISIBLE_DEVICES", "-1"),
        (named, "ROCR_VISIBLE_DEVICES", "0,1"),
    ):
        with pytest.raises(RoutewiseError, match=f"{name} is '{value}'"):
            units_of(spec, **{name: value})


def fake_nvidia(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a protocol double of nvidia-smi on the path: it answers every query with ``text``."""
    folder.mkdir(exist_ok=True)
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_scheduler_that_counts_from_0_in_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ClaimSpec("cuda", units=2)
    keys = []
    for uuid in ("GPU-aaaa-1", "GPU-bbbb-2"):
        fake_nvidia(tmp_path / "bin", f"echo '0, {uuid}'", monkeypatch)
        keys.append(units_of(spec, CUDA_VISIBLE_DEVICES="0"))
    assert keys == [{"GPU-aaaa-1": "0"}, {"GPU-bbbb-2": "0"}]
    assert units_of(spec, CUDA_VISIBLE_DEVICES="GPU-bbbb") == {"GPU-bbbb-2": "GPU-bbbb"}
    fake_nvidia(tmp_path / "bin", "echo broken >&2; exit 9", monkeypatch)
    with pytest.raises(RoutewiseError, match="nvidia-smi does not tell"):
        units_of(spec)


def test_others_on_the_device_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    child = subprocess.Popen(["sleep", "1000"])
    answers = f"""
case $1 in
--query-gpu=index,uuid) echo '0, GPU-a'; echo '1, GPU-b';;
*) echo 'GPU-a, {child.pid}'; echo 'GPU-a, {os.getpid()}'
   echo 'GPU-a, 1'; echo 'GPU-b, 1';;
esac"""
    try:
        fake_nvidia(folder.parent / "bin", answers, monkeypatch)
        with hold_device(ClaimSpec("cuda", units=2), "x", folder) as held:
            assert held.unit == "0"
            assert held.count_others() == 1  # not this process, not its child, not unit 1's
    finally:
        child.kill()
        child.wait()


def test_nobody_can_tell_is_not_zero() -> None:
    count = claim.count_strangers
    assert count([], ("GPU-a",), {5}) == 0
    assert count([["GPU-a", "5"]], ("GPU-a",), {5}) == 0
    assert count([["GPU-a", "1"]], ("GPU-a",), {5}) == 1
    assert count([["GPU-b", "1"]], ("GPU-a",), {5}) == 0
    assert count([["GPU-b", "1"]], ("0",), {5}) == 1
    assert count([["GPU-a", "[N/A]"]], ("GPU-a",), {5}) is None
    assert count([["No devices were found"]], ("GPU-a",), {5}) is None


def test_process_of_another_container_may_be_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = [["GPU-a", str(1 << 30)]]
    inode = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(claim, "_HOST_PID_NAMESPACE", inode)
    assert claim.count_strangers(unseen, ("GPU-a",), {5}) == 1
    monkeypatch.setattr(claim, "_HOST_PID_NAMESPACE", inode + 1)
    assert claim.count_strangers(unseen, ("GPU-a",), {5}) is None


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"device": "a/b"}, "cannot be claimed"),
        ({"device": "cpu", "units": 0}, "1 is the least"),
        ({"device": "cpu", "limit_minutes": 0}, "above 0"),
        ({"device": "cpu", "limit_minutes": float("inf")}, "above 0"),
        ({"device": "cpu", "units": 2, "unit_ids": ("1", "1")}, "2 different ids"),
        ({"device": "cpu", "hold": ("hold", "{lable}")}, "{lable} is not known"),
    ],
)
def test_bad_spec_is_refused(values: dict[str, object], match: str) -> None:
    with pytest.raises(RoutewiseError, match=re.escape(match)):
        ClaimSpec(**values)  # type: ignore[arg-type]


# --- a box's own hold command ------------------------------------------------------------------

#: A protocol double of `gpu-hold -l LABEL -t MINUTES -- COMMAND`.
HOLD = """#!/bin/sh
echo "$@" >> "$HOLD_CALLS"
[ -z "$HOLD_FAILS" ] || { echo "no such queue" >&2; exit $HOLD_FAILS; }
sleep 0.3
[ -z "$HOLD_DEAF" ] || trap '' TERM
while [ "$1" != -- ]; do shift; done
shift
"$@" &
job=$!
[ -n "$HOLD_DEAF" ] || trap 'kill -TERM $job' TERM
wait $job
code=$?
while kill -0 $job 2>/dev/null; do wait $job; code=$?; done
exit $code
"""

JOB = """
import os, signal, sys, time
from pathlib import Path
from routewise.claim import ClaimSpec, hold_device, run_under_hold
from routewise.errors import report_errors

@report_errors
def main(hold, folder, ends, *rest):
    prefix = (hold, "-l", "{label}", "-t", "{minutes}", "--")
    spec = ClaimSpec("cuda", hold=prefix, limit_minutes=1.5)
    run_under_hold(spec, "my job")
    run_under_hold(spec, "my job")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with hold_device(spec, "my job", Path(folder)) as held:
        print(os.getcwd(), rest, held.wait_s > 0.3, os.getpid(), flush=True)
        if ends == "waits":
            time.sleep(1000)
    return int(ends)

raise SystemExit(main(*sys.argv[1:]))
"""


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpu-hold"
    path.write_text(HOLD)
    path.chmod(0o755)
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setenv("HOLD_CALLS", str(tmp_path / "calls"))
    return path


def start_job(hold: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "job.py", str(hold), str(folder), *arguments],
        cwd=hold.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_job_runs_once_under_its_hold_command(hold: Path, folder: Path) -> None:
    job = start_job(hold, folder, "5", "a b", "")
    printed, said = job.communicate(timeout=PATIENCE_S)
    assert printed.rpartition(" ")[0] == f"{hold.parent} ('a b', '') True", said
    assert (job.returncode, said) == (5, "")
    calls = (hold.parent / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith(f"-l my job -t 2 -- {sys.executable} job.py")
    assert_nothing_left(folder)


def test_hold_command_that_fails_is_told_from_a_job_that_fails(
    hold: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLD_FAILS", "3")
    job = start_job(hold, folder, "0")
    printed, said = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, printed) == (2, "")
    assert "no such queue" in said
    assert "gpu-hold -l my job -t 2 --', ended with exit code 3 before the job started" in said
    assert "try it by hand" in said
    assert len((hold.parent / "calls").read_text().splitlines()) == 1

    job = start_job(hold.parent / "no-hold", folder, "0")
    printed, said = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, printed) == (2, "")
    assert "cannot be started: No such file or directory" in said


def test_hold_command_is_not_forgotten(folder: Path) -> None:
    spec = ClaimSpec("cuda", hold=("gpu-hold", "--"))
    with pytest.raises(RuntimeError, match="run_under_hold first"), hold_device(spec, "x", folder):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_job_under_hold_ends_with_the_one_who_started_it(
    hold: Path, folder: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number == signal.SIGKILL:
        monkeypatch.setenv("HOLD_DEAF", "1")
    job = start_job(hold, folder, "waits")
    assert job.stdout is not None
    inner = int(job.stdout.readline().split()[-1])
    handle = os.pidfd_open(inner)
    assert inner != job.pid
    job.send_signal(number)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == (7 if number == signal.SIGTERM else -number)
    assert select.select([handle], [], [], PATIENCE_S)[0] == [handle]
    os.close(handle)
    assert_nothing_left(folder)
