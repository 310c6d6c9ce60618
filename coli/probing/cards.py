"""A card as the engine will use it: products, expert groups and whole layers, through the Device interface.

What is timed is a call from host memory to host memory, as a step of the program makes it.  Sizes are those of a real
layer where they fit, and each call reads other weights than the last, as much as a card's cache can be expected to hold
or more.  The card is closed at the end: nothing stays on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from coli.container.layout import ALIGN_BYTES, round_up
from coli.devices.base import Device, SlabSpec, SpanPart
from coli.engine.mixing import layer_spec, matrix_spec, mixer_spec
from coli.engine.rope import RopeTable
from coli.placement import SpanSpeed, Speed, Speeds
from coli.probing.samples import FULL_WIDTH, N_DELTANET, N_LAYERS, Samples, large_matrix, sample_bytes, samples_for
from coli.probing.timing import MOST_CALLS, fitted, time_us

_SHARE = 2  # of the free memory a half is asked for
_FEW = 2  # experts of the smaller group
_LONG = 512  # positions that attention looks back on in the second of two measurements, at full width
_PROJECTIONS = {
    "linear_attention": ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
    "full_attention": ("self_attn.qkv_proj", "self_attn.o_proj"),
}


def measure_card(device: Device) -> tuple[Speeds, float]:
    """The figures of a card, and one round trip in us.  Opens its arena and closes the card.

    Raises DeviceError where the card does not do what it is asked.
    """
    samples = samples_for(device.free_bytes() // _SHARE)
    try:
        return _Bench(device, samples).measure()
    finally:
        device.close()
        samples.close()


class _Bench:
    """The samples on one card."""

    def __init__(self, device: Device, samples: Samples) -> None:
        self.device = device
        self.samples = samples
        self.config = samples.config
        self.top_k = samples.config.num_experts_per_tok
        self.draw = np.random.default_rng(1)
        slabs = samples.slabs("layers.0.mlp.experts")
        self.slab = SlabSpec(
            slabs.format, slabs.hidden_size, slabs.intermediate_size, slabs.stride_bytes, slabs.gate_offset,
            slabs.up_offset, slabs.down_offset,
        )  # fmt: skip
        n_slots = N_LAYERS * self.config.num_experts
        # Everything but the slots, each upload rounded up to its alignment.
        resident_bytes = sample_bytes(samples) - n_slots * slabs.stride_bytes + 8 * N_LAYERS * ALIGN_BYTES
        device.open_arena(round_up(resident_bytes + self._large_extra()), n_slots, self.slab)
        for slot in range(n_slots):
            at = slot % self.config.num_experts * slabs.stride_bytes
            device.write_slot(slot, slabs.data[at : at + slabs.stride_bytes])
        self.large = device.upload(matrix_spec(large_matrix(samples)))
        self.tiny = device.upload(matrix_spec(samples.matrix("lm_head")))
        self.projections = [
            [device.upload(matrix_spec(samples.matrix(f"layers.{layer}.{name}"))) for name in _PROJECTIONS[kind]]
            for layer, kind in enumerate(self.config.layer_types)
        ]

    def _large_extra(self) -> int:
        """What the large matrix takes beyond a byte for each weight."""
        large = large_matrix(self.samples)
        return large.n_blocks * large.block_bytes - large.rows * large.cols

    def measure(self) -> tuple[Speeds, float]:
        """All figures."""
        round_trip_us = time_us(self._product(cycle([self.tiny])))
        outs = [layer[1] for layer in self.projections]
        small = self.samples.matrix("layers.0.linear_attn.out_proj")
        large = large_matrix(self.samples)
        matrix = fitted(
            (small.n_blocks * small.block_bytes, time_us(self._product(cycle(outs)))),
            (large.n_blocks * large.block_bytes, time_us(self._product(cycle([self.large])))),
        )
        slab_bytes = self.slab.slab_bytes
        experts = fitted(
            (_FEW * slab_bytes, time_us(self._group(_FEW))),
            (self.top_k * slab_bytes, time_us(self._group(self.top_k))),
        )
        matrix_speed, experts_speed = Speed(*matrix), Speed(*experts)
        span = None
        if getattr(self.device, "span", None) is not None:
            span = _Spans(self, matrix_speed, experts_speed).measure()
        return Speeds(matrix_speed, experts_speed, span), round_trip_us

    def _product(self, handles: Iterator[Any]) -> Callable[[], None]:
        cols = {id(self.tiny): self.config.hidden_size, id(self.large): self.config.hidden_size}
        wide = self.config.num_attention_heads * self.config.head_dim  # the out-projections' input
        rows = {n: self.draw.standard_normal((1, n)).astype(np.float32) for n in {*cols.values(), wide}}

        def call() -> None:
            handle = next(handles)
            self.device.matmul(handle, rows[cols.get(id(handle), wide)])

        return call

    def _group(self, n: int) -> Callable[[], None]:
        x = self.draw.standard_normal((1, self.config.hidden_size)).astype(np.float32)
        firsts = cycle(range(0, N_LAYERS * self.top_k, self.top_k))
        rows_of = [0] * n

        def call() -> None:
            first = next(firsts)
            self.device.take(self.device.issue(0, range(first, first + n), rows_of, x))

        return call


class _Spans:
    """Runs of whole layers on a card, all of whose experts are seated: every token chooses every expert of a layer."""

    def __init__(self, bench: _Bench, matrix: Speed, experts: Speed) -> None:
        self.bench = bench
        self.matrix, self.experts = matrix, experts
        device, samples = bench.device, bench.samples
        self.device = device
        self.mixers, self.layers = [], []
        for layer in range(N_LAYERS):
            shared = samples.slabs(f"layers.{layer}.mlp.shared_expert")
            spec = SlabSpec(
                shared.format, shared.hidden_size, shared.intermediate_size, shared.stride_bytes, shared.gate_offset,
                shared.up_offset, shared.down_offset,
            )  # fmt: skip
            handle = device.upload_slab(shared.name, spec, shared.data[: shared.stride_bytes])
            self.mixers.append(device.mixer(mixer_spec(samples, layer), *bench.projections[layer]))
            self.layers.append(device.layer(layer, self.mixers[layer], handle, layer_spec(samples, layer)))
        self._seat(range(bench.config.num_experts), seated=True)
        config = bench.config
        self.long = _LONG * config.hidden_size // FULL_WIDTH
        rope = RopeTable(config.rotary_dim, config.rope_theta, self._positions)
        rope.reach(self._positions)
        self.cos, self.sin = rope.cos, rope.sin
        self.fixed = {  # bytes of a layer but for its experts, which are slabs
            kind: sum(samples.matrix(f"layers.{i}.{name}").data.nbytes for name in _PROJECTIONS[kind])
            for i, kind in ((0, "linear_attention"), (N_DELTANET, "full_attention"))
        }
        self.slab_us = experts.transfer_us(bench.slab.slab_bytes)
        shared_bytes = samples.slabs("layers.0.mlp.shared_expert").stride_bytes
        self.shared_us = matrix.transfer_us(shared_bytes)

    @property
    def _positions(self) -> int:
        """Room for what is looked back on and for all tokens that are timed."""
        return self.long + MOST_CALLS + 2

    def _seat(self, experts: range, *, seated: bool) -> None:
        per_layer = self.bench.config.num_experts
        for layer in range(N_LAYERS):
            for expert in experts:
                self.device.seat(layer, expert, layer * per_layer + expert if seated else None)

    def measure(self) -> SpanSpeed:
        """A run of half as many layers and of all, of one kind; then with an expert missing in each; then far on."""
        half = N_DELTANET // 2
        few_us, many_us = (self._token_us(range(n)) for n in (half, N_DELTANET))
        layer_us = (many_us - few_us) / half
        hop_us = max(0.0, few_us - half * layer_us)
        attention = range(N_DELTANET, N_LAYERS)
        near_us, far_us = (self._token_us(attention, position) for position in (1, self.long))
        attention_us = (near_us - hop_us) / len(attention)
        self._seat(range(1), seated=False)
        asking_us = self._token_us(range(N_DELTANET))
        config = self.bench.config
        kv_bytes = len(attention) * (self.long - 1) * 2 * 2 * config.num_key_value_heads * config.head_dim
        kv_us = max(far_us - near_us, self.matrix.transfer_us(kv_bytes))
        return SpanSpeed(
            deltanet_us=max(0.0, layer_us - self._read_us("linear_attention")),
            attention_us=max(0.0, attention_us - self._read_us("full_attention")),
            hop_us=hop_us,
            # an expert less on the card, and a question to the host
            ask_us=max(0.0, (asking_us - many_us) / N_DELTANET + self.slab_us),
            kv_gb_s=kv_bytes / kv_us / 1e3,
        )

    def _read_us(self, kind: str) -> float:
        """What a layer of the samples reads, at the speeds that a prediction counts with."""
        from coli.placement import ModelShape

        shape = ModelShape.from_config(self.bench.samples.weights.config_dict)
        us = self.matrix.transfer_us(self.fixed[kind] + shape.rest_bytes / N_LAYERS)
        if kind == "linear_attention":
            us += self.matrix.transfer_us(2 * shape.state_bytes / N_DELTANET)
        return us + self.bench.top_k * self.slab_us + self.shared_us

    def _token_us(self, layers: range, position: int = 0) -> float:
        """One token through a run of layers behind ``position`` others; the host answers at once, with nothing."""
        span = self.device.span([self.layers[i] for i in layers])
        states = [self.device.new_state(self.mixers[i]) for i in layers]
        hidden, top_k = self.bench.config.hidden_size, self.bench.top_k
        x = self.bench.draw.standard_normal((max(position, 1), hidden)).astype(np.float32)
        out, nothing = np.empty((1, hidden), np.float32), np.zeros((top_k, hidden), np.float32)
        slot_of = np.zeros((max(position, 1), top_k), np.int32)
        at = 0
        for state in states:
            state.reach(self._positions)

        def run(rows: np.ndarray, x_out: np.ndarray | None) -> None:
            nonlocal at
            part = SpanPart(0, len(rows), at, states)
            going = self.device.begin_span(span, [part], rows, self.cos, self.sin)
            try:
                while going.ask() is not None:
                    going.answer(nothing, slot_of[: len(rows)], None)
                going.finish(x_out, None)
            except BaseException:
                going.abandon()
                raise
            at += len(rows)

        try:
            while at < position:
                run(x[: min(position - at, span.max_rows)], None)
            return time_us(lambda: run(x[:1], out))
        finally:
            for state in states:
                state.close()
