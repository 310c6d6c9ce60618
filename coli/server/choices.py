"""One choice of an answer: events in, what the API shows of them out.

The same object serves the stream and the whole: a stream sends each `take`'s parts, the whole is what was collected, so
the two cannot differ.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from coli.engine.sampler import Sample
from coli.server.prepare import Prepared
from coli.server.scheduler import Event
from coli.text.channels import ChannelParser, Delta
from coli.text.toolstream import OPEN

if TYPE_CHECKING:
    from coli.text.tokenizer import Tokenizer
    from coli.text.tools import ToolCall

_FUNCTION = "<function="
_BARE_CALL = re.compile(rf"(?:<[A-Za-z_][\w.-]*>\s*)?{_FUNCTION}")
_TELLING = len("<tool")  # characters of an opening tag that are taken for one


class ChatChoice:
    """A choice of the chat endpoint.

    tokens : sampled so far.   finish_reason : None until it is over.
    """

    def __init__(self, index: int, prepared: Prepared, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.index = index
        self.tokens = 0
        self.finish_reason: str | None = None
        self._parser = ChannelParser(thinking=prepared.thinking, tools=prepared.tools)
        self._has_tools = bool(prepared.tools)
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[ToolCall] = []
        self._one_call = prepared.one_call
        self._names = TokenNames(tokenizer)
        self._stop_ids = prepared.stop_ids
        self._wants_logprobs = logprobs
        self._logprobs: list[dict[str, Any]] = []
        self._sent_logprobs = 0

    def take(self, event: Event) -> list[dict[str, Any]]:
        """The ``delta`` objects that an event makes; none once the choice is over."""
        if self.finish_reason is not None:
            return []
        deltas: list[Delta] = []
        if event.token is not None:
            self.tokens += 1
            sample = event.token.sample
            if self._wants_logprobs and sample.id not in self._stop_ids:
                self._logprobs.append(self._names.chat_logprob(sample))
            deltas += self._parser.feed(event.token.text)
        if event.finish_reason is not None:
            rest = self._parser.finish()
            deltas += _without_cut_call(rest) if self._has_tools and event.finish_reason == "length" else rest
            self.finish_reason = self._parser.finish_reason(event.finish_reason)
        if self._one_call and self._parser.tool_calls:
            first = next(i for i, delta in enumerate(deltas) if delta.call is not None)
            deltas = deltas[: first + 1]
            self.finish_reason = "tool_calls"
        for delta in deltas:
            if delta.call is not None:
                self._calls.append(delta.call)
            else:
                self._texts[delta.channel].append(delta.text)
        return _merged(deltas)

    def new_logprobs(self) -> dict[str, Any] | None:
        """Those that no earlier call returned."""
        if not self._wants_logprobs:
            return None
        new, self._sent_logprobs = self._logprobs[self._sent_logprobs :], len(self._logprobs)
        return {"content": new, "refusal": None}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        content, reasoning = ("".join(self._texts[channel]) for channel in ("content", "reasoning"))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in self._calls]
        return {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._wants_logprobs else None,
            "finish_reason": self.finish_reason,
        }


def _without_cut_call(rest: list[Delta]) -> list[Delta]:
    """What the parser still held when the limit came, without the text of a call that lacks its end.

    Half a call can be of no use, and its markup is no text.  Calls that only lack their last tag are calls.
    """
    text = "".join(delta.text for delta in rest if delta.channel == "content").strip()
    return [delta for delta in rest if delta.channel != "content"] if _is_half_call(text) else rest


def _is_half_call(text: str) -> bool:
    """Whether text from an opening tag on, or a part of that tag, can only have been on its way to a call."""
    if len(text) >= _TELLING and (OPEN.startswith(text) or _FUNCTION.startswith(text)):
        return True
    if text.startswith(OPEN):  # which may be spoken of, too
        body = text[len(OPEN) :].lstrip()
        return _FUNCTION.startswith(body) or body.startswith((_FUNCTION, "{"))
    return _BARE_CALL.match(text) is not None


def _merged(deltas: list[Delta]) -> list[dict[str, Any]]:
    """API deltas: text of one channel joined; a call as its head, then its arguments, as clients put them together."""
    made: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.call is not None:
            head = _call(delta.call)
            arguments = head["function"].pop("arguments")
            place = {"index": delta.call.index}
            made.append({"tool_calls": [{**place, **head, "function": {**head["function"], "arguments": ""}}]})
            made.append({"tool_calls": [{**place, "function": {"arguments": arguments}}]})
            continue
        key = "reasoning_content" if delta.channel == "reasoning" else "content"
        if made and key in made[-1]:
            made[-1][key] += delta.text
        else:
            made.append({key: delta.text})
    return made


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class TextChoice:
    """A choice of the completion endpoint.   echo : the prompt's text, put before the answer's; empty for none."""

    def __init__(
        self, index: int, prepared: Prepared, tokenizer: Tokenizer | None, *, logprobs: bool, echo: str = ""
    ) -> None:
        self.index = index
        self.tokens = 0
        self.finish_reason: str | None = None
        self._prepared = prepared
        self._names = TokenNames(tokenizer)
        self._wants_logprobs = logprobs
        self._echo = echo
        self._texts: list[str] = []
        self._fresh = _TextLogprobs()  # not yet returned by `new_logprobs`
        self._all = _TextLogprobs()
        self._offset = 0

    def take(self, event: Event) -> str:
        """The text that an event adds."""
        if self.finish_reason is not None:
            return ""
        text, self._echo = self._echo, ""
        if event.scores is not None and self._wants_logprobs:
            self._note(Sample(int(self._prepared.prompt[0])))
            for sample in event.scores:
                self._note(sample)
        if event.token is not None:
            self.tokens += 1
            if self._wants_logprobs:  # of the id that ended it too, as this endpoint always did
                self._note(event.token.sample)
            text += event.token.text
        self.finish_reason = event.finish_reason
        self._texts.append(text)
        return text

    def _note(self, sample: Sample) -> None:
        name = self._names.text(sample.id)
        for target in (self._fresh, self._all):
            target.add(name, sample, self._top(name, sample), self._offset)
        self._offset += len(name)

    def _top(self, name: str, sample: Sample) -> dict[str, float]:
        """The best ids and the one that stands there; of tokens that look alike the most probable."""
        top = {self._names.text(token_id): logprob for token_id, logprob in reversed(sample.top)}
        if sample.logprob is not None:
            top.setdefault(name, sample.logprob)
        return top

    def new_logprobs(self) -> dict[str, Any] | None:
        """Those that no earlier call returned."""
        if not self._wants_logprobs:
            return None
        fresh, self._fresh = self._fresh, _TextLogprobs()
        return fresh.to_dict()

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        return {
            "index": self.index,
            "text": "".join(self._texts),
            "logprobs": self._all.to_dict() if self._wants_logprobs else None,
            "finish_reason": self.finish_reason,
        }


class _TextLogprobs:
    """The four lists of the completion endpoint."""

    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, name: str, sample: Sample, top: dict[str, float], offset: int) -> None:
        self._tokens.append(name)
        self._logprobs.append(sample.logprob)
        self._top.append(top if sample.logprob is not None else None)
        self._offsets.append(offset)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


class TokenNames:
    """Tokens as the API writes them: text, with U+FFFD for a part of a character, and the exact bytes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return str(token_id)
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def chat_logprob(self, sample: Sample) -> dict[str, Any]:
        return {
            **self._entry(sample.id, sample.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in sample.top],
        }

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        exact = self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else b""
        return {"token": self.text(token_id), "logprob": logprob, "bytes": list(exact)}
