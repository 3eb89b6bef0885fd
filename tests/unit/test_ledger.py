"""Two declarations of one device: claims that could be given one unit under two keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.claim import ClaimSpec, hold_device
from routewise.errors import RoutewiseError
from routewise.ledger import Entry, Ledger, contradicts

pytestmark = pytest.mark.usefixtures("module_leaves_nothing")

HOLDER = """
import json, sys
from pathlib import Path
from routewise.claim import ClaimSpec, hold_device

spec = ClaimSpec.from_document(json.loads(sys.argv[2]))
with hold_device(spec, "the other", Path(sys.argv[1])) as held:
    print(held.unit, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "claims"


@contextmanager
def held_by_another(folder: Path, spec: ClaimSpec, **environment: str) -> Iterator[str]:
    """Let another process hold a claim; yield its unit."""
    command = [sys.executable, "-c", HOLDER, str(folder), json.dumps(asdict(spec))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


def entry(
    *wants: str, n_units: int | None = None, named: tuple[str, ...] = (), ticket: int = 1
) -> Entry:
    return Entry(
        ticket=ticket,
        label="x",
        wants=wants,
        whole=False,
        limit_s=1.0,
        user="u",
        pid=1,
        start_ticks=1,
        arrived_s=0.0,
        n_units=len(wants) if n_units is None else n_units,
        named=named,
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ClaimSpec("hrx", unit_ids=("gfx0",)), ("unit_ids: [gfx0]", "unit_ids: [0] (by default)")),
        (ClaimSpec("hrx", units=2), ("units: 2", "units: 1")),
        (ClaimSpec("hrx", units=2, unit_ids=("0", "4")), ("unit_ids: [0, 4]", "units: 1")),
    ],
)
def test_a_device_declared_in_two_ways_is_refused(
    folder: Path, other: ClaimSpec, words: tuple[str, str]
) -> None:
    with (
        held_by_another(folder, other) as unit,
        pytest.raises(RoutewiseError, match="declared in two ways") as caught,
        hold_device(ClaimSpec("hrx"), "this", folder),
    ):
        pytest.fail("both hold it")
    assert unit
    assert all(word in caught.value.problem for word in words)
    assert "'the other'" in caught.value.problem
    with hold_device(ClaimSpec("hrx"), "this", folder):  # one after the other is no trouble
        pass
    assert (folder / "routewise-hrx.claims").stat().st_size == 0


def test_a_claim_that_is_refused_leaves_the_holder_and_the_queue(folder: Path) -> None:
    spec = ClaimSpec("hrx", units=2, unit_ids=("a", "b"))
    with held_by_another(folder, spec) as first:
        with (
            pytest.raises(RoutewiseError, match="declared in two ways"),
            hold_device(ClaimSpec("hrx", units=2, unit_ids=("a", "c")), "this", folder),
        ):
            pytest.fail("both hold it")
        # the same units, told in another order, are the same declaration
        with hold_device(ClaimSpec("hrx", units=2, unit_ids=("b", "a")), "this", folder) as held:
            assert {first, held.unit} == {"a", "b"}


def test_jobs_that_a_scheduler_narrowed_share_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees one of the two."""
    for spec in (ClaimSpec("hrx", units=2), ClaimSpec("hrx", units=2, unit_ids=("0", "1"))):
        with held_by_another(folder, spec, ROCR_VISIBLE_DEVICES="0") as unit:
            assert unit == "0"
            monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
            with hold_device(spec, "this", folder) as held:
                assert held.unit == "1"


def test_units_known_by_the_hardware_are_never_two_names_of_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm counts from 0 in each job, and one box may be declared with one unit and with two."""

    def path_with(uuid: str) -> str:
        place = tmp_path / uuid
        place.mkdir()
        tool = place / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '0, {uuid}'\n")
        tool.chmod(0o755)
        return f"{place}:/usr/bin:/bin"

    other = ClaimSpec("cuda", units=2)
    path = path_with("GPU-aaaa")
    with held_by_another(folder, other, PATH=path, CUDA_VISIBLE_DEVICES="0") as unit:
        assert unit == "0"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setenv("PATH", path_with("GPU-bbbb"))
        with hold_device(ClaimSpec("cuda"), "this", folder) as held:
            assert held.unit == "0"
        # without the tool the number 0 may be the other's unit
        monkeypatch.setenv("PATH", "")
        with (
            pytest.raises(RoutewiseError, match="declared in two ways") as caught,
            hold_device(ClaimSpec("cuda"), "this", folder),
        ):
            pytest.fail("both hold it")
        assert "nvidia-smi" in str(caught.value.hint)


NAMES = st.lists(st.sampled_from("0123ab"), min_size=1, max_size=4, unique=True).map(tuple)


@given(first=NAMES, second=NAMES, seen=st.integers(1, 4))
def test_two_declarations_contradict_each_other_or_not_whoever_came_first(
    first: tuple[str, ...], second: tuple[str, ...], seen: int
) -> None:
    a, b = entry(*first[:seen], n_units=len(first), named=first), entry(*second, named=second)
    assert contradicts(a, b) == contradicts(b, a) == (set(first) != set(second))
    assert not contradicts(a, a)
    plain = entry(*second)
    assert contradicts(a, plain) == contradicts(plain, a)
    if not contradicts(a, plain):
        assert set(second) <= set(first)


def test_a_claim_of_a_version_that_declared_nothing_contradicts_none(folder: Path) -> None:
    old = entry("0", n_units=0)
    assert not contradicts(old, entry("gfx0", named=("gfx0",)))
    assert contradicts(entry("0"), entry("gfx0", named=("gfx0",)))
    folder.mkdir()
    ledger = Ledger(folder, "routewise-hrx.claims")
    try:
        with ledger.locked():
            assert ledger.arrive(entry("0", named=("0",))).named == ("0",)
            assert ledger.entries()[0].named == ("0",)
    finally:
        ledger.close()
