"""A server's freed memory, given back to the system now and then.

States come and go in sizes of hundreds of kilobytes, between small objects that stay.  The C library keeps what is
freed between those, so that a busy server's resident memory creeps up although nothing is held: by 8 % in three minutes
of bench/serve_load.py on the demo model (2026-11), and with this not at all.
"""

from __future__ import annotations

import time

from coli.threads.trim import return_free_pages

EVERY_S = 5.0  # a trim is a few milliseconds, on the scheduler's thread
_last_s = 0.0


def give_back() -> None:
    """Return free pages to the system, at most once in EVERY_S."""
    global _last_s
    now = time.monotonic()
    if now - _last_s >= EVERY_S:
        _last_s = now
        return_free_pages()
