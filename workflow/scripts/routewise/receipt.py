"""The receipt: what a study claims, with verdict, counts, scope, controls, price and provenance.

A receipt is made from the study's Parquet tables alone and holds no time of its own making, so the
same tables give the same bytes. Claims are listed from the study's declaration and not from what
was found: a cell that is missing is a claim that could not be observed, never one left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd

from routewise.arm_verdict import dispatch_summary
from routewise.errors import RoutewiseError
from routewise.interval import LEVEL, detectable_share, share_interval
from routewise.one_build import refuse_mixed
from routewise.price import price_rows
from routewise.serve_receipt import Doubts, arm_controls, serving_entries
from routewise.table import (
    COST_SWEEP,
    PLAIN_VARIANT,
    REPLAY_SWEEP,
    SERVING_SWEEPS,
    WIDTH_1,
    Cell,
    StudyTables,
    build_of,
    measured,
    quantization_of,
    replay_variants,
    study_digest,
)
from routewise.verdict import (
    DIFFERS,
    DIFFERS_SOMEWHERE,
    EXACT,
    INVALID,
    UNOBSERVABLE,
    Judgement,
    as_expected,
    expectation_of,
    judge_plain_twice,
    judge_reference,
    judge_replay,
    judge_somewhere,
)

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).parents[3] / "config" / "schemas" / "receipt.schema.json"

_BUILD_KEYS = ("name", "backend", "patch", "identity", "digest", "fingerprint", "libraries")
_MODEL_KEYS = (
    "name",
    "sha256",
    "n_bytes",
    "architecture",
    "n_layer",
    "n_vocab",
    "tensor_types",
    "derived_from",
)

_SHAPES = {
    "ragged": "Decoding in passes of changing width, as a speculative decoder does,",
    "rollback": "Decoding with wrong drafts that are taken back out of the cache",
    "neighbours": "Decoding beside other sequences in every pass",
}


def statement_of(variant: str) -> str:
    """Return the sentence that a replay variant's claim makes."""
    subject = _SHAPES.get(variant, f"Decoding {variant.removeprefix('w')} tokens a pass")
    return f"{subject} gives the logits of one token alone, bit for bit"


def _routes_of(cell: Cell) -> list[str]:
    """Return the routes that a cell measured: its own, both of a pair, or a cost cell's."""
    if cell.route is not None:
        return list(dict.fromkeys(cell.route.split("|")))
    return sorted(cell.provenance.get("builds") or [])


def build_receipt(tables: StudyTables) -> dict[str, Any]:
    """Return a study's receipt as plain values, valid under receipt.schema.json.

    Raises RoutewiseError where cells of one route were measured with different libraries.
    """
    study = tables.study
    # kept tables may be older than the refusal where they are built
    refuse_mixed(
        one for cell in tables.cells for one in measured(cell.path, cell.sweep, cell.provenance)
    )
    controls: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    arms, doubts = arm_controls(tables)
    sweep = study.get("sweeps", {}).get(REPLAY_SWEEP)
    if sweep:
        controls, claims = _replay(tables, sweep, doubts)
    serving_controls, serving_claims = serving_entries(tables, doubts)
    controls += [*arms, *serving_controls]
    claims += serving_claims
    backends = {
        route: str(build_of(cell.provenance, route).get("backend", ""))
        for cell in tables.cells
        for route in _routes_of(cell)
    }
    receipt = {
        "schema_version": SCHEMA_VERSION,
        "study": str(study["study"]),
        "claims": claims,
        "controls": controls,
        "price": price_rows(study, tables.cost, backends),
        "power": [_power(claim) for claim in claims],
        "provenance": _provenance(tables),
    }
    validate_receipt(receipt)
    return receipt


def _replay(
    tables: StudyTables, sweep: Mapping[str, Any], against: Doubts
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the controls and claims of the replay sweep; ``against`` is what doubts its routes."""
    expect = sweep.get("expect") or {}
    controls: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    somewhere: dict[str, dict[tuple[str, str], Judgement]] = {}
    for route in sweep["routes"]:
        for model in sweep["models"]:
            own, doubts = _own_controls(tables, route, model)
            controls += own
            doubts += against.get((route, model), ())
            for variant in replay_variants(tables.study, route):
                judged = _judge(tables, route, model, variant, doubts)
                somewhere.setdefault(route, {})[(model, variant)] = judged
                claims.append(_claim(tables, route, model, variant, judged, expect))
            controls += _reference_control(tables, route, model)
    for route in sweep["routes"]:
        if expectation_of(expect, route, "") == DIFFERS_SOMEWHERE:
            controls.append(_somewhere_control(tables, route, sweep, somewhere.get(route, {})))
    return controls, claims


def _own_controls(
    tables: StudyTables, route: str, model: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the controls of one route and model, and why its claims are in doubt if one failed."""
    width_1 = _judge(tables, route, model, WIDTH_1, [])
    cells = [
        cell
        for cell in tables.cells
        if (cell.route, cell.model) == (route, model) and cell.variant != PLAIN_VARIANT
    ]
    plain = _plain_rows(tables, route, model)
    rows = tables.replay[(tables.replay["route"] == route) & (tables.replay["model"] == model)]
    twice = judge_plain_twice(rows, plain)
    controls = [
        _entry(
            tables,
            control,
            route,
            model,
            statement,
            judged,
            expected=EXACT,
            cells=paths,
        )
        for control, statement, judged, paths in (
            (
                "width-1-equals-plain",
                "Replaying the recorded tokens one a pass gives the plain arm's logits",
                width_1,
                _paths(tables, route, model, [WIDTH_1, PLAIN_VARIANT]),
            ),
            (
                "plain-twice",
                "The plain arm, run again in every job, gives the same logits",
                twice,
                sorted(
                    {cell.path for cell in cells}
                    | set(_paths(tables, route, model, [PLAIN_VARIANT]))
                ),
            ),
        )
    ]
    doubts = [
        f"control {control['id']} does not hold: it is {control['verdict']}"
        for control in controls
        if control["verdict"] != EXACT
    ]
    return controls, doubts


def _judge(
    tables: StudyTables, route: str, model: str, variant: str, doubts: Sequence[str]
) -> Judgement:
    """Judge one replay cell with its plain cell, and with what its controls say against it."""
    cell = tables.find(route, model, variant)
    plain_cell = tables.find(route, model, PLAIN_VARIANT)
    if cell is None:
        n = judge_replay(variant, tables.replay.iloc[:0], None).n
        return Judgement(UNOBSERVABLE, n, ["no such cell was measured"])
    reasons = list(cell.invalid_reasons)
    if plain_cell is not None:
        reasons += [f"plain cell: {reason}" for reason in plain_cell.invalid_reasons]
    return judge_replay(
        variant,
        tables.rows_of(cell),
        _plain_rows(tables, route, model),
        [*reasons, *doubts],
        str(cell.provenance.get("unsupported") or ""),
    )


def _plain_rows(tables: StudyTables, route: str, model: str) -> pd.DataFrame | None:
    cell = tables.find(route, model, PLAIN_VARIANT)
    return None if cell is None else tables.rows_of(cell)


def _paths(tables: StudyTables, route: str, model: str, variants: Iterable[str]) -> list[str]:
    cells = (tables.find(route, model, variant) for variant in variants)
    return sorted(cell.path for cell in cells if cell is not None)


def _claim(
    tables: StudyTables,
    route: str,
    model: str,
    variant: str,
    judged: Judgement,
    expect: Mapping[str, Any],
) -> dict[str, Any]:
    claim = _entry(
        tables,
        f"{REPLAY_SWEEP}/{route}/{model}/{variant}",
        route,
        model,
        statement_of(variant),
        judged,
        expected=expectation_of(expect, route, variant),
        cells=_paths(tables, route, model, [variant, PLAIN_VARIANT]),
    )
    cell = tables.find(route, model, variant)
    claim["scope"] = _scope(tables, route, model, variant)
    claim["uncovered"] = str((cell.provenance if cell else {}).get("coverage_report") or "") or None
    return claim


def _entry(
    tables: StudyTables,
    name: str,
    route: str,
    model: str,
    statement: str,
    judged: Judgement,
    expected: str | None,
    cells: list[str],
) -> dict[str, Any]:
    """Return a claim or a control; a control's name gets its route and model as an id."""
    identity = name if name.startswith(REPLAY_SWEEP) else f"{name}/{route}/{model}"
    n = judged.n
    believed = judged.verdict in (EXACT, DIFFERS)
    return {
        "id": identity,
        "sweep": REPLAY_SWEEP,
        "route": route,
        "model": model,
        "statement": statement,
        "verdict": judged.verdict,
        "expected": expected,
        "as_expected": as_expected(judged.verdict, expected),
        "reasons": judged.reasons,
        "observable": "logits",
        "n": n,
        "interval": share_interval(n["differing"], n["positions"]) if believed else None,
        "worst": judged.worst,
        "first_difference": judged.first_difference,
        "scope": _scope(tables, route, model, PLAIN_VARIANT),
        "uncovered": None,
        "cells": cells,
    }


def _reference_control(tables: StudyTables, route: str, model: str) -> list[dict[str, Any]]:
    """Return the control that a route's plain arm is its reference's; empty without a reference."""
    reference = tables.study["routes"][route].get("reference")
    if not reference:
        return []
    mine, theirs = (tables.find(name, model, PLAIN_VARIANT) for name in (route, reference))
    judged = judge_reference(
        _plain_rows(tables, route, model), _plain_rows(tables, reference, model)
    )
    reasons = []
    notes = []
    if mine is not None and theirs is not None:
        for name, cell in ((route, mine), (reference, theirs)):
            reasons += [f"plain cell of {name}: {reason}" for reason in cell.invalid_reasons]
        machines = {str(cell.machine.get("kind")) for cell in (mine, theirs)}
        if len(machines) > 1:
            reasons.append(f"the two were measured on different machines: {sorted(machines)}")
        if mine.fingerprint == theirs.fingerprint:
            notes.append("both routes ran the same libraries, so this holds by construction")
    if reasons:
        judged = Judgement(
            INVALID, judged.n, [*judged.reasons, *reasons], None, judged.first_difference
        )
    elif notes:
        judged = Judgement(
            judged.verdict, judged.n, [*judged.reasons, *notes], None, judged.first_difference
        )
    control = _entry(
        tables,
        "reference-unmoved",
        route,
        model,
        f"One token alone gives the same logits and tokens as on {reference}",
        judged,
        expected=EXACT,
        cells=sorted(
            _paths(tables, route, model, [PLAIN_VARIANT])
            + _paths(tables, reference, model, [PLAIN_VARIANT])
        ),
    )
    control["scope"]["reference"] = reference
    return [control]


def _somewhere_control(
    tables: StudyTables,
    route: str,
    sweep: Mapping[str, Any],
    judgements: Mapping[tuple[str, str], Judgement],
) -> dict[str, Any]:
    """Return the control that a route of which the study expects it does differ somewhere."""
    models = list(sweep["models"])
    judged = judge_somewhere(judgements)
    control = _entry(
        tables,
        "stock-differs",
        route,
        models[0],
        "Some width or shape moves the bits, so the comparison can see a difference",
        judged,
        expected=DIFFERS,
        cells=sorted(
            path
            for model, variant in judgements
            for path in _paths(tables, route, model, [variant])
        ),
    )
    control["model"] = "|".join(models)
    control["id"] = f"stock-differs/{route}"
    control["scope"]["differing"] = sorted(
        f"{model}/{variant}"
        for (model, variant), one in judgements.items()
        if one.verdict == DIFFERS
    )
    return control


def _scope(tables: StudyTables, route: str, model: str, variant: str) -> dict[str, Any]:
    """Return what a claim holds for: nothing outside these values was measured."""
    cell = tables.find(route, model, variant) or tables.find(route, model, PLAIN_VARIANT)
    scope: dict[str, Any] = {"route": route, "model": model, "variant": variant}
    if cell is None:
        return scope
    rows = tables.rows_of(cell)
    provenance = cell.provenance
    settings = provenance.get("settings") or {}
    build = build_of(provenance, route)
    scope |= {
        "quantization": quantization_of(tables.study, model, provenance),
        "tensor_types": (provenance.get("model") or {}).get("tensor_types"),
        "backend": build.get("backend"),
        "patch": build.get("patch"),
        "fingerprint": build.get("fingerprint"),
        "machine": cell.machine.get("kind"),
        "settings": {key: settings[key] for key in sorted(settings)},
        "threads": settings.get("threads"),
        "flash_attention": settings.get("flash_attention"),
        "kv_type": settings.get("kv_type"),
        "prompts": (provenance.get("prompts") or {}).get("name"),
        "categories": sorted(set(rows["category"])),
        "kv_positions": None,
    }
    if len(rows):
        scope["kv_positions"] = {
            "min": int(rows["kv_position"].min()),
            "max": int(rows["kv_position"].max()),
        }
    if cell.variant != PLAIN_VARIANT:
        for name in ("pass_width", "pass_tokens"):
            scope[f"{name}s"] = sorted({int(value) for value in rows[name]})
        for name in ("crosses_128", "crosses_256"):
            scope[name] = bool(rows[name].any())
    return scope


def _power(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a claim's number of positions, or of replies asked for again, could have shown.

    Copies of one round and positions of one prompt are not independent, so that this is the best
    that the number can do.
    """
    if claim["sweep"] == REPLAY_SWEEP:
        unit, named = "positions", {}
    else:
        unit = "replies" if "compared_replies" in claim["n"] else "positions"
        named = {"unit": unit}
    n = claim["n"]["compared_replies" if unit == "replies" else "positions"]
    share = detectable_share(n)
    return {
        "claim": claim["id"],
        "n": n,
        **named,
        "level": LEVEL,
        "detectable_share": share,
        "statement": "nothing was compared"
        if share is None
        else f"with {LEVEL:.0%} probability {n} {unit} show a difference that moves "
        f"{share:.2%} of {unit} or more",
    }


def _provenance(tables: StudyTables) -> dict[str, Any]:
    """Return what made the numbers: study, builds, models, prompts, machines, code, times."""
    routes: dict[str, Any] = {}
    models: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    machines: dict[str, Any] = {}
    versions: dict[str, set[str]] = {}
    digests: dict[str, set[str]] = {}
    # what was replayed first: a server's build is then recorded beside it
    for cell in sorted(tables.cells, key=lambda cell: cell.sweep in SERVING_SWEEPS):
        provenance = cell.provenance
        for route in _routes_of(cell):
            build = build_of(provenance, route)
            kept = {key: build[key] for key in _BUILD_KEYS if key in build}
            if cell.sweep not in SERVING_SWEEPS:
                routes[route] = {**routes.get(route, {}), **kept}
            elif kept:
                _add_server(routes.setdefault(route, {}), kept)
        model = provenance.get("model") or {}
        if model.get("name"):
            models[model["name"]] = {key: model[key] for key in _MODEL_KEYS if key in model}
        prompt_set = provenance.get("prompts") or {}
        if prompt_set.get("name") and cell.model:
            prompts[f"{prompt_set['name']}/{cell.model}"] = prompt_set.get("digest")
        machine = cell.machine
        machines[json.dumps(machine, sort_keys=True)] = machine
        for name, version in (provenance.get("versions") or {}).items():
            versions.setdefault(name, set()).add(str(version))
        if provenance.get("code_digest"):
            digests.setdefault(cell.sweep, set()).add(str(provenance["code_digest"]))
    logged = dispatch_summary(tables)
    documents = [cell.provenance for cell in tables.cells]
    started = [str(found["started_at"]) for found in documents if found.get("started_at")]
    ended = [str(found["ended_at"]) for found in documents if found.get("ended_at")]
    return {
        "study_digest": study_digest(tables.study),
        "routes": routes,
        "models": models,
        "prompts": prompts,
        "machines": [machines[key] for key in sorted(machines)],
        "code_digests": {sweep: sorted(found) for sweep, found in digests.items()},
        "versions": {name: sorted(found) for name, found in versions.items()},
        **({"dispatch": logged} if logged else {}),
        "measured": {"from": min(started, default=None), "to": max(ended, default=None)},
        "cells": {
            sweep: {
                "n": len(found),
                "invalid": sorted(cell.path for cell in found if cell.invalid_reasons),
                "fragments_measured": _total(found, "n_measured"),
                "fragments_adopted": _total(found, "n_adopted"),
                "measure_s": _total(found, "measure_s"),
                "compare_s": _total(found, "compare_s"),
            }
            for sweep in (REPLAY_SWEEP, COST_SWEEP, *SERVING_SWEEPS)
            if (found := [cell for cell in tables.cells if cell.sweep == sweep])
        },
    }


def _add_server(build: dict[str, Any], server: Mapping[str, Any]) -> None:
    """Record a route's server: as the build where nothing was replayed, else beside it."""
    if not build:
        build.update(server)
    elif build.get("fingerprint") != server.get("fingerprint"):
        build["server_fingerprint"] = server.get("fingerprint")


def _total(cells: Iterable[Cell], key: str) -> float:
    return sum(cell.provenance.get(key) or 0 for cell in cells)


def validate_receipt(receipt: Mapping[str, Any]) -> None:
    """Check a receipt against config/schemas/receipt.schema.json.

    Raises RoutewiseError with the place in the receipt that is wrong.
    """
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
    problem = jsonschema.exceptions.best_match(validator.iter_errors(receipt))
    if problem is not None:
        place = "/".join(str(part) for part in problem.absolute_path) or "(top)"
        raise RoutewiseError(f"receipt, at {place}: {problem.message}", "make the receipt again")


def receipt_json(receipt: Mapping[str, Any]) -> str:
    """Return the receipt as text: sorted keys, no NaN, the same bytes for the same tables."""
    text = json.dumps(receipt, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False)
    return text + "\n"


def read_receipt(path: Path) -> dict[str, Any]:
    """Read and check a receipt.

    Raises RoutewiseError where the file is absent, no JSON, of another schema version, or no valid
    receipt.
    """
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RoutewiseError(f"{path}: no such receipt", "run `make demo` first") from error
    except ValueError as error:
        raise RoutewiseError(f"{path}: not JSON ({error})", "make the receipt again") from error
    if not isinstance(receipt, dict):
        raise RoutewiseError(f"{path}: holds no receipt", "make the receipt again")
    version = receipt.get("schema_version", SCHEMA_VERSION)  # where it lacks, the check says so
    if version != SCHEMA_VERSION:
        is_newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise RoutewiseError(
            f"{path}: a receipt of schema version {version}, this Routewise reads {SCHEMA_VERSION}",
            "read it with the newer Routewise that wrote it"
            if is_newer
            else "run its study again, or read it with the Routewise that wrote it",
        )
    validate_receipt(receipt)
    return receipt
