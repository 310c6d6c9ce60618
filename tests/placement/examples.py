"""Shapes and machines that several placement tests use."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from coli.placement import DeviceFacts, ModelShape

MIB = 1 << 20

# Of property tests: a busy machine is no finding.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# The fields of Qwen3.6-35B-A3B that sizes follow from; the rest of its config.json is of no interest here.
QWEN36_35B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
    },
}


def shape(
    lmhead: float = 0, dnproj: float = 0, n: int = 0, *, n_experts: int = 256, topk: int = 8, **others: object
) -> ModelShape:
    """The source's kind of case, in MiB: an lm_head, ``n`` DeltaNet layers, then an attention layer; experts of 1."""
    components = [("lmhead", None, lmhead * MIB)] if lmhead else []
    components += [("dnproj", layer, dnproj * MIB) for layer in range(n)]
    given = {"layers": 8, "expert_bytes": MIB, "cpu_bytes_ratio": 2.0} | others
    return ModelShape(components, n_experts=n_experts, topk=topk, **given)


def cards(*free_mib: float) -> list[DeviceFacts]:
    """Devices with so many MiB free, without reserve."""
    return [DeviceFacts(f"card {i}", int(free * MIB)) for i, free in enumerate(free_mib)]


def skewed_heat(layers: int, experts: int, seed: int, skew: float = 1.0) -> list[list[int]]:
    """Counts in which few experts of a layer get most, others in each layer."""
    import random

    draw = random.Random(seed)
    return [[int(1000 * draw.random() ** -skew) for _ in range(experts)] for _ in range(layers)]


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    """Small models of any sizes, down to no component and no expert."""
    layers = draw(st.integers(1, 6))
    size = st.integers(1, 4000)
    components = [("lmhead", None, draw(st.integers(1, 20_000)))] if draw(st.booleans()) else []
    for layer in range(layers):
        if draw(st.booleans()):
            components += [("dnproj", layer, draw(size)), ("dnout", layer, draw(size))]
        elif draw(st.booleans()):
            components.append(("attnproj", layer, draw(size)))
        if draw(st.booleans()):
            components.append(("shexp", layer, draw(size)))
    n_experts = draw(st.integers(0, 12))
    return ModelShape(
        components,
        layers=layers,
        n_experts=n_experts,
        topk=draw(st.integers(1, n_experts)) if n_experts else 0,
        expert_bytes=draw(st.integers(1, 1500)) if n_experts else 0,
        cpu_bytes_ratio=draw(st.sampled_from([0.5, 1.0, 2.0, 3.7])),
    )


def heats(model: ModelShape) -> st.SearchStrategy[list[list[int]] | None]:
    """Heat of a model, or none."""
    row = st.lists(st.integers(0, 100_000), min_size=model.n_experts, max_size=model.n_experts)
    return st.none() | st.lists(row, min_size=model.layers, max_size=model.layers)


@st.composite
def machines(draw: st.DrawFn, largest: int = 3) -> list[DeviceFacts]:
    """Up to three devices, some with less than their reserve."""
    free = draw(st.lists(st.integers(0, 60_000), min_size=0, max_size=largest))
    return [DeviceFacts(f"card {i}", n, reserve_bytes=draw(st.integers(0, 3000))) for i, n in enumerate(free)]


@st.composite
def place_lists(draw: st.DrawFn, layers: int, n_devices: int) -> str:
    """Legal lists."""
    names = draw(st.permutations(["lmhead", "dnproj", "dnout", "attnproj", "shexp", "experts"]))
    device = st.integers(0, n_devices - 1) if n_devices else st.nothing()
    items = []
    for name in names[: draw(st.integers(1, 6))]:
        if name == "experts":
            some = st.lists(device, min_size=1, unique=True).map(lambda found: "+".join(map(str, found)))
            items.append(f"{name}={draw(st.sampled_from(['cpu', 'all']) | some)}")
            continue
        left, segments = layers, []
        while left and draw(st.booleans()) and n_devices:
            count = draw(st.integers(1, left))
            left -= count
            segments.append(f"{draw(device)}:{count}")
        spec = "+".join(segments) or draw(st.just("cpu") | device.map(str))
        items.append(f"{name}={spec}")
    return ",".join(items)
