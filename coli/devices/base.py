"""What placement and the expert tier need of a device, and nothing else.

A device is an arena of bytes and the arithmetic on them.  One allocation holds resident matrices from the
bottom and expert slots of one fixed size from the top, so a swap is an overwrite and nothing fragments.
Uploaded bytes are the container's own (R16 headed blocks, or row-major), and what a device answers is what
the CPU would have answered, to the last bit (docs/numerics.md).

Implemented by ``fake`` and ``cuda``.  A device knows no model, no heat, no COLI_PLACE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Sequence

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

    index : the number that ``--devices`` and COLI_PLACE use.
    """

    name: str
    index: int
    uuid: str | None
    pci_bus_id: str | None

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
