"""coli/threads/limits.py: mask, cpuset and quota, at every level, in both cgroup versions."""

from __future__ import annotations

import pytest

from coli.threads.limits import described_machine, limits, local_machine
from coli.threads.topology import flat_topology

from .conftest import DATA

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1_MOUNTS = (
    "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"
)


def test_quota_4_of_8_is_read_from_the_recorded_files():
    """C08: cpu.max 400000/100000 with 8 CPUs visible is a quota of 4, and the reason quotes the file."""
    _, found = described_machine(DATA / "cgroup" / "v2_quota_4_of_8")
    assert tuple(range(8)) == found.visible == found.allowed
    assert (4.0, 4) == (found.quota_cpus, found.quota)
    assert ("quota 4 CPUs (cpu.max 400000/100000)",) == found.reasons


@pytest.mark.parametrize(
    ("text", "quota"),
    [("765000 100000", 7), ("50000 100000", 1), ("max 100000", None), ("800000", 8), ("garbage", None), ("0 0", None)],
)
def test_v2_quota_is_rounded_down_and_at_least_one(text, quota, machine):
    """7.65 CPUs is 7, half a CPU is 1, max is no quota."""
    files = {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/a/cpu.max": text}
    assert quota == limits(machine(flat_topology(8), files)).quota


def test_v1_quota_and_period_are_read(machine):
    """cfs_quota_us over cfs_period_us in the v1 hierarchy: 765000/100000 is 7."""
    here = "sys/fs/cgroup/cpu,cpuacct/docker/x"
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:cpuset:/\n0::/",
        "proc/self/mountinfo": V1_MOUNTS,
        f"{here}/cpu.cfs_quota_us": "765000",
        f"{here}/cpu.cfs_period_us": "100000",
    }
    found = limits(machine(flat_topology(8), files))
    assert (7.65, 7) == (found.quota_cpus, found.quota)
    assert ("quota 7.65 CPUs (cpu.cfs_quota_us 765000/100000)",) == found.reasons


def test_quota_of_a_parent_counts(machine):
    """The smallest quota on the way up is the one that holds."""
    files = {
        "proc/self/cgroup": "0::/pod/box",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/pod/cpu.max": "200000 100000",
        "sys/fs/cgroup/pod/box/cpu.max": "600000 100000",
    }
    assert 2 == limits(machine(flat_topology(8), files)).quota


def test_quota_in_a_container_without_namespace_is_found_at_the_mount(machine):
    """Where /proc names the host's path but only the container's own part is mounted, the mount point counts."""
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    files = {
        "proc/self/cgroup": "0::/docker/abc",
        "proc/self/mountinfo": mount,
        "sys/fs/cgroup/cpu.max": "300000 100000",
    }
    assert 3 == limits(machine(flat_topology(8), files)).quota
    files["proc/self/mountinfo"] = V2_MOUNT
    assert 3 == limits(machine(flat_topology(8), files)).quota


def test_cpuset_and_mask_cut_what_is_allowed(machine):
    """cpuset and affinity mask both count, and each is named with its own list."""
    files = {
        "proc/self/cgroup": "0::/a",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/a/cpuset.cpus.effective": "0-5",
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t2-5\n",
    }
    found = limits(machine(flat_topology(8), files))
    assert (2, 3, 4, 5) == found.allowed
    assert ("cpuset 0-5 (cpuset.cpus.effective)", "affinity mask 2-5") == found.reasons


def test_v1_cpuset_is_read(machine):
    """The v1 names of the cpuset files are known."""
    files = {
        "proc/self/cgroup": "3:cpuset:/x",
        "proc/self/mountinfo": V1_MOUNTS,
        "sys/fs/cgroup/cpuset/x/cpuset.cpus": "1,3",
    }
    assert (1, 3) == limits(machine(flat_topology(4), files)).allowed


def test_nothing_limits_where_there_is_nothing_to_read(machine):
    """Without /proc and cgroup files everything online is allowed."""
    found = limits(machine(flat_topology(4)))
    assert ((0, 1, 2, 3), None, ()) == (found.allowed, found.quota, found.reasons)


def test_thread_mask_is_the_calling_threads(machine):
    """The mask of the calling thread counts before the process's first thread's."""
    files = {"proc/thread-self/status": "Cpus_allowed_list:\t1", "proc/self/status": "Cpus_allowed_list:\t0-3"}
    assert (1,) == limits(machine(flat_topology(4), files)).allowed


def test_described_table_is_cut_to_the_cpus_asked_for():
    """C09: a recorded table with allowed CPUs 0-3 allows just those, and says what cut it."""
    topology, found = described_machine(DATA / "topo" / "smt_split_12c.csv", range(4))
    assert ((0, 1, 2, 3), 24) == (found.allowed, len(topology.cpus))
    assert ("affinity mask 0-3",) == found.reasons


def test_this_machine_allows_something():
    """The machine that runs the test can be read, and its mask is the system's own."""
    import os

    _, found = local_machine()
    assert set(found.allowed) <= set(found.visible)
    if hasattr(os, "sched_getaffinity"):
        assert os.sched_getaffinity(0) == set(found.allowed)
