"""The table of two routes' replies, token by token."""

from __future__ import annotations

import pyarrow as pa

from routewise.schema.file import TableSchema
from routewise.schema.replies import PROMPT_FIELDS

#: Two routes' replies to the same request, token by token. One row per aligned position; ``a``
#: and ``b`` are the routes in the order of the cell's name ``a|b``.
AGREE = TableSchema(
    "agree",
    pa.schema(
        [
            *PROMPT_FIELDS,
            pa.field("copy", pa.int32(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),  # of the token in the reply, from 0
            pa.field("common", pa.bool_(), nullable=False),  # all earlier tokens are equal
            pa.field("match", pa.bool_(), nullable=False),  # this token is equal
            pa.field(
                "same_stream", pa.bool_(), nullable=False
            ),  # all tokens of the reply are equal
            pa.field("token_id_a", pa.int32()),
            pa.field("token_id_b", pa.int32()),
            pa.field("bytes_a", pa.binary()),  # null past the end of the shorter reply
            pa.field("bytes_b", pa.binary()),
            pa.field("logprob_a", pa.float32()),
            pa.field("logprob_b", pa.float32()),
            pa.field("status_a", pa.string(), nullable=False),  # as logprob_status, or ended
            pa.field("status_b", pa.string(), nullable=False),
            pa.field("bits_equal", pa.bool_()),  # null where one has no logprob
            pa.field("dlogp", pa.float32()),  # |a - b|; only where common and match
            pa.field("kl_nats", pa.float64()),  # approximate KL(a || b) from the top lists
            pa.field("margin_a", pa.float32()),  # top-1 minus top-2 logprob
            pa.field("margin_b", pa.float32()),
            pa.field("arithmetic_only", pa.bool_(), nullable=False),  # both load the same weights
        ]
    ),
)
