"""Placement must not change the answer: the guard of all other promises.

Logits of a prefill and of decoded tokens with parts on fake devices equal the CPU's to the last bit, for every way
to place, every budget, cold and warm, under forced evictions, and whatever fails first.  CI runs a sample of each
axis; ``-m full`` runs the whole matrix.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from engine.standins import ByLayer, MiB

import coli
from coli.devices.fake import FakeDevice
from coli.errors import PlacementError
from coli.tier.promotion import Promotion
from conftest import DATA, assert_same_bits

LISTS = [
    "lmhead=0",
    "dnproj=0",
    "dnout=0",
    "attnproj=0",
    "shexp=0",
    "experts=0",
    "lmhead=cpu,dnproj=0",
    "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0,experts=cpu",
    "dnproj=0:2,dnout=0:1,experts=cpu",
    "attnproj=0:4,experts=0",
    "shexp=0:1,experts=all",
    "shexp=0:2,experts=cpu",
    "lmhead=0,shexp=0,experts=0",
]
LISTS_OF_TWO = [
    "lmhead=0,dnproj=0:2+1:2,experts=0",
    "lmhead=1,dnproj=1,dnout=0,experts=0+1",
    "attnproj=0:4+1:4,experts=1",
    "dnproj=1:1+0:3,shexp=1,experts=all",
]
MODELS = ["demo", "tiny-random", "tiny-textonly"]
CONTEXT = 256  # keys and values of a long one would not leave the small cards here room for whole layers


class Answer:
    """Logits of a prefill in two cuts, of greedy steps, of a copy beside its original, and of a second session."""

    def __init__(self, model: coli.Model, ids: list[int], steps: int = 4) -> None:
        session = model.session()
        self.logits = [session.prefill(ids[: len(ids) // 2]), session.prefill(ids[len(ids) // 2 :])]
        self.ids = []
        for _ in range(steps):
            self.ids.append(int(np.argmax(self.logits[-1])))
            self.logits.append(session.step(self.ids[-1]))
        copied = session.copy()
        self.logits += [copied.step(ids[0]), session.step(ids[1]), copied.prefill(ids[2:5])]
        self.logits.append(model.session().prefill(ids[:3]))

    def assert_equals(self, other: Answer, what: str) -> None:
        assert self.ids == other.ids, what
        for at, (a, b) in enumerate(zip(self.logits, other.logits)):
            assert_same_bits(a, b, f"{what}, logits {at}")


@pytest.fixture(scope="module")
def cases(make_container):
    """cases(name) -> (path, ids, what the CPU answers)."""
    made: dict[str, tuple] = {}

    def case(name: str):
        if name not in made:
            path = "demo" if name == "demo" else str(make_container(name))
            with coli.load(path, devices="none", threads=2) as model:
                ids = np.random.default_rng(7).integers(0, model.config.vocab_size, 24).tolist()
                made[name] = path, ids, Answer(model, ids)
        return made[name]

    return case


def check(case, devices, what: str, **options) -> dict:
    """Load with these devices, compare, return the stats."""
    path, ids, expected = case
    with coli.load(path, devices=devices, threads=2, context=CONTEXT, **options) as model:
        Answer(model, ids).assert_equals(expected, what)
        return model.stats()


@pytest.mark.parametrize("place", ["auto", "off", *LISTS])
def test_bits_one_device(cases, place):
    """Every list, auto and off on one device give the CPU's logits on the demo model."""
    stats = check(cases("demo"), [FakeDevice(64 * MiB)], place, place=place)
    assert stats["fallen"] == []
    if place not in ("off",) and "experts=cpu" not in place:
        assert stats["tier"]["residents"] > 0


@pytest.mark.parametrize("name", MODELS[1:])
@pytest.mark.parametrize("place", ["auto", LISTS[7], LISTS[9]])
@pytest.mark.parametrize("kind", [FakeDevice, ByLayer])
def test_bits_fixtures(cases, name, place, kind):
    """The same on the two fixtures, whose shapes are ragged; layers in runs and one by one."""
    check(cases(name), [kind(8 * MiB)], f"{name} {place}", place=place)


@pytest.mark.parametrize("place", ["auto", LISTS[7], "attnproj=0,dnproj=0,dnout=0,experts=0"])
def test_bits_layers_one_by_one(cases, place):
    """A device that takes layers but no runs of them, on the demo model."""
    check(cases("demo"), [ByLayer(64 * MiB)], place, place=place)


@pytest.mark.parametrize("place", ["auto", *LISTS_OF_TWO])
def test_bits_two_devices(cases, place):
    """Two devices, split by list and by auto."""
    check(cases("demo"), [FakeDevice(6 * MiB, name="a"), FakeDevice(9 * MiB, name="b")], place, place=place)


def test_bits_three_devices(cases):
    """Three devices of different sizes under auto."""
    devices = [FakeDevice(n * MiB, name=f"f{n}") for n in (3, 5, 4)]
    check(cases("demo"), devices, "three")


@pytest.mark.parametrize("free_bytes", [0, 30_000, 300_000, 2 * MiB, 5 * MiB, 12 * MiB, 40 * MiB])
def test_bits_budgets_from_nothing_to_everything(cases, free_bytes):
    """Any amount of memory gives the same logits; more of it holds more."""
    check(cases("demo"), [FakeDevice(free_bytes)], f"{free_bytes} bytes")


def test_bits_cold_and_warm(cases, tmp_path):
    """A run without heat, one that starts from its heat, and one from the demo's recorded heat answer alike."""
    case, heat = cases("demo"), tmp_path / "heat.json"
    cold = check(case, [FakeDevice(4 * MiB)], "cold", heat=heat, place="off")
    assert heat.exists()
    check(case, [FakeDevice(4 * MiB)], "warm", heat=heat, place="off")
    recorded = tmp_path / "recorded.json"
    recorded.write_bytes((DATA / "heat_demo.json").read_bytes())
    warm = check(case, [FakeDevice(4 * MiB)], "recorded", heat=recorded, place="off")
    assert cold["tier"]["residents"] == warm["tier"]["residents"] > 0


def _evict_always(model: coli.Model) -> None:
    tier = model.placed.tier
    tier.exchange.policy = Promotion(every_tokens=1, max_swaps=1, ratio=0.0, margin=-1.0, max_slowdown=math.inf)
    between = tier.between_tokens

    def settled() -> None:
        between()
        tier.settle()

    tier.between_tokens = settled


@pytest.mark.parametrize("devices", [1, 3])
def test_bits_eviction_at_every_token(cases, devices):
    """An expert thrown out of its slot and another put in at every token changes nothing but the hit rate."""
    path, ids, expected = cases("demo")
    cards = [FakeDevice(2 * MiB, name=f"f{i}") for i in range(devices)]
    with coli.load(path, devices=cards, place="off", threads=2) as model:
        _evict_always(model)
        Answer(model, ids).assert_equals(expected, "evictions")
        assert model.stats()["tier"]["swaps"] >= 3


CARD_BYTES = 16 * MiB  # whole layers, and everything of the small models


ASKS = LISTS[7]  # runs of layers that have no expert, and ask for every one
# what may fail, on which kind of device, and the placement under which it happens
OPERATIONS = [
    *((operation, FakeDevice, "auto") for operation in ("alloc", "upload", "span", "ask", "finish", "die")),
    *((operation, FakeDevice, ASKS) for operation in ("answer", "die")),
    *((operation, ByLayer, "auto") for operation in ("matmul", "issue", "take", "mix", "die")),
]


def _failures(case, operation: str, kind: type[FakeDevice], place: str, sample: int | None) -> None:
    """The same answer whichever call of an operation fails."""
    card = kind(CARD_BYTES)
    check(case, [card], "counting", place=place)
    n = len(card.calls) if operation == "die" else sum(call[0] == operation for call in card.calls)
    assert n > 0, f"{operation} never happens"
    every = range(1, n + 1)
    chosen = every if sample is None else sorted({1, 2, n, *np.random.default_rng(3).integers(1, n + 1, sample)})
    for i in chosen:
        failing = kind(CARD_BYTES, fail=[(operation, int(i))])
        check(case, [failing], f"{kind.__name__} {operation} {i}", place=place)


@pytest.mark.parametrize(("operation", "kind", "place"), OPERATIONS)
def test_bits_nth_failure_sampled(cases, operation, kind, place):
    """C06: whichever allocation, upload, product, group or run fails, or the device dies: same logits and no error."""
    _failures(cases("tiny-random"), operation, kind, place, 1)


@pytest.mark.full
@pytest.mark.parametrize(("operation", "kind", "place"), OPERATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_every_nth_failure(cases, name, operation, kind, place):
    """Every single one of them, on every model."""
    _failures(cases(name), operation, kind, place, None if name != "demo" else 60)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["auto", "off", *LISTS])
@pytest.mark.parametrize("free_bytes", [100_000, 700_000, 3 * MiB, 40 * MiB])
@pytest.mark.parametrize("kind", [FakeDevice, ByLayer])
def test_bits_matrix(cases, name, place, free_bytes, kind):
    """Models x lists x budgets; a list that does not fit is refused before anything is uploaded."""
    card = kind(free_bytes)
    try:
        check(cases(name), [card], f"{name} {place} {free_bytes}", place=place)
    except PlacementError:
        assert not any(call[0] == "upload" for call in card.calls)


def test_list_that_cannot_fit_is_refused_before_the_first_upload(cases):
    """C04: the message has the device, the part, bytes needed and free, and a change that would fit."""
    card = FakeDevice(200_000, name="small card")
    with pytest.raises(PlacementError) as info:
        coli.load("demo", devices=[card], place="lmhead=0,dnproj=0", threads=1)
    text = str(info.value)
    assert "lmhead" in text and "small card" in text and "\n" not in text
    assert not any(call[0] in ("alloc", "upload") for call in card.calls)


class Shrinking(FakeDevice):
    """A card that another program fills between the plan and the uploads."""

    def __init__(self, first: int, then: int) -> None:
        super().__init__(first, name="busy")
        self._then = then
        self._asked = 0

    def free_bytes(self) -> int:
        self._asked += 1
        if self._asked == 2:
            self.set_free_bytes(self._then)
        return super().free_bytes()


def test_memory_that_shrinks_before_the_uploads_is_planned_again(cases, caplog):
    """C03: both numbers are said, the plan is made again for what is left, and the answer is the CPU's."""
    import logging

    with caplog.at_level(logging.WARNING, logger="coli"):
        stats = check(cases("demo"), [Shrinking(8 * MiB, 3 * MiB)], "shrunk")
    said = [r.getMessage() for r in caplog.records if "planned again" in r.getMessage()]
    assert len(said) == 1 and f"{8 * MiB:,}" in said[0] and f"{3 * MiB:,}" in said[0]
    assert 0 < sum(stats["trunk_bytes"].values()) <= 3 * MiB


def test_stats_and_budget_add_up(cases):
    """What the plan placed is what the device was given: the trunk's bytes and the slots, each charged once."""
    card = FakeDevice(6 * MiB)
    stats = check(cases("demo"), [card], "sums")
    plan = stats["plan"]["devices"][0]
    assert stats["trunk_bytes"][card.name] == plan["placed_bytes"]
    assert plan["placed_bytes"] + plan["residents"] * 35840 <= plan["allowance_bytes"]
    assert json.dumps(stats["plan"])


def test_device_with_room_for_more_than_all_experts_keeps_the_rest_free():
    """An arena has no slot that no expert could ever come to: other programs use the card, too."""
    device = FakeDevice(1024 * MiB)
    with coli.load("demo", devices=[device], place="auto:bytes", threads=1, context=256) as model:
        n_experts = model.config.num_hidden_layers * model.config.num_experts
        slots = next(call[2] for call in device.calls if call[0] == "alloc" and isinstance(call[2], int))
        assert slots == n_experts
        assert device.free_bytes() > 900 * MiB
