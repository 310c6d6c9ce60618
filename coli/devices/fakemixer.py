"""DeltaNet and attention position after position, with the CPU's kernels: what the fake device does between a layer's
two projections.  Slow and plain, and independent of the step in C that it is compared with.

A core is one sequence's state of one layer and the arithmetic on it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from coli._core import kernels
from coli.devices.base import MixerSpec

CHUNK = 64  # positions of a K/V block and of one sum (docs/numerics.md, section 4)


class Core(Protocol):
    """The state and what moves it on."""

    def advance(
        self, position: int, proj: np.ndarray, ba: np.ndarray | None, cos: np.ndarray, sin: np.ndarray
    ) -> np.ndarray:
        """What the out-projection takes: float32 (T, width).  proj (T, rows of the in-projection), ba (T, 2 heads)."""

    def copy(self) -> Core:
        """An independent core in the same state."""

    def bytes_for(self, positions: int) -> int:
        """Bytes of a state of so many positions."""


def core(spec: MixerSpec) -> Core:
    """The state before the first position."""
    return AttentionCore(spec) if spec.is_attention else DeltaNetCore(spec)


class DeltaNetCore:
    """state (value heads, dk, dv); raw : the last rows before the convolution, oldest first."""

    def __init__(self, spec: MixerSpec) -> None:
        g = spec.geometry
        self.spec = spec
        self.channels = 2 * g["dn_k_heads"] * g["dn_k_dim"] + g["dn_v_heads"] * g["dn_v_dim"]
        self.state = np.zeros((g["dn_v_heads"], g["dn_k_dim"], g["dn_v_dim"]), np.float32)
        self.raw = np.zeros((g["conv_taps"] - 1, self.channels), np.float32)

    def copy(self) -> DeltaNetCore:
        other = DeltaNetCore(self.spec)
        other.state[:], other.raw[:] = self.state, self.raw
        return other

    def bytes_for(self, positions: int) -> int:
        return self.state.nbytes + self.raw.nbytes

    def advance(
        self, position: int, proj: np.ndarray, ba: np.ndarray | None, cos: np.ndarray, sin: np.ndarray
    ) -> np.ndarray:
        g, vectors = self.spec.geometry, self.spec.vectors
        n_qk, heads, dk, dv = g["dn_k_heads"], g["dn_v_heads"], g["dn_k_dim"], g["dn_v_dim"]
        decay = kernels.exp(-(vectors["exp_a_log"] * kernels.softplus(ba[:, heads:] + vectors["dt_bias"])))
        beta = kernels.sigmoid(ba[:, :heads])
        out = np.empty((len(proj), heads * dv), np.float32)
        for t, row in enumerate(proj):
            rows = np.concatenate([self.raw, row[None, : self.channels]])
            u, self.raw = kernels.conv_silu(rows, vectors["conv"]), rows[1:]
            q, k = u[: 2 * n_qk * dk].reshape(2, n_qk, dk)
            v, z = u[2 * n_qk * dk :].reshape(heads, dv), row[self.channels :].reshape(heads, dv)
            q = [kernels.l2norm(head, g["q_scale"]) for head in q]
            k = [kernels.l2norm(head, 1.0) for head in k]
            for h in range(heads):
                of = h // (heads // n_qk)
                self.state[h], o = kernels.deltanet(self.state[h], q[of], k[of], v[h], decay[t, h], beta[t, h])
                out[t, h * dv : (h + 1) * dv] = kernels.gated_rmsnorm(o, z[h], vectors["dn_norm"], g["eps"])
        return out


class AttentionCore:
    """keys and values (blocks, K/V heads, 64, head_dim), in the cache's number format."""

    def __init__(self, spec: MixerSpec) -> None:
        g = spec.geometry
        self.spec = spec
        empty = np.empty((0, g["n_kv_heads"], CHUNK, g["head_dim"]), np.float16 if g["kv_f16"] else np.float32)
        self.keys, self.values = empty, empty

    def copy(self) -> AttentionCore:
        other = AttentionCore(self.spec)
        other.keys, other.values = self.keys.copy(), self.values.copy()
        return other

    def bytes_for(self, positions: int) -> int:
        return 2 * -(-positions // CHUNK) * int(np.prod(self.keys.shape[1:])) * self.keys.itemsize

    def advance(
        self, position: int, proj: np.ndarray, ba: np.ndarray | None, cos: np.ndarray, sin: np.ndarray
    ) -> np.ndarray:
        g = self.spec.geometry
        n_q, n_kv, d = g["n_q_heads"], g["n_kv_heads"], g["head_dim"]
        out = np.empty((len(proj), n_q * d), np.float32)
        for t, row in enumerate(proj):
            heads = row.reshape(2 * n_q + 2 * n_kv, d)  # q and gate of each head, then the keys, then the values
            block, at = divmod(position + t, CHUNK)
            if block == len(self.keys):
                new = np.zeros((1, *self.keys.shape[1:]), self.keys.dtype)
                self.keys, self.values = np.concatenate([self.keys, new]), np.concatenate([self.values, new])
            for h in range(n_kv):
                self.keys[block, h, at] = self._stored(self._turned(heads[2 * n_q + h], "k_norm", cos[t], sin[t]))
                self.values[block, h, at] = self._stored(heads[2 * n_q + n_kv + h])
            for h in range(n_q):
                q = self._turned(heads[2 * h], "q_norm", cos[t], sin[t])
                o = self._attend(q, h // (n_q // n_kv), position + t + 1)
                out[t, h * d : (h + 1) * d] = kernels.mul_sigmoid(o, heads[2 * h + 1])
        return out

    def _turned(self, x: np.ndarray, norm: str, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        return kernels.rope(kernels.rmsnorm(x, self.spec.vectors[norm], self.spec.geometry["eps"]), cos, sin)

    def _stored(self, x: np.ndarray) -> np.ndarray:
        return kernels.to_f16(x) if self.keys.dtype == np.float16 else x

    def _attend(self, q: np.ndarray, kv_head: int, n: int) -> np.ndarray:
        """Softmax over n positions by chunks: float32 (head_dim,)."""
        spans = [(c, min(CHUNK, n - CHUNK * c)) for c in range(-(-n // CHUNK))]
        scale = self.spec.geometry["attn_scale"]
        scores = [kernels.attn_scores(q, self.keys[c, kv_head, :m], scale) for c, m in spans]
        top = max(s.max() for s in scores)
        o, total = np.zeros(q.size, np.float32), np.float32(0)
        for (c, m), s in zip(spans, scores, strict=True):
            part, _, part_o = kernels.attn_values(s, self.values[c, kv_head, :m], top)
            o, total = o + part_o, total + part
        return o / total
