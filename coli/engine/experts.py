"""The experts of one layer where some of them, or the shared expert, are on devices.

All contributions are unweighted vectors, added in rank order whoever made them, so who computes what is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coli._core import routing, step
from coli.devices.base import Device, DeviceError

if TYPE_CHECKING:
    from coli.engine.program import Program, Tier, Views

_MOE = step.OPS.index("MOE")


def take_groups(tier: Tier, groups: Sequence[Any], external: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    """The answers of the groups that a tier has issued; what a device did not answer is no longer external."""
    answers = []
    for group in groups:
        y = tier.take(group)
        if y is None:
            external[group.rows, group.ranks] = 0
        else:
            answers.append((group, y))
    return answers


def put_answers(views: Views, answers: Sequence[tuple[Any, np.ndarray]]) -> None:
    """Answers to where the sum over ranks looks for them.  The CPU has numbered the slots."""
    for group, y in answers:
        routing.put(views.expert_y, views.slot_of, group.rows, group.ranks, y)


class ExpertsOn:
    """The MoE of one layer with experts, or the shared expert, on devices.

    Devices start first, the CPU computes what they do not hold, then their answers are taken.
    """

    __slots__ = ("program", "layer", "op", "shared_device", "shared_handle")

    def __init__(self, program: Program, layer: int, shared: tuple[Device, Any] | None) -> None:
        self.program = program
        self.layer = layer
        self.op = layer * step.N_OPS + _MOE
        self.shared_device, self.shared_handle = shared or (None, None)

    def run(self, runner: step.Runner) -> None:
        program, tier, views = self.program, self.program.tier, self.program.views
        groups: Sequence[Any] = ()
        if tier is not None:
            if program.decoding is not None:
                tier.note(self.layer, views.top_idx, program.decoding)
            groups = tier.issue(self.layer, views.top_idx, views.xn, views.external)
        ticket = self._shared(lambda: self.shared_device.begin_ffn(self.shared_handle, views.xn))
        runner.shared_external = ticket is not None
        runner.run(self.op, self.op + 1)
        shared = None if ticket is None else self._shared(lambda: self.shared_device.take(ticket))
        answers = take_groups(tier, groups, views.external)
        if len(answers) < len(groups) or (ticket is not None and shared is None):
            # slots are numbered anew, so the CPU's part is done again with the failed ones in it
            runner.shared_external = shared is not None
            runner.run(self.op, self.op + 1)
        runner.shared_external = False  # the next layer's shared expert may be the CPU's, inside a longer run
        put_answers(views, answers)
        if shared is not None:
            views.shared_y[:] = shared

    def _shared(self, ask: Any) -> Any:
        """What the shared expert's device answers; None without one, and from its first failure on."""
        if self.shared_handle is None:
            return None
        try:
            return ask()
        except DeviceError as error:
            self.shared_handle = None
            self.program.failed(self.shared_device, f"shexp of layer {self.layer}", error)
            return None
