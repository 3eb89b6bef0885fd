"""The plan of a study: every file that will be made, named by digests of what makes it.

Nothing is compiled or measured here, so that ``snakemake -n`` says exactly what would run. A
file's path holds the digest of everything that decides its content: sources and measuring code by
their meaning (a comment changes nothing), models and prompts by their content, settings by value.
What has been made once under a path is never made again, and what changes gets another path.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shlex
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from routewise.build import PARTS, BuildPlan, BuildSpec, plan_build
from routewise.cell import PLAIN_VARIANT, Cell
from routewise.claim import ClaimSpec
from routewise.cost import Arm, CostCell
from routewise.device import COUNTED_AS
from routewise.digest import (
    DIGEST_LENGTH,
    DigestCache,
    canonical_json,
    digest_of,
    sha256_bytes,
    write_text,
)
from routewise.errors import RoutewiseError
from routewise.inputs import fields_json, inputs_json, json_digest, write_manifest
from routewise.model import ModelPlan, plan_model
from routewise.normalise import Imports, code_digest, code_parts
from routewise.patch import load_patch
from routewise.prompt import PromptPlan, load_prompts, prompts_digest
from routewise.route import Route
from routewise.serve_plan import AgreePlan, ServePlan, plan_agree, plan_serving
from routewise.source import SourceSpec, fetch_source, is_fetched, source_root
from routewise.study import Study

#: Environment of every replay. Threads that spin at a barrier slow a busy machine many times and
#: change no bit; a cost cell, where time is what is measured, runs with the engine's own default.
REPLAY_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}

#: Bytes of a cell and its inputs, quoted: one argument has at most 128 KiB (Linux), paths included.
LONGEST_CELL = 112 * 1024
_SURELY_SHORT = 8 * 1024

#: Whose code a sweep's rows depend on.
MEASURING_SCRIPTS = (
    "measure_replay",
    "measure_cost",
    "tokenize_prompts",
    "measure_serving",
    "compare_routes",
)
#: Whose code the tables, the receipt and the figures depend on.
REPORTING_SCRIPTS = ("build_tables", "write_receipt", "draw_figure")


@dataclass(frozen=True)
class CellPlan:
    """One replay or plain cell, and the paths that it is made from."""

    cell: Cell
    build: str
    prompts: PromptPlan
    plain: Path | None
    path: Path
    inputs_json: str

    @property
    def inputs(self) -> dict[str, Any]:
        """All that decides the cell's rows, by name."""
        return _read(self.inputs_json)

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return fields_json(self.cell)


@dataclass(frozen=True)
class CostPlan:
    """One cost cell: a model on all routes of the sweep."""

    cell: CostCell
    builds: tuple[str, ...]
    path: Path
    inputs_json: str

    @property
    def inputs(self) -> dict[str, Any]:
        """All that decides the cell's rows, by name."""
        return _read(self.inputs_json)

    @property
    def document(self) -> str:
        """The cell as one canonical JSON string."""
        return canonical_json(self.cell.document())


def _read(inputs: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inputs)
    return found


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
    code: dict[str, str]  # digest of each measuring and reporting script

    @property
    def cell_list(self) -> Path:
        """The file that names all cells, one a line: a command line would be too long.

        Named by its content: a plan made meanwhile does not change what a waiting job reads.
        """
        digest = digest_of(self.cell_paths())[:DIGEST_LENGTH]
        return self.results / ".cache" / "cells" / f"{self.study.name}.{digest}.txt"

    @property
    def folder(self) -> Path:
        """Where the study's tables, receipt and figures go."""
        return self.results / self.study.name

    def cell_paths(self) -> list[str]:
        """Return the paths of all cells, in the order of the study."""
        return [*self.cells, *self.costs, *self.serves, *self.agrees]

    def devices_wanted(self) -> dict[str, set[str]]:
        """Return the devices on which something is left to measure, and the routes that want them.

        What is measured already can be reported anywhere.
        """
        routes: set[str] = set()
        cells: dict[str, CellPlan | ServePlan] = {**self.cells, **self.serves}
        for path, plan in cells.items():
            # one cell of a route is enough: the files of the others are not looked for
            if plan.cell.route not in routes and not os.path.isfile(path):
                routes.add(plan.cell.route)
        for path, cost in self.costs.items():
            if not os.path.isfile(path):
                routes |= {arm.route for arm in cost.cell.arms}
        found: dict[str, set[str]] = {}
        for route in (self.study.routes[name] for name in routes):
            if route.kind != "endpoint":
                found.setdefault(route.serving.device, set()).add(route.name)
        return found

    def builds_without_host(self, files: Container[str]) -> list[str]:
        """Return the builds of which one of ``files`` will be compiled, and that name no host."""
        return [
            build.name
            for build in self.builds.values()
            if build.host is None
            and any(str(build.part_dir(part) / "build.json") in files for part in PARTS)
        ]

    def job_names(self) -> dict[str, str]:
        """Return what the job of a file is called for people, where its rule does not say it."""
        cells: dict[str, CellPlan | ServePlan] = {**self.cells, **self.serves}
        names = {path: plan.cell.name for path, plan in cells.items()}
        names |= {path: f"cost {plan.cell.model}" for path, plan in self.costs.items()}
        for build in self.builds.values():
            parts = ("engine", "server") if build.patch else ("engine", "server", "tools")
            for part in parts:  # a patched build's tools are those of an unpatched one
                names[str(build.part_dir(part) / "build.json")] = f"build {part} {build.name}"
        return names

    def claims_of(self, path: str) -> list[tuple[str, ClaimSpec]]:
        """Return the claims that the job of a file takes, each with the kind of its device."""
        if path in self.costs:
            cell = self.costs[path].cell
            servings = [self.study.routes[arm.route].serving for arm in cell.arms]
            kinds = {s.claim.device: s.device for s in servings if s.claim is not None}
            return [(kinds[claim.device], claim) for claim in cell.claims]
        if path in self.serves:
            serving = self.serves[path].cell.serving
            return [] if serving.claim is None else [(serving.device, serving.claim)]
        if path in self.cells:
            one = self.cells[path].cell
            return [] if one.claim is None else [(one.device, one.claim)]
        return []

    def counted(self, path: str) -> dict[str, int]:
        """Return how many units of which counted resource the job of a file takes (COUNTED_AS)."""
        found: dict[str, int] = {}
        for device, claim in self.claims_of(path):
            name = COUNTED_AS.get(device)
            if name is not None:
                found[name] = found.get(name, 0) + (claim.units if claim.whole else 1)
        return found

    def named_cells(self) -> dict[str, dict[str, Any]]:
        """Return the inputs of every cell by its path, in the order of the study."""
        plans: dict[str, CellPlan | CostPlan | ServePlan | AgreePlan] = {
            **self.cells,
            **self.costs,
            **self.serves,
            **self.agrees,
        }
        return {path: plan.inputs for path, plan in plans.items()}


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
    imports: Imports = {}
    code = {
        name: code_digest(scripts / f"{name}.py", cache, imports)
        for name in (*MEASURING_SCRIPTS, *REPORTING_SCRIPTS)
    }
    prompts = _plan_prompts(study, results, builds, models, code["tokenize_prompts"])
    serves = plan_serving(study, results, builds, models, prompts, code["measure_serving"], cache)
    plan = StudyPlan(
        study=study,
        results=results,
        builds=builds,
        models=models,
        prompts=prompts,
        cells=_plan_replay(study, results, builds, models, prompts, code["measure_replay"]),
        costs=_plan_cost(study, results, builds, models, code["measure_cost"]),
        serves=serves,
        agrees=plan_agree(study, results, serves, code["compare_routes"]),
        code=code,
    )
    _check_lengths(plan)
    _write_manifests(plan, scripts, cache)
    cache.save()
    return plan


def _check_lengths(plan: StudyPlan) -> None:
    """Raise RoutewiseError where a cell is too long for a command line.

    A job is told its cell and its inputs, and the shell gets both, quoted, as one argument.
    """
    plans: dict[str, CellPlan | CostPlan | ServePlan | AgreePlan] = {
        **plan.cells,
        **plan.costs,
        **plan.serves,
        **plan.agrees,
    }
    for path, cell in plans.items():
        if len(cell.inputs_json) < _SURELY_SHORT:  # a long cell has long inputs
            continue
        words = shlex.join((cell.document, cell.inputs_json))
        if (length := len(words.encode())) > LONGEST_CELL:
            raise RoutewiseError(
                f"{Path(path).stem}: the cell is {length} bytes long, wanted at most "
                f"{LONGEST_CELL}: a longer one is no argument of a command",
                "name fewer widths, repeats or rounds in its sweep, or less in env and args of its"
                " routes; what is left goes into another study",
            )


def _write_manifests(plan: StudyPlan, scripts: Path, cache: DigestCache) -> None:
    """Keep what the composite digests of a plan are made of, so that a change can be told."""
    for name, digest in plan.code.items():
        make = functools.partial(_code_manifest, name, scripts, cache)
        write_manifest(plan.results, digest, make)
    for build in plan.builds.values():
        for part in ("engine", "server"):
            make = functools.partial(build.manifest, part)
            write_manifest(plan.results, build.part_digest(part), make)
    for prompts in plan.prompts.values():
        make = functools.partial(_prompts_manifest, plan, prompts)
        write_manifest(plan.results, prompts.digest, make)


def _code_manifest(name: str, scripts: Path, cache: DigestCache) -> dict[str, Any]:
    return {"kind": "code", "name": name, "parts": code_parts(scripts / f"{name}.py", cache)}


def _prompts_manifest(plan: StudyPlan, prompts: PromptPlan) -> dict[str, Any]:
    lines = load_prompts(prompts.file)
    parts = {f"prompt {line.id}": digest_of(asdict(line))[:DIGEST_LENGTH] for line in lines}
    parts |= {
        "context": str(prompts.context),
        "tokenizing code": plan.code["tokenize_prompts"],
        "model": plan.models[prompts.model].key,
        "tokenizing build": plan.builds[prompts.build].digest,
    }
    return {"kind": "prompts", "name": prompts.prompts, "parts": parts}


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
        content = prompts_digest(load_prompts(file))
        context = min(route.settings.context for route in routes)
        digest = digest_of(
            {
                "prompts": content,
                "model": models[model].key,
                "engine": builds[build].digest,
                "context": context,
                "code": code,
            }
        )[:DIGEST_LENGTH]
        path = results / "prompts" / digest / f"{model}.{name}.parquet"
        plans[(model, name)] = PromptPlan(name, model, file, build, context, content, digest, path)
    return plans


def _tokenizer_build(routes: Iterable[Route], builds: Mapping[str, BuildPlan]) -> str:
    """Return the build whose tokenizer serves all routes: one that the fewest edits move.

    A patch changes no tokenizer, nor does a backend: so an unpatched one, and of these one of the
    CPU, which an edit of another backend leaves alone. Routes of other kinds have no build: then
    any of the study's.
    """
    named = [route.build for route in routes if route.build is not None] or list(builds)
    return min(
        named, key=lambda name: (builds[name].patch is not None, builds[name].backend != "cpu")
    )


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
    cells_dir = results / "cells"
    for route_name in study.replay["routes"]:
        route = study.routes[route_name]
        build = _build_of(route)
        device, claim = route.serving.device, route.serving.claim
        if device == "cpu":
            claim = None  # other jobs beside it cost time, and no bit
        env = {**REPLAY_ENVIRONMENT, **route.env}
        settings = asdict(route.settings)
        held = None if device == "cpu" else _claimed(device, claim)
        variants = {
            variant: variant_parameters(variant, study.replay)
            for variant in (PLAIN_VARIANT, *study.replay_variants(route_name))
        }
        for model in study.replay["models"]:
            prompt_plan = prompts[(model, study.replay["prompts"])]
            plain: Path | None = None
            for variant, parameters in variants.items():
                inputs = inputs_json(
                    "replay",
                    {
                        "sweep": "replay",
                        "variant": variant,
                        "settings": settings,
                        "parameters": parameters,
                        "env": env,
                        "build": builds[build].digest,
                        "device": held,
                        "host": route.host,
                        "model": models[model].key,
                        "prompts": prompt_plan.digest,
                        "code": code,
                        "plain": None if plain is None else plain.parent.name,
                    },
                )
                digest = json_digest(inputs)
                name = f"replay.{route_name}.{model}.{variant}.parquet"
                path = cells_dir.joinpath(digest, name)
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
                    device=device,
                    claim=claim,
                )
                cells[str(path)] = CellPlan(cell, build, prompt_plan, plain, path, inputs)
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
        Arm(
            route.name,
            builds[_build_of(route)].engine_dir,
            route.settings,
            route.env,
            route.serving.device,
            None if route.serving.claim is None else route.serving.claim.device,
        )
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
            claims=_cost_claims(routes),
        )
        inputs = inputs_json(
            "cost",
            {
                "sweep": "cost",
                "cell": _without_limits(cell.document()),
                "builds": [builds[_build_of(route)].digest for route in routes],
                "hosts": [route.host for route in routes],
                "model": models[model].key,
                "code": code,
            },
        )
        digest = json_digest(inputs)
        cell = CostCell(**{**vars(cell), "digest": digest})
        path = results / "cells" / digest / f"cost.{model}.parquet"
        costs[str(path)] = CostPlan(cell, tuple(_build_of(route) for route in routes), path, inputs)
    return costs


def _cost_claims(routes: Iterable[Route]) -> tuple[ClaimSpec, ...]:
    """Return the claims of a cost job: each device whole, in one order for all jobs.

    Two jobs that take the same devices in different orders would wait for each other.
    """
    claims = {
        route.serving.claim.device: replace(route.serving.claim, whole=True)
        for route in routes
        if route.serving.claim is not None
    }
    return tuple(claims[device] for device in sorted(claims))


def _claimed(device: str, claim: ClaimSpec | None) -> dict[str, Any]:
    """Return a device and its kind of claim as inputs; how long it may be held decides nothing."""
    return {
        "device": device,
        "claim": None if claim is None else _without_limit(asdict(claim)),
    }


def _without_limit(claim: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in claim.items() if key != "limit_minutes"}


def _without_limits(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "claims": [_without_limit(claim) for claim in document["claims"]]}


def _build_of(route: Route) -> str:
    assert route.build is not None, f"{route.name}: the study was checked for this"
    return route.build


#: Names the plan of the Snakemake that submits jobs to those jobs, in their environment.
FROZEN_PLAN = "ROUTEWISE_PLAN"
_PLAN_KEPT_S = 14 * 24 * 3600.0


def write_cell_list(plan: StudyPlan) -> None:
    """Write the list of a plan's cells, unless it is there."""
    file = plan.cell_list
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "".join(f"{path}\n" for path in plan.cell_paths()))


def freeze_plan(plan: StudyPlan) -> Path:
    """Keep a plan for jobs on other hosts; return the file. Old ones are removed.

    Planned again there it would be another one: a host has compilers of its own.
    """
    content = pickle.dumps(plan)
    path = (plan.results / ".cache" / "plans" / f"{sha256_bytes(content)[:16]}.plan").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob("*.plan"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _PLAN_KEPT_S:
                old.unlink()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    os.replace(part, path)
    return path


def thaw_plan() -> StudyPlan | None:
    """Return the plan that this job was submitted under; None where its environment names none."""
    path = os.environ.get(FROZEN_PLAN)
    if path is None:
        return None
    try:
        plan = pickle.loads(Path(path).read_bytes())
    except (
        *(OSError, EOFError, ValueError, pickle.UnpicklingError),
        *(AttributeError, ImportError),  # the library is another one now
    ) as error:
        raise RoutewiseError(
            f"{path}: the plan that this job was submitted under cannot be read ({error})",
            "results/ must lie on a file system that all hosts share; run the same command again",
        ) from error
    if not isinstance(plan, StudyPlan):
        raise RoutewiseError(f"{path}: holds no plan", "run the same command again")
    return plan


def study_json(study: Study) -> str:
    """Return the study's declaration as one canonical JSON string, defaults filled in."""
    document = json.loads(json.dumps(study.document))
    document["sweeps"] = {**document["sweeps"], **study.sweeps}
    return canonical_json(document)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
