"""What memory the process may have: the machine's, the cgroup's limit, swap, transparent huge pages.

Pure functions of files below one root folder, as in ``topology``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from coli.threads.limits import cgroup_folders
from coli.threads.topology import small_file


@dataclass(frozen=True)
class Memory:
    """Bytes of memory; ``limit_bytes`` is the cgroup's (None: none), ``thp`` the mode of transparent huge pages."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    limit_bytes: int | None = None
    limit_used_bytes: int | None = None
    thp: str | None = None

    @property
    def usable_bytes(self) -> int:
        """What can be had now, by machine and cgroup."""
        if self.limit_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, max(0, self.limit_bytes - (self.limit_used_bytes or 0)))


def available_bytes() -> int:
    """What this process can have of memory now: the machine's, and no more than its cgroup leaves."""
    import psutil

    found, memory = psutil.virtual_memory().available, read_memory()
    return found if memory.limit_bytes is None else min(found, memory.usable_bytes)


def read_memory(root: str | Path = "/") -> Memory:
    """Read /proc/meminfo, the cgroup's memory limit and the huge page mode below ``root``; missing files count as 0."""
    root = Path(root)
    text = small_file(root / "proc/meminfo") or ""
    kib = {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
    total = kib.get("MemTotal", 0) * 1024
    limit, used = None, None
    for folder in cgroup_folders(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            found = small_file(folder / limit_name) or ""
            # v1 writes "no limit" as a number near 2**63; what is above the machine's memory limits nothing.
            if found.isdigit() and int(found) < (limit or total or 1 << 62):
                limit = int(found)
                used = _without_cache(folder, small_file(folder / used_name) or "0")
    mode = re.search(r"\[(\w+)\]", small_file(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return Memory(
        total,
        kib.get("MemAvailable", 0) * 1024,
        kib.get("SwapTotal", 0) * 1024,
        (kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)) * 1024,
        limit,
        used,
        mode.group(1) if mode else None,
    )


def _without_cache(folder: Path, usage: str) -> int:
    """A cgroup's use less its file pages, which the kernel gives back before it refuses anything."""
    stat = dict(line.split(" ", 1) for line in (small_file(folder / "memory.stat") or "").splitlines() if " " in line)
    cached = stat.get("file", stat.get("total_cache", "0"))
    return max(0, int(usage) - int(cached)) if usage.isdigit() and cached.isdigit() else 0
