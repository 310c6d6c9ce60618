"""One way to place trunk and experts, priced, and the ground on which such ways are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from coli.placement.components import Component
from coli.placement.cost import Assignment, CostModel, Prediction
from coli.placement.homes import (
    BESIDE_CPU,
    BY_ROOM,
    BY_SPEED,
    ON_CPU,
    WITH_LAYER,
    Owners,
    owners_by_room,
    slots_of,
)

Key = tuple[str, int | None]  # (component, layer)

# A card that reads so many times slower than the CPU is not searched.  By the model it still gains a little where it
# runs beside the CPU, but less than one late round trip costs; with all the experts it can hold, it only slows.
_TOO_SLOW = 2.0


@dataclass(frozen=True)
class TimedCandidate:
    """One way to place trunk and experts, priced.

    experts : the devices that may hold experts.   dealing : how they are dealt to these, one of homes.DEALINGS.
    owners : who holds each expert, hottest first.
    """

    label: str
    device_of: Assignment
    experts: tuple[int, ...]
    dealing: str
    owners: Owners = field(repr=False)
    prediction: Prediction

    @property
    def ms(self) -> float:
        """Milliseconds of a token."""
        return self.prediction.ms_per_token

    @property
    def used_devices(self) -> tuple[int, ...]:
        """The devices that hold a component or an expert."""
        return tuple(sorted({*self.device_of.values(), *self.owners} - {ON_CPU}))


class Ground:
    """One model on one machine, of which only some devices may be used.

    rooms : bytes of every device of the machine.   devices : those that may be used.
    fit : those of them that are fast enough to be searched.
    """

    def __init__(self, model: CostModel, rooms: Sequence[int], devices: tuple[int, ...]) -> None:
        self.model = model
        self.rooms = rooms
        self.devices = devices
        self.fit = tuple(i for i in devices if model.slowness(i) < _TOO_SLOW)

    def expert_sets(self) -> list[tuple[int, ...]]:
        """Sets of cards that may hold experts: none; of up to three cards all sets, of more the fastest or roomiest."""
        if len(self.devices) <= 3:
            sizes = range(len(self.devices) + 1)
            return [experts for size in sizes for experts in combinations(self.devices, size)]
        by_speed = sorted(self.devices, key=lambda i: self.model.slot_us[i])
        by_room = sorted(self.devices, key=lambda i: -self.rooms[i])
        sizes = range(len(self.devices) + 1)
        return list(dict.fromkeys(tuple(sorted(order[:size])) for size in sizes for order in (by_speed, by_room)))

    def dealings(self, experts: tuple[int, ...]) -> tuple[str, ...]:
        """The ways to deal experts to these cards that differ."""
        if not experts or not set(experts) <= set(self.fit):
            return (BY_ROOM,)
        ways = (BY_ROOM, BESIDE_CPU) if len(experts) == 1 else (BY_ROOM, BY_SPEED, BESIDE_CPU)
        return (*ways, WITH_LAYER) if self._spanning.intersection(experts) else ways

    @cached_property
    def _spanning(self) -> frozenset[int]:
        """The cards that take whole layers."""
        return frozenset(i for i in self.devices if self.model.speeds.devices[i].span is not None)

    def left(self, device_of: Assignment) -> list[int]:
        """Bytes that an assignment leaves on each device; negative where it does not fit."""
        left = list(self.rooms)
        for item in self.model.shape.components:
            device = device_of.get(key_of(item))
            if device is not None:
                left[device] -= item.bytes
        return left

    def slots(self, device_of: Assignment, experts: tuple[int, ...]) -> list[int]:
        """Expert slots that an assignment leaves."""
        return slots_of(self.left(device_of), self.model.shape.expert_bytes, experts)

    def priced(self, label: str, device_of: Assignment, experts: tuple[int, ...], dealing: str) -> TimedCandidate:
        """The candidate, its experts dealt."""
        slots = self.slots(device_of, experts)
        owners = dealt(self.model, slots, device_of, dealing)
        return TimedCandidate(label, device_of, experts, dealing, owners, self.model.predict(device_of, owners))


def dealt(model: CostModel, slots: Sequence[int], device_of: Assignment, dealing: str) -> Owners:
    """Who holds each expert.   slots : of each device.   dealing : one of homes.DEALINGS."""
    if dealing == BY_ROOM:
        return owners_by_room(len(model.ranked), slots)
    if dealing == WITH_LAYER:
        return owners_with_layers(model, slots, device_of)
    return owners_by_speed(model, slots, device_of, spare_cpu=dealing == BY_SPEED)


def key_of(item: Component) -> Key:
    """How assignments name a component."""
    return item.name, item.layer


def owners_with_layers(model: CostModel, slots: Sequence[int], device_of: Assignment) -> Owners:
    """The hottest first, each to the card that takes its layer whole; then by speed what slots are left."""
    spans = model.spans_of(device_of)
    free = list(slots)
    owners = []
    for expert in model.ranked:
        home = spans.get(expert.layer, ON_CPU)
        if home != ON_CPU and free[home]:
            free[home] -= 1
        else:
            home = ON_CPU
        owners.append(home)
    if not any(free) or ON_CPU not in owners:
        return owners
    return owners_by_speed(model, free, device_of, spare_cpu=True, held=owners)


def owners_by_speed(
    model: CostModel, slots: Sequence[int], device_of: Assignment, *, spare_cpu: bool, held: Owners | None = None
) -> Owners:
    """The hottest experts first, each to the device that is done earliest with its layer.

    spare_cpu : as many as there are slots; otherwise none to a device that would then take longer than the CPU with
        what it still has of the layer: that stays on the CPU, and the slots are left to other layers.
    held : who holds some already; the slots are those that are left.
    """
    shexp = {item.layer: item for item in model.shape.components if item.name == "shexp"}
    spans = model.spans_of(device_of)
    busy: dict[int, list[float]] = {}
    cpu_us: dict[int, float] = {}
    for layer, total in model.totals.items():
        cpu_us[layer] = total.mean * model.cpu_expert_us
        times = busy[layer] = [device.experts.latency_us for device in model.speeds.devices]
        span = spans.get(layer)
        if span is not None:  # all others begin when they are asked
            ask_us = model.speeds.devices[span].span.ask_us
            times[:] = [us + ask_us for us in times]
            times[span] = 0.0
            cpu_us[layer] += ask_us
        if layer in shexp:
            device = device_of.get(("shexp", layer))
            if device is None:
                cpu_us[layer] += model.component_us(shexp[layer], None)
            elif device == span:
                times[device] += model.in_span_us(shexp[layer], device)
            else:
                times[device] = model.component_us(shexp[layer], device)
    free, slot_us = list(slots), model.slot_us
    usable = [i for i, count in enumerate(free) if count]
    owners = []
    for rank, expert in enumerate(model.ranked):
        times = busy[expert.layer]
        if held is not None and held[rank] != ON_CPU:
            owner = held[rank]
            times[owner] += expert.p * model.slot_us[owner]
            cpu_us[expert.layer] -= expert.p * model.cpu_expert_us
            owners.append(owner)
            continue
        done_us, owner = float("inf"), ON_CPU
        for i in usable:
            us = times[i] + expert.p * slot_us[i]
            if us < done_us:
                done_us, owner = us, i
        if owner != ON_CPU and done_us > cpu_us[expert.layer] and not spare_cpu:
            owner = ON_CPU
        owners.append(owner)
        if owner == ON_CPU:
            continue
        times[owner] = done_us
        cpu_us[expert.layer] -= expert.p * model.cpu_expert_us
        free[owner] -= 1
        if not free[owner]:
            usable.remove(owner)
    return owners
