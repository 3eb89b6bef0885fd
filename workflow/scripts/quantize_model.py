"""Quantise one model of a study from another, with a build's llama-quantize.

Reads BASE (with its record beside it); writes OUTPUT and its record, whole or not at all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from routewise.errors import report_errors
from routewise.model import ModelPlan
from routewise.obtain import quantize
from routewise.watch import end_with_snakemake


@report_errors
def main(
    name: str,
    key: str,
    base: Path,
    type: str,
    tool: Path,
    tool_digest: str,
    output: Path,
    threads: int,
    log: Path | None,
) -> None:
    """Make ``output`` and its record; see :func:`routewise.obtain.quantize`."""
    plan = ModelPlan(name, "quantize", key, output, {"type": type}, base, tool_digest)
    record = quantize(plan, tool, threads=threads, log=log)
    print(f"{output}: {record.n_bytes:,} bytes, tensors {record.tensor_types}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="the model's name in the study")
    parser.add_argument("--key", required=True, help="the model's key, from plan_model")
    parser.add_argument("--base", required=True, type=Path, help="the GGUF to start from")
    parser.add_argument("--type", required=True, help="llama-quantize's name, such as Q4_K_M")
    parser.add_argument("--tool", required=True, type=Path, help="the llama-quantize program")
    parser.add_argument("--tool-digest", required=True, help="digest of the build of the tool")
    parser.add_argument("--output", required=True, type=Path, help="the GGUF to write")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log", type=Path, help="the tool's output goes here")
    end_with_snakemake()
    raise SystemExit(main(**vars(parser.parse_args())))
