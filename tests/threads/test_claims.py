"""coli/threads/claims.py: two processes take different cores where they can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coli.threads import claims
from coli.threads.claims import claim_threads, held_cpus, runtime_folder
from coli.threads.limits import Limits
from coli.threads.topology import flat_topology, read_topology

from .conftest import two_nodes

pytestmark = pytest.mark.skipif(claims.fcntl is None, reason="no flock on this system")

CHILD = """
import sys
from coli.threads.claims import claim_threads
from coli.threads.limits import Limits
from coli.threads.topology import flat_topology
machine = flat_topology(8), Limits(tuple(range(8)), tuple(range(8)))
claim = claim_threads(int(sys.argv[1]) or None, machine=machine)
print(*claim.binding.cpus, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("COLI_THREADS", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "coli"


def plain(n_cpus: int = 8):
    return flat_topology(n_cpus), Limits(tuple(range(n_cpus)), tuple(range(n_cpus)))


def start(threads: int) -> tuple[subprocess.Popen, tuple[int, ...]]:
    """Another process that holds its CPUs until its input closes."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return child, tuple(int(cpu) for cpu in child.stdout.readline().split())


def test_two_processes_take_different_cores():
    """The second process takes what the first left; when the first is killed its cores are free again."""
    child, theirs = start(3)
    try:
        with claim_threads(machine=plain()) as mine:
            assert (0, 1, 2) == theirs
            assert (3, 4, 5, 6, 7) == mine.binding.cpus
            assert frozenset(range(8)) == held_cpus(range(8))
    finally:
        child.kill()
        child.communicate()
    with claim_threads(machine=plain()) as mine:
        assert tuple(range(8)) == mine.binding.cpus


def test_two_engines_in_one_process_take_different_cores():
    """The locks belong to the open file, not to the process."""
    with claim_threads(5, machine=plain()) as first, claim_threads(3, machine=plain()) as second:
        assert ((0, 1, 2, 3, 4), (5, 6, 7)) == (first.binding.cpus, second.binding.cpus)
    assert frozenset() == held_cpus(range(8))


def test_no_free_core_is_shared():
    """Where everything is taken the second engine runs on the same cores, and a third sees them still held."""
    with claim_threads(machine=plain(2)) as first:
        with claim_threads(machine=plain(2)) as second:
            assert first.binding.cpus == second.binding.cpus == (0, 1)
        assert frozenset({0, 1}) == held_cpus(range(2))


def test_release_twice_gives_back_once():
    """A claim may be released again."""
    claim = claim_threads(machine=plain())
    claim.release()
    claim.release()
    assert frozenset() == held_cpus(range(8))


def test_a_thousand_claims_leave_no_file_open():
    """Nothing leaks."""
    import psutil

    before = psutil.Process().num_fds()
    for _ in range(1000):
        claim_threads(machine=plain(2)).release()
    assert before == psutil.Process().num_fds()


def test_unusable_runtime_folder_is_no_obstacle(monkeypatch, tmp_path):
    """The locks are a courtesy: without a folder the choice is the same, without locks."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(blocked))
    with pytest.raises(OSError):
        runtime_folder()
    assert tuple(range(8)) == claim_threads(machine=plain()).binding.cpus
    assert frozenset() == held_cpus(range(8))


def test_stopped_chooser_does_not_stop_others(folder, monkeypatch):
    """A process that holds the turn and does not move delays the others by a second at most."""
    folder.mkdir(parents=True)
    monkeypatch.setattr(claims, "_TURN_S", 0.05)
    turn = claims._open(folder / "choosing.lock")
    assert claims._lock(turn)
    assert 8 == claim_threads(machine=plain()).binding.threads
    claims.os.close(turn)


def test_folder_of_another_user_is_refused(folder, monkeypatch):
    """A folder that somebody else owns is not written to."""
    runtime_folder()
    monkeypatch.setattr(claims.os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(OSError, match="another user"):
        runtime_folder()


def test_warnings_go_to_the_threads_line(caplog):
    """What the choice has to say is said once, under [threads]."""
    with caplog.at_level("WARNING", logger="coli.threads"):
        topology, found = plain()
        claim_threads(8, machine=(topology, Limits(found.visible, found.allowed, 4.0))).release()
    assert 1 == len(caplog.records)


@pytest.mark.parametrize(("threads", "policy"), [(4, ("bind", (0,))), (8, ("interleave", (0, 1)))])
def test_memory_follows_the_team(threads, policy, machine, monkeypatch):
    """C12: a team on one node keeps its memory there, a team on both interleaves; then the default holds again."""
    from coli.threads import numa

    asked = []
    monkeypatch.setattr(numa, "set_policy", lambda policy: asked.append((policy.mode, policy.nodes)) or True)
    topology = read_topology(machine(two_nodes(4)))
    with claim_threads(threads, machine=(topology, Limits(topology.online, topology.online))) as claim:
        with claim.memory(100 << 20) as granted:
            assert granted
            assert [policy] == asked
    assert [policy, ("default", ())] == asked


def test_memory_refused_goes_on_with_one_warning(machine, monkeypatch, caplog):
    """C12: two loads in a container that forbids set_mempolicy are one warning, and both go on."""
    from coli.threads import numa

    monkeypatch.setattr(numa, "_refused", False)
    monkeypatch.setattr(numa.ctypes, "CDLL", lambda *a, **k: SimpleNamespace(syscall=lambda *a: -1))
    monkeypatch.setattr(numa.ctypes, "get_errno", lambda: 1)
    topology = read_topology(machine(two_nodes(4)))
    for _ in range(2):
        with claim_threads(machine=(topology, Limits(topology.online, topology.online))) as claim:
            with claim.memory(1 << 20) as granted:
                assert not granted
    assert 1 == len([record for record in caplog.records if "Operation not permitted" in record.getMessage()])
