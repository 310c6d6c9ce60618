"""A whole DeltaNet or attention layer on a card: in-projection, core and out-projection in one call.

The layer's activations never leave the card, and neither does its part of a sequence's state: rows of x go up, rows of
y come down, one graph a token.  Positions are cut into calls as the caller likes; the bits are the same.

A state that is lost with its card is rebuilt by taking the ids in again: that is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from coli.container.layout import FORMATS, GROUP, MatrixLayout, round_up
from coli.devices.base import DeviceError, MixerSpec
from coli.devices.cuda import plan
from coli.devices.cuda.batch import CHUNK, Batch, BatchList, parts_of
from coli.devices.cuda.context import Acts, Context
from coli.devices.cuda.lane import Lane

_GROW_CHUNKS = 16  # K/V memory is taken for so many blocks at once
_ROWS = 64  # rows of one pass: what the scratch holds of projections
_CONV_ROWS, _KEY_DIM, _VALUE_DIM = 32, 256, 512  # deltanet.cu: rows of a tile; what a block's warps take of a head
_HEAD_DIM = 256  # attention.cu: two pieces of 128 columns
_TOKEN_WIDTH = 128  # deltanet.cu
_PROJECT_THREADS, _GATE_ROWS = 1536, 4  # deltanet.cu: threads of a multiprocessor; rows of b and a in a block
_SHARED_BYTES = 48 << 10  # what every card gives a block without being asked
_TILE_ITEMS, _ITEM_GROUPS, _ONE_KEYS = 32, 4, 16  # attention.cu
SCORES_BYTES = 64 << 20  # scratch that scores of several rows may take: about what an L2 cache holds


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
    positions in ``pieces`` of memory, and the tables of their addresses.   pair_at : `addresses`, on the card.
    """

    mixer: Mixer
    context: Context
    state_at: int = 0
    ring_at: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)  # (address, bytes), in the order of positions
    chunks: int = 0
    tables_at: tuple[int, int] = (0, 0)
    pair_at: int = 0
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
        counts = g["dn_v_heads"]  # behind the ring: the blocks of each head that are done, zeros between kernels
        return 4 * counts * g["dn_k_dim"] * g["dn_v_dim"], 4 * (g["conv_taps"] * self.mixer.channels + counts)

    def addresses(self) -> tuple[int, int]:
        """What a batch's list says of this state: state and ring, or the tables of K and of V blocks."""
        return self.tables_at if self.mixer.spec.is_attention else (self.state_at, self.ring_at)

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
        tables = 0
        try:
            tables = context.put(np.array([*keys, *values], np.uint64), "addresses of keys and values")
            pair = context.put(np.array([tables, tables + 8 * len(keys)], np.uint64), "addresses of a state")
        except DeviceError:
            context.free(piece)
            context.free(tables)
            raise
        for at in (self.tables_at[0], self.pair_at):
            context.free(at)
        context.moves += 1
        self.pieces, self.chunks, self.tables_at = pieces, len(keys), (tables, tables + 8 * len(keys))
        self.pair_at = pair

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
            for at in (self.state_at, self.ring_at, self.tables_at[0], self.pair_at, *(at for at, _ in self.pieces)):
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
        state.pair_at = context.put(np.array(state.addresses(), np.uint64), "addresses of a state")
    except DeviceError:
        state.close()
        raise
    return state


def require_fit(spec: MixerSpec) -> None:
    """Raises DeviceError where the kernels do not take a layer of this shape."""
    g = spec.geometry
    if spec.is_attention:
        d = g["head_dim"]
        reasons = {f"heads of {d} values, a multiple of 4 up to {_HEAD_DIM}": d % 4 or d > _HEAD_DIM}
    else:
        dk, dv, taps = g["dn_k_dim"], g["dn_v_dim"], g["conv_taps"]
        reasons = {
            f"a convolution of {taps} taps, {_CONV_ROWS + 1} at most": taps > _CONV_ROWS + 1,
            f"keys of {dk} values, {_KEY_DIM} at most": dk > _KEY_DIM,
            f"values of {dv}, {_VALUE_DIM} at most": dv > _VALUE_DIM,
        }
    for reason, wrong in reasons.items():
        if wrong:
            raise DeviceError(f"{reason}: not on a card", "launch")


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
    """What goes up beside the rows: the batch of one part, with attention's cos and sin rows.  Returns its words."""
    words = list_words(mixer, len(cos))
    layout, parts = _list(mixer, len(cos)), parts_of([(len(cos), position)])
    layout.put_rows(lane.list.array, parts, _From(cos, position), _From(sin, position))
    return words


class _From(NamedTuple):
    """Rows from ``position`` on as if the table began at 0."""

    rows: np.ndarray
    position: int

    def __getitem__(self, span: slice) -> np.ndarray:
        return self.rows[span.start - self.position : span.stop - self.position]


def _list(mixer: Mixer, n: int) -> BatchList:
    return BatchList(n, 1, mixer.spec.geometry["rotary_half"] if mixer.spec.is_attention else 0)


def list_words(mixer: Mixer, n: int) -> int:
    """32-bit words of that list for n rows."""
    return _list(mixer, n).n_bytes // 4


def launch(lane: Lane, mixer: Mixer, state: MixerState, n: int, n_words: int, chunks: int) -> None:
    """y of n rows in the staging, then the flag.  chunks : K/V blocks that the grids cover, at least those in use."""
    scratch = _Scratch(lane)
    into, (out_at, out) = mixer.into[1], mixer.out
    run, stream = lane.context.launch, lane.stream
    acts, acts_bytes = plan.acts_at(scratch.at, n, into.n_groups)
    scratch.take(acts_bytes)
    list_at, x_at = scratch.take(4 * n_words), scratch.take(4 * n * into.n_groups * GROUP)
    run("pull", "", (-(-n * into.n_groups // 4), 1), 128, 0, stream, lane.x.address, plan.x_stride(into), into.cols,
        n, acts, lane.list.address, list_at, n_words, x_at)  # fmt: skip
    proj_at, o_at = scratch.take(4 * n * into.rows), scratch.take(4 * n * out.cols)
    ba_at = project(lane, mixer, n, acts, x_at, scratch.take, proj_at)
    acts_o, acts_bytes = plan.acts_at(scratch.at, n, out.n_groups)
    scratch.take(acts_bytes)
    batch = _list(mixer, n).batch(list_at, n, chunks)
    core(lane.context, stream, mixer, batch, state.pair_at, scratch.take, x_at, proj_at, o_at, acts_o, ba_at)
    plan.product(lane, out_at, out, n, acts_o, lane.y.address)
    lane.raise_flag()


def project(lane: Lane, mixer: Mixer, n: int, acts: Acts, xn_at: int, take: Callable[[int], int], proj_at: int) -> int:
    """The in-projection of n rows, proj (n, rows) = W xn.  lane : any holder of a context and a stream.

    Returns where b and a of a DeltaNet layer lie if they came with it, else 0; `core` takes it.
    """
    (address, layout), ba = mixer.into, mixer.spec.ba
    shared = max(64 * layout.n_groups, 0 if ba is None else _GATE_ROWS * ba.block_bytes + 4 * round_up(ba.cols, 4))
    if n > 1 or not FORMATS[layout.format].is_blocks or shared > _SHARED_BYTES or (ba and ba.block_bytes % 4):
        plan.product(lane, address, layout, n, acts, proj_at)
        return 0
    warps = max(_GATE_ROWS, min(16, layout.n_groups))
    ahead = lane.context.multiprocessors * (_PROJECT_THREADS // (32 * warps))
    gates, ba_at = (0, 0, 0, 0, 0), 0
    if ba is not None:
        ba_at = take(4 * ba.rows)
        gates = mixer.ba_at, FORMATS[ba.format].code, ba.block_bytes, ba.rows, -(-ba.rows // _GATE_ROWS)
    lane.context.launch("project", layout.format, (gates[4] + layout.n_blocks,), 32 * warps, shared,
                        lane.stream, address, layout.block_bytes, layout.rows, acts, proj_at, ahead, *gates,
                        layout.cols, xn_at, ba_at, early=True)  # fmt: skip
    return ba_at


def core(context: Context, stream: Any, mixer: Mixer, batch: Batch, states_at: int, take: Callable[[int], int],
         xn_at: int, proj_at: int, o_at: int, acts_o: Acts, ba_at: int = 0) -> None:  # fmt: skip
    """Everything between a layer's projections, launched on a stream; states and rings move on.

    states_at : uint64 (n_parts, 2) on the card, of each part `MixerState.addresses`.   take : scratch by its bytes.
    xn_at : float32 (n_rows, 128 * n_groups of the in-projection), what was projected.   proj_at : its product (n_rows,
    rows).   o_at : room for float32 (n_rows, columns of the out-projection).   acts_o : the answer, quantised for it.
    ba_at : of `project`, launched just before.
    """
    if mixer.spec.is_attention:
        _attention(context, stream, mixer, batch, states_at, take, proj_at, o_at, acts_o)
    else:
        _deltanet(context, stream, mixer, batch, states_at, take, xn_at, proj_at, o_at, acts_o, ba_at)


def _quantize(context: Context, stream: Any, mixer: Mixer, n: int, o_at: int, acts_o: Acts) -> None:
    """o as the out-projection wants it, where heads are no whole groups of 128."""
    out = mixer.out[1]
    context.launch("pull", "", (-(-n * out.n_groups // 4), 1), 128, 0, stream, o_at, out.cols, out.cols, n, acts_o, 0,
                   0, 0, 0)  # fmt: skip


def _deltanet(context: Context, stream: Any, mixer: Mixer, batch: Batch, states_at: int, take: Callable[[int], int],
              xn_at: int, proj_at: int, o_at: int, acts_o: Acts, ba_at: int) -> None:  # fmt: skip
    g, v, ba, n = mixer.spec.geometry, mixer.vectors, mixer.spec.ba, batch.n_rows
    run = partial(context.launch, early=True)
    n_qk, heads, dk, dv, channels = g["dn_k_heads"], g["dn_v_heads"], g["dn_k_dim"], g["dn_v_dim"], mixer.channels
    width, xn_stride = mixer.into[1].rows, mixer.into[1].n_groups * GROUP
    ba_bytes, u_bytes = _deltanet_bytes(mixer, batch)
    with_projection, fused = ba_at != 0, dv % GROUP == 0
    if not with_projection:
        ba_at = take(ba_bytes)
        run("router_logits", ba.format, (heads, -(-n // 8)), 64, 0, stream, mixer.ba_at, 2 * heads, ba_at, 0, 0, 0,
            ba.block_bytes, ba.cols, xn_at, xn_stride, n)  # fmt: skip
    if batch.longest == 1 and dk <= _TOKEN_WIDTH and dk % 16 == 0:
        # it reads the list ahead, which is final where `project` lets it start, and behind any kernel that is done
        context.launch("deltanet_token", "", (-(-dv // 32), heads, batch.n_parts), 32 * max(4, dk // 16), 0, stream,
                       proj_at, width, v["conv"], g["conv_taps"], channels, n_qk, heads, dk, dv, g["q_scale"],
                       v["exp_a_log"], v["dt_bias"], ba_at, batch.parts_at, states_at, v["dn_norm"], g["eps"], o_at,
                       heads * dv, acts_o if fused else Acts(), early=with_projection)  # fmt: skip
        if not fused:
            _quantize(context, stream, mixer, n, o_at, acts_o)
        return
    u_at = take(u_bytes)
    grid = 2 * n_qk + heads + 1, -(-batch.longest // _CONV_ROWS), batch.n_parts
    run("conv_heads", "", grid, 32 * min(8, batch.longest), 0, stream, proj_at, width, v["conv"], g["conv_taps"],
        channels, n_qk, heads, dk, dv, g["q_scale"], v["exp_a_log"], v["dt_bias"], ba_at, batch.parts_at, states_at,
        u_at)  # fmt: skip
    # eight lanes a pair of columns; other shapes than theirs, and rows alone, go by a warp a chunk of keys
    many = batch.longest > 1 and dk <= 128 and dk % 4 == 0 and dv % 4 == 0
    kernel, warps = ("deltanet_rows", 4) if many else ("deltanet", -(-dk // 16))
    run(kernel, "", (-(-dv // 32), heads, batch.n_parts), 32 * warps, 0 if many else 128 * warps, stream,
        batch.parts_at, states_at, u_at, channels, ba_at, n_qk, heads, dk, dv, o_at, heads * dv)  # fmt: skip
    run("gated_norm", "", (-(-heads * n // 4), 1), 128, 0, stream, o_at, heads * dv, proj_at + 4 * channels, width,
        v["dn_norm"], dv, g["eps"], heads, n, acts_o if fused else Acts())  # fmt: skip
    if not fused:
        _quantize(context, stream, mixer, n, o_at, acts_o)


def _attention(context: Context, stream: Any, mixer: Mixer, batch: Batch, states_at: int, take: Callable[[int], int],
               proj_at: int, o_at: int, acts_o: Acts) -> None:  # fmt: skip
    g, v, n, chunks, cut = mixer.spec.geometry, mixer.vectors, batch.n_rows, batch.chunks, _cut(mixer, batch)
    run, kind = partial(context.launch, early=True), "f16" if g["kv_f16"] else "f32"
    n_q, n_kv, d, width = g["n_q_heads"], g["n_kv_heads"], g["head_dim"], mixer.into[1].rows
    q_at, maxima_at, scores_at, partial_at, sums_at = map(take, _attention_bytes(mixer, batch))
    fused = d % GROUP == 0
    acts = acts_o if fused else Acts()
    run("attention_prepare", kind, (-(-(n_q + n_kv) * n // 4), 1), 128, 16 * d, stream, proj_at, width, v["q_norm"],
        v["k_norm"], batch.cos_at, batch.sin_at, g["rotary_half"], n_q, n_kv, d, g["eps"], n, batch.parts_at,
        batch.part_of_at, states_at, q_at, maxima_at)  # fmt: skip
    keys = _ONE_KEYS if cut.one else 64 if g["kv_f16"] else 32  # in shared memory at once, beside the items
    columns, pieces = round_up(d, 64), -(-d // GROUP)
    shared = columns * (4 * cut.items * _ITEM_GROUPS + keys * (2 if g["kv_f16"] else 4))
    for first in range(0, 0 if cut.one else cut.tiles, cut.at_once):
        tiles = min(cut.at_once, cut.tiles - first)
        run("attention_scores_rows", kind, (chunks, n_kv * cut.groups, tiles), 128, shared, stream, q_at,
            batch.parts_at, batch.n_parts, states_at, n_q, n_kv, d, columns, g["attn_scale"], cut.rows, first, chunks,
            cut.stride, scores_at, maxima_at)  # fmt: skip
        groups = -(-cut.rows * (n_q // n_kv) // _TILE_ITEMS)
        run("attention_rows", kind, (n_kv * groups, tiles), 128 * pieces, 0, stream, scores_at, maxima_at,
            batch.parts_at, batch.n_parts, states_at, n_q, n_kv, d, cut.rows, first, chunks, cut.stride, proj_at,
            width, o_at, acts)  # fmt: skip
    if cut.one:
        run("attention_scores_one", kind, (CHUNK // _ONE_KEYS * chunks, n_kv * cut.groups, n), 128, shared, stream,
            q_at, batch.parts_at, states_at, n_q, n_kv, d, columns, g["attn_scale"], chunks, cut.stride, scores_at,
            maxima_at)  # fmt: skip
        warps = pieces * max(1, min(8 // pieces, -(-(n_q // n_kv) // 2)))
        run("attention_values", kind, (chunks, n_kv, n), 32 * warps, 4 * CHUNK * cut.stride, stream, scores_at,
            maxima_at, batch.parts_at, states_at, n_q, n_kv, d, chunks, cut.stride, partial_at, sums_at)  # fmt: skip
        run("attention_finish", "", (n_q * pieces, n), 256, 0, stream, partial_at, sums_at, proj_at, width, n_q, d,
            batch.parts_at, chunks, o_at, acts)  # fmt: skip
    if not fused:
        _quantize(context, stream, mixer, n, o_at, acts_o)


class _Cut(NamedTuple):
    """How attention cuts a batch (attention.cu): tiles of so many ``rows``, ``at_once`` a launch.

    one : every part is one row, whose chunks are computed apart.   items : a thread's, in attention_scores.
    groups : blocks that share a tile's items.   stride : scores of one position.
    """

    one: bool
    rows: int
    tiles: int
    at_once: int
    items: int
    groups: int
    stride: int


def _cut(mixer: Mixer, batch: Batch) -> _Cut:
    g, one = mixer.spec.geometry, batch.longest == 1
    per, items = g["n_q_heads"] // g["n_kv_heads"], 2 if one else 4
    rows = max(1, min(batch.longest, _TILE_ITEMS // per))
    groups = -(-rows * per // (items * _ITEM_GROUPS))
    stride = groups * items * _ITEM_GROUPS
    tiles = batch.n_rows if one else min(batch.n_rows, batch.n_rows // rows + batch.n_parts)
    tile_bytes = 4 * g["n_kv_heads"] * batch.chunks * CHUNK * stride
    at_once = tiles if one else min(tiles, max(1, SCORES_BYTES // tile_bytes))
    return _Cut(one, rows, tiles, at_once, items, groups, stride)


def _attention_bytes(mixer: Mixer, batch: Batch) -> tuple[int, ...]:
    """Scratch: queries, maxima, scores, and where chunks are computed apart their values and sums."""
    g, n, cut = mixer.spec.geometry, batch.n_rows, _cut(mixer, batch)
    heads, d = n * g["n_q_heads"], g["head_dim"]
    scores = 4 * cut.at_once * g["n_kv_heads"] * batch.chunks * CHUNK * cut.stride
    apart = heads * batch.chunks if cut.one else 0
    return 4 * heads * d, 4 * heads, scores, 4 * apart * d, 4 * apart


def _deltanet_bytes(mixer: Mixer, batch: Batch) -> tuple[int, ...]:
    """Scratch: b and a, and the channels after the convolution."""
    return 8 * batch.n_rows * mixer.spec.geometry["dn_v_heads"], 4 * batch.n_rows * mixer.channels


def covered(chunks: int) -> int:
    """Chunks that a captured graph's grids cover: four steps to a power of two, so that a growing context needs few
    graphs, and few blocks of each have nothing to do."""
    step = 1 << max(0, (chunks - 1).bit_length() - 3)
    return -(-chunks // step) * step


def upload_vectors(context: Context, vectors: dict[str, np.ndarray], names: Sequence[str]) -> dict[str, int]:
    """The small vectors of a layer on the card."""
    return {name: context.put(np.ascontiguousarray(vectors[name], np.float32), name) for name in names}
