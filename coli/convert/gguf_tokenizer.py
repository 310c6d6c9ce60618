"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json.

llama.cpp keeps of a byte-level BPE tokenizer its tokens, their kinds, its merges, and the name of its pre-tokenizer,
which stands for a pattern.  What it does not keep is the normaliser: that of this family is NFC.
"""

from __future__ import annotations

from coli.config import one_line, shown
from coli.convert.gguf_config import Metadata
from coli.errors import ModelError
from coli.text.tokenizer import Tokenizer

# llama.cpp's token types.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_TYPES = {1: "normal", _CONTROL: "control", _USER_DEFINED: "user-defined", _UNUSED: "unused"}

# What counts with the letters, by the pre-tokenizer's name; else the two patterns are the same.
_LETTERS = {"qwen2": r"\p{L}", "qwen35": r"\p{L}\p{M}"}
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[LETTERS]+|\p{N}| ?[^\sLETTERS\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = {"eos_token": "eos_token_id", "bos_token": "bos_token_id", "pad_token": "padding_token_id"}
_ASCII = frozenset(map(chr, range(0x21, 0x7F)))


class Vocabulary:
    """The tokens of a GGUF file.

    ids : text -> id, without the unused ones: those are never sampled.
    control, added : the texts of control tokens; of these and of user-defined ones.
    """

    def __init__(self, metadata: Metadata, vocab_size: int) -> None:
        """ModelError naming the file and the key: another kind of tokenizer, or lists that do not fit together."""
        self._metadata = metadata
        model, self._pre = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre")
        if model != "gpt2":
            raise metadata.error("tokenizer.ggml.model", model, "coli reads gpt2, byte-level BPE")
        if self._pre not in _LETTERS:
            raise metadata.error("tokenizer.ggml.pre", self._pre, f"coli reads {', '.join(_LETTERS)}")
        self._tokens = metadata.texts("tokenizer.ggml.tokens")
        types = metadata.integers("tokenizer.ggml.token_type")
        if len(types) != len(self._tokens):
            raise ModelError(f"{metadata.source}: {len(self._tokens)} tokens, but {len(types)} token types")
        if len(types) > vocab_size:
            raise ModelError(f"{metadata.source}: {len(types)} tokens, but token_embd.weight has {vocab_size} rows")
        self.ids: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self._tokens, types, strict=True)):
            if kind not in _TYPES:
                raise ModelError(
                    f"{metadata.source}: token {token_id} has type {kind}; a byte-level BPE tokenizer has only "
                    f"{', '.join(f'{number} ({name})' for number, name in _TYPES.items())}"
                )
            if kind != _UNUSED and self.ids.setdefault(token, token_id) != token_id:
                raise ModelError(f"{metadata.source}: tokens {self.ids[token]} and {token_id} are both {shown(token)}")
        self.control = frozenset(token for token, kind in zip(self._tokens, types, strict=True) if kind == _CONTROL)
        self.added = self.control | {t for t, kind in zip(self._tokens, types, strict=True) if kind == _USER_DEFINED}

    @property
    def spells_text(self) -> bool:
        """Whether it is a vocabulary for text at all, and not one made up for benchmarks."""
        return self.ids.keys() >= _ASCII

    def tokenizer_json(self) -> str:
        """The text of tokenizer.json, built and checked by the library.  ModelError where the engine cannot use it."""
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        source, merges = self._metadata.source, self._merges()
        try:
            # The added tokens are in the model's vocabulary too, which keeps their ids wherever these are.
            built = tokenizers.Tokenizer(models.BPE(self.ids, merges))
            pattern = tokenizers.Regex(_PATTERN.replace("LETTERS", _LETTERS[self._pre]))
            built.normalizer = normalizers.NFC()
            built.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(pattern, "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
            built.decoder = decoders.ByteLevel()
            added = sorted(self.added, key=self.ids.__getitem__)
            built.add_tokens([tokenizers.AddedToken(t, special=t in self.control, normalized=False) for t in added])
            spec = built.to_str()
        except BaseException as error:  # the library's panics are no Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelError(f"{source}: its vocabulary makes no tokenizer ({one_line(error)})") from None
        checked = Tokenizer(spec, f"{source}: the tokenizer of its vocabulary")
        for token in added:
            if checked.added.get(token) != self.ids[token]:
                raise ModelError(f"{source}: token {self.ids[token]}, {shown(token)}, cannot be an added token")
        return spec

    def tokenizer_config(self) -> dict[str, str]:
        """tokenizer_config.json: the named tokens, which templates may mention."""
        found = {}
        for name, key in _NAMED.items():
            if f"tokenizer.ggml.{key}" in self._metadata:
                token_id = self._metadata.integer(f"tokenizer.ggml.{key}")
                if not 0 <= token_id < len(self._tokens):
                    raise self._metadata.error(
                        f"tokenizer.ggml.{key}", token_id, f"there are {len(self._tokens)} tokens"
                    )
                found[name] = self._tokens[token_id]
        return found

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for i, merge in enumerate(self._metadata.texts("tokenizer.ggml.merges")):
            left, space, right = merge.partition(" ")
            if not left or not space or not right or " " in right:
                raise self._metadata.error(
                    f"tokenizer.ggml.merges[{i}]", merge, "expected two tokens and a space between"
                )
            merges.append((left, right))
        return merges
