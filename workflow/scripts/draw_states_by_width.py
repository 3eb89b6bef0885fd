"""Draw the distinct answers to one request by requests in flight, from the study's replies."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.errors import report_errors
from routewise.figure import draw_states_by_width, save_figure
from routewise.table import read_rows


@report_errors
def main(replies: Path, svg: Path, png: Path) -> None:
    """Draw the figure of the table ``replies`` (replies.parquet) to ``svg`` and ``png``."""
    rows, study = read_rows(replies, "replies")
    save_figure(draw_states_by_width(rows, study), [svg, png])
    print(f"figure: {svg} and {png}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=Path, required=True, help="the study's replies.parquet")
    parser.add_argument("--svg", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--png", type=Path, required=True, help="PNG file to write")
    arguments = parser.parse_args()
    sys.exit(main(arguments.replies, arguments.svg, arguments.png))
