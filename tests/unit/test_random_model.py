"""Models with random weights: sane weights in every type, the same bytes again, and they decode."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from make_random_model import (
    FILLS,
    MIXES,
    SHAPES,
    make_random_model,
    more_bits,
    random_blocks,
    shape_named,
    tensors_of,
)
from routewise.digest import sha256_file
from routewise.errors import RoutewiseError
from routewise.gguf_check import check_gguf

pytest_plugins = ("builds",)
SCRIPT = "workflow/scripts/make_random_model.py"


@pytest.mark.parametrize("kind", FILLS, ids=lambda kind: kind.name)
def test_weights_have_the_deviation_asked_for_and_no_mean(kind: GGMLQuantizationType) -> None:
    n = 2**19 // GGML_QUANT_SIZES[kind][0]
    weights = dequantize(random_blocks(kind, n, 0.0125, [1, 2, 3]), kind)
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(0.0125, rel=0.02)
    assert abs(weights.mean()) < 0.0125 * 0.02
    # Blocks differ: a repeated one would hide what reads the wrong place.
    assert len(np.unique(random_blocks(kind, 64, 0.0125, [1, 2, 3]), axis=0)) > 48


def test_same_arguments_give_the_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    shape = shape_named("head64", n_layer=2, n_vocab=40000)  # more than one chunk a tensor
    made = {
        name: sha256_file(make_random_model(tmp_path / name, shape, "Q8_0", **options))
        for name, options in {
            "one": {"threads": 1},
            "five": {"threads": 5},
            "other": {"seed": 2},
        }.items()
    }
    assert made["one"] == made["five"] != made["other"]


def test_a_cut_model_has_the_weights_of_the_whole_one(tmp_path: Path) -> None:
    tables = []
    for layers in (1, 3):
        path = tmp_path / f"{layers}.gguf"
        header = check_gguf(
            make_random_model(path, shape_named("head64", layers, 64), "F16", threads=2)
        )
        data = path.read_bytes()
        tables.append({t.name: data[t.offset : t.offset + t.n_bytes] for t in header.tensors})
    assert tables[0].items() <= tables[1].items()
    assert len(tables[1]) == len(tables[0]) + 2 * 9


def test_sizes_and_types_are_those_of_the_real_models() -> None:
    tensors = tensors_of(SHAPES["qwen3-8b"], MIXES["Q4_K_M"])
    assert sum(t.n_blocks * t.block_sizes[0] for t in tensors) == 8_190_735_360  # Qwen3-8B's own
    kinds = {t.name: t.kind.name for t in tensors}
    finer = [i for i in range(36) if kinds[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert finer == [i for i in range(36) if more_bits(i, 36)]
    assert len(finer) == 18
    assert kinds["output.weight"] == "Q6_K"
    assert kinds["blk.4.ffn_up.weight"] == kinds["token_embd.weight"] == "Q4_K"
    moe = tensors_of(SHAPES["moe"], MIXES["Q4_K_M"])
    assert sum(t.n_bytes for t in moe) < 3 * 2**30
    assert {t.rows for t in moe if t.name.endswith("_gate_exps.weight")} == {(128, 768)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "qwen3-9b"], "shape: 'qwen3-9b', wanted one of qwen3-8b, moe"),
        (["--shape", "gqa8", "--type", "Q3_K_M"], "type: 'Q3_K_M', wanted one of Q4_K_M"),
        (["--shape", "head64"], "rows of 576, wanted a multiple of 256 for Q4_K"),
        (["--shape", "gqa8", "--layers", "0"], "layers: 0, wanted 1 or more"),
        (["--shape", "gqa8", "--threads", "0"], "threads: 0, wanted 1 or more"),
        (["--shape", "gqa8", "--seed", "-1"], "seed: -1, wanted 0 or more"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(
    repository: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(repository / SCRIPT), str(tmp_path / "x.gguf"), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", fail)
    with pytest.raises(OSError, match="No space"):
        make_random_model(tmp_path / "x.gguf", shape_named("head64", 1, 64), "Q8_0")
    assert not list(tmp_path.iterdir())


def test_a_shape_is_cut_and_a_wrong_depth_refused() -> None:
    assert shape_named("moe", 2, 320) == replace(SHAPES["moe"], n_layer=2, n_vocab=320)
    with pytest.raises(RoutewiseError, match="vocab: 0"):
        shape_named("moe", n_vocab=0)


# ------------------------------------------------------------------------------------ the engine

DECODE = """
import json, sys
from pathlib import Path
import numpy as np
from routewise.engine import Settings, load_engine

engine, found = load_engine(Path(sys.argv[1])), {}
for path in map(Path, sys.argv[2:]):
    model = engine.open_model(path)
    settings = Settings(context=64, micro_batch=32, threads=2, flash_attention=True)
    with model.open_context(settings) as context:
        context.decode(range(3, 11), range(8))
        rows = np.array([context.logits(i) for i in range(8)])
        context.remove(0, 0)
        context.decode([7, *range(4, 11)], range(8))
        moved = np.abs(context.logits(7) - rows[7]).max()
    model.close()
    found[path.stem] = [bool(np.isfinite(rows).all()), float(rows.std()), float(moved),
                        len(set(rows.argmax(axis=1).tolist()))]
print(json.dumps(found))
"""


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_every_shape_and_type_decodes_in_the_real_engine(real_engine: Path, tmp_path: Path) -> None:
    """Logits are finite, of order 1, differ from token to token and hear the first token."""
    paths = []
    for name, shape in SHAPES.items():
        cut = replace(shape, n_layer=1, n_vocab=320, n_expert=min(shape.n_expert, 16))
        mix = "Q8_0" if name == "head64" else "Q4_K_M"
        paths.append(make_random_model(tmp_path / f"{name}.gguf", cut, mix))
    for mix in set(MIXES) - {"Q8_0", "Q4_K_M"}:
        cut = replace(SHAPES["head256"], n_layer=1, n_vocab=320, n_ff=2048)
        paths.append(make_random_model(tmp_path / f"{mix}.gguf", cut, mix))
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(real_engine / "lib"), *map(str, paths)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {path.stem for path in paths}
    for name, (finite, deviation, moved, n_argmax) in found.items():
        assert finite, name
        assert 1.0 < deviation < 10.0, (name, deviation)
        assert 0.05 < moved < 50.0, (name, moved)
        assert n_argmax >= 4, (name, n_argmax)
