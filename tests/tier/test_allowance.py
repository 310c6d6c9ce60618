"""Memory that comes and goes while a model runs: the text stays, and what is taken follows."""

from __future__ import annotations

import numpy as np
import pytest

import coli
from coli.devices.fake import FakeDevice
from coli.errors import PlacementError
from coli.tier import expert_tier
from conftest import assert_same_bits

MIB = 1 << 20
IDS = np.random.default_rng(5).integers(0, 500, 20).tolist()


def decode(model, act=None):
    """Logits of a prompt and of 12 greedy tokens, with something done after the fourth."""
    session = model.session()
    logits = [session.prefill(IDS)]
    for n in range(12):
        if n == 4 and act:
            act(model)
        logits.append(session.step(int(np.argmax(logits[-1]))))
    return np.stack(logits)


@pytest.fixture(scope="module")
def expected():
    with coli.load("demo", devices="none", threads=2, context=128) as model:
        return decode(model)


@pytest.mark.parametrize("place", ["auto", "experts=0"])
@pytest.mark.parametrize("vram", [0, 3 * MIB, 64 * MIB, "auto"])
def test_changed_allowance_changes_no_bit(expected, place, vram):
    """Down to nothing, up to everything, between two tokens, with and without whole layers on the device."""
    device = FakeDevice(64 * MIB)
    with coli.load("demo", devices=[device], place=place, vram=4 * MIB, threads=2, context=128) as model:
        before = model.placed.tier.n_slots(0)
        assert before > 0

        def act(model):
            slots = model.set_vram(vram)
            assert [model.placed.tier.n_slots(0)] == slots
            assert (slots[0] > before) == (vram in ("auto", 64 * MIB))
            assert model.placed.tier.residency.n_residents <= slots[0]
            if vram == 0:
                assert [0] == slots

        assert_same_bits(expected, decode(model, act), f"{place} {vram}")


def test_memory_that_another_takes_is_given_back(expected, monkeypatch):
    """The device gets full in the middle of an answer: slots go, the logits stay, and free memory is there again."""
    monkeypatch.setattr(expert_tier, "CHECK_EVERY_S", 0.0)
    device = FakeDevice(6 * MIB)
    with coli.load("demo", devices=[device], place="experts=0", threads=2, context=128) as model:
        tier = model.placed.tier
        before = tier.n_slots(0)

        def act(_):
            device.set_free_bytes(4 * MIB)

        assert_same_bits(expected, decode(model, act), "another process")
        assert 0 < tier.n_slots(0) < before
        assert device.free_bytes() >= 6 * MIB // 16 // 2


def test_device_whose_slots_are_fixed_says_so():
    """A device that cannot do it is an error with a way out, and nothing has changed."""

    class Fixed(FakeDevice):
        slot_segment_bytes = 0

    with coli.load("demo", devices=[Fixed(64 * MIB)], threads=2, context=128) as model:
        with pytest.raises(PlacementError, match="cannot change while it runs; load anew"):
            model.set_vram(0)
