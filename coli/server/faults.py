"""What went wrong, as the API says it: one error object, made from the exception.

``{"error": {"message", "type", "param", "code"}}``.  A request at fault is 400, a full queue 429 with Retry-After, a
model that is not there yet or a server that ends 503, anything that is not the client's doing 500.  Of an unexpected
exception the client learns its kind only; the log has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from coli.errors import ColiError, RequestError
from coli.server.scheduler import Busy, Stopping


class Refused(ColiError):
    """A request that is turned away with a status of its own, before anything of it is read."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class Loading(ColiError):
    """The model is not there yet."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_object(error: BaseException) -> dict[str, Any]:
    """The body for an error."""
    status = status_of(error)
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    code = getattr(error, "code", None)
    if isinstance(error, Busy):
        code = "queue_full"
    elif isinstance(error, Loading):
        code = "model_loading"
    elif isinstance(error, Stopping):
        code = "server_stopping"
    message = str(error) if isinstance(error, ColiError) else f"internal error ({type(error).__name__})"
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), "code": code}}


def status_of(error: BaseException) -> int:
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, RequestError):
        return 400
    if isinstance(error, Busy):
        return 429
    return 503 if isinstance(error, (Loading, Stopping)) else 500


def error_response(error: BaseException, headers: Mapping[str, str] | None = None) -> JsonResponse:
    given = dict(headers or {})
    if isinstance(error, Busy):
        given["Retry-After"] = str(error.retry_s)
    elif isinstance(error, Loading):
        given["Retry-After"] = "2"
    elif isinstance(error, Stopping):
        given["Retry-After"] = "5"
    elif status_of(error) == 401:
        given["WWW-Authenticate"] = "Bearer"
    return JsonResponse(error_object(error), status_of(error), given)
