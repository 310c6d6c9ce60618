"""The engine's threads in a process: nobody else is pinned, nothing leaks, two engines do not touch each other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

import coli
from conftest import assert_same_bits

IDS = [5, 300, 17, 4000]

@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity masks")
@pytest.mark.parametrize("variables", [{}, {"OMP_PROC_BIND": "close"}, {"OMP_PLACES": "cores"}])
def test_main_thread_keeps_its_mask_under_omp_variables(variables):
    """libgomp pins the thread that loads it when OMP_* asks for binding; the main thread gets its mask back."""
    code = (
        "import os\nbefore = sorted(os.sched_getaffinity(0))\nimport coli\n"
        "with coli.load('demo', devices='none') as model:\n    model.logits([1, 2, 3])\n"
        "    assert sorted(os.sched_getaffinity(0)) == before, os.sched_getaffinity(0)\n"
        "    child = os.popen('python3 -c \"import os; print(len(os.sched_getaffinity(0)))\"').read()\n"
        "    assert int(child) == len(before), child\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


CYCLES = """
import sys, threading, time, psutil
import coli

def cycles(n, expected=None):
    for _ in range(n):
        with coli.load("demo", devices="none", threads=2) as model:
            logits = model.logits([5, 300, 17, 4000]).tobytes()
        assert expected in (None, logits)
        expected = logits

def settled():  # threads of OpenMP end a moment after their team
    fewest, end = process.num_threads(), time.monotonic() + 2
    while time.monotonic() < end:
        time.sleep(0.05)
        fewest = min(fewest, process.num_threads())
    return fewest

process = psutil.Process()
cycles(3)  # what the first loads make for good
threads, files = settled(), process.num_fds()
cycles(int(sys.argv[1]))
print(settled() - threads, process.num_fds() - files, [t.name for t in threading.enumerate()])
"""


def _leak(n: int) -> None:
    """In a process of its own: other tests' servers and browsers have threads that come and go."""
    done = subprocess.run([sys.executable, "-c", CYCLES, str(n)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    threads, files, names = done.stdout.split(maxsplit=2)
    assert int(threads) <= 0 and int(files) <= 0 and names.strip() == "['MainThread']", done.stdout


def test_load_and_close_leak_no_thread():
    """Twenty loads and closes leave as many threads and open files as three did."""
    _leak(20)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_thousand_loads_and_closes_leak_no_thread():
    """So do a thousand."""
    _leak(1000)


def test_two_engines_in_one_process():
    """Two loaded models, called in turn and from two threads at once, answer as each does alone."""
    with coli.load("demo", devices="none", threads=1) as first, coli.load("demo", devices="none", threads=2) as second:
        expected = first.logits(IDS)
        assert_same_bits(second.logits(IDS), expected)
        found: dict[str, list] = {"first": [], "second": []}

        def work(name: str, model: coli.Model) -> None:
            for _ in range(20):
                found[name].append(model.logits(IDS))

        workers = [threading.Thread(target=work, args=item) for item in (("first", first), ("second", second))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for name, answers in found.items():
            assert len(answers) == 20
            for answer in answers:
                assert_same_bits(answer, expected, name)
