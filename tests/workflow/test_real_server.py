"""The real llama-server: started, known by its build and its model, stopped, and gone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from routewise import server as server_module
from routewise.build import BuildPlan, run_build
from routewise.errors import RoutewiseError
from routewise.fingerprint import commit_of
from routewise.identity import Identity
from routewise.port import (
    free_port,
    is_port_free,
    listening_inodes,
    mapped_files,
    socket_inodes,
)
from routewise.server import Launch, StopProof, serve
from routewise.symptom import explain_log
from small_gguf import make_gguf

pytest_plugins = ("builds",)
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("nothing_is_left"),
]

SLOTS, CONTEXT = 2, 512
QUIET = ("-t", "2", "-fa", "on", "--metrics", "--slots", "--no-webui", "--fit", "off")
NO_CACHE = ("--cache-ram", "0", "--no-cache-idle-slots")


@pytest.fixture(scope="session")
def built_server(real_plan: BuildPlan) -> Path:
    """Return the folder (bin/, lib/, build.json) of the stock server."""
    document = real_plan.part_dir("server") / "build.json"
    wanted = real_plan.part_digest("server")
    if not document.is_file() or json.loads(document.read_text())["digest"] != wanted:
        run_build(real_plan, "server")
    return real_plan.part_dir("server")


def probe(url: str) -> None:
    body = {"prompt": [300, 301], "n_predict": 1}
    httpx.post(f"{url}/completion", json=body, timeout=60).raise_for_status()


@pytest.fixture
def launch(built_server: Path, small_model: Path, tmp_path: Path) -> Callable[..., Launch]:
    """Return a maker of launches of the real server: (*flags, model=the small one)."""

    def make(*flags: str, model: Path = small_model) -> Launch:
        program = str(built_server / "bin" / "llama-server")
        where = ("--host", "{host}", "--port", "{port}")
        size = ("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT))
        return Launch(
            argv=(program, "-m", str(model), *where, *size, *QUIET, *NO_CACHE, *flags),
            log=tmp_path / "server.log",
            probe=probe,
            env={"OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"},
            identity=Identity(
                model=model,
                build=built_server / "build.json",
                parallel=SLOTS,
                slot_context=CONTEXT,
            ),
            start_limit_s=300,
        )

    return make


def failure(launch: Launch) -> RoutewiseError:
    """Return the error that a start must end in."""
    with pytest.raises(RoutewiseError) as caught, serve(launch):
        pytest.fail("it started")
    return caught.value


def test_the_real_server_starts_is_known_and_is_gone(
    launch: Callable[..., Launch], built_server: Path, small_model: Path
) -> None:
    document = json.loads((built_server / "build.json").read_text())
    with serve(launch()) as server:
        assert server.pid is not None
        assert server.port is not None
        assert server.found["fingerprint"] == document["fingerprint"]
        assert server.found["libraries"] == document["libraries"]
        assert server.found["model"] == small_model.name
        assert str(server.found["build_info"]).endswith(commit_of(document["identity"]))
        assert server.found["program"] == "llama-server"
        # the libraries are the build's own, not others of the same name
        ours = [path for path in mapped_files(server.pid) if path.name in document["libraries"]]
        assert {path.parent for path in ours} == {(built_server / "lib").resolve()}
        server.check()
    assert server.proof == StopProof(0, False, True, 0, 0, None)
    # or it was given to a stranger since
    listening = listening_inodes(server.port)
    assert is_port_free("127.0.0.1", server.port) or listening - socket_inodes(os.getpid())


def test_another_model_is_refused(
    launch: Callable[..., Launch], small_model: Path, tmp_path: Path
) -> None:
    asked = replace(launch().identity, model=tmp_path / "asked.gguf")
    error = failure(replace(launch(), identity=asked))
    assert "not the one asked for: model" in error.problem
    assert small_model.name in error.problem


@pytest.mark.parametrize("key", ["identity", "fingerprint"])
def test_another_build_is_refused(
    launch: Callable[..., Launch], built_server: Path, tmp_path: Path, key: str
) -> None:
    document = json.loads((built_server / "build.json").read_text())
    document[key] = "0" * 64
    other = tmp_path / "build.json"
    other.write_text(json.dumps(document))
    error = failure(replace(launch(), identity=replace(launch().identity, build=other)))
    assert "not the one asked for" in error.problem
    assert "0" * 12 in error.problem


def test_a_library_that_was_swapped_is_refused(
    launch: Callable[..., Launch], built_server: Path, tmp_path: Path
) -> None:
    """What /props says is not enough: it comes from another library than the arithmetic."""
    copy = tmp_path / "build"
    shutil.copytree(built_server, copy)
    library = copy / "lib" / "libggml-cpu.so.0"
    content = bytearray(library.read_bytes())
    content += b"\0"  # another file that loads and computes the same
    library.write_bytes(content)
    whole = launch()
    moved = replace(whole, argv=(str(copy / "bin" / "llama-server"), *whole.argv[1:]))
    error = failure(moved)
    assert "library libggml-cpu.so.0" in error.problem


def test_other_slots_than_asked_for_are_refused(launch: Callable[..., Launch]) -> None:
    error = failure(launch("-np", "1"))
    assert "slots (total_slots of /props) is 1, wanted 2" in error.problem


def test_the_real_servers_last_words_are_understood(
    launch: Callable[..., Launch], small_model: Path, tmp_path: Path
) -> None:
    """Missing, cut short, and no model at all; a flag that it does not know."""
    missing = failure(launch(model=tmp_path / "none.gguf"))
    assert "a file is missing" in missing.problem
    assert "none.gguf" in missing.problem

    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_model.read_bytes()[: small_model.stat().st_size // 2])
    assert "damaged or cut short" in failure(launch(model=cut)).problem

    other = tmp_path / "other.gguf"
    other.write_text("this is no model, and long enough to be read as the head of one\n" * 8)
    assert "damaged or cut short" in failure(launch(model=other)).problem

    assert "does not know a flag" in failure(launch("--no-such-flag")).problem


def test_a_port_that_the_real_server_finds_taken_is_left_for_another(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(launch()) as first:
        ports = [first.port]
        monkeypatch.setattr(
            server_module, "free_port", lambda host: ports.pop() if ports else free_port(host)
        )
        log = launch().log.with_suffix(".second.log")
        with serve(replace(launch(), log=log)) as second:
            assert second.n_attempts == 2
            assert second.port != first.port
        found = explain_log(log.read_text())
        assert found is not None
        assert found.name == "port"


def test_the_small_model_of_another_architecture_is_named(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    model = make_gguf(tmp_path / "odd.gguf", tokenizer="tiny")
    content = model.read_bytes().replace(
        b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
        b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0lemma",
    )
    model.write_bytes(content)
    assert "does not know the model's architecture" in failure(launch(model=model)).problem
