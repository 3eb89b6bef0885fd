"""What each kind of cell depends on: one table, and the digests that stand in the paths.

A cell's path holds the digest of its inputs, by name. What is in no row of ``SWEEP_INPUTS`` cannot
make a cell run again, and what is in one always does. The inputs travel into the cell's own file,
so that a later plan can say which of them changed. An input that is itself a digest of many things
(a build, the measuring code, a prompt set) has a *manifest*: its parts and their digests, kept
under ``results/manifests`` and never changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from routewise.digest import DIGEST_LENGTH, canonical_json, sha256_bytes, write_text

#: Raised when cells of an older Routewise must not stand beside new ones.
RESULTS_FORMAT = 2

_COMMON = frozenset({"sweep", "code", "format"})
_SERVE = _COMMON | {"variant", "cell", "made_of", "host", "model", "prompts"}

#: Kind of cell -> the names of all that decides its rows. There is no other such list.
SWEEP_INPUTS: dict[str, frozenset[str]] = {
    "replay": _COMMON
    | {"variant", "settings", "parameters", "env", "build", "device", "host", "model"}
    | {"prompts", "plain"},
    "cost": _COMMON | {"cell", "builds", "hosts", "model"},
    "repeat": _SERVE,
    "batched": _SERVE,
    "agree": _SERVE,
    "dispatch": _SERVE,
    "compare": _COMMON | {"cell", "sides"},
}

#: What an input is called in a sentence.
WORDS: dict[str, str] = {
    "build": "the build",
    "builds": "a build of its routes",
    "cell": "what the job is to do",
    "code": "the measuring code",
    "device": "the device or its claim",
    "env": "the route's environment",
    "format": "the format of results",
    "host": "the kind of host",
    "hosts": "the kind of host of a route",
    "made_of": "what the route runs",
    "model": "the model",
    "parameters": "a parameter of the sweep",
    "plain": "the plain cell that it is compared with",
    "prompts": "the prompts",
    "settings": "a setting of the route",
    "sides": "a cell that it compares",
    "sweep": "the sweep",
    "variant": "the variant",
}


def _fields(value: object) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"{value!r} is no plain value")
    return vars(value)


#: As canonical_json, with dataclasses as their fields: what it writes of one is the canonical JSON
#: of its ``asdict``, without the copy of everything, which is most of what a large plan would cost.
_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_fields
)


def fields_json(value: Any) -> str:
    """Return the canonical JSON of a plain value that may hold dataclasses, as their fields.

    Raises ValueError for NaN or infinity and TypeError for what JSON cannot hold.
    """
    return _ENCODER.encode(value)


def inputs_json(kind: str, values: Mapping[str, Any]) -> str:
    """Return the inputs of a cell of one kind as JSON, with the format of results put to them.

    Raises ValueError where a name of the table is missing or another one is given.
    """
    found = {**values, "format": RESULTS_FORMAT}
    if set(found) != SWEEP_INPUTS[kind]:
        raise ValueError(
            f"inputs of a {kind} cell: got {sorted(found)}, wanted {sorted(SWEEP_INPUTS[kind])}"
        )
    return fields_json(found)


def json_digest(inputs: str) -> str:
    """Return the digest of a cell's inputs, given as JSON by :func:`inputs_json`.

    It stands in the path of the cell (16 hex digits).
    """
    return sha256_bytes(inputs.encode())[:DIGEST_LENGTH]


def _manifest_path(results: Path, digest: str) -> Path:
    return results / "manifests" / f"{digest[:DIGEST_LENGTH]}.json"


def write_manifest(results: Path, digest: str, make: Callable[[], Mapping[str, Any]]) -> None:
    """Keep what a digest is made of, unless it is there: only then is it made.

    A read-only folder is no error here.
    """
    path = _manifest_path(results, digest)
    if path.is_file():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, canonical_json(dict(make())) + "\n")
    except OSError:
        return


def read_manifest(results: Path, digest: str) -> dict[str, Any] | None:
    """Return what a digest is made of, or None where that is not known."""
    try:
        found = json.loads(_manifest_path(results, digest).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
