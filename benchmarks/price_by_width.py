"""The price of exactness, one line a width: pass time of each route against its reference.

Reads a receipt (by default the demo's) and prints, for each width, the ratio of the pass times with
its 95 % interval. Wanted of cpu-exact: under 1.5 at width 9.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from routewise.receipt import read_receipt


def shown(row: dict[str, Any]) -> str:
    """Return one price row as a line."""
    where = f"{row['route']} {row['model']} width {row['width']:>2}"
    ratio, interval = row["ratio_to_reference"], row["ratio_to_reference_interval"]
    if ratio is None:
        return f"{where}: {row['note'] or 'no ratio'}"
    bounds = f" ({interval['low']:.2f} to {interval['high']:.2f})" if interval else ""
    return f"{where}: {ratio:.2f}{bounds} of {row['reference']}, n = {row['n_pairs_reference']}"


def main(receipt: Path) -> None:
    """Print the price of every route that has a reference."""
    for row in read_receipt(receipt)["price"]:
        if row["reference"] is not None:
            print(shown(row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receipt", type=Path, default=Path("results/demo/receipt.json"))
    main(**vars(parser.parse_args()))
