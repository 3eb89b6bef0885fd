"""Draw the price of a pass by width, from the study's cost table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.errors import report_errors
from routewise.figure import draw_price_by_width, save_figure
from routewise.table import read_rows


@report_errors
def main(cost: Path, svg: Path, png: Path) -> None:
    """Draw the figure of the table ``cost`` (cost.parquet) to ``svg`` and ``png``."""
    rows, study = read_rows(cost, "cost")
    save_figure(draw_price_by_width(rows, study), [svg, png])
    print(f"figure: {svg} and {png}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost", type=Path, required=True, help="the study's cost.parquet")
    parser.add_argument("--svg", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--png", type=Path, required=True, help="PNG file to write")
    arguments = parser.parse_args()
    sys.exit(main(arguments.cost, arguments.svg, arguments.png))
