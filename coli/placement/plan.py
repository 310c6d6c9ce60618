"""The plan: which component lies on which device, and what that leaves for the experts.

``plan`` is a pure function of facts: no file is opened, no device asked, so a plan for a card that nobody here owns is
the same call.  Invariants of a ``Plan``: what lies on a device never exceeds its allowance, and every byte is
charged once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from coli.errors import PlacementError
from coli.placement.bytesauto import bytes_auto
from coli.placement.components import ModelShape
from coli.placement.cost import CostModel, Prediction
from coli.placement.decision import Decision
from coli.placement.facts import CpuFacts, DeviceFacts
from coli.placement.fixed import decide_list, decide_off
from coli.placement.grammar import PlaceList, parse
from coli.placement.homes import WITH_LAYER, Owners, homes_of, owners_by_room, slots_of
from coli.placement.price import Expert, rank_experts
from coli.placement.speeds import Probe, speeds_of
from coli.placement.table import budget_table
from coli.placement.timeauto import decisions_of, time_auto
from coli.placement.timecandidate import dealt


@dataclass(frozen=True)
class Alternative:
    """A way to place that was looked at, by what it was judged: bytes saved for a token, or its milliseconds.

    devices : those it puts something on, where time was the measure.
    """

    label: str
    saved_bytes: float | None = None
    ms_per_token: float | None = None
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What lies where.

    place : "auto:bytes", "auto:time", "off", or the list as text.   label : how the chosen candidate was made.
    decisions : one a component, in offer order.
    expert_devices : the devices that may hold experts.
    homes : of each device, the experts at home on it, hottest first.
    budgets : bytes of each device that its components leave for experts.
    residents : experts of each device that fit: the first so many of its homes.
    prediction : the time of a token by part; None without speeds.
    alternatives : what else was looked at, the chosen one first.
    ranked : all experts, hottest first.
    """

    shape: ModelShape
    devices: tuple[DeviceFacts, ...]
    place: str
    label: str
    context: int
    decisions: tuple[Decision, ...]
    expert_devices: tuple[int, ...]
    homes: list[list[Expert]] = field(repr=False)
    budgets: list[int]
    residents: list[int]
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    ranked: Sequence[Expert] = field(default=(), repr=False)

    @cached_property
    def device_of(self) -> dict[tuple[str, int | None], int]:
        """(component, layer) -> device, for those that are not on the CPU; lmhead's layer is None."""
        placed = (decision for decision in self.decisions if decision.device is not None)
        return {(decision.component, decision.layer): decision.device for decision in placed}

    def place_of(self, component: str, layer: int | None = None) -> int | None:
        """The device index of a component at a layer (lmhead: any), or None for the CPU."""
        return self.device_of.get((component, None if component == "lmhead" else layer))

    @cached_property
    def _home_of(self) -> dict[tuple[int, int], int]:
        return {(expert.layer, expert.index): device for device, home in enumerate(self.homes) for expert in home}

    def home_of(self, layer: int, expert: int) -> int | None:
        """The device that a routed expert is at home on, or None where none may hold it."""
        return self._home_of.get((layer, expert))

    @property
    def slots(self) -> list[int]:
        """Expert slots that each device's budget allows; never fewer than its residents."""
        return slots_of(self.budgets, self.shape.expert_bytes, self.expert_devices)

    @property
    def placed_bytes(self) -> list[int]:
        """Bytes of components on each device."""
        return [sum(d.bytes for d in self.decisions if d.device == i) for i in range(len(self.devices))]

    @property
    def predicted_ms_per_token(self) -> float | None:
        """Milliseconds of one token; None without speeds."""
        return None if self.prediction is None else self.prediction.ms_per_token

    @cached_property
    def hits(self) -> list[float]:
        """Experts that a token finds resident on each device, on average."""
        return [sum(expert.p for expert in home[:n]) for home, n in zip(self.homes, self.residents, strict=True)]

    @property
    def device_bytes_per_token(self) -> list[float]:
        """Bytes that each device reads for a token, on average: its components and its residents that are chosen."""
        slot_bytes = self.shape.expert_bytes
        return [placed + hits * slot_bytes for placed, hits in zip(self.placed_bytes, self.hits, strict=True)]

    @property
    def saved_bytes(self) -> float:
        """What the plan spares the CPU's memory bus for a token, on average."""
        return sum(self.placed_bytes) + sum(self.hits) * self.shape.cpu_expert_bytes

    @property
    def cpu_bytes_per_token(self) -> float:
        """Bytes that the CPU reads for a token, on average; keys, values and state apart."""
        chosen = self.shape.topk * len(self.shape.expert_layers)
        everything = self.shape.trunk_bytes + chosen * self.shape.cpu_expert_bytes + self.shape.rest_bytes
        return max(everything - self.saved_bytes, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON types; ``decisions`` are the records behind the ``[place]`` lines."""
        sums = budget_table(self)
        return {
            "place": self.place,
            "label": self.label,
            "context": self.context,
            "devices": [
                {
                    "index": i,
                    "name": device.name,
                    "uuid": device.uuid,
                    "pci_bus_id": device.pci_bus_id,
                    "allowance_bytes": device.allowance_bytes,
                    "placed_bytes": self.placed_bytes[i],
                    "budget_bytes": self.budgets[i],
                    "residents": self.residents[i],
                    "bytes_per_token": self.device_bytes_per_token[i],
                    "table": [{"line": row.label, "bytes": row.bytes} for row in table.rows],
                }
                for i, (device, table) in enumerate(zip(self.devices, sums.devices, strict=True))
            ],
            "host": [{"line": row.label, "bytes": row.bytes} for row in sums.host.rows],
            "budgets": list(self.budgets),
            "residents": list(self.residents),
            "expert_devices": list(self.expert_devices),
            "saved_bytes_per_token": self.saved_bytes,
            "cpu_bytes_per_token": self.cpu_bytes_per_token,
            "predicted_ms_per_token": self.predicted_ms_per_token,
            "predicted_us": None if self.prediction is None else dict(self.prediction.us),
            "alternatives": [
                {
                    "label": one.label,
                    "saved_bytes_per_token": one.saved_bytes,
                    "ms_per_token": one.ms_per_token,
                    "devices": list(one.devices),
                }
                for one in self.alternatives
            ],
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict())


def plan(
    shape: ModelShape,
    devices: Sequence[DeviceFacts],
    *,
    place: str | PlaceList | None = "auto",
    heat: Sequence[Sequence[float]] | None = None,
    probe: Probe | None = None,
    cpu: CpuFacts | None = None,
    context: int = 4096,
    position: float | None = None,
) -> Plan:
    """Decide what lies where.

    place : "auto" (by time where all speeds are known, else by bytes), "auto:bytes", "auto:time", "off", or a list
        (text or parsed); None is auto.
    heat : counts [layer][expert]; None for an even router.
    probe, cpu : speeds, where they are known (a device's own are in its facts).
    context : positions of one sequence, for which the host has to have room.
    position : how many of them a token looks back on, for the prediction; None for half of them.

    Raises PlacementError: a malformed list, a list or context that does not fit, heat of another model.
    """
    devices = tuple(devices)
    _check_context(shape, context, cpu)
    ranked = rank_experts(shape, heat)
    speeds = speeds_of(devices, cpu, probe)
    model = None if speeds is None else CostModel(shape, speeds, ranked, context, position)
    rooms = [device.allowance_bytes for device in devices]
    if place is None or place == "auto":
        place = "auto:bytes" if model is None else "auto:time"

    if place == "auto:time":
        if model is None:
            raise PlacementError("auto:time needs the speed of every device and of the CPU; auto:bytes needs none")
        candidates = time_auto(model, rooms)
        chosen = candidates[0]
        alternatives = tuple(Alternative(one.label, None, one.ms, one.used_devices) for one in candidates)
        decisions = decisions_of(model, rooms, chosen)
        beside = model.spans_of(chosen.device_of) if chosen.dealing == WITH_LAYER else None
        made = _finished(
            shape, devices, ranked, context, place, chosen.label, decisions, chosen.experts, chosen.owners, beside
        )
        return replace(made, alternatives=alternatives, prediction=chosen.prediction)

    allowed, alternatives = tuple(range(len(devices))), ()
    if place == "auto:bytes":
        by_bytes = bytes_auto(shape, rooms, ranked)
        label, decisions = by_bytes[0].label, by_bytes[0].decisions
        alternatives = tuple(Alternative(one.label, one.saved_bytes) for one in by_bytes)
    elif place == "off":
        label, decisions = "off", decide_off(shape)
    else:
        listed = place if isinstance(place, PlaceList) else parse(place, shape.layers)
        label, decisions = "list", decide_list(shape, devices, listed)
        allowed = listed.expert_devices(len(devices))
    made = _finished(shape, devices, ranked, context, str(place), label, decisions, allowed, None)
    if model is None:
        return replace(made, alternatives=alternatives)
    prediction = model.predict(made.device_of, owners_by_room(len(ranked), made.slots))
    if label == "list" and set(model.spans_of(made.device_of).values()).intersection(allowed):
        # Which cards hold experts is the list's word, not which experts: those of a card's own layers spare questions.
        owners = dealt(model, made.slots, made.device_of, WITH_LAYER)
        other = model.predict(made.device_of, owners)
        if other.ms_per_token < prediction.ms_per_token:
            prediction, beside = other, model.spans_of(made.device_of)
            made = _finished(
                shape, devices, ranked, context, str(place), label, decisions, allowed, owners, beside
            )  # fmt: skip
    if not alternatives:  # a list or off is never questioned, but what auto would take is said
        alternatives = tuple(
            Alternative(name, ms_per_token=of.ms_per_token)
            for name, of in ((label, prediction), ("auto:time", time_auto(model, rooms)[0].prediction))
        )
    return replace(made, alternatives=alternatives, prediction=prediction)


def _finished(
    shape: ModelShape,
    devices: tuple[DeviceFacts, ...],
    ranked: Sequence[Expert],
    context: int,
    place: str,
    label: str,
    decisions: tuple[Decision, ...],
    allowed: tuple[int, ...],
    owners: Owners | None,
    beside: Mapping[int, int] | None = None,
) -> Plan:
    """Charge what was decided, and fill what is left with experts (by room, where no owners are given)."""
    budgets = [device.allowance_bytes for device in devices]
    for decision in decisions:
        if decision.device is not None:
            budgets[decision.device] -= decision.bytes
    slots = slots_of(budgets, shape.expert_bytes, allowed)
    owners = owners_by_room(len(ranked), slots) if owners is None else owners
    homes, residents = homes_of(ranked, owners, slots, beside)
    return Plan(shape, devices, place, label, context, decisions, allowed, homes, budgets, residents, ranked=ranked)


def _check_context(shape: ModelShape, context: int, cpu: CpuFacts | None) -> None:
    if isinstance(context, bool) or not isinstance(context, int) or context < 0:
        raise PlacementError(f"context is {context!r}; expected a number of positions, 0 or more")
    if shape.max_context is not None and context > shape.max_context:
        raise PlacementError(
            f"context of {context:,} positions: the model was made for at most {shape.max_context:,}; ask for less"
        )
    need = shape.kv_bytes(context) + shape.state_bytes
    if cpu is not None and cpu.free_bytes is not None and need > cpu.free_bytes:
        raise PlacementError(
            f"context of {context:,} positions: its keys, values and state take {need:,} bytes of host memory, "
            f"{cpu.free_bytes:,} are free; ask for a shorter context"
        )
