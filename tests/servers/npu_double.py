"""A double of an NPU engine's ``forward-serve``, written from its public documentation.

One model, one request at a time, OpenAI's text completions: a prompt is text (ids are refused),
a reply carries no token ids, and there is no /props, no /slots and no /metrics. The list of
log-probabilities is there by default and covers ``--list-first N`` tokens; ``--no-logprobs`` is an
engine without one.

    python tests/servers/npu_double.py forward-serve -m MODEL --kernels DIR -p 8099
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers.double import (
    Answer,
    Life,
    Request,
    Stream,
    add_life_faults,
    add_reply_faults,
    log,
    openai_reply,
    piece,
    run_server,
    speak,
    tokenize,
)


class NpuDouble:
    """Answers as an NPU engine does: one request after the other."""

    def __init__(self, asked: argparse.Namespace, life: Life) -> None:
        self.asked = asked
        self.life = life
        self._turn = asyncio.Lock()
        self._name = asked.alias or Path(asked.model).resolve().parent.name

    def handle(self, request: Request) -> Answer | Coroutine[Any, Any, Answer]:
        """Answer one request."""
        path = request.path.split("?", 1)[0]
        if request.method == "POST":
            if path == "/v1/completions" and not self.life.loading:
                return self._complete(request)
            if self.life.loading:
                return Answer.of({"status": "loading"}, 503)
        elif path in ("/health", "/v1/health"):
            if self.life.loading:
                return Answer.of({"status": "loading"}, 503)
            return self.life.health() or Answer.of({"status": "ok"})
        elif path == "/v1/models":
            model = {"id": self._name, "object": "model", "owned_by": "1bit"}
            return Answer.of({"object": "list", "data": [model]})
        return Answer(404, b"", "text/plain")

    async def _complete(self, request: Request) -> Answer:
        await self.life.before_reply()
        try:
            body = request.body()
        except ValueError:
            return Answer.of({"error": {"message": "request body is not JSON"}}, 400)
        text = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(text, str):
            message = "bad request: type must be string, but is " + type(text).__name__
            return Answer.of({"error": {"message": message}}, 400)
        self.life.n_running += 1
        try:
            async with self._turn:
                n_tokens = int(body.get("max_tokens", 256))
                n_probs = int(body.get("logprobs") or 0)
                stream = speak(self.asked, tokenize(text), n_tokens, n_probs)
                await asyncio.sleep(len(stream.tokens) * self.asked.token_ms / 1000)
        finally:
            self.life.n_running -= 1
        reply = openai_reply(self.asked, stream, len(text), {"model": self._name})
        if not n_probs:
            reply["choices"][0]["logprobs"] = None
        elif self.asked.lists and not self.asked.no_logprobs:
            reply["choices"][0]["logprobs"] = _lists(stream)
        return self.life.spoil(Answer.of(reply))


def _lists(stream: Stream) -> dict[str, Any]:
    """Return the log-probabilities as OpenAI's text completions first wrote them."""
    entries = stream.entries
    offsets = [0]
    for token in stream.tokens:
        offsets.append(offsets[-1] + len(piece(token)))
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            for entry in entries
        ],
        "text_offset": offsets[: len(entries)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("forward-serve",))
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--kernels", type=Path, required=True, metavar="DIR")
    parser.add_argument("-p", "--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--alias", default="")
    parser.add_argument("--token-ms", type=float, default=0, help="time that each token takes")
    parser.add_argument(
        "--lists",
        action="store_true",
        help="the list as parallel lists (tokens, token_logprobs, top_logprobs), not as entries",
    )
    add_life_faults(parser)
    add_reply_faults(parser)
    parser.set_defaults(no_ids=True)
    asked = parser.parse_args()
    if not Path(asked.model).exists():
        log(f"{asked.model} does not exist")
        sys.exit(1)
    if not asked.kernels.is_dir():
        log(f"forward init failed: cannot open kernels {asked.kernels}")
        sys.exit(1)
    life = Life(asked)
    listening = life.begin()
    log(f"[forward-serve] {asked.model} on http://{asked.host}:{asked.port}")

    async def run() -> None:
        await run_server(NpuDouble(asked, life).handle, listening, None)

    asyncio.run(run())


if __name__ == "__main__":
    main()
