"""The fingerprint of a build: which bits its libraries are, whoever's source they came from.

Every build carries its identity (the digest of its source's meaning) as 64 characters in the
shim, and the first 12 of them as the commit that llama.cpp reports. Both are left out of the
fingerprint, so that a refactor that compiles to the same bits keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from routewise.digest import digest_of, sha256_bytes
from routewise.errors import RoutewiseError

#: What is compiled in place of the identity and the commit, until the libraries are installed.
IDENTITY_PLACEHOLDER = "routewise-identity-" + "0" * 45
COMMIT_PREFIX = "routewise-"
COMMIT_PLACEHOLDER = COMMIT_PREFIX + "0" * 12


def commit_of(identity: str) -> str:
    """Return what ``/props`` and llama_commit say of a build of this identity (64 hex digits)."""
    return COMMIT_PREFIX + identity[:12]


def stamped(content: bytes, identity: str) -> bytes:
    """Return a freshly linked library with the placeholders replaced by the identity."""
    content = content.replace(IDENTITY_PLACEHOLDER.encode(), identity.encode())
    return content.replace(COMMIT_PLACEHOLDER.encode(), commit_of(identity).encode())


def unstamped(content: bytes, identity: str) -> bytes:
    """Return an installed library with the identity replaced by the placeholders."""
    content = content.replace(identity.encode(), IDENTITY_PLACEHOLDER.encode())
    return content.replace(commit_of(identity).encode(), COMMIT_PLACEHOLDER.encode())


def library_fingerprint(
    libraries: Path | Iterable[Path], identity: str
) -> tuple[str, dict[str, str]]:
    """Digest libraries without the identity they carry.

    ``libraries`` is a folder (every ``lib*.so*`` in it) or the files themselves. Returns the
    fingerprint and the digest of each library by file name. Raises RoutewiseError where there is
    none, or where ``identity`` is not 64 hex digits.
    """
    if len(identity) != len(IDENTITY_PLACEHOLDER):
        raise RoutewiseError(f"not the identity of a build: {identity!r}", "build it again")
    if isinstance(libraries, Path):
        folder = libraries
        libraries = sorted(folder.glob("lib*.so*"))
        if not libraries:
            raise RoutewiseError(f"{folder}: holds no library", "delete the folder and run again")
    digests = {
        path.name: sha256_bytes(unstamped(path.read_bytes(), identity)) for path in libraries
    }
    return digest_of(digests), digests
