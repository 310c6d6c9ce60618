"""Files that come from elsewhere, damaged at random: each reader takes them or says in one line why not."""

from __future__ import annotations

import random

import pytest
import readers
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module", params=readers.NAMES)
def reader(request, tmp_path_factory) -> readers.Reader:
    return readers.make(request.param, tmp_path_factory.mktemp(request.param))


def test_reader_takes_the_good_files(reader):
    """What the damage starts from is right, so that what is refused is refused for the damage."""
    assert [readers.outcome(reader, seed) for seed in reader.seeds] == [None] * len(reader.seeds)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2), st.integers(0, 1 << 32))
def test_reader_of_a_damaged_file_takes_it_or_refuses_it_in_one_line(reader, which, seed):
    """Whatever is wrong with a file, the outcome is success or one ColiError of one printable line."""
    rng = random.Random(seed)
    data = reader.seeds[which % len(reader.seeds)]
    for _ in range(4):
        data = readers.damage(data, rng)
        readers.outcome(reader, data)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_reader_of_any_bytes_takes_them_or_refuses_them_in_one_line(reader, data):
    """Not even the beginning of a file of its kind: the same."""
    readers.outcome(reader, data)


def test_damage_reaches_both_outcomes(reader):
    """The damage is neither so mild nor so bad that it would test only one of the two."""
    rng = random.Random(1)
    outcomes = [readers.outcome(reader, readers.damage(rng.choice(reader.seeds), rng)) for _ in range(200)]
    assert outcomes.count(None) < 180
    assert len({message.split(":", 1)[-1][:40] for message in outcomes if message}) > 5
