"""The price of exactness in one line a width: pass time of each route against its reference.

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
    ratio = row["ratio_to_reference"]
    if ratio is None:
        return (
            f"{row['route']} {row['model']} width {row['width']}: {row.get('note') or 'no ratio'}"
        )
    return f"{row['route']} {row['model']} width {row['width']}: {ratio}"


def main(receipt: Path) -> None:
    """Print the price of every route that has a reference."""
    for row in read_receipt(receipt)["price"]:
        if row.get("ratio_to_reference") is not None or row.get("reference"):
            print(shown(row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receipt", type=Path, default=Path("results/demo/receipt.json"))
    main(**vars(parser.parse_args()))
