"""The HTTP application: paths, and what each does.

A handler reads a body, has it prepared on a worker thread, runs it, and shows events as the API's objects.  Nothing of
a request is ever used as a path: the page is one, read when the application is made, and so is the model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from coli.errors import ColiError, ModelError, RequestError
from coli.log import logger
from coli.server.choices import ChatChoice, TextChoice, TokenNames
from coli.server.doors import Doors, read_body
from coli.server.faults import JsonResponse, Refused, error_response
from coli.server.openapi import document
from coli.server.prepare import Prepared
from coli.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from coli.server.service import Service
from coli.server.shapes import ChatShape, Choice, Shape, TextShape
from coli.server.sse import Stream, collect, stream_events, until_gone

WORKERS = 4  # threads that prepare requests; they mostly hold the interpreter's lock, so more would gain nothing
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_log = logger("serve")


def make_app(
    service: Service,
    *,
    api_key: str | None = None,
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    max_body_bytes: int = 8 << 20,
) -> Starlette:
    """The application for a service, which may still be loading its model.

    api_key, hosts, origins : see `coli.server.doors`.   The service starts and ends with the application.
    """
    handlers = _Handlers(service, max_body_bytes)
    page = resources.files("coli.server").joinpath("static/index.html").read_bytes()

    async def index(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = WORKERS
        service.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            await run_in_threadpool(service.close)

    gets = {
        "/v1/models": handlers.models, "/v1/models/{model:path}": handlers.one_model, "/health": handlers.health,
        "/metrics": handlers.metrics, "/tokenizer_info": handlers.tokenizer_info, "/coli/plan": handlers.plan,
        "/coli/stats": handlers.stats, "/openapi.json": handlers.openapi,
    }  # fmt: skip
    posts = {
        "/v1/chat/completions": handlers.chat, "/v1/completions": handlers.completions,
        "/tokenize": handlers.tokenize, "/detokenize": handlers.detokenize,
    }  # fmt: skip
    app = Starlette(
        routes=[
            Route("/", index, methods=["GET"]),
            *(Route(path, handlers.counted(path, handler), methods=["GET"]) for path, handler in gets.items()),
            *(Route(path, handlers.counted(path, handler), methods=["POST"]) for path, handler in posts.items()),
        ],
        middleware=[Middleware(Doors, api_key=api_key, hosts=hosts, origins=origins)],
        exception_handlers={HTTPException: _http_exception},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, as the API's error object."""
    assert isinstance(error, HTTPException)
    what = {404: f"there is nothing at {request.url.path[:100]}", 405: f"{request.method} is not allowed here"}
    refused = Refused(error.status_code, what.get(error.status_code, error.detail))
    return error_response(refused, error.headers)


class _Handlers:
    def __init__(self, service: Service, max_body_bytes: int) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes

    def counted(
        self, path: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler whose errors become the API's, and whose answers are counted under its route's path."""
        requests = self._service.metrics.requests

        async def handle(request: Request) -> Response:
            try:
                response = await handler(request)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            except Exception as error:
                if not isinstance(error, ColiError):
                    _log.error("%s: %s: %s", request.url.path, type(error).__name__, error, exc_info=True)
                response = error_response(error)
            requests.labels(path, response.status_code).inc()
            return response

        return handle

    # ---- answers --------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        service = self._service
        wanted = parse(ChatRequest, await read_body(request, self._max_body_bytes))
        preparer = service.preparer
        prepared = await _on_thread(lambda: preparer.chat(wanted))
        choices: list[Choice] = [
            ChatChoice(i, prepared, service.model.tokenizer, logprobs=bool(wanted.logprobs))
            for i in range(len(prepared.answers))
        ]
        return await self._answer(request, wanted, ChatShape(), [prepared], choices)

    async def completions(self, request: Request) -> Response:
        service = self._service
        wanted = parse(CompletionRequest, await read_body(request, self._max_body_bytes))
        preparer = service.preparer
        prepared = await _on_thread(lambda: preparer.completions(wanted))
        tokenizer = service.model.tokenizer if service.model.has_tokenizer else None
        choices: list[Choice] = []
        for item in prepared:
            echo = ""
            if wanted.echo:
                ids = item.prompt.tolist()
                echo = ",".join(map(str, ids)) + "," if tokenizer is None else tokenizer.decode(ids)
            for _ in item.answers:
                choices.append(
                    TextChoice(len(choices), item, tokenizer, logprobs=wanted.logprobs is not None, echo=echo)
                )
        return await self._answer(request, wanted, TextShape(), prepared, choices)

    async def _answer(
        self, request: Request, wanted: Any, shape: Shape, prepared: list[Prepared], choices: list[Choice]
    ) -> Response:
        service = self._service
        shape.begin(service.name)
        run = service.begin(prepared)
        if wanted.stream:
            include_usage = bool(wanted.stream_options and wanted.stream_options.include_usage)
            return Stream(run, stream_events(run, shape, choices, include_usage, service))
        try:
            if not await until_gone(request, collect(run, choices)):
                return Response(status_code=499)
            tokens = sum(choice.tokens for choice in choices)
            service.note(run, shape.path, tokens)
            whole = shape.object(shape.whole_name, [choice.whole() for choice in choices])
            return JsonResponse({**whole, "usage": run.usage(tokens), "timings": run.timings(tokens)})
        finally:
            run.close()

    # ---- ids ------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        wanted = parse(TokenizeRequest, await read_body(request, self._max_body_bytes))
        model, preparer = self._service.model, self._service.preparer
        texts = [text for text in (wanted.content, wanted.prompt) if text is not None]
        if len(texts) + (wanted.messages is not None) != 1:
            raise RequestError("one of content, prompt and messages was expected", param="content")

        def ids_of() -> list[int]:
            if texts:
                return preparer.tokenizer("content").encode(texts[0], special=wanted.parse_special is not False)
            return preparer.render(wanted, wanted.tools).ids

        ids = await _on_thread(ids_of)
        found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.context}
        if wanted.with_pieces:
            names = TokenNames(model.tokenizer)
            found["pieces"] = [names.text(i) for i in ids]
        return JsonResponse(found)

    async def detokenize(self, request: Request) -> Response:
        wanted = parse(DetokenizeRequest, await read_body(request, self._max_body_bytes))
        model, preparer = self._service.model, self._service.preparer
        text = await _on_thread(lambda: preparer.tokenizer("tokens").decode(model.prompt_ids(wanted.tokens)))
        return JsonResponse({"content": text, "prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        return JsonResponse(self._service.tokenizer_info())

    # ---- about the server -----------------------------------------------------------------------------------

    def _model_entry(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.name, "object": "model", "created": service.started_s, "owned_by": "coli",
            "max_model_len": service.model.context,
        }  # fmt: skip

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._model_entry()]})

    async def one_model(self, request: Request) -> Response:
        entry, wanted = self._model_entry(), request.path_params["model"]
        if not wanted:  # /v1/models/ is the list
            return await self.models(request)
        if wanted != entry["id"]:
            message = f"The model {wanted[:100]!r} does not exist; this server has {entry['id']!r}"
            raise Refused(404, message, "model_not_found", "model")
        return JsonResponse(entry)

    async def health(self, request: Request) -> Response:
        self._service.model  # noqa: B018  raises Loading, which is the 503
        return JsonResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def plan(self, request: Request) -> Response:
        return JsonResponse(self._service.plan())

    async def stats(self, request: Request) -> Response:
        return JsonResponse(self._service.stats(experts=request.query_params.get("experts") == "1"))

    async def openapi(self, request: Request) -> Response:
        return JsonResponse(document())


async def _on_thread(work: Callable[[], Any]) -> Any:
    """Run a request's preparation on a worker thread.  What the model lacks for it is the request's fault, not ours."""
    try:
        return await run_in_threadpool(work)
    except ModelError as error:
        raise RequestError(str(error), code="not_offered_by_model") from None
