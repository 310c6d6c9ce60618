"""What a tool call says: function, arguments, and their types by the tool's schema.

The form is ``<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n...</function>``.  A value is raw text, kept
to the character: a string unquoted, anything else JSON.  Models drift from the form; what is still unmistakable is
repaired (a closing tag left out, JSON in place of the parameters or of the whole), anything else is None and stays
the text it is.  Pure functions of text and schema; nothing here raises on what a model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FUNCTION_END = "</function>"
FUNCTION_TAG = re.compile(r"<function=([^<>\n]{1,128})>")
_PARAMETER_TAG = re.compile(r"\s*<parameter=([^<>\n]{1,128})>")
# A closing tag closes only where the syntax can go on behind it: a value may hold the same characters.
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))")
_NEXT_PARAMETER = re.compile(r"\n<parameter=([^<>\n]{1,128})>")
_SCHEMA_DEPTH = 8  # of references and alternatives inside each other; a schema may refer to itself
_NOT_JSON = object()


@dataclass(frozen=True)
class ToolCall:
    """One call: its place in the answer, an id, the function's name, the arguments as a JSON object's text."""

    index: int
    id: str
    name: str
    arguments: str


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Function name -> JSON schema of its arguments, from the chat API's list of tools."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def ends_in_value(text: str) -> bool:
    """Whether ``text``, from a function's tag on, stops inside a parameter's value."""
    at = 0
    while (tag := text.find("<parameter=", at)) >= 0:
        end = _PARAMETER_END.search(text, tag)
        if end is None:  # then a function's end right here means that only </parameter> was left out
            return not text.rstrip().endswith(FUNCTION_END)
        at = end.end()
    return False


def parse_calls(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]] | None:
    """The (name, arguments) of each call in what stood between ``<tool_call>`` and its end; None if it is no call."""
    body = body.strip()
    if body.startswith(("{", "[")):
        return _json_calls(body)
    calls = []
    while body:
        tag = FUNCTION_TAG.match(body)
        if tag is None:
            return None
        name = tag[1].strip().strip("\"'")
        end, after = _function_end(body, tag.end())
        arguments = _arguments(body[tag.end() : end], schemas.get(name, {}))
        if arguments is None:
            return None
        calls.append((name, arguments))
        body = body[after:].lstrip()
    return calls or None


def _function_end(body: str, start: int) -> tuple[int, int]:
    """Where a function's parameters end and where its closing tag does; the end of the text if it has none."""
    at = start
    while (at := body.find(FUNCTION_END, at)) >= 0:
        after = at + len(FUNCTION_END)
        follows = body[after:].lstrip()
        if not ends_in_value(body[start:at]) or not follows or FUNCTION_TAG.match(follows):
            return at, after
        at = after
    return len(body), len(body)


def _arguments(text: str, schema: Mapping[str, Any]) -> str | None:
    """The arguments as a JSON object's text."""
    stripped = text.strip()
    if stripped.startswith("{"):
        return stripped if isinstance(_load(stripped), dict) else None
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    found: dict[str, str] = {}
    at = 0
    while text[at:].strip():
        tag = _PARAMETER_TAG.match(text, at)
        if tag is None:
            return None
        key = tag[1].strip()
        end = _PARAMETER_END.search(text, tag.end())
        value = text[tag.end() : end.start() if end else len(text)]
        at = end.end() if end else len(text)
        for following in _NEXT_PARAMETER.finditer(value):
            if following[1] in properties and following[1] != key:  # </parameter> was left out before it
                at = tag.end() + following.start()
                value = value[: following.start() + 1]
                break
        found[key] = _value(value.removeprefix("\n").removesuffix("\n"), properties.get(key), schema)
    return "{" + ", ".join(f"{_dump(key)}: {value}" for key, value in found.items()) + "}"


def _value(raw: str, schema: Any, root: Mapping[str, Any]) -> str:
    """One value as JSON text.  What is JSON already keeps its spelling; what its type does not explain is a string."""
    types = set(_types(schema, root, 0))
    if "null" in types and raw.strip() in ("null", "None"):
        return "null"
    if not types or "string" in types:
        return _dump(raw)
    text = raw.strip()
    if "boolean" in types and text in ("True", "False"):
        return text.lower()
    value = _load(text)
    if value is _NOT_JSON:
        return _dump(raw)
    if "integer" in types and "number" not in types and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return text


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The JSON types that a schema allows, through references into ``root`` and alternatives."""
    if not isinstance(schema, Mapping) or depth > _SCHEMA_DEPTH:
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            yield kind
    if schema.get("nullable") is True:
        yield "null"
    if kinds is None:
        values = schema.get("enum")
        for value in values if isinstance(values, list) else [schema["const"]] if "const" in schema else []:
            yield _type_of(value)
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            yield from _types(alternative, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        yield from _types(target, root, depth + 1)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _json_calls(text: str) -> list[tuple[str, str]] | None:
    """Calls written as JSON: ``{"name": ..., "arguments": {...}}``, or a list of such objects."""
    value = _load(text)
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _load(arguments)
        if not isinstance(arguments, dict):
            return None
        try:
            calls.append((item["name"], _dump(arguments)))
        except ValueError:  # a number too large for JSON's usual readers
            return None
    return calls or None


def _load(text: str) -> Any:
    """The JSON value of ``text``, or _NOT_JSON; NaN and Infinity are not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _dump(value: Any) -> str:
    """JSON text in plain characters; escaped where it holds a lone surrogate, which no UTF-8 stream can carry."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text
