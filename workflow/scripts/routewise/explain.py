"""Why a cell would run: which of its inputs changed since it was last measured, in words.

A cell that would run is one whose file is not there, or whose plain cell or sides are measured
again. What it is compared with is the newest file
of the same name (sweep, route, model, variant) that an earlier plan left under another digest; each
carries its own inputs. An input that is a digest of many things is taken apart by its manifest, so
that an edit is told by the file that was edited.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routewise.inputs import WORDS, read_manifest
from routewise.schema.file import read_provenance

#: Inputs that are digests with a manifest.
_COMPOSITE = ("build", "builds", "code", "prompts", "made_of.server")
_SHOWN = 4


@dataclass(frozen=True)
class Reason:
    """Why one cell would run. ``changes`` is empty where it was never measured."""

    path: str
    changes: tuple[str, ...]
    earlier: str | None  # the file that it is compared with

    def line(self) -> str:
        """Return it as one line for people."""
        name = Path(self.path).name.removesuffix(".parquet")
        return f"{name}: {'; '.join(self.changes) if self.earlier else 'was never measured'}"


def explain_cells(planned: Mapping[str, Mapping[str, Any]], results: Path) -> Iterator[Reason]:
    """Yield the reason of each planned cell (path -> inputs) that would run, in their order."""
    missing = {path for path in planned if not Path(path).is_file()}
    again = {Path(path).parent.name for path in missing}
    earlier = _earlier_files(results) if missing else {}
    for path, inputs in planned.items():
        if path not in missing:
            if made_of := again.intersection([inputs.get("plain"), *inputs.get("sides", ())]):
                again.add(Path(path).parent.name)
                what = "its plain cell is" if inputs.get("plain") in made_of else "its sides are"
                yield Reason(path, (f"{what} measured again",), path)
            continue
        files = earlier.get(Path(path).name, [])
        found = _newest_inputs(files)
        if found is None:
            older = ("its earlier files do not say what they were made from",) if files else ()
            yield Reason(path, older, str(files[0]) if files else None)
            continue
        file, before = found
        changes = tuple(differences(before, planned[path], results))
        yield Reason(path, changes or ("nothing of its inputs: its file is gone",), str(file))


def damaged_cells(planned: Iterable[str]) -> list[str]:
    """Return the cells that are there and say nothing of themselves: cut short, or no cell."""
    return [path for path in planned if Path(path).is_file() and not read_provenance(Path(path))]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], results: Path) -> Iterator[str]:
    """Yield what differs between two cells' inputs, each as a clause."""
    found = []
    for name in sorted({*before, *now}):
        for place, old, new in _leaves(name, before.get(name), now.get(name)):
            found.append((name, place, old, new))
    # a plain cell moves with the same edit: worth a word only where nothing else is to be said
    others = [
        entry
        for entry in found
        if entry[0] != "plain" and not entry[1].endswith("arms.build")  # `builds` says it
    ]
    for name, place, old, new in others or found:
        yield _clause(name, place, old, new, results)


def _leaves(place: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _leaves(f"{place}.{key}", old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            yield from _leaves(place, one, other)
    else:
        yield place, old, new


def _clause(name: str, place: str, old: Any, new: Any, results: Path) -> str:
    words = WORDS.get(name, name)
    if place in _COMPOSITE and isinstance(old, str) and isinstance(new, str):
        inner = _taken_apart(old, new, results)
        if inner:
            return f"{words} changed ({inner})"
        return f"{words} changed (from {old[:12]} to {new[:12]})"
    detail = place.partition(".")[2]
    shown = f" ({detail})" if detail else ""
    return f"{words}{shown} changed from {_short(old)} to {_short(new)}"


def _taken_apart(old: str, new: str, results: Path) -> str | None:
    before, now = read_manifest(results, old), read_manifest(results, new)
    if before is None or now is None:
        return None
    parts = _changed_keys(_mapping(before.get("parts")), _mapping(now.get("parts")))
    files = _changed_keys(_mapping(before.get("files")), _mapping(now.get("files")))
    name = now.get("name")
    said = [*files, *(part for part in parts if not (files and part.startswith("component ")))]
    if not said:
        return None
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    who = f"{name}: " if now.get("kind") == "build" else ""
    return f"{who}{', '.join(said[:_SHOWN])}{more}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for key in sorted({*old, *new}):
        if key not in old:
            found.append(f"{key} added")
        elif key not in new:
            found.append(f"{key} removed")
        elif old[key] != new[key]:
            found.append(key)
    return found


def _short(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _earlier_files(results: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in (results / "cells").glob("*/*.parquet"):
        found.setdefault(path.name, []).append(path)
    return found


def _date_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:  # removed meanwhile
        return 0


def _newest_inputs(files: list[Path]) -> tuple[Path, dict[str, Any]] | None:
    for path in sorted(files, key=_date_ns, reverse=True):
        inputs = read_provenance(path).get("inputs")
        if inputs and isinstance(inputs, dict):
            return path, inputs
    return None
