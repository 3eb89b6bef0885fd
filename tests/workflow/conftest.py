"""A small model, a study on it, and the study's run: made once, shared by the session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_gguf import make_gguf
from workbench import Bench, make_bench
from routewise.study import read_yaml

pytest_plugins = ()

PROMPTS = [
    {"id": "short", "category": "text", "n_tokens": 24, "text": "The cat sat on"},
    {
        "id": "long",
        "category": "text",
        "n_tokens": 40,
        "text": "An engine that is exact gives the same bits for a token in a batch. " * 2,
    },
    {"id": "crossing", "category": "ids", "n_tokens": 40, "token_ids": [*range(3, 243)]},
]
