"""Replay random tokens through one build on one GPU, for models that have no tokenizer.

A quick look before the workflow: plain steps twice, then the same tokens in passes of each width
behind prompts of several lengths. One line a width: median ms of a pass, its ratio to width 1, and
the positions whose logits differ from the plain steps in any bit. It claims nothing; receipts do.

    python benchmarks/h200/replay_shapes.py LIB_FOLDER MODEL --prompts 230,490,1000 --widths 2,9,16
"""

from __future__ import annotations

import argparse
import statistics
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from routewise.engine import ALL_LAYERS, Context, Settings, load_engine
from routewise.errors import RoutewiseError, report_errors

Rows = list[npt.NDArray[np.float32]]
CHUNK = 256  # of a prompt


def numbers(text: str) -> list[int]:
    """Read ``1,2,3``."""
    return [int(word) for word in text.split(",")]


def replayed(
    context: Context, tokens: list[int], start: int, count: int, width: int
) -> tuple[Rows, float]:
    """Push ``count`` tokens from ``start`` in passes of ``width``; return rows and median ms."""
    context.remove(0, start)
    rows: Rows = []
    times = []
    for first in range(start, start + count - width + 1, width):
        places = list(range(first, first + width))
        times.append(context.decode(tokens[first : first + width], places))
        rows += [context.logits(i).copy() for i in range(width)]
    return rows, statistics.median(times) / 1e6


@report_errors
def main(
    library: Path,
    model_path: Path,
    prompts: list[int],
    widths: list[int],
    count: int,
    settings: str,
) -> None:
    """Replay and print."""
    if min(prompts) < 1 or min(widths) < 1 or max(widths) > count:
        raise RoutewiseError("prompts and widths begin at 1, and no width is above --positions")
    engine = load_engine(library)
    model = engine.open_model(model_path, ALL_LAYERS)
    kv_type, attention = settings.split(",")
    random = np.random.default_rng(7)
    for prompt in prompts:
        tokens = random.integers(0, model.n_vocab, prompt + count).tolist()
        asked = Settings(
            context=-(-(prompt + count) // CHUNK) * CHUNK,
            micro_batch=2 * CHUNK,
            threads=8,
            flash_attention=attention == "fa",
            kv_type=kv_type,
            gpu_layers=ALL_LAYERS,
        )
        with model.open_context(asked) as context:
            for first in range(0, prompt, CHUNK):
                places = list(range(first, min(first + CHUNK, prompt)))
                wants = [False] * len(places)
                context.decode(tokens[first : first + CHUNK][: len(places)], places, None, wants)
            alone, _ = replayed(context, tokens, prompt, count, 1)
            again, one_ms = replayed(context, tokens, prompt, count, 1)
            same = all(
                np.array_equal(a.view("u4"), b.view("u4"))
                for a, b in zip(alone, again, strict=True)
            )
            digest = zlib.crc32(b"".join(row.tobytes() for row in alone))
            print(f"{prompt:6} width  1 {one_ms:8.3f} ms, twice the same: {same}, {digest:08x}")
            for width in widths:
                replayed(context, tokens, prompt, count, width)  # CUDA graphs are captured
                rows, ms = replayed(context, tokens, prompt, count, width)
                differ = sum(
                    not np.array_equal(a.view("u4"), b.view("u4"))
                    for a, b in zip(alone, rows, strict=False)
                )
                worst = max(float(np.abs(a - b).max()) for a, b in zip(alone, rows, strict=False))
                print(
                    f"{prompt:6} width {width:2} {ms:8.3f} ms ({ms / one_ms:.3f}), "
                    f"{differ} of {len(rows)} positions differ, worst {worst:.4g}",
                    flush=True,
                )
    print(f"not covered: {engine.uncovered() or 'nothing met'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, help="lib folder of a build's engine")
    parser.add_argument("model_path", type=Path, metavar="model")
    parser.add_argument("--prompts", type=numbers, default=[230, 490, 1000])
    parser.add_argument("--widths", type=numbers, default=[2, 4, 8, 9, 16])
    parser.add_argument("--positions", type=int, dest="count", default=64)
    parser.add_argument("--settings", default="f16,fa", help="cache type and fa or nofa (f16,fa)")
    raise SystemExit(main(**vars(parser.parse_args())))
