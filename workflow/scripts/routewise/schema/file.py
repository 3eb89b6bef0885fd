"""Parquet files that carry one declared table each, whole or absent.

Every file that Routewise writes goes through :func:`write_table`: the schema is one declared in a
module beside this one and never inferred, provenance travels in the file's own metadata under one
key, and a file is whole or absent (written beside its final name, synced, then renamed).

Each table has a module of its own, so that a change of one table re-measures only what writes or
reads that table.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routewise.digest import new_file_mode
from routewise.errors import RoutewiseError

SCHEMA_VERSION = 1
METADATA_KEY = b"routewise"

HASH = pa.binary(16)


@dataclass(frozen=True)
class TableSchema:
    """A declared table: the name that its files carry in their metadata, and its columns."""

    name: str
    arrow: pa.Schema


def table_of(declared: TableSchema, columns: dict[str, Any]) -> pa.Table:
    """Return columns (name -> sequence or array, all of one length) as the declared table.

    Raises ValueError where a column is missing or too many, and pyarrow's error where a value
    does not fit its type or a null stands where none may be.
    """
    schema = declared.arrow
    if set(columns) != set(schema.names):
        missing = sorted(set(schema.names) - set(columns))
        extra = sorted(set(columns) - set(schema.names))
        raise ValueError(
            f"table {declared.name}: missing columns {missing}, unknown columns {extra}"
        )
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    for field, column in zip(schema, table.columns, strict=True):
        if not field.nullable and column.null_count:
            raise ValueError(f"table {declared.name}: null in column {field.name}")
    return table


def write_table(
    path: Path, declared: TableSchema, table: pa.Table, provenance: dict[str, Any]
) -> None:
    """Write ``table`` to ``path`` as Parquet, atomically, with provenance in its metadata.

    Raises OSError (disk full, no permission); then nothing is left at ``path`` but what was there.
    """
    document = {"schema_version": SCHEMA_VERSION, "table": declared.name, **provenance}
    metadata = {METADATA_KEY: json.dumps(document, sort_keys=True).encode()}
    table = table.cast(declared.arrow).replace_schema_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, new_file_mode())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write does not say to what
        raise


def read_table(path: Path, declared: TableSchema) -> tuple[pa.Table, dict[str, Any]]:
    """Read a Routewise Parquet file; return the table and its provenance.

    Raises RoutewiseError where the file is absent, damaged, of another table, or written under
    another schema version.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        raw = (table.schema.metadata or {}).get(METADATA_KEY)
        provenance = None if raw is None else json.loads(raw)
    except FileNotFoundError as error:
        raise RoutewiseError(f"{path}: no such file", "run the workflow again") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RoutewiseError(
            f"{path}: not a whole Parquet file ({error})", "delete it and run the workflow again"
        ) from error
    if not isinstance(provenance, dict) or not {"schema_version", "table"} <= set(provenance):
        raise RoutewiseError(f"{path}: carries no Routewise provenance", "delete it and run again")
    version = provenance["schema_version"]
    if version != SCHEMA_VERSION:
        is_newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise RoutewiseError(
            f"{path}: schema version {version}, this Routewise reads {SCHEMA_VERSION}",
            "read it with the newer Routewise that wrote it"
            if is_newer
            else "move the file away and run the workflow again; the Routewise that wrote it "
            "still reads it",
        )
    table = _with_later_columns(table, declared)
    if provenance["table"] != declared.name or not table.schema.equals(declared.arrow):
        raise RoutewiseError(
            f"{path}: holds the table {provenance['table']!r}, wanted {declared.name!r} "
            "as declared",
            "delete it and run again",
        )
    return table, provenance


def _with_later_columns(table: pa.Table, declared: TableSchema) -> pa.Table:
    """Return a table with nulls in the nullable columns that it was written before."""
    names = declared.arrow.names
    later = names[len(table.column_names) :]
    fields = [declared.arrow.field(name) for name in later]
    if table.column_names + later == names and all(field.nullable for field in fields):
        for field in fields:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table


def read_provenance(path: Path) -> dict[str, Any]:
    """Return a file's provenance from its metadata alone; empty where it says nothing.

    :func:`read_table` says what is wrong with a file.
    """
    try:
        found = json.loads((pq.read_schema(path).metadata or {})[METADATA_KEY])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def table_name(path: Path) -> str | None:
    """Return the name of the table that a file says it holds, or None where it says nothing."""
    name = read_provenance(path).get("table")
    return None if name is None else str(name)
