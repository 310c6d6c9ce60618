"""coli/tier/figures.py: what is known of seconds, from noisy ones."""

from __future__ import annotations

import numpy as np
import pytest

from coli.tier.figures import Figures

CHOICES = 320


def test_nothing_is_known_before_the_first():
    """No figure is made up."""
    assert {"step": None, "upload": None, "stall": None, "miss": None} == Figures().to_dict()


def test_upload_is_taken_to_stall_the_decode_until_it_was_seen():
    """Before any evidence, the dear assumption: the decode stands still while an expert is copied."""
    figures = Figures()
    figures.uploaded(2e-4)
    assert (2e-4, 2e-4) == (figures.upload_s, figures.stall_s)


@pytest.mark.parametrize(("stall_s", "least", "most"), [(0.0, 0.5e-4, 1e-4), (4e-4, 3e-4, 4.5e-4)])
def test_stall_is_what_steps_with_uploads_take_longer(stall_s, least, most):
    """After some hundred uploads the measured excess says more than the assumption, in both directions; a quarter of
    the upload's seconds is the least."""
    rng, figures = np.random.default_rng(0), Figures()
    for n in range(800):
        figures.uploaded(2e-4)
        copying = n % 2 == 1
        seconds = 5e-3 + (stall_s if copying else 0) + 1e-4 * rng.standard_normal()
        figures.stepped(seconds, CHOICES, 100, copying, int(copying))
    assert least <= figures.stall_s <= most


def test_step_that_something_else_held_up_does_not_blame_the_uploads():
    """One pause of a second among steps of milliseconds is not a thousand uploads' worth."""
    figures = Figures()
    figures.uploaded(2e-4)
    for _ in range(8):
        figures.stepped(5e-3, CHOICES, 100, False, 0)
    figures.stepped(1.0, CHOICES, 100, True, 1)
    assert figures.step_s < 7e-3
    assert figures.stall_s < 5e-4


def test_steps_of_another_batch_are_not_compared():
    """Eight rows take longer than one; no upload did that."""
    figures = Figures()
    figures.uploaded(2e-4)
    for _ in range(8):
        figures.stepped(5e-3, CHOICES, 100, False, 0)
        figures.stepped(12e-3, 8 * CHOICES, 800, True, 1)
    assert 2e-4 == pytest.approx(figures.stall_s)


@pytest.mark.parametrize("rows", [1, 8])
def test_misses_are_compared_within_a_batch_of_one_size(rows):
    """Batches of two sizes in turn, uploads beside one of them: its misses beside its own mean are no upload's."""
    rng, figures = np.random.default_rng(3), Figures()
    figures.uploaded(1e-4)
    for n in range(4000):
        of_step = (1, 8)[n % 2]
        misses = int(rng.binomial(CHOICES * of_step, 0.4))
        copying = of_step == rows and n // 2 % 4 == 0
        seconds = 3e-3 + 1e-3 * of_step + 20e-6 * misses
        figures.stepped(seconds, CHOICES * of_step, misses, copying, 4 * int(copying))
    assert figures.miss_s > 15e-6
    assert figures.stall_s < 35e-6


def test_miss_is_the_slope_of_seconds_over_misses():
    """Steps with more misses take longer: by so much each, less what the noise may have added."""
    rng, figures = np.random.default_rng(1), Figures()
    for _ in range(200):
        misses = int(rng.normal(150, 12))
        figures.stepped(4e-3 + 24e-6 * misses + 2e-4 * rng.standard_normal(), CHOICES, misses, False, 0)
    assert 18e-6 < figures.miss_s < 26e-6


def test_misses_that_never_vary_tell_nothing():
    """With everything resident, or nothing, no slope is invented; pure noise is no slope either."""
    same, noise, rng = Figures(), Figures(), np.random.default_rng(2)
    for _ in range(100):
        same.stepped(5e-3 + 1e-3 * rng.random(), CHOICES, 0, False, 0)
        noise.stepped(5e-3 + 1e-3 * rng.random(), CHOICES, int(rng.integers(100, 200)), False, 0)
    assert same.miss_s is None
    assert noise.miss_s < 1e-6
