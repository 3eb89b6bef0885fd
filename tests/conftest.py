"""What all tests share: the programs of this environment first on the path, and steady settings."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# cmake, ninja, snakemake and the linters come from this environment, however pytest was started.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
# Figures are drawn without a display.
os.environ.setdefault("MPLBACKEND", "Agg")

# The same examples on every run: a failure seen once is seen again.
settings.register_profile("routewise", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("routewise")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the working tree under test."""
    return REPOSITORY


@pytest.fixture(scope="session", autouse=True)
def own_claims() -> Iterator[Path]:
    """Keep the tests' claims apart from those of studies that run on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="routewise-test-claims-"))
    folder.chmod(0o1777)
    os.environ["ROUTEWISE_CLAIMS"] = str(folder)
    yield folder
    shutil.rmtree(folder)
