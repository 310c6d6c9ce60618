"""coli.probing.timing: the ruler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.placement import Speed
from coli.probing import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only calls move."""
    made = SimpleNamespace(now=0.0, calls=0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_line_through_two_points_and_through_noise():
    """Two sizes give latency and bandwidth; a larger size that took no longer gives neither nonsense nor infinity."""
    assert (100.0, 7.0) == pytest.approx(timing.fitted((1e6, 17.0), (4e6, 47.0)))
    gb_s, latency_us = timing.fitted((1e6, 20.0), (4e6, 20.0))
    assert 0 < gb_s < float("inf") and 0 <= latency_us <= 20.0
    assert (40.0, 0.0) == pytest.approx(timing.fitted((1e6, 10.0), (4e6, 100.0)))
    assert (50.0, 20.0) == pytest.approx(timing.fitted((1e6, 70.0), (4e6, 100.0), 50.0))


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.floats(1.1, 8), st.floats(1, 1e4))
def test_line_goes_through_the_larger_point(few_us, many_us, times, most_gb_s):
    """Which is what a token takes most of; whatever noise made of the smaller one."""
    gb_s, latency_us = timing.fitted((1e6, few_us), (times * 1e6, many_us), most_gb_s)
    assert Speed(gb_s, latency_us).us(times * 1e6) == pytest.approx(many_us)


def test_round_that_was_disturbed_does_not_count(clock):
    """A burst of a neighbour in one round of three: the figure is that of the others, and of each call its own."""

    def takes(us):
        def call():
            clock.calls += 1
            clock.now += us * 1e-6 * (50 if 30 < clock.calls < 60 else 1)

        return call

    found = timing.in_turns({"short": takes(10.0), "long": takes(400.0)})
    assert {"short": 10.0, "long": 400.0} == pytest.approx(found)
    assert clock.calls <= 2 * timing.MOST_CALLS


def test_drift_is_no_difference(clock):
    """A machine that gets slower all the time: windows would differ by what it lost, calls that take turns do not."""

    def takes(us):
        def call():
            clock.calls += 1
            clock.now += (us + 20 * clock.calls) * 1e-6

        return lambda: timing.seconds_of(call)

    assert timing.apart_us(takes(1030.0), takes(1000.0)) == pytest.approx(30.0, abs=0.01)
    assert clock.calls <= 2 * timing.MOST_CALLS
