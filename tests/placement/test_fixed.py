"""coli.placement.fixed: lists that cannot be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.errors import PlacementError
from coli.placement import DeviceFacts, ModelShape, plan
from placement.examples import LAW, MIB, QWEN36_35B, cards, machines, model_shapes, place_lists, shape


def test_list_for_a_device_that_is_not_there_names_it():
    """The error has the item, the device and those that there are."""
    with pytest.raises(
        PlacementError, match=r"'dnproj=0:2\+2:2': there is no device 2; devices: 0 \(card 0\), 1 \(card 1\)"
    ):
        plan(shape(10, 2, 6), cards(64, 64), place="lmhead=1,dnproj=0:2+2:2")
    with pytest.raises(PlacementError, match=r"'experts=3': there is no device 3"):
        plan(shape(10, 2, 6), cards(64), place="experts=3")
    with pytest.raises(PlacementError, match="devices: none"):
        plan(shape(10, 2, 6), [], place="lmhead=0")


def test_list_that_does_not_fit_says_where_how_much_and_what_to_change():
    """One message: the device by index, name and identity, the part, the sums, the reserve, and a change that fits."""
    model = ModelShape.from_config(QWEN36_35B, trunk_bits=16)
    card = DeviceFacts("Small 3 GiB", 3 << 30, reserve_bytes=200 << 20, uuid="GPU-ffffffff-0000-0000-0000-000000000006")
    with pytest.raises(PlacementError) as raised:
        plan(model, [card], place="lmhead=0,dnproj=0,attnproj=0,experts=0")
    message = str(raised.value)
    assert "\n" not in message
    for part in (
        "attnproj 35 does not fit on device 0 (Small 3 GiB, GPU-ffffffff)",
        "it needs 54,525,952 bytes",
        "the list puts 3,072,327,680 bytes on it, 3,011,510,272 are available",
        "(3,221,225,472 free less 209,715,200 reserve)",
        "'dnproj=0:37' instead of 'dnproj=0' would fit",
    ):
        assert part in message, part
    made = plan(model, [card], place="lmhead=0,dnproj=0:37,attnproj=0,experts=0")
    assert made.budgets[0] >= 0


def test_list_that_no_single_change_makes_fit_says_so():
    """Where two items are each too big, auto is what fits."""
    components = [("lmhead", None, 100), ("dnproj", 0, 100)]
    model = ModelShape(components, layers=1, n_experts=1, topk=1, expert_bytes=1)
    with pytest.raises(PlacementError, match="'auto' would"):
        plan(model, [DeviceFacts("a", 50)], place="lmhead=0,dnproj=0")


def test_list_may_fill_a_card_to_the_last_byte():
    """What fits exactly fits."""
    made = plan(shape(10, 2, 6), cards(22), place="lmhead=0,dnproj=0")
    assert [0] == made.budgets == made.residents


@LAW
@given(data=st.data(), model=model_shapes(), devices=machines())
def test_list_that_is_refused_names_a_change_that_is_not(data, model, devices):
    """The change that a refusal offers is legal and fits."""
    place = data.draw(place_lists(model.layers, len(devices)))
    try:
        plan(model, devices, place=place)
    except PlacementError as error:
        offered = re.search(r"'([^']+)' instead of '([^']+)' would fit", str(error))
        if offered is None:
            assert "'auto' would" in str(error)
            return
        new, old = offered.groups()
        items = [new if item == old else item for item in place.split(",")]
        try:
            plan(model, devices, place=",".join(items))
        except PlacementError as again:
            pytest.fail(f"{place}: {error} / {again}")


def test_list_leaves_what_it_does_not_name_on_the_cpu_and_says_so():
    """Everything that is not named is stated to stay on the CPU; the experts are fitted all the same."""
    made = plan(shape(10, 2, 6), cards(64), place="lmhead=0")
    assert {("lmhead", "listed"), ("dnproj", "not listed")} == {(d.component, d.reason) for d in made.decisions}
    assert [54 * MIB] == made.budgets
    assert [54] == made.residents
