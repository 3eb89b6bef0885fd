"""The readable receipt: Markdown, made from receipt.json alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from routewise.agree import PUBLISHED_DLOGP_MAX, PUBLISHED_DLOGP_MEAN
from routewise.summary import (
    SERVING,
    busy_text,
    closing_line,
    counted,
    divergence_text,
    states_text,
    where_to_look,
)
from routewise.verdict import (
    DIFFERS,
    DIFFERS_SOMEWHERE,
    EXACT,
    INVALID,
    UNOBSERVABLE,
    UNSUPPORTED,
)

FIGURES = {
    "delta_by_position": "Largest logit difference by KV position and width",
    "flips_and_margins": "Flips of the greedy token and the plain top-two margin",
    "price_by_width": "Pass time by width",
    "states_by_width": "Distinct answers to one request by width and company",
    "solo_token_kept": "Share of positions that keep the solo token, by width",
    "agree_dlogp": "Distance of two routes' logprobs",
}


def drawn_figures(receipt: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures that a receipt's sweeps have."""
    sweeps = {entry["sweep"] for entry in [*receipt["claims"], *receipt["controls"]]}
    return [
        *(["delta_by_position", "flips_and_margins"] if "replay" in sweeps else []),
        *(["price_by_width"] if receipt["price"] else []),
        *(["states_by_width", "solo_token_kept"] if "batched" in sweeps else []),
        *(["agree_dlogp"] if "agree" in sweeps else []),
    ]


def receipt_markdown(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as Markdown: verdicts first, then controls, price, scope and provenance.

    Its figures are expected in the folder ``figures`` beside it.
    """
    sections = [
        f"# Receipt of the study `{receipt['study']}`",
        closing_line(receipt, "receipt.json") + ".",
        *_promises(receipt),
        *_verdicts(receipt),
        *_repetition(receipt),
        *_batches(receipt),
        *_agreement(receipt),
        *_dispatch(receipt),
        *_controls(receipt),
        *_figures(drawn_figures(receipt)),
        *_price(receipt),
        *_scope(receipt),
        *_power(receipt),
        *_provenance(receipt),
    ]
    return "\n\n".join(sections) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; None shows as a dash and a bar in a cell is escaped."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = ["–" if cell is None else str(cell).replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _expected(entry: Mapping[str, Any]) -> str:
    if entry["expected"] == DIFFERS_SOMEWHERE:
        return "somewhere (a control)"
    if entry["expected"] is None:
        return "–"
    return entry["expected"] + ("" if entry["as_expected"] else " **✗**")


def _bound(entry: Mapping[str, Any]) -> str:
    """Return the share that differs with its interval, and of what where the interval says it."""
    interval = entry["interval"]
    if interval is None:
        return "–"
    if interval["k"] == 0:
        share = f"≤ {interval['high']:.2%}"
        return (
            f"{share} of {interval['unit']}, n = {interval['n']}" if "unit" in interval else share
        )
    of = f" of {interval['n']} {interval['unit']}" if "unit" in interval else ""
    share = f"{interval['k'] / interval['n']:.1%}{of}"
    return f"{share} ({interval['low']:.1%} to {interval['high']:.1%})"


def _verdict(entry: Mapping[str, Any]) -> str:
    qualified = ", qualified" if entry["verdict"] == EXACT and entry["uncovered"] else ""
    return f"**{entry['verdict']}**{qualified}"


def _entries(entries: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return claims or controls as a table.

    Where a request was asked for again its replies are counted, and not their positions: those
    behind the first other token were never compared, and would count as unmoved.
    """
    by_reply = any("compared_replies" in entry["n"] for entry in entries)
    compared = "compared" if by_reply else "positions"
    return _table(
        (kind, "verdict", "expected", compared, "differing", "share, 95 %", "flips", "where"),
        (
            (
                f"`{entry['id']}`",
                _verdict(entry),
                _expected(entry),
                *_compared(entry["n"], name_unit=by_reply),
                _bound(entry),
                None if "compared_replies" in entry["n"] else entry["n"].get("flips"),
                where_to_look(entry) or None,
            )
            for entry in entries
        ),
    )


def _compared(n: Mapping[str, int], *, name_unit: bool) -> tuple[str | int, int]:
    """Return how many replies or positions were compared, and how many of them differ."""
    if "compared_replies" in n:
        return counted(n["compared_replies"], "reply", "replies"), n["differing_replies"]
    positions = n["positions"]
    return counted(positions, "position") if name_unit else positions, n["differing"]


def _verdicts(receipt: Mapping[str, Any]) -> list[str]:
    if not receipt["claims"]:
        return ["## Verdicts", "This study makes no claim."]
    text = (
        f"{_what_was_compared(receipt['claims'])} Only `exact` is a pass; what is "
        "`invalid` is in no count. A share with ≤ is the one-sided bound for none seen, one in "
        "brackets is Clopper and Pearson's; both take positions as independent."
    )
    if any((claim["interval"] or {}).get("unit") == "replies" for claim in receipt["claims"]):
        text += (
            " Where a request was asked for again the share is of replies: each that differs "
            "anywhere from its reference (the first, or the solo answer) is one. They too are "
            "taken as independent, which copies of one round and rounds of one prompt are not: "
            "they say less than so many separate requests."
        )
    return ["## Verdicts", text, _entries(receipt["claims"], "claim")]


def _what_was_compared(claims: Sequence[Mapping[str, Any]]) -> str:
    observables = sorted({claim["observable"] for claim in claims})
    if observables == ["logits"]:
        return "Compared were logits, bit by bit."
    names = {"chosen logprob": "logprobs of the chosen tokens"}
    listed = [names.get(name, name) for name in observables]
    *most, last = listed
    joined = f"{', '.join(most)} and {last}" if most else last
    return f"What was compared, bit by bit: {joined}; each claim names its own."


def _claims(receipt: Mapping[str, Any], sweep: str) -> list[Mapping[str, Any]]:
    return [claim for claim in receipt["claims"] if claim["sweep"] == sweep]


def _name(claim: Mapping[str, Any]) -> str:
    """Return a claim's name without its sweep, which the section names."""
    return f"`{claim['id'].removeprefix(claim['sweep'] + '/')}`"


def _statements(claims: Sequence[Mapping[str, Any]]) -> str:
    """Return what claims ask, each sentence once, and in how many of them it holds."""
    found: dict[str, Counter[str]] = {}
    for claim in claims:
        # how full the passes were stands in the table, and differs in each claim
        statement = re.sub(r" \(on average [^)]*\)$", "", claim["statement"])
        found.setdefault(statement, Counter())[claim["verdict"]] += 1
    return "\n".join(
        f"- {_outcome(verdicts)}: {statement}." for statement, verdicts in found.items()
    )


def _outcome(verdicts: Counter[str]) -> str:
    """Return in how many claims a sentence holds, and what it is in the others."""
    n = verdicts.total()
    if n == 1:
        (verdict,) = verdicts
        words = {EXACT: "holds", DIFFERS: "differs"}
        return f"**{words.get(verdict, f'is {verdict}')}**"
    others = [
        f"{'differs' if verdict == DIFFERS else f'is {verdict}'} in {verdicts[verdict]}"
        for verdict in (DIFFERS, INVALID, UNOBSERVABLE, UNSUPPORTED)
        if verdicts[verdict]
    ]
    return ", ".join([f"**holds in {verdicts[EXACT]} of {n}**", *others])


# ---------------------------------------------------------------------------------------- promises


def _promises(receipt: Mapping[str, Any]) -> list[str]:
    """Return what each route's server can promise, from its exact claims alone."""
    claims = [claim for claim in receipt["claims"] if claim["sweep"] in SERVING]
    if not claims:
        return []
    text = (
        "A promise is what was `exact` here, in the observable and the number of replies named; it "
        "holds within the [scope](#scope) alone. Of what differs the measure stands beside it, and "
        "is no promise."
    )
    lines = []
    for route, model in dict.fromkeys((claim["route"], claim["model"]) for claim in claims):
        mine = [claim for claim in claims if (claim["route"], claim["model"]) == (route, model)]
        named = " and ".join(f"`{name}`" for name in route.split("|"))
        lines.append(f"- {named}, `{model}`")
        for sweep, title, told in (
            ("repeat", "asked again alone, by prompt cache", _repeated),
            ("batched", "beside others", _beside),
            ("agree", "against each other", _apart),
        ):
            if asked := [claim for claim in mine if claim["sweep"] == sweep]:
                lines.append(f"  - {title}: {_promise(asked, told)}.")
    return ["## What this server can promise", text, "\n".join(lines)]


def _promise(claims: Sequence[Mapping[str, Any]], told: Callable[[Mapping[str, Any]], str]) -> str:
    """Return the exact claims of one sweep as promises, then what the others are instead."""
    promised: dict[tuple[str, str], list[str]] = {}
    others: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        name = f"`{claim['id'].rsplit('/', 1)[-1]}`"
        if claim["verdict"] == EXACT:
            promised.setdefault((claim["observable"], told(claim)), []).append(name)
        else:
            detail = told(claim) if claim["verdict"] == DIFFERS else ""
            others.setdefault((claim["verdict"], detail), []).append(name)
    parts = [
        f"**promised, the same {observable}**: {', '.join(names)} ({detail}{_each(names)})"
        for (observable, detail), names in promised.items()
    ]
    rest = [
        f"{', '.join(names)} {verdict}" + (f" ({detail}{_each(names)})" if detail else "")
        for (verdict, detail), names in others.items()
    ]
    return "; ".join([*parts, *([f"**no promise**: {'; '.join(rest)}"] if rest else [])])


def _each(names: Sequence[str]) -> str:
    return ", each" if len(names) > 1 else ""


def _repeated(claim: Mapping[str, Any]) -> str:
    """Return how often a request was asked again, and whether also after a restart."""
    n = claim["n"]
    across = n.get("pairs_across_lives", 0)
    if claim["verdict"] == EXACT:
        lives = len(claim["scope"].get("lives") or [])
        restart = f"across {lives} starts" if across or lives > 1 else "one start alone"
        return f"{_asked(n)}, {restart}"
    told = f"{n.get('differing_pairs', 0)} of {counted(n.get('pairs', 0), 'pair')} differ"
    if across:
        told += f", {n['differing_across_lives']} of {across} across starts"
    return f"{told}, {_asked(n)}"


def _beside(claim: Mapping[str, Any]) -> str:
    """Return how many replies had company, and where they differ how many answers there are."""
    n = claim["n"]
    states = claim["measures"].get("states")
    if claim["verdict"] == EXACT or not states:
        return _asked(n)
    alone = n["replies"] - n["differing_replies"]
    return (
        f"{alone} of {n['replies']} replies as alone, {states['observed_mean']:.3g} answers a "
        f"prompt (most {states['observed_max']:.3g}), the commonest in "
        f"{states['modal_share_mean']:.0%} of replies"
    )


def _apart(claim: Mapping[str, Any]) -> str:
    """Return how many replies two routes were compared in, and how far they are apart."""
    n = claim["n"]
    score = (claim["measures"].get("agreement") or {}).get("all") or {}
    told = f"{_asked(n)}, {counted(score.get('n_common', 0), 'common position')}"
    if claim["verdict"] == EXACT or not score:
        return told
    shares = [
        f"{_share(score[key])} of {name} equal"
        for key, name in (("match_share_common", "tokens"), ("exact_share", "bits"))
        if score.get(key) is not None
    ]
    return ", ".join([*shares, told])


def _asked(n: Mapping[str, int]) -> str:
    replies = counted(n.get("replies", 0), "reply", "replies")
    return f"n = {replies} to {counted(n['prompts'], 'prompt')}"


def _share(value: float | None, digits: int = 1) -> str | None:
    return None if value is None else f"{value:.{digits}%}"


def _size(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _repetition(receipt: Mapping[str, Any]) -> list[str]:
    claims = _claims(receipt, "repeat")
    if not claims:
        return []
    text = (
        "One request alone, compared in all pairs of its replies. States are distinct answers a "
        "prompt, mean/most, and in brackets Chao's estimate with the unseen ones; saturated is the "
        "share of tokens whose logprob is exactly 0, where bits can hide."
    )
    header = (
        "repeat",
        "observable",
        "prompts",
        "replies",
        "pairs that differ",
        "across lives",
        "states a prompt",
        "saturated",
    )
    rows = (
        (
            _name(claim),
            claim["observable"],
            claim["n"]["prompts"],
            claim["n"].get("replies"),
            _of(claim["n"], "differing_pairs", "pairs"),
            _of(claim["n"], "differing_across_lives", "pairs_across_lives"),
            states_text(claim["measures"].get("states")) or None,
            _share(claim["measures"].get("saturated_share")),
        )
        for claim in claims
    )
    return ["## Repetition", text, _table(header, rows), _statements(claims)]


def _of(n: Mapping[str, int], part: str, whole: str) -> str | None:
    return f"{n.get(part, 0)} of {n[whole]}" if n.get(whole) else None


def _batches(receipt: Mapping[str, Any]) -> list[str]:
    claims = _claims(receipt, "batched")
    if not claims:
        return []
    lengths = sorted(
        {
            prefix["tokens"]
            for claim in claims
            for prefix in (claim["measures"].get("solo") or {}).get("kept", [])
            if prefix["tokens"] is not None
        }
    )
    text = (
        "Each reply in company against the answer alone to its request: how many are as alone, "
        "how far logprobs are apart where all tokens so far are equal, and the share of positions "
        "that keep the token of the answer alone, over the first tokens and over all. States are "
        "distinct answers a prompt (mean/most, in brackets Chao's estimate), modal is the share of "
        "replies in the commonest. The witness is slots busy a pass, mean and least of the rounds, "
        "beside the width; release is the time between a round's first request and its last."
    )
    header = (
        "batched",
        "as alone",
        "mean Δ logprob",
        "max",
        *(f"kept, first {length}" for length in lengths),
        "kept, all",
        "states a prompt",
        "modal",
        "equal to the round before",
        "equal pairs",
        "slots busy a pass (least)",
        "release, ms (largest)",
    )
    rows = ((_name(claim), *_batched_cells(claim, lengths)) for claim in claims)
    return ["## Batches", text, _table(header, rows), _statements(claims)]


def _batched_cells(claim: Mapping[str, Any], lengths: Sequence[int]) -> list[Any]:
    measures = claim["measures"]
    solo = measures.get("solo") or {}
    states = measures.get("states") or {}
    pairs = measures.get("pairs") or {}
    witness = measures.get("witness") or {}
    kept = {prefix["tokens"]: prefix["share"] for prefix in solo.get("kept", [])}
    busy = busy_text(witness)
    if busy:
        busy += f" ({witness['busy_per_decode_min']:.2f})"
    spread = witness.get("release_spread_ms_max")
    return [
        f"{solo['identical']} of {solo['replies']}" if solo else None,
        _size(solo.get("dlogp_mean")),
        _size(solo.get("dlogp_max")),
        *(_share(kept.get(length)) for length in lengths),
        _share(kept.get(None)),
        states_text(measures.get("states")) or None,
        _share(states.get("modal_share_mean")),
        f"{pairs['consecutive_equal']} of {pairs['consecutive']}" if pairs else None,
        f"{pairs['all_equal']} of {pairs['all']}" if pairs else None,
        busy or None,
        None if spread is None else f"{spread:.2f}",
    ]


def _agreement(receipt: Mapping[str, Any]) -> list[str]:
    claims = _claims(receipt, "agree")
    if not claims:
        return []
    text = (
        "Two routes asked the same. Common positions are those up to and with the first token that "
        "differs. Tokens equal is a share of them, bits equal one of those where both routes have "
        "a logprob. Distances are over common positions with the same token, once over all replies "
        "and, where it is not all of them, over those with all tokens equal. KL is approximate, "
        "from the top lists. The published gates are a largest Δ logprob of "
        f"{PUBLISHED_DLOGP_MAX:g} and a mean one of {PUBLISHED_DLOGP_MEAN:g}; no gate "
        "decides a verdict here."
    )
    header = (
        "agree",
        "replies",
        "all tokens equal",
        "common positions",
        "tokens equal",
        "bits equal",
        "Δ logprob max",
        "mean",
        "median",
        "p99",
        "KL, nats",
        "first other token",
        "slots busy a pass",
    )
    rows = []
    for claim in claims:
        agreement = claim["measures"].get("agreement") or {}
        busy = (claim["measures"].get("witness") or {}).values()
        for part, score in (
            ("", agreement.get("all")),
            (", all tokens equal", agreement.get("same_stream")),
        ):
            if score and (not part or 0 < score["n_replies"] < agreement["all"]["n_replies"]):
                first = None if part else _divergence(claim)
                shown = " and ".join(filter(None, map(busy_text, busy))) or None
                rows.append((_name(claim) + part, *_agree_cells(score), first, shown))
    return ["## Agreement", text, _table(header, rows), _statements(claims)]


def _agree_cells(score: Mapping[str, Any]) -> list[Any]:
    return [
        score["n_replies"],
        score["n_same_stream"],
        score["n_common"],
        _share(score["match_share_common"]),
        _share(score["exact_share"]),
        *(_size(score[f"dlogp_{name}"]) for name in ("max", "mean", "median", "p99")),
        _size(score["kl_mean_nats"]),
    ]


def _divergence(claim: Mapping[str, Any]) -> str | None:
    """Return where two routes first choose another token, with both top-two margins."""
    apart = (claim["first_difference"] or {}).get("divergence")
    return divergence_text(apart) if apart else None


def _dispatch(receipt: Mapping[str, Any]) -> list[str]:
    records = receipt["provenance"].get("dispatch")
    if not records:
        return []
    text = (
        "Which kernels, or operations on which backend, the servers' own logs name. A log that "
        "names operations alone says nothing of the kernels that ran them."
    )
    header = ("route", "model", "in flight", "log", "lives", "same", "distinct", "added", "missing")
    rows = (
        (
            f"`{record['route']}`",
            f"`{record['model']}`",
            record["width"],
            record["log"],
            record["lives"],
            "yes" if record["same"] else "**no**",
            record["n"],
            ", ".join(record["added"]) or None,
            ", ".join(record["missing"]) or None,
        )
        for record in records
    )
    return ["## Dispatch", text, _table(header, rows)]


def _controls(receipt: Mapping[str, Any]) -> list[str]:
    if not receipt["controls"]:
        return []
    text = "Their answers were known in advance. Where one fails, the claims that rest on it are "
    statements = "\n".join(
        f"- `{control['id']}`{_held(control)}: {control['statement']}."
        for control in receipt["controls"]
    )
    return [
        "## Controls",
        text + "invalid.",
        _entries(receipt["controls"], "control"),
        statements,
    ]


def _held(control: Mapping[str, Any]) -> str:
    """Return whether a control's sentence holds; '' for a replay's that does."""
    if control["as_expected"] is None:
        return f", {control['verdict']}"
    if control["as_expected"]:
        return "" if control["sweep"] == "replay" else ", holds"
    return f", does **not** hold ({control['verdict']})"


def _figures(figures: Sequence[str]) -> list[str]:
    if not figures:
        return []
    return ["## Figures", *[f"![{FIGURES[name]}](figures/{name}.svg)" for name in figures]]


def _interval(value: float | None, bounds: Mapping[str, float] | None) -> str | None:
    if value is None:
        return None
    if bounds is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({bounds['low']:.2f} to {bounds['high']:.2f})"


def _price(receipt: Mapping[str, Any]) -> list[str]:
    if not receipt["price"]:
        return []
    text = (
        "Ratios are medians over rounds of samples taken in turn in one job, with the 95 % "
        "interval between order statistics; spread is the interquartile range over the median. "
        "Contended samples are counted and left out."
    )
    if not all(row["absolute"] for row in receipt["price"]):
        text += (
            " Times in brackets are of a CPU on that day: they mean nothing outside this job, "
            "the ratios do."
        )
    rows = (
        (
            f"`{row['route']}`",
            f"`{row['model']}`",
            row["width"],
            _interval(row["ratio"], row["ratio_interval"]),
            _interval(row["ratio_to_reference"], row["ratio_to_reference_interval"]),
            _time(row),
            None if row["spread"] is None else f"{row['spread']:.1%}",
            row["n"],
            row["n_contended"],
            row["note"],
        )
        for row in receipt["price"]
    )
    header = (
        "route",
        "model",
        "width",
        "to width 1",
        "to reference",
        "pass, ms",
        "spread",
        "n",
        "contended",
        "note",
    )
    return ["## Price", text, *_floors(receipt), _table(header, rows)]


def _floors(receipt: Mapping[str, Any]) -> list[str]:
    """Return the least times that reading takes, one sentence a route and model."""
    rows = {(row["route"], row["model"]): row for row in receipt["price"] if row.get("floor_ms")}
    return [
        f"- `{route}`, `{model}`: a pass reads {row['read_bytes'] / 1e6:.1f} MB of weights and "
        f"cache; at {row['copy_gb_per_s']:.3g} GB/s, measured by copies in the same job (read and "
        f"written), that takes {row['floor_ms']:.3g} ms, {row['floor_ratio']:.2f} of a pass of "
        "width 1."
        for (route, model), row in rows.items()
    ]


def _time(row: Mapping[str, Any]) -> str | None:
    if row["pass_ms"] is None:
        return None
    return f"{row['pass_ms']:.3g}" if row["absolute"] else f"({row['pass_ms']:.3g})"


def _scope(receipt: Mapping[str, Any]) -> list[str]:
    """Return the scope, one row per route and model: the same for all its variants but widths."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for claim in receipt["claims"]:
        if claim["sweep"] not in SERVING:
            groups.setdefault((claim["route"], claim["model"]), []).append(claim)
    served = _serving_scope(receipt)
    if not groups:
        return ["## Scope", "Nothing outside this was measured.", *served] if served else []
    rows = []
    for (route, model), claims in groups.items():
        scopes = [claim["scope"] for claim in claims]
        ranges = [scope["kv_positions"] for scope in scopes if scope.get("kv_positions")]
        widths = sorted({width for scope in scopes for width in scope.get("pass_widths", [])})
        first = next((scope for scope in scopes if scope.get("fingerprint")), scopes[0])
        rows.append(
            (
                f"`{route}`",
                f"`{model}`",
                _weights(first),
                first.get("machine"),
                first.get("threads"),
                {True: "on", False: "off"}.get(first.get("flash_attention")),
                first.get("kv_type"),
                f"{min(span['min'] for span in ranges)} to {max(span['max'] for span in ranges)}"
                if ranges
                else None,
                ", ".join(str(width) for width in widths) or None,
                first.get("prompts"),
                str(first.get("fingerprint") or "")[:12] or None,
            )
        )
    header = (
        "route",
        "model",
        "weights",
        "machine",
        "threads",
        "flash attention",
        "KV type",
        "KV positions",
        "widths executed",
        "prompts",
        "fingerprint",
    )
    uncovered = sorted({claim["uncovered"] for claim in receipt["claims"] if claim["uncovered"]})
    notes = [f"Not covered, as the build itself reports: {text}" for text in uncovered]
    return ["## Scope", "Nothing outside this was measured.", _table(header, rows), *notes, *served]


def _serving_scope(receipt: Mapping[str, Any]) -> list[str]:
    """Return the scope of serving claims, one row per sweep, route and model."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for claim in receipt["claims"]:
        if claim["sweep"] in SERVING:
            key = (claim["sweep"], claim["route"], claim["model"])
            groups.setdefault(key, []).append(claim["scope"])
    if not groups:
        return []
    rows = []
    for (sweep, route, model), scopes in groups.items():
        ranges = [scope["kv_positions"] for scope in scopes if scope.get("kv_positions")]
        first = next((scope for scope in scopes if scope.get("fingerprint")), scopes[0])
        rows.append(
            (
                sweep,
                f"`{route}`",
                f"`{model}`",
                _weights(first),
                first.get("weights"),
                first.get("machine"),
                first.get("device"),
                _of_sides(first, "threads", str),
                _of_sides(first, "flash_attention", _switch),
                _of_sides(first, "kv_type", str),
                _of_sides(first, "arguments", _words),
                _of_sides(first, "env", _variables),
                _list(scope.get("parallel") for scope in scopes),
                _list(width for scope in scopes for width in scope.get("widths") or []),
                f"{min(span['min'] for span in ranges)} to {max(span['max'] for span in ranges)}"
                if ranges
                else None,
                first.get("prompts"),
                "|".join(part[:12] for part in str(first.get("fingerprint") or "").split("|"))
                or None,
            )
        )
    header = (
        "sweep",
        "route",
        "model",
        "weights",
        "loaded",
        "machine",
        "device",
        "threads",
        "flash attention",
        "KV type",
        "arguments or command",
        "environment",
        "slots",
        "in flight",
        "KV positions",
        "prompts",
        "fingerprint",
    )
    return [_table(header, rows)]


def _switch(value: bool) -> str:
    return "on" if value else "off"


def _words(arguments: Sequence[str]) -> str:
    return f"`{' '.join(arguments)}`"


def _variables(environment: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in sorted(environment.items()))


def _of_sides(scope: Mapping[str, Any], key: str, show: Callable[[Any], str]) -> str | None:
    """Return a setting of a route, or of both of a pair with a bar between.

    What a server was never told is a dash, and is not known here.
    """
    sides = scope.get("sides")
    found = [side.get(key) for side in sides.values()] if sides else [scope.get(key)]
    told = [None if value is None or value in ([], {}) else show(value) for value in found]
    if all(one is None for one in told):
        return None
    return told[0] if len(set(told)) == 1 else "|".join(one or "–" for one in told)


def _list(values: Iterable[int | None]) -> str | None:
    found = sorted({value for value in values if value is not None})
    return ", ".join(str(value) for value in found) or None


def _weights(scope: Mapping[str, Any]) -> str | None:
    """Return a model's quantization with its tensors counted by type, the most frequent first."""
    types = scope.get("tensor_types") or {}
    counted = sorted(types.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{count} {name}" for name, count in counted)
    named = scope.get("quantization")
    if not listed:
        return named
    return f"{named}: {listed}" if named else listed


def _power(receipt: Mapping[str, Any]) -> list[str]:
    shares: dict[str, list[float]] = {}
    for row in receipt["power"]:
        if row["detectable_share"]:
            shares.setdefault(row.get("unit", "positions"), []).append(row["detectable_share"])
    if not shares:
        return []
    lines = [
        f"A difference that moves {max(found):.2%} of {unit} or more would have been seen by "
        f"each claim{'' if len(shares) == 1 else f' on {unit}'} with 95 % probability (the best "
        f"claim sees {min(found):.2%})."
        for unit, found in shares.items()
    ]
    if "replies" in shares:
        lines.append(
            "Copies of one round share their passes and are not independent: of replies this is "
            "the most that their number can show."
        )
    return ["## Power", "\n".join(lines)]


def _provenance(receipt: Mapping[str, Any]) -> list[str]:
    provenance = receipt["provenance"]
    parts = ["## Provenance"]
    routes = provenance["routes"]
    if routes:
        header = ("route", "build", "backend", "patch", "identity", "fingerprint")
        parts.append(
            _table(
                header,
                (
                    (
                        f"`{route}`",
                        build.get("name"),
                        build.get("backend"),
                        build.get("patch") or "none",
                        build.get("identity"),
                        build.get("fingerprint"),
                    )
                    for route, build in routes.items()
                ),
            )
        )
    if provenance["models"]:
        parts.append(
            _table(
                ("model", "bytes", "SHA-256"),
                (
                    (f"`{name}`", model.get("n_bytes"), model.get("sha256"))
                    for name, model in provenance["models"].items()
                ),
            )
        )
    lines = [f"- study declaration: `{provenance['study_digest']}`"]
    for machine in provenance["machines"]:
        listed = ", ".join(f"{key} {value}" for key, value in machine.items() if key != "kind")
        lines.append(f"- machine: {machine.get('kind', 'not recorded')} ({listed})")
    for name, digest in provenance["prompts"].items():
        lines.append(f"- prompts {name}: `{digest}`")
    for sweep, digests in provenance["code_digests"].items():
        lines.append(f"- measuring code of {sweep}: {', '.join(f'`{one}`' for one in digests)}")
    for name, found in provenance["versions"].items():
        lines.append(f"- {name} {', '.join(found)}")
    measured = provenance["measured"]
    if measured["from"]:
        lines.append(f"- measured from {measured['from']} to {measured['to']}")
    for sweep, cells in provenance["cells"].items():
        line = f"- {sweep}: {cells['n']} cells, {len(cells['invalid'])} of them invalid"
        if cells["fragments_measured"] or cells["fragments_adopted"]:
            line += (
                f", {cells['fragments_measured']} fragments measured and "
                f"{cells['fragments_adopted']} adopted"
            )
        if cells["measure_s"]:
            line += f", {cells['compare_s'] / cells['measure_s']:.1%} of the time spent comparing"
        lines.append(line)
    return [*parts, "\n".join(lines)]
