"""Writing a container as a stream that a kill cannot spoil and that goes on where it was.

The work is a list of tensors, each a run of *pieces* whose lengths are known beforehand and whose bytes are made when
their turn comes; the writer does not know from what (a checkpoint, or random numbers for ``coli synth``).
Everything happens in ``DST.partial``:

1. the files at their full length (a full disk shows before any work is done);
2. the pieces, in order; about every 2 % or 256 MB the files are flushed to disk and then a line is added to the
   journal: how many pieces are done, and the checksum of each.  A kill loses at most what came after that line;
3. every file read back (``verify``): the bytes are those that were made, and hold nothing that must not be there;
4. ``coli.json``, and only then the rename to DST.

So a folder called DST is whole, and nothing that is not whole has a manifest.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coli.container.header import DTYPE_BITS, make_header, tensor_bytes
from coli.container.manifest import MANIFEST_NAME, Manifest
from coli.container.reader import JOURNAL_NAME, Container
from coli.container.verify import for_each_file, read_back
from coli.errors import ModelError
from coli.files import replace_file, sync

PARTIAL_SUFFIX = ".partial"

# Where the data section of each file starts, so that a tensor's offset in the file is as aligned as in the section.
_DATA_ALIGN_BYTES = 4096
# A journal line, and the waiting for the disk that goes with it, every 2 % of the work, within these bounds.
_BATCH_SHARE = 0.02
_BATCH_LEAST_BYTES, _BATCH_MOST_BYTES = 256_000, 256_000_000
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}  # file systems that cannot promise room
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that is made at once: `make` returns a buffer of exactly `n_bytes`."""

    n_bytes: int
    make: Callable[[], np.ndarray | bytes]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write: its file, its safetensors dtype and shape, and the pieces that are its bytes in order."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        planned, needed = sum(piece.n_bytes for piece in self.pieces), tensor_bytes(self.dtype, self.shape)
        assert planned == needed, f"{self.name}: {planned} bytes planned, {needed} needed"


@dataclass(frozen=True)
class Written:
    """What ``write_container`` did.  resumed_pieces : how many of n_pieces an earlier run had finished."""

    path: Path
    n_bytes: int
    n_pieces: int
    resumed_pieces: int


def check_destination(dst: str | Path) -> Path:
    """The absolute path of a container to be; refused where something is there already.

    Raises ModelError naming the path.
    """
    path = Path(dst).expanduser().resolve()
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ModelError(f"{path}: exists and is not empty; choose another destination or remove it first")
        if not path.parent.is_dir():
            raise ModelError(f"{path.parent}: there is no such folder to write into")
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def write_container(
    dst: str | Path,
    tensors: Sequence[TensorPlan],
    extra_files: dict[str, bytes],
    manifest: Manifest,
    *,
    identity: dict[str, Any],
    note: Callable[[], Any] = lambda: None,
    restore: Callable[[Any], None] = lambda note: None,
    finish: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> Written:
    """Write a container to `dst`, or go on with what an interrupted call left in ``DST.partial``.

    Parameters
    ----------
    tensors : every tensor of the model, in any order.
    extra_files : name to content: config.json, the tokenizer's files.
    manifest : all but ``files``, which is made here.
    identity : JSON values that say what is converted and how; an unfinished conversion of another identity is
        refused.
    note, restore : what the maker of the pieces wants to remember over an interruption (JSON), asked for with each line
        of the journal and given back before the first piece is made.
    finish : last change to the manifest, when all pieces are made.
    progress : called with the bytes of each piece, done now or by an earlier run, and again as they are read back.

    Raises ModelError: the destination exists; another run is at work; the unfinished conversion is another one's; the
    disk is full (what is done stays, and the same call goes on from there).
    """
    dst = check_destination(dst)
    partial = dst.with_name(dst.name + PARTIAL_SUFFIX)
    work = _Work(partial, tensors, identity)
    journal = _Journal(partial, work.identity)
    try:
        if journal.is_new:
            work.preallocate()
            journal.begin()
        else:
            work.check()
            restore(journal.note)
        resumed = len(journal.digests)
        try:
            work.make_pieces(journal, note, progress)
        except ModelError:  # the source is at fault: another run would come to the same place
            shutil.rmtree(partial, ignore_errors=True)
            raise
        work.write_extra_files(extra_files)
        files = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in
                 extra_files.items()}  # fmt: skip
        made = replace(finish(manifest), files=files | {name: {"bytes": size} for name, size in work.sizes.items()})
        made = replace(made, files=files | work.read_back(made, journal.digests, progress))
        manifest_path = partial / MANIFEST_NAME
        data = json.dumps(made.to_dict(), indent=1).encode() + b"\n"
        replace_file(manifest_path, data, manifest_path.with_name(MANIFEST_NAME + ".tmp"))
        os.rename(partial, dst)
        sync(dst.parent)
        (dst / JOURNAL_NAME).unlink()
    except OSError as error:
        where = error.filename or partial
        if error.errno not in _DISK_FULL:
            raise ModelError(f"{where}: cannot be written: {error.strerror}") from None
        if journal.is_new and not journal.begun:  # nothing to go on from: give the space back
            shutil.rmtree(partial, ignore_errors=True)
            kept = "nothing was kept"
        else:
            kept = (
                f"{partial} keeps {len(journal.digests)} of {work.n_pieces} parts; the same command goes on from there"
            )
        raise ModelError(
            f"{where}: {error.strerror}; {sum(work.sizes.values()):,} bytes are needed in all ({kept})"
        ) from None
    finally:
        journal.close()
        work.close()
    return Written(dst, sum(work.sizes.values()), work.n_pieces, resumed)


def _in_file_order(tensors: Sequence[TensorPlan]) -> list[TensorPlan]:
    """What is mapped in place first (U8, multiples of 256 bytes), then by falling element size: aligned, no holes."""
    return sorted(tensors, key=lambda tensor: (tensor.dtype != "U8", -DTYPE_BITS[tensor.dtype]))


class _Work:
    """The files of one container to be: their layout, and the pieces in the order in which they are made."""

    def __init__(self, partial: Path, tensors: Sequence[TensorPlan], identity: dict[str, Any]) -> None:
        self.partial = partial
        by_file: dict[str, list[TensorPlan]] = {}
        for tensor in tensors:
            by_file.setdefault(tensor.file, []).append(tensor)
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.pieces: dict[str, list[tuple[Piece, int]]] = {}  # file: (piece, offset in the file)
        layout = hashlib.sha256()
        for file, found in sorted(by_file.items()):
            ordered = _in_file_order(found)
            self.headers[file] = make_header([(t.name, t.dtype, t.shape) for t in ordered], _DATA_ALIGN_BYTES)
            offset, placed = len(self.headers[file]), []
            for piece in (piece for tensor in ordered for piece in tensor.pieces):
                placed.append((piece, offset))
                offset += piece.n_bytes
            self.pieces[file], self.sizes[file] = placed, offset
            layout.update(self.headers[file] + repr([piece.n_bytes for piece, _ in placed]).encode())
        self.n_pieces = sum(map(len, self.pieces.values()))
        self.identity = identity | {"layout": layout.hexdigest()}
        self._open: dict[str, int] = {}

    def preallocate(self) -> None:
        """Create every file at its full length, so that a full disk is known before the work is done."""
        ours = {JOURNAL_NAME, *self.headers}
        for name in os.listdir(self.partial):
            if name not in ours:
                (self.partial / JOURNAL_NAME).unlink()
                raise ModelError(f"{self.partial / name}: in the way, and not of a conversion; remove {self.partial}")
        for file, size in self.sizes.items():
            fd = os.open(self.partial / file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.ftruncate(fd, size)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
            finally:
                os.close(fd)
        sync(self.partial)

    def check(self) -> None:
        """That what an earlier run left has the files that this one would have made."""
        for file, size in self.sizes.items():
            path = self.partial / file
            if not path.is_file() or path.stat().st_size != size:
                raise ModelError(f"{path}: not as the interrupted run left it; remove {self.partial} to start anew")

    def make_pieces(self, journal: _Journal, note: Callable[[], Any], progress: Callable[[int], None]) -> None:
        """Make and write what the journal does not know to be done, a batch at a time."""
        batch_bytes = min(max(_BATCH_SHARE * sum(self.sizes.values()), _BATCH_LEAST_BYTES), _BATCH_MOST_BYTES)
        done, number, fresh_bytes, fresh = len(journal.digests), 0, 0, []

        def flush() -> None:
            # Data before journal: a line of the journal never speaks of bytes that a power cut could still lose.
            self._sync()
            journal.add(fresh, note())
            fresh.clear()

        for file, pieces in self.pieces.items():
            _write_all(self._fd(file), self.headers[file], 0)
            for piece, offset in pieces:
                number += 1
                if number > done:
                    data = memoryview(piece.make()).cast("B")
                    assert len(data) == piece.n_bytes, f"{file}: a piece of {len(data)} bytes, {piece.n_bytes} planned"
                    _write_all(self._fd(file), data, offset)
                    fresh.append(hashlib.sha256(data).hexdigest())
                    fresh_bytes += piece.n_bytes
                progress(piece.n_bytes)
                if fresh_bytes >= batch_bytes:
                    flush()
                    fresh_bytes = 0
        flush()

    def write_extra_files(self, extra_files: dict[str, bytes]) -> None:
        for name, data in extra_files.items():
            with open(self.partial / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def read_back(
        self, manifest: Manifest, digests: list[str], progress: Callable[[int], None]
    ) -> dict[str, dict[str, Any]]:
        """Open the finished files as a container and read them from end to end; returns the manifest's entries."""
        expected = iter(digests)
        of_file = {file: [next(expected) for _ in pieces] for file, pieces in self.pieces.items()}

        with Container.open_as(self.partial, manifest) as container:

            def check(file: str) -> dict[str, Any]:
                lengths = [piece.n_bytes for piece, _ in self.pieces[file]]
                found = read_back(container, file, pieces=lengths, progress=progress)
                if found.pieces != of_file[file]:
                    raise ModelError(
                        f"{self.partial / file}: reads back otherwise than it was written: the disk or the memory of "
                        f"this machine is at fault; remove {self.partial} and convert again"
                    )
                return {"bytes": self.sizes[file], "sha256": found.file, "tensors": found.tensors}

            return for_each_file(check, self.headers)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def _fd(self, file: str) -> int:
        """The file, open until what was written to it has been synced."""
        if file not in self._open:
            self._open[file] = os.open(self.partial / file, os.O_RDWR)
        return self._open[file]

    def _sync(self) -> None:
        for fd in self._open.values():
            os.fsync(fd)
        self.close()


class _Journal:
    """``DST.partial/journal.jsonl``: first the identity, then a line a batch.  Its lock keeps a second run out."""

    def __init__(self, partial: Path, identity: dict[str, Any]) -> None:
        self._partial = partial
        self._identity = identity
        self.digests: list[str] = []
        self.note: Any = None
        self.begun = False
        path = partial / JOURNAL_NAME
        try:
            partial.mkdir(exist_ok=True)
            self._file = open(path, "a+b")  # held, and with it the lock, until close()
        except OSError as error:
            raise ModelError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ModelError(f"{partial}: another coli convert is at work on it") from None
            if isinstance(error, OSError):
                raise ModelError(f"{path}: cannot be locked or read: {error.strerror}") from None
            if isinstance(error, (ValueError, KeyError, TypeError, AttributeError)):
                raise ModelError(f"{path}: damaged; remove {partial} to start anew") from None
            raise

    @property
    def is_new(self) -> bool:
        """Whether there is nothing to go on from."""
        return not self._found_identity

    def _read(self) -> None:
        self._file.seek(0)
        lines, whole_bytes = [], 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # the line that a kill cut short
            lines.append(json.loads(line))
            whole_bytes += len(line)
        self._file.truncate(whole_bytes)
        self._found_identity = bool(lines)
        if not lines:
            return
        differing = sorted(key for key in self._identity | lines[0] if self._identity.get(key) != lines[0].get(key))
        if differing:
            raise ModelError(
                f"{self._partial}: holds an unfinished conversion that differs in {', '.join(differing)}; "
                "convert as then to finish it, or remove that folder to start anew"
            )
        # A manifest is only ever beside finished files.
        (self._partial / MANIFEST_NAME).unlink(missing_ok=True)
        for line in lines[1:]:
            self.digests += line["done"]
            self.note = line["note"]

    def begin(self) -> None:
        self._append(self._identity)
        self.begun = True

    def add(self, digests: list[str], note: Any) -> None:
        self._append({"done": digests, "note": note})
        self.digests += digests

    def _append(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
