"""Patches: our change to a source, as files of our own and as few upstream lines as possible.

``patches/<name>/`` holds ``overlay/`` (new files, at the place they get in the tree),
``hooks.diff`` (a git-style diff of upstream files) and ``README.md``. Overlay and hooks.diff are
each optional, but not both.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from routewise.digest import digest_of, sha256_bytes
from routewise.errors import RoutewiseError
from routewise.normalise import normalised_bytes
from routewise.source import component_of, git_environment, is_kept

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """One hunk of hooks.diff: its number within its file (from 1), its header and its body."""

    file: str
    number: int
    header: str
    body: tuple[str, ...]  # lines with their leading ' ', '+', '-' or '\\'


@dataclass(frozen=True)
class Patch:
    """A patch as loaded from its folder."""

    name: str
    folder: Path
    overlay: tuple[tuple[str, bytes], ...]  # (destination in the tree, content), sorted
    diff: str
    hunks: tuple[Hunk, ...]

    @property
    def touched(self) -> tuple[str, ...]:
        """The upstream files that hooks.diff changes, sorted."""
        return tuple(sorted({hunk.file for hunk in self.hunks}))

    def components(self) -> dict[str, str]:
        """Return what the patch itself means for each component, by digest.

        Overlay files count by destination and meaning, hooks.diff by its added and removed lines
        per file. The digest of a *build* uses the patched files instead; this one names a patch.
        """
        parts: dict[str, list[list[str]]] = {}
        for file, content in self.overlay:
            digest = sha256_bytes(normalised_bytes(file, content))
            parts.setdefault(component_of(file), []).append(["overlay", file, digest])
        for file in self.touched:
            for sign in "-+":
                lines = [
                    line[1:]
                    for hunk in self.hunks
                    if hunk.file == file
                    for line in hunk.body
                    if line.startswith(sign)
                ]
                digest = sha256_bytes(normalised_bytes(file, "\n".join(lines).encode()))
                parts.setdefault(component_of(file), []).append([sign, file, digest])
        return {component: digest_of(entries) for component, entries in sorted(parts.items())}

    def digest(self) -> str:
        """Return one digest of the patch's meaning."""
        return digest_of(self.components())


def known_patches(patches_dir: Path) -> list[str]:
    """Return the names of the patches in a folder, sorted."""
    if not patches_dir.is_dir():
        return []
    return sorted(p.name for p in patches_dir.iterdir() if p.is_dir() and p.name[0] != ".")


def load_patch(name: str, patches_dir: Path) -> Patch:
    """Load and check ``patches_dir/name``.

    Raises RoutewiseError for an unknown name (with the known ones), an empty patch, a diff that
    cannot be read, or a file outside what a build reads.
    """
    folder = Path(patches_dir) / name
    known = known_patches(patches_dir)
    if name not in known:
        raise RoutewiseError(
            f"unknown patch {name!r}; {patches_dir} has: {', '.join(known) or 'none'}",
            "correct the patch of the build in the study, or add the folder",
        )
    overlay_root = folder / "overlay"
    overlay = []
    for path in sorted(overlay_root.rglob("*")):
        if path.is_file():
            relative = path.relative_to(overlay_root).as_posix()
            if path.name[0] != "." and path.suffix != ".md":
                _check_destination(relative, path)
                overlay.append((relative, path.read_bytes()))
    diff_path = folder / "hooks.diff"
    diff = diff_path.read_text() if diff_path.is_file() else ""
    hunks = tuple(_parse(diff, diff_path))
    for hunk in hunks:
        _check_destination(hunk.file, diff_path)
    if not overlay and not hunks:
        raise RoutewiseError(
            f"patch {name}: {folder} has neither files in overlay/ nor a hunk in hooks.diff",
            "add one of them, or drop the patch from the build",
        )
    return Patch(name, folder, tuple(overlay), diff, hunks)


def _check_destination(relative: str, path: Path) -> None:
    if ".." in relative.split("/") or not is_kept(relative):
        raise RoutewiseError(
            f"{path}: {relative} is no place that a build of llama.cpp reads",
            "put files under ggml/, src/, include/, common/ or tools/",
        )


def _parse(diff: str, path: Path) -> Iterator[Hunk]:
    file, number = "", 0
    lines = diff.splitlines()
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.startswith(
            ("rename ", "copy ", "deleted file", "new file", "GIT binary", "Binary")
        ):
            raise RoutewiseError(
                f"{path}:{index}: {line!r}: hooks.diff may only change lines of upstream files",
                "put new files into overlay/",
            )
        if line.startswith("--- "):
            if index >= len(lines) or not lines[index].startswith("+++ "):
                raise RoutewiseError(
                    f"{path}:{index}: '---' without '+++'", "make it with git diff"
                )
            file = _strip_prefix(lines[index][4:].split("\t")[0])
            number = 0
            if "/dev/null" in (line[4:].strip(), file):
                raise RoutewiseError(
                    f"{path}:{index}: hooks.diff may not add or delete files", "use overlay/"
                )
            index += 1
        elif line.startswith("@@"):
            match = _HUNK.match(line)
            if not match or not file:
                raise RoutewiseError(f"{path}:{index}: not a hunk header: {line!r}")
            left, right = (int(match[group] or 1) for group in (2, 4))
            number += 1
            begin = index
            while index < len(lines) and (left > 0 or right > 0 or lines[index][:1] == "\\"):
                sign = lines[index][:1] or " "
                if sign not in " +-\\":
                    break
                left -= sign in " -"
                right -= sign in " +"
                index += 1
            if left or right:
                raise RoutewiseError(
                    f"{path}:{begin}: hunk {number} of {file} does not hold the lines its header "
                    f"announces: {line}",
                    "make the diff anew with git diff",
                )
            yield Hunk(file, number, line, tuple(lines[begin:index]))


def _strip_prefix(name: str) -> str:
    name = name.strip()
    return name[2:] if name[:2] in ("a/", "b/") else name


def patched_files(patch: Patch, root: Path, source: str = "") -> dict[str, bytes]:
    """Return the content of every file that the patch adds or changes in the tree at ``root``.

    Keys are relative paths with slashes. ``source`` names the tree in messages. Raises
    RoutewiseError with file, hunk and source where a hunk does not apply, and where an overlay
    file would take the place of an upstream file.
    """
    where = f"source {source} ({root})" if source else f"source {root}"
    out = dict(patch.overlay)
    for file in out:
        if (root / file).exists():
            raise RoutewiseError(
                f"patch {patch.name}: overlay/{file} would replace an upstream file of {where}",
                "overlay/ is for new files: rename it, or change the upstream file in hooks.diff",
            )
    if not patch.hunks:
        return out
    if shutil.which("git") is None:
        raise RoutewiseError("no git command found, patches are applied with it", "install git")
    for file in patch.touched:
        if not (root / file).is_file():
            hunk = next(hunk for hunk in patch.hunks if hunk.file == file)
            raise _not_applied(patch, hunk, where, "the file does not exist there")
    with tempfile.TemporaryDirectory(prefix="routewise-patch-") as temporary:
        scratch = Path(temporary)
        for file in patch.touched:
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, scratch / file)
        done = _git_apply(scratch, patch.diff)
        if done.returncode:
            raise _explain(patch, scratch, where, done.stderr)
        for file in patch.touched:
            out[file] = (scratch / file).read_bytes()
            if out[file] == (root / file).read_bytes():
                hunk = next(hunk for hunk in patch.hunks if hunk.file == file)
                raise _not_applied(patch, hunk, where, "git apply changed nothing")
    return out


def _git_apply(scratch: Path, diff: str) -> subprocess.CompletedProcess[str]:
    # Inside an ignored folder of a repository `git apply` skips every file and succeeds, so it
    # must find none.
    return subprocess.run(
        ["git", "apply", "--verbose", "--whitespace=nowarn", "-p1", "-"],
        input=diff if diff.endswith("\n") else diff + "\n",
        cwd=scratch,
        env=git_environment(scratch.parent),
        capture_output=True,
        text=True,
    )


def _explain(patch: Patch, scratch: Path, where: str, message: str) -> RoutewiseError:
    """Find the first hunk that fails, by trying each one after those before it."""
    for file in patch.touched:
        header = f"--- a/{file}\n+++ b/{file}\n"
        applied = ""
        for hunk in (hunk for hunk in patch.hunks if hunk.file == file):
            applied += "\n".join([hunk.header, *hunk.body]) + "\n"
            done = subprocess.run(
                ["git", "apply", "--check", "--whitespace=nowarn", "-p1", "-"],
                input=header + applied,
                cwd=scratch,
                env=git_environment(scratch.parent),
                capture_output=True,
                text=True,
            )
            if done.returncode:
                return _not_applied(patch, hunk, where, _nearest(scratch / file, hunk))
    return RoutewiseError(
        f"patch {patch.name}: hooks.diff does not apply to {where}:\n    {message.strip()}",
        "make the diff anew against this source",
    )


def _nearest(path: Path, hunk: Hunk) -> str:
    """Say which of the lines that the hunk expects is missing from the file."""
    present = {line.rstrip() for line in path.read_text(errors="replace").splitlines()}
    for line in hunk.body:
        if line[:1] in " -" and line[1:].rstrip() not in present:
            return f"the file has no line {line[1:].strip()!r}"
    return "its lines are there, but not together"


def _not_applied(patch: Patch, hunk: Hunk, where: str, reason: str) -> RoutewiseError:
    return RoutewiseError(
        f"patch {patch.name} does not apply: {patch.folder}/hooks.diff, file {hunk.file}, "
        f"hunk {hunk.number} ({hunk.header.strip()}), tried on {where}: {reason}",
        "make the diff anew against this source, or build it from the source it was made for",
    )
