"""The edits of docs/invalidation.md, each made in a real llama.cpp and run in one invocation.

One working tree of llama.cpp, one copy of the rules and the measuring code, one study. Row after
row an edit is made and the study run; what ran is read from Snakemake's list of jobs, and what was
measured from the cells. A job that a row left undone would stand in the next row's list.
``ROUTEWISE_WRITE_DOCS=1`` writes this test's part of the document anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from documents import check_section
from small_gguf import make_gguf
from workbench import Bench, Outcome, provenance_of

from .conftest import STOCK

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

DOCUMENT = "docs/invalidation.md"
COLUMNS = {
    "engine": ("build_engine",),
    "server": ("build_server",),
    "tokenize": ("tokenize_prompts",),
    "replay": ("measure_plain", "measure_replay"),
    "server cells": ("measure_serving",),
    "cost": ("measure_cost",),
    "tables": ("build_tables",),
    "receipt": ("write_receipt",),
    "figures": ("draw_figure",),
}
SWEEPS = {"replay": "replay", "server cells": "repeat", "cost": "cost"}
BUILDS = ("engine", "server")
NOTHING, RUNS, LINKS = "·", "runs", "links"
MEASURES, ADOPTS, ADDS = "measures", "adopts", "adds"

VEC = "ggml/src/ggml-cpu/vec.cpp"
REPACK = "ggml/src/ggml-cpu/repack.cpp"
QUEUE = "tools/server/server-queue.cpp"
CUDA = "ggml/src/ggml-cuda/argmax.cu"


@dataclass
class Workplace:
    """A bench whose llama.cpp, rules and measuring code are its own, to be edited."""

    bench: Bench
    tree: Path
    code: Path

    def substitute(self, file: str, pattern: str, replacement: str, count: int = 0) -> None:
        """Edit a file of llama.cpp; AssertionError where the pattern is not in it."""
        path = self.tree / file
        text, n_places = re.subn(pattern, replacement, path.read_text(), count=count)
        assert n_places
        path.write_text(text)

    def append(self, file: str, text: str) -> None:
        """Append to a file of the measuring code."""
        with (self.code / "workflow/scripts" / file).open("a") as stream:
            stream.write(text)

    def git(self, *words: str) -> None:
        subprocess.run(["git", "-C", self.tree, *words], check=True, capture_output=True)

    def run(self) -> dict[str, str]:
        """Run the study to its end; return for each stage what was done."""
        before = {sweep: self._cells(sweep) for sweep in SWEEPS.values()}
        counts = jobs_of(self._snakemake())
        found = {
            stage: RUNS if sum(counts.pop(rule, 0) for rule in rules) else NOTHING
            for stage, rules in COLUMNS.items()
        }
        assert not counts.keys() - {"all", "obtain_model"}
        for stage, sweep in SWEEPS.items():
            made = self._cells(sweep) - before[sweep]
            assert bool(made) == (found[stage] == RUNS), (stage, made)
            if made:
                [found[stage]] = {measured(path) for path in made}
        ran = [stage for stage in BUILDS if found[stage] == RUNS]
        compiled = {stage: self._n_compiled(stage) for stage in ran}
        if len(ran) == 2:  # either may come first, and finds nothing compiled: they share objects
            compiled = {"engine": sum(compiled.values()), "server": 0}
        for stage, n_compiled in compiled.items():
            found[stage] = f"compiles {n_compiled}" if n_compiled else LINKS
        return found

    def left(self) -> dict[str, int]:
        return self.bench.jobs_left("--snakefile", str(self.code / "Snakefile"))

    def _snakemake(self) -> Outcome:
        return self.bench.snakemake("--snakefile", str(self.code / "Snakefile")).check()

    def _cells(self, sweep: str) -> set[Path]:
        return set((self.bench.results / "cells").glob(f"*/{sweep}.*.parquet"))

    def _n_compiled(self, part: str) -> int:
        documents = [
            path
            for path in (self.bench.results / "builds").glob("*/build.json")
            if json.loads(path.read_text())["part"] == part
        ]
        newest = max(documents, key=lambda path: path.stat().st_mtime_ns)
        n_compiled: int = json.loads(newest.read_text())["n_compiled"]
        return n_compiled


def jobs_of(outcome: Outcome) -> dict[str, int]:
    """Return how many jobs of which rule a run had; empty where there was nothing to do."""
    if "Nothing to be done" in outcome.text:
        return {}
    table = outcome.text.partition("Job stats")[2].partition("total")[0]
    counts = {rule: int(n) for rule, n in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
    assert counts, outcome.text
    return counts


def measured(cell: Path) -> str:
    """Say what was done for a cell's rows: all measured, all adopted, or some of both."""
    provenance = provenance_of(cell)
    n_measured, n_adopted = provenance.get("n_measured"), provenance.get("n_adopted", 0)
    if n_measured == 0:
        return ADOPTS
    return ADDS if n_adopted else MEASURES


# ---------------------------------------------------------------------------------------- the edits


def comment(file: str) -> Callable[[Workplace], None]:
    return lambda place: place.substitute(file, r"\A", "// a comment\n")


def rename_a_local_variable(place: Workplace) -> None:
    place.substitute(VEC, r"\bsumf\b", "total")


def change_repack(place: Workplace) -> None:
    place.substitute(REPACK, r"sumf\[j\] = 0\.0;", "sumf[j] = -0.0;", count=1)


def take_repack_back(place: Workplace) -> None:
    place.substitute(REPACK, r"sumf\[j\] = -0\.0;", "sumf[j] = 0.0;")


def change_the_server(place: Workplace) -> None:
    place.substitute(
        QUEUE, r"type != SERVER_TASK_TYPE_METRICS", "!(type == SERVER_TASK_TYPE_METRICS)"
    )
    place.substitute(QUEUE, r'"new task, id', '"a new task, id')


def touch(place: Workplace) -> None:
    for file in (VEC, REPACK, QUEUE, CUDA):
        os.utime(place.tree / file)


def switch_branch_and_back(place: Workplace) -> None:
    place.git("commit", "-q", "-a", "-m", "all edits so far")
    place.git("checkout", "-q", "-b", "another")
    place.substitute(REPACK, r"sumf\[j\] = 0\.0;", "sumf[j] = 1.0;", count=1)
    place.git("commit", "-q", "-a", "-m", "another")
    assert place.left()["build_engine"] == 1
    place.git("checkout", "-q", "-")


def add_a_prompt(place: Workplace) -> None:
    write_prompts(place.bench, "cat", "dog")


def add_a_width(place: Workplace) -> None:
    place.bench.study["sweeps"]["replay"]["widths"] = [2, 4]


def change_the_model(place: Workplace) -> None:
    make_gguf(Path(place.bench.study["models"]["small"]["path"]), tokenizer="tiny", seed=2)


def wait_longer(place: Workplace) -> None:
    place.bench.study["routes"][STOCK]["claim"] = {"limit_minutes": 77}


def ask_for_more(place: Workplace) -> None:
    place.bench.study["builds"][STOCK] = {
        **place.bench.study["builds"][STOCK],
        "resources": {"runtime": 77},
    }


TAIL = {"tables": RUNS, "receipt": RUNS, "figures": RUNS}
Expected = dict[str, str]
EDITS: list[tuple[str, Callable[[Workplace], None], Expected]] = [
    ("a comment line in a .cu file", comment(CUDA), {}),
    (
        "code in a .cu file",
        lambda place: place.substitute(CUDA, r"= -FLT_MAX", "= -FLT_MAX / 2", count=1),
        {},
    ),
    ("a comment line in a .cpp file of the CPU backend", comment(VEC), {}),
    (
        "a renamed local variable in a .cpp file of the CPU backend",
        rename_a_local_variable,
        {
            "engine": "compiles 1",
            "server": LINKS,
            "tokenize": RUNS,
            "replay": ADOPTS,
            "server cells": ADOPTS,
            "cost": MEASURES,
            **TAIL,
        },
    ),
    (
        "code in repack.cpp",
        change_repack,
        {
            "engine": "compiles 1",
            "server": LINKS,
            "tokenize": RUNS,
            "replay": MEASURES,
            "server cells": MEASURES,
            "cost": MEASURES,
            **TAIL,
        },
    ),
    ("the same code taken back", take_repack_back, TAIL),
    (
        "server code",
        change_the_server,
        {"server": "compiles 2", "server cells": MEASURES, **TAIL},
    ),
    ("touched files", touch, {}),
    ("a branch switch and back", switch_branch_and_back, {}),
    (
        "one prompt added",
        add_a_prompt,
        {"tokenize": RUNS, "replay": ADDS, "server cells": ADDS, **TAIL},
    ),
    ("one width added", add_a_width, {"replay": MEASURES, **TAIL}),
    (
        "another model",
        change_the_model,
        {
            "tokenize": RUNS,
            "replay": MEASURES,
            "server cells": MEASURES,
            "cost": MEASURES,
            **TAIL,
        },
    ),
    ("a longer wait for the device", wait_longer, TAIL),
    ("what a scheduler is asked for to compile", ask_for_more, TAIL),
    (
        "a comment in a library module",
        lambda place: place.append("routewise/replay.py", "\n# a comment\n"),
        {},
    ),
    (
        "logic in a library module (replay.py)",
        lambda place: place.append("routewise/replay.py", "\nX = 1\n"),
        {"replay": MEASURES, "cost": MEASURES, **TAIL},
    ),
    (
        "the script of a figure",
        lambda place: place.append("draw_figure.py", "\nX = 1\n"),
        {"figures": RUNS},
    ),
]


def write_prompts(bench: Bench, *names: str) -> None:
    bench.write_prompts(
        {"id": name, "category": "text", "n_tokens": 16, "text": f"The {name} sat on"}
        for name in names
    )


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    repository: Path,
    real_source: Path,
    stock_study: dict[str, Any],
) -> Iterator[Workplace]:
    """Return a finished run of a study on its own llama.cpp, rules and code."""
    folder = tmp_path_factory.mktemp("edits")
    tree = Path(shutil.copytree(real_source, folder / "llama.cpp"))
    code = folder / "repository"
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("workflow", "config", "envs", "patches"):
        shutil.copytree(repository / part, code / part, ignore=ignored)
    shutil.copy(repository / "Snakefile", code)
    model = make_gguf(folder / "small-f16.gguf", tokenizer="tiny")
    common = {"routes": [STOCK], "models": ["small"]}
    study = {
        **stock_study,
        "study": "edits",
        "sources": {"llama-cpp": {"kind": "path", "path": str(tree)}},
        "models": {"small": {"kind": "path", "path": str(model)}},
        "sweeps": {
            "replay": {**common, "prompts": "few", "widths": [4], "shapes": []},
            "repeat": {**common, "prompts": "few", "repeats": 2, "lives": 1, "cache": ["off"]},
            "cost": {**common, "widths": [1, 4], "depth": 32, "rounds": 6, "warmup": 1},
        },
    }
    bench = Bench(folder / "work", study)
    bench.folder.mkdir()
    write_prompts(bench, "cat")
    place = Workplace(bench, tree, code)
    for words in (
        ["init", "-q"],
        ["add", "-A", "-f"],
        ["-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-q", "-m", "one"],
    ):
        place.git(*words)
    place.git("config", "user.name", "test")
    place.git("config", "user.email", "test@localhost")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(code / "workflow/scripts"))
        first = place.run()
        assert {stage for stage, done in first.items() if done == NOTHING} == set()
        yield place


@pytest.fixture(scope="module")
def table(place: Workplace) -> dict[str, dict[str, str]]:
    """Return what each edit made run, all in the order of the table, an invocation each."""
    found = {}
    for name, change, _ in EDITS:
        change(place)
        found[name] = place.run()
    return found


@pytest.mark.parametrize(("name", "expected"), [(name, done) for name, _, done in EDITS])
def test_an_edit_runs_what_it_feeds_in_one_invocation(
    table: dict[str, dict[str, str]], name: str, expected: Expected
) -> None:
    assert table[name] == {stage: expected.get(stage, NOTHING) for stage in COLUMNS}


def test_nothing_is_left_after_the_last_edit(
    place: Workplace, table: dict[str, dict[str, str]]
) -> None:
    assert table
    assert place.left() == {}


def test_the_document_is_the_table(table: dict[str, dict[str, str]], repository: Path) -> None:
    lines = [f"| edit | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for name, done in table.items():
        shown = (text if text == NOTHING else f"**{text}**" for text in done.values())
        lines.append(f"| {name} | {' | '.join(shown)} |")
    check_section(repository / DOCUMENT, "run", "\n".join(lines) + "\n")
