"""The short table at the end of a run, and the gate: is every verdict what the study expects?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from routewise.errors import EXIT_AS_CLAIMED, EXIT_DIFFERS, EXIT_NOT_MEASURED
from routewise.verdict import DIFFERS, DIFFERS_SOMEWHERE, EXACT, INVALID, UNOBSERVABLE

SERVING = ("repeat", "batched", "agree")

_STYLES = {EXACT: "green", DIFFERS: "yellow", INVALID: "red", UNOBSERVABLE: "red"}
_PLAIN_WIDTH = 124


@dataclass(frozen=True)
class Gate:
    """What stands against a receipt.

    Contrary verdicts, verdicts that cannot be believed, things not measured, and mere notes.
    """

    contrary: Sequence[str]
    unbelieved: Sequence[str]
    unmeasured: Sequence[str]
    notes: Sequence[str]

    @property
    def exit_code(self) -> int:
        """1 where a verdict is contrary to the study, else 2 where one is no evidence, else 0."""
        if self.contrary:
            return EXIT_DIFFERS
        missing = [*self.unbelieved, *self.unmeasured]
        return EXIT_NOT_MEASURED if missing else EXIT_AS_CLAIMED


def gate_of(receipt: Mapping[str, Any]) -> Gate:
    """Hold a receipt against what its study expects.

    A verdict of ``exact`` or ``differs`` that is not the expected one is contrary; so is a control
    that does not hold. Anything invalid cannot be believed. An expected one that could not be seen,
    a price without a valid sample, and a receipt that says nothing are unmeasured. A control of
    which nothing is expected that could not be seen is a note. A price with too few quiet
    samples, and an exact verdict that the build itself qualifies, are notes.
    """
    contrary: list[str] = []
    unbelieved: list[str] = []
    unmeasured: list[str] = []
    notes: list[str] = []
    for kind in ("control", "claim"):
        for entry in receipt[f"{kind}s"]:
            verdict = entry["verdict"]
            why = f": {entry['reasons'][0]}" if entry["reasons"] else ""
            wanted = f", expected {entry['expected']}" if entry["expected"] else ""
            line = f"{kind} {entry['id']}: {verdict}{wanted}{why}"
            if verdict in (EXACT, DIFFERS):
                if entry["as_expected"] is False:
                    contrary.append(line)
            elif kind == "control" and entry["expected"] is None:
                notes.append(line)  # it is read beside claims, and none of them rests on it
            elif verdict == INVALID:
                unbelieved.append(line)
            elif verdict == UNOBSERVABLE or entry["expected"] is not None:
                unmeasured.append(line)
            if verdict == EXACT and entry["uncovered"]:
                notes.append(f"{kind} {entry['id']}: exact, but uncovered: {entry['uncovered']}")
    missing: dict[tuple[str, ...], list[int]] = {}
    for row in receipt["price"]:
        if row["note"]:
            # Contention is a matter of the day; without any valid sample the price is not known.
            known = row["n"] + row["n_contended"] > 0
            key = (row["route"], row["model"], row["note"], "yes" if known else "")
            missing.setdefault(key, []).append(row["width"])
    for (route, model, note, known), widths in missing.items():
        listed = ", ".join(str(width) for width in widths)
        (notes if known else unmeasured).append(f"price {route} {model} width {listed}: {note}")
    if not receipt["claims"] and not receipt["price"]:
        unmeasured.append("the receipt makes no claim and quotes no price")
    return Gate(contrary, unbelieved, unmeasured, notes)


def claims_table(entries: Iterable[Mapping[str, Any]], kind: str, whole_names: bool) -> Table:
    """Return claims or controls as a table: name, verdict, expected, n, where to look.

    With ``whole_names`` a name stays on one line, and only the last column folds.
    """
    return _table(entries, kind, whole_names, ("differing / n",), lambda entry: [_moved(entry)])


def serving_table(entries: Iterable[Mapping[str, Any]], sweep: str, whole_names: bool) -> Table:
    """Return the claims of one serving sweep as a table, with what the sweep is asked for.

    ``repeat``: equal pairs, also across server lives, and states a prompt (mean/most, and the mean
    estimate). ``batched``: replies as alone, states a prompt, slots busy a pass. ``agree``: tokens
    and bits equal, of common positions, the largest |Δ logprob|, slots busy a pass.
    """
    columns = {
        "repeat": ("equal pairs", "across lives", "states a\nprompt"),
        "batched": ("as alone", "states a\nprompt", "slots busy\na pass"),
        "agree": ("tokens\nequal", "bits\nequal", "|Δ| max", "slots busy\na pass"),
    }[sweep]

    def shown(entry: Mapping[str, Any]) -> list[str]:
        return [value or "-" for value in serving_values(entry)]

    return _table(entries, f"{sweep} claim", whole_names, columns, shown, f"{sweep}/")


def _table(
    entries: Iterable[Mapping[str, Any]],
    kind: str,
    whole_names: bool,
    columns: Sequence[str],
    values: Callable[[Mapping[str, Any]], Sequence[str]],
    prefix: str = "",
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(kind, overflow="fold", no_wrap=whole_names)
    table.add_column("verdict", no_wrap=True)
    table.add_column("expected", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where to look", overflow="fold")
    for entry in entries:
        table.add_row(
            entry["id"].removeprefix(prefix),
            _verdict_text(entry),
            {None: "-", DIFFERS_SOMEWHERE: "somewhere"}.get(entry["expected"], entry["expected"]),
            *values(entry),
            where_to_look(entry),
        )
    return table


def _moved(entry: Mapping[str, Any]) -> str:
    n, unit = entry["n"], (entry["interval"] or {}).get("unit")
    if unit == "replies":
        return f"{n['differing_replies']} / {n['compared_replies']} replies"
    return f"{entry['n']['differing']} / {entry['n']['positions']}"


def serving_values(entry: Mapping[str, Any]) -> list[str]:
    """Return a serving claim's own numbers as text, in the order of its sweep's columns.

    '' stands for what was not measured.
    """
    n, measures = entry["n"], entry["measures"]
    if entry["sweep"] == "repeat":
        return [
            _part(n.get("pairs", 0) - n.get("differing_pairs", 0), n.get("pairs", 0)),
            _part(
                n.get("pairs_across_lives", 0) - n.get("differing_across_lives", 0),
                n.get("pairs_across_lives", 0),
            ),
            states_text(measures.get("states")),
        ]
    if entry["sweep"] == "batched":
        replies = n.get("replies", 0)
        return [
            _part(replies - n.get("differing_replies", 0), replies),
            states_text(measures.get("states")),
            busy_text(measures.get("witness")),
        ]
    score = (measures.get("agreement") or {}).get("all") or {}
    return [
        _percent(score.get("match_share_common")),
        _percent(score.get("exact_share")),
        "" if score.get("dlogp_max") is None else f"{score['dlogp_max']:.3g}",
        " ".join(filter(None, map(busy_text, (measures.get("witness") or {}).values()))),
    ]


def _part(part: int, whole: int) -> str:
    return f"{part} / {whole}" if whole else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def states_text(states: Mapping[str, Any] | None) -> str:
    """Return states a prompt: mean and maximum of those seen, and the mean of Chao's estimate."""
    if not states:
        return ""
    seen, most = states["observed_mean"], states["observed_max"]
    return f"{seen:.3g}/{most:.3g} ({states['chao1_mean']:.3g})"


def busy_text(witness: Mapping[str, Any] | None) -> str:
    """Return the mean number of slots busy in a pass beside the width: ``3.9/4``."""
    if not witness or witness.get("busy_per_decode_mean") is None:
        return ""
    return f"{witness['busy_per_decode_mean']:.2f}/{witness['width']}"


def _verdict_text(entry: Mapping[str, Any]) -> Text:
    verdict = entry["verdict"]
    if entry["as_expected"] is False:
        return Text(f"{verdict} ✗", style="bold red")
    return Text(verdict, style=_STYLES.get(verdict, ""))


def where_to_look(entry: Mapping[str, Any]) -> str:
    """Return the place that explains a verdict: the reason, else the first and worst difference."""
    if entry["sweep"] in SERVING and entry["verdict"] in (EXACT, DIFFERS):
        return ", ".join([*_serving_places(entry), *entry["reasons"]])
    if entry["reasons"]:
        more = len(entry["reasons"]) - 1
        return entry["reasons"][0] + (f" (and {more} more)" if more else "")
    parts = []
    first, worst, flips = entry["first_difference"], entry["worst"], entry["n"].get("flips")
    if first:
        variant = "" if entry["id"].endswith(f"/{first['variant']}") else f"{first['variant']} "
        parts.append(f"{variant}KV {first['kv_position']} {first['prompt_id']}")
    if worst and worst["logit_delta_max"] is not None:
        parts.append(f"Δ ≤ {worst['logit_delta_max']:.3g}")
    if flips:
        parts.append(f"{flips} flips")  # in these words in the receipts that are kept
    if entry["uncovered"]:
        parts.append(f"uncovered: {entry['uncovered']}")
    return ", ".join(parts)


def _serving_places(entry: Mapping[str, Any]) -> list[str]:
    """Return where bits and tokens first differ, and by how much a logprob does at worst.

    A pair's margins are those at the first other token, and stand beside it.
    """
    first, worst = entry["first_difference"] or {}, entry["worst"]
    apart = first.get("divergence")
    parts = []
    if first and first.get("position") is None and not apart:
        parts.append(f"other text: {first['prompt_id']}")
    elif first.get("token_differs") is False:
        parts.append(f"first other bits: token {first['position']} of {first['prompt_id']}")
    elif first and not apart:
        unit = "byte" if entry["observable"] == "text" else "token"
        parts.append(f"first other {unit}: {first['position']} of {first['prompt_id']}")
    if worst and worst.get("dlogp_max") is not None:
        parts.append(f"Δ ≤ {worst['dlogp_max']:.3g}")
    if entry["n"].get("flips") and "compared_replies" not in entry["n"]:
        parts.append(counted(entry["n"]["flips"], "flip"))
    if apart:
        parts.append(f"first other token: {divergence_text(apart)}")
    return parts


def divergence_text(apart: Mapping[str, Any]) -> str:
    """Return where two routes first choose another token, with both top-two margins there."""
    place = f"{apart['position']} of {apart['prompt_id']}"
    margins = [apart[f"margin_{side}"] for side in ("a", "b")]
    if all(margin is None for margin in margins):
        return place
    told = " and ".join("unknown" if one is None else f"{one:.2g}" for one in margins)
    return f"{place}, margins {told}"


def counted(n: int, name: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 flip``, ``3 flips``."""
    return f"{n} {name if n == 1 else plural or name + 's'}"


def closing_line(receipt: Mapping[str, Any], where: str) -> str:
    """Return the one line that says how many claims and controls hold, and where the receipt is."""
    parts = []
    for word in (EXACT, DIFFERS):
        expected = [claim for claim in receipt["claims"] if claim["expected"] == word]
        if expected:
            held = sum(claim["verdict"] == word for claim in expected)
            parts.append(f"{held} of {len(expected)} {word} claims hold")
    held = [
        control["as_expected"]
        for control in receipt["controls"]
        if control["as_expected"] is not None or control["expected"] is not None
    ]
    if held:
        parts.append(f"{held.count(True)} of {len(held)} controls hold")
    return "; ".join([*parts, f"receipt: {where}"])


def print_summary(receipt: Mapping[str, Any], where: str, stream: TextIO | None = None) -> None:
    """Print the claims, the controls and the closing line.

    ``where`` names the readable receipt. Outside a terminal there are no colours, and lines are
    124 characters wide whatever the environment says.
    """
    stream = stream or sys.stdout
    in_terminal = stream.isatty()
    console = Console(
        file=stream,
        width=None if in_terminal else _PLAIN_WIDTH,
        no_color=not in_terminal,
        highlight=False,
        emoji=False,
        markup=False,
    )
    whole_names = console.width >= _PLAIN_WIDTH
    replayed = [claim for claim in receipt["claims"] if claim["sweep"] not in SERVING]
    if replayed:
        console.print(claims_table(replayed, "claim", whole_names))
        console.print()
    for sweep in SERVING:
        served = [claim for claim in receipt["claims"] if claim["sweep"] == sweep]
        if served:
            console.print(serving_table(served, sweep, whole_names))
            console.print()
    if receipt["controls"]:
        console.print(claims_table(receipt["controls"], "control", whole_names))
        console.print()
    console.print(closing_line(receipt, where), soft_wrap=True)


def gate_lines(gate: Gate) -> list[str]:
    """Return what stands against a receipt, one line each, the worst first."""
    return [
        *[f"not as expected: {line}" for line in gate.contrary],
        *[f"cannot be believed: {line}" for line in gate.unbelieved],
        *[f"could not be measured: {line}" for line in gate.unmeasured],
        *[f"note: {line}" for line in gate.notes],
    ]
