"""coli/tier/expert_tier.py: whoever computes an expert, every rank is computed once and with the same bits."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter

import numpy as np
import pytest
from devices.slabs import assert_bits, random_slabs, reference_ffn
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.devices.base import DeviceError
from coli.devices.fake import POISON, FakeDevice
from coli.tier import saving
from coli.tier.expert_tier import ExpertTier
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile, HeatShape, read_heat
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
    for key, (device, slot) in enumerate(zip(tier.residency.device.flat, tier.residency.slot.flat, strict=True)):
        place = tier.residency._places[key // EXPERTS][key % EXPERTS]
        assert place == ((device, slot) if device >= 0 else None)
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


# ---- who has what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(), (0,), (5,), (16,), (3, 4), (16, 0), (2, 1, 9)])
def test_every_rank_is_computed_once_with_the_cpus_bits(slots):
    """Any number of devices, from nothing to everything resident: the same result, each rank by exactly one side."""
    tier = make(slots)
    check(tier)
    rng = np.random.default_rng(0)
    for rows in (1, 4, 1):
        for layer in range(LAYERS):
            run_layer(tier, layer, [rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(rows)])
    stats = tier.stats()
    assert 6 * LAYERS * TOP_K == stats["hits"] + stats["misses"]
    at_home = [LAYERS * EXPERTS // len(slots) + (i < LAYERS * EXPERTS % len(slots)) for i in range(len(slots))]
    assert sum(map(min, slots, at_home)) == stats["residents"]
    tier.close()


def test_route_gives_contributions_row_by_row_in_rank_order():
    """A group's slots, rows and ranks belong together; a device without any of them has no group."""
    tier = make((4, 4, 4), homes=[[(0, 1), (0, 5)], [(0, 2)], [(1, 0)]])
    one, two = tier.route(0, np.array([[5, 0, 1], [2, 1, 7]], np.int32))
    assert ([1, 0, 0], [0, 0, 1], [0, 2, 1]) == tuple(part.tolist() for part in (one.slots, one.rows, one.ranks))
    assert ([0], [1], [0]) == tuple(part.tolist() for part in (two.slots, two.rows, two.ranks))
    assert [0, 1] == [group.index for group in (one, two)]
    assert [tier._cards[i].device for i in (0, 1)] == [group.device for group in (one, two)]
    assert (4, 2) == (tier.stats()["hits"], tier.stats()["misses"])
    assert [True, True] == [tier.holds(0), tier.holds(1)]
    tier.close()


def test_layer_without_homes_is_not_held():
    """An engine need not ask for a layer whose experts can be on no device."""
    tier = make((4,), homes=[[(1, 0)]])
    assert [False, True] == [tier.holds(0), tier.holds(1)]
    tier.close()


def test_warm_start_takes_the_hottest_at_home_first(caplog):
    """Each device holds the first so many of its homes, and one line says what that is."""
    caplog.set_level(logging.INFO, "coli.tier")
    start = np.arange(16.0).reshape(LAYERS, EXPERTS)
    tier = make((3, 2), start=start)
    assert [(1, 3), (1, 4), (1, 5), (1, 6), (1, 7)] == residents(tier)
    assert [3, 2] == [entry["residents"] for entry in tier.stats()["devices"]]
    assert "warm start: 5 of 16 experts resident" in caplog.text
    check(tier)
    tier.close()


def test_expert_has_one_home():
    """Two homes for one expert would be a plan gone wrong."""
    with pytest.raises(AssertionError, match="two homes"):
        make((2, 2), homes=[[(0, 1)], [(0, 1)]])


# ---- promotion -----------------------------------------------------------------------------------------------


def favour(*experts):
    p = np.full(EXPERTS, 0.02)
    p[list(experts)] = 1
    return p / p.sum()


def test_hot_experts_replace_cold_ones_and_then_stay():
    """Residency follows the routing, in a budget that never changes, and settles when the routing does."""
    tier = make((4, 4))
    rng = np.random.default_rng(1)
    hot = [favour(4, 5, 6, 7), favour(2, 3, 6, 7)]
    tokens(tier, rng, 60, hot)
    check(tier)
    assert [(0, 4), (0, 5), (0, 6), (0, 7), (1, 2), (1, 3), (1, 6), (1, 7)] == residents(tier)
    swaps = tier.stats()["swaps"]
    assert 4 <= swaps
    tokens(tier, rng, 60, hot)
    assert swaps == tier.stats()["swaps"]
    tier.close()


def test_even_routing_moves_nobody():
    """Without a clear favourite the hysteresis holds everybody in place."""
    tier = make((4,))
    before = residents(tier)
    idx = np.arange(EXPERTS * TOP_K).reshape(-1, TOP_K) % EXPERTS
    for _ in range(20):
        for row in idx:
            for layer in range(LAYERS):
                tier.note(layer, row[None].astype(np.int32))
            tier.between_tokens()
    assert (0, before) == (tier.stats()["swaps"], residents(tier))
    tier.close()


def test_prompt_is_no_heat():
    """A prompt's rows change neither heat nor, before a token, residency, but are hits and misses."""
    tier = make((4,), promotion=ALWAYS)
    before = residents(tier)
    run_layer(tier, 0, [[5, 6, 7], [5, 6, 1]], note=False)
    tier.between_tokens()
    tier.settle()
    stats = tier.stats()
    assert (before, 0, None) == (residents(tier), stats["decode_tokens"], stats["hit_rate"])
    assert (1, 5) == (stats["hits"], stats["misses"])
    tier.close()


@pytest.mark.parametrize("slots", [(1,), (4, 3)])
def test_forced_eviction_at_every_token_changes_no_bit(slots):
    """Each token finds other experts resident; every contribution stays the same."""
    tier = make(slots, promotion=ALWAYS)
    rng = np.random.default_rng(2)
    tokens(tier, rng, 25)
    check(tier)
    assert tier.stats()["swaps"] >= 20
    tier.close()


def test_prompts_experts_come_at_the_first_token_behind_it():
    """What the prompt chose replaces what it did not, from the first decoded token on, without waiting for the 16th."""
    tier = make((4,), promotion=Promotion(max_slowdown=math.inf))
    for _ in range(3):
        for layer in range(LAYERS):
            run_layer(tier, layer, [[5, 6, 7]] * 4, note=False)
        tier.between_tokens()
    assert [(0, 0), (0, 1), (0, 2), (0, 3)] == residents(tier)
    tokens(tier, np.random.default_rng(0), 1)
    assert {5, 6, 7} == {expert for _, expert in residents(tier)}
    assert 4 == tier.stats()["swaps"]
    check(tier)
    tier.close()


def test_swaps_wait_for_measured_seconds():
    """Nothing starts before a step was timed; then as much as 3 % of the steps' seconds pay for."""
    tier = make((4,), promotion=Promotion(every_tokens=1, ratio=0.0, margin=-1.0))
    tier.exchange.figures._upload.value = 10e-3
    rng = np.random.default_rng(0)
    tokens(tier, rng, 5)
    assert 0 == tier.stats()["swaps"]
    for _ in range(20):
        tier.stepped(0.1)
        tier.exchange.figures._upload.value = 10e-3
        tokens(tier, rng, 1)
    assert 5 <= tier.stats()["swaps"] <= 6
    seconds = tier.stats()["seconds"]
    assert (0.1, None) == (seconds["step"], seconds["miss"])
    tier.close()


def measured(tier, rng, *, prompt_s=1.0):
    """Tokens and a prompt for a tier whose misses are dear."""
    for _ in range(80):
        for layer in range(LAYERS):
            run_layer(tier, layer, [rng.choice(EXPERTS, TOP_K, replace=False)])
        tier.between_tokens()
        tier.stepped(1e-3 + 1e-2 * tier._last_step[1])
    for layer in range(LAYERS):
        run_layer(tier, layer, [[5, 6, 7]] * 4, note=False)
        tier.note(layer, np.full((1000, 3), [[5, 6, 7]], np.int32), False)
    tier.between_tokens()
    tier.stepped(prompt_s)


def test_first_token_finds_the_swaps_that_were_worth_waiting_for():
    """Behind a prompt they are there before the first token; behind a short one nobody waits."""
    for prompt_s, expected in ((1.0, 4), (0.0, 0)):
        tier = make((4,), promotion=Promotion(every_tokens=10**6))
        measured(tier, np.random.default_rng(0), prompt_s=prompt_s)
        tier.after_prompt()
        assert expected == tier.stats()["waited_for"] == tier.stats()["swaps"]
        assert not tier._cards[0].on_the_way
        assert expected == len({(la, e) for la, e in residents(tier) if e in (5, 6, 7)})
        tier.after_prompt()  # nothing new
        assert expected == tier.stats()["waited_for"]
        check(tier)
        tier.close()


def test_failing_uploads_end_the_wait():
    """A card that takes no more uploads does not keep the first token waiting."""
    tier = make((4,), fail=[[("upload", n) for n in range(5, 50)]], promotion=Promotion(every_tokens=10**6))
    measured(tier, np.random.default_rng(0))
    tier.after_prompt()
    assert 4 == tier.stats()["failed_uploads"]
    check(tier)
    tier.close()


def test_slot_under_an_open_ticket_is_not_given_away():
    """A pipelined engine may look for swaps while a group is open: its experts stay."""
    tier = make((2,), promotion=ALWAYS, homes=[[(0, 0), (0, 1), (0, 2)]])
    external = np.empty((1, TOP_K), np.uint8)
    (group,) = tier.issue(0, np.array([[0, 1, 7]], np.int32), X[:1], external)
    for layer in range(LAYERS):
        tier.note(layer, np.array([[2, 3, 4]], np.int32))
    tier.between_tokens()
    tier.settle()
    assert [(0, 0), (0, 1)] == residents(tier)
    assert_bits(EXPECTED[0, [0, 1], 0], tier.take(group))
    tokens(tier, np.random.default_rng(0), 1)
    assert 1 == tier.stats()["swaps"]
    tier.close()


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


def test_expert_on_its_way_belongs_to_the_cpu(monkeypatch):
    """Between the victim's leaving and the newcomer's arrival neither is in the table, and tokens go on."""
    tier, gate = stuck_upload(monkeypatch)
    assert ([], 1) == (residents(tier), tier.residency.tables[0].n_reserved)
    assert [] == run_layer(tier, 0, [[0, 1, 2]])
    tier.between_tokens()  # one round at a time: nothing is queued behind it
    assert 1 == len(tier._cards[0].on_the_way)
    gate.set()
    tier.settle()
    assert [(0, 1)] == residents(tier)
    check(tier)
    tier.close()


# ---- a device that computes whole layers -------------------------------------------------------------------


def test_skipped_device_keeps_its_ranks_and_the_others_theirs():
    """In the middle of a device's own layer the others are asked for what it lacks, and external says who has what."""
    tier = make((4, 4), homes=[[(0, 0), (0, 1), (1, 4)], [(0, 2), (0, 3)]])
    mine = tier._cards[0].device
    top_idx = np.array([[0, 2, 7], [3, 1, 5]], np.int32)
    external = np.array([[1, 0, 0], [0, 1, 0]], np.uint8)
    (group,) = tier.issue(0, top_idx, X[:2], external, skip=mine)
    assert (1, [0, 1], [1, 0]) == (group.index, group.rows.tolist(), group.ranks.tolist())
    assert [[1, 1, 0], [1, 1, 0]] == external.tolist()
    assert_bits(EXPECTED[0, [2, 3], [0, 1]], tier.take(group))
    assert (2, 2) == (tier.stats()["hits"], tier.stats()["misses"])
    tier.took(mine, 0, np.stack([top_idx, [[4, 0, 1], [2, 3, 5]]]))
    assert [3, 2] == [entry["hits"] for entry in tier.stats()["devices"]]
    assert (5, 2) == (tier.stats()["hits"], tier.stats()["misses"])
    tier.close()


def test_device_learns_of_every_change_before_the_next_step():
    """Warm start, swap, failed upload, quarantine: its own table says what the tier's says (`check`, everywhere)."""
    tier = make((3,), fail=[[("upload", 2), ("upload", 5)]], promotion=ALWAYS)
    assert {(0, 0): 0, (0, 2): 2} == tier._cards[0].device.seen
    tokens(tier, np.random.default_rng(0), 6)
    check(tier)
    tier.quarantine(tier._cards[0].device, "a test says so")
    assert {} == tier._cards[0].device.seen
    tier.close()


def test_device_that_cannot_be_told_is_given_up(monkeypatch, caplog):
    """If a victim's leaving does not reach the device, it would go on computing with another expert's bytes."""
    tier = make((4,), promotion=ALWAYS)

    def lost(*_):
        raise DeviceError("gone", "lost")

    monkeypatch.setattr(tier._cards[0], "_seat", lost)
    tokens(tier, np.random.default_rng(0), 1)
    assert [False] == tier.live
    assert "is out: gone" in caplog.text
    tier.close()


# ---- memory --------------------------------------------------------------------------------------------------


def test_slots_are_given_back_when_others_take_the_memory(caplog):
    """Whole segments from the end, as much as the reserve lacks; who was there is the CPU's, and the bits stay."""
    tier = make((10,), keep_free_bytes=[4 * SPEC.slab_bytes])
    device = tier._cards[0].device
    device.segment_slots = 2
    device.set_free_bytes(10 * SPEC.slab_bytes + 2 * SPEC.slab_bytes)
    tier._make_room()
    assert 10 == tier.n_slots(0)  # half of the reserve is there
    device.set_free_bytes(10 * SPEC.slab_bytes + SPEC.slab_bytes)
    tier._check_at = 0
    tokens(tier, np.random.default_rng(0), 1)
    assert (6, 6) == (tier.n_slots(0), tier.residency.n_residents)
    assert 5 * SPEC.slab_bytes == device.free_bytes()
    assert "its memory is short" in caplog.text and "6 of 10 expert slots stay" in caplog.text
    assert 4 * SPEC.slab_bytes == tier.stats()["given_back_bytes"]
    check(tier)
    device.set_free_bytes(0)
    for n in (2, 0, 0):
        tier._make_room()
        assert n == tier.n_slots(0) == len(residents(tier))
    tokens(tier, np.random.default_rng(0), 2)
    check(tier)
    tier.close()


def test_slot_that_is_being_written_is_waited_for(monkeypatch):
    """An upload into the part that goes ends first; then its expert leaves with the others."""
    tier, gate = stuck_upload(monkeypatch)
    threading.Timer(0.05, gate.set).start()
    assert -SPEC.slab_bytes == tier.resize(0, 0)
    assert ([], 0) == (residents(tier), tier.n_slots(0))
    check(tier)
    tier.close()


def test_more_slots_are_filled_with_the_hottest():
    """A raised allowance is used at once, best first; without memory for it nothing changes."""
    tier = make((4,), start=np.arange(16.0).reshape(LAYERS, EXPERTS))
    device = tier._cards[0].device
    assert 4 * SPEC.slab_bytes == tier.resize(0, 8)
    tier.refill()
    assert [(1, e) for e in range(8)] == residents(tier)
    device.set_free_bytes(9 * SPEC.slab_bytes)
    assert 0 == tier.resize(0, 10)
    assert 8 == tier.n_slots(0) == tier.residency.n_residents
    check(tier)
    tier.resize(0, 5)
    tier.resize(0, 6)
    tier.refill()
    assert 6 == tier.residency.n_residents
    check(tier)
    tier.close()


def test_slots_under_an_open_ticket_are_not_given_back():
    """Whoever reads is not robbed; the next look finds the ticket closed."""
    tier = make((4,), keep_free_bytes=[1 << 20])
    (group,) = tier.issue(0, np.array([[0, 1, 7]], np.int32), X[:1], np.empty((1, TOP_K), np.uint8))
    assert 0 == tier.give_back(0, 1)
    tier.take(group)
    assert SPEC.slab_bytes == tier.give_back(0, 1)
    tier.close()


def test_device_that_cannot_give_back_keeps_its_slots(monkeypatch):
    """A device with one allocation for all is left as it is."""
    monkeypatch.setattr(SeatedDevice, "slot_segment_bytes", 0)
    tier = make((4,), keep_free_bytes=[1 << 40])
    tier._make_room()
    assert 4 == tier.n_slots(0)
    tier.close()


# ---- failures ------------------------------------------------------------------------------------------------


def test_failed_upload_leaves_the_slot_free_and_the_expert_on_the_cpu(caplog):
    """One failed upload at load costs one slot, is said once, and a hot expert may take the slot later."""
    tier = make((3,), fail=[[("upload", 2)]])
    assert [(0, 0), (0, 2)] == residents(tier)
    assert (1, 1) == (tier.residency.tables[0].n_free, tier.stats()["failed_uploads"])
    assert "the upload of expert 1 of layer 0 failed" in caplog.text
    check(tier)
    tokens(tier, np.random.default_rng(0), 40, [favour(5, 6, 7), favour(1, 2, 3)])
    assert 0 == tier.residency.tables[0].n_free
    check(tier)
    tier.close()


def test_failed_swap_leaves_neither_expert_in_the_slot():
    """A copy that broke off may have left half an expert: the slot is cleared, both experts are the CPU's."""
    tier = make((1,), fail=[[("upload", 2)]], promotion=ALWAYS, homes=[[(0, 0), (0, 1)]])
    tokens(tier, np.random.default_rng(0), 1)
    assert ([], 1) == (residents(tier), tier.residency.tables[0].n_free)
    assert (tier._cards[0].device.slot_bytes(0) == POISON).all()
    tokens(tier, np.random.default_rng(0), 1)
    assert 1 == len(residents(tier))
    check(tier)
    tier.close()


def test_upload_to_a_device_that_was_given_up_is_forgotten(monkeypatch):
    """An expert that arrives on a card after its quarantine is not published there."""
    tier, gate = stuck_upload(monkeypatch)
    tier.quarantine(tier._cards[0].device, "a test says so")
    gate.set()
    tier.settle()
    assert [] == residents(tier)
    check(tier)
    tier.close()


def test_device_whose_uploads_keep_failing_is_sent_no_more(caplog):
    """After three failures in a row the warm start ends there; what is resident stays and works."""
    tier = make((8,), fail=[[("upload", n) for n in range(3, 20)]])
    assert [(0, 0), (0, 1)] == residents(tier)
    assert 5 == len(tier._cards[0].device.calls) - 1 - sum(call[0] == "clear" for call in tier._cards[0].device.calls)
    assert "3 uploads in a row failed" in caplog.text
    check(tier)
    tokens(tier, np.random.default_rng(0), 40, [favour(5, 6, 7), favour(1, 2, 3)])
    assert [(0, 0), (0, 1)] == residents(tier)
    tier.close()


@pytest.mark.parametrize("operation", ["issue", "take"])
@pytest.mark.parametrize("n", range(1, 7))
def test_nth_group_that_fails_is_the_cpus(operation, n, caplog):
    """A failed issue or take costs that group only: the CPU computes it, and the device is asked again."""
    tier = make((5, 5), fail=[[(operation, n)]])
    tokens(tier, np.random.default_rng(5), 8)
    stats = tier.stats()
    assert ([True, True], 1) == (tier.live, stats["failed_groups"])
    assert stats["hits"] + stats["misses"] == 8 * LAYERS * TOP_K
    assert 1 == caplog.text.count("the CPU computes it")
    check(tier)
    tier.close()


def test_device_that_fails_every_group_is_given_up(caplog):
    """Three failures in a row are no accident; a round trip for nothing in every layer would cost time for ever."""
    tier = make((8,), fail=[[("take", n) for n in range(1, 50)]])
    tokens(tier, np.random.default_rng(0), 5)
    assert [False] == tier.live
    assert "device 0 (fake0) is out: 3 groups failed in a row" in caplog.text
    assert [] == residents(tier)
    tier.close()


@pytest.mark.parametrize("n", range(5, 25, 3))
def test_lost_device_takes_its_experts_along_and_no_others(n, caplog):
    """Whatever call finds the card gone: its experts are the CPU's, the other card goes on, no bit changes."""
    tier = make((4, 4), fail=[[("die", n)]], promotion=ALWAYS)
    tokens(tier, np.random.default_rng(6), 12)
    assert [False, True] == tier.live
    assert not (tier.residency.device == 0).any() and (tier.residency.device == 1).any()
    assert not (tier._home == 0).any()
    assert 1 == caplog.text.count("is out")
    check(tier)
    tier.close()


def test_homes_of_a_lost_device_move_to_the_others():
    """What was hot on the lost card can come up on the card that is left."""
    tier = make((4, 4))
    rng = np.random.default_rng(1)
    hot = [favour(0, 2, 4), favour(0, 2, 4)]  # all at home on device 0
    tokens(tier, rng, 20, hot)
    tier.quarantine(tier._cards[0].device, "a test says so")
    tier.quarantine(tier._cards[0].device, "twice is once")
    tokens(tier, rng, 60, hot)
    assert len({(la, e) for la, e in residents(tier) if e in (0, 2, 4)}) == 4
    check(tier)
    tier.quarantine(tier._cards[1].device, "the last one")
    assert [] == residents(tier)
    tokens(tier, rng, 20, hot)
    tier.close()


def test_group_of_a_device_that_was_given_up_answers_none():
    """A quarantine between issue and take turns open groups into the CPU's work."""
    tier = make((16,))
    (group,) = tier.issue(0, np.array([[0, 1, 2]], np.int32), X[:1], np.empty((1, 3), np.uint8))
    tier.quarantine(tier._cards[0].device, "a test says so")
    assert [] == tier._cards[0].open
    assert tier.take(group) is None
    assert (0, 3) == (tier.stats()["hits"], tier.stats()["misses"])
    tier.close()


def test_group_taken_twice_is_an_assertion_error():
    """A second take is the engine's bug, not a failure to recompute from."""
    tier = make((16,))
    (group,) = tier.issue(0, np.array([[0, 1, 2]], np.int32), X[:1], np.empty((1, 3), np.uint8))
    tier.take(group)
    with pytest.raises(AssertionError):
        tier.take(group)
    tier.close()


def test_drain_closes_what_a_broken_step_left_open():
    """After an exception between issue and take the next step finds every slot free to move."""
    tier = make((4, 4), promotion=ALWAYS)
    tier.issue(0, np.array([[0, 1, 2]], np.int32), X[:1], np.empty((1, 3), np.uint8))
    tier.drain()
    assert not any(card.open for card in tier._cards)
    tokens(tier, np.random.default_rng(0), 3)
    tier.close()


class Broken(Exception):
    """Not a DeviceError: a bug."""


def test_bug_in_an_upload_is_raised(monkeypatch):
    """Only what a device reports is fallen back from; anything else must be seen."""
    tier = make((4,), promotion=ALWAYS)
    monkeypatch.setattr(tier._cards[0].device, "write_slot", lambda *_: (_ for _ in ()).throw(Broken))
    for layer in range(LAYERS):
        tier.note(layer, np.array([[5, 6, 7]], np.int32))
    tier.between_tokens()
    with pytest.raises(Broken):
        tier.settle()


def test_interrupted_warm_start_gives_its_reservations_back(monkeypatch):
    """Ctrl-C during the fill: what is up is published or free, nothing stays reserved."""
    tier = make((8,), warm=False)
    tier._cards[0].device.latency_us = 20_000
    publish, seen = tier._uploaded, []

    def interrupt(upload, error):
        publish(upload, error)
        seen.append(upload)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(tier, "_uploaded", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tier.warm_start()
    table = tier.residency.tables[0]
    assert (5, 0, 3) == (table.n_free, table.n_reserved, table.n_residents)
    assert sum(call[0] == "upload" for call in tier._cards[0].device.calls) < 8  # the rest was not sent
    check(tier)
    tier.close()


# ---- random histories ------------------------------------------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("token"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("prompt"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("cut off"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("quarantine"), st.integers(0, 2)),
    st.tuples(st.just("resize"), st.integers(0, 40)),
)
FAIL = st.lists(
    st.tuples(st.sampled_from(["upload", "issue", "take", "die"]), st.integers(1, 60)), max_size=4, unique=True
)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    fails=st.lists(FAIL, min_size=3, max_size=3),
    steps=st.lists(STEP, max_size=14),
    eager=st.booleans(),
)
def test_random_histories_keep_the_books_and_compute_every_rank_once(slots, fails, steps, eager):
    """Note, issue, take, swap, failure, loss in any order on 1 to 3 devices: used == residents + reserved, always."""
    # "die" counts the arena's allocation too: a device that is lost before the tier has it is placement's business
    fails = [[(op, max(n, 2) if op == "die" else n) for op, n in some] for some in fails]
    promotion = (
        Promotion(1, 2, 2, 0.0, -1.0, max_slowdown=math.inf)
        if eager
        else Promotion(every_tokens=2, max_swaps=3, max_swaps_of_prompt=3, max_slowdown=math.inf)
    )
    tier = make(tuple(slots), fail=fails, promotion=promotion)
    try:
        for name, value in steps:
            rng = np.random.default_rng(value)
            if name == "quarantine":
                if value < len(slots):
                    tier.quarantine(tier._cards[value].device, "a test says so")
            elif name == "settle":
                tier.settle()
            elif name == "resize":
                device, n = value % len(slots), value // len(slots)
                if slots[device]:
                    tier.resize(device, n)
                    tier.refill()
            elif name == "cut off":
                idx = rng.permutation(EXPERTS)[None, :TOP_K].astype(np.int32)
                tier.issue(0, idx, X[:1], np.empty((1, TOP_K), np.uint8))
                tier.drain()
            else:
                rows = 1 if name == "token" else 4
                for layer in range(LAYERS):
                    idx = [rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(rows)]
                    run_layer(tier, layer, idx, note=name == "token")
                tier.between_tokens()
            check(tier)
        stats = tier.stats()
        if not any(name == "resize" for name, _ in steps):
            assert stats["uploads"] - stats["swaps"] <= sum(slots)
    finally:
        tier.close()
    assert all(table.n_reserved == 0 for table in tier.residency.tables)


# ---- heat on disk ----------------------------------------------------------------------------------------------

SHAPE = HeatShape(LAYERS, EXPERTS, TOP_K, "tiny")


def test_close_saves_what_was_decoded(tmp_path):
    """A run's counts are added at close, whether it had devices or not; closing twice adds nothing."""
    path = tmp_path / "heat.json"
    for slots in ((), (4,)):
        file = HeatFile(path, SHAPE, by_hand=True)
        tier = make(slots, start=file.counts, heat_file=file)
        run_layer(tier, 0, [[0, 1, 2]])
        run_layer(tier, 1, [[0, 1, 7]])
        run_layer(tier, 0, [[3, 4, 5]], note=False)
        tier.close()
        tier.close()
    expected = np.zeros((LAYERS, EXPERTS))
    expected[0, [0, 1, 2]] = expected[1, [0, 1, 7]] = 2
    assert expected.tolist() == read_heat(path, SHAPE).tolist()


def test_run_without_decode_leaves_the_file_alone(tmp_path):
    """Nothing counted, nothing written."""
    path = tmp_path / "heat.json"
    make((4,), heat_file=HeatFile(path, SHAPE, by_hand=True)).close()
    assert not path.exists()


def test_heat_is_saved_while_it_runs(tmp_path, monkeypatch):
    """A crash loses a few minutes at most."""
    path = tmp_path / "heat.json"
    tier = make((4,), heat_file=HeatFile(path, SHAPE, by_hand=True))
    for layer in range(LAYERS):
        run_layer(tier, layer, [[0, 1, 2]])
    tier.between_tokens()
    assert not path.exists()
    later = time.monotonic() + saving.SAVE_EVERY_S
    monkeypatch.setattr(saving.time, "monotonic", lambda: later)
    tier.between_tokens()
    tier.saver.under_way[1].result()
    assert LAYERS * TOP_K == read_heat(path, SHAPE).sum()
    monkeypatch.undo()
    tier.close()
    assert LAYERS * TOP_K == read_heat(path, SHAPE).sum()


def test_heat_that_cannot_be_saved_is_one_warning(tmp_path, caplog):
    """A folder that went away costs one line; the run goes on, and the counts arrive if it comes back."""
    folder = tmp_path / "gone"
    folder.mkdir()
    path = folder / "heat.json"
    tier = make((4,), heat_file=HeatFile(path, SHAPE, by_hand=True))
    folder.rmdir()
    for _ in range(3):
        for layer in range(LAYERS):
            run_layer(tier, layer, [[0, 1, 2]])
        tier.saver.save_at = 0
        tier.between_tokens()
        tier.saver.under_way[1].exception()
    assert 1 == caplog.text.count("its heat is not saved")
    folder.mkdir()
    tier.close()
    assert 3 * LAYERS * TOP_K == read_heat(path, SHAPE).sum()


# ---- about it ----------------------------------------------------------------------------------------------------


def test_stats_and_summary_add_up():
    """Hits, misses, bytes by where they are, and one line of it all."""
    tier = make((3, 2))
    tokens(tier, np.random.default_rng(0), 10)
    stats = tier.stats()
    json.dumps(stats)
    assert 10 * LAYERS * TOP_K == stats["hits"] + stats["misses"]
    assert stats["hits"] / (10 * LAYERS * TOP_K) == stats["hit_rate"]
    assert LAYERS * EXPERTS * tier.slab_bytes == stats["bytes"]["cpu"] + sum(stats["bytes"]["devices"])
    assert (5, 16, 10) == (stats["residents"], stats["experts"], stats["decode_tokens"])
    line = tier.summary()
    assert f"hit rate {100 * stats['hit_rate']:.1f} % of 10 tokens; residents 5 of 16 (fake0 3 of 3 slots" in line
    assert "\n" not in line
    assert "no device" in make(()).summary()
    tier.close()


def test_close_ends_every_thread():
    """Uploaders and the saver end with the tier, also with uploads on their way and a group open."""
    before = threading.active_count()
    tier = make((4, 4), promotion=ALWAYS)
    for layer in range(LAYERS):
        run_layer(tier, layer, [[5, 6, 7]])
    tier.between_tokens()
    tier.issue(0, np.array([[0, 1, 2]], np.int32), X[:1], np.empty((1, 3), np.uint8))
    tier.close()
    assert before == threading.active_count()
    check(tier)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_helper_threads_do_not_inherit_a_pinned_core():
    """An uploader that started on a pinned engine thread would fight it for its core."""
    whole = os.sched_getaffinity(0)
    found = []

    def engine():
        os.sched_setaffinity(0, {min(whole)})
        tier = make((4,))
        found.append(tier._cards[0].uploader.submit(os.sched_getaffinity, 0).result())
        tier.close()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert [whole] == found
