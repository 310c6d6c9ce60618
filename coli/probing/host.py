"""The CPU as a team of threads decodes on it: what it reads of matrices and of experts, a region, a layer, a token.

Measured with the engine's own step on `samples`, so that a prediction is of the work that will be done and not of a
plain read; the plain read is measured beside it, as the ruler.  The team is that of an engine which is there already: a
second one would be more threads than cores, and OpenMP lets all of them sleep then between two regions.

A real model's weights come from memory.  Few layers would fit the last cache of a server (300 MB on some), and reading
other bytes in between drives only part of them out of one that resists scans.  So there are blocks of layers that
together are several times those caches, and a call takes the next block.

Parts are timed as regions of their own, which they are where a card has the rest; a token of the CPU alone is one
region.  What whole blocks take in order beyond their parts is a layer's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import psutil

from coli._core import step
from coli.engine.session import Engine
from coli.placement import CpuSpeeds, ModelShape, Speed
from coli.probing.samples import N_DELTANET, N_LAYERS, NARROWEST, Samples, widths
from coli.probing.timing import MOST_CALLS, apart_us, fitted, in_turns, seconds_of
from coli.threads.topology import Topology

_N_EXPERTS = 16  # of a layer: 8 of them are chosen at random for each pass
_FEW = 2  # experts of the smaller group
_CACHES = 6  # times what the last caches hold are all samples
_MOST_BLOCKS = 8
_OTHERS = 2  # times what they hold are bytes that leave nothing of what was read before
_FEWEST_BYTES = 64 << 20  # where the machine does not say what its caches hold
_MOST_BYTES = 2 << 30
_TURNS_S = 0.2  # all rounds of one call
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
    samples = Samples(divisor, _N_EXPERTS, _blocks_beyond_caches(divisor))
    engine = Engine(samples, beside=beside)
    try:
        return engine.on_thread(lambda: _measured(engine, samples, token_us))
    finally:
        engine.close()
        samples.close()


def _token_us(engine: Engine) -> float:
    """What a token takes besides its layers, which are few bytes here.  It finds no cache as it has left it either."""
    runner, others = engine._runner, np.ones(bytes_beyond_caches(), np.uint8)

    def token_s() -> float:
        engine.on_thread(lambda: runner.read([others]))
        return seconds_of(lambda: session.step(1))

    def layers_s() -> float:
        sequence = step.Sequence(engine._net, 64)
        runner.begin([(sequence, 1)], np.zeros(1, np.int32), engine._rope.cos, engine._rope.sin)
        runner.read([others])
        return seconds_of(lambda: runner.run(0, runner.n_ops))

    try:
        session = engine.session()
        token_us = apart_us(token_s, lambda: engine.on_thread(layers_s), 2 * _TURNS_S)
        session.close()
        return max(0.0, token_us)
    finally:
        engine.close()


def _measured(engine: Engine, samples: Samples, token_us: float) -> tuple[CpuSpeeds, float]:
    """On the engine thread, which owns the team."""
    runner = engine._runner
    sequence = step.Sequence(engine._net, 64)
    engine._rope.reach(1)
    runner.begin([(sequence, 1)], np.zeros(1, np.int32), engine._rope.cos, engine._rope.sin)
    runner.run(0, runner.n_ops)  # fills every buffer, so that no product is one of zeros
    buffers = _projections(samples)
    calls = _Calls(engine, buffers)
    us = in_turns(
        {
            "region": lambda: runner.run(0, 1),
            "matrices": calls.each("MIX_IN", "MIX_OUT"),
            "few": calls.experts(_FEW),
            "all": calls.experts(engine.config.num_experts_per_tok),
            "states": calls.each("MIX_CORE", of=slice(N_DELTANET)),
            "read": calls.read(),
            "whole": calls.whole(),
        },
        _TURNS_S,
        # The states of all blocks would fit a cache.
        before=defaultdict(lambda: lambda: None, states=lambda: runner.read(buffers)),
    )
    block_bytes = sum(buffer.nbytes for buffer in buffers) / len(calls.blocks)
    shape = ModelShape.from_config(widths(samples.divisor, _N_EXPERTS))
    return _figures(shape, block_bytes, us, token_us), block_bytes / us["read"] / 1e3


class _Calls:
    """What is timed: calls that take a block of layers each, and the next one the next time.

    buffers : the bytes of the projections, block after block.
    """

    def __init__(self, engine: Engine, buffers: list[Any]) -> None:
        config, self._runner = engine.config, engine._runner
        draw = np.random.default_rng(0)
        self._x = draw.standard_normal((1, config.hidden_size)).astype(np.float32)
        self._order = draw.permutation(config.num_experts).astype(np.int32)
        self._top_k = config.num_experts_per_tok
        self.blocks = [range(at, at + N_LAYERS) for at in range(0, config.num_hidden_layers, N_LAYERS)]
        n = len(buffers) // len(self.blocks)
        self._buffers = [buffers[at : at + n] for at in range(0, len(buffers), n)]

    def each(self, *ops: str, of: slice = slice(None)) -> Callable[[], None]:
        """Operations of the layers, each a region of its own."""
        turn = cycle(self.blocks)

        def call() -> None:
            for layer in next(turn)[of]:
                for op in ops:
                    at = layer * step.N_OPS + _OP[op]
                    self._runner.run(at, at + 1)

        return call

    def experts(self, n: int) -> Callable[[], None]:
        """n experts in each layer, others each time, as the host of a card computes them."""
        external = np.ones((1, self._top_k), np.uint8)
        external[0, :n] = 0
        firsts = range(0, len(self._order), n)
        chosen = [np.roll(self._order, -first)[None, : self._top_k].copy() for first in firsts]
        turn = cycle([(of, block) for of in chosen for block in self.blocks])

        def call() -> None:
            of, block = next(turn)
            for layer in block:
                self._runner.moe(layer, self._x, of, external, False)

        return call

    def read(self) -> Callable[[], int]:
        """The plain read of the projections."""
        turn = cycle(self._buffers)
        return lambda: self._runner.read(next(turn))

    def whole(self) -> Callable[[], None]:
        """All operations in order, in one region."""
        turn = cycle(self.blocks)

        def call() -> None:
            block = next(turn)
            self._runner.run(block.start * step.N_OPS, block.stop * step.N_OPS)

        return call


def _figures(shape: ModelShape, block_bytes: float, us: Mapping[str, float], token_us: float) -> CpuSpeeds:
    """From what the calls took.   shape : of one block.   block_bytes : of its projections."""
    region_us, read_gb_s = us["region"], block_bytes / us["read"] / 1e3
    # No product beats the ruler by more than the caches' worth; nor does the state, of which a real model has too much.
    matrix = Speed(_gb_s(block_bytes, us["matrices"] - 2 * N_LAYERS * region_us, 2 * read_gb_s))
    few_us, all_us = (max(us[name] - N_LAYERS * region_us, 0.1) for name in ("few", "all"))
    of_one = N_LAYERS * shape.cpu_expert_bytes
    group_gb_s, group_us = fitted((_FEW * of_one, few_us), (shape.topk * of_one, all_us))
    group = Speed(min(group_gb_s, 2 * read_gb_s), group_us / N_LAYERS)
    state_bytes = 2 * shape.state_bytes
    state_gb_s = _gb_s(state_bytes, us["states"] - N_DELTANET * region_us, read_gb_s)

    shared_bytes = sum(item.bytes for item in shape.components if item.name == "shexp")
    parts_us = matrix.transfer_us(block_bytes + shared_bytes + shape.rest_bytes) + state_bytes / state_gb_s / 1e3
    parts_us += N_LAYERS * group.us(shape.topk * shape.cpu_expert_bytes)
    layer_us = max(0.0, us["whole"] - parts_us) / N_LAYERS
    return CpuSpeeds(matrix, group, region_us, layer_us, state_gb_s, token_us)


def _blocks_beyond_caches(divisor: int) -> int:
    """Blocks of layers that together hold several times what the caches do, as far as there is memory for them."""
    block = ModelShape.from_config(widths(divisor, _N_EXPERTS))
    block_bytes = block.trunk_bytes + block.expert_count * block.expert_bytes
    room_bytes = min(_MOST_BYTES, psutil.virtual_memory().available // 8)
    wanted = -(-_CACHES * _machine().last_caches_bytes // block_bytes)
    return int(max(1, min(wanted, room_bytes // block_bytes, _MOST_BLOCKS)))


def bytes_beyond_caches() -> int:
    """Bytes that leave little of what was read before them in the caches of the last level."""
    return min(max(_OTHERS * _machine().last_caches_bytes, _FEWEST_BYTES), _MOST_BYTES)


def _machine() -> Topology:
    from coli.threads.limits import local_machine

    return local_machine()[0]


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
