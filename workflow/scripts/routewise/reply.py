"""Requests to a server, and what is read out of its replies.

A request carries the same token ids that the replay uses, and every setting that moves a number,
whatever the server's own default. A reply is read back against it: what the server says that it
used, how many tokens of prompt it saw, how many tokens it sent. A reply that contradicts its
request, or itself, is *invalid* with the reason; a reply that is merely poorer than hoped keeps
its status and falls to a weaker *observable*:

``chosen-logprob``
    positions that the route's logprob list covers have a float32 logprob. Not always all of them:
    llama-server sends no entry for a token that ends inside of a character. Each position has its
    own status, which is compared as its bits are, and those without a logprob are counted.
``token-ids``
    the ids are all there, and no logprob is.
``text``
    neither; the text alone.

Nothing here talks to anybody: a dictionary in, a dataclass out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from routewise.errors import RoutewiseError
from routewise.state import state_of, tokens_hash_of

#: The float32 that stands for p = 0 is -3.4028235e38, however many digits a server prints of it.
SENTINEL_MAX = -3.4e38
_INT32_MAX = 2**31 - 1
_SHOWN_CHARS = 200  # of a server's own words within a reason
_ABSENT = object()

#: Every setting of llama-server that can move a token or a logprob, at the value that leaves the
#: model's own choice alone. Sent in full, because a route's command line, its build or its model
#: file may have changed any default; what the reply repeats of it is compared with this.
NEUTRAL_SETTINGS: dict[str, Any] = {
    # Temperature 0 keeps the highest logit, of equal ones that of the lowest id, as the replay
    # does; top-k after it leaves one candidate, so that no random number can matter.
    "samplers": ["temperature", "top_k"],
    "temperature": 0.0,
    "dynatemp_range": 0.0,
    "top_k": 1,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_n_sigma": -1.0,
    "typical_p": 1.0,
    "xtc_probability": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
    "repeat_last_n": 0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_penalty_last_n": 0,
    "logit_bias": [],
    # The replay decodes through the end-of-text token, a server stops there. ``ignore_eos`` would
    # not make them alike: it bans that token from being chosen, so that the answer takes another
    # path from there on. Without it the reply is a prefix of the replay's stream, and shorter.
    "ignore_eos": False,
    "grammar": "",
    "grammar_lazy": False,
    "stop": [],
    "n_keep": 0,
    "n_discard": 0,
    "n_indent": 0,
    "t_max_predict_ms": -1,
    "min_keep": 0,
    "n_cmpl": 1,
    "n_cache_reuse": 0,  # reuse shifts keys that were made at another position
    "backend_sampling": False,
    # of the model's row, before any sampler: after them the chosen token has p = 1
    "post_sampling_probs": False,
    "return_tokens": True,
    "stream": False,
    "timings_per_token": False,
    "reasoning_format": "none",
    "reasoning_budget_tokens": -1,
}
# Not sent: ``lora`` (an empty list would switch off adapters that belong to the route), and
# speculation (this server ignores per-request settings of it: it is read back, see _drafted).

#: The same in the words of the OpenAI-like interface. The last ones are not of that interface, but
#: kept by most servers that speak it and passed over by the others.
OPENAI_SETTINGS: dict[str, Any] = {
    "n": 1,
    "echo": False,
    "stream": False,
    "temperature": 0.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "top_k": 1,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
}


@dataclass(frozen=True)
class Speech:
    """How a route is spoken to, and what its replies hold.

    ``token_ids`` False: replies are matched by the bytes of their tokens. ``logprob_list``: how
    many tokens a reply's logprob list covers, None for all. ``thinking``: none | switchable |
    fixed; a switchable one is switched off.
    """

    api: Literal["llama", "openai"] = "llama"
    prompt_form: Literal["ids", "text"] = "ids"
    token_ids: bool = True
    logprobs: bool = True
    logprob_list: int | None = None
    thinking: Literal["none", "switchable", "fixed"] = "none"
    model_name: str | None = None


@dataclass(frozen=True)
class Ask:
    """One request: ``n_tokens`` after the prompt, greedily, with the ``n_probs`` most likely each.

    ``slot`` None leaves the choice to the server. ``prompt_text`` is needed only by routes that
    take no ids; without ``prompt_ids`` the length of the prompt is not checked.
    """

    prompt_ids: tuple[int, ...]
    prompt_text: str | None
    n_tokens: int
    n_probs: int
    cache_prompt: bool
    slot: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """One reply; the names are the columns of ``schema.replies.REPLIES``, where they are explained.

    The lists have one entry a token. ``logprobs`` and ``logprob_bits`` are None where the status
    is not ok, and so are entries of ``top_logprobs`` that are no float32. The tokens' bytes make
    up the text, except that a token that ends inside of a character has none and the token that
    completes it has them all.
    """

    status: str
    reason: str | None
    observable: str
    n_asked: int
    n_received: int
    finish: str | None
    text: bytes
    token_ids: list[int] | None
    token_bytes: list[bytes] | None
    logprobs: list[float | None]
    logprob_bits: list[int | None]
    logprob_status: list[str]
    top_ids: list[list[int]] | None
    top_bytes: list[list[bytes]] | None
    top_logprobs: list[list[float | None]] | None
    n_saturated: int
    state: bytes
    tokens_hash: bytes
    slot: int | None
    cache_n: int | None
    prompt_n: int | None
    draft_n: int | None


# --- asking -----------------------------------------------------------------------------------


def request_of(ask: Ask, speech: Speech) -> tuple[str, dict[str, Any]]:
    """Return the path and the JSON body of a request.

    Raises RoutewiseError where the route takes its prompts as text and the prompt has none.
    """
    prompt: list[int] | str = list(ask.prompt_ids)
    if speech.prompt_form == "text":
        if ask.prompt_text is None:
            raise RoutewiseError(
                "the route takes its prompts as text, and this prompt has token ids only",
                "give the prompt messages or a text, or set the route's prompt_form to ids",
            )
        prompt = ask.prompt_text
    path = "/completion" if speech.api == "llama" else "/v1/completions"
    return path, {"prompt": prompt, **settings_of(ask, speech)}


def settings_of(ask: Ask, speech: Speech) -> dict[str, Any]:
    """Return everything that a request says, but for its prompt."""
    n_probs = ask.n_probs if speech.logprobs else 0
    settings: dict[str, Any] = {"seed": ask.seed, "cache_prompt": ask.cache_prompt}
    if speech.api == "llama":
        settings |= NEUTRAL_SETTINGS
        settings |= {"n_predict": ask.n_tokens, "n_probs": n_probs}
    else:
        settings |= OPENAI_SETTINGS
        settings["max_tokens"] = ask.n_tokens
        if n_probs > 0:
            settings["logprobs"] = n_probs
    if speech.model_name is not None:
        settings["model"] = speech.model_name
    if ask.slot is not None:
        settings["id_slot"] = ask.slot
    if speech.thinking == "switchable":
        settings["chat_template_kwargs"] = {"enable_thinking": False}
    return settings


# --- reading ----------------------------------------------------------------------------------


class _Refused(Exception):
    """The reply cannot be read any further; the message is the reason."""


@dataclass
class _Entry:
    """One entry of a logprob list, as it came."""

    id: int | None
    data: bytes
    logprob: Any
    top: list[_Entry] | None


@dataclass
class _Wire:
    """What a reply says, in the words of no server."""

    text: bytes
    token_ids: list[int] | None
    entries: list[_Entry]
    finish: str | None
    n_said: int | None  # tokens decoded
    n_prompt: int | None
    cache_n: int | None
    prompt_n: int | None
    draft_n: int | None
    slot: int | None
    truncated: bool
    settings: Mapping[str, Any]  # what the server says that it used


@dataclass
class _Positions:
    """The tokens of a reply, each with the entry that belongs to it, if one does."""

    token_ids: list[int] | None
    token_bytes: list[bytes] | None
    entries: list[_Entry | None] = field(default_factory=list)


def parse_reply(body: Mapping[str, Any], ask: Ask, speech: Speech) -> Reply:
    """Read a reply's JSON document. Never raises on a bad one: it is invalid, with the reason.

    Bytes of the text that are no UTF-8 are expected as surrogate escapes (PEP 383), which
    ``json.loads(raw.decode("utf-8", "surrogateescape"))`` gives.
    """
    try:
        return _read(body, ask, speech)
    except _Refused as refused:
        return invalid_reply(ask, str(refused))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return invalid_reply(ask, f"the reply has another shape than promised: {error!r}")


def invalid_reply(ask: Ask, reason: str) -> Reply:
    """Return the reply that stands for one that never came, or that cannot be read."""
    return Reply(
        status="invalid",
        reason=reason,
        observable="text",
        n_asked=ask.n_tokens,
        n_received=0,
        finish=None,
        text=b"",
        token_ids=None,
        token_bytes=None,
        logprobs=[],
        logprob_bits=[],
        logprob_status=[],
        top_ids=None,
        top_bytes=None,
        top_logprobs=None,
        n_saturated=0,
        state=state_of([], [], []),
        tokens_hash=tokens_hash_of([]),
        slot=None,
        cache_n=None,
        prompt_n=None,
        draft_n=None,
    )


def read_float32(value: Any) -> tuple[str, float | None, int | None]:
    """Return (status, value, uint32 bits) of a JSON number that should be a float32.

    ok: a float32 written as the double it widens to, or in its own shortest decimals. Else the
    status says what it is: null, sentinel (p = 0, also minus infinity), nan, or not_float32 for a
    number of more precision than a float32 has and for what is no number; then without a value.
    """
    if value is None:
        return "null", None, None
    if isinstance(value, str) and value.strip().lower() in ("nan", "-nan"):
        return "nan", None, None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "not_float32", None, None
    if value != value:
        return "nan", None, None
    if value <= SENTINEL_MAX:
        return "sentinel", None, None
    try:
        packed = struct.pack("<f", value)
    except (OverflowError, struct.error):
        return "not_float32", None, None
    (narrow,) = struct.unpack("<f", packed)
    if narrow != value and float(str(np.float32(narrow))) != value:
        return "not_float32", None, None
    if narrow == float("inf"):
        return "not_float32", None, None
    return "ok", narrow, int.from_bytes(packed, "little")


def align_ids(tokens: Sequence[int], entries: Sequence[int]) -> list[int | None] | None:
    """Return for each token the index of its entry, None where it has none or nobody can tell.

    ``entries`` are ids in the order of ``tokens``, of which some may have been left out. An entry
    is given to a token only where every way to lay the entries onto the tokens does so: then the
    leftmost and the rightmost way agree. None where ``entries`` is no subsequence of ``tokens``.
    """
    if len(entries) > len(tokens):
        return None
    leftmost = _embed(tokens, entries)
    rightmost = _embed(tokens[::-1], entries[::-1])
    if leftmost is None or rightmost is None:
        return None
    places = [len(tokens) - 1 - place for place in rightmost[::-1]]
    found: list[int | None] = [None] * len(tokens)
    for index, (left, right) in enumerate(zip(leftmost, places, strict=True)):
        if left == right:
            found[left] = index
    return found


def align_text(text: bytes, pieces: Sequence[bytes]) -> list[tuple[bytes, int | None]] | None:
    """Cut ``text`` into the ``pieces`` that it is made of and the gaps between them.

    Returns (bytes, index of the piece) in the order of the text; a gap, or a piece that could
    stand elsewhere too, has the index None. None where the pieces do not make up the text in this
    order.
    """
    leftmost = _find_pieces(text, pieces)
    if leftmost is None:
        return None
    if sum(map(len, pieces)) == len(text):
        return [(piece, index) for index, piece in enumerate(pieces)]
    reverse = _find_pieces(text[::-1], [piece[::-1] for piece in pieces[::-1]])
    if reverse is None:
        return None
    rightmost = [
        len(text) - start - len(piece) for start, piece in zip(reverse[::-1], pieces, strict=True)
    ]
    found: list[tuple[bytes, int | None]] = []
    cursor = 0
    for index, (piece, left, right) in enumerate(zip(pieces, leftmost, rightmost, strict=True)):
        if left > cursor:
            found.append((text[cursor:left], None))
        found.append((piece, index if left == right else None))
        cursor = left + len(piece)
    if cursor < len(text):
        found.append((text[cursor:], None))
    return found


def _read(body: Mapping[str, Any], ask: Ask, speech: Speech) -> Reply:
    if not isinstance(body, Mapping):
        raise _Refused(f"the reply is no JSON object but {_shown(body)}")
    if body.get("error"):
        error = body["error"]
        words = error.get("message", error) if isinstance(error, Mapping) else error
        raise _Refused(f"the server answers with an error: {_shown(words)}")
    wire = _read_llama(body) if speech.api == "llama" else _read_openai(body)
    complaints = _complaints(wire, ask, speech)
    # A token that was drafted and accepted has no row of its own on this server: it sends 0.0 and
    # an empty list. Which tokens of a speculative reply have a true one is not said, so none count.
    refused = _drafted(wire, ask)
    positions = _positions(wire, ask, speech, complaints)
    n = len(positions.entries)
    statuses: list[str] = []
    values: list[float | None] = []
    bits: list[int | None] = []
    for entry in positions.entries:
        known = entry is not None and entry.logprob is not _ABSENT and not refused
        status, value, pattern = (
            read_float32(entry.logprob) if known and entry else ("missing", None, None)
        )
        statuses.append(status)
        values.append(value)
        bits.append(pattern)

    covered = n if speech.logprob_list is None else min(n, speech.logprob_list)
    shown = any(status == "ok" for status in statuses[:covered])
    if shown and speech.logprobs and ask.n_probs > 0:
        observable = "chosen-logprob"
    else:
        observable = "token-ids" if positions.token_ids is not None else "text"
    text = wire.text
    tokens: Sequence[int] | Sequence[bytes] = (
        positions.token_ids if positions.token_ids is not None else positions.token_bytes or [text]
    )
    if observable == "text":  # its tokens are a guess, or nothing
        state, tokens_hash = state_of([text], [], []), tokens_hash_of([text])
    else:
        state, tokens_hash = state_of(tokens, bits, statuses), tokens_hash_of(tokens)
    tops = _tops(positions.entries, refused)
    n_received = n or wire.n_said or 0
    _check_length(complaints, wire, ask, n_received)
    reply = Reply(
        status="ok",
        reason=None,
        observable=observable,
        n_asked=ask.n_tokens,
        n_received=n_received,
        finish=wire.finish,
        text=text,
        token_ids=positions.token_ids,
        token_bytes=positions.token_bytes,
        logprobs=values,
        logprob_bits=bits,
        logprob_status=statuses,
        top_ids=tops[0],
        top_bytes=tops[1],
        top_logprobs=tops[2],
        n_saturated=sum(value == 0.0 for value in values),
        state=state,
        tokens_hash=tokens_hash,
        slot=wire.slot,
        cache_n=wire.cache_n,
        prompt_n=wire.prompt_n,
        draft_n=wire.draft_n,
    )
    if complaints:  # what came is kept: it is what a person wants to look at
        return replace(reply, status="invalid", reason="; ".join(complaints))
    return reply


def _read_llama(body: Mapping[str, Any]) -> _Wire:
    timings = _mapping(body.get("timings"))
    tokens = body.get("tokens")
    entries = body.get("completion_probabilities")
    if entries is None:
        entries = _mapping(body.get("logprobs")).get("content")
    finish = body.get("stop_type")
    if finish is None:  # older servers have one flag for each
        finish = next((w for w in ("eos", "word", "limit") if body.get(f"stopped_{w}")), None)
    return _Wire(
        text=_bytes_of(body.get("content") or ""),
        token_ids=[_token_id(token) for token in tokens] if tokens else None,
        entries=[_entry(entry) for entry in entries or []],
        finish=finish if finish in ("eos", "word", "limit") else None,
        n_said=_count(body.get("tokens_predicted")),
        n_prompt=_count(body.get("tokens_evaluated")),
        cache_n=_count(timings.get("cache_n")),
        prompt_n=_count(timings.get("prompt_n")),
        draft_n=_count(timings.get("draft_n")),
        slot=_count(body.get("id_slot")),
        truncated=bool(body.get("truncated", False)),
        settings=_mapping(body.get("generation_settings")),
    )


def _read_openai(body: Mapping[str, Any]) -> _Wire:
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        n = len(choices) if isinstance(choices, list) else "no"
        raise _Refused(f"asked for one choice, the reply has {n}")
    (choice,) = choices
    text = choice.get("text")
    if text is None:
        text = _mapping(choice.get("message")).get("content")
    logprobs = _mapping(choice.get("logprobs"))
    entries = logprobs.get("content")
    if entries is None and logprobs.get("tokens") is not None:
        entries = _older_entries(logprobs)
    usage = _mapping(body.get("usage"))
    timings = _mapping(body.get("timings"))
    cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
    return _Wire(
        text=_bytes_of(text or ""),
        token_ids=None,
        entries=[_entry(entry) for entry in entries or []],
        finish={"stop": "eos", "length": "limit"}.get(choice.get("finish_reason") or ""),
        n_said=_count(usage.get("completion_tokens")),
        n_prompt=_count(usage.get("prompt_tokens")),
        cache_n=_count(timings.get("cache_n", cached)),
        prompt_n=_count(timings.get("prompt_n")),
        draft_n=_count(timings.get("draft_n")),
        slot=_count(body.get("id_slot")),
        truncated=False,
        settings=_mapping(body.get("generation_settings")),
    )


def _older_entries(logprobs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn the older form (one list of tokens, one of logprobs, one of dictionaries) into entries.

    A list of logprobs that is too short gives entries without one.
    """
    tokens = logprobs["tokens"]
    values = logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs")
    entries: list[dict[str, Any]] = []
    for index, token in enumerate(tokens):
        entry: dict[str, Any] = {"token": token}
        if index < len(values):
            entry["logprob"] = values[index]
        if isinstance(tops, list) and index < len(tops) and tops[index] is not None:
            entry["top_logprobs"] = [
                {"token": other, "logprob": value} for other, value in tops[index].items()
            ]
        entries.append(entry)
    return entries


def _entry(entry: Mapping[str, Any], *, inner: bool = False) -> _Entry:
    data = entry.get("bytes")
    if data is not None and not isinstance(data, list):  # of a number, bytes() makes as many
        raise _Refused(f"bytes of a token: {_shown(data)} is no list")
    token = entry.get("token", "")
    top = None if inner else entry.get("top_logprobs")
    return _Entry(
        id=_token_id(entry["id"]) if entry.get("id") is not None else None,
        data=bytes(data) if data is not None else _piece_bytes(token),
        logprob=entry.get("logprob", _ABSENT),
        top=None if top is None else [_entry(other, inner=True) for other in top],
    )


def _complaints(wire: _Wire, ask: Ask, speech: Speech) -> list[str]:
    """Return where the reply contradicts its request."""
    complaints = []
    asked = settings_of(ask, speech)
    for key, said in wire.settings.items():
        if key in asked and not _same_setting(asked[key], said):
            complaints.append(f"{key}: asked {_shown(asked[key])}, the server used {_shown(said)}")
    if ask.prompt_ids and wire.n_prompt is not None and wire.n_prompt != len(ask.prompt_ids):
        complaints.append(
            f"prompt: asked {len(ask.prompt_ids)} tokens, the server evaluated {wire.n_prompt}"
        )
    if not ask.cache_prompt and wire.cache_n:
        complaints.append(
            f"cache_prompt: asked False, the server took {wire.cache_n} tokens from its cache"
        )
    if ask.slot is not None and wire.slot is not None and wire.slot != ask.slot:
        complaints.append(f"id_slot: asked {ask.slot}, the server used {wire.slot}")
    if wire.truncated:
        complaints.append("truncated: the slot's context was full before the tokens were done")
    return complaints


def _check_length(complaints: list[str], wire: _Wire, ask: Ask, n_received: int) -> None:
    """Add where the number of tokens contradicts the request or the reply's own count."""
    n = n_received if wire.n_said is None else max(n_received, wire.n_said)
    if n == 0 and not wire.text and ask.n_tokens > 0:
        complaints.append(f"n_predict: asked {ask.n_tokens} tokens, the reply has none")
    if n > ask.n_tokens:
        complaints.append(f"n_predict: asked {ask.n_tokens} tokens, the reply has {n}")
    if 0 < n < ask.n_tokens and wire.finish == "limit":
        complaints.append(
            f"n_predict: asked {ask.n_tokens} tokens, the server stopped at a limit of {n}"
        )


def _drafted(wire: _Wire, ask: Ask) -> bool:
    """Say whether tokens were drafted: then logprobs on the wire are no evidence."""
    if wire.draft_n:
        return True
    return ask.n_probs > 0 and any(
        entry.top == [] and isinstance(entry.logprob, (int, float)) and entry.logprob == 0
        for entry in wire.entries
    )


def _positions(wire: _Wire, ask: Ask, speech: Speech, complaints: list[str]) -> _Positions:
    """Give each token its entry, by id where ids are there, else by the bytes of the text."""
    entries = wire.entries
    ids = wire.token_ids
    own = [entry.id for entry in entries if entry.id is not None]
    # The entries' own ids are the reply's where the server counted no more tokens than entries.
    if (
        ids is None
        and entries
        and len(own) == len(entries)
        and (wire.n_said or len(own)) == len(own)
    ):
        ids = own
    if speech.token_ids and ids is None and (wire.text or entries or wire.n_said):
        complaints.append("token ids: the route promises them, the reply does not have them all")
    if ids is not None and speech.token_ids:
        return _positions_by_id(wire, ids, speech, complaints)
    return _positions_by_text(wire, ask, complaints)


def _positions_by_id(
    wire: _Wire, ids: list[int], speech: Speech, complaints: list[str]
) -> _Positions:
    if wire.n_said is not None and wire.n_said != len(ids):
        complaints.append(f"tokens: the server counted {wire.n_said}, the reply has {len(ids)}")
    entries = wire.entries
    if not entries:
        return _Positions(ids, None, [None] * len(ids))
    covered = ids if speech.logprob_list is None else ids[: speech.logprob_list]
    if all(entry.id is not None for entry in entries):
        # a list that goes on past what was declared is read as far as it goes
        reach = covered if len(entries) <= len(covered) else ids
        found = align_ids(reach, [entry.id for entry in entries if entry.id is not None])
        if found is None:
            complaints.append("logprobs: the entries' ids do not follow the reply's tokens")
            found = []
    elif len(entries) == len(ids):
        found = list(range(len(ids)))  # nothing was left out
    else:
        found = []  # some were left out, and without ids nobody can tell which
    found = found + [None] * (len(ids) - len(found))
    placed = [None if index is None else entries[index] for index in found]
    data = [b"" if entry is None else entry.data for entry in placed]
    if not wire.text:
        wire.text = b"".join(data)
    return _Positions(ids, data, placed)


def _positions_by_text(wire: _Wire, ask: Ask, complaints: list[str]) -> _Positions:
    entries = wire.entries
    if not entries:
        return _Positions(None, None)
    pieces = [entry.data for entry in entries]
    if not wire.text:
        wire.text = b"".join(pieces)
    cut = align_text(wire.text, pieces)
    if cut is None and b"\xef\xbf\xbd" in wire.text:
        # bytes that are no UTF-8 were replaced in the text, the entries still have them
        joined = b"".join(pieces)
        whole, _, _ = wire.text.partition(b"\xef\xbf\xbd")
        if joined.startswith(whole):
            wire.text = joined
            cut = [(piece, index) for index, piece in enumerate(pieces)]
    if cut is None:
        complaints.append("logprobs: the entries' bytes do not make up the reply's text")
        return _Positions(None, None)
    # An end-of-text token is counted, and has neither text nor, on most servers, an entry.
    unseen = min(wire.n_said or 0, ask.n_tokens) - len(cut) - (wire.finish == "eos")
    cut += [(b"", None)] * max(unseen, 0)
    placed = [None if index is None else entries[index] for _, index in cut]
    return _Positions(None, [piece for piece, _ in cut], placed)


def _tops(
    entries: Sequence[_Entry | None], refused: bool
) -> tuple[list[list[int]] | None, list[list[bytes]] | None, list[list[float | None]] | None]:
    """Return ids, bytes and logprobs of the top lists; None where the reply has no such thing."""
    lists = [[] if entry is None or entry.top is None else entry.top for entry in entries]
    if refused or not any(lists):
        return None, None, None
    ids = [[other.id for other in top if other.id is not None] for top in lists]
    all_ids = all(len(some) == len(top) for some, top in zip(ids, lists, strict=True))
    return (
        ids if all_ids else None,
        [[other.data for other in top] for top in lists],
        [[read_float32(other.logprob)[1] for other in top] for top in lists],
    )


def _embed(tokens: Sequence[int], entries: Sequence[int]) -> list[int] | None:
    places = []
    cursor = 0
    for entry in entries:
        while cursor < len(tokens) and tokens[cursor] != entry:
            cursor += 1
        if cursor == len(tokens):
            return None
        places.append(cursor)
        cursor += 1
    return places


def _find_pieces(text: bytes, pieces: Sequence[bytes]) -> list[int] | None:
    starts = []
    cursor = 0
    for piece in pieces:
        start = text.find(piece, cursor)
        if start < 0:
            return None
        starts.append(start)
        cursor = start + len(piece)
    return starts


def _same_setting(asked: Any, said: Any) -> bool:
    if isinstance(asked, bool) or isinstance(said, bool):
        return asked is said
    if isinstance(asked, (int, float)) and isinstance(said, (int, float)):
        return asked == said or bool(np.float32(asked) == np.float32(said))
    if isinstance(asked, (list, tuple, dict)) and not asked:
        return not said  # an empty bias is a list to some and an object to others
    return bool(asked == said)


def _bytes_of(text: str) -> bytes:
    """Return the bytes of a JSON string, those that were no UTF-8 included."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a pair, written as an escape
        return text.encode("utf-8", "surrogatepass")


def _piece_bytes(token: str) -> bytes:
    r"""Return the bytes of an entry's token; ``bytes:\xf0\x9f`` is how some servers write half."""
    if re.fullmatch(r"bytes:(\\x[0-9a-fA-F]{2})+", token):
        return bytes.fromhex(token[6:].replace("\\x", ""))
    return _bytes_of(token)


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT32_MAX:
        raise _Refused(f"token ids: {_shown(value)} is none")
    return value


def _count(value: Any) -> int | None:
    """Return a count that the reply may carry; None where it carries none that makes sense."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT32_MAX:
        return None
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shown(value: Any) -> str:
    words = value if isinstance(value, str) else repr(value)
    return words if len(words) <= _SHOWN_CHARS else f"{words[:_SHOWN_CHARS]}…"
