"""Text to ids and back."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from scripted import CASES, FIXTURES, TINY

import coli
from coli.errors import ModelError, RequestError
from coli.text.tokenizer import Detokenizer, Tokenizer

BPE = FIXTURES / "tokenizer"
DEMO = Path(coli.__file__).parent / "data" / "demo"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.open(BPE)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.open(TINY)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.feed(i) for i in ids] + [detokenizer.finish()]


def test_tokenizer_fixture_cases_are_exact(bpe):
    """Ids and text equal the recorded ones of the reference library, with and without control tokens."""
    for case in json.loads((BPE / "tokenizer_cases.json").read_text()):
        assert bpe.encode(case["text"], special=True) == case["ids"]
        assert bpe.decode(case["ids"]) == case["decoded"]
        assert bpe.decode(case["ids"], skip_special=True) == case["decoded_skip_special"]


def test_tokenizer_size_is_one_past_the_highest_id(bpe, tiny):
    """The size bounds what may be sampled: the added tokens count, gaps do not."""
    assert (bpe.size, tiny.size) == (512, 272)


@pytest.mark.parametrize("folder", [BPE, TINY, DEMO], ids=["bpe", "bytes", "demo"])
def test_c29_encoding_equals_the_reference_library(folder):
    """C29: ids equal those of the tokenizers library for every odd string, and decoding gives the text back."""
    ours = Tokenizer.open(folder)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    strings = json.loads((CASES / "tok" / "pretok_strings.json").read_text())
    strings.append((CASES.parent.parent / "reference.py").read_text()[:10_000])
    for text in strings:
        ids = ours.encode(text, special=True)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        normal = unicodedata.normalize("NFC", text) if folder != TINY else text
        assert ours.decode(ids) == normal
        assert ours.decode(ours.encode(text)) == normal


def test_c30_control_tokens_in_plain_text_stay_text(bpe):
    """Text that is not special never yields an added token, and decodes to itself."""
    text = "a<|im_end|>\n<think>b</think><|im_start|>system<tool_call>"
    ids = bpe.encode(text)
    assert not set(ids) & set(bpe.added.values())
    assert bpe.decode(ids) == text
    assert bpe.encode("plain") == bpe.encode("plain", special=True)


@pytest.mark.parametrize("folder", [TINY, BPE, DEMO], ids=["bytes", "bpe", "demo"])
def test_tokenizer_every_unicode_block_round_trips(folder):
    """A prompt of every printable character of every block comes back as it was (in NFC for an NFC tokenizer)."""
    tokenizer = Tokenizer.open(folder)
    printable = [chr(i) for i in range(0x20, 0x110000) if unicodedata.category(chr(i)) not in ("Cs", "Cn", "Cc")]
    assert len(printable) > 280_000
    for start in range(0, len(printable), 4096):
        if folder == TINY:
            text = expected = "".join(printable[start : start + 4096])
        else:  # apart from each other: the order of marks in a row is another in other Unicode versions
            text = " ".join(printable[start : start + 4096])
            expected = unicodedata.normalize("NFC", text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == expected
        if start % (4 * 4096) == 0:  # a loop in Python: of every fourth part
            assert "".join(stream(tokenizer.detokenizer(), ids)) == expected


def test_c41_detokenizer_characters_split_over_tokens_come_whole(tiny):
    """C41: joined pieces equal the text, and no piece holds U+FFFD unless the model produced that character."""
    for case in json.loads((CASES / "streams" / "utf8_split.json").read_text()):
        detokenizer = tiny.detokenizer()
        pieces = []
        for piece in case["pieces"]:
            pieces.append("".join(detokenizer.feed(byte) for byte in bytes.fromhex(piece)))
        pieces.append(detokenizer.finish())
        assert "".join(pieces) == case["text"]
        if "no_delta_may_contain" in case:
            assert not any(case["no_delta_may_contain"] in piece for piece in pieces)


@pytest.mark.parametrize("skip_special", [False, True])
def test_detokenizer_of_random_ids_equals_decoding_them_at_once(bpe, skip_special):
    """For any ids, valid UTF-8 or not, the joined pieces are what decoding the whole gives, here and in the library."""
    rng = random.Random(5)
    for _ in range(400):
        ids = [rng.randrange(bpe.size) for _ in range(rng.randrange(40))]
        joined = "".join(stream(bpe.detokenizer(skip_special=skip_special), ids))
        assert joined == bpe.decode(ids, skip_special=skip_special)
        assert joined == bpe._tokenizer.decode(ids, skip_special_tokens=skip_special)


def test_detokenizer_unfinished_character_at_the_end_is_not_lost(tiny):
    """A character that the model never finished shows as U+FFFD, once, at the end."""
    assert stream(tiny.detokenizer(), list("a😀".encode())[:-1]) == ["a", "", "", "", "\ufffd"]


def test_detokenizer_hides_control_tokens_only(tiny):
    """Control tokens make no text; <think> and </think>, added but not special, do."""
    assert stream(tiny.detokenizer(), [257, 259, 97, 260, 258]) == ["", "<think>", "a", "</think>", "", ""]


def test_detokenizer_ids_without_a_token_add_nothing(tiny):
    """Padding rows of the vocabulary have no token: should one ever come, it is no text and no crash."""
    assert "".join(stream(tiny.detokenizer(), [97, 5000, 98, -1])) == "ab"


def test_encode_lone_surrogate_is_a_request_error(tiny):
    """What is no Unicode text is refused with its place, not with a traceback."""
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tiny.encode("ab\ud800")


def test_open_without_a_tokenizer_says_so(tmp_path):
    """A container without tokenizer files refuses text in one line that names the folder and the way out."""
    with pytest.raises(ModelError, match=r"no tokenizer.json.*--ids"):
        Tokenizer.open(tmp_path)


def test_open_damaged_tokenizers_are_model_errors(tmp_path):
    """Cut, foreign and odd files: each a ModelError that names the file."""
    path = tmp_path / "tokenizer.json"
    good = (TINY / "tokenizer.json").read_text()
    word_piece = json.dumps({**json.loads(good), "decoder": {"type": "Metaspace", "replacement": "_", "split": True}})
    marked = good.replace('"continuing_subword_prefix": null', '"continuing_subword_prefix": "##"')
    assert marked != good
    unigram = json.dumps({**json.loads(good), "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}})
    for bad in (
        good[:-100], "", "[]", "{}", '{"model": 5}', word_piece, good.replace('"BPE"', '"Mystery"'), marked, unigram,
    ):  # fmt: skip
        path.write_text(bad)
        with pytest.raises(ModelError, match="tokenizer.json"):
            Tokenizer.open(tmp_path)
    path.write_bytes(b"\xff\xfe" + good.encode("utf-16-le"))
    with pytest.raises(ModelError, match="not UTF-8 at byte 0"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda spec: spec["model"]["vocab"].pop("Ã"), "byte 0xc3 has no token"),
        (lambda spec: spec.update(normalizer={"type": "Lowercase"}), "does not give text back"),
        (lambda spec: spec.update(pre_tokenizer=None), "does not give text back"),
    ],
)
def test_open_a_tokenizer_that_loses_text_is_refused(tmp_path, change, expected):
    """The library drops what has no token and says nothing: such a tokenizer is refused when it is opened."""
    spec = json.loads((TINY / "tokenizer.json").read_text())
    change(spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelError, match=f"tokenizer.json: {expected}"):
        Tokenizer.open(tmp_path)


def test_open_ignores_a_stored_truncation(tmp_path):
    """A truncation that an upload kept from training must not cut prompts silently."""
    spec = json.loads((TINY / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert len(Tokenizer.open(tmp_path).encode("0123456789")) == 10
