"""A device as the tier sees it: what it is asked for, what is under way on it, and how that went."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from coli.devices.base import Device, DeviceError
from coli.tier.warmstart import Upload


@dataclass(eq=False, slots=True)
class Group:
    """What one device computes of a layer: contribution i is expert rank ranks[i] of row rows[i].

    index : of the device.   slots : int32 (n,).   rows, ranks : int64 (n,).   ticket : None until it is issued.
    """

    device: Device
    index: int
    layer: int
    slots: np.ndarray
    rows: np.ndarray
    ranks: np.ndarray
    ticket: Any = None


class Card:
    """One device, its uploader thread and its counters.

    live : it is still asked.   accepts : uploads too; False after too many failed.
    keep_free_bytes : memory of the device that should stay free while it runs; 0 where nobody looks.
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
        self.on_the_way: deque[tuple[Upload, Future[float]]] = deque()
        self.uploader = ThreadPoolExecutor(1, f"coli-upload-{index}", roam)
        self._seat = getattr(device, "seat", None)  # a device with a table of its own has it

    @property
    def takes_uploads(self) -> bool:
        """Whether an upload may start: one round at a time, so they never queue up."""
        return self.live and self.accepts and not self.on_the_way

    def send(self, upload: Upload, slab: np.ndarray) -> None:
        """Start an upload; it ends on the uploader's thread."""
        self.on_the_way.append((upload, self.uploader.submit(self._write, upload.slot, slab)))

    def _write(self, slot: int, slab: np.ndarray) -> float:
        start = time.perf_counter()
        self.device.write_slot(slot, slab)
        return time.perf_counter() - start

    def seat(self, layer: int, expert: int, slot: int | None) -> DeviceError | None:
        """Tell the device who is in a slot, or (None) that an expert is in none.  The error where it would not hear."""
        if self._seat is not None:
            try:
                self._seat(layer, expert, slot)
            except DeviceError as error:
                return error
        return None

    def slots_in_use(self) -> np.ndarray:
        """Slots that open groups read: int32."""
        return np.concatenate([group.slots for group in self.open] or [np.empty(0, np.int32)])


def roam() -> None:
    """Let a helper thread run wherever the process may: it must not inherit the one core of a pinned engine thread."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
