"""Which experts of a large batch are streamed, and how the figures behind it follow what is measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.placement.streaming import FIRST, START_US, StreamFigures, StreamSpeeds, choose

EXPERT_BYTES = 1_622_016
H = StreamSpeeds(stream_gb_s=18.0, cpu_gb_s=100.0, cpu_row_us=3.4, card_expert_us=15.0)  # 16 cores beside an H200
ROWS = [16] * 256

rows_of = st.lists(st.integers(1, 512), max_size=64)
speeds_of = st.builds(
    StreamSpeeds, st.floats(0.5, 60), st.floats(5, 400), st.floats(0.1, 50), st.floats(1, 200)
)  # fmt: skip


def ends(rows: list[int], chosen: list[int], speeds: StreamSpeeds) -> tuple[float, float]:
    """When the CPU and the stream are done, in us."""
    left = [n for at, n in enumerate(rows) if at not in set(chosen)]
    return speeds.cpu_us(EXPERT_BYTES, len(left), sum(left)), speeds.stream_us(EXPERT_BYTES, len(chosen))


def test_both_sides_end_together():
    """With many experts neither side waits longer for the other than one expert takes."""
    chosen = choose(ROWS, EXPERT_BYTES, H)
    cpu_us, stream_us = ends(ROWS, chosen, H)
    assert abs(cpu_us - stream_us) < 2 * EXPERT_BYTES / 18e3
    assert 100 < len(chosen) < 128
    assert max(cpu_us, stream_us) < 0.6 * ends(ROWS, [], H)[0]


def test_experts_with_most_rows_go_first():
    """The CPU keeps the experts that cost it least; of equals the first goes."""
    rows = [3, 90, 3, 40, 90, 1] * 20
    chosen = choose(rows, EXPERT_BYTES, H)
    assert [rows[at] for at in chosen] == sorted(rows, reverse=True)[: len(chosen)]
    assert chosen[:4] == [1, 4, 7, 10]


@pytest.mark.parametrize(
    ("rows", "speeds"),
    [
        ([], H),
        ([1] * 3, H),  # the stream has not begun by the time that the CPU is done
        ([8], StreamSpeeds(1.0, 100.0, 3.4, 15.0)),
        ([1] * 64, StreamSpeeds(0.2, 400.0, 0.1, 15.0)),
        ([2] * 64, StreamSpeeds(50.0, 400.0, 0.1, 1e6)),
    ],
)
def test_nothing_is_streamed_where_it_does_not_pay(rows, speeds):
    """Few experts, a slow bus or a slow card: the CPU does all."""
    assert choose(rows, EXPERT_BYTES, speeds) == []


@given(rows_of, speeds_of)
def test_choice_is_never_worse_than_another_length(rows, speeds):
    """Of all lengths of the list of experts by rows, the one chosen ends first."""
    chosen = choose(rows, EXPERT_BYTES, speeds)
    order = sorted(range(len(rows)), key=lambda at: (-rows[at], at))
    assert chosen == order[: len(chosen)]
    best = max(ends(rows, chosen, speeds))
    assert all(best <= max(ends(rows, order[:n], speeds)) * (1 + 1e-9) for n in range(len(rows) + 1))


@given(rows_of, speeds_of, st.floats(1, 4))
def test_choice_grows_with_the_bus_and_shrinks_with_the_cpu(rows, speeds, factor):
    """A faster bus never gets fewer experts, and a faster CPU never leaves more to it."""
    n = len(choose(rows, EXPERT_BYTES, speeds))
    s = speeds
    faster = StreamSpeeds(s.stream_gb_s * factor, s.cpu_gb_s, s.cpu_row_us, s.card_expert_us / factor)
    assert len(choose(rows, EXPERT_BYTES, faster)) >= n
    faster = StreamSpeeds(s.stream_gb_s, s.cpu_gb_s * factor, s.cpu_row_us / factor, s.card_expert_us)
    assert len(choose(rows, EXPERT_BYTES, faster)) <= n


class Machine:
    """What layers take on a machine with true speeds.   figures : those that are found."""

    def __init__(self, true: StreamSpeeds) -> None:
        self.true = true
        self.figures = StreamFigures()
        self.noise = random.Random(3)

    def layer(self, rows: list[int]) -> int:
        """Experts streamed of a layer."""
        chosen = self.figures.choose(rows, EXPERT_BYTES)
        left = [n for at, n in enumerate(rows) if at not in set(chosen)]
        cpu_us, stream_us = ends(rows, chosen, self.true)
        wild = self.noise.uniform(0.95, 1.05)
        self.figures.cpu_took(cpu_us * wild / 1e6, EXPERT_BYTES, len(left), sum(left))
        self.figures.stream_took(stream_us / wild / 1e6, EXPERT_BYTES, len(chosen))
        return len(chosen)


def test_first_layer_is_the_cpus_and_the_second_is_cautious():
    """Before the CPU was measured nothing is streamed, then less than will be, and soon as much as is right."""
    machine = Machine(H)
    shares = [machine.layer(ROWS) for _ in range(20)]
    right = len(choose(ROWS, EXPERT_BYTES, H))
    assert shares[0] == 0 < shares[1] < right
    assert all(abs(n - right) <= 12 for n in shares[6:]), shares


@pytest.mark.parametrize("true", [StreamSpeeds(3.0, 20.0, 30.0, 40.0), StreamSpeeds(45.0, 15.0, 1.0, 10.0)])
def test_share_follows_the_machine(true):
    """Slow CPU or fast bus: the share is what the true speeds would give, within a tenth of the experts."""
    machine = Machine(true)
    for _ in range(30):
        share = machine.layer(ROWS)
    assert abs(share - len(choose(ROWS, EXPERT_BYTES, true))) < 26


def test_one_wild_layer_moves_the_share_a_little():
    """A layer that was held up, by a page that had to be read from a disk, is not believed."""
    machine = Machine(H)
    for _ in range(12):
        before = machine.layer(ROWS)
    machine.figures.stream_took(3.0, EXPERT_BYTES, 100)
    assert machine.layer(ROWS) > 0.7 * before


def test_stream_that_did_not_pay_is_tried_again():
    """What is known of a slow stream is forgotten after layers that did without; then it is measured anew."""
    machine = Machine(H)
    machine.figures.cpu_took(0.018, EXPERT_BYTES, 256, 4096)
    for _ in range(2):
        machine.figures.stream_took(5.0, EXPERT_BYTES, 4)
    shares = [machine.layer(ROWS) for _ in range(150)]
    first = next(at for at, n in enumerate(shares) if n)
    assert 100 < first < 140 and all(shares[first:])
    assert abs(shares[-1] - len(choose(ROWS, EXPERT_BYTES, H))) <= 12


@pytest.mark.parametrize("n", [6, 10])
def test_cpu_that_was_slow_at_first_is_tried_again(n):
    """Its first layer came from a disk, so all of every layer is streamed; in the end one expert is not, and tells."""
    machine, rows = Machine(H), [16] * n
    machine.figures.cpu_took(50 * ends(rows, [], H)[0] / 1e6, EXPERT_BYTES, n, 16 * n)
    shares = []
    for at in range(600):
        shares.append(machine.layer(rows))
        if at % 40 == 0:
            machine.layer([])  # one that lacks nothing, in every prompt
    first = next(at for at, share in enumerate(shares) if share < n)
    assert 100 < first < 140 and shares[first] == n - 1
    right = len(choose(rows, EXPERT_BYTES, H))
    assert all(abs(share - right) <= 1 for share in shares[first + 1 :])
    best_us, last_us = (max(ends(rows, list(range(share)), H)) for share in (right, shares[-1]))
    assert last_us < 1.1 * best_us < 0.7 * max(ends(rows, list(range(n)), H))


@pytest.mark.parametrize("n", [1, 10])
def test_cpu_that_is_slow_is_tried_with_one_expert_of_many_layers(n):
    """Where streaming all is right it stays so, but for the cheapest expert of every 129th layer."""
    slow = StreamSpeeds(stream_gb_s=18.0, cpu_gb_s=1.0, cpu_row_us=200.0, card_expert_us=15.0)
    machine, rows = Machine(slow), [*range(3, 2 + n), 2]
    machine.layer(rows)
    shares = [machine.layer(rows) for _ in range(600)]
    assert {n, n - 1} == set(shares) and 4 == shares[1:].count(n - 1)  # the first one is cautious
    assert choose(rows, EXPERT_BYTES, slow)[-1] == n - 1


def test_layers_that_lack_nothing_are_no_evidence_against_the_cpu():
    """Nothing is missing, so nothing is streamed: that is not all of it."""
    machine = Machine(H)
    machine.layer(ROWS)
    before = machine.figures.speeds.cpu_gb_s
    assert not any(machine.layer([]) for _ in range(300))
    assert machine.figures.speeds.cpu_gb_s == before and machine.layer(ROWS) > 0


def test_nothing_at_all_is_no_evidence():
    """Layers without an expert on one side leave its figures alone."""
    figures = StreamFigures()
    figures.cpu_took(1.0, EXPERT_BYTES, 0, 0)
    figures.stream_took(1.0, EXPERT_BYTES, 0)
    assert figures.speeds == FIRST and figures.choose(ROWS, EXPERT_BYTES) == []
    assert FIRST.stream_us(EXPERT_BYTES, 0) == 0 and FIRST.stream_us(EXPERT_BYTES, 1) > START_US


@pytest.mark.parametrize("seconds", [0.0, 250e-6, 1e-9])
def test_stream_that_takes_no_time_leaves_figures_that_count(seconds):
    """A few small experts are through before a stream is said to have begun: speeds stay numbers, layer after layer."""
    figures = StreamFigures()
    for _ in range(1000):
        figures.choose([9, 8, 7], 1_600_000)
        figures.cpu_took(seconds, 1_600_000, 2, 15)
        figures.stream_took(seconds, 1_600_000, 1)
    assert all(0 < value < 1e9 for value in vars(figures.speeds).values())
    assert figures.speeds.stream_us(1_600_000, 1) < 1e6
