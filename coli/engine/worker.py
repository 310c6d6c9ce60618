"""The engine thread: one thread that makes every parallel call of a model.

An OpenMP pool belongs to the thread that calls it, and pinning the team pins its caller too.  So the team
lives on a thread of its own and everybody else, numpy and the main thread included, keeps the whole
machine.  Jobs run one at a time, in the order they came.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import Any, Callable

from coli._core.cudalaunch import Bell
from coli.errors import ColiError

FORKED = (
    "this model was loaded by the parent process, whose threads a forked child does not have; load it in the child, or "
    "start the child by spawn"
)


# Waking a thread that sleeps costs 40 to 70 us, a token of a fast card takes 2,000.  So neither side sleeps at once:
NEXT_JOB_S = 100e-6  # the engine thread listens so long for the next job,
HAND_OVER_S = 20e-6  # a caller leaves the GIL to it so long,
SOON_S = 500e-6  # and a caller so long for an answer that was said to come soon.


class Job:
    """One call on the engine thread.  A long one asks ``cancelled`` between its pieces, and may say ``soon``."""

    __slots__ = ("fn", "args", "result", "error", "near", "done", "finished", "cancelled")

    def __init__(self, fn: Callable[..., Any], args: tuple) -> None:
        self.fn = fn
        self.args = args
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.finished = False
        self.near = threading.Lock()  # released where the caller should wake up
        self.near.acquire()
        self.done = threading.Lock()
        self.done.acquire()

    def soon(self) -> None:
        """The answer is a moment away: the caller may wake up."""
        if self.near.locked():
            self.near.release()


class Cancelled(Exception):
    """Raised inside a job that was asked to stop; never leaves the engine."""


class EngineThread:
    """Runs jobs until it is closed.  ``call`` waits for the answer and passes errors on.

    job : the one that runs now.
    """

    def __init__(self, name: str = "coli-engine") -> None:
        self.job: Job | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._queued, self._ended = Bell(), Bell()
        self._closed = False
        self._pid = os.getpid()
        self._gate = threading.Lock()  # no job may be queued behind the None that ends the thread
        self._thread.start()

    def _loop(self) -> None:
        heard = 0
        while (job := self._jobs.get()) is not None:
            heard = heard + 1 & 0xFFFFFFFF
            self.job = job
            try:
                job.result = job.fn(job, *job.args)
            except BaseException as error:  # handed to the caller, who raises it
                job.error = error
            self.job = None
            job.finished = True
            job.soon()
            job.done.release()
            del job  # a session that only this frame still holds is freed now, not at the next job
            self._queued.wait(heard, NEXT_JOB_S, self._ended)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run ``fn(job, *args)`` on the engine thread and return its result.

        An interrupt (Ctrl-C) asks the job to stop, waits until it stands between two pieces, and is raised
        again: whatever the job had finished stays finished.
        """
        if os.getpid() != self._pid:
            raise ColiError(FORKED)
        job, queued = Job(fn, args), False
        try:
            with self._gate:
                if self._closed:
                    raise ColiError("the model is closed")
                ended = self._ended.rung
                self._jobs.put(job)
                queued = True
            self._ended.wait(ended, HAND_OVER_S, self._queued)
            job.near.acquire()
            while not job.finished and self._ended.wait(ended, SOON_S):
                ended = ended + 1 & 0xFFFFFFFF  # that was another's job
            job.done.acquire()
        except BaseException as interrupt:
            job.cancelled = True
            # A second Ctrl-C must not leave a job behind that goes on changing its session. The first may have come
            # when the lock was taken already: who asked for it once more would wait for ever.
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
        """Finish what is queued and end the thread.  Does nothing in a forked child, which has no such thread."""
        if os.getpid() != self._pid:
            return
        with self._gate:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
                self._queued.ring()
        self._thread.join()
