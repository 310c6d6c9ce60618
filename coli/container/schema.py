"""Which tensors a container holds for a given configuration: names, shapes, kinds, components, files.

The one list that the converter fills, the reader demands and the byte tables sum over.  Pure arithmetic
on a ``ModelConfig``; it opens nothing and knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coli.config import FULL, ModelConfig

# The components of the byte tables and of the placement, in the order in which they are printed.
COMPONENTS = ("lmhead", "dnproj", "dnout", "attnproj", "shexp", "experts", "router", "embed", "small")

MATRIX, SHARED_SLAB, EXPERT_SLABS, PLAIN = "matrix", "shared slab", "expert slabs", "plain"


@dataclass(frozen=True)
class Entry:
    """One tensor of a container.

    kind : MATRIX (`shape` is (rows, cols)), SHARED_SLAB (one slab, `shape` is (intermediate_size, hidden_size)),
        EXPERT_SLABS (`shape` is (count, intermediate_size, hidden_size)), or PLAIN: row-major in its stored type.
    component : one of COMPONENTS.
    file : name of the safetensors file that holds it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    component: str
    file: str


def file_name(layer: int | None) -> str:
    """Layer N is in file N + 1; file 0 holds what belongs to no layer."""
    return f"model-{0 if layer is None else layer + 1:05d}.safetensors"


def entries(config: ModelConfig, *, has_lm_head: bool = True) -> list[Entry]:
    """Every tensor of a container, file by file.

    has_lm_head : False for a tied 16-bit container, whose head is its embedding.
    """
    hidden_size = config.hidden_size
    made = []
    if has_lm_head:
        made.append(Entry("lm_head", MATRIX, (config.vocab_size, hidden_size), "lmhead", file_name(None)))
    made.append(Entry("embed_tokens", PLAIN, (config.vocab_size, hidden_size), "embed", file_name(None)))
    made.append(Entry("norm", PLAIN, (hidden_size,), "small", file_name(None)))
    for layer in range(config.num_hidden_layers):
        made.extend(
            Entry(f"layers.{layer}.{name}", kind, shape, component, file_name(layer))
            for name, kind, shape, component in _layer(config, layer)
        )
    return made


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
    hidden_size = config.hidden_size
    yield "input_layernorm", PLAIN, (hidden_size,), "small"
    if config.layer_types[layer] == FULL:
        qkv_rows = 2 * config.attention_dim + 2 * config.key_value_dim  # query and gate, key, value
        yield "self_attn.qkv_proj", MATRIX, (qkv_rows, hidden_size), "attnproj"
        yield "self_attn.o_proj", MATRIX, (hidden_size, config.attention_dim), "attnproj"
        yield "self_attn.q_norm", PLAIN, (config.head_dim,), "small"
        yield "self_attn.k_norm", PLAIN, (config.head_dim,), "small"
    else:
        heads, values = config.linear_num_value_heads, config.linear_value_dim
        yield "linear_attn.in_proj_qkvz", MATRIX, (config.conv_channels + values, hidden_size), "dnproj"
        yield "linear_attn.out_proj", MATRIX, (hidden_size, values), "dnout"
        yield "linear_attn.in_proj_ba", PLAIN, (2 * heads, hidden_size), "small"
        yield "linear_attn.conv1d", PLAIN, (config.conv_channels, config.linear_conv_kernel_dim), "small"
        yield "linear_attn.A_log", PLAIN, (heads,), "small"
        yield "linear_attn.dt_bias", PLAIN, (heads,), "small"
        yield "linear_attn.norm", PLAIN, (config.linear_value_head_dim,), "small"
    yield "post_attention_layernorm", PLAIN, (hidden_size,), "small"
    yield "mlp.gate", PLAIN, (config.num_experts, hidden_size), "router"
    yield "mlp.shared_expert_gate", PLAIN, (1, hidden_size), "small"
    yield "mlp.shared_expert", SHARED_SLAB, (config.shared_expert_intermediate_size, hidden_size), "shexp"
    yield "mlp.experts", EXPERT_SLABS, (config.num_experts, config.moe_intermediate_size, hidden_size), "experts"
