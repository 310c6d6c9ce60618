"""What lies between a layer's projections, on a card and emulated, against the CPU, bit for bit: several sequences at
once, and positions cut into calls in any way."""

from __future__ import annotations

import numpy as np
import pytest
from devices.cuda.cards import Card
from devices.cuda.support import attention, deltanet, matrix_spec, product, same_bits

from coli._core import kernels
from coli.container.layout import matrix_layout
from coli.devices.base import DeviceError, MatrixSpec, MixerSpec
from coli.devices.cuda import mixer as mixers
from coli.devices.cuda import plan
from coli.devices.cuda.batch import BatchList, parts_of
from coli.devices.cuda.mixer import Mixer

EPS = np.float32(1e-6)


class Sequences:
    """Several sequences of one layer: their projected rows, states on the card, and what the CPU answers."""

    def __init__(self, card: Card, mixer: Mixer, xn, proj, wanted, turns) -> None:
        self.card, self.mixer, self.xn, self.proj, self.wanted, self.turns = card, mixer, xn, proj, wanted, turns
        self.states = [mixers.new_state(mixer, card.context) for _ in proj]
        self.at = [0] * len(proj)

    def run(self, runs: list[tuple[int, int]]) -> None:
        """Take (sequence, rows) on together and compare."""
        card, mixer, (cos, sin) = self.card, self.mixer, self.turns
        context, (_, out) = card.context, mixer.out
        n = sum(rows for _, rows in runs)
        spans = [(i, slice(self.at[i], self.at[i] + rows)) for i, rows in runs]
        parts = parts_of([(rows, self.at[i]) for i, rows in runs])
        layout = BatchList(n, len(runs), cos.shape[1], 2)
        raw = np.zeros(layout.n_bytes, np.uint8)
        layout.put_rows(raw, parts, cos, sin)
        for i, span in spans:
            self.states[i].reach(span.stop)
        pairs = np.zeros((2, len(runs), 2), np.uint64)  # the second of two layers is this one
        pairs[1] = [self.states[i].addresses() for i, _ in runs]
        layout.put_states(raw, pairs)
        list_at = card.put(raw)
        chunks = max(-(-span.stop // 64) for _, span in spans)
        batch = layout.batch(list_at, max(rows for _, rows in runs), chunks)
        xn_at = card.put(np.concatenate([self.xn[i][span] for i, span in spans]))
        proj_at = card.put(np.concatenate([self.proj[i][span] for i, span in spans]))
        at = card.room(plan.acts_at(0, n, out.n_groups)[1], dtype=np.uint8)
        acts, _ = plan.acts_at(at, n, out.n_groups)
        mixers.core(context, card.stream, mixer, batch, layout.states_at(list_at, 1),
                    lambda n_bytes: card.room(max(n_bytes, 4), dtype=np.uint8), xn_at, proj_at,
                    card.room(n, out.cols), acts)  # fmt: skip
        wanted = np.concatenate([self.wanted[i][span] for i, span in spans])
        q, scale, sums, _ = kernels.quantize(wanted, n_groups=out.n_groups)
        assert same_bits(card.get(acts.scale, out.n_groups, n), scale)
        assert (card.get(acts.q, out.n_groups, n, 128, dtype=np.int8) == q).all()
        assert (card.get(acts.sum, out.n_groups, n, dtype=np.int32) == sums).all()
        for i, span in spans:
            self.at[i] = span.stop

    def close(self) -> None:
        """Give the states back."""
        for state in self.states:
            state.close()


def deltanet_sequences(card, lengths, n_qk, heads, dk, dv, taps) -> tuple[Sequences, list[np.ndarray]]:
    """Sequences of a DeltaNet layer, and the states that they end with."""
    rng, hidden = np.random.default_rng(dk), 128
    channels = 2 * n_qk * dk + heads * dv
    ba_values = (rng.normal(0, 0.3, (2 * heads, hidden)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    layout = matrix_layout("bf16", 2 * heads, hidden)
    ba = MatrixSpec("ba", "bf16", 2 * heads, hidden, layout.block_bytes, layout.n_blocks, layout.n_groups,
                    ba_values.view(np.uint8).reshape(-1))  # fmt: skip
    vectors = {
        "conv": rng.normal(0, 0.5, (taps, channels)).astype(np.float32),
        "exp_a_log": rng.uniform(0.1, 2, heads).astype(np.float32),
        "dt_bias": rng.normal(0, 1, heads).astype(np.float32),
        "dn_norm": rng.normal(1, 0.1, dv).astype(np.float32),
    }
    q_scale = np.float32(dk**-0.5)
    geometry = {"dn_k_heads": n_qk, "dn_v_heads": heads, "dn_k_dim": dk, "dn_v_dim": dv, "conv_taps": taps,
                "q_scale": q_scale, "eps": EPS}  # fmt: skip
    mixer = Mixer(
        MixerSpec(False, geometry, vectors, ba),
        (0, matrix_layout("i8_row", channels + heads * dv, hidden)),
        (0, matrix_layout("i8_row", hidden, heads * dv)),
        {name: card.put(v) for name, v in vectors.items()},
        card.put(ba_values),
    )
    xn = [rng.normal(0, 1, (n, hidden)).astype(np.float32) for n in lengths]
    proj = [rng.normal(0, 1, (n, channels + heads * dv)).astype(np.float32) for n in lengths]
    ends = [
        deltanet(p, kernels.dense(ba_values, x), *vectors.values(), n_qk, dk, q_scale, EPS)
        for x, p in zip(xn, proj, strict=True)
    ]
    nothing = np.empty((max(lengths), 0), np.float32)
    sequences = Sequences(card, mixer, xn, proj, [o for o, _ in ends], (nothing, nothing))
    return sequences, [state for _, state in ends]


ALONE = [[(0, 1)]] * 5
SIDE_BY_SIDE = [[(0, 1)], [(1, 1), (0, 1)], [(0, 1), (1, 1), (2, 1)], [(1, 1), (0, 1)]]
IN_PIECES = [[(0, 7)], [(0, 1)], [(0, 40)]]
TOGETHER = [[(0, 3), (1, 1), (2, 34)], [(1, 1), (0, 2)], [(2, 1), (0, 1), (1, 1)], [(1, 17), (0, 2)]]


@pytest.mark.parametrize(
    ("n_qk", "heads", "dk", "dv", "taps", "runs"),
    [
        (16, 32, 128, 128, 4, TOGETHER),
        (2, 4, 128, 128, 4, SIDE_BY_SIDE),
        (2, 4, 64, 96, 3, SIDE_BY_SIDE),
        (2, 4, 16, 16, 4, ALONE),
        (2, 4, 16, 16, 4, TOGETHER),
        (1, 3, 40, 24, 3, IN_PIECES),
        (1, 3, 40, 24, 3, TOGETHER),
        (1, 2, 128, 256, 4, IN_PIECES),
        (1, 2, 144, 20, 2, ALONE),
        (1, 2, 144, 20, 2, TOGETHER),
    ],
)
def test_deltanet_parts_equal_the_cpu(card, n_qk, heads, dk, dv, taps, runs):
    """Gates, convolution, recurrence, gated norm and quantise of several sequences, however they are cut."""
    lengths = [max(1, sum(n for run in runs for i, n in run if i == s)) for s in range(3)]
    sequences, states = deltanet_sequences(card, lengths, n_qk, heads, dk, dv, taps)
    for run in runs:
        sequences.run(run)
    for held, at, length, state in zip(sequences.states, sequences.at, lengths, states, strict=True):
        if at == length:
            assert same_bits(card.get(held.state_at, heads, dk, dv), state)
    sequences.close()


def attention_sequences(card, lengths, n_q, n_kv, d, half, f16) -> Sequences:
    """Sequences of an attention layer."""
    rng, hidden, width = np.random.default_rng(d), 128, (2 * n_q + 2 * n_kv) * d
    vectors = {name: rng.normal(1, 0.1, d).astype(np.float32) for name in ("q_norm", "k_norm")}
    angle = rng.uniform(-3, 3, (max(lengths), half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    scale = np.float32(d**-0.5)
    geometry = {"n_q_heads": n_q, "n_kv_heads": n_kv, "head_dim": d, "rotary_half": half, "kv_f16": f16, "eps": EPS,
                "attn_scale": scale}  # fmt: skip
    mixer = Mixer(
        MixerSpec(True, geometry, vectors),
        (0, matrix_layout("i8_row", width, hidden)),
        (0, matrix_layout("i8_row", hidden, n_q * d)),
        {name: card.put(v) for name, v in vectors.items()},
    )
    proj = [rng.normal(0, 1, (n, width)).astype(np.float32) for n in lengths]
    wanted = [
        attention(p, *vectors.values(), cos, sin, n_q, n_kv, scale, EPS, np.float16 if f16 else np.float32)
        for p in proj
    ]
    return Sequences(card, mixer, [np.zeros((n, hidden), np.float32) for n in lengths], proj, wanted, (cos, sin))


ACROSS = [[(0, 63)], [(0, 1)], [(0, 1)], [(0, 2)], [(0, 70)]]
MIXED = [[(0, 66), (1, 1), (2, 64)], [(1, 1), (0, 1)], [(2, 1), (0, 3), (1, 5)], [(2, 1), (0, 1), (1, 1)]]


@pytest.mark.parametrize(
    ("n_q", "n_kv", "d", "half", "f16", "runs"),
    [
        (16, 2, 256, 32, True, MIXED),
        (16, 2, 256, 32, False, ALONE),
        (2, 1, 256, 32, False, ACROSS),
        (4, 2, 32, 4, True, ACROSS),
        (4, 2, 32, 4, False, MIXED),
        (3, 1, 40, 10, True, MIXED),
        (3, 1, 40, 10, False, ACROSS),
        (10, 1, 128, 16, True, MIXED),
        (40, 1, 4, 1, True, [[(0, 1)], [(0, 64)], [(0, 1)]]),
    ],
)
def test_attention_parts_equal_the_cpu(card, n_q, n_kv, d, half, f16, runs):
    """Norm, RoPE, cache, softmax, gate and quantise of several sequences, however they are cut."""
    lengths = [max(1, sum(n for run in runs for i, n in run if i == s)) for s in range(3)]
    sequences = attention_sequences(card, lengths, n_q, n_kv, d, half, f16)
    for run in runs:
        sequences.run(run)
    sequences.close()


def test_attention_long_context_in_passes_equals_the_cpu(card, monkeypatch):
    """Tiles that do not fit the scratch at once are taken one after the other."""
    monkeypatch.setattr(mixers, "SCORES_BYTES", 100_000)
    sequences = attention_sequences(card, [200], 8, 1, 32, 4, True)
    sequences.run([(0, 70)])
    sequences.run([(0, 130)])
    sequences.close()


@pytest.mark.parametrize("gates", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("format", ["i8_row", "i8_group", "i4_row", "i4_group"])
def test_projection_with_gates_equals_the_cpu(card, format, gates):
    """One launch: the quantised product of a row, and the unquantised one of b and a."""
    rng, rows, heads, hidden = np.random.default_rng(5), 200, 19, 2200
    packed, layout = matrix_spec(rng, format, rows, hidden).data, matrix_layout(format, rows, hidden)
    of = rng.normal(0, 0.3, (2 * heads, hidden)).astype(np.float32)
    values = {"f32": of, "f16": of.astype(np.float16), "bf16": (of.view(np.uint32) >> 16).astype(np.uint16)}[gates]
    ba_layout = matrix_layout(gates, 2 * heads, hidden)
    ba = MatrixSpec("ba", gates, 2 * heads, hidden, ba_layout.block_bytes, ba_layout.n_blocks, ba_layout.n_groups,
                    values.view(np.uint8).reshape(-1))  # fmt: skip
    mixer = Mixer(MixerSpec(False, {}, {}, ba), (card.put(packed), layout), (0, layout), {}, card.put(values))
    x = np.zeros((1, layout.n_groups * 128), np.float32)
    x[:, :hidden] = rng.normal(0, 1, hidden)
    at = card.room(plan.acts_at(0, 1, layout.n_groups)[1], dtype=np.uint8)
    acts, _ = plan.acts_at(at, 1, layout.n_groups)
    q, scale, sums, _ = kernels.quantize(x[:, :hidden], n_groups=layout.n_groups)
    for to, array in zip(acts[:3], (q, scale, sums), strict=True):
        card.context.check(card.driver.cuMemcpyHtoD(to, array.ctypes.data, array.nbytes), "copy")
    proj_at = card.room(rows)
    ba_at = mixers.project(card, mixer, 1, acts, card.put(x), lambda n: card.room(n, dtype=np.uint8), proj_at)
    assert same_bits(card.get(ba_at, 1, 2 * heads), kernels.dense(values, x[:, :hidden].copy()))
    assert same_bits(card.get(proj_at, 1, rows), product(packed, layout, x[:, :hidden].copy()))


@pytest.mark.parametrize(
    ("is_attention", "wrong", "said"),
    [
        (True, {"head_dim": 258}, "heads of 258 values"),
        (True, {"head_dim": 30}, "heads of 30 values"),
        (False, {"conv_taps": 34}, "a convolution of 34 taps"),
        (False, {"dn_k_dim": 272}, "keys of 272 values"),
        (False, {"dn_v_dim": 528}, "values of 528"),
    ],
)
def test_mixer_beyond_the_kernels_is_refused(is_attention, wrong, said):
    """A shape that no kernel takes is a DeviceError when the layer is made, so that it stays on the CPU."""
    good = {"head_dim": 256, "conv_taps": 33, "dn_k_dim": 256, "dn_v_dim": 512}
    mixers.require_fit(MixerSpec(is_attention, good, {}))
    with pytest.raises(DeviceError, match=said):
        mixers.require_fit(MixerSpec(is_attention, good | wrong, {}))
