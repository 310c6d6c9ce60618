"""Which CPU each worker of the engine's team gets: a pure choice, and the line that says so.

The pinning itself happens inside the team's own OpenMP region (``_core``); this module hands it a list of CPUs.  It
sets no ``OMP_*`` variable and no mask.  Two things always hold: no CPU outside the allowed ones, and no second worker
on a core while another allowed core is free.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coli import settings
from coli.errors import ColiError
from coli.threads import openmp
from coli.threads.topology import Topology, format_cpu_list


@dataclass(frozen=True)
class Binding:
    """What the team gets.

    threads : size of the team.
    cpus : the logical CPU of each worker, in worker order; empty where coli does not pin.
    source : who decided: "default", "profile", "--threads", "COLI_THREADS", "OMP_PLACES" and the like.
    reason : the decision in words and numbers, for the ``[threads]`` line.
    warnings : one line each, "what is wrong; what to do".
    """

    threads: int
    cpus: tuple[int, ...]
    source: str
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def is_given(self) -> bool:
        """Whether a person has said how large the team is, or where: nobody changes it then."""
        return self.source not in ("default", "profile")


def choose_cpus(
    topology: Topology,
    allowed: Iterable[int],
    quota: int | float | None = None,
    threads: int | str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    busy: Collection[int] = (),
    tuned: Sequence[int] | None = None,
    openmp_built: bool = True,
) -> Binding:
    """Choose the team's size and CPUs.

    Parameters
    ----------
    topology, allowed : the machine, and the logical CPUs in mask and cpuset (``limits``).
    quota : CPUs' worth of time that the cgroup grants, None without a quota.
    threads : the caller's own count, or "auto"; it beats ``COLI_THREADS``, which beats ``OMP_NUM_THREADS``.
    env : the environment, ``os.environ`` where left out.
    busy : logical CPUs that other coli processes hold.
    tuned : the CPUs of a stored profile (``tuning``), used where nothing above speaks and they can all be had.
    openmp_built : False for a build without OpenMP, which runs one thread.

    Raises
    ------
    ColiError
        For a malformed COLI_THREADS, OMP_PLACES, OMP_PROC_BIND or GOMP_CPU_AFFINITY, or no allowed CPU in ``topology``.
    """
    env = os.environ if env is None else env
    allowed = sorted(frozenset(allowed) & frozenset(topology.online))
    if not allowed:
        raise ColiError(f"threads: none of the allowed CPUs is among those online ({format_cpu_list(topology.online)})")
    whole_quota = None if quota is None else max(1, int(quota))
    count, source = _asked(threads, env)
    if not openmp_built:
        told: tuple[str, ...] = ()
        if count and count > 1:
            told = (f"{source}={count} has no effect: without OpenMP there is one thread; build coli with OpenMP",)
        return Binding(1, (), "serial build", "this build has no OpenMP", told)

    order = _order(topology, allowed, busy)
    policy = openmp.bind_policy(env)
    places = () if policy == "false" else openmp.places_of(env, topology, allowed)
    if policy == "false" or places or policy in ("master", "primary"):
        return _obey(topology, allowed, whole_quota, count, source, env, policy, places)

    if count is None and tuned and _can_have(tuned, allowed, whole_quota, busy):
        return Binding(
            len(tuned), tuple(tuned), "profile", f"measured best by coli tune, CPUs {format_cpu_list(tuned)}"
        )

    if count is None:
        source = "default"
        team, reason = _default_team(topology, allowed, busy)
        count = len(team)
        if whole_quota is not None and whole_quota < count:
            count, reason = whole_quota, f"{reason}, quota {whole_quota}"
    else:
        reason = "as asked"
    cpus = tuple(order[worker % len(order)] for worker in range(count))
    warnings = _count_warnings(source, count, len(order), whole_quota) + _bind_warnings(
        policy, topology, allowed, count
    )
    return Binding(count, cpus, source, reason, warnings)


def describe(binding: Binding, actual_map: Sequence[tuple[int, int]] = ()) -> str:
    """The text of the ``[threads]`` line: size, who decided, and where the kernel has each worker.

    ``actual_map`` is read back inside the team: for each worker the CPU it runs on (-1 where the system cannot tell)
    and the number of CPUs in its mask.
    """
    size = f"{binding.threads} thread{'s' if binding.threads != 1 else ''} ({binding.source}: {binding.reason})"
    actual = [(cpu, n_cpus) for cpu, n_cpus in actual_map if cpu >= 0]
    if not actual:
        return f"{size}, map not readable here"
    where = format_cpu_list(cpu for cpu, _ in actual)
    widths = sorted({n_cpus for _, n_cpus in actual})
    if widths == [1]:
        asked = (
            f"; asked for {format_cpu_list(binding.cpus)}"
            if binding.cpus and binding.cpus != tuple(cpu for cpu, _ in actual)
            else ""
        )
        return f"{size}, bound to CPUs {where}{asked}"
    width = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
    refused = "; binding refused" if binding.cpus else ""
    return f"{size}, each free to move on {width} CPUs, now on {where}{refused}"


# ---------------------------------------------------------------------------------------------------------------------
# The rules


def _asked(threads: int | str | None, env: Mapping[str, str]) -> tuple[int | None, str]:
    """The count that somebody asked for, and who."""
    setting = settings.resolve("threads", threads, env)
    if setting.value != "auto":
        return setting.value, setting.source
    # An "auto" that somebody wrote down beats OMP_NUM_THREADS as a number would.
    return (openmp.num_threads(env), "OMP_NUM_THREADS") if setting.source == "default" else (None, setting.source)


def _is_busy(topology: Topology, core: int, busy: Collection[int]) -> bool:
    return any(cpu.core == core and cpu.index in busy for cpu in topology.cpus)


def _order(topology: Topology, allowed: Sequence[int], busy: Collection[int]) -> list[int]:
    """All allowed CPUs in the order in which workers take them.

    First one CPU of each core that nobody uses, fast classes before slow, node by node; then of the cores that another
    engine uses, a sibling that it does not hold; then the remaining siblings in the same order.
    """
    known = topology.by_index()
    cores = topology.cores(allowed)
    ranked = sorted(
        cores,
        key=lambda core: (_is_busy(topology, core, busy), known[cores[core][0]].rank, known[cores[core][0]].node, core),
    )
    lanes = [sorted(cores[core], key=lambda cpu: (cpu in busy, cpu)) for core in ranked]
    return [lane[depth] for depth in range(max(map(len, lanes))) for lane in lanes if depth < len(lane)]


def _fast_cores(topology: Topology, allowed: Sequence[int]) -> list[int]:
    """The cores of the fastest class that the mask leaves."""
    known = topology.by_index()
    best = min(known[cpu].rank for cpu in allowed)
    return [core for core, cpus in topology.cores(allowed).items() if known[cpus[0]].rank == best]


def _can_have(tuned: Sequence[int], allowed: Sequence[int], quota: int | None, busy: Collection[int]) -> bool:
    return set(tuned) <= set(allowed) and not set(tuned) & set(busy) and len(tuned) <= (quota or len(tuned))


def _default_team(topology: Topology, allowed: Sequence[int], busy: Collection[int]) -> tuple[list[int], str]:
    """The cores of the default, and why: of the fastest class that has a free one, else all, shared."""
    cores, fast = topology.cores(allowed), _fast_cores(topology, allowed)
    free = [core for core in cores if not _is_busy(topology, core, busy)]
    team = _fast_cores(topology, [cores[core][0] for core in free]) if free else fast
    if len(cores) > len(fast):
        label = topology.classes[topology.by_index()[cores[team[0]][0]].rank].label
        reason = f"{len(team)} {label} of {len(allowed)} allowed CPUs, {len(cores) - len(team)} other cores left out"
    else:
        reason = f"{len(team)} physical core{'s' if len(team) != 1 else ''} of {len(allowed)} allowed CPUs"
    n_busy = len(cores) - len(free)
    if n_busy:
        reason += f", {n_busy} used by another coli engine" if free else ", all shared with another coli engine"
    return team, reason


def _count_warnings(source: str, count: int, n_cpus: int, quota: int | None) -> tuple[str, ...]:
    """At most one line about a count that the machine or the cgroup cannot serve."""
    if quota is not None and count > quota:
        what = f"{source}={count} is above the quota of {quota} CPUs, so the kernel will stop the team again and again"
        return (f"{what}; take {quota}, or raise the quota",)
    if count > n_cpus:
        return (
            f"{source}={count} is above the {n_cpus} allowed CPUs, so several workers share one; take at most {n_cpus}",
        )
    return ()


def _bind_warnings(policy: str | None, topology: Topology, allowed: Sequence[int], count: int) -> tuple[str, ...]:
    """OMP_PROC_BIND without OMP_PLACES: what OpenMP alone would make of it, where that doubles workers up.

    The variable asks for bound workers and says nothing of where; coli binds them, to the cores that it chose.
    """
    if policy is None:
        return ()
    places = openmp.assign(policy, openmp.thread_places(topology, allowed), count)
    used = _cores_used(topology, places)
    n_cores = len(topology.cores(allowed))
    if used >= min(count, n_cores):
        return ()
    return (
        f"OMP_PROC_BIND={policy} without OMP_PLACES would put {count} threads on {used} of {n_cores} cores "
        f"(CPUs {_places_text(places)}), so coli binds one a core; set OMP_PLACES=cores too",
    )


def _obey(
    topology: Topology,
    allowed: Sequence[int],
    quota: int | None,
    count: int | None,
    source: str,
    env: Mapping[str, str],
    policy: str | None,
    places: Sequence[openmp.Place],
) -> Binding:
    """The user placed the threads: OpenMP does it, coli pins nothing and says so."""
    names = [name for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND") if env.get(name, "").strip()]
    if policy == "false":
        names = ["OMP_PROC_BIND"]
    elif "OMP_PLACES" in names and "GOMP_CPU_AFFINITY" in names:
        names.remove("GOMP_CPU_AFFINITY")
    said = " ".join(f"{name}={env[name].strip()}" for name in names)
    covered = sorted({cpu for place in places for cpu in place}) or allowed
    wanted = count if count is not None else min(len(_fast_cores(topology, covered)), quota or len(allowed))
    reason = f"{said} obeyed, coli pins nothing" + (f", {source}={count}" if count is not None else "")
    warnings = _count_warnings(source, wanted, len(covered), quota) if count is not None else ()
    if policy != "false":
        if not places:
            places = openmp.thread_places(topology, allowed)
        where = openmp.assign(policy or "close", places, wanted)
        used, n_cores = _cores_used(topology, where), len(topology.cores(allowed))
        if used < min(wanted, n_cores):
            warnings += (
                f"{said} puts {wanted} threads on {used} of {n_cores} cores (CPUs {_places_text(where)}); "
                "set OMP_PLACES=cores to give each a core",
            )
    return Binding(wanted, (), names[0], reason, warnings)


def _cores_used(topology: Topology, places: Iterable[openmp.Place]) -> int:
    """How many physical cores workers in these places keep busy, each taking one of its place that is still free."""
    known = topology.by_index()
    cores: set[int] = set()
    for place in places:
        own = [known[cpu].core for cpu in place]
        cores.add(next((core for core in own if core not in cores), own[0]))
    return len(cores)


def _places_text(places: Iterable[openmp.Place]) -> str:
    """Single CPUs as a plain list, wider places in braces."""
    places = list(places)
    if all(len(place) == 1 for place in places):
        return format_cpu_list(cpu for (cpu,) in places)
    return " ".join(f"{{{format_cpu_list(place)}}}" for place in places)
