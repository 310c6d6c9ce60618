"""From a plan to residents and slots: the one place where placement, devices, tier and engine meet.

Facts are read from the devices, ``coli.placement`` decides, and what it decided is uploaded and handed to the
engine as a program.  Whatever cannot be had after all (a card that others filled in the meantime, an allocation or
an upload that fails) stays on the CPU, is said in one line, and changes no answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coli import settings
from coli.devices.base import Device, DeviceError, LayerDevice
from coli.engine.bind import geometry
from coli.engine.mixing import final_norm, layer_spec, matrix_spec, mixer_spec, slab_spec
from coli.engine.program import Program
from coli.engine.span import PlacedSpan
from coli.engine.worker import Cancelled
from coli.errors import ColiError, PlacementError
from coli.files import cache_dir
from coli.log import logger
from coli.placement import (
    CpuFacts,
    DeviceFacts,
    ModelShape,
    Plan,
    Probe,
    default_reserve_bytes,
    place_lines,
    plan,
    with_whole_layers,
)
from coli.threads.memory import available_bytes
from coli.tier.expert_tier import ExpertTier
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile, HeatShape
from coli.tier.residency import ON_CPU

if TYPE_CHECKING:
    from coli.config import ModelConfig
    from coli.container.reader import Container
    from coli.engine.session import Engine

_MATRICES = {
    "lmhead": ("lm_head",),
    "dnproj": ("layers.{}.linear_attn.in_proj_qkvz",),
    "dnout": ("layers.{}.linear_attn.out_proj",),
    "attnproj": ("layers.{}.self_attn.qkv_proj", "layers.{}.self_attn.o_proj"),
}

_log = logger("place")


class Placed:
    """What was placed.

    plan : as decided (None without devices).   devices : those in use.   tier : None without.
    trunk_bytes : of each device, the components that were uploaded.
    """

    def __init__(
        self,
        plan: Plan | None,
        devices: Sequence[Device],
        program: Program,
        tier: ExpertTier | None,
        trunk_bytes: Sequence[int] = (),
    ) -> None:
        self.plan = plan
        self.devices = list(devices)
        self.program = program
        self.tier = tier
        self.trunk_bytes = list(trunk_bytes)

    def stats(self) -> dict[str, Any]:
        """Keys of ``Model.stats()``: place, plan, trunk_bytes by device, fallen, tier, devices."""
        names = [device.name for device in self.devices]
        trunk = {
            name if names.count(name) == 1 else f"{index} ({name})": n_bytes
            for index, (name, n_bytes) in enumerate(zip(names, self.trunk_bytes))
        }
        return {
            "place": self.plan.place if self.plan else "off",
            "plan": self.plan.to_dict() if self.plan else None,
            "trunk_bytes": trunk,
            "fallen": list(self.program.fallen),
            "tier": self.tier.stats() if self.tier else None,
            "devices": [
                {"index": d.index, "name": d.name, "uuid": d.uuid, "pci_bus_id": d.pci_bus_id} for d in self.devices
            ],
        }

    def summary(self) -> list[str]:
        """The text of the ``[tier]`` line; nothing without a tier."""
        if self.tier is None:
            return []
        trunk = ", ".join(f"{name} {n_bytes / 2**20:,.0f} MiB" for name, n_bytes in self.stats()["trunk_bytes"].items())
        return [f"{self.tier.summary()}; trunk in VRAM apart: {trunk}"]

    def set_allowance(self, vram: int | str) -> list[int]:
        """Take so much of each device from now on, by giving expert slots back or taking more; the slots of each.

        vram : bytes, "6GiB", or "auto" for what is free now less the reserve.  As COLI_VRAM it is the whole allowance:
            what lies on the device beside experts stays, and a device that got no slots at load has none later.
        On the engine thread, between two steps.  Raises PlacementError where a device cannot do it.
        """
        assert self.plan is not None and self.tier is not None, "there are no devices to take anything of"
        allowance = settings.get("vram", vram)
        slots = []
        for index, (device, facts) in enumerate(zip(self.devices, self.plan.devices, strict=True)):
            now = self.tier.n_slots(index)
            wanted = now
            if now or self.plan.slots[index]:
                if not device.slot_segment_bytes:
                    raise PlacementError(f"{device.name}: its expert slots cannot change while it runs; load anew")
                free_bytes = device.free_bytes()
                if allowance == "auto":
                    room = free_bytes - default_reserve_bytes(free_bytes) + now * self.plan.shape.expert_bytes
                else:
                    room = allowance - facts.staging_bytes - facts.layer_bytes - self.plan.placed_bytes[index]
                wanted = min(max(0, room) // self.plan.shape.expert_bytes, len(self.plan.homes[index]))
            self.tier.resize(index, wanted)
            slots.append(self.tier.n_slots(index))
        self.tier.refill()
        return slots

    def close(self) -> None:
        """Say what the tier did, save heat, end uploads, give the devices back."""
        with contextlib.ExitStack() as rest:  # in reverse order, and each whatever the one before it raised
            rest.callback(_close_all, self.devices)
            if self.tier is not None:
                rest.callback(self.tier.close)
                for line in self.summary():
                    logger("tier").info(line)


def place_model(
    container: Container,
    engine: Engine,
    *,
    place: str | None = None,
    devices: Any = None,
    vram: int | str | None = None,
    heat: str | Path | None = None,
    team_is_given: bool = True,
) -> Placed:
    """Decide what lies where and put it there.

    place, devices, vram, heat : as in ``coli.load``; None takes the environment's value, else the default.
    team_is_given : somebody asked for just these threads; else a card's driver and uploads get CPUs of their own.
    Raises PlacementError before anything is uploaded: a malformed list, or one that does not fit.
    """
    from coli.devices.choose import choose_devices

    wanted = settings.get("place", place)
    allowance = settings.get("vram", vram)
    found = choose_devices(settings.get("devices", devices)) if allowance != 0 else []
    try:
        return _place(container, engine, found, wanted, allowance, heat, team_is_given)
    except BaseException:
        engine.on_thread(lambda: _close_all(found))  # where their contexts are
        raise


def _close_all(devices: Sequence[Device]) -> None:
    """Each, whatever the one before it raised."""
    with contextlib.ExitStack() as rest:
        for device in devices:
            rest.callback(device.close)


def _place(
    container: Container, engine: Engine, found: list[Device], wanted: str, allowance: int | str,
    heat: str | Path | None, team_is_given: bool,
) -> Placed:
    shape = ModelShape.from_container(container)
    heat_file = _heat_file(container, heat, bool(found))
    counts = heat_file.counts.tolist() if heat_file is not None and heat_file.counts is not None else None
    if not found:
        # refuses a list that names a device, and a context that this machine cannot hold
        by_time = wanted == "auto:time"  # which needs speeds to choose by, and there is nothing to choose
        cpu = CpuFacts(free_bytes=available_bytes())
        plan(shape, [], place="auto" if by_time else wanted, heat=counts, cpu=cpu, context=engine.context)
        return Placed(None, [], engine.program, None)
    n_left = 0
    if not team_is_given:
        n_left = cpus_to_leave(engine.team.n_threads, engine.cpus, found)
    if n_left:  # first, for the team that computes beside a card is the one to measure
        engine.leave_cpus(n_left)
        logger("threads").info("%d threads: %d CPUs are left to uploads and the card's driver",
                               engine.team.n_threads, n_left)  # fmt: skip
    probe = _figures(engine, found, wanted)
    placing = _Placing(container, engine, shape, found, wanted, allowance, counts, probe)
    placed = engine.on_thread(lambda: placing.run(heat_file))
    engine.program = placed.program
    return placed


def cpus_to_leave(threads: int, cpus: Sequence[int], devices: Sequence[Device]) -> int:
    """Threads that the team gives up, so that a device's host threads do not interrupt one that all others wait for.

    threads, cpus : of the team.   A device says in ``host_cpus`` how many its driver keeps busy: as many of the
    process's CPUs should not be the team's.  Never more than a quarter of the team.
    """
    n_free = len(os.sched_getaffinity(0)) - len(cpus) if hasattr(os, "sched_getaffinity") else 0
    wanted = max((getattr(device, "host_cpus", 0) for device in devices), default=0)
    return min(max(0, wanted - n_free), threads // 4)


def _figures(engine: Engine, devices: Sequence[Device], place: str) -> Probe | None:
    """What the devices and the engine's team take for a step; None where a device has no figures."""
    from coli.probing import machine_figures

    return machine_figures(
        devices, engine.team.n_threads, engine.cpus or None, settings.get("isa"), anyway=place == "auto:time",
        beside=engine,
    )  # fmt: skip


def _heat_file(container: Container, heat: str | Path | None, has_devices: bool) -> HeatFile | None:
    """The heat file: named by hand, by the environment, or this model's own in the cache (only beside a device)."""
    config = container.config
    model = hashlib.sha256(json.dumps(container.manifest.to_dict()["files"], sort_keys=True).encode()).hexdigest()[:16]
    shape = HeatShape(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok, model)
    chosen = settings.resolve("heat", None if heat is None else str(heat))
    if chosen.value is not None:
        return HeatFile(chosen.value, shape, by_hand=heat is not None)
    if not has_devices:
        return None
    try:
        folder = cache_dir() / "heat"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger("tier").warning("%s: cannot be made (%s); heat is not kept", folder, error.strerror)
        return None
    except ColiError as error:
        logger("tier").warning("%s; heat is not kept", error)
        return None
    return HeatFile(folder / f"{model}.json", shape, by_hand=False)


def span_bytes_of(device: Any, config: ModelConfig, kv_dtype: str) -> int | None:
    """What runs of a model's layers take of a device beside the weights, at most; None where it takes no runs.

    device : a Device, or the class of one.
    """
    if getattr(device, "span_bytes", None) is None:
        return None
    return device.span_bytes(geometry(config, kv_dtype == "float16"), config.num_hidden_layers)


class _Placing:
    """One placement on its way from facts to a program; runs on the engine thread."""

    def __init__(
        self,
        container: Container,
        engine: Engine,
        shape: ModelShape,
        devices: list[Device],
        place: str,
        allowance: int | str,
        counts: list[list[float]] | None,
        probe: Probe | None = None,
    ) -> None:
        self.container = container
        self.engine = engine
        self.shape = shape
        self.devices = devices
        self.place = place
        self.allowance = allowance
        self.counts = counts
        self.probe = probe
        self._whole: dict[int, tuple[str, ...]] = {}  # by the device's place: kinds of layers it may take whole
        self._span_bytes: dict[int, int] = {}  # ... and what runs of them take beside; 0: it takes no runs
        slabs = container.slabs("layers.0.mlp.experts")
        self.slab = slab_spec(slabs)

    def facts(self) -> list[DeviceFacts]:
        """What the devices have free now, cut by COLI_VRAM; their speeds where time is to decide."""
        made = []
        for i, device in enumerate(self.devices):
            facts = DeviceFacts.from_device(device, self.allowance)
            span_bytes = span_bytes_of(device, self.container.config, self.container.manifest.kv_dtype)
            charged = with_whole_layers(facts, self.shape, self.place, self.engine.context, i, span_bytes)
            self._whole[i], self._span_bytes[i] = charged.kinds, charged.span_bytes
            made.append(charged.facts)
        return made

    def decide(self, facts: list[DeviceFacts]) -> Plan:
        made = plan(
            self.shape, facts, place=self.place, heat=self.counts, probe=self.probe,
            cpu=CpuFacts(free_bytes=available_bytes()), context=self.engine.context,
        )  # fmt: skip
        for line in place_lines(made):
            _log.info(line)
        return made

    def run(self, heat_file: HeatFile | None) -> Placed:
        """Decide, upload and bind.  What raises here leaves no thread behind; the devices are the caller's to close."""
        with contextlib.ExitStack() as undo:
            placed = self._run(heat_file, undo)
            if self.engine.is_cancelled:
                raise Cancelled  # interrupted: nobody waits for what was made, so nobody would close it
            undo.pop_all()
        return placed

    def _run(self, heat_file: HeatFile | None, undo: contextlib.ExitStack) -> Placed:
        """`run`; what has to be undone where a later piece raises is put on ``undo``."""
        facts = self.facts()
        if isinstance(self.allowance, int):
            for i, fact in enumerate(facts):
                if self.allowance > fact.free_bytes:
                    _log.warning(
                        "device %d (%s): COLI_VRAM asks for %s bytes, %s are free; planning with those",
                        i, fact.name, f"{self.allowance:,}", f"{fact.free_bytes:,}",
                    )  # fmt: skip
        chosen = self.decide(facts)
        now = self.facts()
        for i, (before, after) in enumerate(zip(facts, now)):
            if after.allowance_bytes < self._needs(chosen, i):
                _log.warning(
                    "device %d (%s): %s bytes were free when it was planned, %s are now: planned again",
                    i, after.name, f"{before.free_bytes:,}", f"{after.free_bytes:,}",
                )  # fmt: skip
                chosen = self.decide(now)
                break
        residents, slots, trunk_bytes = {}, [], []
        for index in range(len(self.devices)):
            slots.append(self._open(chosen, index))
            trunk_bytes.append(0 if slots[-1] is None else self._upload(chosen, index, residents))
        heat = Heat(
            self.shape.layers, self.shape.n_experts, self.shape.topk,
            start=heat_file.counts if heat_file is not None else None,
        )  # fmt: skip
        layers = range(self.shape.layers)
        slabs = [self.container.slabs(f"layers.{layer}.mlp.experts") for layer in layers]
        tier = ExpertTier(
            [s.data[: s.count * s.stride_bytes].reshape(s.count, s.stride_bytes) for s in slabs],
            self.devices,
            [n or 0 for n in slots],
            [
                [(e.layer, e.index) for e in home] if slots[i] else []
                for i, home in enumerate(chosen.homes)
            ],
            heat=heat,
            heat_file=heat_file,
            # an allowance by hand may leave nothing over; what it leaves beyond the usual reserve is for others
            keep_free_bytes=[min(f.reserve_bytes, default_reserve_bytes(f.free_bytes)) for f in now],
        )  # fmt: skip
        undo.callback(tier.close)
        tier.warm_start()
        self._unmap(residents, tier)
        mixers = self._mixers(residents)
        spans = self._spans(residents, mixers)
        program = Program(self.engine.config, residents, tier, mixers, spans)
        return Placed(chosen, self.devices, program, tier, trunk_bytes)

    def _mixers(self, residents: dict[tuple[str, int], tuple[Device, Any]]) -> dict[int, tuple[LayerDevice, Any]]:
        """The layers whose projections are all on one device that takes them whole.  One that fails stays as it was."""
        mixers: dict[int, tuple[LayerDevice, Any]] = {}
        allowed = {id(device): self._whole[i] for i, device in enumerate(self.devices)}
        for layer, kind in enumerate(self.container.config.layer_types):
            component = "attnproj" if kind == "full_attention" else "dnproj"
            if component == "attnproj":
                device, handles = residents.get(("attnproj", layer), (None, ()))
            else:
                (device, into), (other, out) = (residents.get((c, layer), (None, None)) for c in ("dnproj", "dnout"))
                device, handles = (device if device is other else None), (into, out)
            if device is None or component not in allowed[id(device)]:
                continue
            spec = mixer_spec(self.container, layer)
            if spec is None:
                continue
            try:
                mixers[layer] = device, device.mixer(spec, *handles)
            except DeviceError as error:
                _log.warning("layer %d is not taken whole by %s, only its products: %s", layer, device.name, error)
                allowed[id(device)] = ()
        return mixers

    def _spans(
        self, residents: dict[tuple[str, int], tuple[Device, Any]], mixers: dict[int, tuple[LayerDevice, Any]]
    ) -> list[PlacedSpan]:
        """Runs of consecutive layers that one device takes from residual stream to residual stream."""
        takes_none = {id(device) for i, device in enumerate(self.devices) if not self._span_bytes[i]}
        spans: list[PlacedSpan] = []
        device, layers = None, []  # of the run that is being made
        n_layers = len(self.container.config.layer_types)
        for layer in range(n_layers + 1):
            owner, handle = self._span_layer(layer, residents, mixers, takes_none)
            if layers and owner is not device:
                head = self._span_head(device, residents) if layer == n_layers else None
                spans += self._span(device, layer, layers, head)
                layers = []
            device = owner
            if device is not None:
                layers.append(handle)
        for i, device in enumerate(self.devices):
            mine = [span.what for span in spans if span.device is device]
            if mine:
                graphs = "one graph" if len(mine) == 1 else f"{len(mine)} graphs"
                _log.info("whole on device %d (%s): %s; %s a token", i, device.name, ", ".join(mine), graphs)
        return spans

    def _span_layer(
        self, layer: int, residents: dict[tuple[str, int], tuple[Device, Any]],
        mixers: dict[int, tuple[LayerDevice, Any]], takes_none: set[int],
    ) -> tuple[Any, Any]:  # fmt: skip
        """The device that has all of a layer but perhaps its experts, and the layer's handle there; else two Nones."""
        device, mixer = mixers.get(layer, (None, None))
        owner, shared = residents.get(("shexp", layer), (None, None))
        if device is None or id(device) in takes_none or owner not in (None, device):
            return None, None
        spec = layer_spec(self.container, layer)
        if spec is None:
            return None, None
        try:
            return device, device.layer(layer, mixer, shared, spec)
        except DeviceError as error:
            takes_none.add(id(device))
            _log.warning("%s takes no run of layers from layer %d on: %s", device.name, layer, error)
            return None, None

    def _span_head(self, device: Any, residents: dict[tuple[str, int], tuple[Device, Any]]) -> Any:
        """The head behind the last layer, where it is resident on the same device."""
        owner, matrix = residents.get(("lmhead", 0), (None, None))
        if owner is not device:
            return None
        try:
            return device.head(final_norm(self.container), matrix)
        except DeviceError as error:
            _log.warning("%s does not take the head with its layers: %s", device.name, error)
            return None

    def _span(self, device: Any, end: int, layers: list[Any], head: Any) -> list[PlacedSpan]:
        """The run of layers that ends before ``end``; nothing where the device cannot have it."""
        first = end - len(layers)
        try:
            return [PlacedSpan(device, device.span(layers, head), first, end, head is not None)]
        except DeviceError as error:
            _log.warning("%s does not take the layers %d-%d in one run: %s", device.name, first, end - 1, error)
            return []

    def _needs(self, chosen: Plan, index: int) -> int:
        return chosen.placed_bytes[index] + self._slots(chosen, index) * self.shape.expert_bytes

    @staticmethod
    def _slots(chosen: Plan, index: int) -> int:
        """Slots of a device's arena: what the budget allows, and none that no expert could ever come to."""
        return min(chosen.slots[index], len(chosen.homes[index]))

    def _open(self, chosen: Plan, index: int) -> int | None:
        """Open a device's arena; fewer slots where memory is short after all.  None: the device is left out."""
        device, resident_bytes, slots = self.devices[index], chosen.placed_bytes[index], self._slots(chosen, index)
        if not resident_bytes and not slots:
            return None
        wanted = slots
        while True:
            try:
                device.open_arena(resident_bytes, slots, self.slab)
            except DeviceError as error:
                if error.kind == "out of memory" and slots:
                    slots //= 2
                    continue
                _log.warning("device %d (%s) is left out: %s", index, device.name, error)
                return None
            if slots < wanted:
                _log.warning(
                    "device %d (%s): memory for %d of %d expert slots was to be had", index, device.name, slots, wanted
                )
            return slots

    def _upload(self, chosen: Plan, index: int, residents: dict[tuple[str, int], Any]) -> int:
        """Upload a device's components in the order of the decisions; their bytes.  One that fails stays on the CPU."""
        device, n_bytes = self.devices[index], 0
        for decision in chosen.decisions:
            if decision.device != index:
                continue
            layer = decision.layer or 0
            try:
                residents[decision.component, layer] = device, self._handle(device, decision.component, layer)
                n_bytes += decision.bytes
            except DeviceError as error:
                where = "" if decision.layer is None else f" of layer {layer}"
                _log.warning(
                    "%s%s stays on the CPU: device %d (%s): %s", decision.component, where, index, device.name, error
                )
                if error.kind == "lost":
                    for key in [k for k, (owner, _) in residents.items() if owner is device]:
                        del residents[key]
                    return 0
        return n_bytes

    def _unmap(self, residents: dict[tuple[str, int], Any], tier: ExpertTier) -> None:
        """Let the pages go that were mapped for uploads only."""
        for component, layer in residents:
            for name in _MATRICES.get(component, ("layers.{}.mlp.shared_expert",)):
                self.container.will_not_need(name.format(layer))
        for layer in np.flatnonzero((tier.residency.device != ON_CPU).any(axis=1)).tolist():
            self.container.will_not_need(f"layers.{layer}.mlp.experts")

    def _handle(self, device: Device, component: str, layer: int) -> Any:
        if component == "shexp":
            slabs = self.container.slabs(f"layers.{layer}.mlp.shared_expert")
            return device.upload_slab(slabs.name, slab_spec(slabs), slabs.data[: slabs.stride_bytes])
        names = [name.format(layer) for name in _MATRICES[component]]
        handles = [device.upload(matrix_spec(self.container.matrix(name))) for name in names]
        return handles[0] if len(handles) == 1 else tuple(handles)
