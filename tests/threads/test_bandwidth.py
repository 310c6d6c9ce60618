"""coli/threads/bandwidth.py: the read speed of a team, measured without touching the caller."""

from __future__ import annotations

import os

import pytest

from coli.threads import bandwidth
from coli.threads.bandwidth import buffer_bytes, read_gb_s
from coli.threads.limits import local_machine
from coli.threads.topology import flat_topology, read_topology

from .conftest import two_nodes


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that keep the test quick; the speed is not what is tested."""
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda topology, available: 8 << 20)


def test_buffer_is_beyond_the_caches_and_within_the_memory(machine):
    """Four times the last-level caches, 512 MiB at least, an eighth of the free memory at most."""
    assert 512 << 20 == buffer_bytes(flat_topology(2), 64 << 30)
    assert 128 << 20 == buffer_bytes(flat_topology(2), 1 << 30)
    big = read_topology(
        machine(two_nodes(2), {f"sys/devices/system/cpu/cpu{n}/cache/index0/size": "262144K" for n in range(8)})
    )
    assert 2 << 30 == buffer_bytes(big, 64 << 30)


def test_read_leaves_the_callers_mask_alone():
    """Workers are pinned, the caller is not."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    topology, found = local_machine()
    assert read_gb_s(topology, found.allowed[:2]) > 0
    assert read_gb_s(topology, (), 2) > 0
    if before is not None:
        assert before == os.sched_getaffinity(0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity mask")
def test_read_on_a_cpu_that_is_not_there_is_raised():
    """A worker's failure reaches the caller, and nobody waits for ever."""
    with pytest.raises(OSError):
        read_gb_s(flat_topology(1), (0, 100_000))
