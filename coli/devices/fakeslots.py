"""The expert slots of a fake device: their bytes, and who writes, reads and is seated in them.

What a real card would let pass and answer with garbage (a slot that nobody wrote, one that is overwritten while it is
read) is an AssertionError here.  The device's lock is held around every call.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coli.container.layout import round_up
from coli.devices.base import SlabSpec
from coli.devices.fakemath import require

POISON = 0xA5  # what freed memory holds: finite in every number format, and nobody's weights


def stride_bytes(slab: SlabSpec | None) -> int:
    """Bytes from one slot to the next; 0 for slots of no shape."""
    return round_up(slab.slab_bytes) if slab is not None else 0


class Slots:
    """The slots of one arena.

    own : uint8, the arena's part for them.   slab : the shape of an expert; None where there are no slots.

    seats : the slot of each (layer, expert) that is seated.
    """

    def __init__(self, own: np.ndarray, slab: SlabSpec | None) -> None:
        self.slab = slab
        self.stride = stride_bytes(slab)
        self.seats: dict[tuple[int, int], int] = {}
        self._seated: dict[int, tuple[int, int]] = {}  # the same by slot
        self._own = own
        self._more = np.empty(0, np.uint8)  # behind those of the arena
        self._given_back_bytes = 0  # of the arena's end
        n = own.size // self.stride if self.stride else 0
        self._state = ["empty"] * n  # "empty", "writing" or "written"
        self._readers = [0] * n  # open tickets that read it

    def __len__(self) -> int:
        return len(self._state)

    @property
    def beyond_arena_bytes(self) -> int:
        """What they take beyond the arena's part; negative where some of that was given back."""
        return self._more.size - self._given_back_bytes

    def bytes_of(self, slot: int) -> np.ndarray:
        """uint8, a view as long as the stride."""
        start = slot * self.stride
        if start >= self._own.size:
            start -= self._own.size
            return self._more[start : start + self.stride]
        return self._own[start : start + self.stride]

    def state(self, slot: int) -> str:
        """Whether it is "empty", "writing" or "written"."""
        self.check(slot)
        return self._state[slot]

    def check(self, slot: int) -> None:
        """There is such a slot."""
        require(0 <= slot < len(self), f"slot {slot} of {len(self)}")

    def check_written(self, slots: Iterable[int]) -> None:
        """They may be read."""
        for slot in slots:
            require(self.state(slot) == "written", f"slot {slot} is read; it is {self._state[slot]}")

    # ---- writing ---------------------------------------------------------------------------------------

    def begin_write(self, slot: int, data: np.ndarray) -> np.ndarray:
        """The bytes to copy a slab to; nobody may read it before `end_write`."""
        self.check(slot)
        require(
            data.dtype == np.uint8 and data.shape == (self.slab.slab_bytes,),
            f"slot {slot}: data is {data.dtype} {data.shape}, not uint8 ({self.slab.slab_bytes},)",
        )
        require(self._readers[slot] == 0, f"slot {slot} is written under an open ticket")
        require(self._state[slot] != "writing", f"slot {slot} is written twice at once")
        require(slot not in self._seated, f"slot {slot} is written while an expert is seated in it")
        self._state[slot] = "writing"
        return self.bytes_of(slot)

    def end_write(self, slot: int) -> None:
        """The slab is there."""
        self._state[slot] = "written"

    def clear(self, slot: int) -> None:
        """It holds nobody any more: it is overwritten."""
        self.check(slot)
        require(self._readers[slot] == 0, f"slot {slot} is cleared under an open ticket")
        require(self._state[slot] != "writing", f"slot {slot} is cleared while it is written")
        require(slot not in self._seated, f"slot {slot} is cleared while an expert is seated in it")
        self._state[slot] = "empty"
        self.bytes_of(slot)[:] = POISON

    # ---- reading ---------------------------------------------------------------------------------------

    def begin_read(self, slots: Iterable[int]) -> None:
        """They are read until `end_read`, each as often as it is named."""
        slots = list(slots)
        self.check_written(slots)
        for slot in slots:
            self._readers[slot] += 1

    def end_read(self, slots: Iterable[int]) -> None:
        """One that read them has finished."""
        for slot in slots:
            self._readers[slot] -= 1

    def seat(self, layer: int, expert: int, slot: int | None) -> None:
        """This expert is in this slot, or in none."""
        self._seated.pop(self.seats.pop((layer, expert), None), None)
        if slot is None:
            return
        self.check(slot)
        require(self._state[slot] == "written", f"slot {slot} is seated; it is {self._state[slot]}")
        require(slot not in self._seated, f"slot {slot} is seated for {layer, expert} and for {self._seated.get(slot)}")
        self.seats[layer, expert] = slot
        self._seated[slot] = layer, expert

    # ---- more and fewer --------------------------------------------------------------------------------

    def bytes_for(self, n: int, segment_slots: int) -> int:
        """What having ``n`` slots takes beyond what they take now; those of the arena go in whole segments."""
        more_bytes, given_back_bytes = self._sizes(n, segment_slots)
        return more_bytes - given_back_bytes - self.beyond_arena_bytes

    def resize(self, n: int, segment_slots: int) -> None:
        """Have the first ``n`` slots.  Those that go are overwritten."""
        for slot in range(n, len(self)):
            in_use = self._readers[slot] or self._state[slot] == "writing" or slot in self._seated
            require(not in_use, f"slot {slot} is given back while it is in use")
            self.bytes_of(slot)[:] = POISON
        self._state = (self._state + ["empty"] * n)[:n]
        self._readers = (self._readers + [0] * n)[:n]
        more_bytes, self._given_back_bytes = self._sizes(n, segment_slots)
        stay = self._more[:more_bytes]
        self._more = np.concatenate([stay, np.zeros(more_bytes - stay.size, np.uint8)])

    def _sizes(self, n: int, segment_slots: int) -> tuple[int, int]:
        """Bytes behind the arena, and bytes of the arena's end that nobody needs, with ``n`` slots."""
        n_own = self._own.size // self.stride
        kept = min(n_own, -(-n // segment_slots) * segment_slots)  # of the arena's, in whole segments
        return max(0, n - n_own) * self.stride, (n_own - kept) * self.stride
