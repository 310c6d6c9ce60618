"""The CPU as a team of threads decodes on it: what it reads of matrices and of experts, a region, a layer.

Measured with the engine's own step on `samples`, by a team of its own on the same CPUs, so that a prediction is of the
work that will be done and not of a plain read; the plain read is measured beside it, as the ruler.

A real model's weights come from memory.  The samples would fit the last cache of a server (300 MB on some), so other
bytes, several times those caches, are read ahead of every call that reads weights or states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coli._core import step
from coli.engine.session import Engine
from coli.placement import CpuSpeeds, ModelShape, Speed
from coli.probing.samples import N_DELTANET, Samples
from coli.probing.timing import time_us

_N_EXPERTS = 16  # of a layer: 8 of them are chosen at random for each pass
_OTHERS = 3  # times the last caches' bytes are read in between
_FEWEST_BYTES = 64 << 20  # where the machine does not say what its caches hold
_MOST_BYTES = 2 << 30
_OP = {name: i for i, name in enumerate(step.OPS)}


def measure_cpu(
    threads: int, cpus: Sequence[int] | None = None, isa: str | None = None, *, divisor: int = 1
) -> tuple[CpuSpeeds, float]:
    """The figures of a team, and the GB/s of its plain read.

    cpus : where each thread is pinned; None pins none.   divisor : of the samples' widths, for tests.
    """
    samples = Samples(divisor, _N_EXPERTS)
    engine = Engine(samples, threads=threads, cpus=cpus, isa=isa)
    try:
        return engine.on_thread(lambda: _measured(engine, samples))
    finally:
        engine.close()
        samples.close()


def _measured(engine: Engine, samples: Samples) -> tuple[CpuSpeeds, float]:
    """On the engine thread, which owns the team."""
    config, runner = engine.config, engine._runner
    sequence = step.Sequence(engine._net, 64)
    engine._rope.reach(1)
    runner.begin([(sequence, 1)], np.zeros(1, np.int32), engine._rope.cos, engine._rope.sin)
    runner.run(0, runner.n_ops)  # fills every buffer, so that no product is one of zeros
    top_idx, draw = np.asarray(runner.buffer("top_idx")), np.random.default_rng(0)
    draws = iter([draw.permutation(config.num_experts)[: config.num_experts_per_tok] for _ in range(4096)])
    layers = range(config.num_hidden_layers)

    def each_layer(*ops: str, deltanet_only: bool = False) -> Callable[[], None]:
        """Operations of all layers, each a region of its own."""

        def call() -> None:
            for layer in layers[:N_DELTANET] if deltanet_only else layers:
                for op in ops:
                    first = layer * step.N_OPS + _OP[op]
                    runner.run(first, first + 1)

        return call

    def experts() -> None:
        runner.shared_external = True
        for layer in layers:
            top_idx[0] = np.sort(next(draws))
            first = layer * step.N_OPS + _OP["MOE"]
            runner.run(first, first + 1)
        runner.shared_external = False

    others = np.ones(_bytes_beyond_caches(), np.uint8)

    def cold() -> None:
        runner.read([others])

    shape = ModelShape.from_config(samples.weights.config_dict)
    projections = sum(item.bytes for item in shape.components if item.name not in ("shexp", "lmhead"))
    chosen = len(layers) * shape.topk * shape.expert_bytes
    region_us = time_us(lambda: runner.run(0, 1))
    n = len(layers)
    matrix_us = time_us(each_layer("MIX_IN", "MIX_OUT"), 0.3, before=cold) - 2 * n * region_us
    experts_us = time_us(experts, 0.2, before=cold) - n * region_us
    state_us = time_us(each_layer("MIX_CORE", deltanet_only=True), 0.2, before=cold) - N_DELTANET * region_us
    small_us = time_us(each_layer("NORM1", "NORM2", "COMBINE"))
    buffers = _projections(samples)
    read_gb_s = sum(buffer.nbytes for buffer in buffers) / time_us(lambda: runner.read(buffers), 0.2, before=cold) / 1e3
    # No product beats the ruler by more than the caches' worth; nor does the state, of which a real model has too much.
    matrix = Speed(_gb_s(projections, matrix_us, 2 * read_gb_s))
    group = Speed(_gb_s(chosen, experts_us, 2 * read_gb_s))
    state_gb_s = _gb_s(2 * shape.state_bytes, state_us, read_gb_s)
    # The regions of the small steps stand for the barriers that a layer has within one.
    layer_us = max(0.0, (small_us - matrix.transfer_us(shape.rest_bytes)) / n)
    return CpuSpeeds(matrix, group, region_us, layer_us, state_gb_s), read_gb_s


def _bytes_beyond_caches() -> int:
    """Bytes that leave nothing of what was read before them in the caches of the last level."""
    from coli.threads.limits import local_machine

    caches = [cache for cache in local_machine()[0].caches if cache.kind != "Instruction"]
    last = max((cache.level for cache in caches), default=0)
    held = sum(cache.size_bytes for cache in caches if cache.level == last)
    return min(max(_OTHERS * held, _FEWEST_BYTES), _MOST_BYTES)


def _gb_s(n_bytes: int, us: float, most_gb_s: float) -> float:
    return min(n_bytes / us / 1e3, most_gb_s) if us > 0 else most_gb_s


def _projections(samples: Samples) -> list[Any]:
    """The bytes that the projections of all layers are."""
    names = {
        "linear_attention": ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
        "full_attention": ("self_attn.qkv_proj", "self_attn.o_proj"),
    }
    kinds = enumerate(samples.config.layer_types)
    return [samples.matrix(f"layers.{layer}.{name}").data for layer, kind in kinds for name in names[kind]]
