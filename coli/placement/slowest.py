"""Who of several is done last, on average, where chance deals out the work.

The experts of a layer fall to the CPU and to cards as a router chooses, and the layer goes on with the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_NEVER = 1e-4  # a probability that nobody will see
_HARDLY_FASTER = 3.0  # times the CPU

_ROOT_2 = math.sqrt(2)
_ROOT_2_PI = math.sqrt(2 * math.pi)


class Side(NamedTuple):
    """An executor of a layer's experts: base_us, then start_us if it has any, then each_us for each.

    mean, variance : of how many it has.   some : the probability that it has any.
    """

    base_us: float
    start_us: float
    each_us: float
    mean: float
    variance: float
    some: float


def slowest_us(cpu: Side, cards: Sequence[Side]) -> float:
    """The mean time of the slowest of the CPU and the cards.

    One that has seldom anything, but then is far slower than the others, has a time that is nothing like normal: so for
    the CPU, and cards that are hardly faster, the two cases are taken apart.  Which cards these are is the machine's
    and no placement's, so that a search sees no steps.  The start of any other is counted as often as it comes, and not
    as chance.
    """
    slow = [card for card in cards if card.each_us * _HARDLY_FASTER > cpu.each_us]
    fast = [card for card in cards if card.each_us * _HARDLY_FASTER <= cpu.each_us]
    return _by_cases([cpu, *slow], fast, [], 1.0)


def _by_cases(
    slow: Sequence[Side], fast: Sequence[Side], known: list[tuple[float, float, float]], share: float
) -> float:
    """The mean over the cases of the slow ones.

    known : (mean time, variance of the count, each_us) of those whose case is known.
    share : of their mean, what the others have.  What one has less or more than on average, the others have more or
        less: the sum is what a token chooses.
    """
    if not slow:
        times = [side.base_us + side.start_us * side.some + side.each_us * side.mean * share for side in fast]
        variances = [side.variance for side in fast] + [variance for _, variance, _ in known]
        scales = [side.each_us for side in fast] + [each_us for *_, each_us in known]
        return mean_of_max(times + [us for us, *_ in known], variances, scales)
    side, others = slow[0], slow[1:]
    base_us, start_us, each_us, mean, variance, some = side
    mean *= share
    elsewhere = share * (sum(other.mean for other in others) + sum(other.mean for other in fast))

    def case(mean_here: float, variance_here: float, start_here_us: float) -> float:
        us = base_us + start_here_us + each_us * mean_here
        of_others = share * max((elsewhere + mean - mean_here) / elsewhere, 0.0) if elsewhere else share
        return _by_cases(others, fast, [*known, (us, variance_here, each_us)], of_others)

    if some < _NEVER or not elsewhere:
        return case(mean, variance, start_us * some)
    if some > 1 - _NEVER:
        return case(mean, variance, start_us)
    mean_if_any = mean / some
    variance_if_any = max((variance + mean**2) / some - mean_if_any**2, 0.0)
    return some * case(mean_if_any, variance_if_any, start_us) + (1 - some) * case(0.0, 0.0, 0.0)


def mean_of_max(means: Sequence[float], variances: Sequence[float], scales: Sequence[float]) -> float:
    """The mean of ``max(means[i] + scales[i] * (n[i] - mean of n[i]))``.

    n[i] are counts with these variances whose sum is fixed (the experts that a token chooses), taken as jointly
    normal; the maximum of two at a time after C. E. Clark, The greatest of a finite set of random variables (1961).
    """
    spread = sum(variances)
    root = math.sqrt(spread)
    # Counts with a fixed sum: cov(i, j) = -v_i v_j / spread, so one number each says how all covary.
    shared = [scale * v / root if root else 0.0 for scale, v in zip(scales, variances, strict=True)]
    mean, variance, covaries = means[0], scales[0] ** 2 * variances[0] - shared[0] ** 2, shared[0]
    for k in range(1, len(means)):
        other, other_variance = means[k], scales[k] ** 2 * variances[k] - shared[k] ** 2
        square_gap = variance + other_variance + 2 * covaries * shared[k]
        gap = math.sqrt(square_gap) if square_gap > 0 else 0.0
        if abs(mean - other) >= 8 * gap:  # the larger one, but for less than 1e-15
            if other > mean:
                mean, variance, covaries = other, other_variance, shared[k]
            continue
        ahead = (mean - other) / gap
        wins = 0.5 * math.erfc(-ahead / _ROOT_2)
        density = gap * math.exp(-ahead * ahead / 2) / _ROOT_2_PI
        square = (mean * mean + variance) * wins + (other * other + other_variance) * (1 - wins)
        square += (mean + other) * density
        mean = mean * wins + other * (1 - wins) + density
        variance = max(square - mean * mean, 0.0)
        covaries = covaries * wins + shared[k] * (1 - wins)
    return mean
