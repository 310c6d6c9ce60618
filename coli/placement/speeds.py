"""How fast things are: time = latency + bytes / bandwidth, for the CPU and for each card.

Figures come from a probe that was run before, or, coarser, from the facts that a person gives.  Nothing is measured
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coli.errors import PlacementError
from coli.placement.facts import CpuFacts, DeviceFacts

# A round trip to a card where none was measured: one graph, 8 KB up and down, PCIe 5 (docs/cuda.md).
ROUND_TRIP_US = 10.0


@dataclass(frozen=True)
class Speed:
    """A linear cost: ``latency_us`` for each step, then ``gb_s`` (10**9 bytes a second)."""

    gb_s: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.gb_s < float("inf") and 0 <= self.latency_us < float("inf")):
            raise PlacementError(f"a speed of {self.gb_s} GB/s and {self.latency_us} us; expected positive numbers")

    def us(self, n_bytes: float) -> float:
        """Microseconds of one step that reads ``n_bytes``."""
        return self.latency_us + self.transfer_us(n_bytes)

    def transfer_us(self, n_bytes: float) -> float:
        """The part of it that grows with the bytes."""
        return n_bytes / (self.gb_s * 1e3)


@dataclass(frozen=True)
class Speeds:
    """One executor: a single matrix, and a group of routed experts, both with the way there and back."""

    matrix: Speed
    experts: Speed


@dataclass(frozen=True)
class Probe:
    """What was measured on this machine.   devices : in the order of the facts."""

    cpu: Speeds
    devices: tuple[Speeds, ...]


def speeds_of(devices: Sequence[DeviceFacts], cpu: CpuFacts | None, probe: Probe | None) -> Probe | None:
    """The probe's figures, else those of the facts; None where a device or the CPU has none.

    Raises PlacementError where the probe is of another number of devices.
    """
    if probe is not None:
        if len(probe.devices) != len(devices):
            raise PlacementError(f"the probe has {len(probe.devices)} devices, the plan {len(devices)}; probe again")
        return probe
    if cpu is None or cpu.gb_s is None or any(device.gb_s is None for device in devices):
        return None
    made = []
    for device in devices:
        speed = Speed(device.gb_s, ROUND_TRIP_US if device.latency_us is None else device.latency_us)
        made.append(Speeds(speed, speed))
    return Probe(Speeds(Speed(cpu.gb_s), Speed(cpu.gb_s)), tuple(made))
