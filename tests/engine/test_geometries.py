"""Geometries that no fixture has: wide heads, one expert, only one kind of layer, odd sizes; against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from coli._core import kernels
from coli.container.reader import Container
from coli.convert.synth_files import write_synthetic
from coli.convert.synthetic import GEOMETRIES, Synthetic
from coli.engine.session import Engine
from coli.engine.trace import trace
from conftest import assert_same_bits
from reference import Reference

SMALL = GEOMETRIES["small8"] | {
    "vocab_size": 500,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 1024,
}
VARIANTS = {
    "wide heads": {},  # widths that are whole groups: a head quantises its own part of o
    "all attention": {"layer_types": ["full_attention"] * 4},
    "all DeltaNet": {"layer_types": ["linear_attention"] * 4},
    "one layer": {"num_hidden_layers": 1},
    "every expert chosen": {"num_experts": 4, "num_experts_per_tok": 4},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "a K/V head for each query head": {"num_key_value_heads": 4},
    "odd sizes": {"hidden_size": 200, "head_dim": 48, "linear_value_head_dim": 40, "linear_key_head_dim": 24,
                  "moe_intermediate_size": 72, "shared_expert_intermediate_size": 40, "vocab_size": 77},
    "two taps": {"linear_conv_kernel_dim": 2},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_geometry_equals_the_reference(tmp_path, variant):
    """Logits and every layer equal numpy's to the last bit, in one prefill and one token at a time, 1 and 3 threads."""
    config = SMALL | VARIANTS[variant]
    write_synthetic(Synthetic(config, skew=0.5), variant, tmp_path / "model")
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 70)
    expected = Reference.open(tmp_path / "model").forward(ids)
    with Container.open(tmp_path / "model") as container:
        for isa, threads in ((None, 3), ("scalar", 1)) if variant != "wide heads" else _all_paths():
            engine = Engine(container, threads=threads, isa=isa)
            found = trace(engine, ids)
            for name in ("hidden", "mixer_out", "logits"):
                assert_same_bits(found[name], expected[name], f"{variant}, {isa}, {name}")
            session = engine.session()
            for at, token in enumerate(ids):
                assert_same_bits(session.step(int(token)), expected["logits"][at], f"{variant}, {isa}, step {at}")
            engine.close()


def _all_paths():
    return [(isa, threads) for isa in kernels.available() if isa != "amx" for threads in (2,)]
