"""What was decided about one component, with the numbers that decided it: the record behind every ``[place]`` line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from coli.placement.components import Component

# Why a component lies where it lies.
PLACED = "placed"
NO_ROOM = "no room"
EXPERTS_WORTH_MORE = "experts worth more"
WITHHELD = "withheld"
SLOWER = "slower there"
NO_GAIN = "no gain"
LISTED = "listed"
NOT_LISTED = "not listed"
OFF = "off"
NO_DEVICE = "no device"


@dataclass(frozen=True)
class Decision:
    """A verdict.

    component, layer, bytes : what was offered.   device : its index, None for the CPU.   reason : one of the above.
    asked : the device whose room was looked at, None where none was.
    experts_per_byte : bytes saved that the experts lose (or would lose), for each byte; the component's own is 1.
    displaced : how many of that device's experts these are.
    room_before, room_after : bytes left on ``asked`` before and after.
    cpu_us, device_us : what it takes alone on the CPU and on ``asked``; None where bytes decided.
    """

    component: str
    layer: int | None
    bytes: int
    device: int | None
    reason: str
    asked: int | None = None
    experts_per_byte: float = 0.0
    displaced: int = 0
    room_before: int = 0
    room_after: int = 0
    cpu_us: float | None = None
    device_us: float | None = None

    @classmethod
    def on_cpu(cls, item: Component, reason: str) -> Decision:
        """A component that no device was asked about."""
        return cls(item.name, item.layer, item.bytes, None, reason)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON types."""
        return asdict(self)
