"""A container's layers on a card as spans, with a host that answers, beside the engine on the CPU alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from devices.cuda.support import ffn

from coli.container.layout import round_up, slab_layout
from coli.container.reader import Container
from coli.devices.base import SlabSpec, SpanPart
from coli.engine.mixing import final_norm, layer_spec, matrix_spec, mixer_spec
from coli.engine.rope import RopeTable

CONTEXT = 512


def slab_spec(slabs) -> SlabSpec:
    """The shape of a container's experts."""
    s = slab_layout(slabs.format, slabs.hidden_size, slabs.intermediate_size)
    return SlabSpec(slabs.format, s.hidden_size, s.intermediate_size, s.total_bytes, s.gate_offset, s.up_offset,
                    s.down_offset)  # fmt: skip


class OnCard:
    """All layers of a container on a device.

    seats : {(layer, expert)} that get a slot, each its own.   host_shared : layers whose shared expert stays here.
    cuts : layers at which a new span begins.   asked : (place, missing) of every question so far.
    """

    def __init__(self, path, device, seats: Sequence[tuple[int, int]], host_shared=(), cuts=()) -> None:
        self.container = Container.open(path)
        self.device = device
        self.config = self.container.config
        n = self.config.num_hidden_layers
        self.experts = [self.container.slabs(f"layers.{i}.mlp.experts") for i in range(n)]
        self.shared = [self.container.slabs(f"layers.{i}.mlp.shared_expert") for i in range(n)]
        spec = slab_spec(self.experts[0])
        names = [self._projections(i) for i in range(n)]
        matrices = [matrix_spec(self.container.matrix(name)) for pair in names for name in (*pair,)]
        head = matrix_spec(self.container.matrix("lm_head"))
        resident = sum(round_up(m.data.size) for m in (*matrices, head))
        resident += sum(round_up(s.stride_bytes) for s in self.shared)
        self.slots = {seat: i for i, seat in enumerate(seats)}
        device.open_arena(resident, len(seats), spec)
        handles = [device.upload(m) for m in matrices]
        for (layer, expert), slot in self.slots.items():
            device.write_slot(slot, self.slab(layer, expert))
        self.mixers = [device.mixer(mixer_spec(self.container, i), *handles[2 * i : 2 * i + 2]) for i in range(n)]
        layers = []
        for i in range(n):
            shared = None
            if i not in host_shared:
                s = self.shared[i]
                shared = device.upload_slab(f"shared {i}", slab_spec(s), s.data[: s.stride_bytes])
            layers.append(device.layer(i, self.mixers[i], shared, layer_spec(self.container, i)))
        head = device.head(final_norm(self.container), device.upload(head))
        bounds = [0, *cuts, n]
        self.bounds = list(pairwise(bounds))
        for (layer, expert), slot in list(self.slots.items())[::2]:  # some before the spans are there, some after
            device.seat(layer, expert, slot)
        self.spans = [device.span(layers[a:b], head if b == n else None) for a, b in self.bounds]
        for (layer, expert), slot in list(self.slots.items())[1::2]:
            device.seat(layer, expert, slot)
        self.rope = RopeTable(self.config.rotary_dim, self.config.rope_theta, CONTEXT)
        self.asked: list[tuple[int, int]] = []

    def _projections(self, layer: int) -> tuple[str, str]:
        p = f"layers.{layer}."
        if self.config.layer_types[layer] == "full_attention":
            return p + "self_attn.qkv_proj", p + "self_attn.o_proj"
        return p + "linear_attn.in_proj_qkvz", p + "linear_attn.out_proj"

    def slab(self, layer: int, expert: int) -> np.ndarray:
        """The bytes of an expert."""
        s = self.experts[layer]
        return s.data[expert * s.stride_bytes : (expert + 1) * s.stride_bytes]

    def new_states(self) -> list:
        """A sequence's states, before its first position."""
        return [self.device.new_state(mixer) for mixer in self.mixers]

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        """float32 (T, hidden), padded so that rows lie apart."""
        m = self.container.embed
        rows = m.data[: m.rows * m.block_bytes].reshape(m.rows, m.block_bytes)[list(ids)]
        values = {
            "f32": lambda r: r.view(np.float32),
            "bf16": lambda r: (r.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
            "f16": lambda r: r.view(np.float16).astype(np.float32),
        }[m.format](np.ascontiguousarray(rows))
        out = np.full((len(ids), m.cols + 16), np.nan, np.float32)
        out[:, : m.cols] = values
        return out[:, : m.cols]

    def answer(self, a: int, asked) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """expert_y, slot_of, shared_y as the CPU's step leaves them: padded, in an order of its own."""
        layer, (t, k) = a + asked.place, asked.top_idx.shape
        hidden = asked.xn.shape[1]
        y = np.full((t * k, hidden + 16), np.nan, np.float32)
        slot_of = np.full((t, k), -1, np.int32)
        missing = np.argwhere(asked.external == 0)
        self.asked.append((layer, len(missing)))
        xn = np.array(asked.xn)
        experts = self.experts[layer]
        layout = slab_layout(experts.format, hidden, experts.intermediate_size)
        for at, (row, rank) in enumerate(missing[::-1]):
            slot_of[row, rank] = at
            y[at, :hidden] = ffn(self.slab(layer, asked.top_idx[row, rank]), layout, xn[row : row + 1])[0]
        shared_y = None
        if asked.shared:
            s = self.shared[layer]
            shared_y = np.full((t, hidden + 16), np.nan, np.float32)
            shared_y[:, :hidden] = ffn(s.data[: s.stride_bytes], slab_layout(s.format, hidden, s.intermediate_size), xn)
        return y, slot_of, shared_y

    def forward(self, parts, wanted: Sequence[int] = ()) -> tuple[np.ndarray | None, np.ndarray]:
        """The logits of the rows wanted, and top_idx of all layers.

        parts : (ids, position, states) of each sequence.   wanted : rows of the batch, ascending.
        """
        x, out, chosen = self.embed([i for ids, _, _ in parts for i in ids]), None, []
        self.rope.reach(max(position + len(ids) for ids, position, _ in parts))
        for ids, position, states in parts:
            for state in states:
                state.reach(position + len(ids))
        for (a, b), span in zip(self.bounds, self.spans, strict=True):
            rows, first, is_last = [], 0, b == len(self.mixers)
            for ids, position, states in parts:
                rows.append(SpanPart(first, len(ids), position, states[a:b]))
                first += len(ids)
            run = self.device.begin_span(span, rows, x, self.rope.cos, self.rope.sin, wanted if is_last else ())
            while (asked := run.ask()) is not None:
                run.answer(*self.answer(a, asked))
            if is_last and len(wanted):
                out = np.full((len(wanted), self.config.vocab_size + 16), np.nan, np.float32)
            x_out = np.full_like(x, np.nan)
            chosen.append(run.finish(x_out, out if is_last else None))
            x = x_out
        return None if out is None else out[:, : self.config.vocab_size], np.concatenate(chosen)
