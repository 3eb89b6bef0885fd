"""Make a GGUF with random weights in a real model's shapes: for timing, and for stress.

Nothing is quantized. Whole blocks of random bytes are written, whose scales are chosen so that a
matrix keeps the size of what it is multiplied with; 4.7 GiB take some seconds on 16 cores. There is
no tokenizer (``no_vocab``): prompts for such a model are token ids. The same arguments give the
same bytes on every machine, whatever the number of threads. Claims about text want a real model.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES
from routewise.errors import RoutewiseError, report_errors
from routewise.progress import Progress

Bytes = npt.NDArray[np.uint8]

#: About as many bytes are made at once, by one thread.
CHUNK = 1 << 23


@dataclass(frozen=True)
class Shape:
    """The sizes of one model; ``n_expert`` 0 is a model without a mixture of experts."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int  # of one expert, where there are experts
    n_vocab: int
    n_expert: int = 0
    n_expert_used: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False


#: Qwen3-8B, Qwen3-30B-A3B with fewer layers, and small ones for what a kernel may stumble over.
SHAPES = {
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    "moe": Shape("qwen3moe", 6, 2048, 32, 4, 128, 768, 151936, 128, 8, qk_norm=True),
    "qwen2-bias": Shape("qwen2", 4, 1536, 12, 2, 128, 8960, 16384, qkv_bias=True),
    "head64": Shape("llama", 4, 576, 9, 3, 64, 1536, 16384),
    "head256": Shape("llama", 4, 2048, 8, 4, 256, 6144, 16384),
    "heads40": Shape("qwen3", 4, 5120, 40, 8, 128, 6144, 16384, qk_norm=True),
    "gqa8": Shape("llama", 4, 2048, 16, 2, 128, 6144, 16384),
}
CONTEXT = 40960

Q = GGMLQuantizationType


@dataclass(frozen=True)
class Mix:
    """Which type each tensor has under one name of llama-quantize."""

    main: GGMLQuantizationType
    finer: GGMLQuantizationType  # of attn_v and ffn_down, in every second layer or so
    head: GGMLQuantizationType
    file_type: LlamaFileType


MIXES = {
    "Q4_K_M": Mix(Q.Q4_K, Q.Q6_K, Q.Q6_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K_M": Mix(Q.Q5_K, Q.Q6_K, Q.Q6_K, LlamaFileType.MOSTLY_Q5_K_M),
    "Q6_K": Mix(Q.Q6_K, Q.Q6_K, Q.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "Q8_0": Mix(Q.Q8_0, Q.Q8_0, Q.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": Mix(Q.Q4_0, Q.Q4_0, Q.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "Q4_1": Mix(Q.Q4_1, Q.Q4_1, Q.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "F16": Mix(Q.F16, Q.F16, Q.F16, LlamaFileType.MOSTLY_F16),
    "BF16": Mix(Q.BF16, Q.BF16, Q.BF16, LlamaFileType.MOSTLY_BF16),
}

# ------------------------------------------------------------------------------- random blocks

# Each function below gets blocks of random bytes, (n, bytes of a block), and makes weights of the
# standard deviation asked for of them, in place, with a mean of zero. Integers are uniform.

#: Scales of blocks spread evenly over half to one and a half of their mean.
_SPREAD = 0.5 + (np.arange(256) % 128) / 128
_SPREAD_RMS = float(np.sqrt(np.mean(_SPREAD**2)))
_SIGNS = np.where(np.arange(256) < 128, 1.0, -1.0)


def _halves(values: npt.NDArray[np.float64]) -> Bytes:
    """Return float16 values as pairs of bytes: (n, 2)."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _deviation(low: int, high: int) -> float:
    """Return the root mean square of integers from low to high, around the middle of 0 to high."""
    values = np.arange(low, high + 1) - (high / 2 if low == 0 else 0)
    return float(np.sqrt(np.mean(values**2)))


def _fill_k(blocks: Bytes, deviation: float, levels: int) -> None:
    """Q4_K and Q5_K: d and dmin, eight scales and eight minima of 6 bits, then the weights."""
    scale_rms = float(np.sqrt(np.mean(np.arange(64.0) ** 2)))
    unit = deviation / (scale_rms * _deviation(0, levels - 1) * _SPREAD_RMS)
    table = _halves(unit * _SPREAD)
    minima = _halves(unit * _SPREAD * (levels - 1) / 2)
    pick = blocks[:, 0].copy()
    blocks[:, 0:2] = table[pick]
    blocks[:, 2:4] = minima[pick]
    # Minima equal to the scales centre every sub-block.
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17


def _fill_q6_k(blocks: Bytes, deviation: float) -> None:
    unit = deviation / (_deviation(-128, 127) * _deviation(-32, 31) * _SPREAD_RMS)
    blocks[:, 208:210] = _halves(unit * _SPREAD)[blocks[:, 208]]


def _fill_q8_0(blocks: Bytes, deviation: float) -> None:
    signed = blocks[:, 2:].view(np.int8)
    np.maximum(signed, -127, out=signed)  # as the quantizer leaves them
    unit = deviation / (_deviation(-127, 127) * _SPREAD_RMS)
    blocks[:, 0:2] = _halves(unit * _SPREAD)[blocks[:, 0]]


def _fill_q4_0(blocks: Bytes, deviation: float) -> None:
    # -8 to 7 has a mean: half of the blocks have a negative scale.
    unit = deviation / (_deviation(-8, 7) * _SPREAD_RMS)
    blocks[:, 0:2] = _halves(unit * _SPREAD * _SIGNS)[blocks[:, 0]]


def _fill_q4_1(blocks: Bytes, deviation: float) -> None:
    unit = deviation / (_deviation(0, 15) * _SPREAD_RMS)
    pick = blocks[:, 0].copy()
    blocks[:, 0:2] = _halves(unit * _SPREAD)[pick]
    blocks[:, 2:4] = _halves(-7.5 * unit * _SPREAD)[pick]


def _floats(blocks: Bytes, deviation: float) -> npt.NDArray[np.float32]:
    """Return one float a pair of random bytes, uniform around 0."""
    units = blocks.reshape(-1).view("<i2").astype(np.float32)
    return units * np.float32(deviation * 3**0.5 / 2**15)


def _fill_f16(blocks: Bytes, deviation: float) -> None:
    blocks.reshape(-1).view("<f2")[:] = _floats(blocks, deviation)


def _fill_bf16(blocks: Bytes, deviation: float) -> None:
    blocks.reshape(-1).view("<u2")[:] = _floats(blocks, deviation).view("<u4") >> 16


FILLS: dict[GGMLQuantizationType, Callable[[Bytes, float], None]] = {
    Q.Q4_K: lambda blocks, deviation: _fill_k(blocks, deviation, 16),
    Q.Q5_K: lambda blocks, deviation: _fill_k(blocks, deviation, 32),
    Q.Q6_K: _fill_q6_k,
    Q.Q8_0: _fill_q8_0,
    Q.Q4_0: _fill_q4_0,
    Q.Q4_1: _fill_q4_1,
    Q.F16: _fill_f16,
    Q.BF16: _fill_bf16,
}


def random_blocks(kind: GGMLQuantizationType, n: int, deviation: float, key: list[int]) -> Bytes:
    """Return ``n`` blocks of random weights, shape (n, bytes of a block). ``key`` seeds them."""
    size = GGML_QUANT_SIZES[kind][1]
    words = np.random.SFC64(np.random.SeedSequence(key)).random_raw(-(-n * size // 8))
    raw = np.asarray(words, dtype="<u8").view(np.uint8)
    blocks = raw[: n * size].reshape(n, size)
    FILLS[kind](blocks, deviation)
    return blocks


# ------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file. ``rows`` has the outermost size first and lacks the row length."""

    name: str
    rows: tuple[int, ...]
    row_length: int
    kind: GGMLQuantizationType
    deviation: float
    mean: float = 0.0  # of float32 tensors alone

    @property
    def n_blocks(self) -> int:
        """Blocks of the type's size in the whole tensor."""
        return int(np.prod(self.rows, dtype=np.int64)) * self.row_length // self.block_sizes[0]

    @property
    def block_sizes(self) -> tuple[int, int]:
        """Weights and bytes of one block."""
        return GGML_QUANT_SIZES[self.kind]

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.n_blocks * self.block_sizes[1]


def shape_named(name: str, n_layer: int | None = None, n_vocab: int | None = None) -> Shape:
    """Return a shape of the table, perhaps with another depth or vocabulary.

    Raises RoutewiseError for an unknown name and for sizes below 1.
    """
    if name not in SHAPES:
        raise RoutewiseError(f"shape: {name!r}, wanted one of {', '.join(SHAPES)}")
    for what, value in (("layers", n_layer), ("vocab", n_vocab)):
        if value is not None and value < 1:
            raise RoutewiseError(f"{what}: {value}, wanted 1 or more")
    shape = SHAPES[name]
    return replace(shape, n_layer=n_layer or shape.n_layer, n_vocab=n_vocab or shape.n_vocab)


def more_bits(layer: int, n_layer: int) -> bool:
    """Tell whether a layer has the finer type, as llama-quantize's mixes do it."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def tensors_of(shape: Shape, mix: Mix) -> list[Tensor]:
    """Return the tensors of a model in the order of the file."""
    lively = shape.n_embd**-0.5  # a matrix of this deviation keeps the size of a normed input
    queries, keys = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    found = [Tensor("token_embd.weight", (shape.n_vocab,), shape.n_embd, mix.main, 1.0)]

    def add(name: str, rows: int, length: int, kind: GGMLQuantizationType, scale: float) -> None:
        experts = (shape.n_expert,) if "_exps" in name else ()
        found.append(Tensor(name, (*experts, rows), length, kind, scale))

    def add_vector(name: str, length: int, deviation: float, mean: float) -> None:
        found.append(Tensor(name, (), length, Q.F32, deviation, mean))

    for layer in range(shape.n_layer):
        block = f"blk.{layer}"
        finer = mix.finer if more_bits(layer, shape.n_layer) else mix.main
        add_vector(f"{block}.attn_norm.weight", shape.n_embd, 0.1, 1.0)
        add(f"{block}.attn_q.weight", queries, shape.n_embd, mix.main, 1.5 * lively)
        add(f"{block}.attn_k.weight", keys, shape.n_embd, mix.main, 1.5 * lively)
        add(f"{block}.attn_v.weight", keys, shape.n_embd, finer, 2 * lively)
        if shape.qkv_bias:
            for part, length in (("q", queries), ("k", keys), ("v", keys)):
                add_vector(f"{block}.attn_{part}.bias", length, 0.5, 0.0)
        if shape.qk_norm:
            for part in ("q", "k"):
                add_vector(f"{block}.attn_{part}_norm.weight", shape.head_size, 0.1, 1.5)
        add(f"{block}.attn_output.weight", shape.n_embd, queries, mix.main, 2 * queries**-0.5)
        add_vector(f"{block}.ffn_norm.weight", shape.n_embd, 0.1, 1.0)
        of_experts = "_exps" if shape.n_expert else ""
        if shape.n_expert:
            add(f"{block}.ffn_gate_inp.weight", shape.n_expert, shape.n_embd, Q.F32, 2 * lively)
        feed = f"{block}.ffn_%s{of_experts}.weight"
        add(feed % "gate", shape.n_ff, shape.n_embd, mix.main, 2 * lively)
        add(feed % "up", shape.n_ff, shape.n_embd, mix.main, lively)
        add(feed % "down", shape.n_embd, shape.n_ff, finer, shape.n_ff**-0.5)
    add_vector("output_norm.weight", shape.n_embd, 0.1, 1.0)
    add("output.weight", shape.n_vocab, shape.n_embd, mix.head, 3 * lively)
    return found


def check_rows(tensors: list[Tensor], mix_name: str) -> None:
    """Raise RoutewiseError where a row is no whole number of its type's blocks."""
    for tensor in tensors:
        weights = tensor.block_sizes[0]
        if tensor.row_length % weights:
            allowed = [
                name
                for name, mix in MIXES.items()
                if tensor.row_length % GGML_QUANT_SIZES[mix.main][0] == 0
            ]
            raise RoutewiseError(
                f"type {mix_name}: {tensor.name} has rows of {tensor.row_length}, wanted a "
                f"multiple of {weights} for {tensor.kind.name}",
                f"--type {' or '.join(allowed)}",
            )


def make_random_model(
    path: Path, shape: Shape, mix_name: str, *, seed: int = 1, threads: int | None = None
) -> Path:
    """Write the model at ``path``, whole or not at all, and return the path.

    Raises RoutewiseError for an unknown type, and for rows that the type cannot hold.
    """
    if mix_name not in MIXES:
        raise RoutewiseError(f"type: {mix_name!r}, wanted one of {', '.join(MIXES)}")
    if seed < 0:
        raise RoutewiseError(f"seed: {seed}, wanted 0 or more")
    n_threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if n_threads < 1:
        raise RoutewiseError(f"threads: {n_threads}, wanted 1 or more")
    mix = MIXES[mix_name]
    tensors = tensors_of(shape, mix)
    check_rows(tensors, mix_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        start = _write_header(beside, shape, mix, tensors, seed)
        progress = Progress(f"writing {path}:", sum(tensor.n_bytes for tensor in tensors))
        _write_weights(beside, start, tensors, seed, n_threads, progress)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _write_header(path: Path, shape: Shape, mix: Mix, tensors: list[Tensor], seed: int) -> int:
    """Write all that stands before the weights; return where they begin."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_name(f"random weights in the shapes of {shape.architecture}, seed {seed}")
    writer.add_file_type(mix.file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.n_vocab)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_tokenizer_model("no_vocab")
    for tensor in tensors:
        sizes = (*tensor.rows, tensor.row_length)
        # float64 is a placeholder: the type in the file is that of raw_dtype
        writer.add_tensor_info(
            tensor.name, sizes, np.dtype(np.float64), tensor.n_bytes, raw_dtype=tensor.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return int(GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment))


def _chunks(tensors: list[Tensor]) -> Iterator[tuple[Tensor, int, int, int]]:
    """Yield tensor, number of the chunk, first block, and the tensor's offset in bytes."""
    offset = 0
    for tensor in tensors:
        at_once = max(1, CHUNK // tensor.block_sizes[1])
        for number, first in enumerate(range(0, tensor.n_blocks, at_once)):
            yield tensor, number, first, offset
        offset = GGUFWriter.ggml_pad(offset + tensor.n_bytes, 32)


def _write_weights(
    path: Path, start: int, tensors: list[Tensor], seed: int, threads: int, progress: Progress
) -> None:
    """Write the weights from ``start`` on, each chunk by one thread at its own place."""
    target = os.open(path, os.O_WRONLY)

    def write(chunk: tuple[Tensor, int, int, int]) -> int:
        tensor, number, first, offset = chunk
        size = tensor.block_sizes[1]
        n = min(max(1, CHUNK // size), tensor.n_blocks - first)
        key = [seed, zlib.crc32(tensor.name.encode()), number]
        if tensor.kind == Q.F32:
            units = random_blocks(Q.F16, n, 1.0, key).view("<f2").astype(np.float32)
            data = (units * np.float32(tensor.deviation) + np.float32(tensor.mean)).tobytes()
        else:
            data = random_blocks(tensor.kind, n, tensor.deviation, key).tobytes()
        written, place = 0, start + offset + first * size
        while written < len(data):
            written += os.pwrite(target, memoryview(data)[written:], place + written)
        return len(data)

    try:
        # With the padding after each tensor, the last one's too.
        os.ftruncate(
            target, start + sum(GGUFWriter.ggml_pad(tensor.n_bytes, 32) for tensor in tensors)
        )
        with ThreadPoolExecutor(threads) as pool:
            for n_bytes in pool.map(write, _chunks(tensors)):
                progress.advance(n_bytes)
    finally:
        os.close(target)
    progress.finish()


@report_errors
def main(
    path: Path,
    shape: str,
    type: str,
    layers: int | None,
    vocab: int | None,
    seed: int,
    threads: int | None,
) -> None:
    """Write the model; see :func:`make_random_model`."""
    made = make_random_model(
        path, shape_named(shape, layers, vocab), type, seed=seed, threads=threads
    )
    print(f"{made}: {made.stat().st_size:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("path", type=Path, help="the GGUF to write")
    parser.add_argument("--shape", required=True, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--type", default="Q4_K_M", help=f"one of {', '.join(MIXES)}")
    parser.add_argument("--layers", type=int, help="another depth than the shape's")
    parser.add_argument("--vocab", type=int, help="another vocabulary size than the shape's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="default: all cores this process may use")
    raise SystemExit(main(**vars(parser.parse_args())))
