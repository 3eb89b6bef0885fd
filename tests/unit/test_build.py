"""Builds: what names them, what they cost, and that the same source gives the same bits."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from routewise import build as build_module
from routewise.build import BuildPlan, BuildSpec, plan_build, run_build
from routewise.digest import DigestCache
from routewise.errors import RoutewiseError
from routewise.fingerprint import COMMIT_PLACEHOLDER, IDENTITY_PLACEHOLDER, library_fingerprint
from routewise.patch import load_patch
from routewise.toolchain import find_compilers
from small_tree import make_shim, make_tree

Planner = Callable[..., BuildPlan]
SPEC = BuildSpec(source="small", backend="cpu")
DOT = "ggml/src/ggml-cpu/dot.cpp"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    shim = make_shim(tmp_path / "shim")

    def plan(
        root: Path, name: str = "cpu-stock", results: str = "results", **more: Any
    ) -> BuildPlan:
        spec = more.pop("spec", SPEC)
        return plan_build(name, spec, root, tmp_path / results, shim_dir=shim, **more)

    return plan


def make_patch(folder: Path, factor: str = "2.0f") -> Path:
    """Write a patch named `twice` that changes what the miniature computes; return its parent."""
    patch = folder / "twice"
    (patch / "overlay/ggml/src/ggml-cpu").mkdir(parents=True)
    (patch / "overlay/ggml/src/ggml-cpu/twice.cpp").write_text(
        f"float twice(float x) {{ return {factor} * x; }}\n"
    )
    (patch / "hooks.diff").write_text(
        f"--- a/{DOT}\n+++ b/{DOT}\n@@ -8,4 +8,5 @@\n"
        "         sum += a[i] * b[i];\n     }\n-    return sum;\n"
        "+    float twice(float x);\n+    return twice(sum);\n }\n"
    )
    return folder


JOB = """
import sys
from pathlib import Path
from routewise.build import BuildSpec, plan_build, run_build
root, results, shim = map(Path, sys.argv[1:4])
spec = BuildSpec("small", "cpu")
run_build(plan_build(sys.argv[4], spec, root, results, shim_dir=shim), sys.argv[5])
"""


def job_command(tree: Path, tmp_path: Path) -> list[Any]:
    """Return a command that builds in a process of its own; name and part are to be added."""
    return [sys.executable, "-c", JOB, tree, tmp_path / "results", tmp_path / "shim"]


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1))


# ---------------------------------------------------------------------------------- plans


def test_a_comment_and_a_blank_line_change_no_digest(tree: Path, planner: Planner) -> None:
    before = planner(tree)
    edit(tree, DOT, "float sum", "// a new line\n\n    float  sum")
    edit(tree, "CMakeLists.txt", "add_subdirectory(ggml)", "# first\nadd_subdirectory( ggml )")
    after = planner(tree)
    assert (after.digest, after.tools_digest) == (before.digest, before.tools_digest)


@pytest.mark.parametrize(
    ("file", "old", "new", "moves"),
    [
        (DOT, "0.0f", "-0.0f", "engine tools"),
        ("CMakeLists.txt", "VERSION 3.14", "VERSION 3.15", "engine tools"),
        ("src/llama.cpp", "x, x, n", "x, x, n - 1", "engine tools"),
        ("include/llama.h", "int n", "long n", "engine tools"),
        ("common/common.cpp", "2", "3", "tools"),
        ("tools/bench/main.cpp", "0", "1", "tools"),
        ("tools/server/server.cpp", "0", "1", ""),
        ("ggml/src/ggml-cuda/dot.cu", "//", "int x; //", ""),
        ("LICENSE", "MIT", "none", ""),
        ("docs/long.txt", "not", "no", ""),
    ],
)
def test_an_edit_moves_only_what_is_made_of_it(
    tree: Path, planner: Planner, file: str, old: str, new: str, moves: str
) -> None:
    before = planner(tree)
    edit(tree, file, old, new)
    after = planner(tree)
    moved = [
        part for part in ("engine", "tools") if before.part_digest(part) != after.part_digest(part)
    ]
    assert moved == moves.split()


def test_options_patch_and_toolchain_move_the_digest_and_the_name_does_not(
    tree: Path, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = planner(tree)
    patch = load_patch("twice", make_patch(tmp_path / "patches"))
    patched = planner(tree, spec=BuildSpec("small", "cpu", "twice"), patch=patch)
    repack = planner(tree, spec=BuildSpec("small", "cpu", None, {"GGML_CPU_REPACK": "OFF"}))
    assert len({stock.digest, patched.digest, repack.digest}) == 3
    assert patched.tools_digest == stock.tools_digest
    assert planner(tree, name="other").digest == stock.digest
    monkeypatch.setattr(build_module, "_host_cpu", lambda: "another CPU")
    assert planner(tree).digest != stock.digest
    portable = BuildSpec("small", "cpu", None, {"GGML_NATIVE": "OFF"})
    assert "cpu" not in planner(tree, spec=portable).toolchain


def test_planning_again_reads_no_file(tree: Path, planner: Planner, tmp_path: Path) -> None:
    for path in tree.rglob("*"):
        os.utime(path, (1e9, 1e9))
    time.sleep(2.1)  # a file that changed just now is not cached
    cache = DigestCache(tmp_path / "digests.json")
    before = planner(tree, cache=cache)
    cache.save()
    for path in tree.rglob("*"):
        path.chmod(0)  # root reads on, so the cache's answers are counted instead
    calls = []
    again = DigestCache(tmp_path / "digests.json")
    again.get = lambda kind, path, compute: calls.append(kind) or "0" * 64  # type: ignore[method-assign,func-returns-value]
    planner(tree, cache=again)
    assert len(calls) > 10
    assert "meaning" in calls
    assert before.digest == planner(tree, cache=DigestCache(tmp_path / "digests.json")).digest


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "s", "backend": "cpuu"}, "backend is 'cpuu', wanted one of cpu"),
        ({"backend": "cpu"}, "names no source"),
        (
            {"source": "s", "backend": "cpu", "options": {"LLAMA_BUILD_COMMIT": "x"}},
            "cannot be set",
        ),
        ({"source": "s", "backend": "cpu", "options": {"-DX": "x"}}, "cannot be set"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutewiseError, match=re.escape(message)):
        BuildSpec.from_config("cpu-stock", entry)


def test_yaml_booleans_are_cmake_options() -> None:
    spec = BuildSpec.from_config(
        "b", {"source": "s", "backend": "cpu", "options": {"GGML_LTO": True}}
    )
    assert spec.options == {"GGML_LTO": "ON"}


def test_no_compiler_says_what_to_install(
    tree: Path, planner: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(
        RoutewiseError, match=r"no C compiler found \(looked for cc, gcc, clang"
    ) as error:
        planner(tree)
    assert "apt-get install g++" in str(error.value)
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(RoutewiseError, match=r"\$CC = no-such-cc"):
        find_compilers()


# --------------------------------------------------------------------------------- compiling


def test_an_engine_is_built_installed_and_loads(tree: Path, planner: Planner) -> None:
    plan = planner(tree)
    lines: list[str] = []
    document = run_build(plan, say=lines.append)
    names = ["libggml-base.so.0", "libggml-cpu.so.0", "libllama.so.0", "libroutewise_shim.so"]
    assert sorted(path.name for path in (plan.engine_dir / "lib").iterdir()) == names
    assert sorted(document["libraries"]) == names
    assert json.loads((plan.engine_dir / "build.json").read_text()) == document
    assert document["identity"] == document["digest"] == plan.digest
    assert document["n_compiled"] == 5
    assert re.search(r"\[\d+/\d+\] (compiling|linking) .* files/s", lines[-1])
    assert library_fingerprint(plan.engine_dir / "lib", plan.identity)[0] == document["fingerprint"]
    # In a process of its own: two builds in one would share the first one's libraries.
    program = (
        "import ctypes, sys; shim = ctypes.CDLL(sys.argv[1]);"
        "shim.rw_identity.restype = ctypes.c_char_p; shim.rw_norm.restype = ctypes.c_float;"
        "print(shim.rw_identity().decode(), shim.rw_norm((ctypes.c_float * 2)(3, 4), 2))"
    )
    shim = plan.engine_dir / "lib/libroutewise_shim.so"
    said = subprocess.run([sys.executable, "-c", program, shim], capture_output=True, text=True)
    assert said.stdout.split() == [plan.digest, "25.0"], said.stderr


def test_no_path_and_no_placeholder_is_left_in_a_library(tree: Path, planner: Planner) -> None:
    plan = planner(tree)
    run_build(plan)
    for path in (plan.engine_dir / "lib").iterdir():
        content = path.read_bytes()
        for stranger in (os.fspath(tree), os.fspath(plan.results_dir), IDENTITY_PLACEHOLDER):
            assert stranger.encode() not in content, path
        assert COMMIT_PLACEHOLDER.encode() not in content
    base = (plan.engine_dir / "lib/libggml-base.so.0").read_bytes()
    assert f"routewise-{plan.digest[:12]}".encode() in base


def test_two_folders_and_a_new_comment_line_give_one_fingerprint(
    tree: Path, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CCACHE_DISABLE", "1")  # else the second build is a copy of the first
    first = run_build(planner(tree))
    elsewhere = make_tree(tmp_path / "another/place/entirely")
    edit(elsewhere, DOT, "float sum", "// a comment\n    // of two lines\n    float sum")
    plan = planner(elsewhere, name="second", results="somewhere/else")
    second = run_build(plan)
    assert second["n_compiled"] == first["n_compiled"]
    assert second["digest"] == first["digest"]
    assert second["fingerprint"] == first["fingerprint"]
    assert second["raw_source_digest"] != first["raw_source_digest"]
    edit(elsewhere, DOT, "0.0f", "-0.0f")
    third = run_build(planner(elsewhere, name="second", results="somewhere/else"))
    assert third["fingerprint"] != first["fingerprint"]


def test_ccache_gives_the_bits_of_the_compiler(
    tree: Path, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("ccache") is None:
        pytest.skip("no ccache here")
    monkeypatch.setenv("CCACHE_DIR", os.fspath(tmp_path / "ccache"))
    cold = run_build(planner(tree, name="cold", results="one"))
    warm = run_build(planner(make_tree(tmp_path / "far/away"), name="warm", results="two/deep"))
    stats = subprocess.run(["ccache", "--print-stats"], capture_output=True, text=True).stdout
    hits = sum(
        int(n) for n in re.findall(r"^(?:direct|preprocessed)_cache_hit\t(\d+)", stats, re.M)
    )
    assert hits >= 4
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    plain = run_build(planner(tree, name="plain", results="three"))
    assert cold["fingerprint"] == warm["fingerprint"] == plain["fingerprint"]


def test_a_refactor_to_the_same_bits_keeps_the_fingerprint(tree: Path, planner: Planner) -> None:
    first = run_build(planner(tree))
    (tree / DOT).write_text((tree / DOT).read_text().replace("sum", "total"))
    second = run_build(planner(tree))
    assert second["digest"] != first["digest"]
    assert second["fingerprint"] == first["fingerprint"]


def test_a_one_file_edit_compiles_one_file(tree: Path, planner: Planner) -> None:
    run_build(planner(tree))
    assert run_build(planner(tree))["n_compiled"] == 0
    edit(tree, DOT, "a[i] * b[i]", "b[i] * a[i]")
    assert run_build(planner(tree))["n_compiled"] == 1
    os.utime(tree / DOT, (2e9, 2e9))  # only its date, and one in the future
    assert run_build(planner(tree))["n_compiled"] == 0


def test_files_that_come_and_go_are_seen(tree: Path, planner: Planner) -> None:
    run_build(planner(tree))
    (tree / "ggml/src/ggml-cpu/more.cpp").write_text("int more() { return 1; }\n")
    document = run_build(planner(tree))
    assert document["n_compiled"] == 1
    (tree / "ggml/src/ggml-cpu/more.cpp").unlink()
    document = run_build(planner(tree))
    assert document["n_compiled"] == 0
    assert document["n_linked"] >= 1


def test_a_patched_build_differs_from_stock_in_identity_digest_and_bits(
    tree: Path, planner: Planner, tmp_path: Path
) -> None:
    patch = load_patch("twice", make_patch(tmp_path / "patches"))
    plan = planner(tree, "cpu-exact", spec=BuildSpec("small", "cpu", "twice"), patch=patch)
    stock, exact = run_build(planner(tree)), run_build(plan)
    assert exact["patch"] == "twice"
    assert stock["patch"] is None
    for key in ("identity", "digest", "fingerprint"):
        assert stock[key] != exact[key]
    # libllama itself is the same library
    assert stock["libraries"]["libllama.so.0"] == exact["libraries"]["libllama.so.0"]
    assert not (tree / "ggml/src/ggml-cpu/twice.cpp").exists()
    with pytest.raises(RoutewiseError, match="tools are made from stock"):
        run_build(plan, "tools")


def test_tools_run_from_where_they_are_installed(tree: Path, planner: Planner) -> None:
    plan = planner(tree)
    run_build(plan)
    document = run_build(plan, "tools")
    assert document["digest"] == plan.tools_digest != plan.digest
    assert sorted(p.name for p in (plan.tools_dir / "bin").iterdir()) == [
        "llama-bench",
        "llama-quantize",
    ]
    assert "libroutewise_shim.so" not in document["libraries"]
    shutil.rmtree(plan.work_dir)
    said = subprocess.run([plan.tools_dir / "bin/llama-quantize"], capture_output=True, text=True)
    assert said.stdout == "25\n", said.stderr


def test_an_error_of_the_compiler_is_shown_with_the_log(tree: Path, planner: Planner) -> None:
    whole = planner(tree)
    run_build(whole)
    edit(tree, DOT, "return sum;", "return summ;")
    plan = planner(tree)
    with pytest.raises(RoutewiseError, match="does not compile") as error:
        run_build(plan)
    message = str(error.value)
    assert "dot.cpp" in message
    assert "summ" in message
    assert os.fspath(plan.results_dir / "logs/build/cpu-stock.engine.log") in message
    assert not plan.engine_dir.exists()
    assert (whole.engine_dir / "build.json").is_file()
    edit(tree, DOT, "return summ;", "return sum;")
    assert run_build(planner(tree))["n_compiled"] == 1


def test_a_source_that_is_edited_while_it_is_built_is_not_installed(
    tree: Path, planner: Planner
) -> None:
    plan = planner(tree)
    edit(tree, DOT, "0.0f", "-0.0f")
    with pytest.raises(RoutewiseError, match="ggml-cpu of source small was edited"):
        run_build(plan)
    assert not plan.engine_dir.exists()


def test_an_error_of_cmake_is_shown(tree: Path, planner: Planner) -> None:
    edit(tree, "src/CMakeLists.txt", "add_library(llama", "no_such_command(llama")
    with pytest.raises(RoutewiseError, match="CMake could not configure") as error:
        run_build(planner(tree))
    assert "no_such_command" in str(error.value)


def test_a_full_disk_is_named(
    tree: Path, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner(tree)
    run_build(plan)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    shutil.rmtree(plan.engine_dir)
    monkeypatch.setattr(build_module, "write_text", full)
    with pytest.raises(RoutewiseError, match="disk full"):
        run_build(plan)
    assert not plan.engine_dir.exists()
    assert list(plan.engine_dir.parent.iterdir()) == []


def test_a_shim_without_identity_is_refused(tree: Path, planner: Planner, tmp_path: Path) -> None:
    shim = tmp_path / "shim/routewise_shim.cpp"
    shim.write_text(shim.read_text().replace("return ROUTEWISE_IDENTITY", 'return ""'))
    with pytest.raises(RoutewiseError, match="identity exactly once"):
        run_build(planner(tree))


def test_a_folder_that_was_made_in_advance_is_filled(tree: Path, planner: Planner) -> None:
    plan = planner(tree)
    (plan.engine_dir / "lib").mkdir(parents=True)
    (plan.engine_dir / "lib/stale.so").write_text("")
    run_build(plan)
    assert not (plan.engine_dir / "lib/stale.so").exists()
    assert (plan.engine_dir / "build.json").is_file()


def test_two_jobs_of_one_build_take_turns(tree: Path, planner: Planner, tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [*job_command(tree, tmp_path), "b", part], stderr=subprocess.PIPE, text=True
        )
        for part in ("engine", "tools")
    ]
    said = [job.communicate()[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    plan = planner(tree, "b")
    assert (plan.engine_dir / "build.json").is_file()
    assert (plan.tools_dir / "build.json").is_file()
    assert any("waiting for another job" in text for text in said)


def test_killing_the_job_ends_its_compilers_and_the_next_run_goes_on(
    tree: Path, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin/c++"
    slow.parent.mkdir()
    marker = f"600.{os.getpid()}"
    _, cxx = find_compilers()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *dot.cpp*) sleep {marker};; esac\nexec {cxx} "$@"\n')
    slow.chmod(0o755)
    job = subprocess.Popen(
        [*job_command(tree, tmp_path), "cpu-stock", "engine"],
        env={**os.environ, "CXX": os.fspath(slow), "CCACHE_DISABLE": "1"},
        stderr=subprocess.DEVNULL,
    )
    _wait_for(lambda: marker in _processes())
    job.kill()
    job.wait()
    _wait_for(lambda: marker not in _processes())
    plan = planner(tree)
    assert not plan.engine_dir.exists()
    assert run_build(plan)["digest"] == plan.digest


def _processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def _wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--digest", "0" * 12], "planned as 000000000000, its source is now"),
        (
            ["--digest", "0" * 12, "--toolchain", '{"c": "another 9.9"}'],
            "this host has another compiler or CPU than the one that planned it (c: planned with "
            "another 9.9, here ",
        ),
        (["--build", '{"source": "small", "backend": "cpu", "patch": "no"}'], "unknown patch 'no'"),
        (["--build", '{"source": "small", "backend": "abacus"}'], "backend is 'abacus'"),
    ],
)
def test_the_script_explains_errors(
    tree: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    script = Path(build_module.__file__).parents[1] / "build_backend.py"
    command = [sys.executable, os.fspath(script), "--name", "mine"]
    command += ["--source", json.dumps({"kind": "path", "path": os.fspath(tree)})]
    command += ["--build", '{"source": "small", "backend": "cpu"}']
    command += ["--results-dir", os.fspath(tmp_path / "results"), *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("routewise: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
