"""A measuring process ends with the process that it watches, and only with that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from routewise import watch
from routewise.watch import EXIT_ORPHANED, WATCHED

END_S = 2.0
SLEEP = "import time; print('ready', flush=True); time.sleep(60)"
#: Announces itself as the Snakefile does, then starts a job and says its process id.
SNAKEMAKE = """
import subprocess, sys, time
from routewise import watch
watch.announce()
job = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(job.pid, flush=True)
time.sleep(60)
"""
JOB = f"from routewise.watch import end_with_snakemake; end_with_snakemake(); {SLEEP}"
CHILD = f"""
import sys
from routewise.watch import end_with_parent
end_with_parent(int(sys.argv[1]))
{SLEEP}
"""

Process = subprocess.Popen[str]


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Collect processes that must not outlive the test."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[Process], code: str, *arguments: object, **env: str | None) -> Process:
    environment = {**os.environ, **env}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={key: value for key, value in environment.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    return process


def line_of(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def announced(pid: int) -> str:
    return f"{pid}:{watch.start_ticks_of(pid)}:{watch.boot_id()}"


def test_a_job_ends_when_its_snakemake_is_killed(started: list[Process]) -> None:
    snakemake = start(started, SNAKEMAKE, JOB)
    pid = int(line_of(snakemake))
    assert line_of(snakemake) == "ready"  # the job's own words, on the same pipe
    job = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(job, select.POLLIN)
        assert not poll.poll(300), "the job ended while its Snakemake lived"
        snakemake.send_signal(signal.SIGKILL)
        ended = poll.poll(END_S * 1000)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        assert ended, "the job outlived its Snakemake"
    finally:
        os.close(job)


def test_a_job_that_does_not_watch_outlives_its_snakemake(started: list[Process]) -> None:
    """What the watch is there for: without it the job goes on."""
    snakemake = start(started, SNAKEMAKE, SLEEP)
    pid = int(line_of(snakemake))
    assert line_of(snakemake) == "ready"
    job = os.pidfd_open(pid)
    try:
        snakemake.send_signal(signal.SIGKILL)
        snakemake.wait()
        poll = select.poll()
        poll.register(job, select.POLLIN)
        assert not poll.poll(500)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(job)


def test_the_job_says_why_it_stops(started: list[Process]) -> None:
    watched = start(started, SLEEP)
    line_of(watched)
    job = start(started, JOB, **{WATCHED: announced(watched.pid)})
    assert line_of(job) == "ready"
    watched.kill()  # not reaped: a process that is over and still has its entry counts as gone
    _, said = job.communicate(timeout=END_S)
    assert job.returncode == EXIT_ORPHANED
    assert "is gone; stopping" in said


def test_another_process_under_the_same_id_is_not_the_announced_one(
    started: list[Process],
) -> None:
    pid, ticks, boot = announced(os.getpid()).split(":")
    job = start(started, JOB, **{WATCHED: f"{pid}:{int(ticks) - 1}:{boot}"})
    out, said = job.communicate(timeout=30)
    assert (job.returncode, out) == (EXIT_ORPHANED, "")
    assert "is gone; stopping" in said


def test_a_job_whose_snakemake_is_gone_already_does_not_start(started: list[Process]) -> None:
    gone = start(started, "pass")
    announcement = announced(gone.pid)
    gone.communicate()
    job = start(started, JOB, **{WATCHED: announcement})
    out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (EXIT_ORPHANED, "")


@pytest.mark.parametrize("living", [True, False])
def test_a_job_runs_to_its_end(started: list[Process], living: bool) -> None:
    """Beside a living Snakemake, and by hand, where nobody is announced."""
    code = (
        "from routewise.watch import end_with_snakemake; import time; end_with_snakemake(); "
        "time.sleep(0.3); print('done')"
    )
    value = announced(os.getpid()) if living else None
    job = start(started, code, **{WATCHED: value})
    out, said = job.communicate(timeout=30)
    assert (job.returncode, out, said) == (0, "done\n", "")


def test_a_snakemake_of_another_host_is_not_looked_for_here(started: list[Process]) -> None:
    pid, ticks, _ = announced(os.getpid()).split(":")
    job = start(started, JOB, **{WATCHED: f"{pid}:{int(ticks) - 1}:another-boot"})
    assert line_of(job) == "ready"


def test_announcing_names_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WATCHED, "")
    watch.announce()
    assert os.environ[WATCHED] == announced(os.getpid())


def test_start_ticks_of_a_name_with_brackets_and_spaces(started: list[Process]) -> None:
    code = "open('/proc/self/comm', 'w').write('a) b (c'); " + SLEEP
    process = start(started, code)
    line_of(process)
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age_s = uptime_s - watch.start_ticks_of(process.pid) / os.sysconf("SC_CLK_TCK")
    assert 0 <= age_s < 60


# ------------------------------------------------------------------------------------ workers


def test_a_worker_ends_with_its_parent(started: list[Process]) -> None:
    parent_code = f"""
import os, subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
print(job.pid, flush=True)
time.sleep(60)
"""
    parent = start(started, parent_code)
    pid = int(line_of(parent))
    assert line_of(parent) == "ready"
    worker = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        assert not poll.poll(300)
        parent.send_signal(signal.SIGKILL)
        ended = poll.poll(END_S * 1000)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        assert ended, "the worker outlived its parent"
    finally:
        os.close(worker)


def test_a_worker_of_another_parent_ends_at_once(started: list[Process]) -> None:
    """The parent died before the worker could ask to end with it."""
    worker = start(started, CHILD, os.getpid() + 1)
    out, _ = worker.communicate(timeout=30)
    assert (worker.returncode, out) == (EXIT_ORPHANED, "")


def test_a_worker_lives_beside_its_parent(started: list[Process]) -> None:
    worker = start(started, CHILD, os.getpid())
    assert line_of(worker) == "ready"
    time.sleep(0.2)
    assert worker.poll() is None
