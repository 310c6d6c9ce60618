"""The numerics contract in plain numpy: the oracle that every kernel must equal to the last bit.

Written from docs/numerics.md and the model's equations alone; it imports nothing of coli and shares no code with
the C kernels, so a fault would have to be made twice to stay unseen.  Each float operation is one float32
operation in the written order; vectorising runs only along axes that the contract leaves free (rows, tokens, heads).
It trades no clarity for speed and refuses nothing: checks of input belong to coli.

Three facts make the vectorised forms exact, and are used throughout:

* a sum that starts at +0 can never become -0 (round to nearest), so adding +0 or -0 for an absent term changes nothing;
* an integer dot product over 128 columns stays below 2^24, so float32 BLAS has it exactly, in any order, fused or not;
* x * 1.0 is x.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

F32 = np.float32
GROUP = 128  # columns under one activation scale, and under one group weight scale
LANES = 32  # partial sums of a sum over features
BLOCK_ROWS = 16  # rows of an R16 block
ATTENTION_CHUNK = 64  # absolute positions
KEY_CHUNK = 16  # DeltaNet keys
SLAB_ALIGN = 256  # where the matrices of a slab start
TINY = F32(2.0**-100)  # a group below this quantises to zero

# ---------------------------------------------------------------- integer products


def quantize_activations(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise float32 (..., K) to int8 (..., G, 128) and float32 scales (..., G), K padded with zeros to G * 128.

    A group with a NaN or an infinity gets q = 0 and a NaN scale: the fault is seen in the logits, never lost.
    """
    x = _pad_last(np.asarray(x, F32), GROUP)
    x = x.reshape(*x.shape[:-1], -1, GROUP)
    bits = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(-1)  # magnitudes order as integers do
    absmax = bits.view(F32)
    live = bits >= TINY.view(np.uint32)
    finite = bits < 0x7F800000
    safe = np.where(live & finite, absmax, F32(1))
    scale = np.where(live, safe / F32(127), F32(0))
    scale = np.where(finite, scale, F32(np.nan))
    inverse = F32(127) / safe
    usable = np.where((live & finite)[..., None], x, F32(0))
    return np.rint(usable * inverse[..., None]).astype(np.int8), scale


@dataclass(frozen=True)
class Packed:
    """A quantised matrix.  q: int8 (rows, G * 128); scale: float32 (rows,), or (rows, G) for group scales."""

    q: np.ndarray
    scale: np.ndarray


def block_bytes(format: str, cols: int) -> int:
    """Bytes of one R16 block: header (scales, padded to 128 bytes) and payload of 16 rows."""
    groups = -(-cols // GROUP)
    header = groups * BLOCK_ROWS * 2 if format.endswith("_group") else BLOCK_ROWS * 4
    payload = groups * GROUP * BLOCK_ROWS // (2 if format.startswith("i4") else 1)
    return -(-header // 128) * 128 + payload


def matrix_bytes(format: str, rows: int, cols: int) -> int:
    """Bytes of a matrix in any of the seven formats."""
    if format in ITEM_BYTES:
        return rows * cols * ITEM_BYTES[format]
    return -(-rows // BLOCK_ROWS) * block_bytes(format, cols)


def unpack_r16(data: np.ndarray, format: str, rows: int, cols: int) -> Packed:
    """Read the blocks of ``data`` (uint8) back into integers and exactly widened scales."""
    groups = -(-cols // GROUP)
    width = groups * GROUP
    n_blocks = -(-rows // BLOCK_ROWS)
    size = block_bytes(format, cols)
    blocks = np.asarray(data, np.uint8)[: n_blocks * size].reshape(n_blocks, size)
    if format.endswith("_group"):
        header = blocks[:, : groups * BLOCK_ROWS * 2].copy().view(np.float16)
        scale = header.reshape(n_blocks, groups, BLOCK_ROWS).transpose(0, 2, 1).reshape(-1, groups)
    else:
        scale = blocks[:, : BLOCK_ROWS * 4].copy().view(F32).reshape(-1)
    if format.startswith("i8"):
        payload = blocks[:, size - width * BLOCK_ROWS :].reshape(n_blocks, width // 4, BLOCK_ROWS, 4)
        q = payload.transpose(0, 2, 1, 3).reshape(-1, width).view(np.int8)
    else:
        payload = blocks[:, size - width * BLOCK_ROWS // 2 :].reshape(n_blocks, width // 8, BLOCK_ROWS, 4)
        nibbles = np.stack([payload & 15, payload >> 4], axis=3)  # (blocks, K/8, 16, low|high, 4)
        q = nibbles.transpose(0, 2, 1, 3, 4).reshape(-1, width).astype(np.int8) - np.int8(8)
    return Packed(q[:rows], scale[:rows].astype(F32))


def matmul(w: np.ndarray | Packed, x: np.ndarray) -> np.ndarray:
    """``y[t, r]`` for float32 x (T, K): integer groups for a Packed matrix, 32-lane dots for a float32 one."""
    if not isinstance(w, Packed):
        return dense_matmul(w, x)
    q, s_x = quantize_activations(x)  # (T, G, 128), (T, G)
    y = np.zeros((x.shape[0], w.q.shape[0]), F32)
    for g in range(q.shape[1]):
        dot = q[:, g].astype(F32) @ w.q[:, g * GROUP : (g + 1) * GROUP].astype(F32).T
        if w.scale.ndim == 2:
            y = y + dot * (s_x[:, g, None] * w.scale[None, :, g])
        else:
            y = y + dot * s_x[:, g, None]
    return y if w.scale.ndim == 2 else y * w.scale


def dense_matmul(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """32-lane dots of every row of float32 w (R, K) with every row of x (T, K); R is cut only to bound memory."""
    step = max(1, 2**18 // (LANES * max(1, x.shape[0])))
    parts = [dot32(x[:, None, :], w[None, r : r + step, :]) for r in range(0, w.shape[0], step)]
    return np.concatenate(parts, axis=1)


# ---------------------------------------------------------------- sums over features


def dot32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum of products over the last axis: 32 lanes ascending, then a tree.  Leading axes broadcast."""
    a, b = _pad_last(a, LANES), _pad_last(b, LANES)
    lanes = np.zeros((*np.broadcast_shapes(a.shape[:-1], b.shape[:-1]), LANES), F32)
    for i in range(0, a.shape[-1], LANES):
        lanes = lanes + a[..., i : i + LANES] * b[..., i : i + LANES]
    return _tree(lanes)


def sum32(a: np.ndarray) -> np.ndarray:
    """Sum over the last axis in the order of `dot32`, without products."""
    a = _pad_last(a, LANES)
    lanes = np.zeros((*a.shape[:-1], LANES), F32)
    for i in range(0, a.shape[-1], LANES):
        lanes = lanes + a[..., i : i + LANES]
    return _tree(lanes)


def _tree(lanes: np.ndarray) -> np.ndarray:
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _pad_last(x: np.ndarray, multiple: int) -> np.ndarray:
    short = -x.shape[-1] % multiple
    return np.ascontiguousarray(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x)


# ---------------------------------------------------------------- functions of one value

_EXP = [F32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)]
_EXP.append(F32(5.0000001201e-1))
_ATANH = [F32(2 / n) for n in (15, 13, 11, 9, 7, 5, 3)]


def exp(x: np.ndarray) -> np.ndarray:
    """e^x for x clamped to [-87, 87]: no result and no step is subnormal or infinite."""
    x = np.minimum(np.maximum(np.asarray(x, F32), F32(-87)), F32(87))
    n = np.rint(x * F32(1.44269504088896341))
    r = (x - n * F32(0.693359375)) + n * F32(2.12194440e-4)
    p = np.full_like(r, _EXP[0])
    for c in _EXP[1:]:
        p = p * r + c
    p = (p * (r * r) + r) + F32(1)
    return p * ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(F32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return F32(1) / (F32(1) + exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)): one division, not a product with the sigmoid."""
    return x / (F32(1) + exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """max(x, 0) + log1p(exp(-|x|)), the logarithm as 2 artanh(t / (2 + t))."""
    t = exp(-np.abs(x))
    s = t / (F32(2) + t)
    z = s * s
    q = np.full_like(z, _ATANH[0])
    for c in _ATANH[1:]:
        q = q * z + c
    return np.maximum(x, F32(0)) + ((s * z) * q + (s + s))


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of bfloat16 to float32, exactly."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(F32)


# ---------------------------------------------------------------- norms


def _inverse_rms(x: np.ndarray, eps: float) -> np.ndarray:
    return F32(1) / np.sqrt(dot32(x, x) / F32(x.shape[-1]) + F32(eps))


def rmsnorm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    """``(x * r) * w``; for a zero-centred norm ``w`` is the stored weight plus 1, rounded once at load."""
    return (x * _inverse_rms(x, eps)[..., None]) * w


def gated_norm(o: np.ndarray, w: np.ndarray, z: np.ndarray, eps: float) -> np.ndarray:
    """The norm inside DeltaNet: not zero-centred, gated after the norm."""
    return ((o * _inverse_rms(o, eps)[..., None]) * w) * silu(z)


def l2norm(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """Unit length over the last axis (1e-6 inside the root), times ``scale``."""
    return (x * (F32(1) / np.sqrt(dot32(x, x) + F32(1e-6)))[..., None]) * scale


# ---------------------------------------------------------------- DeltaNet


def conv_silu(m: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Causal depthwise convolution and silu of raw rows m (T, C) with taps w (C, K), zeros before the start."""
    taps = w.shape[1]
    rows = np.concatenate([np.zeros((taps - 1, m.shape[1]), F32), m])
    acc = np.zeros_like(m)
    for j in range(taps):  # oldest to newest
        acc = acc + w[:, j] * rows[j : j + m.shape[0]]
    return silu(acc)


def sum_over_keys(products: np.ndarray) -> np.ndarray:
    """Sum (heads, dk, dv) over its keys: chunks of 16 ascending from +0, then the chunk sums ascending from +0."""
    heads, dk, dv = products.shape
    products = np.pad(products, [(0, 0), (0, -dk % KEY_CHUNK), (0, 0)]).reshape(heads, -1, KEY_CHUNK, dv)
    chunks = np.zeros((heads, products.shape[1], dv), F32)
    for i in range(KEY_CHUNK):
        chunks = chunks + products[:, :, i]
    total = np.zeros((heads, dv), F32)
    for c in range(chunks.shape[1]):
        total = total + chunks[:, c]
    return total


def deltanet_step(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token of all heads: state (Hv, dk, dv), q and k (Hv, dk), v (Hv, dv), decay and beta (Hv,).

    Returns the new state and the output (Hv, dv).
    """
    state = decay[:, None, None] * state
    d = (v - sum_over_keys(state * k[:, :, None])) * beta[:, None]
    state = state + k[:, :, None] * d[:, None, :]
    return state, sum_over_keys(state * q[:, :, None])


# ---------------------------------------------------------------- attention


def rope_tables(positions: np.ndarray, rotary_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (T, rotary_dim / 2): float64 on the host, rounded once to float32."""
    frequencies = np.array([math.pow(theta, -2.0 * k / rotary_dim) for k in range(rotary_dim // 2)])
    angle = np.asarray(positions, np.float64)[:, None] * frequencies
    return np.cos(angle).astype(F32), np.sin(angle).astype(F32)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate the pairs (i, i + R/2) of the first R elements of x (T, heads, d)."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Causal attention of q (T, Hq, d) at ``positions`` over the cache k, v (S, Hkv, d) whose row is the position.

    Two passes, no running rescale: the maximum is exact, so only the chunk of 64 absolute positions orders the sums.
    """
    n_tokens, n_heads, d = q.shape
    scale = F32(1.0 / np.sqrt(np.float64(d)))
    n_keys = k.shape[0]
    visible = np.arange(n_keys)[None, :] <= np.asarray(positions)[:, None]  # (T, S)
    out = np.empty_like(q)
    for h in range(n_heads):
        kv_head = h // (n_heads // k.shape[1])
        keys, values = k[:, kv_head].astype(F32), v[:, kv_head].astype(F32)
        scores = dense_matmul(keys, q[:, h]) * scale  # (T, S)
        top = np.where(visible, scores, F32(-np.inf)).max(1)
        p = np.where(visible, exp(scores - top[:, None]), F32(0))  # a masked key is skipped: it adds +0
        p = _pad_last(p, ATTENTION_CHUNK).reshape(n_tokens, -1, ATTENTION_CHUNK)  # (T, chunks, 64)
        values = np.pad(values, [(0, -n_keys % ATTENTION_CHUNK), (0, 0)]).reshape(-1, ATTENTION_CHUNK, d)
        l_chunks = sum32(p)
        o_chunks = np.zeros((n_tokens, p.shape[1], d), F32)
        for i in range(ATTENTION_CHUNK):
            o_chunks = o_chunks + p[:, :, i, None] * values[None, :, i]
        l_sum, o_sum = np.zeros(n_tokens, F32), np.zeros((n_tokens, d), F32)
        for c in range(p.shape[1]):
            l_sum = l_sum + l_chunks[:, c]
            o_sum = o_sum + o_chunks[:, c]
        out[:, h] = o_sum / l_sum[:, None]
    return out


# ---------------------------------------------------------------- mixture of experts


def route(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose ``top_k`` of logits (T, E) and weigh them: indexes and float32 weights (T, top_k), best first.

    Order: logit descending, -0 as +0, the lower index on ties.
    Weights: m = the largest chosen logit (rank 0); e_j = exp(l_j - m); s = the 32-lane sum of e in rank order;
    w_j = e_j / s.  In exact arithmetic that is the softmax over all experts, renormalised over the chosen ones.
    """
    order = logits + F32(0)  # -0 becomes +0
    idx = np.argsort(-order, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(order, idx, axis=1)
    e = exp(chosen - chosen[:, :1])
    return idx, e / sum32(e)[:, None]


@dataclass(frozen=True)
class Slab:
    """The three matrices of one expert; each float32 (rows, cols) or Packed."""

    gate: np.ndarray | Packed
    up: np.ndarray | Packed
    down: np.ndarray | Packed


def expert_ffn(slab: Slab, x: np.ndarray) -> np.ndarray:
    """``down(silu(gate x) * up x)`` for x (T, H)."""
    return matmul(slab.down, silu(matmul(slab.gate, x)) * matmul(slab.up, x))


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Shape:
    """What the forward pass reads from config.json, under the names of its keys."""

    text: Mapping

    @classmethod
    def from_config(cls, config: Mapping) -> Shape:
        return cls(config.get("text_config", config))

    def __getattr__(self, key: str):
        try:
            return self.text[key]
        except KeyError:
            raise AttributeError(key) from None

    @cached_property
    def layer_types(self) -> list[str]:
        if self.text.get("layer_types"):
            return list(self.text["layer_types"])
        n = self.text.get("full_attention_interval", 4)
        return ["linear_attention" if (i + 1) % n else "full_attention" for i in range(self.num_hidden_layers)]

    @cached_property
    def eps(self) -> float:
        return self.text.get("rms_norm_eps", 1e-6)

    @cached_property
    def rope_theta(self) -> float:
        return self._rope("rope_theta")

    @cached_property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self._rope("partial_rotary_factor", 0.25))

    def _rope(self, key: str, default: float | None = None) -> float:
        for place in (self.text.get("rope_parameters"), self.text, self.text.get("rope_scaling")):
            if place and place.get(key) is not None:
                return float(place[key])
        if default is None:
            raise KeyError(key)
        return default


class Reference:
    """The forward pass over a mapping of container names.

    Parameters
    ----------
    weights : mapping
        Names as in a container (``layers.0.linear_attn.in_proj_qkvz``, ...).  A vector or a row-major matrix is a
        float32 array, a quantised matrix is `Packed`, ``mlp.shared_expert`` is a `Slab` and ``mlp.experts`` a
        sequence of them.  Norm weights are as stored (the 1 + w is made here).  ``lm_head`` may be absent when tied.
    config : mapping
        The parsed config.json.
    kv_dtype : {"float16", "float32"}
        How keys and values are stored after norm and RoPE.
    """

    def __init__(self, weights: Mapping, config: Mapping, kv_dtype: str = "float32") -> None:
        self.weights = weights
        self.shape = Shape.from_config(config)
        self.kv_dtype = np.dtype(kv_dtype)

    @classmethod
    def open(cls, path: str | Path) -> Reference:
        """Read a container folder."""
        container = Container(Path(path))
        return cls(container, container.config, container.manifest["kv_dtype"])

    def forward(self, ids: Sequence[int]) -> dict:
        """Run T tokens from an empty state.

        Returns
        -------
        dict
            logits (T, V); hidden (L+1, T, H), the embedding, then the residual stream after each layer; mixer_out
            (L, T, H); router_logits (L, T, E); router_idx and router_w (L, T, k); final_norm (T, H);
            state {layer: (Hv, dk, dv)}; conv {layer: the last K-1 raw rows, oldest first, (K-1, C)};
            kv {layer: (keys, values), each (T, Hkv, d)}.
        """
        s, w = self.shape, self.weights
        out: dict = {"hidden": [], "mixer_out": [], "router_logits": [], "router_idx": [], "router_w": []}
        out |= {"state": {}, "conv": {}, "kv": {}}
        x = w["embed_tokens"][np.asarray(ids, np.int64)]  # (T, H)
        out["hidden"].append(x)
        for layer, kind in enumerate(s.layer_types):
            p = f"layers.{layer}."
            normed = self._norm(x, p + "input_layernorm")
            if kind == "full_attention":
                y, out["kv"][layer] = self._attention(normed, p + "self_attn.")
            else:
                y, out["state"][layer], out["conv"][layer] = self._deltanet(normed, p + "linear_attn.")
            out["mixer_out"].append(y)
            x = x + y
            y, logits, idx, weights = self._moe(self._norm(x, p + "post_attention_layernorm"), p + "mlp.")
            out["router_logits"].append(logits)
            out["router_idx"].append(idx)
            out["router_w"].append(weights)
            x = x + y
            out["hidden"].append(x)
        out["final_norm"] = self._norm(x, "norm")
        out["logits"] = matmul(w["lm_head"] if "lm_head" in w else w["embed_tokens"], out["final_norm"])
        stacked = ("hidden", "mixer_out", "router_logits", "router_idx", "router_w")
        return out | {key: np.stack(out[key]) for key in stacked}

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rmsnorm(x, F32(1) + self.weights[name], self.shape.eps)

    def _deltanet(self, x: np.ndarray, p: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        s, w = self.shape, self.weights
        n_tokens = x.shape[0]
        k_heads, v_heads = s.linear_num_key_heads, s.linear_num_value_heads
        dk, dv = s.linear_key_head_dim, s.linear_value_head_dim
        qkvz = matmul(w[p + "in_proj_qkvz"], x)
        mixed, z = np.split(qkvz, [2 * k_heads * dk + v_heads * dv], axis=1)
        b, a = np.split(dense_matmul(w[p + "in_proj_ba"], x), 2, axis=1)  # (T, Hv) each
        beta = sigmoid(b)
        decay = exp(-(exp(w[p + "A_log"]) * softplus(a + w[p + "dt_bias"])))
        taps = w[p + "conv1d"]
        q, k, v = np.split(conv_silu(mixed, taps), [k_heads * dk, 2 * k_heads * dk], axis=1)
        q = l2norm(q.reshape(n_tokens, k_heads, dk), F32(np.float64(dk) ** -0.5))
        k = l2norm(k.reshape(n_tokens, k_heads, dk), F32(1))
        q, k = (np.repeat(m, v_heads // k_heads, axis=1) for m in (q, k))  # (T, Hv, dk)
        v = v.reshape(n_tokens, v_heads, dv)
        state = np.zeros((v_heads, dk, dv), F32)
        o = np.empty((n_tokens, v_heads, dv), F32)
        for t in range(n_tokens):
            state, o[t] = deltanet_step(state, q[t], k[t], v[t], decay[t], beta[t])
        y = gated_norm(o, w[p + "norm"], z.reshape(n_tokens, v_heads, dv), s.eps)
        y = matmul(w[p + "out_proj"], y.reshape(n_tokens, -1))
        history = np.concatenate([np.zeros((taps.shape[1] - 1, mixed.shape[1]), F32), mixed])[n_tokens:]
        return y, state, history

    def _attention(self, x: np.ndarray, p: str) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        s, w = self.shape, self.weights
        n_tokens, d = x.shape[0], s.head_dim
        q_heads, kv_heads = s.num_attention_heads, s.num_key_value_heads
        qkv = matmul(w[p + "qkv_proj"], x)
        q_gate, k, v = np.split(qkv, [q_heads * 2 * d, (q_heads * 2 + kv_heads) * d], axis=1)
        q, gate = np.split(q_gate.reshape(n_tokens, q_heads, 2 * d), 2, axis=2)
        k, v = (m.reshape(n_tokens, kv_heads, d) for m in (k, v))
        positions = np.arange(n_tokens)
        cos, sin = rope_tables(positions, s.rotary_dim, s.rope_theta)
        q = rope(self._norm(q, p + "q_norm"), cos, sin)
        k = rope(self._norm(k, p + "k_norm"), cos, sin).astype(self.kv_dtype)
        v = v.astype(self.kv_dtype)
        o = attention(q, k, v, positions) * sigmoid(gate)
        return matmul(w[p + "o_proj"], o.reshape(n_tokens, -1)), (k, v)

    def _moe(self, x: np.ndarray, p: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        w, top_k = self.weights, self.shape.num_experts_per_tok
        logits = dense_matmul(w[p + "gate"], x)
        idx, weights = route(logits, top_k)
        y = np.empty((x.shape[0], top_k, x.shape[1]), F32)  # every chosen expert's output, by rank
        for expert in np.unique(idx):
            tokens, ranks = np.nonzero(idx == expert)
            y[tokens, ranks] = expert_ffn(w[p + "experts"][expert], x[tokens])
        out = weights[:, 0, None] * y[:, 0]
        for rank in range(1, top_k):
            out = out + weights[:, rank, None] * y[:, rank]
        gate = sigmoid(dense_matmul(w[p + "shared_expert_gate"], x))  # (T, 1)
        return out + gate * expert_ffn(w[p + "shared_expert"], x), logits, idx, weights


# ---------------------------------------------------------------- reading a container

ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
_STORED = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


def _widen(data: np.ndarray, format: str) -> np.ndarray:
    """uint8 bytes of f32, bf16 or f16 values to float32, exactly."""
    data = np.ascontiguousarray(data)
    if format == "bf16":
        return widen_bf16(data.view(np.uint16))
    return data.view(F32 if format == "f32" else np.float16).astype(F32)


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """Map each tensor's name to (dtype name, shape, its bytes as a mapped uint8 array)."""
    raw = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", raw[:8].tobytes())
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: (t["dtype"], tuple(t["shape"]), raw[start + t["data_offsets"][0] : start + t["data_offsets"][1]])
        for name, t in header.items()
    }


def widen_tensor(dtype: str, shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
    """A tensor of `read_safetensors` as a float32 array."""
    return _widen(data, _STORED[dtype]).reshape(shape)


class LazyList(Sequence):
    """Items made at their first use and kept: a demo container has hundreds of experts and a prompt meets a few."""

    def __init__(self, length: int, make: Callable[[int], Slab]) -> None:
        self._length, self._make, self._items = length, make, {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Slab:
        if i not in self._items:
            self._items[i] = self._make(int(i))
        return self._items[i]


class Container(Mapping):
    """The weights mapping of a container folder; each tensor is unpacked at its first use."""

    def __init__(self, path: Path) -> None:
        self.manifest = json.loads((path / "coli.json").read_text())
        self.config = json.loads((path / "config.json").read_text())
        self._shape = Shape.from_config(self.config)
        self._tensors: dict = {}
        for name in self.manifest["files"]:
            if name.endswith(".safetensors"):
                self._tensors |= read_safetensors(path / name)
        self._made: dict = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self):
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str):
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str):
        dtype, shape, data = self._tensors[name]
        if name.endswith("mlp.experts"):
            e = self.manifest["experts"]
            stride = e["stride_bytes"]
            return LazyList(
                e["count"],
                lambda i: self._slab(data[i * stride : (i + 1) * stride], e["format"], e["intermediate_size"]),
            )
        if name.endswith("mlp.shared_expert"):
            size = self._shape.shared_expert_intermediate_size
            return self._slab(data, self.manifest["trunk_format"], size)
        if name in self.manifest["matrices"] and dtype == "U8":
            m = self.manifest["matrices"][name]
            return self._matrix(data, m["format"], m["rows"], m["cols"])
        return widen_tensor(dtype, shape, data)

    def _slab(self, data: np.ndarray, format: str, intermediate_size: int) -> Slab:
        hidden, parts, at = self._shape.hidden_size, [], 0
        for rows, cols in ((intermediate_size, hidden), (intermediate_size, hidden), (hidden, intermediate_size)):
            parts.append(self._matrix(data[at:], format, rows, cols))
            at += -(-matrix_bytes(format, rows, cols) // SLAB_ALIGN) * SLAB_ALIGN
        return Slab(*parts)

    @staticmethod
    def _matrix(data: np.ndarray, format: str, rows: int, cols: int) -> np.ndarray | Packed:
        if format in ITEM_BYTES:
            return _widen(data[: matrix_bytes(format, rows, cols)], format).reshape(rows, cols)
        return unpack_r16(data, format, rows, cols)
