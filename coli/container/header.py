"""Safetensors headers, read and made.

The ``safetensors`` package hands out tensors, not where their bytes are, and saves only what is wholly in memory.
Mapping a container in place, reading a shard in pieces and writing 20 GB as a stream all need the offsets, so
the header (a length, then JSON) is handled here.  Every claim of a header is checked against the file before a
byte of data is used: a truncated, overlapping or overlong file is one error that names the file and the bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coli.config import shown
from coli.errors import ModelError

# Bits of one value, by safetensors' names.  More than we compute with: skipped tensors may be of any type.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# The safetensors package refuses longer headers too.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 16
_LONGEST_NAME = 200  # twice the longest of a published checkpoint's


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is: `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """A checked header: every tensor lies inside the file, none overlaps another."""

    tensors: dict[str, TensorEntry]
    data_offset: int
    file_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; sub-byte types fill whole bytes."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises ModelError naming the file, and the tensor or the bytes expected and found.
    """
    try:
        with open(path, "rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise ModelError(
                    f"{path}: not a whole safetensors file: it has {file_bytes} bytes and "
                    f"its header would need {header_bytes + 8}"
                )
            raw = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_header(raw, file_bytes, str(path))


def parse_header(raw: bytes, file_bytes: int, source: str) -> Header:
    """Check the JSON part of a header against the size of its file.  source : what errors call the file."""
    try:
        parsed = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source}: its header is not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{source}: its header is a JSON {type(parsed).__name__}, expected an object")
    parsed.pop("__metadata__", None)
    data_offset = 8 + len(raw)
    tensors = {name: _entry(name, fields, data_offset, source) for name, fields in parsed.items()}

    # The format has no holes: in order of their offsets, each tensor starts where the last one ended.
    end, last = data_offset, "the header"
    for entry in sorted(tensors.values(), key=lambda e: (e.offset, e.offset + e.n_bytes)):
        if entry.offset != end:
            what = "overlaps" if entry.offset < end else "leaves a gap after"
            raise ModelError(f"{source}: tensor {entry.name} {what} {last} ({entry.offset} instead of byte {end})")
        end, last = end + entry.n_bytes, entry.name
    if end != file_bytes:
        state = "is cut off" if file_bytes < end else "has bytes that no tensor owns"
        raise ModelError(f"{source}: {state}: its header says {end} bytes, the file has {file_bytes}")
    return Header(tensors, data_offset, file_bytes)


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], align_bytes: int) -> bytes:
    """The length and the JSON for tensors (name, dtype, shape) that lie one after the other.

    Padded with spaces, as the format allows, so that the data section starts at a multiple of `align_bytes`.
    """
    fields: dict[str, object] = {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + tensor_bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % align_bytes)
    return struct.pack("<Q", len(raw)) + raw


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{shown(name)} stands twice")
        made[name] = value
    return made


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(name: str, fields: object, data_offset: int, source: str) -> TensorEntry:
    if not name.isprintable() or len(name) > _LONGEST_NAME:  # every later message names tensors as they are
        raise ModelError(
            f"{source}: tensor name {shown(name)} holds characters that cannot be printed, or more than {_LONGEST_NAME}"
        )
    where = f"{source}: tensor {name}"
    if not isinstance(fields, dict):
        raise ModelError(f"{where}: its entry is a JSON {type(fields).__name__}, expected an object")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelError(f"{where}: dtype {shown(dtype)} is not one of safetensors' ({', '.join(DTYPE_BITS)})")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise ModelError(f"{where}: shape {shown(shape)} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ModelError(f"{where}: data_offsets {shown(offsets)} is not a pair of byte numbers")
    begin, end = offsets
    expected = tensor_bytes(dtype, shape)
    if end - begin != expected:
        raise ModelError(f"{where}: {dtype} {shape} needs {expected} bytes, its data_offsets span {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), data_offset + begin, expected)
