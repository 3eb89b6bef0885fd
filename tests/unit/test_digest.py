"""Digests of values and files, and the cache that spares reading them twice."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path

import pytest
from routewise import digest as digest_module
from routewise.digest import DigestCache, canonical_json, digest_of, sha256_file, write_text


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "µ"}) == '{"a":"µ","b":[1,2.5,null]}'
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of([1, 2]) != digest_of([2, 1])
    assert digest_of(1) != digest_of("1")
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


def test_the_digest_of_a_file_is_sha256(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    assert sha256_file(path) == hashlib.sha256(b"x" * 3_000_000).hexdigest()


def old_file(path: Path, content: bytes) -> None:
    """Write a file whose change lies further back than the cache's doubt."""
    path.write_bytes(content)
    time.sleep(digest_module._RACY_NS / 1e9 + 0.05)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "_RACY_NS", 50_000_000)


@pytest.mark.usefixtures("quick")
def test_an_unchanged_file_is_read_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "file", []
    old_file(path, b"one")

    def compute() -> str:
        calls.append(1)
        return "digest"

    cache = DigestCache(tmp_path / "cache" / "digests.json")
    assert cache.get("raw", path, compute) == cache.get("raw", path, compute) == "digest"
    assert len(calls) == 1
    cache.get("meaning", path, compute)
    assert len(calls) == 2
    cache.save()
    DigestCache(cache.path).get("raw", path, compute)
    assert len(calls) == 2


@pytest.mark.usefixtures("quick")
def test_a_change_is_seen_behind_equal_size_and_date(tmp_path: Path) -> None:
    path = tmp_path / "file"
    old_file(path, b"one")
    cache = DigestCache()
    before = sha256_file(path, cache)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sha256_file(path, cache) != before


def test_a_file_that_just_changed_is_not_trusted(tmp_path: Path) -> None:
    path, cache = tmp_path / "file", DigestCache()
    path.write_bytes(b"one")
    first = sha256_file(path, cache)
    assert cache._known == {}
    assert first == sha256_file(path, cache)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"rules_version": 0, "entries": {}}',
        '{"rules_version": RULES, "entries": []}',
        '{"rules_version": RULES, "entries": null}',
        '{"rules_version": RULES, "entries": {"raw:FILE": [1], "raw:x": 3}}',
    ],
)
def test_a_damaged_or_old_cache_costs_only_time(tmp_path: Path, damage: str) -> None:
    path, file = tmp_path / "digests.json", tmp_path / "file"
    old_file(file, b"one")
    damage = damage.replace("FILE", str(file))
    path.write_text(damage.replace("RULES", json.dumps(digest_module.RULES_VERSION)))
    cache = DigestCache(path)
    assert sha256_file(file, cache) == sha256_file(file)
    cache.save()
    assert json.loads(path.read_text())["rules_version"] == digest_module.RULES_VERSION


@pytest.mark.usefixtures("quick")
def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    one, two = DigestCache(tmp_path / "c.json"), DigestCache(tmp_path / "c.json")
    (tmp_path / "a").write_bytes(b"a")
    old_file(tmp_path / "b", b"b")
    sha256_file(tmp_path / "a", one)
    sha256_file(tmp_path / "b", two)
    one.save()
    two.save()
    assert len(DigestCache(tmp_path / "c.json")._known) == 2


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_text(path, "whole")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "half")
    assert path.read_text() == "whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_a_written_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
