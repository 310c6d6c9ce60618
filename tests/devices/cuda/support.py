"""Random R16 bytes and the CPU's answer to them, for the tests that need a card and for bench/gpu.py."""

from __future__ import annotations

import numpy as np

from coli._core import kernels
from coli.container.layout import FORMATS, MatrixLayout, SlabLayout, matrix_layout, slab_layout
from coli.devices.base import MatrixSpec, SlabSpec

BLOCKS = ("i8_row", "i8_group", "i4_row", "i4_group")
FLOATS = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}
KINDS = ("random", "plus", "minus", "zeros", "edges")


def matrix_bytes(rng: np.random.Generator, layout: MatrixLayout, kind: str = "random") -> np.ndarray:
    """uint8 (used_bytes,): weights of one kind, scales of either sign, some of them subnormal in float16."""
    if not FORMATS[layout.format].is_blocks:
        return _float_bytes(rng, layout)
    out = np.empty((layout.n_blocks, layout.block_bytes), np.uint8)
    payload = out[:, layout.header_bytes :]
    int4 = FORMATS[layout.format].bits == 4
    low, high = (0, 256) if int4 else (-127, 128)
    if kind == "plus":
        payload[:] = 0xFF if int4 else 127
    elif kind == "minus":
        payload[:] = 0x00 if int4 else 129  # -8 and -8, or -127
    else:
        payload[:] = rng.integers(low, high, payload.shape, np.int16).astype(np.uint8)
        if kind == "zeros":  # whole 512-byte pieces, so that groups vanish
            payload.reshape(layout.n_blocks, -1, 512)[:, ::3] = 0x88 if int4 else 0
    out[:, : layout.header_bytes] = 0
    if layout.format.endswith("_group"):
        scales = rng.normal(0, 0.01, (layout.n_blocks, 16 * layout.n_groups)).astype(np.float16)
        scales[rng.random(scales.shape) < 0.05] = np.float16(3e-7)  # subnormal
        out[:, : scales.shape[1] * 2] = scales.view(np.uint8)
    else:
        out[:, :64] = rng.normal(0, 0.01, (layout.n_blocks, 16)).astype(np.float32).view(np.uint8)
    return out.reshape(-1)


def _float_bytes(rng: np.random.Generator, layout: MatrixLayout) -> np.ndarray:
    values = rng.normal(0, 0.05, (layout.rows, layout.cols)).astype(np.float32)
    if layout.format == "bf16":
        return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8).reshape(-1)
    return values.astype(FLOATS[layout.format]).view(np.uint8).reshape(-1)


def activations(rng: np.random.Generator, tokens: int, cols: int, kind: str = "random") -> np.ndarray:
    """float32 (tokens, cols)."""
    x = rng.standard_t(4, (tokens, cols)).astype(np.float32)
    if kind == "edges":
        x[:, ::7] = 0
        x[:, 1::11] *= np.float32(1e-32)
        x[:, 3::13] = -0.0
        x[..., : cols // 2] *= np.float32(2.0**-99)
    elif kind == "plus":
        x[:] = 1
    return x


def matrix_spec(rng: np.random.Generator, format: str, rows: int, cols: int, kind: str = "random") -> MatrixSpec:
    """A matrix to upload."""
    m = matrix_layout(format, rows, cols)
    data = matrix_bytes(rng, m, kind)
    return MatrixSpec(f"{format} {rows}x{cols}", format, rows, cols, m.block_bytes, m.n_blocks, m.n_groups, data)


def slab_spec(format: str, hidden: int, dim: int) -> SlabSpec:
    """The shape of experts."""
    s = slab_layout(format, hidden, dim)
    return SlabSpec(format, hidden, dim, s.total_bytes, s.gate_offset, s.up_offset, s.down_offset)


def slab_bytes(rng: np.random.Generator, slab: SlabLayout) -> np.ndarray:
    """uint8 (total_bytes,): one expert."""
    out = np.zeros(slab.total_bytes, np.uint8)
    for part, at in ((slab.gate, slab.gate_offset), (slab.up, slab.up_offset), (slab.down, slab.down_offset)):
        out[at : at + part.used_bytes] = matrix_bytes(rng, part)
    return out


def product(data: np.ndarray, layout: MatrixLayout, x: np.ndarray) -> np.ndarray:
    """What the CPU answers: float32 (tokens, rows)."""
    x = np.ascontiguousarray(x)
    if FORMATS[layout.format].is_blocks:
        q, scale, total, _ = kernels.quantize(x, n_groups=layout.n_groups)
        return kernels.gemm(data[: layout.used_bytes], layout.format, layout.rows, layout.cols, q, scale, total)
    w = data[: layout.used_bytes].view(FLOATS[layout.format]).reshape(layout.rows, layout.cols)
    return kernels.dense(w, x)


def ffn(data: np.ndarray, slab: SlabLayout, x: np.ndarray) -> np.ndarray:
    """What the CPU answers for one expert: float32 (tokens, hidden)."""
    gate = product(data[slab.gate_offset :], slab.gate, x)
    up = product(data[slab.up_offset :], slab.up, x)
    return product(data[slab.down_offset :], slab.down, kernels.silu_mul(gate, up))


def deltanet(proj, ba, w, exp_a, dt, norm, n_qk: int, dk: int, q_scale, eps) -> tuple[np.ndarray, np.ndarray]:
    """DeltaNet's core on the CPU, position after position: (T, heads * dv) and the state (heads, dk, dv) behind them.

    proj (T, channels + heads * dv), ba (T, 2 * heads), w (taps, channels), exp_a and dt (heads,), norm (dv,).
    """
    heads, dv, (taps, channels) = len(exp_a), len(norm), w.shape
    state, raw = np.zeros((heads, dk, dv), np.float32), np.zeros((taps - 1, channels), np.float32)
    out = np.empty((len(proj), heads * dv), np.float32)
    for t in range(len(proj)):
        rows = np.concatenate([raw, proj[t : t + 1, :channels]])
        u = kernels.conv_silu(rows, w)
        raw = rows[1:]
        for h in range(2 * n_qk):
            at = slice(h * dk, (h + 1) * dk)
            u[at] = kernels.l2norm(u[at], q_scale if h < n_qk else np.float32(1))
        for h in range(heads):
            k = h // (heads // n_qk)
            beta = kernels.sigmoid(ba[t, h : h + 1])[0]
            soft = kernels.softplus(ba[t, heads + h : heads + h + 1] + dt[h : h + 1])[0]
            decay = kernels.exp(np.array([-(exp_a[h] * soft)], np.float32))[0]
            v = u[2 * n_qk * dk + h * dv :][:dv]
            state[h], o = kernels.deltanet(state[h], u[k * dk :][:dk], u[(n_qk + k) * dk :][:dk], v, decay, beta)
            out[t, h * dv : (h + 1) * dv] = kernels.gated_rmsnorm(o, proj[t, channels + h * dv :][:dv], norm, eps)
    return out, state


def attention(proj, q_norm, k_norm, cos, sin, n_q: int, n_kv: int, scale, eps, dtype) -> np.ndarray:
    """Attention's core on the CPU, position after position: float32 (T, n_q * d).

    proj (T, (2 n_q + 2 n_kv) * d), cos and sin (T, half); dtype : of the cache.
    """
    d, total = len(q_norm), len(proj)
    keys, values = (np.zeros((-(-total // 64), n_kv, 64, d), dtype) for _ in range(2))
    out = np.empty((total, n_q * d), np.float32)

    def turn(x, w, t):
        return kernels.rope(kernels.rmsnorm(x, w, eps), cos[t], sin[t])

    def stored(x):
        return kernels.to_f16(x) if dtype == np.float16 else x

    for t in range(total):
        for h in range(n_kv):
            keys[t // 64, h, t % 64] = stored(turn(proj[t, (2 * n_q + h) * d :][:d], k_norm, t))
            values[t // 64, h, t % 64] = stored(proj[t, (2 * n_q + n_kv + h) * d :][:d])
        for h in range(n_q):
            q, kv = turn(proj[t, 2 * h * d :][:d], q_norm, t), h // (n_q // n_kv)
            spans = [(c, min(64, t + 1 - 64 * c)) for c in range(t // 64 + 1)]
            scores = [kernels.attn_scores(q, keys[c, kv, :n], scale) for c, n in spans]
            top = max(s.max() for s in scores)
            o, total_l = np.zeros(d, np.float32), np.float32(0)
            for (c, n), s in zip(spans, scores, strict=True):
                part_l, _, part_o = kernels.attn_values(s, values[c, kv, :n], top)
                o, total_l = o + part_o, total_l + part_l
            out[t, h * d : (h + 1) * d] = kernels.mul_sigmoid(o / total_l, proj[t, (2 * h + 1) * d :][:d])
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal as bit patterns."""
    return a.shape == b.shape and bool(
        (np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)).all()
    )
