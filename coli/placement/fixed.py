"""Placements that are given and not chosen: a list, obeyed as written, and off.

Nothing here is priced.  A list that cannot be is refused before a byte is moved, with the device, the part that does
not fit, the sum, and one change that would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from coli.errors import PlacementError
from coli.placement.components import Component, ModelShape
from coli.placement.decision import LISTED, NOT_LISTED, OFF, Decision
from coli.placement.facts import DeviceFacts, device_label
from coli.placement.grammar import EXPERTS, LEGAL_FORMS, PlaceItem, PlaceList, Segment


def decide_off(shape: ModelShape) -> tuple[Decision, ...]:
    """Every component on the CPU; the devices are the experts'."""
    return tuple(Decision.on_cpu(item, OFF) for item in shape.components)


def decide_list(shape: ModelShape, devices: Sequence[DeviceFacts], place: PlaceList) -> tuple[Decision, ...]:
    """The list's verdicts.  Raises PlacementError where it names a device that is not there, or does not fit."""
    for item in place.items:
        for device in item.devices:
            if device >= len(devices):
                known = ", ".join(device_label(i, facts) for i, facts in enumerate(devices)) or "none"
                raise PlacementError(
                    f"COLI_PLACE: item '{item}': there is no device {device}; devices: {known}; {LEGAL_FORMS}"
                )
    left = [device.allowance_bytes for device in devices]
    decisions = []
    for item in shape.components:
        device = place.device_of(item.name, item.layer)
        if device is None:
            decisions.append(Decision.on_cpu(item, LISTED if place.item(item.name) else NOT_LISTED))
            continue
        if item.bytes > left[device]:
            raise PlacementError(_refusal(shape, devices, place, item, device, left[device]))
        before, left[device] = left[device], left[device] - item.bytes
        decisions.append(Decision(*item, device, LISTED, device, 0.0, 0, before, left[device]))
    return tuple(decisions)


def _needs(shape: ModelShape, place: PlaceList, n_devices: int) -> list[int]:
    """Bytes that a list puts on each device."""
    needs = [0] * n_devices
    for item in shape.components:
        device = place.device_of(item.name, item.layer)
        if device is not None:
            needs[device] += item.bytes
    return needs


def _refusal(
    shape: ModelShape, devices: Sequence[DeviceFacts], place: PlaceList, item: Component, device: int, left: int
) -> str:
    facts = devices[device]
    need = _needs(shape, place, len(devices))[device]
    held = f"{facts.free_bytes:,} free less {facts.reserve_bytes:,} reserve"
    if facts.runtime_bytes or facts.staging_bytes or facts.layer_bytes:
        held += f", {facts.runtime_bytes:,} runtime, {facts.staging_bytes:,} staging"
        held += f" and {facts.layer_bytes:,} for the layers"
    return (
        f"COLI_PLACE={str(place)!r}: {item.label} does not fit on device {device_label(device, facts)}: it needs "
        f"{item.bytes:,} bytes, {left:,} are left there; the list puts {need:,} bytes on it, "
        f"{facts.allowance_bytes:,} are available ({held}); {_change(shape, devices, place, device)}"
    )


def _change(shape: ModelShape, devices: Sequence[DeviceFacts], place: PlaceList, device: int) -> str:
    """The change of one item that fits and keeps most on the device."""
    allowances = [facts.allowance_bytes for facts in devices]
    best, kept = None, -1
    for old, new in _smaller(place, device):
        items = tuple(new if item is old else item for item in place.items)
        needs = _needs(shape, replace(place, items=items), len(devices))
        fits = all(need <= allowance for need, allowance in zip(needs, allowances, strict=True))
        if fits and needs[device] > kept:
            best, kept = f"'{new}' instead of '{old}' would fit", needs[device]
    return best or "no single item that is changed makes it fit: 'auto' would"


def _smaller(place: PlaceList, device: int) -> Iterator[tuple[PlaceItem, PlaceItem]]:
    """Every item that names the device, with less of it there: fewer layers, or none."""
    for item in place.items:
        if item.name == EXPERTS or device not in item.devices:
            continue
        # Counts are layers in order: only the last segment can shrink without moving another.
        *first, last = item.where
        if item.name != "lmhead" and last.device == device:
            for count in range((last.count or place.layers) - 1, 0, -1):
                yield item, PlaceItem(item.name, (*first, Segment(device, count)))
            if first:
                yield item, PlaceItem(item.name, tuple(first))
        yield item, PlaceItem(item.name, "cpu")
