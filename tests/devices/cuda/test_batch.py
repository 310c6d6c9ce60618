"""coli.devices.cuda.batch: where the list of a batch has what."""

from __future__ import annotations

import numpy as np
import pytest

from coli.devices.cuda.batch import PART, BatchList, parts_of


def test_parts_follow_one_another():
    """Runs of rows become parts without gaps, each with its own position."""
    assert parts_of([(3, 10), (1, 0), (2, 64)]).tolist() == [(0, 3, 10), (3, 1, 0), (4, 2, 64)]


@pytest.mark.parametrize("half", [0, 3])
def test_list_holds_what_was_put(half):
    """Everything is read back from the addresses that the batch names, and nothing overlaps."""
    rng = np.random.default_rng(half)
    parts = parts_of([(3, 10), (1, 0), (2, 5)])
    cos, sin = rng.normal(size=(20, half)).astype(np.float32), rng.normal(size=(20, half)).astype(np.float32)
    layout = BatchList(6, 3, half, 2)
    assert layout.n_bytes % 16 == 0
    raw = np.full(layout.n_bytes, 0xFF, np.uint8)
    states = rng.integers(0, 1 << 60, (2, 3, 2)).astype(np.uint64)
    layout.put_states(raw, states)
    layout.put_rows(raw, parts, cos, sin)
    batch = layout.batch(0, 3, 1)

    def at(address: int, dtype, *shape: int) -> np.ndarray:
        n_bytes = np.dtype(dtype).itemsize * int(np.prod(shape))
        return raw[address : address + n_bytes].view(dtype).reshape(shape)

    assert at(batch.parts_at, PART, 3).tolist() == parts.tolist()
    assert at(batch.part_of_at, np.int32, 6).tolist() == [0, 0, 0, 1, 2, 2]
    rows = [10, 11, 12, 0, 5, 6]
    assert (at(batch.cos_at, np.float32, 6, half) == cos[rows]).all()
    assert (at(batch.sin_at, np.float32, 6, half) == sin[rows]).all()
    for layer in range(2):
        address = layout.states_at(0, layer)
        assert address % 16 == 0
        assert (at(address, np.uint64, 3, 2) == states[layer]).all()
