"""Which of a layer's missing experts a device computes in passing, from bytes that are sent to it and forgotten again.

A large prompt asks for nearly all experts of a layer.  Where they lie in the host's memory the CPU would compute them
all, and the card would wait.  So part of them goes to the card, those with the most rows first, which cost the CPU most
and the bus the same, until both sides end together.  What each side takes is measured as it happens.  Who computes an
expert never changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

START_US = 300.0  # of a layer's stream before its first byte moves: lists, and threads that wake up

_LEAST_US = 1.0
_MEMORY = 8  # layers that a figure remembers
_WILD = 4.0  # a layer that took so many times what was expected, or less than its inverse, was held up by something
_WILD_FIRST = 64.0  # the same for the first one, which nothing is known against
_PATIENCE = 128  # layers without one side, until what is known of it is forgotten: three prompts of 512 tokens


@dataclass(frozen=True)
class StreamSpeeds:
    """What the two sides take for experts.

    stream_gb_s : from the container's bytes to the card, in GB/s (10**9).   card_expert_us : the card, for an expert
    that is there; it computes one while the next is on its way.
    cpu_gb_s, cpu_row_us : the CPU reads an expert once for all of its rows, and computes each of them.
    """

    stream_gb_s: float
    cpu_gb_s: float
    cpu_row_us: float
    card_expert_us: float

    def cpu_us(self, expert_bytes: int, n: int, rows: int) -> float:
        """The CPU, for n experts of so many rows in all."""
        return n * expert_bytes / (self.cpu_gb_s * 1e3) + rows * self.cpu_row_us

    def stream_us(self, expert_bytes: int, n: int) -> float:
        """The stream, for n experts."""
        if not n:
            return 0.0
        copy_us = expert_bytes / (self.stream_gb_s * 1e3)
        slower, faster = max(copy_us, self.card_expert_us), min(copy_us, self.card_expert_us)
        return START_US + n * slower + faster


FIRST = StreamSpeeds(stream_gb_s=8.0, cpu_gb_s=30.0, cpu_row_us=4.0, card_expert_us=15.0)
"""Before anything was measured: a stream that is rather slow, so that the first share is a small one."""


def choose(rows: Sequence[int], expert_bytes: int, speeds: StreamSpeeds) -> list[int]:
    """Which experts are streamed: indexes into ``rows``, those with the most rows first; none where it does not pay.

    rows : of each missing expert, at least 1.   expert_bytes : of one.
    """
    cpu_us = longest = speeds.cpu_us(expert_bytes, len(rows), sum(rows))
    if speeds.stream_us(expert_bytes, 1) >= longest:
        return []
    read_us, row_us = speeds.cpu_us(expert_bytes, 1, 0), speeds.cpu_row_us
    step_us = speeds.stream_us(expert_bytes, 2) - speeds.stream_us(expert_bytes, 1)
    stream_us = speeds.stream_us(expert_bytes, 1) - step_us
    order = sorted(range(len(rows)), key=rows.__getitem__, reverse=True)
    for n, at in enumerate(order):
        cpu_us -= read_us + rows[at] * row_us
        stream_us += step_us
        now = max(cpu_us, stream_us)
        if now >= longest:
            return order[:n]
        longest = now
    return order


class StreamFigures:
    """The speeds of one device's streams and of the CPU beside them, from what layers took."""

    def __init__(self) -> None:
        self.speeds = FIRST
        self._cpu_seen = self._streams_seen = 0
        self._idle = 0  # layers in a row of which nothing was streamed,
        self._all = 0  # ... and of which everything was

    def choose(self, rows: Sequence[int], expert_bytes: int) -> list[int]:
        """`choose` with the speeds so far; none before the CPU was measured once."""
        if not self._cpu_seen:
            return []
        chosen = choose(rows, expert_bytes, self.speeds)
        self._idle = 0 if chosen else self._idle + 1
        if self._idle == _PATIENCE:
            s = self.speeds
            faster = max(s.stream_gb_s, FIRST.stream_gb_s)
            card_us = min(s.card_expert_us, FIRST.card_expert_us)
            self.speeds = replace(s, stream_gb_s=faster, card_expert_us=card_us)
            self._idle = self._streams_seen = 0
        if len(chosen) < len(rows):
            self._all = 0
        elif chosen:  # where nothing was missing, nothing was learnt either
            self._all += 1
        if self._all > _PATIENCE:  # one expert, the cheapest, is enough to see what the CPU takes
            self._all = self._cpu_seen = 0
            del chosen[-1]
        return chosen

    def cpu_took(self, seconds: float, expert_bytes: int, n: int, rows: int) -> None:
        """The CPU computed n experts, of so many rows in all."""
        if n:
            self._cpu_seen = min(self._cpu_seen + 1, _MEMORY)
            s = self.speeds
            factor = _step(seconds * 1e6, s.cpu_us(expert_bytes, n, rows), self._cpu_seen)
            self.speeds = replace(s, cpu_gb_s=s.cpu_gb_s / factor, cpu_row_us=s.cpu_row_us * factor)

    def stream_took(self, seconds: float, expert_bytes: int, n: int) -> None:
        """n experts were streamed, from the first call to the last answer."""
        if n:
            self._streams_seen = min(self._streams_seen + 1, _MEMORY)
            s = self.speeds
            moving_us = max(seconds * 1e6 - START_US, 0.0)
            factor = _step(moving_us, s.stream_us(expert_bytes, n) - START_US, self._streams_seen)
            self.speeds = replace(s, stream_gb_s=s.stream_gb_s / factor, card_expert_us=s.card_expert_us * factor)


def _step(found: float, expected: float, seen: int) -> float:
    """How far a figure moves: all the way the first time, a part of it once there is a mean (of logarithms)."""
    wild = _WILD_FIRST if seen == 1 else _WILD
    # What took no time that could be told says little: without a floor speeds would grow for ever.
    ratio = max(found, _LEAST_US) / max(expected, _LEAST_US)
    return min(max(ratio, 1 / wild), wild) ** (1 / seen)
