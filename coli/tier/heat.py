"""How often each expert was chosen, lately and since the last save.

Two questions, two counts.  What the file keeps, and the rate of hits, is of decode alone: a prompt is read once, by
all experts at a time, and says little about what a machine answers in general.  What is hot now is asked of the answer
that is about to be decoded, and there the prompt before it is the best witness: it counts, for a while.  It knows no
device, no slot and no file.
"""

from __future__ import annotations

from array import array

import numpy as np

from coli._core import routing

# Recent counts are halved each time so many tokens were decoded.  That is a long answer or two, and the router's taste
# changes with the subject: what was hot four answers ago should have no say.  It is also enough to tell experts apart:
# with 8 of 256 chosen, one of average heat is counted 32 times by then.
HALF_LIFE_TOKENS = 1024

# A prompt counts as at most so many tokens of evidence: as much as all that `recent` remembers right behind a halving,
# so that a long prompt neither drowns what was decoded since nor has to wait for it.
PROMPT_TOKENS = 1024


class Heat:
    """Counts of a model's experts.

    top_k : experts that a token chooses in a layer.
    start : counts [layer][expert] of earlier runs, or None.  They start as at most HALF_LIFE_TOKENS tokens of evidence,
        keeping their proportions, so that an old file of many tokens does not outvote what is asked now.
    recent : float64 (layers, experts), fading, of decode.
    """

    def __init__(self, layers: int, experts: int, top_k: int, start: np.ndarray | None = None) -> None:
        self.top_k = top_k
        self._n_experts = experts
        self.recent = np.zeros((layers, experts))
        if start is not None and start.any():
            tokens = start.sum(axis=1).max() / top_k
            self.recent += start * min(1.0, HALF_LIFE_TOKENS / tokens)
        self._unsaved = np.zeros((layers, experts))
        self._choices = 0
        self._choices_a_token = top_k * layers
        self._halve_at = HALF_LIFE_TOKENS * self._choices_a_token  # choices
        self._noted = array("i")  # keys
        self._prompt = np.zeros((layers, experts))
        self._prompt_goes_on = False
        self._noted_prompt = array("i")

    @property
    def tokens(self) -> int:
        """Decode tokens counted so far."""
        return self._choices // self._choices_a_token

    @property
    def now(self) -> np.ndarray:
        """What is hot now: decode and the last prompts.  float64 (layers, experts)."""
        tokens = self._prompt.sum(axis=1).max() / self.top_k
        return self.recent + self._prompt * min(1.0, PROMPT_TOKENS / tokens) if tokens else self.recent

    def note(self, layer: int, top_idx: np.ndarray, decoding: bool = True) -> None:
        """Remember what rows chose in a layer, or in several from this one on.  Counted by the next `fold`.

        top_idx : int32 (rows, top_k), or (layers, rows, top_k).   decoding : else the rows are a prompt's.
        """
        routing.add_keys(self._noted if decoding else self._noted_prompt, layer, top_idx, self._n_experts)

    def fold(self) -> array:
        """Count what was noted; the keys (layer * experts + expert) that decode rows chose, one for each choice."""
        if self._noted_prompt:
            self._fold_prompt()
        keys = self._noted
        if not keys:
            return keys
        self._noted = array("i")
        routing.count(keys, self.recent)
        routing.count(keys, self._unsaved)
        self._choices += len(keys)
        self._prompt_goes_on = False
        while self._choices >= self._halve_at:
            self.recent *= 0.5
            self._prompt *= 0.5
            self._halve_at += HALF_LIFE_TOKENS * self._choices_a_token
        return keys

    def _fold_prompt(self) -> None:
        if not self._prompt_goes_on:  # another one: what the earlier ones said fades
            self._prompt *= 0.5
            self._prompt_goes_on = True
        routing.count(self._noted_prompt, self._prompt)
        self._noted_prompt = array("i")

    def take_unsaved(self) -> np.ndarray | None:
        """What was counted since the last call, to be merged into a file; None where that is nothing."""
        if not self._unsaved.any():
            return None
        delta, self._unsaved = self._unsaved, np.zeros_like(self._unsaved)
        return delta

    def give_back(self, delta: np.ndarray) -> None:
        """A save did not happen: its counts wait for the next."""
        self._unsaved += delta
