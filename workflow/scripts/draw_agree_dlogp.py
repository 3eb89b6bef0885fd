"""Draw how far two routes' logprobs are apart, from the study's table of agreement."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.errors import report_errors
from routewise.figure import draw_agree_dlogp, save_figure
from routewise.table import read_rows


@report_errors
def main(agree: Path, svg: Path, png: Path) -> None:
    """Draw the figure of the table ``agree`` (agree.parquet) to ``svg`` and ``png``."""
    rows, study = read_rows(agree, "agree")
    save_figure(draw_agree_dlogp(rows, study), [svg, png])
    print(f"figure: {svg} and {png}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agree", type=Path, required=True, help="the study's agree.parquet")
    parser.add_argument("--svg", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--png", type=Path, required=True, help="PNG file to write")
    arguments = parser.parse_args()
    sys.exit(main(arguments.agree, arguments.svg, arguments.png))
