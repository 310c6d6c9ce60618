"""A model without weights: an engine whose logits follow a script, and the tiny byte tokenizer's folder.

`ScriptedEngine` has the engine's interface and nothing of its arithmetic.  Its tokens are a pure function of all ids
taken in, so state, reuse and cuts can be tested: a session that took in other ids gives other logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

DATA = Path(__file__).parent / "data"
CASES = DATA / "cases"
FIXTURES = DATA / "fixtures"
TINY = CASES / "tiny_nested"  # bytes are ids 0 to 255, <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258, <think> 259
TINY_SPECIAL = {
    "<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<think>": 259, "</think>": 260, "<tool_call>": 261,
    "</tool_call>": 262,
}  # fmt: skip
VOCAB = 272


def tiny_ids(text: str) -> list[int]:
    """Ids of a text with the tiny byte tokenizer, control tokens included."""
    ids, rest = [], text
    while rest:
        token = next((token for token in TINY_SPECIAL if rest.startswith(token)), rest[0])
        ids += [TINY_SPECIAL[token]] if token in TINY_SPECIAL else list(token.encode())
        rest = rest[len(token) :]
    return ids


class ScriptedSession:
    def __init__(self, engine: ScriptedEngine, ids: Sequence[int] = ()) -> None:
        self._engine = engine
        self.ids = list(ids)

    @property
    def position(self) -> int:
        return len(self.ids)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self._engine.calls.append(("prefill", len(ids)))
        self.ids += [int(i) for i in ids]
        return self._engine.logits_after(self.ids)

    def step(self, token_id: int) -> np.ndarray:
        self._engine.calls.append(("step", token_id))
        self.ids.append(int(token_id))
        return self._engine.logits_after(self.ids)

    def copy(self) -> ScriptedSession:
        return ScriptedSession(self._engine, self.ids)

    def close(self) -> None:
        self.ids = []


class ScriptedEngine:
    """next_logits : all ids so far -> the next id (logits 5 for it, 0 for the others), or the logits themselves."""

    def __init__(
        self,
        next_logits: Callable[[list[int]], int | np.ndarray],
        *,
        vocab_size: int = VOCAB,
        context: int = 4096,
    ) -> None:
        self._next = next_logits
        self.vocab_size = vocab_size
        self.context = context
        self.config = SimpleNamespace(vocab_size=vocab_size, num_hidden_layers=4, eos_token_ids=(258, 256))
        self.calls: list[tuple[str, int]] = []
        self.closed = 0

    def logits_after(self, ids: list[int]) -> np.ndarray:
        following = self._next(ids)
        if isinstance(following, np.ndarray):
            return following
        logits = np.zeros(self.vocab_size, np.float32)
        logits[following] = 5.0
        return logits

    def session(self) -> ScriptedSession:
        return ScriptedSession(self)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return np.stack([self.logits_after(list(ids[: i + 1])) for i in range(len(ids))])

    def stats(self) -> dict:
        return {"isa": "scripted", "threads": 1}

    def close(self) -> None:
        self.closed += 1


def reciting(*answers: Sequence[int]) -> Callable[[list[int]], int]:
    """A script that gives the n-th answer to a prompt with n turns of the assistant (one, if it shows none).

    Past its end an answer goes on with ``<|endoftext|>``.  Where a prompt ended is learnt from the first logits asked
    behind so many openings of an assistant's turn, so each turn of a script has one prompt.
    """
    opening = tiny_ids("<|im_start|>assistant\n")
    begins: dict[int, int] = {}

    def next_id(ids: list[int]) -> int:
        turns = sum(ids[i : i + len(opening)] == opening for i in range(len(ids)))
        done = len(ids) - begins.setdefault(turns, len(ids))
        answer = answers[max(turns - 1, 0)]
        return answer[done] if done < len(answer) else TINY_SPECIAL["<|endoftext|>"]

    return next_id
