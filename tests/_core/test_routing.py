"""coli/_core/routing.pyx: what plain numpy says of the same tables and choices; refusals that leave all as it was."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli._core import routing

LAYERS, EXPERTS, DEVICES = 3, 7, 4


def split_by_numpy(device, slot, layer, top_idx, skip):
    """The groups by boolean masks and fancy indexes."""
    where = device[layer].take(top_idx)
    found = []
    for number in range(DEVICES):
        rows, ranks = (where == number).nonzero()
        if len(rows) and number != skip:
            found.append((number, slot[layer].take(top_idx[rows, ranks]), rows, ranks))
    return found


@st.composite
def cases(draw):
    """(device, slot, table, top_idx): tables at random and what some rows chose in all layers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    device = rng.integers(-1, draw(st.integers(0, DEVICES)), (LAYERS, EXPERTS)).astype(np.int8)
    slot = rng.permutation(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS).astype(np.int32)
    rows, top_k = draw(st.sampled_from([1, 1, 2, 5, 40])), draw(st.integers(1, EXPERTS))
    top_idx = np.argsort(rng.random((LAYERS, rows, EXPERTS)), axis=2)[..., :top_k].astype(np.int32)
    return device, slot, routing.Table(device, slot, DEVICES), np.ascontiguousarray(top_idx)


@given(cases(), st.integers(0, LAYERS - 1))
def test_split_is_what_masks_find(case, layer):
    """Each resident rank is in the group of its device with its slot, row by row; the others are the CPU's."""
    device, slot, table, top_idx = case
    external = np.full(top_idx[layer].shape, 0xFF, np.uint8)
    parts, left = table.split(layer, top_idx[layer], external)
    expected = split_by_numpy(device, slot, layer, top_idx[layer], None)
    assert [(d, *(part.tolist() for part in rest)) for d, *rest in expected] == [
        (d, *(part.tolist() for part in rest)) for d, *rest in parts
    ]
    assert {"i"} >= {part.typecode for _, *rest in parts for part in rest}
    assert ((device[layer].take(top_idx[layer]) >= 0).astype(np.uint8) == external).all()
    assert (external == 0).sum() == left


@given(cases(), st.integers(0, LAYERS - 1), st.integers(-1, DEVICES - 1), st.data())
def test_ranks_that_are_taken_stay_so_and_a_skipped_device_is_given_nothing(case, layer, skip, data):
    """A rank that is taken is external and in no group; one that only the skipped device has is the CPU's."""
    device, slot, table, top_idx = case
    chosen = top_idx[layer]
    flags = data.draw(st.lists(st.booleans(), min_size=chosen.size, max_size=chosen.size))
    before = np.array(flags, np.uint8).reshape(chosen.shape)
    external = np.full(chosen.shape, 0xFF, np.uint8)
    parts, left = table.split(layer, chosen, external, skip, before)
    expected = before.copy()
    for number, slots, rows, ranks in split_by_numpy(device, slot, layer, chosen, skip):
        free = before[rows, ranks] == 0
        expected[rows[free], ranks[free]] = 1
        if free.any():
            mine = parts.pop(0)
            assert (number, slots[free].tolist()) == (mine[0], mine[1].tolist())
            assert (rows[free].tolist(), ranks[free].tolist()) == (mine[2].tolist(), mine[3].tolist())
    assert [] == parts
    assert (expected == external).all()
    assert (external == 0).sum() == left


@given(cases(), st.integers(0, DEVICES - 1), st.integers(0, LAYERS - 1))
def test_hits_residents_and_counts_are_sums_over_the_choices(case, number, first):
    """A token's hits on one device, those of any, and what each expert was chosen, from a layer on."""
    device, _, table, top_idx = case
    top_idx = top_idx[: LAYERS - first]
    layers = np.arange(first, LAYERS)[:, None, None]
    assert (device[layers, top_idx] == number).sum() == table.hits(first, top_idx, number)
    keys = array("i", [5])
    routing.add_keys(keys, first, top_idx, EXPERTS)
    expected = (top_idx + EXPERTS * layers).reshape(-1)
    assert [5, *expected.tolist()] == keys.tolist()
    by_layer = array("i")
    for layer, chosen in enumerate(top_idx):
        routing.add_keys(by_layer, first + layer, chosen, EXPERTS)
    assert keys[1:] == by_layer
    assert (device.reshape(-1)[expected] >= 0).sum() == table.residents(by_layer)
    counts = np.full((LAYERS, EXPERTS), 0.5)
    reference = counts.copy()
    np.add.at(reference.reshape(-1), expected, 1.0)
    routing.count(by_layer, counts)
    assert (reference == counts).all()


@given(cases(), st.integers(0, LAYERS - 1))
def test_put_is_a_fancy_assignment(case, layer):
    """Each answer stands where the sum over ranks looks for it, in rows that lie apart; nothing else is touched."""
    _, _, table, top_idx = case
    chosen = top_idx[layer]
    rng = np.random.default_rng(0)
    slot_of = rng.permutation(chosen.size).reshape(chosen.shape).astype(np.int32)
    wide = np.zeros((chosen.size, 8), np.float32)
    expected = wide.copy()
    for _, slots, rows, ranks in table.split(layer, chosen, np.empty(chosen.shape, np.uint8))[0]:
        y = rng.standard_normal((len(slots), 5), np.float32)
        routing.put(wide[:, :5], slot_of, rows, ranks, y)
        expected[slot_of[np.array(rows), np.array(ranks)], :5] = y
    assert (expected == wide).all()


def test_number_orders_ranks_only_where_all_are_external():
    """With one rank for the CPU the numbers are the CPU step's to give."""
    external, slot_of = np.ones((2, 3), np.uint8), np.full((2, 3), 9, np.int32)
    external[1, 0] = 0
    assert not routing.number(external, slot_of)
    assert (slot_of == 9).all()
    external[1, 0] = 1
    assert routing.number(external, slot_of)
    assert [[0, 1, 2], [3, 4, 5]] == slot_of.tolist()


def table_of(n_devices=1):
    device = np.zeros((2, 3), np.int8)
    return routing.Table(device, np.zeros((2, 3), np.int32), n_devices)


@pytest.mark.parametrize("layer, expert", [(0, 3), (0, -1), (2, 0), (-1, 0)])
def test_choice_beyond_the_tables_is_an_index_error(layer, expert):
    """Nothing is written, nothing is counted."""
    table, chosen = table_of(), np.array([[1, expert]], np.int32)
    external, keys = np.full((1, 2), 7, np.uint8), array("i")
    with pytest.raises(IndexError):
        table.split(layer, chosen, external)
    with pytest.raises(IndexError):
        table.hits(layer, chosen[None], 0)
    if layer == 0:
        with pytest.raises(IndexError):
            routing.add_keys(keys, layer, chosen, 3)
    assert ([[7, 7]], 0) == (external.tolist(), len(keys))
    counts = np.zeros(6)
    for key in (-1, 6):
        with pytest.raises(IndexError):
            table.residents(array("i", [0, key]))
        with pytest.raises(IndexError):
            routing.count(array("i", [0, key]), counts)
    assert not counts.any()


def test_answer_for_a_slot_that_is_not_there_is_an_index_error():
    """The others of its group are not written either."""
    expert_y, y = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    rows, ranks = array("i", [0, 0]), array("i", [0, 1])
    with pytest.raises(IndexError, match="slot 2 of 2"):
        routing.put(expert_y, np.array([[0, 2]], np.int32), rows, ranks, y)
    with pytest.raises(IndexError, match="rank 1 of row 0"):
        routing.put(expert_y, np.array([[0]], np.int32), rows, ranks, y)
    with pytest.raises(ValueError, match="1 answers"):
        routing.put(expert_y, np.array([[0, 1]], np.int32), rows, ranks, y[:1])
    with pytest.raises(ValueError, match="one width"):
        routing.put(expert_y, np.array([[0, 1]], np.int32), rows, ranks, np.ones((2, 3), np.float32))
    assert not expert_y.any()


def test_array_of_another_kind_is_refused():
    """Numbers are read as they lie, so they must be what they are taken for."""
    table, flags = table_of(), np.zeros((1, 1), np.uint8)
    for dtype in (np.int64, np.float32, np.uint32):
        with pytest.raises(TypeError, match="top_idx holds"):
            table.split(0, np.zeros((1, 1), dtype), flags)
    with pytest.raises(TypeError, match="external holds"):
        table.split(0, np.zeros((1, 1), np.int32), flags.astype(np.int32))
    with pytest.raises(ValueError):
        table.split(0, np.zeros((1, 2), np.int32), flags)
    with pytest.raises(ValueError):
        table.split(0, np.zeros((2, 2), np.int32)[:, :1], np.zeros((2, 1), np.uint8))
    for keys in (array("q", [0]), array("f", [0])):
        with pytest.raises(TypeError, match="not of 'i'"):
            table.residents(keys)
        with pytest.raises(TypeError, match="not of 'i'"):
            routing.count(keys, np.zeros(6))
        with pytest.raises(TypeError, match="not of 'i'"):
            routing.add_keys(keys, 0, np.zeros((1, 1), np.int32), 3)
        with pytest.raises(TypeError, match="not of 'i'"):
            routing.put(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int32), keys, keys, np.zeros((1, 1), "f"))
    with pytest.raises(ValueError, match="1 flags"):
        table.split(0, np.zeros((1, 1), np.int32), flags, 0, flags)
    with pytest.raises(ValueError):
        table_of(n_devices=routing.MAX_DEVICES + 1)
