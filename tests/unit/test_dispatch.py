"""Dispatch evidence: sets read from logs, and an arm that counts only when its log shows it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.dispatch import (
    HRX,
    LOGS,
    SCHEDULER,
    Dispatch,
    DispatchSet,
    Observation,
    dispatch_columns,
    dispatches_of,
    families_of,
    in_family,
    judge_arm,
    read_life,
    read_since,
)
from routewise.errors import RoutewiseError
from routewise.schema.dispatch import DISPATCH

DOUBLE = Path(__file__).resolve().parent.parent / "servers" / "hrx_double.py"

#: Lines of a real llama-server (-lv 5, GGML_SCHED_DEBUG=2), its prefixes within a line included.
NODE = (
    "0.00.151.997 D node #  3 (   MUL_MAT):               Qcur-0 (   9K) [  CPU         ] "
    "use=1,c=1:0.00.151.998 D   blk.0.attn_q.weight ( 222K) [  CPU         ]0.00.151.998 D "
    "          attn_norm-0 (   9K) [  CPU         ]0.00.151.998 D "
)
ROWS = (
    "0.00.152.004 D node # 13 (  SET_ROWS): cache_k_l0 (reshaped (   1M) [  CPU         ] "
    "use=0,c=1:0.00.152.004 D         Kcur-0 (view) (   3K) [  CPU         ]"
)
ATTENTION = (
    "node # 23 (FLASH_ATTN):              node_23 (   9K) [CUDA0         ] use=1,c=1:  "
    "Qcur-0 (view) (permu (   9K) [  CPU         ]"
)
OTHER = [
    "## SPLIT #0: CPU # 0 inputs0.00.151.988 D ",
    "0.00.576.487 D srv  update_slots: posting NEXT_RESPONSE",
    "",
    "node # is not a number (MUL_MAT)",
]

SPLIT = Dispatch("HRX", "", "flash_attention_decode_split", "fused")
PLAIN = Dispatch("HRX", "", "flash_attention", "single")
MATMUL = Dispatch("HRX", "", "mul_mat_id.decode", "single")
BASE: DispatchSet = frozenset({SPLIT, MATMUL})
ARM: DispatchSet = frozenset({PLAIN, MATMUL})


def hrx_line(dispatch: Dispatch) -> str:
    return f"ggml_hrx dispatch: {dispatch.kernel} ({dispatch.kind})"


# ---------------------------------------------------------------------------------------- logs


def test_scheduler_lines_give_operation_and_backend_of_the_node() -> None:
    counts = dispatches_of([*OTHER, NODE, ROWS, NODE, ATTENTION], SCHEDULER)
    assert counts == {
        Dispatch("CPU", "MUL_MAT", ""): 2,
        Dispatch("CPU", "SET_ROWS", ""): 1,
        Dispatch("CUDA0", "FLASH_ATTN", ""): 1,
    }


def test_hrx_lines_give_name_and_kind() -> None:
    lines = [*OTHER, hrx_line(SPLIT), f"[child 7] {hrx_line(MATMUL)} ", "ggml_hrx dispatch: odd"]
    assert dispatches_of(lines, HRX) == {
        SPLIT: 1,
        MATMUL: 1,
        Dispatch("HRX", "", "odd", ""): 1,
    }


def test_one_log_is_not_read_as_the_other() -> None:
    assert not dispatches_of([NODE, ROWS], HRX)
    assert not dispatches_of([hrx_line(SPLIT)], SCHEDULER)
    assert LOGS == {"scheduler": SCHEDULER, "hrx": HRX}


def test_sections_follow_each_other_and_leave_half_a_line_to_the_next(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("loading\n" + NODE[:40])
    first = read_since(log, 0, SCHEDULER)
    assert (first.dispatches, first.end) == (frozenset(), len("loading\n"))
    with log.open("a") as stream:
        stream.write(NODE[40:] + "\n" + ROWS + "\n")
    second = read_since(log, first.end, SCHEDULER)
    assert {d.op: n for d, n in second.counts.items()} == {"MUL_MAT": 1, "SET_ROWS": 1}
    assert second.end == log.stat().st_size
    third = read_since(log, second.end, SCHEDULER)
    assert (third.dispatches, third.end) == (frozenset(), second.end)
    assert read_life(log, SCHEDULER).counts == second.counts


def test_a_log_with_broken_bytes_is_read(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"\xe2\x82 \xff\n" + hrx_line(SPLIT).encode() + b"\n")
    assert read_life(log, HRX).dispatches == {SPLIT}


def test_a_truncated_or_missing_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("short\n")
    with pytest.raises(RoutewiseError, match="6 bytes, but 100 were there before"):
        read_since(log, 100, HRX)
    with pytest.raises(RoutewiseError, match="cannot be read"):
        read_since(tmp_path / "none.log", 0, HRX)


@given(
    pieces=st.lists(st.sampled_from([NODE, ROWS, ATTENTION, *OTHER]), max_size=12),
    cuts=st.lists(st.integers(0, 2000), max_size=4),
)
def test_a_log_read_in_parts_is_the_log_read_at_once(
    pieces: list[str], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.mktemp("log") / "server.log"
    content = "".join(f"{piece}\n" for piece in pieces).encode()
    total, end = dispatches_of([], SCHEDULER), 0
    for cut in [*sorted(cuts), len(content)]:
        log.write_bytes(content[: max(cut, end)])
        section = read_since(log, end, SCHEDULER)
        total, end = total + section.counts, section.end
    assert total == dispatches_of(pieces, SCHEDULER)


# ----------------------------------------------------------------------------------------- arms


def test_an_arm_whose_family_is_gone_counts() -> None:
    found = judge_arm([BASE] * 3, ARM, "flash_attention_decode_split")
    assert found.counts
    assert found.reason == (
        "flash_attention_decode_split gone; without flash_attention_decode_split, "
        "with flash_attention more"
    )


def test_several_families_are_all_wanted() -> None:
    arm = frozenset({PLAIN})
    assert judge_arm([BASE] * 3, arm, "decode_split, mul_mat_id.").counts
    assert judge_arm([BASE] * 3, arm, ["decode_split", "mul_mat_id."]).counts
    left = judge_arm([BASE] * 3, ARM, "decode_split,mul_mat_id.")
    assert (left.counts, left.reason) == (False, "still in the arm's log: mul_mat_id.decode")


def test_fused_is_a_family_by_kind() -> None:
    assert judge_arm([BASE] * 3, ARM, "fused").counts
    assert not judge_arm([BASE] * 3, BASE, "fused").counts


@pytest.mark.parametrize(
    ("bases", "arm", "family", "reason"),
    [
        ([BASE] * 2, ARM, "decode_split", "logged 2 times, wanted 3"),
        ([], ARM, "decode_split", "logged 0 times, wanted 3"),
        ([BASE, BASE, ARM], ARM, "decode_split", "another set in run 3"),
        ([BASE, ARM, BASE], ARM, "decode_split", "another set in run 2"),
        ([frozenset()] * 3, ARM, "decode_split", "the base logged nothing"),
        ([BASE] * 3, frozenset(), "decode_split", "the arm logged nothing"),
        ([BASE] * 3, BASE, "decode_split", "still in the arm's log"),
        ([BASE] * 3, ARM, "no_such_kernel", "not in the base's log"),
        ([BASE] * 3, ARM, "decode_split,no_such", "'no_such' is not in the base's log"),
        ([BASE] * 3, ARM, " , ", "names no family"),
    ],
)
def test_an_arm_without_evidence_does_not_count(
    bases: list[DispatchSet], arm: DispatchSet, family: str, reason: str
) -> None:
    found = judge_arm(bases, arm, family)
    assert not found.counts
    assert reason in found.reason


def test_the_scheduler_cannot_show_a_kernel_of_one_backend() -> None:
    """It names operations and backends; a forced CUDA kernel leaves its log as it was."""
    log = frozenset(dispatches_of([NODE, ATTENTION], SCHEDULER))
    assert not judge_arm([log] * 3, log, "mmq").counts
    moved = frozenset(dispatches_of([NODE, ATTENTION.replace("CUDA0", "  CPU")], SCHEDULER))
    assert not judge_arm([log] * 3, moved, "FLASH_ATTN_EXT").counts  # it still runs, elsewhere
    unfused = frozenset(dispatches_of([NODE], SCHEDULER))
    assert judge_arm([log] * 3, unfused, "FLASH_ATTN_EXT").counts


def test_a_cut_operation_is_known_by_its_first_letters() -> None:
    attention = Dispatch("CPU", "FLASH_ATTN", "")
    assert in_family(attention, "FLASH_ATTN_EXT")
    assert in_family(attention, "FLASH_ATTN")
    assert not in_family(attention, "FLASH")
    short = Dispatch("CPU", "MUL", "")
    assert in_family(short, "MUL")
    assert not in_family(short, "MUL_MAT")
    assert not in_family(Dispatch("HRX", "", "rope", "single"), "MUL_MAT")


def test_families_of_an_environment() -> None:
    assert families_of({"GGML_HRX_DISABLE_DISPATCH": "hip., fused"}) == ("hip.", "fused")
    assert families_of({"GGML_CUDA_FORCE_MMQ": "1"}) == ()


# ------------------------------------------------------------------------- a whole life of hrx

NEEDED = {"HSA_USE_SVM": "0", "HSA_USERPTR_FOR_PAGED_MEM": "0", "HRX_ALLOW_NO_SVM": "1"}


def run_life(folder: Path, name: str, width: int, **environment: str) -> DispatchSet:
    """Run one life of the hrx double, ask it at one width, and return what its log names."""
    model, log = folder / "model.bin", folder / f"{name}.log"
    model.touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(DOUBLE), "serve", str(model), "--device", "hrx"]
    command += ["--port", str(port), "-np", str(width), "--window-ms", "2000"]
    wanted = {**os.environ, **NEEDED, **HRX.environment, **environment}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, env=wanted)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            while True:
                assert process.poll() is None, log.read_text()
                try:
                    client.get("/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    continue

            def ask(_: int) -> httpx.Response:
                body = {"prompt": [1, 2, 3], "n_predict": 2}
                return client.post("/completion", json=body, timeout=60).raise_for_status()

            with ThreadPoolExecutor(width) as pool:
                list(pool.map(ask, range(width)))
    finally:
        process.kill()
        process.wait()
    return read_life(log, HRX).dispatches


def test_an_arm_of_an_hrx_route_is_judged_by_whole_lives(tmp_path: Path) -> None:
    bases = [run_life(tmp_path, f"base{i}", 1) for i in range(3)]
    off = {"GGML_HRX_DISABLE_DISPATCH": "flash_attention_decode_split"}
    arm = run_life(tmp_path, "arm", 1, **off)
    family = families_of(off)
    assert judge_arm(bases, arm, family).counts
    assert Dispatch("HRX", "", "flash_attention", "single") in arm - bases[0]
    # misspelt, it switches nothing off
    misspelt = run_life(tmp_path, "misspelt", 1, GGML_HRX_DISABLE_DISPATCH="flash_atention")
    assert misspelt == bases[0]
    assert not judge_arm(bases, misspelt, family).counts
    # a log that was not asked for shows nothing
    silent = run_life(tmp_path, "silent", 1, GGML_HRX_LOG_DISPATCH="", **off)
    assert judge_arm(bases, silent, family).reason.startswith("the arm logged nothing")
    # another width is another set, and no base of this arm
    wide = run_life(tmp_path, "wide", 2)
    assert wide > bases[0]
    assert not judge_arm([*bases[:2], wide], arm, family).counts


# ---------------------------------------------------------------------------------------- table


def test_observations_fill_the_declared_table() -> None:
    columns = dispatch_columns(
        [
            Observation(0, 1, 0, "scheduler", dispatches_of([NODE, ROWS, NODE], SCHEDULER)),
            Observation(1, 4, 2, "hrx", {SPLIT: 1}),
        ]
    )
    table = pa.table(columns, schema=DISPATCH.arrow)
    assert [(row["op"], row["kernel"], row["n"]) for row in table.to_pylist()] == [
        ("MUL_MAT", None, 2),
        ("SET_ROWS", None, 1),
        (None, "flash_attention_decode_split", 1),
    ]
    assert table.to_pylist()[2] == {
        "life": 1,
        "width": 4,
        "repeat": 2,
        "log": "hrx",
        "backend": "HRX",
        "op": None,
        "kernel": "flash_attention_decode_split",
        "kind": "fused",
        "n": 1,
    }
    assert pa.table(dispatch_columns([]), schema=DISPATCH.arrow).num_rows == 0
