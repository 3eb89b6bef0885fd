"""The doubles themselves: the same reply every time, and each fault as it is described."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.identity import Identity
from routewise.server import Launch, Server, serve
from servers.double import N_VOCAB, candidates, float32, piece, speak
from servers.llama_double import make_parser

SERVERS = Path(__file__).resolve().parent.parent / "servers"
LIMIT_S = 60.0
PROMPTS = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=12)
STEADY = make_parser().parse_args([])

Serve = Callable[..., Any]


def asked(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args(flags)


@given(prompt=PROMPTS, short=st.integers(1, 6), long=st.integers(6, 16))
def test_a_longer_reply_begins_with_the_shorter(prompt: list[int], short: int, long: int) -> None:
    first, second = speak(STEADY, prompt, short, 2), speak(STEADY, prompt, long, 2)
    assert second.tokens[:short] == first.tokens
    assert second.entries[:short] == first.entries
    assert b"".join(map(piece, second.tokens)) == second.text


@given(prompt=PROMPTS, state=st.integers(0, 9))
def test_every_logprob_is_a_float32_below_zero(prompt: list[int], state: int) -> None:
    found = candidates("", prompt, 4, state)
    values = [candidate.logprob for candidate in found]
    assert values == sorted(values, reverse=True)
    assert all(value == float32(value) < 0 for value in values)
    if state:
        assert all(
            a.logprob != b.logprob for a, b in zip(found, candidates("", prompt, 4), strict=True)
        )


def test_every_token_has_bytes_of_its_own() -> None:
    assert len({piece(token) for token in range(N_VOCAB)}) == N_VOCAB


def test_another_state_moves_bits_first_and_tokens_later() -> None:
    solo, other = speak(STEADY, [1, 2], 16, 1), speak(STEADY, [1, 2], 16, 1, state=1)
    assert solo.tokens[:5] == other.tokens[:5]
    assert solo.tokens != other.tokens
    assert solo.entries[0]["logprob"] != other.entries[0]["logprob"]


@pytest.mark.parametrize(
    ("flags", "shows"),
    [
        (["--logprob", "null"], lambda s: s.entries[3]["logprob"] is None),
        (["--logprob", "missing"], lambda s: "logprob" not in s.entries[3]),
        (["--logprob", "nan"], lambda s: s.entries[3]["logprob"] != s.entries[3]["logprob"]),
        (["--logprob", "sentinel"], lambda s: s.entries[3]["logprob"] == -3.4028234663852886e38),
        (
            ["--logprob", "not-float32", "--fault-at", "1"],
            lambda s: s.entries[1]["logprob"] != float32(s.entries[1]["logprob"]),
        ),
        (["--no-ids"], lambda s: all("id" not in entry for entry in s.entries)),
        (["--drop-entries", "2"], lambda s: len(s.entries) == 6 and len(s.tokens) == 8),
        (["--list-first", "2"], lambda s: len(s.entries) == 2 and len(s.tokens) == 8),
        (["--eos-after", "3"], lambda s: s.finish == "eos" and len(s.tokens) == 3),
        (
            ["--speculative"],
            lambda s: (
                s.entries[0]["top_logprobs"]
                and all(e["logprob"] == 0.0 and not e["top_logprobs"] for e in s.entries[1:])
            ),
        ),
        (["--split-utf8", "7"], lambda s: s.text.endswith(b"\xc3") and len(s.entries) == 7),
        (
            ["--split-utf8", "2"],
            lambda s: len(s.entries) == 7 and s.entries[2]["bytes"] == list("é".encode()),
        ),
        (["--salt", "x"], lambda s: s.tokens != speak(STEADY, [1, 2], 8, 2).tokens),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fault_of_a_reply(flags: list[str], shows: Callable[[Any], bool]) -> None:
    assert not shows(speak(STEADY, [1, 2], 8, 2))
    assert shows(speak(asked(*flags), [1, 2], 8, 2))


# --------------------------------------------------------------------------------- nothing left


def leave_process(_: Path) -> None:
    """Leave one in a session of its own, whose parent is gone."""
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def leave_folder(_: Path) -> None:
    tempfile.mkdtemp()


def leave_nothing(_: Path) -> None:
    subprocess.run(["sleep", "0"], check=True)
    with socket.create_server(("127.0.0.1", 0)), tempfile.TemporaryDirectory():
        pass


@pytest.mark.parametrize("leave", [leave_process, leave_folder, leave_nothing])
def test_what_a_test_leaves_fails_it(
    leave: Callable[[Path], None], leftovers: Callable[[Path], Any], tmp_path: Path
) -> None:
    def run() -> None:
        with leftovers(tmp_path):
            leave(tmp_path)

    if leave is leave_nothing:
        run()
        return
    with pytest.raises(AssertionError):
        run()
    (tmp_path / "temporary").rename(tmp_path / "seen")
    with leftovers(tmp_path):  # what was left is ended
        pass


def test_a_port_that_a_test_leaves_fails_it(
    leftovers: Callable[[Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError), leftovers(tmp_path):
        left = socket.create_server(("127.0.0.1", 0))
    left.close()


# ------------------------------------------------------------------------------------ as servers


@pytest.fixture
def double(tmp_path: Path, nothing_is_left: Path) -> Serve:
    """Return a context manager that serves llama_double with the flags given."""

    @contextmanager
    def run(*flags: str) -> Iterator[Server]:
        python = (sys.executable, "-I", "-S")  # sooner there
        argv = (*python, str(SERVERS / "llama_double.py"), "--port", "{port}", *flags)
        launch = Launch(
            argv=argv,
            log=tmp_path / "server.log",
            probe=lambda url: None,
            identity=Identity(props=False),
            start_limit_s=LIMIT_S,
        )
        with serve(launch) as server:
            yield server

    return run


BODY = {"prompt": [5, 6, 7], "n_predict": 8, "n_probs": 2, "return_tokens": True}


def complete(server: Server, **changes: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/completion", json={**BODY, **changes}, timeout=LIMIT_S)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def together(server: Server, count: int) -> list[dict[str, Any]]:
    """Send the same request ``count`` times at once."""

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as web:
            answers = await asyncio.gather(
                *(web.post("/completion", json=BODY) for _ in range(count))
            )
            return [answer.json() for answer in answers]

    return asyncio.run(run())


def metrics(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    words = [line.split() for line in lines if not line.startswith("#")]
    return {name.removeprefix("llamacpp:"): float(value) for name, value in words}


def logprobs(reply: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in reply["completion_probabilities"]]


def test_copies_that_share_their_decodes_have_states(double: Serve) -> None:
    with double("--parallel", "4", "--window-ms", "400", "--batch-states", "2") as server:
        solo = logprobs(complete(server))
        assert metrics(server)["n_busy_slots_per_decode"] == 1
        copies = together(server, 4)
        assert len({tuple(logprobs(copy)) for copy in copies}) == 2
        assert solo not in [logprobs(copy) for copy in copies]
        assert metrics(server)["n_decode_total"] == 16  # 8 alone, 8 for all four
        assert metrics(server)["n_busy_slots_per_decode"] == 2.5
        assert logprobs(complete(server)) == solo  # width 1 in the same server


def test_a_witness_that_saw_no_sharing(double: Serve) -> None:
    with double("--parallel", "2", "--window-ms", "400", "--never-shared") as server:
        together(server, 2)
        assert metrics(server)["n_decode_total"] == 16
        assert metrics(server)["n_busy_slots_per_decode"] == 1


def test_the_prompt_cache_is_counted_as_asked(double: Serve) -> None:
    with double("--parallel", "1") as server:
        assert complete(server)["timings"]["cache_n"] == 0
        assert complete(server)["timings"]["cache_n"] == 2
        assert complete(server, cache_prompt=False)["timings"]["cache_n"] == 0
        assert complete(server, prompt=[5, 9])["timings"] | {"cache_n": 1} == (
            complete(server, prompt=[5, 9])["timings"] | {"prompt_n": 1}
        )


def test_a_slot_stays_busy_after_its_client_hung_up(double: Serve) -> None:
    with double("--busy-after-disconnect", "600", "--token-ms", "50") as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/completion", json=BODY, timeout=0.2)
        assert metrics(server)["requests_processing"] == 1
        assert httpx.get(f"{server.url}/slots").json()[0]["is_processing"]


def test_a_slot_is_busy_from_the_start(double: Serve) -> None:
    with double("--start-busy", "600") as server:
        assert [slot["is_processing"] for slot in httpx.get(f"{server.url}/slots").json()] == [
            *(True, False, False, False)
        ]
        assert complete(server)["id_slot"] == 1


def test_a_reply_that_breaks_off(double: Serve) -> None:
    with double("--cut-reply", "1") as server:
        whole = complete(server)
        with pytest.raises(httpx.RemoteProtocolError):
            complete(server)
        assert len(whole["tokens"]) == 8
        server.check()  # the server itself lives


def test_openai_completions_say_the_same(double: Serve) -> None:
    with double() as server:
        native = complete(server)
        body = {"prompt": BODY["prompt"], "max_tokens": 8, "logprobs": 2}
        choice = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == native["content"]
        assert choice["logprobs"]["content"] == native["completion_probabilities"]
        assert httpx.post(f"{server.url}/completion", json={"prompt": None}).status_code == 400
        assert httpx.get(f"{server.url}/nowhere").status_code == 404


def test_answers_from_memory_are_the_same(double: Serve) -> None:
    with double("--at-once") as server:
        first = complete(server)
        assert complete(server) == first
        assert json.dumps(complete(server, n_predict=3)) != json.dumps(first)
