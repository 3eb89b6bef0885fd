"""The table of pass times."""

from __future__ import annotations

import pyarrow as pa

from routewise.schema.file import TableSchema

#: Pass times. One row per sample; routes are interleaved within one job.
COST = TableSchema(
    "cost",
    pa.schema(
        [
            pa.field("route", pa.string(), nullable=False),
            pa.field("model", pa.string(), nullable=False),
            pa.field("width", pa.int32(), nullable=False),
            pa.field("round", pa.int32(), nullable=False),
            pa.field("order", pa.int32(), nullable=False),  # place of the sample in the whole job
            pa.field("depth", pa.int32(), nullable=False),  # tokens in the cache before the pass
            pa.field("pass_ns", pa.int64(), nullable=False),
            pa.field("load_1min", pa.float64(), nullable=False),
            pa.field(
                "other_cpu_share", pa.float64(), nullable=False
            ),  # cores' share used by others
            pa.field("contended", pa.bool_(), nullable=False),
            pa.field("clock_mhz", pa.float64()),  # null where the machine does not tell
            pa.field("read_bytes", pa.int64()),  # weights and cache that it must read
            pa.field("copy_bytes_per_s", pa.float64()),  # read and written, on the route's device
        ]
    ),
)
