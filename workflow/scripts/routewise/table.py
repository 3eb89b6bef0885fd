"""A study's long tables: the rows of all its cells, with the cell that each row came from.

Four Parquet files stand in ``results/<study>/tables``: ``cells`` (one row per cell file, also of
a cell without rows, with the cell's whole provenance), ``replay``, ``plain`` and ``cost`` (the
cells' rows). The study's own declaration travels in the metadata of each file and not beside it:
so receipt and figures are functions of Parquet alone, and a kept receipt can be made again from
the kept tables after the study's config file has moved on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from routewise import schema
from routewise.errors import RoutewiseError
from routewise.schema import CELLS, STUDY_TABLES

REPLAY_SWEEP = "replay"
COST_SWEEP = "cost"
PLAIN_VARIANT = "plain"
WIDTH_1 = "w1"


@dataclass(frozen=True)
class Cell:
    """One cell file: what it measured, where it lies, and everything that its job recorded."""

    sweep: str
    route: str | None
    model: str | None
    variant: str | None
    path: str
    fingerprint: str | None
    n_rows: int
    provenance: Mapping[str, Any]

    @property
    def invalid_reasons(self) -> list[str]:
        """Why the job itself calls its cell invalid; empty where it does not."""
        return [str(reason) for reason in self.provenance.get("invalid_reasons") or []]


@dataclass(frozen=True)
class StudyTables:
    """A study's declaration and tables. The frames' columns are those of STUDY_TABLES."""

    study: Mapping[str, Any]
    cells: Sequence[Cell]
    replay: pd.DataFrame
    plain: pd.DataFrame
    cost: pd.DataFrame
    _index: dict[tuple[str | None, ...], Cell] = field(default_factory=dict, repr=False)
    _rows: dict[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for cell in self.cells:
            if cell.sweep == REPLAY_SWEEP:
                self._index[(cell.route, cell.model, cell.variant)] = cell
        for frame in (self.plain, self.replay):
            for path, rows in frame.groupby("cell", sort=False):
                self._rows[str(path)] = rows

    def find(self, route: str, model: str, variant: str) -> Cell | None:
        """Return the replay cell of that name, or None where it was not measured."""
        return self._index.get((route, model, variant))

    def rows_of(self, cell: Cell) -> pd.DataFrame:
        """Return the rows of one replay or plain cell."""
        frame = self.plain if cell.variant == PLAIN_VARIANT else self.replay
        return self._rows.get(cell.path, frame.iloc[:0])


def canonical_json(document: Any) -> str:
    """Return the one JSON text of a document: sorted keys, no white space, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def study_digest(study: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a study's declaration."""
    return hashlib.sha256(canonical_json(study).encode()).hexdigest()


def replay_variants(study: Mapping[str, Any], route: str) -> list[str]:
    """Return the names of the variants that a route is claimed to have, in the study's order.

    ``plain`` and ``w1`` are left out: the one is the reference, the other a control.
    """
    sweep = study.get("sweeps", {}).get(REPLAY_SWEEP) or {}
    names = [f"w{width}" for width in sweep.get("widths", [])] + list(sweep.get("shapes", []))
    wanted = (sweep.get("only") or {}).get(route, names)
    return [
        name
        for name in dict.fromkeys(names)
        if name in wanted and name not in (PLAIN_VARIANT, WIDTH_1)
    ]


def variant_key(variant: str) -> tuple[int, int, str]:
    """Sort key of variants: plain, then widths by number, then shapes by name."""
    width = re.fullmatch(r"w(\d+)", variant)
    if width:
        return (1, int(width[1]), "")
    return (0, 0, "") if variant == PLAIN_VARIANT else (2, 0, variant)


def build_of(provenance: Mapping[str, Any], route: str | None) -> Mapping[str, Any]:
    """Return the build that a cell's provenance records for a route.

    A cell of one route holds it as ``build``; a cost cell, which interleaves routes, holds a
    mapping by route in ``builds``. Empty where the route is not in it.
    """
    builds = provenance.get("builds") or {}
    if route in builds:
        return builds[route]
    build = provenance.get("build") or {}
    return build if "fingerprint" in build else build.get(route, {})


def _relative(path: Path) -> str:
    """Return a path as it may stand in a receipt: relative to the working folder if it can be."""
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return path.as_posix()


def _table_name(path: Path) -> str:
    """Return the table that a cell file says it holds (``replay`` where it says nothing)."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        return str(json.loads(metadata[schema.METADATA_KEY])["table"])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return "replay"  # read_table then says what is wrong with the file


def _filled(value: Any, n_rows: int) -> pa.Array:
    """Return a column that holds one string or boolean in every row."""
    return pa.repeat(pa.scalar(value), n_rows)


def build_tables(study: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, pa.Table]:
    """Return the study's tables, made from its cell files, by the names of STUDY_TABLES.

    The order of ``paths`` does not matter. Raises RoutewiseError where a file is no cell of a
    replay or cost sweep, or where two files hold the same cell.
    """
    cells: list[dict[str, Any]] = []
    parts: dict[str, list[pa.Table]] = {"replay": [], "plain": [], "cost": []}
    seen: dict[tuple[Any, ...], str] = {}
    for path in sorted({Path(path) for path in paths}):
        name = _table_name(path)
        if name not in parts:
            raise RoutewiseError(
                f"{path}: holds the table {name!r}, wanted a cell: one of {sorted(parts)}",
                "pass files from results/cells only",
            )
        rows, provenance = schema.read_table(path, name)
        shown = _relative(path)
        cell = provenance["cell"]
        is_cost = name == "cost"
        key = (cell["sweep"], cell.get("route"), cell.get("model"), cell.get("variant"))
        if key in seen:
            raise RoutewiseError(
                f"two files hold the same cell {'.'.join(str(part) for part in key)}: "
                f"{seen[key]} and {shown}",
                "pass only the cells of the present plan",
            )
        seen[key] = shown
        valid = not provenance.get("invalid_reasons")
        cells.append(
            {
                "sweep": cell["sweep"],
                "route": None if is_cost else cell["route"],
                "model": cell.get("model"),
                "variant": None if is_cost else cell["variant"],
                "cell": shown,
                "cell_valid": valid,
                "fingerprint": None
                if is_cost
                else str(build_of(provenance, cell["route"]).get("fingerprint", "")),
                "n_rows": rows.num_rows,
                "provenance": json.dumps(provenance, sort_keys=True),
            }
        )
        parts[name].append(_with_cell(rows, name, cells[-1], provenance))
    tables = {
        f"study_{name}": pa.concat_tables(found) if found else _empty(f"study_{name}")
        for name, found in parts.items()
    }
    tables["study_cells"] = pa.Table.from_pylist(cells, schema=CELLS)
    return tables


def _empty(name: str) -> pa.Table:
    return STUDY_TABLES[name].empty_table()


def _with_cell(
    rows: pa.Table, name: str, cell: Mapping[str, Any], provenance: Mapping[str, Any]
) -> pa.Table:
    """Return a cell's rows under the study's schema, with the cell's columns put before them."""
    n_rows = rows.num_rows
    if name == "cost":
        route_of = {route: build_of(provenance, route) for route in set(rows["route"].to_pylist())}
        fingerprints = [
            str(route_of[route].get("fingerprint", "")) for route in rows["route"].to_pylist()
        ]
        leading = []
    else:
        fingerprints = [cell["fingerprint"]] * n_rows
        leading = [_filled(cell[key], n_rows) for key in ("route", "model", "variant")]
    columns = [
        *leading,
        _filled(cell["cell"], n_rows),
        _filled(cell["cell_valid"], n_rows),
        pa.array(fingerprints, type=pa.string()),
        *[column.combine_chunks() for column in rows.columns],
    ]
    return pa.Table.from_arrays(columns, schema=STUDY_TABLES[f"study_{name}"])


def write_tables(folder: Path, study: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> None:
    """Write ``cells``, ``replay``, ``plain`` and ``cost`` as Parquet into ``folder``."""
    provenance = {"study": study, "study_digest": study_digest(study)}
    for name in STUDY_TABLES:
        path = folder / f"{name.removeprefix('study_')}.parquet"
        schema.write_table(path, name, tables[name], provenance)


def read_rows(path: Path, name: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read one study table (replay, plain, cost or cells); return it and its study."""
    table, provenance = schema.read_table(path, f"study_{name}")
    return table.to_pandas(), provenance["study"]


def read_tables(folder: Path) -> StudyTables:
    """Read a study's tables.

    Raises RoutewiseError where a file is absent or damaged, or where they are of two studies.
    """
    frames: dict[str, pd.DataFrame] = {}
    studies: dict[str, dict[str, Any]] = {}
    for name in ("cells", "replay", "plain", "cost"):
        frames[name], studies[name] = read_rows(folder / f"{name}.parquet", name)
    digests = {name: study_digest(study) for name, study in studies.items()}
    if len(set(digests.values())) > 1:
        raise RoutewiseError(
            f"{folder}: the tables are of different studies: {digests}", "build the tables again"
        )
    cells = [
        Cell(
            sweep=row["sweep"],
            route=_none(row["route"]),
            model=_none(row["model"]),
            variant=_none(row["variant"]),
            path=row["cell"],
            fingerprint=_none(row["fingerprint"]),
            n_rows=int(row["n_rows"]),
            provenance=json.loads(row["provenance"]),
        )
        for row in frames["cells"].to_dict("records")
    ]
    return StudyTables(studies["cells"], cells, frames["replay"], frames["plain"], frames["cost"])


def _none(value: Any) -> str | None:
    return None if value is None or pd.isna(value) else str(value)
