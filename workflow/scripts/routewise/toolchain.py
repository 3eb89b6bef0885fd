"""The compilers of a build: found, and checked before anything long is compiled with them.

Some boxes put a wrapper first on the PATH whose compiler links the C++ runtime into every library.
Each library then has its own streams and locales, and a program of several crashes in a call that
crosses them. So a small library is linked and looked into: such a compiler is passed over for the
distribution's, and refused where it was asked for by name.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from routewise.digest import DigestCache
from routewise.errors import RoutewiseError

_C_NAMES, _CXX_NAMES = ("cc", "gcc", "clang"), ("c++", "g++", "clang++")
#: Where a distribution has its own, whatever stands first on the PATH.
SYSTEM_FOLDER = Path("/usr/bin")
#: Where a CUDA toolkit is by default; its nvcc is often on no PATH.
CUDA_FOLDER = Path("/usr/local/cuda")

_RUNTIMES = re.compile(r"lib(std)?c\+\+\.so")
_PROBE = "#include <iostream>\nvoid routewise_probe(int x) { std::cout << x << std::endl; }\n"
#: ``std::cout``, of GNU's library and of LLVM's.
_STREAMS = ("_ZSt4cout", "_ZNSt3__14coutE")
_HIDDEN = "hidden: "
_INSTALL_HINT = (
    "install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; "
    "conda: gxx), or set {} to it"
)


def find_compilers(cache: DigestCache | None = None) -> tuple[Path, Path]:
    """Return the C and C++ compilers: $CC and $CXX, else the first usual names on the PATH.

    A C++ compiler that hides a private runtime in what it links is passed over, with the C
    compiler beside it, for the distribution's. Raises RoutewiseError where none is left, or where
    $CXX itself is one.
    """
    c, cxx = _first("CC", "C", _C_NAMES), _first("CXX", "C++", _CXX_NAMES)
    if not (hidden := private_runtime(cxx, cache)):
        return c, cxx
    if not os.environ.get("CXX"):
        for other, other_cxx in zip(_C_NAMES, _CXX_NAMES, strict=True):
            pair = SYSTEM_FOLDER / other, SYSTEM_FOLDER / other_cxx
            if all(os.access(one, os.X_OK) for one in pair) and not private_runtime(pair[1], cache):
                return (c if os.environ.get("CC") else pair[0]), pair[1]
    raise RoutewiseError(
        f"{cxx}: this C++ compiler hides a private C++ runtime in every library ({hidden}): "
        "programs of several libraries crash",
        "set CC and CXX to compilers that link libstdc++.so, such as the distribution's "
        "/usr/bin/gcc and /usr/bin/g++",
    )


def _first(variable: str, language: str, names: Sequence[str]) -> Path:
    asked = os.environ.get(variable)
    path = next((hit for hit in map(shutil.which, (asked,) if asked else names) if hit), None)
    if path is None:
        wanted = f"${variable} = {asked}" if asked else ", ".join(names)
        raise RoutewiseError(
            f"no {language} compiler found (looked for {wanted} on the PATH)",
            _INSTALL_HINT.format(variable),
        )
    return Path(path)


def private_runtime(cxx: Path, cache: DigestCache | None = None) -> str:
    """Say how a C++ compiler hides a runtime in what it links; '' where it does not.

    A compiler that cannot link a small library is another matter: CMake says what is wrong with it.
    """

    def ask() -> str:
        return _private_runtime(os.fspath(cxx), *_stamp(cxx))

    found = ask() if cache is None else cache.get(f"runtime:{cxx}", cxx.resolve(), ask)
    return found.removeprefix(_HIDDEN) if found.startswith(_HIDDEN) else ""


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


@functools.cache
def _private_runtime(cxx: str, *_: int) -> str:
    with tempfile.TemporaryDirectory(prefix="routewise-probe-") as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "libprobe.so"
        source.write_text(_PROBE)
        try:
            run_compiler([cxx, "-shared", "-fPIC", str(source), "-o", str(library)])
            hidden = hidden_runtime(library)
        except RoutewiseError:
            return "unknown"
        return _HIDDEN + hidden if hidden else "shared"


def hidden_runtime(library: Path) -> str:
    """Say how a library that writes to std::cout hides a C++ runtime; '' where it shares one."""
    needed, defined = read_elf(library)
    if own := [name for name in _STREAMS if name in defined]:
        return f"it defines {own[0]} itself"
    if not any(map(_RUNTIMES.match, needed)):
        return f"it needs {', '.join(needed) or 'no library'} and neither libstdc++ nor libc++"
    return ""


def read_elf(path: Path) -> tuple[list[str], set[str]]:
    """Return the libraries that an ELF file needs, and the dynamic symbols that it defines.

    Raises RoutewiseError where the file is absent or no ELF file.
    """
    # here, and not above: who only plans a build from its cache has no use for it
    from elftools.common.exceptions import ELFError
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    try:
        with open(path, "rb") as stream:
            elf = ELFFile(stream)
            dynamic, table = map(elf.get_section_by_name, (".dynamic", ".dynsym"))
            needed, defined = [], set()
            if isinstance(dynamic, DynamicSection):
                needed = [str(getattr(tag, "needed")) for tag in dynamic.iter_tags("DT_NEEDED")]  # noqa: B009
            if isinstance(table, SymbolTableSection):
                defined = {
                    symbol.name
                    for symbol in table.iter_symbols()
                    if symbol["st_shndx"] != "SHN_UNDEF"
                }
            return needed, defined
    except FileNotFoundError as error:
        raise RoutewiseError(f"{path}: was not built", "look into the build's log") from error
    except ELFError as error:
        raise RoutewiseError(f"{path}: not an ELF file ({error})") from error


def run_compiler(command: Sequence[str]) -> str:
    """Run a compiler and return what it prints; RoutewiseError where it cannot run or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except OSError as error:
        raise RoutewiseError(
            f"cannot run {command[0]}: {error.strerror}", "reinstall it"
        ) from error
    if done.returncode:
        raise RoutewiseError(
            f"{shlex.join(command)} failed:\n    {done.stderr.strip()[-500:]}", "reinstall it"
        )
    return done.stdout


# --------------------------------------------------------------------------------------------- CUDA


def find_nvcc() -> Path | None:
    """Return the CUDA compiler: $CUDACXX, else of the PATH, else of the toolkit's usual folder."""
    usual = Path(os.environ.get("CUDA_HOME") or CUDA_FOLDER) / "bin" / "nvcc"
    asked = os.environ.get("CUDACXX")
    found = shutil.which(asked) if asked else shutil.which("nvcc") or shutil.which(usual)
    return None if found is None else Path(found)


def nvcc_version(nvcc: Path) -> str:
    """Return what identifies a CUDA compiler: the last line of its version."""
    return run_compiler([os.fspath(nvcc), "--version"]).strip().splitlines()[-1]


def native_architectures() -> str:
    """Return the compute capabilities of this machine's GPUs, for which ``native`` compiles."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return " ".join(sorted({line.strip() for line in done.stdout.splitlines() if line.strip()}))


def check_nvcc(name: str, architectures: str, cxx: Path) -> Path:
    """Return the CUDA compiler of a build after trying it with its C++ compiler.

    Raises RoutewiseError where there is none, where ``native`` means nothing on this machine, or
    where the CUDA compiler does not take the C++ compiler or an architecture.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        wanted = os.environ.get("CUDACXX") or f"nvcc on the PATH or in {CUDA_FOLDER}/bin"
        raise RoutewiseError(
            f"build {name}: no CUDA compiler found (looked for {wanted})",
            "install the CUDA toolkit, or set CUDACXX to its nvcc",
        )
    if architectures == "native" and not native_architectures():
        raise RoutewiseError(
            f"build {name}: architectures are native, and this machine shows no GPU to compile for",
            'name them in the study: architectures: ["90a-real"]',
        )
    targets = [] if architectures == "native" else _targets(architectures)
    with tempfile.TemporaryDirectory(prefix="routewise-probe-") as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <cstdio>\n__global__ void routewise_probe() {}\n")
        command = [os.fspath(nvcc), "-ccbin", os.fspath(cxx), *targets, "-c", str(source)]
        try:
            run_compiler([*command, "-o", str(Path(folder) / "probe.o")])
        except RoutewiseError as error:
            raise RoutewiseError(
                f"build {name}: {nvcc} ({nvcc_version(nvcc)}) does not compile with {cxx} for "
                f"{architectures}:\n    {str(error).splitlines()[1].strip()}",
                "set CC and CXX to a compiler that this toolkit takes, or name architectures that "
                "it knows (nvcc --list-gpu-arch)",
            ) from error
    return nvcc


def _targets(architectures: str) -> list[str]:
    """Return the arguments of nvcc for CMake's list of architectures (90a-real;80-virtual;86)."""
    found = []
    for one in architectures.split(";"):
        number, _, kind = one.partition("-")
        codes = {"real": ["sm"], "virtual": ["compute"]}.get(kind, ["compute", "sm"])
        found += [f"-gencode=arch=compute_{number},code={code}_{number}" for code in codes]
    return found


def toolkit_libraries(nvcc: Path, library: Path) -> dict[str, Path]:
    """Return what a library needs of nvcc's toolkit, directly or not, by SONAME.

    What the toolkit has not is the system's (the driver), or lies beside the library.
    """
    found: dict[str, Path] = {}
    folders, queue = _toolkit_folders(nvcc), [library]
    while queue:
        for name in read_elf(queue.pop())[0]:
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if path is not None and name not in found:
                found[name] = path.resolve()
                queue.append(path)
    return dict(sorted(found.items()))


def _toolkit_folders(nvcc: Path) -> list[Path]:
    """Return where nvcc links from; the folder of stubs, which nothing may load, left out."""
    done = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((one for one in done.stderr.splitlines() if "LIBRARIES=" in one), "")
    folders = [Path(one) for one in re.findall(r'"?-L([^"\s]+)"?', line)]
    return [folder for folder in folders if folder.name != "stubs"]
