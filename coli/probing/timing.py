"""Times of short calls: the median of as many as fit a budget.

What is predicted from them is a token on this machine with all that goes on here, and not one of a quiet machine.  But
a figure is kept, and a neighbour's burst lasts longer than a call: so calls are timed by turns, some of each in every
round, and of the rounds' medians the middle one counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

_BUDGET_S = 0.04
_PAIRS_S = 0.2
_FEWEST = 5
MOST_CALLS = 50
ROUNDS = 3
_MOST_OF_ROUND = MOST_CALLS // ROUNDS - 1  # and one that is not counted


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    budget_s: float = _BUDGET_S,
    *,
    before: Callable[[], Any] | Mapping[str, Callable[[], Any]] = lambda: None,
) -> dict[str, float]:
    """Microseconds of several calls: of each the middle one of three rounds.

    budget_s : of all rounds of one call.   before : as for `time_us`, of all calls or of each.
    No call is made more than MOST_CALLS times.
    """
    us: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            ahead = before if callable(before) else before[name]
            us[name].append(time_us(call, budget_s / ROUNDS, before=ahead, most=_MOST_OF_ROUND))
    return {name: statistics.median(found) for name, found in us.items()}


def time_us(
    call: Callable[[], Any],
    budget_s: float = _BUDGET_S,
    *,
    before: Callable[[], Any] = lambda: None,
    most: int = MOST_CALLS,
) -> float:
    """Microseconds of a call: the median of 5 to ``most``, after one that is not counted.

    before : is called ahead of each and not timed.
    """
    call()
    seconds: list[float] = []
    end = time.perf_counter() + budget_s
    while len(seconds) < _FEWEST or (len(seconds) < most and time.perf_counter() < end):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def seconds_of(call: Callable[[], Any]) -> float:
    """What one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def apart_us(longer: Callable[[], float], shorter: Callable[[], float], budget_s: float = _PAIRS_S) -> float:
    """Microseconds that one call takes beyond another.

    A small difference of two long calls drowns in what a machine does from one window to the next.  So the two are
    called by turns, the shorter one first and last of four, which takes out a drift; the median of all fours counts.
    No call is made more than MOST_CALLS times.

    longer, shorter : make one call and return its seconds, as `seconds_of` does.
    """
    longer(), shorter()
    apart_s: list[float] = []
    end = time.perf_counter() + budget_s
    while len(apart_s) < _FEWEST or (len(apart_s) < MOST_CALLS // 2 - 1 and time.perf_counter() < end):
        first = shorter()
        both = longer() + longer()
        apart_s.append((both - first - shorter()) / 2)
    return 1e6 * statistics.median(apart_s)


def fitted(
    one: tuple[float, float], other: tuple[float, float], most_gb_s: float = float("inf")
) -> tuple[float, float]:
    """(GB/s, latency in us) of a line through two (bytes, us), the smaller first; always through the larger one.

    Where the larger one took no longer, noise hides what its bytes take: it is then all latency but a hundredth.  Where
    the smaller one took less than its share there is no latency, and a GB/s above ``most_gb_s`` is that.
    """
    (few, few_us), (many, many_us) = one, other
    slope_us = max((many_us - few_us) / (many - few), many_us / many / 100, 1e-3 / most_gb_s)
    slope_us = min(slope_us, many_us / many)
    return 1e-3 / slope_us, max(0.0, many_us - many * slope_us)
