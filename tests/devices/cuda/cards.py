"""A context on a card with arrays put in and got out, for tests of single kernels."""

from __future__ import annotations

import numpy as np

from coli.devices.cuda import probe
from coli.devices.cuda.context import Context


class Card:
    """Arrays in and out of a context, outputs poisoned first."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        card = probe.probe_cuda()[0]
        self.driver = driver
        self.context = Context(card.cuda_ordinal, card.arch, card.name)
        self.stream = self.context.stream()
        self.held: list[int] = []

    def put(self, array: np.ndarray) -> int:
        """Device address of a copy."""
        array = np.ascontiguousarray(array)
        at = self.context.alloc(max(array.nbytes, 256), "a test")
        self.held.append(at)
        self.context.check(self.driver.cuMemcpyHtoD(at, array.ctypes.data, array.nbytes), "copy")
        return at

    def room(self, *shape: int, dtype=np.float32) -> int:
        """Device address of poisoned memory."""
        return self.put(np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8))

    def get(self, at: int, *shape: int, dtype=np.float32) -> np.ndarray:
        """What is there after all work."""
        out = np.empty(shape, dtype)
        self.context.synchronize(self.stream)
        self.context.check(self.driver.cuMemcpyDtoH(out.ctypes.data, at, out.nbytes), "copy")
        return out

    def run(self, kernel: str, variant: str, grid: tuple[int, ...], threads: int, shared: int, *arguments) -> None:
        """Launch."""
        self.context.launch(kernel, variant, grid, threads, shared, self.stream, *arguments)

    def clear(self) -> None:
        """Free what tests put."""
        for at in self.held:
            self.context.free(at)
        self.held.clear()
