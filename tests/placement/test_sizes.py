"""coli.placement.sizes: bytes of matrices and slabs."""

from __future__ import annotations

import pytest

from coli.container import layout
from coli.placement.sizes import FORMATS, matrix_bytes, slab_bytes

SHAPES = [(1, 1), (15, 127), (16, 128), (17, 129), (48, 256), (96, 300), (512, 2048), (2048, 512), (4096, 256)]


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_r16_bytes_of_any_matrix_equal_the_containers(number_format, rows, cols):
    """A plan counts the bytes that the container's layout writes."""
    assert layout.matrix_layout(number_format, rows, cols).total_bytes == matrix_bytes(rows, cols, number_format)
    assert layout.slab_layout(number_format, cols, rows).total_bytes == slab_bytes(cols, rows, number_format)


def test_formats_are_the_containers():
    """Every number format of a container has a size here."""
    assert tuple(sorted(layout.FORMATS)) == tuple(sorted(FORMATS))


def test_flat_bytes_are_payload_and_one_float_a_row():
    """The flat layout is out * in weights and 4 * out bytes of scales; stored types have no scales."""
    assert 248320 * 2048 + 4 * 248320 == matrix_bytes(248320, 2048, "i8_row", "flat")
    assert 3 * 512 * 2048 // 2 + 4 * (512 + 512 + 2048) == slab_bytes(2048, 512, "i4_row", "flat")
    assert 2 * 30 == matrix_bytes(5, 6, "bf16", "flat")
