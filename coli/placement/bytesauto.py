"""Automatic placement in bytes: greedy by room, and the rivals that keep greedy honest.

Greedy offers the components in order; each goes to the device with most room unless the experts it would push out
are worth more.  That is not monotone in the room: a big lm_head that begins to fit may push out what was worth more
together.  So the plan is the best, in bytes saved, of greedy, greedy with one kind of component withheld, and
nothing placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coli.placement.components import COMPONENTS, Component, ModelShape
from coli.placement.decision import EXPERTS_WORTH_MORE, NO_DEVICE, NO_ROOM, OFF, PLACED, WITHHELD, Decision
from coli.placement.price import NOISE_BYTES, Expert, ValueCurve, deal


@dataclass(frozen=True)
class Candidate:
    """One way to place the trunk.

    label : how it was made.   decisions : one a component, in offer order.
    saved_bytes : what it saves of the CPU's reads for a token, experts included.
    """

    label: str
    decisions: tuple[Decision, ...]
    saved_bytes: float = 0.0


def bytes_auto(shape: ModelShape, rooms: Sequence[int], ranked: Sequence[Expert]) -> list[Candidate]:
    """The candidates, the best first; of equals (up to the noise of sums) the one that the module's head names first.

    rooms : bytes of each device.   ranked : all experts, hottest first.
    """
    if not rooms:
        return [Candidate("no device", tuple(Decision.on_cpu(item, NO_DEVICE) for item in shape.components))]
    slot, ratio = shape.expert_bytes, shape.cpu_bytes_ratio
    homes = deal(rooms, len(ranked))
    curves = [
        ValueCurve([expert.p for expert, home in zip(ranked, homes, strict=True) if home == i], slot, ratio)
        for i in range(len(rooms))
    ]
    everything = ValueCurve([expert.p for expert in ranked], slot, ratio)
    total = sum(rooms)

    made = []
    for label, decisions in _candidates(shape, rooms, curves):
        placed_bytes = sum(decision.bytes for decision in decisions if decision.device is not None)
        made.append(Candidate(label, decisions, placed_bytes + everything.value(total - placed_bytes)))
    made += _with_less_room(shape, rooms, curves, max(candidate.saved_bytes for candidate in made))
    best = made[0]
    for candidate in made[1:]:
        if candidate.saved_bytes > best.saved_bytes + NOISE_BYTES:
            best = candidate
    return [best, *(candidate for candidate in made if candidate is not best)]


def _candidates(
    shape: ModelShape, rooms: Sequence[int], curves: Sequence[ValueCurve]
) -> Iterator[tuple[str, tuple[Decision, ...]]]:
    yield "greedy", greedy(shape, rooms, curves)
    for kind in COMPONENTS:
        if any(item.name == kind for item in shape.components):
            yield f"greedy without {kind}", greedy(shape, rooms, curves, withheld=kind)
    yield "off", tuple(Decision.on_cpu(item, OFF) for item in shape.components)


def greedy(
    shape: ModelShape, rooms: Sequence[int], curves: Sequence[ValueCurve], withheld: str | None = None
) -> tuple[Decision, ...]:
    """One pass over the offers, with what room is worth on each device given by its curve."""
    left = list(rooms)
    dnproj: dict[int | None, int] = {}
    decisions = []
    for item in shape.components:
        if item.name == withheld:
            decisions.append(Decision.on_cpu(item, WITHHELD))
            continue
        device = max(range(len(left)), key=lambda i: (left[i], -i))
        # Neighbours on one card may be one step there, which spares a hop.
        if item.name == "dnout" and left[dnproj.get(item.layer, device)] >= item.bytes:
            device = dnproj.get(item.layer, device)
        made = _price(item, device, left[device], curves[device])
        left[device] = made.room_after
        if item.name == "dnproj" and made.device is not None:
            dnproj[item.layer] = device
        decisions.append(made)
    return tuple(decisions)


def _price(item: Component, device: int, room: int, curve: ValueCurve) -> Decision:
    if item.bytes > room:
        return Decision(*item, None, NO_ROOM, device, 0.0, 0, room, room)
    loss = curve.loss(room, item.bytes)
    displaced = curve.residents(room) - curve.residents(room - item.bytes)
    numbers = (device, loss / item.bytes, displaced, room)
    if item.bytes < loss - NOISE_BYTES:
        return Decision(item.name, item.layer, item.bytes, None, EXPERTS_WORTH_MORE, *numbers, room)
    return Decision(item.name, item.layer, item.bytes, device, PLACED, *numbers, room - item.bytes)


def _with_less_room(
    shape: ModelShape, rooms: Sequence[int], curves: Sequence[ValueCurve], best: float
) -> Iterator[Candidate]:
    """What the candidates would be with less room, where that may save more than with all of it.

    Needed for one device and equal experts that are each worth more than the trunk: there an item whose gain is
    just zero is placed half over experts, and shuts out smaller items that a smaller room still took.  Whatever
    was saved with less room can be saved with more, so these are candidates too, and more room never saves less.
    Below the room where even a perfect fill cannot beat the best, nothing is looked at.
    """
    slope = curves[0].slope
    if len(rooms) != 1 or slope is None or slope <= 1:
        return  # up to a slope of 1 an item enters exactly where it fills the room: nothing is ever lost
    curve, full = curves[0], rooms[0]
    room = full
    while True:
        slack = None
        for label, decisions in _candidates(shape, [room], curves):
            placed_bytes = sum(made.bytes for made in decisions if made.device is not None)
            saved_bytes = placed_bytes + curve.value(full - placed_bytes)
            if saved_bytes > best + NOISE_BYTES:
                best = saved_bytes
                yield Candidate(f"{label}, {full - room:,} bytes held back for experts", decisions, saved_bytes)
            for made in decisions:
                if made.device is not None:
                    enough = max(made.bytes, curve.bytes + made.bytes - made.bytes / slope)
                    slack = min(made.room_before - enough, full if slack is None else slack)
        if slack is None:
            return
        room -= max(0, int(slack)) + 1  # the next room in which some candidate decides otherwise
        if room <= curve.bytes or curve.value(curve.bytes) + room - curve.bytes <= best + NOISE_BYTES:
            return
