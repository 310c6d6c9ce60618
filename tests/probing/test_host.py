"""coli.probing.host: from what calls take to the figures of a CPU, and what they are taken with."""

from __future__ import annotations

import logging

import pytest

from coli.engine.session import Engine
from coli.placement import CpuSpeeds, ModelShape, Probe, plan
from coli.probing import host
from coli.probing.samples import N_DELTANET, N_LAYERS, NARROWEST, Samples, widths

BLOCK = ModelShape.from_config(widths(1, 16))
PROJECTIONS = sum(item.bytes for item in BLOCK.components if item.name not in ("shexp", "lmhead"))
SHARED = sum(item.bytes for item in BLOCK.components if item.name == "shexp")
REGION_US = 5.0


def told(layer_us=40.0, matrix=100.0, experts=80.0, group_us=10.0, state=50.0) -> dict[str, float]:
    """What the calls of a block take on a CPU of such speeds, in us."""
    matrix_us, state_us = (n / gb_s / 1e3 for n, gb_s in ((PROJECTIONS, matrix), (2 * BLOCK.state_bytes, state)))
    one_us = BLOCK.cpu_expert_bytes / experts / 1e3
    few_us, all_us = (N_LAYERS * (group_us + n * one_us) for n in (2, 8))
    beside_us = (SHARED + BLOCK.rest_bytes) / matrix / 1e3
    return {
        "region": REGION_US,
        "read": PROJECTIONS / 120 / 1e3,
        "matrices": matrix_us + 2 * N_LAYERS * REGION_US,
        "few": few_us + N_LAYERS * REGION_US,
        "all": all_us + N_LAYERS * REGION_US,
        "states": state_us + N_DELTANET * REGION_US,
        "whole": matrix_us + all_us + state_us + beside_us + N_LAYERS * layer_us,
    }


def predicted_us(figures: CpuSpeeds) -> float:
    """A token of one block, by the placer."""
    made = plan(BLOCK, [], probe=Probe(figures, ()), context=0)
    head_us = next(item.bytes for item in BLOCK.components if item.name == "lmhead") / figures.matrix.gb_s / 1e3
    return 1e3 * made.predicted_ms_per_token - head_us


def test_cpu_of_told_speeds_gives_them_back():
    """Bandwidths, the group's start, and what a layer takes beyond its parts; the block takes what it took."""
    figures, ratio = host._figures(BLOCK, PROJECTIONS, told())
    assert 1.0 == ratio
    found = (figures.matrix.gb_s, figures.experts.gb_s, figures.experts.latency_us, figures.state_gb_s)
    assert (100.0, 80.0, 10.0, 50.0) == pytest.approx(found)
    assert (40.0, REGION_US) == pytest.approx((figures.layer_us, figures.region_us))
    assert predicted_us(figures) == pytest.approx(told()["whole"], rel=1e-6)


@pytest.mark.parametrize("disturbed", ["matrices", "all", "states"])
def test_parts_that_took_longer_than_the_whole_are_as_much_faster(disturbed):
    """What whole blocks took is the truth, whichever part was disturbed."""
    us = told(layer_us=0.0)
    us[disturbed] *= 3
    figures, ratio = host._figures(BLOCK, PROJECTIONS, us)
    assert ratio > 1.05 and 0.0 == figures.layer_us
    assert predicted_us(figures) == pytest.approx(us["whole"], rel=1e-6)


@pytest.mark.parametrize("region_us", [400.0, 20000.0])
def test_region_that_takes_more_than_the_parts_gives_no_nonsense(region_us):
    """A team that was put to sleep: no figure is negative, and the whole is about what it was."""
    figures, _ = host._figures(BLOCK, PROJECTIONS, told() | {"region": region_us})
    assert 0 < figures.matrix.gb_s and 0 < figures.experts.gb_s and 0 < figures.state_gb_s <= 240
    assert predicted_us(figures) == pytest.approx(told()["whole"], rel=0.3)


@pytest.mark.parametrize(
    "caches_mb, free_gb, width, blocks",
    [
        (32, 32, 1, 1), (300, 128, 1, 6), (768, 256, 1, 11), (300, 8, 1, 2), (32, 1, 2, 1), (32, 0.01, 8, 1),
        (0, 16, 1, 1),
    ],
)
def test_samples_are_several_times_the_caches_and_no_more_than_the_memory(
    monkeypatch, caplog, caches_mb, free_gb, width, blocks
):
    """An eighth of the free memory; a line where that is too little to leave the caches."""
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)
    made = []
    monkeypatch.setattr(host, "Samples", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(host, "available_bytes", lambda: int(free_gb * 2**30))
    monkeypatch.setattr(host, "_last_caches_bytes", lambda cpus: int(caches_mb * 10**6))
    samples = Samples(NARROWEST)
    engine = Engine(samples, threads=1)
    with caplog.at_level(logging.INFO, "coli"):
        host._samples_beyond_caches(engine, 1)
    engine.close()
    samples.close()
    assert [(width, 16, blocks)] == made
    least_bytes = blocks * min(PROJECTIONS, BLOCK.expert_count * BLOCK.expert_bytes) / width**2
    assert ("faster than its memory" in caplog.text) == (least_bytes < 3 * caches_mb * 10**6)
    assert 1 << 20 <= host.bytes_beyond_caches(()) <= max(free_gb * 2**30 / 8, 1 << 20)


def test_cpu_is_measured_with_the_engines_own_step():
    """Narrow samples, one thread: every figure is a number that a prediction can count with."""
    samples = Samples(NARROWEST)
    engine = Engine(samples, threads=1)
    cpu, read_gb_s = host.measure_cpu(engine, divisor=8)
    engine.close()
    samples.close()
    assert read_gb_s > 0.1 and cpu.matrix.gb_s > 0.1 and cpu.experts.gb_s > 0.1 and cpu.state_gb_s > 0.1
    assert 0 < cpu.region_us < 1e5


def test_figures_that_contradict_themselves_are_measured_twice_and_said(monkeypatch, caplog):
    """Once more, then one line."""
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)
    taken = []

    def in_turns(calls, budget_s, before):
        taken.append(set(calls))
        return told() | {"all": 1e6, "region": 1.0}

    monkeypatch.setattr(host, "in_turns", in_turns)
    samples = Samples(NARROWEST)
    engine = Engine(samples, threads=1)
    host.measure_cpu(engine, divisor=8)
    engine.close()
    samples.close()
    assert 2 == len(taken) and "times as long as the layer" in caplog.text
