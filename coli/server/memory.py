"""Freed memory back to the system.

States come and go in sizes of hundreds of kilobytes, between small objects that stay.  glibc keeps what is freed below
a live object, so that a busy server's resident memory creeps up although nothing is held: by 8 % in three minutes of
bench/serve_load.py on the demo model (2026-11), and with this not at all.
"""

from __future__ import annotations

import ctypes
import time

EVERY_S = 5.0  # a trim is a few milliseconds, on the scheduler's thread
_last_s = 0.0

try:
    _trim = ctypes.CDLL(None).malloc_trim
except (AttributeError, OSError, TypeError):  # another C library: it has ways of its own
    _trim = None


def give_back() -> None:
    """Return freed pages to the system, at most once in EVERY_S; nothing where the C library cannot."""
    global _last_s
    now = time.monotonic()
    if _trim is not None and now - _last_s >= EVERY_S:
        _last_s = now
        _trim(0)
