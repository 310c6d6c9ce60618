"""Inputs for the integer kernels, and what tests of bits share."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from _core.pack import FORMATS, GROUP, pack_r16, product_slow, quantize_slow

# Every header size (64 to 1024 bytes, padded or not), ragged rows and columns, 1 to 4 streams, several steps a stream.
SHAPES = ((16, 128), (32, 256), (50, 300), (64, 512), (112, 640), (80, 1024), (256, 2048), (64, 4096))


def bits(x: np.ndarray) -> np.ndarray:
    """float32 values as uint32: what the contract compares."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def weight_kinds(format: str) -> tuple[str, ...]:
    """Names of the weight patterns that a format is tried with."""
    return ("random", "lowest", "highest", "alternating", "zero_groups", "tiny_scales")


def weights(kind: str, format: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers (rows, cols) of one pattern and their scales; int8 stays in [-127, 127], int4 in [-8, 7]."""
    rng = np.random.default_rng([rows, cols, FORMATS.index(format), weight_kinds(format).index(kind)])
    low, high = (-8, 7) if format.startswith("i4") else (-127, 127)
    q = rng.integers(low, high + 1, (rows, cols))
    if kind == "lowest":
        q[:] = low
    elif kind == "highest":
        q[:] = high
    elif kind == "alternating":
        q = np.where((np.arange(rows)[:, None] + np.arange(cols)) % 2, low, high)
    elif kind == "zero_groups":
        q[:, (np.arange(cols) // GROUP) % 2 == 0] = 0
    shape = (rows, -(-cols // GROUP)) if format.endswith("_group") else (rows,)
    scale = rng.standard_normal(shape) * 0.02
    if kind == "tiny_scales":  # float16 subnormals of either sign; as float32, ordinary small numbers
        scale = rng.integers(-1000, 1001, shape) * 2.0**-24
    return q, scale.astype(np.float16 if format.endswith("_group") else np.float32)


def activations(kind: str, n_tokens: int, cols: int) -> np.ndarray:
    """float32 (n_tokens, cols) of one pattern."""
    rng = np.random.default_rng([n_tokens, cols, len(kind)])
    x = rng.standard_t(3, (n_tokens, cols)).astype(np.float32)
    if kind == "extreme":  # every q is 127 or -127
        x = np.where(x < 0, np.float32(-2.5), np.float32(2.5))
    elif kind == "positive":  # every q is 127: with weights of one sign the largest dot there is
        x = np.full_like(x, 3.25)
    elif kind == "zero_groups":
        x[:, (np.arange(cols) // GROUP) % 2 == 1] = 0
    return x


@lru_cache(maxsize=None)
def product(format: str, kind: str, rows: int, cols: int, x_kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, activations of two tokens, and their exact product (2, rows) by the slow model."""
    q, scale = weights(kind, format, rows, cols)
    x = activations(x_kind, 2, cols)
    expected = np.stack([product_slow(q, scale, format, *quantize_slow(row)) for row in x])
    return pack_r16(q, scale, format), x, expected
