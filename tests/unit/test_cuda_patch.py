"""The patch cuda-exact compiles: its own files and those it hooks into, by nvcc, for one chip.

No GPU is needed. Where the toolkit has no cuBLAS, ``tests/cuda/cublas_v2.h`` declares what the
backend names of it. Optimisation of device code is off: this says that the code is right C++ and
right CUDA, not what it does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from routewise.patch import load_patch, patched_files

pytest_plugins = ("builds",)
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine"),
]

FOLDER = "ggml/src/ggml-cuda"
#: The pairs of key and value types that a default build has attention kernels for.
ATTENTION = {"F16": 1, "BF16": 1, "Q8_0": 1, "Q4_0": 1}
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(scope="module")
def tree(repository: Path, real_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of llama.cpp's ggml with the patch."""
    folder = tmp_path_factory.mktemp("cuda") / "tree"
    shutil.copytree(real_source / "ggml", folder / "ggml")
    patch = load_patch("cuda-exact", repository / "patches")
    for file, content in patched_files(patch, real_source).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return folder


def changed_sources(repository: Path) -> list[str]:
    """Return the .cu files that the patch adds or changes."""
    patch = load_patch("cuda-exact", repository / "patches")
    files = {file for file, _ in patch.overlay} | set(patch.touched)
    return sorted(file for file in files if file.endswith(".cu"))


def compiled(tree: Path, repository: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Compile one file of the tree for one chip; keep the object beside it."""
    pairs = (
        f"-DGGML_CUDA_FA_{k}_{v}={int(k == v and k in ATTENTION)}" for k in TYPES for v in TYPES
    )
    command = [
        "nvcc", "-std=c++17", "-O1", "-Xptxas", "-O1", "-use_fast_math", "-extended-lambda",
        "-arch=sm_90a", "-Xcompiler", "-fPIC",
        "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED", "-DGGML_CUDA_USE_GRAPHS",
        "-DGGML_SCHED_MAX_COPIES=4", '-DGGML_CUDA_FA_QUANTS="f16-f16"', "-DNDEBUG", *pairs,
        *(f"-I{tree / folder}" for folder in ("ggml/include", "ggml/src", FOLDER)),
        # after the toolkit's own folder: only where that has no cuBLAS
        "-Xcompiler", f"-idirafter,{repository / 'tests/cuda'}",
        "-c", str(tree / source), "-o", f"{tree / source}.o",
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )


def test_what_the_patch_adds_and_changes_compiles(tree: Path, repository: Path) -> None:
    sources = changed_sources(repository)
    assert f"{FOLDER}/ggml-cuda.cu" in sources
    assert any("/exact/" in source for source in sources)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda source: compiled(tree, repository, source), sources))
    for source, result in zip(sources, done, strict=True):
        assert result.returncode == 0, f"{source}:\n{result.stderr[-3000:]}"


def test_an_upstream_change_under_a_hook_is_an_error(tree: Path, repository: Path) -> None:
    """A function that a hook calls and that is no longer there: the check above would fail."""
    source = tree / FOLDER / "exact/exact.cu"
    header = tree / FOLDER / "mmvf.cuh"
    text = header.read_text()
    header.write_text(text.replace("ggml_cuda_mul_mat_vec_f", "ggml_cuda_renamed"))
    try:
        result = compiled(tree, repository, str(source.relative_to(tree)))
    finally:
        header.write_text(text)
    assert result.returncode != 0
    assert "ggml_cuda_mul_mat_vec_f" in result.stderr
