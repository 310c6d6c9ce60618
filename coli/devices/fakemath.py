"""The arithmetic of the fake device: matrices and experts as bytes of an arena, multiplied with the CPU's kernels.

It holds no data and knows no device; what it is asked wrongly is an AssertionError, a bug of the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coli._core import kernels
from coli.container.layout import FORMATS, matrix_layout
from coli.devices.base import MatrixSpec, SlabSpec

_STORED = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}  # as `kernels.dense` takes them


def require(condition: bool, message: str) -> None:
    """``assert`` that stays under -O: what stands after it would otherwise read memory that is not its own."""
    if not condition:
        raise AssertionError(message)


@dataclass(frozen=True, eq=False)
class Part:
    """A matrix in the arena: where it starts and how to read it.  It holds no data of its own."""

    offset: int
    format: str
    rows: int
    cols: int


def part_of(matrix: MatrixSpec) -> Part:
    """How to read a matrix at the beginning of its own bytes."""
    return Part(0, matrix.format, matrix.rows, matrix.cols)


def check_rows(rows: np.ndarray, cols: int, name: str) -> None:
    """Rows of a product: float32 (T, cols), T at least 1."""
    fits = rows.dtype == np.float32 and rows.ndim == 2 and len(rows) > 0 and rows.shape[1] == cols
    require(fits, f"{name}: rows are {rows.dtype} {rows.shape}, not float32 (T, {cols})")


def answer(y: np.ndarray, out: np.ndarray | None, name: str) -> np.ndarray:
    """y where the caller wants it."""
    if out is None:
        return y
    require(out.dtype == np.float32 and out.shape == y.shape, f"{name}: out is {out.dtype} {out.shape}, not {y.shape}")
    out[:] = y
    return out


def slab_parts(slab: SlabSpec) -> tuple[Part, ...]:
    """gate, up and down of a slab."""
    hidden, inner = slab.hidden_size, slab.intermediate_size
    return (
        Part(slab.gate_offset, slab.format, inner, hidden),
        Part(slab.up_offset, slab.format, inner, hidden),
        Part(slab.down_offset, slab.format, hidden, inner),
    )


def matmul(data: np.ndarray, part: Part, x: np.ndarray) -> np.ndarray:
    """W x of each row: float32 (T, cols) -> float32 (T, rows of W)."""
    if not FORMATS[part.format].is_blocks:
        return kernels.dense(_row_major(data, part), x)
    return _product(data, part, kernels.quantize(x))


def ffn(data: np.ndarray, parts: tuple[Part, ...], x: np.ndarray) -> np.ndarray:
    """down(silu(gate x) * up x) of each row, gate, up and down being the parts."""
    gate, up, down = parts
    if not FORMATS[gate.format].is_blocks:
        h = kernels.silu_mul(matmul(data, gate, x), matmul(data, up, x))
    else:
        acts = kernels.quantize(x)
        h = kernels.silu_mul(_product(data, gate, acts), _product(data, up, acts))
    return matmul(data, down, h)


def _product(data: np.ndarray, part: Part, acts: tuple[np.ndarray, ...]) -> np.ndarray:
    q, scale, sums, _ = acts
    multiply = kernels.gemv if q.shape[1] == 1 else kernels.gemm
    return np.ascontiguousarray(multiply(data[part.offset :], part.format, part.rows, part.cols, q, scale, sums))


def _row_major(data: np.ndarray, part: Part) -> np.ndarray:
    n_bytes = matrix_layout(part.format, part.rows, part.cols).used_bytes
    return data[part.offset : part.offset + n_bytes].view(_STORED[part.format]).reshape(part.rows, part.cols)
