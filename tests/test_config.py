"""coli/config.py: both layouts, every refusal by file and field."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import checkpoints
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli import config
from coli.config import ModelConfig, read_json_object
from coli.errors import ModelError

CASES = Path(__file__).parent / "data" / "cases" / "configs"


def read(name: str) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((CASES / name).read_text()), name)


def changed(**fields: object) -> dict:
    """The tiny text config with some fields replaced; None removes one."""
    config = checkpoints.text_config() | fields
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize("name", ["rope_nested_only.json", "rope_old_keys.json"])
def test_rope_theta_in_either_place_is_found(name):
    """C17: theta and the rotated share come from rope_parameters or from the older keys."""
    config = read(name)
    assert (config.rope_theta, config.rotary_dim) == (1e7, 64)


def test_rope_missing_is_an_error_that_names_the_key():
    """C17: a rope_theta that stands nowhere is refused, never assumed."""
    with pytest.raises(ModelError, match=r"rope_missing.json: text_config.rope_parameters.rope_theta is missing"):
        read("rope_missing.json")


def test_rope_scaled_is_refused_as_unsupported():
    """C17: a scaled RoPE is refused by its type."""
    with pytest.raises(ModelError, match=r'text_config.rope_parameters.rope_type is "yarn"'):
        read("rope_scaled_without_theta.json")


def test_rope_theta_that_stands_twice_must_agree():
    """Two different thetas are an error, not a choice."""
    with pytest.raises(ModelError, match="rope_theta is 10000.0; but rope_parameters.rope_theta is 1e"):
        ModelConfig.from_dict(changed(rope_theta=1e4))
    assert ModelConfig.from_dict(changed(rope_theta=1e7)).rope_theta == 1e7


def test_nested_and_flat_layouts_give_one_config():
    """The layout of the file is no part of the model, but for its model_type."""
    nested = ModelConfig.from_dict(checkpoints.nested_config())
    flat = ModelConfig.from_dict(checkpoints.text_config())
    assert {**vars(nested), "model_type": None} == {**vars(flat), "model_type": None}


def test_absent_fields_have_the_defaults_of_the_architecture():
    """What the published config leaves out is the 35B-A3B geometry, with layers by the interval."""
    config = read("rope_nested_only.json")
    assert (config.vocab_size, config.linear_num_value_heads, config.shared_expert_intermediate_size) == (
        248320,
        32,
        512,
    )
    assert config.full_layers == tuple(range(3, 40, 4)) and len(config.linear_layers) == 30
    assert (config.conv_channels, config.max_position_embeddings, config.eos_token_ids) == (8192, 32768, ())


def test_layer_types_win_over_the_interval():
    """A list of layers need not be periodic."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert ModelConfig.from_dict(changed(layer_types=kinds)).full_layers == (0, 3)


def test_tie_word_embeddings_at_the_top_wins_in_the_nested_layout():
    """transformers obeys the outer key of the multimodal layout."""
    config = checkpoints.nested_config() | {"tie_word_embeddings": True}
    assert ModelConfig.from_dict(config).tie_word_embeddings
    del config["tie_word_embeddings"]
    assert not ModelConfig.from_dict(config).tie_word_embeddings


def test_generation_config_replaces_the_stop_ids():
    """Stop ids come from generation_config.json where it has them, else from config.json."""
    assert ModelConfig.from_dict(changed()).eos_token_ids == (258,)
    assert ModelConfig.from_dict(changed(), generation={"eos_token_id": [256, 258, 256]}).eos_token_ids == (256, 258)
    assert ModelConfig.from_dict(changed(), generation={"top_k": 20}).eos_token_ids == (258,)
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is 272; expected token ids"):
        ModelConfig.from_dict(changed(), generation={"eos_token_id": 272})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model_type", "qwen3_moe", "coli knows qwen3_5_moe, qwen3_5_moe_text"),
        ("model_type", None, "model_type is null"),
        ("attn_output_gate", False, "attn_output_gate is false"),
        ("attention_bias", True, "attention_bias is true"),
        ("norm_topk_prob", False, "norm_topk_prob is false"),
        ("hidden_act", "gelu", 'hidden_act is "gelu"'),
        ("hidden_size", 64.0, "hidden_size is 64.0; expected an integer"),
        ("hidden_size", True, "hidden_size is true"),
        ("hidden_size", 0, "expected 1 to"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000"),
        ("num_hidden_layers", 5, "num_hidden_layers is 5"),
        ("num_experts_per_tok", 9, "num_experts is 8"),
        ("num_key_value_heads", 3, "expected a multiple of num_key_value_heads = 3"),
        ("linear_num_key_heads", 3, "expected a multiple of linear_num_key_heads = 3"),
        ("linear_conv_kernel_dim", 17, "linear_conv_kernel_dim is 17; expected 1 to 16"),
        ("num_experts_per_tok", 65, "num_experts_per_tok is 65; expected 1 to 64"),
        ("num_attention_heads", 130, "is 130; expected at most 64 for each of num_key_value_heads = 2"),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"], r"layer_types\[3\]"),
        ("layer_types", "full_attention", "expected a list"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is NaN"),
        ("rms_norm_eps", "1e-6", "expected a number"),
        ("rope_parameters", {"rope_theta": 1e7, "partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1"),
        ("rope_parameters", {"rope_theta": float("inf")}, "rope_theta is Infinity"),
        ("rope_parameters", [1e7], "expected an object"),
        ("tie_word_embeddings", "yes", "expected true or false"),
        ("eos_token_id", [-1], "expected token ids"),
    ],
)  # fmt: skip
def test_field_that_cannot_be_is_refused_by_name(field, value, expected):
    """Every refusal names the file, the field, what was found and what was expected."""
    with pytest.raises(ModelError, match=expected) as caught:
        ModelConfig.from_dict(changed(**{field: value}), "some/config.json")
    assert str(caught.value).startswith("some/config.json: ") and "\n" not in str(caught.value)


def test_limits_are_those_of_the_kernels():
    """What the step has no room for is refused here, by its field, and nothing else is."""
    from coli._core import step

    assert (config.MAX_CONV_TAPS, config.MAX_TOP_K, config.MAX_HEADS_PER_KV) == (
        step.MAX_CONV_TAPS, step.MAX_TOP_K, step.MAX_HEADS_PER_KV,
    )  # fmt: skip
    heads = checkpoints.text_config()["num_key_value_heads"] * 64
    most = changed(num_attention_heads=heads, linear_conv_kernel_dim=16, num_experts=64, num_experts_per_tok=64)
    assert ModelConfig.from_dict(most).num_attention_heads == heads


def test_file_that_is_no_json_object_is_refused(tmp_path):
    """Not there, not JSON, not an object, nested without end: one line each."""
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match="no such file"):
        read_json_object(path)
    for text in ("", "{", "[]", "3", "[" * 100_000, "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ModelError, match=str(path)):
            read_json_object(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(checkpoints.text_config())), json_values, st.booleans())
def test_any_value_in_any_field_is_a_config_or_a_model_error(field, value, nested):
    """Whatever stands in a field, the outcome is a checked configuration or one ModelError."""
    config = copy.deepcopy(checkpoints.nested_config() if nested else checkpoints.text_config())
    (config["text_config"] if nested else config)[field] = value
    try:
        made = ModelConfig.from_dict(config)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert len(made.layer_types) == made.num_hidden_layers < sys.maxsize and made.rotary_dim % 2 == 0
