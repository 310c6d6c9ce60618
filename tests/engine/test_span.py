"""Runs of layers that a device takes whole, from residual stream to logits, and that nobody can tell from the logits.

The answers of the CPU alone are the reference everywhere; the device is a fake one, which stops a test at any step that
is left out, done twice, or done while the card waits for its host.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from engine.standins import ByLayer, MiB, said

from coli._core import step
from coli.devices.fake import FakeDevice
from coli.engine.worker import Cancelled
from conftest import assert_same_bits

IDS = np.random.default_rng(5).integers(0, 256, 400)
LAYERS = 8
EXPERTS_ONLY = ["CpuRun", "ExpertsOn", "CpuRun"]
TRUNK = "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0"


@pytest.fixture(scope="module")
def expected(cpu):
    return answers(cpu)


def answers(model) -> list[np.ndarray]:
    """Logits of a prompt in three cuts, of steps, of a copy beside its original, and of every position at once."""
    session = model.session()
    found = [session.prefill(IDS[:6]), session.prefill(IDS[6:7]), session.prefill(IDS[7:10])]
    found += [session.step(int(i)) for i in IDS[10:12]]
    copied = session.copy()
    found += [copied.step(3), session.step(4), copied.prefill(IDS[:3])]
    return [*found, model.logits(IDS[:4])]


def check(model, expected, what: str) -> None:
    for at, (a, b) in enumerate(zip(answers(model), expected, strict=True)):
        assert_same_bits(a, b, f"{what}, answer {at}")


def spans(model) -> list[str]:
    """The steps: a span by its layers and device, others by their class."""
    return [
        f"{one.first}-{one.last - 1}{'+head' if one.has_head else ''} on {one.device.name}"
        if type(one).__name__ == "SpanOn"
        else type(one).__name__
        for one in model.engine.program.steps
    ]


def operations(device) -> set[str]:
    return {call[0] for call in device.calls}


def give_up(tier, device: int, keys) -> None:
    """Experts leave their device."""
    for key in keys.tolist():
        tier._cards[device].device.seat(*divmod(key, tier.experts), None)
        tier.residency.tables[device].release(tier.residency.vacate(key))


def names(device, operation: str) -> list[tuple]:
    return [call[1:] for call in device.calls if call[0] == operation]


def test_model_that_fits_a_card_is_one_step_and_asks_for_nothing(load, expected, caplog):
    """All layers and the head are one span; nothing else is asked of the card, and the card asks nothing."""
    device = FakeDevice(64 * MiB)
    with caplog.at_level(logging.INFO, logger="coli"):
        model = load(device)
    assert spans(model) == ["0-7+head on fake0"]
    assert "whole on device 0 (fake0): layers 0-7 and the head; one graph a token" in said(caplog, logging.INFO)
    check(model, expected, "all")
    assert operations(device) <= {"alloc", "upload", "span", "ask", "finish"}
    assert names(device, "finish")[:4] == [(1,), (1,), (1,), (1,)]
    tier = model.stats()["tier"]
    positions = 6 + 1 + 3 + 2 + 2 + 3 + 4
    assert (tier["hits"], tier["misses"], tier["hit_rate"]) == (positions * LAYERS * 2, 0, 1.0)


@pytest.mark.parametrize(
    ("place", "steps"),
    [
        (f"{TRUNK},experts=cpu", ["0-7+head on a"]),
        (f"{TRUNK},experts=0", ["0-7+head on a"]),
        (f"{TRUNK},experts=1", ["0-7+head on a"]),
        (f"{TRUNK},experts=0+1", ["0-7+head on a"]),
        ("lmhead=0,dnproj=0,dnout=0,attnproj=0,experts=0", ["0-7+head on a"]),
        ("dnproj=0,dnout=0,attnproj=0,experts=cpu", ["0-7 on a"]),
        ("lmhead=1,dnproj=0,dnout=0,attnproj=0,shexp=0,experts=1", ["0-7 on a"]),
        (
            "lmhead=1,dnproj=0:4+1:4,dnout=0:4+1:4,attnproj=0:4+1:4,shexp=0:4+1:4,experts=0+1",
            ["0-3 on a", "4-7+head on b"],
        ),
        (
            "lmhead=1,dnproj=1:4+0:4,dnout=1:4+0:4,attnproj=1:4+0:4,experts=1",
            ["0-3 on b", "4-7 on a"],
        ),
        ("dnproj=0,dnout=0,experts=1", ["0-2 on a", *EXPERTS_ONLY, "4-6 on a", *EXPERTS_ONLY]),
        ("lmhead=0,attnproj=0,experts=cpu", ["CpuRun", "3-3 on a", "CpuRun", "7-7+head on a"]),
        (f"{TRUNK.replace('shexp=0', 'shexp=1')},experts=0", None),
    ],
)  # fmt: skip
def test_bits_of_every_mix(load, expected, caplog, place, steps):
    """Experts here, in part, elsewhere or nowhere; spans that the CPU or another device interrupts: the CPU's bits."""
    devices = FakeDevice(64 * MiB, name="a"), FakeDevice(64 * MiB, name="b")
    with caplog.at_level(logging.INFO, logger="coli"):
        model = load(*devices, place=place)
    found = spans(model)
    assert found == steps if steps is not None else not any(" on " in one for one in found)
    if len([one for one in found if " on a" in one]) == 2:
        lines = [line for line in said(caplog, logging.INFO) if line.startswith("whole on device 0 (a): layer")]
        assert len(lines) == 1 and lines[0].endswith("; 2 graphs a token")
    check(model, expected, place)
    assert model.stats()["fallen"] == []


@pytest.mark.parametrize("n_experts", [0, 1, 20, 60])
def test_bits_with_part_of_the_experts(load, expected, n_experts):
    """Trunk on the card and what is left for experts: more of them, fewer questions."""
    device = FakeDevice(64 * MiB)
    model = load(device, place=f"{TRUNK},experts=0")
    tier = model.placed.tier
    give_up(tier, 0, tier.residency.tables[0].residents()[n_experts:])
    assert tier.residency.n_residents == len(device.seats) == n_experts
    check(model, expected, f"{n_experts} experts")


@pytest.mark.parametrize("places", [(f"{TRUNK},experts=0", 1), (f"{TRUNK},experts=0+1", 2), (f"{TRUNK},experts=1", 2)])
def test_hits_and_misses_are_those_of_single_layers(load, places):
    """Whoever counts them: ranks of the card, of other devices and of the CPU, and the heat of what was decoded."""
    place, n = places
    stats = []
    for kind in (ByLayer, FakeDevice):
        devices = [kind(64 * MiB, name=f"f{i}") for i in range(n)]
        model = load(*devices, place=place)
        tier = model.placed.tier
        for i, table in enumerate(tier.residency.tables):
            give_up(tier, i, table.residents()[::3])
        tier.between_tokens = tier.heat.fold  # nobody moves
        answers(model)
        found = model.stats()["tier"]
        stats.append((found["hits"], found["misses"], found["hit_rate"], found["decode_tokens"]))
        stats.append(tier.heat.recent.tolist())
    assert stats[0] == stats[2] and stats[0][1] > 0 and stats[0][0] > 0
    assert stats[1] == stats[3]


def test_batch_of_sessions_is_one_run(load, cpu):
    """Sequences of a batch go through the span together, prefilling and decoding, each with states of its own."""
    device = FakeDevice(64 * MiB)
    model, lengths = load(device, place=f"{TRUNK},experts=cpu"), (3, 65, 1, 20)
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
    device.calls.clear()
    model.engine.on_thread(lambda: model.engine.forward(sessions, rows, out))
    assert len(names(device, "span")) == 1
    for i, logits in enumerate(expected):
        assert_same_bits(out[i], logits, f"sequence {i}")


def test_logits_of_many_rows_are_made_apart(load, cpu):
    """More rows than the span makes logits of: the resident head is asked for them afterwards."""
    device = FakeDevice(64 * MiB)
    model = load(device)
    assert_same_bits(model.logits(IDS[:40]), cpu.logits(IDS[:40]), "40 rows")
    assert names(device, "finish") == [(0,)] and names(device, "matmul") == [("lm_head", 40)]


def test_rows_beyond_the_span_come_in_more_chunks(load, cpu):
    """A span that takes few rows gets a prompt in chunks; a batch that is larger goes layer by layer."""
    device = FakeDevice(64 * MiB)
    device.span_rows = 30
    model = load(device)
    session, reference = model.session(), cpu.session()
    assert_same_bits(session.prefill(IDS[:70]), reference.prefill(IDS[:70]), "prompt")
    assert [rows for _, _, rows in names(device, "span")] == [30, 30, 10]
    out = np.empty((1, model.engine.vocab_size), np.float32)
    more = [(session, IDS[70:101].astype(np.int32))]
    model.engine.on_thread(lambda: model.engine.forward(more, [30], out))
    assert_same_bits(out[0], reference.prefill(IDS[70:101]), "31 rows at once")
    assert "mix" in operations(device) and len(names(device, "span")) == 3
    assert_same_bits(session.step(1), reference.step(1), "and on in the span")


OPERATIONS = ("span", "ask", "answer", "finish")


@pytest.mark.parametrize("kind", ["launch", "lost"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_failed_span_is_computed_again_layer_by_layer(load, expected, caplog, kind, operation, n):
    """Whichever call fails: the same logits, one line, and the span is not tried again; a lost card is left."""
    device = FakeDevice(64 * MiB, fail=[(operation, n)] if kind == "launch" else [])
    model = load(device, place=f"{TRUNK},experts=cpu")
    if kind == "lost":
        begin = device._begin

        def dies(name, *details):
            device._lost = device._lost or (name == operation and device._count[name] == n - 1)
            begin(name, *details)

        device._begin = dies
    with caplog.at_level(logging.WARNING, logger="coli"):
        check(model, expected, f"{kind}, {operation} {n}")
    lines = said(caplog)
    assert len([line for line in lines if "computed again" in line]) == 1, lines
    [fallen] = model.stats()["fallen"]
    assert fallen[0] == "layers 0-7 and the head as a whole"
    if kind == "launch":
        assert "computed layer by layer" in lines[0] and "mix" in operations(device)
        assert len(model.engine.program.mixers) == LAYERS
    else:
        assert "is lost" in lines[0] and model.engine.program.mixers == []


def test_span_and_then_a_layer_that_fail_leave_the_rest(load, expected, caplog):
    """A layer of a span that was given up can fail too: that layer alone is the CPU's then."""
    device = FakeDevice(64 * MiB, fail=[("ask", 2), ("mix", 19)])  # in the replay, and in the third call after it
    model = load(device)
    with caplog.at_level(logging.WARNING, logger="coli"):
        check(model, expected, "span and layer")
    assert len(model.engine.program.mixers) == LAYERS - 1
    assert ["layer by layer" in line for line in said(caplog)] == [True, False], said(caplog)


@pytest.mark.parametrize("operation", ["issue", "take"])
@pytest.mark.parametrize("kind", ["launch", "lost"])
def test_other_device_that_fails_while_the_card_waits(load, expected, operation, kind):
    """What a second device does not answer is computed by the CPU; the span goes on."""
    other = FakeDevice(64 * MiB, name="b", fail=[(operation, 3)] if kind == "launch" else [])
    model = load(FakeDevice(64 * MiB, name="a"), other, place=f"{TRUNK},experts=1")
    if kind == "lost":
        begin = other._begin

        def dies(name, *details):
            other._lost = other._lost or (name == operation and other._count[name] == 2)
            begin(name, *details)

        other._begin = dies
    check(model, expected, f"{operation} {kind}")
    assert model.engine.program.spans[0].dropped is False
    assert model.stats()["tier"]["misses"] > 0


@pytest.mark.parametrize("experts", ["cpu", "1"])
def test_error_between_question_and_answer_abandons_the_run(load, cpu, experts):
    """The card is not left waiting, nothing stays open on another one, and the session goes on from its ids."""
    device = FakeDevice(64 * MiB)
    model = load(device, FakeDevice(64 * MiB, name="b"), place=f"{TRUNK},experts={experts}")
    if experts == "1":  # some for the CPU, too
        give_up(model.placed.tier, 1, model.placed.tier.residency.tables[1].residents()[::2])
    session, reference = model.session(), cpu.session()
    session.prefill(IDS[:20])
    reference.prefill(IDS[:20])
    engine = model.engine
    real = engine.runner

    class Broken:
        """A runner that cannot get memory in the middle of a step."""

        calls = 0

        def __getattr__(self, name):
            return getattr(real, name)

        def moe(self, *arguments):
            Broken.calls += 1
            if Broken.calls == 3:
                raise MemoryError("no room")
            real.moe(*arguments)

    engine.runner = Broken()
    with pytest.raises(MemoryError):
        session.step(1)
    engine.runner = real
    assert ("abandon",) in device.calls and device._run is None
    assert not any(card.open for card in model.placed.tier._cards)
    assert_same_bits(session.step(5), reference.step(5), "after the error")


def test_experts_that_come_and_go_between_tokens(load, expected):
    """An expert thrown out and another put in at every token: the card computes with those who are there."""
    device = FakeDevice(64 * MiB)
    model = load(device, place=f"{TRUNK},experts=0")
    tier = model.placed.tier
    rng, between = np.random.default_rng(1), tier.between_tokens

    def moves() -> None:
        between()
        table = tier.residency.tables[0]
        keys = table.residents()
        give_up(tier, 0, rng.choice(keys, min(len(keys), 9), replace=False))
        absent = np.flatnonzero(tier.residency._flat_device < 0)
        for key in rng.choice(absent, min(len(absent), 6), replace=False).tolist():
            slot = table.reserve()
            device.write_slot(slot, tier._slab(key))
            device.seat(*divmod(key, tier.experts), slot)
            tier.residency.publish(0, slot, key)

    tier.between_tokens = moves
    check(model, expected, "moves")
    assert names(device, "answer")
    seats = {(layer, expert): slot for (layer, expert), slot in device.seats.items()}
    assert len(seats) == tier.residency.n_residents
    for (layer, expert), slot in seats.items():
        assert tier.residency.device[layer, expert] == 0 and tier.residency.slot[layer, expert] == slot


def test_interrupt_while_states_are_computed_again(load, cpu):
    """Ctrl-C does not wait for a long replay; the session is computed again when it is next used."""
    device = FakeDevice(64 * MiB)
    device.span_rows = 5
    model = load(device)
    session, reference = model.session(), cpu.session()
    session.prefill(IDS[:20])
    reference.prefill(IDS[:20])
    engine, seen = model.engine, []
    session._held.stale = True

    def interrupted(job):
        begin = device.begin_span

        def counted(*arguments):
            seen.append(1)
            job.cancelled = len(seen) == 2
            return begin(*arguments)

        device.begin_span = counted
        try:
            engine._feed(job, session, np.array([1], np.int32), False)
        finally:
            del device.begin_span

    with pytest.raises(Cancelled):
        engine._thread.call(interrupted)
    assert len(seen) == 2 and session._held.stale and session.position == 20
    assert_same_bits(session.step(5), reference.step(5), "after the interrupt")


@pytest.mark.parametrize("kind", [FakeDevice, ByLayer])
def test_rows_that_are_computed_again_make_no_heat(load, cpu, kind):
    """What a session said before was counted when it was new: a replay is neither decode nor a prompt."""
    model = load(kind(64 * MiB), place=f"{TRUNK},experts=0")
    tier, session, reference = model.placed.tier, model.session(), cpu.session()
    session.prefill(IDS[:20])
    for token_id in IDS[20:23].tolist():
        session.step(token_id)
    reference.prefill(IDS[:23])
    before, tokens = tier.heat._prompt.copy(), tier.heat.tokens
    assert before.any() and not tier.exchange._prompt_is_new
    session._held.stale = True
    steps = tier.exchange.figures._step.n
    assert_same_bits(session.step(5), reference.step(5), "replayed")
    assert tier.exchange.figures._step.n == steps > 0  # its seconds are no step's
    assert np.array_equal(tier.heat._prompt, before) and tier.heat.tokens == tokens + 1
    assert not tier.exchange._prompt_is_new


@pytest.mark.parametrize("part", ["layer", "head", "span"])
def test_span_that_cannot_be_made_leaves_layers(load, expected, caplog, part):
    """A device without memory for it takes what it has memory for: shorter spans, or layers one by one."""
    from coli.devices.base import DeviceError

    class Tight(FakeDevice):
        pass

    calls = []

    def refused(self, *arguments):
        calls.append(arguments)
        if part != "layer" or len(calls) > 5:
            raise DeviceError("no room", "out of memory")
        return FakeDevice.layer(self, *arguments)

    setattr(Tight, part, refused)
    with caplog.at_level(logging.WARNING, logger="coli"):
        model = load(Tight(64 * MiB))
    assert len(said(caplog)) == 1 and "no room" in said(caplog)[0]
    by_layer = ["CpuRun", "MixerOn", "CpuRun", "ExpertsOn"]
    found = spans(model)
    if part == "layer":
        assert found[:5] == ["0-4 on fake0", *by_layer]
    elif part == "head":
        assert found == ["0-7 on fake0"]
    else:
        assert found[:4] == by_layer
    check(model, expected, part)


def test_moe_of_given_rows_is_the_steps_own(cpu):
    """`Runner.moe` on its own leaves what the MOE operation leaves in the middle of a layer, and refuses nonsense."""
    engine = cpu.engine

    def both(job):
        for n in (1, 7):
            runner, sequence = engine.runner, step.Sequence(engine._net, 64)
            runner.begin([(sequence, n)], IDS[:n].astype(np.int32), engine._rope.cos, engine._rope.sin)
            moe = 2 * step.N_OPS + step.OPS.index("MOE")
            runner.run(0, moe)
            names = ("xn", "top_idx", "external")
            xn, top_idx, external = (np.array(runner.buffer(name)) for name in names)
            xn = xn[:, : engine.config.hidden_size]
            runner.run(moe, moe + 1)
            kept = [np.array(runner.buffer(name)) for name in ("expert_y", "slot_of", "shared_y")]
            runner.run(moe + 1, moe + 2)
            runner.run(3 * step.N_OPS, 3 * step.N_OPS + 5)  # the buffers are another layer's now
            external[:, 1] = 1
            runner.moe(2, xn, top_idx, external, True)
            y, slot_of, shared = (np.asarray(runner.buffer(name)) for name in ("expert_y", "slot_of", "shared_y"))
            for t, j in zip(*(external == 0).nonzero()):
                assert_same_bits(y[slot_of[t, j]], kept[0][kept[1][t, j]], f"{n} rows, rank {t, j}")
            assert_same_bits(shared, kept[2], f"{n} rows, shared")
            top_idx[0, 0] = engine.config.num_experts
            with pytest.raises(ValueError, match="beyond"):
                runner.moe(2, xn, top_idx, external, True)
            with pytest.raises(ValueError, match="rows"):
                runner.moe(2, xn[1:], top_idx, external, True)

    engine._thread.call(both)


def test_trunk_bytes_are_of_what_was_uploaded(load):
    """A component that could not be uploaded is not counted; two devices of one name are told apart."""
    whole, failing = FakeDevice(64 * MiB, name="card"), FakeDevice(64 * MiB, name="card", fail=[("upload", 2)])
    model = load(whole, failing, place="dnproj=0:4+1:4,dnout=0:4+1:4,attnproj=0:4+1:4,experts=cpu")
    planned, found = model.placed.plan.placed_bytes, model.stats()["trunk_bytes"]
    assert list(found) == ["0 (card)", "1 (card)"]
    assert found["0 (card)"] == planned[0] and 0 < found["1 (card)"] < planned[1]
    lost = load(FakeDevice(64 * MiB, fail=[("die", 6)]))
    assert lost.stats()["trunk_bytes"] == {"fake0": 0}
