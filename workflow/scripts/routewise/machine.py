"""What a machine is, in words and digests that name no host."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routewise.digest import digest_of
from routewise.watch import stat_fields

#: What of a machine the bits of a result may depend on. Not the cores that a job may use: a route
#: sets its threads and reads them back, and a scheduler or ``taskset`` gives each job other cores.
SCOPE_KEYS = ("cpu_model", "cpu_flags_digest", "libc")

#: Only these environment variables of the engine's family reach a measurement: those that the
#: route names. Anything else beginning like this would move numbers or times unseen.
ENGINE_VARIABLES = ("GGML_", "LLAMA_", "OMP_", "GOMP_", "KMP_")


def describe_machine() -> dict[str, Any]:
    """Return kind, processor, cores, flags digest, operating system; never the host's name."""
    model, flags = _processor()
    n_cores = len(os.sched_getaffinity(0))
    return {
        "kind": f"{n_cores}-core {_architecture()}{_vector_unit(flags)}",
        "cpu_model": model,
        "n_cores": n_cores,
        "cpu_flags_digest": digest_of(sorted(flags))[:16],
        "os": platform.system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),  # its expf and tanhf are in the logits
        "python": platform.python_version(),
    }


def device_scope(machine: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a machine's description that a fragment's bits may depend on."""
    return {key: machine[key] for key in SCOPE_KEYS}


def set_engine_environment(variables: dict[str, str]) -> list[str]:
    """Give this process exactly the engine variables of a route; return what was removed.

    To be called before any library of the engine is loaded: they are read then, and not again.
    """
    removed = sorted(
        name for name in os.environ if name.startswith(ENGINE_VARIABLES) and name not in variables
    )
    for name in removed:
        del os.environ[name]
    os.environ.update(variables)
    return removed


@dataclass(frozen=True)
class Load:
    """Processor time since boot: all cores, the idle part, and the part stolen; in seconds."""

    busy_s: float
    steal_s: float
    own_s: float
    at_s: float


def read_load(own_pids: list[int]) -> Load:
    """Read the machine's busy time and that of our own processes (all threads, no children)."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    ticks = [int(value) for value in first]
    idle = ticks[3] + ticks[4]
    steal = ticks[7] if len(ticks) > 7 else 0
    busy = sum(ticks[:8]) - idle - steal
    own = 0
    for pid in own_pids:
        fields = stat_fields(pid)
        own += int(fields[11]) + int(fields[12])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return Load(busy * tick_s, steal * tick_s, own * tick_s, uptime_s)


def other_cpu_share(before: Load, after: Load) -> float:
    """Return how many cores' worth of time others used between two readings (stolen time too)."""
    span_s = max(after.at_s - before.at_s, 1e-9)
    busy_s = after.busy_s - before.busy_s
    steal_s = after.steal_s - before.steal_s
    own_s = after.own_s - before.own_s
    return max(0.0, (busy_s + steal_s - own_s) / span_s)


def clock_mhz() -> float | None:
    """Return the mean clock of the cores in MHz, or None where the machine does not tell."""
    text = Path("/proc/cpuinfo").read_text()
    values = [float(value) for value in re.findall(r"^cpu MHz\s*: ([0-9.]+)", text, re.MULTILINE)]
    return sum(values) / len(values) if values else None


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "x86-64", "aarch64": "Arm64"}.get(machine, machine)


def _processor() -> tuple[str, set[str]]:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^(?:model name|Model|cpu model)\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    return (
        model[1].strip() if model else platform.machine(),
        set(flags[1].split()) if flags else set(),
    )


def _vector_unit(flags: set[str]) -> str:
    for flag, words in (
        ("avx512_vnni", "AVX-512 VNNI"),
        ("avx512f", "AVX-512"),
        ("avx_vnni", "AVX2 VNNI"),
        ("avx2", "AVX2"),
        ("sve", "SVE"),
        ("asimd", "NEON"),
    ):
        if flag in flags:
            return f" with {words}"
    return ""
