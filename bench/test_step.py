"""A decode step and prefills of small8: 8 layers of the real width, 64 experts, random weights."""

from __future__ import annotations

import numpy as np
import pytest

from coli.convert.synthetic import Synthetic, SyntheticContainer, geometry
from coli.engine.benchmarks import decode_bench
from coli.engine.session import Engine


@pytest.fixture(scope="module")
def small8(team):
    threads, cpus = team
    container = SyntheticContainer(Synthetic(geometry("small8"), skew=0.8))
    engine = Engine(container, threads=threads, cpus=cpus)
    yield engine
    engine.close()
    container.close()


def test_decode_step(small8, run_bench):
    run_bench(decode_bench(small8), rounds=15)


@pytest.mark.parametrize("tokens", [16, 128, 512])
def test_prefill(small8, benchmark, tokens):
    ids = np.random.default_rng(0).integers(0, small8.vocab_size, tokens)
    before = small8.stats()["weight_bytes_read"]
    small8.session().prefill(ids)
    benchmark.extra_info["weight_bytes"] = small8.stats()["weight_bytes_read"] - before
    benchmark.extra_info["threads"] = small8.team.n_threads
    benchmark.pedantic(lambda: small8.session().prefill(ids), rounds=3, warmup_rounds=1)
    benchmark.extra_info["tok_s"] = tokens / benchmark.stats.stats.median
