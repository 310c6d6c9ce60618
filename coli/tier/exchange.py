"""What is to be exchanged: swaps that were chosen and wait for their turn, and how many of them may set out now.

Decides and counts; it uploads nothing and changes no table.  A swap waits with its victim still resident: the victim
leaves when the newcomer's upload really starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coli.tier.figures import Figures
from coli.tier.heat import Heat
from coli.tier.promotion import (
    Promotion,
    choose_swaps,
    most_saved_s,
    save_up,
    uploads_before_first_token,
    uploads_now,
)
from coli.tier.residency import Residency

_FIRST_ANSWER_TOKENS = 64.0  # what the first answer is taken for; those after it for a mean of the last few
_ANSWERS = 4

Swap = tuple[int, int | None]  # newcomer, victim; no victim where a slot is free


class Exchange:
    """The swaps of all devices.

    home : int8 by key, the device that each expert is at home on; the tier's, read here.
    policy : may be changed between two tokens.   figures : what things take, told as it happens.
    """

    def __init__(self, heat: Heat, residency: Residency, home: np.ndarray, policy: Promotion) -> None:
        self.policy = policy
        self.figures = Figures()
        self._heat = heat
        self._residency = residency
        self._home = home
        self._waiting: list[list[Swap]] = [[] for _ in residency.tables]  # of each device, the best last
        self._looked_at = 0
        self._saved_s = 0.0
        self._prompt_is_new = False
        self._prompt_s = 0.0
        self._answer_tokens = _FIRST_ANSWER_TOKENS
        self._answer_began_at = 0

    # ---- as it happens -------------------------------------------------------------------------------------

    def saw_prompt(self) -> None:
        """Rows of a prompt were noted."""
        if not self._prompt_is_new:
            self._prompt_is_new = True
            self._prompt_s = 0.0
            decoded = self._heat.tokens - self._answer_began_at
            if decoded:
                self._answer_tokens += (decoded - self._answer_tokens) / _ANSWERS
        self._answer_began_at = self._heat.tokens

    def took_in(self, seconds: float) -> None:
        """A step over a prompt's rows took so long."""
        self._prompt_s += seconds

    def decoded(self, seconds: float, choices: int, misses: int, copying: bool, n_uploaded: int) -> None:
        """A decode step has ended; as in `Figures.stepped`."""
        figures = self.figures
        figures.stepped(seconds, choices, misses, copying, n_uploaded)
        self._saved_s = save_up(self._saved_s, figures.step_s, figures.stall_s, self.policy)

    # ---- what is to be done --------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether it is time for another `look`: some tokens on, or at the first token behind a prompt."""
        return self._prompt_is_new or self._heat.tokens - self._looked_at >= self.policy.every_tokens

    def look(self, devices: Sequence[int]) -> None:
        """Choose anew, for these devices; what waited for its turn is forgotten."""
        policy = self.policy
        limit = policy.max_swaps_of_prompt if self._prompt_is_new else policy.max_swaps
        self._looked_at, self._prompt_is_new = self._heat.tokens, False
        heat = self._heat.now.reshape(-1)
        for device, waiting in enumerate(self._waiting):
            waiting.clear()
            if device in devices:
                at_home = np.flatnonzero(self._home == device)
                candidates = at_home[~self._residency.is_resident(at_home)]
                table = self._residency.tables[device]
                waiting += choose_swaps(heat, table.residents(), candidates, table.n_free, policy, limit)[::-1]

    def look_soon(self) -> None:
        """Slots have come or gone: look at the next token."""
        self._looked_at = -self.policy.every_tokens

    def allowed(self) -> int:
        """Uploads that may start now beside the decode."""
        if not any(self._waiting):
            return 0
        figures, policy = self.figures, self.policy
        if math.isinf(policy.max_slowdown):
            return uploads_now(math.inf, math.inf, figures.stall_s)
        most_s = most_saved_s(figures.step_s or 0.0, figures.stall_s, policy)
        return uploads_now(self._saved_s, most_s, figures.stall_s)

    def started(self, n: int) -> None:
        """So many of them have."""
        if n:
            self._saved_s = max(0.0, self._saved_s - n * (self.figures.stall_s or self._saved_s))

    def take(self, device: int) -> Swap | None:
        """The best swap that waits for a device and still holds, or None.  Its victim must leave, or a slot is free."""
        waiting, residency = self._waiting[device], self._residency
        while waiting:
            newcomer, victim = waiting.pop()
            if self._home[newcomer] != device or residency.is_resident(newcomer):
                continue
            if residency.tables[device].n_free if victim is None else residency.device_of(victim) == device:
                return newcomer, victim
        return None

    def worth_waiting_for(self) -> int:
        """How many swaps, the best of all devices, the first token behind the prompt may wait for."""
        figures = self.figures
        measured = (figures.step_s, figures.upload_s, figures.stall_s, figures.miss_s)
        if None in measured or math.isinf(self.policy.max_slowdown):
            return 0  # nothing is known, so nothing is risked; without a limit nobody has to wait
        step_s, upload_s, stall_s, miss_s = measured
        heat = self._heat.now
        p = np.minimum(1.0, self._heat.top_k * heat / np.maximum(heat.sum(axis=1, keepdims=True), 1.0)).reshape(-1)
        gains = sorted(
            (p[new] - (0.0 if old is None else p[old]) for waiting in self._waiting for new, old in waiting),
            reverse=True,
        )
        return uploads_before_first_token(
            gains, step_s=step_s, upload_s=upload_s, stall_s=stall_s, miss_s=miss_s, tokens=self._answer_tokens,
            wait_s=self.policy.max_wait * self._prompt_s, policy=self.policy,
        )  # fmt: skip
