"""What explain says of an edit: the input that changed, by the part that was edited."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from routewise.explain import damaged_cells, differences, explain_cells
from routewise.inputs import write_manifest

INPUTS: dict[str, Any] = {
    "build": "1" * 64,
    "code": "2" * 64,
    "model": "3" * 64,
    "settings": {"threads": 2, "context": 512},
    "env": {},
    "plain": None,
}
NAME = "replay.cpu-stock.small.w4.parquet"


def write_cell(results: Path, digest: str, inputs: dict[str, Any] | None, age_s: int = 0) -> Path:
    path = results / "cells" / digest / NAME
    path.parent.mkdir(parents=True)
    document = {} if inputs is None else {"inputs": inputs}
    table = pa.table({"x": [1]}).replace_schema_metadata({"routewise": json.dumps(document)})
    pq.write_table(table, path)
    stamp = path.stat().st_mtime - age_s
    os.utime(path, (stamp, stamp))
    return path


def lines(results: Path, inputs: dict[str, Any]) -> list[str]:
    planned = {str(results / "cells" / "new" / NAME): inputs}
    return [reason.line() for reason in explain_cells(planned, results)]


def test_a_measured_cell_is_not_told(tmp_path: Path) -> None:
    path = write_cell(tmp_path, "old", INPUTS)
    assert list(explain_cells({str(path): INPUTS}, tmp_path)) == []


def test_a_new_cell_was_never_measured(tmp_path: Path) -> None:
    assert lines(tmp_path, INPUTS) == ["replay.cpu-stock.small.w4: was never measured"]


def test_a_setting_is_told_with_both_values(tmp_path: Path) -> None:
    write_cell(tmp_path, "old", INPUTS)
    [line] = lines(tmp_path, {**INPUTS, "settings": {"threads": 4, "context": 512}})
    assert line.endswith("w4: a setting of the route (threads) changed from 2 to 4")


def test_the_newest_earlier_cell_is_compared(tmp_path: Path) -> None:
    write_cell(tmp_path, "newer", {**INPUTS, "model": "9" * 64})
    write_cell(tmp_path, "older", INPUTS, age_s=60)
    [line] = lines(tmp_path, INPUTS)
    assert line.endswith("the model changed from 999999999999 to 333333333333")


def test_a_file_that_is_gone_has_no_changed_input(tmp_path: Path) -> None:
    write_cell(tmp_path, "old", INPUTS)
    [line] = lines(tmp_path, INPUTS)
    assert "nothing of its inputs" in line


def test_a_cell_runs_whose_plain_cell_is_gone(tmp_path: Path) -> None:
    there = write_cell(tmp_path, "there", {**INPUTS, "plain": "gone"})
    apart = write_cell(tmp_path, "apart", {**INPUTS, "plain": "kept"})
    plain = tmp_path / "cells" / "gone" / "replay.cpu-stock.small.plain.parquet"
    planned = {
        str(plain): INPUTS,
        str(there): {**INPUTS, "plain": "gone"},
        str(apart): {**INPUTS, "plain": "kept"},
    }
    told = {reason.path: reason.line() for reason in explain_cells(planned, tmp_path)}
    assert told == {
        str(plain): "replay.cpu-stock.small.plain: was never measured",
        str(there): "replay.cpu-stock.small.w4: its plain cell is measured again",
    }


@pytest.mark.parametrize("parts", [[1, 2], "abc", 3, None])
def test_a_manifest_that_is_none_is_passed_over(tmp_path: Path, parts: Any) -> None:
    for digest in ("1" * 64, "5" * 64):
        write_manifest(tmp_path, digest, lambda: {"kind": "build", "parts": parts})
    write_cell(tmp_path, "old", INPUTS)
    [line] = lines(tmp_path, {**INPUTS, "build": "5" * 64})
    assert "from 111111111111 to 555555555555" in line


@pytest.mark.parametrize("inputs", [["a"], "text"])
def test_inputs_of_another_shape_say_nothing(tmp_path: Path, inputs: Any) -> None:
    write_cell(tmp_path, "old", inputs)
    [line] = lines(tmp_path, INPUTS)
    assert "do not say what they were made from" in line


def test_a_cell_without_inputs_or_damaged_says_so(tmp_path: Path) -> None:
    write_cell(tmp_path, "old", None)
    write_cell(tmp_path, "torn", INPUTS).write_bytes(b"PAR1 no")
    [line] = lines(tmp_path, INPUTS)
    assert "do not say what they were made from" in line


def test_a_build_is_taken_apart_to_the_file(tmp_path: Path) -> None:
    named = {"kind": "build", "name": "cpu-stock"}
    old = {"parts": {"component ggml-cpu": "a"}, "files": {"ggml/repack.cpp": "x", "b": "y"}}
    new = {"parts": {"component ggml-cpu": "c"}, "files": {"ggml/repack.cpp": "z", "b": "y"}}
    write_manifest(tmp_path, "1" * 64, lambda: {**named, **old})
    write_manifest(tmp_path, "4" * 64, lambda: {**named, **new})
    [said] = differences(INPUTS, {**INPUTS, "build": "4" * 64}, tmp_path)
    assert said == "the build changed (cpu-stock: ggml/repack.cpp)"


def test_without_manifests_the_digests_are_told(tmp_path: Path) -> None:
    [said] = differences(INPUTS, {**INPUTS, "code": "5" * 64}, tmp_path)
    assert said == "the measuring code changed (from 222222222222 to 555555555555)"


@pytest.mark.parametrize("other", ["model", "none"])
def test_the_plain_cell_is_told_only_where_nothing_else_is(tmp_path: Path, other: str) -> None:
    now = {**INPUTS, "plain": "p"} | ({"model": "6" * 64} if other == "model" else {})
    [said] = differences(INPUTS, now, tmp_path)
    assert said.startswith("the model" if other == "model" else "the plain cell")


def test_a_cell_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    whole, cut = (write_cell(tmp_path, digest, INPUTS) for digest in ("whole", "cut"))
    cut.write_bytes(cut.read_bytes()[:20])
    planned = [str(whole), str(cut), str(tmp_path / "not_made.parquet")]
    assert damaged_cells(planned) == [str(cut)]
