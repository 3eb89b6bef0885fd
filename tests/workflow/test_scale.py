"""The benchmark of large studies runs, and both of its workflows make the same number of jobs.

How long anything takes is no matter of a test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.scale_against_bare_snakemake as scale
from benchmarks.scale_against_bare_snakemake import BEGIN, END, Shape

SMALL = Shape.of(60)


@pytest.mark.parametrize("n_cells", [100, 1000, 10_000, 100_000])
def test_a_study_is_about_as_large_as_asked(n_cells: int) -> None:
    shape = Shape.of(n_cells)
    assert shape.n_cells == pytest.approx(n_cells, rel=0.03)
    assert max(shape.widths) <= 512


def test_both_workflows_make_the_same_jobs_and_finish(tmp_path: Path) -> None:
    """Jobs are counted by Snakemake before the run, and none may be left after it."""
    pairs = scale.measure(SMALL, rounds=1, runs=1, scratch=tmp_path / "scratch")
    assert {step: len(taken) for step, taken in pairs.items()} == dict.fromkeys(scale.STEPS, 1)
    made = tmp_path / "scratch/ours/results"
    assert len(list(made.glob("cells/*/*.parquet"))) == SMALL.n_cells
    assert (made / "large/receipt.json").is_file()

    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    scale.write_into(page, scale.table({SMALL: pairs}, load=0.0))
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert sum(f"| {SMALL.n_cells} | {SMALL.n_jobs} |" in line for line in lines) == len(
        scale.STEPS
    )


def test_a_workflow_of_other_jobs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = scale.make_bare(SMALL)
    bare["variants"].remove("ragged")
    monkeypatch.setattr(scale, "make_bare", lambda shape: bare)
    with pytest.raises(SystemExit, match=f"bare: .* jobs, not {SMALL.n_jobs}"):
        scale.measure(SMALL, rounds=1, runs=1, scratch=tmp_path / "scratch")


def test_a_page_without_a_place_for_the_table_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no table here\n")
    with pytest.raises(SystemExit, match="has no lines"):
        scale.write_into(page, "a table")
    assert page.read_text() == "no table here\n"


def test_a_large_study_is_made_in_batches(tmp_path: Path) -> None:
    interpreter = scale.make_stub(tmp_path / "stub")
    (tmp_path / "study").mkdir()
    study = scale.make_study(SMALL, tmp_path / "study")
    ours = scale.Workflow(tmp_path / "ours", scale.ROOT / "Snakefile", study, interpreter)
    results = tmp_path / "ours/results"
    receipt = "results/large/receipt.json"  # `all` asks for every cell by name
    ours.sample("--batch", "build_tables=1/2", receipt)
    assert 0 < len(list(results.glob("cells/*/*.parquet"))) < SMALL.n_cells
    assert not (results / "large").exists()
    ours.sample("--batch", "build_tables=2/2", receipt)
    assert len(list(results.glob("cells/*/*.parquet"))) == SMALL.n_cells
    assert (results / "large/receipt.json").is_file()
