"""What libgomp makes of ``OMP_PLACES``, ``OMP_PROC_BIND`` and ``GOMP_CPU_AFFINITY``: the map, before it runs.

A model of libgomp's rules (gcc, libgomp/config/linux/affinity.c and libgomp/team.c), used to choose a thread count that
suits the user's places and to warn about a map that doubles workers up.  It changes nothing and sets no variable.
``bench/bind_sweep.py`` compares its maps with the kernel's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from coli.errors import ColiError
from coli.threads.topology import Topology

Place = tuple[int, ...]

_INTERVAL = r"\s*(!?)\s*(\d+)\s*(?::\s*(\d+)\s*(?::\s*(-?\d+)\s*)?)?"


def places_of(env: Mapping[str, str], topology: Topology, allowed: Iterable[int]) -> tuple[Place, ...]:
    """The places that libgomp would use, cut to ``allowed``; none where the user names no places.

    ``OMP_PLACES`` is read before ``GOMP_CPU_AFFINITY``, as libgomp does.  Raises ColiError naming the variable where
    it is malformed (libgomp prints its own complaint and goes on unbound).
    """
    keep = frozenset(allowed)
    for name, read in (("OMP_PLACES", _omp_places), ("GOMP_CPU_AFFINITY", _gomp_affinity)):
        text = env.get(name, "").strip()
        if text:
            try:
                places = read(text, topology, keep)
            except ValueError as error:
                raise ColiError(
                    f"{name}={text!r}: {error}; correct it or unset it, then coli places its own threads"
                ) from None
            cut = [tuple(cpu for cpu in place if cpu in keep) for place in places]
            return tuple(place for place in cut if place)
    return ()


def thread_places(topology: Topology, allowed: Iterable[int]) -> tuple[Place, ...]:
    """One place per logical CPU in libgomp's order: core by core, siblings next to each other.

    This is what ``OMP_PROC_BIND`` alone gets, and why "close" then fills both siblings of a core first.
    """
    return tuple((cpu,) for core in topology.cores(allowed).values() for cpu in core)


def assign(policy: str, places: Sequence[Place], threads: int) -> tuple[Place, ...]:
    """The place of each of ``threads`` workers under one value of OMP_PROC_BIND.

    close (and true): neighbours in order, wrapping; spread: the first place of each of ``threads`` equal parts;
    master (primary): all on the first.  More workers than places: each place takes its whole share, the rest go one by
    one to the first places.
    """
    if policy in ("master", "primary"):
        return (places[0],) * threads
    if threads <= len(places):
        if policy == "spread":
            size, rest = divmod(len(places), threads)
            return tuple(places[worker * size + min(worker, rest)] for worker in range(threads))
        return tuple(places[:threads])
    share, rest = divmod(threads, len(places))
    return tuple(place for place in places for _ in range(share)) + tuple(places[:rest])


def bind_policy(env: Mapping[str, str]) -> str | None:
    """The first item of OMP_PROC_BIND in lower case: close, spread, true, false, master, primary, or None."""
    first = env.get("OMP_PROC_BIND", "").partition(",")[0].strip().lower()
    if first and first not in ("true", "false", "close", "spread", "master", "primary"):
        raise ColiError(
            f"OMP_PROC_BIND={env['OMP_PROC_BIND']!r}: expected true, false, close, spread or primary; change it"
        )
    return first or None


def num_threads(env: Mapping[str, str]) -> int | None:
    """The first item of OMP_NUM_THREADS, or None where it is unset or, as libgomp takes it, malformed."""
    first = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else None


def _omp_places(text: str, topology: Topology, keep: frozenset[int]) -> list[Place]:
    """OMP_PLACES: threads, cores, sockets, ll_caches or numa_domains, each with an optional (count), or a list."""
    named = re.fullmatch(r"([a-z_]+)\s*(?:\(\s*(\d+)\s*\))?", text.lower())
    if named is None:
        return _listed_places(text)
    name, count = named.groups()
    known = topology.by_index()
    if name == "threads":
        places = list(thread_places(topology, keep))
    elif name == "cores":
        places = list(topology.cores(keep).values())
    elif name == "sockets":
        places = _grouped(keep, lambda cpu: known[cpu].socket)
    elif name == "numa_domains":
        places = [cpus for node in topology.nodes if (cpus := tuple(cpu for cpu in node.cpus if cpu in keep))]
    elif name == "ll_caches":
        shared = {cpu: cache.cpus for cache in topology.last_caches for cpu in cache.cpus}
        places = _grouped((cpu for cpu in keep if cpu in shared), lambda cpu: shared[cpu])
    else:
        raise ValueError(
            f"{name!r} is none of threads, cores, sockets, ll_caches, numa_domains, nor a list such as {{0}},{{1}}"
        )
    return places[: int(count)] if count else places


def _grouped(cpus: Iterable[int], key) -> list[Place]:
    groups: dict[object, list[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu), []).append(cpu)
    return [tuple(group) for group in groups.values()]


def _listed_places(text: str) -> list[Place]:
    """``{0,1},{2:2},{4}:3:2``: braces hold CPUs or lower:length:stride, a place may repeat :count:stride, ! takes away.

    Strides are 1 where they are left out; a bare number is a place of one CPU, as in newer libgomp.
    """
    places: list[Place] = []
    rest = text
    while rest.strip():
        match = re.match(r"\s*(!?)\s*(?:\{([^{}]*)\}|(\d+))\s*(?::\s*(\d+)\s*(?::\s*(-?\d+)\s*)?)?(?:,|$)", rest)
        if match is None:
            raise ValueError(f"{rest.strip()!r} does not begin with a place such as {{0}} or {{0:2}}")
        without, braced, bare, count, stride = match.groups()
        inner = bare if braced is None else braced
        cpus: set[int] = set()
        for item in inner.split(","):
            interval = re.fullmatch(_INTERVAL, item)
            if interval is None:
                raise ValueError(f"{item.strip()!r} in {{{inner}}} is not a CPU number or lower:length:stride")
            exclude, lower, length, step = interval.groups()
            numbers = {int(lower) + i * int(step or 1) for i in range(int(length or 1))}
            cpus = cpus - numbers if exclude else cpus | numbers
        repeats = [tuple(sorted(cpu + i * int(stride or 1) for cpu in cpus)) for i in range(int(count or 1))]
        if without:
            places = [place for place in places if place not in repeats]
        else:
            places += repeats
        rest = rest[match.end() :]
    return places


def _gomp_affinity(text: str, topology: Topology, keep: frozenset[int]) -> list[Place]:
    """GOMP_CPU_AFFINITY: ``0 3 1-2 4-15:2``, one CPU a worker in the order written."""
    places: list[Place] = []
    for item in text.replace(",", " ").split():
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", item)
        if match is None:
            raise ValueError(f"{item!r} is not a CPU number or a range such as 4-15:2")
        first, last, stride = match.groups()
        places += [(cpu,) for cpu in range(int(first), int(last or first) + 1, int(stride or 1) or 1)]
    return places
