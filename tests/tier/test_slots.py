"""coli/tier/slots.py: free + reserved + residents are all the slots, always."""

from __future__ import annotations

import pytest

from coli.tier.slots import FREE, RESERVED, SlotTable


def counts(table):
    return table.n_free, table.n_reserved, table.n_residents


def test_slot_goes_from_free_through_reserved_to_resident():
    """A slot is reserved before its upload and holds an expert only after it."""
    table = SlotTable(3)
    assert (3, 0, 0) == counts(table)
    slot = table.reserve()
    assert (0, RESERVED) == (slot, table.owner[0])
    assert (2, 1, 0) == counts(table)
    table.publish(slot, 17)
    assert (2, 0, 1) == counts(table)
    assert [17] == table.residents().tolist()


def test_swap_keeps_the_number_of_slots():
    """vacate and publish exchange the owner and nothing else."""
    table = SlotTable(1)
    table.publish(table.reserve(), 1)
    table.vacate(0)
    assert (0, 1, 0) == counts(table)
    assert [] == table.residents().tolist()
    table.publish(0, 2)
    assert (0, 0, 1) == counts(table)


def test_failed_upload_frees_its_slot():
    """A released slot can be reserved again."""
    table = SlotTable(1)
    table.release(table.reserve())
    assert FREE == table.owner[0]
    assert 0 == table.reserve()
    assert table.reserve() is None


@pytest.mark.parametrize("wrong", ["publish", "vacate", "release"])
def test_step_out_of_turn_is_an_assertion_error(wrong):
    """A free slot can be neither published, nor vacated, nor released."""
    table = SlotTable(1)
    with pytest.raises(AssertionError):
        table.publish(0, 5) if wrong == "publish" else getattr(table, wrong)(0)


def test_slots_come_and_go_at_the_end():
    """Those that stay keep their owners; new ones are free, and the lowest free number is still taken first."""
    table = SlotTable(4)
    for slot in (0, 1):
        table.reserve()
        table.publish(slot, 10 + slot)
    table.resize(2)
    assert (2, 0, 2) == (table.n_slots, table.n_free, table.n_residents)
    table.resize(5)
    assert ([10, 11, FREE, FREE, FREE], 3) == (table.owner.tolist(), table.n_free)
    assert 2 == table.reserve()


@pytest.mark.parametrize("state", ["resident", "reserved"])
def test_slot_that_is_not_free_cannot_go(state):
    """Whoever is there has to leave first."""
    table = SlotTable(3)
    table.reserve()
    if state == "resident":
        table.publish(0, 1)
    with pytest.raises(AssertionError, match="1 are not free"):
        table.resize(0)
