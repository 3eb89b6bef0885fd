"""Arms in a receipt: an arm counts where the logs show its family gone, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_replies import provenance
from made_serving import MODEL, MadeServing, study
from routewise.dispatch import Dispatch, Observation, dispatch_columns
from routewise.document import receipt_markdown
from routewise.receipt import build_receipt
from routewise.schema.file import table_of, write_table
from routewise.schema.study import TABLES
from routewise.summary import gate_of
from routewise.table import build_tables, read_tables, write_tables

SPLIT = Dispatch("HRX", "", "flash_attention_decode_split", "fused")
PLAIN = Dispatch("HRX", "", "flash_attention", "single")
SCALE = Dispatch("HRX", "", "hip.scale", "single")

Lives = Sequence[frozenset[Dispatch]]


def write_log(folder: Path, route: str, lives: Lives, **changes: Any) -> Path:
    """Write a dispatch cell of width 1, one set a server life."""
    seen = [
        Observation(life, 1, life, "hrx", dict.fromkeys(found, 1))
        for life, found in enumerate(lives)
    ]
    blocks = [{"life": life, "width": 1} for life in range(len(lives))]
    document = provenance(route, MODEL, "log", sweep="dispatch", blocks=blocks) | changes
    path = folder / "cells" / f"dispatch.{route}.{MODEL}.log.parquet"
    table = table_of(TABLES["dispatch"], dispatch_columns(seen))
    write_table(path, TABLES["dispatch"], table, document)
    return path


def receipt_of(
    folder: Path, base: Lives | None, arm: Lives | None, **changes: Any
) -> dict[str, Any]:
    declared = study()
    declared["routes"]["cpu-exact"]["arm"] = {"of": "cpu-stock", "without": "decode_split"}
    repeat = declared["sweeps"]["repeat"] | {"routes": ["cpu-stock", "cpu-exact"]}
    dispatch = {
        "routes": ["cpu-stock", "cpu-exact"],
        "models": [MODEL],
        "prompts": "demo",
        "widths": [1],
        "n_tokens": 8,
    }
    declared["sweeps"] = {"repeat": repeat, "dispatch": dispatch}
    paths = MadeServing(folder, declared).write()
    for route, lives in (("cpu-stock", base), ("cpu-exact", arm)):
        if lives is not None:
            paths.append(write_log(folder, route, lives, **changes))
    write_tables(folder / "tables", declared, build_tables(declared, paths))
    return build_receipt(read_tables(folder / "tables"))


def verdicts_of(receipt: dict[str, Any]) -> tuple[str, str, str]:
    """Return the verdicts of the arm's control, of the arm's claim and of the base's claim."""
    found = {one["id"]: one["verdict"] for one in [*receipt["claims"], *receipt["controls"]]}
    return (
        found[f"arm-counts/cpu-exact/{MODEL}"],
        found[f"repeat/cpu-exact/{MODEL}/off"],
        found[f"repeat/cpu-stock/{MODEL}/off"],
    )


BASE = [frozenset({SPLIT, SCALE})] * 3
ARM = [frozenset({PLAIN, SCALE})] * 3


def test_an_arm_whose_family_is_gone_counts_and_its_claims_stand(tmp_path: Path) -> None:
    receipt = receipt_of(tmp_path, BASE, ARM)
    assert verdicts_of(receipt) == ("exact", "exact", "exact")
    control = next(one for one in receipt["controls"] if one["id"].startswith("arm-counts"))
    assert control["observable"] == "dispatch log"
    assert "decode_split gone" in control["measures"]["dispatch"]["w1"]
    assert gate_of(receipt).exit_code == 0
    text = receipt_markdown(receipt)
    assert "## Dispatch" in text
    assert [record["n"] for record in receipt["provenance"]["dispatch"]] == [2, 2]


@pytest.mark.parametrize(
    ("base", "arm", "verdict"),
    [
        (BASE, BASE, "invalid"),  # the family still runs
        (ARM, ARM, "invalid"),  # it never ran
        (BASE[:2], ARM, "invalid"),  # not three times
        ([BASE[0], BASE[0], ARM[0]], ARM, "invalid"),  # not the same each time
        ([BASE[0], BASE[0], frozenset()], ARM, "invalid"),  # one life logged nothing
        (BASE, [ARM[0], ARM[0], frozenset()], "invalid"),  # a silent arm
        (BASE, [ARM[0], ARM[0], BASE[0]], "invalid"),  # one life of the arm ran it
        (BASE, None, "unobservable"),
        (None, ARM, "unobservable"),
    ],
)
def test_an_arm_that_its_log_does_not_show_makes_its_claims_invalid(
    base: Lives | None, arm: Lives | None, verdict: str, tmp_path: Path
) -> None:
    receipt = receipt_of(tmp_path, base, arm)
    assert verdicts_of(receipt) == (verdict, "invalid", "exact")
    claim = next(one for one in receipt["claims"] if one["route"] == "cpu-exact")
    assert f"arm-counts/cpu-exact/{MODEL}" in claim["reasons"][0]
    assert gate_of(receipt).exit_code == 2


def test_a_route_without_a_log_is_said_to_have_none(tmp_path: Path) -> None:
    receipt = receipt_of(tmp_path, [], [], unsupported="the route names no log of its kernels")
    assert verdicts_of(receipt)[0] == "unsupported"
