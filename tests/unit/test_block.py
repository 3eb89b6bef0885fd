"""What a block asks: who is in a round, with how many tokens, in which slot, after what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from routewise.block import FILLER, NEIGHBOUR, PROBE, Block, prepare_round, prompt_refusal, refusal
from routewise.reply import Ask
from routewise.route import Serving, route_of

SOLO = Block(0, "off", "copies", "together", 1, 1, 3)
WIDE = Block(0, "off", "copies", "together", 4, 4, 3)

PROMPTS: list[dict[str, Any]] = [
    {
        "prompt_id": f"p{index}",
        "token_ids": list(range(10 * index + 1, 10 * index + 9)),
        "text": f"text number {index}",
        "n_asked": 16,
    }
    for index in range(3)
]


def serving(**entry: Any) -> Serving:
    return route_of("r", {"build": "b", **entry}, "cpu").serving


def prepared(block: Block, round_index: int = 0, probe: int = 0, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "serving": serving(),
        "context": 64,
        "n_probs": 5,
        "n_tokens": None,
        "seed": 1,
        **options,
    }
    return prepare_round(block, round_index, probe, PROMPTS, **settings)


def test_copies_are_the_same_request_in_slots_of_their_own() -> None:
    one = prepared(WIDE)
    assert one.roles == (PROBE,) * 4
    assert [ask.slot for ask in one.asks] == [0, 1, 2, 3]
    assert len({replace(ask, slot=None) for ask in one.asks}) == 1
    assert one.before == ()
    assert not one.asks[0].cache_prompt


def test_a_probe_alone_goes_round_the_slots() -> None:
    block = replace(WIDE, width=1)
    assert [prepared(block, index).asks[0].slot for index in range(5)] == [0, 1, 2, 3, 0]


def test_neighbours_are_other_prompts_and_never_the_probe() -> None:
    for probe in range(3):
        one = prepared(replace(WIDE, mix="neighbours"), probe=probe)
        assert one.roles == (PROBE, NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
        assert one.asks[0].prompt_ids == tuple(PROMPTS[probe]["token_ids"])
        assert all(ask.prompt_ids != one.asks[0].prompt_ids for ask in one.asks[1:])


def test_a_prompt_at_the_end_of_the_set_changes_no_neighbours() -> None:
    block = replace(WIDE, mix="neighbours", width=3)
    more = [*PROMPTS, {**PROMPTS[0], "prompt_id": "new", "token_ids": [99]}]
    options: dict[str, Any] = {
        "serving": serving(), "context": 64, "n_probs": 5, "n_tokens": None, "seed": 1,
    }  # fmt: skip
    for probe in range(3):
        before = prepare_round(block, 0, probe, PROMPTS, **options)
        assert prepare_round(block, 0, probe, more, **options) == before


def test_fillers_have_other_lengths_and_budgets_within_the_context() -> None:
    one = prepared(replace(WIDE, mix="fillers"), context=20)
    assert one.roles == (PROBE, FILLER, FILLER, FILLER)
    assert len({len(ask.prompt_ids) for ask in one.asks}) == 4
    assert len({ask.n_tokens for ask in one.asks[1:]}) > 1
    assert all(len(ask.prompt_ids) + ask.n_tokens <= 20 for ask in one.asks[1:])


def test_the_budget_is_the_lesser_of_the_sweep_s_and_the_prompt_s() -> None:
    assert prepared(SOLO).asks[0].n_tokens == 16
    assert prepared(SOLO, n_tokens=4).asks[0].n_tokens == 4
    assert prepared(SOLO, n_tokens=400).asks[0].n_tokens == 16


def beginnings_differ(first: Ask, second: Ask) -> bool:
    return first.prompt_ids[0] != second.prompt_ids[0]


def test_a_cold_round_displaces_the_prompt_first() -> None:
    for index in range(2):
        one = prepared(replace(SOLO, cache="cold"), index)
        assert len(one.before) == 1
        assert beginnings_differ(one.before[0], one.asks[0])
        assert one.asks[0].cache_prompt


def test_a_warm_block_primes_the_cache_once() -> None:
    block = replace(SOLO, cache="warm")
    (primer,) = prepared(block, 0).before
    assert primer.prompt_ids == prepared(block, 0).asks[0].prompt_ids
    assert primer.cache_prompt
    assert prepared(block, 1).before == ()


def test_apart_prefills_each_slot_alone_anew() -> None:
    block = replace(WIDE, prefill="apart")
    for index in range(2):
        one = prepared(block, index)
        assert len(one.before) == 8
        for place, ask in enumerate(one.asks):
            displacing, primer = one.before[2 * place : 2 * place + 2]
            assert displacing.slot == primer.slot == ask.slot
            assert beginnings_differ(displacing, ask)
            assert primer.prompt_ids == ask.prompt_ids
            assert primer.cache_prompt
            assert ask.cache_prompt
            assert primer.n_tokens == 1


def test_a_prompt_of_one_token_can_be_displaced() -> None:
    alone = [{**PROMPTS[0], "token_ids": [5]}]
    one = prepare_round(
        replace(SOLO, cache="cold"), 0, 0, alone,
        serving=serving(), context=64, n_probs=0, n_tokens=None, seed=1,
    )  # fmt: skip
    assert one.before[0].prompt_ids != one.asks[0].prompt_ids


def test_a_route_without_ids_is_sent_the_text_and_names_no_slot() -> None:
    one = prepared(WIDE, serving=serving(api="openai", prompt_form="text"))
    assert {ask.prompt_text for ask in one.asks} == {"text number 0"}
    assert {ask.prompt_ids for ask in one.asks} == {
        ()
    }  # how many tokens it makes is its own affair
    assert {ask.slot for ask in one.asks} == {None}


def test_a_text_can_be_displaced() -> None:
    route = serving(api="openai", prompt_form="text")
    one = prepared(replace(SOLO, cache="cold"), serving=route)
    assert one.before[0].prompt_text
    assert one.before[0].prompt_text[0] != str(one.asks[0].prompt_text)[0]


def test_a_route_without_logprobs_is_asked_for_none() -> None:
    assert prepared(SOLO, serving=serving(logprobs=False)).asks[0].n_probs == 0


@pytest.mark.parametrize(
    ("block", "entry", "word"),
    [
        (WIDE, {"parallel_max": 1}, "at most 1 requests"),
        (replace(SOLO, cache="warm"), {"prompt_cache": "none"}, "cache"),
        (SOLO, {"prompt_cache": "fixed"}, "cache"),
        (replace(WIDE, prefill="apart"), {"slots": False}, "slots"),
        (replace(WIDE, prefill="apart"), {"api": "openai"}, "slots"),
        (replace(WIDE, prefill="apart"), {"prompt_cache": "none"}, "slots"),
    ],
)
def test_what_a_route_cannot_do_is_refused_with_the_reason(
    block: Block, entry: dict[str, Any], word: str
) -> None:
    assert word in str(refusal(block, serving(**entry)))
    assert refusal(block, serving()) is None


def test_an_endpoint_is_not_restarted() -> None:
    endpoint = route_of("r", {"endpoint": "http://localhost:1"}, None).serving
    assert refusal(SOLO, endpoint) is None
    assert "restarted" in str(refusal(replace(SOLO, life=1), endpoint))


def test_what_a_prompt_set_lacks_is_said() -> None:
    alone = PROMPTS[:1]
    mixed = replace(WIDE, mix="neighbours")
    assert "two prompts" in prompt_refusal(mixed, serving(), alone)
    assert prompt_refusal(mixed, serving(), PROMPTS) == ""
    assert prompt_refusal(WIDE, serving(), alone) == ""
    bare = [*PROMPTS, {**PROMPTS[0], "prompt_id": "bare", "text": None}]
    assert "bare" in prompt_refusal(SOLO, serving(prompt_form="text"), bare)
    assert prompt_refusal(SOLO, serving(), bare) == ""
