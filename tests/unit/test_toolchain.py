"""Compilers: one that hides a C++ runtime is noticed, and nvcc is tried before anything long."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from routewise import toolchain
from routewise.build import ARCHITECTURES, BuildSpec, link_toolkit, toolchain_identity
from routewise.errors import RoutewiseError
from routewise.toolchain import (
    check_nvcc,
    find_compilers,
    hidden_runtime,
    native_architectures,
    private_runtime,
    read_elf,
    toolkit_libraries,
)

GXX = Path(shutil.which("g++") or "/usr/bin/g++")
#: What a fake nvcc does: it answers as the real one does, and takes what the test says.
NVCC = """#!/bin/sh
case "$*" in
*--version*) echo "Build cuda_99.1.r99.1/compiler.1";;
*--dryrun*) echo '#$ LIBRARIES=  "-L{lib}/stubs" "-L{lib}"' >&2;;
*sm_13*) echo "nvcc fatal   : Unsupported gpu architecture 'sm_13'" >&2; exit 1;;
*odd-g++*) echo "error: -- unsupported GNU version!" >&2; exit 1;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def hiding(path: Path) -> Path:
    """Make a compiler that links the C++ runtime into every library."""
    return program(path, f'#!/bin/sh\nexec {GXX} -static-libstdc++ "$@"\n')


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of programs that stands first on the PATH."""
    for variable in ("CC", "CXX", "CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def nvidia_smi(box: Path, answer: str) -> None:
    program(box / "nvidia-smi", f"#!/bin/sh\necho '{answer}'\n")


def nvcc(box: Path) -> Path:
    return program(box / "nvcc", NVCC.replace("{lib}", str(box.parent / "toolkit")))


def test_a_compiler_that_hides_a_runtime_is_told_from_one_that_does_not(box: Path) -> None:
    assert private_runtime(GXX) == ""
    assert private_runtime(hiding(box / "hider")) == "it defines _ZSt4cout itself"
    unseen = '-static-libstdc++ -Wl,--exclude-libs,ALL "$@"'
    silent = program(box / "silent", f"#!/bin/sh\nexec {GXX} {unseen}\n")
    assert private_runtime(silent).endswith("and neither libstdc++ nor libc++")
    assert private_runtime(program(box / "broken", "#!/bin/sh\nexit 1\n")) == ""


def test_symbols_of_its_own_are_a_runtime_too(tmp_path: Path) -> None:
    """Beside a needed libstdc++: the first definition that a program meets wins."""
    source = tmp_path / "own.cpp"
    source.write_text('extern "C" { int _ZSt4cout = 1; }\n')
    own = tmp_path / "own.so"
    command = [str(GXX), "-shared", "-fPIC", str(source), "-Wl,--no-as-needed", "-o", str(own)]
    subprocess.run(command, check=True)
    assert any("libstdc++" in name for name in read_elf(own)[0])
    assert hidden_runtime(own) == "it defines _ZSt4cout itself"


def test_the_distributions_compilers_are_taken_in_its_place(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiding(box / "c++")
    found = find_compilers()
    assert found[1].parent == toolchain.SYSTEM_FOLDER
    assert found[0].parent == toolchain.SYSTEM_FOLDER
    # it is what the toolchain is known by, and no word of it is a path
    with_hider = toolchain_identity({})
    (box / "c++").unlink()
    monkeypatch.setenv("CC", str(found[0]))
    monkeypatch.setenv("CXX", str(found[1]))
    assert toolchain_identity({}) == with_hider


def test_one_that_was_asked_for_or_has_no_other_is_refused(
    box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hider = hiding(box / "c++")
    with monkeypatch.context() as patched:
        patched.setattr(toolchain, "SYSTEM_FOLDER", tmp_path)
        with pytest.raises(RoutewiseError, match="hides a private C\\+\\+ runtime") as error:
            find_compilers()
        assert "set CC and CXX" in str(error.value)
    monkeypatch.setenv("CXX", str(hider))
    with pytest.raises(RoutewiseError, match=re.escape(f"{hider}: this C++ compiler hides")):
        find_compilers()


def test_nvcc_is_tried_with_the_compiler_and_the_architectures(box: Path) -> None:
    found = nvcc(box)
    assert check_nvcc("b", "90a-real;80-virtual;86", GXX) == found
    with pytest.raises(RoutewiseError, match=r"r99.1.*does not compile.*for 13-real") as error:
        check_nvcc("b", "13-real", GXX)
    assert "Unsupported gpu architecture" in str(error.value)
    with pytest.raises(RoutewiseError, match="unsupported GNU version"):
        check_nvcc("b", "90a-real", Path("/opt/odd-g++"))


def test_native_needs_a_gpu_to_ask_and_names_its_kind(box: Path) -> None:
    nvcc(box)
    program(box / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    options = {ARCHITECTURES: "native", "GGML_NATIVE": "OFF"}
    assert toolchain_identity(options, None, "cuda")["cuda_native"] == "no GPU on this machine"
    with pytest.raises(RoutewiseError, match="shows no GPU to compile for"):
        check_nvcc("b", "native", GXX)
    nvidia_smi(box, "9.0\n8.6\n9.0")
    assert native_architectures() == "8.6 9.0"
    assert toolchain_identity(options, None, "cuda")["cuda_native"] == "8.6 9.0"
    assert check_nvcc("b", "native", GXX) == box / "nvcc"
    named = {**options, ARCHITECTURES: "90a-real"}
    assert "cuda_native" not in toolchain_identity(named, None, "cuda")


def test_no_nvcc_is_named(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    with pytest.raises(RoutewiseError, match=r"no CUDA compiler found .*no-such-nvcc"):
        check_nvcc("b", "90a-real", GXX)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"backend": "cpu", "architectures": ["86"]}, "wanted with the backend cuda"),
        ({"architectures": ["sm_90"]}, "wanted such as 90a-real"),
        ({"architectures": ["86", "86"]}, "each once"),
        ({"architectures": ["native", "86"]}, "native alone"),
        ({"architectures": ["86"], "options": {ARCHITECTURES: "86"}}, "remove one of them"),
    ],
)
def test_wrong_architectures_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutewiseError, match=message):
        BuildSpec.from_config("b", {"source": "s", "backend": "cuda", **entry})


def test_architectures_are_an_option_of_the_build() -> None:
    entry = {"source": "s", "backend": "cuda", "architectures": ["90a-real", "86"]}
    assert BuildSpec.from_config("b", entry).options == {ARCHITECTURES: "90a-real;86"}


def test_the_toolkits_libraries_are_linked_beside_the_backend(box: Path, tmp_path: Path) -> None:
    """What they need in their turn too; the stub of the driver never."""
    nvcc(box)
    toolkit, lib = tmp_path / "toolkit", tmp_path / "lib"
    (toolkit / "stubs").mkdir(parents=True)
    lib.mkdir()

    def link(path: Path, *needed: Path) -> Path:
        command = [GXX, "-shared", "-Wl,--no-as-needed", f"-Wl,-soname,{path.name}", *needed]
        subprocess.run([*map(str, command), "-o", str(path)], check=True)
        return path

    inner = link(toolkit / "libcublasLt.so.9")
    outer = link(toolkit / "libcublas.so.9", inner)
    stub = link(toolkit / "stubs" / "libcuda.so.1")
    backend = link(lib / "libggml-cuda.so.0", outer, stub)
    found = toolkit_libraries(box / "nvcc", backend)
    assert found == {"libcublas.so.9": outer, "libcublasLt.so.9": inner}
    link_toolkit(tmp_path, lib)
    assert sorted(path.name for path in (lib / "toolkit").iterdir()) == sorted(found)
    backend.unlink()
    with pytest.raises(RoutewiseError, match=r"no libggml-cuda\.so"):
        link_toolkit(tmp_path, lib)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA toolkit here")
def test_the_real_nvcc_takes_the_compiler_found_and_refuses_an_unknown_architecture() -> None:
    cxx = find_compilers()[1]
    assert check_nvcc("b", "90a-real", cxx).name == "nvcc"
    with pytest.raises(RoutewiseError, match="does not compile"):
        check_nvcc("b", "13-real", cxx)
