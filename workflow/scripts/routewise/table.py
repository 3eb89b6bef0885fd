"""A study's long tables: the rows of all its cells, with the cell that each row came from.

Seven Parquet files stand in ``results/<study>/tables``: ``cells`` (one row per cell file, also of
a cell without rows, with the cell's whole provenance), ``replay``, ``plain``, ``cost``,
``replies``, ``agree`` and ``dispatch`` (the cells' rows). The study's own declaration travels in
the metadata of each file and not beside it: so receipt and figures are functions of Parquet alone,
and a kept receipt can be made again from the kept tables after the study's config file has moved
on. Tables kept from before there were serving sweeps lack the last three: these are empty then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from routewise.digest import digest_of
from routewise.errors import RoutewiseError
from routewise.one_build import Measured, of_route, refuse_mixed
from routewise.schema.file import read_table, table_name, write_table
from routewise.schema.study import CELL_TABLES, CELLS, STUDY_TABLES

REPLAY_SWEEP = "replay"
COST_SWEEP = "cost"
REPEAT_SWEEP = "repeat"
BATCHED_SWEEP = "batched"
AGREE_SWEEP = "agree"
DISPATCH_SWEEP = "dispatch"
SERVING_SWEEPS = (REPEAT_SWEEP, BATCHED_SWEEP, AGREE_SWEEP, DISPATCH_SWEEP)
PLAIN_VARIANT = "plain"
WIDTH_1 = "w1"
SOLO = "solo"

#: Tables that a cell file may hold; each has its study table.
_CELL_TABLES = ("replay", "plain", "cost", "replies", "agree", "dispatch")
#: Tables that a study without serving sweeps may lack, as one from before them does.
_SERVING_TABLES = ("replies", "agree", "dispatch")
#: Lists within lists, which no verdict and no figure needs, and which are most of the bytes.
_TOP_LISTS = ("top_ids", "top_bytes", "top_logprobs")

#: What of a machine may stand in a document that is handed on: its kind, never its name.
_MACHINE_KEYS = (
    "kind",
    "cpu_model",
    "n_cores",
    "cpu_flags_digest",
    "gpu",
    "driver",
    "os",
    "kernel",
)


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
    def machine(self) -> dict[str, Any]:
        """What may be handed on of the machine that measured the cell: its kind, not its name."""
        machine = self.provenance.get("machine") or {}
        return {key: machine[key] for key in _MACHINE_KEYS if key in machine}

    @property
    def invalid_reasons(self) -> list[str]:
        """Why the job itself calls its cell invalid; empty where it does not."""
        return [str(reason) for reason in self.provenance.get("invalid_reasons") or []]


@dataclass(frozen=True)
class StudyTables:
    """A study's declaration and tables. The frames' columns are those of STUDY_TABLES.

    ``replies`` lacks the top lists.
    """

    study: Mapping[str, Any]
    cells: Sequence[Cell]
    replay: pd.DataFrame
    plain: pd.DataFrame
    cost: pd.DataFrame
    replies: pd.DataFrame
    agree: pd.DataFrame
    dispatch: pd.DataFrame
    _index: dict[tuple[str | None, ...], Cell] = field(default_factory=dict, repr=False)
    _rows: dict[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for cell in self.cells:
            if cell.sweep != COST_SWEEP:
                self._index[(cell.sweep, cell.route, cell.model, cell.variant)] = cell
        for frame in (self.plain, self.replay, self.replies, self.agree, self.dispatch):
            for path, rows in frame.groupby("cell", sort=False):
                self._rows[str(path)] = rows

    def find(self, route: str, model: str, variant: str, sweep: str = REPLAY_SWEEP) -> Cell | None:
        """Return the cell of that name, or None where it was not measured."""
        return self._index.get((sweep, route, model, variant))

    def rows_of(self, cell: Cell) -> pd.DataFrame:
        """Return the rows of one cell that is no cost cell."""
        if cell.sweep == DISPATCH_SWEEP:
            frame = self.dispatch
        elif cell.sweep in SERVING_SWEEPS:
            is_pair = cell.sweep == AGREE_SWEEP and "|" in str(cell.route)
            frame = self.agree if is_pair else self.replies
        else:
            frame = self.plain if cell.variant == PLAIN_VARIANT else self.replay
        return self._rows.get(cell.path, frame.iloc[:0])


def study_digest(study: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a study's declaration."""
    return digest_of(study)


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

    A cell of one route holds it as ``build`` (or as ``command`` or ``endpoint``, where the route
    is no build of ours); a cell of several, such as a cost cell, holds a mapping by route in
    ``builds``. Empty where the route is not in it.
    """
    builds = provenance.get("builds") or {}
    if route in builds:
        return builds[route]
    build = provenance.get("build") or {}
    if "fingerprint" in build or not build:
        return build or provenance.get("command") or provenance.get("endpoint") or {}
    return build.get(route, {})


def fingerprint_of(provenance: Mapping[str, Any], route: str) -> str:
    """Return the fingerprint of a cell's route; of a pair ``a|b`` both, with a bar between."""
    return "|".join(
        str(build_of(provenance, name).get("fingerprint") or "") for name in route.split("|")
    )


def quantization_of(
    study: Mapping[str, Any], model: str, provenance: Mapping[str, Any]
) -> str | None:
    """Return the type that a model was quantized to, where that was done by the study."""
    recorded = provenance.get("model") or {}
    declared = (study.get("models") or {}).get(model) or {}
    derived = recorded.get("derived_from") or {}
    return derived.get("type") or declared.get("type")


def _relative(path: Path) -> str:
    """Return a path as it may stand in a receipt: relative to the working folder if it can be."""
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return path.as_posix()


def _filled(value: Any, n_rows: int) -> pa.Array:
    """Return a column that holds one string or boolean in every row."""
    return pa.repeat(pa.scalar(value), n_rows)


def measured(path: str, sweep: str, provenance: Mapping[str, Any]) -> list[Measured]:
    """Return what a cell measured, by route.

    A pair says which builds its two cells ran, and not on what: these say that themselves.
    """
    route = provenance["cell"].get("route")
    is_pair = "|" in str(route)
    told = {"ended_at": provenance.get("ended_at")} if is_pair else provenance
    routes = [route] if route and not is_pair else sorted(provenance.get("builds") or [])
    return [
        Measured(
            name,
            sweep in SERVING_SWEEPS,
            fingerprint_of(provenance, name),
            path,
            of_route(told, name),
        )
        for name in routes
        if not is_pair or build_of(provenance, name)
    ]


def build_tables(study: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, pa.Table]:
    """Return the study's tables, made from its cell files, by the names of STUDY_TABLES.

    The order of ``paths`` does not matter. Raises RoutewiseError where a file is no cell, where
    two files hold the same cell, or where one route was measured with two builds or on two hosts.
    """
    cells: list[dict[str, Any]] = []
    parts: dict[str, list[pa.Table]] = {name: [] for name in _CELL_TABLES}
    seen: dict[tuple[Any, ...], str] = {}
    for path in sorted({Path(path) for path in paths}):
        name = table_name(path) or "replay"  # read_table then says what is wrong with the file
        if name not in parts:
            raise RoutewiseError(
                f"{path}: holds the table {name!r}, wanted a cell: one of {sorted(parts)}",
                "pass files from results/cells only",
            )
        rows, provenance = read_table(path, CELL_TABLES[name])
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
                "fingerprint": None if is_cost else fingerprint_of(provenance, cell["route"]),
                "n_rows": rows.num_rows,
                "provenance": json.dumps(provenance, sort_keys=True),
            }
        )
        parts[name].append(_with_cell(rows, name, cells[-1], provenance))
    refuse_mixed(
        one
        for cell in cells
        for one in measured(cell["cell"], cell["sweep"], json.loads(cell["provenance"]))
    )
    tables = {
        f"study_{name}": pa.concat_tables(found) if found else _empty(f"study_{name}")
        for name, found in parts.items()
    }
    tables["study_cells"] = pa.Table.from_pylist(cells, schema=CELLS.arrow)
    return tables


def _empty(name: str) -> pa.Table:
    return STUDY_TABLES[name].arrow.empty_table()


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
        named = (
            ("sweep", "route", "model", "variant")
            if name == "replies"
            else (
                "route",
                "model",
                "variant",
            )
        )
        leading = [_filled(cell[key], n_rows) for key in named]
    columns = [
        *leading,
        _filled(cell["cell"], n_rows),
        _filled(cell["cell_valid"], n_rows),
        pa.array(fingerprints, type=pa.string()),
        *[column.combine_chunks() for column in rows.columns],
    ]
    return pa.Table.from_arrays(columns, schema=STUDY_TABLES[f"study_{name}"].arrow)


def write_tables(folder: Path, study: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> None:
    """Write each table of STUDY_TABLES as Parquet into ``folder``, named without ``study_``."""
    provenance = {"study": study, "study_digest": study_digest(study)}
    for name in STUDY_TABLES:
        path = folder / f"{name.removeprefix('study_')}.parquet"
        write_table(path, STUDY_TABLES[name], tables[name], provenance)


def read_rows(path: Path, name: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read one study table (cells, replay, replies, …); return it and its study.

    Of ``replies`` the top lists are left out.
    """
    table, provenance = read_table(path, STUDY_TABLES[f"study_{name}"])
    return _without_top_lists(table).to_pandas(), provenance["study"]


def _without_top_lists(table: pa.Table) -> pa.Table:
    return table.drop_columns([name for name in _TOP_LISTS if name in table.column_names])


def _serves(study: Mapping[str, Any]) -> bool:
    """Say whether a study has a serving sweep."""
    return any(name in study.get("sweeps", {}) for name in SERVING_SWEEPS)


def read_tables(folder: Path) -> StudyTables:
    """Read a study's tables.

    Raises RoutewiseError where a file is absent or damaged, or where they are of two studies. The
    tables of serving sweeps may be absent where the study has no such sweep.
    """
    frames: dict[str, pd.DataFrame] = {}
    studies: dict[str, dict[str, Any]] = {}
    for name in ("cells", *_CELL_TABLES):
        path = folder / f"{name}.parquet"
        if name in _SERVING_TABLES and not path.exists() and not _serves(studies["cells"]):
            frames[name] = _without_top_lists(_empty(f"study_{name}")).to_pandas()
            continue
        frames[name], studies[name] = read_rows(path, name)
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
    return StudyTables(
        study=studies["cells"],
        cells=cells,
        replay=frames["replay"],
        plain=frames["plain"],
        cost=frames["cost"],
        replies=frames["replies"],
        agree=frames["agree"],
        dispatch=frames["dispatch"],
    )


def _none(value: Any) -> str | None:
    return None if value is None or pd.isna(value) else str(value)
