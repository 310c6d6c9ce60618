"""Whole layers, on a card and emulated, against the CPU, bit for bit, however positions are cut into calls."""

from __future__ import annotations

import numpy as np
import pytest
from devices.cuda.machines import CARD, machine, on
from devices.cuda.support import activations, attention, deltanet, matrix_spec, product, same_bits

from coli._core import kernels
from coli.container.layout import matrix_layout
from coli.devices.base import MatrixSpec
from coli.devices.cuda import probe
from coli.devices.cuda.mixer import MixerSpec

EPS = np.float32(1e-6)
MIB = 1 << 20


@pytest.fixture(scope="module")
def card(request):
    with machine(request.param):
        device = probe.list_devices()[0]
        device.open_arena((512 if request.param == CARD else 16) * MIB, 0, None)
        yield device
        device.close()


def projections(rng, into_rows: int, hidden: int, width: int):
    """Both matrices with small scales, so that activations keep their size over both."""
    return [matrix_spec(rng, "i8_row", rows, cols) for rows, cols in ((into_rows, hidden), (hidden, width))]


def layout_of(m: MatrixSpec):
    return matrix_layout(m.format, m.rows, m.cols)


def run(card, mixer, x, cuts, cos, sin):
    """All positions in the given cuts; the last two calls on a copy of the state."""
    state, found, at = card.new_state(mixer), [], 0
    for i, n in enumerate(cuts):
        if i == len(cuts) - 2:
            copied = state.copy()
            state.close()
            state = copied
        found.append(card.mix(mixer, state, at, x[at : at + n], cos[at : at + n], sin[at : at + n]))
        at += n
    state.close()
    return np.concatenate(found)


@pytest.mark.parametrize("cuts", [[1] * 6, [70, 1, 1], [5, 20, 1]])
@pytest.mark.parametrize(
    ("card", "hidden", "n_qk", "heads", "dk", "dv"),
    on(card=[(2048, 16, 32, 128, 128), (64, 2, 4, 16, 16)], emulated=[(64, 2, 4, 16, 16)]), indirect=["card"],
)  # fmt: skip
def test_deltanet_layer_equals_the_cpu(card, hidden, n_qk, heads, dk, dv, cuts):
    """In-projection, convolution, recurrence, gated norm, out-projection."""
    rng = np.random.default_rng(hidden)
    channels, total, taps = 2 * n_qk * dk + heads * dv, sum(cuts), 4
    into, out = projections(rng, channels + heads * dv, hidden, heads * dv)
    ba_values = (rng.normal(0, 0.1, (2 * heads, hidden)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    layout = matrix_layout("bf16", 2 * heads, hidden)
    ba = MatrixSpec("ba", "bf16", 2 * heads, hidden, layout.block_bytes, layout.n_blocks, layout.n_groups,
                    ba_values.view(np.uint8).reshape(-1))  # fmt: skip
    vectors = {
        "conv": rng.normal(0, 0.5, (taps, channels)).astype(np.float32),
        "exp_a_log": rng.uniform(0.1, 2, heads).astype(np.float32),
        "dt_bias": rng.normal(0, 1, heads).astype(np.float32),
        "dn_norm": rng.normal(1, 0.1, dv).astype(np.float32),
    }
    q_scale = float(np.float32(dk**-0.5))
    geometry = {
        "dn_k_heads": n_qk, "dn_v_heads": heads, "dn_k_dim": dk, "dn_v_dim": dv, "conv_taps": taps, "q_scale": q_scale,
        "eps": EPS,
    }  # fmt: skip
    x = activations(rng, total, hidden)
    proj, b_a = product(into.data, layout_of(into), x), kernels.dense(ba_values, x)
    o, _ = deltanet(proj, b_a, vectors["conv"], vectors["exp_a_log"], vectors["dt_bias"], vectors["dn_norm"], n_qk, dk,
                    np.float32(q_scale), EPS)  # fmt: skip
    mixer = card.mixer(MixerSpec(False, geometry, vectors, ba), card.upload(into), card.upload(out))
    nothing = np.empty((total, 0), np.float32)
    assert same_bits(run(card, mixer, x, cuts, nothing, nothing), product(out.data, layout_of(out), o))


@pytest.mark.parametrize("cuts", [[1] * 6, [63, 1, 1, 1], [130, 1, 20]])
@pytest.mark.parametrize(
    ("card", "hidden", "n_q", "n_kv", "d", "half"),
    on(card=[(2048, 16, 2, 256, 32), (64, 4, 2, 32, 4)], emulated=[(64, 4, 2, 32, 4)]), indirect=["card"],
)  # fmt: skip
@pytest.mark.parametrize("f16", [True, False])
def test_attention_layer_equals_the_cpu(card, hidden, n_q, n_kv, d, half, f16, cuts):
    """In-projection, norms, RoPE, cache, attention, gate, out-projection."""
    rng = np.random.default_rng(hidden)
    total = sum(cuts)
    into, out = projections(rng, (2 * n_q + 2 * n_kv) * d, hidden, n_q * d)
    vectors = {name: rng.normal(1, 0.1, d).astype(np.float32) for name in ("q_norm", "k_norm")}
    angle = rng.uniform(-3, 3, (total, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    scale = float(np.float32(d**-0.5))
    geometry = {"n_q_heads": n_q, "n_kv_heads": n_kv, "head_dim": d, "rotary_half": half, "kv_f16": f16, "eps": EPS,
                "attn_scale": scale}  # fmt: skip
    x = activations(rng, total, hidden)
    proj = product(into.data, layout_of(into), x)
    o = attention(proj, vectors["q_norm"], vectors["k_norm"], cos, sin, n_q, n_kv, np.float32(scale), EPS,
                  np.float16 if f16 else np.float32)  # fmt: skip
    mixer = card.mixer(MixerSpec(True, geometry, vectors), card.upload(into), card.upload(out))
    assert same_bits(run(card, mixer, x, cuts, cos, sin), product(out.data, layout_of(out), o))
