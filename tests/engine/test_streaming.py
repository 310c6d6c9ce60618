"""Experts that a device computes in passing while a span waits: the CPU's bits, whatever is streamed or fails."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from conftest import assert_same_bits
from engine.standins import MiB

from coli.devices.fake import FakeDevice
from coli.devices.fakestream import StreamingFake
from coli.engine import streaming
from coli.placement import streaming as shares

IDS = np.random.default_rng(8).integers(0, 256, 400)
LAYERS = 8
TRUNK = "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0"
CUTS = (20, 1, 9, 3)


@pytest.fixture(scope="module")
def expected(cpu):
    return answers(cpu)


@pytest.fixture
def half(monkeypatch):
    """Batches of any size are looked at, and half of their experts are streamed."""
    monkeypatch.setattr(streaming, "STREAM_ROWS", 2)
    monkeypatch.setattr(shares, "choose", lambda rows, expert_bytes, speeds: list(range(0, len(rows), 2)))


def answers(model) -> list[np.ndarray]:
    """Logits of a prompt in cuts, of steps, of a copy beside its original, and of every position at once."""
    session, at, found = model.session(), 0, []
    for n in CUTS:
        found.append(session.prefill(IDS[at : at + n]))
        at += n
    found.append(session.step(5))
    copied = session.copy()
    return [*found, copied.prefill(IDS[:4]), session.step(4), model.logits(IDS[:3])]


def check(model, expected, what: str) -> None:
    for at, (a, b) in enumerate(zip(answers(model), expected, strict=True)):
        assert_same_bits(a, b, f"{what}, answer {at}")


def calls(device, operation: str) -> list[tuple]:
    return [call[1:] for call in device.calls if call[0] == operation]


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "coli.place"]


def leave(tier, n: int) -> None:
    """All but n experts leave their slots."""
    for key in tier.residency.tables[0].residents()[n:].tolist():
        tier._cards[0].device.seat(*divmod(key, tier.experts), None)
        tier.residency.tables[0].release(tier.residency.vacate(key))


@pytest.mark.parametrize("place", [f"{TRUNK},experts=cpu", TRUNK.replace(",shexp=0", ",experts=cpu")])
@pytest.mark.parametrize("part", ["half", "all"])
def test_bits_are_the_same_whatever_is_streamed(load, expected, monkeypatch, place, part):
    """Every second expert or all of them, with the shared expert here or there: the CPU's logits."""
    step = {"half": 2, "all": 1}[part]
    monkeypatch.setattr(streaming, "STREAM_ROWS", 2)
    monkeypatch.setattr(shares, "choose", lambda rows, expert_bytes, speeds: list(range(0, len(rows), step)))
    device = StreamingFake(64 * MiB)
    model = load(device, place=place)
    check(model, expected, f"{place} {part}")
    assert device.stream is None and model.stats()["fallen"] == []
    n = LAYERS * sum(rows > 1 for _, _, rows in calls(device, "span"))
    assert len(calls(device, "stream")) == len(calls(device, "streamed")) == n - 1  # one layer measured the CPU
    found = model.engine.program.spans[0].streaming
    assert found.streamed == sum(len(experts) for (experts,) in calls(device, "stream"))
    assert found.streamed / found.missing > (0.9 if part == "all" else 0.4)


@pytest.mark.parametrize("n_experts", [1, 60])
def test_bits_with_part_of_the_experts_resident(load, expected, half, n_experts):
    """Only what is in no slot is streamed."""
    device = StreamingFake(64 * MiB)
    model = load(device, place=f"{TRUNK},experts=0")
    leave(model.placed.tier, n_experts)
    check(model, expected, f"{n_experts} resident")
    assert calls(device, "stream")


def test_decode_is_not_looked_at(load, monkeypatch):
    """Small batches go the way they always went: nothing is opened, counted or streamed for them."""
    device = StreamingFake(64 * MiB)
    model = load(device, place=f"{TRUNK},experts=cpu")
    monkeypatch.setattr(streaming.Streaming, "ready", None)
    monkeypatch.setattr(streaming.Streaming, "compute", None)
    session = model.session()
    session.prefill(IDS[: streaming.STREAM_ROWS - 1])
    session.step(1)
    assert not device.is_open
    with pytest.raises(TypeError):
        session.prefill(IDS[: streaming.STREAM_ROWS])


def test_prompt_is_streamed_by_what_it_takes(load, monkeypatch):
    """With no share forced: beside a CPU of 20 us an expert a fast stream grows, and a slow one ends soon."""
    monkeypatch.setattr(shares, "START_US", 0.0)
    monkeypatch.setattr(streaming, "STREAM_ROWS", 32)
    took = shares.StreamFigures.cpu_took
    monkeypatch.setattr(
        shares.StreamFigures, "cpu_took", lambda figures, _, *what: took(figures, 20e-6 * what[1], *what)
    )  # fmt: skip
    found = {}
    for name, expert_s in (("fast", 1e-7), ("slow", 1e-3)):
        device = StreamingFake(64 * MiB, expert_s=expert_s)
        model = load(device, place=f"{TRUNK},experts=cpu")
        session = model.session()
        for _ in range(2):
            session.prefill(IDS[:32])
        session.close()
        found[name] = [len(experts) for (experts,) in calls(device, "stream")]
        figures = model.engine.program.spans[0].streaming.figures
        assert figures.speeds != shares.FIRST
    right = found["fast"][-1]
    assert len(found["fast"]) == 2 * LAYERS - 1 and found["fast"][0] < right  # one layer measured the CPU
    assert set(found["fast"][1:]) == {right}
    assert len(found["slow"]) == 1


@pytest.mark.parametrize(("operation", "n"), [("stream", 1), ("stream", 5), ("streamed", 3)])
def test_failed_stream_is_computed_by_the_cpu(load, expected, half, caplog, operation, n):
    """Whichever fails: the same logits, one line, no stream afterwards, and the span goes on."""
    device = StreamingFake(64 * MiB, fail=[(operation, n)])
    model = load(device, place=f"{TRUNK},experts=cpu")
    with caplog.at_level(logging.INFO, logger="coli"):
        check(model, expected, f"{operation} {n}")
    [line] = [line for line in said(caplog) if "in passing" in line]
    assert "failed" in line and "computed on the CPU" in line
    assert len(calls(device, "stream")) == n and device.stream is None
    assert model.stats()["fallen"][0][0] == "experts in passing of a prompt"
    assert model.engine.program.spans[0].dropped is False


@pytest.mark.parametrize("operation", ["open", "stream", "streamed"])
def test_device_lost_in_a_stream_is_given_up(load, expected, half, operation):
    """A card that dies there is lost as in any other call: the batch is computed again without it."""
    device = StreamingFake(64 * MiB)
    begin = device._begin

    def dies(name, *details):
        device._lost = device._lost or (name == operation and device._count[name] == (0 if name == "open" else 2))
        begin(name, *details)

    device._begin = dies
    model = load(device, place=f"{TRUNK},experts=cpu")
    check(model, expected, operation)
    assert model.engine.program.mixers == [] and device.stream is None


def test_no_memory_for_streams_is_said_once(load, expected, half, caplog):
    """A card that is full goes on without them."""
    device = StreamingFake(64 * MiB, fail=[("open", 1)])
    model = load(device, place=f"{TRUNK},experts=cpu")
    with caplog.at_level(logging.INFO, logger="coli"):
        check(model, expected, "full")
    assert len([line for line in said(caplog) if "no experts in passing" in line]) == 1
    assert len(calls(device, "open")) == 1 and not calls(device, "stream")
    assert model.stats()["fallen"] == []


@pytest.mark.parametrize(
    "devices",
    [lambda: [FakeDevice(64 * MiB)], lambda: [StreamingFake(64 * MiB), FakeDevice(64 * MiB, name="b")]],
    ids=["cannot", "another has experts"],
)
def test_nothing_is_streamed_elsewhere(load, expected, half, devices):
    """A device that takes none is not asked, and with experts on another device the two share as they always did."""
    made = devices()
    model = load(*made, place=f"{TRUNK},experts={'cpu' if len(made) == 1 else '1'}")
    check(model, expected, "not streamed")
    assert not calls(made[0], "open") and not calls(made[0], "stream")


def test_model_that_lacks_nothing_opens_no_stream(load, expected, half):
    """With every expert in a slot no memory is taken for others."""
    device = StreamingFake(64 * MiB)
    check(load(device), expected, "all")
    assert not calls(device, "open")


def test_spans_of_a_device_share_their_figures(load, half):
    """What one span has learnt the next one knows."""
    device = StreamingFake(64 * MiB)
    model = load(device, place="lmhead=0,attnproj=0,experts=cpu")
    first, second = model.engine.program.spans
    assert first.streaming is second.streaming


def test_error_of_the_cpu_ends_the_stream_first(load, expected, half):
    """The CPU's part fails in the middle: the stream is waited for before the run is given up, and all goes on."""
    device = StreamingFake(64 * MiB)
    model = load(device, place=f"{TRUNK},experts=cpu")
    engine = model.engine
    session = model.session()
    session.prefill(IDS[:20])
    real = engine.runner

    class Broken:
        """A runner that has no memory."""

        def __getattr__(self, name):
            return getattr(real, name)

        def moe(self, *arguments):
            raise MemoryError("no room")

    engine.runner = Broken()
    with pytest.raises(MemoryError):
        session.prefill(IDS[21:30])
    engine.runner = real
    assert device.stream is None and device.calls[-1] == ("abandon",) and device._run is None
    assert_same_bits(session.prefill(IDS[20:21]), expected[1], "after the error")
