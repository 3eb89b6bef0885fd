"""The client against a server of the test's own, in the same event loop, that fails as it is told.

Nothing here is timed: what must come after something else is waited for, not slept for.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.client import (
    Client,
    Metrics,
    Round,
    Unreachable,
    base_of,
    parse_metrics,
    probe,
    witness_between,
)
from routewise.errors import RoutewiseError
from routewise.reply import Ask, Speech

pytestmark = pytest.mark.usefixtures("module_leaves_nothing")

SPEECH = Speech()
ASK = Ask((1, 2, 3), "one two three", 2, n_probs=1, cache_prompt=False)
ENTRY = {"id": 5, "token": "a", "bytes": [97], "logprob": -1.5, "top_logprobs": [{}]}
GOOD = {
    "content": "aa",
    "tokens": [5, 5],
    "id_slot": 0,
    "tokens_predicted": 2,
    "tokens_evaluated": 3,
    "stop_type": "limit",
    "completion_probabilities": [ENTRY, ENTRY],
}


def answer(body: Any, status: int = 200) -> bytes:
    """Return a whole HTTP answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(content), content)


Handler = Callable[["Double", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Double:
    """A server that answers completions as ``handler`` does and questions from a table."""

    handler: Handler
    answers: dict[str, list[bytes]] = field(default_factory=dict)  # the last one stays
    requests: list[dict[str, Any]] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    readers: dict[asyncio.StreamWriter, asyncio.StreamReader] = field(default_factory=dict)
    n_connections: int = 0
    n_open: int = 0
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self.n_open += 1
        self.readers[writer] = reader
        self.all_closed.clear()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path = head.split()[:2]
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                content = await reader.readexactly(length)
                if method == b"POST":
                    self.requests.append(json.loads(content))
                    self.arrived.set()
                    await self.handler(self, writer)
                else:
                    self.questions.append(path.decode())
                    answers = self.answers.get(path.decode(), [answer(b"", 404)])
                    writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            del self.readers[writer]
            self.n_open -= 1
            if self.n_open == 0:
                self.all_closed.set()


@asynccontextmanager
async def serving(handler: Handler, **answers: list[bytes]) -> AsyncIterator[Double]:
    double = Double(handler, {f"/{path}": list(values) for path, values in answers.items()})
    server = await asyncio.start_server(double.connected, "127.0.0.1", 0, backlog=256)
    double.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield double
    finally:
        server.close()
        await double_idle(double)


@asynccontextmanager
async def talking(
    handler: Handler, stall_s: float = 120.0, **answers: list[bytes]
) -> AsyncIterator[tuple[Double, Client]]:
    """Serve, with a client that talks to it."""
    async with (
        serving(handler, **answers) as double,
        Client(double.url, SPEECH, stall_s=stall_s) as client,
    ):
        yield double, client


async def double_idle(double: Double) -> None:
    """Wait until the client has closed every connection: a test that leaves one open hangs here."""
    async with asyncio.timeout(20):
        while double.n_open:
            await double.all_closed.wait()


def replying(content: Any, status: int = 200) -> Handler:
    """Answer everything with the same."""

    async def handler(_: Double, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(content, status))

    return handler


async def hang(double: Double, writer: asyncio.StreamWriter) -> None:
    """Never answer; end when the client has gone."""
    await double.readers[writer].read()
    raise ConnectionResetError


def raw(content: bytes) -> Handler:
    """Send some bytes and close the connection."""

    async def handler(_: Double, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()
        writer.close()
        raise ConnectionResetError

    return handler


def metrics_text(n_decodes: int, busy: float) -> bytes:
    """Return /metrics as llama-server prints it: six significant digits."""
    return answer(
        f"# HELP llamacpp:n_decode_total passes\nllamacpp:n_decode_total {n_decodes:g}\n"
        f"llamacpp:requests_processing 0\nllamacpp:n_busy_slots_per_decode {busy:g}\n".encode()
    )


# --- rounds -----------------------------------------------------------------------------------


def test_a_round_is_released_together_and_read_in_order() -> None:
    async def scenario() -> tuple[Double, Round]:
        async def own_number(double: Double, writer: asyncio.StreamWriter) -> None:
            if len(double.requests) < 8:  # nobody is answered before all have asked
                await everyone.wait()
            everyone.set()
            writer.write(answer(GOOD))

        everyone = asyncio.Event()
        async with serving(own_number) as double, Client(double.url, SPEECH) as client:
            asks = [Ask((1, 2, 3), None, 2, 1, False, seed=i) for i in range(8)]
            return double, await client.release(asks)

    double, done = asyncio.run(scenario())
    assert [reply.status for reply in done.replies] == ["ok"] * 8
    assert {reply.observable for reply in done.replies} == {"chosen-logprob"}
    assert sorted(request["seed"] for request in double.requests) == list(range(8))
    assert all(released > 0 for released in done.released_ns)
    # every release comes before the first reply: all eight were in flight at once
    assert max(done.released_ns) < min(done.done_ns)
    spread_ms = (max(done.released_ns) - min(done.released_ns)) / 1e6
    assert done.release_spread_ms == pytest.approx(spread_ms)
    assert (done.n_decodes, done.busy_per_decode) == (None, None)


def test_no_body_is_written_before_every_head_is() -> None:
    """The barrier is in the requests: the server has all heads when it gets the first body."""

    async def scenario() -> list[int]:
        heads = 0
        heads_at_body: list[int] = []

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal heads
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                heads += 1
                length = int(head.lower().split(b"content-length:")[1].split()[0])
                await reader.readexactly(length)
                heads_at_body.append(heads)
                writer.write(answer(GOOD))
                await writer.drain()
                await reader.read()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # the connection that only looks whether somebody listens
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, Client(url, SPEECH) as client:
            client._has_metrics = False  # a question would be another head
            await client.release([ASK] * 5)
        return heads_at_body

    assert asyncio.run(scenario()) == [5] * 5


def test_connections_are_kept_and_the_witness_is_a_difference() -> None:
    async def scenario() -> tuple[Double, list[Round]]:
        metrics = [metrics_text(10, 1.0), metrics_text(30, 2.0), metrics_text(30, 2.0)]
        async with talking(replying(GOOD), metrics=metrics) as (double, client):
            return double, [await client.release([ASK] * 4) for _ in range(5)]

    double, rounds = asyncio.run(scenario())
    assert rounds[0].n_decodes == 20
    assert rounds[0].busy_per_decode == pytest.approx(2.5)  # (30 * 2 - 10 * 1) / 20
    assert (rounds[1].n_decodes, rounds[1].busy_per_decode) == (0, None)
    # one that looks whether somebody listens, one for questions, four for the requests
    assert double.n_connections == 6
    assert len(double.requests) == 20


def test_one_that_cannot_be_sent_holds_back_the_whole_round() -> None:
    async def scenario() -> tuple[Double, Round]:
        async with serving(replying(GOOD)) as double, Client(double.url, SPEECH) as client:
            await client.release([ASK] * 3)
            n_before = len(double.requests)
            # the third connection is gone, and no new one can be made
            await client._lanes[2].aclose()
            client._lanes[2] = _RefusedLane()  # type: ignore[call-overload]
            done = await client.release([ASK] * 3)
            assert len(double.requests) == n_before
            return double, done

    _, done = asyncio.run(scenario())
    assert [reply.status for reply in done.replies] == ["invalid"] * 3
    reasons = [reply.reason or "" for reply in done.replies]
    assert reasons[2].startswith("the request could not be sent")
    assert all("not released, as another of 3" in reason for reason in reasons[:2])


class _RefusedLane:
    async def handle_async_request(self, _: object) -> None:
        raise OSError("refused")

    async def aclose(self) -> None:
        """Have nothing to close."""


def test_a_round_asks_for_something() -> None:
    async def scenario() -> None:
        async with talking(hang) as (_, client):
            await client.release([])

    with pytest.raises(ValueError, match="no requests"):
        asyncio.run(scenario())


def test_a_mistake_of_ours_is_no_fault_of_the_server() -> None:
    class BrokenLane(_RefusedLane):
        async def handle_async_request(self, _: object) -> None:
            raise KeyError("mistake")

    async def scenario() -> None:
        async with serving(replying(GOOD)) as double, Client(double.url, SPEECH) as client:
            client._lanes.append(BrokenLane())  # type: ignore[arg-type]
            await client.complete(ASK)

    with pytest.raises(KeyError, match="mistake"):
        asyncio.run(scenario())


# --- faults -----------------------------------------------------------------------------------


WHOLE = answer(GOOD)


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (raw(WHOLE[:-20]), "went away mid-reply, after"),
        (raw(WHOLE[:10]), "went away before it replied"),
        (raw(b""), "went away before it replied"),
        (raw(b"nonsense\r\n\r\n"), "went away before it replied"),
        (replying(b'{"content": "a'), 'no JSON: {"content": "a'),
        (replying(b""), "no JSON: (empty)"),
        (replying(b"[" * 100_000), "no JSON"),
        (replying(b"x" * 5000), "…"),
        (replying({"error": {"message": "context is full"}}, 400), "HTTP 400"),
        (replying({"error": {"message": "context is full"}}, 400), "context is full"),
        (replying(b"stalled", 503), "HTTP 503: stalled"),
        (replying([GOOD]), "no JSON object"),
        (replying(b"null"), "no JSON"),
        (replying({**GOOD, "tokens_evaluated": 4}), "the server evaluated 4"),
    ],
)
def test_a_fault_is_an_invalid_reply(handler: Handler, words: str) -> None:
    async def scenario() -> Round:
        async with serving(handler) as double, Client(double.url, SPEECH) as client:
            return await client.release([ASK, ASK])

    done = asyncio.run(scenario())
    for reply in done.replies:
        assert reply.status == "invalid"
        assert reply.reason is not None
        assert words in reply.reason


def test_one_fault_leaves_the_others_as_they_are() -> None:
    async def scenario() -> Round:
        async def first_dies(double: Double, writer: asyncio.StreamWriter) -> None:
            if double.requests[-1]["seed"] == 0:
                await raw(WHOLE[:-5])(double, writer)
            writer.write(WHOLE)

        async with serving(first_dies) as double, Client(double.url, SPEECH) as client:
            asks = [Ask((1, 2, 3), None, 2, 1, False, seed=i) for i in range(3)]
            return await client.release(asks)

    done = asyncio.run(scenario())
    assert [reply.status for reply in done.replies] == ["invalid", "ok", "ok"]


def test_bytes_cut_inside_of_a_character_are_kept() -> None:
    content = b'{"content":"ab\xf0\x9f","tokens_predicted":2,"tokens_evaluated":3}'

    async def scenario() -> bytes:
        speech = Speech(token_ids=False, logprobs=False)
        async with serving(replying(content)) as double, Client(double.url, speech) as client:
            return (await client.complete(ASK)).text

    assert asyncio.run(scenario()) == b"ab\xf0\x9f"


def test_the_callers_limit_ends_a_round() -> None:
    async def scenario() -> tuple[str | None, Double]:
        async with serving(hang) as double, Client(double.url, SPEECH, stall_s=0.01) as client:
            # no counts of passes: silence alone is no reason to give up before the limit
            reply = await client.complete(ASK, limit_s=0.3)
            return reply.reason, double

    reason, double = asyncio.run(scenario())
    assert reason == "no whole reply within 0.3 s"
    assert double.questions == ["/metrics"]  # 404: not asked again


def test_a_server_that_counts_no_pass_stands_still() -> None:
    async def scenario() -> str | None:
        async with talking(hang, metrics=[metrics_text(7, 1.0)], stall_s=0.1) as (_, client):
            return (await client.complete(ASK, limit_s=600.0)).reason

    reason = asyncio.run(scenario())
    assert reason is not None
    assert reason.startswith("the server stands still")


def test_a_silent_server_that_counts_passes_is_waited_for() -> None:
    async def scenario() -> str:
        async def when_asked_often(double: Double, writer: asyncio.StreamWriter) -> None:
            while len(double.questions) < 12:  # three times as long as it may stand still
                await asyncio.sleep(0.01)
            writer.write(answer(GOOD))

        metrics = [metrics_text(7 + i, 1.0) for i in range(1000)]
        async with talking(when_asked_often, metrics=metrics, stall_s=0.2) as (_, client):
            return (await client.complete(ASK, limit_s=600.0)).status

    assert asyncio.run(scenario()) == "ok"


def test_a_cancelled_round_closes_its_connections() -> None:
    async def scenario() -> None:
        async with serving(hang) as double, Client(double.url, SPEECH) as client:
            task = asyncio.create_task(client.release([ASK] * 4))
            while len(double.requests) < 4:
                await double.arrived.wait()
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert all(task.done() for task in asyncio.all_tasks() if "_send" in repr(task))

    asyncio.run(scenario())


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def scenario() -> None:
            async with Client(url, SPEECH):
                pass

        with pytest.raises(Unreachable, match="nothing listens"):
            asyncio.run(scenario())
        with pytest.raises(Unreachable, match="nothing listens"):
            probe(url, SPEECH, 5.0)


def test_a_server_that_is_gone_later_is_an_invalid_reply() -> None:
    async def scenario() -> Round:
        async with serving(replying(GOOD)) as double:
            client = Client(double.url, SPEECH)
            await client.__aenter__()
        try:
            return await client.release([ASK, ASK])
        finally:
            await client.__aexit__()

    done = asyncio.run(scenario())
    assert {reply.status for reply in done.replies} == {"invalid"}
    assert all("could not be sent" in (reply.reason or "") for reply in done.replies)
    assert done.release_spread_ms == 0.0


# --- idle, props, probe -----------------------------------------------------------------------


def slots(*busy: bool) -> bytes:
    return answer([{"id": i, "is_processing": state} for i, state in enumerate(busy)])


def test_a_busy_slot_is_waited_for_and_named() -> None:
    async def scenario() -> None:
        waits = [slots(False, True), slots(False, True), slots(False, False)]
        async with serving(hang, slots=waits) as double, Client(double.url, SPEECH) as client:
            assert await client.wait_idle(60.0) is True
            assert double.questions == ["/slots"] * 3
        async with talking(hang, slots=[slots(False, True)]) as (double, client):
            with pytest.raises(RoutewiseError, match="slot 1 still busy after 0 s"):
                await client.wait_idle(0.0)
        async with talking(hang, metrics=[metrics_text(1, 1.0)]) as (double, client):
            assert await client.wait_idle(0.0) is True  # by the number of requests
        async with serving(hang) as double, Client(double.url, SPEECH) as client:
            assert await client.wait_idle(0.0) is False  # nobody can tell

    asyncio.run(scenario())


def test_props_are_read_where_there_are_some() -> None:
    async def scenario() -> None:
        async with talking(hang, props=[answer({"build_info": "b1"})]) as (_, client):
            assert await client.props() == {"build_info": "b1"}
        for bad in (answer(b"x"), answer([1]), answer({}, 500)):
            async with talking(hang, props=[bad]) as (_, client):
                assert await client.props() is None

    asyncio.run(scenario())


async def in_a_thread(call: Callable[[], None]) -> list[RoutewiseError]:
    """Run a synchronous call beside the event loop; return what it raised."""
    try:
        await asyncio.to_thread(call)
    except RoutewiseError as error:
        return [error]
    return []


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ({**GOOD, "tokens": [5], "tokens_predicted": 1, "tokens_evaluated": 1}, 200, None),
        (GOOD, 200, "asked 1 tokens, the server evaluated 3"),
        (b"loading", 503, "HTTP 503: loading"),
    ],
)
def test_a_probe_wants_a_tiny_completion(content: Any, status: int, words: str | None) -> None:
    if words is None:
        content["completion_probabilities"] = content["completion_probabilities"][:1]

    async def scenario() -> list[RoutewiseError]:
        async with serving(replying(content, status)) as double:
            raised = await in_a_thread(lambda: probe(double.url, SPEECH, 20.0))
            assert double.requests[0]["prompt"] == [1]
            return raised

    raised = asyncio.run(scenario())
    if words is None:
        assert raised == []
    else:
        (error,) = raised
        assert words in error.problem


def test_a_wedged_server_fails_the_probe() -> None:
    async def scenario() -> list[RoutewiseError]:
        async with serving(hang) as double:
            return await in_a_thread(lambda: probe(double.url, SPEECH, 0.2))

    (error,) = asyncio.run(scenario())
    assert "no tiny completion within 0.2 s" in error.problem


# --- metrics, addresses -----------------------------------------------------------------------


def test_metrics_are_read_whatever_their_prefix() -> None:
    text = "# TYPE fork:n_decode_total counter\nfork:n_decode_total 12\n"
    text += 'fork:x{position="0"} 3\nfork:n_busy_slots_per_decode 2.5\n'
    assert parse_metrics(text) == Metrics(12, 2.5, None)
    assert parse_metrics("llamacpp:n_decode_total 12") is None
    assert parse_metrics(text.replace("2.5", "nan")) is None
    assert parse_metrics(text.replace("12", "many")) is None
    assert parse_metrics("") is None


@given(
    n_before=st.integers(0, 10**5),
    n_round=st.integers(1, 10**4),
    width=st.integers(1, 64),
    share=st.floats(0.0, 1.0),
)
def test_the_witness_is_right_or_silent(
    n_before: int, n_round: int, width: int, share: float
) -> None:
    busy_before = round(n_before * (1 + (width - 1) * share))
    busy_round = width * n_round
    n_after = n_before + n_round

    def printed(busy: int, n: int) -> Metrics:
        return Metrics(n, float(f"{busy / max(n, 1):g}"))

    n_decodes, busy = witness_between(
        printed(busy_before, n_before), printed(busy_before + busy_round, n_after)
    )
    assert n_decodes == n_round
    assert busy is None or busy == pytest.approx(width, abs=0.05 + 1e-9)
    if n_after < 10_000 and width < 10:
        assert busy is not None


def test_the_witness_is_silent_where_it_cannot_know() -> None:
    assert witness_between(None, Metrics(5, 1.0)) == (None, None)
    assert witness_between(Metrics(5, 1.0), None) == (None, None)
    assert witness_between(Metrics(5, 1.0), Metrics(3, 1.0)) == (None, None)  # started anew
    assert witness_between(Metrics(5, 1.0), Metrics(5, 1.0)) == (0, None)
    assert witness_between(Metrics(999_990, 1.5), Metrics(1_000_000, 1.5)) == (None, None)
    assert witness_between(Metrics(900_000, 1.23457), Metrics(900_010, 1.23457)) == (10, None)


def test_an_address_is_taken_with_or_without_its_version() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert base_of(url) == "http://h:1"
    assert base_of("https://h/fork") == "https://h/fork"
    for url in ("h:1", "", "file:///x", "http://", "/v1"):
        with pytest.raises(RoutewiseError, match="no address of a server"):
            base_of(url)


# --- memory -----------------------------------------------------------------------------------


def test_requests_leave_nothing_behind() -> None:
    """Objects that the collector knows, after 400 and after 2,000 requests: as many."""

    async def scenario() -> int:
        async with serving(replying(GOOD)) as double, Client(double.url, SPEECH) as client:

            async def count_after(n_rounds: int) -> int:
                for _ in range(n_rounds):
                    await client.release([ASK] * 16)
                    double.requests.clear()
                gc.collect()
                return len(gc.get_objects())

            await count_after(5)
            before = await count_after(20)
            return await count_after(100) - before

    assert asyncio.run(scenario()) < 100
