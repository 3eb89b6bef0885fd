"""What a study may say; and that each mistake in one ends in a message that says what to do."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from routewise.engine import ALL_LAYERS, Settings
from routewise.errors import RoutewiseError
from routewise.route import CLAIM_DEFAULTS, HEALTH_DEFAULTS, ROUTE_DEFAULTS
from routewise.study import (
    COST_DEFAULTS,
    REPLAY_DEFAULTS,
    SWEEP_DEFAULTS,
    Study,
    check_study,
    read_study,
    read_yaml,
    variant_names,
)

Document = dict[str, Any]
SHA = "a" * 64


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("")
    return tmp_path


@pytest.fixture
def document() -> Document:
    """Return a study that says everything but what has a default."""
    return {
        "schema_version": 1,
        "study": "made",
        "sources": {
            "pinned": {"kind": "pypi", "package": "p", "version": "1.0", "sha256": SHA},
            "own": {"kind": "path", "path": "../llama.cpp"},
            "other": {"kind": "git", "url": "https://example.org/x.git", "revision": "b" * 40},
        },
        "builds": {
            "cpu-stock": {"source": "pinned", "backend": "cpu"},
            "cpu-exact": {"source": "pinned", "backend": "cpu", "patch": "cpu-exact"},
        },
        "models": {
            "small": {"kind": "path", "path": "small.gguf"},
            "smaller": {
                "kind": "quantize",
                "from": "small",
                "type": "Q4_0",
                "build": "cpu-stock",
            },
        },
        "prompts": {"demo": {"file": "prompts.jsonl"}},
        "routes": {
            "cpu-stock": {"build": "cpu-stock"},
            "cpu-exact": {"build": "cpu-exact", "reference": "cpu-stock"},
        },
        "sweeps": {
            "replay": {
                "routes": ["cpu-stock", "cpu-exact"],
                "models": ["small", "smaller"],
                "prompts": "demo",
            },
            "cost": {"routes": ["cpu-stock", "cpu-exact"], "models": ["small"]},
        },
    }


def at(document: Any, path: str) -> tuple[Any, Any]:
    """Return the holder of a dotted path's last key, and that key."""
    *above, last = path.split(".")
    for key in above:
        document = document[key]
    return document, last


def put(document: Document, path: str, value: object) -> Document:
    document = copy.deepcopy(document)
    holder, key = at(document, path)
    holder[key] = value
    return document


def refused(document: Any, root: Path) -> RoutewiseError:
    with pytest.raises(RoutewiseError) as caught:
        check_study(document, "my-study.yaml", root)
    assert "my-study.yaml" in caught.value.problem
    assert caught.value.hint, caught.value.problem
    return caught.value


# ------------------------------------------------------------------------------- good studies


def test_the_demo_study_is_good(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    study = read_study(Path("config/config.yaml"))
    assert study.name == "demo"
    expected = "w1 w2 w3 w4 w5 w8 w9 w16 ragged rollback neighbours"
    assert study.replay_variants() == expected.split()


def test_every_kept_study_is_good(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    for file in Path("config/studies").glob("*.yaml"):
        document = read_yaml(file)
        prompts = [Path(entry["file"]) for entry in document.get("prompts", {}).values()]
        assert all(path.is_file() for path in prompts), file
        check_study(document, str(file))


def test_what_is_left_out_has_its_default(document: Document, root: Path) -> None:
    study = check_study(document, "s", root)
    route = study.routes["cpu-stock"]
    named = ("context", "micro_batch", "threads", "flash_attention", "kv_type")
    assert route.settings == Settings(**{key: ROUTE_DEFAULTS[key] for key in named})
    assert (route.reference, route.env) == (None, {})
    assert study.routes["cpu-exact"].reference == "cpu-stock"
    assert study.replay == {**REPLAY_DEFAULTS, **document["sweeps"]["replay"]}
    assert study.cost == {**COST_DEFAULTS, **document["sweeps"]["cost"]}
    assert study.prompts == {"demo": Path("prompts.jsonl")}
    assert study.document == document


def test_the_defaults_are_those_that_the_reference_documents(repository: Path) -> None:
    text = (repository / "config" / "README.md").read_text()
    sweeps = [key for defaults in SWEEP_DEFAULTS.values() for key in defaults]
    for name in (*ROUTE_DEFAULTS, *CLAIM_DEFAULTS, *HEALTH_DEFAULTS, *sweeps):
        assert f"`{name}`" in text, name


def test_what_is_said_counts(document: Document, root: Path) -> None:
    said: dict[str, Any] = {
        "threads": 3,
        "context": 2048,
        "micro_batch": 64,
        "flash_attention": False,
        "kv_type": "f32",
        "kv_unified": True,
    }
    for route in document["routes"].values():
        route |= said
    document["routes"]["cpu-stock"]["env"] = {"OMP_NUM_THREADS": "3"}
    document["sweeps"]["replay"] |= {
        "widths": [33, 7],
        "shapes": ["rollback"],
        "seed": 0,
        "top_k": 2,
        "expect": {"cpu-exact": "exact", "cpu-stock": {"w7": "differs", "w1": "exact"}},
    }
    study = check_study(document, "s", root)
    assert study.routes["cpu-stock"].settings == Settings(**said)
    assert study.routes["cpu-stock"].env == {"OMP_NUM_THREADS": "3"}
    assert study.replay_variants() == ["w1", "w7", "w33", "rollback"]


@pytest.mark.parametrize(
    ("backend", "said", "layers"),
    [
        ("cuda", {}, ALL_LAYERS),
        ("cuda", {"gpu_layers": 7}, 7),
        ("cuda", {"device": "card"}, ALL_LAYERS),
        ("cuda", {"device": "cpu"}, 0),
        ("cpu", {}, 0),
    ],
)
def test_all_layers_go_to_the_device_of_a_route(
    document: Document, root: Path, backend: str, said: dict[str, Any], layers: int
) -> None:
    document["builds"]["other"] = {"source": "pinned", "backend": backend}
    document["routes"]["other"] = {"build": "other", **said}
    assert check_study(document, "s", root).routes["other"].settings.gpu_layers == layers


def test_layers_of_a_route_that_stays_on_the_processor_are_refused(
    document: Document, root: Path
) -> None:
    document["builds"]["other"] = {"source": "pinned", "backend": "cuda"}
    document["routes"]["other"] = {"build": "other", "device": "cpu", "gpu_layers": 4}
    with pytest.raises(RoutewiseError, match=r"gpu_layers is 4.*device cpu"):
        check_study(document, "s", root)


def test_checking_changes_nothing(document: Document, root: Path) -> None:
    before = copy.deepcopy(document)
    check_study(document, "s", root)
    assert document == before
    assert REPLAY_DEFAULTS["expect"] == {}


def test_a_study_reads_back_as_it_was_written(document: Document, root: Path) -> None:
    file = root / "study.yaml"
    file.write_text(yaml.safe_dump(document))
    assert read_yaml(file) == document
    again: Study = check_study(read_yaml(file), "s", root)
    assert again == check_study(document, "s", root)


@pytest.mark.parametrize("sweep", ["replay", "cost"])
def test_one_sweep_is_enough(document: Document, root: Path, sweep: str) -> None:
    del document["sweeps"][sweep]
    if sweep == "replay":
        del document["prompts"]
    study = check_study(document, "s", root)
    assert (study.replay is None, study.cost is None) == (sweep == "replay", sweep == "cost")
    assert bool(study.replay_variants()) is (sweep == "cost")


def test_a_route_may_be_held_to_some_variants(document: Document, root: Path) -> None:
    document["sweeps"]["replay"]["only"] = {"cpu-exact": ["w4", "rollback"]}
    study = check_study(document, "s", root)
    assert study.replay_variants("cpu-exact") == ["w1", "w4", "rollback"]
    assert study.replay_variants("cpu-stock") == study.replay_variants()
    for only in ({"cpu-exakt": ["w4"]}, {"cpu-exact": ["w7"]}, {"cpu-exact": ["plain"]}):
        document["sweeps"]["replay"]["only"] = only
        assert "sweeps.replay.only" in refused(document, root).problem


def test_width_one_is_always_there_once() -> None:
    assert variant_names({"widths": [], "shapes": []}) == ["w1"]
    assert variant_names({"widths": [4, 1], "shapes": ["ragged"]}) == ["w1", "w4", "ragged"]


# ---------------------------------------------------------- the mistakes that the issue names

REPLAY = "sweeps.replay"
#: path, value, and the words of the message: key, value found, value wanted, hint.
MISTAKES: dict[str, tuple[str, object, list[str]]] = {
    "quantized cache without flash attention": (
        "routes.cpu-stock",
        {"build": "cpu-stock", "kv_type": "q8_0", "flash_attention": False},
        ["routes.cpu-stock.kv_type", "'q8_0'", "flash_attention"],
    ),
    "layers for a device that a CPU build has not": (
        "routes.cpu-stock",
        {"build": "cpu-stock", "gpu_layers": 4},
        ["routes.cpu-stock.gpu_layers", "4", "other than the processor (build cpu", "remove it"],
    ),
    "layers of a command": (
        "routes.cpu-stock",
        {"command": ["serve", "{model}", "{port}"], "gpu_layers": 4},
        ["routes.cpu-stock.gpu_layers", "a command says it in its own words"],
    ),
    "no layers": (
        "routes.cpu-stock",
        {"build": "cpu-stock", "gpu_layers": 0},
        ["routes.cpu-stock.gpu_layers", "0", "minimum of 1"],
    ),
    "study named as a folder": ("study", "cells", ["study", "'cells'", "results/", "rename"]),
    "width 0": (f"{REPLAY}.widths", [4, 0], [f"{REPLAY}.widths[1]", "0", "minimum of 1"]),
    "negative width": (f"{REPLAY}.widths", [-4], [f"{REPLAY}.widths[0]", "-4", "minimum"]),
    "width in words": (
        f"{REPLAY}.widths",
        ["three"],
        [f"{REPLAY}.widths[0]", "'three'", "'integer'"],
    ),
    "width as a text": (f"{REPLAY}.widths", ["4"], [f"{REPLAY}.widths[0]", "'4'", "'integer'"]),
    "width of a half": (f"{REPLAY}.widths", [2.5], [f"{REPLAY}.widths[0]", "2.5", "'integer'"]),
    "width of 2.0": (f"{REPLAY}.widths", [2.0], [f"{REPLAY}.widths[0]", "2.0", "'integer'"]),
    "width of yes": (f"{REPLAY}.widths", [True], [f"{REPLAY}.widths[0]", "True", "'integer'"]),
    "widths as one": (f"{REPLAY}.widths", 4, [f"{REPLAY}.widths", "4", "'array'"]),
    "width beyond the micro-batch": (
        f"{REPLAY}.widths",
        [4, 513],
        [f"{REPLAY}.widths", "513", "at most the micro-batch", "512", "routes.cpu-stock"],
    ),
    "a width twice": (
        f"{REPLAY}.widths",
        [4, 2, 4],
        [f"{REPLAY}.widths", "[4, 2, 4]", "4 stands twice", "two cells of the same name"],
    ),
    "a shape twice": (
        f"{REPLAY}.shapes",
        ["ragged", "ragged"],
        [f"{REPLAY}.shapes", "'ragged' stands twice"],
    ),
    "a model twice": (f"{REPLAY}.models", ["small", "small"], ["'small' stands twice"]),
    "a route twice": (
        "sweeps.cost.routes",
        ["cpu-stock", "cpu-stock"],
        ["sweeps.cost.routes", "stands twice"],
    ),
    "unknown shape": (f"{REPLAY}.shapes", ["raged"], [f"{REPLAY}.shapes[0]", "'raged'"]),
    "unknown route": (
        f"{REPLAY}.routes",
        ["cpu-stok"],
        [f"{REPLAY}.routes[0] is 'cpu-stok'", "cpu-stock, cpu-exact", "mean 'cpu-stock'?"],
    ),
    "quite unknown route": (
        f"{REPLAY}.routes",
        ["zzz"],
        [f"{REPLAY}.routes[0] is 'zzz'", "one of cpu-stock, cpu-exact"],
    ),
    "unknown model": (
        "sweeps.cost.models",
        ["smal"],
        ["sweeps.cost.models[0] is 'smal'", "mean 'small'?"],
    ),
    "unknown prompts": (f"{REPLAY}.prompts", "demos", [f"{REPLAY}.prompts", "mean 'demo'?"]),
    "unknown build": (
        "routes.cpu-stock.build",
        "cpu-stonk",
        ["routes.cpu-stock.build is 'cpu-stonk'", "mean 'cpu-stock'?"],
    ),
    "unknown source": (
        "builds.cpu-stock.source",
        "pined",
        ["builds.cpu-stock.source is 'pined'", "mean 'pinned'?"],
    ),
    "unknown reference": (
        "routes.cpu-exact.reference",
        "cpu-stok",
        ["routes.cpu-exact.reference is 'cpu-stok'", "mean 'cpu-stock'?"],
    ),
    "its own reference": (
        "routes.cpu-exact.reference",
        "cpu-exact",
        ["routes.cpu-exact.reference", "wanted another route"],
    ),
    "a reference that is not measured": (
        f"{REPLAY}.routes",
        ["cpu-exact"],
        [f"{REPLAY}.routes", "['cpu-exact']", "'cpu-stock' too"],
    ),
    "a reference with other settings": (
        "routes.cpu-exact.threads",
        3,
        ["routes.cpu-exact.reference", "threads=3", "threads=2", "same settings"],
    ),
    "micro-batch above the context": (
        "routes.cpu-stock.micro_batch",
        2048,
        ["routes.cpu-stock.micro_batch is 2048", "at most the context, 1024"],
    ),
    "expect of an unknown route": (
        f"{REPLAY}.expect",
        {"cpu-exakt": "exact"},
        [f"{REPLAY}.expect", "'cpu-exakt'", "mean 'cpu-exact'?"],
    ),
    "expect of an unknown variant": (
        f"{REPLAY}.expect",
        {"cpu-exact": {"w7": "exact"}},
        [f"{REPLAY}.expect.cpu-exact", "'w7'", "w1, w2, w3"],
    ),
    "expect of an unknown verdict": (
        f"{REPLAY}.expect",
        {"cpu-exact": "exakt"},
        [f"{REPLAY}.expect", "exakt"],
    ),
    "quantize from a patched build": (
        "models.smaller.build",
        "cpu-exact",
        ["models.smaller.build is 'cpu-exact'", "without a patch", "stock build"],
    ),
    "quantize from an unknown model": (
        "models.smaller.from",
        "smal",
        ["models.smaller.from is 'smal'", "mean 'small'?"],
    ),
    "quantize with an unknown build": (
        "models.smaller.build",
        "stock",
        ["models.smaller.build is 'stock'"],
    ),
    "cost without width 1": (
        "sweeps.cost.widths",
        [2, 4],
        ["sweeps.cost.widths is [2, 4]", "width 1 among them", "add 1"],
    ),
    "cost of no width": ("sweeps.cost.widths", [], ["sweeps.cost.widths", "width 1"]),
    "cost deeper than the context": (
        "sweeps.cost.depth",
        1020,
        ["sweeps.cost.depth is 1020", "1024 tokens", "lower the depth"],
    ),
    "missing prompt file": (
        "prompts.demo.file",
        "nowhere.jsonl",
        ["prompts.demo.file is 'nowhere.jsonl'", "wanted a file"],
    ),
    "prompt file that is a folder": ("prompts.demo.file", ".", ["prompts.demo.file is '.'"]),
    "prompt file of no name": ("prompts.demo.file", "\0", ["prompts.demo.file"]),
    "unknown key": (
        f"{REPLAY}.widhts",
        [4],
        [REPLAY, "'widhts' was unexpected", "did you mean 'widths'?"],
    ),
    "quite unknown key": ("routes.cpu-stock.zzz", 1, ["'zzz'", "known keys: build, command"]),
    "unknown section": ("route", {}, ["the study", "'route'", "did you mean 'routes'?"]),
    "unknown sweep": ("sweeps.repley", {}, ["sweeps", "'repley'", "did you mean 'replay'?"]),
    "unknown source key": (
        "sources.pinned.sha265",
        SHA,
        ["sources.pinned", "'sha265'", "did you mean 'sha256'?"],
    ),
    "unknown kind of source": ("sources.pinned.kind", "pip", ["sources.pinned.kind", "'pip'"]),
    "unknown kind of model": ("models.small.kind", "file", ["models.small.kind", "'file'"]),
    "unknown backend": ("builds.cpu-stock.backend", "abacus", ["builds.cpu-stock.backend"]),
    "short digest": ("sources.pinned.sha256", "abc", ["sources.pinned.sha256", "'abc'"]),
    "attention as a text": (
        "routes.cpu-stock.flash_attention",
        "on",
        ["routes.cpu-stock.flash_attention", "'on'", "'boolean'"],
    ),
    "attention as a number": (
        "routes.cpu-stock.flash_attention",
        1,
        ["routes.cpu-stock.flash_attention", "1", "'boolean'"],
    ),
    "no threads": ("routes.cpu-stock.threads", 0, ["routes.cpu-stock.threads", "0", "1"]),
    "threads of 2.0": ("routes.cpu-stock.threads", 2.0, ["routes.cpu-stock.threads", "2.0"]),
    "a number in env": (
        "routes.cpu-stock.env",
        {"OMP_NUM_THREADS": 2},
        ["routes.cpu-stock.env.OMP_NUM_THREADS", "2", "wanted a text"],
    ),
    "a name of a path": ("study", "../x", ["study", "'../x'"]),
    "a name of two lines": ("study", "x\n", ["study", "x\\n"]),
    "a name of nothing": ("study", "", ["study", "''"]),
    "a version as a number": ("sources.pinned.version", 0.3, ["version", "0.3", "wanted a text"]),
    "another schema": ("schema_version", 2, ["schema_version", "wanted 1"]),
    "too few rounds": ("sweeps.cost.rounds", 2, ["sweeps.cost.rounds", "2", "3"]),
    "too many neighbours": (f"{REPLAY}.neighbours", 64, [f"{REPLAY}.neighbours", "64", "63"]),
    "no neighbour": (f"{REPLAY}.neighbours", 0, [f"{REPLAY}.neighbours", "0"]),
    "no sweep": ("sweeps", {}, ["sweeps"]),
    "no route": ("routes", {}, ["routes"]),
    "a sweep of no route": (f"{REPLAY}.routes", [], [f"{REPLAY}.routes", "[]"]),
    "a null section": ("routes", None, ["routes", "None", "'object'"]),
    "a null route": ("routes.cpu-stock", None, ["routes.cpu-stock", "None", "'object'"]),
    "a null sweep": ("sweeps.replay", None, ["sweeps.replay", "None", "'object'"]),
    "a list of routes": ("routes", ["cpu-stock"], ["routes", "'object'"]),
    "a text of routes": (f"{REPLAY}.routes", "cpu-stock", [f"{REPLAY}.routes", "'array'"]),
    "a date for a version": (
        "sources.pinned.version",
        datetime.date(2024, 1, 1),
        ["sources.pinned.version", "wanted a text"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_key_value_and_what_to_do(
    document: Document, root: Path, mistake: str
) -> None:
    path, value, words = MISTAKES[mistake]
    check_study(document, "my-study.yaml", root)  # nothing else is wrong with it
    said = str(refused(put(document, path, value), root))
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


@pytest.mark.parametrize(("micro_batch", "neighbours"), [(15, 1), (16, 16), (63, 63)])
def test_a_micro_batch_too_small_for_the_shapes(
    document: Document, root: Path, micro_batch: int, neighbours: int
) -> None:
    for route in document["routes"].values():
        route["micro_batch"] = micro_batch
    del document["sweeps"]["cost"]
    document["sweeps"]["replay"] |= {"widths": [2], "neighbours": neighbours}
    said = refused(document, root)
    assert f"routes.cpu-stock.micro_batch is {micro_batch}" in said.problem
    assert f"at least {max(16, neighbours + 1)}" in said.problem
    for route in document["routes"].values():
        route["micro_batch"] += 1
    check_study(document, "s", root)


@pytest.mark.parametrize(
    "key", ["schema_version", "study", "sources", "builds", "models", "routes", "sweeps"]
)
def test_a_section_left_out_is_named(document: Document, root: Path, key: str) -> None:
    del document[key]
    assert f"'{key}' is a required property" in refused(document, root).problem


def test_prompts_left_out_are_named(document: Document, root: Path) -> None:
    del document["prompts"]
    assert "none is declared" in refused(document, root).problem


# ----------------------------------------------------------------------------- hostile values

HOSTILE: list[Any] = [
    *(None, True, 0, -1, 2.0, 1.5, float("nan"), float("inf"), 10**30),
    *("", "x", "a\n", "\0", "é", b"bytes", datetime.date(2024, 1, 1)),
    *([], {}, [None], [[]], [{}], {1: 2}, {None: 1}, {True: 1}, {(1, 2): 3}),
]
STRANGE_KEYS = [1, None, True, 2.5, (1, 2), "", "a b", "../x", "a\n", "é", "x" * 100]


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of every value of a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield (*above, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*above, key))


def answers(document: Any, root: Path) -> bool:
    """Return whether a study is taken; anything but a RoutewiseError with a hint fails the test."""
    try:
        check_study(document, "my-study.yaml", root)
    except RoutewiseError as error:
        if not error.hint:
            pytest.fail(f"no hint: {error}")
        return False
    return True


def test_no_value_anywhere_ends_in_a_traceback(document: Document, root: Path) -> None:
    taken = []
    for place in places(document):
        for value in HOSTILE:
            changed = copy.deepcopy(document)
            holder: Any = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            if answers(changed, root):
                taken.append((".".join(map(str, place)), value))
    # what is taken are texts where any text may stand
    assert {value for _, value in taken} <= {"", "x", "a\n", "\0", "é"}, taken
    free = ("package", "version", "path", "url", "revision", "type")
    for place_name, value in taken:
        if value != "x":
            assert place_name.endswith(free), (place_name, value)


def test_no_key_anywhere_ends_in_a_traceback(document: Document, root: Path) -> None:
    document["sweeps"]["replay"]["expect"] = {"cpu-exact": {"w2": "exact"}}
    document["routes"]["cpu-stock"]["env"] = {"A": "b"}
    document["builds"]["cpu-stock"]["options"] = {"GGML_NATIVE": "ON"}
    for place in [(), *places(document)]:
        for strange in STRANGE_KEYS:
            changed = copy.deepcopy(document)
            holder: Any = changed
            for key in place:
                holder = holder[key]
            if not isinstance(holder, dict):
                break
            holder[strange] = next(iter(holder.values()))
            assert not answers(changed, root), (place, strange)


@pytest.mark.parametrize("document", [None, [], "study", 1, [{}], {}])
def test_a_study_that_is_no_mapping_is_refused(document: Any, root: Path) -> None:
    refused(document, root)


# --------------------------------------------------------------------------------- the file


def read(root: Path, text: str | bytes) -> Document:
    file = root / "study.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(file)


BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "a key twice": ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' stands twice (first in line 1)"),
    "a route twice": ("routes:\n  x: {build: a}\n  y: 1\n  x: {build: b}\n", "line 4: the key 'x'"),
    "a quoted key twice": ("a: 1\n'a': 2\n", "line 2: the key 'a' stands twice"),
    "a key twice in a line": ("a: {b: 1, b: 1}\n", "line 1: the key 'b' stands twice"),
    "a list as a key": ("? [a, b]\n: 1\n", "line 1: a key must be a name"),
    "a mapping as a key": ("x:\n  ? {a: b}\n  : 1\n", "line 2: a key must be a name"),
    "a tab": ("a:\n\tb: 1\n", "line 2"),
    "an open bracket": ("a: [1, 2\nb: 1\n", "line 2"),
    "an unknown anchor": ("a: *b\n", "undefined alias"),
    "a Python object": ("a: !!python/object/apply:os.getcwd []\n", "could not determine"),
    "no text": (b"a: \xff\xfe\n", "not UTF-8"),
    "a control character": ("a: \x01\n", "not allowed"),
    "nothing": ("", "not a mapping"),
    "a comment": ("# nothing\n", "not a mapping"),
    "a list": ("- a\n", "not a mapping"),
    "two documents": ("a: 1\n---\nb: 2\n", "single document"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_named_with_the_line(root: Path, fault: str) -> None:
    text, words = BAD_FILES[fault]
    with pytest.raises(RoutewiseError) as caught:
        read(root, text)
    assert "study.yaml" in caught.value.problem
    assert words in caught.value.problem
    assert caught.value.hint


def test_a_missing_file_is_named(root: Path) -> None:
    with pytest.raises(RoutewiseError, match="no such study"):
        read_study(root / "nothing.yaml")


def test_the_same_key_in_two_mappings_is_no_mistake(root: Path) -> None:
    assert read(root, "a: {x: 1}\nb: {x: 2}\n") == {"a": {"x": 1}, "b": {"x": 2}}


def test_settings_may_be_shared_by_anchor_and_merge(root: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: *a, x: 4}\n"
    assert read(root, text) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 4, "y": 2},
    }


def test_two_cells_of_a_name_are_seen_in_the_file(root: Path, document: Document) -> None:
    """A route declared twice would leave the second one's cells under the first one's name."""
    text = yaml.safe_dump(document)
    line = "  cpu-exact:\n    build: cpu-exact\n"
    assert text.count(line) == 1
    with pytest.raises(RoutewiseError, match="'cpu-exact' stands twice"):
        read(root, text.replace(line, line + "    reference: cpu-stock\n" + line))
