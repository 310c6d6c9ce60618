"""The official client against the demo model and, where the text matters, a scripted one."""

from __future__ import annotations

import json

import openai
import pytest
from scripted import CASES
from server.serving import answering

TOOLS = json.loads((CASES / "streams" / "tool_basic.json").read_text())["tools"]
HELLO = [{"role": "user", "content": "Hello! Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def api(demo):
    with client_of(demo) as client:
        yield client


def test_chat(api):
    """A whole answer: text, usage, reason; the same again for the same seed."""
    ask = dict(model="demo", messages=HELLO, max_completion_tokens=24, seed=5, temperature=0.8)
    first, second = api.chat.completions.create(**ask), api.chat.completions.create(**ask)
    assert first.choices[0].message == second.choices[0].message
    assert first.choices[0].finish_reason in ("stop", "length")
    assert 0 < first.usage.completion_tokens <= 24
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens


def test_chat_streaming(api):
    """The stream adds up to the whole answer, and ends with its usage."""
    ask = dict(model="demo", messages=HELLO, max_tokens=24, temperature=0, extra_body={"enable_thinking": False})
    whole = api.chat.completions.create(**ask)
    chunks = list(api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_reasoning_content(api):
    """The thought is a field of its own; switched off it is absent."""
    ask = dict(model="demo", messages=HELLO, max_tokens=5, temperature=0)
    thinking = api.chat.completions.create(**ask).choices[0].message
    plain = api.chat.completions.create(**ask, reasoning_effort="none").choices[0].message
    assert thinking.reasoning_content and not thinking.content
    assert plain.content and not hasattr(plain, "reasoning_content")


def test_chat_logprobs(api):
    """A log-probability for each token, the alternatives in order, the chosen one first where it is greedy."""
    ask = dict(model="demo", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    content = api.chat.completions.create(**ask).choices[0].logprobs.content
    assert len(content) == 6
    for entry in content:
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    streamed = [e for c in api.chat.completions.create(**ask, stream=True) if c.choices[0].logprobs
                for e in c.choices[0].logprobs.content]  # fmt: skip
    assert streamed == content


def test_chat_tool_calls_streamed(serve):
    """The client's own accumulator makes of the deltas what the whole answer holds."""
    text = (
        "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    server = serve(answering(text))
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    with client_of(server) as api:
        whole = api.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, temperature=0, extra_body=extra)
        with api.chat.completions.stream(
            model="m", messages=HELLO, tools=TOOLS, temperature=0, extra_body=extra
        ) as stream:
            final = stream.get_final_completion()
    for answer in (whole, final):
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        call = choice.message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo", "days": 3})


def test_chat_forced_tool_call_on_the_demo_model(api):
    """A named tool is called, whatever the model would rather say; arguments have the schema's types."""
    tool = {"type": "function", "function": {"name": "set_age", "parameters": {**SCHEMA, "required": ["age", "name"]}}}
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    ask = dict(
        model="demo", messages=HELLO, tools=[tool, other], max_tokens=200, temperature=0, reasoning_effort="none"
    )
    named = {"type": "function", "function": {"name": "set_age"}}
    choice = api.chat.completions.create(**ask, tool_choice=named).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0].function
    assert call.name == "set_age" and isinstance(json.loads(call.arguments)["age"], int)
    other_named = {"type": "function", "function": {"name": "other"}}
    assert (
        api.chat.completions.create(**ask, tool_choice=other_named).choices[0].message.tool_calls[0].function.arguments
        == "{}"
    )
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        api.chat.completions.create(**ask, tool_choice={"type": "function", "function": {"name": "missing"}})


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("effort", ["none", "low"])
def test_chat_structured_output(api, temperature, effort):
    """json_schema: the answer is of the schema at any temperature, also behind a thought."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = api.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_tokens=1500,
        temperature=temperature,
        seed=3,
        response_format=form,
        reasoning_effort=effort,
    ).choices[0]
    assert answer.finish_reason == "stop"
    value = json.loads(answer.message.content)
    assert set(value) == {"name", "age"} and len(value["name"]) <= 12 and 0 <= value["age"] <= 150


def test_chat_json_object_and_bad_schema(api):
    """json_object begins an object; a schema that is none is refused by its field."""
    ask = dict(model="demo", messages=HELLO, max_tokens=8, temperature=0, reasoning_effort="none")
    text = api.chat.completions.create(**ask, response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(**ask, response_format=form)
    assert refused.value.param == "response_format"


def test_completions(api, demo_model):
    """Text and ids are the same prompt; several prompts are several choices; echo puts the prompt in front."""
    text = "It is a truth universally acknowledged,"
    ids = demo_model.tokenizer.encode(text)
    expected = "".join(demo_model.generate(text, max_tokens=8))
    ask = dict(model="demo", max_tokens=8, temperature=0)
    answer = api.completions.create(prompt=[text, text], **ask)
    assert [c.text for c in answer.choices] == [expected, expected] and [c.index for c in answer.choices] == [0, 1]
    assert api.completions.create(prompt=ids, **ask).choices[0].text == expected
    echoed = api.completions.create(prompt=[ids], echo=True, logprobs=2, **ask).choices[0]
    assert echoed.text == text + expected
    streamed = list(api.completions.create(prompt=text, stream=True, echo=True, **ask))
    assert "".join(c.choices[0].text for c in streamed) == text + expected


def test_completions_echo_logprobs_are_the_models_own(api, demo_model):
    """The prompt's log-probabilities are those of teacher-forced logits; the first token has none."""
    import numpy as np

    ids = demo_model.tokenizer.encode("It is a truth universally acknowledged, that a single man " * 4)
    answer = api.completions.create(model="demo", prompt=ids, max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    exact = demo_model.logits(ids)[:, : demo_model.tokenizer.size].astype(np.float64)
    peak = exact.max(axis=1, keepdims=True)
    exact -= peak + np.log(np.exp(exact - peak).sum(axis=1, keepdims=True))
    assert logprobs.token_logprobs[0] is None and len(logprobs.token_logprobs) == len(ids)
    np.testing.assert_allclose(
        logprobs.token_logprobs[1:], [exact[i, token] for i, token in enumerate(ids[1:])], rtol=1e-12
    )
    assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == pytest.approx(exact[:-1].max(axis=1).tolist())
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_errors_are_the_clients_own_classes(api):
    """Status, param and code arrive as the client's exceptions have them."""
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="demo", messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model="demo", input="x")


def test_models(api):
    """The list names the served model, which is also had by its id; another id is an error as OpenAI's."""
    listed = list(api.models.list())
    assert [model.id for model in listed] == ["demo"]
    assert api.models.retrieve("demo") == listed[0]
    for other in ("gpt-4o", "owner/model", "demo/"):
        with pytest.raises(openai.NotFoundError) as missing:
            api.models.retrieve(other)
        error = missing.value
        assert (error.code, error.param, error.type) == ("model_not_found", "model", "invalid_request_error")
        assert other in error.message
