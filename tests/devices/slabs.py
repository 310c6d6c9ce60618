"""Random experts and matrices in the container's bytes, and what the contract's reference computes from them."""

from __future__ import annotations

import numpy as np
import reference as ref

from coli.container.layout import FORMATS, MatrixLayout, matrix_layout, slab_layout
from coli.devices.base import MatrixSpec, SlabSpec


def random_matrix_bytes(rng: np.random.Generator, layout: MatrixLayout) -> np.ndarray:
    """Bytes of a matrix of a layout: any nibble or any int8 but -128, small scales of either sign."""
    format = FORMATS[layout.format]
    if not format.is_blocks:
        values = rng.normal(0, 0.1, layout.rows * layout.cols).astype(np.float32)
        if layout.format == "bf16":
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            stored = values.astype(np.float16 if layout.format == "f16" else np.float32)
        data = stored.view(np.uint8)
    else:
        blocks = np.zeros((layout.n_blocks, layout.block_bytes), np.uint8)
        if format.scales == "group":
            scales = rng.normal(0, 0.02, (layout.n_blocks, layout.n_groups * 16)).astype(np.float16)
        else:
            scales = rng.normal(0, 0.02, (layout.n_blocks, 16)).astype(np.float32)
        blocks[:, : scales.shape[1] * scales.itemsize] = scales.view(np.uint8)
        payload = rng.integers(0, 256, (layout.n_blocks, layout.block_bytes - layout.header_bytes), np.uint8)
        if format.bits == 8:
            payload[payload == 0x80] = 0x7F
        blocks[:, layout.header_bytes :] = payload
        data = blocks.reshape(-1)
    return np.concatenate([data, np.zeros(layout.total_bytes - data.size, np.uint8)])


def random_matrix(rng: np.random.Generator, format: str, rows: int, cols: int, name: str = "m") -> MatrixSpec:
    layout = matrix_layout(format, rows, cols)
    data = random_matrix_bytes(rng, layout)
    return MatrixSpec(name, format, rows, cols, layout.block_bytes, layout.n_blocks, layout.n_groups, data)


def random_slabs(
    rng: np.random.Generator, format: str, hidden: int, inner: int, count: int
) -> tuple[np.ndarray, SlabSpec]:
    """uint8 (count, slab_bytes), and how to read one."""
    s = slab_layout(format, hidden, inner)
    slabs = [np.concatenate([random_matrix_bytes(rng, part) for part in (s.gate, s.up, s.down)]) for _ in range(count)]
    spec = SlabSpec(format, hidden, inner, s.total_bytes, s.gate_offset, s.up_offset, s.down_offset)
    return np.stack(slabs), spec


def _reference_matrix(data: np.ndarray, format: str, rows: int, cols: int) -> np.ndarray | ref.Packed:
    if FORMATS[format].is_blocks:
        return ref.unpack_r16(data, format, rows, cols)
    n_bytes = rows * cols * FORMATS[format].bits // 8
    stored = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[format]
    values = np.ascontiguousarray(data[:n_bytes]).view(stored).reshape(rows, cols)
    return ref.widen_bf16(values) if format == "bf16" else values.astype(np.float32)


def reference_matmul(m: MatrixSpec, x: np.ndarray) -> np.ndarray:
    return ref.matmul(_reference_matrix(m.data, m.format, m.rows, m.cols), x)


def reference_ffn(slab: np.ndarray, spec: SlabSpec, x: np.ndarray) -> np.ndarray:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    gate = _reference_matrix(slab[spec.gate_offset :], spec.format, inner, hidden)
    up = _reference_matrix(slab[spec.up_offset :], spec.format, inner, hidden)
    down = _reference_matrix(slab[spec.down_offset :], spec.format, hidden, inner)
    return ref.expert_ffn(ref.Slab(gate, up, down), x)


def assert_bits(expected: np.ndarray, actual: np.ndarray) -> None:
    """Equal as float32 bit patterns."""
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    np.testing.assert_array_equal(
        np.ascontiguousarray(expected).view(np.uint32), np.ascontiguousarray(actual).view(np.uint32)
    )
