"""What placement and the expert tier need of a device, and nothing else.

A device is an arena of bytes and the arithmetic on them.  One allocation holds resident matrices from the
bottom and expert slots of one fixed size from the top, so a swap is an overwrite and nothing fragments.
Uploaded bytes are the container's own (R16 headed blocks, or row-major), and what a device answers is what
the CPU would have answered, to the last bit (docs/numerics.md).

Implemented by ``fake`` and ``cuda``.  A device knows no model, no heat, no COLI_PLACE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import numpy as np

from coli.errors import BackendError


class DeviceError(BackendError):
    """A device could not do what was asked.

    kind : "out of memory" (nothing was changed, the device goes on), "launch" (this call failed, the device may go
    on) or "lost" (the device is gone; every later call fails alike).
    """


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix to upload: the container's bytes and how to read them.

    format : a name of ``container.layout.FORMATS``.   data : uint8, n_blocks * block_bytes.
    """

    name: str
    format: str
    rows: int
    cols: int
    block_bytes: int
    n_blocks: int
    n_groups: int
    data: np.ndarray


@dataclass(frozen=True)
class SlabSpec:
    """Shape of the experts that go into slots: gate | up | down, each a matrix at its offset of the slab."""

    format: str
    hidden_size: int
    intermediate_size: int
    slab_bytes: int
    gate_offset: int
    up_offset: int
    down_offset: int


@dataclass(frozen=True)
class MixerSpec:
    """What lies between the two projections of a layer, in the words of ``engine.bind.geometry``.

    is_attention : else DeltaNet.   geometry : its numbers by name.
    vectors : float32 by name: q_norm and k_norm (1 + w); or conv (taps, channels), exp_a_log, dt_bias, dn_norm.
    ba : the row-major matrix of b and a, DeltaNet only.
    """

    is_attention: bool
    geometry: dict[str, Any]
    vectors: dict[str, np.ndarray]
    ba: MatrixSpec | None = None


class LayerState(Protocol):
    """One sequence's state of one layer, on a device: it moves on with every `LayerDevice.mix`.

    After a `mix` that failed its contents mean nothing.  A device that closes its arena closes its states too.
    """

    def reach(self, positions: int) -> None:
        """Make room for so many positions in all.  Raises DeviceError("out of memory") and changes nothing."""

    def copy(self) -> LayerState:
        """An independent state with the same contents.  Raises DeviceError and leaves nothing behind."""

    def close(self) -> None:
        """Give its memory back.  Safe to call twice."""


class Device(Protocol):
    """One card, or what stands in for one.  Calls come from one thread, except ``write_slot``.

    index : the number that ``--devices`` and COLI_PLACE use.   driver : its driver's version, as people are told it.
    slot_segment_bytes : `resize_slots` frees so many bytes at a time, counted from slot 0; 0 where a device cannot.
    """

    name: str
    index: int
    uuid: str | None
    pci_bus_id: str | None
    driver: str | None
    slot_segment_bytes: int

    def total_bytes(self) -> int:
        """Memory of the device."""

    def free_bytes(self) -> int:
        """Memory that an arena could take now.  Read again at upload time: others use the card too."""

    def open_arena(self, resident_bytes: int, slots: int, slab: SlabSpec | None) -> None:
        """Take one allocation for residents and slots.  Raises DeviceError("out of memory") and takes nothing."""

    def upload(self, matrix: MatrixSpec) -> Any:
        """Copy a matrix into the resident part; the handle is for ``matmul``.  256-byte aligned, in upload order."""

    def upload_slab(self, name: str, slab: SlabSpec, data: np.ndarray) -> Any:
        """Copy one slab (the shared expert of a layer) into the resident part; the handle is for ``ffn``."""

    def free(self, handle: Any) -> None:
        """Give a resident up.  Its bytes are used again only after the arena is opened anew."""

    def matmul(self, handle: Any, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """W x for each row: float32 (T, cols) -> float32 (T, rows of W), quantised as the contract says.

        out : where the answer goes, if given.  Rows of both may lie apart; the values of a row are contiguous.
        """

    def ffn(self, handle: Any, rows: np.ndarray) -> np.ndarray:
        """down(silu(gate x) * up x) of a resident slab: float32 (T, hidden) -> float32 (T, hidden)."""

    def begin_ffn(self, handle: Any, rows: np.ndarray) -> Any:
        """Start what `ffn` answers; `take` fetches it.  Runs beside a group of `issue`, not beside a `matmul`.

        rows : may be overwritten by the caller as soon as this returns.
        """

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        """Overwrite a slot with an expert's slab (uint8, slab_bytes).  May come from an uploader thread, never for a
        slot that an open ticket reads."""

    def clear_slot(self, slot: int) -> None:
        """The slot holds nobody any more."""

    def resize_slots(self, slots: int) -> int:
        """Have so many slots, the first ones; the bytes that this takes, negative where memory is given back.

        Slots that go hold nobody, nothing reads or writes them, and no batch is in a span.  Raises
        DeviceError("out of memory") and changes nothing.  Never called where ``slot_segment_bytes`` is 0.
        """

    def issue(self, layer: int, slots: Sequence[int], rows_of: Sequence[int], x: np.ndarray) -> Any:
        """Start the experts of a layer: contribution i is slot slots[i] applied to x[rows_of[i]].

        x : float32 (T, hidden), may be overwritten by the caller as soon as issue returns.
        """

    def take(self, ticket: Any) -> np.ndarray:
        """Wait for a ticket: float32 (contributions, hidden), unweighted, in issue's order; or what `ffn` answers."""

    def close(self) -> None:
        """Give everything back.  Safe to call twice, and on a lost device."""


class LayerDevice(Device, Protocol):
    """A device that also takes whole layers: in-projection, DeltaNet or attention, out-projection in one call.

    The layer's activations and its part of a sequence's state never leave the device.  One that does not offer this
    has no ``mixer``, and is asked for products one by one.
    """

    def mixer(self, spec: MixerSpec, into: Any, out: Any) -> Any:
        """A layer whose two projections are resident here, ready for `mix`.  Takes memory beside the arena."""

    def new_state(self, mixer: Any) -> LayerState:
        """A sequence's state of a layer before its first position; memory beside the arena, the caller closes it."""

    def mix(
        self,
        mixer: Any,
        state: LayerState,
        position: int,
        rows: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Consecutive positions of one sequence: float32 (T, hidden) after the layer's norm -> float32 (T, hidden).

        position : of the first row; the state has moved on behind the last.
        cos, sin : float32 (T, rotary_half) of these positions, for attention.   out : as in `matmul`.
        """


# ---- runs of whole layers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSpec:
    """What a whole layer needs beside its mixer and its experts.

    norm1, norm2 : float32 (hidden,), 1 + w, before the mixer and before the experts.
    router (experts, hidden), shared_gate (1, hidden) : row-major matrices, not quantised.
    """

    norm1: np.ndarray
    norm2: np.ndarray
    router: MatrixSpec
    shared_gate: MatrixSpec


class Asked(NamedTuple):
    """What a device wants of its host to finish a layer.  The arrays are the device's; valid until the answer.

    place : of the layer among the span's layers.
    xn : float32 (T, hidden), what the experts take (after the second norm).
    top_idx : int32 (T, top_k), the experts chosen, in rank order.
    external : uint8 (T, top_k), 1 where the device computes that rank itself; the others are asked for.
    shared : the shared expert is asked for too.
    """

    place: int
    xn: np.ndarray
    top_idx: np.ndarray
    external: np.ndarray
    shared: bool


class SpanPart(NamedTuple):
    """Consecutive rows of one sequence in a batch.

    position : of the first row.   states : one for each layer of the span, in order, with room for all of the rows.
    """

    first_row: int
    n_rows: int
    position: int
    states: Sequence[LayerState]


class SpanRun(Protocol):
    """A batch on its way through a span: ``ask`` and ``answer`` in turn, then ``finish``; or ``abandon``.

    A DeviceError anywhere ends the run, and the states of its batch mean nothing afterwards.

    finite : behind ``finish``, whether every logit is neither NaN nor infinite.
    """

    finite: bool

    def ask(self) -> Asked | None:
        """Wait for the next layer that lacks something; None once the device needs nobody any more."""

    def answer(self, expert_y: np.ndarray, slot_of: np.ndarray, shared_y: np.ndarray | None) -> None:
        """Give what was asked for; the device goes on.  The arrays are free again on return.

        expert_y : float32 (slots, >= hidden); rank j of row t stands in expert_y[slot_of[t, j]], unweighted.
        slot_of : int32 (T, top_k); only ranks that were asked for are looked at.
        shared_y : float32 (T, >= hidden), the shared expert's output; None where it was not asked for.
        """

    def finish(
        self, x_out: np.ndarray | None, logits: np.ndarray | None, soon: Callable[[], None] | None = None
    ) -> np.ndarray:
        """Wait for the end: the experts chosen, int32 (layers, T, top_k).

        x_out : float32 (T, hidden), where the residual stream goes.
        logits : float32 (rows wanted, >= vocabulary), where the logits go.
        soon : may be called a little before the end, for whoever takes long to wake up.
        """

    def abandon(self) -> None:
        """The host will not answer: let the device run to its end and wait for it.  Safe to call at any time."""


class SpanDevice(LayerDevice, Protocol):
    """A device that also takes runs of whole layers: from residual stream to residual stream, or to the logits.

    Norms, routing, the experts that it has and the sum over ranks stay on it.  What it lacks (experts in no slot, a
    shared expert that is not resident) it asks of its host, layer by layer, while it computes the rest.
    """

    def span_bytes(self, geometry: dict[str, Any], n_layers: int) -> int:
        """Bytes that spans over so many layers take beside the arena: vectors, routers, scratch, at most.

        geometry : of ``engine.bind.geometry``.
        """

    def layer(self, index: int, mixer: Any, shared: Any | None, spec: LayerSpec) -> Any:
        """A whole layer, ready for `span`.  Takes memory beside the arena.

        index : the layer's number in the model, as in `seat`.   mixer : of `LayerDevice.mixer`.
        shared : the shared expert's resident slab; None where the host computes it.
        """

    def head(self, norm: np.ndarray, matrix: Any) -> Any:
        """The final norm, float32 (hidden,), 1 + w, and the resident lm_head, ready for `span`."""

    def span(self, layers: Sequence[Any], head: Any | None = None) -> Any:
        """Consecutive layers, and the head behind the last where it is given.  ``max_rows`` of it: rows of a batch."""

    def seat(self, layer: int, expert: int, slot: int | None) -> None:
        """From the next `begin_span` on this expert is in this slot, or in none.  Never while a batch is in a span."""

    def begin_span(
        self,
        span: Any,
        parts: Sequence[SpanPart],
        x: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        logit_rows: Sequence[int] = (),
    ) -> SpanRun:
        """Start a batch; the states have moved on behind its last rows when it has finished.

        x : float32 (T, hidden), T at most ``span.max_rows``; rows may lie apart; free again on return.
        cos, sin : float32 (positions, rotary_half), of all positions from 0 on.
        logit_rows : the rows whose logits are wanted, ascending; only with a head.
        """


# ---- experts in passing ----------------------------------------------------------------------------------


class StreamRun(Protocol):
    """Experts on their way through a device.   seconds : behind `wait`, from the beginning to the last answer."""

    seconds: float

    def wait(self) -> None:
        """Until the device has computed all of them; then `SpanRun.answer` takes their ranks as answered.

        Raises DeviceError; nothing is under way then, and they are asked for as before.
        """


class StreamDevice(SpanDevice, Protocol):
    """A device that also computes experts which it does not hold, while its host answers a span.

    Their bytes come with the call, are used once and forgotten.
    """

    def open_stream(self) -> None:
        """Get ready: memory beside the arena, threads.  No batch is in a span.  Does nothing the second time.

        Raises DeviceError and takes nothing.
        """

    def begin_stream(
        self, run: SpanRun, asked: Asked, experts: np.ndarray, slabs: Sequence[np.ndarray]
    ) -> StreamRun:
        """Start experts of the layer that ``run`` asks about; `StreamRun.wait` must follow before any other call of it.

        experts : int (n,), some of those asked for.   slabs : of each, uint8, read until `wait` has returned.
        ``asked.external`` becomes 1 in all of their ranks, and 0 again where this or `wait` fails.
        """
