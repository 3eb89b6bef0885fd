"""What a large study costs besides its measuring, against a bare Snakemake workflow.

The same jobs twice: by the real Snakefile on a study made for this (every sweep but ``dispatch``;
sources, builds and models of a few lines), and by ``benchmarks/bare/Snakefile``, which has the same
number of jobs, files and dependencies, and no plan. Every program that a job starts is replaced by
a shell script that only makes the outputs. A bare job looks up the build of its route and names its
inputs in its command, as any workflow must, and has one parameter, a constant (with none at all
Snakemake spares itself a library); it has no resources and no environment of its own.

In turn (A B A B …), with the same options:

- parse: ``snakemake --list-rules``; ours plans the study while it parses;
- plan: ``snakemake -n`` where nothing was made;
- run: ``snakemake``, all jobs; only once in each workflow for each ``--runs``;
- no-op: ``snakemake`` where all is made.

    python benchmarks/scale_against_bare_snakemake.py --cells 1000 3000 10000 --into docs/scale.md

Ratios are of wall time, and of processor time with that of all children: on a machine that does
other things too the second is the steadier. Ends with 1 where a median is above what is wanted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from small_tree import make_tree  # noqa: E402

#: Wanted: no step costs more than this many times the bare workflow's.
RATIO_MAX = 1.3
#: Replaces python in every job: it makes the outputs that the command line names, and nothing else.
STUB = r"""#!/bin/sh
tables="cells replay plain cost replies agree dispatch"
script=$1
while [ $# -gt 0 ]; do
  case "$1" in
    --output)
      : > "$2"
      case "$script" in *obtain_model.py) : > "${2%.gguf}.json" ;; esac ;;
    --json|--markdown|--svg|--png) : > "$2" ;;
    --results-dir) results=$2 ;;
    --digest) digest=$2 ;;
    --tables)
      case "$script" in
        *build_tables.py) for name in $tables; do : > "$2/$name.parquet"; done ;;
      esac ;;
  esac
  shift
done
case "$script" in *build_backend.py) : > "$results/builds/$digest/build.json" ;; esac
"""
#: Slots of the batched servers, widths of the agree sweep: a fifth of a study's cells.
PARALLEL = range(1, 9)
AGREE_WIDTHS = (1, 4)
SHAPES = ("ragged", "rollback", "neighbours")
FIGURES = {
    "delta_by_position": "replay",
    "flips_and_margins": "replay",
    "price_by_width": "cost",
    "states_by_width": "replies",
    "solo_token_kept": "replies",
    "agree_dlogp": "agree",
}
STEPS = {
    "parse": ("--list-rules",),
    "plan": ("--dry-run",),
    "run": (),
    "no-op": (),
}
BEGIN, END = "<!-- scale table: begin -->", "<!-- scale table: end -->"


@dataclass(frozen=True)
class Shape:
    """How large a study is: ``n_side`` routes and as many models, and widths of the replay."""

    n_side: int
    n_widths: int

    @classmethod
    def of(cls, n_cells: int) -> Shape:
        """Return the shape whose number of cells comes nearest to ``n_cells``."""
        side = max(2, round(math.sqrt(n_cells) / 10))
        widths = max(1, round((n_cells - cls(side, 0).n_cells) / side**2))
        if widths > 510:
            raise SystemExit(f"{n_cells} cells: {widths} widths, and a micro-batch has 512 tokens")
        return cls(side, widths)

    @property
    def n_cells(self) -> int:
        """How many cells the study has."""
        replay = 2 + self.n_widths + len(SHAPES)  # plain and width 1 too
        each = replay + 1 + len(PARALLEL) + len(AGREE_WIDTHS)  # repeat, batched, agree
        pairs = self.n_side * (self.n_side + 1) // 2
        return self.n_side * (self.n_side * each + 1 + len(AGREE_WIDTHS) * pairs)

    @property
    def n_jobs(self) -> int:
        """How many jobs make it: two parts of each build, two jobs a model, the study's own."""
        return self.n_cells + 2 * len(self.builds) + 2 * self.n_side + 3 + len(FIGURES)

    @property
    def builds(self) -> list[str]:
        """The names of the builds: two routes share one."""
        return [f"build-{index}" for index in range((self.n_side + 1) // 2)]

    @property
    def routes(self) -> list[str]:
        """The names of the routes."""
        return [f"cpu-{index}" for index in range(self.n_side)]

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return [f"model-{index}" for index in range(self.n_side)]

    @property
    def widths(self) -> list[int]:
        """The widths of the replay."""
        return list(range(2, 2 + self.n_widths))


@dataclass(frozen=True)
class Sample:
    """One run of Snakemake."""

    wall_s: float
    processor_s: float  # its children's too
    memory_mb: float  # the largest of its processes


def builds_of(shape: Shape) -> dict[str, str]:
    """Return the build of each route."""
    return {name: shape.builds[index // 2] for index, name in enumerate(shape.routes)}


def make_study(shape: Shape, folder: Path) -> dict[str, Any]:
    """Write what a study needs to ``folder`` and return it: real to a plan, empty to an engine."""
    tree = make_tree(folder / "tree")
    prompts = [
        {"id": f"prompt-{index}", "category": "text", "n_tokens": 64, "text": f"Say {index}."}
        for index in range(8)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    for model in shape.models:
        (folder / f"{model}.gguf").write_text(f"{model}, as far as a plan is concerned")
    each = {"routes": shape.routes, "models": shape.models}
    prompted = {**each, "prompts": "few"}
    return {
        "schema_version": 1,
        "study": "large",
        "sources": {"tree": {"kind": "path", "path": str(tree)}},
        "builds": {
            name: {"source": "tree", "backend": "cpu", "options": {"GGML_BLAS_VENDOR": name}}
            for name in shape.builds
        },
        "models": {
            name: {"kind": "path", "path": str(folder / f"{name}.gguf")} for name in shape.models
        },
        "prompts": {"few": {"file": str(folder / "prompts.jsonl")}},
        "routes": {
            name: {"build": build, "threads": 1, "flash_attention": index % 2 == 0}
            for index, (name, build) in enumerate(builds_of(shape).items())
        },
        "sweeps": {
            "replay": {**prompted, "widths": shape.widths, "shapes": list(SHAPES)},
            "cost": each,
            "repeat": prompted,
            "batched": {**prompted, "parallel": list(PARALLEL), "widths": [1, 2, 4, 8]},
            "agree": {**prompted, "widths": list(AGREE_WIDTHS)},
        },
    }


def make_bare(shape: Shape) -> dict[str, Any]:
    """Return the configuration of the bare workflow of the same shape."""
    return {
        "routes": builds_of(shape),
        "models": shape.models,
        "variants": ["w1", *(f"w{width}" for width in shape.widths), *SHAPES],
        "serving": {
            "repeat": ["solo"],
            "batched": [f"p{parallel}" for parallel in PARALLEL],
            "agree": [f"p{width}" for width in AGREE_WIDTHS],
        },
        "figures": FIGURES,
    }


def make_stub(folder: Path) -> Path:
    """Make an environment whose ``python`` does nothing; return its real interpreter."""
    (folder / "bin").mkdir(parents=True)
    environment = Path(sys.prefix)
    shutil.copy(environment / "pyvenv.cfg", folder)
    (folder / "lib").symlink_to(environment / "lib")
    interpreter = folder / "bin" / "routewise-python"
    interpreter.symlink_to(Path(sys.executable).resolve())
    stub = folder / "bin" / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return interpreter


class Workflow:
    """One of the two workflows, in a working folder that can be made anew."""

    def __init__(self, folder: Path, snakefile: Path, document: Any, interpreter: Path) -> None:
        self.folder = folder
        self.config = folder.with_suffix(".json")
        self.config.write_text(json.dumps(document))
        self.command = [
            *(str(interpreter), "-m", "snakemake", "--snakefile", str(snakefile)),
            *("--profile", str(ROOT / "profiles/laptop"), "--cores", "2"),
            *("--configfile", str(self.config)),
        ]
        path = os.pathsep.join([str(interpreter.parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": path}
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all that was made, and keep what a plan of ours remembers of files."""
        cache = self.folder / "results/.cache"
        kept = self.folder.with_suffix(".cache")
        if cache.is_dir():
            shutil.rmtree(kept, ignore_errors=True)
            cache.rename(kept)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if kept.is_dir():
            cache.parent.mkdir()
            kept.rename(cache)

    def sample(self, *arguments: str) -> Sample:
        """Run Snakemake to its end; ends the benchmark where that fails."""
        log = self.folder.with_suffix(".log")
        with log.open("wb") as stream:
            start = time.perf_counter()
            process = subprocess.Popen(
                [*self.command, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            sys.stderr.write(log.read_text(errors="replace")[-4000:])
            raise SystemExit(f"{' '.join([*self.command, *arguments])}: ended with an error")
        return Sample(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)

    def n_jobs_left(self) -> int:
        """Return how many jobs the last dry run would have started."""
        text = self.folder.with_suffix(".log").read_text(errors="replace")
        if "Nothing to be done" in text:
            return 0
        totals = re.findall(r"^total\s+(\d+)$", text, re.MULTILINE)
        return int(totals[0])


Pairs = dict[str, list[tuple[Sample, Sample]]]


def measure(shape: Shape, rounds: int, runs: int, scratch: Path) -> Pairs:
    """Return pairs (ours, bare) of samples for each step, taken in turn."""
    scratch.mkdir()
    interpreter = make_stub(scratch / "stub")
    (scratch / "study").mkdir()
    ours = Workflow(
        scratch / "ours", ROOT / "Snakefile", make_study(shape, scratch / "study"), interpreter
    )
    bare = Workflow(
        scratch / "bare", ROOT / "benchmarks/bare/Snakefile", make_bare(shape), interpreter
    )
    found: Pairs = {step: [] for step in STEPS}

    def take(step: str, times: int) -> None:
        for turn in range(times):
            both = (ours, bare) if turn % 2 == 0 else (bare, ours)
            samples = {side: side.sample(*STEPS[step]) for side in both}
            found[step].append((samples[ours], samples[bare]))
            say(f"{shape.n_cells} cells, {step} {turn + 1}/{times}: {one_pair(*found[step][-1])}")

    for side in (ours, bare):  # files are read and digested once, modules compiled
        side.sample("--dry-run")
        if side.n_jobs_left() != shape.n_jobs:
            raise SystemExit(f"{side.folder.name}: {side.n_jobs_left()} jobs, not {shape.n_jobs}")
    take("parse", rounds)
    take("plan", rounds)
    for turn in range(runs):
        for side in (ours, bare) if turn else ():
            side.start_anew()
        take("run", 1)
    take("no-op", rounds)
    for side in (ours, bare):
        side.sample("--dry-run")
        if side.n_jobs_left():
            raise SystemExit(f"{side.folder.name}: something is left to do after the run")
    return found


def say(text: str) -> None:
    """Tell how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)


def one_pair(ours: Sample, bare: Sample) -> str:
    """Return one pair for people."""
    return (
        f"{ours.wall_s:.1f} s against {bare.wall_s:.1f} s ({ours.wall_s / bare.wall_s:.2f}), "
        f"processor {ours.processor_s:.1f} s against {bare.processor_s:.1f} s "
        f"({ours.processor_s / bare.processor_s:.2f})"
    )


def spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the greatest where there are several."""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def ratios(pairs: Iterable[tuple[Sample, Sample]], what: str) -> list[float]:
    """Return the ratio ours to bare of each pair."""
    return [getattr(ours, what) / getattr(bare, what) for ours, bare in pairs]


def rows(shape: Shape, pairs: Pairs) -> list[str]:
    """Return the rows of the table of one study."""
    lines = []
    for step, taken in pairs.items():
        median = {
            (side, what): statistics.median(getattr(pair[index], what) for pair in taken)
            for index, side in enumerate(("ours", "bare"))
            for what in ("wall_s", "memory_mb")
        }
        lines.append(
            f"| {shape.n_cells:,} | {shape.n_jobs:,} | {step} | {len(taken)}"
            f" | {spread(ratios(taken, 'wall_s'))} | {spread(ratios(taken, 'processor_s'))}"
            f" | {spread(ratios(taken, 'memory_mb'))}"
            f" | {median['ours', 'wall_s']:.1f} | {median['bare', 'wall_s']:.1f}"
            f" | {median['ours', 'memory_mb']:.0f} |"
        )
    return lines


def table(found: dict[Shape, Pairs], load: float) -> str:
    """Return the table, with the kind of machine and the load that it was made under."""
    by_size = sorted(found, key=lambda shape: shape.n_cells)
    return "\n".join(
        [
            f"{os.cpu_count()}-core {platform.machine().replace('_', '-')}, load before "
            f"{load:.1f}, after {os.getloadavg()[0]:.1f}. Ratios are ours to bare, pair by pair: "
            "median, and least to greatest.",
            "",
            "| cells | jobs | step | pairs | wall | processor | memory | ours, s | bare, s |"
            " ours, MB |",
            "| ---: | ---: | --- | ---: | --- | --- | --- | ---: | ---: | ---: |",
            *(line for shape in by_size for line in rows(shape, found[shape])),
        ]
    )


def write_into(file: Path, text: str) -> None:
    """Put the table where a page wants it."""
    before, begin, rest = file.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{file}: has no lines {BEGIN} and {END}")
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(cells: list[int], rounds: int, runs: int, into: Path | None, scratch: Path | None) -> int:
    """Measure each size, print the table; return 1 where a ratio is above what is wanted."""
    load = os.getloadavg()[0]
    found: dict[Shape, Pairs] = {}
    text = ""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for index, n_cells in enumerate(cells):
            shape = Shape.of(n_cells)
            found[shape] = measure(shape, rounds, runs, Path(folder) / str(index))
            text = table(found, load)
            if into is not None:
                write_into(into, text)  # what is measured is kept, whatever becomes of the next
    print(text)
    missed = False
    for shape, pairs in found.items():
        for step, taken in pairs.items():
            ratio = statistics.median(ratios(taken, "processor_s"))
            missed |= ratio > RATIO_MAX
            met = "NOT MET" if ratio > RATIO_MAX else "met"
            print(f"{met}: {shape.n_cells} cells, {step}: {ratio:.2f}, wanted {RATIO_MAX} or less")
    return int(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, nargs="+", default=[10000])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of parse, plan and no-op")
    parser.add_argument("--runs", type=int, default=1, help="pairs of whole runs")
    parser.add_argument("--into", type=Path, help="page whose table is written anew")
    parser.add_argument("--scratch", type=Path, help="folder to work in, on a local disk")
    sys.exit(main(**vars(parser.parse_args())))
