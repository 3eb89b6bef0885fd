"""Prompt sets, chat templates and token ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from routewise.errors import RoutewiseError
from routewise.gguf_check import check_gguf
from routewise.prompt import (
    ChatTemplate,
    Prompt,
    load_prompts,
    prompts_digest,
    read_template,
    render_messages,
    token_digest,
    tokenize_prompt,
    tokenize_prompts,
)
from routewise.schema.file import table_of
from routewise.schema.study import TABLES
from small_gguf import make_gguf

DEMO = Path(__file__).parents[2] / "config" / "prompts" / "demo.jsonl"
HELLO = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, Any] = {"id": "a", "category": "code", "n_tokens": 3, "text": "x"}
CHAT: dict[str, Any] = {"id": "a", "category": "chat", "n_tokens": 1, "messages": HELLO}


def write_lines(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def by_letter(text: str, add_special: bool, parse_special: bool) -> list[int]:
    """A tokenizer of one id a letter, BOS (id 1) first; "<s>" is the text of the BOS."""
    ids = [ord(letter) for letter in text.replace("<s>", "\x01")]
    return [1, *ids] if add_special else ids


def without_bos(text: str, add_special: bool, parse_special: bool) -> list[int]:
    return by_letter(text, False, parse_special)


# ------------------------------------------------------------------------------------ reading


def test_three_forms_are_read_in_order(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        GOOD,
        "",
        {"id": "b", "category": "chat", "n_tokens": 1, "messages": HELLO},
        {"id": "c", "category": "ids", "n_tokens": 2, "token_ids": [4, 0, 7]},
    )
    assert load_prompts(path) == [
        Prompt("a", "code", 3, text="x"),
        Prompt("b", "chat", 1, messages=tuple(HELLO)),
        Prompt("c", "ids", 2, token_ids=(4, 0, 7)),
    ]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("{", "not JSON"),
        ("[1]", "wanted a JSON object"),
        ('{"id": "a", "id": "b", "n_tokens": 1, "text": "x"}', "id: the key stands twice"),
        (GOOD | {"n_token": 3}, "n_token: unknown key"),
        (GOOD | {"messages": HELLO}, "messages and text, wanted exactly one"),
        ({"id": "a", "category": "c", "n_tokens": 1}, "no prompt, wanted exactly one"),
        (GOOD | {"n_tokens": 0}, "n_tokens: 0, wanted a whole number of at least 1"),
        (GOOD | {"n_tokens": -4}, "n_tokens: -4"),
        (GOOD | {"n_tokens": True}, "n_tokens: true"),
        (GOOD | {"n_tokens": 2.0}, "n_tokens: 2.0"),
        (GOOD | {"n_tokens": "64"}, 'n_tokens: "64"'),
        ({key: GOOD[key] for key in GOOD if key != "n_tokens"}, "n_tokens: nothing"),
        (GOOD | {"id": "a/b"}, 'id: "a/b"'),
        (GOOD | {"id": 7}, "id: 7"),
        (GOOD | {"category": ""}, 'category: ""'),
        (GOOD | {"text": ""}, 'text: ""'),
        (GOOD | {"text": "half \ud800"}, "text: "),
        ({"id": "a", "category": "c", "n_tokens": 1, "token_ids": []}, "token_ids: []"),
        ({"id": "a", "category": "c", "n_tokens": 1, "token_ids": [-1]}, "token_ids: [-1]"),
        (CHAT | {"messages": []}, "messages: []"),
        (
            CHAT | {"messages": [{"role": "owl", "content": ""}]},
            'messages[0].role: "owl", wanted one of system, user, assistant',
        ),
        (CHAT | {"messages": [*HELLO, {"role": "user"}]}, "messages[1]: "),
        (CHAT | {"messages": [{"role": "user", "content": 3}]}, "messages[0].content: 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, wanted: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", GOOD | {"id": "first"}, line)
    with pytest.raises(RoutewiseError) as caught:
        load_prompts(path)
    assert caught.value.problem.startswith(f"{path}:2: ")
    assert wanted in caught.value.problem


def test_an_id_used_twice_names_both_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", GOOD, GOOD | {"id": "b"}, GOOD)
    with pytest.raises(RoutewiseError, match=r"p\.jsonl:3: id: 'a' is already in line 1"):
        load_prompts(path)


def test_an_empty_missing_or_binary_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError, match="no prompt in it"):
        load_prompts(write_lines(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(RoutewiseError, match="no such file"):
        load_prompts(tmp_path / "absent.jsonl")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(RoutewiseError, match="not UTF-8"):
        load_prompts(binary)


def test_the_digest_of_a_set_is_that_of_its_meaning(tmp_path: Path) -> None:
    turned = {key: GOOD[key] for key in reversed(GOOD)}
    plain = prompts_digest(load_prompts(write_lines(tmp_path / "a.jsonl", GOOD)))
    assert prompts_digest(load_prompts(write_lines(tmp_path / "b.jsonl", "", turned))) == plain
    other = GOOD | {"n_tokens": 4}
    assert prompts_digest(load_prompts(write_lines(tmp_path / "c.jsonl", other))) != plain


# ---------------------------------------------------------------------------------- templates


def test_blocks_are_trimmed_and_loops_controlled_as_in_transformers() -> None:
    template = ChatTemplate(
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "  {% if true %}\n"
        "[{{ m.role }}]{{ m | tojson }}\n"
        "  {% endif %}\n"
        "{% endfor %}\n"
        "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}",
        "<s>",
        "</s>",
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é<"}]
    rendered = render_messages(messages, template)
    assert rendered == '[user]{"role": "user", "content": "é<"}\n<s></s>True'


def test_a_generation_block_is_its_content() -> None:
    template = ChatTemplate("{% generation %}{{ messages[0].content }}!{% endgeneration %}.")
    assert render_messages(HELLO, template) == "Hello!."


def test_the_date_in_a_template_is_pinned() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert render_messages(HELLO, template) == "01 Jan 2026"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages[0]['content'] + 3 }}", "cannot render"),
    ],
)
def test_a_template_that_refuses_breaks_or_escapes_is_an_error(source: str, wanted: str) -> None:
    prompt = Prompt("greet", "chat", 1, messages=tuple(HELLO))
    with pytest.raises(RoutewiseError, match=wanted) as caught:
        tokenize_prompt(prompt, ChatTemplate(source), by_letter)
    assert caught.value.problem.startswith("prompt greet: ")


def test_the_template_and_its_tokens_come_from_the_gguf(tmp_path: Path) -> None:
    header = check_gguf(make_gguf(tmp_path / "tiny.gguf", tokenizer="tiny"))
    template = read_template(header)
    assert template is not None
    assert (template.bos_token, template.eos_token) == ("<|endoftext|>", "<|im_end|>")
    rendered = render_messages(HELLO, template)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert read_template(check_gguf(make_gguf(tmp_path / "bare.gguf"))) is None


# ---------------------------------------------------------------------------------- token ids


@pytest.mark.parametrize("in_template", [True, False])
def test_one_bos_whether_or_not_the_template_writes_it(in_template: bool) -> None:
    start = "{{ bos_token }}" if in_template else ""
    template = ChatTemplate(start + "{{ messages[0].content }}", "<s>")
    prompt = Prompt("a", "chat", 1, messages=tuple(HELLO))
    token_ids, text = tokenize_prompt(prompt, template, by_letter)
    assert token_ids == [1, *map(ord, "Hello")]
    assert text == ("<s>Hello" if in_template else "Hello")


def test_a_bos_that_only_the_template_writes_stays() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", "<s>")
    prompt = Prompt("a", "chat", 1, messages=tuple(HELLO))
    assert tokenize_prompt(prompt, template, without_bos)[0] == [1, *map(ord, "Hello")]


def test_columns_fit_the_declared_table() -> None:
    prompts = [Prompt("a", "code", 3, text="hi"), Prompt("b", "ids", 5, token_ids=(2, 9))]
    columns = tokenize_prompts(prompts, None, without_bos, n_vocab=256, context=7)
    table = table_of(TABLES["prompts"], columns)
    assert table["token_ids"].to_pylist() == [[104, 105], [2, 9]]
    assert table["n_asked"].to_pylist() == [3, 5]
    assert table["digest"].to_pylist() == [token_digest([104, 105], 3), token_digest([2, 9], 5)]


def test_the_digest_covers_ids_their_order_and_the_budget() -> None:
    digests = [token_digest(ids, n) for ids, n in [([1, 2], 3), ([2, 1], 3), ([1, 2], 4), ([1], 3)]]
    assert len(set(digests)) == len(digests)


def test_a_prompt_one_token_too_long_names_its_numbers() -> None:
    prompts = [Prompt("short", "c", 1, text="x"), Prompt("big", "c", 6, text="four")]
    assert tokenize_prompts(prompts, None, without_bos, context=10)["prompt_index"] == [0, 1]
    with pytest.raises(RoutewiseError) as caught:
        tokenize_prompts(prompts, None, without_bos, context=9)
    for part in ("prompt big", "4 tokens", "6 to decode", "10", "context of 9"):
        assert part in caught.value.problem


def test_what_a_model_lacks_is_said() -> None:
    chat = Prompt("a", "chat", 1, messages=tuple(HELLO))
    with pytest.raises(RoutewiseError, match="prompt a: the model has no chat template"):
        tokenize_prompt(chat, None, by_letter)
    with pytest.raises(RoutewiseError, match="prompt a: the model has no tokenizer"):
        tokenize_prompt(chat, None, None)
    with pytest.raises(RoutewiseError, match="prompt a: no tokens"):
        tokenize_prompt(chat, ChatTemplate(""), without_bos)
    with pytest.raises(RoutewiseError, match="prompt b: token id 320, wanted 0 to 319"):
        tokenize_prompts([Prompt("b", "c", 1, token_ids=(320,))], None, None, n_vocab=320)


# ------------------------------------------------------------------------------- the demo set


def test_the_demo_set_is_eight_prompts_of_distinct_categories() -> None:
    prompts = load_prompts(DEMO)
    assert len(prompts) == len({prompt.category for prompt in prompts}) == 8
    long = [prompt for prompt in prompts if prompt.n_tokens != 64]
    assert [prompt.id for prompt in long] == ["long-report"]
    # 239 tokens under the demo model's tokenizer: decoding crosses 256, 384 and 512.
    assert 239 + long[0].n_tokens >= 512 + 20


def test_prompts_that_were_edited_after_planning_are_refused(
    tmp_path: Path, repository: Path
) -> None:
    """Before a model is opened: their tokens would stand under the digest of others."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "category": "text", "n_tokens": 8, "text": "two"}\n')
    script = repository / "workflow/scripts/tokenize_prompts.py"
    output = tmp_path / "prompts.parquet"
    done = subprocess.run(
        [
            *(sys.executable, str(script), "--prompts", str(file), "--model", "no.gguf"),
            *("--library-dir", "no", "--digest", "0" * 64, "--output", str(output)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "was edited after it was planned" in done.stderr
    assert not output.exists()
