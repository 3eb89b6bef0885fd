"""The price of a pass: its time by width, as ratios that were measured side by side.

Times are compared only where they were taken in one job, and there round by round: a ratio is
the median over rounds of the quotient of two neighbouring samples, and its interval is the one
between order statistics. Samples taken while others used the machine are counted and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from routewise.interval import LEVEL, median_interval
from routewise.table import COST_SWEEP

#: Below this many quiet samples (or pairs) a median has no 95 % interval, and no ratio is quoted.
MIN_SAMPLES = 6

PAIRED = "median of ratios paired by round"
UNPAIRED = "ratio of medians, unpaired"
BY_DEFINITION = "width 1 to itself"


def price_rows(
    study: Mapping[str, Any], cost: pd.DataFrame, backends: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return one price row per route, model and width that the study's cost sweep names.

    Parameters
    ----------
    study
        The study's declaration; without a cost sweep there are no rows.
    cost
        Rows of the study_cost table.
    backends
        Backend of each route (``cpu``, ``cuda``, …): on a CPU a pass time is the machine's of that
        day, so it is kept but marked ``absolute: false``.

    A combination with too few quiet samples keeps its row: its ratio is None and ``note`` says why.
    """
    sweep = study.get("sweeps", {}).get(COST_SWEEP)
    if not sweep:
        return []
    references = {name: route.get("reference") for name, route in study.get("routes", {}).items()}
    quiet = cost[cost["cell_valid"] & ~cost["contended"]]
    # Several samples of one round are one: their median.
    samples = quiet.groupby(["route", "model", "width", "cell", "round"])["pass_ns"].median()
    rows = []
    for model in sweep["models"]:
        for route in sweep["routes"]:
            for width in sorted({*sweep["widths"], 1}):
                mine = cost[
                    (cost["route"] == route) & (cost["model"] == model) & (cost["width"] == width)
                ]
                reference = references.get(route)
                row = _row(mine, route, model, width, backends.get(route, ""))
                own = _samples(samples, route, model, width)
                row |= _ratio(own, _samples(samples, route, model, 1))
                if width == 1 and row["ratio"] is not None:
                    row |= {
                        "ratio": 1.0,
                        "ratio_interval": None,
                        "ratio_quartiles": None,
                        "ratio_method": BY_DEFINITION,
                    }
                row["reference"] = reference
                versus = _ratio(own, _samples(samples, reference, model, width))
                row["ratio_to_reference"] = versus["ratio"]
                row["ratio_to_reference_interval"] = versus["ratio_interval"]
                row["ratio_to_reference_quartiles"] = versus["ratio_quartiles"]
                row["n_pairs_reference"] = versus["n_pairs"]
                row["note"] = _note(row)
                row |= _floor(mine, own, _samples(samples, route, model, 1))
                rows.append(row)
    return rows


def _floor(mine: pd.DataFrame, own: pd.Series, one: pd.Series) -> dict[str, Any]:
    """Return the least time that reading takes (ms), and its ratio to the pass of width 1.

    Bytes over the bandwidth of a copy, which was measured in the same job. Empty without both.
    """
    if own.empty or one.empty or "read_bytes" not in mine:
        return {}
    told = mine[["read_bytes", "copy_bytes_per_s"]].dropna()
    if told.empty:
        return {}
    floor_ms = float((told["read_bytes"] / told["copy_bytes_per_s"]).median() * 1e3)
    return {
        "read_bytes": int(told["read_bytes"].iloc[0]),
        "copy_gb_per_s": float(told["copy_bytes_per_s"].median() / 1e9),
        "floor_ms": floor_ms,
        "floor_ratio": floor_ms / float(one.median() / 1e6),
    }


def _samples(samples: pd.Series, route: str | None, model: str, width: int) -> pd.Series:
    """Return the quiet pass times (ns) of one combination, indexed by (cell, round)."""
    index = samples.index
    chosen = (
        (index.get_level_values("route") == route)
        & (index.get_level_values("model") == model)
        & (index.get_level_values("width") == width)
    )
    return samples[chosen].droplevel(["route", "model", "width"])


def _row(mine: pd.DataFrame, route: str, model: str, width: int, backend: str) -> dict[str, Any]:
    usable = mine[mine["cell_valid"]]
    times = usable.loc[~usable["contended"], "pass_ns"].to_numpy(dtype=np.float64) / 1e6
    spread = None
    if len(times) >= 2:
        low, middle, high = np.percentile(times, [25, 50, 75])
        spread = float((high - low) / middle)
    return {
        "route": route,
        "model": model,
        "width": int(width),
        "depth": int(mine["depth"].iloc[0]) if len(mine) else None,
        "pass_ms": float(np.median(times)) if len(times) else None,
        "absolute": backend not in ("", "cpu"),
        "spread": spread,
        "n": len(times),
        "n_contended": int(usable["contended"].sum()),
        "n_invalid": len(mine) - len(usable),
        "cells": sorted(set(mine["cell"])),
    }


def _ratio(own: pd.Series, other: pd.Series) -> dict[str, Any]:
    """Return the ratio of two sets of quiet samples, paired by (cell, round) where possible."""
    result: dict[str, Any] = {
        "ratio": None,
        "ratio_interval": None,
        "ratio_quartiles": None,
        "ratio_method": None,
        "n_pairs": 0,
    }
    if own.empty or other.empty:
        return result
    pairs = pd.concat({"own": own, "other": other}, axis=1, join="inner")
    result["n_pairs"] = len(pairs)
    if len(pairs) >= MIN_SAMPLES:
        ratios = (pairs["own"] / pairs["other"]).to_numpy()
        low, middle, high = (float(value) for value in np.percentile(ratios, [25, 50, 75]))
        bounds = median_interval(ratios)
        result["ratio"] = middle
        result["ratio_interval"] = None if bounds is None else _bounds(bounds)
        result["ratio_quartiles"] = {"low": low, "high": high}
        result["ratio_method"] = PAIRED
    elif min(len(own), len(other)) >= MIN_SAMPLES and _one_cell(own, other):
        result["ratio"] = float(own.median() / other.median())
        result["ratio_method"] = UNPAIRED
    return result


def _one_cell(own: pd.Series, other: pd.Series) -> bool:
    """Say whether both sets come from one and the same job: no timing is compared across jobs."""
    cells = {cell for cell, _ in [*own.index, *other.index]}
    return len(cells) == 1


def _bounds(bounds: tuple[float, float]) -> dict[str, Any]:
    return {"low": bounds[0], "high": bounds[1], "level": LEVEL}


def _note(row: Mapping[str, Any]) -> str | None:
    """Say why a row quotes no ratio; None where it quotes one."""
    if row["ratio"] is not None:
        return None
    if row["n"] + row["n_contended"] + row["n_invalid"] == 0:
        return "not measured"
    if row["n_invalid"]:
        return f"{row['n_invalid']} samples are of an invalid cell"
    return (
        f"too few quiet samples: {row['n']} quiet, {row['n_contended']} contended, "
        f"{row['n_pairs']} pairs with width 1; at least {MIN_SAMPLES} needed"
    )
