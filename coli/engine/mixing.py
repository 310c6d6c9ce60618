"""Whole layers for a device: what lies between a layer's two projections (MixerSpec), and around them (LayerSpec).

The numbers are those that ``bind`` gives the CPU's step, made the same way, so both compute the same layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coli._core import kernels
from coli.container.layout import FORMATS
from coli.devices.base import LayerSpec, MatrixSpec, MixerSpec, SlabSpec
from coli.engine.bind import geometry

if TYPE_CHECKING:
    from coli.container.reader import Container, Matrix, Slabs

_ATTENTION_NORMS = ("q_norm", "k_norm")
_ONE = np.float32(1.0)


def slab_spec(slabs: Slabs) -> SlabSpec:
    """The shape of a container's experts, or of a shared expert, as a device takes it."""
    return SlabSpec(
        slabs.format, slabs.hidden_size, slabs.intermediate_size, slabs.stride_bytes, slabs.gate_offset,
        slabs.up_offset, slabs.down_offset,
    )  # fmt: skip


def matrix_spec(m: Matrix) -> MatrixSpec:
    """A container's matrix as a device takes it."""
    return MatrixSpec(
        m.name, m.format, m.rows, m.cols, m.block_bytes, m.n_blocks, m.n_groups, m.data[: m.n_blocks * m.block_bytes]
    )


def mixer_spec(container: Container, layer: int) -> MixerSpec | None:
    """A layer for `LayerDevice.mixer`; None where the projections are row-major, which devices take one by one."""
    p = f"layers.{layer}."
    numbers = geometry(container.config, container.manifest.kv_dtype == "float16")
    if container.config.layer_types[layer] == "full_attention":
        if not FORMATS[container.matrix(p + "self_attn.qkv_proj").format].is_blocks:
            return None
        norms = {name: _ONE + container.float32(f"{p}self_attn.{name}") for name in _ATTENTION_NORMS}
        return MixerSpec(True, numbers, norms)
    p += "linear_attn."
    ba = container.matrix(p + "in_proj_ba")
    if not FORMATS[container.matrix(p + "in_proj_qkvz").format].is_blocks or FORMATS[ba.format].is_blocks:
        return None
    vectors = {
        "conv": np.ascontiguousarray(container.float32(p + "conv1d").T),  # (taps, channels)
        "exp_a_log": kernels.exp(np.array(container.float32(p + "A_log"))),
        "dt_bias": container.float32(p + "dt_bias"),
        "dn_norm": container.float32(p + "norm"),  # not zero-centred
    }
    return MixerSpec(False, numbers, vectors, matrix_spec(ba))


def layer_spec(container: Container, layer: int) -> LayerSpec | None:
    """A layer for `SpanDevice.layer`; None where its router is not row-major."""
    p = f"layers.{layer}."
    matrices = [container.matrix(f"{p}mlp.{name}") for name in ("gate", "shared_expert_gate")]
    if any(FORMATS[m.format].is_blocks for m in matrices):
        return None
    norms = [_ONE + container.float32(p + name) for name in ("input_layernorm", "post_attention_layernorm")]
    return LayerSpec(*norms, *(matrix_spec(m) for m in matrices))


def final_norm(container: Container) -> np.ndarray:
    """The norm before the head, for `SpanDevice.head`: float32 (hidden,), 1 + w."""
    return _ONE + container.float32("norm")
