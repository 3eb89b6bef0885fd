"""The result store: the rows of one prompt, kept under the key of everything that made them.

A fragment is a Parquet file ``<root>/<first two of the key>/<key>.parquet``, written whole or not
at all, so that any number of jobs may write at once: two that measure the same thing write the
same name. A fragment that cannot be trusted is measured again and written over; nobody removes one
here, as it could be another job's good one by then. ``store_view.py`` shows and cleans a store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from routewise.digest import digest_of
from routewise.errors import RoutewiseError
from routewise.schema.file import TableSchema, read_table, write_table


class Store:
    """Fragments below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        """Return where the fragment of a key is or would be."""
        return self.root / key[:2] / f"{key}.parquet"

    def get(self, key: str, table: TableSchema) -> tuple[pa.Table, dict[str, Any]] | None:
        """Return a fragment's rows and provenance, or None where it must be measured."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            rows, provenance = read_table(path, table)
        except RoutewiseError:
            return None
        return (rows, provenance) if provenance.get("key") == key else None

    def put(
        self,
        inputs: dict[str, Any],
        table: TableSchema,
        rows: pa.Table,
        provenance: dict[str, Any],
    ) -> None:
        """Keep a fragment under the key of ``inputs``, which are kept in it, for a later check.

        Raises OSError where the disk is full; then nothing is kept.
        """
        key = fragment_key(inputs)
        write_table(self.path(key), table, rows, {**provenance, "key": key, "key_inputs": inputs})


def fragment_key(inputs: dict[str, Any]) -> str:
    """Return the key of a fragment: the digest of all that made it, in hex (64 characters)."""
    return digest_of(inputs)
