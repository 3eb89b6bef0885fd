from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from made_cells import cost_rows, study
from routewise.price import BY_DEFINITION, MIN_SAMPLES, PAIRED, UNPAIRED, price_rows

MODEL = "small-q4_k_m"
WIDTHS = (1, 2, 4, 8)
BACKENDS = {"cpu-stock": "cpu", "cpu-exact": "cpu"}


def costs(**options: Any) -> pd.DataFrame:
    routes = {"cpu-stock": (4.0, 6.0, 8.0, 10.0), "cpu-exact": (4.0, 6.0, 10.0, 15.0)}
    rows = cost_rows(routes, WIDTHS, **options)
    return rows.assign(cell="cost.parquet", cell_valid=True, fingerprint="f")


def row_of(rows: list[dict[str, Any]], route: str, width: int) -> dict[str, Any]:
    return next(row for row in rows if (row["route"], row["width"]) == (route, width))


def test_ratios_are_recovered_through_a_drift_that_all_samples_share() -> None:
    rows = price_rows(study(), costs(noise=0.0, contended=0.2), BACKENDS)
    assert [row["ratio"] for row in rows if row["route"] == "cpu-stock"] == pytest.approx(
        [1.0, 1.5, 2.0, 2.5], rel=1e-6
    )
    exact = row_of(rows, "cpu-exact", 8)
    assert exact["ratio"] == pytest.approx(3.75, rel=1e-6)
    assert exact["ratio_to_reference"] == pytest.approx(1.5, rel=1e-6)
    assert exact["ratio_method"] == PAIRED
    assert row_of(rows, "cpu-stock", 8)["ratio_to_reference"] is None
    assert row_of(rows, "cpu-stock", 1)["ratio_method"] == BY_DEFINITION


def test_contended_samples_are_counted_and_decide_nothing() -> None:
    rows = costs(noise=0.0, contended=0.0)
    quiet = row_of(price_rows(study(), rows, BACKENDS), "cpu-exact", 4)
    slow = rows.copy()
    hit = (slow["width"] == 4) & (slow["route"] == "cpu-exact") & (slow["round"] < 20)
    slow.loc[hit, "pass_ns"] *= 50
    spoiled = row_of(price_rows(study(), slow, BACKENDS), "cpu-exact", 4)
    assert spoiled["ratio"] != pytest.approx(quiet["ratio"])
    slow.loc[hit, "contended"] = True
    marked = row_of(price_rows(study(), slow, BACKENDS), "cpu-exact", 4)
    assert marked["ratio"] == pytest.approx(quiet["ratio"])
    assert (marked["n"], marked["n_contended"]) == (10, 20)


def test_too_few_quiet_samples_leave_a_row_that_says_so() -> None:
    rows = costs(noise=0.0, contended=0.0)
    rows.loc[(rows["width"] == 8) & (rows["round"] >= MIN_SAMPLES - 1), "contended"] = True
    row = row_of(price_rows(study(), rows, BACKENDS), "cpu-exact", 8)
    assert row["ratio"] is None
    assert row["ratio_to_reference"] is None
    assert row["n"] == MIN_SAMPLES - 1
    assert "too few quiet samples" in row["note"]


def test_without_common_rounds_medians_of_one_job_are_compared_and_said_to_be_unpaired() -> None:
    rows = costs(noise=0.0, contended=0.0)
    rows.loc[(rows["width"] == 8) & (rows["round"] < 15), "contended"] = True
    rows.loc[(rows["width"] == 1) & (rows["round"] >= 15), "contended"] = True
    row = row_of(price_rows(study(), rows, BACKENDS), "cpu-stock", 8)
    assert row["ratio_method"] == UNPAIRED
    assert row["ratio_interval"] is None
    assert row["n_pairs"] == 0


def test_no_timing_is_compared_across_jobs() -> None:
    rows = costs(noise=0.0, contended=0.0)
    rows.loc[rows["width"] == 8, "cell"] = "another.parquet"
    row = row_of(price_rows(study(), rows, BACKENDS), "cpu-stock", 8)
    assert row["ratio"] is None
    assert row["n"] == 30


def test_an_invalid_cell_gives_no_price() -> None:
    rows = costs().assign(cell_valid=False)
    row = row_of(price_rows(study(), rows, BACKENDS), "cpu-exact", 8)
    assert (row["ratio"], row["pass_ms"], row["n"], row["n_invalid"]) == (None, None, 0, 30)
    assert "invalid" in row["note"]


def test_what_the_study_asks_for_has_a_row_even_when_it_was_not_measured() -> None:
    rows = price_rows(study(), costs().iloc[:0], BACKENDS)
    assert len(rows) == 8
    assert {row["note"] for row in rows} == {"not measured"}
    assert price_rows({"sweeps": {}}, costs(), BACKENDS) == []


@pytest.mark.parametrize(("backend", "absolute"), [("cpu", False), ("", False), ("cuda", True)])
def test_a_pass_time_is_absolute_only_off_the_cpu(backend: str, absolute: bool) -> None:
    rows = price_rows(study(), costs(), {"cpu-stock": backend})
    assert row_of(rows, "cpu-stock", 4)["absolute"] is absolute


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    rows = costs(noise=0.0, contended=0.0)
    rows["pass_ns"] = rows["round"] * 1_000_000 + 1_000_000
    row = row_of(price_rows(study(), rows, BACKENDS), "cpu-stock", 1)
    assert row["pass_ms"] == pytest.approx(15.5)
    assert row["spread"] == pytest.approx(14.5 / 15.5)
