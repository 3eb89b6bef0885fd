"""What a server's last lines and its exit code are taken to mean."""

from __future__ import annotations

import signal

import pytest
from routewise.symptom import MEANINGS, describe_exit, explain_log

LINES = [
    ("port", "E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080"),
    ("port", "OSError: [Errno 98] Address already in use"),
    ("architecture", "error loading model: unknown model architecture: 'qwen9'"),
    ("flag", "error: invalid argument: --flash"),
    ("flag", "server: error: unrecognized arguments: --np 4"),
    ("flag", "unknown option --kernel"),
    ("device", "CUDA driver version is insufficient for CUDA runtime version"),
    ("device", "libcuda.so.1: cannot open shared object file: No such file or directory"),
    ("device", "hrx: no device registered"),
    ("library", "error while loading shared libraries: libllama.so.0: cannot open shared object"),
    ("library", "/lib/libm.so.6: version `GLIBC_2.38' not found (required by llama-server)"),
    ("memory", "cudaMalloc failed: out of memory"),
    ("memory", "llama_init_from_model: failed to initialize the context: std::bad_alloc"),
    ("memory", "ggml_vulkan: Device memory allocation failed: ErrorOutOfDeviceMemory"),
    ("damaged", "invalid magic characters: 'W.N?', expected 'GGUF'"),
    ("damaged", "tensor 'x' data is not within the file bounds, model is corrupted or incomplete"),
    ("permission", "failed to open '/dev/accel/accel0': Permission denied"),
    ("missing", "failed to open GGUF file '/m.gguf' (No such file or directory)"),
    ("missing", "/models/model.q4nx does not exist"),
    ("instruction", "Illegal instruction (core dumped)"),
    ("assertion", "llama-vocab.cpp:3: GGML_ASSERT(type != LLAMA_VOCAB_TYPE_NONE) failed"),
]
#: What a healthy start says.
HARMLESS = """
warning: no usable GPU found, --gpu-layers option will be ignored
I srv  llama_server: initializing ...
W srv  llama_server: security: no API key is set and CORS allows all origins
I srv    load_model: loading model 'smollm2-q4_k_m.gguf'
W llama_context: n_ctx_seq (512) < n_ctx_train (8192) -- the full capacity will not be utilized
I srv  llama_server: server is listening on http://127.0.0.1:8080
I srv    operator(): operator(): cleaning up before exit...
"""


@pytest.mark.parametrize(("name", "line"), LINES)
def test_a_line_is_understood(name: str, line: str) -> None:
    found = explain_log(f"{HARMLESS}0.00.004.558 E {line}\nI cleaning up before exit...\n")
    assert found is not None
    assert found.name == name


def test_every_meaning_is_met() -> None:
    assert {name for name, _ in LINES} == {meaning.name for meaning in MEANINGS}


def test_a_harmless_log_means_nothing() -> None:
    assert explain_log(HARMLESS) is None
    assert explain_log("") is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "exit code unknown"),
        (0, "exit code 0"),
        (1, "exit code 1"),
        (-signal.SIGKILL, "signal 9 (SIGKILL): killed from outside"),
        (-signal.SIGSEGV, "signal 11 (SIGSEGV): the server crashed"),
        (-signal.SIGTERM, "signal 15 (SIGTERM)"),
        (-64, "signal 64"),
        (-99, "signal 99"),
    ],
)
def test_an_exit_in_words(code: int | None, words: str) -> None:
    assert describe_exit(code).startswith(words)
