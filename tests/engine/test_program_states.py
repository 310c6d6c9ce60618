"""Layers that a device takes whole: where their states go, and that nobody can tell from the logits.

The answers of the CPU alone are the reference everywhere; the device is a fake one, which stops a test at any step that
is left out, done twice or done with another sequence's state.  Where it makes no difference whether the device takes
layers one by one or in runs, both are tried.
"""

from __future__ import annotations

import gc
import logging
import os

import numpy as np
import pytest
from engine.standins import CONTEXT, ByLayer, MiB, said

import coli
from coli.devices.base import DeviceError
from coli.devices.fake import FakeDevice
from coli.engine.program import MixerOn
from coli.placing import cpus_to_leave
from conftest import assert_same_bits

IDS = np.random.default_rng(4).integers(0, 256, 400)


@pytest.fixture(params=[ByLayer, FakeDevice])
def card(request):
    return request.param


@pytest.fixture
def load(load):
    """load(device) -> Model whose layers are all taken whole, closed at the end."""

    def made(device, **options):
        model = load(device, **options)
        assert len(model.engine.program.mixers) == model.config.num_hidden_layers
        return model

    return made


def test_layer_with_all_its_matrices_on_a_device_is_one_step(load, cpu):
    """No projection and no core of such a layer is the CPU's; keys that cross a block's border come out right."""
    device = ByLayer(64 * MiB)
    model = load(device)
    steps = [type(one).__name__ for one in model.engine.program.steps]
    assert steps.count("MixerOn") == model.config.num_hidden_layers and "MatmulOn" not in steps
    expected, session = cpu.session(), model.session()
    for at, end in ((0, 61), (61, 62), (62, 67), (67, 130)):
        assert_same_bits(session.prefill(IDS[at:end]), expected.prefill(IDS[at:end]), f"to {end}")
    mixed = [call for call in device.calls if call[0] == "mix"]
    assert len(mixed) == 4 * model.config.num_hidden_layers
    assert [call[2:] for call in mixed[:: model.config.num_hidden_layers]] == [(0, 61), (61, 1), (62, 5), (67, 63)]


def test_layer_with_one_matrix_on_a_device_is_not_taken_whole(path):
    """dnproj without dnout is a product, as before."""
    with coli.load(path, devices=[ByLayer(64 * MiB)], place="dnproj=0,attnproj=0", context=CONTEXT) as model:
        kinds = {mixer.is_attention for mixer in model.engine.program.mixers}
        assert kinds == {True}


def test_batch_of_sessions_gives_each_the_bits_it_has_alone(load, cpu, card):
    """Rows of several sequences, prefilling and decoding, each with states of its own."""
    model, lengths = load(card(64 * MiB)), (3, 65, 1, 20)
    sessions, expected = [], []
    for i, n in enumerate(lengths):
        extra = IDS[i : i + 1 + n % 3].astype(np.int32)
        reference = cpu.session()
        reference.prefill(IDS[:n])
        expected.append(reference.prefill(extra))
        sessions.append((model.session(), extra))
        sessions[-1][0].prefill(IDS[:n])
    rows = (np.cumsum([len(extra) for _, extra in sessions]) - 1).tolist()
    out = np.empty((len(rows), model.engine.vocab_size), np.float32)
    model.engine.on_thread(lambda: model.engine.forward(sessions, rows, out))
    for i, logits in enumerate(expected):
        assert_same_bits(out[i], logits, f"sequence {i}")


def test_states_of_a_session_are_freed_with_it(load, card):
    """Closed, or dropped by everybody: the next step finds the memory free."""
    device = card(64 * MiB)
    model = load(device)
    kept, closed, dropped = (model.session() for _ in range(3))
    for session in (kept, closed, dropped):
        session.prefill(IDS[:5])
    n = len(device._states)
    closed.close()
    del dropped, session
    gc.collect()
    kept.step(1)
    assert len(device._states) == n // 3
    assert device._beside_bytes < 64 * MiB - device._arena.size


@pytest.mark.parametrize("kind", ["launch", "lost"])
@pytest.mark.parametrize("n", [1, 7, 30, 41])
def test_failed_layer_is_computed_again_and_said_in_one_line(load, cpu, caplog, kind, n):
    """Whichever call fails, the states are computed again from the ids; one line says what and how long."""
    device = ByLayer(64 * MiB, fail=[("mix", n)] if kind == "launch" else [])
    if kind == "lost":
        mix, calls = device.mix, []

        def dies(*arguments):
            calls.append(0)
            device._lost = device._lost or len(calls) == n
            return mix(*arguments)

        device.mix = dies
    model = load(device)
    expected, session, other = cpu.session(), model.session(), model.session()
    with caplog.at_level(logging.WARNING, logger="coli"):
        for at, end in ((0, 20), (20, 21), (21, 22), (22, 40)):
            assert_same_bits(session.prefill(IDS[at:end]), expected.prefill(IDS[at:end]), f"{kind} {n}, to {end}")
        if device._lost or not [c for c in device.calls if c[0] == "mix" and c[2:] == (22, 18)]:
            assert_same_bits(other.prefill(IDS[:9]), cpu.session().prefill(IDS[:9]), "another session")
    lines = said(caplog)
    again = [line for line in lines if "was computed again in" in line]
    n_layers = model.config.num_hidden_layers
    taken = (0, 20, 21, 22)[min(3, (n - 1) // n_layers)]
    if n <= 4 * n_layers:
        assert len(again) == 1 and f"the state of {taken:,} tokens" in again[0]
        assert ("is lost" if kind == "lost" else "failed") in again[0] and "fake0" in again[0]
        assert len(model.engine.program.mixers) == (0 if kind == "lost" else n_layers - 1)


def test_idle_session_of_a_lost_device_goes_on(load, cpu, card):
    """A session that was not in the step which lost its card finds out at its next step."""
    device = card(64 * MiB)
    model = load(device)
    idle, busy = model.session(), model.session()
    reference = cpu.session()
    reference.prefill(IDS[:30])
    idle.prefill(IDS[:30])
    device._lost = True
    assert_same_bits(busy.prefill(IDS[:4]), cpu.session().prefill(IDS[:4]), "busy")
    assert_same_bits(idle.copy().step(7), reference.copy().step(7), "a copy made after the loss")
    assert_same_bits(idle.step(7), reference.step(7), "idle")


def test_memory_for_one_session_is_handed_on(load, cpu, caplog, card):
    """Where a card has states for one sequence only, the one that was used last has them; all answer alike."""
    device = card(64 * MiB)
    model = load(device)
    first = model.session()
    first.prefill(IDS[:10])
    device.set_free_bytes(device._arena.size + device._beside_bytes + 1000)
    sessions = [first, model.session(), model.session()]
    expected = [cpu.session() for _ in sessions]
    expected[0].prefill(IDS[:10])
    with caplog.at_level(logging.INFO, logger="coli"):
        for turn in range(2):
            for i, (session, reference) in enumerate(zip(sessions, expected, strict=True)):
                ids = IDS[i : i + 8] if turn == 0 else IDS[i : i + 1]
                assert_same_bits(session.prefill(ids), reference.prefill(ids), f"turn {turn}, session {i}")
    assert len(device._states) == model.config.num_hidden_layers
    assert any("the state of 18 tokens was computed again" in r.getMessage() for r in caplog.records)
    assert_same_bits(sessions[2].copy().step(3), expected[2].copy().step(3), "a copy without memory for it")


def test_sessions_of_one_batch_without_memory_for_both(load, cpu, caplog, card):
    """Neither can give up its states under the other: the second one's layers are the CPU's, said once."""
    device = card(64 * MiB)
    model = load(device)
    first = model.session()
    first.prefill(IDS[:10])
    device.set_free_bytes(device._arena.size + device._beside_bytes + 1000)
    reference = cpu.session()
    reference.prefill(IDS[:10])
    second, ids = model.session(), [IDS[:1].astype(np.int32), IDS[:6].astype(np.int32)]
    out = np.empty((2, model.engine.vocab_size), np.float32)
    batch = list(zip((first, second), ids, strict=True))
    with caplog.at_level(logging.WARNING, logger="coli"):
        model.engine.on_thread(lambda: model.engine.forward(batch, [0, 6], out))
    assert_same_bits(out[0], reference.prefill(ids[0]), "first")
    assert_same_bits(out[1], cpu.session().prefill(ids[1]), "second")
    assert len([line for line in said(caplog) if "no memory for the state" in line]) == 1


def test_context_that_outgrows_the_card_moves_its_attention_to_the_cpu(load, cpu, caplog, card):
    """Keys and values that no longer fit: those layers are the CPU's for this session, the others stay."""
    device = card(64 * MiB)
    model = load(device)
    session, reference = model.session(), cpu.session()
    assert_same_bits(session.prefill(IDS[:60]), reference.prefill(IDS[:60]), "before")
    device.set_free_bytes(device._arena.size + device._beside_bytes + 10)
    with caplog.at_level(logging.WARNING, logger="coli"):
        for at in (60, 63, 68, 200):
            assert_same_bits(session.prefill(IDS[at : at + 3]), reference.prefill(IDS[at : at + 3]), f"at {at}")
    on_cpu = {mixer.is_attention for mixer, state in session._held.by.items() if state is None}
    on_card = {mixer.is_attention for mixer, state in session._held.by.items() if state is not None}
    assert on_cpu == {True} and on_card == {False}
    assert len([line for line in said(caplog) if "no memory for the state" in line]) == 1


def test_copy_that_fails_is_computed_again(load, cpu, card):
    """A device that cannot copy a state leaves a session that computes it again."""
    device = card(64 * MiB)
    model = load(device)
    session, reference = model.session(), cpu.session()
    session.prefill(IDS[:12])
    reference.prefill(IDS[:12])
    device.set_free_bytes(device._arena.size + device._beside_bytes + 100)
    copied = session.copy()
    device.set_free_bytes(64 * MiB)
    assert_same_bits(copied.step(5), reference.copy().step(5), "copy")
    assert_same_bits(session.step(6), reference.step(6), "original")


def test_step_that_raised_leaves_a_session_that_can_go_on(load, cpu):
    """A step that ended in an error has moved states and no session: they are computed again."""
    for model in (load(ByLayer(64 * MiB)), cpu):
        session, reference = model.session(), cpu.session()
        session.prefill(IDS[:12])
        reference.prefill(IDS[:12])
        program = model.engine.program
        head, program.run_head = program.run_head, lambda *_: False
        with pytest.raises(coli.ColiError, match="position 12"):
            session.step(3)
        program.run_head = head
        assert session.position == 12
        assert_same_bits(session.step(5), reference.step(5), "after the error")


def test_program_that_changes_under_a_session_is_followed(load, cpu, card):
    """A session goes on under another program: what it has elsewhere is computed again."""
    model = load(card(64 * MiB))
    session, reference = model.session(), cpu.session()
    session.prefill(IDS[:12])
    reference.prefill(IDS[:12])
    placed = model.engine.program
    model.engine.program = type(placed)(model.config)
    assert_same_bits(session.step(5), reference.step(5), "on the CPU")
    model.engine.program = placed
    assert_same_bits(session.step(6), reference.step(6), "back on the device")


def test_mixer_that_cannot_be_made_leaves_products(path, cpu, caplog):
    """A device that has no memory for a layer's vectors keeps its matrices, one by one."""

    class Tight(ByLayer):
        def mixer(self, *arguments):
            raise DeviceError("no room for vectors", "out of memory")

    with caplog.at_level(logging.WARNING, logger="coli"):
        with coli.load(path, devices=[Tight(64 * MiB)], threads=2, context=CONTEXT) as model:
            assert not any(isinstance(one, MixerOn) for one in model.engine.program.steps)
            assert_same_bits(model.logits(IDS[:20]), cpu.logits(IDS[:20]), "products")
    assert len([line for line in said(caplog) if "not taken whole" in line]) == 1


def test_team_that_leaves_cpus_answers_alike(load, cpu, card):
    """A smaller team beside a card goes on where the larger one was."""
    model = load(card(64 * MiB))
    session, reference = model.session(), cpu.session()
    assert_same_bits(session.prefill(IDS[:12]), reference.prefill(IDS[:12]), "two threads")
    model.engine.leave_cpus(1)
    assert model.engine.team.n_threads == 1 and model.engine.stats()["threads"] == 1
    assert_same_bits(session.step(5), reference.step(5), "one thread")


@pytest.mark.parametrize(
    ("threads", "n_free", "host_cpus", "expected"),
    [(16, 0, 2, 2), (16, 1, 2, 1), (16, 8, 2, 0), (16, 0, 0, 0), (4, 0, 2, 1), (2, 0, 2, 0)],
)
def test_cpus_are_left_to_a_card_where_nobody_else_has_them(monkeypatch, threads, n_free, host_cpus, expected):
    """As many as the card's driver wants and are not free anyway, and never more than a quarter of the team."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(threads + n_free)), raising=False)
    device = FakeDevice(MiB)
    device.host_cpus = host_cpus
    assert cpus_to_leave(threads, range(threads), [device]) == expected
    assert cpus_to_leave(threads, range(threads), []) == 0
