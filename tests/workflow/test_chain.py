"""From a pinned llama.cpp to a receipt: everything real, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from workbench import Bench, provenance_of

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

STOCK, EXACT = "cpu-stock", "cpu-exact"
VARIANTS = ["w2", "w4", "w8", "w16", "ragged", "rollback", "neighbours"]
N_POSITIONS = 24 + 40 + 40


def claims_of(chain: Bench, route: str) -> dict[str, dict[str, Any]]:
    """Return the claims of a route by variant."""
    claims = [claim for claim in chain.receipt["claims"] if claim["route"] == route]
    return {claim["id"].rpartition("/")[2]: claim for claim in claims}


def controls_of(chain: Bench) -> dict[str, dict[str, Any]]:
    return {control["id"]: control for control in chain.receipt["controls"]}


def has_batch_gate() -> bool:
    """Say whether this processor has a gate that lets stock's batches differ for Q4_K rows."""
    flags = Path("/proc/cpuinfo").read_text()
    return any(f" {flag} " in flags.replace("\n", " ") for flag in ("avx2", "avx512f", "i8mm"))


def test_the_receipt_is_valid_and_counts_everything(chain: Bench, repository: Path) -> None:
    schema = json.loads((repository / "config/schemas/receipt.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(chain.receipt)
    for route in (STOCK, EXACT):
        claims = claims_of(chain, route)
        assert list(claims) == VARIANTS
        for claim in claims.values():
            assert claim["observable"] == "logits"
            assert claim["n"]["prompts"] == 3
            assert claim["n"]["positions"] == N_POSITIONS
    assert {row["route"] for row in chain.receipt["price"]} == {STOCK, EXACT}
    markdown = (chain.results / "small/receipt.md").read_text()
    assert "replay/cpu-exact/small/w16" in markdown


@pytest.mark.parametrize("route", [STOCK, EXACT])
@pytest.mark.parametrize("control", ["width-1-equals-plain", "plain-twice"])
def test_the_controls_hold(chain: Bench, control: str, route: str) -> None:
    found = controls_of(chain)[f"{control}/{route}/small"]
    assert found["verdict"] == "exact"
    assert found["n"]["positions"] >= N_POSITIONS


def test_stock_differs(chain: Bench, request: pytest.FixtureRequest) -> None:
    """On the kernels that take four rows at once; where there are none, nothing can differ."""
    if not has_batch_gate():
        request.applymarker(pytest.mark.xfail(reason="this processor has no batch kernel for Q4_K"))
    claims = claims_of(chain, STOCK)
    assert {claims[variant]["verdict"] for variant in ("w4", "w8", "w16")} == {"differs"}
    assert controls_of(chain)["stock-differs/cpu-stock"]["verdict"] == "differs"
    worst = claims["w4"]["worst"]
    assert worst["logit_delta_max"] > 0
    first = claims["w4"]["first_difference"]
    rows = pq.read_table(chain.cells()["replay.cpu-stock.small.w4"])
    here = rows.filter(
        (pc.field("prompt_id") == first["prompt_id"])
        & (pc.field("kv_position") == first["kv_position"])
    )
    assert here["bits_equal"].to_pylist() == [False]


@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_is_exact(chain: Bench, variant: str) -> None:
    claim = claims_of(chain, EXACT)[variant]
    assert claim["verdict"] == "exact", claim
    assert claim["n"]["differing"] == 0
    assert not claim["uncovered"], claim["uncovered"]
    assert claim["as_expected"]


def test_the_reference_did_not_move(chain: Bench) -> None:
    controls = [c for c in chain.receipt["controls"] if c["id"].startswith("reference-unmoved")]
    assert [control["verdict"] for control in controls] == ["exact"]
    cells = chain.cells()
    stock, exact = (
        pq.read_table(cells[f"replay.{route}.small.plain"], columns=["logits_hash", "token_id"])
        for route in (STOCK, EXACT)
    )
    assert stock.equals(exact)  # metadata aside
    assert stock.num_rows == N_POSITIONS + 3


def test_the_routes_are_two_builds(chain: Bench) -> None:
    cells = chain.cells()
    builds = [provenance_of(cells[f"replay.{r}.small.w4"])["build"] for r in (STOCK, EXACT)]
    assert builds[0]["fingerprint"] != builds[1]["fingerprint"]
    assert builds[0]["identity"] != builds[1]["identity"]
    assert [build["patch"] for build in builds] == [None, "cpu-exact"]
    cost = provenance_of(cells["cost.small"])
    assert [cost["builds"][r]["fingerprint"] for r in (STOCK, EXACT)] == [
        build["fingerprint"] for build in builds
    ]


def test_the_model_is_truly_quantised(chain: Bench) -> None:
    model = provenance_of(chain.cells()["replay.cpu-stock.small.w4"])["model"]
    assert model["derived_from"]["type"] == "Q4_K_M"
    assert model["tensor_types"]["Q4_K"] > 0
    assert not set(model["tensor_types"]) - {"Q4_K", "Q6_K", "F32"}  # no fall-back


def test_the_shapes_are_what_they_say(chain: Bench) -> None:
    cells = chain.cells()
    rows = {v: pq.read_table(cells[f"replay.{EXACT}.small.{v}"]) for v in VARIANTS}
    assert len(set(rows["ragged"]["pass_width"].to_pylist())) > 3
    assert pc.any(
        pc.greater(rows["rollback"]["pass_tokens"], rows["rollback"]["pass_width"])
    ).as_py()
    assert set(rows["neighbours"]["pass_tokens"].to_pylist()) == {4}
    assert set(rows["neighbours"]["pass_width"].to_pylist()) == {1}
    for table in rows.values():
        assert table.num_rows == N_POSITIONS
        assert pc.all(table["plain_repeat_equal"]).as_py()
    assert pc.any(rows["w8"]["crosses_256"]).as_py()


def test_what_was_asked_is_read_back(chain: Bench) -> None:
    for name, path in chain.cells().items():
        provenance = provenance_of(path)
        assert provenance["invalid_reasons"] == [], name
        readbacks = (
            provenance["readback"].values() if name == "cost.small" else [provenance["readback"]]
        )
        for readback in readbacks:
            assert readback["threads"] == 2
            assert readback["micro_batch"] == 256
            assert readback["flash_attention"] == "enabled"


def test_no_receipt_names_a_folder_of_this_machine(chain: Bench) -> None:
    for file in ("receipt.json", "receipt.md"):
        text = (chain.results / "small" / file).read_text()
        assert str(chain.folder) not in text
        assert str(Path.home()) not in text


@pytest.mark.parametrize("name", ["delta_by_position", "flips_and_margins", "price_by_width"])
def test_a_figure_is_drawn_again_to_the_byte(
    chain: Bench, repository: Path, name: str, tmp_path: Path
) -> None:
    table = "cost" if name == "price_by_width" else "replay"
    made = [tmp_path / f"{name}.svg", tmp_path / f"{name}.png"]
    command = [sys.executable, str(repository / "workflow/scripts/draw_figure.py")]
    command += ["--name", name, "--table", str(chain.results / f"small/tables/{table}.parquet")]
    subprocess.run([*command, "--svg", made[0], "--png", made[1]], check=True, cwd=chain.folder)
    for file in made:
        kept = chain.results / "small/figures" / file.name
        assert file.read_bytes() == kept.read_bytes()
        assert kept.stat().st_size > 5000


def test_check_passes_what_is_as_expected(chain: Bench, tmp_path: Path) -> None:
    outcome = chain.copy(tmp_path / "copy").snakemake("check").check()
    assert "not as expected" not in outcome.text
    assert "replay/cpu-exact/small/neighbours" in outcome.text


def test_check_fails_what_is_contrary_and_the_run_does_not(chain: Bench, tmp_path: Path) -> None:
    bench = chain.copy(tmp_path / "copy")
    bench.study["sweeps"]["replay"]["expect"] = {EXACT: "differs"}
    before = {path: path.stat().st_mtime_ns for path in bench.cells().values()}
    bench.snakemake().check()
    outcome = bench.snakemake("check")
    assert outcome.code != 0
    assert (
        "not as expected: claim replay/cpu-exact/small/w2: exact, expected differs" in outcome.text
    )
    assert "Traceback" not in outcome.text
    # an expectation is no part of what is measured
    assert {path: path.stat().st_mtime_ns for path in bench.cells().values()} == before
