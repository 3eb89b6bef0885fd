"""The refusal to join what was measured apart: two builds, or two hosts, under one route.

A study's tables hold one build and one kind of host for each route. A route's server is built apart
from the libraries that are replayed, so that the two parts of a route are looked at one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routewise.errors import RoutewiseError
from routewise.machine import SCOPE_KEYS
from routewise.schema.file import read_provenance

#: Facts of a machine that bits may depend on, and what names an accelerator and its driver.
_SCOPE_KEYS = (*SCOPE_KEYS, "gpu", "driver")
#: What of these is an accelerator's: recorded in one cell and not in another, it is no one scope.
_DEVICE_KEYS = {"device", "device kernel", "device modules", "device and driver"}
#: Cell files named for each value; of the rest the number is told.
_SHOWN = 8


@dataclass(frozen=True)
class Measured:
    """That one cell file measured one route. ``serving`` tells a server from the libraries."""

    route: str
    serving: bool
    fingerprint: str
    path: str
    provenance: Mapping[str, Any]


def host_scope(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return what a cell recorded of its host, device and driver; nothing of what it did not.

    Two units of one kind (their UUIDs), and a host started again, are one scope.
    """
    machine = provenance.get("machine") or {}
    device = provenance.get("device") or {}
    found = {key: machine.get(key) for key in _SCOPE_KEYS}
    if isinstance(device, Mapping):
        gpus = device.get("gpus")
        found |= {
            "device": device.get("device"),
            "device kernel": device.get("kernel"),
            "device modules": device.get("modules"),
            "device and driver": sorted({", driver ".join(map(str, gpu[:2])) for gpu in gpus})
            if gpus
            else None,
        }
    return {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in found.items()
        if value is not None
    }


def of_route(provenance: Mapping[str, Any], route: str) -> Mapping[str, Any]:
    """Return what a cell recorded, of one route: a cost cell has a device for each of its own."""
    if (provenance.get("cell") or {}).get("sweep") != "cost":
        return provenance
    return {**provenance, "device": (provenance.get("device") or {}).get(route)}


def _count_unsaid(scopes: dict[str, dict[str, list[Measured]]], found: list[Measured]) -> None:
    """Give a fact of an accelerator that a cell did not record a value of its own.

    A cell that says nothing of its machine either, a pair, leaves that to the cells it was made of.
    """
    if "device" not in scopes:
        return
    for key in _DEVICE_KEYS & scopes.keys():
        said = {id(one) for cells in scopes[key].values() for one in cells}
        unsaid = [
            one
            for one in found
            if id(one) not in said and ("machine" in one.provenance or "device" in one.provenance)
        ]
        if unsaid:
            scopes[key]["not recorded"] = unsaid


def refuse_mixed(measured: Iterable[Measured]) -> None:
    """Check that each part of a route ran one build on one kind of host.

    Raises RoutewiseError that names the route, the values, how many cells have each, and files.
    """
    parts: dict[tuple[str, bool], list[Measured]] = {}
    for one in measured:
        parts.setdefault((one.route, one.serving), []).append(one)
    for (route, serving), found in sorted(parts.items()):
        part = "served" if serving else "in-process"
        builds: dict[str, list[Measured]] = {}
        scopes: dict[str, dict[str, list[Measured]]] = {}
        for one in found:
            builds.setdefault(one.fingerprint or "no fingerprint", []).append(one)
            for key, value in host_scope(one.provenance).items():
                scopes.setdefault(key, {}).setdefault(value, []).append(one)
        _count_unsaid(scopes, found)
        if len(builds) > 1:
            raise RoutewiseError(
                f"route {route}: its {part} cells were measured with {len(builds)} different "
                f"builds (library fingerprints): {_listed(builds)}",
                _HINT,
            )
        mixed = {key: values for key, values in scopes.items() if len(values) > 1}
        if mixed:
            told = " | ".join(f"{key} is {_listed(values)}" for key, values in mixed.items())
            raise RoutewiseError(
                f"route {route}: its {part} cells were measured on different hosts: {told}", _HINT
            )


def other_host_sentence(
    route: str, files: Iterable[Path], here: Callable[[], Mapping[str, Any]]
) -> str | None:
    """Return how this host differs from the one that measured a route so far, or None.

    ``files`` are all the cell files of one part of the route, made or not; ``here`` gives what a
    cell would record of this host now (``machine``, ``device``), and is asked only where some are
    made and some are not: then this host would add to what another one began.
    """
    planned = list(files)
    made = [path for path in planned if path.is_file()]
    if not made or len(made) == len(planned):
        return None
    newest = max(made, key=lambda path: str(read_provenance(path).get("ended_at") or ""))
    before = host_scope(of_route(read_provenance(newest), route))
    now = host_scope(here())
    told = [
        f"{key} was {before[key]} and is {now[key]}"
        for key in before
        if key in now and not _covers(now[key], before[key])
    ]
    if not told:
        return None
    return (
        f"route {route}: {len(made)} of its {len(planned)} cells were measured on another host or "
        f"driver, such as {newest}: {'; '.join(told)}. The others are measured here, nothing of "
        "the first is adopted, and the tables will not join the two.\n"
        "  try: to measure all of it here, move those cell files out of the cells folder now"
    )


_HINT = (
    "move the cell files of the one that is not meant out of the cells folder and run the "
    "workflow again: what was measured on the other stays in the store as fragments. To keep "
    "both, give each a route of its own"
)


def _covers(here: str, recorded: str) -> bool:
    """Whether a fact of this host is the recorded one; of its cards, a cell names those it held."""
    if here.startswith("[") and recorded.startswith("["):
        return set(json.loads(recorded)) <= set(json.loads(here))
    return here == recorded


def _listed(groups: Mapping[str, list[Measured]]) -> str:
    """Return each value with its number of cells and its newest files."""
    texts = []
    for value, found in sorted(groups.items()):
        ordered = sorted(found, key=lambda one: one.path)
        ordered.sort(key=lambda one: str(one.provenance.get("ended_at") or ""), reverse=True)
        names = [one.path for one in ordered[:_SHOWN]]
        more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
        texts.append(f"{value} in {len(ordered)} cells, newest: {', '.join(names)}{more}")
    return "; ".join(texts)
