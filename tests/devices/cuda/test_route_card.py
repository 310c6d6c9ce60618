"""What route.cu does between two mixers, on a card and emulated, against the CPU's kernels, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from devices.cuda.cards import Card
from devices.cuda.support import (
    BLOCKS,
    activations,
    ffn,
    matrix_bytes,
    product,
    same_bits,
    slab_bytes,
)

from coli._core import kernels
from coli.container.layout import matrix_layout, slab_layout
from coli.devices.cuda import plan
from coli.devices.cuda.context import Acts
from coli.devices.cuda.spanplan import _slabs

EPS = np.float32(1e-6)
MAIL_BYTES = 256
ANSWERED = 16  # words


def quantized(card: Card, x: np.ndarray) -> Acts:
    """x (T, n) quantised on the card."""
    t, n = x.shape
    groups = -(-n // 128)
    q, scale, sums, _ = kernels.quantize(np.ascontiguousarray(x), n_groups=groups)
    return Acts(card.put(q), card.put(scale), card.put(sums), t, groups)


def room_for_acts(card: Card, t: int, groups: int) -> Acts:
    return Acts(card.room(groups, t, 128, dtype=np.int8), card.room(groups, t), card.room(groups, t), t, groups)


def padded(x: np.ndarray) -> np.ndarray:
    """Rows as they lie on the card: whole groups of 128, NaN behind the last value."""
    t, n = x.shape
    out = np.full((t, -(-n // 128) * 128), np.nan, np.float32)
    out[:, :n] = x
    return out


def same_norm(card: Card, x: np.ndarray, w: np.ndarray, xn_at: int, acts: Acts) -> None:
    """xn and acts are the norm of x, zeros behind the last value."""
    t, n = x.shape
    xn = np.stack([kernels.rmsnorm(np.ascontiguousarray(row), w, EPS) for row in x])
    got = card.get(xn_at, t, acts.n_groups * 128)
    assert same_bits(got[:, :n], xn)
    assert (got[:, n:] == 0).all()
    q, scale, sums, _ = kernels.quantize(xn, n_groups=acts.n_groups)
    assert (card.get(acts.q, acts.n_groups, t, 128, dtype=np.int8) == q).all()
    assert same_bits(card.get(acts.scale, acts.n_groups, t), scale)
    assert (card.get(acts.sum, acts.n_groups, t, dtype=np.int32) == sums).all()


@pytest.mark.parametrize("n", [2048, 64, 100, 5000, 33])
def test_norms_equal_the_cpu(card, n):
    """Rows that come up, residuals, rows that are wanted: x, its norm, the quantised norm and the host's copy."""
    rng, t, groups = np.random.default_rng(n), 3, -(-n // 128)
    x, y = activations(rng, t, n), activations(rng, t, n)
    w = rng.normal(1, 0.2, n).astype(np.float32)
    w_at, width, threads, shared = card.put(w), groups * 128, 32 * min(32, groups), 4 * n + 4
    x_at, xn_at, acts = card.room(t, width), card.room(t, width), room_for_acts(card, t, groups)
    words = np.arange(1001, dtype=np.uint32)
    list_at = card.room(1001, dtype=np.uint32)
    host = np.zeros((t, n + 7), np.float32)
    host[:, :n] = x
    card.run("begin_rows", "", (t + 2,), threads, shared, card.put(host), n + 7, x_at, w_at, n, EPS, xn_at, acts, t,
             card.put(words), list_at, 1001)  # fmt: skip
    assert same_bits(card.get(x_at, t, width)[:, :n], x)
    assert (card.get(list_at, 1001, dtype=np.uint32) == words).all()
    same_norm(card, x, w, xn_at, acts)
    host_at = card.room(t, n)
    card.run("residual_norm", "", (t,), threads, shared, x_at, card.put(y), n, w_at, n, EPS, xn_at, host_at, n, acts)
    total = kernels.add(x, y)
    assert same_bits(card.get(x_at, t, width)[:, :n], total)
    same_norm(card, total, w, xn_at, acts)
    assert same_bits(card.get(host_at, t, n), card.get(xn_at, t, width)[:, :n])
    acts, rows = acts._replace(stride=2), np.array([2, 0], np.int32)
    card.run("gather_norm", "", (2,), threads, shared, x_at, card.put(rows), w_at, n, EPS, xn_at, acts)
    same_norm(card, total[rows], w, xn_at, acts)
    card.run("send_rows", "", (t,), 256, 0, x_at, width, n, host_at)
    assert same_bits(card.get(host_at, t, n), total)


@pytest.mark.parametrize("format", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("cols", "rows", "t"), [(2048, 5, 1), (100, 4, 11), (5000, 3, 2), (31, 1, 9)])
def test_router_logits_equal_the_cpu(card, format, cols, rows, t):
    """Two matrices at once, columns beyond what registers hold, several tiles of rows."""
    rng = np.random.default_rng(cols)
    first, second = matrix_layout(format, rows, cols), matrix_layout(format, 1, cols)
    w, v = matrix_bytes(rng, first), matrix_bytes(rng, second)
    x = activations(rng, t, cols)
    y_at, z_at = card.room(t, rows), card.room(t, 1)
    card.run("router_logits", format, (-(-(rows + 1) // 2), -(-t // 8)), 64, 0, card.put(w), rows, y_at, card.put(v), 1,
             z_at, first.block_bytes, cols, card.put(padded(x)), -(-cols // 128) * 128, t)  # fmt: skip
    assert same_bits(card.get(y_at, t, rows), product(w, first, x))
    assert same_bits(card.get(z_at, t, 1), product(v, second, x))


@pytest.mark.parametrize(
    ("n", "top_k", "t"), [(256, 8, 3), (16, 4, 40), (33, 1, 2), (512, 32, 2), (1000, 10, 1), (300, 8, 9)]
)
@pytest.mark.parametrize("asks", [True, False])
def test_chosen_experts_equal_the_cpu(card, n, top_k, t, asks):
    """Choice, order, ties, weights, gates, jobs; and what the host is told when somebody is missing."""
    rng = np.random.default_rng(n)
    logits = rng.normal(0, 2, (t, n)).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties, and zeros of either sign
    if t > 1:
        logits[1] = -0.0
        logits[1, ::2] = 0.0
    gate = rng.normal(0, 3, t).astype(np.float32)
    slots = rng.integers(1, 1 << 40, n).astype(np.uint64) * np.uint64(256)
    slots[rng.random(n) < 0.3] = 0
    w_at, gate_at, jobs_at, idx_at = card.room(t, top_k), card.room(t), card.room(t * top_k * 4), card.room(t, top_k)
    chosen_at = card.room(t, top_k)
    external_at, missing_at = card.room(t, top_k, dtype=np.uint8), card.room(1)
    ask_at, mail_at = card.put(np.array([41, 7], np.uint32)), card.put(np.zeros(MAIL_BYTES, np.uint8))
    per_lane = next(per for per in (8, 16, 32) if n <= 32 * per)
    card.run("choose_experts", str(per_lane), (1,), 32 * min(32, t), 8 * n, card.put(logits), card.put(gate), n,
             top_k, t, card.put(slots), w_at, gate_at, jobs_at, chosen_at, idx_at, external_at, missing_at, ask_at,
             mail_at if asks else 0)  # fmt: skip
    wanted = [kernels.router(row, top_k) for row in logits]
    idx = np.stack([i for i, _ in wanted])
    for at in (idx_at, chosen_at):
        assert (card.get(at, t, top_k, dtype=np.int32) == idx).all()
    assert same_bits(card.get(w_at, t, top_k), np.stack([w for _, w in wanted]))
    assert same_bits(card.get(gate_at, t), kernels.sigmoid(gate))
    jobs = card.get(jobs_at, t * top_k, dtype=plan.JOB)
    assert (jobs["slab"] == slots[idx].reshape(-1)).all()
    assert (jobs["row"] == np.repeat(np.arange(t), top_k)).all() and (jobs["out"] == np.arange(t * top_k)).all()
    missing = int((slots[idx] == 0).sum())
    expected = ([42, missing], 42) if asks else ([41, 7], 0)
    assert (card.get(ask_at, 2, dtype=np.uint32).tolist(), int(card.get(mail_at, 1, dtype=np.uint32)[0])) == expected
    if asks:
        assert (card.get(external_at, t, top_k, dtype=np.uint8) == (slots[idx] != 0)).all()
        assert card.get(missing_at, 1, dtype=np.uint32)[0] == missing


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("shared_format", BLOCKS)
@pytest.mark.parametrize(("hidden", "dim", "shared_dim"), [(256, 128, 384), (100, 40, 24), (640, 24, 136)])
def test_experts_of_few_rows_equal_the_cpu(card, format, shared_format, hidden, dim, shared_dim):
    """Routed and shared experts of any two formats in one launch each way; a job without a slab is left alone."""
    rng, t, k = np.random.default_rng(hidden), 2, 3
    slab, shared = slab_layout(format, hidden, dim), slab_layout(shared_format, hidden, shared_dim)
    experts = [slab_bytes(rng, slab) for _ in range(3)]
    shared_bytes = slab_bytes(rng, shared)
    x = activations(rng, t, hidden)
    at, shared_at, acts = [card.put(e) for e in experts], card.put(shared_bytes), quantized(card, x)
    jobs = np.zeros(t * k, plan.JOB)
    which = [0, 2, -1, 1, -1, 0]
    for i, e in enumerate(which):
        jobs[i] = (0 if e < 0 else at[e]), i // k, i
    jobs_at = card.put(jobs)
    h_at, shared_h_at = card.room(t * k, dim), card.room(t, shared_dim)
    y_at, shared_y_at = card.room(t * k, hidden), card.room(t, hidden)
    of, of_shared, groups = _slabs(slab), _slabs(shared), acts.n_groups
    card.run("moe_gate_up", "", (t * of_shared.gate_blocks + t * k * of.gate_blocks,), 64 * min(8, -(-groups // 2)),
             128 * groups, of, jobs_at, h_at, of_shared, shared_at, shared_h_at, acts, t)  # fmt: skip
    most = max(of.down_groups, of_shared.down_groups)
    card.run("moe_down", "", (t * of_shared.down_blocks + t * k * of.down_blocks,), 32 * min(16, most), 64 * most, of,
             jobs_at, h_at, y_at, of_shared, shared_at, shared_h_at, shared_y_at, hidden, t)  # fmt: skip
    y = card.get(y_at, t * k, hidden)
    for i, e in enumerate(which):
        if e < 0:
            assert (y[i].view(np.uint32) == 0xFFFFFFFF).all()
        else:
            assert same_bits(y[i], ffn(experts[e], slab, x[i // k : i // k + 1])[0])
    assert same_bits(card.get(shared_y_at, t, hidden), ffn(shared_bytes, shared, x))


@pytest.mark.parametrize(("n", "top_k"), [(2048, 8), (100, 2), (1000, 5)])
@pytest.mark.parametrize("host", ["nothing", "ranks", "ranks and the shared expert"])
def test_sum_over_ranks_equals_the_cpu(card, n, top_k, host):
    """Experts in rank order wherever they come from, the shared expert, the residual, the next norm."""
    rng, t, groups = np.random.default_rng(n), 3, -(-n // 128)
    x, y = activations(rng, t, n), rng.normal(0, 1, (t, top_k, n)).astype(np.float32)
    weights, shared_y = rng.normal(0, 1, (t, top_k)).astype(np.float32), rng.normal(0, 1, (t, n)).astype(np.float32)
    gate, w = rng.normal(0, 1, t).astype(np.float32), rng.normal(1, 0.1, n).astype(np.float32)
    here = rng.random((t, top_k)) < (1.1 if host == "nothing" else 0.5)
    jobs = np.zeros(t * top_k, plan.JOB)
    jobs["slab"] = here.reshape(-1) * np.uint64(256)
    on_card, answers = y.copy(), y.copy()
    on_card[~here], answers[here] = np.nan, np.nan
    shared_asked = host.endswith("expert")
    mail = np.zeros(MAIL_BYTES // 4, np.uint32)
    mail[ANSWERED] = 42
    acts = room_for_acts(card, t, groups)
    x_at, xn_at, host_at = card.put(padded(x)), card.room(t, groups * 128), card.room(t, n)
    ask_at = card.put(np.array([42, (~here).sum()], np.uint32))
    card.run("combine_norm", "", (t,), 32 * min(32, groups), 4 * n + 4, x_at, n, card.put(on_card),
             card.put(np.full_like(shared_y, np.nan) if shared_asked else shared_y), card.put(weights), card.put(gate),
             top_k, card.put(jobs), card.put(answers) if host != "nothing" else 0,
             card.put(shared_y) if shared_asked else 0, ask_at, card.put(mail), card.put(w), EPS, xn_at, acts,
             host_at)  # fmt: skip
    for r in range(t):
        out = None
        for j in range(top_k):
            out = kernels.axpy(weights[r, j], y[r, j], out)
        x[r] = kernels.add(x[r], kernels.axpy(gate[r], shared_y[r], out))
    assert same_bits(card.get(host_at, t, n), x)
    assert same_bits(card.get(x_at, t, groups * 128)[:, :n], x)
    same_norm(card, x, w, xn_at, acts)
