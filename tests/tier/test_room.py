"""coli/tier/room.py: how much is given back when the memory gets short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coli.tier.room import bytes_to_give_back, slots_to_keep

MIB = 1 << 20


def test_reserve_may_be_used_by_half():
    """Small ups and downs move nothing; below half, all of the reserve is restored."""
    assert 0 == bytes_to_give_back(600 * MIB, 512 * MIB)
    assert 0 == bytes_to_give_back(256 * MIB, 512 * MIB)
    assert 412 * MIB == bytes_to_give_back(100 * MIB, 512 * MIB)
    assert 0 == bytes_to_give_back(0, 0)


@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 400), st.integers(1, 200_000))
def test_whole_segments_of_at_least_the_missing_bytes_are_freed(n_slots, slot_bytes, segment_bytes, missing):
    """What is behind the kept slots, in whole segments, is enough; and no segment more than that is emptied."""
    kept = slots_to_keep(n_slots, slot_bytes, segment_bytes, missing)
    assert 0 <= kept <= n_slots
    total = n_slots * slot_bytes
    first_free = -(-kept * slot_bytes // segment_bytes) * segment_bytes  # where the first freed segment begins
    assert kept == 0 or total - first_free >= missing
    one_less = first_free + segment_bytes
    assert total - one_less < missing or kept + 1 > n_slots or (kept + 1) * slot_bytes > one_less


def test_nothing_missing_keeps_all():
    """No segment is given back for nothing."""
    assert 7 == slots_to_keep(7, 10, 40, 0)
    assert 0 == slots_to_keep(7, 10, 40, 1000)
