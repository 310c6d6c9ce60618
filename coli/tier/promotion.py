"""Who changes places: a pure function of heat.

A swap is an overwrite of one slot, so it never changes what a device holds in bytes.  It costs one read of an expert
from RAM and one crossing of the bus, about what a single miss costs; it pays when the newcomer is chosen clearly more
often than its victim.  Without a margin two experts of equal heat would swap for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Promotion:
    """When experts change places.

    every_tokens : how often it is asked.  In 16 tokens an expert of average heat is chosen every other time, so asking
        more often would find the same order; the look itself (two partial sorts) takes microseconds.
    max_swaps : of one device, each time.  8 experts of 1.6 MB in 16 tokens are 0.8 MB a token, where a token reads
        1.5 GB or more: below a thousandth of the memory bus, and 1 % of a PCIe 3 x8 link at 40 tokens a second.
    ratio, margin : a newcomer must have more than ``ratio * victim + margin`` counts.  A quarter more and four counts
        is what the source's tier settled on; the four keep cold experts, all near zero, from swapping at each chance.
    """

    every_tokens: int = 16
    max_swaps: int = 8
    ratio: float = 1.25
    margin: float = 4.0


def choose_swaps(
    heat: np.ndarray, residents: np.ndarray, candidates: np.ndarray, n_free: int, policy: Promotion
) -> list[tuple[int, int | None]]:
    """(newcomer, victim) pairs of one device, the best first; the victim is None where a slot is free.

    heat : float64, by key.   residents : keys that may leave.   candidates : keys at home here that are not resident.
    """
    newcomers = _extremes(-heat[candidates], candidates, policy.max_swaps)
    victims = [None] * n_free + _extremes(heat[residents], residents, policy.max_swaps)
    swaps = []
    for newcomer, victim in zip(newcomers, victims, strict=False):
        if not heat[newcomer] > policy.ratio * (0.0 if victim is None else heat[victim]) + policy.margin:
            break
        swaps.append((newcomer, victim))
    return swaps


def _extremes(values: np.ndarray, keys: np.ndarray, n: int) -> list[int]:
    """The keys of the ``n`` smallest values, ascending, equals by key."""
    if len(keys) > n:
        some = np.argpartition(values, n - 1)[:n]
        values, keys = values[some], keys[some]
    return keys[np.lexsort((keys, values))].tolist()
