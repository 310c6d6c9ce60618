"""Who may come in: host names, origins, the key, and how long and large a request may be.

An ASGI middleware before everything else.  What each door is against:

- **Host**: a web page of a foreign name that resolves to this machine (DNS rebinding).  Addresses and localhost cannot
  be rebound and pass; other names must be listed.
- **Origin**: a web page elsewhere that spends this machine's time, even where it may not read the answer.  Off the
  list, requests that carry a foreign origin are refused and get no CORS headers.
- **Key**: compared in constant time, never logged.  The page itself and /health are readable without it.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coli.errors import RequestError
from coli.server.faults import Refused, error_response

BODY_TIMEOUT_S = 30.0  # for a whole body; a client that needs longer for its megabytes holds a connection for nothing
_OPEN_PATHS = ("/", "/health")
_CORS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "authorization, content-type",
    "Access-Control-Max-Age": "600",
}


class Doors:
    """The middleware.

    api_key : None for none.   hosts : names besides addresses and localhost; ``*`` is any.
    origins : whole origins such as ``https://example.org``; ``*`` is any.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None = None, hosts: Iterable[str] = (), origins: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._origins = {origin.rstrip("/").lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        cors = self._cors(origin)

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(cors)
            await send(message)

        if scope["method"] == "OPTIONS":
            refusal = self._host_refusal(headers)
            answer = Response(status_code=204, headers=_CORS) if refusal is None else error_response(refusal)
            await answer(scope, receive, send_with_cors)
            return
        refusal = self._refusal(scope["path"], headers, origin)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send_with_cors)
            return
        await self._app(scope, receive, send_with_cors)

    def _refusal(self, path: str, headers: Headers, origin: str | None) -> Refused | None:
        refusal = self._host_refusal(headers)
        if refusal is not None:
            return refusal
        if self._key is not None and path not in _OPEN_PATHS and not self._has_key(headers):
            return Refused(401, "this server needs its API key: Authorization: Bearer KEY", "invalid_api_key")
        if origin is not None and not self._allows(origin) and not _is_own(origin, headers.get("host", "")):
            return Refused(403, f"origin {origin:.80} is not allowed here (--cors)", "origin_not_allowed")
        return None

    def _host_refusal(self, headers: Headers) -> Refused | None:
        host = _name_of(headers.get("host", ""))
        if host in self._hosts or "*" in self._hosts or _is_address(host):
            return None
        return Refused(403, f"host {host[:80]!r} is not served here (--allow-host)", "host_not_allowed")

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        assert self._key is not None
        right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key)
        return right and scheme.lower() == "bearer"

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins

    def _cors(self, origin: str | None) -> dict[str, str]:
        if origin is None or not self._allows(origin):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": "retry-after"}


def _name_of(host: str) -> str:
    """The host of a Host header, without its port: ``[::1]:80`` is ``::1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_own(origin: str, host: str) -> bool:
    return origin.lower().partition("://")[2] == host.lower() != ""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """A request's whole body.  Refused: 413 where it is larger than the limit, 408 where it does not come."""
    too_large = Refused(413, f"the body is larger than {limit_bytes:,} bytes (--max-body)", "body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit_bytes:
        raise too_large
    if "content-encoding" in request.headers:
        raise RequestError("content-encoding is not supported; send the body as it is")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", "body_timeout") from None
    return bytes(body)
