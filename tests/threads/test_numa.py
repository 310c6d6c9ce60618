"""coli/threads/numa.py: where pages go, and where they are."""

from __future__ import annotations

import ctypes
import errno
import sys
from pathlib import Path

import pytest

from coli.threads import numa
from coli.threads.numa import MemoryPolicy, choose_policy, memory_policy, pages_by_node, set_policy, where_files_lie
from coli.threads.topology import Topology, flat_topology, read_topology

from .conftest import two_nodes


@pytest.fixture(autouse=True)
def not_yet_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_refused", False)


@pytest.fixture
def two(machine) -> Topology:
    """Two nodes of 1 GiB and 4 cores each."""
    return read_topology(machine(two_nodes(4)))


@pytest.mark.parametrize(
    ("cpus", "weights_bytes", "mode", "nodes"),
    [
        ((0, 1, 2, 3), 400 << 20, "bind", (0,)),
        ((4, 5, 6, 7), 400 << 20, "bind", (1,)),
        ((0, 1, 2, 3), 900 << 20, "interleave", (0, 1)),
        ((0, 1, 4, 5), 1 << 20, "interleave", (0, 1)),
        ((), 1 << 20, "interleave", (0, 1)),
    ],
)
def test_policy_follows_the_team_and_the_room(cpus, weights_bytes, mode, nodes, two):
    """C12: a team on one node with room is bound to it, any other interleaves over both."""
    policy = choose_policy(two, cpus, weights_bytes)
    assert (mode, nodes) == (policy.mode, policy.nodes)


def test_policy_on_one_node_is_the_kernels_own():
    """With one node there is nothing to choose."""
    assert "default" == choose_policy(flat_topology(4), (0, 1), 1 << 40).mode


def test_set_policy_hands_the_kernel_mode_and_node_mask(monkeypatch):
    """The system call gets its number, the mode, the bits of the nodes and one bit more than their count."""
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    calls = []

    def syscall(number, mode, mask, bits):
        calls.append((number.value, mode.value, mask and list(mask), bits.value))
        return 0

    assert set_policy(MemoryPolicy("interleave", (0, 1), ""), syscall)
    assert set_policy(MemoryPolicy("bind", (64,), ""), syscall)
    assert set_policy(MemoryPolicy("default", (), ""), syscall)
    assert [(238, 3, [3], 65), (238, 2, [0, 1], 129), (238, 0, None, 0)] == calls


def test_refused_policy_is_one_warning_and_goes_on(caplog):
    """C12: EPERM gives one warning a process, naming the policy and what to allow, and nothing is raised."""

    def refuse(*arguments):
        ctypes.set_errno(errno.EPERM)
        return -1

    with caplog.at_level("WARNING", logger="coli.threads"):
        assert not set_policy(MemoryPolicy("interleave", (0, 1), ""), refuse)
        assert not set_policy(MemoryPolicy("bind", (0,), ""), refuse)
    (record,) = caplog.records
    assert "interleave on nodes 0-1 refused (Operation not permitted)" in record.getMessage()
    assert "CAP_SYS_NICE" in record.getMessage()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="set_mempolicy is Linux's")
def test_policy_is_granted_or_refused_and_always_given_back(caplog):
    """On the machine that runs the test the call either works or is one warning; the thread ends with the default."""
    with (
        caplog.at_level("WARNING", logger="coli.threads"),
        memory_policy(MemoryPolicy("interleave", (0,), "")) as granted,
    ):
        assert granted == (not caplog.records)
    with memory_policy(MemoryPolicy("default", (), "")) as granted:
        assert not granted


def test_numa_maps_are_summed_by_node_and_file():
    """Only lines of the files asked for count, pages by their size; a space in a name is written as the kernel does."""
    text = (
        "7f00 default file=/m/model-00000.safetensors mapped=12 N0=8 N1=4 kernelpagesize_kB=4\n"
        "7f10 interleave:0-1 file=/m/my\\040model.safetensors mapped=1 N1=1 kernelpagesize_kB=2048\n"
        "7f20 default file=/usr/lib/libc.so.6 mapped=9 N0=9 kernelpagesize_kB=4\n"
        "7f30 default anon=3 N0=3 kernelpagesize_kB=4\n"
    )
    paths = ["/m/model-00000.safetensors", "/m/my model.safetensors"]
    assert {0: 8 * 4096, 1: 4 * 4096 + (2 << 20)} == pages_by_node(text, paths)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no numa_maps")
def test_cached_file_lies_on_a_node(tmp_path):
    """Pages that were just written are found on some node; an empty file has none."""
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.write_bytes(b"x" * (1 << 20))
    empty.write_bytes(b"")
    lies = where_files_lie([full, empty])
    assert 0 < sum(lies.values()) <= 2 << 20
