"""The result store: what is whole is adopted, what is not is measured again and written over."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from routewise.schema.file import METADATA_KEY, SCHEMA_VERSION, table_of
from routewise.schema.study import TABLES
from routewise.store import Store, fragment_key

INPUTS = {"variant": "w4", "fingerprint": "f", "prompt": "p"}
KEY = fragment_key(INPUTS)
NOTE = {"engine_s": 1.5, "invalid_reasons": []}


def rows(n: int = 4) -> pa.Table:
    return table_of(
        TABLES["prompts"],
        {
            "prompt_index": range(n),
            "prompt_id": [f"prompt-{i}" for i in range(n)],
            "category": ["made"] * n,
            "token_ids": [list(range(i, i + 50)) for i in range(n)],
            "text": [f"text {i}" for i in range(n)],
            "n_asked": [64] * n,
            "digest": [f"{i:064x}" for i in range(n)],
        },
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def kept(store: Store) -> Path:
    store.put(INPUTS, TABLES["prompts"], rows(), NOTE)
    return store.path(KEY)


def files(store: Store) -> list[Path]:
    return sorted(path for path in store.root.rglob("*") if path.is_file())


def test_a_fragment_is_found_under_its_key_alone(store: Store, kept: Path) -> None:
    found = store.get(KEY, TABLES["prompts"])
    assert found is not None
    assert found[0].equals(rows())
    assert found[1] == {
        **NOTE,
        "key": KEY,
        "key_inputs": INPUTS,
        "table": "prompts",
        "schema_version": SCHEMA_VERSION,
    }
    assert kept == store.root / KEY[:2] / f"{KEY}.parquet"
    assert store.get(fragment_key({"variant": "w5"}), TABLES["prompts"]) is None
    assert files(store) == [kept]


def test_an_empty_store_holds_nothing(store: Store) -> None:
    assert store.get(KEY, TABLES["prompts"]) is None
    assert not store.root.exists()


@pytest.mark.parametrize("change", ["variant", "fingerprint", "prompt", "code"])
def test_a_key_is_of_all_that_made_the_rows(change: str) -> None:
    inputs = {"variant": "w4", "fingerprint": "f", "prompt": "p", "code": "c"}
    assert fragment_key(inputs) == fragment_key(dict(reversed(inputs.items())))
    assert fragment_key(inputs) != fragment_key({**inputs, change: "another"})
    assert len(fragment_key(inputs)) == 64


def _rewrite(path: Path, **changes: object) -> None:
    table = pq.read_table(path)
    document = {**json.loads(table.schema.metadata[METADATA_KEY]), **changes}
    metadata = {METADATA_KEY: json.dumps(document).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "head lost": lambda path: path.write_bytes(path.read_bytes()[9:]),
    "one byte": lambda path: path.write_bytes(_flipped(path.read_bytes(), 60)),
    "no Parquet": lambda path: path.write_text("rows\n"),
    "of another key": lambda path: _rewrite(path, key="0" * 64),
    "without a key": lambda path: _rewrite(path, key=None),
    "of another version": lambda path: _rewrite(path, schema_version=SCHEMA_VERSION + 1),
    "of another table": lambda path: _rewrite(path, table="plain"),
    "without provenance": lambda path: pq.write_table(rows(), path),
}


def _flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_trusted_is_left_for_the_next_writer_to_write_over(
    store: Store, kept: Path, damage: str
) -> None:
    DAMAGES[damage](kept)
    damaged = kept.read_bytes()
    assert store.get(KEY, TABLES["prompts"]) is None
    assert kept.read_bytes() == damaged  # or another job's good one could be removed
    store.put(INPUTS, TABLES["prompts"], rows(), NOTE)
    again = store.get(KEY, TABLES["prompts"])
    assert again is not None
    assert again[0].equals(rows())
    assert files(store) == [kept]


def test_a_good_copy_under_another_key_is_not_adopted(store: Store, kept: Path) -> None:
    other = fragment_key({"variant": "w5"})
    store.path(other).parent.mkdir(parents=True, exist_ok=True)
    store.path(other).write_bytes(kept.read_bytes())
    assert store.get(other, TABLES["prompts"]) is None


def test_a_part_file_of_a_killed_writer_is_no_fragment(store: Store, kept: Path) -> None:
    part = kept.with_name(f".{kept.name}.abcd.part")
    kept.rename(part)
    assert store.get(KEY, TABLES["prompts"]) is None
    assert part.exists()  # it may be another writer's, alive


WRITER = """
import sys
from pathlib import Path
import pyarrow.parquet as pq
from routewise.schema.prompts import PROMPTS
from routewise.store import Store, fragment_key
store, rows = Store(Path(sys.argv[1])), pq.read_table(sys.argv[2])
rows = rows.replace_schema_metadata(None)
sys.stdin.readline()
for i in range(12):
    inputs = {"n": i % 4}
    key = fragment_key(inputs)
    store.put(inputs, PROMPTS, rows, {"writer": sys.argv[3]})
    found = store.get(key, PROMPTS)
    assert found is not None and found[0].equals(rows), key
"""


def test_many_writers_at_once_leave_whole_fragments(store: Store, tmp_path: Path) -> None:
    table = tmp_path / "rows.parquet"
    pq.write_table(rows(50), table)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, store.root, table, str(i)], stdin=subprocess.PIPE
        )
        for i in range(3)
    ]
    for writer in writers:  # all are imported and wait: released together
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    assert [writer.wait(timeout=60) for writer in writers] == [0] * len(writers)
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    assert len(files(store)) == 4
    for i in range(4):
        found = store.get(fragment_key({"n": i}), TABLES["prompts"])
        assert found is not None
        assert found[0].equals(rows(50))


# -------------------------------------------------------------------------------- a full disk


def _small_files() -> None:
    # a limit on the size of a file: writing beyond it fails as it does on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


FULL = """
import json, sys
from pathlib import Path
import pyarrow.parquet as pq
from routewise.errors import report_errors
from routewise.schema.prompts import PROMPTS
from routewise.store import Store

@report_errors
def main():
    store, rows = Store(Path(sys.argv[1])), pq.read_table(sys.argv[2])
    store.put(json.loads(sys.argv[3]), PROMPTS, rows.replace_schema_metadata(None), {})

sys.exit(main())
"""


def put_on_a_full_disk(
    store: Store, table: Path, limit: Callable[[], None] | None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FULL, store.root, table, json.dumps(INPUTS)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_full_disk_keeps_nothing_and_says_what_to_do(store: Store, tmp_path: Path) -> None:
    table = tmp_path / "rows.parquet"
    pq.write_table(rows(500), table)
    result = put_on_a_full_disk(store, table, _small_files)
    assert result.returncode == 2, result.stderr
    assert os.strerror(errno.EFBIG) in result.stderr
    assert "try: check free space" in result.stderr
    assert "Traceback" not in result.stderr
    assert files(store) == []
    # with room again, the same command succeeds
    assert put_on_a_full_disk(store, table, None).returncode == 0
    assert store.get(KEY, TABLES["prompts"]) is not None


def test_a_full_disk_leaves_an_old_fragment_whole(store: Store, kept: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.parquet"
    pq.write_table(rows(500), table)
    before = kept.read_bytes()
    assert put_on_a_full_disk(store, table, _small_files).returncode == 2
    assert files(store) == [kept]
    assert kept.read_bytes() == before


def test_a_store_that_cannot_be_written_raises(store: Store) -> None:
    store.root.write_text("a file where the folder should be\n")
    with pytest.raises(OSError, match=str(store.root)):
        store.put(INPUTS, TABLES["prompts"], rows(), NOTE)
