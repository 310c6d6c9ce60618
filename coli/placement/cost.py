"""The time of one token, predicted: every step with its executor, and what waits for what.

A layer is a chain: mixer matrices one after the other, each on the CPU or a round trip away; then the routed
experts, where the cards' groups and the CPU's misses (and the shared expert) run side by side and the slowest
decides.  How many experts of a layer fall to whom is random, so that step is the mean of a maximum.  Keys, values
and recurrent state lie on the host.  This module prices a placement; it chooses none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coli.placement.components import Component, ModelShape
from coli.placement.price import Expert
from coli.placement.speeds import Probe

# attnproj is two steps, with the attention itself between them on the CPU.
_STEPS = {"lmhead": 1, "dnproj": 1, "dnout": 1, "attnproj": 2, "shexp": 1}


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a token by part: a component's name, "experts" (shared expert included), "rest", "context"."""

    us: dict[str, float]

    @property
    def ms_per_token(self) -> float:
        """The whole token."""
        return sum(self.us.values()) / 1e3

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return 1e3 / self.ms_per_token


class Share:
    """The experts of one layer that one executor holds: moments of how many of them a token chooses."""

    __slots__ = ("mean", "none", "variance")

    def __init__(self) -> None:
        self.mean = 0.0
        self.variance = 0.0
        self.none = 1.0  # the probability that the token chooses none of them

    def add(self, p: float) -> None:
        """One more expert, chosen with probability ``p``."""
        self.mean += p
        self.variance += p * (1 - p)
        self.none *= 1 - p


class CostModel:
    """Prices placements of one model on one machine.

    context : positions that a sequence may reach; the keys and values of half of them are read.
    """

    def __init__(self, shape: ModelShape, speeds: Probe, context: int = 0) -> None:
        self.shape = shape
        self.speeds = speeds
        self._context = context
        self._slot_us = [device.experts.transfer_us(shape.expert_bytes) for device in speeds.devices]
        self._cpu_expert_us = speeds.cpu.experts.transfer_us(shape.cpu_expert_bytes)

    def component_us(self, item: Component, device: int | None) -> float:
        """A component by itself on a device, or on the CPU (None)."""
        steps = _STEPS[item.name]
        speed = (self.speeds.cpu if device is None else self.speeds.devices[device]).matrix
        return steps * speed.latency_us + speed.transfer_us(item.bytes)

    def experts_us(self, on_cpu: Share, on_device: Sequence[Share | None], shexp: Component | None,
                   shexp_device: int | None) -> float:  # fmt: skip
        """Routed experts and shared expert of one layer: the mean of the slowest executor.

        A shared expert on a card that also has experts goes in their round trip; on the CPU it comes before the misses.
        """
        means, variances, scales = [], [], []
        cpu_us = on_cpu.mean * self._cpu_expert_us + self.speeds.cpu.experts.latency_us * (1 - on_cpu.none)
        if shexp is not None and shexp_device is None:
            cpu_us += self.component_us(shexp, None)
        means.append(cpu_us)
        variances.append(on_cpu.variance)
        scales.append(self._cpu_expert_us)
        for device, share in enumerate(on_device):
            here = shexp is not None and shexp_device == device
            if share is None and not here:
                continue
            speeds = self.speeds.devices[device]
            us = 0.0
            if here:
                us += self.component_us(shexp, device)
            if share is not None:
                us += share.mean * self._slot_us[device]
                us += 0.0 if here else speeds.experts.latency_us * (1 - share.none)
            means.append(us)
            variances.append(0.0 if share is None else share.variance)
            scales.append(self._slot_us[device])
        return mean_of_max(means, variances, scales)

    def predict(self, device_of: dict[tuple[str, int | None], int], homes: Sequence[Sequence[Expert]],
                residents: Sequence[int]) -> Prediction:  # fmt: skip
        """A whole token.

        device_of : (component, layer) -> device, for those not on the CPU.
        homes : experts of each device, hottest first; the first ``residents`` of each are in VRAM.
        """
        us: dict[str, float] = {}
        shexp = {}
        for item in self.shape.components:
            device = device_of.get((item.name, item.layer))
            if item.name == "shexp":
                shexp[item.layer] = (item, device)
            else:
                us[item.name] = us.get(item.name, 0.0) + self.component_us(item, device)
        us["experts"] = self._all_experts_us(shexp, homes, residents)
        cpu = self.speeds.cpu.matrix
        us["rest"] = cpu.transfer_us(self.shape.rest_bytes)
        # The recurrent state is read and written.
        us["context"] = cpu.transfer_us(self.shape.kv_bytes(self._context) / 2 + 2 * self.shape.state_bytes)
        return Prediction(us)

    def _all_experts_us(self, shexp: dict, homes: Sequence[Sequence[Expert]], residents: Sequence[int]) -> float:
        on_cpu = {layer: Share() for layer in (*self.shape.expert_layers, *shexp)}
        on_device: dict[int, list[Share | None]] = {layer: [None] * len(homes) for layer in on_cpu}
        for device, (home, count) in enumerate(zip(homes, residents, strict=True)):
            for n, expert in enumerate(home):
                if n >= count:
                    on_cpu[expert.layer].add(expert.p)
                    continue
                shares = on_device[expert.layer]
                if shares[device] is None:
                    shares[device] = Share()
                shares[device].add(expert.p)
        return sum(
            self.experts_us(on_cpu[layer], on_device[layer], *shexp.get(layer, (None, None))) for layer in on_cpu
        )


def mean_of_max(means: Sequence[float], variances: Sequence[float], scales: Sequence[float]) -> float:
    """The mean of the maximum of ``means[i] + scales[i] * (n[i] - its mean)``.

    n[i] are counts with the given variances that always add up to the same number (the experts that a token chooses).
    Taken as jointly normal; two at a time, by C. E. Clark, The greatest of a finite set of random variables (1961).
    """
    spread = sum(variances)
    size = len(means)
    covariance = [
        [
            scales[i] * scales[j] * ((variances[i] if i == j else 0.0) - (variances[i] * variances[j] / spread if spread else 0.0))
            for j in range(size)
        ]
        for i in range(size)
    ]  # fmt: skip
    mean, row = means[0], covariance[0]
    for k in range(1, size):
        other, other_row = means[k], covariance[k]
        gap = math.sqrt(max(row[0 if k == 1 else -1] + other_row[k] - 2 * row[k], 0.0))
        raise NotImplementedError
    return mean
