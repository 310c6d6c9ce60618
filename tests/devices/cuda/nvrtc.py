"""NVRTC without a driver: PTX and ptxas' resource report of a text."""

from __future__ import annotations

import re

from cuda.bindings import nvrtc


def _room(n: int) -> bytes:
    """Bytes for the library to write into.  Never one alone: that object is Python's own, for the whole process."""
    return bytes(max(n, 2))


def compile_text(text: str, arch: str, *options: str) -> tuple[str, str]:
    """PTX (arch "compute_NN") or "" (arch "sm_NN"), and the log.  Raises AssertionError with the log."""
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], [])
    flags = [f"--gpu-architecture={arch}", "--std=c++17", *options]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    log = _room(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(code) == 0, log.decode()
    ptx = b""
    if arch.startswith("compute"):
        ptx = _room(nvrtc.nvrtcGetPTXSize(program)[1])
        nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0").decode(), log.rstrip(b"\0").decode()


def resources(log: str) -> dict[str, tuple[int, int, int]]:
    """{kernel: (registers, bytes of stack, bytes of spill stores)} from a log made with --ptxas-options=-v."""
    stack = r".*?(\d+) bytes stack frame, (\d+) bytes spill stores.*\n"
    pattern = r"Function properties for (\S+)\n" + stack + r".*?Used (\d+) registers"
    return {name: (int(used), int(stack), int(spill)) for name, stack, spill, used in re.findall(pattern, log)}


# Multiply, add, subtract, divide, root and reciprocal rounded to nearest; moves, comparisons, conversions and
# sign operations round nothing.
ROUNDED = {f"{op}.rn.f32" for op in ("mul", "add", "sub", "div", "sqrt", "rcp")}
EXACT = {"mov", "ld", "st", "setp", "selp", "neg", "abs", "min", "max", "shfl", "cvt", "set", "slct", "atom", "red"}


def wrong_arithmetic(ptx: str) -> set[str]:
    """Instructions on f32 that the contract does not allow."""
    found = set(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)*\.f32(?:\.\w+)*)\b", ptx, re.MULTILINE))
    found |= set(re.findall(r"^\s*(?:@!?%\w+\s+)?(\w*fma\w*(?:\.\w+)*)\b", ptx, re.MULTILINE))
    return {name for name in found if name not in ROUNDED and name.split(".")[0] not in EXACT or ".ftz" in name}
