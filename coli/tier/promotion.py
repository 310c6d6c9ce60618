"""Who changes places, and how many may do so now: pure functions of heat and of measured seconds.

A swap is an overwrite of one slot, so it never changes what a device holds in bytes.  It costs one read of an expert
from RAM and one crossing of the bus, about what a single miss costs; it pays when the newcomer is chosen clearly more
often than its victim.  Without a margin two experts of equal heat would swap for ever.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SAVED_STEPS = 32  # decode steps whose share may be spent at once
_TOGETHER = 4  # uploads that set out together, where the share allows it: the steps in between tell what a step takes


@dataclass(frozen=True)
class Promotion:
    """When experts change places.

    every_tokens : how often it is asked.  In 16 tokens an expert of average heat is chosen every other time, so asking
        more often would find the same order; the look itself (two partial sorts) takes microseconds.
    max_swaps : of one device, each time; no more than a look's order stays true for.
    max_swaps_of_prompt : the same behind a prompt, where the order may be another one altogether.
    ratio, margin : a newcomer must have more than ``ratio * victim + margin`` counts.  A quarter more and four counts
        is what the source's tier settled on; the four keep cold experts, all near zero, from swapping at each chance.
    max_slowdown : of a decode step, by the uploads beside it, as a share; infinite for uploads at any cost.  3 % are
        not to be exceeded, and what an upload takes is an estimate.
    max_wait : of the first token, for swaps that are worth it, as a share of the prompt's seconds.
    """

    every_tokens: int = 16
    max_swaps: int = 32
    max_swaps_of_prompt: int = 256
    ratio: float = 1.25
    margin: float = 4.0
    max_slowdown: float = 0.025
    max_wait: float = 0.1


def choose_swaps(
    heat: np.ndarray, residents: np.ndarray, candidates: np.ndarray, n_free: int, policy: Promotion, limit: int
) -> list[tuple[int, int | None]]:
    """(newcomer, victim) pairs of one device, the best first; the victim is None where a slot is free.

    heat : float64, by key.   residents : keys that may leave.   candidates : keys at home here that are not resident.
    limit : pairs at most.
    """
    newcomers = _extremes(-heat[candidates], candidates, limit)
    victims = [None] * n_free + _extremes(heat[residents], residents, limit)
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


def save_up(saved_s: float, step_s: float, stall_s: float | None, policy: Promotion) -> float:
    """Seconds of decode that uploads may take, after one more step of step_s.

    Each step adds max_slowdown of itself.  What is not spent adds up to one upload, or to the share of a few steps: a
    burst after a long quiet time would be felt, though the mean allowed it.
    """
    share_s = policy.max_slowdown * step_s
    return min(saved_s + share_s, most_saved_s(step_s, stall_s, policy))


def most_saved_s(step_s: float, stall_s: float | None, policy: Promotion) -> float:
    """What is saved up at most."""
    return max(stall_s or 0.0, _SAVED_STEPS * policy.max_slowdown * step_s)


def uploads_now(saved_s: float, most_s: float, stall_s: float | None) -> int:
    """How many uploads may start now: some together, or none.

    stall_s : what each takes from the decode; None: not known yet.   most_s : what can be saved up.
    """
    if math.isinf(saved_s):
        return sys.maxsize
    if stall_s is None:
        return 1 if saved_s > 0 else 0  # one, to find out
    n = int(saved_s / stall_s)
    return n if n >= min(_TOGETHER, int(most_s / stall_s)) else 0


def uploads_before_first_token(
    gains: Sequence[float],
    *,
    step_s: float,
    upload_s: float,
    stall_s: float,
    miss_s: float,
    tokens: float,
    wait_s: float,
    policy: Promotion,
) -> int:
    """How many swaps are worth waiting for between a prompt and its first token.

    gains : hits a token that each swap wins, the best first.   tokens : that the answer will have.
    upload_s, stall_s, miss_s : of one upload, of what it takes from the decode beside it, of one miss.
    wait_s : no longer than this.

    In the background the i-th swap arrives i / rate tokens into the answer, rate being what max_slowdown allows.
    Waiting for n of them costs n uploads and brings every swap forward by n turns: it wins the misses in between.  The
    n that wins most is taken, 0 where none wins anything.  That a swap which was waited for does not slow the decode
    later is not counted: that little is allowed, and a late first token is seen by everybody.
    """
    most = min(len(gains), int(wait_s / upload_s))
    if most <= 0:
        return 0
    gain_s = miss_s * np.asarray(gains, np.float64)
    turn = np.arange(1, len(gain_s) + 1)
    late = np.minimum(turn * stall_s / (policy.max_slowdown * step_s), tokens)  # tokens, if nobody waits
    # missed_s[n]: what is lost to misses before arrival where n are waited for: swap n + i then arrives as the i-th
    missed_s = np.append(np.correlate(gain_s, late, "full")[len(gain_s) - 1 :], 0.0)
    won_s = missed_s[0] - missed_s - upload_s * np.arange(len(gain_s) + 1)
    return int(np.argmax(won_s[: most + 1]))
