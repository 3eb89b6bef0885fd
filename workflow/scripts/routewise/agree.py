"""How far two routes are apart: their replies to the same requests, token by token.

Replies are aligned by token id, or by the bytes of the tokens where a route sends no ids (its
tokens may end elsewhere). Two routes are compared in the same situation only at *common*
positions, up to and with the first token that differs: after it each continues its own text. A
logprob counts where its status is ok, and a distance of two only where both count and are of the
same token; a missing one is never 0. What is measured here is a distance, and no verdict.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from routewise.schema.agree import AGREE
from routewise.schema.file import table_of
from routewise.state import Rows

#: Published gates for two routes that should agree: largest and mean |logprob difference|. Drawn
#: as a scale beside what was measured; no verdict is made from them.
PUBLISHED_DLOGP_MAX = 0.06
PUBLISHED_DLOGP_MEAN = 0.005
PUBLISHED_GATES_SOURCE = "the `logprob_agree` page (max_abs_dlogp <= 0.06, mean 0.005)"

ENDED = "ended"
#: How replies are aligned.
MATCHES = ("ids", "text")

_OK = "ok"
_MISSING = "missing"
#: How a reply ends by itself; any other end is that no more was asked for.
_OWN_ENDS = ("eos", "word")
#: Below this a logprob stands for p = 0 and takes no part in a top list.
_LOGPROB_FLOOR = -1e30
#: Probabilities made of float32 logprobs do not add up closer than this.
_REST_FLOOR = 2.0**-24

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


# ------------------------------------------------------------------------------------ rows


def agree_rows(a: Rows, b: Rows, same_weights: bool, match: str) -> pa.Table:
    """Compare the replies of two routes to the same requests, as a table of schema/agree.

    Parameters
    ----------
    a, b
        Rows of schema/replies, one per (prompt_id, copy). Read are prompt_index, prompt_id,
        category, copy, status, n_asked, n_received, finish, text, the token, logprob and top list
        columns. Invalid replies, and those that only one route has, are left out.
    same_weights
        Whether both routes load the same weights: what ``arithmetic_only`` says in every row.
    match
        ``ids``: token i of one reply stands beside token i of the other. ``text``: two tokens
        stand beside each other where both start and end at the same byte of their replies. At the
        first byte that differs the tokens that start together and reach it do, and where none do,
        the two that hold it (without a KL: the routes were not at the same point). A token without
        bytes has no place. ``position`` then is that of the token in ``a``.

    A reply that ended by itself has ended where the other goes on: these rows have the status
    ``ended``, and the first of them differs. A reply that was cut because no more was asked for is
    compared as far as it goes. Where a route sends text alone, both replies are one token.

    Raises ValueError for an unknown ``match``, where a (prompt_id, copy) stands in two rows of one
    route, and where ``ids`` is asked for and a reply has none.
    """
    if match not in MATCHES:
        raise ValueError(f"match {match!r}: wanted one of {', '.join(MATCHES)}")
    replies_a, replies_b = _by_request(a, "a"), _by_request(b, "b")
    columns: dict[str, list[Any]] = {name: [] for name in AGREE.arrow.names}
    for request in sorted(replies_a.keys() & replies_b.keys()):
        row_a, row_b = replies_a[request], replies_b[request]
        if match == "ids" and (row_a["token_ids"] is None or row_b["token_ids"] is None):
            raise ValueError(f"a reply to {row_a['prompt_id']} has no token ids: match by text")
        compared = _compare(row_a, row_b, match)
        n = len(compared["position"])
        for name in _REQUEST:
            columns[name] += [row_a[name]] * n
        columns["arithmetic_only"] += [same_weights] * n
        for name, values in compared.items():
            columns[name] += values
    return table_of(AGREE, columns)


_REQUEST = ["prompt_index", "prompt_id", "category", "copy"]
_REPLY = ["status", "finish", "n_asked", "n_received", "text", "token_ids", "token_bytes"]
_LOGPROBS = ["logprobs", "logprob_bits", "logprob_status", "top_ids", "top_bytes", "top_logprobs"]
_READ = [*_REQUEST, *_REPLY, *_LOGPROBS]


def _by_request(rows: Rows, side: str) -> dict[tuple[int, str, int], dict[str, Any]]:
    if isinstance(rows, pd.DataFrame):
        records: list[dict[str, Any]] = [
            {str(key): value for key, value in record.items()}
            for record in rows[_READ].to_dict("records")
        ]
    else:
        records = rows.select(_READ).to_pylist()
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for record in records:
        if record["status"] != _OK:
            continue
        request = (int(record["prompt_index"]), record["prompt_id"], int(record["copy"]))
        if request in found:
            raise ValueError(
                f"route {side} has two replies to prompt {record['prompt_id']} as copy "
                f"{record['copy']}"
            )
        found[request] = record
    return found


@dataclass(frozen=True)
class _Stream:
    """One reply as arrays over its n tokens.

    ``keys`` are what tokens are matched by: ids, or numbers of byte strings that both streams
    share. ``starts`` and ``ends`` are byte offsets. ``tops`` are the top lists' keys and logprobs,
    shape (n, k), -1 and NaN past the end of each. ``ended`` is whether the reply ended by itself.
    """

    ids: list[int | None]
    pieces: list[bytes | None]
    keys: Integers
    starts: Integers
    ends: Integers
    text: bytes
    logprobs: Floats
    bits: Integers
    statuses: list[str]
    top_keys: Integers
    top_logprobs: Floats
    ended: bool

    def __len__(self) -> int:
        return len(self.keys)


def _compare(row_a: Mapping[str, Any], row_b: Mapping[str, Any], match: str) -> dict[str, Any]:
    """Return the columns of two replies that depend on their tokens."""
    numbers: dict[bytes, int] = {}
    alone = match == "text" and (row_a["token_bytes"] is None or row_b["token_bytes"] is None)
    if alone:
        a, b = _whole_text(row_a, numbers), _whole_text(row_b, numbers)
        a, b = _cut_text(a, b, numbers), _cut_text(b, a, numbers)
    else:
        a, b = _stream(row_a, match, numbers), _stream(row_b, match, numbers)
    if match == "ids":
        at_a, at_b, n_common, same_stream = _align_by_ids(a, b)
    elif alone:
        at_a = at_b = np.zeros(min(1, len(a.text) + len(b.text)), np.int64)
        n_common, same_stream = 1, a.text == b.text
    else:
        at_a, at_b, n_common, same_stream = _align_by_bytes(a, b)
    columns = _columns(a, b, at_a, at_b, n_common, same_stream)
    if match == "text":
        apart = _taken(a.starts, at_a, -1) != _taken(b.starts, at_b, -1)
        known = zip(apart.tolist(), columns["kl_nats"], strict=True)
        columns["kl_nats"] = [None if began_apart else kl for began_apart, kl in known]
    return columns


def _align_by_ids(a: _Stream, b: _Stream) -> tuple[Integers, Integers, int, bool]:
    """Return places in both streams (-1: ended), how many of them are common, and if all match."""
    n = min(len(a), len(b))
    shorter = a if len(a) < len(b) else b
    length = max(len(a), len(b)) if shorter.ended else n
    places = np.arange(length)
    at_a, at_b = np.where(places < len(a), places, -1), np.where(places < len(b), places, -1)
    differs = np.ones(length, np.bool_)
    differs[:n] = a.keys[:n] != b.keys[:n]
    if not differs.any():
        return at_a, at_b, length, True
    return at_a, at_b, int(differs.argmax()) + 1, False


def _align_by_bytes(a: _Stream, b: _Stream) -> tuple[Integers, Integers, int, bool]:
    """Do the same by bytes; places without a counterpart are left out."""
    shorter, longer = (a, b) if len(a.text) <= len(b.text) else (b, a)
    n = len(shorter.text)
    differs = np.frombuffer(a.text[:n], np.uint8) != np.frombuffer(b.text[:n], np.uint8)
    first: int | None = int(differs.argmax()) if differs.any() else None
    goes_on = shorter.ended and len(longer.text) > n
    if first is None and goes_on:
        first = n
    spans_b = {(s, e): i for i, (s, e) in _spans(b)}
    starts_b = {s: i for i, (s, _) in _spans(b)}
    pairs: list[tuple[int, int, int]] = []  # start, place in a, place in b
    for place, (start, end) in _spans(a):
        other = spans_b.get((start, end))
        if other is None and first is not None and start <= first and start in starts_b:
            # not the same span: of use only where the first difference lies in one of the two
            candidate = starts_b[start]
            if first < max(end, int(b.ends[candidate])):
                other = candidate
        if other is not None:
            pairs.append((start, place, other))
    if goes_on:
        for place, (start, _) in _spans(longer):
            if start >= n:
                pairs.append((start, -1, place) if longer is b else (start, place, -1))
    if first is not None and not any(_differs(a, b, pair) for pair in pairs if pair[0] <= first):
        # tokens that begin apart hold the difference
        place_a, place_b = _holder(a, first), _holder(b, first)
        start = a.starts[place_a] if place_a >= 0 else b.starts[place_b]
        pairs.append((int(start), place_a, place_b))
    pairs.sort()
    n_common = sum(first is None or start <= first for start, _, _ in pairs)
    at = np.array([pair[1:] for pair in pairs], np.int64).reshape(-1, 2)
    return at[:, 0], at[:, 1], n_common, first is None


def _differs(a: _Stream, b: _Stream, pair: tuple[int, int, int]) -> bool:
    _, place_a, place_b = pair
    return place_a < 0 or place_b < 0 or bool(a.keys[place_a] != b.keys[place_b])


def _holder(stream: _Stream, byte: int) -> int:
    """Return the place of the token that holds a byte, -1 past the end."""
    return int(np.searchsorted(stream.ends, byte, side="right")) if byte < len(stream.text) else -1


def _spans(stream: _Stream) -> Iterable[tuple[int, tuple[int, int]]]:
    """Yield place, start and end of the tokens that have bytes."""
    for place, (start, end) in enumerate(
        zip(stream.starts.tolist(), stream.ends.tolist(), strict=True)
    ):
        if end > start:
            yield place, (start, end)


def _columns(
    a: _Stream, b: _Stream, at_a: Integers, at_b: Integers, n_common: int, same_stream: bool
) -> dict[str, Any]:
    n = len(at_a)
    here_a, here_b = at_a >= 0, at_b >= 0
    common = np.arange(n) < n_common
    match = here_a & here_b & (_taken(a.keys, at_a, -1) == _taken(b.keys, at_b, -2))
    status_a = [a.statuses[i] if i >= 0 else ENDED for i in at_a]
    status_b = [b.statuses[i] if i >= 0 else ENDED for i in at_b]
    logprob_a, logprob_b = _taken(a.logprobs, at_a, np.nan), _taken(b.logprobs, at_b, np.nan)
    both = np.array([x == y == _OK for x, y in zip(status_a, status_b, strict=True)], np.bool_)
    both &= np.isfinite(logprob_a) & np.isfinite(logprob_b)
    bits_equal = _taken(a.bits, at_a, -1) == _taken(b.bits, at_b, -1)
    kl = np.full(n, np.nan)
    use = np.flatnonzero(common & here_a & here_b)
    kl[use] = approximate_kl(
        a.top_keys[at_a[use]],
        a.top_logprobs[at_a[use]],
        b.top_keys[at_b[use]],
        b.top_logprobs[at_b[use]],
    )
    # positions in the order of a, which go on where a has ended
    after = np.cumsum(~here_a) - 1
    return {
        "position": np.where(here_a, at_a, len(a) + after).tolist(),
        "common": common.tolist(),
        "match": match.tolist(),
        "same_stream": [same_stream] * n,
        "token_id_a": [a.ids[i] if i >= 0 else None for i in at_a],
        "token_id_b": [b.ids[i] if i >= 0 else None for i in at_b],
        "bytes_a": [a.pieces[i] if i >= 0 else None for i in at_a],
        "bytes_b": [b.pieces[i] if i >= 0 else None for i in at_b],
        "logprob_a": _known(logprob_a),
        "logprob_b": _known(logprob_b),
        "status_a": status_a,
        "status_b": status_b,
        "bits_equal": [bool(e) if k else None for e, k in zip(bits_equal, both, strict=True)],
        "dlogp": _known(np.where(common & match & both, np.abs(logprob_a - logprob_b), np.nan)),
        "kl_nats": _known(kl),
        "margin_a": _known(_taken(_margins(a.top_logprobs), at_a, np.nan)),
        "margin_b": _known(_taken(_margins(b.top_logprobs), at_b, np.nan)),
    }


def _taken(values: npt.NDArray[Any], places: Integers, absent: float) -> npt.NDArray[Any]:
    """Return values at places, ``absent`` where a place is -1."""
    taken = np.full(len(places), absent, values.dtype)
    taken[places >= 0] = values[places[places >= 0]]
    return taken


def _known(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


def approximate_kl(
    keys_a: Integers, logprobs_a: Floats, keys_b: Integers, logprobs_b: Floats
) -> Floats:
    """Return KL(a || b) in nats for n positions, as far as two top lists tell it.

    Keys and logprobs have the shapes (n, k_a) and (n, k_b), -1 and NaN where a list is shorter; no
    key stands twice in a list. The tokens that are in both lists are compared one by one; all
    other mass is one rest bucket on each side: sum of p ln(p / q) over those tokens and the rest.
    Putting outcomes together never makes a KL larger, so this is a lower bound of the whole
    distribution's, up to the rounding of float32 logprobs: a rest counts as no less than 2**-24.
    NaN where the lists have no token in common.
    """
    same = (keys_a[:, :, None] == keys_b[:, None, :]) & (keys_a >= 0)[:, :, None]
    log_p, log_q = np.nan_to_num(logprobs_a), np.nan_to_num(logprobs_b)
    p, q = np.exp(log_p)[:, :, None], np.exp(log_q)[:, None, :]
    terms = np.where(same, p * (log_p[:, :, None] - log_q[:, None, :]), 0.0)
    mass_p = np.where(same, p, 0.0).sum(axis=(1, 2))
    mass_q = np.where(same, q, 0.0).sum(axis=(1, 2))
    rest_p, rest_q = np.maximum(1 - mass_p, _REST_FLOOR), np.maximum(1 - mass_q, _REST_FLOOR)
    kl = terms.sum(axis=(1, 2)) + rest_p * np.log(rest_p / rest_q)
    return np.where(same.any(axis=(1, 2)), np.maximum(kl, 0.0), np.nan)


def _margins(top_logprobs: Floats) -> Floats:
    """Return top-1 minus top-2 of (n, k) logprobs, NaN where a list has less than two."""
    if top_logprobs.shape[1] < 2:
        return np.full(len(top_logprobs), np.nan)
    ordered = np.sort(np.where(np.isnan(top_logprobs), -np.inf, top_logprobs), axis=1)
    first, second = ordered[:, -1], ordered[:, -2]
    there = np.isfinite(second)
    return np.where(there, first - np.where(there, second, 0.0), np.nan)


# ------------------------------------------------------------------------- replies to streams


def _stream(row: Mapping[str, Any], match: str, numbers: dict[bytes, int]) -> _Stream:
    ids, pieces = row["token_ids"], row["token_bytes"]
    n = len(ids if match == "ids" else pieces)
    known = [bytes(piece or b"") for piece in pieces] if pieces is not None else [b""] * n
    ends = np.cumsum([len(piece) for piece in known], dtype=np.int64)
    keys = ids if match == "ids" else [numbers.setdefault(p, len(numbers)) for p in known]
    top_keys, top_logprobs = _tops(row, n, match, numbers)
    return _Stream(
        ids=[int(token) for token in ids] if ids is not None else [None] * n,
        pieces=list(known) if pieces is not None else [None] * n,
        keys=np.array(keys, np.int64),
        starts=ends - np.array([len(piece) for piece in known], np.int64),
        ends=ends,
        text=b"".join(known),
        logprobs=_lengthened(row["logprobs"], n, np.nan),
        bits=_lengthened(row["logprob_bits"], n, -1).astype(np.int64),
        statuses=[*row["logprob_status"], *[_MISSING] * n][:n],
        top_keys=top_keys,
        top_logprobs=top_logprobs,
        ended=_ended(row),
    )


def _whole_text(row: Mapping[str, Any], numbers: dict[bytes, int]) -> _Stream:
    pieces = row["token_bytes"]
    text = bytes(row["text"]) if pieces is None else b"".join(bytes(p or b"") for p in pieces)
    ended = _ended(row)
    return _one_token(text if ended else _whole_characters(text), numbers, ended)


def _whole_characters(text: bytes) -> bytes:
    """Return a cut text without the half character at its end, which servers send in two ways."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(text).rstrip("\ufffd").encode()


def _one_token(text: bytes, numbers: dict[bytes, int], ended: bool) -> _Stream:
    return _Stream(
        ids=[None],
        pieces=[text],
        keys=np.array([numbers.setdefault(text, len(numbers))], np.int64),
        starts=np.zeros(1, np.int64),
        ends=np.array([len(text)], np.int64),
        text=text,
        logprobs=np.full(1, np.nan),
        bits=np.full(1, -1, np.int64),
        statuses=[_MISSING],
        top_keys=np.full((1, 0), -1, np.int64),
        top_logprobs=np.full((1, 0), np.nan),
        ended=ended,
    )


def _cut_text(stream: _Stream, other: _Stream, numbers: dict[bytes, int]) -> _Stream:
    """Return a text cut where the other was cut because no more was asked for."""
    if other.ended or len(stream.text) <= len(other.text):
        return stream
    return _one_token(stream.text[: len(other.text)], numbers, stream.ended)


def _ended(row: Mapping[str, Any]) -> bool:
    """Say whether a reply ended by itself; a server that does not tell is judged by the count."""
    finish = row["finish"]
    if isinstance(finish, str):
        return finish in _OWN_ENDS
    return int(row["n_received"]) < int(row["n_asked"])


def _lengthened(values: Iterable[float | None], n: int, absent: float) -> Floats:
    """Return numbers as ``n`` float64 (exact for uint32), ``absent`` where there is none."""
    numbers = np.asarray(values, np.float64)[:n]  # None becomes NaN
    long = np.full(n, absent)
    long[: numbers.size] = np.where(np.isnan(numbers), absent, numbers)
    return long


def _tops(
    row: Mapping[str, Any], n: int, match: str, numbers: dict[bytes, int]
) -> tuple[Integers, Floats]:
    """Return the top lists' keys and logprobs, shape (n, longest list)."""
    names, values = row["top_ids" if match == "ids" else "top_bytes"], row["top_logprobs"]
    if names is None or values is None:
        return np.full((n, 0), -1, np.int64), np.full((n, 0), np.nan)
    lists = [
        _top(keys, logprobs, numbers)
        for keys, logprobs in zip(list(names)[:n], list(values)[:n], strict=True)
    ]
    longest = max((len(entries) for entries in lists), default=0)
    top_keys, top_logprobs = np.full((n, longest), -1, np.int64), np.full((n, longest), np.nan)
    for place, entries in enumerate(lists):
        top_keys[place, : len(entries)] = list(entries)
        top_logprobs[place, : len(entries)] = list(entries.values())
    return top_keys, top_logprobs


def _top(
    keys: Sequence[Any] | None, logprobs: Sequence[float | None] | None, numbers: dict[bytes, int]
) -> dict[int, float]:
    """Return one top list; entries that stand for p = 0 are left out, equal bytes put together."""
    entries: dict[int, float] = {}
    if keys is None or logprobs is None:
        return entries
    for key, logprob in zip(keys, logprobs, strict=True):
        if key is None or logprob is None or not logprob > _LOGPROB_FLOOR:
            continue
        number = numbers.setdefault(key, len(numbers)) if isinstance(key, bytes) else int(key)
        known = entries.get(number)
        entries[number] = float(logprob if known is None else np.logaddexp(known, logprob))
    return entries


# ------------------------------------------------------------------------------------ summary


@dataclass(frozen=True)
class Divergence:
    """Where the replies to one request first differ, and how sure each route was there.

    Margins are top-1 minus top-2 logprob, None without a top list of two. A token is None where
    that reply has ended.
    """

    prompt_id: str
    copy: int
    position: int
    token_id_a: int | None
    token_id_b: int | None
    bytes_a: bytes | None
    bytes_b: bytes | None
    margin_a: float | None
    margin_b: float | None


@dataclass(frozen=True)
class Worst:
    """Where the largest |logprob difference| was."""

    prompt_id: str
    copy: int
    position: int
    dlogp: float


@dataclass(frozen=True)
class AgreeScore:
    """How far two routes are apart, over a set of replies.

    ``n_positions`` are aligned positions, ``n_match`` of them with the same token. Of the
    ``n_common`` common positions ``n_match_common`` have the same token, and ``n_logprobs`` have
    logprobs on both sides that count; ``n_exact`` of these have the same token and bits. Distances
    are over ``n_dlogp`` common positions with the same token and both logprobs, the 99th percentile
    interpolated linearly; KLs over the ``n_kl`` common positions where top lists tell one. Shares
    and distances are None where their n is 0. ``n_saturated_a`` and ``_b`` common positions have a
    logprob of exactly 0 (p near 1), ``n_saturated_both`` on both sides: a distance of 0 says little
    there. ``statuses_a`` and ``_b`` count all positions by the status of their logprob.
    """

    n_prompts: int
    n_replies: int
    n_same_stream: int
    n_positions: int
    n_match: int
    match_share: float | None
    n_common: int
    n_match_common: int
    match_share_common: float | None
    n_logprobs: int
    n_exact: int
    exact_share: float | None
    n_dlogp: int
    dlogp_max: float | None
    dlogp_mean: float | None
    dlogp_median: float | None
    dlogp_p99: float | None
    worst: Worst | None
    n_kl: int
    kl_mean_nats: float | None
    kl_max_nats: float | None
    n_saturated_a: int
    n_saturated_b: int
    n_saturated_both: int
    statuses_a: Mapping[str, int]
    statuses_b: Mapping[str, int]


@dataclass(frozen=True)
class AgreeSummary:
    """Two routes over all replies, and over those where both choose the same stream.

    ``divergences`` holds one entry per reply pair that is not the same stream, in the order of
    prompt and copy. ``arithmetic_only`` is None without rows.
    """

    all_replies: AgreeScore
    same_stream: AgreeScore
    divergences: tuple[Divergence, ...]
    arithmetic_only: bool | None


def agree_summary(rows: Rows) -> AgreeSummary:
    """Summarise rows of schema/agree of one pair of routes (one cell's rows)."""
    frame: pd.DataFrame = rows if isinstance(rows, pd.DataFrame) else rows.to_pandas()
    return AgreeSummary(
        all_replies=_score(frame),
        same_stream=_score(frame[frame["same_stream"].astype(bool)]),
        divergences=_divergences(frame[~frame["same_stream"].astype(bool)]),
        arithmetic_only=bool(frame["arithmetic_only"].all()) if len(frame) else None,
    )


def _score(frame: pd.DataFrame) -> AgreeScore:
    common = frame[frame["common"].astype(bool)]
    match = frame["match"].astype(bool)
    match_common = common["match"].astype(bool)
    compared = common["bits_equal"].notna()
    exact = compared & match_common & common["bits_equal"].eq(True)
    dlogp = common["dlogp"].dropna().astype(float)
    kl = common["kl_nats"].dropna().astype(float)
    saturated_a, saturated_b = common["logprob_a"].eq(0), common["logprob_b"].eq(0)
    replies = frame.drop_duplicates(["prompt_id", "copy"])
    return AgreeScore(
        n_prompts=int(frame["prompt_id"].nunique()),
        n_replies=len(replies),
        n_same_stream=int(replies["same_stream"].astype(bool).sum()),
        n_positions=len(frame),
        n_match=int(match.sum()),
        match_share=_share(int(match.sum()), len(frame)),
        n_common=len(common),
        n_match_common=int(match_common.sum()),
        match_share_common=_share(int(match_common.sum()), len(common)),
        n_logprobs=int(compared.sum()),
        n_exact=int(exact.sum()),
        exact_share=_share(int(exact.sum()), int(compared.sum())),
        n_dlogp=len(dlogp),
        dlogp_max=float(dlogp.max()) if len(dlogp) else None,
        dlogp_mean=float(dlogp.mean()) if len(dlogp) else None,
        dlogp_median=float(dlogp.median()) if len(dlogp) else None,
        dlogp_p99=float(np.percentile(dlogp.to_numpy(), 99)) if len(dlogp) else None,
        worst=_worst(common, dlogp),
        n_kl=len(kl),
        kl_mean_nats=float(kl.mean()) if len(kl) else None,
        kl_max_nats=float(kl.max()) if len(kl) else None,
        n_saturated_a=int(saturated_a.sum()),
        n_saturated_b=int(saturated_b.sum()),
        n_saturated_both=int((saturated_a & saturated_b).sum()),
        statuses_a=dict(sorted(Counter(frame["status_a"]).items())),
        statuses_b=dict(sorted(Counter(frame["status_b"]).items())),
    )


def _share(n: int, of: int) -> float | None:
    return n / of if of else None


def _worst(common: pd.DataFrame, dlogp: pd.Series) -> Worst | None:
    if not len(dlogp):
        return None
    place = int(dlogp.to_numpy().argmax())
    row = common[common["dlogp"].notna()].iloc[place]
    return Worst(str(row["prompt_id"]), int(row["copy"]), int(row["position"]), float(row["dlogp"]))


def _divergences(frame: pd.DataFrame) -> tuple[Divergence, ...]:
    differing = frame[frame["common"].astype(bool) & ~frame["match"].astype(bool)]
    return tuple(
        Divergence(
            prompt_id=str(row["prompt_id"]),
            copy=int(row["copy"]),
            position=int(row["position"]),
            token_id_a=_whole(row["token_id_a"]),
            token_id_b=_whole(row["token_id_b"]),
            bytes_a=row["bytes_a"],
            bytes_b=row["bytes_b"],
            margin_a=_number(row["margin_a"]),
            margin_b=_number(row["margin_b"]),
        )
        for row in differing.sort_values(["prompt_index", "copy"]).to_dict("records")
    )


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
