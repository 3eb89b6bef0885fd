"""Measure one cell of the cost sweep: pass time by width, routes interleaved as worker processes.

Reads builds and a GGUF; writes one Parquet file (schema/cost.py), one row a sample. With
--worker it is one of the workers that it starts itself. Ends when its Snakemake ends.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routewise.claim import run_under_hold
from routewise.cost import CostCell, measure_cost, serve_arm
from routewise.errors import report_errors
from routewise.model import read_model
from routewise.normalise import check_code
from routewise.watch import end_with_snakemake


@report_errors
def main(
    cell: CostCell,
    model: Path,
    code_digest: str,
    inputs: dict[str, Any],
    output: Path,
    worker: int | None = None,
    parent: int | None = None,
) -> None:
    """Measure ``cell`` into ``output``, or be worker number ``worker`` of process ``parent``."""
    if worker is not None and parent is not None:
        arm = cell.arms[worker]
        serve_arm(arm, model, cell.depth, max(cell.widths), cell.seed, parent)
        return
    end_with_snakemake()
    check_code(Path(__file__), code_digest, output.parent.parent.parent)  # results/cells/DIGEST
    for claim in cell.claims:
        run_under_hold(claim, f"cost {cell.model}")
    print(f"cost {cell.model}: writing {output}")
    record = asdict(read_model(model))
    measure_cost(cell, model, record, code_digest, output, Path(__file__), inputs)


def _cell(text: str) -> CostCell:
    return CostCell.from_document(json.loads(text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", required=True, type=_cell, help="the cell as one JSON string")
    parser.add_argument("--model", required=True, type=Path, help="the GGUF")
    parser.add_argument("--code-digest", default="", help="digest of the measuring code")
    parser.add_argument("--inputs", type=json.loads, default={}, help="what was planned, as JSON")
    parser.add_argument("--output", type=Path, help="the cell file to write")
    parser.add_argument("--worker", type=int, help="be the worker of this arm")
    parser.add_argument("--parent", type=int, help="process that a worker must not outlive")
    raise SystemExit(main(**vars(parser.parse_args())))
