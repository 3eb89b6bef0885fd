"""The table of edits and what each makes run again, kept in docs/invalidation.md.

Every entry is planned here, on a miniature llama.cpp with a CPU and a CUDA route that replay and a
server route that repeats. ``ROUTEWISE_WRITE_DOCS=1`` writes this test's part of the document anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import check_section
from routewise.plan import StudyPlan
from small_house import DOT, House, make_root

DOCUMENT = "docs/invalidation.md"
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


def make_house(folder: Path, repository: Path) -> House:
    """Return a house whose CPU route replays, serves and is timed, and whose CUDA route replays."""
    house = House(folder, make_root(folder / "root", repository))
    house.own_root()
    models = ["small"]
    house.study["builds"] = {
        name: {"source": "tree", "backend": name.partition("-")[0]}
        for name in ("cpu-stock", "cuda-stock")
    }
    del house.study["models"]["smaller"]
    house.study["routes"] = {
        name: {"build": name, "context": 512} for name in house.study["builds"]
    }
    house.study["sweeps"] = {
        "replay": {
            "routes": ["cpu-stock", "cuda-stock"],
            "models": models,
            "prompts": "few",
            "widths": [2, 4],
            "shapes": [],
        },
        "repeat": {"routes": ["cpu-stock"], "models": models, "prompts": "few"},
        "cost": {"routes": ["cpu-stock"], "models": models},
    }
    return house


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


def touch(house: House) -> None:
    os.utime(house.tree / DOT)


def branch_and_back(house: House) -> None:
    house.edit(DOT, "sum = 0.0f", "sum = -0.0f")
    house.plan()
    house.edit(DOT, "sum = -0.0f", "sum = 0.0f")


def widen(house: House) -> None:
    house.study["sweeps"]["replay"]["widths"] = [2, 4, 8]


TAIL = {"tables", "receipt", "figures"}
CPU = {"CPU engine", "CPU server", "CPU replay", "CPU server cells", "cost"}
EVERY_CELL = {"CPU replay", "CUDA replay", "CPU server cells", "cost"}
EDITS: list[tuple[str, Callable[[House], object], set[str]]] = [
    (
        "a comment line in a .cu file",
        lambda house: house.edit(CUDA, "//", "// a comment\n//"),
        set(),
    ),
    (
        "code in a .cu file",
        lambda house: house.edit(CUDA, "//", "int x; //"),
        {"CUDA engine", "CUDA replay", *TAIL},
    ),
    (
        "a renamed local variable in a .cpp file of the CPU backend",
        lambda house: house.edit(DOT, "sum", "total"),
        {*CPU, "CUDA engine", "CUDA replay", "tokenize", *TAIL},
    ),
    (
        "code of the CPU backend, such as repack.cpp",
        lambda house: house.edit(DOT, "sum = 0.0f", "sum = -0.0f"),
        {*CPU, "CUDA engine", "CUDA replay", "tokenize", *TAIL},
    ),
    (
        "server code",
        lambda house: house.edit("tools/server/server.cpp", "0", "1"),
        {"CPU server", "CPU server cells", *TAIL},
    ),
    ("a touched file", touch, set()),
    ("a branch switch and back", branch_and_back, set()),
    (
        "one prompt added",
        lambda house: house.add_prompt("b"),
        {"tokenize", "CPU replay", "CUDA replay", "CPU server cells", *TAIL},
    ),
    ("one width added", widen, {"CPU replay", "CUDA replay", *TAIL}),
    (
        "another model",
        lambda house: (house.folder / "small.gguf").write_bytes(b"another model"),
        {"tokenize", *EVERY_CELL, *TAIL},
    ),
    (
        "a comment in a library module",
        lambda house: house.append("routewise/replay.py", "\n# a comment\n"),
        set(),
    ),
    (
        "logic in a library module (replay.py)",
        lambda house: house.append("routewise/replay.py", "\nX = 1\n"),
        {"CPU replay", "CUDA replay", "cost", "receipt", *TAIL},
    ),
    (
        "the script of a figure",
        lambda house: house.append("draw_figure.py", "\nX = 1\n"),
        {"figures"},
    ),
    (
        "the environment of the CPU route",
        lambda house: house.study["routes"]["cpu-stock"].update(env={"GGML_X": "1"}),
        {"CPU replay", "CPU server cells", "cost", *TAIL},
    ),
    (
        "the claim of the CPU route",
        lambda house: house.study["routes"]["cpu-stock"].update(claim={"units": 2}),
        {"CPU server cells", "cost", *TAIL},
    ),
    (
        "the claim of the CUDA route",
        lambda house: house.study["routes"]["cuda-stock"].update(claim={"units": 2}),
        {"CUDA replay", *TAIL},
    ),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, set[str]]:
    """Return the stages that each edit makes run."""
    found = {}
    for name, change, _ in EDITS:
        house = make_house(tmp_path_factory.mktemp("house"), repository)
        before = stages(house.plan())
        change(house)
        after = stages(house.plan())
        found[name] = {stage for stage in COLUMNS if after[stage] - before[stage]}
    return found


@pytest.mark.parametrize(("name", "expected"), [(name, runs) for name, _, runs in EDITS])
def test_an_edit_runs_what_it_feeds_and_no_more(
    table: dict[str, set[str]], name: str, expected: set[str]
) -> None:
    assert table[name] == expected


def test_the_order_of_routes_decides_nothing(tmp_path: Path, repository: Path) -> None:
    """Of a CUDA and a CPU route, whose tokenizer is the same, the CUDA one stands first."""
    house = make_house(tmp_path, repository)
    house.study["sweeps"]["replay"]["routes"].reverse()
    before = stages(house.plan())
    house.edit(CUDA, "//", "int x; //")
    after = stages(house.plan())
    found = {stage for stage in COLUMNS if after[stage] - before[stage]}
    assert found == {"CUDA engine", "CUDA replay", *TAIL}


def test_the_document_is_the_table(table: dict[str, set[str]], repository: Path) -> None:
    lines = [f"| edit | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for name, runs in table.items():
        cells = " | ".join("**runs**" if stage in runs else "·" for stage in COLUMNS)
        lines.append(f"| {name} | {cells} |")
    check_section(repository / DOCUMENT, "planned", "\n".join(lines) + "\n")
