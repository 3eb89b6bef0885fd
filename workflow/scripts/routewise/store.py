"""The result store: the rows of one prompt, kept under the key of everything that made them.

A fragment is a Parquet file ``<root>/<first two of the key>/<key>.parquet``, written whole or not
at all, so that any number of jobs may write at once: two that measure the same thing write the
same name. A fragment that cannot be read is removed and measured again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from routewise.digest import digest_of
from routewise.errors import RoutewiseError
from routewise.schema import read_table, write_table


class Store:
    """Fragments below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        """Return where the fragment of a key is or would be."""
        return self.root / key[:2] / f"{key}.parquet"

    def get(self, key: str, table: str) -> tuple[pa.Table, dict[str, Any]] | None:
        """Return a fragment's rows and provenance, or None where it must be measured."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            rows, provenance = read_table(path, table)
        except RoutewiseError:
            path.unlink(missing_ok=True)
            return None
        if provenance.get("key") != key:
            path.unlink(missing_ok=True)
            return None
        return rows, provenance

    def put(self, key: str, table: str, rows: pa.Table, provenance: dict[str, Any]) -> None:
        """Keep a fragment. Raises OSError where the disk is full; then nothing is kept."""
        write_table(self.path(key), table, rows, {**provenance, "key": key})


def fragment_key(inputs: dict[str, Any]) -> str:
    """Return the key of a fragment: the digest of all that made it, in hex (64 characters)."""
    return digest_of(inputs)
