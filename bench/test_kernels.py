"""GEMV in four formats and expert groups in three, at the geometry of Qwen3.6-35B-A3B, from memory."""

from __future__ import annotations

import pytest

from coli.engine.benchmarks import kernel_benches

NAMES = (
    "gemv_int8_lm_head",
    "experts_int4_random",
    "gemv_int8_group_lm_head",
    "experts_int4_row_random",
    "gemv_int4_lm_head",
    "experts_int8_random",
)


@pytest.fixture(scope="module")
def benches(team):
    """The benches come in the order of NAMES; each engine is closed when the next is asked for."""
    made = kernel_benches(*team)
    yield made
    made.close()


@pytest.mark.parametrize("name", NAMES)
def test_kernel(name, benches, run_bench):
    bench = next(benches)
    assert bench.name == name
    run_bench(bench)
