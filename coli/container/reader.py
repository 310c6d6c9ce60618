"""An opened container: memory-mapped, checked against its configuration, handed out as views.

Opening reads the manifest, the configuration and the headers, and demands that every tensor of the schema is
there in its place, size and type and that nothing else is; no weight is read.  The bytes behind the views are
the mapped files themselves: what the CPU computes from and what a card gets by upload.

The small files are compared with the manifest's checksums, which takes milliseconds.  What arithmetic and ids hang on
(config.json, tokenizer.json) must be what was converted.  What people adjust by hand (`ADJUSTABLE`: sampling, stop ids,
template) may differ, is used as it is, and is said in one line; ``verify`` calls it damage all the same.

What opening does not do is look at 20 GB of weights for a -128 or a NaN (docs/numerics.md, section 2, refuses
them at load): the converter cannot write one, the checksums say whether the bytes are still the converter's,
and ``verify`` scans.  A scan at each load would read the whole model from disk before the first token.
"""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coli.config import ModelConfig, shown
from coli.container.header import Header, TensorEntry, read_header
from coli.container.layout import ALIGN_BYTES, FORMATS, MatrixLayout, SlabLayout, matrix_layout, slab_layout
from coli.container.manifest import MANIFEST_NAME, Manifest, read_manifest
from coli.container.schema import COMPONENTS, EXPERT_SLABS, MATRIX, PLAIN, SHARED_SLAB, Entry, entries
from coli.errors import ModelError
from coli.log import logger

JOURNAL_NAME = "journal.jsonl"  # of an unfinished conversion; the writer's

ADJUSTABLE = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of a container that may be edited where they are."""

# Row-major formats by safetensors' names.
STORED_FORMATS = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


@dataclass(frozen=True)
class Matrix:
    """A (rows, cols) matrix where it lies.

    format : a name of ``layout.FORMATS``.
    block_bytes, n_blocks, n_groups : as in ``layout.MatrixLayout``.
    data : uint8, one dimension, a view of the mapped file; n_blocks * block_bytes of it are the matrix.
    """

    name: str
    format: str
    rows: int
    cols: int
    block_bytes: int
    n_blocks: int
    n_groups: int
    data: np.ndarray = field(repr=False, compare=False)


@dataclass(frozen=True)
class Slabs:
    """`count` experts, one slab after the other, `stride_bytes` apart; see ``layout.SlabLayout`` for the parts.

    data : uint8, one dimension, count * stride_bytes, a view of the mapped file.
    """

    name: str
    format: str
    count: int
    stride_bytes: int
    hidden_size: int
    intermediate_size: int
    gate: MatrixLayout
    up: MatrixLayout
    down: MatrixLayout
    gate_offset: int
    up_offset: int
    down_offset: int
    data: np.ndarray = field(repr=False, compare=False)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an opened container: what the schema says, where it is, and how it is laid out.

    layout : a MatrixLayout, a SlabLayout, or None for a plain vector.   count : slabs, or 1.
    """

    entry: Entry
    place: TensorEntry
    format: str
    layout: MatrixLayout | SlabLayout | None
    count: int = 1


class Container:
    """A container that was opened with ``Container.open``; closed with ``close`` or as a context manager.

    path, config, manifest : where it is, the model's configuration, the checked ``coli.json``.
    tensors : {name: StoredTensor}, in the order of the schema.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        manifest: Manifest,
        tensors: dict[str, StoredTensor],
        maps: dict[str, mmap.mmap],
        headers: dict[str, Header],
    ) -> None:
        self.path = path
        self.config = config
        self.manifest = manifest
        self.tensors = tensors
        self.headers = headers
        self._maps = maps

    @classmethod
    def open(cls, path: str | Path) -> Container:
        """Open and check a container folder.

        Raises ModelError naming the file and the tensor or field: no container, an unfinished conversion, another
        version, a file that is missing or of another size, a tensor that is missing, unknown, misplaced or of
        another shape.
        """
        path = Path(path)
        if not (path / MANIFEST_NAME).is_file():
            if (path / JOURNAL_NAME).exists():
                raise ModelError(f"{path}: an unfinished conversion; run the same coli convert again to finish it")
            raise ModelError(f"{path}: not a container: there is no {MANIFEST_NAME} in it")
        return cls.open_as(path, read_manifest(path))

    @classmethod
    def open_as(cls, path: Path, manifest: Manifest) -> Container:
        """Open a folder under a manifest that is not on disk yet: how the writer checks what it is about to finish."""
        _check_files(path, manifest)
        config = ModelConfig.from_folder(path)
        if config.tie_word_embeddings != manifest.tied:
            raise ModelError(
                f"{path / MANIFEST_NAME}: tied is {manifest.tied}, but config.json says {config.tie_word_embeddings}"
            )
        schema = entries(config, has_lm_head=manifest.is_quantised or not manifest.tied)
        files = dict.fromkeys(entry.file for entry in schema)
        for name in files:
            if name not in manifest.files:
                raise ModelError(f"{path / MANIFEST_NAME}: files does not list {name}, which config.json asks for")
        headers = {name: read_header(path / name) for name in files}
        tensors = {entry.name: _locate(path, entry, manifest, headers[entry.file]) for entry in schema}
        for name, header in headers.items():
            for tensor in header.tensors:
                if tensor not in tensors or tensors[tensor].entry.file != name:
                    raise ModelError(f"{path / name}: tensor {tensor} is none of this model's")
        maps = {name: _map(path / name) for name in headers}
        return cls(path, config, manifest, tensors, maps, headers)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the mapping.  Views that were handed out keep their file mapped until they die."""
        self._maps = {}

    @property
    def embed(self) -> Matrix:
        """The embedding, (vocab_size, hidden_size), row-major as stored; block_bytes is one row."""
        return self.matrix("embed_tokens")

    def matrix(self, name: str) -> Matrix:
        """A matrix by name, zero-copy.  ``lm_head`` of a tied 16-bit container is its embedding.

        Raises ModelError for a name that is no matrix of this container.
        """
        stored = "embed_tokens" if name == "lm_head" and name not in self.tensors else name
        tensor = self._tensor(stored)
        layout = tensor.layout
        if not isinstance(layout, MatrixLayout):
            raise ModelError(f"{self.path}: {name} is a {tensor.entry.kind} tensor, not a matrix")
        return Matrix(
            name,
            layout.format,
            layout.rows,
            layout.cols,
            layout.block_bytes,
            layout.n_blocks,
            layout.n_groups,
            self._view(tensor),
        )

    def slabs(self, name: str) -> Slabs:
        """The routed experts or the shared expert of a layer, zero-copy.  Raises ModelError for any other name."""
        tensor = self._tensor(name)
        layout = tensor.layout
        if not isinstance(layout, SlabLayout):
            raise ModelError(f"{self.path}: {name} is a {tensor.entry.kind} tensor, not expert slabs")
        return Slabs(
            name,
            layout.format,
            tensor.count,
            layout.total_bytes,
            layout.hidden_size,
            layout.intermediate_size,
            layout.gate,
            layout.up,
            layout.down,
            layout.gate_offset,
            layout.up_offset,
            layout.down_offset,
            self._view(tensor),
        )

    def float32(self, name: str) -> np.ndarray:
        """A plain tensor in its shape, widened exactly to float32 (a view where it is stored so)."""
        tensor = self._tensor(name)
        if tensor.entry.kind != PLAIN:
            raise ModelError(f"{self.path}: {name} is a {tensor.entry.kind} tensor, it has no float32 form")
        return widen(self._view(tensor), tensor.format).reshape(tensor.entry.shape)

    def will_not_need(self, name: str) -> None:
        """Tell the system that a tensor is elsewhere now: its pages leave this process and stay in the system's cache.

        They are mapped again where they are read after all, at 0.1 ms an expert once.  Measured with 900 MB on a card:
        resident set and page tables without them, for 80 ms; MADV_COLD changed neither, for 200 ms.  A name that is no
        tensor of this container (the head of a tied 16-bit one) is passed over.
        """
        if name in self.tensors and hasattr(mmap, "MADV_DONTNEED"):  # not on every platform
            place = self._tensor(name).place
            start = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map_of(name).madvise(mmap.MADV_DONTNEED, start, place.offset + place.n_bytes - start)

    def bytes_by_component(self) -> dict[str, int]:
        """Bytes on disk of each component; with the headers of the files they are the files' bytes."""
        sums = dict.fromkeys(COMPONENTS, 0)
        for tensor in self.tensors.values():
            sums[tensor.entry.component] += tensor.place.n_bytes
        return sums

    def bytes_read_per_token(self) -> dict[str, int]:
        """Bytes of each component that decoding one token reads.

        Everything once, but one row of the embedding and num_experts_per_tok of a layer's experts.  A tied 16-bit
        head reads the embedding as ``lmhead``.
        """
        sums = self.bytes_by_component()
        if "lm_head" not in self.tensors:
            sums["lmhead"] = sums["embed"]
        sums["embed"] = self.embed.block_bytes
        sums["experts"] = sums["experts"] // self.config.num_experts * self.config.num_experts_per_tok
        return sums

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ModelError(f"{self.path}: there is no tensor {name} in this model")
        return self.tensors[name]

    def _map_of(self, name: str) -> mmap.mmap:
        if not self._maps:
            raise ModelError(f"{self.path}: the container is closed")
        return self._maps[self.tensors[name].entry.file]

    def _view(self, tensor: StoredTensor) -> np.ndarray:
        place = tensor.place
        return np.frombuffer(self._map_of(tensor.entry.name), np.uint8, place.n_bytes, place.offset)


def widen(data: np.ndarray, format: str) -> np.ndarray:
    """uint8 bytes of f32, bf16 or f16 values, exactly as float32, one dimension."""
    if format == "f32":
        return data.view(np.float32)
    if format == "f16":
        return data.view(np.float16).astype(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _layout(
    entry: Entry, manifest: Manifest, dtype: str, source: str
) -> tuple[str, MatrixLayout | SlabLayout | None, int]:
    """Format, layout and count of a schema tensor; dtype, as found, decides the format of a plain one."""
    if entry.kind == PLAIN:
        format = STORED_FORMATS[dtype]
        return format, matrix_layout(format, *entry.shape) if len(entry.shape) == 2 else None, 1
    if entry.kind == MATRIX:
        stated = manifest.matrices.get(entry.name)
        rows, cols = entry.shape
        if stated is None or (stated.get("rows"), stated.get("cols")) != (rows, cols):
            raise ModelError(
                f"{source}: matrices.{entry.name} is {shown(stated)}; config.json makes it {rows} rows and {cols} cols"
            )
        format = stated["format"]
        if FORMATS[format].is_blocks != manifest.is_quantised:
            raise ModelError(
                f"{source}: matrices.{entry.name} has format {format}, "
                f"which does not go with trunk_format {manifest.trunk_format}"
            )
        return format, matrix_layout(format, rows, cols), 1
    *counts, intermediate_size, hidden_size = entry.shape
    if entry.kind == SHARED_SLAB:
        return manifest.trunk_format, slab_layout(manifest.trunk_format, hidden_size, intermediate_size), 1
    assert entry.kind == EXPERT_SLABS
    layout = slab_layout(manifest.expert_format, hidden_size, intermediate_size)
    for key, value in experts_field(layout, *counts).items():
        if manifest.experts.get(key) != value:
            found = shown(manifest.experts.get(key))
            raise ModelError(f"{source}: experts.{key} is {found}; config.json makes it {value}")
    return manifest.expert_format, layout, *counts


def experts_field(layout: SlabLayout, count: int) -> dict[str, int | str]:
    """The manifest's ``experts``."""
    return {
        "format": layout.format,
        "count": count,
        "hidden_size": layout.hidden_size,
        "intermediate_size": layout.intermediate_size,
        "stride_bytes": layout.total_bytes,
    }


def _locate(path: Path, entry: Entry, manifest: Manifest, header: Header) -> StoredTensor:
    """Find a schema tensor in its file and check type, shape and place."""
    source = path / entry.file
    place = header.tensors.get(entry.name)
    if place is None:
        raise ModelError(f"{source}: tensor {entry.name} is missing")
    if entry.kind == PLAIN and place.dtype not in STORED_FORMATS:
        raise ModelError(f"{source}: tensor {entry.name} is {place.dtype}; expected {', '.join(STORED_FORMATS)}")
    format, layout, count = _layout(entry, manifest, place.dtype, str(path / MANIFEST_NAME))
    if entry.kind == PLAIN:
        dtype, shape, align_bytes = place.dtype, entry.shape, FORMATS[format].bits // 8
    else:
        # Uploaded, and read with wide loads.
        dtype, shape, align_bytes = "U8", (count * layout.total_bytes,), ALIGN_BYTES
    if (place.dtype, place.shape) != (dtype, shape):
        raise ModelError(
            f"{source}: tensor {entry.name} is {place.dtype} {list(place.shape)}; expected {dtype} {list(shape)}"
        )
    if place.offset % align_bytes:
        raise ModelError(
            f"{source}: tensor {entry.name} starts at byte {place.offset}; expected a multiple of {align_bytes}"
        )
    return StoredTensor(entry, place, format, layout, count)


def _check_files(path: Path, manifest: Manifest) -> None:
    """That every file of the manifest is there and, the weights apart, is what was written."""
    for name, stated in manifest.files.items():
        file = path / name
        try:
            found = file.stat().st_size
            is_same = found == stated["bytes"]
            if is_same and not name.endswith(".safetensors"):
                is_same = hashlib.sha256(file.read_bytes()).hexdigest() == stated["sha256"]
        except FileNotFoundError:
            raise ModelError(f"{file}: missing; {MANIFEST_NAME} lists it") from None
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
        if is_same:
            continue
        if name in ADJUSTABLE:
            logger("load").warning("%s: not the file that was converted; it is used as it is", file)
        elif found != stated["bytes"]:
            raise ModelError(f"{file}: {found} bytes; {MANIFEST_NAME} says {stated['bytes']}")
        else:
            raise ModelError(
                f"{file}: damaged or edited: its sha256 is not the one in {MANIFEST_NAME}; change the checkpoint's and "
                "convert it again"
            )


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be mapped: {error}") from None
