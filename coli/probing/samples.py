"""Weights to measure with: few layers of the geometry of Qwen3.6-35B-A3B, or of the same at a fraction of its width.

Random numbers are made for one layer of each kind and copied to the others: a copy lies elsewhere in memory, which is
what counts, and takes no time to make.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from coli.container.reader import Matrix, Slabs
from coli.convert.synthetic import Synthetic, SyntheticContainer, geometry

N_LAYERS = 6  # of a block: DeltaNet, then attention
N_DELTANET = 4
FULL_WIDTH = 2048  # hidden_size
WIDTHS = (1, 2, 4, 8)  # divisors of the widths of the real model, whose own is the best ruler
NARROWEST = WIDTHS[-1]
_VOCAB = 256
PROJECTIONS = {
    "linear_attention": ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
    "full_attention": ("self_attn.qkv_proj", "self_attn.o_proj"),
}


def widths(divisor: int, n_experts: int, n_blocks: int = 1) -> dict[str, Any]:
    """A config.json with the widths divided; every token chooses 8 experts."""
    whole = geometry("qwen36-35b")
    kinds = n_blocks * (["linear_attention"] * N_DELTANET + ["full_attention"] * (N_LAYERS - N_DELTANET))
    narrow = ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_attention_heads",
              "linear_num_key_heads", "linear_num_value_heads")  # fmt: skip
    return whole | {name: whole[name] // divisor for name in narrow} | {
        "num_hidden_layers": len(kinds), "layer_types": kinds, "vocab_size": _VOCAB, "num_experts": n_experts,
    }  # fmt: skip


class Samples(SyntheticContainer):
    """A container in memory whose layers of a kind hold the same numbers, in memory of their own."""

    def __init__(self, divisor: int = 1, n_experts: int = 8, n_blocks: int = 1) -> None:
        super().__init__(Synthetic(widths(divisor, n_experts, n_blocks)))
        self.divisor = divisor

    def matrix(self, name: str) -> Matrix:
        """A matrix of the trunk, or a row-major one."""
        twin = self._twin(name)
        if name not in self._made and twin != name:
            first = super().matrix(twin)
            self._made[name] = replace(first, name=name, data=first.data.copy())
        return super().matrix(name)

    def slabs(self, name: str) -> Slabs:
        """All experts of a layer, which are copies of one; or its shared expert."""
        if name not in self._made:
            one = self._one_expert(name) if name.endswith(".experts") else super().slabs(self._twin(name))
            count = self.config.num_experts if name.endswith(".experts") else 1
            self._made[name] = replace(one, name=name, count=count, data=np.tile(one.data, count))
        return self._made[name]

    def _one_expert(self, name: str) -> Slabs:
        if "expert" not in self._made:
            alone = Synthetic(self.weights.config_dict | {"num_experts": 8})
            self._made["expert"] = SyntheticContainer(alone).slabs(self._twin(name))
        made = self._made["expert"]
        return replace(made, count=1, data=made.data[: made.stride_bytes])

    def _twin(self, name: str) -> str:
        """The same matrix of the first layer of its kind."""
        parts = name.split(".")
        if parts[0] != "layers":
            return name
        first = self.config.layer_types.index(self.config.layer_types[int(parts[1])])
        return ".".join(["layers", str(first), *parts[2:]])


def samples_for(room_bytes: int) -> Samples:
    """The widest samples that fit a room, or the narrowest."""
    for divisor in WIDTHS:
        made = Samples(divisor)
        if sample_bytes(made) <= room_bytes:
            break
    return made


def sample_bytes(samples: Samples) -> int:
    """What a card takes of them: all layers, and the matrix that is large."""
    from coli.placement import ModelShape

    shape = ModelShape.from_config(samples.weights.config_dict)
    return (
        shape.trunk_bytes + shape.expert_count * shape.expert_bytes + large_rows(samples) * samples.config.hidden_size
    )


def large_rows(samples: Samples) -> int:
    """Rows of a matrix that is large beside the caches of a card: 128 MB at full width."""
    return 32 * samples.config.hidden_size


def large_matrix(samples: Samples) -> Matrix:
    """It, as copies of a projection's blocks."""
    first = samples.matrix("layers.0.linear_attn.in_proj_qkvz")
    n_blocks = large_rows(samples) // 16
    blocks = np.resize(first.data[: first.n_blocks * first.block_bytes], n_blocks * first.block_bytes)
    return replace(first, name="large", rows=16 * n_blocks, n_blocks=n_blocks, data=blocks)
