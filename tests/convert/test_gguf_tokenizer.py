"""coli/convert/gguf_tokenizer.py: a GGUF vocabulary as a tokenizer.json."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from conftest import FIXTURES

from coli.convert.gguf_config import Metadata, generation_config_of
from coli.convert.gguf_tokenizer import Vocabulary
from coli.errors import ModelError
from coli.text.tokenizer import Tokenizer

SPEC = json.loads((FIXTURES / "tokenizer" / "tokenizer.json").read_text())
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def values(**changes: Any) -> dict[str, Any]:
    """The keys of a file that holds the fixture's tokenizer, and eight rows of padding."""
    tokens = [t for t, _ in sorted(SPEC["model"]["vocab"].items(), key=lambda item: item[1])]
    types = [NORMAL] * len(tokens)
    for added in SPEC["added_tokens"]:
        tokens.append(added["content"])
        types.append(CONTROL if added["special"] else USER_DEFINED)
    made = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": tokens + [f"[PAD{i}]" for i in range(8)],
        "token_type": np.array(types + [UNUSED] * 8, np.int32),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in SPEC["model"]["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"),
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in made.items() if value is not None}


def vocabulary(size: int = 600, **changes: Any) -> Vocabulary:
    return Vocabulary(Metadata(values(**changes), "m.gguf"), size)


def test_ids_without_a_token_stay_without_one():
    """Rows of padding are no tokens: the engine never samples an id at or above the tokenizer's size."""
    made = Tokenizer(vocabulary().tokenizer_json())
    assert made.size == 512 and made.token_id("[PAD512]") is None


def test_added_tokens_keep_ids_between_the_others():
    """An added token in the middle of the vocabulary, and unused ids before it, are where the file has them."""
    given = values()
    tokens, types = given["tokenizer.ggml.tokens"], given["tokenizer.ggml.token_type"]
    order = [*range(100), 512, 510, *range(100, 510), 511]
    made = vocabulary(tokens=[tokens[i] for i in order], token_type=types[order])
    tokenizer = Tokenizer(made.tokenizer_json())
    assert tokenizer.encode("<think>", special=True) == [101] and tokenizer.added["<think>"] == 101
    expected = Tokenizer(json.dumps(SPEC)).encode("In the beginning")
    assert tokenizer.encode("In the beginning") == [order.index(i) for i in expected]


def test_pretokenizers_differ_in_marks_only():
    """qwen2 splits a word at its combining marks, qwen35 counts them with the letters; else they split alike."""

    def pieces(pre: str, text: str) -> list[str]:
        split = tokenizers.Tokenizer.from_str(vocabulary(pre=pre).tokenizer_json()).pre_tokenizer
        return [piece for piece, _ in split.pre_tokenize_str(text)]

    assert len(pieces("qwen35", "नमस्ते")) == 1 < len(pieces("qwen2", "नमस्ते"))
    plain = "It's 12 o'clock,\r\n  isn't it?  "
    assert pieces("qwen35", plain) == pieces("qwen2", plain)


def test_end_of_an_answer_is_what_the_file_names_and_what_the_family_ends_with():
    """A file names one id; llama.cpp knows the others by their texts, and so does the import."""
    made = vocabulary()
    tokens = {t: made.ids[t] for t in made.control}
    metadata = Metadata(
        values(eot_token_id=7) | {"general.sampling.temp": 0.699999988079071, "general.sampling.top_k": 20}, "m"
    )
    assert generation_config_of(metadata, tokens) == {"eos_token_id": [502, 7, 500], "temperature": 0.7, "top_k": 20}
    assert generation_config_of(Metadata({}, "m"), {}) == {}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'; coli reads gpt2"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; coli reads qwen2, qwen35"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": 5}, "tokenizer.ggml.tokens is 5; expected a list of texts"),
        ({"token_type": None}, "tokenizer.ggml.token_type is missing"),
        ({"token_type": np.ones(3, np.int32)}, "520 tokens, but 3 token types"),
        ({"token_type": np.full(520, 6, np.int32)}, "token 0 has type 6; a byte-level BPE tokenizer has only 1"),
        ({"tokens": ["a"] * 520}, "tokens 0 and 1 are both 'a'"),
        ({"merges": ["a"]}, r"tokenizer.ggml.merges\[0\] is 'a'; expected two tokens and a space between"),
        ({"merges": ["a qqq"]}, "its vocabulary makes no tokenizer"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"size": 519}, "520 tokens, but token_embd.weight has 519 rows"),
    ],
)
def test_vocabulary_that_is_wrong_is_refused_in_one_line(changes, expected):
    """The key, what was found and what was expected."""
    with pytest.raises(ModelError, match=expected) as caught:
        vocabulary(**changes).tokenizer_json()
    assert str(caught.value).startswith("m.gguf: ") and str(caught.value).isprintable()


def test_vocabulary_without_a_byte_is_refused():
    """Text with that byte would be lost without a word."""
    tokens = values()["tokenizer.ggml.tokens"]
    tokens[tokens.index("Ā")] = "unlikely"
    with pytest.raises(ModelError, match="m.gguf: the tokenizer of its vocabulary: byte 0x00 has no token"):
        vocabulary(tokens=tokens).tokenizer_json()


def test_named_token_beyond_the_vocabulary_is_refused():
    """An id that no token has."""
    with pytest.raises(ModelError, match="tokenizer.ggml.eos_token_id is 520; there are 520 tokens"):
        vocabulary(eos_token_id=520).tokenizer_config()
