"""Draw one figure of a study from one of its tables, as SVG and PNG."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise import figure
from routewise.errors import report_errors
from routewise.table import read_rows

#: Each figure's table, by the figure's name; ``figure.draw_<name>`` draws it.
TABLES = {
    "delta_by_position": "replay",
    "flips_and_margins": "replay",
    "price_by_width": "cost",
    "states_by_width": "replies",
    "solo_token_kept": "replies",
    "agree_dlogp": "agree",
}


@report_errors
def main(name: str, table: Path, svg: Path, png: Path) -> None:
    """Draw the figure ``name`` from its study table (a Parquet file) to ``svg`` and ``png``."""
    rows, study = read_rows(table, TABLES[name])
    figure.save_figure(getattr(figure, f"draw_{name}")(rows, study), [svg, png])
    print(f"figure: {svg} and {png}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", choices=sorted(TABLES), required=True)
    parser.add_argument("--table", type=Path, required=True, help="the table that it is drawn from")
    parser.add_argument("--svg", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--png", type=Path, required=True, help="PNG file to write")
    sys.exit(main(**vars(parser.parse_args())))
