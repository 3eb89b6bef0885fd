"""The real llama-server's own log as dispatch evidence, and an arm that it shows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from routewise.build import BuildPlan, run_build
from routewise.dispatch import SCHEDULER, DispatchSet, judge_arm, read_since
from routewise.server import Launch, serve

pytest_plugins = ("builds",)
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("nothing_is_left"),
]

PROMPT = [300, 301, 302, 303]
QUIET = ("-t", "1", "--no-webui", "--fit", "off", "--cache-ram", "0", "--no-cache-idle-slots")


@pytest.fixture(scope="module")
def program(real_plan: BuildPlan) -> Path:
    """Return the stock server."""
    document = real_plan.part_dir("server") / "build.json"
    wanted = real_plan.part_digest("server")
    if not document.is_file() or json.loads(document.read_text())["digest"] != wanted:
        run_build(real_plan, "server")
    return real_plan.part_dir("server") / "bin" / "llama-server"


def ask(url: str) -> None:
    body = {"prompt": PROMPT, "n_predict": 3, "temperature": 0, "cache_prompt": False}
    httpx.post(f"{url}/completion", json=body, timeout=300, trust_env=False).raise_for_status()


def logged(
    program: Path,
    model: Path,
    log: Path,
    widths: list[int],
    *flags: str,
    arguments: tuple[str, ...],
) -> list[DispatchSet]:
    """Return what one life of the server logs, for each of several rounds."""
    argv = (str(program), "-m", str(model), "--host", "{host}", "--port", "{port}", "-np", "2")
    launch = Launch(
        argv=(*argv, "-c", "1024", *QUIET, *flags, *arguments),
        log=log,
        probe=ask,
        env={"OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1", **SCHEDULER.environment},
        start_limit_s=300,
    )
    found = []
    with serve(launch) as server, ThreadPoolExecutor(max(widths)) as pool:
        end = read_since(log, 0, SCHEDULER).end
        for width in widths:
            list(pool.map(ask, [server.url] * width))
            section = read_since(log, end, SCHEDULER)
            found.append(section.dispatches)
            end = section.end
    return found


def test_the_scheduler_logs_the_same_set_each_time_and_shows_an_arm(
    program: Path, small_model: Path, tmp_path: Path
) -> None:
    told = SCHEDULER.arguments
    *alone, together = logged(
        program, small_model, tmp_path / "base.log", [1, 1, 1, 2], "-fa", "on", arguments=told
    )
    assert alone[0]
    assert alone == [alone[0]] * 3
    assert {dispatch.backend for dispatch in alone[0]} == {"CPU"}
    assert {"MUL_MAT", "FLASH_ATTN"} <= {dispatch.op for dispatch in alone[0]}
    # on one backend the set is no matter of width: this log names no kernels
    assert together == alone[0]
    (arm,) = logged(program, small_model, tmp_path / "arm.log", [1], "-fa", "off", arguments=told)
    assert judge_arm(alone, arm, "FLASH_ATTN_EXT").counts
    assert "SOFT_MAX" in {dispatch.op for dispatch in arm - alone[0]}
    # the same flags once more are no arm
    assert not judge_arm(alone, together, "FLASH_ATTN_EXT").counts


def test_without_its_argument_the_log_names_nothing(
    program: Path, small_model: Path, tmp_path: Path
) -> None:
    (found,) = logged(program, small_model, tmp_path / "quiet.log", [1], "-fa", "on", arguments=())
    assert found == frozenset()
    arm = judge_arm([found] * 3, found, "FLASH_ATTN_EXT")
    assert (arm.counts, arm.reason) == (False, "the base logged nothing")
