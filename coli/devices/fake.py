"""A card made of ordinary memory: what tests drive, and what ``--devices fake:8GiB`` rehearses a placement with.

It answers only from the bytes that were uploaded into its arena, with the CPU's kernels, so a placement that
forgot an upload, read the wrong slot or overwrote one too early gives other bits or stops.  What a real card would
let pass and answer with garbage (a slot that nobody wrote, a ticket taken twice, an overwrite under an open ticket)
is an AssertionError here: a bug of the caller, never a DeviceError to fall back from.

It knows no model and no cost but the two it is given: ``gb_s`` and ``latency_us`` are honoured by waiting.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np

from coli.container.layout import ALIGN_BYTES, matrix_layout, round_up
from coli.devices import fakemath, fakemixer, fakespan
from coli.devices.base import DeviceError, LayerSpec, MatrixSpec, MixerSpec, SlabSpec, SpanPart
from coli.devices.fakemath import Part, answer, check_rows, part_of, require, slab_parts
from coli.devices.fakeslots import POISON, Slots, stride_bytes

OPERATIONS = ("alloc", "upload", "matmul", "issue", "take", "mix", "span", "ask", "answer", "finish")

_KIND = {"alloc": "out of memory"}  # of a failure by ``fail``; the others are "launch"
_SPIN_S = 0.0005  # a sleep overshoots by about 0.1 ms, so the last half millisecond is spun


@dataclass(frozen=True, eq=False)
class _Resident:
    """The handle of an upload.  parts : the matrix, or gate, up and down."""

    name: str
    arena: np.ndarray
    offset: int
    n_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class _Ticket:
    """What was begun.  x : the caller's rows as they were then.   ready_at : on ``time.perf_counter``.

    of : the layer of a group, or the resident slab that `begin_ffn` was asked for; then there are no slots.
    """

    of: int | _Resident
    slots: np.ndarray
    rows_of: np.ndarray
    x: np.ndarray
    ready_at: float


@dataclass(frozen=True, eq=False)
class _Mixer:
    """The handle of a layer: its small vectors are copies, its projections are read from the arena at every call."""

    spec: MixerSpec
    into: _Resident
    out: _Resident
    n_bytes: int


class _State:
    """One sequence's state of one layer.  It knows its position, so a step left out or done twice is noticed."""

    def __init__(self, device: FakeDevice, mixer: _Mixer, core: fakemixer.Core) -> None:
        self.device = device
        self.mixer = mixer
        self.core: fakemixer.Core | None = core  # None: closed, or spoiled by a failure
        self.position = 0
        self.n_bytes = 0  # of the device's memory

    def reach(self, positions: int) -> None:
        """Make room for so many positions in all."""
        require(self in self.device._states, "a state of a device that was closed")
        more = self.core.bytes_for(positions) - self.n_bytes
        if more > 0:
            self.device._take_beside(more, f"a state of {self.mixer.into.name}")
            self.n_bytes += more

    def copy(self) -> _State:
        """An independent state with the same contents."""
        require(self.core is not None, "a state is copied that was closed, or that a failure has spoiled")
        other = _State(self.device, self.mixer, self.core.copy())
        other.position = self.position
        self.device._states.add(other)
        try:
            other.reach(self.position)
        except DeviceError:
            other.close()
            raise
        return other

    def close(self) -> None:
        """Give its memory back."""
        if self in self.device._states:
            self.device._states.discard(self)
            self.device._beside_bytes -= self.n_bytes
        self.core = None


class FakeDevice:
    """A ``devices.base.Device`` in ordinary memory.

    free_bytes : what an arena may take; see `set_free_bytes`.
    gb_s : bytes it reads and takes in, in GB/s (10**9); None is as fast as it goes.   latency_us : of each operation.
    fail : (operation, n) pairs, n from 1; operation one of "alloc" (out of memory), "upload", "matmul", "issue",
        "take", "mix", "span", "ask", "answer", "finish" (launch), or "die": the n-th operation of any kind loses the
        device for ever.

    calls : every operation as (operation, details...), in order, failed ones too, so that ``fail=[(operation, n)]``
        is the n-th entry of that operation.

        - ("alloc", bytes, slots) for an arena, ("alloc", bytes, name) for a resident's part of it, and for what layers
          and their states take beside it
        - ("upload", name, bytes), or ("upload", slot, bytes)
        - ("matmul", name, rows), a resident slab's ``ffn`` and ``begin_ffn`` too
        - ("issue", layer, slots, rows_of), ("take", layer) or ("take", name)
        - ("mix", name of the in-projection, position, rows)
        - ("span", first layer, layers, rows), ("ask", layers that were done), ("answer", layer, ranks, shared or not),
          ("finish", rows whose logits were wanted)
        - ("clear", slot), ("free", name), ("close",), which never fail and which "die" does not count

    index : 0 until somebody numbers the devices.   uuid, pci_bus_id, driver : None, it has none.
    span_rows : what a span's ``max_rows`` will be.
    segment_slots : slots that `resize_slots` frees together.
    """

    span_rows = 512
    segment_slots = 1
    uuid: str | None = None
    pci_bus_id: str | None = None
    driver: str | None = None

    def __init__(
        self,
        free_bytes: int,
        *,
        name: str = "fake0",
        gb_s: float | None = None,
        latency_us: float | None = None,
        fail: Sequence[tuple[str, int]] = (),
    ) -> None:
        for operation, n in fail:
            if operation not in (*OPERATIONS, "die") or n < 1:
                known = ", ".join((*OPERATIONS, "die"))
                raise ValueError(f"fail has ({operation!r}, {n!r}); expected one of {known}, and a number from 1")
        self.name = name
        self.index = 0
        self.gb_s = gb_s
        self.latency_us = latency_us
        self.calls: MutableSequence[tuple] = []
        self._fail = frozenset(fail)
        self._total_bytes = self._limit_bytes = free_bytes
        self._lock = Lock()  # write_slot may come from another thread
        self._count: Counter[str] = Counter()
        self._lost = False
        self._idle_at = 0.0  # when all that was started is done
        self._drop_arena()

    # ---- identity and memory ---------------------------------------------------------------------------

    def total_bytes(self) -> int:
        """Memory of the device."""
        return self._total_bytes

    def free_bytes(self) -> int:
        """What an arena could take now."""
        self._refuse_if_lost()
        arena_bytes = self._arena.size + self._slots.beyond_arena_bytes
        return max(0, self._limit_bytes - arena_bytes - self._beside_bytes)

    def set_free_bytes(self, free_bytes: int) -> None:
        """What `free_bytes` says when no arena is open, from now on: another program came or went."""
        self._limit_bytes = free_bytes
        self._total_bytes = max(self._total_bytes, free_bytes)

    def open_arena(self, resident_bytes: int, slots: int, slab: SlabSpec | None) -> None:
        """Take one allocation.  An arena that is open is given back first, and all handles into it are void."""
        self._check_idle()
        require(not self._tickets, f"{self.name}: the arena is opened anew under {len(self._tickets)} open tickets")
        require(resident_bytes >= 0 and slots >= 0, f"{self.name}: an arena of {resident_bytes} bytes, {slots} slots")
        require(slots == 0 or slab is not None, f"{self.name}: {slots} slots of no shape")
        slot_bytes = slots * stride_bytes(slab)
        n_bytes = round_up(resident_bytes) + slot_bytes
        self._begin("alloc", n_bytes, slots)
        with self._lock:
            self._drop_arena()
        if n_bytes > self._limit_bytes:
            found = f"an arena of {n_bytes:,} bytes, {self._limit_bytes:,} are free"
            raise DeviceError(f"{self.name}: {found}", "out of memory")
        try:
            # zeros, not full: the system maps a page when it is first written, so 8 GiB do not cost 8 GiB
            raw = np.zeros(n_bytes + ALIGN_BYTES, np.uint8)
        except MemoryError:
            reason = f"the host has no {n_bytes:,} bytes for the arena"
            raise DeviceError(f"{self.name}: {reason}", "out of memory") from None
        with self._lock:
            start = -raw.ctypes.data % ALIGN_BYTES
            self._arena = raw[start : start + n_bytes]
            self._slots_at = n_bytes - slot_bytes
            self._slots = Slots(self._arena[self._slots_at :], slab)

    def close(self) -> None:
        """Give everything back; an arena may be opened again afterwards, unless the device is lost."""
        self.calls.append(("close",))
        with self._lock:
            self._drop_arena()

    def _drop_arena(self) -> None:
        self._arena = np.empty(0, np.uint8)
        self._slots_at = 0
        self._used_bytes = 0
        self._slots = Slots(self._arena, None)
        self._residents: set[_Resident] = set()
        self._tickets: set[_Ticket] = set()
        self._states: set[_State] = set()
        self._beside_bytes = 0
        self._run: fakespan.Run | None = None  # a batch that is in a span

    # ---- residents ---------------------------------------------------------------------------------------

    def upload(self, matrix: MatrixSpec) -> _Resident:
        """Copy a matrix into the resident part."""
        layout = matrix_layout(matrix.format, matrix.rows, matrix.cols)
        stated = (matrix.block_bytes, matrix.n_blocks, matrix.n_groups)
        computed = (layout.block_bytes, layout.n_blocks, layout.n_groups)
        require(stated == computed, f"{matrix.name}: block_bytes, n_blocks, n_groups are {stated}, not {computed}")
        part = part_of(matrix)
        return self._place(matrix.name, matrix.data, layout.used_bytes, (part,))

    def upload_slab(self, name: str, slab: SlabSpec, data: np.ndarray) -> _Resident:
        """Copy one slab into the resident part."""
        return self._place(name, data, slab.slab_bytes, slab_parts(slab))

    def _place(self, name: str, data: np.ndarray, n_bytes: int, parts: tuple[Part, ...]) -> _Resident:
        is_bytes = data.dtype == np.uint8 and data.ndim == 1
        require(is_bytes, f"{name}: data is {data.dtype} {data.shape}, not uint8 (n,)")
        require(data.size >= n_bytes, f"{name}: {data.size} bytes given, {n_bytes} needed")
        self._begin("alloc", n_bytes, name)
        offset = self._used_bytes
        require(
            offset + n_bytes <= self._slots_at,
            f"{self.name}: {name} needs {n_bytes} bytes, {self._slots_at - offset} are left of the resident part",
        )
        self._begin("upload", name, n_bytes)
        self._arena[offset : offset + n_bytes] = data[:n_bytes]
        self._used_bytes = round_up(offset + n_bytes)
        resident = _Resident(name, self._arena, offset, n_bytes, parts)
        self._residents.add(resident)
        _wait_until(self._finish_at(n_bytes))
        return resident

    def free(self, handle: _Resident) -> None:
        """Give a resident up; its bytes are overwritten at once."""
        self.calls.append(("free", handle.name))
        require(handle in self._residents or handle.arena is not self._arena, f"{handle.name} is freed twice")
        if handle in self._residents:
            self._residents.discard(handle)
            self._arena[handle.offset : handle.offset + handle.n_bytes] = POISON

    def matmul(self, handle: _Resident, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """W x for each row: float32 (T, cols) -> float32 (T, rows of W), into ``out`` where it is given."""
        data = self._bytes_of(handle, 1)
        check_rows(rows, handle.parts[0].cols, handle.name)
        self._begin("matmul", handle.name, len(rows))
        self._check_idle()
        done_at = self._finish_at(handle.n_bytes)
        y = fakemath.matmul(data, handle.parts[0], rows)
        _wait_until(done_at)
        return answer(y, out, handle.name)

    def ffn(self, handle: _Resident, rows: np.ndarray) -> np.ndarray:
        """down(silu(gate x) * up x) of a resident slab."""
        data = self._bytes_of(handle, 3)
        check_rows(rows, handle.parts[0].cols, handle.name)
        self._begin("matmul", handle.name, len(rows))
        self._check_idle()
        done_at = self._finish_at(handle.n_bytes)
        y = fakemath.ffn(data, handle.parts, rows)
        _wait_until(done_at)
        return y

    def begin_ffn(self, handle: _Resident, rows: np.ndarray) -> _Ticket:
        """Start what `ffn` answers.  The arithmetic is done in `take`, as late as a card may do it."""
        self._bytes_of(handle, 3)
        check_rows(rows, handle.parts[0].cols, handle.name)
        self._begin("matmul", handle.name, len(rows))
        self._check_idle()
        nothing = np.empty(0, np.int64)
        ticket = _Ticket(handle, nothing, nothing, np.array(rows, np.float32), self._finish_at(handle.n_bytes))
        with self._lock:
            self._tickets.add(ticket)
        return ticket

    def _bytes_of(self, handle: _Resident, n_parts: int) -> np.ndarray:
        self._refuse_if_lost()
        require(handle in self._residents, f"{handle.name} was freed, or its arena was closed")
        require(len(handle.parts) == n_parts, f"{handle.name} is {'a slab' if n_parts == 1 else 'a matrix'}")
        return self._arena[handle.offset : handle.offset + handle.n_bytes]

    # ---- whole layers --------------------------------------------------------------------------------------

    def mixer(self, spec: MixerSpec, into: _Resident, out: _Resident) -> _Mixer:
        """A layer whose two projections are resident here.  Its vectors are copied beside the arena."""
        for handle in (into, out):
            self._bytes_of(handle, 1)
        kept = {name: np.array(values, np.float32) for name, values in spec.vectors.items()}
        ba = None if spec.ba is None else replace(spec.ba, data=spec.ba.data.copy())
        n_bytes = sum(values.nbytes for values in kept.values()) + (0 if ba is None else ba.data.size)
        self._take_beside(n_bytes, f"vectors of {into.name}")
        return _Mixer(replace(spec, vectors=kept, ba=ba), into, out, n_bytes)

    def new_state(self, mixer: _Mixer) -> _State:
        """A sequence's state of a layer before its first position."""
        state = _State(self, mixer, fakemixer.core(mixer.spec))
        self._refuse_if_lost()
        self._states.add(state)
        try:
            state.reach(0)
        except DeviceError:
            state.close()
            raise
        return state

    def mix(
        self, mixer: _Mixer, state: _State, position: int, rows: np.ndarray, cos: np.ndarray, sin: np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Consecutive positions of one sequence.  A failure spoils the state, as a kernel that breaks off may."""
        name = mixer.into.name
        check_rows(rows, mixer.into.parts[0].cols, name)
        self._check_state(mixer, state, position)
        core, state.core = state.core, None
        self._begin("mix", name, position, len(rows))
        self._check_idle()
        state.core = core
        state.reach(position + len(rows))
        done_at = self._finish_at(mixer.into.n_bytes + mixer.out.n_bytes)
        y = self._mixed(mixer, np.ascontiguousarray(rows), [(core, position, slice(0, len(rows)), cos, sin)])
        state.position += len(rows)
        _wait_until(done_at)
        return answer(y, out, name)

    def _mixed(self, mixer: _Mixer, x: np.ndarray, moves: Sequence[tuple]) -> np.ndarray:
        """What a layer's mixer makes of x (T, hidden).

        moves : (core, position, its rows of x, cos, sin), all rows of x in turn; cos and sin of those rows.
        """
        spec = mixer.spec
        into, back = self._bytes_of(mixer.into, 1), self._bytes_of(mixer.out, 1)
        proj = np.ascontiguousarray(fakemath.matmul(into, mixer.into.parts[0], x))
        ba = None if spec.ba is None else fakemath.matmul(spec.ba.data, part_of(spec.ba), x)
        mixed = [
            core.advance(position, proj[rows], None if ba is None else ba[rows], cos, sin)
            for core, position, rows, cos, sin in moves
        ]
        return fakemath.matmul(back, mixer.out.parts[0], np.concatenate(mixed))

    def _check_state(self, mixer: _Mixer, state: _State, position: int) -> None:
        name = mixer.into.name
        require(state in self._states and state.mixer is mixer, f"{name}: a state of another layer, or a closed one")
        require(state.core is not None, f"{name}: a state that a failure has spoiled")
        require(state.position == position, f"{name}: position {position} with a state of {state.position}")

    def _take_beside(self, n_bytes: int, what: str) -> None:
        """Memory beside the arena."""
        self._begin("alloc", n_bytes, what)
        if n_bytes > self.free_bytes():
            found = f"{n_bytes:,} bytes for {what}, {self.free_bytes():,} are free"
            raise DeviceError(f"{self.name}: {found}", "out of memory")
        self._beside_bytes += n_bytes

    # ---- runs of whole layers ------------------------------------------------------------------------------

    def span_bytes(self, geometry: dict[str, Any], n_layers: int) -> int:
        """What the vectors and routers of so many layers take, at most; this device needs no scratch."""
        return n_layers * 4 * geometry["hidden_size"] * (3 + geometry["n_experts"]) + 4 * geometry["hidden_size"]

    def layer(self, index: int, mixer: _Mixer, shared: _Resident | None, spec: LayerSpec) -> fakespan.Layer:
        """A whole layer.  Its norms and routers are copied beside the arena."""
        made = fakespan.Layer.of(index, mixer, shared, spec)
        self._check_layer(made)
        self._take_beside(made.n_bytes, f"norms and router of layer {index}")
        return made

    def _check_layer(self, layer: fakespan.Layer) -> None:
        """Its bytes are all here still."""
        for handle in (layer.mixer.into, layer.mixer.out):
            self._bytes_of(handle, 1)
        if layer.shared is not None:
            self._bytes_of(layer.shared, 3)

    def head(self, norm: np.ndarray, matrix: _Resident) -> fakespan.Head:
        """The final norm, copied beside the arena, and the resident lm_head."""
        self._bytes_of(matrix, 1)
        self._take_beside(norm.nbytes, "the final norm")
        return fakespan.Head(np.array(norm, np.float32), matrix)

    def span(self, layers: Sequence[fakespan.Layer], head: fakespan.Head | None = None) -> fakespan.Span:
        """Consecutive layers, with or without the head."""
        numbers = [layer.index for layer in layers]
        require(numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"a span of the layers {numbers}")
        return fakespan.Span(tuple(layers), head, self.span_rows)

    def seat(self, layer: int, expert: int, slot: int | None) -> None:
        """From the next `begin_span` on this expert is in this slot, or in none."""
        self._refuse_if_lost()
        self._check_idle()
        with self._lock:
            self._slots.seat(layer, expert, slot)

    @property
    def seats(self) -> dict[tuple[int, int], int]:
        """The slot of each (layer, expert) that is seated."""
        return self._slots.seats

    def begin_span(
        self, span: fakespan.Span, parts: Sequence[SpanPart], x: np.ndarray, cos: np.ndarray, sin: np.ndarray,
        logit_rows: Sequence[int] = (),
    ) -> fakespan.Run:  # fmt: skip
        """Start a batch.  The arithmetic is done by `ask` and `finish`, as late as a card may do it."""
        self._check_idle()
        run = fakespan.Run(self, span, parts, x, cos, sin, logit_rows)
        self._begin("span", span.layers[0].index, len(span.layers), len(x))
        with self._lock:
            self._run = run
            self._slots.begin_read(run.slots)
        return run

    def _end_span(self, run: fakespan.Run) -> None:
        """A batch has left its span, whatever way."""
        with self._lock:
            if self._run is run:
                self._run = None
                self._slots.end_read(run.slots)

    def _check_idle(self) -> None:
        """What would go on the stream behind a run that waits for its host waits for ever."""
        require(self._run is None, f"{self.name}: a batch is in a span: it must be finished or abandoned first")

    # ---- expert slots ------------------------------------------------------------------------------------

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        """Overwrite a slot with an expert's slab."""
        self._begin("upload", slot, data.size)
        with self._lock:
            slots = self._slots
            target = slots.begin_write(slot, data)
        target[: data.size] = data
        _wait_until(time.perf_counter() + self._seconds(data.size))  # beside the arithmetic, as a copy engine is
        with self._lock:
            slots.end_write(slot)  # of an arena that may have been closed meanwhile

    def clear_slot(self, slot: int) -> None:
        """The slot holds nobody any more: it is overwritten."""
        self.calls.append(("clear", slot))
        with self._lock:
            if self._lost:
                return
            self._slots.clear(slot)

    @property
    def slot_segment_bytes(self) -> int:
        """Slots are freed so many bytes at a time, counted from slot 0."""
        return self.segment_slots * self._slots.stride

    def resize_slots(self, slots: int) -> int:
        """Have so many slots, the first ones; the bytes that this takes.  Those that go are overwritten."""
        require(self._slots.slab is not None, f"{self.name}: {slots} slots of no shape")
        self._check_idle()
        taken = self._slots.bytes_for(slots, self.segment_slots)
        self._begin("alloc", taken, slots)
        if taken > self.free_bytes():
            found = f"{taken:,} bytes for {slots} slots, {self.free_bytes():,} are free"
            raise DeviceError(f"{self.name}: {found}", "out of memory")
        with self._lock:
            self._slots.resize(slots, self.segment_slots)
        return taken

    def issue(self, layer: int, slots: Sequence[int], rows_of: Sequence[int], x: np.ndarray) -> _Ticket:
        """Start a group.  The arithmetic is done in `take`, as late as a card may do it."""
        slots, rows_of = np.array(slots, np.int64), np.array(rows_of, np.int64)
        self._begin("issue", layer, tuple(slots.tolist()), tuple(rows_of.tolist()))
        self._check_idle()
        with self._lock:
            require(slots.size > 0 and slots.shape == rows_of.shape == (slots.size,), "a group without contributions")
            self._slots.check_written(slots.tolist())
            slab = self._slots.slab
            check_rows(x, slab.hidden_size, f"layer {layer}")
            require(0 <= rows_of.min() and rows_of.max() < len(x), f"rows_of {rows_of} of an x with {len(x)} rows")
            n_bytes = len(np.unique(slots)) * slab.slab_bytes
            ticket = _Ticket(layer, slots, rows_of, np.array(x, np.float32, order="C"), self._finish_at(n_bytes))
            self._tickets.add(ticket)
            self._slots.begin_read(slots.tolist())
        return ticket

    def take(self, ticket: _Ticket) -> np.ndarray:
        """Finish a group or an FFN: float32 (contributions, hidden).  The ticket is used up, also where it fails."""
        is_group = isinstance(ticket.of, int)
        try:
            self._begin("take", ticket.of if is_group else ticket.of.name)
            require(ticket in self._tickets, "a ticket is taken twice, or after its arena was closed")
            if is_group:
                slab = self._slots.slab
                y = np.empty((ticket.slots.size, slab.hidden_size), np.float32)
                for slot in np.unique(ticket.slots).tolist():
                    mine = np.flatnonzero(ticket.slots == slot)
                    rows = ticket.x[ticket.rows_of[mine]]
                    y[mine] = fakemath.ffn(self._slots.bytes_of(slot), slab_parts(slab), rows)
            else:
                y = fakemath.ffn(self._bytes_of(ticket.of, 3), ticket.of.parts, ticket.x)
        finally:
            with self._lock:
                if ticket in self._tickets:
                    self._tickets.discard(ticket)
                    self._slots.end_read(ticket.slots.tolist())
        _wait_until(ticket.ready_at)
        return y

    def slot_bytes(self, slot: int) -> np.ndarray:
        """The bytes of a slot as they are now, for tests: uint8, a copy."""
        self._slots.check(slot)
        return self._slots.bytes_of(slot).copy()

    # ---- failures and time -------------------------------------------------------------------------------

    def _begin(self, operation: str, *details: Any) -> None:
        """Record an operation, and let it fail where it was told to."""
        with self._lock:
            self.calls.append((operation, *details))
            self._count[operation] += 1
            self._count["die"] += 1
            if ("die", self._count["die"]) in self._fail:
                self._lost = True
            failed = (operation, self._count[operation]) in self._fail
        self._refuse_if_lost()
        if failed:
            n = self._count[operation]
            raise DeviceError(f"{self.name}: {operation} number {n} was told to fail", _KIND.get(operation, "launch"))

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise DeviceError(f"{self.name} is lost", "lost")

    def _seconds(self, n_bytes: int) -> float:
        return (self.latency_us or 0.0) * 1e-6 + (n_bytes / (self.gb_s * 1e9) if self.gb_s else 0.0)

    def _wait(self, n_bytes: int) -> None:
        """Take the time that work on so many bytes takes."""
        _wait_until(self._finish_at(n_bytes))

    def _finish_at(self, n_bytes: int) -> float:
        """When work on so many bytes is done: after what was started before it, as on one stream."""
        self._idle_at = max(self._idle_at, time.perf_counter()) + self._seconds(n_bytes)
        return self._idle_at


def _wait_until(deadline: float) -> None:
    left = deadline - time.perf_counter()
    if left > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.perf_counter() < deadline:
        pass
