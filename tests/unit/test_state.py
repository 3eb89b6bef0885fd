"""States told apart and counted, pairs compared, replies scored against solo."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import made_replies as made
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routewise.state import (
    PREFIX_LENGTHS,
    count_consecutive,
    count_cross_pairs,
    count_pairs,
    count_states,
    first_difference,
    score_against,
    spread_of,
    state_of,
    tokens_hash_of,
    weakest_observable,
)

SEEDS = st.integers(0, 999)
SOLO = made.make_answer(1, 24)
#: Six answers to one request, no two of one state.
VARIANTS = [
    SOLO,
    made.shifted(SOLO, 3, -0.125),
    made.diverged(SOLO, 5),
    made.diverged(SOLO, 20, seed=7),
    made.cut(SOLO, 10),
    made.with_status(SOLO, 8, "null"),
]


def state(answer: made.Answer) -> bytes:
    assert answer.ids is not None
    return state_of(answer.ids, answer.bits, answer.statuses)


def table(rows: list[made.Row], form: str = "table") -> Any:
    made_table = made.replies_table(rows)
    return made_table if form == "table" else made_table.to_pandas()


both_forms = pytest.mark.parametrize("form", ["table", "frame"])


# --------------------------------------------------------------------------------------- one state


@given(seed=SEEDS, n=st.integers(1, 40), place=st.integers(0, 10**6), bit=st.integers(0, 31))
def test_one_flipped_bit_anywhere_is_another_state(seed: int, n: int, place: int, bit: int) -> None:
    answer = made.make_answer(seed, n)
    assert answer.ids is not None
    bits = list(answer.bits)
    value = bits[place % n]
    assert value is not None
    bits[place % n] = value ^ (1 << bit)
    assert state_of(answer.ids, bits, answer.statuses) != state(answer)
    # the tokens are the same, and the same again is the same state
    assert state_of(list(answer.ids), list(answer.bits), list(answer.statuses)) == state(answer)


def test_every_bit_of_every_place_of_a_reply_is_found() -> None:
    answer = made.make_answer(3, 12)
    states = {state(answer)}
    for place in range(12):
        for bit in range(32):
            states.add(state(made.flipped_bit(answer, place, bit)))
    assert len(states) == 1 + 12 * 32


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=30), data=st.data())
def test_swapped_tokens_are_another_state(tokens: list[int], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(tokens) - 1))
    j = data.draw(st.integers(0, len(tokens) - 1))
    swapped = list(tokens)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    bits, statuses = [0] * len(tokens), ["ok"] * len(tokens)
    same = swapped == tokens
    assert (state_of(swapped, bits, statuses) == state_of(tokens, bits, statuses)) is same
    assert (tokens_hash_of(swapped) == tokens_hash_of(tokens)) is same


def test_ways_of_having_no_logprob_are_told_apart() -> None:
    """Null, missing, the sentinel for p = 0, NaN, no float32, and a true 0 are six things."""
    ways = [made.with_status(SOLO, 4, way) for way in ("null", "missing", "sentinel", "nan")]
    ways.append(made.with_status(SOLO, 4, "not_float32"))
    zero = made.flipped_bit(SOLO, 4, 0)
    ways.append(replace(zero, bits=(*zero.bits[:4], 0, *zero.bits[5:])))
    assert len({state(answer) for answer in [SOLO, *ways]}) == 7
    assert len({tokens_hash_of(a.ids) for a in ways if a.ids is not None}) == 1


def test_a_pattern_that_is_absent_is_not_the_pattern_0() -> None:
    assert state_of([1], [None], ["ok"]) != state_of([1], [0], ["ok"])
    assert state_of([1], [0x7FC00000], ["nan"]) != state_of([1], [0x7FC00001], ["nan"])
    assert state_of([1], [0x80000000], ["ok"]) != state_of([1], [0], ["ok"])  # -0.0


PARTS = st.lists(st.binary(max_size=6), max_size=6)


@given(a=PARTS, b=PARTS)
def test_bytes_cut_elsewhere_are_another_state(a: list[bytes], b: list[bytes]) -> None:
    """The encoding is unambiguous: only equal lists give equal hashes."""
    assert (tokens_hash_of(a) == tokens_hash_of(b)) is (a == b)
    assert (state_of(a, [], []) == state_of(b, [], [])) is (a == b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([b"ab", b"c"], [b"a", b"bc"]),
        ([b"abc"], [b"abc", b""]),
        ([1, 2], [b"\x01", b"\x02"]),
        ([0, 0], [b"", b""]),
        ([1], [b"\x01\0\0\0\0\0\0\0"]),
    ],
)
def test_what_looks_alike_in_bytes_is_told_apart(a: list[Any], b: list[Any]) -> None:
    assert tokens_hash_of(a) != tokens_hash_of(b)
    assert state_of(a, [None], ["missing"]) != state_of(b, [None], ["missing"])


def test_a_status_cannot_run_into_the_next() -> None:
    assert state_of([1], [None] * 2, ["a", "bc"]) != state_of([1], [None] * 2, ["ab", "c"])


@pytest.mark.parametrize(
    ("tokens", "bits", "statuses"),
    [
        ([1], [1, 2], ["ok"]),
        ([1], [2**32], ["ok"]),
        ([1], [-1], ["ok"]),
        ([1, b"a"], [1, 2], ["ok", "ok"]),
    ],
)
def test_what_is_no_reply_has_no_state(tokens: Any, bits: Any, statuses: Any) -> None:
    with pytest.raises(ValueError, match=r"status|bits|ids"):
        state_of(tokens, bits, statuses)


# ------------------------------------------------------------------------------------ counting


def letters(text: str) -> list[bytes]:
    return [letter.encode() * 16 for letter in text]


@pytest.mark.parametrize(
    ("seen", "n_states", "modal_share", "chao1"),
    [
        ("aaaa", 1, 1.0, 1.0),
        ("aaab", 2, 0.75, 2.0),  # 2 + 1*0 / (2*1)
        ("aabbc", 3, 0.4, 3.0),  # 3 + 1*0 / (2*3)
        ("aaabcd", 4, 0.5, 7.0),  # 4 + 3*2 / (2*1)
        ("aaabbcde", 5, 0.375, 6.5),  # 5 + 3*2 / (2*2)
        ("abcd", 4, 0.25, 10.0),  # 4 + 4*3 / (2*1)
        ("aabbccdefgh", 8, 2 / 11, 10.5),  # 8 + 5*4 / (2*4)
    ],
)
def test_states_counted_by_hand(seen: str, n_states: int, modal_share: float, chao1: float) -> None:
    counts = count_states(letters(seen))
    assert (counts.n_replies, counts.n_states) == (len(seen), n_states)
    assert counts.modal_share == pytest.approx(modal_share)
    assert counts.chao1 == pytest.approx(chao1)
    assert sum(counts.counts) == len(seen)


def test_no_replies_have_no_share_and_no_estimate() -> None:
    counts = count_states([])
    assert (counts.n_replies, counts.n_states, counts.modal_share, counts.chao1) == (
        0,
        0,
        None,
        None,
    )


@given(seen=st.text("abcdefgh", max_size=40), seed=SEEDS)
def test_the_order_of_replies_does_not_matter_to_counts(seen: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(seen))
    counts = count_states(letters(seen))
    assert count_states([letters(seen)[i] for i in order]) == counts
    if seen:
        assert counts.chao1 is not None
        assert counts.chao1 >= counts.n_states


def test_the_estimate_is_near_the_truth_where_the_bound_is_not() -> None:
    """40 equally frequent states, 40 draws: a lower bound sees 25, the estimate is unbiased."""
    random = np.random.default_rng(5)
    seen, estimated = [], []
    for _ in range(400):
        counts = count_states([bytes([value]) for value in random.integers(0, 40, 40)])
        assert counts.chao1 is not None
        seen.append(counts.n_states)
        estimated.append(counts.chao1)
    expected = 40 * (1 - (1 - 1 / 40) ** 40)
    assert np.mean(seen) == pytest.approx(expected, abs=0.5)
    assert np.mean(seen) < 27
    assert np.mean(estimated) == pytest.approx(40, abs=3)


def test_the_estimate_of_unequal_states_stays_a_lower_bound() -> None:
    random = np.random.default_rng(6)
    weights = np.arange(1, 61, dtype=float) ** -1.5
    draws = random.choice(60, (300, 50), p=weights / weights.sum())
    counts = [count_states([bytes([value]) for value in draw]) for draw in draws]
    estimates = [c.chao1 for c in counts if c.chao1 is not None]
    assert np.mean([c.n_states for c in counts]) < np.mean(estimates) < 60


# --------------------------------------------------------------------------------------- pairs


@settings(max_examples=50)
@given(picks=st.lists(st.integers(0, len(VARIANTS) - 1), max_size=12), seed=SEEDS)
def test_all_pairs_are_counted_whatever_the_order(picks: list[int], seed: int) -> None:
    rows = [made.make_row(VARIANTS[pick], round=i) for i, pick in enumerate(picks)]
    by_hand = [
        (a["state"] == b["state"], a["tokens_hash"] == b["tokens_hash"])
        for a, b in combinations(rows, 2)
    ]
    counts = count_pairs(table(rows))
    assert counts.n_pairs == len(by_hand)
    assert counts.n_equal == sum(equal for equal, _ in by_hand)
    assert counts.n_same_tokens == sum(same for _, same in by_hand)
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = [rows[i] for i in order]
    assert count_pairs(table(shuffled)) == counts
    assert spread_of(table(shuffled)) == spread_of(table(rows))


def test_a_pair_that_is_not_with_the_first_is_compared_too() -> None:
    """b = c, though neither is the first: comparing with the first alone would see no pair."""
    rows = [made.make_row(VARIANTS[pick], round=i) for i, pick in enumerate([0, 1, 1])]
    counts = count_pairs(table(rows))
    assert (counts.n_equal, counts.n_pairs, counts.equal_share) == (1, 3, pytest.approx(1 / 3))


@both_forms
def test_an_invalid_reply_is_no_evidence(form: str) -> None:
    rows = [made.make_row(SOLO), made.invalid_row("died", round=1), made.make_row(SOLO, round=2)]
    counts = count_pairs(table(rows, form))
    assert (counts.n_pairs, counts.n_equal, counts.n_invalid) == (1, 1, 1)
    # two invalid replies look alike, and are no pair
    assert count_pairs(table([made.invalid_row("a"), made.invalid_row("a")])).n_pairs == 0
    score = score_against(made.make_row(SOLO), table(rows, form))
    assert (score.n_replies, score.n_invalid, score.n_identical) == (2, 1, 2)


def test_a_claim_is_no_stronger_than_its_weakest_reply() -> None:
    rows = [made.make_row(SOLO), made.make_row(made.without_logprobs(SOLO))]
    assert count_pairs(table(rows)).observable == "token-ids"
    assert weakest_observable(["token-ids", "text", "chosen-logprob"]) == "text"
    assert weakest_observable([]) is None


def test_pairs_across_two_lives() -> None:
    first = [made.make_row(VARIANTS[pick], round=i) for i, pick in enumerate([0, 0, 1])]
    second = [made.make_row(VARIANTS[pick], round=i, life=1) for i, pick in enumerate([0, 1])]
    counts = count_cross_pairs(table(first), table(second))
    assert (counts.n_pairs, counts.n_equal, counts.n_same_tokens) == (6, 3, 6)


@pytest.mark.parametrize("function", [count_pairs, spread_of])
def test_replies_to_two_prompts_are_no_pairs(function: Any) -> None:
    rows = [made.make_row(SOLO), made.make_row(SOLO, prompt_index=1)]
    with pytest.raises(ValueError, match="2 prompts"):
        function(table(rows))


@both_forms
@settings(max_examples=30)
@given(picks=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=6))
def test_consecutive_rounds_are_compared_copy_by_copy(form: str, picks: list[list[int]]) -> None:
    rows = made.copies_block([[VARIANTS[pick] for pick in one] for one in picks])
    by_hand = [x == y for a, b in pairwise(picks) for x, y in zip(a, b, strict=True)]
    counts = count_consecutive(table(rows, form))
    assert (counts.n_pairs, counts.n_equal) == (len(by_hand), sum(by_hand))


def test_a_missing_round_makes_no_pair_and_blocks_stay_apart() -> None:
    rows = made.copies_block([[SOLO, SOLO]] * 4)
    assert count_consecutive(table(rows)).n_pairs == 6
    assert count_consecutive(table([row for row in rows if row["round"] != 1])).n_pairs == 2
    two_lives = [{**row, "life": int(row["round"] > 1)} for row in rows]
    assert count_consecutive(table(two_lives)).n_pairs == 4
    with pytest.raises(ValueError, match="two replies"):
        count_consecutive(table([*rows, rows[0]]))


# -------------------------------------------------------------------------- spread, differences


def slow_spread(rows: list[made.Row]) -> tuple[int | None, float | None]:
    """Return the earliest difference and the largest delta, pair by pair."""
    firsts, deltas = [], []
    for a, b in combinations(rows, 2):
        found = first_difference(a, b)
        if found is not None:
            firsts.append(found.position)
        for i, (x, y) in enumerate(zip(a["token_ids"], b["token_ids"], strict=False)):
            if x != y:
                break
            if a["logprob_status"][i] == b["logprob_status"][i] == "ok":
                deltas.append(abs(a["logprobs"][i] - b["logprobs"][i]))
    return min(firsts, default=None), max(deltas, default=None)


@both_forms
@settings(max_examples=30)
@given(picks=st.lists(st.integers(0, len(VARIANTS) - 1), min_size=1, max_size=7))
def test_the_spread_is_that_of_the_worst_pair(form: str, picks: list[int]) -> None:
    rows = [made.make_row(VARIANTS[pick], round=i) for i, pick in enumerate(picks)]
    spread = spread_of(table(rows, form))
    first, delta = slow_spread(rows)
    assert spread.first_position == first
    assert spread.delta_max == (delta if delta is None else pytest.approx(delta))


def test_a_spread_reports_what_it_could_not_see() -> None:
    rows = [made.make_row(made.with_status(SOLO, 2, way)) for way in ("null", "missing")]
    spread = spread_of(table(rows))
    assert (spread.n_positions, spread.n_not_ok) == (48, 2)
    assert spread.delta_max == 0.0
    assert spread.first_position == 2
    assert spread.first_token_position is None
    silent = spread_of(table([made.make_row(made.without_logprobs(SOLO))] * 2))
    assert (silent.n_not_ok, silent.delta_max) == (48, None)


def test_first_differences_of_each_kind() -> None:
    row = made.make_row(SOLO)
    assert first_difference(row, row) is None
    found = first_difference(row, made.make_row(made.diverged(SOLO, 5)))
    assert found is not None
    assert SOLO.ids is not None
    assert SOLO.top_ids is not None
    assert (found.kind, found.position, found.dlogp) == ("token", 5, None)
    assert (found.token_a, found.token_b) == (SOLO.ids[5], SOLO.top_ids[5][1])
    bits = first_difference(row, made.make_row(made.flipped_bit(SOLO, 7, 0)))
    assert bits is not None
    assert (bits.kind, bits.position) == ("bits", 7)
    assert bits.dlogp is not None
    assert 0 < bits.dlogp < 1e-6
    status = first_difference(row, made.make_row(made.with_status(SOLO, 9, "missing")))
    assert status is not None
    assert (status.kind, status.position, status.dlogp) == ("status", 9, None)
    ended = first_difference(made.make_row(made.cut(SOLO, 10)), row)
    assert ended is not None
    assert (ended.kind, ended.position, ended.token_a) == ("token", 10, None)
    with pytest.raises(ValueError, match="invalid"):
        first_difference(row, made.invalid_row("died"))


@pytest.mark.parametrize("change", [made.without_ids, made.only_text])
def test_differences_without_ids(change: Any) -> None:
    row = made.make_row(change(SOLO))
    assert first_difference(row, row) is None
    found = first_difference(row, made.make_row(change(made.diverged(SOLO, 5))))
    assert found is not None
    assert isinstance(found.token_a, bytes)
    if change is made.only_text:
        assert found.unit == "byte"
        assert SOLO.text[: found.position] == made.diverged(SOLO, 5).text[: found.position]
        assert SOLO.text[found.position : found.position + 1] == found.token_a
    else:
        assert (found.unit, found.position) == ("token", 5)


# --------------------------------------------------------------------------------- against solo


@both_forms
def test_replies_scored_against_solo(form: str) -> None:
    moved = made.shifted(SOLO, 4, 0.25, stop=8)
    answers = [SOLO, moved, made.diverged(SOLO, 18), made.cut(SOLO, 10)]
    solo = made.make_row(SOLO)
    score = score_against(solo, table(made.copies_block([answers]), form))
    assert (score.n_identical, score.n_replies) == (1, 4)
    assert score.divergences == (None, None, 18, 10)
    assert score.first_divergence == 10
    assert score.delta_max == pytest.approx(0.25, abs=1e-6)
    assert score.n_deltas == 24 + 24 + 18 + 10
    assert score.delta_mean == pytest.approx(0.25 * 4 / score.n_deltas, abs=1e-6)
    # 24 + 24 + (18 and what agrees by chance after it) + 10 of 4 * 24 positions
    whole = score.whole
    assert whole.n_positions == 96
    assert 76 <= whole.n_kept <= 82
    assert whole.kept_share == whole.n_kept / 96
    first = score.prefixes[0]
    assert (first.n_tokens, first.n_full, first.n_positions, first.n_kept) == (16, 3, 64, 58)
    assert first.n_identical == 2  # the one that diverges at 18 cannot be told from solo yet
    assert (score.prefixes[1].n_full, score.prefixes[1].n_positions) == (0, 96)


def test_a_solo_answer_may_be_rows() -> None:
    rows = table(made.copies_block([[SOLO, SOLO]]))
    assert score_against(table([made.make_row(SOLO)]), rows).n_identical == 2
    for wrong in ([made.invalid_row("died")], [made.make_row(SOLO)] * 2, []):
        with pytest.raises(ValueError, match="solo"):
            score_against(table(wrong), rows)


def test_a_reply_that_goes_on_does_not_keep_the_solo_answer() -> None:
    """The other way round than a cut reply: solo ended, the copy did not."""
    score = score_against(made.make_row(made.cut(SOLO, 10)), table([made.make_row(SOLO)]))
    assert (score.whole.n_positions, score.whole.n_kept, score.n_identical) == (24, 10, 0)
    assert score.divergences == (10,)
    assert score.prefixes[0].n_full == 0  # solo itself has no 16 tokens


@given(seed=SEEDS, place=st.integers(0, 199), n=st.integers(1, 200))
def test_a_divergence_is_found_where_it_is(seed: int, place: int, n: int) -> None:
    place %= n
    answer = made.make_answer(seed, n)
    score = score_against(
        made.make_row(answer), table([made.make_row(made.diverged(answer, place))])
    )
    assert score.divergences == (place,)
    assert score.n_deltas == place
    assert score.delta_max == (0.0 if place else None)
    for prefix in score.prefixes:
        assert prefix.n_tokens is not None
        assert prefix.n_identical == int(place >= prefix.n_tokens)
        assert prefix.n_positions == min(n, prefix.n_tokens)
        assert prefix.n_full == int(n >= prefix.n_tokens)
    assert [prefix.n_tokens for prefix in score.prefixes] == list(PREFIX_LENGTHS)


def test_missing_logprobs_are_never_a_distance_of_0() -> None:
    score = score_against(
        made.make_row(SOLO), table([made.make_row(made.without_logprobs(SOLO))] * 2)
    )
    assert (score.n_deltas, score.delta_max, score.delta_mean) == (0, None, None)
    assert score.n_not_ok == 48
    assert score.whole.kept_share == 1.0
    assert score.n_identical == 0
    part = score_against(
        made.make_row(made.shifted(SOLO, 0, 0.25)),
        table([made.make_row(made.with_status(SOLO, 3, "sentinel"))]),
    )
    assert (part.n_deltas, part.n_not_ok) == (23, 1)
    assert part.delta_mean == pytest.approx(0.25, abs=1e-6)


def test_bytes_and_text_are_scored_as_far_as_they_go() -> None:
    other = made.diverged(SOLO, 5)
    pieces = score_against(
        made.make_row(made.without_ids(SOLO)), table([made.make_row(made.without_ids(other))])
    )
    assert (pieces.unit, pieces.divergences) == ("token", (5,))
    text = score_against(
        made.make_row(made.only_text(SOLO)), table([made.make_row(made.only_text(other))])
    )
    assert (text.unit, text.prefixes, text.n_deltas) == ("byte", (), 0)
    assert text.observable == "text"
    assert text.first_divergence is not None


def test_sixty_four_copies_in_a_hundred_rounds() -> None:
    """The largest block that is planned for, against what is known of it."""
    odd = made.diverged(SOLO, 5)
    rows = made.replies_table([made.make_row(SOLO), made.make_row(odd)])
    n, every = 6400, 50
    picks = pa.array([int(i % every == 0) for i in range(n)])
    block = rows.take(picks)
    for name, values in (
        ("round", [i // 64 for i in range(n)]),
        ("copy", [i % 64 for i in range(n)]),
    ):
        place = block.schema.get_field_index(name)
        block = block.set_column(place, block.schema.field(name), pa.array(values, pa.int32()))
    counts = count_pairs(block)
    assert counts.n_equal == (6272 * 6271 + 128 * 127) // 2
    assert count_consecutive(block).n_pairs == 99 * 64
    assert spread_of(block).first_position == 5
    assert score_against(made.make_row(SOLO), block).n_identical == 6272


def test_a_frame_with_columns_of_its_cell_is_read_as_it_is() -> None:
    frame: pd.DataFrame = table(made.copies_block([VARIANTS]), "frame").assign(route="r", cell="c")
    frame = frame.drop(columns=["top_ids", "top_bytes", "top_logprobs"])
    assert score_against(frame.iloc[0], frame.iloc[1:]).n_replies == len(VARIANTS) - 1
    assert spread_of(frame[frame["copy"] > 0]).n_replies == len(VARIANTS) - 1
