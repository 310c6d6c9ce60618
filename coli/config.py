"""The model's configuration: one frozen dataclass, named by Hugging Face's keys, every field checked.

Reads both layouts of ``config.json``: the multimodal one (text fields inside ``text_config``) and the
text-only one (fields at the top).  It opens no file but the two JSON files it is pointed at, knows no
tensor and no device.  Invariant: a ``ModelConfig`` that exists describes a model that can be computed;
what the forward pass does not implement (an ungated attention, scaled RoPE, another activation) is
refused here, by field, and never replaced by a default.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.errors import ModelError

# The multimodal layout holds a text_config of the second type.
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")

LINEAR, FULL = "linear_attention", "full_attention"

# What the kernels have room for (coli/_core/step.pyx refuses more, and a test holds the two together).
MAX_CONV_TAPS = 16
MAX_TOP_K = 64
MAX_HEADS_PER_KV = 64

# field -> (default when absent, smallest, largest).  Defaults are those of transformers 5.17
# (Qwen3_5MoeTextConfig); the other upper bounds keep a damaged file from asking for absurd allocations.
_INTEGERS = {
    "vocab_size": (248320, 1, 1 << 24),
    "hidden_size": (2048, 1, 1 << 17),
    "num_hidden_layers": (40, 1, 4096),
    "num_attention_heads": (16, 1, 4096),
    "num_key_value_heads": (2, 1, 4096),
    "head_dim": (256, 2, 4096),
    "linear_num_key_heads": (16, 1, 4096),
    "linear_num_value_heads": (32, 1, 4096),
    "linear_key_head_dim": (128, 1, 4096),
    "linear_value_head_dim": (128, 1, 4096),
    "linear_conv_kernel_dim": (4, 1, MAX_CONV_TAPS),
    "num_experts": (256, 1, 65536),
    "num_experts_per_tok": (8, 1, MAX_TOP_K),
    "moe_intermediate_size": (512, 1, 1 << 17),
    "shared_expert_intermediate_size": (512, 1, 1 << 17),
    "max_position_embeddings": (32768, 1, 1 << 31),
}

# What the forward pass does, where a checkpoint may ask for something else: field -> the value it must have.
_FIXED = {
    "attn_output_gate": True,
    "attention_bias": False,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass needs to know of a model.

    Field names are the keys of the (text) config.  ``layer_types`` has one of "linear_attention"
    (Gated DeltaNet) or "full_attention" a layer.  ``eos_token_ids`` are what these two files name, checked; an answer
    ends at more than these (`coli.text.defaults.stop_ids`, which knows the tokenizer's files too).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a query or key head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def conv_channels(self) -> int:
        """Channels of the DeltaNet convolution: q, k and v side by side."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def linear_key_dim(self) -> int:
        """Width of a DeltaNet layer's keys (and queries), all heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of a DeltaNet layer's values, all heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def attention_dim(self) -> int:
        """Width of an attention layer's queries, all heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_dim(self) -> int:
        """Width of an attention layer's keys (and values), all heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indexes of the DeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indexes of the attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json`` of a folder.

        Raises ModelError naming the file and the field.
        """
        folder = Path(folder)
        generation_path = folder / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.exists() else None
        path = folder / "config.json"
        return cls.from_dict(read_json_object(path), str(path), generation, str(generation_path))

    @classmethod
    def from_dict(
        cls,
        config: dict[str, Any],
        source: str = "config.json",
        generation: dict[str, Any] | None = None,
        generation_source: str = "generation_config.json",
    ) -> ModelConfig:
        """Check a parsed ``config.json``, nested or flat, and make the dataclass.

        source : what error messages call the file.
        generation : the parsed ``generation_config.json``; its ``eos_token_id`` replaces the config's.

        Raises ModelError naming the file and the field.
        """
        fields = _Fields(config, source)
        model_type = _model_type(fields)
        text = fields.child("text_config") if "text_config" in config else fields
        if text is not fields:
            _model_type(text)
        for key, value in _FIXED.items():
            found = text.get(key, value)
            if type(found) is not type(value) or found != value:
                raise text.error(key, found, f"coli computes only {json.dumps(value)}")

        numbers = {key: text.integer(key, *bounds) for key, bounds in _INTEGERS.items()}
        rope_theta, partial_rotary_factor = _rope(text)
        made = cls(
            model_type=model_type,
            layer_types=_layer_types(text, numbers["num_hidden_layers"]),
            rms_norm_eps=text.number("rms_norm_eps", 1e-6, 0.0, 1.0),
            rope_theta=rope_theta,
            partial_rotary_factor=partial_rotary_factor,
            # The multimodal layout's top-level key is the one that transformers obeys.
            tie_word_embeddings=(fields if "tie_word_embeddings" in config else text).boolean(
                "tie_word_embeddings", False
            ),
            eos_token_ids=_eos_token_ids(fields, text, generation, generation_source, numbers["vocab_size"]),
            **numbers,
        )
        _check_divisibility(made, text)
        return made


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold an object.  Raises ModelError naming the file."""
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: holds a JSON {type(parsed).__name__}, expected an object")
    return parsed


def shown(value: Any, longest: int = 80) -> str:
    """A value from a file or a request, for a message of one line: ASCII, control characters escaped, cut to length."""
    text = ascii(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def one_line(error: BaseException, longest: int = 300) -> str:
    """What a library says of an error, which may quote the file at length, as one line of printable characters."""
    text = " ".join(str(error).split())
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:longest])
    return text if len(text) < longest else text[: longest - 3] + "..."


class _Fields:
    """Typed look-ups in one JSON object; knows what its errors must name."""

    def __init__(self, values: dict[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is absent or null (transformers writes nulls)."""
        value = self.values.get(key)
        return default if value is None else value

    def child(self, key: str) -> _Fields:
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.error(key, value, "expected an object")
        return _Fields(value, self.source, f"{self.prefix}{key}.")

    def integer(self, key: str, default: int, smallest: int, largest: int) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "expected an integer")
        if not smallest <= value <= largest:
            raise self.error(key, value, f"expected {smallest} to {largest}")
        return value

    def number(self, key: str, default: float | None, above: float, largest: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, value, "expected a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not above < value <= largest:
            raise self.error(key, value, f"expected more than {above:g} and at most {largest:g}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "expected true or false")
        return value

    def error(self, key: str, found: Any, expected: str) -> ModelError:
        text = json.dumps(found, default=str)
        if len(text) > 80:
            text = text[:77] + "..."
        return ModelError(f"{self.source}: {self.prefix}{key} is {text}; {expected}")


def _model_type(fields: _Fields) -> str:
    found = fields.get("model_type")
    if found in MODEL_TYPES:
        return found
    known = ", ".join(MODEL_TYPES)
    near = difflib.get_close_matches(str(found), MODEL_TYPES, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise fields.error("model_type", found, f"coli knows {known}{hint}")


def _layer_types(text: _Fields, layers: int) -> tuple[str, ...]:
    """``layer_types`` where present, which wins; else every ``full_attention_interval``-th layer is attention."""
    kinds = text.get("layer_types")
    if kinds is None:
        interval = text.integer("full_attention_interval", 4, 1, 4096)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    if not isinstance(kinds, list):
        raise text.error("layer_types", kinds, "expected a list of names")
    for i, kind in enumerate(kinds):
        if kind not in (LINEAR, FULL):
            raise text.error(f"layer_types[{i}]", kind, f"coli knows {LINEAR}, {FULL}")
    if len(kinds) != layers:
        raise text.error("layer_types", f"{len(kinds)} names", f"num_hidden_layers is {layers}")
    return tuple(kinds)


def _rope(text: _Fields) -> tuple[float, float]:
    """theta and the rotated share, from ``rope_parameters``, or from the older keys.

    Older files hold theta and factor in the text config itself and the rest in ``rope_scaling``.
    A theta is never assumed: a wrong one gives fluent nonsense after a few hundred tokens.
    """
    places = [text.child(key) for key in ("rope_parameters", "rope_scaling") if key in text]
    for place in places:
        for key in ("rope_type", "type"):
            if place.get(key, "default") != "default":
                raise place.error(key, place.get(key), 'coli computes only "default" (unscaled) RoPE')
    places.append(text)

    def find(key: str, default: float | None, largest: float) -> float:
        found = [(place, place.number(key, None, 0.0, largest)) for place in places if key in place]
        for place, value in found[1:]:
            if value != found[0][1]:
                first = f"{found[0][0].prefix}{key}"
                raise place.error(key, value, f"but {first} is {found[0][1]:g}: they must agree")
        if found:
            return found[0][1]
        if default is None:
            raise ModelError(
                f"{text.source}: {text.prefix}rope_parameters.{key} is missing (and so is the older "
                f"{text.prefix}{key}); it is never assumed: take it from the original checkpoint"
            )
        return default

    return find("rope_theta", None, 1e12), find("partial_rotary_factor", 0.25, 1.0)


def _eos_token_ids(
    fields: _Fields, text: _Fields, generation: dict[str, Any] | None, generation_source: str, vocab_size: int
) -> tuple[int, ...]:
    """``generation_config.json`` wins over the text config, which wins over the top level."""
    places = [text, fields]
    if generation is not None:
        places.insert(0, _Fields(generation, generation_source))
    for place in places:
        if "eos_token_id" not in place:
            continue
        value = place.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise place.error("eos_token_id", value, f"expected token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))
    return ()


def _check_divisibility(config: ModelConfig, text: _Fields) -> None:
    if config.num_experts_per_tok > config.num_experts:
        raise text.error("num_experts_per_tok", config.num_experts_per_tok, f"num_experts is {config.num_experts}")
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, many) % getattr(config, few):
            raise text.error(many, getattr(config, many), f"expected a multiple of {few} = {getattr(config, few)}")
    if config.num_attention_heads > MAX_HEADS_PER_KV * config.num_key_value_heads:
        raise text.error(
            "num_attention_heads",
            config.num_attention_heads,
            f"expected at most {MAX_HEADS_PER_KV} for each of num_key_value_heads = {config.num_key_value_heads}",
        )
    if config.rotary_dim < 2 or config.rotary_dim % 2:
        raise text.error(
            "partial_rotary_factor",
            config.partial_rotary_factor,
            f"it rotates {config.rotary_dim} of head_dim = {config.head_dim} elements; expected an even number",
        )
