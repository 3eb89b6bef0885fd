"""Requests and what is read out of replies: settings, numbers, alignment, faults."""

from __future__ import annotations

import json
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.errors import RoutewiseError
from routewise.reply import (
    Ask,
    Reply,
    Speech,
    align_ids,
    align_text,
    invalid_reply,
    parse_reply,
    read_float32,
    request_of,
)
from routewise.schema.replies import REPLIES
from routewise.state import state_of, tokens_hash_of

REPLIES_FOLDER = Path(__file__).parent / "replies"
LLAMA = Speech()
OPENAI = Speech(api="openai", token_ids=False)
ENTRIES = "completion_probabilities"
LOGPROB = -1.5676718950271606  # a float32, widened
LOWEST = -3.4028234663852886e38
EMOJI_PROMPT = (
    (15017, 649, 33777, 42, 40303)
    + (218, 10813, 232, 227, 10813, 244, 218, 10813, 242) * 2
    + (218, 10813, 242, 218)
)


def recorded(name: str) -> dict[str, Any]:
    """Return a reply of the real llama-server, as it came (its prompt and paths left out)."""
    document: dict[str, Any] = json.loads((REPLIES_FOLDER / f"{name}.json").read_text())
    return document


def made(
    tokens: list[int],
    /,
    *,
    logprobs: list[Any] | None = None,
    entries: list[int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return a reply of ``tokens``, each with a piece of its own; ``entries`` are the listed."""
    listed = list(range(len(tokens))) if entries is None else entries
    values = [LOGPROB] * len(listed) if logprobs is None else logprobs
    body: dict[str, Any] = {
        "content": "".join(f"<{t}>" for t in tokens),
        "tokens": tokens,
        "id_slot": 1,
        "tokens_predicted": len(tokens),
        "tokens_evaluated": 3,
        "truncated": False,
        "stop_type": "limit",
        "timings": {"cache_n": 0, "prompt_n": 3},
        "completion_probabilities": [
            entry_of(tokens[index], value) for index, value in zip(listed, values, strict=True)
        ],
    }
    return body | changes


def entry_of(token: int, logprob: Any) -> dict[str, Any]:
    piece = f"<{token}>"
    top = [{"id": token, "token": piece, "bytes": list(piece.encode()), "logprob": logprob}]
    entry = {"id": token, "token": piece, "bytes": list(piece.encode()), "top_logprobs": top}
    return entry if logprob == "absent" else entry | {"logprob": logprob}


def ask_for(n_tokens: int, **changes: Any) -> Ask:
    ask = Ask((1, 2, 3), "one two three", n_tokens, n_probs=1, cache_prompt=False)
    return replace(ask, **changes)


def read(tokens: list[int], /, **changes: Any) -> Reply:
    return parse_reply(made(tokens, **changes), ask_for(len(tokens)), LLAMA)


# --- asking -----------------------------------------------------------------------------------


def test_every_setting_is_sent_and_known_to_the_recorded_server() -> None:
    path, body = request_of(ask_for(4, slot=2, seed=7), LLAMA)
    assert path == "/completion"
    assert body["prompt"] == [1, 2, 3]
    assert (body["n_predict"], body["n_probs"], body["seed"], body["id_slot"]) == (4, 1, 7, 2)
    assert body["cache_prompt"] is False
    assert body["stream"] is False
    assert body["ignore_eos"] is False
    json.dumps(body, allow_nan=False)
    # What the server repeats of its settings, and this request leaves to it, cannot move a greedy
    # choice: a parameter of a sampler that is off, a format, or the route's own.
    said = set(recorded("llama_plain")["generation_settings"])
    left = said - set(body)
    assert left == {
        "adaptive_decay",
        "chat_format",
        "dry_allowed_length",
        "dry_base",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "generation_prompt",
        "grammar_triggers",
        "lora",
        "max_tokens",
        "mirostat_eta",
        "mirostat_tau",
        "preserved_tokens",
        "reasoning_in_content",
        "speculative.types",
        "xtc_threshold",
    }


def test_a_request_follows_the_speech() -> None:
    speech = Speech(
        api="openai", prompt_form="text", logprobs=False, thinking="switchable", model_name="m"
    )
    path, body = request_of(ask_for(4, cache_prompt=True), speech)
    assert path == "/v1/completions"
    assert body["prompt"] == "one two three"
    assert (body["max_tokens"], body["temperature"], body["model"]) == (4, 0.0, "m")
    assert body["cache_prompt"] is True
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"logprobs", "id_slot", "n_predict"} & set(body)
    assert request_of(ask_for(4), OPENAI)[1]["logprobs"] == 1
    assert "chat_template_kwargs" not in request_of(ask_for(4), LLAMA)[1]
    with pytest.raises(RoutewiseError, match="takes its prompts as text"):
        request_of(ask_for(4, prompt_text=None), speech)


# --- real replies -----------------------------------------------------------------------------


def test_a_real_reply_is_whole() -> None:
    ask = Ask((504, 1216, 282, 260), None, 6, 2, cache_prompt=False)
    body = recorded("llama_plain")
    reply = parse_reply(body, ask, LLAMA)
    assert (reply.status, reply.reason, reply.observable) == ("ok", None, "chosen-logprob")
    assert reply.logprob_status == ["ok"] * 6
    assert (reply.n_asked, reply.n_received, reply.finish) == (6, 6, "limit")
    assert reply.token_ids == body["tokens"]
    assert reply.token_bytes is not None
    assert b"".join(reply.token_bytes) == reply.text == body["content"].encode()
    assert (reply.cache_n, reply.prompt_n, reply.draft_n) == (0, 4, None)
    for entry, value, bits in zip(
        body["completion_probabilities"], reply.logprobs, reply.logprob_bits, strict=True
    ):
        assert value == entry["logprob"]
        assert struct.pack("<I", bits) == struct.pack("<f", value)
    assert reply.top_ids is not None
    assert [top[0] for top in reply.top_ids] == reply.token_ids
    assert {len(top) for top in reply.top_ids} == {2}
    assert reply.state == state_of(reply.token_ids, reply.logprob_bits, reply.logprob_status)
    assert reply.tokens_hash == tokens_hash_of(reply.token_ids)


def test_a_real_reply_of_the_other_interface_is_the_same_answer() -> None:
    ask = Ask((504, 1216, 282, 260), None, 6, 2, cache_prompt=False)
    ours = parse_reply(recorded("llama_plain"), ask, LLAMA)
    other = parse_reply(recorded("openai_plain"), ask, OPENAI)
    assert (other.status, other.reason, other.observable) == ("ok", None, "chosen-logprob")
    assert other.token_ids is None
    assert other.token_bytes == ours.token_bytes
    assert other.logprob_bits == ours.logprob_bits
    assert other.state == state_of(
        other.token_bytes or [], other.logprob_bits, other.logprob_status
    )


def test_a_real_emoji_has_one_entry_for_three_tokens() -> None:
    ask = Ask(EMOJI_PROMPT, None, 7, 1, cache_prompt=False, slot=1)
    reply = parse_reply(recorded("llama_emoji"), ask, LLAMA)
    assert (reply.status, reply.reason) == ("ok", None)
    assert reply.token_ids == [10813, 242, 218, 10813, 242, 218, 10813]
    smile = "😀".encode()
    assert reply.token_bytes == [b"", b"", smile, b"", b"", smile, b""]
    missing, ok = "missing", "ok"
    assert reply.logprob_status == [missing, missing, ok, missing, missing, ok, missing]
    assert reply.observable == "chosen-logprob"
    assert reply.text.startswith(smile * 2)


def test_a_reply_has_the_columns_of_its_table() -> None:
    names = {field.name for field in fields(Reply)}
    assert names <= set(REPLIES.arrow.names)


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, "null"),
        (LOWEST, "sentinel"),
        (-3.4028e38, "sentinel"),
        (float("-inf"), "sentinel"),
        (float("nan"), "nan"),
        ("nan", "nan"),
        ("NaN", "nan"),
        (-1.5676718950271607 + 1e-12, "not_float32"),
        (-1e-320, "not_float32"),
        (1e300, "not_float32"),
        (float("inf"), "not_float32"),
        (True, "not_float32"),
        ("-1.5", "not_float32"),
        ([], "not_float32"),
        (10**400, "not_float32"),
        (-1, "ok"),
        (0, "ok"),
        (-0.0, "ok"),
        (-1.5676719, "ok"),  # the shortest decimals of the same float32
        (LOGPROB, "ok"),
    ],
)
def test_what_a_number_is(value: Any, status: str) -> None:
    found, narrow, bits = read_float32(value)
    assert found == status
    assert (narrow is None) == (bits is None) == (status != "ok")


@given(st.floats(width=32, max_value=0.0, min_value=-(2.0**100)))
def test_a_float32_is_read_in_both_spellings(value: float) -> None:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    for spelled in (json.dumps(value), str(np.float32(value))):
        assert read_float32(json.loads(spelled)) == ("ok", value, bits)


@given(st.floats(min_value=-1e30, max_value=-1e-30))
def test_a_float64_is_refused_unless_it_is_a_float32(value: float) -> None:
    narrow = float(np.float32(value))
    expected = value in (narrow, float(str(np.float32(value))))
    assert (read_float32(value)[0] == "ok") == expected


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, "null"),
        ("absent", "missing"),
        (LOWEST, "sentinel"),
        (float("nan"), "nan"),
        (-0.1234567890123456, "not_float32"),
    ],
)
def test_one_bad_logprob_is_told_from_a_good_one_and_hides_no_other(
    value: Any, status: str
) -> None:
    reply = read([5, 6, 7], logprobs=[LOGPROB, value, LOGPROB])
    assert (reply.status, reply.reason) == ("ok", None)
    assert reply.logprob_status == ["ok", status, "ok"]
    assert reply.logprobs[1] is None
    assert reply.logprob_bits[1] is None
    assert reply.observable == "chosen-logprob"
    good = read([5, 6, 7])
    assert good.observable == "chosen-logprob"
    assert good.state != reply.state
    assert good.tokens_hash == reply.tokens_hash


def test_the_bad_numbers_are_different_states() -> None:
    values: list[Any] = [None, "absent", LOWEST, float("nan"), -0.1234567890123456, 0.0]
    states = {read([5, 6], logprobs=[LOGPROB, value]).state for value in values}
    assert len(states) == len(values)


def test_the_declared_list_says_which_of_equal_tokens_an_entry_is_of() -> None:
    body = made([5, 5, 5, 5], entries=[0, 1])
    ask = ask_for(4)
    without = parse_reply(body, ask, LLAMA)
    assert (without.observable, without.logprob_status) == ("token-ids", ["missing"] * 4)
    reply = parse_reply(body, ask, Speech(logprob_list=2))
    assert reply.logprob_status == ["ok", "ok", "missing", "missing"]
    assert reply.observable == "chosen-logprob"


@pytest.mark.parametrize("value", [None, "absent", LOWEST, float("nan"), -0.1234567890123456])
def test_without_one_good_logprob_the_tokens_are_what_is_seen(value: Any) -> None:
    reply = read([5, 6, 7], logprobs=[value] * 3)
    assert (reply.status, reply.observable) == ("ok", "token-ids")


def test_saturated_positions_are_counted() -> None:
    reply = read([5, 6, 7], logprobs=[0.0, LOGPROB, -0.0])
    assert reply.n_saturated == 2
    assert reply.observable == "chosen-logprob"


# --- speculation ------------------------------------------------------------------------------


def speculative(drafted: bool) -> dict[str, Any]:
    body = made([5, 6, 7], logprobs=[LOGPROB, 0.0, 0.0])
    for entry in body["completion_probabilities"][1:]:
        entry["top_logprobs"] = []
    if drafted:
        body["timings"] |= {"draft_n": 2, "draft_n_accepted": 2}
    return body


@pytest.mark.parametrize("drafted", [True, False])
def test_a_speculative_reply_is_no_evidence_of_logprobs(drafted: bool) -> None:
    reply = parse_reply(speculative(drafted), ask_for(3), LLAMA)
    assert (reply.status, reply.observable) == ("ok", "token-ids")
    assert reply.logprob_status == ["missing"] * 3  # the first one, too: nobody says which is true
    assert reply.logprobs == reply.logprob_bits == [None] * 3
    assert reply.top_logprobs is None
    assert reply.n_saturated == 0
    assert reply.draft_n == (2 if drafted else None)


def test_a_real_speculative_reply_is_recognised() -> None:
    body = recorded("llama_speculative")
    sent = {(entry["logprob"], len(entry["top_logprobs"])) for entry in body[ENTRIES]}
    assert (0.0, 0) in sent  # what this server says of a token that was drafted
    ask = Ask((), None, 24, 1, cache_prompt=False)
    reply = parse_reply(body, ask, LLAMA)
    assert (reply.status, reply.reason, reply.observable) == ("ok", None, "token-ids")
    assert reply.draft_n == 13
    del body["timings"]["draft_n"]  # a server that does not count what it drafts
    without = parse_reply(body, ask, LLAMA)
    assert without.observable == "token-ids"
    assert without.state == reply.state
    for entry in body[ENTRIES]:  # and the inverse: without the signs it would be believed
        entry["top_logprobs"] = [{"id": 5, "token": "a", "logprob": entry["logprob"]}]
    assert parse_reply(body, ask, LLAMA).observable == "chosen-logprob"


def test_draft_tokens_alone_are_enough() -> None:
    reply = read([5, 6], timings={"cache_n": 0, "draft_n": 3})
    assert reply.observable == "token-ids"
    assert read([5, 6], timings={"cache_n": 0, "draft_n": 0}).observable == "chosen-logprob"


# --- alignment --------------------------------------------------------------------------------


def test_entries_are_given_by_id_and_never_by_index() -> None:
    reply = read([5, 6, 7, 8], entries=[1, 3], logprobs=[-1.0, -2.0])
    assert reply.logprobs == [None, -1.0, None, -2.0]
    assert reply.logprob_status == ["missing", "ok", "missing", "ok"]
    assert reply.observable == "chosen-logprob"


def test_an_entry_that_fits_two_tokens_is_given_to_none() -> None:
    reply = read([5, 5, 7], entries=[0, 2], logprobs=[-1.0, -2.0])
    assert reply.logprobs == [None, None, -2.0]


def test_entries_of_other_tokens_make_the_reply_invalid() -> None:
    body = made([5, 6])
    body["completion_probabilities"][0]["id"] = 9
    reply = parse_reply(body, ask_for(2), LLAMA)
    assert reply.status == "invalid"
    assert reply.reason is not None
    assert "do not follow" in reply.reason
    body = made([5, 6])
    body["completion_probabilities"] *= 2
    assert parse_reply(body, ask_for(2), LLAMA).status == "invalid"


tokens_and_kept = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=0, max_size=12)


@given(tokens_and_kept)
def test_an_alignment_is_never_wrong(pairs: list[tuple[int, bool]]) -> None:
    tokens = [token for token, _ in pairs]
    places = [place for place, (_, kept) in enumerate(pairs) if kept]
    found = align_ids(tokens, [tokens[place] for place in places])
    assert found is not None
    assert len(found) == len(tokens)
    for place, index in enumerate(found):
        assert index is None or places[index] == place
    if len(places) == len(tokens) or len(set(tokens)) == len(tokens):
        assert [place for place, index in enumerate(found) if index is not None] == places


@given(tokens_and_kept)
def test_a_text_is_cut_where_its_pieces_are(pairs: list[tuple[int, bool]]) -> None:
    words = [bytes([97 + token]) for token, _ in pairs]
    pieces = [word for word, (_, kept) in zip(words, pairs, strict=True) if kept]
    cut = align_text(b"".join(words), pieces)
    assert cut is not None
    assert b"".join(data for data, _ in cut) == b"".join(words)
    start = 0
    starts = []
    for word, (_, kept) in zip(words, pairs, strict=True):
        if kept:
            starts.append(start)
        start += len(word)
    cursor = 0
    for data, index in cut:
        assert index is None or starts[index] == cursor
        cursor += len(data)


def test_what_does_not_fit_is_not_aligned() -> None:
    assert align_ids([1, 2], [2, 1]) is None
    assert align_ids([1], [1, 1]) is None
    assert align_text(b"ab", [b"b", b"a"]) is None


# --- without ids, without text ----------------------------------------------------------------


def openai_reply(pieces: list[str], text: str, **changes: Any) -> dict[str, Any]:
    content = [{"token": p, "logprob": LOGPROB, "top_logprobs": []} for p in pieces]
    choice = {"text": text, "finish_reason": "length", "logprobs": {"content": content}}
    usage = {"prompt_tokens": 3, "completion_tokens": len(pieces)}
    return {"choices": [choice | changes], "usage": usage}


def test_without_ids_a_gap_in_the_entries_is_found_by_the_text() -> None:
    body = openai_reply(["one", " three"], "one two three")
    body["usage"]["completion_tokens"] = 3
    reply = parse_reply(body, ask_for(3), OPENAI)
    assert (reply.status, reply.token_ids) == ("ok", None)
    assert reply.token_bytes == [b"one", b" two", b" three"]
    assert reply.logprob_status == ["ok", "missing", "ok"]
    assert reply.observable == "chosen-logprob"
    other = parse_reply(openai_reply(["one", " three"], "one 222 three"), ask_for(3), OPENAI)
    assert reply.state != other.state  # the gap's own bytes count too


def test_without_ids_entries_that_do_not_spell_the_text_are_refused() -> None:
    reply = parse_reply(openai_reply(["one", " four"], "one two"), ask_for(2), OPENAI)
    assert reply.status == "invalid"
    assert reply.reason is not None
    assert "do not make up the reply's text" in reply.reason


def test_bytes_that_the_text_had_to_replace_are_read_from_the_entries() -> None:
    body = openai_reply(["x", "y"], "one\ufffd")
    for entry, data in zip(logprobs_of(body), (b"one", b"\xf0\x9f"), strict=True):
        entry["bytes"] = list(data)
    reply = parse_reply(body, ask_for(2), OPENAI)
    assert (reply.status, reply.text) == ("ok", b"one\xf0\x9f")
    assert reply.observable == "chosen-logprob"
    logprobs_of(body)[0]["bytes"] = list(b"two")
    assert parse_reply(body, ask_for(2), OPENAI).status == "invalid"


def logprobs_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = body["choices"][0]["logprobs"]["content"]
    return content


def test_the_older_form_of_logprobs_is_read() -> None:
    older = {
        "tokens": ["one", "bytes:\\xf0\\x9f"],
        "token_logprobs": [LOGPROB, None],
        "top_logprobs": [{"one": LOGPROB, "two": -2.0}, None],
    }
    reply = parse_reply(openai_reply(["x", "y"], "", logprobs=older), ask_for(2), OPENAI)
    assert reply.status == "ok"
    assert reply.token_bytes == [b"one", b"\xf0\x9f"]
    assert reply.text == b"one\xf0\x9f"
    assert reply.logprob_status == ["ok", "null"]
    assert reply.top_bytes == [[b"one", b"two"], []]
    assert reply.top_ids is None


def test_empty_content_is_read_from_the_entries() -> None:
    ids_absent = made([5, 6], content="", tokens=[])
    for entry in ids_absent["completion_probabilities"]:
        del entry["id"]
    reply = parse_reply(ids_absent, ask_for(2), Speech(token_ids=False))
    assert (reply.status, reply.text) == ("ok", b"<5><6>")
    assert reply.observable == "chosen-logprob"
    assert (reply.n_received, reply.token_ids) == (2, None)
    # a route that promises ids is not what it says
    reply = parse_reply(ids_absent, ask_for(2), LLAMA)
    assert reply.status == "invalid"
    assert reply.reason is not None
    assert "token ids" in reply.reason
    # where the entries have all the ids, they are there
    reply = read([5, 6], content="", tokens=[])
    assert (reply.status, reply.token_ids, reply.text) == ("ok", [5, 6], b"<5><6>")


def test_a_route_of_text_alone() -> None:
    body = {"content": "one two", "tokens_predicted": 2, "tokens_evaluated": 3}
    reply = parse_reply(body, ask_for(2), Speech(token_ids=False, logprobs=False))
    assert (reply.status, reply.observable, reply.n_received) == ("ok", "text", 2)
    assert (reply.token_ids, reply.token_bytes, reply.logprobs) == (None, None, [])
    assert reply.finish is None


def test_bytes_that_are_no_utf8_are_kept() -> None:
    raw = b'{"content": "ab\xf0\x9f", "tokens_evaluated": 3, "tokens_predicted": 2}'
    body = json.loads(raw.decode("utf-8", "surrogateescape"))
    speech = Speech(token_ids=False, logprobs=False)
    assert parse_reply(body, ask_for(2), speech).text == b"ab\xf0\x9f"
    half = parse_reply({"content": "\ud83d", "tokens_predicted": 2}, ask_for(2), speech)
    assert half.text == b"\xed\xa0\xbd"


# --- what the server says that it used --------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("temperature", 0.8),
        ("top_k", 40),
        ("samplers", ["top_k", "temperature"]),
        ("n_probs", 2),
        ("seed", 4294967295),
        ("ignore_eos", True),
        ("logit_bias", [{"token": 2, "bias": -1.0}]),
        ("grammar", 'root ::= "a"'),
        ("stop", ["\n"]),
        ("n_predict", 64),
        ("repeat_penalty", 1.100000023841858),
        ("post_sampling_probs", True),
    ],
)
def test_another_setting_makes_the_reply_invalid(key: str, said: Any) -> None:
    ask = Ask((504, 1216, 282, 260), None, 6, 2, cache_prompt=False)
    if key == "n_probs":
        ask = replace(ask, n_probs=3)
    body = recorded("llama_plain")
    body["generation_settings"][key] = said
    reply = parse_reply(body, ask, LLAMA)
    assert reply.status == "invalid"
    assert reply.reason is not None
    assert reply.reason.startswith(f"{key}: asked ")
    assert str(said) in reply.reason
    assert reply.n_received == 6  # what came is still there to look at


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_evaluated": 2}, "prompt: asked 3 tokens, the server evaluated 2"),
        ({"timings": {"cache_n": 2}}, "cache_prompt: asked False, the server took 2"),
        ({"truncated": True}, "truncated"),
        ({"tokens_predicted": 3}, "the server counted 3, the reply has 2"),
        ({"tokens": [5, -1]}, "token ids: -1 is none"),
        ({"tokens": [5, 2**31]}, "token ids"),
        ({"tokens": [5, "6"]}, "token ids"),
        ({"tokens": 5}, "another shape"),
        ({"timings": 3, "content": 3}, "another shape"),
        ({"completion_probabilities": [3, 4]}, "another shape"),
        ({"completion_probabilities": [{"id": 5, "bytes": [300]}]}, "another shape"),
        ({"completion_probabilities": [{"id": 5, "bytes": 2**60}]}, "is no list"),
        ({"error": {"code": 500, "message": "out of memory"}}, "out of memory"),
        ({"error": "gone"}, "gone"),
    ],
)
def test_a_reply_that_contradicts_itself_is_invalid(changes: dict[str, Any], words: str) -> None:
    reply = read([5, 6], **changes)
    assert reply.status == "invalid"
    assert reply.reason is not None
    assert words in reply.reason


@pytest.mark.parametrize("body", [None, [], "text", 3, {}])
def test_no_reply_at_all_is_invalid(body: Any) -> None:
    for speech in (LLAMA, OPENAI):
        reply = parse_reply(body, ask_for(2), speech)
        assert reply.status == "invalid"
        assert reply.reason


def test_another_slot_is_refused() -> None:
    assert parse_reply(made([5]), ask_for(1, slot=1), LLAMA).status == "ok"
    reply = parse_reply(made([5]), ask_for(1, slot=0), LLAMA)
    assert reply.reason == "id_slot: asked 0, the server used 1"


def test_a_short_reply_is_whole_only_at_the_end_of_the_text() -> None:
    ask = ask_for(4)
    short = parse_reply(made([5, 6], stop_type="eos"), ask, LLAMA)
    assert (short.status, short.finish, short.n_received, short.n_asked) == ("ok", "eos", 2, 4)
    cut = parse_reply(made([5, 6], stop_type="limit"), ask, LLAMA)
    assert cut.status == "invalid"
    assert cut.reason == "n_predict: asked 4 tokens, the server stopped at a limit of 2"
    long = parse_reply(made([5, 6, 7, 8, 9]), ask, LLAMA)
    assert long.reason == "n_predict: asked 4 tokens, the reply has 5"


def test_an_end_of_text_without_an_entry_takes_nothing_away() -> None:
    body = openai_reply(["one", " two"], "one two", finish_reason="stop")
    body["usage"]["completion_tokens"] = 3
    reply = parse_reply(body, ask_for(8), OPENAI)
    assert (reply.status, reply.finish) == ("ok", "eos")
    assert reply.observable == "chosen-logprob"
    body["usage"]["completion_tokens"] = 4  # one more than the end-of-text token
    assert parse_reply(body, ask_for(8), OPENAI).observable == "chosen-logprob"


def test_a_count_that_lies_costs_nothing() -> None:
    body = openai_reply(["one"], "one")
    body["usage"]["completion_tokens"] = 2**31 - 1
    reply = parse_reply(body, ask_for(2), OPENAI)
    assert (reply.status, len(reply.logprobs)) == ("invalid", 2)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
KEYS = [*sorted(made([5])), "choices", "usage", "logprobs", "generation_settings", "error"]
ENTRY_KEYS = sorted(entry_of(5, 0.0))


@given(st.dictionaries(st.sampled_from(KEYS), anything), st.booleans())
def test_no_reply_raises(changes: dict[str, Any], by_openai: bool) -> None:
    body = made([5, 6]) | changes
    reply = parse_reply(body, ask_for(2), OPENAI if by_openai else LLAMA)
    assert reply.status in ("ok", "invalid")
    assert (reply.reason is None) == (reply.status == "ok")
    assert len(reply.logprobs) == len(reply.logprob_bits) == len(reply.logprob_status)


@given(st.lists(st.dictionaries(st.sampled_from(ENTRY_KEYS), anything), max_size=3))
def test_no_entry_raises(entries: list[dict[str, Any]]) -> None:
    for speech in (LLAMA, Speech(token_ids=False)):
        reply = parse_reply(made([5, 6], completion_probabilities=entries), ask_for(2), speech)
        assert reply.status in ("ok", "invalid")


def test_an_invalid_reply_says_why() -> None:
    reply = invalid_reply(ask_for(3), "nobody there")
    assert (reply.status, reply.reason, reply.n_asked) == ("invalid", "nobody there", 3)
    assert (len(reply.state), len(reply.tokens_hash)) == (16, 16)
