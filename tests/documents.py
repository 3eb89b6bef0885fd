"""Sections of documents that tests make: kept between markers, and compared."""

from __future__ import annotations

import os
from pathlib import Path


def check_section(document: Path, name: str, text: str) -> None:
    """Fail where the section ``name`` of a document is not ``text``.

    A section lies between ``<!-- made: NAME -->`` and ``<!-- end: NAME -->``, each on its line.
    With ROUTEWISE_WRITE_DOCS set it is written anew first.
    """
    first, last = f"<!-- made: {name} -->\n", f"<!-- end: {name} -->\n"
    whole = document.read_text()
    assert whole.count(first) == whole.count(last) == 1, f"{document}: no section {name}"
    before, _, rest = whole.partition(first)
    found, _, after = rest.partition(last)
    if os.environ.get("ROUTEWISE_WRITE_DOCS"):
        document.write_text(f"{before}{first}\n{text}\n{last}{after}")
        return
    assert found.strip("\n") == text.strip("\n")
