"""A server's process behind its keeper, and the environment that it runs in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from routewise import keeper
from routewise.lock import take_lock
from routewise.machine import ENGINE_VARIABLES

#: Variables of the families that decide what a server computes or where: only the route sets them.
SERVER_VARIABLES: tuple[str, ...] = (
    *ENGINE_VARIABLES,
    *("HSA_", "HRX_", "IREE_", "NPU_", "ONEBIT_", "XRT_"),
    *("CUBLAS_", "CUDNN_", "NVIDIA_TF32_", "ROCBLAS_", "HIPBLASLT_", "MIOPEN_"),
    *("MKL_", "OPENBLAS_", "BLIS_", "LD_PRELOAD", "LD_AUDIT"),
)

_SESSION_LIMIT_S = 5.0
_KEEPER_LIMIT_S = 30.0  # it is quick, but for a process that no signal can end


def server_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with exactly these of the engines' variables."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(SERVER_VARIABLES)
    }
    return {**kept, **variables}


_FOLDER_PREFIX = "routewise-server-"
_STALE_S = 300.0


class KeptProcess:
    """A running server behind its keeper. OSError where the command cannot be run."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> None:
        self.name = Path(argv[0]).name
        remove_stale_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        self._folder_lock = os.open(self.folder, os.O_RDONLY)
        take_lock(
            self._folder_lock,
            fcntl.LOCK_SH,
            self.folder,
            "set TMPDIR to a folder of a local disk or of memory",
        )
        self.exit_code: int | None = None
        self.n_strays = 0
        self.n_left: int | None = None
        self.handle = -1
        self._said = b""
        command = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(self.folder)]
        try:
            self.keeper = subprocess.Popen(
                [*command, *argv],
                env={"TMPDIR": str(self.folder), **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        except BaseException:
            self._remove_folder()
            raise
        try:
            said = self._hear(_KEEPER_LIMIT_S)
            if "pid" not in said:
                raise OSError(said.get("what", "its keeper ended"))
            self.pid: int = said["pid"]
            with contextlib.suppress(ProcessLookupError):  # over already, and reaped
                self.handle = os.pidfd_open(self.pid)
        except BaseException:
            self.keeper.terminate()  # it ends all that it started
            self._close()
            raise

    def _hear(self, limit_s: float) -> dict[str, Any]:
        """Return the keeper's next report; an empty one where it ended, or says nothing in time."""
        assert self.keeper.stdout is not None
        stream = self.keeper.stdout.fileno()
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._said:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return {}
            more = os.read(stream, 4096)
            if not more:
                return {}
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def over(self) -> bool:
        """Whether the server's own process has ended."""
        return self.wait(0)

    def wait(self, limit_s: float) -> bool:
        """Wait for the end of the server's own process; return whether it came."""
        if self.handle < 0:
            return True
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))

    def tree(self) -> list[int]:
        """Return the ids of the server's process and of all that it started."""
        return keeper.descendants(self.keeper.pid)

    def end(self, grace_s: float) -> bool:
        """End the server and all that it started; return whether it had to be killed."""
        needed_kill = False
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            if not self.wait(grace_s):
                needed_kill = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        said = self._hear(_KEEPER_LIMIT_S)
        self.exit_code = said.get("exit_code")
        self.n_strays = said.get("n_strays", 0)
        self.n_left = said.get("n_left")
        self._close()
        return needed_kill

    def _close(self) -> None:
        assert self.keeper.stdout is not None
        try:
            self.keeper.wait(_KEEPER_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.keeper.kill()
            self.keeper.wait()
        self.keeper.stdout.close()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._folder_lock >= 0:
            os.close(self._folder_lock)
            self._folder_lock = -1


def remove_stale_folders() -> None:
    """Remove the temporary folders of servers whose job and keeper were both killed.

    A job holds a lock on its server's folder, which ends with it. A young folder is left alone:
    its job may not have locked it yet.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < _STALE_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def end_session(session: int) -> int:
    """Kill what is left of a session; return how many processes would not go."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                found.append(process)
    _, left = psutil.wait_procs(found, timeout=_SESSION_LIMIT_S)
    return len([process for process in left if process.is_running()])
