"""What a device is: hardware and driver, as far as this machine can tell.

Answers may depend on both, so they are part of what a stored answer is known by. Where nobody can
tell, the machine's boot stands for them: another card or driver takes a reboot.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Kernel modules of devices that no tool of ours can ask.
_MODULES = {
    "hip": ("amdgpu",),
    "hrx": ("amdgpu",),
    "npu": ("amdxdna", "intel_vpu"),
    "vulkan": ("amdgpu", "i915", "xe", "nvidia"),
}
_QUERY_LIMIT_S = 20.0
#: Where each kind of device shows itself; a device of another name is taken on trust.
_NODES: dict[str, tuple[str, ...]] = {
    "cuda": ("nvidiactl", "nvidia[0-9]*"),
    "hip": ("kfd",),
    "hrx": ("kfd",),
    "npu": ("accel/accel*",),
    "vulkan": ("dri/renderD*",),
}
#: What the jobs of one machine are counted by, for each kind of device: a profile says how many may
#: run at once, so that no job is started only to wait for a claim. Others are not counted.
COUNTED_AS: dict[str, str] = {
    "cpu": "cpu_claim",
    "cuda": "gpu",
    "hip": "gpu",
    "hrx": "gpu",
    "npu": "npu",
    "vulkan": "gpu",
}
#: Names devices that are there though no file in /dev says so, with commas between.
TRUSTED = "ROUTEWISE_DEVICES"


def missing_devices(devices: Iterable[str], folder: Path = Path("/dev")) -> dict[str, str]:
    """Return those of the devices that this machine does not have, and what was looked for."""
    trusted = os.environ.get(TRUSTED, "").replace(" ", "").split(",")
    missing = {}
    for device in dict.fromkeys(devices):
        nodes = _NODES.get(device, ())
        if nodes and device not in trusted and not any(any(folder.glob(n)) for n in nodes):
            missing[device] = " or ".join(f"{folder}/{node}" for node in nodes)
    return missing


def identify_device(device: str, units: Sequence[str] = ()) -> dict[str, Any]:
    """Return what is known of a device; empty for ``cpu``, which the machine's scope describes.

    ``units`` are the units that are held; empty for all that there are.
    """
    if device == "cpu":
        return {}
    if device == "cuda" and (rows := _ask_nvidia(units)) is not None:
        return {"device": device, "gpus": rows}
    return {
        "device": device,
        "units": list(units),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "kernel": _read("/proc/sys/kernel/osrelease"),
        "modules": {
            name: _read(f"/sys/module/{name}/srcversion") for name in _MODULES.get(device, ())
        },
    }


def kind_of_device(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a device's identity that a stored answer is known by.

    Two units of one kind are one: neither a UUID nor the name of a unit is in it.
    """
    kind = {key: value for key, value in identity.items() if key != "units"}
    if "gpus" in kind:
        kind["gpus"] = [list(gpu) for gpu in sorted({tuple(row[:2]) for row in kind["gpus"]})]
    return kind


def kinds_of_units(identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the identity that a device has where one of its units is held: one for each kind."""
    kinds: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in identity.get("gpus", ()):
        kinds.setdefault(tuple(row[:2]), {**identity, "gpus": [row]})
    return list(kinds.values()) or [dict(identity)]


def _ask_nvidia(units: Sequence[str]) -> list[list[str]] | None:
    """Return name, driver and UUID of each GPU, or of some; None without the vendor's tool."""
    return _query_nvidia(["name", "driver_version", "uuid"], units)


def _query_nvidia(keys: Sequence[str], units: Sequence[str]) -> list[list[str]] | None:
    """Return these values of each GPU as text without units; None without the vendor's tool."""
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
    if units:
        command += ["--id", ",".join(units)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]


#: What is asked of a GPU, and the name and type under which a reading has it.
_STATE: dict[str, tuple[str, type]] = {
    "clocks.sm": ("sm_clock_mhz", float),
    "clocks.mem": ("memory_clock_mhz", float),
    "power.draw": ("power_w", float),
    "power.limit": ("power_limit_w", float),
    "pstate": ("performance_state", str),
    "temperature.gpu": ("temperature_c", float),
}


def read_state(device: str, units: Sequence[str] = ()) -> list[dict[str, Any]] | None:
    """Return clocks, power and temperature of each GPU now; None where nobody can tell.

    A value that the driver does not have ('[N/A]') is None. ``units`` as in identify_device.
    """
    if device != "cuda" or (rows := _query_nvidia(list(_STATE), units)) is None:
        return None
    return [
        {name: _value(text, kind) for text, (name, kind) in zip(row, _STATE.values(), strict=False)}
        for row in rows
    ]


def _value(text: str, kind: type) -> Any:
    try:
        return None if text.startswith("[") else kind(text)
    except ValueError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
