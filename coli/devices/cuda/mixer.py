"""A whole DeltaNet or attention layer on a card: in-projection, core and out-projection in one call.

The layer's activations never leave the card, and neither does its part of a sequence's state: rows of x go up, rows of
y come down, one graph a token.  Positions are cut into calls as the caller likes; the bits are the same.

A state that is lost with its card is rebuilt by taking the ids in again: that is the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np

from coli.container.layout import GROUP, MatrixLayout, round_up
from coli.devices.base import DeviceError, MixerSpec
from coli.devices.cuda import plan
from coli.devices.cuda.context import Context
from coli.devices.cuda.lane import Lane

CHUNK = 64  # positions of a K/V block and of one sum (docs/numerics.md, section 4)
_GROW_CHUNKS = 16  # K/V memory is taken for so many blocks at once
_ROWS = 64  # rows of one pass: what the scratch holds of projections


@dataclass(eq=False)
class Mixer:
    """A layer on a card.  into, out : (address, layout) of the projections."""

    spec: MixerSpec
    into: tuple[int, MatrixLayout]
    out: tuple[int, MatrixLayout]
    vectors: dict[str, int]
    ba_at: int = 0

    @cached_property
    def stride(self) -> int:
        """Floats between two rows of x in the staging."""
        return plan.x_stride(self.into[1])

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        g = self.spec.geometry
        return 2 * g["dn_k_heads"] * g["dn_k_dim"] + g["dn_v_heads"] * g["dn_v_dim"]


@dataclass(eq=False)
class MixerState:
    """One sequence's state in one layer, on the card.

    DeltaNet: ``state_at`` (value heads, dk, dv) and ``ring_at`` (taps, channels).  Attention: K/V blocks of 64
    positions in ``pieces`` of memory, and the tables of their addresses.
    """

    mixer: Mixer
    context: Context
    state_at: int = 0
    ring_at: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)  # (address, bytes), in the order of positions
    chunks: int = 0
    tables_at: tuple[int, int] = (0, 0)
    graphs: dict[Any, tuple[tuple, Any, int]] = field(default_factory=dict)
    siblings: WeakSet[MixerState] | None = None  # the device's list of what it has to close at last
    closed: bool = False

    @property
    def block_bytes(self) -> int:
        """Keys, or values, of 64 positions."""
        g = self.mixer.spec.geometry
        return CHUNK * g["n_kv_heads"] * g["head_dim"] * (2 if g["kv_f16"] else 4)

    def sizes(self) -> tuple[int, int]:
        """Bytes of ``state_at`` and ``ring_at``."""
        g = self.mixer.spec.geometry
        return 4 * g["dn_v_heads"] * g["dn_k_dim"] * g["dn_v_dim"], 4 * g["conv_taps"] * self.mixer.channels

    def reach(self, positions: int) -> None:
        """Make room for so many positions.  Raises DeviceError("out of memory") and keeps what there is."""
        wanted = -(-positions // CHUNK) if self.mixer.spec.is_attention else 0
        if wanted <= self.chunks:
            return
        new = -(-(wanted - self.chunks) // _GROW_CHUNKS) * _GROW_CHUNKS
        context, n_bytes = self.context, 2 * new * self.block_bytes
        piece = context.alloc(n_bytes, "keys and values")
        pieces = [*self.pieces, (piece, n_bytes)]
        keys = [at + i * self.block_bytes for at, n in pieces for i in range(n // (2 * self.block_bytes))]
        values = [at + n // 2 + i * self.block_bytes for at, n in pieces for i in range(n // (2 * self.block_bytes))]
        try:
            tables = context.put(np.array([*keys, *values], np.uint64), "addresses of keys and values")
        except DeviceError:
            context.free(piece)
            raise
        if self.tables_at[0]:
            context.free(self.tables_at[0])
        self.pieces, self.chunks, self.tables_at = pieces, len(keys), (tables, tables + 8 * len(keys))

    def copy(self) -> MixerState:
        """An independent state with the same contents."""
        other = new_state(self.mixer, self.context)
        other.siblings = self.siblings
        if self.siblings is not None:
            self.siblings.add(other)
        try:
            if self.mixer.spec.is_attention:
                other._copy_pieces(self)
            else:
                pairs = (other.state_at, self.state_at), (other.ring_at, self.ring_at)
                for (to, at), n_bytes in zip(pairs, self.sizes(), strict=True):
                    self.context.copy_here(to, at, n_bytes)
        except DeviceError:
            other.close()
            raise
        return other

    def _copy_pieces(self, of: MixerState) -> None:
        for at, n_bytes in of.pieces:
            self.reach((self.chunks + n_bytes // (2 * self.block_bytes)) * CHUNK)
            self.context.copy_here(self.pieces[-1][0], at, n_bytes)

    def close(self) -> None:
        """Give its memory back.  Does nothing the second time, and on a lost card."""
        if self.closed:
            return
        self.closed = True
        if self.context.lost is None:
            self.context.set_current()
            for _, graph, _ in self.graphs.values():
                self.context.free_graph(graph)
            for at in (self.state_at, self.ring_at, self.tables_at[0], *(at for at, _ in self.pieces)):
                self.context.free(at)
        self.graphs.clear()
        self.pieces.clear()


def new_state(mixer: Mixer, context: Context) -> MixerState:
    """The state before the first position.  Raises DeviceError and leaves nothing behind."""
    state = MixerState(mixer, context)
    if mixer.spec.is_attention:
        return state
    state_bytes, ring_bytes = state.sizes()
    try:
        state.state_at = context.alloc(state_bytes, "a recurrent state")
        state.ring_at = context.alloc(ring_bytes, "a convolution's rows")
        context.zero(state.state_at, state_bytes)
        context.zero(state.ring_at, ring_bytes)
    except DeviceError:
        state.close()
        raise
    return state


class _Scratch:
    """Addresses in a lane's scratch, one after the other.  Raises DeviceError("out of memory") at its end."""

    def __init__(self, lane: Lane) -> None:
        self.at, self.end = lane.scratch_at, lane.scratch_at + lane.scratch_bytes

    def take(self, n_bytes: int) -> int:
        at, self.at = self.at, self.at + round_up(n_bytes)
        if self.at > self.end:
            raise DeviceError("the scratch of dense work is too small for this many positions", "out of memory")
        return at


def rows_at_once(mixer: Mixer, lane: Lane, chunks: int) -> int:
    """Rows of one pass: attention's scores and partial sums grow with the context."""
    g = mixer.spec.geometry
    per_row = 4 * (2 * mixer.into[1].rows + 2 * mixer.into[1].cols + 3 * mixer.out[1].cols) + 4096
    if mixer.spec.is_attention:
        per_row += 4 * g["n_q_heads"] * chunks * (CHUNK + g["head_dim"] + 2)
    else:
        per_row += 4 * mixer.channels
    return max(1, min(_ROWS, (lane.scratch_bytes - 65536) // per_row))


def put_list(lane: Lane, mixer: Mixer, position: int, cos: np.ndarray, sin: np.ndarray) -> int:
    """What goes up beside the rows: the position, and attention's cos and sin rows.  Returns its 32-bit words."""
    words = list_words(mixer, len(cos))
    held = lane.list.array
    held[:16].view(np.int64)[0] = position  # 16 bytes, so that what follows is aligned
    if mixer.spec.is_attention:
        turns = held[16 : 4 * words].view(np.float32).reshape(2, *cos.shape)
        turns[0], turns[1] = cos, sin
    return words


def list_words(mixer: Mixer, n: int) -> int:
    """32-bit words of that list for n rows."""
    return 4 + 2 * n * mixer.spec.geometry["rotary_half"] if mixer.spec.is_attention else 4


def launch(lane: Lane, mixer: Mixer, state: MixerState, n: int, n_words: int, chunks: int) -> None:
    """y of n rows in the staging, then the flag.  chunks : K/V blocks that the grids cover, at least those in use."""
    g, spec, scratch = mixer.spec.geometry, mixer.spec, _Scratch(lane)
    (in_at, into), (out_at, out) = mixer.into, mixer.out
    run, stream = lane.context.launch, lane.stream
    acts, acts_bytes = plan.acts_at(scratch.at, n, into.n_groups)
    scratch.take(acts_bytes)
    list_at = scratch.take(4 * n_words)
    x_at = 0 if spec.is_attention else scratch.take(4 * n * into.n_groups * GROUP)
    run("pull", "", (-(-n * into.n_groups // 4), 1), 128, 0, stream, lane.x.address, plan.x_stride(into), into.cols,
        n, acts, lane.list.address, list_at, n_words, x_at)  # fmt: skip
    proj_at, o_at = scratch.take(4 * n * into.rows), scratch.take(4 * n * out.cols)
    plan.product(lane, in_at, into, n, acts, proj_at)
    core = _attention if spec.is_attention else _deltanet
    core(lane, mixer, state, n, scratch, list_at, x_at, proj_at, o_at, chunks, g)
    acts_o, acts_bytes = plan.acts_at(scratch.at, n, out.n_groups)
    scratch.take(acts_bytes)
    run("pull", "", (-(-n * out.n_groups // 4), 1), 128, 0, stream, o_at, out.cols, out.cols, n, acts_o, 0, 0, 0, 0)
    plan.product(lane, out_at, out, n, acts_o, lane.y.address)
    lane.raise_flag()


def _deltanet(lane: Lane, mixer: Mixer, state: MixerState, n: int, scratch: _Scratch, position_at: int, x_at: int,
              proj_at: int, o_at: int, chunks: int, g: dict[str, Any]) -> None:  # fmt: skip
    run, stream, v, ba = lane.context.launch, lane.stream, mixer.vectors, mixer.spec.ba
    n_qk, heads, dk, dv, channels = g["dn_k_heads"], g["dn_v_heads"], g["dn_k_dim"], g["dn_v_dim"], mixer.channels
    width, x_stride = mixer.into[1].rows, mixer.into[1].n_groups * GROUP
    ba_at, u_at = scratch.take(4 * n * 2 * heads), scratch.take(4 * n * channels)
    run("dense", ba.format, (-(-2 * heads // 8), n), 256, 0, stream, mixer.ba_at, 0, 0, 0, ba.block_bytes, 2 * heads,
        ba.cols, x_at, x_stride, ba_at, 2 * heads)  # fmt: skip
    threads = -(-max(dk, dv) // 32) * 32
    run("conv_heads", "", (2 * n_qk + heads, 1), threads, 4 * (threads + 1), stream, proj_at, width, v["conv"],
        g["conv_taps"], channels, n_qk, dk, dv, g["q_scale"], state.ring_at, position_at, n, u_at)  # fmt: skip
    warps = -(-dk // 16)
    run("deltanet", "", (-(-dv // 32), heads), 32 * warps, 128 * warps, stream, state.state_at, u_at, channels, ba_at,
        v["exp_a_log"], v["dt_bias"], n_qk, heads, dk, dv, n, o_at, heads * dv)  # fmt: skip
    run(
        "gated_norm",
        "",
        (heads, n),
        32,
        0,
        stream,
        o_at,
        heads * dv,
        proj_at + 4 * channels,
        width,
        v["dn_norm"],
        dv,
        g["eps"],
    )


def _attention(lane: Lane, mixer: Mixer, state: MixerState, n: int, scratch: _Scratch, list_at: int, x_at: int,
               proj_at: int, o_at: int, chunks: int, g: dict[str, Any]) -> None:  # fmt: skip
    run, stream, v, kind = lane.context.launch, lane.stream, mixer.vectors, "f16" if g["kv_f16"] else "f32"
    n_q, n_kv, d, half, width = g["n_q_heads"], g["n_kv_heads"], g["head_dim"], g["rotary_half"], mixer.into[1].rows
    cos_at = list_at + 16
    sin_at, (keys, values) = cos_at + 4 * n * half, state.tables_at
    q_at, scores_at = scratch.take(4 * n * n_q * d), scratch.take(4 * n * n_q * chunks * CHUNK)
    maxima_at, partial_at = scratch.take(4 * n * n_q * chunks), scratch.take(4 * n * n_q * chunks * (d + 1))
    run("attention_prepare", kind, (n_q + n_kv, n), 32, 4 * d, stream, proj_at, width, v["q_norm"], v["k_norm"],
        cos_at, sin_at, half, n_q, n_kv, d, g["eps"], keys, values, list_at, q_at)  # fmt: skip
    run("attention_scores", kind, (chunks, n_kv, n), 256, 0, stream, q_at, keys, n_q, n_kv, d, g["attn_scale"],
        list_at, chunks, scores_at, maxima_at)  # fmt: skip
    run("attention_values", kind, (chunks, n_q, n), 256, 0, stream, scores_at, maxima_at, values, n_q, n_kv, d,
        list_at, chunks, partial_at)  # fmt: skip
    run(
        "attention_finish",
        "",
        (n_q, n),
        256,
        0,
        stream,
        partial_at,
        proj_at,
        width,
        n_q,
        d,
        list_at,
        chunks,
        o_at,
        n_q * d,
    )


def covered(chunks: int) -> int:
    """Chunks that a captured graph's grids cover: a power of two, so that a growing context needs few graphs."""
    return 1 << max(0, chunks - 1).bit_length()


def upload_vectors(context: Context, vectors: dict[str, np.ndarray], names: Sequence[str]) -> dict[str, int]:
    """The small vectors of a layer on the card."""
    return {name: context.put(np.ascontiguousarray(vectors[name], np.float32), name) for name in names}
