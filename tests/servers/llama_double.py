"""A double of llama-server: its addresses and replies, and every fault that can be asked of it.

It takes llama-server's own command line (what moves no number here is read and ignored, an unknown
flag is refused in llama-server's words) and the faults below. Without a fault it is a server with
deterministic replies: the same prompt gives the same tokens and the same float32 bits.

    python tests/servers/llama_double.py -m model.gguf --port 8099 --parallel 4

To show states in a batch: ``--window-ms 200 --batch-states 2``. A round of requests that arrive
within the window, or fill all slots, is decoded together, and each width has its own bits.
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
    prompt_ids,
    run_server,
    speak,
    tokenize,
)

BUILD_INFO = "b0-routewise-000000000000"

#: Flags of llama-server that change nothing here: without a value, and with one.
_BARE = """
--metrics --slots --no-slots --no-webui --no-ui --jinja --verbose -v --no-cache-idle-slots
--no-cache-prompt --no-context-shift --no-warmup --no-mmap --mlock --kv-unified --no-kv-unified
--cont-batching --reuse-port --offline --no-perf --no-op-offload -nkvu -kvu -cb
"""
_VALUED = """
-t --threads -tb --threads-batch -b --batch-size -ub --ubatch-size -ngl --gpu-layers
--n-gpu-layers -fa --flash-attn --fit -fit --cache-ram -cram --cache-type-k --cache-type-v -ctk
-ctv --seed -s --temp --top-k --log-verbosity -lv --device -dev --timeout -to --threads-http
--log-file --poll --cache-reuse --spec-type --split-mode -sm --tensor-split -ts --main-gpu -mg
"""
IGNORED = {**dict.fromkeys(_BARE.split(), 0), **dict.fromkeys(_VALUED.split(), 1)}


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=description or __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", "--model", default="", help="must exist where it is given")
    add("-a", "--alias", default="", help="name of the model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8080)
    add("-np", "--parallel", type=int, default=4, metavar="N", help="slots (default 4)")
    add("-c", "--ctx-size", type=int, default=4096, metavar="N", help="shared by the slots")
    group = parser.add_argument_group("what it says of itself")
    group.add_argument("--build-info", default=BUILD_INFO, help="of /props")
    group.add_argument("--props-model", metavar="PATH", help="model_path of /props, if another")
    group.add_argument("--no-props", action="store_true", help="/props is not there (404)")
    group.add_argument("--no-metrics", action="store_true", help="/metrics is not there (501)")
    group = parser.add_argument_group("batches and slots")
    add = group.add_argument
    add("--window-ms", type=float, default=0, help="wait so long for others to share a decode with")
    add("--token-ms", type=float, default=0, help="time that each token takes")
    add(
        "--batch-states",
        type=int,
        default=0,
        metavar="K",
        help="replies depend on the width of their batch, with K states among its copies",
    )
    add("--never-shared", action="store_true", help="/metrics: no two slots ever shared a decode")
    add("--start-busy", type=float, default=0, metavar="S", help="slot 0 is busy for S seconds")
    add(
        "--busy-after-disconnect",
        type=float,
        default=0,
        metavar="S",
        help="a slot whose client hangs up stays busy for S seconds more",
    )
    add("--at-once", action="store_true", help="answer an equal request from memory: for speed")
    add_life_faults(parser)
    add_reply_faults(parser)
    return parser


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; end as llama-server does where a flag is unknown."""
    asked, others = make_parser().parse_known_args(arguments)
    while others:
        flag = others.pop(0)
        if flag not in IGNORED:
            log(f"error: invalid argument: {flag}")
            sys.exit(1)
        del others[: IGNORED[flag]]
    return asked


class Batch:
    """Requests that are decoded together: closed when all slots are in it, or by the clock."""

    def __init__(self, full: int, window_s: float) -> None:
        self.width = 0
        self.n_tokens = 0
        self.closed = asyncio.Event()
        self._full = full
        asyncio.get_running_loop().call_later(window_s, self.closed.set)

    def join(self) -> int:
        """Return the place of a new member."""
        self.width += 1
        if self.width >= self._full:
            self.closed.set()
        return self.width - 1


class LlamaDouble:
    """Answers as llama-server does."""

    def __init__(self, asked: argparse.Namespace, life: Life) -> None:
        self.asked = asked
        self.life = life
        self.busy = [False] * asked.parallel
        self.cached: list[list[int]] = [[] for _ in self.busy]
        self.n_decode = 0
        self.n_busy_slots = 0
        self.n_deferred = 0
        self._freed = asyncio.Event()
        self._batch: Batch | None = None
        self._known: dict[bytes, Answer] = {}

    async def background(self) -> None:
        """Hold the slot that is busy from the start, for as long as asked."""
        if self.asked.start_busy:
            self.busy[0] = True
            await asyncio.sleep(self.asked.start_busy)
            self._free(0)

    # ------------------------------------------------------------------------------- addresses

    def handle(self, request: Request) -> Answer | Coroutine[Any, Any, Answer]:
        """Answer one request."""
        path = request.path.split("?", 1)[0]
        if request.method == "POST":
            if self.life.loading:
                return Answer.error("Loading model", 503, "unavailable_error")
            if path in ("/completion", "/completions", "/v1/completions"):
                known = self._known.get(request.raw) if self.asked.at_once else None
                if known is not None:
                    return known
                return self._complete(request, openai=path.startswith("/v1"))
            if path == "/tokenize":
                return Answer.of({"tokens": tokenize(request.body().get("content", ""))})
        elif path in ("/health", "/v1/health"):
            return self.life.health() or Answer.of({"status": "ok"})
        elif path == "/v1/models" and (self.asked.early_models or not self.life.loading):
            name = self.asked.alias or self.asked.model
            return Answer.of({"object": "list", "data": [{"id": name, "object": "model"}]})
        elif self.life.loading:
            return Answer.error("Loading model", 503, "unavailable_error")
        elif path == "/props" and not self.asked.no_props:
            return Answer.of(self._props())
        elif path == "/slots":
            return Answer.of(self._slots())
        elif path == "/metrics":
            if self.asked.no_metrics:
                message = "This server does not support metrics endpoint."
                return Answer.error(message, 501, "not_supported_error")
            return Answer(200, self._metrics().encode(), "text/plain; version=0.0.4")
        return Answer.error("File Not Found", 404, "not_found_error")

    def _props(self) -> dict[str, Any]:
        asked = self.asked
        return {
            "default_generation_settings": {
                "params": {"seed": 4294967295, "temperature": 0.8, "n_probs": 0},
                "n_ctx": asked.ctx_size // asked.parallel,
            },
            "total_slots": asked.parallel,
            "model_alias": asked.alias or asked.model,
            "model_path": asked.model if asked.props_model is None else asked.props_model,
            "endpoint_slots": True,
            "endpoint_metrics": not asked.no_metrics,
            "chat_template": "",
            "bos_token": "",
            "eos_token": "",
            "build_info": asked.build_info,
            "is_sleeping": False,
        }

    def _slots(self) -> list[dict[str, Any]]:
        n_ctx = self.asked.ctx_size // self.asked.parallel
        return [
            {
                "id": slot,
                "n_ctx": n_ctx,
                "speculative": self.asked.speculative,
                "is_processing": busy,
            }
            for slot, busy in enumerate(self.busy)
        ]

    def _metrics(self) -> str:
        values = {
            "n_decode_total": ("counter", self.n_decode),
            "requests_processing": ("gauge", sum(self.busy)),
            "requests_deferred": ("gauge", self.n_deferred),
            "n_busy_slots_per_decode": ("gauge", self.n_busy_slots / max(self.n_decode, 1)),
        }
        return "".join(
            f"# HELP llamacpp:{name} {name}\n# TYPE llamacpp:{name} {kind}\n"
            f"llamacpp:{name} {value:.6g}\n"
            for name, (kind, value) in values.items()
        )

    # --------------------------------------------------------------------------------- replies

    async def _complete(self, request: Request, *, openai: bool) -> Answer:
        await self.life.before_reply()
        try:
            body = request.body()
            prompt = prompt_ids(body.get("prompt"))
        except (ValueError, AttributeError) as error:
            return Answer.error(str(error), 400, "invalid_request_error")
        self.life.n_running += 1
        slot = await self._take(body.get("id_slot", -1))
        try:
            answer = await self._reply(body, prompt, slot, openai=openai)
            if self.asked.busy_after_disconnect and request.gone.is_set():
                await asyncio.sleep(self.asked.busy_after_disconnect)
        finally:
            self._free(slot)
            self.life.n_running -= 1
        if self.asked.at_once:
            self._known[request.raw] = answer
        return self.life.spoil(answer)

    async def _reply(
        self, body: dict[str, Any], prompt: list[int], slot: int, *, openai: bool
    ) -> Answer:
        asked = self.asked
        n_predict = body.get("max_tokens" if openai else "n_predict", 16)
        n_probs = int((body.get("logprobs") if openai else None) or body.get("n_probs", 0))
        cache_n = self._reuse(body.get("cache_prompt", True), prompt, slot)
        width, place, batch = 1, 0, None
        if asked.window_ms:
            if self._batch is None or self._batch.closed.is_set():
                self._batch = Batch(asked.parallel, asked.window_ms / 1000)
            batch = self._batch
            place = batch.join()
            await batch.closed.wait()
            width = batch.width
        state = (width - 1) * asked.batch_states + place % max(asked.batch_states, 1)
        if width == 1 or not asked.batch_states:
            state = 0
        stream = speak(asked, prompt, n_predict, n_probs, state)
        self._count(len(stream.tokens), batch)
        if asked.token_ms:
            await asyncio.sleep(len(stream.tokens) * asked.token_ms / 1000)
        timings: dict[str, Any] = {
            "cache_n": cache_n,
            "prompt_n": len(prompt) - cache_n,
            "prompt_ms": 1.0,
            "predicted_n": len(stream.tokens),
            "predicted_ms": 1.0,
        }
        if asked.speculative:
            timings.update(draft_n=len(stream.tokens), draft_n_accepted=len(stream.tokens) // 2)
        if openai:
            extra = {
                "model": asked.alias or asked.model,
                "system_fingerprint": asked.build_info,
                "timings": timings,
            }
            return Answer.of(openai_reply(asked, stream, len(prompt), extra))
        return Answer.of(self._native(body, prompt, slot, stream, n_probs, timings))

    def _native(
        self,
        body: dict[str, Any],
        prompt: list[int],
        slot: int,
        stream: Stream,
        n_probs: int,
        timings: dict[str, Any],
    ) -> dict[str, Any]:
        asked = self.asked
        reply: dict[str, Any] = {
            "index": 0,
            "content": "" if asked.empty_content else stream.text.decode(errors="replace"),
            "tokens": stream.tokens if body.get("return_tokens") else [],
            "id_slot": slot,
            "stop": True,
            "model": asked.alias or asked.model,
            "tokens_predicted": len(stream.tokens),
            "tokens_evaluated": len(prompt),
            "generation_settings": {
                "seed": body.get("seed", 4294967295),
                "temperature": body.get("temperature", 0.8),
                "top_k": body.get("top_k", 40),
                "samplers": body.get("samplers", ["top_k", "temperature"]),
                "n_predict": body.get("n_predict", -1),
                "n_probs": n_probs,
                "stream": False,
                "post_sampling_probs": bool(body.get("post_sampling_probs", False)),
                "speculative.types": "draft" if asked.speculative else "none",
            },
            "truncated": False,
            "stop_type": stream.finish,
            "stopping_word": "",
            "tokens_cached": len(prompt) + len(stream.tokens) - 1,
            "timings": timings,
        }
        if asked.no_ids:
            del reply["tokens"]
        if n_probs and not asked.no_logprobs:
            reply["completion_probabilities"] = stream.entries
        return reply

    def _reuse(self, wanted: bool, prompt: list[int], slot: int) -> int:
        """Return how many tokens of the prompt the slot still holds, and remember this prompt."""
        held, self.cached[slot] = self.cached[slot], prompt
        if not wanted:
            return 0
        n_common = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b),
            min(len(held), len(prompt)),
        )
        return max(0, min(n_common, len(prompt) - 1))

    def _count(self, n_tokens: int, batch: Batch | None) -> None:
        """Count decodes: those of a batch once, as many as its longest reply has tokens."""
        self.n_busy_slots += n_tokens
        if batch is None or self.asked.never_shared:
            self.n_decode += n_tokens
        else:
            self.n_decode += max(0, n_tokens - batch.n_tokens)
            batch.n_tokens = max(batch.n_tokens, n_tokens)

    async def _take(self, wanted: int) -> int:
        """Wait for a slot, the one that is asked for or any, and take it."""
        self.n_deferred += 1
        try:
            while True:
                free = [slot for slot, busy in enumerate(self.busy) if not busy]
                found = [slot for slot in free if wanted < 0 or slot == wanted]
                if found:
                    self.busy[found[0]] = True
                    return found[0]
                self._freed.clear()
                await self._freed.wait()
        finally:
            self.n_deferred -= 1

    def _free(self, slot: int) -> None:
        self.busy[slot] = False
        self._freed.set()


def serve(asked: argparse.Namespace) -> None:
    """Serve until something ends the process."""
    life = Life(asked)
    log(f"I srv    load_model: loading model '{asked.model}'")
    if asked.model and not Path(asked.model).exists():
        log(f"E gguf_init_from_file: failed to open GGUF file '{asked.model}'")
        log(f"E srv    load_model: failed to load model, '{asked.model}'")
        log("E srv  llama_server: exiting due to model loading error")
        sys.exit(1)
    listening = life.begin()
    log(f"I srv  llama_server: server is listening on http://{asked.host}:{asked.port}")

    async def run() -> None:
        double = LlamaDouble(asked, life)
        await run_server(double.handle, listening, double.background())

    asyncio.run(run())


if __name__ == "__main__":
    serve(parse_arguments(sys.argv[1:]))
