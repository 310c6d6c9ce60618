"""coli/probing/trim.py: what measuring has taken is nobody's any more when it is over."""

from __future__ import annotations

import weakref

import pytest
from probing.timed import TimedCard

from coli.devices.base import DeviceError
from coli.placement import CpuSpeeds, Speed, Speeds
from coli.probing import cards, figures, host, machine_figures, trim


def test_what_holds_itself_is_collected_before_pages_are_given_back(monkeypatch):
    """A program and its steps hold each other: they are gone when the heap is trimmed."""

    class Step:
        pass

    step, alive = Step(), []
    step.program = step
    seen = weakref.ref(step)
    del step
    monkeypatch.setattr(trim, "return_free_pages", lambda: alive.append(seen() is not None))
    trim.give_memory_back()
    assert alive == [False]


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_given_back_behind_every_measurement(monkeypatch, fails):
    """Once behind the CPU's samples and once behind a card's, also where that card did not answer."""
    order = []

    def measure_cpu(beside):
        order.append("cpu")
        return CpuSpeeds(Speed(40), Speed(30)), 45.0

    def measure_card(device, beside, cpu):
        order.append("card")
        if fails:
            raise DeviceError("gone", "lost")
        return Speeds(Speed(900, 9), Speed(500, 12)), 8.0, 0.5

    monkeypatch.setattr(host, "measure_cpu", measure_cpu)
    monkeypatch.setattr(cards, "measure_card", measure_card)
    monkeypatch.setattr(figures, "give_memory_back", lambda: order.append("given back"))
    found = machine_figures([TimedCard()], 1, anyway=True)
    assert (found is None) == fails
    assert order == ["cpu", "given back", "card", "given back"]
