"""Runs of whole layers on the fake device: between two residual streams, step by step, with the CPU's kernels.

Slow and plain, and independent of the step in C that it is compared with.  It keeps a card's manners: a batch reads the
seats as they were when it began, computes as late as it may, waits for its host where it lacks something, and spoils
its states whenever it does not come to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from coli._core import kernels
from coli.devices import fakemath
from coli.devices.base import Asked, DeviceError, LayerSpec, MatrixSpec, SpanPart
from coli.devices.fakemath import part_of, require

if TYPE_CHECKING:
    from coli.devices.fake import FakeDevice


@dataclass(frozen=True, eq=False)
class Layer:
    """The handle of a whole layer: its norms and routers are copies, all else is read from the arena."""

    index: int
    mixer: Any
    shared: Any | None
    spec: LayerSpec

    @classmethod
    def of(cls, index: int, mixer: Any, shared: Any | None, spec: LayerSpec) -> Layer:
        """With copies of the spec's arrays."""
        norms = [np.array(norm, np.float32) for norm in (spec.norm1, spec.norm2)]
        matrices = [replace(matrix, data=matrix.data.copy()) for matrix in (spec.router, spec.shared_gate)]
        return cls(index, mixer, shared, LayerSpec(*norms, *matrices))

    @property
    def n_bytes(self) -> int:
        """Bytes of the copies."""
        spec = self.spec
        return spec.norm1.nbytes + spec.norm2.nbytes + spec.router.data.size + spec.shared_gate.data.size


@dataclass(frozen=True, eq=False)
class Head:
    """The final norm and the resident lm_head."""

    norm: np.ndarray
    matrix: Any


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive layers, with the head or without.   max_rows : of one batch."""

    layers: tuple[Layer, ...]
    head: Head | None
    max_rows: int


class _Routed:
    """A layer whose experts were chosen, until their contributions are all there.

    weights, y : float32 (T, top_k), (T, top_k, hidden).   gate : float32 (T,).   shared_y : None until it is there.
    """

    def __init__(self, xn: np.ndarray, top_idx: np.ndarray, weights: np.ndarray, gate: np.ndarray) -> None:
        self.xn = xn
        self.top_idx = top_idx
        self.weights = weights
        self.gate = gate
        self.external = np.zeros(top_idx.shape, np.uint8)
        self.y = np.full((*top_idx.shape, xn.shape[1]), np.nan, np.float32)
        self.shared_y: np.ndarray | None = None


class Run:
    """A batch in a span.   slots : those that it reads."""

    def __init__(
        self,
        device: FakeDevice,
        span: Span,
        parts: Sequence[SpanPart],
        x: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        logit_rows: Sequence[int],
    ) -> None:
        self._device = device
        self._span = span
        self._eps = span.layers[0].mixer.spec.geometry["eps"]
        self._top_k = span.layers[0].mixer.spec.geometry["top_k"]
        fakemath.check_rows(x, span.layers[0].spec.norm1.size, "x of a span")
        require(len(x) <= span.max_rows, f"{len(x)} rows in a span that takes {span.max_rows}")
        ends = [part.first_row + part.n_rows for part in parts]
        require(
            [0, *ends] == [*(part.first_row for part in parts), len(x)], f"parts that end at {ends} of {len(x)} rows"
        )
        rows = list(logit_rows)
        require(not rows or span.head is not None, "logits of a span without a head")
        require(rows == sorted(set(rows)) and all(0 <= row < len(x) for row in rows), f"logits of the rows {rows}")
        for layer in span.layers:
            device._check_layer(layer)
        self._x = np.array(x, np.float32)
        self._parts = list(parts)
        self._logit_rows = rows
        self._turns = [  # of each part: its rows of x, and of cos and sin
            (slice(part.first_row, end), slice(part.position, part.position + part.n_rows))
            for part, end in zip(parts, ends, strict=True)
        ]
        self._cos, self._sin = cos, sin
        self._cores = [self._begin_part(part) for part in parts]
        numbers = {layer.index for layer in span.layers}
        self._seats = {key: slot for key, slot in device.seats.items() if key[0] in numbers}
        self.slots = tuple(self._seats.values())
        self._top_idx = np.empty((len(span.layers), len(x), self._top_k), np.int32)
        self.finite = True
        self._at = 0  # layers that are done
        self._asking: _Routed | None = None  # the layer that the host was asked about
        self._over = False

    def _begin_part(self, part: SpanPart) -> list[Any]:
        """The cores of a part's states; until the end has come these are a failure's."""
        layers = self._span.layers
        require(len(part.states) == len(layers), f"{len(part.states)} states for {len(layers)} layers")
        cores = []
        for layer, state in zip(layers, part.states, strict=True):
            self._device._check_state(layer.mixer, state, part.position)
            room = state.core.bytes_for(part.position + part.n_rows) <= state.n_bytes
            require(room, f"layer {layer.index}: a state without room for position {part.position + part.n_rows - 1}")
            cores.append(state.core)
            state.core = None
        return cores

    # ---- host and device in turn -----------------------------------------------------------------------

    def ask(self) -> Asked | None:
        """Compute up to the next layer that lacks something; None where none does."""
        with self._operation("ask", self._at):
            require(self._asking is None, "asked again before the answer")
            while self._at < len(self._span.layers):
                routed = self._choose(self._span.layers[self._at])
                if routed.external.all() and routed.shared_y is not None:
                    self._combine(routed)
                    continue
                self._asking = routed
                asked = self._at, routed.xn, routed.top_idx, routed.external, routed.shared_y is None
                return Asked(*(one.copy() if isinstance(one, np.ndarray) else one for one in asked))
            return None

    def answer(self, expert_y: np.ndarray, slot_of: np.ndarray, shared_y: np.ndarray | None) -> None:
        """Take what the host computed."""
        routed, layer = self._asking, self._span.layers[min(self._at, len(self._span.layers) - 1)]
        require(routed is not None, "an answer that nobody asked for")
        missing = routed.external == 0
        with self._operation("answer", layer.index, int(missing.sum()), routed.shared_y is None):
            require((shared_y is None) == (routed.shared_y is not None), f"layer {layer.index}: shared_y is {shared_y}")
            hidden = routed.xn.shape[1]
            require(slot_of.dtype == np.int32 and slot_of.shape == missing.shape, f"slot_of is {slot_of.shape}")
            require(expert_y.dtype == np.float32 and expert_y.shape[1] >= hidden, f"expert_y is {expert_y.shape}")
            routed.y[missing] = expert_y[slot_of[missing], :hidden]
            if shared_y is not None:
                require(shared_y.dtype == np.float32 and len(shared_y) == len(missing), f"shared_y is {shared_y.shape}")
                routed.shared_y = np.array(shared_y[:, :hidden])
            self._asking = None
            self._combine(routed)

    def finish(
        self, x_out: np.ndarray | None, logits: np.ndarray | None, soon: Callable[[], None] | None = None
    ) -> np.ndarray:
        """Compute the logits, hand everything out, and let the states stand behind the batch."""
        if soon is not None:
            soon()
        with self._operation("finish", len(self._logit_rows)):
            require(self._at == len(self._span.layers), f"finished after {self._at} of {len(self._span.layers)} layers")
            require((logits is None) == (not self._logit_rows), "logits and the rows that were asked for")
            if logits is not None:
                y = self._logits()
                fits = logits.dtype == np.float32 and len(logits) == len(y) and logits.shape[1] >= y.shape[1]
                require(fits, f"logits {y.shape} into {logits.dtype} {logits.shape}")
                logits[:, : y.shape[1]] = y
                self.finite = bool(np.isfinite(y).all())
            if x_out is not None:
                fakemath.answer(self._x, x_out, "x of a span")
        for part, cores in zip(self._parts, self._cores, strict=True):
            for state, core in zip(part.states, cores, strict=True):
                state.core = core
                state.position += part.n_rows
        self._end()
        return self._top_idx

    def abandon(self) -> None:
        """Let it be; the states are spoiled."""
        self._device.calls.append(("abandon",))
        self._end()

    @contextmanager
    def _operation(self, name: str, *details: Any) -> Iterator[None]:
        """One that may fail; a failure ends the run."""
        require(not self._over, f"{name} in a run that is over")
        try:
            self._device._begin(name, *details)
            yield
        except DeviceError:
            self._end()
            raise

    def _end(self) -> None:
        self._over = True
        self._device._end_span(self)

    # ---- arithmetic ---------------------------------------------------------------------------------------

    def _choose(self, layer: Layer) -> _Routed:
        """A layer up to its experts, those that are here with them."""
        device, spec = self._device, layer.spec
        moves = [
            (cores[self._at], part.position, rows, self._cos[turns], self._sin[turns])
            for part, cores, (rows, turns) in zip(self._parts, self._cores, self._turns, strict=True)
        ]
        y = device._mixed(layer.mixer, self._normed(spec.norm1), moves)
        self._x = kernels.add(self._x, np.ascontiguousarray(y))
        xn = self._normed(spec.norm2)
        chosen = [kernels.router(row, self._top_k) for row in _product(spec.router, xn)]
        gate = kernels.sigmoid(_product(spec.shared_gate, xn))[:, 0]
        routed = _Routed(xn, np.stack([c[0] for c in chosen]), np.stack([c[1] for c in chosen]), gate)
        self._top_idx[self._at] = routed.top_idx
        n_bytes = layer.mixer.into.n_bytes + layer.mixer.out.n_bytes
        for expert in np.unique(routed.top_idx).tolist():
            slot = self._seats.get((layer.index, expert))
            if slot is None:
                continue
            where = routed.top_idx == expert
            x = np.ascontiguousarray(xn[where.nonzero()[0]])
            slab = device._slots.slab
            routed.y[where] = fakemath.ffn(device._slots.bytes_of(slot), fakemath.slab_parts(slab), x)
            routed.external[where] = 1
            n_bytes += slab.slab_bytes
        if layer.shared is not None:
            routed.shared_y = fakemath.ffn(device._bytes_of(layer.shared, 3), layer.shared.parts, xn)
            n_bytes += layer.shared.n_bytes
        device._wait(n_bytes)
        return routed

    def _combine(self, routed: _Routed) -> None:
        """The sum of a layer, in rank order; on to the next."""
        for t in range(len(self._x)):
            out = None
            for j in range(self._top_k):
                out = kernels.axpy(routed.weights[t, j], routed.y[t, j], out)
            out = kernels.axpy(routed.gate[t], routed.shared_y[t], out)
            self._x[t] = kernels.add(self._x[t], out)
        self._at += 1

    def _logits(self) -> np.ndarray:
        head = self._span.head
        x = np.stack([kernels.rmsnorm(self._x[row], head.norm, self._eps) for row in self._logit_rows])
        self._device._wait(head.matrix.n_bytes)
        return fakemath.matmul(self._device._bytes_of(head.matrix, 1), head.matrix.parts[0], x)

    def _normed(self, weights: np.ndarray) -> np.ndarray:
        return np.stack([kernels.rmsnorm(row, weights, self._eps) for row in self._x])


def _product(matrix: MatrixSpec, x: np.ndarray) -> np.ndarray:
    return fakemath.matmul(matrix.data, part_of(matrix), x)
