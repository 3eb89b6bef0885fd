"""The readable receipt: Markdown, made from receipt.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from routewise.summary import closing_line, where_to_look
from routewise.verdict import DIFFERS_SOMEWHERE, EXACT

FIGURES = {
    "delta_by_position": "Largest logit difference by KV position and width",
    "flips_and_margins": "Flips of the greedy token and the plain top-two margin",
    "price_by_width": "Pass time by width",
}


def drawn_figures(receipt: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures that a receipt's sweeps have."""
    replay = list(FIGURES)[:2] if receipt["claims"] or receipt["controls"] else []
    return [*replay, *(["price_by_width"] if receipt["price"] else [])]


def receipt_markdown(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as Markdown: verdicts first, then controls, price, scope and provenance.

    Its figures are expected in the folder ``figures`` beside it.
    """
    sections = [
        f"# Receipt of the study `{receipt['study']}`",
        closing_line(receipt, "receipt.json") + ".",
        *_verdicts(receipt),
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
    """Return the share of differing positions with its interval."""
    interval = entry["interval"]
    if interval is None:
        return "–"
    if interval["k"] == 0:
        return f"≤ {interval['high']:.2%}"
    return f"{interval['k'] / interval['n']:.1%} ({interval['low']:.1%} to {interval['high']:.1%})"


def _verdict(entry: Mapping[str, Any]) -> str:
    qualified = ", qualified" if entry["verdict"] == EXACT and entry["uncovered"] else ""
    return f"**{entry['verdict']}**{qualified}"


def _entries(entries: Iterable[Mapping[str, Any]], kind: str) -> str:
    return _table(
        (kind, "verdict", "expected", "positions", "differing", "share, 95 %", "flips", "where"),
        (
            (
                f"`{entry['id']}`",
                _verdict(entry),
                _expected(entry),
                entry["n"]["positions"],
                entry["n"]["differing"],
                _bound(entry),
                entry["n"].get("flips"),
                where_to_look(entry) or None,
            )
            for entry in entries
        ),
    )


def _verdicts(receipt: Mapping[str, Any]) -> list[str]:
    if not receipt["claims"]:
        return ["## Verdicts", "This study makes no claim."]
    observables = sorted({claim["observable"] for claim in receipt["claims"]})
    text = (
        f"Compared were {' and '.join(observables)}, bit by bit. Only `exact` is a pass; what is "
        "`invalid` is in no count. A share with ≤ is the one-sided bound for none seen, one in "
        "brackets is Clopper and Pearson's; both take positions as independent."
    )
    return ["## Verdicts", text, _entries(receipt["claims"], "claim")]


def _controls(receipt: Mapping[str, Any]) -> list[str]:
    if not receipt["controls"]:
        return []
    text = "Their answers were known in advance. Where one fails, the claims that rest on it are "
    statements = "\n".join(
        f"- `{control['id']}`: {control['statement']}." for control in receipt["controls"]
    )
    return [
        "## Controls",
        text + "invalid.",
        _entries(receipt["controls"], "control"),
        statements,
    ]


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
    return ["## Price", text, _table(header, rows)]


def _time(row: Mapping[str, Any]) -> str | None:
    if row["pass_ms"] is None:
        return None
    return f"{row['pass_ms']:.3g}" if row["absolute"] else f"({row['pass_ms']:.3g})"


def _scope(receipt: Mapping[str, Any]) -> list[str]:
    """Return the scope, one row per route and model: the same for all its variants but widths."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for claim in receipt["claims"]:
        groups.setdefault((claim["route"], claim["model"]), []).append(claim)
    if not groups:
        return []
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
    return ["## Scope", "Nothing outside this was measured.", _table(header, rows), *notes]


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
    shares = [row["detectable_share"] for row in receipt["power"] if row["detectable_share"]]
    if not shares:
        return []
    return [
        "## Power",
        f"A difference that moves {max(shares):.2%} of positions or more would have been seen by "
        f"each claim with 95 % probability (the best claim sees {min(shares):.2%}).",
    ]


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
