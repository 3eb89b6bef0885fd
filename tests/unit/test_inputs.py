"""The table of what each kind of cell depends on, and the digests' manifests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from routewise.digest import DIGEST_LENGTH, canonical_json, digest_of
from routewise.inputs import (
    SWEEP_INPUTS,
    WORDS,
    fields_json,
    inputs_json,
    json_digest,
    read_manifest,
    write_manifest,
)

COMPARE = {"sweep": "agree", "cell": {"route": "a|b"}, "sides": ["1", "2"], "code": "c"}


def test_every_input_has_words() -> None:
    assert {name for names in SWEEP_INPUTS.values() for name in names} == set(WORDS)


def test_inputs_are_those_of_the_table_and_no_others() -> None:
    assert set(json.loads(inputs_json("compare", COMPARE))) == SWEEP_INPUTS["compare"]
    with pytest.raises(ValueError, match="inputs of a compare cell"):
        inputs_json("compare", {**COMPARE, "model": "m"})
    with pytest.raises(ValueError, match="inputs of a compare cell"):
        inputs_json("compare", {k: v for k, v in COMPARE.items() if k != "code"})


@pytest.mark.parametrize("name", sorted(COMPARE))
def test_each_input_moves_the_digest(name: str) -> None:
    before = json_digest(inputs_json("compare", COMPARE))
    assert json_digest(inputs_json("compare", COMPARE)) == before
    assert json_digest(inputs_json("compare", {**COMPARE, name: "another"})) != before


def test_a_manifest_is_written_once(tmp_path: Path) -> None:
    write_manifest(tmp_path, "a" * 64, lambda: {"parts": {"x": "1"}})
    write_manifest(tmp_path, "a" * 64, lambda: pytest.fail("made again"))
    assert read_manifest(tmp_path, "a" * 64) == {"parts": {"x": "1"}}
    assert read_manifest(tmp_path, "b" * 64) is None


def test_a_damaged_manifest_is_none(tmp_path: Path) -> None:
    write_manifest(tmp_path, "a" * 64, lambda: {})
    [file] = (tmp_path / "manifests").iterdir()
    file.write_text("{")
    assert read_manifest(tmp_path, "a" * 64) is None


@dataclass(frozen=True)
class Inner:
    b: tuple[int, ...]
    a: dict[str, float]


@dataclass(frozen=True)
class Outer:
    z: Inner
    y: tuple[Inner, ...]
    x: str | None


def test_json_of_a_dataclass_is_that_of_its_fields() -> None:
    inner = Inner((1, 2), {"é": 0.5})
    value = Outer(inner, (inner, inner), None)
    assert fields_json({"cell": value}) == canonical_json({"cell": asdict(value)})
    for refused in (Path("x"), {1, 2}, b"x", object(), Outer):
        with pytest.raises(TypeError):
            fields_json({"cell": refused})
    with pytest.raises(ValueError, match="Out of range"):
        fields_json(float("nan"))


def test_the_digest_of_json_is_that_of_the_inputs() -> None:
    text = inputs_json("compare", COMPARE)
    assert json_digest(text) == digest_of(json.loads(text))[:DIGEST_LENGTH]
