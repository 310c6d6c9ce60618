"""The part of a sequence's state that lies on devices: who has it, where memory for it comes from, what is lost.

A layer that a device takes whole keeps its state there, one for each sequence, and nowhere else; what a device loses is
computed again from the sequence's ids, to the same bits.  So memory is never a reason to stop: where a device has none
left, the sequence that was not used for the longest time gives its states up, and at last a new sequence's layer stays
on the CPU.  Everything but `bury` runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from coli._core import step
from coli.devices.base import Device, DeviceError, LayerState
from coli.log import logger

if TYPE_CHECKING:
    from coli.engine.program import MixerOn, Program
    from coli.engine.span import SpanOn


class StatesLost(Exception):
    """A device failed in a layer that it takes whole: states of the batch are gone.  Never leaves the engine."""

    def __init__(self, step: MixerOn | SpanOn, error: DeviceError) -> None:
        super().__init__(str(error))
        self.step = step
        self.error = error


class Held:
    """One sequence's states on devices.

    by : the state by the step that moves it; None where the CPU has it, for want of memory.
    stale : the sequence's state must be computed again from its ids before it can go on.
    """

    __slots__ = ("by", "stale", "epoch", "used", "_rows", "__weakref__")

    def __init__(self) -> None:
        self.by: dict[MixerOn, LayerState | None] = {}
        self._rows: dict[SpanOn, list[LayerState] | None] = {}
        self.stale = False
        self.epoch: object = None  # of the program that was last found to fit
        self.used = 0

    @property
    def layers(self) -> list[int]:
        """The layers whose state a device has."""
        return [mixer.layer for mixer, state in list(self.by.items()) if state is not None]

    def row_of(self, span: SpanOn) -> list[LayerState] | None:
        """The states of a span's layers in order; None where one is not there.  Looked up once for many tokens."""
        if span not in self._rows:
            states = [self.by.get(mixer) for mixer in span.mixers]
            self._rows[span] = None if None in states else states
        return self._rows[span]

    def changed(self) -> None:
        """States came or went."""
        self._rows.clear()


class StateKeeper:
    """All sequences' states of one engine."""

    def __init__(self) -> None:
        self._holders: WeakSet[Held] = WeakSet()
        self._graves: deque[LayerState] = deque()
        self._turn = count(1)
        self._said: set[int] = set()
        self._batch: Sequence[Held] = ()  # those that must not give up anything

    def bury(self, by: dict[MixerOn, LayerState | None]) -> None:
        """Nobody holds these any more.  From any thread; their memory is given back by the next call of a step."""
        self._graves.extend(state for state in by.values() if state is not None)
        by.clear()

    def sweep(self) -> None:
        """Give the memory of buried states back."""
        while self._graves:
            _close(self._graves.popleft())

    def begin(self, batch: Sequence[Held]) -> None:
        """A step of these sequences is about to run."""
        self.sweep()
        self._batch = batch
        turn = next(self._turn)
        for held in batch:
            held.used = turn

    def fits(self, held: Held, program: Program, position: int) -> bool:
        """Whether the sequence's state is where the program looks for it."""
        if held.stale:
            return False
        if held.epoch is not program.epoch:
            elsewhere = any(state is not None and mixer not in program.mixers for mixer, state in list(held.by.items()))
            missing = position > 0 and any(mixer not in held.by for mixer in program.mixers)
            if elsewhere or missing:
                return False
            held.epoch = program.epoch
        return True

    def ready(self, held: Held, program: Program, position: int, n: int) -> None:
        """Make the states of a beginning sequence, and room for n positions more.

        Raises StatesLost where a device fails in any other way than by lack of memory.
        """
        if position == 0:
            for mixer in program.mixers:
                if mixer not in held.by:
                    held.by[mixer] = self._with_room(mixer, mixer.new_state)
                    held.changed()
                    self._holders.add(held)
        first, last = position // step.KV_BLOCK, (position + n - 1) // step.KV_BLOCK
        if position > 0 and position % step.KV_BLOCK and first == last:
            return
        for mixer in list(held.by):
            state = held.by[mixer]
            if state is None or self._with_room(mixer, lambda: state.reach(position + n) or True):  # noqa: B023
                continue
            self._leave_to_cpu(held, mixer)
            if position > 0:
                held.stale = True
                return

    @staticmethod
    def _leave_to_cpu(held: Held, full: MixerOn) -> None:
        """No room in a layer: those of its kind on that device ask for the same, and would fail one replay later."""
        for mixer, state in list(held.by.items()):
            if state is not None and mixer.device is full.device and mixer.is_attention == full.is_attention:
                _close(state)
                held.by[mixer] = None
        held.changed()

    def reset(self, held: Held) -> None:
        """Back to the empty state.  What the CPU has taken over for want of memory stays there."""
        for mixer, state in list(held.by.items()):
            if state is not None or mixer.dropped:
                del held.by[mixer]
                if state is not None:
                    _close(state)
        held.changed()
        held.stale, held.epoch = False, None

    def copy(self, held: Held) -> Held:
        """Independent states with the same contents; what cannot be copied is computed again when it is needed."""
        self.begin((held,))
        other = Held()
        other.stale, other.epoch, other.used = held.stale, held.epoch, held.used
        if held.stale:
            return other
        for mixer, state in held.by.items():
            try:
                copied = None if state is None else self._with_room(mixer, state.copy, say=False)
            except StatesLost:  # the next step finds out by itself, and says so
                copied = None
            if state is not None and copied is None:
                self.reset(other)
                other.stale = True
                return other
            other.by[mixer] = copied
        self._holders.add(other)
        return other

    def _with_room(self, mixer: MixerOn, take: Callable[[], Any], *, say: bool = True) -> Any:
        """What ``take`` takes; other sequences make room for it.  None where there is no memory even so."""
        while True:
            try:
                return take()
            except DeviceError as error:
                if error.kind != "out of memory":
                    raise StatesLost(mixer, error) from None
                if self._make_room(mixer.device):
                    continue
                if say:
                    self._say(mixer, error)
                return None

    def _make_room(self, device: Device) -> bool:
        """Drop the states of the sequence that was not used for the longest time; False where there is none."""
        idle = [
            held
            for held in self._holders
            if held not in self._batch
            and any(state is not None and mixer.device is device for mixer, state in list(held.by.items()))
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda held: held.used)
        self.reset(oldest)
        oldest.stale = True
        return True

    def _say(self, mixer: MixerOn, error: DeviceError) -> None:
        first = id(mixer.device) not in self._said
        self._said.add(id(mixer.device))
        logger("place").log(
            logging.WARNING if first else logging.DEBUG,
            "%s has no memory for the state of %s in one more sequence, or a longer one (%s): that is the CPU's",
            mixer.device.name, mixer.what, error,
        )  # fmt: skip


def _close(state: LayerState) -> None:
    try:
        state.close()
    except DeviceError as error:
        logger("place").debug("a state was not given back: %s", error)
