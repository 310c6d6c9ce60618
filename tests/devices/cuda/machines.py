"""Where tests of kernels run: on the first NVIDIA card, and emulated on the CPU.  What is missing is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from devices.cuda import emulator

from coli.devices.cuda import probe

CARD, EMULATED = "card", "emulated"
_MARKS = {
    CARD: [pytest.mark.gpu, pytest.mark.skipif(not isinstance(probe.probe_cuda(), list), reason="no NVIDIA card")],
    EMULATED: [pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))],
}
MACHINES = [pytest.param(name, marks=marks) for name, marks in _MARKS.items()]


def on(card: Iterable[tuple], emulated: Iterable[tuple]) -> list:
    """Cases of a test whose first parameter is the machine: (machine, *case) for the cases of each."""
    cases = {CARD: card, EMULATED: emulated}
    return [pytest.param(name, *case, marks=_MARKS[name]) for name, of_it in cases.items() for case in of_it]


@contextmanager
def machine(name: str) -> Iterator[emulator.EmulatedDriver | None]:
    """The driver is that of this machine until the end of the block, which gets the emulated one."""
    if name == CARD:
        yield None
        return
    with emulator.emulated() as driver:
        yield driver
