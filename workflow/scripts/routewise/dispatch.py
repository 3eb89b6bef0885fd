"""Dispatch evidence: which operations ran on which backend, in which kernel, as a server logged it.

Two logs are read:

scheduler
    llama.cpp builds, environment and arguments of :data:`SCHEDULER`. Each time a graph is built
    its nodes are printed with the backend that they were placed on. This was read from a real
    llama-server. It names operations and backends, not kernels: on one backend the set is the
    same at every width, and an arm that exchanges one CUDA kernel for another cannot be seen in
    it. Operations are cut to 10 characters and backends to 5. Without the argument nothing is
    printed, and without graph reuse switched off a pass that reuses its graph prints nothing.
    A pass prints one line a node, some 150 kB for a small model: ask for few tokens.
hrx
    ``ggml_hrx dispatch: NAME (fused|single)`` on stderr, where ``GGML_HRX_LOG_DISPATCH`` is set:
    one line for each registered kernel, *the first time in the process* that it matches. So what
    a width ran is the whole log of a server life in which nothing else ran, and a repeat is
    another life. The format was read in the backend's public source and never seen on hardware;
    the parser takes any text around it.

The unit of evidence is a set (:data:`DispatchSet`), per width. An arm is a route variant (an
environment or a flag) that is said to switch a family of kernels off; :func:`judge_arm` says
whether its log shows so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from routewise.errors import RoutewiseError
from routewise.schema.dispatch import DISPATCH

#: How often the configuration without the arm must have logged one and the same set.
BASE_REPEATS = 3
HRX_ARM = "GGML_HRX_DISABLE_DISPATCH"
_OP_LETTERS = 10  # of an operation's name in the scheduler's log


class Dispatch(NamedTuple):
    """One thing that ran; an empty word where the log does not say."""

    backend: str
    op: str
    kernel: str
    kind: str = ""


DispatchSet = frozenset[Dispatch]


@dataclass(frozen=True)
class DispatchLog:
    """How an engine is made to log what it ran, and how that is read.

    ``whole_life`` says that a line is printed once a process: a section of the log then holds
    only what had not run before.
    """

    name: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    whole_life: bool
    read_line: Callable[[str], Dispatch | None]


@dataclass(frozen=True)
class Section:
    """A part of a log: how often each dispatch was logged, and where the part ends (bytes)."""

    counts: Counter[Dispatch]
    end: int

    @property
    def dispatches(self) -> DispatchSet:
        """What was logged, without how often."""
        return frozenset(self.counts)


@dataclass(frozen=True)
class ArmEvidence:
    """Whether an arm's measurements count as those of its arm, and why (not)."""

    counts: bool
    reason: str


@dataclass(frozen=True)
class Observation:
    """What one repeat of one width logged, in one life of the server."""

    life: int
    width: int
    repeat: int
    log: str  # scheduler | hrx
    counts: Mapping[Dispatch, int] = field(default_factory=dict)


_NODE = re.compile(r"node #\s*\d+ \(\s*([^)]+?)\):.*?\(\s*\d+[BKMGT]?\) \[\s*(\S+)")
_MATCHED = re.compile(r"ggml_hrx dispatch:\s*(\S+)(?:\s+\((\w+)\))?")


def _read_scheduler_line(line: str) -> Dispatch | None:
    found = _NODE.search(line)
    return None if found is None else Dispatch(backend=found[2], op=found[1], kernel="")


def _read_hrx_line(line: str) -> Dispatch | None:
    found = _MATCHED.search(line)
    return None if found is None else Dispatch("HRX", "", found[1], found[2] or "")


SCHEDULER = DispatchLog(
    name="scheduler",
    environment={"GGML_SCHED_DEBUG": "2", "LLAMA_GRAPH_REUSE_DISABLE": "1"},
    arguments=("-lv", "5"),
    whole_life=False,
    read_line=_read_scheduler_line,
)
HRX = DispatchLog(
    name="hrx",
    environment={"GGML_HRX_LOG_DISPATCH": "1"},
    arguments=(),
    whole_life=True,
    read_line=_read_hrx_line,
)
LOGS = {log.name: log for log in (SCHEDULER, HRX)}


def dispatches_of(lines: Iterable[str], log: DispatchLog) -> Counter[Dispatch]:
    """Return how often each dispatch is named in ``lines`` of a log."""
    return Counter(found for line in lines if (found := log.read_line(line)) is not None)


def read_since(path: Path, offset: int, log: DispatchLog) -> Section:
    """Read the whole lines of a server's log from ``offset`` (bytes) on.

    A line that is still being written is left to the next section. Raises RoutewiseError where
    the log cannot be read or is shorter than ``offset`` (another server has truncated it).
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            if size < offset:
                raise RoutewiseError(
                    f"{path}: {size} bytes, but {offset} were there before",
                    "give each server life a log of its own",
                )
            stream.seek(offset)
            content = stream.read()
    except OSError as error:
        raise RoutewiseError(
            f"{path}: the server's log cannot be read ({error.strerror})",
            "start the server with its log kept",
        ) from error
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.decode(errors="replace").splitlines()
    return Section(dispatches_of(lines, log), offset + len(whole))


def read_life(path: Path, log: DispatchLog) -> Section:
    """Read all of a server life's log."""
    return read_since(path, 0, log)


def in_family(dispatch: Dispatch, family: str) -> bool:
    """Return whether a dispatch is of a family: a part of its kernel's name, or its operation.

    As the engines themselves choose: ``GGML_HRX_DISABLE_DISPATCH`` takes parts of names, and
    ``fused`` for every fused kernel. An operation's name may be longer than what the log holds of
    it.
    """
    if family in dispatch.kernel or family == dispatch.kind:
        return True
    cut = len(dispatch.op) == _OP_LETTERS and family.startswith(dispatch.op)
    return dispatch.op != "" and (dispatch.op == family or cut)


def families_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the families that an arm's environment says to switch off; empty if it names none.

    Only ``GGML_HRX_DISABLE_DISPATCH`` names its families itself; for any other arm the study does.
    """
    return _names(environment.get(HRX_ARM, ""))


def judge_arm(
    base_sets: Sequence[DispatchSet], arm_set: DispatchSet, family: str | Collection[str]
) -> ArmEvidence:
    """Say whether an arm counts: did it switch off what it is named for, and only then.

    Parameters
    ----------
    base_sets
        What the same configuration without the arm logged, at least three times over.
    arm_set
        What the arm logged, at the same width.
    family
        The family or families (comma-separated, or a collection) that the arm switches off.

    The arm counts only when the base logged one non-empty set each time, each family is in it,
    and none of them is in the arm's. An arm that logged nothing shows nothing.
    """
    families = _names(family if isinstance(family, str) else ",".join(family))
    if not families:
        return ArmEvidence(False, "the arm names no family that it switches off")
    if len(base_sets) < BASE_REPEATS:
        return ArmEvidence(
            False, f"the base was logged {len(base_sets)} times, wanted {BASE_REPEATS}"
        )
    base = base_sets[0]
    if not base:
        return ArmEvidence(False, "the base logged nothing")
    for index, other in enumerate(base_sets[1:], start=2):
        if other != base:
            return ArmEvidence(
                False,
                f"the base logged another set in run {index} than in run 1 ({_moved(base, other)})",
            )
    for name in families:
        if not any(in_family(dispatch, name) for dispatch in base):
            return ArmEvidence(False, f"{name!r} is not in the base's log: nothing to switch off")
    if not arm_set:
        return ArmEvidence(False, "the arm logged nothing: a silent log shows no absence")
    left = sorted({_name(d) for d in arm_set for name in families if in_family(d, name)})
    if left:
        return ArmEvidence(False, f"still in the arm's log: {', '.join(left)}")
    gone = ", ".join(families)
    return ArmEvidence(True, f"{gone} gone; {_moved(base, arm_set)}")


def dispatch_columns(observations: Iterable[Observation]) -> dict[str, list[Any]]:
    """Return observations as columns of ``schema.dispatch.DISPATCH``, their dispatches in order."""
    rows = [
        (
            seen.life,
            seen.width,
            seen.repeat,
            seen.log,
            dispatch.backend,
            dispatch.op or None,
            dispatch.kernel or None,
            dispatch.kind or None,
            n,
        )
        for seen in observations
        for dispatch, n in sorted(seen.counts.items())
    ]
    return {name: [row[i] for row in rows] for i, name in enumerate(DISPATCH.arrow.names)}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _name(dispatch: Dispatch) -> str:
    return dispatch.kernel or f"{dispatch.op} on {dispatch.backend}"


def _moved(before: DispatchSet, after: DispatchSet) -> str:
    """Say in words what two sets do not share."""
    gone = ", ".join(sorted(map(_name, before - after)))
    new = ", ".join(sorted(map(_name, after - before)))
    return f"without {gone or 'nothing'}, with {new or 'nothing'} more"
