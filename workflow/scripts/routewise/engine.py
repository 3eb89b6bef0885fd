"""One llama.cpp build, loaded into this process through the shim.

One process holds one build: two builds share their SONAMEs, and the dynamic linker would hand the
first one's libraries to the second. :func:`load_engine` therefore refuses a second build, and
reads back from the kernel which files are really mapped, so that what was measured is what was
asked for.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from routewise.errors import RoutewiseError
from routewise.fingerprint import library_fingerprint

#: Measured through this file too: a change of it is a change of the measuring code.
MEASURES_WITH = ("../../shim/routewise_shim.cpp",)

SHIM = "libroutewise_shim.so"
_LOADED: dict[str, Engine] = {}


#: Copied to measure bandwidth, on the processor and on a device: more than caches hold.
COPY_BYTES = (256 << 20, 1 << 30)
_COPY_ROUNDS = 15
#: More layers than a model has: all of them go to the device.
ALL_LAYERS = 999


@dataclass(frozen=True)
class Settings:
    """All that moves a number on the engine's side. Units: tokens, threads, layers.

    With no ``gpu_layers`` no device but the processor is used, whatever the build could use.
    With ``kv_unified`` sequences share one cache.
    """

    context: int
    micro_batch: int
    threads: int
    flash_attention: bool
    kv_type: str = "f16"
    gpu_layers: int = 0
    kv_unified: bool = False


class Engine:
    """A build's libraries, mapped into this process. Made by :func:`load_engine`."""

    def __init__(self, library_dir: Path, library: ctypes.CDLL) -> None:
        self.library_dir = library_dir
        self._library = library
        _declare(library)
        library.rw_start()
        self.identity: str = library.rw_identity().decode()
        self.system_info: str = library.rw_system_info().decode()

    def take_log(self) -> str:
        """Return what the engine logged since the last call."""
        buffer = ctypes.create_string_buffer(1 << 20)
        self._library.rw_take_log(buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def fingerprint(self) -> tuple[str, dict[str, str]]:
        """Digest the libraries that the kernel says are mapped (not those on the path)."""
        mapped = mapped_libraries()
        return library_fingerprint(mapped, self.identity)

    def copy_bandwidth(self, on_device: bool, threads: int) -> float | None:
        """Return the bytes a second, read and written, of copies in memory; None without room.

        The memory is the processor's, or that of the first device; the median of several copies.
        """
        n_bytes = COPY_BYTES[on_device]
        times = np.zeros(_COPY_ROUNDS, np.int64)
        code = self._library.rw_time_copy(
            on_device, n_bytes, threads, _COPY_ROUNDS, times.ctypes.data
        )
        return None if code else 2 * n_bytes / (float(np.median(times)) / 1e9)

    def uncovered(self) -> str:
        """Return what a patched build met and does not cover; '' where there is nothing."""
        reports = []
        for path in mapped_libraries():
            backend = re.fullmatch(r"libggml-([a-z0-9]+)\.so[.0-9]*", path.name)
            if backend is None:
                continue
            library = ctypes.CDLL(str(path))
            try:
                report = getattr(library, f"ggml_{backend[1]}_exact_report")
            except AttributeError:
                continue
            report.restype = ctypes.c_char_p
            report.argtypes = []
            text = (report() or b"").decode(errors="replace").strip()
            if text:
                reports.append(text)
        return "\n".join(reports)

    def open_model(self, path: Path, gpu_layers: int = 0) -> Model:
        """Load a GGUF with that many layers on the device; with none, on the processor alone.

        Raises RoutewiseError with the engine's own last words where it refuses, and where it put
        another number of layers on the device.
        """
        self.take_log()
        handle = self._library.rw_model_open(str(path).encode(), gpu_layers)
        if not handle:
            raise RoutewiseError(
                f"{path}: the engine cannot load this model:\n{_last_lines(self.take_log())}",
                "check the file (sha256, size) and that this llama.cpp knows its architecture",
            )
        offloaded = layers_offloaded(self.take_log())
        if not_as_asked(gpu_layers, offloaded):
            self._library.rw_model_close(handle)
            raise RoutewiseError(
                f"{path}: asked for {_layers(gpu_layers)} on the device, the engine says "
                + ("nothing of any" if offloaded is None else "{} of {}".format(*offloaded)),
                "the build sees no device (its driver, CUDA_VISIBLE_DEVICES), or has no backend "
                "for one: device: cpu on the route stays on the processor",
            )
        return Model(self, self._library, handle)


def layers_offloaded(log: str) -> tuple[int, int] | None:
    """Return how many layers the engine's log says are on a device, and of how many."""
    said = re.findall(r"offloaded (\d+)/(\d+) layers to GPU", log)
    return (int(said[-1][0]), int(said[-1][1])) if said else None


def not_as_asked(gpu_layers: int, offloaded: tuple[int, int] | None) -> bool:
    """Say whether another number of layers is on a device than was asked for."""
    n_on_device, n_layers = offloaded or (0, 1)
    return n_on_device != min(gpu_layers, n_layers)


def _layers(gpu_layers: int) -> str:
    return "all layers" if gpu_layers >= ALL_LAYERS else f"{gpu_layers} layers"


class Model:
    """A loaded GGUF; weights and vocabulary."""

    def __init__(self, engine: Engine, library: ctypes.CDLL, handle: int) -> None:
        self.engine = engine
        self._library = library
        self._handle = handle
        self.n_vocab: int = library.rw_n_vocab(handle)
        self.n_ctx_train: int = library.rw_n_ctx_train(handle)
        buffer = ctypes.create_string_buffer(256)
        library.rw_description(handle, buffer, len(buffer))
        self.description: str = buffer.value.decode(errors="replace")

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of ``text``."""
        raw = text.encode()
        capacity = len(raw) + 16
        for _ in range(2):
            tokens = np.empty(capacity, np.int32)
            count = self._library.rw_tokenize(
                self._handle,
                raw,
                len(raw),
                tokens.ctypes.data,
                capacity,
                add_special,
                parse_special,
            )
            if count >= 0:
                return tokens[:count].tolist()
            capacity = -count
        raise RoutewiseError(f"the tokenizer refused a text of {len(raw)} bytes")

    def open_context(self, settings: Settings, n_sequences: int = 1) -> Context:
        """Make an empty context: ``settings.context`` tokens for each of ``n_sequences``."""
        return Context(self, self._library, self._handle, settings, n_sequences)

    def close(self) -> None:
        """Free the weights; contexts must be closed before."""
        self._library.rw_model_close(self._handle)


class Context:
    """A KV cache and the passes over it. Closed by ``close`` or at the end of a ``with`` block."""

    def __init__(
        self,
        model: Model,
        library: ctypes.CDLL,
        model_handle: int,
        settings: Settings,
        n_sequences: int,
    ) -> None:
        self.model = model
        self.settings = settings
        self.n_vocab = model.n_vocab
        self._library = library
        model.engine.take_log()
        self._handle = library.rw_context_open(
            model_handle,
            settings.context,
            n_sequences,
            settings.micro_batch,
            settings.micro_batch,
            settings.threads,
            settings.flash_attention,
            settings.kv_unified,
            settings.kv_type.encode(),
        )
        log = model.engine.take_log()
        if not self._handle:
            raise RoutewiseError(
                f"the engine refuses a context with {settings}:\n{_last_lines(log)}",
                "check context, kv_type and flash_attention of the route",
            )
        self.readback = self._read_back(log)
        # made once: between two passes every new object is built in cold caches
        self._tokens = np.zeros(settings.micro_batch, np.int32)
        self._positions = np.zeros(settings.micro_batch, np.int32)
        self._sequences = np.zeros(settings.micro_batch, np.int32)
        self._wants = np.zeros(settings.micro_batch, np.int8)
        self._pass_ns = ctypes.c_int64()
        self._addresses = (
            self._tokens.ctypes.data,
            self._positions.ctypes.data,
            self._sequences.ctypes.data,
            self._wants.ctypes.data,
            ctypes.byref(self._pass_ns),
        )
        self._row_type = ctypes.c_float * self.n_vocab
        self._rows: dict[
            int, npt.NDArray[np.float32]
        ] = {}  # views of the engine's rows, by address

    def _read_back(self, log: str) -> dict[str, object]:
        said = dict(re.findall(r"^\w+: (\w+)\s+= (\S+)", log, flags=re.MULTILINE))
        return {
            "context": self._library.rw_context_n_ctx_seq(self._handle),
            "micro_batch": self._library.rw_context_n_ubatch(self._handle),
            "threads": self._library.rw_context_n_threads(self._handle),
            "threads_batch": self._library.rw_context_n_threads_batch(self._handle),
            "flash_attention": said.get("flash_attn"),
            "kv_unified": said.get("kv_unified"),
            "kv_types": re.findall(r"[KV] \((\w+)\):", log),
        }

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | None = None,
        wants: Sequence[bool] | None = None,
    ) -> int:
        """Run one pass; return its time in ns, up to the moment where its logits are there.

        ``tokens``, ``positions``, ``sequences`` (all 0 where None) and ``wants`` (all True where
        None) have one entry a token. Raises RoutewiseError where the engine refuses the pass.
        """
        n = len(tokens)
        if n > self.settings.micro_batch:
            raise RoutewiseError(
                f"a pass of {n} tokens would be cut by the micro-batch of "
                f"{self.settings.micro_batch}",
                "raise the route's micro_batch or lower the width",
            )
        if n == 1 and sequences is None and wants is None:  # a plain step: nothing to spread
            self._tokens[0], self._positions[0] = tokens[0], positions[0]
            self._sequences[0], self._wants[0] = 0, 1
        else:
            self._tokens[:n] = tokens
            self._positions[:n] = positions
            self._sequences[:n] = 0 if sequences is None else sequences
            self._wants[:n] = 1 if wants is None else wants
        code = self._library.rw_decode(self._handle, n, *self._addresses)
        if code != 0:
            raise RoutewiseError(
                f"the engine refused a pass of {n} tokens at position {self._positions[0]} "
                f"(code {code}):\n{_last_lines(self.model.engine.take_log())}",
                "code 1 means that the context is full: raise the route's context",
            )
        return self._pass_ns.value

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """Return the row of token ``index`` of the last pass: (n_vocab,) float32, a view.

        It is valid until the next pass; copy what must live longer.
        """
        address = self._library.rw_logits(self._handle, index)
        if not address:
            raise RoutewiseError(f"the engine has no logits for token {index} of the last pass")
        row = self._rows.get(address)
        if row is None:
            row = np.frombuffer(memoryview(self._row_type.from_address(address)), np.float32)
            self._rows[address] = row
        return row

    def remove(self, sequence: int, first: int, end: int = -1) -> None:
        """Remove positions [first, end) of a sequence from the cache (end < 0: all that follow)."""
        if not self._library.rw_remove(self._handle, sequence, first, end):
            raise RoutewiseError(
                f"the engine cannot remove positions from {first} of sequence {sequence}",
                "this model's memory cannot be rolled back: leave out the shape 'rollback'",
            )

    def close(self) -> None:
        """Free the cache."""
        if self._handle:
            self._library.rw_context_close(self._handle)
            self._handle = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_engine(library_dir: Path) -> Engine:
    """Load the build in ``library_dir`` (it holds the shim and the libraries beside it).

    Raises RoutewiseError where another build is already in this process, where the shim is
    missing, or where the mapped libraries are not those of ``library_dir``.
    """
    library_dir = library_dir.resolve()
    for loaded_dir, engine in _LOADED.items():
        if loaded_dir == str(library_dir):
            return engine
        raise RoutewiseError(
            f"{library_dir}: this process already holds the build in {loaded_dir}; a second one "
            "would silently measure the first",
            "use one process for each build",
        )
    foreign = mapped_libraries()
    if foreign:
        raise RoutewiseError(
            f"{foreign[0]}: a llama.cpp library is already mapped into this process",
            "unset LD_PRELOAD, and use a process of its own for each build",
        )
    shim = library_dir / SHIM
    if not shim.is_file():
        raise RoutewiseError(
            f"{shim}: no such library", "build it: run the workflow, or `make demo`"
        )
    try:
        library = ctypes.CDLL(str(shim))
    except OSError as error:
        raise RoutewiseError(
            f"{shim}: cannot be loaded ({error})", "delete the build and run again"
        ) from error
    engine = Engine(library_dir, library)
    strangers = [path for path in mapped_libraries() if path.parent != library_dir]
    if strangers:
        raise RoutewiseError(
            f"{strangers[0]}: mapped instead of the library in {library_dir}",
            "unset LD_LIBRARY_PATH and LD_PRELOAD",
        )
    _LOADED[str(library_dir)] = engine
    return engine


def check_identity(engine: Engine, build_document: Path) -> dict[str, object]:
    """Compare what is mapped with a build's build.json; return the build as read back.

    Raises RoutewiseError where identity, fingerprint or any library differs: then this process
    does not measure the build that was asked for.
    """
    document = json.loads(build_document.read_text())
    fingerprint, libraries = engine.fingerprint()
    for key, found in (("identity", engine.identity), ("fingerprint", fingerprint)):
        if document[key] != found:
            raise RoutewiseError(
                f"{build_document}: {key} is {document[key]}, the libraries mapped say {found}",
                f"delete {build_document.parent} and run again",
            )
    return {key: document[key] for key in ("name", "backend", "patch", "identity", "digest")} | {
        "fingerprint": fingerprint,
        "libraries": libraries,
    }


def mapped_libraries() -> list[Path]:
    """Return the llama.cpp libraries and the shim that are mapped into this process, sorted."""
    found = set()
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            path = Path(line.rstrip("\n").partition("/")[2])
            if re.match(r"lib(ggml|llama|routewise_shim)", path.name):
                found.add(Path("/") / path)
    return sorted(found)


def _last_lines(text: str, count: int = 8) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


def _declare(library: ctypes.CDLL) -> None:
    integer, pointer, string = ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p
    signatures = {
        "rw_identity": (string, []),
        "rw_system_info": (string, []),
        "rw_start": (None, []),
        "rw_take_log": (ctypes.c_int64, [string, ctypes.c_int64]),
        "rw_time_copy": (integer, [integer, ctypes.c_int64, integer, integer, pointer]),
        "rw_model_open": (pointer, [string, integer]),
        "rw_model_close": (None, [pointer]),
        "rw_n_vocab": (integer, [pointer]),
        "rw_n_ctx_train": (integer, [pointer]),
        "rw_description": (integer, [pointer, string, integer]),
        "rw_tokenize": (integer, [pointer, string, integer, pointer, integer, integer, integer]),
        "rw_context_open": (pointer, [pointer, *[integer] * 7, string]),
        "rw_context_close": (None, [pointer]),
        "rw_context_n_ctx_seq": (integer, [pointer]),
        "rw_context_n_ubatch": (integer, [pointer]),
        "rw_context_n_threads": (integer, [pointer]),
        "rw_context_n_threads_batch": (integer, [pointer]),
        "rw_decode": (
            integer,
            [pointer, integer, *[pointer] * 4, ctypes.POINTER(ctypes.c_int64)],
        ),
        "rw_logits": (pointer, [pointer, integer]),
        "rw_remove": (integer, [pointer, integer, integer, integer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
