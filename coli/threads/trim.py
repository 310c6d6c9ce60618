"""Freed memory back to the system.

glibc keeps what is freed below a live object, for as long as the process runs.  It maps blocks of 128 KiB and more
apart, and unmaps them when they are freed; but the first such block that is freed raises that limit to the block's own
size, up to 32 MiB.  From then on large blocks come from the heap like everything small, and one small block that
outlives them holds all the pages below it.
"""

from __future__ import annotations

import ctypes

try:
    _malloc_trim = ctypes.CDLL(None).malloc_trim
except (AttributeError, OSError, TypeError):  # another C library: it has ways of its own
    _malloc_trim = None


def return_free_pages() -> None:
    """Return the free pages of every thread's heap to the system.  Where the C library is not glibc they stay.

    Takes milliseconds, during which other threads cannot allocate.
    """
    if _malloc_trim is not None:
        _malloc_trim(ctypes.c_size_t(0))
