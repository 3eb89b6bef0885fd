"""One working folder and several hosts or people: nothing is measured twice, nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from routewise.inputs import RESULTS_FORMAT
from workbench import Bench, provenance_of

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

RECEIPT = "results/stock/receipt.json"
MEASURING = "measure_replay.py"
SKEW_S = 600.0


def shift(bench: Bench, pattern: str, seconds: float) -> None:
    """Date files as a host whose clock is that much ahead would have; links themselves too."""
    found = [path for path in bench.results.glob(pattern) if not path.is_dir()]
    assert found, pattern
    for path in found:
        at_s = path.lstat().st_mtime + seconds
        os.utime(path, (at_s, at_s), follow_symlinks=False)


def own_builds(bench: Bench) -> None:
    """Give a copy of a finished run builds of its own, to be dated at will."""
    builds = bench.results / "builds"
    shared = builds.resolve()
    builds.unlink()
    subprocess.run(["cp", "-a", str(shared), str(builds)], check=True)


def test_inputs_dated_ahead_of_this_clock_stop_no_job(stock: Bench, tmp_path: Path) -> None:
    """Snakemake fails a job whose output is dated before its input."""
    bench = stock.copy(tmp_path / "copy")
    own_builds(bench)
    for written in ("builds/*/build.json", "models/*/*", "prompts/*/*.parquet"):
        shift(bench, written, SKEW_S)
    cells = bench.cells()
    for name in ("cells", "stock"):
        subprocess.run(["rm", "-r", str(bench.results / name)], check=True)
    bench.snakemake(RECEIPT).check()
    assert set(bench.cells()) == set(cells)
    assert bench.jobs_left(RECEIPT) == {}


@pytest.mark.parametrize("killed", [False, True])
def test_the_second_is_told_who_is_running_and_looks_stay_possible(
    stock: Bench, tmp_path: Path, killed: bool
) -> None:
    bench = stock.copy(tmp_path / "copy")
    for name in ("cells", "store", "stock"):
        subprocess.run(["rm", "-r", str(bench.results / name)], check=True)
    bench.write_prompts(
        {"id": f"p{index}", "category": "ids", "n_tokens": 250, "token_ids": [index, 5, 6]}
        for index in range(290)
    )
    second = Bench(bench.folder, bench.study)
    with bench.running(RECEIPT) as run:
        assert run.wait_for(MEASURING), run.wait().text
        if killed:  # a lock is left, and this kernel knows that its maker is gone
            run.process.kill()
            bench.wait_until_none_is_left()
            with_lock = list((bench.folder / ".snakemake/locks").glob("*.lock"))
            assert with_lock
        for arguments in (["--dry-run", RECEIPT], ["explain"]):
            looked = look(second, *arguments)
            assert looked.returncode == 0, looked.stdout
            assert (f"process {run.process.pid}" in looked.stdout) != killed
        if killed:
            return
        # the end of a look took Snakemake's own locks away; the record still stops a second run
        again = look(second, RECEIPT)
        assert again.returncode != 0
        assert f"process {run.process.pid}, since 20" in again.stdout
        assert "Traceback" not in again.stdout
        assert not run.over
        kept = list((bench.results / "store").glob("*/*.parquet"))
        assert len(kept) < 290
        os.killpg(run.process.pid, 15)
        run.wait()
        assert all(path.is_file() for path in kept)
    assert not list((bench.folder / ".snakemake/routewise").glob("*.json"))


def look(bench: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Snakemake beside one that runs already, whose output has a file of its own."""
    return subprocess.run(
        bench.command(*arguments),
        cwd=bench.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_results_of_a_newer_routewise_stop_everything(stock: Bench, tmp_path: Path) -> None:
    bench = stock.copy(tmp_path / "copy")
    mark = bench.results / "format.json"
    assert json.loads(mark.read_text()) == {"format": RESULTS_FORMAT}
    mark.write_text(json.dumps({"format": RESULTS_FORMAT + 1}))
    for path in bench.cells().values():
        path.unlink()
    for arguments in (["--dry-run", RECEIPT], [RECEIPT]):
        outcome = bench.snakemake(*arguments)
        assert outcome.code != 0
        assert "Traceback" not in outcome.text
        assert "format.json: these results have format" in outcome.text
        assert "try: take the newer Routewise" in outcome.text
    assert not bench.cells()


def test_results_of_an_older_routewise_are_kept_beside_a_fresh_start(
    stock: Bench, tmp_path: Path
) -> None:
    bench = stock.copy(tmp_path / "copy")
    (bench.results / "format.json").write_text(json.dumps({"format": RESULTS_FORMAT - 1}))
    older = bench.results / "cells" / ("0" * 16) / "replay.cpu-stock.small.w4.parquet"
    older.parent.mkdir()
    written = next(iter(bench.cells().values()))
    table = pq.read_table(written)
    document = {**provenance_of(written), "inputs": {"format": RESULTS_FORMAT - 1}}
    metadata = {b"routewise": json.dumps(document).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), older)
    (bench.results / "stock/receipt.json").unlink()  # something to make
    told = "holds results of an older Routewise (1 of format"
    assert told in bench.snakemake("--dry-run", RECEIPT).check().text
    assert told in bench.snakemake(RECEIPT).check().text
    assert told not in bench.snakemake("--dry-run", RECEIPT).check().text
    assert older.is_file()


#: Of root, what ignores modes and owners: without it root is a user like any other.
POWERS = ",".join(f"-{name}" for name in ("dac_override", "dac_read_search", "fowner", "chown"))


@pytest.mark.parametrize("closed", [".", "results"])
def test_a_folder_that_another_user_closed_is_named(
    stock: Bench, tmp_path: Path, closed: str
) -> None:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("needs root, to give files to another user, and setpriv")
    bench = stock.copy(tmp_path / "copy")
    shutil.rmtree(bench.results / "stock")
    shutil.rmtree(bench.results / ".cache/cells")
    subprocess.run(["chown", "-hR", "4242:4242", str(bench.folder / closed)], check=True)
    prefix = ["setpriv", f"--bounding-set={POWERS}", f"--inh-caps={POWERS}"]
    for arguments in (["--dry-run", RECEIPT], [RECEIPT]):
        done = subprocess.run(
            [*prefix, *bench.command(*arguments)],
            cwd=bench.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stdout, done.stdout
        if "--dry-run" in arguments and closed == "results":
            assert done.returncode == 0, done.stdout
    assert done.returncode != 0
    assert "ermission denied" in done.stdout
    assert str(bench.folder) in done.stdout
    assert "belongs to user 4242, mode 755" in done.stdout
    assert "have its owner open" in done.stdout
    assert not (bench.results / "stock").exists()
