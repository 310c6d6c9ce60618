"""Reading a container back: checksums of every file and tensor, and a scan for numbers that must not be there.

One pass over the bytes with plain reads (a mapping would count 20 GB as this process's memory), file by file on all
CPUs.  The converter ends with it, on what it has just written; ``coli inspect --verify`` is the same pass against
the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from coli._core import quantize
from coli.container.layout import FORMATS, MatrixLayout, SlabLayout
from coli.container.reader import Container, StoredTensor
from coli.errors import ModelError
from coli.threads.limits import local_machine

_CHUNK_BYTES = 8 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Digests:
    """What the bytes of one safetensors file are; hexadecimal sha256."""

    file: str
    tensors: dict[str, str]
    pieces: list[str]


def usable_cpus() -> int:
    """How many threads an offline job may use: the CPUs that mask, cpuset and quota leave."""
    _, found = local_machine()
    return max(1, min(len(found.allowed), found.quota or len(found.allowed)))


def verify(container: Container, progress: Callable[[int], None] = lambda n_bytes: None) -> int:
    """Compare every file with the manifest's checksums and scan every number.  Returns the bytes read.

    progress : called with the bytes of each part as it is done, from several threads.

    Raises ModelError naming the file and, where it is one tensor's, the tensor: bytes that changed, a non-finite
    value or scale, an int8 weight of -128.
    """
    files = container.manifest.files
    for name in files:
        if name not in container.headers:
            digest = hashlib.sha256(_read_small(container.path / name)).hexdigest()
            if digest != files[name]["sha256"]:
                raise ModelError(f"{container.path / name}: damaged: its sha256 is not the one in coli.json")
            progress(files[name]["bytes"])

    def check(name: str) -> None:
        stated, source = files[name], container.path / name
        found = read_back(container, name, progress=progress, stated=stated.get("tensors"))
        if found.file != stated["sha256"]:
            raise ModelError(f"{source}: damaged: its header is not the one that coli.json's sha256 covers")

    for_each_file(check, container.headers)
    return sum(file["bytes"] for file in files.values())


def for_each_file(work: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    """Run the work for each file, as many at once as there are CPUs; raises the first error, in the files' order."""
    names = list(names)
    with ThreadPoolExecutor(usable_cpus()) as pool:
        pending = [pool.submit(work, name) for name in names]
        try:
            return {name: future.result() for name, future in zip(names, pending, strict=True)}
        finally:
            for future in pending:
                future.cancel()


def read_back(
    container: Container,
    name: str,
    *,
    pieces: Sequence[int] = (),
    stated: dict[str, str] | None = None,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> Digests:
    """Read one safetensors file of an opened container from end to end, with checksums and scans.

    pieces : lengths that cut the data section; the digest of each comes back.
    stated : checksum by tensor; a tensor that differs is an error that names it.

    Raises ModelError naming the file and the tensor.
    """
    source = container.path / name
    header = container.headers[name]
    file_hash, cuts, tensors = hashlib.sha256(), _Cuts(pieces), {}
    by_place = sorted(header.tensors.values(), key=lambda place: place.offset)
    with open(source, "rb", buffering=0) as file:
        file_hash.update(_read(file, header.data_offset, source))
        for place in by_place:
            tensor, tensor_hash, bad = container.tensors[place.name], hashlib.sha256(), None
            for n_bytes, scan in regions(tensor):
                data = _read(file, n_bytes, source)
                for digest in (file_hash, tensor_hash, cuts):
                    digest.update(data)
                bad = bad or scan(data)
                progress(n_bytes)
            tensors[place.name] = tensor_hash.hexdigest()
            if stated is not None and stated.get(place.name) != tensors[place.name]:
                raise ModelError(f"{source}: tensor {place.name} is damaged: its sha256 is not the one in coli.json")
            if bad:
                raise ModelError(f"{source}: tensor {place.name} holds {bad}")
    return Digests(file_hash.hexdigest(), tensors, cuts.digests)


def regions(tensor: StoredTensor) -> Iterator[tuple[int, Callable[[np.ndarray], str | None]]]:
    """Cut a tensor into parts of a few MB: (bytes, a scan that says what is wrong with such a part)."""
    layout = tensor.layout
    if isinstance(layout, SlabLayout):
        for _ in range(tensor.count):
            for part in (layout.gate, layout.up, layout.down):
                yield from _matrix_regions(part, part.total_bytes)
    elif isinstance(layout, MatrixLayout):
        yield from _matrix_regions(layout, tensor.place.n_bytes)
    else:
        yield tensor.place.n_bytes, lambda data: _scan_values(data, tensor.format)


def _matrix_regions(layout: MatrixLayout, total_bytes: int) -> Iterator[tuple[int, Callable[[np.ndarray], str | None]]]:
    format = FORMATS[layout.format]
    at_once = max(1, _CHUNK_BYTES // layout.block_bytes)
    for first in range(0, layout.n_blocks, at_once):
        n_blocks = min(at_once, layout.n_blocks - first)
        if format.is_blocks:
            yield (
                n_blocks * layout.block_bytes,
                lambda data, n=n_blocks: _scan_blocks(data, format.code, n, layout.n_groups),
            )
        else:
            yield n_blocks * layout.block_bytes, lambda data: _scan_values(data, layout.format)
    if total_bytes > layout.used_bytes:
        yield total_bytes - layout.used_bytes, lambda data: "padding that is not zero" if data.any() else None


def _scan_blocks(data: np.ndarray, code: int, n_blocks: int, n_groups: int) -> str | None:
    bad = quantize.first_bad_block(data, code, n_blocks, n_groups, 1)
    return None if bad < 0 else "a weight of -128 or a scale that is NaN or infinite"


def _scan_values(data: np.ndarray, format: str) -> str | None:
    values = data.view(np.float32 if format == "f32" else np.uint16)
    bad = quantize.first_nonfinite(values, FORMATS[format].code, 1)
    return None if bad < 0 else "a value that is NaN or infinite"


class _Cuts:
    """Digests of consecutive pieces of a stream that arrives in other portions."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = iter(lengths)
        self._left = next(self._lengths, 0)
        self._hash = hashlib.sha256()
        self.digests: list[str] = []

    def update(self, data: np.ndarray) -> None:
        view = memoryview(data)
        while len(view) and self._left:
            taken = min(len(view), self._left)
            self._hash.update(view[:taken])
            view, self._left = view[taken:], self._left - taken
            if not self._left:
                self.digests.append(self._hash.hexdigest())
                self._hash, self._left = hashlib.sha256(), next(self._lengths, 0)


def _read(file: BinaryIO, n_bytes: int, source: Path) -> np.ndarray:
    data = np.empty(n_bytes, np.uint8)
    view, filled = memoryview(data), 0
    try:
        while filled < n_bytes:
            got = file.readinto(view[filled:])
            if not got:
                raise ModelError(f"{source}: it ended {n_bytes - filled} bytes early while it was read")
            filled += got
    except OSError as error:
        raise ModelError(f"{source}: cannot be read: {error.strerror}") from None
    return data


def _read_small(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
