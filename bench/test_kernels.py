"""GEMV in four formats and expert groups in three, at the geometry of Qwen3.6-35B-A3B, from memory."""

from __future__ import annotations

import pytest

from coli.engine.benchmarks import KERNEL_NAMES, KernelBenches


@pytest.fixture(scope="module")
def benches(team):
    """A bench by its name; any of them alone, and in any order."""
    made = KernelBenches(*team)
    yield made
    made.close()


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_kernel(name, benches, run_bench):
    run_bench(benches[name])
