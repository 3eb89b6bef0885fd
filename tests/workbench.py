"""A working folder for Snakemake in a test: a study, its inputs, and runs that can be killed.

Compiling takes minutes and everything compiled is named by digest, so the folders of sources and
builds are links to those that the whole session shares (builds.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = ("sources", "builds", "work")
#: Long enough for a compile on a slow machine; nothing here is a test of speed.
TIMEOUT_S = 1500


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and all that it said."""

    code: int
    text: str

    def check(self) -> Outcome:
        """Return this outcome; AssertionError with all that was said where the code is not 0."""
        assert self.code == 0, self.text
        return self


class Run:
    """A Snakemake that is running, in a process group of its own."""

    def __init__(self, bench: Bench, command: list[str], environment: Mapping[str, str]) -> None:
        self.bench = bench
        self.output = bench.folder / "output.txt"
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=bench.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=hear_control_c,
            )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> Outcome:
        code = self.process.wait(timeout=TIMEOUT_S)
        return Outcome(code, self.output.read_text(errors="replace"))

    def wait_for(self, script: str) -> list[int]:
        """Wait until a process of that script runs; return all of them, none if the run is over."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.over:
            if found := self.bench.processes(script):
                return found
            assert time.monotonic() < deadline, f"no {script} was ever started"
            time.sleep(0.02)
        return []

    def kill_group(self) -> None:
        """Kill what is left of this run, whatever a test has come to."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def hear_control_c() -> None:
    """Be a process that Ctrl-C reaches, wherever the tests were started."""
    # a shell starts what runs in its background deaf to Ctrl-C, and children inherit that
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Bench:
    """A working folder. ``study`` is what study.yaml says; change it, then run."""

    folder: Path
    study: dict[str, Any]
    profile: str = "laptop"  # a folder under profiles/, or any by its whole path

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def receipt(self) -> dict[str, Any]:
        text = (self.results / self.study["study"] / "receipt.json").read_text()
        document: dict[str, Any] = json.loads(text)
        return document

    def copy(self, folder: Path) -> Bench:
        """Return a copy with all that was made and noted so far; links stay links."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Bench(folder, json.loads(json.dumps(self.study)), self.profile)

    def write_study(self) -> Path:
        path = self.folder / "study.yaml"
        text = yaml.safe_dump(self.study, sort_keys=False)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        return path

    def write_prompts(self, prompts: Iterable[Mapping[str, Any]]) -> Path:
        path = self.folder / "prompts.jsonl"
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        return path

    def command(self, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "snakemake"),
            *("--snakefile", str(REPOSITORY / "Snakefile")),
            *("--profile", str(REPOSITORY / "profiles" / self.profile)),
            *("--configfile", str(self.write_study()), "--cores", "2", *arguments),
        ]

    def start(self, *arguments: str, **environment: str) -> Run:
        return Run(self, self.command(*arguments), {**os.environ, **environment})

    def snakemake(self, *arguments: str, **environment: str) -> Outcome:
        """Run Snakemake to its end."""
        with self.running(*arguments, **environment) as run:
            return run.wait()

    @contextlib.contextmanager
    def running(self, *arguments: str, **environment: str) -> Iterator[Run]:
        run = self.start(*arguments, **environment)
        try:
            yield run
        finally:
            run.kill_group()

    def jobs_left(self, *targets: str) -> dict[str, int]:
        """Return how many jobs of which rule ``snakemake -n`` would run; empty for none."""
        outcome = self.snakemake("--dry-run", *targets).check()
        if "Nothing to be done" in outcome.text:
            return {}
        counts = re.findall(r"^(\w+) +(\d+)$", outcome.text.partition("Job stats")[2], re.MULTILINE)
        found = {rule: int(count) for rule, count in counts}
        assert found.pop("total", 0) == sum(found.values()), outcome.text
        assert found, outcome.text
        return found

    def cells(self) -> dict[str, Path]:
        """Return the cell files by name; a name stands once."""
        found = sorted((self.results / "cells").glob("*/*.parquet"))
        named = {path.name.removesuffix(".parquet"): path for path in found}
        assert len(named) == len(found), found
        return named

    def processes(self, script: str = "/workflow/scripts/") -> list[int]:
        """Return the live processes of this folder whose command names ``script``."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
                place = os.readlink(entry / "cwd")
            except OSError:  # it ended, or is not ours to see
                continue
            if script in command and (place == str(self.folder) or str(self.folder) in command):
                found.append(int(entry.name))
        return found

    def all_processes(self) -> list[int]:
        """Return every live process that works in this folder."""
        return [
            pid
            for pid in (int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit())
            if _works_in(pid, self.folder)
        ]

    def wait_until_none_is_left(self, seconds: float = 30) -> None:
        """Wait for the processes of a killed run to end; AssertionError where some stay."""
        eventually(lambda: not self.all_processes(), seconds, self._who_is_left)

    def _who_is_left(self) -> str:
        lines = []
        for pid in self.all_processes():
            with contextlib.suppress(OSError):
                lines.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:300]!r}")
        return "still there: " + "\n".join(lines)


def _works_in(pid: int, folder: Path) -> bool:
    try:
        place = os.readlink(f"/proc/{pid}/cwd")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and (place == str(folder) or place.startswith(f"{folder}/"))


def eventually(
    holds: Callable[[], bool], seconds: float, explain: Callable[[], str] = lambda: "too late"
) -> None:
    """Wait until ``holds()``; AssertionError with ``explain()`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(explain())
        time.sleep(0.05)


def make_bench(folder: Path, shared: Path, study: Mapping[str, Any]) -> Bench:
    """Make a working folder whose sources and builds are those in ``shared``."""
    results = folder / "results"
    results.mkdir(parents=True)
    for name in SHARED:
        (shared / name).mkdir(parents=True, exist_ok=True)
        (results / name).symlink_to(shared / name)
    return Bench(folder, json.loads(json.dumps(study)))


def provenance_of(path: Path) -> dict[str, Any]:
    """Return what a Routewise Parquet file says of its making."""
    document: dict[str, Any] = json.loads(pq.read_schema(path).metadata[b"routewise"])
    return document
