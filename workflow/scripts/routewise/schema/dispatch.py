"""The table of the kernels that ran."""

from __future__ import annotations

import pyarrow as pa

from routewise.schema.file import TableSchema

#: Which kernels a server's log says ran. One row per (life, width, repeat, dispatch).
DISPATCH = TableSchema(
    "dispatch",
    pa.schema(
        [
            pa.field("life", pa.int32(), nullable=False),
            pa.field("width", pa.int32(), nullable=False),  # requests in flight
            pa.field("repeat", pa.int32(), nullable=False),  # of this width, in the order run
            pa.field("log", pa.string(), nullable=False),  # scheduler | hrx
            pa.field("backend", pa.string(), nullable=False),
            pa.field("op", pa.string()),  # null where the log names no operation
            pa.field("kernel", pa.string()),  # null where the log names no kernel
            pa.field("kind", pa.string()),  # fused | single; null where the log does not say
            pa.field("n", pa.int32(), nullable=False),  # lines; a log of first matches gives 1
        ]
    ),
)
