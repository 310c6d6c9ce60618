"""The kernels between a layer's products on a real card against the CPU's, bit for bit.  Skipped without one."""

from __future__ import annotations

import numpy as np
import pytest
from devices.cuda.support import attention, deltanet, same_bits

from coli._core import kernels
from coli.devices.cuda import probe
from coli.devices.cuda.context import Acts, Context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not isinstance(probe.probe_cuda(), list), reason="no NVIDIA card")]
EPS = np.float32(1e-6)


class Card:
    """Arrays in and out of a context, outputs poisoned first."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        card = probe.probe_cuda()[0]
        self.driver = driver
        self.context = Context(card.cuda_ordinal, card.arch, card.name)
        self.stream = self.context.stream()
        self.held: list[int] = []

    def put(self, array: np.ndarray) -> int:
        """Device address of a copy."""
        array = np.ascontiguousarray(array)
        at = self.context.alloc(max(array.nbytes, 256), "a test")
        self.held.append(at)
        self.context.check(self.driver.cuMemcpyHtoD(at, array.ctypes.data, array.nbytes), "copy")
        return at

    def room(self, *shape: int, dtype=np.float32) -> int:
        """Device address of poisoned memory."""
        return self.put(np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8))

    def get(self, at: int, *shape: int, dtype=np.float32) -> np.ndarray:
        """What is there after all work."""
        out = np.empty(shape, dtype)
        self.context.synchronize(self.stream)
        self.context.check(self.driver.cuMemcpyDtoH(out.ctypes.data, at, out.nbytes), "copy")
        return out

    def run(self, kernel: str, variant: str, grid: tuple[int, ...], threads: int, shared: int, *arguments) -> None:
        """Launch."""
        self.context.launch(kernel, variant, grid, threads, shared, self.stream, *arguments)

    def clear(self) -> None:
        """Free what tests put."""
        for at in self.held:
            self.context.free(at)
        self.held.clear()


@pytest.fixture(scope="module")
def shared_card():
    card = Card()
    yield card
    card.clear()
    card.context.close()


@pytest.fixture
def card(shared_card):
    yield shared_card
    shared_card.clear()


@pytest.mark.parametrize("n", [2048, 64, 100, 4096, 33])
@pytest.mark.parametrize("residual", [True, False])
def test_add_norm_equals_the_cpu(card, n, residual):
    """Residual, RMSNorm and quantise of several rows."""
    rng = np.random.default_rng(n)
    x, y = rng.normal(0, 2, (5, n)).astype(np.float32), rng.normal(0, 1, (5, n)).astype(np.float32)
    w = rng.normal(1, 0.2, n).astype(np.float32)
    groups = -(-n // 128)
    x_at, xn_at = card.put(x), card.room(5, n)
    q_at, s_at, sum_at = card.room(groups * 5 * 128, dtype=np.int8), card.room(groups * 5), card.room(groups * 5)
    card.run("add_norm", "", (5,), 512, 4 * n + 4, x_at, card.put(y) if residual else 0, card.put(w), n, EPS, xn_at,
             Acts(q_at, s_at, sum_at, 5, groups))  # fmt: skip
    total = kernels.add(x, y) if residual else x
    xn = np.stack([kernels.rmsnorm(row, w, EPS) for row in total])
    q, scale, sums, _ = kernels.quantize(xn)
    assert same_bits(card.get(x_at, 5, n), total)
    assert same_bits(card.get(xn_at, 5, n), xn)
    assert (card.get(q_at, groups, 5, 128, dtype=np.int8) == q).all()
    assert same_bits(card.get(s_at, groups, 5), scale)
    assert (card.get(sum_at, groups, 5, dtype=np.int32) == sums).all()


@pytest.mark.parametrize(
    ("n_qk", "heads", "dk", "dv", "taps"), [(16, 32, 128, 128, 4), (2, 4, 16, 16, 4), (1, 3, 40, 24, 3)]
)
@pytest.mark.parametrize("cuts", [[1] * 9, [5, 1, 1, 2], [9]])
def test_deltanet_positions_equal_the_cpu(card, n_qk, heads, dk, dv, taps, cuts):
    """Convolution, recurrence and gated norm, however the positions are cut into calls."""
    rng = np.random.default_rng(dk)
    total, channels = sum(cuts), 2 * n_qk * dk + heads * dv
    width = channels + heads * dv
    proj = rng.normal(0, 1, (total, width)).astype(np.float32)
    ba = rng.normal(0, 1, (total, 2 * heads)).astype(np.float32)
    w = rng.normal(0, 0.5, (taps, channels)).astype(np.float32)
    exp_a, dt = rng.uniform(0.1, 2, heads).astype(np.float32), rng.normal(0, 1, heads).astype(np.float32)
    norm = rng.normal(1, 0.1, dv).astype(np.float32)
    q_scale = np.float32(dk**-0.5)
    wanted, state = deltanet(proj, ba, w, exp_a, dt, norm, n_qk, dk, q_scale, EPS)
    state_at, ring_at = (
        card.put(np.zeros((heads, dk, dv), np.float32)),
        card.put(np.zeros((taps, channels), np.float32)),
    )
    w_at, exp_at, dt_at, norm_at = card.put(w), card.put(exp_a), card.put(dt), card.put(norm)
    found, at, threads = [], 0, -(-max(dk, dv) // 32) * 32
    for n in cuts:
        p_at, ba_at = card.put(proj[at : at + n]), card.put(ba[at : at + n])
        u_at, o_at, pos_at = card.room(n, channels), card.room(n, heads * dv), card.put(np.array([at], np.int64))
        card.run("conv_heads", "", (2 * n_qk + heads,), threads, 4 * dk + 4 + 4 * dv, p_at, width, w_at, taps,
                 channels, n_qk, dk, dv, q_scale, ring_at, pos_at, n, u_at)  # fmt: skip
        warps = -(-dk // 16)
        card.run("deltanet", "", (-(-dv // 32), heads), 32 * warps, 128 * warps, state_at, u_at, channels, ba_at,
                 exp_at, dt_at, n_qk, heads, dk, dv, n, o_at, heads * dv)  # fmt: skip
        card.run("gated_norm", "", (heads, n), 32, 0, o_at, heads * dv, p_at + 4 * channels, width, norm_at, dv, EPS)
        found.append(card.get(o_at, n, heads * dv))
        at += n
    assert same_bits(np.concatenate(found), wanted)
    assert same_bits(card.get(state_at, heads, dk, dv), state)


@pytest.mark.parametrize("half", [True, False], ids=["f16", "f32"])
@pytest.mark.parametrize(("n_q", "n_kv", "d", "rotary_half"), [(16, 2, 256, 32), (4, 2, 32, 4), (3, 1, 40, 10)])
@pytest.mark.parametrize("cuts", [[1, 1, 1], [63, 1, 1, 2], [150, 1, 50], [130]])
def test_attention_positions_equal_the_cpu(card, n_q, n_kv, d, rotary_half, half, cuts):
    """Norm, RoPE, cache, softmax by chunks and the gate, however the positions are cut into calls."""
    rng = np.random.default_rng(d)
    total = sum(cuts)
    width, scale = (2 * n_q + 2 * n_kv) * d, np.float32(d**-0.5)
    proj = rng.normal(0, 1, (total, width)).astype(np.float32)
    q_norm, k_norm = (rng.normal(1, 0.1, d).astype(np.float32) for _ in range(2))
    angle = rng.uniform(-3, 3, (total, rotary_half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    dtype = np.float16 if half else np.float32
    chunks = -(-total // 64)
    wanted = attention(proj, q_norm, k_norm, cos, sin, n_q, n_kv, scale, EPS, dtype)
    block_bytes = n_kv * 64 * d * np.dtype(dtype).itemsize
    k_at, v_at = (card.room(chunks * block_bytes, dtype=np.uint8) for _ in range(2))
    k_table, v_table = (
        card.put(np.uint64(at) + np.arange(chunks, dtype=np.uint64) * np.uint64(block_bytes)) for at in (k_at, v_at)
    )
    norms = card.put(q_norm), card.put(k_norm)
    found, at, name, room = [], 0, "f16" if half else "f32", chunks + 1
    for n in cuts:
        p_at, pos_at, q_at = card.put(proj[at : at + n]), card.put(np.array([at], np.int64)), card.room(n, n_q * d)
        s_at, m_at, part_at = card.room(n, n_q, room, 64), card.room(n, n_q, room), card.room(n, n_q, room, d + 1)
        o_at, tables = card.room(n, n_q * d), (card.put(cos[at : at + n]), card.put(sin[at : at + n]))
        card.run("attention_prepare", name, (n_q + n_kv, n), 32, 4 * d, p_at, width, *norms, *tables, rotary_half,
                 n_q, n_kv, d, EPS, k_table, v_table, pos_at, q_at)  # fmt: skip
        card.run(
            "attention_scores",
            name,
            (room, n_kv, n),
            256,
            0,
            q_at,
            k_table,
            n_q,
            n_kv,
            d,
            scale,
            pos_at,
            room,
            s_at,
            m_at,
        )
        card.run(
            "attention_values", name, (room, n_q, n), 256, 0, s_at, m_at, v_table, n_q, n_kv, d, pos_at, room, part_at
        )
        card.run("attention_finish", "", (n_q, n), 256, 0, part_at, p_at, width, n_q, d, pos_at, room, o_at, n_q * d)
        found.append(card.get(o_at, n, n_q * d))
        at += n
    assert same_bits(np.concatenate(found), wanted)


@pytest.mark.parametrize(("n", "top_k"), [(256, 8), (16, 4), (33, 1), (512, 32)])
def test_router_equals_the_cpu(card, n, top_k):
    """Choice, order, ties and weights; the gate's sigmoid beside them."""
    rng = np.random.default_rng(n)
    logits = rng.normal(0, 2, (40, n)).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties, and zeros of either sign
    logits[5] = -0.0
    logits[6, ::2] = 0.0
    gate = rng.normal(0, 3, 40).astype(np.float32)
    idx_at, w_at, gate_at = card.room(40, top_k), card.room(40, top_k), card.room(40)
    card.run("router", "", (40,), 32, 4 * n, card.put(logits), card.put(gate), n, top_k, idx_at, w_at, gate_at)
    wanted = [kernels.router(row, top_k) for row in logits]
    assert (card.get(idx_at, 40, top_k, dtype=np.int32) == np.stack([i for i, _ in wanted])).all()
    assert same_bits(card.get(w_at, 40, top_k), np.stack([w for _, w in wanted]))
    assert same_bits(card.get(gate_at, 40), kernels.sigmoid(gate))


def test_combine_equals_the_cpu(card):
    """Experts in rank order, the shared expert, the residual."""
    rng = np.random.default_rng(0)
    rows, top_k, n = 3, 8, 1000
    x, y = rng.normal(0, 1, (rows, n)).astype(np.float32), rng.normal(0, 1, (rows, top_k, n)).astype(np.float32)
    w, shared, gate = (rng.normal(0, 1, s).astype(np.float32) for s in ((rows, top_k), (rows, n), (rows,)))
    x_at = card.put(x)
    card.run(
        "combine",
        "",
        (-(-n // 256), rows),
        256,
        0,
        x_at,
        card.put(y),
        card.put(w),
        top_k,
        card.put(shared),
        card.put(gate),
        n,
    )
    for r in range(rows):
        out = kernels.axpy(w[r, 0], y[r, 0])
        for j in range(1, top_k):
            out = kernels.axpy(w[r, j], y[r, j], out)
        x[r] = kernels.add(x[r], kernels.axpy(gate[r], shared[r], out))
    assert same_bits(card.get(x_at, rows, n), x)
