"""Digests of bytes, files and plain values: SHA-256 in lower-case hex (64 characters).

Digests of source text by its meaning are in :mod:`routewise.normalise`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Part of the cache file: a change of the normalising rules must not find old digests.
RULES_VERSION = 1

# A file changed within this time of its last stamp could change again without a new stamp.
_RACY_NS = 2_000_000_000

#: Hex digits of a digest that stands in a path.
DIGEST_LENGTH = 16


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a plain value: keys sorted, no spaces, no NaN.

    Raises ValueError for NaN or infinity and TypeError for what JSON cannot hold.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest_of(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a plain value."""
    return sha256_bytes(canonical_json(value).encode())


class DigestCache:
    """Digests of files, remembered by path, size, inode, modification and change time.

    The cache is one JSON file; losing it costs time and nothing else. With ``path`` None nothing
    is kept beyond the life of the object. Safe to share between processes: saving merges with
    what is there and replaces the file in one step.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._fresh: dict[str, list[Any]] = {}
        self._known: dict[str, list[Any]] = self._read()

    def _read(self) -> dict[str, list[Any]]:
        if self.path is None:
            return {}
        try:
            document = json.loads(self.path.read_text())
            if document["rules_version"] == RULES_VERSION:
                entries = document["entries"].items()
                return {key: one for key, one in entries if isinstance(one, list) and len(one) == 5}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return {}

    def get(self, kind: str, path: Path | str, compute: Callable[[], str]) -> str:
        """Return the digest of ``kind`` of the file, computed only if the file has changed."""
        absolute = os.path.abspath(path)
        status = os.stat(absolute)
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        key = f"{kind}:{absolute}"
        entry = self._known.get(key)
        if entry is not None and entry[:4] == stamp:
            return str(entry[4])
        digest = compute()
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _RACY_NS:
            self._known[key] = self._fresh[key] = [*stamp, digest]
        return digest

    def save(self) -> None:
        """Write what is new to the cache file; a full or read-only disk is not an error here."""
        if self.path is None or not self._fresh:
            return
        merged = {**self._read(), **self._fresh}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({"rules_version": RULES_VERSION, "entries": merged}))
        except OSError:
            return
        self._fresh = {}


def new_file_mode() -> int:
    """Return the mode of a new file under this process's umask, which a temporary file ignores.

    So a group that shares a folder (umask 002) may write over each other's files.
    """
    found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0o666 & ~int(found[1], 8) if found else 0o644


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step: the file is whole or as it was."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, new_file_mode())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sha256_file(path: Path, cache: DigestCache | None = None) -> str:
    """Return the SHA-256 of a file's content, from the cache where the file is unchanged."""

    def compute() -> str:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    return compute() if cache is None else cache.get("raw", path, compute)


def tree_digest(path: Path, cache: DigestCache | None = None) -> str:
    """Return the SHA-256 of a file, or one digest over names and contents of a folder's files."""
    if path.is_file():
        return sha256_file(path, cache)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest_of(
        [[file.relative_to(path).as_posix(), sha256_file(file, cache)] for file in files]
    )
