"""Draw argmax flips against the plain top-two margin by width, from the study's replay table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.errors import report_errors
from routewise.figure import draw_flips_and_margins, save_figure
from routewise.table import read_rows


@report_errors
def main(replay: Path, svg: Path, png: Path) -> None:
    """Draw the figure of the table ``replay`` (replay.parquet) to ``svg`` and ``png``."""
    rows, study = read_rows(replay, "replay")
    save_figure(draw_flips_and_margins(rows, study), [svg, png])
    print(f"figure: {svg} and {png}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replay", type=Path, required=True, help="the study's replay.parquet")
    parser.add_argument("--svg", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--png", type=Path, required=True, help="PNG file to write")
    arguments = parser.parse_args()
    sys.exit(main(arguments.replay, arguments.svg, arguments.png))
