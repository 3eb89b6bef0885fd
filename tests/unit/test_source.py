"""Sources: fetched once and whole, checked against their pins, and taken apart by component."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from routewise import source as source_module
from routewise.errors import RoutewiseError
from routewise.source import (
    SourceSpec,
    component_digests,
    component_of,
    fetch_source,
    is_fetched,
    is_kept,
    raw_digest,
    source_files,
    source_record,
    source_root,
    unpack_tree,
)
from small_tree import make_tree

Say = list[str]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


def pypi(sha256: str, **more: str) -> SourceSpec:
    entry = {"kind": "pypi", "package": "small-llama", "version": "0.1", "sha256": sha256}
    return SourceSpec.from_config("small", entry | {"subdir": "vendor/llama.cpp"} | more)


@pytest.fixture
def index(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make pip find an sdist of the miniature in a folder and nowhere else; return its SHA-256."""
    folder = tmp_path / "index"
    folder.mkdir()
    backend = (
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        "    import os, pathlib\n"
        "    info = pathlib.Path(folder, 'small_llama-0.1.dist-info'); info.mkdir()\n"
        "    text = 'Metadata-Version: 2.1\\nName: small-llama\\nVersion: 0.1\\n'\n"
        "    (info / 'METADATA').write_text(text)\n"
        "    return info.name\n"
        "def build_wheel(*_, **__):\n    raise SystemExit('not to be built')\n"
    )
    project = "[build-system]\nrequires = []\nbuild-backend = 'back'\nbackend-path = ['.']\n"
    extra = {"pyproject.toml": project, "back.py": backend}
    extra["PKG-INFO"] = "Metadata-Version: 2.1\nName: small-llama\nVersion: 0.1\n"
    archive = folder / "small_llama-0.1.tar.gz"
    with tarfile.open(archive, "w:gz") as stream:
        for name, text in extra.items():
            _add(stream, f"small_llama-0.1/{name}", text.encode())
        for path in sorted(tree.rglob("*")):
            if path.is_file():
                inner = path.relative_to(tree).as_posix()
                name = f"small_llama-0.1/vendor/llama.cpp/{inner}"
                _add(stream, name, path.read_bytes(), mtime=time.time() + 1e8)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", os.fspath(folder))
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def _add(stream: tarfile.TarFile, name: str, content: bytes, mtime: float = 0) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), int(mtime)
    stream.addfile(member, io.BytesIO(content))


# ------------------------------------------------------------------------------------------- PyPI


def test_an_sdist_is_fetched_unpacked_and_not_fetched_again(
    index: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Say = []
    results, spec = tmp_path / "results", pypi(index)
    assert not is_fetched("small", spec, results)
    root = fetch_source("small", spec, results, said.append)
    assert root == results / "sources/small-0.1/tree" == source_root("small", spec, results)
    assert list(source_files(root)) == list(source_files(tree))
    assert component_digests(root) == component_digests(tree)
    assert not (root / "docs").exists()
    assert source_record("small", spec, results)["sha256"] == index
    assert source_record("small", spec, results)["raw_digest"] == raw_digest(root)
    assert max(path.stat().st_mtime for path in root.rglob("*")) <= time.time()
    assert [path.name for path in (results / "sources").iterdir()] == ["small-0.1"]
    monkeypatch.setenv("PIP_FIND_LINKS", os.fspath(tmp_path / "nowhere"))
    assert fetch_source("small", spec, results, said.append) == root
    assert is_fetched("small", spec, results)


def test_a_wrong_digest_says_wanted_found_and_file(index: str, tmp_path: Path) -> None:
    wanted = "0" * 64
    with pytest.raises(RoutewiseError) as error:
        fetch_source("small", pypi(wanted), tmp_path / "results", lambda _: None)
    for part in ("wrong digest", wanted, index, "small_llama-0.1.tar.gz"):
        assert part in str(error.value)
    assert list((tmp_path / "results/sources").iterdir()) == []


def test_what_a_killed_run_left_is_removed(index: str, tmp_path: Path) -> None:
    sources = tmp_path / "results/sources"
    for name in (".small-0.1.old", ".small-0.1.new", ".other-0.1.old"):
        (sources / name / "tree").mkdir(parents=True)
    for name in (".small-0.1.old", ".other-0.1.old"):
        os.utime(sources / name, (1e9, 1e9))
    fetch_source("small", pypi(index), tmp_path / "results", lambda _: None)
    left = sorted(path.name for path in sources.iterdir())
    assert left == [".other-0.1.old", ".small-0.1.new", "small-0.1"]


def test_an_unknown_version_says_what_to_do(index: str, tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError, match=r"pip could not fetch small-llama==9\.9") as error:
        fetch_source("small", pypi(index, version="9.9"), tmp_path / "results", lambda _: None)
    assert "the network" in str(error.value)


def test_a_wrong_subdir_says_where_to_look(index: str, tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError, match=r"nothing of a llama.cpp tree under 'vendor/lama'"):
        fetch_source("small", pypi(index, subdir="vendor/lama"), tmp_path, lambda _: None)


def test_another_pin_is_fetched_anew(index: str, tmp_path: Path) -> None:
    fetch_source("small", pypi(index), tmp_path, lambda _: None)
    assert not is_fetched("small", pypi("1" * 64), tmp_path)
    with pytest.raises(RoutewiseError, match="wrong digest"):
        fetch_source("small", pypi("1" * 64), tmp_path, lambda _: None)
    assert is_fetched("small", pypi(index), tmp_path)


@pytest.mark.parametrize("cut", [100, 2000])
def test_a_damaged_archive_is_named(index: str, tmp_path: Path, cut: int) -> None:
    archive = next((tmp_path / "index").iterdir())
    archive.write_bytes(archive.read_bytes()[:cut])
    with pytest.raises(RoutewiseError, match="damaged archive"):
        unpack_tree(archive, "vendor/llama.cpp", tmp_path / "out")


def test_an_archive_cannot_write_outside(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as stream:
        _add(stream, "top/src/../../../evil.cpp", b"x")
    with pytest.raises(RoutewiseError, match=r"unsafe member|nothing of a llama.cpp tree"):
        unpack_tree(tmp_path / "evil.tar", ".", tmp_path / "deep/out")
    assert not list(tmp_path.rglob("evil.cpp"))


# -------------------------------------------------------------------------------------------- git


@pytest.fixture
def repository_url(tree: Path) -> str:
    """Make a repository of the miniature with the tag `v1`, and a later commit on `main`."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tree, *identity, *arguments], check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "one")
    git("tag", "v1")
    (tree / "src/llama-batch.cpp").write_text("int llama_batch_size(void) { return 256; }\n")
    git("commit", "-am", "two")
    return tree.as_uri()


def commit_of(tree: Path, revision: str) -> str:
    command = ["git", "-C", os.fspath(tree), "rev-parse", revision]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_tag_a_branch_and_a_commit_are_fetched(
    repository_url: str, tree: Path, tmp_path: Path
) -> None:
    sizes = {}
    for revision in ("v1", "main", commit_of(tree, "main"), commit_of(tree, "v1")):
        entry = {"kind": "git", "url": repository_url, "revision": revision}
        spec = SourceSpec.from_config("small", entry)
        root = fetch_source("small", spec, tmp_path / "results", lambda _: None)
        found = re.search(r"return (\d+)", (root / "src/llama-batch.cpp").read_text())
        assert found
        sizes[revision] = found[1]
        assert source_record("small", spec, tmp_path / "results")["commit"] == commit_of(
            tree, revision
        )
        assert not (root / ".git").exists()
    assert list(sizes.values()) == ["512", "256", "256", "512"]


def test_an_unknown_revision_or_url_says_which(
    repository_url: str, tree: Path, tmp_path: Path
) -> None:
    entry = {"kind": "git", "url": repository_url, "revision": "v99"}
    with pytest.raises(RoutewiseError, match="has no revision 'v99'"):
        fetch_source("s", SourceSpec.from_config("s", entry), tmp_path, lambda _: None)
    entry["url"] = (tree / "nowhere").as_uri()
    with pytest.raises(RoutewiseError, match="git could not read"):
        fetch_source("s", SourceSpec.from_config("s", entry), tmp_path, lambda _: None)
    entry["revision"] = "--upload-pack=touch x"
    with pytest.raises(RoutewiseError, match="must not begin with"):
        fetch_source("s", SourceSpec.from_config("s", entry), tmp_path, lambda _: None)


# ------------------------------------------------------------------------------------------ paths


def test_a_path_is_used_where_it_is(tree: Path, tmp_path: Path) -> None:
    spec = SourceSpec.from_config("mine", {"kind": "path", "path": os.fspath(tree)})
    assert fetch_source("mine", spec, tmp_path / "results") == tree
    assert source_record("mine", spec, tmp_path / "results") == {}
    assert not (tmp_path / "results").exists()
    outer = SourceSpec.from_config(
        "mine", {"kind": "path", "path": os.fspath(tmp_path), "subdir": "tree"}
    )
    assert fetch_source("mine", outer, tmp_path) == tree


def test_a_path_that_is_no_llama_cpp_is_refused(tree: Path, tmp_path: Path) -> None:
    (tree / "include/llama.h").unlink()
    spec = SourceSpec.from_config("mine", {"kind": "path", "path": os.fspath(tree)})
    with pytest.raises(RoutewiseError, match=r"has no include/llama.h"):
        fetch_source("mine", spec, tmp_path)
    spec = SourceSpec.from_config("mine", {"kind": "path", "path": os.fspath(tmp_path / "no")})
    with pytest.raises(RoutewiseError, match="no folder"):
        fetch_source("mine", spec, tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "svn"}, "kind is 'svn', wanted one of pypi, git, path"),
        ({"kind": "path"}, "a path source needs the key 'path'"),
        ({"kind": "pypi", "package": "p", "version": "1"}, "needs the key 'sha256'"),
        ({"kind": "path", "path": "x", "url": "y"}, "a path source has no key 'url'"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutewiseError, match=re.escape(message)):
        SourceSpec.from_config("s", entry)


# ---------------------------------------------------------------------------- content and digests


@pytest.mark.parametrize(
    ("file", "component"),
    [
        ("CMakeLists.txt", "build"),
        ("cmake/common.cmake", "build"),
        ("ggml/CMakeLists.txt", "build"),
        ("ggml/src/CMakeLists.txt", "build"),
        ("ggml/cmake/common.cmake", "build"),
        ("ggml/src/ggml.c", "ggml-base"),
        ("ggml/src/ggml-backend.cpp", "ggml-base"),
        ("ggml/include/ggml.h", "ggml-base"),
        ("ggml/include/ggml-backend.h", "ggml-base"),
        ("ggml/include/ggml-cpu.h", "ggml-cpu"),
        ("ggml/include/ggml-cuda.h", "ggml-cuda"),
        ("ggml/src/ggml-cpu/CMakeLists.txt", "ggml-cpu"),
        ("ggml/src/ggml-cpu/arch/x86/repack.cpp", "ggml-cpu"),
        ("ggml/src/ggml-cuda/mmvq.cu", "ggml-cuda"),
        ("src/llama.cpp", "llama"),
        ("src/models/llama.cpp", "llama"),
        ("include/llama.h", "llama"),
        ("common/chat.cpp", "common"),
        ("vendor/nlohmann/json.hpp", "vendor"),
        ("tools/CMakeLists.txt", "tools"),
        ("tools/quantize/quantize.cpp", "tools"),
        ("tools/server/server.cpp", "server"),
        ("LICENSE", "texts"),
    ],
)
def test_every_file_has_its_component(file: str, component: str) -> None:
    assert component_of(file) == component


@pytest.mark.parametrize(
    "file",
    [
        *("docs/a.cpp", "models/a.gguf", "tests/a.cpp", "src/.git/a.c", "tools/ui/src/a.ts"),
        *("src/a.md", "build/a.cpp", "src/__pycache__/a.py", "CMakeLists.txt.orig", "srcs/a.c"),
        *("src/a.cpp~", "src/#a.cpp#", "src/a.cpp.bak"),
    ],
)
def test_what_no_build_reads_is_left_out(file: str) -> None:
    assert not is_kept(file)


def test_a_component_moves_with_its_own_files_only(tree: Path) -> None:
    before = component_digests(tree)
    raw = raw_digest(tree)
    assert set(before) == {
        *("build", "ggml-base", "ggml-cpu", "ggml-cuda", "llama", "common", "vendor", "tools"),
        *("server", "texts"),
    }
    path = tree / "src/llama.cpp"
    path.write_text(path.read_text() + "// a comment\n")
    assert component_digests(tree) == before
    assert raw_digest(tree) != raw
    path.rename(tree / "src/llama2.cpp")  # a name is a meaning
    after = component_digests(tree)
    assert {name for name in after if after[name] != before[name]} == {"llama"}
    assert set(component_digests(tree, only="llama".__eq__)) == {"llama"}


def test_the_script_prints_the_root_and_explains_errors(tree: Path, tmp_path: Path) -> None:
    script = Path(source_module.__file__).parents[1] / "fetch_source.py"
    command = [sys.executable, os.fspath(script), "--name", "mine"]
    command += ["--results-dir", os.fspath(tmp_path), "--source"]
    good = subprocess.run(
        [*command, f'{{"kind": "path", "path": "{tree}"}}'], capture_output=True, text=True
    )
    assert (good.returncode, good.stdout.strip()) == (0, os.fspath(tree))
    bad = subprocess.run(
        [*command, '{"kind": "path", "path": "/no/where"}'], capture_output=True, text=True
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith("routewise: source mine: no folder")
    assert "Traceback" not in bad.stderr
