"""Experts in passing on a card and emulated: the CPU's bits, and a host that never waits for what waits for it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from threading import Event

import numpy as np
import pytest
from conftest import assert_same_bits
from devices.cuda.emulator import emulated, missing
from devices.cuda.fakes import CUresult
from devices.cuda.machines import MACHINES, machine
from devices.cuda.spancase import OnCard, slab_spec

import coli
from coli.container.layout import slab_layout
from coli.container.reader import Container
from coli.devices.base import DeviceError
from coli.devices.cuda import plan, probe, spanplan, stream
from coli.devices.cuda.context import Context
from coli.engine import streaming
from coli.placement import streaming as shares

TRUNK = "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0,experts=cpu"
CONTEXT = 256
IDS = np.random.default_rng(8).integers(0, 250, 120)
IDS[40:110] = 7  # one expert gets more rows than a tile has
CUTS = (20, 5, 2, 85)
needs_emulator = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def case(make_container):
    """(path, the CPU's logits behind every cut of a prompt)."""
    path = str(make_container("tiny-random"))
    with coli.load(path, devices="none", threads=2, context=CONTEXT) as model:
        return path, prompt(model)


@pytest.fixture
def every(monkeypatch):
    """Batches of any size are streamed, all of their experts."""
    monkeypatch.setattr(streaming, "STREAM_ROWS", 2)
    monkeypatch.setattr(spanplan, "STEP_ROWS", 2)
    monkeypatch.setattr(shares, "choose", lambda rows, expert_bytes, speeds: list(range(len(rows))))


def prompt(model) -> list[np.ndarray]:
    session, at, found = model.session(), 0, []
    for n in CUTS:
        found.append(session.prefill(IDS[at : at + n]))
        at += n
    session.close()
    return found


def load(path, **options) -> coli.Model:
    options = {"devices": "0", "vram": 512 << 20, "threads": 2, "context": CONTEXT, "place": TRUNK, **options}
    return coli.load(path, **options)


def check(model, expected) -> None:
    for at, (a, b) in enumerate(zip(prompt(model), expected, strict=True)):
        assert_same_bits(a, b, f"cut {at}")


def said(caplog) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == "coli.place"]
    return [line for line in lines if "in passing" in line]


@pytest.mark.parametrize(("slots", "piece_bytes"), [(8, 2 << 20), (2, 1000)])
@pytest.mark.parametrize("name", MACHINES)
def test_streamed_prompt_has_the_bits_of_the_cpu(case, every, monkeypatch, name, slots, piece_bytes):
    """All experts in passing: in one wave, and with a ring so short that every slot is used again and again."""
    monkeypatch.setattr(stream, "_MOST_SLOTS", slots)
    monkeypatch.setattr(stream, "_PIECE_BYTES", piece_bytes)
    streams = []
    begin = stream.Streamer.begin

    def counted(self, *arguments):
        streams.append(begin(self, *arguments))
        return streams[-1]

    monkeypatch.setattr(stream.Streamer, "begin", counted)
    with machine(name) as driver:
        with load(case[0]) as model:
            check(model, case[1])
            layers = model.config.num_hidden_layers
            assert model.stats()["fallen"] == []
        assert len(streams) == len(CUTS) * layers - 1  # the first layer of all is the CPU's, to be measured
        assert all(one.seconds > 0 for one in streams)
        if slots == 2:
            assert max(len(one._waves) for one in streams) >= 6
        if driver is not None:
            assert driver.complaint == "" and driver.leaks() == {}


class Answering(OnCard):
    """A host that streams the experts of ``part`` and has nothing for their ranks."""

    part = slice(None, None, 2)

    def answer(self, a, asked):
        experts = np.unique(asked.top_idx[asked.external == 0])[self.part]
        before = asked.external.copy()
        under_way = None
        if len(experts):
            under_way = self.device.begin_stream(
                self.run, asked, experts, [self.slab(a + asked.place, e) for e in experts]
            )  # fmt: skip
            assert (asked.external == (before | np.isin(asked.top_idx, experts))).all()
        found = super().answer(a, asked)
        if under_way is not None:
            under_way.wait()
        return found


@pytest.mark.parametrize("name", MACHINES)
def test_streamed_ranks_are_not_looked_for_in_the_answer(case, monkeypatch, name):
    """The host answers NaN in ranks that the card has; experts in slots, in passing and of the host make one layer."""
    monkeypatch.setattr(spanplan, "STEP_ROWS", 2)
    ids = IDS[:20].tolist()
    with ExitStack() as stack:
        stack.enter_context(machine(name))
        device = probe.list_devices()[0]
        stack.callback(device.close)
        on_card = Answering(case[0], device, [(layer, expert) for layer in range(4) for expert in (1, 6)])
        begin = device.begin_span

        def begin_span(*arguments):
            on_card.run = begin(*arguments)
            return on_card.run

        device.begin_span = begin_span
        device.open_stream()
        logits, _ = on_card.forward([(ids, 0, on_card.new_states())], [19])
        assert_same_bits(logits[0], case[1][0], "20 rows")
        assert sum(n for _, n in on_card.asked) > 0


@needs_emulator
def test_card_without_memory_streams_nothing(case, every, monkeypatch, caplog):
    """No room for the slots of the ring: one line, nothing is left behind, and the CPU has all experts."""
    alloc, found = Context.alloc, []

    def full(self, n_bytes, what):
        if what == "experts in passing":
            found.append(what)
            if len(found) == 3:  # slots and the first scratch were to be had
                raise DeviceError("the card is full", "out of memory")
        return alloc(self, n_bytes, what)

    monkeypatch.setattr(Context, "alloc", full)
    with emulated() as driver, caplog.at_level(logging.INFO, logger="coli"):
        with load(case[0]) as model:
            check(model, case[1])
            streamer = model.placed.devices[0]._streamer
            assert streamer is None and model.stats()["fallen"] == []
        assert len(said(caplog)) == 1 and "the card is full" in said(caplog)[0]
        assert len(found) == 3 and driver.leaks() == {}


@needs_emulator
@pytest.mark.parametrize(
    ("call", "after"), [("cuMemcpyHtoDAsync", 3), ("cuLaunchKernel", 2), ("cuEventRecord", 9)]
)  # fmt: skip
def test_failed_call_leaves_the_layer_to_the_cpu(case, every, monkeypatch, caplog, call, after):
    """Whatever call fails under a stream: the same logits, one warning, and no stream afterwards."""
    begin, begun = stream.Streamer.begin, []
    with emulated() as driver, caplog.at_level(logging.INFO, logger="coli"):

        def fails(self, *arguments):
            begun.append(1)
            if len(begun) == 2:
                driver.fail[call] = driver.count[call] + after, CUresult.CUDA_ERROR_INVALID_VALUE
            return begin(self, *arguments)

        monkeypatch.setattr(stream.Streamer, "begin", fails)
        with load(case[0]) as model:
            check(model, case[1])
            assert [what for what, _, _ in model.stats()["fallen"]] == ["experts in passing of a prompt"]
            assert model.engine.program.spans[0].dropped is False
        assert len(begun) == 2 and len(said(caplog)) == 1 and "computed on the CPU" in said(caplog)[0]
        assert driver.leaks() == {}


@needs_emulator
def test_card_lost_under_a_stream_is_given_up(case, every, monkeypatch):
    """A sticky error in a thread of the stream: the batch is computed again on the CPU, with the same bits."""
    begin, begun = stream.Streamer.begin, []
    with emulated() as driver:

        def dies(self, *arguments):
            begun.append(model.placed.devices[0]._workspace.mailbox)
            if len(begun) == 3:
                call = "cuMemcpyHtoDAsync"
                driver.fail[call] = driver.count[call] + 4, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
            return begin(self, *arguments)

        monkeypatch.setattr(stream.Streamer, "begin", dies)
        with load(case[0]) as model:
            check(model, case[1])
            assert model.engine.program.mixers == [] and len(begun) == 3
            begun[0].abort(True)  # this card is not really lost, and would wait 20 s for its host


@needs_emulator
def test_streams_need_a_batch_in_steps(case, every, monkeypatch, caplog):
    """Behind a kernel that waits for its host nothing is started: the CPU answers, and one line says so."""
    monkeypatch.setattr(spanplan, "STEP_ROWS", 1 << 30)
    with emulated(), load(case[0]) as model:
        check(model, case[1])
    assert any("nobody is ready for them" in line for line in said(caplog))


def test_streamed_batches_are_launched_in_steps():
    """Else every large prompt would find nobody ready."""
    assert streaming.STREAM_ROWS >= spanplan.STEP_ROWS


@needs_emulator
def test_card_that_goes_silent_in_a_stream_is_lost(case, every, monkeypatch, caplog):
    """Copies that do not end: after the limit the card is lost, and the CPU has the bits; closing hangs nowhere."""
    monkeypatch.setattr(stream, "ANSWER_LIMIT_S", 0.3)
    silent, begun = Event(), []
    send = stream.Stream._send

    def stuck(self, turn, thread):
        if len(begun) == 3:
            silent.wait()
        send(self, turn, thread)

    begin = stream.Streamer.begin

    def counted(self, *arguments):
        begun.append(1)
        return begin(self, *arguments)

    monkeypatch.setattr(stream.Stream, "_send", stuck)
    monkeypatch.setattr(stream.Streamer, "begin", counted)
    try:
        with emulated(), load(case[0]) as model:
            check(model, case[1])
            assert len(model.engine.program.lost) == 1
        assert "no answer within" in caplog.text
    finally:
        silent.set()


@needs_emulator
def test_closed_streamer_is_closed(case):
    """Twice is once, and the next `open_stream` makes another."""
    with emulated() as driver:
        device = probe.list_devices()[0]
        OnCard(case[0], device, [])
        device.open_stream()
        streamer = device._streamer
        streamer.close()
        streamer.close()
        device.close()
        device.close()
        assert device._streamer is None and driver.leaks() == {}


@needs_emulator
def test_memory_of_a_streamer_is_what_it_says(case):
    """`stream_bytes` is what is taken, and closing gives it back."""
    with emulated() as driver:
        device = probe.list_devices()[0]
        OnCard(case[0], device, [])
        taken = sum(memory.nbytes for memory in driver.live["memory"].values())
        device.open_stream()
        taken = sum(memory.nbytes for memory in driver.live["memory"].values()) - taken
        span = device._spans[0]
        stated = stream.stream_bytes(device._slab, span.max_rows, span.top_k)
        assert stated - 3 * 256 < taken <= stated
        pinned = [memory.nbytes for memory in driver.live["pinned"].values()]
        device.open_stream()  # nothing the second time
        assert [memory.nbytes for memory in driver.live["pinned"].values()] == pinned
        device.close()
        assert driver.leaks() == {}


def test_large_experts_get_fewer_slots():
    """The ring has two waves, and no more memory than is worth it; staging stays below 16 MB."""
    assert [stream._ring(n) for n in (1_622_016, 3_170_304, 12 << 20, 100 << 20)] == [8, 8, 2, 2]
    assert stream._THREADS * stream._BUFFERS * stream._PIECE_BYTES <= 16 << 20


def test_waves_and_tiles_cover_every_job():
    """Every job is in one tile of its wave; a tile has one expert, and no more jobs than the kernels take."""
    jobs_of = [3, 130, 1, 64, 65]
    tiles, waves = stream._cut(jobs_of, 2)
    assert waves == [(0, 133, 0, 4), (133, 65, 4, 2), (198, 65, 6, 2)]
    assert tiles.tolist() == [(0, 3), (3, 64), (67, 64), (131, 2), (0, 1), (1, 64), (0, 64), (64, 1)]
    assert plan.JOBS_OF_TILE == 64


@needs_emulator
def test_experts_of_another_shape_are_refused(case):
    """A slab that is too short is an error before anything moves; so are 16-bit experts, and no span at all."""
    slabs = Container.open(case[0]).slabs("layers.0.mlp.experts")
    with emulated():
        device = probe.list_devices()[0]
        device.open_arena(0, 0, slab_spec(slabs))
        with pytest.raises(DeviceError, match="without a span"):
            device.open_stream()
        OnCard(case[0], device, [])
        with pytest.raises(DeviceError, match="not R16 blocks"):
            stream.Streamer(device._context, slab_layout("bf16", 64, 32), 64, 2)
        with pytest.raises(DeviceError, match="nobody is ready"):
            device.begin_stream(None, None, [], [])
        device.close()
