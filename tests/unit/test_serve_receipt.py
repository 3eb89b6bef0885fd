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


def test_intervals_and_power_name_their_unit(whole: Receipt) -> None:
    power = {row["claim"]: row for row in whole["power"]}
    for identity, unit, k, n in (
        (f"repeat/cpu-exact/{MODEL}/off", "replies", 0, 15),
        (f"batched/cpu-exact/{MODEL}/p4.w4.copies.together", "replies", 0, 36),
        (f"batched/cpu-stock/{MODEL}/p4.w4.copies.together", "replies", 36, 36),
        (f"agree/cpu-stock|cpu-exact/{MODEL}/w1", "positions", 0, 120),
    ):
        interval = entry(whole, identity)["interval"]
        assert (interval["unit"], interval["k"], interval["n"]) == (unit, k, n)
        assert interval["quantity"] == f"share of differing {unit}"
        assert (power[identity]["unit"], power[identity]["n"]) == (unit, n)
        assert f"{n} {unit} show a difference" in power[identity]["statement"]
    text = receipt_markdown(whole)
    assert "100.0% of 36 replies (" in text
    assert "≤ 18.10% of replies, n = 15" in text
    assert "≤ 2.47% of positions, n = 120" in text
    assert "of replies or more would have been seen" in text
    assert "Copies of one round share their passes and are not independent" in text
    stream = io.StringIO()
    print_summary(whole, "receipt.md", stream)
    assert "replies" in stream.getvalue()
    changed = json.loads(receipt_json(whole))
    changed["claims"][0]["interval"]["unit"] = "prompts"
    with pytest.raises(RoutewiseError, match="prompts"):
        validate_receipt(changed)


def test_a_batched_statement_says_how_full_the_passes_were(whole: Receipt) -> None:
    claim = entry(whole, f"batched/cpu-exact/{MODEL}/p4.w4.fillers.apart")
    assert "on average 2.25 of 4 slots busy in a pass" in claim["statement"]


def test_a_prompt_that_a_batched_block_lacks_makes_it_invalid(tmp_path: Path) -> None:
    made = batched(tmp_path)
    kept = {"mix": "copies", "prefill": "together"}
    made.edit(
        "batched",
        "cpu-exact",
        "p4",
        lambda rows: [
            row for row in _only(rows, kept) if row["width"] == 1 or row["prompt_index"] != 2
        ],
    )
    claim = entry(receipt_of(made), f"batched/cpu-exact/{MODEL}/p4.w4.copies.together")
    assert claim["verdict"] == "invalid"
    assert "1 prompts have no reply" in claim["reasons"][0]


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
    assert "3/3 (3)" in row
    assert any("states a" in line for line in lines)
    text = receipt_markdown(whole)
    for heading in ("## Repetition", "## Batches", "## Agreement", "## Controls", "## Scope"):
        assert heading in text
    assert "3.88/4 (3.88)" in text
    assert "kept, first 16" in text
    assert "margins" in text
    for name in ("states_by_width", "solo_token_kept", "agree_dlogp"):
        assert f"figures/{name}.svg" in text
    assert "delta_by_position" not in text


def promised_names(receipt: Receipt, route: str) -> set[str]:
    """Return the names that the section of promises promises of a route, of its own sweeps."""
    text = receipt_markdown(receipt)
    promises = text[text.index("can promise") : text.index("## Verdicts")]
    entry_of_route = promises.split(f"\n- `{route}`, ")[1].split("\n- ")[0]
    lines = [line.split("**no promise**")[0] for line in entry_of_route.splitlines()]
    return {name for line in lines for name in line.split("`")[1::2]}


@pytest.mark.parametrize("route", ["cpu-stock", "cpu-exact"])
def test_what_is_promised_is_what_was_exact(whole: Receipt, route: str) -> None:
    claims = [c for c in whole["claims"] if c["route"] == route and c["sweep"] != "agree"]
    exact = {c["id"].rsplit("/", 1)[1] for c in claims if c["verdict"] == "exact"}
    others = {c["id"].rsplit("/", 1)[1] for c in claims} - exact
    assert exact
    found = promised_names(whole, route)
    assert exact <= found
    assert not others & found


def test_a_claim_that_no_longer_holds_is_no_longer_promised(whole: Receipt) -> None:
    changed = json.loads(json.dumps(whole))
    name = "p4.w4.copies.apart"
    assert name in promised_names(whole, "cpu-exact")
    entry(changed, f"batched/cpu-exact/{MODEL}/{name}")["verdict"] = "differs"
    assert name not in promised_names(changed, "cpu-exact")


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
    """And no control that fails: there is no such server."""
    made = batched(tmp_path)
    made.refuse("batched", "cpu-exact", "p4", "the route serves at most 1 request at once")
    receipt = receipt_of(made)
    found = entry(receipt, f"batched/cpu-exact/{MODEL}/p4.w4.copies.together")
    assert found["verdict"] == "unsupported"
    assert "at most 1 request" in found["reasons"][0]
    controls = [control["id"] for control in receipt["controls"]]
    assert f"width-1-equals-solo/cpu-exact/{MODEL}/p4" not in controls
    assert all(control["as_expected"] for control in receipt["controls"])


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


def pair_of(made: MadeServing, width: int = 4) -> dict[str, Any]:
    return entry(receipt_of(made), f"agree/cpu-exact|cpu-stock/{MODEL}/w{width}")


def equal_pair(folder: Path) -> MadeServing:
    """Return two routes that say the same at width 4 too."""
    made = only(folder, "agree", ["cpu-exact", "cpu-stock"])

    def alike(rows: list[Row]) -> list[Row]:
        names = ("prompt_index", "round", "copy", "width", "parallel", "busy_per_decode")
        times = ("released_ns", "done_ns")
        return [
            make_row(ANSWERS[row["prompt_index"]], **{name: row[name] for name in (*names, *times)})
            for row in rows
        ]

    return made.edit("agree", "cpu-stock", "p4", alike)


def test_equal_answers_in_company_are_exact_with_their_witness(tmp_path: Path) -> None:
    assert pair_of(equal_pair(tmp_path))["verdict"] == "exact"


@pytest.mark.parametrize(
    ("busy", "verdict", "reason"),
    [
        (7.0, "invalid", "company that was not of their round"),
        (1.26, "unobservable", "on average 1.26 of 4 slots"),
        (1.0, "invalid", "hardly shared"),
        (None, "unobservable", "no witness"),
    ],
)
def test_a_pair_in_company_is_no_better_than_its_witness(
    tmp_path: Path, busy: float | None, verdict: str, reason: str
) -> None:
    made = equal_pair(tmp_path)
    made.edit(
        "agree", "cpu-exact", "p4", lambda rows: [row | {"busy_per_decode": busy} for row in rows]
    )
    claim = pair_of(made)
    assert claim["verdict"] == verdict
    assert any(reason in found for found in claim["reasons"])


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ({"copy": 0}, "3 replies in 3 rounds of 4"),
        ({"prompt_index": 0}, "prompts were not compared"),
    ],
)
def test_a_pair_needs_all_copies_and_prompts_of_both_sides(
    tmp_path: Path, kept: dict[str, int], reason: str
) -> None:
    made = equal_pair(tmp_path)
    made.edit(
        "agree",
        "cpu-exact",
        "p4",
        lambda rows: [row for row in rows if all(row[key] == kept[key] for key in kept)],
    )
    claim = pair_of(made)
    assert claim["verdict"] == "invalid"
    assert any(reason in found for found in claim["reasons"])


def test_a_pair_whose_prompts_came_from_a_cache_is_invalid(tmp_path: Path) -> None:
    made = equal_pair(tmp_path)
    made.edit("agree", "cpu-exact", "p4", lambda rows: [row | {"cache_n": 9} for row in rows])
    claim = pair_of(made)
    assert claim["verdict"] == "invalid"
    assert any("from the cache although" in reason for reason in claim["reasons"])


def test_a_route_that_was_asked_once_is_not_compared_with_itself(tmp_path: Path) -> None:
    made = only(tmp_path, "agree", ["cpu-exact", "cpu-stock"])
    made.second_pick = {"life": 0, "round": 0}
    made.twice_widths = (4,)
    receipt = receipt_of(made)
    for width in ("", "/w4"):
        control = entry(receipt, f"same-route-twice/cpu-exact/{MODEL}{width}")
        assert control["verdict"] == "unobservable"
        assert "asked only once" in control["reasons"][0]
        assert control["interval"] is None
    assert entry(receipt, f"agree/cpu-exact|cpu-stock/{MODEL}/w1")["verdict"] == "invalid"


def test_a_route_asked_twice_in_company_may_differ_and_its_pairs_say_so(tmp_path: Path) -> None:
    made = only(tmp_path, "agree", ["cpu-exact", "cpu-stock"])
    made.twice_widths = (4,)

    def unsteady(rows: list[Row]) -> list[Row]:
        other = make_row(shifted(ANSWERS[0], 3, 0.25))
        moved = {name: other[name] for name in ("logprobs", "logprob_bits", "state")}
        return [
            row | moved if (row["round"], row["prompt_index"]) == (1, 0) else row for row in rows
        ]

    made.edit("agree", "cpu-stock", "p4", unsteady)
    receipt = receipt_of(made)
    identity = f"same-route-twice/cpu-stock/{MODEL}/w4"
    control = entry(receipt, identity)
    assert (control["verdict"], control["expected"], control["as_expected"]) == (
        "differs",
        None,
        None,
    )
    assert len(control["measures"]["witness"]) == 2
    assert entry(receipt, f"same-route-twice/cpu-exact/{MODEL}/w4")["verdict"] == "exact"
    claim = entry(receipt, f"agree/cpu-exact|cpu-stock/{MODEL}/w4")
    assert claim["verdict"] == "differs"
    assert claim["reasons"] == [f"cpu-stock differs also with itself: {identity}"]
    assert entry(receipt, f"agree/cpu-exact|cpu-stock/{MODEL}/w1")["verdict"] == "exact"
    gate = gate_of(receipt)
    assert gate.exit_code == 0
    stream = io.StringIO()
    print_summary(receipt, "receipt.md", stream)
    assert "2 of 2 controls hold" in stream.getvalue()


def test_a_control_of_which_nothing_is_expected_fails_no_gate(tmp_path: Path) -> None:
    made = only(tmp_path, "agree", ["cpu-exact", "cpu-stock"])
    made.twice_widths = (4,)
    receipt = receipt_of(made)
    control = entry(receipt, f"same-route-twice/cpu-exact/{MODEL}/w4")
    control |= {"verdict": "unobservable", "reasons": ["asked only once"]}
    gate = gate_of(receipt)
    assert gate.exit_code == 0
    assert any("asked only once" in note for note in gate.notes)


def test_two_routes_with_one_measurement_are_not_compared(tmp_path: Path) -> None:
    """Routes of one program and configuration share stored answers, to the nanosecond."""
    made = only(tmp_path, "agree", ["cpu-exact", "cpu-stock"])
    at = 10**12 * 3

    def shared(rows: list[Row]) -> list[Row]:
        return [
            row | {"released_ns": at + place, "done_ns": at + 5 + place}
            for place, row in enumerate(rows)
        ]

    for route in ("cpu-exact", "cpu-stock"):
        made.edit("agree", route, "p1", shared)
    claim = pair_of(made, 1)
    assert claim["verdict"] == "unobservable"
    assert claim["reasons"] == [
        "both routes are the same program and configuration: their answers are one measurement"
    ]


def test_answers_that_are_partly_one_measurement_are_no_equality(tmp_path: Path) -> None:
    made = only(tmp_path, "agree", ["cpu-exact", "cpu-stock"])
    times = {"released_ns": 10**15, "done_ns": 10**15 + 1}
    for route in ("cpu-exact", "cpu-stock"):
        made.edit("agree", route, "p1", lambda rows: [rows[0] | times, *rows[1:]])
    claim = pair_of(made, 1)
    assert claim["verdict"] == "unobservable"
    assert claim["reasons"] == ["equal, but 1 of 3 answers of the two are one measurement"]


def test_a_program_that_changed_between_lives_makes_its_claims_invalid(tmp_path: Path) -> None:
    made = only(tmp_path, "repeat", ["cpu-exact"])
    for programs, verdict in (
        (("a", "b"), "invalid"),
        (("a", "a"), "exact"),
        ((None, "a"), "exact"),
    ):
        lives = [{"found": {"program_sha256": one * 64 if one else None}} for one in programs]
        made.record("repeat", "cpu-exact", "solo", serving={"lives": lives, "match": "ids"})
        claim = entry(receipt_of(made), f"repeat/cpu-exact/{MODEL}/off")
        assert claim["verdict"] == verdict
        changed = "the server's program changed between its lives" in claim["reasons"]
        assert changed == (verdict == "invalid")


def test_two_builds_under_one_served_route_are_refused_with_their_files(tmp_path: Path) -> None:
    made = only(tmp_path, "batched", ["cpu-exact"])
    made.record("batched", "cpu-exact", "p4", build=build("cpu-exact") | {"fingerprint": "e" * 64})
    with pytest.raises(RoutewiseError, match="2 different builds") as error:
        receipt_of(made)
    assert f"batched.cpu-exact.{MODEL}.p4.parquet" in str(error.value)
