"""Replies made up for tests: valid ``replies`` tables whose states and distances are known.

An :class:`Answer` is what a server says to one request; the functions beside it change it in one
known way. Blocks of rows are made of answers, and a file of blocks with :func:`write_replies`. The
rows keep the rules that real rows keep: lists of one length, bits that are the logprobs' bits,
states and hashes that follow the tokens and bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import made_cells
import numpy as np
import pyarrow as pa
from routewise.schema.file import table_of, write_table
from routewise.schema.replies import REPLIES
from routewise.schema.study import TABLES
from routewise.state import state_of, tokens_hash_of

Row = dict[str, Any]

N_VOCAB = made_cells.N_VOCAB
CATEGORIES = made_cells.CATEGORIES
SENTINEL = float(np.finfo(np.float32).min)  # what a server sends for p = 0
#: Two tokens that are one character together, and none alone.
HALF_CHARACTERS = {300: b"\xc3", 301: b"\xa9"}


def piece_of(token_id: int) -> bytes:
    """Return the bytes of a token of the made-up vocabulary."""
    return HALF_CHARACTERS.get(token_id, f" t{token_id}".encode())


def bits_of(value: float) -> int:
    """Return the uint32 pattern of a float32."""
    return int(np.array(value, np.float32).view(np.uint32))


@dataclass(frozen=True)
class Answer:
    """What a server says: tokens, logprobs with their bits and statuses, and top lists.

    ``ids`` and ``pieces`` are None where the route sends none; ``top_*`` where there is no list.
    """

    text: bytes
    ids: tuple[int, ...] | None
    pieces: tuple[bytes, ...] | None
    logprobs: tuple[float | None, ...]
    bits: tuple[int | None, ...]
    statuses: tuple[str, ...]
    top_ids: tuple[tuple[int, ...], ...] | None
    top_pieces: tuple[tuple[bytes, ...], ...] | None
    top_logprobs: tuple[tuple[float, ...], ...] | None
    finish: str | None = "limit"
    n_asked: int | None = None  # as many as were received where it is None
    n_received: int | None = None  # as many as are shown where it is None

    @property
    def n_tokens(self) -> int:
        """Return how many tokens the answer has, as far as the route shows or counts them."""
        if self.n_received is not None:
            return self.n_received
        return len(self.ids if self.ids is not None else self.pieces or ())

    @property
    def observable(self) -> str:
        """Return the strongest thing that can be compared."""
        if any(status == "ok" for status in self.statuses):
            return "chosen-logprob"
        return "token-ids" if self.ids is not None else "text"


def make_answer(seed: int, n_tokens: int = 24, n_top: int = 2, finish: str = "limit") -> Answer:
    """Return an answer of random tokens; their top lists hold the token itself first.

    A quarter of each position's mass is in no list, so that logprobs may be raised by up to 0.3.
    """
    random = np.random.default_rng(seed)
    ids = [int(value) for value in random.integers(0, 300, n_tokens)]
    margin = np.float32(0.1) + random.gamma(1.2, 1.6, n_tokens)
    # the last column stands for all tokens that are in no list
    logits = np.stack([-margin * place for place in range(n_top)] + [np.zeros(n_tokens)], axis=1)
    rest = np.log(np.exp(logits[:, :-1]).sum(axis=1)) - 1
    logits[:, -1] = rest
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    top_ids = [tuple((token + place) % 300 for place in range(n_top)) for token in ids]
    return spoken(ids, logprobs[:, :-1].tolist(), top_ids, finish)


def spoken(
    ids: Sequence[int],
    top_logprobs: Sequence[Sequence[float]],
    top_ids: Sequence[Sequence[int]],
    finish: str | None = "limit",
) -> Answer:
    """Return the answer of these tokens; the first entry of each top list is the token's own."""
    values = tuple(float(np.float32(top[0])) for top in top_logprobs)
    return Answer(
        text=b"".join(piece_of(token) for token in ids),
        ids=tuple(ids),
        pieces=tuple(piece_of(token) for token in ids),
        logprobs=values,
        bits=tuple(bits_of(value) for value in values),
        statuses=("ok",) * len(values),
        top_ids=tuple(tuple(top) for top in top_ids),
        top_pieces=tuple(tuple(piece_of(token) for token in top) for top in top_ids),
        top_logprobs=tuple(tuple(float(np.float32(v)) for v in top) for top in top_logprobs),
        finish=finish,
    )


def shifted(answer: Answer, start: int, delta: float, stop: int | None = None) -> Answer:
    """Return the answer with ``delta`` added to the logprobs of positions start to stop."""
    assert answer.ids is not None
    assert answer.top_ids is not None
    assert answer.top_logprobs is not None
    tops = [
        tuple(value + delta for value in top)
        if start <= place < (answer.n_tokens if stop is None else stop)
        else top
        for place, top in enumerate(answer.top_logprobs)
    ]
    return spoken(answer.ids, tops, answer.top_ids, answer.finish)


def flipped_bit(answer: Answer, position: int, bit: int) -> Answer:
    """Return the answer with one bit of one logprob turned over; its top list stays."""
    bits, logprobs = list(answer.bits), list(answer.logprobs)
    pattern = bits[position]
    assert pattern is not None
    bits[position] = pattern ^ (1 << bit)
    logprobs[position] = float(np.array(bits[position], np.uint32).view(np.float32))
    return replace(answer, bits=tuple(bits), logprobs=tuple(logprobs))


def diverged(answer: Answer, position: int, seed: int = 99) -> Answer:
    """Return an answer that chooses the second token at ``position`` and others after it."""
    assert answer.ids is not None
    assert answer.top_ids is not None
    assert answer.top_logprobs is not None
    other = make_answer(seed, answer.n_tokens, len(answer.top_ids[0]))
    assert other.ids is not None
    assert other.top_ids is not None
    assert other.top_logprobs is not None
    turned = tuple(reversed(answer.top_ids[position][:2])) + answer.top_ids[position][2:]
    return spoken(
        (*answer.ids[:position], turned[0], *other.ids[position + 1 :]),
        (*answer.top_logprobs[: position + 1], *other.top_logprobs[position + 1 :]),
        (*answer.top_ids[:position], turned, *other.top_ids[position + 1 :]),
        answer.finish,
    )


def cut(answer: Answer, n_tokens: int, finish: str = "eos") -> Answer:
    """Return the first ``n_tokens`` tokens of the answer.

    It ended there by itself (``finish`` eos or word), or was asked for no more (limit).
    """
    assert answer.ids is not None
    assert answer.top_ids is not None
    assert answer.top_logprobs is not None
    short = spoken(
        answer.ids[:n_tokens], answer.top_logprobs[:n_tokens], answer.top_ids[:n_tokens], finish
    )
    return replace(short, n_asked=n_tokens if finish == "limit" else answer.n_tokens)


def with_status(answer: Answer, position: int, status: str) -> Answer:
    """Return the answer with a logprob that is not ok at ``position``: null, missing, sentinel …

    As in a real row the logprob is null; a sentinel, a NaN and a float64 keep the pattern that
    was sent.
    """
    pattern = {
        "sentinel": bits_of(SENTINEL),
        "nan": 0x7FC00000,
        "not_float32": answer.bits[position],
    }.get(status)
    return replace(
        answer,
        logprobs=_with(answer.logprobs, position, None),
        bits=_with(answer.bits, position, pattern),
        statuses=_with(answer.statuses, position, status),
    )


def _with(values: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*values[:position], value, *values[position + 1 :])


def without_logprobs(answer: Answer) -> Answer:
    """Return the answer of a route that sends tokens and no logprob at all."""
    n = answer.n_tokens
    return replace(
        answer,
        logprobs=(None,) * n,
        bits=(None,) * n,
        statuses=("missing",) * n,
        top_ids=None,
        top_pieces=None,
        top_logprobs=None,
    )


def without_ids(answer: Answer) -> Answer:
    """Return the answer of a route that sends the bytes of its tokens and no ids."""
    return replace(answer, ids=None, top_ids=None)


def only_text(answer: Answer) -> Answer:
    """Return the answer of a route that sends text and nothing else."""
    return replace(
        without_ids(answer),
        n_received=answer.n_tokens,
        pieces=None,
        logprobs=(),
        bits=(),
        statuses=(),
        top_pieces=None,
        top_logprobs=None,
    )


def resplit(answer: Answer, sizes: Sequence[int]) -> Answer:
    """Return the same text in tokens of other lengths, in bytes; without ids.

    A token that begins and ends where one of the answer's does keeps that one's logprob and list;
    any other has the logprob -1 and a list of itself alone. ``sizes`` add up to the text's length.
    """
    assert sum(sizes) == len(answer.text), (sum(sizes), len(answer.text))
    assert answer.pieces is not None
    spans, start = {}, 0
    for place, piece in enumerate(answer.pieces):
        spans[(start, start + len(piece))] = place
        start += len(piece)
    places, pieces, start = [], [], 0
    for size in sizes:
        places.append(spans.get((start, start + size)))
        pieces.append(answer.text[start : start + size])
        start += size
    assert answer.top_pieces is not None
    assert answer.top_logprobs is not None
    logprobs = [-1.0 if place is None else answer.logprobs[place] for place in places]
    return Answer(
        text=answer.text,
        ids=None,
        pieces=tuple(pieces),
        logprobs=tuple(logprobs),
        bits=tuple(None if value is None else bits_of(value) for value in logprobs),
        statuses=tuple("ok" if p is None else answer.statuses[p] for p in places),
        top_ids=None,
        top_pieces=tuple(
            (piece,) if place is None else answer.top_pieces[place]
            for place, piece in zip(places, pieces, strict=True)
        ),
        top_logprobs=tuple((-1.0,) if p is None else answer.top_logprobs[p] for p in places),
        finish=answer.finish,
    )


# --------------------------------------------------------------------------------- rows and blocks


def make_row(answer: Answer, **changes: Any) -> Row:
    """Return the row of one reply: solo, cache off, first of its block. ``changes`` are columns.

    ``prompt_index`` alone brings its id and category with it.
    """
    prompt = changes.get("prompt_index", 0)
    width = changes.get("width", 1)
    return {
        "prompt_index": prompt,
        "prompt_id": f"{CATEGORIES[prompt % len(CATEGORIES)]}-{prompt}",
        "category": CATEGORIES[prompt % len(CATEGORIES)],
        "life": 0,
        "cache": "off",
        "mix": "copies",
        "prefill": "together",
        "parallel": 1,
        "width": width,
        "round": 0,
        "copy": 0,
        "role": "probe",
        "status": "ok",
        "reason": None,
        "observable": answer.observable,
        "n_asked": answer.n_tokens if answer.n_asked is None else answer.n_asked,
        "n_received": answer.n_tokens,
        "finish": answer.finish,
        "text": answer.text,
        "token_ids": answer.ids,
        "token_bytes": answer.pieces,
        "logprobs": answer.logprobs,
        "logprob_bits": answer.bits,
        "logprob_status": answer.statuses,
        "top_ids": answer.top_ids,
        "top_bytes": answer.top_pieces,
        "top_logprobs": answer.top_logprobs,
        "n_saturated": sum(value == 0 for value in answer.logprobs),
        "state": _state(answer),
        "tokens_hash": tokens_hash_of(_tokens(answer)),
        "slot": changes.get("copy", 0),
        "cache_n": 0,
        "prompt_n": 20,
        "draft_n": None,
        "released_ns": 1_000_000_000,
        "done_ns": 1_500_000_000,
        "release_spread_ms": 0.0 if width == 1 else 0.4,
        "n_decodes": answer.n_tokens,
        "busy_per_decode": float(width),
        "claim_wait_s": 0.0,
        "claim_hold_s": 1.0,
        "n_others": None,
    } | changes


def _tokens(answer: Answer) -> Sequence[int] | Sequence[bytes]:
    if answer.ids is not None:
        return answer.ids
    shows_tokens = answer.pieces is not None and answer.observable != "text"
    return answer.pieces if shows_tokens and answer.pieces else (answer.text,)


def _state(answer: Answer) -> bytes:
    if answer.observable == "text":
        return state_of((answer.text,), (), ())
    return state_of(_tokens(answer), answer.bits, answer.statuses)


def invalid_row(reason: str, **changes: Any) -> Row:
    """Return the row of a request that had no usable reply."""
    nothing = Answer(b"", None, None, (), (), (), None, None, None)
    told = {"status": "invalid", "reason": reason, "observable": "text", "finish": None}
    return make_row(nothing, n_asked=24, **told, **changes)


def solo_block(answers: Sequence[Answer], rounds: int = 3, **changes: Any) -> list[Row]:
    """Return a block of width 1: each prompt's answer alone, the same in all rounds."""
    return [
        make_row(answer, prompt_index=prompt, round=one_round, **changes)
        for prompt, answer in enumerate(answers)
        for one_round in range(rounds)
    ]


def copies_block(copies: Sequence[Sequence[Answer]], prompt: int = 0, **changes: Any) -> list[Row]:
    """Return a block of byte-identical requests: ``copies[round][copy]``, its width from there."""
    return [
        make_row(
            answer,
            **{
                "prompt_index": prompt,
                "round": one_round,
                "copy": copy,
                "width": len(answers),
                "parallel": len(answers),
                **changes,
            },
        )
        for one_round, answers in enumerate(copies)
        for copy, answer in enumerate(answers)
    ]


def probe_block(
    probes: Sequence[Answer], others: Sequence[Answer], mix: str, prompt: int = 0, **changes: Any
) -> list[Row]:
    """Return a block of one probe (copy 0, one answer a round) beside neighbours or fillers.

    As in a real block all rows name the probe's prompt: what runs beside it is known by its role.
    """
    assert mix in ("neighbours", "fillers")
    rows = copies_block([[probe, *others] for probe in probes], prompt, mix=mix, **changes)
    for row in rows:
        if row["copy"] > 0:
            row["role"] = mix.removesuffix("s")
    return rows


def replies_table(rows: Sequence[Row]) -> pa.Table:
    """Return rows as a ``replies`` table."""
    columns = {name: [row[name] for row in rows] for name in REPLIES.arrow.names}
    return table_of(TABLES["replies"], columns)


# -------------------------------------------------------------------------------------- provenance


def provenance(
    route: str,
    model: str = "small-q4_k_m",
    variant: str = "np1",
    *,
    sweep: str = "repeat",
    api: str = "llama",
    parallel: int = 1,
    weights: str = "same",
    match: str = "ids",
    capabilities: dict[str, Any] | None = None,
    n_lives: int = 2,
    **changes: Any,
) -> dict[str, Any]:
    """Return what a serving cell's job records; ``changes`` replace its keys."""
    document = made_cells.provenance(route, model, variant)
    for key in ("readback", "coverage_report", "measure_s", "compare_s"):
        del document[key]
    document["cell"] = document["cell"] | {"sweep": sweep}
    document["settings"] = {"threads": 2, "context": 4096, "parallel": parallel, "n_probs": 2}
    document["serving"] = {
        "api": api,
        "parallel": parallel,
        "weights": weights,
        "match": match,
        "capabilities": capabilities
        or {"token_ids": match == "ids", "logprobs": True, "logprob_list": None},
        "lives": [_life(route) for _ in range(n_lives)],
    }
    return document | changes


def external(route: str, fingerprint: str | None = None) -> dict[str, Any]:
    """Return the changes of provenance of a route that is a command, not a build of ours."""
    command = {
        "name": route,
        "argv": ["served", "--device", "made-up"],
        "fingerprint": fingerprint or made_cells.build(route)["fingerprint"],
    }
    return {"build": None, "command": command}


def unsupported(route: str, reason: str, **changes: Any) -> dict[str, Any]:
    """Return the provenance of a cell that its route cannot do; its table has no rows."""
    return provenance(route, n_lives=0, **changes) | {
        "unsupported": reason,
        "n_measured": 0,
        "n_adopted": 0,
    }


def _life(route: str) -> dict[str, Any]:
    return {
        "props": {
            "build_info": f"b0-routewise-{made_cells.build(route)['digest']}",
            "total_slots": 1,
        },
        "start_s": 0.8,
        "stop": {"port_free": True, "processes_gone": True, "memory_free": None, "signal": "TERM"},
    }


def write_replies(path: Path, rows: Sequence[Row], document: dict[str, Any]) -> Path:
    """Write rows as a serving cell's file."""
    write_table(path, TABLES["replies"], replies_table(rows), document)
    return path
