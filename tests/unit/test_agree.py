"""Two routes' replies aligned, and the distance between them where they are at the same point."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import made_replies as made
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routewise.agree import (
    PUBLISHED_DLOGP_MAX,
    PUBLISHED_DLOGP_MEAN,
    PUBLISHED_GATES_SOURCE,
    agree_rows,
    agree_summary,
    approximate_kl,
)
from scipy.special import log_softmax, rel_entr

SEEDS = st.integers(0, 999)
ONE = made.make_answer(1, 24)


def compare(
    a: made.Answer | list[made.Answer],
    b: made.Answer | list[made.Answer],
    match: str = "ids",
    same_weights: bool = True,
) -> pd.DataFrame:
    """Return the agree rows of answers to prompts 0, 1, …"""
    tables = [
        made.replies_table(made.solo_block(side if isinstance(side, list) else [side], 1))
        for side in (a, b)
    ]
    frame: pd.DataFrame = agree_rows(tables[0], tables[1], same_weights, match).to_pandas()
    return frame


both_matches = pytest.mark.parametrize("match", ["ids", "text"])


# ------------------------------------------------------------------------------------ alignment


@both_matches
@settings(max_examples=20)
@given(seed=SEEDS)
def test_the_same_reply_twice_is_exact(match: str, seed: int) -> None:
    answer = made.make_answer(seed, 12)
    rows = compare(answer, answer, match)
    assert len(rows) == 12
    assert rows[["common", "match", "same_stream"]].all(axis=None)
    assert (rows["dlogp"] == 0).all()
    assert (rows["kl_nats"] == 0).all()
    score = agree_summary(rows).all_replies
    assert (score.exact_share, score.match_share, score.dlogp_max) == (1.0, 1.0, 0.0)


@both_matches
@settings(max_examples=20)
@given(seed=SEEDS, place=st.integers(0, 11), bit=st.integers(0, 22))
def test_one_flipped_bit_is_found(match: str, seed: int, place: int, bit: int) -> None:
    answer = made.make_answer(seed, 12)
    rows = compare(answer, made.flipped_bit(answer, place, bit), match)
    assert rows.index[~rows["bits_equal"].astype(bool)].tolist() == [place]
    assert rows.index[rows["dlogp"] > 0].tolist() == [place]
    assert agree_summary(rows).all_replies.n_exact == 11


@both_matches
@settings(max_examples=20)
@given(seed=SEEDS, place=st.integers(0, 11))
def test_after_a_divergence_nothing_is_common(match: str, seed: int, place: int) -> None:
    answer = made.make_answer(seed, 12)
    other = made.diverged(answer, place, seed + 1)
    rows = compare(answer, other, match)
    common = rows[rows["common"]]
    assert common["position"].tolist() == list(range(place + 1))
    assert common["match"].tolist() == [True] * place + [False]
    assert not rows["same_stream"].any()
    assert rows["dlogp"].notna().sum() == place
    assert rows.loc[~rows["common"], ["dlogp", "kl_nats"]].isna().all(axis=None)
    (found,) = agree_summary(rows).divergences
    assert answer.ids is not None
    assert other.ids is not None
    assert (found.position, found.token_id_a, found.token_id_b) == (
        place,
        answer.ids[place],
        other.ids[place],
    )
    assert found.margin_a == pytest.approx(margin(answer, place))
    assert found.margin_b == pytest.approx(margin(other, place))


@both_matches
def test_the_same_tokens_after_a_divergence_have_another_history(match: str) -> None:
    """They match, and their logprobs are compared with nothing."""
    assert ONE.ids is not None
    assert ONE.top_ids is not None
    assert ONE.top_logprobs is not None
    assert ONE.pieces is not None
    token = next(t for t in range(300) if len(made.piece_of(t)) == len(ONE.pieces[6]))
    assert token != ONE.ids[6]
    other = made.spoken([*ONE.ids[:6], token, *ONE.ids[7:]], ONE.top_logprobs, ONE.top_ids)
    rows = compare(ONE, other, match)
    assert rows.index[rows["match"]].tolist() == ([*range(6), *range(7, 24)])
    assert rows.index[rows["common"]].tolist() == list(range(7))
    assert rows.index[rows["dlogp"].notna()].tolist() == list(range(6))
    assert rows.index[rows["kl_nats"].notna()].tolist() == list(range(7))
    score = agree_summary(rows).all_replies
    assert (score.n_match, score.n_match_common, score.n_exact) == (23, 6, 6)


def margin(answer: made.Answer, place: int) -> float:
    assert answer.top_logprobs is not None
    first, second = sorted(answer.top_logprobs[place], reverse=True)[:2]
    return first - second


def test_two_swapped_tokens_are_no_match() -> None:
    assert ONE.ids is not None
    assert ONE.top_ids is not None
    assert ONE.top_logprobs is not None
    order = [*range(6), 7, 6, *range(8, 24)]
    assert ONE.ids[6] != ONE.ids[7]
    swapped = made.spoken(
        [ONE.ids[i] for i in order],
        [ONE.top_logprobs[i] for i in order],
        [ONE.top_ids[i] for i in order],
    )
    rows = compare(ONE, swapped)
    assert rows.index[~rows["match"]].tolist() == [6, 7]
    assert rows.index[rows["common"]].tolist() == list(range(7))


@both_matches
def test_a_reply_that_ended_by_itself_differs_from_one_that_goes_on(match: str) -> None:
    short = made.cut(ONE, 10)
    for a, b, side in ((ONE, short, "b"), (short, ONE, "a")):
        rows = compare(a, b, match)
        assert len(rows) == 24
        assert (rows[f"status_{side}"] == "ended").sum() == 14
        assert rows["position"].tolist() == list(range(24))
        assert rows.loc[10:, f"bytes_{side}"].isna().all()
        assert rows["common"].sum() == 11
        (found,) = agree_summary(rows).divergences
        assert found.position == 10
        assert getattr(found, f"margin_{side}") is None


@both_matches
def test_a_reply_that_was_cut_is_compared_as_far_as_it_goes(match: str) -> None:
    rows = compare(ONE, made.cut(ONE, 10, finish="limit"), match)
    assert len(rows) == 10
    assert rows["same_stream"].all()
    # and where the server does not say how it ended, the count tells
    silent = replace(made.cut(ONE, 10), finish=None)
    assert len(compare(ONE, silent, match)) == 24
    assert len(compare(ONE, replace(silent, n_asked=10), match)) == 10


def test_requests_are_paired_by_prompt_and_copy() -> None:
    answers = [made.make_answer(seed, 6) for seed in range(3)]
    a = made.replies_table(made.copies_block([answers]))
    b = made.replies_table(made.copies_block([answers])).take(pa.array([2, 0, 1]))
    rows = agree_rows(a, b, True, "ids").to_pandas()
    assert rows["match"].all()
    assert rows["copy"].tolist() == [0] * 6 + [1] * 6 + [2] * 6
    only = agree_rows(a, b.slice(0, 1), True, "ids").to_pandas()
    assert set(only["copy"]) == {2}
    with pytest.raises(ValueError, match="two replies"):
        agree_rows(pa.concat_tables([a, a]), b, True, "ids")


def test_an_invalid_reply_is_left_out() -> None:
    a = made.replies_table(made.solo_block([ONE, ONE], 1))
    b = made.replies_table([made.make_row(ONE), made.invalid_row("died", prompt_index=1)])
    assert agree_summary(agree_rows(a, b, True, "ids")).all_replies.n_prompts == 1
    nothing = made.replies_table([made.invalid_row("died")])
    summary = agree_summary(agree_rows(nothing, nothing, True, "ids"))
    assert summary.all_replies.n_positions == 0
    assert summary.all_replies.exact_share is None
    assert summary.all_replies.dlogp_max is None
    assert summary.arithmetic_only is None


def test_ids_are_not_made_up() -> None:
    with pytest.raises(ValueError, match="match by text"):
        compare(ONE, made.without_ids(ONE), "ids")
    with pytest.raises(ValueError, match="wanted one of"):
        compare(ONE, ONE, "tokens")


# ---------------------------------------------------------------------------- alignment by bytes


def sizes_of(total: int, cuts: list[int]) -> list[int]:
    places = sorted({cut % total for cut in cuts} - {0})
    return np.diff([0, *places, total]).tolist()


@settings(max_examples=40)
@given(seed=SEEDS, cuts=st.lists(st.integers(0, 10**6), max_size=12))
def test_tokens_that_end_elsewhere_are_aligned_where_both_meet(seed: int, cuts: list[int]) -> None:
    answer = made.make_answer(seed, 10)
    other = made.resplit(answer, sizes_of(len(answer.text), cuts))
    rows = compare(answer, other, "text")
    # by hand: the spans that both have
    spans = [set(pairwise(ends_of(answer))), set(pairwise(ends_of(other)))]
    assert len(rows) == len(spans[0] & spans[1])
    assert (rows["bytes_a"] == rows["bytes_b"]).all()
    assert rows["common"].all()
    assert rows["same_stream"].all()
    assert (rows["dlogp"] == 0).all()
    assert agree_summary(rows).divergences == ()


def ends_of(answer: made.Answer) -> list[int]:
    assert answer.pieces is not None
    return [0, *np.cumsum([len(piece) for piece in answer.pieces]).tolist()]


@settings(max_examples=40)
@given(
    seed=SEEDS,
    place=st.integers(0, 9),
    cuts_a=st.lists(st.integers(0, 10**6), max_size=12),
    cuts_b=st.lists(st.integers(0, 10**6), max_size=12),
)
def test_a_divergence_is_found_whatever_the_tokens(
    seed: int, place: int, cuts_a: list[int], cuts_b: list[int]
) -> None:
    answer = made.make_answer(seed, 10)
    other = made.diverged(answer, place, seed + 1)
    a = made.resplit(answer, sizes_of(len(answer.text), cuts_a))
    b = made.resplit(other, sizes_of(len(other.text), cuts_b))
    rows = compare(a, b, "text")
    n = min(len(answer.text), len(other.text))
    first = next((i for i in range(n) if answer.text[i] != other.text[i]), None)
    if first is None:  # one text begins with the other, and both were cut
        assert rows["same_stream"].all()
        return
    assert not rows["same_stream"].any()
    differing = rows[rows["common"] & ~rows["match"]]
    assert len(differing) == 1
    row = differing.iloc[0]
    # the routes were at the same point where both began a token and one held the difference
    starts = [max(end for end in ends_of(side) if end <= first) for side in (a, b)]
    if min(starts) in ends_of(a) and min(starts) in ends_of(b):
        starts = [min(starts)] * 2
    else:
        assert pd.isna(row["kl_nats"])
    assert answer.text[starts[0] :].startswith(row["bytes_a"])
    assert other.text[starts[1] :].startswith(row["bytes_b"])
    assert sum(map(len, rows[rows["common"] & rows["match"]]["bytes_a"])) <= first
    (found,) = agree_summary(rows).divergences
    assert (found.bytes_a, found.bytes_b) == (row["bytes_a"], row["bytes_b"])


def four(rows: pd.DataFrame) -> list[list[Any]]:
    return rows[["bytes_a", "bytes_b", "common", "match"]].to_numpy().tolist()


def test_a_longer_token_at_the_divergence_is_a_divergence() -> None:
    """The routes are at one point and choose ``ab`` and ``abX``; then they are apart."""
    a = pieces_answer([b"hi", b" ab", b"cd"])
    b = pieces_answer([b"hi", b" abX", b"d"])
    rows = compare(a, b, "text")
    assert four(rows) == [[b"hi", b"hi", True, True], [b" ab", b" abX", True, False]]


def test_a_divergence_within_tokens_that_begin_apart_is_not_lost() -> None:
    rows = compare(pieces_answer([b"abX"]), pieces_answer([b"a", b"bY"]), "text")
    assert four(rows) == [[b"abX", b"a", True, False]]
    rows = compare(pieces_answer([b"ab", b"cX"]), pieces_answer([b"a", b"bcY"]), "text")
    assert four(rows) == [[b"cX", b"bcY", True, False]]
    assert rows["kl_nats"].isna().all()
    ended = replace(pieces_answer([b"ab"]), finish="eos")
    rows = compare(ended, pieces_answer([b"a", b"bc", b"d"]), "text")
    assert four(rows) == [[None, b"bc", True, False], [None, b"d", False, False]]
    assert rows["status_a"].tolist() == ["ended", "ended"]


def test_half_characters_are_aligned_as_bytes() -> None:
    """é in two tokens on one route and in one on the other."""
    a = pieces_answer([b"a", b"\xc3", b"\xa9", b"b"])
    b = pieces_answer([b"a", b"\xc3\xa9", b"b"])
    rows = compare(a, b, "text")
    assert rows["bytes_a"].tolist() == [b"a", b"b"]
    assert rows["position"].tolist() == [0, 3]
    assert rows["same_stream"].all()


def test_a_token_without_bytes_has_no_place() -> None:
    a = pieces_answer([b"a", b"", b"b"])
    b = pieces_answer([b"a", b"b"])
    assert compare(a, b, "text")["bytes_a"].tolist() == [b"a", b"b"]
    assert compare(a, a, "text")["bytes_a"].tolist() == [b"a", b"b"]


def pieces_answer(pieces: list[bytes]) -> made.Answer:
    answer = made.make_answer(len(pieces), len(pieces))
    return replace(made.without_ids(answer), pieces=tuple(pieces), text=b"".join(pieces))


@settings(max_examples=20)
@given(seed=SEEDS, place=st.integers(0, 9))
def test_text_alone_is_one_token(seed: int, place: int) -> None:
    answer = made.make_answer(seed, 10)
    other = made.diverged(answer, place, seed + 1)
    for a, b in (
        (answer, made.only_text(other)),
        (made.only_text(answer), other),
        (made.only_text(answer), made.only_text(other)),
    ):
        rows = compare(a, b, "text")
        assert len(rows) == 1
        assert rows["status_a"].tolist() == ["missing"]
        n = min(len(answer.text), len(other.text))
        assert rows["match"].tolist() == [answer.text[:n] == other.text[:n]]
        assert rows["same_stream"].tolist() == rows["match"].tolist()
    same = compare(answer, made.only_text(answer), "text")
    assert same["match"].tolist() == [True]
    score = agree_summary(same).all_replies
    assert (score.n_dlogp, score.dlogp_max, score.exact_share) == (0, None, None)


def test_a_text_cut_within_a_character_is_compared_before_it() -> None:
    whole = pieces_answer([b"caf", b"\xc3", b"\xa9"])
    half = pieces_answer([b"caf", b"\xc3"])
    replaced = made.only_text(replace(half, text="caf\ufffd".encode()))
    assert compare(whole, replaced, "text")["same_stream"].tolist() == [True]
    other = made.only_text(replace(half, text=b"cad"))
    assert compare(whole, other, "text")["same_stream"].tolist() == [False]


# ------------------------------------------------------------------------------- missing logprobs


@pytest.mark.parametrize("status", ["null", "missing", "sentinel", "nan", "not_float32"])
def test_a_logprob_that_does_not_count_is_no_distance(status: str) -> None:
    moved = made.shifted(ONE, 0, 0.25)
    rows = compare(ONE, made.with_status(moved, 5, status))
    assert rows.index[rows["dlogp"].isna()].tolist() == [5]
    assert rows.loc[5, "status_b"] == status
    assert rows["bits_equal"].isna().sum() == 1
    assert rows["logprob_b"].isna().tolist() == rows["dlogp"].isna().tolist()
    score = agree_summary(rows).all_replies
    assert (score.n_dlogp, score.n_logprobs, score.n_common) == (23, 23, 24)
    assert score.dlogp_mean == pytest.approx(0.25, abs=1e-6)  # lower if the 6th counted as 0
    assert dict(score.statuses_b) == {"ok": 23, status: 1}
    assert dict(score.statuses_a) == {"ok": 24}


def test_two_missing_logprobs_are_not_equal_bits() -> None:
    silent = made.without_logprobs(ONE)
    rows = compare(silent, silent)
    assert rows["bits_equal"].isna().all()
    assert rows["kl_nats"].isna().all()
    assert rows["margin_a"].isna().all()
    score = agree_summary(rows).all_replies
    assert (score.n_exact, score.exact_share, score.match_share) == (0, None, 1.0)


def test_a_sentinel_on_both_sides_is_no_equality() -> None:
    both = made.with_status(ONE, 5, "sentinel")
    assert both.bits[5] is not None
    rows = compare(both, both)
    assert rows["bits_equal"].isna().sum() == 1
    assert agree_summary(rows).all_replies.statuses_a["sentinel"] == 1


def test_saturated_positions_are_counted() -> None:
    assert ONE.ids is not None
    zero = made.spoken(ONE.ids, [(0.0, -20.0)] * 24, [(t, (t + 1) % 300) for t in ONE.ids])
    score = agree_summary(compare(zero, zero)).all_replies
    assert (score.n_saturated_a, score.n_saturated_b, score.n_saturated_both) == (24, 24, 24)
    part = agree_summary(compare(ONE, zero)).all_replies
    assert (part.n_saturated_a, part.n_saturated_b, part.n_saturated_both) == (0, 24, 0)


def test_a_top_list_of_one_has_no_margin_and_a_sentinel_in_it_no_mass() -> None:
    single = replace(ONE, top_ids=((1,),) * 24, top_logprobs=((-1.0,),) * 24)
    assert compare(single, ONE)["margin_a"].isna().all()
    gone = replace(ONE, top_logprobs=((-1.0, made.SENTINEL),) * 24)
    rows = compare(gone, gone)
    assert rows["margin_a"].isna().all()
    assert (rows["kl_nats"] == 0).all()


# ---------------------------------------------------------------------------------------- KL


def top_lists(logits: np.ndarray[Any, Any], k: int) -> tuple[Any, Any]:
    values = log_softmax(logits, axis=1)
    keys = np.argsort(-values, axis=1)[:, :k]
    return keys, np.take_along_axis(values, keys, axis=1)


@given(seed=SEEDS, k=st.integers(2, 6), noise=st.floats(0.001, 3))
def test_the_approximate_kl_is_a_lower_bound(seed: int, k: int, noise: float) -> None:
    random = np.random.default_rng(seed)
    a = random.normal(0, 3, (8, 20))
    b = a + random.normal(0, noise, (8, 20))
    true = rel_entr(np.exp(log_softmax(a, axis=1)), np.exp(log_softmax(b, axis=1))).sum(axis=1)
    found = approximate_kl(*top_lists(a, k), *top_lists(b, k))
    there = ~np.isnan(found)
    assert (found[there] <= true[there] + 1e-6).all()
    assert (found[there] >= 0).all()
    whole = approximate_kl(*top_lists(a, 20), *top_lists(b, 20))
    assert whole == pytest.approx(true, rel=1e-6, abs=1e-5)


def test_kl_by_hand() -> None:
    """One common token of two: p = 0.5, q = 0.25, rests 0.5 and 0.75."""
    keys_a, keys_b = np.array([[1, 2]]), np.array([[3, 1]])
    found = approximate_kl(keys_a, np.log([[0.5, 0.3]]), keys_b, np.log([[0.6, 0.25]]))
    assert found == pytest.approx([0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)])
    # nothing in common tells nothing, and that is not 0
    apart = approximate_kl(np.array([[1]]), np.log([[0.5]]), np.array([[2]]), np.log([[0.5]]))
    assert np.isnan(apart).all()
    padding = approximate_kl(
        np.array([[1, -1]]),
        np.array([[np.log(0.5), np.nan]]),
        np.array([[-1]]),
        np.array([[np.nan]]),
    )
    assert np.isnan(padding).all()


def test_kl_stays_finite_where_one_side_is_saturated() -> None:
    found = approximate_kl(np.array([[1]]), np.array([[-0.5]]), np.array([[1]]), np.array([[0.0]]))
    assert np.isfinite(found).all()
    assert found[0] > 1


# ------------------------------------------------------------------------------------- summary


def test_a_summary_by_hand() -> None:
    a = [made.make_answer(seed, 20) for seed in range(4)]
    b = [
        a[0],
        made.shifted(a[1], 10, -0.125),
        made.diverged(a[2], 7),
        made.shifted(made.diverged(a[3], 15), 4, 0.25, stop=5),
    ]
    summary = agree_summary(compare(a, b, same_weights=False))
    score, same = summary.all_replies, summary.same_stream
    assert (score.n_prompts, score.n_replies, score.n_same_stream) == (4, 4, 2)
    assert (score.n_positions, score.n_common, score.n_match_common) == (80, 20 + 20 + 8 + 16, 62)
    assert score.match_share_common == 62 / 64
    assert score.n_dlogp == 62
    # a token that differs is not exact, though its logprob has the bits of the other's here
    assert (score.n_logprobs, score.n_exact) == (64, 62 - 11)
    # sums of float32 rounded, hence the tolerance
    assert score.dlogp_max == pytest.approx(0.25, abs=1e-6)
    assert score.dlogp_mean == pytest.approx((10 * 0.125 + 0.25) / 62, abs=1e-6)
    assert score.dlogp_median == 0.0
    assert score.dlogp_p99 == pytest.approx(
        float(np.percentile([0.0] * 51 + [0.125] * 10 + [0.25], 99)), abs=1e-6
    )
    assert score.worst is not None
    assert (score.worst.prompt_id, score.worst.position) == ("dialogue-3", 4)
    assert (same.n_prompts, same.n_positions, same.n_common) == (2, 40, 40)
    assert same.dlogp_max == pytest.approx(0.125, abs=1e-6)
    assert same.exact_share == pytest.approx(30 / 40)
    assert [found.position for found in summary.divergences] == [7, 15]
    assert summary.arithmetic_only is False


@both_matches
def test_a_summary_is_the_same_of_a_table_and_of_a_frame(match: str) -> None:
    a = [made.make_answer(seed, 20) for seed in range(3)]
    b = [a[0], made.diverged(a[1], 3), made.with_status(made.cut(a[2], 9), 2, "nan")]
    tables = [made.replies_table(made.solo_block(side, 1)) for side in (a, b)]
    rows = agree_rows(tables[0], tables[1], True, match)
    frames = [table.to_pandas() for table in tables]
    assert agree_rows(frames[0], frames[1], True, match).equals(rows)
    summary = agree_summary(rows)
    assert agree_summary(rows.to_pandas()) == summary
    # a cell's rows among others' keep their types less well
    silent = compare(made.without_logprobs(ONE), made.only_text(ONE), "text")
    both = pd.concat([silent, rows.to_pandas()], ignore_index=True).iloc[len(silent) :]
    assert agree_summary(both) == summary


def test_published_gates_name_their_source() -> None:
    assert (PUBLISHED_DLOGP_MAX, PUBLISHED_DLOGP_MEAN) == (0.06, 0.005)
    assert "logprob_agree" in PUBLISHED_GATES_SOURCE
