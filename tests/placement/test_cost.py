"""coli.placement.cost: the time of a token."""

from __future__ import annotations

import random

import pytest

from coli.placement import ModelShape, Probe, Speed, Speeds
from coli.placement.cost import CostModel, mean_of_max
from coli.placement.homes import ON_CPU
from coli.placement.price import rank_experts

MB = 10**6
CPU = Speeds(Speed(40), Speed(20))
CARD = Speeds(Speed(400, 10), Speed(200, 16))


def model(components=(), *, n_experts=4, topk=4, layers=1, devices=1, **others) -> CostModel:
    """A model whose tokens choose every expert, so that nothing is random unless topk says so."""
    shape = ModelShape(components, layers=layers, n_experts=n_experts, topk=topk, expert_bytes=MB, **others)
    return CostModel(shape, Probe(CPU, (CARD,) * devices), rank_experts(shape, None), context=100)


def test_component_takes_its_bytes_and_its_round_trips():
    """On the CPU bytes over bandwidth; on a card a round trip more, for attention two."""
    made = model([("dnproj", 0, 4 * MB), ("attnproj", 0, 4 * MB)])
    dnproj, attnproj = made.shape.components
    assert [100, 100] == pytest.approx([made.component_us(item, None) for item in (dnproj, attnproj)])
    assert [20, 30] == pytest.approx([made.component_us(item, 0) for item in (dnproj, attnproj)])


def test_token_is_the_sum_of_its_steps():
    """Trunk one after the other, then the experts; small matrices, keys, values and state are read each time."""
    made = model(
        [("lmhead", None, 8 * MB), ("dnproj", 0, 4 * MB)], rest_bytes=MB, kv_bytes_per_position=1000, state_bytes=MB
    )
    found = made.predict({("lmhead", None): 0}, [ON_CPU] * 4).us
    expected = {"lmhead": 30, "dnproj": 100, "experts": 200, "rest": 25, "context": (50 * 1000 + 2 * MB) / 40e3}
    assert expected == pytest.approx(found)


def test_experts_run_side_by_side_and_the_slowest_decides():
    """The CPU's misses and the cards' groups overlap."""
    made = model(devices=2)
    assert 4 * 50 == pytest.approx(made.predict({}, [ON_CPU] * 4).us["experts"])
    assert 16 + 4 * 5 == pytest.approx(made.predict({}, [0] * 4).us["experts"])
    assert 16 + 3 * 5 == pytest.approx(made.predict({}, [0, 0, 0, 1]).us["experts"])
    assert 50 == pytest.approx(made.predict({}, [0, 0, 0, ON_CPU]).us["experts"])


def test_shared_expert_is_part_of_the_experts_step():
    """On the CPU it comes before the misses; on a card it shares the group's round trip."""
    made = model([("shexp", 0, 2 * MB)])
    assert 50 + 200 == pytest.approx(made.predict({}, [ON_CPU] * 4).us["experts"])
    assert 50 + 50 == pytest.approx(made.predict({}, [0, 0, 0, ON_CPU]).us["experts"])
    assert 10 + 5 + 4 * 5 == pytest.approx(made.predict({("shexp", 0): 0}, [0] * 4).us["experts"])
    assert 200 == pytest.approx(made.predict({("shexp", 0): 0}, [ON_CPU] * 4).us["experts"])


def test_layer_by_itself_is_its_part_of_the_token():
    """layer_us prices one layer as predict does."""
    made = model([("shexp", 0, 2 * MB), ("shexp", 1, MB)], n_experts=6, topk=2, layers=2)
    owners = [0, ON_CPU, 0, 0, ON_CPU, ON_CPU, 0, ON_CPU, ON_CPU, 0, 0, 0]
    device_of = {("shexp", 1): 0}
    by_layer = [[rank for rank, e in enumerate(made.ranked) if e.layer == layer] for layer in (0, 1)]
    total = sum(made.layer_us(layer, owners, ranks, device_of) for layer, ranks in enumerate(by_layer))
    assert made.predict(device_of, owners).us["experts"] == pytest.approx(total)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.8, 0.2), (0.1, 0.9), (0.4, 0.3, 0.3), (0.25, 0.25, 0.25, 0.25)])
@pytest.mark.parametrize("scales", [(50, 5, 4, 3), (20, 20, 20, 20), (40, 10, 3, 8)])
def test_mean_of_max_is_close_to_what_draws_give(shares, scales):
    """Eight experts thrown at two to four executors: within 3 % of the mean of many throws (normal for discrete)."""
    draw = random.Random(1)
    scales, k, throws = scales[: len(shares)], 8, 4000
    total = 0.0
    for _ in range(throws):
        counts = [0] * len(shares)
        for executor in draw.choices(range(len(shares)), shares, k=k):
            counts[executor] += 1
        total += max(count * scale for count, scale in zip(counts, scales, strict=True))
    means = [k * share * scale for share, scale in zip(shares, scales, strict=True)]
    # Independent counts of these variances, given their sum, have the moments of the throw.
    found = mean_of_max(means, [k * share for share in shares], scales)
    assert total / throws == pytest.approx(found, rel=0.03)


def test_mean_of_max_without_chance_is_the_maximum():
    """Nothing random: the largest; one executor: its mean."""
    assert 7.0 == mean_of_max([3.0, 7.0, 5.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert 3.0 == mean_of_max([3.0], [2.0], [1.0])
    assert 4.0 == mean_of_max([4.0, 0.0], [2.0, 0.0], [1.0, 1.0])


def test_expert_more_in_vram_never_costs_where_the_card_is_much_faster():
    """Along the heat order, from none resident to all, the token gets faster."""
    made = model(n_experts=32, topk=4, layers=2)
    times = [made.predict({}, [0] * n + [ON_CPU] * (64 - n)).ms_per_token for n in range(0, 65, 8)]
    assert times == sorted(times, reverse=True)
