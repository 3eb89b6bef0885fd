"""A study: the config file that says what is measured, checked before any rule is made.

The shape is checked against ``config/schemas/study.schema.json``; what a schema cannot say
(names that must exist, widths that must fit, cells that must differ) is checked here. Every
message names the file's key, the value found, the value wanted, and the next thing to try.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from routewise.errors import RoutewiseError
from routewise.replay import SHAPE_WIDTH_MAX, SHAPES
from routewise.route import (
    KINDS,
    OWN_FLAGS,
    PLACEHOLDERS,
    Route,
    is_local,
    route_of,
    same_but_for_the_arm,
    unknown_placeholders,
)

SCHEMA_FILE = Path("config/schemas/study.schema.json")

#: Folders of results/ that are not a study's.
RESERVED_NAMES = (
    "builds",
    "cells",
    "logs",
    "manifests",
    "models",
    "prompts",
    "receipts",
    "sources",
    "store",
    "work",
)

#: llama.cpp rounds the context of a sequence up to a multiple of this.
CONTEXT_STEP = 256

#: KV types that attention without flash attention can use.
FLOAT_KV = ("f16", "f32", "bf16")

REPLAY_DEFAULTS: dict[str, Any] = {
    "widths": [2, 3, 4, 5, 8, 9, 16],
    "shapes": list(SHAPES),
    "neighbours": 7,
    "seed": 1,
    "top_k": 10,
    "only": {},
    "expect": {},
}
COST_DEFAULTS: dict[str, Any] = {
    "widths": [1, 2, 3, 4, 5, 8, 9, 16],
    "depth": 256,
    "rounds": 30,
    "warmup": 3,
}
REPEAT_DEFAULTS: dict[str, Any] = {
    "repeats": 3,
    "lives": 2,
    "cache": ["off", "cold", "warm"],
    "n_probs": 10,
    "n_tokens": None,
    "expect": {},
}
BATCHED_DEFAULTS: dict[str, Any] = {
    "parallel": [1, 4],
    "widths": [1, 2, 4],
    "mixes": ["copies", "neighbours", "fillers"],
    "prefill": ["together", "apart"],
    "rounds": 3,
    "seed": 1,
    "n_probs": 10,
    "n_tokens": None,
    "expect": {},
}
AGREE_DEFAULTS: dict[str, Any] = {
    "widths": [1, 4],
    "rounds": 3,
    "n_probs": 10,
    "n_tokens": None,
    "expect": {},
}
DISPATCH_DEFAULTS: dict[str, Any] = {"widths": [1, 4], "n_tokens": 8}

SWEEP_DEFAULTS: dict[str, dict[str, Any]] = {
    "replay": REPLAY_DEFAULTS,
    "cost": COST_DEFAULTS,
    "repeat": REPEAT_DEFAULTS,
    "batched": BATCHED_DEFAULTS,
    "agree": AGREE_DEFAULTS,
    "dispatch": DISPATCH_DEFAULTS,
}
#: Sweeps whose routes serve; the others take a build in-process.
SERVING_SWEEPS = ("repeat", "batched", "agree", "dispatch")


@dataclass(frozen=True)
class Study:
    """A checked study, defaults filled in. The mappings are as in the file otherwise."""

    name: str
    document: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    builds: dict[str, dict[str, Any]]
    models: dict[str, dict[str, Any]]
    prompts: dict[str, Path]
    routes: dict[str, Route]
    sweeps: dict[str, dict[str, Any]]

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """What a scheduler is asked for, for each kind of host."""
        return self.document.get("hosts", {})

    def build_resources(self, build: str) -> dict[str, Any]:
        """Return what a scheduler is asked for to compile a build."""
        entry = self.builds[build]
        return {**self.hosts.get(entry.get("host", ""), {}), **entry.get("resources", {})}

    @property
    def replay(self) -> dict[str, Any] | None:
        """The replay sweep, or None where the study has none."""
        return self.sweeps.get("replay")

    @property
    def cost(self) -> dict[str, Any] | None:
        """The cost sweep, or None where the study has none."""
        return self.sweeps.get("cost")

    def replay_variants(self, route: str | None = None) -> list[str]:
        """Return the replay's variants: width 1 (a control) first, then widths, then shapes.

        With a route, those of them that the study asks of this route.
        """
        if self.replay is None:
            return []
        only = None if route is None else self.replay["only"].get(route)
        return [
            name
            for name in variant_names(self.replay)
            if only is None or name in only or name == "w1"
        ]


def variant_names(replay: Mapping[str, Any]) -> list[str]:
    """Return the names of all variants of a replay sweep, width 1 among them."""
    return [*(f"w{width}" for width in sorted({1, *replay["widths"]})), *replay["shapes"]]


def batched_blocks(batched: Mapping[str, Any], parallel: int) -> list[tuple[int, str, str]]:
    """Return the (width, mix, prefill) that a batched sweep asks of a server with N slots.

    Width 1, the control, has one mix; a width beyond the slots would only wait.
    """
    return [
        (width, mix, prefill)
        for width in batched["widths"]
        if width <= parallel
        for mix in (batched["mixes"] if width > 1 else ["copies"])
        for prefill in batched["prefill"]
    ]


def batched_variants(batched: Mapping[str, Any]) -> list[str]:
    """Return the names of what a batched sweep claims: ``p4.w2.copies.together`` and so on."""
    return [
        f"p{parallel}.w{width}.{mix}.{prefill}"
        for parallel in batched["parallel"]
        for width, mix, prefill in batched_blocks(batched, parallel)
        if width > 1
    ]


def agree_pairs(agree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all pairs of an agree sweep's routes, in the study's order."""
    return list(itertools.combinations(agree["routes"], 2))


def read_study(path: Path) -> Study:
    """Read and check one study file. Raises RoutewiseError where anything is wrong with it."""
    return check_study(read_yaml(path), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping in which no key stands twice (a plain YAML reader keeps the last)."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError as error:
        raise RoutewiseError(f"{path}: no such study", "see config/README.md") from error
    except UnicodeDecodeError as error:
        raise RoutewiseError(f"{path}: not UTF-8 ({error})", "save it as UTF-8 text") from error
    except yaml.YAMLError as error:
        raise RoutewiseError(f"{path}: {error}", "mend the file at that line") from error
    if not isinstance(document, dict):
        raise RoutewiseError(f"{path}: not a mapping of keys to values", "see config/README.md")
    return document


def check_study(document: Mapping[str, Any], where: str, root: Path = Path(".")) -> Study:
    """Check a study's declaration and fill in its defaults.

    ``where`` names its origin in messages; ``root`` is the repository root, against which the
    study's own paths are read. Raises RoutewiseError for the first thing that is wrong.
    """
    schema = json.loads((Path(__file__).parents[3] / SCHEMA_FILE).read_text(encoding="utf-8"))
    _check_shape(document, schema, where)
    checker = _Checker(where, document)
    backends = {name: entry["backend"] for name, entry in document["builds"].items()}
    for name, entry in document["routes"].items():
        checker.route_entry(name, entry, root)
    hosts = document.get("hosts", {})
    for kind in ("builds", "routes"):
        for name, entry in document[kind].items():
            if "host" in entry:
                checker.known(entry["host"], hosts, f"{kind}.{name}.host")
    routes = {}
    for name, entry in document["routes"].items():
        build = document["builds"].get(entry.get("build"), {})
        host = entry.get("host", build.get("host"))
        if build and host != build.get("host"):
            checker.wrong(
                f"routes.{name}.host",
                host,
                f"that of its build {entry['build']}, {build.get('host')}",
                "name the host at the build: what was compiled for one kind of host is measured on"
                " that kind",
            )
        routes[name] = route_of(
            name,
            entry,
            backends.get(entry.get("build")),
            host=host,
            resources={**hosts.get(host, {}), **entry.get("resources", {})},
        )
    prompts = {name: Path(entry["file"]) for name, entry in document.get("prompts", {}).items()}
    sweeps = {name: {**SWEEP_DEFAULTS[name], **entry} for name, entry in document["sweeps"].items()}
    if "repeat" in sweeps:  # YAML reads a bare off as false
        sweeps["repeat"]["cache"] = [mode or "off" for mode in sweeps["repeat"]["cache"]]
    for name, keys in (("batched", ("parallel", "widths")), ("agree", ("widths",))):
        for key in keys if name in sweeps else ():
            checker.unique(sweeps[name][key], f"sweeps.{name}.{key}")
            sweeps[name][key] = sorted({1, *sweeps[name][key]})  # the control is always measured

    if "cost" in sweeps:  # its routes are measured in turn, in one job
        checker.one_host([routes[name] for name in sweeps["cost"]["routes"] if name in routes])
    if document["study"] in RESERVED_NAMES:
        checker.wrong(
            "study", document["study"], "a name that is no folder of results/", "rename the study"
        )
    for name, build in document["builds"].items():
        checker.known(build["source"], document["sources"], f"builds.{name}.source")
    for name, model in document["models"].items():
        if model["kind"] == "quantize":
            checker.known(model["from"], document["models"], f"models.{name}.from")
            checker.known(model["build"], document["builds"], f"models.{name}.build")
            if "patch" in document["builds"][model["build"]]:
                checker.wrong(
                    f"models.{name}.build",
                    model["build"],
                    "a build without a patch",
                    "tools that a patch does not touch are built from stock: name the stock build",
                )
    for name, route in routes.items():
        if route.settings.micro_batch > route.settings.context:
            checker.wrong(
                f"routes.{name}.micro_batch",
                route.settings.micro_batch,
                f"at most the context, {route.settings.context}",
                "lower it or raise the context",
            )
        if route.settings.kv_type not in FLOAT_KV and not route.settings.flash_attention:
            checker.wrong(
                f"routes.{name}.kv_type",
                route.settings.kv_type,
                f"one of {', '.join(FLOAT_KV)} where flash_attention is false",
                "set flash_attention: true, or a float kv_type",
            )
        if route.reference is not None:
            checker.known(route.reference, routes, f"routes.{name}.reference")
            checker.reference(route, routes[route.reference])
        if route.arm is not None:
            checker.arm(route, routes, sweeps)
    for name, path in prompts.items():
        if not (root / path).is_file():
            checker.wrong(f"prompts.{name}.file", str(path), "a file", "see config/prompts/")
    for sweep, entry in sweeps.items():
        checker.sweep(sweep, entry, routes, document["models"])
        if "prompts" in entry:
            checker.known(entry["prompts"], prompts, f"sweeps.{sweep}.prompts")
    replay, cost = sweeps.get("replay"), sweeps.get("cost")
    if replay is not None:
        checker.widths("replay", replay, routes)
        checker.unique(replay["shapes"], "sweeps.replay.shapes")
        checker.shapes(replay, routes)
        checker.expectations(replay)
    if cost is not None:
        checker.widths("cost", cost, routes)
        if 1 not in cost["widths"]:
            checker.wrong("sweeps.cost.widths", cost["widths"], "width 1 among them", "add 1")
        checker.depth(cost, routes)
    for sweep in SERVING_SWEEPS:
        if sweep in sweeps:
            checker.serving(sweep, sweeps[sweep])
            checker.servers(sweep, sweeps[sweep], routes)
    checker.claims(routes)
    return Study(
        name=document["study"],
        document=dict(document),
        sources=dict(document["sources"]),
        builds=dict(document["builds"]),
        models=dict(document["models"]),
        prompts=prompts,
        routes=routes,
        sweeps=sweeps,
    )


@dataclass(frozen=True)
class _Checker:
    where: str
    document: Mapping[str, Any]

    def wrong(self, key: str, found: object, wanted: str, hint: str) -> None:
        raise RoutewiseError(f"{self.where}: {key} is {found!r}, wanted {wanted}", hint)

    def known(self, name: str, names: Iterable[str], key: str) -> None:
        names = list(names)
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "declare it, or use one of those"
            self.wrong(key, name, f"one of {', '.join(names) or '(none is declared)'}", hint)

    def one_host(self, routes: list[Route]) -> None:
        """Check that the routes of one job run on one kind of host."""
        hosts = {route.name: route.host for route in routes}
        if len(set(hosts.values())) > 1:
            self.wrong(
                "sweeps.cost.routes",
                hosts,
                "routes of one kind of host: they are timed in turn, in one job",
                "time the routes of another host in a study of their own",
            )

    def route_entry(self, name: str, entry: Mapping[str, Any], root: Path) -> None:
        """Check what must hold before a route can be made of its entry."""
        key = f"routes.{name}"
        kinds = [kind for kind in KINDS if kind in entry]
        if len(kinds) != 1:
            self.wrong(
                key,
                " and ".join(kinds) or "without any of them",
                f"exactly one of {', '.join(KINDS)}",
                "a route is a build of this study, a command that serves, or a running endpoint",
            )
        if "build" in entry:
            self.known(entry["build"], self.document["builds"], f"{key}.build")
        for part, owner in (
            ("server_args", "build"),
            ("allow_remote", "endpoint"),
            ("identity_files", "command"),
        ):
            if part in entry and owner not in entry:
                self.wrong(f"{key}.{part}", entry[part], f"a route with {owner}", "remove it")
        for word in entry.get("server_args", []):
            if word.split("=")[0] in OWN_FLAGS:
                self.wrong(
                    f"{key}.server_args",
                    word,
                    "arguments that the workflow does not set itself",
                    "use the route's own keys (threads, context, flash_attention, …)",
                )
        if "command" in entry:
            unknown = unknown_placeholders(entry["command"])
            if unknown or not any("{port}" in part for part in entry["command"]):
                self.wrong(
                    f"{key}.command",
                    entry["command"],
                    "{port} in it, and of placeholders only "
                    + ", ".join(f"{{{placeholder}}}" for placeholder in PLACEHOLDERS),
                    f"unknown: {', '.join(unknown)}" if unknown else "say where the port goes",
                )
            if "artefact" not in entry and not any("{model}" in part for part in entry["command"]):
                self.wrong(
                    f"{key}.command",
                    entry["command"],
                    "{model} in it",
                    "say where the model goes, or name what it loads instead as artefact",
                )
        if "gpu_layers" in entry:
            self.layers(key, entry)
        if "artefact" in entry and "weights" not in entry:
            self.wrong(
                f"{key}.weights",
                "not there",
                "same or requantised",
                "an artefact is loaded in place of the model: say whether its weights are the same",
            )
        for file in entry.get("identity_files", []):
            if not (root / file).exists():
                self.wrong(f"{key}.identity_files", file, "a file or folder", "correct the path")
        if (
            "endpoint" in entry
            and not entry.get("allow_remote")
            and not is_local(entry["endpoint"])
        ):
            self.wrong(
                f"{key}.endpoint",
                entry["endpoint"],
                "an address of this machine",
                "prompts would leave this machine; if that is meant, allow_remote: true",
            )
        if "artefact" in entry and not (root / entry["artefact"]).exists():
            self.wrong(f"{key}.artefact", entry["artefact"], "a file or folder", "correct the path")
        claim = entry.get("claim")
        if isinstance(claim, Mapping) and len(claim.get("unit_ids", [])) not in (
            0,
            claim.get("units", 1),
        ):
            self.wrong(
                f"{key}.claim.unit_ids",
                claim["unit_ids"],
                f"as many as units, {claim.get('units', 1)}",
                "name each unit once, or leave unit_ids out",
            )

    def layers(self, key: str, entry: Mapping[str, Any]) -> None:
        """Check that a route that says how many layers go to a device has one of its own."""
        build = self.document["builds"].get(entry.get("build"), {})
        backend = build.get("backend", "none of ours")
        if backend in ("cpu", "none of ours") or entry.get("device") == "cpu":
            self.wrong(
                f"{key}.gpu_layers",
                entry["gpu_layers"],
                f"a build and a device other than the processor (build {backend}, "
                f"device {entry.get('device', backend)})",
                "remove it; a command says it in its own words",
            )

    def arm(
        self, route: Route, routes: Mapping[str, Route], sweeps: Mapping[str, Mapping[str, Any]]
    ) -> None:
        assert route.arm is not None
        key = f"routes.{route.name}.arm"
        self.known(route.arm.of, [name for name in routes if name != route.name], f"{key}.of")
        base = routes[route.arm.of]
        if base.name == route.name or base.arm is not None:
            self.wrong(f"{key}.of", base.name, "a route that is no arm itself", "name the base")
        if (other := same_but_for_the_arm(base, route)) is not None:
            self.wrong(
                key,
                route.arm.of,
                f"a route that is the same but for env, further arguments, flash_attention and "
                f"kv_type ({other} differs)",
                "an arm switches one kernel family off, and nothing else",
            )
        if (base.env, base.serving.argv, base.settings) == (
            route.env,
            route.serving.argv,
            route.settings,
        ):
            self.wrong(
                key,
                route.arm.of,
                "a difference in env, server_args, command, flash_attention or kv_type",
                "the arm is the same configuration as its base: switch its kernel off",
            )
        wanted = sweeps.get("dispatch", {}).get("routes", [])
        if route.name not in wanted or base.name not in wanted:
            self.wrong(
                "sweeps.dispatch.routes",
                wanted,
                f"{base.name!r} and {route.name!r} among them",
                "an arm counts only where the logs of both show which kernels ran",
            )
        for one in (base, route):
            if one.serving.dispatch is None:
                self.wrong(
                    f"routes.{one.name}.dispatch",
                    None,
                    f"scheduler or hrx, as {route.name!r} is an arm of it",
                    "say whose log names the kernels that ran",
                )

    def serving(self, sweep: str, entry: Mapping[str, Any]) -> None:
        """Check what only a sweep of servers has."""
        key = f"sweeps.{sweep}"
        for name in ("cache", "mixes", "prefill"):
            self.unique(entry.get(name, []), f"{key}.{name}")
        expected = {
            "repeat": lambda: (entry["routes"], [*entry["cache"], "caches"]),
            "batched": lambda: (entry["routes"], batched_variants(entry)),
            "agree": lambda: (
                ["|".join(pair) for pair in agree_pairs(entry)],
                [f"w{width}" for width in entry["widths"]],
            ),
        }
        if sweep == "batched" and max(entry["widths"]) > max(entry["parallel"]):
            self.wrong(
                f"{key}.widths",
                entry["widths"],
                f"at most the most slots of a server, {max(entry['parallel'])}",
                f"raise {key}.parallel, or lower the width",
            )
        if sweep == "agree" and len(entry["routes"]) < 2:
            self.wrong(f"{key}.routes", entry["routes"], "two routes or more", "add one")
        if sweep in expected:
            names, variants = expected[sweep]()
            for name, named in entry["expect"].items():
                self.known(name, names, f"{key}.expect")
                for variant in () if isinstance(named, str) else named:
                    self.known(variant, variants, f"{key}.expect.{name}")

    def servers(self, sweep: str, entry: Mapping[str, Any], routes: Mapping[str, Route]) -> None:
        """Check that each route's server can be given what the sweep varies."""
        most = max(entry.get("parallel", entry.get("widths", [1])))
        for name in entry["routes"]:
            route = routes[name]
            context = route.settings.context
            if route.kind == "build" and context % CONTEXT_STEP:
                self.wrong(
                    f"routes.{name}.context",
                    context,
                    f"a multiple of {CONTEXT_STEP}: a server rounds a slot's context up to it",
                    f"say {-(-context // CONTEXT_STEP) * CONTEXT_STEP}",
                )
            limit = route.serving.parallel_max
            told = any("{parallel}" in part for part in route.serving.argv)
            if route.kind == "command" and most > 1 and not told and limit != 1:
                self.wrong(
                    f"routes.{name}.command",
                    list(route.serving.argv),
                    f"{{parallel}} in it: sweeps.{sweep} asks for servers of up to {most} slots",
                    "say where the number of slots goes, or that it serves one request at a time: "
                    "parallel_max: 1",
                )

    def claims(self, routes: Mapping[str, Route]) -> None:
        """Check that routes of one device say the same of it: else both would hold it at once."""
        first: dict[str, Route] = {}
        for route in routes.values():
            claim = route.serving.claim
            if claim is None:
                continue
            other = first.setdefault(claim.device, route)
            theirs = other.serving.claim
            assert theirs is not None
            for name in ("units", "unit_ids", "hold", "visible"):
                if getattr(claim, name) != getattr(theirs, name):
                    self.wrong(
                        f"routes.{route.name}.claim.{name}",
                        getattr(claim, name),
                        f"{getattr(theirs, name)!r}, as route {other.name!r} says of the device "
                        f"{claim.device!r}",
                        "say the same in both, or give the devices different names",
                    )

    def unique(self, values: Sequence[object], key: str) -> None:
        seen: set[object] = set()
        for value in values:
            if value in seen:
                self.wrong(
                    key,
                    list(values),
                    f"each value once ({value!r} stands twice: two cells of the same name)",
                    "remove one of them",
                )
            seen.add(value)

    def sweep(
        self,
        sweep: str,
        entry: Mapping[str, Any],
        routes: Mapping[str, Route],
        models: Iterable[str],
    ) -> None:
        models = list(models)
        for index, name in enumerate(entry["routes"]):
            self.known(name, routes, f"sweeps.{sweep}.routes[{index}]")
            if sweep not in SERVING_SWEEPS and routes[name].kind != "build":
                self.wrong(
                    f"sweeps.{sweep}.routes[{index}]",
                    name,
                    "a route with a build: this sweep runs in-process, on logits",
                    f"use it in {', '.join(SERVING_SWEEPS)}",
                )
        for index, name in enumerate(entry["models"]):
            self.known(name, models, f"sweeps.{sweep}.models[{index}]")
        self.unique(entry["routes"], f"sweeps.{sweep}.routes")
        self.unique(entry["models"], f"sweeps.{sweep}.models")
        for name in entry["routes"] if sweep not in SERVING_SWEEPS else ():
            reference = routes[name].reference
            if reference is not None and reference not in entry["routes"]:
                self.wrong(
                    f"sweeps.{sweep}.routes",
                    entry["routes"],
                    f"{reference!r} too: it is the reference of {name!r}",
                    "add it, or remove the route's reference",
                )

    def widths(self, sweep: str, entry: Mapping[str, Any], routes: Mapping[str, Route]) -> None:
        key = f"sweeps.{sweep}.widths"
        self.unique(entry["widths"], key)
        for name in entry["routes"]:
            micro_batch = routes[name].settings.micro_batch
            for width in entry["widths"]:
                if width > micro_batch:
                    self.wrong(
                        key,
                        width,
                        f"at most the micro-batch of route {name!r}, {micro_batch} tokens "
                        "(a wider pass would be cut in two)",
                        "lower the width or raise routes." + name + ".micro_batch",
                    )

    def shapes(self, replay: Mapping[str, Any], routes: Mapping[str, Route]) -> None:
        needed = max(SHAPE_WIDTH_MAX, replay["neighbours"] + 1) if replay["shapes"] else 1
        for name in replay["routes"]:
            micro_batch = routes[name].settings.micro_batch
            if needed > micro_batch:
                self.wrong(
                    f"routes.{name}.micro_batch",
                    micro_batch,
                    f"at least {needed}, the widest pass of the shapes",
                    "raise it, or leave out sweeps.replay.shapes",
                )

    def expectations(self, replay: Mapping[str, Any]) -> None:
        variants = variant_names(replay)
        for key in ("only", "expect"):
            for route, named in replay[key].items():
                self.known(route, replay["routes"], f"sweeps.replay.{key}")
                if not isinstance(named, str):
                    for variant in named:
                        self.known(variant, variants, f"sweeps.replay.{key}.{route}")

    def depth(self, cost: Mapping[str, Any], routes: Mapping[str, Route]) -> None:
        for name in cost["routes"]:
            context = routes[name].settings.context
            if cost["depth"] + max(cost["widths"]) > context:
                self.wrong(
                    "sweeps.cost.depth",
                    cost["depth"],
                    f"depth and widest pass within the context of route {name!r}, {context} tokens",
                    "lower the depth or raise the context",
                )

    def reference(self, route: Route, reference: Route) -> None:
        if route.settings != reference.settings:
            self.wrong(
                f"routes.{route.name}.reference",
                reference.name,
                f"a route of the same settings ({route.settings}; it has {reference.settings})",
                "give both routes the same threads, context, micro_batch, attention and kv_type",
            )
        if reference.name == route.name:
            self.wrong(
                f"routes.{route.name}.reference", route.name, "another route", "remove the line"
            )


def _dotted(path: Iterable[object]) -> str:
    """Return the path of a key as the other messages write it: ``sweeps.replay.widths[1]``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: JSON Schema takes 2.0 for an integer; names and the engine's arguments do not.
_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def _check_shape(document: Mapping[str, Any], schema: dict[str, Any], where: str) -> None:
    validator = _Validator(schema)
    errors = sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.path)))
    if not errors:
        return
    error = jsonschema.exceptions.best_match(errors) or errors[0]
    key = _dotted(error.absolute_path) or "the study"
    message = error.message
    if error.validator == "pattern" and "a-z0-9" in str(error.validator_value):
        message = f"{error.instance!r}, wanted lower case letters, digits, '-' and '_'"
    elif error.validator == "const":
        message = f"{error.instance!r}, wanted {error.validator_value!r}"
    elif error.validator == "anyOf":
        message = (
            f"{error.instance!r}, wanted exact, differs, differs-somewhere, or a verdict a variant"
        )
    elif error.validator == "enum":
        wanted = [str(value) for value in error.validator_value if value is not False]
        message = f"{error.instance!r}, wanted one of {', '.join(wanted)}"
    elif error.validator == "pattern" and "https?" in str(error.validator_value):
        message = f"{error.instance!r}, wanted an address such as http://127.0.0.1:8080"
    elif error.validator == "type" and error.validator_value == "string":
        quoted = " (YAML reads a bare on, off, yes, no as true or false: quote it)"
        boolean = isinstance(error.instance, bool)
        message = f"{error.instance!r}, wanted a text{quoted if boolean else ' in quotes'}"
    elif error.validator == "minItems":
        message = f"{error.instance!r}, wanted {error.validator_value} or more"
    hint = "config/README.md lists every key"
    if error.validator == "additionalProperties" and isinstance(error.instance, Mapping):
        known = list(error.schema.get("properties", {}))
        unknown = [name for name in error.instance if name not in known]
        near = [m for name in unknown for m in difflib.get_close_matches(str(name), known, n=1)]
        hint = f"did you mean {near[0]!r}? {hint}" if near else f"known keys: {', '.join(known)}"
    raise RoutewiseError(f"{where}: {key}: {message}", hint)


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key that stands twice in one mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, Any], int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line}: a key must be a name")
            key = (key_node.tag, key_node.value)
            if key in seen:
                raise yaml.YAMLError(
                    f"line {line}: the key {key_node.value!r} stands twice "
                    f"(first in line {seen[key]})"
                )
            seen[key] = line
        return node
