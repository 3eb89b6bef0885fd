"""Obtain one model of a study (kind package, path or url): the GGUF and its record (JSON).

Reads nothing but its arguments; writes OUTPUT and the document beside it, whole or not at all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from routewise.errors import report_errors
from routewise.model import ModelPlan
from routewise.obtain import obtain_model
from routewise.watch import end_with_snakemake


@report_errors
def main(
    name: str, key: str, kind: str, origin: dict[str, str], output: Path, log: Path | None
) -> None:
    """Make ``output`` and its record; see :func:`routewise.obtain.obtain_model`."""
    record = obtain_model(ModelPlan(name, kind, key, output, origin), log=log)
    print(f"{output}: {record.n_bytes:,} bytes, {record.architecture}, SHA-256 {record.sha256}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="the model's name in the study")
    parser.add_argument("--key", required=True, help="the model's key, from plan_model")
    parser.add_argument("--kind", required=True, choices=("package", "path", "url"))
    parser.add_argument("--origin", required=True, type=json.loads, help="the entry, as JSON")
    parser.add_argument("--output", required=True, type=Path, help="the GGUF to write")
    parser.add_argument("--log", type=Path, help="pip's output goes here")
    end_with_snakemake()
    raise SystemExit(main(**vars(parser.parse_args())))
