"""Tiers over fake devices, their experts, and the engine's part in a step: what the tests of the expert tier share."""

from __future__ import annotations

import math
import threading
from collections import Counter

import numpy as np
from devices.slabs import assert_bits, random_slabs, reference_ffn

from coli.devices.fake import FakeDevice
from coli.tier.expert_tier import ExpertTier
from coli.tier.heat import Heat
from coli.tier.promotion import Promotion
from coli.tier.slots import RESERVED

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 8, 3, 128
SLABS, SPEC = random_slabs(np.random.default_rng(3), "i4_group", HIDDEN, 128, LAYERS * EXPERTS)
SLABS = SLABS.reshape(LAYERS, EXPERTS, -1)
X = np.random.default_rng(4).standard_normal((4, HIDDEN), np.float32)
EXPECTED = np.array([[reference_ffn(SLABS[la, e], SPEC, X) for e in range(EXPERTS)] for la in range(LAYERS)])
UNLIMITED = Promotion(max_swaps=8, max_slowdown=math.inf)
ALWAYS = Promotion(every_tokens=1, max_swaps=1, ratio=0.0, margin=-1.0, max_slowdown=math.inf)  # one leaves each token


class SeatedDevice(FakeDevice):
    """A fake that keeps its own table of who is where, as one that computes whole layers does."""

    def __init__(self, *args, **options):
        self.seen = {}
        super().__init__(*args, **options)

    def seat(self, layer, expert, slot):
        super().seat(layer, expert, slot)
        if slot is None:
            del self.seen[layer, expert]
        else:
            assert (layer, expert) not in self.seen and slot not in self.seen.values()
            self.seen[layer, expert] = slot


def make(slots=(4,), *, fail=(), start=None, homes=None, promotion=UNLIMITED, heat_file=None, warm=True, **options):
    """A tier over fakes with open arenas; experts are at home in turn, in key order (or by heat)."""
    devices = []
    for i, n in enumerate(slots):
        device = SeatedDevice(1 << 24, name=f"fake{i}", fail=fail[i] if i < len(fail) else ())
        device.index = i
        device.open_arena(0, n, SPEC)
        devices.append(device)
    heat = Heat(LAYERS, EXPERTS, TOP_K, start)
    if homes is None:
        keys = np.argsort(-heat.recent.reshape(-1), kind="stable").tolist()
        homes = [[divmod(key, EXPERTS) for key in keys[i :: len(slots)]] for i in range(len(slots))]
    options |= {"heat": heat, "heat_file": heat_file, "promotion": promotion}
    tier = ExpertTier(list(SLABS), devices, slots, homes, **options)
    if warm:
        tier.warm_start()
    return tier


def run_layer(tier, layer, top_idx, *, note=True):
    """The engine's part: issue, the CPU's ranks, take, recompute what failed; checks every bit, returns the groups."""
    top_idx = np.asarray(top_idx, np.int32)
    rows, top_k = top_idx.shape
    x = X[:rows].copy()
    external = np.full((rows, top_k), 0xFF, np.uint8)
    y = np.full((rows, top_k, HIDDEN), np.nan, np.float32)
    done = Counter()

    def on_cpu(row, rank):
        y[row, rank] = EXPECTED[layer, top_idx[row, rank], row]
        done[row, rank] += 1

    groups = tier.issue(layer, top_idx, x, external)
    x[:] = np.nan  # the step's buffers move on
    tier.note(layer, top_idx, note)
    for row, rank in zip(*np.nonzero(external == 0), strict=True):
        on_cpu(row, rank)
    for group in groups:
        assert (external[group.rows, group.ranks] == 1).all()
        answer = tier.take(group)
        if answer is None:
            for row, rank in zip(group.rows, group.ranks, strict=True):
                on_cpu(row, rank)
        else:
            y[group.rows, group.ranks] = answer
            done.update(zip(group.rows.tolist(), group.ranks.tolist(), strict=True))
    assert (external <= 1).all()
    assert {(row, rank): 1 for row in range(rows) for rank in range(top_k)} == {
        (int(row), int(rank)): n for (row, rank), n in done.items()
    }
    expected = EXPECTED[layer, top_idx, np.arange(rows)[:, None]]
    assert_bits(expected, y)
    return groups


def check(tier):
    """The table, the slots and the devices' bytes say the same."""
    seen = Counter()
    for index, (table, card) in enumerate(zip(tier.residency.tables, tier._cards, strict=True)):
        if not card.live:
            assert 0 == table.n_slots
            assert not card.device.seen or card.device._lost
            continue
        seated = {divmod(key, EXPERTS): slot for slot, key in enumerate(table.owner.tolist()) if key >= 0}
        assert seated == card.device.seen
        assert card.n_slots == table.n_slots == table.n_free + table.n_reserved + table.n_residents
        assert table.n_reserved == (table.owner == RESERVED).sum() == len(card.on_the_way)
        for slot, key in enumerate(table.owner.tolist()):
            if key >= 0:
                layer, expert = divmod(key, EXPERTS)
                assert (index, slot) == (tier.residency.device[layer, expert], tier.residency.slot[layer, expert])
                assert (SLABS[layer, expert] == card.device.slot_bytes(slot)).all()
                assert index == tier._home[key]
                seen[key] += 1
    assert all(n == 1 for n in seen.values())
    assert len(seen) == (tier.residency.device >= 0).sum() == tier.residency.n_residents


def residents(tier):
    return sorted((int(la), int(e)) for la, e in zip(*np.nonzero(tier.residency.device >= 0), strict=True))


def tokens(tier, rng, n, favourites=None):
    for _ in range(n):
        for layer in range(LAYERS):
            p = None if favourites is None else favourites[layer]
            run_layer(tier, layer, [rng.choice(EXPERTS, TOP_K, replace=False, p=p)])
        tier.between_tokens()
        tier.settle()


def raising(error):
    """A function that raises it, whatever it is called with."""

    def raises(*_):
        raise error

    return raises


def favour(*experts):
    p = np.full(EXPERTS, 0.02)
    p[list(experts)] = 1
    return p / p.sum()


def stuck_upload(monkeypatch):
    """A tier of one slot whose expert (0, 0) is being overwritten by (0, 1), and the event that lets the copy go on."""
    tier = make((1,), promotion=ALWAYS, homes=[[(0, 0), (0, 1)]])
    device = tier._cards[0].device
    gate, write = threading.Event(), device.write_slot

    def slow(slot, data):
        gate.wait()
        write(slot, data)

    monkeypatch.setattr(device, "write_slot", slow)
    for layer in range(LAYERS):
        tier.note(layer, np.array([[1, 2, 3]], np.int32))
    tier.between_tokens()
    return tier, gate
