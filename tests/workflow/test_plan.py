"""What is made is not made again: nothing to do twice, and one more thing costs one thing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from workbench import Bench, provenance_of

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

RECEIPT = "results/stock/receipt.json"  # figures cost seconds, and have their test
STUDY_JOBS = {"build_tables": 1, "write_receipt": 1}


def times_of(bench: Bench) -> dict[str, int]:
    return {name: path.stat().st_mtime_ns for name, path in bench.cells().items()}


def test_a_finished_study_has_nothing_to_do(chain: Bench, tmp_path: Path) -> None:
    bench = chain.copy(tmp_path / "copy")
    assert bench.jobs_left() == {}
    before = times_of(bench)
    assert "Nothing to be done" in bench.snakemake().check().text
    assert times_of(bench) == before


def test_what_was_removed_is_made_again(chain: Bench, tmp_path: Path) -> None:
    """Though the receipt that was made of it is there."""
    bench = chain.copy(tmp_path / "copy")
    end = {"build_tables": 1, "write_receipt": 1, "draw_figure": 3, "all": 1}
    for folder in ("tables", "figures"):
        kept = shutil.move(bench.results / "small" / folder, tmp_path / folder)
        assert bench.jobs_left() == (end if folder == "tables" else {"draw_figure": 3, "all": 1})
        shutil.move(kept, bench.results / "small" / folder)
    bench.cells()["replay.cpu-exact.small.w4"].unlink()
    assert bench.jobs_left() == {"measure_replay": 1, **end}
    gate = {"build_tables": 1, "write_receipt": 1, "check": 1}
    assert bench.jobs_left("check") == {"measure_replay": 1, **gate}


def test_touched_files_rerun_nothing(stock: Bench, repository: Path, tmp_path: Path) -> None:
    """Dates move with every checkout and copy: only meaning counts."""
    bench = stock.copy(tmp_path / "copy")
    model = bench.folder / "own.gguf"
    shutil.copy(bench.study["models"]["small"]["path"], model)
    bench.study["models"]["small"]["path"] = str(model)
    bench.snakemake(RECEIPT).check()
    touched = [model, bench.folder / "prompts.jsonl", bench.folder / "study.yaml"]
    for folder in ("patches", "workflow/scripts", "workflow/shim", "workflow/rules", "config"):
        touched += [path for path in (repository / folder).rglob("*") if path.is_file()]
    for path in touched:
        os.utime(path)
    assert bench.jobs_left(RECEIPT) == {}
    # and what is measured next takes the touched model for what it is
    bench.study["sweeps"]["replay"]["widths"] = [4, 6]
    bench.snakemake(RECEIPT).check()


def test_layout_of_prompts_reruns_nothing(stock: Bench, tmp_path: Path) -> None:
    bench = stock.copy(tmp_path / "copy")
    file = bench.folder / "prompts.jsonl"
    file.write_text("\n".join(f"  {line}" for line in file.read_text().splitlines()) + "\n\n")
    assert bench.jobs_left(RECEIPT) == {}


def test_one_more_width_measures_that_width(stock: Bench, tmp_path: Path) -> None:
    bench = stock.copy(tmp_path / "copy")
    before = times_of(bench)
    bench.study["sweeps"]["replay"]["widths"] = [4, 6]
    assert bench.jobs_left(RECEIPT) == {"measure_replay": 1, **STUDY_JOBS}
    bench.snakemake(RECEIPT).check()
    after = times_of(bench)
    assert set(after) - set(before) == {"replay.cpu-stock.small.w6"}
    assert {name: after[name] for name in before} == before
    added = provenance_of(bench.cells()["replay.cpu-stock.small.w6"])
    assert (added["n_measured"], added["n_adopted"]) == (3, 0)
    assert [c["id"].rpartition("/")[2] for c in bench.receipt["claims"]] == ["w4", "w6"]
    # and away again: nothing is measured
    bench.study["sweeps"]["replay"]["widths"] = [4]
    assert bench.jobs_left(RECEIPT) == STUDY_JOBS
    bench.snakemake(RECEIPT).check()
    assert times_of(bench) == after
    assert [c["id"].rpartition("/")[2] for c in bench.receipt["claims"]] == ["w4"]


def test_one_more_prompt_measures_that_prompt(stock: Bench, tmp_path: Path) -> None:
    """Put first, so that every old prompt moves to another place in the set."""
    bench = stock.copy(tmp_path / "copy")
    old = bench.cells()
    file = bench.folder / "prompts.jsonl"
    line = '{"id": "added", "category": "ids", "n_tokens": 8, "token_ids": [9, 8, 7]}\n'
    file.write_text(line + file.read_text())
    assert bench.jobs_left(RECEIPT) == {
        "tokenize_prompts": 1,
        "measure_plain": 1,
        "measure_replay": 2,
        **STUDY_JOBS,
    }
    bench.snakemake(RECEIPT).check()
    for name, path in old.items():
        [new] = [p for p in bench.results.glob(f"cells/*/{name}.parquet") if p != path]
        provenance = provenance_of(new)
        assert (provenance["n_measured"], provenance["n_adopted"]) == (1, 3), name
        rows, before = pq.read_table(new), pq.read_table(path)
        assert set(rows["prompt_index"].to_pylist()) == {0, 1, 2, 3}
        kept = rows.filter(pc.field("prompt_id") != "added").drop_columns("prompt_index")
        assert kept.equals(before.drop_columns("prompt_index"))


def test_another_setting_measures_anew(stock: Bench, tmp_path: Path) -> None:
    bench = stock.copy(tmp_path / "copy")
    bench.study["routes"]["cpu-stock"]["flash_attention"] = False
    assert bench.jobs_left(RECEIPT) == {"measure_plain": 1, "measure_replay": 2, **STUDY_JOBS}


def test_code_that_reports_is_an_input_of_what_it_makes(
    chain: Bench, repository: Path, tmp_path: Path
) -> None:
    """Asked of Snakemake itself, with the rules and scripts of a copy that is edited."""
    bench = chain.copy(tmp_path / "copy")
    kept = list((bench.results / "receipts").glob("*/receipt.json"))
    written = bench.results / "small" / "receipt.json"
    assert [path.read_bytes() for path in kept] == [written.read_bytes()]

    copy = tmp_path / "repository"
    for part in ("workflow", "config", "patches"):
        shutil.copytree(repository / part, copy / part)
    snakefile = shutil.copy(repository / "Snakefile", copy)

    def left(script: str) -> dict[str, int]:
        file = copy / "workflow/scripts" / script
        before = file.read_text()
        file.write_text(f"{before}\nX = 1\n")
        found = bench.jobs_left("--snakefile", str(snakefile))
        file.write_text(before)
        return found

    assert bench.jobs_left("--snakefile", str(snakefile)) == {}
    figures, end = {"draw_figure": 3}, {"all": 1}
    assert left("draw_figure.py") == {**figures, **end}
    assert left("routewise/receipt.py") == {"write_receipt": 1, **end}
    assert left("build_tables.py") == {"build_tables": 1, "write_receipt": 1, **figures, **end}


def test_a_missing_device_stops_a_run_and_warns_a_plan(stock: Bench, tmp_path: Path) -> None:
    bench = stock.copy(tmp_path / "copy")
    route = {"command": ["nobody", "{model}", "{port}"], "device": "npu", "context": 512}
    bench.study["routes"]["npu"] = route
    bench.study["sweeps"]["repeat"] = {"routes": ["npu"], "models": ["small"], "prompts": "few"}
    unseen = {"ROUTEWISE_DEVICES": ""}
    sentence = "this machine has no npu device"
    for words in (["--dry-run"], ["explain"]):
        outcome = bench.snakemake(*words, **unseen).check()
        assert f"warning: {sentence}" in outcome.text
    before = times_of(bench)
    outcome = bench.snakemake(**unseen)
    assert outcome.code != 0
    assert sentence in outcome.text
    assert "ROUTEWISE_DEVICES=npu" in outcome.text
    assert "Traceback" not in outcome.text
    assert times_of(bench) == before
    assert sentence not in bench.snakemake("--dry-run").check().text
