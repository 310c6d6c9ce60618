"""coli/tier/residency.py: one table of who is where, and the groups that a routing makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.tier.residency import Residency

LAYERS, EXPERTS = 2, 6


def filled(places, n_devices=3):
    """places : for each key, the device that it is put on, or None."""
    table = Residency(LAYERS, EXPERTS, [LAYERS * EXPERTS] * n_devices)
    for key, device in enumerate(places):
        if device is not None:
            table.publish(device, table.tables[device].reserve(), key)
    return table


def listed(groups):
    return [(g.device, g.slots.tolist(), g.rows.tolist(), g.ranks.tolist()) for g in groups]


@given(
    st.lists(st.sampled_from([None, 0, 1, 2]), min_size=12, max_size=12),
    st.lists(st.permutations(range(EXPERTS)).map(lambda p: p[:4]), min_size=1, max_size=4),
    st.integers(0, LAYERS - 1),
)
def test_groups_are_the_routing_of_the_residents(places, rows, layer):
    """Each resident rank is in the group of its device with its slot, row by row; the others are in none."""
    table = filled(places)
    expected = {}
    for row, experts in enumerate(rows):
        for rank, expert in enumerate(experts):
            device = places[layer * EXPERTS + expert]
            if device is not None:
                slots, its_rows, ranks = expected.setdefault(device, ([], [], []))
                slots.append(table.tables[device].owner.tolist().index(layer * EXPERTS + expert))
                its_rows.append(row)
                ranks.append(rank)
    found = listed(table.route(layer, np.array(rows, np.int32)))
    assert [(device, *expected[device]) for device in sorted(expected)] == found


@given(
    st.lists(st.sampled_from([None, 0, 1]), min_size=12, max_size=12),
    st.permutations(range(EXPERTS)).map(lambda p: p[:4]),
)
def test_one_row_is_routed_like_many(places, experts):
    """The short way for decode finds what the table finds."""
    table = filled(places, 2)
    one = table.route(1, np.array([experts], np.int32))
    many = table.route(1, np.array([experts, experts], np.int32))
    for a, b in zip(one, many, strict=True):
        half = len(b.slots) // 2
        assert (a.device, a.slots.dtype, a.rows.dtype) == (b.device, b.slots.dtype, b.rows.dtype)
        for short, long in zip(a[1:], b[1:], strict=True):
            assert short.tolist() == long[:half].tolist()


def test_expert_leaves_and_another_takes_its_slot():
    """vacate hides the victim at once; the newcomer is found only when it is published."""
    table = filled([0, None], 1)
    slot = table.vacate(0)
    assert [] == table.route(0, np.array([[0, 1]], np.int32))
    table.publish(0, slot, 1)
    assert [(0, [slot], [0], [1])] == listed(table.route(0, np.array([[0, 1]], np.int32)))
    assert [False, True] == table.is_resident(np.array([0, 1])).tolist()


def test_dropped_device_leaves_nothing_behind():
    """Its experts are the CPU's, the others' stay."""
    table = filled([0, 1, 0, 1], 2)
    assert 2 == table.drop_device(0)
    assert [(1, [0, 1], [0, 0], [1, 3])] == listed(table.route(0, np.array([[0, 1, 2, 3]], np.int32)))
    assert (2, 0) == (table.n_residents, table.tables[0].n_slots)


def test_expert_on_two_devices_is_an_assertion_error():
    """There is one home, so a second copy is a bug."""
    table = filled([0], 2)
    with pytest.raises(AssertionError, match="two devices"):
        table.publish(1, table.tables[1].reserve(), 0)
