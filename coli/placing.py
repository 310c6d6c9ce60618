"""From a plan to residents and slots: the one place where placement, devices, tier and engine meet.

Facts are read from the devices, ``coli.placement`` decides, and what it decided is uploaded and handed to the
engine as a program.  Whatever cannot be had after all (a card that others filled in the meantime, an allocation or
an upload that fails) stays on the CPU, is said in one line, and changes no answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from coli import settings
from coli.devices.base import Device, DeviceError, MatrixSpec, SlabSpec
from coli.engine.program import Program
from coli.log import logger
from coli.placement import CpuFacts, DeviceFacts, ModelShape, Plan, default_reserve_bytes, place_lines, plan
from coli.tier.expert_tier import ExpertTier
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile, HeatShape

if TYPE_CHECKING:
    from coli.container.reader import Container, Matrix, Slabs
    from coli.engine.session import Engine

_MATRICES = {
    "lmhead": ("lm_head",),
    "dnproj": ("layers.{}.linear_attn.in_proj_qkvz",),
    "dnout": ("layers.{}.linear_attn.out_proj",),
    "attnproj": ("layers.{}.self_attn.qkv_proj", "layers.{}.self_attn.o_proj"),
}

_log = logger("place")


class Placed:
    """What was placed.  plan : as decided (None without devices).   devices : those in use.   tier : None without."""

    def __init__(self, plan: Plan | None, devices: Sequence[Device], program: Program, tier: ExpertTier | None) -> None:
        self.plan = plan
        self.devices = list(devices)
        self.program = program
        self.tier = tier

    def stats(self) -> dict[str, Any]:
        """Keys of ``Model.stats()``: place, plan, trunk_bytes by device, fallen, tier, devices."""
        trunk: dict[str, int] = {}
        for device, n_bytes in zip(self.devices, self.plan.placed_bytes if self.plan else ()):
            trunk[device.name] = n_bytes
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

    def close(self) -> None:
        """Say what the tier did, save heat, end uploads, give the devices back."""
        if self.tier is not None:
            for line in self.summary():
                logger("tier").info(line)
            self.tier.close()
        for device in self.devices:
            device.close()


def place_model(
    container: Container,
    engine: Engine,
    *,
    place: str | None = None,
    devices: Any = None,
    vram: int | str | None = None,
    heat: str | Path | None = None,
) -> Placed:
    """Decide what lies where and put it there.

    place, devices, vram, heat : as in ``coli.load``; None takes the environment's value, else the default.
    Raises PlacementError before anything is uploaded: a malformed list, or one that does not fit.
    """
    from coli.devices.choose import choose_devices

    wanted = settings.get("place", place)
    allowance = settings.get("vram", vram)
    found = choose_devices(settings.get("devices", devices)) if allowance != 0 else []
    shape = ModelShape.from_container(container)
    heat_file = _heat_file(container, heat, bool(found))
    counts = heat_file.counts.tolist() if heat_file is not None and heat_file.counts is not None else None
    if not found:
        # refuses a list that names a device, and a context that this machine cannot hold
        by_time = wanted == "auto:time"  # which needs speeds to choose by, and there is nothing to choose
        cpu = CpuFacts(free_bytes=psutil.virtual_memory().available)
        plan(shape, [], place="auto" if by_time else wanted, heat=counts, cpu=cpu, context=engine.context)
        return Placed(None, [], engine.program, None)
    placing = _Placing(container, engine, shape, found, wanted, allowance, counts)
    try:
        placed = engine.on_thread(lambda: placing.run(heat_file))
    except BaseException:
        for device in found:
            device.close()
        raise
    engine.program = placed.program
    return placed


def _heat_file(container: Container, heat: str | Path | None, has_devices: bool) -> HeatFile | None:
    """The heat file: named by hand, by the environment, or this model's own in the cache (only beside a device)."""
    from coli.convert.resolve import cache_dir

    config = container.config
    model = hashlib.sha256(json.dumps(container.manifest.to_dict()["files"], sort_keys=True).encode()).hexdigest()[:16]
    shape = HeatShape(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok, model)
    chosen = settings.resolve("heat", None if heat is None else str(heat))
    if chosen.value is not None:
        return HeatFile(chosen.value, shape, by_hand=chosen.source in ("given", "flag"))
    if not has_devices:
        return None
    folder = cache_dir() / "heat"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger("tier").warning("%s: cannot be made (%s); heat is not kept", folder, error.strerror)
        return None
    return HeatFile(folder / f"{model}.json", shape, by_hand=False)


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
    ) -> None:
        self.container = container
        self.engine = engine
        self.shape = shape
        self.devices = devices
        self.place = place
        self.allowance = allowance
        self.counts = counts
        slabs = container.slabs("layers.0.mlp.experts")
        self.slab = _slab_spec(slabs)

    def facts(self) -> list[DeviceFacts]:
        """What the devices have free now, cut by COLI_VRAM."""
        made = []
        for device in self.devices:
            free = device.free_bytes()
            if self.allowance == "auto":
                reserve = default_reserve_bytes(free)
            else:
                reserve = max(0, free - self.allowance)
            made.append(
                DeviceFacts(
                    device.name, free, reserve_bytes=reserve, uuid=device.uuid, pci_bus_id=device.pci_bus_id,
                    staging_bytes=getattr(device, "staging_bytes", 0),
                )
            )  # fmt: skip
        return made

    def decide(self, facts: list[DeviceFacts]) -> Plan:
        cpu = CpuFacts(free_bytes=psutil.virtual_memory().available)
        made = plan(self.shape, facts, place=self.place, heat=self.counts, cpu=cpu, context=self.engine.context)
        for line in place_lines(made):
            _log.info(line)
        return made

    def run(self, heat_file: HeatFile | None) -> Placed:
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
        residents, slots = {}, []
        for index in range(len(self.devices)):
            slots.append(self._open(chosen, index))
            if slots[-1] is not None:
                self._upload(chosen, index, residents)
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
        )  # fmt: skip
        tier.warm_start()
        return Placed(chosen, self.devices, Program(self.engine.config, residents, tier), tier)

    def _needs(self, chosen: Plan, index: int) -> int:
        return chosen.placed_bytes[index] + chosen.slots[index] * self.shape.expert_bytes

    def _open(self, chosen: Plan, index: int) -> int | None:
        """Open a device's arena; fewer slots where memory is short after all.  None: the device is left out."""
        device, resident_bytes, slots = self.devices[index], chosen.placed_bytes[index], chosen.slots[index]
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

    def _upload(self, chosen: Plan, index: int, residents: dict[tuple[str, int], Any]) -> None:
        """Upload a device's components in the order of the decisions.  One that fails stays on the CPU."""
        device = self.devices[index]
        for decision in chosen.decisions:
            if decision.device != index:
                continue
            layer = decision.layer or 0
            try:
                residents[decision.component, layer] = device, self._handle(device, decision.component, layer)
            except DeviceError as error:
                where = "" if decision.layer is None else f" of layer {layer}"
                _log.warning(
                    "%s%s stays on the CPU: device %d (%s): %s", decision.component, where, index, device.name, error
                )
                if error.kind == "lost":
                    for key in [k for k, (owner, _) in residents.items() if owner is device]:
                        del residents[key]
                    return

    def _handle(self, device: Device, component: str, layer: int) -> Any:
        if component == "shexp":
            slabs = self.container.slabs(f"layers.{layer}.mlp.shared_expert")
            return device.upload_slab(slabs.name, _slab_spec(slabs), slabs.data[: slabs.stride_bytes])
        names = [name.format(layer) for name in _MATRICES[component]]
        handles = [device.upload(_matrix_spec(self.container.matrix(name))) for name in names]
        return handles[0] if len(handles) == 1 else tuple(handles)


def _matrix_spec(m: Matrix) -> MatrixSpec:
    return MatrixSpec(
        m.name, m.format, m.rows, m.cols, m.block_bytes, m.n_blocks, m.n_groups, m.data[: m.n_blocks * m.block_bytes]
    )


def _slab_spec(s: Slabs) -> SlabSpec:
    return SlabSpec(
        s.format, s.hidden_size, s.intermediate_size, s.stride_bytes, s.gate_offset, s.up_offset, s.down_offset
    )

