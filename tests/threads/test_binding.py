"""coli/threads/binding.py: which CPU each worker gets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.errors import ColiError
from coli.threads.binding import Binding, choose_cpus, describe
from coli.threads.limits import described_machine
from coli.threads.topology import Topology, flat_topology, parse_lscpu

from .conftest import DATA, two_nodes


def test_default_quota_4_of_8_is_four_threads():
    """C08: a quota of 4 on 8 CPUs gives 4 threads on 4 cores."""
    topology, found = described_machine(DATA / "cgroup" / "v2_quota_4_of_8")
    binding = choose_cpus(topology, found.allowed, found.quota_cpus, env={})
    assert (4, (0, 1, 2, 3), "default") == (binding.threads, binding.cpus, binding.source)
    assert "quota 4" in binding.reason


@pytest.mark.parametrize(("threads", "env"), [(8, {}), (None, {"COLI_THREADS": "8"})])
def test_threads_set_above_quota_are_obeyed_with_one_warning(threads, env):
    """C08: a count set by the user is obeyed with one warning that names both numbers."""
    binding = choose_cpus(flat_topology(8), range(8), 4.0, threads, env)
    assert tuple(range(8)) == binding.cpus
    (warning,) = binding.warnings
    assert "=8 is above the quota of 4 CPUs" in warning


@pytest.mark.parametrize(
    ("name", "allowed", "cpus"),
    [
        ("smt_adjacent_4c", range(4), (0, 2)),
        ("smt_split_12c", range(12), tuple(range(12))),
        ("smt_split_12c", range(24), tuple(range(12))),
    ],
)
def test_default_counts_physical_cores(name, allowed, cpus, table):
    """C09: 2, 12 and 12 threads, on distinct cores."""
    assert cpus == choose_cpus(table(name), allowed, env={}).cpus


def test_default_on_hybrid_is_the_fast_cores(table):
    """C10: 8 threads, one per fast core; the reason names the slow ones that were left out."""
    binding = choose_cpus(table("hybrid_8p16e"), range(32), env={})
    assert (0, 2, 4, 6, 8, 10, 12, 14) == binding.cpus
    assert "8 cores at 5600 MHz of 32 allowed CPUs, 16 other cores left out" == binding.reason


def test_default_on_hybrid_masked_to_slow_cores_uses_them(table):
    """The fast class is the fastest that the mask leaves."""
    assert tuple(range(16, 20)) == choose_cpus(table("hybrid_8p16e"), range(16, 20), env={}).cpus


@pytest.mark.parametrize(("quota", "threads"), [(7.65, 7), (0.5, 1), (100, 12), (None, 12)])
def test_default_follows_the_quota(quota, threads, table):
    """7.65 CPUs are 7 threads, half a CPU is one, a quota above the cores changes nothing."""
    assert threads == choose_cpus(table("smt_split_12c"), range(24), quota, env={}).threads


def test_more_threads_than_fast_cores_take_slow_cores_and_then_siblings(table):
    """Other cores come before a second worker on one core."""
    cpus = choose_cpus(table("hybrid_8p16e"), range(32), threads=26, env={}).cpus
    assert (0, 2, 4, 6, 8, 10, 12, 14, *range(16, 32), 1, 3) == cpus


def test_more_threads_than_cpus_share_with_one_warning():
    """More threads than CPUs go round again, with a warning."""
    binding = choose_cpus(flat_topology(2), range(2), threads=3, env={})
    assert (0, 1, 0) == binding.cpus
    assert 1 == len(binding.warnings)


def test_quota_smaller_than_a_node_stays_on_one_node():
    """A team that fits on one node is not spread over two."""
    topology = two_nodes(4)
    assert (0,) == topology.nodes_of(choose_cpus(topology, range(16), 4, env={}).cpus)


def test_flag_beats_coli_threads_beats_omp_num_threads():
    """The order of who wins."""
    env = {"COLI_THREADS": "3", "OMP_NUM_THREADS": "2,1"}
    topology = flat_topology(8)
    assert (4, "--threads") == _who(choose_cpus(topology, range(8), threads=4, env=env))
    assert (3, "COLI_THREADS") == _who(choose_cpus(topology, range(8), env=env))
    assert (2, "OMP_NUM_THREADS") == _who(choose_cpus(topology, range(8), env={"OMP_NUM_THREADS": "2"}))
    assert (8, "default") == _who(choose_cpus(topology, range(8), threads="auto", env={"OMP_NUM_THREADS": "2"}))


def _who(binding: Binding) -> tuple[int, str]:
    return binding.threads, binding.source


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_malformed_coli_threads_is_refused_by_name(value):
    """A count that is none is an error that names the variable and the value."""
    with pytest.raises(ColiError, match=f"COLI_THREADS='{value}'"):
        choose_cpus(flat_topology(2), range(2), env={"COLI_THREADS": value})


def test_serial_build_runs_one_thread_and_says_so():
    """Without OpenMP there is one thread, and a higher count set by the user is one warning."""
    binding = choose_cpus(flat_topology(4), range(4), threads=4, env={}, openmp_built=False)
    assert (1, (), "serial build", 1) == (binding.threads, binding.cpus, binding.source, len(binding.warnings))


def test_no_allowed_cpu_online_is_an_error():
    """A mask outside the machine is said, not guessed around."""
    with pytest.raises(ColiError, match="none of the allowed CPUs"):
        choose_cpus(flat_topology(2), [7], env={})


# --- the user's OpenMP variables


def test_proc_bind_close_alone_uses_every_core_and_warns(table):
    """C09: OMP_PROC_BIND=close alone would pack siblings; coli binds one a core and warns with the packed map."""
    binding = choose_cpus(table("smt_split_12c"), range(24), env={"OMP_PROC_BIND": "close"})
    assert tuple(range(12)) == binding.cpus
    (warning,) = binding.warnings
    assert "12 threads on 6 of 12 cores (CPUs 0,12,1,13,2,14,3,15,4,16,5,17)" in warning
    assert "OMP_PLACES=cores" in warning


@pytest.mark.parametrize("value", ["spread", "SPREAD", "true", "close"])
def test_proc_bind_that_packs_nothing_is_no_warning(value):
    """Without siblings, close is harmless; spread always is."""
    assert () == choose_cpus(flat_topology(4), range(4), env={"OMP_PROC_BIND": value}).warnings


def test_proc_bind_spread_alone_on_siblings_is_no_warning(table):
    """Spread takes every second place, which is every core."""
    assert () == choose_cpus(table("smt_split_12c"), range(24), env={"OMP_PROC_BIND": "spread"}).warnings


def test_proc_bind_false_is_obeyed_without_pinning(table):
    """A user who wants no binding gets none, and the count of cores stays."""
    env = {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}
    binding = choose_cpus(table("smt_adjacent_4c"), range(8), env=env)
    assert (4, (), "OMP_PROC_BIND", ()) == (binding.threads, binding.cpus, binding.source, binding.warnings)


@pytest.mark.parametrize(
    ("env", "threads", "n_warnings"),
    [
        ({"OMP_PLACES": "cores"}, 4, 0),
        ({"OMP_PLACES": "threads"}, 4, 1),
        ({"OMP_PLACES": "sockets"}, 4, 0),
        ({"OMP_PLACES": "{0},{2},{4}"}, 3, 0),
        ({"OMP_PLACES": "{0:2}:2:2", "OMP_PROC_BIND": "close"}, 2, 0),
        ({"OMP_PLACES": "threads", "OMP_PROC_BIND": "spread"}, 4, 0),
        ({"GOMP_CPU_AFFINITY": "0 2 4-6:2"}, 4, 0),
        ({"GOMP_CPU_AFFINITY": "0-3"}, 2, 1),
        ({"OMP_PROC_BIND": "primary"}, 4, 1),
    ],
)
def test_places_are_obeyed_and_said(env, threads, n_warnings, table):
    """The user's places are OpenMP's: no pinning by coli, a count that suits them, a warning where they double up."""
    binding = choose_cpus(table("smt_adjacent_4c"), range(8), env=env)
    assert (threads, ()) == (binding.threads, binding.cpus)
    assert all(f"{name}={value}" in binding.reason for name, value in env.items())
    assert n_warnings == len(binding.warnings)


@pytest.mark.parametrize(
    "env",
    [{"OMP_PLACES": "core"}, {"OMP_PLACES": "{0"}, {"OMP_PROC_BIND": "closed"}, {"GOMP_CPU_AFFINITY": "a"}],
)
def test_malformed_openmp_variable_is_refused_by_name(env):
    """OpenMP would complain and run unbound; coli says what is wrong and stops."""
    with pytest.raises(ColiError, match=next(iter(env))):
        choose_cpus(flat_topology(4), range(4), env=env)


# --- other processes and profiles


def test_busy_cores_are_avoided_where_others_are_free(table):
    """A second process takes the cores that are left, and says why it has fewer."""
    binding = choose_cpus(table("smt_split_12c"), range(24), env={}, busy={0, 1, 2, 15})
    assert tuple(range(4, 12)) == binding.cpus
    assert "4 used by another coli engine" in binding.reason


def test_all_cores_busy_are_shared_on_the_siblings_that_are_not_held(table):
    """Where nothing is free the team keeps its size and takes the other siblings."""
    binding = choose_cpus(table("smt_adjacent_4c"), range(8), env={}, busy={0, 2, 4, 6})
    assert (1, 3, 5, 7) == binding.cpus
    assert "shared" in binding.reason


def test_busy_fast_cores_leave_the_free_slow_ones(table):
    """A second engine on a hybrid machine takes free slow cores rather than share fast ones."""
    binding = choose_cpus(table("hybrid_8p16e"), range(32), env={}, busy=set(range(0, 16, 2)))
    assert tuple(range(16, 32)) == binding.cpus
    assert "8 used by another coli engine" in binding.reason


def test_profile_is_used_where_nobody_else_speaks(table):
    """C10: efficient cores only because coli tune measured a gain; a count set by the user beats the profile."""
    topology, tuned = table("hybrid_8p16e"), (0, 2, 4, 6, 8, 10, 12, 14, 16, 17)
    assert (tuned, "profile") == _cpus(choose_cpus(topology, range(32), env={}, tuned=tuned))
    assert ((0, 2), "COLI_THREADS") == _cpus(choose_cpus(topology, range(32), env={"COLI_THREADS": "2"}, tuned=tuned))


@pytest.mark.parametrize("kwargs", [{"allowed": range(8)}, {"quota": 4}, {"busy": {16}}])
def test_profile_that_cannot_be_had_is_left_aside(kwargs, table):
    """A profile outside mask or quota, or on cores in use, does not count."""
    arguments = {"allowed": range(32), "env": {}, "tuned": (0, 16), **kwargs}
    if "quota" in kwargs:
        arguments["tuned"] = tuple(range(8))
    assert "default" == choose_cpus(table("hybrid_8p16e"), **arguments).source


def _cpus(binding: Binding) -> tuple[tuple[int, ...], str]:
    return binding.cpus, binding.source


# --- the two laws


@st.composite
def machines(draw) -> tuple[Topology, list[int]]:
    """A machine of up to 12 cores with one to three CPUs each, in any numbering and speed, and a mask."""
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=12))
    rows = [(core, width) for core, width in enumerate(widths) for _ in range(width)]
    numbers = draw(st.permutations(range(len(rows))))
    speeds = draw(st.lists(st.sampled_from([2000, 4000]), min_size=len(widths), max_size=len(widths)))
    table = "\n".join(
        f"{n},{core},{core % 2},{core % 2},{speeds[core]}" for n, (core, _) in zip(numbers, rows, strict=True)
    )
    topology = parse_lscpu(table)
    return topology, draw(st.lists(st.sampled_from(topology.online), min_size=1, unique=True))


@settings(max_examples=200, deadline=None)
@given(
    machines(),
    st.one_of(st.none(), st.integers(1, 30)),
    st.one_of(st.none(), st.floats(0.1, 40)),
    st.sets(st.integers(0, 35)),
)
def test_no_two_workers_on_a_core_while_another_is_free_and_none_outside_the_mask(machine, threads, quota, busy):
    """Whatever the machine, mask, quota, count and neighbours: the two laws of the module."""
    topology, allowed = machine
    binding = choose_cpus(topology, allowed, quota, threads, {}, busy=busy)
    assert binding.threads == len(binding.cpus) >= 1
    assert set(binding.cpus) <= set(allowed)
    cores = topology.cores(allowed)
    used = [core for cpu in binding.cpus for core, cpus in cores.items() if cpu in cpus]
    if len(set(used)) < len(used):  # some core has two workers: then every core has one
        assert set(cores) == set(used)
    if threads is None:
        assert len(set(used)) == len(used)
        assert len(used) <= max(1, int(quota or len(used)))
    if len(set(binding.cpus)) < len(binding.cpus):
        assert set(allowed) == set(binding.cpus)


# --- the line


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        ([(0, 1), (2, 1)], "2 threads (default: why), bound to CPUs 0,2"),
        ([(0, 1), (3, 1)], "2 threads (default: why), bound to CPUs 0,3; asked for 0,2"),
        ([(5, 8), (6, 8)], "2 threads (default: why), each free to move on 8 CPUs, now on 5-6; binding refused"),
        ([(-1, 0), (-1, 0)], "2 threads (default: why), map not readable here"),
    ],
)
def test_line_shows_the_map_read_back(actual, text):
    """The line shows what the kernel has, and says where that is not what was asked for."""
    assert text == describe(Binding(2, (0, 2), "default", "why"), actual)


def test_line_of_unpinned_threads_says_that_they_move():
    """Threads that coli did not pin are no fault."""
    line = describe(Binding(2, (), "OMP_PROC_BIND", "OMP_PROC_BIND=false obeyed"), [(1, 4), (0, 4)])
    assert "2 threads (OMP_PROC_BIND: OMP_PROC_BIND=false obeyed), each free to move on 4 CPUs, now on 1,0" == line
