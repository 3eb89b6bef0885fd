"""Verdicts on what one route's server said: repeated requests, and requests in a batch.

Only ``exact`` is a pass, and it takes: replies at all, none of them invalid, every one of them
equal, and a witness that what was asked for really happened. ``exact`` holds for the weakest
observable of all the replies that meet (chosen logprob, token ids, text) and no stronger one, and
``differs`` for what showed it; a verdict names its observable.

The unit is the reply: it has its reference's answer or it has not. Positions are positions of a
*prompt*: however many copies and rounds there were, a token position is counted once, and it
differs where it differs in any reply. Beyond the first token that differs the replies have
different histories, and nothing is compared; so a share of positions flatters an answer that went
another way, and is made of the positions of two routes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from routewise.client import SHARED_SLOTS_MIN, SPARE_SLOTS_MAX
from routewise.state import (
    BLOCK,
    SoloScore,
    count_consecutive,
    count_cross_pairs,
    count_pairs,
    count_states,
    score_against,
    weakest_observable,
)
from routewise.verdict import (
    DIFFERS,
    EXACT,
    INVALID,
    UNOBSERVABLE,
    UNSUPPORTED,
    Judgement,
)

LOGPROB = "chosen logprob"
TOKEN_IDS = "token ids"
TEXT = "text"

#: What a receipt calls the observables of replies, the strongest first.
OBSERVABLES = {"chosen-logprob": LOGPROB, "token-ids": TOKEN_IDS, "text": TEXT}

#: Status of a logprob that is a sign of something broken, and not just of nothing to compare.
BROKEN_STATUSES = ("nan", "not_float32")

#: Share of tokens with a logprob from which equal replies are called equal in their logprobs. Below
#: it too few positions could have shown a difference, and the tokens alone are claimed.
LOGPROB_SHARE_MIN = 0.9

#: Prompt tokens that even an empty prompt cache gives: the token that begins every sequence.
COLD_TOKENS_MAX = 1

#: What to try where a server takes prompts from a cache that should not have them.
CACHE_HINT = (
    "a llama-server that you start yourself needs --cache-ram 0 --no-cache-idle-slots "
    "--slot-prompt-similarity 0"
)

_PROBE = "probe"
_IDENTITY = [*BLOCK, "prompt_index", "round", "copy"]
_RECORD = [
    *("prompt_index", "prompt_id", "life", "round", "copy", "status", "observable", "text"),
    *("token_ids", "token_bytes", "logprobs", "logprob_bits", "logprob_status"),
    *("state", "tokens_hash", "busy_per_decode"),
]


@dataclass(frozen=True)
class ServeJudgement(Judgement):
    """A judgement of replies, with what was compared and the numbers behind it."""

    observable: str = TEXT
    measures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """A reply beside its reference: both as lists of positions with one history.

    ``n`` positions were compared: up to the first token that differs, with it. ``moved`` says which
    differ in token or bits, ``dlogp`` is |Δ logprob| where token and history are equal (else NaN),
    and ``flip`` the position of the first token that differs, or None.
    """

    n: int
    moved: np.ndarray
    dlogp: np.ndarray
    flip: int | None

    @property
    def equal(self) -> bool:
        """Say whether no position differs."""
        return not bool(self.moved.any())


Reply = Mapping[str, Any]


def observable_of(rows: pd.DataFrame) -> str:
    """Return the weakest observable of replies, in the words of a receipt.

    A reply without a single token shows nothing by itself, and does not count where others do.
    """
    speaking = rows[rows["n_received"] > 0]
    weakest = weakest_observable(speaking["observable"] if len(speaking) else rows["observable"])
    return OBSERVABLES[weakest or "text"]


def answer_keys(group: pd.DataFrame) -> list[bytes]:
    """Return what tells the answers of replies to one request apart: their states.

    Where some replies show less than others it is their tokens, or their text.
    """
    found = set(group["observable"])
    if len(found) == 1:
        return [bytes(state) for state in group["state"]]
    column = "text" if "text" in found else "tokens_hash"
    return [bytes(value) for value in group[column]]


def same_answer(reference: Reply, reply: Reply, compared: Comparison) -> bool:
    """Say whether two replies are one answer, as far as both show it."""
    if reference["observable"] == reply["observable"]:
        return bool(reference["state"] == reply["state"])
    return compared.equal


def compare_replies(reference: Reply, reply: Reply) -> Comparison:
    """Compare two replies (rows of schema/replies) position by position.

    A reply that ends earlier differs at the position after its end. Logprobs differ where their
    bits do, and, of two replies with one observable, where their status does; of two that show
    unlike much, only logprobs that both have count. Where one shows text alone a position is a
    byte of it.
    """
    alike = reference["observable"] == reply["observable"]
    is_text = "text" in (reference["observable"], reply["observable"])
    left, right = _tokens(reference, reply, is_text)
    n_both = min(len(left), len(right))
    differing = [place for place in range(n_both) if left[place] != right[place]]
    if differing:
        flip: int | None = differing[0]
    else:
        flip = None if len(left) == len(right) else n_both
    n_equal = n_both if flip is None else flip
    n = n_equal + (flip is not None)
    moved = np.zeros(n, dtype=bool)
    dlogp = np.full(n, np.nan)
    if not is_text:
        bits = [np.asarray(row["logprob_bits"], dtype=float) for row in (reference, reply)]
        statuses = [np.asarray(row["logprob_status"], dtype=object) for row in (reference, reply)]
        values = [np.asarray(row["logprobs"], dtype=float) for row in (reference, reply)]
        known = min(n_equal, *(len(one) for one in (*bits, *statuses, *values)))
        one, two = (found[:known] for found in bits)
        said_one, said_two = (found[:known] for found in statuses)
        both = (said_one == "ok") & (said_two == "ok")
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        moved[:known] = ~same | (said_one != said_two) if alike else both & ~same
        moved[known:n_equal] = alike and len(bits[0]) != len(bits[1])
        dlogp[:known] = np.where(both, np.abs(values[0][:known] - values[1][:known]), np.nan)
    if flip is not None:
        moved[flip] = True
    return Comparison(n, moved, dlogp, flip)


def _tokens(reference: Reply, reply: Reply, is_text: bool) -> tuple[list[Any], list[Any]]:
    """Return both replies' tokens in the same currency: ids, else bytes, else those of the text.

    The tokens of a reply that shows text alone are no more than a guess, if it has any.
    """
    pair = (reference, reply)
    for column in ("token_ids", "token_bytes") if not is_text else ():
        if all(row[column] is not None for row in pair):
            left, right = ([_plain(token) for token in row[column]] for row in pair)
            return left, right
    return list(bytes(reference["text"])), list(bytes(reply["text"]))


def _plain(token: Any) -> int | bytes:
    if token is None or isinstance(token, bytes):
        return token or b""  # a token whose bytes the server does not tell has none
    return int(token)


class _Positions:
    """Collects comparisons into counts over distinct prompt positions, worst and first."""

    def __init__(self) -> None:
        self._moved: dict[str, np.ndarray] = {}
        self._flipped: set[tuple[str, int]] = set()
        self.worst: dict[str, Any] | None = None
        self.first: dict[str, Any] | None = None
        self.bits_moved = False  # somewhere a logprob differs, and not the token

    def add(self, row: Reply, compared: Comparison) -> None:
        """Count one reply's comparison with its reference."""
        prompt = str(row["prompt_id"])
        known = self._moved.get(prompt, np.zeros(0, dtype=bool))
        merged = np.zeros(max(len(known), compared.n), dtype=bool)
        merged[: len(known)] |= known
        merged[: compared.n] |= compared.moved
        self._moved[prompt] = merged
        if compared.flip is not None:
            self._flipped.add((prompt, compared.flip))
        if compared.equal:
            return
        self.bits_moved |= int(compared.moved.sum()) > (compared.flip is not None)
        place = int(np.flatnonzero(compared.moved)[0])
        if self.first is None or place < self.first["position"]:
            self.first = {**_place(row, place), "token_differs": place == compared.flip}
        seen = compared.dlogp[np.isfinite(compared.dlogp)]
        if seen.size and (self.worst is None or float(seen.max()) > self.worst["dlogp_max"]):
            at = int(np.nanargmax(np.where(np.isfinite(compared.dlogp), compared.dlogp, -1.0)))
            self.worst = {**_place(row, at), "dlogp_max": float(seen.max())}

    @property
    def n(self) -> dict[str, int]:
        """Return prompts, positions, differing and flips."""
        return {
            "prompts": len(self._moved),
            "positions": sum(len(moved) for moved in self._moved.values()),
            "differing": sum(int(moved.sum()) for moved in self._moved.values()),
            "flips": len(self._flipped),
        }


def _place(row: Reply, position: int) -> dict[str, Any]:
    place = {"prompt_id": str(row["prompt_id"]), "position": position}
    return place | {name: int(row[name]) for name in ("life", "round", "copy") if name in row}


# ------------------------------------------------------------------------- what is against replies


def reply_reasons(rows: pd.DataFrame) -> list[str]:
    """Return why replies cannot be believed whatever they say; empty where they can.

    One invalid reply is enough: an answer that was not given is not an equal one.
    """
    reasons = []
    broken = rows[rows["status"] != "ok"]
    if len(broken):
        reasons.append(
            f"{len(broken)} of {len(rows)} replies are invalid: {broken['reason'].iloc[0]}"
        )
    twice = int(rows.duplicated(_IDENTITY).sum())
    if twice:
        reasons.append(f"{twice} replies stand there twice")
    fine = rows[rows["status"] == "ok"]
    drafted = int((fine["draft_n"].fillna(0) > 0).sum())
    if drafted and (fine["observable"] == "chosen-logprob").any():
        reasons.append(
            f"{drafted} replies were decoded with drafts: their logprobs are no evidence"
        )
    statuses = _statuses(fine)
    broken_logprobs = int(np.isin(statuses, BROKEN_STATUSES).sum())
    if broken_logprobs:
        reasons.append(f"{broken_logprobs} of {len(statuses)} logprobs are NaN or no float32")
    crowded = fine[fine["busy_per_decode"] > fine["width"] + SPARE_SLOTS_MAX]
    if len(crowded):
        row = crowded.iloc[0]
        reasons.append(
            f"{len(crowded)} replies had company that was not of their round: "
            f"{row['busy_per_decode']:.2f} slots busy a pass at width {row['width']}"
        )
    return reasons


def cache_reasons(rows: pd.DataFrame, cache: str) -> list[str]:
    """Return why replies do not show the prompt cache that was asked for: off, cold or warm."""
    known = rows[(rows["status"] == "ok") & rows["cache_n"].notna()]
    taken = known["cache_n"]
    if cache == "warm":
        evaluated = known["prompt_n"].fillna(0)
        wrong = known[(taken == 0) | ((taken <= COLD_TOKENS_MAX) & (evaluated > 1))]
    else:
        wrong = known[taken > (0 if cache == "off" else COLD_TOKENS_MAX)]
    if wrong.empty:
        return []
    row = wrong.iloc[0]
    found = f"({row['prompt_id']}: {_counted(int(row['cache_n']), 'token')})"
    counted = f"{len(wrong)} of {len(known)} replies"
    if cache == "warm":
        return [
            f"{counted} did not take their prompt from the cache although it should be there "
            f"{found}"
        ]
    held = "should be off" if cache == "off" else "should hold nothing of the prompt"
    return [f"{counted} took prompt tokens from the cache although it {held} {found}: {CACHE_HINT}"]


def _counted(n: int, name: str) -> str:
    return f"{n} {name}" if n == 1 else f"{n} {name}s"


def prefill_reasons(probes: pd.DataFrame, prefill: str) -> list[str]:
    """Return why replies do not show that their prompts were prefilled apart; empty where they do.

    A server always evaluates the last token of a prompt; a reply that evaluated more of it shared
    prefill passes too. Nothing from the cache is right only where the prompt may have had no more
    than that token.
    """
    if prefill != "apart":
        return []
    fine = probes[probes["status"] == "ok"]
    one_token = fine["prompt_n"].eq(1).fillna(False)
    wrong = fine[(fine["cache_n"].eq(0) & ~one_token) | (fine["prompt_n"] > 1)]
    if wrong.empty:
        return []
    row = wrong.iloc[0]
    taken = "unknown" if pd.isna(row["cache_n"]) else int(row["cache_n"])
    evaluated = "unknown" if pd.isna(row["prompt_n"]) else int(row["prompt_n"])
    return [
        f"{len(wrong)} of {len(fine)} prompts were not prefilled apart: {row['prompt_id']} took "
        f"{taken} tokens from the cache and evaluated {evaluated}"
    ]


def _count_unseen_prefill(probes: pd.DataFrame, prefill: str) -> int:
    """Return how many replies do not say how their prompt was prefilled, where that was asked."""
    if prefill != "apart":
        return 0
    return int((probes["cache_n"].isna() | probes["prompt_n"].isna()).sum())


def gap_reasons(
    probes: pd.DataFrame, block: pd.DataFrame, width: int, rounds: int | None
) -> list[str]:
    """Return which replies a block lacks: ``width`` a round, ``rounds`` rounds a prompt."""
    if probes.empty:
        return []
    gaps = []
    counted = probes.groupby(["life", "prompt_id"])["round"].nunique()
    wanted = int(counted.max()) if rounds is None else rounds
    short = counted[counted != wanted]
    if len(short):
        gaps.append(f"{short.index[0][1]} has {int(short.iloc[0])} of {wanted} rounds")
    n_replies = int(counted.sum()) * width
    if len(block) != n_replies:
        gaps.append(f"{len(block)} replies in {int(counted.sum())} rounds of {width}")
    return gaps


def _missing_prompts(rows: pd.DataFrame, prompts: Iterable[str]) -> list[str]:
    missing = sorted(set(prompts) - set(rows["prompt_id"]))
    return [f"{len(missing)} prompts have no reply, {missing[0]} among them"] if missing else []


def _statuses(rows: pd.DataFrame) -> np.ndarray:
    lists = [np.asarray(one, dtype=object) for one in rows["logprob_status"]]
    return np.concatenate(lists) if lists else np.zeros(0, dtype=object)


def _count_logprobs(rows: pd.DataFrame) -> int:
    """Return how many tokens of replies have a logprob that counts."""
    return int((_statuses(rows) == "ok").sum())


def _logprob_share(rows: pd.DataFrame, logprob_list: int | None) -> float | None:
    """Return the share of tokens with a logprob, of those that the route's list covers."""
    received = rows["n_received"].astype(int)
    covered = int((received if logprob_list is None else received.clip(upper=logprob_list)).sum())
    return min(1.0, _count_logprobs(rows) / covered) if covered else None


def _claimed(rows: pd.DataFrame, observable: str, logprob_list: int | None) -> str:
    """Return what equal replies are equal in: no logprobs where too few tokens have one."""
    share = _logprob_share(rows, logprob_list)
    if observable != LOGPROB or share is None or share >= LOGPROB_SHARE_MIN:
        return observable
    return TOKEN_IDS if rows["token_ids"].notna().all() else TEXT


def _notes(rows: pd.DataFrame, observable: str) -> list[str]:
    """Return what qualifies a verdict on these replies without changing it."""
    said, tokens = _count_logprobs(rows), int(rows["n_received"].sum())
    told = f"logprobs of {said} of {tokens} tokens" if said else "there are no logprobs"
    if observable != LOGPROB:
        what = "is claimed" if said else "could be compared"
        return [f"{observable} alone {what}: {told}"]
    return [f"{told}: elsewhere the token alone counts"] if said < tokens else []


def _saturated_share(rows: pd.DataFrame) -> float | None:
    """Return the share of received tokens whose logprob is exactly 0: there bits can hide."""
    received = int(rows["n_received"].sum())
    return float(rows["n_saturated"].sum()) / received if received else None


def _records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what is compared of replies, in the order in which they were asked for."""
    ordered = rows[_RECORD].sort_values(["prompt_index", "life", "round", "copy"], kind="stable")
    columns = [ordered[name].tolist() for name in _RECORD]
    return [dict(zip(_RECORD, values, strict=True)) for values in zip(*columns, strict=True)]


# ------------------------------------------------------------------------------------------ repeat


def judge_repeat(
    rows: pd.DataFrame,
    cache: str,
    *,
    rounds: Mapping[int, int] | None = None,
    prompts: Iterable[str] = (),
    logprob_list: int | None = None,
    invalid_reasons: Sequence[str] = (),
    unsupported: str = "",
) -> ServeJudgement:
    """Judge whether one request, alone, always has the same answer.

    Parameters
    ----------
    rows
        The replies of one route and model with one kind of prompt cache (schema/replies).
    cache
        ``off``, ``cold`` or ``warm``.
    rounds
        How many rounds each life of the server was asked for; None where that is not recorded.
    prompts
        Prompts that must be there: those of the whole cell.
    logprob_list
        How many tokens of a reply the route's list of logprobs covers; None for all.
    unsupported
        Why the route cannot do this at all; then there are no rows.
    """
    fine = rows[rows["status"] == "ok"]
    observable = observable_of(fine)
    found = _compare_within(fine)
    n = {**found.n, "invalid": len(rows) - len(fine)}
    measures = {"states": found.states, "saturated_share": _saturated_share(fine)}
    if unsupported and rows.empty:
        return ServeJudgement(UNSUPPORTED, n, [unsupported], None, None, observable, measures)
    reasons = [*invalid_reasons, *reply_reasons(rows), *cache_reasons(rows, cache)]
    reasons += found.contradictions
    if rows.empty:
        reasons.append(f"the cell holds no replies with cache {cache}")
    else:
        reasons += _missing_prompts(rows, prompts)
        for life in sorted({*rows["life"], *(rounds or {})}):
            mine = rows[rows["life"] == life]
            if mine.empty:
                reasons.append(f"no reply of server life {life}")
            reasons += gap_reasons(mine, mine, 1, (rounds or {}).get(life))
    unseen = int(fine["cache_n"].isna().sum())
    return _concluded(
        found,
        n,
        reasons,
        fine,
        observable,
        measures,
        n_compared=n["pairs"],
        n_differing=n["differing_pairs"],
        nothing="no prompt has two replies with tokens to compare",
        unseen=f"{unseen} replies do not say how much of the prompt came from the cache"
        if unseen and cache != "off"
        else "",
        notes=["the route does not say that its prompt cache was off"] if unseen else [],
        logprob_list=logprob_list,
    )


def judge_caches(
    rows: pd.DataFrame,
    *,
    logprob_list: int | None = None,
    invalid_reasons: Sequence[str] = (),
) -> ServeJudgement:
    """Judge whether an answer is the same whatever the prompt cache held.

    ``rows`` are the valid replies of one route and model with several kinds of prompt cache. All
    replies of one kind are compared with all of the others, of every life. A kind whose answers
    differ among themselves cannot be equal to another, and is named.
    """
    observable = observable_of(rows)
    found, unsteady = _compare_caches(rows)
    n = {**found.n, "invalid": 0}
    measures = {"states": found.states, "saturated_share": _saturated_share(rows)}
    judged = _concluded(
        found,
        n,
        [*invalid_reasons, *found.contradictions],
        rows,
        observable,
        measures,
        n_compared=n["pairs"],
        n_differing=n["differing_pairs"],
        nothing="no prompt has replies with two kinds of prompt cache",
        logprob_list=logprob_list,
    )
    if unsteady and judged.verdict == DIFFERS:
        judged.reasons.append(
            f"answers differ also with the same kind of cache ({', '.join(unsteady)}): it need not "
            "be the cache that moves them"
        )
    return judged


def _compare_caches(rows: pd.DataFrame) -> tuple[_Found, list[str]]:
    """Compare the replies of each prompt across kinds of cache.

    Positions are compared with the first reply of another kind: where all of them are equal, all
    replies are. Returns what was found, and the kinds whose own answers differ.
    """
    positions = _Positions()
    states: list[dict[str, Any]] = []
    unsteady: set[str] = set()
    n_pairs = n_differing = n_moved = n_beside = contradicting = 0
    for _, group in rows.groupby("prompt_index", sort=True):
        kinds = {str(cache): _records(mine) for cache, mine in group.groupby("cache", sort=True)}
        states.append(_prompt_states(group))
        if len(kinds) < 2:
            continue
        first, second, *_ = kinds
        for cache, replies in kinds.items():
            reference = kinds[second if cache == first else first][0]
            for row in replies:
                if cache == second and row is replies[0]:
                    continue  # the first reply of all was compared with it
                compared = compare_replies(reference, row)
                same = same_answer(reference, row, compared)
                contradicting += compared.equal != same
                positions.add(row, compared)
                n_beside += 1
                n_moved += not same
            if any(not _same(replies[0], row) for row in replies[1:]):
                unsteady.add(cache)
        across = list(kinds.values())
        for place, one in enumerate(across):
            for two in across[place + 1 :]:
                for left in one:
                    n_pairs += len(two)
                    n_differing += sum(not _same(left, right) for right in two)
    n = {
        **positions.n,
        "replies": len(rows),
        "logprobs": _count_logprobs(rows),
        "compared_replies": n_beside,
        "differing_replies": n_moved,
        "pairs": n_pairs,
        "differing_pairs": n_differing,
        "states": sum(found["observed"] for found in states),
    }
    return _found(n, states, positions, contradicting, rows), sorted(unsteady)


def _same(one: Reply, two: Reply) -> bool:
    """Say whether two replies are one answer; they are compared only where their states cannot."""
    if one["observable"] == two["observable"]:
        return bool(one["state"] == two["state"])
    return compare_replies(one, two).equal


def _concluded(
    found: _Found,
    n: dict[str, int],
    reasons: Sequence[str],
    rows: pd.DataFrame,
    observable: str,
    measures: dict[str, Any],
    *,
    n_compared: int,
    n_differing: int,
    nothing: str,
    unseen: str = "",
    notes: Sequence[str] = (),
    logprob_list: int | None = None,
) -> ServeJudgement:
    """Return the verdict on replies that were compared, the same way for every question.

    ``reasons`` are against all of it. ``nothing`` says why nothing was compared, where that is so;
    ``unseen`` why equal replies are no evidence; ``notes`` qualify an exact verdict.
    """
    if reasons:
        return ServeJudgement(
            INVALID, n, list(reasons), found.worst, found.first, observable, measures
        )
    if not n_compared or not n["positions"]:
        return ServeJudgement(UNOBSERVABLE, n, [nothing], None, None, observable, measures)
    if n_differing:
        shown = found.seen_by or observable
        told = _notes(rows, observable)
        return ServeJudgement(DIFFERS, n, told, found.worst, found.first, shown, measures)
    if unseen:
        return ServeJudgement(UNOBSERVABLE, n, [unseen], None, None, observable, measures)
    claimed = _claimed(rows, observable, logprob_list)
    told = [*_notes(rows, claimed), *notes]
    return ServeJudgement(EXACT, n, told, None, None, claimed, measures)


@dataclass(frozen=True)
class _Found:
    """What comparing replies gave."""

    n: dict[str, int]
    states: dict[str, Any] | None
    worst: dict[str, Any] | None
    first: dict[str, Any] | None
    contradictions: list[str]
    seen_by: str | None  # the strongest observable that showed a difference


def _compare_within(fine: pd.DataFrame) -> _Found:
    """Compare all replies of each prompt with each other; positions with the prompt's first.

    ``compared_replies`` are those beside a first one, ``differing_replies`` differ from it.
    """
    positions = _Positions()
    pairs = {"pairs": 0, "differing_pairs": 0, "pairs_across_lives": 0, "differing_across_lives": 0}
    states: list[dict[str, Any]] = []
    contradicting = n_beside = n_moved = 0
    for _, group in fine.groupby("prompt_index", sort=True):
        replies = _records(group)
        for name, count in _count_pairs(group, replies).items():
            pairs[name] += count
        for row in replies[1:]:
            compared = compare_replies(replies[0], row)
            same = same_answer(replies[0], row, compared)
            contradicting += compared.equal != same
            positions.add(row, compared)
            n_beside += 1
            n_moved += not same
        states.append(_prompt_states(group))
    n = {
        **positions.n,
        "replies": len(fine),
        "logprobs": _count_logprobs(fine),
        "compared_replies": n_beside,
        "differing_replies": n_moved,
        **pairs,
        "states": sum(found["observed"] for found in states),
    }
    return _found(n, states, positions, contradicting, fine)


def _count_pairs(group: pd.DataFrame, replies: Sequence[Reply]) -> dict[str, int]:
    """Return how many pairs of a prompt's replies there are, and how many differ."""
    if group["observable"].nunique() > 1:  # rare: each pair as far as both of it show
        counts = dict.fromkeys(("pairs", "differing_pairs"), 0)
        counts |= dict.fromkeys(("pairs_across_lives", "differing_across_lives"), 0)
        for place, one in enumerate(replies):
            for two in replies[place + 1 :]:
                differs = not same_answer(one, two, compare_replies(one, two))
                across = one["life"] != two["life"]
                counts["pairs"] += 1
                counts["differing_pairs"] += differs
                counts["pairs_across_lives"] += across
                counts["differing_across_lives"] += differs and across
        return counts
    every = count_pairs(group)
    lives = [mine for _, mine in group.groupby("life", sort=True)]
    across_lives = [
        count_cross_pairs(one, two) for place, one in enumerate(lives) for two in lives[place + 1 :]
    ]
    return {
        "pairs": every.n_pairs,
        "differing_pairs": every.n_pairs - every.n_equal,
        "pairs_across_lives": sum(pairs.n_pairs for pairs in across_lives),
        "differing_across_lives": sum(pairs.n_pairs - pairs.n_equal for pairs in across_lives),
    }


def _found(
    n: dict[str, int],
    states: Sequence[Mapping[str, Any]],
    positions: _Positions,
    contradicting: int,
    rows: pd.DataFrame,
) -> _Found:
    if positions.bits_moved:
        seen_by: str | None = LOGPROB
    else:
        strongest = (OBSERVABLES[key] for key in OBSERVABLES if key in set(rows["observable"]))
        seen_by = next(strongest, None)
    return _Found(
        n,
        summarise_states(states),
        positions.worst,
        positions.first,
        _contradictions(contradicting),
        seen_by,
    )


def _contradictions(n: int) -> list[str]:
    return [f"{n} replies and their states contradict each other"] if n else []


def _prompt_states(group: pd.DataFrame) -> dict[str, Any]:
    counts = count_states(answer_keys(group))
    return {
        "prompt_id": str(group["prompt_id"].iloc[0]),
        "replies": counts.n_replies,
        "observed": counts.n_states,
        "modal_share": counts.modal_share,
        "chao1": counts.chao1,
    }


def summarise_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the states of several prompts as one record; None where there is none.

    ``observed`` is the lower bound that was seen, ``chao1`` the estimate with the unseen ones;
    ``modal_share`` is the share of replies in the commonest state. ``prompts`` keeps each prompt's.
    """
    if not states:
        return None
    columns = {key: [found[key] for found in states] for key in ("observed", "chao1")}
    shares = [found["modal_share"] for found in states]
    return {
        **{f"{key}_mean": float(np.mean(values)) for key, values in columns.items()},
        **{f"{key}_max": float(np.max(values)) for key, values in columns.items()},
        "modal_share_mean": float(np.mean(shares)),
        "modal_share_min": float(np.min(shares)),
        "prompts": [dict(found) for found in states],
    }


# ----------------------------------------------------------------------------------------- batched


def solo_of(replies: pd.DataFrame, prefill: str) -> pd.DataFrame:
    """Return the replies that a prompt gave alone: width 1, on the server with the fewest slots.

    Those with the same ``prefill`` are taken where there are any: after a prefill apart the last
    token of the prompt is evaluated by itself, which is another pass than the end of a prefill.
    """
    alone = replies[(replies["width"] == 1) & (replies["role"] == _PROBE)]
    same = alone[alone["prefill"] == prefill]
    alone = same if len(same) else alone
    return alone[alone["parallel"] == alone["parallel"].min()]


def judge_batched(
    block: pd.DataFrame,
    solo: pd.DataFrame,
    *,
    width: int,
    prefill: str,
    rounds: int | None = None,
    prompts: Iterable[str] = (),
    logprob_list: int | None = None,
    invalid_reasons: Sequence[str] = (),
    unsupported: str = "",
) -> ServeJudgement:
    """Judge whether requests in company have the answer that they have alone.

    Parameters
    ----------
    block
        The replies of one block, also those of neighbours and fillers (schema/replies). Only
        probes are compared, and every copy of a probe is one.
    solo
        Replies of the same route and model at width 1, as :func:`solo_of` returns them; the first
        valid one of each prompt is the reference.
    width, prefill, rounds
        What was asked for; ``rounds`` is None where that is not recorded.
    prompts
        Prompts that must be there; those with a solo reply must be in any case.
    logprob_list
        How many tokens of a reply the route's list of logprobs covers; None for all.

    A round with no witness (no ``busy_per_decode``) can show a difference, but no equality; a round
    that was not shared can show neither. Copies are equal only where more than half of the others
    were there in a pass, on average. Replies that do not say how they were prefilled show no
    equality of prompts prefilled apart.
    """
    probes = block[block["role"] == _PROBE]
    fine = probes[probes["status"] == "ok"]
    alone = solo[solo["status"] == "ok"]
    observable = observable_of(pd.concat([fine, alone]) if len(alone) else fine)
    found, score, moved = _compare_with_solo(fine, alone)
    witness = witness_of(fine, width)
    n = {**found.n, "invalid": int((block["status"] != "ok").sum())}
    measures = {
        "states": found.states,
        "solo": score,
        "pairs": _pair_measures(fine),
        "witness": witness,
        "saturated_share": _saturated_share(fine),
    }

    def judged(verdict: str, reasons: list[str]) -> ServeJudgement:
        seen = verdict in (DIFFERS, INVALID)
        named = (found.seen_by or observable) if verdict == DIFFERS else observable
        return ServeJudgement(
            verdict,
            n,
            reasons,
            found.worst if seen else None,
            found.first if seen else None,
            claimed if verdict == EXACT else named,
            measures,
        )

    claimed = _claimed(fine, observable, logprob_list)

    if unsupported and block.empty:
        return judged(UNSUPPORTED, [unsupported])
    reasons = [*invalid_reasons, *reply_reasons(block), *prefill_reasons(probes, prefill)]
    if prefill == "together":
        reasons += cache_reasons(probes, "off")
    reasons += found.contradictions
    reasons += (
        gap_reasons(probes, block, width, rounds) if len(block) else ["the cell holds no replies"]
    )
    if len(block):
        reasons += _missing_prompts(probes, {*prompts, *solo["prompt_id"]})
    unknown = sorted(set(fine["prompt_id"]) - set(alone["prompt_id"]))
    if unknown and len(alone):
        reasons.append(f"{len(unknown)} prompts have no solo reply, {unknown[0]} among them")
    n_rounds, n_unshared, n_unseen = (
        witness[f"rounds{name}"] for name in ("", "_alone", "_unseen")
    )
    if n_rounds and n_unshared == n_rounds:
        reasons.append(
            f"the copies never shared a decode step: {witness['busy_per_decode_mean']:.2f} slots "
            f"busy a pass at width {width}"
        )
    if reasons:
        return judged(INVALID, reasons)
    if alone.empty or not n["positions"]:
        return judged(UNOBSERVABLE, ["no prompt has a solo reply with tokens to compare with"])
    lonely = (
        f"{n_unshared} of {n_rounds} rounds were hardly shared: fewer than {SHARED_SLOTS_MIN} "
        "slots busy a pass"
    )
    notes = _notes(fine, observable)
    if moved:
        if all(_is_alone(busy) for busy in moved):
            return judged(INVALID, [f"only replies that were alone differ: {lonely}"])
        if n_unshared:
            notes.append(lonely)
        if n_unseen:
            notes.append(f"{n_unseen} of {n_rounds} rounds have no witness of a shared pass")
        return judged(DIFFERS, notes)
    if n_unshared:
        return judged(INVALID, [lonely])
    if n_unseen:
        reason = f"equal, but {n_unseen} of {n_rounds} rounds have no witness of a shared pass"
        return judged(UNOBSERVABLE, [reason])
    if set(probes["mix"]) == {"copies"} and (weak := weak_company(witness)):
        return judged(UNOBSERVABLE, [f"equal, but {weak}"])
    if unsaid := _count_unseen_prefill(fine, prefill):
        reason = f"equal, but {unsaid} of {len(fine)} replies do not say how they were prefilled"
        return judged(UNOBSERVABLE, [reason])
    return judged(EXACT, _notes(fine, claimed))


def weak_company(witness: Mapping[str, Any]) -> str:
    """Return why copies were too seldom together for a claim of equality; '' where they were not.

    Requests of one length that are released together are together for most of their passes.
    """
    busy, width = witness["busy_per_decode_mean"], witness["width"]
    if width < 2 or busy is None or busy > (width + 1) / 2:
        return ""
    return (
        f"on average {busy:.2f} of {width} slots were busy in a pass, no more than "
        f"{(width + 1) / 2:g}"
    )


def _is_alone(busy: float) -> bool:
    """Say whether a round's witness shows that it was hardly shared; NaN is no witness."""
    return bool(busy < SHARED_SLOTS_MIN)


def witness_of(probes: pd.DataFrame, width: int) -> dict[str, Any]:
    """Return what shows that the rounds of a block shared their passes.

    ``busy_per_decode_*`` are slots busy in a pass, over rounds; None where no round has a witness.
    ``rounds_alone`` were hardly shared, ``rounds_unseen`` have no witness. ``n_others_max`` other
    processes were seen on the device, None where nobody can tell.
    """
    one_a_round = probes.drop_duplicates(["life", "prompt_id", "round"])
    busy = one_a_round["busy_per_decode"].astype(float)
    known = busy.dropna()
    spread = one_a_round["release_spread_ms"]
    others = one_a_round["n_others"].dropna()
    return {
        "width": width,
        "rounds": len(one_a_round),
        "rounds_alone": int((known < SHARED_SLOTS_MIN).sum()) if width > 1 else 0,
        "rounds_unseen": int(busy.isna().sum()),
        "busy_per_decode_min": float(known.min()) if len(known) else None,
        "busy_per_decode_mean": float(known.mean()) if len(known) else None,
        "decodes_mean": _mean(one_a_round["n_decodes"]),
        "release_spread_ms_max": float(spread.max()) if len(spread) else None,
        "cache_n_mean": _mean(probes["cache_n"]),
        "n_others_max": int(others.max()) if len(others) else None,
    }


def _mean(values: pd.Series) -> float | None:
    known = values.dropna()
    return float(known.astype(float).mean()) if len(known) else None


def _compare_with_solo(
    fine: pd.DataFrame, alone: pd.DataFrame
) -> tuple[_Found, dict[str, Any] | None, list[float]]:
    """Compare each reply with its prompt's solo reply.

    Returns what was found, the score against solo, and the witnesses of the replies that differ.
    """
    positions = _Positions()
    scores: list[SoloScore] = []
    states: list[dict[str, Any]] = []
    moved: list[float] = []
    n_replies = n_differing = contradicting = 0
    references = {prompt: _records(group)[0] for prompt, group in alone.groupby("prompt_index")}
    for prompt, group in fine.groupby("prompt_index", sort=True):
        states.append(_prompt_states(group))
        reference = references.get(prompt)
        if reference is None:
            continue
        scores.append(score_against(reference, group))
        for row in _records(group):
            compared = compare_replies(reference, row)
            same = same_answer(reference, row, compared)
            contradicting += compared.equal != same
            positions.add(row, compared)
            n_replies += 1
            if not same:
                n_differing += 1
                moved.append(float(row["busy_per_decode"]))
    n = {
        **positions.n,
        "replies": n_replies,
        "logprobs": _count_logprobs(fine),
        "compared_replies": n_replies,
        "differing_replies": n_differing,
        "states": sum(found["observed"] for found in states),
    }
    found = _found(n, states, positions, contradicting, fine)
    return found, summarise_scores(scores), moved


def summarise_scores(scores: Sequence[SoloScore]) -> dict[str, Any] | None:
    """Return scores of several prompts as one: identical N of M, |Δ logprob|, tokens kept.

    ``kept`` has one record per prefix length, the whole reply last (``tokens`` None); lengths that
    no reply has are left out, since they would only repeat the next shorter one.
    """
    if not scores:
        return None
    n_deltas = sum(score.n_deltas for score in scores)
    deltas = [
        (score.delta_mean, score.n_deltas) for score in scores if score.delta_mean is not None
    ]
    worst = [score.delta_max for score in scores if score.delta_max is not None]
    kept = []
    for places in zip(*(score.prefixes for score in scores), strict=False):
        if any(prefix.n_full for prefix in places):
            kept.append(places)
    kept.append(tuple(score.whole for score in scores))
    return {
        "identical": sum(score.n_identical for score in scores),
        "replies": sum(score.n_replies for score in scores),
        "dlogp_mean": sum(mean * n for mean, n in deltas) / n_deltas if n_deltas else None,
        "dlogp_max": max(worst, default=None),
        "kept": [
            {
                "tokens": places[0].n_tokens,
                "positions": sum(prefix.n_positions for prefix in places),
                "kept": sum(prefix.n_kept for prefix in places),
                "share": _share(places),
                "identical": sum(prefix.n_identical for prefix in places),
            }
            for places in kept
        ],
    }


def _share(places: Sequence[Any]) -> float | None:
    positions = sum(prefix.n_positions for prefix in places)
    return sum(prefix.n_kept for prefix in places) / positions if positions else None


def _pair_measures(fine: pd.DataFrame) -> dict[str, int]:
    """Return equal pairs: of the same copy in consecutive rounds, and of all replies of a prompt.

    Doubled replies are somebody else's reason to refuse; here only their first counts.
    """
    place = [
        "life",
        "cache",
        "mix",
        "prefill",
        "parallel",
        "width",
        "prompt_index",
        "round",
        "copy",
    ]
    once = fine.drop_duplicates(place)
    following = count_consecutive(once)
    every = [count_pairs(group) for _, group in once.groupby("prompt_index")]
    return {
        "consecutive": following.n_pairs,
        "consecutive_equal": following.n_equal,
        "all": sum(pairs.n_pairs for pairs in every),
        "all_equal": sum(pairs.n_equal for pairs in every),
    }


def judge_width_1(
    rows: pd.DataFrame,
    solo: pd.DataFrame,
    *,
    rounds: int | None = None,
    prompts: Iterable[str] = (),
    logprob_list: int | None = None,
    invalid_reasons: Sequence[str] = (),
    unsupported: str = "",
) -> ServeJudgement:
    """Judge the control of a batched cell: one request in flight has the solo answer.

    ``rows`` are the cell's replies at width 1 with one prefill, ``solo`` those that are its
    reference: of the server with the fewest slots, which may be the same rows. The reference reply
    is not compared with itself. All ``prompts`` must be there, and all that have a solo reply.
    """
    fine = rows[rows["status"] == "ok"]
    alone = solo[solo["status"] == "ok"]
    first = alone.sort_values(["prompt_index", "life", "round", "copy"], kind="stable")
    references = first.drop_duplicates("prompt_index").set_index(_IDENTITY).index
    others = fine[~fine.set_index(_IDENTITY).index.isin(references)]
    observable = observable_of(pd.concat([fine, alone]) if len(alone) else fine)
    found, score, _ = _compare_with_solo(others, alone)
    n = {**found.n, "invalid": len(rows) - len(fine)}
    measures = {
        "states": found.states,
        "solo": score,
        "witness": witness_of(fine, 1),
        "saturated_share": _saturated_share(fine),
    }
    if unsupported and rows.empty:
        return ServeJudgement(UNSUPPORTED, n, [unsupported], None, None, observable, measures)
    reasons = [*invalid_reasons, *reply_reasons(rows), *found.contradictions]
    if len(rows):
        reasons += _missing_prompts(rows, {*prompts, *solo["prompt_id"]})
    for prefill, mine in rows.groupby("prefill"):
        reasons += prefill_reasons(mine, str(prefill))
        if prefill == "together":
            reasons += cache_reasons(mine, "off")
        reasons += gap_reasons(mine, mine, 1, rounds)
    unsaid = sum(_count_unseen_prefill(mine, str(kind)) for kind, mine in fine.groupby("prefill"))
    return _concluded(
        found,
        n,
        reasons,
        fine,
        observable,
        measures,
        n_compared=n["replies"],
        n_differing=n["differing_replies"],
        nothing="no reply with tokens at width 1 beside the reference itself",
        # alone it is the same request either way; the claims in company are not seen then
        notes=[f"{unsaid} replies do not say how they were prefilled"] if unsaid else [],
        logprob_list=logprob_list,
    )
