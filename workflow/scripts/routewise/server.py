"""The life of a server inside the job that uses it: start, readiness, identity, watch, stop, proof.

A server counts as started when the socket that listens on its port is its own, its health address
has said so once *and* one tiny completion was answered: a list of models is there before the model
is, and a wedged server still answers health. It is watched by its process and by progress. It is
stopped with SIGTERM, then SIGKILL of its whole group, and then it is proven that no process, no
port and no device memory is left. A keeper (:mod:`routewise.keeper`) does the same when the job
itself is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, TypeVar

import httpx

from routewise.errors import Misspoken, RoutewiseError
from routewise.health import USUAL, Health
from routewise.identity import ANYONE, compare_log, compare_process, compare_props
from routewise.identity import Identity as Identity  # asked for with a launch
from routewise.port import free_port, is_port_free, listening_inodes, socket_inodes
from routewise.process import KeptProcess, end_session, server_environment
from routewise.symptom import PORT_TAKEN, describe_exit, explain_log

T = TypeVar("T")

PORT_ATTEMPTS = 5
TAIL_LINES = 12
HEALTH_TIMEOUT_S = 5.0
ATTACH_LIMIT_S = 30.0
#: Device memory comes back some time after the process is gone; and drivers keep a little.
MEMORY_LIMIT_S = 10.0
MEMORY_SLACK_MIB = 64
_PORT_LIMIT_S = 5.0
_POLL_FIRST_S = 0.01
_POLL_LONGEST_S = 0.25
_LOG_BYTES = 1 << 17


# --------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Launch:
    """How to start one server.

    ``argv`` may still name ``{host}`` and ``{port}``; ``env`` is what the route and its claim set.
    ``log`` is written anew. ``probe`` does one tiny completion at an address, or raises.
    ``device_memory`` returns the MiB in use on the claimed device, or None where nobody can tell.
    """

    argv: tuple[str, ...]
    log: Path
    probe: Callable[[str], None]
    env: Mapping[str, str] = field(default_factory=dict)
    health: Health = USUAL
    identity: Identity = ANYONE
    host: str = "127.0.0.1"
    start_limit_s: float = 600.0
    stall_s: float = 120.0
    grace_s: float = 10.0
    device_memory: Callable[[], int | None] | None = None


@dataclass(frozen=True)
class StopProof:
    """What was found after a server was stopped.

    ``exit_code`` is None where it could not be read; ``device_memory_free`` where nobody can tell.
    ``n_strays`` processes outlived the server's own and were killed; ``n_processes_left`` live on.
    """

    exit_code: int | None
    needed_kill: bool
    port_free: bool
    n_strays: int
    n_processes_left: int
    device_memory_free: bool | None

    @property
    def clean(self) -> bool:
        """Whether nothing is left."""
        return self.port_free and not self.n_processes_left and self.device_memory_free is not False


def fill_command(template: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Fill a command template but for ``{host}`` and ``{port}``, which :func:`serve` chooses.

    Raises RoutewiseError where it names a placeholder that is not known, or names no port.
    """
    known = {name: str(value) for name, value in values.items()} | {
        "host": "{host}",
        "port": "{port}",
    }
    filled = []
    for part in template:
        for name in re.findall(r"\{(\w+)\}", part):
            if name not in known:
                raise RoutewiseError(
                    f"command {' '.join(template)!r}: unknown placeholder {{{name}}}",
                    "known are " + ", ".join(f"{{{key}}}" for key in sorted(known)),
                )
        filled.append(re.sub(r"\{(\w+)\}", lambda match: known[match[1]], part))
    if not any("{port}" in part for part in filled):
        raise RoutewiseError(
            f"command {' '.join(template)!r}: names no {{port}}",
            "each server gets a free port of its own: write {port} where the command takes it",
        )
    return tuple(filled)


def nvidia_memory_mib(unit: str | None = None) -> int | None:
    """Return the MiB in use on an NVIDIA device (all of them without ``unit``); None: unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if unit is not None:
        command += ["-i", unit]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return sum(int(line) for line in said.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


# --------------------------------------------------------------------------------------- the server


class Server:
    """A server that answers. Made by :func:`serve` or :func:`attach`.

    ``pid`` is that of its first process, None for an endpoint. ``props`` is what ``/props`` said.
    ``found`` is who it turned out to be: digests of its program and libraries, its build and model.
    ``start_s`` is the time from its start until it was ready.
    """

    def __init__(
        self,
        url: str,
        health: Health,
        *,
        stall_s: float,
        launch: Launch | None = None,
        process: KeptProcess | None = None,
        port: int | None = None,
        log_from: int = 0,
    ) -> None:
        self.url = url
        self.health = health
        self.port = port
        self.pid = process.pid if process is not None else None
        self.props: dict[str, Any] | None = None
        self.found: dict[str, Any] = {}
        self.start_s = 0.0
        self.n_attempts = 1
        self.proof: StopProof | None = None
        self._stall_s = stall_s
        self._launch = launch
        self._process = process
        self._log_from = log_from
        self._memory_before: int | None = None
        self._progress_s = time.monotonic()
        self._web = httpx.Client(base_url=url, timeout=HEALTH_TIMEOUT_S, trust_env=False)

    # ------------------------------------------------------------------------------------- watch

    def note_progress(self) -> None:
        """Tell the watchdog that something moved: a reply came, a counter of passes grew."""
        self._progress_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._progress_s

    def ask_health(self) -> int | None:
        """Return the HTTP status of the health address; None where it has none or says nothing."""
        if self.health.path is None:
            return None
        try:
            return self._web.get(self.health.path).status_code
        except httpx.HTTPError:
            return None

    def read_props(self) -> dict[str, Any]:
        """Return what ``/props`` says. Raises RoutewiseError where it says nothing."""
        try:
            answer = self._web.get("/props")
            answer.raise_for_status()
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RoutewiseError(
                f"server at {self.url}: /props cannot be read: {error}",
                "a route whose server has no /props says so in its identity",
            ) from None
        if not isinstance(found, dict):
            raise RoutewiseError(f"server at {self.url}: /props is no object: {found!r}")
        return found

    def check(self) -> None:
        """Raise RoutewiseError where the server has died, or made no progress for too long.

        To be called while requests are in flight, and :meth:`note_progress` with each reply: a
        server that nobody asks anything makes no progress either.
        """
        self._check_alive()
        if self.idle_s < self._stall_s:
            return
        status = self.ask_health()
        if status is None:
            words = "its health address does not answer"
        elif status in self.health.alive:
            words = f"its health address still says {status}"
        else:
            words = f"its health address says {status}"
        raise RoutewiseError(
            f"server at {self.url}: no progress for {self.idle_s:.0f} s, and {words}"
            + self._tail_text(),
            "see the log; where the machine is only slow, raise the route's stall_s "
            f"(now {self._stall_s:g})",
        )

    def _check_alive(self) -> None:
        if self._process is not None and self._process.over and self.proof is None:
            self.stop()
            assert self.proof is not None
            raise RoutewiseError(
                f"server at {self.url} died ({describe_exit(self.proof.exit_code)})"
                + self._tail_text(),
                self._hint() or "see the log",
            )

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns, but raise as soon as the server dies or stalls.

        The watchdog's clock starts anew. Raises what :meth:`check` raises; ``work`` is cancelled.
        """
        self.note_progress()
        task = asyncio.ensure_future(work)
        trouble = asyncio.ensure_future(self._trouble())
        try:
            await asyncio.wait({task, trouble}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and task.exception() is not None:
                # a broken connection is seen a moment before the death that broke it
                await asyncio.wait({trouble}, timeout=0.5)
            if trouble.done():
                await trouble
            return await task
        finally:
            for other in (task, trouble):
                other.cancel()
            await asyncio.gather(task, trouble, return_exceptions=True)

    async def _trouble(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        handle = -1
        if self.proof is not None:
            raise RoutewiseError(f"server at {self.url} was stopped before it was asked")
        if self._process is not None:
            self._check_alive()
            # a duplicate: stopping the server closes the other while this one is still watched
            handle = os.dup(self._process.handle)
            loop.add_reader(handle, ended.set)
        try:
            while True:
                pause_s = max(self._stall_s - self.idle_s, 0.01)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), min(pause_s, 1.0))
                if self.proof is not None:
                    raise RoutewiseError(f"server at {self.url} was stopped while it was asked")
                await asyncio.to_thread(self.check)
        finally:
            if handle >= 0:
                loop.remove_reader(handle)
                os.close(handle)

    def check_ours(self) -> None:
        """Raise RoutewiseError where the server died, or another came to share its port.

        Cheap: before replies are kept it says whose they are.
        """
        if self.proof is not None or self._process is None:
            return
        self._check_alive()
        try:
            _owns_port(self, self._process)
        except _PortLostError:
            raise RoutewiseError(
                f"server at {self.url}: another process came to listen on the same port, "
                "so some replies may be its own",
                "find it with ss -ltnp, end it and run again",
            ) from None

    # --------------------------------------------------------------------------------------- log

    def tail(self, n_lines: int = TAIL_LINES) -> str:
        """Return the last lines of the server's log; '' for an endpoint."""
        return "\n".join(self._log_text().splitlines()[-n_lines:])

    def _log_text(self) -> str:
        if self._launch is None:
            return ""
        try:
            with self._launch.log.open("rb") as stream:
                end = stream.seek(0, os.SEEK_END)
                stream.seek(max(self._log_from, end - _LOG_BYTES))
                return stream.read().decode(errors="replace")
        except OSError:
            return ""

    def _tail_text(self) -> str:
        tail = self.tail()
        if self._launch is None:
            return ""
        said = f"the last lines of {self._launch.log}:\n" if tail else f"{self._launch.log}: empty"
        indented = "\n".join(f"    {line}" for line in tail.splitlines())
        meaning = explain_log(self._log_text())
        words = f"\n  this usually means: {meaning.meaning}" if meaning is not None else ""
        return f"\n  {said}{indented}{words}"

    def _hint(self) -> str | None:
        meaning = explain_log(self._log_text())
        return meaning.hint if meaning is not None else None

    # -------------------------------------------------------------------------------------- stop

    def stop(self) -> StopProof:
        """Stop the server and prove that it is gone; the second call returns the first's proof.

        SIGTERM, the grace, SIGKILL of the group; then every process that it left. An endpoint is
        never stopped: its proof says only that nothing of ours is left.
        """
        if self.proof is not None:
            return self.proof
        self._web.close()
        if self._process is None or self._launch is None:
            self.proof = StopProof(None, False, True, 0, 0, None)
            return self.proof
        needed_kill = self._process.end(self._launch.grace_s)
        left = self._process.n_left
        if left is None:  # the keeper was killed: look for what the server's session still holds
            left = end_session(self._process.pid)
        host, port = self._launch.host, self.port or 0
        self.proof = StopProof(
            exit_code=self._process.exit_code,
            needed_kill=needed_kill,
            # who listens when all of its processes are gone is somebody else, given the port anew
            port_free=_port_comes_free(host, port) or not left,
            n_strays=self._process.n_strays,
            n_processes_left=left,
            device_memory_free=self._memory_free(),
        )
        return self.proof

    def _memory_free(self) -> bool | None:
        assert self._launch is not None
        read, before = self._launch.device_memory, self._memory_before
        if read is None or before is None:
            return None

        def came_back() -> bool:
            now = read()
            return now is not None and now <= before + MEMORY_SLACK_MIB

        return _wait_until(came_back, MEMORY_LIMIT_S)


def _port_comes_free(host: str, port: int) -> bool:
    """Wait for a port; in vain where somebody listens, who must be another by now."""
    _wait_until(lambda: is_port_free(host, port) or bool(listening_inodes(port)), _PORT_LIMIT_S)
    return is_port_free(host, port)


def _wait_until(question: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -------------------------------------------------------------------------------------- the start


class _PortLostError(Exception):
    """The port belongs to another process, wholly or in part."""


@contextlib.contextmanager
def serve(launch: Launch) -> Iterator[Server]:
    """Start a server, yield it once it is ready and is who it should be, and stop it.

    Within, SIGTERM ends the job as an exception does, so that the server is stopped too. Raises
    RoutewiseError where the command cannot be run, the server ends or is not ready in time (with
    the last lines of its log and what they usually mean), is another than asked for, or leaves
    something behind.
    """
    command = _runnable(launch)
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with _exit_on_sigterm(), launch.log.open("wb", buffering=0) as log:
        server = _start_on_a_port(launch, command, log)
        try:
            server.note_progress()
            yield server
            server.check_ours()
        except BaseException:
            server.stop()
            raise
        proof = server.stop()
    if not proof.clean:
        raise RoutewiseError(
            f"server at {server.url} was stopped and left something behind: {proof}",
            "see who holds the port (ss -ltnp) and the device, and end it",
        )


@contextlib.contextmanager
def attach(
    url: str,
    probe: Callable[[str], None],
    *,
    health: Health = USUAL,
    identity: Identity = ANYONE,
    stall_s: float = 120.0,
    limit_s: float = ATTACH_LIMIT_S,
) -> Iterator[Server]:
    """Yield a server that already runs, wherever it does. It is never stopped.

    Raises RoutewiseError where it does not answer within ``limit_s``, or is another than asked for.
    """
    server = Server(url.rstrip("/"), health, stall_s=stall_s)
    try:
        _wait_until_ready(server, probe, time.monotonic(), limit_s)
        _read_identity(server, identity)
        server.note_progress()
        yield server
    finally:
        server.stop()


def _runnable(launch: Launch) -> list[str]:
    """Return the command with its program's full path; RoutewiseError where there is none."""
    program = launch.argv[0]
    path = server_environment(launch.env).get("PATH", os.defpath)
    found = shutil.which(program, path=path)
    if found is not None:
        return [found, *launch.argv[1:]]
    if os.sep in program:
        if not Path(program).exists():
            raise RoutewiseError(
                f"{program}: no such program", "check the first word of the route's command"
            )
        raise RoutewiseError(f"{program}: not executable", f"chmod +x {program}")
    raise RoutewiseError(
        f"{program}: command not found on the PATH ({path})",
        "give its full path in the route's command, or set PATH in the route's env",
    )


def _start_on_a_port(launch: Launch, command: Sequence[str], log: IO[bytes]) -> Server:
    started_s = time.monotonic()
    environment = server_environment(launch.env)
    if "TMPDIR" not in launch.env:
        environment.pop("TMPDIR", None)  # the server gets a folder of its own, removed at its end
    for attempt in range(1, PORT_ATTEMPTS + 1):
        port = free_port(launch.host)
        memory = launch.device_memory() if launch.device_memory is not None else None
        log_from = log.seek(0, os.SEEK_END)
        argv = [
            part.replace("{port}", str(port)).replace("{host}", launch.host) for part in command
        ]
        try:
            process = KeptProcess(argv, environment, log)
        except OSError as error:
            raise RoutewiseError(
                f"{argv[0]}: cannot be started: {error}",
                "a script needs a first line that names an interpreter which exists here",
            ) from None
        server = Server(
            f"http://{launch.host}:{port}",
            launch.health,
            stall_s=launch.stall_s,
            launch=launch,
            process=process,
            port=port,
            log_from=log_from,
        )
        server.n_attempts = attempt
        server._memory_before = memory
        try:
            _wait_until_ready(server, launch.probe, started_s, launch.start_limit_s)
            _read_identity(server, launch.identity)
        except _PortLostError as lost:
            server.stop()
            log.write(f"routewise: port {port}: {lost}; trying another\n".encode())
            continue
        except BaseException:
            server.stop()
            raise
        server.start_s = time.monotonic() - started_s
        return server
    raise RoutewiseError(
        f"{command[0]}: {PORT_ATTEMPTS} ports in turn were taken by other processes",
        f"see {launch.log} and who listens here: ss -ltnp",
    )


def _wait_until_ready(
    server: Server, probe: Callable[[str], None], started_s: float, limit_s: float
) -> None:
    """Wait for the port, for health, and for one tiny completion."""
    deadline = started_s + limit_s
    pause_s = _POLL_FIRST_S
    ready = server.health.path is None
    seen: list[str] = []  # what was seen last: of the port, of health, of the completion
    while True:
        if server._process is not None:
            _check_start(server)
            listening = _owns_port(server, server._process)
        else:
            listening = _connects(server.url)
            if not listening:
                raise RoutewiseError(
                    f"endpoint {server.url}: nothing listens there",
                    "start the server, or correct the route's endpoint",
                )
        if not listening:
            seen = ["its port was never opened"]
        elif not ready:
            status = server.ask_health()
            ready = status in server.health.ready
            words = "did not answer" if status is None else f"said {status}"
            seen = [f"its port is open, its health address {words}"]
        if listening and ready:
            error = _probe(server, probe, deadline)
            if error is None:
                if server._process is not None and not _owns_port(server, server._process):
                    raise _PortLostError("another process answers")
                return
            if server.health.path is not None:
                seen = ["its health address said ready, but one tiny completion " + error]
            else:
                seen = ["one tiny completion " + error]
        if time.monotonic() > deadline:
            _fail_start(server, limit_s, seen[0])
        if server._process is not None:
            server._process.wait(pause_s)
        else:
            time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_LONGEST_S)


def _connects(url: str) -> bool:
    where = httpx.URL(url)
    port = where.port or (443 if where.scheme == "https" else 80)
    try:
        socket.create_connection((where.host, port), timeout=HEALTH_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _check_start(server: Server) -> None:
    """Raise where the server's process has ended before it was ready."""
    process = server._process
    if process is None or not process.over:
        return
    proof = server.stop()
    text = server._log_text()
    if re.search(PORT_TAKEN.pattern, text, re.IGNORECASE):
        raise _PortLostError("taken")
    meaning = explain_log(text)
    raise RoutewiseError(
        f"{process.name}: the server ended at its start "
        f"({describe_exit(proof.exit_code)})" + server._tail_text(),
        meaning.hint if meaning is not None else "run the command by hand; the log names it",
    )


def _fail_start(server: Server, limit_s: float, seen: str) -> NoReturn:
    text = server._tail_text()
    hint = server._hint()
    if server._process is None:
        raise RoutewiseError(
            f"endpoint {server.url}: not ready after {limit_s:g} s: {seen}",
            "check the address and that the server there has loaded its model",
        )
    server.stop()
    raise RoutewiseError(
        f"server at {server.url}: not ready after {limit_s:g} s: {seen}{text}",
        hint or "where the model is only slow to load, raise the route's start_limit_s",
    )


def _owns_port(server: Server, process: KeptProcess) -> bool:
    """Return whether the server listens on its port.

    Raises _PortLostError where another process listens there, alone or beside it (SO_REUSEPORT).
    """
    assert server.port is not None
    listening = listening_inodes(server.port)
    if not listening:
        return False
    own = set().union(*(socket_inodes(pid) for pid in process.tree()))
    if listening - own:
        # the listing and the look at the processes are two moments: a socket may have come between
        again = listening_inodes(server.port)
        own |= set().union(*(socket_inodes(pid) for pid in process.tree()))
        if again - own:
            raise _PortLostError("another process listens there too")
    return bool(listening & own)


def _probe(server: Server, probe: Callable[[str], None], deadline: float) -> str | None:
    """Ask for one tiny completion; return None where it came, else what happened.

    Raises RoutewiseError where it came and is not what the route promises.
    """
    outcome: list[BaseException | None] = []

    def ask() -> None:
        try:
            probe(server.url)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    # in a thread: a wedged server never answers, and the probe may wait for ever
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if server._process is not None:
            _check_start(server)
        if time.monotonic() > deadline and thread.is_alive():
            return "was never answered"
    error = outcome[0]
    if isinstance(error, Misspoken):
        tail = server._tail_text()
        server.stop()
        raise RoutewiseError(f"{error.problem}{tail}", error.hint) from None
    return None if error is None else f"failed: {error}"


def _read_identity(server: Server, asked: Identity) -> None:
    """Read back who the server is and compare; RoutewiseError where it is another."""
    if asked.props:
        server.props = server.read_props()
        server.found |= compare_props(server.url, server.props, asked)
    if server._process is not None:
        pid = _listening_pid(server, server._process)
        server.found |= compare_process(server.url, pid, asked)
        compare_log(server.url, server._log_text(), asked)


def _listening_pid(server: Server, process: KeptProcess) -> int:
    """Return the process that holds the server's port."""
    assert server.port is not None
    listening = listening_inodes(server.port)
    for pid in process.tree():
        if listening & socket_inodes(pid):
            return pid
    raise _PortLostError("nobody listens there any more")


# --------------------------------------------------------------------------------------- signals


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exit, so that what is open is closed; only where nobody handles it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        # a second one must not cut the stopping short; the keeper ends all if this process dies
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
