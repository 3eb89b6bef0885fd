from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_cells import MadeStudy, build, cost_rows
from routewise.document import receipt_markdown
from routewise.errors import RoutewiseError
from routewise.receipt import (
    build_receipt,
    read_receipt,
    receipt_json,
    statement_of,
    validate_receipt,
)
from routewise.summary import gate_of
from routewise.table import read_tables

MODEL = "small-q4_k_m"
KEPT = sorted((Path(__file__).parents[2] / "docs" / "receipts").glob("*/*/receipt.json"))


@pytest.fixture
def made(tmp_path: Path) -> MadeStudy:
    return MadeStudy(tmp_path)


def receipt_of(made: MadeStudy) -> dict[str, Any]:
    return build_receipt(read_tables(made.tables()))


def entry(receipt: dict[str, Any], identity: str) -> dict[str, Any]:
    return next(
        found for found in [*receipt["claims"], *receipt["controls"]] if found["id"] == identity
    )


def flip(rows: pd.DataFrame) -> pd.DataFrame:
    """Make the last row differ by one bit."""
    rows = rows.copy()
    last = rows.index[-1]
    rows.at[last, "bits_equal"] = False
    rows.at[last, "n_differing"] = 1
    rows.at[last, "replay_hash"] = b"another 128 bits"
    return rows


def break_last(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.astype({"bits_equal": object, "argmax_flip": object})
    last = rows.index[-1]
    for column in ("bits_equal", "argmax_flip", "n_differing", "logit_delta_max", "kl_nats"):
        rows.at[last, column] = None
    rows.at[last, "status"] = "invalid"
    return rows


def test_a_good_study_holds_in_all_claims_and_controls(made: MadeStudy) -> None:
    receipt = receipt_of(made)
    exact = [claim for claim in receipt["claims"] if claim["route"] == "cpu-exact"]
    assert [claim["verdict"] for claim in exact] == ["exact"] * 6
    assert all(claim["as_expected"] is True for claim in exact)
    assert {control["id"] for control in receipt["controls"]} == {
        f"width-1-equals-plain/cpu-stock/{MODEL}",
        f"width-1-equals-plain/cpu-exact/{MODEL}",
        f"plain-twice/cpu-stock/{MODEL}",
        f"plain-twice/cpu-exact/{MODEL}",
        f"reference-unmoved/cpu-exact/{MODEL}",
        "stock-differs/cpu-stock",
    }
    assert all(control["as_expected"] for control in receipt["controls"])
    assert gate_of(receipt).exit_code == 0


def test_plain_and_width_1_are_no_claims(made: MadeStudy) -> None:
    ids = [claim["id"] for claim in receipt_of(made)["claims"]]
    assert len(ids) == 12
    assert not any(name.endswith(("/plain", "/w1")) for name in ids)


def test_a_claim_says_what_it_holds_for(made: MadeStudy) -> None:
    claim = entry(receipt_of(made), f"replay/cpu-exact/{MODEL}/w8")
    assert claim["statement"] == (
        "Decoding 8 tokens a pass gives the logits of one token alone, bit for bit"
    )
    scope = claim["scope"]
    assert scope["quantization"] == "Q4_K_M"
    assert scope["machine"] == "2-core x86-64 with AVX-512"
    assert (scope["threads"], scope["flash_attention"]) == (2, True)
    assert scope["pass_widths"] == [8]
    assert scope["kv_positions"] == {"min": 21, "max": 47}
    assert scope["fingerprint"] == build("cpu-exact")["fingerprint"]
    assert len(claim["cells"]) == 2
    assert claim["interval"]["high"] == pytest.approx(1 - 0.05 ** (1 / 96))


def test_one_bit_in_one_row_makes_the_claim_differ_and_the_gate_fail(made: MadeStudy) -> None:
    receipt = receipt_of(made.edit("cpu-exact", "w8", flip))
    claim = entry(receipt, f"replay/cpu-exact/{MODEL}/w8")
    assert (claim["verdict"], claim["as_expected"]) == ("differs", False)
    assert (claim["interval"]["k"], claim["interval"]["n"]) == (1, 96)
    assert gate_of(receipt).exit_code == 1


def test_an_invalid_row_is_in_no_count_and_the_gate_says_not_measured(made: MadeStudy) -> None:
    receipt = receipt_of(made.edit("cpu-exact", "w8", break_last))
    claim = entry(receipt, f"replay/cpu-exact/{MODEL}/w8")
    assert claim["verdict"] == "invalid"
    assert claim["interval"] is None
    assert (claim["n"]["positions"], claim["n"]["invalid"]) == (95, 1)
    assert gate_of(receipt).exit_code == 2


@pytest.mark.parametrize("variant", ["w8", "plain"])
def test_a_cell_that_its_job_calls_invalid_is(made: MadeStudy, variant: str) -> None:
    made.record("cpu-exact", variant, invalid_reasons=["read back 4 threads, asked for 2"])
    claim = entry(receipt_of(made), f"replay/cpu-exact/{MODEL}/w8")
    assert claim["verdict"] == "invalid"
    assert any("read back 4 threads" in reason for reason in claim["reasons"])


def test_a_cell_that_is_missing_is_a_claim_that_could_not_be_observed(made: MadeStudy) -> None:
    receipt = receipt_of(made.leave_out("cpu-exact", "w8"))
    claim = entry(receipt, f"replay/cpu-exact/{MODEL}/w8")
    assert claim["verdict"] == "unobservable"
    assert claim["as_expected"] is False
    assert gate_of(receipt).exit_code == 2


def test_an_empty_cell_is_never_exact(made: MadeStudy) -> None:
    made.edit("cpu-exact", "w8", lambda rows: rows.iloc[:0])
    assert entry(receipt_of(made), f"replay/cpu-exact/{MODEL}/w8")["verdict"] == "invalid"


def test_where_width_1_is_not_plain_the_routes_claims_are_invalid(made: MadeStudy) -> None:
    receipt = receipt_of(made.edit("cpu-exact", "w1", flip))
    control = entry(receipt, f"width-1-equals-plain/cpu-exact/{MODEL}")
    assert (control["verdict"], control["as_expected"]) == ("differs", False)
    claims = {claim["id"]: claim for claim in receipt["claims"]}
    own = [claim for name, claim in claims.items() if name.startswith("replay/cpu-exact")]
    assert {claim["verdict"] for claim in own} == {"invalid"}
    assert all("width-1-equals-plain" in claim["reasons"][0] for claim in own)
    assert claims[f"replay/cpu-stock/{MODEL}/w2"]["verdict"] == "exact"
    assert gate_of(receipt).exit_code == 1


def test_without_the_width_1_cell_nothing_is_exact(made: MadeStudy) -> None:
    receipt = receipt_of(made.leave_out("cpu-exact", "w1"))
    own = [claim for claim in receipt["claims"] if claim["route"] == "cpu-exact"]
    assert {claim["verdict"] for claim in own} == {"invalid"}
    assert gate_of(receipt).exit_code == 2


def test_where_plain_twice_fails_in_one_cell_the_routes_claims_are_invalid(
    made: MadeStudy,
) -> None:
    def move(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(plain_repeat_equal=rows["step"] != 3)

    receipt = receipt_of(made.edit("cpu-exact", "ragged", move))
    control = entry(receipt, f"plain-twice/cpu-exact/{MODEL}")
    assert control["verdict"] == "differs"
    assert control["n"]["differing"] == 4
    own = [claim for claim in receipt["claims"] if claim["route"] == "cpu-exact"]
    assert {claim["verdict"] for claim in own} == {"invalid"}


def move_plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Make one row's hash another, as a patch that moves the reference would."""
    rows.at[rows.index[0], "logits_hash"] = b"another 128 bits"
    return rows


def test_a_reference_that_moved_fails_its_control_and_leaves_the_claims(made: MadeStudy) -> None:
    receipt = receipt_of(made.edit_plain("cpu-exact", move_plain))
    control = entry(receipt, f"reference-unmoved/cpu-exact/{MODEL}")
    assert (control["verdict"], control["as_expected"]) == ("differs", False)
    assert control["first_difference"]["step"] == 0
    assert entry(receipt, f"replay/cpu-exact/{MODEL}/w8")["verdict"] == "exact"
    assert gate_of(receipt).exit_code == 1


def test_a_reference_on_another_machine_is_no_reference(made: MadeStudy) -> None:
    made.record("cpu-stock", "plain", machine={"kind": "8-core ARM"})
    control = entry(receipt_of(made), f"reference-unmoved/cpu-exact/{MODEL}")
    assert control["verdict"] == "invalid"


def test_the_same_libraries_under_two_names_are_said_to_be_the_same(made: MadeStudy) -> None:
    for variant in ("plain", "w1", "w2", "w4", "w8", "ragged", "rollback", "neighbours"):
        made.record("cpu-exact", variant, build=build("cpu-stock"))
    made.cost = None
    control = entry(receipt_of(made), f"reference-unmoved/cpu-exact/{MODEL}")
    assert "by construction" in control["reasons"][0]


def test_stock_that_differs_nowhere_fails_its_control(made: MadeStudy) -> None:
    for variant in ("w4", "w8", "ragged", "rollback", "neighbours"):
        made.edit("cpu-stock", variant, _as_equal)
    receipt = receipt_of(made)
    control = entry(receipt, "stock-differs/cpu-stock")
    assert (control["verdict"], control["as_expected"]) == ("exact", False)
    assert gate_of(receipt).exit_code == 1


def _as_equal(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(
        bits_equal=True,
        n_differing=0,
        argmax_flip=False,
        logit_delta_max=0.0,
        replay_hash=rows["plain_hash"],
    )


def test_stock_that_differs_says_where_and_with_how_many_flips(made: MadeStudy) -> None:
    control = entry(receipt_of(made), "stock-differs/cpu-stock")
    assert control["verdict"] == "differs"
    assert control["n"]["flips"] > 0
    assert control["scope"]["differing"] == sorted(
        f"{MODEL}/{variant}" for variant in ("w4", "w8", "ragged", "rollback", "neighbours")
    )


def test_what_the_build_does_not_cover_stands_in_the_claim(made: MadeStudy) -> None:
    made.record("cpu-exact", "w8", coverage_report="IQ2_XS rows took the fast kernel")
    receipt = receipt_of(made)
    claim = entry(receipt, f"replay/cpu-exact/{MODEL}/w8")
    assert (claim["verdict"], claim["uncovered"]) == ("exact", "IQ2_XS rows took the fast kernel")
    assert any("IQ2_XS" in note for note in gate_of(receipt).notes)
    assert "**exact**, qualified" in receipt_markdown(receipt)


def test_two_builds_under_one_route_are_refused_with_their_files(made: MadeStudy) -> None:
    other = build("cpu-exact") | {"fingerprint": "e" * 64}
    made.record("cpu-exact", "w8", build=other)
    with pytest.raises(RoutewiseError, match="2 different builds") as error:
        receipt_of(made)
    assert f"replay.cpu-exact.{MODEL}.w8.parquet" in str(error.value)
    assert f"replay.cpu-exact.{MODEL}.w4.parquet" in str(error.value)


def test_a_cost_cell_of_another_build_is_refused_too(made: MadeStudy) -> None:
    builds = {"cpu-stock": build("cpu-stock"), "cpu-exact": build("other")}
    made.cost_changes = {"builds": builds}
    with pytest.raises(RoutewiseError, match="cpu-exact"):
        receipt_of(made)


def test_expectations_may_be_given_by_variant(made: MadeStudy) -> None:
    made.declared["sweeps"]["replay"]["expect"] = {"cpu-stock": {"w4": "differs", "w2": "differs"}}
    receipt = receipt_of(made)
    assert entry(receipt, f"replay/cpu-stock/{MODEL}/w4")["as_expected"] is True
    assert entry(receipt, f"replay/cpu-stock/{MODEL}/w2")["as_expected"] is False
    assert entry(receipt, f"replay/cpu-stock/{MODEL}/w8")["expected"] is None
    assert "stock-differs/cpu-stock" not in {one["id"] for one in receipt["controls"]}


def test_the_receipt_is_the_same_bytes_again_and_holds_no_host_name(made: MadeStudy) -> None:
    folder = made.tables()
    texts = {receipt_json(build_receipt(read_tables(folder))) for _ in range(2)}
    assert len(texts) == 1
    text = texts.pop()
    assert "must-not-leave" not in text
    assert "NaN" not in text
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_power_says_what_each_n_could_have_shown(made: MadeStudy) -> None:
    receipt = receipt_of(made)
    assert [row["claim"] for row in receipt["power"]] == [one["id"] for one in receipt["claims"]]
    assert receipt["power"][0]["detectable_share"] == pytest.approx(1 - 0.05 ** (1 / 96))


def test_a_study_of_cost_alone_has_prices_and_no_claims(made: MadeStudy) -> None:
    del made.declared["sweeps"]["replay"]
    made.cost = cost_rows({"cpu-stock": [1, 2, 3, 4], "cpu-exact": [1, 2, 3, 4]}, (1, 2, 4, 8))
    receipt = receipt_of(made)
    assert receipt["claims"] == []
    assert receipt["controls"] == []
    assert len(receipt["price"]) == 8
    assert gate_of(receipt).exit_code == 0
    assert "makes no claim" in receipt_markdown(receipt)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("claims", 6, "n", "positions"), 0),
        (("claims", 6, "n", "differing"), 1),
        (("claims", 0, "verdict"), "equal"),
        (("claims", 0, "scope"), None),
        (("controls", 0, "observable"), "feeling"),
        (("price", 0, "width"), 0),
        (("provenance", "study_digest"), "short"),
        (("study",), ""),
    ],
)
def test_a_receipt_that_says_what_it_may_not_is_refused(
    made: MadeStudy, path: tuple[Any, ...], value: Any
) -> None:
    receipt = copy.deepcopy(receipt_of(made))
    validate_receipt(receipt)
    place: Any = receipt
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(RoutewiseError, match=str(path[0])):
        validate_receipt(receipt)


def test_a_file_that_is_no_receipt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    with pytest.raises(RoutewiseError, match="no such receipt"):
        read_receipt(path)
    for text, problem in (("{", "not JSON"), ("[]", "no receipt"), ("{}", "required")):
        path.write_text(text)
        with pytest.raises(RoutewiseError, match=problem):
            read_receipt(path)


@pytest.mark.parametrize(("version", "hint"), [(0, "run its study again"), (99, "newer Routewise")])
def test_a_receipt_of_another_schema_version_is_named(
    made: MadeStudy, tmp_path: Path, version: int, hint: str
) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt_of(made) | {"schema_version": version}))
    with pytest.raises(RoutewiseError, match=f"schema version {version}") as error:
        read_receipt(path)
    assert str(path) in error.value.problem
    assert hint in str(error.value.hint)


def test_a_receipt_without_a_price_shows_no_figure_of_it(made: MadeStudy) -> None:
    receipt = receipt_of(made)
    assert receipt["price"]
    assert "price_by_width.svg" in receipt_markdown(receipt)
    text = receipt_markdown({**receipt, "price": []})
    assert "price_by_width.svg" not in text
    assert "delta_by_position.svg" in text


def test_the_document_has_verdicts_first_and_every_claim_in_it(made: MadeStudy) -> None:
    receipt = receipt_of(made)
    text = receipt_markdown(receipt)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        f"## {name}"
        for name in (
            "Verdicts",
            "Controls",
            "Figures",
            "Price",
            "Scope",
            "Power",
            "Provenance",
        )
    ]
    for one in [*receipt["claims"], *receipt["controls"]]:
        assert f"`{one['id']}`" in text
    assert "figures/delta_by_position.svg" in text
    assert "| Q4_K_M: 16 Q4_K, 9 F32, 2 Q6_K |" in text


def test_statements_name_what_was_done() -> None:
    assert statement_of("w16").startswith("Decoding 16 tokens a pass gives")
    assert "wrong drafts" in statement_of("rollback")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}")
def test_a_kept_receipt_is_made_again_from_its_kept_tables(path: Path) -> None:
    """Tables written before a sweep existed give the receipt that they gave then."""
    text = path.read_text(encoding="utf-8")
    assert receipt_json(build_receipt(read_tables(path.parent / "tables"))) == text
    markdown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert receipt_markdown(read_receipt(path)) == markdown
