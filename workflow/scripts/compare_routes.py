"""Compare two routes' replies to the same requests: one cell of the agree sweep.

Reads two replies cells (schema/replies.py), picks the rows that the cell names, and writes one
Parquet file (agree) with one row per aligned position. Measures nothing. Ends when the Snakemake
that started it ends.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from routewise.errors import RoutewiseError, report_errors
from routewise.normalise import check_code
from routewise.pair import PairCell, compare_pair
from routewise.watch import end_with_snakemake


@report_errors
def main(
    cell: str, a: Path, b: Path, code_digest: str, inputs: dict[str, Any], output: Path
) -> None:
    """Compare the replies files ``a`` and ``b`` as ``cell`` (one JSON string) says."""
    end_with_snakemake()
    pair = PairCell.from_document(_document(cell))
    check_code(Path(__file__), code_digest, output.parent.parent.parent)  # results/cells/DIGEST
    print(f"{pair.name}: writing {output}")
    print(f"{pair.name}: {compare_pair(pair, a, b, code_digest, output, inputs)}")


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise RoutewiseError(
            f"--cell is not JSON: {error}", "quote the whole string for the shell"
        ) from error
    if not isinstance(document, dict):
        raise RoutewiseError("--cell is no JSON object", "give the cell as the workflow prints it")
    return document


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", required=True, help="the cell as one JSON string")
    parser.add_argument("--a", required=True, type=Path, help="replies cell of the first route")
    parser.add_argument("--b", required=True, type=Path, help="replies cell of the second route")
    parser.add_argument("--code-digest", required=True, help="digest of the comparing code")
    parser.add_argument("--inputs", type=json.loads, default={}, help="what was planned, as JSON")
    parser.add_argument("--output", required=True, type=Path, help="the cell file to write")
    raise SystemExit(main(**vars(parser.parse_args())))
