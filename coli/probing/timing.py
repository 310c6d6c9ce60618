"""Times of short calls: the median of as many as fit a budget.

What is predicted from them is a token on this machine with all that goes on here, and not one of a quiet machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_BUDGET_S = 0.04
_FEWEST = 5
MOST_CALLS = 50


def time_us(
    call: Callable[[], Any], budget_s: float = _BUDGET_S, *, before: Callable[[], Any] = lambda: None
) -> float:
    """Microseconds of a call: the median of 5 to 50, after one that is not counted.

    before : is called ahead of each and not timed.
    """
    call()
    seconds: list[float] = []
    end = time.perf_counter() + budget_s
    while len(seconds) < _FEWEST or (len(seconds) < MOST_CALLS and time.perf_counter() < end):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def fitted(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """(GB/s, latency in us) of a line through two (bytes, us), the smaller first.

    Where the larger one took no longer, noise hides what its bytes take: it is then all latency but a hundredth.
    """
    (few, few_us), (many, many_us) = one, other
    slope_us = max((many_us - few_us) / (many - few), many_us / many / 100)
    return 1e-3 / slope_us, max(0.0, few_us - few * slope_us)
