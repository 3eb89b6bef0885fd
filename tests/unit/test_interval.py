from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.interval import (
    CLOPPER_PEARSON,
    ONE_SIDED,
    detectable_share,
    median_interval,
    share_interval,
)
from scipy.stats import binom, binomtest

counts = st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts)
def test_k_of_n_is_scipys_clopper_pearson_and_0_of_n_the_one_sided_bound(
    count: tuple[int, int],
) -> None:
    k, n = count
    interval = share_interval(k, n)
    assert interval is not None
    if k == 0:
        wanted = binomtest(k, n, alternative="less").proportion_ci(0.95, method="exact")
        assert interval["method"] == ONE_SIDED
    else:
        wanted = binomtest(k, n).proportion_ci(0.95, method="exact")
        assert interval["method"] == CLOPPER_PEARSON
    assert interval["low"] == pytest.approx(wanted.low, abs=1e-9)
    assert interval["high"] == pytest.approx(wanted.high, abs=1e-9)


@given(st.integers(1, 100_000))
def test_a_share_that_is_just_detectable_escapes_with_five_percent(n: int) -> None:
    share = detectable_share(n)
    assert share is not None
    assert binom.pmf(0, n, share) == pytest.approx(0.05)


def test_an_interval_says_what_was_sampled() -> None:
    plain, replies = share_interval(0, 9), share_interval(0, 9, unit="replies")
    assert plain is not None
    assert replies is not None
    assert "unit" not in plain
    assert replies == plain | {"unit": "replies", "quantity": "share of differing replies"}


def test_nothing_measured_has_no_interval() -> None:
    assert share_interval(0, 0) is None
    assert detectable_share(0) is None
    assert median_interval([]) is None


@pytest.mark.parametrize(("k", "n"), [(-1, 3), (4, 3)])
def test_a_count_beyond_its_n_is_refused(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="0 <= k <= n"):
        share_interval(k, n)


@pytest.mark.parametrize(("n", "known"), [(5, False), (6, True)])
def test_a_median_has_an_interval_from_six_values_on(n: int, known: bool) -> None:
    assert (median_interval(range(n)) is not None) is known


@given(st.integers(6, 200))
def test_the_interval_of_a_median_covers_it_often_enough_and_not_much_too_often(n: int) -> None:
    bounds = median_interval(np.arange(1, n + 1))
    assert bounds is not None
    rank = int(bounds[0])
    assert bounds[1] == n + 1 - rank
    assert 1 - 2 * binom.cdf(rank - 1, n, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(rank, n, 0.5) < 0.95


def test_a_median_of_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        median_interval([1.0, float("nan")])
