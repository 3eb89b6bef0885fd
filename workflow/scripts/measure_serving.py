"""Measure one serving cell: hold the device, start the server, ask it, stop it, prove it gone.

Reads a build's server (or takes an external command or an endpoint), a GGUF and token ids; takes
what is in the result store and asks for the rest. Writes one Parquet file (schema/replies.py; of
the sweep dispatch: schema/dispatch.py). Ends when the Snakemake that started it ends, and its
server with it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routewise.dispatch_cell import measure_dispatch
from routewise.errors import report_errors
from routewise.model import read_model
from routewise.normalise import check_code
from routewise.serve import measure_serving
from routewise.serve_cell import ServeCell, ServeInputs
from routewise.watch import end_with_snakemake


@report_errors
def main(
    cell: ServeCell,
    server: Path | None,
    model: Path,
    prompts: Path,
    store: Path,
    logs: Path,
    code_digest: str,
    inputs: dict[str, Any],
    output: Path,
) -> None:
    """Measure ``cell`` into ``output``; ``server`` is the folder of a build's server part."""
    end_with_snakemake()
    check_code(Path(__file__), code_digest, store.parent)
    print(f"{cell.name}: writing {output}", flush=True)
    record = asdict(read_model(model))
    files = ServeInputs(server, model, record, prompts, store, logs, code_digest, inputs)
    measure = measure_dispatch if cell.sweep == "dispatch" else measure_serving
    measure(cell, files, output)


def _cell(text: str) -> ServeCell:
    return ServeCell.from_document(json.loads(text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", required=True, type=_cell, help="the cell as one JSON string")
    parser.add_argument("--server", type=Path, help="folder of the build's server")
    parser.add_argument("--model", required=True, type=Path, help="the GGUF")
    parser.add_argument("--prompts", required=True, type=Path, help="token ids (Parquet)")
    parser.add_argument("--store", required=True, type=Path, help="folder of the result store")
    parser.add_argument("--logs", required=True, type=Path, help="folder of the servers' logs")
    parser.add_argument("--code-digest", required=True, help="digest of the measuring code")
    parser.add_argument("--inputs", type=json.loads, default={}, help="what was planned, as JSON")
    parser.add_argument("--output", required=True, type=Path, help="the cell file to write")
    raise SystemExit(main(**vars(parser.parse_args())))
