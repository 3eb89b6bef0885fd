"""Verdicts: what the rows of a cell, or of two, allow one to claim.

Only ``exact`` is a pass, and it takes all of: rows at all, every row that the plain cell has and no
other, every row finite, every row's bits equal, and the witness that the passes under test really
ran. Whatever cannot be believed is ``invalid``: it is never counted as equal, and stays out of
every denominator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

EXACT = "exact"
DIFFERS = "differs"
INVALID = "invalid"
UNOBSERVABLE = "unobservable"
NOT_APPLICABLE = "not-applicable"
UNSUPPORTED = "unsupported"
VERDICTS = (EXACT, DIFFERS, INVALID, UNOBSERVABLE, NOT_APPLICABLE, UNSUPPORTED)

#: The study's word for a route of which some variant must differ, no matter which.
DIFFERS_SOMEWHERE = "differs-somewhere"

_KEY = ["prompt_id", "step"]


@dataclass(frozen=True)
class Judgement:
    """A verdict with what it rests on; all values are plain and go into JSON as they are."""

    verdict: str
    n: dict[str, int]
    reasons: list[str] = field(default_factory=list)
    worst: dict[str, Any] | None = None
    first_difference: dict[str, Any] | None = None


def expectation_of(expect: Mapping[str, Any], route: str, variant: str) -> str | None:
    """Return what a study expects of a route's variant: a verdict, DIFFERS_SOMEWHERE or None."""
    expected = expect.get(route)
    if isinstance(expected, Mapping):
        return expected.get(variant)
    return expected


def as_expected(verdict: str, expected: str | None) -> bool | None:
    """Say whether a verdict is the expected one; None where nothing is expected of it alone."""
    if expected is None or expected == DIFFERS_SOMEWHERE:
        return None
    return verdict == expected


def pass_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per executed pass of replay rows.

    Columns: ``prompt_id``, ``pass_index``, ``n_rows``, ``width`` and ``tokens`` (as the rows say),
    ``same`` (all rows of the pass say the same), ``last`` (no later pass of that prompt).
    """
    grouped = rows.groupby(["prompt_id", "pass_index"], sort=True)
    passes = grouped.agg(
        n_rows=("step", "size"),
        width=("pass_width", "max"),
        tokens=("pass_tokens", "max"),
        width_low=("pass_width", "min"),
        tokens_low=("pass_tokens", "min"),
    ).reset_index()
    passes["same"] = (passes["width"] == passes["width_low"]) & (
        passes["tokens"] == passes["tokens_low"]
    )
    last = passes.groupby("prompt_id")["pass_index"].transform("max")
    passes["last"] = passes["pass_index"] == last
    return passes.drop(columns=["width_low", "tokens_low"])


def witness_reasons(variant: str, rows: pd.DataFrame) -> list[str]:
    """Return why replay rows do not show the passes that ``variant`` names; empty where they do.

    A fixed width N: every pass has width N but for a shorter last one per prompt, N at least once,
    and nothing else in the pass. ``ragged``: two widths or more. ``rollback``: some pass carries
    more tokens than it keeps. ``neighbours``: every pass does. A pass has as many rows as its
    width.

    Raises ValueError for a variant that is none of these.
    """
    if rows.empty:
        return []
    passes = pass_table(rows)
    reasons = []
    torn = passes[~passes["same"] | (passes["n_rows"] != passes["width"])]
    if len(torn):
        one = torn.iloc[0]
        reasons.append(
            f"{len(torn)} passes do not hold together: pass {one.pass_index} of {one.prompt_id} "
            f"says width {one.width} and has {one.n_rows} rows"
        )
    widths = ", ".join(str(width) for width in sorted(passes["width"].unique()))
    fixed = re.fullmatch(r"w(\d+)", variant)
    if fixed:
        width = int(fixed[1])
        wrong = passes[(passes["width"] != width) & ~(passes["last"] & (passes["width"] < width))]
        if len(wrong):
            reasons.append(f"asked for passes of {width} tokens, executed widths {widths}")
        elif not (passes["width"] == width).any():
            reasons.append(f"no prompt is long enough for one pass of {width} tokens: {widths}")
        if (passes["tokens"] != passes["width"]).any():
            reasons.append(f"asked for passes of {width} tokens alone, other tokens ran with them")
    elif variant == "ragged":
        if passes["width"].nunique() < 2:
            reasons.append(f"asked for passes of changing width, executed only width {widths}")
    elif variant == "rollback":
        if not (passes["tokens"] > passes["width"]).any():
            reasons.append("asked for rejected draft tokens, no pass carried any")
    elif variant == "neighbours":
        alone = int((passes["tokens"] <= passes["width"]).sum())
        if alone:
            reasons.append(f"asked for neighbours in every pass, {alone} passes ran alone")
    else:
        raise ValueError(f"no witness is known for the variant {variant!r}")
    return reasons


def row_reasons(rows: pd.DataFrame, plain: pd.DataFrame | None) -> list[str]:
    """Return why replay rows cannot be believed beside their plain cell; empty where they can."""
    if plain is None:
        return ["the plain cell that they are compared with was not measured"]
    reasons = []
    wanted = plain.loc[plain["step"] >= 1, _KEY]
    if rows.duplicated(_KEY).any():
        reasons.append(f"{int(rows.duplicated(_KEY).sum())} positions stand there twice")
    met = wanted.merge(rows[_KEY].drop_duplicates(), how="outer", on=_KEY, indicator="where")
    missing, foreign = (int((met["where"] == side).sum()) for side in ("left_only", "right_only"))
    if missing:
        reasons.append(f"{missing} of {len(wanted)} positions of the plain cell are missing")
    if foreign:
        reasons.append(f"{foreign} positions are none of the plain cell's")
    broken = int((rows["status"] != "ok").sum())
    if broken:
        reasons.append(f"{broken} of {len(rows)} rows hold a NaN or an infinity")
    fine = rows[rows["status"] == "ok"]
    unsaid = int(fine["bits_equal"].isna().sum())
    if unsaid:
        reasons.append(f"{unsaid} finite rows were not compared")
    compared = fine[fine["bits_equal"].notna()]
    contradicting = (compared["plain_hash"] == compared["replay_hash"]) != (
        compared["bits_equal"].astype(bool)
    )
    if contradicting.any():
        reasons.append(f"{int(contradicting.sum())} rows and their hashes contradict each other")
    return reasons


def judge_replay(
    variant: str,
    rows: pd.DataFrame,
    plain: pd.DataFrame | None,
    invalid_reasons: Sequence[str] = (),
    unsupported: str = "",
) -> Judgement:
    """Judge one replay cell.

    Parameters
    ----------
    variant
        ``w<N>``, ``ragged``, ``rollback`` or ``neighbours``.
    rows
        The cell's rows, as schema/replay.
    plain
        The rows of the plain cell of the same route and model, as schema/replay, or None.
    invalid_reasons
        What the cell's own job (or a failed control) says against it.
    unsupported
        Why the route cannot do this at all; then there are no rows.
    """
    asked = len(rows) if plain is None else int((plain["step"] >= 1).sum())
    if unsupported and rows.empty:
        return Judgement(UNSUPPORTED, _count(rows, asked), [unsupported])
    reasons = [*invalid_reasons, *row_reasons(rows, plain), *witness_reasons(variant, rows)]
    if rows.empty and not reasons:
        reasons.append("the cell holds no rows")
    compared = _compared(rows)
    n = _count(rows, asked)
    differing = compared[~compared["bits_equal"].astype(bool)]
    worst = worst_of(differing, variant)
    first = first_of(differing, variant)
    if reasons:
        return Judgement(INVALID, n, reasons, worst, first)
    return Judgement(DIFFERS if len(differing) else EXACT, n, [], worst, first)


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that were compared: finite, and with an answer."""
    return rows[(rows["status"] == "ok") & rows["bits_equal"].notna()]


def _count(rows: pd.DataFrame, asked: int) -> dict[str, int]:
    compared = _compared(rows)
    differing = compared[~compared["bits_equal"].astype(bool)]
    return {
        "prompts": int(compared["prompt_id"].nunique()),
        "positions": len(compared),
        "asked": asked,
        "invalid": len(rows) - len(compared),
        "differing": len(differing),
        "flips": int(differing["argmax_flip"].fillna(False).astype(bool).sum()),
        "zero_sign_only": int((differing["n_zero_sign"] == differing["n_differing"]).sum()),
    }


def worst_of(differing: pd.DataFrame, variant: str | None = None) -> dict[str, Any] | None:
    """Return the differing row with the largest logit difference, the earliest of equals.

    ``kl_nats_max`` and ``flip_margin_max`` (the largest plain top-two margin that flipped, in
    logits) are taken over all differing rows; None where nothing differs.
    """
    if differing.empty:
        return None
    order = differing.sort_values(
        ["logit_delta_max", "kv_position", "prompt_index"],
        ascending=[False, True, True],
        kind="stable",
    )
    row = order.iloc[0]
    flipped = differing[differing["argmax_flip"].fillna(False).astype(bool)]
    return {
        "variant": variant or str(row["variant"]),
        "logit_delta_max": _number(row["logit_delta_max"]),
        "logit_delta_max_id": _whole(row["logit_delta_max_id"]),
        "n_differing_logits": _whole(row["n_differing"]),
        "prompt_id": str(row["prompt_id"]),
        "step": int(row["step"]),
        "kv_position": int(row["kv_position"]),
        "kl_nats": _number(row["kl_nats"]),
        "kl_nats_max": _number(differing["kl_nats"].max()),
        "flip_margin_max": _number(flipped["plain_margin"].max()) if len(flipped) else None,
    }


def first_of(differing: pd.DataFrame, variant: str | None = None) -> dict[str, Any] | None:
    """Return the differing row at the lowest KV position, or None where nothing differs."""
    if differing.empty:
        return None
    row = differing.sort_values(["kv_position", "prompt_index"], kind="stable").iloc[0]
    return {
        "variant": variant or str(row["variant"]),
        "prompt_id": str(row["prompt_id"]),
        "step": int(row["step"]),
        "kv_position": int(row["kv_position"]),
        "pass_width": int(row["pass_width"]),
        "batch_offset": int(row["batch_offset"]),
        "crosses_128": bool(row["crosses_128"]),
        "crosses_256": bool(row["crosses_256"]),
    }


def judge_plain_twice(rows: pd.DataFrame, plain: pd.DataFrame | None) -> Judgement:
    """Judge whether every job's own plain arm gave the plain cell's bits again.

    ``rows`` are the rows of all replay cells of one route and model, columns as study_replay: a
    row holds when its job found the plain row equal *and* its plain hash is the plain cell's.
    """
    if plain is None or rows.empty:
        return Judgement(UNOBSERVABLE, _simple_count(rows, 0), ["no plain arm ran twice"])
    broken = int((plain["status"] != "ok").sum())
    if broken:
        return Judgement(
            INVALID, _count_nothing(), [f"{broken} plain rows hold a NaN or an infinity"]
        )
    known = plain[[*_KEY, "logits_hash"]].drop_duplicates(_KEY)
    met = rows.merge(known, how="left", on=_KEY)
    equal = met["plain_repeat_equal"].astype(bool) & (met["plain_hash"] == met["logits_hash"])
    moved = met[~equal]
    if moved.empty:
        return Judgement(EXACT, _simple_count(met, 0))
    row = moved.sort_values(["kv_position", "prompt_index"], kind="stable").iloc[0]
    return Judgement(
        DIFFERS,
        _simple_count(met, len(moved)),
        [f"{len(moved)} of {len(met)} plain rows were not the same bits in a second run"],
        first_difference=_place(row),
    )


def judge_reference(plain: pd.DataFrame | None, reference: pd.DataFrame | None) -> Judgement:
    """Judge whether two routes' plain cells are the same: positions, logits' hashes, token ids."""
    if plain is None or reference is None:
        missing = "this route" if plain is None else "the reference route"
        return Judgement(
            UNOBSERVABLE, _count_nothing(), [f"the plain cell of {missing} was not measured"]
        )
    if plain.empty or reference.empty:
        return Judgement(INVALID, _count_nothing(), ["a plain cell holds no rows"])
    broken = int((plain["status"] != "ok").sum() + (reference["status"] != "ok").sum())
    if broken:
        reason = f"{broken} plain rows hold a NaN or an infinity"
        return Judgement(INVALID, _count_nothing(), [reason])
    columns = [*_KEY, "logits_hash", "token_id"]
    both = plain.merge(
        reference[columns], how="outer", on=_KEY, suffixes=("", "_ref"), indicator="where"
    )
    alone = both[both["where"] != "both"]
    met = both[both["where"] == "both"]
    same = (met["logits_hash"] == met["logits_hash_ref"]) & (met["token_id"] == met["token_id_ref"])
    moved = met[~same]
    n = _simple_count(met, len(moved))
    if moved.empty and alone.empty:
        return Judgement(EXACT, n)
    reasons = []
    if len(alone):
        reasons.append(f"{len(alone)} positions stand in only one of the two plain cells")
    if len(moved):
        reasons.append(f"{len(moved)} of {len(met)} plain rows are not the reference's bits")
    first = None
    if len(moved):
        first = _place(moved.sort_values(["kv_position", "prompt_index"], kind="stable").iloc[0])
    return Judgement(DIFFERS if len(moved) else INVALID, n, reasons, first_difference=first)


def judge_somewhere(judgements: Mapping[Any, Judgement]) -> Judgement:
    """Judge several cells together: ``differs`` where at least one valid cell does.

    ``exact`` where every one is, ``invalid`` where none differs and some cannot be believed.
    """
    n = {"prompts": 0, "positions": 0, "differing": 0, "flips": 0, "cells": 0, "differing_cells": 0}
    believed = {key: one for key, one in judgements.items() if one.verdict in (EXACT, DIFFERS)}
    for one in believed.values():
        n["prompts"] = max(n["prompts"], one.n["prompts"])
        for name in ("positions", "differing", "flips"):
            n[name] += one.n[name]
        n["cells"] += 1
        n["differing_cells"] += one.verdict == DIFFERS
    differing = [one for one in believed.values() if one.verdict == DIFFERS]
    if differing:
        worst = max(
            (one.worst for one in differing if one.worst),
            key=lambda found: (found["logit_delta_max"] or 0.0, -found["kv_position"]),
            default=None,
        )
        first = min(
            (one.first_difference for one in differing if one.first_difference),
            key=lambda found: (found["kv_position"], found["variant"]),
            default=None,
        )
        return Judgement(DIFFERS, n, [], worst, first)
    if not judgements:
        return Judgement(UNOBSERVABLE, n, ["no variant was measured"])
    if len(believed) < len(judgements):
        left = len(judgements) - len(believed)
        return Judgement(INVALID, n, [f"nothing differs, but {left} cells cannot be believed"])
    return Judgement(EXACT, n, ["every variant gave the bits of one token alone"])


def _count_nothing() -> dict[str, int]:
    return {"prompts": 0, "positions": 0, "differing": 0}


def _simple_count(rows: pd.DataFrame, differing: int) -> dict[str, int]:
    return {
        "prompts": int(rows["prompt_id"].nunique()),
        "positions": len(rows),
        "differing": differing,
    }


def _place(row: pd.Series) -> dict[str, Any]:
    return {
        "variant": str(row["variant"]) if "variant" in row else "plain",
        "prompt_id": str(row["prompt_id"]),
        "step": int(row["step"]),
        "kv_position": int(row["kv_position"]),
    }


def _number(value: Any) -> float | None:
    """Return a finite float, or None: JSON has no NaN and no infinity."""
    if value is None or pd.isna(value):
        return None
    number = float(value)
    return number if abs(number) != float("inf") else None


def _whole(value: Any) -> int | None:
    return None if value is None or pd.isna(value) else int(value)
