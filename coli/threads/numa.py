"""Several memory nodes: where new pages should go, asking the kernel for it, and where a model's pages lie.

The choice is a pure function.  Asking is ``set_mempolicy`` for the calling thread: pages of a mapped file that are read
in while it holds go where it says, threads started afterwards inherit it.  Containers often refuse the call (EPERM):
that is one warning and the run goes on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coli.log import logger
from coli.threads.topology import Topology, format_cpu_list

# linux/mempolicy.h, and the call's number by architecture (asm/unistd.h).
_MODES = {"default": 0, "bind": 2, "interleave": 3}
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}

_refused = False  # one warning a process, however many models it loads


@dataclass(frozen=True)
class MemoryPolicy:
    """Where new pages go: ``mode`` is "default", "bind" or "interleave"; ``reason`` says why."""

    mode: str
    nodes: tuple[int, ...]
    reason: str


def choose_policy(topology: Topology, cpus: Iterable[int], weights_bytes: int) -> MemoryPolicy:
    """Choose the policy for a team on ``cpus`` (all online ones where empty) and so many bytes of weights.

    A team on one node that can hold the weights is bound to it, since every byte is then near; any other is
    interleaved, since every worker reads all experts sooner or later and only all nodes together give all their
    bandwidth.  Which is faster, ``coli tune`` measures with teams of both kinds; the policy follows the team it kept.
    """
    with_memory = tuple(node.index for node in topology.nodes if node.memory_bytes or node.cpus)
    if len(with_memory) < 2:
        return MemoryPolicy("default", (), "one memory node")
    used = topology.nodes_of(tuple(cpus) or topology.online)
    room = sum(node.memory_bytes for node in topology.nodes if node.index in used)
    # Half, because a bound node also has to hold everything else that runs there, and a full one kills the process.
    if len(used) == 1 and weights_bytes <= room // 2:
        return MemoryPolicy("bind", used, f"all workers on node {used[0]}, which has the room")
    why = "workers on several nodes" if len(used) > 1 else f"node {used[0]} has not the room"
    return MemoryPolicy("interleave", with_memory, why)


def set_policy(policy: MemoryPolicy, syscall: Callable[..., int] | None = None) -> bool:
    """Ask the kernel for ``policy`` in this thread; False, after one warning a process, where it refuses."""
    global _refused
    number = _SET_MEMPOLICY.get(platform.machine())
    if syscall is None:
        if not hasattr(os, "sched_getaffinity") or number is None:
            return policy.mode == "default"
        libc = ctypes.CDLL(None, use_errno=True)
        syscall = libc.syscall
    bits = (max(policy.nodes, default=0) // 64 + 1) * 64
    mask = (ctypes.c_uint64 * (bits // 64))()
    for node in policy.nodes:
        mask[node // 64] |= 1 << (node % 64)
    # The kernel reads one bit fewer than it is told.
    arguments = (mask, bits + 1) if policy.nodes else (None, 0)
    if (
        syscall(
            ctypes.c_long(number or 0), ctypes.c_long(_MODES[policy.mode]), arguments[0], ctypes.c_ulong(arguments[1])
        )
        == 0
    ):
        return True
    reason = os.strerror(ctypes.get_errno()) if ctypes.get_errno() else "refused"
    if not _refused:
        _refused = True
        logger("threads").warning(
            f"memory policy {policy.mode} on nodes {format_cpu_list(policy.nodes)} refused ({reason}), going on with "
            "the kernel's own; in a container allow set_mempolicy (CAP_SYS_NICE), or start it with numactl --interleave"
        )
    return False


@contextmanager
def memory_policy(policy: MemoryPolicy) -> Iterator[bool]:
    """Hold ``policy`` in this thread, then the kernel's default again; yields whether it was granted."""
    granted = policy.mode != "default" and set_policy(policy)
    try:
        yield granted
    finally:
        if granted:
            set_policy(MemoryPolicy("default", (), "restored"))


# ---------------------------------------------------------------------------------------------------------------------
# Where the weights lie


def pages_by_node(numa_maps: str, paths: Iterable[str | Path]) -> dict[int, int]:
    """Sum the bytes that each node holds of ``paths``, from the text of /proc/PID/numa_maps."""
    wanted = {os.path.realpath(path) for path in paths}
    totals: Counter[int] = Counter()
    for line in numa_maps.splitlines():
        name = re.search(r"\bfile=(\S+)", line)
        # The kernel writes a space in a name as \040.
        if name is None or re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), name[1]) not in wanted:
            continue
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
            totals[int(node)] += int(pages) * int(size[1] if size else 4) * 1024
    return dict(sorted(totals.items()))


def where_files_lie(paths: Sequence[Path], samples: int = 512) -> dict[int, int]:
    """Sample pages of ``paths`` that are in memory now: {node: bytes seen}.  Empty where nothing is cached.

    Only pages that are in memory already are touched: reading one in would put it on the asker's node.
    """
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    totals: Counter[int] = Counter()
    for path in paths:
        size_bytes = path.stat().st_size
        if not size_bytes:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            data = np.frombuffer(view, np.uint8)
            n_pages = -(-size_bytes // page)
            flags = (ctypes.c_ubyte * n_pages)()
            known = libc.mincore(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(size_bytes), flags) == 0
            resident = np.flatnonzero(np.ctypeslib.as_array(flags) & 1) if known else np.arange(0)
            stride = max(1, len(resident) // max(1, samples // len(paths)))
            int(data[resident[::stride] * page].sum())
            try:
                text = Path("/proc/self/numa_maps").read_text(encoding="utf-8")
            except OSError:
                text = ""
            del data  # the mapping cannot be closed under an array
            totals.update(pages_by_node(text, [path]))
    return dict(sorted(totals.items()))
