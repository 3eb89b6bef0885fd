from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from made_cells import MadeStudy
from matplotlib.figure import Figure
from routewise import figure as drawn
from routewise.figure import (
    draw_delta_by_position,
    draw_flips_and_margins,
    draw_price_by_width,
    save_figure,
)
from routewise.table import StudyTables, read_tables

Draw = Callable[[pd.DataFrame, Mapping[str, Any]], Figure]
DRAWN: list[tuple[Draw, str]] = [
    (draw_delta_by_position, "replay"),
    (draw_flips_and_margins, "replay"),
    (draw_price_by_width, "cost"),
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> StudyTables:
    return read_tables(MadeStudy(tmp_path_factory.mktemp("made")).tables())


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
    assert len(labels) >= 3
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
