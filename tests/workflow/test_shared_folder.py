"""One working folder and several hosts or people: nothing is measured twice, nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from routewise.inputs import RESULTS_FORMAT
from workbench import Bench, eventually

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

RECEIPT = "results/stock/receipt.json"
MEASURING = "measure_replay.py"
SKEW_S = 600.0


def shift(bench: Bench, pattern: str, seconds: float) -> None:
    """Date files as a host whose clock is that much ahead would have; links themselves too."""
    found = [path for path in bench.results.glob(pattern) if not path.is_dir()]
    assert found, pattern
    for path in found:
        at_s = path.lstat().st_mtime + seconds
        os.utime(path, (at_s, at_s), follow_symlinks=False)


def own_builds(bench: Bench) -> None:
    """Give a copy of a finished run builds of its own, to be dated at will."""
    builds = bench.results / "builds"
    shared = builds.resolve()
    builds.unlink()
    subprocess.run(["cp", "-a", str(shared), str(builds)], check=True)


#: Files by the host that writes them.
WRITERS = {
    "builds": "builds/*/build.json",
    "models": "models/*/*",
    "prompts": "prompts/*/*.parquet",
    "cells": "cells/*/*.parquet",
    "plain cells": "cells/*/*.plain.parquet",
    "tables": "stock/tables/*.parquet",
}


@pytest.mark.parametrize("seconds", [SKEW_S, -SKEW_S])
@pytest.mark.parametrize("written", WRITERS)
def test_a_clock_that_is_off_measures_nothing_again(
    stock: Bench, tmp_path: Path, written: str, seconds: float
) -> None:
    bench = stock.copy(tmp_path / "copy")
    own_builds(bench)
    shift(bench, WRITERS[written], seconds)
    assert bench.jobs_left(RECEIPT) == {}
