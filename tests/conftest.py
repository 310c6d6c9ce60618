"""What all tests share: where the data is, containers made on demand, and how bits are compared."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

# Profiles of `coli tune`, claims on cores and converted models of the person who runs the tests stay out of them.
_scratch = tempfile.mkdtemp(prefix="coli-tests-")
for _name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
    os.environ[_name] = os.path.join(_scratch, _name.lower())
    os.mkdir(os.environ[_name])
for _name in [name for name in os.environ if name.startswith("COLI_")]:
    del os.environ[_name]

DATA = Path(__file__).parent / "data"
FIXTURES = DATA / "fixtures"


def pytest_sessionfinish() -> None:
    shutil.rmtree(_scratch, ignore_errors=True)


@pytest.fixture(scope="session")
def make_container(tmp_path_factory):
    """make_container("tiny-random", trunk_bits=8, expert_bits=4, expert_scales="group") -> Path, converted once."""
    made: dict[tuple, Path] = {}

    def make(name: str, *, trunk_bits: int = 8, expert_bits: int = 4, expert_scales: str = "group") -> Path:
        from coli.convert.convert import convert

        key = (name, trunk_bits, expert_bits, expert_scales)
        if key not in made:
            target = tmp_path_factory.mktemp("containers") / f"{name}-t{trunk_bits}-e{expert_bits}-{expert_scales}"
            convert(
                FIXTURES / name,
                target,
                trunk_bits=trunk_bits,
                expert_bits=expert_bits,
                expert_scales=expert_scales if expert_bits == 4 else None,
            )
            made[key] = target
        return made[key]

    return make


def bits(array) -> np.ndarray:
    """A float32 array as uint32: equality without tolerance, and -0 is not +0."""
    return np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)


def assert_same_bits(actual, expected, what: str = "") -> None:
    """Fail with the first differing place, not with two arrays."""
    a, e = bits(actual), bits(expected)
    assert a.shape == e.shape, f"{what}: shape {a.shape} for {e.shape}"
    wrong = np.argwhere(a != e)
    if wrong.size:
        at = tuple(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.size} values differ, first at {at}: "
            f"{np.asarray(actual)[at]!r} for {np.asarray(expected)[at]!r}"
        )
