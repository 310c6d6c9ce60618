"""Arithmetic only: Cython and C.  Importing this package loads the OpenMP runtime and leaves the process as it was.

With OMP_PLACES or OMP_PROC_BIND set, libgomp pins the thread that loads it, there and then; a numpy imported
later would count one CPU, and every child would inherit it.  So numpy is imported first and the mask is put
back afterwards; the engine's team is pinned by itself.
"""

import os

import numpy  # noqa: F401  (before libgomp: it counts CPUs when it is imported)

if hasattr(os, "sched_getaffinity"):
    _mask = os.sched_getaffinity(0)
    from coli._core import kernels, quantize, step  # noqa: F401

    os.sched_setaffinity(0, _mask)
else:
    from coli._core import kernels, quantize, step  # noqa: F401
