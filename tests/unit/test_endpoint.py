"""``agree`` and ``batched`` on endpoints: each exit code, and nothing sent that must not be."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from routewise.__main__ import parse, run
from routewise.door import read_report
from routewise.endpoint import (
    Endpoint,
    asked_prompts,
    check_local,
    look_at,
    look_at_all,
    parse_route,
    parse_url,
    tokenize_for,
)
from routewise.errors import RoutewiseError
from routewise.prompt import ChatTemplate, Prompt
from routewise.reply import Speech
from routewise.study import check_study

pytestmark = pytest.mark.usefixtures("module_leaves_nothing")

SERVERS = Path(__file__).resolve().parent.parent / "servers"
START_LIMIT_S = 60.0
WAYS = {
    "llama": ["llama_double.py", "-np", "4"],
    "npu": ["npu_double.py", "forward-serve"],
}
#: A few tokens, so that a reply has no end of its own.
SHORT = ["--prompt", "Hello", "--prompt", "You", "--n-tokens", "6"]

Start = Callable[..., str]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, module_leaves_nothing: Path) -> Iterator[Start]:
    """Return a function that starts a protocol double once per command line: its address."""
    folder = tmp_path_factory.mktemp("doubles")
    model, kernels = folder / "model.bin", folder / "kernels"
    model.write_bytes(b"")
    kernels.mkdir()
    running: dict[tuple[str, ...], tuple[str, subprocess.Popen[bytes]]] = {}

    def started(*arguments: str, kind: str = "llama", ready: bool = True) -> str:
        key = (kind, *arguments)
        if key not in running:
            port = free_port()
            command = [sys.executable, "-I", "-S", str(SERVERS / WAYS[kind][0]), *WAYS[kind][1:]]
            if kind == "npu":
                command += ["-m", str(model), "--kernels", str(kernels), "-p", str(port)]
            else:
                command += ["--port", str(port)]
            log = folder / f"{port}.log"
            with log.open("wb") as stream:
                process = subprocess.Popen([*command, *arguments], stderr=stream)
            running[key] = (f"http://127.0.0.1:{port}", process)
            wait_for(running[key][0], process, log, ready=ready)
        return running[key][0]

    yield started
    for _, process in running.values():
        process.kill()
    for _, process in running.values():
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, *, ready: bool) -> None:
    """Wait until the double answers its health, with 200 where it is to be ready."""
    transport = httpx.HTTPTransport(retries=8)
    with httpx.Client(transport=transport, trust_env=False, timeout=START_LIMIT_S) as client:
        while process.poll() is None:
            try:
                status = client.get(f"{url}/health").status_code
            except httpx.ConnectError:
                continue
            if status == httpx.codes.OK or not ready:
                return
    raise AssertionError(log.read_text())


def asked(*words: str) -> int:
    return run(parse(list(words)))


def document_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = asked(*words, "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


# --------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://localhost:8080/", "http://localhost:8080"),
        ("http://localhost:8080/v1/", "http://localhost:8080"),
        ("https://[::1]:8080/v1", "https://[::1]:8080"),
        ("http://box", "http://box"),
    ],
)
def test_addresses_lose_their_end(text: str, url: str) -> None:
    assert parse_url(text) == url
    assert parse_route(f"a.b-1_x={text}") == ("a.b-1_x", url)


@pytest.mark.parametrize(
    "text",
    ["", "localhost:8080", "ftp://x", "http://", "http://:80", "http://x:99999", "file:///x"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(RoutewiseError, match="is no address of a server"):
        parse_url(text)


@pytest.mark.parametrize("text", ["http://127.0.0.1:1", "=http://x", "a b=http://x", "a"])
def test_what_is_no_route_is_refused(text: str) -> None:
    with pytest.raises(RoutewiseError, match="wanted NAME=URL"):
        parse_route(text)


@given(st.ip_addresses(v=4))
def test_only_addresses_of_this_machine_are_local(address: ipaddress.IPv4Address) -> None:
    url = f"http://{address}:8080"
    if address.is_loopback:
        check_local(url, allow_remote=False)
    else:
        with pytest.raises(RoutewiseError, match="nothing was sent"):
            check_local(url, allow_remote=False)
        check_local(url, allow_remote=True)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("[::1]", True),
        ("127.8.9.10", True),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org", False),
        ("user@127.0.0.1@example.org", False),
        ("[::2]", False),
        ("box", False),
    ],
)
def test_names_that_only_look_local_are_not(host: str, local: bool) -> None:
    url = f"http://{host}:8080"
    if local:
        check_local(url, allow_remote=False)
    else:
        with pytest.raises(RoutewiseError):
            check_local(url, allow_remote=False)


def test_nothing_is_sent_before_every_address_is_judged() -> None:
    """Also not to the first route, which is on this machine."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        listener.setblocking(False)
        routes = ("--route", f"a=http://127.0.0.1:{port}", "--route", f"b=http://0.0.0.0:{port}")
        assert asked("agree", *routes, *SHORT) == 2
        assert asked("batched", "--url", f"http://0.0.0.0:{port}", *SHORT) == 2
        with pytest.raises(BlockingIOError):
            listener.accept()
        # the listener would have been reached
        socket.create_connection(("0.0.0.0", port)).close()
        listener.setblocking(True)
        listener.accept()[0].close()


def test_a_remote_address_may_be_allowed(start: Start) -> None:
    url = start().replace("127.0.0.1", "0.0.0.0")
    with pytest.raises(RoutewiseError, match="allow-remote"):
        look_at_all([("a", url)], "auto", allow_remote=False)
    try:
        found = look_at_all([("a", url)], "auto", allow_remote=True)
    except RoutewiseError as error:  # pragma: no cover
        pytest.fail(str(error))
    assert found[0].speech == Speech()


# ------------------------------------------------------------------------------------- agree


def test_equal_routes_are_0_and_the_report_is_read_back(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    routes = ["--route", f"one={start()}", "--route", f"two={start('--alias', 'other')}"]
    code, document = document_of(capsys, "agree", *routes, *SHORT, "--report", str(report))
    assert (code, document["verdict"], document["exit_code"]) == (0, "exact", 0)
    assert [(pair["a"], pair["b"]) for pair in document["pairs"]] == [
        ("one", "one"),
        ("one", "two"),
        ("two", "two"),
    ]
    score = document["pairs"][1]["all_replies"]
    assert (score["n_positions"], score["n_common"], score["exact_share"]) == (12, 12, 1.0)
    assert (score["dlogp_max"], score["kl_max_nats"]) == (0.0, 0.0)
    assert [pair["weights"] for pair in document["pairs"]] == ["same", "not known", "same"]
    assert "weights not known" in document["notes"][-1]
    read = read_report(report)
    assert read.missing == []
    table = read.table("two")
    assert table.num_rows == 4  # two prompts, twice
    assert table["status"].to_pylist() == ["ok"] * 4
    assert table["state"].to_pylist() == read.table("one")["state"].to_pylist()
    assert [len(ids) for ids in table["token_ids"].to_pylist()] == [6] * 4


def test_another_model_is_1_with_its_first_divergence(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    routes = ["--route", f"a={start()}", "--route", f"b={start('--salt', 'X')}"]
    code, document = document_of(capsys, "agree", *routes, *SHORT)
    assert (code, document["verdict"]) == (1, "differs")
    pair = document["pairs"][1]
    assert pair["divergences"][0]["position"] == 0
    assert pair["divergences"][0]["margin_a"] > 0
    assert [one["verdict"] for one in document["pairs"]] == ["exact", "differs", "exact"]
    assert asked("agree", *routes, *SHORT) == 1
    shown = capsys.readouterr().out
    assert "a | b" in shown
    assert "2 of 2 replies choose another token; first given-1, position 0" in shown
    assert "note: weights not known" in shown


def test_one_moved_bit_is_1_with_equal_tokens(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    routes = ["--route", f"a={start()}", "--route", f"b={start('--move-bits', '1')}"]
    code, document = document_of(capsys, "agree", *routes, *SHORT)
    assert (code, document["verdict"]) == (1, "differs")
    score = document["pairs"][1]["all_replies"]
    assert score["match_share"] == 1.0
    assert score["exact_share"] < 1.0
    assert 0 < score["dlogp_max"] < 1e-5


def test_no_logprobs_are_1_though_the_tokens_are_equal(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    routes = ["--route", f"a={start()}", "--route", f"b={start('--no-logprobs')}"]
    code, document = document_of(capsys, "agree", *routes, *SHORT)
    assert (code, document["verdict"]) == (1, "unobservable")
    assert "no log-probabilities" in document["pairs"][1]["reasons"]
    assert document["pairs"][1]["all_replies"]["match_share"] == 1.0


def test_replies_that_cannot_be_used_are_2(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first tells the truth, the second's fourth reply and the probe's first are cut off."""
    routes = ["--route", f"a={start()}", "--route", f"b={start('--cut-reply', '3')}"]
    code, document = document_of(capsys, "agree", *routes, *SHORT)
    assert (code, document["verdict"]) == (2, "invalid")


def test_a_server_that_dies_in_the_middle_of_a_reply_is_2(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers the first look and one request, dies in the next, and is gone for the rest."""
    assert asked("batched", "--url", start("--die-mid-reply", "2"), *SHORT) == 2
    said = capsys.readouterr().err
    assert re.search(r"route server: the server is gone after \d+ requests: ", said)
    assert "went away mid-reply" in said
    routes = ["--route", f"a={start()}", "--route", f"b={start('--die-mid-reply', '3')}"]
    assert asked("agree", *routes, *SHORT) == 2


def test_a_slot_that_is_busy_with_others_is_waited_for_and_then_2(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who measures beside another's request measures both."""
    words = ["batched", "--url", start("--start-busy", "600"), *SHORT]
    assert asked(*words, "--limit-s", "0.2") == 2
    assert "slot 0 still busy" in capsys.readouterr().err
    url = start("--start-busy", "1", "--window-ms", "150")
    code, document = document_of(capsys, "batched", "--url", url, *SHORT)
    assert (code, document["verdict"]) == (0, "exact")


@pytest.mark.parametrize("fault", ["--never-ready", "--no-props"])
def test_a_server_that_loads_or_is_of_no_known_kind_is_2(
    start: Start, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if fault == "--no-props":
        assert look_at("x", start(fault), "auto").speech.api == "openai"
        return
    url = start(fault, ready=False)
    assert asked("agree", "--route", f"a={url}", "--route", f"b={url}", *SHORT) == 2
    assert "503" in capsys.readouterr().err


def test_unreachable_is_2(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert asked("agree", "--route", f"a={start()}", "--route", f"b={nowhere}", *SHORT) == 2
    assert "route b: " in capsys.readouterr().err
    assert asked("batched", "--url", nowhere, *SHORT) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_width_asks_for_copies_too_and_wants_a_witness(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies that never shared a pass do not compare two routes at that width."""
    shared, moved = start("--window-ms", "150"), start("--window-ms", "150", "--batch-states", "2")
    routes = ["--route", f"a={shared}", "--route", f"b={moved}"]
    code, document = document_of(
        capsys, "agree", *routes, "--prompt", "Hello", "--n-tokens", "4", "--width", "4"
    )
    assert code == 1
    verdicts = {(p["a"], p["b"], p["width"]): p["verdict"] for p in document["pairs"]}
    assert verdicts[("a", "b", 1)] == "exact"
    assert verdicts[("a", "b", 4)] == "differs"
    assert verdicts[("a", "a", 4)] == "exact"
    alone = start()
    routes = ["--route", f"a={shared}", "--route", f"b={alone}"]
    code, document = document_of(
        capsys, "agree", *routes, "--prompt", "Hello", "--n-tokens", "4", "--width", "4"
    )
    assert (code, document["verdict"]) == (2, "invalid")


class _BehindADoor(BaseHTTPRequestHandler):
    """A llama-server whose door lets /props through and OpenAI's completions, and no others."""

    def do_GET(self) -> None:
        props = {"default_generation_settings": {}, "total_slots": 2, "bos_token": "<s>"}
        self._answer(200, {**props, "chat_template": "x"} if self.path == "/props" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions" or not isinstance(body["prompt"], list):
            self._answer(404, {"error": {"message": "File Not Found"}})
            return
        entry = {"id": 5, "token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}
        choice = {"text": "a", "finish_reason": "length", "logprobs": {"content": [entry]}}
        self._answer(200, {"choices": [choice], "usage": {"completion_tokens": 1}})

    def _answer(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def test_the_first_way_that_is_answered_is_taken() -> None:
    """Ids go to OpenAI's completions where a llama-server's own are not there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _BehindADoor)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        found = look_at("door", url)
        assert (found.speech.api, found.speech.prompt_form) == ("openai", "ids")
        assert found.speech.token_ids
        assert found.n_slots == 2
        assert found.template is not None
        assert (found.template.source, found.template.bos_token) == ("x", "<s>")
        with pytest.raises(RoutewiseError, match=r"route door: .*404"):
            look_at("door", url, "llama")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ----------------------------------------------------------------------------------- batched


def test_equal_copies_that_shared_their_passes_are_0(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, report = start("--window-ms", "150"), tmp_path / "r.json"
    one = ["--prompt", "Hello", "--n-tokens", "6", "--report", str(report)]
    code, document = document_of(capsys, "batched", "--url", url, *one)
    assert (code, document["verdict"]) == (0, "exact")
    found = document["prompts"][0]
    assert found["witness"]["busy_per_decode_mean"] == 4.0
    assert found["pairs"] == {
        "all": 66,
        "all_equal": 66,
        "consecutive": 8,
        "consecutive_equal": 8,
    }
    assert (found["solo"]["identical"], found["solo"]["replies"]) == (12, 12)
    assert read_report(report).table("server").num_rows == 2 + 12
    assert asked("batched", "--url", url, *one[:4]) == 0
    assert "verdict: exact (exit code 0)" in capsys.readouterr().out


def test_copies_with_states_of_their_own_are_1(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start("--window-ms", "150", "--batch-states", "2")
    one = ["--prompt", "Hello", "--n-tokens", "6"]
    code, document = document_of(capsys, "batched", "--url", url, *one)
    assert (code, document["verdict"]) == (1, "differs")
    found = document["prompts"][0]
    assert found["alone"]["verdict"] == "exact"
    assert found["states"]["observed_max"] == 2
    assert found["solo"]["identical"] < found["solo"]["replies"]
    assert found["pairs"]["all_equal"] < found["pairs"]["all"]
    assert asked("batched", "--url", url, *one) == 1


def test_copies_that_never_shared_a_pass_are_2(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = document_of(capsys, "batched", "--url", start(), *SHORT)
    assert (code, document["verdict"]) == (2, "invalid")
    assert "never shared" in document["prompts"][0]["reasons"][0]


def test_equal_copies_without_a_witness_are_0_unless_one_is_needed(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start("--no-metrics")
    code, document = document_of(capsys, "batched", "--url", url, *SHORT)
    assert (code, document["verdict"]) == (0, "unobservable")
    assert "--metrics" in document["notes"][0]
    code, document = document_of(capsys, "batched", "--url", url, *SHORT, "--need-witness")
    assert (code, document["verdict"]) == (2, "unobservable")


def test_batched_without_logprobs_is_1(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url = start("--no-logprobs", "--window-ms", "150")
    code, document = document_of(capsys, "batched", "--url", url, *SHORT)
    assert code == 1
    assert document["prompts"][0]["reasons"][0] == "no log-probabilities"


def test_one_token_without_a_logprob_hides_no_other(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a reply with a character of several tokens."""
    hole = ("--logprob", "null", "--fault-at", "2", "--window-ms", "150")
    one = ["--prompt", "Hello", "--n-tokens", "12", "--rounds", "2"]
    code, document = document_of(capsys, "batched", "--url", start(*hole), *one)
    assert (code, document["verdict"]) == (0, "exact")
    assert document["prompts"][0]["observable"] == "chosen logprob"
    url = start(*hole, "--batch-states", "2")
    code, document = document_of(capsys, "batched", "--url", url, *one, "--width", "2")
    assert (code, document["verdict"]) == (1, "differs")


def test_more_at_once_than_slots_is_2(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("batched", "--url", start(), "--width", "5", *SHORT) == 2
    assert "the server has 4 slots" in capsys.readouterr().err
    assert asked("batched", "--url", start(), "--width", "1", *SHORT) == 2
    assert "wanted 2 or more" in capsys.readouterr().err


# ---------------------------------------------------------------------- prompts and tokenizers


class _Tokenizing(Endpoint):
    """A server whose tokenizer is a letter a token, from another place on."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return [ord(letter) + (self.n_slots or 0) for letter in text]


def test_tokenizers_that_disagree_are_named_and_the_first_ones_ids_sent() -> None:
    first = _Tokenizing("first", "http://localhost", Speech(), 0)
    other = _Tokenizing("other", "http://localhost", Speech(), 7)
    prompts = [
        Prompt("p", "c", 4, text="ab"),
        Prompt("q", "c", 4, token_ids=(1, 2)),
    ]
    rows, notes = tokenize_for([first, other], prompts)
    assert [row["token_ids"] for row in rows] == [[97, 98], [1, 2]]
    assert len(notes) == 1
    assert "other would tokenize 1 of 2 prompts otherwise than first (p: 2 ids" in notes[0]
    assert "the ids of first were sent to all" in notes[0]
    assert tokenize_for([first, first], prompts)[1] == []


def test_a_route_that_takes_text_is_given_text_and_compared_by_bytes(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    npu = start(kind="npu")
    routes = ["--route", f"cpu={start()}", "--route", f"npu={npu}"]
    code, document = document_of(capsys, "agree", *routes, *SHORT)
    assert (code, document["verdict"]) == (0, "exact")
    assert {pair["match"] for pair in document["pairs"]} == {"ids", "text"}
    assert asked("agree", *routes, "--prompt-ids", "72,101") == 2
    assert "has token ids only, and route npu takes text" in capsys.readouterr().err
    routes = ["--route", f"a={npu}", "--route", f"b={start('--no-logprobs', kind='npu')}"]
    code, document = document_of(capsys, "agree", *routes, *SHORT)
    assert (code, document["verdict"]) == (1, "unobservable")


def test_messages_need_a_route_with_a_template() -> None:
    text = Endpoint("t", "http://localhost", Speech(api="openai", prompt_form="text"), None)
    prompt = Prompt("p", "c", 4, messages=({"role": "user", "content": "x"},))
    with pytest.raises(RoutewiseError, match="no route shows its chat template"):
        tokenize_for([text], [prompt])
    rows, notes = tokenize_for([text], [Prompt("p", "c", 4, text="x")])
    assert (rows[0]["text"], rows[0]["token_ids"], notes) == ("x", [], [])


def test_thinking_is_off_in_the_prompt_that_all_routes_get() -> None:
    """The template is applied here, once: a server's own switch would change nothing any more."""
    switch = (
        "{{ messages[0].content }}>"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    )
    messages = ({"role": "user", "content": "x"},)
    prompt = Prompt("p", "c", 4, messages=messages)
    for source, wanted in (
        (switch, "x><think></think>"),
        ("{{ messages[0].content }}>", "x>"),
        ("{% if enable_thinking %}on{% else %}off{% endif %}", "off"),
    ):
        ids = _Tokenizing("ids", "http://localhost", Speech(), 0, ChatTemplate(source))
        text = Endpoint("text", "http://localhost", Speech(api="openai", prompt_form="text"), None)
        (row,), _ = tokenize_for([ids, text], [prompt])
        assert row["text"] == wanted
        assert row["token_ids"] == [ord(letter) for letter in wanted]


def test_prompts_of_file_text_and_ids_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "category": "c", "n_tokens": 9, "text": "x"}\n')
    words = ["--url", "http://localhost:1", "--prompts", str(path), "--prompt", "y"]
    arguments = parse(["batched", *words, "--prompt-ids", "5,6"])
    prompts = asked_prompts(arguments)
    assert [(one.id, one.n_tokens) for one in prompts] == [
        ("a", 9),
        ("given-2", 64),
        ("given-3", 64),
    ]
    assert prompts[2].token_ids == (5, 6)
    arguments = parse(["batched", *words, "--n-tokens", "3"])
    assert [one.n_tokens for one in asked_prompts(arguments)] == [3, 3]


# ------------------------------------------------------------------------------------ the page


def test_the_routes_and_commands_of_the_page_are_valid(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    page = (repository / "docs/servers.md").read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)
    routes: dict[str, Any] = {}
    for language, text in blocks:
        if language == "yaml":
            routes |= yaml.safe_load(text)["routes"]
    assert {"hrx", "hrx-nosplit", "npu", "box"} <= set(routes)
    (tmp_path / "p.jsonl").write_text("")
    (tmp_path / routes["npu"]["artefact"]).write_text("")
    common = {"models": ["m"], "prompts": "p"}
    study = check_study(
        {
            "schema_version": 1,
            "study": "page",
            "models": {"m": {"kind": "path", "path": "m.gguf"}},
            "prompts": {"p": {"file": "p.jsonl"}},
            "sources": {"own": {"kind": "path", "path": "llama.cpp"}},
            "builds": {"cpu": {"source": "own", "backend": "cpu"}},
            "routes": routes,
            "sweeps": {
                "repeat": {**common, "routes": list(routes)},
                "dispatch": {**common, "routes": ["hrx", "hrx-nosplit"]},
            },
        },
        "docs/servers.md",
        tmp_path,
    )
    assert set(study.routes) == set(routes)
    typed = " ".join(text for language, text in blocks if not language).replace("\\\n", " ")
    commands = [line for line in typed.splitlines() if "-m routewise" in line]
    assert len(commands) == 3
    for line in commands:
        arguments = parse(shlex.split(line.split("-m routewise", 1)[1]))
        assert asked_prompts(arguments)


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    "words",
    [
        ["agree"],
        ["agree", "--route", "a=http://127.0.0.1:1", "--width", "0"],
        ["batched"],
        ["batched", "--url", "http://127.0.0.1:1", "--n-tokens", "-3"],
        ["batched", "--url", "http://127.0.0.1:1", "--prompt-ids", "1,x"],
        ["batched", "--url", "http://127.0.0.1:1", "--prompt-ids", "-1"],
        ["batched", "--url", "http://127.0.0.1:1", "--limit-s", "nan"],
        ["batched", "--url", "http://127.0.0.1:1", "--api", "grpc"],
        ["nonsense"],
    ],
)
def test_arguments_that_cannot_be_read_end_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(words)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["agree", "--route", "a=http://127.0.0.1:1", *SHORT], "wanted two or more"),
        (["agree", *["--route", "a=http://127.0.0.1:1"] * 2, *SHORT], "stands twice"),
        (["agree", *["--route", "a"] * 2, *SHORT], "wanted NAME=URL"),
        (["batched", "--url", "http://127.0.0.1:1"], "no prompt"),
        (["batched", "--url", "http://127.0.0.1:1", "--prompt", ""], "empty"),
        (["batched", "--url", "http://127.0.0.1:1", "--prompts", "none.jsonl"], "no such file"),
        (["batched", "--url", "nowhere", *SHORT], "is no address"),
    ],
)
def test_bad_arguments_are_2_with_words(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(*words) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "Traceback" not in said


def test_the_command_itself_exits_with_the_code(start: Start, repository: Path) -> None:
    """Once as a person types it; the rest is asked in this process."""
    command = [sys.executable, "-m", "routewise", "batched", "--url", start(), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=repository)
    assert done.returncode == 2, done.stderr
    assert "verdict: invalid (exit code 2)" in done.stdout


def test_claims_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("claims", "--folder", str(tmp_path)) == 0
    assert "Nothing is held" in capsys.readouterr().out
    assert isinstance(parse(["claims"]), argparse.Namespace)
