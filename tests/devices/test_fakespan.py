"""coli/devices/fakespan.py: runs of layers keep a card's manners, and stop whoever drives them wrongly.

That they compute the CPU's bits is tested where whole models are: tests/engine/test_span.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from devices.slabs import assert_bits, random_matrix, random_slabs

from coli.devices.base import DeviceError, LayerSpec, MixerSpec, SpanPart
from coli.devices.fake import FakeDevice

MIB = 1 << 20
HIDDEN, EXPERTS, TOP_K, VOCAB = 128, 4, 2, 40
GEOMETRY = {
    "hidden_size": HIDDEN, "n_experts": EXPERTS, "top_k": TOP_K, "dn_k_heads": 2, "dn_v_heads": 4, "dn_k_dim": 16,
    "dn_v_dim": 16, "conv_taps": 4, "q_scale": 0.25, "eps": 1e-6,
}  # fmt: skip
NO_TURNS = np.empty((64, 0), np.float32)


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


@dataclass
class Rig:
    """A device with two DeltaNet layers in one span, the head behind them, and what the host needs to help out."""

    device: FakeDevice
    layers: list[Any]
    span: Any
    slabs: np.ndarray
    helper: FakeDevice  # holds all experts in slots 0 to 3, and the shared ones in 4 and 5
    x: np.ndarray

    def parts(self, n_rows: int, position: int = 0, states=None) -> list[SpanPart]:
        if states is None:
            states = [self.device.new_state(layer.mixer) for layer in self.layers]
        for state in states:
            state.reach(position + n_rows)
        return [SpanPart(0, n_rows, position, states)]

    def begin(self, parts, x, logit_rows=()):
        return self.device.begin_span(self.span, parts, x, NO_TURNS, NO_TURNS, logit_rows)

    def answer(self, run, asked) -> None:
        """As a host does: its slots in an order of its own, padded rows."""
        n, k = asked.external.shape
        slot_of = np.random.default_rng(n).permutation(n * k).astype(np.int32).reshape(n, k)
        expert_y = np.full((n * k, HIDDEN + 16), np.nan, np.float32)
        for t, j in zip(*(asked.external == 0).nonzero()):
            ticket = self.helper.issue(asked.place, [asked.top_idx[t, j]], [t], asked.xn)
            expert_y[slot_of[t, j], :HIDDEN] = self.helper.take(ticket)
        shared_y = None
        if asked.shared:
            ticket = self.helper.issue(asked.place, [EXPERTS + asked.place] * n, range(n), asked.xn)
            shared_y = np.pad(self.helper.take(ticket), ((0, 0), (0, 16)))
        run.answer(expert_y, slot_of, shared_y)

    def run(self, parts, x, logit_rows=()):
        """(x behind the span, logits, experts chosen, how often it asked)."""
        run, asks = self.begin(parts, x, logit_rows), 0
        while (asked := run.ask()) is not None:
            self.answer(run, asked)
            asks += 1
        x_out = np.empty_like(x)
        logits = np.empty((len(logit_rows), VOCAB), np.float32) if logit_rows else None
        top_idx = run.finish(x_out, logits)
        return x_out, logits, top_idx, asks


def make_rig(seated: str = "all", with_shared: bool = True, **options) -> Rig:
    """seated : "all", "some" (1 and 2) or "none" of the experts."""
    rng = np.random.default_rng(3)
    slabs, spec = random_slabs(rng, "i4_group", HIDDEN, 256, EXPERTS + 2)
    device, helper = FakeDevice(64 * MIB, **options), FakeDevice(64 * MIB, name="helper")
    for one, n in ((device, 2 * EXPERTS), (helper, EXPERTS + 2)):
        one.open_arena(MIB, n, spec)
    for i, slab in enumerate(slabs):
        helper.write_slot(i, slab)
    layers = []
    for index in range(2):
        vectors = {
            "conv": normal(rng, 4, 128), "exp_a_log": np.ones(4, np.float32), "dt_bias": np.zeros(4, np.float32),
            "dn_norm": np.ones(16, np.float32),
        }  # fmt: skip
        into = device.upload(random_matrix(rng, "i8_row", 192, HIDDEN, f"into{index}"))
        out = device.upload(random_matrix(rng, "i8_row", HIDDEN, 64, f"out{index}"))
        mixer = device.mixer(MixerSpec(False, GEOMETRY, vectors, random_matrix(rng, "f32", 8, HIDDEN)), into, out)
        norms = [1 + 0.1 * normal(rng, HIDDEN) for _ in range(2)]
        routers = [random_matrix(rng, "bf16", EXPERTS, HIDDEN), random_matrix(rng, "f32", 1, HIDDEN)]
        shared = device.upload_slab(f"shared{index}", spec, slabs[EXPERTS + index]) if with_shared else None
        layers.append(device.layer(5 + index, mixer, shared, LayerSpec(*norms, *routers)))
        for expert in {"all": range(EXPERTS), "some": (1, 2), "none": ()}[seated]:
            device.write_slot(EXPERTS * index + expert, slabs[expert])
            device.seat(5 + index, expert, EXPERTS * index + expert)
    head = device.head(normal(rng, HIDDEN), device.upload(random_matrix(rng, "i8_row", VOCAB, HIDDEN, "head")))
    return Rig(device, layers, device.span(layers, head), slabs, helper, normal(rng, 6, HIDDEN))


@pytest.fixture(scope="module")
def expected():
    """x, logits and experts of six rows where the device has everything."""
    rig = make_rig()
    x, logits, top_idx, asks = rig.run(rig.parts(6), rig.x, (2, 5))
    assert asks == 0 and np.isfinite(x).all() and len(np.unique(top_idx)) == EXPERTS
    return x, logits, top_idx


@pytest.mark.parametrize("seated", ["all", "some", "none"])
@pytest.mark.parametrize("with_shared", [True, False])
def test_span_answers_alike_whoever_computes_the_experts(expected, seated, with_shared):
    """Experts and shared expert here, in part, or asked for: the same bits; only what is missing is asked for."""
    rig = make_rig(seated, with_shared)
    x, logits, top_idx, asks = rig.run(rig.parts(6), rig.x, (2, 5))
    assert_bits(expected[0], x)
    assert_bits(expected[1], logits)
    np.testing.assert_array_equal(expected[2], top_idx)
    assert asks == (0 if seated == "all" and with_shared else 2)
    told = [call[2:] for call in rig.device.calls if call[0] == "answer"]
    missing = {"all": 0, "some": [np.isin(layer, (0, 3)).sum() for layer in top_idx], "none": 12}[seated]
    assert told == [(n, not with_shared) for n in np.broadcast_to(missing, 2)][: len(told)]


def test_span_in_any_cut_and_on_copies_answers_alike(expected):
    """Rows in several batches, the last of them on copied states, are the rows of one batch."""
    rig = make_rig("some")
    parts = rig.parts(2)
    found = [rig.run(parts, rig.x[:2])[0]]
    found.append(rig.run(rig.parts(3, 2, parts[0].states), rig.x[2:5])[0])
    copies = [state.copy() for state in parts[0].states]
    rig.run(rig.parts(1, 5, parts[0].states), rig.x[:1])
    x, logits, _, _ = rig.run(rig.parts(1, 5, copies), rig.x[5:], (0,))
    assert_bits(expected[0], np.concatenate([*found, x]))
    assert_bits(expected[1][1:], logits)


def test_rows_of_two_sequences_keep_apart(expected):
    """Parts of a batch have states of their own."""
    rig = make_rig("some")
    first, second = rig.parts(6)[0], rig.parts(2)[0]
    both = [first, second._replace(first_row=6)]
    x = rig.run(both, np.concatenate([rig.x, rig.x[:2]]))[0]
    assert_bits(expected[0], x[:6])
    assert_bits(expected[0][:2], x[6:])


def test_batch_reads_the_seats_of_its_beginning(expected):
    """An expert that is seated afterwards is asked for by no later batch; a slot that is read is not written."""
    rig = make_rig("none")
    for layer in (5, 6):
        rig.device.write_slot(layer, rig.slabs[1])
        rig.device.seat(layer, 1, layer)
    run = rig.begin(rig.parts(6), rig.x)
    with pytest.raises(AssertionError, match="slot 5 is written"):
        rig.device.write_slot(5, rig.slabs[0])
    rig.device.write_slot(0, rig.slabs[0])  # another one may be
    with pytest.raises(AssertionError, match="a batch is in a span"):
        rig.device.seat(5, 0, 0)
    run.abandon()
    rig.device.seat(5, 0, 0)
    x, _, top_idx, _ = rig.run(rig.parts(6), rig.x)
    assert_bits(expected[0], x)
    told = [call[2] for call in rig.device.calls if call[0] == "answer"]
    assert told == [(top_idx[0] > 1).sum(), (top_idx[1] != 1).sum()]


@pytest.mark.parametrize("operation", ["span", "ask", "answer", "finish"])
@pytest.mark.parametrize("n", [1, 2])
def test_failure_ends_the_run_and_spoils_the_states(expected, operation, n):
    """After a DeviceError the states are of no use and the device goes on with others."""
    rig = make_rig("some", fail=[(operation, n)])
    parts = rig.parts(6)
    if (operation, n) in (("span", 2), ("finish", 2)):
        rig.run(rig.parts(1), rig.x[:1])
    with pytest.raises(DeviceError) as failed:
        rig.run(parts, rig.x)
    assert failed.value.kind == "launch"
    for state in parts[0].states:
        with pytest.raises(AssertionError, match="spoiled"):
            state.copy()
        state.close()
    assert_bits(expected[0], rig.run(rig.parts(6), rig.x)[0])


def test_abandoned_batch_frees_the_device(expected):
    """At any time, and twice; its states are spoiled."""
    rig = make_rig("some")
    for stop in range(4):
        parts = rig.parts(6)
        run = rig.begin(parts, rig.x)
        if stop:
            asked = run.ask()
        if stop > 1:
            rig.answer(run, asked)
        if stop > 2:
            run.ask()
        run.abandon()
        run.abandon()
        with pytest.raises(AssertionError, match="spoiled"):
            parts[0].states[0].copy()
    assert_bits(expected[0], rig.run(rig.parts(6), rig.x)[0])


def misuses():
    def two_batches_at_once(rig):
        rig.begin(rig.parts(1), rig.x[:1])
        rig.begin(rig.parts(1), rig.x[:1])

    def a_group_behind_a_run_that_waits(rig):
        rig.begin(rig.parts(1), rig.x[:1])
        rig.device.issue(5, [0], [0], rig.x[:1])

    def finish_before_the_answer(rig):
        run = rig.begin(rig.parts(1), rig.x[:1])
        run.ask()
        run.finish(None, None)

    def ask_twice(rig):
        run = rig.begin(rig.parts(1), rig.x[:1])
        run.ask()
        run.ask()

    def answer_unasked(rig):
        rig.begin(rig.parts(1), rig.x[:1]).answer(rig.x, np.zeros((1, TOP_K), np.int32), None)

    def answer_without_the_shared_expert(rig):
        rig = make_rig("some", False)
        run = rig.begin(rig.parts(1), rig.x[:1])
        run.ask()
        run.answer(rig.x, np.zeros((1, TOP_K), np.int32), None)

    def use_after_the_end(rig):
        run = rig.begin(rig.parts(1), rig.x[:1])
        run.abandon()
        run.ask()

    def logits_that_were_not_wanted(rig):
        run = make_rig().begin(rig.parts(1), rig.x[:1])
        run.ask()
        run.finish(None, np.empty((1, VOCAB), np.float32))

    def state_without_room(rig):
        parts = rig.parts(1)
        parts[0].states[0].n_bytes = 0
        rig.begin(parts, rig.x[:1])

    def state_of_another_time(rig):
        parts = rig.parts(1)
        rig.run(parts, rig.x[:1])
        rig.run(parts, rig.x[:1])

    def states_in_the_wrong_order(rig):
        part = rig.parts(1)[0]
        rig.begin([part._replace(states=part.states[::-1])], rig.x[:1])

    def more_rows_than_it_takes(rig):
        rig.device.span_rows = 2
        rig.span = rig.device.span(rig.layers)
        rig.begin(rig.parts(3), rig.x[:3])

    def rows_of_nobody(rig):
        rig.begin(rig.parts(1), rig.x[:2])

    def layers_with_a_hole(rig):
        rig.device.span([rig.layers[1], rig.layers[0]])

    def logits_without_a_head(rig):
        rig.span = rig.device.span(rig.layers)
        rig.begin(rig.parts(1), rig.x[:1], (0,))

    def seat_in_an_empty_slot(rig):
        rig.device.seat(5, 2, 7)

    def two_experts_in_one_slot(rig):
        rig.device.seat(5, 3, 1)

    def overwritten_while_seated(rig):
        rig.device.write_slot(1, rig.slabs[2])

    def freed_matrix(rig):
        rig.device.free(rig.layers[0].mixer.into)
        rig.begin(rig.parts(1), rig.x[:1])

    return [value for value in locals().values()]


@pytest.mark.parametrize("misuse", misuses(), ids=lambda f: f.__name__)
def test_span_driven_wrongly_is_an_assertion_error(misuse):
    """What a card would answer with garbage, or never, stops the test."""
    with pytest.raises(AssertionError):
        misuse(make_rig("some"))


def test_layers_take_memory_beside_the_arena_as_announced():
    """Norms and routers are counted, and are no more than `span_bytes` said."""
    rig = make_rig()
    taken = sum(layer.n_bytes for layer in rig.layers)
    assert 0 < taken <= rig.device.span_bytes(GEOMETRY, 2)
    rig.device.set_free_bytes(rig.device._arena.size + rig.device._beside_bytes + 10)
    with pytest.raises(DeviceError) as failed:
        rig.device.layer(7, rig.layers[1].mixer, None, rig.layers[1].spec)
    assert failed.value.kind == "out of memory"
