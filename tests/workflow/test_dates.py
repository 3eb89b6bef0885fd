"""The clocks of hosts differ: no date makes anything be measured again."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from workbench import Bench

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

RECEIPT = "results/stock/receipt.json"
#: What a run may make again where dates are wrong: seconds of work, and nothing is measured.
CHEAP = {"build_tables", "write_receipt", "draw_figure", "all"}


def own_builds(bench: Bench) -> None:
    """Give a folder build documents of its own, to be dated; all else stays the session's."""
    folder = bench.results / "builds"
    shared = folder.resolve()
    folder.unlink()
    for document in shared.glob("*/build.json"):
        (folder / document.parent.name).mkdir(parents=True)
        for file in document.parent.iterdir():
            if file != document:
                (folder / document.parent.name / file.name).symlink_to(file)
        shutil.copy2(document, folder / document.parent.name)


def move_dates(paths: Iterable[Path], skew_s: Callable[[], float]) -> None:
    for path in paths:
        moved_s = path.lstat().st_mtime + skew_s()
        os.utime(path, (moved_s, moved_s), follow_symlinks=False)


#: Snakemake compares the content of files below 1 MB and lets their dates be: here of none.
AS_IF_LARGE = ("--max-checksum-file-size", "0")
PARTS = {
    "builds": "builds/*/build.json",
    "models": "models/*/*",
    "prompts": "prompts/*/*",
    "plain cells": "cells/*/*.plain.parquet",
    "other cells": "cells/*/*.w4.parquet",
}


@pytest.mark.parametrize("skew_s", [600, -600])
def test_clocks_that_differ_measure_nothing_again(
    stock: Bench, tmp_path: Path, skew_s: float
) -> None:
    """What one host wrote carries the date of a clock ahead of the other hosts', or behind."""
    for part, pattern in PARTS.items():
        bench = stock.copy(tmp_path / part)
        own_builds(bench)
        dated = sorted(bench.results.glob(pattern))
        assert dated, part
        move_dates(dated, lambda: skew_s)
        # of plain cells the contents decide: what is measured again may have other rows
        left = set(bench.jobs_left(RECEIPT, *(() if "cells" in part else AS_IF_LARGE)))
        assert left <= (CHEAP if "cells" in part else set()), (part, left)


def test_every_date_may_be_wrong(chain: Bench, tmp_path: Path) -> None:
    """Of builds, models, prompts, cells, tables; and what is made again then is the same."""
    bench = chain.copy(tmp_path / "copy")
    own_builds(bench)
    skews = random.Random(3)
    before = bench.receipt
    dates = {}
    for _ in range(3):
        files = [path for path in bench.results.rglob("*") if path.suffix != ".lock"]
        move_dates((path for path in files if path.is_file()), lambda: skews.uniform(-600, 600))
        dates = {path: path.stat().st_mtime_ns for path in bench.cells().values()}
        assert set(bench.jobs_left()) <= CHEAP
    bench.snakemake().check()
    assert {path: path.stat().st_mtime_ns for path in bench.cells().values()} == dates
    assert bench.receipt == before
    assert bench.jobs_left() == {}  # also of what is younger than now


def test_a_cell_that_is_measured_again_reaches_the_tables(stock: Bench, tmp_path: Path) -> None:
    """Dates of cells do count for what is made of them: nothing stale is reported."""
    bench = stock.copy(tmp_path / "copy")
    os.utime(bench.cells()["replay.cpu-stock.small.w4"])
    left = bench.jobs_left(RECEIPT, *AS_IF_LARGE)
    assert left == {"build_tables": 1, "write_receipt": 1}
    left = bench.jobs_left(RECEIPT, "--forcerun", "measure_replay")
    assert left == {"measure_replay": 2, "build_tables": 1, "write_receipt": 1}
