"""Agree cells made from two replies cells, by the library and by the script that a person runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import made_replies as made
import pandas as pd
import pytest
from routewise.agree import agree_summary
from routewise.errors import RoutewiseError
from routewise.normalise import code_digest
from routewise.pair import NOT_ARITHMETIC_ONLY, PICK, PairCell, compare_pair
from routewise.schema.file import read_table
from routewise.schema.study import TABLES

ANSWERS = [made.make_answer(seed, 16) for seed in range(3)]
OTHERS = [ANSWERS[0], made.shifted(ANSWERS[1], 4, 0.125), made.diverged(ANSWERS[2], 9)]
SOLO = dict(zip(PICK, [0, "off", "copies", "together", 1, 1, 0], strict=True))


def document(route: str = "cpu-stock|cpu-exact", **changes: Any) -> dict[str, Any]:
    named = {"sweep": "agree", "route": route, "model": "small-q4_k_m", "variant": "solo"}
    picks = {"pick_a": SOLO, "pick_b": SOLO}
    return {**named, "prompts": "demo", "digest": "d" * 16, **picks} | changes


class Pair:
    """Two replies files; what is changed of them before they are compared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = {"a": made.solo_block(ANSWERS), "b": made.solo_block(OTHERS)}
        self.told = {"a": made.provenance("cpu-stock"), "b": made.provenance("cpu-exact")}

    def paths(self) -> tuple[Path, Path]:
        a, b = (
            made.write_replies(self.folder / f"{side}.parquet", self.rows[side], self.told[side])
            for side in ("a", "b")
        )
        return a, b

    def compare(self, **changes: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
        output = self.folder / "agree.parquet"
        cell = PairCell.from_document(document(**changes))
        a, b = self.paths()
        compare_pair(cell, a, b, "c" * 64, output)
        table, provenance = read_table(output, TABLES["agree"])
        return table.to_pandas(), provenance


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


# ----------------------------------------------------------------------------------------- cells


def test_a_cell_holds_the_rows_and_what_both_sides_were(pair: Pair) -> None:
    rows, told = pair.compare()
    score = agree_summary(rows).all_replies
    assert (score.n_prompts, score.n_same_stream, score.n_positions) == (3, 2, 48)
    assert score.dlogp_max == pytest.approx(0.125, abs=1e-6)
    assert told["cell"] == {k: v for k, v in document().items() if not k.startswith("pick")}
    assert told["settings"] == {"pick_a": SOLO, "pick_b": SOLO, "match": "ids"}
    fingerprints = [pair.told[side]["build"]["fingerprint"] for side in ("a", "b")]
    assert [told["builds"][r]["fingerprint"] for r in ("cpu-stock", "cpu-exact")] == fingerprints
    assert [told["sides"][side]["fingerprint"] for side in ("a", "b")] == fingerprints
    assert (told["weights"], told["arithmetic_only"], rows["arithmetic_only"].all()) == (
        "same",
        True,
        True,
    )
    assert told["machine"] == pair.told["a"]["machine"]
    assert told["invalid_reasons"] == []
    assert told["unsupported"] is None
    assert (told["n_common_replies"], told["n_compared"]) == (3, 3)
    assert told["sides"]["a"]["claim"] == {
        "declared": None,
        "wait_s": 0.0,
        "hold_s": 1.0,
        "n_others": None,
    }
    assert told["started_at"] <= told["ended_at"]


def test_only_the_rows_picked_are_compared(pair: Pair) -> None:
    """Other lives, rounds and widths of the same file differ, and must not be seen."""
    far = [made.diverged(answer, 0) for answer in ANSWERS]
    pair.rows["b"] = [
        *made.solo_block(ANSWERS, 1),
        *made.solo_block(far, 1, life=1),
        *made.solo_block(far, 1, cache="warm"),
        *made.solo_block(far, 1, parallel=4),
        *[{**row, "round": 5} for row in made.solo_block(far, 1)],
        *made.copies_block([far]),
    ]
    assert pair.compare()[0]["match"].all()
    for change in ({"life": 1}, {"cache": "warm"}, {"parallel": 4}, {"round": 5}):
        rows, told = pair.compare(pick_b={**SOLO, **change})
        assert not rows["same_stream"].any(), change
        assert told["settings"]["pick_b"] == {**SOLO, **change}


def test_a_pick_of_both_sides_and_a_pick_that_names_little(pair: Pair) -> None:
    few = {"life": 0, "round": 1}
    full, _ = pair.compare(pick_a={**SOLO, **few}, pick_b={**SOLO, **few})
    for picks in (
        {"pick_a": few, "pick_b": few},
        {"pick": few, "pick_a": {}, "pick_b": {}},
        {"pick": {**few, "round": 0}, "pick_a": {"round": 1}, "pick_b": {"round": 1}},
    ):
        rows, told = pair.compare(**picks)
        assert rows.equals(full)
        assert told["settings"]["pick_a"] == few
    with pytest.raises(RoutewiseError, match="two replies to prompt prose-0"):
        pair.compare(pick_a={}, pick_b=few)


def test_copies_are_compared_copy_by_copy_and_neighbours_not_at_all(pair: Pair) -> None:
    wide = {"width": 3, "parallel": 3}
    pair.rows["a"] = made.copies_block([[ANSWERS[0]] * 3])
    pair.rows["b"] = made.copies_block([[ANSWERS[0], made.diverged(ANSWERS[0], 2), ANSWERS[0]]])
    rows, _ = pair.compare(pick_a={**SOLO, **wide}, pick_b={**SOLO, **wide})
    assert rows.groupby("copy")["match"].all().tolist() == [True, False, True]
    for side in ("a", "b"):
        pair.rows[side] = made.probe_block([ANSWERS[0]], ANSWERS[1:], "neighbours")
    beside = {**SOLO, **wide, "mix": "neighbours"}
    rows, _ = pair.compare(pick_a=beside, pick_b=beside)
    assert set(rows["copy"]) == {0}
    assert set(rows["prompt_index"]) == {0}


def test_a_route_is_compared_with_itself_in_another_life(pair: Pair) -> None:
    pair.told["b"] = pair.told["a"]
    pair.rows["a"] = pair.rows["b"] = [
        *made.solo_block(ANSWERS, 1),
        *made.solo_block(OTHERS, 1, life=1),
    ]
    twice = "cpu-stock|cpu-stock"
    rows, told = pair.compare(route=twice, pick_b={**SOLO, "life": 1})
    assert not rows["match"].all()
    assert told["unobservable"] is None
    assert list(told["builds"]) == ["cpu-stock"]


def test_replies_are_never_compared_with_themselves(pair: Pair) -> None:
    pair.told["b"], pair.rows["b"] = pair.told["a"], pair.rows["a"]
    pair.rows["a"][0]["busy_per_decode"] = float("nan")  # which no comparison finds equal
    for pick_b in (SOLO, {"round": 0}):  # the same rows, whatever names them
        rows, told = pair.compare(route="cpu-stock|cpu-stock", pick_b=pick_b)
        assert len(rows) == 0
        assert "cpu-stock was asked only once" in told["unobservable"]
        assert (told["invalid_reasons"], told["unsupported"]) == ([], None)


# ------------------------------------------------------------------- what the sides could not do


def test_reasons_of_both_files_are_carried_over(pair: Pair) -> None:
    pair.told["a"]["invalid_reasons"] = ["asked for slots 4, the server says 1"]
    pair.told["b"]["invalid_reasons"] = ["the copies never shared a decode step"]
    _, told = pair.compare()
    assert told["invalid_reasons"] == [
        "cpu-stock: asked for slots 4, the server says 1",
        "cpu-exact: the copies never shared a decode step",
    ]


def test_invalid_replies_are_counted_and_none_left_is_invalid(pair: Pair) -> None:
    pair.rows["b"][0] = made.invalid_row("the server died")
    rows, told = pair.compare()
    assert set(rows["prompt_index"]) == {1, 2}
    side = told["sides"]["b"]
    assert (side["n_replies"], side["n_invalid"]) == (3, 1)
    assert side["why_invalid"] == {"the server died": 1}
    assert (told["n_common_replies"], told["invalid_reasons"]) == (2, [])
    pair.rows["b"] = [made.invalid_row("the server died", prompt_index=i) for i in range(3)]
    rows, told = pair.compare()
    assert len(rows) == 0
    assert told["invalid_reasons"] == ["no request has a valid reply with a token on both routes"]


def test_an_unsupported_side_makes_the_cell_unsupported(pair: Pair) -> None:
    pair.rows["b"] = []
    pair.told["b"] = made.unsupported("cpu-exact", "the route answers one request at a time")
    rows, told = pair.compare()
    assert len(rows) == 0
    assert told["unsupported"] == "cpu-exact: the route answers one request at a time"
    assert told["invalid_reasons"] == []


def test_a_block_that_the_route_refused_is_unsupported_and_no_mistake(pair: Pair) -> None:
    block = {**{name: SOLO[name] for name in PICK if name != "round"}, "life": 1, "rounds": 3}
    refused: dict[str, Any] = {
        "block": block,
        "reason": "an endpoint that runs already is not restarted",
    }
    pair.told["b"]["refused_blocks"] = [refused]
    rows, told = pair.compare(pick_b={**SOLO, "life": 1})
    assert (len(rows), told["unsupported"]) == (0, f"cpu-exact: {refused['reason']}")
    # what was not refused is compared
    rows, told = pair.compare(pick_b={**SOLO, "life": 0})
    assert len(rows) == 48
    assert told["unsupported"] is None
    few = {"round": 0, "life": 0}
    refused["block"] |= {"life": 0, "cache": "warm"}
    assert pair.compare(pick_a=few, pick_b=few)[1]["unsupported"] is None
    # and what was neither refused nor asked for is a mistake
    with pytest.raises(RoutewiseError, match="no replies of life 2"):
        pair.compare(pick_b={**SOLO, "life": 2})


def test_requantised_weights_are_not_arithmetic_only(pair: Pair) -> None:
    pair.told["b"] = made.provenance("cpu-exact", weights="requantised")
    rows, told = pair.compare()
    assert (told["weights"], told["arithmetic_only"]) == (NOT_ARITHMETIC_ONLY, False)
    assert not rows["arithmetic_only"].any()
    # and two files that call themselves the same are not, if their digests differ
    pair.told["b"] = made.provenance("cpu-exact")
    pair.told["b"]["model"] = pair.told["b"]["model"] | {"sha256": "f" * 64}
    assert not pair.compare()[0]["arithmetic_only"].any()


def test_a_route_without_ids_is_matched_by_text(pair: Pair) -> None:
    pair.rows["b"] = made.solo_block([made.without_ids(answer) for answer in OTHERS])
    pair.told["b"] = made.provenance("npu", match="text", **made.external("npu"))
    rows, told = pair.compare(route="cpu-stock|npu")
    assert told["settings"]["match"] == "text"
    assert told["builds"]["npu"] == pair.told["b"]["command"]
    assert rows["token_id_b"].isna().all()
    assert agree_summary(rows).all_replies.n_same_stream == 2
    # declared to send ids, and does not
    pair.told["b"] = made.provenance("npu")
    assert pair.compare(route="cpu-stock|npu")[1]["settings"]["match"] == "text"


def test_a_route_that_sends_text_alone_leaves_logprobs_unseen(pair: Pair) -> None:
    pair.rows["b"] = made.solo_block([made.only_text(answer) for answer in OTHERS])
    pair.told["b"] = made.provenance("npu", match="text", **made.external("npu"))
    rows, told = pair.compare(route="cpu-stock|npu")
    assert rows["match"].tolist() == [True, True, False]
    assert rows["dlogp"].isna().all()
    assert told["sides"]["b"]["observables"] == ["text"]


def test_two_machines_are_named(pair: Pair) -> None:
    pair.told["b"]["machine"] = {"kind": "another"}
    _, told = pair.compare()
    assert told["machine"] == {"kind": "2-core x86-64 with AVX-512 | another"}
    assert told["sides"]["b"]["machine"] == {"kind": "another"}


# ------------------------------------------------------------------------------------- mistakes


def test_files_of_other_cells_are_refused(pair: Pair) -> None:
    with pytest.raises(RoutewiseError, match="cpu-exact"):
        pair.compare(route="cpu-stock|gpu")
    with pytest.raises(RoutewiseError, match="order of the pair"):
        pair.compare(route="cpu-exact|cpu-stock")
    pair.told["b"]["prompts"] = {"name": "demo", "digest": "e" * 64}
    with pytest.raises(RoutewiseError, match="different prompts"):
        pair.compare()


def test_rows_that_are_not_there_are_named(pair: Pair) -> None:
    with pytest.raises(RoutewiseError, match=r"width 7.*\n.*holds life 0.*2 other rounds") as found:
        pair.compare(pick_a={**SOLO, "width": 7})
    assert "a.parquet" in found.value.problem
    pair.rows["a"] = []
    with pytest.raises(RoutewiseError, match="holds no replies"):
        pair.compare()


@pytest.mark.parametrize("wrong", [{"life": "first"}, {"cache": 1}, {"round": [0]}])
def test_a_pick_of_another_type_is_refused(pair: Pair, wrong: dict[str, Any]) -> None:
    with pytest.raises(RoutewiseError, match="pick by values of the column"):
        pair.compare(pick_a={**SOLO, **wrong})


def test_two_replies_for_one_request_are_refused(pair: Pair) -> None:
    pair.rows["b"].append(pair.rows["b"][0])
    with pytest.raises(RoutewiseError, match="two replies"):
        pair.compare()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"route": "cpu-stock"}, "'a|b'"),
        ({"route": "a|b|c"}, "'a|b'"),
        ({"route": "a|"}, "'a|b'"),
        ({"sweep": "replay"}, "'replay'"),
        ({"pick": {"copy": 0}}, "copy"),
        ({"pick_a": {**SOLO, "copy": 0}}, "copy"),
        ({"pick_b": {"copy": 0}}, "copy"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_cell_that_is_none_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RoutewiseError) as found:
        PairCell.from_document(document(**changes))
    assert words in str(found.value)


# --------------------------------------------------------------------------------------- script


def planned(repository: Path) -> str:
    return code_digest(repository / "workflow" / "scripts" / "compare_routes.py")


def run_script(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = repository / "workflow" / "scripts" / "compare_routes.py"
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_script_writes_the_cell(pair: Pair, repository: Path) -> None:
    a, b = pair.paths()
    output = pair.folder / "new" / "agree.parquet"
    files = [
        "--a",
        str(a),
        "--b",
        str(b),
        "--code-digest",
        planned(repository),
        "--output",
        str(output),
    ]
    done = run_script(repository, "--cell", json.dumps(document()), *files)
    assert done.returncode == 0, done.stderr
    assert "48 positions of 3 replies, matched by ids" in done.stdout
    table, told = read_table(output, TABLES["agree"])
    assert table.num_rows == 48
    assert told["code_digest"] == planned(repository)


def test_code_that_was_edited_after_planning_measures_nothing(pair: Pair, repository: Path) -> None:
    a, b = pair.paths()
    output = pair.folder / "new" / "agree.parquet"
    files = ["--a", str(a), "--b", str(b), "--code-digest", "c" * 64, "--output", str(output)]
    done = run_script(repository, "--cell", json.dumps(document()), *files)
    assert done.returncode == 2
    assert "the measuring code was edited after it was planned" in done.stderr
    assert not output.exists()


@pytest.mark.parametrize("cell", ["{", "[]", json.dumps(document(route="cpu-stock"))])
def test_the_script_ends_a_mistake_without_a_traceback(
    pair: Pair, repository: Path, cell: str
) -> None:
    a, b = pair.paths()
    output = pair.folder / "agree.parquet"
    files = ["--a", str(a), "--b", str(b), "--code-digest", "c", "--output", str(output)]
    done = run_script(repository, "--cell", cell, *files)
    assert done.returncode == 2
    assert done.stderr.startswith("routewise: ")
    assert "try: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
