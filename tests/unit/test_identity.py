"""A server is who it says it is only where every word that was asked for agrees."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from routewise.digest import sha256_file
from routewise.errors import RoutewiseError
from routewise.fingerprint import commit_of
from routewise.identity import ANYONE, Identity, compare_log, compare_process, compare_props

URL = "http://127.0.0.1:1"
IDENTITY = "ab" * 32
PROPS: dict[str, Any] = {
    "build_info": f"b0-{commit_of(IDENTITY)}",
    "model_path": "model.gguf",
    "total_slots": 4,
    "default_generation_settings": {"n_ctx": 256},
}


@pytest.fixture
def build(tmp_path: Path) -> Path:
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"identity": IDENTITY, "libraries": {}, "fingerprint": "f"}))
    return path


def asked(build: Path) -> Identity:
    return Identity(model=Path("model.gguf"), build=build, parallel=4, slot_context=256)


def test_the_one_asked_for(build: Path) -> None:
    found = compare_props(URL, PROPS, asked(build))
    assert found == {
        "build_info": PROPS["build_info"],
        "model": "model.gguf",
        "parallel": 4,
        "slot_context": 256,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"build_info": "b0-unknown"},
        {"build_info": None},
        {"model_path": "other/model.gguf"},
        {"model_path": None},
        {"total_slots": 1},
        {"default_generation_settings": {"n_ctx": 64}},
        {"default_generation_settings": None},
    ],
)
def test_another_is_refused_and_named(build: Path, change: dict[str, Any]) -> None:
    with pytest.raises(RoutewiseError, match="not the one asked for"):
        compare_props(URL, {**PROPS, **change}, asked(build))
    compare_props(URL, {**PROPS, **change}, ANYONE)


def test_a_missing_word_differs_too(build: Path) -> None:
    for key in PROPS:
        less = {other: value for other, value in PROPS.items() if other != key}
        with pytest.raises(RoutewiseError, match="not the one asked for"):
            compare_props(URL, less, asked(build))


def test_what_was_found_names_no_folder(tmp_path: Path) -> None:
    found = compare_props(URL, {**PROPS, "model_path": str(tmp_path / "m.gguf")}, ANYONE)
    assert str(tmp_path) not in json.dumps(found)


def test_a_model_by_another_path_is_the_same(tmp_path: Path) -> None:
    model, link = tmp_path / "m.gguf", tmp_path / "link.gguf"
    model.touch()
    link.symlink_to(model)
    compare_props(URL, {**PROPS, "model_path": str(link)}, Identity(model=model))


def test_a_damaged_record_of_a_build(tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError, match="cannot be read"):
        compare_props(URL, PROPS, Identity(build=tmp_path / "none.json"))


def test_a_program_is_known_by_its_digest() -> None:
    digest = sha256_file(Path(sys.executable).resolve())
    found = compare_process(URL, os.getpid(), Identity(program_sha256=digest))
    assert found == {"program": Path(sys.executable).resolve().name, "program_sha256": digest}
    with pytest.raises(RoutewiseError, match="sha256 of its program"):
        compare_process(URL, os.getpid(), Identity(program_sha256="0" * 64))


def test_a_process_that_has_not_mapped_the_build_is_refused(tmp_path: Path) -> None:
    build = tmp_path / "build.json"
    libraries = {"libthat-is-not-mapped.so.0": "0" * 64}
    document = {"identity": IDENTITY, "libraries": libraries, "fingerprint": "f"}
    build.write_text(json.dumps(document))
    with pytest.raises(RoutewiseError, match=r"library libthat-is-not-mapped\.so\.0 is None"):
        compare_process(URL, os.getpid(), Identity(build=build))


def test_a_server_that_found_no_device_is_refused_where_it_must_use_one() -> None:
    found_none = "warning: no usable GPU found, --gpu-layers option will be ignored"
    compare_log(URL, found_none, ANYONE)
    compare_log(URL, "loaded", Identity(on_device=True))
    with pytest.raises(RoutewiseError, match=r"device of the model.*none usable"):
        compare_log(URL, found_none, Identity(on_device=True))
