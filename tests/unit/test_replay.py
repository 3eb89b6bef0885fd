"""The replay of made engines: an exact one passes, and each fault is caught where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_engines import (
    CONTEXT,
    MICRO_BATCH,
    N_VOCAB,
    Call,
    FlipsABit,
    FlipsOnePosition,
    GivesANaN,
    GivesTheRowBefore,
    KeepsDrafts,
    KeepsOneDraft,
    LeaksNeighbours,
    MadeEngine,
    NaNEverywhereAt,
    Restless,
    ZeroSign,
)
from routewise.errors import RoutewiseError
from routewise.replay import (
    SHAPE_WIDTH_MAX,
    SHAPES,
    PlainRun,
    Plan,
    ReplayRun,
    plan_passes,
    prefill,
    prefill_passes,
    run_plain,
    run_replay,
    variant_width,
)

N_ASKED = 41  # no multiple of any width but 1
PROMPT = [5, 17, 3, 88, 41, 9, 2, 60, 33]
WIDTHS = ("w1", "w2", "w3", "w4", "w5", "w8", "w9", "w16")
VARIANTS = (*WIDTHS, *SHAPES)


def plan_of(variant: str, plain: PlainRun, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"n_neighbours": 7, "context": CONTEXT, "seed": 1, **changes}
    return plan_passes(variant, plain.prompt_ids, plain.token_ids, N_VOCAB, **settings)


def plain_of(context: MadeEngine, prompt: Sequence[int] = PROMPT, n: int = N_ASKED) -> PlainRun:
    return run_plain(context, list(prompt), n, micro_batch=MICRO_BATCH, top_k=5)


def replay_of(engine: type[MadeEngine], variant: str, **changes: Any) -> ReplayRun:
    plain = plain_of(engine())
    plan = plan_of(variant, plain, **changes)
    return run_replay(engine(), plain, plan, micro_batch=MICRO_BATCH, top_k=2)


def differing(run: ReplayRun) -> list[int]:
    return [row.step for row in run.rows if row.comparison.bits_equal is not True]


def last_passes(engine: MadeEngine, count: int) -> list[Call]:
    """Return the passes after the prefills, which all ask for every row."""
    passes = [call for call in engine.calls if len(call) == 4][-count:]
    assert all(all(wants) for _, _, _, wants in passes)
    return passes


# ------------------------------------------------------------------------------- the plain arm


def test_the_plain_arm_is_greedy_and_keeps_every_row() -> None:
    engine = MadeEngine()
    plain = plain_of(engine)
    assert plain.rows.shape == (N_ASKED + 1, N_VOCAB)
    assert len(plain.summaries) == N_ASKED + 1
    assert plain.token_ids == plain.rows[:-1].argmax(axis=1).tolist()
    # a prompt this short is prefilled one token a pass
    singles = [*PROMPT, *plain.token_ids]
    assert [call[0] for call in engine.calls] == [[token] for token in singles]
    assert [call[1] for call in engine.calls] == [
        [position] for position in range(len(PROMPT) + N_ASKED)
    ]
    # each row is what an engine that sees prompt and tokens gives: nothing is off by one
    again = MadeEngine()
    again.decode([*PROMPT, *plain.token_ids[:20]], range(len(PROMPT) + 20))
    np.testing.assert_array_equal(again.logits(len(PROMPT) + 19), plain.rows[20])


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(RoutewiseError, match="no tokens"):
        plain_of(MadeEngine(), [])


@pytest.mark.parametrize("length", [1, MICRO_BATCH - 1, MICRO_BATCH, MICRO_BATCH + 1, 100])
def test_prefill_asks_for_the_last_row_alone(length: int) -> None:
    engine = MadeEngine()
    ids = [i % N_VOCAB for i in range(length)]
    index = prefill(engine, ids, MICRO_BATCH, 3)
    calls = [call for call in engine.calls if len(call) == 4]
    assert [token for call in calls for token in call[0]] == ids
    assert [position for call in calls for position in call[1]] == list(range(length))
    assert {owner for call in calls for owner in call[2]} == {3}
    wants = [want for call in calls for want in call[3]]
    assert wants == [False] * (length - 1) + [True]
    assert index == len(calls[-1][0]) - 1
    assert [len(call[0]) for call in calls] == prefill_passes(length, MICRO_BATCH)


@pytest.mark.parametrize("micro_batch", [1, 8, 16, 17, 32, 512])
def test_no_prefill_pass_has_2_to_16_tokens(micro_batch: int) -> None:
    for length in range(1, 200):
        passes = prefill_passes(length, micro_batch)
        assert sum(passes) == length
        assert not {size for size in passes if 2 <= size <= 16}
        assert max(passes) <= max(micro_batch, 1)
    assert prefill_passes(40, 512) == [40]


# ---------------------------------------------------------------------------- an exact engine


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exact_engine_is_exact(variant: str) -> None:
    run = replay_of(MadeEngine, variant)
    assert run.prefill_equal
    assert differing(run) == []
    # every position once, in order: a row that is not there could not differ
    assert [row.step for row in run.rows] == list(range(1, N_ASKED + 1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17])
def test_an_exact_engine_is_exact_for_any_length(variant: str, n: int) -> None:
    plain = plain_of(MadeEngine(), PROMPT[:2], n)
    plan = plan_of(variant, plain)
    run = run_replay(MadeEngine(), plain, plan, micro_batch=MICRO_BATCH, top_k=2)
    assert [row.step for row in run.rows] == list(range(1, n + 1))
    assert differing(run) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_say_which_pass_they_were_in(variant: str) -> None:
    plain = plain_of(MadeEngine())
    plan = plan_of(variant, plain)
    engine = MadeEngine()
    run = run_replay(engine, plain, plan, micro_batch=MICRO_BATCH, top_k=2)
    passes = last_passes(engine, len(plan.widths))
    for row in run.rows:
        tokens, positions, owners, _ = passes[row.pass_index]
        assert row.pass_width == plan.widths[row.pass_index]
        assert row.pass_tokens == len(tokens)
        assert owners[row.batch_offset] == plan.sequence
        assert tokens[row.batch_offset] == plain.token_ids[row.step - 1]
        assert positions[row.batch_offset] == len(PROMPT) + row.step - 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_prefill_is_the_same_on_both_sides(variant: str) -> None:
    prompt = [i % N_VOCAB for i in range(80)]  # three passes
    first, second = MadeEngine(), MadeEngine()
    plain = plain_of(first, prompt)
    plan = plan_of(variant, plain)
    run_replay(second, plain, plan, micro_batch=MICRO_BATCH, top_k=2)
    for one, other in zip(first.calls[:3], second.calls[:3], strict=True):
        assert len(one) == len(other) == 4
        assert (one[0], one[1], one[3]) == (other[0], other[1], other[3])
        assert set(other[2]) == {plan.sequence}


def test_a_rollback_takes_exactly_the_drafts_back_out() -> None:
    plain = plain_of(MadeEngine())
    plan = plan_of("rollback", plain)
    engine = MadeEngine()
    run_replay(engine, plain, plan, micro_batch=MICRO_BATCH, top_k=2)
    ends = np.cumsum(plan.widths) + len(PROMPT)
    removed = [call for call in engine.calls if len(call) == 3]
    assert removed == [("remove", 0, int(end)) for end in ends]
    kept = [token for _, token in engine.cache[0]]
    assert kept == [*PROMPT, *plain.token_ids]


# ------------------------------------------------------------------------------ faulty engines

FOUR_OR_MORE = {"w4", "w5", "w8", "w9", "w16", "ragged", "rollback", "neighbours"}
CAUGHT_BY: dict[type[MadeEngine], set[str]] = {
    FlipsABit: FOUR_OR_MORE,
    GivesANaN: FOUR_OR_MORE,
    LeaksNeighbours: {"neighbours"},
    KeepsDrafts: {"rollback"},
    KeepsOneDraft: {"rollback"},
    GivesTheRowBefore: set(VARIANTS) - {"w1"},
    ZeroSign: set(VARIANTS) - {"w1"},
    NaNEverywhereAt: set(VARIANTS),
    Restless: set(VARIANTS),
}


@pytest.mark.parametrize("engine", CAUGHT_BY)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fault_is_caught_by_the_variants_that_meet_it_and_by_no_other(
    engine: type[MadeEngine], variant: str
) -> None:
    run = replay_of(engine, variant)
    assert bool(differing(run)) is (variant in CAUGHT_BY[engine])
    assert len(run.rows) == N_ASKED


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_flipped_bit_is_found_in_exactly_the_passes_that_have_it(variant: str) -> None:
    run = replay_of(FlipsABit, variant)
    assert differing(run) == [row.step for row in run.rows if row.pass_tokens >= 4]
    for row in run.rows:
        expected = (False, 1) if row.pass_tokens >= 4 else (True, 0)
        assert (row.comparison.bits_equal, row.comparison.n_differing) == expected


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "w1"])
def test_a_fault_at_one_position_is_found_there_alone(variant: str) -> None:
    assert FlipsOnePosition.position == len(PROMPT) + 20
    run = replay_of(FlipsOnePosition, variant)
    [row] = [row for row in run.rows if row.step == 21]
    assert differing(run) == ([21] if row.pass_tokens > 1 else [])
    if variant not in ("ragged", "rollback"):  # those may have decoded it alone
        assert differing(run) == [21]


def test_a_nan_is_invalid_and_not_merely_different() -> None:
    run = replay_of(GivesANaN, "w4")
    for row in run.rows:
        full = row.pass_tokens >= 4
        assert row.comparison.valid is not full
        assert row.comparison.bits_equal is (None if full else True)
        assert row.summary.n_nonfinite == int(full)


def test_a_nan_in_both_arms_is_never_equal() -> None:
    for variant in VARIANTS:
        assert NaNEverywhereAt.position == len(PROMPT) + 4
        run = replay_of(NaNEverywhereAt, variant)
        assert differing(run) == [5]
        assert [row.comparison.valid for row in run.rows if row.step == 5] == [False]


def test_a_zero_of_the_other_sign_is_reported_as_such() -> None:
    for row in replay_of(ZeroSign, "w16").rows[:32]:
        assert (row.comparison.n_differing, row.comparison.n_zero_sign) == (1, 1)
        assert row.comparison.logit_delta_max == 0.0


def test_drafts_left_behind_show_from_the_second_pass_on() -> None:
    run = replay_of(KeepsDrafts, "rollback")
    assert differing(run) == [row.step for row in run.rows if row.pass_index > 0]


def test_a_row_off_by_one_shows_at_every_place_but_the_first() -> None:
    run = replay_of(GivesTheRowBefore, "w8")
    assert differing(run) == [row.step for row in run.rows if row.batch_offset > 0]


def test_a_prefill_that_differs_is_said_so() -> None:
    assert not replay_of(Restless, "w1").prefill_equal
    assert replay_of(FlipsABit, "w16").prefill_equal


def test_a_replayed_row_that_differs_is_summarised_as_it_is() -> None:
    plain = plain_of(FlipsABit())
    plan = plan_of("w4", plain)
    run = run_replay(FlipsABit(), plain, plan, micro_batch=MICRO_BATCH, top_k=2)
    for row in run.rows:
        same = row.summary.digest == plain.summaries[row.step].digest
        assert same is (row.comparison.bits_equal is True)


# -------------------------------------------------------------------------------------- plans

IDS = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=60)
TOKENS = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=80)
SEEDS = st.integers(0, 2**40)


def planned(variant: str, ids: list[int], tokens: list[int], seed: int, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"n_neighbours": 7, "context": CONTEXT, **changes}
    return plan_passes(variant, ids, tokens, N_VOCAB, seed=seed, **settings)


@given(variant=st.sampled_from(VARIANTS), ids=IDS, tokens=TOKENS, seed=SEEDS)
def test_passes_hold_each_token_once_within_their_width(
    variant: str, ids: list[int], tokens: list[int], seed: int
) -> None:
    plan = planned(variant, ids, tokens, seed)
    assert sum(plan.widths) == len(tokens)
    assert len(plan.drafts) == len(plan.widths)
    assert min(plan.widths) >= 1
    sizes = [w + len(d) for w, d in zip(plan.widths, plan.drafts, strict=True)]
    assert max(sizes) <= SHAPE_WIDTH_MAX
    width = variant_width(variant)
    if width is not None:
        assert set(plan.widths[:-1]) <= {width}
        assert plan.widths[-1] <= width
    if variant != "rollback":
        assert not any(plan.drafts)
    if variant == "neighbours":
        assert set(plan.widths) == {1}


@given(ids=IDS, tokens=TOKENS, seed=SEEDS)
def test_drafts_are_wrong_from_their_first_token(
    ids: list[int], tokens: list[int], seed: int
) -> None:
    plan = planned("rollback", ids, tokens, seed)
    step = 0
    for width, draft in zip(plan.widths, plan.drafts, strict=True):
        step += width
        assert 1 <= len(draft) <= SHAPE_WIDTH_MAX // 2
        assert all(0 <= token < N_VOCAB for token in draft)
        if step < len(tokens):
            assert draft[0] != tokens[step]


def test_a_right_draft_is_made_wrong() -> None:
    """Of two tokens, half of all draws would be right; of such a plan none may be."""
    for seed in range(40):
        plan = plan_passes("rollback", [0], [1] * 40, 2, n_neighbours=0, context=CONTEXT, seed=seed)
        steps = np.cumsum(plan.widths)
        assert all(d[0] == 0 for d, s in zip(plan.drafts, steps, strict=True) if s < 40)


@pytest.mark.parametrize("spare", [0, 1, 3, 8])
def test_drafts_stay_within_the_context(spare: int) -> None:
    """A prompt that fills its context leaves its last drafts no room."""
    prompt, tokens = [1] * 30, [2] * 30
    context = len(prompt) + len(tokens) + spare
    for seed in range(30):
        plan = planned("rollback", prompt, tokens, seed, context=context)
        ends = len(prompt) + np.cumsum(plan.widths) + [len(d) for d in plan.drafts]
        assert max(ends) <= context
        assert any(plan.drafts)


def test_a_prompt_that_fills_the_context_is_replayed_to_its_end() -> None:
    prompt = [i % N_VOCAB for i in range(CONTEXT - N_ASKED)]
    plain = plain_of(MadeEngine(), prompt)
    for variant in VARIANTS:
        plan = plan_of(variant, plain)
        run = run_replay(MadeEngine(), plain, plan, micro_batch=MICRO_BATCH, top_k=2)
        assert differing(run) == []
        assert len(run.rows) == N_ASKED


@given(ids=IDS, tokens=TOKENS, seed=SEEDS, k=st.integers(1, 15), data=st.data())
def test_neighbours_fit_the_context_and_take_a_token_a_pass(
    ids: list[int], tokens: list[int], seed: int, k: int, data: st.DataObject
) -> None:
    context = data.draw(st.integers(len(ids) + len(tokens), CONTEXT))
    plan = planned("neighbours", ids, tokens, seed, n_neighbours=k, context=context)
    assert len(plan.neighbours) == k
    assert 0 <= plan.sequence <= k
    for neighbour in plan.neighbours:
        assert len(tokens) < len(neighbour) <= context
        assert all(0 <= token < N_VOCAB for token in neighbour)
    if context == CONTEXT:
        assert len(plan.neighbours[0]) > 256 + len(tokens)  # reaches into other KV blocks


@pytest.mark.parametrize("k", [1, 7, 15])
def test_neighbours_ride_in_rising_sequences_of_their_own(k: int) -> None:
    plain = plain_of(MadeEngine())
    seen = set()
    for seed in range(25):
        plan = plan_of("neighbours", plain, seed=seed, n_neighbours=k)
        seen.add(plan.sequence)
        engine = MadeEngine()
        run = run_replay(engine, plain, plan, micro_batch=MICRO_BATCH, top_k=2)
        passes = last_passes(engine, len(plan.widths))
        assert len(plan.widths) == N_ASKED
        for _, _, owners, _ in passes:
            assert owners == list(range(k + 1))
        assert {row.batch_offset for row in run.rows} == {plan.sequence}
        assert {row.pass_tokens for row in run.rows} == {k + 1}
        others = [s for s in range(k + 1) if s != plan.sequence]
        for sequence, tokens in zip(others, plan.neighbours, strict=True):
            assert [token for _, token in engine.cache[sequence]] == list(tokens)
    assert len(seen) > 1  # the probe is not always first


@given(variant=st.sampled_from(SHAPES), ids=IDS, tokens=TOKENS, seed=SEEDS)
def test_plans_are_reproducible(variant: str, ids: list[int], tokens: list[int], seed: int) -> None:
    arrays: list[npt.NDArray[np.int32]] = [np.array(ids, np.int32), np.array(tokens, np.int32)]
    plan = planned(variant, ids, tokens, seed)
    assert planned(variant, list(ids), list(tokens), seed) == plan
    assert planned(variant, arrays[0].tolist(), arrays[1].tolist(), seed) == plan


@pytest.mark.parametrize("variant", SHAPES)
def test_seed_prompt_and_shape_each_change_the_plan(variant: str) -> None:
    tokens = [i % N_VOCAB for i in range(60)]
    plan = planned(variant, PROMPT, tokens, 1)
    assert planned(variant, PROMPT, tokens, 2) != plan
    assert planned(variant, [*PROMPT, 1], tokens, 1) != plan
    assert planned(variant, PROMPT[::-1], tokens, 1) != plan


def test_a_plan_knows_nothing_of_other_prompts() -> None:
    """Planned alone, first or last, a prompt's passes are the same."""
    prompts = [[i, i + 1, i + 2] for i in range(5)]
    tokens = list(range(50))
    for variant in SHAPES:
        alone = planned(variant, prompts[3], tokens, 1)
        rising = [planned(variant, prompt, tokens, 1) for prompt in prompts]
        falling = [planned(variant, prompt, tokens, 1) for prompt in prompts[::-1]]
        assert rising[3] == falling[1] == alone
        assert len(set(rising)) == len(prompts)


def test_ragged_passes_have_many_widths() -> None:
    plan = planned("ragged", PROMPT, [0] * 400, 1)
    assert {1, 2, 3, 4, SHAPE_WIDTH_MAX} <= set(plan.widths)


@pytest.mark.parametrize(("variant", "width"), [("w1", 1), ("w16", 16), ("ragged", None)])
def test_variants_have_names(variant: str, width: int | None) -> None:
    assert variant_width(variant) == width


@pytest.mark.parametrize("variant", ["w0", "w", "w-1", "w2.0", "w02", "W2", "plain", "", "w2\n"])
def test_other_names_are_refused(variant: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        variant_width(variant)
