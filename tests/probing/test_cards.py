"""coli.probing.cards: what a card is told to take is what is measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from probing.timed import TimedCard

from coli.devices.base import DeviceError
from coli.devices.fake import FakeDevice
from coli.engine.session import Engine
from coli.placement import CpuSpeeds, ModelShape, SpanSpeed, Speed
from coli.probing import cards, timing
from coli.probing.samples import N_DELTANET, N_LAYERS, NARROWEST, Samples, samples_for


ON_CPU_US = 250.0  # routed experts and a shared one of a layer


def measured(monkeypatch, card: TimedCard):
    """Its figures, on its own clock."""
    shape = ModelShape.from_config(samples_for(card.free_bytes() // 2).weights.config_dict)

    def beside_bytes(layer) -> float:
        state = 0 if layer.mixer.spec.is_attention else 2 * shape.state_bytes / N_DELTANET
        return shape.rest_bytes / N_LAYERS + state

    card.beside_bytes = beside_bytes
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: card.now))
    return measure_card(card)


def measure_card(card, cpu=CpuSpeeds(Speed(1), Speed(1))):
    """Figures and the round trip of a card beside a team of one."""
    samples = Samples(NARROWEST)
    engine = Engine(samples, threads=1)
    try:
        return cards.measure_card(card, engine, cpu)[:2]
    finally:
        engine.close()
        samples.close()


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"matrix": (50.0, 80.0), "experts": (30.0, 120.0)},
        {"deltanet_us": 5.0, "attention_us": 90.0, "hop_us": 40.0, "ask_us": 30.0, "head_gb_s": 100.0},
    ],
)
def test_card_of_told_figures_gives_them_back(monkeypatch, told):
    """Latency and bandwidth of matrices and groups; layers by kind, the way into a run, a question, keys and values."""
    monkeypatch.setattr(cards._Bench, "_experts_of_cpu_us", lambda self, engine, others: ON_CPU_US)
    figures, round_trip_us = measured(monkeypatch, TimedCard(**told))
    told = {"matrix": (400.0, 9.0), "experts": (250.0, 14.0)} | told
    for name in ("matrix", "experts"):
        speed = getattr(figures, name)
        assert told[name] == pytest.approx((speed.gb_s, speed.latency_us), rel=1e-3)
    assert told["matrix"][1] == pytest.approx(round_trip_us, rel=0.2)
    expected = {"deltanet_us": 30.0, "attention_us": 45.0, "hop_us": 11.0, "ask_us": 16.0}
    for name, value in expected.items():
        # a few keys and values are read behind the first position already
        assert told.get(name, value) == pytest.approx(getattr(figures.span, name), rel=0.02, abs=1.0), name
    # The team takes no time on this clock: what a group takes is the host's, and a cut what the CPU was told to take.
    shape = ModelShape.from_config(samples_for(TimedCard().free_bytes() // 2).weights.config_dict)
    (_, latency_us), one_us = told["experts"], shape.expert_bytes / told["experts"][0] / 1e3
    assert latency_us + one_us == pytest.approx(figures.host_us, rel=1e-3)
    shared = next(item.bytes for item in shape.components if item.name == "shexp")
    shared_us = ON_CPU_US * shared / (shared + shape.topk * shape.cpu_expert_bytes)
    here_us = latency_us + shape.topk * one_us
    cut_us = here_us + ON_CPU_US - max(shared_us + figures.host_us, here_us)
    assert cut_us == pytest.approx(figures.cut_us, rel=1e-3)
    told_head = min(told.get("head_gb_s", 300.0), told["matrix"][0])
    assert told_head == pytest.approx(figures.span.head_gb_s, rel=0.02)
    told_kv = min(80.0, told["matrix"][0])  # nothing is read faster than a matrix
    assert told_kv == pytest.approx(figures.span.kv_gb_s, rel=0.05)


def test_card_that_takes_no_whole_layers_has_no_figures_for_them(monkeypatch):
    """Such a card is asked for products and groups alone; either is given back when all is measured."""
    card = TimedCard(spans=False)
    figures, _ = measured(monkeypatch, card)
    assert figures.span is None
    assert card.closed


def test_card_is_closed_also_where_it_fails(monkeypatch):
    """A card that has no memory after all is one error of its own kind, and nothing stays on it."""
    card = TimedCard(1 << 20)
    with pytest.raises(DeviceError, match="too large"):
        measured(monkeypatch, card)
    assert card.closed


def test_fake_device_is_measured_through_the_same_interface():
    """The fake computes what it is asked, with its own waits: no slower than told, and whole layers too."""
    card = FakeDevice(20 << 20, gb_s=0.5, latency_us=2000)
    figures, round_trip_us = measure_card(card)
    assert 2000 <= round_trip_us
    assert 0 < figures.matrix.gb_s < 0.6  # no faster than told; how much slower is the machine's business
    assert isinstance(figures.span, SpanSpeed)
    assert 20 << 20 == card.free_bytes()
