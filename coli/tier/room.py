"""When others take a device's memory: how much of it the tier gives back.  Pure numbers.

Slots lie in segments, which a device can free one by one from the end: a slot in the middle frees nothing.
"""

from __future__ import annotations

CHECK_EVERY_S = 5.0  # asking a driver takes microseconds; whoever needs the memory has waited longer for its start


def bytes_to_give_back(free_bytes: int, keep_free_bytes: int) -> int:
    """What is missing of the memory that should stay free; nothing as long as half of it is there.

    Half, for the reserve is there to be used: by a window that opens, by one more sequence's keys and values.
    """
    return keep_free_bytes - free_bytes if free_bytes < keep_free_bytes // 2 else 0


def slots_to_keep(n_slots: int, slot_bytes: int, segment_bytes: int, give_back_bytes: int) -> int:
    """How many slots stay when whole segments of at least give_back_bytes are freed: 0 where that is all of them.

    slot_bytes : from one slot to the next.   Segments begin at multiples of segment_bytes from slot 0 on.
    """
    kept_bytes = max(0, n_slots * slot_bytes - give_back_bytes) // segment_bytes * segment_bytes
    return min(n_slots, kept_bytes // slot_bytes) if give_back_bytes > 0 else n_slots
