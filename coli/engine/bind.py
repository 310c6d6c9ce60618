"""From an opened container to a network of bound matrices: every pointer is taken once, at load.

What the forward pass would otherwise make again and again is made here: 1 + w of the zero-centred norms,
exp(A_log), the transposed convolution kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from coli._core import kernels, step
from coli.container.layout import FORMATS

if TYPE_CHECKING:
    from coli.config import ModelConfig
    from coli.container.reader import Container, Matrix, Slabs


def geometry(config: ModelConfig, kv_f16: bool) -> dict[str, Any]:
    """The numbers of ``coli_geometry`` (src/step.h) from a configuration."""
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "n_q_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rotary_half": config.rotary_dim // 2,
        "dn_k_heads": config.linear_num_key_heads,
        "dn_v_heads": config.linear_num_value_heads,
        "dn_k_dim": config.linear_key_head_dim,
        "dn_v_dim": config.linear_value_head_dim,
        "conv_taps": config.linear_conv_kernel_dim,
        "n_experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
        "moe_dim": config.moe_intermediate_size,
        "shared_dim": config.shared_expert_intermediate_size,
        "kv_f16": kv_f16,
        "eps": config.rms_norm_eps,
        # made in float64 and rounded once, as the contract's other load-time constants
        "attn_scale": float(np.float32(1.0 / np.sqrt(np.float64(config.head_dim)))),
        "q_scale": float(np.float32(np.float64(config.linear_key_head_dim) ** -0.5)),
    }


def _bind_matrix(net: step.Network, slot: str, layer: int, m: Matrix) -> None:
    code = FORMATS[m.format].code
    net.matrix(slot, layer, m.data, 0, code, m.rows, m.cols, m.block_bytes, m.n_blocks, m.n_groups)


def _bind_slabs(net: step.Network, kind: str, layer: int, s: Slabs) -> None:
    code = FORMATS[s.format].code
    for part in ("gate", "up", "down"):
        m = getattr(s, part)
        offset = getattr(s, f"{part}_offset")
        net.matrix(
            f"{kind}.{part}", layer, s.data, offset, code, m.rows, m.cols, m.block_bytes, m.n_blocks, m.n_groups
        )
    net.slabs(kind, layer, s.stride_bytes, s.count)


def bind_network(container: Container, isa: str) -> step.Network:
    """Bind every matrix and vector of a container for the CPU.

    The network holds references to the container's mapping, which must stay open as long.
    """
    config = container.config
    attention = [kind == "full_attention" for kind in config.layer_types]
    net = step.Network(geometry(config, container.manifest.kv_dtype == "float16"), attention, isa)
    one = np.float32(1.0)

    def vector(slot: str, layer: int, values: np.ndarray) -> None:
        net.vector(slot, layer, np.ascontiguousarray(values, dtype=np.float32).reshape(-1))

    _bind_matrix(net, "embed", 0, container.embed)
    _bind_matrix(net, "head", 0, container.matrix("lm_head"))
    vector("norm", 0, one + container.float32("norm"))
    for i, is_attention in enumerate(attention):
        p = f"layers.{i}."
        vector("norm1", i, one + container.float32(p + "input_layernorm"))
        vector("norm2", i, one + container.float32(p + "post_attention_layernorm"))
        if is_attention:
            _bind_matrix(net, "in", i, container.matrix(p + "self_attn.qkv_proj"))
            _bind_matrix(net, "out", i, container.matrix(p + "self_attn.o_proj"))
            vector("q_norm", i, one + container.float32(p + "self_attn.q_norm"))
            vector("k_norm", i, one + container.float32(p + "self_attn.k_norm"))
        else:
            _bind_matrix(net, "in", i, container.matrix(p + "linear_attn.in_proj_qkvz"))
            _bind_matrix(net, "out", i, container.matrix(p + "linear_attn.out_proj"))
            _bind_matrix(net, "ba", i, container.matrix(p + "linear_attn.in_proj_ba"))
            vector("conv", i, container.float32(p + "linear_attn.conv1d").T)  # (taps, channels)
            vector("exp_a_log", i, kernels.exp(np.array(container.float32(p + "linear_attn.A_log")), isa=isa))
            vector("dt_bias", i, container.float32(p + "linear_attn.dt_bias"))
            vector("dn_norm", i, container.float32(p + "linear_attn.norm"))  # not zero-centred
        _bind_matrix(net, "router", i, container.matrix(p + "mlp.gate"))
        _bind_matrix(net, "shared_gate", i, container.matrix(p + "mlp.shared_expert_gate"))
        _bind_slabs(net, "shared", i, container.slabs(p + "mlp.shared_expert"))
        _bind_slabs(net, "experts", i, container.slabs(p + "mlp.experts"))
    return net
