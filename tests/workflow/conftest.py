"""A small model, a study on it, and the study's finished run: made once, shared by the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from routewise.study import read_yaml
from small_gguf import make_gguf
from workbench import Bench, make_bench

STOCK, EXACT = "cpu-stock", "cpu-exact"
SETTINGS = {"threads": 2, "context": 512, "micro_batch": 256}

PROMPTS: list[dict[str, Any]] = [
    {"id": "short", "category": "text", "n_tokens": 24, "text": "The cat sat on"},
    {
        "id": "long",
        "category": "text",
        "n_tokens": 40,
        "text": "An engine that is exact gives the same bits for a token in a batch. " * 2,
    },
    # crosses KV position 256 within a pass of any width
    {"id": "crossing", "category": "ids", "n_tokens": 40, "token_ids": [*range(3, 240)]},
]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random llama of a few MB with a tokenizer."""
    return make_gguf(tmp_path_factory.mktemp("model") / "small-f16.gguf", tokenizer="tiny")


@pytest.fixture(scope="session")
def whole_study(repository: Path, small_model: Path) -> dict[str, Any]:
    """Return a study of both CPU routes, replay and cost, on the small model."""
    demo = read_yaml(repository / "config/config.yaml")
    routes = [STOCK, EXACT]
    return {
        "schema_version": 1,
        "study": "small",
        "sources": demo["sources"],
        "builds": demo["builds"],
        "models": {
            "small-f16": {"kind": "path", "path": str(small_model)},
            "small": {"kind": "quantize", "from": "small-f16", "type": "Q4_K_M", "build": STOCK},
        },
        "prompts": {"few": {"file": "prompts.jsonl"}},
        "routes": {
            STOCK: {"build": STOCK, **SETTINGS},
            EXACT: {"build": EXACT, "reference": STOCK, **SETTINGS},
        },
        "sweeps": {
            "replay": {
                "routes": routes,
                "models": ["small"],
                "prompts": "few",
                "widths": [2, 4, 8, 16],
                "shapes": ["ragged", "rollback", "neighbours"],
                "neighbours": 3,
                "expect": {STOCK: "differs-somewhere", EXACT: "exact"},
            },
            "cost": {
                "routes": routes,
                "models": ["small"],
                "widths": [1, 4],
                "depth": 32,
                "rounds": 6,
                "warmup": 1,
            },
        },
    }


@pytest.fixture(scope="session")
def stock_study(whole_study: dict[str, Any]) -> dict[str, Any]:
    """Return the least study: the stock route alone, a plain arm and one width, no quantizing."""
    return {
        **whole_study,
        "study": "stock",
        "builds": {STOCK: whole_study["builds"][STOCK]},
        "models": {"small": whole_study["models"]["small-f16"]},
        "routes": {STOCK: whole_study["routes"][STOCK]},
        "sweeps": {
            "replay": {
                "routes": [STOCK],
                "models": ["small"],
                "prompts": "few",
                "widths": [4],
                "shapes": [],
            }
        },
    }


MakeBench = Callable[..., Bench]


@pytest.fixture(scope="session")
def session_bench(tmp_path_factory: pytest.TempPathFactory, real_results: Path) -> MakeBench:
    """Return a maker of working folders: (study, prompts=PROMPTS) -> Bench."""

    def make(study: dict[str, Any], prompts: list[dict[str, Any]] = PROMPTS) -> Bench:
        bench = make_bench(tmp_path_factory.mktemp("bench") / "work", real_results, study)
        bench.write_prompts(prompts)
        return bench

    return make


@pytest.fixture(scope="session")
def chain(session_bench: MakeBench, whole_study: dict[str, Any]) -> Bench:
    """Return the finished run of the whole study. To read; a test that runs more takes a copy."""
    bench = session_bench(whole_study)
    bench.snakemake().check()
    return bench


@pytest.fixture(scope="session")
def stock(session_bench: MakeBench, stock_study: dict[str, Any]) -> Bench:
    """Return the finished run of the stock study. To read; a test that runs more takes a copy."""
    bench = session_bench(stock_study)
    bench.snakemake("results/stock/receipt.json").check()
    return bench
