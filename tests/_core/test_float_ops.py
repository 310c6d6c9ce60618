"""The float entries of every kernel table against the contract in numpy, to the last bit.

Lengths lie on both sides of every vector's and every lane block's end; values reach from subnormal to where an
exponential is clamped.  Outputs come poisoned, so what an entry leaves unwritten is a NaN and differs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import reference
from conftest import assert_same_bits
from coli._core import kernels

pytestmark = pytest.mark.parametrize("isa", kernels.available())

LENGTHS = (1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 256, 300)
EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 86.9, 87.0, 87.1, -86.9, -87.0, -87.1, 88.8, -104.0, 1e4, -1e4, 3e38],
    np.float32,
)


def spread(n: int, seed: int = 0) -> np.ndarray:
    """Values of many sizes, both signs."""
    rng = np.random.default_rng([n, seed])
    return (rng.standard_normal(n) * np.exp(rng.uniform(-8, 3, n))).astype(np.float32)


def plain(*shape: int, seed: int = 0) -> np.ndarray:
    """Values as activations have them."""
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "softplus"])
def test_function_of_one_value_equals_the_reference(isa, name):
    """Every length, and values at the edges of the exponential in every place of a vector."""
    found, expected = getattr(kernels, name), getattr(reference, name)
    with np.errstate(over="ignore"):
        for n in LENGTHS:
            for x in (spread(n), np.resize(EDGES, n), np.resize(np.roll(EDGES, 5), n)):
                assert_same_bits(found(x, isa=isa), expected(x), f"{name}, {n} values")


def test_dot32_of_any_length_equals_the_reference(isa):
    """32 lanes and a tree, whatever the vector's width."""
    for n in LENGTHS:
        a, b = spread(n, 1), spread(n, 2)
        assert_same_bits(kernels.dot32(a, b, isa=isa), reference.dot32(a, b), f"{n} values")


def test_norms_of_any_length_equal_the_reference(isa):
    """RMSNorm, its gated form and the unit length; of zeros too."""
    for n in LENGTHS:
        x, z, w = spread(n, 1), spread(n, 2), plain(n, seed=3)
        for values in (x, np.zeros(n, np.float32)):
            found, expected = kernels.rmsnorm(values, w, 1e-6, isa=isa), reference.rmsnorm(values, w, 1e-6)
            assert_same_bits(found, expected, f"rms {n}")
            found = kernels.gated_rmsnorm(values, z, w, 1e-6, isa=isa)
            assert_same_bits(found, reference.gated_norm(values, w, z, 1e-6), f"gated {n}")
            for scale in (np.float32(1), np.float32(128**-0.5)):
                found, expected = kernels.l2norm(values, scale, isa=isa), reference.l2norm(values, scale)
                assert_same_bits(found, expected, f"l2 {n}")


PAIRS: dict[str, tuple[Callable, Callable]] = {
    "silu_mul": (kernels.silu_mul, lambda gate, up: reference.silu(gate) * up),
    "mul_sigmoid": (kernels.mul_sigmoid, lambda o, gate: o * reference.sigmoid(gate)),
    "add": (kernels.add, lambda x, y: x + y),
    "axpy": (lambda x, y, isa: kernels.axpy(np.float32(0.3), y, x, isa=isa), lambda x, y: x + np.float32(0.3) * y),
    "axpy_set": (lambda x, y, isa: kernels.axpy(np.float32(0.3), y, isa=isa), lambda x, y: np.float32(0.3) * y),
}


@pytest.mark.parametrize("name", PAIRS)
def test_function_of_two_vectors_equals_the_reference(isa, name):
    """Element by element: a product and a sum are rounded apart, never fused."""
    found, expected = PAIRS[name]
    for n in LENGTHS:
        for x, y in ((spread(n, 1), spread(n, 2)), (np.resize(EDGES[:-3], n), plain(n))):
            assert_same_bits(found(x, y, isa=isa), expected(x, y), f"{name}, {n} values")


def test_to_f16_rounds_ties_to_even_as_numpy_does(isa):
    """Ordinary values, ties, subnormals, the largest and what is beyond."""
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 65504, 65519.99, 65520, 1e9, 2**-24, 2**-25, 1.5 * 2**-25, 6e-8, 0.0]
    edges = np.array([*ties, *(-value for value in ties)], np.float32)
    with np.errstate(over="ignore"):
        for n in LENGTHS:
            for x in (spread(n), np.resize(edges, n)):
                found = kernels.to_f16(x, isa=isa)
                assert np.array_equal(found.view(np.uint16), x.astype(np.float16).view(np.uint16)), n


@pytest.mark.parametrize("format", ["f32", "bf16", "f16"])
def test_dense_rows_and_widening_equal_the_reference(isa, format):
    """Row-major weights in each stored type, few tokens and many, columns that fill no lane block."""
    for rows, cols, tokens in ((1, 1, 1), (5, 31, 2), (3, 64, 5), (17, 100, 4), (4, 288, 9)):
        w, x = plain(rows, cols, seed=1), plain(tokens, cols, seed=2)
        stored = {"f32": w, "f16": w.astype(np.float16), "bf16": (w.view(np.uint32) >> 16).astype(np.uint16)}[format]
        exact = reference.widen_bf16(stored) if format == "bf16" else stored.astype(np.float32)
        assert_same_bits(kernels.widen(stored, isa=isa), exact, f"widen {format}")
        found = kernels.dense(stored, x, isa=isa)
        assert_same_bits(found, reference.dense_matmul(exact, x), f"{format} ({rows}, {cols}) x {tokens}")


def test_rope_turns_its_part_of_a_head_alone(isa):
    """Pairs (i, i + half); the rest of the head stays as it is, to the bit."""
    for half, d in ((1, 2), (4, 16), (8, 16), (16, 64), (17, 40), (32, 256)):
        cos, sin = reference.rope_tables(np.array([12345]), 2 * half, 1e7)
        x = spread(d)
        expected = reference.rope(x[None, None], cos, sin)[0, 0]
        assert_same_bits(kernels.rope(x, cos[0], sin[0], isa=isa), expected, f"{2 * half} of {d}")


def test_conv_silu_of_any_taps_equals_the_reference(isa):
    """From one tap to the sixteen that the step has room for."""
    for taps in (1, 2, 3, 4, 5, 16):
        for channels in (1, 15, 32, 50):
            rows, w = plain(taps, channels, seed=1), plain(taps, channels, seed=2)
            expected = reference.conv_silu(rows, w.T)[-1]
            assert_same_bits(kernels.conv_silu(rows, w, isa=isa), expected, f"{taps} taps, {channels} channels")


def test_deltanet_step_of_any_head_equals_the_reference(isa):
    """State and output of one head, of sizes that fill no key chunk and no vector too, over a few tokens."""
    for dk, dv in ((1, 1), (16, 16), (17, 15), (40, 33), (64, 48), (128, 128)):
        mine = theirs = plain(dk, dv)
        for token in range(3):
            q, k, v = (plain(n, seed=10 * token + i) for i, n in enumerate((dk, dk, dv)))
            q, k = reference.l2norm(q, np.float32(dk**-0.5)), reference.l2norm(k, np.float32(1))
            decay, beta = np.float32(0.93), np.float32(0.4)
            mine, o = kernels.deltanet(mine, q, k, v, decay, beta, isa=isa)
            after, expected = reference.deltanet_step(
                theirs[None], q[None], k[None], v[None], np.array([decay]), np.array([beta])
            )
            theirs = after[0]
            assert_same_bits(o, expected[0], f"o of ({dk}, {dv}), token {token}")
            assert_same_bits(mine, theirs, f"state of ({dk}, {dv}), token {token}")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention_of_one_chunk_equals_the_reference(isa, dtype):
    """Scores, the exponentials' sum in 32 lanes, values summed by ascending position; chunks that are full or not."""
    for n, d in ((1, 2), (5, 31), (32, 64), (33, 40), (63, 256), (64, 128)):
        q, keys, values = plain(d, seed=1), plain(n, d, seed=2).astype(dtype), plain(n, d, seed=3).astype(dtype)
        scale = np.float32(d**-0.5)
        scores = kernels.attn_scores(q, keys, scale, isa=isa)
        expected = reference.dense_matmul(keys.astype(np.float32), q[None])[0] * scale
        assert_same_bits(scores, expected, f"scores ({n}, {d})")
        top = np.float32(scores.max() + np.float32(0.5))  # the largest score may be another chunk's
        total, p, o = kernels.attn_values(scores, values, top, isa=isa)
        p_expected = reference.exp(expected - top)
        o_expected = np.zeros(d, np.float32)
        for i in range(n):
            o_expected = o_expected + p_expected[i] * values[i].astype(np.float32)
        assert_same_bits(p, p_expected, f"p ({n}, {d})")
        assert_same_bits(total, reference.sum32(p_expected), f"sum ({n}, {d})")
        assert_same_bits(o, o_expected, f"o ({n}, {d})")


def test_router_chooses_and_weighs_as_the_reference(isa):
    """Best first, the lower index on ties, -0 as +0; from one expert to the 64 that the step has room for."""
    for n, top_k in ((1, 1), (8, 2), (61, 8), (64, 64), (256, 8), (300, 33)):
        random = plain(n)
        tied = np.resize(np.array([0.0, -0.0, 1.0, 1.0, -2.0], np.float32), n)
        for logits in (random, tied, np.zeros(n, np.float32), np.sort(random), np.sort(random)[::-1].copy()):
            idx, w = kernels.router(logits, top_k, isa=isa)
            expected, weights = reference.route(logits[None], top_k)
            assert np.array_equal(idx, expected[0]), (n, top_k)
            assert_same_bits(w, weights[0], f"weights of {top_k} of {n}")
