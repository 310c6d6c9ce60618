"""Memory that measuring has freed, given back to the system at once: samples are as large as layers of a model."""

from __future__ import annotations

import gc

from coli.threads.trim import return_free_pages


def give_memory_back() -> None:
    """Return free pages to the system.  For the end of work that is done once: other threads wait meanwhile."""
    gc.collect()  # a program and its steps hold each other, and so the samples
    return_free_pages()
