"""The figures that a load would plan with, for verbs that plan without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coli.errors import ModelError

if TYPE_CHECKING:
    from coli.devices.base import Device
    from coli.placement import Probe


def figures_beside(
    devices: Sequence[Device], model: str, threads: str | int | None = None, *, anyway: bool = False
) -> Probe | None:
    """Of these devices, and of the team that a model's engine would have beside them; kept ones, else measured now.

    model, threads : as MODEL and --threads; what ``coli tune`` found for the model counts.   anyway : measure devices without an identity too; else they have no figures.
    """
    from coli import settings
    from coli._core import step
    from coli.placing import cpus_to_leave
    from coli.probing import machine_figures
    from coli.threads.claims import claim_threads

    with claim_threads(threads, geometry=_geometry(model), openmp_built=step.has_openmp()) as claim:
        n, cpus = claim.binding.threads, list(claim.binding.cpus)
        n_left = 0 if claim.binding.is_given else cpus_to_leave(n, cpus, devices)
        cpus = cpus[: len(cpus) - n_left] or None
        return machine_figures(devices, n - n_left, cpus, settings.get("isa"), anyway=anyway)


def _geometry(model: str) -> str | None:
    """The key under which ``coli tune`` keeps what it found for a model; None where it cannot have found anything."""
    from coli.config import ModelConfig, read_json_object
    from coli.container.reader import Container
    from coli.convert.convert import Options
    from coli.convert.resolve import find_model, is_container
    from coli.threads.tuning import geometry_key

    path = Path(model).expanduser()
    try:
        if path.is_file():
            return geometry_key(ModelConfig.from_dict(read_json_object(path), str(path)), Options().formats([]))
        path = find_model(model)
        if is_container(path):
            with Container.open(path) as container:
                manifest = container.manifest
                return geometry_key(container.config, (manifest.trunk_format, manifest.expert_format))
        return geometry_key(ModelConfig.from_folder(path), Options().formats([]))
    except ModelError:  # a GGUF file, or a config.json of no more than sizes: a plan needs no more
        return None
