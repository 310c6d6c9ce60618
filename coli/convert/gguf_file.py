"""GGUF files as they lie on disk: metadata, and where each tensor is, over all parts of a split file.

The ``gguf`` package's own reader maps the file, makes an array of each of half a million tokens, and ends on a damaged
file in whatever NumPy raises; so the header is read here, each claim of it checked against the file before it is
used.  Number formats, their block sizes and their arithmetic are the package's.  It knows nothing of models.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from coli.config import shown
from coli.errors import ModelError

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the same layout; version 1 had lengths of 32 bits
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")

# Value types of the metadata: struct codes by number; then those that are no fixed-size number.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Bounds that keep a damaged header from asking for absurd work; each far beyond any published file.
_MOST_VALUES, _MOST_TENSORS, _MOST_ITEMS = 1 << 16, 1 << 20, 1 << 24
_LONGEST_NAME, _LONGEST_TEXT_BYTES = 200, 1 << 24
_MOST_DIMENSIONS, _LARGEST_DIMENSION = 4, 1 << 40
_DEFAULT_ALIGN_BYTES, _MOST_ALIGN_BYTES = 32, 1 << 20


@dataclass(frozen=True)
class GgufEntry:
    """One tensor: `shape` row-major (GGUF writes it the other way round), `offset` from the start of its file.

    type : a number of ``gguf.GGMLQuantizationType``.   block, block_bytes : values and bytes of one block of it.
    """

    name: str
    path: Path
    type: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    block: int
    block_bytes: int


@dataclass(frozen=True)
class Gguf:
    """A whole model: the metadata of its first part and the tensors of all of them."""

    path: Path
    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufEntry]


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its suffix; a folder may be called anything."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def first_part(path: Path) -> Path:
    """The first file of the model that any of its parts belongs to."""
    match = _PART.fullmatch(path.name)
    return path.with_name(f"{match['stem']}-00001-of-{match['count']}{SUFFIX}") if match else path


def load_package() -> Any:
    """The ``gguf`` package.  ModelError saying how to get it where it is missing."""
    try:
        import gguf
    except ImportError:
        raise ModelError("reading GGUF files needs the gguf package: pip install 'coli[gguf]'") from None
    return gguf


def read_gguf(path: str | Path) -> Gguf:
    """Read and check the headers of a GGUF file and of all its parts; `path` may be any of them.

    Raises ModelError naming the file, and the tensor, the key or the bytes expected and found.
    """
    parts = _parts(Path(path))
    read = [_read_part(part) for part in parts]
    for i, (part, (metadata, _)) in enumerate(zip(parts, read, strict=True)):
        number, count = metadata.get("split.no", 0), metadata.get("split.count", 1)
        if number != i or count not in (len(parts), *([0] if len(parts) == 1 else [])):
            raise ModelError(
                f"{part}: its metadata makes it part {shown(number)} (from 0) of {shown(count)}, its name part {i} of "
                f"{len(parts)}; give the parts the names that they were made with"
            )
    tensors: dict[str, GgufEntry] = {}
    for part, (_, entries) in zip(parts, read, strict=True):
        for entry in entries:
            if entry.name in tensors:
                raise ModelError(f"{part}: tensor {entry.name} is also in {tensors[entry.name].path.name}")
            tensors[entry.name] = entry
    metadata = read[0][0]
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{parts[0]}: split.tensors.count is {shown(expected)}; its parts hold {len(tensors)} tensors")
    return Gguf(parts[0], parts, metadata, tensors)


def _parts(path: Path) -> tuple[Path, ...]:
    match = _PART.fullmatch(path.name)
    if not match:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["part"]) <= count:
        raise ModelError(f"{path}: there is no part {int(match['part'])} of {count}")
    parts = tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}{SUFFIX}") for i in range(1, count + 1))
    for i, part in enumerate(parts):
        if not part.exists():
            raise ModelError(f"{part}: missing; it is part {i + 1} of the {count} of this model")
    return parts


def _read_part(path: Path) -> tuple[dict[str, Any], list[GgufEntry]]:
    try:
        with open(path, "rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            return _Header(file, file_bytes, path).read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


class _Header:
    """The header of one file, read once from its start to its end."""

    def __init__(self, file: BinaryIO, file_bytes: int, path: Path) -> None:
        self._file = file
        self._file_bytes = file_bytes
        self._left = file_bytes
        self._path = path

    def read(self) -> tuple[dict[str, Any], list[GgufEntry]]:
        magic = self._take(min(4, self._file_bytes), "its magic")
        if magic != _MAGIC:
            raise self._error(f"not a GGUF file: it begins with {shown(magic)}, expected {shown(_MAGIC)}")
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise self._error(
                "a big-endian GGUF file; convert it with gguf-convert-endian of the gguf package"
                if is_swapped
                else f"GGUF version {version}; coli reads {' and '.join(map(str, _VERSIONS))}"
            )
        n_tensors = self._count("the number of tensors", _MOST_TENSORS)
        n_values = self._count("the number of metadata values", _MOST_VALUES)
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._error(f"{key} stands twice in its metadata")
            metadata[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(n_tensors)]
        align = metadata.get("general.alignment", _DEFAULT_ALIGN_BYTES)
        if type(align) is not int or not 1 <= align <= _MOST_ALIGN_BYTES or align & (align - 1):
            raise self._error(f"general.alignment is {shown(align)}; expected a power of two")
        start = -(-(self._file_bytes - self._left) // align) * align
        return metadata, list(self._entries(infos, start, align))

    def _entries(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, align: int
    ) -> Iterator[GgufEntry]:
        """Tensors in the order of their bytes: inside the file, aligned, none over another."""
        sizes = {int(kind): size for kind, size in load_package().GGML_QUANT_SIZES.items()}
        end, last = start, "the header"
        for name, shape, kind, at in sorted(infos, key=lambda info: info[3]):
            if kind not in sizes:
                raise self._error(f"tensor {name} has quantisation type {kind}, which the gguf package does not know")
            block, block_bytes = sizes[kind]
            if shape[-1] % block:
                raise self._error(f"tensor {name} has rows of {shape[-1]}, no multiple of its type's {block}")
            n_bytes, offset = math.prod(shape) // block * block_bytes, start + at
            if at % align:
                raise self._error(f"tensor {name} starts at byte {at} of the data, no multiple of {align}")
            if offset < end:
                raise self._error(f"tensor {name} overlaps {last} (byte {offset} instead of {end})")
            end, last = offset + n_bytes, name
            if end > self._file_bytes:
                raise self._error(f"is cut off: tensor {name} ends at byte {end}, the file has {self._file_bytes}")
            yield GgufEntry(name, self._path, kind, shape, offset, n_bytes, block, block_bytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type, and offset in the data."""
        name = self._name("a tensor's name")
        n_dimensions = self._number("I", name)
        if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
            raise self._error(f"tensor {name} has {n_dimensions} dimensions; expected 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q", name) for _ in range(n_dimensions))[::-1]
        if not all(1 <= size <= _LARGEST_DIMENSION for size in shape):
            raise self._error(f"tensor {name} has shape {list(shape)}")
        return name, shape, self._number("I", name), self._number("Q", name)

    def _value(self, key: str) -> Any:
        """A number, a text, a list of texts, or an array of numbers."""
        kind = self._number("I", key)
        if kind == _STRING:
            return self._text(key)
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], key)
        if kind != _ARRAY:
            raise self._error(f"{key} has value type {kind}, which GGUF does not know")
        kind, count = self._number("I", key), self._count(f"the length of {key}", _MOST_ITEMS)
        if kind == _STRING:
            return [self._text(key) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._error(f"{key} is an array of value type {kind}; expected numbers or texts")
        code = f"<{_NUMBERS[kind]}"
        return np.frombuffer(self._take(count * struct.calcsize(code), key), code)

    def _name(self, what: str) -> str:
        name = self._text(what)
        if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:  # later messages show it as it is
            raise self._error(f"{what} is {shown(name)}; expected 1 to {_LONGEST_NAME} characters that can be printed")
        return name

    def _text(self, what: str) -> str:
        raw = self._take(self._count(f"the length of {what}", _LONGEST_TEXT_BYTES), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8: {shown(raw)}") from None

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q", what)
        if count > most:
            raise self._error(f"{what} is {count}; expected at most {most}")
        return count

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), what))[0]

    def _take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes > self._left:
            raise self._error(
                f"is cut off: {what} needs {n_bytes} bytes at byte {self._file_bytes - self._left}, "
                f"the file has {self._file_bytes}"
            )
        raw = self._file.read(n_bytes)
        if len(raw) != n_bytes:
            raise self._error(f"became shorter while it was read ({what})")
        self._left -= n_bytes
        return raw

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: {what}")
