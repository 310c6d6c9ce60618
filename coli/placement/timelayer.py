"""What the search in time moves and counts with: units of the trunk, and a layer that is the average of all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from coli.placement.components import Component
from coli.placement.cost import CostModel, Share
from coli.placement.homes import BY_ROOM, BY_SPEED, WITH_LAYER


class Unit(NamedTuple):
    """What is placed together: a component, or the projections of a layer and its shared expert.

    name : the first component's.   layer : None for lmhead.
    beside : the shared expert among the parts, where it works beside routed experts and not before them.
    """

    name: str
    layer: int | None
    parts: tuple[Component, ...]
    beside: Component | None

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(part.bytes for part in self.parts)


def units_of(model: CostModel) -> list[Unit]:
    """All components, in the order of the offers; those of a layer together where a card takes whole layers."""
    mixers = model.mixers if model.has_spans else {}
    shexp = {item.layer: item for item in model.shape.components if item.name == "shexp"}
    made = []
    for item in model.shape.components:
        mixer = mixers.get(item.layer)
        if mixer is not None and item.name != mixer.kind:
            continue  # it goes with the first
        parts = (item,) if mixer is None else mixer.parts
        if mixer is not None and item.layer in shexp:
            parts = (*parts, shexp[item.layer])
        last = parts[-1]
        beside = last if last.name == "shexp" and last.layer in model.totals else None
        made.append(Unit(item.name, item.layer, parts, beside))
    return made


class AverageLayer:
    """The experts' time as a function of slots, for a layer that has the average of all layers' experts."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self.n_layers = len(model.totals)
        # Of the hottest n: means, variances and log_nones added up.
        columns = zip(*model.moments, strict=True) if model.moments else ((), (), ())
        self._prefix = [list(accumulate(column, initial=0.0)) for column in columns]
        self._total = self._share(len(model.ranked), 1.0)

    def _share(self, hottest: int, fraction: float) -> Share:
        n = max(self.n_layers, 1)
        return Share(*(column[hottest] * fraction / n for column in self._prefix))

    def us(
        self,
        slots: Sequence[int],
        dealing: str,
        shexp: Component | None,
        shexp_device: int | None,
        span_device: int | None = None,
        whole: Sequence[int] = (),
    ) -> float:
        """Time of one layer's experts.

        dealing : one of homes.DEALINGS.   span_device : the card that takes the layer whole.
        whole : how many layers each device takes whole.
        """
        n = len(self._model.ranked)
        held = min(sum(slots), n)
        if not held:
            shares = [Share()] * len(slots)
        elif dealing == WITH_LAYER:
            shares = self._with_layer(slots, span_device, whole)
        elif dealing != BY_ROOM:
            loads = self._loads(slots, held)
            scale = 1.0 if dealing == BY_SPEED else self._scale(loads, shexp, shexp_device, span_device)
            hits = sum(loads)
            shares = [self._share(held, scale * load / hits) for load in loads]
        elif max(slots) >= n:
            roomiest = slots.index(max(slots))
            shares = [self._total if i == roomiest else Share() for i in range(len(slots))]
        else:
            shares = [self._share(held, count / sum(slots)) for count in slots]
        return self._model.moe_us(self._total, shares, shexp, shexp_device, span_device)

    def _with_layer(self, slots: Sequence[int], span_device: int | None, whole: Sequence[int]) -> list[Share]:
        """The hottest of the layers that each card takes whole; other layers have the slots that these leave."""
        n, n_layers = len(self._model.ranked), max(self.n_layers, 1)
        if span_device is not None:
            hottest = min(slots[span_device] * n_layers // whole[span_device], n)
            return [self._share(hottest, 1.0) if i == span_device else Share() for i in range(len(slots))]
        left = [max(count - n * of // n_layers, 0) for count, of in zip(slots, whole, strict=True)]
        if not any(left):
            return [Share()] * len(slots)
        hottest = min(sum(left) * n_layers // max(n_layers - sum(whole), 1), n)
        return [self._share(hottest, count / sum(left)) for count in left]

    def _loads(self, slots: Sequence[int], held: int) -> list[float]:
        """Experts chosen on each device, by speed, but no more than the hottest that fill its slots."""
        slot_us = self._model.slot_us
        loads = [0.0] * len(slots)
        free = {i for i, count in enumerate(slots) if count}
        most = {i: self._share(min(slots[i], held), 1.0).mean for i in free}
        rest = self._share(held, 1.0).mean
        while free:
            speed = sum(1 / slot_us[i] for i in free)
            full = {i for i in free if rest / slot_us[i] / speed >= most[i]}
            if not full:
                for i in free:
                    loads[i] = rest / slot_us[i] / speed
                break
            for i in full:
                loads[i] = most[i]
                rest -= most[i]
            free -= full
        return loads

    def _scale(
        self, loads: Sequence[float], shexp: Component | None, shexp_device: int | None, span_device: int | None
    ) -> float:
        """The part of the loads with which no device takes longer than the CPU with all that is left to it."""
        model = self._model
        cpu_us = self._total.mean * model.cpu_expert_us
        if shexp is not None and shexp_device is None:
            cpu_us += model.component_us(shexp, None)
        if span_device is not None:
            cpu_us += model.speeds.devices[span_device].span.ask_us
        scale = 1.0
        for i, load in enumerate(loads):
            if load:
                wait_us = 0.0 if i == span_device else model.speeds.devices[i].experts.latency_us
                even = (cpu_us - wait_us) / (load * model.slot_us[i] + sum(loads) * model.cpu_expert_us)
                scale = max(0.0, min(scale, even))
        return scale
