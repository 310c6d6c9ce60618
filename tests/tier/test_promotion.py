"""coli/tier/promotion.py: who changes places, and who does not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coli.tier.promotion import Promotion, choose_swaps


def swaps(heat, residents, candidates, n_free=0, **policy):
    heat = np.array(heat, np.float64)
    return choose_swaps(heat, np.array(residents, int), np.array(candidates, int), n_free, Promotion(**policy))


def test_hottest_newcomer_takes_the_coldest_residents_place():
    """The best pair comes first; equals stand by key."""
    assert [(3, 1), (4, 0)] == swaps([9, 1, 20, 50, 30, 30], residents=[0, 1, 2], candidates=[3, 4, 5], max_swaps=2)


def test_swap_needs_a_quarter_and_four_counts_more():
    """A newcomer just at the margin stays out, one above it comes in."""
    assert [] == swaps([16, 24], residents=[0], candidates=[1])
    assert [(1, 0)] == swaps([16, 24.5], residents=[0], candidates=[1])


def test_experts_of_equal_heat_do_not_swap():
    """Hysteresis: an even router moves nothing, cold or hot."""
    for level in (0, 3, 1000):
        assert [] == swaps([level] * 6, residents=[0, 1, 2], candidates=[3, 4, 5])


def test_free_slot_takes_a_newcomer_without_a_victim():
    """Free slots are filled before anybody leaves, and only by experts that are wanted."""
    assert [(4, None), (3, 0)] == swaps([1, 60, 60, 40, 50, 2], residents=[0, 1, 2], candidates=[3, 4, 5], n_free=1)
    assert [] == swaps([0, 4], residents=[], candidates=[0, 1], n_free=2)


def test_nobody_home_or_nobody_waiting_is_no_swap():
    """Empty sides answer with nothing."""
    assert [] == swaps([1, 9], residents=[], candidates=[0, 1])
    assert [] == swaps([1, 9], residents=[0, 1], candidates=[])


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40), st.data())
def test_swaps_are_distinct_and_always_gain(heat, data):
    """No expert moves twice, each newcomer is hotter than its victim, and a second look at the result swaps less."""
    n = data.draw(st.integers(0, len(heat)))
    keys = data.draw(st.permutations(range(len(heat))))
    residents, candidates = keys[:n], keys[n:]
    free = data.draw(st.integers(0, 3))
    found = swaps(heat, residents, candidates, free)
    moved = [k for pair in found for k in pair if k is not None]
    assert len(moved) == len(set(moved)) and len(found) <= 8
    for newcomer, victim in found:
        assert newcomer in candidates and (victim is None or victim in residents)
        assert heat[newcomer] > (1.25 * heat[victim] if victim is not None else 0) + 4
