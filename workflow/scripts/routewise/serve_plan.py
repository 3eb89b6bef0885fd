"""The plan of the serving sweeps: which servers are asked what, and which routes are compared."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from routewise.block import Block, refusal
from routewise.build import BuildPlan
from routewise.digest import (
    DigestCache,
    canonical_json,
    sha256_file,
    tree_digest,
)
from routewise.dispatch import BASE_REPEATS
from routewise.inputs import fields_json, inputs_json, json_digest
from routewise.model import ModelPlan
from routewise.prompt import PromptPlan
from routewise.route import Route
from routewise.serve_cell import ServeCell, command_files
from routewise.study import SERVING_SWEEPS, Study, agree_pairs, batched_blocks

#: Environment of every server of a build: threads sleep, as in a replay; and a crash
#: starts no debugger.
SERVER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}


@dataclass(frozen=True)
class ServePlan:
    """One serving cell: a route's server in one configuration, and all that it is asked."""

    cell: ServeCell
    build: str | None  # whose server; None for an external command or an endpoint
    prompts: PromptPlan
    path: Path
    inputs_json: str

    @property
    def inputs(self) -> dict[str, Any]:
        """All that decides the cell's rows, by name."""
        found: dict[str, Any] = json.loads(self.inputs_json)
        return found

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return fields_json(self.cell)


@dataclass(frozen=True)
class AgreePlan:
    """One comparison of two routes' replies, made from their cells alone."""

    cell: dict[str, Any]
    a: Path
    b: Path
    path: Path
    inputs_json: str

    @property
    def inputs(self) -> dict[str, Any]:
        """All that decides the cell's rows, by name."""
        found: dict[str, Any] = json.loads(self.inputs_json)
        return found

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return canonical_json(self.cell)


def _serving_blocks(sweep: str, entry: Mapping[str, Any]) -> dict[str, tuple[Block, ...]]:
    """Return what a sweep asks of a route's servers: variant -> blocks, one server each.

    The names of the variants say how many slots the server has; ``solo`` has one, ``log`` as many
    as the greatest width.
    """
    if sweep == "repeat":
        blocks = (
            Block(life, cache, "copies", "together", 1, 1, entry["repeats"])
            for life in range(entry["lives"])
            for cache in entry["cache"]
        )
        return {"solo": tuple(blocks)}
    if sweep == "batched":
        return {
            f"p{parallel}": tuple(
                Block(0, "off", mix, prefill, parallel, width, entry["rounds"])
                for width, mix, prefill in batched_blocks(entry, parallel)
            )
            for parallel in entry["parallel"]
        }
    if sweep == "agree":
        # width 1 in two lives of the server: the control that a route agrees with itself
        lives = {1: (0, 1)}
        return {
            f"p{width}": tuple(
                Block(life, "off", "copies", "together", width, width, entry["rounds"])
                for life in lives.get(width, (0,))
            )
            for width in entry["widths"]
        }
    # dispatch: each repeat of each width in a life of its own
    places = itertools.product(entry["widths"], range(BASE_REPEATS))
    return {
        "log": tuple(
            Block(life, "off", "copies", "together", max(entry["widths"]), width, 1)
            for life, (width, _) in enumerate(places)
        )
    }


def plan_serving(
    study: Study,
    results: Path,
    builds: Mapping[str, BuildPlan],
    models: Mapping[str, ModelPlan],
    prompts: Mapping[tuple[str, str], PromptPlan],
    code: str,
    cache: DigestCache,
) -> dict[str, ServePlan]:
    """Return all serving cells of a study by path; ``code`` is the measuring script's digest."""
    plans: dict[str, ServePlan] = {}
    cells_dir = results / "cells"
    for sweep in SERVING_SWEEPS:
        entry = study.sweeps.get(sweep)
        for route in [study.routes[name] for name in entry["routes"]] if entry else ():
            assert entry is not None
            made_of = _made_of(route, builds, cache)
            for model in entry["models"]:
                prompt_plan = prompts[(model, entry["prompts"])]
                for variant, blocks in _serving_blocks(sweep, entry).items():
                    cell = _serve_cell(sweep, entry, route, model, variant, blocks)
                    inputs = inputs_json(
                        sweep,
                        {
                            "sweep": sweep,
                            "variant": variant,
                            "cell": _without_patience(cell),
                            "made_of": made_of,
                            "host": route.host,
                            "model": models[model].key,
                            "prompts": prompt_plan.digest,
                            "code": code,
                        },
                    )
                    digest = json_digest(inputs)
                    cell = replace(cell, digest=digest)
                    name = f"{sweep}.{route.name}.{model}.{variant}.parquet"
                    path = cells_dir.joinpath(digest, name)
                    plans[str(path)] = ServePlan(cell, route.build, prompt_plan, path, inputs)
    return plans


def _serve_cell(
    sweep: str,
    entry: Mapping[str, Any],
    route: Route,
    model: str,
    variant: str,
    blocks: Sequence[Block],
) -> ServeCell:
    serving = route.serving
    refused, kept = [], []
    for block in blocks:
        if reason := refusal(block, serving):
            refused.append({"block": block.document(), "reason": reason})
            continue
        most = serving.repeats_max
        rounds = block.rounds if most is None else min(block.rounds, most)
        kept.append(Block(**{**vars(block), "rounds": rounds}))
    environment = SERVER_ENVIRONMENT if route.kind == "build" else {}
    return ServeCell(
        sweep=sweep,
        route=route.name,
        model=model,
        variant=variant,
        prompts=entry["prompts"],
        digest="",
        kind=route.kind,
        settings=route.settings,
        env={**environment, **route.env},
        serving=serving,
        parallel=max((block.parallel for block in blocks), default=1),
        blocks=tuple(kept),
        refused=tuple(refused),
        n_probs=entry.get("n_probs", 0),
        n_tokens=entry["n_tokens"],
        seed=entry.get("seed", 1),
    )


def _without_patience(cell: ServeCell) -> dict[str, Any]:
    """Leave out what decides how long a job waits or what it logs, and not what it measures."""
    serving = {**vars(cell.serving)}
    for name in ("start_limit_s", "stall_s"):
        del serving[name]
    if cell.sweep != "dispatch":
        del serving["dispatch"]  # nobody logs there
    if serving["claim"] is not None:
        claim = vars(serving["claim"])
        serving["claim"] = {key: value for key, value in claim.items() if key != "limit_minutes"}
    return {**vars(cell), "serving": serving}


def _made_of(route: Route, builds: Mapping[str, BuildPlan], cache: DigestCache) -> dict[str, Any]:
    """Return digests of what a route runs: a build's server, or a command and what it loads.

    A command that this machine does not have is known by its words alone: a plan may be made where
    the device is not.
    """
    artefact = route.serving.artefact
    found = {"artefact": None if artefact is None else tree_digest(Path(artefact), cache)}
    if route.build is not None:
        return {**found, "server": builds[route.build].server_digest}
    if route.kind == "endpoint":
        return {**found, "endpoint": route.serving.endpoint}
    program = shutil.which(route.serving.argv[0], path=route.env.get("PATH"))
    return {
        **found,
        "program": None if program is None else sha256_file(Path(program), cache),
        "files": command_files(route.serving, cache),
    }


def plan_agree(
    study: Study, results: Path, serves: Mapping[str, ServePlan], code: str
) -> dict[str, AgreePlan]:
    """Return all comparisons of a study's routes by path, of pairs and of each with itself."""
    plans: dict[str, AgreePlan] = {}
    entry = study.sweeps.get("agree")
    if entry is None:
        return plans
    captures = {
        (plan.cell.route, plan.cell.model, plan.cell.variant): plan
        for plan in serves.values()
        if plan.cell.sweep == "agree"
    }
    for model in entry["models"]:
        pairs = [(a, b, width) for width in entry["widths"] for a, b in agree_pairs(entry)]
        twice = [(route, route, width) for width in entry["widths"] for route in entry["routes"]]
        for a, b, width in [*pairs, *twice]:
            sides = [captures[(route, model, f"p{width}")] for route in (a, b)]
            picks = [_pick(sides[0], first=True), _pick(sides[1], first=a != b)]
            cell = {
                "sweep": "agree",
                "route": f"{a}|{b}",
                "model": model,
                "variant": f"w{width}",
                "prompts": entry["prompts"],
                "pick_a": picks[0],
                "pick_b": picks[1],
            }
            inputs = inputs_json(
                "compare",
                {
                    "sweep": "agree",
                    "cell": cell,
                    "sides": [side.cell.digest for side in sides],
                    "code": code,
                },
            )
            digest = json_digest(inputs)
            path = results / "cells" / digest / f"agree.{a}+{b}.{model}.w{width}.parquet"
            plans[str(path)] = AgreePlan(
                {**cell, "digest": digest}, sides[0].path, sides[1].path, path, inputs
            )
    return plans


def _pick(plan: ServePlan, *, first: bool) -> dict[str, Any]:
    """Return which replies of a capture stand for its route: the first round, or another one.

    The other one is the first round of another life of the server, where it has two, else a later
    round of the same.
    """
    lives = sorted({block.life for block in plan.cell.blocks}) or [0]
    rounds = max((block.rounds for block in plan.cell.blocks), default=1)
    life = lives[0] if first else lives[-1]
    again = not first and len(lives) == 1
    return {"life": life, "round": rounds - 1 if again else 0}
