"""What a user gets wrong, and what a machine does: each ends in a message that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workbench import Bench, Outcome, make_bench, provenance_of

from .conftest import STOCK, MakeBench

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def check_message(outcome: Outcome, *parts: str) -> None:
    """The run failed, without a traceback, and said all of ``parts``."""
    assert outcome.code != 0, outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    for part in parts:
        assert part in outcome.text, f"{part!r} is not in:\n{outcome.text}"


def check_nothing_ran(bench: Bench) -> None:
    assert not list(bench.results.glob("cells/*/*"))
    assert not list(bench.results.glob("models/*/*"))


@pytest.fixture
def fresh(session_bench: MakeBench, stock_study: dict[str, Any]) -> Bench:
    """Return a working folder of the stock study in which nothing was made."""
    return session_bench(stock_study)


def replay(study: dict[str, Any]) -> dict[str, Any]:
    sweep: dict[str, Any] = study["sweeps"]["replay"]
    return sweep


#: what is done to the study, and what the message must say: key, value found, value wanted, hint
MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "width 0": (
        lambda study: replay(study).update(widths=[4, 0]),
        ["study.yaml", "sweeps.replay.widths", "0", "try:"],
    ),
    "width beyond the micro-batch": (
        lambda study: replay(study).update(widths=[4, 257]),
        ["sweeps.replay.widths is 257", "micro-batch of route 'cpu-stock', 256", "try:"],
    ),
    "width in words": (
        lambda study: replay(study).update(widths=[4, "three"]),
        ["study.yaml", "sweeps.replay.widths", "'three'", "try:"],
    ),
    "unknown route": (
        lambda study: replay(study).update(routes=["cpu-stok"]),
        ["sweeps.replay.routes[0] is 'cpu-stok'", "did you mean 'cpu-stock'?"],
    ),
    "two cells of a name": (
        lambda study: replay(study).update(widths=[4, 2, 4]),
        ["sweeps.replay.widths", "4 stands twice", "two cells of the same name", "try:"],
    ),
    "unknown key": (
        lambda study: replay(study).update(width=[4]),
        ["study.yaml", "sweeps.replay", "width", "try:"],
    ),
    "unknown patch": (
        lambda study: study["builds"][STOCK].update(patch="cpu-exakt"),
        ["cpu-exakt", "cpu-exact"],
    ),
    "missing model": (
        lambda study: study["models"].update(small={"kind": "path", "path": "nowhere.gguf"}),
        ["nowhere.gguf"],
    ),
    "wrong digest": (
        lambda study: study["models"]["small"].update(sha256="0" * 64),
        ["small-f16.gguf", "SHA-256", f"wanted {'0' * 64}"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_study_stops_the_plan(fresh: Bench, mistake: str) -> None:
    make, parts = MISTAKES[mistake]
    make(fresh.study)
    check_message(fresh.snakemake(), *parts)
    check_nothing_ran(fresh)


def test_a_route_declared_twice_stops_the_plan(fresh: Bench) -> None:
    study = fresh.write_study()
    twice = "routes:\n  cpu-stock: {build: cpu-stock}\n"
    text = study.read_text().replace("routes:\n", twice, 1)
    study.write_text(text)
    command = fresh.command()
    study.write_text(text)  # command() wrote it as it should be
    done = subprocess.run(
        command, cwd=fresh.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    check_message(
        Outcome(done.returncode, done.stdout), "study.yaml", "'cpu-stock' stands twice", "try:"
    )


def test_a_truncated_model_is_named(fresh: Bench) -> None:
    whole = Path(fresh.study["models"]["small"]["path"])
    cut = fresh.folder / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-1000])
    fresh.study["models"]["small"]["path"] = str(cut)
    check_message(
        fresh.snakemake(), "cut.gguf: truncated GGUF", f"{cut.stat().st_size:,} bytes", "try:"
    )
    assert not list(fresh.results.rglob("*.gguf"))


def test_a_prompt_longer_than_the_context_is_named(fresh: Bench) -> None:
    fresh.study["routes"][STOCK]["context"] = 256  # the last prompt needs 277
    check_message(
        fresh.snakemake(),
        "prompt crossing: 237 tokens and 40 to decode make 277, more than the context of 256",
        "try: raise the route's context to 277 or more",
    )
    assert not list(fresh.results.glob("cells/*/*"))


def test_no_compiler(fresh: Bench, tmp_path: Path) -> None:
    """A study whose builds have yet to be made, on a machine that cannot."""
    builds = fresh.results / "builds"
    builds.unlink()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "sh", "env", "tee", "uname"):
        (programs / name).symlink_to(str(shutil.which(name)))
    path = os.pathsep.join([str(Path(sys.executable).parent), str(programs)])
    environment = {"PATH": path, "CC": "", "CXX": ""}
    check_message(
        fresh.snakemake(**environment), "no C compiler found", "gcc", "try: install one", "apt-get"
    )
    check_nothing_ran(fresh)
    assert not builds.exists()


# -------------------------------------------------------------------------------------- disk full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of its own with room for few fragments."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_loses_nothing_whole(stock: Bench, small_disk: Path, tmp_path: Path) -> None:
    bench = stock.copy(tmp_path / "copy")
    shutil.rmtree(bench.results / "stock")
    for name in ("cells", "store"):
        shutil.rmtree(bench.results / name)
        (small_disk / name).mkdir()
        (bench.results / name).symlink_to(small_disk / name)
    outcome = bench.snakemake()
    check_message(outcome, "No space left on device: results/", "try: check free space")
    kept = {path: path.read_bytes() for path in small_disk.rglob("*.parquet")}
    assert kept  # it was not full from the start
    for path in kept:
        assert provenance_of(path)["schema_version"] == 1
    assert not list(small_disk.rglob("*.part"))
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    bench.snakemake("results/stock/receipt.json").check()
    assert {path: path.read_bytes() for path in kept if "store" in path.parts} == {
        path: content for path, content in kept.items() if "store" in path.parts
    }
    cells = bench.cells()
    assert set(cells) == set(stock.cells())
    assert sum(provenance_of(path)["n_adopted"] for path in cells.values()) > 0


def test_a_full_disk_at_the_model_leaves_no_model(
    stock_study: dict[str, Any],
    whole_study: dict[str, Any],
    real_results: Path,
    small_disk: Path,
    tmp_path: Path,
) -> None:
    """llama-quantize writes more than there is room for."""
    bench = make_bench(tmp_path / "work", real_results, stock_study)
    bench.study["models"] = whole_study["models"]
    shutil.copy(
        Path(__file__).parents[2] / "config/prompts/demo.jsonl", bench.folder / "prompts.jsonl"
    )
    (small_disk / "models").mkdir()
    (bench.results / "models").symlink_to(small_disk / "models")
    check_message(bench.snakemake(), "No space left on device", "try: check free space")
    assert not [p for p in small_disk.rglob("small.gguf*") if p.is_file()]
