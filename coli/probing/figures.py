"""All figures of a machine as one Probe: from this process, from the files, or measured now.

A card with an identity is measured once and kept.  One without (a fake one) is measured only where that was asked for,
and kept as long as the object lives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import coli
from coli.devices.base import Device, DeviceError
from coli.log import logger
from coli.placement import CpuSpeeds, Probe, Speed, Speeds, speeds_from_dict
from coli.probing import store
from coli.probing.trim import give_memory_back

if TYPE_CHECKING:
    from coli.engine.session import Engine

_log = logger("probe")
_of_objects: WeakKeyDictionary[Device, tuple[store.Subject, Speeds]] = WeakKeyDictionary()


def machine_figures(
    devices: Sequence[Device],
    threads: int,
    cpus: Sequence[int] | None = None,
    isa: str | None = None,
    *,
    anyway: bool = False,
    beside: Engine | None = None,
) -> Probe | None:
    """The figures of a team of threads and of devices, in their order; None where one has none.

    threads, cpus, isa : of the team, as ``Engine`` takes them.
    anyway : measure devices without an identity too.
    beside : the engine whose team that is, and from whose thread a device's calls have to come.
    """
    from coli.engine.session import Engine
    from coli.probing.samples import NARROWEST, Samples

    with contextlib.ExitStack() as closing:

        def team() -> Engine:
            """The engine beside which is measured; made only where something has to be."""
            nonlocal beside
            if beside is None:
                samples = Samples(NARROWEST)
                closing.callback(samples.close)
                beside = Engine(samples, threads=threads, cpus=cpus, isa=isa)
                closing.callback(beside.close)
            return beside

        if not anyway and any(device.uuid is None and device not in _of_objects for device in devices):
            return None
        of_cpu = _cpu_subject(threads, cpus, isa)
        cpu = _cpu(of_cpu, team)
        if cpu is None:
            return None
        found = []
        for device in devices:
            subject = _card_subject(device, of_cpu, cpu)
            figures = _known(device, subject) or _measured_card(device, team(), cpu, subject)
            if figures is None:
                return None
            found.append(figures)
        return Probe(cpu, tuple(found))


def forget() -> None:
    """The next `machine_figures` on this machine measures everything anew."""
    from coli.threads.limits import local_machine
    from coli.threads.tuning import machine_fingerprint

    store.forget(machine_fingerprint(*local_machine()))
    _of_objects.clear()


def _cpu_subject(threads: int, cpus: Sequence[int] | None, isa: str | None) -> store.Subject:
    from coli.engine.session import choose_isa
    from coli.threads.limits import local_machine
    from coli.threads.tuning import machine_fingerprint

    topology, limits = local_machine()
    return {
        "kind": "cpu", "coli": coli.__version__, "cpu": topology.model_name,
        "cores": len(topology.cores(limits.allowed)),
        "machine": machine_fingerprint(topology, limits), "threads": threads, "cpus": list(cpus) if cpus else None,
        "isa": choose_isa(isa),
    }  # fmt: skip


def _card_subject(device: Device, of_cpu: store.Subject, cpu: CpuSpeeds) -> store.Subject:
    """A card, and the team that answers it with what that was found to take: some figures are what is left of a sum."""
    return {
        "kind": "card", "coli": coli.__version__, "uuid": device.uuid, "name": device.name, "driver": device.driver,
        "beside": of_cpu, "which takes": asdict(speeds_from_dict(asdict(cpu))),  # as read from a file
    }  # fmt: skip


def _known(device: Device, subject: store.Subject) -> Speeds | None:
    of, figures = _of_objects.get(device, (None, None))
    if of == subject:
        return figures
    figures = None if device.uuid is None else store.load(subject)
    if figures is not None:
        _of_objects[device] = subject, figures
        _log.info("%s (kept)", _card_line(device, figures))
    return figures


def _cpu(subject: store.Subject, team: Callable[[], Engine]) -> CpuSpeeds | None:
    from coli.probing.host import measure_cpu

    threads = subject["threads"]
    figures = store.load(subject)
    if figures is not None:
        _log.info("%s (kept)", _cpu_line(threads, figures))
        return figures
    start = time.perf_counter()
    try:
        figures, read_gb_s = measure_cpu(team())
    except MemoryError:
        _log.warning("the CPU was not measured: no memory for samples of a model")
        return None
    finally:
        give_memory_back()
    _log.info("%s, a plain read %.1f GB/s; measured in %.1f s", _cpu_line(threads, figures), read_gb_s,
              time.perf_counter() - start)  # fmt: skip
    store.save(subject, figures)
    return figures


def _measured_card(device: Device, beside: Engine, cpu: CpuSpeeds, subject: store.Subject) -> Speeds | None:
    from coli.probing.cards import measure_card

    try:
        found = measure_card(device, beside, cpu)
    except (DeviceError, MemoryError) as error:
        reason = error if isinstance(error, DeviceError) else "no memory for samples of a model"
        _log.warning("device %d (%s) was not measured: %s", device.index, device.name, reason)
        return None
    finally:
        give_memory_back()
    figures, round_trip_us, seconds = found
    _log.info("%s, a round trip %.1f us; measured in %.1f s", _card_line(device, figures), round_trip_us, seconds)
    _of_objects[device] = subject, figures
    if device.uuid is not None:
        store.save(subject, figures)
    return figures


def _cpu_line(threads: int, figures: CpuSpeeds) -> str:
    return (
        f"cpu, {threads} threads: matrices {figures.matrix.gb_s:.1f} GB/s, experts {figures.experts.gb_s:.1f} GB/s, "
        f"a state {figures.state_gb_s or figures.matrix.gb_s:.1f} GB/s, a region {figures.region_us:.1f} us, "
        f"a layer {figures.layer_us:.1f} us, a token {figures.token_us:.1f} us"
    )


def _card_line(device: Device, figures: Speeds) -> str:
    line = (
        f"device {device.index} ({device.name}): a matrix {_speed(figures.matrix)}, "
        f"an expert group {_speed(figures.experts)}"
    )
    if figures.cut_us is not None:
        line += f" ({figures.host_us:.1f} us the host's, a layer cut in two {figures.cut_us:.1f} us)"
    if figures.span is None:
        return line
    span = figures.span
    return (
        f"{line}, whole layers {span.deltanet_us:.1f} us (attention {span.attention_us:.1f} us), "
        f"a run {span.hop_us:.1f} us, "
        f"a question {span.ask_us:.1f} us, keys and values {span.kv_gb_s:.1f} GB/s, "
        f"the head {span.head_gb_s or figures.matrix.gb_s:.1f} GB/s"
    )


def _speed(speed: Speed) -> str:
    return f"{speed.latency_us:.1f} us + bytes / {speed.gb_s:.1f} GB/s"
