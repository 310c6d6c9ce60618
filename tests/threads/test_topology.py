"""coli/threads/topology.py: any machine is a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from coli.errors import ColiError
from coli.threads.topology import Cache, flat_topology, format_cpu_list, parse_cpu_list, parse_lscpu, read_topology

from .conftest import two_nodes


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3", (0, 1, 2, 3)), ("0,2,4-5", (0, 2, 4, 5)), ("0-8:4", (0, 4, 8)), ("", ()), ("7\n", (7,))],
)
def test_cpu_list_kernel_form_is_read(text, cpus):
    """The kernel's list form is read with ranges and strides."""
    assert cpus == parse_cpu_list(text)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "0;1", "3--4"])
def test_cpu_list_malformed_is_refused(text):
    """A list that is not one is an error that quotes it."""
    with pytest.raises(ColiError, match="CPU list"):
        parse_cpu_list(text)


def test_cpu_list_written_keeps_worker_order():
    """A list of workers' CPUs keeps its order; only ascending runs are joined."""
    assert "4-6,0,2,1" == format_cpu_list((4, 5, 6, 0, 2, 1))


def test_lscpu_hybrid_names_both_classes(table):
    """C10: 8 cores at 5600 MHz and 16 at 4300 MHz are two classes, the fast one first."""
    fast, slow = table("hybrid_8p16e").classes
    assert (0, 2, 4, 6, 8, 10, 12, 14) == fast.cores
    assert tuple(range(16, 32)) == slow.cores
    assert ("cores at 5600 MHz", "cores at 4300 MHz") == (fast.label, slow.label)


def test_lscpu_favoured_cores_are_one_class():
    """Turbo bins of a few per cent do not split a class."""
    assert 1 == len(parse_lscpu("0,0,0,0,5800\n1,1,0,0,5500\n2,2,0,0,5500").classes)


@pytest.mark.parametrize("text", ["", "# nothing\n", "0,x,0,0,1\n", "a,b\n"])
def test_lscpu_table_without_rows_is_refused(text):
    """A table with nothing in it, or with words in it, is an error."""
    with pytest.raises(ColiError, match="lscpu table"):
        parse_lscpu(text)


def test_lscpu_same_core_number_on_two_sockets_are_two_cores():
    """Core numbers may repeat from socket to socket."""
    assert {0: (0, 2), 1: (1, 3)} == parse_lscpu("0,0,0,0,\n1,0,1,1,\n2,0,0,0,\n3,0,1,1,").cores()


@pytest.mark.parametrize("name", ["smt_adjacent_4c", "smt_split_12c", "hybrid_8p16e"])
def test_sysfs_tree_equals_its_table(name, table, machine):
    """A machine read from /sys is the same machine as its lscpu table."""
    wanted = table(name)
    found = read_topology(machine(wanted))
    assert wanted.cpus == found.cpus
    assert wanted.classes == found.classes
    assert "Test CPU 9000" == found.model_name


def test_sysfs_two_sockets_give_nodes_with_memory_and_caches(machine):
    """Nodes, their memory and the shared caches are read."""
    found = read_topology(machine(two_nodes(2)))
    assert [(0, (0, 1, 4, 5), 1 << 30), (1, (2, 3, 6, 7), 1 << 30)] == [
        (node.index, node.cpus, node.memory_bytes) for node in found.nodes
    ]
    assert (Cache(3, "Unified", 32 << 20, (0, 1, 4, 5)), Cache(3, "Unified", 32 << 20, (2, 3, 6, 7))) == found.caches
    assert (1,) == found.nodes_of([2, 7])


def test_sysfs_capacity_splits_classes_where_frequency_is_unknown(machine):
    """big.LITTLE parts tell their classes by cpu_capacity."""
    found = read_topology(machine(flat_topology(4), capacity={0: 446, 1: 446, 2: 1024, 3: 1024}))
    assert [(2, 3), (0, 1)] == [core_class.cores for core_class in found.classes]


def test_sysfs_core_kinds_beat_frequencies(machine):
    """Intel's cpu_core and cpu_atom devices decide where the frequencies are close."""
    near = parse_lscpu("0,0,0,0,5000\n1,1,0,0,5000\n2,2,0,0,4900\n3,3,0,0,4900")
    files = {"sys/devices/cpu_core/cpus": "0-1", "sys/devices/cpu_atom/cpus": "2-3"}
    found = read_topology(machine(near, files))
    assert [("performance cores", (0, 1)), ("efficient cores", (2, 3))] == [(c.label, c.cores) for c in found.classes]


def test_sysfs_offline_cpu_is_not_there(machine):
    """Only online CPUs exist."""
    root = machine(flat_topology(4), {"sys/devices/system/cpu/online": "0,2-3"})
    assert (0, 2, 3) == read_topology(root).online


def test_sysfs_almost_empty_tree_means_plain_cores(tmp_path: Path):
    """A sandbox that hides everything but the CPU list still has a topology: one core a CPU, one node, one class."""
    folder = tmp_path / "sys/devices/system/cpu"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-2\n")
    found = read_topology(tmp_path)
    assert {0: (0,), 1: (1,), 2: (2,)} == found.cores()
    assert (1, 1) == (len(found.nodes), len(found.classes))


def test_sysfs_absent_tree_is_an_error(tmp_path: Path):
    """Nothing to read is said, with the folder."""
    with pytest.raises(ColiError, match="no list of CPUs"):
        read_topology(tmp_path)
