"""coli/threads/side.py: one thread, one job after the other."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest

from coli.threads.side import SideThread


def wait_until(is_so) -> bool:
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


def test_jobs_are_done_in_turn_with_and_without_a_future():
    """What was started first ends first; a future has what its job returned or raised."""
    done, thread = [], SideThread("side")
    for number in range(5):
        thread.do(done.append, number)
    assert 5 == thread.submit(len, done).result()
    assert list(range(5)) == done
    assert isinstance(thread.submit(int, "no number").exception(), ValueError)
    assert ["side"] == [t.name for t in threading.enumerate() if t.name == "side"]
    thread.shutdown()


def test_shutdown_waits_for_what_was_started_and_takes_nothing_more():
    """The thread is gone afterwards, whether it ever began; a job that came too late would never end."""
    before, done = threading.active_count(), []
    idle, thread = SideThread("idle"), SideThread("side")
    thread.do(time.sleep, 0.01)
    thread.do(done.append, 1)
    for one in (idle, thread):
        one.shutdown()
        one.shutdown()
        with pytest.raises(RuntimeError, match="has ended"):
            one.submit(int)
    assert ([1], before) == (done, threading.active_count())


@pytest.mark.parametrize("recovers", [True, False])
def test_thread_that_does_not_start_is_asked_for_again(monkeypatch, recovers):
    """Where the system has no thread to give the job is refused, the next one is not, and the end is one either way."""

    def refuse(_):
        raise RuntimeError("can't start new thread")

    done, thread = [], SideThread("side")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.do(done.append, 1)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.submit(done.append, 2)
    if recovers:
        assert thread.submit(len, done).result(timeout=5) == 0
    thread.shutdown()
    assert "side" not in [t.name for t in threading.enumerate()]


def test_thread_ends_with_its_owner_and_holds_no_finished_job():
    """Neither a thread nor what a job worked on is kept alive by mere forgetting."""

    class Thing:
        def touch(self):
            pass

    before, thread, thing = threading.active_count(), SideThread("side"), Thing()
    thread.do(thing.touch)
    gone = weakref.ref(thing)
    del thing
    assert wait_until(lambda: gone() is None)
    del thread
    gc.collect()
    assert wait_until(lambda: threading.active_count() == before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_thread_of_a_pinned_owner_may_run_anywhere():
    """The one core of the engine's thread is not its core."""
    found = []

    def pinned():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(os.getpid()))})
        thread = SideThread("side")
        found.append(thread.submit(os.sched_getaffinity, 0).result())
        thread.shutdown()

    owner = threading.Thread(target=pinned)
    owner.start()
    owner.join()
    assert [os.sched_getaffinity(os.getpid())] == found
