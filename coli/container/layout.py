"""The bytes of a container, as pure arithmetic: number formats, blocks, matrices, expert slabs.

The layout is "R16 in headed blocks" (docs/numerics.md, section 3): a matrix is a run of blocks of 16 rows,
each a header with its own scales and then its payload.  This module opens no file and holds no data; the
same figures serve the converter, the reader, the placement and the checks, so each is written once, here.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 128  # columns that share one group scale; columns are padded to whole groups
BLOCK_ROWS = 16
ALIGN_BYTES = 256  # where matrices and slab parts start, so that a card's 256-byte loads are aligned
_HEADER_ALIGN_BYTES = 128


@dataclass(frozen=True)
class Format:
    """A number format.

    code : the kernel table's number for it.   bits : of one weight.
    scales : "row" (one float32 a row), "group" (one float16 per row and 128 columns), or None (row-major, as stored).
    """

    name: str
    code: int
    bits: int
    scales: str | None

    @property
    def is_blocks(self) -> bool:
        """Whether a matrix of this format is R16 blocks; otherwise it is row-major."""
        return self.scales is not None


FORMATS = {
    f.name: f
    for f in (
        Format("i8_row", 0, 8, "row"),
        Format("i8_group", 1, 8, "group"),
        Format("i4_row", 2, 4, "row"),
        Format("i4_group", 3, 4, "group"),
        Format("f32", 4, 32, None),
        Format("bf16", 5, 16, None),
        Format("f16", 6, 16, None),
    )
}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def round_up(n_bytes: int, align_bytes: int = ALIGN_BYTES) -> int:
    """The next multiple of an alignment."""
    return _ceil(n_bytes, align_bytes) * align_bytes


@dataclass(frozen=True)
class MatrixLayout:
    """Where the bytes of one matrix are.

    R16: ``n_blocks`` blocks of ``block_bytes``, of which the first ``header_bytes`` are scales.
    Row-major: ``n_blocks`` is the number of rows, ``block_bytes`` the stride of one, ``header_bytes`` 0.
    used_bytes : n_blocks * block_bytes.   total_bytes : the same, rounded up to 256.
    """

    format: str
    rows: int
    cols: int
    block_bytes: int
    header_bytes: int
    n_blocks: int
    n_groups: int
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class SlabLayout:
    """Where the bytes of one expert are: gate | up | down, each part starting at a multiple of 256.

    gate and up are (intermediate_size, hidden_size), down is (hidden_size, intermediate_size).
    total_bytes : the stride from one expert to the next.
    """

    format: str
    hidden_size: int
    intermediate_size: int
    gate: MatrixLayout
    up: MatrixLayout
    down: MatrixLayout
    gate_offset: int
    up_offset: int
    down_offset: int
    total_bytes: int


def matrix_layout(format: str, rows: int, cols: int) -> MatrixLayout:
    """The layout of a (rows, cols) matrix in a number format."""
    f = FORMATS[format]
    n_groups = _ceil(cols, GROUP)
    if f.is_blocks:
        n_blocks = _ceil(rows, BLOCK_ROWS)
        scales_bytes = BLOCK_ROWS * (2 * n_groups if f.scales == "group" else 4)
        header_bytes = round_up(scales_bytes, _HEADER_ALIGN_BYTES)
        block_bytes = header_bytes + n_groups * GROUP * BLOCK_ROWS * f.bits // 8
    else:
        n_blocks, header_bytes, block_bytes = rows, 0, cols * f.bits // 8
    used_bytes = n_blocks * block_bytes
    return MatrixLayout(
        format, rows, cols, block_bytes, header_bytes, n_blocks, n_groups, used_bytes, round_up(used_bytes)
    )


def slab_layout(format: str, hidden_size: int, intermediate_size: int) -> SlabLayout:
    """The layout of one expert (or of the shared expert) in a number format."""
    gate = matrix_layout(format, intermediate_size, hidden_size)
    down = matrix_layout(format, hidden_size, intermediate_size)
    return SlabLayout(
        format,
        hidden_size,
        intermediate_size,
        gate,
        gate,
        down,
        gate_offset=0,
        up_offset=gate.total_bytes,
        down_offset=2 * gate.total_bytes,
        total_bytes=2 * gate.total_bytes + down.total_bytes,
    )
