"""Compare two logits rows bit by bit, and say of one row what is kept of it.

Bits are compared as uint32: NaN payloads, and -0.0 against +0.0, are told apart. A row with a NaN
or an infinity is invalid and never equal to anything, itself included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

Row = npt.NDArray[np.float32]
_BLOCK = 64


@dataclass(frozen=True)
class RowSummary:
    """What is kept of one logits row.

    ``token_id`` is the lowest id among the largest logits; ``top_ids`` are ordered by logit, then
    by id; ``margin`` is the largest logit minus the second; ``digest`` is the XXH3-128 of the raw
    float32 bytes. Non-finite entries count as minus infinity in all of these but the digest.
    """

    token_id: int
    margin: float
    top_ids: npt.NDArray[np.int32]
    top_logits: Row
    n_nonfinite: int
    digest: bytes

    @property
    def valid(self) -> bool:
        """Whether every entry of the row is finite."""
        return self.n_nonfinite == 0


@dataclass(frozen=True)
class RowComparison:
    """How a replay row differs from a plain row. All but ``valid`` is None where not valid."""

    valid: bool
    bits_equal: bool | None
    n_differing: int | None
    n_zero_sign: int | None
    logit_delta_max: float | None
    logit_delta_max_id: int | None
    argmax_flip: bool | None
    kl_nats: float | None


_EQUAL = RowComparison(True, True, 0, 0, 0.0, 0, False, 0.0)
_INVALID = RowComparison(False, None, None, None, None, None, None, None)


def row_digest(row: Row) -> bytes:
    """Return the 16-byte XXH3-128 of a (n_vocab,) float32 row's raw bytes."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(row).view(np.uint8).data)


def top_k(row: Row, k: int) -> npt.NDArray[np.int32]:
    """Return the ids of the k largest entries of a finite row, by value, then by id.

    The k-th largest block maximum is a floor under the k-th largest entry, so only the entries at
    or above it are sorted: a fraction of the cost of a partition over the whole vocabulary.
    """
    k = min(k, row.size)
    n_blocks = row.size // _BLOCK
    if n_blocks < k:
        candidates = np.arange(row.size)
    else:
        # blocks of every n_blocks-th entry: their maxima are taken in long vector steps
        maxima = row[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks).max(axis=0)
        floor = np.partition(maxima, n_blocks - k)[n_blocks - k]
        candidates = np.flatnonzero(row >= floor)
    order = np.lexsort((candidates, -row[candidates]))[:k]
    return candidates[order].astype(np.int32)


def greedy_token(row: Row) -> int:
    """Return the lowest id among the largest finite logits of a row: its summary's ``token_id``."""
    token = int(row.argmax())  # a NaN counts as the largest here
    return token if math.isfinite(row[token]) else summarise_row(row, 1).token_id


def summarise_row(row: Row, k: int) -> RowSummary:
    """Summarise a (n_vocab,) float32 row, keeping its ``k`` largest logits."""
    good = np.isfinite(row)
    n_nonfinite = 0 if good.all() else int(row.size - np.count_nonzero(good))
    finite = np.where(good, row, np.float32(-np.inf)) if n_nonfinite else row
    ids = top_k(finite, max(k, 2))
    logits = finite[ids]
    margin = float(logits[0] - logits[1]) if np.isfinite(logits[:2]).all() else float("inf")
    return RowSummary(int(ids[0]), margin, ids[:k], logits[:k].copy(), n_nonfinite, row_digest(row))


def compare_rows(plain: Row, replay: Row, *, plain_valid: bool = True) -> RowComparison:
    """Compare two (n_vocab,) float32 rows.

    Equal rows cost one memory compare. Otherwise: differing entries counted by their bits, the
    largest |replay - plain| with its id, whether the argmax moved, and KL(plain || replay) in nats
    in float64. Raises ValueError where the lengths differ.
    """
    if plain.shape != replay.shape:
        raise ValueError(f"rows of {plain.shape} and {replay.shape} entries")
    if not plain_valid:
        return _INVALID
    plain_bits, replay_bits = plain.view(np.uint32), replay.view(np.uint32)
    if np.array_equal(plain_bits, replay_bits):
        return _EQUAL if np.isfinite(plain).all() else _INVALID
    if not (np.isfinite(plain).all() and np.isfinite(replay).all()):
        return _INVALID
    differs = plain_bits != replay_bits
    delta = np.abs(replay.astype(np.float64) - plain)
    worst = int(delta.argmax())
    n_differing = int(np.count_nonzero(differs))
    return RowComparison(
        valid=True,
        bits_equal=False,
        n_differing=n_differing,
        n_zero_sign=int(np.count_nonzero(differs & (plain == replay))),
        logit_delta_max=float(delta[worst]),
        logit_delta_max_id=worst,
        argmax_flip=bool(plain.argmax() != replay.argmax()),
        kl_nats=kl_divergence(plain, replay),
    )


def kl_divergence(plain: Row, replay: Row) -> float:
    """Return KL(softmax(plain) || softmax(replay)) in nats, in float64, never below 0."""
    log_p = log_softmax(plain)
    return max(0.0, float(np.dot(np.exp(log_p), log_p - log_softmax(replay))))


def log_softmax(row: Row) -> npt.NDArray[np.float64]:
    """Return the log of the softmax of a (n,) row, in float64."""
    shifted = row.astype(np.float64) - float(row.max())
    return shifted - np.log(np.exp(shifted).sum())
