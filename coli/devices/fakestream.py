"""The fake device with experts in passing: computed from the bytes that come with the call, as late as a card may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coli.devices import fakemath
from coli.devices.base import Asked, DeviceError
from coli.devices.fake import FakeDevice
from coli.devices.fakemath import require
from coli.devices.fakespan import Run

OPERATIONS = ("open", "stream", "streamed")


class Stream:
    """Experts on their way.   seconds : what they are said to take."""

    def __init__(
        self, device: StreamingFake, run: Run, asked: Asked, where: list[np.ndarray], slabs: Sequence[np.ndarray]
    ) -> None:
        self.seconds = 0.0
        self._device = device
        self._run = run
        self._external = asked.external
        self._where = where
        self._slabs = slabs

    def wait(self) -> None:
        """Compute them, and spoil the slabs' place: nothing of them is kept."""
        device, routed = self._device, self._run._asking
        require(device.stream is self, "a stream is waited for twice, or after the next one began")
        device.stream = None
        try:
            device._begin("streamed", len(self._slabs))
        except DeviceError:
            for where in self._where:
                self._external[where] = 0
            raise
        require(routed is not None, "a stream outlived the question that it belongs to")
        slab = device._slots.slab
        for where, data in zip(self._where, self._slabs, strict=True):
            x = np.ascontiguousarray(routed.xn[where.nonzero()[0]])
            routed.y[where] = fakemath.ffn(data[: slab.slab_bytes], fakemath.slab_parts(slab), x)
            routed.external[where] = 1
        self.seconds = device.expert_s * len(self._slabs)


class StreamingFake(FakeDevice):
    """A FakeDevice that is a ``devices.base.StreamDevice``, too.

    fail : the operations "open" (out of memory), "stream" and "streamed" beside those of FakeDevice.
    expert_s : seconds that an expert is said to take.   stream : the one under way.

    calls : also ("open",), ("stream", experts) and ("streamed", how many).
    """

    def __init__(
        self, free_bytes: int, *, expert_s: float = 1e-5, fail: Sequence[tuple[str, int]] = (), **options: Any
    ) -> None:
        own = [entry for entry in fail if entry[0] in OPERATIONS]
        super().__init__(free_bytes, fail=[entry for entry in fail if entry not in own], **options)
        self._fail |= frozenset(own)
        self.expert_s = expert_s
        self.stream: Stream | None = None
        self.is_open = False

    def open_stream(self) -> None:
        """Get ready."""
        self._check_idle()
        try:
            self._begin("open")
        except DeviceError as error:
            raise DeviceError(str(error), "lost" if self._lost else "out of memory") from None
        self.is_open = True

    def begin_stream(self, run: Run, asked: Asked, experts: np.ndarray, slabs: Sequence[np.ndarray]) -> Stream:
        """Start experts of the layer that the run asks about."""
        require(self.is_open, f"{self.name}: experts in passing, and nobody got ready for them")
        require(self.stream is None, f"{self.name}: a stream begins before the last one was waited for")
        require(self._run is run and run._asking is not None, f"{self.name}: experts in passing that nobody asked for")
        require(len(experts) == len(slabs) > 0, f"{len(experts)} experts, {len(slabs)} slabs")
        self._begin("stream", tuple(int(expert) for expert in experts))
        where = [(asked.top_idx == expert) & (asked.external == 0) for expert in experts]
        for expert, mine in zip(experts, where, strict=True):
            require(mine.any(), f"expert {expert} was not asked for")
            asked.external[mine] = 1
        self.stream = Stream(self, run, asked, where, list(slabs))
        return self.stream
