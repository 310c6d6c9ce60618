"""How fast a team reads memory: the ceiling of decode, which is reading weights.

Each worker is a thread pinned for the time of the measurement that xors its own part of a buffer much larger than the
caches, with the streams and the prefetch of the GEMV (``_core.kernels.read_xor``).  The caller's mask stays as it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from coli._core import kernels
from coli.threads.memory import available_bytes
from coli.threads.topology import Topology

_REPEATS = 5
_SMALLEST_BYTES = 512 << 20


def buffer_bytes(topology: Topology, available_bytes: int) -> int:
    """Four times all last-level caches, at least 512 MiB, at most an eighth of the memory that is free."""
    return min(max(4 * topology.last_caches_bytes, _SMALLEST_BYTES), max(available_bytes // 8, 1 << 20))


def read_gb_s(topology: Topology, cpus: Sequence[int], n_threads: int | None = None) -> float:
    """Measure the read bandwidth, GB/s, of one worker on each of ``cpus``, or of ``n_threads`` free ones.

    The best of five passes: what disturbs a pass only makes it slower.
    """
    workers = list(cpus) or [-1] * (n_threads or 1)
    part = buffer_bytes(topology, available_bytes()) // len(workers) // 256 * 256
    gate = threading.Barrier(len(workers))
    times: list[list[tuple[float, float]]] = [[] for _ in workers]
    failed: list[BaseException] = []

    def work(number: int, cpu: int) -> None:
        try:
            if cpu >= 0 and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {cpu})
            data = np.ones(part, np.uint8)  # made here, so that its pages lie on this worker's node
            for _ in range(_REPEATS):
                gate.wait()
                # Each worker takes its own times: one that waits to be told would start late and measure too little.
                start = time.perf_counter()
                kernels.read_xor(data)
                times[number].append((start, time.perf_counter()))
        except threading.BrokenBarrierError:
            pass  # another worker failed and has said why
        except BaseException as error:
            failed.append(error)
            gate.abort()

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    passes = zip(*times, strict=True)
    best_s = min(max(end for _, end in one) - min(start for start, _ in one) for one in passes)
    return part * len(workers) / best_s / 1e9
