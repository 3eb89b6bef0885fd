"""Measure one cell of the replay sweep: a plain arm, or a replay compared with it.

Reads a build, a GGUF, token ids and, for a replay, the plain cell; takes what is in the result
store and measures the rest prompt by prompt. Writes one Parquet file (schema/replay.py).
Ends when the Snakemake that started it ends.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routewise.cell import Cell, Inputs, measure_cell
from routewise.errors import report_errors
from routewise.machine import set_engine_environment
from routewise.model import read_model
from routewise.normalise import check_code
from routewise.watch import end_with_snakemake

SET_BY_SNAKEMAKE = "OMP_NUM_THREADS"


@report_errors
def main(
    cell: Cell,
    build: Path,
    model: Path,
    prompts: Path,
    plain: Path | None,
    store: Path,
    code_digest: str,
    inputs: dict[str, Any],
    output: Path,
) -> None:
    """Measure ``cell`` into ``output``; ``plain`` is its plain cell, None where it is one."""
    end_with_snakemake()
    check_code(Path(__file__), code_digest, store.parent)
    removed = set(set_engine_environment(cell.env)) - {SET_BY_SNAKEMAKE}
    if removed:
        print(f"left out of the engine's environment: {', '.join(sorted(removed))}")
    print(f"{cell.name}: writing {output}")
    record = asdict(read_model(model))
    files = Inputs(build, model, record, prompts, store, code_digest, inputs)
    measure_cell(cell, files, output, plain)


def _cell(text: str) -> Cell:
    return Cell.from_document(json.loads(text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", required=True, type=_cell, help="the cell as one JSON string")
    parser.add_argument("--build", required=True, type=Path, help="folder of the build")
    parser.add_argument("--model", required=True, type=Path, help="the GGUF")
    parser.add_argument("--prompts", required=True, type=Path, help="token ids (Parquet)")
    parser.add_argument("--plain", type=Path, help="the plain cell; for a replay")
    parser.add_argument("--store", required=True, type=Path, help="folder of the result store")
    parser.add_argument("--code-digest", required=True, help="digest of the measuring code")
    parser.add_argument("--inputs", type=json.loads, default={}, help="what was planned, as JSON")
    parser.add_argument("--output", required=True, type=Path, help="the cell file to write")
    raise SystemExit(main(**vars(parser.parse_args())))
