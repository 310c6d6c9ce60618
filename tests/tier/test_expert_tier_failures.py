"""coli/tier/expert_tier.py when things fail, in any order: what a device does not compute, the CPU does."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier.tiers import (
    ALWAYS,
    EXPERTS,
    LAYERS,
    TOP_K,
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

from coli.devices.fake import POISON
from coli.threads.side import SideThread
from coli.tier.heatfile import HeatFile, HeatShape, read_heat
from coli.tier.promotion import Promotion

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
    """Only what a device reports is fallen back from; anything else must be seen.  The slot is free again."""
    tier = make((4,), promotion=ALWAYS)
    monkeypatch.setattr(tier._cards[0].device, "write_slot", raising(Broken()))
    for layer in range(LAYERS):
        tier.note(layer, np.array([[5, 6, 7]], np.int32))
    tier.between_tokens()
    with pytest.raises(Broken):
        tier.settle()
    table = tier.residency.tables[0]
    assert (1, 0, 3) == (table.n_free, table.n_reserved, table.n_residents)
    check(tier)
    tier.close()


SHAPE = HeatShape(LAYERS, EXPERTS, TOP_K, "tiny")


def test_bug_in_an_upload_does_not_keep_the_rest_from_its_end(monkeypatch, tmp_path):
    """It is raised behind a close in which every thread has ended, every upload is published and the heat is saved."""
    before, path = threading.active_count(), tmp_path / "heat.json"
    tier = make((4, 4), promotion=ALWAYS, heat_file=HeatFile(path, SHAPE, by_hand=True))
    monkeypatch.setattr(tier._cards[0].device, "write_slot", raising(Broken()))
    for layer in range(LAYERS):
        tier.note(layer, np.array([[5, 6, 7]], np.int32))
    tier.between_tokens()
    assert [1, 1] == [len(card.on_the_way) for card in tier._cards]
    tier.issue(0, np.array([[2, 3, 4]], np.int32), X[:1], np.empty((1, TOP_K), np.uint8))
    with pytest.raises(Broken):
        tier.close()
    tables = tier.residency.tables
    assert [(1, 0, 3), (0, 0, 4)] == [(table.n_free, table.n_reserved, table.n_residents) for table in tables]
    assert before == threading.active_count()
    assert LAYERS * TOP_K == read_heat(path, SHAPE).sum()
    assert not any(card.open for card in tier._cards)
    tier.close()


def test_bug_in_an_answer_does_not_keep_the_rest_from_its_end(monkeypatch, tmp_path):
    """A group that is open when the tier closes is taken; whatever comes of it, the rest is done."""
    before, path = threading.active_count(), tmp_path / "heat.json"
    tier = make((8,), heat_file=HeatFile(path, SHAPE, by_hand=True))
    run_layer(tier, 0, [[0, 1, 2]])
    tier.issue(0, np.array([[0, 1, 2]], np.int32), X[:1], np.empty((1, TOP_K), np.uint8))
    monkeypatch.setattr(tier._cards[0].device, "take", raising(Broken()))
    with pytest.raises(Broken):
        tier.close()
    assert before == threading.active_count()
    assert TOP_K == read_heat(path, SHAPE).sum()


def test_bug_in_a_save_does_not_keep_the_next_from_the_file(monkeypatch, tmp_path):
    """It is raised behind a close that has saved what came after it."""
    before, path = threading.active_count(), tmp_path / "heat.json"
    heat_file = HeatFile(path, SHAPE, by_hand=True)
    tier = make((4,), heat_file=heat_file)
    with monkeypatch.context() as patch:
        patch.setattr(heat_file, "merge", raising(Broken()))
        run_layer(tier, 0, [[0, 1, 2]])
        tier.saver.save_at = 0
        tier.between_tokens()
        assert isinstance(tier.saver.under_way[1].exception(), Broken)
    run_layer(tier, 0, [[0, 1, 2]])
    with pytest.raises(Broken):
        tier.close()
    assert TOP_K == read_heat(path, SHAPE).sum()
    assert before == threading.active_count()


def test_swap_without_a_thread_is_a_failed_upload(monkeypatch, caplog):
    """Where the system has no thread to give the slot is free, the victim is the CPU's, and the run goes on."""
    tier = make((1,), promotion=ALWAYS, homes=[[(0, 0), (0, 1)]])
    card = tier._cards[0]
    card.uploader.shutdown()
    card.uploader = SideThread("coli-upload-0")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        tokens(tier, np.random.default_rng(0), 2)
    assert ([], 1, 0) == (residents(tier), tier.residency.tables[0].n_free, len(card.on_the_way))
    assert 2 == tier.stats()["failed_uploads"]
    assert 1 == caplog.text.count("failed (no thread for it: can't start new thread)")
    check(tier)
    tokens(tier, np.random.default_rng(0), 1)
    assert 1 == len(residents(tier))
    check(tier)
    tier.close()


def test_warm_start_without_a_thread_leaves_that_device_empty(monkeypatch, caplog):
    """The other one is filled; nothing stays reserved."""
    start = threading.Thread.start

    def starts(thread):
        if thread.name == "coli-upload-0":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    tier = make((4, 3))
    assert [(4, 0, 0), (0, 0, 3)] == [(t.n_free, t.n_reserved, t.n_residents) for t in tier.residency.tables]
    assert 1 == caplog.text.count("no thread for it")
    check(tier)
    tier.close()


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
