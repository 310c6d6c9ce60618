"""What clients of the chat endpoint trip over, streaming and not, on a scripted engine.

Every case ends with a plain request, which the server must still answer.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scripted import CASES, TINY
from server.serving import NO_THINKING, Serving, answering, chat_body, joined, scripted_model, until

CHAT = "/v1/chat/completions"


def case(name: str):
    return json.loads((CASES / "requests" / name).read_text())


def stream_case(name: str):
    return json.loads((CASES / "streams" / name).read_text())


def both(client, body):
    """(message and finish reason of the whole answer, the same of the stream)."""
    answer = client.post(CHAT, body)
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    message = {"content": None, "reasoning_content": None, "tool_calls": [], **choice["message"]}
    whole = {**message, "content": message["content"] or None}, choice["finish_reason"]
    streamed = joined(client.stream(CHAT, body))
    return whole, (streamed["message"], streamed["finish_reason"])


@pytest.fixture(scope="module")
def shared():
    """One server for all tests that need no settings of their own; each gives it a script."""
    model = scripted_model(answering("ok"))
    with Serving(model) as client:
        client.engine = model.engine
        yield client


@pytest.fixture
def client_of(serve, shared):
    """As `serve`; at the end the server must still answer a plain request."""
    clients = []

    def make(script, **options):
        if options:
            clients.append(serve(script, **options))
        else:
            shared.engine._next = script
            clients.append(shared)
        return clients[-1]

    yield make
    for client in clients:
        assert client.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}).status == 200


# ---- C30, C31, C34: what the messages hold ------------------------------------------------------------------


def test_control_tokens_that_a_user_typed_stay_text(client_of):
    """Ids of control tokens occur only where the template put them; the text itself is kept."""
    client = client_of(answering("ok"))
    body = case("special_in_user.json")
    ids = client.post("/tokenize", {"messages": body["messages"]}).json["tokens"]
    assert (ids.count(257), ids.count(258), ids.count(256)) == (3, 2, 0)
    text = client.post("/detokenize", {"tokens": ids}).json["content"]
    assert body["messages"][1]["content"] in text
    assert client.post(CHAT, body).json["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("name", ["system_late.json", "two_systems.json", "developer_role.json"])
def test_system_messages_anywhere_are_merged_into_the_first(client_of, name):
    """System and developer messages, wherever they stand, become one at the front, in order."""
    client = client_of(answering("ok"))
    (whole, _), (streamed, _) = both(client, {**case(name), "temperature": 0, **NO_THINKING})
    assert whole["content"] == streamed["content"] == "ok"
    ids = client.post("/tokenize", {"messages": case(name)["messages"]}).json["tokens"]
    text = client.post("/detokenize", {"tokens": ids}).json["content"]
    assert text.startswith("<|im_start|>system\n") and text.count("<|im_start|>system") == 1


def test_content_parts_make_the_ids_of_the_joined_text(client_of):
    """A list of text parts is the text; another kind of part is refused by its type."""
    client = client_of(answering("ok"))
    parts = client.post("/tokenize", {"messages": case("content_parts.json")["messages"]}).json["tokens"]
    plain = client.post("/tokenize", {"messages": [{"role": "user", "content": "first second"}]}).json["tokens"]
    assert parts == plain
    for stream in (False, True):
        answer = client.post(CHAT, {**case("content_image_part.json"), "stream": stream})
        assert answer.status == 400
        assert "image_url" in answer.json["error"]["message"]


def test_empty_conversation_and_empty_prompt_are_refused(client_of):
    """With nothing to say there is nothing to answer: 400 that names the field."""
    client = client_of(answering("ok"))
    for stream in (False, True):
        assert client.post(CHAT, {"messages": [], "stream": stream}).json["error"]["param"] == "messages"
        for prompt in ("", []):
            answer = client.post("/v1/completions", {"prompt": prompt, "stream": stream})
            assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")


# ---- C32, C33: thinking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", stream_case("think_open_in_prompt.json"), ids=lambda item: item["name"])
def test_thought_opened_in_the_prompt_goes_to_its_channel(client_of, item):
    """reasoning_content and content are as in the case, and no tag is in either."""
    client = client_of(answering("".join(item["pieces"])))
    body = chat_body("2 + 2?", enable_thinking="</think>" not in item["prompt_ends_with"])
    for message, reason in both(client, body):
        assert message.get("reasoning_content") == item["reasoning_content"]
        assert message["content"] == item["content"]
        assert reason == "stop"


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("enable", [False, True])
@pytest.mark.parametrize("thought", ["r", "", None])
def test_template_arguments_reach_the_template(client_of, preserve, enable, thought):
    """The prompt is the direct rendering of the template with the same arguments."""
    client = client_of(answering("ok"))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", **({} if thought is None else {"reasoning_content": thought})},
        {"role": "user", "content": "c"},
    ]
    kwargs = {"preserve_thinking": preserve, "enable_thinking": enable, "of_no_use": [1]}
    ids = client.post("/tokenize", {"messages": messages, "chat_template_kwargs": kwargs}).json["tokens"]
    kept = f"<think>\n{thought}\n</think>\n\n" if preserve and thought else ""
    expected = (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{kept}b<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n" + ("" if enable else "\n</think>\n\n")
    )
    assert client.post("/detokenize", {"tokens": ids}).json["content"] == expected


# ---- C35, C36, C37: fields ----------------------------------------------------------------------------------


def test_null_and_unknown_fields_change_nothing(client_of):
    """Null is absent, a vendor's own field has no effect."""
    client = client_of(answering("ok"))
    body = case("nulls_and_extras.json")
    assert client.post(CHAT, body).status == 200
    assert joined(client.stream(CHAT, body))["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_types_are_refused_by_field(client_of, stream):
    """Each body gets a 400 with OpenAI's error object, whose param names the field."""
    client = client_of(answering("ok"))
    fields = ("max_tokens", "temperature", "messages", "messages[0].content", "messages[0].role", "stop")
    for body, field in zip(case("wrong_types.json"), fields, strict=True):
        answer = client.post(CHAT, {**body, "stream": stream})
        error = answer.json["error"]
        assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", field)
        assert error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("audio", {"voice": "x"}),
        ("guided_json", "{}"),
        ("temprature", 1),
        ("modalities", ["audio"]),
    ],
)
def test_unsupported_and_misspelt_fields_are_refused_by_name(client_of, field, value):
    """What would change the answer and is not to be had is refused, and so is what looks like a slip."""
    client = client_of(answering("ok"))
    answer = client.post(CHAT, chat_body("x", **{field: value}))
    assert (answer.status, answer.json["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("top_p", 2), ("min_p", -0.1), ("top_k", -2), ("presence_penalty", 3),
        ("logit_bias", {"5": 200}), ("logit_bias", {"x": 1}), ("logit_bias", {"99999": 1}), ("n", 0), ("n", 99),
        ("top_logprobs", 30), ("max_tokens", -1), ("seed", 2**70), ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_field(client_of, field, value):
    """C46's error cases, and the API's own: 400, param names the field."""
    client = client_of(answering("ok"))
    answer = client.post(CHAT, chat_body("x", **{field: value}, **({"logprobs": True} if "log" in field else {})))
    assert (answer.status, answer.json["error"]["param"]) == (400, field)


def test_max_completion_tokens_is_a_ceiling(client_of):
    """Three tokens, "length"; of two ceilings the lower holds."""
    client = client_of(answering("0123456789"))
    for extra in ({}, {"max_tokens": 5}):
        body = {**case("max_completion_tokens.json"), "temperature": 0, **extra, **NO_THINKING}
        answer = client.post(CHAT, body).json
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"
        assert joined(client.stream(CHAT, body))["message"]["content"] == "012"


def test_usage_in_a_stream_is_one_last_chunk(client_of):
    """With include_usage one chunk without choices comes last; without it there is none."""
    client = client_of(answering("hello"))
    body = case("stream_usage.json")
    chunks = client.stream(CHAT, body)
    assert [i for i, chunk in enumerate(chunks) if not chunk["choices"]] == [len(chunks) - 1]
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    without = client.stream(CHAT, {**body, "stream_options": None})
    assert all(chunk["choices"] for chunk in without)
    for some in (chunks, without):
        assert len({(c["id"], c["model"], c["object"], c["created"]) for c in some}) == 1
        assert some[0]["choices"][0]["delta"]["role"] == "assistant"
        joined(some)  # holds that there is one finish reason


# ---- C38, C39: prompts and bodies that cannot be ------------------------------------------------------------


def test_prompt_longer_than_the_context_is_refused_before_any_event(client_of):
    """400, context_length_exceeded, both numbers; a prompt that leaves little room gets that much; a full one, 0."""
    client = client_of(lambda ids: ord("x"), context=64)
    overhead = client.post("/tokenize", {"messages": [{"role": "user", "content": ""}]}).json["count"]
    for stream in (False, True):
        answer = client.post(CHAT, chat_body("x" * (100 - overhead), stream=stream))
        error = answer.json["error"]
        assert (answer.status, error["code"]) == (400, "context_length_exceeded")
        assert "100" in error["message"] and "64" in error["message"]
    for length, tokens in ((60, 4), (64, 0)):
        answer = client.post(CHAT, chat_body("x" * (length - overhead), max_tokens=50)).json
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (length, tokens)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert joined(client.stream(CHAT, chat_body("x" * (length - overhead))))["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["bad_colon.txt", "bad_empty.txt", "bad_array.txt", "bad_cut.txt"])
def test_bodies_that_are_no_json_object_are_refused(client_of, name):
    """400 and a JSON error object, whatever was sent."""
    client = client_of(answering("ok"))
    answer = client.post(CHAT, (CASES / "requests" / name).read_bytes())
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert answer.json["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"messages":' + b'[{"a":' * 50_000, b"\xff\xfe", b'{"stop": "\\ud800"}']
)
def test_hostile_bodies_are_refused(client_of, body):
    """Deep nesting, bytes that are no UTF-8 and lone surrogates are 400s, not failures."""
    client = client_of(answering("ok"))
    assert client.post(CHAT, body).status == 400


def test_wrong_method_and_unknown_path_are_json_errors(client_of):
    """405 and 404 with the API's error object."""
    client = client_of(answering("ok"))
    for answer, status in ((client.get(CHAT), 405), (client.get("/nowhere"), 404), (client.post("/x/../etc", {}), 404)):
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
        assert answer.json["error"]["message"]


# ---- C41, C42: pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", stream_case("utf8_split.json"), ids=lambda item: item["name"])
def test_characters_split_over_tokens_arrive_whole(client_of, item):
    """No delta holds a broken character, and none is lost at the end."""
    client = client_of(answering(b"".join(bytes.fromhex(piece) for piece in item["pieces"])))
    (whole, _), (streamed, _) = both(client, chat_body("x", **NO_THINKING))
    assert whole["content"] == streamed["content"] == item["text"]
    if "no_delta_may_contain" in item:
        for chunk in client.stream(CHAT, chat_body("x", **NO_THINKING)):
            assert item["no_delta_may_contain"] not in chunk["choices"][0]["delta"].get("content", "")


@pytest.mark.parametrize("item", stream_case("stop_split.json"), ids=lambda item: item["name"])
def test_stop_strings_over_token_borders_end_the_answer(client_of, item):
    """Text and finish reason are the case's; the stream's text is the whole's."""
    text = "".join(item["pieces"])
    client = client_of(answering(text))
    limit = {"max_tokens": len(text)} if item["finish_reason"] == "length" else {}
    for message, reason in both(client, chat_body("x", stop=item["stop"], **limit, **NO_THINKING)):
        assert (message["content"], reason) == (item["text"], item["finish_reason"])


# ---- C43, C44: tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", stream_case("tool_basic.json")["cases"], ids=lambda item: item["name"])
def test_tool_calls_become_tool_calls(client_of, item):
    """Names, typed arguments, content and reason are the case's; an id a call; the stream adds up to the same."""
    client = client_of(answering(item["text"]))
    tools = {} if item.get("no_tools") else {"tools": stream_case("tool_basic.json")["tools"]}
    for message, reason in both(client, chat_body("x", **tools, **NO_THINKING)):
        calls = message["tool_calls"]
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
            (c["name"], c["arguments"]) for c in item["tool_calls"]
        ]
        assert len({c["id"] for c in calls}) == len(calls)
        assert all(c["type"] == "function" for c in calls)
        assert message["content"] == item.get("content")
        assert reason == item["finish_reason"]


@pytest.mark.parametrize("text", stream_case("tool_drift.json")["texts"])
def test_drifting_tool_syntax_is_no_error(client_of, text):
    """A repaired call or the raw text; the finish reason says which."""
    client = client_of(answering(text))
    for message, reason in both(client, chat_body("x", tools=stream_case("tool_drift.json")["tools"], **NO_THINKING)):
        assert (reason == "tool_calls") == bool(message["tool_calls"])
        assert message["tool_calls"] or message["content"]


def test_one_call_alone_where_parallel_calls_are_off(client_of):
    """parallel_tool_calls false ends the answer behind its first call."""
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>\n"
    client = client_of(answering(call.format("Oslo") + call.format("Rome") + "x" * 2000))
    body = chat_body("x", tools=stream_case("tool_basic.json")["tools"], parallel_tool_calls=False, **NO_THINKING)
    for message, reason in both(client, body):
        assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [{"city": "Oslo"}]
        assert reason == "tool_calls"
    until(lambda: client.stats()["running"] == 0)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_call_that_the_limit_cuts_off_is_left_out(client_of, choice):
    """At whatever token it is cut, no markup is text, the text before it is, and the reason is the limit."""
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    lead = "" if choice == "required" else "Let me look.\n"
    client = client_of(answering(f"{lead}{call}\n{call}"))
    ids = len(client.post("/tokenize", {"content": lead + call}).json["tokens"])
    tools = stream_case("tool_basic.json")["tools"]
    for limit in range(ids - 60 if lead else 1, ids + 12):
        body = chat_body("x", tools=tools, tool_choice=choice, max_tokens=limit, **NO_THINKING)
        whole, streamed = both(client, body)
        for message, reason in (whole, streamed):
            assert reason == "length"
            markup = (message["content"] or "").partition("<")[2]
            assert "tool".startswith(markup) and len(markup) < 4, "no more of a tag than text has too"
            assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] in ([], [{"city": "Oslo"}])
        assert whole[0]["content"] == streamed[0]["content"]
        assert len(whole[0]["tool_calls"]) == len(streamed[0]["tool_calls"]) >= (limit >= ids)


@pytest.mark.parametrize(
    "text, kept",
    [
        ("a\n<div", "a\n<div"),
        ("if a <", "if a <"),
        ("<tool_call> is the tag of calls", "<tool_call> is the tag of calls"),
        ("hi\n<func", "hi"),
        ("hi\n<tool_call>\n<fun", "hi"),
        ("hi\n<tool_call>", "hi"),
    ],
)
def test_text_that_the_limit_cuts_off_stays_text(client_of, text, kept):
    """A tag that is no call's, or is spoken of, is kept where the answer is cut inside it or behind it."""
    client = client_of(answering(text))
    ids = len(client.post("/tokenize", {"content": text}).json["tokens"])
    body = chat_body("x", tools=stream_case("tool_basic.json")["tools"], max_tokens=ids, **NO_THINKING)
    for message, reason in both(client, body):
        assert (message["content"], reason) == (kept, "length")


def test_tool_choice_none_offers_no_tools(client_of):
    """What looks like a call is text where no call is wanted."""
    item = stream_case("tool_basic.json")["cases"][0]
    client = client_of(answering(item["text"]))
    body = chat_body("x", tools=stream_case("tool_basic.json")["tools"], tool_choice="none", **NO_THINKING)
    for message, reason in both(client, body):
        assert (message["content"], message["tool_calls"], reason) == (item["text"], [], "stop")


# ---- C28: a model that breaks -------------------------------------------------------------------------------


def test_nan_logits_are_an_error_not_text(client_of, caplog):
    """500 with an error object; in a stream an error event, then the end; the log says at which token."""
    good = answering("abcdef")

    def script(ids):
        token = good(ids)
        return np.full(272, np.nan, np.float32) if token == ord("c") and ids[-1] == ord("b") and 33 in ids else token

    client = client_of(script)
    for _ in range(2):
        answer = client.post(CHAT, chat_body("!", **NO_THINKING))
        assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
        assert "token 3" in answer.json["error"]["message"]
        chunks = client.stream(CHAT, chat_body("!", **NO_THINKING))
        assert chunks[-1]["error"]["type"] == "server_error"
    assert any("token 3" in record.getMessage() for record in caplog.records)
    assert client.chat("x", **NO_THINKING)["choices"][0]["message"]["content"] == "abcdef"


# ---- C16: models that lack something ------------------------------------------------------------------------


def test_model_without_template_or_tokenizer_answers_what_it_can(client_of, tmp_path):
    """Chat is refused with the reason, completion works; without a tokenizer ids go in and come out."""
    folder = tmp_path / "bare"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    client = client_of(lambda ids: ord("y") if len(ids) < 6 else 256, folder=folder)
    for stream in (False, True):
        refused = client.post(CHAT, chat_body("x", stream=stream))
        assert (refused.status, refused.json["error"]["code"]) == (400, "not_offered_by_model")
        assert "chat template" in refused.json["error"]["message"]
    assert client.post("/v1/completions", {"prompt": "abc", "temperature": 0}).json["choices"][0]["text"] == "yyy"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    client = client_of(lambda ids: ord("y") if len(ids) < 6 else 256, folder=folder)
    for path, body in (
        ("/v1/completions", {"prompt": "abc"}), (CHAT, chat_body("x")), ("/tokenize", {"content": "abc"}),
        ("/v1/completions", {"prompt": [1], "response_format": {"type": "json_object"}}),
    ):  # fmt: skip
        refused = client.post(path, body)
        message = refused.json["error"]["message"]
        assert (refused.status, refused.json["error"]["code"]) == (400, "not_offered_by_model")
        assert "tokenizer" in message and 'ids in "prompt"' in message and "--" not in message
    answer = client.post("/v1/completions", {"prompt": [1, 2, 3], "temperature": 0, "echo": True}).json["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("1,2,3,121,121,121", "stop")


@pytest.mark.parametrize("item", json.loads((CASES / "sampler" / "edges.json").read_text())["cases"], ids=str)
def test_sampling_edges_that_are_errors_are_400(shared, item):
    """C46 through the API: what the sampler must refuse, the server refuses."""
    answer = shared.post(CHAT, chat_body("x", max_tokens=1, **item["params"]))
    assert answer.status == (400 if item.get("error") else 200), answer.body
