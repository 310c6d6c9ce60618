"""Arithmetic only: Cython and C.  Importing this package loads the OpenMP runtime and leaves the process as it was.

With OMP_PLACES or OMP_PROC_BIND set, libgomp pins the thread that loads it, there and then; a numpy imported
later would count one CPU, and every child would inherit it.  So numpy is imported first and the mask is put
back afterwards; the engine's team is pinned by itself.
"""

import os

import numpy  # noqa: F401  (before libgomp: it counts CPUs when it is imported)

_mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
try:
    from coli._core import kernels, quantize, step  # noqa: F401
except ImportError as error:
    if any(name.startswith("kernels.") and name.endswith((".so", ".dylib")) for name in os.listdir(__path__[0])):
        raise
    raise ImportError(
        f"coli is not built in {os.path.dirname(os.path.dirname(__path__[0]))}: pip install -e . there, or run Python "
        "from another folder to use the installed one"
    ) from error
finally:
    if _mask is not None:
        os.sched_setaffinity(0, _mask)
