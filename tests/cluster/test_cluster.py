"""A study across two hosts of a real Slurm, and what is left of it when things go wrong."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from routewise.claim import claimed_devices, claims_folder, read_claims
from workbench import Bench, Outcome, eventually, provenance_of

from .conftest import ClusterBench
from .slurm import NODES, Node, Slurm, processes_in

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

ONE, TWO = NODES
HRX, NPU = "repeat.hrx.small.solo", "repeat.npu.small.solo"
#: What a run of the whole study submits; the rest is done where it was started.
SUBMITTED = {
    "build_engine": 1,
    "tokenize_prompts": 1,
    "measure_plain": 1,
    "measure_replay": 2,
    "measure_serving": 2,
    "build_tables": 1,
}
#: A prompt takes 5 s then, and a cell of three 15 s: time to disturb it.
SLOW = ["--token-ms", "300"]
#: For what Slurm, Snakemake and a busy machine need to notice something.
SOON_S = 120.0

Job = dict[str, str]


def jobs_of(slurm: Slurm, bench: ClusterBench, rule: str = "", cell: str = "") -> list[Job]:
    """Return the jobs that were submitted from a folder, for a rule, for a cell."""
    return [
        job
        for job in slurm.jobs()
        if job["WorkDir"] == str(bench.folder)
        and job.get("Comment", "").startswith(f"rule_{rule}")
        and cell in job["StdOut"]
    ]


def counts(jobs: list[Job]) -> dict[str, int]:
    rules = [rule for rule in SUBMITTED for job in jobs if f"rule_{rule}" in job["Comment"]]
    return {rule: rules.count(rule) for rule in dict.fromkeys(rules)}


def serving_jobs(slurm: Slurm, bench: ClusterBench) -> dict[str, list[Job]]:
    """Return the jobs that served, by their route."""
    return {
        route: jobs_of(slurm, bench, "measure_serving", f"_{route}_") for route in ("hrx", "npu")
    }


def servers_on(node: Node) -> list[str]:
    """Return what runs on a node beside Slurm's own daemons: jobs, servers, their keepers."""
    found = []
    for pid in processes_in(node.network):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name() not in ("slurmd", "slurmstepd"):
                found.append(f"{pid}: {' '.join(process.cmdline())[:200]}")
    return found


def ports_on(node: Node) -> set[int]:
    """Return the ports that are listened on in a node's network, slurmd's own left out."""
    listed = subprocess.run(
        ["nsenter", f"--net={node.network}", "cat", "/proc/self/net/tcp"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split() for line in listed.splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"} - {16818}


def claims_held() -> list[object]:
    folder = claims_folder()
    return [one for device in claimed_devices(folder) for one in read_claims(folder, device)]


def nothing_is_left_on(node: Node) -> None:
    eventually(lambda: not servers_on(node), 30, lambda: "\n".join(servers_on(node)))
    assert ports_on(node) == set()


def stored(bench: ClusterBench) -> set[Path]:
    return set((bench.results / "store").rglob("*.parquet"))


def slowed(bench: ClusterBench, *routes: str) -> ClusterBench:
    """Have servers take their time: other cells, that nobody has measured yet."""
    for route in routes:
        bench.study["routes"][route]["command"] += SLOW
    return bench


def hrx_cell(bench: ClusterBench) -> str:
    """Return the GPU's cell as a target."""
    (cell,) = (path for path in bench.cells_asked_for() if path.name == f"{HRX}.parquet")
    return str(cell.relative_to(bench.folder))


@pytest.fixture(scope="session")
def submitted(
    make_cluster_bench: Callable[..., ClusterBench], cluster_study: dict[str, Any], slurm: Slurm
) -> tuple[ClusterBench, list[Job]]:
    """Return the finished run of the study, in one submission, and its jobs. To read only."""
    bench = make_cluster_bench(cluster_study)
    bench.snakemake().check()
    return bench, jobs_of(slurm, bench)


@pytest.fixture
def bench(submitted: tuple[ClusterBench, list[Job]], tmp_path: Path) -> ClusterBench:
    """Return a copy of the finished run."""
    return submitted[0].copy(tmp_path / "work")


# ---------------------------------------------------------------------------------- where jobs go


def test_one_submission_sends_each_job_to_its_host(
    submitted: tuple[ClusterBench, list[Job]],
) -> None:
    _, jobs = submitted
    wanted = dict(SUBMITTED)
    if not any("rule_build_engine" in job["Comment"] for job in jobs):
        del wanted["build_engine"]  # compiled by an earlier session
    assert counts(jobs) == wanted
    assert {job["JobState"] for job in jobs} == {"COMPLETED"}
    for job in jobs:
        if "rule_build_tables" not in job["Comment"] and "_hrx_" not in job["StdOut"]:
            assert job["NodeList"] == ONE.name, job
    for job in (one for one in jobs if "rule_measure_serving" not in one["Comment"]):
        on_cpus = "rule_build_tables" not in job["Comment"]
        assert job["Partition"] == ("cpus" if on_cpus else "everything"), job
    (hrx,) = (job for job in jobs if "_hrx_" in job["StdOut"])
    (npu,) = (job for job in jobs if "_npu_" in job["StdOut"])
    assert hrx["NodeList"] == TWO.name
    assert hrx["TresPerJob"].endswith("gpu:1")
    assert npu["NodeList"] == ONE.name
    assert npu["TresPerNode"].endswith("npu:1")


def test_cells_know_their_kind_of_host_and_the_receipt_is_whole(
    submitted: tuple[ClusterBench, list[Job]],
) -> None:
    bench, _ = submitted
    hosts = {name: provenance_of(path)["inputs"]["host"] for name, path in bench.cells().items()}
    assert {name: hosts.pop(name) for name in (HRX, NPU)} == {HRX: "gpus", NPU: "npus"}
    assert hosts
    assert set(hosts.values()) == {"plain"}
    claims = {claim["id"]: claim["verdict"] for claim in bench.receipt["claims"]}
    assert claims["repeat/hrx/small/off"] == "exact"
    assert claims["repeat/npu/small/off"] == "exact"
    assert any(name.startswith("replay/cpu-stock/small") for name in claims)
    assert "incomplete" not in claims.values()
    assert (bench.results / "cluster/receipt.md").is_file()
    assert bench.jobs_left() == {}


def test_nothing_is_left_after_a_run(submitted: tuple[ClusterBench, list[Job]]) -> None:
    for node in NODES:
        nothing_is_left_on(node)
    assert claims_held() == []


def test_results_of_two_kinds_of_host_never_stand_under_one_name(bench: ClusterBench) -> None:
    """And other resources of the same kind are no other results: only the report is made again."""
    bench.study["hosts"]["gpus"]["runtime"] = 30
    assert not [rule for rule in bench.jobs_left() if rule.startswith(("measure", "tokenize"))]
    bench.study["hosts"]["others"] = {"gpu": 1}
    bench.study["routes"]["hrx"]["host"] = "others"
    left = bench.jobs_left()
    assert left["measure_serving"] == 1, left
    assert "measure_replay" not in left


def test_the_same_study_is_planned_on_one_machine(bench: ClusterBench) -> None:
    """What a scheduler is asked for plays no part there, and is no error."""
    cell = hrx_cell(bench)
    (bench.folder / cell).unlink()
    alone = Bench(bench.folder, bench.study)
    assert alone.jobs_left(cell) == {"measure_serving": 1}


def test_a_host_that_nobody_has_is_said_and_the_others_go_on(
    bench: ClusterBench, slurm: Slurm
) -> None:
    cells = bench.cells()
    cells[HRX].unlink()
    bench.study["hosts"]["gpus"]["gpu"] = 2
    outcome = bench.snakemake()
    assert outcome.code != 0
    assert "sbatch failed" in outcome.text
    assert "node configuration is not available" in outcome.text, outcome.text
    assert "the run did not finish" in outcome.text
    (job,) = jobs_of(slurm, bench)  # Slurm keeps it as one that never ran
    assert (job["JobState"], job["Reason"], job["RunTime"]) == (
        "FAILED",
        "BadConstraints",
        "00:00:00",
    )
    assert set(bench.cells()) == set(cells) - {HRX}


# ------------------------------------------------------------------------- what goes wrong midway


@dataclass
class Disturbed:
    """A run that lost a node under one job and had the other cancelled, and the run after it."""

    bench: ClusterBench
    first: Outcome
    first_jobs: dict[str, list[Job]]
    kept: set[Path]
    left_on_one: str
    second: Outcome
    second_jobs: list[Job]


@pytest.fixture(scope="session")
def disturbed(
    submitted: tuple[ClusterBench, list[Job]],
    slurm: Slurm,
    tmp_path_factory: pytest.TempPathFactory,
) -> Disturbed:
    """Lose the GPU's node and cancel the NPU's job, each after a prompt was stored; run again."""
    bench = slowed(submitted[0].copy(tmp_path_factory.mktemp("disturbed") / "work"), "hrx", "npu")
    before = stored(bench)
    with bench.running() as run:

        def both_have_stored() -> bool:
            running = serving_jobs(slurm, bench)
            states = {route: [job["JobState"] for job in jobs] for route, jobs in running.items()}
            on_the_way = states == {"hrx": ["RUNNING"], "npu": ["RUNNING"]}
            return run.over or (on_the_way and len(stored(bench) - before) >= 2)

        eventually(both_have_stored, SOON_S)
        assert not run.over, run.wait().text
        assert servers_on(ONE)
        assert claims_held()
        slurm.lose_node(TWO)
        (npu,) = serving_jobs(slurm, bench)["npu"]
        subprocess.run(["scancel", npu["JobId"]], check=True)
        first = run.wait()
    left = ""
    try:
        nothing_is_left_on(ONE)
        assert claims_held() == []
    except AssertionError as error:
        left = str(error) or "a claim"
    jobs, kept = serving_jobs(slurm, bench), stored(bench) - before
    slurm.bring_back(TWO)
    second = bench.snakemake()
    old = {job["JobId"] for jobs_ in jobs.values() for job in jobs_}
    new = [job for job in jobs_of(slurm, bench) if job["JobId"] not in old]
    return Disturbed(bench, first, jobs, kept, left, second, new)


def test_a_lost_node_ends_its_job_with_a_clear_error(disturbed: Disturbed) -> None:
    (job,) = disturbed.first_jobs["hrx"]
    assert job["JobState"] == "NODE_FAIL"
    assert disturbed.first.code != 0
    assert "node failure" in disturbed.first.text
    assert "the run did not finish" in disturbed.first.text


def test_a_cancelled_job_leaves_no_server_no_claim_no_port(disturbed: Disturbed) -> None:
    (job,) = disturbed.first_jobs["npu"]
    assert job["JobState"] == "CANCELLED"
    assert disturbed.left_on_one == ""


def test_a_resubmission_runs_only_the_rest(disturbed: Disturbed) -> None:
    disturbed.second.check()
    assert counts(disturbed.second_jobs) == {"measure_serving": 2, "build_tables": 1}
    made = {path.name: provenance_of(path) for path in disturbed.bench.cells_asked_for()}
    adopted = [made[f"{name}.parquet"]["n_adopted"] for name in (HRX, NPU)]
    assert min(adopted) >= 1, adopted
    assert sum(adopted) == len(disturbed.kept)
    measured = [made[f"{name}.parquet"]["n_measured"] for name in (HRX, NPU)]
    assert [sum(pair) for pair in zip(adopted, measured, strict=True)] == [3, 3]
    assert disturbed.bench.jobs_left() == {}


def test_jobs_outlive_a_killed_snakemake_and_the_next_run_takes_what_they_made(
    bench: ClusterBench, slurm: Slurm
) -> None:
    slowed(bench, "hrx")
    before = stored(bench)
    with bench.running() as run:
        eventually(lambda: run.over or len(stored(bench) - before) >= 1, SOON_S)
        assert not run.over, run.wait().text
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    (job,) = serving_jobs(slurm, bench)["hrx"]
    assert job["JobState"] == "RUNNING"
    cell = hrx_cell(bench)
    bench.snakemake(cell).check()  # at once: the old job has the GPU still
    old, new = serving_jobs(slurm, bench)["hrx"]
    assert (old["JobState"], new["JobState"]) == ("COMPLETED", "COMPLETED"), old
    provenance = provenance_of(bench.folder / cell)
    assert (provenance["n_adopted"], provenance["n_measured"]) == (3, 0)
    assert bench.jobs_left(cell) == {}
    nothing_is_left_on(TWO)


def test_ctrl_c_cancels_the_jobs(bench: ClusterBench, slurm: Slurm) -> None:
    slowed(bench, "hrx")
    before = stored(bench)
    with bench.running() as run:
        eventually(lambda: run.over or len(stored(bench) - before) >= 1, SOON_S)
        run.process.send_signal(signal.SIGINT)
        assert run.wait().code != 0
    eventually(
        lambda: [job["JobState"] for job in serving_jobs(slurm, bench)["hrx"]] == ["CANCELLED"],
        SOON_S,
    )
    nothing_is_left_on(TWO)
    assert claims_held() == []


# ------------------------------------------------------------------------------- other schedulers


def test_the_generic_executor_runs_the_same_study(
    make_cluster_bench: Callable[..., ClusterBench], cluster_study: dict[str, Any], slurm: Slurm
) -> None:
    bench = make_cluster_bench(cluster_study, "cluster-generic")
    bench.snakemake().check()
    claims = {claim["id"]: claim["verdict"] for claim in bench.receipt["claims"]}
    assert {claims[f"repeat/{route}/small/off"] for route in ("hrx", "npu")} == {"exact"}
    assert any(name.startswith("replay/cpu-stock/small") for name in claims)
    jobs = [job for job in slurm.jobs() if job["WorkDir"] == str(bench.folder)]
    assert {job["JobState"] for job in jobs} == {"COMPLETED"}
    found = {(job["JobName"], job["NodeList"]) for job in jobs}
    assert {("measure_plain", ONE.name), ("tokenize_prompts", ONE.name)} <= found
    assert {node for rule, node in found if rule == "measure_serving"} == {ONE.name, TWO.name}
    assert bench.jobs_left() == {}
