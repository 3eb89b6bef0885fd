"""The table of token ids."""

from __future__ import annotations

import pyarrow as pa

from routewise.schema.file import TableSchema

#: Token ids of one prompt set under one model's template and tokenizer. One row per prompt.
PROMPTS = TableSchema(
    "prompts",
    pa.schema(
        [
            pa.field("prompt_index", pa.int32(), nullable=False),
            pa.field("prompt_id", pa.string(), nullable=False),
            pa.field("category", pa.string(), nullable=False),
            pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("text", pa.string()),  # with the template applied; null where ids were given
            pa.field("n_asked", pa.int32(), nullable=False),  # tokens to decode after the prompt
            pa.field("digest", pa.string(), nullable=False),  # SHA-256 of the token ids and n_asked
        ]
    ),
)
