"""Automatic placement in time: whatever the cost model predicts to be fastest.

It knows what bytes cannot: a card slower than the CPU, the round trip that a small matrix costs, two unequal cards of
which the slower paces every layer.  The candidates hold every plan that it must not lose to: nothing on a device,
experts alone, the best plan in bytes, each card by itself, experts on one card and trunk on another; besides, what a
search finds for the sets of cards that may hold experts.  All are priced by the same model, layer by layer, and the
fastest is the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from coli.placement.bytesauto import bytes_auto
from coli.placement.cost import CostModel
from coli.placement.decision import NO_DEVICE, NO_GAIN, NO_ROOM, PLACED, SLOWER, Decision
from coli.placement.homes import BY_ROOM, ON_CPU, WITH_LAYER
from coli.placement.timecandidate import Ground, TimedCandidate, key_of
from coli.placement.timelayer import AverageLayer
from coli.placement.timepolish import polished
from coli.placement.timesearch import Search, State

# How many of the searches, the best by their first pass, are finished and priced; how many candidates are polished.
_SEARCHES = 6
_POLISHED = 4
_TRUNK, _POLISH = "trunk on ", ", polished"  # in labels


def time_auto(model: CostModel, rooms: Sequence[int]) -> list[TimedCandidate]:
    """The candidates, the fastest first; of equals the simpler, which is found earlier."""
    return sorted(_candidates(model, rooms), key=lambda one: one.ms)


def _candidates(model: CostModel, rooms: Sequence[int]) -> list[TimedCandidate]:
    """All candidates; those of a machine with any one of the devices are among them, found as they are found there."""
    devices = tuple(range(len(rooms)))
    ground, layer = Ground(model, rooms, devices), AverageLayer(model)
    made = [ground.priced("nothing on a device", {}, (), BY_ROOM)]
    if not devices:
        return made
    if len(devices) > 1:
        for device in devices:
            made += [_of_device(one, device) for one in _candidates(model.of_device(device), [rooms[device]])[1:]]
    made.append(ground.priced("off", {}, devices, BY_ROOM))
    by_bytes = bytes_auto(model.shape, rooms, model.ranked)[0]
    device_of = {(d.component, d.layer): d.device for d in by_bytes.decisions if d.device is not None}
    made.append(ground.priced("bytes", device_of, devices, BY_ROOM))
    made += _searched(ground, layer)
    # From different expert cards, or all would end in one place.
    starts: dict[tuple, TimedCandidate] = {}
    for one in sorted(made, key=lambda one: one.ms):
        starts.setdefault((one.experts, one.dealing), one)
    for start in list(starts.values())[:_POLISHED]:
        end = polished(ground, start)
        if end is not start:
            made.append(end)
    return made


def _of_device(alone: TimedCandidate, device: int) -> TimedCandidate:
    """A candidate of a machine with one device, on a machine that has more.  Those are idle, and it takes as long."""
    experts = tuple(device for _ in alone.experts)
    if alone.label.startswith(_TRUNK):
        trunk = (device,) if alone.device_of else ()
        label = _label(trunk, experts, alone.dealing) + _POLISH * alone.label.endswith(_POLISH)
    else:
        label = f"device {device}: {alone.label}"
    return replace(
        alone,
        label=label,
        device_of=dict.fromkeys(alone.device_of, device),
        experts=experts,
        owners=[ON_CPU if owner == ON_CPU else device for owner in alone.owners],
    )


def _searched(ground: Ground, layer: AverageLayer) -> Iterator[TimedCandidate]:
    """Experts on one card and trunk on another, for all such pairs; whole layers split; the best of all together."""

    def finished(search: Search, state: State) -> TimedCandidate:
        search.improve(state)
        device_of = search.assignment(state)
        # Where the trunk is, not where it might have been.
        label = _label(tuple(sorted(set(device_of.values()))), search.experts, search.dealing)
        return ground.priced(label, device_of, search.experts, search.dealing)

    for experts, trunk in permutations(ground.fit, 2):
        search = Search(ground.model, layer, ground.rooms, (trunk,), (experts,), BY_ROOM)
        yield finished(search, search.greedy())
        everything = {key_of(item): trunk for item in ground.model.shape.components}
        if min(ground.left(everything)) >= 0:
            label = f"{_label((trunk,), (experts,), BY_ROOM)}, the whole trunk"  # what a list would say
            yield ground.priced(label, everything, (experts,), BY_ROOM)
    spanning = tuple(i for i in ground.fit if ground.model.speeds.devices[i].span is not None)
    if len(spanning) > 1:
        search = Search(ground.model, layer, ground.rooms, spanning, spanning, WITH_LAYER)
        made = finished(search, search.split())
        takers = tuple(sorted({*ground.model.spans_of(made.device_of).values()}))
        if len(takers) > 1:
            made = replace(made, label=f"whole layers split over {_names(takers)}, experts {WITH_LAYER}")
        yield made
    begun = []
    for experts in ground.expert_sets():
        state = None
        for dealing in ground.dealings(experts):
            search = Search(ground.model, layer, ground.rooms, ground.fit, experts, dealing)
            state = search.greedy() if state is None else state
            begun.append((search.us(state), len(begun), search, state))
    for _, _, search, state in sorted(begun)[:_SEARCHES]:
        yield finished(search, [list(held) for held in state])


def _label(trunk: tuple[int, ...], experts: tuple[int, ...], dealing: str) -> str:
    return f"{_TRUNK}{_names(trunk)}, experts on {_names(experts)}" + ("" if dealing == BY_ROOM else f" {dealing}")


def _names(devices: tuple[int, ...]) -> str:
    return "+".join(str(device) for device in devices) or "the CPU"


def decisions_of(model: CostModel, rooms: Sequence[int], chosen: TimedCandidate) -> tuple[Decision, ...]:
    """The verdicts of a candidate, with what each component takes alone on the CPU and on its device (or the best).

    In a layer that its device takes whole that is without a way there and back.
    """
    left = list(rooms)
    spans = model.spans_of(chosen.device_of)
    decisions = []
    for item in model.shape.components:
        device = chosen.device_of.get((item.name, item.layer))
        cpu_us = model.component_us(item, None)
        us, asked = min(((model.component_us(item, i), i) for i in range(len(rooms))), default=(cpu_us, None))
        if device is not None:
            before, left[device] = left[device], left[device] - item.bytes
            layer = model.shape.layers - 1 if item.layer is None else item.layer
            in_span = spans.get(layer) == device
            us = model.in_span_us(item, device) if in_span else model.component_us(item, device)
            decisions.append(Decision(*item, device, PLACED, device, 0.0, 0, before, left[device], cpu_us, us))
        elif asked is None:
            decisions.append(Decision.on_cpu(item, NO_DEVICE))
        else:
            reason = SLOWER if us >= cpu_us else NO_ROOM if item.bytes > rooms[asked] else NO_GAIN
            decisions.append(Decision(*item, None, reason, asked, 0.0, 0, left[asked], left[asked], cpu_us, us))
    return tuple(decisions)
