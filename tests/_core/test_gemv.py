"""The integer products: every instruction set of this machine against a slow model in numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from _core.cases import SHAPES, activations, bits, product, weight_kinds, weights
from _core.pack import FORMATS, pack_r16

from coli._core import kernels

ISAS = kernels.available()
TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 64, 101)


@pytest.mark.parametrize("rows, cols", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_gemv_any_shape_equals_the_model(format, rows, cols):
    """A product has one result, whatever the instruction set, the header's size and the number of streams."""
    blocks, x, expected = product(format, "random", rows, cols, "random")
    assert blocks.size == kernels.matrix_bytes(format, rows, cols)
    for isa in ISAS:
        q, scale, sum, _ = kernels.quantize(x, isa=isa)
        y = kernels.gemv(blocks, format, rows, cols, q, scale, sum, isa=isa)
        np.testing.assert_array_equal(bits(y), bits(expected), err_msg=isa)


@pytest.mark.parametrize("x_kind", ["random", "extreme", "positive", "zero_groups"])
@pytest.mark.parametrize("format", FORMATS)
def test_gemv_edge_weights_equal_the_model(format, x_kind):
    """Extreme sums neither saturate nor wrap; zero groups, subnormal and negative scales are as any other."""
    rows, cols = 80, 640
    for kind in weight_kinds(format):
        blocks, x, expected = product(format, kind, rows, cols, x_kind)
        for isa in ISAS:
            q, scale, sum, _ = kernels.quantize(x, isa=isa)
            y = kernels.gemv(blocks, format, rows, cols, q, scale, sum, isa=isa)
            np.testing.assert_array_equal(bits(y), bits(expected), err_msg=f"{isa} {kind}")
            z = kernels.gemm(blocks, format, rows, cols, q, scale, sum, tokens=[0, 1, 0, 1, 0, 1, 1], isa=isa)
            np.testing.assert_array_equal(bits(z), bits(expected[[0, 1, 0, 1, 0, 1, 1]]), err_msg=f"{isa} {kind} gemm")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_gemm_any_batch_equals_the_gemv_of_each_token(format, isa):
    """A batch is the same per token, for every length of batch and so for every register tile."""
    rows, cols = 112, 384  # seven blocks: steps of four, then of three
    q_w, s_w = weights("random", format, rows, cols)
    blocks = pack_r16(q_w, s_w, format)
    x = activations("random", max(TOKEN_COUNTS), cols)
    alone = kernels.gemv(blocks, format, rows, cols, *kernels.quantize(x, isa="scalar")[:3], isa="scalar")
    for n in TOKEN_COUNTS:
        acts = kernels.quantize(x[:n], isa=isa)[:3]
        batch = kernels.gemm(blocks, format, rows, cols, *acts, isa=isa)
        np.testing.assert_array_equal(bits(batch), bits(alone[:n]), err_msg=f"{n} tokens")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [16, 32, 48, 64])
def test_gemm_gathered_tokens_come_in_the_order_of_the_list(rows, isa):
    """A list of tokens may skip, repeat and reorder; row i of the result belongs to its i-th entry."""
    cols, n = 256, 200
    rng = np.random.default_rng(rows)
    x = activations("random", 60, cols)
    for format in FORMATS:
        blocks = pack_r16(*weights("random", format, rows, cols), format)
        acts = kernels.quantize(x, isa="scalar")[:3]
        alone = kernels.gemv(blocks, format, rows, cols, *acts, isa="scalar")
        tokens = rng.integers(0, 60, n)
        gathered = kernels.gemm(blocks, format, rows, cols, *acts, tokens=tokens, isa=isa)
        np.testing.assert_array_equal(bits(gathered), bits(alone[tokens]), err_msg=format)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_gemv_faulty_activation_is_seen_in_every_row(format, isa):
    """A NaN in one group of x makes every output of that token NaN, and no other token's."""
    rows, cols = 48, 256
    blocks = pack_r16(*weights("random", format, rows, cols), format)
    x = activations("random", 9, cols)
    x[4, 200] = np.inf
    acts = kernels.quantize(x, isa=isa)[:3]
    for y in (
        kernels.gemv(blocks, format, rows, cols, *acts, isa=isa),
        kernels.gemm(blocks, format, rows, cols, *acts, isa=isa),
    ):
        assert np.isnan(y[4]).all()
        assert np.isfinite(np.delete(y, 4, axis=0)).all()


def test_gemv_short_blocks_are_refused():
    """Blocks that end before the matrix does are an error that names both sizes."""
    acts = kernels.quantize(activations("random", 1, 128))[:3]
    with pytest.raises(ValueError, match="takes 2176 bytes, blocks has 2175"):
        kernels.gemv(np.zeros(2175, np.uint8), "i8_row", 16, 128, *acts)


def test_gemm_token_out_of_range_is_refused():
    """A token that q does not have is an error, not a read past its end."""
    blocks = pack_r16(*weights("random", "i8_row", 16, 128), "i8_row")
    acts = kernels.quantize(activations("random", 3, 128))[:3]
    with pytest.raises(ValueError, match="1 or more of the 3 tokens"):
        kernels.gemm(blocks, "i8_row", 16, 128, *acts, tokens=[0, 3])


def test_table_unknown_name_is_refused():
    """An instruction set is asked for by a name of this build, and the message lists what runs here."""
    with pytest.raises(ValueError, match="sse9 is not an instruction set of this build; available: .*scalar"):
        kernels.quantize(np.zeros((1, 128), np.float32), isa="sse9")


@pytest.mark.parametrize("isa", ISAS)
def test_read_xor_any_streams_equals_numpy(isa):
    """The yardstick reads every byte of every stream exactly once."""
    data = np.random.default_rng(0).integers(0, 256, 64 * 12 * 5, dtype=np.uint8)
    expected = np.bitwise_xor.reduce(data.view(np.uint64))
    for streams in (1, 2, 3, 4):
        assert kernels.read_xor(data, streams=streams, isa=isa) == expected
