"""Parquet files: whole or absent, of the declared schema, and refused where they are not."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from routewise.errors import RoutewiseError
from routewise.schema.file import METADATA_KEY, SCHEMA_VERSION, read_table, table_of, write_table
from routewise.schema.study import TABLES

PROVENANCE = {"made_by": "a test", "numbers": [1, 2.5, None]}


def columns(n: int = 3) -> dict[str, Any]:
    """Return n rows of the table `prompts`."""
    return {
        "prompt_index": range(n),
        "prompt_id": [f"prompt-{i}" for i in range(n)],
        "category": ["made"] * n,
        "token_ids": [[i, i + 1] for i in range(n)],
        "text": [f"text {i}" if i % 2 else None for i in range(n)],
        "n_asked": [64] * n,
        "digest": [f"{i:064x}" for i in range(n)],
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "prompts.parquet"
    write_table(path, TABLES["prompts"], table_of(TABLES["prompts"], columns()), PROVENANCE)
    return path


def left_overs(folder: Path, file: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path != file]


def rewrite(path: Path, table: pa.Table, **document: Any) -> None:
    """Write a file that only looks like one of ours."""
    _, provenance = read_table(path, TABLES["prompts"])
    metadata = {METADATA_KEY: json.dumps({**provenance, **document}).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


def refused(path: Path, name: str = "prompts") -> str:
    with pytest.raises(RoutewiseError) as caught:
        read_table(path, TABLES[name])
    assert str(path) in caught.value.problem
    assert caught.value.hint
    return caught.value.problem


def test_what_is_written_is_read_back(file: Path) -> None:
    table, provenance = read_table(file, TABLES["prompts"])
    assert table.to_pydict() == {k: list(v) for k, v in columns().items()}
    assert table.schema.equals(TABLES["prompts"].arrow)
    assert provenance == {"schema_version": SCHEMA_VERSION, "table": "prompts", **PROVENANCE}
    assert left_overs(file.parent, file) == []
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_the_same_rows_give_the_same_bytes(file: Path, tmp_path: Path) -> None:
    write_table(
        tmp_path / "b", TABLES["prompts"], table_of(TABLES["prompts"], columns()), PROVENANCE
    )
    assert (tmp_path / "b").read_bytes() == file.read_bytes()


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    path = tmp_path / "run=1" / "prompts.parquet"
    write_table(path, TABLES["prompts"], table_of(TABLES["prompts"], columns()), PROVENANCE)
    assert read_table(path, TABLES["prompts"])[0].num_rows == 3


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_no_rows_keeps_its_schema(name: str, tmp_path: Path) -> None:
    write_table(
        tmp_path / "x",
        TABLES[name],
        table_of(TABLES[name], {c: [] for c in TABLES[name].arrow.names}),
        {},
    )
    assert read_table(tmp_path / "x", TABLES[name])[0].schema.equals(TABLES[name].arrow)


# ---------------------------------------------------------------------------- tables


def test_a_missing_and_an_unknown_column_are_named() -> None:
    given = columns()
    given["token_idz"] = given.pop("token_ids")
    with pytest.raises(ValueError, match=r"missing columns \['token_ids'\].*\['token_idz'\]"):
        table_of(TABLES["prompts"], given)


@pytest.mark.parametrize("name", ["prompt_id", "token_ids", "n_asked"])
def test_a_null_where_none_may_be_is_refused(name: str) -> None:
    given = columns()
    given[name] = [None, *list(given[name])[1:]]
    with pytest.raises(ValueError, match=f"null in column {name}"):
        table_of(TABLES["prompts"], given)


def test_nulls_stand_where_a_comparison_is_not_possible() -> None:
    nullable = {field.name for field in TABLES["replay"].arrow if field.nullable}
    assert nullable == {
        "bits_equal",
        "n_differing",
        "n_zero_sign",
        "logit_delta_max",
        "logit_delta_max_id",
        "argmax_flip",
        "kl_nats",
    }


@pytest.mark.parametrize(
    ("name", "value"), [("n_asked", "many"), ("n_asked", 2**31), ("prompt_id", 7)]
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    given = columns()
    given[name] = [value] * 3
    with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)):
        table_of(TABLES["prompts"], given)


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises((ValueError, pa.ArrowInvalid)):
        table_of(TABLES["prompts"], {**columns(), "n_asked": [64]}).validate()


def test_a_hash_has_sixteen_bytes() -> None:
    assert TABLES["plain"].arrow.field("logits_hash").type == pa.binary(16)
    with pytest.raises(pa.ArrowInvalid):
        pa.array([b"short"], pa.binary(16))


# ------------------------------------------------------------------------- bad files


def test_an_absent_file_is_said_so(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "nothing.parquet")


def test_every_truncation_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        file.write_bytes(whole[:length])
        assert "not a whole Parquet file" in refused(file)


def test_no_flipped_bit_gives_other_rows_or_a_traceback(file: Path) -> None:
    """All over the file: refused by a message, or a bit that means nothing for the rows."""
    whole, (good, _) = file.read_bytes(), read_table(file, TABLES["prompts"])
    n_refused = 0
    places = range(0, len(whole), 7)
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        file.write_bytes(damaged)
        try:
            table, _ = read_table(file, TABLES["prompts"])
        except RoutewiseError:
            n_refused += 1
        else:
            assert table.equals(good), place
    assert n_refused > len(places) // 3


def test_a_file_of_another_table_is_refused(file: Path) -> None:
    assert "holds the table 'prompts', wanted 'plain'" in refused(file, "plain")


def test_another_schema_version_is_refused_with_both_numbers(file: Path) -> None:
    rewrite(file, table_of(TABLES["prompts"], columns()), schema_version=SCHEMA_VERSION + 1)
    problem = refused(file)
    assert f"schema version {SCHEMA_VERSION + 1}" in problem
    assert f"reads {SCHEMA_VERSION}" in problem


def test_columns_that_are_not_as_declared_are_refused(file: Path) -> None:
    table = table_of(TABLES["prompts"], columns())
    for other in (
        table.drop_columns("digest"),
        table.append_column("more", pa.array([1, 2, 3])),
        table.cast(table.schema.set(5, pa.field("n_asked", pa.int64(), nullable=False))),
        table.select(table.column_names[::-1]),
    ):
        write_table(file, TABLES["prompts"], table, PROVENANCE)
        rewrite(file, other)
        assert "as declared" in refused(file)


@pytest.mark.parametrize("raw", [None, b"", b"{", b"7", b"{}", b'{"table": "prompts"}', b"\xff"])
def test_a_file_without_our_provenance_is_refused(file: Path, raw: bytes | None) -> None:
    table = table_of(TABLES["prompts"], columns())
    pq.write_table(table.replace_schema_metadata(raw and {METADATA_KEY: raw}), file)
    refused(file)


def test_a_folder_is_no_parquet_file(tmp_path: Path) -> None:
    refused(tmp_path)


# --------------------------------------------------------------------- whole or absent


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), Interrupted()])
@pytest.mark.parametrize("at", ["write_table", "fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(
    file: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, at: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise fault

    before = file.read_bytes()
    more = table_of(TABLES["prompts"], columns(5))
    monkeypatch.setattr(*{"write_table": (pq, at)}.get(at, (os, at)), fail)
    for path in (file, file.with_name("new.parquet")):
        with pytest.raises(type(fault)):
            write_table(path, TABLES["prompts"], more, PROVENANCE)
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert left_overs(file.parent, file) == []
    write_table(file, TABLES["prompts"], more, PROVENANCE)
    assert read_table(file, TABLES["prompts"])[0].num_rows == 5


def test_a_file_is_synced_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace

    def note_sync(handle: int) -> None:
        order.append("sync")
        sync(handle)

    def note_name(old: str, new: Path) -> None:
        order.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_name)
    write_table(tmp_path / "x", TABLES["prompts"], table_of(TABLES["prompts"], columns()), {})
    assert order == ["sync", "name"]


def test_provenance_that_json_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_table(
            tmp_path / "x",
            TABLES["prompts"],
            table_of(TABLES["prompts"], columns()),
            {"a": object()},
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "hint"), [(SCHEMA_VERSION - 1, "move the file away"), (99, "newer Routewise")]
)
def test_an_older_and_a_newer_file_are_told_apart(file: Path, version: int, hint: str) -> None:
    rewrite(file, table_of(TABLES["prompts"], columns()), schema_version=version)
    with pytest.raises(RoutewiseError, match=f"schema version {version}") as error:
        read_table(file, TABLES["prompts"])
    assert hint in str(error.value.hint)
