"""Which format the results of a folder have: one small file, and what is said of another one.

``results/format.json`` holds the number. It stands in the digest of every cell too, so that cells
of two formats never mix; the file is there to say so, and to stop a Routewise that is too old.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from routewise.digest import canonical_json, write_text
from routewise.errors import RoutewiseError
from routewise.inputs import RESULTS_FORMAT
from routewise.schema.file import read_provenance

NAME = "format.json"


def check_format(results: Path) -> int | None:
    """Return the format that a results folder says it has, or None where it says none.

    Raises RoutewiseError where a newer Routewise wrote it, and where the file cannot be read.
    """
    path = results / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RoutewiseError(
            f"{path}: cannot be read ({error})", f"see who owns it (ls -l {path})"
        ) from error
    try:
        number = json.loads(text)["format"]
    except (ValueError, TypeError, KeyError):
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise RoutewiseError(
            f'{path}: holds no format number; {{"format": {RESULTS_FORMAT}}} is wanted',
            "remove it: the next run looks at the cells and writes it anew",
        )
    if number > RESULTS_FORMAT:
        raise RoutewiseError(
            f"{path}: these results have format {number}, and this Routewise knows up to "
            f"{RESULTS_FORMAT}. Nothing was run",
            "take the newer Routewise, or run in a working folder of its own",
        )
    return number


def say_older(results: Path) -> str | None:
    """Return what to say of a folder with results of an older format; None where there are none.

    Says it until ``mark_format`` was called. Raises what ``check_format`` raises.
    """
    said = check_format(results)
    if said == RESULTS_FORMAT:
        return None
    formats = Counter(_formats(results / "cells"))
    older = sum(n for number, n in formats.items() if number != RESULTS_FORMAT)
    if not older:
        return None
    told = ", ".join(
        f"{n} of format {number}" if number else f"{n} from before formats had numbers"
        for number, n in sorted(formats.items())
        if number != RESULTS_FORMAT
    )
    return (
        f"{results} holds results of an older Routewise ({told}; this one writes format "
        f"{RESULTS_FORMAT}). These cells are kept and not used: their sweeps start afresh beside "
        "them; sources, builds and models are used as they are. To remove everything: `make "
        "clean-results`; what no cell uses: `python -m routewise store prune`. To keep using the "
        "old results, run the Routewise that made them. This is said until a run has begun"
    )


def mark_format(results: Path) -> None:
    """Write the format of this Routewise into a results folder, whole or not at all.

    Raises what ``check_format`` raises, and OSError where the folder cannot be written to.
    """
    if check_format(results) == RESULTS_FORMAT:
        return
    results.mkdir(parents=True, exist_ok=True)
    write_text(results / NAME, canonical_json({"format": RESULTS_FORMAT}) + "\n")


def _formats(cells: Path) -> list[int]:
    """Return the format of each cell file, 0 where it says none."""
    found = []
    for path in cells.glob("*/*.parquet"):
        inputs = read_provenance(path).get("inputs")
        number = inputs.get("format") if isinstance(inputs, dict) else None
        found.append(number if isinstance(number, int) else 0)
    return found
