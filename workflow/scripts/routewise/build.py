"""Builds: a source, perhaps a patch, CMake options and a toolchain, compiled for one backend.

Planning names a build by digest and compiles nothing. The *engine* (ggml, the backend, libllama
and the shim) has one digest and lands in ``results/builds/<digest12>/lib``. The *server*
(llama-server and the engine's libraries again) has another, so that an edit of the server moves no
replay; and so have the *tools* (llama-quantize, llama-bench), which are made from unpatched
sources only. Work folders are kept: ninja compiles what changed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from routewise.digest import DigestCache, canonical_json, digest_of, sha256_bytes, write_text
from routewise.errors import RoutewiseError
from routewise.fingerprint import (
    COMMIT_PLACEHOLDER,
    IDENTITY_PLACEHOLDER,
    library_fingerprint,
    stamped,
    unstamped,
)
from routewise.lock import take_lock
from routewise.normalise import normalised_digest
from routewise.patch import Patch, patched_files
from routewise.source import (
    component_digests,
    component_of,
    file_digests,
    folded,
    raw_digest,
    remove_stale,
    source_files,
)
from routewise.toolchain import (
    check_nvcc,
    find_compilers,
    find_nvcc,
    native_architectures,
    nvcc_version,
    read_elf,
    run_compiler,
    toolkit_libraries,
)

Say = Callable[[str], None]

#: Part of every digest: raised when this module builds differently from the same inputs.
BUILD_FORMAT = 1

SHIM_DIR = Path(__file__).resolve().parents[2] / "shim"
SHIM_FILES = ("CMakeLists.txt", "routewise_shim.cpp")


@dataclass(frozen=True)
class Backend:
    """What one ggml backend adds to the CPU's: CMake options and component folders."""

    options: Mapping[str, str]
    components: tuple[str, ...]


BACKENDS: dict[str, Backend] = {
    "cpu": Backend({}, ()),
    "cuda": Backend({"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "native"}, ("ggml-cuda",)),
}

#: The parts of a build: ninja targets, and what is copied out of the work folder.
PARTS: dict[str, tuple[str, ...]] = {
    "engine": ("llama", "routewise_shim"),
    "server": ("llama-server",),
    "tools": ("llama-quantize", "llama-bench"),
}
ENGINE_COMPONENTS = ("build", "ggml-base", "ggml-cpu", "llama")
TOOL_COMPONENTS = ("common", "vendor", "tools")
SERVER_COMPONENTS = ("common", "vendor", "tools", "server")  # of tools, the multimodal library

#: Set for every build, and not for a study to change.
FIXED_OPTIONS: dict[str, str] = {
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_CCACHE": "OFF",  # ours is the launcher
    "GIT_EXE": "OFF",  # or ggml compiles in the commit of the repository around it
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_COMMIT": COMMIT_PLACEHOLDER,
    "LLAMA_BUILD_COMMON": "ON",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_NUMBER": "0",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "ROUTEWISE_IDENTITY": IDENTITY_PLACEHOLDER,
}
#: Warnings of upstream fill the log and hide the error that stopped a build.
DEFAULT_OPTIONS: dict[str, str] = {"GGML_NATIVE": "ON", "LLAMA_ALL_WARNINGS": "OFF"}

#: CMake's name of what a study calls ``architectures``.
ARCHITECTURES = "CMAKE_CUDA_ARCHITECTURES"
_ARCHITECTURE = re.compile(r"native|[1-9][0-9]{1,2}[af]?(-real|-virtual)?")
_OPTION_NAME = re.compile(r"(GGML|LLAMA|CMAKE)_[A-Z0-9_]+")


@dataclass(frozen=True)
class BuildSpec:
    """One entry of a study's ``builds``."""

    source: str
    backend: str
    patch: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None  # the kind of host that compiles it; None is this machine

    @classmethod
    def from_config(cls, name: str, entry: Mapping[str, Any]) -> BuildSpec:
        """Make a spec of a study's entry. Raises RoutewiseError for a wrong backend or option."""
        backend = str(entry.get("backend"))
        if backend not in BACKENDS:
            raise RoutewiseError(
                f"build {name}: backend is {backend!r}, wanted one of {', '.join(BACKENDS)}"
            )
        if not entry.get("source"):
            raise RoutewiseError(f"build {name}: names no source")
        options = {}
        for key, value in (entry.get("options") or {}).items():
            if not _OPTION_NAME.fullmatch(str(key)) or key in FIXED_OPTIONS:
                raise RoutewiseError(
                    f"build {name}: option {key!r} cannot be set in a study",
                    "options are CMake options of llama.cpp, such as GGML_CPU_REPACK: OFF; "
                    f"fixed are {', '.join(sorted(FIXED_OPTIONS))}",
                )
            options[str(key)] = (
                ("ON" if value else "OFF") if isinstance(value, bool) else str(value)
            )
        if "architectures" in entry:
            options[ARCHITECTURES] = _architectures(name, backend, entry["architectures"], options)
        return cls(str(entry["source"]), backend, entry.get("patch"), options, entry.get("host"))


def _architectures(
    name: str, backend: str, asked: Iterable[object], options: Mapping[str, str]
) -> str:
    """Return a study's list of architectures as CMake has it, or raise RoutewiseError."""
    if backend != "cuda" or ARCHITECTURES in options:
        raise RoutewiseError(
            f"build {name}: architectures, wanted with the backend cuda (it is {backend}), and "
            f"without an option {ARCHITECTURES}",
            "remove one of them",
        )
    found = [str(one) for one in asked]
    wrong = [one for one in found if not _ARCHITECTURE.fullmatch(one)]
    if wrong or len(set(found)) < len(found) or ("native" in found and len(found) > 1):
        raise RoutewiseError(
            f"build {name}: architectures are {found}, wanted such as 90a-real, 86 or 80-virtual, "
            "each once, or native alone",
            "the compute capability of the GPU without its point: "
            "nvidia-smi --query-gpu=compute_cap --format=csv",
        )
    return ";".join(found)


@dataclass(frozen=True)
class BuildPlan:
    """A build as planned: everything that decides its bits, and where it will be."""

    name: str
    backend: str
    source: str
    patch: str | None
    root: Path = field(repr=False)  # the source's tree, unpatched
    changed: Mapping[str, bytes] = field(repr=False)  # what the patch makes of it
    options: Mapping[str, str]
    toolchain: Mapping[str, str]  # what of it decides bits, or the kind of host; no path
    components: Mapping[str, str]  # component -> normalised digest, patched
    digest: str  # of the engine, 64 hex digits; its identity too
    tools_digest: str  # of the unpatched tools
    server_digest: str  # of llama-server with the engine's libraries
    results_dir: Path = field(repr=False)
    shim_dir: Path = field(repr=False)
    host: str | None = None
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # patched, normalised

    def manifest(self, part: str) -> dict[str, Any]:
        """Return what the digest of the engine or the server is made of (routewise.inputs)."""
        own = part_components(self.backend, part)
        files = {file: found for file, found in self.files.items() if component_of(file) in own}
        if part == "engine":
            own |= {"shim"}
        parts = {
            "backend": self.backend,
            "patch": self.patch,
            **{f"component {name}": self.components[name] for name in own & set(self.components)},
            **{f"option {name}": value for name, value in self.options.items()},
            **{f"toolchain {name}": value for name, value in self.toolchain.items()},
        }
        return {"kind": "build", "name": self.name, "parts": parts, "files": files}

    @property
    def identity(self) -> str:
        """What is compiled into the shim: the digest of the engine."""
        return self.digest

    @property
    def work_dir(self) -> Path:
        """The kept folder that the build is compiled in."""
        return self.results_dir / "work" / self.name

    def part_digest(self, part: str) -> str:
        """Return the digest of a part (64 hex digits)."""
        digests = {
            "engine": self.digest,
            "server": self.server_digest,
            "tools": self.tools_digest,
        }
        return digests[part]

    def part_dir(self, part: str) -> Path:
        """Return where a part will be: ``results/builds/<digest12>``."""
        return self.results_dir / "builds" / self.part_digest(part)[:12]

    @property
    def engine_dir(self) -> Path:
        """Holds ``lib/`` and ``build.json``."""
        return self.part_dir("engine")

    @property
    def tools_dir(self) -> Path:
        """Holds ``bin/``, the ``lib/`` that these programs need, and ``build.json``."""
        return self.part_dir("tools")

    @property
    def server_dir(self) -> Path:
        """Holds ``bin/llama-server``, the ``lib/`` that it needs, and ``build.json``."""
        return self.part_dir("server")


# --------------------------------------------------------------------------------------- planning


def plan_build(
    name: str,
    spec: BuildSpec,
    root: Path,
    results_dir: Path,
    *,
    patch: Patch | None = None,
    cache: DigestCache | None = None,
    shim_dir: Path = SHIM_DIR,
) -> BuildPlan:
    """Name a build by the digests of what decides its bits; compile nothing.

    ``root`` is the source's llama.cpp tree. Raises RoutewiseError where the patch does not apply
    or no compiler is found.
    """
    backend = BACKENDS[spec.backend]
    options = {**DEFAULT_OPTIONS, **backend.options, **spec.options}
    if spec.host is None:
        toolchain = toolchain_identity(options, cache, spec.backend)
    else:  # compiled elsewhere: known by the host's kind, and recorded there
        toolchain = {"host": spec.host}
    changed = patched_files(patch, root, spec.source) if patch else {}
    wanted = set().union(*(part_components(spec.backend, part) for part in PARTS))
    files = stock_files = file_digests(root, cache, None, wanted.__contains__)
    if changed:
        files = file_digests(root, cache, changed, wanted.__contains__)
    stock, patched = folded(stock_files), folded(files)
    common: dict[str, Any] = {
        "format": BUILD_FORMAT,
        "backend": spec.backend,
        "options": options,
        "fixed_options": FIXED_OPTIONS,
        "toolchain": toolchain,
    }
    shim = {file: normalised_digest(shim_dir / file, cache) for file in SHIM_FILES}
    super_project = shim["CMakeLists.txt"]
    return BuildPlan(
        name=name,
        backend=spec.backend,
        source=spec.source,
        patch=spec.patch,
        root=root,
        changed=changed,
        options=options,
        toolchain=toolchain,
        components={**patched, "shim": digest_of(shim)},
        digest=digest_of(
            {
                **common,
                "components": _picked(patched, part_components(spec.backend, "engine")),
                "shim": shim,
                "part": "engine",
            }
        ),
        tools_digest=digest_of(
            {
                **common,
                "components": _picked(stock, part_components(spec.backend, "tools")),
                "super_project": super_project,
                "part": "tools",
            }
        ),
        server_digest=digest_of(
            {
                **common,
                "components": _picked(patched, part_components(spec.backend, "server")),
                "super_project": super_project,
                "part": "server",
            }
        ),
        results_dir=Path(results_dir),
        shim_dir=shim_dir,
        host=spec.host,
        files=files,
    )


def part_components(backend: str, part: str) -> set[str]:
    """Return the components of a source that one part of a build is compiled from."""
    more = {"engine": (), "server": SERVER_COMPONENTS, "tools": TOOL_COMPONENTS}[part]
    return {*ENGINE_COMPONENTS, *BACKENDS[backend].components, *more}


def _picked(digests: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: digests[name] for name in sorted(names) if name in digests}


# -------------------------------------------------------------------------------------- toolchain


def toolchain_identity(
    options: Mapping[str, str], cache: DigestCache | None = None, backend: str = "cpu"
) -> dict[str, str]:
    """Return what of the toolchain decides bits: versions and, for a native build, the host's CPU.

    Independent of where the compilers lie. Raises RoutewiseError where one of C or C++ is missing.
    A device compiler that is missing is named as such: a plan may be made where no device is.
    """
    native = options.get("GGML_NATIVE", "").upper() in ("ON", "1", "TRUE", "YES")
    cpu = _host_cpu() if native else ""
    identity = {}
    for language, compiler in zip(("c", "cxx"), find_compilers(cache), strict=True):
        identity[language] = _cached_answer(
            cache,
            compiler,
            f"{language}:{cpu}",
            functools.partial(_compiler_answer, compiler, native),
        )
    if native:
        identity["cpu"] = cpu
    if backend == "cuda":
        nvcc = find_nvcc()
        identity["cuda"] = (
            "not on this machine"
            if nvcc is None
            else _cached_answer(cache, nvcc, "nvcc", lambda: nvcc_version(nvcc))
        )
        if options.get(ARCHITECTURES) == "native":
            identity["cuda_native"] = native_architectures() or "no GPU on this machine"
    return identity


def _cached_answer(
    cache: DigestCache | None, compiler: Path, question: str, ask: Callable[[], str]
) -> str:
    real = compiler.resolve()
    return ask() if cache is None else cache.get(f"toolchain:{question}", real, ask)


def _compiler_answer(compiler: Path, native: bool) -> str:
    """Return version and a digest of all macros that the compiler predefines on this host.

    For a native build these name every instruction set that the compiler will use.
    """
    version = run_compiler([os.fspath(compiler), "--version"]).splitlines()[0]
    version = version.split(" ", 1)[-1]  # the first word is how it was called
    macros = [os.fspath(compiler), *(["-march=native"] if native else []), "-O3", "-dM", "-E"]
    try:
        text = run_compiler([*macros, "-x", "c", os.devnull])
    except RoutewiseError:
        if not native:  # else: a compiler without -march=native; the CPU's name is in the digest
            raise
        text = ""
    return f"{version} {sha256_bytes(text.encode())[:16]}"


def _host_cpu() -> str:
    """Return the CPU's name and a digest of its feature flags."""
    name, flags = "", ""
    try:
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "CPU implementer", "CPU part"):
                name += value
            elif key.strip() in ("flags", "Features"):
                flags = " ".join(sorted(value.split()))
    except OSError:
        name = " ".join(os.uname()[4:])
    return f"{name.strip()} {sha256_bytes(flags.encode())[:16]}"


def _program(name: str) -> str:
    """Return a program of this Python environment (CMake, ninja), else of the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = os.fspath(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise RoutewiseError(f"no {name} found", f"run make setup, or pip install {name}")
    return found


# ---------------------------------------------------------------------------------------- building


@dataclass(frozen=True)
class Compiled:
    """What ninja did: files compiled, files linked, seconds; and where the results are."""

    n_compiled: int
    n_linked: int
    seconds: float
    bin_dir: Path


def run_build(
    plan: BuildPlan,
    part: str = "engine",
    *,
    log: Path | None = None,
    jobs: int | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Compile one part of a build and install it; return what its ``build.json`` says.

    ``jobs`` is the number of compilers at once (all cores of this process by default). Raises
    RoutewiseError where the part cannot be built; then nothing new is installed.
    """
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}")
    if part == "tools" and plan.changed:
        raise RoutewiseError(
            f"build {plan.name}: tools are made from stock, and this build has the patch "
            f"{plan.patch}",
            "name a build without a patch where a tool is wanted (a model's key build)",
        )
    log = log or plan.results_dir / "logs" / "build" / f"{plan.name}.{part}.log"
    with _disk_full_explained(plan):
        compiled = compile_targets(plan, PARTS[part], log=log, jobs=jobs, say=say)
        _check_unedited(plan)
        return _install(plan, part, compiled)


def compile_targets(
    plan: BuildPlan,
    targets: Iterable[str],
    *,
    log: Path,
    jobs: int | None = None,
    say: Say | None = None,
) -> Compiled:
    """Bring the kept work folder up to date and compile ninja targets in it."""
    work = plan.work_dir
    work.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with _locked(work / "lock", plan.name, say), open(log, "w") as stream:
        files_changed = sync_tree(plan)
        _configure(plan, stream, log, anew=files_changed)
        n_compiled, n_linked = _run_ninja(plan, list(targets), jobs, stream, log, say)
    return Compiled(n_compiled, n_linked, time.monotonic() - start, work / "cmake" / "bin")


def _check_unedited(plan: BuildPlan) -> None:
    """Raise RoutewiseError where the source was edited since it was planned."""
    cache = DigestCache(plan.results_dir / ".cache" / "digests.json")
    shim = digest_of({file: normalised_digest(plan.shim_dir / file, cache) for file in SHIM_FILES})
    known = component_digests(plan.root, cache, plan.changed, plan.components.__contains__)
    cache.save()
    for component, digest in plan.components.items():
        if digest != {**known, "shim": shim}.get(component):
            raise RoutewiseError(
                f"build {plan.name}: {component} of source {plan.source} was edited while it was "
                "being built",
                "run the same command again: it is planned and built from what is there then",
            )


_NO_LOCKS_HINT = (
    "link results/work to a folder of a local disk, run in a working folder of one, or have the "
    "file system mounted with locks (NFS: not nolock; Lustre: flock)"
)


@contextlib.contextmanager
def _locked(path: Path, name: str, say: Say | None) -> Iterator[None]:
    with open(path, "w") as handle:
        try:
            take_lock(handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, path.parent, _NO_LOCKS_HINT)
        except BlockingIOError:
            (say or _say)(f"build {name}: waiting for another job in {path.parent} …")
            take_lock(handle.fileno(), fcntl.LOCK_EX, path.parent, _NO_LOCKS_HINT)
        yield


@contextlib.contextmanager
def _disk_full_explained(plan: BuildPlan) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _disk_full(plan) from error


def _disk_full(plan: BuildPlan) -> RoutewiseError:
    free = shutil.disk_usage(plan.work_dir).free / 2**20
    return RoutewiseError(
        f"build {plan.name}: disk full ({free:.0f} MiB free at {plan.work_dir}); a CPU build takes "
        "about 300 MiB",
        "make room and run the same command again: what was compiled is kept",
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def sync_tree(plan: BuildPlan) -> bool:
    """Make the work folder's sources equal to the (patched) source's; write only what differs.

    What is written is dated now, so that ninja sees it whatever date it had; what is equal keeps
    its date. Returns whether a file came or went (CMake looks for files only when it runs).
    """
    components = {*plan.components, "texts"}
    wanted: dict[Path, Path | bytes] = {
        Path("src") / file: plan.root / file
        for file in source_files(plan.root)
        if component_of(file) in components
    }
    wanted |= {Path("src") / file: content for file, content in plan.changed.items()}
    wanted |= {Path("shim") / file: plan.shim_dir / file for file in SHIM_FILES}
    changed = False
    for relative, origin in wanted.items():
        target = plan.work_dir / relative
        content = origin if isinstance(origin, bytes) else origin.read_bytes()
        try:
            if target.read_bytes() == content:
                continue
        except FileNotFoundError:
            changed = True
            target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        if not isinstance(origin, bytes) and os.access(origin, os.X_OK):
            target.chmod(0o755)
    for top in ("src", "shim"):
        for path in (plan.work_dir / top).rglob("*"):
            if not path.is_dir() and path.relative_to(plan.work_dir) not in wanted:
                path.unlink()
                changed = True
    return changed


def _configure(plan: BuildPlan, log: TextIO, log_path: Path, *, anew: bool) -> None:
    binary = plan.work_dir / "cmake"
    c, cxx = find_compilers()
    options = {**plan.options, **FIXED_OPTIONS, "CMAKE_MAKE_PROGRAM": _program("ninja")}
    options |= {"CMAKE_C_COMPILER": os.fspath(c), "CMAKE_CXX_COMPILER": os.fspath(cxx)}
    languages = ["C", "CXX"]
    if plan.backend == "cuda":
        nvcc = check_nvcc(plan.name, plan.options[ARCHITECTURES], cxx)
        options |= {"CMAKE_CUDA_COMPILER": os.fspath(nvcc)}
        options |= {"CMAKE_CUDA_HOST_COMPILER": os.fspath(cxx)}
        languages.append("CUDA")
    ccache = shutil.which("ccache")
    for language in languages:
        if ccache:
            options[f"CMAKE_{language}_COMPILER_LAUNCHER"] = ccache
    stamp, asked = binary / "routewise-options.json", canonical_json(options)
    same = stamp.is_file() and stamp.read_text() == asked
    if same and not anew and (binary / "build.ninja").is_file():
        return  # ninja itself runs CMake again where a CMake file has changed
    if not same:
        shutil.rmtree(binary, ignore_errors=True)  # a cache keeps options that are no longer asked
    command = [_program("cmake"), "-G", "Ninja", "-S", os.fspath(plan.work_dir / "shim")]
    command += ["-B", os.fspath(binary), *(f"-D{key}={value}" for key, value in options.items())]
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    process = _start(command, plan, stdout=log)
    if _wait(process):
        raise _failed(plan, "CMake could not configure it", log_path)
    binary.mkdir(exist_ok=True)
    write_text(stamp, asked)


_NINJA_LINE = re.compile(r"\[(\d+)/(\d+)\] (.*)")


def _run_ninja(
    plan: BuildPlan, targets: list[str], jobs: int | None, log: TextIO, path: Path, say: Say | None
) -> tuple[int, int]:
    jobs = jobs or len(os.sched_getaffinity(0))
    command = [_program("ninja"), "-C", os.fspath(plan.work_dir / "cmake"), f"-j{jobs}", *targets]
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    process = _start(command, plan, stdout=subprocess.PIPE)
    assert process.stdout is not None
    n_compiled = n_linked = 0
    with _Progress(f"build {plan.name}", say) as progress:
        try:
            for line in process.stdout:
                log.write(line)
                step = _NINJA_LINE.match(line)
                if step:
                    n_compiled += step[3].startswith("Building ") and " object " in step[3]
                    n_linked += step[3].startswith("Linking ")
                    progress.step(int(step[1]), int(step[2]), step[3])
        finally:
            log.flush()
            status = _wait(process)
    if status:
        raise _failed(plan, "it does not compile", path)
    return n_compiled, n_linked


_VARIABLES_THAT_MOVE_BITS = (
    *("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "SOURCE_DATE_EPOCH"),
    *("CUDAFLAGS", "CUDAARCHS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"),
)


def _start(command: list[str], plan: BuildPlan, stdout: TextIO | int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "NINJA_STATUS": "[%f/%t] ",
        # Objects are shared between work folders: paths below this one are made relative.
        "CCACHE_BASEDIR": os.fspath(plan.work_dir.resolve()),
        "CCACHE_NOHASHDIR": "1",
        # ccache takes -march=native for the same wherever it is: not across processors.
        "CCACHE_NAMESPACE": f"routewise {_host_cpu() if plan.host else plan.toolchain.get('cpu')}",
    }
    for variable in _VARIABLES_THAT_MOVE_BITS:
        environment.pop(variable, None)  # would move bits that no digest knows of
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies: ninja then ends its compilers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait(process: subprocess.Popen[str]) -> int:
    try:
        if process.stdout is not None and sys.exc_info()[0] is not None:
            process.terminate()
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _failed(plan: BuildPlan, what: str, log: Path) -> RoutewiseError:
    lines = log.read_text(errors="replace").splitlines()
    if any("No space left on device" in line for line in lines[-200:]):
        return _disk_full(plan)
    first = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), None)
    shown = lines[-25:] if first is None else [*lines[first : first + 1], *lines[first + 2 :][:24]]
    text = "\n".join(f"    {line[:300]}" for line in shown)
    patch = f" with patch {plan.patch}" if plan.patch else ""
    return RoutewiseError(
        f"build {plan.name} (source {plan.source}{patch}): {what}:\n{text}",
        f"the whole log is {log}",
    )


class _Progress:
    """One line that is refreshed in a terminal, a line every ten seconds elsewhere."""

    def __init__(self, title: str, say: Say | None) -> None:
        self.title = title
        self.say = say or _say
        self.bar = say is None and sys.stderr.isatty()
        self.start = self.last = time.monotonic()
        self.recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=30)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar and self.recent:
            print(file=sys.stderr)

    def step(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        self.recent.append((now, done))
        if not self.bar and now - self.last < 10 and done < total:
            return
        self.last = now
        (then, before), rate = self.recent[0], 0.0
        if len(self.recent) == 1 or now <= then:
            then, before = self.start, 0
        if now > then:
            rate = (done - before) / (now - then)
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        file = what.rsplit("/", 1)[-1].removesuffix(".o")
        verb = "linking" if what.startswith("Linking") else "compiling"
        line = f"{self.title}: [{done}/{total}] {verb} {file} ({rate:.1f} files/s{left})"
        if self.bar:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        else:
            self.say(line)


# --------------------------------------------------------------------------------------- installing


def _install(plan: BuildPlan, part: str, compiled: Compiled) -> dict[str, Any]:
    """Copy the part's files, stripped and stamped with the identity, to their place in one step."""
    target = plan.part_dir(part)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        programs = () if part == "engine" else PARTS[part]
        starts = [compiled.bin_dir / program for program in programs]
        starts = starts or [compiled.bin_dir / "libroutewise_shim.so"]
        libraries = needed_libraries(starts)
        if part == "engine":
            libraries["libroutewise_shim.so"] = starts[0]
        for name, path in libraries.items():
            install_file(path, beside / "lib" / name, plan.identity)
        if plan.backend == "cuda":
            link_toolkit(compiled.bin_dir, beside / "lib")
        for program in programs:
            install_file(compiled.bin_dir / program, beside / "bin" / program, plan.identity)
        document = _document(plan, part, compiled, beside)
        write_text(beside / "build.json", json.dumps(document, indent=2, sort_keys=True) + "\n")
        # Snakemake may have made the folder already; build.json comes last and says it is whole.
        target.mkdir(exist_ok=True)
        (target / "build.json").unlink(missing_ok=True)
        for name in ("lib", "bin"):
            shutil.rmtree(target / name, ignore_errors=True)
            if (beside / name).is_dir():
                os.replace(beside / name, target / name)
        os.replace(beside / "build.json", target / "build.json")
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return document


def _document(plan: BuildPlan, part: str, compiled: Compiled, folder: Path) -> dict[str, Any]:
    fingerprint, libraries = library_fingerprint(folder / "lib", plan.identity)
    c, cxx = find_compilers()
    return {
        "name": plan.name,
        "part": part,
        "backend": plan.backend,
        "source": plan.source,
        "patch": plan.patch,
        "identity": plan.identity,
        "digest": plan.part_digest(part),
        "fingerprint": fingerprint,
        "libraries": libraries,
        "programs": {
            program.name: sha256_bytes(unstamped(program.read_bytes(), plan.identity))
            for program in sorted((folder / "bin").glob("*"))
        },
        "components": dict(plan.components),
        "options": dict(plan.options),
        "toolchain": {
            **plan.toolchain,
            **({} if plan.host is None else toolchain_identity(plan.options, None, plan.backend)),
        },
        "compiler": {"c": os.fspath(c), "cxx": os.fspath(cxx)}
        | ({"cuda": os.fspath(find_nvcc() or "")} if plan.backend == "cuda" else {}),
        "cmake": run_compiler([_program("cmake"), "--version"]).splitlines()[0].split()[-1],
        "raw_source_digest": raw_digest(plan.root),
        "n_compiled": compiled.n_compiled,
        "n_linked": compiled.n_linked,
        "build_s": round(compiled.seconds, 3),
    }


def link_toolkit(linked: Path, libraries: Path) -> None:
    """Link what the CUDA backend needs of the toolkit beside it, where its run path looks first.

    So it is the toolkit that it was compiled with, whatever the machine's loader knows of.
    """
    nvcc = find_nvcc()
    backends = sorted(libraries.glob("libggml-cuda.so*"))
    if nvcc is None or not backends:
        raise RoutewiseError(
            f"{linked}: no nvcc or no libggml-cuda.so after a CUDA build", "look into its log"
        )
    (libraries / "toolkit").mkdir()
    for name, path in toolkit_libraries(nvcc, backends[0]).items():
        (libraries / "toolkit" / name).symlink_to(path)


def install_file(path: Path, target: Path, identity: str) -> None:
    """Copy a linked library or program, stripped and stamped with the identity of its build."""
    target.parent.mkdir(exist_ok=True)
    strip = shutil.which("strip")
    if strip is None:
        raise RoutewiseError("no strip command found", "install binutils")
    run_compiler([strip, "-o", os.fspath(target), os.fspath(path)])
    content = target.read_bytes()
    if target.name == "libroutewise_shim.so" and content.count(IDENTITY_PLACEHOLDER.encode()) != 1:
        raise RoutewiseError(
            f"{path}: does not hold the place of the build's identity exactly once",
            "rw_identity() must return the macro ROUTEWISE_IDENTITY",
        )
    target.write_bytes(stamped(content, identity))


def needed_libraries(starts: Iterable[Path]) -> dict[str, Path]:
    """Return the libraries beside these ELF files that they need, directly or not, by SONAME."""
    found: dict[str, Path] = {}
    queue = list(starts)
    while queue:
        path = queue.pop()
        for name in read_elf(path)[0]:
            beside = path.parent / name
            if name not in found and beside.is_file():
                found[name] = beside.resolve()
                queue.append(beside)
    return dict(sorted(found.items()))
