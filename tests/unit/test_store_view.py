"""The store's view: what is listed, what is found wrong, and what may be removed."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_cells import plain_rows, write_cell
from routewise.__main__ import parse, run
from routewise.schema.file import METADATA_KEY, read_table, write_table
from routewise.schema.replay import PLAIN, REPLAY
from routewise.store import Store, fragment_key
from routewise.store_view import (
    check_store,
    find_problem,
    list_store,
    prune_store,
    store_files,
)

DAY_S = 86400.0


def inputs_of(index: int) -> dict[str, Any]:
    return {"table": "plain", "fingerprint": f"{index:x}" * 64, "prompt": str(index)}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A store of three fragments, two days old; one cell file uses the first two."""
    store = Store(tmp_path / "store")
    keys = []
    for index in range(3):
        store.put(inputs_of(index), PLAIN, PLAIN.arrow.empty_table(), {})
        keys.append(fragment_key(inputs_of(index)))
        age(store.path(keys[-1]), 2 * DAY_S)
    cell = {"sweep": "replay", "route": "cpu-stock", "model": "small", "variant": "plain"}
    provenance = {"cell": cell, "fragments": keys[:2]}
    path = tmp_path / "cells" / ("0" * 16) / "plain.parquet"
    write_table(path, PLAIN, PLAIN.arrow.empty_table(), provenance)
    return tmp_path


def age(path: Path, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at))


def fragment(results: Path, index: int) -> Path:
    return Store(results / "store").path(fragment_key(inputs_of(index)))


def kept(results: Path) -> list[bool]:
    return [fragment(results, index).exists() for index in range(3)]


def checked(results: Path, **options: bool) -> tuple[int, str]:
    stream = io.StringIO()
    return check_store(results, stream, **options), stream.getvalue()


def pruned(results: Path, **options: Any) -> str:
    stream = io.StringIO()
    prune_store(results, stream, **options)
    return stream.getvalue()


# ------------------------------------------------------------------------------------ list


def test_fragments_are_listed_by_what_uses_them(results: Path) -> None:
    stream = io.StringIO()
    list_store(results, stream)
    title, *lines = stream.getvalue().splitlines()
    assert title.split()[:4] == ["table", "route", "model", "fingerprint"]
    assert [line.split()[:5] for line in lines] == [
        ["plain", "-", "-", "2" * 12, "1"],
        ["plain", "cpu-stock", "small", "0" * 12, "1"],
        ["plain", "cpu-stock", "small", "1" * 12, "1"],
    ]


def test_an_empty_store_is_said_to_be_so(tmp_path: Path) -> None:
    stream = io.StringIO()
    list_store(tmp_path, stream)
    assert "is empty" in stream.getvalue()


# ----------------------------------------------------------------------------------- check


def test_a_whole_store_is_found_whole(results: Path) -> None:
    assert checked(results) == (0, "3 files read, 0 wrong\n")


def _rewrite(path: Path, **changes: Any) -> None:
    table = pq.read_table(path)
    document = {**json.loads(table.schema.metadata[METADATA_KEY]), **changes}
    metadata = {METADATA_KEY: json.dumps(document).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


WRONG: dict[str, tuple[str, Callable[[Path], object]]] = {
    "truncated": ("damaged", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    "empty": ("damaged", lambda path: path.write_bytes(b"")),
    "other inputs": ("foreign", lambda path: _rewrite(path, key_inputs=inputs_of(9))),
    "other key": ("foreign", lambda path: _rewrite(path, key="0" * 64)),
    "no inputs": ("foreign", lambda path: _rewrite(path, key_inputs=None)),
    "inputs that give no key": (
        "foreign",
        lambda path: _rewrite(path, key_inputs={"a": float("nan")}),
    ),
    "inputs of another shape": ("foreign", lambda path: _rewrite(path, key_inputs=["a"])),
    "other table": ("foreign", lambda path: _rewrite(path, table="study_cells")),
    "other columns": (
        "foreign",
        lambda path: write_table(path, REPLAY, REPLAY.arrow.empty_table(), {}),
    ),
}


def test_rows_that_were_overwritten_are_damage(results: Path, tmp_path: Path) -> None:
    made = write_cell(tmp_path / "made.parquet", "plain", plain_rows(), {})
    rows, _ = read_table(made, PLAIN)
    Store(results / "store").put(inputs_of(1), PLAIN, rows, {})
    path = fragment(results, 1)
    content = bytearray(path.read_bytes())
    for place in range(100, len(content) // 2, 50):
        content[place] ^= 255
    path.write_bytes(content)
    code, said = checked(results)
    assert code == 1
    assert f"{path}: damaged: " in said
    assert said.count(str(path)) == 1


@pytest.mark.parametrize("field", ["cell", "key_inputs", "build"])
@pytest.mark.parametrize("value", [["a"], "text", 3])
def test_a_fragment_of_another_shape_is_listed(results: Path, field: str, value: Any) -> None:
    _rewrite(fragment(results, 1), **{field: value})
    stream = io.StringIO()
    list_store(results, stream)
    assert stream.getvalue().count("plain") == 3


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_and_removed_only_when_asked(results: Path, name: str) -> None:
    kind, spoil = WRONG[name]
    path = fragment(results, 1)
    spoil(path)
    code, said = checked(results)
    assert code == 1
    assert f"{path}: {kind}: " in said
    assert kept(results) == [True, True, True]
    assert checked(results, remove=True)[0] == 0
    assert kept(results) == [True, False, True]


def _forget_inputs(path: Path) -> None:
    table = pq.read_table(path)
    document = json.loads(table.schema.metadata[METADATA_KEY])
    del document["key_inputs"]
    metadata = {METADATA_KEY: json.dumps(document).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


OTHERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "before keys kept their inputs": ("older", _forget_inputs),
    "older schema": ("older", lambda path: _rewrite(path, schema_version=0)),
    "newer schema": ("newer", lambda path: _rewrite(path, schema_version=99)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_another_routewise_wrote_is_named_so_and_prune_removes_it_by_age(
    results: Path, name: str
) -> None:
    kind, rewrite = OTHERS[name]
    path = fragment(results, 2)  # no cell uses it
    rewrite(path)
    code, said = checked(results, remove=True)
    assert code == 0
    assert f"{path}: {kind}: " in said
    assert f"3 files read, 0 wrong, 1 {kind}" in said
    assert ("store prune" in said) == (kind == "older")
    assert path.exists()
    assert "0 files" in pruned(results, yes=True, older_than_days=1)  # rewritten just now
    age(path, 2 * DAY_S)
    pruned(results, yes=True, older_than_days=1)
    assert not path.exists()


def test_a_fragment_in_another_folder_is_foreign(results: Path) -> None:
    other = results / "store" / "zz" / fragment(results, 0).name
    other.parent.mkdir()
    shutil.move(fragment(results, 0), other)
    assert "foreign" in checked(results)[1]


def test_a_writer_at_work_is_nothing_wrong_and_a_dead_one_is(results: Path) -> None:
    part = fragment(results, 0).with_name(".x.parquet.abc.part")
    part.write_bytes(b"half")
    assert checked(results)[0] == 0
    age(part, DAY_S)
    code, said = checked(results)
    assert code == 1
    assert f"{part}: left over" in said
    assert checked(results, remove=True)[0] == 0
    assert not part.exists()


def test_a_file_that_is_not_the_stores_is_named_and_stays(results: Path) -> None:
    notes = results / "store" / "notes.txt"
    notes.write_text("mine")
    code, said = checked(results, remove=True)
    assert code == 1
    assert f"{notes}: no fragment" in said
    assert notes.exists()


def test_a_fragment_written_anew_after_the_look_is_not_removed(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fragment(results, 1)
    path.write_bytes(b"")

    def look_then_write(store: Store, file: Any) -> Any:
        problem = find_problem(store, file)
        if problem is not None:
            store.put(inputs_of(1), PLAIN, PLAIN.arrow.empty_table(), {})
        return problem

    monkeypatch.setattr("routewise.store_view.find_problem", look_then_write)
    checked(results, remove=True)
    monkeypatch.undo()
    assert checked(results)[0] == 0
    assert kept(results) == [True, True, True]


# ----------------------------------------------------------------------------------- prune


def test_only_what_no_cell_uses_goes_and_only_with_yes(results: Path) -> None:
    assert f"{fragment(results, 2)}: no cell uses it" in pruned(results)
    assert kept(results) == [True, True, True]
    assert "1 files" in pruned(results, yes=True)
    assert kept(results) == [True, True, False]


def test_what_is_younger_than_asked_stays(results: Path) -> None:
    pruned(results, older_than_days=3.0, yes=True)
    assert kept(results) == [True, True, True]
    pruned(results, older_than_days=1.0, yes=True)
    assert kept(results) == [True, True, False]


def test_a_file_younger_than_an_hour_is_never_touched(results: Path) -> None:
    part = fragment(results, 2).with_name(".x.parquet.abc.part")
    part.write_bytes(b"half")
    for path in (part, fragment(results, 2)):
        age(path, 3500.0)
    pruned(results, yes=True)
    assert kept(results) == [True, True, True]
    assert part.exists()
    age(part, 3700.0)
    pruned(results, yes=True)
    assert not part.exists()


def test_cell_files_that_say_nothing_are_counted(results: Path) -> None:
    path = results / "cells" / "1" / "old.parquet"
    write_table(path, PLAIN, PLAIN.arrow.empty_table(), {"cell": {}})
    assert f"1 cell files do not say what they are made of, such as {path}" in pruned(results)


# ------------------------------------------------------------------------------- the command


def test_the_command_gives_the_exit_code(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--results", str(results)]
    for action in ("list", "check", "prune"):
        assert run(parse(["store", action, *words])) == 0
    fragment(results, 0).write_bytes(b"")
    assert run(parse(["store", "check", *words])) == 1
    assert run(parse(["store", "prune", "--yes", *words])) == 0
    assert kept(results) == [True, True, True]  # not a month old: of a stopped run, perhaps
    assert run(parse(["store", "prune", "--older-than-days", "1", "--yes", *words])) == 0
    assert kept(results) == [True, True, False]
    assert run(parse(["store", "list", "--results", str(results / "nowhere")])) == 2
    assert "no such folder" in capsys.readouterr().err
    assert len(list(store_files(results / "store"))) == 2
