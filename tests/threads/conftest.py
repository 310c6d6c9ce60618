"""Machines as files: the tables of tests/data/topo, and whole /sys and /proc trees written from a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coli.threads.topology import Topology, format_cpu_list, parse_lscpu

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def table() -> Callable[[str], Topology]:
    """``table("smt_adjacent_4c")`` is the topology of that recorded lscpu table."""
    return lambda name: parse_lscpu((DATA / "topo" / f"{name}.csv").read_text(), name)


def two_nodes(cores_per_node: int = 4) -> Topology:
    """Two sockets, a node each, two siblings a core, numbered as Linux numbers servers: all first siblings first."""
    n = 2 * cores_per_node
    rows = [(cpu, cpu % n) for cpu in range(2 * n)]
    return parse_lscpu(
        "\n".join(f"{cpu},{core},{core // cores_per_node},{core // cores_per_node}," for cpu, core in rows)
    )


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """Write a machine below a folder and return it: ``machine(topology, files={path: text}, mhz=..., kinds=...)``."""

    def write(topology: Topology, files: dict[str, str] | None = None, capacity: dict[int, int] | None = None) -> Path:
        root = tmp_path / "machine"
        cores = topology.cores()
        texts = {
            "sys/devices/system/cpu/online": format_cpu_list(topology.online),
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU 9000\n",
        }
        for node in topology.nodes:
            texts[f"sys/devices/system/node/node{node.index}/cpulist"] = format_cpu_list(node.cpus)
            texts[f"sys/devices/system/node/node{node.index}/meminfo"] = f"Node {node.index} MemTotal:  1048576 kB\n"
        for cpu in topology.cpus:
            here = f"sys/devices/system/cpu/cpu{cpu.index}"
            texts[f"{here}/topology/thread_siblings_list"] = format_cpu_list(cores[cpu.core])
            texts[f"{here}/topology/physical_package_id"] = str(cpu.socket)
            if cpu.max_mhz:
                texts[f"{here}/cpufreq/cpuinfo_max_freq"] = str(int(cpu.max_mhz * 1000))
            if capacity:
                texts[f"{here}/cpu_capacity"] = str(capacity[cpu.index])
            texts[f"{here}/cache/index0/level"] = "3"
            texts[f"{here}/cache/index0/type"] = "Unified"
            texts[f"{here}/cache/index0/size"] = "32768K"
            socket = [other.index for other in topology.cpus if other.socket == cpu.socket]
            texts[f"{here}/cache/index0/shared_cpu_list"] = format_cpu_list(socket)
        for name, text in {**texts, **(files or {})}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return root

    return write
