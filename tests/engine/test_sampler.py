"""From logits to one id."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CASES

from coli.engine.sampler import Sampler, SamplingParams, _nucleus, largest
from coli.errors import ModelError, RequestError

EDGES = json.loads((CASES / "sampler" / "edges.json").read_text())
LOGITS = np.array(EDGES["logits"], np.float32)


def draw(logits: np.ndarray = LOGITS, *, size: int | None = None, **params) -> int:
    return Sampler(SamplingParams(**params), size=len(logits) if size is None else size).sample(logits).id


def draws(logits: np.ndarray = LOGITS, n: int = 400, **params) -> set[int]:
    return {draw(logits, seed=seed, **params) for seed in range(n)}


@pytest.mark.parametrize("case", EDGES["cases"], ids=lambda case: json.dumps(case["params"]))
def test_c46_edges_of_the_parameters(case):
    """C46: over seeds 0 to 199 exactly the allowed ids occur; what is out of range is refused."""
    if case.get("error"):
        with pytest.raises(RequestError):
            draw(**case["params"])
    else:
        assert draws(n=200, **case["params"]) == set(case["allowed"])


def test_greedy_takes_the_lowest_id_of_equal_logits():
    """Ties go to the lower id, with -0 equal to +0."""
    assert draw(np.array([0, 2, 2, 1], np.float32)) == 1
    assert draw(np.array([-1, -0.0, 0.0], np.float32)) == 1


def test_same_seed_gives_the_same_ids_and_another_seed_others():
    """A seed is all there is to a text; every draw of it is new."""
    logits = np.zeros(1000, np.float32)

    def ids(seed):
        sampler = Sampler(SamplingParams(temperature=1, seed=seed), size=1000)
        return [sampler.sample(logits).id for _ in range(20)]

    assert ids(7) == ids(7)
    assert len({tuple(ids(seed)) for seed in (0, 1, 7, 1 << 63, (1 << 64) - 2, -(1 << 63) + 1)}) == 6
    assert len(set(ids(7))) > 15
    assert ids(-1) == ids((1 << 64) - 1), "a signed and an unsigned value with the same 64 bits"
    assert ids(None) != ids(None)


def test_draws_of_a_seed_are_recorded():
    """The mapping from seed to ids is a promise: these were drawn when it was made."""
    sampler = Sampler(SamplingParams(temperature=1, seed=42), size=1000)
    assert [sampler.sample(np.zeros(1000, np.float32)).id for _ in range(5)] == [368, 876, 66, 986, 967]


def test_frequencies_follow_the_probabilities():
    """Over many draws each id comes as often as softmax says, within five standard deviations."""
    n = 4000
    sampler = Sampler(SamplingParams(temperature=0.7, seed=3), size=5)
    counts = np.bincount([sampler.sample(LOGITS).id for _ in range(n)], minlength=5)
    p = np.exp(LOGITS / 0.7) / np.exp(LOGITS / 0.7).sum()
    assert (np.abs(counts - n * p) < 5 * np.sqrt(n * p * (1 - p))).all()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 9.0, "top_p": 0.9}]
)
def test_ids_without_a_token_are_never_sampled(params):
    """Padding rows may have the largest logits: an id at or above the tokenizer's size never comes."""
    logits = np.array([0, 1, 0, 50, 60], np.float32)
    assert draws(logits, size=3, **params) <= {0, 1, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_c28_logits_that_are_not_finite_are_an_error_that_names_the_token(bad, params):
    """C28: never '!!!!': the third token's broken logits are an error that says so."""
    sampler = Sampler(SamplingParams(**params), size=5)
    sampler.sample(LOGITS)
    sampler.sample(LOGITS)
    broken = LOGITS.copy()
    broken[2] = bad
    with pytest.raises(ModelError, match="token 3 of the answer: .* of id 2 is"):
        sampler.sample(broken)


def test_logit_bias_is_added_before_everything():
    """A bias can force and forbid an id."""
    assert draw(logit_bias={4: 100}) == 4
    assert draws(temperature=1.0, logit_bias={1: -100, 3: -100.0}) == {0, 2, 4}


def test_repetition_penalty_counts_prompt_and_answer():
    """Positive logits of seen ids are divided, negative ones multiplied; the prompt's ids count."""
    logits = np.array([3, 2.9, -1.0, -1.05], np.float32)
    params = SamplingParams(repetition_penalty=1.1, logit_bias={})
    sampler = Sampler(params, size=4, prompt_ids=[0, 99])
    assert [sampler.sample(logits).id for _ in range(3)] == [1, 0, 0]
    negative = logits[2:]
    assert Sampler(params, size=2, prompt_ids=[0]).sample(negative).id == 1


def test_presence_and_frequency_penalties_count_the_answer_only():
    """Presence is subtracted once, frequency for each occurrence; the prompt does not count."""
    logits = np.array([3, 2.5, 1.5], np.float32)
    presence = Sampler(SamplingParams(presence_penalty=1.0), size=3, prompt_ids=[1, 1])
    assert [presence.sample(logits).id for _ in range(4)] == [0, 1, 0, 0]
    frequency = Sampler(SamplingParams(frequency_penalty=0.75), size=3, prompt_ids=[0, 0])
    assert [frequency.sample(logits).id for _ in range(5)] == [0, 1, 0, 1, 0]


def test_penalties_come_before_temperature_and_filters():
    """top_k 1 after a penalty keeps the id that the penalty left on top."""
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=1, presence_penalty=2.0, seed=1), size=5)
    assert [sampler.sample(LOGITS).id for _ in range(2)] == [1, 3]


def test_filters_see_what_the_one_before_left():
    """top_p is of the mass that top_k left: of two equal ids among ten, 0.5 of the pair is one id."""
    logits = np.zeros(10, np.float32)
    assert draws(logits, temperature=1.0, top_k=2) == {0, 1}
    assert draws(logits, temperature=1.0, top_k=2, top_p=0.5) == {0}
    assert draws(logits, temperature=1.0, top_p=0.5) == {0, 1, 2, 3, 4}


def test_temperature_far_down_is_greedy_and_never_breaks():
    """The smallest positive temperature divides to nothing but the best id."""
    assert draws(temperature=5e-324, n=20) == {1}
    assert draws(np.array([3e38, -3e38, 0], np.float32), temperature=1e-30, n=20) == {0}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=9),
    st.fixed_dictionaries({
        "temperature": st.sampled_from([0, 5e-324, 0.7, 1e6]),
        "top_k": st.integers(-1, 9),
        "top_p": st.sampled_from([0.0, 0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.1, 1.0, 10.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, 1), st.sampled_from([-100.0, 100.0])),
        "logprobs": st.sampled_from([None, 0, 5]),
        "seed": st.integers(-(1 << 63), (1 << 64) - 1),
    }),
)  # fmt: skip
def test_any_finite_logits_and_parameters_give_an_id(logits, params):
    """Up to the largest float32, penalised tenfold: an id of those there are, finite log-probabilities, no warning."""
    array = np.array(logits, np.float32)
    sampler = Sampler(SamplingParams(**params), size=len(array), prompt_ids=[0, 1])
    with np.errstate(all="raise", under="ignore"):
        for _ in range(3):
            adjusted = sampler._adjust(array)
            sample = sampler.sample(array)
            assert 0 <= sample.id < len(array)
            assert sample.logprob is None or math.isfinite(sample.logprob)
            if params["temperature"] == 0 or params["top_k"] == 1:
                assert adjusted[sample.id] == adjusted.max()


def test_logprobs_are_the_models_own():
    """Log-probabilities are of the distribution before bias and temperature, best first, lower ids first on ties."""
    sampler = Sampler(SamplingParams(temperature=0.1, logit_bias={0: 100}, logprobs=3), size=5)
    sample = sampler.sample(LOGITS)
    exact = LOGITS - math.log(sum(math.exp(x) for x in LOGITS.astype(float)))
    assert sample.id == 0
    assert sample.logprob == pytest.approx(exact[0], abs=1e-6)
    assert [i for i, _ in sample.top] == [1, 3, 2]
    assert [p for _, p in sample.top] == pytest.approx(exact[[1, 3, 2]], abs=1e-6)
    tied = Sampler(SamplingParams(logprobs=2), size=4).sample(np.zeros(4, np.float32))
    assert [i for i, _ in tied.top] == [0, 1]
    none = Sampler(SamplingParams(logprobs=0), size=5).sample(LOGITS)
    assert (none.top, none.logprob) == ((), pytest.approx(exact[1], abs=1e-6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", True), ("top_k", -2), ("top_k", 1.5), ("top_k", "5"), ("top_p", 1.1), ("top_p", -0.1),
        ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3), ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1), ("seed", 1.0), ("logprobs", 21), ("logprobs", -1), ("logit_bias", [1]),
        ("logit_bias", {1: 101}), ("logit_bias", {-1: 0}), ("logit_bias", {"1": 0}), ("logit_bias", {1: math.nan}),
    ],
)  # fmt: skip
def test_parameter_out_of_range_is_named(name, value):
    """Each bad value is a RequestError that names the parameter and the value."""
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_logit_bias_of_an_id_that_does_not_exist_is_refused():
    """Nothing is accepted and then ignored."""
    with pytest.raises(RequestError, match="id 5; this model's ids end at 4"):
        draw(logit_bias={5: 1})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.125, 0.25, 1.0]), min_size=1, max_size=40), st.data())
def test_largest_equals_a_stable_sort(values, data):
    """The k largest, the lower index of equal ones, for any ties."""
    array = np.array(values)
    k = data.draw(st.integers(0, len(values)))
    expected = np.sort(np.argsort(-array, kind="stable")[:k])
    assert largest(array, k).tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.125, 0.25, 1.0]), min_size=1, max_size=40),
    st.sampled_from([0, 0.25, 0.5, 0.75, 1]),
)
def test_nucleus_is_the_smallest_set_that_reaches_p(values, p):
    """Dyadic probabilities make the sums exact: the set reaches p, and without its last member it would not."""
    probs = np.array([1.0, *values])
    kept = _nucleus(probs, p)
    mass = np.sort(probs[kept])[::-1]
    assert len(kept) >= 1
    assert mass.sum() >= p * probs.sum()
    assert len(kept) == 1 or mass[:-1].sum() < p * probs.sum()


def test_nucleus_of_a_flat_vocabulary_grows_as_needed():
    """A distribution so flat that the first thousand are not enough is handled as any other."""
    probs = np.ones(50_000)
    assert len(_nucleus(probs, 0.5)) == 25_000
    assert len(_nucleus(probs, 1.0)) == 50_000
