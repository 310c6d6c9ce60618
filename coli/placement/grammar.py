"""The grammar of ``COLI_PLACE``: a list of ``name=spec`` items, read strictly.

A list is obeyed as written, so what cannot be read is an error and never a guess: each error names the item and
shows the legal forms.  The module knows the model's number of layers; it knows no device and no size.
Invariant: ``parse(str(parse(text, n)), n) == parse(text, n)``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

from coli.errors import PlacementError
from coli.placement.components import COMPONENTS

MODES = ("auto", "auto:bytes", "auto:time", "off")
EXPERTS = "experts"
NAMES = (*COMPONENTS, EXPERTS)
LEGAL_FORMS = (
    "legal: auto, auto:bytes, auto:time, off, or items joined by ',': NAME=cpu, NAME=DEV, NAME=DEV:COUNT+DEV:COUNT "
    f"with NAME one of {', '.join(COMPONENTS)} and COUNT model layers in order; experts=cpu, experts=all, experts=DEV, "
    "experts=DEV+DEV; as in lmhead=0,dnproj=0:20+1:20,experts=0"
)

# Plain ASCII digits without leading zeros, and few enough that no number is absurd.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


class Segment(NamedTuple):
    """A run of layers on one device.  ``count`` is None for all layers."""

    device: int
    count: int | None

    def __str__(self) -> str:
        return str(self.device) if self.count is None else f"{self.device}:{self.count}"


@dataclass(frozen=True)
class PlaceItem:
    """One item.  ``where`` is "cpu", "all" (experts only), or the segments in order."""

    name: str
    where: str | tuple[Segment, ...]

    def __str__(self) -> str:
        spec = self.where if isinstance(self.where, str) else "+".join(str(segment) for segment in self.where)
        return f"{self.name}={spec}"

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices it names, each once, in order."""
        return () if isinstance(self.where, str) else tuple(dict.fromkeys(segment.device for segment in self.where))

    def device_of(self, layer: int | None) -> int | None:
        """The device of the component at a layer, None for the CPU.  lmhead has no layer: its first segment holds."""
        if isinstance(self.where, str):
            return None
        end = 0
        for segment in self.where:
            if segment.count is None or layer is None:
                return segment.device
            end += segment.count
            if layer < end:
                return segment.device
        return None


@dataclass(frozen=True)
class PlaceList:
    """A parsed list.  ``str()`` gives the text again."""

    items: tuple[PlaceItem, ...]
    layers: int

    def __str__(self) -> str:
        return ",".join(str(item) for item in self.items)

    def item(self, name: str) -> PlaceItem | None:
        """The item of that name, None where the list has none."""
        return next((item for item in self.items if item.name == name), None)

    def device_of(self, name: str, layer: int | None) -> int | None:
        """The device of a component, None for the CPU; what the list does not name stays there."""
        item = self.item(name)
        return None if item is None else item.device_of(layer)

    def expert_devices(self, n_devices: int) -> tuple[int, ...]:
        """The devices that hold experts; unnamed experts fill what is left on every one."""
        item = self.item(EXPERTS)
        if item is None or item.where == "all":
            return tuple(range(n_devices))
        return tuple(sorted(item.devices))


def parse(text: str, layers: int) -> PlaceList:
    """Read a list for a model of ``layers`` layers.

    Raises PlacementError naming the item, with the legal forms.
    """
    if not isinstance(text, str):
        raise PlacementError(f"COLI_PLACE: expected text, found {text!r}; {LEGAL_FORMS}")
    if not text:
        raise PlacementError(f"COLI_PLACE: an empty list places nothing; {LEGAL_FORMS}")
    items: dict[str, PlaceItem] = {}
    for position, written in enumerate(text.split(","), 1):
        if not written:
            raise PlacementError(f"COLI_PLACE={text!r}: item {position} is empty; {LEGAL_FORMS}")
        name, equals, spec = written.partition("=")
        if not equals:
            hint = f"{written} stands alone, not in a list" if written in MODES else "it has no '='"
            raise _error(text, written, hint)
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            raise _error(text, written, f"unknown name {name!r}" + (f" (nearest: {near[0]})" if near else ""))
        if name in items:
            raise _error(text, written, f"{name} is named before, as {str(items[name])!r}")
        read = _experts if name == EXPERTS else _segments
        items[name] = PlaceItem(name, read(text, written, spec, layers))
    return PlaceList(tuple(items.values()), layers)


def _segments(text: str, written: str, spec: str, layers: int) -> str | tuple[Segment, ...]:
    if spec == "cpu":
        return spec
    parts = spec.split("+")
    segments = []
    for part in parts:
        device, colon, count = part.partition(":")
        if colon:
            segments.append(Segment(_device(text, written, device), _layer_count(text, written, count)))
        elif len(parts) > 1:
            raise _error(text, written, f"segment {part!r} has no count of layers")
        else:
            segments.append(Segment(_device(text, written, device), None))
    total = sum(segment.count or 0 for segment in segments)
    if total > layers:
        raise _error(text, written, f"its counts add up to {total} layers, the model has {layers}")
    return tuple(segments)


def _experts(text: str, written: str, spec: str, layers: int) -> str | tuple[Segment, ...]:
    if spec in ("cpu", "all"):
        return spec
    if ":" in spec:
        raise _error(text, written, "experts take no counts")
    devices = [_device(text, written, part) for part in spec.split("+")]
    if len(set(devices)) != len(devices):
        raise _error(text, written, "it names a device twice")
    return tuple(Segment(device, None) for device in devices)


def _device(text: str, written: str, part: str) -> int:
    if not _NUMBER.fullmatch(part):
        raise _error(text, written, f"{part!r} is not a device; expected cpu or an index such as 0")
    return int(part)


def _layer_count(text: str, written: str, part: str) -> int:
    if not _NUMBER.fullmatch(part) or part == "0":
        raise _error(text, written, f"{part!r} is not a count of layers; expected 1 or more")
    return int(part)


def _error(text: str, written: str, what: str) -> PlacementError:
    return PlacementError(f"COLI_PLACE={text!r}: item {written!r}: {what}; {LEGAL_FORMS}")
