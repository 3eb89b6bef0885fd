"""Write a study's receipt.json, and receipt.md from it, from the study's Parquet tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.document import receipt_markdown
from routewise.errors import report_errors
from routewise.receipt import build_receipt, read_receipt, receipt_json
from routewise.table import read_tables


@report_errors
def main(tables: Path, json_file: Path, markdown: Path) -> None:
    """Write the receipt of the tables in the folder ``tables`` as JSON and as Markdown."""
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(receipt_json(build_receipt(read_tables(tables))), encoding="utf-8")
    markdown.parent.mkdir(parents=True, exist_ok=True)
    markdown.write_text(receipt_markdown(read_receipt(json_file)), encoding="utf-8")
    print(f"receipt: {json_file} and {markdown}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, required=True, help="folder of the study's tables")
    parser.add_argument("--json", type=Path, required=True, help="receipt.json to write")
    parser.add_argument("--markdown", type=Path, required=True, help="receipt.md to write")
    arguments = parser.parse_args()
    sys.exit(main(arguments.tables, arguments.json, arguments.markdown))
