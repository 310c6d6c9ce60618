"""How many of the machine's CPUs this process may use, and what limits it: affinity mask, cpuset, cgroup quota.

Pure functions of files below one root folder, as in ``topology``.  A quota is found at every level from the process's
own cgroup up to the top that is visible, because the kernel enforces each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from coli.errors import ColiError
from coli.threads.topology import (
    Topology,
    flat_topology,
    format_cpu_list,
    parse_cpu_list,
    parse_lscpu,
    read_topology,
    small_file,
)


@dataclass(frozen=True)
class Limits:
    """What a process may use.

    visible : logical CPUs that are online.
    allowed : those of them in the affinity mask and the cpuset.
    quota_cpus : CPU time per unit of time that the cgroup grants, 7.65 for instance; None without a quota.
    reasons : one phrase for each thing that takes something away, with the file's own numbers.
    """

    visible: tuple[int, ...]
    allowed: tuple[int, ...]
    quota_cpus: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def quota(self) -> int | None:
        """Whole CPUs within the quota: 7.65 is 7, and at least 1; a part of a CPU only makes a team wait for itself."""
        return None if self.quota_cpus is None else max(1, int(self.quota_cpus))


def limits(root: str | Path = "/", topology: Topology | None = None, *, cgroup: str | Path | None = None) -> Limits:
    """Read what limits the calling thread.

    Parameters
    ----------
    root : the folder below which /proc and /sys lie; on a live machine the mask is the calling thread's.
    topology : the machine, where it has been read already.
    cgroup : a folder that holds the process's cgroup files, v1 or v2, instead of the one that /proc names.
    """
    root = Path(root)
    visible = (topology or read_topology(root)).online
    reasons: list[str] = []
    allowed = frozenset(visible)

    folders = [Path(cgroup)] if cgroup is not None else list(cgroup_folders(root, "cpuset"))
    for folder in folders:
        name, text = _first(folder, "cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
        cpus = frozenset(parse_cpu_list(text or "")) & frozenset(visible)
        if cpus:
            if cpus < allowed:
                reasons.append(f"cpuset {format_cpu_list(sorted(cpus))} ({name})")
            allowed &= cpus
            break

    status = small_file(root / "proc/thread-self/status") or small_file(root / "proc/self/status") or ""
    mask = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.M)
    if mask:
        cpus = frozenset(parse_cpu_list(mask.group(1))) & frozenset(visible)
        # The mask lies within the cpuset, so it is news only where it is smaller.
        if cpus and cpus & allowed < allowed:
            reasons.append(f"affinity mask {format_cpu_list(sorted(cpus))}")
            allowed &= cpus

    quota_cpus = None
    folders = [Path(cgroup)] if cgroup is not None else list(cgroup_folders(root, "cpu"))
    for folder in folders:
        found = _quota(folder)
        if found is not None and (quota_cpus is None or found[0] < quota_cpus):
            quota_cpus, reason = found
            reasons = [r for r in reasons if not r.startswith("quota")] + [reason]
    return Limits(visible, tuple(sorted(allowed)), quota_cpus, tuple(reasons))


def local_machine() -> tuple[Topology, Limits]:
    """This machine and what this thread may use of it; where there is no /sys (macOS), the bare counts."""
    if Path("/sys/devices/system/cpu").is_dir():
        topology = read_topology("/")
        return topology, limits("/", topology)
    topology = flat_topology(psutil.cpu_count() or 1, psutil.cpu_count(logical=False))
    return topology, Limits(topology.online, topology.online)


def described_machine(path: str | Path, cpus: Iterable[int] | None = None) -> tuple[Topology, Limits]:
    """Another machine, described by files, cut to ``cpus`` as if they were the affinity mask.

    ``path`` is an lscpu table; a folder with copies of ``sys`` and ``proc``; or a folder with one process's cgroup
    files and its ``visible_cpus``, whose CPUs are then taken as cores of their own.
    """
    path = Path(path)
    if path.is_file():
        topology = parse_lscpu(path.read_text(encoding="utf-8"), path.name)
        found = Limits(topology.online, topology.online)
    elif (path / "sys").is_dir():
        topology = read_topology(path)
        found = limits(path, topology)
    else:
        visible = parse_cpu_list(small_file(path / "visible_cpus") or "")
        topology = parse_lscpu("\n".join(f"{cpu},{cpu},0,0," for cpu in visible), path.name)
        found = limits(path, topology, cgroup=path)
    if cpus is None:
        return topology, found
    allowed = tuple(sorted(frozenset(cpus) & frozenset(found.allowed)))
    if not allowed:
        raise ColiError(
            f"--cpus: none of these is among the CPUs of {path}, which are {format_cpu_list(found.allowed)}"
        )
    mask = f"affinity mask {format_cpu_list(allowed)}"
    reasons = found.reasons if allowed == found.allowed else (*found.reasons, mask)
    return topology, Limits(found.visible, allowed, found.quota_cpus, reasons)


def _quota(folder: Path) -> tuple[float, str] | None:
    """(CPUs, phrase) of one cgroup level: v2 cpu.max, or v1 cfs_quota / cfs_period; None where it grants everything."""
    text = small_file(folder / "cpu.max")
    if text:
        quota, _, period = text.partition(" ")
        if quota == "max":
            return None
        name, numbers = "cpu.max", (quota, period or "100000")
    else:
        name = "cpu.cfs_quota_us"
        numbers = (small_file(folder / name) or "-1", small_file(folder / "cpu.cfs_period_us") or "100000")
    try:
        quota_us, period_us = (int(number) for number in numbers)
    except ValueError:
        return None
    if quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us, f"quota {quota_us / period_us:g} CPUs ({name} {quota_us}/{period_us})"


def _first(folder: Path, *names: str) -> tuple[str, str | None]:
    """The first of these files that has something in it."""
    for name in names:
        text = small_file(folder / name)
        if text:
            return name, text
    return names[0], None


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's cgroup for one controller, from its own up to the top that is mounted here.

    A container without a cgroup namespace sees the host's path in /proc/self/cgroup but only its own part of the tree:
    levels that are not there are passed over, the mount point itself always counts.
    """
    paths: dict[str, str] = {}
    for line in (small_file(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in names.split(",") if names else ["unified"]:
            paths[name] = path
    for kind, wanted in (("cgroup", controller), ("cgroup2", "unified")):
        if wanted not in paths:
            continue
        for mount_root, mount in _cgroup_mounts(root, kind, controller):
            path = paths[wanted]
            inside = path[len(mount_root.rstrip("/")) :] if path.startswith(mount_root) else "/"
            top = root / mount.lstrip("/")
            here = top / inside.strip("/")
            while True:
                if here.is_dir():
                    yield here
                if here == top or top not in here.parents:
                    break
                here = here.parent


def _cgroup_mounts(root: Path, kind: str, controller: str) -> Iterator[tuple[str, str]]:
    """(root within the hierarchy, mount point) of every mount that can hold ``controller``."""
    for line in (small_file(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3 or tail[0] != kind:
            continue
        if kind == "cgroup2" or controller in tail[2].split(","):
            yield fields[3], fields[4]
