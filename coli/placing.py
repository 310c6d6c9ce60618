"""From a plan to residents and slots: the one place where placement, devices, tier and engine meet.

Facts are read from the devices, ``coli.placement`` decides, and what it decided is uploaded and handed to the
engine as a program.  Whatever cannot be had after all (a card that others filled in the meantime, an allocation or
an upload that fails) stays on the CPU, is said in one line, and changes no answer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from coli import settings
from coli.devices.base import Device, DeviceError, LayerDevice, SlabSpec
from coli.engine.mixing import matrix_spec, mixer_spec
from coli.engine.program import Program
from coli.log import logger
from coli.placement import CpuFacts, DeviceFacts, ModelShape, Plan, default_reserve_bytes, place_lines, plan
from coli.tier.expert_tier import ExpertTier
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile, HeatShape

if TYPE_CHECKING:
    from coli.container.reader import Container, Slabs
    from coli.engine.session import Engine

_MATRICES = {
    "lmhead": ("lm_head",),
    "dnproj": ("layers.{}.linear_attn.in_proj_qkvz",),
    "dnout": ("layers.{}.linear_attn.out_proj",),
    "attnproj": ("layers.{}.self_attn.qkv_proj", "layers.{}.self_attn.o_proj"),
}

_KV_STEP = 1024  # positions by which a device's keys and values grow at most (devices/cuda/mixer.py)

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
        engine.on_thread(lambda: [device.close() for device in found])  # where their contexts are
        raise


def _place(
    container: Container, engine: Engine, found: list[Device], wanted: str, allowance: int | str, heat: str | Path | None,
    team_is_given: bool,
) -> Placed:
    shape = ModelShape.from_container(container)
    heat_file = _heat_file(container, heat, bool(found))
    counts = heat_file.counts.tolist() if heat_file is not None and heat_file.counts is not None else None
    if not found:
        # refuses a list that names a device, and a context that this machine cannot hold
        by_time = wanted == "auto:time"  # which needs speeds to choose by, and there is nothing to choose
        cpu = CpuFacts(free_bytes=psutil.virtual_memory().available)
        plan(shape, [], place="auto" if by_time else wanted, heat=counts, cpu=cpu, context=engine.context)
        return Placed(None, [], engine.program, None)
    cpu_gb_s = _cpu_gb_s(container, shape, engine.context) if wanted in ("auto", "auto:time") else None
    placing = _Placing(container, engine, shape, found, wanted, allowance, counts, cpu_gb_s)
    placed = engine.on_thread(lambda: placing.run(heat_file))
    engine.program = placed.program
    if not team_is_given:
        n_free = len(os.sched_getaffinity(0)) - len(engine.cpus) if hasattr(os, "sched_getaffinity") else 0
        n = cpus_to_leave(engine.team.n_threads, n_free, placed.devices)
        if n:
            engine.leave_cpus(n)
            logger("threads").info("%d threads: %d CPUs are left to uploads and the card's driver",
                                   engine.team.n_threads, n)  # fmt: skip
    return placed


def cpus_to_leave(threads: int, n_free: int, devices: Sequence[Device]) -> int:
    """Threads that the team gives up, so that a device's host threads do not interrupt one that all others wait for.

    n_free : CPUs that the process has beside the team's.   A device says in ``host_cpus`` how many its driver keeps
    busy.  Never more than a quarter of the team.
    """
    wanted = max((getattr(device, "host_cpus", 0) for device in devices), default=0)
    return min(max(0, wanted - n_free), threads // 4)


def _cpu_gb_s(container: Container, shape: ModelShape, context: int) -> float | None:
    """What the CPU reads of this model's weights while it decodes, in GB/s, where `coli tune` has measured it here."""
    from coli.threads.limits import local_machine
    from coli.threads.tuning import geometry_key, load_profile, machine_fingerprint

    formats = (container.manifest.trunk_format, container.manifest.expert_format)
    profile = load_profile(machine_fingerprint(*local_machine()), geometry_key(container.config, formats))
    tok_s = None if profile is None else profile.table.get(profile.label)
    return median(tok_s) * plan(shape, [], context=context).cpu_bytes_per_token / 1e9 if tok_s else None


def _heat_file(container: Container, heat: str | Path | None, has_devices: bool) -> HeatFile | None:
    """The heat file: named by hand, by the environment, or this model's own in the cache (only beside a device)."""
    from coli.convert.resolve import cache_dir

    config = container.config
    model = hashlib.sha256(json.dumps(container.manifest.to_dict()["files"], sort_keys=True).encode()).hexdigest()[:16]
    shape = HeatShape(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok, model)
    chosen = settings.resolve("heat", None if heat is None else str(heat))
    if chosen.value is not None:
        return HeatFile(chosen.value, shape, by_hand=heat is not None)
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
        cpu_gb_s: float | None = None,
    ) -> None:
        self.container = container
        self.engine = engine
        self.shape = shape
        self.devices = devices
        self.place = place
        self.allowance = allowance
        self.counts = counts
        self.cpu_gb_s = cpu_gb_s
        self._whole: dict[int, dict[str, int]] = {}  # by the device's place: kinds of layers it may take whole
        slabs = container.slabs("layers.0.mlp.experts")
        self.slab = _slab_spec(slabs)

    def facts(self) -> list[DeviceFacts]:
        """What the devices have free now, cut by COLI_VRAM; their speeds where time is to decide."""
        made = []
        for i, device in enumerate(self.devices):
            free = device.free_bytes()
            if self.allowance == "auto":
                reserve = default_reserve_bytes(free)
            else:
                reserve = max(0, free - self.allowance)
            self._whole[i] = self._whole_layers(device, free - reserve)
            made.append(
                DeviceFacts(
                    device.name, free, reserve_bytes=reserve, uuid=device.uuid, pci_bus_id=device.pci_bus_id,
                    staging_bytes=getattr(device, "staging_bytes", 0) + sum(self._whole[i].values()),
                    gb_s=getattr(device, "gb_s", None) if self.cpu_gb_s else None,
                    latency_us=getattr(device, "latency_us", None) if self.cpu_gb_s else None,
                )
            )  # fmt: skip
        return made

    def _whole_layers(self, device: Device, allowance_bytes: int) -> dict[str, int]:
        """Which layers a device may take whole, by kind, and the bytes that go with them: the small vectors, and one
        sequence's state, with the keys and values of the whole context.

        A kind for which that is more than a sixteenth of the device is left to single products: weights save more.
        """
        if not hasattr(device, "mixer"):
            return {}
        config, wanted = self.container.config, {}
        if "auto" in self.place or "dnout" in self.place:
            taps = config.linear_conv_kernel_dim * config.conv_channels
            ba = config.linear_num_value_heads * (2 * 4 * config.hidden_size)
            n_layers = config.layer_types.count("linear_attention")
            wanted["linear_attention"] = self.shape.state_bytes + n_layers * (4 * taps + ba + 4096)
        if "auto" in self.place or "attnproj" in self.place:
            positions = -(-self.engine.context // _KV_STEP) * _KV_STEP
            n_layers = config.layer_types.count("full_attention")
            wanted["full_attention"] = self.shape.kv_bytes(positions) + n_layers * 8192
        return {kind: n_bytes for kind, n_bytes in wanted.items() if n_bytes <= allowance_bytes // 16}

    def decide(self, facts: list[DeviceFacts]) -> Plan:
        cpu = CpuFacts(self.cpu_gb_s, free_bytes=psutil.virtual_memory().available)
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
        mixers = self._mixers(residents)
        return Placed(chosen, self.devices, Program(self.engine.config, residents, tier, mixers), tier)

    def _mixers(self, residents: dict[tuple[str, int], tuple[Device, Any]]) -> dict[int, tuple[LayerDevice, Any]]:
        """The layers whose projections are all on one device that takes them whole.  One that fails stays as it was."""
        mixers: dict[int, tuple[LayerDevice, Any]] = {}
        allowed = {id(device): self._whole[i] for i, device in enumerate(self.devices)}
        for layer, kind in enumerate(self.container.config.layer_types):
            if kind == "full_attention":
                device, handles = residents.get(("attnproj", layer), (None, ()))
            else:
                (device, into), (other, out) = (residents.get((c, layer), (None, None)) for c in ("dnproj", "dnout"))
                device, handles = (device if device is other else None), (into, out)
            if device is None or kind not in allowed[id(device)]:
                continue
            spec = mixer_spec(self.container, layer)
            if spec is None:
                continue
            try:
                mixers[layer] = device, device.mixer(spec, *handles)
            except DeviceError as error:
                _log.warning("layer %d is not taken whole by %s, only its products: %s", layer, device.name, error)
                allowed[id(device)] = {}
        return mixers

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
        handles = [device.upload(matrix_spec(self.container.matrix(name))) for name in names]
        return handles[0] if len(handles) == 1 else tuple(handles)


def _slab_spec(s: Slabs) -> SlabSpec:
    return SlabSpec(
        s.format, s.hidden_size, s.intermediate_size, s.stride_bytes, s.gate_offset, s.up_offset, s.down_offset
    )

