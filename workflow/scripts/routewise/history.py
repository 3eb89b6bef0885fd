"""The history of receipts: each one that was written, kept by the digest of its content.

``results/receipts/<first 12 hex digits>/`` holds ``receipt.json`` and ``receipt.md``. The digest is
the SHA-256 of the bytes of ``receipt.json``, so that a study that is run again leaves its older
receipts as they were, and the same receipt twice is one entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routewise.digest import sha256_bytes, sha256_file, write_text
from routewise.errors import RoutewiseError
from routewise.receipt import read_receipt

#: Hex digits of a receipt's digest that name its folder.
SHORT = 12
JSON_NAME = "receipt.json"
MARKDOWN_NAME = "receipt.md"


@dataclass(frozen=True)
class Kept:
    """One kept receipt. ``date`` is when its last cell was measured; ``fault`` why it is unfit."""

    folder: Path
    digest: str
    study: str
    date: str
    fault: str | None = None

    @property
    def short(self) -> str:
        """The name of its folder."""
        return self.folder.name

    def line(self) -> str:
        """Return one line for a list: digest, date, study."""
        end = f"  ({self.fault})" if self.fault else ""
        return f"{self.short}  {self.date:25}  {self.study}{end}"


def history_folder(results: Path) -> Path:
    """Return where the receipts of a results folder are kept."""
    return results / "receipts"


def keep_receipt(history: Path, text: str, markdown: str) -> Path:
    """Keep a receipt (JSON text and Markdown) by its digest; return its folder.

    What is there already with the same bytes is left alone, and a damaged file is put right.
    """
    folder = history / sha256_bytes(text.encode("utf-8"))[:SHORT]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((MARKDOWN_NAME, markdown), (JSON_NAME, text)):
        path = folder / name
        if not path.is_file() or path.read_bytes() != content.encode("utf-8"):
            write_text(path, content)
    return folder


def list_receipts(history: Path) -> list[Kept]:
    """Return the kept receipts, oldest first; damaged ones too, with what is wrong with them."""
    found = [_kept(path.parent) for path in history.glob(f"*/{JSON_NAME}")]
    return sorted(found, key=lambda one: (one.date, one.short))


def _kept(folder: Path) -> Kept:
    path = folder / JSON_NAME
    digest = sha256_file(path)
    if not digest.startswith(folder.name):
        return Kept(folder, digest, "?", "?", "damaged: its content has another digest")
    try:
        receipt = read_receipt(path)
    except RoutewiseError as error:
        return Kept(folder, digest, "?", "?", f"cannot be read: {error.problem}")
    return Kept(folder, digest, receipt["study"], measured_to(receipt) or "?")


def listing(history: Path) -> str:
    """Return the list of kept receipts as text, one a line."""
    lines = [one.line() for one in list_receipts(history)]
    return "\n".join(lines) if lines else f"no receipt is kept under {history}"


def find_receipt(named: str, history: Path) -> Path:
    """Return the receipt.json that ``named`` means.

    ``named`` is a receipt.json, a folder with one, or the beginning of a digest in ``history``.
    Raises RoutewiseError where there is none, where more than one fits, and where the kept one is
    damaged; the message lists what there is.
    """
    path = Path(named)
    if path.is_file():
        return path
    if path.is_dir() and (path / JSON_NAME).is_file():
        return path / JSON_NAME
    if path.is_dir() and not re.fullmatch(r"[0-9a-f]+", named):
        raise RoutewiseError(f"{named}: a folder without {JSON_NAME}", "name another folder")
    kept = list_receipts(history)
    fitting = [one for one in kept if one.short.startswith(named) or one.digest.startswith(named)]
    there = "\n".join(f"  {one.line()}" for one in kept) or "  none"
    if named == "" or not fitting:
        raise RoutewiseError(
            f"{named!r}: no file, no folder, and no digest of a receipt kept under {history}. "
            f"Kept there:\n{there}",
            "name one of these, or the path of a receipt.json",
        )
    if len(fitting) > 1:
        several = "\n".join(f"  {one.line()}" for one in fitting)
        raise RoutewiseError(
            f"{named!r}: {len(fitting)} kept receipts begin so:\n{several}", "give more digits"
        )
    if fitting[0].fault:
        raise RoutewiseError(
            f"{fitting[0].folder / JSON_NAME}: {fitting[0].fault}",
            "make the receipt again from its tables, or name another one",
        )
    return fitting[0].folder / JSON_NAME


def measured_to(receipt: dict[str, Any]) -> str:
    """Return when the last cell of a receipt was measured (ISO 8601), empty where not known."""
    return str(receipt["provenance"].get("measured", {}).get("to") or "")
