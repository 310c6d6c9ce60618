"""The figures that a load would plan with, for verbs that plan without one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coli.devices.base import Device
    from coli.placement import Probe


def figures_beside(
    devices: Sequence[Device], threads: str | int | None = None, *, anyway: bool = False
) -> Probe | None:
    """Of these devices, and of the team that an engine would have beside them; kept ones, else measured now.

    threads : as --threads.   anyway : measure devices without an identity too; else they have no figures.
    """
    from coli import settings
    from coli._core import step
    from coli.placing import cpus_to_leave
    from coli.probing import machine_figures
    from coli.threads.claims import claim_threads

    with claim_threads(threads, openmp_built=step.has_openmp()) as claim:
        n, cpus, n_left = claim.binding.threads, list(claim.binding.cpus), 0
        if claim.binding.source in ("default", "profile"):
            n_free = len(os.sched_getaffinity(0)) - len(cpus) if hasattr(os, "sched_getaffinity") else 0
            n_left = cpus_to_leave(n, n_free, devices)
        cpus = cpus[: len(cpus) - n_left] or None
        return machine_figures(devices, n - n_left, cpus, settings.get("isa"), anyway=anyway)
