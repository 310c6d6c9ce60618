"""Who holds which slot of one device: each slot is free, reserved for an upload, or the home of one expert.

Pure bookkeeping of numbers: no bytes, no device.  Invariant: free + reserved + residents == slots, so a swap (vacate,
then publish) can neither lose a slot nor make one.
"""

from __future__ import annotations

import numpy as np

FREE = -1
RESERVED = -2


class SlotTable:
    """The slots of one device.

    owner : int64 (slots,): the key of the expert in a slot, or FREE, or RESERVED.
    """

    def __init__(self, n_slots: int) -> None:
        self.owner = np.full(n_slots, FREE, np.int64)
        self._free = list(range(n_slots))[::-1]  # the lowest number is taken first
        self.n_reserved = 0

    @property
    def n_slots(self) -> int:
        """All slots."""
        return len(self.owner)

    @property
    def n_free(self) -> int:
        """Slots that anybody may reserve."""
        return len(self._free)

    @property
    def n_residents(self) -> int:
        """Experts that are here."""
        return self.n_slots - self.n_free - self.n_reserved

    def residents(self) -> np.ndarray:
        """Keys of the experts that are here: int64, by slot."""
        return self.owner[self.owner >= 0]

    def reserve(self) -> int | None:
        """Take a free slot for an upload; None where there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.owner[slot] = RESERVED
        self.n_reserved += 1
        return slot

    def publish(self, slot: int, key: int) -> None:
        """The upload into a reserved slot is complete."""
        assert self.owner[slot] == RESERVED, f"slot {slot} is published; its owner is {self.owner[slot]}"
        self.owner[slot] = key
        self.n_reserved -= 1

    def vacate(self, slot: int) -> None:
        """The expert in a slot leaves; the slot is reserved for whoever overwrites it."""
        assert self.owner[slot] >= 0, f"slot {slot} is vacated; its owner is {self.owner[slot]}"
        self.owner[slot] = RESERVED
        self.n_reserved += 1

    def release(self, slot: int) -> None:
        """The upload into a reserved slot will not come."""
        assert self.owner[slot] == RESERVED, f"slot {slot} is released; its owner is {self.owner[slot]}"
        self.owner[slot] = FREE
        self._free.append(slot)
        self.n_reserved -= 1

    def resize(self, n_slots: int) -> None:
        """Slots come or go at the end; those that go are free."""
        gone = self.owner[n_slots:]
        assert (gone == FREE).all(), f"of {n_slots} slots on, {np.count_nonzero(gone != FREE)} are not free"
        fresh = np.full(max(0, n_slots - self.n_slots), FREE, np.int64)
        self.owner = np.concatenate([self.owner[:n_slots], fresh])
        self._free = np.flatnonzero(self.owner == FREE)[::-1].tolist()
