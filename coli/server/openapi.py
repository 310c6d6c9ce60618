"""The OpenAPI document, made from the structs that requests are checked against."""

from __future__ import annotations

from typing import Any

import msgspec

import coli
from coli.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_POSTS = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", True),
    "/v1/completions": (CompletionRequest, "Continue a prompt", True),
    "/tokenize": (TokenizeRequest, "Ids of a text or of a rendered conversation", False),
    "/detokenize": (DetokenizeRequest, "Text of ids", False),
}
_GETS = {
    "/v1/models": "The served model, in a list",
    "/v1/models/{model}": "The served model by its id",
    "/health": "Whether the model is loaded",
    "/tokenizer_info": "Named tokens and the chat template",
    "/coli/plan": "What lies where, and why",
    "/coli/stats": "What runs where, and what it did",
}
_STATUSES = {
    "400": "the request is at fault; param names the field",
    "401": "no key, or a wrong one",
    "403": "host or origin not allowed",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "429": "the queue is full; Retry-After says when to come back",
    "503": "the model is still loading, or the server is stopping",
}


def document() -> dict[str, Any]:
    """The document, as OpenAPI 3.1."""
    structs = [kind for kind, _, _ in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    paths: dict[str, Any] = {}
    for (path, (_, summary, streams)), schema in zip(_POSTS.items(), schemas, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "done", "content": content}, **_errors()},
            }
        }
    for path, summary in _GETS.items():
        content = {"application/json": {"schema": {"type": "object"}}}
        paths[path] = {
            "get": {"summary": summary, "responses": {"200": {"description": "done", "content": content}, **_errors()}}
        }
    one_model = paths["/v1/models/{model}"]["get"]
    one_model["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    one_model["responses"]["404"] = _error("no model of this id is served")
    paths["/metrics"] = {
        "get": {
            "summary": "Counters for Prometheus",
            "responses": {
                "200": {"description": "done", "content": {"text/plain": {"schema": {"type": "string"}}}},
                **_errors(),
            },
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "coli", "version": coli.__version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _errors() -> dict[str, Any]:
    return {status: _error(text) for status, text in _STATUSES.items()}


def _error(description: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": description, "content": content}
