"""From logits to one id.

The order of the steps, which is a part of what a parameter means:

1. Ids without a token (at or above the tokenizer's size) are left out.  Logits that are not finite are an error.
2. ``logit_bias`` is added.
3. ``repetition_penalty`` divides positive logits, and multiplies negative ones, of ids in the prompt or the answer.
4. ``presence_penalty`` is subtracted once, ``frequency_penalty`` once per occurrence, for ids in the answer.
5. ``temperature`` 0 takes the largest logit, the lowest id of equal ones, and ends here; else logits are divided by it.
6. ``top_k`` keeps the k largest, the lower ids of equal ones; 0 and -1 keep all.
7. ``top_p`` keeps the fewest most probable ids whose probabilities, among those left, reach p; always one.
8. ``min_p`` keeps ids at least that fraction as probable as the most probable one; always one.
9. One of what is left is drawn, by its probability.

The n-th draw of a seed is a pure function of seed and n (the Philox generator, keyed by the seed, at counter n), and
probabilities are float64, so that the same seed gives the same text on machines whose exponentials differ in the last
bit of a float32.  Reported log-probabilities are the model's own: those after step 1.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from coli.errors import ModelError, RequestError

MAX_LOGPROBS = 20  # as in the chat API
_RANGES = {  # smallest and largest value; the penalties' and the bias's are those of the chat API
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.1, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_BIAS_RANGE = (-100.0, 100.0)
_NUCLEUS_START = 1024  # candidates sorted first for top_p over a whole vocabulary; nearly always enough


@dataclass(frozen=True)
class SamplingParams:
    """How the next id is chosen; see the module for the meaning and order of each.

    seed : any 64-bit value, signed or unsigned; None draws one.
    logprobs : None for no log-probabilities, else how many alternatives come with each id (0 to 20).
    Raises RequestError naming the parameter, its value and its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (smallest, largest) in _RANGES.items():
            _check_number(name, getattr(self, name), smallest, largest)
        _check_integer("top_k", self.top_k, -1, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {self.logit_bias!r:.80}; a mapping of ids was expected", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias (an id)", token_id, 0, None, "logit_bias")
            _check_number("logit_bias", bias, *_BIAS_RANGE)


class Sample(NamedTuple):
    """A chosen id; with log-probabilities where they were asked for.

    top : the most probable ids and their log-probabilities, most probable first, the lower id of equal ones first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the ids of one answer, one after the other.

    size : ids below it may be sampled (the tokenizer's size, or the vocabulary's without a tokenizer).
    prompt_ids : what ``repetition_penalty`` counts besides the answer.
    seed : the seed in use, also where none was given.
    """

    def __init__(self, params: SamplingParams, *, size: int, prompt_ids: Iterable[int] = ()) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else int(params.seed) & (1 << 64) - 1
        self._size = size
        self._drawn = 0
        outside = [token_id for token_id in params.logit_bias if token_id >= size]
        if outside:
            raise RequestError(
                f"logit_bias names id {outside[0]}; this model's ids end at {size - 1}", param="logit_bias"
            )
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
        self._penalises = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._repeats = params.repetition_penalty != 1
        self._counts = np.zeros(size if self._penalises else 0, np.float32)
        self._seen = np.zeros(size if self._repeats else 0, bool)
        if self._repeats:
            ids = np.fromiter(prompt_ids, np.int64)
            self._seen[ids[ids < size]] = True

    def sample(self, logits: np.ndarray) -> Sample:
        """The next id from float32 logits (vocab_size,).  Raises ModelError naming the token if one is not finite."""
        self._drawn += 1
        if not np.isfinite(logits).all():
            bad = int(np.flatnonzero(~np.isfinite(logits))[0])
            raise ModelError(
                f"token {self._drawn} of the answer: the model's logit of id {bad} is {logits[bad]}; "
                "the weights or their conversion are damaged (coli inspect --verify)"
            )
        allowed = logits[: self._size]
        chosen = self._choose(self._adjust(allowed))
        if self._penalises:
            self._counts[chosen] += 1
        if self._repeats:
            self._seen[chosen] = True
        return Sample(chosen) if self.params.logprobs is None else self._with_logprobs(chosen, allowed)

    def _adjust(self, logits: np.ndarray) -> np.ndarray:
        """Steps 2 to 4, in float64: a penalty of ten times the largest float32 is still a number."""
        if not (self._bias_ids.size or self._repeats or self._penalises):
            return logits
        p = self.params
        logits = logits.astype(np.float64)
        logits[self._bias_ids] += self._bias
        if self._repeats:
            seen = logits[self._seen]
            logits[self._seen] = np.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        if self._penalises:
            logits -= p.presence_penalty * (self._counts > 0)
            logits -= p.frequency_penalty * self._counts
        return logits

    def _choose(self, logits: np.ndarray) -> int:
        """Steps 5 to 9."""
        p = self.params
        if p.temperature == 0:
            return int(logits.argmax())
        ids = largest(logits, p.top_k) if 0 < p.top_k < len(logits) else None  # None: all of them
        probs = (logits if ids is None else logits[ids]).astype(np.float64)
        probs -= probs.max()
        with np.errstate(over="ignore"):  # minus infinity is right for what is far below the best
            probs /= p.temperature
        np.exp(probs, out=probs)  # of the most probable: exactly 1
        if p.top_p < 1:
            inside = _nucleus(probs, p.top_p)
            ids, probs = inside if ids is None else ids[inside], probs[inside]
        if p.min_p > 0:
            inside = np.flatnonzero(probs >= p.min_p)
            ids, probs = inside if ids is None else ids[inside], probs[inside]
        cumulative = probs.cumsum()  # a plain running sum, the same on every machine; numpy's sum() is not
        place = int(np.searchsorted(cumulative, self._uniform() * cumulative[-1], side="right"))
        place = min(place, len(probs) - 1)
        return place if ids is None else int(ids[place])

    def _uniform(self) -> float:
        """The draw of this token: 53 random bits, in [0, 1)."""
        raw = np.random.Philox(key=self.seed, counter=self._drawn).random_raw()
        return (raw >> 11) * 2.0**-53

    def _with_logprobs(self, chosen: int, logits: np.ndarray) -> Sample:
        exact = logits.astype(np.float64)
        log_total = exact.max() + math.log(np.exp(exact - exact.max()).sum())
        best = largest(logits, min(self.params.logprobs or 0, len(logits)))
        best = best[np.argsort(-exact[best], kind="stable")]
        top = tuple((int(i), float(exact[i] - log_total)) for i in best)
        return Sample(chosen, float(exact[chosen] - log_total), top)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indexes of the ``count`` largest values in ascending order; of equal values the lower indexes."""
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Ascending indexes of the fewest largest probabilities that make ``top_p`` of the sum; at least one."""
    needed = top_p * probs.cumsum()[-1]
    count = min(_NUCLEUS_START, len(probs))
    while True:
        candidates = largest(probs, count)
        order = candidates[np.argsort(-probs[candidates], kind="stable")]
        mass = probs[order].cumsum()
        if mass[-1] >= needed or count == len(probs):
            return np.sort(order[: int(np.searchsorted(mass, needed)) + 1])
        count = min(count * 8, len(probs))


def _check_number(name: str, value: Any, smallest: float, largest_value: float) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not smallest <= value <= largest_value:
        raise RequestError(
            f"{name} is {value!r:.80}; a number from {smallest:g} to {largest_value:g} was expected", param=name
        )


def _check_integer(name: str, value: Any, smallest: int, largest_value: int | None, param: str | None = None) -> None:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < smallest or (largest_value is not None and value > largest_value):
        upper = "or more" if largest_value is None else f"to {largest_value}"
        raise RequestError(f"{name} is {value!r:.80}; a whole number, {smallest} {upper}, was expected", param or name)
