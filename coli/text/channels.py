"""Reasoning, content and tool calls of one answer, as separate channels.

Puts the thinking splitter before the tool call parser, collects what came, and says how the answer ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from coli.text.thinking import Thinking, ThinkingSplitter
from coli.text.tools import ToolCall
from coli.text.toolstream import ToolCallParser, new_call_id


class Delta(NamedTuple):
    """One addition to an answer: text of a channel, or one whole tool call."""

    channel: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    call: ToolCall | None = None


class ChannelParser:
    """Splits an answer's text, fed in pieces of any size, into its channels.

    thinking : `thinking_of_prompt` of the prompt.   tools : those offered in the request; none, and none are parsed.
    reasoning, content, tool_calls : what came so far; the first two None while there is nothing.
    """

    def __init__(
        self,
        *,
        thinking: Thinking = "unset",
        tools: Sequence[Mapping[str, Any]] | None = None,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._splitter = ThinkingSplitter(thinking)
        self._parser = ToolCallParser(tools, call_id=call_id)
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self.tool_calls: list[ToolCall] = []

    @property
    def reasoning(self) -> str | None:
        return "".join(self._texts["reasoning"]) or None

    @property
    def content(self) -> str | None:
        return "".join(self._texts["content"]) or None

    def feed(self, text: str) -> list[Delta]:
        """What ``text`` makes certain."""
        return self._channels(self._splitter.feed(text))

    def finish(self) -> list[Delta]:
        """The rest, once no text follows."""
        deltas = self._channels(self._splitter.finish())
        return deltas + self._deltas(self._parser.finish())

    def finish_reason(self, reason: str) -> str:
        """The answer's reason from the generation's: a stop after tool calls is ``"tool_calls"``."""
        return "tool_calls" if reason == "stop" and self.tool_calls else reason

    def _channels(self, parts: list[tuple[Literal["reasoning", "content"], str]]) -> list[Delta]:
        deltas: list[Delta] = []
        for channel, text in parts:
            if channel == "reasoning":
                self._texts["reasoning"].append(text)
                deltas.append(Delta("reasoning", text))
            else:
                deltas.extend(self._deltas(self._parser.feed(text)))
        return deltas

    def _deltas(self, parts: list[str | ToolCall]) -> list[Delta]:
        deltas = []
        for part in parts:
            if isinstance(part, ToolCall):
                self.tool_calls.append(part)
                deltas.append(Delta("tool_call", call=part))
            else:
                self._texts["content"].append(part)
                deltas.append(Delta("content", part))
        return deltas
