"""A serving job against doubles: what is stored, what is asked again, and what ends it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from routewise import client
from routewise.block import Block
from routewise.client import is_fair_witness
from routewise.errors import RoutewiseError
from routewise.reply import Ask, Reply, Speech, parse_reply
from routewise.route import route_of
from routewise.schema.file import read_table, table_of, write_table
from routewise.schema.study import TABLES
from routewise.serve import ServingJob, measure_serving
from routewise.serve_cell import ServeCell, ServeInputs
from routewise.server import Server

DOUBLE = Path(__file__).parents[1] / "servers/llama_double.py"
SOLO = Block(0, "off", "copies", "together", 1, 1, 2)
WIDE = Block(0, "off", "copies", "together", 4, 4, 2)


class Desk:
    """A folder with a model, prompts and a store, and the cell that is measured there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model.gguf"
        self.model.write_bytes(b"as far as a double is concerned")
        columns: dict[str, list[Any]] = {
            "prompt_index": [0, 1],
            "prompt_id": ["a", "b"],
            "category": ["x", "x"],
            "token_ids": [[1, 2, 3], [4, 5, 6, 7]],
            "text": [None, None],
            "n_asked": [4, 4],
            "digest": ["0", "1"],
        }
        self.prompts = folder / "prompts.parquet"
        write_table(
            self.prompts,
            TABLES["prompts"],
            table_of(TABLES["prompts"], columns),
            {"prompt_set_digest": "d"},
        )
        self.flags: list[str] = []
        self.route: dict[str, Any] = {"claim": False, "stall_s": 20, "start_limit_s": 60}
        self.blocks: tuple[Block, ...] = (SOLO,)
        self.n_runs = 0

    def cell(self) -> ServeCell:
        command = [sys.executable, str(DOUBLE), "-m", "{model}", "--port", "{port}"]
        command += ["--host", "{host}", "-np", "{parallel}", *self.flags]
        route = route_of("double", {"command": command, **self.route}, None)
        return ServeCell(
            sweep="batched",
            route="double",
            model="small",
            variant="p4",
            prompts="few",
            digest="0" * 16,
            kind=route.kind,
            settings=route.settings,
            env=route.env,
            serving=route.serving,
            parallel=max(block.parallel for block in self.blocks),
            blocks=self.blocks,
            refused=(),
            n_probs=3,
            n_tokens=None,
            seed=1,
        )

    def inputs(self) -> ServeInputs:
        record = {"name": "small", "sha256": "m"}
        store, logs = self.folder / "store", self.folder / "logs"
        return ServeInputs(None, self.model, record, self.prompts, store, logs, "code")

    def measure(self) -> dict[str, Any]:
        """Measure the cell anew; return its provenance."""
        self.n_runs += 1
        output = self.folder / f"cell{self.n_runs}.parquet"
        measure_serving(self.cell(), self.inputs(), output)
        return read_table(output, TABLES["replies"])[1]

    def job(self) -> ServingJob:
        prompts = read_table(self.prompts, TABLES["prompts"])[0].to_pylist()
        return ServingJob(self.cell(), self.inputs(), prompts)

    @property
    def n_stored(self) -> int:
        return len(list((self.folder / "store").glob("*/*.parquet")))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_what_was_answered_is_not_asked_again(desk: Desk) -> None:
    first = desk.measure()
    assert (first["n_measured"], first["n_adopted"]) == (2, 0)
    assert first["serving"]["stops"][0]["port_free"]
    again = desk.measure()
    assert (again["n_measured"], again["n_adopted"]) == (0, 2)
    assert len(set(again["fragments"])) == 2
    assert again["fragments"] == first["fragments"]
    assert again["serving"]["stops"] == []


def test_a_prompt_that_stands_twice_keeps_both_names(desk: Desk) -> None:
    table = read_table(desk.prompts, TABLES["prompts"])[0].to_pydict()
    table["token_ids"] = [[1, 2, 3], [1, 2, 3]]
    write_table(
        desk.prompts,
        TABLES["prompts"],
        table_of(TABLES["prompts"], table),
        {"prompt_set_digest": "d"},
    )
    for _ in range(2):
        desk.measure()
        rows = read_table(desk.folder / f"cell{desk.n_runs}.parquet", TABLES["replies"])[
            0
        ].to_pylist()
        assert [row["prompt_id"] for row in rows] == ["a", "a", "b", "b"]
    assert desk.n_stored == 1


def test_a_block_more_is_the_one_that_is_asked(desk: Desk) -> None:
    desk.measure()
    desk.blocks = (SOLO, replace(SOLO, life=1))
    assert desk.measure()["n_adopted"] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"env": {"GGML_X": "1"}},
        {"logprob_list": 2},
        {"prompt_cache": "none", "slots": False},
    ],
)
def test_what_moves_an_answer_moves_its_key(desk: Desk, change: dict[str, Any]) -> None:
    before = {fragment.key for fragment in desk.job().fragments}
    desk.route |= change
    assert before.isdisjoint(fragment.key for fragment in desk.job().fragments)


@pytest.mark.parametrize(
    "change",
    [{"stall_s": 3}, {"start_limit_s": 3}, {"dispatch": "hrx"}, {"weights": "requantised"}],
)
def test_what_moves_no_answer_moves_no_key(desk: Desk, change: dict[str, Any]) -> None:
    before = {fragment.key for fragment in desk.job().fragments}
    desk.route |= change
    assert before == {fragment.key for fragment in desk.job().fragments}


def test_the_content_of_what_is_loaded_and_run_moves_the_key(desk: Desk) -> None:
    pack, library = desk.folder / "pack", desk.folder / "lib.so"
    for path in (pack, library):
        path.write_text("one")
    desk.route |= {"artefact": str(pack), "weights": "same", "identity_files": [str(library)]}
    keys = [frozenset(fragment.key for fragment in desk.job().fragments)]
    for path in (pack, library):
        path.write_text("two")
        keys.append(frozenset(fragment.key for fragment in desk.job().fragments))
    assert len(set(keys)) == 3


def test_replies_are_not_kept_where_another_may_have_given_them(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: Server) -> None:
        raise RoutewiseError("another process came to listen on the same port")

    monkeypatch.setattr(Server, "check_ours", lost)
    with pytest.raises(RoutewiseError, match="same port"):
        desk.measure()
    assert desk.n_stored == 0


def test_rounds_that_were_not_shared_are_asked_again(desk: Desk) -> None:
    desk.blocks = (WIDE,)
    desk.flags = ["--never-shared"]
    assert desk.measure()["n_asked_again"] == 2
    assert desk.n_stored == 0
    desk.flags = ["--window-ms", "300"]
    assert desk.measure()["n_asked_again"] == 0
    assert desk.n_stored == 2


def test_a_wedged_server_ends_the_job_and_keeps_what_was_answered(desk: Desk) -> None:
    desk.flags = ["--wedged", "3"]  # after a few completions, the readiness probe among them
    desk.route["stall_s"] = 4
    with pytest.raises(RoutewiseError, match="got no reply") as caught:
        desk.measure()
    assert "stall_s" in str(caught.value.hint)
    assert desk.n_stored == 1


def test_a_reply_that_breaks_off_ends_the_job(desk: Desk) -> None:
    desk.flags = ["--die-mid-reply", "4"]
    with pytest.raises(RoutewiseError):
        desk.measure()
    assert desk.n_stored == 1
    desk.flags = []
    assert desk.measure()["n_measured"] == 2  # other words, another server


def test_a_server_that_keeps_no_promise_of_its_route_is_refused_at_once(desk: Desk) -> None:
    desk.flags = ["--no-ids"]
    with pytest.raises(RoutewiseError, match="token ids") as caught:
        desk.measure()
    assert "token_ids" in str(caught.value.hint)
    assert desk.n_stored == 0


def test_a_bad_reply_is_kept_in_the_cell_and_not_in_the_store(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = parse_reply

    def contradict(body: Any, ask: Ask, speech: Speech) -> Reply:
        """Read a reply to prompt b as one to a longer prompt."""
        longer = ask if ask.prompt_ids != (4, 5, 6, 7) else replace(ask, prompt_ids=(4,) * 9)
        return read(body, longer, speech)

    monkeypatch.setattr(client, "parse_reply", contradict)
    desk.measure()
    rows = read_table(desk.folder / "cell1.parquet", TABLES["replies"])[0].to_pylist()
    bad = {row["prompt_id"] for row in rows if row["status"] != "ok"}
    assert bad == {"b"}
    assert desk.n_stored == 1


def test_a_command_s_settings_are_those_that_it_was_told(desk: Desk) -> None:
    settings = desk.measure()["settings"]
    assert settings["kv_type"] is None
    assert settings["context"] is None
    desk.flags = ["-c", "{context}"]
    assert desk.measure()["settings"]["context"] == 1024


@pytest.mark.parametrize(
    ("width", "n_decodes", "busy", "fair"),
    [
        (1, None, None, True),
        (4, None, None, True),
        (1, 4, 1.0, True),
        (1, 4, 1.5, False),
        (4, 4, 1.0, False),
        (4, 4, 3.9, True),
        (4, 4, 4.5, False),
        (4, 4, None, False),
    ],
)
def test_a_fair_witness(width: int, n_decodes: int | None, busy: float | None, fair: bool) -> None:
    assert is_fair_witness(width, n_decodes, busy) is fair
