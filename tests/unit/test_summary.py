from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_cells import MadeStudy
from made_serving import MadeServing
from routewise.digest import canonical_json
from routewise.receipt import build_receipt, receipt_json
from routewise.summary import closing_line, gate_lines, gate_of, print_summary
from routewise.table import read_tables

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


@pytest.fixture(scope="module")
def receipt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_receipt(read_tables(MadeStudy(tmp_path_factory.mktemp("made")).tables()))


def changed(receipt: dict[str, Any], kind: str, route: str, **changes: Any) -> dict[str, Any]:
    """Return a copy of a receipt in which the first such entry of a route says something else."""
    copied = json.loads(json.dumps(receipt))
    entry = next(one for one in copied[kind] if one["route"] == route)
    entry.update(changes)
    return copied


def test_the_table_has_a_line_for_every_claim_and_control(receipt: dict[str, Any]) -> None:
    stream = io.StringIO()
    print_summary(receipt, "results/demo/receipt.md", stream)
    text = stream.getvalue()
    for entry in [*receipt["claims"], *receipt["controls"]]:
        assert sum(entry["id"] in line.split() for line in text.splitlines()) == 1
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 124
    assert text.splitlines()[-1] == (
        "6 of 6 exact claims hold; 6 of 6 controls hold; receipt: results/demo/receipt.md"
    )


def test_the_closing_line_counts_only_what_holds(receipt: dict[str, Any]) -> None:
    failed = changed(receipt, "claims", "cpu-exact", verdict="invalid", as_expected=False)
    assert closing_line(failed, "r").startswith("5 of 6 exact claims hold; 6 of 6 controls")
    failed = changed(receipt, "controls", "cpu-exact", verdict="differs", as_expected=False)
    assert "5 of 6 controls hold" in closing_line(failed, "r")


@pytest.mark.parametrize(
    ("kind", "route", "changes", "code"),
    [
        ("claims", "cpu-exact", {"verdict": "differs", "as_expected": False}, 1),
        ("claims", "cpu-exact", {"verdict": "invalid", "as_expected": False}, 2),
        ("claims", "cpu-exact", {"verdict": "unobservable", "as_expected": False}, 2),
        ("claims", "cpu-exact", {"verdict": "unsupported", "as_expected": False}, 2),
        ("claims", "cpu-exact", {"verdict": "not-applicable", "expected": None}, 0),
        ("claims", "cpu-stock", {"verdict": "differs"}, 0),
        ("claims", "cpu-stock", {"verdict": "invalid", "expected": None}, 2),
        ("controls", "cpu-exact", {"verdict": "differs", "as_expected": False}, 1),
        ("controls", "cpu-exact", {"verdict": "unobservable", "as_expected": False}, 2),
        ("price", "cpu-exact", {"note": "too few quiet samples"}, 0),
        ("price", "cpu-exact", {"note": "invalid", "n": 0, "n_contended": 0, "n_invalid": 9}, 2),
        ("price", "cpu-exact", {"note": "not measured", "n": 0, "n_contended": 0}, 2),
    ],
)
def test_the_gate_tells_contrary_from_unmeasured(
    receipt: dict[str, Any], kind: str, route: str, changes: dict[str, Any], code: int
) -> None:
    assert gate_of(receipt).exit_code == 0
    gate = gate_of(changed(receipt, kind, route, **changes))
    assert gate.exit_code == code
    if code:
        assert len(gate_lines(gate)) == 1


def test_a_contrary_verdict_outweighs_a_missing_one(receipt: dict[str, Any]) -> None:
    both = changed(receipt, "claims", "cpu-exact", verdict="invalid", as_expected=False)
    both = changed(both, "controls", "cpu-exact", verdict="differs", as_expected=False)
    assert gate_of(both).exit_code == 1


def test_a_receipt_that_says_nothing_does_not_pass(receipt: dict[str, Any]) -> None:
    assert gate_of(receipt | {"claims": [], "price": []}).exit_code == 2


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_scripts_lead_from_cells_to_the_gate(tmp_path: Path) -> None:
    made = MadeStudy(tmp_path)
    cells = made.write()
    listed = tmp_path / "cells.txt"
    listed.write_text("\n".join(map(str, cells)))
    tables, receipt = tmp_path / "demo" / "tables", tmp_path / "demo" / "receipt.json"
    markdown = receipt.with_suffix(".md")
    done = run(
        "build_tables", "--study", canonical_json(made.declared), "--tables", tables, f"@{listed}"
    )
    assert done.returncode == 0, done.stderr
    done = run("write_receipt", "--tables", tables, "--json", receipt, "--markdown", markdown)
    assert done.returncode == 0, done.stderr
    assert markdown.read_text().startswith("# Receipt of the study `demo`")
    done = run("check_study", "--receipt", receipt)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 exact claims hold" in done.stdout

    document = json.loads(receipt.read_text())
    receipt.write_text(
        receipt_json(
            changed(document, "controls", "cpu-exact", verdict="differs", as_expected=False)
        )
    )
    failed = run("check_study", "--receipt", receipt)
    assert failed.returncode == 1
    assert "not as expected: control width-1-equals-plain/cpu-exact" in failed.stderr
    assert run("check_study", "--receipt", receipt, "--show").returncode == 0


def test_a_script_without_its_input_says_what_to_do(tmp_path: Path) -> None:
    failed = run("check_study", "--receipt", tmp_path / "receipt.json")
    assert failed.returncode == 2
    assert "no such receipt" in failed.stderr
    assert "Traceback" not in failed.stderr
    failed = run("build_tables", "--study", "{", "--tables", tmp_path)
    assert failed.returncode == 2
    assert "not JSON" in failed.stderr


def test_the_scripts_draw_what_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MadeServing(tmp_path)
    made.declared["sweeps"]["agree"]["routes"] = ["cpu-stock", "cpu-exact"]
    made.declared["sweeps"]["batched"]["routes"] = ["cpu-stock"]
    del made.declared["sweeps"]["repeat"]
    tables = made.tables()
    for name, table in (
        ("states_by_width", "replies"),
        ("solo_token_kept", "replies"),
        ("agree_dlogp", "agree"),
    ):
        script = SCRIPTS / "draw_figure.py"
        svg, png = (tmp_path / "figures" / f"{name}.{suffix}" for suffix in ("svg", "png"))
        arguments = ["--name", name, "--table", tables / f"{table}.parquet"]
        arguments += ["--svg", svg, "--png", png]
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert ended.value.code == 0
        assert svg.read_bytes().startswith(b"<?xml")
        assert png.read_bytes().startswith(b"\x89PNG")
