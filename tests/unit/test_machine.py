"""What is said of a machine names no host; the engine's environment is the route's, and no more."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import time
from pathlib import Path

import pytest
from routewise import machine
from routewise.machine import (
    Load,
    clock_mhz,
    describe_machine,
    device_scope,
    other_cpu_share,
    read_load,
    set_engine_environment,
)


def test_a_description_names_no_host_and_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "secret-host")
    text = json.dumps(describe_machine())
    hidden = {"secret-host", socket.gethostname(), os.uname().nodename, socket.getfqdn()}
    for name in hidden - {"", "localhost"}:
        assert name not in text
    assert f'"{getpass.getuser()}"' not in text
    assert str(Path.home()) not in text


def test_a_description_says_what_bits_may_depend_on() -> None:
    described = describe_machine()
    assert described["n_cores"] == len(os.sched_getaffinity(0))
    assert described["kind"].startswith(f"{described['n_cores']}-core ")
    assert set(device_scope(described)) == {"cpu_model", "cpu_flags_digest", "libc"}
    assert describe_machine() == described


def test_another_kernel_or_python_moves_no_fragment_but_other_flags_do() -> None:
    described = describe_machine()
    same = {**described, "kernel": "another", "python": "3.99", "os": "another"}
    assert device_scope(same) == device_scope(described)
    other = {**described, "cpu_flags_digest": "0" * 16}
    assert device_scope(other) != device_scope(described)


def test_fewer_cores_for_a_job_are_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    described = describe_machine()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    masked = describe_machine()
    assert (described["n_cores"], masked["n_cores"]) == (3, 1)
    assert device_scope(masked) == device_scope(described)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"avx2", "avx512f", "avx512_vnni"}, " with AVX-512 VNNI"),
        ({"avx2", "avx512f"}, " with AVX-512"),
        ({"avx2"}, " with AVX2"),
        ({"asimd"}, " with NEON"),
        (set(), ""),
    ],
)
def test_the_widest_vector_unit_is_named(flags: set[str], words: str) -> None:
    assert machine._vector_unit(flags) == words


# -------------------------------------------------------------------------------- environment

FAMILY = [
    "GGML_CPU_EXACT",
    "GGML_NO_BACKTRACE",
    "LLAMA_ARG_CTX_SIZE",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
]


def test_the_engine_sees_what_the_route_names_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin", "OTHER_GGML_": "x"})
    os.environ.update(dict.fromkeys(FAMILY, "of the user"))
    route = {"OMP_NUM_THREADS": "2", "GGML_CPU_EXACT": "1", "LLAMA_TRACE": "0"}
    removed = set_engine_environment(route)
    assert removed == sorted(set(FAMILY) - set(route))
    assert os.environ == {"PATH": "/bin", "OTHER_GGML_": "x", **route}
    assert set_engine_environment(route) == []


def test_a_route_that_names_nothing_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FAMILY:
        monkeypatch.setenv(name, "1")
    assert set(FAMILY) <= set(set_engine_environment({}))
    assert not set(FAMILY) & set(os.environ)
    assert "PATH" in os.environ


def test_a_variable_of_another_family_is_set_where_the_route_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})
    set_engine_environment({"MALLOC_ARENA_MAX": "1"})
    assert os.environ == {"PATH": "/bin", "MALLOC_ARENA_MAX": "1"}


# --------------------------------------------------------------------------------------- load


@pytest.mark.parametrize(
    ("busy_s", "steal_s", "own_s", "share"),
    [
        (4.0, 0.0, 4.0, 0.0),  # all of it ours
        (4.0, 0.0, 3.0, 0.5),  # a second of two by others: half a core
        (4.0, 1.0, 4.0, 0.5),  # stolen by another guest
        (6.0, 0.0, 0.0, 3.0),  # three cores at work, none for us
        (1.0, 0.0, 1.02, 0.0),  # ticks of different clocks: never below nothing
    ],
)
def test_the_share_of_others_is_in_cores(
    busy_s: float, steal_s: float, own_s: float, share: float
) -> None:
    before = Load(busy_s=100, steal_s=10, own_s=50, at_s=1000)
    after = Load(100 + busy_s, 10 + steal_s, 50 + own_s, 1002)
    assert other_cpu_share(before, after) == pytest.approx(share)


def test_no_time_between_two_readings_is_no_error() -> None:
    load = read_load([os.getpid()])
    assert other_cpu_share(load, load) == 0.0


def test_our_own_work_is_counted_as_ours() -> None:
    before = read_load([os.getpid()])
    cpu_before_s = time.process_time()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        sum(range(1000))
    after = read_load([os.getpid()])
    cpu_s = time.process_time() - cpu_before_s
    assert after.own_s - before.own_s == pytest.approx(cpu_s, abs=0.05)
    assert after.busy_s >= before.busy_s
    assert 0 < after.at_s - before.at_s < 60
    others = other_cpu_share(before, after)
    assert 0 <= others <= (os.cpu_count() or 1) + 0.5
    # the same work under another process's name is the work of others
    strange = Load(after.busy_s, after.steal_s, before.own_s, after.at_s)
    assert other_cpu_share(before, strange) >= others


def test_the_clock_is_a_clock_or_nothing() -> None:
    mhz = clock_mhz()
    assert mhz is None or 100 < mhz < 10_000
