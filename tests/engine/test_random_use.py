"""Whatever people do with sessions, whatever fails and however memory comes and goes: every logit is the CPU's.

Devices, placements, failures and what is done are drawn from a seed; the answer to each prompt so far is what the CPU
alone says of the same ids in one prefill.  The fake devices stop a test at whatever a card would answer with garbage.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from engine.standins import ByLayer, MiB

import coli
from coli.devices.fake import FakeDevice
from coli.errors import PlacementError
from coli.tier.promotion import Promotion
from conftest import assert_same_bits

CONTEXT = 256
FAILURES = ("upload", "matmul", "issue", "take", "mix", "span", "ask", "answer", "finish", "alloc")
PLACES = [
    "auto",
    "off",
    "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0",
    "lmhead=0,dnproj=0,dnout=0,attnproj=0,experts=0",
    "dnproj=0:3,dnout=0:3,attnproj=0:1,experts=0",
]
PLACES_OF_TWO = [
    *PLACES,
    "lmhead=1,dnproj=0:3+1:3,dnout=0:3+1:3,attnproj=0:1+1:1,shexp=0:3+1:3,experts=0+1",
    "lmhead=0,dnproj=0,dnout=0,attnproj=0,experts=0+1",
]


@pytest.fixture(scope="module")
def expected(path):
    """expected(ids) -> the logits behind them, of the CPU in one prefill."""
    with coli.load(path, devices="none", threads=2, context=CONTEXT) as model:
        known: dict[tuple[int, ...], np.ndarray] = {}

        def answer(ids: list[int]) -> np.ndarray:
            key = tuple(ids)
            if key not in known:
                known[key] = model.session().prefill(ids)
            return known[key]

        yield answer


def drawn_device(draw: random.Random, index: int) -> FakeDevice:
    fail = [(draw.choice(FAILURES), draw.randint(1, 120)) for _ in range(draw.choice([0, 0, 1, 3]))]
    fail += [("die", draw.randint(100, 1500))] if draw.random() < 0.25 else []
    kind = draw.choice([FakeDevice, FakeDevice, FakeDevice, ByLayer])
    free_bytes = draw.choice([draw.randint(MiB // 4, 3 * MiB), draw.randint(MiB, 8 * MiB), 40 * MiB])
    device = kind(free_bytes, name=f"f{index}", gb_s=draw.choice([None, 0.3]), fail=fail)
    device.span_rows, device.segment_slots = draw.choice([512, 512, 3]), draw.choice([1, 3])
    return device


class Use:
    """One model in somebody's hands."""

    def __init__(self, model: coli.Model, devices: list[FakeDevice], draw: random.Random, expected) -> None:
        self.model, self.devices, self.draw, self.expected = model, devices, draw, expected
        self.vocab = model.config.vocab_size
        self.sessions = [model.session()]

    def ids(self, session, lengths: list[int]) -> list[int]:
        n = min(self.draw.choice(lengths), CONTEXT - session.position)
        return [self.draw.randrange(self.vocab) for _ in range(n)]

    def prefill(self) -> None:
        session = self.draw.choice(self.sessions)
        if ids := self.ids(session, [1, 1, 2, 5, 63, 64, 65]):
            whole = session.ids + ids
            assert_same_bits(session.prefill(ids), self.expected(whole), f"{len(ids)} ids, {len(whole)} in all")

    def batch(self) -> None:
        lengths = self.draw.choice([[1], [1, 2, 7, 40]])
        some = self.draw.sample(self.sessions, self.draw.randint(1, min(4, len(self.sessions))))
        parts = [(session, np.array(ids, np.int32)) for session in some if (ids := self.ids(session, lengths))]
        if not parts:
            return
        wholes = [session.ids + ids.tolist() for session, ids in parts]
        rows = (np.cumsum([len(ids) for _, ids in parts]) - 1).tolist()
        out = np.empty((len(rows), self.vocab), np.float32)
        self.model.engine.on_thread(lambda: self.model.engine.forward(parts, rows, out))
        for logits, whole in zip(out, wholes, strict=True):
            assert_same_bits(logits, self.expected(whole), f"one of {len(parts)}, {len(whole)} in all")

    def copy(self) -> None:
        self.sessions.append(self.draw.choice(self.sessions).copy())

    def close(self) -> None:
        if len(self.sessions) > 1:
            self.sessions.pop(self.draw.randrange(len(self.sessions))).close()

    def memory(self) -> None:
        """Another program comes or goes, and slots with it."""
        device = self.draw.choice(self.devices)
        device.set_free_bytes(max(1000, device._limit_bytes + self.draw.randint(-MiB // 4, MiB // 4)))
        tier, index = self.model.placed.tier, self.draw.randrange(len(self.devices))

        def resized() -> None:
            tier._check_at = 0
            if tier.n_slots(index):
                tier.resize(index, self.draw.randint(1, tier.n_slots(index) + 3))
            tier.refill()

        self.model.engine.on_thread(resized)


def use(path: str, seed: int, expected, n: int) -> None:
    draw = random.Random(seed)
    devices = [drawn_device(draw, i) for i in range(draw.choice([1, 1, 2]))]
    place = draw.choice(PLACES if len(devices) == 1 else PLACES_OF_TWO)
    try:
        model = coli.load(path, devices=devices, place=place, threads=2, context=CONTEXT)
    except PlacementError:  # a list that does not fit
        return
    with model:
        if draw.random() < 0.7:  # somebody changes places at every token
            model.placed.tier.exchange.policy = Promotion(1, 8, ratio=0.0, margin=-1.0, max_slowdown=math.inf)
        hands = Use(model, devices, draw, expected)
        often, seldom = (hands.prefill, hands.batch), (hands.copy, hands.close, hands.memory)
        for _ in range(n):
            draw.choice([*often, *often, *seldom])()


@pytest.mark.parametrize("seed", range(16))
def test_whatever_is_done_every_logit_is_the_cpus(path, expected, seed):
    """A sample of seeds."""
    use(path, seed, expected, 12)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 400))
def test_whatever_is_done_every_logit_is_the_cpus_in_full(path, expected, seed):
    """Many more of them, and longer."""
    use(path, seed, expected, 25)
