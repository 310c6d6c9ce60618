"""coli/threads/memory.py: machine, cgroup limit, swap, huge pages."""

from __future__ import annotations

import psutil
import pytest

from coli.threads.memory import Memory, read_memory
from coli.threads.topology import flat_topology

MEMINFO = "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB"
V1 = {
    "proc/self/cgroup": "4:memory:/box",
    "proc/self/mountinfo": "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    "proc/meminfo": MEMINFO,
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(200 << 20),
    "sys/fs/cgroup/memory/box/memory.stat": f"cache {1 << 20}\ntotal_cache {100 << 20}",
}


@pytest.mark.parametrize(
    ("limit", "limit_bytes", "usable_bytes"),
    [
        (str(300 << 20), 300 << 20, 200 << 20),
        ("9223372036854771712", None, 512 << 20),
        (str(900 << 20), 900 << 20, 512 << 20),
    ],
)
def test_v1_limit_counts_where_it_is_below_the_machine(limit, limit_bytes, usable_bytes, machine):
    """v1 writes "no limit" as a huge number; cached file pages do not count as used."""
    root = machine(flat_topology(2), {**V1, "sys/fs/cgroup/memory/box/memory.limit_in_bytes": limit})
    found = read_memory(root)
    assert (limit_bytes, usable_bytes) == (found.limit_bytes, found.usable_bytes)


def test_missing_files_are_zeros(tmp_path):
    """Nothing to read is nothing known, not an error."""
    assert Memory(0, 0, 0, 0) == read_memory(tmp_path)


@pytest.mark.skipif(not psutil.LINUX, reason="/proc is Linux's")
def test_this_machine_agrees_with_psutil():
    """Total memory is what psutil says."""
    assert psutil.virtual_memory().total == read_memory("/").total_bytes
