"""Products and experts of many rows, on a card and emulated, against the CPU, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from devices.cuda.cards import Card
from devices.cuda.support import BLOCKS, activations, ffn, matrix_bytes, product, same_bits, slab_bytes

from coli._core import kernels
from coli.container.layout import matrix_layout, slab_layout
from coli.devices.cuda import plan
from coli.devices.cuda.context import Acts


def put_acts(card: Card, x: np.ndarray, n_groups: int) -> Acts:
    """Rows on the card, quantised by the CPU."""
    q, scale, sums, _ = kernels.quantize(np.ascontiguousarray(x), n_groups=n_groups)
    return Acts(card.put(q), card.put(scale), card.put(sums), len(x), n_groups)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize(
    ("rows", "cols", "tokens", "kind"),
    [(16, 128, 17, "random"), (250, 300, 24, "edges"), (128, 256, 25, "random"), (144, 640, 70, "zeros"),
     (17, 100, 129, "plus"), (260, 128, 64, "minus")],
)  # fmt: skip
def test_gemm_equals_the_cpu(card, format, rows, cols, tokens, kind):
    """Small and large tiles, ragged rows, columns and tokens."""
    rng = np.random.default_rng(rows)
    layout = matrix_layout(format, rows, cols)
    data, x = matrix_bytes(rng, layout, kind), activations(rng, tokens, cols, "edges" if kind == "edges" else "random")
    y_at = card.room(tokens, rows)
    plan.product(card, card.put(data), layout, tokens, put_acts(card, x, layout.n_groups), y_at)
    assert same_bits(card.get(y_at, tokens, rows), product(data, layout, x))


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize(
    ("hidden", "dim", "n_rows", "top_k", "n_experts"),
    [(256, 128, 30, 4, 16), (100, 40, 90, 3, 5), (132, 200, 3, 2, 40)],
)
def test_grouped_experts_equal_the_cpu(card, format, hidden, dim, n_rows, top_k, n_experts):
    """Every pair has its own expert's answer in its own place; pairs of experts that are not here are left alone."""
    rng = np.random.default_rng(hidden)
    slab = slab_layout(format, hidden, dim)
    data = [slab_bytes(rng, slab) for _ in range(n_experts)]
    slabs = np.array([card.put(d) for d in data], np.uint64)
    slabs[[1, n_experts - 1]] = 0
    chosen = np.stack([rng.permutation(n_experts)[:top_k] for _ in range(n_rows)]).astype(np.int32)
    popular = chosen[: n_rows // 2]  # half of the rows choose expert 0 first
    popular[:, 1:][popular[:, 1:] == 0] = popular[:, :1].repeat(top_k - 1, 1)[popular[:, 1:] == 0]
    popular[:, 0] = 0
    x = activations(rng, n_rows, hidden)
    y_at = card.room(n_rows * top_k, hidden)
    plan.grouped_experts(card, slab, n_rows, top_k, n_experts, card.put(chosen), card.put(slabs),
                         put_acts(card, x, slab.gate.n_groups), lambda n: card.room(n, dtype=np.uint8),
                         y_at)  # fmt: skip
    y = card.get(y_at, n_rows, top_k, hidden)
    for e in range(n_experts):
        row, rank = np.nonzero(chosen == e)
        if not len(row):
            continue
        if slabs[e]:
            assert same_bits(y[row, rank], ffn(data[e], slab, x[row])), e
        else:
            assert (y[row, rank].view(np.uint32) == 0xFFFFFFFF).all(), e


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("n_rows", [9, 70])
def test_expert_of_rows_equals_the_cpu(card, format, n_rows):
    """The shared expert of many rows."""
    rng = np.random.default_rng(n_rows)
    slab = slab_layout(format, 200, 136)
    data, x = slab_bytes(rng, slab), activations(rng, n_rows, 200)
    y_at = card.room(n_rows, 200)
    plan.expert_of_rows(card, slab, card.put(data), n_rows, put_acts(card, x, slab.gate.n_groups),
                        lambda n: card.room(n, dtype=np.uint8), y_at)  # fmt: skip
    assert same_bits(card.get(y_at, n_rows, 200), ffn(data, slab, x))
