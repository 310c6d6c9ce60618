"""Conversations checked and brought into one form."""

from __future__ import annotations

import json

import pytest
from scripted import CASES

from coli.errors import RequestError
from coli.text.messages import check_tools, normalise_messages


def user(content) -> dict:
    return {"role": "user", "content": content}


def messages_of(case: str) -> list[dict]:
    return json.loads((CASES / "requests" / f"{case}.json").read_text())["messages"]


def test_c31_system_messages_are_merged_into_the_first_in_order():
    """C31: a late one moves to the front, several become one with blank lines between, developer is system."""
    assert normalise_messages(messages_of("system_late")) == [
        {"role": "system", "content": "From now on answer in capitals."},
        user("hello"),
        user("again"),
    ]
    assert normalise_messages(messages_of("two_systems"))[0] == {"role": "system", "content": "One.\n\nTwo."}
    assert normalise_messages(messages_of("developer_role"))[0] == {"role": "system", "content": "Be brief."}


def test_c34_text_parts_are_joined_and_other_parts_refused_by_type():
    """C34: a list of text parts is the text; an image part is refused with its type and place."""
    assert normalise_messages(messages_of("content_parts")) == [user("first second")]
    with pytest.raises(RequestError, match="'image_url'") as caught:
        normalise_messages(messages_of("content_image_part"))
    assert caught.value.param == "messages[0].content[1].type"


def test_tool_call_arguments_become_a_mapping():
    """On the wire arguments are a JSON string; templates iterate a mapping."""
    turn = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"name": "h", "arguments": {"y": 2}},
    ]}  # fmt: skip
    made = normalise_messages([user("a"), turn])[1]
    assert made["content"] == ""
    assert [c.get("function", c)["arguments"] for c in made["tool_calls"]] == [{"x": [1]}, {}, {"y": 2}]
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"x": [1]}', "the caller's messages were changed"


def test_other_fields_of_a_message_are_kept():
    """What a template may read and we do not know is passed on."""
    message = {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"}
    assert normalise_messages([message]) == [message]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        (None, "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([user("a"), {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user("a"), user("b\ud800")], "messages[1].content"),
        ([user(["x"])], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": "", "reasoning_content": 5}], "messages[0].reasoning_content"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_name_the_field(messages, param):
    """Each malformed conversation is one RequestError that names the message and field."""
    with pytest.raises(RequestError) as caught:
        normalise_messages(messages)
    assert caught.value.param == param


def test_check_tools_names_the_tool_without_a_function():
    """Tools are a list of objects that name a function; none at all is None."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert check_tools(tools) == tools
    assert check_tools(None) is None and check_tools([]) is None
    for bad in ("x", [5], [{"function": {}}], [{"function": {"name": ""}}]):
        with pytest.raises(RequestError, match="tools"):
            check_tools(bad)
