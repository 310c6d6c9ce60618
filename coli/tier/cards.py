"""A device as the tier sees it: what it is asked for, what is under way on it, and how that went."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from coli.devices.base import Device, DeviceError
from coli.threads.side import SideThread
from coli.tier.warmstart import Upload


@dataclass(eq=False, slots=True)
class Group:
    """What one device computes of a layer: contribution i is expert rank ranks[i] of row rows[i].

    index : of the device.   slots, rows, ranks : ``array('i')`` of equal length, row by row in rank order.
    """

    device: Device
    index: int
    layer: int
    slots: array
    rows: array
    ranks: array
    ticket: Any = None


class Card:
    """One device, its uploader thread and its counters.

    live : it is still asked.   accepts : uploads too; False after too many failed.
    keep_free_bytes : memory of the device that should stay free while it runs; 0 where nobody looks.
    on_the_way : uploads that were sent, in their order.   ended : what became of the first of them, see `next_ended`.
    """

    def __init__(self, index: int, device: Device, n_slots: int, keep_free_bytes: int) -> None:
        self.index = index
        self.label = f"device {index} ({device.name})"
        self.device = device
        self.n_slots = n_slots
        self.keep_free_bytes = keep_free_bytes
        self.live = self.accepts = True
        self.failed_uploads = self.failed_uploads_in_a_row = 0
        self.failed_groups = self.failed_groups_in_a_row = 0
        self.hits = self.uploads = self.swaps = 0
        self.open: list[Group] = []
        self.on_the_way: deque[Upload] = deque()
        self.uploader = SideThread(f"coli-upload-{index}")
        self.ended: SimpleQueue[float | BaseException] = SimpleQueue()
        self._seat = getattr(device, "seat", None)  # a device with a table of its own has it

    def send(self, upload: Upload, slab_of: Callable[[int], np.ndarray]) -> None:
        """Start an upload; it ends on the uploader's thread.  slab_of : of an expert's key.

        Raises DeviceError where there is no such thread to be had; nothing was started then.
        """
        try:
            self.uploader.do(self._write, upload, slab_of)
        except RuntimeError as error:
            raise DeviceError(f"no thread for it: {error}", "launch") from None
        self.on_the_way.append(upload)

    def _write(self, upload: Upload, slab_of: Callable[[int], np.ndarray]) -> None:
        start = time.perf_counter()
        try:
            self.device.write_slot(upload.slot, slab_of(upload.key))
        except BaseException as error:  # whatever it is, the engine's thread must see it
            self.ended.put(error)
        else:
            self.ended.put(time.perf_counter() - start)

    def next_ended(self) -> tuple[Upload, float | BaseException]:
        """The next upload that ends, waited for: with the seconds that it took, or what went wrong."""
        outcome = self.ended.get()
        return self.on_the_way.popleft(), outcome

    def seat(self, layer: int, expert: int, slot: int | None) -> DeviceError | None:
        """Tell the device who is in a slot, or (None) that an expert is in none.  The error where it would not hear."""
        if self._seat is not None:
            try:
                self._seat(layer, expert, slot)
            except DeviceError as error:
                return error
        return None

    def is_read(self, slot: int) -> bool:
        """Whether an open group reads a slot."""
        return any(slot in group.slots for group in self.open)
