"""The table of servers' replies."""

from __future__ import annotations

import pyarrow as pa

from routewise.schema.file import HASH, TableSchema

#: Which prompt a row is of; the first columns of a table of replies.
PROMPT_FIELDS = [
    pa.field("prompt_index", pa.int32(), nullable=False),
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("category", pa.string(), nullable=False),
]

#: Replies of a server. One row per reply; its tokens are lists, all of one length. The *block* of
#: a row (life, cache, mix, prefill, parallel, width) says how it was asked for; a block has rounds,
#: and a round has ``width`` replies in flight at once.
REPLIES = TableSchema(
    "replies",
    pa.schema(
        [
            *PROMPT_FIELDS,
            pa.field("life", pa.int32(), nullable=False),  # which start of the server, from 0
            pa.field("cache", pa.string(), nullable=False),  # off | cold | warm (prompt cache)
            pa.field("mix", pa.string(), nullable=False),  # copies | neighbours | fillers
            pa.field("prefill", pa.string(), nullable=False),  # together | apart
            pa.field("parallel", pa.int32(), nullable=False),  # slots of the server
            pa.field("width", pa.int32(), nullable=False),  # requests in flight
            pa.field("round", pa.int32(), nullable=False),
            pa.field("copy", pa.int32(), nullable=False),  # index of the request within its round
            pa.field("role", pa.string(), nullable=False),  # probe | neighbour | filler
            pa.field("status", pa.string(), nullable=False),  # ok | invalid
            pa.field("reason", pa.string()),  # why invalid
            pa.field(
                "observable", pa.string(), nullable=False
            ),  # chosen-logprob | token-ids | text
            pa.field("n_asked", pa.int32(), nullable=False),
            pa.field("n_received", pa.int32(), nullable=False),
            pa.field(
                "finish", pa.string()
            ),  # eos | limit | word; null where the server says nothing
            pa.field("text", pa.binary(), nullable=False),  # bytes, as UTF-8 may end half-way
            pa.field("token_ids", pa.list_(pa.int32())),  # null where the route sends none
            pa.field("token_bytes", pa.list_(pa.binary())),  # null where the route sends none
            pa.field(
                "logprobs", pa.list_(pa.float32()), nullable=False
            ),  # null where status is not ok
            pa.field("logprob_bits", pa.list_(pa.uint32()), nullable=False),
            # ok | null | missing | sentinel | nan | not_float32
            pa.field("logprob_status", pa.list_(pa.string()), nullable=False),
            pa.field("top_ids", pa.list_(pa.list_(pa.int32()))),
            pa.field("top_bytes", pa.list_(pa.list_(pa.binary()))),
            pa.field("top_logprobs", pa.list_(pa.list_(pa.float32()))),
            pa.field("n_saturated", pa.int32(), nullable=False),  # logprob exactly 0: p near 1
            pa.field("state", HASH, nullable=False),  # of all tokens and compared bits
            pa.field("tokens_hash", HASH, nullable=False),  # of the tokens alone
            pa.field("slot", pa.int32()),
            pa.field("cache_n", pa.int32()),  # prompt tokens taken from the cache
            pa.field("prompt_n", pa.int32()),  # prompt tokens evaluated
            pa.field("draft_n", pa.int32()),
            pa.field("released_ns", pa.int64(), nullable=False),  # after the round's barrier
            pa.field("done_ns", pa.int64(), nullable=False),
            pa.field("release_spread_ms", pa.float64(), nullable=False),  # of the round
            pa.field(
                "n_decodes", pa.int32()
            ),  # passes of the server in the round; null: no witness
            pa.field("busy_per_decode", pa.float64()),  # slots busy in a pass, mean of the round
            pa.field("claim_wait_s", pa.float64(), nullable=False),
            pa.field("claim_hold_s", pa.float64(), nullable=False),  # up to this round
            pa.field(
                "n_others", pa.int32()
            ),  # other processes on the device; null: nobody can tell
        ]
    ),
)
