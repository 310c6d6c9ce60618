"""coli/tier/promotion.py: who changes places, and who does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.tier.promotion import (
    Promotion,
    choose_swaps,
    most_saved_s,
    save_up,
    uploads_before_first_token,
    uploads_now,
)


SHARE = Promotion().max_slowdown
BURST = Promotion(max_slowdown=0.03)


def swaps(heat, residents, candidates, n_free=0, **policy):
    heat = np.array(heat, np.float64)
    policy = Promotion(**policy)
    return choose_swaps(heat, np.array(residents, int), np.array(candidates, int), n_free, policy, policy.max_swaps)


def test_hottest_newcomer_takes_the_coldest_residents_place():
    """The best pair comes first; equals stand by key."""
    assert [(3, 1), (4, 0)] == swaps([9, 1, 20, 50, 30, 30], residents=[0, 1, 2], candidates=[3, 4, 5], max_swaps=2)


def test_swap_needs_a_quarter_and_four_counts_more():
    """A newcomer just at the margin stays out, one above it comes in."""
    assert [] == swaps([16, 24], residents=[0], candidates=[1])
    assert [(1, 0)] == swaps([16, 24.5], residents=[0], candidates=[1])


def test_experts_of_equal_heat_do_not_swap():
    """Hysteresis: an even router moves nothing, cold or hot."""
    for level in (0, 3, 1000):
        assert [] == swaps([level] * 6, residents=[0, 1, 2], candidates=[3, 4, 5])


def test_free_slot_takes_a_newcomer_without_a_victim():
    """Free slots are filled before anybody leaves, and only by experts that are wanted."""
    assert [(4, None), (3, 0)] == swaps([1, 60, 60, 40, 50, 2], residents=[0, 1, 2], candidates=[3, 4, 5], n_free=1)
    assert [] == swaps([0, 4], residents=[], candidates=[0, 1], n_free=2)


def test_nobody_home_or_nobody_waiting_is_no_swap():
    """Empty sides answer with nothing."""
    assert [] == swaps([1, 9], residents=[], candidates=[0, 1])
    assert [] == swaps([1, 9], residents=[0, 1], candidates=[])


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40), st.data())
def test_swaps_are_distinct_and_always_gain(heat, data):
    """No expert moves twice, each newcomer is hotter than its victim, and a second look at the result swaps less."""
    n = data.draw(st.integers(0, len(heat)))
    keys = data.draw(st.permutations(range(len(heat))))
    residents, candidates = keys[:n], keys[n:]
    free = data.draw(st.integers(0, 3))
    found = swaps(heat, residents, candidates, free)
    moved = [k for pair in found for k in pair if k is not None]
    assert len(moved) == len(set(moved)) and len(found) <= 32
    for newcomer, victim in found:
        assert newcomer in candidates and (victim is None or victim in residents)
        assert heat[newcomer] > (1.25 * heat[victim] if victim is not None else 0) + 4


# ---- how many may start ------------------------------------------------------------------------------------

# step_s, upload_s: recorded; a shared 2-core machine with 8 layers of the real width, an H200 with 4,720 MiB of the
# 35B geometry and with all of it, and a slow link
RECORDED = [(59e-3, 0.167e-3), (11.4e-3, 0.25e-3), (2.5e-3, 0.25e-3), (30e-3, 40e-3)]


@pytest.mark.parametrize(("step_s", "upload_s"), RECORDED)
def test_decode_is_never_slowed_by_more_than_its_share(step_s, upload_s):
    """Whatever waits: all uploads started up to any token take at most 3 % of the steps before it, and no burst is
    longer than 32 steps' share or one upload; yet the share is used."""
    policy, saved_s, spent_s = Promotion(), 0.0, 0.0
    for step in range(1, 4001):
        saved_s = save_up(saved_s, step_s, upload_s, policy)
        n = uploads_now(saved_s, most_saved_s(step_s, upload_s, policy), upload_s)
        saved_s -= n * upload_s
        spent_s += n * upload_s
        assert n * upload_s <= max(upload_s, 32 * SHARE * step_s) * 1.0001
        assert spent_s <= SHARE * step_s * step * 1.0001
    assert spent_s > 0.95 * SHARE * step_s * 4000


def test_quiet_time_is_not_saved_up_for_ever():
    """After a thousand tokens without a swap, 32 tokens' share is there, not a thousand's."""
    saved_s = 0.0
    for _ in range(1000):
        saved_s = save_up(saved_s, 10e-3, 1e-4, Promotion())
    assert 80 == uploads_now(saved_s * 1.0001, most_saved_s(10e-3, 1e-4, Promotion()), 1e-4)


def test_unknown_upload_is_tried_once_and_unlimited_has_no_end():
    """None: one, to be measured.  An infinite budget: any number."""
    assert (0, 1) == (uploads_now(0.0, 1.0, None), uploads_now(1e-6, 1.0, None))
    assert uploads_now(math.inf, math.inf, None) == uploads_now(math.inf, math.inf, 1.0) > 10**6


@pytest.mark.parametrize(
    ("saved_s", "most_s", "n"), [(3.5, 20, 0), (4.0, 20, 4), (7.9, 20, 7), (1.5, 2.5, 0), (2.2, 2.5, 2)]
)
def test_uploads_set_out_together(saved_s, most_s, n):
    """Four or more at a time, so that steps without any show what one takes; as many as fit the savings, if fewer."""
    assert n == uploads_now(saved_s, most_s, 1.0)


def wait_for(gains, *, step_s=11.4e-3, upload_s=0.25e-3, miss_s=24e-6, tokens=256, wait_s=0.1, stall_s=None):
    return uploads_before_first_token(
        gains, step_s=step_s, upload_s=upload_s, stall_s=upload_s if stall_s is None else stall_s, miss_s=miss_s,
        tokens=tokens, wait_s=wait_s, policy=BURST,
    )  # fmt: skip


def cost(n, gains, *, step_s, upload_s, stall_s, miss_s, tokens):
    """Seconds that waiting for n costs, swap by swap: n uploads, and the misses until each of the others is there."""
    tokens_each = stall_s / (BURST.max_slowdown * step_s)
    return n * upload_s + sum(
        gain * miss_s * min((i - n) * tokens_each, tokens) for i, gain in enumerate(gains, 1) if i > n
    )


@given(
    gains=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    step_s=st.floats(1e-3, 0.1), upload_s=st.floats(1e-5, 1e-2), share=st.floats(0.25, 4), miss_s=st.floats(0, 1e-2),
    tokens=st.floats(1, 1000),
)  # fmt: skip
def test_first_token_waits_for_the_number_that_costs_least(gains, step_s, upload_s, share, miss_s, tokens):
    """No other number of swaps makes prompt and answer together faster, counted one by one."""
    gains = sorted(gains, reverse=True)
    figures = {"step_s": step_s, "upload_s": upload_s, "stall_s": share * upload_s, "miss_s": miss_s, "tokens": tokens}
    chosen = uploads_before_first_token(gains, wait_s=1e9, policy=BURST, **figures)
    costs = [cost(n, gains, **figures) for n in range(len(gains) + 1)]
    assert costs[chosen] <= min(costs) * 1.0001 + 1e-9


def test_burst_pays_where_misses_are_dear_and_answers_long():
    """The recorded H200 with 17 % of the experts resident: half a hit a token more is worth 0.25 ms; a tenth
    of that is not.  No answer, nothing worth it.  And never longer than it may."""
    assert 36 == wait_for([0.5] * 64)
    assert 0 == wait_for([0.05] * 64)
    assert 0 == wait_for([0.5] * 64, tokens=0)
    assert 0 == wait_for([0.5] * 64, miss_s=0.0)
    assert 8 == wait_for([0.5] * 64, wait_s=2.1e-3)
    assert 0 == wait_for([], wait_s=1.0)
