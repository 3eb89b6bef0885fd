"""The cluster, the executor plugins, and a small study across both nodes: made once a session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from routewise.study import read_yaml
from small_gguf import make_gguf
from workbench import REPOSITORY, Bench, Run, make_bench

from .slurm import Slurm, slurm_cluster, what_is_missing

REQUIRED = "ROUTEWISE_CLUSTER_TESTS"
PROFILES = REPOSITORY / "profiles"
SERVERS = REPOSITORY / "tests/servers"
PROMPTS: list[dict[str, Any]] = [
    {"id": "cat", "category": "text", "n_tokens": 8, "text": "The cat sat on"},
    {"id": "dog", "category": "text", "n_tokens": 8, "text": "A dog that barks all night long"},
    {"id": "cow", "category": "text", "n_tokens": 8, "text": "Seven cows went up the hill"},
]
GENERIC = yaml.safe_load((PROFILES / "cluster-generic/config.yaml").read_text())
#: Polls every second: a study of seconds waits for nothing else. And this cluster's partitions.
QUICK = {
    "slurm": ("--slurm-init-seconds-before-status-checks", "1"),
    "cluster-generic": (
        *("--seconds-between-status-checks", "1"),
        *("--cluster-generic-status-cmd", str(REPOSITORY / GENERIC["cluster-generic-status-cmd"])),
        "--cluster-generic-submit-cmd",
        GENERIC["cluster-generic-submit-cmd"] + " --partition={resources.slurm_partition}",
        *("--default-resources", *(one.partition(" ")[0] for one in GENERIC["default-resources"])),
        "slurm_partition=everything",
    ),
}


@dataclass
class ClusterBench(Bench):
    """A working folder whose runs are submitted to a scheduler."""

    plugins: Path = field(default_factory=Path)

    def copy(self, folder: Path) -> ClusterBench:
        made = super().copy(folder)
        return ClusterBench(made.folder, made.study, self.profile, self.plugins)

    def cells_asked_for(self) -> list[Path]:
        """Return the cells that the last run's tables were made of."""
        (newest, *_) = sorted(
            (self.results / ".cache/cells").glob("*.txt"), key=lambda path: -path.stat().st_mtime
        )
        return [self.folder / line for line in newest.read_text().splitlines()]

    def command(self, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "snakemake"),
            *("--snakefile", str(REPOSITORY / "Snakefile")),
            *("--profile", str(PROFILES / self.profile)),
            *("--configfile", str(self.write_study()), *QUICK[self.profile], *arguments),
        ]

    def start(self, *arguments: str, **environment: str) -> Run:
        plugins = {"PYTHONPATH": str(self.plugins)}
        return Run(self, self.command(*arguments), {**os.environ, **plugins, **environment})


def do_without(reason: str) -> NoReturn:
    """Skip a test that needs a cluster, or fail where one is required."""
    message = f"no Slurm cluster can be brought up here: {reason}"
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(message)
    pytest.skip(f"{message} ({REQUIRED}=required makes this a failure)")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Return the running cluster; skip, or fail where it is required, where none can be."""
    if reason := what_is_missing():
        do_without(reason)
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def plugins(repository: Path, real_results: Path) -> Path:
    """Return a folder with the executor plugins that are pinned, for these runs alone.

    Were they in the environment, every start of Snakemake in other tests would ask the controller.
    """
    pinned = (repository / "requirements/slurm.txt").read_text()
    base = (repository / "requirements/requirements.txt").read_text()
    blocks = re.findall(r"^[a-z0-9].*?(?=^[a-z0-9]|\Z)", pinned, re.M | re.S)
    own = [block for block in blocks if f"\n{block.partition('==')[0]}==" not in f"\n{base}"]
    names = [block.partition(" ")[0] for block in own]
    folder = real_results / ".cache" / "plugins" / "+".join(["quick", *names])
    if not folder.is_dir():
        wanted = real_results / ".cache" / f"plugins.{os.getpid()}.txt"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        wanted.write_text("".join(own))
        part = folder.with_name(f"part.{os.getpid()}")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
                *("--require-hashes", "--target", str(part), "-r", str(wanted)),
            ],
            check=True,
        )
        wanted.unlink()
        # a look at the jobs every second; on a real cluster each one comes ten seconds later
        slower = part / "snakemake_executor_plugin_slurm/__init__.py"
        text = slower.read_text()
        assert text.count("next_seconds_between_status_checks + 10,") == 1, slower
        slower.write_text(text.replace("status_checks + 10,", "status_checks + 0,"))
        part.rename(folder)
    return folder


def double_route(program: str, *arguments: str, **more: Any) -> dict[str, Any]:
    """Return a route of a double, with one slot's answers to be asked alone."""
    return {
        "command": [sys.executable, str(SERVERS / program), *arguments],
        "threads": 1,
        "claim": {"limit_minutes": 10},
        **more,
    }


@pytest.fixture(scope="session")
def cluster_study(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a study of three devices on two hosts: a CPU and an NPU there, a GPU here."""
    demo = read_yaml(repository / "config/config.yaml")
    folder = tmp_path_factory.mktemp("cluster")
    model = make_gguf(folder / "small-f16.gguf", tokenizer="tiny")
    kernels = folder / "kernels"
    kernels.mkdir()
    alone = {"models": ["small"], "prompts": "few", "repeats": 2, "lives": 1, "cache": ["off"]}
    return {
        "schema_version": 1,
        "study": "cluster",
        "sources": demo["sources"],
        "hosts": {
            "plain": {"slurm_partition": "cpus", "mem_mb": 1000},
            "gpus": {"gpu": 1, "mem_mb": 1000},
            "npus": {"gres": "npu:1", "mem_mb": 1000},
        },
        "builds": {"cpu-stock": {**demo["builds"]["cpu-stock"], "host": "plain"}},
        "models": {"small": {"kind": "path", "path": str(model)}},
        "prompts": {"few": {"file": "prompts.jsonl"}},
        "routes": {
            "cpu-stock": {"build": "cpu-stock", "threads": 2, "context": 512, "micro_batch": 256},
            "hrx": double_route(
                "hrx_double.py",
                *("serve", "{model}", "--device", "hrx", "--host", "{host}", "--port", "{port}"),
                *("-np", "{parallel}", "-c", "{context}"),
                device="hrx",
                host="gpus",
                env={
                    "HSA_USE_SVM": "0",
                    "HSA_USERPTR_FOR_PAGED_MEM": "0",
                    "HRX_ALLOW_NO_SVM": "1",
                },
            ),
            "npu": double_route(
                "npu_double.py",
                *("forward-serve", "-m", "{model}", "--kernels", str(kernels), "-p", "{port}"),
                *("--list-first", "4"),
                device="npu",
                host="npus",
                api="openai",
                prompt_form="text",
                token_ids=False,
                logprob_list=4,
                props=False,
                prompt_cache="none",
                parallel_max=1,
                weights="requantised",
            ),
        },
        "sweeps": {
            "replay": {
                "routes": ["cpu-stock"],
                "models": ["small"],
                "prompts": "few",
                "widths": [4],
                "shapes": [],
            },
            "repeat": {**alone, "routes": ["hrx", "npu"]},
        },
    }


@pytest.fixture(scope="session")
def make_cluster_bench(
    slurm: Slurm, plugins: Path, real_results: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Return a maker of working folders: (study, profile="slurm") -> ClusterBench."""

    def make(study: Mapping[str, Any], profile: str = "slurm") -> ClusterBench:
        made = make_bench(tmp_path_factory.mktemp("bench") / "work", real_results, study)
        bench = ClusterBench(made.folder, made.study, profile, plugins)
        bench.write_prompts(PROMPTS)
        return bench

    return make
