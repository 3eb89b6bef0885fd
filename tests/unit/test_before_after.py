from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from made_cells import MadeStudy, cost_rows
from routewise.__main__ import parse, run
from routewise.before_after import Report, compare_receipts
from routewise.document import receipt_markdown
from routewise.errors import RoutewiseError
from routewise.history import find_receipt, keep_receipt, list_receipts
from routewise.receipt import build_receipt, receipt_json
from routewise.table import read_tables

MODEL = "small-q4_k_m"
KEPT = Path(__file__).parents[2] / "docs" / "receipts" / "x86-64-avx512-vnni-2-cores"


def written(made: MadeStudy) -> Path:
    """Write cells, tables and receipt of a made study; return its receipt.json."""
    receipt = build_receipt(read_tables(made.tables()))
    path = made.folder / "receipt.json"
    path.write_text(receipt_json(receipt))
    return path


def kept(made: MadeStudy, history: Path) -> Path:
    """Keep a made study's receipt in a history; return its folder there."""
    receipt = build_receipt(read_tables(made.tables()))
    return keep_receipt(history, receipt_json(receipt), receipt_markdown(receipt))


def compared(one: MadeStudy, two: MadeStudy) -> Report:
    return compare_receipts(written(one), written(two), one.folder)


def told(report: Report, word: str) -> list[str]:
    return [line for line in report.lines if line.startswith(f"  {word}")]


def move_plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Change one row's hash."""
    rows = rows.copy()
    rows.at[rows.index[30], "logits_hash"] = b"another 128 bits"
    return rows


@pytest.fixture
def one(tmp_path: Path) -> MadeStudy:
    return MadeStudy(tmp_path / "one")


@pytest.fixture
def two(tmp_path: Path) -> MadeStudy:
    return MadeStudy(tmp_path / "two")


def test_the_same_results_measured_twice_have_changed_nothing(
    one: MadeStudy, two: MadeStudy
) -> None:
    report = compared(one, two)
    assert (report.exit_code, report.n_changed, report.n_unobservable) == (0, 0, 0)
    assert any("100 of 100 rows equal" in line and "2.951%" in line for line in report.lines)


def test_a_moved_bit_is_told_with_its_place(one: MadeStudy, two: MadeStudy) -> None:
    report = compared(one, two.edit_plain("cpu-exact", move_plain))
    assert report.exit_code == 1
    [line] = [line for line in told(report, "changed") if "rows equal" in line]
    assert "99 of 100 rows equal, 1 differ" in line
    assert "first: prompt code-1 step 5" in line


def test_a_changed_verdict_is_told_with_both(one: MadeStudy, two: MadeStudy) -> None:
    def flip(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows.copy()
        rows.loc[rows.index[-1], ["bits_equal", "n_differing"]] = [False, 1]
        rows.at[rows.index[-1], "replay_hash"] = b"another 128 bits"
        return rows

    report = compared(one, two.edit("cpu-exact", "w8", flip))
    [line] = [line for line in told(report, "changed") if f"replay/cpu-exact/{MODEL}/w8" in line]
    assert "exact (0 of 96 differ" in line
    assert "-> differs (1 of 96 differ" in line


def test_a_claim_only_in_one_is_a_change(one: MadeStudy, tmp_path: Path) -> None:
    declared = json.loads(json.dumps(one.declared))
    declared["sweeps"]["replay"]["widths"] = [2, 4]
    report = compared(one, MadeStudy(tmp_path / "two", declared))
    assert any("w8: only in old" in line for line in told(report, "changed"))


def test_a_price_changes_only_where_intervals_lie_apart(one: MadeStudy, two: MadeStudy) -> None:
    two.cost = cost_rows(
        {"cpu-stock": (4.0, 5.2, 6.0, 18.0), "cpu-exact": (4.0, 5.0, 6.6, 10.5)}, (1, 2, 4, 8)
    )
    report = compared(one, two)
    changed = told(report, "changed")
    assert any(
        "cpu-stock" in line and "width 8" in line and "intervals apart" in line for line in changed
    )
    assert not any("width 4" in line for line in changed)


def test_bits_that_cannot_be_read_are_unobservable_and_never_equal(
    one: MadeStudy, two: MadeStudy
) -> None:
    old, new = written(one), written(two)
    shutil.rmtree(one.folder / "tables")
    shutil.rmtree(one.folder / "cells")
    report = compare_receipts(old, new, one.folder)
    assert report.exit_code == 2
    assert len(told(report, "unobservable")) == 2
    assert not any("rows equal" in line for line in report.lines)


def test_bits_are_read_from_cell_files_unless_they_were_measured_again(
    one: MadeStudy, two: MadeStudy
) -> None:
    old, new = written(one), written(two)
    shutil.rmtree(one.folder / "tables")
    assert compare_receipts(old, new, one.folder).exit_code == 0
    one.record("cpu-exact", "plain", ended_at="2027-01-01T00:00:00+00:00").write()
    report = compare_receipts(old, new, one.folder)
    assert report.exit_code == 2
    assert "measured again" in told(report, "unobservable")[0]


def test_tables_of_other_libraries_are_not_the_receipts(one: MadeStudy, two: MadeStudy) -> None:
    """As where tables were made again, and the receipt could not be written."""
    old, new = written(one), written(two)
    document = json.loads(old.read_text())
    for route in document["provenance"]["routes"].values():
        route["fingerprint"] = "0" * 64
    old.write_text(json.dumps(document))
    report = compare_receipts(old, new, one.folder)
    assert "other libraries than the receipt says" in told(report, "unobservable")[0]
    assert not any("rows equal" in line for line in report.lines)


def test_receipts_with_nothing_in_common_are_refused(one: MadeStudy) -> None:
    with pytest.raises(RoutewiseError, match="share no claim"):
        compare_receipts(written(one), KEPT / "cpu-serving" / "receipt.json", one.folder)


def test_kept_receipts_of_real_runs_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from the cells that a run here may have left
    demo = KEPT / "demo" / "receipt.json"
    moved = tmp_path / "receipt.json"
    moved.write_text(demo.read_text() + "\n")
    report = compare_receipts(demo, moved, tmp_path)
    assert report.exit_code == 2  # the copy has no tables beside it
    shutil.copytree(demo.parent / "tables", tmp_path / "tables")
    report = compare_receipts(demo, moved, tmp_path)
    assert (report.exit_code, report.n_changed) == (0, 0)


def test_an_older_receipt_stays_when_the_study_is_run_again(
    one: MadeStudy, two: MadeStudy, tmp_path: Path
) -> None:
    history = tmp_path / "receipts"
    first = kept(one, history)
    assert kept(one, history) == first
    text = (first / "receipt.json").read_text()
    second = kept(two.edit_plain("cpu-exact", move_plain), history)
    assert second != first
    assert (first / "receipt.json").read_text() == text
    assert len(list_receipts(history)) == 2
    assert find_receipt(first.name[:6], history) == first / "receipt.json"
    assert find_receipt(str(second), history) == second / "receipt.json"


def test_a_name_that_fits_no_receipt_or_several_lists_what_there_is(
    one: MadeStudy, two: MadeStudy, tmp_path: Path
) -> None:
    history = tmp_path / "receipts"
    names = [kept(made, history).name for made in (one, two.edit_plain("cpu-exact", move_plain))]
    with pytest.raises(RoutewiseError, match="no digest of a receipt") as error:
        find_receipt("zz", history)
    assert all(name in str(error.value) for name in names)
    shutil.copytree(history / names[0], history / names[0][:3])
    with pytest.raises(RoutewiseError, match="2 kept receipts begin so"):
        find_receipt(names[0][:3], history)


def test_a_damaged_receipt_is_listed_and_not_compared(one: MadeStudy, tmp_path: Path) -> None:
    history = tmp_path / "receipts"
    folder = kept(one, history)
    (folder / "receipt.json").write_text("{}")
    assert "damaged" in list_receipts(history)[0].line()
    with pytest.raises(RoutewiseError, match="damaged"):
        find_receipt(folder.name, history)
    kept(one, history)
    assert find_receipt(folder.name, history) == folder / "receipt.json"


def test_the_command_lists_compares_and_says_what_it_wanted(
    one: MadeStudy, two: MadeStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path)]
    name = kept(one, tmp_path / "receipts").name
    assert run(parse(["compare", "--list", *results])) == 0
    assert f"{name}  2026-11-30T12:00:09+00:00  demo" in capsys.readouterr().out
    assert run(parse(["compare", name, str(written(two)), *results])) == 0
    assert (
        run(
            parse(
                ["compare", name, str(written(two.edit_plain("cpu-exact", move_plain))), *results]
            )
        )
        == 1
    )
    capsys.readouterr()
    assert run(parse(["compare", name, *results])) == 2
    assert name in capsys.readouterr().err
