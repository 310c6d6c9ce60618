"""coli/container/layout.py against the figures of the design, and against blocks written out by hand."""

from __future__ import annotations

import pytest

from coli.container.layout import FORMATS, matrix_layout, slab_layout

# Rows and columns of matrices of the 35B-A3B geometry, and their bytes (docs/numerics.md, section 3).
SIZES = [
    ("lm_head", "i8_row", 248320, 2048, 510_545_920),
    ("dnproj", "i8_row", 12288, 2048, 25_264_128),
    ("dnout", "i8_row", 2048, 4096, 8_404_992),
]


@pytest.mark.parametrize(("name", "format", "rows", "cols", "n_bytes"), SIZES)
def test_matrix_bytes_at_35b_geometry_are_those_of_the_design(name, format, rows, cols, n_bytes):
    """The placement's prices and the container's files rest on the same figures."""
    assert matrix_layout(format, rows, cols).total_bytes == n_bytes


def test_attention_and_slab_bytes_at_35b_geometry_are_those_of_the_design():
    """attnproj is two matrices; slabs are whole pages."""
    attention = matrix_layout("i8_row", 9216, 2048).total_bytes + matrix_layout("i8_row", 2048, 4096).total_bytes
    shared, expert = slab_layout("i8_row", 2048, 512).total_bytes, slab_layout("i4_group", 2048, 512).total_bytes
    assert (attention, shared, expert) == (27_353_088, 3_170_304, 1_622_016)
    assert shared % 4096 == expert % 4096 == 0


@pytest.mark.parametrize(
    ("format", "cols", "header_bytes", "block_bytes"),
    [
        ("i4_group", 2048, 512, 16_896),
        ("i4_group", 512, 128, 4_224),
        ("i8_row", 2048, 128, 32_896),
        ("i8_row", 512, 128, 8_320),
        ("i4_row", 2048, 128, 16_512),
        ("i8_group", 2048, 512, 33_280),
        ("i4_group", 48, 128, 1_152),  # one group, header padded from 32 to 128
    ],
)
def test_block_bytes_are_header_plus_payload(format, cols, header_bytes, block_bytes):
    """Scales padded to whole 128 bytes, then 16 rows of padded columns."""
    layout = matrix_layout(format, 16, cols)
    assert (layout.header_bytes, layout.block_bytes, layout.n_blocks) == (header_bytes, block_bytes, 1)


def test_ragged_matrix_is_padded_to_whole_blocks_and_groups():
    """17 rows are two blocks, 129 columns two groups."""
    layout = matrix_layout("i8_row", 17, 129)
    assert (layout.n_blocks, layout.n_groups) == (2, 2)
    assert layout.used_bytes == 2 * (128 + 2 * 128 * 16) and layout.total_bytes % 256 == 0


@pytest.mark.parametrize(("format", "value_bytes"), [("f32", 4), ("bf16", 2), ("f16", 2)])
def test_row_major_matrix_has_no_padding_but_at_its_end(format, value_bytes):
    """16-bit containers keep rows as they are; only the whole is rounded up."""
    layout = matrix_layout(format, 5, 33)
    assert (layout.block_bytes, layout.n_blocks, layout.header_bytes) == (33 * value_bytes, 5, 0)
    assert layout.used_bytes == 5 * 33 * value_bytes and layout.total_bytes == -(-layout.used_bytes // 256) * 256


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(64, 32), (48, 24), (2048, 512), (100, 30)])
def test_slab_parts_follow_one_another_on_256_byte_borders(format, hidden_size, intermediate_size):
    """gate | up | down: no overlap, aligned starts, an aligned stride."""
    slab = slab_layout(format, hidden_size, intermediate_size)
    assert (slab.gate.rows, slab.gate.cols) == (slab.up.rows, slab.up.cols) == (intermediate_size, hidden_size)
    assert (slab.down.rows, slab.down.cols) == (hidden_size, intermediate_size)
    assert slab.gate_offset == 0 and slab.up_offset >= slab.gate.used_bytes
    assert slab.down_offset >= slab.up_offset + slab.up.used_bytes
    assert slab.total_bytes >= slab.down_offset + slab.down.used_bytes
    assert all(n % 256 == 0 for n in (slab.up_offset, slab.down_offset, slab.total_bytes))
