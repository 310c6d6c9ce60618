"""The figures that a load would plan with, for verbs that plan without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from coli.errors import ModelError

if TYPE_CHECKING:
    from coli.config import ModelConfig
    from coli.devices.base import Device
    from coli.placement import Probe


def figures_beside(
    devices: Sequence[Device], model: str, threads: str | int | None = None, *, anyway: bool = False
) -> Probe | None:
    """Of these devices, and of the team that a model's engine would have beside them; kept ones, else measured now.

    model, threads : as MODEL and --threads; what ``coli tune`` found for the model counts.
    anyway : measure devices without an identity too; else they have no figures.
    """
    from coli import settings
    from coli._core import step
    from coli.placing import cpus_to_leave
    from coli.probing import machine_figures
    from coli.threads.claims import claim_threads

    with claim_threads(threads, geometry=_geometry(known_model(model)), openmp_built=step.has_openmp()) as claim:
        n, cpus = claim.binding.threads, list(claim.binding.cpus)
        n_left = 0 if claim.binding.is_given else cpus_to_leave(n, cpus, devices)
        cpus = cpus[: len(cpus) - n_left] or None
        return machine_figures(devices, n - n_left, cpus, settings.get("isa"), anyway=anyway)


class Known(NamedTuple):
    """What small files say of a model.   formats : of the trunk and the experts; None before it is converted."""

    config: ModelConfig
    formats: tuple[str, str] | None
    kv_dtype: str


def known_model(model: str) -> Known | None:
    """Of a container, a checkpoint, a GGUF file or a config.json; None where that says no more than a plan needs."""
    from coli.config import ModelConfig, read_json_object
    from coli.container.reader import Container
    from coli.convert.gguf_file import is_gguf
    from coli.convert.resolve import find_model, is_container

    path = Path(model).expanduser()
    try:
        if is_gguf(path):
            from coli.convert.gguf import GgufCheckpoint

            with GgufCheckpoint(find_model(model)) as checkpoint:
                return Known(checkpoint.config, None, "float16")
        if not path.is_file():
            path = find_model(model)
            if is_container(path):
                with Container.open(path) as container:
                    manifest = container.manifest
                    return Known(container.config, (manifest.trunk_format, manifest.expert_format), manifest.kv_dtype)
            path = path / "config.json"
        return Known(ModelConfig.from_dict(read_json_object(path), str(path)), None, "float16")
    except ModelError:  # a config.json of sizes alone
        return None


def _geometry(known: Known | None) -> str | None:
    """The key under which ``coli tune`` keeps what it found for a model, converted as it is by default."""
    if known is None:
        return None
    from coli.convert.convert import Options
    from coli.threads.tuning import geometry_key

    return geometry_key(known.config, known.formats or Options().formats([]))
