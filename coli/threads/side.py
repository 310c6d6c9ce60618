"""A thread for what must not hold the decode up."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Thread
from typing import Any


class SideThread(Executor):
    """One thread that does what it is given, in turn; it begins with the first job, and not on a pinned owner's core.

    What `ThreadPoolExecutor` does around a job (a future with its condition, a work item, a semaphore) is 50 us of
    cache misses between two tokens, so a job may be started without all that (`do`).

    Where the system has no thread to give, ``do`` and ``submit`` raise RuntimeError and have taken nothing; the next
    job asks again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._end = weakref.finalize(self, self._jobs.put, None)  # also where nobody has it any more

    def do(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job whose end nobody asks about here.  It raises nothing."""
        if self._thread is None:
            self._begin()
        self._jobs.put((job, args))

    def _begin(self) -> None:
        if not self._end.alive:
            raise RuntimeError(f"{self._name} has ended")
        thread = Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
        thread.start()
        self._thread = thread  # only now: one that did not start would be given jobs, and waited for

    def submit(self, job: Callable[..., Any], /, *args: Any, **options: Any) -> Future:
        """Start a job; the future has what it returns or raises."""
        future: Future = Future()
        self.do(_fulfil, future, job, args, options)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End behind what was started.  Jobs are not cancelled."""
        thread, self._thread = self._thread, None
        self._end()
        if wait and thread is not None:
            thread.join()


def roam() -> None:
    """Let the calling thread run wherever the main thread may: a helper that a pinned thread starts inherits its core.

    The main thread has the process's own mask, as long as nobody narrows it: teams are pinned on threads of their own,
    and what OpenMP does to the thread that loads it is undone (``coli._core``).
    """
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


def _work(jobs: SimpleQueue[tuple | None]) -> None:
    roam()
    while (given := jobs.get()) is not None:
        job, args = given
        job(*args)
        del given, job, args  # who waits for the next one holds nothing of the last


def _fulfil(future: Future, job: Callable[..., Any], args: tuple, options: dict[str, Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = job(*args, **options)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
