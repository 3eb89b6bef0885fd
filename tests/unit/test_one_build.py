from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_cells import MadeStudy, build, provenance
from routewise.errors import RoutewiseError
from routewise.one_build import Measured, host_scope, other_host_sentence, refuse_mixed
from routewise.table import SERVING_SWEEPS, build_tables, fingerprint_of

MODEL = "small-q4_k_m"
KEPT = sorted((Path(__file__).parents[2] / "docs" / "receipts").glob("*/*/tables/cells.parquet"))


@pytest.fixture
def made(tmp_path: Path) -> MadeStudy:
    return MadeStudy(tmp_path)


def on(**machine: Any) -> dict[str, Any]:
    """Return the made machine with other facts."""
    return provenance("cpu-exact", MODEL, "w4")["machine"] | machine


def measured(fingerprint: str = "a", serving: bool = False, **recorded: Any) -> Measured:
    return Measured("npu", serving, fingerprint, f"cells/{fingerprint}.parquet", recorded)


def test_cells_of_one_build_on_one_host_pass(made: MadeStudy) -> None:
    assert build_tables(made.declared, made.write())["study_cells"].num_rows == 17


def test_two_builds_of_a_route_are_refused_with_route_values_counts_and_files(
    made: MadeStudy,
) -> None:
    made.record("cpu-exact", "w8", build=build("cpu-exact") | {"fingerprint": "e" * 64})
    with pytest.raises(RoutewiseError, match="2 different builds") as error:
        build_tables(made.declared, made.write())
    text = str(error.value)
    assert "route cpu-exact" in text
    assert f"{'e' * 64} in 1 cells" in text
    assert f"{build('cpu-exact')['fingerprint']} in 8 cells" in text
    assert f"replay.cpu-exact.{MODEL}.w8.parquet" in text
    assert "move the cell files" in text


def test_a_cost_cell_of_another_build_is_refused(made: MadeStudy) -> None:
    made.cost_changes = {
        "builds": {"cpu-stock": build("cpu-stock"), "cpu-exact": build("other")},
    }
    with pytest.raises(RoutewiseError, match="route cpu-exact"):
        build_tables(made.declared, made.write())


def test_two_hosts_of_a_route_are_refused(made: MadeStudy) -> None:
    made.record("cpu-exact", "w8", machine=on(cpu_model="another one"))
    with pytest.raises(RoutewiseError, match="different hosts: cpu_model") as error:
        build_tables(made.declared, made.write())
    assert "another one in 1 cells" in str(error.value)
    assert "must-not-leave" not in str(error.value)


def test_a_job_that_had_fewer_cores_is_joined_with_the_others(made: MadeStudy) -> None:
    made.record("cpu-exact", "w8", machine=on(n_cores=1))
    build_tables(made.declared, made.write())


def test_nothing_of_the_tables_is_written_then(made: MadeStudy, tmp_path: Path) -> None:
    made.record("cpu-exact", "w8", build=build("cpu-exact") | {"fingerprint": "e" * 64})
    folder = tmp_path / "tables"
    with pytest.raises(RoutewiseError):
        made.tables()
    assert not folder.exists()


def test_two_names_of_one_kind_of_host_are_one_scope(made: MadeStudy) -> None:
    made.record("cpu-exact", "w8", machine=on(hostname="its sibling"))
    build_tables(made.declared, made.write())


def test_a_served_route_may_have_another_fingerprint_than_its_libraries() -> None:
    refuse_mixed([measured("a"), measured("b", serving=True)])
    with pytest.raises(RoutewiseError, match="served cells"):
        refuse_mixed([measured("a", serving=True), measured("b", serving=True)])


def test_another_driver_is_another_scope_and_another_unit_is_not() -> None:
    def gpu(driver: str, uuid: str) -> dict[str, Any]:
        return {"device": "cuda", "gpus": [["H", driver, uuid]]}

    refuse_mixed([measured(device=gpu("1", "x")), measured(device=gpu("1", "y"))])
    with pytest.raises(RoutewiseError, match="device and driver"):
        refuse_mixed([measured(device=gpu("1", "x")), measured(device=gpu("2", "x"))])


def test_the_drivers_their_cells_and_what_to_do_are_named(made: MadeStudy) -> None:
    def driver(version: str) -> dict[str, Any]:
        return {"device": "cuda", "gpus": [["Card 9", version, "must-not-leave"]]}

    variants = [path.name.split(".")[-2] for path in made.write() if ".cpu-exact." in path.name]
    for variant in variants:
        made.record("cpu-exact", variant, device=driver("550.1"))
    made.cost_changes = {"device": {"cpu-exact": driver("550.1"), "cpu-stock": {}}}
    build_tables(made.declared, made.write())
    made.record("cpu-exact", "w8", device=driver("570.2"))  # added after an update of the driver
    with pytest.raises(RoutewiseError, match="route cpu-exact") as error:
        build_tables(made.declared, made.write())
    problem = error.value.problem
    assert '["Card 9, driver 550.1"] in 8 cells' in problem
    assert '["Card 9, driver 570.2"] in 1 cells' in problem
    assert f"replay.cpu-exact.{MODEL}.w8.parquet" in problem
    assert "must-not-leave" not in problem
    assert "move the cell files" in str(error.value.hint)
    made.record("cpu-exact", "w8", device=driver("550.1"))
    build_tables(made.declared, made.write())


def test_a_route_begun_with_another_driver_is_said_before_it_goes_on(made: MadeStudy) -> None:
    def here(driver: str) -> dict[str, Any]:
        machine = on()
        return {"machine": machine, "device": {"device": "cuda", "gpus": [["H200", driver, "u"]]}}

    made.record("cpu-exact", "w8", **here("550.54"))
    [file] = [path for path in made.write() if path.name == f"replay.cpu-exact.{MODEL}.w8.parquet"]
    planned = [file, file.with_name("not-yet.parquet")]
    sentence = other_host_sentence("cpu-exact", planned, lambda: here("570.10"))
    assert sentence is not None
    told = 'device and driver was ["H200, driver 550.54"] and is ["H200, driver 570.10"]'
    for part in ("route cpu-exact", "1 of its 2 cells", str(file), told, "not join"):
        assert part in sentence
    assert other_host_sentence("cpu-exact", planned, lambda: here("550.54")) is None

    two = here("550.54")
    two["device"]["gpus"].append(["A10", "550.54", "v"])
    assert other_host_sentence("cpu-exact", planned, lambda: two) is None

    def unasked() -> dict[str, Any]:
        raise AssertionError("nothing would be added")

    assert other_host_sentence("cpu-exact", planned[:1], unasked) is None
    assert other_host_sentence("cpu-exact", planned[1:], unasked) is None


def test_a_host_started_again_is_one_scope_and_another_module_is_not() -> None:
    one = {"device": "npu", "boot": "1", "kernel": "6", "modules": {"m": "1"}}
    refuse_mixed([measured(device=one), measured(device=one | {"boot": "2"})])
    with pytest.raises(RoutewiseError, match="device modules"):
        refuse_mixed([measured(device=one), measured(device=one | {"modules": {"m": "2"}})])


def test_what_a_cell_did_not_record_is_no_difference() -> None:
    assert host_scope({"machine": None, "device": None}) == {}
    refuse_mixed([measured(machine={"cpu_model": "a"}), measured()])


@pytest.mark.parametrize("file", KEPT, ids=lambda path: path.parts[-3])
def test_kept_results_pass_and_one_changed_cell_of_them_does_not(file: Path) -> None:
    found = []
    for row in pq.read_table(file).to_pylist():
        recorded = json.loads(row["provenance"])
        if "|" in str(row["route"]):
            continue
        routes = [row["route"]] if row["route"] else sorted(recorded["builds"])
        found += [
            Measured(
                route,
                row["sweep"] in SERVING_SWEEPS,
                fingerprint_of(recorded, route),
                row["cell"],
                recorded,
            )
            for route in routes
        ]
    refuse_mixed(found)
    last = found[-1]
    changed = Measured(last.route, last.serving, "f" * 64, last.path, last.provenance)
    with pytest.raises(RoutewiseError, match=last.route):
        refuse_mixed([*found, changed])


def test_a_cost_cell_says_the_device_of_each_of_its_routes(made: MadeStudy) -> None:
    def card(driver: str) -> dict[str, Any]:
        return {"device": "cuda", "gpus": [["Card 9", driver, "u"]]}

    def here() -> dict[str, Any]:
        return {"machine": on(), "device": card("550.1")}

    for path in made.write():
        if ".cpu-exact." in path.name:
            made.record("cpu-exact", path.name.split(".")[-2], device=card("550.1"))
    with pytest.raises(
        RoutewiseError, match=r"device is .*not recorded in 1 cells, newest: .*cost"
    ):
        build_tables(made.declared, made.write())
    for driver, joined in (("550.1", True), ("570.2", False)):
        made.cost_changes = {"device": {"cpu-exact": card(driver), "cpu-stock": {}}}
        cells = made.write()
        [cost] = [path for path in cells if path.name.startswith("cost")]
        planned = [cost, cost.with_name("not-yet.parquet")]
        told = other_host_sentence("cpu-exact", planned, here)
        assert (told is None) == joined
        if joined:
            build_tables(made.declared, cells)
            continue
        with pytest.raises(RoutewiseError, match=r"driver 570\.2"):
            build_tables(made.declared, cells)


def test_a_driver_that_is_known_in_one_cell_and_not_in_another_is_two_scopes() -> None:
    known = measured(device={"device": "cuda", "gpus": [["H", "1", "x"]]})
    unknown = measured(device={"device": "cuda", "kernel": "6", "modules": {}})
    with pytest.raises(RoutewiseError, match="not recorded in 1 cells"):
        refuse_mixed([known, unknown])
    refuse_mixed([known, measured(ended_at="of a pair, made from cells that say it")])
