"""Memory that measuring has freed, given back to the system at once.

glibc keeps it otherwise, for as long as the process runs.  It maps blocks of 128 KiB and more apart, and unmaps them
when they are freed; but the first such block that is freed raises that limit to the block's own size, up to 32 MiB.
From then on matrices of a layer come from the heap like everything small, and one small block that outlives them holds
all the pages below it.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def give_memory_back() -> None:
    """Return free pages of every thread's heap to the system.  Where the C library is not glibc they stay.

    Takes milliseconds, during which other threads cannot allocate: for the end of work that is done once.
    """
    gc.collect()  # a program and its steps hold each other, and so the samples
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
