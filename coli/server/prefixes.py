"""States of earlier prompts, kept so that a prompt that begins alike need not be computed again.

A recurrent state cannot be rewound, so a state is of use only to a prompt that begins with exactly the ids that it took
in, and goes on for at least one more.  Whoever computes prompts leaves states behind at places where later prompts
branch; `find` gives the longest that fits.  Invariants: the bytes of what is kept never exceed the budget; a kept state
is never stepped (`find`'s callers copy it), so an answer that starts from one has the bits of a cold run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from coli.engine.session import Session


class PrefixCache:
    """Sessions by the ids they took in, the least recently used dropped first.

    budget_bytes : of recurrent states and K/V together; 0 keeps nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self._held: OrderedDict[bytes, tuple[Session, int]] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._found = self._missed = self._dropped = 0

    def find(self, prompt: np.ndarray) -> Session | None:
        """The session that holds the longest strict beginning of a prompt, int32 (n,); to be copied, not stepped."""
        ids = prompt.tobytes()
        for length in sorted(self._lengths, reverse=True):
            key = ids[: 4 * length]
            if length < len(prompt) and key in self._held:
                self._held.move_to_end(key)
                self._found += 1
                return self._held[key][0]
        self._missed += 1
        return None

    def keep(self, session: Session) -> None:
        """Take over a session that nobody steps any more."""
        key = np.asarray(session.ids, np.int32).tobytes()
        if not key:
            return
        if key in self._held:
            self._held.move_to_end(key)
            return
        n_bytes = session.size_bytes
        if n_bytes > self.budget_bytes:
            return
        while self.held_bytes + n_bytes > self.budget_bytes:
            dropped, (_, freed) = self._held.popitem(last=False)
            self._forget(len(dropped) // 4, freed)
        self._held[key] = session, n_bytes
        self._lengths[len(key) // 4] += 1
        self.held_bytes += n_bytes

    def _forget(self, length: int, n_bytes: int) -> None:
        self.held_bytes -= n_bytes
        self._dropped += 1
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def stats(self) -> dict[str, Any]:
        """States and bytes that are kept; prompts that found one or none; states dropped for room."""
        return {
            "states": len(self._held),
            "bytes": self.held_bytes,
            "budget_bytes": self.budget_bytes,
            "found": self._found,
            "missed": self._missed,
            "dropped": self._dropped,
        }
