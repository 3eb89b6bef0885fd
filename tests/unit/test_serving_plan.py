"""The plan of serving sweeps: cells by what they ask, and what moves them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from routewise.digest import canonical_json
from routewise.plan import StudyPlan
from routewise.serve_cell import ServeCell
from routewise.serve_plan import ServePlan
from small_house import House

from .test_plan import root, warm_cache  # noqa: F401 - fixtures

COMMON = {"models": ["small"], "prompts": "few"}


@pytest.fixture
def serving(tmp_path: Path, root: Path, warm_cache: Path) -> House:  # noqa: F811
    """Return a house whose study serves, on routes of each kind."""
    house = House(tmp_path, root)
    (house.results / ".cache").parent.mkdir(parents=True, exist_ok=True)
    house.study["routes"] |= {
        "tool": {
            "command": [sys.executable, "{model}", "{port}"],
            "device": "npu",
            "parallel_max": 1,
        },
        "lab": {"endpoint": "http://127.0.0.1:1"},
    }
    everyone = ["cpu-stock", "cpu-twice", "tool", "lab"]
    house.study["sweeps"] = {
        "repeat": {**COMMON, "routes": everyone, "repeats": 2},
        "batched": {**COMMON, "routes": ["cpu-stock", "tool"], "parallel": [4], "widths": [4]},
        "agree": {**COMMON, "routes": ["cpu-stock", "tool"], "widths": [4]},
    }
    return house


def names(plan: StudyPlan) -> list[str]:
    return [Path(path).name.removesuffix(".parquet") for path in plan.cell_paths()]


def cell(plan: StudyPlan, name: str) -> ServePlan:
    (found,) = [one for path, one in plan.serves.items() if Path(path).name == f"{name}.parquet"]
    return found


def test_one_cell_a_server_configuration_and_one_a_pair(serving: House) -> None:
    two = ("cpu-stock", "tool")
    assert names(serving.plan()) == [
        *(f"repeat.{route}.small.solo" for route in ("cpu-stock", "cpu-twice", "tool", "lab")),
        *(f"batched.{route}.small.{slots}" for route in two for slots in ("p1", "p4")),
        *(f"agree.{route}.small.{slots}" for route in two for slots in ("p1", "p4")),
        "agree.cpu-stock+tool.small.w1",
        "agree.cpu-stock+tool.small.w4",
        "agree.cpu-stock+cpu-stock.small.w1",
        "agree.tool+tool.small.w1",
        "agree.cpu-stock+cpu-stock.small.w4",
        "agree.tool+tool.small.w4",
    ]  # fmt: skip


def test_a_cell_travels_as_json(serving: House) -> None:
    for plan in serving.plan().serves.values():
        assert ServeCell.from_document(json.loads(plan.document)) == plan.cell
        assert plan.document == canonical_json(plan.cell.document())


def test_what_a_route_cannot_do_is_refused_with_the_reason(serving: House) -> None:
    plan = serving.plan()
    narrow = cell(plan, "batched.tool.small.p4").cell
    assert narrow.blocks == ()
    assert "at most 1" in narrow.refused[0]["reason"]
    assert cell(plan, "batched.tool.small.p1").cell.refused == ()
    lab = cell(plan, "repeat.lab.small.solo").cell
    assert {block.life for block in lab.blocks} == {0}
    assert all("restarted" in one["reason"] for one in lab.refused)


def test_a_route_is_asked_no_more_often_than_it_can_afford(serving: House) -> None:
    serving.study["sweeps"]["repeat"]["repeats"] = 9
    serving.study["routes"]["tool"]["repeats_max"] = 3
    plan = serving.plan()
    assert {b.rounds for b in cell(plan, "repeat.tool.small.solo").cell.blocks} == {3}
    assert {b.rounds for b in cell(plan, "repeat.cpu-stock.small.solo").cell.blocks} == {9}


def test_the_control_of_a_route_is_another_life_of_its_server(serving: House) -> None:
    plan = serving.plan()
    (twice, wide) = [a for p, a in plan.agrees.items() if "cpu-stock+cpu-stock" in p]
    assert (wide.cell["pick_a"], wide.cell["pick_b"]) == (
        {"life": 0, "round": 0},
        {"life": 0, "round": 2},
    )
    assert twice.a == twice.b
    assert (twice.cell["pick_a"]["life"], twice.cell["pick_b"]["life"]) == (0, 1)
    (pair,) = [
        a for p, a in plan.agrees.items() if p.endswith("agree.cpu-stock+tool.small.w1.parquet")
    ]
    assert pair.cell["pick_a"] == pair.cell["pick_b"] == {"life": 0, "round": 0}


def test_an_endpoint_s_control_is_a_later_round(serving: House) -> None:
    serving.study["sweeps"]["agree"]["routes"] = ["cpu-stock", "lab"]
    (twice, _) = [a for p, a in serving.plan().agrees.items() if "lab+lab" in p]
    assert twice.cell["pick_a"] == {"life": 0, "round": 0}
    assert twice.cell["pick_b"] == {"life": 0, "round": 2}


def moved(before: StudyPlan, after: StudyPlan) -> set[str]:
    """Return the routes and pairs whose serving cells have moved, and ``build:NAME`` of servers."""
    paths = set(after.serves) | set(after.agrees)
    found = {Path(path).name.split(".")[1] for path in paths - set(before.cell_paths())}
    for name, build in after.builds.items():
        if build.server_dir != before.builds[name].server_dir:
            found.add(f"build:{name}")
        if build.engine_dir != before.builds[name].engine_dir:
            found.add(f"engine:{name}")
    return found


def edit_server(house: House) -> None:
    house.edit("tools/server/server.cpp", "return 0", "return 1")


def change(path: str, value: object) -> Callable[[House], None]:
    def apply(house: House) -> None:
        holder: Any = house.study
        *above, last = path.split("/")
        for key in above:
            holder = holder[key]
        holder[last] = value

    return apply


STOCK = {"cpu-stock", "cpu-stock+tool", "cpu-stock+cpu-stock"}
TOOL = {"tool", "cpu-stock+tool", "tool+tool"}


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (edit_server, {"cpu-stock", "cpu-twice", *STOCK, "build:cpu-stock", "build:cpu-twice"}),
        (change("routes/tool/start_limit_s", 5), set()),
        (change("routes/tool/stall_s", 5), set()),
        (change("routes/tool/claim", {"limit_minutes": 3}), set()),
        (change("routes/tool/claim", {"device": "npu1"}), TOOL),
        (change("routes/tool/env", {"A": "1"}), TOOL),
        (change("routes/tool/logprob_list", 8), TOOL),
        (change("routes/cpu-stock/server_args", ["--swa-full"]), STOCK),
        (change("sweeps/agree/widths", [1, 4]), set()),
        (change("sweeps/repeat/repeats", 3), {"cpu-stock", "cpu-twice", "tool", "lab"}),
    ],
)
def test_what_moves_which_cells(
    serving: House, edit: Callable[[House], None], expected: set[str]
) -> None:
    before = serving.plan()
    edit(serving)
    assert moved(before, serving.plan()) == expected


def test_the_content_of_an_artefact_moves_its_route(serving: House) -> None:
    pack = serving.folder / "pack"
    pack.mkdir()
    (pack / "a").write_text("one")
    serving.study["routes"]["tool"] |= {"artefact": str(pack), "weights": "same"}
    before = serving.plan()
    assert moved(before, serving.plan()) == set()
    (pack / "a").write_text("two")
    assert moved(before, serving.plan()) == TOOL


def test_files_that_a_command_names_move_its_route(serving: House) -> None:
    script, library = serving.folder / "engine.py", serving.folder / "libkernels.so"
    for path in (script, library):
        path.write_text("one")
    tool = serving.study["routes"]["tool"]
    tool["command"].insert(1, str(script))
    tool["identity_files"] = [str(library)]
    for path in (script, library):
        before = serving.plan()
        assert moved(before, serving.plan()) == set()
        path.write_text("two")
        assert moved(before, serving.plan()) == TOOL
