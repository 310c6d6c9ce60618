"""Which GGUF tensor is which of the model's, and how llama.cpp's converter changed it on the way there.

For the architectures ``qwen35moe`` and ``qwen3next`` of llama.cpp.  Its converter (convert_hf_to_gguf.py)

- adds 1 to every zero-centred norm (all but the one inside DeltaNet) and stores ``-exp(A_log)`` as ``ssm_a``;
- drops the convolution's dimension of one input channel;
- stacks the experts, gate and up apart (some files hold them fused, as checkpoints do);
- for ``qwen35moe`` reorders DeltaNet's value heads: a checkpoint has the heads of key head 0 first, then those of key
  head 1; the file has the first value head of each key head, then the second of each;
- for ``qwen3next`` regroups ``in_proj_qkvz``, which that family's checkpoints interleave by key head, into the order of
  this family's; not so ``in_proj_ba`` (and old files keep ``in_proj_qkvz``, as ``ssm_in``).

q_proj keeps query and gate head by head.  Here is the way back, as rows and columns to read: no weight is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from coli.config import FULL, ModelConfig

QWEN35MOE, QWEN3NEXT = "qwen35moe", "qwen3next"
ARCHITECTURES = (QWEN35MOE, QWEN3NEXT)

# What to do with the values.
AS_STORED, MINUS_ONE, LOG_OF_NEGATED = "as stored", "minus one", "log of negated"


@dataclass(frozen=True)
class Origin:
    """One tensor of a checkpoint and its place in a GGUF file.

    name, shape : the checkpoint's, the name without its prefix.
    stored, stored_shape : the GGUF tensor's; dimensions of 1 do not count.
    rows : the stored row of each row, None where they are the same.   columns : the same of columns.
    values : AS_STORED, MINUS_ONE or LOG_OF_NEGATED.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    stored_shape: tuple[int, ...]
    rows: np.ndarray | range | None = None
    columns: np.ndarray | None = None
    values: str = AS_STORED


def is_full_attention(layer: int, stored: Iterable[str]) -> bool:
    """Whether a layer is attention and not DeltaNet, by what it holds."""
    return f"blk.{layer}.attn_q.weight" in stored


def origins(config: ModelConfig, architecture: str, stored: Iterable[str]) -> Iterator[Origin]:
    """Every tensor that a checkpoint of this configuration holds.

    stored : the file's names, which tell the spellings of the experts and of the projections apart.
    """
    stored, hidden = frozenset(stored), config.hidden_size
    yield _same("embed_tokens.weight", "token_embd.weight", config.vocab_size, hidden)
    yield _norm("norm.weight", "output_norm.weight", hidden)
    if not config.tie_word_embeddings:
        yield _same("lm_head.weight", "output.weight", config.vocab_size, hidden)
    for layer, kind in enumerate(config.layer_types):
        p, b = f"layers.{layer}.", f"blk.{layer}."
        yield _norm(p + "input_layernorm.weight", b + "attn_norm.weight", hidden)
        yield _norm(p + "post_attention_layernorm.weight", b + "post_attention_norm.weight", hidden)
        if kind == FULL:
            yield from _attention(config, p + "self_attn.", b)
        else:
            yield from _delta_net(config, architecture, stored, p + "linear_attn.", b)
        yield from _experts(config, stored, p + "mlp.", b)


def _same(name: str, stored: str, *shape: int) -> Origin:
    return Origin(name, shape, stored, shape)


def _norm(name: str, stored: str, size: int) -> Origin:
    return Origin(name, (size,), stored, (size,), values=MINUS_ONE)


def _attention(config: ModelConfig, p: str, b: str) -> Iterator[Origin]:
    yield _same(p + "q_proj.weight", b + "attn_q.weight", 2 * config.attention_dim, config.hidden_size)
    yield _same(p + "k_proj.weight", b + "attn_k.weight", config.key_value_dim, config.hidden_size)
    yield _same(p + "v_proj.weight", b + "attn_v.weight", config.key_value_dim, config.hidden_size)
    yield _same(p + "o_proj.weight", b + "attn_output.weight", config.hidden_size, config.attention_dim)
    yield _norm(p + "q_norm.weight", b + "attn_q_norm.weight", config.head_dim)
    yield _norm(p + "k_norm.weight", b + "attn_k_norm.weight", config.head_dim)


def _delta_net(config: ModelConfig, architecture: str, stored: frozenset[str], p: str, b: str) -> Iterator[Origin]:
    hidden, channels, heads = config.hidden_size, config.conv_channels, config.linear_num_value_heads
    values, taps = config.linear_value_dim, config.linear_conv_kernel_dim
    is_next = architecture == QWEN3NEXT
    by_head = None if is_next else _head_order(config)
    by_value = _values_by_head(config, by_head)
    by_channel = _behind_keys(config, by_value)
    if is_next and b + "ssm_in.weight" in stored:
        shape = (channels + values, hidden)
        qkv, z = _interleaved_qkvz(config)
        yield Origin(p + "in_proj_qkv.weight", (channels, hidden), b + "ssm_in.weight", shape, qkv)
        yield Origin(p + "in_proj_z.weight", (values, hidden), b + "ssm_in.weight", shape, z)
    else:
        shape = (channels, hidden)
        yield Origin(p + "in_proj_qkv.weight", shape, b + "attn_qkv.weight", shape, by_channel)
        shape = (values, hidden)
        yield Origin(p + "in_proj_z.weight", shape, b + "attn_gate.weight", shape, by_value)
    if is_next:
        for part, rows in zip("ba", _interleaved_ba(config), strict=True):
            yield Origin(f"{p}in_proj_{part}.weight", (heads, hidden), b + "ssm_ba.weight", (2 * heads, hidden), rows)
    else:
        for part, stored_name in (("b", "ssm_beta.weight"), ("a", "ssm_alpha.weight")):
            shape = (heads, hidden)
            yield Origin(f"{p}in_proj_{part}.weight", shape, b + stored_name, shape, by_head)
    yield Origin(p + "conv1d.weight", (channels, 1, taps), b + "ssm_conv1d.weight", (channels, taps), by_channel)
    # Vectors are one row: the order of their heads is one of columns.
    yield Origin(p + "A_log", (heads,), b + "ssm_a", (heads,), columns=by_head, values=LOG_OF_NEGATED)
    yield Origin(p + "dt_bias", (heads,), b + "ssm_dt.bias", (heads,), columns=by_head)
    yield _same(p + "norm.weight", b + "ssm_norm.weight", config.linear_value_head_dim)
    shape = (hidden, values)
    yield Origin(p + "out_proj.weight", shape, b + "ssm_out.weight", shape, columns=by_value)


def _experts(config: ModelConfig, stored: frozenset[str], p: str, b: str) -> Iterator[Origin]:
    count, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shared = config.shared_expert_intermediate_size
    yield _same(p + "gate.weight", b + "ffn_gate_inp.weight", count, hidden)
    if b + "ffn_gate_up_exps.weight" in stored:
        yield _same(p + "experts.gate_up_proj", b + "ffn_gate_up_exps.weight", count, 2 * width, hidden)
    else:
        for expert in range(count):
            rows = range(expert * width, (expert + 1) * width)
            for part in ("gate", "up"):
                name, stack = f"{p}experts.{expert}.{part}_proj.weight", f"{b}ffn_{part}_exps.weight"
                yield Origin(name, (width, hidden), stack, (count, width, hidden), rows)
    yield _same(p + "experts.down_proj", b + "ffn_down_exps.weight", count, hidden, width)
    yield Origin(p + "shared_expert_gate.weight", (1, hidden), b + "ffn_gate_inp_shexp.weight", (hidden,))
    for part in ("gate", "up"):
        yield _same(f"{p}shared_expert.{part}_proj.weight", f"{b}ffn_{part}_shexp.weight", shared, hidden)
    yield _same(p + "shared_expert.down_proj.weight", b + "ffn_down_shexp.weight", hidden, shared)


# ---- orders: the stored place of each row, head or column ----------------------------------------------------


def _head_order(config: ModelConfig) -> np.ndarray | None:
    """Value heads of qwen35moe: head h of key head h // r is stored as head (h % r) of all key heads together."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    return None if keys == heads else np.arange(heads).reshape(heads // keys, keys).T.reshape(-1)


def _values_by_head(config: ModelConfig, by_head: np.ndarray | None) -> np.ndarray | None:
    """The same for what has `linear_value_head_dim` rows (or columns) a head."""
    if by_head is None:
        return None
    return np.arange(config.linear_value_dim).reshape(-1, config.linear_value_head_dim)[by_head].reshape(-1)


def _behind_keys(config: ModelConfig, values: np.ndarray | None) -> np.ndarray | None:
    """Rows of q and k, which stay, then those of v."""
    qk = 2 * config.linear_key_dim
    return None if values is None else np.concatenate([np.arange(qk), qk + values])


def _interleaved_qkvz(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Rows of q, k and v, and of z, where each key head has its q, k, v and z together."""
    d_k, per_key = config.linear_key_head_dim, config.linear_value_dim // config.linear_num_key_heads
    rows = np.arange(config.conv_channels + config.linear_value_dim).reshape(config.linear_num_key_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([d_k, d_k, per_key]), axis=1)
    return np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)


def _interleaved_ba(config: ModelConfig) -> np.ndarray:
    """Rows of b, and of a, where each key head has its b and a together: (2, value heads)."""
    keys = config.linear_num_key_heads
    return np.arange(2 * config.linear_num_value_heads).reshape(keys, 2, -1).transpose(1, 0, 2).reshape(2, -1)
