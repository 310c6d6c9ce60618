"""The geometry of a model, from its ``config.json`` as a dict: what sizes follow from, and nothing else.

Whether the model can be computed (RoPE, activation, gates) is ``coli.config``'s judgement; a plan needs neither
the file nor the rest of it.  Invariant: every field is a positive integer, every layer has a known kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from coli.errors import ModelError

_MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
_LINEAR, _FULL = "linear_attention", "full_attention"
_STORED = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_STORED_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True)
class Geometry:
    """Fields are keys of the text config; defaults are those of transformers 5.17 (Qwen3_5MoeTextConfig).

    layer_types : "linear_attention" (Gated DeltaNet) or "full_attention" for each layer.
    stored : the checkpoint's number format, "bf16", "f16" or "f32".
    """

    layer_types: tuple[str, ...]
    stored: str
    vocab_size: int = 248320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    max_position_embeddings: int = 32768

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Geometry:
        """Read a parsed ``config.json``, nested or flat.  Raises ModelError naming the field."""
        if not isinstance(config, dict):
            raise ModelError(f"config.json: holds a {type(config).__name__}, expected an object")
        nested = config.get("text_config")
        text = nested if isinstance(nested, dict) else config
        for values in (config, text):
            _check_model_type(values.get("model_type"))
        if text.get("model_type") is None and text.get("num_hidden_layers") is None:
            raise ModelError("config.json: has neither model_type nor num_hidden_layers; expected a model's config")
        numbers = {
            field.name: _positive(field.name, text.get(field.name), field.default)
            for field in fields(cls)
            if field.name not in ("layer_types", "stored")
        }
        dtypes = (values.get(key) for values in (text, config) for key in ("dtype", "torch_dtype"))
        stored = next((_STORED[dtype] for dtype in dtypes if dtype in _STORED), "bf16")
        return cls(_layer_types(text, numbers["num_hidden_layers"]), stored, **numbers)

    @classmethod
    def from_config(cls, config: Any) -> Geometry:
        """The same of a ``coli.config.ModelConfig``, whose fields have these names and are checked."""
        return cls(stored="bf16", **{f.name: getattr(config, f.name) for f in fields(cls) if f.name != "stored"})

    @property
    def linear_layers(self) -> int:
        """How many layers are Gated DeltaNet."""
        return self.layer_types.count(_LINEAR)

    @property
    def full_layers(self) -> int:
        """How many layers are gated attention."""
        return self.layer_types.count(_FULL)

    def components(
        self, size: Callable[[int, int], int], shared_expert_bytes: int
    ) -> list[tuple[str, int | None, int]]:
        """(name, layer, bytes) of every movable component; ``size(rows, cols)`` gives a matrix's bytes."""
        hidden = self.hidden_size
        attention_dim = self.num_attention_heads * self.head_dim
        # q_proj has rows for the query and for its gate.
        qkv_rows = 2 * attention_dim + 2 * self.num_key_value_heads * self.head_dim
        made: list[tuple[str, int | None, int]] = [("lmhead", None, size(self.vocab_size, hidden))]
        for i, kind in enumerate(self.layer_types):
            if kind == _LINEAR:
                made.append(("dnproj", i, size(self._conv_channels + self._value_dim, hidden)))
                made.append(("dnout", i, size(hidden, self._value_dim)))
            else:
                made.append(("attnproj", i, size(qkv_rows, hidden) + size(hidden, attention_dim)))
            made.append(("shexp", i, shared_expert_bytes))
        return made

    def kv_bytes_per_position(self, number_bytes: int) -> int:
        """Bytes of the keys and values of one position, all attention layers."""
        return self.full_layers * 2 * self.num_key_value_heads * self.head_dim * number_bytes

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence, float32: each head's matrix, and the raw rows before the convolution."""
        numbers = self._value_dim * self.linear_key_head_dim + (self.linear_conv_kernel_dim - 1) * self._conv_channels
        return 4 * self.linear_layers * numbers

    @property
    def rest_bytes(self) -> int:
        """What a token reads besides components and experts, as stored: norms, router, gates, one embedding row."""
        hidden, heads = self.hidden_size, self.linear_num_value_heads
        every = 3 * hidden + self.num_experts * hidden  # two norms, the shared expert's gate, the router
        linear = 2 * heads * hidden + self._conv_channels * self.linear_conv_kernel_dim + 2 * heads
        linear += self.linear_value_head_dim
        full = 2 * self.head_dim
        numbers = 2 * hidden + self.num_hidden_layers * every + self.linear_layers * linear + self.full_layers * full
        return numbers * _STORED_BYTES[self.stored]

    @property
    def fixed_bytes(self) -> int:
        """What lies beside components and experts, as stored: that, with all rows of the embedding."""
        return self.rest_bytes + (self.vocab_size - 1) * self.hidden_size * _STORED_BYTES[self.stored]

    @property
    def vector_bytes(self) -> tuple[int, int]:
        """What a card keeps beside the projections of all DeltaNet layers, and of all attention layers, at most: the
        float32 vectors between them, b and a, and the alignment of each."""
        taps = 4 * self.linear_conv_kernel_dim * self._conv_channels
        ba = 2 * self.linear_num_value_heads * 4 * self.hidden_size
        return self.linear_layers * (taps + ba + 4096), self.full_layers * 8192

    @property
    def _value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def _conv_channels(self) -> int:
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self._value_dim


def _check_model_type(found: Any) -> None:
    if found is not None and found not in _MODEL_TYPES:
        near = difflib.get_close_matches(str(found), _MODEL_TYPES, 1, 0.0)[0]
        raise ModelError(
            f"config.json: model_type is {found!r}; coli knows {', '.join(_MODEL_TYPES)} (nearest: {near})"
        )


def _positive(key: str, value: Any, default: int) -> int:
    value = default if value is None else value
    # The bound keeps a damaged file from asking for absurd lists.
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= (1 << 31):
        raise ModelError(f"config.json: {key} is {value!r}; expected a positive integer")
    if key == "num_hidden_layers" and value > 4096:
        raise ModelError(f"config.json: {key} is {value}; expected at most 4096")
    return value


def _layer_types(text: dict[str, Any], layers: int) -> tuple[str, ...]:
    """``layer_types`` where present, which wins; else every ``full_attention_interval``-th layer is attention."""
    kinds = text.get("layer_types")
    if kinds is None:
        interval = _positive("full_attention_interval", text.get("full_attention_interval"), 4)
        return tuple(_LINEAR if (i + 1) % interval else _FULL for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        found = f"{len(kinds)} names" if isinstance(kinds, list) else repr(kinds)
        raise ModelError(f"config.json: layer_types is {found}; num_hidden_layers is {layers}")
    for i, kind in enumerate(kinds):
        if kind not in (_LINEAR, _FULL):
            raise ModelError(f"config.json: layer_types[{i}] is {kind!r}; coli knows {_LINEAR}, {_FULL}")
    return tuple(kinds)
