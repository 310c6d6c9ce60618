"""coli.placement.grammar: COLI_PLACE, read strictly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.errors import PlacementError
from coli.placement import DeviceFacts, parse, plan
from placement.examples import LAW, place_lists, shape

# The text, and the item that its error has to name (as repr), or another part of the message.
MALFORMED = [
    ("", "an empty list"),
    (",", "item 1 is empty"),
    ("lmhead=0,", "item 2 is empty"),
    (",lmhead=0", "item 1 is empty"),
    ("lmhead=0,,dnproj=0", "item 2 is empty"),
    ("lmhead", "'lmhead'"),
    ("lmhead:0", "'lmhead:0'"),
    ("=0", "'=0'"),
    ("dnprj=0", "'dnprj=0': unknown name 'dnprj' (nearest: dnproj)"),
    ("LMHEAD=0", "'LMHEAD=0'"),
    ("router=0", "'router=0'"),
    ("lmhead=0,lmhead=1", "'lmhead=1'"),
    ("experts=0,dnproj=0,experts=0", "'experts=0'"),
    ("lmhead=", "'lmhead='"),
    ("lmhead=gpu0", "'lmhead=gpu0'"),
    ("lmhead=-1", "'lmhead=-1'"),
    ("lmhead=+1", "'lmhead=+1'"),
    ("lmhead=01", "'lmhead=01'"),
    ("lmhead=1.0", "'lmhead=1.0'"),
    ("lmhead=1_0", "'lmhead=1_0'"),
    ("lmhead=\u0661", "not a device"),
    ("lmhead=" + "9" * 5000, "not a device"),
    ("lmhead=CPU", "'lmhead=CPU'"),
    ("lmhead=0=1", "'lmhead=0=1'"),
    ("lmhead=0 ", "'lmhead=0 '"),
    (" lmhead=0", "' lmhead=0'"),
    ("lmhead=0, dnproj=0", "' dnproj=0'"),
    ("lmhead=0\n", "'lmhead=0\\n'"),
    ("lmhead=0;dnproj=0", "'lmhead=0;dnproj=0'"),
    ("dnproj=0:", "'dnproj=0:'"),
    ("dnproj=:20", "'dnproj=:20'"),
    ("dnproj=0:0", "'dnproj=0:0'"),
    ("dnproj=0:-3", "'dnproj=0:-3'"),
    ("dnproj=0:03", "'dnproj=0:03'"),
    ("dnproj=0:2.5", "'dnproj=0:2.5'"),
    ("dnproj=0:x", "'dnproj=0:x'"),
    ("dnproj=0:20:1", "'dnproj=0:20:1'"),
    ("dnproj=0:41", "'dnproj=0:41': its counts add up to 41 layers, the model has 40"),
    ("dnproj=0:20+1:21", "'dnproj=0:20+1:21'"),
    ("dnproj=0:20+", "'dnproj=0:20+'"),
    ("dnproj=+0:20", "'dnproj=+0:20'"),
    ("dnproj=0:20++1:20", "'dnproj=0:20++1:20'"),
    ("dnproj=0:20+1", "'dnproj=0:20+1'"),
    ("dnproj=0+1", "'dnproj=0+1'"),
    ("dnproj=cpu:20+0:20", "'dnproj=cpu:20+0:20'"),
    ("dnproj=all", "'dnproj=all'"),
    ("experts=0:20", "'experts=0:20'"),
    ("experts=0+", "'experts=0+'"),
    ("experts=0+0", "'experts=0+0'"),
    ("experts=cpu+0", "'experts=cpu+0'"),
    ("experts=none", "'experts=none'"),
    ("auto,lmhead=0", "'auto'"),
    ("lmhead=0,off", "'off'"),
    ("auto:speed", "'auto:speed'"),
    ("AUTO", "'AUTO'"),
    ("lmhead=0,dnproj=0:20+1:20,experts=0 please", "'experts=0 please'"),
]


@pytest.mark.parametrize(("text", "named"), MALFORMED)
def test_parse_malformed_names_the_item_and_shows_the_legal_forms(text, named):
    """What cannot be read is one error, on one line, that names the item and shows what can."""
    with pytest.raises(PlacementError) as raised:
        parse(text, 40)
    message = str(raised.value)
    assert named in message
    assert "lmhead=0,dnproj=0:20+1:20,experts=0" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", [text for text, _ in MALFORMED])
def test_plan_with_a_malformed_list_places_nothing(text):
    """A plan never falls back on a guess."""
    with pytest.raises(PlacementError, match="legal"):
        plan(shape(10, 2, 6, layers=40), [DeviceFacts("a", 1 << 30)], place=text)


def test_parse_of_no_text_is_refused():
    """Only text is a list."""
    with pytest.raises(PlacementError, match="expected text, found 0"):
        parse(0, 40)


def test_parse_counts_are_model_layers_in_order():
    """Counts are layers, not instances of the component; layers past the last segment stay on the CPU."""
    listed = parse("lmhead=0,dnproj=0:20+1:15,experts=0", 40)
    assert 0 == listed.device_of("lmhead", None)
    assert [0] * 20 + [1] * 15 + [None] * 5 == [listed.device_of("dnproj", layer) for layer in range(40)]
    assert listed.device_of("attnproj", 3) is None
    assert (0,) == listed.expert_devices(2)


def test_parse_all_layers_may_be_named_exactly():
    """Counts may add up to the model's layers."""
    listed = parse("dnproj=1:20+0:20", 40)
    assert [1] * 20 + [0] * 20 == [listed.device_of("dnproj", layer) for layer in range(40)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lmhead=0", (0, 1, 2)),
        ("experts=all", (0, 1, 2)),
        ("experts=cpu", ()),
        ("experts=2", (2,)),
        ("experts=2+0", (0, 2)),
    ],
)
def test_parse_experts_fill_every_card_unless_named(text, expected):
    """Unnamed experts, or all, go to every card."""
    assert expected == parse(text, 40).expert_devices(3)


def test_parse_lmhead_has_no_layer_and_takes_its_first_segment():
    """lmhead belongs to no layer."""
    assert 1 == parse("lmhead=1:20+0:20", 40).device_of("lmhead", None)


@LAW
@given(data=st.data(), layers=st.integers(1, 50), n_devices=st.integers(0, 12))
def test_parse_of_what_a_list_prints_is_the_list(data, layers, n_devices):
    """str() of a list parses back to itself, and is the text that was read."""
    text = data.draw(place_lists(layers, n_devices))
    listed = parse(text, layers)
    assert text == str(listed)
    assert listed == parse(str(listed), layers)


@LAW
@given(text=st.text(alphabet="lmheadnprojxs=0123456789:+,cpu "), layers=st.integers(1, 40))
def test_parse_of_any_text_is_a_list_or_a_placement_error(text, layers):
    """Nothing else comes out of the parser, and what comes out prints as it was written."""
    try:
        assert text == str(parse(text, layers))
    except PlacementError as error:
        assert "legal: " in str(error)
