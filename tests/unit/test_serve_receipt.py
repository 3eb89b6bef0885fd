"""Serving sweeps in a receipt: names, controls, scope, and each way in which a claim can fail."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from made_cells import build
from made_replies import (
    Row,
    diverged,
    flipped_bit,
    invalid_row,
    make_row,
    shifted,
    without_logprobs,
)
from made_serving import ANSWERS, MODEL, MadeServing, study
from routewise.document import drawn_figures, receipt_markdown
from routewise.errors import RoutewiseError
from routewise.receipt import build_receipt, receipt_json, validate_receipt
from routewise.summary import gate_of, print_summary
from routewise.table import read_tables

Receipt = dict[str, Any]


def receipt_of(made: MadeServing) -> Receipt:
    return build_receipt(read_tables(made.tables()))


def entry(receipt: Receipt, identity: str) -> dict[str, Any]:
    found = {one["id"]: one for one in [*receipt["claims"], *receipt["controls"]]}
    return found[identity]


def only(folder: Path, sweep: str, routes: list[str]) -> MadeServing:
    """Return a study of one sweep and few routes, which is quicker."""
    declared = study()
    declared["sweeps"] = {sweep: declared["sweeps"][sweep] | {"routes": routes, "expect": {}}}
    return MadeServing(folder, declared)


def batched(folder: Path, route: str = "cpu-exact") -> MadeServing:
    made = only(folder, "batched", [route])
    made.declared["sweeps"]["batched"] |= {"mixes": ["copies"], "prefill": ["together"]}
    kept = {"mix": "copies", "prefill": "together"}
    for variant in ("p1", "p4"):
        made.edit("batched", route, variant, lambda rows: _only(rows, kept))
    return made


def _only(rows: list[Row], kept: dict[str, str]) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in kept.items())]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeServing(tmp_path_factory.mktemp("serving")).tables()


@pytest.fixture(scope="module")
def whole(tables: Path) -> Receipt:
    return build_receipt(read_tables(tables))


def test_every_claim_and_control_has_its_name_and_verdict(whole: Receipt) -> None:
    verdicts = {claim["id"]: claim["verdict"] for claim in whole["claims"]}
    assert len(verdicts) == len(whole["claims"]) == 12 + 12 + 6
    for cache in ("off", "cold", "warm", "caches"):
        assert verdicts[f"repeat/npu/{MODEL}/{cache}"] == "exact"
    assert verdicts[f"batched/cpu-exact/{MODEL}/p4.w4.neighbours.apart"] == "exact"
    assert verdicts[f"batched/cpu-stock/{MODEL}/p4.w4.copies.together"] == "differs"
    assert verdicts[f"agree/cpu-stock|cpu-exact/{MODEL}/w1"] == "exact"
    assert verdicts[f"agree/cpu-stock|cpu-exact/{MODEL}/w4"] == "differs"
    controls = {control["id"]: control["verdict"] for control in whole["controls"]}
    assert controls == {
        **{
            f"width-1-equals-solo/{route}/{MODEL}/p{parallel}": "exact"
            for route in ("cpu-stock", "cpu-exact")
            for parallel in (1, 4)
        },
        "batched-differs/cpu-stock": "differs",
        **{
            f"same-route-twice/{route}/{MODEL}": "exact"
            for route in ("cpu-stock", "cpu-exact", "npu")
        },
    }
    assert gate_of(whole).exit_code == 0


def test_answers_with_a_warm_cache_are_compared_with_the_others(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-stock"])

    def warmed(rows: list[Row]) -> list[Row]:
        other = make_row(shifted(ANSWERS[0], 3, 0.25))
        moved = {
            name: other[name] for name in ("logprobs", "logprob_bits", "state", "top_logprobs")
        }
        return [
            {**row, **moved} if (row["cache"], row["prompt_index"]) == ("warm", 0) else row
            for row in rows
        ]

    made.edit("repeat", "cpu-stock", "solo", warmed)
    receipt = build_receipt(read_tables(made.tables()))
    assert entry(receipt, f"repeat/cpu-stock/{MODEL}/warm")["verdict"] == "exact"
    claim = entry(receipt, f"repeat/cpu-stock/{MODEL}/caches")
    assert claim["verdict"] == "differs"
    assert claim["first_difference"]["prompt_id"]
    assert claim["expected"] is None


def test_one_kind_of_cache_is_compared_with_nothing(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-stock"])
    made.declared["sweeps"]["repeat"]["cache"] = ["off"]
    made.edit("repeat", "cpu-stock", "solo", lambda rows: _only(rows, {"cache": "off"}))
    receipt = build_receipt(read_tables(made.tables()))
    assert [claim["id"] for claim in receipt["claims"]] == [f"repeat/cpu-stock/{MODEL}/off"]


def test_a_claim_carries_its_states_witness_and_score(whole: Receipt) -> None:
    claim = entry(whole, f"batched/cpu-stock/{MODEL}/p4.w4.copies.together")
    measures = claim["measures"]
    assert measures["states"]["observed_mean"] == 3
    assert measures["witness"]["busy_per_decode_mean"] == 3.875
    assert measures["solo"]["identical"] == 0
    assert [prefix["tokens"] for prefix in measures["solo"]["kept"]] == [16, 32, None]
    assert claim["scope"]["parallel"] == 4
    assert (claim["scope"]["mix"], claim["scope"]["prefill"]) == ("copies", "together")
    assert claim["scope"]["fingerprint"] == build("cpu-stock")["fingerprint"]
    assert claim["scope"]["machine"] == "2-core x86-64 with AVX-512"
    assert claim["scope"]["kv_positions"] == {"min": 20, "max": 59}
    assert len(claim["cells"]) == 2


def test_a_pair_names_both_sides_and_what_is_not_arithmetic(whole: Receipt) -> None:
    claim = entry(whole, f"agree/cpu-exact|npu/{MODEL}/w1")
    assert "not arithmetic only" in claim["statement"]
    assert "not arithmetic only" in claim["reasons"]
    assert claim["scope"]["weights"] == "same|requantised"
    assert claim["scope"]["sides"]["b"]["fingerprint"] == build("npu")["fingerprint"]
    assert claim["scope"]["fingerprint"].count("|") == 1
    assert len(claim["cells"]) == 3
    control = entry(whole, f"same-route-twice/npu/{MODEL}")
    assert control["route"] == "npu"
    assert control["reasons"] == []


def test_power_and_provenance_have_the_serving_cells(whole: Receipt) -> None:
    assert [row["claim"] for row in whole["power"]] == [claim["id"] for claim in whole["claims"]]
    assert whole["provenance"]["cells"]["batched"]["n"] == 4
    assert whole["provenance"]["cells"]["agree"]["n"] == 6 + 9
    assert set(whole["provenance"]["routes"]) == {"cpu-stock", "cpu-exact", "npu"}
    assert "must-not-leave" not in receipt_json(whole)


def test_the_receipt_is_the_same_bytes_again_and_measures_are_checked(
    whole: Receipt, tables: Path
) -> None:
    assert receipt_json(build_receipt(read_tables(tables))) == receipt_json(whole)
    changed = json.loads(receipt_json(whole))
    changed["claims"][0]["measures"]["opinion"] = "good"
    with pytest.raises(RoutewiseError, match="opinion"):
        validate_receipt(changed)


def test_the_table_and_the_document_show_states_and_witness(whole: Receipt) -> None:
    stream = io.StringIO()
    print_summary(whole, "receipt.md", stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 124
    for claim in whole["claims"]:
        name = claim["id"].split("/", 1)[1]
        assert any(name in line.split() for line in lines), name
    row = next(line for line in lines if "cpu-stock/" in line and "p4.w4.copies.together" in line)
    assert "3.88/4" in row
    assert "3 (3)" in row
    assert "0 / 36" in row
    text = receipt_markdown(whole)
    for heading in ("## Repetition", "## Batches", "## Agreement", "## Controls", "## Scope"):
        assert heading in text
    assert "3.88/4 (3.88)" in text
    assert "kept, first 16" in text
    assert "margins" in text
    for name in ("states_by_width", "solo_token_kept", "agree_dlogp"):
        assert f"figures/{name}.svg" in text
    assert "delta_by_position" not in text


def test_only_the_figures_of_a_studys_own_sweeps_are_shown(tmp_path: Path) -> None:
    receipt = receipt_of(only(tmp_path, "repeat", ["cpu-exact"]))
    assert drawn_figures(receipt) == []
    assert "## Batches" not in receipt_markdown(receipt)


# ------------------------------------------------------------------------------------------ repeat


def test_a_restart_that_moves_an_answer_fails_the_gate(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-exact"])
    made.declared["sweeps"]["repeat"]["expect"] = {"cpu-exact": {"off": "exact"}}

    def moved(rows: list[Row]) -> list[Row]:
        place = next(n for n, row in enumerate(rows) if row["life"] == 1)
        return [*rows[:place], make_row(flipped_bit(ANSWERS[0], 7, 1), life=1), *rows[place + 1 :]]

    receipt = receipt_of(made.edit("repeat", "cpu-exact", "solo", moved))
    claim = entry(receipt, f"repeat/cpu-exact/{MODEL}/off")
    assert (claim["verdict"], claim["as_expected"]) == ("differs", False)
    assert claim["n"]["differing_across_lives"] == 3
    assert entry(receipt, f"repeat/cpu-exact/{MODEL}/cold")["verdict"] == "exact"
    assert gate_of(receipt).exit_code == 1


def test_one_invalid_reply_makes_its_claim_invalid_and_no_other(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-exact"])

    def broken(rows: list[Row]) -> list[Row]:
        return [invalid_row("logprob of a speculative pass"), *rows[1:]]

    receipt = receipt_of(made.edit("repeat", "cpu-exact", "solo", broken))
    claim = entry(receipt, f"repeat/cpu-exact/{MODEL}/off")
    assert claim["verdict"] == "invalid"
    assert claim["reasons"][0] == "1 of 18 replies are invalid: logprob of a speculative pass"
    assert claim["interval"] is None
    assert entry(receipt, f"repeat/cpu-exact/{MODEL}/warm")["verdict"] == "exact"
    assert gate_of(receipt).exit_code == 2


def test_a_route_that_cannot_do_a_cell_or_a_block_says_why(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-exact", "npu"])
    made.refuse("repeat", "npu", "solo", "no endpoint for completions")
    reason = "the route's prompt cache cannot be switched off"
    refused = [{"block": {"life": life, "cache": "off"}, "reason": reason} for life in (0, 1)]
    made.record("repeat", "cpu-exact", "solo", refused_blocks=refused, blocks=[])
    made.edit("repeat", "cpu-exact", "solo", lambda rows: [r for r in rows if r["cache"] != "off"])
    receipt = receipt_of(made)
    for name, why in (("npu", "no endpoint for completions"), ("cpu-exact", reason)):
        claim = entry(receipt, f"repeat/{name}/{MODEL}/off")
        assert (claim["verdict"], claim["reasons"]) == ("unsupported", [why])
    assert entry(receipt, f"repeat/cpu-exact/{MODEL}/warm")["verdict"] == "exact"
    assert gate_of(receipt).exit_code == 0


def test_lives_that_a_route_cannot_have_are_said_beside_the_verdict(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-exact"])
    reason = "an endpoint that runs already is not restarted"
    refused = [{"block": {"life": 1, "cache": cache}, "reason": reason} for cache in ("off",)]
    made.record("repeat", "cpu-exact", "solo", refused_blocks=refused, blocks=[])
    made.edit("repeat", "cpu-exact", "solo", lambda rows: [r for r in rows if r["life"] == 0])
    claim = entry(receipt_of(made), f"repeat/cpu-exact/{MODEL}/off")
    assert claim["verdict"] == "exact"
    assert f"not measured: {reason}" in claim["reasons"]
    assert "starts of the server" not in claim["statement"]


def test_a_missing_cell_is_a_claim_that_nobody_observed(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-exact"]).leave_out("repeat", "cpu-exact", "solo")
    claim = entry(receipt_of(made), f"repeat/cpu-exact/{MODEL}/off")
    assert (claim["verdict"], claim["cells"]) == ("unobservable", [])


def test_a_route_without_logprobs_is_exact_at_its_tokens_and_the_claim_says_so(
    tmp_path: Path,
) -> None:
    made = only(tmp_path, "repeat", ["cpu-exact"])

    def bare(rows: list[Row]) -> list[Row]:
        names = ("life", "cache", "round", "cache_n", "prompt_n", "prompt_index")
        return [
            make_row(
                without_logprobs(ANSWERS[row["prompt_index"]]),
                **{name: row[name] for name in names},
            )
            for row in rows
        ]

    claim = entry(
        receipt_of(made.edit("repeat", "cpu-exact", "solo", bare)),
        f"repeat/cpu-exact/{MODEL}/off",
    )
    assert (claim["verdict"], claim["observable"]) == ("exact", "token ids")
    assert "gets the same token ids" in claim["statement"]


# ----------------------------------------------------------------------------------------- batched


def test_a_width_1_control_that_fails_makes_the_routes_claims_invalid(tmp_path: Path) -> None:
    made = batched(tmp_path)
    kept = {"mix": "copies", "prefill": "together"}

    def moved(rows: list[Row]) -> list[Row]:
        rows = _only(rows, kept)
        place = next(n for n, row in enumerate(rows) if row["width"] == 1)
        other = make_row(diverged(ANSWERS[0], 4), parallel=4)
        return [*rows[:place], other, *rows[place + 1 :]]

    receipt = receipt_of(made.edit("batched", "cpu-exact", "p4", moved))
    control = entry(receipt, f"width-1-equals-solo/cpu-exact/{MODEL}/p4")
    assert (control["verdict"], control["as_expected"]) == ("differs", False)
    claim = entry(receipt, f"batched/cpu-exact/{MODEL}/p4.w4.copies.together")
    assert claim["verdict"] == "invalid"
    assert "width-1-equals-solo" in claim["reasons"][0]
    assert entry(receipt, f"width-1-equals-solo/cpu-exact/{MODEL}/p1")["verdict"] == "exact"
    assert gate_of(receipt).exit_code == 1


def test_without_width_1_nothing_in_company_is_exact(tmp_path: Path) -> None:
    made = batched(tmp_path).leave_out("batched", "cpu-exact", "p1")
    made.edit("batched", "cpu-exact", "p4", lambda rows: [r for r in rows if r["width"] > 1])
    receipt = receipt_of(made)
    claim = entry(receipt, f"batched/cpu-exact/{MODEL}/p4.w4.copies.together")
    assert claim["verdict"] == "invalid"
    assert gate_of(receipt).exit_code == 2


def test_without_one_slot_the_cells_own_width_1_is_solo(tmp_path: Path) -> None:
    made = batched(tmp_path)
    made.declared["sweeps"]["batched"]["parallel"] = [4]
    receipt = receipt_of(made)
    claim = entry(receipt, f"batched/cpu-exact/{MODEL}/p4.w4.copies.together")
    assert claim["verdict"] == "exact"
    assert len(claim["cells"]) == 1


def test_copies_that_never_met_make_the_claim_invalid(tmp_path: Path) -> None:
    made = batched(tmp_path)
    kept = {"mix": "copies", "prefill": "together"}
    made.edit(
        "batched",
        "cpu-exact",
        "p4",
        lambda rows: [row | {"busy_per_decode": 1.0} for row in _only(rows, kept)],
    )
    claim = entry(receipt_of(made), f"batched/cpu-exact/{MODEL}/p4.w4.copies.together")
    assert claim["verdict"] == "invalid"
    assert "never shared a decode step" in claim["reasons"][0]


def test_stock_that_differs_nowhere_fails_its_control(tmp_path: Path) -> None:
    made = batched(tmp_path)
    made.declared["sweeps"]["batched"]["expect"] = {"cpu-exact": "differs-somewhere"}
    receipt = receipt_of(made)
    control = entry(receipt, "batched-differs/cpu-exact")
    assert (control["verdict"], control["as_expected"]) == ("exact", False)
    assert gate_of(receipt).exit_code == 1


def test_slots_that_a_route_does_not_have_are_unsupported(tmp_path: Path) -> None:
    made = batched(tmp_path)
    made.refuse("batched", "cpu-exact", "p4", "the route serves at most 1 request at once")
    receipt = receipt_of(made)
    for name in ("batched/{}/p4.w4.copies.together", "width-1-equals-solo/{}/p4"):
        found = entry(receipt, name.format(f"cpu-exact/{MODEL}"))
        assert found["verdict"] == "unsupported"
        assert "at most 1 request" in found["reasons"][0]


# ------------------------------------------------------------------------------------------- agree


def test_a_route_that_does_not_agree_with_itself_makes_its_pairs_invalid(tmp_path: Path) -> None:
    made = only(tmp_path, "agree", ["cpu-stock", "cpu-exact"])

    def moved(rows: list[Row]) -> list[Row]:
        return [
            make_row(flipped_bit(ANSWERS[0], 3, 0), life=1)
            if (row["life"], row["round"], row["prompt_index"]) == (1, 0, 0)
            else row
            for row in rows
        ]

    receipt = receipt_of(made.edit("agree", "cpu-exact", "p1", moved))
    control = entry(receipt, f"same-route-twice/cpu-exact/{MODEL}")
    assert (control["verdict"], control["n"]["differing"]) == ("differs", 1)
    claim = entry(receipt, f"agree/cpu-stock|cpu-exact/{MODEL}/w1")
    assert claim["verdict"] == "invalid"
    assert "same-route-twice/cpu-exact" in claim["reasons"][0]


def test_an_invalid_reply_of_one_route_makes_the_pair_invalid(tmp_path: Path) -> None:
    made = only(tmp_path, "agree", ["cpu-stock", "cpu-exact"])

    def broken(rows: list[Row]) -> list[Row]:
        return [invalid_row("cut mid-reply"), *rows[1:]]

    receipt = receipt_of(made.edit("agree", "cpu-exact", "p1", broken))
    claim = entry(receipt, f"agree/cpu-stock|cpu-exact/{MODEL}/w1")
    assert claim["verdict"] == "invalid"
    assert any("cut mid-reply" in reason for reason in claim["reasons"])


def test_a_pair_without_its_cell_or_its_control_is_never_exact(tmp_path: Path) -> None:
    made = only(tmp_path, "agree", ["cpu-stock", "cpu-exact"])
    made.leave_out("agree", "cpu-stock|cpu-exact", "w4")
    made.leave_out("agree", "cpu-exact|cpu-exact", "w1")
    receipt = receipt_of(made)
    assert entry(receipt, f"agree/cpu-stock|cpu-exact/{MODEL}/w4")["verdict"] == "unobservable"
    assert entry(receipt, f"agree/cpu-stock|cpu-exact/{MODEL}/w1")["verdict"] == "invalid"
    assert gate_of(receipt).exit_code == 2


def test_two_builds_under_one_served_route_are_refused_with_their_files(tmp_path: Path) -> None:
    made = only(tmp_path, "batched", ["cpu-exact"])
    made.record("batched", "cpu-exact", "p4", build=build("cpu-exact") | {"fingerprint": "e" * 64})
    with pytest.raises(RoutewiseError, match="2 different builds") as error:
        receipt_of(made)
    assert f"batched.cpu-exact.{MODEL}.p4.parquet" in str(error.value)
