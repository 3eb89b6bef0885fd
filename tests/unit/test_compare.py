"""Rows compared bit by bit: what differs is found wherever it is, and what is not a number too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.compare import (
    Row,
    compare_rows,
    kl_divergence,
    log_softmax,
    row_digest,
    summarise_row,
    top_k,
)
from scipy.special import log_softmax as scipy_log_softmax
from scipy.special import rel_entr, softmax

SIZES = st.sampled_from([2, 3, 63, 64, 65, 127, 128, 500, 1000])
LARGEST = float(np.finfo(np.float32).max)
#: Quiet, signalling, negative and full-payload NaN, and both infinities.
NOT_NUMBERS = [0x7FC00000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000]


def row_of(seed: int, size: int) -> Row:
    """Return logits as an engine makes them: finite, of both signs."""
    return np.random.default_rng(seed).normal(0, 5, size).astype(np.float32)


def with_bits(row: Row, place: int, bits: int) -> Row:
    changed = row.copy()
    changed.view(np.uint32)[place] = bits
    return changed


def stable_top(row: Row, k: int) -> list[int]:
    """Return what top_k promises, by a plain stable sort."""
    return sorted(range(row.size), key=lambda i: -float(row[i]))[:k]


# ------------------------------------------------------------------------------------ one bit


@given(seed=st.integers(0, 999), size=SIZES, place=st.integers(0, 10**6), bit=st.integers(0, 22))
def test_one_flipped_mantissa_bit_is_found_anywhere(
    seed: int, size: int, place: int, bit: int
) -> None:
    plain = row_of(seed, size)
    place %= size
    replay = with_bits(plain, place, int(plain.view(np.uint32)[place]) ^ (1 << bit))
    found = compare_rows(plain, replay)
    assert found.valid
    assert found.bits_equal is False
    assert found.n_differing == 1
    assert found.n_zero_sign == 0
    assert found.logit_delta_max_id == place
    assert found.logit_delta_max == abs(float(replay[place]) - float(plain[place])) > 0
    assert row_digest(plain) != row_digest(replay)
    # and the other way round
    assert compare_rows(replay, plain).n_differing == 1


def test_every_bit_of_every_place_of_a_row_is_found() -> None:
    """Exhaustive for one row: 66 entries, 23 mantissa bits and the sign."""
    plain = row_of(3, 66)
    digests = {row_digest(plain)}
    for place in range(plain.size):
        for bit in [*range(23), 31]:
            replay = with_bits(plain, place, int(plain.view(np.uint32)[place]) ^ (1 << bit))
            found = compare_rows(plain, replay)
            assert (found.bits_equal, found.n_differing) == (False, 1), (place, bit)
            digests.add(row_digest(replay))
    assert len(digests) == 1 + 66 * 24


@given(seed=st.integers(0, 999), size=SIZES)
def test_equal_rows_are_equal(seed: int, size: int) -> None:
    row = row_of(seed, size)
    found = compare_rows(row, row.copy())
    assert (found.valid, found.bits_equal, found.n_differing) == (True, True, 0)
    assert (found.logit_delta_max, found.argmax_flip, found.kl_nats) == (0.0, False, 0.0)
    assert row_digest(row) == row_digest(row.copy())


@given(seed=st.integers(0, 999), n_rows=st.integers(2, 6), size=SIZES, data=st.data())
def test_swapped_rows_are_found(seed: int, n_rows: int, size: int, data: st.DataObject) -> None:
    rows = row_of(seed, n_rows * size).reshape(n_rows, size)
    first, second = data.draw(
        st.lists(st.integers(0, n_rows - 1), min_size=2, max_size=2, unique=True)
    )
    swapped = rows.copy()
    swapped[[first, second]] = rows[[second, first]]
    equal = [compare_rows(a, b).bits_equal for a, b in zip(rows, swapped, strict=True)]
    assert equal == [i not in (first, second) for i in range(n_rows)]


def test_rows_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of"):
        compare_rows(row_of(1, 64), row_of(1, 63))


def test_a_view_into_a_larger_buffer_compares_and_digests_like_its_copy() -> None:
    rows = row_of(7, 300).reshape(3, 100)
    assert compare_rows(rows[1], rows[1].copy()).bits_equal is True
    assert row_digest(rows[:, 5]) == row_digest(rows[:, 5].copy())


# ----------------------------------------------------------------------- NaN, infinity and zeros


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bits", NOT_NUMBERS)
@pytest.mark.parametrize("size", [2, 64, 1000])
def test_a_row_with_a_nan_or_infinity_is_invalid_and_equals_nothing(bits: int, size: int) -> None:
    good = row_of(1, size)
    for place in (0, size // 2, size - 1):
        bad = with_bits(good, place, bits)
        for plain, replay in ((bad, bad), (bad, bad.copy()), (bad, good), (good, bad)):
            found = compare_rows(plain, replay)
            assert not found.valid
            assert found.bits_equal is None
            assert found.n_differing is None
            assert found.argmax_flip is None
            assert found.kl_nats is None
        assert not summarise_row(bad, 2).valid
        assert summarise_row(bad, 2).n_nonfinite == 1


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinities_of_both_signs_do_not_cancel() -> None:
    row = row_of(1, 100)
    row[3], row[4] = np.inf, -np.inf
    assert summarise_row(row, 2).n_nonfinite == 2
    assert not compare_rows(row, row.copy()).valid


def test_nan_payloads_are_told_apart_by_the_digest() -> None:
    row = row_of(1, 64)
    digests = {row_digest(with_bits(row, 9, bits)) for bits in NOT_NUMBERS}
    assert len(digests) == len(NOT_NUMBERS)


def test_a_plain_row_known_to_be_invalid_is_never_equal() -> None:
    row = row_of(1, 64)
    assert compare_rows(row, row, plain_valid=False).bits_equal is None


@given(seed=st.integers(0, 999), size=SIZES, data=st.data())
def test_zeros_of_either_sign_differ_and_are_counted(
    seed: int, size: int, data: st.DataObject
) -> None:
    plain = row_of(seed, size)
    places = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=5))
    plain[list(places)] = 0.0
    replay = plain.copy()
    replay[list(places)] = -0.0
    found = compare_rows(plain, replay)
    assert (found.valid, found.bits_equal) == (True, False)
    assert found.n_differing == found.n_zero_sign == len(places)
    assert (found.logit_delta_max, found.argmax_flip) == (0.0, False)
    assert row_digest(plain) != row_digest(replay)


def test_a_real_difference_is_not_counted_as_a_sign_of_zero() -> None:
    plain = np.array([0.0, 1.0, 0.0, 2.0], np.float32)
    replay = np.array([-0.0, 1.5, 0.0, 2.0], np.float32)
    found = compare_rows(plain, replay)
    assert (found.n_differing, found.n_zero_sign) == (2, 1)
    # the smallest subnormal is no zero
    found = compare_rows(plain, np.array([1e-45, 1.0, 0.0, 2.0], np.float32))
    assert (found.n_differing, found.n_zero_sign) == (1, 0)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, LARGEST / 2])
def test_large_finite_logits_are_valid(value: float) -> None:
    """Their float32 sum overflows; they are numbers all the same."""
    row = np.full(1000, value, np.float32)
    with np.errstate(over="ignore"):
        assert not np.isfinite(row.sum(dtype=np.float32))
    assert compare_rows(row, row.copy()).bits_equal is True
    assert summarise_row(row, 2).valid
    moved = with_bits(row, 500, int(row.view(np.uint32)[500]) ^ 1)
    found = compare_rows(row, moved)
    assert (found.valid, found.n_differing) == (True, 1)
    assert found.kl_nats is not None
    assert np.isfinite(found.kl_nats)


# ---------------------------------------------------------------------- argmax, top k and margin


@given(
    values=st.lists(st.sampled_from([-3.0, -0.0, 0.0, 0.5, 1.0, 7.25]), min_size=2, max_size=400),
    k=st.integers(1, 30),
)
def test_top_k_with_ties_is_that_of_a_stable_sort(values: list[float], k: int) -> None:
    row = np.array(values, np.float32)
    assert top_k(row, k).tolist() == stable_top(row, k)


@given(seed=st.integers(0, 999), size=SIZES, k=st.integers(1, 20))
def test_top_k_is_that_of_a_stable_sort(seed: int, size: int, k: int) -> None:
    row = row_of(seed, size)
    assert top_k(row, k).tolist() == stable_top(row, k)


@pytest.mark.parametrize("size", [2, 64, 65, 640, 1000])
def test_top_k_of_a_constant_row_is_its_first_ids(size: int) -> None:
    row = np.full(size, 1.5, np.float32)
    assert top_k(row, 10).tolist() == list(range(min(10, size)))


@pytest.mark.parametrize("place", [0, 63, 64, 639, 640, 699])
def test_top_k_looks_beyond_the_last_whole_block(place: int) -> None:
    row = row_of(1, 700)
    row[place] = 100
    assert top_k(row, 3)[0] == place
    assert top_k(row, 3).tolist() == stable_top(row, 3)


def test_top_k_where_all_of_them_share_a_block() -> None:
    row = row_of(1, 64 * 30)
    row[128:140] = np.arange(100, 112)
    assert top_k(row, 10).tolist() == list(range(139, 129, -1))


def test_top_k_of_more_than_there_are_is_the_whole_row() -> None:
    row = row_of(1, 5)
    assert top_k(row, 9).tolist() == stable_top(row, 5)


@given(seed=st.integers(0, 999), size=SIZES, k=st.integers(1, 12))
def test_a_summary_says_what_a_sort_says(seed: int, size: int, k: int) -> None:
    row = row_of(seed, size)
    summary = summarise_row(row, k)
    order = stable_top(row, size)
    assert summary.valid
    assert summary.token_id == order[0]
    assert summary.top_ids.tolist() == order[:k]
    assert summary.top_logits.tolist() == row[order[:k]].tolist()
    assert summary.margin == float(row[order[0]] - row[order[1]])
    assert summary.digest == row_digest(row)
    assert len(summary.digest) == 16


def test_a_summary_keeps_no_view_of_the_row() -> None:
    """The engine writes the next pass where this row lies."""
    row = row_of(1, 1000)
    summary = summarise_row(row, 3)
    kept = summary.top_logits.tolist()
    row[:] = 0
    assert summary.top_logits.tolist() == kept


def test_a_nan_is_never_the_chosen_token() -> None:
    row = row_of(1, 100)
    best = int(row.argmax())
    worst = int(row.argmin())
    assert summarise_row(with_bits(row, worst, 0x7FC00000), 2).token_id == best
    assert summarise_row(with_bits(row, best, 0x7FC00000), 2).token_id != best


@pytest.mark.parametrize(
    ("plain", "replay", "flips"),
    [
        ([1, 2, 3], [1, 2, 2.5], False),
        ([1, 2, 3], [1, 3.5, 3], True),
        ([1, 3, 3], [1, 3, 3.5], True),  # a tie goes to the lowest id
        ([1, 3.5, 3], [1, 3, 3], False),
    ],
)
def test_an_argmax_flip_is_a_change_of_the_lowest_best_id(
    plain: list[float], replay: list[float], flips: bool
) -> None:
    found = compare_rows(np.array(plain, np.float32), np.array(replay, np.float32))
    assert found.argmax_flip is flips


# ----------------------------------------------------------------------------------------- KL


@given(seed=st.integers(0, 999), size=SIZES, scale=st.sampled_from([1e-3, 0.1, 1.0, 30.0]))
def test_kl_is_that_of_scipy(seed: int, size: int, scale: float) -> None:
    plain = row_of(seed, size)
    noise = np.random.default_rng(seed + 1).normal(0, scale, size)
    replay = (plain + noise).astype(np.float32)
    p, q = (softmax(row.astype(np.float64)) for row in (plain, replay))
    expected = float(rel_entr(p, q).sum())
    assert kl_divergence(plain, replay) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert compare_rows(plain, replay).kl_nats == kl_divergence(plain, replay)


def test_kl_is_directed_and_zero_of_itself() -> None:
    plain, replay = (np.array(row, np.float32) for row in ([0, 0, 0], [5, 0, 0]))
    assert kl_divergence(plain, plain) == 0.0
    assert kl_divergence(plain, replay) != pytest.approx(kl_divergence(replay, plain), rel=0.01)


def test_log_softmax_is_that_of_scipy() -> None:
    row: npt.NDArray[np.float32] = row_of(2, 1000) * 20
    expected = scipy_log_softmax(row.astype(np.float64))
    np.testing.assert_allclose(log_softmax(row), expected, rtol=1e-12)
