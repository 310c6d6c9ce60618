"""coli.devices.cuda.plan and arena: how a group is cut, and what lies where."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from coli.container.layout import matrix_layout, slab_layout
from coli.devices.base import DeviceError
from coli.devices.cuda import plan
from coli.devices.cuda.arena import Arena

SLAB = slab_layout("i4_group", 2048, 512)


def jobs_of(slabs: list[int]) -> np.ndarray:
    jobs = np.zeros(len(slabs), plan.JOB)
    jobs["slab"] = slabs
    jobs["row"] = jobs["out"] = np.arange(len(slabs))
    return jobs


def lane(scratch_bytes: int = 32 << 20) -> SimpleNamespace:
    return SimpleNamespace(scratch_bytes=scratch_bytes)


def test_plan_few_jobs_keep_their_order_and_have_no_tiles():
    """Experts that few tokens chose are read once each, in the caller's order."""
    made = plan.plan_experts(lane(), SLAB, jobs_of([5, 3, 5, 1]), 2)
    assert made.tiles is None
    assert made.jobs["slab"].tolist() == [5, 3, 5, 1]


def test_plan_many_jobs_are_tiles_of_one_expert():
    """Every job is in one tile, a tile has one expert and at most 64 jobs, and out still names the caller's place."""
    rng = np.random.default_rng(0)
    slabs = rng.choice([0x1000, 0x2000, 0x3000], 500).tolist()
    made = plan.plan_experts(lane(), SLAB, jobs_of(slabs), 500)
    (tiles,) = made.tiles
    covered = [i for t in tiles.tolist() for i in range(t[0], t[0] + t[1])]
    assert covered == list(range(500))
    assert max(t[1] for t in tiles.tolist()) <= 64
    assert all(len(set(made.jobs["slab"][t[0] : t[0] + t[1]].tolist())) == 1 for t in tiles.tolist())
    assert [slabs[out] for out in made.jobs["out"]] == made.jobs["slab"].tolist()


def test_plan_small_scratch_makes_chunks_that_cover_all():
    """Less scratch means more chunks; together they hold every job."""
    scratch = plan.x_bytes(SLAB.gate, 100) + (150 << 10)
    made = plan.plan_experts(lane(scratch), SLAB, jobs_of([7] * 400), 100)
    assert 1 < len(made.tiles)
    assert sum(int(t["count"].sum()) for t in made.tiles) == 400
    assert all(int(t["first"][0]) == 0 for t in made.tiles)


def test_plan_no_room_is_out_of_memory():
    """Rows that leave no scratch for a single job are refused."""
    with pytest.raises(DeviceError) as caught:
        plan.plan_experts(lane(1 << 20), SLAB, jobs_of([7]), 1000)
    assert caught.value.kind == "out of memory"


def test_gemv_tokens_fit_shared_memory():
    """A block takes as many tokens as its shared memory holds products of."""
    assert plan._gemv_tokens(matrix_layout("i8_row", 16, 2048), 3) == 4
    assert plan._gemv_tokens(matrix_layout("i8_row", 16, 2048), 16) == 8
    assert plan._gemv_tokens(matrix_layout("i8_row", 16, 128 * 150), 8) == 4
    with pytest.raises(DeviceError):
        plan._gemv_tokens(matrix_layout("i8_row", 16, 128 * 800), 1)


def test_arena_parts_do_not_overlap():
    """Residents, slots and scratch are aligned and apart, and end where the allocation ends."""
    arena = Arena(1000, 3, 1_622_016 + 10, (4096, 300))
    arena.place(1 << 20)
    spans = [(arena.take("a", 10), 10), (arena.take("b", 700), 700)]
    spans += [(arena.slot(i), arena.slot_stride_bytes) for i in range(3)] + [arena.scratch(0), arena.scratch(1)]
    assert all(at % 256 == 0 for at, _ in spans)
    assert all(at + n <= after for (at, n), (after, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][0] + spans[-1][1] == arena.address + arena.n_bytes
    with pytest.raises(DeviceError):
        arena.take("c", 300)
    with pytest.raises(IndexError):
        arena.slot(3)
