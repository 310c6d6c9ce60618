"""One stream with what it works on: staging in pinned memory, scratch on the card, and the flag that says "done".

Dense work and expert work have a lane each, so an expert group can be under way while a projection is asked for, and
neither waits for, nor writes over, the other.  Within a lane calls follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from coli.devices.base import DeviceError
from coli.devices.cuda.context import Context, Pinned

_GROW = 1 << 16  # staging grows in these steps: pinning costs 0.4 ms a MB


class Lane:
    """A stream, its staging and its scratch.

    x, y, list : pinned areas for activations in, answers out and job lists; ``generation`` counts their moves, since a
    graph holds addresses.   scratch_at, scratch_bytes : device memory that a call may use as it likes.
    """

    def __init__(self, context: Context, what: str, scratch: tuple[int, int]) -> None:
        self.context = context
        self.what = what
        self.stream = context.stream()
        self._stream_address = int(self.stream)
        self.scratch_at, self.scratch_bytes = scratch
        self.generation = 0
        self.x: Pinned | None = None
        self.y: Pinned | None = None
        self.list: Pinned | None = None
        self._flag = context.pin(64, f"{what} flag")
        self._flag.array[:] = 0
        self._count_at = context.alloc(256, f"{what} counter")
        context.zero(self._count_at, 256)
        self._answered = 0  # answers that have been waited for, modulo 2^32

    def reserve(self, x_bytes: int, y_bytes: int, list_bytes: int = 0) -> None:
        """Make room in the staging.  Call only while nothing of this lane is under way."""
        for name, n_bytes in (("x", x_bytes), ("y", y_bytes), ("list", max(list_bytes, 64))):
            held: Pinned | None = getattr(self, name)
            if held is not None and held.n_bytes >= n_bytes:
                continue
            pinned = self.context.pin(-(-n_bytes // _GROW) * _GROW, f"{self.what} staging")
            if held is not None:
                self.context.unpin(held)
            setattr(self, name, pinned)
            self.generation += 1

    def raise_flag(self) -> None:
        """Launch what tells the host that everything launched so far is done."""
        self.context.launch("raise_flag", "", (1, 1), 1, 0, self.stream, self._count_at, self._flag.address, early=True)

    def put(self, rows: np.ndarray, stride: int, graph: int = 0) -> None:
        """Copy rows into the staging, ``stride`` floats apart, and launch a graph where one is given."""
        self._check(self.context.launcher.start(rows, self.x.address, stride, graph, self._stream_address))

    def issue(self, rows: np.ndarray, stride: int, graph: int, slots: np.ndarray, rows_of: np.ndarray, first_slot: int,
              slot_bytes: int, n_slots: int) -> None:  # fmt: skip
        """`put` with a job list of int32 slots and rows, made in place."""
        code = self.context.launcher.issue(rows, self.x.address, stride, graph, self._stream_address, slots, rows_of,
                                           first_slot, slot_bytes, n_slots, self.list.address)  # fmt: skip
        if code:
            self._check(code)

    def take(self, out: np.ndarray) -> None:
        """Wait for the one call under way, then copy its answer (T, n) out."""
        expected = (self._answered + 1) & 0xFFFFFFFF
        code = self.context.launcher.take(self._flag.address, expected, self._stream_address, self.y.address, out)
        if code:
            self._check(code)
        self._answered = expected

    def call(self, rows: np.ndarray, stride: int, graph: int, out: np.ndarray) -> None:
        """Copy rows in, launch a graph, wait, and copy the answer (T, n) out, all without the GIL."""
        expected = (self._answered + 1) & 0xFFFFFFFF
        code = self.context.launcher.call(rows, self.x.address, stride, graph, self._stream_address, self._flag.address,
                                          expected, self.y.address, out)  # fmt: skip
        if code:
            self._check(code)
        self._answered = expected

    def close(self) -> None:
        """Give staging and stream back.  Nothing may be under way."""
        for pinned in (self.x, self.y, self.list, self._flag):
            if pinned is not None:
                self.context.unpin(pinned)
        self.context.free(self._count_at)
        self.context.free_stream(self.stream)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Around several launches: where one fails, what was started is waited for, and the count is right again."""
        try:
            yield
        except DeviceError:
            self._settle()
            raise

    def _settle(self) -> None:
        """The count goes on from whatever was raised, or the next wait would be off by one."""
        if self.context.lost is None:
            self.context.synchronize(self.stream)
            self._answered = int(self._flag.array[:4].view(np.uint32)[0])

    def _check(self, code: int) -> None:
        if code != 0:
            error = self.context.error(code, self.what)
            self._settle()
            raise error
