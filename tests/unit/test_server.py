"""A server's life with doubles of servers: each fault ends as it should and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from routewise import server as server_module
from routewise.errors import RoutewiseError
from routewise.health import Health
from routewise.identity import Identity
from routewise.port import free_port, is_port_free, listening_inodes, socket_inodes
from routewise.process import server_environment
from routewise.server import (
    Launch,
    Server,
    StopProof,
    attach,
    fill_command,
    nvidia_memory_mib,
    serve,
)
from routewise.symptom import MEANINGS

SERVERS = Path(__file__).resolve().parent.parent / "servers"
LLAMA = SERVERS / "llama_double.py"
#: The doubles need the standard library alone, and start sooner without the rest.
PYTHON = (sys.executable, "-I", "-S")
#: How long a test waits for what must happen; nothing here is a test of speed.
LIMIT_S = 60.0
CLEAN = StopProof(0, False, True, 0, 0, None)

MakeLaunch = Callable[..., Launch]


def probe(url: str) -> None:
    body = {"prompt": [1, 2, 3], "n_predict": 1}
    httpx.post(f"{url}/completion", json=body, timeout=LIMIT_S).raise_for_status()


@pytest.fixture(autouse=True)
def temporary(nothing_is_left: Path) -> Path:
    """Return the folder that temporary folders are made in."""
    return nothing_is_left


class Clock:
    """The time that :mod:`routewise.server` knows: a test lets a limit pass by saying so.

    So a start may be given up once the double was seen as it should be, however long that took.
    """

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s

    def sleep(self, pause_s: float) -> None:
        time.sleep(pause_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the module under test."""
    found = Clock()
    monkeypatch.setattr(server_module, "time", found)
    return found


@pytest.fixture
def health_ends_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limit of a start pass with the first answer of the health address."""
    ask_health = Server.ask_health

    def ask(server: Server) -> int | None:
        status = ask_health(server)
        clock.passed_s += LIMIT_S if status is not None else 0.0
        return status

    monkeypatch.setattr(Server, "ask_health", ask)


def is_released(port: int) -> bool:
    """Return whether nobody holds a port, or a stranger who was given it since."""
    return is_port_free("127.0.0.1", port) or not (
        listening_inodes(port) & socket_inodes(os.getpid())
    )


@pytest.fixture
def launch(tmp_path: Path) -> MakeLaunch:
    """Return a maker of launches of llama_double: (*flags, **fields of Launch)."""

    def make(*flags: str, **fields: Any) -> Launch:
        argv = (*PYTHON, str(LLAMA), "--port", "{port}", "--host", "{host}", *flags)
        found: dict[str, Any] = {
            "argv": argv,
            "log": tmp_path / "server.log",
            "probe": probe,
            "start_limit_s": LIMIT_S,
            "stall_s": LIMIT_S,
        }
        return Launch(**{**found, **fields})

    return make


def failure(launch: Launch) -> RoutewiseError:
    """Return the error that a start must end in."""
    with pytest.raises(RoutewiseError) as caught, serve(launch):
        pytest.fail("it started")
    return caught.value


def failure_in_use(launch: Launch, use: Callable[[Server], object]) -> tuple[str, StopProof]:
    """Return the error that a server's use must end in, and the proof of its end."""
    servers: list[Server] = []

    def run() -> None:
        with serve(launch) as server:
            servers.append(server)
            use(server)

    with pytest.raises(RoutewiseError) as caught:
        run()
    (server,) = servers
    assert server.proof is not None
    return str(caught.value), server.proof


def pid_of(server: Server) -> int:
    assert server.pid is not None
    return server.pid


def complete(url: str, n_predict: int = 4) -> dict[str, Any]:
    body = {"prompt": [1, 2, 3], "n_predict": n_predict, "n_probs": 1, "return_tokens": True}
    answer = httpx.post(f"{url}/completion", json=body, timeout=LIMIT_S)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def ask(url: str) -> int:
    body = {"prompt": [1, 2, 3], "n_predict": 4}
    async with httpx.AsyncClient(timeout=LIMIT_S) as web:
        return (await web.post(f"{url}/completion", json=body)).status_code


def guarded_ask(server: Server) -> None:
    asyncio.run(server.guard(ask(server.url)))


def kill(pid: int, number: int) -> None:
    os.kill(pid, number)
    assert gone(pid)


def gone(pid: int) -> bool:
    """Wait for the end of a process that is not ours; return whether it came."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(LIMIT_S * 1000))
    finally:
        os.close(handle)


def wait_for(question: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not question():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -------------------------------------------------------------------------------- start and stop


def test_a_server_starts_answers_and_is_gone(launch: MakeLaunch, temporary: Path) -> None:
    with serve(launch("--parallel", "3")) as server:
        assert complete(server.url)["tokens_predicted"] == 4
        assert server.props is not None
        assert server.props["total_slots"] == 3
        assert server.ask_health() == 200
        assert server.n_attempts == 1
        assert server.start_s > 0
        assert len(list(temporary.iterdir())) == 1
        server.check()
        assert server.pid is not None
        assert server.port is not None
        assert not is_port_free("127.0.0.1", server.port)
    assert server.proof == CLEAN
    assert server.proof.clean
    assert gone(server.pid)
    assert is_released(server.port)
    assert "server is listening" in server.tail()
    assert server.stop() is server.proof


def test_the_server_is_stopped_when_its_user_fails(launch: MakeLaunch) -> None:
    with pytest.raises(ZeroDivisionError), serve(launch()) as server:
        raise ZeroDivisionError
    assert server.proof == CLEAN


def test_a_server_has_a_session_of_its_own(launch: MakeLaunch) -> None:
    """Ctrl-C in a terminal reaches the job alone, which then stops the server."""
    with serve(launch()) as server:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_a_server_deaf_to_sigterm_is_killed(launch: MakeLaunch) -> None:
    with serve(launch("--ignore-sigterm", grace_s=0.2)) as server:
        pass
    assert server.proof is not None
    assert server.proof.needed_kill
    assert server.proof.exit_code == -signal.SIGKILL
    assert server.proof.clean


def test_what_a_server_started_does_not_outlive_it(launch: MakeLaunch, tmp_path: Path) -> None:
    """Not even in a session of its own, deaf to SIGTERM."""
    pids = tmp_path / "pids"
    with serve(launch("--leave-child", "--pid-file", str(pids))) as server:
        parent, child = map(int, pids.read_text().split())
        assert parent == server.pid
        assert psutil.pid_exists(child)
    assert server.proof == StopProof(0, False, True, 1, 0, None)
    assert gone(child)


def test_a_server_started_by_a_thread_outlives_the_thread(launch: MakeLaunch) -> None:
    """A parent-death signal that hung on the thread would end it."""
    context = serve(launch())
    with ThreadPoolExecutor(1) as threads:
        server = threads.submit(context.__enter__).result()
    try:
        complete(server.url)
        server.check()
    finally:
        context.__exit__(None, None, None)
    assert server.proof == CLEAN


def test_two_launches_at_once(launch: MakeLaunch, tmp_path: Path) -> None:
    together = threading.Barrier(2)

    def start(number: int) -> tuple[int | None, str]:
        together.wait()
        with serve(launch("--salt", str(number), log=tmp_path / f"{number}.log")) as server:
            text = complete(server.url)["content"]
            together.wait()
            return server.port, text

    with ThreadPoolExecutor(2) as threads:
        (port_a, text_a), (port_b, text_b) = threads.map(start, range(2))
    assert port_a != port_b
    assert text_a != text_b  # each had its own


# ------------------------------------------------------------------------------------------ ports


def ports_in_turn(monkeypatch: pytest.MonkeyPatch, *first: int) -> None:
    """Let these be chosen first."""
    queue = list(first)
    monkeypatch.setattr(
        server_module, "free_port", lambda host: queue.pop(0) if queue else free_port(host)
    )


@pytest.fixture
def foreign(launch: MakeLaunch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Return a starter of somebody else's server: (*flags, port=…) -> its port."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, port: int = 0) -> int:
        port = port or free_port()
        argv = [part.replace("{port}", str(port)) for part in launch(*flags).argv]
        argv = [part.replace("{host}", "127.0.0.1") for part in argv]
        process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        started.append(process)
        wait_for(lambda: bool(socket_inodes(process.pid) & listening_inodes(port)))
        return port

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_another_port_is_taken_where_the_first_is_taken(
    launch: MakeLaunch, foreign: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = foreign("--salt", "foreign")
    ports_in_turn(monkeypatch, taken)
    with serve(launch()) as server:
        assert server.port != taken
        assert server.n_attempts == 2
        assert server.start_s > 0
    assert f"port {taken}: " in (server_log := server._launch.log.read_text())  # type: ignore[union-attr]
    assert "trying another" in server_log


def test_a_port_that_another_server_shares_is_left(
    launch: MakeLaunch, foreign: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both believe that they own it: half of the requests would go to the other."""
    shared = foreign("--share-port", "--salt", "foreign")
    ports_in_turn(monkeypatch, shared)
    with serve(launch("--share-port")) as server:
        assert server.port != shared
        assert server.n_attempts == 2


def test_a_server_that_comes_to_share_the_port_later_is_seen(
    launch: MakeLaunch, foreign: Callable[..., int]
) -> None:
    said, _ = failure_in_use(
        launch("--share-port"), lambda server: foreign("--share-port", port=server.port)
    )
    assert "another process came to listen" in said
    assert "ss -ltnp" in said


def test_a_server_that_says_taken_thrice_gets_the_fourth_port(
    launch: MakeLaunch, tmp_path: Path
) -> None:
    with serve(launch("--taken", "3", "--taken-file", str(tmp_path / "count"))) as server:
        assert server.n_attempts == 4


def test_a_server_that_never_gets_a_port_is_given_up(launch: MakeLaunch) -> None:
    said = "echo could not bind HTTP server socket, port: {port} >&2; exit 1"
    error = failure(launch(argv=("sh", "-c", said)))
    assert "5 ports in turn" in error.problem


# ------------------------------------------------------------------------------------- readiness


def test_ready_is_not_what_the_list_of_models_says(launch: MakeLaunch) -> None:
    asked: list[float] = []
    loading_s = 0.5

    def counting(url: str) -> None:
        asked.append(time.monotonic())
        assert httpx.get(f"{url}/v1/models").status_code == 200
        probe(url)

    with serve(launch("--loading", str(loading_s), "--early-models", probe=counting)) as server:
        assert server.start_s >= loading_s
        assert len(asked) == 1  # nothing is asked of a model that is not there


@pytest.mark.usefixtures("health_ends_it")
def test_a_model_that_loads_for_ever(launch: MakeLaunch) -> None:
    error = failure(launch("--never-ready", "--early-models"))
    assert f"not ready after {LIMIT_S:g} s" in error.problem
    assert "health address said 503" in error.problem
    assert "server is listening" in error.problem  # the log's tail
    assert "start_limit_s" in str(error.hint)


def test_a_server_that_is_healthy_and_wedged_is_not_ready(launch: MakeLaunch, clock: Clock) -> None:
    def ask_in_vain(url: str) -> None:
        clock.passed_s += LIMIT_S
        probe(url)

    error = failure(launch("--wedged", "0", probe=ask_in_vain))
    assert "health address said ready, but one tiny completion was never answered" in error.problem


def test_a_server_that_opens_no_port(launch: MakeLaunch) -> None:
    argv = (sys.executable, "-c", "import time; time.sleep(600)", "{port}")
    error = failure(launch(argv=argv, start_limit_s=0.3))
    assert "its port was never opened" in error.problem


def test_a_failing_probe_is_named(launch: MakeLaunch, clock: Clock) -> None:
    def refuse(url: str) -> None:
        clock.passed_s += LIMIT_S
        raise ValueError("no such prompt")

    error = failure(launch(probe=refuse))
    assert "one tiny completion failed: no such prompt" in error.problem


def test_503_when_idle_is_ready_where_the_route_says_so(launch: MakeLaunch) -> None:
    with serve(launch("--stalled", "start", health=Health(ready=(200, 503)))) as server:
        assert server.ask_health() == 503
        server.check()
    assert server.proof == CLEAN


@pytest.mark.usefixtures("health_ends_it")
def test_503_when_idle_is_not_ready_where_it_does_not(launch: MakeLaunch) -> None:
    error = failure(launch("--stalled", "start"))
    assert "said 503" in error.problem


def test_a_route_without_health_is_ready_with_its_first_reply(launch: MakeLaunch) -> None:
    with serve(launch("--stalled", "start", health=Health(path=None))) as server:
        assert server.ask_health() is None


# ------------------------------------------------------------------------------- death at the start

DEATHS = {
    "port": None,  # has its own tests: another port is tried
    "architecture": "llama_model_load: error loading model: unknown model architecture: 'new'",
    "flag": "error: invalid argument: --flash",
    "device": "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected",
    "library": "llama-server: error while loading shared libraries: libllama.so.0: cannot open "
    "shared object file: No such file or directory",
    "memory": "ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory",
    "damaged": "gguf_init_from_reader: invalid magic characters: 'W.N?', expected 'GGUF'",
    "permission": "failed to open model.gguf (Permission denied)",
    "missing": "gguf_init_from_file: failed to open GGUF file 'm' (No such file or directory)",
    "instruction": "Illegal instruction (core dumped)",
    "assertion": "llama-vocab.cpp:3: GGML_ASSERT(type != LLAMA_VOCAB_TYPE_NONE) failed",
}


@pytest.mark.parametrize("meaning", MEANINGS, ids=lambda meaning: meaning.name)
def test_death_at_the_start_is_explained(launch: MakeLaunch, meaning: Any) -> None:
    line = DEATHS[meaning.name]
    if line is None:
        return
    argv = ("sh", "-c", 'echo "$1" >&2; exit 3', "sh", line, "{port}")
    error = failure(launch(argv=argv))
    assert line in error.problem
    assert "ended at its start (exit code 3)" in error.problem
    assert f"this usually means: {meaning.meaning}" in error.problem
    assert error.hint == meaning.hint


def test_a_death_that_nobody_knows_shows_the_last_lines_alone(launch: MakeLaunch) -> None:
    lines = [f"line {number} of the log" for number in range(30)]
    error = failure(launch(*(part for line in lines for part in ("--die-at-start", line))))
    assert lines[-1] in error.problem
    assert lines[0] not in error.problem
    assert "usually means" not in error.problem


def test_the_doubles_refuse_what_the_real_ones_refuse(launch: MakeLaunch, tmp_path: Path) -> None:
    assert "does not know a flag" in failure(launch("--no-such-flag")).problem
    assert "a file is missing" in failure(launch("-m", str(tmp_path / "no.gguf"))).problem


# --------------------------------------------------------------------------------------- the watch


def test_death_in_the_middle_of_a_reply_is_noticed(launch: MakeLaunch) -> None:
    said, proof = failure_in_use(launch("--die-mid-reply", "1", "--exit-code", "7"), guarded_ask)
    assert "died (exit code 7)" in said
    assert "server is listening" in said  # the log's tail
    assert proof.clean


def test_a_server_killed_while_it_is_asked_is_noticed_at_once(launch: MakeLaunch) -> None:
    """Though the request would wait: the end of the process is enough."""

    async def kill_and_wait(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        await asyncio.Event().wait()

    said, proof = failure_in_use(
        launch(), lambda server: asyncio.run(server.guard(kill_and_wait(pid_of(server))))
    )
    assert "died (signal 9 (SIGKILL)" in said
    assert proof.exit_code == -signal.SIGKILL


def test_a_death_between_two_requests_is_noticed(launch: MakeLaunch) -> None:
    def use(server: Server) -> None:
        kill(pid_of(server), signal.SIGSEGV)
        server.check()
        pytest.fail("it was not noticed")

    said, _ = failure_in_use(launch(), use)
    assert "died" in said
    assert "the server crashed" in said


def test_a_death_that_nobody_looked_for_is_noticed_at_the_end(launch: MakeLaunch) -> None:
    said, _ = failure_in_use(launch(), lambda server: kill(pid_of(server), signal.SIGKILL))
    assert "died" in said


def test_a_wedged_server_is_noticed_though_it_is_healthy(launch: MakeLaunch) -> None:
    said, proof = failure_in_use(launch("--wedged", "1", stall_s=0.3), guarded_ask)
    assert "no progress for" in said
    assert "still says 200" in said
    assert proof.clean


def test_a_slow_server_that_moves_is_not_stalled(launch: MakeLaunch, clock: Clock) -> None:
    async def slow(server: Server) -> str:
        for _ in range(8):
            clock.passed_s += LIMIT_S / 2
            await asyncio.to_thread(server.check)
            server.note_progress()
        return "done"

    with serve(launch()) as server:
        assert asyncio.run(server.guard(slow(server))) == "done"
        clock.passed_s += LIMIT_S
        with pytest.raises(RoutewiseError, match="no progress"):
            server.check()


def test_the_error_of_the_work_itself_passes_the_guard(launch: MakeLaunch) -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with serve(launch()) as server, pytest.raises(KeyError, match="mine"):
        asyncio.run(server.guard(fail()))


def test_work_is_guarded_in_vain_after_the_stop(launch: MakeLaunch) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with serve(launch()) as server:
        server.stop()
        with pytest.raises(RoutewiseError, match="was stopped"):
            asyncio.run(server.guard(wait()))


# -------------------------------------------------------------------------------- deaths of the job

JOB = """
import signal, sys
from pathlib import Path
import httpx
from routewise.server import Launch, serve

def probe(url):
    body = {"prompt": [1], "n_predict": 1}
    httpx.post(url + "/completion", json=body, timeout=60).raise_for_status()

# a shell starts what runs in its background deaf to Ctrl-C, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
with serve(Launch(argv=tuple(sys.argv[2:]), log=Path(sys.argv[1]), probe=probe)) as server:
    try:
        print(server.pid, server.port, server._process.keeper.pid, flush=True)
        sys.stdin.read()
    finally:
        print("leaving", flush=True)
print("left", server.proof.clean, flush=True)
"""


class Job:
    """A process that serves until it is told or made to end."""

    def __init__(self, launch: Launch, temporary: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(launch.log), *launch.argv],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.server, self.port, self.keeper = map(int, line.split())

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Send a signal, or end its standard input; return its exit code and what it said."""
        if number is not None:
            self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said


@pytest.mark.parametrize("faults", [(), ("--ignore-sigterm", "--leave-child")])
def test_a_job_killed_with_sigkill_leaves_nothing(
    launch: MakeLaunch, temporary: Path, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    pids = tmp_path / "pids"
    job = Job(launch("--pid-file", str(pids), *faults), temporary)
    assert list(temporary.iterdir())
    assert job.end(signal.SIGKILL) == (-signal.SIGKILL, "")
    assert gone(job.keeper)
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert is_released(job.port)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_job_told_to_end_stops_its_server(
    launch: MakeLaunch, temporary: Path, number: int, code: int
) -> None:
    job = Job(launch(), temporary)
    assert job.end(number) == (code, "leaving\n")
    assert gone(job.server)
    assert is_released(job.port)


def test_a_job_that_ends_by_itself_stops_its_server(launch: MakeLaunch, temporary: Path) -> None:
    job = Job(launch(), temporary)
    assert job.end() == (0, "leaving\nleft True\n")
    assert gone(job.server)


def test_a_server_whose_keeper_is_killed_ends_too(launch: MakeLaunch) -> None:
    def use(server: Server) -> None:
        assert server._process is not None
        server._process.keeper.kill()
        assert gone(pid_of(server))
        server.check()
        pytest.fail("it was not noticed")

    said, proof = failure_in_use(launch(), use)
    assert "died (exit code unknown)" in said
    assert proof.clean


def test_keeper_and_job_killed_at_once_leave_no_server(launch: MakeLaunch, temporary: Path) -> None:
    job = Job(launch(), temporary)
    os.kill(job.process.pid, signal.SIGSTOP)
    os.kill(job.keeper, signal.SIGKILL)
    job.end(signal.SIGKILL)
    assert gone(job.server)
    for folder in temporary.iterdir():  # nobody was left to remove it
        folder.rmdir()


# ---------------------------------------------------------------------------------------- identity


def test_another_model_than_asked_for_is_refused(launch: MakeLaunch, tmp_path: Path) -> None:
    asked, served = tmp_path / "asked.gguf", tmp_path / "served.gguf"
    served.touch()
    error = failure(launch("-m", str(served), identity=Identity(model=asked)))
    assert "is not the one asked for: model" in error.problem
    assert served.name in error.problem
    assert asked.name in error.problem
    with serve(launch("-m", str(served), identity=Identity(model=served))) as server:
        assert server.found["model"] == served.name


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        (Identity(parallel=8), "slots (total_slots of /props) is 4, wanted 8"),
        (Identity(slot_context=512), "n_ctx of /props) is 1024, wanted 512"),
        (Identity(program_sha256="0" * 64), "sha256 of its program"),
    ],
)
def test_other_settings_than_asked_for_are_refused(
    launch: MakeLaunch, identity: Identity, named: str
) -> None:
    assert named in failure(launch(identity=identity)).problem


def test_the_program_is_known_by_its_digest(launch: MakeLaunch) -> None:
    with serve(launch()) as server:
        digest = server.found["program_sha256"]
    with serve(launch(identity=Identity(program_sha256=digest, parallel=4))) as server:
        assert server.found["program_sha256"] == digest


def test_a_route_without_props_says_so(launch: MakeLaunch) -> None:
    assert "/props cannot be read" in failure(launch("--no-props")).problem
    with serve(launch("--no-props", identity=Identity(props=False))) as server:
        assert server.props is None


# ---------------------------------------------------------------------------- command and settings


def test_a_command_template_is_filled() -> None:
    template = ["serve", "{model}", "-c", "{context}", "--port={port}", "--host", "{host}", "{}"]
    values = {"model": "/m/{odd} name.gguf", "context": 512}
    assert fill_command(template, values) == (
        *("serve", "/m/{odd} name.gguf", "-c", "512", "--port={port}", "--host", "{host}", "{}"),
    )


def test_an_unknown_placeholder_is_named() -> None:
    with pytest.raises(RoutewiseError, match=r"unknown placeholder \{modell\}") as caught:
        fill_command(["serve", "{modell}", "{port}"], {"model": "m"})
    assert "{model}" in str(caught.value.hint)


def test_a_template_without_a_port_is_refused() -> None:
    with pytest.raises(RoutewiseError, match=r"names no \{port\}"):
        fill_command(["serve", "-p", "8080"], {})


def test_a_command_that_is_not_there(launch: MakeLaunch, tmp_path: Path) -> None:
    path = {"PATH": str(tmp_path)}
    error = failure(launch(argv=("no-such-server", "{port}"), env=path))
    assert "no-such-server: command not found on the PATH" in error.problem
    assert str(tmp_path) in error.problem
    error = failure(launch(argv=(str(tmp_path / "server"), "{port}")))
    assert "no such program" in error.problem


def test_a_command_that_cannot_be_run(launch: MakeLaunch, tmp_path: Path) -> None:
    script = tmp_path / "server.sh"
    script.write_text("#!/no/such/interpreter\n")
    assert "not executable" in failure(launch(argv=(str(script), "{port}"))).problem
    script.chmod(0o755)
    error = failure(launch(argv=(str(script), "{port}")))
    assert "cannot be started: No such file" in error.problem
    assert "interpreter" in str(error.hint)


def test_a_server_gets_the_variables_of_its_route_alone(
    launch: MakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_CUDA_FORCE_MMQ", "1")
    monkeypatch.setenv("HSA_USE_SVM", "1")
    monkeypatch.setenv("UNRELATED", "kept")
    with serve(launch(env={"LLAMA_ARG_THREADS": "2", "HSA_USE_SVM": "0"})) as server:
        raw = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
    found = dict(entry.split("=", 1) for entry in raw if entry)
    assert "GGML_CUDA_FORCE_MMQ" not in found
    assert found["HSA_USE_SVM"] == "0"
    assert found["LLAMA_ARG_THREADS"] == "2"
    assert found["UNRELATED"] == "kept"


def test_the_environment_is_that_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in server_environment({})
    assert server_environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"


# ----------------------------------------------------------------------------------- device memory


@pytest.mark.parametrize(
    ("readings", "free"),
    [([500, 500], True), ([500, 900, 700, 530], True), ([None], None)],
)
def test_device_memory_comes_back(
    launch: MakeLaunch, readings: list[int | None], free: bool | None
) -> None:
    queue = list(readings)

    def read() -> int | None:
        return queue.pop(0) if len(queue) > 1 else queue[0]

    with serve(launch(device_memory=read)) as server:
        pass
    assert server.proof is not None
    assert server.proof.device_memory_free is free


def test_device_memory_that_does_not_come_back(
    launch: MakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MEMORY_LIMIT_S", 0.2)
    queue = [500]

    def read() -> int:
        return queue.pop() if queue else 900

    with (
        pytest.raises(RoutewiseError, match="left something behind") as caught,
        serve(launch(device_memory=read)),
    ):
        pass
    assert "device_memory_free=False" in caught.value.problem


def test_memory_in_use_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"

    def says(text: str) -> None:
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)

    says('case "$*" in *"-i 1") echo 30;; *) printf "500\\n30\\n";; esac')
    assert nvidia_memory_mib() == 530
    assert nvidia_memory_mib("1") == 30
    says("echo '[N/A]'")
    assert nvidia_memory_mib() is None
    says("echo no devices were found >&2; exit 6")
    assert nvidia_memory_mib() is None
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_memory_mib() is None


# --------------------------------------------------------------------------------------- endpoints


def test_an_endpoint_is_used_and_never_stopped(foreign: Callable[..., int]) -> None:
    url = f"http://127.0.0.1:{foreign()}"
    with attach(f"{url}/", probe) as server:
        assert server.url == url
        assert server.pid is None
        assert complete(server.url)["tokens_predicted"] == 4
        server.check()
        assert asyncio.run(server.guard(ask(server.url))) == 200
    assert server.proof is not None
    assert server.proof.clean
    assert httpx.get(f"{url}/health").status_code == 200


def url_of(silent: socket.socket) -> str:
    silent.bind(("127.0.0.1", 0))
    return f"http://127.0.0.1:{silent.getsockname()[1]}"


def test_an_endpoint_that_is_not_there() -> None:
    with (
        socket.socket() as silent,  # its port is taken, and nobody listens
        pytest.raises(RoutewiseError, match="nothing listens there") as caught,
        attach(url_of(silent), probe, limit_s=60),
    ):
        pytest.fail("it is there")
    assert caught.value.hint


def test_an_endpoint_of_another_model(foreign: Callable[..., int], tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{foreign()}"
    asked = Identity(model=tmp_path / "asked.gguf")
    with (
        pytest.raises(RoutewiseError, match="not the one asked for"),
        attach(url, probe, identity=asked),
    ):
        pytest.fail("it is another")


def test_an_endpoint_that_stops_moving(foreign: Callable[..., int]) -> None:
    url = f"http://127.0.0.1:{foreign('--wedged', '1')}"
    with (
        pytest.raises(RoutewiseError, match="no progress"),
        attach(url, probe, stall_s=0.3) as server,
    ):
        asyncio.run(server.guard(ask(url)))


# ---------------------------------------------------------------------------------- other engines

HRX_ENV = {"HSA_USE_SVM": "0", "HSA_USERPTR_FOR_PAGED_MEM": "0", "HRX_ALLOW_NO_SVM": "1"}


def test_an_hrx_route_needs_its_variables(launch: MakeLaunch, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    template = [*PYTHON, str(SERVERS / "hrx_double.py"), "serve", "{model}"]
    template += ["--device", "hrx", "--port", "{port}", "--host", "{host}"]
    argv = fill_command(template, {"model": model})
    assert "no usable device" in failure(launch(argv=argv)).problem
    with serve(launch(argv=argv, env={**HRX_ENV, "GGML_HRX_LOG_DISPATCH": "1"})) as server:
        complete(server.url)
    assert server.proof == CLEAN
    assert "ggml_hrx dispatch: flash_attention_decode_split (single)" in server.tail()


def test_an_npu_route(launch: MakeLaunch, tmp_path: Path) -> None:
    model = tmp_path / "model.q4nx"
    model.touch()
    template = [*PYTHON, str(SERVERS / "npu_double.py"), "forward-serve", "-m", "{model}"]
    argv = fill_command([*template, "--kernels", str(tmp_path), "-p", "{port}"], {"model": model})

    def say(url: str) -> None:
        body = {"prompt": "hello", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).raise_for_status()

    with serve(launch(argv=argv, probe=say, identity=Identity(props=False))) as server:
        body = {"prompt": [1, 2], "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 400
    assert server.proof == CLEAN
