"""The tables of a study: what its cell files hold, collected."""

from __future__ import annotations

import pyarrow as pa

from routewise.schema.agree import AGREE
from routewise.schema.cost import COST
from routewise.schema.dispatch import DISPATCH
from routewise.schema.file import TableSchema
from routewise.schema.prompts import PROMPTS
from routewise.schema.replay import PLAIN, REPLAY
from routewise.schema.replies import REPLIES

_CELL = [
    pa.field("cell", pa.string(), nullable=False),  # path of the cell file
    pa.field("cell_valid", pa.bool_(), nullable=False),  # the job had no reason to doubt the cell
    pa.field("fingerprint", pa.string(), nullable=False),  # of the libraries that were mapped
]
_ROUTE = [
    pa.field("route", pa.string(), nullable=False),
    pa.field("model", pa.string(), nullable=False),
    pa.field("variant", pa.string(), nullable=False),
]
_SWEEP = pa.field("sweep", pa.string(), nullable=False)

#: One row per cell file. ``provenance`` is the JSON document of the cell's own metadata.
CELLS = TableSchema(
    "study_cells",
    pa.schema(
        [
            pa.field("sweep", pa.string(), nullable=False),
            pa.field("route", pa.string()),  # null in a cost cell: its rows name their routes
            pa.field("model", pa.string()),
            pa.field("variant", pa.string()),
            pa.field("cell", pa.string(), nullable=False),
            pa.field("cell_valid", pa.bool_(), nullable=False),
            pa.field("fingerprint", pa.string()),  # null in a cost cell
            pa.field("n_rows", pa.int64(), nullable=False),
            pa.field("provenance", pa.string(), nullable=False),
        ]
    ),
)

#: The tables of cell files, by name.
CELL_TABLES: dict[str, TableSchema] = {
    table.name: table for table in (REPLAY, PLAIN, COST, REPLIES, AGREE, DISPATCH)
}


def _collected(table: TableSchema) -> TableSchema:
    """Return a cell table as the study keeps it: with its cell's columns before its own."""
    leading = {"cost": [], "replies": [_SWEEP, *_ROUTE]}.get(table.name, _ROUTE)
    return TableSchema(f"study_{table.name}", pa.schema([*leading, *_CELL, *table.arrow]))


#: The study's tables, by the name that they carry in their metadata.
STUDY_TABLES: dict[str, TableSchema] = {
    table.name: table for table in (CELLS, *map(_collected, CELL_TABLES.values()))
}

#: Every table that Routewise writes, by name.
TABLES: dict[str, TableSchema] = {PROMPTS.name: PROMPTS, **CELL_TABLES, **STUDY_TABLES}
