"""The search for a fast trunk: greedy, then moves and swaps, on an average layer.

Components of one kind and size are alike, so a state says how many of each lie where; which layers these are follows
at the end, in runs.  The experts' part is priced for an average layer, so that a step costs microseconds; what comes
out is priced layer by layer by the caller, who keeps it only where it wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from coli.placement.components import Component
from coli.placement.cost import CostModel, Share
from coli.placement.homes import BY_ROOM, BY_SPEED, slots_of

State = list[list[int]]  # for each group of alike components, how many are on each device

_NOISE = 1e-9  # relative; what is gained has to be more than sums in another order
_ROUNDS = 100  # of improvement; a bound against cycling in the noise, far above what small and large models took


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

    def us(self, slots: Sequence[int], dealing: str, shexp: Component | None, shexp_device: int | None) -> float:
        """Time of one layer's experts.   dealing : one of homes.DEALINGS."""
        n = len(self._model.ranked)
        held = min(sum(slots), n)
        if not held:
            shares = [Share()] * len(slots)
        elif dealing != BY_ROOM:
            loads = self._loads(slots, held)
            scale = 1.0 if dealing == BY_SPEED else self._scale(loads, shexp, shexp_device)
            hits = sum(loads)
            shares = [self._share(held, scale * load / hits) for load in loads]
        elif max(slots) >= n:
            roomiest = slots.index(max(slots))
            shares = [self._total if i == roomiest else Share() for i in range(len(slots))]
        else:
            shares = [self._share(held, count / sum(slots)) for count in slots]
        return self._model.moe_us(self._total, shares, shexp, shexp_device)

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

    def _scale(self, loads: Sequence[float], shexp: Component | None, shexp_device: int | None) -> float:
        """The part of the loads with which no device takes longer than the CPU with all that is left to it."""
        model = self._model
        cpu_us = self._total.mean * model.cpu_expert_us
        if shexp is not None and shexp_device is None:
            cpu_us += model.component_us(shexp, None)
        scale = 1.0
        for i, load in enumerate(loads):
            if load:
                wait_us = model.speeds.devices[i].experts.latency_us
                even = (cpu_us - wait_us) / (load * model.slot_us[i] + sum(loads) * model.cpu_expert_us)
                scale = max(0.0, min(scale, even))
        return scale


class Search:
    """One search, with the trunk restricted to some devices and the experts to some.

    rooms : bytes of each device.   trunk, experts : the devices that may hold them.
    """

    def __init__(
        self,
        model: CostModel,
        layer: AverageLayer,
        rooms: Sequence[int],
        trunk: Sequence[int],
        experts: Sequence[int],
        dealing: str,
    ) -> None:
        self._model = model
        self._layer = layer
        self._rooms = rooms
        self.trunk = trunk
        self.experts = experts
        self.dealing = dealing
        groups: dict[tuple[str, int, bool], list[Component]] = {}
        for item in model.shape.components:
            # A shared expert beside routed experts is part of their step, not one of its own.
            beside = item.name == "shexp" and item.layer in model.totals
            groups.setdefault((item.name, item.bytes, beside), []).append(item)
        self._groups = list(groups.values())
        self._beside = [beside for _, _, beside in groups]
        self._alone_us = [
            {device: model.component_us(items[0], device) for device in (None, *range(len(rooms)))}
            for items in self._groups
        ]

    def greedy(self) -> State:
        """Place what saves most for each byte, as many alike ones as fit, while it saves time."""
        state = [[0] * len(self._rooms) for _ in self._groups]
        left = list(self._rooms)
        now = self.us(state)
        while True:
            best, best_rate = None, 0.0
            for g, items in enumerate(self._groups):
                size = items[0].bytes
                waiting = len(items) - sum(state[g])
                for device in self.trunk:
                    most = min(waiting, left[device] // size)
                    for count in {most, most // 2, min(most, 1)} - {0}:
                        state[g][device] += count
                        us = self.us(state)
                        state[g][device] -= count
                        rate = (now - us) / (count * size)
                        if rate > best_rate * (1 + _NOISE):
                            best, best_rate = (g, device, count, us), rate
            if best is None:
                return state
            g, device, count, now = best
            state[g][device] += count
            left[device] -= count * self._groups[g][0].bytes

    def improve(self, state: State) -> None:
        """Moves, then swaps, each taken as soon as it saves time, until none does."""
        now = self.us(state)
        for _ in range(_ROUNDS):
            for change in self._changes(state):
                for g, device, count in change:
                    state[g][device] += count
                us = self.us(state)
                if us < now * (1 - _NOISE):
                    now = us
                    break
                for g, device, count in change:
                    state[g][device] -= count
            else:
                return

    def us(self, state: State) -> float:
        """The time of a state; what no state changes is left out.  Infinite where it does not fit."""
        left = list(self._rooms)
        for items, held in zip(self._groups, state, strict=True):
            for device, count in enumerate(held):
                left[device] -= count * items[0].bytes
        if min(left, default=0) < 0:
            return float("inf")
        slots = slots_of(left, self._model.shape.expert_bytes, self.experts)
        us, layers_left = 0.0, self._layer.n_layers
        for items, held, alone_us, beside in zip(self._groups, state, self._alone_us, self._beside, strict=True):
            counts = {None: len(items) - sum(held)} | dict(enumerate(held))
            for device, count in counts.items():
                if not count:
                    continue
                if beside:
                    layers_left -= count
                    us += count * self._layer.us(slots, self.dealing, items[0], device)
                else:
                    us += count * alone_us[device]
        if layers_left:
            us += layers_left * self._layer.us(slots, self.dealing, None, None)
        return us

    def _changes(self, state: State) -> Iterator[list[tuple[int, int, int]]]:
        """All moves, then pairs of them in two groups: of one component, or of many to or from the CPU."""
        moves = list(self._moves(state))
        yield from moves
        small = [move for move in moves if abs(move[0][2]) == 1 or len(move) == 1]
        for i, one in enumerate(small):
            for other in small[i + 1 :]:
                if one[0][0] != other[0][0]:
                    yield one + other

    def _moves(self, state: State) -> Iterator[list[tuple[int, int, int]]]:
        """Of each group, all, half or one: from a device or the CPU to another."""
        for g, items in enumerate(self._groups):
            held = {None: len(items) - sum(state[g])} | {device: state[g][device] for device in self.trunk}
            for source, count in held.items():
                for target in held:
                    if source == target:
                        continue
                    for some in sorted({count, count // 2, min(count, 1)} - {0}, reverse=True):
                        change = [(g, source, -some)] if source is not None else []
                        yield change + ([(g, target, some)] if target is not None else [])

    def assignment(self, state: State) -> dict[tuple[str, int | None], int]:
        """(component, layer) -> device, in runs of layers: so the matrices of a layer mostly lie on one device."""
        placed = {}
        for items, held in zip(self._groups, state, strict=True):
            waiting = iter(items)
            for device, count in enumerate(held):
                for _ in range(count):
                    item = next(waiting)
                    placed[item.name, item.layer] = device
        return placed
