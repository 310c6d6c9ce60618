"""A Hugging Face folder: its shards, its tensors by their plain names, and raw rows of them.

It knows how checkpoints are stored (one file or an index with shards, two prefixes, block-scaled float8, parts that
a text engine has no use for) and nothing of containers.  Every header is checked before any weight is read.

Rows are read with plain reads into the caller's buffer, not mapped: a file that shrinks or a disk that fails is then
an error with a name (through a mapping it is a SIGBUS), safetensors promises no alignment for mapped values, the
bytes read can be counted, and 67 GB of mapped checkpoint would be 67 GB of resident memory.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from coli._core import quantize
from coli.config import ModelConfig, one_line, read_json_object, shown
from coli.container.header import TensorEntry, read_header
from coli.container.manifest import is_file_name
from coli.container.reader import STORED_FORMATS, widen
from coli.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Copied into the container byte for byte, where they exist.
EXTRA_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

# Stripped from names; which one is used is taken from the names themselves, not from model_type.
_PREFIXES = ("model.language_model.", "model.")
_SKIPPED = {"mtp": ("mtp.",), "visual": ("model.visual.", "visual.")}
_SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the checkpoint, seen as a matrix: all dimensions but the last are rows.

    name : as in the file.   kind : f32, bf16, f16 or f8.
    scale : float8's block scales; blocks : (rows, columns) of one block.
    """

    name: str
    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    scale: SourceTensor | None = None
    blocks: tuple[int, int] = (128, 128)

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.cols * {"f32": 4, "bf16": 2, "f16": 2, "f8": 1}[self.kind]

    @property
    def value_kind(self) -> str:
        """What its values are once they can be computed with: float8 times its scales is float32."""
        return "f32" if self.kind == "f8" else self.kind


class Checkpoint:
    """An opened Hugging Face folder.

    tensors : {plain name: SourceTensor}, e.g. "layers.0.mlp.gate.weight", "lm_head.weight".
    skipped : {"mtp": {"tensors", "bytes"}, "visual": {...}}.
    bytes_read : of weights, so far.

    Raises ModelError naming the file and the tensor or field.
    """

    def __init__(self, folder: str | Path, n_threads: int = 1) -> None:
        self.path = Path(folder)
        self.config = ModelConfig.from_folder(self.path)
        self.n_threads = n_threads
        self.bytes_read = 0
        self.files = _shards(self.path)
        entries = _entries(self.path, self.files)
        self.skipped = {kind: {"tensors": 0, "bytes": 0} for kind in _SKIPPED}
        kept = {}
        for name, (path, entry) in entries.items():
            kind = next((k for k, prefixes in _SKIPPED.items() if name.startswith(prefixes)), None)
            if kind is None:
                kept[name] = (path, entry)
            else:
                self.skipped[kind]["tensors"] += 1
                self.skipped[kind]["bytes"] += entry.n_bytes
        self.tensors = self._named(kept)
        self._open: dict[Path, int] = {}
        self._scales: tuple[str, np.ndarray] = ("", np.empty(0, np.float32))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    @property
    def n_bytes(self) -> int:
        """Bytes of the text model's weights."""
        return sum(t.n_bytes + (t.scale.n_bytes if t.scale else 0) for t in self.tensors.values())

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the files without reading them: names, sizes and times, and what the small ones hold."""
        small = self.extra_files()
        stats = {name: os.stat(self.path / name) for name in (*(path.name for path in self.files), *small)}
        return {
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats.items())},
            "config": hashlib.sha256(small["config.json"]).hexdigest(),
        }

    def extra_files(self) -> dict[str, bytes]:
        """The files that a container keeps as they are."""
        found = {}
        for name in EXTRA_FILES:
            try:
                found[name] = (self.path / name).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ModelError(f"{self.path / name}: cannot be read: {error.strerror}") from None
        return found

    def read_rows(self, tensor: SourceTensor, first_row: int, out: np.ndarray) -> None:
        """Read rows [first_row, first_row + len(out)) into `out`.

        out : (n, cols), C-contiguous; uint16 for the bits of bf16 and f16 as stored, or float32, into which
            anything is widened exactly (float8: times its scale, one rounded product).  Rows of a float8 tensor with
            more than two dimensions must not cross its last matrix.
        """
        n_bytes = len(out) * tensor.row_bytes
        offset = tensor.offset + first_row * tensor.row_bytes
        if out.dtype == np.uint16 or tensor.kind == "f32":
            self._read(tensor, offset, out.view(np.uint8).reshape(-1))
            return
        raw = np.empty(n_bytes, np.uint8)
        self._read(tensor, offset, raw)
        if tensor.kind != "f8":
            out[:] = widen(raw, tensor.kind).reshape(out.shape)
            return
        matrix_rows = tensor.shape[-2]
        matrix, row = divmod(first_row, matrix_rows)
        assert row + len(out) <= matrix_rows, "rows of two matrices have scales of two"
        quantize.widen_f8(
            raw.reshape(out.shape), _f8_table(), self._scale(tensor)[matrix], row, tensor.blocks, out, self.n_threads
        )

    def _scale(self, tensor: SourceTensor) -> np.ndarray:
        """(matrices, block rows, block columns) float32; the last one used is kept: a tensor is read in pieces."""
        scale = tensor.scale
        assert scale is not None
        if self._scales[0] != scale.name:
            rows, cols = math.prod(scale.shape[:-1]), scale.shape[-1]
            values = np.empty((rows, cols), np.float32)
            self.read_rows(scale, 0, values)
            if not np.isfinite(values).all():
                raise ModelError(f"{scale.path}: tensor {scale.name} holds a value that is NaN or infinite")
            block_rows = scale.shape[-2]
            self._scales = (scale.name, values.reshape(-1, block_rows, cols))
        return self._scales[1]

    def _read(self, tensor: SourceTensor, offset: int, out: np.ndarray) -> None:
        fd = self._open.get(tensor.path)
        view, filled = memoryview(out), 0
        try:
            if fd is None:
                fd = self._open[tensor.path] = os.open(tensor.path, os.O_RDONLY)
            while filled < len(view):
                got = os.preadv(fd, [view[filled:]], offset + filled)
                if not got:
                    raise ModelError(f"{tensor.path}: tensor {tensor.name} ends {len(view) - filled} bytes early")
                filled += got
            if hasattr(os, "posix_fadvise"):
                # The next request is nearly always for what follows: let the disk work while this part is computed.
                os.posix_fadvise(fd, offset + filled, filled, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            raise ModelError(f"{tensor.path}: tensor {tensor.name} cannot be read: {error.strerror}") from None
        self.bytes_read += filled

    def _named(self, entries: dict[str, tuple[Path, TensorEntry]]) -> dict[str, SourceTensor]:
        """Strip the prefix, check the types, join float8 weights to their scales."""
        prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in entries), None)
        if prefix is None:
            expected = " or ".join(f"{p}embed_tokens.weight" for p in _PREFIXES)
            near = difflib.get_close_matches(f"{_PREFIXES[0]}embed_tokens.weight", entries, 1, 0.8)
            hint = f" (nearest: {near[0]})" if near else ""
            raise ModelError(f"{self.path}: tensor {expected} is missing{hint}")
        blocks = _block_size(self.path)
        made: dict[str, SourceTensor] = {}
        for name, (path, entry) in entries.items():
            if name.endswith(_SCALE_SUFFIX) and name.removesuffix(_SCALE_SUFFIX) in entries:
                _, weight = entries[name.removesuffix(_SCALE_SUFFIX)]
                if weight.dtype == "F8_E4M3":
                    continue
            # A name under the other prefix keeps it and is then unknown.
            short = name.removeprefix(prefix) if name.startswith(prefix) else name
            made[short] = self._source(name, path, entry, entries, blocks)
        return made

    def _source(
        self,
        name: str,
        path: Path,
        entry: TensorEntry,
        entries: dict[str, tuple[Path, TensorEntry]],
        blocks: tuple[int, int],
    ) -> SourceTensor:
        kind, scale = STORED_FORMATS.get(entry.dtype), None
        if entry.dtype == "F8_E4M3":
            kind = "f8"
            if name + _SCALE_SUFFIX not in entries:
                raise ModelError(
                    f"{path}: tensor {name} is F8_E4M3 and {name}{_SCALE_SUFFIX} is missing: "
                    "float8 weights mean nothing without their scales"
                )
            scale_path, scale_entry = entries[name + _SCALE_SUFFIX]
            expected = _scale_shape(entry.shape, blocks)
            if scale_entry.shape != expected or scale_entry.dtype not in STORED_FORMATS:
                raise ModelError(
                    f"{scale_path}: tensor {scale_entry.name} is {scale_entry.dtype} {list(scale_entry.shape)}; "
                    f"expected {list(expected)} of {', '.join(STORED_FORMATS)} for blocks of {list(blocks)}"
                )
            scale = self._source(scale_entry.name, scale_path, scale_entry, entries, blocks)
        if kind is None:
            raise ModelError(
                f"{path}: tensor {name} is {entry.dtype}; coli reads {', '.join(STORED_FORMATS)} and F8_E4M3"
            )
        if not entry.shape:
            raise ModelError(f"{path}: tensor {name} has no dimensions")
        return SourceTensor(name, path, kind, entry.shape, entry.offset, entry.n_bytes, scale, blocks)


def _shards(folder: Path) -> list[Path]:
    """The files that hold the tensors: those of the index, or the only one."""
    index = folder / INDEX_NAME
    if index.exists():
        names = _weight_map(index).values()
        for name in names:
            if not is_file_name(name) or not name.endswith(".safetensors"):
                raise ModelError(f"{index}: weight_map names {shown(name)}, which is no safetensors file of the folder")
        shards = [folder / name for name in sorted(set(names))]
        for shard in shards:
            if not shard.exists():
                raise ModelError(f"{shard}: missing; {INDEX_NAME} names it")
        return shards
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelError(f"{index}: missing; the folder has {len(found)} safetensors files")
    raise ModelError(f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME} in it")


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    return weight_map


def _entries(folder: Path, shards: list[Path]) -> dict[str, tuple[Path, TensorEntry]]:
    """Every tensor of every shard, checked against the index, the files and the safetensors package."""
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for shard in shards:
        header = read_header(shard)
        try:
            with safe_open(shard, "np"):  # its own validation, in case it is stricter than ours
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{shard}: refused by the safetensors package: {one_line(error)}") from None
        for name, entry in header.tensors.items():
            if name in found:
                raise ModelError(f"{shard}: tensor {name} is also in {found[name][0].name}")
            found[name] = (shard, entry)
    index = folder / INDEX_NAME
    if index.exists():
        weight_map = _weight_map(index)
        for name, file in weight_map.items():
            if name not in found or found[name][0].name != file:
                raise ModelError(f"{folder / file}: tensor {shown(name)} is not in it, though {INDEX_NAME} says so")
        for name, (shard, _) in found.items():
            if name not in weight_map:
                raise ModelError(f"{shard}: tensor {name} is not in {INDEX_NAME}")
    return found


def _block_size(folder: Path) -> tuple[int, int]:
    """``quantization_config.weight_block_size``, rows and columns that share a float8 scale."""
    path = folder / "config.json"
    config = read_json_object(path)
    quantization = config.get("quantization_config") or {}
    blocks = quantization.get("weight_block_size", [128, 128]) if isinstance(quantization, dict) else None
    sizes = blocks if isinstance(blocks, list) else []
    if len(sizes) != 2 or not all(type(n) is int and 1 <= n <= 1 << 20 for n in sizes):
        raise ModelError(f"{path}: quantization_config.weight_block_size is {shown(blocks)}; expected two sizes")
    return sizes[0], sizes[1]


def _scale_shape(shape: tuple[int, ...], blocks: tuple[int, int]) -> tuple[int, ...]:
    if len(shape) < 2:
        return ()  # no vector is stored as float8: nothing fits
    return (*shape[:-2], -(-shape[-2] // blocks[0]), -(-shape[-1] // blocks[1]))


def _f8_table() -> np.ndarray:
    """What each e4m3 byte stands for: float32 (256,); 0x7F and 0xFF are its NaNs, and it has no infinity."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits >> 7, -magnitude, magnitude).astype(np.float32)
