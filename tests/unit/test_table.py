from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from made_cells import MadeStudy, provenance, study, write_cell
from made_serving import MODEL, MadeServing
from made_serving import study as serving_study
from routewise.errors import RoutewiseError
from routewise.schema.file import read_table, write_table
from routewise.schema.study import CELLS, STUDY_TABLES, TABLES
from routewise.table import (
    build_of,
    build_tables,
    read_rows,
    read_tables,
    replay_variants,
    study_digest,
    variant_key,
    write_tables,
)


@pytest.fixture
def made(tmp_path: Path) -> MadeStudy:
    return MadeStudy(tmp_path)


def test_every_row_of_every_cell_is_there_once_with_its_cell(made: MadeStudy) -> None:
    paths = made.write()
    tables = build_tables(made.declared, paths)
    assert {name: table.schema for name, table in tables.items()} == {
        name: declared.arrow for name, declared in STUDY_TABLES.items()
    }
    assert tables["study_replay"].num_rows == 2 * 7 * 96
    assert tables["study_plain"].num_rows == 2 * 100
    assert tables["study_cost"].num_rows == 30 * 4 * 2
    cells = tables["study_cells"].to_pylist()
    assert {cell["cell"] for cell in cells} == {str(path) for path in paths}
    assert sum(cell["n_rows"] for cell in cells) == sum(
        tables[f"study_{name}"].num_rows for name in ("replay", "plain", "cost")
    )
    some = tables["study_replay"].slice(500, 1).to_pylist()[0]
    assert some["cell"].endswith(
        f"replay.{some['route']}.{some['model']}.{some['variant']}.parquet"
    )


def test_the_order_of_the_cell_files_does_not_matter(made: MadeStudy, tmp_path: Path) -> None:
    paths = made.write()
    for name, order in (("one", paths), ("two", paths[::-1] + paths[:1])):
        write_tables(tmp_path / name, made.declared, build_tables(made.declared, order))
    for name in ("cells", "replay", "plain", "cost", "replies", "agree", "dispatch"):
        one, two = (tmp_path / folder / f"{name}.parquet" for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_a_cell_without_rows_keeps_its_place_among_the_cells(made: MadeStudy) -> None:
    made.edit("cpu-exact", "w4", lambda rows: rows.iloc[:0])
    tables = read_tables(made.tables())
    cell = tables.find("cpu-exact", "small-q4_k_m", "w4")
    assert cell is not None
    assert cell.n_rows == 0
    assert tables.rows_of(cell).empty


def test_study_and_provenance_come_back_as_they_were(made: MadeStudy) -> None:
    made.record("cpu-exact", "w4", invalid_reasons=["two builds were mapped"])
    folder = made.tables()
    tables = read_tables(folder)
    assert tables.study == made.declared
    cell = tables.find("cpu-exact", "small-q4_k_m", "w4")
    assert cell is not None
    assert cell.invalid_reasons == ["two builds were mapped"]
    rows, _ = read_rows(folder / "replay.parquet", "replay")
    assert set(rows.loc[~rows["cell_valid"], "cell"]) == {cell.path}


def test_a_cost_rows_fingerprint_is_its_own_routes(made: MadeStudy) -> None:
    cost = read_tables(made.tables()).cost
    by_route = cost.groupby("route")["fingerprint"].unique()
    assert all(len(found) == 1 for found in by_route)
    assert by_route["cpu-stock"][0] != by_route["cpu-exact"][0]


def test_two_files_of_one_cell_are_refused_by_name(made: MadeStudy, tmp_path: Path) -> None:
    paths = made.write()
    again = tmp_path / "older" / paths[1].name
    again.parent.mkdir()
    again.write_bytes(paths[1].read_bytes())
    with pytest.raises(RoutewiseError, match="same cell") as error:
        build_tables(made.declared, [*paths, again])
    assert str(again) in str(error.value)
    assert str(paths[1]) in str(error.value)


def test_a_file_that_is_no_cell_is_refused(made: MadeStudy, tmp_path: Path) -> None:
    folder = made.tables()
    with pytest.raises(RoutewiseError, match="wanted a cell"):
        build_tables(made.declared, [folder / "replay.parquet"])
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1")
    with pytest.raises(RoutewiseError, match="not a whole Parquet file"):
        build_tables(made.declared, [damaged])
    with pytest.raises(RoutewiseError, match="no such file"):
        build_tables(made.declared, [tmp_path / "absent.parquet"])


def test_tables_of_two_studies_are_not_read_together(made: MadeStudy) -> None:
    folder = made.tables()
    other = made.declared | {"study": "another"}
    rows = build_tables(other, [])["study_cost"]
    write_table(folder / "cost.parquet", STUDY_TABLES["study_cost"], rows, {"study": other})
    with pytest.raises(RoutewiseError, match="different studies"):
        read_tables(folder)


def test_a_study_without_any_cell_gives_empty_tables(tmp_path: Path) -> None:
    write_tables(tmp_path, study(), build_tables(study(), []))
    tables = read_tables(tmp_path)
    assert list(tables.cells) == []
    assert tables.replay.empty
    assert pq.read_schema(tmp_path / "cells.parquet").equals(CELLS.arrow)


def test_a_build_is_found_for_a_route_alone_and_in_a_cost_cell() -> None:
    one = {"build": {"fingerprint": "f", "name": "b"}}
    assert build_of(one, "any")["fingerprint"] == "f"
    several = {"build": None, "builds": {"a": {"fingerprint": "x"}}}
    assert build_of(several, "a") == {"fingerprint": "x"}
    assert build_of(several, "b") == {}


def test_the_digest_of_a_study_follows_its_values_and_not_their_order() -> None:
    one = study()
    assert study_digest(one) == study_digest(json.loads(json.dumps(one, sort_keys=True)))
    assert study_digest(one) != study_digest(study(study="other"))


def test_variants_are_the_studys_without_the_control_and_sort_by_number() -> None:
    declared = study()
    declared["sweeps"]["replay"]["widths"] = [1, 16, 2, 2]
    variants = ["w16", "w2", "ragged", "rollback", "neighbours"]
    assert replay_variants(declared, "cpu-stock") == variants
    assert replay_variants({"sweeps": {}}, "cpu-stock") == []
    declared["sweeps"]["replay"]["only"] = {"cpu-stock": ["rollback", "w2"]}
    assert replay_variants(declared, "cpu-stock") == ["w2", "rollback"]
    assert replay_variants(declared, "cpu-exact") == variants
    assert sorted(["ragged", "w16", "w2", "plain"], key=variant_key) == [
        "plain",
        "w2",
        "w16",
        "ragged",
    ]


def test_a_made_cell_is_a_real_one(made: MadeStudy, tmp_path: Path) -> None:
    rows = made.plain
    path = write_cell(tmp_path / "one.parquet", "plain", rows, provenance("r", "m", "plain"))
    table, document = read_table(path, TABLES["plain"])
    assert table.num_rows == len(rows)
    assert document["table"] == "plain"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeServing(tmp_path_factory.mktemp("served")).tables()


def test_replies_and_pairs_are_found_by_their_sweep(served: Path) -> None:
    tables = read_tables(served)
    solo = tables.find("cpu-exact", MODEL, "solo", "repeat")
    assert solo is not None
    assert set(tables.rows_of(solo)["sweep"]) == {"repeat"}
    capture = tables.find("cpu-exact", MODEL, "p1", "agree")
    batched = tables.find("cpu-exact", MODEL, "p1", "batched")
    pair = tables.find("cpu-stock|cpu-exact", MODEL, "w1", "agree")
    assert capture is not None
    assert batched is not None
    assert pair is not None
    assert len({capture.path, batched.path, pair.path}) == 3
    assert "token_id_a" in tables.rows_of(pair)
    assert "token_ids" in tables.rows_of(capture)
    assert pair.fingerprint is not None
    assert pair.fingerprint.split("|")[1] == capture.fingerprint
    assert tables.find("cpu-exact", MODEL, "solo") is None
    assert tables.replay.empty


def test_replies_are_read_without_their_lists_of_lists(served: Path) -> None:
    rows, declared = read_rows(served / "replies.parquet", "replies")
    assert "token_ids" in rows
    assert "top_ids" not in rows
    assert declared == serving_study()
    assert "top_ids" in pq.read_schema(served / "replies.parquet").names


def test_tables_from_before_there_were_servers_are_read(made: MadeStudy) -> None:
    folder = made.tables()
    for name in ("replies", "agree", "dispatch"):
        (folder / f"{name}.parquet").unlink()
    tables = read_tables(folder)
    assert tables.replies.empty
    assert {"sweep", "busy_per_decode"} <= set(tables.replies.columns)
    assert tables.agree.empty


def test_a_serving_study_without_its_replies_is_not_read(tmp_path: Path) -> None:
    declared = serving_study()
    write_tables(tmp_path, declared, build_tables(declared, []))
    read_tables(tmp_path)
    (tmp_path / "replies.parquet").unlink()
    with pytest.raises(RoutewiseError, match=r"replies\.parquet: no such file"):
        read_tables(tmp_path)


def test_what_serves_is_found_as_build_command_or_endpoint() -> None:
    for kind in ("build", "command", "endpoint"):
        told = {"build": None, kind: {"fingerprint": kind}}
        assert build_of(told, "any") == {"fingerprint": kind}
