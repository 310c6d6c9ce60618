"""Text to ids and back, by the checkpoint's own ``tokenizer.json``.

Knows byte-level BPE, the only kind this family uses, and refuses any other.  Knows nothing of chat templates, stop
strings or the model.  Invariants: the pieces of a `Detokenizer` joined equal `Tokenizer.decode` of the same ids, no
piece ends inside a character, and text encoded with ``special=False`` never yields an added token.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tokenizers
import tokenizers.decoders
import tokenizers.models

from coli.config import one_line, shown
from coli.errors import ModelError, RequestError


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
# Bytes that occur in UTF-8: with a token for each of them, any text can be encoded.
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
_PROBE = "".join(map(chr, range(0x20, 0x7F))) + "\n\t\r\n é中😀"
_SUBWORD_MARK = re.compile(r'"(?:continuing_subword_prefix|end_of_word_suffix)"\s*:\s*"[^"]')


class Tokenizer:
    """A checkpoint's tokenizer.

    size : one more than the highest id; ids at or above it have no token and must never be sampled.
    added : the added tokens (control tokens, ``<think>`` and its like), text -> id.
    special_ids : those of them that are control tokens and are never shown.
    """

    def __init__(self, spec: str, source: str = "tokenizer.json") -> None:
        """``spec`` is the text of a tokenizer.json; ModelError naming ``source`` when it cannot be used."""
        self._spec = spec
        self._source = source
        self._tokenizer = self._build(spec)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bytes: dict[int, bytes] = {}
        self._check()

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a container folder; ModelError that says so where there is none."""
        path = Path(folder) / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError:
            raise ModelError(
                f"{folder} has no tokenizer.json, so it takes and gives token ids only; use --ids, "
                "or convert a checkpoint that holds its tokenizer files"
            ) from None
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: not UTF-8 at byte {error.start}; take the checkpoint's file again") from None

    def _build(self, spec: str) -> tokenizers.Tokenizer:
        if _SUBWORD_MARK.search(spec):  # the library panics, loudly, on merges that do not fit such a mark
            raise ModelError(f"{self._source}: marks parts of words; only byte-level BPE tokenizers are supported")
        with self._library("not a usable tokenizer"):
            built = tokenizers.Tokenizer.from_str(spec)
        built.no_truncation()  # some uploads carry a training-time truncation: it would cut prompts silently
        built.no_padding()
        return built

    @contextmanager
    def _library(self, what: str) -> Iterator[None]:
        """The library's errors as ours: plain Exceptions for what is wrong in the file, and panics, which are not."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelError(f"{self._source}: {what} ({one_line(error)})") from None

    def _check(self) -> None:
        """Refuse a tokenizer that would lose or change text: the library drops what has no token, and says nothing."""
        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise ModelError(
                f"{self._source}: its decoder is not ByteLevel; only byte-level BPE tokenizers are supported"
            )
        if not isinstance(self._tokenizer.model, tokenizers.models.BPE):
            raise ModelError(f"{self._source}: its model is not BPE; only byte-level BPE tokenizers are supported")
        for char, byte in _BYTE_OF_CHAR.items():
            if byte in _UTF8_BYTES and self._tokenizer.token_to_id(char) is None:
                raise ModelError(f"{self._source}: byte {byte:#04x} has no token, so text with it would be lost")
        found = self.decode(self.encode(_PROBE))
        if found != _PROBE:
            raise ModelError(f"{self._source}: does not give text back: of {shown(_PROBE)} it makes {shown(found)}")

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its added tokens: what spells a control token out as text."""
        return self._build(json.dumps({**json.loads(self._spec), "added_tokens": [], "post_processor": None}))

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text, None if there is none."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text``, with nothing put before or after it.

        special : whether an added token spelt out in the text becomes its id.  False keeps it text, which is right for
            whatever a user typed; True is for text that a template or the caller made whole.
        Raises RequestError for a lone surrogate, which is not text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}", param="prompt"
            ) from None
        ids = self._encode(self._tokenizer, text)
        if not special and not self._added_ids.isdisjoint(ids):
            ids = self._encode(self._plain, text)
        return ids

    def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        with self._library("cannot encode this text"):
            return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ``ids``.  Bytes that are not UTF-8 become U+FFFD; an id without a token adds nothing."""
        kept = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text, empty for an id without a token."""
        cached = self._bytes.get(token_id)
        if cached is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.size else None
            cached = self._bytes[token_id] = b"" if token is None else _token_bytes(token)
        return cached

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh streaming decoder."""
        return Detokenizer(self, skip_special=skip_special)


class Detokenizer:
    """Ids in, text out as soon as it is whole: bytes of an unfinished character wait for the next token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that the model never finished, else nothing."""
        return self._decoder.decode(b"", final=True)


def _token_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token with characters outside the alphabet stands for its own text
        return token.encode()
