"""What the last lines of a server's log, or its exit code, usually mean."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """What a line of a server's log usually means, and the next thing to try."""

    name: str
    pattern: str
    meaning: str
    hint: str


PORT_TAKEN = Meaning(
    "port",
    r"couldn't bind|could not bind|failed to bind|bind(ing)? failed|address (is )?already in use"
    r"|EADDRINUSE|port \d+ is (already )?(in use|taken)",
    "the port is taken by another process",
    "run it again; free ports can be listed with: ss -ltn",
)
MEANINGS = (
    PORT_TAKEN,
    Meaning(
        "architecture",
        r"unknown model architecture|unsupported (model )?architecture|unknown pre-tokenizer",
        "this engine does not know the model's architecture",
        "take an engine that is newer than the model, or another model",
    ),
    Meaning(
        "flag",
        r"invalid argument: |unrecognized (arguments|option)|unknown (option|argument)"
        r"|invalid option|error while handling argument|error: argument ",
        "the server does not know a flag of its command line, or a value",
        "compare the route's command and server_args with the server's own --help",
    ),
    Meaning(
        "device",
        r"no CUDA-capable device|CUDA driver version is insufficient|libcuda\.so"
        r"|ggml_cuda_init: failed|no device registered|(?<!warning: )no usable GPU|hsa_init|libhsa"
        r"|HSA_STATUS_ERROR|invalid device(: |$)|ErrorIncompatibleDriver|no (GPU|NPU) (was )?found"
        r"|couldn't open device|No such device",
        "no usable device: its driver is missing or too old, or the device is hidden from this job",
        "check that the driver's own tool (nvidia-smi, rocminfo, xrt-smi) sees the device here, "
        "and the route's environment and claim",
    ),
    Meaning(
        "library",
        r"error while loading shared libraries|cannot open shared object file|undefined symbol"
        r"|version `[^']+' not found",
        "a shared library is missing or of another version",
        "run ldd on the server's program, and look at LD_LIBRARY_PATH in the route's environment",
    ),
    Meaning(
        "memory",
        r"out of memory|std::bad_alloc|failed to allocate|unable to allocate|cudaMalloc failed"
        r"|ErrorOutOf(Device|Host)Memory|cannot allocate memory|OutOfMemory",
        "out of memory, on the device or on the host",
        "take a smaller context or fewer slots, and see who else holds the memory (nvidia-smi, "
        "free -m)",
    ),
    Meaning(
        "damaged",
        r"invalid magic|failed to read key-value|not within the file bounds|corrupted|incomplete"
        r"|unexpected(ly)? (reached )?end of file|failed to read tensor|bad magic",
        "the model file is damaged or cut short, or is no model of this kind",
        "compare its size and sha256 with its origin's, and fetch it again",
    ),
    Meaning(
        "permission",
        r"permission denied|operation not permitted|EACCES",
        "a file or device may not be used by this user",
        "check the permissions of the model, of the program and of the device's node in /dev",
    ),
    Meaning(
        "missing",
        r"no such file or directory|failed to open|does not exist|no such file|file not found",
        "a file is missing: the model, or another that the command names",
        "check the paths in the route's command, its artefact and the study's models",
    ),
    Meaning(
        "instruction",
        r"illegal instruction",
        "the program was built for another processor",
        "build it on this machine, or for its instruction set",
    ),
    Meaning(
        "assertion",  # last: what failed before it says more
        r"GGML_ASSERT\(",
        "the server gave up on a condition that it takes for granted, which its log names",
        "see whether the model has what the sweep asks for, such as a tokenizer for text",
    ),
)
_SIGNALS = {
    signal.SIGKILL: "killed from outside; where nobody did it, the kernel was out of memory "
    "(dmesg says so)",
    signal.SIGILL: "the program was built for another processor: build it on this machine",
    signal.SIGSEGV: "the server crashed",
    signal.SIGABRT: "the server gave up on a failed assertion, which the log should name",
    signal.SIGBUS: "a file was cut short while it was mapped, or the disk under it is full",
}


def explain_log(text: str) -> Meaning | None:
    """Return what a server's log most likely means, None where no line is known."""
    return next(
        (found for found in MEANINGS if re.search(found.pattern, text, re.IGNORECASE)), None
    )


def describe_exit(code: int | None) -> str:
    """Return an exit code in words: ``exit code 1``, ``signal 9 (SIGKILL): …``."""
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    words = _SIGNALS.get(number)
    return f"signal {-code} ({number.name})" + (f": {words}" if words else "")
