"""coli/engine/benchmarks.py: a kernel's bench by its name, in any order, and nothing made twice."""

from __future__ import annotations

from contextlib import closing

import pytest

from coli.convert.synthetic import Synthetic, geometry
from coli.engine import benchmarks
from coli.engine.benchmarks import KERNEL_NAMES, KernelBenches, kernel_benches

SMALL = geometry("small8") | {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 1, "num_experts": 32, "moe_intermediate_size": 128,
}  # fmt: skip


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The blocks of embeddings that were made."""
    blocks: list[int] = []
    embed_block = Synthetic.embed_block
    monkeypatch.setattr(Synthetic, "embed_block", lambda self, first: blocks.append(first) or embed_block(self, first))
    return blocks


@pytest.mark.parametrize("names", [KERNEL_NAMES, KERNEL_NAMES[::-1], (KERNEL_NAMES[3],)])
def test_bench_of_any_name_measures_in_any_order(names, made):
    """Each is itself whatever was asked for before, and reads its own weights; the embedding is made once."""
    with closing(KernelBenches(1, config=SMALL)) as benches:
        for name in names:
            row = benches[name].measure(1)
            assert (row.name, row.n_bytes > 0, row.gb_s > 0) == (name, True, True)
    assert made == [0]


def test_kernel_benches_gives_all_and_makes_one_embedding(monkeypatch, made):
    """What `coli bench --kernels` runs."""
    monkeypatch.setattr(benchmarks, "geometry", lambda name: SMALL)
    assert [bench.measure(1).name for bench in kernel_benches(1)] == list(KERNEL_NAMES)
    assert made == [0]
