"""The search for a fast trunk: greedy, then moves and swaps, on an average layer.

What is placed is a unit: a component, or, where a card takes whole layers, the projections of one layer together.
Units of one kind and size are alike, so a state says how many of each lie where; which layers these are follows from
an order of the devices, in runs.  The experts' part is priced for an average layer, so that a step costs microseconds;
what comes out is priced layer by layer by the caller, who keeps it only where it wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coli.placement.components import Component
from coli.placement.cost import CostModel
from coli.placement.homes import slots_of
from coli.placement.timelayer import AverageLayer, Unit, units_of

State = list[list[int]]  # for each group of alike components, how many are on each device

_NOISE = 1e-9  # relative; what is gained has to be more than sums in another order
_ROUNDS = 100  # of improvement; a bound against cycling in the noise, far above what small and large models took


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
        groups: dict[tuple[str, int, bool], list[Unit]] = {}
        for unit in units_of(model):
            groups.setdefault((unit.name, unit.bytes, unit.beside is not None), []).append(unit)
        self._groups = list(groups.values())
        self._bytes = [units[0].bytes for units in self._groups]
        places = (None, *range(len(rooms)))
        self._alone_us = [{place: self._unit_us(units[0], place) for place in places} for units in self._groups]
        self._head = next((g for g, units in enumerate(self._groups) if units[0].name == "lmhead"), None)
        # The groups whose units are layers that may be whole, and for each such layer, in order, which group it is of.
        self._whole = {g for g, units in enumerate(self._groups) if model.has_spans and units[0].layer in model.mixers}
        self._taker = {
            (g, place): place if g in self._whole and model.span(place, units[0].name) is not None else None
            for g, units in enumerate(self._groups)
            for place in places
        }
        group_of = {unit.layer: g for g in self._whole for unit in self._groups[g]}
        self._layers = [(layer, group_of[layer]) for layer in sorted(group_of)]

    def greedy(self) -> State:
        """Place what saves most for each byte, as many alike ones as fit, while it saves time."""
        state = [[0] * len(self._rooms) for _ in self._groups]
        left = list(self._rooms)
        now = self.us(state)
        while True:
            best, best_rate = None, 0.0
            for g, units in enumerate(self._groups):
                size = self._bytes[g]
                waiting = len(units) - sum(state[g])
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
            left[device] -= count * self._bytes[g]

    def split(self) -> State:
        """Whole layers on all devices, in proportion to their rooms; the shared experts with them, the head last."""
        total = sum(self._rooms[device] for device in self.trunk)
        state = [[0] * len(self._rooms) for _ in self._groups]
        left = list(self._rooms)
        for g, units in enumerate(self._groups):
            if g == self._head:
                continue
            bounds, share = [0], 0
            for device in self.trunk:
                share += self._rooms[device]
                bounds.append(round(len(units) * share / total) if total else 0)
            for device, first, last in zip(self.trunk, bounds, bounds[1:], strict=False):
                state[g][device] = min(last - first, left[device] // self._bytes[g])
                left[device] -= state[g][device] * self._bytes[g]
        last = self.trunk[-1]
        if self._head is not None and self._bytes[self._head] <= left[last]:
            state[self._head][last] = 1
        return state

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

    def _unit_us(self, unit: Unit, device: int | None) -> float:
        """A unit alone, without what it has beside experts; what a layer takes besides goes with its projections."""
        model = self._model
        parts = [part for part in unit.parts if part is not unit.beside]
        if not model.has_spans or unit.layer not in model.mixers:
            return sum(model.component_us(part, device) for part in parts)
        if model.span(device, unit.name) is not None:
            us = sum(model.in_span_us(part, device) for part in parts)
            return us + sum(model.layer_us(unit.name, device).values())
        us = sum(model.component_us(part, device) for part in parts)
        return us + sum(model.layer_us(unit.name, None).values())

    def us(self, state: State) -> float:
        """The time of a state; what no state changes is left out.  Infinite where it does not fit."""
        left = list(self._rooms)
        for size, held in zip(self._bytes, state, strict=True):
            for device, count in enumerate(held):
                left[device] -= count * size
        if min(left, default=0) < 0:
            return float("inf")
        slots = slots_of(left, self._model.shape.expert_bytes, self.experts)
        spans, us = self._spans(state)
        whole = [spans.count(device) for device in range(len(left))]
        layers_left = self._layer.n_layers
        known: dict[tuple, float] = {}  # groups of one width differ in nothing but their name

        def layer_us(beside: Component | None, shexp_device: int | None, span_device: int | None) -> float:
            key = beside and beside.bytes, shexp_device, span_device
            if key not in known:
                known[key] = self._layer.us(slots, self.dealing, beside, shexp_device, span_device, whole)
            return known[key]

        for g, (units, held, alone_us) in enumerate(zip(self._groups, state, self._alone_us, strict=True)):
            first = units[0]
            for device, count in ((None, len(units) - sum(held)), *enumerate(held)):
                if not count:
                    continue
                us += count * alone_us[device]
                if first.beside is None and not (g in self._whole and first.layer in self._model.totals):
                    continue
                layers_left -= count
                shexp_device = None if first.beside is None else device
                us += count * layer_us(first.beside, shexp_device, self._taker[g, device])
        if layers_left:
            us += layers_left * layer_us(None, None, None)
        return us

    def _spans(self, state: State) -> tuple[list[int | None], float]:
        """Of each layer the card that takes it whole; the time of the ways there, less the head's if it follows."""
        if not self._layers:
            return [], 0.0
        model = self._model
        spans = [self._taker[g, device] for device, (_, g) in zip(self._where(state), self._layers, strict=True)]
        us = model.hops_us(spans)
        if self._head is not None and spans[-1] is not None and state[self._head][spans[-1]]:
            head = self._groups[self._head][0].parts[0]
            us += model.in_span_us(head, spans[-1]) - self._alone_us[self._head][spans[-1]]
        return spans, us

    def _where(self, state: State) -> list[int | None]:
        """The device of each whole layer: first the CPU's, then the devices in order, the head's last."""
        order: list[int | None] = [None, *range(len(self._rooms))]
        if self._head is not None and any(state[self._head]):
            last = next(device for device, count in enumerate(state[self._head]) if count)
            order.remove(last)
            order.append(last)
        queues = {}
        for g in self._whole:
            held = state[g]
            queues[g] = iter(
                [
                    device
                    for device in order
                    for _ in range(len(self._groups[g]) - sum(held) if device is None else held[device])
                ]
            )
        return [next(queues[g]) for _, g in self._layers]

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
        for g, units in enumerate(self._groups):
            held = {None: len(units) - sum(state[g])} | {device: state[g][device] for device in self.trunk}
            for source, count in held.items():
                for target in held:
                    if source == target:
                        continue
                    for some in sorted({count, count // 2, min(count, 1)} - {0}, reverse=True):
                        change = [(g, source, -some)] if source is not None else []
                        yield change + ([(g, target, some)] if target is not None else [])

    def assignment(self, state: State) -> dict[tuple[str, int | None], int]:
        """(component, layer) -> device, in runs of layers: so the matrices of a layer mostly lie on one device."""
        placed: dict[tuple[str, int | None], int] = {}
        if self._layers:
            at = dict(zip((layer for layer, _ in self._layers), self._where(state), strict=True))
            for g in self._whole:
                for unit in self._groups[g]:
                    if at[unit.layer] is not None:
                        placed |= {(part.name, part.layer): at[unit.layer] for part in unit.parts}
        for g, (units, held) in enumerate(zip(self._groups, state, strict=True)):
            if g in self._whole:
                continue
            waiting = iter(units)
            for device, count in enumerate(held):
                for _ in range(count):
                    placed |= {(part.name, part.layer): device for part in next(waiting).parts}
        return placed
