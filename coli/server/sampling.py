"""Samplers that a server needs besides the plain one: of the prompt's own ids, and within a grammar.

Both are `coli.engine.sampler.Sampler`: the order of its steps and the meaning of every parameter stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from coli.engine.sampler import Sample, Sampler, SamplingParams

if TYPE_CHECKING:
    from coli.server.grammar import Constraint


class PromptScorer(Sampler):
    """Log-probabilities of ids that stand there already.   size, top : as in `Sampler` and ``logprobs``."""

    def __init__(self, *, size: int, top: int) -> None:
        super().__init__(SamplingParams(logprobs=top), size=size)

    def score(self, logits: np.ndarray, token_id: int) -> Sample:
        """What the model thought of ``token_id``, from the float32 logits (vocab_size,) before it."""
        return self._with_logprobs(token_id, logits[: max(self._size, token_id + 1)])


class ConstrainedSampler(Sampler):
    """A sampler whose ids stay within a grammar: others have probability 0 before temperature and filters see them.

    Reported log-probabilities stay the model's own.
    """

    def __init__(
        self, params: SamplingParams, *, size: int, prompt_ids: Iterable[int] = (), constraint: Constraint
    ) -> None:
        super().__init__(params, size=size, prompt_ids=prompt_ids)
        self._constraint = constraint

    def sample(self, logits: np.ndarray) -> Sample:
        sample = super().sample(logits)
        self._constraint.take(sample.id)
        return sample

    def _adjust(self, logits: np.ndarray) -> np.ndarray:
        logits = super()._adjust(logits)
        allowed = self._constraint.allowed(len(logits))
        return logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
