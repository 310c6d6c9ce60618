"""What a span's device asks for, answered by another device alone, or with the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from engine.standins import MiB

from coli.devices.fake import FakeDevice
from conftest import assert_same_bits

IDS = np.random.default_rng(5).integers(0, 256, 8)


@pytest.mark.parametrize("shexp, asked_of_cpu", [("0", 0), ("cpu", 8)])
def test_cpu_is_asked_only_for_what_no_device_has(load, cpu, shexp, asked_of_cpu):
    """With every expert on another device a layer wakes the team for a shared one alone; the bits are the CPU's."""
    place = f"lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp={shexp},experts=1"
    model = load(FakeDevice(64 * MiB, name="a"), FakeDevice(64 * MiB, name="b"), place=place)
    session, reference = model.session(), cpu.session()
    assert_same_bits(session.prefill(IDS), reference.prefill(IDS), "a prompt")
    real = model.engine.runner

    class Counting:
        calls = 0

        def __getattr__(self, name):
            return getattr(real, name)

        def moe(self, *arguments):
            Counting.calls += 1
            real.moe(*arguments)

    model.engine.runner = Counting()
    assert_same_bits(session.step(1), reference.step(1), "a token")
    model.engine.runner = real
    assert asked_of_cpu == Counting.calls
    assert 0 == model.stats()["tier"]["misses"]
