"""Who a server turns out to be, read back and compared with who was asked for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routewise.digest import sha256_file
from routewise.errors import RoutewiseError
from routewise.fingerprint import commit_of, library_fingerprint
from routewise.port import mapped_files


@dataclass(frozen=True)
class Identity:
    """What the server must turn out to be. None is not asked for.

    ``build`` is the build.json of a build of ours: the libraries that the process has mapped must
    be that build's, and ``/props`` must name its commit. ``program_sha256`` is that of the
    program that listens on the port. ``props`` says whether the route has ``/props``; where it
    has, ``model``, ``parallel`` (slots) and ``slot_context`` (tokens of each) are compared too.
    ``on_device``: the model must be on a device, as far as the server's log tells.
    """

    props: bool = True
    model: Path | None = None
    build: Path | None = None
    program_sha256: str | None = None
    parallel: int | None = None
    slot_context: int | None = None
    on_device: bool = False


#: What is asked of a server where nothing is.
ANYONE = Identity()


def compare_props(url: str, props: Mapping[str, Any], asked: Identity) -> dict[str, Any]:
    """Compare what ``/props`` says with what was asked; return what was found, without paths.

    Raises RoutewiseError where the model, the build, the slots or their context differ.
    """
    model = props.get("model_path")
    if asked.model is not None and not _same_file(model, asked.model):
        _differs(url, "model (model_path of /props)", str(asked.model), model)
    if asked.parallel is not None and props.get("total_slots") != asked.parallel:
        _differs(url, "slots (total_slots of /props)", asked.parallel, props.get("total_slots"))
    n_ctx = (props.get("default_generation_settings") or {}).get("n_ctx")
    if asked.slot_context is not None and n_ctx != asked.slot_context:
        _differs(url, "context of a slot (n_ctx of /props)", asked.slot_context, n_ctx)
    info = props.get("build_info")
    if asked.build is not None:
        commit = commit_of(_build_document(asked.build)["identity"])
        if not str(info).endswith(commit):
            _differs(url, "build (build_info of /props)", commit, info)
    return {
        "build_info": info,
        "model": Path(model).name if isinstance(model, str) else None,
        "parallel": props.get("total_slots"),
        "slot_context": n_ctx,
    }


def compare_log(url: str, log: str, asked: Identity) -> None:
    """Raise RoutewiseError where a server that must use a device says that it found none."""
    if asked.on_device and "no usable GPU found" in log:
        _differs(url, "device of the model (its log)", "a GPU", "none usable")


def compare_process(url: str, pid: int, asked: Identity) -> dict[str, Any]:
    """Compare the program and the mapped libraries of a process with what was asked.

    Returns ``program``, ``program_sha256`` and, for a build of ours, ``fingerprint`` and
    ``libraries`` (digest by file name). Raises RoutewiseError where one differs.
    """
    program = Path(os.readlink(f"/proc/{pid}/exe"))
    found: dict[str, Any] = {"program": program.name, "program_sha256": sha256_file(program)}
    if asked.program_sha256 not in (None, found["program_sha256"]):
        _differs(url, "sha256 of its program", asked.program_sha256, found["program_sha256"])
    if asked.build is None:
        return found
    document = _build_document(asked.build)
    wanted: dict[str, str] = document["libraries"]
    mapped = [
        path
        for path in mapped_files(pid)
        if path.name in wanted or re.match(r"lib(ggml|llama|mtmd)", path.name)
    ]
    fingerprint, libraries = library_fingerprint(mapped, document["identity"])
    for name in sorted({*wanted, *libraries}):
        if wanted.get(name) != libraries.get(name):
            _differs(url, f"library {name}", wanted.get(name), libraries.get(name))
    if fingerprint != document["fingerprint"]:
        _differs(url, "fingerprint of its libraries", document["fingerprint"], fingerprint)
    return {**found, "fingerprint": fingerprint, "libraries": libraries}


def _same_file(found: object, asked: Path) -> bool:
    return isinstance(found, str) and Path(found).resolve() == asked.resolve()


def _build_document(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RoutewiseError(f"{path}: cannot be read: {error}", "build it again") from None
    return found


def _differs(url: str, what: str, asked: object, found: object) -> None:
    raise RoutewiseError(
        f"server at {url} is not the one asked for: {what} is {found!r}, wanted {asked!r}",
        "nothing was measured; check the route's command, its model and LD_LIBRARY_PATH",
    )
