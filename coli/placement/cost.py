"""The time of one token, predicted: every step with its executor, and what waits for what.

A layer is a chain: mixer matrices one after the other, each on the CPU or a round trip away; then the routed
experts, where the cards' groups and the CPU's misses (and the shared expert) run side by side and the slowest
decides.  How many experts of a layer fall to whom is random, so that step is the mean of a maximum.  Keys, values
and recurrent state lie on the host.  This module prices a placement; it chooses none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coli.placement.components import Component, ModelShape
from coli.placement.homes import ON_CPU, Owners
from coli.placement.price import Expert
from coli.placement.speeds import Probe

# attnproj is two steps: the attention itself, on the CPU, stands between its matrices.
_STEPS = {"lmhead": 1, "dnproj": 1, "dnout": 1, "attnproj": 2, "shexp": 1}

_ROOT_2 = math.sqrt(2)
_ROOT_2_PI = math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a token by part: a component's name, "experts" (shared expert included), "rest", "context"."""

    us: Mapping[str, float]

    @property
    def ms_per_token(self) -> float:
        """The whole token."""
        return sum(self.us.values()) / 1e3


class Share(NamedTuple):
    """The experts of one layer that one executor holds, as moments of how many of them a token chooses.

    log_none : logarithm of the probability that it chooses not one.
    """

    mean: float = 0.0
    variance: float = 0.0
    log_none: float = 0.0


class CostModel:
    """Prices placements of one model on one machine.

    ranked : all experts, hottest first.
    context : positions that a sequence may reach; the keys and values of half of them are read.
    """

    def __init__(self, shape: ModelShape, speeds: Probe, ranked: Sequence[Expert], context: int = 0) -> None:
        self.shape = shape
        self.speeds = speeds
        self.ranked = ranked
        self.slot_us = [device.experts.transfer_us(shape.expert_bytes) for device in speeds.devices]
        self.cpu_expert_us = speeds.cpu.experts.transfer_us(shape.cpu_expert_bytes)
        # What no placement changes: small matrices, keys and values, the recurrent state, read and written.
        matrix = speeds.cpu.matrix
        context_bytes = shape.kv_bytes(context) / 2 + 2 * shape.state_bytes
        self.constant_us = {
            "rest": matrix.transfer_us(shape.rest_bytes),
            "context": matrix.transfer_us(context_bytes),
        }
        self.moments = [(e.p, e.p * (1 - e.p), math.log1p(-min(e.p, 1 - 1e-12))) for e in ranked]
        self.totals = {layer: Share() for layer in shape.expert_layers}
        for expert, (p, variance, log_none) in zip(ranked, self.moments, strict=True):
            total = self.totals[expert.layer]
            self.totals[expert.layer] = Share(total[0] + p, total[1] + variance, total[2] + log_none)
        self._shexp = {item.layer: item for item in shape.components if item.name == "shexp"}

    def component_us(self, item: Component, device: int | None) -> float:
        """A component by itself on a device, or on the CPU (None)."""
        speed = (self.speeds.cpu if device is None else self.speeds.devices[device]).matrix
        return _STEPS[item.name] * speed.latency_us + speed.transfer_us(item.bytes)

    def slowness(self, device: int) -> float:
        """How many times as long as the CPU a device reads, round trips apart: of matrices and experts the better."""
        one, cpu = self.speeds.devices[device], self.speeds.cpu
        return min(cpu.matrix.gb_s / one.matrix.gb_s, self.slot_us[device] / (self.cpu_expert_us or 1.0))

    def moe_us(self, total: Share, shares: Sequence[Share], shexp: Component | None, shexp_device: int | None) -> float:
        """Routed experts and shared expert of one layer: the mean of the slowest executor.

        total : all experts of the layer.   shares : each device's; what they lack of the total is the CPU's.
        A shared expert on a card that has experts of the layer shares their round trip.
        """
        missed, missed_variance = total.mean, total.variance
        for share in shares:
            missed -= share.mean
            missed_variance -= share.variance
        missed = max(missed, 0.0)
        cpu_us = missed * self.cpu_expert_us + min(missed, 1.0) * self.speeds.cpu.experts.latency_us
        if shexp is not None and shexp_device is None:
            cpu_us += self.component_us(shexp, None)
        means, variances, scales = [cpu_us], [max(missed_variance, 0.0)], [self.cpu_expert_us]
        for device, share in enumerate(shares):
            us = share.mean * self.slot_us[device]
            if shexp is not None and shexp_device == device:
                us += self.component_us(shexp, device)
            elif share.mean:
                us -= self.speeds.devices[device].experts.latency_us * math.expm1(share.log_none)
            else:
                continue
            means.append(us)
            variances.append(share.variance)
            scales.append(self.slot_us[device])
        return mean_of_max(means, variances, scales)

    def predict(self, device_of: Mapping[tuple[str, int | None], int], owners: Owners) -> Prediction:
        """A whole token.

        device_of : (component, layer) -> device, for those not on the CPU.   owners : who holds each expert.
        """
        us: dict[str, float] = {}
        for item in self.shape.components:
            if item.name != "shexp":
                cost_us = self.component_us(item, device_of.get((item.name, item.layer)))
                us[item.name] = us.get(item.name, 0.0) + cost_us
        us["experts"] = 0.0
        sums = {layer: self._no_shares() for layer in (*self.totals, *self._shexp)}
        for expert, owner, moments in zip(self.ranked, owners, self.moments, strict=True):
            if owner != ON_CPU:
                _add(sums[expert.layer][owner], moments)
        for layer, held in sums.items():
            us["experts"] += self._held_us(layer, held, device_of)
        return Prediction(us | self.constant_us)

    def layer_us(
        self, layer: int, owners: Owners, ranks: Iterable[int], device_of: Mapping[tuple[str, int | None], int]
    ) -> float:
        """One layer's experts.   ranks : where they stand among all."""
        sums = self._no_shares()
        for rank in ranks:
            if owners[rank] != ON_CPU:
                _add(sums[owners[rank]], self.moments[rank])
        return self._held_us(layer, sums, device_of)

    def _no_shares(self) -> list[list[float]]:
        return [[0.0, 0.0, 0.0] for _ in self.speeds.devices]

    def _held_us(self, layer: int, held: list[list[float]], device_of: Mapping[tuple[str, int | None], int]) -> float:
        total = self.totals.get(layer, Share())
        shares = [Share(*sums) for sums in held]
        return self.moe_us(total, shares, self._shexp.get(layer), device_of.get(("shexp", layer)))


def _add(sums: list[float], moments: tuple[float, float, float]) -> None:
    sums[0] += moments[0]
    sums[1] += moments[1]
    sums[2] += moments[2]


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
