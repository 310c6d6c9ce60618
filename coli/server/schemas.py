"""What a request may hold: one struct an endpoint, and what becomes of fields that are in none.

A field that is null counts as absent.  A known field that this server does not have is refused by name, because to
ignore it would change what the client gets; a field that changes nothing of an answer is taken and has no effect; a
misspelt one is refused with the name it resembles.  A name that nobody knows is logged once and has no effect: clients
send fields of their vendors to everybody.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import msgspec

from coli.errors import RequestError
from coli.log import logger

Request = TypeVar("Request", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Answering(msgspec.Struct, kw_only=True):
    """Fields that both ways to an answer share; ranges are checked by `coli.engine.sampler.SamplingParams`."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None


class ChatRequest(_Answering, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Answering, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Text, or a conversation as the chat endpoint would render it.

    parse_special : whether a control token spelt out in the text is that token (it is, unless false).
    add_special, add_special_tokens : of no effect, since tokenizers of this family put nothing around a text.
    """

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


# What clients send along that is about their account or their vendor's bookkeeping, not about the answer.
NO_EFFECT = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "cache_prompt",
    }
)  # fmt: skip

# Known to other servers or to the API, and not to this one.  The text says what to do instead.
UNSUPPORTED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "this model writes text only",
    "prediction": "leave it out",
    "web_search_options": "leave it out",
    "verbosity": "say it in a message",
    "suffix": "leave it out",
    "best_of": "use n",
    "use_beam_search": "leave it out",
    "min_tokens": "leave it out",
    "ignore_eos": "leave it out",
    "stop_token_ids": "use stop",
    "typical_p": "use top_p or min_p",
    "tfs_z": "use top_p or min_p",
    "mirostat": "use temperature",
    "dry_multiplier": "use repetition_penalty",
    "xtc_probability": "use min_p",
    "grammar": "use response_format",
    "json_schema": "use response_format",
    "guided_json": "use response_format",
    "guided_regex": "use response_format",
    "guided_grammar": "use response_format",
    "guided_choice": "use response_format",
    "structured_outputs": "use response_format",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "prompt_embeds": "send ids or text",
    "documents": "put them into a message",
    "add_generation_prompt": "leave it out",
    "continue_final_message": "leave it out",
    "truncate_prompt_tokens": "shorten the prompt",
}

_PLACE = re.compile(r" - at `\$?\.?(.*)`$")
_MAX_LOGGED = 100
_logged: set[str] = set()


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body; RequestError where it is none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON ({error})", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    return value


def parse(kind: type[Request], body: bytes) -> Request:
    """A request of one kind.  Raises RequestError whose ``param`` names the field."""
    value = {name: item for name, item in decode(body).items() if item is not None}
    known = kind.__struct_fields__
    for name, item in value.items():
        if name not in known:
            _check_extra(name, item, known)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        text = str(error)
        place = _PLACE.search(text)
        missing = re.search(r"required field `(\w+)`", text)
        param = missing[1] if missing else place[1] if place else None
        what = text[: place.start()] if place else text
        raise RequestError(f"{param or 'the body'}: {what[:1].lower()}{what[1:]}", param=param) from None


def _check_extra(name: str, value: Any, known: tuple[str, ...]) -> None:
    if name in NO_EFFECT:
        return
    if name == "modalities" and value == ["text"]:
        return
    if name in UNSUPPORTED or name == "modalities":
        if value in (False, 0, 1, "", [], {}):  # what switches it off
            return
        hint = UNSUPPORTED.get(name, "this model writes text only")
        raise RequestError(f"{name} is not supported here; {hint}", param=name, code="unsupported_parameter")
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if nearest:
        raise RequestError(f"{name} is no field of this request; the nearest is {nearest[0]}", param=name)
    if name not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(name)
        logger("serve").info("the field %.60r of a request is unknown and has no effect", name)
