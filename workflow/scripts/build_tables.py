"""Make a study's long tables from its cell files.

Reads cell Parquet files; writes cells.parquet (one row per cell file) and, with the cells' rows,
replay, plain, cost, replies, agree and dispatch.parquet. A table that no cell fills is empty.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routewise.errors import report_errors
from routewise.table import build_tables, write_tables


@report_errors
def main(study: dict[str, Any], cells: Sequence[Path], tables: Path) -> None:
    """Write the tables of ``study`` (its declaration) made from ``cells`` into ``tables``."""
    made = build_tables(study, cells)
    write_tables(tables, study, made)
    rows = ", ".join(
        f"{name.removeprefix('study_')} {made[name].num_rows}" for name in sorted(made)
    )
    print(f"{tables}: {len(set(cells))} cells; rows: {rows}")


def _study(text: str) -> dict[str, Any]:
    try:
        study = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(study, dict) or "study" not in study:
        raise argparse.ArgumentTypeError("no study declaration: it has no key 'study'")
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("--study", type=_study, required=True, help="the study as one JSON string")
    parser.add_argument("--tables", type=Path, required=True, help="folder to write the tables to")
    parser.add_argument(
        "cells",
        type=Path,
        nargs="*",
        help="cell files; @FILE takes arguments from a file, one a line",
    )
    arguments = parser.parse_args()
    sys.exit(main(arguments.study, arguments.cells, arguments.tables))
