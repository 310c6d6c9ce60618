"""Runs of layers on a card and emulated, from residual stream to logits, against the engine on the CPU, bit for bit."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import pytest
from conftest import assert_same_bits
from devices.cuda.emulator import emulated
from devices.cuda.fakes import CUresult
from devices.cuda.machines import MACHINES, machine, on
from devices.cuda.spancase import CONTEXT, OnCard

import coli
from coli.container.reader import Container
from coli.devices.base import DeviceError, SpanPart
from coli.devices.cuda import compile as compiling
from coli.devices.cuda import mailbox, probe, spanplan
from coli.devices.cuda.device import CudaDevice
from coli.devices.cuda.span import MAX_ROWS
from coli.engine.mixing import layer_spec

MODELS = [("tiny-random", {}), ("tiny-textonly", {}), ("tiny-random", {"trunk_bits": 4, "expert_bits": 8})]
IDS = np.random.default_rng(7).integers(0, 250, 400).tolist()


@pytest.fixture(scope="module", params=MACHINES)
def device(request):
    with machine(request.param):
        made = probe.list_devices()[0]
        yield made
        made.close()


@pytest.fixture(scope="module")
def answers(make_container):
    """answers(model) -> (path, logits of the CPU by name)."""
    made: dict[int, tuple] = {}

    def of(model: int):
        if model not in made:
            name, options = MODELS[model]
            path = str(make_container(name, **options))
            with coli.load(path, devices="none", threads=2, context=CONTEXT) as loaded:
                made[model] = path, _logits(loaded)
        return made[model]

    return of


def _logits(model: coli.Model) -> dict[str, np.ndarray]:
    session = model.session()

    def forward(parts, rows):
        out = np.empty((len(rows), model.engine.vocab_size), np.float32)
        parts = [(s, np.array(ids, np.int32)) for s, ids in parts]
        model.engine.on_thread(lambda: model.engine.forward(parts, rows, out))
        return out

    found = {f"step {i}": session.step(IDS[i])[None] for i in range(3)}
    found["prefill"] = session.prefill(IDS[3:64])[None]
    found["across a block"] = session.step(IDS[64])[None]
    other = session.copy()
    found["two sequences"] = forward([(other, IDS[70:71]), (session, IDS[71:72])], [0, 1])
    found["parts"] = forward([(other, IDS[80:85]), (session, IDS[85:87])], [3, 4, 6])
    found["many logits"] = forward([(other, IDS[90:110])], list(range(1, 20, 2)))
    found["last"] = session.step(IDS[0])[None]
    return found


def check(case: OnCard, expected: dict[str, np.ndarray]) -> None:
    """The same calls as `_logits` makes."""
    states = case.new_states()

    def same(name: str, parts, rows) -> None:
        logits, chosen = case.forward(parts, rows)
        assert_same_bits(logits, expected[name], name)
        n = sum(len(ids) for ids, _, _ in parts)
        assert chosen.shape == (len(case.mixers), n, case.config.num_experts_per_tok)
        assert chosen.dtype == np.int32 and (chosen >= 0).all() and (chosen < case.config.num_experts).all()

    for i in range(3):
        same(f"step {i}", [(IDS[i : i + 1], i, states)], [0])
    same("prefill", [(IDS[3:64], 3, states)], [60])
    same("across a block", [(IDS[64:65], 64, states)], [0])
    other = [state.copy() for state in states]
    same("two sequences", [(IDS[70:71], 65, other), (IDS[71:72], 65, states)], [0, 1])
    same("parts", [(IDS[80:85], 66, other), (IDS[85:87], 66, states)], [3, 4, 6])
    same("many logits", [(IDS[90:110], 71, other)], list(range(1, 20, 2)))
    same("last", [(IDS[:1], 68, states)], [0])


def every(path: str) -> list[tuple[int, int]]:
    """All experts of all layers."""
    config = Container.open(path).config
    return [(layer, e) for layer in range(config.num_hidden_layers) for e in range(config.num_experts)]


@pytest.mark.parametrize("model", range(len(MODELS)))
def test_span_with_everything_answers_as_the_cpu(device, answers, model):
    """With every expert in a slot nobody is ever asked."""
    path, expected = answers(model)
    case = OnCard(path, device, every(path))
    check(case, expected)
    assert case.asked == []


@pytest.mark.parametrize("model", range(len(MODELS)))
def test_span_with_nothing_asks_for_everything(device, answers, model):
    """Without a slot and without a shared expert every layer asks for all of its ranks."""
    path, expected = answers(model)
    n = Container.open(path).config.num_hidden_layers
    case = OnCard(path, device, [], host_shared=range(n))
    check(case, expected)
    assert {layer for layer, _ in case.asked} == set(range(n))
    assert all(missing > 0 for _, missing in case.asked)


@pytest.mark.parametrize("model", range(len(MODELS)))
def test_spans_with_a_part_of_the_experts_answer_as_the_cpu(device, answers, model):
    """Two spans, half of the experts, one layer with all, some shared experts with the host."""
    path, expected = answers(model)
    rng = np.random.default_rng(model)
    seats = [s for s in every(path) if s[0] == 1 or rng.random() < 0.5]
    case = OnCard(path, device, seats, host_shared=(2, 3), cuts=(3,))
    check(case, expected)
    assert 1 not in {layer for layer, _ in case.asked}
    assert {layer for layer, _ in case.asked} >= {2, 3}
    assert all(missing or layer in (2, 3) for layer, missing in case.asked)  # who lacks nothing does not come up


@pytest.mark.parametrize("model", range(len(MODELS)))
def test_span_in_steps_answers_as_the_cpu(device, answers, model, monkeypatch):
    """Where the card does not wait for its host: each piece behind the answer to the one before, and layers that may
    lack something and lack nothing this time."""
    monkeypatch.setattr(spanplan, "STEP_ROWS", 2)
    path, expected = answers(model)
    rng = np.random.default_rng(model)
    seats = [s for s in every(path) if s[0] == 1 or rng.random() < 0.9]
    case = OnCard(path, device, seats, host_shared=(3,), cuts=(3,))
    check(case, expected)
    assert all(missing or layer == 3 for layer, missing in case.asked)


def test_seats_change_between_runs(device, answers):
    """An expert that comes, goes, or changes its slot counts from the next run on."""
    path, expected = answers(0)
    seats = every(path)
    case = OnCard(path, device, seats)
    states = case.new_states()
    assert_same_bits(case.forward([(IDS[:1], 0, states)], [0])[0], expected["step 0"])
    for layer, e in seats[::3]:
        device.seat(layer, e, None)
    device.write_slot(0, case.slab(*seats[1]))  # seat 0 has left its slot: somebody else moves in
    device.seat(*seats[1], 0)
    assert_same_bits(case.forward([(IDS[1:2], 1, states)], [0])[0], expected["step 1"])
    n_asked = len(case.asked)
    assert n_asked > 0
    device.write_slot(0, case.slab(*seats[0]))
    device.seat(*seats[1], 1)
    for layer, e in seats[::3]:
        device.seat(layer, e, case.slots[layer, e])
    assert_same_bits(case.forward([(IDS[2:3], 2, states)], [0])[0], expected["step 2"])
    assert len(case.asked) == n_asked


def begin(case: OnCard, states, position: int = 0, n: int = 1):
    """A run of one sequence in the first span, with logits."""
    case.rope.reach(position + n)
    for state in states:
        state.reach(position + n)
    parts = [SpanPart(0, n, position, states)]
    return case.device.begin_span(case.spans[0], parts, case.embed(IDS[position : position + n]), case.rope.cos,
                                  case.rope.sin, [n - 1])  # fmt: skip


def test_seats_that_change_do_not_begin_anew(device, answers):
    """As long as the same layers may lack something the next step is the same graph with the same list; and a layer
    that lacks nothing any more makes another."""
    path, expected = answers(0)
    seats = every(path)
    case = OnCard(path, device, seats)
    span, states = case.spans[0], case.new_states()
    n, experts = len(case.mixers), case.config.num_experts
    out = np.empty((1, case.config.vocab_size), np.float32)

    def step(i: int) -> None:
        run = begin(case, states, i)
        while (asked := run.ask()) is not None:
            run.answer(*case.answer(0, asked))
        run.finish(None, out)
        assert_same_bits(out, expected[f"step {i}"], f"step {i}")

    away = [layer % experts for layer in range(n)]  # who is nowhere
    for layer, e in enumerate(away):
        device.seat(layer, e, None)
    step(0)
    token = span._token
    assert token is not None
    for layer, e in enumerate(away):
        other = (e + 1) % experts
        device.write_slot(case.slots[layer, other], case.slab(layer, e))
        device.seat(layer, other, None)
        device.seat(layer, e, case.slots[layer, other])
        away[layer] = other
    step(1)
    assert span._token is token
    device.write_slot(case.slots[0, (away[0] - 1) % experts], case.slab(0, away[0]))
    device.seat(0, away[0], case.slots[0, (away[0] - 1) % experts])
    step(2)
    assert span._token is not token and 0 not in span._token.shape.asks


@pytest.mark.parametrize(("n", "step_rows"), [(1, 64), (12, 64), (12, 12)])
def test_abandoned_run_leaves_the_next_one_right(device, answers, monkeypatch, n, step_rows):
    """A run given up before, between and after its questions waits for the card; the next one answers as the CPU."""
    monkeypatch.setattr(spanplan, "STEP_ROWS", step_rows)
    path, expected = answers(0)
    case = OnCard(path, device, every(path)[::2], host_shared=(2,))
    for questions in (0, 1, 2):
        run = begin(case, case.new_states(), n=n)
        for at in range(questions):
            asked = run.ask()
            if at == 0:
                run.answer(*case.answer(0, asked))
        run.abandon()
        run.abandon()
        with pytest.raises(DeviceError, match="over"):
            run.ask()
    states = case.new_states()
    forgotten = begin(case, case.new_states(), n=n)
    assert_same_bits(case.forward([(IDS[:1], 0, states)], [0])[0], expected["step 0"])  # ends the forgotten one
    with pytest.raises(DeviceError, match="over"):
        forgotten.finish(None, None)


def test_wrong_answers_are_refused(device, answers):
    """A slot that is not there, or no shared expert where one was asked for: said at once, and the run can be left."""
    path, _ = answers(0)
    case = OnCard(path, device, [], host_shared=(0,))
    run = begin(case, case.new_states())
    asked = run.ask()
    y, slot_of, shared_y = case.answer(0, asked)
    with pytest.raises(DeviceError, match="before the answer"):
        run.ask()
    with pytest.raises(DeviceError, match="shared expert"):
        run.answer(y, slot_of, None)
    with pytest.raises(IndexError):
        run.answer(y, slot_of + len(y), shared_y)
    with pytest.raises(ValueError):
        run.answer(y[:, : asked.xn.shape[1] - 1], slot_of, shared_y)
    run.abandon()


def test_more_rows_than_a_span_takes_are_refused(device, answers):
    """Beyond max_rows, or logits without a head: a DeviceError, and nothing is under way."""
    path, expected = answers(0)
    case = OnCard(path, device, every(path), cuts=(4,))
    n = case.spans[0].max_rows + 1
    x = np.zeros((n, case.config.hidden_size), np.float32)
    with pytest.raises(DeviceError, match=f"{n} rows"):
        device.begin_span(case.spans[0], [SpanPart(0, n, 0, [])], x, x, x)
    with pytest.raises(DeviceError, match="without a head"):
        device.begin_span(case.spans[0], [SpanPart(0, 1, 0, [])], x[:1], x, x, [0])
    assert_same_bits(case.forward([(IDS[:1], 0, case.new_states())], [0])[0], expected["step 0"])


# ---- failures, emulated -------------------------------------------------------------------------------------------

emulated_only = pytest.mark.parametrize("_", on(card=[], emulated=[()]))


@pytest.fixture
def opened(answers):
    """opened(seats, host_shared, **) -> (case, driver) on an emulated card of its own; closed at the end."""
    with ExitStack() as stack:

        def made(seats=None, host_shared=(), **options):
            driver = stack.enter_context(emulated(**options))
            path = answers(0)[0]
            device = probe.list_devices()[0]
            stack.callback(device.close)
            return OnCard(path, device, every(path) if seats is None else seats, host_shared), driver

        yield made


@emulated_only
@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("asks", [True, False])
def test_lost_card_raises_and_never_hangs(opened, asks, n, _):
    """A card that traps in the middle of a run: ask, answer or finish say "lost", and everything after them."""
    case, driver = opened(seats=[(0, 0)] if asks else None)
    for e in range(case.config.num_experts):
        case.spans[0].seat(3, e, 4096)  # nobody's address
    run = begin(case, case.new_states(), n=n)
    with pytest.raises(DeviceError) as caught:
        while (asked := run.ask()) is not None:
            run.answer(*case.answer(0, asked))
        run.finish(None, np.empty((1, case.config.vocab_size), np.float32))
    assert caught.value.kind == "lost"
    run.abandon()
    with pytest.raises(DeviceError) as caught:
        begin(case, [])
    assert caught.value.kind == "lost"
    with pytest.raises(DeviceError):
        run.ask()
    case.device.close()
    assert driver.complaint


@emulated_only
def test_late_host_is_an_error(opened, _):
    """A host that answers after the card has given up gets an error, not logits; the next run is right again."""
    text = compiling.source()
    assert "#define ANSWER_LIMIT_NS 20000000000ull" in text
    short = text.replace("ANSWER_LIMIT_NS 20000000000ull", "ANSWER_LIMIT_NS 20000000ull")
    case, driver = opened(seats=[], source=short)
    run = begin(case, case.new_states())
    asked = run.ask()
    time.sleep(0.3)
    run.answer(*case.answer(0, asked))
    with pytest.raises(DeviceError, match="too late"):
        while (asked := run.ask()) is not None:
            run.answer(*case.answer(0, asked))
        run.finish(None, np.empty((1, case.config.vocab_size), np.float32))
    run.abandon()
    begin(case, case.new_states()).abandon()
    assert driver.complaint == ""


@emulated_only
@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuGraphLaunch", "cuGraphInstantiate", "cuMemcpyHtoDAsync"])
def test_failed_launch_raises_and_the_next_run_is_right(opened, answers, call, n, _):
    """A launch that is refused, at any place of the sequence: a DeviceError, nothing under way, nothing lost."""
    case, driver = opened(seats=[(0, 0), (5, 1)])
    for later in (1, 2, 30):
        driver.fail[call] = driver.count[call] + later, CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        case.device.seat(0, 0, None if later == 2 else 0)
        try:
            begin(case, case.new_states(), n=n).abandon()
        except DeviceError as error:
            assert error.kind == "launch"
        driver.fail.clear()
        states = case.new_states()
        assert_same_bits(case.forward([(IDS[:1], 0, states)], [0])[0], answers(0)[1]["step 0"])
    assert driver.complaint == ""


@emulated_only
def test_full_card_makes_a_span_of_fewer_rows_or_none(opened, answers, _):
    """Scratch for as many rows as there is room; without room for a few the span is refused, and nothing is held."""
    case, driver = opened()
    layers, head = case.spans[0].layers, case.spans[0].head
    needed = case.device._workspace.scratch[1]
    case.device._workspace.close()  # as before the first span
    case.device._spans.clear()
    case.device._workspace = None
    driver.free = driver.free - driver.cuMemGetInfo()[1] + needed // 3
    small = case.device.span(layers, head)
    assert MAX_ROWS > small.max_rows >= 8
    held = driver.leaks()
    big = case.device._workspace
    with pytest.raises(DeviceError) as caught:
        big.reserve_scratch(needed)
    assert caught.value.kind == "out of memory"
    assert driver.leaks() == held and big.scratch[1] < needed
    driver.free = driver.free - driver.cuMemGetInfo()[1]
    with pytest.raises(DeviceError) as caught:
        case.device.span(layers, head)
    assert caught.value.kind == "out of memory"
    assert driver.leaks() == held


@emulated_only
def test_span_opened_fifty_times_gives_everything_back(opened, _):
    """Spans with graphs, asks, open runs: after close nothing of the driver's is held, fifty times in one process."""
    case, driver = opened(seats=[(0, 0), (1, 1)])
    case.device.close()
    path = case.container.path
    for i in range(50):
        again = OnCard(path, case.device, [(0, i % 2), (1, 1)], cuts=(4,))
        states = again.new_states()
        again.forward([(IDS[:1], 0, states)], [0])
        if i % 10 == 0:
            again.forward([(IDS[1:11], 1, states)], [9])
        if i % 2:
            case.device.begin_span(again.spans[0], [SpanPart(0, 1, 11, states[:4])], again.embed(IDS[:1]),
                                   again.rope.cos, again.rope.sin)  # fmt: skip
        case.device.close()
        assert driver.leaks() == {}
    assert driver.complaint == ""


def test_span_bytes_covers_what_a_span_takes(device, answers):
    """The bytes that are charged to the plan are at least what layers, head and span take of the card."""
    path, _ = answers(0)
    case = OnCard(path, device, [])
    numbers = case.mixers[0].spec.geometry
    context, n = device._context, len(case.mixers)
    layers = [device.layer(i, m, None, layer_spec(case.container, i)) for i, m in enumerate(case.mixers)]
    taken = []
    alloc = context.alloc
    context.alloc = lambda n_bytes, what: taken.append(n_bytes) or alloc(n_bytes, what)
    try:
        device.layer(0, case.mixers[0], None, layer_spec(case.container, 0))
        per_layer = sum(taken)
        device.span(layers, case.spans[0].head)
    finally:
        context.alloc = alloc
    assert 0 < sum(taken) + (n - 1) * per_layer <= CudaDevice.span_bytes(numbers, n)


@emulated_only
def test_room_for_choices_that_was_not_had_is_asked_for_again(_, monkeypatch):
    """Pinned memory that is refused once: the next batch of that size gets it, and does not look beyond the old one."""
    monkeypatch.setattr(mailbox, "_GROW_BYTES", 64)
    with emulated():
        context = probe.list_devices()[0]._opened()
        box = mailbox.Mailbox(context)
        pin, refused = context.pin, []

        def short(n_bytes, what):
            if what == "a span's choices" and not refused:
                refused.append(n_bytes)
                raise DeviceError("no pinned memory", "out of memory")
            return pin(n_bytes, what)

        monkeypatch.setattr(context, "pin", short)
        sizes = {"top_k": 2, "hidden": 64, "list_bytes": 64, "logits_bytes": 64, "asks": False}
        with pytest.raises(DeviceError):
            box.reserve(3, 100, **sizes)
        box.reserve(3, 100, **sizes)
        top_idx, external, missing = box.choices(3, 100, 2)
        assert ((3, 100, 2), (3, 100, 2), (3,)) == (top_idx.shape, external.shape, missing.shape)
        box.close()
