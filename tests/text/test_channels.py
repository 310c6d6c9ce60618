"""Reasoning, content and tool calls of an answer together."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from scripted import CASES, FIXTURES, TINY

from coli.text.channels import ChannelParser, Delta
from coli.text.tokenizer import Tokenizer

TOOLS = json.loads((CASES / "streams" / "tool_basic.json").read_text())["tools"]
ANSWER = (
    "I should look it up,\n\nnaïvely 🔭.\n</think>\n\nLet me look. \n\n<tool_call>\n<function=get_weather>\n"
    "<parameter=city>\nSão Paulo 👩‍🔬 </x>\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
)


def run(pieces, **options) -> ChannelParser:
    count = itertools.count()
    parser = ChannelParser(call_id=lambda: f"call_{next(count)}", **options)
    deltas: list[Delta] = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    # what was streamed joins to what was collected
    for channel in ("reasoning", "content"):
        joined = "".join(delta.text for delta in deltas if delta.channel == channel)
        assert joined == (getattr(parser, channel) or "")
    assert [delta.call for delta in deltas if delta.channel == "tool_call"] == parser.tool_calls
    return parser


def outcome(parser: ChannelParser) -> tuple:
    return parser.reasoning, parser.content, parser.tool_calls


def test_channels_of_a_whole_answer():
    """A thought, a word before, and two calls come out on three channels, each to the character."""
    parser = run([ANSWER], thinking="open", tools=TOOLS)
    assert parser.reasoning == "I should look it up,\n\nnaïvely 🔭."
    assert parser.content == "Let me look."
    assert [json.loads(call.arguments) for call in parser.tool_calls] == [
        {"city": "São Paulo 👩‍🔬 </x>", "days": 3},
        {"city": "Oslo"},
    ]


def test_channels_with_nothing_on_them_are_none():
    """An absent channel is None, not an empty string: clients tell the two apart."""
    parser = run(["</think>\n\n"], thinking="open")
    assert outcome(parser) == (None, None, [])


def test_finish_reason_is_tool_calls_only_with_calls():
    """C44: "tool_calls" needs calls present; an answer cut by its length stays "length"."""
    with_calls, without = run([ANSWER], thinking="open", tools=TOOLS), run(["hi"], tools=TOOLS)
    assert (with_calls.finish_reason("stop"), with_calls.finish_reason("length")) == ("tool_calls", "length")
    assert without.finish_reason("stop") == "stop"


@pytest.mark.parametrize(("folder", "points"), [(TINY, 500), (FIXTURES / "tokenizer", 10_000)], ids=["bytes", "bpe"])
def test_streaming_equals_not_streaming_at_random_cut_points(folder, points):
    """Fed token by token through the detokeniser and cut anywhere, the channels equal those of the whole text."""
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode(ANSWER, special=True)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.feed(i) for i in ids] + [detokenizer.finish()]
    assert "".join(pieces) == ANSWER
    options = {"thinking": "open", "tools": TOOLS}
    expected = outcome(run([ANSWER], **options))
    assert outcome(run(pieces, **options)) == expected
    assert outcome(run(ANSWER, **options)) == expected
    rng = random.Random(13)
    for _ in range(points):
        cuts = [0, *sorted(rng.randrange(len(ANSWER) + 1) for _ in range(rng.randrange(1, 5))), len(ANSWER)]
        assert outcome(run([ANSWER[a:b] for a, b in itertools.pairwise(cuts)], **options)) == expected
