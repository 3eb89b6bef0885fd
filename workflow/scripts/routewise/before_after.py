"""Two receipts side by side: what changed in verdicts, in the plain arms' bits, and in price.

Bits are read from the tables beside a receipt or from the cell files that it names. What cannot be
read, or was measured again since, is *unobservable* and never equal. Times of two runs are not
compared: a machine's speed drifts. Ratios are paired within one job and can be.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from routewise.digest import sha256_file
from routewise.errors import (
    EXIT_AS_CLAIMED,
    EXIT_DIFFERS,
    EXIT_NOT_MEASURED,
    RoutewiseError,
)
from routewise.history import (
    SHORT,
    find_receipt,
    history_folder,
    listing,
    measured_to,
)
from routewise.interval import LEVEL, share_interval
from routewise.receipt import read_receipt
from routewise.schema.file import read_table
from routewise.schema.replay import PLAIN
from routewise.table import REPLAY_SWEEP, build_of, read_rows

_ROW = ["prompt_id", "step"]


@dataclass
class Report:
    """What a comparison found: lines to print, and how many things changed or were unseen."""

    lines: list[str] = field(default_factory=list)
    n_changed: int = 0
    n_unobservable: int = 0

    def changed(self, line: str) -> None:
        """Tell a change."""
        self.lines.append(f"  changed       {line}")
        self.n_changed += 1

    def same(self, line: str) -> None:
        """Tell that no change was found."""
        self.lines.append(f"  same          {line}")

    def unobservable(self, line: str) -> None:
        """Tell what could not be compared."""
        self.lines.append(f"  unobservable  {line}")
        self.n_unobservable += 1

    @property
    def exit_code(self) -> int:
        """0 nothing changed, 1 something did, 2 something could not be seen and nothing changed."""
        if self.n_changed:
            return EXIT_DIFFERS
        return EXIT_NOT_MEASURED if self.n_unobservable else EXIT_AS_CLAIMED


def compare_receipts(old: Path, new: Path, results: Path) -> Report:
    """Compare two receipt files; ``results`` is where their cells are.

    Raises RoutewiseError where a receipt cannot be read, or where the two share no claim, control,
    or price.
    """
    files = (old, new)
    receipts = (read_receipt(old), read_receipt(new))
    report = Report()
    for name, path, receipt in zip(("old", "new"), files, receipts, strict=True):
        report.lines.append(
            f"{name}: {receipt['study']}, measured to {measured_to(receipt) or '?'}, "
            f"digest {sha256_file(path)[:SHORT]}, {path}"
        )
    if sha256_file(old) == sha256_file(new):
        report.lines.append("the two are one receipt, byte for byte")
        return report
    if not _shared(*receipts):
        raise RoutewiseError(
            f"{old} and {new} share no claim, no control and no price: studies "
            f"{receipts[0]['study']} and {receipts[1]['study']}",
            "name two receipts of one study; --list shows those that are kept",
        )
    _context(report, *receipts)
    for title in ("claims", "controls"):
        _verdicts(report, title, *(_by_id(receipt[title]) for receipt in receipts))
    _bits(report, files, receipts, results)
    _price(report, *receipts)
    report.lines.append(f"{report.n_changed} changed, {report.n_unobservable} unobservable")
    return report


def _by_id(entries: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(entry["id"]): entry for entry in entries}


def _shared(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    for title in ("claims", "controls"):
        if _by_id(old[title]).keys() & _by_id(new[title]).keys():
            return True
    return bool(_prices(old).keys() & _prices(new).keys())


def _context(report: Report, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Say what differs in what made the numbers; that alone is no change of a result."""
    before, after = old["provenance"], new["provenance"]
    for key in ("study_digest", "machines", "code_digests", "prompts", "models"):
        if before.get(key) != after.get(key):
            report.lines.append(f"  made with other {key.replace('_', ' ')}")
    for route in before.get("routes", {}).keys() & after.get("routes", {}).keys():
        one, two = (str(side["routes"][route].get("fingerprint")) for side in (before, after))
        if one != two:
            report.lines.append(f"  route {route}: other libraries, {one[:SHORT]} -> {two[:SHORT]}")


def _count(entry: Mapping[str, Any]) -> str:
    interval = entry.get("interval")
    if not interval:
        return "no interval"
    return (
        f"{interval['k']} of {interval['n']} differ [{interval['low']:.3%}, {interval['high']:.3%}]"
    )


def _verdicts(
    report: Report,
    title: str,
    old: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
) -> None:
    report.lines.append(f"{title}:")
    n_same = 0
    for name in dict.fromkeys([*old, *new]):
        if name not in new or name not in old:
            side, entry = ("old", old[name]) if name in old else ("new", new[name])
            report.changed(f"{name}: only in {side}, {entry['verdict']}")
            continue
        one, two = old[name], new[name]
        if one["verdict"] != two["verdict"]:
            report.changed(
                f"{name}: {one['verdict']} ({_count(one)}) -> {two['verdict']} ({_count(two)})"
                + "".join(f"; {reason}" for reason in two["reasons"][:1])
            )
        elif (one["n"], one["expected"], one["uncovered"]) != (
            two["n"],
            two["expected"],
            two["uncovered"],
        ):
            told = _overlap(one.get("interval"), two.get("interval"))
            report.changed(
                f"{name}: {one['verdict']} both, numbers {_count(one)} -> {_count(two)}, {told}"
            )
        else:
            n_same += 1
    report.same(f"{n_same} of {len(old.keys() | new.keys())} {title}")


def _overlap(one: Mapping[str, Any] | None, two: Mapping[str, Any] | None) -> str:
    if not one or not two:
        return "no interval to compare"
    apart = one["high"] < two["low"] or two["high"] < one["low"]
    return "intervals apart" if apart else "intervals overlap"


def _plain_cells(receipt: Mapping[str, Any]) -> dict[tuple[str, str], str | None]:
    """Return the plain cell's path by (route, model); None where the receipt names none."""
    found: dict[tuple[str, str], str | None] = {}
    for entry in [*receipt["claims"], *receipt["controls"]]:
        if entry["sweep"] != REPLAY_SWEEP or "|" in entry["model"]:
            continue
        key = (entry["route"], entry["model"])
        name = f"{REPLAY_SWEEP}.{key[0]}.{key[1]}.plain.parquet"
        paths = [path for path in entry["cells"] if Path(path).name == name]
        found[key] = paths[0] if paths else found.get(key)
    return found


def _plain_rows(
    file: Path, receipt: dict[str, Any], shown: str | None, results: Path
) -> pd.DataFrame | str:
    """Return the plain rows of a cell that a receipt names, or why they cannot be had."""
    if shown is None:
        return "the receipt names no plain cell"
    table = file.parent / "tables" / "plain.parquet"
    if table.is_file():
        try:
            rows, _ = read_rows(table, "plain")
        except RoutewiseError as error:
            return error.problem
        if len(rows := rows[rows["cell"] == shown]):
            # tables may have been made again, and the receipt not
            if set(rows["fingerprint"]) != {_recorded(receipt, rows["route"].iloc[0])}:
                return f"{table} was made of other libraries than the receipt says"
            return rows
    places = (Path(shown), results / "cells" / Path(shown).parent.name / Path(shown).name)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return f"{shown} is not there, nor are tables beside the receipt"
    try:
        cell, provenance = read_table(path, PLAIN)
    except RoutewiseError as error:
        return error.problem
    # the path is that of the inputs: a cell that was measured again lies at the same place
    if str(provenance.get("ended_at") or "") > measured_to(receipt):
        return f"{path} was measured again after the receipt"
    route = provenance["cell"]["route"]
    if build_of(provenance, route).get("fingerprint") != _recorded(receipt, route):
        return f"{path} was measured with other libraries than the receipt says"
    return cell.select([*_ROW, "prompt_index", "status", "logits_hash"]).to_pandas()


def _recorded(receipt: Mapping[str, Any], route: str) -> Any:
    return receipt["provenance"]["routes"].get(route, {}).get("fingerprint")


def _bits(
    report: Report,
    files: Sequence[Path],
    receipts: Sequence[dict[str, Any]],
    results: Path,
) -> None:
    report.lines.append("bits of the plain arms (rows of logits by prompt and step):")
    cells = [_plain_cells(receipt) for receipt in receipts]
    arms = list(dict.fromkeys([*cells[0], *cells[1]]))
    if not arms:
        report.lines.append("  no plain arm in either")
    for arm in arms:
        name = "/".join(arm)
        if arm not in cells[0] or arm not in cells[1]:
            report.changed(f"{name}: only in {'old' if arm in cells[0] else 'new'}")
            continue
        sides = [
            _plain_rows(file, receipt, cell[arm], results)
            for file, receipt, cell in zip(files, receipts, cells, strict=True)
        ]
        faults = [
            f"{side}: {rows}"
            for side, rows in zip(("old", "new"), sides, strict=True)
            if isinstance(rows, str)
        ]
        frames = [rows for rows in sides if not isinstance(rows, str)]
        if faults:
            report.unobservable(f"{name}: {'; '.join(faults)}")
        else:
            _arm(report, name, *frames)


def _arm(report: Report, name: str, old: pd.DataFrame, new: pd.DataFrame) -> None:
    """Compare the rows of one plain arm; rows that are not valid in both are not compared."""
    kept = [*_ROW, "prompt_index", "status", "logits_hash"]
    both = old[kept].merge(new[kept], on=_ROW, suffixes=("_old", "_new"))
    n_alone = len(old) + len(new) - 2 * len(both)
    valid = both[(both["status_old"] == "ok") & (both["status_new"] == "ok")]
    n_invalid = len(both) - len(valid)
    differs = valid[valid["logits_hash_old"] != valid["logits_hash_new"]]
    interval = share_interval(len(differs), len(valid))
    beside = (f", {n_alone} rows only in one" if n_alone else "") + (
        f", {n_invalid} rows not valid" if n_invalid else ""
    )
    if interval is None:
        report.unobservable(f"{name}: no row is valid in both{beside}")
        return
    n_equal = len(valid) - len(differs)
    if len(differs):
        first = differs.sort_values(["prompt_index_new", "step"]).iloc[0]
        report.changed(
            f"{name}: {n_equal} of {len(valid)} rows equal, {len(differs)} differ "
            f"[{interval['low']:.3%}, {interval['high']:.3%}], first: prompt "
            f"{first['prompt_id']} step {first['step']}{beside}"
        )
        return
    told = (
        f"{name}: {n_equal} of {len(valid)} rows equal, with {LEVEL:.0%} confidence at most "
        f"{interval['high']:.3%} differ{beside}"
    )
    if n_alone:
        report.changed(told)
    elif n_invalid:
        report.unobservable(told)
    else:
        report.same(told)


def _prices(receipt: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {
        (row["route"], row["model"], row.get("depth"), row["width"]): row
        for row in receipt["price"]
    }


def _price(report: Report, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    report.lines.append("price (ratios paired within one job; times of two runs are not compared):")
    before, after = _prices(old), _prices(new)
    for key in dict.fromkeys([*before, *after]):
        route, model, depth, width = key
        name = f"{route}/{model} depth {depth} width {width}"
        if key not in before or key not in after:
            report.changed(f"{name}: only in {'old' if key in before else 'new'}")
            continue
        one, two = before[key], after[key]
        if width != 1:
            _ratio(report, f"{name}, to width 1", "ratio", one, two)
        if one.get("reference") or two.get("reference"):
            if one.get("reference") != two.get("reference"):
                report.changed(
                    f"{name}: reference {one.get('reference')} -> {two.get('reference')}"
                )
            else:
                _ratio(report, f"{name}, to {one['reference']}", "ratio_to_reference", one, two)


def _ratio(
    report: Report, name: str, key: str, one: Mapping[str, Any], two: Mapping[str, Any]
) -> None:
    """Compare one ratio of pass times; it changed where the two intervals lie apart."""
    told = f"{name}: {_shown(one, key)} -> {_shown(two, key)}"
    bounds = [row.get(f"{key}_interval") for row in (one, two)]
    overlap = _overlap(*bounds)
    if not all(bounds):
        report.unobservable(f"{told}, {overlap}")
    elif overlap == "intervals apart":
        report.changed(f"{told}, {overlap}")
    else:
        report.same(f"{told}, {overlap}: no change shown")


def _shown(row: Mapping[str, Any], key: str) -> str:
    """Return a ratio with its interval and the quartiles of its pairs."""
    if row.get(key) is None:
        return "not measured"
    texts = [f"{row[key]:.3f}"]
    for name, mark in (("interval", "[{:.3f}, {:.3f}]"), ("quartiles", "spread {:.3f} to {:.3f}")):
        if bounds := row.get(f"{key}_{name}"):
            texts.append(mark.format(bounds["low"], bounds["high"]))
    return " ".join(texts)


def run_compare(arguments: argparse.Namespace) -> int:
    """Compare two receipts, or list those that are kept; return the exit code."""
    history = history_folder(arguments.results)
    if arguments.list:
        print(listing(history))
        return EXIT_AS_CLAIMED
    if arguments.old is None or arguments.new is None:
        raise RoutewiseError(
            f"compare: wanted OLD and NEW. Kept receipts:\n{listing(history)}",
            "name two of these by digest, or two receipt.json",
        )
    old, new = (find_receipt(named, history) for named in (arguments.old, arguments.new))
    report = compare_receipts(old, new, arguments.results)
    print("\n".join(report.lines))
    return report.exit_code


def add_compare_parser(commands: Any) -> None:
    """Add the command ``compare``."""
    command = commands.add_parser("compare", help="what changed between two receipts")
    place = "a receipt.json, a folder with one, or the beginning of a kept receipt's digest"
    command.add_argument("old", nargs="?", metavar="OLD", help=place)
    command.add_argument("new", nargs="?", metavar="NEW", help=place)
    command.add_argument("--results", type=Path, default=Path("results"))
    command.add_argument("--list", action="store_true", help="list the kept receipts")
    command.set_defaults(run=run_compare)
