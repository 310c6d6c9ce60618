"""Shared by the pytest-benchmark suites: the team of this machine, and how a measurement is reported."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def team():
    """(threads, cpus) as a loaded model would choose them; COLI_THREADS changes it."""
    from coli import settings
    from coli._core import step
    from coli.threads.claims import claim_threads

    claim = claim_threads(settings.get("threads"), openmp_built=step.has_openmp())
    yield claim.binding.threads, list(claim.binding.cpus) or None
    claim.release()


@pytest.fixture
def run_bench(benchmark):
    """Time one Bench on the engine thread; its ruler alternates in the same run and goes into extra_info."""

    def run(bench, rounds: int = 7) -> None:
        row = bench.measure(rounds)
        benchmark.extra_info.update(row.to_dict())
        benchmark.pedantic(lambda: bench.engine.on_thread(bench.run), rounds=rounds, warmup_rounds=1)

    return run
