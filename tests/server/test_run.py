"""coli.server.run: what a request sees of its jobs when they are ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from coli.server.run import Run
from coli.server.scheduler import Event


class Nobody:
    """A scheduler that computes nothing."""

    def __init__(self) -> None:
        self.jobs: list = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def cancel(self, job) -> None:
        pass

    drop = cancel


def run_of(answers: int) -> tuple[Run, Nobody]:
    """A run of one prompt."""
    scheduler = Nobody()
    prepared = SimpleNamespace(prompt=[1], answers=[None] * answers, marks=(), scorer=None)
    return Run(scheduler, [prepared]), scheduler


def test_what_came_before_the_end_is_told_before_the_error():
    """A token and an answer's own end were there first."""

    async def go() -> None:
        run, scheduler = run_of(2)
        (job,) = scheduler.jobs
        job.sink(Event(0, finish_reason="stop"))
        run.end(RuntimeError("the server is stopping"))
        assert [(0, "stop")] == [(choice, event.finish_reason) for choice, event in await run.take()]
        with pytest.raises(RuntimeError, match="stopping"):
            await run.take()

    asyncio.run(go())


def test_run_that_is_at_its_end_cannot_be_ended():
    """A reader that is slow to take the last bytes of a whole answer gets no error behind them."""

    async def go() -> None:
        run, scheduler = run_of(1)
        scheduler.jobs[0].sink(Event(0, finish_reason="stop"))
        await run.take()
        run.end(RuntimeError("the server is stopping"))
        assert run.done

    asyncio.run(go())
