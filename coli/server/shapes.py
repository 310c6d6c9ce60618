"""The objects of the two endpoints: what each calls the same things, whole and in a stream."""

from __future__ import annotations

import secrets
import time
from typing import Any

from coli.server.choices import ChatChoice, TextChoice
from coli.server.scheduler import Event

Choice = ChatChoice | TextChoice


class Shape:
    """The frame of an endpoint's objects: one id, model and time for all of a request."""

    path = whole_name = chunk_name = prefix = ""

    def begin(self, model: str) -> None:
        self._frame = {"id": f"{self.prefix}{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": name, "choices": choices}

    def first(self, choice: Choice) -> list[dict[str, Any]]:
        """What a choice's stream begins with."""
        return []

    def parts(self, choice: Choice, events: list[Event]) -> list[dict[str, Any]]:
        """The choice objects of a stream that some events of one choice make; the last holds the finish reason."""
        raise NotImplementedError


class ChatShape(Shape):
    path, whole_name, chunk_name, prefix = (
        "/v1/chat/completions",
        "chat.completion",
        "chat.completion.chunk",
        "chatcmpl-",
    )

    def first(self, choice: Choice) -> list[dict[str, Any]]:
        return [_chat_part(choice, {"role": "assistant", "content": ""})]

    def parts(self, choice: Choice, events: list[Event]) -> list[dict[str, Any]]:
        assert isinstance(choice, ChatChoice)
        deltas: list[dict[str, Any]] = []
        for event in events:
            for delta in choice.take(event):
                key = next(iter(delta))
                if deltas and key != "tool_calls" and key in deltas[-1]:
                    deltas[-1][key] += delta[key]
                else:
                    deltas.append(delta)
        parts = [_chat_part(choice, delta) for delta in deltas]
        if choice.finish_reason is not None:
            parts.append(_chat_part(choice, {}, choice.finish_reason))
        if parts:
            parts[0]["logprobs"] = choice.new_logprobs()
        return parts


def _chat_part(choice: Choice, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class TextShape(Shape):
    path, whole_name, chunk_name, prefix = "/v1/completions", "text_completion", "text_completion", "cmpl-"

    def parts(self, choice: Choice, events: list[Event]) -> list[dict[str, Any]]:
        assert isinstance(choice, TextChoice)
        text = "".join(choice.take(event) for event in events)
        if not text and choice.finish_reason is None:
            return []
        logprobs, reason = choice.new_logprobs(), choice.finish_reason
        return [{"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}]
