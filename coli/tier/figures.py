"""What a decode step, an upload and a miss take on this machine, measured as they happen.

Nothing is measured for its own sake: the engine says how long each step took, the uploader how long each copy.  The
means forget, since contexts grow, batches change and other programs come and go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_MEMORY = 16  # steps or uploads that a mean remembers
_FIRST_STEPS = 4  # quiet steps before others are compared with their mean
_WILD = 4.0  # a step that took so many times the mean was held up by something that is not the copies
_WORST = 2.0  # uploads that one takes from a step at most: it cannot hold the decode up for much longer than it lasts

# Before any was seen, an upload is taken to hold the decode up for as long as it lasts, and that is believed like so
# many measured ones: a step's time varies by more than an upload takes (by 10 % of 59 ms beside 0.17 ms on two shared
# cores), so it takes hundreds to tell.  Never less than a quarter of it, for the same reason.
_PRIOR_UPLOADS = 32
_LEAST_STALL = 0.25
_MOST_UPLOADS = 1024  # evidence is halved beyond, so that a change is seen

_MISS_STEPS = 64  # steps that the slope of time over misses remembers
_MISS_LEAST = 32


@dataclass
class _Mean:
    n: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        self.n = min(self.n + 1, _MEMORY)
        self.value += (value - self.value) / self.n


@dataclass
class _Quiet:
    """Steps of one number of choices without uploads: their seconds, and the misses in the same ones."""

    seconds: _Mean = field(default_factory=_Mean)
    misses: _Mean = field(default_factory=_Mean)

    def add(self, seconds: float, misses: int) -> None:
        self.seconds.add(seconds)
        self.misses.add(misses)


class Figures:
    """Seconds of a decode step, of an upload, of what an upload takes from the decode, and of a miss."""

    def __init__(self) -> None:
        self._step = _Mean()
        self._upload = _Mean()
        self._quiet: dict[int, _Quiet] = {}  # by their choices: a batch is another step
        self._excess_s = 0.0
        self._uploads_seen = 0.0
        self._n = 0  # of the slope: steps, means, and the moments about them
        self._misses = self._seconds = 0.0
        self._var_misses = self._var_seconds = self._cov = 0.0

    def uploaded(self, seconds: float) -> None:
        """An upload took so long, from its first byte to the expert on the device."""
        self._upload.add(seconds)

    def stepped(self, seconds: float, choices: int, misses: int, copying: bool, n_uploaded: int) -> None:
        """A decode step.

        choices : experts chosen in it, all rows and layers.   misses : those that the CPU computed.
        copying : uploads were under way when it began; n_uploaded of them ended in it.
        """
        if self._step.n >= _FIRST_STEPS:
            seconds = min(seconds, _WILD * self._step.value)
        self._step.add(seconds)
        quiet = self._quiet.setdefault(choices, _Quiet())
        if not copying:
            quiet.add(seconds, misses)
            self._regress(seconds, misses)
        elif quiet.seconds.n >= _FIRST_STEPS:
            # what more or fewer misses take is no upload's; and one step that was off must not speak for a hundred
            expected_s = quiet.seconds.value + (self.miss_s or 0.0) * (misses - quiet.misses.value)
            most_s = _WORST * self._upload.value * max(n_uploaded, 1)
            self._excess_s += min(max(seconds - expected_s, -most_s), most_s)
            self._uploads_seen += n_uploaded
            if self._uploads_seen > _MOST_UPLOADS:
                self._excess_s, self._uploads_seen = self._excess_s / 2, self._uploads_seen / 2

    def _regress(self, seconds: float, misses: int) -> None:
        self._n = min(self._n + 1, _MISS_STEPS)
        share = 1 / self._n
        off_misses, off_seconds = misses - self._misses, seconds - self._seconds
        self._misses += share * off_misses
        self._seconds += share * off_seconds
        keep = 1 - share
        self._var_misses = keep * (self._var_misses + share * off_misses * off_misses)
        self._var_seconds = keep * (self._var_seconds + share * off_seconds * off_seconds)
        self._cov = keep * (self._cov + share * off_misses * off_seconds)

    @property
    def step_s(self) -> float | None:
        """Of a decode step; None before the first."""
        return self._step.value if self._step.n else None

    @property
    def upload_s(self) -> float | None:
        """Of one expert's upload; None before the first."""
        return self._upload.value if self._upload.n else None

    @property
    def stall_s(self) -> float | None:
        """What one upload adds to the decode beside it; None before the first upload."""
        if not self._upload.n:
            return None
        seen = _PRIOR_UPLOADS * self._upload.value + self._excess_s
        return max(_LEAST_STALL * self._upload.value, seen / (_PRIOR_UPLOADS + self._uploads_seen))

    @property
    def miss_s(self) -> float | None:
        """What a decode step takes longer for each expert that is not on a device: the slope of its seconds over its
        misses, less one standard error, between nothing and all of the step.  None where the steps do not tell."""
        if self._n < _MISS_LEAST or self._var_misses < 0.5:
            return None
        slope = self._cov / self._var_misses
        unexplained = max(0.0, self._var_seconds - slope * self._cov)
        error = math.sqrt(unexplained / (self._n * self._var_misses))
        return min(max(0.0, slope - error), self._seconds / max(self._misses, 1.0))

    def to_dict(self) -> dict[str, float | None]:
        """All four, by name without the unit."""
        return {"step": self.step_s, "upload": self.upload_s, "stall": self.stall_s, "miss": self.miss_s}
