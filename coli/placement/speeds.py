"""How fast things are: time = latency + bytes / bandwidth, for the CPU and for each card.

Figures come from a probe that was run before, or, coarser, from the facts that a person gives.  Nothing is measured
here.  What is not known costs nothing: a card without a `SpanSpeed` takes no whole layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coli.errors import PlacementError
from coli.placement.facts import LAYER_KINDS, CpuFacts, DeviceFacts

# A round trip to a card where none was measured: one graph, 8 KB up and down, PCIe 5.
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
class SpanSpeed:
    """A card that takes whole layers, from residual stream to residual stream, one after the other.

    deltanet_us, attention_us : what a layer takes besides reading its weights and its context: norms, router, the
        starts of its kernels.
    hop_us : the way into a run of layers and out of it, with what the host writes down of it.
    ask_us : from the router's choice to the host's answer in a layer in which the card lacks an expert, the host's work
        apart; meanwhile the card computes what it has.
    kv_gb_s : what it reads of keys and values, in GB/s (10**9).
    head_gb_s : what it reads of lm_head behind the last layer, the logits' way to the host included, in GB/s (10**9);
        None: as fast as any matrix.
    kinds : the layers that it may take, by the name of their first projection.
    """

    deltanet_us: float
    attention_us: float
    hop_us: float
    ask_us: float
    kv_gb_s: float
    head_gb_s: float | None = None
    kinds: tuple[str, ...] = LAYER_KINDS

    def __post_init__(self) -> None:
        times = (self.deltanet_us, self.attention_us, self.hop_us, self.ask_us)
        speeds = (self.kv_gb_s, self.kv_gb_s if self.head_gb_s is None else self.head_gb_s)
        if not all(0 <= us < float("inf") for us in times) or not all(0 < gb_s < float("inf") for gb_s in speeds):
            raise PlacementError(f"a span's speed of {times} us and {speeds} GB/s; expected positive numbers")

    def layer_us(self, kind: str) -> float:
        """The fixed cost of a layer.   kind : one of LAYER_KINDS."""
        return self.attention_us if kind == "attnproj" else self.deltanet_us


@dataclass(frozen=True)
class Speeds:
    """One card: a single matrix and a group of routed experts, both with the way there and back; whole layers.

    cut_us : what a layer of the CPU loses when experts of it are computed here, beside the group's own time: its work
        is cut in two, and the team sleeps and wakes.  None: two regions of the team.
    host_us : of a group's time, what the host spends on it: the CPU's own experts wait so long.
    """

    matrix: Speed
    experts: Speed
    span: SpanSpeed | None = None
    cut_us: float | None = None
    host_us: float = 0.0

    def __post_init__(self) -> None:
        for us in (self.host_us, 0.0 if self.cut_us is None else self.cut_us):
            if not 0 <= us < float("inf"):
                raise PlacementError(f"a group's {us} us of the host; expected a positive number")


@dataclass(frozen=True)
class CpuSpeeds:
    """The CPU: what it reads of matrices and of routed experts.

    region_us : a region of the team, which every step on a card makes one more of.
    layer_us : what a layer in a row of them takes beyond its parts: norms, barriers, the starts of its products.
    token_us : what a token takes besides its layers: from the caller to the team and back.
    state_gb_s : recurrent state that it moves on, read and written, in GB/s (10**9); None: as fast as it reads.
    """

    matrix: Speed
    experts: Speed
    region_us: float = 0.0
    layer_us: float = 0.0
    state_gb_s: float | None = None
    token_us: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= us < float("inf") for us in (self.region_us, self.layer_us, self.token_us)):
            raise PlacementError(
                f"a region of {self.region_us} us, a layer of {self.layer_us}, a token of {self.token_us}; "
                "expected positive numbers"
            )
        if self.state_gb_s is not None and not 0 < self.state_gb_s < float("inf"):
            raise PlacementError(f"a state that moves at {self.state_gb_s} GB/s; expected a positive number")

    def state_us(self, n_bytes: float) -> float:
        """Microseconds of moving a state on.   n_bytes : read and written."""
        return n_bytes / ((self.matrix.gb_s if self.state_gb_s is None else self.state_gb_s) * 1e3)


def speeds_from_dict(fields: dict[str, Any]) -> Speeds | CpuSpeeds:
    """What ``dataclasses.asdict`` made of either.

    Raises PlacementError, TypeError or OverflowError for anything else.
    """
    made = {name: _number(value) for name, value in fields.items() if name not in ("matrix", "experts", "span")}
    for name in ("matrix", "experts"):
        made[name] = Speed(**{field: _number(value) for field, value in fields[name].items()})
    if "region_us" in made:
        return CpuSpeeds(**made)
    if fields.get("span") is not None:
        span = dict(fields["span"])
        kinds = tuple(span.pop("kinds"))
        made["span"] = SpanSpeed(**{name: _number(value) for name, value in span.items()}, kinds=kinds)
    return Speeds(**made)


def _number(value: Any) -> float | None:
    """A figure, or None for one that is not known."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a figure of {value!r}; expected a number")
    return float(value)


@dataclass(frozen=True)
class Probe:
    """What was measured on this machine.   devices : in the order of the facts."""

    cpu: CpuSpeeds
    devices: tuple[Speeds, ...]

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON types."""
        return asdict(self)


def speeds_of(devices: Sequence[DeviceFacts], cpu: CpuFacts | None, probe: Probe | None) -> Probe | None:
    """The probe's figures, else those of the facts; None where a device or the CPU has none.

    Raises PlacementError where the probe is of another number of devices.
    """
    if probe is not None:
        if len(probe.devices) != len(devices):
            raise PlacementError(f"the probe has {len(probe.devices)} devices, the plan {len(devices)}; probe again")
        return Probe(probe.cpu, tuple(_allowed(one, facts) for one, facts in zip(probe.devices, devices, strict=True)))
    if cpu is None or cpu.gb_s is None or any(device.gb_s is None for device in devices):
        return None
    return Probe(CpuSpeeds(Speed(cpu.gb_s), Speed(cpu.gb_s)), tuple(_of_facts(device) for device in devices))


def _allowed(speeds: Speeds, facts: DeviceFacts) -> Speeds:
    """Without the kinds of layers that a card could take whole and may not."""
    if speeds.span is None:
        return speeds
    kinds = tuple(kind for kind in speeds.span.kinds if kind in facts.whole_layers)
    return replace(speeds, span=replace(speeds.span, kinds=kinds) if kinds else None)


def _of_facts(device: DeviceFacts) -> Speeds:
    latency_us = ROUND_TRIP_US if device.latency_us is None else device.latency_us
    speed, span = Speed(device.gb_s, latency_us), None
    if device.layer_us is not None:
        span = SpanSpeed(device.layer_us, device.layer_us, latency_us, latency_us, device.gb_s)
    return _allowed(Speeds(speed, speed, span), device)
