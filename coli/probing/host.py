"""The CPU as a team of threads decodes on it: what it reads of matrices and of experts, a region, a layer, a token.

Measured with the engine's own step on `samples`, so that a prediction is of the work that will be done and not of a
plain read; the plain read is measured beside it, as the ruler.  The team is that of an engine which is there already: a
second one would be more threads than cores, and OpenMP lets all of them sleep then between two regions.

A real model's weights come from memory.  The samples would fit the last cache of a server (300 MB on some), so other
bytes, several times those caches, are read ahead of every call that reads weights or states.  That drops the program
too, which a real token finds where the last layer left it: so a call begins with a layer that is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coli._core import step
from coli.engine.session import Engine
from coli.placement import CpuSpeeds, ModelShape, Speed
from coli.probing.samples import N_DELTANET, N_LAYERS, NARROWEST, Samples
from coli.probing.timing import MOST_CALLS, fitted, in_turns, time_us

_N_EXPERTS = 16  # of a layer: 8 of them are chosen at random for each pass
_FEW = 2  # experts of the smaller group
_OTHERS = 3  # times the last caches' bytes are read in between
_FEWEST_BYTES = 64 << 20  # where the machine does not say what its caches hold
_MOST_BYTES = 2 << 30
_OP = {name: i for i, name in enumerate(step.OPS)}


def measure_cpu(beside: Engine, *, divisor: int = 1) -> tuple[CpuSpeeds, float]:
    """The figures of an engine's team, and the GB/s of its plain read.

    divisor : of the samples' widths, for tests.
    """
    narrow = Samples(NARROWEST)  # a model that is nearly nothing but its fixed costs
    try:
        token_us = _token_us(Engine(narrow, beside=beside, context=2 * MOST_CALLS))
    finally:
        narrow.close()
    samples = Samples(divisor, _N_EXPERTS)
    engine = Engine(samples, beside=beside)
    try:
        return engine.on_thread(lambda: _measured(engine, samples, token_us))
    finally:
        engine.close()
        samples.close()


def _token_us(engine: Engine) -> float:
    """What a token takes besides its layers, which are few bytes here.  It finds no cache as it has left it either."""
    runner, others = engine._runner, np.ones(bytes_beyond_caches(), np.uint8)

    def before() -> None:
        runner.read([others])

    try:
        session = engine.session()
        token_us = time_us(lambda: session.step(1), before=lambda: engine.on_thread(before))
        session.close()

        def layers_us() -> float:
            sequence = step.Sequence(engine._net, 64)
            runner.begin([(sequence, 1)], np.zeros(1, np.int32), engine._rope.cos, engine._rope.sin)
            return time_us(lambda: runner.run(0, runner.n_ops), before=before)

        return max(0.0, token_us - engine.on_thread(layers_us))
    finally:
        engine.close()


def _measured(engine: Engine, samples: Samples, token_us: float) -> tuple[CpuSpeeds, float]:
    """On the engine thread, which owns the team."""
    config, runner = engine.config, engine._runner
    sequence = step.Sequence(engine._net, 64)
    engine._rope.reach(1)
    runner.begin([(sequence, 1)], np.zeros(1, np.int32), engine._rope.cos, engine._rope.sin)
    runner.run(0, runner.n_ops)  # fills every buffer, so that no product is one of zeros
    draw = np.random.default_rng(0)
    top_k = config.num_experts_per_tok
    x = draw.standard_normal((1, config.hidden_size)).astype(np.float32)
    draws = iter([np.sort(draw.permutation(config.num_experts)[:top_k]).astype(np.int32)[None] for _ in range(4096)])
    first, layers = 0, range(1, N_LAYERS)

    def run(layer: int, *ops: str) -> None:
        for op in ops:
            at = layer * step.N_OPS + _OP[op]
            runner.run(at, at + 1)

    others = np.ones(bytes_beyond_caches(), np.uint8)

    def cold(*ops: str) -> Callable[[], None]:
        """Ahead of a call: nothing of the samples in a cache, but for what a layer with these operations leaves."""

        def before() -> None:
            runner.read([others])
            run(first, *ops)

        return before

    def each(ops: Sequence[str], of: range = layers) -> Callable[[], None]:
        """Operations of the layers, each a region of its own."""
        return lambda: [run(layer, *ops) for layer in of]

    def experts(n: int, of: Sequence[int]) -> Callable[[], None]:
        """n experts in each of some layers, as the host of a card computes them."""
        external = np.ones((1, top_k), np.uint8)
        external[0, :n] = 0

        def moe() -> None:
            for layer in of:
                runner.moe(layer, x, next(draws), external, False)

        return moe

    def cold_experts(n: int) -> Callable[[], None]:
        """Ahead of them, as `cold`."""
        one = experts(n, [first])

        def before() -> None:
            runner.read([others])
            one()

        return before

    shape = ModelShape.from_config(samples.weights.config_dict)
    projections = sum(i.bytes for i in shape.components if i.layer in layers and i.name not in ("shexp", "lmhead"))
    n, n_states = len(layers), N_DELTANET - 1
    mixing, small = ("MIX_IN", "MIX_OUT"), ("NORM1", "NORM2", "COMBINE")
    buffers = _projections(samples)
    calls = {
        "region": (lambda: runner.run(0, 1), lambda: None),
        "matrices": (each(mixing), cold(*mixing)),
        "few": (experts(_FEW, layers), cold_experts(_FEW)),
        "all": (experts(top_k, layers), cold_experts(top_k)),
        "states": (each(["MIX_CORE"], range(1, N_DELTANET)), cold("MIX_CORE")),
        "small": (each(small), cold(*small)),
        "read": (lambda: runner.read(buffers), lambda: runner.read([others])),
    }
    us = in_turns({name: call for name, (call, _) in calls.items()}, 0.2,
                  before={name: before for name, (_, before) in calls.items()})  # fmt: skip
    region_us = us["region"]
    matrix_us = us["matrices"] - 2 * n * region_us
    few_us, all_us = (max(us[name] - n * region_us, 0.1) for name in ("few", "all"))
    state_us = us["states"] - n_states * region_us
    small_us = us["small"] - len(small) * n * region_us
    read_gb_s = sum(buffer.nbytes for buffer in buffers) / us["read"] / 1e3
    # No product beats the ruler by more than the caches' worth; nor does the state, of which a real model has too much.
    matrix = Speed(_gb_s(projections, matrix_us, 2 * read_gb_s))
    of_one = n * shape.expert_bytes
    group_gb_s, group_us = fitted((_FEW * of_one, few_us), (top_k * of_one, all_us))
    group = Speed(min(group_gb_s, 2 * read_gb_s), group_us / n)
    state_gb_s = _gb_s(2 * shape.state_bytes * n_states / N_DELTANET, state_us, read_gb_s)
    layer_us = max(0.0, small_us / n - matrix.transfer_us(shape.rest_bytes / N_LAYERS))
    return CpuSpeeds(matrix, group, region_us, layer_us, state_gb_s, token_us), read_gb_s


def bytes_beyond_caches() -> int:
    """Bytes that leave nothing of what was read before them in the caches of the last level."""
    from coli.threads.limits import local_machine

    caches = [cache for cache in local_machine()[0].caches if cache.kind != "Instruction"]
    last = max((cache.level for cache in caches), default=0)
    held = sum(cache.size_bytes for cache in caches if cache.level == last)
    return min(max(_OTHERS * held, _FEWEST_BYTES), _MOST_BYTES)


def _gb_s(n_bytes: float, us: float, most_gb_s: float) -> float:
    return min(n_bytes / us / 1e3, most_gb_s) if us > 0 else most_gb_s


def _projections(samples: Samples) -> list[Any]:
    """The bytes that the projections of all layers are."""
    names = {
        "linear_attention": ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
        "full_attention": ("self_attn.qkv_proj", "self_attn.o_proj"),
    }
    kinds = enumerate(samples.config.layer_types)
    return [samples.matrix(f"layers.{layer}.{name}").data for layer, kind in kinds for name in names[kind]]
