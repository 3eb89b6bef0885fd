"""The plan of a study: every file that will be made, named by digests of what makes it.

Nothing is compiled or measured here, so that ``snakemake -n`` says exactly what would run. A
file's path holds the digest of everything that decides its content: sources and measuring code by
their meaning (a comment changes nothing), models and prompts by their content, settings by value.
What has been made once under a path is never made again, and what changes gets another path.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from routewise.block import Block, refusal
from routewise.build import BuildPlan, BuildSpec, plan_build
from routewise.cell import PLAIN_VARIANT, Cell
from routewise.cost import Arm, CostCell
from routewise.digest import DigestCache, canonical_json, digest_of, sha256_file, tree_digest
from routewise.dispatch import BASE_REPEATS
from routewise.errors import RoutewiseError
from routewise.model import ModelPlan, plan_model
from routewise.normalise import code_digest
from routewise.patch import load_patch
from routewise.prompt import load_prompts, prompts_digest
from routewise.route import Route
from routewise.serve_cell import ServeCell
from routewise.source import SourceSpec, fetch_source, is_fetched, source_root
from routewise.study import SERVING_SWEEPS, Study, agree_pairs, batched_blocks

#: Environment of every replay. Threads that spin at a barrier slow a busy machine many times and
#: change no bit; a cost cell, where time is what is measured, runs with the engine's own default.
REPLAY_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}

#: Environment of every server of a build: as a replay's; and a crash starts no debugger.
SERVER_ENVIRONMENT = {**REPLAY_ENVIRONMENT, "GGML_NO_BACKTRACE": "1"}

DIGEST_LENGTH = 16

#: Whose code a sweep's rows depend on.
MEASURING_SCRIPTS = (
    "measure_replay",
    "measure_cost",
    "tokenize_prompts",
    "measure_serving",
    "measure_dispatch",
    "compare_routes",
)


@dataclass(frozen=True)
class PromptPlan:
    """Token ids of one prompt set under one model's tokenizer."""

    prompts: str
    model: str
    file: Path
    build: str  # whose tokenizer
    context: int  # the least of the routes that decode them
    digest: str
    path: Path


@dataclass(frozen=True)
class CellPlan:
    """One replay or plain cell, and the paths that it is made from."""

    cell: Cell
    build: str
    prompts: PromptPlan
    plain: Path | None
    path: Path

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return canonical_json(self.cell.document())


@dataclass(frozen=True)
class CostPlan:
    """One cost cell: a model on all routes of the sweep."""

    cell: CostCell
    builds: tuple[str, ...]
    path: Path

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return canonical_json(self.cell.document())


@dataclass(frozen=True)
class ServePlan:
    """One serving cell: a route's server in one configuration, and all that it is asked."""

    cell: ServeCell
    build: str | None  # whose server; None for an external command or an endpoint
    prompts: PromptPlan
    path: Path

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return canonical_json(self.cell.document())


@dataclass(frozen=True)
class AgreePlan:
    """One comparison of two routes' replies, made from their cells alone."""

    cell: dict[str, Any]
    a: Path
    b: Path
    path: Path

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return canonical_json(self.cell)


@dataclass(frozen=True)
class StudyPlan:
    """Everything that a study's run will make."""

    study: Study
    results: Path
    builds: dict[str, BuildPlan]
    models: dict[str, ModelPlan]
    prompts: dict[tuple[str, str], PromptPlan]  # (model, prompt set)
    cells: dict[str, CellPlan]  # by path
    costs: dict[str, CostPlan]  # by path
    serves: dict[str, ServePlan]  # by path
    agrees: dict[str, AgreePlan]  # by path
    code: dict[str, str]  # digest of each measuring script

    @property
    def folder(self) -> Path:
        """Where the study's tables, receipt and figures go."""
        return self.results / self.study.name

    def cell_paths(self) -> list[str]:
        """Return the paths of all cells, in the order of the study."""
        return [*self.cells, *self.costs, *self.serves, *self.agrees]


def fetch_sources(study: Study, results: Path, say: Callable[[str], None] | None = None) -> None:
    """Bring the study's pinned sources into the results folder, and look at its live trees."""
    for name, entry in study.sources.items():
        fetch_source(name, SourceSpec.from_config(name, entry), results, say=say or _say)


def plan_study(study: Study, results: Path, root: Path) -> StudyPlan:
    """Plan a study; ``root`` is the repository root, where patches and scripts lie.

    Sources must have been fetched. Raises RoutewiseError where anything named does not exist, a
    patch does not apply, or no compiler is found.
    """
    cache = DigestCache(results / ".cache" / "digests.json")
    builds = _plan_builds(study, results, root, cache)
    tools = {name: plan.tools_digest for name, plan in builds.items() if plan.patch is None}
    models = {
        name: plan_model(name, study.models, results / "models", tool_digests=tools, cache=cache)
        for name in study.models
    }
    scripts = root / "workflow" / "scripts"
    code = {name: code_digest(scripts / f"{name}.py", cache) for name in MEASURING_SCRIPTS}
    prompts = _plan_prompts(study, results, builds, models, code["tokenize_prompts"])
    serves = _plan_serving(study, results, builds, models, prompts, code, cache)
    plan = StudyPlan(
        study=study,
        results=results,
        builds=builds,
        models=models,
        prompts=prompts,
        cells=_plan_replay(study, results, builds, models, prompts, code["measure_replay"]),
        costs=_plan_cost(study, results, builds, models, code["measure_cost"]),
        serves=serves,
        agrees=_plan_agree(study, results, serves, code["compare_routes"]),
        code=code,
    )
    cache.save()
    return plan


def _plan_builds(
    study: Study, results: Path, root: Path, cache: DigestCache
) -> dict[str, BuildPlan]:
    plans = {}
    for name, entry in study.builds.items():
        spec = BuildSpec.from_config(name, entry)
        source_spec = SourceSpec.from_config(spec.source, study.sources[spec.source])
        if not is_fetched(spec.source, source_spec, results):
            raise RoutewiseError(
                f"source {spec.source}: not fetched", "python -m routewise fetch STUDY"
            )
        patch = load_patch(spec.patch, root / "patches") if spec.patch else None
        tree = source_root(spec.source, source_spec, results)
        plans[name] = plan_build(name, spec, tree, results, patch=patch, cache=cache)
    return plans


def _plan_prompts(
    study: Study,
    results: Path,
    builds: Mapping[str, BuildPlan],
    models: Mapping[str, ModelPlan],
    code: str,
) -> dict[tuple[str, str], PromptPlan]:
    wanted: dict[tuple[str, str], list[Route]] = {}
    for sweep in study.sweeps.values():
        for model in sweep["models"] if "prompts" in sweep else ():
            routes = wanted.setdefault((model, sweep["prompts"]), [])
            routes += [study.routes[route] for route in sweep["routes"]]
    plans = {}
    for (model, name), routes in wanted.items():
        file = study.prompts[name]
        build = _tokenizer_build(routes, builds)
        context = min(route.settings.context for route in routes)
        digest = digest_of(
            {
                "prompts": prompts_digest(load_prompts(file)),
                "model": models[model].key,
                "engine": builds[build].digest,
                "context": context,
                "code": code,
            }
        )[:DIGEST_LENGTH]
        path = results / "prompts" / digest / f"{model}.{name}.parquet"
        plans[(model, name)] = PromptPlan(name, model, file, build, context, digest, path)
    return plans


def _tokenizer_build(routes: Iterable[Route], builds: Mapping[str, BuildPlan]) -> str:
    """Return the build whose tokenizer serves all routes: a patch changes none, so an unpatched.

    Routes of other kinds have no build: then any of the study's.
    """
    named = [route.build for route in routes if route.build is not None] or list(builds)
    return next((name for name in named if builds[name].patch is None), named[0])


def variant_parameters(variant: str, replay: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sweep's parameters that a variant's rows depend on, and no others."""
    wanted = {
        PLAIN_VARIANT: ("top_k",),
        "ragged": ("seed",),
        "rollback": ("seed",),
        "neighbours": ("seed", "neighbours"),
    }
    return {key: replay[key] for key in wanted.get(variant, ())}


def _plan_replay(
    study: Study,
    results: Path,
    builds: Mapping[str, BuildPlan],
    models: Mapping[str, ModelPlan],
    prompts: Mapping[tuple[str, str], PromptPlan],
    code: str,
) -> dict[str, CellPlan]:
    cells: dict[str, CellPlan] = {}
    if study.replay is None:
        return cells
    for route_name in study.replay["routes"]:
        route = study.routes[route_name]
        build = _build_of(route)
        for model in study.replay["models"]:
            prompt_plan = prompts[(model, study.replay["prompts"])]
            plain: Path | None = None
            for variant in (PLAIN_VARIANT, *study.replay_variants(route_name)):
                parameters = variant_parameters(variant, study.replay)
                env = {**REPLAY_ENVIRONMENT, **route.env}
                digest = digest_of(
                    {
                        "sweep": "replay",
                        "variant": variant,
                        "settings": asdict(route.settings),
                        "parameters": parameters,
                        "env": env,
                        "engine": builds[build].digest,
                        "model": models[model].key,
                        "prompts": prompt_plan.digest,
                        "code": code,
                        "plain": None if plain is None else plain.parent.name,
                    }
                )[:DIGEST_LENGTH]
                name = f"replay.{route_name}.{model}.{variant}.parquet"
                path = results / "cells" / digest / name
                cell = Cell(
                    sweep="replay",
                    route=route_name,
                    model=model,
                    variant=variant,
                    prompts=prompt_plan.prompts,
                    digest=digest,
                    settings=route.settings,
                    parameters=parameters,
                    env=env,
                )
                cells[str(path)] = CellPlan(cell, build, prompt_plan, plain, path)
                plain = path if variant == PLAIN_VARIANT else plain
    return cells


def _plan_cost(
    study: Study,
    results: Path,
    builds: Mapping[str, BuildPlan],
    models: Mapping[str, ModelPlan],
    code: str,
) -> dict[str, CostPlan]:
    costs: dict[str, CostPlan] = {}
    if study.cost is None:
        return costs
    routes: list[Route] = [study.routes[name] for name in study.cost["routes"]]
    arms = tuple(
        Arm(route.name, builds[_build_of(route)].engine_dir, route.settings, route.env)
        for route in routes
    )
    for model in study.cost["models"]:
        cell = CostCell(
            model=model,
            digest="",
            arms=arms,
            widths=tuple(study.cost["widths"]),
            depth=study.cost["depth"],
            rounds=study.cost["rounds"],
            warmup=study.cost["warmup"],
        )
        digest = digest_of(
            {
                "sweep": "cost",
                "cell": cell.document(),
                "engines": [builds[_build_of(route)].digest for route in routes],
                "model": models[model].key,
                "code": code,
            }
        )[:DIGEST_LENGTH]
        cell = CostCell(**{**vars(cell), "digest": digest})
        path = results / "cells" / digest / f"cost.{model}.parquet"
        costs[str(path)] = CostPlan(cell, tuple(_build_of(route) for route in routes), path)
    return costs


def _build_of(route: Route) -> str:
    assert route.build is not None, f"{route.name}: the study was checked for this"
    return route.build


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


def _plan_serving(
    study: Study,
    results: Path,
    builds: Mapping[str, BuildPlan],
    models: Mapping[str, ModelPlan],
    prompts: Mapping[tuple[str, str], PromptPlan],
    code: Mapping[str, str],
    cache: DigestCache,
) -> dict[str, ServePlan]:
    plans: dict[str, ServePlan] = {}
    for sweep in SERVING_SWEEPS:
        entry = study.sweeps.get(sweep)
        for route in [study.routes[name] for name in entry["routes"]] if entry else ():
            assert entry is not None
            made_of = _made_of(route, builds, cache)
            for model in entry["models"]:
                prompt_plan = prompts[(model, entry["prompts"])]
                for variant, blocks in _serving_blocks(sweep, entry).items():
                    cell = _serve_cell(sweep, entry, route, model, variant, blocks)
                    digest = digest_of(
                        {
                            "cell": _without_patience(cell.document()),
                            "made_of": made_of,
                            "model": models[model].key,
                            "prompts": prompt_plan.digest,
                            "code": code[serving_script(sweep)],
                        }
                    )[:DIGEST_LENGTH]
                    cell = ServeCell(**{**vars(cell), "digest": digest})
                    name = f"{sweep}.{route.name}.{model}.{variant}.parquet"
                    path = results / "cells" / digest / name
                    plans[str(path)] = ServePlan(cell, route.build, prompt_plan, path)
    return plans


def serving_script(sweep: str) -> str:
    """Return the script that measures a serving sweep's cells."""
    return "measure_dispatch" if sweep == "dispatch" else "measure_serving"


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


def _without_patience(document: dict[str, Any]) -> dict[str, Any]:
    """Leave out what decides how long a job waits, and not what it measures."""
    serving = {**document["serving"]}
    for name in ("start_limit_s", "stall_s"):
        del serving[name]
    if serving["claim"] is not None:
        serving["claim"] = {k: v for k, v in serving["claim"].items() if k != "limit_minutes"}
    return {**document, "serving": serving}


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
    program = shutil.which(route.serving.argv[0])
    return {**found, "program": None if program is None else sha256_file(Path(program), cache)}


def _plan_agree(
    study: Study, results: Path, serves: Mapping[str, ServePlan], code: str
) -> dict[str, AgreePlan]:
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
        twice = [(route, route, 1) for route in entry["routes"]]
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
            digest = digest_of(
                {"cell": cell, "sides": [side.cell.digest for side in sides], "code": code}
            )[:DIGEST_LENGTH]
            path = results / "cells" / digest / f"agree.{a}+{b}.{model}.w{width}.parquet"
            plans[str(path)] = AgreePlan(
                {**cell, "digest": digest}, sides[0].path, sides[1].path, path
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


def study_json(study: Study) -> str:
    """Return the study's declaration as one canonical JSON string, defaults filled in."""
    document = json.loads(json.dumps(study.document))
    document["sweeps"] = {**document["sweeps"], **study.sweeps}
    return canonical_json(document)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
