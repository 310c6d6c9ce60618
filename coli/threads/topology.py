"""What CPUs there are and which of them this process may use: pure functions of files.

Everything is read below one root folder, "/" on a live machine, so a copy of another machine's /sys and /proc, or an
``lscpu`` table, is as good as the machine.  This module chooses nothing: ``binding`` does.

A *core* is named by its lowest logical CPU, a *class* by its rank, 0 the fastest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coli.errors import ColiError

_SYS_CPU = "sys/devices/system/cpu"
_SYS_NODE = "sys/devices/system/node"

# A core below this share of its class's fastest begins a slower class.  Favoured cores of one kind (turbo bins) differ
# by up to 6 % on current desktop parts, efficient cores run at 0.65-0.84 of the fast ones.
_SAME_CLASS = 0.9

# Intel names its two (three) kinds of core as perf devices, which settles the matter where a frequency cannot.
_CORE_KINDS = (("cpu_core", "performance"), ("cpu_atom", "efficient"), ("cpu_lowpower", "low-power"))


@dataclass(frozen=True, slots=True)
class Cpu:
    """One logical CPU.  ``core`` is the lowest logical CPU of its physical core; ``rank`` its class, 0 the fastest."""

    index: int
    core: int
    socket: int
    node: int
    rank: int = 0
    max_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class CoreClass:
    """Cores of about one speed: rank 0 is the fastest; ``label`` says what told them apart."""

    rank: int
    label: str
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache: level, "Data", "Instruction" or "Unified", its bytes and the logical CPUs that share it."""

    level: int
    kind: str
    size_bytes: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node: its logical CPUs and its memory (0 where the files do not say)."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int = 0


@dataclass(frozen=True)
class Topology:
    """The logical CPUs of a machine (by index), its core classes, caches and NUMA nodes."""

    cpus: tuple[Cpu, ...]
    classes: tuple[CoreClass, ...]
    nodes: tuple[Node, ...]
    caches: tuple[Cache, ...] = ()
    model_name: str = "unknown CPU"

    def cores(self, allowed: Iterable[int] | None = None) -> dict[int, tuple[int, ...]]:
        """The physical cores as {core: its logical CPUs}, cut to ``allowed``; a core with none left is not there."""
        keep = None if allowed is None else frozenset(allowed)
        cores: dict[int, list[int]] = {}
        for cpu in self.cpus:
            if keep is None or cpu.index in keep:
                cores.setdefault(cpu.core, []).append(cpu.index)
        return {core: tuple(indexes) for core, indexes in cores.items()}

    def by_index(self) -> dict[int, Cpu]:
        """The logical CPUs by number."""
        return {cpu.index: cpu for cpu in self.cpus}

    @property
    def online(self) -> tuple[int, ...]:
        """The numbers of all logical CPUs."""
        return tuple(cpu.index for cpu in self.cpus)

    @property
    def last_caches(self) -> tuple[Cache, ...]:
        """The caches of the last level that hold data; none where the machine does not say."""
        caches = [cache for cache in self.caches if cache.kind != "Instruction"]
        last = max((cache.level for cache in caches), default=0)
        return tuple(cache for cache in caches if cache.level == last)

    @property
    def last_caches_bytes(self) -> int:
        """What all caches of the last level hold; 0 where the machine does not say."""
        return self.last_caches_bytes_of(())

    def last_caches_bytes_of(self, cpus: Collection[int]) -> int:
        """What those of them hold that some of these CPUs have; of all, if there are none."""
        reached = frozenset(cpus) or frozenset(self.online)
        return sum(cache.size_bytes for cache in self.last_caches if reached.intersection(cache.cpus))

    def nodes_of(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """The NUMA nodes on which ``cpus`` lie."""
        known = self.by_index()
        return tuple(sorted({known[index].node for index in cpus if index in known}))


# ---------------------------------------------------------------------------------------------------------------------
# Lists of CPUs, as the kernel writes them


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read a kernel CPU list, ``"0-3,8,10-12:2"``; an empty text is no CPU.  Raises ColiError on anything else."""
    cpus: set[int] = set()
    for item in text.strip().split(","):
        if not item.strip():
            continue
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", item)
        if match is None:
            raise ColiError(f"CPU list {text.strip()!r}: {item.strip()!r} is not a number or a range such as 0-3")
        first, last, stride = match.groups()
        cpus.update(range(int(first), int(last or first) + 1, int(stride or 1) or 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Write numbers in their order with ascending runs joined: ``(0, 1, 2, 8)`` is ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a machine


def read_topology(root: str | Path = "/") -> Topology:
    """Read the topology of the machine whose ``/sys`` and ``/proc`` lie below ``root``.

    Files that are missing (virtual machines hide some) mean: every CPU a core of its own, one socket, one node, one
    class.  Raises ColiError where there is no list of CPUs at all.
    """
    root = Path(root)
    folder = root / _SYS_CPU
    text = small_file(folder / "online")
    online = parse_cpu_list(text) if text else _numbered(folder, "cpu")
    if not online:
        raise ColiError(f"{folder}: no list of CPUs here; expected the file 'online' or folders cpu0, cpu1, ...")
    node_of, nodes = _read_nodes(root, online)
    rows, speeds = [], {}
    for index in online:
        here = folder / f"cpu{index}"
        siblings = small_file(here / "topology/core_cpus_list") or small_file(here / "topology/thread_siblings_list")
        mates = parse_cpu_list(siblings) if siblings else (index,)
        socket = max(0, _read_int(here / "topology/physical_package_id") or 0)
        khz = _read_int(here / "cpufreq/cpuinfo_max_freq")
        # The lowest sibling names the core even outside the mask: processes with different masks must agree on it.
        rows.append(Cpu(index, min(mates), socket, node_of.get(index, 0), max_mhz=khz / 1000 if khz else None))
        speeds[index] = _read_int(here / "cpu_capacity")
    kinds = {}
    for device, label in _CORE_KINDS:
        for index in parse_cpu_list(small_file(root / "sys/devices" / device / "cpus") or ""):
            kinds[index] = label
    cpus, classes = _classify(rows, kinds, speeds)
    return Topology(cpus, classes, nodes, _read_caches(folder, online), _model_name(root))


def parse_lscpu(text: str, model_name: str = "unknown CPU") -> Topology:
    """Read the table that ``lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ`` prints; empty fields are unknown ones."""
    rows: list[tuple[int, int, int, int, float | None]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = [field.strip() for field in line.split(",")]
        try:
            cpu, core, socket, node = (int(field) if field else 0 for field in fields[:4])
            mhz = float(fields[4]) if len(fields) > 4 and fields[4] else None
        except ValueError:
            raise ColiError(
                f"lscpu table, line {number}: {line.strip()!r} is not CPU,CORE,SOCKET,NODE,MAXMHZ in numbers"
            ) from None
        rows.append((cpu, core, socket, node, mhz))
    if not rows:
        raise ColiError("lscpu table: no line of CPU,CORE,SOCKET,NODE,MAXMHZ in it")
    first: dict[tuple[int, int], int] = {}
    for cpu, core, socket, _, _ in rows:
        first[socket, core] = min(cpu, first.get((socket, core), cpu))
    plain = [Cpu(cpu, first[socket, core], socket, node, max_mhz=mhz) for cpu, core, socket, node, mhz in sorted(rows)]
    cpus, classes = _classify(plain, {}, {})
    members: dict[int, list[int]] = {}
    for one in cpus:
        members.setdefault(one.node, []).append(one.index)
    nodes = tuple(Node(index, tuple(members[index])) for index in sorted(members))
    return Topology(cpus, classes, nodes, model_name=model_name)


def flat_topology(n_cpus: int, n_cores: int | None = None, model_name: str = "unknown CPU") -> Topology:
    """A machine of which only the counts are known (no /sys): siblings are numbered one after the other."""
    per_core = max(1, n_cpus // (n_cores or n_cpus))
    table = "\n".join(f"{cpu},{cpu // per_core},0,0," for cpu in range(n_cpus))
    return parse_lscpu(table, model_name)


def _classify(
    cpus: list[Cpu], kinds: Mapping[int, str], capacities: Mapping[int, int | None]
) -> tuple[tuple[Cpu, ...], tuple[CoreClass, ...]]:
    """Give every CPU its class: by the kind of core, else by capacity, else by highest frequency."""
    if kinds and all(cpu.index in kinds for cpu in cpus):
        order = [label for _, label in _CORE_KINDS]
        label_of = {cpu.index: f"{kinds[cpu.index]} cores" for cpu in cpus}
        rank_of = {cpu.index: order.index(kinds[cpu.index]) for cpu in cpus}
    else:
        if capacities and all(capacities.get(cpu.index) for cpu in cpus) and len(set(capacities.values())) > 1:
            speed, unit = {cpu.index: float(capacities[cpu.index] or 0) for cpu in cpus}, "of capacity {:.0f}"
        else:
            speed, unit = {cpu.index: cpu.max_mhz or 0.0 for cpu in cpus}, "at {:.0f} MHz"
        tops: list[float] = []
        rank_of, label_of = {}, {}
        for index in sorted(speed, key=lambda index: -speed[index]):
            if not tops or speed[index] < _SAME_CLASS * tops[-1]:
                tops.append(speed[index])
            rank_of[index] = len(tops) - 1
            label_of[index] = f"cores {unit.format(tops[-1])}" if tops[-1] else "cores"
    ranks = {old: new for new, old in enumerate(sorted(set(rank_of.values())))}
    done = tuple(
        Cpu(cpu.index, cpu.core, cpu.socket, cpu.node, ranks[rank_of[cpu.index]], cpu.max_mhz)
        for cpu in sorted(cpus, key=lambda cpu: cpu.index)
    )
    classes = []
    for rank in sorted(ranks.values()):
        members = [cpu for cpu in done if cpu.rank == rank]
        classes.append(CoreClass(rank, label_of[members[0].index], tuple(sorted({cpu.core for cpu in members}))))
    return done, tuple(classes)


def _read_nodes(root: Path, online: tuple[int, ...]) -> tuple[dict[int, int], tuple[Node, ...]]:
    """The node of every CPU, and the nodes; nodes without CPUs (memory alone) are kept, their memory counts."""
    folder = root / _SYS_NODE
    node_of: dict[int, int] = {}
    nodes = []
    for index in _numbered(folder, "node"):
        cpus = tuple(cpu for cpu in parse_cpu_list(small_file(folder / f"node{index}/cpulist") or "") if cpu in online)
        total = re.search(r"MemTotal:\s*(\d+) kB", small_file(folder / f"node{index}/meminfo") or "")
        nodes.append(Node(index, cpus, int(total.group(1)) * 1024 if total else 0))
        node_of.update(dict.fromkeys(cpus, index))
    return node_of, tuple(nodes) or (Node(0, online),)


def _read_caches(folder: Path, online: tuple[int, ...]) -> tuple[Cache, ...]:
    """Every cache once, by level and then by its first CPU."""
    found: dict[tuple[int, str, tuple[int, ...]], int] = {}
    for index in online:
        for level in _numbered(folder / f"cpu{index}/cache", "index"):
            here = folder / f"cpu{index}/cache/index{level}"
            size = re.fullmatch(r"(\d+)([KMG]?)", small_file(here / "size") or "")
            depth = _read_int(here / "level")
            if size is None or depth is None:
                continue
            size_bytes = int(size.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[size.group(2)]
            shared = parse_cpu_list(small_file(here / "shared_cpu_list") or str(index))
            found[depth, small_file(here / "type") or "Unified", shared] = size_bytes
    return tuple(Cache(level, kind, found[level, kind, cpus], cpus) for level, kind, cpus in sorted(found))


def _model_name(root: Path) -> str:
    """The name from /proc/cpuinfo (x86), or from the device tree (most ARM boards)."""
    match = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", small_file(root / "proc/cpuinfo") or "", re.M)
    board = small_file(root / "proc/device-tree/model") or ""
    return match.group(1).strip() if match else board.strip("\0 ") or "unknown CPU"


def _numbered(folder: Path, prefix: str) -> tuple[int, ...]:
    """The numbers N of the entries called prefixN."""
    return tuple(sorted(_suffixes(folder, prefix)))


def _suffixes(folder: Path, prefix: str) -> Iterator[int]:
    if folder.is_dir():
        for entry in folder.iterdir():
            number = entry.name.removeprefix(prefix)
            if entry.name.startswith(prefix) and number.isdigit():
                yield int(number)


def small_file(path: Path) -> str | None:
    """A small file's text, or None: sandboxes hide files one by one, and each has its meaning when absent."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = small_file(path)
    return int(text) if text and re.fullmatch(r"-?\d+", text) else None
