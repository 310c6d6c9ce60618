"""Tool calls found in a stream of text."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from scripted import CASES

from coli.text.tools import ToolCall
from coli.text.toolstream import ToolCallParser, new_call_id

DRIFT = json.loads((CASES / "streams" / "tool_drift.json").read_text())
TOOLS = DRIFT["tools"]
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"


def parse(pieces, tools=TOOLS) -> tuple[str, list[ToolCall]]:
    count = itertools.count()
    parser = ToolCallParser(tools, call_id=lambda: f"call_{next(count)}")
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    assert "" not in parts
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return "".join(part for part in parts if isinstance(part, str)), calls


def cities(text: str) -> list[str]:
    content, calls = parse([text])
    assert content == ""
    return [json.loads(call.arguments)["city"] for call in calls]


def test_c43_tool_calls_become_calls_whole_and_by_character():
    """C43: name and typed arguments as in the file, text before the call is content, without tools all is text."""
    basic = json.loads((CASES / "streams" / "tool_basic.json").read_text())
    for case in basic["cases"]:
        tools = None if case.get("no_tools") else basic["tools"]
        for pieces in ([case["text"]], list(case["text"])):
            content, calls = parse(pieces, tools)
            found = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
            assert found == case["tool_calls"], case["name"]
            assert (content or None) == case.get("content"), case["name"]


def test_c44_drifting_syntax_is_a_repaired_call_or_the_raw_text():
    """C44: each drifting text is either calls and no rest of their syntax, or exactly the text; nothing raises."""
    outcomes = []
    for text in DRIFT["texts"]:
        content, calls = parse([text])
        assert parse(list(text)) == (content, calls)
        outcomes.append([call.name for call in calls])
        assert content == ("" if calls else text)
    assert outcomes == [["get_weather"], [], [], ["unknown_tool"]]


@pytest.mark.parametrize(
    "text",
    [
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "<call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</call>\n",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</tool_call>",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>",
    ],
)
def test_call_with_tags_missing_or_invented_is_repaired(text):
    """A wrapper left out, invented or unclosed, and closing tags left out, do not lose the call."""
    assert cities(text) == ["Rome"]
    assert parse(list(text)) == parse([text])


def test_calls_in_a_row_are_numbered_and_the_space_between_them_is_dropped():
    """Several blocks are several calls, each with its place and its own id."""
    content, calls = parse([CALL.format("Rome") + "\n" + CALL.format("Oslo") + "\n"])
    assert content == ""
    assert [(call.index, call.id, call.name) for call in calls] == [
        (0, "call_0", "get_weather"),
        (1, "call_1", "get_weather"),
    ]
    assert len({new_call_id() for _ in range(100)}) == 100


def test_values_may_hold_the_syntax_itself():
    """Closing tags inside a value are part of the value, to the character."""
    value = "see </tool_call> and </parameter> and\n\n <tool_call> here "
    assert cities(CALL.format(value)) == [value]


@pytest.mark.parametrize(
    "text",
    [
        "the <tool_call> tag opens, </tool_call> closes",
        "a\n<div>\n<function=other>\n</function>\n</div> ",
        "x <function=get_weather>\n</function>",  # not at the start of a line
        "if a<b and b < c:\n  <",
        "<tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo",
        " \n",
        "<" * 50,
        "<a" + "b" * 400 + ">\n<function=get_weather>",
    ],
)
def test_text_that_is_no_call_comes_out_to_the_character(text):
    """What only looks like a call is text, its white space included."""
    assert parse([text]) == (text, [])
    assert parse(list(text)) == (text, [])


def test_call_behind_a_tag_mentioned_in_prose_is_found():
    """An opening tag that leads nowhere hides no call that follows."""
    content, calls = parse(["I use a <tool_call> now:\n" + CALL.format("Rome")])
    assert content == "I use a <tool_call> now:"
    assert [call.arguments for call in calls] == ['{"city": "Rome"}']


def test_text_behind_a_call_is_content():
    """Models should not speak after a call; where they do, it is not lost, nor glued to what was before."""
    assert parse([CALL.format("Rome") + "\n\nDone. \n"])[0] == "Done. \n"
    assert parse(["First.\n" + CALL.format("Rome") + "\n\nDone."])[0] == "First.\n\nDone."


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=get_weather>", "</function>", "<parameter=city>", "</parameter>", "\n",
    " ",
    "x", "<", "<div>", "</div>", "{", "<function=", "<parameter=days>", "3", '{"name": "get_weather", "arguments": {}}',
    "<tool", "é",
]  # fmt: skip


@pytest.mark.parametrize("cases", [1500, pytest.param(100_000, marks=pytest.mark.full)])
def test_result_does_not_depend_on_the_cut(cases):
    """Random mixtures of the syntax's parts, cut anywhere: the same text and calls, and nothing raises."""
    rng = random.Random(11)
    with_calls = 0
    for _ in range(cases):
        text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(1, 26)))
        whole = parse([text])
        cuts = [0, *sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6))), len(text)]
        assert parse([text[a:b] for a, b in itertools.pairwise(cuts)]) == whole, text
        assert parse(list(text)) == whole, text
        with_calls += bool(whole[1])
        if not whole[1]:
            assert whole[0] == text
    assert with_calls > cases // 200
