"""What the serving sweeps claim: repeat, batched and agree as entries of a receipt.

Claims are listed from the study's declaration. A route that cannot do what is asked has an
``unsupported`` claim with the reason; a cell that is missing is a claim that nobody observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from routewise.agree_verdict import judge_agree
from routewise.arm_verdict import LOG_VARIANT, arms_of, judge_arm_route
from routewise.interval import share_interval
from routewise.serve_verdict import (
    LOGPROB,
    ServeJudgement,
    cache_reasons,
    gap_reasons,
    judge_batched,
    judge_caches,
    judge_repeat,
    judge_width_1,
    reply_reasons,
    solo_of,
    witness_of,
)
from routewise.study import agree_pairs, batched_blocks
from routewise.table import (
    AGREE_SWEEP,
    BATCHED_SWEEP,
    DISPATCH_SWEEP,
    REPEAT_SWEEP,
    SOLO,
    Cell,
    StudyTables,
    build_of,
    quantization_of,
)
from routewise.verdict import (
    DIFFERS,
    DIFFERS_SOMEWHERE,
    EXACT,
    INVALID,
    UNOBSERVABLE,
    UNSUPPORTED,
    as_expected,
    expectation_of,
)

Entry = dict[str, Any]
Entries = tuple[list[Entry], list[Entry]]  # controls, claims
Doubts = Mapping[tuple[str, str], Sequence[str]]  # by route and model: why a claim is in doubt

_NOTHING = {"prompts": 0, "positions": 0, "differing": 0}
_CACHES = {
    "off": "with the prompt cache off",
    "cold": "with a prompt cache that holds nothing of it",
    "warm": "with the prompt in the cache",
}
_MIXES = {  # one other, several others
    "copies": ("one byte-identical request", "{others} byte-identical requests"),
    "neighbours": ("one other prompt", "{others} other prompts"),
    "fillers": ("one filler of another length", "{others} fillers of other lengths"),
}
#: The variant of a repeat that compares the kinds of prompt cache with each other.
CACHES = "caches"
_PREFILLS = {
    "together": "prefilled and decoded together",
    "apart": "each prefilled alone, decoded together",
}
_OBSERVED = {
    LOGPROB: "the same tokens and logprob bits",
    "token ids": "the same token ids",
    "text": "the same text",
}


def arm_controls(tables: StudyTables) -> tuple[list[Entry], Doubts]:
    """Return a control for each arm of the study, and why claims of arms are in doubt."""
    controls: list[Entry] = []
    doubts: dict[tuple[str, str], list[str]] = {}
    sweeps = tables.study.get("sweeps", {})
    for route, (base, families) in arms_of(tables.study).items():
        models = [
            model
            for sweep in sweeps.values()
            if route in sweep.get("routes", [])
            for model in sweep.get("models", [])
        ]
        for model in dict.fromkeys(models):
            judged = judge_arm_route(tables, route, model)
            cells = [
                tables.find(name, model, LOG_VARIANT, DISPATCH_SWEEP) for name in (base, route)
            ]
            control = _entry(
                f"arm-counts/{route}/{model}",
                DISPATCH_SWEEP,
                (route, model),
                f"{route} runs without {families}, which {base} runs, as the logs of both show",
                judged,
                EXACT,
                sorted(cell.path for cell in cells if cell is not None),
                {"route": route, "model": model, "variant": LOG_VARIANT, "arm_of": base},
            )
            control["interval"] = None  # widths are no sample
            controls.append(control)
            if judged.verdict != EXACT:
                doubt = f"control {control['id']} does not hold: it is {judged.verdict}"
                doubts[(route, model)] = [doubt]
    return controls, doubts


def serving_entries(tables: StudyTables, doubts: Doubts) -> Entries:
    """Return the controls and claims of a study's serving sweeps, in the order of the sweeps."""
    controls: list[Entry] = []
    claims: list[Entry] = []
    makers: dict[str, Callable[[StudyTables, Mapping[str, Any], Doubts], Entries]] = {
        REPEAT_SWEEP: _repeat,
        BATCHED_SWEEP: _batched,
        AGREE_SWEEP: _agree,
    }
    for name, make in makers.items():
        sweep = tables.study.get("sweeps", {}).get(name)
        if not sweep:
            continue
        own_controls, own_claims = make(tables, sweep, doubts)
        controls += own_controls
        claims += own_claims
        for route in dict.fromkeys(claim["route"] for claim in own_claims):
            if expectation_of(sweep.get("expect") or {}, route, "") == DIFFERS_SOMEWHERE:
                mine = [claim for claim in own_claims if claim["route"] == route]
                controls.append(_somewhere(name, route, mine))
    return controls, claims


# ------------------------------------------------------------------------------------------ repeat


def _repeat(tables: StudyTables, sweep: Mapping[str, Any], doubts: Doubts) -> Entries:
    expect = sweep.get("expect") or {}
    claims = []
    for route in sweep["routes"]:
        for model in sweep["models"]:
            cell = tables.find(route, model, SOLO, REPEAT_SWEEP)
            for cache in sweep["cache"]:
                judged, rows, notes = _judge_repeat(
                    tables, cell, cache, doubts.get((route, model), ())
                )
                lives = int(rows["life"].nunique())
                statement = (
                    f"The same request alone, again and again {_CACHES[cache]}, gets "
                    f"{_OBSERVED[judged.observable]}"
                    + (f", also across {lives} starts of the server" if lives > 1 else "")
                )
                claim = _entry(
                    f"{REPEAT_SWEEP}/{route}/{model}/{cache}",
                    REPEAT_SWEEP,
                    (route, model),
                    statement,
                    judged,
                    expectation_of(expect, route, cache),
                    [] if cell is None else [cell.path],
                    _scope(tables, route, model, cache, cell, rows),
                )
                claim["reasons"] += notes
                claims.append(claim)
            between = _between_caches(tables, cell, claims[-len(sweep["cache"]) :], expect)
            claims += [] if between is None else [between]
    return [], claims


def _between_caches(
    tables: StudyTables, cell: Cell | None, claims: Sequence[Entry], expect: Mapping[str, Any]
) -> Entry | None:
    """Return the claim that the prompt cache changes no answer; None where one kind was asked."""
    measured = [claim for claim in claims if claim["verdict"] != UNSUPPORTED]
    if cell is None or len(measured) < 2:
        return None
    route, model = claims[0]["route"], claims[0]["model"]
    rows = tables.rows_of(cell)
    judged = judge_caches(
        rows[rows["status"] == "ok"],
        logprob_list=_logprob_list(cell),
        invalid_reasons=[
            f"{claim['id']} is {claim['verdict']}"
            for claim in measured
            if claim["verdict"] not in (EXACT, DIFFERS)
        ],
    )
    expected = expect.get(route)
    return _entry(
        f"{REPEAT_SWEEP}/{route}/{model}/{CACHES}",
        REPEAT_SWEEP,
        (route, model),
        f"The same request alone gets {_OBSERVED[judged.observable]} whatever the prompt cache "
        "held of it",
        judged,
        expected.get(CACHES) if isinstance(expected, Mapping) else None,
        [cell.path],
        _scope(tables, route, model, CACHES, cell, rows),
    )


def _judge_repeat(
    tables: StudyTables, cell: Cell | None, cache: str, doubts: Sequence[str]
) -> tuple[ServeJudgement, pd.DataFrame, list[str]]:
    """Return the judgement, the rows, and what of it the route could not do."""
    if cell is None:
        return _unmeasured(), tables.replies.iloc[:0], []
    every = tables.rows_of(cell)
    rows = every[every["cache"] == cache]
    refused = _refused(cell, cache=cache)
    judged = judge_repeat(
        rows,
        cache,
        rounds=_rounds(cell, cache=cache),
        prompts=set(every["prompt_id"]),
        logprob_list=_logprob_list(cell),
        invalid_reasons=[*_doubts_of(cell), *doubts],
        unsupported=_unsupported(cell, refused),
    )
    notes = sorted(set(refused)) if judged.verdict != UNSUPPORTED else []
    return judged, rows, [f"not measured: {note}" for note in notes]


# ----------------------------------------------------------------------------------------- batched


def _batched(tables: StudyTables, sweep: Mapping[str, Any], doubts: Doubts) -> Entries:
    expect = sweep.get("expect") or {}
    controls: list[Entry] = []
    claims: list[Entry] = []
    for route in sweep["routes"]:
        for model in sweep["models"]:
            replies = _batched_replies(tables, route, model)
            failed: dict[int, list[str]] = {}
            for parallel in sorted(sweep["parallel"]):
                control = _width_1_control(tables, route, model, parallel, replies)
                if control is None:
                    continue
                controls.append(control)
                if control["verdict"] != EXACT:
                    doubt = f"control {control['id']} does not hold: it is {control['verdict']}"
                    failed[parallel] = [doubt]
            base = [*doubts.get((route, model), ()), *failed.get(min(sweep["parallel"]), [])]
            for parallel in sweep["parallel"]:
                cell = tables.find(route, model, f"p{parallel}", BATCHED_SWEEP)
                against = list(dict.fromkeys([*base, *failed.get(parallel, [])]))
                for width, mix, prefill in batched_blocks(sweep, parallel):
                    if width == 1:
                        continue
                    variant = f"p{parallel}.w{width}.{mix}.{prefill}"
                    asked = {"width": width, "mix": mix, "prefill": prefill}
                    judged, rows = _judge_block(tables, cell, asked, replies, against)
                    paths = {str(path) for path in replies.loc[replies["width"] == 1, "cell"]}
                    claims.append(
                        _entry(
                            f"{BATCHED_SWEEP}/{route}/{model}/{variant}",
                            BATCHED_SWEEP,
                            (route, model),
                            _batched_statement(width, mix, prefill, judged),
                            judged,
                            expectation_of(expect, route, variant),
                            sorted(paths | ({cell.path} if cell else set())),
                            _scope(tables, route, model, variant, cell, rows) | asked,
                        )
                    )
    return controls, claims


def _batched_statement(width: int, mix: str, prefill: str, judged: ServeJudgement) -> str:
    others = _MIXES[mix][width > 2].format(others=width - 1)
    busy = (judged.measures.get("witness") or {}).get("busy_per_decode_mean")
    company = "" if busy is None else f" (on average {busy:.2f} of {width} slots busy in a pass)"
    return (
        f"A request beside {others}, {_PREFILLS[prefill]}, gets "
        f"{_OBSERVED[judged.observable]} as alone{company}"
    )


def _batched_replies(tables: StudyTables, route: str, model: str) -> pd.DataFrame:
    """Return the replies of all batched cells of one route and model."""
    found = tables.replies
    return found[
        (found["sweep"] == BATCHED_SWEEP) & (found["route"] == route) & (found["model"] == model)
    ]


def _judge_block(
    tables: StudyTables,
    cell: Cell | None,
    asked: Mapping[str, Any],
    replies: pd.DataFrame,
    doubts: Sequence[str],
) -> tuple[ServeJudgement, pd.DataFrame]:
    if cell is None:
        return _unmeasured(), replies.iloc[:0]
    every = tables.rows_of(cell)
    rows = _where(every, asked)
    rounds = _rounds(cell, **asked)
    judged = judge_batched(
        rows,
        solo_of(replies, asked["prefill"]),
        width=asked["width"],
        prefill=asked["prefill"],
        rounds=max(rounds.values()) if rounds else None,
        prompts=set(every.loc[every["role"] == "probe", "prompt_id"]),
        logprob_list=_logprob_list(cell),
        invalid_reasons=[*_doubts_of(cell), *doubts],
        unsupported=_unsupported(cell, _refused(cell, **asked)),
    )
    return judged, rows


def _width_1_control(
    tables: StudyTables, route: str, model: str, parallel: int, replies: pd.DataFrame
) -> Entry | None:
    """Return the control that one request in flight has the solo answer whatever ``--parallel``.

    None where the only replies at width 1 are the reference itself, and where the route refuses a
    server with so many slots.
    """
    cell = tables.find(route, model, f"p{parallel}", BATCHED_SWEEP)
    alone = replies[(replies["width"] == 1) & (replies["role"] == "probe")]
    rows = alone.iloc[:0] if cell is None else _where(tables.rows_of(cell), {"width": 1})
    if cell is None:
        judged = _unmeasured()
    else:
        rounds = _rounds(cell, width=1)
        every = tables.rows_of(cell)
        judgements = [
            judge_width_1(
                mine,
                solo_of(replies, str(prefill)),
                rounds=max(rounds.values()) if rounds else None,
                prompts=set(every.loc[every["role"] == "probe", "prompt_id"]),
                logprob_list=_logprob_list(cell),
                invalid_reasons=_doubts_of(cell),
            )
            for prefill, mine in rows.groupby("prefill")
        ]
        refused = _unsupported(cell, _refused(cell, width=1))
        if refused and not judgements:
            return None  # a server that the route cannot be is nothing to be controlled
        judged = _worst_of(judgements)
        is_reference = parallel == min(alone["parallel"], default=0)
        if is_reference and judged.verdict == UNOBSERVABLE:
            return None
    references = set(alone.loc[alone["parallel"] == alone["parallel"].min(), "cell"])
    return _entry(
        f"width-1-equals-solo/{route}/{model}/p{parallel}",
        BATCHED_SWEEP,
        (route, model),
        f"One request in flight on a server with {_slots(parallel)} gets "
        f"{_OBSERVED[judged.observable]} {_as_reference(parallel, alone)}",
        judged,
        EXACT,
        sorted({str(path) for path in references} | ({cell.path} if cell else set())),
        _scope(tables, route, model, f"p{parallel}.w1", cell, rows),
    )


def _as_reference(parallel: int, alone: pd.DataFrame) -> str:
    """Return what the answers alone of a server are held against: another's, or its own first."""
    if alone.empty:
        return "as on a server with fewer"
    fewest = int(alone["parallel"].min())
    return "every time" if parallel == fewest else f"as on a server with {_slots(fewest)}"


def _slots(parallel: int) -> str:
    return "one slot" if parallel == 1 else f"{parallel} slots"


def _worst_of(judgements: Sequence[ServeJudgement]) -> ServeJudgement:
    """Return several judgements as one: counts added, the worst verdict with its reasons."""
    if not judgements:
        return ServeJudgement(INVALID, dict(_NOTHING), ["the cell holds no replies at width 1"])
    order = (EXACT, UNOBSERVABLE, DIFFERS, INVALID)
    worst = max(judgements, key=lambda one: order.index(one.verdict))
    n = {key: sum(one.n.get(key, 0) for one in judgements) for key in worst.n}
    n["prompts"] = max(one.n["prompts"] for one in judgements)
    observables = [one.observable for one in judgements]
    return ServeJudgement(
        worst.verdict,
        n,
        worst.reasons,
        worst.worst,
        worst.first_difference,
        max(observables, key=list(_OBSERVED).index),
        worst.measures,
    )


# ------------------------------------------------------------------------------------------- agree


def _agree(tables: StudyTables, sweep: Mapping[str, Any], doubts: Doubts) -> Entries:
    expect = sweep.get("expect") or {}
    controls: list[Entry] = []
    claims: list[Entry] = []
    for model in sweep["models"]:
        failed: dict[str, list[str]] = {}
        moved: dict[tuple[str, int], str] = {}
        for route in sweep["routes"]:
            failed[route] = list(doubts.get((route, model), ()))
            control = _twice_control(tables, route, model, 1)
            if control["verdict"] != UNSUPPORTED:
                controls.append(control)
            if control["verdict"] not in (EXACT, UNSUPPORTED):
                doubt = f"control {control['id']} does not hold: it is {control['verdict']}"
                failed[route].append(doubt)
            for width in sweep["widths"]:
                variant = f"w{width}"
                if width > 1 and tables.find(f"{route}|{route}", model, variant, AGREE_SWEEP):
                    wide = _twice_control(tables, route, model, width)
                    if wide["verdict"] != UNSUPPORTED:
                        controls.append(wide)
                    if wide["verdict"] == DIFFERS:
                        moved[(route, width)] = f"{route} differs also with itself: {wide['id']}"
        for one, two in agree_pairs(sweep):
            against = [*failed[one], *failed[two]]
            for width in sweep["widths"]:
                judged, pair, sides = _judge_pair(tables, (one, two), model, width, against)
                claim = _pair_entry(
                    tables,
                    f"{AGREE_SWEEP}/{one}|{two}/{model}/w{width}",
                    (one, two),
                    model,
                    width,
                    _agree_statement(one, two, width, judged),
                    (judged, pair, sides),
                    expectation_of(expect, f"{one}|{two}", f"w{width}"),
                )
                if claim["verdict"] == DIFFERS:
                    both = (moved.get((route, width)) for route in (one, two))
                    claim["reasons"] += [note for note in both if note]
                claims.append(claim)
    return controls, claims


def _twice_control(tables: StudyTables, route: str, model: str, width: int) -> Entry:
    """Return the control that a route asked twice says the same.

    In company it is allowed to differ, and nothing is expected: what two routes differ by at that
    width is read beside it.
    """
    judged, pair, sides = _judge_pair(tables, (route, route), model, width, [])
    alone = width == 1
    control = _pair_entry(
        tables,
        f"same-route-twice/{route}/{model}" + ("" if alone else f"/w{width}"),
        (route, route),
        model,
        width,
        f"The route asked twice{'' if alone else f', {width} copies in flight,'} gives "
        f"{_OBSERVED[judged.observable]}",
        (judged, pair, sides),
        EXACT if alone else None,
    )
    control["route"] = route
    return control


def _agree_statement(one: str, two: str, width: int, judged: ServeJudgement) -> str:
    how = "one request at a time" if width == 1 else f"{width} copies in flight"
    same_weights = (judged.measures.get("agreement") or {}).get("arithmetic_only") is not False
    what = "" if same_weights else " (not arithmetic only: one of them loads requantised weights)"
    return f"{one} and {two}, {how}, give {_OBSERVED[judged.observable]}{what}"


def _judge_pair(
    tables: StudyTables, pair: tuple[str, str], model: str, width: int, doubts: Sequence[str]
) -> tuple[ServeJudgement, Cell | None, list[Cell | None]]:
    """Return the judgement of a pair of routes, its cell and the cells that it was made from."""
    cell = tables.find("|".join(pair), model, f"w{width}", AGREE_SWEEP)
    sides = [tables.find(route, model, f"p{width}", AGREE_SWEEP) for route in pair]
    reasons = list(doubts)
    unsupported = "" if cell is None else _unsupported(cell, [])
    asked: set[str] = set()
    witnesses = {}
    picked = []
    for route, side, name in zip(pair, sides, ("a", "b"), strict=True):
        if side is None:
            reasons.append(f"the replies of {route} were not measured")
            continue
        if refused := _unsupported(side, _refused(side, width=width)):
            unsupported = unsupported or f"{route}: {refused}"
        every = tables.rows_of(side)
        rows = _picked(every, cell, name)
        against = [*_doubts_of(side), *_side_reasons(rows, every, width)]
        reasons += [f"replies of {route}: {reason}" for reason in against]
        asked |= set(rows.loc[rows["n_received"] > 0, "prompt_id"])
        again = " again" if route in witnesses else ""
        witnesses[route + again] = witness_of(rows[rows["status"] == "ok"], width)
        picked.append(rows)
    if cell is None:
        return _refused_or_unmeasured(unsupported), None, sides
    rows = tables.rows_of(cell)
    if pair[0] == pair[1]:
        rows = rows.assign(arithmetic_only=True)  # a route's weights are its own
    n_shared, n_replies = _count_shared(picked)
    judged = judge_agree(
        rows,
        width=width,
        witnesses=witnesses,
        prompts=asked,
        invalid_reasons=[*cell.invalid_reasons, *dict.fromkeys(reasons)],
        unsupported=unsupported,
        unobservable=_one_measurement(pair) if n_replies and n_shared == n_replies else "",
    )
    if n_shared and judged.verdict == EXACT:
        reason = f"equal, but {n_shared} of {n_replies} answers of the two are one measurement"
        judged = replace(judged, verdict=UNOBSERVABLE, reasons=[reason])
    return judged, cell, sides


def _side_reasons(rows: pd.DataFrame, every: pd.DataFrame, width: int) -> list[str]:
    """Return why the replies picked of one route are no evidence; ``every`` is its whole cell."""
    if rows.empty:
        return []
    reasons = reply_reasons(rows)
    for cache, mine in rows.groupby("cache"):
        reasons += cache_reasons(mine, str(cache))
    reasons += gap_reasons(rows, rows, width, 1)
    missing = sorted(set(every["prompt_id"]) - set(rows["prompt_id"]))
    if missing:
        reasons.append(f"{len(missing)} prompts have no reply, {missing[0]} among them")
    return reasons


def _count_shared(picked: Sequence[pd.DataFrame]) -> tuple[int, int]:
    """Return how many answers of two sides are the same measurement, and of how many.

    Two routes with one program and configuration share stored answers, and no two answers that were
    asked for at different times have the same times to the nanosecond.
    """
    if len(picked) < 2 or any(rows.empty for rows in picked):
        return 0, 0
    names = ["prompt_id", "copy", "released_ns", "done_ns", "state"]
    one, two = (set(rows[names].itertuples(index=False, name=None)) for rows in picked)
    return len(one & two), max(len(one), len(two))


def _one_measurement(pair: tuple[str, str]) -> str:
    """Return why both sides of a pair show nothing, where all answers of one are the other's."""
    if pair[0] == pair[1]:
        return f"{pair[0]} was asked only once: its replies would be compared with themselves"
    return "both routes are the same program and configuration: their answers are one measurement"


def _picked(rows: pd.DataFrame, cell: Cell | None, side: str) -> pd.DataFrame:
    """Return the replies of a capture that stand for its route in a pair: those it picked."""
    if cell is None:
        return rows
    return _where(rows, (cell.provenance.get("settings") or {}).get(f"pick_{side}") or {})


def _pair_entry(
    tables: StudyTables,
    identity: str,
    pair: tuple[str, str],
    model: str,
    width: int,
    statement: str,
    found: tuple[ServeJudgement, Cell | None, list[Cell | None]],
    expected: str | None,
) -> Entry:
    judged, cell, sides = found
    scopes = {
        name: _scope(tables, route, model, f"p{width}", side, _rows_of(tables, side))
        for name, route, side in zip(("a", "b"), pair, sides, strict=True)
    }
    scope: dict[str, Any] = {"route": "|".join(pair), "model": model, "variant": f"w{width}"}
    for key in scopes["a"].keys() | scopes["b"].keys():
        if key not in scope:
            scope[key] = _joined(scopes["a"].get(key), scopes["b"].get(key))
    scope |= {"width": width, "sides": scopes}
    return _entry(
        identity,
        AGREE_SWEEP,
        ("|".join(pair), model),
        statement,
        judged,
        expected,
        sorted({one.path for one in (cell, *sides) if one is not None}),
        scope,
    )


def _rows_of(tables: StudyTables, cell: Cell | None) -> pd.DataFrame:
    return tables.replies.iloc[:0] if cell is None else tables.rows_of(cell)


def _joined(one: Any, two: Any) -> Any:
    """Return what both sides of a pair have: the value, or both with a bar between."""
    if one == two:
        return one
    if all(value is None or isinstance(value, str) for value in (one, two)):
        return f"{one or 'unknown'}|{two or 'unknown'}"
    return None  # each side has its own in ``sides``


# ----------------------------------------------------------------------------------------- entries


def _where(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    return rows


def _rounds(cell: Cell, **wanted: Any) -> dict[int, int]:
    """Return how many rounds a cell's job was asked for, by life; empty where it does not say."""
    blocks = [
        block
        for block in cell.provenance.get("blocks") or []
        if all(block.get(key) == value for key, value in wanted.items())
    ]
    return {int(block["life"]): int(block["rounds"]) for block in blocks}


def _refused(cell: Cell, **wanted: Any) -> list[str]:
    """Return why a route cannot do blocks of this kind; empty where it can do all of them."""
    return [
        str(refused["reason"])
        for refused in cell.provenance.get("refused_blocks") or []
        if all(refused["block"].get(key) == value for key, value in wanted.items())
    ]


def _doubts_of(cell: Cell) -> list[str]:
    """Return why a serving cell cannot be believed as a whole; empty where it can."""
    serving = cell.provenance.get("serving") or {}
    programs = {
        (life.get("found") or {}).get("program_sha256") for life in serving.get("lives") or []
    }
    changed = len(programs - {None}) > 1
    reasons = ["the server's program changed between its lives"] if changed else []
    return [*cell.invalid_reasons, *reasons]


def _logprob_list(cell: Cell) -> int | None:
    """Return how many tokens of a reply the route's list of logprobs covers; None for all."""
    serving = cell.provenance.get("serving") or {}
    found = (serving.get("speech") or {}).get("logprob_list")
    return None if found is None else int(found)


def _unsupported(cell: Cell, refused: Sequence[str]) -> str:
    return str(cell.provenance.get("unsupported") or "") or (refused[0] if refused else "")


def _unmeasured() -> ServeJudgement:
    return ServeJudgement(UNOBSERVABLE, dict(_NOTHING), ["no such cell was measured"])


def _refused_or_unmeasured(unsupported: str) -> ServeJudgement:
    if unsupported:
        return ServeJudgement(UNSUPPORTED, dict(_NOTHING), [unsupported])
    return _unmeasured()


def _entry(
    identity: str,
    sweep: str,
    names: tuple[str, str],
    statement: str,
    judged: ServeJudgement,
    expected: str | None,
    cells: Iterable[str],
    scope: dict[str, Any],
) -> Entry:
    believed = judged.verdict in (EXACT, DIFFERS)
    n = judged.n
    return {
        "id": identity,
        "sweep": sweep,
        "route": names[0],
        "model": names[1],
        "statement": statement,
        "verdict": judged.verdict,
        "expected": expected,
        "as_expected": as_expected(judged.verdict, expected),
        "reasons": list(judged.reasons),
        "observable": judged.observable,
        "n": n,
        "interval": _interval(n) if believed else None,
        "worst": judged.worst,
        "first_difference": judged.first_difference,
        "scope": scope,
        "uncovered": None,
        "cells": list(cells),
        "measures": judged.measures,
    }


def _interval(n: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the interval of the share that differs: of replies, or of the positions of a pair.

    Where a request was asked for again and again each reply is one draw, and its positions are
    not.
    """
    if "compared_replies" in n:
        return share_interval(n["differing_replies"], n["compared_replies"], unit="replies")
    return share_interval(n["differing"], n["positions"], unit="positions")


def _somewhere(sweep: str, route: str, claims: Sequence[Entry]) -> Entry:
    """Return the control that a route of which the study expects it does differ somewhere."""
    believed = [claim for claim in claims if claim["verdict"] in (EXACT, DIFFERS)]
    differing = [claim for claim in believed if claim["verdict"] == DIFFERS]
    n = {
        "prompts": max((claim["n"]["prompts"] for claim in believed), default=0),
        **{
            name: sum(claim["n"].get(name, 0) for claim in believed)
            for name in ("positions", "differing", "flips")
        },
        **{
            name: sum(claim["n"][name] for claim in believed)
            for name in ("compared_replies", "differing_replies")
            if believed and all(name in claim["n"] for claim in believed)
        },
        "cells": len(believed),
        "differing_cells": len(differing),
    }
    worst = first = None
    if differing:
        verdict, reasons = DIFFERS, []
        found = [claim["worst"] for claim in differing if claim["worst"]]
        worst = max(found, key=lambda one: one["dlogp_max"], default=None)
        places = [claim["first_difference"] for claim in differing if claim["first_difference"]]
        first = min(places, key=lambda one: _position(one), default=None)
    elif all(claim["verdict"] == UNSUPPORTED for claim in claims):
        verdict, reasons = UNSUPPORTED, [claims[0]["reasons"][0]]
    elif len(believed) < len(claims):
        left = len(claims) - len(believed)
        verdict = INVALID
        reasons = [f"nothing differs, but {left} claims cannot be believed"]
    else:
        verdict, reasons = EXACT, ["nothing that was asked for moved an answer"]
    judged = ServeJudgement(verdict, n, reasons, worst, first, claims[0]["observable"])
    models = dict.fromkeys(claim["model"] for claim in claims)
    scope = {
        "route": route,
        "model": "|".join(models),
        "variant": "any",
        "differing": sorted(claim["id"] for claim in differing),
    }
    return _entry(
        f"{sweep}-differs/{route}",
        sweep,
        (route, "|".join(models)),
        "Some of what was asked for moves an answer, so the comparison can see a difference",
        judged,
        DIFFERS,
        sorted({path for claim in claims for path in claim["cells"]}),
        scope,
    )


def _position(place: Mapping[str, Any]) -> float:
    position = place.get("position")
    return float("inf") if position is None else float(position)


def _scope(
    tables: StudyTables,
    route: str,
    model: str,
    variant: str,
    cell: Cell | None,
    rows: pd.DataFrame,
) -> dict[str, Any]:
    """Return what a claim holds for: nothing outside these values was measured."""
    scope: dict[str, Any] = {"route": route, "model": model, "variant": variant}
    if cell is None:
        return scope
    provenance = cell.provenance
    settings = provenance.get("settings") or {}
    serving = provenance.get("serving") or {}
    build = build_of(provenance, route)
    claim = serving.get("claim") or {}
    fine = rows[(rows["status"] == "ok") & (rows["role"] == "probe")]
    return scope | {
        "quantization": quantization_of(tables.study, model, provenance),
        "tensor_types": (provenance.get("model") or {}).get("tensor_types"),
        "weights": serving.get("weights"),
        "backend": build.get("backend"),
        "patch": build.get("patch"),
        "fingerprint": build.get("fingerprint"),
        "machine": cell.machine.get("kind"),
        "device": serving.get("device") or claim.get("device"),
        "claim": {key: claim[key] for key in ("device", "units") if key in claim} or None,
        "api": serving.get("api") or (serving.get("speech") or {}).get("api"),
        "match": serving.get("match"),
        "arguments": list(serving.get("argv") or []),
        "env": settings.get("env") or {},
        "parallel": serving.get("parallel"),
        "lives": sorted({int(life) for life in fine["life"]}),
        "rounds": int(fine["round"].nunique()),
        "settings": {key: settings[key] for key in sorted(settings)},
        "threads": settings.get("threads"),
        "flash_attention": settings.get("flash_attention"),
        "kv_type": settings.get("kv_type"),
        "prompts": (provenance.get("prompts") or {}).get("name"),
        "categories": sorted(set(fine["category"])),
        "kv_positions": _kv_positions(fine),
        "widths": sorted({int(width) for width in fine["width"]}),
    }


def _kv_positions(fine: pd.DataFrame) -> dict[str, int] | None:
    """Return the KV positions of what was decoded; None where no reply says its prompt's length."""
    known = fine[fine["prompt_n"].notna()]
    if known.empty:
        return None
    prompt = known["cache_n"].fillna(0) + known["prompt_n"]
    return {"min": int(prompt.min()), "max": int((prompt + known["n_received"]).max()) - 1}
