"""What the client costs: requests per second against a bare httpx loop, and the barrier's spread.

A stub in a process of its own answers every request at once with one prebuilt reply. In turn
(A B C A B C …) 64 requests at a time go to it: by a bare ``httpx.AsyncClient`` (gather of ``post``,
then ``response.json()``), by the client (encoding, barrier, reading; then every reply checked and
turned into its record), and by 64 bare ``httpx.AsyncClient``, one a request, which spares httpx its
pool. Prints ratios of requests per second round by round, as median and quartiles:

- in flight: from the round's start to its last byte, against the bare loop without ``json()``.
  This is what a server sees, and what a measurement could suffer from;
- whole: the records included, which are made after the last byte, against the bare loop with it;

then the spread of the barrier (last release minus first), how memory grew over all rounds, and
whether what is wanted of the three is met.

    python benchmarks/client_against_bare_httpx.py

Close everything else first; the load before and after is printed with the result.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
from routewise.client import Client
from routewise.reply import Ask, Speech, request_of

#: What is wanted of the client: within 10 % of a bare httpx loop, all requests of a round released
#: within some ms, and memory that does not grow with requests (caches of Python's own fill up).
RATIO_MIN = 0.9
SPREAD_MS_MAX = 5.0
GROWTH_KB_MAX = 64.0
PROMPT = tuple(range(100, 164))


def stub_reply(n_tokens: int) -> bytes:
    """Return a reply as llama-server sends it, with ``n_tokens`` tokens and two of the top."""
    entry = {"id": 29, "token": "-", "bytes": [45], "logprob": -1.5676718950271606}
    other = {"id": 30, "token": ".", "bytes": [46], "logprob": -2.25}
    body = {
        "content": "-" * n_tokens,
        "tokens": [29] * n_tokens,
        "id_slot": 0,
        "tokens_predicted": n_tokens,
        "tokens_evaluated": len(PROMPT),
        "truncated": False,
        "stop_type": "limit",
        "timings": {"cache_n": 0, "prompt_n": len(PROMPT)},
        "completion_probabilities": [{**entry, "top_logprobs": [entry, other]}] * n_tokens,
    }
    return json.dumps(body).encode()


class Stub(asyncio.Protocol):
    """An HTTP server that reads requests with a length and answers each at once."""

    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start with nothing read."""
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        """Answer every whole request that is there: a GET with 404, a POST with the reply."""
        self.buffer += data
        while True:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            post = head.startswith(b"POST")
            assert isinstance(self.transport, asyncio.Transport)
            self.transport.write(
                self.answer if post else b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
            )


async def serve_stub(n_tokens: int) -> None:
    """Serve on a free port, printed on the first line, until the process is ended."""
    body = stub_reply(n_tokens)
    Stub.answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass
class Samples:
    """Seconds of each round, in flight and as a whole; the barrier's spreads in ms."""

    pool_s: list[tuple[float, float]] = field(default_factory=list)
    own_s: list[tuple[float, float]] = field(default_factory=list)
    client_s: list[tuple[float, float]] = field(default_factory=list)
    spread_ms: list[float] = field(default_factory=list)


async def bare_round(
    clients: list[httpx.AsyncClient], url: str, content: bytes
) -> tuple[float, float]:
    """Post once with each of ``clients``; return the seconds without and with reading JSON."""
    headers = {"content-type": "application/json"}
    start = time.perf_counter()
    posts = (client.post(url, content=content, headers=headers) for client in clients)
    responses = await asyncio.gather(*posts)
    flight_s = time.perf_counter() - start
    for response in responses:
        response.json()
    return flight_s, time.perf_counter() - start


async def measure(url: str, ask: Ask, speech: Speech, width: int, rounds: int) -> Samples:
    """Run the rounds of all three, in turn, after one of each to warm up."""
    samples = Samples()
    path, body = request_of(ask, speech)
    content = json.dumps(body).encode()
    async with AsyncExitStack() as stack:
        context = httpx.create_ssl_context()
        clients = [
            httpx.AsyncClient(timeout=None, limits=httpx.Limits(), trust_env=False, verify=context)
            for _ in range(width + 1)
        ]
        for bare in clients:
            await stack.enter_async_context(bare)
        client = await stack.enter_async_context(Client(url, speech))
        assert await client.read_metrics() is None  # the stub has none: not asked again
        for index in range(-1, rounds):
            pool_s = await bare_round([clients[-1]] * width, url + path, content)
            start_ns = time.perf_counter_ns()
            done = await client.release([ask] * width)
            whole_ns = time.perf_counter_ns() - start_ns
            flight_ns = done.barrier_ns + max(done.done_ns) - start_ns
            own_s = await bare_round(clients[:width], url + path, content)
            assert all(reply.observable == "chosen-logprob" for reply in done.replies)
            if index >= 0:
                samples.pool_s.append(pool_s)
                samples.own_s.append(own_s)
                samples.client_s.append((flight_ns / 1e9, whole_ns / 1e9))
                samples.spread_ms.append(done.release_spread_ms)
    return samples


async def memory_growth(url: str, ask: Ask, speech: Speech, width: int, rounds: int) -> float:
    """Return by how many kB of Python objects ``rounds`` rounds more leave the client larger."""
    sizes = []
    tracemalloc.start()
    async with Client(url, speech) as client:
        for n_rounds in (5, rounds):
            for _ in range(n_rounds):
                await client.release([ask] * width)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return (sizes[1] - sizes[0]) / 1e3


def quartiles(values: list[float], digits: int) -> str:
    """Return median and quartiles, for people."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} (quartiles {low:.{digits}f} to {high:.{digits}f})"


def main(width: int, rounds: int, n_tokens: int) -> None:
    """Start the stub, run everything, print, end the stub."""
    speech = Speech()
    ask = Ask(PROMPT, None, n_tokens, 2, cache_prompt=False)
    load = os.getloadavg()[0]
    command = [sys.executable, __file__, "--serve", "--tokens", str(n_tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        try:
            assert stub.stdout is not None
            url = f"http://127.0.0.1:{int(stub.stdout.readline())}"
            samples = asyncio.run(measure(url, ask, speech, width, rounds))
            growth_kb = asyncio.run(memory_growth(url, ask, speech, width, rounds))
        finally:
            stub.terminate()
    rate = width / statistics.median(flight_s for flight_s, _ in samples.client_s)
    print(f"{rounds} rounds of each, {width} in flight, {n_tokens} tokens a reply")
    print(f"client, requests per second in flight: {rate:.0f}")
    for name, bare_s in (("one pool", samples.pool_s), ("own connections", samples.own_s)):
        for column, what in enumerate(("in flight", "whole")):
            ratios = [
                bare[column] / ours[column]
                for bare, ours in zip(bare_s, samples.client_s, strict=True)
            ]
            print(f"client / bare with {name}, {what}: {quartiles(ratios, 3)}")
    print(
        f"barrier's spread, ms: {quartiles(samples.spread_ms, 2)}, "
        f"largest {max(samples.spread_ms):.2f}, "
        f"{sum(s > 5.0 for s in samples.spread_ms)} of {rounds} above 5 ms"
    )
    print(f"memory after {width * rounds} requests more: {growth_kb:+.1f} kB")
    pool = statistics.median(
        bare[0] / ours[0] for bare, ours in zip(samples.pool_s, samples.client_s, strict=True)
    )
    spread_ms = statistics.median(samples.spread_ms)
    for what, wanted, met in (
        ("in flight against one pool", f"{RATIO_MIN} or more", pool >= RATIO_MIN),
        ("barrier's spread, median", f"{SPREAD_MS_MAX:g} ms or less", spread_ms <= SPREAD_MS_MAX),
        ("memory", f"{GROWTH_KB_MAX:g} kB or less", growth_kb <= GROWTH_KB_MAX),
    ):
        print(f"{'met' if met else 'NOT MET'}: {what}, wanted {wanted}")
    print(f"load before {load:.2f}, after {os.getloadavg()[0]:.2f}, cores {os.cpu_count()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--serve", action="store_true", help="be the stub")
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve_stub(given.tokens))
    else:
        main(given.width, given.rounds, given.tokens)
