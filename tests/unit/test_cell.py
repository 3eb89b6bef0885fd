"""A cell's job with a made engine: what is stored is adopted, what is missing is measured."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from made_engines import (
    CONTEXT,
    MICRO_BATCH,
    N_VOCAB,
    FlipsABit,
    GivesANaN,
    LeaksNeighbours,
    MadeEngine,
    Restless,
)
from routewise import cell as cell_module
from routewise import device as device_module
from routewise.cell import Bench, Cell, Inputs, measure_cell
from routewise.claim import ClaimSpec, claims_folder, read_claims
from routewise.engine import Settings
from routewise.errors import RoutewiseError
from routewise.schema.file import read_table, table_of, write_table
from routewise.schema.study import TABLES
from routewise.store import fragment_key

SETTINGS = Settings(context=CONTEXT, micro_batch=MICRO_BATCH, threads=2, flash_attention=True)
PROMPTS = {"first": ([5, 4, 3], 20), "second": ([*range(90)], 50), "third": ([9], 7)}
N_ASKED = sum(n for _, n in PROMPTS.values())


class MadeContext:
    """What the engine says that a context is."""

    said: ClassVar[dict[str, Any]] = {}

    def __init__(self, engine: MadeEngine) -> None:
        self.engine = engine
        self.readback = {
            "context": CONTEXT,
            "micro_batch": MICRO_BATCH,
            "threads": 2,
            "threads_batch": 2,
            "flash_attention": "enabled",
            "kv_unified": "false",
            "kv_types": ["f16", "f16"],
            **self.said,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class MadeBuild:
    """Stands for a build's libraries and its loaded model, and counts the contexts opened."""

    engine: type[MadeEngine] = MadeEngine
    system_info = "made"
    n_vocab = N_VOCAB
    fail_at: int | None = None

    def __init__(self) -> None:
        self.n_contexts = 0
        self.n_models = 0

    def open_model(self, path: Path, gpu_layers: int) -> MadeBuild:
        self.n_models += 1
        return self

    def uncovered(self) -> str:
        return ""

    @contextmanager
    def open_context(self, settings: Settings, n_sequences: int = 1) -> Iterator[MadeContext]:
        self.n_contexts += 1
        if self.n_contexts == self.fail_at:
            raise KeyboardInterrupt
        yield MadeContext(self.engine())


class Workplace:
    """Inputs and outputs of cells in one folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.build = MadeBuild()
        self.fingerprint = "fingerprint"
        monkeypatch.setattr(cell_module, "load_engine", lambda _: self.build)
        monkeypatch.setattr(
            cell_module, "check_identity", lambda *_: {"fingerprint": self.fingerprint}
        )
        self.inputs = Inputs(
            build=folder / "build",
            model=folder / "model.gguf",
            model_record={"name": "small", "sha256": "m" * 64},
            prompts=folder / "prompts.parquet",
            store=folder / "store",
            code_digest="code",
        )
        self.write_prompts(list(PROMPTS))

    def write_prompts(self, names: Sequence[str]) -> None:
        chosen = [PROMPTS[name] for name in names]
        columns = {
            "prompt_index": range(len(names)),
            "prompt_id": names,
            "category": ["made"] * len(names),
            "token_ids": [ids for ids, _ in chosen],
            "text": [None] * len(chosen),
            "n_asked": [n for _, n in chosen],
            "digest": [f"{name}-digest" for name in names],
        }
        provenance = {"prompt_set_digest": "+".join(names)}
        write_table(
            self.inputs.prompts, TABLES["prompts"], table_of(TABLES["prompts"], columns), provenance
        )

    def measure(self, variant: str, **changes: Any) -> tuple[pa.Table, dict[str, Any]]:
        """Measure one cell; return its rows and provenance."""
        cell = cell_of(variant)
        inputs = dataclasses.replace(self.inputs, **changes)
        plain = self.path("plain") if variant != "plain" else None
        measure_cell(cell, inputs, self.path(variant), plain)
        return read_table(self.path(variant), TABLES["plain" if plain is None else "replay"])

    def path(self, variant: str) -> Path:
        return self.folder / f"{variant}.parquet"


def cell_of(variant: str) -> Cell:
    parameters: dict[str, Any] = {
        "plain": {"top_k": 4},
        "ragged": {"seed": 1},
        "rollback": {"seed": 1},
        "neighbours": {"seed": 1, "neighbours": 3},
    }.get(variant, {})
    return Cell(
        sweep="replay",
        route="made",
        model="small",
        variant=variant,
        prompts="few",
        digest="0" * 16,
        settings=SETTINGS,
        parameters=parameters,
        env={},
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    return Workplace(tmp_path, monkeypatch)


VARIANTS = ("w1", "w2", "w16", "ragged", "rollback", "neighbours")


# ------------------------------------------------------------------------------------- rows


def test_a_plain_cell_has_a_row_for_each_step(place: Workplace) -> None:
    rows, provenance = place.measure("plain")
    assert rows.num_rows == N_ASKED + len(PROMPTS)
    start = 0
    for index, (name, (ids, n)) in enumerate(PROMPTS.items()):
        part = rows.slice(start, n + 1).to_pydict()
        start += n + 1
        assert part["prompt_id"] == [name] * (n + 1)
        assert part["prompt_index"] == [index] * (n + 1)
        assert part["step"] == list(range(n + 1))
        assert part["kv_position"] == [len(ids) - 1 + step for step in range(n + 1)]
        assert part["input_token_id"] == [ids[-1], *part["token_id"][:-1]]
        assert part["token_id"] == [top[0] for top in part["top_ids"]]
        for logits, bits in zip(part["top_logits"], part["top_bits"], strict=True):
            assert len(logits) == 4
            assert np.array(logits, np.float32).view(np.uint32).tolist() == bits
    assert provenance["n_measured"] == 3
    assert provenance["invalid_reasons"] == []
    assert provenance["cell"]["variant"] == "plain"
    stored = {path.stem for path in place.inputs.store.rglob("*.parquet")}
    assert len(provenance["fragments"]) == len(PROMPTS)
    assert set(provenance["fragments"]) == stored
    assert provenance["settings"]["top_k"] == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_replay_of_an_exact_engine_is_equal_at_every_step(place: Workplace, variant: str) -> None:
    plain, _ = place.measure("plain")
    rows, provenance = place.measure(variant)
    assert rows.num_rows == N_ASKED
    assert rows["bits_equal"].to_pylist() == [True] * N_ASKED
    assert rows["plain_repeat_equal"].to_pylist() == [True] * N_ASKED
    assert rows["replay_hash"] == rows["plain_hash"]
    later = plain.filter(pa.compute.greater(plain["step"], 0))
    for mine, theirs in (
        ("plain_hash", "logits_hash"),
        ("kv_position", "kv_position"),
        ("input_token_id", "input_token_id"),
        ("plain_token_id", "token_id"),
        ("plain_margin", "margin"),
    ):
        assert rows[mine].to_pylist() == later[theirs].to_pylist()
    assert provenance["invalid_reasons"] == []


def test_a_faulty_engine_is_not(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeBuild, "engine", LeaksNeighbours)
    place.measure("plain")
    assert False not in place.measure("w16")[0]["bits_equal"].to_pylist()
    assert True not in place.measure("neighbours")[0]["bits_equal"].to_pylist()


def test_a_differing_row_says_how_it_differs(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeBuild, "engine", FlipsABit)
    place.measure("plain")
    for row in place.measure("w16")[0].to_pylist():
        differs = row["pass_tokens"] >= 4
        assert row["bits_equal"] is not differs
        assert row["n_differing"] == int(differs)
        assert (row["plain_hash"] != row["replay_hash"]) is differs
        assert (row["logit_delta_max"] > 0) is differs
        assert row["plain_repeat_equal"]


def test_rows_that_are_no_numbers_are_invalid_and_compared_with_nothing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeBuild, "engine", GivesANaN)
    place.measure("plain")
    nullable = ("bits_equal", "n_differing", "n_zero_sign", "argmax_flip", "kl_nats")
    rows = place.measure("w16")[0].to_pylist()
    for row in rows:
        invalid = row["pass_tokens"] >= 4
        assert row["status"] == ("invalid" if invalid else "ok")
        assert [row[name] is None for name in nullable] == [invalid] * len(nullable)
    assert {row["status"] for row in rows} == {"ok", "invalid"}


def test_a_pass_that_crosses_a_block_says_so(place: Workplace) -> None:
    place.measure("plain")
    rows = [row for row in place.measure("w16")[0].to_pylist() if row["prompt_id"] == "second"]
    # positions 90 to 139 in passes of 16: 122 to 137 crosses 128
    assert {row["kv_position"] for row in rows if row["crosses_128"]} == set(range(122, 138))
    assert not any(row["crosses_256"] for row in rows)
    alone = place.measure("w1")[0].to_pylist()
    assert not any(row["crosses_128"] for row in alone)


# -------------------------------------------------------------------------- the plain twice


def test_an_engine_that_does_not_repeat_itself_is_found(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeBuild, "engine", Restless)
    place.measure("plain")
    rows, provenance = place.measure("w1")
    assert rows["plain_repeat_equal"].to_pylist() == [False] * N_ASKED
    assert len(provenance["invalid_reasons"]) == len(PROMPTS)
    assert all("prefill differs" in reason for reason in provenance["invalid_reasons"])


def test_a_plain_cell_of_other_rows_is_found_though_all_is_adopted(place: Workplace) -> None:
    place.measure("plain")
    place.measure("w2")
    plain, provenance = read_table(place.path("plain"), TABLES["plain"])
    hashes = plain["logits_hash"].to_pylist()
    hashes[2] = b"x" * 16
    at = plain.schema.get_field_index("logits_hash")
    other = plain.set_column(at, plain.schema.field(at), pa.array(hashes, pa.binary(16)))
    write_table(place.path("plain"), TABLES["plain"], other, provenance)
    rows, provenance = place.measure("w2")
    assert provenance["n_adopted"] == 3
    assert rows["plain_repeat_equal"].to_pylist() == [True, False, *[True] * (N_ASKED - 2)]


def test_a_replay_without_its_plain_cell_is_refused(place: Workplace) -> None:
    with pytest.raises(RoutewiseError, match="needs its plain cell"):
        measure_cell(cell_of("w2"), place.inputs, place.path("w2"))
    with pytest.raises(RoutewiseError, match="no such file"):
        place.measure("w2")
    assert not place.path("w2").exists()


# --------------------------------------------------------------------------------- the store


@pytest.mark.parametrize("variant", ["plain", "w2", "rollback"])
def test_what_is_stored_is_adopted_and_the_engine_not_asked(place: Workplace, variant: str) -> None:
    place.measure("plain")
    rows, _ = place.measure(variant)
    place.path(variant).unlink() if variant != "plain" else None
    place.build = MadeBuild()
    again, provenance = place.measure(variant)
    assert (provenance["n_measured"], provenance["n_adopted"]) == (0, 3)
    assert (place.build.n_contexts, place.build.n_models) == (0, 0)
    assert again.equals(rows)


@pytest.mark.parametrize(
    "change",
    [
        {"code_digest": "other"},
        {"model_record": {"name": "small", "sha256": "n" * 64}},
        {"fingerprint": "other"},
    ],
)
def test_what_was_measured_otherwise_is_not_adopted(
    place: Workplace, change: dict[str, Any]
) -> None:
    place.measure("plain")
    place.fingerprint = change.pop("fingerprint", place.fingerprint)
    _, provenance = place.measure("plain", **change)
    assert (provenance["n_measured"], provenance["n_adopted"]) == (3, 0)


def test_a_prompt_more_is_the_one_that_is_measured(place: Workplace) -> None:
    place.write_prompts(["first", "third"])
    place.measure("plain")
    place.write_prompts(["second", "third", "first"])
    rows, provenance = place.measure("plain")
    assert (provenance["n_measured"], provenance["n_adopted"]) == (1, 2)
    seen = dict(zip(rows["prompt_id"].to_pylist(), rows["prompt_index"].to_pylist(), strict=True))
    assert seen == {"second": 0, "third": 1, "first": 2}


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_an_interrupted_cell_goes_on_where_it_was(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    place.build.fail_at = fail_at
    with pytest.raises(KeyboardInterrupt):
        place.measure("plain")
    assert not place.path("plain").exists()
    place.build = MadeBuild()
    rows, provenance = place.measure("plain")
    assert (provenance["n_adopted"], provenance["n_measured"]) == (fail_at - 1, 4 - fail_at)
    undisturbed = Workplace(tmp_path / "other", monkeypatch)
    assert rows.equals(undisturbed.measure("plain")[0])


def test_a_damaged_fragment_is_measured_again(place: Workplace) -> None:
    rows, _ = place.measure("plain")
    fragment = next(place.inputs.store.rglob("*.parquet"))
    fragment.write_bytes(fragment.read_bytes()[:100])
    again, provenance = place.measure("plain")
    assert (provenance["n_measured"], provenance["n_adopted"]) == (1, 2)
    assert again.equals(rows)


def test_a_full_disk_leaves_no_cell_and_what_was_measured(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cell_module, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        place.measure("plain")
    assert not place.path("plain").exists()
    monkeypatch.setattr(cell_module, "write_table", write_table)
    assert place.measure("plain")[1]["n_adopted"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"variant": "w3"},
        {"settings": dataclasses.replace(SETTINGS, threads=3)},
        {"settings": dataclasses.replace(SETTINGS, flash_attention=False)},
        {"env": {"GGML_X": "1"}},
        {"parameters": {"seed": 2}},
    ],
)
def test_all_that_defines_a_cell_is_in_its_fragments_keys(
    place: Workplace, change: dict[str, Any]
) -> None:
    def key(**changes: Any) -> str:
        bench = Bench(dataclasses.replace(cell_of("ragged"), **changes), place.inputs)
        return fragment_key(bench.key_inputs("replay", "digest"))

    assert key() == key()
    assert key(**change) != key()
    # names are no content
    assert key(route="other", model="other", prompts="other", digest="1" * 16) == key()


# ----------------------------------------------------------------------------------- read back


@pytest.mark.parametrize(
    "said",
    [
        {"micro_batch": 16},
        {"threads": 1},
        {"threads_batch": 4},
        {"flash_attention": "disabled"},
        {"flash_attention": None},
        {"kv_unified": "true"},
        {"kv_types": ["f16", "q8_0"]},
        {"context": CONTEXT - 1},
    ],
)
def test_an_engine_that_took_other_settings_makes_the_cell_invalid(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    place.measure("plain")
    monkeypatch.setattr(MadeContext, "said", said)
    [name] = said
    _, provenance = place.measure("w2")
    assert provenance["invalid_reasons"]
    for reason in provenance["invalid_reasons"]:
        assert f"asked for {name}" in reason
        assert str(said[name]) in reason
    # and adopted later, it is as invalid as it was
    monkeypatch.setattr(MadeContext, "said", {})
    _, again = place.measure("w2")
    assert again["n_adopted"] == 3
    assert again["invalid_reasons"] == provenance["invalid_reasons"]


def test_a_larger_context_than_asked_is_no_fault(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeContext, "said", {"context": CONTEXT + 256})
    assert place.measure("plain")[1]["invalid_reasons"] == []


# -------------------------------------------------------------------------------------- claims


ON_DEVICE = {"device": "hrx", "claim": ClaimSpec("hrx", units=2, unit_ids=("left", "right"))}


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch, place: Workplace) -> Callable[[], str | None]:
    """Have the variable of the device put back afterwards; return what reads it."""
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    place.inputs.build.mkdir()
    (place.inputs.build / "build.json").write_text(json.dumps({"fingerprint": "fingerprint"}))
    return lambda: os.environ.get("ROCR_VISIBLE_DEVICES")


def on_device(place: Workplace, **changes: Any) -> dict[str, Any]:
    """Measure the plain cell of a route on a device; return its provenance."""
    cell = dataclasses.replace(cell_of("plain"), **{**ON_DEVICE, **changes})
    measure_cell(cell, place.inputs, place.path("plain"))
    return read_table(place.path("plain"), TABLES["plain"])[1]


def test_a_device_is_held_before_its_engine_is_loaded(
    place: Workplace, visible: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str | None, list[str]]] = []

    def load(_: Path) -> MadeBuild:
        seen.append((visible(), [claim.label for claim in read_claims(claims_folder(), "hrx")]))
        return place.build

    monkeypatch.setattr(cell_module, "load_engine", load)
    [claim] = on_device(place)["claims"]
    assert (claim["device"], seen) == ("hrx", [("left", ["replay made small plain"])])
    assert read_claims(claims_folder(), "hrx") == []
    # all fragments are there now: nobody is asked
    provenance = on_device(place)
    assert (provenance["claims"], provenance["n_measured"]) == ([], 0)
    assert seen[1][1] == []
    # one that goes just then is not measured beside whoever holds the device
    shutil.rmtree(place.inputs.store)
    with monkeypatch.context() as patch:
        patch.setattr(cell_module, "_stored_for", lambda *_: {"device": "hrx"})
        with pytest.raises(RoutewiseError, match="is not held"):
            on_device(place)
    assert len(on_device(place)["claims"]) == 1
    # other libraries, other fragments
    place.fingerprint = "another"
    (place.inputs.build / "build.json").write_text(json.dumps({"fingerprint": "another"}))
    assert len(on_device(place)["claims"]) == 1


def test_a_replay_on_the_processor_or_without_a_claim_holds_nothing(
    place: Workplace, visible: Callable[[], str | None]
) -> None:
    for changes in ({"device": "cpu", "claim": None}, {"claim": None}):
        provenance = on_device(place, **changes)
        assert (provenance["claims"], visible()) == ([], None)
        assert provenance["n_measured"] > 0  # what one device answered is not another's


def test_a_host_without_the_device_measures_nothing(
    place: Workplace, visible: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTEWISE_DEVICES", "")
    monkeypatch.setattr(device_module, "_NODES", {"hrx": ("no-such-node",)})
    with pytest.raises(RoutewiseError, match="this host has no hrx device"):
        on_device(place)
    assert place.build.n_models == 0
    assert read_claims(claims_folder(), "hrx") == []


#: A box with two unlike cards, as the vendor's tool would tell: all of them, or those asked for.
TWO_CARDS = """
for last; do :; done
case "$*" in *index*) echo 0, GPU-aa; echo 1, GPU-bb; exit;; esac
case "$last" in
0) echo Old card, 550, GPU-aa;;
1) echo New card, 550, GPU-bb;;
*) echo Old card, 550, GPU-aa; echo New card, 550, GPU-bb;;
esac
"""


def test_a_cell_knows_the_unit_that_it_held_and_adopts_nothing_of_another_kind(
    place: Workplace,
    visible: Callable[[], str | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{TWO_CARDS}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ROUTEWISE_DEVICES", "cuda")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def on_card(**units: Any) -> dict[str, Any]:
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            os.environ.pop(name, None)
        return on_device(place, device="cuda", claim=ClaimSpec("cuda", **units))

    first = on_card(units=1, unit_ids=("1",))
    assert first["device"]["gpus"] == [["New card", "550", "GPU-bb"]]
    # all is stored of one of the kinds that could be held: nothing is held, and that kind is said
    either = on_card(units=2)
    assert (either["n_measured"], either["claims"]) == (0, [])
    assert either["device"] == first["device"]
    other = on_card(units=1, unit_ids=("0",))
    assert (other["n_adopted"], other["device"]["gpus"][0][0]) == (0, "Old card")
    assert not set(other["fragments"]) & set(first["fragments"])


def test_a_damaged_plain_cell_is_told_before_anything_is_measured(place: Workplace) -> None:
    place.measure("plain")
    content = place.path("plain").read_bytes()
    place.path("plain").write_bytes(content[: len(content) // 2])
    stored = sorted(place.inputs.store.rglob("*"))
    with pytest.raises(RoutewiseError, match=r"plain\.parquet"):
        place.measure("w2")
    assert sorted(place.inputs.store.rglob("*")) == stored
