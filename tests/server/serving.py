"""A server under test: the real application on a real socket, and a client that sees bytes.

`Serving` runs it on a thread.  `Client` is the standard library's HTTP, so that a test decides what is sent and when a
socket closes.  `ScriptedServerEngine` is the scripted engine with the batch interface that the scheduler uses.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scripted import TINY, TINY_SPECIAL, ScriptedEngine, ScriptedSession, tiny_ids

from coli.errors import ModelError
from coli.model import Model
from coli.server.app import make_app
from coli.server.http import make_server
from coli.server.service import Service

ASSISTANT = tiny_ids("<|im_start|>assistant\n")
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class ServerSession(ScriptedSession):
    size_bytes = 1000

    def copy(self) -> ServerSession:
        self._engine.calls.append(("copy", len(self.ids)))
        return ServerSession(self._engine, self.ids)


class ScriptedServerEngine(ScriptedEngine):
    """passes : rows of each part of every pass.   delay_s : what a row takes.   fail : may raise for a pass's ids."""

    chunk_rows = 512

    def __init__(self, next_logits: Callable[[list[int]], Any], *, delay_s: float = 0.0, **options: Any) -> None:
        super().__init__(next_logits, **options)
        self.delay_s = delay_s
        self.passes: list[list[int]] = []
        self.fail: Callable[[list[list[int]]], None] = lambda parts: None

    def session(self) -> ServerSession:
        return ServerSession(self)

    def on_thread(self, fn: Callable[[], Any]) -> Any:
        return fn()

    def forward(self, parts: list[tuple[ServerSession, np.ndarray]], rows: Sequence[int], out: np.ndarray) -> None:
        self.passes.append([len(ids) for _, ids in parts])
        if self.delay_s:
            time.sleep(self.delay_s * max(len(ids) for _, ids in parts))
        self.fail([s.ids + ids.tolist() for s, ids in parts])
        wanted = dict(zip(rows, range(len(rows)), strict=True))
        row = 0
        for session, ids in parts:
            for token_id in ids.tolist():
                session.ids.append(token_id)
                if row in wanted:
                    out[wanted[row], : self.vocab_size] = self.logits_after(session.ids)
                row += 1


def answering(text: str | bytes, *, end: bool = True) -> Callable[[list[int]], int]:
    """A script that answers every conversation with ``text``, byte by byte, then ``<|im_end|>`` (or never ends)."""
    ids = list(text) if isinstance(text, bytes) else tiny_ids(text)

    def next_id(so_far: list[int]) -> int:
        done = len(so_far) - _answer_start(so_far)
        return ids[done] if done < len(ids) else TINY_SPECIAL["<|im_end|>"] if end else ord("x")

    return next_id


def _answer_start(ids: list[int]) -> int:
    """Where the answer begins: behind the last opening and what the template writes into it; 0 in what is no chat."""
    places = range(len(ids) - len(ASSISTANT), -1, -1)
    at = next((i + len(ASSISTANT) for i in places if ids[i : i + len(ASSISTANT)] == ASSISTANT), 0)
    for text in ("<think>\n\n</think>\n\n", "<think>\n"):
        begin = tiny_ids(text)
        if ids[at : at + len(begin)] == begin:
            return at + len(begin)
    return at


def broken(ids: list[int]) -> ModelError:
    return ModelError(f"the logits at position {len(ids)} are NaN")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Answer:
        return self.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), **options)

    def open_stream(self, path: str, body: Any) -> Stream:
        return Stream(self.port, path, body)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end in [DONE]."""
        with self.open_stream(path, {**body, "stream": True}) as stream:
            assert stream.status == 200, stream.response.read()
            events = list(stream)
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def chat(self, text: str, **body: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", chat_body(text, **body)).json

    def stats(self) -> dict[str, Any]:
        return self.get("/coli/stats").json["server"]


class Stream:
    """A request whose events are read one by one."""

    def __init__(self, port: int, path: str, body: Any) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.connection.request("POST", path, json.dumps(body).encode())
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def __iter__(self) -> Iterator[str]:
        for line in self.response:
            if line.startswith(b"data: "):
                yield line[6:].decode().rstrip("\n")

    def close(self) -> None:
        self.response.close()
        self.connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Serving:
    """A running server: ``with Serving(model) as client``.   options : of Service; app : of make_app."""

    def __init__(self, load: Model | Callable[[], Model], *, app: dict[str, Any] | None = None, **options: Any) -> None:
        def on_failure() -> None:
            self.server.should_exit = True

        self.service = Service(load if callable(load) else lambda: load, on_failure=on_failure, **options)
        self.server = make_server(make_app(self.service, **(app or {})))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def start(self, *, wait: bool = True) -> Client:
        self.server.config.port = 0
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started or (wait and self.service._ready is None):
            assert time.monotonic() < deadline and self.thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        return Client(self.server.servers[0].sockets[0].getsockname()[1])

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server did not end"

    def __enter__(self) -> Client:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def scripted_model(script: Callable[[list[int]], Any], *, folder: Any = TINY, **options: Any) -> Model:
    return Model(ScriptedServerEngine(script, **options), folder)


def chat_body(text: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **body}


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a stream's chunks of one choice add up to, in the form of a whole choice."""
    message: dict[str, Any] = {"role": None, "content": None, "reasoning_content": None, "tool_calls": []}
    reasons, logprobs = [], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            if "role" in delta:
                message["role"] = delta["role"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message[key] or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append(json.loads(json.dumps(call)))
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
            if choice["logprobs"] is not None:
                logprobs += choice["logprobs"]["content"]
    assert len(reasons) == 1, reasons
    return {"message": message, "finish_reason": reasons[0], "logprobs": logprobs}


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a condition; fail where it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
