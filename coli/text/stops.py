"""Stop strings, wherever the borders between pieces fall.

Owns only the withheld tail: text that may yet turn out to be the start of a stop string.  Invariant: what comes out
does not depend on how the text was cut into pieces.  For that the stop string that is *complete first* wins, and
among those the longest; the one that merely begins first may not be known yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coli.config import shown
from coli.errors import RequestError


def partial_suffix_length(text: str, tags: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is a beginning, but not the whole, of one of ``tags``."""
    longest = 0
    for tag in tags:
        for length in range(min(len(text), len(tag) - 1), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


def check_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """``stop`` as a tuple of strings; RequestError where it is something else or holds an empty one."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(item, str) for item in stops):
        raise RequestError(f"stop is {shown(stop)}; a string or a list of strings was expected", param="stop")
    if "" in stops:
        raise RequestError(
            "stop holds an empty string, which would end every answer at once; leave it out", param="stop"
        )
    for item in stops:
        if any("\ud800" <= char <= "\udfff" for char in item):
            raise RequestError(f"stop holds {shown(item)}, whose lone surrogate no text contains", param="stop")
    return tuple(stops)


class StopStrings:
    """Cuts a stream of text at the first stop string.

    hit : the stop string that was found, None until then; afterwards `feed` and `finish` return nothing.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = check_stops(stops)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain not to belong to a stop string."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        kept = len(text) - partial_suffix_length(text, self._stops)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """The withheld tail: the text ended, so it was no stop string."""
        held, self._held = self._held, ""
        return held
