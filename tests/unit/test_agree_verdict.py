"""Verdicts on two routes, from made-up replies aligned as real ones are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from made_replies import (
    Answer,
    diverged,
    flipped_bit,
    make_answer,
    make_row,
    only_text,
    replies_table,
    shifted,
    with_status,
    without_ids,
    without_logprobs,
)
from routewise.agree import agree_rows
from routewise.agree_verdict import judge_agree
from routewise.serve_verdict import witness_of

A, B = make_answer(1, 40), make_answer(2, 40)


def aligned(
    left: Sequence[Answer], right: Sequence[Answer], match: str = "ids", same_weights: bool = True
) -> pd.DataFrame:
    a, b = (
        replies_table([make_row(answer, prompt_index=n) for n, answer in enumerate(answers)])
        for answers in (left, right)
    )
    return agree_rows(a, b, same_weights, match).to_pandas()


def test_equal_tokens_and_bits_are_exact() -> None:
    judged = judge_agree(aligned([A, B], [A, B]), prompts=["prose-0", "code-1"])
    assert (judged.verdict, judged.observable, judged.reasons) == ("exact", "chosen logprob", [])
    assert (judged.n["positions"], judged.n["differing"]) == (80, 0)
    assert judged.worst is None


def test_one_bit_is_a_difference_with_its_place_and_both_margins() -> None:
    judged = judge_agree(aligned([A, B], [A, flipped_bit(B, 17, 0)]))
    assert judged.verdict == "differs"
    assert judged.first_difference is not None
    assert judged.first_difference["position"] == 17
    assert judged.first_difference["margin_a"] > 0
    assert judged.worst is not None
    assert judged.worst["position"] == 17


def test_a_small_distance_is_no_pass_and_a_large_one_no_failure_of_its_own() -> None:
    small = judge_agree(aligned([A], [shifted(A, 0, 0.001)]))
    large = judge_agree(aligned([A], [shifted(A, 0, 0.5)]))
    assert small.verdict == large.verdict == "differs"
    assert small.measures["agreement"]["all"]["dlogp_max"] == pytest.approx(0.001, abs=1e-6)


def test_another_token_is_a_difference_and_nothing_counts_behind_it() -> None:
    judged = judge_agree(aligned([A], [diverged(A, 10)]))
    assert judged.verdict == "differs"
    assert (judged.n["positions"], judged.n["differing"], judged.n["flips"]) == (11, 1, 1)
    assert judged.first_difference is not None
    apart = judged.first_difference["divergence"]
    assert apart["position"] == 10
    assert apart["margin_a"] is not None
    assert apart["token_id_a"] != apart["token_id_b"]


def in_copies(left: Sequence[Answer], right: Sequence[Answer]) -> pd.DataFrame:
    """Return one prompt's copies of two routes, aligned."""
    a, b = (
        replies_table([make_row(one, copy=copy, width=4) for copy, one in enumerate(answers)])
        for answers in (left, right)
    )
    return agree_rows(a, b, True, "ids").to_pandas()


def witnesses_of(busy: float | None = 3.9) -> dict[str, Any]:
    rows = replies_table([make_row(A, width=4, busy_per_decode=busy)]).to_pandas()
    return {name: witness_of(rows, 4) for name in ("a", "b")}


def test_a_wider_claim_without_two_witnesses_is_unobservable() -> None:
    equal, moved = in_copies([A] * 4, [A] * 4), in_copies([A] * 4, [A, A, A, shifted(A, 2, 0.5)])
    assert judge_agree(equal, width=4, witnesses=witnesses_of()).verdict == "exact"
    no_rounds = witness_of(replies_table([]).to_pandas(), 4)
    for witnesses in (None, {"a": witnesses_of()["a"]}, witnesses_of() | {"b": no_rounds}):
        assert judge_agree(equal, width=4, witnesses=witnesses).verdict == "unobservable"
        assert judge_agree(moved, width=4, witnesses=witnesses).verdict == "differs"


def test_copies_of_two_routes_must_mostly_be_together_to_be_equal() -> None:
    equal = in_copies([A] * 4, [A] * 4)
    judged = judge_agree(equal, width=4, witnesses=witnesses_of(1.26))
    assert judged.verdict == "unobservable"
    assert "on average 1.26 of 4 slots" in judged.reasons[0]


def test_a_wider_claim_needs_all_copies() -> None:
    judged = judge_agree(in_copies([A] * 4, [A]), width=4, witnesses=witnesses_of())
    assert judged.verdict == "invalid"
    assert "prose-0 was compared in 1 of 4 copies" in judged.reasons


def test_sides_that_are_one_measurement_show_nothing() -> None:
    judged = judge_agree(aligned([A], [A]), unobservable="they are one")
    assert (judged.verdict, judged.reasons) == ("unobservable", ["they are one"])
    judged = judge_agree(aligned([A], [A]), unobservable="one", invalid_reasons=["a: cut"])
    assert judged.verdict == "invalid"


def test_copies_of_one_prompt_count_its_positions_once() -> None:
    a, b = (
        replies_table([make_row(answer, copy=copy, width=2) for copy, answer in enumerate(pair)])
        for pair in ((A, A), (A, shifted(A, 30, 0.5)))
    )
    judged = judge_agree(agree_rows(a, b, True, "ids").to_pandas())
    assert (judged.n["positions"], judged.n["differing"], judged.n["replies"]) == (40, 10, 2)


@pytest.mark.parametrize(
    ("change", "match", "observable"),
    [(without_logprobs, "ids", "token ids"), (only_text, "text", "text")],
)
def test_tokens_that_agree_are_exact_at_their_observable_only(
    change: Any, match: str, observable: str
) -> None:
    judged = judge_agree(aligned([A], [change(A)], match))
    assert (judged.verdict, judged.observable) == ("exact", observable)
    assert "lack a logprob" in judged.reasons[0]


def test_routes_matched_by_bytes_compare_their_logprobs() -> None:
    judged = judge_agree(aligned([A], [without_ids(A)], "text"))
    assert (judged.verdict, judged.observable) == ("exact", "chosen logprob")


def test_one_missing_logprob_weakens_the_whole_claim_and_a_broken_one_spoils_it() -> None:
    judged = judge_agree(aligned([A], [with_status(A, 3, "null")]))
    assert (judged.verdict, judged.observable) == ("exact", "token ids")
    assert "1 of 40 positions lack a logprob" in judged.reasons[0]
    for status in ("nan", "not_float32"):
        judged = judge_agree(aligned([A], [with_status(A, 3, status)]))
        assert judged.verdict == "invalid"


def test_other_weights_are_said_with_any_verdict() -> None:
    for other in (A, shifted(A, 0, 0.5)):
        judged = judge_agree(aligned([A], [other], same_weights=False))
        assert "not arithmetic only" in judged.reasons
        assert judged.measures["agreement"]["arithmetic_only"] is False


def test_nothing_compared_is_never_exact() -> None:
    nothing = aligned([A], [A]).iloc[:0]
    assert judge_agree(nothing).verdict == "invalid"
    judged = judge_agree(nothing, unsupported="npu: no logprobs at width 4")
    assert (judged.verdict, judged.reasons) == ("unsupported", ["npu: no logprobs at width 4"])
    judged = judge_agree(aligned([A], [A]), prompts=["prose-0", "code-1"])
    assert judged.verdict == "invalid"
    assert "code-1" in judged.reasons[0]
    judged = judge_agree(aligned([A], [A]), invalid_reasons=["a: 1 of 3 replies are invalid"])
    assert judged.verdict == "invalid"


@pytest.mark.parametrize(
    ("busy", "equal", "differing"),
    [(3.9, "exact", "differs"), (1.0, "invalid", "invalid"), (None, "unobservable", "differs")],
)
def test_a_wider_claim_needs_the_witness_of_both_routes(
    busy: float | None, equal: str, differing: str
) -> None:
    shared = replies_table([make_row(A, width=4, busy_per_decode=3.9)]).to_pandas()
    other = replies_table([make_row(A, width=4, busy_per_decode=busy)]).to_pandas()
    witnesses = {"a": witness_of(shared, 4), "b": witness_of(other, 4)}
    for right, verdict in ((A, equal), (shifted(A, 2, 0.5), differing)):
        rows = in_copies([A] * 4, [A, A, A, right])
        assert judge_agree(rows, width=4, witnesses=witnesses).verdict == verdict
    assert judge_agree(aligned([A], [A]), width=1, witnesses=witnesses).verdict == "exact"
