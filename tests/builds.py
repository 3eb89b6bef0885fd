"""The real llama.cpp for tests: fetched once, compiled once, shared by the whole session.

A pytest plugin: a test module (or conftest) names it in ``pytest_plugins``. Source and builds are
those of the demo study in its own results folder, so that tests and ``make demo`` compile nothing
twice; ``ROUTEWISE_TEST_RESULTS`` names another folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from routewise.build import BuildPlan, BuildSpec, plan_build, run_build
from routewise.digest import DigestCache
from routewise.source import SourceSpec, fetch_source

SOURCE, BUILD = "llama-cpp", "cpu-stock"
SPEC = BuildSpec(source=SOURCE, backend="cpu")


@pytest.fixture(scope="session")
def real_results(repository: Path) -> Path:
    """Return the results folder that real sources and builds are kept in."""
    return Path(os.environ.get("ROUTEWISE_TEST_RESULTS", repository / "results")).absolute()


@pytest.fixture(scope="session")
def real_source(repository: Path, real_results: Path) -> Path:
    """Return the root of the llama.cpp tree that the demo study pins."""
    study = yaml.safe_load((repository / "config/config.yaml").read_text())
    spec = SourceSpec.from_config(SOURCE, study["sources"][SOURCE])
    return fetch_source(SOURCE, spec, real_results)


@pytest.fixture(scope="session")
def real_plan(real_source: Path, real_results: Path) -> BuildPlan:
    """Return the plan of the stock CPU build of the demo study; compile nothing."""
    cache = DigestCache(real_results / ".cache" / "digests.json")
    plan = plan_build(BUILD, SPEC, real_source, real_results, cache=cache)
    cache.save()
    return plan


def _built(plan: BuildPlan, part: str) -> Path:
    document = plan.part_dir(part) / "build.json"
    if not document.is_file() or json.loads(document.read_text())["digest"] != plan.part_digest(
        part
    ):
        run_build(plan, part)
    return plan.part_dir(part)


@pytest.fixture(scope="session")
def real_engine(real_plan: BuildPlan) -> Path:
    """Return the folder (lib/, build.json) of the stock CPU engine."""
    return _built(real_plan, "engine")


@pytest.fixture(scope="session")
def real_tools(real_plan: BuildPlan) -> Path:
    """Return the folder (bin/, lib/, build.json) of the stock tools."""
    return _built(real_plan, "tools")
