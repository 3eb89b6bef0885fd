"""Verdicts on two routes that were asked the same: do they give the same replies?

``exact`` takes every token and every compared logprob bit of all common positions. How far two
routes are apart (the largest |Δ logprob|, a KL, a published gate) is a measure beside the verdict
and never decides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from routewise.agree import AgreeScore, AgreeSummary, Divergence, agree_summary
from routewise.client import SHARED_SLOTS_MIN
from routewise.serve_verdict import (
    BROKEN_STATUSES,
    LOGPROB,
    TEXT,
    TOKEN_IDS,
    ServeJudgement,
    weak_company,
)
from routewise.verdict import DIFFERS, EXACT, INVALID, UNOBSERVABLE, UNSUPPORTED


def judge_agree(
    rows: pd.DataFrame,
    *,
    width: int = 1,
    witnesses: Mapping[str, Mapping[str, Any]] | None = None,
    prompts: Iterable[str] = (),
    invalid_reasons: Sequence[str] = (),
    unsupported: str = "",
    unobservable: str = "",
) -> ServeJudgement:
    """Judge whether two routes give the same replies to the same requests.

    ``rows`` are one cell's of schema/agree; ``prompts`` those that the routes were asked;
    ``witnesses`` say by route what :func:`witness_of` said of the replies, which counts above
    width 1: there both routes need one, and each prompt all of its ``width`` copies.
    ``unobservable`` says why the two sides are no two measurements, whatever they hold.

    Common positions are compared: a position of a prompt differs where the token does in any copy,
    or the bits of its logprob. The largest |Δ logprob| and the published gates are measures, and
    decide nothing.
    """
    common = rows[rows["common"].astype(bool)]
    match = common["match"].astype(bool)
    unseen = match & common["bits_equal"].isna()
    differing = common[~match | common["bits_equal"].eq(False)]
    summary = agree_summary(rows)
    score = summary.all_replies
    observable = _agree_observable(common, int(unseen.sum()), len(differing) > 0)
    n = {
        "prompts": score.n_prompts,
        "positions": _n_places(common),
        "differing": _n_places(differing),
        "flips": _n_places(common[~match]),
        "replies": score.n_replies,
        "differing_replies": score.n_replies - score.n_same_stream,
        "aligned": score.n_positions,
        "matching": score.n_match,
        "logprobs": score.n_logprobs,
        "saturated": score.n_saturated_both,
    }
    witnesses = dict(witnesses or {})
    measures = {"agreement": _agreement(summary), "witness": witnesses or None}
    worst = None
    if score.worst is not None and score.worst.dlogp > 0:
        worst = {
            "prompt_id": score.worst.prompt_id,
            "position": score.worst.position,
            "copy": score.worst.copy,
            "dlogp_max": score.worst.dlogp,
        }
    first = _first_apart(differing, summary.divergences)

    def judged(verdict: str, reasons: list[str]) -> ServeJudgement:
        seen = verdict in (DIFFERS, INVALID)
        return ServeJudgement(
            verdict,
            n,
            reasons,
            worst if seen else None,
            first if seen else None,
            observable,
            measures,
        )

    if unsupported and rows.empty:
        return judged(UNSUPPORTED, [unsupported])
    reasons = list(invalid_reasons)
    if unobservable and not reasons:
        return judged(UNOBSERVABLE, [unobservable])
    if rows.empty:
        reasons.append("no reply of one route meets one of the other")
    missing = sorted(set(prompts) - set(rows["prompt_id"]))
    if missing and len(rows):
        reasons.append(f"{len(missing)} prompts were not compared, {missing[0]} among them")
    copies = rows.groupby("prompt_id")["copy"].nunique()
    short = copies[copies < width]
    if len(short):
        reasons.append(f"{short.index[0]} was compared in {short.iloc[0]} of {width} copies")
    for side in ("a", "b"):
        broken = int(common[f"status_{side}"].isin(BROKEN_STATUSES).sum())
        if broken:
            reasons.append(f"{broken} logprobs of route {side} are NaN or no float32")
    lonely, blind = _witness_gaps(witnesses) if width > 1 else ([], [])
    reasons += lonely
    if reasons:
        return judged(INVALID, reasons)
    if common.empty:
        return judged(UNOBSERVABLE, ["no position of both routes has the same history"])
    notes = []
    if summary.arithmetic_only is False:
        notes.append("not arithmetic only")
    if unseen.any():
        notes.append(
            f"{int(unseen.sum())} of {len(common)} positions lack a logprob on one side: "
            "their tokens alone were compared"
        )
    if len(differing) or n["differing_replies"]:
        return judged(DIFFERS, [*notes, *blind])
    if blind:
        return judged(UNOBSERVABLE, [f"equal, but {blind[0]}"])
    return judged(EXACT, notes)


def _n_places(rows: pd.DataFrame) -> int:
    """Return how many positions of prompts rows are of: each once, however many copies."""
    return len(rows.drop_duplicates(["prompt_index", "position"]))


def _witness_gaps(witnesses: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return which routes hardly shared a pass, and which do not show that they did mostly."""
    lonely, blind = [], []
    if len(witnesses) < 2:
        blind.append("the two routes do not both have a witness of a shared pass")
    for route, witness in witnesses.items():
        n_rounds = witness["rounds"]
        if witness["rounds_alone"]:
            lonely.append(
                f"{route}: {witness['rounds_alone']} of {n_rounds} rounds were hardly shared: "
                f"fewer than {SHARED_SLOTS_MIN} slots busy a pass"
            )
        if not n_rounds:
            blind.append(f"{route}: no round has a witness of a shared pass")
        if witness["rounds_unseen"]:
            blind.append(
                f"{route}: {witness['rounds_unseen']} of {n_rounds} rounds have no witness of a "
                "shared pass"
            )
        if weak := weak_company(witness):
            blind.append(f"{route}: {weak}")
    return lonely, blind


def _agree_observable(common: pd.DataFrame, n_unseen: int, differs: bool) -> str:
    """Return what of two routes was compared: the weakest over positions where all are equal.

    Where something differs it is the strongest that any position has, because that showed it.
    """
    some = len(common) > 0 and bool(common["bits_equal"].notna().any())
    if some and (differs or not n_unseen):
        return LOGPROB
    ids = common["token_id_a"].notna() & common["token_id_b"].notna()
    return TOKEN_IDS if len(common) and ids[common["match"].astype(bool)].all() else TEXT


def _first_apart(
    differing: pd.DataFrame, divergences: Sequence[Divergence]
) -> dict[str, Any] | None:
    """Return the first position that differs, and the first at which another token is chosen.

    The two routes' margins there say how sure each was of its own token.
    """
    if differing.empty and not divergences:
        return None
    found: dict[str, Any] = {}
    if len(differing):
        row = differing.sort_values(["position", "prompt_index", "copy"], kind="stable").iloc[0]
        found = {
            "prompt_id": str(row["prompt_id"]),
            "position": int(row["position"]),
            "copy": int(row["copy"]),
            "token_differs": not bool(row["match"]),
            **{f"margin_{side}": _number(row[f"margin_{side}"]) for side in ("a", "b")},
        }
    placed = [one for one in divergences if one.position is not None]
    if placed:
        one = min(placed, key=lambda apart: (apart.position or 0, apart.prompt_id, apart.copy))
        found["divergence"] = {
            "prompt_id": one.prompt_id,
            "position": one.position,
            "copy": one.copy,
            "token_id_a": one.token_id_a,
            "token_id_b": one.token_id_b,
            "margin_a": one.margin_a,
            "margin_b": one.margin_b,
        }
    elif divergences and not found:
        found = {"prompt_id": divergences[0].prompt_id, "position": None}
    return found


def _agreement(summary: AgreeSummary) -> dict[str, Any]:
    """Return how far two routes are apart, over all replies and over those with one stream."""
    return {
        "arithmetic_only": summary.arithmetic_only,
        "all": _agreement_score(summary.all_replies),
        "same_stream": _agreement_score(summary.same_stream),
    }


def _agreement_score(score: AgreeScore) -> dict[str, Any]:
    document = asdict(score)
    del document["worst"]
    return document


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)
