"""Missing experts of a large batch that the span's own device computes in passing, beside the CPU team.

A span asks layer by layer for the experts that its device does not hold.  For many rows part of them is sent to the
device and computed there meanwhile; what comes of them it writes into the answer itself, and the host the rest.  Who
gets what is decided in `placement.streaming`, from what both sides took so far.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coli._core import step
from coli.devices.base import Asked, DeviceError, SpanRun, StreamRun
from coli.log import logger
from coli.placement.streaming import StreamFigures

if TYPE_CHECKING:
    from coli.engine.program import Program

STREAM_ROWS = 64
"""Rows from which on a batch is looked at: a decode step has far fewer, and never pays for the look."""


class Streaming:
    """The streams of one device.

    figures : what both sides take.   off : nothing is streamed any more.
    missing, streamed : experts that layers of large batches asked for so far, and those of them that were streamed.
    in_passing : ranks of the batch that were.
    """

    def __init__(self, program: Program, device: Any) -> None:
        self.program = program
        self.device = device
        self.figures = StreamFigures()
        self.off = program.tier is None or not hasattr(device, "begin_stream")
        self.missing = self.streamed = self.in_passing = 0
        self._is_open = False

    def ready(self, first: int, last: int) -> bool:
        """Whether a batch that is about to begin in layers [first, last) may be streamed to.

        Takes what that needs of the device, at the first of them.
        """
        tier = self.program.tier
        self.in_passing = 0
        if self.off or tier.has_others(self.device) or not tier.lacks(self.device, first, last):
            return False
        if self._is_open:
            return True
        try:
            self.device.open_stream()
            self._is_open = True
        except DeviceError as error:
            self.off = True
            logger("place").info("%s takes no experts in passing of a prompt: %s", self.device.name, error)
        return self._is_open

    def compute(self, run: SpanRun, runner: step.Runner, layer: int, asked: Asked) -> None:
        """What was asked for of a layer into the runner's buffers, but for ranks that the device answers itself.

        Raises DeviceError where the device is lost.
        """
        slabs = self.program.tier.slabs(layer)
        counts = np.bincount(asked.top_idx[asked.external == 0], minlength=len(slabs))
        experts = np.flatnonzero(counts)
        chosen = self.figures.choose(counts[experts].tolist(), slabs.shape[1])
        streamed = experts[chosen]
        stream = self._begin(run, asked, streamed, [slabs[expert] for expert in streamed.tolist()])
        self.missing += len(experts)
        start = time.perf_counter()
        try:
            runner.moe(layer, asked.xn, asked.top_idx, asked.external, asked.shared)
        except BaseException:
            if stream is not None:  # it must not write any more when the run is given up
                with contextlib.suppress(DeviceError):
                    stream.wait()
            raise
        seconds = time.perf_counter() - start
        if stream is None:
            self.figures.cpu_took(seconds, slabs.shape[1], len(experts), int(counts.sum()))
        elif self._took(stream):
            self.streamed += len(streamed)
            n_rows = int(counts[streamed].sum())
            self.in_passing += n_rows
            self.figures.cpu_took(
                seconds, slabs.shape[1], len(experts) - len(streamed), int(counts.sum()) - n_rows
            )  # fmt: skip
            self.figures.stream_took(stream.seconds, slabs.shape[1], len(streamed))
        else:  # the CPU's part is done again with the others in it
            runner.moe(layer, asked.xn, asked.top_idx, asked.external, asked.shared)

    def _begin(
        self, run: SpanRun, asked: Asked, experts: np.ndarray, slabs: Sequence[np.ndarray]
    ) -> StreamRun | None:
        if self.off or not slabs:
            return None
        try:
            return self.device.begin_stream(run, asked, experts, slabs)
        except DeviceError as error:
            self._failed(error)
            return None

    def _took(self, stream: StreamRun) -> bool:
        """Wait for a stream.  False where it failed, and the CPU must compute all."""
        try:
            stream.wait()
        except DeviceError as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: DeviceError) -> None:
        """No more of them.  Raises the error of a device that is lost: the batch is, too."""
        self.off = True
        if error.kind == "lost":
            raise error
        self.program.failed(self.device, "experts in passing of a prompt", error)
