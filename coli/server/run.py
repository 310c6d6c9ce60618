"""A request's jobs, seen from the event loop.

The scheduler hands over what happened once a turn; here it is dealt out to the requests that wait.  A reader that falls
behind finds several events at once and can make one message of them, so a slow client costs no more than it takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from coli.server.prepare import Prepared
from coli.server.scheduler import Event, Job, Scheduler


class Run:
    """One or more prompts and all answers to them; answer j of prompt i is choice ``offset of i + j``.

    Made on the event loop; nothing of it may be used on another thread.  Must be closed, whatever happened.
    """

    def __init__(self, scheduler: Scheduler, prepared: Sequence[Prepared]) -> None:
        """Queues the jobs.  Raises what `Scheduler.submit` does, in which case none of them is left behind."""
        self._scheduler = scheduler
        self._events: deque[tuple[int, Event]] = deque()
        self._ready = asyncio.Event()
        self._places: list[tuple[Job, int]] = []  # of each choice: its job, its index in it
        self._open: set[int] = set()
        self.jobs: list[Job] = []
        try:
            for item in prepared:
                self._submit(item)
        except BaseException:
            self.close()
            raise

    def _submit(self, item: Prepared) -> None:
        offset = len(self._places)
        job = Job(item.prompt, item.answers, self._sink(offset, len(item.answers)), item.marks, item.scorer)
        self._places += [(job, i) for i in range(len(item.answers))]
        self._open |= set(range(offset, len(self._places)))
        self._scheduler.submit(job)
        self.jobs.append(job)

    def _sink(self, offset: int, count: int) -> Any:
        def take(event: Event) -> None:
            if event.scores is not None:
                self._events.extend((offset + i, event) for i in range(count))
            else:
                self._events.append((offset + event.index, event))
            self._ready.set()

        return take

    @property
    def done(self) -> bool:
        """Whether every choice is at its end and nothing more will come."""
        return not self._open and not self._events

    async def take(self) -> list[tuple[int, Event]]:
        """What happened since the last call, at least one event.  Raises the error that ended a job."""
        while not self._events:
            self._ready.clear()
            await self._ready.wait()
        events = []
        while self._events:
            choice, event = self._events[0]
            if event.error is not None and events:
                break  # what came before it is told first
            self._events.popleft()
            if event.error is not None:
                self._events.clear()
                raise event.error
            events.append((choice, event))
            if event.finish_reason is not None:
                self._open.discard(choice)
        return events

    def drop(self, choice: int) -> None:
        """A choice is complete as it is; it is not computed further."""
        job, index = self._places[choice]
        self._open.discard(choice)
        self._scheduler.drop(job, index)

    def end(self, error: Exception) -> None:
        """Whoever waits for this gets an error now, and not only once the step under way is done; nobody, if all is."""
        if not self._open:
            return
        self._events.append((0, Event(error=error)))
        self._ready.set()

    def close(self) -> None:
        """Stop what is still computed.  Nothing, if all is done."""
        if self._open:
            for job in self.jobs:
                self._scheduler.cancel(job)

    # ---- about it -------------------------------------------------------------------------------------------

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt_tokens = sum(len(job.prompt) for job in self.jobs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(job.reused_tokens for job in self.jobs)},
        }

    def timings(self, completion_tokens: int) -> dict[str, Any]:
        """Speeds of the request, milliseconds and tokens a second; null where nothing was done."""
        computed = sum(len(job.prompt) - job.reused_tokens for job in self.jobs)
        prefill_s = sum(job.prefill_s for job in self.jobs)
        firsts = [job.first_at for job in self.jobs if job.first_at is not None]
        lasts = [job.last_at for job in self.jobs if job.last_at is not None]
        decode_s = max(lasts) - min(firsts) if firsts else 0.0
        steps = completion_tokens - sum(len(job.answers) for job in self.jobs)
        started = [job.started_at for job in self.jobs if job.started_at is not None]
        return {
            "queue_ms": _ms(min(started) - min(job.queued_at for job in self.jobs)) if started else None,
            "cache_n": sum(job.reused_tokens for job in self.jobs),
            "prompt_n": computed,
            "prompt_ms": _ms(prefill_s),
            "prompt_per_second": round(computed / prefill_s, 2) if prefill_s else None,
            "predicted_n": completion_tokens,
            "predicted_ms": _ms(decode_s),
            "predicted_per_second": round(steps / decode_s, 2) if decode_s and steps > 0 else None,
        }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
