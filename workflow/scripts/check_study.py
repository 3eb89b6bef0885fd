"""Print a receipt's short table, and fail where a verdict is not what the study expects.

Exit code 0: every verdict is as expected and every control holds. 1: one is contrary. 2: none is
contrary, but something could not be measured. With --show, the table alone: always 0.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.errors import report_errors
from routewise.receipt import read_receipt
from routewise.summary import gate_lines, gate_of, print_summary


@report_errors
def main(receipt_file: Path, show: bool = False) -> int:
    """Print the summary of ``receipt_file``; return the gate's exit code, or 0 with ``show``."""
    receipt = read_receipt(receipt_file)
    print_summary(receipt, str(receipt_file.with_suffix(".md")))
    gate = gate_of(receipt)
    for line in gate_lines(gate):
        print(line, file=sys.stderr)
    return 0 if show else gate.exit_code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receipt", type=Path, required=True, help="receipt.json of the study")
    parser.add_argument("--show", action="store_true", help="print the table and end with 0")
    arguments = parser.parse_args()
    sys.exit(main(arguments.receipt, arguments.show))
