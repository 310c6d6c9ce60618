"""coli/tier/residency.py: one table of who is where."""

from __future__ import annotations

import numpy as np
import pytest

from coli.tier.residency import Residency

LAYERS, EXPERTS = 2, 6


def filled(places, n_devices=3):
    """places : for each key, the device that it is put on, or None."""
    table = Residency(LAYERS, EXPERTS, [LAYERS * EXPERTS] * n_devices)
    for key, device in enumerate(places):
        if device is not None:
            table.publish(device, table.tables[device].reserve(), key)
    return table


def found(table, experts):
    """What a row of layer 0 finds: (device, slots, ranks) of each device."""
    top_idx = np.array([experts], np.int32)
    parts, left = table.routes.split(0, top_idx, np.empty((1, len(experts)), np.uint8))
    assert left == len(experts) - sum(len(ranks) for *_, ranks in parts)
    return [(device, slots.tolist(), ranks.tolist()) for device, slots, _, ranks in parts]


def test_expert_leaves_and_another_takes_its_slot():
    """vacate hides the victim at once; the newcomer is found only when it is published."""
    table = filled([0, None], 1)
    assert [(0, [0], [0])] == found(table, [0, 1])
    slot = table.vacate(0)
    assert [] == found(table, [0, 1])
    table.publish(0, slot, 1)
    assert [(0, [slot], [1])] == found(table, [0, 1])
    assert [False, True] == table.is_resident(np.array([0, 1])).tolist()


def test_dropped_device_leaves_nothing_behind():
    """Its experts are the CPU's, the others' stay."""
    table = filled([0, 1, 0, 1], 2)
    assert 2 == table.drop_device(0)
    assert [(1, [0, 1], [1, 3])] == found(table, [0, 1, 2, 3])
    assert (2, 0) == (table.n_residents, table.tables[0].n_slots)


def test_expert_on_two_devices_is_an_assertion_error():
    """There is one home, so a second copy is a bug."""
    table = filled([0], 2)
    with pytest.raises(AssertionError, match="two devices"):
        table.publish(1, table.tables[1].reserve(), 0)
