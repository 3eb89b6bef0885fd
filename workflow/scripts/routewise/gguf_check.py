"""Read a GGUF's header and say whether the file is whole, without touching the weights.

The layout is that of the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little endian:
magic, version, counts, metadata, tensor table, then the tensors' data from the next aligned
position on. ``gguf.GGUFReader`` maps the file with NumPy and meets a cut file with whatever
NumPy says at that place; here every read is checked against the file's size.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from routewise.errors import RoutewiseError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class Tensor:
    """One line of the tensor table. ``shape`` is in GGUF's order: the row length comes first."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int  # bytes from the start of the file
    n_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """All that stands before the weights. ``n_bytes`` are there, ``n_bytes_wanted`` must be."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]
    n_bytes: int
    n_bytes_wanted: int

    @property
    def architecture(self) -> str:
        """The name that llama.cpp chooses the model's code by, such as ``llama``."""
        return str(self.metadata.get("general.architecture", "unknown"))

    @property
    def n_layer(self) -> int | None:
        """Transformer blocks."""
        return self.metadata.get(f"{self.architecture}.block_count")

    @property
    def context_train(self) -> int | None:
        """Tokens of context that the model was trained for, where the file says so."""
        return self.metadata.get(f"{self.architecture}.context_length")

    @property
    def n_vocab(self) -> int | None:
        """Tokens in the vocabulary: the rows of the embedding, which are those of the logits."""
        for tensor in self.tensors:
            if tensor.name == "token_embd.weight":
                return tensor.shape[1]
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if tokens is not None else None

    def tensor_types(self) -> dict[str, int]:
        """Return how many tensors there are of each type, by type name."""
        return dict(sorted(Counter(tensor.type_name for tensor in self.tensors).items()))


class _PastTheEnd(Exception):
    """A read beyond the file's last byte; the argument is the offset that the read had to reach."""


class _Cursor:
    """Checked little-endian reads over a mapped file."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self.offset = 0

    def take(self, n_bytes: int) -> bytes:
        end = self.offset + n_bytes
        if end > len(self._data):
            raise _PastTheEnd(end)
        piece = self._data[self.offset : end]
        self.offset = end
        return piece

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind = GGUFValueType(self.scalar("<I"))
        count = self.scalar("<Q")
        if item_kind in _SCALARS:
            layout = _SCALARS[item_kind]
            raw = self.take(count * struct.calcsize(layout))
            return [item for (item,) in struct.iter_unpack(layout, raw)]
        return [self.value(item_kind) for _ in range(count)]


def read_header(path: Path) -> GgufHeader:
    """Read the header of the GGUF at ``path``; the weights are neither read nor checked.

    Raises RoutewiseError where the file is missing, is no GGUF of a known version, or ends within
    the header.
    """
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as stream:
            if n_bytes == 0:
                return _parse(path, b"", 0)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data, n_bytes)
    except FileNotFoundError as error:
        raise RoutewiseError(f"{path}: no such file", "check the path in the study") from error
    except IsADirectoryError as error:
        raise RoutewiseError(f"{path}: a folder, wanted a GGUF file") from error


def check_gguf(path: Path) -> GgufHeader:
    """Return the header of a GGUF whose every tensor lies wholly inside the file.

    Raises RoutewiseError as :func:`read_header` does, and where tensor data is missing at the end:
    the message says how many bytes are there and how many are wanted.
    """
    header = read_header(path)
    if not header.tensors:
        raise RoutewiseError(
            f"{path}: a GGUF without tensors (a vocabulary alone?), wanted a model with weights"
        )
    n_parts = header.metadata.get("split.count", 1)
    if n_parts > 1:
        raise RoutewiseError(
            f"{path}: part {header.metadata.get('split.no', 0) + 1} of {n_parts}, wanted one file",
            "merge the parts first: llama-gguf-split --merge FIRST_PART OUT.gguf",
        )
    if header.n_bytes < header.n_bytes_wanted:
        cut = min(
            (item for item in header.tensors if item.offset + item.n_bytes > header.n_bytes),
            key=lambda item: item.offset,
        )
        raise RoutewiseError(
            f"{path}: truncated GGUF: {header.n_bytes:,} bytes are there, "
            f"{header.n_bytes_wanted:,} wanted (the first tensor cut is {cut.name})",
            "fetch or copy the file again",
        )
    return header


def _parse(path: Path, data: mmap.mmap | bytes, n_bytes: int) -> GgufHeader:
    cursor = _Cursor(data)
    try:
        _check_start(path, cursor)
        version = cursor.scalar("<I")
        if version not in VERSIONS:
            raise RoutewiseError(
                f"{path}: GGUF version {version}, wanted {' or '.join(map(str, VERSIONS))}",
                "convert the file with a current llama.cpp (a huge number means big endian)",
            )
        n_tensors = cursor.scalar("<Q")
        n_metadata = cursor.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            key = cursor.text()
            metadata[key] = cursor.value(GGUFValueType(cursor.scalar("<I")))
        table = [_read_tensor(cursor) for _ in range(n_tensors)]
    except _PastTheEnd as error:
        raise RoutewiseError(
            f"{path}: truncated GGUF: {n_bytes:,} bytes are there, at least {error.args[0]:,} "
            "wanted (the file ends within its header)",
            "fetch or copy the file again",
        ) from error
    except (ValueError, KeyError) as error:
        raise RoutewiseError(
            f"{path}: damaged GGUF header near byte {cursor.offset:,}: {error}",
            "fetch or copy the file again",
        ) from error

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise RoutewiseError(f"{path}: general.alignment is {alignment!r}, wanted 1 or more")
    start = -(-cursor.offset // alignment) * alignment
    tensors = tuple(
        Tensor(name, shape, kind, start + offset, size) for name, shape, kind, offset, size in table
    )
    wanted = max((tensor.offset + tensor.n_bytes for tensor in tensors), default=start)
    return GgufHeader(path, version, metadata, tensors, n_bytes, wanted)


def _check_start(path: Path, cursor: _Cursor) -> None:
    magic = cursor.take(len(MAGIC))
    if magic != MAGIC:
        raise RoutewiseError(
            f"{path}: starts with {magic!r}, wanted {MAGIC!r}: this is no GGUF file",
            "check that the address or path is that of the file itself, not of a web page or an "
            "LFS pointer",
        )


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    name = cursor.text()
    shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))
    kind = GGMLQuantizationType(cursor.scalar("<I"))
    offset = cursor.scalar("<Q")
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    n_elements = 1
    for length in shape:
        n_elements *= length
    if n_elements % block_size:
        raise ValueError(f"tensor {name}: {n_elements} elements, no multiple of {block_size}")
    return name, shape, kind.name, offset, n_elements // block_size * block_bytes
