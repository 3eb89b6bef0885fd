"""The format of a results folder: older is said and kept, newer stops everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from routewise.__main__ import parse, run
from routewise.errors import RoutewiseError
from routewise.inputs import RESULTS_FORMAT
from routewise.results_format import NAME, check_format, mark_format, say_older
from routewise.schema.file import write_table
from routewise.schema.replay import PLAIN


def add_cell(results: Path, digest: str, **provenance: Any) -> Path:
    path = results / "cells" / digest / "plain.parquet"
    write_table(path, PLAIN, PLAIN.arrow.empty_table(), provenance)
    return path


def say(results: Path, text: str) -> None:
    (results / NAME).write_text(text)


def test_a_fresh_folder_is_marked_and_nothing_is_said(tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert say_older(results) is None
    assert not results.exists()  # a look leaves nothing
    mark_format(results)
    assert json.loads((results / NAME).read_text()) == {"format": RESULTS_FORMAT}
    assert [path.name for path in results.iterdir()] == [NAME]


def test_cells_of_this_format_without_a_mark_are_no_older_ones(tmp_path: Path) -> None:
    add_cell(tmp_path, "a" * 16, inputs={"format": RESULTS_FORMAT})
    assert say_older(tmp_path) is None


@pytest.mark.parametrize("marked", [None, RESULTS_FORMAT - 1])
def test_older_results_are_told_until_a_run_begins_and_kept(
    tmp_path: Path, marked: int | None
) -> None:
    kept = [
        add_cell(tmp_path, "a" * 16),
        add_cell(tmp_path, "b" * 16, inputs={"format": RESULTS_FORMAT - 1}),
    ]
    if marked is not None:
        say(tmp_path, json.dumps({"format": marked}))
    told = say_older(tmp_path)
    assert told is not None
    for part in (
        "1 from before formats had numbers",
        f"1 of format {RESULTS_FORMAT - 1}",
        "kept and not used",
        "make clean-results",
        "store prune",
    ):
        assert part in told
    mark_format(tmp_path)
    assert say_older(tmp_path) is None
    assert all(path.is_file() for path in kept)


def test_a_newer_folder_stops_and_stays(tmp_path: Path) -> None:
    text = json.dumps({"format": RESULTS_FORMAT + 1})
    say(tmp_path, text)
    for ask in (check_format, say_older, mark_format):
        with pytest.raises(RoutewiseError, match=f"format {RESULTS_FORMAT + 1}") as error:
            ask(tmp_path)
        assert str(tmp_path / NAME) in error.value.problem
        assert "newer Routewise" in str(error.value.hint)
    assert (tmp_path / NAME).read_text() == text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "2"}', '{"format": true}', '{"format": -3}', "{}"]
)
def test_a_damaged_mark_is_named(tmp_path: Path, text: str) -> None:
    say(tmp_path, text)
    with pytest.raises(RoutewiseError, match="holds no format number") as error:
        check_format(tmp_path)
    assert str(tmp_path / NAME) in error.value.problem


def test_prune_and_check_leave_a_newer_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    say(tmp_path, json.dumps({"format": RESULTS_FORMAT + 1}))
    for words, code in ((["prune", "--yes"], 2), (["check", "--remove"], 2), (["list"], 0)):
        assert run(parse(["store", *words, "--results", str(tmp_path)])) == code
        assert ("newer Routewise" in capsys.readouterr().err) == (code == 2)
