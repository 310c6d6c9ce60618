"""Reasoning and content apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CASES

from coli.text.thinking import ThinkingSplitter, thinking_of_prompt


def split(pieces: list[str], thinking: str) -> tuple[str, str]:
    splitter = ThinkingSplitter(thinking)
    out = {"reasoning": "", "content": ""}
    for channel, text in [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish():
        assert text, "an empty piece was given"
        out[channel] += text
    return out["reasoning"], out["content"]


def test_c32_thought_whose_opening_tag_was_in_the_prompt():
    """C32: reasoning and content as in the file, no tag in either, whole and one character at a time."""
    for case in json.loads((CASES / "streams" / "think_open_in_prompt.json").read_text()):
        thinking = thinking_of_prompt(case["prompt_ends_with"])
        whole = "".join(case["pieces"])
        for pieces in (case["pieces"], [whole], list(whole)):
            assert split(pieces, thinking) == (case["reasoning_content"] or "", case["content"])


def test_thinking_of_prompt_reads_its_end_only():
    """What a prompt ends in decides; tags further up belong to old turns."""
    assert thinking_of_prompt("<|im_start|>assistant\n<think>\n") == "open"
    assert thinking_of_prompt("<think>\n\n</think>\n\n") == "closed"
    assert thinking_of_prompt("<think>old</think><|im_start|>assistant\n") == "unset"


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("unset", "<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
        ("unset", "\n <think>hm</think>yes", ("hm", "yes")),
        ("unset", "a <think>b</think>", ("", "a <think>b</think>")),
        ("unset", " <thin", ("", " <thin")),
        ("closed", "<think>hm</think>yes", ("", "<think>hm</think>yes")),
        ("open", "</think>\n\nyes", ("", "yes")),
        ("open", "cut in the\n\nthought\n", ("cut in the\n\nthought\n", "")),
        ("open", "a</thin", ("a</thin", "")),
        ("open", "a </thinking> b\n</think>c</think>", ("a </thinking> b", "c</think>")),
        ("open", "\n\na\n\nb\n\n</think>\n\n", ("a\n\nb", "")),
    ],
)
def test_thinking_splitter_keeps_everything_but_tags_and_their_newlines(thinking, text, expected):
    """Tags and the newlines beside them go; every other character stays, also of what only looks like a tag."""
    assert split([text], thinking) == expected
    assert split(list(text), thinking) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", "a", " ", "</thi"]), max_size=12),
    st.sampled_from(["open", "closed", "unset"]),
    st.data(),
)
def test_thinking_splitter_does_not_depend_on_the_cut(parts, thinking, data):
    """However the text is cut, the channels are the same."""
    text = "".join(parts)
    at = data.draw(st.integers(0, len(text)))
    assert split([text[:at], text[at:]], thinking) == split([text], thinking) == split(list(text), thinking)
