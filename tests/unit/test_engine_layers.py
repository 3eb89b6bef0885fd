"""Layers on a device: what the engine's log says must be what was asked for."""

from __future__ import annotations

import pytest
from routewise.engine import ALL_LAYERS, layers_offloaded, not_as_asked

LOG = "load_tensors: offloading {} repeating layers\nload_tensors: offloaded {}/31 layers to GPU\n"


@pytest.mark.parametrize(
    ("asked", "log", "wrong"),
    [
        (ALL_LAYERS, LOG.format(30, 31), False),
        (7, LOG.format(6, 7), False),
        (0, LOG.format(0, 0), False),
        (0, "", False),
        (ALL_LAYERS, LOG.format(29, 30), True),
        (ALL_LAYERS, "", True),
        (7, LOG.format(30, 31), True),
        (0, LOG.format(0, 1), True),
    ],
)
def test_another_number_of_layers_than_asked_is_seen(asked: int, log: str, wrong: bool) -> None:
    assert not_as_asked(asked, layers_offloaded(log)) is wrong


def test_the_last_model_of_a_log_counts() -> None:
    assert layers_offloaded(LOG.format(30, 31) + LOG.format(0, 0)) == (0, 31)
