"""Routes that serve and their sweeps: what a study may say of them, and each mistake in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from routewise.errors import RoutewiseError
from routewise.route import Serving, is_local, unknown_placeholders
from routewise.study import Study, agree_pairs, batched_blocks, batched_variants, check_study

Document = dict[str, Any]
HRX = ["1bit", "serve", "{model}", "--device", "hrx", "--port", "{port}", "-np", "{parallel}"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("")
    (tmp_path / "pack.q4nx").write_text("weights of another kind")
    return tmp_path


@pytest.fixture
def document() -> Document:
    """Return a study with a route of each kind, in every serving sweep."""
    common = {"models": ["small"], "prompts": "few"}
    routes = ["cpu", "hrx", "lab"]
    return {
        "schema_version": 1,
        "study": "made",
        "sources": {"own": {"kind": "path", "path": "../llama.cpp"}},
        "builds": {"cpu-stock": {"source": "own", "backend": "cpu"}},
        "models": {"small": {"kind": "path", "path": "small.gguf"}},
        "prompts": {"few": {"file": "prompts.jsonl"}},
        "routes": {
            "cpu": {"build": "cpu-stock", "dispatch": "scheduler"},
            "hrx": {
                "command": HRX,
                "device": "hrx",
                "dispatch": "hrx",
                "env": {"HRX_ALLOW_NO_SVM": "1"},
            },
            "hrx-plain": {
                "command": HRX,
                "device": "hrx",
                "dispatch": "hrx",
                "env": {"HRX_ALLOW_NO_SVM": "1", "GGML_HRX_DISABLE_DISPATCH": "fused"},
                "arm": {"of": "hrx", "without": "fused"},
            },
            "npu": {
                "command": ["1bit", "forward-serve", "-m", "{model}", "-p", "{port}"],
                "device": "npu",
                "api": "openai",
                "prompt_form": "text",
                "token_ids": False,
                "prompt_cache": "none",
                "parallel_max": 1,
                "repeats_max": 2,
                "logprob_list": 8,
                "artefact": "pack.q4nx",
                "weights": "requantised",
                "claim": {"hold": ["npu-hold", "-l", "{label}", "-t", "{minutes}", "--"]},
            },
            "lab": {"endpoint": "http://127.0.0.1:8080"},
        },
        "sweeps": {
            "repeat": {**common, "routes": [*routes, "npu"]},
            "batched": {**common, "routes": routes},
            "agree": {**common, "routes": [*routes, "npu"]},
            "dispatch": {**common, "routes": ["hrx", "hrx-plain"]},
        },
    }


def put(document: Document, path: str, value: object) -> Document:
    document = copy.deepcopy(document)
    holder = document
    *above, last = path.split("/")
    for key in above:
        holder = holder[key]
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    return document


def refused(document: Document, root: Path) -> str:
    with pytest.raises(RoutewiseError) as caught:
        check_study(document, "my-study.yaml", root)
    assert "my-study.yaml" in caught.value.problem
    assert caught.value.hint, caught.value.problem
    return str(caught.value)


# ------------------------------------------------------------------------------- good studies


@pytest.fixture
def study(document: Document, root: Path) -> Study:
    return check_study(document, "s", root)


def test_a_route_of_each_kind(study: Study) -> None:
    kinds = {name: route.kind for name, route in study.routes.items()}
    assert kinds == {
        "cpu": "build",
        "hrx": "command",
        "hrx-plain": "command",
        "npu": "command",
        "lab": "endpoint",
    }
    devices = {name: route.serving.device for name, route in study.routes.items()}
    assert devices == {
        "cpu": "cpu", "hrx": "hrx", "hrx-plain": "hrx", "npu": "npu", "lab": "remote",
    }  # fmt: skip
    assert study.routes["npu"].serving.speech.api == "openai"
    assert not study.routes["npu"].serving.slots  # no way to name one there


def test_a_device_is_claimed_but_an_endpoint_s_only_where_it_is_said(
    document: Document, root: Path
) -> None:
    def claim(value: object, route: str) -> Any:
        changed = put(document, f"routes/{route}/claim", value)
        return check_study(changed, "s", root).routes[route].serving.claim

    study = check_study(document, "s", root)
    assert study.routes["lab"].serving.claim is None
    assert study.routes["cpu"].serving.claim.device == "cpu"  # type: ignore[union-attr]
    assert study.routes["npu"].serving.claim.hold[0] == "npu-hold"  # type: ignore[union-attr]
    assert claim({"device": "lab-gpu"}, "lab").device == "lab-gpu"
    assert claim(False, "cpu") is None
    assert claim({"units": 2, "unit_ids": ["4", "7"]}, "npu").unit_ids == ("4", "7")


def test_a_route_s_serving_travels_as_json(study: Study) -> None:
    for route in study.routes.values():
        assert Serving.from_document(route.serving.document()) == route.serving


def test_an_arm_may_have_more_arguments(document: Document, root: Path) -> None:
    document["routes"]["hrx-plain"]["command"] = [*HRX, "--no-fused"]
    check_study(document, "s", root)


def test_controls_are_always_measured(document: Document, root: Path) -> None:
    document["sweeps"]["batched"] |= {"parallel": [4], "widths": [4]}
    document["sweeps"]["agree"]["widths"] = [2]
    sweeps = check_study(document, "s", root).sweeps
    assert sweeps["batched"]["parallel"] == [1, 4]
    assert sweeps["batched"]["widths"] == [1, 4]
    assert sweeps["agree"]["widths"] == [1, 2]


def test_what_yaml_makes_of_off_is_off(document: Document, root: Path) -> None:
    document["sweeps"]["repeat"]["cache"] = [False, "warm"]
    assert check_study(document, "s", root).sweeps["repeat"]["cache"] == ["off", "warm"]


def test_blocks_of_a_batched_sweep() -> None:
    batched = {
        "parallel": [1, 4],
        "widths": [1, 2, 4],
        "mixes": ["copies", "neighbours"],
        "prefill": ["together"],
    }
    assert batched_blocks(batched, 1) == [(1, "copies", "together")]
    assert batched_blocks(batched, 2)[1:] == [
        (2, "copies", "together"),
        (2, "neighbours", "together"),
    ]
    assert batched_variants(batched) == [
        f"p4.w{width}.{mix}.together" for width in (2, 4) for mix in ("copies", "neighbours")
    ]


def test_all_pairs_once(study: Study) -> None:
    pairs = agree_pairs(study.sweeps["agree"])
    assert pairs[:3] == [("cpu", "hrx"), ("cpu", "lab"), ("cpu", "npu")]
    assert len(pairs) == 6


# -------------------------------------------------------------------------------- bad studies


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("routes/cpu/command", HRX, ["routes.cpu", "build and command", "exactly one"]),
        ("routes/cpu/build", None, ["routes.cpu", "exactly one of build, command, endpoint"]),
        ("routes/cpu/build", "cpu-stok", ["routes.cpu.build", "cpu-stock"]),
        ("routes/hrx/command", ["1bit", "serve"], ["routes.hrx.command", "{port}"]),
        ("routes/hrx/command", ["a", "{port}", "{modle}"], ["modle", "{model}"]),
        ("routes/hrx/command", [], ["routes.hrx.command"]),
        ("routes/hrx/server_args", ["-v"], ["routes.hrx.server_args", "build"]),
        ("routes/cpu/server_args", ["-v", "--port", "1"], ["server_args", "'--port'", "own keys"]),
        ("routes/cpu/server_args", ["-fa=off"], ["routes.cpu.server_args", "-fa=off"]),
        ("routes/cpu/server_args", ["-v", False], ["routes.cpu.server_args[1]", "quote it"]),
        ("routes/hrx/allow_remote", True, ["routes.hrx.allow_remote", "endpoint"]),
        ("routes/hrx/api", "grpc", ["routes.hrx.api"]),
        ("routes/lab/endpoint", "http://10.0.0.7:8080", ["routes.lab.endpoint", "allow_remote"]),
        ("routes/lab/endpoint", "localhost:80", ["routes.lab.endpoint", "http://127.0.0.1:8080"]),
        ("routes/npu/artefact", "no.q4nx", ["routes.npu.artefact", "no.q4nx"]),
        ("routes/npu/weights", "similar", ["routes.npu.weights", "one of same, requantised"]),
        ("routes/npu/parallel_max", 0, ["routes.npu.parallel_max"]),
        ("routes/npu/claim", {"unit_ids": ["0"], "units": 2}, ["unit_ids", "units, 2"]),
        ("routes/npu/claim", {"minutes": 3}, ["routes.npu.claim"]),
        ("routes/cpu/health", {"path": "health"}, ["routes.cpu.health"]),
        ("routes/cpu/dispatch", "all", ["routes.cpu.dispatch"]),
        ("routes/hrx-plain/arm", {"of": "hrz", "without": "f"}, ["arm.of", "hrx"]),
        ("routes/hrx-plain/arm", {"of": "hrx-plain", "without": "f"}, ["arm.of", "one of cpu"]),
        ("routes/hrx-plain/arm", {"of": "npu", "without": "f"}, ["device differs"]),
        ("routes/hrx-plain/arm", {"of": "cpu", "without": "f"}, ["the same but for env"]),
        ("routes/hrx-plain/threads", 9, ["the same but for env", "threads differs"]),
        ("routes/hrx-plain/command", ["other", *HRX[1:]], ["command differs"]),
        ("routes/hrx/command", HRX[:-1], ["routes.hrx.command", "{parallel}", "4 slots"]),
        ("routes/hrx/command", ["a", "{port}", "{parallel}"], ["routes.hrx.command", "{model}"]),
        ("routes/npu/weights", None, ["routes.npu.weights", "same or requantised"]),
        ("routes/cpu/context", 1000, ["routes.cpu.context", "multiple of 256", "1024"]),
        ("routes/hrx/identity_files", ["no.so"], ["routes.hrx.identity_files", "no.so"]),
        ("routes/hrx/claim", {"units": 2}, ["claim.units", "'hrx'"]),
        ("routes/hrx/claim", {"hold": ["gpu-hold"]}, ["claim.hold", "'hrx'"]),
        ("routes/hrx-plain/env", {"HRX_ALLOW_NO_SVM": "1"}, ["arm", "difference in env"]),
        ("routes/hrx/dispatch", None, ["routes.hrx.dispatch", "hrx-plain", "arm"]),
        ("sweeps/dispatch", None, ["sweeps.dispatch.routes", "'hrx' and 'hrx-plain'"]),
        ("sweeps/repeat/cache", ["hot"], ["sweeps.repeat.cache"]),
        ("sweeps/repeat/cache", ["off", "off"], ["sweeps.repeat.cache", "twice"]),
        ("sweeps/repeat/repeats", 1, ["sweeps.repeat.repeats"]),
        ("sweeps/repeat/prompts", "fev", ["sweeps.repeat.prompts", "few"]),
        ("sweeps/repeat/routes", ["cpus"], ["sweeps.repeat.routes[0]", "cpu"]),
        ("sweeps/repeat/expect", {"cpu": {"hot": "exact"}}, ["expect.cpu", "hot"]),
        ("sweeps/batched/widths", [8], ["sweeps.batched.widths", "most slots of a server, 4"]),
        ("sweeps/batched/widths", [2, 2], ["sweeps.batched.widths", "twice"]),
        ("sweeps/batched/mixes", ["strangers"], ["sweeps.batched.mixes"]),
        ("sweeps/batched/expect", {"cpu": {"p4.w2": "exact"}}, ["expect.cpu", "p4.w2"]),
        ("sweeps/agree/routes", ["cpu"], ["sweeps.agree.routes", "two routes"]),
        ("sweeps/agree/expect", {"lab|cpu": "exact"}, ["sweeps.agree.expect", "cpu|lab"]),
    ],
)  # fmt: skip
def test_a_mistake_names_its_place(
    document: Document, root: Path, path: str, value: object, words: list[str]
) -> None:
    message = refused(put(document, path, value), root)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("sweep", ["replay", "cost"])
def test_an_in_process_sweep_wants_a_build(document: Document, root: Path, sweep: str) -> None:
    entry = {"routes": ["hrx"], "models": ["small"]}
    document["sweeps"][sweep] = entry | ({"prompts": "few"} if sweep == "replay" else {})
    message = refused(document, root)
    assert f"sweeps.{sweep}.routes[0]" in message
    assert "in-process" in message


def test_a_remote_endpoint_is_taken_where_it_is_allowed(document: Document, root: Path) -> None:
    document["routes"]["lab"] = {"endpoint": "http://10.0.0.7:8080", "allow_remote": True}
    check_study(document, "s", root)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:1", True),
        ("http://a.localhost:1", True),
        ("http://127.4.5.6/v1", True),
        ("http://[::1]:8080", True),
        ("http://192.168.0.2:8080", False),
        ("http://localhost.example.org", False),
        ("http://example.org#localhost", False),
        ("http://127.0.0.1@example.org", False),
    ],
)
def test_what_is_local(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_placeholders() -> None:
    assert unknown_placeholders(["a{port}", "{prot}{model}", "{}"]) == ["prot", ""]
    assert unknown_placeholders(HRX) == []
