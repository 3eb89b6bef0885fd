"""States: which complete answers a request had, and how far a reply is from the solo answer.

The state of a reply is every token and every compared float32 bit pattern with its status, as one
16-byte hash: two replies with one state are the same answer as far as the route can show it. Where
a route sends no logprobs a state holds the tokens alone, and a claim made from it is no stronger.

Functions that take ``rows`` take them as an Arrow table or as a DataFrame with columns of
schema/replies (each function names those it reads; others may be there). Rows whose ``status`` is
not ok are no evidence: they are counted as invalid and compared with nothing. A logprob counts
where its own status is ok, and only there; a missing one is never 0.
Neighbours and fillers stand under their probe's prompt: who gives rows gives those of one role.

Positions are those of tokens: by id where every reply has ids, else by the bytes of each token.
Where a route sends text alone they are bytes of the text, and ``unit`` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

if TYPE_CHECKING:
    import pandas as pd  # else where it is used: a plan needs none of it, and it takes its time

Rows: TypeAlias = "pa.Table | pd.DataFrame"
Row: TypeAlias = "Mapping[str, Any] | pd.Series"
Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

#: A reply's position is only as visible as the reply is long: scores are also given for these.
PREFIX_LENGTHS = (16, 32, 64, 128)
#: What says how a reply was asked for; rounds and copies are counted within it.
BLOCK = ("life", "cache", "mix", "prefill", "parallel", "width")
#: What can be compared, the strongest first.
OBSERVABLES = ("chosen-logprob", "token-ids", "text")

_OK = "ok"
_COMPARED = (
    "status",
    "observable",
    "text",
    "token_ids",
    "token_bytes",
    "logprobs",
    "logprob_bits",
    "logprob_status",
    "state",
    "tokens_hash",
)
_STATE_HEADER = b"routewise state 1\0"
_TOKENS_HEADER = b"routewise tokens 1\0"


def state_of(
    tokens: Sequence[int] | Sequence[bytes],
    bits: Sequence[int | None],
    statuses: Sequence[str],
) -> bytes:
    """Return the 16-byte XXH3-128 of a reply's tokens, compared bits and statuses.

    Parameters
    ----------
    tokens
        Token ids, or the bytes of each token where the route sends no ids (a route that sends
        nothing but text has one "token": its text). Ids and bytes never give the same state.
    bits
        The uint32 pattern of each logprob, None where there is none.
    statuses
        One word for each entry of ``bits`` (ok, null, missing, sentinel, nan, not_float32).

    What is hashed tells every two inputs apart: each part is preceded by its kind and its length,
    and a missing pattern is not the pattern 0. Raises ValueError where ``bits`` and ``statuses``
    are of two lengths, where a pattern does not fit in 32 bits, or where tokens mix ids and bytes.
    """
    if len(bits) != len(statuses):
        raise ValueError(f"{len(bits)} bit patterns with {len(statuses)} statuses")
    present = np.array([value is not None for value in bits], np.uint8)
    values = np.array([0 if value is None else value for value in bits], np.int64)
    if values.size and (values.min() < 0 or values.max() > 0xFFFFFFFF):
        raise ValueError("a bit pattern is no unsigned integer of 32 bits")
    parts = [
        _STATE_HEADER,
        _encoded_tokens(tokens),
        _length(len(bits)),
        present.tobytes(),
        values.astype("<u4").tobytes(),
        _encoded_bytes([status.encode() for status in statuses]),
    ]
    return xxhash.xxh3_128_digest(b"".join(parts))


def tokens_hash_of(tokens: Sequence[int] | Sequence[bytes]) -> bytes:
    """Return the 16-byte XXH3-128 of a reply's tokens alone: ids, or the bytes of each token.

    Raises ValueError where tokens mix ids and bytes.
    """
    return xxhash.xxh3_128_digest(_TOKENS_HEADER + _encoded_tokens(tokens))


def _encoded_tokens(tokens: Sequence[int] | Sequence[bytes]) -> bytes:
    if all(isinstance(token, bytes) for token in tokens):
        return b"b" + _encoded_bytes([token for token in tokens if isinstance(token, bytes)])
    ids = [token for token in tokens if not isinstance(token, bytes)]
    if len(ids) != len(tokens):
        raise ValueError("tokens are ids and bytes at once")
    return b"i" + _length(len(ids)) + np.array(ids, "<i8").tobytes()


def _encoded_bytes(values: Sequence[bytes]) -> bytes:
    lengths = np.array([len(value) for value in values], "<u8").tobytes()
    return _length(len(values)) + lengths + b"".join(values)


def _length(n: int) -> bytes:
    return n.to_bytes(8, "little")


# ------------------------------------------------------------------------------------- counts


@dataclass(frozen=True)
class StateCounts:
    """How many states a set of replies had.

    ``n_states`` is what was seen, a lower bound; ``chao1`` estimates all states, those that no
    reply showed too. ``counts`` are the replies per state, the largest first; ``n_once`` and
    ``n_twice`` the states that one and two replies had. ``modal_share`` is the share of replies
    in the most frequent state. Without replies the share and the estimate are None.
    """

    n_replies: int
    n_states: int
    modal_share: float | None
    chao1: float | None
    counts: tuple[int, ...]
    n_once: int
    n_twice: int


def count_states(states: Sequence[bytes]) -> StateCounts:
    """Count the distinct states among replies (``state`` of schema/replies, valid replies only).

    The estimate is the bias-corrected form of Chao's first estimator,
    S + f1 (f1 - 1) / (2 (f2 + 1)) with S states seen, f1 of them once and f2 twice: A. Chao,
    "Nonparametric estimation of the number of classes in a population", Scandinavian Journal of
    Statistics 11 (1984), 265-270; the corrected form also in N. Gotelli and R. Colwell,
    "Estimating species richness" (2011). Where all states were seen once the replies are too few,
    and the estimate too is a lower bound.
    """
    counts = tuple(sorted(Counter(states).values(), reverse=True))
    n_once, n_twice = counts.count(1), counts.count(2)
    if not counts:
        return StateCounts(0, 0, None, None, (), 0, 0)
    return StateCounts(
        n_replies=len(states),
        n_states=len(counts),
        modal_share=counts[0] / len(states),
        chao1=len(counts) + n_once * (n_once - 1) / (2 * (n_twice + 1)),
        counts=counts,
        n_once=n_once,
        n_twice=n_twice,
    )


# -------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class PairCounts:
    """How many pairs of replies were compared, and how many were equal.

    ``n_equal`` pairs have one state, ``n_same_tokens`` at least the same tokens. ``n_invalid``
    replies were left out. ``observable`` is the weakest of the replies', None where there are
    none.
    """

    n_pairs: int
    n_equal: int
    n_same_tokens: int
    n_invalid: int
    observable: str | None

    @property
    def equal_share(self) -> float | None:
        """Share of the pairs that are equal; None without pairs."""
        return self.n_equal / self.n_pairs if self.n_pairs else None


@dataclass(frozen=True)
class Spread:
    """How far apart any two of a set of replies to one request are.

    ``first_position`` is the first position (from 0) at which not all replies show the same token,
    bits and status, which is the earliest first difference of any pair; None where there is none.
    ``first_token_position`` is the same for the tokens alone. ``delta_max`` is the largest
    |logprob difference| of any two replies at a position where both have the same token after the
    same tokens, at ``delta_max_position``; None where no two replies have logprobs there.
    ``n_not_ok`` of ``n_positions`` positions of all replies have no logprob that counts. ``unit``
    says what a position is: token, or byte.
    """

    unit: str
    n_replies: int
    n_invalid: int
    n_positions: int
    n_not_ok: int
    first_position: int | None
    first_token_position: int | None
    delta_max: float | None
    delta_max_position: int | None


def count_pairs(rows: Rows) -> PairCounts:
    """Compare all pairs of the replies to one request, not only each with the first.

    Reads status, observable, state, tokens_hash, and prompt_index where it is there; the order of
    the rows does not matter. Raises ValueError where the rows are of more than one prompt.
    """
    valid, n_invalid = _valid(rows, ("state", "tokens_hash", "observable"))
    _check_one_prompt(valid)
    return PairCounts(
        n_pairs=_pairs(len(valid)),
        n_equal=sum(_pairs(n) for n in Counter(valid["state"]).values()),
        n_same_tokens=sum(_pairs(n) for n in Counter(valid["tokens_hash"]).values()),
        n_invalid=n_invalid,
        observable=weakest_observable(valid["observable"]),
    )


def count_cross_pairs(first: Rows, second: Rows) -> PairCounts:
    """Compare each reply of one set with each of another: two lives of a server, say.

    Reads the same columns as :func:`count_pairs`. Raises ValueError where the rows are of more
    than one prompt.
    """
    columns = ("state", "tokens_hash", "observable")
    (a, invalid_a), (b, invalid_b) = _valid(first, columns), _valid(second, columns)
    _check_one_prompt(a, b)

    def equal(column: str) -> int:
        there = Counter(b[column])
        return sum(n * there[value] for value, n in Counter(a[column]).items())

    return PairCounts(
        n_pairs=len(a) * len(b),
        n_equal=equal("state"),
        n_same_tokens=equal("tokens_hash"),
        n_invalid=invalid_a + invalid_b,
        observable=weakest_observable([*a["observable"], *b["observable"]]),
    )


def count_consecutive(rows: Rows) -> PairCounts:
    """Compare each copy with the copy of the same index in the next round of its block.

    Reads status, observable, state, tokens_hash, prompt_index, the columns of BLOCK, round and
    copy. Rounds r and r + 1 are consecutive; where one is missing or invalid there is no pair.
    Raises ValueError where a (prompt, block, round, copy) stands in two rows.
    """
    place = ["prompt_index", *BLOCK, "round", "copy"]
    valid, n_invalid = _valid(rows, ("state", "tokens_hash", "observable", *place))
    if valid.duplicated(place).any():
        raise ValueError("two replies of one prompt, block, round and copy")
    following = valid.assign(round=valid["round"] - 1)
    pairs = valid.merge(following, on=place, suffixes=("", "_next"))
    return PairCounts(
        n_pairs=len(pairs),
        n_equal=int((pairs["state"] == pairs["state_next"]).sum()),
        n_same_tokens=int((pairs["tokens_hash"] == pairs["tokens_hash_next"]).sum()),
        n_invalid=n_invalid,
        observable=weakest_observable([*pairs["observable"], *pairs["observable_next"]]),
    )


def spread_of(rows: Rows) -> Spread:
    """Return how far apart any two of the replies to one request are, position by position.

    Reads status, observable, text, token_ids, token_bytes, the logprob columns, state,
    tokens_hash, and prompt_index where it is there. Raises ValueError where the rows are of more
    than one prompt.
    """
    replies, n_invalid = _replies(rows)
    n, length = replies.tokens.shape
    alike = np.ones(length, np.bool_)
    alike_tokens = np.ones(length, np.bool_)
    if n:
        alike_tokens = (replies.tokens == replies.tokens[:1]).all(axis=0)
        alike = alike_tokens & (replies.bits == replies.bits[:1]).all(axis=0)
        alike &= (replies.statuses == replies.statuses[:1]).all(axis=0)
    delta, delta_position = _widest(replies)
    there = replies.tokens >= 0
    return Spread(
        unit=replies.unit,
        n_replies=n,
        n_invalid=n_invalid,
        n_positions=int(there.sum()),
        n_not_ok=int((there & ~replies.ok).sum()),
        first_position=_first(~alike),
        first_token_position=_first(~alike_tokens),
        delta_max=delta,
        delta_max_position=delta_position,
    )


def _widest(replies: _Replies) -> tuple[float | None, int | None]:
    """Return the largest |logprob difference| of two replies with the same tokens so far."""
    n, length = replies.tokens.shape
    history = np.zeros(n, np.int64)  # replies with the same tokens so far have the same number
    worst, worst_at = None, None
    for position in range(length):
        tokens = replies.tokens[:, position]
        keys = np.stack([history, tokens], axis=1)
        if (keys != keys[:1]).any():
            history = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        use = replies.ok[:, position]
        if np.count_nonzero(use) < 2:
            continue
        values, groups = replies.logprobs[use, position], history[use]
        order = np.argsort(groups, kind="stable")
        values, groups = values[order], groups[order]
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        sizes = np.diff(np.r_[starts, groups.size])
        if sizes.max() < 2:
            continue
        widths = np.maximum.reduceat(values, starts) - np.minimum.reduceat(values, starts)
        widest = float(widths[sizes >= 2].max())
        if worst is None or widest > worst:
            worst, worst_at = widest, position
    return worst, worst_at


@dataclass(frozen=True)
class FirstDifference:
    """Where two replies first differ.

    ``kind`` is token (another token, or one reply has ended: its token is None), or bits or status
    (of the logprob). Tokens are ids, or bytes where the replies have no ids. ``position`` counts
    from 0 in ``unit``: token, or byte where the route sends text alone. ``dlogp`` is |a - b| of
    the logprobs, only where the token is the same and both have one.
    """

    position: int
    unit: str
    kind: str
    token_a: int | bytes | None
    token_b: int | bytes | None
    dlogp: float | None


def first_difference(a: Row, b: Row) -> FirstDifference | None:
    """Return where two replies first differ, or None where they show no difference.

    ``a`` and ``b`` are rows of schema/replies, as mappings (``table.to_pylist()``) or of a
    DataFrame. Raises ValueError where one of them is invalid.
    """
    import pandas as pd

    replies, n_invalid = _replies(pd.DataFrame([_picked(a), _picked(b)]))
    if n_invalid:
        raise ValueError("an invalid reply is compared with nothing")
    tokens, bits, statuses = replies.tokens, replies.bits, replies.statuses
    token_differs = tokens[0] != tokens[1]
    bits_differ, status_differs = bits[0] != bits[1], statuses[0] != statuses[1]
    position = _first(token_differs | bits_differ | status_differs)
    if position is None:
        return None
    same = not token_differs[position]
    both = same and bool(replies.ok[:, position].all())
    values = replies.logprobs[:, position]
    kind = "token" if not same else "status" if status_differs[position] else "bits"
    return FirstDifference(
        position=position,
        unit=replies.unit,
        kind=kind,
        token_a=replies.token(0, position),
        token_b=replies.token(1, position),
        dlogp=abs(float(values[0]) - float(values[1])) if both else None,
    )


# ------------------------------------------------------------------------------- against solo


@dataclass(frozen=True)
class PrefixScore:
    """How the first ``n_tokens`` positions of replies keep the solo answer (None: all positions).

    A position counts where the solo answer or the reply has a token, and keeps the solo token
    where both have the same: a reply that ended early, or went on after the solo answer's end, does
    not keep it there. ``n_full`` of the replies were that long, as was the solo answer; the others
    bring fewer positions. ``n_identical`` replies have the solo tokens, bits and statuses in all
    of these positions. ``kept_share`` is None where there are no positions.
    """

    n_tokens: int | None
    n_replies: int
    n_full: int
    n_identical: int
    n_positions: int
    n_kept: int
    kept_share: float | None


@dataclass(frozen=True)
class SoloScore:
    """Replies scored against the solo answer to the same request.

    ``n_identical`` of ``n_replies`` have the solo state. ``delta_mean`` and ``delta_max`` are of
    |logprob difference| over the ``n_deltas`` common positions (all tokens so far equal, this one
    too) where both have a logprob that counts; ``n_not_ok`` common positions lack one. None where
    ``n_deltas`` is 0. ``divergences`` holds, per valid reply in the order of the rows, the first
    position whose token is not the solo token, None where there is none. ``unit`` says what a
    position is: token, or byte where the route sends text alone; ``prefixes`` is empty then.
    """

    unit: str
    n_replies: int
    n_invalid: int
    n_identical: int
    n_deltas: int
    n_not_ok: int
    delta_mean: float | None
    delta_max: float | None
    whole: PrefixScore
    prefixes: tuple[PrefixScore, ...]
    divergences: tuple[int | None, ...]
    observable: str | None

    @property
    def first_divergence(self) -> int | None:
        """The earliest position of divergence of any reply; None where none diverges."""
        return min((place for place in self.divergences if place is not None), default=None)


def score_against(solo: Row | Rows, others: Rows) -> SoloScore:
    """Score replies against the solo answer: identical N of M, distances, tokens kept.

    ``solo`` is one row (as a mapping, of a DataFrame, or as rows of which there is one). Both are
    of schema/replies and are read as by :func:`spread_of`. Raises ValueError where the solo answer
    is invalid, or not exactly one, or the rows are of more than one prompt.
    """
    import pandas as pd

    if isinstance(solo, (Mapping, pd.Series)):
        alone = pd.DataFrame([_picked(solo)])
    else:
        alone = _frame(solo)
    if len(alone) != 1 or alone["status"].iloc[0] != _OK:
        raise ValueError("there must be one solo answer, and a valid one")
    rows = _frame(others)
    replies, n_invalid = _replies(pd.concat([alone, rows], ignore_index=True))
    tokens = replies.tokens
    n = len(tokens) - 1
    there = (tokens[1:] >= 0) | (tokens[:1] >= 0)
    kept = (tokens[1:] == tokens[:1]) & there
    common = np.logical_and.accumulate(kept, axis=1)
    same = kept & (replies.bits[1:] == replies.bits[:1])
    same &= replies.statuses[1:] == replies.statuses[:1]
    counted = common & replies.ok[1:] & replies.ok[:1]
    deltas = np.abs(replies.logprobs[1:] - replies.logprobs[:1])[counted]
    lengths = (tokens >= 0).sum(axis=1)

    def prefix(n_tokens: int | None) -> PrefixScore:
        n_positions = int(there[:, :n_tokens].sum())
        n_kept = int(kept[:, :n_tokens].sum())
        long_enough = lengths >= (lengths[0] if n_tokens is None else n_tokens)
        identical = (same | ~there)[:, :n_tokens].all(axis=1)
        return PrefixScore(
            n_tokens=n_tokens,
            n_replies=n,
            n_full=int(long_enough[1:].sum()) if long_enough[0] else 0,
            n_identical=int(identical.sum()),
            n_positions=n_positions,
            n_kept=n_kept,
            kept_share=n_kept / n_positions if n_positions else None,
        )

    return SoloScore(
        unit=replies.unit,
        n_replies=n,
        n_invalid=n_invalid,
        n_identical=sum(state == replies.states[0] for state in replies.states[1:]),
        n_deltas=int(deltas.size),
        n_not_ok=int((common & ~counted).sum()),
        delta_mean=float(deltas.mean()) if deltas.size else None,
        delta_max=float(deltas.max()) if deltas.size else None,
        whole=prefix(None),
        prefixes=tuple(prefix(n) for n in PREFIX_LENGTHS if replies.unit == "token"),
        divergences=tuple(_first(row) for row in there & ~kept),
        observable=weakest_observable(replies.observables) if n else None,
    )


# ------------------------------------------------------------------------------ rows to arrays


@dataclass(frozen=True)
class _Replies:
    """Valid replies as arrays of shape (n replies, longest): -1 past the end of each.

    ``tokens`` are ids (``kind`` ids), places in ``pieces`` (``kind`` bytes), or bytes of the text
    (``kind`` text). ``bits`` is -1 where there is no pattern, ``logprobs`` NaN where ``ok``
    is not set, ``statuses`` the place of the word in any one order.
    """

    kind: str
    tokens: Integers
    pieces: list[bytes]
    bits: Integers
    statuses: Integers
    ok: Bools
    logprobs: npt.NDArray[np.float64]
    states: list[bytes]
    observables: list[str]

    @property
    def unit(self) -> str:
        """What a position is."""
        return "byte" if self.kind == "text" else "token"

    def token(self, reply: int, position: int) -> int | bytes | None:
        """Return a token as the route sent it, None past the end of the reply."""
        token = int(self.tokens[reply, position])
        if token < 0:
            return None
        if self.kind == "text":
            return bytes([token])
        return token if self.kind == "ids" else self.pieces[token]


def weakest_observable(observables: Iterable[str]) -> str | None:
    """Return the weakest of what replies let be compared; None without replies."""
    return max(observables, key=OBSERVABLES.index, default=None)


def _picked(row: Row) -> dict[str, Any]:
    names = (*_COMPARED, "prompt_index")
    return {name: row[name] for name in names if name in row}


def _frame(rows: Rows, columns: Sequence[str] = _COMPARED) -> pd.DataFrame:
    """Return these columns of rows, and ``prompt_index`` where it is there, as a DataFrame."""
    import pandas as pd

    there = rows.columns if isinstance(rows, pd.DataFrame) else rows.schema.names
    wanted = list(dict.fromkeys(["status", *columns]))
    if "prompt_index" in there and "prompt_index" not in wanted:
        wanted.append("prompt_index")
    frame: pd.DataFrame = (
        rows[wanted] if isinstance(rows, pd.DataFrame) else rows.select(wanted).to_pandas()
    )
    return frame


def _valid(rows: Rows, columns: Sequence[str]) -> tuple[pd.DataFrame, int]:
    frame = _frame(rows, columns)
    valid = frame[frame["status"] == _OK]
    return valid, len(frame) - len(valid)


def _check_one_prompt(*frames: pd.DataFrame) -> None:
    prompts = {
        int(prompt)
        for frame in frames
        if "prompt_index" in frame.columns
        for prompt in frame["prompt_index"].unique()
    }
    if len(prompts) > 1:
        raise ValueError(f"replies to {len(prompts)} prompts, wanted those to one")


def _replies(rows: Rows) -> tuple[_Replies, int]:
    valid, n_invalid = _valid(rows, _COMPARED)
    _check_one_prompt(valid)
    ids, pieces = list(valid["token_ids"]), list(valid["token_bytes"])
    vocabulary: dict[bytes, int] = {}
    if all(_is_list(value) for value in ids):
        kind, lists = "ids", [np.asarray(value, np.int64) for value in ids]
    elif all(_is_list(value) for value in pieces):
        # a token whose bytes the server does not tell has none
        kind, lists = "bytes", [_interned(value, vocabulary) for value in pieces]
    else:
        kind = "text"
        lists = [np.frombuffer(text, np.uint8).astype(np.int64) for text in valid["text"]]
    tokens = _padded(lists)
    shape = tokens.shape
    words: dict[str, int] = {}
    statuses = _padded(
        [
            np.array([words.setdefault(word, len(words)) for word in value], np.int64)
            for value in valid["logprob_status"]
        ],
        shape,
    )
    bits = _padded([_numbers(value, -1).astype(np.int64) for value in valid["logprob_bits"]], shape)
    logprobs = np.full(shape, np.nan)
    for row, value in enumerate(valid["logprobs"]):
        numbers = _numbers(value, np.nan)[: shape[1]]
        logprobs[row, : numbers.size] = numbers
    ok = (statuses == words.get(_OK, -2)) & np.isfinite(logprobs) & (tokens >= 0)
    return (
        _Replies(
            kind=kind,
            tokens=tokens,
            pieces=list(vocabulary),
            bits=bits,
            statuses=statuses,
            ok=ok,
            logprobs=np.where(ok, logprobs, np.nan),
            states=[bytes(state) for state in valid["state"]],
            observables=list(valid["observable"]),
        ),
        n_invalid,
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


def _interned(pieces: Iterable[bytes | None], vocabulary: dict[bytes, int]) -> Integers:
    return np.array(
        [vocabulary.setdefault(bytes(piece or b""), len(vocabulary)) for piece in pieces], np.int64
    )


def _numbers(values: Any, absent: float) -> npt.NDArray[np.float64]:
    """Return a list of numbers as float64 (exact for uint32), ``absent`` where there is none."""
    numbers = np.asarray(values, np.float64)  # None becomes NaN, as it already is in a DataFrame
    return np.where(np.isnan(numbers), absent, numbers)


def _padded(lists: Sequence[Integers], shape: tuple[int, ...] | None = None) -> Integers:
    """Return lists as rows of one array, -1 past their ends and cut at its width."""
    if shape is None:
        shape = (len(lists), max((values.size for values in lists), default=0))
    padded = np.full(shape, -1, np.int64)
    for row, values in enumerate(lists):
        values = values[: shape[1]]
        padded[row, : values.size] = values
    return padded


def _first(places: Bools) -> int | None:
    return int(places.argmax()) if places.any() else None


def _pairs(n: int) -> int:
    return n * (n - 1) // 2
