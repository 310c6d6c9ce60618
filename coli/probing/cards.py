"""A card as the engine will use it: products, expert groups and whole layers.

What is timed is a call from host memory to host memory, as a step of the program makes it; groups of experts by way of
the tier.  What a token costs besides its layers, and a question to the host besides its answer, is taken from whole
tokens of an engine that has the samples on the card: from what these take, all that is known otherwise is subtracted.
Sizes are those of a real layer where they fit, and each call reads other weights than the last, as much as a card's
cache can be expected to hold or more.  The card is closed at the end: nothing stays on it.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from coli._core import step
from coli.container.layout import ALIGN_BYTES, round_up
from coli.devices.base import Device, SpanPart
from coli.engine.mixing import final_norm, layer_spec, matrix_spec, mixer_spec, slab_spec
from coli.engine.program import Program
from coli.engine.rope import RopeTable
from coli.engine.session import Engine
from coli.engine.span import PlacedSpan
from coli.placement import CpuSpeeds, ModelShape, SpanSpeed, Speed, Speeds
from coli.probing.host import bytes_beyond_caches
from coli.probing.samples import (
    FULL_WIDTH,
    N_DELTANET,
    N_LAYERS,
    PROJECTIONS,
    Samples,
    large_matrix,
    sample_bytes,
    samples_for,
)
from coli.probing.timing import MOST_CALLS, ROUNDS, apart_us, fitted, in_turns, seconds_of, time_us
from coli.tier.expert_tier import ExpertTier
from coli.tier.heat import Heat
from coli.tier.promotion import Promotion

_SHARE = 2  # of the free memory a half is asked for
_FEW = 2  # experts of the smaller group
_STEPS_S = 0.015  # of a round of whole tokens
_LONG = 512  # positions that attention looks back on in the second of two measurements, at full width


def measure_card(device: Device, beside: Engine, cpu: CpuSpeeds) -> tuple[Speeds, float, float]:
    """The figures of a card, one round trip in us, and the seconds that it took from the open arena on: before it a
    driver starts, and kernels may be compiled.  Closes the card.

    beside : the engine with whose thread and team the card will work.   cpu : what that team takes.
    Raises DeviceError where the card does not do what it is asked.
    """
    samples = samples_for(device.free_bytes() // _SHARE)
    with contextlib.ExitStack() as closing:
        closing.callback(samples.close)
        closing.callback(lambda: beside.on_thread(device.close))
        bench = beside.on_thread(lambda: _Bench(device, samples, beside))
        closing.callback(lambda: beside.on_thread(bench.tier.close))
        start = time.perf_counter()
        figures, round_trip_us = beside.on_thread(bench.measure)
        figures = replace(figures, cut_us=bench.cut_us(beside, figures))
        if getattr(device, "span", None) is not None:
            spans = beside.on_thread(lambda: _Spans(bench, figures))
            figures = replace(figures, span=spans.measure(beside, cpu))
        return figures, round_trip_us, time.perf_counter() - start + bench.seconds


def step_us(engine: Engine, others: list[Any]) -> float:
    """A token of an engine, from its caller and back; ahead of each its team reads ``others``."""
    session = engine.session()
    session.step(1)
    try:
        before = lambda: engine.on_thread(lambda: engine.runner.read(others))  # noqa: E731
        return time_us(lambda: session.step(1), _STEPS_S, before=before, most=MOST_CALLS // ROUNDS)
    finally:
        session.close()


class _Bench:
    """The samples on one card.   beside : the engine whose team works between two steps of the card."""

    def __init__(self, device: Device, samples: Samples, beside: Engine) -> None:
        self.device = device
        self.samples = samples
        self._runner = beside.runner
        self.of_a_layer = [
            samples.matrix(f"layers.0.{name}").data for name in PROJECTIONS[samples.config.layer_types[0]]
        ]
        self.config = samples.config
        self.top_k = samples.config.num_experts_per_tok
        self.draw = np.random.default_rng(1)
        slabs = samples.slabs("layers.0.mlp.experts")
        self.slab = slab_spec(slabs)
        n_slots, per_layer = N_LAYERS * self.config.num_experts, self.config.num_experts
        # Everything but the slots, each upload rounded up to its alignment.
        resident_bytes = sample_bytes(samples) - n_slots * slabs.stride_bytes + 8 * N_LAYERS * ALIGN_BYTES
        device.open_arena(round_up(resident_bytes + self._large_extra()), n_slots, self.slab)
        start = time.perf_counter()
        experts = slabs.data[: per_layer * slabs.stride_bytes].reshape(per_layer, slabs.stride_bytes)
        homes = [divmod(key, per_layer) for key in range(n_slots)]
        heat, nobody_moves = Heat(N_LAYERS, per_layer, self.top_k), Promotion(every_tokens=sys.maxsize)
        self.tier = ExpertTier(
            [experts] * N_LAYERS, [device], [n_slots], [homes], heat=heat, promotion=nobody_moves
        )
        residency = self.tier.residency
        for key in range(n_slots):
            slot = residency.tables[0].reserve()
            device.write_slot(slot, experts[key % per_layer])
            residency.publish(0, slot, key)
        large = large_matrix(samples)
        self.large_rows, self.large_bytes = large.rows, large.n_blocks * large.block_bytes
        self.large = device.upload(matrix_spec(large))
        self.tiny = device.upload(matrix_spec(samples.matrix("lm_head")))
        self.projections = [
            [device.upload(matrix_spec(samples.matrix(f"layers.{layer}.{name}"))) for name in PROJECTIONS[kind]]
            for layer, kind in enumerate(self.config.layer_types)
        ]
        self.seconds = time.perf_counter() - start  # since the arena was open

    def _large_extra(self) -> int:
        """What the large matrix takes beyond a byte for each weight."""
        large = large_matrix(self.samples)
        return large.n_blocks * large.block_bytes - large.rows * large.cols

    def team_reads(self) -> None:
        """What the team reads in a layer: it drives out of the cores' caches what a step on a card finds there else."""
        self._runner.read(self.of_a_layer)

    def measure(self) -> tuple[Speeds, float]:
        """The figures of products and groups, and a round trip in us."""

        outs = [layer[1] for layer in self.projections]
        calls = {
            "nothing": self._product(cycle([self.tiny])),
            "small": self._product(cycle(outs)),
            "large": self._product(cycle([self.large])),
            "few": self._group(_FEW),
            "all": self._group(self.top_k),
        }
        us = in_turns(calls, before=self.team_reads)
        small = self.samples.matrix("layers.0.linear_attn.out_proj")
        matrix = fitted((small.n_blocks * small.block_bytes, us["small"]), (self.large_bytes, us["large"]))
        slab_bytes = self.slab.slab_bytes
        experts = fitted((_FEW * slab_bytes, us["few"]), (self.top_k * slab_bytes, us["all"]))
        return Speeds(Speed(*matrix), Speed(*experts), host_us=self._host_us(experts[1] / 1e6)), us["nothing"]

    def cut_us(self, beside: Engine, figures: Speeds) -> float:
        """What a layer of the CPU takes longer than its parts when all of its experts are on the card.

        From tokens whose experts the CPU computes and tokens whose experts the card does, and from what the CPU takes
        for its experts here: ahead of each, others' bytes have gone through the caches.
        """
        others = np.ones(bytes_beyond_caches(beside.cpus), np.uint8)
        with contextlib.ExitStack() as closing:
            engine = Engine(self.samples, beside=beside, context=2 * MOST_CALLS + 1)
            closing.callback(engine.close)
            session, alone, cut = engine.session(), engine.program, Program(self.config, {}, self.tier)
            closing.callback(session.close)
            closing.callback(setattr, engine, "program", alone)

            def token_s(program: Program) -> float:
                beside.on_thread(lambda: self._runner.read([others]))
                engine.program = program
                return seconds_of(lambda: session.step(1))

            session.step(1)
            longer_us = apart_us(lambda: token_s(cut), lambda: token_s(alone))
            on_cpu_us = engine.on_thread(lambda: self._experts_of_cpu_us(engine, others))
        shape = ModelShape.from_config(self.samples.weights.config_dict)
        shared = next(item.bytes for item in shape.components if item.name == "shexp")
        here_us = figures.experts.us(self.top_k * self.slab.slab_bytes)
        shared_us = on_cpu_us * shared / (shared + self.top_k * shape.cpu_expert_bytes)
        return max(0.0, longer_us / N_LAYERS + on_cpu_us - max(shared_us + figures.host_us, here_us))

    def _experts_of_cpu_us(self, engine: Engine, others: np.ndarray) -> float:
        """Routed experts and shared expert of a layer, as the engine behind a token has them; on its thread."""
        first = step.OPS.index("MOE")
        ops = range(first, N_LAYERS * step.N_OPS, step.N_OPS)
        region_us = time_us(lambda: engine.runner.run(0, 1), _STEPS_S)
        before = lambda: engine.runner.read([others])  # noqa: E731
        us = time_us(lambda: [engine.runner.run(at, at + 1) for at in ops], 2 * _STEPS_S, before=before)
        return max(0.0, us / N_LAYERS - region_us)

    def _product(self, handles: Iterator[Any]) -> Callable[[], None]:
        cols = {id(self.tiny): self.config.hidden_size, id(self.large): self.config.hidden_size}
        wide = self.config.num_attention_heads * self.config.head_dim  # the out-projections' input
        rows = {n: self.draw.standard_normal((1, n)).astype(np.float32) for n in {*cols.values(), wide}}

        def call() -> None:
            handle = next(handles)
            self.device.matmul(handle, rows[cols.get(id(handle), wide)])

        return call

    def lose_first(self) -> None:
        """The first expert of every layer is in no slot any more."""
        residency = self.tier.residency
        for layer in range(N_LAYERS):
            residency.tables[0].release(residency.vacate(layer * self.config.num_experts))
            self.device.seat(layer, 0, None)

    def find_first(self) -> None:
        """It is in one again.  All layers' are the same bytes, so any of these slots has them."""
        residency = self.tier.residency
        for layer in range(N_LAYERS):
            slot = residency.tables[0].reserve()
            residency.publish(0, slot, layer * self.config.num_experts)
            self.device.seat(layer, 0, slot)

    def _host_us(self, group_s: float) -> float:
        """What a group of one takes of the host's time: to be started, and to be fetched when it is long done.

        group_s : the fixed part of a group's time.
        """
        started: list[Any] = []
        x = self.draw.standard_normal((1, self.config.hidden_size)).astype(np.float32)
        chosen, external = np.zeros((1, 1), np.int32), np.empty((1, 1), np.uint8)

        def take() -> None:
            while started:
                self.tier.take(started.pop())

        def issue() -> None:
            started.extend(self.tier.issue(0, chosen, x, external))

        def ready() -> None:
            issue()
            time.sleep(4 * group_s)
            self.team_reads()

        def free() -> None:
            take()
            self.team_reads()

        issue_us = time_us(issue, before=free)
        take()
        return issue_us + time_us(take, before=ready)

    def _group(self, n: int) -> Callable[[], None]:
        x = self.draw.standard_normal((1, self.config.hidden_size)).astype(np.float32)
        layers = cycle(range(N_LAYERS))
        chosen, external = np.arange(n, dtype=np.int32)[None], np.empty((1, n), np.uint8)

        def call() -> None:
            for group in self.tier.issue(next(layers), chosen, x, external):
                self.tier.take(group)

        return call


class _Spans:
    """Runs of whole layers on a card, all of whose experts are seated: every token chooses every expert of a layer."""

    def __init__(self, bench: _Bench, figures: Speeds) -> None:
        self.bench = bench
        self.matrix = figures.matrix
        device, samples = bench.device, bench.samples
        self.device = device
        self.mixers, self.layers = [], []
        for layer in range(N_LAYERS):
            shared = samples.slabs(f"layers.{layer}.mlp.shared_expert")
            handle = device.upload_slab(shared.name, slab_spec(shared), shared.data[: shared.stride_bytes])
            self.mixers.append(device.mixer(mixer_spec(samples, layer), *bench.projections[layer]))
            self.layers.append(device.layer(layer, self.mixers[layer], handle, layer_spec(samples, layer)))
        self._seat(range(bench.config.num_experts))
        config = bench.config
        self.long = _LONG * config.hidden_size // FULL_WIDTH
        rope = RopeTable(config.rotary_dim, config.rope_theta, self._positions)
        rope.reach(self._positions)
        self.cos, self.sin = rope.cos, rope.sin
        self.fixed = {  # bytes of a layer but for its experts, which are slabs
            kind: sum(samples.matrix(f"layers.{i}.{name}").data.nbytes for name in PROJECTIONS[kind])
            for i, kind in ((0, "linear_attention"), (N_DELTANET, "full_attention"))
        }
        self.slab_us = figures.experts.transfer_us(bench.slab.slab_bytes)
        shared_bytes = samples.slabs("layers.0.mlp.shared_expert").stride_bytes
        self.shared_us = self.matrix.transfer_us(shared_bytes)

    @property
    def _positions(self) -> int:
        """Room for what is looked back on and for all tokens that are timed."""
        return self.long + MOST_CALLS + 2

    def _seat(self, experts: range) -> None:
        per_layer = self.bench.config.num_experts
        for layer in range(N_LAYERS):
            for expert in experts:
                self.device.seat(layer, expert, layer * per_layer + expert)

    def measure(self, beside: Engine, cpu: CpuSpeeds) -> SpanSpeed:
        """All figures of whole layers."""
        span = beside.on_thread(self._layers_alone)
        engine = Engine(self.bench.samples, beside=beside, context=self._positions)
        try:
            engine.program = beside.on_thread(self._program)
            tokens_us, askings_us, answers_us = [], [], []
            for _ in range(ROUNDS):
                tokens_us.append(step_us(engine, self.bench.of_a_layer))
                beside.on_thread(self.bench.lose_first)
                askings_us.append(step_us(engine, self.bench.of_a_layer))
                answers_us.append(beside.on_thread(lambda: self._answer_us(engine)))
                beside.on_thread(self.bench.find_first)
        finally:
            engine.close()
        token_us, asking_us, answer_us = map(statistics.median, (tokens_us, askings_us, answers_us))
        kinds = self.bench.config.layer_types
        layers_us = sum(
            self._read_us(kind) + (span.deltanet_us if kind == "linear_attention" else span.attention_us)
            for kind in kinds
        )
        return replace(
            span,
            hop_us=max(0.0, token_us - layers_us - cpu.token_us),
            # The question took the place of the experts: what the card has it computes while the host answers.
            ask_us=max(0.0, (asking_us - token_us) / len(kinds) - answer_us + self._experts_us),
        )

    def _layers_alone(self) -> SpanSpeed:
        """A run of half as many layers and of all, of one kind; then far on, and with a head behind."""
        half, attention = N_DELTANET // 2, range(N_DELTANET, N_LAYERS)
        head = self.device.head(final_norm(self.bench.samples), self.bench.large)
        with contextlib.ExitStack() as closing:
            calls = {
                "few": self._token(closing, range(half)),
                "many": self._token(closing, range(N_DELTANET)),
                "head": self._token(closing, range(N_DELTANET), head=head),
                "near": self._token(closing, attention, 1),
                "far": self._token(closing, attention, self.long),
            }
            us = in_turns(calls)
        layer_us = (us["many"] - us["few"]) / half
        hop_us = max(0.0, us["few"] - half * layer_us)
        attention_us = (us["near"] - hop_us) / len(attention)
        head_us = max(us["head"] - us["many"], 0.0)
        config, large_bytes = self.bench.config, self.bench.large_bytes
        kv_bytes = len(attention) * (self.long - 1) * 2 * 2 * config.num_key_value_heads * config.head_dim
        kv_us = max(us["far"] - us["near"], self.matrix.transfer_us(kv_bytes))
        return SpanSpeed(
            deltanet_us=max(0.0, layer_us - self._read_us("linear_attention")),
            attention_us=max(0.0, attention_us - self._read_us("full_attention")),
            hop_us=hop_us,
            ask_us=0.0,
            kv_gb_s=kv_bytes / kv_us / 1e3,
            head_gb_s=large_bytes / max(head_us, self.matrix.transfer_us(large_bytes)) / 1e3,
        )

    def _program(self) -> Program:
        """All layers of the samples in one run on the card, their experts by the tier."""
        mixers = {layer: (self.device, mixer) for layer, mixer in enumerate(self.mixers)}
        span = PlacedSpan(self.device, self.device.span(self.layers), 0, N_LAYERS, False)
        return Program(self.bench.config, {}, self.bench.tier, mixers, [span])

    @staticmethod
    def _answer_us(engine: Engine) -> float:
        """What the host computes where one expert is missing, in one layer after the other, again and again."""
        runner, config = engine.runner, engine.config
        engine.begin(np.zeros(1, np.int32))
        x = np.ones((1, config.hidden_size), np.float32)
        chosen = np.arange(config.num_experts_per_tok, dtype=np.int32)[None]
        external = (chosen > 0).astype(np.uint8)

        def call() -> None:
            for layer in range(N_LAYERS):
                runner.moe(layer, x, chosen, external, False)

        return time_us(call, _STEPS_S) / N_LAYERS

    @property
    def _experts_us(self) -> float:
        """What the experts of a layer take on the card, at the speeds that a prediction counts with."""
        return self.bench.top_k * self.slab_us + self.shared_us

    def _read_us(self, kind: str) -> float:
        """What a layer of the samples reads, at the speeds that a prediction counts with."""
        shape = ModelShape.from_config(self.bench.samples.weights.config_dict)
        us = self.matrix.transfer_us(self.fixed[kind] + shape.rest_bytes / N_LAYERS)
        if kind == "linear_attention":
            us += self.matrix.transfer_us(2 * shape.state_bytes / N_DELTANET)
        return us + self._experts_us

    def _token(
        self, closing: contextlib.ExitStack, layers: range, position: int = 0, head: Any = None
    ) -> Callable[[], None]:
        """One token more through a run of layers behind ``position`` others, to its logits where there is a head; the
        host answers at once, with nothing."""
        span = self.device.span([self.layers[i] for i in layers], head)
        states = [self.device.new_state(self.mixers[i]) for i in layers]
        hidden, top_k = self.bench.config.hidden_size, self.bench.top_k
        x = self.bench.draw.standard_normal((max(position, 1), hidden)).astype(np.float32)
        out, nothing = np.empty((1, hidden), np.float32), np.zeros((top_k, hidden), np.float32)
        logits = None if head is None else np.empty((1, self.bench.large_rows), np.float32)
        slot_of = np.zeros((max(position, 1), top_k), np.int32)
        at = 0
        for state in states:
            closing.callback(state.close)
            state.reach(self._positions)

        def run(rows: np.ndarray, x_out: np.ndarray | None) -> None:
            nonlocal at
            part = SpanPart(0, len(rows), at, states)
            wanted = range(0 if logits is None else 1)
            going = self.device.begin_span(span, [part], rows, self.cos, self.sin, wanted)
            try:
                while going.ask() is not None:
                    going.answer(nothing, slot_of[: len(rows)], None)
                going.finish(x_out if logits is None else None, logits)
            except BaseException:
                going.abandon()
                raise
            at += len(rows)

        while at < position:
            run(x[: min(position - at, span.max_rows)], None)
        return lambda: run(x[:1], out)
