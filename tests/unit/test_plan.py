"""The plan names every file by what makes it: what changes moves, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from routewise.cell import Cell
from routewise.cost import CostCell
from routewise.digest import canonical_json
from routewise.engine import ALL_LAYERS
from routewise.errors import RoutewiseError
from routewise.explain import differences
from routewise.inputs import json_digest
from routewise.plan import (
    FROZEN_PLAN,
    MEASURING_SCRIPTS,
    REPORTING_SCRIPTS,
    StudyPlan,
    fetch_sources,
    freeze_plan,
    study_json,
    thaw_plan,
    variant_parameters,
    write_cell_list,
)
from routewise.study import check_study
from small_house import DOT, SHAPES, House, make_root


@pytest.fixture(scope="module")
def root(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("repository") / "root", repository)


@pytest.fixture(scope="module")
def warm_cache(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the digests of the measuring code: reading all of it takes half a second."""
    house = House(tmp_path_factory.mktemp("warm"), root)
    house.plan()
    return house.results / ".cache"


@pytest.fixture
def house(tmp_path: Path, root: Path, warm_cache: Path) -> House:
    house = House(tmp_path, root)
    shutil.copytree(warm_cache, house.results / ".cache")
    return house


def variants(paths: set[str]) -> set[str]:
    """Return what is planned at these paths: the last word of a replay's name, or `cost`."""
    return {
        name.split(".")[-2] if name.startswith("replay.") else "cost"
        for name in (Path(path).name for path in paths)
    }


def moved(before: StudyPlan, after: StudyPlan) -> set[str]:
    return set(after.cell_paths()) - set(before.cell_paths())


# ---------------------------------------------------------------------------------- all of it


def test_a_plan_is_the_same_again(house: House) -> None:
    first, again = house.plan(), house.plan()
    assert first.cell_paths() == again.cell_paths()
    assert first.builds == again.builds
    assert first.models == again.models
    assert first.prompts == again.prompts
    assert first.code == again.code
    cells = [cell.document for cell in first.cells.values()]
    assert cells == [cell.document for cell in again.cells.values()]


def test_a_lost_cache_changes_nothing(house: House) -> None:
    before = house.plan()
    shutil.rmtree(house.results)
    assert house.plan().cell_paths() == before.cell_paths()


def test_every_cell_is_planned_once_under_a_name_of_its_own(house: House) -> None:
    plan = house.plan()
    names = Counter(Path(path).name for path in plan.cell_paths())
    expected = {
        f"replay.{route}.{model}.{variant}.parquet"
        for route in ("cpu-stock", "cpu-twice")
        for model in ("small", "smaller")
        for variant in ("plain", "w1", "w2", "w4", *SHAPES)
    } | {"cost.smaller.parquet"}
    assert set(names) == expected
    assert set(names.values()) == {1}
    assert len(set(plan.cell_paths())) == len(expected)
    assert len({Path(path).parent.name for path in plan.cell_paths()}) == len(expected)


def test_nothing_is_made_by_planning(house: House) -> None:
    house.plan()
    assert {path.name for path in house.results.iterdir()} == {".cache", "manifests"}


def test_a_replay_names_the_plain_cell_of_its_own_route_and_model(house: House) -> None:
    plan = house.plan()
    for cell in plan.cells.values():
        if cell.cell.variant == "plain":
            assert cell.plain is None
            continue
        plain = plan.cells[str(cell.plain)].cell
        assert plain.variant == "plain"
        assert (plain.route, plain.model) == (cell.cell.route, cell.cell.model)


def test_a_cell_reads_back_from_its_document(house: House) -> None:
    plan = house.plan()
    for cell in plan.cells.values():
        assert Cell.from_document(json.loads(cell.document)) == cell.cell
        assert cell.document == canonical_json(cell.cell.document())
        assert cell.cell.digest == cell.path.parent.name
    for cost in plan.costs.values():
        assert CostCell.from_document(json.loads(cost.document)) == cost.cell
        assert cost.cell.digest == cost.path.parent.name


def test_the_study_is_kept_with_its_defaults(house: House) -> None:
    plan = house.plan()
    document = json.loads(study_json(plan.study))
    assert document["sweeps"]["replay"]["seed"] == 1
    assert document["sweeps"]["cost"]["rounds"] == 30
    assert "seed" not in house.study["sweeps"]["replay"]


# ---------------------------------------------------------------------- the sweep's parameters


def test_a_width_more_adds_that_cell_and_moves_none(house: House) -> None:
    before = house.plan()
    after = house.plan(widths=[2, 3, 4])
    assert set(before.cell_paths()) < set(after.cell_paths())
    added = sorted(Path(path).name for path in moved(before, after))
    assert added == [
        f"replay.{route}.{model}.w3.parquet"
        for route in ("cpu-stock", "cpu-twice")
        for model in ("small", "smaller")
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"neighbours": 3}, {"neighbours"}),
        ({"seed": 2}, set(SHAPES)),
        ({"top_k": 5}, {"plain", "w1", "w2", "w4", *SHAPES}),
        ({"widths": [2]}, set()),
        ({"widths": [4, 2]}, set()),
        ({"shapes": ["rollback"]}, set()),
        ({"expect": {"cpu-stock": "exact"}}, set()),
        ({"models": ["smaller"]}, set()),
    ],
)
def test_a_parameter_moves_only_the_cells_that_depend_on_it(
    house: House, change: dict[str, Any], expected: set[str]
) -> None:
    before, after = house.plan(), house.plan(**change)
    assert variants(moved(before, after)) == expected


def test_parameters_are_in_the_cells_that_depend_on_them() -> None:
    replay = {"seed": 1, "neighbours": 7, "top_k": 10}
    assert variant_parameters("plain", replay) == {"top_k": 10}
    assert variant_parameters("w4", replay) == {}
    assert variant_parameters("ragged", replay) == {"seed": 1}
    assert variant_parameters("rollback", replay) == {"seed": 1}
    assert variant_parameters("neighbours", replay) == {"seed": 1, "neighbours": 7}


ALL_REPLAY = {"plain", "w1", "w2", "w4", *SHAPES}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rounds": 40}, {"cost"}),
        ({"depth": 128}, {"cost"}),
        ({"widths": [1, 2]}, {"cost"}),
        ({"warmup": 4}, {"cost"}),
    ],
)
def test_a_parameter_of_the_cost_sweep_moves_the_cost_alone(
    house: House, change: dict[str, Any], expected: set[str]
) -> None:
    before = house.plan()
    house.study["sweeps"]["cost"] |= change
    assert variants(moved(before, house.plan())) == expected


@pytest.mark.parametrize(
    "change",
    [{"threads": 1}, {"flash_attention": False}, {"kv_type": "f32"}, {"micro_batch": 256}],
)
def test_a_setting_of_the_routes_moves_all_their_cells(
    house: House, change: dict[str, Any]
) -> None:
    before = house.plan()
    for route in house.study["routes"].values():
        route |= change
    after = house.plan()
    assert not set(before.cell_paths()) & set(after.cell_paths())


def test_the_environment_of_one_route_moves_its_cells_alone(house: House) -> None:
    before = house.plan()
    house.study["routes"]["cpu-twice"]["env"] = {"GGML_X": "1"}
    gone = moved(before, house.plan())
    assert variants(gone) == {*ALL_REPLAY, "cost"}
    assert not any("cpu-stock" in path for path in gone)


# ----------------------------------------------------------------------------------- sources

EDITS: list[tuple[str, str, str, bool]] = [
    (DOT, "// the sum, from left to right", "// another comment", False),
    (DOT, "float sum", "\n\n    float   sum", False),
    ("CMakeLists.txt", "add_subdirectory(ggml)", "# first\nadd_subdirectory( ggml )", False),
    ("ggml/src/ggml-cuda/dot.cu", "//", "int x; //", False),
    ("docs/long.txt", "not", "no", False),
    ("tools/server/server.cpp", "0", "1", False),
    (DOT, "sum = 0.0f", "sum = -0.0f", True),
    ("src/llama.cpp", "x, x, n", "x, x, n - 1", True),
    ("ggml/include/ggml.h", "int n", "long n", True),
]


@pytest.mark.parametrize(("file", "old", "new", "moves"), EDITS)
def test_an_edit_moves_cells_by_its_meaning(
    house: House, file: str, old: str, new: str, moves: bool
) -> None:
    before = house.plan()
    house.edit(file, old, new)
    after = house.plan()
    if not moves:
        assert after.cell_paths() == before.cell_paths()
        assert after.builds["cpu-stock"].digest == before.builds["cpu-stock"].digest
    else:
        assert not set(before.cell_paths()) & set(after.cell_paths())
        # and back again: everything is found where it was
        house.edit(file, new, old)
        assert house.plan().cell_paths() == before.cell_paths()


def test_an_edit_of_the_patch_leaves_stock_alone(house: House) -> None:
    house.own_root()
    before = house.plan()
    overlay = house.root / "patches/twice/overlay/ggml/src/ggml-cpu/twice.cpp"
    overlay.write_text("// three times\n" + overlay.read_text())
    assert house.plan().cell_paths() == before.cell_paths()
    overlay.write_text(overlay.read_text().replace("2.0f", "3.0f"))
    gone = moved(before, house.plan())
    assert variants(gone) == {*ALL_REPLAY, "cost"}
    assert not any("cpu-stock" in path for path in gone)


def test_an_edit_of_the_tools_moves_what_is_quantized_with_them(house: House) -> None:
    before = house.plan()
    house.edit("tools/quantize/main.cpp", "{3, 4}", "{6, 8}")
    gone = moved(before, house.plan())
    assert gone
    assert all(".smaller." in path for path in gone)


def test_two_builds_of_the_same_content_share_their_files(house: House) -> None:
    house.study["builds"]["cpu-again"] = dict(house.study["builds"]["cpu-stock"])
    house.study["routes"]["cpu-again"] = {"build": "cpu-again"}
    plan = house.plan(routes=["cpu-stock", "cpu-again", "cpu-twice"])
    stock, again = plan.builds["cpu-stock"], plan.builds["cpu-again"]
    assert (again.engine_dir, again.tools_dir) == (stock.engine_dir, stock.tools_dir)
    # as the rules see it: one job per folder, and engine and tools are never the same one
    engines = {build.engine_dir for build in plan.builds.values()}
    tools = {build.tools_dir for build in plan.builds.values() if build.patch is None}
    assert (len(engines), len(tools), engines & tools) == (2, 1, set())
    # their cells do not collide: a cell is named by its route
    assert len(plan.cell_paths()) == len(set(plan.cell_paths())) == 3 * 2 * 7 + 1


def test_builds_of_other_options_are_others(house: House) -> None:
    before = house.plan()
    house.study["builds"]["cpu-stock"]["options"] = {"GGML_CPU_REPACK": "OFF"}
    after = house.plan()
    assert after.builds["cpu-stock"].engine_dir != before.builds["cpu-stock"].engine_dir
    assert after.builds["cpu-twice"].engine_dir == before.builds["cpu-twice"].engine_dir


# ---------------------------------------------------------------------- prompts and models


def test_layout_and_place_of_prompts_are_not_content(house: House, tmp_path: Path) -> None:
    before = house.plan()
    text = house.prompts.read_text()
    house.prompts.write_text("\n  " + text + "\n")
    house.prompts.rename(tmp_path / "elsewhere.jsonl")
    house.study["prompts"]["few"]["file"] = str(tmp_path / "elsewhere.jsonl")
    assert house.plan().cell_paths() == before.cell_paths()


def test_a_prompt_more_moves_the_replay_and_not_the_cost(house: House) -> None:
    before = house.plan()
    text = house.prompts.read_text()
    house.prompts.write_text(text + text.replace('"a"', '"b"'))
    assert variants(moved(before, house.plan())) == ALL_REPLAY


def test_another_model_moves_all_that_is_made_of_it(house: House, tmp_path: Path) -> None:
    before = house.plan()
    (tmp_path / "small.gguf").write_bytes(b"another model")
    assert not set(house.plan().cell_paths()) & set(before.cell_paths())


def test_a_model_moved_to_another_folder_is_the_same(house: House, tmp_path: Path) -> None:
    before = house.plan()
    (tmp_path / "small.gguf").rename(tmp_path / "moved.gguf")
    house.study["models"]["small"]["path"] = str(tmp_path / "moved.gguf")
    assert house.plan().cell_paths() == before.cell_paths()


# ------------------------------------------------------------------------- measuring code


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def prepend_comment(path: Path) -> None:
    path.write_text("# a comment\n\n" + path.read_text())


def other_docstring(path: Path) -> None:
    old = path.read_text()
    assert old.startswith('"""')
    path.write_text('"""Another docstring.' + old[old.index('"""', 3) :])


SCRIPTS = "workflow/scripts"
MEANINGLESS: list[tuple[str, Callable[[Path], None]]] = [
    (f"{SCRIPTS}/routewise/compare.py", prepend_comment),
    (f"{SCRIPTS}/routewise/replay.py", other_docstring),
    (f"{SCRIPTS}/measure_replay.py", other_docstring),
    (f"{SCRIPTS}/routewise/figure.py", lambda path: append(path, "\nX = 1\n")),
    (f"{SCRIPTS}/routewise/receipt.py", lambda path: append(path, "\nX = 1\n")),
    ("workflow/shim/routewise_shim.cpp", lambda path: append(path, "// the end\n")),
]


@pytest.mark.parametrize(("file", "change"), MEANINGLESS)
def test_words_and_unmeasured_code_move_no_cell(
    house: House, file: str, change: Callable[[Path], None]
) -> None:
    house.own_root()
    before = house.plan()
    change(house.root / file)
    after = house.plan()
    assert {name: after.code[name] for name in MEASURING_SCRIPTS} == {
        name: before.code[name] for name in MEASURING_SCRIPTS
    }
    assert after.cell_paths() == before.cell_paths()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("routewise/figure.py", {"draw_figure"}),
        ("draw_figure.py", {"draw_figure"}),
        ("routewise/receipt.py", {"write_receipt"}),
        ("build_tables.py", {"build_tables"}),
        ("routewise/table.py", set(REPORTING_SCRIPTS)),
    ],
)
def test_code_that_reports_moves_what_it_makes(house: House, file: str, expected: set[str]) -> None:
    house.own_root()
    before = house.plan()
    append(house.root / SCRIPTS / file, "\nX = 1\n")
    after = house.plan()
    assert {name for name in after.code if after.code[name] != before.code[name]} == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("routewise/compare.py", {*ALL_REPLAY, "cost"}),
        ("routewise/replay.py", {*ALL_REPLAY, "cost"}),  # the cost sweep prefills with it
        ("routewise/engine.py", {*ALL_REPLAY, "cost"}),
        ("routewise/cell.py", ALL_REPLAY),
        ("routewise/cost.py", {"cost"}),
        ("measure_replay.py", ALL_REPLAY),
        ("measure_cost.py", {"cost"}),
    ],
)
def test_logic_of_measuring_code_moves_what_it_measures(
    house: House, file: str, expected: set[str]
) -> None:
    house.own_root()
    before = house.plan()
    append(house.root / SCRIPTS / file, "\nLOGIC = 1\n")
    assert variants(moved(before, house.plan())) == expected


def test_the_shim_is_measured_through(house: House) -> None:
    house.own_root()
    before = house.plan()
    append(house.root / "workflow/shim/routewise_shim.cpp", "\nint another;\n")
    assert variants(moved(before, house.plan())) == {*ALL_REPLAY, "cost"}


# ---------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("sources.tree.path", "nowhere", ["nowhere"]),
        ("builds.cpu-twice.patch", "twize", ["twize", "twice"]),
        ("models.small.path", "nowhere.gguf", ["models.small.path", "nowhere.gguf"]),
        ("models.small.sha256", "0" * 64, ["models.small.path", "0" * 64]),
        ("models.smaller.from", "smaller", ["models.smaller", "made from itself"]),
    ],
)
def test_what_does_not_exist_is_named(
    house: House, path: str, value: str, words: list[str]
) -> None:
    *above, last = path.split(".")
    holder = house.study
    for key in above:
        holder = holder[key]
    holder[last] = value
    with pytest.raises(RoutewiseError) as caught:
        house.fetch_and_plan()
    for word in words:
        assert word in str(caught.value)


def test_a_patch_that_does_not_apply_stops_the_plan(house: House) -> None:
    house.edit(DOT, "return sum;", "return 2 * sum;")
    with pytest.raises(RoutewiseError, match="hunk") as caught:
        house.plan()
    assert DOT in str(caught.value)
    assert "tree" in str(caught.value)


def test_a_source_that_is_not_fetched_is_no_plan(house: House) -> None:
    house.study["sources"]["tree"] = {
        "kind": "pypi",
        "package": "no-such-package",
        "version": "1",
        "sha256": "0" * 64,
    }
    with pytest.raises(RoutewiseError, match="not fetched"):
        house.plan()


def test_a_path_source_needs_no_fetching(house: House) -> None:
    said: list[str] = []
    fetch_sources(check_study(house.study, "s"), house.results, said.append)
    assert said == []
    assert not (house.results / "sources").exists()


# ---------------------------------------------------------------- hosts, backends, other machines


def with_cuda(house: House, **build: Any) -> None:
    """Add a build and a route for CUDA to the study."""
    house.study["builds"]["cuda-stock"] = {"source": "tree", "backend": "cuda", **build}
    house.study["routes"]["cuda-stock"] = {"build": "cuda-stock"}
    house.study["sweeps"]["replay"]["routes"].append("cuda-stock")


def test_an_edit_of_one_backend_moves_its_cells_alone(house: House) -> None:
    with_cuda(house)
    before = house.plan()
    house.edit("ggml/src/ggml-cuda/dot.cu", "// not compiled here", "// another comment")
    assert house.plan().cell_paths() == before.cell_paths()
    house.edit("ggml/src/ggml-cuda/dot.cu", "//", "int x; //")
    gone = moved(before, house.plan())
    assert variants(gone) == ALL_REPLAY
    assert all(".cuda-stock." in path for path in gone)
    # the processor's backend is in every build
    before = house.plan()
    house.edit(DOT, "sum = 0.0f", "sum = -0.0f")
    assert not set(before.cell_paths()) & set(house.plan().cell_paths())


def test_replays_on_a_device_claim_it_and_are_counted(house: House) -> None:
    with_cuda(house)
    plan = house.plan()
    for path, one in plan.cells.items():
        on_device = ".cuda-stock." in path
        assert (one.cell.claim is not None) == on_device
        assert plan.counted(path) == ({"gpu": 1} if on_device else {})
        assert (one.inputs["device"] is not None) == on_device
        assert Cell.from_document(json.loads(one.document)) == one.cell
    # a route that claims nothing is counted nowhere
    house.study["routes"]["cuda-stock"]["claim"] = False
    unclaimed = house.plan()
    assert not any(unclaimed.counted(path) for path in unclaimed.cells)
    assert variants(moved(plan, unclaimed)) == ALL_REPLAY
    # how long it may be held decides nothing, another number of units does
    house.study["routes"]["cuda-stock"]["claim"] = {"limit_minutes": 5}
    assert house.plan().cell_paths() == plan.cell_paths()
    house.study["routes"]["cuda-stock"]["claim"] = {"units": 2}
    assert all(".cuda-stock." in path for path in moved(plan, house.plan()))


def test_a_cost_job_takes_every_unit_of_all_its_devices(house: House) -> None:
    with_cuda(house)
    house.study["routes"]["cuda-stock"]["claim"] = {"device": "card", "units": 2}
    house.study["sweeps"]["cost"]["routes"].append("cuda-stock")
    plan = house.plan()
    [path] = plan.costs
    assert plan.counted(path) == {"cpu_claim": 1, "gpu": 2}
    assert [(kind, claim.device) for kind, claim in plan.claims_of(path)] == [
        ("cuda", "card"),
        ("cpu", "cpu"),
    ]
    assert plan.counted("no cell") == {}


def test_devices_that_no_profile_counts_are_claimed_all_the_same(house: House) -> None:
    house.study["routes"]["cpu-stock"]["device"] = "fpga"
    plan = house.plan()
    [path] = [path for path in plan.cells if ".cpu-stock.smaller.plain" in path]
    assert [kind for kind, _ in plan.claims_of(path)] == ["fpga"]
    assert plan.counted(path) == {}


def test_files_of_cells_and_builds_have_names(house: House) -> None:
    plan = house.plan()
    names = plan.job_names()
    assert set(plan.cell_paths()) <= set(names)
    assert set(names.values()) >= {
        "replay cpu-stock small w2",
        "cost smaller",
        "build engine cpu-twice",
        "build tools cpu-stock",
    }
    assert "build tools cpu-twice" not in names.values()


def test_a_host_is_in_the_digests_and_what_is_asked_of_it_is_not(house: House) -> None:
    with_cuda(house)
    before = house.plan()
    house.study["hosts"] = {"box": {"gres": "gpu:1", "runtime": 30}}
    house.study["builds"]["cuda-stock"]["host"] = "box"
    after = house.plan()
    gone = moved(before, after)
    assert variants(gone) == ALL_REPLAY
    assert all(".cuda-stock." in path for path in gone)
    assert after.study.routes["cuda-stock"].resources == {"gres": "gpu:1", "runtime": 30}
    house.study["hosts"]["box"]["runtime"] = 60
    assert house.plan().cell_paths() == after.cell_paths()
    house.study["hosts"] = {"crate": house.study["hosts"]["box"]}
    house.study["builds"]["cuda-stock"]["host"] = "crate"
    assert variants(moved(after, house.plan())) == ALL_REPLAY


def test_a_build_with_a_host_does_not_ask_for_compilers_here(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    del house.study["sweeps"]["cost"]  # has one kind of host
    house.study["hosts"] = {"box": {}}
    for build in house.study["builds"].values():
        build["host"] = "box"
    here = house.plan().cell_paths()
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert house.plan().cell_paths() == here
    del house.study["builds"]["cpu-stock"]["host"]
    with pytest.raises(RoutewiseError, match="no C compiler found"):
        house.plan()


def test_a_route_cannot_leave_the_host_of_its_build(house: House) -> None:
    house.study["hosts"] = {"box": {}, "crate": {}}
    house.study["builds"]["cpu-stock"]["host"] = "box"
    house.study["routes"]["cpu-stock"]["host"] = "crate"
    with pytest.raises(RoutewiseError, match=r"routes\.cpu-stock\.host"):
        house.plan()
    house.study["routes"]["cpu-stock"]["host"] = "shed"
    with pytest.raises(RoutewiseError, match=r"routes\.cpu-stock\.host.*shed"):
        house.plan()


def test_a_frozen_plan_is_the_plan(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = house.plan()
    monkeypatch.delenv(FROZEN_PLAN, raising=False)
    assert thaw_plan() is None
    file = freeze_plan(plan)
    monkeypatch.setenv(FROZEN_PLAN, str(file))
    assert thaw_plan() == plan
    file.write_bytes(b"torn")
    with pytest.raises(RoutewiseError, match="cannot be read"):
        thaw_plan()
    file.unlink()
    with pytest.raises(RoutewiseError, match="cannot be read"):
        thaw_plan()


def test_a_list_of_cells_is_written_once_for_each_plan(house: House) -> None:
    plan = house.plan()
    write_cell_list(plan)
    stamp = plan.cell_list.stat().st_mtime_ns
    assert plan.cell_list.read_text().splitlines() == plan.cell_paths()
    write_cell_list(plan)
    assert plan.cell_list.stat().st_mtime_ns == stamp
    wider = house.plan(widths=[2, 4, 8])
    write_cell_list(wider)
    assert wider.cell_list.read_text().splitlines() == wider.cell_paths()
    # a job that waits under the earlier plan still reads its own
    assert plan.cell_list.read_text().splitlines() == plan.cell_paths()


def test_the_inputs_of_a_cell_make_its_path(house: House) -> None:
    for path, inputs in house.plan().named_cells().items():
        assert Path(path).parent.name == json_digest(canonical_json(inputs))


def test_an_edit_is_explained_by_its_file(house: House) -> None:
    before = house.plan()
    house.edit(DOT, "sum = 0.0f", "sum = -0.0f")
    after = house.plan()
    old = next(plan for plan in before.cells.values() if plan.cell.route == "cpu-stock")
    new = next(plan for plan in after.cells.values() if plan.cell.route == "cpu-stock")
    said = list(differences(old.inputs, new.inputs, house.results))
    assert f"the build changed (cpu-stock: {DOT})" in said


def test_a_replay_is_not_explained_by_the_server(house: House) -> None:
    """Both were edited, and only one of them decides a replay."""
    before = house.plan()
    house.edit(DOT, "sum = 0.0f", "sum = -0.0f")
    house.edit("tools/server/server.cpp", "0", "1")
    after = house.plan()
    old, new = (next(iter(plan.cells.values())).inputs for plan in (before, after))
    [build] = [one for one in differences(old, new, house.results) if one.startswith("the build")]
    assert DOT in build
    assert "server" not in build


def test_a_prompt_is_explained_by_its_name(house: House) -> None:
    before = house.plan()
    text = house.prompts.read_text()
    house.prompts.write_text(text + text.replace('"a"', '"model"'))
    old, new = (next(iter(plan.cells.values())).inputs for plan in (before, house.plan()))
    assert list(differences(old, new, house.results)) == [
        "the prompts changed (prompt model added)"
    ]


def test_a_device_is_wanted_while_a_route_on_it_is_unmeasured(house: House) -> None:
    with_cuda(house)
    plan = house.plan()
    assert plan.devices_wanted() == {"cpu": {"cpu-stock", "cpu-twice"}, "cuda": {"cuda-stock"}}
    paths = [Path(path) for path in plan.cell_paths() if ".cuda-stock." in path]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    assert set(plan.devices_wanted()) == {"cpu"}
    paths[0].unlink()
    assert plan.devices_wanted()["cuda"] == {"cuda-stock"}


def test_a_cost_job_has_one_kind_of_host(house: House) -> None:
    house.study["hosts"] = {"box": {}}
    house.study["builds"]["cpu-stock"]["host"] = "box"
    with pytest.raises(RoutewiseError, match=r"sweeps\.cost\.routes"):
        house.plan()
    house.study["builds"]["cpu-twice"]["host"] = "box"
    house.plan()


def test_builds_that_name_no_host_are_known(house: House) -> None:
    del house.study["sweeps"]["cost"]
    house.study["hosts"] = {"box": {"mem_mb": 1000}}
    plan = house.plan()
    files = {str(plan.builds["cpu-stock"].engine_dir / "build.json")}
    assert plan.builds_without_host(files) == ["cpu-stock"]
    assert plan.builds_without_host(set()) == []
    house.study["builds"]["cpu-stock"]["host"] = "box"
    house.study["routes"]["cpu-stock"]["host"] = "box"
    plan = house.plan()
    files = {str(plan.builds["cpu-stock"].engine_dir / "build.json")}
    assert plan.builds_without_host(files) == []


def test_a_cell_too_long_for_a_command_is_refused(house: House) -> None:
    env = {"GGML_X": "x" * 50_000}
    house.study["routes"]["cpu-stock"]["env"] = env
    house.plan()
    env["GGML_X"] = "x" * 70_000
    with pytest.raises(RoutewiseError, match=r"cpu-stock.* bytes long, wanted at most 114688"):
        house.plan()


def test_layers_on_the_device_and_a_shared_cache_are_part_of_a_cell(house: House) -> None:
    with_cuda(house)
    house.study["sweeps"]["cost"]["routes"].append("cuda-stock")
    plan = house.plan()
    layers = {one.cell.route: one.cell.settings.gpu_layers for one in plan.cells.values()}
    assert layers["cuda-stock"] == ALL_LAYERS
    assert layers["cpu-stock"] == 0
    [cost] = plan.costs.values()
    assert {arm.route: arm.settings.gpu_layers for arm in cost.cell.arms}["cuda-stock"] == 999
    for said in ({"gpu_layers": 3}, {"kv_unified": True}):
        house.study["routes"]["cuda-stock"] = {"build": "cuda-stock", **said}
        assert all(".cuda-stock." in path or "cost" in path for path in moved(plan, house.plan()))
        assert variants(moved(plan, house.plan())) >= ALL_REPLAY
