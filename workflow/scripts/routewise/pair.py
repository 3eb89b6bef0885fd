"""A pair of routes: one agree cell, made from the replies cells of the two routes alone.

Nothing is measured here. The cell says which rows of each file are compared, takes over why a file
is invalid or its route unsupported, and records of both sides what each was measured with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from routewise.agree import agree_rows
from routewise.errors import RoutewiseError
from routewise.schema.agree import AGREE
from routewise.schema.file import read_table, write_table
from routewise.schema.replies import REPLIES

AGREE_SWEEP = "agree"
#: Columns of a replies table that say which rows are compared.
PICK = ("life", "cache", "mix", "prefill", "parallel", "width", "round")
NOT_ARITHMETIC_ONLY = "not arithmetic only"

_NAMED = ("sweep", "route", "model", "variant", "prompts", "digest")


@dataclass(frozen=True)
class PairCell:
    """What one agree cell compares.

    ``route`` is ``a|b``. ``pick_a`` and ``pick_b`` hold, by column of PICK, which rows of each
    file are compared; a column that is not named is not asked about, and each prompt and copy must
    still stand in one row.
    """

    sweep: str
    route: str
    model: str
    variant: str
    prompts: str
    digest: str
    pick_a: Mapping[str, Any]
    pick_b: Mapping[str, Any]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PairCell:
        """Read a cell from the JSON value that the plan wrote.

        A key ``pick`` holds what is picked of both files. Raises RoutewiseError where a key is
        missing, unknown, or not of an agree cell.
        """
        picks = {key: document.get(key) or {} for key in ("pick", "pick_a", "pick_b")}
        missing = sorted(set(_NAMED) - set(document))
        unknown = sorted(set(document) - set(_NAMED) - set(picks))
        if missing or unknown:
            raise RoutewiseError(
                f"agree cell: missing keys {missing}, unknown keys {unknown}",
                "run the command as the workflow prints it (snakemake -p)",
            )
        cell = cls(
            **{name: document[name] for name in _NAMED},
            pick_a={**picks["pick"], **picks["pick_a"]},
            pick_b={**picks["pick"], **picks["pick_b"]},
        )
        if cell.sweep != AGREE_SWEEP or len(cell.routes) != 2 or not all(cell.routes):
            raise RoutewiseError(
                f"agree cell: sweep {cell.sweep!r}, route {cell.route!r}; wanted sweep "
                f"{AGREE_SWEEP!r} and a route 'a|b'",
                "run the command as the workflow prints it (snakemake -p)",
            )
        wrong = ({*cell.pick_a} | {*cell.pick_b}) - {*PICK}
        if wrong:
            raise RoutewiseError(
                f"{cell.name}: rows are not picked by {', '.join(sorted(wrong))}",
                f"pick by any of {', '.join(PICK)}",
            )
        return cell

    @property
    def routes(self) -> list[str]:
        """Return the names of the two routes."""
        return self.route.split("|")

    @property
    def name(self) -> str:
        """Return the cell's name for people."""
        return f"{self.sweep} {self.route} {self.model} {self.variant}"


def compare_pair(
    cell: PairCell,
    path_a: Path,
    path_b: Path,
    code_digest: str,
    output: Path,
    planned: Mapping[str, Any] | None = None,
) -> str:
    """Write the agree cell of two replies cells to ``output``; return what it holds, in words.

    ``planned`` are the inputs of the cell as planned, for a later plan to read.

    Where a route could not do what is picked, the table has no rows and the provenance the reason;
    so it is where both sides are the very same replies, which would be equal whatever they say.
    Where no request has a valid reply on both sides the cell is invalid. Raises RoutewiseError
    where a file is not a replies cell of the route, model or prompts named, or holds none of the
    rows picked.
    """
    started_at = datetime.now(UTC)
    route_a, route_b = cell.routes
    a = _read_side(path_a, route_a, cell, cell.pick_a)
    b = _read_side(path_b, route_b, cell, cell.pick_b)
    digests = [side.told["prompts"]["digest"] for side in (a, b)]
    if digests[0] != digests[1]:
        raise RoutewiseError(
            f"{cell.name}: {path_a} and {path_b} answer different prompts (digests "
            f"{digests[0][:12]} and {digests[1][:12]})",
            "measure both routes with one prompt set and one model",
        )
    arithmetic_only = _same_weights(a.told, b.told)
    unsupported = _by_route(a, b, lambda side: side.refusals)
    reasons = _by_route(a, b, lambda side: side.told["invalid_reasons"])
    match = None
    rows = AGREE.arrow.empty_table()
    itself = None
    if not unsupported and _is_itself(a, b):
        itself = f"{route_a} was asked only once: its replies would be compared with themselves"
    elif not unsupported:
        match = "ids" if a.sends_ids and b.sends_ids else "text"
        rows = _compare(cell, a, b, arithmetic_only, match)
        if not rows.num_rows:
            reasons.append("no request has a valid reply with a token on both routes")
    provenance = {
        "cell": {key: getattr(cell, key) for key in _NAMED},
        "settings": {"pick_a": dict(cell.pick_a), "pick_b": dict(cell.pick_b), "match": match},
        "builds": {side.route: side.source for side in (a, b)},
        "weights": "same" if arithmetic_only else NOT_ARITHMETIC_ONLY,
        "arithmetic_only": arithmetic_only,
        "sides": {"a": a.document(), "b": b.document()},
        "model": a.told["model"],
        "prompts": a.told["prompts"],
        "machine": _machine(a.told["machine"], b.told["machine"]),
        "code_digest": code_digest,
        "inputs": dict(planned or {}),
        "invalid_reasons": reasons,
        "unsupported": "; ".join(unsupported) or None,
        "unobservable": itself,
        "n_measured": 0,
        "n_adopted": 0,
        # replies that both routes have and are valid, and those of them that have a row
        "n_common_replies": len(_requests(a.valid) & _requests(b.valid)),
        "n_compared": len(_requests(rows)),
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_table(output, AGREE, rows, provenance)
    if unsupported:
        return f"unsupported: {provenance['unsupported']}"
    if itself:
        return f"unobservable: {itself}"
    return f"{rows.num_rows} positions of {len(_requests(rows))} replies, matched by {match}"


def _compare(cell: PairCell, a: _Side, b: _Side, arithmetic_only: bool, match: str) -> pa.Table:
    for side in (a, b):
        if not side.picked.num_rows:
            raise side.nothing_picked()
    try:
        return agree_rows(a.picked, b.picked, arithmetic_only, match)
    except ValueError as error:
        raise RoutewiseError(
            f"{cell.name}: {error} (a: {_in_words(a.pick)}; b: {_in_words(b.pick)})",
            f"pick one row of each request by {', '.join(PICK)}",
        ) from error


@dataclass(frozen=True)
class _Side:
    """One route's file: its provenance, its rows, and those that are compared."""

    route: str
    path: Path
    told: Mapping[str, Any]
    held: pa.Table
    pick: Mapping[str, Any]
    picked: pa.Table

    @property
    def valid(self) -> pa.Table:
        """The valid rows that are compared."""
        return self.picked.filter(pc.equal(self.picked["status"], "ok"))

    @property
    def sends_ids(self) -> bool:
        """Whether the route is said to send token ids and does in every reply."""
        return self.told["serving"]["match"] == "ids" and self.valid["token_ids"].null_count == 0

    @property
    def refusals(self) -> list[str]:
        """Why the route could not do the block that is picked; empty where there are rows."""
        why = None if self.picked.num_rows else _refusal(self.told, self.pick)
        return [] if why is None else [why]

    @property
    def source(self) -> Mapping[str, Any]:
        """What the tokens came from: a build, a command or an endpoint."""
        for key in ("build", "command", "endpoint"):
            if self.told.get(key):
                found: Mapping[str, Any] = self.told[key]
                return found
        return {}

    def nothing_picked(self) -> RoutewiseError:
        """Return the error of a pick that no row meets."""
        held = [dict(zip(PICK, values, strict=True)) for values in _blocks_of(self.held)]
        return RoutewiseError(
            f"{self.path}: no replies of {_in_words(self.pick)}",
            "it holds "
            + ("no replies" if not held else _in_words(held[0]))
            + (f" and {len(held) - 1} other rounds" if len(held) > 1 else ""),
        )

    def document(self) -> dict[str, Any]:
        """Return what is recorded: what it ran on, its claim, and its replies by status."""
        told, rows = self.told, self.picked
        invalid = rows.filter(pc.not_equal(rows["status"], "ok"))
        serving = told["serving"]
        return {
            "route": self.route,
            "cell": told["cell"],
            "fingerprint": self.source.get("fingerprint"),
            "settings": told.get("settings"),
            "serving": {k: v for k, v in serving.items() if k not in ("lives", "stops")},
            "n_lives": len(serving.get("lives") or []),
            "model": told.get("model"),
            "machine": told["machine"],
            "claim": {
                "declared": serving.get("claim"),
                "wait_s": pc.max(rows["claim_wait_s"]).as_py(),
                "hold_s": pc.max(rows["claim_hold_s"]).as_py(),
                "n_others": pc.max(rows["n_others"]).as_py(),
            },
            "code_digest": told["code_digest"],
            "started_at": told["started_at"],
            "ended_at": told["ended_at"],
            "n_replies": rows.num_rows,
            "n_invalid": invalid.num_rows,
            "why_invalid": dict(Counter(str(r) for r in invalid["reason"].to_pylist())),
            "observables": sorted(set(rows["observable"].to_pylist())),
        }


def _read_side(path: Path, route: str, cell: PairCell, pick: Mapping[str, Any]) -> _Side:
    rows, told = read_table(path, REPLIES)
    found = {key: told["cell"][key] for key in ("route", "model", "prompts")}
    wanted = {"route": route, "model": cell.model, "prompts": cell.prompts}
    if found != wanted:
        raise RoutewiseError(
            f"{cell.name}: {path} holds {found}, wanted {wanted}",
            "give the replies cells of the two routes in the order of the pair's name",
        )
    return _Side(route, path, told, rows, pick, _pick(rows, pick))


def _is_itself(a: _Side, b: _Side) -> bool:
    """Say whether both sides are the same replies of one route: then it was asked only once."""
    if a.route != b.route or not a.picked.num_rows:
        return False
    named = ["prompt_index", "copy", *PICK, "released_ns", "done_ns"]  # no floats: NaN is not NaN
    return bool(a.picked.select(named).equals(b.picked.select(named)))


def _by_route(a: _Side, b: _Side, said: Callable[[_Side], list[str]]) -> list[str]:
    """Return what is said of both sides, each with its route, none of it twice."""
    return list(dict.fromkeys(f"{side.route}: {one}" for side in (a, b) for one in said(side)))


def _refusal(told: Mapping[str, Any], pick: Mapping[str, Any]) -> str | None:
    """Return why a route could not do the block that is picked, or None where it could."""
    if told.get("unsupported"):
        return str(told["unsupported"])
    for refused in told.get("refused_blocks") or []:
        block = refused["block"]
        if all(block[name] == value for name, value in pick.items() if name in block):
            return str(refused["reason"])
    return None


def _pick(rows: pa.Table, pick: Mapping[str, Any]) -> pa.Table:
    """Return the rows picked; beside neighbours or fillers only the probe is compared.

    Raises RoutewiseError where a value is not of its column's type.
    """
    picked = rows.filter(pc.or_(pc.equal(rows["mix"], "copies"), pc.equal(rows["role"], "probe")))
    for name, value in pick.items():
        try:
            wanted = pa.scalar(value, picked[name].type)
        except (pa.ArrowException, TypeError) as error:
            raise RoutewiseError(
                f"agree cell: {name} {value!r} is no {picked[name].type}",
                f"pick by values of the column {name}",
            ) from error
        picked = picked.filter(pc.equal(picked[name], wanted))
    return picked


def _blocks_of(rows: pa.Table) -> list[tuple[Any, ...]]:
    return sorted({tuple(row.values()) for row in rows.select(PICK).to_pylist()})


def _in_words(pick: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {pick[name]}" for name in PICK if name in pick) or "any block"


def _same_weights(told_a: Mapping[str, Any], told_b: Mapping[str, Any]) -> bool:
    """Say whether both routes load the same weights, by what they declare and by the files."""
    if {told["serving"]["weights"] for told in (told_a, told_b)} != {"same"}:
        return False
    digests = {(told.get("model") or {}).get("sha256") for told in (told_a, told_b)} - {None}
    return len(digests) <= 1


def _machine(a: Mapping[str, Any], b: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the machine, or the kinds of both where they are two."""
    return a if a == b else {"kind": f"{a.get('kind')} | {b.get('kind')}"}


def _requests(rows: pa.Table) -> set[tuple[Any, ...]]:
    return set(zip(rows["prompt_index"].to_pylist(), rows["copy"].to_pylist(), strict=True))
