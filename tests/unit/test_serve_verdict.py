"""Verdicts on replies: each thing that is asked of an exact one has a case that fails it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_replies import (
    Row,
    copies_block,
    cut,
    diverged,
    flipped_bit,
    invalid_row,
    make_answer,
    make_row,
    only_text,
    probe_block,
    replies_table,
    shifted,
    solo_block,
    with_status,
    without_ids,
    without_logprobs,
)
from routewise.client import SHARED_SLOTS_MIN
from routewise.serve_verdict import (
    ServeJudgement,
    compare_replies,
    judge_batched,
    judge_caches,
    judge_repeat,
    judge_width_1,
    solo_of,
)

A, B = make_answer(1, 40), make_answer(2, 40)


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    return replies_table(rows).to_pandas()


def both(one: Row, two: Row) -> list[dict[str, Any]]:
    """Return two rows as they come back from Parquet."""
    return [
        {str(key): value for key, value in row.items()}
        for row in frame([one, two]).to_dict("records")
    ]


def lives(answers: Sequence[Any] = (A, B), **changes: Any) -> list[Row]:
    return [row for life in (0, 1) for row in solo_block(answers, 3, life=life, **changes)]


# ---------------------------------------------------------------------------------------- replies


def test_two_replies_are_compared_up_to_the_first_token_that_differs() -> None:
    rows = both(make_row(A), make_row(diverged(shifted(A, 5, 0.125, 8), 20)))
    compared = compare_replies(rows[0], rows[1])
    assert (compared.n, compared.flip, compared.equal) == (21, 20, False)
    assert list(compared.moved.nonzero()[0]) == [5, 6, 7, 20]
    assert compared.dlogp[5] == pytest.approx(0.125)
    bare = both(make_row(without_logprobs(A)), make_row(without_logprobs(diverged(A, 20))))
    by_ids = compare_replies(*bare)
    assert list(by_ids.moved.nonzero()[0]) == [20]


def test_a_reply_that_ends_earlier_differs_after_its_end() -> None:
    rows = both(make_row(A), make_row(cut(A, 12)))
    for one, two in (rows, rows[::-1]):
        compared = compare_replies(one, two)
        assert (compared.n, compared.flip) == (13, 12)


def test_one_bit_and_one_status_are_differences() -> None:
    for other in (flipped_bit(A, 7, 0), with_status(A, 7, "null")):
        rows = both(make_row(A), make_row(other, observable="chosen-logprob"))
        compared = compare_replies(rows[0], rows[1])
        assert list(compared.moved.nonzero()[0]) == [7]


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 39), bit=st.integers(0, 22), copy=st.integers(0, 3))
def test_any_bit_of_any_reply_makes_a_batch_differ(position: int, bit: int, copy: int) -> None:
    copies = [[A] * 4, [A] * 4]
    copies[1][copy] = flipped_bit(A, position, bit)
    judged = judge_batched(
        frame(copies_block(copies)), frame(solo_block([A])), width=4, prefill="together"
    )
    assert judged.verdict == "differs"
    assert judged.n["differing"] == 1
    assert judged.first_difference is not None
    assert judged.first_difference["position"] == position


# ----------------------------------------------------------------------------------------- repeat


def test_equal_replies_of_two_lives_are_exact_and_all_pairs_are_counted() -> None:
    judged = judge_repeat(frame(lives()), "off", rounds={0: 3, 1: 3})
    assert (judged.verdict, judged.reasons) == ("exact", [])
    assert judged.n["pairs"] == 2 * 15
    assert judged.n["pairs_across_lives"] == 2 * 9
    assert judged.n["positions"] == 80
    assert judged.observable == "chosen logprob"
    assert judged.measures["states"]["observed_mean"] == 1.0


def test_a_difference_between_two_later_replies_is_seen() -> None:
    rows = lives()
    rows[2] = make_row(flipped_bit(A, 30, 3), life=0, round=2)
    judged = judge_repeat(frame(rows), "off")
    assert judged.verdict == "differs"
    assert judged.n["differing_pairs"] == 5
    assert judged.n["differing_across_lives"] == 3
    assert judged.first_difference is not None
    assert judged.first_difference["position"] == 30


def test_a_restart_that_moves_the_answer_is_told_apart_from_repetition() -> None:
    rows = [*solo_block([A], 3, life=0), *solo_block([shifted(A, 4, 0.5)], 3, life=1)]
    judged = judge_repeat(frame(rows), "off")
    assert judged.verdict == "differs"
    assert judged.n["differing_pairs"] == judged.n["differing_across_lives"] == 9
    assert judged.worst is not None
    assert judged.worst["dlogp_max"] == pytest.approx(0.5)


def replaced(rows: list[Row], place: int, row: Row) -> list[Row]:
    return [*rows[:place], row, *rows[place + 1 :]]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (replaced(lives(), 1, invalid_row("connection reset", round=1)), "connection reset"),
        ([*lives(), lives()[0]], "stand there twice"),
        (lives()[:-1], "2 of 3 rounds"),
        (lives()[:6], "no reply of server life 1"),
        (lives(cache_n=3), "from the cache although"),
        (lives(busy_per_decode=2.0), "company that was not of their round"),
        (lives(draft_n=5), "decoded with drafts"),
        ([], "holds no replies"),
    ],
)
def test_replies_that_cannot_be_believed_are_never_equal(rows: list[Row], reason: str) -> None:
    judged = judge_repeat(frame(rows), "off", rounds={0: 3, 1: 3})
    assert judged.verdict == "invalid"
    assert any(reason in found for found in judged.reasons)


def test_a_prompt_without_any_reply_is_missed() -> None:
    judged = judge_repeat(frame(lives([A])), "off", prompts=["prose-0", "code-1"])
    assert judged.verdict == "invalid"
    assert "code-1" in judged.reasons[0]


@pytest.mark.parametrize(
    ("cache", "cache_n", "prompt_n", "verdict"),
    [
        ("off", 0, 20, "exact"),
        ("off", 1, 19, "invalid"),
        ("cold", 1, 19, "exact"),
        ("cold", 2, 18, "invalid"),
        ("warm", 19, 1, "exact"),
        ("warm", 0, 20, "invalid"),
        ("warm", 1, 19, "invalid"),
        ("off", None, None, "exact"),
        ("cold", None, None, "unobservable"),
        ("warm", None, None, "unobservable"),
    ],
)
def test_the_prompt_cache_must_show(
    cache: str, cache_n: int | None, prompt_n: int | None, verdict: str
) -> None:
    rows = lives(cache=cache, cache_n=cache_n, prompt_n=prompt_n)
    judged = judge_repeat(frame(rows), cache)
    assert judged.verdict == verdict
    assert judged.reasons or cache_n is not None


def test_what_no_logprob_shows_is_exact_at_the_weaker_observable_only() -> None:
    for change, observable in ((without_logprobs, "token ids"), (only_text, "text")):
        judged = judge_repeat(frame(lives([change(A)])), "off")
        assert (judged.verdict, judged.observable) == ("exact", observable)
        assert f"{observable} alone" in judged.reasons[0]
    moved = [*lives([without_logprobs(A)]), make_row(without_logprobs(diverged(A, 9)), round=3)]
    assert judge_repeat(frame(moved), "off").verdict == "differs"


def test_logprobs_of_some_replies_only_are_not_compared() -> None:
    rows = replaced(lives([A]), 2, make_row(without_logprobs(A), round=2))
    judged = judge_repeat(frame(rows), "off")
    assert (judged.verdict, judged.observable) == ("exact", "token ids")


def test_logprobs_that_differ_are_seen_though_some_are_missing() -> None:
    """A token without a logprob weakens what ``exact`` says, and hides no difference."""
    holed = with_status(A, 3, "null")
    moved = with_status(shifted(A, 20, 0.25), 3, "null")
    weak = {"observable": "token-ids"}
    rows = [*solo_block([holed], 3, **weak), make_row(moved, round=3, **weak)]
    judged = judge_repeat(frame(rows), "off")
    assert (judged.verdict, judged.observable) == ("differs", "chosen logprob")
    assert (judged.n["differing"], judged.n["flips"]) == (20, 0)
    judged = judge_repeat(frame(rows[:3]), "off")
    assert (judged.verdict, judged.observable) == ("exact", "token ids")
    mixed = [*solo_block([A], 2), make_row(holed, round=2, **weak)]
    assert judge_repeat(frame(mixed), "off").verdict == "exact"
    mixed = [*mixed, make_row(shifted(A, 20, 0.25), round=3)]
    judged = judge_repeat(frame(mixed), "off")
    assert (judged.verdict, judged.n["differing_pairs"]) == ("differs", 3)


def test_tokens_without_a_logprob_are_counted_in_a_note() -> None:
    judged = judge_repeat(frame(lives([with_status(A, 3, "null")])), "off")
    assert judged.verdict == "exact"
    assert "logprobs of 234 of 240 tokens" in judged.reasons[0]
    assert judged.n["logprobs"] == 234


def test_rows_and_states_that_contradict_each_other_are_invalid() -> None:
    rows = lives([A])
    rows[3] = rows[3] | {"state": b"another 128 bits"}
    judged = judge_repeat(frame(rows), "off")
    assert judged.verdict == "invalid"
    assert "contradict" in judged.reasons[0]


def test_one_reply_alone_shows_nothing() -> None:
    assert judge_repeat(frame([make_row(A)]), "off").verdict == "unobservable"


def test_an_unsupported_cell_says_why_and_a_cell_with_rows_is_not_one() -> None:
    judged = judge_repeat(frame([]), "off", unsupported="no switch for the cache")
    assert (judged.verdict, judged.reasons) == ("unsupported", ["no switch for the cache"])
    assert judge_repeat(frame(lives()), "off", unsupported="odd").verdict == "exact"


def test_a_job_that_doubts_its_cell_is_believed() -> None:
    judged = judge_repeat(frame(lives()), "off", invalid_reasons=["props say another build"])
    assert (judged.verdict, judged.reasons) == ("invalid", ["props say another build"])


# ---------------------------------------------------------------------------------------- batched


def judged_copies(
    copies: Sequence[Sequence[Any]] = ((A,) * 4, (A,) * 4),
    solo: Sequence[Row] | None = None,
    prefill: str = "together",
    **changes: Any,
) -> ServeJudgement:
    rows = copies_block(copies, prefill=prefill, **changes)
    alone = solo_block([A], prefill=prefill) if solo is None else solo
    return judge_batched(frame(rows), frame(alone), width=4, prefill=prefill)


def test_copies_that_all_have_the_solo_answer_are_exact() -> None:
    judged = judged_copies()
    assert judged.verdict == "exact"
    assert judged.n["replies"] == 8
    assert judged.measures["solo"]["identical"] == 8
    assert judged.measures["pairs"] == {
        "consecutive": 4,
        "consecutive_equal": 4,
        "all": 28,
        "all_equal": 28,
    }
    assert judged.measures["witness"]["busy_per_decode_mean"] == 4.0


def test_states_pairs_and_tokens_kept_are_counted() -> None:
    far = diverged(A, 10)
    judged = judged_copies([[A, A, far, shifted(A, 2, 0.25)], [A, far, far, A]])
    assert judged.verdict == "differs"
    states = judged.measures["states"]["prompts"][0]
    assert (states["observed"], states["modal_share"], states["replies"]) == (3, 0.5, 8)
    assert states["chao1"] == pytest.approx(3.0)
    assert judged.measures["pairs"]["consecutive_equal"] == 2
    solo = judged.measures["solo"]
    assert (solo["identical"], solo["dlogp_max"]) == (4, pytest.approx(0.25))
    kept = {prefix["tokens"]: prefix["share"] for prefix in solo["kept"]}
    assert set(kept) == {16, 32, None}
    assert kept[16] == pytest.approx(1 - 3 * 6 / (8 * 16), abs=0.01)
    assert kept[None] < kept[16]
    assert judged.n["flips"] == 1


@pytest.mark.parametrize("busy", [1.0, SHARED_SLOTS_MIN - 0.01])
def test_copies_that_never_shared_a_pass_are_no_evidence_whatever_they_say(busy: float) -> None:
    for copies in (((A,) * 4,), ((A, A, A, diverged(A, 3)),)):
        judged = judged_copies(copies, busy_per_decode=busy)
        assert judged.verdict == "invalid"
        assert "never shared a decode step" in judged.reasons[0]


def test_one_round_that_was_not_shared_is_no_evidence_of_equality() -> None:
    rows = copies_block([[A] * 4] * 2)
    for row in rows[4:]:
        row["busy_per_decode"] = 1.1
    judged = judge_batched(frame(rows), frame(solo_block([A])), width=4, prefill="together")
    assert judged.verdict == "invalid"
    assert "1 of 2 rounds were hardly shared" in judged.reasons[0]


def test_a_difference_counts_where_the_round_was_shared_and_not_where_it_was_not() -> None:
    for moved_round, verdict in ((0, "differs"), (1, "invalid")):
        copies = [[A] * 4, [A] * 4]
        copies[moved_round][2] = diverged(A, 5)
        rows = copies_block(copies)
        for row in rows[4:]:
            row["busy_per_decode"] = 1.1
        judged = judge_batched(frame(rows), frame(solo_block([A])), width=4, prefill="together")
        assert judged.verdict == verdict


def test_without_a_witness_equal_is_unobservable_and_a_difference_stays_one() -> None:
    assert judged_copies(busy_per_decode=None, n_decodes=None).verdict == "unobservable"
    judged = judged_copies([[A, A, A, diverged(A, 5)]], busy_per_decode=None)
    assert judged.verdict == "differs"
    assert "no witness" in judged.reasons[0]


@pytest.mark.parametrize(
    ("cache_n", "prompt_n", "verdict"),
    [
        (19, 1, "exact"),
        (0, 20, "invalid"),
        (10, 10, "invalid"),
        (0, 1, "exact"),  # a prompt of one token: there is nothing that a cache could give
        (0, None, "invalid"),
        (19, None, "unobservable"),
        (None, 1, "unobservable"),
        (None, None, "unobservable"),
    ],
)
def test_prompts_prefilled_apart_must_come_from_the_cache(
    cache_n: int | None, prompt_n: int | None, verdict: str
) -> None:
    judged = judged_copies(prefill="apart", cache_n=cache_n, prompt_n=prompt_n)
    assert judged.verdict == verdict
    if verdict == "unobservable":
        assert "do not say how they were prefilled" in judged.reasons[0]
        moved = judged_copies(
            [[A, A, A, diverged(A, 5)]], prefill="apart", cache_n=cache_n, prompt_n=prompt_n
        )
        assert moved.verdict == "differs"


def test_copies_must_mostly_be_together_to_be_equal() -> None:
    """Above the limit of "shared at all" a claim of three others needs more than a glimpse."""
    for busy, verdict in ((1.26, "unobservable"), (2.5, "unobservable"), (2.51, "exact")):
        judged = judged_copies(busy_per_decode=busy)
        assert judged.verdict == verdict
        assert verdict == "exact" or f"on average {busy:.2f} of 4 slots" in judged.reasons[0]
        assert judged_copies([[A, A, A, diverged(A, 5)]], busy_per_decode=busy).verdict == "differs"
    # a filler may be much shorter than the probe, so that this says nothing of them
    rows = probe_block([A, A], [B, B, B], "fillers", busy_per_decode=1.3)
    judged = judge_batched(frame(rows), frame(solo_block([A])), width=4, prefill="together")
    assert judged.verdict == "exact"


def test_a_whole_prompt_that_a_block_lacks_is_missed() -> None:
    rows, alone = frame(copies_block([[A] * 4] * 2)), frame(solo_block([A, B]))
    judged = judge_batched(rows, alone, width=4, prefill="together")
    assert judged.verdict == "invalid"
    assert "1 prompts have no reply, code-1 among them" in judged.reasons
    judged = judge_batched(
        rows, frame(solo_block([A])), width=4, prefill="together", prompts=["prose-0", "code-1"]
    )
    assert judged.verdict == "invalid"


def mostly(answer: Any, n: int, status: str) -> Any:
    """Return an answer of which the first ``n`` logprobs are not ok."""
    for place in range(n):
        answer = with_status(answer, place, status)
    return answer


@pytest.mark.parametrize("status", ["nan", "not_float32"])
def test_broken_logprobs_spoil_repeat_and_batched(status: str) -> None:
    broken = mostly(A, 39, status)
    for judged in (
        judge_repeat(frame(lives([broken])), "off"),
        judged_copies([[broken] * 4], solo=solo_block([broken])),
        judge_width_1(frame(solo_block([broken], parallel=4)), frame(solo_block([broken]))),
    ):
        assert judged.verdict == "invalid"
        assert any("logprobs are NaN or no float32" in reason for reason in judged.reasons)


def test_few_logprobs_make_no_claim_about_logprobs() -> None:
    for missing, observable in ((39, "token ids"), (5, "token ids"), (4, "chosen logprob")):
        holed = mostly(A, missing, "missing")
        for judged in (
            judge_repeat(frame(lives([holed])), "off"),
            judged_copies([[holed] * 4], solo=solo_block([holed])),
        ):
            assert (judged.verdict, judged.observable) == ("exact", observable)
            n, tokens = judged.n["logprobs"], 40 * judged.n["replies"]
            assert f"logprobs of {n} of {tokens} tokens" in judged.reasons[0]
    bytes_alone = without_ids(mostly(A, 39, "missing"))
    assert judge_repeat(frame(lives([bytes_alone])), "off").observable == "text"
    moved = [*lives([mostly(A, 39, "missing")])]
    moved.append(make_row(shifted(mostly(A, 0, "ok"), 39, 0.5), round=3))
    assert judge_repeat(frame(moved), "off").verdict == "differs"


def test_a_routes_short_list_of_logprobs_is_what_it_covers() -> None:
    covered = A
    for place in range(10, 40):
        covered = with_status(covered, place, "missing")
    for logprob_list, observable in ((10, "chosen logprob"), (None, "token ids")):
        judged = judge_repeat(frame(lives([covered])), "off", logprob_list=logprob_list)
        assert (judged.verdict, judged.observable) == ("exact", observable)
        assert "logprobs of 60 of 240 tokens" in judged.reasons[0]


# ----------------------------------------------------------------------------------------- caches


def of_caches(answers: dict[tuple[int, str, int], Any]) -> pd.DataFrame:
    """Return replies by (life, cache, round), A where nothing else is given."""
    places = [(life, c, r) for life in (0, 1) for c in ("cold", "off", "warm") for r in (0, 1)]
    return frame(
        [
            make_row(answers.get(place, A), life=place[0], cache=place[1], round=place[2])
            for place in places
        ]
    )


def test_answers_with_all_kinds_of_cache_are_compared_in_all_pairs() -> None:
    judged = judge_caches(of_caches({}))
    assert (judged.verdict, judged.reasons) == ("exact", [])
    assert (judged.n["pairs"], judged.n["differing_pairs"]) == (3 * 16, 0)
    judged = judge_caches(
        of_caches(
            dict.fromkeys([(n, "warm", r) for n in (0, 1) for r in (0, 1)], shifted(A, 3, 0.25))
        )
    )
    assert (judged.verdict, judged.n["differing_pairs"]) == ("differs", 32)
    assert not any("same kind of cache" in reason for reason in judged.reasons)


@settings(max_examples=24, deadline=None)
@given(
    st.tuples(st.integers(0, 1), st.sampled_from(["cold", "off", "warm"]), st.integers(0, 1)),
    st.integers(0, 39),
)
def test_any_reply_of_any_cache_and_life_can_make_the_caches_differ(
    place: tuple[int, str, int], position: int
) -> None:
    judged = judge_caches(of_caches({place: flipped_bit(A, position, 1)}))
    assert (judged.verdict, judged.n["differing_pairs"]) == ("differs", 8)
    assert judged.first_difference is not None
    assert judged.first_difference["position"] == position
    assert f"same kind of cache ({place[1]})" in judged.reasons[-1]


# ---------------------------------------------------------------------------------------- samples


def test_the_sample_of_an_interval_is_replies_and_not_their_positions() -> None:
    judged = judge_repeat(frame([*lives([A]), make_row(shifted(A, 0, 0.5), round=3)]), "off")
    assert (judged.n["differing_replies"], judged.n["compared_replies"]) == (1, 6)
    assert judged.n["differing"] == 40
    judged = judged_copies([[A, A, A, diverged(A, 3)]] * 2)
    assert (judged.n["differing_replies"], judged.n["compared_replies"]) == (2, 8)


def test_a_prompt_from_the_cache_was_not_prefilled_together() -> None:
    assert judged_copies(cache_n=19, prompt_n=1).verdict == "invalid"


def test_solo_is_taken_from_the_fewest_slots_and_the_same_prefill() -> None:
    rows = [
        *solo_block([A], parallel=4),
        *solo_block([A], parallel=1),
        *solo_block([B], parallel=1, prefill="apart"),
        *copies_block([[A] * 4]),
    ]
    for prefill, answer in (("together", A), ("apart", B)):
        alone = solo_of(frame(rows), prefill)
        assert set(alone["parallel"]) == {1}
        assert set(alone["text"]) == {answer.text}
    assert len(solo_of(frame(rows[:6]), "apart")) == 3


def test_without_a_solo_answer_nothing_is_claimed() -> None:
    assert judged_copies(solo=[]).verdict == "unobservable"
    judged = judged_copies(solo=solo_block([A, B])[3:])
    assert judged.verdict == "invalid"
    assert any("no solo reply" in reason for reason in judged.reasons)


def test_a_missing_copy_and_an_invalid_neighbour_are_seen() -> None:
    rows = copies_block([[A] * 4] * 2)
    judged = judge_batched(frame(rows[:-1]), frame(solo_block([A])), width=4, prefill="together")
    assert judged.verdict == "invalid"
    assert "7 replies in 2 rounds of 4" in judged.reasons[0]
    rows = probe_block([A, A], [B, B, B], "neighbours")
    rows[2] = invalid_row("cut", **{k: rows[2][k] for k in ("role", "copy", "mix", "width")})
    rows[2] |= {"parallel": 4, "prompt_index": 2, "prompt_id": "mathematics-2"}
    judged = judge_batched(frame(rows), frame(solo_block([A])), width=4, prefill="together")
    assert judged.verdict == "invalid"
    assert "1 of 8 replies are invalid: cut" in judged.reasons[0]


def test_only_the_probe_is_compared_beside_neighbours() -> None:
    rows = probe_block([A, A], [B, B, diverged(B, 3)], "neighbours")
    judged = judge_batched(frame(rows), frame(solo_block([A])), width=4, prefill="together")
    assert (judged.verdict, judged.n["replies"]) == ("exact", 2)


def test_a_slot_that_was_busy_with_something_else_spoils_a_block() -> None:
    judged = judged_copies(busy_per_decode=4.9)
    assert judged.verdict == "invalid"
    assert "4.90 slots busy a pass at width 4" in judged.reasons[0]


def test_token_ids_that_differ_only_in_logprobs_that_are_not_sent_are_equal() -> None:
    bare = without_logprobs(without_ids(A))
    judged = judged_copies([[bare] * 4], solo=solo_block([bare]))
    assert judged.verdict == "exact"
    assert judged.observable in ("token ids", "text")


# ---------------------------------------------------------------------------------------- width 1


def test_width_1_is_compared_with_another_reply_than_itself() -> None:
    one = frame([make_row(A)])
    assert judge_width_1(one, one).verdict == "unobservable"
    three = frame(solo_block([A]))
    judged = judge_width_1(three, three)
    assert (judged.verdict, judged.n["replies"]) == ("exact", 2)


def test_width_1_that_lacks_a_prompt_is_no_control() -> None:
    judged = judge_width_1(frame(solo_block([A], parallel=4)), frame(solo_block([A, B])))
    assert judged.verdict == "invalid"
    assert "1 prompts have no reply, code-1 among them" in judged.reasons


def test_width_1_on_more_slots_that_moves_the_answer_differs() -> None:
    wide = frame(solo_block([shifted(A, 3, 0.125)], parallel=4))
    judged = judge_width_1(wide, frame(solo_block([A])))
    assert judged.verdict == "differs"
    assert judge_width_1(frame(solo_block([A], parallel=4)), frame(solo_block([A]))).verdict == (
        "exact"
    )


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([*solo_block([A], 2, parallel=4), invalid_row("reset", parallel=4, round=2)], "reset"),
        (solo_block([A], parallel=4, cache_n=9, prompt_n=11), "from the cache although"),
        (solo_block([A], parallel=4, prefill="apart"), "not prefilled apart"),
        (solo_block([A], 2, parallel=4), "2 of 3 rounds"),
        (solo_block([A], parallel=4, busy_per_decode=1.5), "company that was not of their round"),
    ],
)
def test_width_1_that_cannot_be_believed_is_no_control(rows: list[Row], reason: str) -> None:
    judged = judge_width_1(frame(rows), frame(solo_block([A])), rounds=3)
    assert judged.verdict == "invalid"
    assert any(reason in found for found in judged.reasons)


def test_a_judgement_is_plain_values() -> None:
    document = dataclasses.asdict(judged_copies([[A, A, A, diverged(A, 3)]]))
    assert json.loads(json.dumps(document)) == document
