"""What is known of the machine: one ``DeviceFacts`` a card, ``CpuFacts`` for the host.  Plain numbers; nobody is asked.

A device's position in the list given to ``plan`` is its index everywhere: in lists, lines, tables and results.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from coli.errors import PlacementError

# The kinds of layers that a card may take whole, by the name of their first projection: DeltaNet and attention.
LAYER_KINDS = ("dnproj", "attnproj")


@dataclass(frozen=True)
class DeviceFacts:
    """One card.

    free_bytes : what may be taken now; ``reserve_bytes`` of it stay untouched.
    runtime_bytes, staging_bytes : what the runtime's context and the copy buffers will take of the rest.
    layer_bytes : what layers that it takes whole keep there beside their weights, of which `with_whole_layers` knows.
    uuid, pci_bus_id : its identity, for the lines.
    gb_s : bytes it reads, in GB/s (10**9).   latency_us : one round trip.  None where nothing was measured.
    layer_us : what a whole layer takes there besides reading its weights; None for a card that takes none.
    whole_layers : the kinds that it may take whole, of LAYER_KINDS, if it takes any.

    Raises PlacementError naming the device and the field.
    """

    name: str
    free_bytes: int
    _: KW_ONLY
    reserve_bytes: int = 0
    runtime_bytes: int = 0
    staging_bytes: int = 0
    layer_bytes: int = 0
    uuid: str | None = None
    pci_bus_id: str | None = None
    gb_s: float | None = None
    latency_us: float | None = None
    layer_us: float | None = None
    whole_layers: tuple[str, ...] = LAYER_KINDS

    def __post_init__(self) -> None:
        for field in ("free_bytes", "reserve_bytes", "runtime_bytes", "staging_bytes", "layer_bytes"):
            object.__setattr__(self, field, _bytes(self.name, field, getattr(self, field)))
        _check_speed(self.name, "gb_s", self.gb_s, zero=False)
        _check_speed(self.name, "latency_us", self.latency_us, zero=True)
        _check_speed(self.name, "layer_us", self.layer_us, zero=True)
        if not set(self.whole_layers) <= set(LAYER_KINDS):
            raise PlacementError(f"{self.name}: whole_layers is {self.whole_layers!r}; expected some of {LAYER_KINDS}")

    @classmethod
    def from_device(cls, device: Any, vram: int | str = "auto", *, speeds: bool = False) -> DeviceFacts:
        """The facts of a ``coli.devices`` device, which is asked once, here.

        vram : bytes of it that may be taken, or "auto" for what is free less the default reserve.
        speeds : ask for its speed too, which a card may have to measure.
        """
        free_bytes = device.free_bytes()
        runtime_bytes = getattr(device, "runtime_bytes", 0)
        reserve_bytes = default_reserve_bytes(free_bytes)
        if vram != "auto":
            reserve_bytes = max(0, free_bytes - runtime_bytes - vram)
        return cls(
            device.name,
            free_bytes,
            reserve_bytes=reserve_bytes,
            runtime_bytes=runtime_bytes,
            staging_bytes=getattr(device, "staging_bytes", 0),
            uuid=device.uuid,
            pci_bus_id=device.pci_bus_id,
            whole_layers=LAYER_KINDS if hasattr(device, "mixer") else (),
            gb_s=getattr(device, "gb_s", None) if speeds else None,
            latency_us=getattr(device, "latency_us", None) if speeds else None,
        )

    @property
    def allowance_bytes(self) -> int:
        """What a plan may use for components and experts."""
        held_bytes = self.reserve_bytes + self.runtime_bytes + self.staging_bytes + self.layer_bytes
        return max(0, self.free_bytes - held_bytes)


@dataclass(frozen=True)
class CpuFacts:
    """The host.

    gb_s : what its memory bus gives the engine, in GB/s (10**9).
    free_bytes : memory that a context may take; None where it is not known, and then not checked.
    """

    gb_s: float | None = None
    _: KW_ONLY
    free_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_speed("the CPU", "gb_s", self.gb_s, zero=False)
        if self.free_bytes is not None:
            object.__setattr__(self, "free_bytes", _bytes("the CPU", "free_bytes", self.free_bytes))


def default_reserve_bytes(free_bytes: int) -> int:
    """What stays free on a card unless someone says otherwise: 512 MiB, or a sixteenth of a small one.

    Other programs' windows come and go, and a driver that is out of memory fails in places that cannot be caught.
    """
    return min(512 << 20, free_bytes // 16)


def device_label(index: int, device: DeviceFacts) -> str:
    """``0 (RTX 3070, GPU-1f2e3d4c)``: index, name and identity of one card, never apart."""
    identity = device.uuid[:12] if device.uuid else device.pci_bus_id
    return f"{index} ({device.name}, {identity})" if identity else f"{index} ({device.name})"


def _bytes(owner: str, field: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 6.5 * 2**30 is a float in Python
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlacementError(f"{owner}: {field} is {value!r}; expected a number of bytes, 0 or more")
    return value


def _check_speed(owner: str, field: str, value: Any, *, zero: bool) -> None:
    if value is None:
        return
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if not number or not 0 <= value < float("inf") or (value == 0 and not zero):
        raise PlacementError(f"{owner}: {field} is {value!r}; expected a positive number")
