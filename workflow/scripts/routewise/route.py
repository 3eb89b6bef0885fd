"""A route: one way to get tokens, with its device, its claim and what its replies can show.

A route is a build of ours (replayed in-process, or served by its own llama-server), an external
command that serves, or the address of an endpoint that already runs. What a route cannot do is
declared here, and makes a cell ``unsupported`` with the reason before anything is started.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from routewise.claim import ClaimSpec
from routewise.engine import ALL_LAYERS, Settings
from routewise.health import Health
from routewise.reply import Speech

#: Of every route.
ROUTE_DEFAULTS: dict[str, Any] = {
    "reference": None,
    "threads": 2,
    "context": 1024,
    "micro_batch": 512,
    "flash_attention": True,
    "kv_type": "f16",
    "kv_unified": False,
    "gpu_layers": None,
    "env": {},
    "device": None,
    "claim": {},
    "health": {},
    "api": "llama",
    "prompt_form": "ids",
    "token_ids": True,
    "logprobs": True,
    "logprob_list": None,
    "thinking": "none",
    "model_name": None,
    "props": None,
    "prompt_cache": "switchable",
    "slots": None,
    "parallel_max": None,
    "repeats_max": None,
    "artefact": None,
    "weights": None,
    "identity_files": [],
    "server_args": [],
    "start_limit_s": 600,
    "stall_s": 120,
    "dispatch": None,
    "arm": None,
    "allow_remote": False,
}
CLAIM_DEFAULTS: dict[str, Any] = {
    "units": 1,
    "unit_ids": [],
    "whole": False,
    "limit_minutes": 120,
    "hold": [],
    "visible": [],
}
HEALTH_DEFAULTS: dict[str, Any] = {"path": "/health", "ready": [200], "alive": [200, 503]}

#: What a command template may name.
PLACEHOLDERS = ("host", "port", "model", "context", "parallel", "threads")

#: What a build's server is told already: not for ``server_args``, which would win unseen.
OWN_FLAGS = frozenset(
    (
        "--alias",
        "--api-prefix",
        "--batch-size",
        "--cache-idle-slots",
        "--cache-ram",
        "--cache-type-k",
        "--cache-type-v",
        "--ctx-checkpoints",
        "--ctx-size",
        "--device",
        "--fit",
        "--flash-attn",
        "--gpu-layers",
        "--hf-repo",
        "--host",
        "--kv-unified",
        "--metrics",
        "--model",
        "--model-url",
        "--n-gpu-layers",
        "--no-cache-idle-slots",
        "--no-kv-unified",
        "--no-slots",
        "--no-webui",
        "--offline",
        "--parallel",
        "--port",
        "--slot-prompt-similarity",
        "--slots",
        "--swa-checkpoints",
        "--threads",
        "--threads-batch",
        "--ubatch-size",
        "--webui",
        "-a",
        "-b",
        "-c",
        "-cram",
        "-ctk",
        "-ctv",
        "-ctxcp",
        "-dev",
        "-fa",
        "-fit",
        "-hf",
        "-kvu",
        "-m",
        "-mu",
        "-ngl",
        "-no-kvu",
        "-np",
        "-sps",
        "-t",
        "-tb",
        "-ub",
    )
)

#: The keys that say how a route gets its tokens; it has exactly one of them.
KINDS = ("build", "command", "endpoint")

#: Prompt cache modes that a route of each kind of cache can be asked for.
CACHE_MODES: dict[str, tuple[str, ...]] = {
    "switchable": ("off", "cold", "warm"),
    "fixed": ("cold", "warm"),  # it has one that no request can switch off
    "none": ("off",),
}


@dataclass(frozen=True)
class Arm:
    """A route that differs from another by environment or flags, to do without one kernel family.

    It counts only where the other route logged the same kernels three times and this one's log
    shows the family gone.
    """

    of: str
    without: str


@dataclass(frozen=True)
class Serving:
    """How a route serves, and what its replies can show. ``parallel_max`` etc.: None is no limit.

    ``argv`` is the command template of an external server, or what is added to the command line
    of a build's own; ``endpoint`` the address of one that already runs.
    """

    argv: tuple[str, ...]
    endpoint: str | None
    device: str
    claim: ClaimSpec | None
    health: Health
    speech: Speech
    props: bool  # it says of itself what it is, under /props
    prompt_cache: str  # switchable | fixed | none
    slots: bool  # a request can name its slot
    parallel_max: int | None
    repeats_max: int | None
    identity_files: tuple[str, ...]  # of a command: what else decides its answers
    artefact: str | None  # what is loaded in place of the study's model
    weights: str  # same | requantised
    start_limit_s: float
    stall_s: float
    dispatch: str | None  # scheduler | hrx: whose log says which kernels ran

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Serving:
        """Read back what :meth:`document` made of it."""
        claim = document["claim"]
        return cls(
            **{
                **document,
                "argv": tuple(document["argv"]),
                "identity_files": tuple(document["identity_files"]),
                "claim": None if claim is None else ClaimSpec.from_document(claim),
                "health": _health(document["health"]),
                "speech": Speech(**document["speech"]),
            }
        )

    def document(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Route:
    """One way to get tokens. ``kind`` is build, command or endpoint."""

    name: str
    kind: str
    build: str | None
    reference: str | None
    settings: Settings
    env: dict[str, str]
    serving: Serving
    arm: Arm | None
    host: str | None = None  # the kind of host that it runs on; None is any
    resources: Mapping[str, int | str] = field(default_factory=dict)  # asked of a scheduler


def route_of(
    name: str,
    entry: Mapping[str, Any],
    backend: str | None,
    *,
    host: str | None = None,
    resources: Mapping[str, int | str] | None = None,
) -> Route:
    """Make a route of its entry in a study; ``backend`` is that of its build, where it has one.

    ``host`` and ``resources`` are what the study says of where it runs.
    """
    entry = {**ROUTE_DEFAULTS, **entry}
    kind = next(kind for kind in KINDS if kind in entry)
    device = entry["device"] or backend or ("remote" if kind == "endpoint" else "cpu")
    return Route(
        name=name,
        kind=kind,
        build=entry.get("build"),
        reference=entry["reference"],
        settings=Settings(
            context=entry["context"],
            micro_batch=entry["micro_batch"],
            threads=entry["threads"],
            flash_attention=entry["flash_attention"],
            kv_type=entry["kv_type"],
            gpu_layers=_gpu_layers(entry["gpu_layers"], backend, device),
            kv_unified=entry["kv_unified"],
        ),
        env=dict(entry["env"]),
        serving=Serving(
            argv=tuple(entry["command"] if kind == "command" else entry["server_args"]),
            endpoint=entry.get("endpoint"),
            device=device,
            claim=_claim(device, entry["claim"], kind),
            health=_health({**HEALTH_DEFAULTS, **entry["health"]}),
            speech=Speech(
                api=entry["api"],
                prompt_form=entry["prompt_form"],
                token_ids=entry["token_ids"],
                logprobs=entry["logprobs"],
                logprob_list=entry["logprob_list"],
                thinking=entry["thinking"],
                model_name=entry["model_name"],
            ),
            props=entry["api"] == "llama" if entry["props"] is None else entry["props"],
            prompt_cache=entry["prompt_cache"],
            slots=entry["api"] == "llama" if entry["slots"] is None else entry["slots"],
            parallel_max=entry["parallel_max"],
            repeats_max=entry["repeats_max"],
            identity_files=tuple(entry["identity_files"]),
            artefact=entry["artefact"],
            weights=entry["weights"] or "same",
            start_limit_s=entry["start_limit_s"],
            stall_s=entry["stall_s"],
            dispatch=entry["dispatch"],
        ),
        arm=None if entry["arm"] is None else Arm(entry["arm"]["of"], entry["arm"]["without"]),
        host=host,
        resources=dict(resources or {}),
    )


def _gpu_layers(asked: int | None, backend: str | None, device: str) -> int:
    """Return how many layers go to the device: all, unless the route says fewer or has none."""
    if backend in (None, "cpu") or device == "cpu":
        return 0
    return ALL_LAYERS if asked is None else asked


def unknown_placeholders(command: Sequence[str]) -> list[str]:
    """Return what a command template names in braces and nobody fills in."""
    named = (name for part in command for name in re.findall(r"\{(\w*)\}", part))
    return [name for name in dict.fromkeys(named) if name not in PLACEHOLDERS]


def is_local(url: str) -> bool:
    """Say whether a URL's host is this machine by its name alone; no name is looked up."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_but_for_the_arm(base: Route, route: Route) -> str | None:
    """Return what two routes differ in that an arm may not, or None.

    An arm may have other variables, attention and cache types, and more words on its command line.
    """

    def fixed(one: Route) -> dict[str, Any]:
        serving, settings = one.serving.document(), asdict(one.settings)
        for name in ("argv", "claim", "dispatch", "health", "start_limit_s", "stall_s"):
            del serving[name]
        for name in ("flash_attention", "kv_type"):  # they choose kernels, as a flag would
            del settings[name]
        return {**serving, "kind": one.kind, "build": one.build, **settings}

    for name, value in fixed(base).items():
        if fixed(route)[name] != value:
            return name
    words = iter(route.serving.argv)
    return None if all(word in words for word in base.serving.argv) else "command"


def _claim(device: str, entry: Mapping[str, Any] | bool, kind: str) -> ClaimSpec | None:
    """Return the claim of a route's device; None where the study switches it off.

    An endpoint is somebody else's server: its device is claimed only where the study says so.
    """
    if entry is False or (kind == "endpoint" and not entry):
        return None
    entry = {} if entry is True else entry
    found = {**CLAIM_DEFAULTS, "device": device, **entry}
    return ClaimSpec.from_document(found)


def _health(entry: Mapping[str, Any]) -> Health:
    return Health(entry["path"], tuple(entry["ready"]), tuple(entry["alive"]))
