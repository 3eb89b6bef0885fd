"""A study across two hosts of a real Slurm, and what is left of it when things go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import ClusterBench
from .slurm import NODES, Slurm

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

ONE, TWO = NODES


@pytest.fixture(scope="session")
def submitted(make_cluster_bench: Any, cluster_study: dict[str, Any]) -> ClusterBench:
    """Return the finished run of the study, in one submission. To read only."""
    bench: ClusterBench = make_cluster_bench(cluster_study)
    bench.snakemake().check()
    return bench


def test_one(submitted: ClusterBench, slurm: Slurm) -> None:
    for job in slurm.jobs():
        print(job)
    print((submitted.folder / "output.txt").read_text())
    assert 0
