"""Prices in bytes: what a byte of VRAM saves on the CPU's memory bus for each token.

A dense component is read every token: 1 a byte.  A routed expert is read with the probability p that a token
chooses it: ``p * cpu_bytes_ratio`` a byte.  Experts fill the room that is left from the hottest, so what room is
worth is a concave curve of it, and what a component displaces is a difference of two of its points.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from coli.errors import PlacementError
from coli.placement.components import ModelShape

# A heat of few tokens says little: it is read together with so many tokens of an even router.
PRIOR_TOKENS = 32

# Two sums of the same numbers in another order differ by less than this; no decision may hang on it.
NOISE_BYTES = 1e-3


class Expert(NamedTuple):
    """One routed expert, and the probability that a token chooses it."""

    p: float
    layer: int
    index: int


def rank_experts(shape: ModelShape, heat: Sequence[Sequence[float]] | None) -> list[Expert]:
    """All experts, hottest first.

    heat : counts [layer][expert] over all layers, or over the layers that have experts; None for none.
    ``p = min(1, (heat_e + 32 * topk / n_experts) / (n + 32))`` with ``n = (layer's heat) / topk`` tokens.
    Equals stand by expert, then layer: a cold cache then holds an equal share of each layer.

    Raises PlacementError where the heat is not of this model.
    """
    even = shape.topk / shape.n_experts if shape.n_experts else 0.0
    if heat is None:
        return [Expert(even, layer, e) for e in range(shape.n_experts) for layer in shape.expert_layers]
    ranked = []
    for layer, counts in zip(shape.expert_layers, _expert_rows(shape, heat), strict=True):
        tokens = sum(counts) / shape.topk
        prior = PRIOR_TOKENS * even
        for e, count in enumerate(counts):
            ranked.append(Expert(min(1.0, (count + prior) / (tokens + PRIOR_TOKENS)), layer, e))
    ranked.sort(key=lambda expert: (-expert.p, expert.index, expert.layer))
    return ranked


def _expert_rows(shape: ModelShape, heat: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    rows = list(heat)
    if len(rows) == shape.layers:
        rows = [rows[layer] for layer in shape.expert_layers]
    elif len(rows) != len(shape.expert_layers):
        raise PlacementError(f"heat: {len(rows)} layers; the model has {shape.layers}: it is another model's")
    for layer, counts in zip(shape.expert_layers, rows, strict=True):
        if len(counts) != shape.n_experts:
            raise PlacementError(
                f"heat: layer {layer} has {len(counts)} counts; the model has {shape.n_experts} experts a layer"
            )
        if not all(0 <= count < float("inf") for count in counts):
            raise PlacementError(f"heat: layer {layer} holds a count that is negative or not finite")
    return rows


def deal(weights: Sequence[int], n: int) -> list[int]:
    """Deal ``n`` cards to hands in proportion to their weights, one after the other; the hand of each.

    The first sum(weights) cards give every hand exactly its weight (d'Hondt), and any beginning is fair to one
    card.  A weight of 0 gets none; ties go to the lower index.  All weights 0: hand 0 gets everything.
    """
    hands = [(1 / weight, i) for i, weight in enumerate(weights) if weight > 0]
    if len(hands) < 2:
        return [hands[0][1] if hands else 0] * n
    heapq.heapify(hands)
    held = [0] * len(weights)
    dealt = []
    for _ in range(n):
        i = hands[0][1]
        dealt.append(i)
        held[i] += 1
        heapq.heapreplace(hands, ((held[i] + 1) / weights[i], i))
    return dealt


class ValueCurve:
    """What room is worth when experts fill it from the hottest, the last one pro rata.

    probabilities : of the experts that may live in it, hottest first.
    slot_bytes : what one occupies.   ratio : bytes the CPU reads for one over that.
    """

    def __init__(self, probabilities: Sequence[float], slot_bytes: int, ratio: float) -> None:
        self._p = probabilities
        self._prefix = list(accumulate(probabilities, initial=0.0))
        self._slot_bytes = slot_bytes
        self._ratio = ratio

    @property
    def bytes(self) -> int:
        """Room that all of them fill."""
        return len(self._p) * self._slot_bytes

    @property
    def slope(self) -> float | None:
        """What a byte is worth where all experts are equal; None where they are not (or there are none)."""
        equal = self._p and self._p[0] - self._p[-1] <= 1e-12
        return self._ratio * self._p[0] if equal else None

    def value(self, room: int) -> float:
        """V(room), in bytes saved a token."""
        room = max(room, 0)
        if room >= self.bytes:
            return self._ratio * self._slot_bytes * self._prefix[-1]
        whole, part = divmod(room, self._slot_bytes)
        return self._ratio * (self._prefix[whole] * self._slot_bytes + self._p[whole] * part)

    def loss(self, room: int, n_bytes: int) -> float:
        """What the experts lose when ``n_bytes`` of ``room`` are taken."""
        return self.value(room) - self.value(room - n_bytes)

    def residents(self, room: int) -> int:
        """Whole experts that fit."""
        return min(len(self._p), max(room, 0) // self._slot_bytes) if self._p else 0

    def hits(self, n: int) -> float:
        """Experts of the hottest ``n`` that a token chooses, on average."""
        return self._prefix[n]
