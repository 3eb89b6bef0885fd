"""Prompts: JSONL in, token ids out.

One prompt a line::

    {"id": "greeting", "category": "dialogue", "n_tokens": 64,
     "messages": [{"role": "user", "content": "Hello!"}]}

``n_tokens`` is how many tokens to decode after the prompt. Instead of ``messages`` a line may have
``text`` (taken as it stands; special tokens written in it count) or ``token_ids`` (for models
without a tokenizer).

Messages go through the model's own chat template, rendered as transformers does it, and once:
replay and servers use the same token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from routewise.digest import digest_of
from routewise.errors import RoutewiseError

if TYPE_CHECKING:
    from routewise.gguf_check import GgufHeader

#: tokenize(text, add_special, parse_special) -> token ids; the engine's ``Model.tokenize``.
Tokenize = Callable[[str, bool, bool], list[int]]

FORMS = ("messages", "text", "token_ids")
ROLES = ("system", "user", "assistant")
KEYS = frozenset({"id", "category", "n_tokens", *FORMS})
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

#: What a template that asks for today's date is told: token ids must not change with the day.
TEMPLATE_DATE = datetime(2026, 1, 1)


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt set. Exactly one of ``messages``, ``text``, ``token_ids`` is there."""

    id: str
    category: str
    n_tokens: int
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ChatTemplate:
    """A model's own template, and the texts of the special tokens that it may name."""

    source: str
    bos_token: str = ""
    eos_token: str = ""


@dataclass(frozen=True)
class PromptPlan:
    """Token ids of one prompt set under one model's tokenizer."""

    prompts: str
    model: str
    file: Path
    build: str  # whose tokenizer
    context: int  # the least of the routes that decode them
    content: str  # digest of the prompts, in any layout
    digest: str
    path: Path


def load_prompts(path: Path) -> list[Prompt]:
    """Read a prompt set; empty lines are skipped.

    Raises RoutewiseError that names file, line and key for: a missing or empty file, bytes that
    are no UTF-8, a line that is no JSON object, an unknown or repeated key, a value of the wrong
    type, an id used twice, none or several of the three forms, and fewer than one token to decode.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise RoutewiseError(
            f"{path}: no such file", "check prompts.*.file in the study"
        ) from error
    except UnicodeDecodeError as error:
        raise RoutewiseError(f"{path}: not UTF-8 ({error})", "save the file as UTF-8") from error
    prompts: list[Prompt] = []
    first_at: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        prompt = _read_line(where, line)
        if prompt.id in first_at:
            raise RoutewiseError(
                f"{where}: id: {prompt.id!r} is already in line {first_at[prompt.id]}",
                "give each prompt an id of its own",
            )
        first_at[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise RoutewiseError(f"{path}: no prompt in it, wanted one JSON object a line")
    return prompts


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of a prompt set's meaning: layout and order of keys do not count."""
    return digest_of([vars(prompt) for prompt in prompts])


def read_template(header: GgufHeader) -> ChatTemplate | None:
    """Return the chat template in a GGUF's metadata, or None where the model brings none."""
    source = header.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])

    def special(which: str) -> str:
        token_id = header.metadata.get(f"tokenizer.ggml.{which}_token_id")
        known = isinstance(token_id, int) and 0 <= token_id < len(tokens)
        return str(tokens[token_id]) if known else ""

    return ChatTemplate(source, special("bos"), special("eos"))


def render_messages(messages: Sequence[dict[str, str]], template: ChatTemplate) -> str:
    """Return the text of a chat up to where the assistant's answer begins.

    Rendered as transformers renders (``apply_chat_template`` with ``add_generation_prompt``):
    a sandbox, ``trim_blocks``, ``lstrip_blocks``, loop controls, ``generation`` blocks,
    ``raise_exception``, ``tojson``; but ``strftime_now`` always tells :data:`TEMPLATE_DATE`.
    Thinking is off in every template that has the switch (``enable_thinking``): the text is made
    here, once, so that a server's own switch could change nothing, and all routes get the same.

    Raises RoutewiseError where the template is broken or refuses the messages.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    try:
        return environment.from_string(template.source).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            enable_thinking=False,
            bos_token=template.bos_token,
            eos_token=template.eos_token,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise RoutewiseError(
            f"the model's chat template cannot render these messages: {error}",
            'change the messages (their roles and order), or give the prompt as "text"',
        ) from error


def tokenize_prompt(
    prompt: Prompt, template: ChatTemplate | None, tokenize: Tokenize | None
) -> tuple[list[int], str | None]:
    """Return the token ids of one prompt, with a single BOS where the tokenizer puts one.

    Beside them stands the text that they came from, with the template applied, or None where the
    prompt itself gave the ids.

    Raises RoutewiseError where a form needs a template or tokenizer that the model lacks, and
    where nothing is left to decode.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids), None
    text: str | None = prompt.text
    if tokenize is None:
        raise RoutewiseError(
            f"prompt {prompt.id}: the model has no tokenizer", 'give the prompt as "token_ids"'
        )
    if prompt.text is not None:
        token_ids = tokenize(prompt.text, True, True)
    elif prompt.messages is not None:
        if template is None:
            raise RoutewiseError(
                f"prompt {prompt.id}: the model has no chat template (GGUF key "
                "tokenizer.chat_template), and the prompt has messages",
                'give the prompt as "text", or use an instruction-tuned model',
            )
        try:
            text = render_messages(prompt.messages, template)
        except RoutewiseError as error:
            raise RoutewiseError(f"prompt {prompt.id}: {error.problem}", error.hint) from error
        token_ids = _tokenize_once(text, template, tokenize)
    if not token_ids:
        raise RoutewiseError(f"prompt {prompt.id}: no tokens, wanted at least one to decode")
    return token_ids, text


def tokenize_prompts(
    prompts: Sequence[Prompt],
    template: ChatTemplate | None,
    tokenize: Tokenize | None,
    *,
    n_vocab: int | None = None,
    context: int | None = None,
) -> dict[str, list[Any]]:
    """Return the columns of the table ``prompts`` (schema/prompts), one entry a prompt, in order.

    Parameters
    ----------
    n_vocab
        Tokens in the model's vocabulary; ids are checked against it where it is given.
    context
        Tokens that a sequence may have; prompt and tokens to decode are checked against it.

    Raises RoutewiseError that names the prompt.
    """
    columns: dict[str, list[Any]] = {
        "prompt_index": [],
        "prompt_id": [],
        "category": [],
        "token_ids": [],
        "text": [],
        "n_asked": [],
        "digest": [],
    }
    for index, prompt in enumerate(prompts):
        token_ids, text = tokenize_prompt(prompt, template, tokenize)
        if n_vocab is not None and (strange := [i for i in token_ids if not 0 <= i < n_vocab]):
            raise RoutewiseError(
                f"prompt {prompt.id}: token id {strange[0]}, wanted 0 to {n_vocab - 1} (the "
                "model's vocabulary)"
            )
        if context is not None:
            check_fits(prompt.id, len(token_ids), prompt.n_tokens, context)
        columns["prompt_index"].append(index)
        columns["prompt_id"].append(prompt.id)
        columns["category"].append(prompt.category)
        columns["token_ids"].append(token_ids)
        columns["text"].append(text)
        columns["n_asked"].append(prompt.n_tokens)
        columns["digest"].append(token_digest(token_ids, prompt.n_tokens))
    return columns


def token_digest(token_ids: Sequence[int], n_asked: int) -> str:
    """Return the SHA-256 of the canonical JSON of ``[token ids, tokens to decode]``."""
    return digest_of([[int(token_id) for token_id in token_ids], int(n_asked)])


def check_fits(prompt_id: str, n_prompt: int, n_asked: int, context: int) -> None:
    """Raise RoutewiseError where a prompt and its budget are longer than the context (tokens)."""
    if n_prompt + n_asked > context:
        raise RoutewiseError(
            f"prompt {prompt_id}: {n_prompt} tokens and {n_asked} to decode make "
            f"{n_prompt + n_asked}, more than the context of {context}",
            f"raise the route's context to {n_prompt + n_asked} or more, or lower the prompt's "
            "n_tokens",
        )


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks answers for training; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tokenize_once(rendered: str, template: ChatTemplate, tokenize: Tokenize) -> list[int]:
    """Tokenize a rendered chat; a BOS that template and tokenizer both put stays only once."""
    token_ids = tokenize(rendered, True, True)
    if template.bos_token and rendered.startswith(template.bos_token):
        without = tokenize(rendered[len(template.bos_token) :], True, True)
        if without[:1] == token_ids[:1] == token_ids[1:2]:
            return without
    return token_ids


def _read_line(where: str, line: str) -> Prompt:
    try:
        found = json.loads(line, object_pairs_hook=_no_repeats)
    except json.JSONDecodeError as error:
        raise RoutewiseError(
            f"{where}: not JSON ({error.msg} at column {error.colno})",
            "write one JSON object a line",
        ) from error
    except _RepeatedKey as error:
        raise RoutewiseError(f"{where}: {error.args[0]}: the key stands twice") from error
    if not isinstance(found, dict):
        raise RoutewiseError(f"{where}: {_shown(found)}, wanted a JSON object")
    if unknown := sorted(set(found) - KEYS):
        raise RoutewiseError(
            f"{where}: {unknown[0]}: unknown key, wanted {', '.join(sorted(KEYS))}"
        )
    forms = [form for form in FORMS if form in found]
    if len(forms) != 1:
        raise RoutewiseError(
            f"{where}: {' and '.join(forms) or 'no prompt'}, wanted exactly one of "
            f"{', '.join(FORMS)}"
        )
    for key in ("id", "category"):
        value = found.get(key)
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise RoutewiseError(
                f"{where}: {key}: {_shown(value)}, wanted letters, digits, '.', '_' and '-'"
            )
    n_tokens: Any = found.get("n_tokens")
    if not _is_count(n_tokens) or n_tokens < 1:
        raise RoutewiseError(
            f"{where}: n_tokens: {_shown(n_tokens)}, wanted a whole number of at least 1"
        )
    prompt = Prompt(found["id"], found["category"], n_tokens)
    value = found[forms[0]]
    if forms[0] == "messages":
        return replace(prompt, messages=_checked_messages(where, value))
    if forms[0] == "token_ids":
        if not isinstance(value, list) or not value or not all(_is_count(item) for item in value):
            raise RoutewiseError(
                f"{where}: token_ids: {_shown(value)}, wanted a list of whole numbers from 0 on"
            )
        return replace(prompt, token_ids=tuple(value))
    if not _is_text(value) or not value:
        raise RoutewiseError(f"{where}: text: {_shown(value)}, wanted a text that is not empty")
    return replace(prompt, text=value)


def _checked_messages(where: str, value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise RoutewiseError(f"{where}: messages: {_shown(value)}, wanted a list of messages")
    for place, message in enumerate(value):
        key = f"{where}: messages[{place}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise RoutewiseError(f"{key}: {_shown(message)}, wanted the keys role and content")
        if message["role"] not in ROLES:
            raise RoutewiseError(
                f"{key}.role: {_shown(message['role'])}, wanted one of {', '.join(ROLES)}"
            )
        if not _is_text(message["content"]):
            raise RoutewiseError(f"{key}.content: {_shown(message['content'])}, wanted a text")
    return tuple(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    """Say whether this is a text that UTF-8 can hold: JSON may name half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


class _RepeatedKey(Exception):
    """A JSON object names a key twice; the argument is the key."""


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKey(key)
        found[key] = value
    return found


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=not _is_text(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
