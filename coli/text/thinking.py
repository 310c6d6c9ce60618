"""Where the thought ends and the answer begins.

The tags ``<think>`` and ``</think>`` separate the two and belong to neither.  The opening tag often stands at the end
of the prompt, so the output holds only the closing one; hence a splitter is told how the prompt ended.  Newlines
beside a tag belong to the tag (templates write them), everything else is kept.  Invariant: the result does not depend
on how the text was cut into pieces.
"""

from __future__ import annotations

from typing import Literal

from coli.text.stops import partial_suffix_length

OPEN, CLOSE = "<think>", "</think>"

Thinking = Literal["open", "closed", "unset"]
Channel = Literal["reasoning", "content"]


def thinking_of_prompt(prompt: str) -> Thinking:
    """How a prompt leaves the output: inside a thought, after an (empty) one, or free to open one itself."""
    tail = prompt.rstrip()
    if tail.endswith(OPEN):
        return "open"
    return "closed" if tail.endswith(CLOSE) else "unset"


class ThinkingSplitter:
    """Splits a stream of text into reasoning and content.

    thinking : `thinking_of_prompt` of the prompt.  "unset" lets the output open a thought, at its very start only.
    """

    def __init__(self, thinking: Thinking = "unset") -> None:
        # start -> [lead-in ->] reasoning -> gap -> content; lead-in and gap swallow the newlines beside a tag
        self._state = {"open": "lead-in", "closed": "content", "unset": "start"}[thinking]
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        return self._state in ("lead-in", "reasoning")

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        """What ``text`` adds to each channel, in order; no empty pieces."""
        out: list[tuple[Channel, str]] = []
        text, self._held = self._held + text, ""
        if self._state == "start":
            text = self._start(text)
        if self._state == "lead-in":
            text = text.lstrip("\n")
            if text:
                self._state = "reasoning"
        if self._state == "reasoning":
            text = self._reasoning(text, out)
        if self._state == "gap":
            text = text.lstrip("\n")
            if text:
                self._state = "content"
        if self._state == "content" and text:
            out.append(("content", text))
        return out

    def finish(self) -> list[tuple[Channel, str]]:
        """What was withheld, now that nothing follows."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [("reasoning" if self.in_reasoning else "content", held)]

    def _start(self, text: str) -> str:
        opening = text.lstrip()
        if opening.startswith(OPEN):
            self._state = "lead-in"
            return opening[len(OPEN) :]
        if OPEN.startswith(opening):  # also while only white space has come
            self._held = text
            return ""
        self._state = "content"
        return text

    def _reasoning(self, text: str, out: list[tuple[Channel, str]]) -> str:
        end = text.find(CLOSE)
        if end >= 0:
            thought, rest = text[:end].rstrip("\n"), text[end + len(CLOSE) :]
            self._state = "gap"
        else:
            thought = text[: len(text) - partial_suffix_length(text, (CLOSE,))].rstrip("\n")
            rest, self._held = "", text[len(thought) :]
        if thought:
            out.append(("reasoning", thought))
        return rest
