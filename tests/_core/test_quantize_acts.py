"""The quantiser of activations: every instruction set against the value-by-value model, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from _core.cases import bits
from _core.pack import GROUP, quantize_slow

from coli._core import kernels

ISAS = kernels.available()
TINY = np.float32(2.0**-100)


def inputs() -> dict[str, np.ndarray]:
    """Named rows of 1 to 5 groups, some ragged."""
    rng = np.random.default_rng(7)
    ties = np.resize(np.arange(-126.5, 127.0, 1.0, np.float32), 3 * GROUP)
    ties[::GROUP] = 127.0  # absmax 127: the scale is 1 and every value lies between two integers
    boundary = np.zeros(4 * GROUP, np.float32)
    boundary[[0, GROUP, 2 * GROUP]] = np.nextafter(TINY, np.float32(0)), TINY, np.nextafter(TINY, np.float32(1))
    sparse = np.zeros(2 * GROUP, np.float32)
    sparse[[5, 200]] = 3.0, -7.0
    return {
        "random": rng.standard_normal(4 * GROUP).astype(np.float32),
        "heavy_tails": rng.standard_t(2, 5 * GROUP).astype(np.float32),
        "ragged": rng.standard_normal(2 * GROUP + 44).astype(np.float32),
        "one_value": rng.standard_normal(1).astype(np.float32),
        "all_equal": np.full(GROUP, 0.37, np.float32),
        "plus_minus_absmax": np.where(rng.random(2 * GROUP) < 0.5, -1.7, 1.7).astype(np.float32),
        "ties": ties,
        "zeros": np.zeros(2 * GROUP, np.float32),
        "minus_zero": np.where(np.arange(GROUP) % 2, np.float32(-0.0), np.float32(1)),
        "sparse": sparse,
        "around_2^-100": boundary,
        "subnormal": np.full(GROUP, 1e-40, np.float32),
        "huge": (rng.standard_normal(2 * GROUP) * 1e38).clip(-3.4e38, 3.4e38).astype(np.float32),
        "largest": np.full(GROUP, np.finfo(np.float32).max),
        "random_bits": np.ldexp(rng.standard_normal(5 * GROUP), rng.integers(-90, 100, 5 * GROUP)).astype(np.float32),
    }


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", list(inputs()))
def test_quantize_finite_input_equals_the_model(name, isa):
    """q, scale, sum and the magnitude of finite input have one value each."""
    x = inputs()[name]
    q, scale, sum, magnitude = kernels.quantize(x[None], isa=isa)
    expected_q, expected_scale = quantize_slow(x)
    np.testing.assert_array_equal(q[:, 0], expected_q)
    np.testing.assert_array_equal(bits(scale[:, 0]), bits(expected_scale))
    np.testing.assert_array_equal(sum[:, 0], expected_q.astype(np.int32).sum(1))
    assert magnitude[0] == bits(np.abs(x)).max()
    assert np.abs(q.astype(int)).max() <= 127


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fault", [np.inf, -np.inf, np.nan, -np.nan])
def test_quantize_fault_marks_its_group_alone(fault, isa):
    """A group with a NaN or an infinity has q = 0 and a NaN scale; the returned magnitude tells; others are as ever."""
    x = np.random.default_rng(3).standard_normal(4 * GROUP).astype(np.float32)
    x[2 * GROUP + 17] = fault
    q, scale, sum, magnitude = kernels.quantize(x[None], isa=isa)
    expected_q, expected_scale = quantize_slow(x)
    assert magnitude[0] >= 0x7F800000
    assert np.isnan(scale[2, 0]) and not q[2, 0].any() and sum[2, 0] == 0
    np.testing.assert_array_equal(q[:, 0], expected_q)
    np.testing.assert_array_equal(bits(np.delete(scale[:, 0], 2)), bits(np.delete(expected_scale, 2)))


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_more_groups_than_columns_are_zero(isa):
    """Columns that the matrix has and x has not count as zeros."""
    x = np.ones((2, 130), np.float32)
    q, scale, sum, _ = kernels.quantize(x, n_groups=4, isa=isa)
    assert (q[1, :, :2] == 127).all() and not q[1, :, 2:].any()
    assert not q[2:].any() and not scale[2:].any() and not sum[2:].any()


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_groups_touches_its_groups_alone(isa):
    """A part of the groups can be done by another thread: the same bits, nothing else written."""
    x = np.random.default_rng(5).standard_normal((3, 5 * GROUP - 9)).astype(np.float32)
    whole = kernels.quantize(x, isa="scalar")
    for g0, g1 in ((0, 2), (2, 5), (4, 5), (3, 3)):
        q = np.full((5, 3, GROUP), -1, np.int8)
        scale = np.full((5, 3), -1, np.float32)
        sum = np.full((5, 3), -1, np.int32)
        magnitude = kernels.quantize_groups(x[1], g0, g1, q, scale, sum, 1, isa=isa)
        touched = np.zeros((5, 3), bool)
        touched[g0:g1, 1] = True
        assert magnitude == (bits(np.abs(x[1, g0 * GROUP : g1 * GROUP])).max() if g1 > g0 else 0)
        for part, expected in zip((q, scale, sum), whole, strict=False):
            np.testing.assert_array_equal(part[touched], expected[touched])
            assert (part[~touched] == -1).all()
