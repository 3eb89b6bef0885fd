"""Write a study's receipt.json, and receipt.md from it, from the study's Parquet tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.document import receipt_markdown
from routewise.errors import report_errors
from routewise.history import keep_receipt
from routewise.receipt import build_receipt, read_receipt, receipt_json
from routewise.table import read_tables


@report_errors
def main(tables: Path, json_file: Path, markdown: Path, history: Path | None = None) -> None:
    """Write the receipt of the tables in the folder ``tables`` as JSON and as Markdown.

    With ``history`` it is also kept there by its digest.
    """
    json_file.parent.mkdir(parents=True, exist_ok=True)
    text = receipt_json(build_receipt(read_tables(tables)))
    json_file.write_text(text, encoding="utf-8")
    markdown.parent.mkdir(parents=True, exist_ok=True)
    document = receipt_markdown(read_receipt(json_file))
    markdown.write_text(document, encoding="utf-8")
    if history is not None:
        print(f"kept as {keep_receipt(history, text, document)}")
    print(f"receipt: {json_file} and {markdown}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, required=True, help="folder of the study's tables")
    parser.add_argument("--json", type=Path, required=True, help="receipt.json to write")
    parser.add_argument("--markdown", type=Path, required=True, help="receipt.md to write")
    parser.add_argument("--history", type=Path, help="folder in which receipts are kept by digest")
    arguments = parser.parse_args()
    sys.exit(main(arguments.tables, arguments.json, arguments.markdown, arguments.history))
