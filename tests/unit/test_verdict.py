from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_cells import plain_rows, replay_rows
from routewise import verdict
from routewise.verdict import (
    DIFFERS,
    DIFFERS_SOMEWHERE,
    EXACT,
    INVALID,
    UNOBSERVABLE,
    UNSUPPORTED,
    as_expected,
    expectation_of,
    judge_plain_twice,
    judge_reference,
    judge_replay,
    judge_somewhere,
    witness_reasons,
)

PLAIN = plain_rows(n_prompts=3, n_steps=19)
VARIANTS = ("w1", "w2", "w3", "w4", "w8", "w16", "ragged", "rollback", "neighbours")
EQUAL = {variant: replay_rows(variant, PLAIN) for variant in VARIANTS}
variants = st.sampled_from(VARIANTS)
places = st.integers(0, len(EQUAL["w4"]) - 1)


def flip_a_bit(rows: pd.DataFrame, place: int, delta: float = 0.0) -> pd.DataFrame:
    """Return rows of which one differs in a single logit."""
    rows = rows.copy()
    index = rows.index[place]
    rows.at[index, "bits_equal"] = False
    rows.at[index, "n_differing"] = 1
    rows.at[index, "logit_delta_max"] = delta
    rows.at[index, "replay_hash"] = b"another 128 bits"
    return rows


def break_a_row(rows: pd.DataFrame, place: int) -> pd.DataFrame:
    """Return rows of which one holds a NaN, as a cell records it."""
    rows = rows.astype({"bits_equal": object, "argmax_flip": object})
    index = rows.index[place]
    rows.at[index, "status"] = "invalid"
    for column in ("bits_equal", "argmax_flip", "n_differing", "logit_delta_max", "kl_nats"):
        rows.at[index, column] = None
    return rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_rows_that_really_ran_are_exact(variant: str) -> None:
    judged = judge_replay(variant, EQUAL[variant], PLAIN)
    assert (judged.verdict, judged.reasons) == (EXACT, [])
    assert judged.n["positions"] == judged.n["asked"] == 57
    assert judged.n["differing"] == 0
    assert judged.worst is None
    assert judged.first_difference is None


@given(variants, places)
def test_one_differing_bit_anywhere_is_never_exact(variant: str, place: int) -> None:
    rows = flip_a_bit(EQUAL[variant], place)
    judged = judge_replay(variant, rows, PLAIN)
    assert judged.verdict == DIFFERS
    assert judged.n["differing"] == 1
    assert judged.first_difference is not None
    assert judged.first_difference["kv_position"] == rows.iloc[place]["kv_position"]
    assert judged.first_difference["prompt_id"] == rows.iloc[place]["prompt_id"]


@given(variants, places)
def test_one_row_without_an_answer_makes_the_cell_invalid_and_is_not_counted(
    variant: str, place: int
) -> None:
    judged = judge_replay(variant, break_a_row(EQUAL[variant], place), PLAIN)
    assert judged.verdict == INVALID
    assert "NaN" in judged.reasons[0]
    assert (judged.n["positions"], judged.n["invalid"]) == (56, 1)


@given(variants, places)
def test_a_dropped_row_is_never_exact(variant: str, place: int) -> None:
    rows = EQUAL[variant]
    judged = judge_replay(variant, rows.drop(rows.index[place]), PLAIN)
    assert judged.verdict == INVALID
    assert any("missing" in reason for reason in judged.reasons)


def test_a_row_that_stands_there_twice_or_is_not_the_plain_cells_is_invalid() -> None:
    rows = EQUAL["w4"]
    twice = judge_replay("w4", pd.concat([rows, rows.iloc[:1]]), PLAIN)
    assert twice.verdict == INVALID
    assert "twice" in twice.reasons[0]
    foreign = judge_replay("w4", rows, PLAIN[PLAIN["step"] < 19])
    assert foreign.verdict == INVALID
    assert "none of the plain cell's" in foreign.reasons[0]


def test_an_empty_cell_and_one_without_a_plain_cell_are_not_exact() -> None:
    empty = EQUAL["w4"].iloc[:0]
    assert judge_replay("w4", empty, PLAIN).verdict == INVALID
    assert judge_replay("w4", empty, PLAIN.iloc[:0]).verdict == INVALID
    assert judge_replay("w4", EQUAL["w4"], None).verdict == INVALID


def test_what_the_job_says_against_its_cell_makes_it_invalid() -> None:
    judged = judge_replay("w4", EQUAL["w4"], PLAIN, ["asked for 2 threads, read back 4"])
    assert judged.verdict == INVALID
    assert judged.reasons == ["asked for 2 threads, read back 4"]


def test_an_unsupported_variant_is_no_pass_and_rows_overrule_it() -> None:
    empty = EQUAL["rollback"].iloc[:0]
    judged = judge_replay("rollback", empty, PLAIN, unsupported="the cache cannot be cut")
    assert judged.verdict == UNSUPPORTED
    assert judge_replay("w4", EQUAL["w4"], PLAIN, unsupported="x").verdict == EXACT


def test_rows_that_contradict_their_hashes_are_invalid() -> None:
    rows = EQUAL["w4"].copy()
    rows.at[rows.index[5], "replay_hash"] = b"another 128 bits"
    assert judge_replay("w4", rows, PLAIN).verdict == INVALID
    rows = flip_a_bit(EQUAL["w4"], 5)
    rows["replay_hash"] = rows["plain_hash"]
    assert judge_replay("w4", rows, PLAIN).verdict == INVALID


def test_a_zero_of_the_other_sign_differs_and_is_counted_apart() -> None:
    rows = flip_a_bit(EQUAL["w4"], 7)
    rows.at[rows.index[7], "n_zero_sign"] = 1
    judged = judge_replay("w4", rows, PLAIN)
    assert judged.verdict == DIFFERS
    assert judged.n["zero_sign_only"] == 1
    assert judged.worst is not None
    assert judged.worst["logit_delta_max"] == 0.0


def test_the_worst_row_and_the_first_are_told_apart() -> None:
    rows = flip_a_bit(flip_a_bit(EQUAL["w4"], 2, delta=0.25), 11, delta=4.0)
    judged = judge_replay("w4", rows, PLAIN)
    assert judged.worst is not None
    assert judged.first_difference is not None
    assert judged.worst["kv_position"] == rows.iloc[11]["kv_position"]
    assert judged.first_difference["kv_position"] == rows.iloc[2]["kv_position"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("claimed", VARIANTS)
def test_rows_of_one_variant_are_no_witness_of_another(variant: str, claimed: str) -> None:
    reasons = witness_reasons(claimed, EQUAL[variant])
    # Neighbours carry other tokens in every pass and so do rejected drafts; both keep the promise
    # that `rollback` makes. A schedule of changing widths may show it with drafts beside it.
    kept = {("neighbours", "rollback"), ("rollback", "neighbours"), ("rollback", "ragged")}
    # 19 tokens in passes of N end in a shorter pass, so more than one width really ran.
    kept |= {(f"w{width}", "ragged") for width in (2, 3, 4, 8, 16)}
    assert bool(reasons) == (variant != claimed and (variant, claimed) not in kept)


@given(st.sampled_from(["w2", "w3", "w4", "w8", "w16"]), st.integers(0, 2))
def test_a_narrower_pass_before_the_last_one_is_a_wrong_witness(variant: str, prompt: int) -> None:
    rows = EQUAL[variant].copy()
    first = (rows["prompt_index"] == prompt) & (rows["pass_index"] == 0)
    # The first pass of one prompt was cut in two, as an engine with a smaller batch would.
    cut = first & (rows["batch_offset"] == 0)
    rows["pass_index"] += 1
    rows.loc[cut, "pass_index"] = 0
    rows.loc[first, "pass_width"] -= 1
    rows.loc[cut, "pass_width"] = 1
    rows["pass_tokens"] = rows["pass_width"]
    assert judge_replay(variant, rows, PLAIN).verdict == INVALID


def test_other_tokens_beside_a_fixed_width_are_a_wrong_witness() -> None:
    rows = EQUAL["w4"].copy()
    rows["pass_tokens"] += 1
    assert judge_replay("w4", rows, PLAIN).verdict == INVALID


def test_a_neighbour_that_is_missing_once_is_a_wrong_witness() -> None:
    rows = EQUAL["neighbours"].copy()
    rows.at[rows.index[4], "pass_tokens"] = 1
    assert judge_replay("neighbours", rows, PLAIN).verdict == INVALID


def test_a_pass_with_fewer_rows_than_its_width_is_a_wrong_witness() -> None:
    rows = EQUAL["w4"]
    plain = PLAIN[~((PLAIN["prompt_index"] == 0) & (PLAIN["step"] == 2))]
    rows = rows[~((rows["prompt_index"] == 0) & (rows["step"] == 2))]
    judged = judge_replay("w4", rows, plain)
    assert judged.verdict == INVALID
    assert "hold together" in judged.reasons[0]


def test_a_width_that_no_prompt_is_long_enough_for_did_not_run() -> None:
    plain = plain_rows(n_prompts=2, n_steps=5)
    judged = judge_replay("w16", replay_rows("w16", plain), plain)
    assert judged.verdict == INVALID
    assert "long enough" in judged.reasons[0]


def test_an_unknown_variant_has_no_witness() -> None:
    with pytest.raises(ValueError, match="sideways"):
        witness_reasons("sideways", EQUAL["w4"])


def test_plain_twice_holds_and_fails_by_flag_and_by_hash() -> None:
    rows = EQUAL["w4"]
    assert judge_plain_twice(rows, PLAIN).verdict == EXACT
    told = rows.copy()
    told.at[told.index[3], "plain_repeat_equal"] = False
    judged = judge_plain_twice(told, PLAIN)
    assert judged.verdict == DIFFERS
    assert judged.n["differing"] == 1
    hashed = rows.copy()
    hashed.at[hashed.index[3], "plain_hash"] = b"another 128 bits"
    assert judge_plain_twice(hashed, PLAIN).verdict == DIFFERS
    assert judge_plain_twice(rows, None).verdict == UNOBSERVABLE
    broken = judge_plain_twice(rows, PLAIN.assign(status="invalid"))
    assert (broken.verdict, broken.n["positions"]) == (INVALID, 0)
    assert judge_plain_twice(rows.iloc[:0], PLAIN).verdict == UNOBSERVABLE


@given(st.integers(0, len(PLAIN) - 1), st.sampled_from(["logits_hash", "token_id"]))
def test_a_reference_that_moved_anywhere_is_found(place: int, column: str) -> None:
    moved = PLAIN.copy()
    moved.at[place, column] = b"another 128 bits" if column == "logits_hash" else 319 + 1
    assert judge_reference(PLAIN, PLAIN.copy()).verdict == EXACT
    judged = judge_reference(PLAIN, moved)
    assert judged.verdict == DIFFERS
    assert judged.first_difference is not None
    assert judged.first_difference["step"] == PLAIN.at[place, "step"]


def test_a_reference_with_other_positions_or_nothing_in_it_does_not_hold() -> None:
    assert judge_reference(PLAIN, PLAIN.iloc[:-1]).verdict == INVALID
    assert judge_reference(PLAIN, PLAIN.iloc[:0]).verdict == INVALID
    assert judge_reference(None, PLAIN).verdict == UNOBSERVABLE
    broken = PLAIN.copy()
    broken.at[0, "status"] = "invalid"
    assert judge_reference(broken, broken).verdict == INVALID


def test_somewhere_wants_one_valid_cell_that_differs() -> None:
    exact = judge_replay("w2", EQUAL["w2"], PLAIN)
    differs = judge_replay("w4", flip_a_bit(EQUAL["w4"], 3, 1.0), PLAIN)
    invalid = judge_replay("w8", flip_a_bit(EQUAL["w8"], 3, 9.0), PLAIN, ["doubt"])
    assert judge_somewhere({1: exact, 2: differs}).verdict == DIFFERS
    assert judge_somewhere({1: exact}).verdict == EXACT
    assert judge_somewhere({1: exact, 2: invalid}).verdict == INVALID
    assert judge_somewhere({}).verdict == UNOBSERVABLE
    judged = judge_somewhere({1: exact, 2: differs, 3: invalid})
    assert judged.n["cells"] == 2
    assert judged.worst is not None
    assert judged.worst["logit_delta_max"] == 1.0


def test_expectations_hold_for_a_route_or_a_variant_or_not_at_all() -> None:
    expect = {"exact": "exact", "stock": DIFFERS_SOMEWHERE, "mixed": {"w8": "differs"}}
    assert expectation_of(expect, "exact", "w2") == EXACT
    assert expectation_of(expect, "mixed", "w8") == DIFFERS
    assert expectation_of(expect, "mixed", "w2") is None
    assert expectation_of(expect, "other", "w2") is None
    assert as_expected(EXACT, DIFFERS_SOMEWHERE) is None
    assert as_expected(EXACT, None) is None
    assert as_expected(INVALID, EXACT) is False


def test_only_exact_is_as_expected_where_exact_is_expected() -> None:
    held = [word for word in verdict.VERDICTS if as_expected(word, EXACT)]
    assert held == [EXACT]
