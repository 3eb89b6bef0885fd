"""What all tests share: the programs of this environment first on the path, and steady settings."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# cmake, ninja, snakemake and the linters come from this environment, however pytest was started.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
# Figures are drawn without a display.
os.environ.setdefault("MPLBACKEND", "Agg")

# hrx and NPU routes are doubles in the tests: the machine need not have the devices.
os.environ["ROUTEWISE_DEVICES"] = "hrx,npu"

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


# --------------------------------------------------------------------------------- nothing left

#: Names a test in the environment of all that it starts, also of what outlived its parents.
MARK = "ROUTEWISE_TEST_MARK"


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the living processes that a test started, itself or through others."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or gone
            continue
        if wanted in variables:
            found.append(process)
    return found


def own_listeners() -> set[tuple[str, int]]:
    """Return the addresses that this process listens on."""
    return {
        (found.laddr.ip, found.laddr.port)
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[Path]:
    """Fail where what runs within leaves a process, a listening port or a temporary folder.

    Yields the folder that its temporary ones are made in, also by programs that it starts. Only
    what it started itself is looked at, and ended where it was left.
    """
    temporary = folder / "temporary"
    temporary.mkdir()
    listening = own_listeners()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("TMPDIR", str(temporary))
        patch.setenv(MARK, str(folder))
        yield temporary
    left = processes_of(str(folder))
    said = [f"{process.pid}: {process.cmdline()}" for process in left]
    for process in left:
        process.kill()
    assert not said
    assert own_listeners() <= listening
    assert not list(temporary.iterdir())


@pytest.fixture
def leftovers() -> Callable[[Path], AbstractContextManager[Path]]:
    """Return :func:`leaving_nothing` itself."""
    return leaving_nothing


@pytest.fixture
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hold one test to leave nothing; its temporary folders are made in what is returned."""
    with leaving_nothing(tmp_path_factory.mktemp("left")) as temporary:
        yield temporary


@pytest.fixture(scope="module")
def module_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hold a module, whose tests share servers, to leave nothing."""
    with leaving_nothing(tmp_path_factory.mktemp("left")) as temporary:
        yield temporary
