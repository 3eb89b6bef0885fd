"""Serving sweeps from end to end: the real llama-server beside doubles of hrx and NPU servers.

Of hrx and NPU there is no hardware here: their routes run against programs that speak as their
documentation says. Everything else is the real thing, on a small model.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from routewise.claim import claimed_devices, claims_folder, read_claims
from routewise.port import is_port_free
from workbench import REPOSITORY, Bench, eventually, provenance_of

from .conftest import EXACT, STOCK, MakeBench

pytest_plugins = ("builds",)
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

SERVERS = REPOSITORY / "tests/servers"
HRX_ENV = {"HSA_USE_SVM": "0", "HSA_USERPTR_FOR_PAGED_MEM": "0", "HRX_ALLOW_NO_SVM": "1"}
PROMPTS: list[dict[str, Any]] = [
    {"id": "cat", "category": "text", "n_tokens": 400, "text": "The cat sat on"},
    {"id": "dog", "category": "text", "n_tokens": 400, "text": "A dog that barks all night long"},
]
RECEIPT = "results/serving/receipt.json"


def hrx_route(**more: Any) -> dict[str, Any]:
    """Return a route as a user of hrx hardware writes it, with the double as its program."""
    return {
        "command": [
            *(sys.executable, str(SERVERS / "hrx_double.py"), "serve", "{model}"),
            *("--device", "hrx", "--host", "{host}", "--port", "{port}"),
            *("-np", "{parallel}", "-c", "{context}", "--window-ms", "300", "--batch-states", "2"),
        ],
        "device": "hrx",
        "dispatch": "hrx",
        "env": dict(HRX_ENV),
        "threads": 1,
        **more,
    }


def npu_route(kernels: Path, **more: Any) -> dict[str, Any]:
    return {
        "command": [
            *(sys.executable, str(SERVERS / "npu_double.py"), "forward-serve"),
            *("-m", "{model}", "--kernels", str(kernels), "-p", "{port}", "--list-first", "4"),
        ],
        "device": "npu",
        "api": "openai",
        "prompt_form": "text",
        "token_ids": False,
        "logprob_list": 4,
        "props": False,
        "prompt_cache": "none",
        "parallel_max": 1,
        "weights": "requantised",
        "threads": 1,
        **more,
    }


@pytest.fixture(scope="session")
def serving_study(
    stock_study: dict[str, Any],
    whole_study: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Return a study of three devices in all serving sweeps."""
    kernels = tmp_path_factory.mktemp("kernels")
    everyone = [STOCK, "hrx", "npu"]
    common = {"models": ["small"], "prompts": "few"}
    return {
        **stock_study,
        "study": "serving",
        "builds": whole_study["builds"],
        "routes": {
            EXACT: {**stock_study["routes"][STOCK], "build": EXACT},
            STOCK: {**stock_study["routes"][STOCK], "dispatch": "scheduler"},
            "hrx": hrx_route(),
            "hrx-unfused": hrx_route(
                env={**HRX_ENV, "GGML_HRX_DISABLE_DISPATCH": "rms_norm_mul"},
                arm={"of": "hrx", "without": "rms_norm_mul"},
            ),
            "npu": npu_route(kernels),
        },
        "sweeps": {
            "repeat": {**common, "routes": everyone, "repeats": 2, "expect": {STOCK: "exact"}},
            "batched": {
                **common,
                "routes": [*everyone, EXACT],
                "parallel": [4],
                "widths": [4],
                "mixes": ["copies", "neighbours"],
                "rounds": 2,
                "expect": {"hrx": "differs-somewhere", STOCK: "differs-somewhere"},
            },
            "agree": {**common, "routes": everyone, "widths": [1, 4], "rounds": 2},
            "dispatch": {**common, "routes": ["hrx", "hrx-unfused", STOCK], "n_tokens": 4},
        },
    }


@pytest.fixture(scope="session")
def served(session_bench: MakeBench, serving_study: dict[str, Any]) -> Bench:
    """Return the finished run. To read; a test that runs more takes a copy."""
    bench = session_bench(serving_study, PROMPTS)
    with nothing_left(bench):
        bench.snakemake().check()
    return bench


@contextmanager
def nothing_left(bench: Bench) -> Iterator[None]:
    """See that a run leaves no process (so none of its ports), no claim, no temporary folder."""
    folder = bench.folder.parent / "tmp"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield
    bench.wait_until_none_is_left()
    claims = claims_folder()
    assert [one for device in claimed_devices(claims) for one in read_claims(claims, device)] == []
    assert [path.name for path in folder.iterdir() if path.name.startswith("routewise")] == []


def ports_of(pids: list[int]) -> set[int]:
    """Return the ports that processes listen on."""
    connections = [one for pid in pids for one in psutil.Process(pid).net_connections("inet")]
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def entries(bench: Bench, kind: str = "claims") -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in bench.receipt[kind]}


def server_logs(bench: Bench) -> list[Path]:
    return sorted((bench.results / "logs/servers").glob("*.log"))


# ---------------------------------------------------------------------------------- what it says


def test_a_repeated_request_is_exact_on_each_route(served: Bench) -> None:
    claims = entries(served)
    for route in (STOCK, "hrx"):
        for cache in ("off", "cold", "warm"):
            claim = claims[f"repeat/{route}/small/{cache}"]
            assert claim["verdict"] == "exact", claim
            # the small model says bytes that are no text; llama-server sends no logprob there
            assert claim["observable"] in ("chosen logprob", "token ids")
            assert claim["n"]["prompts"] == 2
            assert claim["n"]["replies"] == 8
            # all pairs: 4 replies of a prompt make 6, of which 4 are across the restart
            assert claim["n"]["pairs"] == 12
            assert claim["n"]["pairs_across_lives"] == 8


def test_the_npu_is_held_to_what_it_shows(served: Bench) -> None:
    claims = entries(served)
    off = claims["repeat/npu/small/off"]
    assert off["verdict"] == "exact", off
    for cache in ("cold", "warm"):
        claim = claims[f"repeat/npu/small/{cache}"]
        assert claim["verdict"] == "unsupported", claim
        assert "prompt cache" in claim["reasons"][0]
    for claim in claims.values():
        if claim["id"].startswith("batched/npu/"):
            assert claim["verdict"] == "unsupported", claim
            assert "parallel_max" in claim["reasons"][0]


def test_batches_are_told_from_solo_with_their_states(served: Bench) -> None:
    claims = entries(served)
    together = claims["batched/hrx/small/p4.w4.copies.together"]
    assert together["verdict"] == "differs", together
    assert together["measures"]["states"]["observed_max"] == 2
    assert together["measures"]["witness"]["busy_per_decode_mean"] > 2


def test_the_exact_build_is_exact_where_only_decode_steps_are_shared(served: Bench) -> None:
    """And stock is not: the comparison can see a difference. Together, prompts share passes."""
    claims = entries(served)
    for mix in ("copies", "neighbours"):
        claim = claims[f"batched/{EXACT}/small/p4.w4.{mix}.apart"]
        assert claim["verdict"] == "exact", claim
        assert claims[f"batched/{STOCK}/small/p4.w4.{mix}.apart"]["verdict"] == "differs"
    controls = entries(served, "controls")
    assert controls[f"batched-differs/{STOCK}"]["verdict"] == "differs"


def test_width_1_is_a_control_and_the_witness_is_in_the_receipt(served: Bench) -> None:
    controls = entries(served, "controls")
    found = {name: c["verdict"] for name, c in controls.items() if "width-1-equals-solo" in name}
    assert found
    assert set(found.values()) <= {"exact", "unsupported"}, found
    text = (served.results / "serving/receipt.md").read_text()
    assert "slots busy" in text


def test_all_pairs_agree_or_not_and_each_route_with_itself(served: Bench) -> None:
    claims, controls = entries(served), entries(served, "controls")
    for pair in (f"{STOCK}|hrx", f"{STOCK}|npu", "hrx|npu"):
        claim = claims[f"agree/{pair}/small/w1"]
        assert claim["verdict"] == "differs", claim  # they do not even run the same model
        wide = claims[f"agree/{pair}/small/w4"]
        assert wide["verdict"] in ("differs", "unsupported"), wide
    for name, control in controls.items():
        if name.startswith("same-route-twice/") and not name.endswith("/w4"):
            assert control["verdict"] == "exact", control


def test_other_weights_are_named_in_every_row(served: Bench) -> None:
    rows = pq.read_table(served.results / "serving/tables/agree.parquet").to_pandas()
    for route, part in rows.groupby("route"):
        assert set(part["arithmetic_only"]) == {"npu" not in str(route)}, route


def test_what_the_servers_logged(served: Bench) -> None:
    rows = pq.read_table(served.results / "serving/tables/dispatch.parquet").to_pandas()
    hrx = rows[rows["route"] == "hrx"]
    assert set(hrx["repeat"]) == {0, 1, 2}
    assert "mul_mat.batch.q4_k" not in set(hrx[hrx["width"] == 1]["kernel"])
    assert "mul_mat.batch.q4_k" in set(hrx[hrx["width"] == 4]["kernel"])
    arm = rows[rows["route"] == "hrx-unfused"]
    assert "rms_norm_mul" in set(hrx["kernel"])
    assert "rms_norm_mul" not in set(arm["kernel"])
    assert entries(served, "controls")["arm-counts/hrx-unfused/small"]["verdict"] == "exact"
    assert "MUL_MAT" in set(rows[rows["route"] == STOCK]["op"])


def test_each_row_says_how_its_device_was_held(served: Bench) -> None:
    rows = pq.read_table(served.results / "serving/tables/replies.parquet").to_pandas()
    assert (rows["claim_wait_s"] >= 0).all()
    assert (rows["claim_hold_s"] > 0).all()
    wide = rows[rows["width"] > 1]
    assert (wide["release_spread_ms"] > 0).all()  # measured; how small it is, a benchmark says


def test_the_server_was_the_one_asked_for(served: Bench) -> None:
    path = served.cells()[f"repeat.{STOCK}.small.solo"]
    provenance = provenance_of(path)
    for life in provenance["serving"]["lives"]:
        assert life["found"]["fingerprint"] == provenance["build"]["fingerprint"]
        assert provenance["build"]["identity"][:12] in life["props"]["build_info"]
    assert len(provenance["serving"]["stops"]) == 2
    for stop in provenance["serving"]["stops"]:
        assert stop["port_free"]
        assert stop["n_processes_left"] == 0


# --------------------------------------------------------------------------- what is run again


def test_nothing_is_left_to_do(served: Bench) -> None:
    assert served.jobs_left() == {}


def test_stored_answers_start_no_server(served: Bench, tmp_path: Path) -> None:
    bench = served.copy(tmp_path / "again")
    for name in ("repeat", "batched", "agree"):
        for path in (bench.results / "cells").glob(f"*/{name}.*.parquet"):
            path.unlink()
    for path in [*server_logs(bench), *(bench.results / "serving").rglob("*.parquet")]:
        path.unlink()
    with nothing_left(bench):
        bench.snakemake(RECEIPT).check()
    assert server_logs(bench) == []
    for name, path in bench.cells().items():
        if name.startswith(("repeat.", "batched.")):
            assert provenance_of(path)["n_measured"] == 0, name


def test_what_two_sweeps_ask_is_asked_once(served: Bench) -> None:
    """Whichever cell comes first measures it: the others look again once the device is theirs."""
    route = [
        provenance_of(path)
        for name, path in served.cells().items()
        if name.startswith(tuple(f"{sweep}.{STOCK}." for sweep in ("repeat", "batched", "agree")))
    ]
    asked = [key for one in route for key in one["fragments"]]
    assert len(set(asked)) <= len(asked) - 4  # two prompts in two lives of repeat and of agree
    assert sum(one["n_measured"] for one in route) == len(set(asked))


# -------------------------------------------------------------------------------------- faults


@pytest.fixture
def slow(session_bench: MakeBench, serving_study: dict[str, Any]) -> Bench:
    """Return a folder whose only route takes its time for each token."""
    route = hrx_route()
    route["command"] += ["--token-ms", "15"]
    study = {
        **serving_study,
        "routes": {"hrx": route},
        "sweeps": {
            "repeat": {
                "routes": ["hrx"],
                "models": ["small"],
                "prompts": "few",
                "repeats": 3,
                "cache": ["off"],
                "n_tokens": 30,
            }
        },
    }
    return session_bench(study, PROMPTS)


def doubles_of(bench: Bench) -> list[int]:
    """Return the server and its keeper; the job's own command line names the double too."""
    jobs = set(bench.processes("measure_serving.py"))
    return [pid for pid in bench.processes("hrx_double.py") if pid not in jobs]


def fragments_of(bench: Bench) -> list[Path]:
    return sorted((bench.results / "store").glob("*/*.parquet"))


@pytest.mark.parametrize("victim", ["snakemake", "job", "server"])
def test_a_kill_leaves_no_server_and_no_claim_and_loses_no_answer(slow: Bench, victim: str) -> None:
    with nothing_left(slow), slow.running(RECEIPT) as run:
        eventually(lambda: bool(fragments_of(slow)) or run.over, 600)
        ports = ports_of(doubles_of(slow))
        assert ports
        pids = {
            "snakemake": [run.process.pid],
            "job": slow.processes("measure_serving.py"),
            "server": doubles_of(slow),
        }[victim]
        for pid in pids:
            subprocess.run(["kill", "-KILL", str(pid)], check=False)
        if victim == "snakemake":
            run.process.wait()
        else:
            outcome = run.wait()
            assert outcome.code != 0
            assert "Traceback" not in outcome.text
        eventually(lambda: not doubles_of(slow), 30)
        assert all(is_port_free("127.0.0.1", port) for port in ports)
    kept = len(fragments_of(slow))
    assert kept
    with nothing_left(slow):
        slow.snakemake(RECEIPT).check()
    (path,) = slow.cells().values()
    assert provenance_of(path)["n_adopted"] == kept


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--die-at-start", "error: failed to allocate buffer of size 17179869184"],
            ["memory", "failed to allocate"],
        ),
        (["--wedged", "0"], ["completion"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--die-after", "3"], ["died"]),
    ],
)
def test_a_server_that_fails_says_why(slow: Bench, flags: list[str], words: list[str]) -> None:
    slow.study["routes"]["hrx"] = hrx_route(start_limit_s=8, stall_s=8)
    slow.study["routes"]["hrx"]["command"] += flags
    with nothing_left(slow):
        outcome = slow.snakemake(RECEIPT)
    assert outcome.code != 0
    assert "Traceback" not in outcome.text
    for word in words:
        assert word in outcome.text, outcome.text
    assert slow.cells() == {}


def test_a_missing_variable_of_the_device_is_shown(slow: Bench) -> None:
    slow.study["routes"]["hrx"]["env"] = {}
    outcome = slow.snakemake(RECEIPT)
    assert outcome.code != 0
    assert "HSA_USE_SVM" in outcome.text


def test_a_missing_program_is_named(slow: Bench) -> None:
    slow.study["routes"]["hrx"]["command"][0] = "no-such-engine"
    outcome = slow.snakemake(RECEIPT)
    assert outcome.code != 0
    assert "no-such-engine" in outcome.text
    assert "Traceback" not in outcome.text


def test_two_studies_take_turns_on_one_device(slow: Bench, tmp_path: Path) -> None:
    other = slow.copy(tmp_path / "other")
    other.study["study"] = "other"
    with slow.running(RECEIPT) as first, other.running("results/other/receipt.json") as second:
        first.wait().check()
        second.wait().check()
    holds = []
    for bench in (slow, other):
        (path,) = bench.cells().values()
        rows = pq.read_table(path).to_pandas()
        holds.append((rows["claim_wait_s"].max(), rows["claim_hold_s"].max()))
    assert max(wait for wait, _ in holds) > 1, holds  # one of them waited for the other
    assert all(hold > 0 for _, hold in holds)


def test_an_endpoint_is_asked_and_left_running(
    session_bench: MakeBench, serving_study: dict[str, Any], small_model: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SERVERS / "llama_double.py"), "-m", str(small_model)]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port), "-np", "1"])
    try:
        study = {
            **serving_study,
            "routes": {"lab": {"endpoint": f"http://127.0.0.1:{port}"}},
            "sweeps": {
                "repeat": {
                    "routes": ["lab"],
                    "models": ["small"],
                    "prompts": "few",
                    "cache": ["off"],
                }
            },
        }
        bench = session_bench(study, PROMPTS)
        bench.snakemake().check()
        assert process.poll() is None
        assert fragments_of(bench) == []  # what answers there tomorrow may be another
        claim = entries(bench)["repeat/lab/small/off"]
        assert claim["verdict"] == "exact", claim
        assert claim["n"]["pairs_across_lives"] == 0
        assert json.dumps(bench.receipt["provenance"])  # it names the endpoint and no build
    finally:
        process.kill()
        process.wait()
