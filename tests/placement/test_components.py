"""coli.placement.components and geometry: the shape of a model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from coli.config import ModelConfig
from coli.errors import ModelError, PlacementError
from coli.placement import ModelShape
from placement.examples import MIB, QWEN36_35B, shape

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"


def sizes(model: ModelShape) -> dict[str, tuple[int, int]]:
    """{component: (how many, bytes of each)}; all of a kind must be equal."""
    found: dict[str, list[int]] = {}
    for item in model.components:
        found.setdefault(item.name, []).append(item.bytes)
    assert all(len(set(bytes_of)) == 1 for bytes_of in found.values())
    return {name: (len(bytes_of), bytes_of[0]) for name, bytes_of in found.items()}


def test_from_config_35b_r16_has_the_containers_sizes():
    """At 35B geometry the r16 sizes are those of docs/numerics.md, section 3."""
    model = ModelShape.from_config(QWEN36_35B)
    expected = {
        "lmhead": (1, 510_545_920),
        "dnproj": (30, 25_264_128),
        "dnout": (30, 8_404_992),
        "attnproj": (10, 27_353_088),
        "shexp": (40, 3_170_304),
    }
    assert expected == sizes(model)
    assert 1_622_016 == model.expert_bytes
    assert (40, 256, 8, 10_240) == (model.layers, model.n_experts, model.topk, model.expert_count)


def test_from_config_35b_flat_has_the_sources_sizes():
    """The flat sizes are out * in + 4 * out."""
    model = ModelShape.from_config(QWEN36_35B, layout="flat", expert_bytes=1_589_248, cpu_bytes_ratio=2)
    expected = {
        "lmhead": (1, 509_552_640),
        "dnproj": (30, 25_214_976),
        "dnout": (30, 8_396_800),
        "attnproj": (10, 27_308_032),
        "shexp": (40, 3_158_016),
    }
    assert expected == sizes(model)
    assert (1_589_248, 3_178_496) == (model.expert_bytes, model.cpu_expert_bytes)
    assert 1_585_152 == ModelShape.from_config(QWEN36_35B, layout="flat").expert_bytes


def test_from_config_context_costs_grow_with_positions_and_state_does_not():
    """Keys and values: 20 KiB a position in float16, 40 in a 16-bit container; the state is 62.8 MiB."""
    model = ModelShape.from_config(QWEN36_35B)
    assert 20_480 == model.kv_bytes_per_position
    assert 20_480 * 4096 == model.kv_bytes(4096)
    assert 40_960 == ModelShape.from_config(QWEN36_35B, trunk_bits=16, expert_bits=16).kv_bytes_per_position
    assert 4 * 30 * (32 * 128 * 128 + 3 * 8192) == model.state_bytes


def test_from_config_flat_layout_of_the_file_gives_the_same_shape():
    """Nested and text-only config.json describe the same model."""
    assert ModelShape.from_config(QWEN36_35B) == ModelShape.from_config(QWEN36_35B["text_config"])


def test_from_config_layer_types_win_over_the_interval():
    """Attention layers are where layer_types puts them; without it, every fourth."""
    config = copy.deepcopy(QWEN36_35B)
    config["text_config"] |= {"layer_types": ["full_attention"] + ["linear_attention"] * 39}
    model = ModelShape.from_config(config)
    assert [0] == [item.layer for item in model.components if item.name == "attnproj"]
    del config["text_config"]["layer_types"]
    model = ModelShape.from_config(config)
    assert list(range(3, 40, 4)) == [item.layer for item in model.components if item.name == "attnproj"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("hidden_size", "2048"),
        ("vocab_size", -1),
        ("head_dim", 2.5),
        ("num_experts", True),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["mamba"] * 40),
        ("layer_types", 40),
        ("model_type", "qwen3_next"),
    ],
)
def test_from_config_with_a_bad_field_names_it(field, value):
    """What cannot be a model is one error that names the field."""
    config = copy.deepcopy(QWEN36_35B)
    config["text_config"][field] = value
    with pytest.raises(ModelError, match=field) as raised:
        ModelShape.from_config(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("config", [[], None, {}, {"text_config": {}}, {"foo": 1}])
def test_from_config_of_something_else_is_refused(config):
    """A JSON file that is no model's config is not read as a model of all defaults."""
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    "argument", [{"layout": "r8"}, {"expert_bits": 5}, {"trunk_bits": 32}, {"cpu_bytes_ratio": 0}, {"expert_bytes": 0}]
)
def test_from_config_with_a_bad_argument_names_it(argument):
    """Arguments are checked, not guessed."""
    with pytest.raises(PlacementError, match=next(iter(argument))):
        ModelShape.from_config(QWEN36_35B, **argument)


def test_shape_components_stand_in_the_order_of_the_offers():
    """lmhead, then each kind by layer, whatever order they are given in."""
    given = [("shexp", 0, 1), ("dnout", 1, 2), ("dnproj", 1, 3), ("lmhead", 7, 4), ("dnproj", 0, 5), ("attnproj", 2, 6)]
    model = ModelShape(given, layers=3, n_experts=1, topk=1, expert_bytes=1)
    expected = ["lmhead", "dnproj 0", "dnproj 1", "dnout 1", "attnproj 2", "shexp 0"]
    assert expected == [item.label for item in model.components]


def test_shape_expert_layers_may_be_all_a_number_or_indexes():
    """None is all layers, a number the first so many."""
    assert 8 * 48 == shape(n_experts=48).expert_count
    assert 48 == shape(n_experts=48, expert_layers=1).expert_count
    assert (2, 5) == shape(n_experts=48, expert_layers=[5, 2]).expert_layers
    assert 0 == shape(n_experts=0, topk=0, expert_bytes=0).expert_count


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 2.5}, "layers"),
        ({"n_experts": -1}, "n_experts"),
        ({"topk": 0}, "topk"),
        ({"topk": 9}, "topk"),
        ({"expert_bytes": 0}, "expert_bytes"),
        ({"expert_bytes": "1MiB"}, "expert_bytes"),
        ({"cpu_bytes_ratio": float("nan")}, "cpu_bytes_ratio"),
        ({"expert_layers": [0, 0]}, "expert_layers"),
        ({"expert_layers": [3]}, "expert_layers"),
        ({"components": [("router", 0, 1)]}, "router"),
        ({"components": [("dnproj", 3, 1)]}, "dnproj"),
        ({"components": [("dnproj", None, 1)]}, "dnproj"),
        ({"components": [("dnproj", 0, 0)]}, "dnproj 0"),
        ({"components": [("dnproj", 0, 1.5)]}, "dnproj 0"),
        ({"components": [("dnproj", 0, 1), ("dnproj", 0, 1)]}, "dnproj 0 is listed twice"),
        ({"components": [("lmhead", None, 1), ("lmhead", 1, 1)]}, "lmhead is listed twice"),
    ],
)
def test_shape_that_cannot_be_is_refused_by_name(change, names):
    """A shape is checked when it is made."""
    good = {"components": [], "layers": 3, "n_experts": 8, "topk": 2, "expert_bytes": MIB}
    with pytest.raises(PlacementError, match=names):
        ModelShape(**(good | change))


@pytest.mark.parametrize("name", ["tiny-random", "tiny-textonly"])
def test_from_config_of_the_fixtures_reads_both_layouts(name):
    """Real config files, nested with layer_types and flat without."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    checked = ModelConfig.from_dict(config)
    model = ModelShape.from_config(config)
    assert checked.num_hidden_layers == model.layers
    assert list(checked.full_layers) == [item.layer for item in model.components if item.name == "attnproj"]
    assert list(checked.linear_layers) == [item.layer for item in model.components if item.name == "dnproj"]


def test_from_container_sums_the_tensors_own_bytes():
    """Components are their tensors' own bytes, matrices of one component together; a tied head is its embedding."""

    def tensor(component: str, n_bytes: int) -> SimpleNamespace:
        return SimpleNamespace(entry=SimpleNamespace(component=component), place=SimpleNamespace(n_bytes=n_bytes))

    config = ModelConfig.from_dict(json.loads((FIXTURES / "tiny-textonly" / "config.json").read_text()))
    container = SimpleNamespace(
        config=config,
        tensors={
            "embed_tokens": tensor("embed", 999),
            "layers.0.linear_attn.in_proj_qkvz": tensor("dnproj", 100),
            "layers.3.self_attn.qkv_proj": tensor("attnproj", 70),
            "layers.3.self_attn.o_proj": tensor("attnproj", 7),
            "layers.3.mlp.experts": tensor("experts", 5000),
            "layers.3.mlp.gate": tensor("router", 11),
        },
        manifest=SimpleNamespace(experts={"stride_bytes": 500}, kv_dtype="float32"),
        bytes_read_per_token=lambda: {
            "lmhead": 999,
            "dnproj": 100,
            "attnproj": 77,
            "experts": 1000,
            "router": 11,
            "embed": 96,
        },
    )
    model = ModelShape.from_container(container)
    assert {"lmhead": 999, "dnproj 0": 100, "attnproj 3": 77} == {item.label: item.bytes for item in model.components}
    assert (500, 107) == (model.expert_bytes, model.rest_bytes)
    assert 2 * config.key_value_dim * 4 * len(config.full_layers) == model.kv_bytes_per_position
