"""coli.placement.plan: what lies where, by bytes, by a list, and off."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.errors import PlacementError
from coli.placement import CpuFacts, CpuSpeeds, DeviceFacts, ModelShape, Plan, Probe, Speed, Speeds, parse, plan
from coli.placement.price import ValueCurve, rank_experts
from placement.examples import (
    LAW,
    MIB,
    QWEN36_35B,
    cards,
    heats,
    machines,
    model_shapes,
    place_lists,
    shape,
    skewed_heat,
)

EVEN_HEAT = [[100] * 48]


def left_mib(made: Plan) -> list[float]:
    """Budgets in MiB."""
    return [budget / MIB for budget in made.budgets]


def trunk(made: Plan) -> dict[str, int]:
    """{label: device} of what is placed."""
    return {" ".join(str(part) for part in key if part is not None): device for key, device in made.device_of.items()}


# ---- The seven cases of the placement that this one is measured against; sizes in MiB, ratio 2.


def test_plan_case_1_what_fits_is_placed_and_charged():
    """lmhead 10 and dnproj 6 x 2 on a card of 64: all on device 0, 42 left."""
    made = plan(shape(10, 2, 6), cards(64))
    assert {0} == set(made.device_of.values())
    assert [42] == left_mib(made)
    assert [42] == made.residents
    assert 0 == made.place_of("lmhead", 5) == made.place_of("lmhead") == made.place_of("dnproj", 5)
    assert made.place_of("dnproj", 6) is None, "an attention layer has no dnproj"
    assert made.place_of("attnproj", 0) is None, "what was not offered is not placed"


def test_plan_case_2_what_does_not_fit_stays_and_the_next_is_placed():
    """lmhead of 100 on a card of 64 stays on the CPU; dnproj does not."""
    made = plan(shape(100, 2, 6), cards(64))
    assert made.place_of("lmhead") is None
    assert [0] * 6 == [made.place_of("dnproj", layer) for layer in range(6)]
    assert [52] == left_mib(made)


@pytest.mark.parametrize("heat", [None, EVEN_HEAT])
@pytest.mark.parametrize(
    ("topk", "free", "lmhead", "dnproj", "placed", "left"),
    [
        (32, 16, 4, 0.5, 0, 16),  # an expert byte is worth 1.33: it stays
        (8, 16, 4, 0.5, 7, 9),  # 0.33
        (19, 16, 4, 0.5, 7, 9),  # 0.79: pricing by whole experts would place one of the seven
        (32, 100, 10, 2, 7, 78),  # room that no expert would use is free
    ],
)
def test_plan_case_3_experts_are_priced_against_the_trunk(topk, free, lmhead, dnproj, placed, left, heat):
    """One layer of 48 experts of 1 MiB: the trunk is placed where its bytes save more than the experts' do."""
    model = shape(lmhead, dnproj, 6, n_experts=48, topk=topk, expert_layers=1)
    made = plan(model, cards(free), heat=heat)
    assert placed == len(made.device_of)
    assert [left] == left_mib(made)


def test_plan_case_4_a_list_is_obeyed_and_charged():
    """lmhead=cpu,dnproj=0: 52 left, and nothing is chosen."""
    made = plan(shape(10, 2, 6), cards(64), place="lmhead=cpu,dnproj=0")
    assert made.place_of("lmhead") is None
    assert [0] * 6 == [made.place_of("dnproj", layer) for layer in range(6)]
    assert [52] == left_mib(made)
    assert made.alternatives == ()


def test_plan_case_5_off_places_nothing():
    """Off leaves the whole card to the experts."""
    made = plan(shape(10, 2, 6), cards(64), place="off")
    assert {} == made.device_of
    assert [64] == left_mib(made)
    assert [64] == made.residents


def test_plan_case_6_two_devices_are_filled_by_room():
    """Each item goes to the device with most room, the lower index on a tie."""
    made = plan(shape(10, 9, 6), cards(64, 64))
    assert 0 == made.place_of("lmhead")
    assert [1, 1, 0, 1, 0, 1] == [made.place_of("dnproj", layer) for layer in range(6)]
    assert [36, 28] == left_mib(made)
    assert [36, 28] == made.residents


def test_plan_case_7_nothing_offered_changes_nothing():
    """A model without components leaves every card to the experts."""
    made = plan(shape(), cards(64, 32))
    assert {} == made.device_of
    assert [64, 32] == left_mib(made)
    assert () == made.decisions


@pytest.mark.parametrize(("place", "residents"), [("off", 4391), ("lmhead=0,dnproj=0", 3595)])
def test_plan_35b_has_the_sources_residents(place, residents):
    """35B geometry in the source's bytes: lm_head and 30 dnproj displace 796 experts of an 8 GB card."""
    model = ModelShape.from_config(QWEN36_35B, layout="flat", expert_bytes=1_589_248, cpu_bytes_ratio=2)
    made = plan(model, [DeviceFacts("8 GB card", 6_979_600_000)], place=place, context=0)
    assert [residents] == made.residents


# ---- Rules


def test_plan_dnout_prefers_its_dnprojs_device():
    """A dnout goes to its dnproj's device where it fits, also if another has more room; else to the roomiest."""
    components = [("dnproj", 0, 60), ("dnproj", 1, 50), ("dnout", 0, 30), ("dnout", 1, 30)]
    model = ModelShape(components, layers=2, n_experts=4, topk=1, expert_bytes=1)
    made = plan(model, [DeviceFacts("a", 100), DeviceFacts("b", 99)])
    assert [0, 1] == [made.place_of("dnproj", layer) for layer in (0, 1)]
    assert [0, 1] == [made.place_of("dnout", layer) for layer in (0, 1)]
    tight = plan(model, [DeviceFacts("a", 85), DeviceFacts("b", 130)])
    assert {"dnproj 0": 1, "dnproj 1": 0, "dnout 0": 1, "dnout 1": 0} == trunk(tight)
    tighter = plan(model, [DeviceFacts("a", 60), DeviceFacts("b", 130)])
    assert {"dnproj 0": 1, "dnproj 1": 1, "dnout 0": 0, "dnout 1": 0} == trunk(tighter)


def test_plan_withholds_what_would_push_out_more_than_it_saves():
    """A lm_head that just breaks even against warm experts does not shut out the dnproj that gain."""
    model = shape(50, 2, 12, n_experts=100, topk=100, expert_layers=1, layers=12)  # experts worth 2 a byte
    made = plan(model, cards(125))
    assert made.place_of("lmhead") is None
    assert 12 == len(made.device_of)
    assert "greedy without lmhead" == made.label
    assert made.alternatives[0].saved_bytes > max(other.saved_bytes for other in made.alternatives[1:])


def test_plan_hot_experts_keep_their_room_and_cold_ones_yield():
    """With heat, the trunk pushes out the cold tail and stops at what is chosen on every second token."""
    hot = [[1000] * 16 + [0] * 240 for _ in range(8)]
    model = shape(10, 2, 6, topk=8)
    made = plan(model, cards(150), heat=hot)  # the 128 hot ones fill 128 MiB, the trunk has 22
    assert 7 == len(made.device_of)
    assert [128] == made.residents
    crowded = plan(shape(10, 2, 6, topk=16), cards(128), heat=hot)  # each hot one is chosen by every token
    assert {} == crowded.device_of


def test_plan_without_devices_is_the_cpu():
    """No device: everything on the CPU, and each decision says so."""
    made = plan(shape(10, 2, 6), [])
    assert ({}, [], []) == (made.device_of, made.budgets, made.residents)
    assert {"no device"} == {decision.reason for decision in made.decisions}


def test_plan_reserve_runtime_and_staging_are_held_back():
    """What may be used is free memory less all that is held back, and never negative."""
    held = DeviceFacts("a", 64 * MIB, reserve_bytes=8 * MIB, runtime_bytes=4 * MIB, staging_bytes=2 * MIB)
    assert [50 - 22] == left_mib(plan(shape(10, 2, 6), [held]))
    full = DeviceFacts("a", 64 * MIB, reserve_bytes=80 * MIB)
    assert ([0], {}) == (plan(shape(10, 2, 6), [full]).budgets, plan(shape(10, 2, 6), [full]).device_of)


def test_plan_context_moves_no_weight():
    """Keys and values lie on the host: a longer context takes nothing from a device."""
    model = ModelShape.from_config(QWEN36_35B)
    short, long = (plan(model, [DeviceFacts("a", 6 << 30)], context=context) for context in (4096, 262144))
    assert (short.budgets, short.device_of) == (long.budgets, long.device_of)


@pytest.mark.parametrize(
    ("context", "cpu", "message"),
    [
        (262_145, None, "262,145 positions: the model was made for at most 262,144"),
        (262_144, CpuFacts(free_bytes=4 << 30), "5,434,572,800 bytes of host memory, 4,294,967,296 are free"),
        (-1, None, "context is -1"),
        ("8k", None, "context is '8k'"),
    ],
)
def test_plan_context_that_cannot_be_held_is_refused(context, cpu, message):
    """A context is refused up front, with the numbers, not at token N."""
    with pytest.raises(PlacementError, match=message):
        plan(ModelShape.from_config(QWEN36_35B), cards(64), context=context, cpu=cpu)


def test_plan_one_card_that_holds_all_experts_has_them_all():
    """A second card would only add a round trip to every layer."""
    made = plan(shape(10, 2, 6, n_experts=48, expert_layers=1), cards(300, 100))
    assert [48, 0] == made.residents
    assert {0} == set(made.device_of.values())


def test_plan_homes_hold_every_expert_once_and_the_hottest_are_resident():
    """Each expert has one home; together the residents are the hottest there is room for."""
    heat = skewed_heat(8, 256, 3)
    model = shape(10, 2, 6)
    made = plan(model, cards(300, 150), heat=heat)
    at_home = [expert for home in made.homes for expert in home]
    assert Counter(at_home).most_common(1)[0][1] == 1
    assert 8 * 256 == len(at_home)
    resident = [expert.p for home, n in zip(made.homes, made.residents, strict=True) for expert in home[:n]]
    hottest = [expert.p for expert in rank_experts(model, heat)[: len(resident)]]
    assert sorted(hottest) == sorted(resident)
    some = made.homes[1][7]
    assert 1 == made.home_of(some.layer, some.index)


def test_plan_bytes_per_token_add_up_to_what_the_model_reads():
    """What the CPU and the devices read for a token is the trunk, topk experts a layer, and the rest."""
    model = ModelShape.from_config(QWEN36_35B)
    made = plan(model, [DeviceFacts("a", 6 << 30), DeviceFacts("b", 3 << 30)], heat=skewed_heat(40, 256, 5, 0.5))
    read = made.cpu_bytes_per_token + sum(made.device_bytes_per_token)
    assert model.trunk_bytes + 40 * 8 * model.expert_bytes + model.rest_bytes == pytest.approx(read, rel=1e-6)


def test_plan_takes_a_parsed_list():
    """A PlaceList does as well as its text."""
    text = "lmhead=0,dnproj=0:3+1:2,experts=1"
    first, second = (plan(shape(10, 2, 6), cards(64, 64), place=place) for place in (text, parse(text, 8)))
    assert (first.device_of, first.budgets, first.residents) == (second.device_of, second.budgets, second.residents)
    assert text == first.place == second.place


@pytest.mark.parametrize(
    ("experts", "residents"), [("cpu", [0, 0]), ("1", [0, 64]), ("all", [48, 64]), (None, [48, 64])]
)
def test_plan_list_says_which_cards_hold_experts(experts, residents):
    """Experts fill what is left on every card, unless the list names cards; the trunk is charged all the same."""
    place = "lmhead=0,dnproj=0:3" + (f",experts={experts}" if experts else "")
    made = plan(shape(10, 2, 6), cards(64, 64), place=place)
    assert residents == made.residents
    assert [48, 64] == left_mib(made)


def test_plan_json_is_the_plan():
    """to_json is JSON text with the decisions, budgets and sums of the plan."""
    made = plan(shape(10, 2, 6), cards(64, 64), heat=skewed_heat(8, 256, 1))
    read = json.loads(made.to_json())
    assert (made.budgets, made.residents) == (read["budgets"], read["residents"])
    assert [decision.to_dict() for decision in made.decisions] == read["decisions"]
    assert made.budgets == [device["budget_bytes"] for device in read["devices"]]
    assert "auto:bytes" == read["place"]


def test_plan_35b_on_four_devices_is_quick():
    """Planning takes no time that anyone would notice: under 0.3 s, with heat."""
    model = ModelShape.from_config(QWEN36_35B)
    devices = [DeviceFacts(f"card {i}", (5 + i) << 30) for i in range(4)]
    heat = skewed_heat(40, 256, 1)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan(model, devices, heat=heat)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


# ---- Speeds


def test_plan_predicts_only_where_all_speeds_are_given():
    """Milliseconds need the speed of every device and of the CPU."""
    model = shape(10, 2, 6)
    fast, unknown = DeviceFacts("a", 64 * MIB, gb_s=400, latency_us=10), DeviceFacts("b", 64 * MIB)
    assert plan(model, [fast]).predicted_ms_per_token is None
    assert plan(model, [fast, unknown], cpu=CpuFacts(40)).predicted_ms_per_token is None
    assert plan(model, [fast], cpu=CpuFacts(40)).predicted_ms_per_token > 0
    assert plan(model, [], cpu=CpuFacts(40)).predicted_ms_per_token > 0


def test_plan_auto_is_by_time_where_speeds_are_known_and_by_bytes_elsewhere():
    """Auto takes the better currency that it has; either can be asked for by name."""
    model = shape(10, 2, 6)
    known = [DeviceFacts("a", 64 * MIB, gb_s=400, latency_us=10)]
    probe = Probe(CpuSpeeds(Speed(40), Speed(40)), (Speeds(Speed(400, 10), Speed(300, 12)),))
    assert "auto:time" == plan(model, known, cpu=CpuFacts(40)).place == plan(model, cards(64), probe=probe).place
    assert "auto:bytes" == plan(model, known).place == plan(model, known, cpu=CpuFacts(40), place="auto:bytes").place
    with pytest.raises(PlacementError, match="auto:time needs the speed"):
        plan(model, known, place="auto:time")
    with pytest.raises(PlacementError, match="the probe has 1 devices, the plan 2"):
        plan(model, cards(64, 64), probe=probe)


# ---- Laws


def saved(model: ModelShape, made: Plan, heat: list[list[int]] | None) -> float:
    """Bytes saved for a token, from the results alone: placed bytes, and what the experts make of all that is left."""
    placed = sum(item.bytes for item in model.components if made.place_of(item.name, item.layer) is not None)
    p = [expert.p for expert in rank_experts(model, heat)]
    return placed + ValueCurve(p, model.expert_bytes, model.cpu_bytes_ratio).value(sum(made.budgets))


@LAW
@given(data=st.data(), model=model_shapes(), devices=machines())
def test_plan_never_exceeds_a_budget_and_charges_every_byte_once(data, model, devices):
    """Whatever is asked for: on each device components, experts and what is left add up to the allowance."""
    heat = data.draw(heats(model))
    place = data.draw(st.sampled_from(["auto", "off"]) | place_lists(model.layers, len(devices)))
    try:
        made = plan(model, devices, heat=heat, place=place)
    except PlacementError as error:
        assert "does not fit" in str(error)
        return
    assert [item.label for item in model.components] == [
        d.component if d.layer is None else f"{d.component} {d.layer}" for d in made.decisions
    ]
    for i, device in enumerate(devices):
        placed = sum(item.bytes for item in model.components if made.place_of(item.name, item.layer) == i)
        assert device.allowance_bytes == placed + made.budgets[i]
        assert 0 <= made.residents[i] * model.expert_bytes <= made.budgets[i]
    assert sum(made.residents) <= model.expert_count


@LAW
@given(data=st.data(), model=model_shapes(), devices=machines())
def test_plan_auto_saves_at_least_what_off_saves(data, model, devices):
    """Auto is never worse, in its own currency, than the experts alone."""
    heat = data.draw(heats(model))
    auto, off = (plan(model, devices, heat=heat, place=place) for place in ("auto", "off"))
    assert saved(model, auto, heat) >= saved(model, off, heat) - 1


@LAW
@given(model=model_shapes(), rooms=st.lists(st.integers(0, 70_000), min_size=2, max_size=12))
def test_plan_with_more_memory_never_saves_fewer_bytes(model, rooms):
    """One device, no heat: every byte more is worth something or nothing."""
    found = [saved(model, plan(model, [DeviceFacts("a", room)]), None) for room in sorted(rooms)]
    assert all(less <= more + 1e-2 for less, more in pairwise(found))


def test_plan_with_more_memory_never_saves_fewer_bytes_at_a_break_even():
    """An item that just breaks even over experts does not shut out a smaller one that a smaller room still took."""
    components = [("dnproj", layer, 100) for layer in range(5)] + [("dnout", 0, 33)]
    model = ModelShape(components, layers=5, n_experts=60, topk=60, expert_bytes=10, expert_layers=1, cpu_bytes_ratio=2)
    found = [saved(model, plan(model, [DeviceFacts("a", room)]), None) for room in range(500, 1300)]
    assert found == sorted(found)


@LAW
@given(data=st.data(), model=model_shapes(), devices=machines())
def test_plan_is_a_function_of_its_facts(data, model, devices):
    """The same facts give the same plan."""
    heat = data.draw(heats(model))
    assert plan(model, devices, heat=heat).to_json() == plan(model, devices, heat=heat).to_json()
