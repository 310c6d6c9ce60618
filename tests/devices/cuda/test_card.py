"""CudaDevice, on a card and emulated, against the CPU's kernels, bit for bit."""

from __future__ import annotations

import os

import numpy as np
import pytest
from devices.cuda import emulator
from devices.cuda.machines import MACHINES, machine, on
from devices.cuda.support import (
    BLOCKS,
    FLOATS,
    KINDS,
    activations,
    ffn,
    matrix_bytes,
    matrix_spec,
    product,
    same_bits,
    slab_bytes,
    slab_spec,
)  # fmt: skip

from coli.container.layout import matrix_layout, slab_layout
from coli.devices.base import DeviceError
from coli.devices.cuda import probe

MIB = 1 << 20
ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # neighbours on the card would make its free bytes mean nothing


@pytest.fixture(scope="module", params=MACHINES)
def card(request):
    with machine(request.param):
        device = probe.list_devices()[0]
        yield device
        device.close()


real = pytest.mark.parametrize("card", on(card=[()], emulated=[]), indirect=True)
"""For what only a real card can show."""


def check_products(device, cases):
    """Upload, multiply and compare each (format, rows, cols, tokens, weights, activations)."""
    rng = np.random.default_rng(5)
    wrong = []
    device.open_arena(32 * MIB, 0, None)
    for format, rows, cols, tokens, kind, x_kind in cases:
        m = matrix_spec(rng, format, rows, cols, kind)
        if device._arena.used_bytes + m.data.size > 31 * MIB:
            device.open_arena(32 * MIB, 0, None)
        handle = device.upload(m)
        x = activations(rng, tokens, cols, x_kind)
        out = np.full((tokens, rows), np.nan, np.float32)
        device.matmul(handle, x, out)
        if not same_bits(out, product(m.data, matrix_layout(format, rows, cols), x)):
            wrong.append((format, rows, cols, tokens, kind, x_kind))
        device.free(handle)
    assert wrong == []


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
def test_oldest_architecture_equals_the_cpu():
    """Kernels for Turing, which has other instructions, answer the CPU's bits, too."""
    with emulator.emulated([{**emulator.CARD, "compute": "7.5"}]):
        device = probe.list_devices()[0]
        check_products(device, [
            (format, 40, 300, tokens, "random", "random") for format in (*BLOCKS, *FLOATS) for tokens in (1, 5, 33)
        ])  # fmt: skip
        test_experts_group_equals_the_cpu(device, "i4_group", 100, 40, 20)
        device.close()


SMALL = [(16, 128), (48, 640), (17, 100), (250, 1000), (1, 1)]
LARGE = [(512, 2048), (1024, 2048), (2048, 4096), (8192, 2048)]


@pytest.mark.parametrize(("card", "shapes"), on(card=[(SMALL + LARGE,)], emulated=[(SMALL,)]), indirect=["card"])
def test_products_one_token_equal_the_cpu(card, shapes):
    """A GEMV answers the CPU's bits for every format, shape and kind of weights."""
    check_products(card, [
        (format, rows, cols, 1, kind, x_kind)
        for format in BLOCKS for rows, cols in shapes for kind in KINDS[:4] for x_kind in ("random", "edges")
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("card", "tokens", "shapes"),
    on(
        card=[(n, [(64, 256), (272, 2048), (17, 100)]) for n in (2, 3, 4, 5, 8, 9, 16, 17, 64, 65, 101, 512)],
        emulated=[(n, [(32, 256), (17, 100)]) for n in (2, 3, 5, 9, 17, 65)],
    ),
    indirect=["card"],
)
def test_products_batches_equal_the_cpu(card, tokens, shapes):
    """A batch answers the CPU's bits whatever kernel takes it."""
    check_products(card, [
        (format, rows, cols, tokens, kind, "random")
        for format in BLOCKS for rows, cols in shapes for kind in KINDS[:4]
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("card", "tokens", "shapes"),
    on(
        card=[(n, [(64, 256), (33, 100), (500, 2048)]) for n in (1, 7, 40)],
        emulated=[(n, [(16, 256), (33, 100)]) for n in (1, 7)],
    ),
    indirect=["card"],
)
def test_products_row_major_equal_the_cpu(card, tokens, shapes):
    """Float matrices answer the CPU's bits, ragged columns too."""
    check_products(card, [
        (format, rows, cols, tokens, "random", "random") for format in FLOATS for rows, cols in shapes
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("card", "n", "most"), on(card=[(1000, (700, 2200))], emulated=[(40, (70, 500))]), indirect=["card"]
)
def test_products_many_random_equal_the_cpu(card, n, most):
    """Random products in four formats, no difference."""
    rng = np.random.default_rng(1)
    tokens = [1, 1, 1, 2, 6, 20, 70]
    check_products(card, [
        (BLOCKS[i % 4], *rng.integers(1, most).tolist(), tokens[i % 7], KINDS[i % 5], KINDS[i % 5]) for i in range(n)
    ])  # fmt: skip


@pytest.mark.parametrize("format", ["i8_row", "i8_group", "i4_row", "i4_group", "f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("card", "hidden", "dim", "many"),
    on(card=[(2048, 512, 150), (64, 32, 150), (100, 40, 150)], emulated=[(64, 32, 20), (100, 40, 20)]),
    indirect=["card"],
)
def test_experts_group_equals_the_cpu(card, format, hidden, dim, many):
    """Slots and resident slabs answer the CPU's bits for one token, a few, and a prefill chunk."""
    rng = np.random.default_rng(hidden)
    spec, layout = slab_spec(format, hidden, dim), slab_layout(format, hidden, dim)
    slabs = [slab_bytes(rng, layout) for _ in range(9)]
    card.open_arena(spec.slab_bytes, 8, spec)
    resident = card.upload_slab("shexp", spec, slabs[8])
    for slot in range(8):
        card.write_slot(slot, slabs[slot])
    for tokens in (1, 3, many):
        x = activations(rng, tokens, hidden)
        rows_of = np.repeat(np.arange(tokens), 8 if tokens < many else 3)
        slots = rng.integers(0, 8, rows_of.size) if tokens > 1 else rng.permutation(8)
        ticket = card.issue(3, slots.tolist(), rows_of.tolist(), x.copy())
        beside = card.begin_ffn(resident, x)  # the dense lane works beside the ticket
        y = card.take(ticket)
        shared = card.take(beside)
        assert same_bits(card.ffn(resident, x), shared)
        assert same_bits(shared, ffn(slabs[8], layout, x))
        per_slot = {s: ffn(slabs[s], layout, x) for s in set(slots.tolist())}
        assert same_bits(y, np.stack([per_slot[s][r] for s, r in zip(slots.tolist(), rows_of.tolist(), strict=True)]))


def test_slots_overwrite_answers_the_new_expert(card):
    """A swap is an overwrite: the next ticket reads the new bytes."""
    rng = np.random.default_rng(3)
    spec, layout = slab_spec("i4_group", 256, 128), slab_layout("i4_group", 256, 128)
    card.open_arena(0, 2, spec)
    x = activations(rng, 1, 256)
    for _ in range(20):
        a, b = slab_bytes(rng, layout), slab_bytes(rng, layout)
        card.write_slot(0, a)
        card.write_slot(1, b)
        y = card.take(card.issue(0, [1, 0], [0, 0], x))
        assert same_bits(y, np.concatenate([ffn(b, layout, x), ffn(a, layout, x)]))


@real
def test_arena_too_large_is_out_of_memory_and_takes_nothing(card):
    """An arena that does not fit raises "out of memory", and a smaller one is opened afterwards."""
    card.open_arena(MIB, 0, None)
    card.close()
    before = card.free_bytes()
    with pytest.raises(DeviceError) as caught:
        card.open_arena(card.total_bytes() + (1 << 30), 0, None)
    assert caught.value.kind == "out of memory"
    card.open_arena(MIB, 0, None)
    card.close()
    assert not ALONE or abs(card.free_bytes() - before) < 64 * MIB


@real
def test_reopen_fifty_times_leaks_nothing(card):
    """Opening and closing in one process gives all memory back."""
    rng = np.random.default_rng(0)
    spec, layout = slab_spec("i4_group", 256, 128), slab_layout("i4_group", 256, 128)
    m = matrix_spec(rng, "i8_row", 256, 256)
    slab, x = slab_bytes(rng, layout), activations(rng, 2, 256)
    free = []
    for _ in range(50):
        card.open_arena(4 * MIB, 4, spec)
        handle = card.upload(m)
        card.write_slot(1, slab)
        ticket = card.issue(0, [1], [1], x)
        card.matmul(handle, x)
        card.take(ticket)
        card.close()
        free.append(probe.nvml_free_bytes(card.uuid))
    assert not ALONE or min(free[25:]) >= min(free[:25]) - 8 * MIB


@real
def test_measured_speed_is_plausible(card):
    """A card reads faster than 50 GB/s and answers within a millisecond."""
    assert card.gb_s > 50
    assert 0 < card.latency_us < 1000


def test_matrix_bytes_kinds_differ():
    """The kinds of weights are different bytes."""
    m = matrix_layout("i4_group", 16, 128)
    assert len({matrix_bytes(np.random.default_rng(0), m, kind).tobytes() for kind in KINDS[:4]}) == 4
