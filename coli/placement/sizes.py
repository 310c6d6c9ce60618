"""Bytes of matrices and slabs, as they lie in a container and in VRAM: arithmetic on shapes, nothing else.

Two layouts: ``r16``, the container's headed blocks (docs/numerics.md, section 3), and ``flat``, a payload of
``rows * cols`` weights with one float32 scale a row.  ``tests/placement/test_sizes.py`` holds ``r16`` equal to
``coli.container.layout``, which this room may not import.
"""

from __future__ import annotations

_BITS = {"i8_row": 8, "i8_group": 8, "i4_row": 4, "i4_group": 4, "f32": 32, "bf16": 16, "f16": 16}
FORMATS = tuple(_BITS)
LAYOUTS = ("r16", "flat")

_GROUP = 128  # columns that share a group scale; columns are padded to whole groups
_BLOCK_ROWS = 16
_ALIGN_BYTES = 256  # of matrices and slab parts
_HEADER_ALIGN_BYTES = 128


def matrix_bytes(rows: int, cols: int, number_format: str, layout: str = "r16") -> int:
    """Bytes of a (rows, cols) matrix."""
    bits = _BITS[number_format]
    stored = number_format in ("f32", "bf16", "f16")
    if layout == "flat":
        return -(-rows * cols * bits // 8) + (0 if stored else 4 * rows)
    if stored:
        return _round_up(rows * cols * bits // 8, _ALIGN_BYTES)
    groups = -(-cols // _GROUP)
    scales_bytes = _BLOCK_ROWS * (4 if number_format.endswith("row") else 2 * groups)
    block_bytes = _round_up(scales_bytes, _HEADER_ALIGN_BYTES) + groups * _GROUP * _BLOCK_ROWS * bits // 8
    return _round_up(-(-rows // _BLOCK_ROWS) * block_bytes, _ALIGN_BYTES)


def slab_bytes(hidden_size: int, intermediate_size: int, number_format: str, layout: str = "r16") -> int:
    """Bytes of one expert: gate and up are (intermediate_size, hidden_size), down (hidden_size, intermediate_size)."""
    gate = matrix_bytes(intermediate_size, hidden_size, number_format, layout)
    return 2 * gate + matrix_bytes(hidden_size, intermediate_size, number_format, layout)


def _round_up(n_bytes: int, align_bytes: int) -> int:
    return -(-n_bytes // align_bytes) * align_bytes
