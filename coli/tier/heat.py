"""How often each expert was chosen, lately and since the last save.

Counts are of decode: a prompt is read once and its routing says little about the answer's.  What is recent decides who
is resident, so counts fade; what was counted since the last save goes to the file, where other runs add to it too.
It knows no device, no slot and no file.
"""

from __future__ import annotations

import numpy as np

# Recent counts are halved each time so many tokens were decoded.  That is a long answer or two, and the router's taste
# changes with the subject: what was hot four answers ago should have no say.  It is also enough to tell experts apart:
# with 8 of 256 chosen, one of average heat is counted 32 times by then.
HALF_LIFE_TOKENS = 1024


class Heat:
    """Counts of a model's experts.

    top_k : experts that a token chooses in a layer.
    start : counts [layer][expert] of earlier runs, or None.  They start as at most HALF_LIFE_TOKENS tokens of evidence,
        keeping their proportions, so that an old file of many tokens does not outvote what is asked now.
    recent : float64 (layers, experts), fading.
    """

    def __init__(self, layers: int, experts: int, top_k: int, start: np.ndarray | None = None) -> None:
        self.top_k = top_k
        self.recent = np.zeros((layers, experts))
        if start is not None and start.any():
            tokens = start.sum(axis=1).max() / top_k
            self.recent += start * min(1.0, HALF_LIFE_TOKENS / tokens)
        self._unsaved = np.zeros((layers, experts))
        self._choices = 0
        self._next_halving = HALF_LIFE_TOKENS
        self._noted: list[np.ndarray] = []

    @property
    def tokens(self) -> int:
        """Decode tokens counted so far."""
        return self._choices // (self.top_k * len(self.recent))

    def note(self, layer: int, top_idx: np.ndarray) -> None:
        """Remember what decode rows chose in a layer: top_idx int (rows, top_k).  Counted by the next `fold`."""
        # the sum is a copy: top_idx is a buffer that the next layer overwrites
        self._noted.append(top_idx.reshape(-1) + layer * self.recent.shape[1])

    def fold(self) -> np.ndarray:
        """Count what was noted; the keys (layer * experts + expert) of it, one for each choice."""
        if not self._noted:
            return np.empty(0, np.int64)
        keys = np.concatenate(self._noted)
        self._noted.clear()
        np.add.at(self.recent.reshape(-1), keys, 1.0)  # not += : rows of one layer may have chosen the same expert
        np.add.at(self._unsaved.reshape(-1), keys, 1.0)
        self._choices += len(keys)
        while self.tokens >= self._next_halving:
            self.recent *= 0.5
            self._next_halving += HALF_LIFE_TOKENS
        return keys

    def take_unsaved(self) -> np.ndarray | None:
        """What was counted since the last call, to be merged into a file; None where that is nothing."""
        if not self._unsaved.any():
            return None
        delta, self._unsaved = self._unsaved, np.zeros_like(self._unsaved)
        return delta

    def give_back(self, delta: np.ndarray) -> None:
        """A save did not happen: its counts wait for the next."""
        self._unsaved += delta
