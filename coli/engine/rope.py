"""RoPE angles: cos and sin of every position, made on the host in float64 and rounded once."""

from __future__ import annotations

import math

import numpy as np


class RopeTable:
    """Tables that grow with the context.

    rotary_dim : rotated elements R of a head, even.   theta : the base.
    Angle i of position p is p * theta ** (-2 i / R), i < R / 2 (RoFormer, section 3.2.2).
    """

    def __init__(self, rotary_dim: int, theta: float, max_positions: int) -> None:
        half = rotary_dim // 2
        # the C library's pow, one at a time: numpy's vector pow differs by an ulp between instruction sets
        self._frequencies = np.array([math.pow(theta, -2.0 * i / rotary_dim) for i in range(half)])
        self._max_positions = max_positions
        self.cos = np.empty((0, half), np.float32)  # (positions, R / 2)
        self.sin = np.empty((0, half), np.float32)

    def reach(self, positions: int) -> None:
        """Make the tables hold at least this many positions."""
        have = len(self.cos)
        if positions <= have:
            return
        n = min(max(positions, 2 * have, 1024), max(self._max_positions, positions))
        angles = np.arange(have, n, dtype=np.float64)[:, None] * self._frequencies  # (new, R / 2)
        self.cos = np.concatenate([self.cos, np.cos(angles).astype(np.float32)])
        self.sin = np.concatenate([self.sin, np.sin(angles).astype(np.float32)])
