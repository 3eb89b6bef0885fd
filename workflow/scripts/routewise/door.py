"""The known tool's report, as a door: its outer shape is written, and leniently read.

Scripts that read ``{"routes": {NAME: [{"runs": [...]}]}}`` find that shape here: one list a route,
one entry a prompt, its replies under ``runs`` in the order asked. Only that much is the known
tool's. The record inside is ours::

    {"format": "routewise replies 1",
     "routes": {NAME: [{"prompt_id": ..., "prompt_index": ..., "category": ...,
                        "runs": [RECORD, ...]}, ...]}}

A RECORD is one row of the table ``replies`` (``routewise/schema/replies.py`` says what each column
is), without the three columns of the prompt. Its values as JSON:

==================  ================================================================
column              JSON
==================  ================================================================
``text``            text; bytes that are no UTF-8 shown as U+FFFD
``text_hex``        the same bytes, all of them; this is what is read back
other byte columns  hex digits (``state``, ``tokens_hash``, ``token_bytes``, ``top_bytes``)
``logprobs``        numbers that give the float32 exactly, null where the status is not ok
``logprob_bits``    the float32's uint32 pattern; this is what is compared
the rest            number, text, list or null, as in the table
==================  ================================================================

A number that is no number (NaN, infinity in a top list) is written as null. On reading, unknown
keys are ignored, missing ones and values that do not fit are reported by their place in the file,
and a route becomes a table again only if nothing that the table needs is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from routewise.digest import write_text
from routewise.errors import RoutewiseError
from routewise.schema.file import table_of
from routewise.schema.replies import REPLIES

FORMAT = "routewise replies 1"
PROMPT_COLUMNS = ("prompt_index", "prompt_id", "category")
RECORD_COLUMNS = tuple(name for name in REPLIES.arrow.names if name not in PROMPT_COLUMNS)
_TEXT, _TEXT_HEX = "text", "text_hex"


@dataclass(frozen=True)
class RecordedPrompt:
    """One prompt of one route: its known keys, and the known keys of each of its runs."""

    prompt: dict[str, Any]
    runs: list[dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """A report as read: route -> prompts; ``missing`` names each key that was not there or odd."""

    routes: dict[str, list[RecordedPrompt]]
    missing: list[str]

    def table(self, route: str) -> pa.Table:
        """Return a route's replies as the table ``replies``.

        Raises RoutewiseError where the route is not in the report or lacks what the table needs.
        """
        if route not in self.routes:
            raise RoutewiseError(
                f"route {route!r} is not in the report", f"it has {', '.join(self.routes)}"
            )
        rows = [{**entry.prompt, **run} for entry in self.routes[route] for run in entry.runs]
        for field in REPLIES.arrow:
            lacking = [row for row in rows if row.get(field.name) is None]
            if lacking and not field.nullable:
                raise RoutewiseError(
                    f"route {route!r}: {len(lacking)} of {len(rows)} runs have no {field.name}",
                    "the report was not written by Routewise, or was changed since",
                )
        columns = {name: [row.get(name) for row in rows] for name in REPLIES.arrow.names}
        return table_of(REPLIES, columns)


def report_of(routes: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Return tables of replies, by route, as the report's plain values."""
    document: dict[str, Any] = {}
    for name, table in routes.items():
        entries: dict[int, dict[str, Any]] = {}
        for row in table.to_pylist():
            prompt = {key: row[key] for key in PROMPT_COLUMNS}
            entry = entries.setdefault(row["prompt_index"], {**prompt, "runs": []})
            entry["runs"].append(_record_of(row))
        document[name] = list(entries.values())
    return {"format": FORMAT, "routes": document}


def write_report(path: Path, routes: Mapping[str, pa.Table]) -> None:
    """Write tables of replies, by route, as a report; whole or not at all.

    Raises OSError (no permission, disk full).
    """
    text = json.dumps(report_of(routes), ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n")


def read_report(path: Path) -> Report:
    """Read a report of this shape, ours or the known tool's.

    Raises RoutewiseError where the file is absent, is no JSON, or has not the outer shape.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RoutewiseError(f"{path}: no such file", "check the path of the report") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RoutewiseError(f"{path}: not JSON ({error})", "write the report again") from error
    return report_from(document, str(path))


def report_from(document: Any, where: str) -> Report:
    """Return a report's plain values as read; ``where`` names them in messages.

    Raises RoutewiseError where they have not the outer shape.
    """
    routes = document.get("routes") if isinstance(document, dict) else None
    if not isinstance(routes, dict):
        raise RoutewiseError(
            f'{where}: {_shown(routes)} under "routes", wanted an object of routes',
            'a report has the shape {"routes": {NAME: [{"runs": [...]}]}}',
        )
    missing: list[str] = []
    read: dict[str, list[RecordedPrompt]] = {}
    for name, entries in routes.items():
        place = f"routes.{name}"
        if not isinstance(entries, list):
            raise RoutewiseError(f"{where}: {place}: {_shown(entries)}, wanted a list of entries")
        read[name] = [
            _entry_from(entry, f"{place}[{index}]", where, missing)
            for index, entry in enumerate(entries)
        ]
    return Report(read, missing)


def _entry_from(entry: Any, place: str, where: str, missing: list[str]) -> RecordedPrompt:
    runs = entry.get("runs") if isinstance(entry, dict) else None
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise RoutewiseError(f'{where}: {place}: wanted an object with a list of objects in "runs"')
    prompt = _known(entry, PROMPT_COLUMNS, place, missing)
    return RecordedPrompt(
        prompt,
        [
            _known(run, RECORD_COLUMNS, f"{place}.runs[{index}]", missing)
            for index, run in enumerate(runs)
        ],
    )


def _known(
    found: dict[str, Any], names: tuple[str, ...], place: str, missing: list[str]
) -> dict[str, Any]:
    """Return the known keys of a JSON object as the table's values; note what is not there."""
    known: dict[str, Any] = {}
    for name in names:
        key = _TEXT_HEX if name == _TEXT and _TEXT_HEX in found else name
        if key not in found:
            missing.append(f"{place}.{name}: missing")
            continue
        value, field = found[key], REPLIES.arrow.field(name)
        try:
            # text without its hex came from elsewhere, and is what UTF-8 makes of it
            known[name] = str(value).encode() if key == _TEXT else _from_json(value, field.type)
            pa.array([known[name]], type=field.type)
        except (ValueError, TypeError, OverflowError, pa.ArrowException):
            known.pop(name, None)
            missing.append(f"{place}.{key}: {_shown(value)}, wanted {field.type}")
    return known


def _record_of(row: dict[str, Any]) -> dict[str, Any]:
    record = {
        name: _to_json(row[name], REPLIES.arrow.field(name).type)
        for name in RECORD_COLUMNS
        if name != _TEXT
    }
    text: bytes = row[_TEXT]
    return {**record, _TEXT: text.decode(errors="replace"), _TEXT_HEX: text.hex()}


def _to_json(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_to_json(item, kind.value_type) for item in value]
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _from_json(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise TypeError("not a list")
        return [_from_json(item, kind.value_type) for item in value]
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return bytes.fromhex(value)
    if isinstance(value, bool) != pa.types.is_boolean(kind):
        raise TypeError("truth value for a number")
    return value


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
