"""coli/threads/openmp.py: libgomp's places and policies, by its own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coli.errors import ColiError
from coli.threads.openmp import assign, bind_policy, num_threads, places_of, thread_places
from coli.threads.topology import Cache, flat_topology, read_topology

from .conftest import two_nodes


def one_each(*cpus: int) -> tuple[tuple[int, ...], ...]:
    return tuple((cpu,) for cpu in cpus)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("threads", one_each(0, 1, 2, 3, 4, 5, 6, 7)),
        ("threads(3)", one_each(0, 1, 2)),
        ("CORES", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("cores(2)", ((0, 1), (2, 3))),
        ("sockets", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("numa_domains", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{0},{2}", one_each(0, 2)),
        ("{0,1},{4}", ((0, 1), (4,))),
        ("{0:2}:3:2", ((0, 1), (2, 3), (4, 5))),
        ("{0}:3", one_each(0, 1, 2)),
        ("{0:4:2}", ((0, 2, 4, 6),)),
        ("{0:4,!2}", ((0, 1, 3),)),
        ("{0}:4,!{1}", one_each(0, 2, 3)),
        ("0,3", one_each(0, 3)),
        ("{6},{9}", one_each(6)),
    ],
)
def test_omp_places_forms_are_read(text, places, table):
    """Names, counts, lists, intervals, repeats and exclusions, cut to the CPUs that are allowed."""
    assert places == places_of({"OMP_PLACES": text}, table("smt_adjacent_4c"), range(8))


@pytest.mark.parametrize("text", ["{0", "cores(", "caches", "{0},,{1}", "{a}", "{0-3}"])
def test_omp_places_malformed_is_refused(text, table):
    """The error names the variable and shows its value."""
    with pytest.raises(ColiError, match="OMP_PLACES="):
        places_of({"OMP_PLACES": text}, table("smt_adjacent_4c"), range(8))


def test_gomp_cpu_affinity_keeps_its_order(table):
    """One CPU a worker, in the order written; OMP_PLACES comes first where both are set."""
    env = {"GOMP_CPU_AFFINITY": "6 0-2 3-7:2"}
    assert one_each(6, 0, 1, 2, 3, 5, 7) == places_of(env, table("smt_adjacent_4c"), range(8))
    assert one_each(4) == places_of({**env, "OMP_PLACES": "{4}"}, table("smt_adjacent_4c"), range(8))


def test_places_of_sockets_and_caches(machine):
    """Sockets and last-level caches group the CPUs that share them."""
    topology = read_topology(machine(two_nodes(2)))
    groups = ((0, 1, 4, 5), (2, 3, 6, 7))
    for name in ("sockets", "ll_caches", "numa_domains"):
        assert groups == places_of({"OMP_PLACES": name}, topology, range(8))


def test_places_of_the_last_caches_are_those_of_data():
    """Where the last level has a cache of instructions that more CPUs share, the data caches make the places."""
    data = [Cache(1, "Data", 16 << 10, (cpu,)) for cpu in range(4)]
    instructions = [Cache(1, "Instruction", 64 << 10, cpus) for cpus in ((0, 1), (2, 3))]
    topology = replace(flat_topology(4), caches=(*data, *instructions))
    assert one_each(0, 1, 2, 3) == places_of({"OMP_PLACES": "ll_caches"}, topology, range(4))
    assert 4 * (16 << 10) == topology.last_caches_bytes


@pytest.mark.parametrize(("name", "first"), [("smt_adjacent_4c", (0, 1, 2, 3)), ("smt_split_12c", (0, 12, 1, 13))])
def test_places_without_omp_places_put_siblings_together(name, first, table):
    """However the CPUs are numbered, libgomp walks core by core."""
    topology = table(name)
    assert one_each(*first) == thread_places(topology, topology.online)[:4]


@pytest.mark.parametrize(
    ("policy", "n_places", "threads", "at"),
    [
        ("close", 8, 4, (0, 1, 2, 3)),
        ("true", 8, 4, (0, 1, 2, 3)),
        ("spread", 8, 4, (0, 2, 4, 6)),
        ("spread", 8, 3, (0, 3, 6)),
        ("spread", 7, 3, (0, 3, 5)),
        ("close", 2, 5, (0, 0, 1, 1, 0)),
        ("spread", 2, 5, (0, 0, 1, 1, 0)),
        ("close", 3, 8, (0, 0, 1, 1, 2, 2, 0, 1)),
        ("master", 4, 3, (0, 0, 0)),
        ("primary", 4, 3, (0, 0, 0)),
    ],
)
def test_policy_assigns_places_as_libgomp_does(policy, n_places, threads, at):
    """close takes neighbours, spread the first of equal parts, master one place; more workers than places share."""
    assert one_each(*at) == assign(policy, one_each(*range(n_places)), threads)


def test_first_items_of_lists_count():
    """Nested levels are not ours: the first item of each variable holds."""
    assert "spread" == bind_policy({"OMP_PROC_BIND": "Spread,close"})
    assert 6 == num_threads({"OMP_NUM_THREADS": "6,2"})
    assert (None, None) == (bind_policy({}), num_threads({"OMP_NUM_THREADS": "x"}))
