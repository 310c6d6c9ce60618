"""A GGUF file seen as a checkpoint: the same tensors under the same names, and rows of them.

Rows are read as those of a Hugging Face folder are, a few MB at a time; quantised ones are widened by the ``gguf``
package, and what llama.cpp's converter changed (``gguf_names``) is changed back as they are read.  What is made of them
afterwards, int8 or int4, is made from these values: a second quantisation, whose loss the report counts against them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coli.config import ModelConfig
from coli.container.reader import widen
from coli.convert.checkpoint import Checkpoint, SourceTensor
from coli.convert.gguf_config import Metadata, architecture_of, config_of, generation_config_of, layer_count
from coli.convert.gguf_file import Gguf, GgufEntry, is_gguf, load_package, read_gguf
from coli.convert.gguf_names import AS_STORED, MINUS_ONE, Origin, origins
from coli.convert.gguf_tokenizer import Vocabulary
from coli.errors import ModelError
from coli.log import logger

_STORED_KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_BLOCK = re.compile(r"blk\.(\d{1,5})\.")
_CHAT_TEMPLATE = "tokenizer.chat_template"


def open_checkpoint(src: str | Path, n_threads: int = 1) -> Checkpoint:
    """The checkpoint in a Hugging Face folder or in a GGUF file."""
    path = Path(src)
    return GgufCheckpoint(path, n_threads) if is_gguf(path) else Checkpoint(path, n_threads)


def stored_types(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """{number format: {"tensors", "bytes"}} of the model's tensors as its files hold them, by the formats' own names.

    Those of a GGUF file are what llama.cpp made of a checkpoint's: fewer, since experts are stacked.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        stored = [(checkpoint.type_name(entry), entry.n_bytes) for entry in checkpoint.stored.values()]
    else:
        stored = [(tensor.kind, tensor.n_bytes) for tensor in checkpoint.tensors.values()]
    types: dict[str, dict[str, int]] = {}
    for name, n_bytes in stored:
        of_type = types.setdefault(name, {"tensors": 0, "bytes": 0})
        of_type["tensors"] += 1
        of_type["bytes"] += n_bytes
    return types


@dataclass(frozen=True)
class GgufTensor(SourceTensor):
    """A tensor of the checkpoint and where the file has it.

    name : the file's.   shape, n_bytes : of the checkpoint's tensor, which may be a part of the file's.
    kind : of the values as they are handed out.
    """

    entry: GgufEntry = field(kw_only=True)
    origin: Origin = field(kw_only=True, compare=False)

    @property
    def row_bytes(self) -> int:
        return self.cols // self.entry.block * self.entry.block_bytes


class GgufCheckpoint(Checkpoint):
    """An opened GGUF file, or the parts of one, of an architecture of this family.

    The attributes are a `Checkpoint`'s; path is the file, or the first of its parts.   stored : the file's own tensors
    that the model is made of, by their names there.

    Raises ModelError naming the file and the tensor or key.
    """

    def __init__(self, path: str | Path, n_threads: int = 1) -> None:
        self._package = load_package()
        self._gguf: Gguf = read_gguf(path)
        self.path = self._gguf.path
        self.files = list(self._gguf.files)
        self.n_threads = n_threads
        self.bytes_read = 0
        self.skipped = {kind: {"tensors": 0, "bytes": 0} for kind in ("mtp", "visual")}
        self._open: dict[Path, int] = {}
        self._metadata = Metadata(self._gguf.metadata, str(self.path))
        self._architecture = architecture_of(self._metadata)
        self.stored = self._without_layers_ahead()
        embedding = self._stored("token_embd.weight")
        self._config_dict = config_of(self._metadata, self._architecture, self.stored, embedding.shape[0])
        self.config = ModelConfig.from_dict(
            self._config_dict,
            f"{self.path}, as config.json",
            self._generation_config,
            f"{self.path}, as generation_config.json",
        )
        self.tensors: dict[str, SourceTensor] = {}
        self._take()

    def fingerprint(self) -> dict[str, Any]:
        """Names, sizes and times of the files, and what their metadata became."""
        stats = {path.name: os.stat(path) for path in self.files}
        small = self.extra_files()
        return {
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats.items())},
            "config": hashlib.sha256(b"".join(small[name] for name in sorted(small))).hexdigest(),
        }

    def extra_files(self) -> dict[str, bytes]:
        """The small files of a checkpoint, made from the metadata; those that it has something for."""
        return self._extra_files

    def read_rows(self, tensor: SourceTensor, first_row: int, out: np.ndarray) -> None:
        """Read rows [first_row, first_row + len(out)) of the checkpoint's tensor into `out`.

        out : (n, cols), C-contiguous; uint16 for the bits of bf16 and f16 as stored, or float32.
        """
        assert isinstance(tensor, GgufTensor)
        raw = np.empty((len(out), tensor.row_bytes), np.uint8)
        for at, row, n in _runs(tensor.origin.rows, first_row, len(out)):
            self._read(tensor, tensor.offset + row * tensor.row_bytes, raw[at : at + n].reshape(-1))
        values = raw.view(np.uint16) if out.dtype == np.uint16 else self._float32(tensor, raw)
        if tensor.origin.columns is not None:
            values = values[:, tensor.origin.columns]
        out[:] = values

    def _float32(self, tensor: GgufTensor, raw: np.ndarray) -> np.ndarray:
        kind = self._package.GGMLQuantizationType(tensor.entry.type)
        if kind.name in _STORED_KINDS:
            values = widen(raw.reshape(-1), _STORED_KINDS[kind.name]).reshape(len(raw), -1)
        else:
            with np.errstate(all="ignore"):  # a damaged scale gives NaN, which is found where the rows are used
                values = self._package.dequantize(raw, kind)
        if tensor.origin.values == AS_STORED:
            return values
        return values - np.float32(1) if tensor.origin.values == MINUS_ONE else _log_of_negated(values)

    def _without_layers_ahead(self) -> dict[str, GgufEntry]:
        """The file's tensors but those of the layers that predict tokens ahead (MTP), which are counted."""
        layers, ahead = layer_count(self._metadata, self._architecture)
        kept = {}
        for name, entry in self._gguf.tensors.items():
            block = _BLOCK.match(name)
            if block and layers <= int(block[1]) < layers + ahead:
                self.skipped["mtp"]["tensors"] += 1
                self.skipped["mtp"]["bytes"] += entry.n_bytes
            else:
                kept[name] = entry
        return kept

    def type_name(self, entry: GgufEntry) -> str:
        """What llama.cpp calls a tensor's number format, such as Q4_K."""
        return self._package.GGMLQuantizationType(entry.type).name

    def _take(self) -> None:
        """Every tensor of the model from its place in the file; ModelError for one missing, odd or left over."""
        type_names: dict[int, str] = {}
        used: set[str] = set()
        for origin in origins(self.config, self._architecture, self.stored):
            entry = self._stored(origin.stored)
            if _without_ones(entry.shape) != _without_ones(origin.stored_shape):
                raise ModelError(
                    f"{entry.path}: tensor {entry.name} has shape {list(entry.shape)}; its metadata makes it "
                    f"{list(origin.stored_shape)}"
                )
            if entry.type not in type_names:
                self._check_type(entry)
                type_names[entry.type] = self.type_name(entry)
            used.add(entry.name)
            n_bytes = math.prod(origin.shape) // entry.block * entry.block_bytes
            kind = _STORED_KINDS.get(type_names[entry.type], "f32") if origin.values == AS_STORED else "f32"
            self.tensors[origin.name] = GgufTensor(
                entry.name, entry.path, kind, origin.shape, entry.offset, n_bytes, entry=entry, origin=origin
            )
        for name, entry in self.stored.items():
            if name not in used:
                raise ModelError(f"{entry.path}: tensor {name} is unknown: no part of the model owns it")

    def _stored(self, name: str) -> GgufEntry:
        if name not in self.stored:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self.stored[name]

    def _check_type(self, entry: GgufEntry) -> None:
        """ModelError for a type that the package cannot widen, though it knows its size."""
        kind = self._package.GGMLQuantizationType(entry.type)
        try:
            with np.errstate(all="ignore"):
                self._package.dequantize(np.zeros((1, entry.block_bytes), np.uint8), kind)
        except NotImplementedError:
            raise ModelError(
                f"{entry.path}: tensor {entry.name} has type {kind.name}, which the gguf package cannot widen"
            ) from None

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        """None where the file has no tokens."""
        if self._metadata.text("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            return None
        return Vocabulary(self._metadata, self._gguf.tensors["token_embd.weight"].shape[0])

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        vocabulary = self._vocabulary
        tokens = {token: vocabulary.ids[token] for token in vocabulary.control} if vocabulary else {}
        return generation_config_of(self._metadata, tokens)

    @cached_property
    def _extra_files(self) -> dict[str, bytes]:
        files = {"config.json": _json(self._config_dict), "generation_config.json": _json(self._generation_config)}
        if self._vocabulary is not None and self._vocabulary.spells_text:
            files["tokenizer.json"] = self._vocabulary.tokenizer_json().encode()
            files["tokenizer_config.json"] = _json(self._vocabulary.tokenizer_config())
        else:
            logger("load").info(
                "%s: no vocabulary that could spell a text: no tokenizer.json is made, the model takes ids only",
                self.path,
            )
        if _CHAT_TEMPLATE in self._metadata:
            files["chat_template.jinja"] = self._metadata.text(_CHAT_TEMPLATE).encode()
        return files


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _runs(rows: np.ndarray | range | None, first: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Rows [first, first + n) as consecutive rows of the file: (place among the n, row in the file, how many)."""
    if rows is None:
        yield 0, first, n
        return
    wanted = np.asarray(rows[first : first + n])
    starts = np.flatnonzero(np.diff(wanted, prepend=wanted[0] - 2) != 1).tolist()
    for at, end in zip(starts, [*starts[1:], n], strict=True):
        yield at, int(wanted[at]), end - at


def _log_of_negated(stored: np.ndarray) -> np.ndarray:
    """A_log of ``-exp(A_log)``: the bf16 number whose exponential is the stored float32, where there is one.

    Checkpoints store A_log in bf16 or float32.  The logarithm of a rounded exponential is a float32 that can be a bit
    off; of a bf16 number it is the only one near.
    """
    with np.errstate(all="ignore"):  # what is not negative becomes NaN or infinite, and is refused as that
        nearest = np.log(-stored.astype(np.float64)).astype(np.float32)
        bits = nearest.view(np.uint32).astype(np.uint64)
        short = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        # Exponentials of common libraries are right to 1 (torch) to 2.5 (NumPy) units in the last place.
        is_short = np.abs(np.exp(short.astype(np.float64)) + stored) <= 3 * np.spacing(np.abs(stored))
    return np.where(is_short, short, nearest)
