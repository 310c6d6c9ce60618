"""Whole layers for a device: what lies between a layer's two projections, as a MixerSpec.

The numbers are those that ``bind`` gives the CPU's step, made the same way, so both compute the same layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coli._core import kernels
from coli.container.layout import FORMATS
from coli.devices.base import MatrixSpec, MixerSpec
from coli.engine.bind import geometry

if TYPE_CHECKING:
    from coli.container.reader import Container, Matrix

_ATTENTION_NORMS = ("q_norm", "k_norm")


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
        one = np.float32(1.0)
        norms = {name: one + container.float32(f"{p}self_attn.{name}") for name in _ATTENTION_NORMS}
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
