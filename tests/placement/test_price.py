"""coli.placement.price: what experts are worth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.errors import PlacementError
from coli.placement import DeviceFacts, ModelShape, plan
from coli.placement.price import ValueCurve, deal, rank_experts
from placement.examples import LAW, QWEN36_35B, shape, skewed_heat


def test_rank_without_heat_is_even_and_spreads_over_the_layers():
    """Without heat p is topk / n_experts, and any hottest part holds an equal share of each layer."""
    ranked = rank_experts(shape(n_experts=4, topk=1, layers=3), None)
    assert {0.25} == {expert.p for expert in ranked}
    assert [(0, 0), (1, 0), (2, 0), (0, 1)] == [(expert.layer, expert.index) for expert in ranked[:4]]


def test_rank_with_heat_follows_the_formula():
    """p = min(1, (heat + 32 topk / n_experts) / (n + 32)), n = the layer's heat / topk."""
    model = ModelShape([], layers=2, n_experts=4, topk=2, expert_bytes=1)
    ranked = rank_experts(model, [[300, 50, 50, 0], [0, 0, 0, 0]])
    expected = {
        (0, 0): 1.0,  # (300 + 16) / (200 + 32) > 1
        (0, 1): 66 / 232,
        (0, 2): 66 / 232,
        (0, 3): 16 / 232,
        **{(1, e): 0.5 for e in range(4)},  # a layer without heat is even
    }
    assert expected == {(expert.layer, expert.index): expert.p for expert in ranked}
    assert [expert.p for expert in ranked] == sorted((expert.p for expert in ranked), reverse=True)


def test_rank_reads_heat_of_the_layers_that_have_experts():
    """Heat may cover all layers, or those with experts only."""
    model = shape(n_experts=2, topk=1, layers=3, expert_layers=[1])
    assert rank_experts(model, [[0, 90]]) == rank_experts(model, [[7, 7], [0, 90], [7, 7]])


@pytest.mark.parametrize(
    ("heat", "names"),
    [
        ([[1, 1]], "1 layers; the model has 3"),
        ([[1, 1], [1, 1], [1, 1], [1, 1]], "4 layers"),
        ([[1, 1], [1], [1, 1]], "layer 1 has 1 counts"),
        ([[1, 1], [1, -1], [1, 1]], "layer 1"),
        ([[1, 1], [1, math.nan], [1, 1]], "layer 1"),
        ([[1, 1], [1, 1], [math.inf, 1]], "layer 2"),
    ],
)
def test_rank_with_heat_of_another_model_is_refused(heat, names):
    """Heat that is not this model's is an error that says where it differs."""
    with pytest.raises(PlacementError, match=names):
        rank_experts(shape(n_experts=2, topk=1, layers=3), heat)


def test_curve_fills_from_the_hottest_and_the_last_pro_rata():
    """V(room) = sum of ratio * p * min(slot, what is left), from the hottest."""
    curve = ValueCurve([0.9, 0.5, 0.1], 100, 2.0)
    assert [0.0, 90.0, 180.0, 230.0, 280.0, 300.0, 300.0] == pytest.approx(
        [curve.value(room) for room in (0, 50, 100, 150, 200, 300, 10_000)]
    )
    assert 0.0 == curve.value(-5)
    assert [0, 0, 1, 1, 3, 3] == [curve.residents(room) for room in (-1, 99, 100, 199, 300, 10_000)]
    assert 60.0 == pytest.approx(curve.loss(250, 100))
    assert 0.0 == curve.loss(600, 300), "room that no expert would use is free"


@LAW
@given(
    p=st.lists(st.floats(0, 1), max_size=20).map(lambda p: sorted(p, reverse=True)),
    slot=st.integers(1, 50),
    rooms=st.tuples(st.integers(0, 1500), st.integers(0, 1500), st.integers(0, 200)),
)
def test_curve_is_concave(p, slot, rooms):
    """What the same bytes displace is worth less where there is more room."""
    curve = ValueCurve(p, slot, 1.7)
    small, large = sorted(rooms[:2])
    taken = rooms[2]
    if taken <= small:
        assert curve.loss(large, taken) <= curve.loss(small, taken) + 1e-9


@LAW
@given(weights=st.lists(st.integers(0, 40), min_size=1, max_size=5), more=st.integers(0, 60))
def test_deal_gives_every_hand_its_weight_first(weights, more):
    """The first sum(weights) cards fill every hand exactly; a weight of 0 gets none while another has some."""
    hands = deal(weights, sum(weights) + more)
    assert len(hands) == sum(weights) + more
    if any(weights):
        assert weights == [hands[: sum(weights)].count(i) for i in range(len(weights))]
        assert not {i for i, weight in enumerate(weights) if not weight} & set(hands)


def test_heat_of_a_few_tokens_hardly_moves_the_plan():
    """A fresh heat file does not make the experts of eight tokens look certain."""
    model = ModelShape.from_config(QWEN36_35B, cpu_bytes_ratio=2)
    counts = [[1 if e < 64 else 0 for e in range(256)] for _ in range(40)]
    assert max(expert.p for expert in rank_experts(model, counts)) == pytest.approx((1 + 1) / (8 + 32))
    device = [DeviceFacts("a", 6 << 30)]
    cold, young = plan(model, device), plan(model, device, heat=counts)
    assert [d.device for d in cold.decisions] == [d.device for d in young.decisions]


def test_p_of_a_layer_adds_up_to_topk():
    """A token chooses topk experts of every layer."""
    model = shape(n_experts=32, topk=4, layers=3)
    for layer in range(3):
        found = sum(e.p for e in rank_experts(model, skewed_heat(3, 32, 1, 0.3)) if e.layer == layer)
        assert 4 == pytest.approx(found)
