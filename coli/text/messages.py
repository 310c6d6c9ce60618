"""A conversation as clients send it, checked and brought into the one form that chat templates read.

What is normalised, and why: templates of this family raise on a system message that is not first, so every system and
developer message is merged into one at the front, in order, a blank line between; content given as a list of text
parts is joined; a tool call's arguments, a JSON string on the wire, become the mapping that templates iterate.
Everything else in a message is passed on untouched.  What cannot be rendered is a RequestError that names the message
and field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coli.config import shown
from coli.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies of ``messages``, the merged system message first; the originals are not changed."""
    if not isinstance(messages, (list, tuple)):
        raise RequestError(f"messages is {_kind(messages)}; a list of messages was expected", param="messages")
    if not messages:
        raise RequestError("messages is empty; at least one message is needed", param="messages")
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    first_system: dict[str, Any] | None = None
    for i, message in enumerate(messages):
        turn = _message(message, f"messages[{i}]")
        if turn["role"] == "system":
            system.append(turn["content"])
            first_system = first_system or turn
        else:
            turns.append(turn)
    if first_system is not None:
        first_system["content"] = "\n\n".join(system)
        turns.insert(0, first_system)
    return turns


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """``tools`` if each is an object that names a function; None for None or an empty list."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools is {_kind(tools)}; a list of tools was expected", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"tools[{i}] names no function", param=f"tools[{i}].function.name")
    return list(tools) or None


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {_kind(message)}; an object with role and content was expected", param=where)
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise RequestError(f"{where}.role is {shown(role)}; one of {known} was expected", param=f"{where}.role")
    turn = dict(message)
    turn["role"] = "system" if role == "developer" else role
    turn["content"] = _content(message.get("content"), role, where)
    if message.get("tool_calls") is not None:
        turn["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    if message.get("reasoning_content") is not None:
        _check_text(message["reasoning_content"], f"{where}.reasoning_content", "text")
    return turn


def _content(content: Any, role: str, where: str) -> str:
    where = f"{where}.content"
    if content is None and role == "assistant":  # a turn that only calls tools has no text
        return ""
    if not isinstance(content, (list, tuple)):
        return _check_text(content, where, "text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            found = _kind(part) if kind is None else f"of type {shown(kind)}"
            raise RequestError(f"{where}[{i}] is {found}; this model reads text parts only", param=f"{where}[{i}].type")
        texts.append(_check_text(part.get("text"), f"{where}[{i}].text", "text"))
    return "".join(texts)


def _check_text(value: Any, where: str, expected: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} is {_kind(value)}; {expected} was expected", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is not valid Unicode: a lone surrogate at character {error.start}", param=where
        ) from None
    return value


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{where} is {_kind(calls)}; a list of calls was expected", param=where)
    made = []
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}] names no function", param=f"{where}[{i}].function.name")
        arguments = _arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        function = {**function, "arguments": arguments}
        made.append({**call, "function": function} if "function" in call else function)
    return made


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON ({error})", param=where) from None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where} is {_kind(arguments)}; a JSON object was expected", param=where)
    return arguments


def _kind(value: Any) -> str:
    if value is None:
        return "missing"
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
