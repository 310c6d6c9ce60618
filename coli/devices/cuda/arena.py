"""What lies where in a card's memory: residents from the bottom, then slots, then scratch; or slots apart.

Apart, slots are in memory of their own that can shrink and grow (`segments.SlotMemory`).

Numbers only.  Slots have one size, so a swap is an overwrite and nothing fragments; the bytes of a resident that was
given up come back with the next arena.
"""

from __future__ import annotations

from coli.container.layout import round_up
from coli.devices.base import DeviceError


class Arena:
    """The layout of ``n_bytes`` from ``address`` on.

    scratch : bytes for each lane, in order; ``scratch_at`` has their addresses.
    slots_apart : the slots are elsewhere.
    """

    def __init__(
        self, resident_bytes: int, slots: int, slab_bytes: int, scratch: tuple[int, ...], *, slots_apart: bool = False
    ) -> None:
        self.resident_bytes = round_up(resident_bytes)
        self.n_slots = slots
        self.slot_stride_bytes = round_up(slab_bytes)
        self._scratch = [round_up(n) for n in scratch]
        self._scratch_offset = self.resident_bytes + (0 if slots_apart else slots * self.slot_stride_bytes)
        self.n_bytes = self._scratch_offset + sum(self._scratch)
        self.used_bytes = 0
        self.address = self._slots_at = 0

    def place(self, address: int, slots_at: int | None = None) -> None:
        """The allocation starts here, and slots that are apart there."""
        self.address = address
        self._slots_at = address + self.resident_bytes if slots_at is None else slots_at

    def take(self, name: str, n_bytes: int) -> int:
        """Address of a new resident.  Raises DeviceError("out of memory") where the resident part is full."""
        if self.used_bytes + n_bytes > self.resident_bytes:
            left = self.resident_bytes - self.used_bytes
            raise DeviceError(
                f"{name} needs {n_bytes:,} bytes, {left:,} are left of the resident part", "out of memory"
            )
        at = self.address + self.used_bytes
        self.used_bytes = round_up(self.used_bytes + n_bytes)
        return at

    def slot(self, index: int) -> int:
        """Address of a slot."""
        if not 0 <= index < self.n_slots:
            raise IndexError(f"slot {index} of {self.n_slots}")
        return self._slots_at + index * self.slot_stride_bytes

    def scratch(self, lane: int) -> tuple[int, int]:
        """(address, bytes) of a lane's scratch."""
        return self.address + self._scratch_offset + sum(self._scratch[:lane]), self._scratch[lane]
