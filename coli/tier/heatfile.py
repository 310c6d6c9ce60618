"""The file that carries heat from run to run, shared by every process that runs the same model.

JSON: ``{"format": "coli heat", "version": 1, "model": ..., "layers", "experts", "top_k", "counts": [layer][expert]}``,
or the same without the first three, as other tools write it.  What is read is checked against the model to the last
count.  A save merges: under a lock it adds what this process counted to what the file holds by then, and replaces
the file whole, so processes that save at the same moment lose nothing and a crash leaves the old file.
A file that was not valid is somebody else's and is never overwritten.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coli.errors import RequestError
from coli.files import replace_file
from coli.log import logger

FORMAT = "coli heat"
VERSION = 1
MAX_COUNT = 2.0**53  # where float64 stops counting by ones; what is above was never counted
# What a file remembers: beyond so many tokens all counts shrink in proportion, so that new runs keep their say.  At 25
# tokens a second it is an hour and a half of decoding.
HISTORY_TOKENS = 1 << 17
_TURN_S = 10.0  # how long to wait for another process's save, which takes milliseconds; it may have been stopped in it


@dataclass(frozen=True)
class HeatShape:
    """What a heat file must be of.

    model : text that names the checkpoint, the same for each of its conversions (they share the router); None where
        it is not known, and then not compared.
    """

    layers: int
    experts: int
    top_k: int
    model: str | None = None


def read_heat(path: str | Path, shape: HeatShape) -> np.ndarray | None:
    """Counts [layer][expert] of a heat file: float64 (layers, experts); None where they are all zero.

    Raises RequestError naming the file and what is wrong with it.
    """
    counts = parse_heat(_read_bytes(Path(path), shape), shape, str(path))
    return counts if counts.any() else None


class HeatFile:
    """A model's heat on disk.

    counts : float64 (layers, experts) as they were at load; None for no heat (no file yet, all zeros, or not valid).
    """

    def __init__(self, path: str | Path, shape: HeatShape, *, by_hand: bool) -> None:
        """Read the file.  One that does not exist yet is made by the first `merge`.

        by_hand : the user named it for this run; otherwise it is from the environment or the usual place.
        Raises RequestError where it was named by hand and cannot be read or is not this model's heat.  Else that is one
        warning: the run starts cold and leaves the file alone.
        """
        self.path = Path(os.path.realpath(path))  # a rename onto a link would replace the link
        self.shape = shape
        self.counts: np.ndarray | None = None
        self.writable = True
        self._by_hand = by_hand
        try:
            if by_hand and not self.path.parent.is_dir():
                raise RequestError(f"heat {path}: the folder {self.path.parent} does not exist", param="heat")
            if os.path.lexists(self.path):
                self.counts = read_heat(self.path, shape)
        except RequestError as error:
            if by_hand:
                raise
            self.writable = False
            logger("tier").warning(f"{error}; going on without heat, and the file stays as it is")

    def merge(self, delta: np.ndarray) -> None:
        """Add counts (layers, experts) to what the file holds now.

        Does nothing for a file that was not valid.  Raises RequestError where it cannot be written, or has meanwhile
        become something else; it then stays as it is.
        """
        if not self.writable:
            return
        try:
            if not self._by_hand:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_name(f".{self.path.name}.lock"), self.path):
                counts = delta
                if os.path.lexists(self.path):
                    counts = delta + parse_heat(_read_bytes(self.path, self.shape), self.shape, str(self.path))
                tokens = counts.sum(axis=1).max() / self.shape.top_k
                if tokens > HISTORY_TOKENS:
                    counts = counts * (HISTORY_TOKENS / tokens)
                data = format_heat(counts, self.shape)
                replace_file(self.path, data, self.path.with_name(f".{self.path.name}.tmp"))
        except OSError as error:
            reason = error.strerror or error
            raise RequestError(f"heat {self.path}: cannot be written: {reason}", param="heat") from None


def parse_heat(data: bytes, shape: HeatShape, source: str) -> np.ndarray:
    """Counts of the bytes of a heat file: float64 (layers, experts).

    source : what the error calls it.   Raises RequestError for anything that is not this model's heat.
    """

    def fault(what: str) -> RequestError:
        return RequestError(f"heat {source}: {what}", param="heat")

    if not data.strip():
        raise fault("the file is empty; delete it to start a new one")
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise fault("not JSON, or cut off; expected a heat file of coli, or {layers, experts, top_k, counts}") from None
    if not isinstance(found, dict):
        raise fault("the top level is no object; expected {layers, experts, top_k, counts}")
    if "format" in found or "version" in found:
        stated = (found.get("format"), found.get("version"))
        if stated != (FORMAT, VERSION):
            raise fault(f"format and version are {_brief(stated)}; expected {(FORMAT, VERSION)}")
    for name in ("layers", "experts", "top_k"):
        value, expected = found.get(name), getattr(shape, name)
        if type(value) is not int or value != expected:
            raise fault(f"{name} is {_brief(value)}, the model has {expected}: it is another model's heat")
    if None not in (shape.model, found.get("model")) and found["model"] != shape.model:
        raise fault(f"it is the heat of model {_brief(found['model'])}, this is {shape.model!r}")
    return _checked_counts(found.get("counts"), shape, fault)


def _checked_counts(rows: Any, shape: HeatShape, fault: Any) -> np.ndarray:
    if not isinstance(rows, list) or len(rows) != shape.layers:
        n = f"{len(rows)} rows" if isinstance(rows, list) else _brief(rows)
        raise fault(f"counts is {n}; expected {shape.layers} lists, one a layer")
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != shape.experts:
            n = f"{len(row)} counts" if isinstance(row, list) else _brief(row)
            raise fault(f"counts of layer {layer} is {n}; expected {shape.experts}")
        for expert, count in enumerate(row):
            # type(), as True would count as 1; written so that a NaN fails
            if type(count) not in (int, float) or not 0 <= count <= MAX_COUNT:
                raise fault(f"layer {layer}, expert {expert}: the count is {_brief(count)}; expected 0 to 2**53")
    return np.array(rows, np.float64)


def format_heat(counts: np.ndarray, shape: HeatShape) -> bytes:
    """The bytes of a heat file; `parse_heat` reads them back (counts to a thousandth)."""
    rows = [[int(count) if count == int(count) else round(count, 3) for count in row] for row in counts.tolist()]
    head = {"format": FORMAT, "version": VERSION}
    if shape.model is not None:
        head["model"] = shape.model
    table = {"layers": shape.layers, "experts": shape.experts, "top_k": shape.top_k, "counts": rows}
    return (json.dumps({**head, **table}) + "\n").encode()


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_bytes(path: Path, shape: HeatShape) -> bytes:
    # 64 bytes a count hold any number and its indentation; more is no heat, however long it goes on
    limit_bytes = shape.layers * shape.experts * 64 + (1 << 16)
    try:
        # a pipe without a writer would wait for ever, so what is no file is refused before it is opened
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RequestError(f"heat {path}: not a file{' but a folder' if path.is_dir() else ''}", param="heat")
        with open(path, "rb") as file:
            data = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"heat {path}: cannot be read: {reason}", param="heat") from None
    if len(data) > limit_bytes:
        raise RequestError(
            f"heat {path}: more than {limit_bytes:,} bytes, which {shape.layers} x {shape.experts} counts cannot take",
            param="heat",
        )
    return data


@contextmanager
def _locked(lock_path: Path, path: Path) -> Iterator[None]:
    """Hold the lock of a heat file.  It is a file of its own, which stays: the heat file is replaced by each save."""
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + _TURN_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise RequestError(
                        f"heat {path}: another process has held {lock_path} for {_TURN_S:.0f} s", param="heat"
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(lock)  # gives the lock back
