"""What a tool call says, by the tool's schema."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.text.tools import parse_calls, tool_schemas

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "a": {"type": "array"},
        "maybe": {"type": ["integer", "null"]},
        "any": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Point"}]},
        "enum": {"enum": ["1", "two"]},
        "number_enum": {"enum": [1, 2]},
        "loop": {"$ref": "#/$defs/Loop"},
        "free": {},
    },
    "$defs": {"Point": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}},
}
SCHEMAS = {"f": SCHEMA}


def call(*parameters: tuple[str, str]) -> str:
    return "<function=f>\n" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters) + "</function>"


def arguments(*parameters: tuple[str, str]) -> dict:
    [(name, text)] = parse_calls(call(*parameters), SCHEMAS)
    assert name == "f"
    return json.loads(text)


@pytest.mark.parametrize(
    ("key", "raw", "expected"),
    [
        ("s", "007", "007"),
        ("s", "true", "true"),
        ("s", "  two\n\n lines ", "  two\n\n lines "),
        ("s", "", ""),
        ("s", '<b attr="1">&amp;</b>', '<b attr="1">&amp;</b>'),
        ("s", "holds </parameter> inside", "holds </parameter> inside"),
        ("s", "holds </function>\n</tool_call> inside", "holds </function>\n</tool_call> inside"),
        ("i", "3", 3),
        ("i", " 3 ", 3),
        ("i", "3.0", 3),
        ("i", "007", "007"),
        ("i", "three", "three"),
        ("i", "9" * 5000, "9" * 5000),
        ("n", "2.50", 2.5),
        ("n", "NaN", "NaN"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "yes", "yes"),
        ("o", '{"lat": 51.5}', {"lat": 51.5}),
        ("o", "{broken", "{broken"),
        ("a", "[1,\n 2]", [1, 2]),
        ("a", "[" * 100_000, "[" * 100_000),
        ("maybe", "null", None),
        ("maybe", "4", 4),
        ("any", '{"x": 1}', {"x": 1}),
        ("any", "[1]", [1]),
        ("enum", "1", "1"),
        ("number_enum", "1", 1),
        ("loop", "1", "1"),
        ("free", "1", "1"),
        ("unlisted", "1", "1"),
    ],
)
def test_value_takes_its_type_from_the_schema(key, raw, expected):
    """A string stays as it was written; the other types are JSON; what its type does not explain is a string."""
    assert arguments((key, raw)) == {key: expected}


def test_value_that_is_json_keeps_its_spelling():
    """A number or object is not read and written again: its digits, spaces and repeated keys stay."""
    [(_, text)] = parse_calls(call(("n", "1.500"), ("o", '{"x" : 1e400, "x": 2}')), SCHEMAS)
    assert text == '{"n": 1.500, "o": {"x" : 1e400, "x": 2}}'


def test_value_with_an_escaped_surrogate_can_be_sent():
    """JSON may escape a lone surrogate; the arguments must still go through UTF-8."""
    [(_, text)] = parse_calls('{"name": "f", "arguments": {"s": "\\ud800"}}', SCHEMAS)
    assert text.encode() == b'{"s": "\\ud800"}'


@pytest.mark.parametrize(
    "body",
    [
        "<function=f>\n<parameter=s>\nx\n<parameter=i>\n3\n</parameter>\n</function>",  # </parameter> left out
        "<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=i>\n3\n</function>",
        "<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=i>\n3\n</parameter>\n",  # </function> left out
        "<function=f><parameter=s>x</parameter><parameter=i>3</parameter></function>",
        '<function=f>\n{"s": "x", "i": 3}\n</function>',
        '<function="f">\n<parameter=s>\nx\n</parameter>\n<parameter=i>\n3\n</parameter>\n</function>',
        '{"name": "f", "arguments": {"s": "x", "i": 3}}',
        '{"name": "f", "arguments": "{\\"s\\": \\"x\\", \\"i\\": 3}"}',
        '[{"name": "f", "parameters": {"s": "x", "i": 3}}]',
    ],
)
def test_drifted_call_that_is_unmistakable_is_repaired(body):
    """A closing tag left out, or JSON instead of the XML, is still the call that was meant."""
    [(name, text)] = parse_calls(body, SCHEMAS)
    assert (name, json.loads(text)) == ("f", {"s": "x", "i": 3})


@pytest.mark.parametrize(
    "body",
    [
        "",
        "words",
        "<function=f>\nwords\n</function>",
        "<function=f>\n</function> words",
        "<function=>\n</function>",
        '{"function=f", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"n": 1e999}}',
        "[1]",
    ],
)
def test_what_is_no_call_is_none(body):
    """Anything that cannot be read as a call is left to be text."""
    assert parse_calls(body, SCHEMAS) is None


def test_block_may_hold_several_functions():
    """Two functions in one block are two calls."""
    calls = parse_calls(call(("s", "x")) + "\n" + call(("i", "2")), SCHEMAS)
    assert calls == [("f", '{"s": "x"}'), ("f", '{"i": 2}')]


def test_tool_schemas_of_odd_tools_are_empty():
    """A tool without usable parameters offers its name; one without a name offers nothing."""
    tools = [{"function": {"name": "a"}}, {"name": "b", "parameters": [1]}, {"function": {"name": 5}}, {"function": 3}]
    assert tool_schemas(tools) == {"a": {}, "b": {}}


@settings(max_examples=200, deadline=None)
@given(st.text("{}[]\",:<>=/ \nafunctio parameter12tool_c", max_size=80), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "properties", "anyOf", "$ref", "enum", "s", "const"]), inner, max_size=3),
    max_leaves=8,
))  # fmt: skip
def test_parsing_never_raises_whatever_text_and_schema(text, schema):
    """Text of a model and schemas of a client may be anything: the result is calls or None, the arguments JSON."""
    schemas = tool_schemas([{"function": {"name": "f", "parameters": schema}}])
    for body in (text, f"<function=f>\n<parameter=s>\n{text}\n</parameter>\n</function>", f"<function=f>{text}"):
        for _, arguments_text in parse_calls(body, schemas) or ():
            assert isinstance(json.loads(arguments_text), dict)
