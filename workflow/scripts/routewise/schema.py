"""One Arrow schema per table, and the Parquet files that carry them.

Every file that Routewise writes goes through :func:`write_table`: the schema is the one declared
here and never inferred, provenance travels in the file's own metadata under one key, and a file
is whole or absent (written beside its final name, synced, then renamed).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routewise.errors import RoutewiseError

SCHEMA_VERSION = 1
METADATA_KEY = b"routewise"

HASH = pa.binary(16)

#: Token ids of one prompt set under one model's template and tokenizer. One row per prompt.
PROMPTS = pa.schema(
    [
        pa.field("prompt_index", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("text", pa.string()),  # with the template applied; null where ids were given
        pa.field("n_asked", pa.int32(), nullable=False),  # tokens to decode after the prompt
        pa.field("digest", pa.string(), nullable=False),  # SHA-256 of the token ids and n_asked
    ]
)

#: The plain arm. One row per (prompt, step); step 0 is the row that the prefill ends in, step s
#: the row after token s - 1 was decoded alone. ``token_id`` is the greedy choice of the row.
PLAIN = pa.schema(
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
)

#: The replay arm compared with the plain arm. One row per (prompt, step), step >= 1.
REPLAY = pa.schema(
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
)

#: Pass times. One row per sample; routes are interleaved within one job.
COST = pa.schema(
    [
        pa.field("route", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
        pa.field("order", pa.int32(), nullable=False),  # place of the sample in the whole job
        pa.field("depth", pa.int32(), nullable=False),  # tokens in the cache before the pass
        pa.field("pass_ns", pa.int64(), nullable=False),
        pa.field("load_1min", pa.float64(), nullable=False),
        pa.field("other_cpu_share", pa.float64(), nullable=False),  # cores' share used by others
        pa.field("contended", pa.bool_(), nullable=False),
        pa.field("clock_mhz", pa.float64()),  # null where the machine does not tell
    ]
)

_PROMPT = [
    pa.field("prompt_index", pa.int32(), nullable=False),
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("category", pa.string(), nullable=False),
]

#: Replies of a server. One row per reply; its tokens are lists, all of one length. The *block* of
#: a row (life, cache, mix, prefill, parallel, width) says how it was asked for; a block has rounds,
#: and a round has ``width`` replies in flight at once.
REPLIES = pa.schema(
    [
        *_PROMPT,
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
        pa.field("observable", pa.string(), nullable=False),  # chosen-logprob | token-ids | text
        pa.field("n_asked", pa.int32(), nullable=False),
        pa.field("n_received", pa.int32(), nullable=False),
        pa.field("finish", pa.string()),  # eos | limit | word; null where the server says nothing
        pa.field("text", pa.binary(), nullable=False),  # bytes, as UTF-8 may end half-way
        pa.field("token_ids", pa.list_(pa.int32())),  # null where the route sends none
        pa.field("token_bytes", pa.list_(pa.binary())),  # null where the route sends none
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),  # null where status is not ok
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
        pa.field("n_decodes", pa.int32()),  # passes of the server in the round; null: no witness
        pa.field("busy_per_decode", pa.float64()),  # slots busy in a pass, mean of the round
        pa.field("claim_wait_s", pa.float64(), nullable=False),
        pa.field("claim_hold_s", pa.float64(), nullable=False),  # up to this round
        pa.field("n_others", pa.int32()),  # other processes on the device; null: nobody can tell
    ]
)

#: Two routes' replies to the same request, token by token. One row per aligned position; ``a``
#: and ``b`` are the routes in the order of the cell's name ``a|b``.
AGREE = pa.schema(
    [
        *_PROMPT,
        pa.field("copy", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),  # of the token in the reply, from 0
        pa.field("common", pa.bool_(), nullable=False),  # all earlier tokens are equal
        pa.field("match", pa.bool_(), nullable=False),  # this token is equal
        pa.field("same_stream", pa.bool_(), nullable=False),  # all tokens of the reply are equal
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
)

#: Which kernels a server's log says ran. One row per (life, width, repeat, dispatch).
DISPATCH = pa.schema(
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
)

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
CELLS = pa.schema(
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
)

#: Schemas of the study's tables, by the name that they carry in their metadata.
STUDY_TABLES: dict[str, pa.Schema] = {
    "study_cells": CELLS,
    "study_replay": pa.schema(_ROUTE + _CELL + list(REPLAY)),
    "study_plain": pa.schema(_ROUTE + _CELL + list(PLAIN)),
    "study_cost": pa.schema(_CELL + list(COST)),
    "study_replies": pa.schema([_SWEEP, *_ROUTE, *_CELL, *REPLIES]),
    "study_agree": pa.schema(_ROUTE + _CELL + list(AGREE)),
    "study_dispatch": pa.schema(_ROUTE + _CELL + list(DISPATCH)),
}

TABLES: dict[str, pa.Schema] = {
    "prompts": PROMPTS,
    "plain": PLAIN,
    "replay": REPLAY,
    "cost": COST,
    "replies": REPLIES,
    "agree": AGREE,
    "dispatch": DISPATCH,
    **STUDY_TABLES,
}


def table_of(name: str, columns: dict[str, Any]) -> pa.Table:
    """Return columns (name -> sequence or array, all of one length) as the declared table.

    Raises ValueError where a column is missing or too many, and pyarrow's error where a value
    does not fit its type or a null stands where none may be.
    """
    schema = TABLES[name]
    if set(columns) != set(schema.names):
        missing = sorted(set(schema.names) - set(columns))
        extra = sorted(set(columns) - set(schema.names))
        raise ValueError(f"table {name}: missing columns {missing}, unknown columns {extra}")
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    for field, column in zip(schema, table.columns, strict=True):
        if not field.nullable and column.null_count:
            raise ValueError(f"table {name}: null in column {field.name}")
    return table


def write_table(path: Path, name: str, table: pa.Table, provenance: dict[str, Any]) -> None:
    """Write ``table`` to ``path`` as Parquet, atomically, with provenance in its metadata.

    Raises OSError (disk full, no permission); then nothing is left at ``path`` but what was there.
    """
    schema = TABLES[name]
    document = {"schema_version": SCHEMA_VERSION, "table": name, **provenance}
    metadata = {METADATA_KEY: json.dumps(document, sort_keys=True).encode()}
    table = table.cast(schema).replace_schema_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write does not say to what
        raise


def read_table(path: Path, name: str) -> tuple[pa.Table, dict[str, Any]]:
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
    if provenance["schema_version"] != SCHEMA_VERSION:
        raise RoutewiseError(
            f"{path}: schema version {provenance['schema_version']}, this Routewise reads "
            f"{SCHEMA_VERSION}",
            "move the old results folder away and run again",
        )
    if provenance["table"] != name or not table.schema.equals(TABLES[name]):
        raise RoutewiseError(
            f"{path}: holds the table {provenance['table']!r}, wanted {name!r} as declared",
            "delete it and run again",
        )
    return table, provenance
