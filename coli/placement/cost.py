"""The time of one token, predicted: every step with its executor, and what waits for what.

A layer is a chain: mixer matrices one after the other, each on the CPU or a round trip away; then the routed
experts, where the cards' groups and the CPU's misses (and the shared expert) run side by side and the slowest
decides.  How many experts of a layer fall to whom is random, so that step is the mean of a maximum.  Keys, values
and recurrent state lie on the host.

A card that takes whole layers does so where it has the layer's projections: the small matrices, keys, values and state
are its own there, the next such layer costs no way there and back, and the host is asked only for experts that it
lacks.  This module prices a placement; it chooses none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from coli.placement.components import Component, ModelShape
from coli.placement.homes import ON_CPU, Owners
from coli.placement.price import Expert
from coli.placement.slowest import Side, slowest_us
from coli.placement.speeds import Probe, SpanSpeed

# attnproj is two steps: the attention itself, on the CPU, stands between its matrices.
_STEPS = {"lmhead": 1, "dnproj": 1, "dnout": 1, "attnproj": 2, "shexp": 1}

# A step on a card in the middle of a layer's experts cuts the CPU's work before and behind: two regions more, where
# nobody has measured what that takes.
_EXPERT_CUTS = 2

Assignment = Mapping[tuple[str, int | None], int]  # (component, layer) -> device, for those that are not on the CPU


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a token by part.

    us : by a component's name; "experts" (shared expert included); "rest", the small matrices; "context", keys, values
        and state; "layers", what a layer costs whatever it reads; "hops", the ways to cards and back that no matrix has
        of its own; "token", what a token costs whatever its layers do.  What nothing takes is left out, but for the
        components.
    """

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


class Mixer(NamedTuple):
    """The projections of a layer.   kind : the first one's name."""

    kind: str
    parts: tuple[Component, ...]


class CostModel:
    """Prices placements of one model on one machine.

    ranked : all experts, hottest first.
    context : positions that a sequence may reach; the keys and values of half of them are read.
    position : positions that are read instead, where it is known.
    mixers : the layers that a card could take whole, which are those with all of their projections.
    """

    def __init__(
        self,
        shape: ModelShape,
        speeds: Probe,
        ranked: Sequence[Expert],
        context: int = 0,
        position: float | None = None,
    ) -> None:
        self.shape = shape
        self.speeds = speeds
        self.ranked = ranked
        self.slot_us = [device.experts.transfer_us(shape.expert_bytes) for device in speeds.devices]
        two_regions_us = _EXPERT_CUTS * speeds.cpu.region_us
        self._cut_us = [two_regions_us if one.cut_us is None else one.cut_us for one in speeds.devices]
        self.cpu_expert_us = speeds.cpu.experts.transfer_us(shape.cpu_expert_bytes)
        self.moments = [(e.p, e.p * (1 - e.p), math.log1p(-min(e.p, 1 - 1e-12))) for e in ranked]
        self.totals = {layer: Share() for layer in shape.expert_layers}
        for expert, (p, variance, log_none) in zip(ranked, self.moments, strict=True):
            total = self.totals[expert.layer]
            self.totals[expert.layer] = Share(total[0] + p, total[1] + variance, total[2] + log_none)
        self._shexp = {item.layer: item for item in shape.components if item.name == "shexp"}
        self.mixers = _mixers(shape)
        # What goes with a layer: small matrices; keys and values, or the recurrent state, which is read and written.
        self._rest_bytes = shape.rest_bytes / shape.layers
        self._kv_bytes = shape.kv_bytes_per_position * (context / 2 if position is None else position)
        kinds = [item.name for item in shape.components]
        self._with_state, self._with_kv = max(kinds.count("dnproj"), 1), max(kinds.count("attnproj"), 1)

    def of_device(self, device: int) -> CostModel:
        """The same model on a machine that has this device alone, there device 0."""
        made = copy(self)
        made.speeds = Probe(self.speeds.cpu, (self.speeds.devices[device],))
        made.slot_us, made._cut_us = [self.slot_us[device]], [self._cut_us[device]]
        return made

    @property
    def has_spans(self) -> bool:
        """Whether a card of the machine takes whole layers."""
        return any(device.span is not None for device in self.speeds.devices)

    def span(self, device: int | None, kind: str) -> SpanSpeed | None:
        """How fast a card takes layers of this kind whole; None where it does not."""
        span = None if device is None else self.speeds.devices[device].span
        return span if span is not None and kind in span.kinds else None

    def span_at(self, layer: int, device_of: Assignment) -> int | None:
        """The card that takes this layer whole, if one does: it has the projections, and no other the shared expert."""
        mixer = self.mixers.get(layer)
        if mixer is None:
            return None
        device = device_of.get((mixer.kind, layer))
        if self.span(device, mixer.kind) is None or device_of.get(("shexp", layer), device) != device:
            return None
        return device if all(device_of.get((part.name, layer)) == device for part in mixer.parts) else None

    def spans_of(self, device_of: Assignment) -> dict[int, int]:
        """layer -> the card that takes it whole, in the order of the layers."""
        if not self.has_spans:
            return {}
        found = ((layer, self.span_at(layer, device_of)) for layer in self.mixers)
        return {layer: device for layer, device in found if device is not None}

    def component_us(self, item: Component, device: int | None) -> float:
        """A component by itself on a device, or on the CPU (None)."""
        cpu = self.speeds.cpu
        matrix = (cpu if device is None else self.speeds.devices[device]).matrix
        step_us = matrix.latency_us + (0.0 if device is None else cpu.region_us)
        return _STEPS[item.name] * step_us + matrix.transfer_us(item.bytes)

    def in_span_us(self, item: Component, device: int) -> float:
        """A component in a layer, or behind the last one, that a card takes whole."""
        speeds = self.speeds.devices[device]
        if item.layer is None and speeds.span.head_gb_s is not None:
            return item.bytes / (speeds.span.head_gb_s * 1e3)
        return speeds.matrix.transfer_us(item.bytes)

    def layer_us(self, kind: str, device: int | None) -> dict[str, float]:
        """What a layer takes besides components and experts, by part: on the CPU, or on a card that takes it whole."""
        state_bytes = 2 * self.shape.state_bytes / self._with_state if kind == "dnproj" else 0.0
        kv_bytes = self._kv_bytes / self._with_kv if kind == "attnproj" else 0.0
        span = self.span(device, kind)
        if span is None:
            matrix = self.speeds.cpu.matrix
            context_us = self.speeds.cpu.state_us(state_bytes) + matrix.transfer_us(kv_bytes)
            return {
                "layers": self.speeds.cpu.layer_us,
                "rest": matrix.transfer_us(self._rest_bytes),
                "context": context_us,
            }
        matrix = self.speeds.devices[device].matrix
        context_us = matrix.transfer_us(state_bytes) + kv_bytes / (span.kv_gb_s * 1e3)
        return {"layers": span.layer_us(kind), "rest": matrix.transfer_us(self._rest_bytes), "context": context_us}

    def hops_us(self, devices: Iterable[int | None]) -> float:
        """The ways into runs of whole layers and out of them.   devices : of each layer, in order; None is the CPU."""
        us, before = 0.0, None
        for device in devices:
            if device is not None and device != before:
                us += self.speeds.devices[device].span.hop_us + self.speeds.cpu.region_us
            before = device
        return us

    def slowness(self, device: int) -> float:
        """How many times as long as the CPU a device reads, round trips apart: of matrices and experts the better."""
        one, cpu = self.speeds.devices[device], self.speeds.cpu
        return min(cpu.matrix.gb_s / one.matrix.gb_s, self.slot_us[device] / (self.cpu_expert_us or 1.0))

    def moe_us(
        self,
        total: Share,
        shares: Sequence[Share],
        shexp: Component | None,
        shexp_device: int | None,
        span_device: int | None = None,
    ) -> float:
        """Routed experts and shared expert of one layer: the mean of the slowest executor.

        total : all experts of the layer.   shares : each device's; what they lack of the total is the CPU's.
        span_device : the card that takes the layer whole.
        A shared expert on a card that has experts of the layer shares their round trip.  Beside a card that takes the
        layer whole all others begin when they are asked, which they are only where something is missing.
        """
        cpu = self.speeds.cpu
        missed, missed_variance = total.mean, total.variance
        for share in shares:
            missed -= share.mean
            missed_variance -= share.variance
        missed = max(missed, 0.0)
        log_none = total.log_none - sum(share.log_none for share in shares)
        some = min(max(-math.expm1(log_none), 0.0), missed)
        ask_us, asked_us, always = 0.0, 0.0, False
        if span_device is not None:
            ask_us = self.speeds.devices[span_device].span.ask_us
            asked_us = ask_us + cpu.region_us
            # For a shared expert that is not its own the card asks every time.
            always = shexp is not None and shexp_device != span_device
        base_us = asked_us if always else 0.0
        if shexp is not None and shexp_device is None:
            base_us += self.component_us(shexp, None)
        sides, cut_us, host_us = [], 0.0, 0.0
        for device, share in enumerate(shares):
            side_base_us, start_us = 0.0, 0.0
            if device == span_device:
                if shexp is not None and shexp_device == device:
                    side_base_us = self.in_span_us(shexp, device)
            elif shexp is not None and shexp_device == device:
                side_base_us = self.component_us(shexp, device) - cpu.region_us
            elif share.mean:
                start_us = ask_us + self.speeds.devices[device].experts.latency_us
            else:
                continue
            some_here = -math.expm1(share.log_none)
            if device != span_device and share.mean:
                host_us += some_here * self.speeds.devices[device].host_us
            if span_device is None:
                cut_us = max(cut_us, self._cut_us[device])
            sides.append(Side(side_base_us, start_us, self.slot_us[device], share.mean, share.variance, some_here))
        # The host starts the groups ahead of the CPU's own work, and fetches what comes of them behind it.
        if base_us:
            base_us += host_us
        start_us = cpu.experts.latency_us + (0.0 if base_us else host_us) + (0.0 if always else asked_us)
        on_cpu = Side(base_us, start_us, self.cpu_expert_us, missed, max(missed_variance, 0.0), some)
        return cut_us + slowest_us(on_cpu, sides)

    def predict(self, device_of: Assignment, owners: Owners) -> Prediction:
        """A whole token.

        device_of : (component, layer) -> device, for those not on the CPU.   owners : who holds each expert.
        """
        spans = self.spans_of(device_of)
        us: dict[str, float] = {}
        for item in self.shape.components:
            if item.name == "shexp":
                continue
            device = device_of.get((item.name, item.layer))
            # The head follows the last layer: on the same card it is the end of the same run.
            layer = self.shape.layers - 1 if item.layer is None else item.layer
            in_span = device is not None and spans.get(layer) == device
            cost_us = self.in_span_us(item, device) if in_span else self.component_us(item, device)
            us[item.name] = us.get(item.name, 0.0) + cost_us
        us["experts"] = 0.0
        sums = {layer: self._no_shares() for layer in (*self.totals, *self._shexp)}
        for expert, owner, (p, variance, log_none) in zip(self.ranked, owners, self.moments, strict=True):
            if owner != ON_CPU:  # in line: ten thousand experts, and dozens of placements are priced
                held = sums[expert.layer][owner]
                held[0] += p
                held[1] += variance
                held[2] += log_none
        for layer, held in sums.items():
            us["experts"] += self._held_us(layer, held, device_of, spans.get(layer))
        return Prediction(us | self._besides_us(spans))

    def _besides_us(self, spans: Mapping[int, int]) -> dict[str, float]:
        """What no component is: of the layers on cards as these take it, all else as the CPU does."""
        matrix = self.speeds.cpu.matrix
        us = {
            "layers": self.shape.layers * self.speeds.cpu.layer_us,
            "rest": matrix.transfer_us(self.shape.rest_bytes),
            "context": matrix.transfer_us(self._kv_bytes) + self.speeds.cpu.state_us(2 * self.shape.state_bytes),
            "token": self.speeds.cpu.token_us,
        }
        for layer, device in spans.items():
            here, there = (self.layer_us(self.mixers[layer].kind, one) for one in (None, device))
            for part in here:
                us[part] += there[part] - here[part]
        us["hops"] = self.hops_us(map(spans.get, range(self.shape.layers))) if spans else 0.0
        # Sums of differences end beside zero, not on it.
        return {part: max(value, 0.0) for part, value in us.items() if value > 1e-9 or part in ("rest", "context")}

    def experts_us(self, layer: int, owners: Owners, ranks: Iterable[int], device_of: Assignment) -> float:
        """One layer's experts.   ranks : where they stand among all."""
        sums = self._no_shares()
        for rank in ranks:
            if owners[rank] != ON_CPU:
                _add(sums[owners[rank]], self.moments[rank])
        return self._held_us(layer, sums, device_of, self.span_at(layer, device_of))

    def _no_shares(self) -> list[list[float]]:
        return [[0.0, 0.0, 0.0] for _ in self.speeds.devices]

    def _held_us(self, layer: int, held: list[list[float]], device_of: Assignment, span_device: int | None) -> float:
        total = self.totals.get(layer, Share())
        shares = [Share(*sums) for sums in held]
        shexp_device = device_of.get(("shexp", layer))
        return self.moe_us(total, shares, self._shexp.get(layer), shexp_device, span_device)


def _mixers(shape: ModelShape) -> dict[int, Mixer]:
    """By layer, in order: attnproj, or dnproj and dnout."""
    parts: dict[int, dict[str, Component]] = {}
    for item in shape.components:
        if item.layer is not None:
            parts.setdefault(item.layer, {})[item.name] = item
    found = {}
    for layer in sorted(parts):
        of = parts[layer]
        if "attnproj" in of:
            found[layer] = Mixer("attnproj", (of["attnproj"],))
        elif "dnproj" in of and "dnout" in of:
            found[layer] = Mixer("dnproj", (of["dnproj"], of["dnout"]))
    return found


def _add(sums: list[float], moments: tuple[float, float, float]) -> None:
    sums[0] += moments[0]
    sums[1] += moments[1]
    sums[2] += moments[2]
