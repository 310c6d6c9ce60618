"""What a card reads in a second, and what asking it takes: measured with a kernel that does nothing else."""

from __future__ import annotations

import time

import numpy as np

from coli.devices.cuda.context import Context
from coli.devices.cuda.lane import Lane

_BYTES = 256 << 20  # beyond every card's L2 cache
_CALLS = 50


def measure(context: Context) -> tuple[float, float]:
    """GB/s (10**9) from a buffer beyond the caches, and us of the round trip of an empty graph; the best of 50 calls.

    Raises DeviceError where the card has no memory for the buffer, or fails.
    """
    at = context.alloc(_BYTES, "measuring")
    lane = Lane(context, "measuring", (at, _BYTES))
    try:
        lane.reserve(64, 64)
        context.zero(at, _BYTES)
        blocks = 4 * context.multiprocessors

        def read() -> None:
            context.launch("read_all", "", (blocks, 1), 512, 0, lane.stream, at, _BYTES // 16, at)
            lane.raise_flag()

        seconds = {}
        nothing, answer = np.empty((0, 1), np.float32), np.empty((0, 1), np.float32)
        for body in (read, lane.raise_flag):
            graph = context.capture(lane.stream, body)
            best = float("inf")
            for _ in range(_CALLS):
                start = time.perf_counter()
                lane.call(nothing, 1, int(graph), answer)
                best = min(best, time.perf_counter() - start)
            context.free_graph(graph)
            seconds[body] = best
        latency_s = seconds[lane.raise_flag]
        return _BYTES / (seconds[read] - latency_s) / 1e9, latency_s * 1e6
    finally:
        lane.close()
        context.free(at)
