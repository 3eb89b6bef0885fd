"""Engines made of a hash: an exact one, and some with one fault each that real engines have.

A made engine's logits are a pure function of the tokens that a token sees, so it is exact in any
batch. Each faulty one departs from that in one way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from routewise.compare import Row

N_VOCAB = 97
MICRO_BATCH = 32
CONTEXT = 512

Call = tuple[list[int], list[int], list[int], list[bool]]


class MadeEngine:
    """An exact engine: one context of it, with the passes that it was asked for."""

    def __init__(self, n_vocab: int = N_VOCAB) -> None:
        self.n_vocab = n_vocab
        self.cache: dict[int, list[tuple[int, int]]] = {}
        self.calls: list[Call | tuple[str, int, int]] = []
        self.last: list[tuple[int, int, int]] = []  # (sequence, position, hash of what is seen)
        self.wants: list[bool] = []

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | None = None,
        wants: Sequence[bool] | None = None,
    ) -> int:
        n = len(tokens)
        owners = [0] * n if sequences is None else list(sequences)
        self.wants = [True] * n if wants is None else list(wants)
        assert n == len(positions) == len(owners) == len(self.wants) > 0
        assert n <= MICRO_BATCH, "the engine would cut this pass in two"
        assert owners == sorted(owners), "the engine would cut this pass in two"
        self.calls.append((list(tokens), list(positions), owners, self.wants))
        for token, position, owner in zip(tokens, positions, owners, strict=True):
            assert 0 <= token < self.n_vocab
            self.place(owner, position, token)
        self.last = [
            (owner, position, self.seen(owner, position))
            for position, owner in zip(positions, owners, strict=True)
        ]
        return 1000

    def place(self, sequence: int, position: int, token: int) -> None:
        cache = self.cache.setdefault(sequence, [])
        assert position == len(cache), f"position {position} after {len(cache)} tokens"
        assert position < CONTEXT, "the context is full"
        cache.append((position, token))

    def seen(self, sequence: int, position: int) -> int:
        """Return a hash of all that the token at ``position`` sees."""
        visible = [entry for entry in self.cache[sequence] if entry[0] <= position]
        return xxhash.xxh3_64_intdigest(np.array(visible, np.int32).tobytes())

    def logits(self, index: int) -> Row:
        assert self.wants[index], "no logits were asked for there"
        return self.row(*self.last[index])

    def row(self, sequence: int, position: int, seen: int) -> Row:
        return np.random.default_rng(seen).normal(0, 3, self.n_vocab).astype(np.float32)

    def remove(self, sequence: int, first: int, end: int = -1) -> None:
        assert end < 0
        self.calls.append(("remove", sequence, first))
        self.cache[sequence] = [entry for entry in self.cache[sequence] if entry[0] < first]


class FlipsABit(MadeEngine):
    """Another kernel from four tokens a pass: the lowest mantissa bit of one logit."""

    def logits(self, index: int) -> Row:
        row = super().logits(index)
        if len(self.last) >= 4:
            row.view(np.uint32)[31] ^= 1
        return row


class FlipsOnePosition(MadeEngine):
    """One KV position alone, and only in a pass of several tokens."""

    position = 29

    def row(self, sequence: int, position: int, seen: int) -> Row:
        row = super().row(sequence, position, seen)
        if len(self.last) > 1 and position == self.position:
            row.view(np.uint32)[0] ^= 1 << 22
        return row


class LeaksNeighbours(MadeEngine):
    """What other sequences hold reaches into this one's attention."""

    def seen(self, sequence: int, position: int) -> int:
        own = super().seen(sequence, position)
        others = [entries[-1] for other, entries in self.cache.items() if other != sequence]
        if not others:
            return own
        return own ^ xxhash.xxh3_64_intdigest(np.array(others, np.int32).tobytes())


class KeepsDrafts(MadeEngine):
    """A rollback that removes nothing: the drafts stay visible."""

    def place(self, sequence: int, position: int, token: int) -> None:
        self.cache.setdefault(sequence, []).append((position, token))

    def remove(self, sequence: int, first: int, end: int = -1) -> None:
        pass


class KeepsOneDraft(KeepsDrafts):
    """A rollback that leaves the first of the drafts, where another follows."""

    def remove(self, sequence: int, first: int, end: int = -1) -> None:
        self.cache[sequence] = [e for e in self.cache[sequence] if e[0] <= first]


class GivesTheRowBefore(MadeEngine):
    """Logits of the token before, where a pass has several with logits."""

    def logits(self, index: int) -> Row:
        if all(self.wants) and index > 0:
            return super().logits(index - 1)
        return super().logits(index)


class GivesANaN(MadeEngine):
    """A NaN in one place from four tokens a pass."""

    def logits(self, index: int) -> Row:
        row = super().logits(index)
        if len(self.last) >= 4 and all(self.wants):
            row[7] = np.nan
        return row


class NaNEverywhereAt(MadeEngine):
    """The same NaN bits at one position in every arm: equal bits, and yet no number."""

    position = 13

    def row(self, sequence: int, position: int, seen: int) -> Row:
        row = super().row(sequence, position, seen)
        if position == self.position:
            row[7] = np.nan
        return row


class ZeroSign(MadeEngine):
    """-0.0 alone, +0.0 in company."""

    def logits(self, index: int) -> Row:
        row = super().logits(index)
        row[50] = 0.0 if len(self.last) > 1 and all(self.wants) else -0.0
        return row


class Restless(MadeEngine):
    """Another row in every context: nothing can be said of it."""

    made = 0

    def __init__(self, n_vocab: int = N_VOCAB) -> None:
        super().__init__(n_vocab)
        Restless.made += 1
        self.nonce = Restless.made

    def seen(self, sequence: int, position: int) -> int:
        return super().seen(sequence, position) ^ self.nonce
