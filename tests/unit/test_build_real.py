"""The real llama.cpp: the same bits from two folders, and one file's work for one file's edit.

The engine of the session is compiled once (minutes, or nothing where the demo has run). A copy of
its source, with comment lines added, is built beside it; with ccache that takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from routewise.build import (
    BuildPlan,
    BuildSpec,
    compile_targets,
    install_file,
    plan_build,
    run_build,
)
from routewise.fingerprint import library_fingerprint
from routewise.patch import load_patch
from routewise.source import KEPT

pytest_plugins = ("builds",)
SPEC = BuildSpec(source="llama-cpp", backend="cpu")
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

# A small file of the CPU backend, and a place in it where a line can be added.
SMALL, PLACE = "ggml/src/ggml-cpu/hbm.cpp", '#include "hbm.h"\n'
COMMENTED = (SMALL, "ggml/src/ggml.c", "ggml/src/ggml-cpu/vec.cpp", "src/llama-batch.cpp")


def copy_of(source: Path, folder: Path) -> Path:
    """Copy what a build reads of a tree, for a test to edit."""
    for kept in KEPT:
        if (source / kept).is_dir():
            shutil.copytree(source / kept, folder / kept)
        elif (source / kept).is_file():
            (folder / kept).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / kept, folder / kept)
    return folder


@pytest.fixture(scope="module")
def commented(real_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the source, elsewhere, with comment lines at the top of real files."""
    tree = copy_of(real_source, tmp_path_factory.mktemp("another") / "place" / "llama.cpp")
    for file in COMMENTED:
        text = (tree / file).read_text()
        (tree / file).write_text(f"// a comment line\n/* and\n   more */\n\n{text}")
    return tree


def plan_of(tree: Path, **more: Any) -> BuildPlan:
    """Plan a build of a path source, with its results beside the tree."""
    return plan_build("mine", more.pop("spec", SPEC), tree, tree.parent / "results", **more)


@pytest.fixture(scope="module")
def rebuilt(commented: Path, real_engine: Path) -> dict[str, Any]:
    """Return build.json of the commented copy."""
    return run_build(plan_of(commented))


def test_comment_lines_change_no_plan(commented: Path, real_plan: BuildPlan) -> None:
    plan = plan_of(commented)
    assert plan.components == real_plan.components
    assert (plan.digest, plan.tools_digest) == (real_plan.digest, real_plan.tools_digest)


def test_another_folder_and_comment_lines_change_no_fingerprint(
    rebuilt: dict[str, Any], real_engine: Path
) -> None:
    first = json.loads((real_engine / "build.json").read_text())
    assert rebuilt["libraries"] == first["libraries"]
    assert rebuilt["fingerprint"] == first["fingerprint"]
    assert rebuilt["raw_source_digest"] != first["raw_source_digest"]
    assert rebuilt["n_compiled"] >= 50


def test_the_compiler_itself_is_reproducible(
    commented: Path, real_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled anew without ccache, which could hand out the objects of the first build."""
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    plan = plan_build("bare", SPEC, commented, tmp_path / "results")
    compiled = compile_targets(plan, ["ggml-base"], log=tmp_path / "log")
    assert compiled.n_compiled >= 8
    name = "libggml-base.so.0"
    install_file((compiled.bin_dir / name).resolve(), tmp_path / "lib" / name, plan.identity)
    found = library_fingerprint(tmp_path / "lib", plan.identity)[1][name]
    assert found == json.loads((real_engine / "build.json").read_text())["libraries"][name]


@pytest.mark.usefixtures("rebuilt")
def test_a_one_file_edit_compiles_one_file_and_moves_digest_and_fingerprint(
    commented: Path, real_engine: Path
) -> None:
    before = json.loads((real_engine / "build.json").read_text())
    text = (commented / SMALL).read_text()
    (commented / SMALL).write_text(text + "\nint routewise_test_symbol(void) { return 1; }\n")
    try:
        after = run_build(plan_of(commented))
    finally:
        (commented / SMALL).write_text(text)
    assert after["n_compiled"] == 1
    assert after["digest"] != before["digest"]
    assert after["fingerprint"] != before["fingerprint"]
    moved = {
        name for name, digest in after["libraries"].items() if digest != before["libraries"][name]
    }
    assert moved == {"libggml-cpu.so.0"}


@pytest.mark.usefixtures("rebuilt")
def test_a_patched_build_is_told_apart(commented: Path, real_engine: Path, tmp_path: Path) -> None:
    stock = json.loads((real_engine / "build.json").read_text())
    folder = tmp_path / "patches/marked"
    overlay = folder / "overlay/ggml/src/ggml-cpu"
    overlay.mkdir(parents=True)
    (overlay / "marked.h").write_text("int routewise_marked(void);\n")
    edited = tmp_path / "b" / SMALL
    edited.parent.mkdir(parents=True)
    edited.write_text(
        (commented / SMALL).read_text()
        + '\n#include "marked.h"\nint routewise_marked(void) { return 1; }\n'
    )
    diff = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", commented / SMALL, edited],
        capture_output=True,
        text=True,
    ).stdout
    lines = [line for line in diff.splitlines() if not line.startswith(("diff ", "index "))]
    body = "\n".join([f"--- a/{SMALL}", f"+++ b/{SMALL}", *lines[2:]])
    (folder / "hooks.diff").write_text(body + "\n")
    patch = load_patch("marked", folder.parent)
    plan = plan_of(commented, patch=patch, spec=BuildSpec("llama-cpp", "cpu", "marked"))
    document = run_build(plan)
    for key in ("identity", "digest", "fingerprint"):
        assert document[key] != stock[key]
    assert document["patch"] == "marked"
    assert document["n_compiled"] == 1
    assert plan.tools_digest == plan_of(commented).tools_digest
    base = (plan.engine_dir / "lib/libggml-base.so.0").read_bytes()
    assert f"routewise-{plan.digest[:12]}".encode() in base
    assert f"routewise-{stock['digest'][:12]}".encode() not in base
    # what the patch does not touch is the same library
    assert document["libraries"]["libggml-base.so.0"] == stock["libraries"]["libggml-base.so.0"]


def test_the_tools_run(real_tools: Path) -> None:
    said = subprocess.run(
        [real_tools / "bin/llama-quantize", "--help"],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"},
    )
    assert "Q4_K_M" in said.stdout + said.stderr
