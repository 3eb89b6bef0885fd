"""What is started for a serving cell: a build's own llama-server, an external command, or nothing.

Everything that moves a number stands on the command line, whatever the server's default; the
server's defaults that silently move an experiment (prompt caches, slots, fitting to memory) are
switched off by name.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routewise.claim import Held
from routewise.client import probe
from routewise.digest import digest_of, sha256_file, tree_digest
from routewise.dispatch import LOGS
from routewise.errors import RoutewiseError
from routewise.identity import Identity
from routewise.serve_cell import ServeCell, ServeInputs, command_files
from routewise.server import Launch, fill_command, nvidia_memory_mib

#: A probe's completion is tiny; a model that takes longer for it is not ready.
PROBE_LIMIT_S = 60.0


@dataclass(frozen=True)
class LaunchPlan:
    """How the servers of a cell are started, and what they are.

    ``identity`` is what goes into provenance: of a build its build.json, of a command its words
    and digests; always with a ``fingerprint``.
    """

    identity: dict[str, Any]
    probe: Callable[[str], None]
    start: Callable[[Path, Held | None, bool], Launch]  # (log, claim, logging of kernels)


def launch_of(cell: ServeCell, inputs: ServeInputs) -> LaunchPlan:
    """Return how a cell's servers are started.

    Raises RoutewiseError where the build's record is damaged or the command is not to be found.
    """
    probe_of_route = functools.partial(probe, speech=cell.serving.speech, timeout_s=PROBE_LIMIT_S)
    if cell.kind == "endpoint":
        endpoint = {"endpoint": cell.serving.endpoint, "name": cell.route}
        return LaunchPlan({**endpoint, "fingerprint": digest_of(endpoint)}, probe_of_route, _never)
    loaded = Path(cell.serving.artefact) if cell.serving.artefact else inputs.model
    if cell.kind == "build":
        assert inputs.server is not None
        identity = {**_build_identity(inputs.server), "artefact": _artefact_digest(cell)}
        argv: tuple[str, ...] = server_command(cell, inputs.server / "bin" / "llama-server", loaded)
        asked = Identity(
            model=loaded,
            build=inputs.server / "build.json",
            parallel=cell.parallel,
            # a slot of a shared cache may fill all of it
            slot_context=cell.settings.context * (cell.parallel if cell.settings.kv_unified else 1),
            on_device=cell.settings.gpu_layers > 0,
        )
    else:
        identity = _command_identity(cell)
        named = "".join(cell.serving.argv)
        argv = fill_command(
            cell.serving.argv,
            {
                "model": loaded,
                "context": cell.settings.context * cell.parallel,
                "parallel": cell.parallel,
                "threads": cell.settings.threads,
            },
        )
        asked = Identity(
            props=cell.serving.props,
            model=loaded if cell.serving.props and "{model}" in named else None,
            parallel=cell.parallel if cell.serving.props and "{parallel}" in named else None,
        )

    def start(log: Path, held: Held | None, logging: bool = False) -> Launch:
        dispatch = LOGS[cell.serving.dispatch] if logging and cell.serving.dispatch else None
        memory = None
        if held is not None and "CUDA_VISIBLE_DEVICES" in held.environment:
            memory = functools.partial(nvidia_memory_mib, held.unit)
        return Launch(
            argv=(*argv, *(dispatch.arguments if dispatch else ())),
            env={
                **cell.env,
                **(held.environment if held is not None else {}),
                **(dispatch.environment if dispatch else {}),
            },
            log=log,
            health=cell.serving.health,
            probe=probe_of_route,
            identity=asked,
            start_limit_s=cell.serving.start_limit_s,
            stall_s=cell.serving.stall_s,
            device_memory=memory,
        )

    return LaunchPlan(identity, probe_of_route, start)


def server_command(cell: ServeCell, program: Path, model: Path) -> tuple[str, ...]:
    """Return the command line of a build's llama-server; the port is filled in when it starts."""
    settings = cell.settings
    return (
        str(program),
        *("--model", str(model)),
        *("--host", "{host}", "--port", "{port}"),
        *("--parallel", str(cell.parallel), "--ctx-size", str(settings.context * cell.parallel)),
        # as the sequences of a replay: each slot has its own cache, unless the route shares one
        "--kv-unified" if settings.kv_unified else "--no-kv-unified",
        *("--threads", str(settings.threads), "--threads-batch", str(settings.threads)),
        *("--batch-size", str(settings.micro_batch)),  # so that each pass is counted
        *("--ubatch-size", str(settings.micro_batch)),
        *("--flash-attn", "on" if settings.flash_attention else "off"),
        *("--cache-type-k", settings.kv_type, "--cache-type-v", settings.kv_type),
        *("--n-gpu-layers", str(settings.gpu_layers)),
        *(() if settings.gpu_layers else ("--device", "none")),
        *("--fit", "off"),
        *("--cache-ram", "0", "--no-cache-idle-slots", "--slot-prompt-similarity", "0"),
        *("--ctx-checkpoints", "0"),
        *("--metrics", "--slots", "--no-webui", "--offline"),
        *cell.serving.argv,
    )


def _build_identity(folder: Path) -> dict[str, Any]:
    path = folder / "build.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RoutewiseError(
            f"{path}: no record of a build ({error})", "delete the folder and run again"
        ) from error
    return document


def _command_identity(cell: ServeCell) -> dict[str, Any]:
    """Return what an external command is: its words, the files that they name, what it loads.

    What a wrapper starts in its turn is known only where the route's ``identity_files`` name it.
    """
    name = cell.serving.argv[0]
    program = shutil.which(name, path=cell.env.get("PATH"))
    if program is None:
        raise RoutewiseError(
            f"route {cell.route}: command {name!r} is not on the PATH of this machine",
            "install it, or give its path in the study",
        )
    found = {
        "command": list(cell.serving.argv),
        "program_sha256": sha256_file(Path(program)),
        "files": command_files(cell.serving),
        "artefact": _artefact_digest(cell),
    }
    return {"name": cell.route, **found, "fingerprint": digest_of(found)}


def _artefact_digest(cell: ServeCell) -> str | None:
    artefact = cell.serving.artefact
    return None if artefact is None else tree_digest(Path(artefact))


def _never(*_: Any, **__: Any) -> Launch:
    raise AssertionError("an endpoint is not started")
