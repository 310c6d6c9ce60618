"""The team's parking rule, in C without Python: who lost its core sits out, who waited for a page does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coli._core import step

HERE = Path(__file__).parent / "team"
SOURCE = Path(__file__).parents[2] / "coli" / "_core" / "src"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not step.has_openmp(), reason="threads are judged by Linux's own figures of them"
)


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """team(threads, late, for_a_page=False, pinned=True) -> (threads parked, CPU of each, from 100 on by thread)."""
    program = tmp_path_factory.mktemp("team") / "parking"
    # a core that is lost for 20 ms three times over is no accident of a busy machine
    times = ["-DLONG_WAIT_NS=20000000", "-DWINDOW_NS=10000000000"]
    command = ["cc", "-O1", "-fopenmp", "-w", *times, f"-I{SOURCE}", str(HERE / "parking.c"), str(SOURCE / "team.c")]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=60)

    def run(threads: int, late: int, *, for_a_page: bool = False, pinned: bool = True) -> tuple[set[int], list[int]]:
        arguments = map(str, (threads, late, int(for_a_page), int(pinned)))
        done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60, check=True)
        parked, cpus = (line.split()[1:] for line in done.stdout.splitlines())
        return {int(i) for i in parked}, [int(cpu) for cpu in cpus]

    return run


def test_worker_that_is_late_again_and_again_is_parked(team):
    """Its core is somebody else's at the moment: the others go on without it.  Nobody moves for that."""
    assert team(3, 1) == ({1}, [100, 101, 102])
    assert team(3, 2, pinned=False)[0] == {2}


def test_worker_that_waits_for_pages_is_not_parked(team):
    """The first pass over a model that is not in memory yet is no lost core; least of all one a second."""
    assert team(3, 1, for_a_page=True) == (set(), [100, 101, 102])


def test_thread_0_that_is_late_takes_a_workers_core(team):
    """It starts and ends every region and cannot sit out; the worker does in its place, on the core that was lost."""
    assert team(3, 0) == ({2}, [102, 101, 100])
    assert team(2, 0) == ({1}, [101, 100])


def test_thread_0_stays_where_there_is_nothing_to_take(team):
    """It waits for a page, or nobody is pinned and the system moves threads by itself."""
    assert team(3, 0, for_a_page=True) == (set(), [100, 101, 102])
    assert team(3, 0, pinned=False)[0] == set()
