"""The profile gpu-box: its line of progress, a claim for each job on a device, and no job lost."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from workbench import Bench, eventually, hear_control_c, provenance_of

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

HOLDER = """
import sys
from routewise.claim import ClaimSpec, hold_device
with hold_device(ClaimSpec("hrx"), "somebody's own work"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another() -> Iterator[None]:
    """Hold the device hrx, from a process that no Snakemake has started."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.terminate()


@pytest.fixture
def box(stock: Bench, tmp_path: Path) -> Bench:
    """Return a study of two routes of one CPU build: one claims a device, the other does not."""
    bench = stock.copy(tmp_path / "copy")
    bench.profile = "gpu-box"
    bench.study["routes"]["on-device"] = {**bench.study["routes"]["cpu-stock"], "device": "hrx"}
    replay = bench.study["sweeps"]["replay"]
    replay["routes"] = ["cpu-stock", "on-device"]
    replay["widths"] = [2, 4]
    return bench


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"done \d", line)]


def test_a_job_on_a_device_waits_for_it_and_the_line_says_who_has_it(box: Bench) -> None:
    with held_by_another():
        run = box.start("results/stock/receipt.json")
        try:
            eventually(lambda: "hrx is held by" in run.output.read_text(), 120)
            eventually(lambda: box.cells().keys() >= {"replay.cpu-stock.small.w2"}, 120)
            assert not [name for name in box.cells() if "on-device" in name]
        except BaseException:
            run.kill_group()
            raise
    outcome = run.wait().check()
    lines = lines_of(outcome.text)
    [said] = [line for line in lines if "hrx is held by" in line][:1]
    assert "running: replay on-device small plain (gpu)" in said
    assert "somebody's own work" in said
    assert re.fullmatch(r"done (\d+) of \1 in .*", lines[-1])
    # what a log file has, the screen need not
    assert "jobid:" not in outcome.text
    assert "Job stats:" in outcome.text
    claims = {
        name: provenance_of(path)["claims"]
        for name, path in box.cells().items()
        if name.startswith("replay.")
    }
    assert len([name for name in claims if "on-device" in name]) == 4
    for name, held in claims.items():
        assert [claim["device"] for claim in held] == (["hrx"] if "on-device" in name else [])
    assert max(held[0]["wait_s"] for held in claims.values() if held) > 0


def test_devices_are_counted_and_what_is_stored_claims_nothing(box: Bench) -> None:
    box.snakemake("results/stock/receipt.json").check()
    plan = box.snakemake("--dry-run", "--forceall", "results/stock/receipt.json").check().text
    blocks = [block for block in re.split(r"\n(?=\[)", plan) if "rule measure_" in block]
    assert len(blocks) == 8
    for block in blocks:
        assert ("gpu=1" in block) == ("route=on-device" in block), block
        assert "npu=1" not in block
        assert "cpu_claim=1" not in block
    cells = [path for name, path in box.cells().items() if "on-device" in name]
    for path in cells:
        path.unlink()
    with held_by_another():  # all fragments are stored: nobody asks for the device
        box.snakemake(*(str(path.relative_to(box.folder)) for path in cells)).check()
    for path in cells:
        provenance = provenance_of(path)
        assert (provenance["n_measured"], provenance["claims"]) == (0, [])


def test_a_job_that_fails_is_shown_with_its_log_and_the_rest_goes_on(box: Bench) -> None:
    broken = box.folder / "broken.gguf"
    broken.write_bytes(b"no GGUF at all")
    box.study["models"]["broken"] = {"kind": "path", "path": str(broken)}
    box.study["sweeps"]["replay"]["models"] = ["small", "broken"]
    outcome = box.snakemake()
    assert outcome.code != 0
    assert "Error in rule obtain_model" in outcome.text
    assert "Logfile" in outcome.text
    assert "Traceback" not in outcome.text
    last = lines_of(outcome.text)[-1]
    assert re.search(r", 1 failed, \d+ could not run in ", last)
    assert "replay.on-device.small.w4" in box.cells()


def test_a_dry_run_is_left_as_snakemake_writes_it(box: Bench, repository: Path) -> None:
    ours = box.snakemake("--dry-run").check().text
    profile = yaml.safe_load((repository / "profiles/gpu-box/config.yaml").read_text())
    assert profile.pop("logger") == ["routewise"]
    bare = box.folder.parent / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text(yaml.safe_dump(profile))
    box.profile = str(bare)
    theirs = box.snakemake("--dry-run").check().text
    assert "rule measure_plain:" in ours
    assert lines_of(ours) == []

    def comparable(text: str) -> list[str]:
        # jobs come in any order, and reasons are sets
        lines = re.sub(r"^\[.*\]$|^Using profile .*$", "", text, flags=re.MULTILINE).splitlines()
        return sorted(line for line in lines if not re.match(r"    (reason|jobid):", line))

    assert comparable(ours) == comparable(theirs)


def run_in_terminal(box: Bench, *, stop_at: bytes | None = None) -> tuple[int, str]:
    """Run in a terminal of 24 rows, with Ctrl-C once ``stop_at`` was written; return code, text."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        box.command("results/stock/receipt.json"),
        cwd=box.folder,
        env={**os.environ, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
        preexec_fn=hear_control_c,
    )
    os.close(writer)
    written = b""
    try:
        while chunk := os.read(reader, 65536):
            written += chunk
            if stop_at is not None and stop_at in written:
                os.killpg(process.pid, signal.SIGINT)
                stop_at = None
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(reader)
    return process.wait(), written.decode(errors="replace")


def test_in_a_terminal_one_row_is_drawn_anew_and_given_back(box: Bench) -> None:
    code, text = run_in_terminal(box)
    assert code == 0, text
    assert "\x1b[2Kdone " in text
    taken, given = text.rfind("\x1b[1;23r"), text.rfind("\x1b[r")
    assert 0 <= taken < given
    assert re.search(r"\x1b8done (\d+) of \1 in ", text[given:])


def test_control_c_gives_the_row_back(box: Bench) -> None:
    with held_by_another():
        code, text = run_in_terminal(box, stop_at=b"waiting for hrx")
    assert code != 0
    taken, given = text.rfind("\x1b[1;23r"), text.rfind("\x1b[r")
    assert 0 <= taken < given, text
    assert re.search(r"\x1b8done \d of 7", text[given:])
    box.wait_until_none_is_left()
