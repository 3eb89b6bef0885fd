"""The tables of the replay sweep: the plain arm, and the replay compared with it."""

from __future__ import annotations

import pyarrow as pa

from routewise.schema.file import HASH, TableSchema

#: The plain arm. One row per (prompt, step); step 0 is the row that the prefill ends in, step s
#: the row after token s - 1 was decoded alone. ``token_id`` is the greedy choice of the row.
PLAIN = TableSchema(
    "plain",
    pa.schema(
        [
            pa.field("prompt_index", pa.int32(), nullable=False),
            pa.field("prompt_id", pa.string(), nullable=False),
            pa.field("category", pa.string(), nullable=False),
            pa.field("step", pa.int32(), nullable=False),
            pa.field("kv_position", pa.int32(), nullable=False),  # of the token decoded last
            pa.field("input_token_id", pa.int32(), nullable=False),
            pa.field("token_id", pa.int32(), nullable=False),
            pa.field("status", pa.string(), nullable=False),  # ok | invalid (NaN or infinity)
            pa.field("n_nonfinite", pa.int32(), nullable=False),
            pa.field("logits_hash", HASH, nullable=False),  # XXH3-128 of the raw float32 row
            pa.field("top_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("top_logits", pa.list_(pa.float32()), nullable=False),
            pa.field("top_bits", pa.list_(pa.uint32()), nullable=False),
            pa.field("margin", pa.float32(), nullable=False),  # top-1 minus top-2 logit
            pa.field("n_vocab", pa.int32(), nullable=False),
        ]
    ),
)

#: The replay arm compared with the plain arm. One row per (prompt, step), step >= 1.
REPLAY = TableSchema(
    "replay",
    pa.schema(
        [
            pa.field("prompt_index", pa.int32(), nullable=False),
            pa.field("prompt_id", pa.string(), nullable=False),
            pa.field("category", pa.string(), nullable=False),
            pa.field("step", pa.int32(), nullable=False),
            pa.field("kv_position", pa.int32(), nullable=False),
            pa.field("input_token_id", pa.int32(), nullable=False),
            pa.field("pass_index", pa.int32(), nullable=False),
            pa.field("pass_width", pa.int32(), nullable=False),  # recorded tokens of this sequence
            pa.field("pass_tokens", pa.int32(), nullable=False),  # drafts and neighbours too
            pa.field("batch_offset", pa.int32(), nullable=False),
            pa.field("crosses_128", pa.bool_(), nullable=False),
            pa.field("crosses_256", pa.bool_(), nullable=False),
            pa.field("status", pa.string(), nullable=False),  # ok | invalid
            pa.field("bits_equal", pa.bool_()),  # null where invalid
            pa.field("n_differing", pa.int32()),  # logits whose bits differ
            pa.field("n_zero_sign", pa.int32()),  # of these, -0.0 against +0.0
            pa.field("logit_delta_max", pa.float32()),  # largest |replay - plain|
            pa.field("logit_delta_max_id", pa.int32()),
            pa.field("argmax_flip", pa.bool_()),
            pa.field("plain_token_id", pa.int32(), nullable=False),
            pa.field("replay_token_id", pa.int32(), nullable=False),
            pa.field("kl_nats", pa.float64()),  # KL(plain || replay)
            pa.field("plain_margin", pa.float32(), nullable=False),
            pa.field("replay_margin", pa.float32(), nullable=False),
            pa.field("plain_hash", HASH, nullable=False),
            pa.field("replay_hash", HASH, nullable=False),
            # whether the plain row of this job has the bits of the plain cell's
            pa.field("plain_repeat_equal", pa.bool_(), nullable=False),
        ]
    ),
)
