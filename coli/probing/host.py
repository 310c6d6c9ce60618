"""The CPU as a team of threads decodes on it: what it reads of matrices and of experts, a region, a layer, a token.

Measured with the engine's own step on `samples`, so that a prediction is of the work that will be done and not of a
plain read; the plain read is measured beside it, as the ruler.  The team is that of an engine which is there already: a
second one would be more threads than cores, and OpenMP lets all of them sleep then between two regions.

A real model's weights come from memory.  Few layers would fit the last cache of a server (300 MB on some), and reading
other bytes in between drives only part of them out of one that resists scans.  So there are blocks of layers, of which
projections and experts alone are several times those caches, and a call takes the next block.

Parts are timed as regions of their own, which they are where a card has the rest; a token of the CPU alone is one
region.  What whole blocks take in order is the truth: what they take beyond their parts is a layer's own, and where
they take less all parts are faster by as much.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from coli._core import step
from coli.engine.session import Engine
from coli.log import logger
from coli.placement import CpuSpeeds, ModelShape, Speed
from coli.probing.samples import N_DELTANET, N_LAYERS, NARROWEST, PROJECTIONS, WIDTHS, Samples, widths
from coli.probing.timing import MOST_CALLS, ROUNDS, apart_us, fitted, in_turns, seconds_of, time_us
from coli.threads.memory import available_bytes

_N_EXPERTS = 16  # of a layer: 8 of them are chosen at random for each pass
_FEW = 2  # experts of the smaller group
_CACHES = 3  # times what the last caches hold are the projections of all samples, and the experts
_FEWEST_BYTES = 64 << 20  # where the machine does not say what its caches hold
_MOST_BYTES = 4 << 30
_SHARE = 8  # of the memory that is free, an eighth is asked for
_TURNS_S = 0.2  # all rounds of one call
_REGION_S = 0.02
_NOISE = 1.25  # parts that take so many times as long as the whole were not measured beside the same neighbours
_OP = {name: i for i, name in enumerate(step.OPS)}


def measure_cpu(beside: Engine, *, divisor: int = 1) -> tuple[CpuSpeeds, float]:
    """The figures of an engine's team, and the GB/s of its plain read.

    divisor : of the samples' widths at least, for tests; narrower ones are taken where memory is short.
    """
    with contextlib.ExitStack() as closing:
        narrow = Samples(NARROWEST)  # a model that is nearly nothing but its fixed costs
        closing.callback(narrow.close)
        engine = Engine(narrow, beside=beside, context=2 * MOST_CALLS)
        closing.callback(engine.close)
        token_us = _token_us(engine)
    with contextlib.ExitStack() as closing:
        samples = _samples_beyond_caches(beside, divisor)
        closing.callback(samples.close)
        engine = Engine(samples, beside=beside)
        closing.callback(engine.close)
        figures, read_gb_s = engine.on_thread(lambda: _measured(engine, samples))
    return replace(figures, token_us=token_us), read_gb_s


def _token_us(engine: Engine) -> float:
    """What a token takes besides its layers, which are few bytes here.  It finds no cache as it has left it either."""
    runner, others = engine.runner, np.ones(bytes_beyond_caches(engine.cpus, 2), np.uint8)
    session = engine.session()

    def token_s() -> float:
        engine.on_thread(lambda: runner.read([others]))
        return seconds_of(lambda: session.step(1))

    def layers_s() -> float:
        engine.begin(np.zeros(1, np.int32))
        runner.read([others])
        return seconds_of(lambda: runner.run(0, runner.n_ops))

    with contextlib.closing(session):
        return max(0.0, apart_us(token_s, lambda: engine.on_thread(layers_s), 2 * _TURNS_S))


def _measured(engine: Engine, samples: Samples) -> tuple[CpuSpeeds, float]:
    """On the engine thread, which owns the team.  What contradicts itself is measured once more."""
    runner = engine.runner
    engine.begin(np.zeros(1, np.int32))
    runner.run(0, runner.n_ops)  # fills every buffer, so that no product is one of zeros
    buffers = _projections(samples)
    calls = _Calls(engine, buffers)
    block_bytes = sum(buffer.nbytes for buffer in buffers) / len(calls.blocks)
    shape = ModelShape.from_config(widths(samples.divisor, _N_EXPERTS))
    for _ in range(2):
        # The least of several: noise only adds, and it is subtracted from all that follows.
        region_us = min(time_us(lambda: runner.run(0, 1), _REGION_S) for _ in range(ROUNDS))
        us = in_turns(
            {
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
        figures, ratio = _figures(shape, block_bytes, us | {"region": region_us})
        if ratio <= _NOISE:
            break
    else:
        logger("probe").warning("the parts of a layer took %.1f times as long as the layer: something else was at work "
                                "here; --reprobe measures again", ratio)  # fmt: skip
    return figures, block_bytes / us["read"] / 1e3


class _Calls:
    """What is timed: calls that take a block of layers each, and the next one the next time.

    buffers : the bytes of the projections, block after block.
    """

    def __init__(self, engine: Engine, buffers: list[Any]) -> None:
        config, self._runner = engine.config, engine.runner
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


def _figures(shape: ModelShape, block_bytes: float, us: Mapping[str, float]) -> tuple[CpuSpeeds, float]:
    """From what the calls took, and how many times as long as the whole its parts took.

    shape : of one block.   block_bytes : of its projections.   us : by call; "region" is one region of the team.
    """
    region_us, read_gb_s = us["region"], block_bytes / us["read"] / 1e3
    # No product beats the ruler by more than the caches' worth; nor does the state, of which a real model has too much.
    matrix_us = max(us["matrices"] - 2 * N_LAYERS * region_us, block_bytes / read_gb_s / 2e3)
    few_us, all_us = (max(us[name] - N_LAYERS * region_us, 0.1) for name in ("few", "all"))
    of_one = N_LAYERS * shape.cpu_expert_bytes
    group_gb_s, group_us = fitted((_FEW * of_one, few_us), (shape.topk * of_one, all_us), 2 * read_gb_s)
    state_bytes = 2 * shape.state_bytes
    state_us = max(us["states"] - N_DELTANET * region_us, state_bytes / read_gb_s / 1e3)

    # The shared experts and the small matrices are read as the projections are.
    beside_bytes = sum(item.bytes for item in shape.components if item.name == "shexp") + shape.rest_bytes
    experts_us = group_us + shape.topk * of_one / group_gb_s / 1e3
    parts_us = matrix_us * (1 + beside_bytes / block_bytes) + state_us + experts_us
    faster = max(1.0, parts_us / us["whole"])
    return CpuSpeeds(
        matrix=Speed(faster * block_bytes / matrix_us / 1e3),
        experts=Speed(faster * group_gb_s, group_us / N_LAYERS / faster),
        region_us=region_us,
        layer_us=max(0.0, us["whole"] - parts_us) / N_LAYERS,
        state_gb_s=faster * state_bytes / state_us / 1e3,
    ), faster


def _samples_beyond_caches(engine: Engine, divisor: int) -> Samples:
    """As many blocks of layers as have projections and experts of several times what the caches hold; as wide ones, and
    as many, as there is memory for."""
    room_bytes = min(_MOST_BYTES, available_bytes() // _SHARE)
    for width in (width for width in WIDTHS if width >= divisor):
        block = ModelShape.from_config(widths(width, _N_EXPERTS))
        experts_bytes = block.expert_count * block.expert_bytes
        block_bytes = block.trunk_bytes + experts_bytes
        if block_bytes <= room_bytes:
            break
    least_bytes = min(experts_bytes, block.trunk_bytes)
    held = _last_caches_bytes(engine.cpus)
    wanted = max(1, -(-_CACHES * held // least_bytes))
    n_blocks = int(max(1, min(wanted, room_bytes // block_bytes)))
    if n_blocks < wanted:
        logger("probe").info("samples of %d MB beside caches of %d MB: the CPU may seem faster than its memory is",
                             n_blocks * least_bytes // 10**6, held // 10**6)  # fmt: skip
    return Samples(width, _N_EXPERTS, n_blocks)


def bytes_beyond_caches(cpus: Collection[int], times: int = 1) -> int:
    """Bytes that leave less of what was read before them in the last caches of these CPUs, the more ``times`` those."""
    wanted = max(times * _last_caches_bytes(cpus), _FEWEST_BYTES)
    return min(wanted, _MOST_BYTES, max(available_bytes() // _SHARE, 1 << 20))


def _last_caches_bytes(cpus: Collection[int]) -> int:
    from coli.threads.limits import local_machine

    return local_machine()[0].last_caches_bytes_of(cpus)


def _projections(samples: Samples) -> list[Any]:
    """The bytes that the projections of all layers are."""
    kinds = enumerate(samples.config.layer_types)
    return [samples.matrix(f"layers.{layer}.{name}").data for layer, kind in kinds for name in PROJECTIONS[kind]]
