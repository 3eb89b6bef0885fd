"""What is known of a device before and after it is held."""

from __future__ import annotations

from pathlib import Path

import pytest
from routewise import device as device_module
from routewise.claim import ClaimSpec
from routewise.cost import Arm, CostCell, _claims, identify_arms
from routewise.device import TRUSTED, kind_of_device, kinds_of_units
from routewise.engine import Settings
from routewise.errors import RoutewiseError

CARDS = [["Old", "1", "GPU-a"], ["Old", "1", "GPU-b"], ["New", "1", "GPU-c"]]
SETTINGS = Settings(context=64, micro_batch=32, threads=1, flash_attention=True)


def cost_cell(*arms: Arm, claims: tuple[ClaimSpec, ...] = ()) -> CostCell:
    return CostCell("small", "0" * 16, arms, (1,), 8, 1, 0, claims)


def test_two_units_of_one_kind_are_one_and_two_kinds_are_two() -> None:
    kinds = [kind_of_device({"device": "cuda", "gpus": [card]}) for card in CARDS]
    assert kinds[0] == kinds[1] != kinds[2]
    assert len(kinds_of_units({"device": "cuda", "gpus": CARDS})) == 2
    hrx = {"device": "hrx", "boot": "1"}
    assert kind_of_device({**hrx, "units": ["left"]}) == kind_of_device({**hrx, "units": ["right"]})


def test_a_cost_cell_says_the_units_that_it_holds_by_route() -> None:
    claim = ClaimSpec("mine", units=1, unit_ids=("7",), whole=True)
    cell = cost_cell(
        Arm("a", Path("build"), SETTINGS, {}),
        Arm("b", Path("build"), SETTINGS, {}, "made-up", "mine"),
        claims=(claim,),
    )
    assert CostCell.from_document(cell.document()) == cell
    with _claims(cell) as held:
        found = identify_arms(cell, held)
    assert found["a"] == {}
    assert (found["b"]["device"], found["b"]["units"]) == ("made-up", ["7"])


def test_a_cost_cell_is_not_timed_where_its_device_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TRUSTED, raising=False)
    monkeypatch.setattr(device_module, "_NODES", {"hrx": ("no-such-node",)})
    cell = cost_cell(Arm("b", Path("build"), SETTINGS, {}, "hrx"))
    with pytest.raises(RoutewiseError, match="no hrx device"), _claims(cell):
        pass
