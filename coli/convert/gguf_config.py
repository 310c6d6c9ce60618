"""A GGUF file's metadata as the JSON files of a checkpoint: config.json, generation_config.json.

Keys and values become Hugging Face's; what they may be is `coli.config`'s business.  What the metadata does not say
is an error that names the key, never a default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from coli.config import FULL, LINEAR, shown
from coli.convert.gguf_names import ARCHITECTURES, is_full_attention
from coli.errors import ModelError

# Hugging Face's keys by the architecture's.
_INTEGERS = {
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
# Keys that name a token which ends an answer; and texts that do, as llama.cpp has it, where a file names only one.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = ("<|im_end|>", "<|endoftext|>")
_SOFTMAX = 1  # llama.cpp's expert_gating_func


class Metadata:
    """Typed look-ups; errors name the file and the key."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int:
            raise self.error(key, value, "expected an integer")
        return value

    def number(self, key: str) -> float:
        """A float, as the shortest decimal that the file's float32 is nearest to: 1e-06, not 9.99999997e-07."""
        value = self._value(key, None)
        if type(value) not in (int, float):
            raise self.error(key, value, "expected a number")
        with np.errstate(over="ignore"):
            nearest = np.float32(value)
        if not np.isfinite(nearest):
            raise self.error(key, value, "expected a number")
        return float(str(nearest))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "expected a text")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._value(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.error(key, value, "expected a list of integers")
        return value.tolist()

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self.error(key, value, "expected a list of texts")
        return value

    def error(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.source}: {key} is {shown(value)}; {expected}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise ModelError(f"{self.source}: {key} is missing from its metadata")
        return value


def architecture_of(metadata: Metadata) -> str:
    """``general.architecture``, one that coli reads."""
    found = metadata.text("general.architecture")
    if found not in ARCHITECTURES:
        raise metadata.error("general.architecture", found, f"coli reads {', '.join(ARCHITECTURES)}")
    return found


def layer_count(metadata: Metadata, architecture: str) -> tuple[int, int]:
    """Layers of the model, and those behind them that only predict tokens ahead."""
    blocks = metadata.integer(f"{architecture}.block_count")
    ahead = metadata.integer(f"{architecture}.nextn_predict_layers", 0)
    if not 0 <= ahead < blocks <= 4096:
        raise metadata.error(
            f"{architecture}.block_count", blocks, f"expected 1 to 4096, {ahead} of them predicting ahead"
        )
    return blocks - ahead, ahead


def config_of(metadata: Metadata, architecture: str, stored: Iterable[str], vocab_size: int) -> dict[str, Any]:
    """``config.json`` of the text-only layout.

    stored : names of the file's tensors: which layers are attention, and whether there is a head, is seen in them.
    """
    a, stored = f"{architecture}.", frozenset(stored)
    config: dict[str, Any] = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    config |= {name: metadata.integer(a + key) for key, name in _INTEGERS.items()}
    layers, _ = layer_count(metadata, architecture)
    heads, head_dim = config["linear_num_value_heads"], config["head_dim"]
    inner = metadata.integer(a + "ssm.inner_size")
    if heads < 1 or inner % heads:
        raise metadata.error(a + "ssm.inner_size", inner, f"expected a multiple of the {heads} value heads")
    if metadata.integer(a + "attention.value_length", head_dim) != head_dim:
        raise metadata.error(a + "attention.value_length", metadata.values[a + "attention.value_length"],
                             f"coli computes only values as long as keys, {head_dim}")  # fmt: skip
    gating = metadata.integer(a + "expert_gating_func", _SOFTMAX)
    if gating != _SOFTMAX:
        raise metadata.error(a + "expert_gating_func", gating, f"coli computes only {_SOFTMAX}, softmax")
    return config | {
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "layer_types": [FULL if is_full_attention(layer, stored) else LINEAR for layer in range(layers)],
        "num_key_value_heads": _key_value_heads(metadata, a + "attention.head_count_kv"),
        "linear_value_head_dim": inner // heads,
        "shared_expert_intermediate_size": metadata.integer(
            a + "expert_shared_feed_forward_length", config["moe_intermediate_size"]
        ),
        "rms_norm_eps": metadata.number(a + "attention.layer_norm_rms_epsilon"),
        "norm_topk_prob": metadata.values.get(a + "expert_weights_norm", True),
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata, a, head_dim),
        "tie_word_embeddings": "output.weight" not in stored,
    }


def generation_config_of(metadata: Metadata, tokens: dict[str, int]) -> dict[str, Any]:
    """``generation_config.json``: the ids that end an answer, and sampling defaults where the file has them.

    tokens : control tokens by their texts.
    """
    ends = [metadata.integer(f"tokenizer.ggml.{key}") for key in _END_KEYS if f"tokenizer.ggml.{key}" in metadata]
    ends += [tokens[text] for text in _END_TEXTS if text in tokens]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for key, name in _SAMPLING.items():
        if f"general.sampling.{key}" in metadata:
            found[name] = (metadata.integer if name == "top_k" else metadata.number)(f"general.sampling.{key}")
    return found


def _key_value_heads(metadata: Metadata, key: str) -> int:
    """One number; or one a layer, 0 where a layer has no attention."""
    if not isinstance(metadata.values.get(key), np.ndarray):
        return metadata.integer(key)
    found = set(metadata.integers(key)) - {0}
    if len(found) != 1:
        raise metadata.error(key, metadata.values[key].tolist(), "expected the same in all attention layers")
    return found.pop()


def _rope(metadata: Metadata, a: str, head_dim: int) -> dict[str, Any]:
    rotated = metadata.integer(a + "rope.dimension_count")
    if not 0 < rotated <= head_dim:
        raise metadata.error(a + "rope.dimension_count", rotated, f"expected 1 to {head_dim}, the head's length")
    scaling = metadata.text(a + "rope.scaling.type", "none")
    found = {
        "rope_type": "default" if scaling == "none" else scaling,
        "rope_theta": metadata.number(a + "rope.freq_base"),
        "partial_rotary_factor": rotated / head_dim,
    }
    if a + "rope.dimension_sections" in metadata:  # of three position rows, which for text are one
        found |= {"mrope_interleaved": True, "mrope_section": metadata.integers(a + "rope.dimension_sections")[:3]}
    return found
