"""A card for machines that have none: the kernels' own text, compiled for the CPU, behind a driver that runs them.

    driver.py    EmulatedDriver, and `emulated()` that puts it where the bindings would be
    build.py     the text of the kernels -> a library, kept by its content
    ptx.py       inline PTX -> calls into ptx.h
    streams.cpp  streams, events, graphs
    fibers.h     threads of a block as fibers; barriers, warps, shared memory, and what kernels do wrong
    cuda.h       CUDA's words upon them
    ptx.h        PTX instructions upon them
    abi.h        what the two libraries know of each other
"""

from devices.cuda.emulator.build import BuildError, kernel_library, missing
from devices.cuda.emulator.driver import CARD, EmulatedDriver, emulated
from devices.cuda.emulator.ptx import UnknownInstruction

__all__ = ["CARD", "BuildError", "EmulatedDriver", "UnknownInstruction", "emulated", "kernel_library", "missing"]
