"""Serving sweeps without a workflow: ``agree`` and ``batched`` on servers that run already.

The same client, states and comparisons as in a cell; but nothing is claimed, started or stopped,
and what else a server does meanwhile is not known beyond what it says itself. Exit codes: 0 all
replies are equal in all that was compared, log-probabilities included; 1 something differs, or a
route sends no log-probabilities; 2 a route cannot be reached or gave no usable reply, copies never
shared a pass, or the arguments are wrong.

Prompts leave this machine only with ``--allow-remote``: an address is judged by its name alone,
before anything is sent or looked up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pandas as pd
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table

from routewise.agree import AgreeSummary, agree_rows, agree_summary
from routewise.agree_verdict import judge_agree
from routewise.client import Client, Round, Unreachable, base_of, probe
from routewise.door import write_report
from routewise.errors import EXIT_AS_CLAIMED, EXIT_DIFFERS, EXIT_NOT_MEASURED, RoutewiseError
from routewise.progress import Progress
from routewise.prompt import NAME, ChatTemplate, Prompt, load_prompts, tokenize_prompts
from routewise.reply import Ask, Reply, Speech
from routewise.route import is_local
from routewise.schema.file import table_of
from routewise.schema.replies import REPLIES
from routewise.serve_verdict import (
    LOGPROB,
    ServeJudgement,
    judge_batched,
    judge_repeat,
    reply_reasons,
    witness_of,
)
from routewise.verdict import DIFFERS, EXACT, INVALID, UNOBSERVABLE

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_N_TOKENS = 64  # of a prompt that does not say how many
#: What is known of the weights behind two addresses.
WEIGHTS_UNKNOWN = "not known"
_WIDTH = 200  # room for the widest table; a narrower terminal breaks its lines itself
_LOOK_TIMEOUT_S = 10.0
#: How often a server that is busy is asked whether it still is there.
_LIFE_SIGN_S = 1.0
_PROBE_TIMEOUT_S = 60.0
_REPLY_COLUMNS = tuple(field.name for field in fields(Reply))


@dataclass(frozen=True)
class Endpoint:
    """A server that runs already: where it is, how it is spoken to, what it says of itself."""

    name: str
    url: str
    speech: Speech
    n_slots: int | None  # None where it does not say
    template: ChatTemplate | None = None

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the server's own token ids of a text. Raises RoutewiseError where it has none."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        tokens = _fetch(self.name, self.url, "/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise RoutewiseError(
                f"route {self.name}: {self.url}/tokenize gives no list of token ids",
                "give the prompts as token ids (--prompt-ids, or token_ids in the file)",
            )
        return tokens


@dataclass(frozen=True)
class Outcome:
    """What a command found: its document for JSON, and the exit code."""

    document: dict[str, Any]
    exit_code: int


# --------------------------------------------------------------------------------- command line


def add_agree_parser(commands: Commands) -> None:
    """Add the command ``agree`` to a parser's commands."""
    parser = commands.add_parser(
        "agree",
        help="how far apart servers are that run already",
        description="Ask servers that run already for the same prompts, and compare each pair.",
    )
    parser.add_argument(
        "--route",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="a route and its address; give two or more",
    )
    parser.add_argument(
        "--width",
        type=_count,
        default=1,
        help="ask also for so many copies at once on each route (default: 1, alone only)",
    )
    parser.add_argument(
        "--repeats",
        type=_count,
        default=2,
        help="rounds of each prompt; from 2 on each route is compared with itself (default: 2)",
    )
    _add_asking(parser)
    parser.set_defaults(run=run_agree)


def add_batched_parser(commands: Commands) -> None:
    """Add the command ``batched`` to a parser's commands."""
    parser = commands.add_parser(
        "batched",
        help="whether copies of a request, sent at once to a server that runs already, are equal",
        description="Ask a server that runs already for copies of each prompt at once, and compare "
        "them with each other and with the answer alone.",
    )
    parser.add_argument("--url", required=True, help="the server's address")
    parser.add_argument("--width", type=_count, default=4, help="copies at once (default: 4)")
    parser.add_argument("--rounds", type=_count, default=3, help="rounds of copies (default: 3)")
    parser.add_argument(
        "--repeats", type=_count, default=2, help="answers alone, beforehand (default: 2)"
    )
    parser.add_argument(
        "--need-witness",
        action="store_true",
        help="exit with 2 where equal copies have no witness of a shared pass",
    )
    _add_asking(parser)
    parser.set_defaults(run=run_batched)


def _add_asking(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=Path, metavar="FILE", help="prompts, one JSON object a line")
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt (repeatable)")
    add(
        "--prompt-ids",
        action="append",
        type=_ids,
        default=[],
        metavar="1,2,3",
        help="a prompt as token ids (repeatable)",
    )
    add(
        "--n-tokens",
        type=_count,
        help=f"tokens to decode (default: each prompt's own, or {DEFAULT_N_TOKENS})",
    )
    add("--n-probs", type=_count, default=10, help="length of the top lists (default: 10)")
    add(
        "--api",
        choices=("auto", "llama", "openai"),
        default="auto",
        help="how the servers are spoken to (default: as each answers)",
    )
    add("--limit-s", type=_seconds, default=600.0, help="seconds a round may take (default: 600)")
    add("--allow-remote", action="store_true", help="send prompts to other machines too")
    add("--report", type=Path, metavar="FILE", help="write every reply as a JSON report")
    add("--json", action="store_true", help="print the outcome as JSON")


def run_agree(arguments: argparse.Namespace) -> int:
    """Run the command ``agree``; return its exit code. Raises RoutewiseError for exit code 2."""
    addresses = [parse_route(text) for text in arguments.route]
    names = [name for name, _ in addresses]
    if len(names) < 2:
        raise RoutewiseError(
            f"--route: {len(names)} given, wanted two or more to compare",
            "to compare a server with itself give its address twice, under two names",
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RoutewiseError(f"--route: the name {twice[0]!r} stands twice")
    prompts = asked_prompts(arguments)
    outcome, tables = measure_agree(
        look_at_all(addresses, arguments.api, allow_remote=arguments.allow_remote),
        prompts,
        width=arguments.width,
        repeats=arguments.repeats,
        n_probs=arguments.n_probs,
        limit_s=arguments.limit_s,
    )
    _finish(arguments, outcome, tables, print_agree)
    return outcome.exit_code


def run_batched(arguments: argparse.Namespace) -> int:
    """Run the command ``batched``; return its exit code. Raises RoutewiseError for exit code 2."""
    if arguments.width < 2:
        raise RoutewiseError(f"--width: {arguments.width}, wanted 2 or more to share a batch")
    addresses = [("server", parse_url(arguments.url))]
    prompts = asked_prompts(arguments)
    outcome, tables = measure_batched(
        look_at_all(addresses, arguments.api, allow_remote=arguments.allow_remote)[0],
        prompts,
        width=arguments.width,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        n_probs=arguments.n_probs,
        limit_s=arguments.limit_s,
        need_witness=arguments.need_witness,
    )
    _finish(arguments, outcome, tables, print_batched)
    return outcome.exit_code


def _finish(
    arguments: argparse.Namespace,
    outcome: Outcome,
    tables: Mapping[str, pa.Table],
    show: Callable[[dict[str, Any], Console], None],
) -> None:
    if arguments.json:
        print(json.dumps(outcome.document, ensure_ascii=False, allow_nan=False))
    else:
        console = Console()
        console.width = max(console.width, _WIDTH)
        show(outcome.document, console)
    if arguments.report is not None:
        write_report(arguments.report, tables)


def parse_route(text: str) -> tuple[str, str]:
    """Return name and address of ``NAME=URL``. Raises RoutewiseError where it is not that."""
    name, separator, url = text.partition("=")
    if not separator or not NAME.fullmatch(name):
        raise RoutewiseError(
            f"--route: {text!r}, wanted NAME=URL, the name of letters, digits, '.', '_' and '-'",
            "such as --route cpu=http://127.0.0.1:8080",
        )
    return name, parse_url(url)


def parse_url(text: str) -> str:
    """Return a server's address without a slash or ``/v1`` at its end.

    Raises RoutewiseError where it is no address.
    """
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise RoutewiseError(
            f"{text!r} is no address of a server", "write it as http://127.0.0.1:8080"
        )
    return base_of(text)


def check_local(url: str, *, allow_remote: bool) -> None:
    """Raise RoutewiseError where an address is of another machine and that was not allowed."""
    if not allow_remote and not is_local(url):
        raise RoutewiseError(
            f"{url}: is not on this machine (localhost, 127.0.0.0/8 or ::1), and nothing was sent",
            "add --allow-remote if the prompts may leave this machine",
        )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, wanted 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}, wanted a time above 0 s")
    return value


def _ids(text: str) -> tuple[int, ...]:
    ids = tuple(int(part) for part in text.split(","))
    if any(token < 0 for token in ids):
        raise argparse.ArgumentTypeError(f"{text}, wanted token ids from 0 on")
    return ids


# -------------------------------------------------------------------------- servers and prompts


def look_at_all(
    addresses: Sequence[tuple[str, str]], api: str, *, allow_remote: bool
) -> list[Endpoint]:
    """Look at every server once. All addresses are judged before the first one is spoken to.

    Raises RoutewiseError where an address is not on this machine and that was not allowed, and
    where a server cannot be reached, still loads, or is of no known kind.
    """
    for _, url in addresses:
        check_local(url, allow_remote=allow_remote)
    return [look_at(name, url, api) for name, url in addresses]


def look_at(name: str, url: str, api: str = "auto") -> Endpoint:
    """Find out how a server is spoken to. ``api`` is auto, llama or openai.

    A llama-server is known by its ``/props``, anything else by ``/v1/models``. Of the ways that
    such a server may know, the first one that a tiny completion is answered in is taken: token ids
    in and out, or text in and no ids out.
    """
    props = _try_fetch(name, url, "/props")
    llama = props is not None and "default_generation_settings" in props
    models = None if llama or api == "llama" else _try_fetch(name, url, "/v1/models")
    if not llama and models is None and api == "auto":
        raise RoutewiseError(
            f"route {name}: {url} answers, but has neither /props nor /v1/models",
            "check the address, or say how it is spoken to with --api",
        )
    listed = (models or {}).get("data") or [{}]
    model_name = listed[0].get("id") if isinstance(listed[0], dict) else None
    ways = []
    if api == "llama" or (llama and api == "auto"):
        ways.append(Speech())
    if llama and api != "llama":
        ways.append(Speech(api="openai", model_name=model_name))
    if api != "llama":
        text = Speech(api="openai", prompt_form="text", token_ids=False, model_name=model_name)
        ways.append(text)
    said = props or {}
    template, slots = said.get("chat_template"), said.get("total_slots")
    return Endpoint(
        name,
        url,
        _first_answered(name, url, ways),
        slots if isinstance(slots, int) else None,
        ChatTemplate(template, str(said.get("bos_token", "")), str(said.get("eos_token", "")))
        if isinstance(template, str) and template
        else None,
    )


def _first_answered(name: str, url: str, ways: Sequence[Speech]) -> Speech:
    problems = []
    for speech in ways:
        try:
            probe(url, speech, _PROBE_TIMEOUT_S)
        except Unreachable as error:
            raise RoutewiseError(f"route {name}: {error.problem}", error.hint) from error
        except RoutewiseError as error:
            problems.append(error)
        else:
            return speech
    raise RoutewiseError(f"route {name}: {problems[0].problem}", problems[0].hint)


def _try_fetch(name: str, url: str, path: str) -> dict[str, Any] | None:
    """Return a JSON object that a server has under a path, or None where it has none."""
    try:
        return _fetch(name, url, path)
    except _NoDocument:
        return None


class _NoDocument(RoutewiseError):
    """A server answers, but not with a JSON object."""


def _fetch(name: str, url: str, path: str, body: Any = None) -> dict[str, Any]:
    try:
        # no proxy of the environment: what is on this machine is asked on this machine
        with httpx.Client(timeout=_LOOK_TIMEOUT_S, trust_env=False) as client:
            answer = client.get(url + path) if body is None else client.post(url + path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RoutewiseError(
            f"route {name}: {url} cannot be reached ({type(error).__name__}: {error})",
            "check that the server runs, and its address and port",
        ) from error
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise RoutewiseError(
            f"route {name}: {url}{path} answers 503: its model is loading, or it is stalled",
            "wait until it is ready, then run the same command again",
        )
    try:
        found = answer.json()
    except ValueError:
        found = None
    if answer.status_code != httpx.codes.OK or not isinstance(found, dict):
        raise _NoDocument(
            f"route {name}: {url}{path} answers {answer.status_code} without a JSON object",
            "check that this is the server that was meant",
        )
    return found


def asked_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """Return the prompts that a command line names, with their tokens to decode.

    Raises RoutewiseError where there is none, or the file is no prompt set.
    """
    prompts = [] if arguments.prompts is None else load_prompts(arguments.prompts)
    for kind, given in (("text", arguments.prompt), ("token_ids", arguments.prompt_ids)):
        for value in given:
            if not value:
                raise RoutewiseError("--prompt: a prompt is empty, wanted a text")
            prompt = Prompt(f"given-{len(prompts) + 1}", "given", DEFAULT_N_TOKENS)
            prompts.append(Prompt(**{**vars(prompt), kind: value}))
    if not prompts:
        raise RoutewiseError(
            "no prompt", "give --prompts FILE.jsonl, --prompt TEXT or --prompt-ids 1,2,3"
        )
    if arguments.n_tokens is not None:
        prompts = [Prompt(**{**vars(one), "n_tokens": arguments.n_tokens}) for one in prompts]
    return prompts


def tokenize_for(
    endpoints: Sequence[Endpoint], prompts: Sequence[Prompt]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Turn prompts into rows of the table ``prompts`` once, for all servers.

    The first server with a tokenizer makes the ids (and the text, by its chat template). What
    another server's tokenizer makes of the same prompts is compared, and said where it differs.

    Raises RoutewiseError where a server cannot be asked for a prompt: it takes text and there are
    only ids, or there are messages and no template.
    """
    by_ids = [one for one in endpoints if one.speech.prompt_form == "ids"]
    by_text = [one for one in endpoints if one.speech.prompt_form == "text"]
    for prompt in prompts:
        if by_text and prompt.token_ids is not None:
            raise RoutewiseError(
                f"prompt {prompt.id}: has token ids only, and route {by_text[0].name} takes text",
                "give the prompt as text",
            )
        if not by_ids and prompt.messages is not None:
            raise RoutewiseError(
                f"prompt {prompt.id}: has messages, and no route shows its chat template (/props)",
                'give the prompt as "text", with the template applied',
            )
    if not by_ids:
        columns: dict[str, list[Any]] = {
            "prompt_index": list(range(len(prompts))),
            "prompt_id": [one.id for one in prompts],
            "category": [one.category for one in prompts],
            "token_ids": [[] for _ in prompts],
            "text": [one.text for one in prompts],
            "n_asked": [one.n_tokens for one in prompts],
        }
        return _rows_of(columns), []
    first = by_ids[0]
    columns = tokenize_prompts(prompts, first.template, first.tokenize)
    notes = []
    for other in by_ids[1:]:
        theirs = tokenize_prompts(prompts, first.template, other.tokenize)["token_ids"]
        odd = [place for place, ids in enumerate(columns["token_ids"]) if ids != theirs[place]]
        if odd:
            notes.append(
                f"{other.name} would tokenize {len(odd)} of {len(prompts)} prompts otherwise than "
                f"{first.name} ({prompts[odd[0]].id}: {len(theirs[odd[0]])} ids, not "
                f"{len(columns['token_ids'][odd[0]])}); the ids of {first.name} were sent to all"
            )
    return _rows_of(columns), notes


def _rows_of(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# ------------------------------------------------------------------------------------- asking


def ask_all(
    endpoint: Endpoint,
    prompts: Sequence[Mapping[str, Any]],
    blocks: Sequence[tuple[int, int]],
    *,
    n_probs: int,
    limit_s: float,
) -> pa.Table:
    """Ask a server for every prompt in every block (width, rounds); return the table ``replies``.

    Copies of one prompt, prompt cache off, no slot asked for. Raises RoutewiseError where the
    server stays busy with others, gives no answer in ``limit_s`` seconds, or no usable one at all.
    """
    widest = max(width for width, _ in blocks)
    if endpoint.n_slots is not None and widest > endpoint.n_slots:
        raise RoutewiseError(
            f"route {endpoint.name}: {widest} requests at once, and the server has "
            f"{endpoint.n_slots} slots",
            f"start it with -np {widest}, or ask with a smaller --width",
        )
    rows = asyncio.run(_ask_all(endpoint, prompts, blocks, n_probs, limit_s))
    broken = [row["reason"] for row in rows if row["status"] != "ok"]
    if len(broken) == len(rows):
        raise RoutewiseError(
            f"route {endpoint.name}: none of {len(rows)} replies can be used: {broken[0]}",
            "look into the server's log, or say how it is spoken to with --api",
        )
    names = REPLIES.arrow.names
    return table_of(REPLIES, {name: [row[name] for row in rows] for name in names})


async def _ask_all(
    endpoint: Endpoint,
    prompts: Sequence[Mapping[str, Any]],
    blocks: Sequence[tuple[int, int]],
    n_probs: int,
    limit_s: float,
) -> list[dict[str, Any]]:
    total = len(prompts) * sum(rounds for _, rounds in blocks)
    progress = Progress(f"{endpoint.name}:", total, "rounds")
    rows: list[dict[str, Any]] = []
    async with Client(endpoint.url, endpoint.speech) as client:
        for width, rounds in blocks:
            for prompt in prompts:
                asks = [_ask_of(prompt, endpoint.speech, n_probs)] * width
                for index in range(rounds):
                    await _wait_idle(client, endpoint, limit_s, rows)
                    one = await client.release(asks, limit_s)
                    rows += _rows(prompt, endpoint, width, index, one)
                    if rows[-1]["status"] != "ok":
                        await _check_there(endpoint, rows)
                    progress.advance(1)
    progress.finish()
    return rows


async def _wait_idle(
    client: Client, endpoint: Endpoint, limit_s: float, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Wait until the server is idle; RoutewiseError where it stays busy, or is there no more."""
    ends_s = time.monotonic() + limit_s
    while True:
        rest_s = ends_s - time.monotonic()
        try:
            await client.wait_idle(max(0.0, min(rest_s, _LIFE_SIGN_S)))
            return
        except RoutewiseError:
            await _check_there(endpoint, rows)  # one that is gone is never idle either
            if rest_s <= _LIFE_SIGN_S:
                raise


async def _check_there(endpoint: Endpoint, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise RoutewiseError where nothing listens any more."""
    try:
        async with Client(endpoint.url, endpoint.speech):
            pass
    except Unreachable as error:
        faults = [row["reason"] for row in rows if row["status"] != "ok"]
        raise RoutewiseError(
            f"route {endpoint.name}: the server is gone after {len(rows)} requests: "
            f"{faults[0] if faults else error.problem}",
            "see its log, start it and run the same command again",
        ) from error


def _ask_of(prompt: Mapping[str, Any], speech: Speech, n_probs: int) -> Ask:
    return Ask(
        prompt_ids=tuple(prompt["token_ids"]),
        prompt_text=prompt["text"] if speech.prompt_form == "text" else None,
        n_tokens=prompt["n_asked"],
        n_probs=n_probs,
        cache_prompt=False,
        slot=None,
        seed=0,
    )


def _rows(
    prompt: Mapping[str, Any], endpoint: Endpoint, width: int, index: int, one: Round
) -> list[dict[str, Any]]:
    return [
        {
            **{name: prompt[name] for name in ("prompt_index", "prompt_id", "category")},
            "life": 0,
            "cache": "off",
            "mix": "copies",
            "prefill": "together",
            "parallel": endpoint.n_slots or width,
            "width": width,
            "round": index,
            "copy": copy,
            "role": "probe",
            **{name: getattr(reply, name) for name in _REPLY_COLUMNS},
            "released_ns": one.released_ns[copy],
            "done_ns": one.done_ns[copy],
            "release_spread_ms": one.release_spread_ms,
            "n_decodes": one.n_decodes,
            "busy_per_decode": one.busy_per_decode,
            "claim_wait_s": 0.0,
            "claim_hold_s": 0.0,
            "n_others": None,
        }
        for copy, reply in enumerate(one.replies)
    ]


# -------------------------------------------------------------------------------------- agree


def measure_agree(
    endpoints: Sequence[Endpoint],
    prompts: Sequence[Prompt],
    *,
    width: int,
    repeats: int,
    n_probs: int,
    limit_s: float,
) -> tuple[Outcome, dict[str, pa.Table]]:
    """Ask all servers for the same prompts, compare each pair, and each server with itself.

    Alone, and from width 2 on also in ``width`` copies at once. Returns outcome and replies.
    """
    asked, notes = tokenize_for(endpoints, prompts)
    blocks = [(1, repeats)] if width == 1 else [(1, repeats), (width, repeats)]
    tables = {
        one.name: ask_all(one, asked, blocks, n_probs=n_probs, limit_s=limit_s) for one in endpoints
    }
    rows = {name: table.to_pandas() for name, table in tables.items()}
    found = []
    for wide, _ in blocks:
        for place, a in enumerate(endpoints):
            if repeats > 1:
                found.append(_agree_pair(a, a, rows[a.name], rows[a.name], wide, last=repeats - 1))
            for b in endpoints[place + 1 :]:
                found.append(_agree_pair(a, b, rows[a.name], rows[b.name], wide))
    if len(endpoints) > 1:
        notes.append(
            f"weights {WEIGHTS_UNKNOWN}: what a server has loaded is not told to its clients, so a "
            "difference between two routes may be one of weights, not of arithmetic"
        )
    document = {
        "command": "agree",
        "routes": {one.name: one.url for one in endpoints},
        "prompts": len(prompts),
        "repeats": repeats,
        "notes": notes,
        "pairs": found,
        **_ending(found),
    }
    return Outcome(document, document["exit_code"]), tables


def _agree_pair(
    a: Endpoint, b: Endpoint, rows_a: pd.DataFrame, rows_b: pd.DataFrame, width: int, last: int = 0
) -> dict[str, Any]:
    """Compare the first round of ``a`` with the round ``last`` of ``b``, of one width."""
    first = rows_a[(rows_a["width"] == width) & (rows_a["round"] == 0)]
    second = rows_b[(rows_b["width"] == width) & (rows_b["round"] == last)]
    by_ids = all(
        rows.loc[rows["status"] == "ok", "token_ids"].notna().all() for rows in (first, second)
    )
    # nobody says that two addresses load other weights, and nobody that they load the same: the
    # pair is judged as it stands, and 'weights' says so
    table = agree_rows(first, second, same_weights=True, match="ids" if by_ids else "text")
    frame = table.to_pandas()
    sides = ((a.name, first), (b.name if a is not b else f"{b.name} again", second))
    witnesses = {name: witness_of(rows[rows["status"] == "ok"], width) for name, rows in sides}
    judged = judge_agree(
        frame,
        width=width,
        witnesses=witnesses,
        prompts=set(first["prompt_id"]),
        invalid_reasons=[
            f"{name}: {reason}" for name, rows in sides for reason in reply_reasons(rows)
        ],
    )
    summary = agree_summary(frame)
    return {
        "a": a.name,
        "b": b.name,
        "width": width,
        "match": "ids" if by_ids else "text",
        "weights": "same" if a is b else WEIGHTS_UNKNOWN,
        "witness": _plain(witnesses),
        **_judged(
            judged,
            n_logprobs=summary.all_replies.n_logprobs,
            blind=width > 1 and any(one["rounds_unseen"] for one in witnesses.values()),
        ),
        **_plain(_agreement(summary)),
    }


def _agreement(summary: AgreeSummary) -> dict[str, Any]:
    return {
        "all_replies": asdict(summary.all_replies),
        "same_stream": asdict(summary.same_stream),
        "divergences": [asdict(one) for one in summary.divergences],
    }


def print_agree(document: dict[str, Any], console: Console) -> None:
    """Show what ``agree`` found, one pair a row."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("pair", "width", "verdict"):
        table.add_column(title, no_wrap=True)
    for title in (
        "positions",
        "common",
        "tokens equal",
        "bits equal",
        "|dlogp| max",
        "mean",
        "median",
        "p99",
        "KL nats",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for pair in document["pairs"]:
        score = pair["all_replies"]
        table.add_row(
            f"{pair['a']} | {pair['b']}",
            str(pair["width"]),
            pair["verdict"],
            str(score["n_positions"]),
            str(score["n_common"]),
            _share(score["match_share"]),
            _share(score["exact_share"]),
            *(_number(score[f"dlogp_{name}"]) for name in ("max", "mean", "median", "p99")),
            _number(score["kl_mean_nats"]),
        )
    console.print(table)
    for pair in document["pairs"]:
        name = f"{pair['a']} | {pair['b']}, width {pair['width']}"
        for reason in pair["reasons"]:
            console.print(f"{name}: {reason}", markup=False)
        divergences = [one for one in pair["divergences"] if one["position"] is not None]
        if divergences:
            first = min(divergences, key=lambda one: one["position"])
            console.print(
                f"{name}: {len(pair['divergences'])} of {pair['all_replies']['n_replies']} replies "
                f"choose another token; first {first['prompt_id']}, position {first['position']}, "
                f"margins {_number(first['margin_a'])} and {_number(first['margin_b'])}",
                markup=False,
            )
    _print_end(document, console)


# ------------------------------------------------------------------------------------- batched


def measure_batched(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    *,
    width: int,
    rounds: int,
    repeats: int,
    n_probs: int,
    limit_s: float,
    need_witness: bool = False,
) -> tuple[Outcome, dict[str, pa.Table]]:
    """Ask for copies of each prompt at once, after answers alone; return outcome and replies."""
    asked, notes = tokenize_for([endpoint], prompts)
    blocks = [(1, repeats), (width, rounds)]
    table = ask_all(endpoint, asked, blocks, n_probs=n_probs, limit_s=limit_s)
    rows = table.to_pandas()
    found = []
    for _, group in rows.groupby("prompt_index", sort=True):
        alone, together = group[group["width"] == 1], group[group["width"] == width]
        judged = judge_batched(together, alone, width=width, prefill="together", rounds=rounds)
        again = judge_repeat(alone, "off", rounds={0: repeats})
        found.append(
            {
                "prompt_id": str(group["prompt_id"].iloc[0]),
                **_judged(
                    _by_states(judged, group),
                    n_logprobs=_count_logprobs(group),
                    blind=bool(judged.measures["witness"]["rounds_unseen"]) and not need_witness,
                ),
                **_plain(judged.measures),
                "alone": {
                    **_judged(_by_states(again, alone), n_logprobs=1),
                    **_plain(again.measures),
                },
            }
        )
    if any(one["witness"]["rounds_unseen"] for one in found):
        notes.append("no witness of shared passes: a llama-server gives one with --metrics")
    document = {
        "command": "batched",
        "url": endpoint.url,
        "width": width,
        "rounds": rounds,
        "repeats": repeats,
        "notes": notes,
        "prompts": found,
        **_ending([*found, *(one["alone"] for one in found if one["alone"]["verdict"] == DIFFERS)]),
    }
    return Outcome(document, document["exit_code"]), {endpoint.name: table}


def _count_logprobs(rows: pd.DataFrame) -> int:
    """Return how many tokens of valid replies have a log-probability."""
    valid = rows[rows["status"] == "ok"]
    return sum(status == "ok" for statuses in valid["logprob_status"] for status in statuses)


def _by_states(judged: ServeJudgement, rows: pd.DataFrame) -> ServeJudgement:
    """Compare log-probabilities also where not every token has one.

    Then a verdict on the replies is one on their tokens alone: a llama-server sends none for a
    token that ends inside of a character. But what is there must be equal too.
    """
    valid = rows[rows["status"] == "ok"]
    if judged.verdict != EXACT or judged.observable == LOGPROB or valid["state"].nunique() < 2:
        return judged
    reason = "the tokens are equal, the log-probabilities that are there are not"
    return replace(judged, verdict=DIFFERS, reasons=[reason, *judged.reasons])


def print_batched(document: dict[str, Any], console: Console) -> None:
    """Show what ``batched`` found, one prompt a row."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("prompt", "verdict", "alone"):
        table.add_column(title, no_wrap=True)
    for title in (
        "states",
        "modal",
        "Chao1",
        "next round",
        "all pairs",
        "as alone",
        "|dlogp| mean",
        "max",
        "tokens kept",
        "busy a pass",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for one in document["prompts"]:
        states, score, pairs = one["states"] or {}, one["solo"] or {}, one["pairs"]
        table.add_row(
            one["prompt_id"],
            one["verdict"],
            one["alone"]["verdict"],
            _number(states.get("observed_max"), ".0f"),
            _share(states.get("modal_share_min")),
            _number(states.get("chao1_max"), ".1f"),
            f"{pairs['consecutive_equal']} / {pairs['consecutive']}",
            f"{pairs['all_equal']} / {pairs['all']}",
            f"{score['identical']} / {score['replies']}" if score else "-",
            _number(score.get("dlogp_mean")),
            _number(score.get("dlogp_max")),
            _share(score["kept"][-1]["share"]) if score else "-",
            _number(one["witness"]["busy_per_decode_mean"], ".2f"),
        )
    console.print(
        f"{document['url']}: {document['width']} copies at once, {document['rounds']} rounds, "
        f"after {document['repeats']} answers alone",
        markup=False,
    )
    console.print(table)
    for one in document["prompts"]:
        for reason in one["reasons"]:
            console.print(f"{one['prompt_id']}: {reason}", markup=False)
        kept = [part for part in (one["solo"] or {"kept": []})["kept"] if part["tokens"]]
        if kept and one["verdict"] == DIFFERS:
            shares = ", ".join(f"{part['tokens']}: {_share(part['share'])}" for part in kept)
            console.print(f"{one['prompt_id']}: tokens kept of the first {shares}", markup=False)
    _print_end(document, console)


# ------------------------------------------------------------------------------------- outcome


def _judged(judged: ServeJudgement, *, n_logprobs: int, blind: bool = False) -> dict[str, Any]:
    """Return a judgement as plain values, with the exit code that it alone would give.

    Equal replies without log-probabilities are no equality of the routes: 1, as the known tool has
    it. Equal replies without a witness (``blind``) are equal all the same: 0, and the verdict says
    what is not known.
    """
    verdict, reasons = judged.verdict, list(judged.reasons)
    code = EXIT_AS_CLAIMED
    if verdict == DIFFERS:
        code = EXIT_DIFFERS
    elif verdict == INVALID:
        code = EXIT_NOT_MEASURED
    elif n_logprobs == 0:
        verdict, code = UNOBSERVABLE, EXIT_DIFFERS
        reasons.insert(0, "no log-probabilities")
    elif verdict == UNOBSERVABLE and not blind:
        code = EXIT_NOT_MEASURED
    return {
        "verdict": verdict,
        "observable": judged.observable,
        "reasons": reasons,
        "n": _plain(judged.n),
        "worst": _plain(judged.worst),
        "first_difference": _plain(judged.first_difference),
        "exit_code": code,
    }


#: Of several verdicts the first of these that is among them is that of all.
_WORST_FIRST = (DIFFERS, INVALID, UNOBSERVABLE, EXACT)


def _ending(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return verdict and exit code of all: a difference is one, whatever else was not measured."""
    verdicts = {one["verdict"] for one in found}
    codes = {one["exit_code"] for one in found}
    code = EXIT_DIFFERS if DIFFERS in verdicts else max(codes, default=EXIT_NOT_MEASURED)
    return {
        "verdict": next((word for word in _WORST_FIRST if word in verdicts), INVALID),
        "exit_code": code,
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: bytes as hex, NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "item"):
        return value.item()
    return value


def _print_end(document: Mapping[str, Any], console: Console) -> None:
    for note in document["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print(f"verdict: {document['verdict']} (exit code {document['exit_code']})")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, form: str = ".2g") -> str:
    return "-" if value is None else format(value, form)
