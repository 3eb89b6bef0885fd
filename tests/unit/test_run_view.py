"""The line of a run: what is done, what runs, what waits for what, and when it says how long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from routewise.run_view import Job, RunView, job_name, outsiders


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def job(job_id: int, rule: str = "measure", *after: int, **devices: int) -> Job:
    return Job(job_id, rule, f"{rule} {job_id}", devices, after=after)


def view_of(*jobs: Job, **limits: int) -> tuple[RunView, Clock]:
    clock = Clock()
    view = RunView(clock)
    view.limits, view.cores = limits, 4
    view.expect(jobs)
    return view, clock


def run(view: RunView, clock: Clock, job_id: int, seconds: float, threads: int = 1) -> None:
    view.started(job_id, "measure", "unused", threads)
    clock.now_s += seconds
    view.finished(job_id)


# ------------------------------------------------------------------------------------- waiting


def test_a_job_waits_for_its_device_the_processor_or_other_jobs() -> None:
    jobs = [job(1, gpu=1), job(2, gpu=1), job(3, npu=1), job(4, npu=1), job(5)]
    view, _ = view_of(*jobs, job(6, "table", 1, 2, 3), gpu=1, npu=1)
    view.started(1, "measure", "")
    view.started(3, "measure", "")
    assert view.waiting() == {"gpu": 1, "npu": 1, "the processor": 1, "other jobs": 1}
    assert view.line() == (
        "done 0 of 6 · running: measure 1 (gpu), measure 3 (npu) · waiting: 1 for gpu, 1 for npu, "
        "1 for the processor, 1 for other jobs"
    )


def test_a_job_whose_device_is_free_waits_for_the_processor() -> None:
    view, _ = view_of(job(1), job(2, gpu=1), gpu=1)
    view.started(1, "measure", "")
    assert view.waiting() == {"the processor": 1}


def test_a_device_that_nobody_limits_keeps_no_job_waiting() -> None:
    view, _ = view_of(job(1, gpu=1), job(2, gpu=1))
    view.started(1, "measure", "")
    assert view.waiting() == {"the processor": 1}


def test_two_units_serve_two_jobs_and_a_third_waits() -> None:
    view, _ = view_of(job(1, gpu=1), job(2, gpu=1), job(3, gpu=1), job(4, gpu=2), gpu=2)
    view.started(1, "measure", "")
    assert view.waiting() == {"gpu": 1, "the processor": 2}
    view.started(2, "measure", "")
    assert view.waiting() == {"gpu": 2}


def test_what_a_finished_job_made_lets_others_start() -> None:
    view, clock = view_of(job(1), job(2, "replay", 1), job(3, "table", 1, 2))
    assert view.waiting() == {"the processor": 1, "other jobs": 2}
    run(view, clock, 1, 1)
    assert view.waiting() == {"the processor": 1, "other jobs": 1}
    assert not view.over
    run(view, clock, 2, 1)
    run(view, clock, 3, 1)
    assert view.over
    assert view.waiting() == {}
    assert view.last_line() == "done 3 of 3 in 3 s"


def test_what_was_made_before_the_run_is_not_waited_for() -> None:
    view, _ = view_of(job(2, "replay", 1))
    assert view.waiting() == {"the processor": 1}


# -------------------------------------------------------------------------------------- failing


def test_what_needs_a_failed_job_cannot_run_and_waits_for_nothing() -> None:
    view, _ = view_of(job(1), job(2, "replay", 1), job(3, "table", 2), job(4))
    view.started(1, "measure", "")
    view.failed(1)
    assert view.waiting() == {"the processor": 1}
    assert view.line() == "done 0 of 4 · waiting: 1 for the processor · 1 failed, 2 cannot run"
    assert view.last_line() == "done 0 of 4, 1 failed, 2 could not run in 0.0 s"


def test_a_second_try_takes_a_failure_back() -> None:
    view, clock = view_of(job(1), job(2, "replay", 1))
    view.started(1, "measure", "")
    view.failed(1)
    run(view, clock, 1, 1)
    assert view.line() == "done 1 of 2 · waiting: 1 for the processor"


def test_an_error_of_an_unknown_job_is_no_error_of_the_line() -> None:
    view, _ = view_of(job(1))
    view.failed(7)
    view.finished(8)
    assert view.line() == "done 0 of 1 · waiting: 1 for the processor"


# ------------------------------------------------------------------------------------- estimate


def test_nothing_is_said_while_nothing_is_done() -> None:
    view, clock = view_of(*(job(i) for i in range(9)))
    view.started(0, "measure", "")
    clock.now_s += 3600
    assert view.left_s() == (None, 9)
    assert "left" not in view.line()


def test_what_is_left_is_told_by_what_the_like_took() -> None:
    view, clock = view_of(*(job(i, gpu=1) for i in range(5)), gpu=1)
    run(view, clock, 0, 100)
    run(view, clock, 1, 140)
    assert view.left_s() == (360.0, 0)
    assert view.line().endswith(" · estimate: about 6 min left")
    view.started(2, "measure", "")
    clock.now_s += 20
    assert view.left_s() == (340.0, 0)
    clock.now_s += 2000  # longer than the others took: what is left of it is not below nothing
    assert view.left_s() == (240.0, 0)


def test_cores_and_devices_are_counted_apart() -> None:
    view, clock = view_of(
        *(job(i) for i in range(9)), *(job(i, gpu=1) for i in range(9, 12)), gpu=1
    )
    run(view, clock, 0, 100, threads=2)
    assert view.left_s() == (8 * 100 * 2 / 4, 3)
    run(view, clock, 9, 300)
    assert view.left_s() == (600.0, 0)  # two on the one GPU; 1,600 s of cores are 550 s on four
    view.limits["gpu"] = 2
    assert view.left_s() == ((8 * 100 * 2 + 2 * 300) / 4, 0)


def test_kinds_not_seen_are_named_and_too_many_silence_it() -> None:
    view, clock = view_of(job(1), job(2), job(3), job(4, "other"), job(5, "table"))
    run(view, clock, 1, 30)
    assert view.left_s() == (None, 2)
    view, clock = view_of(job(1), job(2), job(3), job(4, "other"))
    run(view, clock, 1, 30)
    assert view.line().endswith("estimate: less than 1 min left, and 1 job of kinds not seen yet")


def test_hours_are_told_as_hours() -> None:
    view, clock = view_of(*(job(i, gpu=1) for i in range(5)), gpu=1)
    run(view, clock, 0, 3600)
    assert view.line().endswith("estimate: about 4.0 h left")


# ---------------------------------------------------------------------------------------- words


def test_without_the_jobs_of_the_run_there_is_still_a_line() -> None:
    view = RunView(Clock())
    view.total = 3
    view.started(1, "measure_replay", "measure_replay made w2")
    assert view.line() == "done 0 of 3 · running: measure_replay made w2"


def test_many_jobs_at_once_are_counted() -> None:
    view, _ = view_of(*(job(i) for i in range(7)))
    for i in range(6):
        view.started(i, "measure", "")
    assert ", measure 3 and 2 more · waiting: 1 for the processor" in view.line()


def test_where_room_is_short_fewer_jobs_are_named() -> None:
    view, clock = view_of(*(job(i) for i in range(7)))
    run(view, clock, 0, 240)
    for i in range(1, 5):
        view.started(i, "measure", "")
    end = "waiting: 2 for the processor · estimate: about 6 min left"
    whole = f"done 1 of 7 · running: measure 1, measure 2, measure 3, measure 4 · {end}"
    assert view.line() == view.line(columns=len(whole) + 1) == whole
    assert (
        view.line(columns=118) == f"done 1 of 7 · running: measure 1, measure 2 and 2 more · {end}"
    )
    assert view.line(columns=90) == f"done 1 of 7 · running: 4 jobs · {end}"
    assert view.line(columns=20) == view.line(columns=90)  # what shows it cuts it


def test_jobs_of_a_scheduler_are_only_known_to_be_submitted() -> None:
    view, _ = view_of(job(1))
    view.submits, view.cores = True, None
    view.started(1, "measure", "")
    assert view.line() == "done 0 of 1 · submitted: measure 1"


def test_digests_are_no_names() -> None:
    assert job_name("draw_figure", {"figure": "price"}) == "draw_figure price"
    found = job_name("quantize_model", {"key": "0123456789ab", "model": "small"})
    assert found == "quantize_model small"


# ------------------------------------------------------------------------------ who has a device

CLAIMER = """
import sys
from pathlib import Path
from routewise.claim import ClaimSpec, hold_device
with hold_device(ClaimSpec("cuda", units=int(sys.argv[2])), sys.argv[3], Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def claimer(folder: Path, label: str, *, units: int = 1, waits: bool = False) -> Iterator[int]:
    """Hold the device cuda, or wait for it, in another process; its id comes out."""
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMER, str(folder), str(units), label],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stream = process.stderr if waits else process.stdout
        assert stream is not None
        assert ("waiting for cuda" if waits else "held") in stream.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_who_holds_what_a_job_of_ours_waits_for_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with detached_claimer(tmp_path, "a night of serving") as holder:
        assert outsiders(["cuda"], tmp_path, os.getpid()) == []  # nobody of ours waits
        with claimer(tmp_path, "replay", waits=True):
            [said] = outsiders(["cuda", "npu"], tmp_path, os.getpid())
            assert said.startswith("cuda is held by 'a night of serving' (")
            assert f"process {holder})" in said
            assert outsiders(["npu"], tmp_path, os.getpid()) == []
            assert outsiders(["cuda"], tmp_path, holder) == []  # not theirs


def test_a_device_held_by_a_job_of_ours_is_no_news(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with claimer(tmp_path, "one"), claimer(tmp_path, "two", waits=True):
        assert outsiders(["cuda"], tmp_path, os.getpid()) == []


def test_a_ledger_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert outsiders(["cuda"], tmp_path / "none", os.getpid()) == []
    (tmp_path / "routewise-cuda.claims").mkdir()
    assert outsiders(["cuda"], tmp_path, os.getpid()) == []


@contextmanager
def detached_claimer(folder: Path, label: str) -> Iterator[int]:
    """Hold the device cuda in a process that does not come from this one."""
    script = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdin=subprocess.PIPE,\n"
        "                     stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline(); print(p.pid, flush=True); sys.stdin.read(); p.kill(); p.wait()\n"
    )
    # setsid ends when it has started the script, which so loses its parent
    with subprocess.Popen(
        ["setsid", "--fork", sys.executable, "-c", script, CLAIMER, str(folder), "1", label],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
