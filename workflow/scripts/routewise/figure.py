"""The study's figures, drawn from its Parquet tables; the same tables give the same bytes.

No figure touches matplotlib's global state: each is a Figure of its own, drawn by Agg, with fixed
identifiers and without a date. Colours are from the colour-blind-safe set of Okabe and Ito.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from routewise.agree import PUBLISHED_DLOGP_MAX, PUBLISHED_DLOGP_MEAN, PUBLISHED_GATES_SOURCE
from routewise.price import price_rows
from routewise.serve_verdict import (
    answer_keys,
    solo_of,
    summarise_scores,
    summarise_states,
)
from routewise.state import PREFIX_LENGTHS, count_states, score_against
from routewise.table import BATCHED_SWEEP, variant_key

#: Bits equal, a difference that leaves the greedy token, a flip, and rows that cannot be compared.
EQUAL_COLOUR = "#C9DCEA"
MOVED_COLOUR = "#0072B2"
FLIP_COLOUR = "#D55E00"
INVALID_COLOUR = "#000000"
ROUTE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ROUTE_MARKERS = ("o", "s", "D", "^", "v", "P")

#: KV positions at which kernels are known to change their way of summing.
GATES = (128, 256, 384, 512)

_BINS = 160  # columns of the heat map at most
_STYLE: dict[str, Any] = {
    "axes.grid": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "routewise",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


def save_figure(figure: Figure, files: Sequence[Path]) -> None:
    """Write a figure to files (``.svg`` or ``.png``), without dates or program names in them."""
    with _styled():
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            figure.savefig(path, metadata=metadata)


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, drawn by Agg and laid out by itself."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _styled() -> AbstractContextManager[None]:
    """Return a context in which figures have our style, whatever the user's own settings say."""
    settings: Any = {**mpl.rcParamsDefault, **sns.axes_style("ticks"), **_STYLE}
    settings.pop("backend", None)
    return mpl.rc_context(settings)


def _nothing(message: str) -> Figure:
    """Return a figure that says why there is nothing to see."""
    with _styled():
        figure = _figure(6.0, 1.6)
        figure.text(0.5, 0.5, message, ha="center", va="center")
        return figure


@dataclass(frozen=True)
class _Grid:
    """Panels, a row per model and a column per route."""

    figure: Figure
    axes: dict[tuple[str, str], Axes]
    routes: list[str]
    models: list[str]
    label_size: int  # points, of what stands beside a strip


def _grid(rows: pd.DataFrame, strip: float) -> _Grid:
    """Return a figure with a panel per route and model, each strip of it ``strip`` inches high."""
    routes = list(dict.fromkeys(rows["route"]))
    models = list(dict.fromkeys(rows["model"]))
    variants = sorted(set(rows["variant"]), key=variant_key)
    many = len(models) > 2
    label_size = 6 if many else 8
    height = (0.35 + 0.7 * strip * len(variants)) if many else (0.9 + strip * len(variants))
    width = 4.2 * min(1.0, 0.3 + 1.4 / len(routes))
    figure = _figure(width * len(routes) + 0.9, height * len(models) + 1.0)
    panels = figure.subplots(len(models), len(routes), sharex=True, sharey=True, squeeze=False)
    axes = {}
    for down, model in enumerate(models):
        for across, route in enumerate(routes):
            panel = axes[(route, model)] = panels[down, across]
            if down == 0:
                panel.set_title(route, loc="left")
            panel.tick_params(axis="y", length=0, labelsize=label_size)
        kind = "tokens a pass, or shape"
        panels[down, 0].set_ylabel(kind if len(models) == 1 else f"{model}\n{kind}")
        if many:
            panels[down, 0].yaxis.label.set_fontsize(7)
    sns.despine(figure)
    return _Grid(figure, axes, routes, models, label_size)


def _sorted_study(rows: pd.DataFrame, study: Mapping[str, Any]) -> pd.DataFrame:
    """Return replay rows without width 1, ordered by the study's routes and models."""
    sweep = study.get("sweeps", {}).get("replay", {})
    rows = rows[rows["variant"] != "w1"]
    order = rows.assign(
        _route=rows["route"].map(_places(sweep.get("routes", []))),
        _model=rows["model"].map(_places(sweep.get("models", []))),
    )
    return order.sort_values(["_route", "_model"], kind="stable")


def _places(names: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


def variant_label(variant: str) -> str:
    """Return what an axis calls a variant: the number of tokens a pass, or the shape."""
    return variant[1:] if variant[:1] == "w" and variant[1:].isdigit() else variant


def _valid(rows: pd.DataFrame) -> pd.Series:
    """Say which rows may be believed: of a valid cell, finite and compared."""
    return rows["cell_valid"] & (rows["status"] == "ok") & rows["bits_equal"].notna()


def _counts(rows: pd.DataFrame) -> str:
    """Return the n of a caption: rows compared, prompts, and what was left out."""
    valid = _valid(rows)
    text = (
        f"n = {int(valid.sum()):,} positions compared, "
        f"{rows.loc[valid, 'prompt_id'].nunique()} prompts"
    )
    left_out = int((~valid).sum())
    return text + (f"; {left_out:,} invalid rows are not counted" if left_out else "")


def draw_delta_by_position(rows: pd.DataFrame, study: Mapping[str, Any]) -> Figure:
    """Return a heat map per route: the largest logit difference by KV position and width.

    ``rows`` are of study_replay. Positions share a column where there are more than 160; where
    the bits of all rows of a field are equal it has a colour of its own, where one is invalid it
    is black, where nothing was measured it is white.
    """
    rows = _sorted_study(rows, study)
    if rows.empty:
        return _nothing("No replay was measured.")
    variants = sorted(set(rows["variant"]), key=variant_key)
    first = int(rows["kv_position"].min())
    last = int(rows["kv_position"].max())
    step = max(1, -(-(last - first + 1) // _BINS))
    edges = np.arange(first, last + step + 1, step)
    moved = rows[_valid(rows) & ~rows["bits_equal"].eq(True)]
    seen = moved.loc[moved["logit_delta_max"] > 0, "logit_delta_max"]
    norm = _log_norm(seen)
    with _styled():
        grid = _grid(rows, 0.2)
        figure, axes = grid.figure, grid.axes
        colours = mpl.colormaps["plasma_r"]
        gaps = False
        for (route, model), panel in axes.items():
            mine = rows[(rows["route"] == route) & (rows["model"] == model)]
            image = _heat_map(mine, variants, edges, norm, colours)
            gaps |= bool((image == 1.0).all(axis=-1).any())
            panel.pcolormesh(edges - 0.5, np.arange(len(variants) + 1), image, rasterized=True)
            panel.set_yticks(
                np.arange(len(variants)) + 0.5, [variant_label(name) for name in variants]
            )
            panel.set_ylim(len(variants), 0)
            for gate in GATES:
                if first < gate <= last:
                    panel.axvline(gate - 0.5, color="white", linewidth=1.6, alpha=0.8)
                    panel.axvline(gate - 0.5, color="0.2", linewidth=0.8, linestyle=(0, (2, 2)))
        for route in grid.routes:
            axes[(route, grid.models[-1])].set_xlabel("KV position (tokens)")
        scale = mpl.cm.ScalarMappable(norm=norm, cmap=colours)
        bar = figure.colorbar(
            scale,
            ax=list(axes.values()),
            pad=0.015,
            aspect=18,
            shrink=1.0 / len(grid.models),
            anchor=(0.0, 1.0),
            extend="min",
            ticks=_scale_ticks(norm),
            format=FuncFormatter(lambda value, _: f"{value:g}"),
        )
        bar.set_label("largest |Δ logit| (logits)")
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        handles: list[Artist] = [Patch(facecolor=EQUAL_COLOUR, label="all bits equal")]
        if not _valid(rows).all():
            handles.append(Patch(facecolor=INVALID_COLOUR, label="invalid"))
        if gaps:
            handles.append(Patch(facecolor="white", edgecolor="0.6", label="no position there"))
        if any(first < gate <= last for gate in GATES):
            handles.append(
                Line2D([], [], color="0.35", linewidth=0.9, linestyle=":", label="multiple of 128")
            )
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        _caption(figure, f"{_counts(rows)}; {step} KV position{'s' * (step > 1)} a column.")
        return figure


def _log_norm(seen: pd.Series) -> LogNorm:
    """Return a logarithmic scale over the differences that were seen, its ends 1, 2 or 5."""
    if seen.empty:
        return LogNorm(1e-3, 10.0)
    steps = _scale_steps()
    high = steps[np.searchsorted(steps, float(seen.max()))]
    low = steps[np.searchsorted(steps, float(seen.quantile(0.02)), side="right") - 1]
    return LogNorm(min(low, high / 10.0), high)


def _scale_steps() -> np.ndarray:
    """Return 1, 2 and 5 of every decade that a float32 difference can have."""
    return np.outer(10.0 ** np.arange(-46.0, 40.0), [1.0, 2.0, 5.0]).ravel()


def _scale_ticks(norm: LogNorm) -> np.ndarray:
    """Return where the scale is numbered: at 1, 2 and 5, or at whole decades where it is long."""
    low, high = float(norm.vmin or 0.0), float(norm.vmax or 0.0)
    steps = _scale_steps() if high / low <= 1e3 else 10.0 ** np.arange(-46.0, 40.0)
    return steps[(steps >= low * 0.999) & (steps <= high * 1.001)]


def _heat_map(
    rows: pd.DataFrame,
    variants: Sequence[str],
    edges: np.ndarray,
    norm: LogNorm,
    colours: Any,
) -> np.ndarray:
    """Return an RGBA image, shape (variants, columns, 4), float in [0, 1]."""
    image = np.ones((len(variants), len(edges) - 1, 4))
    place = {name: index for index, name in enumerate(variants)}
    fields = rows.assign(
        _down=rows["variant"].map(place),
        _across=np.digitize(rows["kv_position"], edges) - 1,
        _bad=~_valid(rows),
        _moved=~rows["bits_equal"].eq(True),
    ).groupby(["_down", "_across"], sort=False)
    table = fields.agg(
        delta=("logit_delta_max", "max"), bad=("_bad", "any"), moved=("_moved", "any")
    )
    down, across = (table.index.get_level_values(level).to_numpy() for level in (0, 1))
    bad, moved = (table[name].to_numpy(dtype=bool) for name in ("bad", "moved"))
    # Bits that differ only in the sign of a zero stand at the foot of the scale.
    delta = np.maximum(table["delta"].fillna(0.0).to_numpy(dtype=float), float(norm.vmin or 0.0))
    fields_rgba = colours(norm(delta))
    fields_rgba[~moved] = mpl.colors.to_rgba(EQUAL_COLOUR)
    fields_rgba[bad] = mpl.colors.to_rgba(INVALID_COLOUR)
    image[down, across] = fields_rgba
    return image


def _caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=8, color="0.25", x=0.01, ha="left")


def draw_flips_and_margins(rows: pd.DataFrame, study: Mapping[str, Any]) -> Figure:
    """Return a strip per width and route: every position at its plain top-two margin.

    ``rows`` are of study_replay. A position is drawn as a flip, as a difference that left the
    greedy token, or as equal bits; flips and positions compared are counted at the right.
    """
    rows = _sorted_study(rows, study)
    if rows.empty:
        return _nothing("No replay was measured.")
    variants = sorted(set(rows["variant"]), key=variant_key)
    valid = rows[_valid(rows)]
    positive = valid.loc[valid["plain_margin"] > 0, "plain_margin"]
    floor = 10.0 ** np.floor(np.log10(positive.quantile(0.002))) if len(positive) else 1e-3
    with _styled():
        grid = _grid(rows, 0.27)
        figure, axes = grid.figure, grid.axes
        for (route, model), panel in axes.items():
            mine = valid[(valid["route"] == route) & (valid["model"] == model)]
            _strips(panel, mine, variants, float(floor), grid.label_size / 8)
            counts = mine.groupby("variant")["argmax_flip"].agg(["size", "sum"])
            for place, variant in enumerate(variants):
                n, flips = counts.loc[variant] if variant in counts.index else (0, 0)
                panel.annotate(
                    f"{flips} of {n:,}" if n else "not compared",
                    (1.01, place),
                    xycoords=("axes fraction", "data"),
                    va="center",
                    fontsize=grid.label_size,
                    color=FLIP_COLOUR if flips else "0.35",
                )
            if model == grid.models[0]:
                panel.annotate(
                    "flips",
                    (1.01, 1.0),
                    xycoords="axes fraction",
                    xytext=(0, 3),
                    textcoords="offset points",
                    fontsize=8,
                    color="0.35",
                )
            panel.set_xscale("log")
            panel.set_yticks(range(len(variants)), [variant_label(name) for name in variants])
            panel.set_ylim(len(variants) - 0.5, -0.5)
            for place in range(len(variants) - 1):
                panel.axhline(place + 0.5, color="0.92", linewidth=0.6, zorder=0)
        for route in grid.routes:
            axes[(route, grid.models[-1])].set_xlabel("plain top-two margin (logits)")
        handles = [
            _dot(EQUAL_COLOUR, "bits equal"),
            _dot(MOVED_COLOUR, "bits differ, same greedy token"),
            _dot(FLIP_COLOUR, "greedy token flips"),
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=3)
        ties = int((valid["plain_margin"] < floor).sum())
        note = f"; {ties} margins below {floor:g} are drawn there" if ties else ""
        _caption(figure, f"{_counts(rows)}{note}.")
        return figure


def _strips(
    panel: Axes, rows: pd.DataFrame, variants: Sequence[str], floor: float, scale: float
) -> None:
    """Draw one route's positions, a strip per variant; flips lie on top."""
    equal = rows["bits_equal"].eq(True).to_numpy(dtype=bool)
    flip = rows["argmax_flip"].eq(True).to_numpy(dtype=bool) & ~equal
    margin = np.maximum(rows["plain_margin"].to_numpy(dtype=float), floor)
    # The same shift for the same position in each strip and each drawing: golden-ratio steps.
    order = rows["prompt_index"].to_numpy() * 1009 + rows["step"].to_numpy()
    shift = ((order * 0.6180339887) % 1.0 - 0.5) * 0.62
    height = rows["variant"].map(_places(variants)).to_numpy(dtype=float) + shift
    for chosen, colour, size, alpha, layer in (
        (equal, EQUAL_COLOUR, 5, 0.9, 1),
        (~equal & ~flip, MOVED_COLOUR, 5, 0.55, 2),
        (flip, FLIP_COLOUR, 16, 1.0, 3),
    ):
        if chosen.any():
            panel.scatter(
                margin[chosen],
                height[chosen],
                s=size * scale**3,
                color=colour,
                alpha=alpha,
                linewidths=0,
                zorder=layer,
                rasterized=True,
            )


def _dot(colour: str, label: str) -> Line2D:
    return Line2D([], [], color=colour, marker="o", linestyle="none", markersize=5, label=label)


def draw_price_by_width(cost: pd.DataFrame, study: Mapping[str, Any]) -> Figure:
    """Return pass time by width: to width 1 of the same route, and to the reference route.

    ``cost`` are rows of study_cost. Bars are the 95 % interval of the median over rounds, bands
    the quartiles of the rounds' own ratios.
    """
    prices = price_rows(study, cost, {})
    if not any(row["n"] for row in prices):
        return _nothing("No pass was timed on a quiet machine.")
    models = list(dict.fromkeys(row["model"] for row in prices))
    routes = list(dict.fromkeys(row["route"] for row in prices))
    widths = sorted({row["width"] for row in prices})
    compared = any(row["ratio_to_reference"] is not None for row in prices)
    with _styled():
        across = 2 if compared else 1
        figure = _figure(4.4 * across + 0.4, 2.7 * len(models) + 0.9)
        grid = figure.subplots(len(models), across, squeeze=False, sharex=True)
        for down, model in enumerate(models):
            for column in range(across):
                key = ("ratio", "ratio_to_reference")[column]
                panel = grid[down, column]
                for number, route in enumerate(routes):
                    mine = [row for row in prices if (row["route"], row["model"]) == (route, model)]
                    _curve(panel, mine, key, number, len(routes), widths)
                    if column == 0:
                        _floor(panel, mine, number)
                panel.axhline(1.0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
                panel.set_xticks(range(len(widths)), [str(width) for width in widths])
                panel.set_xlim(-0.5, len(widths) - 0.5)
                panel.grid(axis="y", color="0.9", linewidth=0.6)
                name = ("Price of width", "Price of exactness")[column]
                panel.set_title(name if len(models) == 1 else f"{name}, {model}", loc="left")
                panel.set_ylabel(
                    (
                        "pass time / pass time of 1 token",
                        f"pass time / {_reference_name(prices)}'s",
                    )[column]
                )
                if column == 0:
                    panel.set_ylim(bottom=0)
                else:
                    _centre_on_one(panel)
                if down == len(models) - 1:
                    panel.set_xlabel("tokens a pass")
        sns.despine(figure)
        handles = [
            Line2D([], [], color=_colour(number), marker=_marker(number), markersize=5, label=route)
            for number, route in enumerate(routes)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        _caption(figure, _price_caption(prices))
        return figure


def _curve(
    panel: Axes,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    number: int,
    n_routes: int,
    widths: Sequence[int],
) -> None:
    """Draw one route's ratios with their intervals; routes stand a little beside each other."""
    rows = [row for row in rows if row[key] is not None]
    if not rows:
        return
    beside = (number - (n_routes - 1) / 2) * 0.12
    at = np.array([widths.index(row["width"]) for row in rows]) + beside
    value = np.array([row[key] for row in rows])
    bounds = [row[f"{key}_interval"] for row in rows]
    low = np.array([v if b is None else b["low"] for v, b in zip(value, bounds, strict=True)])
    high = np.array([v if b is None else b["high"] for v, b in zip(value, bounds, strict=True)])
    for place, row in zip(at, rows, strict=True):
        quartiles = row[f"{key}_quartiles"]
        if quartiles is not None:
            panel.plot(
                [place, place],
                [quartiles["low"], quartiles["high"]],
                color=_colour(number),
                alpha=0.3,
                linewidth=6,
                solid_capstyle="butt",
            )
    panel.errorbar(
        at,
        value,
        yerr=(value - low, high - value),
        color=_colour(number),
        marker=_marker(number),
        markersize=4.5,
        linewidth=1.2,
        elinewidth=1.2,
        capsize=2.5,
    )


def _floor(panel: Axes, rows: Sequence[Mapping[str, Any]], number: int) -> None:
    """Draw the least time that reading takes, as a dotted line in the route's colour."""
    ratios = [row["floor_ratio"] for row in rows if row.get("floor_ratio") is not None]
    if ratios:
        panel.axhline(
            ratios[0], color=_colour(number), linewidth=1.0, linestyle=(0, (1, 2)), zorder=0
        )


def _colour(number: int) -> str:
    return ROUTE_COLOURS[number % len(ROUTE_COLOURS)]


def _marker(number: int) -> str:
    return ROUTE_MARKERS[number % len(ROUTE_MARKERS)]


def _reference_name(prices: Sequence[Mapping[str, Any]]) -> str:
    names = {row["reference"] for row in prices if row["reference"]}
    return names.pop() if len(names) == 1 else "the reference route"


def _centre_on_one(panel: Axes) -> None:
    """Show equal cost in the middle of the axis or near it, and never less than ± 10 %."""
    low, high = panel.get_ylim()
    reach = max(0.1, high - 1, 1 - low)
    panel.set_ylim(1 - min(reach, max(0.1, 1.15 * (1 - low))), 1 + max(0.1, 1.05 * (high - 1)))


def _price_caption(prices: Sequence[Mapping[str, Any]]) -> str:
    counts = [row["n"] for row in prices]
    contended = sum(row["n_contended"] for row in prices)
    depths = sorted({row["depth"] for row in prices if row["depth"] is not None})
    text = f"n = {min(counts)} to {max(counts)} quiet samples a point"
    if contended:
        text += f", {contended} contended ones left out"
    if depths:
        text += f"; {' and '.join(str(depth) for depth in depths)} tokens in the cache"
    if any("floor_ratio" in row for row in prices):
        text += ".\nDotted: bytes that a pass reads, over the measured bandwidth of a copy"
    return text + ".\nPoints: median over paired rounds; bars: its 95 % interval; bands: quartiles."


# ---------------------------------------------------------------------------- what a server said


#: Line styles, for what colours and markers do not tell apart.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (9, 3)))
_MIXES = ("copies", "neighbours", "fillers")
_PREFILLS = ("together", "apart")


def _batched_probes(replies: pd.DataFrame, study: Mapping[str, Any]) -> pd.DataFrame:
    """Return the replies of batched probes that may be believed, in the order of the study."""
    sweep = study.get("sweeps", {}).get(BATCHED_SWEEP, {})
    rows = replies[(replies["sweep"] == BATCHED_SWEEP) & (replies["role"] == "probe")]
    rows = rows[rows["cell_valid"] & (rows["status"] == "ok")]
    order = rows.assign(
        _route=rows["route"].map(_places(sweep.get("routes", []))),
        _model=rows["model"].map(_places(sweep.get("models", []))),
    )
    return order.sort_values(["_route", "_model"], kind="stable")


def _n_left_out(replies: pd.DataFrame) -> int:
    rows = replies[(replies["sweep"] == BATCHED_SWEEP) & (replies["role"] == "probe")]
    return int((~(rows["cell_valid"] & (rows["status"] == "ok"))).sum())


def _panels(
    rows: pd.DataFrame, width: float, height: float, prefills: Sequence[str] = ("",)
) -> tuple[Figure, dict[tuple[str, str, str], Axes], list[str], list[str]]:
    """Return a figure with a panel per route (across) and model (down), and these names.

    Where ``prefills`` are named each model has a row of panels for each.
    """
    routes = list(dict.fromkeys(rows["route"]))
    models = list(dict.fromkeys(rows["model"]))
    downwards = [(model, prefill) for model in models for prefill in prefills]
    figure = _figure(max(5.6, width * len(routes) + 0.6), height * len(downwards) + 0.9)
    grid = figure.subplots(len(downwards), len(routes), sharex=True, sharey=True, squeeze=False)
    axes = {}
    for down, (model, prefill) in enumerate(downwards):
        for across, route in enumerate(routes):
            panel = axes[(route, model, prefill)] = grid[down, across]
            named = [route] if len(models) == 1 else [route, model]
            named += [f"prefilled {prefill}"] if prefill else []
            panel.set_title(", ".join(named), loc="left")
            panel.grid(axis="y", color="0.9", linewidth=0.6)
    sns.despine(figure)
    return figure, axes, routes, models


def _reply_counts(rows: pd.DataFrame, left_out: int) -> str:
    text = f"n = {len(rows):,} replies, {rows['prompt_id'].nunique()} prompts"
    return text + (f"; {left_out:,} invalid replies are not counted" if left_out else "")


def draw_states_by_width(replies: pd.DataFrame, study: Mapping[str, Any]) -> Figure:
    """Return a panel per route: distinct answers to one request, by requests in flight.

    ``replies`` are rows of study_replies. A point is the mean over prompts of the states seen in
    one block, and the whisker goes up to the mean of Chao's estimate, which adds unseen ones.
    """
    rows = _batched_probes(replies, study)
    if rows.empty:
        return _nothing("No request was asked in a batch.")
    places = sorted(
        {(int(p), int(w)) for p, w in zip(rows["parallel"], rows["width"], strict=True)}
    )
    at = {place: index for index, place in enumerate(places)}
    found = _states_of_blocks(rows)
    mixes = [mix for mix in _MIXES if mix in set(found["mix"])]
    with _styled():
        figure, axes, routes, models = _panels(rows, 0.9 + 0.55 * len(places), 2.7)
        n_series = len(mixes) * len(_PREFILLS)
        for (route, model, _), panel in axes.items():
            mine = found[(found["route"] == route) & (found["model"] == model)]
            for record in mine.to_dict("records"):
                series = mixes.index(record["mix"]) * 2 + _PREFILLS.index(record["prefill"])
                beside = 0.0
                if record["width"] > 1:
                    beside = (series - (n_series - 1) / 2) * 0.8 / n_series
                elif record["prefill"] == "apart":
                    beside = 0.12
                x = at[(record["parallel"], record["width"])] + beside
                colour = _colour(mixes.index(record["mix"])) if record["width"] > 1 else "0.35"
                panel.plot([x, x], [record["seen"], record["chao1"]], color=colour, linewidth=1.0)
                if record["chao1"] > record["seen"]:
                    panel.plot([x], [record["chao1"]], color=colour, marker="_", markersize=6)
                panel.plot(
                    [x],
                    [record["seen"]],
                    color=colour,
                    marker=_marker(mixes.index(record["mix"])) if record["width"] > 1 else "x",
                    markerfacecolor=colour if record["prefill"] == "together" else "white",
                    markersize=5,
                    linestyle="none",
                )
            panel.axhline(1.0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
            panel.set_xticks(
                range(len(places)), [f"{width}\nof {slots}" for slots, width in places]
            )
            panel.set_xlim(-0.6, len(places) - 0.4)
            panel.set_ylim(0, 1.08 * found["chao1"].max())  # of all panels: they share the axis
            if route == routes[0]:
                panel.set_ylabel("distinct answers to one request")
            if model == models[-1]:
                panel.set_xlabel("requests in flight, of slots")
        handles: list[Artist] = [_point("0.35", "x", "alone")]
        handles += [_point(_colour(n), _marker(n), mix) for n, mix in enumerate(mixes)]
        if set(rows["prefill"]) == set(_PREFILLS):
            handles.append(_point("0.35", "o", "hollow: prefilled apart", hollow=True))
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        most = int(found["replies"].max())
        _caption(
            figure,
            f"{_reply_counts(rows, _n_left_out(replies))}; at most {most} replies a request.\n"
            "Points: seen, mean over prompts; whiskers: Chao's estimate with the unseen ones.",
        )
        return figure


def _states_of_blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per block: what it was, states ``seen`` and ``chao1``, most ``replies``."""
    names = ["route", "model", "parallel", "width", "mix", "prefill"]
    records = []
    for key, block in rows.groupby(names, sort=True):
        counts = [
            {
                "observed": counted.n_states,
                "chao1": counted.chao1,
                "modal_share": counted.modal_share,
            }
            for _, group in block.groupby("prompt_index")
            for counted in [count_states(answer_keys(group))]
        ]
        states = summarise_states(counts) or {}
        records.append(
            {
                **dict(zip(names, key, strict=True)),
                "seen": states["observed_mean"],
                "chao1": states["chao1_mean"],
                "replies": int(block.groupby("prompt_index").size().max()),
            }
        )
    return pd.DataFrame(records)


def _point(colour: str, marker: str, label: str, hollow: bool = False) -> Line2D:
    face = "white" if hollow else colour
    return Line2D(
        [],
        [],
        color=colour,
        marker=marker,
        markerfacecolor=face,
        linestyle="none",
        markersize=5,
        label=label,
    )


def draw_solo_token_kept(replies: pd.DataFrame, study: Mapping[str, Any]) -> Figure:
    """Return a panel per route and prefill: how many positions keep the token of the answer alone.

    ``replies`` are rows of study_replies. A line is one width in one company, of one server: one
    claim of the receipt, which holds the same shares. Its points are the share over the first 16,
    32, … tokens, as far as replies reach, and over all.
    """
    rows = _batched_probes(replies, study)
    scores = _scores_of_blocks(rows) if len(rows) else []
    if not scores:
        return _nothing("No request was asked in a batch beside its solo answer.")
    lengths = [n for n in PREFIX_LENGTHS if any(n in score["kept"] for score in scores)]
    ticks: list[int | None] = [*lengths, None]
    places = sorted({score["place"] for score in scores})
    mixes = [mix for mix in _MIXES if mix in {score["mix"] for score in scores}]
    prefills = [name for name in _PREFILLS if name in {score["prefill"] for score in scores}]
    with _styled():
        figure, axes, routes, models = _panels(rows, 3.0, 2.7, prefills)
        for (route, model, prefill), panel in axes.items():
            wanted = (route, model, prefill)
            mine = [one for one in scores if (one["route"], one["model"], one["prefill"]) == wanted]
            for score in mine:
                known = [place for place, n in enumerate(ticks) if n in score["kept"]]
                mix = mixes.index(score["mix"])
                beside = (mix - (len(mixes) - 1) / 2) * 0.14
                panel.plot(
                    [place + beside for place in known],
                    [100 * score["kept"][ticks[place]] for place in known],
                    color=_colour(mix),
                    marker=_marker(mix),
                    linestyle=_DASHES[places.index(score["place"]) % len(_DASHES)],
                    markersize=4.5,
                    linewidth=1.2,
                )
            names = ["all" if n is None else f"first {n}" for n in ticks]
            panel.set_xticks(range(len(ticks)), names)
            panel.set_xlim(-0.3, len(ticks) - 0.7)
            if route == routes[0]:
                panel.set_ylabel("positions with the\ntoken as alone (%)")
            if (model, prefill) == (models[-1], prefills[-1]):
                panel.set_xlabel("tokens of the reply")
        _up_to_hundred(list(axes.values()))
        handles: list[Artist] = [_point(_colour(n), _marker(n), mix) for n, mix in enumerate(mixes)]
        handles += [
            Line2D(
                [],
                [],
                color="0.35",
                linestyle=_DASHES[n % len(_DASHES)],
                label=f"{width} of {slots}",
            )
            for n, (slots, width) in enumerate(places)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=min(6, len(handles)))
        n = sum(score["n"] for score in scores)
        prompts = rows["prompt_id"].nunique()
        left_out = _n_left_out(replies)
        note = f"; {left_out:,} invalid replies are not counted" if left_out else ""
        _caption(
            figure,
            f"n = {n:,} replies in company, {prompts} prompts{note}. "
            "Lines: requests in flight, of slots.\n"
            "A reply that ends early, or goes on after the end of the answer alone, keeps nothing "
            "there;\nfirst tokens that no reply reaches are not drawn.",
        )
        return figure


def _up_to_hundred(panels: Sequence[Axes]) -> None:
    """Let a share's axis end at 100 %, and show at least the last 5 % of it."""
    low = min(panel.get_ylim()[0] for panel in panels)
    for panel in panels:
        panel.set_ylim(min(low, 95.0), 101.5)


def _scores_of_blocks(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return shares of kept tokens by block: ``kept`` by prefix length, ``place`` (slots, width).

    A prefix length stands there where a reply and the answer alone reach it.
    """
    scores = []
    names = ["route", "model", "prefill", "parallel", "width", "mix"]
    company = rows[rows["width"] > 1]
    for (route, model, prefill, slots, width, mix), block in company.groupby(names, sort=True):
        same = rows[(rows["route"] == route) & (rows["model"] == model)]
        alone = solo_of(same, str(prefill)).sort_values(
            ["prompt_index", "life", "round", "copy"], kind="stable"
        )
        references = alone.drop_duplicates("prompt_index").set_index("prompt_index", drop=False)
        found = [
            score_against(references.loc[prompt].to_dict(), group)
            for prompt, group in block.groupby("prompt_index")
            if prompt in references.index
        ]
        summed = summarise_scores(found)
        if summed is None:
            continue
        kept = {
            prefix["tokens"]: prefix["share"]
            for prefix in summed["kept"]
            if prefix["share"] is not None
        }
        scores.append(
            {
                "route": route,
                "model": model,
                "prefill": prefill,
                "place": (slots, width),
                "mix": mix,
                "kept": kept,
                "n": summed["replies"],
            }
        )
    return scores


def draw_agree_dlogp(agree: pd.DataFrame, study: Mapping[str, Any]) -> Figure:
    """Return how far two routes' logprobs are apart: a curve per pair and width.

    ``agree`` are rows of study_agree. A curve says which share of common positions with the same
    token is at least so far apart. The published gate on the largest is drawn as a scale and
    decides nothing; the one on the mean is of no single position, and stands in the caption.
    """
    sweep = study.get("sweeps", {}).get("agree", {})
    two = agree["route"].map(lambda name: len(set(str(name).split("|"))) > 1).astype(bool)
    rows = agree[two & agree["cell_valid"]]
    counted = rows[rows["common"].astype(bool) & rows["match"].astype(bool) & rows["dlogp"].notna()]
    if counted.empty:
        return _nothing("No two routes have logprobs at a common position.")
    models = [name for name in sweep.get("models", []) if name in set(counted["model"])]
    models = models or sorted(set(counted["model"]))
    pairs = sorted(set(counted["route"]), key=lambda name: _pair_place(str(name), sweep))
    variants = sorted(set(counted["variant"]), key=variant_key)
    seen = counted.loc[counted["dlogp"] > 0, "dlogp"].astype(float)
    low = min(float(seen.min()) if len(seen) else 1e-3, PUBLISHED_DLOGP_MAX)
    high = max(float(seen.max()) if len(seen) else 0.1, PUBLISHED_DLOGP_MAX)
    low, high = (10.0 ** np.floor(np.log10(low / 1.1)), 10.0 ** np.ceil(np.log10(high * 1.1)))
    with _styled():
        figure = _figure(7.4, 2.9 * len(models) + 0.8)
        panels = figure.subplots(len(models), 1, sharex=True, squeeze=False)[:, 0]
        for panel, model in zip(panels, models, strict=True):
            for number, pair in enumerate(pairs):
                for style, variant in enumerate(variants):
                    mine = counted[
                        (counted["model"] == model)
                        & (counted["route"] == pair)
                        & (counted["variant"] == variant)
                    ]
                    if len(mine):
                        _tail(panel, mine, number, _DASHES[style % len(_DASHES)], low, high)
            panel.axvline(PUBLISHED_DLOGP_MAX, color="0.5", linewidth=0.8, linestyle=":", zorder=0)
            panel.annotate(
                f"max {PUBLISHED_DLOGP_MAX:g}",
                (PUBLISHED_DLOGP_MAX, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=7,
                color="0.4",
            )
            panel.set_xscale("log")
            panel.set_xlim(low, high)
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_ylim(0, 101)
            panel.set_ylabel("positions at least so far apart (%)")
            panel.grid(axis="y", color="0.9", linewidth=0.6)
            panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
            if len(models) > 1:
                panel.set_title(model, loc="left")
        panels[-1].set_xlabel("|Δ logprob| of the same token after the same tokens (nats)")
        sns.despine(figure)
        equal = int((counted["dlogp"] == 0).sum())
        _caption(
            figure,
            f"n = {len(counted):,} common positions with the same token, "
            f"{counted['prompt_id'].nunique()} prompts; {equal:,} are equal and left of the axis.\n"
            f"Dotted: the largest published with {PUBLISHED_GATES_SOURCE},\n"
            "its own n not stated: a scale, no verdict is made from it. The published mean, "
            f"{PUBLISHED_DLOGP_MEAN:g}, is of a pair\nand of no position, and is not drawn: "
            f"{_means(counted)}.",
        )
        return figure


def _means(counted: pd.DataFrame) -> str:
    """Return the mean distance of the pair, or from which to which those of all curves go."""
    means = counted.groupby(["model", "route", "variant"])["dlogp"].mean().astype(float)
    if len(means) == 1:
        return f"the mean here is {means.iloc[0]:.2g}"
    listed = f"the means here are {means.min():.2g} to {means.max():.2g}"
    return f"{listed} (each beside its name)"


def _pair_place(pair: str, sweep: Mapping[str, Any]) -> tuple[list[int], str]:
    places = _places(sweep.get("routes", []))
    return [places.get(name, len(places)) for name in pair.split("|")], pair


def _tail(
    panel: Axes, rows: pd.DataFrame, number: int, style: Any, low: float, high: float
) -> None:
    """Draw which share of rows is at least so far apart, as steps."""
    values = np.sort(rows["dlogp"].to_numpy(dtype=float))
    n = len(values)
    moved = values[values > 0]
    share = 100 * np.arange(len(moved), 0, -1) / n
    x = np.concatenate([[low], moved, [high]])
    y = np.concatenate([share[:1] if len(share) else [0.0], share, [0.0]])
    only = "" if bool(rows["arithmetic_only"].all()) else ", not arithmetic only"
    pair, variant = rows["route"].iloc[0], variant_label(str(rows["variant"].iloc[0]))
    panel.step(
        x,
        y,
        where="pre",
        color=_colour(number),
        linestyle=style,
        linewidth=1.3,
        label=f"{pair.replace('|', ' | ')}\n{variant} in flight, n = {n:,}, "
        f"mean {values.mean():.2g}{only}",
    )
