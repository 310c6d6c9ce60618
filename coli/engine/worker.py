"""The engine thread: one thread that makes every parallel call of a model.

An OpenMP pool belongs to the thread that calls it, and pinning the team pins its caller too.  So the team
lives on a thread of its own and everybody else, numpy and the main thread included, keeps the whole
machine.  Jobs run one at a time, in the order they came.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any, Callable

from coli.errors import ColiError


class Job:
    """One call on the engine thread.  A long one asks ``cancelled`` between its pieces."""

    __slots__ = ("fn", "args", "result", "error", "done", "finished", "cancelled")

    def __init__(self, fn: Callable[..., Any], args: tuple) -> None:
        self.fn = fn
        self.args = args
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()


class Cancelled(Exception):
    """Raised inside a job that was asked to stop; never leaves the engine."""


class EngineThread:
    """Runs jobs until it is closed.  ``call`` waits for the answer and passes errors on."""

    def __init__(self, name: str = "coli-engine") -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._closed = False
        self._gate = threading.Lock()  # no job may be queued behind the None that ends the thread
        self._thread.start()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.result = job.fn(job, *job.args)
            except BaseException as error:  # handed to the caller, who raises it
                job.error = error
            job.finished = True
            job.done.release()
            del job  # a session that only this frame still holds is freed now, not at the next job

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run ``fn(job, *args)`` on the engine thread and return its result.

        An interrupt (Ctrl-C) asks the job to stop, waits until it stands between two pieces, and is raised
        again: whatever the job had finished stays finished.
        """
        job, queued = Job(fn, args), False
        try:
            with self._gate:
                if self._closed:
                    raise ColiError("the model is closed")
                self._jobs.put(job)
                queued = True
            job.done.acquire()
        except BaseException as interrupt:
            job.cancelled = True
            # A second Ctrl-C must not leave a job behind that goes on changing its session. The first may have come when
            # the lock was taken already: who asked for it once more would wait for ever.
            while queued and not job.finished:
                try:
                    job.done.acquire(timeout=0.05)
                except KeyboardInterrupt:
                    continue
            raise interrupt
        try:
            if job.error is not None:
                raise job.error
            return job.result
        finally:
            del job  # else the error's traceback and this frame hold each other, and the session, until a collection

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()
