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
    """One thread that does what it is given, in turn, wherever the process may run.

    What `ThreadPoolExecutor` does around a job (a future with its condition, a work item, a semaphore) is 50 us of
    cache misses between two tokens, so a job may be started without all that (`do`).
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
        self._thread = Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
        self._thread.start()

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


def _work(jobs: SimpleQueue[tuple | None]) -> None:
    _roam()
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


def _roam() -> None:
    """Let this thread run wherever the process may: it must not inherit the one core of a pinned engine thread."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
