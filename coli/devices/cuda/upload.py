"""Container bytes into the arena: host memory -> two pinned buffers in turn -> the card.

A copy from pageable memory runs at a seventh of the link's speed, and mapped files are pageable.  While one buffer
crosses the bus the host fills the other; a call returns when its last piece is on its way.
"""

from __future__ import annotations

from threading import Lock

import numpy as np

from coli.devices.cuda.context import Context

PIECE_BYTES = 4 << 20  # 80 us on a PCIe 5 x16 link: long against a launch, short against a matrix


class Uploader:
    """Two pinned buffers and a stream.  Calls may come from any thread, one at a time."""

    def __init__(self, context: Context, what: str) -> None:
        self._context = context
        self._stream = context.stream()
        self._buffers = [context.pin(PIECE_BYTES, f"{what} staging") for _ in range(2)]
        self._events = [context.event() for _ in range(2)]
        self._turn = 0
        self._pending = False
        self._lock = Lock()

    def copy(self, to: int, data: np.ndarray) -> None:
        """Copy uint8 bytes to a device address.  The caller's memory is free again when this returns."""
        with self._lock:
            self._context.set_current()
            for at in range(0, data.size, PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                buffer, event = self._buffers[self._turn], self._events[self._turn]
                self._context.wait_event(event)  # at once where it was never recorded
                np.copyto(buffer.array[: piece.size], piece)
                self._context.copy_in(to + at, buffer.address, piece.size, self._stream)
                self._context.record(event, self._stream)
                self._turn ^= 1
                self._pending = True

    def finish(self) -> None:
        """Wait until everything that was copied is on the card."""
        if self._pending:
            with self._lock:
                self._context.set_current()
                self._context.synchronize(self._stream)
                self._pending = False

    def close(self) -> None:
        """Give the buffers back."""
        for event in self._events:
            self._context.free_event(event)
        for buffer in self._buffers:
            self._context.unpin(buffer)
        self._context.free_stream(self._stream)
