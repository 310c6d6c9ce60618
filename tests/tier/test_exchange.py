"""coli/tier/exchange.py: what waits for its turn, and how much may start."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coli.tier.exchange import Exchange
from coli.tier.heat import Heat
from coli.tier.promotion import Promotion
from coli.tier.residency import Residency

EXPERTS, TOP_K = 16, 4


def make(n_slots=4, policy=Promotion(), devices=1):
    """One layer; expert i is at home on device i % devices, the first of each are resident."""
    residency = Residency(1, EXPERTS, [n_slots] * devices)
    home = (np.arange(EXPERTS) % devices).astype(np.int8)
    for device in range(devices):
        for key in range(device, devices * n_slots, devices):
            residency.publish(device, residency.tables[device].reserve(), key)
    heat = Heat(1, EXPERTS, TOP_K)
    return Exchange(heat, residency, home, policy), heat, residency


def prompt(exchange, heat, experts, rows=100):
    heat.note(0, np.tile(np.array(experts, np.int32), (rows, 1)), False)
    exchange.saw_prompt()
    heat.fold()


def decode(heat, experts, n=1):
    for _ in range(n):
        heat.note(0, np.array([experts], np.int32))
        heat.fold()


def test_prompt_is_looked_at_once_and_by_its_own_choices():
    """Behind a prompt it is time at once; what it chose is wanted, and no decode heat was made."""
    exchange, heat, _ = make()
    assert not exchange.is_due()
    prompt(exchange, heat, [12, 13, 14, 2])
    assert exchange.is_due()
    exchange.look([0])
    assert not exchange.is_due()
    assert [(12, 0), (13, 1), (14, 3), None] == [exchange.take(0) for _ in range(4)]
    assert (0, 0) == (heat.recent.sum(), heat.tokens)
    assert heat.take_unsaved() is None


def test_swap_that_no_longer_holds_is_passed_over():
    """Between a look and its turn the victim may have left and the newcomer come."""
    exchange, heat, residency = make()
    prompt(exchange, heat, [12, 13, 14, 15])
    exchange.look([0])
    slot = residency.vacate(1)  # the victim of the second
    residency.publish(0, slot, 14)  # and the third is there
    assert [(12, 0), (15, 3), None] == [exchange.take(0) for _ in range(3)]


def test_device_that_is_not_looked_at_has_nothing_waiting():
    """A device that was given up gets no swaps, the others theirs."""
    exchange, heat, _ = make(devices=2)
    prompt(exchange, heat, [12, 13, 14, 15])
    exchange.look([1])
    assert exchange.take(0) is None
    assert (13, 1) == exchange.take(1)


def test_uploads_wait_for_what_is_saved_up():
    """A share of each step's seconds is saved; an upload starts when what it takes is there."""
    exchange, heat, _ = make()
    prompt(exchange, heat, [12, 13, 14, 15])
    exchange.look([0])
    assert 0 == exchange.allowed()
    exchange.figures.uploaded(1e-3)
    started = 0
    for _ in range(1000):
        exchange.decoded(10e-3, TOP_K, 2, False, 0)
        n = exchange.allowed()
        exchange.started(n)
        started += n
    assert 246 <= started <= 250  # they set out four at a time
    unlimited, heat, _ = make(policy=Promotion(max_slowdown=math.inf))
    assert 0 == unlimited.allowed(), "nobody waits"
    prompt(unlimited, heat, [12, 13, 14, 15])
    unlimited.look([0])
    assert EXPERTS < unlimited.allowed()


def test_first_upload_is_one_to_find_out():
    """Without a warm start nobody knows what an upload takes: a single one shows it."""
    exchange, heat, _ = make()
    prompt(exchange, heat, [12, 13, 14, 15])
    exchange.look([0])
    exchange.decoded(10e-3, TOP_K, 2, False, 0)
    assert 1 == exchange.allowed()
    exchange.started(1)
    assert 0 == exchange.allowed()


def test_first_token_waits_only_where_the_figures_say_that_it_pays():
    """Cheap uploads of experts that are missed dearly; not before that is measured, not for a short prompt."""
    exchange, heat, _ = make()
    rng = np.random.default_rng(0)
    decode(heat, [0, 1, 2, 3], 64)
    prompt(exchange, heat, [12, 13, 14, 15], 1000)
    exchange.took_in(0.5)
    exchange.look([0])
    assert 0 == exchange.worth_waiting_for()
    for _ in range(100):
        misses = int(rng.integers(0, TOP_K))
        exchange.decoded(1e-3 + 2e-3 * misses, TOP_K, misses, False, 0)
    exchange.figures.uploaded(1e-3)
    assert 4 == exchange.worth_waiting_for()
    exchange.saw_prompt()
    exchange.took_in(0.02)
    assert 2 == exchange.worth_waiting_for()


@pytest.mark.parametrize("n", [0, 10])
def test_answers_length_is_learnt(n):
    """What a swap can still win depends on how long answers are here."""
    exchange, heat, _ = make()
    for _ in range(30):
        prompt(exchange, heat, [1, 2, 3, 4], 1)
        exchange.look([0])
        decode(heat, [0, 1, 2, 3], n)
    assert exchange._answer_tokens == (pytest.approx(10, abs=0.1) if n else 64)
