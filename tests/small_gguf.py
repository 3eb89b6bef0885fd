"""Make a small GGUF in the llama architecture with random weights, for the tests.

The file is a few MB, loads in the real libllama and can be quantised by the real llama-quantize.
Every row is a multiple of 256 long, so that K-quants quantise truly instead of falling back. The
same arguments give the same bytes: weights come from raw PCG64 integers scaled by an exact power
of two, not from a library's normal distribution.

By hand: ``python tests/small_gguf.py OUT.gguf --type f16 --tokenizer tiny``
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt

Weights = Literal["f32", "f16"]
Tokenizer = Literal["no_vocab", "tiny"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

#: Merges of the tiny byte-level BPE, best first. "\u0120" is how GPT-2's alphabet writes a space.
MERGES = (
    "\u0120 t",
    "\u0120 a",
    "h e",
    "i n",
    "r e",
    "o n",
    "\u0120t he",
    "e r",
    "\u0120 s",
    "a t",
    "\u0120 w",
    "\u0120 o",
    "e n",
    "\u0120 c",
    "i t",
    "i s",
    "a n",
    "o r",
    "e s",
    "\u0120 b",
    "e d",
    "\u0120 f",
    "in g",
    "\u0120 p",
    "o u",
    "\u0120a n",
    "a l",
    "a r",
    "\u0120t o",
    "\u0120 m",
    "\u0120o f",
    "\u0120 in",
    "\u0120 d",
    "\u0120 h",
    "\u0120an d",
)


def byte_alphabet() -> list[str]:
    """Return GPT-2's 256 one-character names of the byte values, by byte value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {value: chr(value) for value in printable}
    others = [value for value in range(256) if value not in names]
    names.update({value: chr(0x100 + place) for place, value in enumerate(others)})
    return [names[value] for value in range(256)]


def tiny_vocabulary(n_vocab: int) -> tuple[list[str], list[int]]:
    """Return token texts and token types: specials, bytes, merges, and unused ids up to n_vocab."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    texts = [*SPECIAL_TOKENS, *byte_alphabet(), *merged]
    if n_vocab < len(texts):
        raise ValueError(f"n_vocab {n_vocab}: the tiny tokenizer needs at least {len(texts)}")
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    types = [*[int(control)] * len(SPECIAL_TOKENS), *[int(normal)] * (256 + len(merged))]
    n_unused = n_vocab - len(texts)
    texts += [f"<unused{place}>" for place in range(n_unused)]
    return texts, types + [int(unused)] * n_unused


class WeightSource:
    """Seeded random weights, the same on every machine and NumPy version."""

    def __init__(self, seed: int, dtype: npt.DTypeLike) -> None:
        self._bits = np.random.PCG64(seed)
        self._dtype = dtype

    def matrix(self, n_rows: int, n_columns: int, deviation: float) -> npt.NDArray[np.floating]:
        """Return shape (n_rows, n_columns), uniform around 0 with the standard deviation given."""
        n_words = -(-n_rows * n_columns // 4)
        raw = np.asarray(self._bits.random_raw(n_words), dtype="<u8").view("<i2")
        unit = raw[: n_rows * n_columns].astype(np.float32) * np.float32(2.0**-15)
        scaled = unit * np.float32(deviation * 1.7320508)  # uniform on +-1 deviates by 1/sqrt(3)
        return scaled.reshape(n_rows, n_columns).astype(self._dtype)


def make_gguf(
    path: Path,
    *,
    weights: Weights = "f16",
    n_embd: int = 256,
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 512,
    n_vocab: int = 320,
    context: int = 2048,
    seed: int = 1,
    tokenizer: Tokenizer = "no_vocab",
    tied: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = False,
) -> Path:
    """Write the model and return its path.

    ``tied`` leaves the output head out, so that the embedding serves as the head. The template
    and ``add_bos`` (whether the tokenizer puts its BOS token first) count only for "tiny".

    Raises ValueError where a row would be no multiple of 256, or the heads do not divide.
    """
    for name, value in (("n_embd", n_embd), ("n_ff", n_ff)):
        if value % 256:
            raise ValueError(f"{name} {value}: wanted a multiple of 256")
    if n_embd % n_head or n_head % n_head_kv:
        raise ValueError(f"{n_head} heads, {n_head_kv} KV heads, {n_embd} wide: they must divide")
    n_kv = n_embd // n_head * n_head_kv
    source = WeightSource(seed, np.float32 if weights == "f32" else np.float16)

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"small random llama, seed {seed}")
    writer.add_file_type(
        gguf.LlamaFileType.ALL_F32 if weights == "f32" else gguf.LlamaFileType.MOSTLY_F16
    )
    writer.add_block_count(n_layer)
    writer.add_context_length(context)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_rope_dimension_count(n_embd // n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    _add_tokenizer(writer, tokenizer, n_vocab, chat_template, add_bos)

    ones = np.ones(n_embd, dtype=np.float32)
    lively = n_embd**-0.5  # a matrix of this deviation keeps the size of a normed input
    # As a head too, a large embedding would make every token foretell itself.
    embedding = source.matrix(n_vocab, n_embd, 3 * lively if tied else 1.0)
    writer.add_tensor("token_embd.weight", embedding)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", ones)
        writer.add_tensor(f"{block}.attn_q.weight", source.matrix(n_embd, n_embd, 1.5 * lively))
        writer.add_tensor(f"{block}.attn_k.weight", source.matrix(n_kv, n_embd, 1.5 * lively))
        writer.add_tensor(f"{block}.attn_v.weight", source.matrix(n_kv, n_embd, 2 * lively))
        writer.add_tensor(f"{block}.attn_output.weight", source.matrix(n_embd, n_embd, 2 * lively))
        writer.add_tensor(f"{block}.ffn_norm.weight", ones)
        writer.add_tensor(f"{block}.ffn_gate.weight", source.matrix(n_ff, n_embd, 2 * lively))
        writer.add_tensor(f"{block}.ffn_up.weight", source.matrix(n_ff, n_embd, lively))
        writer.add_tensor(f"{block}.ffn_down.weight", source.matrix(n_embd, n_ff, n_ff**-0.5))
    writer.add_tensor("output_norm.weight", ones)
    if not tied:
        writer.add_tensor("output.weight", source.matrix(n_vocab, n_embd, 3 * lively))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: Tokenizer,
    n_vocab: int,
    chat_template: str | None,
    add_bos: bool,
) -> None:
    if tokenizer == "no_vocab":
        writer.add_tokenizer_model("no_vocab")
        return
    texts, types = tiny_vocabulary(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(SPECIAL_TOKENS.index("<|endoftext|>"))
    writer.add_eos_token_id(SPECIAL_TOKENS.index("<|im_end|>"))
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--type", choices=("f32", "f16"), default="f16")
    parser.add_argument("--tokenizer", choices=("no_vocab", "tiny"), default="no_vocab")
    parser.add_argument("--n-embd", type=int, default=256)
    parser.add_argument("--n-layer", type=int, default=2)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-head-kv", type=int, default=2)
    parser.add_argument("--n-ff", type=int, default=512)
    parser.add_argument("--n-vocab", type=int, default=320)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tied", action="store_true")
    asked = vars(parser.parse_args())
    path = make_gguf(asked.pop("path"), weights=asked.pop("type"), **asked)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
