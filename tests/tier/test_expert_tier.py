"""coli/tier/expert_tier.py: whoever computes an expert, every rank is computed once and with the same bits."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time

import numpy as np
import pytest
from devices.slabs import assert_bits
from tier.tiers import (
    ALWAYS,
    EXPECTED,
    EXPERTS,
    LAYERS,
    SPEC,
    TOP_K,
    SeatedDevice,
    X,
    check,
    favour,
    make,
    raising,
    residents,
    run_layer,
    stuck_upload,
    tokens,
)

from coli.devices.base import DeviceError
from coli.tier import saving
from coli.tier.heatfile import HeatFile, HeatShape, read_heat
from coli.tier.promotion import Promotion

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


def test_groups_have_contributions_row_by_row_in_rank_order():
    """A group's slots, rows and ranks belong together; a device without any of them has no group."""
    tier = make((4, 4, 4), homes=[[(0, 1), (0, 5)], [(0, 2)], [(1, 0)]])
    external = np.empty((2, 3), np.uint8)
    one, two = tier.issue(0, np.array([[5, 0, 1], [2, 1, 7]], np.int32), X[:2], external)
    assert ([1, 0, 0], [0, 0, 1], [0, 2, 1]) == tuple(part.tolist() for part in (one.slots, one.rows, one.ranks))
    assert ([0], [1], [0]) == tuple(part.tolist() for part in (two.slots, two.rows, two.ranks))
    assert [[1, 0, 1], [1, 1, 0]] == external.tolist()
    assert [0, 1] == [group.index for group in (one, two)]
    assert [tier._cards[i].device for i in (0, 1)] == [group.device for group in (one, two)]
    assert (4, 2) == (tier.stats()["hits"], tier.stats()["misses"])
    assert [True, True] == [tier.holds(0), tier.holds(1)]
    tier.drain()
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
    """Nothing starts before a step was timed; then as much as a share of the steps' seconds pays for."""
    tier = make((4,), promotion=Promotion(every_tokens=1, ratio=0.0, margin=-1.0))
    tier.exchange.figures._upload.value = 10e-3
    rng = np.random.default_rng(0)
    tokens(tier, rng, 5)
    assert 0 == tier.stats()["swaps"]
    for _ in range(30):
        tier.stepped(0.12)
        tier.exchange.figures._upload.value = 10e-3
        tokens(tier, rng, 1)
    assert 8 == tier.stats()["swaps"], "nine are paid for; they set out four at a time"
    seconds = tier.stats()["seconds"]
    assert (pytest.approx(0.12), None) == (seconds["step"], seconds["miss"])
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
    taken, external = np.array([[1, 0, 0], [0, 1, 0]], np.uint8), np.full((2, 3), 0xFF, np.uint8)
    (group,) = tier.issue(0, top_idx, X[:2], external, skip=mine, taken=taken)
    assert (1, [0, 1], [1, 0]) == (group.index, group.rows.tolist(), group.ranks.tolist())
    assert [[1, 1, 0], [1, 1, 0]] == external.tolist()
    assert_bits(EXPECTED[0, [2, 3], [0, 1]], tier.take(group))
    assert (2, 2) == (tier.stats()["hits"], tier.stats()["misses"])
    tier.took(mine, 0, np.stack([top_idx, [[4, 0, 1], [2, 3, 5]]]).astype(np.int32))
    assert [3, 2] == [entry["hits"] for entry in tier.stats()["devices"]]
    assert (5, 2) == (tier.stats()["hits"], tier.stats()["misses"])
    tier.close()


def test_ranks_in_passing_are_neither_hits_nor_misses():
    """What a device computed from bytes that were sent for one batch was not resident, and was not the CPU's work."""
    tier = make((4,), homes=[[(0, 0), (0, 1), (1, 4)]])
    top_idx = np.array([[[0, 2, 7], [3, 1, 5]], [[4, 0, 1], [2, 3, 5]]], np.int32)
    for n in (4, 0):
        tier.took(tier._cards[0].device, 0, top_idx, in_passing=n)
    stats = tier.stats()
    assert (6, 14, 4) == (stats["hits"], stats["misses"], stats["in_passing"])
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


@pytest.mark.parametrize("recovers", [True, False])
def test_save_without_a_thread_is_one_warning(tmp_path, monkeypatch, caplog, recovers):
    """The counts go into the next save; at the end none is needed."""
    path = tmp_path / "heat.json"
    tier = make((4,), heat_file=HeatFile(path, SHAPE, by_hand=True))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        for _ in range(2):
            for layer in range(LAYERS):
                run_layer(tier, layer, [[0, 1, 2]])
            tier.saver.save_at = 0
            tier.between_tokens()
            assert tier.saver.under_way is None
        assert 1 == caplog.text.count("no thread to write it: can't start new thread; the run goes on")
        if not recovers:
            tier.close()
    if recovers:
        tier.saver.save_at = 0
        tier.saver.save_if_due()
        tier.saver.under_way[1].result()
    assert 2 * LAYERS * TOP_K == read_heat(path, SHAPE).sum()
    tier.close()
    assert 2 * LAYERS * TOP_K == read_heat(path, SHAPE).sum()


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
