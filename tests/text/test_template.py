"""Chat templates: the checkpoint's own, in a sandbox, with what people typed kept text."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections import Counter

import jinja2.sandbox
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CASES, FIXTURES, TINY

from coli.errors import ModelError, RequestError
from coli.text.template import ChatTemplate, template_sources
from coli.text.tokenizer import Tokenizer

BPE = FIXTURES / "tokenizer"


@pytest.fixture(scope="module")
def bpe() -> ChatTemplate:
    return ChatTemplate.open(BPE, Tokenizer.open(BPE))


@pytest.fixture(scope="module")
def tiny() -> ChatTemplate:
    return ChatTemplate.open(TINY, Tokenizer.open(TINY))


@pytest.fixture(scope="module")
def tokens() -> Tokenizer:
    return Tokenizer.open(TINY)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def messages_of(case: str) -> list[dict]:
    return json.loads((CASES / "requests" / f"{case}.json").read_text())["messages"]


def test_template_fixture_chats_are_exact(bpe):
    """Rendered text and ids equal what transformers made of the same messages and arguments."""
    cases = json.loads((BPE / "chat_cases.json").read_text())
    assert len(cases) == 12
    for case in cases:
        prompt = bpe.render(case["messages"], **case["kwargs"])
        assert prompt.text == case["text"]
        assert prompt.ids == case["ids"]


def test_c30_control_tokens_typed_by_a_user_stay_text(tiny, tokens):
    """C30: 257 three times, 258 twice, 256 never; the text itself is kept, spelt out."""
    prompt = tiny.render(messages_of("special_in_user"))
    count = Counter(prompt.ids)
    assert (count[257], count[258], count[256], count[259]) == (3, 2, 0, 1)
    assert tokens.decode(prompt.ids) == prompt.text
    assert messages_of("special_in_user")[1]["content"] in prompt.text


@pytest.mark.parametrize("role", ["user", "tool"])
def test_tags_typed_by_others_stay_text(tiny, role):
    """<think> and <tool_call> are no control tokens, but a user or a tool cannot put them into the prompt either."""
    ids = tiny.render([{"role": role, "content": "</think> <tool_call>"}], add_generation_prompt=False).ids
    assert not {259, 260, 261, 262} & set(ids)


def test_tags_in_the_models_own_turns_are_tokens(tiny):
    """What the model wrote as tags are the tags again; a control token in its text is still text."""
    ids = tiny.render([user("a"), {"role": "assistant", "content": "<think>x</think><|im_end|>"}, user("b")]).ids
    assert (ids.count(259), ids.count(260), ids.count(258)) == (2, 1, 3)


def test_control_tokens_everywhere_in_a_request_stay_text(bpe):
    """Tool descriptions, arguments, their names, thoughts: none of them can make a control token."""
    bad = "<|im_end|>"
    tools = [
        {"type": "function", "function": {"name": "f", "description": bad, "parameters": {"properties": {bad: {}}}}}
    ]
    call = {"function": {"name": f"f{bad}", "arguments": {bad: bad, "list": [bad, {"deep": bad}]}}}
    messages = [
        {"role": "system", "content": bad},
        user(bad),
        {"role": "assistant", "content": bad, "reasoning_content": bad, "tool_calls": [call]},
        {"role": "tool", "content": bad},
    ]
    prompt = bpe.render(messages, tools=tools)
    clean = bpe.render(
        json.loads(json.dumps(messages).replace(bad, "x")), tools=json.loads(json.dumps(tools).replace(bad, "x"))
    )
    assert prompt.ids.count(502) == clean.ids.count(502) == 4
    assert bpe._tokenizer.decode(prompt.ids) == prompt.text


def test_private_use_characters_in_a_message_survive(tiny, tokens):
    """The stand-ins are private-use characters; a message that holds the very same ones is not changed by that."""
    text = "".join(chr(0x100000 + i) for i in range(40)) + "<|im_end|>"
    prompt = tiny.render([user(text)])
    assert text in prompt.text
    assert tokens.decode(prompt.ids) == prompt.text


def test_template_that_reads_tags_in_a_users_turn_renders_the_same(tokens):
    """Where the template itself looks for a tag in a user's turn, the text is as in a direct rendering."""
    source = (
        "{%- for m in messages -%}{%- if m.content.startswith('<think>') -%}{{ 'tagged' }}{%- endif -%}"
        "{{ '<|im_start|>' + m.content + '<|im_end|>' }}{%- endfor -%}"
    )
    prompt = ChatTemplate(source, tokens).render([user("<think>a<|im_end|>")])
    assert prompt.text == "tagged<|im_start|><think>a<|im_end|><|im_end|>"
    assert (prompt.ids.count(259), prompt.ids.count(258)) == (1, 1)


def test_template_that_reads_control_tokens_refuses_those_that_are_typed(tokens):
    """Where not even control tokens can be told apart, the request is refused and says what to do."""
    template = ChatTemplate(
        "{%- for m in messages -%}{{ m.content | replace('<|im_end|>', '') }}{%- endfor -%}", tokens
    )
    assert template.render([user("a")]).text == "a"
    with pytest.raises(RequestError, match="break the token up"):
        template.render([user("a<|im_end|>")])


LATE_SYSTEM_RAISES = (
    "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}"
)


@pytest.mark.parametrize("case", ["system_late", "two_systems", "developer_role"])
def test_c31_template_that_raises_on_a_late_system_message_never_does(tokens, case):
    """C31: the merged system message is first, so the template has nothing to refuse."""
    text = ChatTemplate(LATE_SYSTEM_RAISES, tokens).render(messages_of(case)).text
    assert text.startswith("<|im_start|>system\n")
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("folder", [TINY, BPE], ids=["tiny", "fixture"])
def test_c33_thinking_arguments_reach_the_template(folder):
    """C33: whatever the two arguments, and a thought there, empty or absent, the text equals a direct rendering."""
    ours = ChatTemplate.open(folder, Tokenizer.open(folder))
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    theirs = environment.from_string(template_sources(folder).text)
    choices = (None, True, False)
    for enable, preserve, thought in itertools.product(choices, choices, ("r", "", None)):
        old = {"role": "assistant", "content": "b"} | ({} if thought is None else {"reasoning_content": thought})
        messages = [user("a"), old, user("c")]
        given = {"enable_thinking": enable, "preserve_thinking": preserve}
        given = {key: value for key, value in given.items() if value is not None}
        prompt = ours.render(messages, **given, variables={"unknown_to_the_template": 1})
        assert prompt.text == theirs.render(messages=messages, tools=None, add_generation_prompt=True, **given)
        assert prompt.thinking == ("closed" if enable is False else "open")


def test_c34_parts_give_the_ids_of_their_text(tiny):
    """C34: the list of parts has the ids of 'first second'."""
    assert tiny.render(messages_of("content_parts")).ids == tiny.render([user("first second")]).ids


def test_c16_template_is_found_in_either_file_and_the_file_wins(tmp_path):
    """C16: chat_template.jinja beats tokenizer_config.json, and a difference can be reported."""
    assert template_sources(TINY).used == "tokenizer_config.json"
    assert template_sources(CASES / "tiny_eos_split").used == "chat_template.jinja"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert template_sources(tmp_path) == ("tokenizer_config.json", "old", False)
    (tmp_path / "chat_template.jinja").write_text("new")
    assert template_sources(tmp_path) == ("chat_template.jinja", "new", True)
    (tmp_path / "chat_template.jinja").write_text("old\n")
    assert not template_sources(tmp_path).differ


def test_c16_without_a_template_chat_is_refused_with_that_reason(tmp_path, tokens):
    """C16: no template: one line that says so and what works."""
    with pytest.raises(ModelError, match="no chat template.*--raw"):
        ChatTemplate.open(tmp_path, tokens)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "rag", "template": "x"}]}')
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate.open(tmp_path, tokens)


def test_template_error_is_a_request_error_in_the_templates_words(tokens):
    """What the template raises reaches the client as it was put."""
    with pytest.raises(RequestError, match="No user query found"):
        ChatTemplate("{{ raise_exception('No user query found') }}", tokens).render([user("a")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ range(10 ** 9) | list }}",
        "{% include 'x' %}",
        "{{ 'x' * 70000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('two\\nlines \\x1b[2J') }}",
    ],
)
def test_template_that_misbehaves_is_contained(tokens, source):
    """The sandbox holds, and whatever goes wrong inside it is a RequestError."""
    with pytest.raises(RequestError, match="chat template") as caught:
        ChatTemplate(source, tokens).render([user("a")])
    assert str(caught.value).isprintable(), "one line"


def test_template_that_is_not_jinja_names_file_and_line(tmp_path, tokens):
    """A damaged template is refused when it is opened."""
    (tmp_path / "chat_template.jinja").write_text("ok\n{% if %}")
    with pytest.raises(ModelError, match=r"chat_template.jinja: line 2"):
        ChatTemplate.open(tmp_path, tokens)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
        "{% if a %}" * 2000 + "{% endif %}" * 2000,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
    ids=["loops", "conditions", "brackets"],
)
def test_template_nested_beyond_what_compiles_is_refused(tokens, source):
    """Neither Jinja's nor Python's compiler takes any depth: that is the template's fault, not a traceback."""
    with pytest.raises(ModelError, match="template.jinja: cannot be compiled"):
        ChatTemplate(source, tokens)


def test_template_of_a_list_is_the_one_named_default(tmp_path):
    """Older files hold several named templates; whatever else stands in the list is passed over."""
    listed = [5, {"name": ["default"]}, {"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert template_sources(tmp_path).text == "a"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed[:3]}))
    assert template_sources(tmp_path).used is None


def test_template_tools_the_way_transformers_gives_them(tokens):
    """tojson does not escape HTML or ASCII, loop controls work, named tokens and the date are there."""
    source = (
        "{%- for t in tools -%}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}{{ t | tojson }}{%- endfor -%}"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, tokens, tokens={"eos_token": "<|im_end|>"})
    tools = [{"name": "f", "description": "é <b> & 'q'"}, {"name": "g"}]
    prompt = template.render([user("a")], tools=tools)
    assert prompt.text == """{"name": "f", "description": "é <b> & 'q'"}<|im_end|>4"""


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_reserved_template_arguments_cannot_be_overwritten(tiny, name):
    """A client's template arguments may not replace the conversation itself."""
    with pytest.raises(RequestError, match=f"{name} cannot be set"):
        tiny.render([user("a")], variables={name: []})


def test_deep_nesting_is_refused(bpe):
    """Arguments nested without end are a RequestError, not a crash."""
    deep: dict = {}
    for _ in range(5000):
        deep = {"x": deep}
    call = {"function": {"name": "f<|im_end|>", "arguments": deep}}
    with pytest.raises(RequestError):
        bpe.render([user("a"), {"role": "assistant", "tool_calls": [call]}])


def _anything():
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.text("a<|>_im_endthink\ud800é ", max_size=12)
        | st.just("<|im_end|>")
    )
    keys = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "x"])
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": _anything()},
            optional={"tool_calls": _anything(), "reasoning_content": _anything(), "name": _anything()},
        ),
        max_size=4,
    ),
    _anything(),
)
def test_any_conversation_renders_or_is_a_request_error(bpe, messages, tools):
    """Whatever a client sends becomes a prompt whose ids are its text, or a RequestError; never anything else."""
    try:
        prompt = bpe.render(messages, tools=tools)
    except RequestError:
        return
    assert bpe._tokenizer.decode(prompt.ids) == unicodedata.normalize("NFC", prompt.text)
