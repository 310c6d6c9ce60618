"""Stop strings across pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CASES, TINY

from coli.errors import RequestError
from coli.text.stops import StopStrings, check_stops, partial_suffix_length
from coli.text.tokenizer import Tokenizer
from coli.text.writer import TextWriter


def cut(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    cutter = StopStrings(stops)
    text = "".join(cutter.feed(piece) for piece in pieces)
    return text + cutter.finish(), cutter.hit


def test_c42_stop_strings_over_token_borders():
    """C42: text and reason as in the file, in the file's pieces, whole, and one character at a time."""
    for case in json.loads((CASES / "streams" / "stop_split.json").read_text()):
        whole = "".join(case["pieces"])
        for pieces in (case["pieces"], [whole], list(whole)):
            text, hit = cut(case["stop"], pieces)
            assert text == case["text"]
            assert ("stop" if hit else "length") == case["finish_reason"]


def test_stop_string_that_is_complete_first_wins():
    """Of two stop strings the one complete first cuts, even where the other began earlier."""
    assert cut(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert cut(["abcd", "bc"], list("abcd")) == ("a", "bc")
    assert cut(["bc", "abc"], ["xabc"]) == ("x", "abc")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab\n", max_size=5), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_cut(stops, pieces):
    """However the text is cut, the same text comes out, and without a hit all of it."""
    whole = "".join(pieces)
    expected = cut(stops, [whole])
    assert cut(stops, pieces) == expected
    assert cut(stops, list(whole)) == expected
    if expected[1] is None:
        assert expected[0] == whole
        assert not any(stop in whole for stop in stops)
    else:
        assert whole.startswith(expected[0] + expected[1])


def test_stop_strings_withhold_no_more_than_they_must():
    """Only the end that may begin a stop string waits."""
    cutter = StopStrings(["</end>"])
    assert cutter.feed("text <") == "text "
    assert cutter.feed("b") == "<b"
    assert partial_suffix_length("ab</en", ["</end>", "n!"]) == 4


def test_stop_strings_of_another_kind_are_refused():
    """Only text that can occur may stop an answer, and not the empty one; null and a single string are accepted."""
    assert check_stops(None) == ()
    assert check_stops("x") == ("x",)
    assert check_stops(["x", "y"]) == ("x", "y")
    for bad in (5, ["a", 1], [""], "", "a\udcff"):
        with pytest.raises(RequestError) as caught:
            check_stops(bad)
        assert caught.value.param == "stop"


def test_text_writer_finds_a_stop_string_in_the_bytes_of_tokens():
    """A stop string may lie across tokens and characters across bytes; both are put together first."""
    writer = TextWriter(Tokenizer.open(TINY), ["é!"])
    shown = "".join(writer.feed(byte) for byte in "café! no".encode()) + writer.finish()
    assert (shown, writer.stopped) == ("caf", True)
