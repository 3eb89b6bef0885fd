"""The table of edits and what each makes run again, kept in docs/invalidation.md.

Every entry is planned here, on a miniature llama.cpp with a CPU and a CUDA route that replay and a
server route that repeats. ``ROUTEWISE_WRITE_DOCS=1`` writes the document anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from routewise.plan import StudyPlan, plan_study
from routewise.study import check_study
from small_tree import make_tree

DOCUMENT = "docs/invalidation.md"
DOT = "ggml/src/ggml-cpu/dot.cpp"
CUDA = "ggml/src/ggml-cuda/dot.cu"
COLUMNS = (
    "CPU engine",
    "CPU server",
    "CUDA engine",
    "tokenize",
    "CPU replay",
    "CUDA replay",
    "CPU server cells",
    "cost",
    "tables",
    "receipt",
    "figures",
)


class Desk:
    """A copy of the measuring code, a source tree and a study, to be edited and planned."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self.folder = folder
        self.root = folder / "repository"
        for part in ("scripts", "shim"):
            ignored = shutil.ignore_patterns("__pycache__")
            target = self.root / "workflow" / part
            shutil.copytree(repository / "workflow" / part, target, ignore=ignored)
        self.tree = make_tree(folder / "tree")
        self.model = folder / "small.gguf"
        self.model.write_bytes(b"a model as far as a plan is concerned")
        self.prompts = folder / "prompts.jsonl"
        self.add_prompt("a")
        settings = {"context": 512}
        models = ["small"]
        self.study: dict[str, Any] = {
            "schema_version": 1,
            "study": "made",
            "sources": {"tree": {"kind": "path", "path": str(self.tree)}},
            "builds": {
                "cpu-stock": {"source": "tree", "backend": "cpu"},
                "cuda-stock": {"source": "tree", "backend": "cuda"},
            },
            "models": {"small": {"kind": "path", "path": str(self.model)}},
            "prompts": {"few": {"file": str(self.prompts)}},
            "routes": {
                "cpu-stock": {"build": "cpu-stock", **settings},
                "cuda-stock": {"build": "cuda-stock", **settings},
            },
            "sweeps": {
                "replay": {
                    "routes": ["cpu-stock", "cuda-stock"],
                    "models": models,
                    "prompts": "few",
                    "widths": [2, 4],
                    "shapes": [],
                },
                "repeat": {"routes": ["cpu-stock"], "models": models, "prompts": "few"},
                "cost": {"routes": ["cpu-stock"], "models": models},
            },
        }

    def add_prompt(self, name: str) -> None:
        line = {"id": name, "category": "text", "n_tokens": 8, "text": name}
        with self.prompts.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.tree / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def append(self, file: str, text: str) -> None:
        path = self.root / "workflow/scripts" / file
        path.write_text(path.read_text() + text)

    def plan(self) -> StudyPlan:
        return plan_study(check_study(self.study, "study.yaml"), self.folder / "results", self.root)


def stages(plan: StudyPlan) -> dict[str, frozenset[str]]:
    """Return what each stage is known by: it runs where one of these is new."""
    cpu, cuda = plan.builds["cpu-stock"], plan.builds["cuda-stock"]
    cells = plan.cell_paths()

    def those(sweep: str, route: str = "") -> frozenset[str]:
        return frozenset(path for path in cells if f"/{sweep}.{route}" in path)

    tables = frozenset([*cells, plan.code["build_tables"]])
    return {
        "CPU engine": frozenset([cpu.digest]),
        "CPU server": frozenset([cpu.server_digest]),
        "CUDA engine": frozenset([cuda.digest]),
        "tokenize": frozenset(prompts.digest for prompts in plan.prompts.values()),
        "CPU replay": those("replay", "cpu-"),
        "CUDA replay": those("replay", "cuda-"),
        "CPU server cells": those("repeat", "cpu-"),
        "cost": those("cost"),
        "tables": tables,
        "receipt": tables | {plan.code["write_receipt"]},
        "figures": tables | {plan.code["draw_figure"]},
    }


def touch(desk: Desk) -> None:
    os.utime(desk.tree / DOT)


def branch_and_back(desk: Desk) -> None:
    desk.edit(DOT, "sum = 0.0f", "sum = -0.0f")
    desk.plan()
    desk.edit(DOT, "sum = -0.0f", "sum = 0.0f")


def widen(desk: Desk) -> None:
    desk.study["sweeps"]["replay"]["widths"] = [2, 4, 8]


TAIL = {"tables", "receipt", "figures"}
CPU = {"CPU engine", "CPU server", "CPU replay", "CPU server cells", "cost"}
EVERY_CELL = {"CPU replay", "CUDA replay", "CPU server cells", "cost"}
EDITS: list[tuple[str, Callable[[Desk], object], set[str]]] = [
    (
        "a comment line in a .cu file",
        lambda desk: desk.edit(CUDA, "//", "// a comment\n//"),
        set(),
    ),
    (
        "code in a .cu file",
        lambda desk: desk.edit(CUDA, "//", "int x; //"),
        {"CUDA engine", "CUDA replay", *TAIL},
    ),
    (
        "a renamed local variable in a .cpp file of the CPU backend",
        lambda desk: desk.edit(DOT, "sum", "total"),
        {*CPU, "CUDA engine", "CUDA replay", "tokenize", *TAIL},
    ),
    (
        "code of the CPU backend, such as repack.cpp",
        lambda desk: desk.edit(DOT, "sum = 0.0f", "sum = -0.0f"),
        {*CPU, "CUDA engine", "CUDA replay", "tokenize", *TAIL},
    ),
    (
        "server code",
        lambda desk: desk.edit("tools/server/server.cpp", "0", "1"),
        {"CPU server", "CPU server cells", *TAIL},
    ),
    ("a touched file", touch, set()),
    ("a branch switch and back", branch_and_back, set()),
    (
        "one prompt added",
        lambda desk: desk.add_prompt("b"),
        {"tokenize", "CPU replay", "CUDA replay", "CPU server cells", *TAIL},
    ),
    ("one width added", widen, {"CPU replay", "CUDA replay", *TAIL}),
    (
        "another model",
        lambda desk: desk.model.write_bytes(b"another model"),
        {"tokenize", *EVERY_CELL, *TAIL},
    ),
    (
        "a comment in a library module",
        lambda desk: desk.append("routewise/replay.py", "\n# a comment\n"),
        set(),
    ),
    (
        "logic in a library module (replay.py)",
        lambda desk: desk.append("routewise/replay.py", "\nX = 1\n"),
        {"CPU replay", "CUDA replay", "cost", "receipt", *TAIL},
    ),
    (
        "the script of a figure",
        lambda desk: desk.append("draw_figure.py", "\nX = 1\n"),
        {"figures"},
    ),
    (
        "the environment of the CPU route",
        lambda desk: desk.study["routes"]["cpu-stock"].update(env={"GGML_X": "1"}),
        {"CPU replay", "CPU server cells", "cost", *TAIL},
    ),
    (
        "the claim of the CPU route",
        lambda desk: desk.study["routes"]["cpu-stock"].update(claim={"units": 2}),
        {"CPU server cells", "cost", *TAIL},
    ),
]

INTRODUCTION = """# What an edit makes run again

Made by `tests/unit/test_invalidation.py`, which plans every row on a miniature llama.cpp with a CPU
route (replay, server, cost) and a CUDA route (replay), and fails where this page says another
thing. A dot: nothing runs. **runs**: its digest is new. What the plan says is what
`snakemake -n` says; `snakemake explain` names the file that was edited.

A build that runs compiles the files that changed. A cell that runs still adopts every fragment
whose libraries turn out to have the same bits: a renamed variable compiles, opens each cell, and
measures nothing. A prompt or a width that was added measures that prompt or width. The table is of
plans: that the cells then adopt and measure as said is tested with real builds in
`tests/workflow/test_plan.py` and `tests/workflow/test_chain.py`.

The CPU backend is part of every build, and so moves the CUDA cells too: layers that a device does
not take run on the processor. The tokens of a prompt set are made by an engine, and so are made
again with it; where they come out the same, the fragments behind them are adopted.

"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, set[str]]:
    """Return the stages that each edit makes run."""
    found = {}
    for name, change, _ in EDITS:
        desk = Desk(tmp_path_factory.mktemp("desk"), repository)
        before = stages(desk.plan())
        change(desk)
        after = stages(desk.plan())
        found[name] = {stage for stage in COLUMNS if after[stage] - before[stage]}
    return found


@pytest.mark.parametrize(("name", "expected"), [(name, runs) for name, _, runs in EDITS])
def test_an_edit_runs_what_it_feeds_and_no_more(
    table: dict[str, set[str]], name: str, expected: set[str]
) -> None:
    assert table[name] == expected


def test_the_document_is_the_table(table: dict[str, set[str]], repository: Path) -> None:
    lines = [f"| edit | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for name, runs in table.items():
        cells = " | ".join("**runs**" if stage in runs else "·" for stage in COLUMNS)
        lines.append(f"| {name} | {cells} |")
    text = INTRODUCTION + "\n".join(lines) + "\n"
    document = repository / DOCUMENT
    if os.environ.get("ROUTEWISE_WRITE_DOCS"):
        document.write_text(text)
    assert document.read_text() == text
