"""The client: asks a server for replies, several at one moment, and says when each was asked.

Nothing of a request is made while others are in flight: bodies are encoded before the barrier and
replies are parsed after the round's last one has come.

The barrier stands inside of the requests. Each has its connection, and its head is written, before
any body is; when all of them have come that far the barrier opens and the bodies are written one
after the other. A server starts a request when it has its body, so *released* is the moment at
which the write of the body returned: asyncio has then passed it to the operating system, or, of a
body larger than the socket's buffer, as much as fits. A round in which one request does not come
as far as the barrier is not released at all: it would be another width than it says.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from routewise.errors import Misspoken, RoutewiseError
from routewise.reply import Ask, Reply, Speech, invalid_reply, parse_reply, request_of

#: A round counts as shared from this mean of busy slots a pass on. Requests of different lengths
#: share few passes: a half as long one at width 2 gives at most 1.5.
SHARED_SLOTS_MIN = 1.25
#: Rounding of the server's counts; more busy slots than requests are somebody else's.
SPARE_SLOTS_MAX = 0.05

_CONNECT_S = 10.0
#: Statuses of a request that this server will never take, however long one waits.
_REFUSALS = (400, 401, 403, 404, 405, 415, 422, 501)
#: Idle connections are dropped before a server does it (5 s in llama-server): a connection that
#: closes as a request is written would cost the round.
_KEEP_ALIVE_S = 2.0
_TIMEOUT = {"connect": _CONNECT_S, "read": None, "write": None, "pool": None}  # see _wait
_READ_S = 5.0  # for the short questions: metrics, slots, props
_POLL_S = 0.05
_REPLY_BYTES_MAX = 2**28
_SHOWN_CHARS = 300
_PRINTED_DIGITS = 6  # llama-server prints its metrics with six significant digits


class Unreachable(RoutewiseError):
    """Nothing listens at the address."""


@dataclass(frozen=True)
class Metrics:
    """The server's own count of its passes, since its start.

    ``busy_per_decode`` is the mean number of busy slots over ``n_decodes`` passes, rounded as
    printed; a busy slot is one with a request, whether or not it has a token in the pass.
    """

    n_decodes: int
    busy_per_decode: float
    n_processing: int | None = None


@dataclass
class Round:
    """Replies of requests that were released together, in the order of the asks.

    Times are ns after the barrier opened, which was at ``barrier_ns`` of time.perf_counter_ns.
    ``release_spread_ms`` is the last release minus the first. The witness (passes of the server,
    and slots busy in a pass) is None where the route has none, and where it cannot tell.
    ``fault`` says why a request got no reply at all, None where each got one, good or bad.
    """

    replies: list[Reply]
    released_ns: list[int]
    done_ns: list[int]
    release_spread_ms: float
    n_decodes: int | None
    busy_per_decode: float | None
    barrier_ns: int = 0
    fault: str | None = None


@dataclass
class _Flight:
    """One request under way."""

    released_ns: int | None = None
    done_ns: int | None = None
    heard_ns: int = 0  # of the latest byte
    status: int = 0
    chunks: list[bytes] = field(default_factory=list)
    fault: str | None = None


class _Barrier:
    """Holds the bodies back until all ``n`` heads are written."""

    def __init__(self, n: int) -> None:
        self._missing = n
        self.all_here = asyncio.Event()
        self._open = asyncio.Event()
        self.opened_ns = 0

    async def arrive(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.all_here.set()
        await self._open.wait()

    def open(self) -> None:
        self.opened_ns = time.perf_counter_ns()
        self._open.set()


class Client:
    """Connections to one server, kept alive; ``async with Client(url, speech) as client``.

    Request i of a round goes over connection i. (httpx's own pool walks over all connections, and
    over all pairs of them, whenever it assigns one: at 64 that costs more than the requests.)

    Parameters
    ----------
    url
        Address of the server, with or without a final ``/v1``. Proxies of the environment are not
        used: what is measured is this server.
    speech
        How the route is spoken to.
    stall_s
        How long a server that was seen to count its passes may count none, and send nothing,
        before its requests are given up. Any other server is given ``limit_s`` of the call.

    Entering raises Unreachable where nothing listens. After that no fault of the server is raised:
    a reply that did not come as it should is an invalid one, with the reason.
    """

    def __init__(self, url: str, speech: Speech, *, stall_s: float = 120.0) -> None:
        self.url = base_of(url)
        self.speech = speech
        self.stall_s = stall_s
        self._has_metrics: bool | None = None  # until the server has answered
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._lanes: list[httpx.AsyncHTTPTransport] = []
        self._questions = httpx.AsyncClient(timeout=_READ_S, transport=self._lane())

    async def __aenter__(self) -> Client:
        try:
            await self._connect()
        except Unreachable:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def complete(self, ask: Ask, limit_s: float = 600.0) -> Reply:
        """Ask once, alone; see :meth:`release`."""
        if self._has_metrics is None:
            await self.read_metrics()  # to know whether it can be told from one that stands still
        flights, _ = await self._fly([ask], limit_s)
        return self._reply_of(ask, flights[0])[0]

    async def release(self, asks: Sequence[Ask], limit_s: float = 600.0) -> Round:
        """Ask for all at one moment and wait for the last reply, at most ``limit_s`` seconds.

        Where one request cannot be brought to the barrier, none is released and all are invalid.
        Raises ValueError where there is nothing to ask.
        """
        if not asks:
            raise ValueError("a round of no requests")
        before = await self.read_metrics()
        flights, opened_ns = await self._fly(asks, limit_s)
        after = await self.read_metrics()
        n_decodes, busy = witness_between(before, after)
        released = [f.released_ns or f.done_ns or opened_ns for f in flights]
        done = [f.done_ns or opened_ns for f in flights]
        truly = [f.released_ns for f in flights if f.released_ns is not None]
        answers = [self._reply_of(*pair) for pair in zip(asks, flights, strict=True)]
        return Round(
            replies=[reply for reply, _ in answers],
            released_ns=[moment - opened_ns for moment in released],
            done_ns=[moment - opened_ns for moment in done],
            release_spread_ms=(max(truly) - min(truly)) / 1e6 if truly else 0.0,
            n_decodes=n_decodes,
            busy_per_decode=busy,
            barrier_ns=opened_ns,
            fault=next((reply.reason for reply, answered in answers if not answered), None),
        )

    async def read_metrics(self) -> Metrics | None:
        """Return what the server counts; None where it does not say."""
        if self._has_metrics is False:
            return None
        response = await self._get("/metrics")
        if response is None:
            return None
        metrics = parse_metrics(response.text) if response.status_code == 200 else None
        if metrics is not None:
            self._has_metrics = True
        elif response.status_code in (200, 403, 404, 501):
            self._has_metrics = False  # this server never will: do not ask in every round
        return metrics

    async def wait_idle(self, limit_s: float = 60.0) -> bool:
        """Wait until no slot is busy. False where the server does not tell.

        A slot may be busy with a request whose client is gone. Raises RoutewiseError that names
        the slots where they are still busy after ``limit_s`` seconds, and where the server no
        longer answers; Unreachable at once where it is gone.
        """
        end = time.monotonic() + limit_s
        while True:
            busy = await self._busy_slots()
            if busy is None or not busy:
                return busy is not None
            if time.monotonic() >= end:
                raise RoutewiseError(
                    f"{self.url}: {', '.join(busy)} still busy after {limit_s:g} s",
                    "another client may be using this server; stop it, or restart the server",
                )
            await asyncio.sleep(_POLL_S)

    async def _connect(self) -> None:
        """Raise Unreachable where nothing listens."""
        where = httpx.URL(self.url)
        port = where.port or (443 if where.scheme == "https" else 80)
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(where.host, port)
        except OSError as error:  # a TimeoutError is one
            raise Unreachable(
                f"{self.url}: nothing listens there ({_words(error)})",
                "start the server, or correct the route's address",
            ) from error
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def props(self) -> dict[str, Any] | None:
        """Return the server's ``/props``; None where it has none."""
        response = await self._get("/props")
        if response is None or response.status_code != 200:
            return None
        document = _json_of(response.content)
        return document if isinstance(document, dict) else None

    async def say_something(self, limit_s: float = 60.0) -> Reply:
        """Ask for one token after one token: shows whether the server answers at all."""
        return await self.complete(tiny_ask(self.speech), limit_s)

    def _lane(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEP_ALIVE_S
        )
        return httpx.AsyncHTTPTransport(verify=self._tls, limits=limits, trust_env=False)

    async def _close(self) -> None:
        await self._questions.aclose()
        while self._lanes:
            await self._lanes.pop().aclose()

    # --- one round --------------------------------------------------------------------------

    async def _fly(self, asks: Sequence[Ask], limit_s: float) -> tuple[list[_Flight], int]:
        """Bring all requests to the barrier, open it, and wait for the replies' last bytes."""
        encoded: dict[Ask, tuple[str, bytes]] = {}
        for ask in asks:
            if ask not in encoded:
                path, body = request_of(ask, self.speech)
                encoded[ask] = (self.url + path, json.dumps(body, separators=(",", ":")).encode())
        flights = [_Flight() for _ in asks]
        while len(self._lanes) < len(asks):
            self._lanes.append(self._lane())
        barrier = _Barrier(len(asks))
        tasks = [
            asyncio.create_task(_send(lane, *encoded[ask], barrier, flight))
            for lane, ask, flight in zip(self._lanes, asks, flights, strict=False)
        ]
        arrival = asyncio.create_task(barrier.all_here.wait())
        try:
            # before the barrier a task can only end by a fault
            await asyncio.wait([arrival, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if barrier.all_here.is_set():
                barrier.open()
                await self._wait(tasks, flights, limit_s)
        finally:
            # also where this round is cancelled: no request outlives it
            await _cancel([*tasks, arrival])
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error  # no fault of the server's: those are in the flights
        if not barrier.all_here.is_set():
            _abandon(flights)
            return flights, time.perf_counter_ns()
        return flights, barrier.opened_ns

    async def _wait(
        self, tasks: Sequence[asyncio.Task[None]], flights: Sequence[_Flight], limit_s: float
    ) -> None:
        """Wait for all replies; give them up at the limit, or where the server stands still."""
        start = moved = time.monotonic()
        heard = n_decodes = -1
        while True:
            left = start + limit_s - time.monotonic()
            pending = set(tasks)
            if left > 0:
                _, pending = await asyncio.wait(tasks, timeout=min(left, self.stall_s / 4))
            if not pending:
                return
            now = time.monotonic()
            if now >= start + limit_s:
                await _give_up(tasks, flights, f"no whole reply within {limit_s:g} s")
                return
            latest = max(flight.heard_ns for flight in flights)
            metrics = await self.read_metrics()
            if latest != heard or (metrics is not None and metrics.n_decodes != n_decodes):
                moved = now
            elif not self._has_metrics:
                moved = now  # a silent server that does not count may be busy
            heard = latest
            n_decodes = n_decodes if metrics is None else metrics.n_decodes
            if now - moved >= self.stall_s:
                reason = f"the server stands still: no byte and no pass for {self.stall_s:g} s"
                await _give_up(tasks, flights, reason)
                return

    def _reply_of(self, ask: Ask, flight: _Flight) -> tuple[Reply, bool]:
        """Return the reply, and whether the server answered with one at all."""
        content = b"".join(flight.chunks)
        if flight.fault is not None:
            return invalid_reply(ask, flight.fault), False
        return _reply_of_bytes(flight.status, content, ask, self.speech)

    # --- short questions --------------------------------------------------------------------

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            async with asyncio.timeout(_READ_S):
                return await self._questions.get(self.url + path)
        except (httpx.HTTPError, httpx.StreamError, OSError):
            return None

    async def _busy_slots(self) -> list[str] | None:
        """Return the names of the busy slots; None where the server does not tell."""
        response = await self._get("/slots")
        if response is None:
            await self._connect()
            return ["the server does not answer; its slots may be"]
        slots = _json_of(response.content) if response.status_code == 200 else None
        if isinstance(slots, list):
            return [
                f"slot {slot.get('id')}"
                for slot in slots
                if isinstance(slot, dict) and slot.get("is_processing")
            ]
        metrics = await self.read_metrics()
        if metrics is None or metrics.n_processing is None:
            return None
        return [f"{metrics.n_processing} slots"] if metrics.n_processing else []


# --- without a client -------------------------------------------------------------------------


def probe(url: str, speech: Speech, timeout_s: float = 60.0) -> None:
    """Ask for one tiny completion and raise RoutewiseError where it does not come.

    Misspoken where the server answers with a refusal, or with a reply that the route does not
    promise. Synchronous, with no connection left behind: a server is ready when this returns. The
    timeout is one of silence.
    """
    ask = tiny_ask(speech)
    path, body = request_of(ask, speech)
    try:
        response = httpx.post(base_of(url) + path, json=body, timeout=timeout_s, trust_env=False)
    except httpx.HTTPError as error:
        problem = f"{url}: no tiny completion within {timeout_s:g} s ({_words(error)})"
        hint = "read the server's log"
        if isinstance(error, httpx.ConnectError):
            raise Unreachable(f"{url}: nothing listens there ({_words(error)})", hint) from error
        raise RoutewiseError(problem, hint) from error
    reply, answered = _reply_of_bytes(response.status_code, response.content, ask, speech)
    if reply.status == "ok":
        return
    raised = Misspoken if answered or response.status_code in _REFUSALS else RoutewiseError
    raise raised(
        f"{url}: the tiny completion failed: {reply.reason}",
        "read the server's log; check the route's api, prompt_form, token_ids and model_name",
    )


def tiny_ask(speech: Speech) -> Ask:
    """Return a request for one token that every route can answer."""
    as_text = speech.prompt_form == "text"
    return Ask(
        prompt_ids=() if as_text else (1,),
        prompt_text="Hello" if as_text else None,
        n_tokens=1,
        n_probs=1,
        cache_prompt=False,
    )


def reply_of_bytes(status: int, content: bytes, ask: Ask, speech: Speech) -> Reply:
    """Return the reply that an HTTP answer holds; invalid where it holds none."""
    return _reply_of_bytes(status, content, ask, speech)[0]


def _reply_of_bytes(status: int, content: bytes, ask: Ask, speech: Speech) -> tuple[Reply, bool]:
    if status != 200:
        return invalid_reply(ask, f"HTTP {status}: {_excerpt(content)}"), False
    document = _json_of(content)
    if document is None:
        return invalid_reply(ask, f"the reply is no JSON: {_excerpt(content)}"), False
    return parse_reply(document, ask, speech), True


def parse_metrics(text: str) -> Metrics | None:
    """Read ``/metrics``; None where the counts are not there. The prefix of the names is free."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if value and not name.startswith("#"):
            found[name.rpartition(":")[2]] = value
    try:
        n_decodes = float(found["n_decode_total"])
        busy = float(found["n_busy_slots_per_decode"])
        processing = found.get("requests_processing")
        n_processing = None if processing is None else int(float(processing))
    except (KeyError, ValueError, OverflowError):
        return None
    if not math.isfinite(n_decodes) or not math.isfinite(busy) or n_decodes < 0 or busy < 0:
        return None
    return Metrics(int(n_decodes), busy, n_processing)


def witness_between(
    before: Metrics | None, after: Metrics | None
) -> tuple[int | None, float | None]:
    """Return the passes between two readings and the mean of busy slots in them.

    Both readings count from the server's start, rounded to six digits. From a million passes on
    the count itself is rounded; the mean is None as soon as the rounding could move it by more
    than 0.05 slots. Both are None where a reading is missing or the server started anew.
    """
    if before is None or after is None or after.n_decodes < before.n_decodes:
        return None, None
    if after.n_decodes >= 10**_PRINTED_DIGITS:
        return None, None
    n_decodes = after.n_decodes - before.n_decodes
    if n_decodes == 0:
        return 0, None
    (busy_before, error_before), (busy_after, error_after) = _busy(before), _busy(after)
    if (error_before + error_after) / n_decodes > 0.05:
        return n_decodes, None
    return n_decodes, (busy_after - busy_before) / n_decodes


def is_fair_witness(width: int, n_decodes: int | None, busy: float | None) -> bool:
    """Say whether a round's witness shows that round, of ``width`` requests and no others.

    A server that counts nothing has no witness, which is fair; one that counts must have counted.
    """
    if n_decodes is None and busy is None:
        return True
    if busy is None or busy > width + SPARE_SLOTS_MAX:
        return False
    return width == 1 or busy >= SHARED_SLOTS_MIN


def base_of(url: str) -> str:
    """Return a server's address without a final slash or ``/v1``.

    Raises RoutewiseError where it is no http address.
    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        address = httpx.URL("")
    if address.scheme not in ("http", "https") or not address.host:
        raise RoutewiseError(
            f"{url!r} is no address of a server", "write it as http://127.0.0.1:8080"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _busy(metrics: Metrics) -> tuple[float, float]:
    """Return busy slots summed over all passes, and how far rounding can have moved the sum."""
    busy = metrics.busy_per_decode
    if busy == 0.0:
        return 0.0, 0.0
    half_digit = 0.5 * 10.0 ** (math.floor(math.log10(busy)) + 1 - _PRINTED_DIGITS)
    total, error = busy * metrics.n_decodes, half_digit * metrics.n_decodes
    return (float(round(total)), 0.0) if error < 0.5 else (total, error)  # the sum is whole


def _json_of(content: bytes) -> Any:
    """Return a JSON document, None where it is none; bytes that are no UTF-8 become surrogates."""
    try:
        return json.loads(content.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None


def _abandon(flights: Sequence[_Flight]) -> None:
    """Turn a round that was not released into faults: of those that failed, and of the others."""
    first = next(flight.fault for flight in flights if flight.fault is not None)
    for flight in flights:
        if flight.fault is None:
            flight.fault = f"not released, as another of {len(flights)} requests failed: {first}"
        flight.done_ns = None


async def _send(
    lane: httpx.AsyncHTTPTransport, url: str, body: bytes, barrier: _Barrier, flight: _Flight
) -> None:
    """Send one request over a connection, its body after the barrier, and keep what comes back."""

    async def gated() -> AsyncIterator[bytes]:
        await barrier.arrive()
        yield body
        # the next chunk is asked for when the write of this one has returned
        flight.released_ns = time.perf_counter_ns()

    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "accept-encoding": "identity",
    }
    try:
        request = httpx.Request(
            "POST", url, headers=headers, content=gated(), extensions={"timeout": _TIMEOUT}
        )
        response = await lane.handle_async_request(request)
        try:
            flight.status = response.status_code
            n_bytes = 0
            async for chunk in response.aiter_raw():
                flight.heard_ns = time.perf_counter_ns()
                flight.chunks.append(chunk)
                n_bytes += len(chunk)
                if n_bytes > _REPLY_BYTES_MAX:
                    flight.fault = f"the reply goes on after {_REPLY_BYTES_MAX} bytes"
                    break
        finally:
            await response.aclose()
    except (httpx.HTTPError, httpx.StreamError, OSError) as error:
        flight.fault = _fault_of(error, flight)
    except asyncio.CancelledError:
        if flight.fault is None:
            raise
    flight.done_ns = time.perf_counter_ns()


async def _give_up(
    tasks: Sequence[asyncio.Task[None]], flights: Sequence[_Flight], reason: str
) -> None:
    for task, flight in zip(tasks, flights, strict=True):
        if not task.done():
            flight.fault = reason
    await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _fault_of(error: Exception, flight: _Flight) -> str:
    if flight.released_ns is None:
        return f"the request could not be sent: {_words(error)}"
    if flight.status:
        n_bytes = sum(map(len, flight.chunks))
        return f"the server went away mid-reply, after {n_bytes} bytes: {_words(error)}"
    return f"the server went away before it replied: {_words(error)}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _excerpt(content: bytes) -> str:
    text = content[: 4 * _SHOWN_CHARS].decode("utf-8", "replace").strip()
    if not text:
        return "(empty)"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
