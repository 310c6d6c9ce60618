"""Running an answer to its end: in one piece, or as server-sent events.  Either way it ends where its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from coli.errors import ColiError
from coli.log import logger
from coli.server.faults import error_object
from coli.server.run import Run
from coli.server.scheduler import Event
from coli.server.service import Service
from coli.server.shapes import Choice, Shape

PING_S = 5.0  # between signs of life while a prompt is long; proxies and clients give up after 30 s and more
SEND_TIMEOUT_S = 60.0  # a client that takes nothing for so long is gone
GRACE_S = 2.0  # for clients to take the end of their answers when the server is told to end

_log = logger("serve")


async def collect(run: Run, choices: list[Choice]) -> None:
    """Run an answer that is not streamed to its end."""
    while not run.done:
        for index, event in await run.take():
            choices[index].take(event)
            drop_if_complete(run, choices[index], event)


def drop_if_complete(run: Run, choice: Choice, event: Event) -> None:
    """A choice may be over before its tokens are: one call was asked for and is there."""
    if choice.finish_reason is not None and event.finish_reason is None:
        run.drop(choice.index)


async def until_gone(request: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Await some work unless the client leaves first; whether it was done."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            await tasks[0]
            return True
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stream_events(
    run: Run, shape: Shape, choices: list[Choice], include_usage: bool, service: Service
) -> AsyncIterator[bytes]:
    """The server-sent events of a stream."""
    extra: dict[str, Any] = {"usage": None} if include_usage else {}

    def chunk(part: dict[str, Any], **more: Any) -> bytes:
        return _data({**shape.object(shape.chunk_name, [part]), **extra, **more})

    for choice in choices:
        for part in shape.first(choice):
            yield chunk(part)
    try:
        while not run.done:
            taken: dict[int, list[Event]] = {}
            for index, event in await run.take():
                taken.setdefault(index, []).append(event)
            for index, events in taken.items():
                choice = choices[index]
                if choice.finish_reason is not None:
                    continue
                parts = shape.parts(choice, events)
                drop_if_complete(run, choice, events[-1])
                for part in parts:
                    more = {}
                    if part["finish_reason"] is not None and all(c.finish_reason is not None for c in choices):
                        more["timings"] = run.timings(sum(c.tokens for c in choices))
                    yield chunk(part, **more)
    except Exception as error:
        if not isinstance(error, ColiError):
            _log.error("%s: %s", type(error).__name__, error, exc_info=True)
        yield _data(error_object(error))
    else:
        tokens = sum(choice.tokens for choice in choices)
        service.note(run, f"{shape.path}, streamed", tokens)
        if include_usage:
            yield _data({**shape.object(shape.chunk_name, []), "usage": run.usage(tokens)})
    yield b"data: [DONE]\n\n"


def _data(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Stream(EventSourceResponse):
    """A stream of events whose run ends with it, however it ends: also where not one event was asked for."""

    def __init__(self, run: Run, events: AsyncIterator[bytes]) -> None:
        super().__init__(
            events, ping=PING_S, sep="\n", send_timeout=SEND_TIMEOUT_S,
            shutdown_grace_period=2 * GRACE_S,  # the server ends a stream, or cuts its connection, well before
        )  # fmt: skip
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _log.warning("a client took nothing for %g s and is given up", SEND_TIMEOUT_S)
        finally:
            self._run.close()
