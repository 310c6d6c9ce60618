"""Answers that must have a form: a JSON value, one of a schema, a call of a tool.  llguidance does the work.

A grammar is text of llguidance's; a `Grammars` compiles it against the model's tokenizer; a `Constraint` walks along
one answer.  Where the prompt leaves the model inside a thought, the grammar begins behind its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy as np

from coli.errors import ModelError, RequestError
from coli.text.thinking import CLOSE as THINK_END
from coli.text.tokenizer import Tokenizer
from coli.text.tools import tool_schemas

# White space is fixed: where any amount of it is allowed, a small model can go on with it until the tokens are used up.
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Grammars for one tokenizer.   stop_ids : the ids that may end an answer where the grammar allows an end."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        if not stop_ids:
            raise ModelError("no stop id is known for this model, so an answer with a form would have no end")
        self._tokenizer = tokenizer
        ends = sorted(stop_ids)

        class Wrapped(SimpleNamespace):
            def __call__(self, text: bytes | str) -> list[int]:
                text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
                return tokenizer.encode(
                    text, special=True
                )  # forced text is what the model writes: </tool_call> is one id

        wrapped = Wrapped(
            eos_token_id=ends[0],
            bos_token_id=None,
            tokens=[tokenizer.token_bytes(i) for i in range(tokenizer.size)],
            special_token_ids=sorted(tokenizer.special_ids),
        )
        self._ll = llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapped), eos_token=ends)

    def constraint(self, grammar: str, *, thinking: bool, param: str) -> Constraint:
        """The start of an answer within ``grammar``.

        thinking : whether a thought is open, so that the grammar begins behind it.
        Raises RequestError, naming ``param``, where the grammar does not compile.
        """
        matcher = llguidance.LLMatcher(self._ll, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{param}: {_first_line(matcher.get_error())}", param=param)
        return Constraint(matcher, self._tokenizer if thinking else None)


class Constraint:
    """One answer's way through a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, thinking_in: Tokenizer | None) -> None:
        """``thinking_in`` : the tokenizer, where the answer begins inside a thought; None where it does not."""
        self._matcher = matcher
        self._thinking_in = thinking_in
        self._thought = b""

    def copy(self) -> Constraint:
        """The same place of the grammar for another answer."""
        return Constraint(self._matcher.deep_copy(), self._thinking_in)

    def allowed(self, size: int) -> np.ndarray | None:
        """bool (size,): ids that may come next; None for all of them."""
        if self._thinking_in is not None:
            return None
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ModelError(f"the answer's form cannot be followed: {_first_line(self._matcher.get_error())}")
        mask = np.unpackbits(packed, bitorder="little", count=min(size, 8 * len(packed))).astype(bool)
        return np.pad(mask, (0, size - len(mask)))

    def take(self, token_id: int) -> None:
        """The answer goes on with ``token_id``."""
        if self._thinking_in is None:
            self._matcher.consume_token(token_id)
            return
        end = THINK_END.encode()
        self._thought = (self._thought + self._thinking_in.token_bytes(token_id))[-64:]
        if end in self._thought:
            self._thinking_in = None


def json_grammar(response_format: Mapping[str, Any]) -> str | None:
    """The grammar of a request's ``response_format``; None for plain text.  RequestError names what is wrong."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _of_schema({"type": "object"}, "response_format")
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {kind!r}; text, json_object or json_schema was expected",
            param="response_format.type",
        )
    holder = response_format.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            "response_format.json_schema.schema is missing; a JSON schema was expected",
            param="response_format.json_schema.schema",
        )
    return _of_schema(schema, "response_format.json_schema.schema")


def tool_grammar(tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """A grammar of calls of some of ``tools``, in the form that models of this family write.

    several : whether more than one call may come.  Parameters come in the order of the schema, required ones always.
    Text between a parameter's tags is free for strings and JSON of its schema for everything else.
    """
    rules, calls = [], []
    for i, (name, schema) in enumerate(tool_schemas(tools).items()):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        parameters = []
        for j, (key, value) in enumerate(properties.items()):
            rule = f"p{i}_{j}"
            rules.append(f"{rule}: {_text(f'<parameter={key}>' + chr(10))} {_value(value, schema, rule, rules)}")
            parameters.append(rule if key in required else f"{rule}?")
        rules.append(f"call{i}: {_text(f'<function={name}>' + chr(10))} {' '.join(parameters)} {_text('</function>')}")
        calls.append(f"call{i}")
    if not calls:
        raise RequestError("tool_choice asks for a call, but no tool is offered", param="tool_choice")
    body = f"{_text('<tool_call>' + chr(10))} ({' | '.join(calls)}) {_text(chr(10) + '</tool_call>')}"
    rules.append(f"block: {body}")
    rules.append(r"start: /\n*/ block" + (r" (/\n*/ block)*" if several else ""))
    return llguidance.LLMatcher.grammar_from_lark("\n".join(reversed(rules)))


def _value(schema: Any, root: Mapping[str, Any], rule: str, rules: list[str]) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in ("integer", "number", "boolean", "object", "array"):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"%json {json.dumps({**schema, **definitions})} {_text(chr(10) + '</parameter>' + chr(10))}"
    rules.append(f"{rule}_text[suffix={_text(chr(10) + '</parameter>' + chr(10))}]: /(.|\\n)*/")
    return f"{rule}_text"


def _text(text: str) -> str:
    return json.dumps(text)


def _of_schema(schema: Mapping[str, Any], param: str) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPACT)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param}: {_first_line(str(error))}", param=param) from None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "not usable")
