"""The view of a run: what is done, what runs, what waits for which device, and an estimate.

It is fed with what Snakemake says (a job started, finished, failed) and with the jobs that the run
will make, and says all of it in one line. Nothing here knows Snakemake.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from routewise.claim import Claim, claimed_devices, clock, read_claims
from routewise.errors import RoutewiseError
from routewise.progress import duration

#: What a counted resource is called in the line; others by their name.
WORDS = {"cpu_claim": "the claim on cpu"}
PROCESSOR = "the processor"
SHOWN_JOBS = 4
_DIGEST = re.compile(r"[0-9a-f]{12,64}")

#: Jobs of one rule on the same devices take about as long as each other.
Kind = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Job:
    """One job that a run will make.

    ``devices`` are the counted resources that it takes and how many units of each; ``claims`` the
    names of the claims that it holds; ``after`` the ids of the jobs whose output it reads.
    """

    id: int
    rule: str
    name: str
    devices: Mapping[str, int] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """Return what a job's duration is expected by."""
        return self.rule, tuple(sorted(self.devices))


@dataclass
class _Running:
    job: Job
    threads: int
    start_s: float


class RunView:
    """What is known of a run.

    Parameters
    ----------
    clock
        Returns seconds, which only ever grow.

    Attributes
    ----------
    total
        How many jobs the run has, or None while nobody has said.
    limits
        Counted resource -> how many units jobs may take at once. What stands in no limit is
        unlimited.
    cores
        How many cores the jobs share, or None: a scheduler has the cores, and ``running`` jobs
        are only known to be submitted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total: int | None = None
        self.limits: dict[str, int] = {}
        self.cores: int | None = None
        self.submits = False
        self.n_done = 0
        self._clock = clock
        self._start_s = clock()
        self._jobs: dict[int, Job] = {}
        self._waits_for: dict[int, set[int]] = {}  # job -> jobs that it still needs
        self._needed_by: dict[int, list[int]] = {}
        self._pending: set[int] = set()
        self._left: Counter[Kind] = Counter()  # of the pending jobs
        self._ready: dict[tuple[tuple[str, int], ...], set[int]] = {}  # devices -> pending jobs
        self._running: dict[int, _Running] = {}
        self._failed: dict[int, Job] = {}
        self._took_s: dict[Kind, list[float]] = {}
        self._threads: dict[Kind, int] = {}

    # --- what happens ------------------------------------------------------------------------

    def expect(self, jobs: Iterable[Job]) -> None:
        """Take all jobs that the run will make; without them the line says nothing of waiting."""
        self._jobs = {job.id: job for job in jobs}
        self.total = len(self._jobs)
        for job in self._jobs.values():
            needs = {other for other in job.after if other in self._jobs}
            self._waits_for[job.id] = needs
            for other in needs:
                self._needed_by.setdefault(other, []).append(job.id)
            self._pend(job)

    def started(self, job_id: int, rule: str, name: str, threads: int = 1) -> None:
        """Note that a job runs; a job that was not expected is known by this alone."""
        job = self._jobs.get(job_id) or Job(job_id, rule, name)
        self._failed.pop(job_id, None)  # a second try
        if job_id in self._pending:
            self._pending.discard(job_id)
            self._left[job.kind] -= 1
            self._ready.get(_devices(job), set()).discard(job_id)
        self._threads[job.kind] = threads
        self._running[job_id] = _Running(job, threads, self._clock())

    def finished(self, job_id: int) -> None:
        """Note that a job is done."""
        running = self._running.pop(job_id, None)
        if running is None:
            return
        self.n_done += 1
        took_s = self._clock() - running.start_s
        self._took_s.setdefault(running.job.kind, []).append(took_s)
        for other in self._needed_by.get(job_id, ()):
            self._waits_for[other].discard(job_id)
            if other in self._pending and not self._waits_for[other]:
                self._set_ready(self._jobs[other])

    def failed(self, job_id: int) -> None:
        """Note that a job failed; what needs it cannot run, unless it is tried again."""
        running = self._running.pop(job_id, None)
        job = running.job if running is not None else self._jobs.get(job_id)
        if job is not None:
            self._failed[job_id] = job

    def _pend(self, job: Job) -> None:
        self._pending.add(job.id)
        self._left[job.kind] += 1
        if not self._waits_for[job.id]:
            self._set_ready(job)

    def _set_ready(self, job: Job) -> None:
        self._ready.setdefault(_devices(job), set()).add(job.id)

    # --- what is asked -----------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Say whether every job of the run is done."""
        return self.total is not None and self.n_done >= self.total

    @property
    def passed_s(self) -> float:
        """Return the seconds since the view was made."""
        return self._clock() - self._start_s

    def claims_in_use(self) -> set[str]:
        """Return the names of the claims that running jobs hold or wait for."""
        return {name for running in self._running.values() for name in running.job.claims}

    def waiting(self) -> dict[str, int]:
        """Return how many jobs wait for what: a device, the processor, or other jobs.

        A job that could start but for a device that running jobs have all units of waits for that
        device; where no limit says how many units there are, or one is free, it waits for the
        processor.
        """
        used: Counter[str] = Counter()
        for running in self._running.values():
            used.update(running.job.devices)
        found: Counter[str] = Counter()
        n_ready = 0
        for devices, jobs in self._ready.items():
            n_ready += len(jobs)
            taken = (
                name
                for name, units in devices
                if name in self.limits and used[name] + units > self.limits[name]
            )
            name = next(taken, None)
            found[PROCESSOR if name is None else WORDS.get(name, name)] += len(jobs)
        named = {name: found[name] for name in sorted(found) if found[name] and name != PROCESSOR}
        if found[PROCESSOR]:
            named[PROCESSOR] = found[PROCESSOR]
        others = len(self._pending) - n_ready - self.n_blocked()
        return named | ({"other jobs": others} if others > 0 else {})

    def n_blocked(self) -> int:
        """Return how many jobs cannot run, because one that they need has failed."""
        blocked: set[int] = set()
        queue = list(self._failed)
        while queue:
            for other in self._needed_by.get(queue.pop(), ()):
                if other not in blocked:
                    blocked.add(other)
                    queue.append(other)
        return len(blocked)

    def left_s(self) -> tuple[float | None, int]:
        """Return the seconds that the run may still take, and how many jobs are not in them.

        Each job is taken to last as long as those of its rule, on the same devices, did in this
        run, and each device and the cores to be always busy; the least time that this leaves is
        returned. A job of a kind that has not finished once is in no estimate; None where such
        jobs are more than the others: then nobody can say.
        """
        core_s = 0.0
        device_s: dict[str, float] = {}
        longest_s = 0.0
        n_known = n_unknown = 0

        def count(kind: Kind, devices: Mapping[str, int], each_s: float, n: int) -> None:
            nonlocal core_s, longest_s, n_known
            n_known += n
            core_s += n * each_s * self._threads[kind]
            longest_s = max(longest_s, each_s)
            for name, units in devices.items():
                if name in self.limits:
                    each_unit_s = n * each_s * units / max(1, self.limits[name])
                    device_s[name] = device_s.get(name, 0.0) + each_unit_s

        for running in self._running.values():
            kind = running.job.kind
            if kind in self._took_s:
                passed_s = self._clock() - running.start_s
                count(kind, running.job.devices, max(0.0, self._mean_s(kind) - passed_s), 1)
            else:
                n_unknown += 1
        for kind, n in self._left.items():
            if n and kind in self._took_s:
                count(kind, dict.fromkeys(kind[1], 1), self._mean_s(kind), n)
            else:
                n_unknown += n
        if n_known <= n_unknown:
            return None, n_unknown
        if self.cores:
            longest_s = max(longest_s, core_s / self.cores)
        return max([longest_s, *device_s.values()]), n_unknown

    def _mean_s(self, kind: Kind) -> float:
        took_s = self._took_s[kind]
        return sum(took_s) / len(took_s)

    # --- in words ----------------------------------------------------------------------------

    def line(self, outsiders: Iterable[str] = (), columns: int | None = None) -> str:
        """Return all of it in one line; ``outsiders`` say which device others hold.

        Where there are too few ``columns`` for it, fewer of the running jobs are named, so that
        what waits and the estimate stay.
        """
        others = list(outsiders)
        for n_shown in range(SHOWN_JOBS, -1, -1):
            text = self._line(others, n_shown)
            if columns is None or len(text) < columns:
                break
        return text

    def _line(self, outsiders: list[str], n_shown: int) -> str:
        parts = [f"done {self.n_done}" + (f" of {self.total}" if self.total else "")]
        if self._running:
            jobs = [_shown(running.job) for running in self._running.values()]
            named = ", ".join(jobs[:n_shown]) or _jobs(len(jobs))
            more = f" and {len(jobs) - n_shown} more" if len(jobs) > n_shown > 0 else ""
            parts.append(f"{'submitted' if self.submits else 'running'}: {named}{more}")
        if waiting := self.waiting():
            parts.append(f"waiting: {', '.join(f'{n} for {name}' for name, n in waiting.items())}")
        parts += outsiders
        if self._failed:
            parts.append(f"{len(self._failed)} failed" + _if_any(self.n_blocked(), "cannot run"))
        if estimate := self._estimate():
            parts.append(estimate)
        return " · ".join(parts)

    def last_line(self) -> str:
        """Return what is to be said when the run is over."""
        text = f"done {self.n_done}" + (f" of {self.total}" if self.total else "")
        text += _if_any(len(self._failed), "failed") + _if_any(self.n_blocked(), "could not run")
        return f"{text} in {duration(self.passed_s)}"

    def _estimate(self) -> str:
        left_s, n_unknown = self.left_s()
        if left_s is None or not (self._running or self._pending):
            return ""
        if left_s < 60:
            text = "estimate: less than 1 min left"
        elif left_s < 5400:
            text = f"estimate: about {round(left_s / 60)} min left"
        else:
            text = f"estimate: about {left_s / 3600:.1f} h left"
        return text + (f", and {_jobs(n_unknown)} of kinds not seen yet" if n_unknown else "")


def _jobs(n: int) -> str:
    return "1 job" if n == 1 else f"{n} jobs"


def _if_any(n: int, words: str) -> str:
    return f", {n} {words}" if n else ""


def job_name(rule: str, wildcards: Mapping[str, str]) -> str:
    """Return what a job is called for people: its rule and wildcards, without digests."""
    words = [word for word in map(str, wildcards.values()) if not _DIGEST.fullmatch(word)]
    return " ".join([rule, *words])


def outsiders(devices: Iterable[str], folder: Path, own_pid: int) -> list[str]:
    """Return a sentence for each device that somebody else holds while a job of ours waits for it.

    Ours are the processes that ``own_pid`` started, however far down. A ledger that cannot be read
    says nothing: the jobs say what is wrong with it.
    """
    found = []
    try:
        known = set(claimed_devices(folder))
        for device in sorted(set(devices) & known):
            claims = read_claims(folder, device)
            ours = {claim.pid for claim in claims if _is_ours(claim.pid, own_pid)}
            waits = [claim for claim in claims if claim.place and claim.pid in ours]
            wanted = {unit for claim in waits for unit in claim.units}
            found += [
                _held_by(claim)
                for claim in claims
                if not claim.place and claim.pid not in ours and wanted & set(claim.units)
            ]
    except (RoutewiseError, OSError):
        return []
    return found


def _held_by(claim: Claim) -> str:
    overdue = ", OVERDUE" if claim.overdue else ""
    return (
        f"{claim.device} is held by {claim.label!r} ({claim.user}, process {claim.pid}) since "
        f"{clock(claim.since)}{overdue}"
    )


def _is_ours(pid: int, own_pid: int) -> bool:
    try:
        return own_pid in {process.pid for process in psutil.Process(pid).parents()}
    except psutil.Error:
        return False


def _devices(job: Job) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, units) for name, units in job.devices.items() if units))


def _shown(job: Job) -> str:
    names = [WORDS.get(name, name) for name, units in _devices(job)]
    return f"{job.name} ({', '.join(names)})" if names else job.name
