"""A pair of routes: one agree cell, made from the replies cells of the two routes alone.

Nothing is measured here. The cell says which rows of each file are compared, takes over why a file
is invalid or its route unsupported, and records of both sides what each was measured with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from routewise.agree import agree_rows
from routewise.errors import RoutewiseError
from routewise.schema import AGREE, read_table, write_table

AGREE_SWEEP = "agree"
#: Columns of a replies table that say which rows are compared.
PICK = ("life", "cache", "mix", "prefill", "parallel", "width", "round")
NOT_ARITHMETIC_ONLY = "not arithmetic only"

_NAMED = ("sweep", "route", "model", "variant", "prompts", "digest")


@dataclass(frozen=True)
class PairCell:
    """What one agree cell compares.

    ``route`` is ``a|b``. ``pick`` holds one value for each column of PICK: the rows compared.
    ``pick_b`` holds the values that are other for b, as where a route is compared with itself in
    another life or round.
    """

    sweep: str
    route: str
    model: str
    variant: str
    prompts: str
    digest: str
    pick: Mapping[str, Any]
    pick_b: Mapping[str, Any]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PairCell:
        """Read a cell from the JSON value that the plan wrote.

        Raises RoutewiseError where a key is missing, unknown, or not of an agree cell.
        """
        known = {*_NAMED, "pick", "pick_b"}
        missing = sorted(known - {"pick_b"} - set(document))
        unknown = sorted(set(document) - known)
        if missing or unknown:
            raise RoutewiseError(
                f"agree cell: missing keys {missing}, unknown keys {unknown}",
                "run the command as the workflow prints it (snakemake -p)",
            )
        cell = cls(**{"pick_b": {}, **document})
        if cell.sweep != AGREE_SWEEP or len(cell.routes) != 2 or not all(cell.routes):
            raise RoutewiseError(
                f"agree cell: sweep {cell.sweep!r}, route {cell.route!r}; wanted sweep "
                f"{AGREE_SWEEP!r} and a route 'a|b'",
                "run the command as the workflow prints it (snakemake -p)",
            )
        wrong = set(cell.pick) ^ set(PICK) | set(cell.pick_b) - set(PICK)
        if wrong:
            raise RoutewiseError(
                f"{cell.name}: pick: {', '.join(sorted(wrong))}: missing or unknown",
                f"give exactly {', '.join(PICK)}",
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


def compare_pair(cell: PairCell, path_a: Path, path_b: Path, code_digest: str, output: Path) -> str:
    """Write the agree cell of two replies cells to ``output``; return what it holds, in words.

    Where a route is unsupported the table has no rows and the provenance the reason. Where no
    request has a valid reply on both sides the cell is invalid. Raises RoutewiseError where a file
    is not a replies cell of the route, model or prompts named, or holds none of the rows picked.
    """
    started_at = datetime.now(UTC)
    route_a, route_b = cell.routes
    a, told_a = _read_side(path_a, route_a, cell)
    b, told_b = _read_side(path_b, route_b, cell)
    if told_a["prompts"]["digest"] != told_b["prompts"]["digest"]:
        raise RoutewiseError(
            f"{cell.name}: {path_a} and {path_b} answer different prompts (digests "
            f"{told_a['prompts']['digest'][:12]} and {told_b['prompts']['digest'][:12]})",
            "measure both routes with one prompt set and one model",
        )
    unsupported = [
        f"{route}: {told['unsupported']}"
        for route, told in _once(route_a, told_a, route_b, told_b)
        if told.get("unsupported")
    ]
    arithmetic_only = _same_weights(told_a, told_b)
    reasons = [
        f"{route}: {reason}"
        for route, told in _once(route_a, told_a, route_b, told_b)
        for reason in told.get("invalid_reasons") or []
    ]
    match = None
    rows = AGREE.empty_table()
    if not unsupported:
        a = _pick(a, dict(cell.pick), path_a)
        b = _pick(b, {**cell.pick, **cell.pick_b}, path_b)
        match = "ids" if _sends_ids(a, told_a) and _sends_ids(b, told_b) else "text"
        try:
            rows = agree_rows(a, b, arithmetic_only, match)
        except ValueError as error:
            raise RoutewiseError(
                f"{cell.name}: {error}", "delete the two replies files and measure them again"
            ) from error
        if not rows.num_rows:
            reasons.append("no request has a valid reply with a token on both routes")
    provenance = {
        "cell": {key: getattr(cell, key) for key in _NAMED},
        "settings": {"pick": dict(cell.pick), "pick_b": dict(cell.pick_b), "match": match},
        "builds": {route_a: _source_of(told_a), route_b: _source_of(told_b)},
        "weights": "same" if arithmetic_only else NOT_ARITHMETIC_ONLY,
        "arithmetic_only": arithmetic_only,
        "sides": {
            "a": _side(route_a, told_a, a if not unsupported else None),
            "b": _side(route_b, told_b, b if not unsupported else None),
        },
        "model": told_a["model"],
        "prompts": told_a["prompts"],
        "machine": _machine(told_a["machine"], told_b["machine"]),
        "code_digest": code_digest,
        "invalid_reasons": reasons,
        **({"unsupported": "; ".join(unsupported)} if unsupported else {}),
        "n_measured": 0,
        "n_adopted": 0,
        "n_compared": len(_requests(rows)),
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_table(output, "agree", rows, provenance)
    if unsupported:
        return f"unsupported: {'; '.join(unsupported)}"
    return f"{rows.num_rows} positions of {len(_requests(rows))} replies, matched by {match}"


def _read_side(path: Path, route: str, cell: PairCell) -> tuple[pa.Table, dict[str, Any]]:
    rows, told = read_table(path, "replies")
    found = {key: told["cell"][key] for key in ("route", "model", "prompts")}
    wanted = {"route": route, "model": cell.model, "prompts": cell.prompts}
    if found != wanted:
        raise RoutewiseError(
            f"{cell.name}: {path} holds {found}, wanted {wanted}",
            "give the replies cells of the two routes in the order of the pair's name",
        )
    return rows, told


def _once(
    route_a: str, told_a: dict[str, Any], route_b: str, told_b: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Return both sides with their names, one where both are the same file's."""
    sides = [(route_a, told_a), (route_b, told_b)]
    return sides[:1] if sides[0] == sides[1] else sides


def _pick(rows: pa.Table, pick: dict[str, Any], path: Path) -> pa.Table:
    """Return the rows of a block's round; beside neighbours or fillers only the probe is compared.

    Raises RoutewiseError where there are none.
    """
    chosen = pa.array([True] * rows.num_rows, pa.bool_())
    for name in PICK:
        chosen = pc.and_(chosen, pc.equal(rows[name], pa.scalar(pick[name], rows[name].type)))
    picked = rows.filter(chosen)
    if pick["mix"] != "copies":
        picked = picked.filter(pc.equal(picked["role"], "probe"))
    if not picked.num_rows:
        held = sorted({tuple(row.values()) for row in rows.select(PICK).to_pylist()})
        raise RoutewiseError(
            f"{path}: no replies of {_in_words(pick)}",
            "it holds "
            + ("no replies" if not held else _in_words(dict(zip(PICK, held[0], strict=True))))
            + (f" and {len(held) - 1} other rounds" if len(held) > 1 else ""),
        )
    return picked


def _in_words(pick: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {pick[name]}" for name in PICK)


def _sends_ids(rows: pa.Table, told: Mapping[str, Any]) -> bool:
    valid = rows.filter(pc.equal(rows["status"], "ok"))
    return told["serving"]["match"] == "ids" and valid["token_ids"].null_count == 0


def _same_weights(told_a: Mapping[str, Any], told_b: Mapping[str, Any]) -> bool:
    """Say whether both routes load the same weights, by what they declare and by the files."""
    if {told["serving"]["weights"] for told in (told_a, told_b)} != {"same"}:
        return False
    digests = {(told.get("model") or {}).get("sha256") for told in (told_a, told_b)} - {None}
    return len(digests) <= 1


def _source_of(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the tokens came from: a build, a command or an endpoint."""
    for key in ("build", "command", "endpoint"):
        if told.get(key):
            found: Mapping[str, Any] = told[key]
            return found
    return {}


def _side(route: str, told: Mapping[str, Any], rows: pa.Table | None) -> dict[str, Any]:
    """Return what is recorded of one side: what it ran on, its claim, and its replies by status."""
    lives = told["serving"].get("lives") or []
    side = {
        "route": route,
        "cell": told["cell"],
        "fingerprint": _source_of(told).get("fingerprint"),
        "settings": told.get("settings"),
        "serving": {key: value for key, value in told["serving"].items() if key != "lives"},
        "n_lives": len(lives),
        "model": told.get("model"),
        "machine": told["machine"],
        "claim": {"declared": told.get("claim")},
        "code_digest": told["code_digest"],
        "started_at": told["started_at"],
        "ended_at": told["ended_at"],
    }
    if rows is not None:
        invalid = rows.filter(pc.not_equal(rows["status"], "ok"))
        side["claim"] |= {
            "wait_s": pc.max(rows["claim_wait_s"]).as_py(),
            "hold_s": pc.max(rows["claim_hold_s"]).as_py(),
            "n_others": pc.max(rows["n_others"]).as_py(),
        }
        side["n_replies"] = rows.num_rows
        side["n_invalid"] = invalid.num_rows
        side["why_invalid"] = dict(Counter(str(r) for r in invalid["reason"].to_pylist()))
        side["observables"] = sorted(set(rows["observable"].to_pylist()))
    return side


def _machine(a: Mapping[str, Any], b: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the machine, or the kinds of both where they are two."""
    return a if a == b else {"kind": f"{a.get('kind')} | {b.get('kind')}"}


def _requests(rows: pa.Table) -> set[tuple[Any, ...]]:
    return set(zip(rows["prompt_index"].to_pylist(), rows["copy"].to_pylist(), strict=True))
