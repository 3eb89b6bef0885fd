"""Arms: does a route's log show that the kernel family it is named for is gone?

An arm is a route that differs from another by an environment or a flag. What is measured on it says
something about that family only where the other route logged the same kernels each time and the
arm's log has none of the family; else every claim of the arm is invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from routewise.dispatch import Dispatch, DispatchSet, families_of, judge_arm
from routewise.serve_verdict import ServeJudgement
from routewise.table import DISPATCH_SWEEP, Cell, StudyTables
from routewise.verdict import EXACT, INVALID, UNOBSERVABLE, UNSUPPORTED

#: The variant of a dispatch cell.
LOG_VARIANT = "log"
#: What an arm is judged by.
DISPATCH_LOG = "dispatch log"


def arms_of(study: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the study's arms: route -> (the route that it is an arm of, the family it lacks)."""
    arms = {}
    for name, entry in (study.get("routes") or {}).items():
        arm = entry.get("arm")
        if arm:
            families = arm.get("without") or ",".join(families_of(entry.get("env") or {}))
            arms[name] = (str(arm["of"]), str(families))
    return arms


def dispatch_sets(cell: Cell, rows: pd.DataFrame) -> dict[int, list[DispatchSet]]:
    """Return what each server life logged, by width and in the order of the lives.

    A life that logged nothing has an empty set: that is known from the blocks of the cell's job.
    """
    asked = {
        (int(block["width"]), int(block["life"])) for block in cell.provenance.get("blocks") or []
    }
    logged: dict[tuple[int, int], set[Dispatch]] = {place: set() for place in asked}
    for row in rows.to_dict("records"):
        found = Dispatch(*(str(row[name] or "") for name in ("backend", "op", "kernel", "kind")))
        logged.setdefault((int(row["width"]), int(row["life"])), set()).add(found)
    sets: dict[int, list[DispatchSet]] = {}
    for width, life in sorted(logged):
        sets.setdefault(width, []).append(frozenset(logged[(width, life)]))
    return sets


def judge_arm_route(tables: StudyTables, route: str, model: str) -> ServeJudgement:
    """Judge whether an arm counts: ``exact`` where it does at every width that was logged.

    ``n`` counts widths as positions. ``invalid`` where the log does not show it.
    """
    base_route, families = arms_of(tables.study)[route]
    found = [tables.find(name, model, LOG_VARIANT, DISPATCH_SWEEP) for name in (base_route, route)]
    n = {"prompts": 0, "positions": 0, "differing": 0}
    base, arm = found
    if base is None or arm is None:
        missing = base_route if base is None else route
        reason = f"what {missing} ran was not logged with {model}"
        return ServeJudgement(UNOBSERVABLE, n, [reason], observable=DISPATCH_LOG)
    for cell in (base, arm):
        why = cell.provenance.get("unsupported")
        if why:
            return ServeJudgement(UNSUPPORTED, n, [f"{cell.route}: {why}"], observable=DISPATCH_LOG)
    reasons = [
        f"log of {cell.route}: {reason}" for cell in (base, arm) for reason in cell.invalid_reasons
    ]
    base_sets, arm_sets = (dispatch_sets(cell, tables.rows_of(cell)) for cell in (base, arm))
    shown = {}
    for width in sorted(base_sets.keys() | arm_sets.keys()):
        lives = arm_sets.get(width) or [frozenset()]
        evidence = [judge_arm(base_sets.get(width, []), one, families) for one in lives]
        against = [one.reason for one in evidence if not one.counts]
        reasons += [f"width {width}: {reason}" for reason in dict.fromkeys(against)]
        shown[f"w{width}"] = against[0] if against else evidence[0].reason
    if not shown:
        reasons.append("neither log holds a line")
    n = {"prompts": 1, "positions": len(shown), "differing": 0}
    measures = {"dispatch": shown}
    verdict = INVALID if reasons else EXACT
    return ServeJudgement(verdict, n, reasons, observable=DISPATCH_LOG, measures=measures)


def dispatch_summary(tables: StudyTables) -> list[dict[str, Any]]:
    """Return what each dispatch cell logged, a record per width.

    ``n`` dispatches are distinct ones of all lives, ``same`` whether each life logged the same;
    ``added`` and ``missing`` are against the least width of the cell.
    """
    records: list[dict[str, Any]] = []
    for cell in tables.cells:
        if cell.sweep != DISPATCH_SWEEP:
            continue
        rows = tables.rows_of(cell)
        sets = dispatch_sets(cell, rows)
        least = frozenset().union(*sets[min(sets)]) if sets else frozenset()
        for width, lives in sets.items():
            seen: DispatchSet = frozenset().union(*lives)
            records.append(
                {
                    "route": cell.route,
                    "model": cell.model,
                    "width": width,
                    "log": next(iter(rows["log"]), None),
                    "lives": len(lives),
                    "same": len(set(lives)) == 1,
                    "n": len(seen),
                    "added": sorted(_name(one) for one in seen - least),
                    "missing": sorted(_name(one) for one in least - seen),
                }
            )
    return records


def _name(dispatch: Dispatch) -> str:
    named = dispatch.kernel or dispatch.op
    return f"{named} on {dispatch.backend}" + (f" ({dispatch.kind})" if dispatch.kind else "")
