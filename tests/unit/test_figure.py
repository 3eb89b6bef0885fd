from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from made_cells import MadeStudy
from made_serving import MadeServing
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from routewise import figure as drawn
from routewise.figure import (
    draw_agree_dlogp,
    draw_delta_by_position,
    draw_flips_and_margins,
    draw_price_by_width,
    draw_solo_token_kept,
    draw_states_by_width,
    save_figure,
)
from routewise.table import StudyTables, read_tables

Draw = Callable[[pd.DataFrame, Mapping[str, Any]], Figure]
DRAWN: list[tuple[Draw, str]] = [
    (draw_delta_by_position, "replay"),
    (draw_flips_and_margins, "replay"),
    (draw_price_by_width, "cost"),
    (draw_states_by_width, "replies"),
    (draw_solo_token_kept, "replies"),
    (draw_agree_dlogp, "agree"),
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> StudyTables:
    """Return a study's tables: replay and cost of one, what was served of another."""
    replayed = read_tables(MadeStudy(tmp_path_factory.mktemp("made")).tables())
    served = read_tables(MadeServing(tmp_path_factory.mktemp("served")).tables())
    sweeps = {**replayed.study["sweeps"], **served.study["sweeps"]}
    return dataclasses.replace(
        replayed,
        study={**replayed.study, "sweeps": sweeps},
        replies=served.replies,
        agree=served.agree,
    )


def texts(figure: Figure) -> list[str]:
    return [found.get_text() for found in figure.findobj(mpl.text.Text)]


@pytest.mark.parametrize(("draw", "table"), DRAWN)
def test_the_same_table_gives_the_same_bytes_and_no_date(
    draw: Draw, table: str, tables: StudyTables, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        files = [tmp_path / f"{name}.svg", tmp_path / f"{name}.png"]
        save_figure(draw(getattr(tables, table), tables.study), files)
        # What a user set for other drawings, or drew before, must not show.
        mpl.rcParams["font.size"] = 23
    mpl.rcdefaults()
    for suffix in ("svg", "png"):
        one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two
    assert "<dc:date>" not in (tmp_path / "one.svg").read_text()


@pytest.mark.parametrize(("draw", "table"), DRAWN)
def test_axes_are_labelled_and_the_caption_has_the_n(
    draw: Draw, table: str, tables: StudyTables
) -> None:
    figure = draw(getattr(tables, table), tables.study)
    labels = [
        label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label
    ]
    assert len(labels) >= 2
    assert any(axes.get_xlabel() for axes in figure.axes)
    assert any(axes.get_ylabel() for axes in figure.axes)
    assert any(text.startswith("n = ") for text in texts(figure))


@pytest.mark.parametrize(("draw", "table"), DRAWN)
def test_an_empty_table_gives_a_figure_that_says_so(
    draw: Draw, table: str, tables: StudyTables, tmp_path: Path
) -> None:
    figure = draw(getattr(tables, table).iloc[:0], tables.study)
    save_figure(figure, [tmp_path / "empty.svg"])
    assert any(text.startswith("No ") for text in texts(figure))


def image_of(rows: pd.DataFrame, tables: StudyTables, route: str) -> np.ndarray:
    figure = draw_delta_by_position(rows, tables.study)
    panel = next(axes for axes in figure.axes if axes.get_title(loc="left") == route)
    return np.asarray(panel.collections[0].get_array()).reshape(6, -1, 4)


def test_equal_bits_and_a_difference_of_zero_do_not_look_alike(tables: StudyTables) -> None:
    equal = mpl.colors.to_rgba(drawn.EQUAL_COLOUR)
    rows = tables.replay.copy()
    assert (image_of(rows, tables, "cpu-exact")[2] == equal).all()
    one = rows.index[(rows["route"] == "cpu-exact") & (rows["variant"] == "w8")][5]
    rows.loc[one, ["bits_equal", "logit_delta_max", "n_zero_sign"]] = [False, 0.0, 1]
    strip = image_of(rows, tables, "cpu-exact")[2]
    assert (strip != equal).any(axis=-1).sum() == 1


def test_an_invalid_row_is_drawn_as_invalid_and_left_out_of_the_n(tables: StudyTables) -> None:
    rows = tables.replay.copy()
    hit = (rows["route"] == "cpu-exact") & (rows["variant"] == "w8")
    rows.loc[hit, "cell_valid"] = False
    strip = image_of(rows, tables, "cpu-exact")[2]
    assert (strip == mpl.colors.to_rgba(drawn.INVALID_COLOUR)).all(axis=-1).any()
    assert not (strip == mpl.colors.to_rgba(drawn.EQUAL_COLOUR)).all(axis=-1).any()
    for draw in (draw_delta_by_position, draw_flips_and_margins):
        assert any(
            "96 invalid rows are not counted" in text for text in texts(draw(rows, tables.study))
        )


def test_flips_are_counted_at_each_strip(tables: StudyTables) -> None:
    rows = tables.replay
    found = texts(draw_flips_and_margins(rows, tables.study))
    stock = rows[(rows["route"] == "cpu-stock") & (rows["variant"] == "w8")]
    assert f"{int(stock['argmax_flip'].sum())} of 96" in found
    assert found.count("0 of 96") >= 6


def test_nothing_of_matplotlibs_own_state_is_changed(tables: StudyTables) -> None:
    before = dict(mpl.rcParams)
    draw_price_by_width(tables.cost, tables.study)
    assert dict(mpl.rcParams) == before


def heights_of(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata(), dtype=float)


def test_states_are_drawn_as_counted_with_the_estimate_above(tables: StudyTables) -> None:
    figure = draw_states_by_width(tables.replies, tables.study)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert set(panels) == {"cpu-stock", "cpu-exact"}
    heights = {
        name: {
            float(heights_of(line)[0]) for line in axes.lines if line.get_marker() in tuple("osD")
        }
        for name, axes in panels.items()
    }
    assert heights == {"cpu-stock": {3.0}, "cpu-exact": {1.0}}
    assert any("at most 12 replies a request" in text for text in texts(figure))


def test_invalid_replies_are_left_out_of_figures_and_counted(tables: StudyTables) -> None:
    replies = tables.replies.copy()
    chosen = (replies["sweep"] == "batched") & (replies["width"] == 4) & (replies["copy"] == 0)
    replies.loc[replies[chosen].index[:5], "status"] = "invalid"
    for draw in (draw_states_by_width, draw_solo_token_kept):
        figure = draw(replies, tables.study)
        assert any("5 invalid replies are not counted" in text for text in texts(figure))


def test_kept_tokens_are_lines_by_length(tables: StudyTables) -> None:
    figure = draw_solo_token_kept(tables.replies, tables.study)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    exact, stock = (
        [heights_of(line) for line in panels[name].lines if len(heights_of(line)) == 3]
        for name in ("cpu-exact, prefilled together", "cpu-stock, prefilled together")
    )
    assert len(exact) == len(stock) == 3
    assert all((heights == 100.0).all() for heights in exact)
    assert all(heights[0] > heights[-1] for heights in stock)
    labels = [label.get_text() for label in panels["cpu-stock, prefilled apart"].get_xticklabels()]
    assert labels == ["first 16", "first 32", "all"]


@pytest.mark.parametrize("draw", [draw_states_by_width, draw_solo_token_kept])
def test_no_point_lies_outside_of_its_panel(tables: StudyTables, draw: Draw) -> None:
    """Panels share an axis, and the last one may be the highest."""
    swapped = {"cpu-stock": "cpu-exact", "cpu-exact": "cpu-stock"}
    replies = tables.replies.assign(route=tables.replies["route"].replace(swapped))
    for panel in draw(replies, tables.study).axes:
        low, high = panel.get_ylim()
        for line in panel.lines:
            heights = np.asarray(line.get_ydata(), float)
            heights = heights[~np.isnan(heights)]
            assert ((low <= heights) & (heights <= high)).all()


def test_gates_are_drawn_with_their_source_and_as_no_verdict(tables: StudyTables) -> None:
    figure = draw_agree_dlogp(tables.agree, tables.study)
    found = texts(figure)
    assert "max 0.06" in found
    assert "mean 0.005" not in found  # a mean is no line in a distribution of positions
    assert any("no verdict is made from it" in text and "logprob_agree" in text for text in found)
    assert any("not arithmetic only" in text for text in found)
    assert not any("cpu-stock | cpu-stock" in text for text in found)


def test_pairs_that_are_equal_everywhere_are_a_figure_too(tables: StudyTables) -> None:
    equal = tables.agree[
        (tables.agree["route"] == "cpu-stock|cpu-exact") & (tables.agree["variant"] == "w1")
    ]
    figure = draw_agree_dlogp(equal, tables.study)
    assert any("120 are equal" in text for text in texts(figure))
