"""The floor of a pass: the bytes that it must read, and the time that a copy of them takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from made_cells import cost_rows, study
from routewise.cost import bytes_read
from routewise.errors import RoutewiseError
from routewise.figure import draw_price_by_width
from routewise.gguf_check import GgufHeader, Tensor
from routewise.price import price_rows
from routewise.schema.cost import COST
from routewise.schema.file import TableSchema, read_table, write_table

LAYERS, KV_HEADS, HEAD = 2, 3, 64


def header(*tensors: str, **told: Any) -> GgufHeader:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.embedding_length": 9 * HEAD,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": KV_HEADS,
    } | {f"llama.{key}": value for key, value in told.items()}
    listed = tuple(Tensor(name, (1, 1), "F16", 0, 1000) for name in tensors)
    return GgufHeader(Path("m.gguf"), 3, metadata, listed, 0, 0)


def test_an_embedding_counts_where_it_is_the_head_too() -> None:
    cache = LAYERS * 100 * KV_HEADS * 2 * HEAD * 2
    assert bytes_read(header("token_embd.weight", "a"), 100, "f16") == 2000 + cache
    tensors = ("token_embd.weight", "a", "output.weight")
    assert bytes_read(header(*tensors), 100, "f16") == 2000 + cache
    assert bytes_read(header("a"), 100, "q8_0") == 1000 + cache // 2 * 34 // 32


@pytest.mark.parametrize(
    "told",
    [{"expert_count": 8}, {"attention.head_count_kv": [3, 3]}, {"attention.head_count": None}],
)
def test_what_a_header_does_not_tell_is_no_floor(told: dict[str, Any]) -> None:
    assert bytes_read(header("a", **told), 100, "f16") is None


def test_the_floor_is_bytes_over_bandwidth_and_goes_into_the_price() -> None:
    rows = cost_rows({"cpu-stock": [4.0, 5, 6, 7], "cpu-exact": [4.0, 5, 6, 7]}, [1, 2, 4, 8])
    assert not any("floor_ms" in row for row in price_rows(study(), rows_of(rows), {}))
    rows["read_bytes"], rows["copy_bytes_per_s"] = 10_000_000, 1e10
    for row in price_rows(study(), rows_of(rows), {}):
        assert row["floor_ms"] == pytest.approx(1.0)
        assert row["copy_gb_per_s"] == pytest.approx(10)
        assert 0.15 < row["floor_ratio"] < 0.3


def rows_of(rows: Any) -> Any:
    return rows.assign(cell="c", cell_valid=True, fingerprint="f")


def test_a_table_from_before_a_nullable_column_is_read_and_another_is_not(tmp_path: Path) -> None:
    older = TableSchema("cost", pa.schema(list(COST.arrow)[:-2]))
    write_table(tmp_path / "older", older, older.arrow.empty_table(), {})
    table, _ = read_table(tmp_path / "older", COST)
    assert table.schema.equals(COST.arrow)
    oldest = TableSchema("cost", pa.schema(list(COST.arrow)[:-5]))  # a column that must be there
    write_table(tmp_path / "oldest", oldest, oldest.arrow.empty_table(), {})
    with pytest.raises(RoutewiseError, match="wanted 'cost' as declared"):
        read_table(tmp_path / "oldest", COST)


def test_the_figure_draws_it_where_it_was_measured() -> None:
    rows = cost_rows({"cpu-stock": [4.0, 5, 6, 7], "cpu-exact": [4.0, 5, 6, 7]}, [1, 2, 4, 8])

    def n_lines() -> int:
        return len(draw_price_by_width(rows_of(rows), study()).axes[0].lines)

    without = n_lines()
    rows["read_bytes"], rows["copy_bytes_per_s"] = 10_000_000, 1e10
    assert n_lines() == without + 2  # one for each route
