"""The other end of ``coli chat --url``: a conversation whose model is behind a server's chat endpoint.

Has the interface of `coli.cli.chat.Conversation`.  Speaks what every OpenAI-compatible server speaks; a key is taken
from the environment variable COLI_API_KEY.
"""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any

from coli import settings
from coli.errors import ColiError, RequestError
from coli.text.channels import Delta

_TIMEOUT_S = 60.0  # of silence; a coli server sends signs of life in between


def refuse_loading(args: argparse.Namespace) -> None:
    """What speaks of a model to be loaded has no meaning beside one that a server has loaded."""
    if args.model is not None:
        raise RequestError(f"{args.model} and --url are two to talk with; name one")
    for name in ("place", "devices", "vram", "heat", "threads", "context"):
        if getattr(args, name) is not None:
            flag = settings.BY_NAME[name].flag
            raise RequestError(f"{flag} is about loading a model, which --url does not do; leave it out")
    if args.reprobe:
        raise RequestError("--reprobe is about placing a model, which --url does not do; leave it out")


class RemoteConversation:
    """The messages so far; each turn sends all of them.

    url : of the server, with or without ``/v1``.   sampling : fields of the request; None leaves it to the server.
    """

    def __init__(
        self,
        url: str,
        sampling: dict[str, Any],
        *,
        enable_thinking: bool | None = None,
        preserve_thinking: bool | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(
                f"--url is {url!r}; the address of a server, such as http://127.0.0.1:8080, was expected"
            )
        self._base = url.rstrip("/").removesuffix("/v1")
        self._key = settings.get("api_key")
        self._body = {name: value for name, value in sampling.items() if value not in (None, [])}
        thinking = {"enable_thinking": enable_thinking, "preserve_thinking": preserve_thinking}
        if any(value is not None for value in thinking.values()):
            self._body["chat_template_kwargs"] = {k: v for k, v in thinking.items() if v is not None}
        self._timings: dict[str, Any] | None = None
        self._cut: str | None = None  # the channel in which the last answer was cut off
        self.messages: list[dict[str, Any]] = []

    def check(self) -> str:
        """The name of the served model; an error that says why there is none to talk with."""
        with self._open("/v1/models") as response:
            listed = _json(response.read(), self._base)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ColiError(f"{self._base} serves no model") from None

    def answer(self, text: str) -> Generator[Delta, None, None]:
        """Add a user's message and give the answer as it comes; what came of it joins the history, however it ends."""
        user = {"role": "user", "content": text}
        said: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        body = {**self._body, "messages": [*self.messages, user], "stream": True}
        self._cut, last = None, "content"
        try:
            with self._open("/v1/chat/completions", body) as response:
                for chunk in self._chunks(response):
                    self._timings = chunk.get("timings", self._timings)
                    choice = (chunk.get("choices") or [{}])[0]
                    delta = choice.get("delta") or {}
                    for key, channel in (("reasoning_content", "reasoning"), ("content", "content")):
                        if delta.get(key):
                            last = channel
                            said[key].append(delta[key])
                            yield Delta(channel, delta[key])  # type: ignore[arg-type]
                    if choice.get("finish_reason") == "length":
                        self._cut = last
        except (http.client.HTTPException, OSError) as error:
            raise ColiError(f"{self._base}: the answer broke off ({error})") from None
        finally:
            texts = {key: "".join(pieces) for key, pieces in said.items() if pieces}
            if texts:
                self.messages += [user, {"role": "assistant", "content": "", **texts}]

    def cut_line(self) -> str | None:
        """What cut the last answer off, in words; None where it ended by itself."""
        if self._cut is None:
            return None
        where = "cut off inside the thought" if self._cut == "reasoning" else "cut off"
        limit = self._body.get("max_tokens")
        by = "by the server's limit or the context" if limit is None else f"by --max-tokens {limit} or the context"
        return f"{where} {by}"

    def reset(self, messages: list[dict[str, Any]] | None = None) -> None:
        """Start again, with nothing or with a history."""
        self.messages = messages or []
        self._timings, self._cut = None, None

    def stats(self) -> Iterator[str]:
        """Lines about the last answer and the server."""
        for name, value in (self._timings or {}).items():
            yield f"{name}: {value}"
        with self._open("/coli/stats") as response:
            for name, value in _json(response.read(), self._base).items():
                yield f"{name}: {value}"

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise ColiError(f"{self._base}: {_message(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ColiError(f"{self._base} cannot be reached ({reason}); is coli serve running there?") from None

    def _chunks(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = _json(data, self._base)
            if "error" in chunk:
                raise ColiError(f"{self._base}: {chunk['error'].get('message', chunk['error'])}")
            yield chunk
        raise ColiError(f"{self._base}: the answer broke off; the server may have been ended")


def _json(data: bytes, source: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ColiError(f"{source} does not speak the OpenAI API")
    return value


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"{error.code} {error.reason}"
