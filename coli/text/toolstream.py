"""Finds the tool calls in a stream of text.

A block opens with ``<tool_call>``, or, as models drift, with ``<function=NAME>`` of an offered tool at the start of a
line, bare or inside a tag of the model's own invention.  Its text is withheld until its end is certain; then it is
calls, or it is text: its opening tag is released and the search goes on right behind it.  `coli.text.tools` judges
what a block says.  Invariant: what comes out does not depend on how the text was cut into pieces, and no character of
what is not a call is lost, except white space beside a call.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from coli.text.tools import FUNCTION_END, FUNCTION_TAG, ToolCall, ends_in_value, parse_calls, tool_schemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = "<function="
_TAG_NAME = re.compile(r"<([A-Za-z_][\w.-]*)")
_TAG_LIMIT = 140  # characters of one tag, or of white space between two, beyond which they open no block


def new_call_id() -> str:
    """An id for a tool call, unique for every practical purpose."""
    return f"call_{secrets.token_hex(12)}"


class _End(NamedTuple):
    body: int  # where the calls end
    block: int  # where the text goes on


@dataclass
class _Block:
    """An open block.  Offsets count from its first character.

    opener : length of what is released as text if the block is no call.   body : where its calls begin.
    close : the tag that ends it.   bare : no tag stands around the function; ``close`` may follow or not.
    """

    opener: int
    body: int
    close: str = CLOSE
    bare: bool = False
    scanned: int = 0

    def find_end(self, text: str) -> _End | None:
        """Where the block ends, once that is certain.  A closing tag inside a value is a part of the value."""
        tag = FUNCTION_END if self.bare else self.close
        while True:
            at = text.find(tag, max(self.scanned, self.body))
            if at < 0:
                self.scanned = max(self.scanned, len(text) - len(tag) + 1)
                return None
            if not ends_in_value(text[self.body : at]):
                break
            self.scanned = at + len(tag)
        end = at + len(tag)
        if not self.bare:
            return _End(at, end)
        follows = text[end:].lstrip()
        gap = len(text) - end - len(follows)
        if gap <= _TAG_LIMIT and follows.startswith(self.close):
            return _End(end, end + gap + len(self.close))
        if gap <= _TAG_LIMIT and self.close.startswith(follows):
            self.scanned = at
            return None
        return _End(end, end)

    def settle_end(self, text: str) -> _End | None:
        """Where the block ends if no text follows: it may lack its last tag, or its last value may lack its own."""
        if text.rstrip().endswith(FUNCTION_END):
            return _End(len(text), len(text))
        if self.bare:
            at = text.find(FUNCTION_END, self.body)
            return None if at < 0 else _End(at + len(FUNCTION_END), at + len(FUNCTION_END))
        at = text.find(self.close, self.body)
        return None if at < 0 else _End(at, at + len(self.close))


def _opening(text: str, at_line_start: bool, schemas: Mapping[str, Any]) -> _Block | None | Literal["unclear"]:
    """The block that opens at the first character of ``text``, which is ``<``; None if none does."""
    if text.startswith(OPEN):
        return _Block(len(OPEN), len(OPEN))
    if OPEN.startswith(text):
        return "unclear"
    if not at_line_start:
        return None
    inner, close = 0, ""
    if not text.startswith(_FUNCTION[: len(text)]):  # some other tag: a wrapper, if a function follows it
        name = _TAG_NAME.match(text)
        if name is None or name.end() > _TAG_LIMIT:
            return None
        if name.end() == len(text):
            return "unclear"
        if text[name.end()] != ">":
            return None
        inner, close = len(text) - len(text[name.end() + 1 :].lstrip()), f"</{name[1]}>"
        if inner - name.end() > _TAG_LIMIT:
            return None
    function = text[inner:]
    tag = FUNCTION_TAG.match(function)
    if tag is not None:
        if tag[1].strip().strip("\"'") not in schemas:
            return None
        return _Block(inner, inner, close) if close else _Block(len(_FUNCTION), 0, bare=True)
    if _FUNCTION.startswith(function) or (function.startswith(_FUNCTION) and FUNCTION_TAG.match(function + ">")):
        return "unclear"
    return None


class ToolCallParser:
    """Separates tool calls from a stream of text.

    tools : the tools offered, in the form of the chat API.  With none, text passes through untouched.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None = None, *, call_id: Callable[[], str] = new_call_id
    ) -> None:
        self._schemas = tool_schemas(tools or ())
        self._call_id = call_id
        self._calls = 0
        self._held = ""  # text whose meaning is open; it starts with the block where one is open
        self._block: _Block | None = None
        self._space = ""  # the white space behind the last text or call: it comes out only if text follows
        self._has_text = False
        self._fresh = True  # nothing, or a call, stands before the white space

    def feed(self, text: str) -> list[str | ToolCall]:
        """What ``text`` makes certain, in order: pieces of text and whole calls."""
        if not self._schemas:
            return [text] if text else []
        out: list[str | ToolCall] = []
        self._held += text
        self._run(out, final=False)
        return out

    def finish(self) -> list[str | ToolCall]:
        """The rest, now that nothing follows: calls that only lack their end, and the withheld text."""
        out: list[str | ToolCall] = []
        self._run(out, final=True)
        if self._space and not (self._fresh and self._calls):
            out.append(self._space)
        self._space = ""
        return out

    def _run(self, out: list[str | ToolCall], *, final: bool) -> None:
        """Go through the withheld text, block by block, as far as it is certain."""
        while True:
            if self._block is None:
                self._block = self._find_block(out, final=final)
                if self._block is None:
                    return
            end = self._block.find_end(self._held)
            if end is None and final:
                end = self._block.settle_end(self._held)
            elif end is None:
                return
            block, self._block = self._block, None
            calls = None if end is None else parse_calls(self._held[block.body : end.body], self._schemas)
            if end is None or calls is None:
                self._text(self._held[: block.opener], out)
                self._held = self._held[block.opener :]
                continue
            for name, arguments in calls:
                out.append(ToolCall(self._calls, self._call_id(), name, arguments))
                self._calls += 1
            self._space, self._fresh = "", True
            self._held = self._held[end.block :]

    def _find_block(self, out: list[str | ToolCall], *, final: bool) -> _Block | None:
        """Release the text before the next block and return it; None where there is none, or not certainly one."""
        at = self._held.find("<")
        while at >= 0:
            block = _opening(self._held[at:], self._is_line_start(at), self._schemas)
            if block is not None and not (final and block == "unclear"):
                self._text(self._held[:at], out)
                self._held = self._held[at:]
                return None if block == "unclear" else block
            at = self._held.find("<", at + 1)
        self._text(self._held, out)
        self._held = ""
        return None

    def _is_line_start(self, at: int) -> bool:
        before = (self._space + self._held[:at]).rstrip(" \t")
        return before.endswith("\n") if before else self._fresh

    def _text(self, text: str, out: list[str | ToolCall]) -> None:
        """Release text up to its last character that is not white space."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            # behind a call that opened the answer there is nothing to be set apart from
            out.append(kept if self._has_text or not self._calls else kept.lstrip())
            self._has_text, self._fresh = True, False
