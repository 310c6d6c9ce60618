"""What the spans of a card share, since only one batch is under way at a time: stream, mailbox and scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coli.devices.base import DeviceError
from coli.devices.cuda.context import Context
from coli.devices.cuda.mailbox import Mailbox

if TYPE_CHECKING:
    from coli.devices.cuda.spanrun import SpanRun


class Workspace:
    """open : the run that is under way.   list_of : whose list lies in pinned memory, where somebody can go on with it.
    scratch : (address, bytes) of device memory, grown as batches need it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.scratch: tuple[int, int] = 0, 0
        self.open: SpanRun | None = None
        self.list_of: object = None
        self._moves = 0
        self.stream = context.stream()
        try:
            self.mailbox = Mailbox(context)
        except DeviceError:
            context.free_stream(self.stream)
            raise

    @property
    def generation(self) -> int:
        """Counts the moves of everything that graphs have addresses of."""
        return self._moves + self.mailbox.generation

    def reserve_scratch(self, n_bytes: int) -> None:
        """Scratch of at least so many bytes.  Nothing may be under way.

        Raises DeviceError("out of memory"); what there was before is there again then.
        """
        at, held = self.scratch
        if held >= n_bytes:
            return
        self._moves += 1
        self.scratch = 0, 0
        self.context.free(at)
        try:
            self.scratch = self.context.alloc(n_bytes, "scratch of whole layers"), n_bytes
        except DeviceError:
            if held:
                self.scratch = self.context.alloc(held, "scratch of whole layers"), held
            raise

    def close(self) -> None:
        """Give everything back; a run that is open is abandoned first.  Does nothing on a lost card."""
        if self.open is not None:
            self.open.abandon()
        if self.context.lost is None:
            self.context.synchronize(self.stream)
            self.mailbox.close()
            self.context.free(self.scratch[0])
            self.context.free_stream(self.stream)
