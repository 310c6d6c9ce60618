"""The HTTP server under the application: uvicorn, with a deadline for request headers and an end that is prompt.

uvicorn waits for ever for the headers of a request that is begun; here a connection that has not sent them in time is
closed, so that idle sockets cannot be collected against the server.  At its end uvicorn lets answers run for a time and
then breaks them off; here they are ended with an error that their clients can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from coli.log import logger
from coli.server.sse import GRACE_S

HEADERS_TIMEOUT_S = 20.0
_COMPLAIN_S = 10.0
_BACKLOG = 256  # connections that the system holds for us; asyncio tries as often a second where no file is left
KEEP_ALIVE_S = 75  # longer than the pools of usual clients keep a connection, so that it is they who close


class _Protocol(H11Protocol):
    """HTTP/1.1 whose connections must come to a request within HEADERS_TIMEOUT_S of their first byte, or of opening."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_TIMEOUT_S, self._late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """A server that a signal ends, and that is then done: uvicorn would raise the signal again, to die of it.

    stop : ends the answers that run, each with an error; called once, on the event loop, as the end begins.
    """

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal begins the end, which waits for a step or a load under way; Ctrl-C then is the end itself."""
        if self.should_exit and sig == signal.SIGINT:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        _allow_files()
        asyncio.get_running_loop().set_exception_handler(_Complaints())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop()
        cut = asyncio.get_running_loop().call_later(GRACE_S, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut(self) -> None:
        """Break off what is still open: clients that take no answer, or have not sent their whole request."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _allow_files() -> None:
    """As many open files, each connection being one, as this process may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower one that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Complaints:
    """The event loop's: connections that find no file left are one line in a while, and not thousands of tracebacks."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_at:
            self._next_at = loop.time() + _COMPLAIN_S
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger("serve").warning("connections wait: %d files are open, which is all that ulimit -n allows", limit)


def make_server(app: Starlette) -> uvicorn.Server:
    """A server for an application of `make_app`.

    It logs nothing of its own below warnings, and no request's headers ever.
    """
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=_BACKLOG,
    )
    return _Server(config, app.state.service.stop)
