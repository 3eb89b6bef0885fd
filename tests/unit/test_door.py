"""The report's door: the outer shape is written, and read back whole or with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_replies
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.door import (
    FORMAT,
    PROMPT_COLUMNS,
    RECORD_COLUMNS,
    read_report,
    report_from,
    report_of,
    write_report,
)
from routewise.errors import RoutewiseError
from routewise.schema.replies import REPLIES

ANSWERS = [made_replies.make_answer(seed, 6) for seed in range(3)]


def table_with(*more: made_replies.Row) -> pa.Table:
    return made_replies.replies_table([*made_replies.solo_block(ANSWERS, rounds=2), *more])


def test_the_outer_shape_is_the_known_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    write_report(path, {"a": table_with(), "b": table_with()})
    document = json.loads(path.read_text())
    assert list(document["routes"]) == ["a", "b"]
    for entries in document["routes"].values():
        assert [len(entry["runs"]) for entry in entries] == [2, 2, 2]
        assert [entry["prompt_index"] for entry in entries] == [0, 1, 2]
    assert document["format"] == FORMAT


def test_what_is_written_is_read_back_as_the_same_table(tmp_path: Path) -> None:
    answer = ANSWERS[0]
    odd = [
        made_replies.invalid_row("reply is no JSON", prompt_index=0),
        made_replies.make_row(made_replies.only_text(answer)),
        made_replies.make_row(made_replies.without_ids(answer)),
        made_replies.make_row(made_replies.without_logprobs(answer)),
        *(
            made_replies.make_row(made_replies.with_status(answer, 2, status))
            for status in ("null", "missing", "sentinel", "nan", "not_float32")
        ),
        made_replies.make_row(made_replies.cut(answer, 3)) | {"text": b"half \xc3"},
        made_replies.make_row(made_replies.flipped_bit(answer, 1, 0)),
    ]
    table = table_with(*odd)
    write_report(tmp_path / "r.json", {"cpu": table})
    report = read_report(tmp_path / "r.json")
    assert report.missing == []
    back = report.table("cpu")
    # a route's rows come back prompt by prompt
    indices = sorted(range(table.num_rows), key=lambda i: table["prompt_index"][i].as_py())
    assert back.equals(table.take(indices))
    assert back.schema.equals(REPLIES.arrow)


@given(seed=st.integers(0, 500), position=st.integers(0, 5), bit=st.integers(0, 22))
def test_every_bit_of_a_logprob_survives(seed: int, position: int, bit: int) -> None:
    answer = made_replies.flipped_bit(made_replies.make_answer(seed, 6), position, bit)
    table = made_replies.replies_table([made_replies.make_row(answer)])
    document = json.loads(json.dumps(report_of({"x": table})))
    assert report_from(document, "here").table("x").equals(table)


def test_a_top_list_without_a_number_is_written_as_null() -> None:
    row = made_replies.make_row(ANSWERS[0])
    row["top_logprobs"] = [[float("-inf"), float("nan")], *row["top_logprobs"][1:]]
    document = report_of({"x": made_replies.replies_table([row])})
    assert document["routes"]["x"][0]["runs"][0]["top_logprobs"][0] == [None, None]
    json.dumps(document, allow_nan=False)


# ------------------------------------------------------------------------------------- leniency


def document_of() -> dict[str, Any]:
    return json.loads(json.dumps(report_of({"cpu": table_with()})))


def test_unknown_keys_are_ignored() -> None:
    document = document_of()
    document["host"] = "?"
    document["routes"]["cpu"][1]["colour"] = 3
    document["routes"]["cpu"][1]["runs"][0]["mood"] = {"a": [1]}
    report = report_from(document, "here")
    assert report.missing == []
    assert report.table("cpu").equals(table_with())
    assert "mood" not in report.routes["cpu"][1].runs[0]


def test_missing_keys_are_named_by_their_place() -> None:
    document = document_of()
    del document["routes"]["cpu"][1]["runs"][1]["token_ids"]  # may be null
    report = report_from(document, "here")
    assert report.missing == ["routes.cpu[1].runs[1].token_ids: missing"]
    assert report.table("cpu")["token_ids"][3].as_py() is None
    del document["routes"]["cpu"][2]["runs"][0]["state"]  # may not
    report = report_from(document, "here")
    assert len(report.missing) == 2
    with pytest.raises(RoutewiseError, match=r"'cpu': 1 of 6 runs have no state"):
        report.table("cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_asked", "many"),
        ("n_asked", True),
        ("state", "zz"),
        ("state", "00"),  # not 16 bytes
        ("logprob_bits", 5),
        ("logprob_bits", [-1]),
        ("logprobs", ["x"]),
        ("token_bytes", ["0g"]),
        ("round", 2**40),
    ],
)
def test_a_value_that_does_not_fit_is_reported_and_left_out(key: str, value: Any) -> None:
    document = document_of()
    document["routes"]["cpu"][0]["runs"][0][key] = value
    report = report_from(document, "here")
    assert len(report.missing) == 1
    assert report.missing[0].startswith(f"routes.cpu[0].runs[0].{key}: ")
    assert key not in report.routes["cpu"][0].runs[0]


def test_a_report_of_another_tool_keeps_its_shape_and_names_what_is_not_there() -> None:
    report = report_from({"routes": {"hrx": [{"runs": [{"text": "Grüße"}]}], "npu": []}}, "here")
    assert report.routes["hrx"][0].runs == [{"text": "Grüße".encode()}]
    assert report.routes["npu"] == []
    assert len(report.missing) == len(PROMPT_COLUMNS) + len(RECORD_COLUMNS) - 1
    with pytest.raises(RoutewiseError, match="have no"):
        report.table("hrx")
    assert report.table("npu").num_rows == 0


@pytest.mark.parametrize(
    "document",
    [
        [],
        "text",
        {},
        {"routes": []},
        {"routes": {"a": {}}},
        {"routes": {"a": [5]}},
        {"routes": {"a": [{}]}},
        {"routes": {"a": [{"runs": {}}]}},
        {"routes": {"a": [{"runs": [1]}]}},
    ],
)
def test_another_outer_shape_is_refused(document: Any) -> None:
    with pytest.raises(RoutewiseError, match="wanted"):
        report_from(document, "here")


def test_files_that_are_no_report_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError, match="no such file"):
        read_report(tmp_path / "none.json")
    bad = tmp_path / "bad.json"
    for content in (b"{", b"\xff\xfe", b""):
        bad.write_bytes(content)
        with pytest.raises(RoutewiseError, match="not JSON"):
            read_report(bad)
    with pytest.raises(RoutewiseError, match="'gpu' is not in the report"):
        report_from(document_of(), "here").table("gpu")
