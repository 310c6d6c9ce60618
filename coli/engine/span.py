"""Runs of layers that a device takes whole: one step from residual stream to residual stream, or to the logits.

What the device lacks of a layer it asks for: other devices and the CPU compute that while it goes on with the rest.
The layers' own steps are kept beside it, for batches that the device cannot take and for good when it has failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coli._core import routing, step
from coli.devices.base import Asked, DeviceError, SpanDevice, SpanPart, SpanRun
from coli.engine import streaming
from coli.engine.experts import put_answers, take_groups
from coli.engine.states import StatesLost

if TYPE_CHECKING:
    from coli.engine.program import MixerOn, Program, Tier

LOGITS_ROWS = 32  # wanted rows that a span makes the logits of: at 248,320 float32 each, 32 MB of pinned memory


@dataclass(frozen=True)
class PlacedSpan:
    """Layers [first, last) on one device.   handle : of `SpanDevice.span`.   has_head : the logits come with them."""

    device: SpanDevice
    handle: Any
    first: int
    last: int
    has_head: bool

    @property
    def what(self) -> str:
        """Its parts in words."""
        last = self.last - 1
        layers = f"layer {last}" if self.first == last else f"layers {self.first}-{last}"
        return f"{layers} and the head" if self.has_head else layers


class SpanOn:
    """The layers of a span on their device.

    steps : the same layers one by one.   mixers : of the layers, in order.   dropped : it has failed; the steps run.
    """

    __slots__ = (
        "program", "device", "handle", "what", "first", "last", "has_head", "mixers", "steps", "dropped", "streaming",
    )  # fmt: skip

    def __init__(self, program: Program, placed: PlacedSpan, mixers: Sequence[MixerOn], steps: Sequence[Any]) -> None:
        assert len(mixers) == placed.last - placed.first, f"{placed.what}: {len(mixers)} mixers"
        self.program = program
        self.device, self.handle = placed.device, placed.handle
        self.what = f"{placed.what} as a whole"
        self.first, self.last, self.has_head = placed.first, placed.last, placed.has_head
        self.mixers = mixers
        self.steps = steps
        self.dropped = False
        of_device = (span.streaming for span in program.spans if span.device is self.device)
        self.streaming = next(of_device, None) or streaming.Streaming(program, self.device)

    @property
    def max_rows(self) -> int:
        """Rows of a batch at most."""
        return self.handle.max_rows

    def run(self, runner: step.Runner) -> None:
        parts = self._parts()
        if parts is None:
            for one in self.steps:
                one.run(runner)
            return
        program = self.program
        rows = program.logit_rows if self.has_head and len(program.logit_rows) <= LOGITS_ROWS else ()
        is_last = self.last == program.config.num_hidden_layers
        nobody_goes_on = is_last and len(rows) == len(program.logit_rows)
        streams = program.n_rows >= streaming.STREAM_ROWS and self.streaming.ready(self.first, self.last)
        run: SpanRun | None = None
        try:
            run = self.device.begin_span(self.handle, parts, program.views.x, program.cos, program.sin, rows)
            top_idx = self._go(run, runner, None if nobody_goes_on else program.views.x, rows, streams)
        except BaseException as error:
            if run is not None:
                with contextlib.suppress(DeviceError):
                    run.abandon()
            if isinstance(error, DeviceError):
                raise StatesLost(self, error) from None
            raise
        if rows:
            program.has_logits, program.finite = True, run.finite
        tier = program.tier
        if tier is not None:
            if program.decoding is not None:
                tier.note(self.first, top_idx, program.decoding)
            tier.took(self.device, self.first, top_idx, in_passing=self.streaming.in_passing if streams else 0)

    def _parts(self) -> list[SpanPart] | None:
        """The batch for the device; None where it cannot have it."""
        program = self.program
        if self.dropped or program.n_rows > self.handle.max_rows:
            return None
        made = []
        for part in program.parts:
            states = part.held.row_of(self)
            if states is None:
                return None
            made.append(SpanPart(part.first_row, part.n_rows, part.position, states))
        return made

    def _go(
        self, run: SpanRun, runner: step.Runner, x_out: np.ndarray | None, rows: Sequence[int], streams: bool
    ) -> np.ndarray:
        """Answer until nothing is asked any more; the experts chosen, int32 (layers, T, top_k).

        streams : the device may be given some of what it asks for (``streaming``).
        """
        tier, program = self.program.tier, self.program
        others = tier is not None and tier.has_others(self.device)
        while (asked := run.ask()) is not None:
            if others:
                self._answer_with(tier, run, runner, asked)
            else:
                if streams:
                    self.streaming.compute(run, runner, self.first + asked.place, asked)
                else:
                    runner.moe(self.first + asked.place, asked.xn, asked.top_idx, asked.external, asked.shared)
                views = program.views
                run.answer(views.expert_y, views.slot_of, views.shared_y if asked.shared else None)
        return run.finish(x_out, program.logits[: len(rows)] if rows else None, program.soon)

    def _answer_with(self, tier: Tier, run: SpanRun, runner: step.Runner, asked: Asked) -> None:
        """Answer with what other devices hold, and the CPU for the rest."""
        layer, views = self.first + asked.place, self.program.views
        external = views.external
        groups = tier.issue(layer, asked.top_idx, asked.xn, external, self.device, asked.external)
        # where nothing is left for the CPU its team need not be woken
        if asked.shared or not routing.number(external, views.slot_of):
            runner.moe(layer, asked.xn, asked.top_idx, external, asked.shared)
        answers = take_groups(tier, groups, external)
        if len(answers) < len(groups):  # slots are numbered anew, so the CPU's part is done again with the failed ones
            runner.moe(layer, asked.xn, asked.top_idx, external, asked.shared)
        put_answers(views, answers)
        run.answer(views.expert_y, views.slot_of, views.shared_y if asked.shared else None)
