"""CudaDevice: an NVIDIA card behind the Device interface.

One allocation holds residents, expert slots and scratch.  Dense and expert work have a lane each.  A decode step is a
graph: pull and quantise x, the product, raise a flag; the host spins on the flag without the GIL.  What a card answers
is the CPU's answer to the last bit; what it cannot answer is a DeviceError, and the engine asks the CPU instead.

Knows no model, no heat, no placement.  Imports of CUDA are in context.py and probe.py, when a card is opened.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from weakref import WeakSet

import numpy as np

from coli.container.layout import MatrixLayout, SlabLayout, matrix_layout, slab_layout
from coli.devices.base import (
    Asked,
    DeviceError,
    LayerSpec,
    MatrixSpec,
    MixerSpec,
    SlabSpec,
    SpanPart,
)
from coli.devices.cuda import mixer as mixers
from coli.devices.cuda import plan
from coli.devices.cuda import span as spans
from coli.devices.cuda.arena import Arena
from coli.devices.cuda.context import Context
from coli.devices.cuda.lane import Lane
from coli.devices.cuda.mixer import Mixer, MixerState
from coli.devices.cuda.probe import Card, nvml_free_bytes
from coli.devices.cuda.ruler import measure
from coli.devices.cuda.segments import SEGMENT_BYTES, SlotMemory
from coli.devices.cuda.span import CudaSpan
from coli.devices.cuda.spanplan import Head, Layer
from coli.devices.cuda.spanrun import SpanRun
from coli.devices.cuda.stream import Stream, Streamer
from coli.devices.cuda.upload import Uploader
from coli.devices.cuda.workspace import Workspace
from coli.log import logger

DENSE_SCRATCH_BYTES = 16 << 20  # 512 rows of x by 8192 columns of float32
EXPERT_SCRATCH_BYTES = 32 << 20  # 512 rows x 8 experts of 512: x, gate, up and h
STAGING_BYTES = DENSE_SCRATCH_BYTES + EXPERT_SCRATCH_BYTES
CONTEXT_BYTES = 600 << 20  # what a context took of an H200: 526 MiB on driver 580, kernels included

_DENSE, _EXPERTS = 0, 1
_GRAPH_TOKENS = 8  # batches up to this size get a graph each; a larger one is long against its launches
_GRAPH_JOBS = 16
_ANSWER_BYTES = 32 << 20  # pinned memory that the answer of one pass may take


@dataclass(eq=False)
class Resident:
    """The handle of an upload: a matrix (``layout``) or a slab (``slab``) at ``address``."""

    name: str
    address: int
    layout: MatrixLayout | None = None
    slab: SlabLayout | None = None
    stride: int = 0  # floats between two rows of x in the staging
    graphs: dict[Any, tuple[int, Any, int]] = field(
        default_factory=dict
    )  # rows -> (lane generation, graph, its address)


@dataclass(eq=False, slots=True)
class Ticket:
    """A group under way.  answer : set once it was fetched."""

    lane: int
    shape: tuple[int, int]
    answer: np.ndarray | None = None
    error: DeviceError | None = None


class CudaDevice:
    """One card.  Calls come from one thread, except ``write_slot``.

    staging_bytes : what an arena takes besides residents and slots.
    host_cpus : CPUs that uploads and the driver's threads want beside the team.  Measured on 16 cores: decode with 14
        threads was 1.29 times as fast as with 16, whose every interruption all others wait for; with 15 it was 1.1.
    """

    staging_bytes = STAGING_BYTES
    host_cpus = 2

    def __init__(self, card: Card) -> None:
        self.card = card
        self.name = card.name
        self.index = card.index
        self.uuid: str | None = card.uuid
        self.pci_bus_id: str | None = card.pci_bus_id
        self.driver: str | None = card.driver
        self._context: Context | None = None
        self._speed: tuple[float | None, float | None] | None = None
        self._forget()

    def _forget(self) -> None:
        self._arena: Arena | None = None
        self._slot_memory: SlotMemory | None = None  # None: the slots are in the arena, and stay as many
        self._lanes: tuple[Lane, ...] = ()
        self._residents: set[Resident] = set()
        self._slab: SlabLayout | None = None
        self._uploader: Uploader | None = None
        self._slot_uploader: Uploader | None = None
        self._slab_stride = 0
        self._expert_graphs: dict[Any, tuple[int, Any, int]] = {}
        self._beside: list[int] = []  # small allocations of whole layers
        self._states: WeakSet[MixerState] = WeakSet()  # closed with the arena, if their owners have not done it
        self._open: list[Ticket | None] = [None, None]  # by lane
        self._workspace: Workspace | None = None  # of runs of whole layers
        self._spans: list[CudaSpan] = []
        self._streamer: Streamer | None = None
        self._seats: dict[int, dict[int, int]] = {}  # layer -> expert -> address of its slot

    # ---- memory and speed --------------------------------------------------------------------------------

    def total_bytes(self) -> int:
        """Memory of the card."""
        return self.card.total_bytes

    def free_bytes(self) -> int:
        """Memory that an arena could take now.  Before the card is opened, what its context will take is left out."""
        if self._context is None:
            free = nvml_free_bytes(self.card.uuid)
            if free is not None:
                return max(0, free - CONTEXT_BYTES)
        return self._opened().memory()[0]

    @property
    def gb_s(self) -> float | None:
        """Bytes that the card reads, in GB/s (10**9), measured once; None where it could not be."""
        return self._measured()[0]

    @property
    def latency_us(self) -> float | None:
        """One round trip with nothing to compute, in us, measured once; None where it could not be."""
        return self._measured()[1]

    def _measured(self) -> tuple[float | None, float | None]:
        if self._speed is None:
            try:
                self._speed = measure(self._opened())
            except DeviceError as error:
                logger("cuda").info("%s was not measured: %s", self.name, error)
                self._speed = None, None
        return self._speed

    # ---- opening and closing -----------------------------------------------------------------------------

    def _opened(self) -> Context:
        """The card's context, made at the first need."""
        if self._context is None:
            self._context = Context(self.card.cuda_ordinal, self.card.arch, self.name)
        self._context.require_alive()
        return self._context

    def open_arena(self, resident_bytes: int, slots: int, slab: SlabSpec | None) -> None:
        """Take residents, slots and scratch.  An arena that is open is given back first, and its handles are void.

        Raises DeviceError("out of memory") and takes nothing where it does not fit.
        """
        context = self._opened()
        self._give_back()
        layout = None
        if slab is not None:
            layout = slab_layout(slab.format, slab.hidden_size, slab.intermediate_size)
            _check_slab(slab, layout)
        self._slot_memory = memory = self._elastic(context) if slots else None
        arena = Arena(
            resident_bytes, slots, layout.total_bytes if layout else 0, (DENSE_SCRATCH_BYTES, EXPERT_SCRATCH_BYTES),
            slots_apart=memory is not None,
        )  # fmt: skip
        try:
            what = f"{resident_bytes:,} bytes of matrices and {slots} expert slots"
            arena.place(context.alloc(arena.n_bytes, what), memory.address if memory is not None else None)
            if memory is not None:
                self._arena = arena  # so that `_give_back` frees it if there is no memory for the slots
                memory.resize(slots * arena.slot_stride_bytes)
            self._arena, self._slab = arena, layout
            self._slab_stride = plan.x_stride(layout.gate) if layout else 0
            self._lanes = (
                Lane(context, "dense work", arena.scratch(_DENSE)),
                Lane(context, "expert work", arena.scratch(_EXPERTS)),
            )
            self._uploader = Uploader(context, "upload")
            self._slot_uploader = Uploader(context, "slot")
        except BaseException:
            if context.lost is None:
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Free the arena and all that hangs on it; the context stays.

        Everything is tried, in the order that is written here.  Raises the DeviceError of the last call that failed.
        """
        context = self._context
        if context is None or context.lost is not None:
            if self._streamer is not None:
                self._streamer.close()  # its threads end; nothing is asked of the card
            self._let_go()
            return
        context.set_current()
        uploaders = [one for one in (self._uploader, self._slot_uploader) if one is not None]
        graphs = [graph for _, graph, _ in self._expert_graphs.values()]
        graphs += [graph for resident in self._residents for _, graph, _ in resident.graphs.values()]
        beside = [*self._beside, *([] if self._arena is None else [self._arena.address])]
        steps = [
            *(part.close for part in (self._streamer, self._workspace, *self._spans) if part is not None),
            *(partial(context.synchronize, lane.stream) for lane in self._lanes),
            *(partial(context.free_graph, graph) for graph in graphs),
            *(state.close for state in list(self._states)),
            *(step for one in uploaders for step in (one.finish, one.close)),
            *(lane.close for lane in self._lanes),
            *(partial(context.free, address) for address in beside),
            *([] if self._slot_memory is None else [self._slot_memory.close]),
            self._let_go,
        ]
        with contextlib.ExitStack() as closing:
            for step in reversed(steps):
                closing.callback(step)

    def _let_go(self) -> None:
        for resident in self._residents:
            resident.graphs.clear()
        self._forget()

    def close(self) -> None:
        """Give everything back, the context too.  Safe to call twice, and on a lost card, which is left alone."""
        if self._context is None:
            return
        try:
            self._give_back()
        except DeviceError as error:
            logger("cuda").debug("%s: closing: %s", self.name, error)
        if self._context.lost is None:
            self._context.close()
            self._context = None

    # ---- residents ---------------------------------------------------------------------------------------

    def upload(self, matrix: MatrixSpec) -> Resident:
        """Copy a matrix into the resident part."""
        layout = matrix_layout(matrix.format, matrix.rows, matrix.cols)
        return self._place(
            Resident(matrix.name, 0, layout=layout, stride=plan.x_stride(layout)), matrix.data, layout.used_bytes
        )

    def upload_slab(self, name: str, slab: SlabSpec, data: np.ndarray) -> Resident:
        """Copy one slab into the resident part."""
        layout = slab_layout(slab.format, slab.hidden_size, slab.intermediate_size)
        _check_slab(slab, layout)
        return self._place(Resident(name, 0, slab=layout, stride=plan.x_stride(layout.gate)), data, slab.slab_bytes)

    def _place(self, resident: Resident, data: np.ndarray, n_bytes: int) -> Resident:
        self._opened()
        if data.size < n_bytes:
            raise DeviceError(f"{resident.name}: {data.size:,} bytes given, {n_bytes:,} needed", "launch")
        resident.address = self._need_arena().take(resident.name, n_bytes)
        self._uploader.copy(resident.address, data[:n_bytes])
        self._residents.add(resident)
        return resident

    def free(self, handle: Resident) -> None:
        """Give a resident up."""
        if handle in self._residents:
            self._residents.discard(handle)
            if self._context.lost is None:
                self._context.set_current()
                for _, graph, _ in handle.graphs.values():
                    self._context.free_graph(graph)
            handle.graphs.clear()

    def matmul(self, handle: Resident, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """W x for each row: float32 (T, cols) -> float32 (T, rows of W), into ``out`` where one is given."""
        layout, n = handle.layout, len(rows)
        out = np.empty((n, layout.rows), np.float32) if out is None else out
        lane = self._lane(_DENSE)
        # The known case first and by itself: between two streams of weights every line of Python is a cache miss.
        known = handle.graphs.get(n)
        if known is not None and known[0] == lane.generation:
            lane.call(rows, handle.stride, known[2], out)
            return out
        self._uploader.finish()
        step = self._tokens_at_once(lane, layout)
        for at in range(0, n, step):
            self._matmul(lane, handle, rows[at : at + step], out[at : at + step])
        return out

    @staticmethod
    def _tokens_at_once(lane: Lane, layout: MatrixLayout) -> int:
        """Rows whose answers fit the staging, and whose x fits the scratch."""
        per_row = plan.x_bytes(layout, 1024) // 1024 + 1
        return max(1, min(512, _ANSWER_BYTES // (4 * layout.rows), lane.scratch_bytes // per_row - 8))

    def _matmul(self, lane: Lane, handle: Resident, rows: np.ndarray, out: np.ndarray) -> None:
        layout, n = handle.layout, len(rows)
        lane.reserve(4 * n * handle.stride, 4 * n * layout.rows)
        if n <= _GRAPH_TOKENS:
            graph = self._graph(handle.graphs, n, lane, lambda: plan.matmul(lane, handle.address, layout, n))
            lane.call(rows, handle.stride, graph, out)
            return
        with lane.launching():
            lane.put(rows, handle.stride)
            plan.matmul(lane, handle.address, layout, n)
        lane.take(out)

    def ffn(self, handle: Resident, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """down(silu(gate x) * up x) of a resident slab, into ``out`` where one is given."""
        y = self.take(self.begin_ffn(handle, rows))
        if out is None:
            return y
        out[:] = y
        return out

    def begin_ffn(self, handle: Resident, rows: np.ndarray) -> Ticket:
        """Start what `ffn` answers; `take` fetches it.  Beside an expert group, which is on the other lane."""
        lane, n = self._lane(_DENSE), len(rows)
        known = handle.graphs.get((n, n))
        if known is None or known[0] != lane.generation:
            self._uploader.finish()
        first, every = _counted(n)
        self._start_experts(
            lane, handle.slab, handle.stride, known, first, every, handle.address, rows, handle.graphs
        )  # fmt: skip
        self._open[_DENSE] = Ticket(_DENSE, (n, handle.slab.hidden_size))
        return self._open[_DENSE]

    # ---- whole layers ------------------------------------------------------------------------------------

    def mixer(self, spec: MixerSpec, into: Resident, out: Resident) -> Mixer:
        """A layer whose two projections are resident here, ready for `mix`.  Takes a little memory beside the arena.

        Raises DeviceError where the kernels do not take such a layer.
        """
        mixers.require_fit(spec)
        context = self._opened()
        names = ("q_norm", "k_norm") if spec.is_attention else ("conv", "exp_a_log", "dt_bias", "dn_norm")
        vectors = mixers.upload_vectors(context, spec.vectors, names)
        ba_at = 0 if spec.ba is None else context.put(np.ascontiguousarray(spec.ba.data), spec.ba.name)
        self._beside += [*vectors.values(), ba_at]
        return Mixer(spec, (into.address, into.layout), (out.address, out.layout), vectors, ba_at)

    def new_state(self, mixer: Mixer) -> MixerState:
        """A sequence's state of one layer before its first position.  The caller closes it; the arena does at last."""
        state = mixers.new_state(mixer, self._opened())
        state.siblings = self._states
        self._states.add(state)
        return state

    def mix(
        self, mixer: Mixer, state: MixerState, position: int, rows: np.ndarray, cos: np.ndarray, sin: np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """In-projection, core and out-projection of consecutive positions; the state moves on.

        rows : float32 (T, hidden), after the layer's first norm.   position : of the first row.
        cos, sin : float32 (T, rotary_half), of these positions; attention only.
        Returns float32 (T, hidden), in ``out`` where it is given.
        """
        lane, n, chunks = self._lane(_DENSE), len(rows), 0
        y = np.empty((n, mixer.out[1].rows), np.float32) if out is None else out
        if mixer.spec.is_attention:
            chunks = mixers.covered(-(-(position + n) // mixers.CHUNK))
        if n == 1:
            known = state.graphs.get(1)
            # nothing to allocate, capture or wait for: the known case, as in `matmul`
            room = chunks == 0 or position < mixers.CHUNK * state.chunks
            if known is not None and room and known[0] == (lane.generation, chunks, state.tables_at):
                mixers.put_list(lane, mixer, position, cos, sin)
                lane.call(rows, mixer.stride, known[2], y)
                return y
        self._uploader.finish()
        state.reach(position + n)
        step = mixers.rows_at_once(mixer, lane, chunks)
        for at in range(0, n, step):
            m = min(step, n - at)
            n_words = mixers.list_words(mixer, m)
            lane.reserve(4 * m * mixer.stride, 4 * m * mixer.out[1].rows, 4 * n_words)
            mixers.put_list(lane, mixer, position + at, cos[at : at + m], sin[at : at + m])
            if m == 1:
                graph = self._mix_graph(lane, mixer, state, n_words, chunks)
                lane.call(rows[at : at + 1], mixer.stride, graph, y[at : at + 1])
                continue
            with lane.launching():
                lane.put(rows[at : at + m], mixer.stride)
                mixers.launch(lane, mixer, state, m, n_words, chunks)
            lane.take(y[at : at + m])
        return y

    def _mix_graph(self, lane: Lane, mixer: Mixer, state: MixerState, n_words: int, chunks: int) -> int:
        """The graph of one position, captured anew where the staging or the tables have moved, or the grids are few."""
        key, known = (lane.generation, chunks, state.tables_at), state.graphs.get(1)
        if known is None or known[0] != key:
            self._context.set_current()
            if known is not None:
                del state.graphs[1]
                self._context.free_graph(known[1])
            graph = self._context.capture(
                lane.stream, lambda: mixers.launch(lane, mixer, state, 1, n_words, chunks)
            )
            state.graphs[1] = known = key, graph, int(graph)
        return known[2]

    # ---- runs of whole layers ------------------------------------------------------------------------------

    @staticmethod
    def span_bytes(geometry: dict[str, Any], n_layers: int, with_head: bool = True) -> int:
        """Bytes that a span of so many layers takes beside the arena, at most: scratch, vectors, routers, tables."""
        return spans.span_bytes(geometry, n_layers, with_head)

    def layer(self, index: int, mixer: Mixer, shared: Resident | None, spec: LayerSpec) -> Layer:
        """A whole layer whose mixer is here, ready for `span`.  Takes memory beside the arena.

        index : its number in the model.   shared : the resident shared expert; None where the host computes it.
        Raises DeviceError where the kernels do not take such a layer.
        """
        context = self._opened()
        self._need_arena()
        resident = None if shared is None else (shared.address, shared.slab)
        layer, taken = spans.make_layer(context, index, mixer, self._slab, resident, spec)
        self._beside += taken
        return layer

    def head(self, norm: np.ndarray, matrix: Resident) -> Head:
        """The final norm, float32 (hidden,), 1 + w, and the resident lm_head, ready for `span`."""
        at = self._opened().put(np.ascontiguousarray(norm, np.float32), "the final norm")
        self._beside.append(at)
        return Head(at, matrix.address, matrix.layout)

    def span(self, layers: Sequence[Layer], head: Head | None = None) -> CudaSpan:
        """Consecutive layers, and the head behind the last where it is given."""
        context = self._opened()
        if self._workspace is None:
            self._workspace = Workspace(context)
        span = CudaSpan(self._workspace, layers, head)
        self._spans.append(span)
        for layer in layers:
            for expert, slot_at in self._seats.get(layer.index, {}).items():
                span.seat(layer.index, expert, slot_at)
        return span

    def seat(self, layer: int, expert: int, slot: int | None) -> None:
        """From the next `begin_span` on this expert is in this slot, or in none.  Never while a batch is in a span."""
        slot_at = 0 if slot is None else self._need_arena().slot(slot)
        self._seats.setdefault(layer, {})[expert] = slot_at
        for span in self._spans:
            span.seat(layer, expert, slot_at)

    def begin_span(
        self, span: CudaSpan, parts: Sequence[SpanPart], x: np.ndarray, cos: np.ndarray, sin: np.ndarray,
        logit_rows: Sequence[int] = (),
    ) -> SpanRun:  # fmt: skip
        """Start a batch of at most ``span.max_rows`` rows; x is free again on return.

        x : float32 (T, hidden), rows may lie apart.   cos, sin : float32 (positions, rotary_half), from position 0 on.
        logit_rows : rows whose logits are wanted, ascending; only with a head.
        """
        if self._context.lost is not None:
            self._context.require_alive()
        self._uploader.finish()
        return span.begin(parts, x, cos, sin, logit_rows)

    def open_stream(self) -> None:
        """Get ready for `begin_stream`: scratch slots, pinned staging, threads.  No batch is in a span.

        Raises DeviceError and takes nothing.
        """
        if self._streamer is None:
            context = self._opened()
            if self._slab is None or self._workspace is None or not self._spans:
                raise DeviceError(f"{self.name}: experts in passing without a span, or without their shape", "launch")
            rows, top_k = (max(numbers) for numbers in zip(*((span.max_rows, span.top_k) for span in self._spans)))
            self._streamer = Streamer(context, self._slab, rows, top_k)

    def begin_stream(
        self, run: SpanRun, asked: Asked, experts: np.ndarray, slabs: Sequence[np.ndarray]
    ) -> Stream:  # fmt: skip
        """Start experts of the layer that a run asks about, from host memory; `Stream.wait` must follow.

        experts : int (n,), some of those asked for.   slabs : of each, uint8, read until `wait` has returned.
        """
        if self._streamer is None or self._workspace.open is not run or not run.is_stepwise:
            raise DeviceError(f"{self.name}: experts in passing, and nobody is ready for them", "launch")
        answers_at = self._workspace.mailbox.at("answers")
        return self._streamer.begin(run.launch.rows.acts, answers_at, asked, experts, slabs)

    # ---- expert slots ------------------------------------------------------------------------------------

    def _elastic(self, context: Context) -> SlotMemory | None:
        """Memory for slots that can come and go; None on a card or driver that has no such thing."""
        try:
            return SlotMemory(context, self.card.cuda_ordinal, context.memory()[1])
        except (DeviceError, AttributeError) as error:
            context.require_alive()
            logger("cuda").debug("%s: its expert slots cannot come and go: %s", self.name, error)
            return None

    @property
    def slot_segment_bytes(self) -> int:
        """Slots are freed so many bytes at a time, counted from slot 0; 0 where they stay as many as they are."""
        return 0 if self._slot_memory is None else SEGMENT_BYTES

    def resize_slots(self, slots: int) -> int:
        """Have so many slots, the first ones; the bytes that this takes.  Nothing is under way on those that go."""
        arena, memory = self._need_arena(), self._slot_memory
        if memory is None:
            raise DeviceError(f"{self.name}: its expert slots cannot come and go", "launch")
        for lane in self._lanes:
            self._context.synchronize(lane.stream)
        self._slot_uploader.finish()
        taken = memory.resize(slots * arena.slot_stride_bytes)
        arena.n_slots = slots
        return taken

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        """Overwrite a slot; the bytes are on the card when this returns.  May come from an uploader thread."""
        self._opened()
        at = self._need_arena().slot(slot)
        if data.size != self._slab.total_bytes:
            raise DeviceError(
                f"slot {slot}: {data.size:,} bytes given, a slot takes {self._slab.total_bytes:,}", "launch"
            )
        self._slot_uploader.copy(at, data)
        self._slot_uploader.finish()

    def clear_slot(self, slot: int) -> None:
        """The slot holds nobody any more.  Nothing to do: who is where is the caller's table."""

    def issue(self, layer: int, slots: Sequence[int], rows_of: Sequence[int], x: np.ndarray) -> Ticket:
        """Start the experts of a layer: contribution i is slot slots[i] applied to x[rows_of[i]]."""
        lane, arena = self._lane(_EXPERTS), self._arena
        if type(slots) is not array:  # the expert tier's are
            slots, rows_of = array("i", slots), array("i", rows_of)
        n, n_tokens = len(slots), len(x)
        known = self._expert_graphs.get((n, n_tokens))
        if known is not None and known[0] == lane.generation:  # the known case first, as in `matmul`
            lane.issue(x, self._slab_stride, known[2], slots, rows_of, arena.slot(0), arena.slot_stride_bytes,
                       arena.n_slots)  # fmt: skip
        else:
            self._start_experts(lane, self._slab, self._slab_stride, None, np.asarray(slots), np.asarray(rows_of),
                                arena.slot(0), x, self._expert_graphs)  # fmt: skip
        self._open[_EXPERTS] = ticket = Ticket(_EXPERTS, (n, self._slab.hidden_size))
        return ticket

    def take(self, ticket: Ticket) -> np.ndarray:
        """Wait for a ticket: float32 (contributions, hidden), unweighted, in the order of ``issue``."""
        if ticket is self._open[ticket.lane]:
            self._settle(ticket.lane)
        if ticket.error is not None:
            raise ticket.error
        if ticket.answer is None:
            raise DeviceError(f"{self.name}: the arena was closed under an open ticket", "launch")
        return ticket.answer

    def _settle(self, which: int) -> None:
        """Fetch the answer of what is under way on a lane: its staging is needed again."""
        ticket, self._open[which] = self._open[which], None
        if ticket is None:
            return
        try:
            if self._context.lost is not None:
                self._context.require_alive()
            answer = np.empty(ticket.shape, np.float32)
            self._lanes[which].take(answer)
            ticket.answer = answer
        except DeviceError as error:
            ticket.error = error

    def _start_experts(
        self, lane: Lane, slab: SlabLayout, stride: int, known: tuple[int, Any, int] | None, slots: np.ndarray,
        rows_of: np.ndarray, first_slot: int, x: np.ndarray, graphs: dict,
    ) -> None:  # fmt: skip
        """Put x and the job list into the staging and launch: a small group as a graph, ``known`` or captured now."""
        slot_bytes, n_slots = self._arena.slot_stride_bytes, max(1, self._arena.n_slots)  # 1: a resident slab is slot 0
        if known is not None and known[0] == lane.generation:
            lane.issue(x, stride, known[2], slots, rows_of, first_slot, slot_bytes, n_slots)
            return
        n, n_tokens = len(slots), len(x)
        jobs = np.empty(n, plan.JOB)
        jobs["slab"] = slots.astype(np.uint64) * np.uint64(slot_bytes) + np.uint64(first_slot)
        jobs["row"] = rows_of
        jobs["out"] = np.arange(n)
        small = n <= _GRAPH_JOBS and n_tokens <= _GRAPH_JOBS
        made = plan.Experts(jobs, None, n) if small else plan.plan_experts(lane, slab, jobs, n_tokens)
        lane.reserve(4 * n_tokens * stride, 4 * n * slab.hidden_size, plan.list_bytes(made))
        if small:
            graph = self._graph(graphs, (n, n_tokens), lane, lambda: plan.experts(lane, slab, made, n_tokens))
            lane.issue(x, stride, graph, slots, rows_of, first_slot, slot_bytes, n_slots)
            return
        plan.put_list(lane, made)
        with lane.launching():
            lane.put(x, stride)
            plan.experts(lane, slab, made, n_tokens)

    # ---- inside ------------------------------------------------------------------------------------------

    def _graph(self, graphs: dict, key: Any, lane: Lane, body: Any) -> int:
        """The graph of a call, captured at its first use and again when the lane's staging has moved."""
        generation, graph, address = graphs.get(key, (-1, None, 0))
        if generation != lane.generation:
            self._context.set_current()
            if graph is not None:
                del graphs[key]
                self._context.free_graph(graph)
            graph = self._context.capture(lane.stream, body)
            address = int(graph)
            graphs[key] = lane.generation, graph, address
        return address

    def _lane(self, which: int) -> Lane:
        """A lane with nothing under way: an open ticket's answer is fetched first."""
        if self._arena is None:
            self._need_arena()
        if self._context.lost is not None:
            self._context.require_alive()
        if self._open[which] is not None:
            self._settle(which)
        return self._lanes[which]

    def _need_arena(self) -> Arena:
        if self._arena is None:
            raise DeviceError(f"{self.name}: no arena is open", "launch")
        return self._arena


@lru_cache(maxsize=16)
def _counted(n: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 zeros, and 0 to n - 1; read only."""
    return np.zeros(n, np.int32), np.arange(n, dtype=np.int32)


def _check_slab(slab: SlabSpec, layout: SlabLayout) -> None:
    stated = (slab.slab_bytes, slab.gate_offset, slab.up_offset, slab.down_offset)
    computed = (layout.total_bytes, layout.gate_offset, layout.up_offset, layout.down_offset)
    if stated != computed:
        raise DeviceError(f"a slab of bytes and offsets {stated}; its shape says {computed}", "launch")
