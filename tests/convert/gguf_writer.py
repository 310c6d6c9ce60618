"""GGUF files of a checkpoint, as llama.cpp's converter makes them: what ``coli.convert.gguf`` has to undo.

Written from what that converter does (see gguf_names), with reshapes instead of tables of rows, and the ``gguf``
package's writer.  Architectures ``qwen35moe`` and ``qwen3next``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from coli.config import ModelConfig
from coli.convert.checkpoint import Checkpoint

Tensors = dict[str, np.ndarray]
BLOCK_ROWS = {"Q8_0": 32, "Q4_0": 32}


def weights(folder: Path) -> Tensors:
    """Every tensor of a Hugging Face folder, float32, by its plain name."""
    made = {}
    with Checkpoint(folder) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            out = np.empty((tensor.n_bytes // tensor.row_bytes, tensor.cols), np.float32)
            checkpoint.read_rows(tensor, 0, out)
            made[name] = out.reshape(tensor.shape)
    return made


def tiled(x: np.ndarray, config: ModelConfig, axis: int, width: int) -> np.ndarray:
    """Value heads of `width`: from those of a key head together to the n-th of every key head together."""
    keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    x = np.moveaxis(x, axis, 0)
    split = x.reshape(keys, per_key, width, *x.shape[1:])
    return np.moveaxis(split.swapaxes(0, 1).reshape(x.shape), 0, axis)


def interleaved(parts: list[np.ndarray], keys: int) -> np.ndarray:
    """Rows of several matrices, those of a key head together, as Qwen3-Next's checkpoints have them."""
    return np.concatenate([part.reshape(keys, -1, part.shape[-1]) for part in parts], axis=1).reshape(
        -1, parts[0].shape[-1]
    )


def transformed(
    tensors: Tensors, config: ModelConfig, architecture: str, *, old: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of the GGUF tensors.  old : with ssm_in, and gate_up fused, where the architecture has them."""
    qk, dk_rows = 2 * config.linear_key_dim, config.linear_key_dim
    d_v, is_next = config.linear_value_head_dim, architecture == "qwen3next"

    def by_head(x: np.ndarray, axis: int, width: int) -> np.ndarray:
        return x if is_next else tiled(x, config, axis, width)

    def behind_keys(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[:qk], by_head(x[qk:], 0, d_v)])

    yield "token_embd.weight", tensors["embed_tokens.weight"]
    yield "output_norm.weight", tensors["norm.weight"] + 1
    if "lm_head.weight" in tensors and not config.tie_word_embeddings:
        yield "output.weight", tensors["lm_head.weight"]
    for layer, kind in enumerate(config.layer_types):
        b, w = f"blk.{layer}.", _below(tensors, f"layers.{layer}.")
        yield b + "attn_norm.weight", w["input_layernorm.weight"] + 1
        yield b + "post_attention_norm.weight", w["post_attention_layernorm.weight"] + 1
        if kind == "full_attention":
            for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
                yield f"{b}attn_{theirs}.weight", w[f"self_attn.{ours}_proj.weight"]
            for part in "qk":
                yield f"{b}attn_{part}_norm.weight", w[f"self_attn.{part}_norm.weight"] + 1
        else:
            d = {n.removesuffix(".weight"): x for n, x in _below(w, "linear_attn.").items()}
            qkv, z = d["in_proj_qkv"], d["in_proj_z"]
            if is_next and old:
                q, k, v = qkv[:dk_rows], qkv[dk_rows:qk], qkv[qk:]
                yield b + "ssm_in.weight", interleaved([q, k, v, z], config.linear_num_key_heads)
            else:
                yield b + "attn_qkv.weight", behind_keys(qkv)
                yield b + "attn_gate.weight", by_head(z, 0, d_v)
            if is_next:
                yield b + "ssm_ba.weight", interleaved([d["in_proj_b"], d["in_proj_a"]], config.linear_num_key_heads)
            else:
                yield b + "ssm_beta.weight", by_head(d["in_proj_b"], 0, 1)
                yield b + "ssm_alpha.weight", by_head(d["in_proj_a"], 0, 1)
            yield b + "ssm_conv1d.weight", behind_keys(d["conv1d"][:, 0])
            yield b + "ssm_a", -np.exp(by_head(d["A_log"], 0, 1))
            yield b + "ssm_dt.bias", by_head(d["dt_bias"], 0, 1)
            yield b + "ssm_norm.weight", d["norm"]
            yield b + "ssm_out.weight", by_head(d["out_proj"], 1, d_v)
        m = _below(w, "mlp.")
        yield b + "ffn_gate_inp.weight", m["gate.weight"]
        yield b + "ffn_gate_inp_shexp.weight", m["shared_expert_gate.weight"].reshape(-1)
        for part in ("gate", "up", "down"):
            yield f"{b}ffn_{part}_shexp.weight", m[f"shared_expert.{part}_proj.weight"]
        if "experts.gate_up_proj" not in m:  # a checkpoint with a tensor an expert
            n = range(config.num_experts)
            stacks = {
                part: np.stack([m[f"experts.{e}.{part}_proj.weight"] for e in n]) for part in ("gate", "up", "down")
            }
            m["experts.gate_up_proj"], m["experts.down_proj"] = (
                np.concatenate([stacks["gate"], stacks["up"]], 1),
                stacks["down"],
            )
        gate_up, width = m["experts.gate_up_proj"], config.moe_intermediate_size
        if old:
            yield b + "ffn_gate_up_exps.weight", gate_up
        else:
            yield b + "ffn_gate_exps.weight", gate_up[:, :width]
            yield b + "ffn_up_exps.weight", gate_up[:, width:]
        yield b + "ffn_down_exps.weight", m["experts.down_proj"]


def _below(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def metadata(writer: gguf.GGUFWriter, config: ModelConfig, *, blocks_ahead: int = 0) -> None:
    """The keys that llama.cpp's converter writes for this architecture."""
    writer.add_block_count(config.num_hidden_layers + blocks_ahead)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    half = config.rotary_dim // 2
    writer.add_rope_dimension_sections([half - 2 * (half // 3), half // 3, half // 3, 0])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_dim)
    if blocks_ahead:
        writer.add_nextn_predict_layers(blocks_ahead)


def vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], vocab_size: int, *, pre: str = "qwen35") -> None:
    """Tokens, their types and merges of a parsed tokenizer.json; rows without a token become [PADn]."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    if merges:  # the package writes no empty list
        writer.add_token_merges(merges)
    for key, text in (("eos", "<|im_end|>"), ("pad", "<|endoftext|>")):
        if text in tokens:
            getattr(writer, f"add_{key}_token_id")(tokens.index(text))


def write(
    folder: Path,
    out: Path,
    kind: str = "F32",
    *,
    architecture: str = "qwen35moe",
    old: bool = False,
    tokenizer: Path | None = None,
    template: str | None = None,
    blocks_ahead: int = 0,
    most_tensors: int = 0,
    change: Callable[[gguf.GGUFWriter, Tensors], None] = lambda writer, tensors: None,
) -> Path:
    """Write a Hugging Face folder as GGUF, matrices in `kind` where their rows allow it and all else in F32.

    tokenizer : a tokenizer.json; the folder's own where it has one.   most_tensors : of a part, of a split file.
    change : last change to metadata and tensors, for files that are wrong or rare.
    """
    config = ModelConfig.from_folder(folder)
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=most_tensors)
    metadata(writer, config, blocks_ahead=blocks_ahead)
    path = tokenizer or folder / "tokenizer.json"  # of a folder without one, a file without a vocabulary
    if path.exists():
        vocabulary(writer, json.loads(path.read_text()), config.vocab_size)
    if template is not None:
        writer.add_chat_template(template)
    tensors = dict(transformed(weights(folder), config, architecture, old=old))
    change(writer, tensors)
    for name, x in tensors.items():
        x = np.ascontiguousarray(x, np.float32)
        wants = kind if x.ndim > 1 and not x.shape[-1] % BLOCK_ROWS.get(kind, 1) and "conv1d" not in name else "F32"
        quantised = gguf.GGMLQuantizationType[wants]
        data = gguf.quantize(x, quantised)
        writer.add_tensor(name, data, raw_dtype=None if wants in ("F32", "F16") else quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out if not most_tensors else min(out.parent.glob(f"{out.stem}-*-of-*.gguf"))
