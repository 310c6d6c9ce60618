"""The last word of the search in time, priced layer by layer: for models small enough that layers differ.

The search before it looks at an average layer.  A model with many layers has none that matters, and pricing it takes
long; so the work here is bounded, and a large model gets none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from coli.placement.components import Component
from coli.placement.cost import Assignment, CostModel
from coli.placement.homes import ON_CPU
from coli.placement.timecandidate import Ground, Key, TimedCandidate, key_of

# How many experts may be priced for one start.
_BUDGET = 60_000

_NOISE = 1e-9  # relative; what is gained has to be more than sums in another order


def polished(ground: Ground, start: TimedCandidate) -> TimedCandidate:
    """The start, or what moves of one component, swaps of two, other expert cards and single experts make of it."""
    budget = _BUDGET // (len(ground.model.ranked) + 1)
    if budget < 2 * len(ground.model.shape.components):
        return start
    label = f"{start.label}, polished"
    best, improved = start, True
    while improved:
        improved = False
        for device_of, experts, dealing in _neighbours(ground, best):
            if budget == 0:
                break
            budget -= 1
            made = ground.priced(label, device_of, experts, dealing)
            if made.ms < best.ms * (1 - _NOISE):
                best, improved = made, True
                break
    return _with_experts_moved(ground, best, label)


def _neighbours(ground: Ground, at: TimedCandidate) -> Iterator[tuple[Assignment, tuple[int, ...], str]]:
    for experts in ground.expert_sets():
        for dealing in ground.dealings(experts):
            yield at.device_of, experts, dealing
    if ground.model.has_spans:  # what lies on one card and what lies on another, as a whole
        for one, other in combinations(ground.fit, 2):
            there = {one: other, other: one}
            swapped = {key: there.get(device, device) for key, device in at.device_of.items()}
            if swapped != at.device_of and min(ground.left(swapped)) >= 0:
                yield swapped, at.experts, at.dealing
    items = ground.model.shape.components
    for keys in (*_whole_layers(ground.model), *((key_of(item),) for item in items)):
        for device in (None, *ground.fit):
            if any(device != at.device_of.get(key) for key in keys):
                yield _forced(ground, at.device_of, dict.fromkeys(keys, device)), at.experts, at.dealing
    for one, other in combinations(items, 2):
        here, there = at.device_of.get(key_of(one)), at.device_of.get(key_of(other))
        if here != there:
            swapped = {key_of(one): there, key_of(other): here}
            yield _forced(ground, at.device_of, swapped), at.experts, at.dealing


def _whole_layers(model: CostModel) -> Iterator[tuple[Key, ...]]:
    """What is worth moving together where cards take whole layers: the projections of one, with its shared expert; and
    of all layers before or behind it, so that runs do not break."""
    if not model.has_spans:
        return
    layers = []
    shexp = {item.layer for item in model.shape.components if item.name == "shexp"}
    for layer, mixer in model.mixers.items():
        projections = tuple(key_of(part) for part in mixer.parts)
        layers.append(projections)
        yield projections
        if layer in shexp:
            yield (*projections, ("shexp", layer))
    for i in range(2, len(layers)):
        yield tuple(key for projections in layers[:i] for key in projections)
    for i in range(len(layers) - 1):
        yield tuple(key for projections in layers[i:] for key in projections)


def _forced(ground: Ground, device_of: Assignment, wanted: Mapping[Key, int | None]) -> Assignment:
    """The assignment with some components put where they are wanted, and the others fitted round them.

    What is in the way leaves, the least saving for its bytes first; then everything goes where it saves most and fits.
    """
    made = {key: device for key, device in device_of.items() if key not in wanted}
    made |= {key: device for key, device in wanted.items() if device is not None}
    left = ground.left(made)
    others = [item for item in ground.model.shape.components if key_of(item) not in wanted]
    for device in {*made.values()}:
        there = [item for item in others if made.get(key_of(item)) == device]
        for item in sorted(there, key=lambda item: _rate(ground.model, item, device)):
            if left[device] < 0:
                left[device] += item.bytes
                del made[key_of(item)]
    if min(left) < 0:  # those that are wanted do not fit by themselves
        return device_of
    for item in sorted(others, key=lambda item: -item.bytes):
        now = made.get(key_of(item))
        least = 0.0 if now is None else _rate(ground.model, item, now)
        for device in sorted(ground.fit, key=lambda device: -_rate(ground.model, item, device)):
            if left[device] >= item.bytes and _rate(ground.model, item, device) > least:
                left[device] -= item.bytes
                if now is not None:
                    left[now] += item.bytes
                made[key_of(item)] = device
                break
    return made


def _rate(model: CostModel, item: Component, device: int) -> float:
    """Microseconds that a component saves on a device for each byte: in a whole layer, where the card takes such."""
    whole = item.layer in model.mixers and model.span(device, model.mixers[item.layer].kind) is not None
    there_us = model.in_span_us(item, device) if whole else model.component_us(item, device)
    return (model.component_us(item, None) - there_us) / item.bytes


def _with_experts_moved(ground: Ground, at: TimedCandidate, label: str) -> TimedCandidate:
    """Single experts moved to another card or the CPU, while that saves time and there are slots."""
    model = ground.model
    owners = list(at.owners)
    experts = tuple(sorted({*at.experts, *ground.fit}))
    free = [slots - owners.count(i) for i, slots in enumerate(ground.slots(at.device_of, experts))]
    by_layer: dict[int, list[int]] = {}
    for rank, expert in enumerate(model.ranked):
        by_layer.setdefault(expert.layer, []).append(rank)
    improved = True
    while improved:
        improved = False
        for layer, ranks in by_layer.items():
            now = model.experts_us(layer, owners, ranks, at.device_of)
            for rank in ranks:
                before = owners[rank]
                for owner in (ON_CPU, *(i for i in experts if free[i])):
                    if owner == owners[rank]:
                        continue
                    kept, owners[rank] = owners[rank], owner
                    us = model.experts_us(layer, owners, ranks, at.device_of)
                    if us < now * (1 - _NOISE):
                        now = us
                    else:
                        owners[rank] = kept
                if owners[rank] != before:
                    improved = True
                    for device, change in ((before, 1), (owners[rank], -1)):
                        if device != ON_CPU:
                            free[device] += change
    prediction = model.predict(at.device_of, owners)
    if prediction.ms_per_token >= at.ms:
        return at
    used = tuple(i for i in experts if i in at.experts or i in owners)
    return replace(at, label=label, experts=used, owners=owners, prediction=prediction)
