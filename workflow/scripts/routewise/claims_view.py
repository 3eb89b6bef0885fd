"""The view of claims: who holds which device, since when, and who waits."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from routewise.claim import Claim, claimed_devices, claims_folder, clock, printable, read_claims
from routewise.errors import RoutewiseError
from routewise.progress import duration

_TITLES = ("device", "unit", "state", "since", "for", "limit", "user", "process", "label")
_UNIT_CHARACTERS = 12


def print_claims(stream: TextIO, folder: Path | None = None) -> None:
    """Print one line for each claim: per device the holders, then the queue in its order.

    A holder whose limit has passed is marked OVERDUE. A device whose ledger cannot be read is named
    below the others. Raises RoutewiseError where there is no folder for claims.
    """
    folder = claims_folder() if folder is None else folder
    claims, problems = [], []
    for device in claimed_devices(folder):
        try:
            claims += read_claims(folder, device)
        except RoutewiseError as error:
            problems.append(f"{printable(device)}: {error}")
    if claims:
        _print_table(stream, claims)
    else:
        print(f"Nothing is held, and nobody waits (claims are kept in {folder}).", file=stream)
    for problem in problems:
        print(problem, file=stream)


def _print_table(stream: TextIO, claims: list[Claim]) -> None:
    rows = [_TITLES, *(_cells(claim) for claim in claims)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip(), file=stream)


def _cells(claim: Claim) -> tuple[str, ...]:
    state = f"waits, place {claim.place}" if claim.place else "OVERDUE" if claim.overdue else "held"
    return (
        claim.device,
        ",".join(_shortened(unit) for unit in claim.units),
        state,
        clock(claim.since),
        duration(claim.passed_s),
        duration(claim.limit_s),
        claim.user,
        str(claim.pid),
        claim.label,
    )


def _shortened(unit: str) -> str:
    return unit if len(unit) <= _UNIT_CHARACTERS else f"{unit[: _UNIT_CHARACTERS - 1]}…"
