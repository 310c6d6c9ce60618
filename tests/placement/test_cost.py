"""coli.placement.cost: the time of a token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from coli.placement import CpuSpeeds, ModelShape, Probe, SpanSpeed, Speed, Speeds
from coli.placement.cost import CostModel
from coli.placement.homes import ON_CPU
from coli.placement.price import rank_experts
from coli.placement.slowest import Side, mean_of_max, slowest_us

MB = 10**6
CPU = CpuSpeeds(Speed(40), Speed(20))
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


# ---- Whole layers


def spanning(n_layers=2, *, devices=1, cpu=CPU, n_experts=4, topk=4, **others) -> CostModel:
    """DeltaNet layers of 4 and 2 MB with a shared expert of 2; cards that take them whole."""
    components = [("lmhead", None, 8 * MB)]
    for layer in range(n_layers):
        components += [("dnproj", layer, 4 * MB), ("dnout", layer, 2 * MB), ("shexp", layer, 2 * MB)]
    shape = ModelShape(
        components, layers=n_layers, n_experts=n_experts, topk=topk, expert_bytes=MB, rest_bytes=n_layers * MB, **others
    )
    card = replace(CARD, span=SpanSpeed(30, 50, hop_us=8, ask_us=20, kv_gb_s=100))
    return CostModel(shape, Probe(cpu, (card,) * devices), rank_experts(shape, None), context=100)


def on(device: int, *layers: int, names=("dnproj", "dnout", "shexp")) -> dict:
    return {(name, layer): device for name in names for layer in layers}


def test_whole_layers_cost_one_way_there_and_their_own_bytes():
    """Neighbours on one card: one hop for both; small matrices are read there too; the head is the run's end."""
    made = spanning()
    found = made.predict(on(0, 0, 1) | {("lmhead", None): 0}, [0] * 8).us
    expected = {"lmhead": 20, "dnproj": 20, "dnout": 10, "experts": 2 * (5 + 4 * 5), "layers": 60, "rest": 5, "hops": 8}
    assert expected | {"context": 0} == pytest.approx(found)


def test_whole_layers_on_two_cards_or_apart_cost_a_way_for_each_run():
    """A border between cards, and the CPU in between, are ways there."""
    made = spanning(3, devices=2)
    assert 8 == made.predict(on(0, 0, 1), [0] * 12).us["hops"]
    assert 16 == made.predict(on(0, 0) | on(1, 1), [0] * 12).us["hops"]
    assert 16 == made.predict(on(0, 0, 2), [0] * 12).us["hops"]


def test_layer_with_a_projection_elsewhere_is_not_whole():
    """Half a layer is single products, as on any card."""
    made = spanning(1)
    half = {("dnproj", 0): 0, ("shexp", 0): 0}
    assert {} == made.spans_of(half)
    elsewhere = spanning(1, devices=2)
    assert {} == elsewhere.spans_of(on(0, 0) | {("shexp", 0): 1}), "nor is one whose shared expert is another card's"
    plain = model([(item.name, item.layer, item.bytes) for item in made.shape.components], rest_bytes=MB)
    assert plain.predict(half, [0] * 4).us == pytest.approx(made.predict(half, [0] * 4).us)


def test_whole_layer_asks_for_what_it_lacks_while_it_computes_the_rest():
    """One expert missing: the host begins after the question; the card's group runs beside it."""
    made = spanning(1)
    assert 20 + 50 == pytest.approx(made.predict(on(0, 0), [0, 0, 0, ON_CPU]).us["experts"])
    assert 5 + 4 * 5 == pytest.approx(made.predict(on(0, 0), [0] * 4).us["experts"])
    alone = made.predict(on(0, 0, names=("dnproj", "dnout")), [0] * 4).us["experts"]
    assert 20 + 2 * MB / 40e3 == pytest.approx(alone), "the CPU's shared expert is asked for every time"


def test_whole_layer_asks_only_as_often_as_an_expert_is_missing():
    """Few of a layer's experts are missing, and few tokens pay for the question."""
    made = spanning(1, n_experts=100, topk=1)
    found = made.predict(on(0, 0), [0] * 80 + [ON_CPU] * 20).us["experts"]
    without = made.predict(on(0, 0), [0] * 100).us["experts"]
    assert 10 == pytest.approx(without)
    assert 0.2 * (20 + 50) < found < 0.2 * (20 + 50) + 0.8 * 10


def test_whole_layer_asks_another_card_through_the_host():
    """Experts on one card, trunk on the other: a question and a group's way in every layer."""
    made = spanning(1, devices=2)
    assert 20 + 16 + 4 * 5 == pytest.approx(made.predict(on(0, 0), [1] * 4).us["experts"])


def test_region_costs_where_a_step_on_a_card_cuts_the_cpus_work():
    """Every product on a card, both sides of a group, each run of whole layers, and each answer of the host."""
    cpu = CpuSpeeds(Speed(40), Speed(20), region_us=3, layer_us=7)
    one, other = spanning(1), spanning(1, cpu=cpu)

    def more(device_of: dict, owners: list) -> float:
        return sum(other.predict(device_of, owners).us.values()) - sum(one.predict(device_of, owners).us.values())

    assert 7 == pytest.approx(more({}, [ON_CPU] * 4)), "off is one region"
    assert 7 + 3 == pytest.approx(more({("dnproj", 0): 0}, [ON_CPU] * 4))
    assert 7 + 2 * 3 == pytest.approx(more({}, [0] * 4))
    assert 3 == pytest.approx(more(on(0, 0), [0] * 4))
    assert 3 + 3 == pytest.approx(more(on(0, 0), [ON_CPU] * 4))


def test_group_costs_the_host_too():
    """A layer that is cut in two takes what was measured of it; the CPU's misses begin when the groups are started."""
    card = replace(CARD, cut_us=70.0, host_us=9.0)
    shape = ModelShape([], layers=1, n_experts=4, topk=4, expert_bytes=MB)
    made = CostModel(shape, Probe(CPU, (card, card)), rank_experts(shape, None))
    assert 4 * 50 == pytest.approx(made.predict({}, [ON_CPU] * 4).us["experts"]), "nobody is asked"
    assert 70 + 16 + 4 * 5 == pytest.approx(made.predict({}, [0] * 4).us["experts"])
    assert 70 + 9 + 50 == pytest.approx(made.predict({}, [0, 0, 0, ON_CPU]).us["experts"])
    assert 70 + 2 * 9 + 50 == pytest.approx(made.predict({}, [0, 1, 1, ON_CPU]).us["experts"])


def test_head_behind_the_last_layer_brings_the_logits():
    """At its own speed; alone it is a matrix as any other."""
    made = spanning(1)
    span = replace(made.speeds.devices[0].span, head_gb_s=100.0)
    slow = CostModel(
        made.shape, replace(made.speeds, devices=(replace(made.speeds.devices[0], span=span),)), made.ranked
    )
    assert 8e3 / 400 == pytest.approx(made.predict(on(0, 0) | {("lmhead", None): 0}, [0] * 4).us["lmhead"])
    assert 8e3 / 100 == pytest.approx(slow.predict(on(0, 0) | {("lmhead", None): 0}, [0] * 4).us["lmhead"])
    assert 10 + 8e3 / 400 == pytest.approx(slow.predict({("lmhead", None): 0}, [0] * 4).us["lmhead"])


def test_token_costs_something_whatever_its_layers_do():
    """Once, wherever everything lies."""
    made = spanning(1, cpu=replace(CPU, token_us=120.0))
    for device_of, owners in (({}, [ON_CPU] * 4), (on(0, 0), [0] * 4)):
        assert 120 == pytest.approx(made.predict(device_of, owners).us["token"])


def test_context_is_read_where_the_layer_is():
    """Keys and values on the card at its own speed for them."""
    shape = ModelShape(
        [("attnproj", 0, 4 * MB), ("attnproj", 1, 4 * MB)], layers=2, n_experts=0, topk=0, expert_bytes=0,
        kv_bytes_per_position=40_000,
    )  # fmt: skip
    card = replace(CARD, span=SpanSpeed(30, 50, hop_us=8, ask_us=20, kv_gb_s=100))
    made = CostModel(shape, Probe(CPU, (card,)), [], context=100)
    assert 50 == pytest.approx(made.predict({}, []).us["context"])
    assert 25 + 10 == pytest.approx(made.predict({("attnproj", 0): 0}, []).us["context"])
    later = CostModel(shape, Probe(CPU, (card,)), [], context=100, position=25)
    assert 25 == pytest.approx(later.predict({}, []).us["context"])


def test_layer_by_itself_is_its_part_of_the_token():
    """experts_us prices one layer as predict does."""
    made = model([("shexp", 0, 2 * MB), ("shexp", 1, MB)], n_experts=6, topk=2, layers=2)
    owners = [0, ON_CPU, 0, 0, ON_CPU, ON_CPU, 0, ON_CPU, ON_CPU, 0, 0, 0]
    device_of = {("shexp", 1): 0}
    by_layer = [[rank for rank, e in enumerate(made.ranked) if e.layer == layer] for layer in (0, 1)]
    total = sum(made.experts_us(layer, owners, ranks, device_of) for layer, ranks in enumerate(by_layer))
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


@pytest.mark.parametrize(("rate", "near"), [(0.3, 0.02), (0.8, 0.02), (0.95, 0.02)])
def test_slowest_beside_a_fast_card_is_about_what_draws_give(rate, near):
    """A card, and a CPU that is far slower whenever it is asked: the mean of draws, less near where it seldom is."""
    draw, k, throws = random.Random(1), 8, 20_000
    card, cpu = (0.0, 0.0, 0.5), (0.0, 25.0, 15.0)
    total = 0.0
    for _ in range(throws):
        hits = sum(draw.random() < rate for _ in range(k))
        counts = zip((card, cpu), (hits, k - hits), strict=True)
        total += max(base + (start + n * each if n else 0.0) for (base, start, each), n in counts)
    variance, nothing = 2 * k * rate * (1 - rate), ((1 - rate) ** k, rate**k)  # given their sum, of half this variance
    sides = [
        Side(*side, k * share, variance, 1 - empty)
        for side, share, empty in zip((card, cpu), (rate, 1 - rate), nothing, strict=True)
    ]
    assert total / throws == pytest.approx(slowest_us(sides[1], sides[:1]), rel=near)


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
