"""The result store as a person sees it: what it holds, whether that is whole, what may go.

Nothing here is needed for a measurement: a fragment that is gone is measured again. Jobs may be
writing all the while, so a file is removed only as it was looked at, and never a young one that
nothing is known against.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from routewise.errors import RoutewiseError
from routewise.progress import duration
from routewise.results_format import check_format
from routewise.schema.file import SCHEMA_VERSION, read_provenance, read_table
from routewise.schema.study import CELL_TABLES
from routewise.store import Store, fragment_key

#: A file younger than this may be a writer's at work.
YOUNG_S = 3600.0

DAMAGED = "damaged"
FOREIGN = "foreign"
#: Whole, and written by another Routewise, which keys or writes fragments in another way.
OLDER = "older"
NEWER = "newer"
LEFT_OVER = "left over"
NOT_OURS = "no fragment"

_TITLES = ("table", "route", "model", "fingerprint", "fragments", "MB", "newest")


@dataclass(frozen=True)
class StoreFile:
    """One file below the store, as it was when it was looked at."""

    path: Path
    n_bytes: int
    age_s: float
    identity: tuple[int, int]  # inode and time of change: another writer's file has others

    @property
    def key(self) -> str:
        """Return the key that its name says."""
        return self.path.stem

    @property
    def is_part(self) -> bool:
        """Whether a writer has not given it its name yet."""
        return self.path.suffix == ".part"

    @property
    def is_fragment(self) -> bool:
        """Whether its name is that of a fragment."""
        return self.path.suffix == ".parquet" and not self.path.name.startswith(".")


@dataclass(frozen=True)
class Problem:
    """What is wrong with one file of the store."""

    file: StoreFile
    kind: str  # DAMAGED, FOREIGN, OLDER, NEWER, LEFT_OVER or NOT_OURS
    why: str

    @property
    def is_wrong(self) -> bool:
        """Whether something is the matter, and not only that another Routewise wrote it."""
        return self.kind not in (OLDER, NEWER)


@dataclass(frozen=True)
class Usage:
    """What the cell files say of the fragments that they are made of.

    ``names`` gives each key its route and model. ``silent`` are the cell files that say nothing.
    """

    names: dict[str, tuple[str, str]]
    silent: list[Path]


def store_files(root: Path, now_s: float | None = None) -> Iterator[StoreFile]:
    """Yield every file below a store, by path; what vanishes meanwhile is left out."""
    now_s = time.time() if now_s is None else now_s
    for folder, below, names in os.walk(root):
        below.sort()
        for name in sorted(names):
            path = Path(folder) / name
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            identity = (found.st_ino, found.st_mtime_ns)
            yield StoreFile(path, found.st_size, max(0.0, now_s - found.st_mtime), identity)


def read_usage(cells: Path) -> Usage:
    """Return which fragments the cell files below a folder are made of."""
    names: dict[str, tuple[str, str]] = {}
    silent = []
    for path in sorted(cells.rglob("*.parquet")):
        document = read_provenance(path)
        if document.get("table") in {"cost", "agree", "dispatch"}:
            continue  # made without the store
        keys = document.get("fragments")
        if not isinstance(keys, list):
            silent.append(path)
            continue
        cell = _mapping(document.get("cell"))
        for key in keys:
            names[str(key)] = (str(cell.get("route", "-")), str(cell.get("model", "-")))
    return Usage(names, silent)


def find_problem(store: Store, file: StoreFile) -> Problem | None:
    """Return what is wrong with a file, having read all of it, or None.

    The key is computed again from the inputs that the fragment keeps.
    """
    if file.is_part:
        why = f"{duration(file.age_s)} old, its writer is gone"
        return Problem(file, LEFT_OVER, why) if file.age_s >= YOUNG_S else None
    if not file.is_fragment:
        return Problem(file, NOT_OURS, "not a name of the store's")
    said = read_provenance(file.path)
    name = None if said.get("table") is None else str(said["table"])
    version = said.get("schema_version")
    if isinstance(version, int) and version != SCHEMA_VERSION:
        kind = OLDER if version < SCHEMA_VERSION else NEWER
        return Problem(
            file, kind, f"schema version {version}, this Routewise uses {SCHEMA_VERSION}"
        )
    if name in CELL_TABLES and said.get("key") == file.key and "key_inputs" not in said:
        return Problem(file, OLDER, "from before fragments kept what their key is made of")
    try:
        if name is not None and name not in CELL_TABLES:
            return Problem(file, FOREIGN, f"holds the table {name!r}")
        _, document = read_table(file.path, CELL_TABLES[name or "replay"])
    except RoutewiseError as error:
        if not file.path.exists():
            return None
        return Problem(file, DAMAGED, error.problem.removeprefix(f"{file.path}: "))
    key, inputs = document.get("key"), document.get("key_inputs")
    if key != file.key or file.path != store.path(file.key):
        return Problem(file, FOREIGN, f"it is the fragment of the key {key}")
    if not isinstance(inputs, dict):
        return Problem(file, FOREIGN, "it does not keep what its key is made of")
    try:
        own = fragment_key(inputs)
    except (TypeError, ValueError) as error:
        return Problem(file, FOREIGN, f"its inputs give no key ({error})")
    return None if own == key else Problem(file, FOREIGN, f"its inputs give the key {own}")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def list_store(results: Path, stream: TextIO) -> None:
    """Print one line for each table, route, model and fingerprint of the store.

    Route and model are those of a cell file that uses the fragment; ``-`` where none does.
    """
    usage = read_usage(results / "cells")
    groups: dict[tuple[str, ...], list[StoreFile]] = {}
    for file in store_files(results / "store"):
        if not file.is_fragment:
            continue
        document = read_provenance(file.path)
        route, model = usage.names.get(file.key, ("-", "-"))
        inputs, build = _mapping(document.get("key_inputs")), _mapping(document.get("build"))
        mark = inputs.get("fingerprint") or build.get("fingerprint") or "-"
        group = (str(document.get("table", "unreadable")), route, model, str(mark)[:12])
        groups.setdefault(group, []).append(file)
    if not groups:
        print(f"The store {results / 'store'} is empty.", file=stream)
        return
    lines: list[tuple[str, ...]] = [_TITLES]
    for key, files in sorted(groups.items()):
        newest = duration(min(file.age_s for file in files))
        lines.append((*key, str(len(files)), _megabytes(files), newest))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_TITLES))]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip(), file=stream)


def check_store(results: Path, stream: TextIO, *, remove: bool = False) -> int:
    """Read every fragment, name what is wrong, and return 1 where anything wrong stays, else 0.

    With ``remove``, what is wrong is removed, but no file that is not the store's. What another
    Routewise wrote is named, is not wrong, and stays: no cell of this one adopts it.
    """
    store = Store(results / "store")
    n_read, n_wrong = 0, 0
    others: Counter[str] = Counter()
    for file in store_files(store.root):
        n_read += 1
        problem = find_problem(store, file)
        if problem is None:
            continue
        if not problem.is_wrong:
            others[problem.kind] += 1
            print(f"{file.path}: {problem.kind}: {problem.why}", file=stream)
            continue
        removed = remove and problem.kind != NOT_OURS and _remove(file)
        n_wrong += not removed
        end = " (removed)" if removed else ""
        print(f"{file.path}: {problem.kind}: {problem.why}{end}", file=stream)
    told = "".join(f", {n} {kind}" for kind, n in sorted(others.items()))
    print(f"{n_read} files read, {n_wrong} wrong{told}", file=stream)
    if others[OLDER]:
        print(
            "older ones are kept and not used; `store prune` removes those that no cell file "
            "uses, by age",
            file=stream,
        )
    return 1 if n_wrong else 0


def prune_store(
    results: Path, stream: TextIO, *, older_than_days: float = 0.0, yes: bool = False
) -> None:
    """Remove the fragments that no cell file uses, and writers' left-overs; say what.

    Only what is older than ``older_than_days``, and never what is younger than an hour. Without
    ``yes``, it is only said.
    """
    usage = read_usage(results / "cells")
    least_s = max(YOUNG_S, older_than_days * 86400.0)
    gone = []
    for file in store_files(results / "store"):
        is_unused = file.is_part or (file.is_fragment and file.key not in usage.names)
        if not is_unused or file.age_s < least_s:
            continue
        if yes and not _remove(file):
            continue
        gone.append(file)
        why = "left over" if file.is_part else "no cell uses it"
        print(f"{file.path}: {why}, {duration(file.age_s)} old", file=stream)
    if usage.silent:
        print(
            f"{len(usage.silent)} cell files do not say what they are made of, such as "
            f"{usage.silent[0]}: what only they use counts as unused",
            file=stream,
        )
    done = "removed" if yes else "would be removed; nothing was: give --yes to do it"
    print(f"{len(gone)} files, {_megabytes(gone)} MB: {done}", file=stream)


def _remove(file: StoreFile) -> bool:
    """Remove a file unless it was replaced since it was looked at; say whether it is gone."""
    try:
        found = file.path.lstat()
        if (found.st_ino, found.st_mtime_ns) != file.identity:
            return False
        file.path.unlink()
    except FileNotFoundError:
        pass
    return True


def _megabytes(files: list[StoreFile]) -> str:
    return f"{sum(file.n_bytes for file in files) / 1e6:.1f}"


def _run(arguments: argparse.Namespace) -> int:
    if arguments.action != "list":
        check_format(arguments.results)  # what a newer Routewise uses cannot be told here
    if not (arguments.results / "store").is_dir():
        raise RoutewiseError(
            f"{arguments.results / 'store'}: no such folder",
            "name the results folder with --results",
        )
    if arguments.action == "list":
        list_store(arguments.results, sys.stdout)
    elif arguments.action == "check":
        return check_store(arguments.results, sys.stdout, remove=arguments.remove)
    else:
        days, yes = arguments.older_than_days, arguments.yes
        prune_store(arguments.results, sys.stdout, older_than_days=days, yes=yes)
    return 0


def add_store_parser(commands: Any) -> None:
    """Add the command ``store`` to an ``argparse`` subparsers object."""
    parser = commands.add_parser("store", help="what the result store holds; check and clean it")
    actions = parser.add_subparsers(dest="action", required=True)
    told = actions.add_parser("list", help="what is kept, by table, route, model and fingerprint")
    check = actions.add_parser("check", help="read all; exit code 1 where something is wrong")
    check.add_argument("--remove", action="store_true", help="remove what is wrong")
    prune = actions.add_parser("prune", help="remove what no cell file uses (says it only)")
    prune.add_argument("--older-than-days", type=float, default=30.0, metavar="N")
    prune.add_argument("--yes", action="store_true", help="do remove")
    for action in (told, check, prune):
        action.add_argument("--results", type=Path, default=Path("results"))
        action.set_defaults(run=_run)
