"""Blocks: what a serving cell asks its server for, round by round.

A block has ``rounds`` rounds of ``width`` requests in flight. Copy 0 is always the *probe*, the
prompt that the block's rows belong to; beside it run copies of it, its neighbours (other prompts)
or fillers (cuts of other prompts, of other lengths and budgets).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from routewise.reply import Ask
from routewise.route import CACHE_MODES, Serving

PROBE, NEIGHBOUR, FILLER = "probe", "neighbour", "filler"

#: Length of a filler's prompt and its tokens to decode, as shares of those of what it is cut from.
_FILLER_SHARES = ((0.25, 0.5), (0.5, 1.5), (0.75, 0.25), (1.0, 2.0))


@dataclass(frozen=True)
class Block:
    """One way of asking: ``rounds`` rounds of ``width`` requests on a server of ``parallel`` slots.

    ``cache`` is off, cold or warm (what the prompt cache holds of the prompt); ``mix`` copies,
    neighbours or fillers; ``prefill`` together, or apart: each slot has its prompt decoded alone
    before the round, so that the round shares single-token passes only.
    """

    life: int
    cache: str
    mix: str
    prefill: str
    parallel: int
    width: int
    rounds: int

    def document(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self)

    @property
    def name(self) -> str:
        """Return the block's name for people."""
        if self.width == 1 and self.parallel == 1 and self.prefill == "together":
            return f"life {self.life}, cache {self.cache}"
        return f"p{self.parallel}.w{self.width}.{self.mix}.{self.prefill}"


@dataclass(frozen=True)
class Prepared:
    """One round's requests, in the order of their copies, and what goes before them.

    ``before`` is sent one by one and waited for; its replies are no rows.
    """

    before: tuple[Ask, ...]
    asks: tuple[Ask, ...]
    roles: tuple[str, ...]


def refusal(block: Block, serving: Serving) -> str | None:
    """Return why a route cannot do a block, or None where it can."""
    if serving.parallel_max is not None and block.parallel > serving.parallel_max:
        return (
            f"the route serves at most {serving.parallel_max} requests at once (parallel_max), "
            f"wanted {block.parallel}"
        )
    if block.cache not in CACHE_MODES[serving.prompt_cache]:
        return (
            f"the route's prompt cache is declared as {serving.prompt_cache!r}: it cannot be asked "
            f"for with the cache {block.cache}"
        )
    if block.prefill == "apart" and not (serving.slots and serving.prompt_cache != "none"):
        return "a prompt cannot be prefilled apart: the route has no slots with a prompt cache"
    if serving.endpoint is not None and block.life > 0:
        return "an endpoint that runs already is not restarted"
    return None


def prompt_refusal(block: Block, serving: Serving, prompts: Sequence[Mapping[str, Any]]) -> str:
    """Return why a prompt set does not do for a block; '' where it does."""
    if block.mix != "copies" and block.width > 1 and len(prompts) < 2:
        return f"the mix {block.mix!r} needs two prompts or more, the set has {len(prompts)}"
    if serving.speech.prompt_form == "text":
        bare = [prompt["prompt_id"] for prompt in prompts if prompt["text"] is None]
        if bare:
            return f"the route takes text, and prompt {bare[0]} is given as token ids"
    return ""


def prepare_round(
    block: Block,
    round_index: int,
    probe_index: int,
    prompts: Sequence[Mapping[str, Any]],
    *,
    serving: Serving,
    context: int,
    n_probs: int,
    n_tokens: int | None,
    seed: int,
) -> Prepared:
    """Return the requests of one round of a block.

    ``prompts`` are rows of the table ``prompts``; ``context`` is what a slot holds, in tokens.
    """
    probe = prompts[probe_index]
    budget = min(n_tokens or probe["n_asked"], probe["n_asked"])
    cached = block.cache != "off" or block.prefill == "apart"
    first_slot = round_index % block.parallel if block.width == 1 else 0

    def ask(copy: int, ids: Sequence[int], text: str | None, n: int) -> Ask:
        as_text = serving.speech.prompt_form == "text"
        return Ask(
            prompt_ids=() if as_text else tuple(ids),  # its own tokenizer may count otherwise
            prompt_text=text if as_text else None,
            n_tokens=n,
            n_probs=n_probs if serving.speech.logprobs else 0,
            cache_prompt=cached,
            slot=first_slot + copy if serving.slots else None,
            seed=seed,
        )

    asks = [ask(0, probe["token_ids"], probe["text"], budget)]
    roles = [PROBE]
    # in the set's own order: a prompt added at its end changes no neighbour
    others = [*prompts[:probe_index], *prompts[probe_index + 1 :]]
    for copy in range(1, block.width):
        if block.mix == "copies":
            asks.append(replace(asks[0], slot=first_slot + copy if serving.slots else None))
            roles.append(PROBE)
            continue
        other = others[(copy - 1) % len(others)]
        ids, text = list(other["token_ids"]), other["text"]
        n = min(n_tokens or other["n_asked"], other["n_asked"])
        if block.mix == "fillers":
            share, more = _FILLER_SHARES[(copy - 1) % len(_FILLER_SHARES)]
            ids = ids[: max(1, round(len(ids) * share))]
            text = None if text is None else text[: max(1, round(len(text) * share))]
            n = max(1, min(round(n * more), context - len(ids)))
        asks.append(ask(copy, ids, text, n))
        roles.append(NEIGHBOUR if block.mix == "neighbours" else FILLER)
    return Prepared(_before(block, round_index, asks), tuple(asks), tuple(roles))


def _before(block: Block, round_index: int, asks: Sequence[Ask]) -> tuple[Ask, ...]:
    """Return what brings the prompt cache into the state that the block names."""
    alone = [replace(ask, n_tokens=1, n_probs=0) for ask in asks]
    if block.prefill == "apart":
        # another prompt first: what a slot kept of its last round is no prefill of this one
        return tuple(one for ask in alone for one in (_displacing(ask), ask))
    if block.cache == "cold":
        return tuple(_displacing(ask) for ask in alone)
    if block.cache == "warm" and round_index == 0:
        return tuple(alone)
    return ()


def _displacing(ask: Ask) -> Ask:
    """Return a request that leaves nothing of ``ask``'s prompt in its slot's cache.

    Its first token is another one of the same prompt, so that the two have no common beginning.
    """
    if ask.prompt_text is not None:
        return replace(ask, prompt_text="?" if ask.prompt_text.startswith("~") else "~")
    first = ask.prompt_ids[0]
    other = next((token for token in ask.prompt_ids if token != first), first + 1)
    return replace(ask, prompt_ids=(other,))
