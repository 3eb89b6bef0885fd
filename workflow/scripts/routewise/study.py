"""A study: the config file that says what is measured, checked before any rule is made.

The shape is checked against ``config/schemas/study.schema.json``; what a schema cannot say
(names that must exist, widths that must fit, cells that must differ) is checked here. Every
message names the file's key, the value found, the value wanted, and the next thing to try.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from routewise.engine import Settings
from routewise.errors import RoutewiseError
from routewise.replay import SHAPE_WIDTH_MAX, SHAPES

SCHEMA_FILE = Path("config/schemas/study.schema.json")

ROUTE_DEFAULTS: dict[str, Any] = {
    "reference": None,
    "threads": 2,
    "context": 1024,
    "micro_batch": 512,
    "flash_attention": True,
    "kv_type": "f16",
    "env": {},
}
#: Folders of results/ that are not a study's.
RESERVED_NAMES = ("builds", "cells", "logs", "models", "prompts", "sources", "store", "work")

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


@dataclass(frozen=True)
class Route:
    """One way to get tokens: a build with its settings and environment."""

    name: str
    build: str
    reference: str | None
    settings: Settings
    env: dict[str, str]


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
    replay: dict[str, Any] | None
    cost: dict[str, Any] | None

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
    routes = {
        name: _route(name, {**ROUTE_DEFAULTS, **entry})
        for name, entry in document["routes"].items()
    }
    prompts = {name: Path(entry["file"]) for name, entry in document.get("prompts", {}).items()}
    sweeps = document["sweeps"]
    replay = {**REPLAY_DEFAULTS, **sweeps["replay"]} if "replay" in sweeps else None
    cost = {**COST_DEFAULTS, **sweeps["cost"]} if "cost" in sweeps else None

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
        checker.known(route.build, document["builds"], f"routes.{name}.build")
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
    for name, path in prompts.items():
        if not (root / path).is_file():
            checker.wrong(f"prompts.{name}.file", str(path), "a file", "see config/prompts/")
    if replay is not None:
        checker.sweep("replay", replay, routes, document["models"])
        checker.known(replay["prompts"], prompts, "sweeps.replay.prompts")
        checker.widths("replay", replay, routes)
        checker.unique(replay["shapes"], "sweeps.replay.shapes")
        checker.shapes(replay, routes)
        checker.expectations(replay)
    if cost is not None:
        checker.sweep("cost", cost, routes, document["models"])
        checker.widths("cost", cost, routes)
        if 1 not in cost["widths"]:
            checker.wrong("sweeps.cost.widths", cost["widths"], "width 1 among them", "add 1")
        checker.depth(cost, routes)
    return Study(
        name=document["study"],
        document=dict(document),
        sources=dict(document["sources"]),
        builds=dict(document["builds"]),
        models=dict(document["models"]),
        prompts=prompts,
        routes=routes,
        replay=replay,
        cost=cost,
    )


def _route(name: str, entry: dict[str, Any]) -> Route:
    settings = Settings(
        context=entry["context"],
        micro_batch=entry["micro_batch"],
        threads=entry["threads"],
        flash_attention=entry["flash_attention"],
        kv_type=entry["kv_type"],
    )
    return Route(name, entry["build"], entry["reference"], settings, dict(entry["env"]))


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
        for index, name in enumerate(entry["models"]):
            self.known(name, models, f"sweeps.{sweep}.models[{index}]")
        self.unique(entry["routes"], f"sweeps.{sweep}.routes")
        self.unique(entry["models"], f"sweeps.{sweep}.models")
        for name in entry["routes"]:
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
