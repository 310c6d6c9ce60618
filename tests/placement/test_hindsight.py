"""coli.placement.hindsight: what a plan should have taken, given what is known afterwards."""

from __future__ import annotations

import pytest
from placement.examples import cards, shape

from coli.placement import CpuSpeeds, Probe, Speed, Speeds, plan, predict_seen

MODEL = shape(8, 4, 4, n_experts=16, topk=4)
PROBE = Probe(CpuSpeeds(Speed(40), Speed(20)), (Speeds(Speed(400, 10), Speed(200, 16)),))
NOBODY = [[0.0] * 16] * 8
EVEN = [[4 / 16] * 16] * 8


def made_and_residents(free_mib: float = 40):
    """A plan, and where it puts the experts."""
    made = plan(MODEL, cards(free_mib), place="auto:time", probe=PROBE, position=100)
    home = [[-1] * 16 for _ in range(8)]
    for device, n in enumerate(made.residents):
        for expert in made.homes[device][:n]:
            home[expert.layer][expert.index] = device
    return made, home


def seen(made, chosen, *residents) -> float:
    """Milliseconds of a token."""
    return predict_seen(made, PROBE, chosen=chosen, residents=residents, position=100).ms_per_token


def test_what_was_expected_and_came_takes_what_was_predicted():
    """An even router, and every expert where the plan has it."""
    made, home = made_and_residents()
    assert made.predicted_ms_per_token == pytest.approx(seen(made, EVEN, home, home))


def test_layers_in_which_nobody_counted_take_what_an_even_router_takes():
    """Where no device has room for an expert nobody counts; the CPU computes four of them all the same."""
    made, _ = made_and_residents()
    nowhere = [[-1] * 16] * 8
    assert seen(made, EVEN, nowhere) == pytest.approx(seen(made, NOBODY, nowhere))
    half = [*NOBODY[:4], *EVEN[4:]]
    assert seen(made, EVEN, nowhere) == pytest.approx(seen(made, half, nowhere))


def test_experts_that_changed_places_count_half_before_and_half_after():
    """The mean of both ends; a counter that ran over is a certainty and no more."""
    made, home = made_and_residents()
    nowhere = [[-1] * 16] * 8
    ends = seen(made, EVEN, home), seen(made, EVEN, nowhere)
    assert sum(ends) / 2 == pytest.approx(seen(made, EVEN, home, nowhere))
    some = [[1.0] * 4 + [0.0] * 12] * 8
    more = [[1.5] * 4 + [-0.5] * 12] * 8
    assert seen(made, some, home) == pytest.approx(seen(made, more, home))
