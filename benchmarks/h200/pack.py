"""Pack what a study measured into at most eight files of less than 16 MiB.

One archive has the receipt, the figures and the tables; the others the fragments of the cells and
the logs, as far as they fit. What does not fit is left out and named.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

import yaml
from routewise.errors import RoutewiseError, report_errors

MOST_FILES = 8
MOST_BYTES = 16_000_000


def packed(paths: list[Path], folder: Path) -> bytes:
    """Return a gzipped tar of files, named from ``folder``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in paths:
            tar.add(path, path.relative_to(folder))
    return buffer.getvalue()


def pack_group(name: str, paths: list[Path], folder: Path, room: int) -> dict[str, bytes]:
    """Pack files into at most ``room`` archives of ``MOST_BYTES``; print what is left out."""
    archives: dict[str, bytes] = {}
    waiting = [sorted(paths)] if paths else []
    while waiting:
        group = waiting.pop(0)
        archive = packed(group, folder)
        if len(archive) < MOST_BYTES and len(archives) < room:
            archives[f"{name}-{len(archives)}.tar.gz"] = archive
        elif len(archive) < MOST_BYTES:
            print(f"left out, no room: {len(group)} files from {group[0]}")
        elif len(group) > 1:
            half = len(group) // 2
            waiting[:0] = [group[:half], group[half:]]
        else:
            print(f"left out, too large: {group[0]} ({len(archive):,} bytes)")
    return archives


@report_errors
def main(study_path: Path, into: Path, results: Path) -> None:
    """Pack and print the archives."""
    name = yaml.safe_load(study_path.read_text())["study"]
    outcome = results / name
    cells = list((results / "cells").rglob("*.parquet"))
    logs = [p for p in (results / "logs").rglob("*") if p.is_file()]
    if not cells and not outcome.is_dir():
        raise RoutewiseError(f"nothing of {name} is measured in {results}")
    shown = [p for p in outcome.rglob("*") if p.is_file()]
    room = MOST_FILES
    for group, paths in (("receipt", shown), ("logs", logs), ("cells", cells)):
        for file, content in pack_group(group, paths, results, min(room, 3)).items():
            (into / file).write_bytes(content)
            print(f"{file}: {len(content):,} bytes")
            room -= 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, dest="study_path", required=True)
    parser.add_argument("--into", type=Path, required=True, help="a folder that is there")
    parser.add_argument("--results", type=Path, default=Path("results"))
    raise SystemExit(main(**vars(parser.parse_args())))
