"""What the protocol doubles share: a small HTTP server and a model that only pretends.

The model is a function of the prompt's ids: a hash gives each position its token and its
log-probability, so that the same request gives the same reply, whoever asks and whenever. The
server reads HTTP by hand over asyncio's raw protocol (keep-alive, one request at a time on each
connection): with ``--at-once`` it must be faster than any client that is measured against it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

JSON = "application/json; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Error", 503: "Unavailable"}

# ---------------------------------------------------------------------------- the pretended model

#: Ids 0 to 255 are single bytes, the rest are words with a space before them.
N_BYTES = 256
N_VOCAB = 512
END_OF_TEXT = 2
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "zo")


def piece(token: int) -> bytes:
    """Return the bytes that a token stands for."""
    if token < N_BYTES:
        return bytes([token])
    first, second = divmod(token - N_BYTES, len(_SYLLABLES))
    return f" {_SYLLABLES[second]}{_SYLLABLES[first % len(_SYLLABLES)]}{first // 14 or ''}".encode()


def tokenize(text: str) -> list[int]:
    """Return one id a byte: the least tokenizer that loses nothing."""
    return list(text.encode())


def float32(value: float) -> float:
    """Round to the nearest float32, as a server sends it: widened to float64 again."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def ulps_below(value: float, count: int) -> float:
    """Return the float32 that lies ``count`` steps below a negative ``value``."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    moved: float = struct.unpack("<f", struct.pack("<I", bits + count))[0]
    return moved


@dataclass(frozen=True)
class Candidate:
    """A token that the model considers, and its log-probability (a float32)."""

    token: int
    logprob: float


def candidates(salt: str, context: Sequence[int], count: int, state: int = 0) -> list[Candidate]:
    """Return the best ``count`` tokens after a context, best first.

    ``state`` moves the last bits of every log-probability, as another batch shape does.
    """
    raw = ",".join(map(str, context))
    digest = blake2b(f"{salt}:{raw}".encode(), digest_size=16).digest()
    n_words = N_VOCAB - N_BYTES
    first = int.from_bytes(digest[:4], "little")
    best = -0.05 - digest[4] / 128
    return [
        Candidate(
            N_BYTES + (first + rank * 37) % n_words,
            ulps_below(float32(best - rank * (0.3 + digest[5] / 256)), state),
        )
        for rank in range(max(count, 1))
    ]


# ------------------------------------------------------------------------------------- the server


@dataclass
class Request:
    """One HTTP request; ``gone`` is set when its client hangs up before the answer."""

    method: str
    path: str
    raw: bytes
    gone: asyncio.Event

    def body(self) -> Any:
        """Return the JSON body; ValueError where it is none."""
        return json.loads(self.raw or b"{}")


@dataclass
class Answer:
    """One HTTP answer. ``cut`` sends half of it and then ends the connection, or the process."""

    status: int
    body: bytes
    kind: str = JSON
    cut: Callable[[], None] | None = None
    _wire: bytes = b""

    @classmethod
    def of(cls, value: Any, status: int = 200) -> Answer:
        """Return a JSON answer."""
        return cls(status, json.dumps(value).encode())

    @classmethod
    def error(cls, message: str, status: int, kind: str) -> Answer:
        """Return an error in the shape that llama-server gives it."""
        return cls.of({"error": {"message": message, "type": kind, "code": status}}, status)

    def wire(self) -> bytes:
        """Return the answer as bytes on the wire."""
        if not self._wire:
            head = (
                f"HTTP/1.1 {self.status} {_REASONS.get(self.status, 'Status')}\r\n"
                f"Content-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n\r\n"
            )
            self._wire = head.encode() + self.body
        return self._wire


Handler = Callable[[Request], "Answer | Coroutine[Any, Any, Answer]"]


class Connection(asyncio.Protocol):
    """A client's connection: reads requests, answers them in order."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._go_on()

    def _go_on(self) -> None:
        while self._task is None:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            length = 0
            place = head.lower().find(b"content-length:")
            if place >= 0:
                length = int(head[place + 15 :].split(b"\r\n", 1)[0])
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
            found = self._handler(Request(method, path, rest[:length], self._gone))
            if isinstance(found, Answer):
                self._send(found)
            else:
                self._task = asyncio.ensure_future(self._wait_for(found))

    async def _wait_for(self, coming: Coroutine[Any, Any, Answer]) -> None:
        answer = await coming
        self._task = None
        self._send(answer)
        self._go_on()

    def _send(self, answer: Answer) -> None:
        if self._transport.is_closing():
            return
        wire = answer.wire()
        if answer.cut is None:
            self._transport.write(wire)
            return
        self._transport.write(wire[: len(wire) - len(answer.body) // 2 - 1])
        self._transport.close()
        # the half must be on its way before the process may end
        asyncio.get_running_loop().call_later(0.05, answer.cut)


def open_socket(host: str, port: int, *, shared: bool) -> socket.socket:
    """Bind a port as a server does; OSError where it is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((host, port))
        listening.listen(512)
    except OSError:
        listening.close()
        raise
    return listening


def log(text: str) -> None:
    """Write a line to the log, which for a server is its standard error."""
    print(text, file=sys.stderr, flush=True)


async def run_server(
    handler: Handler, listening: socket.socket, background: Coroutine[Any, Any, None] | None
) -> None:
    """Answer requests for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(handler), sock=listening)
    keep = asyncio.ensure_future(background) if background is not None else None
    async with server:
        await server.serve_forever()
    del keep


# -------------------------------------------------------------------------------- faults of a life


def add_life_faults(parser: argparse.ArgumentParser) -> None:
    """Add the faults of a server's life, which every double can show."""
    group = parser.add_argument_group("faults of the server's life")
    add = group.add_argument
    add("--loading", type=float, default=0, metavar="S", help="503 to all for S seconds")
    add("--never-ready", action="store_true", help="the model loads for ever")
    add("--early-models", action="store_true", help="/v1/models answers while the model loads")
    add(
        "--wedged",
        type=int,
        metavar="N",
        help="health says 200, but after N replies no completion is ever answered",
    )
    add(
        "--stalled",
        choices=("start", "idle"),
        help="health says 503 'stalled' while nothing runs: from the start, or after a reply",
    )
    add(
        "--die-at-start",
        action="append",
        metavar="LINE",
        help="log LINE (may be given again) and exit before the port is opened",
    )
    add("--exit-code", type=int, default=1, help="of --die-at-start, --die-after, --die-mid-reply")
    add("--die-after", type=int, metavar="N", help="after N replies, die instead of the next")
    add("--die-mid-reply", type=int, metavar="N", help="after N replies, die in the next's middle")
    add("--cut-reply", type=int, metavar="N", help="after N replies, hang up in the next's middle")
    add("--ignore-sigterm", action="store_true", help="only SIGKILL ends it")
    add("--share-port", action="store_true", help="bind with SO_REUSEPORT, beside another server")
    add(
        "--taken",
        type=int,
        default=0,
        metavar="N",
        help="the first N starts (counted in --taken-file) say that the port is taken",
    )
    add("--taken-file", type=Path, help="where --taken counts")
    add(
        "--leave-child",
        action="store_true",
        help="start a child in a session of its own, deaf to SIGTERM, that outlives the server",
    )
    add("--pid-file", type=Path, help="write the process id here, and the child's below it")
    add("--say", action="append", default=[], metavar="LINE", help="log LINE at the start")


class Life:
    """The faults of a server's life, as asked for on the command line."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.n_replies = 0
        self.n_running = 0
        self.started_s = time.monotonic()

    @property
    def loading(self) -> bool:
        """Whether the model is still being loaded."""
        return self.asked.never_ready or time.monotonic() - self.started_s < self.asked.loading

    def begin(self) -> socket.socket:
        """Do what a server does before it listens; end the process where that is the fault."""
        asked = self.asked
        for line in asked.say:
            log(line)
        if asked.die_at_start is not None:
            for line in asked.die_at_start:
                log(line)
            sys.exit(asked.exit_code)
        if asked.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        if asked.taken:
            count = int(asked.taken_file.read_text()) if asked.taken_file.exists() else 0
            asked.taken_file.write_text(str(count + 1))
            if count < asked.taken:
                self._say_taken()
        try:
            listening = open_socket(asked.host, asked.port, shared=asked.share_port)
        except OSError:
            self._say_taken()
        pids = [os.getpid()]
        if asked.leave_child:
            pids.append(_leave_child())
        if asked.pid_file is not None:
            asked.pid_file.write_text("".join(f"{pid}\n" for pid in pids))
        return listening

    def _say_taken(self) -> None:
        asked = self.asked
        log(
            "E srv         start: couldn't bind HTTP server socket, "
            f"hostname: {asked.host}, port: {asked.port}"
        )
        log("E srv  llama_server: exiting due to HTTP server error")
        sys.exit(1)

    def health(self) -> Answer | None:
        """Return the answer to a question of health, None where all is as it should be."""
        stalled = self.asked.stalled
        if self.loading:
            return Answer.error("Loading model", 503, "unavailable_error")
        if stalled is not None and not self.n_running and (stalled == "start" or self.n_replies):
            return Answer.of({"status": "stalled"}, 503)
        return None

    async def before_reply(self) -> None:
        """Do what goes wrong instead of a reply."""
        asked = self.asked
        if asked.wedged is not None and self.n_replies >= asked.wedged:
            await asyncio.Event().wait()
        if asked.die_after is not None and self.n_replies >= asked.die_after:
            log("terminate called after throwing an instance of 'std::runtime_error'")
            os._exit(asked.exit_code)

    def spoil(self, answer: Answer) -> Answer:
        """Make what goes wrong within a reply a part of it."""
        asked = self.asked
        if asked.die_mid_reply is not None and self.n_replies >= asked.die_mid_reply:
            answer.cut = lambda: os._exit(asked.exit_code)
        elif asked.cut_reply is not None and self.n_replies >= asked.cut_reply:
            answer.cut = lambda: None
        self.n_replies += 1
        return answer


def _leave_child() -> int:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    return subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL
    ).pid


# ------------------------------------------------------------------------------ faults of a reply


def add_reply_faults(parser: argparse.ArgumentParser) -> None:
    """Add the faults of a reply, which every double can show."""
    group = parser.add_argument_group("faults of a reply")
    add = group.add_argument
    add(
        "--logprob",
        choices=("null", "missing", "sentinel", "nan", "not-float32", "zero"),
        help="what stands in place of the log-probability at --fault-at",
    )
    add("--fault-at", type=int, default=3, metavar="I", help="position of --logprob (default 3)")
    add("--no-logprobs", action="store_true", help="the list of log-probabilities is absent")
    add("--no-ids", action="store_true", help="no token ids, neither in the list nor beside it")
    add("--drop-entries", type=int, default=0, metavar="N", help="the list lacks its last N")
    add("--list-first", type=int, metavar="N", help="the list covers only the first N tokens")
    add("--empty-content", action="store_true", help="no text, though the list is filled")
    add(
        "--split-utf8",
        type=int,
        metavar="I",
        help="tokens I and I + 1 are the two halves of an é: the first has no entry in the list; "
        "where the reply ends between them its text ends in U+FFFD",
    )
    add("--eos-after", type=int, metavar="N", help="the stream ends by itself after N tokens")
    add("--speculative", action="store_true", help="logprob 0.0 and no top list past the first")
    add("--salt", default="", help="another model: other tokens for the same prompt")
    add("--move-bits", type=int, default=0, metavar="N", help="all logprobs N float32 steps lower")


@dataclass
class Stream:
    """What the model said to one request: tokens, and the entries of the list by token."""

    tokens: list[int]
    text: bytes
    entries: list[dict[str, Any]]
    finish: str  # limit | eos
    state: int = 0
    top: list[list[Candidate]] = field(default_factory=list)


def speak(
    asked: argparse.Namespace, prompt: Sequence[int], n_predict: int, n_probs: int, state: int = 0
) -> Stream:
    """Decode greedily, with the faults asked for.

    A ``state`` above 0 moves the last bits of every log-probability, and from the sixth token on
    the tokens too.
    """
    context = list(prompt)
    stream = Stream([], b"", [], "limit", state)
    half = asked.split_utf8
    pending = b""
    for place in range(n_predict):
        if asked.eos_after is not None and place >= asked.eos_after:
            stream.finish = "eos"
            break
        salt = asked.salt if not state or place < 5 else f"{asked.salt}/{state}"
        found = candidates(salt, context, max(n_probs, 1), state + asked.move_bits)
        if half is not None and place in (half, half + 1):
            found[0] = Candidate("é".encode()[place - half], found[0].logprob)
        token = found[0].token
        context.append(token)
        stream.tokens.append(token)
        pending += piece(token)
        if half is not None and place == half:
            continue
        entry = _entry(token, pending, found[0].logprob, found[:n_probs])
        stream.text += pending
        pending = b""
        if asked.speculative and place > 0:
            entry.update(logprob=0.0, top_logprobs=[])
        if asked.logprob is not None and place == asked.fault_at:
            _spoil_logprob(entry, asked.logprob)
        stream.entries.append(entry)
    stream.text += pending
    n_entries = len(stream.entries) - asked.drop_entries
    if asked.list_first is not None:
        n_entries = min(n_entries, asked.list_first)
    del stream.entries[max(n_entries, 0) :]
    if asked.no_ids:
        for entry in stream.entries:
            del entry["id"]
            for other in entry["top_logprobs"]:
                del other["id"]
    return stream


def _entry(token: int, text: bytes, logprob: float, top: Sequence[Candidate]) -> dict[str, Any]:
    return {
        "id": token,
        "token": text.decode(errors="replace"),
        "bytes": list(text),
        "logprob": logprob,
        "top_logprobs": [
            {
                "id": other.token,
                "token": piece(other.token).decode(errors="replace"),
                "bytes": list(piece(other.token)),
                "logprob": other.logprob,
            }
            for other in top
        ],
    }


def _spoil_logprob(entry: dict[str, Any], fault: str) -> None:
    if fault == "missing":
        del entry["logprob"]
        return
    entry["logprob"] = {
        "null": None,
        "sentinel": -3.4028234663852886e38,
        "nan": float("nan"),
        "not-float32": entry["logprob"] + 1e-12,
        "zero": 0.0,
    }[fault]


def prompt_ids(prompt: Any) -> list[int]:
    """Return the ids of a prompt given as ids or as text; ValueError for anything else."""
    if isinstance(prompt, str):
        return tokenize(prompt)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    raise ValueError('"prompt" must be a string or a list of token ids')


def openai_reply(
    asked: argparse.Namespace, stream: Stream, n_prompt: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a text completion in OpenAI's shape, its list as llama-server writes it."""
    text = "" if asked.empty_content else stream.text.decode(errors="replace")
    listed = None if asked.no_logprobs else {"content": stream.entries}
    finish = "length" if stream.finish == "limit" else "stop"
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": int(time.time()),
        "choices": [{"index": 0, "text": text, "logprobs": listed, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": len(stream.tokens),
            "total_tokens": n_prompt + len(stream.tokens),
        },
        **extra,
    }
