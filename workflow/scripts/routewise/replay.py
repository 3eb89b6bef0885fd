"""The replay: decode greedily one token a pass, then push the same tokens back in batches.

The plain arm keeps every token and every logits row. The replay arm starts from a fresh context
with the same prefill passes, decodes the recorded tokens several to a pass, and compares each row
with the plain arm's row of the same position. A variant says how the tokens are grouped:

``w<N>``
    N tokens a pass; the last pass of a prompt may be shorter.
``ragged``
    a seeded sequence of widths 1 to 16, as a speculative decoder makes with what it accepts.
``rollback``
    each pass also holds wrong draft tokens, which are removed from the cache afterwards.
``neighbours``
    one token a pass beside one token of each of k other sequences.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from routewise.compare import (
    Row,
    RowComparison,
    RowSummary,
    compare_rows,
    greedy_token,
    row_digest,
    summarise_row,
)
from routewise.errors import RoutewiseError

SHAPES = ("ragged", "rollback", "neighbours")
#: The widest pass that a shape makes; an exact engine promises 1 to 16 tokens.
SHAPE_WIDTH_MAX = 16
_DRAFT_STOP = 0.2  # chance that a draft ends after each token: a mean width of 5
_NEIGHBOUR_LONG = 290  # tokens: this neighbour reaches into other KV blocks than the probe


class Passes(Protocol):
    """What the replay needs of an engine's context."""

    n_vocab: int

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | None = None,
        wants: Sequence[bool] | None = None,
    ) -> int:
        """Run one pass; return its time in ns."""

    def logits(self, index: int) -> Row:
        """Return the row of token ``index`` of the last pass, valid until the next."""

    def remove(self, sequence: int, first: int, end: int = -1) -> None:
        """Remove positions [first, end) of a sequence from the cache."""


@dataclass(frozen=True)
class Plan:
    """How a variant groups the recorded tokens of one prompt.

    ``widths`` sum to the number of recorded tokens; ``drafts[i]`` are the wrong tokens appended to
    pass i; ``neighbours[j]`` are the tokens of another sequence: its prefill, then one a pass.
    """

    widths: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    neighbours: tuple[tuple[int, ...], ...] = ()
    sequence: int = 0


@dataclass
class PlainRun:
    """The plain arm of one prompt: n + 1 rows for n decoded tokens.

    ``rows`` is (n + 1, n_vocab) float32; row 0 is what the prefill ends in, row s what decoding
    ``token_ids[s - 1]`` alone gives. ``decode_s`` is the time of the n single-token steps, the
    harness included; ``engine_s`` that of the passes within them.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    rows: npt.NDArray[np.float32]
    summaries: list[RowSummary]
    decode_s: float
    engine_s: float


@dataclass
class ReplayedRow:
    """One replayed position and how its row compares with the plain arm's."""

    step: int
    pass_index: int
    pass_width: int
    pass_tokens: int
    batch_offset: int
    comparison: RowComparison
    summary: RowSummary


@dataclass
class ReplayRun:
    """The replay arm of one prompt; seconds spent in the engine's passes and in comparing."""

    prefill_equal: bool
    rows: list[ReplayedRow] = field(default_factory=list)
    engine_s: float = 0.0
    compare_s: float = 0.0


def variant_width(variant: str) -> int | None:
    """Return N of a variant ``wN``, None of a shape; ValueError for any other name."""
    if variant in SHAPES:
        return None
    match = re.fullmatch(r"w([1-9][0-9]*)", variant)
    if match is None:
        raise ValueError(f"{variant!r} is neither w<N> nor one of {', '.join(SHAPES)}")
    return int(match[1])


def plan_passes(
    variant: str,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    n_vocab: int,
    *,
    n_neighbours: int,
    context: int,
    seed: int,
) -> Plan:
    """Group the recorded ``token_ids`` of a prompt as ``variant`` says.

    Everything random comes from ``seed``, the variant and the prompt's own tokens, so that adding
    a prompt to a set changes no other prompt's passes.
    """
    n = len(token_ids)
    width = variant_width(variant)
    if width is not None:
        return _without_drafts(_cut(n, [width] * (n // width + 1)))
    shape = SHAPES.index(variant)
    random = np.random.default_rng([seed, shape, len(prompt_ids), *(int(t) for t in prompt_ids)])
    if variant == "ragged":
        return _without_drafts(_cut(n, _accepted(random, n, SHAPE_WIDTH_MAX)))
    if variant == "rollback":
        widths = _cut(n, _accepted(random, n, SHAPE_WIDTH_MAX // 2))
        drafts, step = [], 0
        for pass_width in widths:
            step += pass_width
            n_drafts = int(random.integers(1, SHAPE_WIDTH_MAX // 2 + 1))
            n_drafts = min(n_drafts, context - len(prompt_ids) - step)  # room left in the cache
            right = token_ids[step] if step < n else -1
            drafts.append(_wrong_tokens(random, n_drafts, right, n_vocab))
        return Plan(widths, tuple(drafts))
    neighbours = []
    pool = np.asarray([*prompt_ids, *token_ids], np.int64)
    for index in range(n_neighbours):
        limit = max(1, context - n)
        n_prefill = _NEIGHBOUR_LONG if index == 0 else int(random.integers(8, 64))
        neighbours.append(tuple(random.choice(pool, min(n_prefill, limit) + n).tolist()))
    sequence = int(random.integers(0, n_neighbours + 1))
    return Plan((1,) * n, ((),) * n, tuple(neighbours), sequence)


def prefill_passes(n: int, micro_batch: int) -> list[int]:
    """Return the sizes of the passes in which a prompt of ``n`` tokens is prefilled.

    Passes of ``micro_batch``, but a rest of 2 to 16 tokens goes one token a pass: an exact build
    gives such a pass other bits than stock, and the two would start from different caches.
    """
    if micro_batch <= SHAPE_WIDTH_MAX:
        return [1] * n
    whole, rest = divmod(n, micro_batch)
    return [micro_batch] * whole + ([rest] if rest > SHAPE_WIDTH_MAX else [1] * rest)


def prefill(context: Passes, ids: Sequence[int], micro_batch: int, sequence: int = 0) -> int:
    """Decode a prompt in :func:`prefill_passes`; return where its last row is in the last."""
    start = index = 0
    for size in prefill_passes(len(ids), micro_batch):
        end = start + size
        index = size - 1
        context.decode(
            ids[start:end],
            range(start, end),
            [sequence] * size,
            [position == len(ids) - 1 for position in range(start, end)],
        )
        start = end
    return index


def run_plain(
    context: Passes,
    prompt_ids: Sequence[int],
    n_asked: int,
    *,
    micro_batch: int,
    top_k: int,
    room: npt.NDArray[np.float32] | None = None,
) -> PlainRun:
    """Prefill, then decode ``n_asked`` tokens greedily, one a pass, in an empty context.

    The end-of-text token does not stop it: every prompt gives the number of rows that was asked.
    ``room``, at least (n_asked + 1, n_vocab) float32, is where the rows go: pages of an earlier
    run that are there already. Without it they are made.
    """
    if not prompt_ids:
        raise RoutewiseError("a prompt of no tokens", "give the prompt a text")
    if room is None:
        room = np.empty((n_asked + 1, context.n_vocab), np.float32)
    rows = room[: n_asked + 1]
    rows[0] = context.logits(prefill(context, prompt_ids, micro_batch))
    token_ids: list[int] = []
    engine_ns = 0
    start = time.perf_counter()
    for step in range(1, n_asked + 1):
        token_ids.append(greedy_token(rows[step - 1]))
        engine_ns += context.decode([token_ids[-1]], [len(prompt_ids) + step - 1])
        rows[step] = context.logits(0)
    # summarised together: between two passes, with cold caches, it takes four times as long
    summaries = [summarise_row(row, top_k) for row in rows]
    decode_s = time.perf_counter() - start
    return PlainRun(list(prompt_ids), token_ids, rows, summaries, decode_s, engine_ns / 1e9)


def run_replay(
    context: Passes, plain: PlainRun, plan: Plan, *, micro_batch: int, top_k: int
) -> ReplayRun:
    """Replay a plain run's tokens as ``plan`` groups them, in an empty context, and compare.

    The context must have room for ``1 + len(plan.neighbours)`` sequences. Raises RoutewiseError
    where a pass is larger than the micro-batch.
    """
    probe = plan.sequence
    last = prefill(context, plain.prompt_ids, micro_batch, probe)
    run = ReplayRun(row_digest(context.logits(last)) == plain.summaries[0].digest)
    others = [s for s in range(len(plan.neighbours) + 1) if s != probe]
    n_passes = len(plan.widths)
    for sequence, tokens in zip(others, plan.neighbours, strict=True):
        prefill(context, tokens[: len(tokens) - n_passes], micro_batch, sequence)

    engine_ns = 0
    for pass_index, step, width in _steps(plan.widths):
        first = len(plain.prompt_ids) + step
        ours = [*plain.token_ids[step : step + width], *plan.drafts[pass_index]]
        # sequences in rising order: the engine cuts any other order into passes of its own
        batch = [(probe, token, first + i) for i, token in enumerate(ours)]
        for sequence, tokens in zip(others, plan.neighbours, strict=True):
            position = len(tokens) - n_passes + pass_index
            batch.append((sequence, tokens[position], position))
        batch.sort(key=lambda entry: entry[0])
        offset = next(i for i, entry in enumerate(batch) if entry[0] == probe)
        engine_ns += context.decode(
            [token for _, token, _ in batch],
            [position for _, _, position in batch],
            [sequence for sequence, _, _ in batch],
        )
        start = time.perf_counter()
        for i in range(width):
            row = context.logits(offset + i)
            reference = step + i + 1
            summary = plain.summaries[reference]
            comparison = compare_rows(plain.rows[reference], row, plain_valid=summary.valid)
            if comparison.bits_equal is not True:
                summary = summarise_row(row, top_k)
            run.rows.append(
                ReplayedRow(
                    reference, pass_index, width, len(batch), offset + i, comparison, summary
                )
            )
        run.compare_s += time.perf_counter() - start
        if plan.drafts[pass_index]:
            context.remove(probe, first + width)
    run.engine_s = engine_ns / 1e9
    return run


def _steps(widths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    step = 0
    for index, width in enumerate(widths):
        yield index, step, width
        step += width


def _cut(n: int, widths: Sequence[int]) -> tuple[int, ...]:
    cut, left = [], n
    for width in widths:
        if left == 0:
            break
        cut.append(min(width, left))
        left -= cut[-1]
    return tuple(cut)


def _accepted(random: np.random.Generator, n: int, width_max: int) -> list[int]:
    return np.minimum(random.geometric(_DRAFT_STOP, n), width_max).tolist()


def _without_drafts(widths: tuple[int, ...]) -> Plan:
    return Plan(widths, ((),) * len(widths))


def _wrong_tokens(
    random: np.random.Generator, count: int, right: int, n_vocab: int
) -> tuple[int, ...]:
    tokens = random.integers(0, n_vocab, count)
    if count and tokens[0] == right:
        tokens[0] = (right + 1) % n_vocab
    return tuple(tokens.tolist())
