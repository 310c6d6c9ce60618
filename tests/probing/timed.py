"""A card of numbers alone: it computes nothing, and its calls take what it is told, on a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from coli.devices.base import Asked, DeviceError


class TimedCard:
    """A span device whose every call moves ``now`` on.

    matrix, experts : (GB/s, latency in us).   deltanet_us, attention_us, hop_us, ask_us, kv_gb_s, head_gb_s : as in
    SpanSpeed.
    """

    pci_bus_id = None
    driver = None
    index = 0

    def __init__(
        self, free_bytes: int = 24 << 20, *, matrix: tuple[float, float] = (400.0, 9.0),
        experts: tuple[float, float] = (250.0, 14.0), deltanet_us: float = 30.0, attention_us: float = 45.0,
        hop_us: float = 11.0, ask_us: float = 16.0, kv_gb_s: float = 80.0, head_gb_s: float = 300.0,
        uuid: str | None = None, spans: bool = True,
        name: str = "timed",
    ) -> None:  # fmt: skip
        self.name, self.uuid = name, uuid
        self.now = 0.0
        self.closed = False
        self._free_bytes = free_bytes
        self._matrix, self._experts = matrix, experts
        self._layer_us = {False: deltanet_us, True: attention_us}
        self._hop_us, self._ask_us, self._kv_gb_s, self._head_gb_s = hop_us, ask_us, kv_gb_s, head_gb_s
        self._seats: dict[tuple[int, int], int] = {}
        if not spans:
            self.span = None

    def _take(self, us: float) -> None:
        self.now += us * 1e-6

    def _read_us(self, speed: tuple[float, float], n_bytes: float) -> float:
        return n_bytes / speed[0] / 1e3

    def free_bytes(self) -> int:
        return self._free_bytes

    def open_arena(self, resident_bytes: int, slots: int, slab: Any) -> None:
        if resident_bytes + slots * slab.slab_bytes > self._free_bytes:
            raise DeviceError(f"{self.name}: too large", "out of memory")
        self._left, self._slab = resident_bytes, slab

    def upload(self, matrix: Any) -> Any:
        return self._place(matrix.n_blocks * matrix.block_bytes, rows=matrix.rows, cols=matrix.cols)

    def upload_slab(self, name: str, slab: Any, data: np.ndarray) -> Any:
        return self._place(slab.slab_bytes)

    def _place(self, n_bytes: int, **more: int) -> Any:
        self._left -= -(-n_bytes // 256) * 256
        assert self._left >= 0, "the arena was opened too small"
        return SimpleNamespace(n_bytes=n_bytes, **more)

    def write_slot(self, slot: int, data: np.ndarray) -> None:
        assert data.size == self._slab.slab_bytes

    def matmul(self, handle: Any, rows: np.ndarray, out: np.ndarray | None = None) -> None:
        assert rows.shape == (1, handle.cols)
        self._take(self._matrix[1] + self._read_us(self._matrix, handle.n_bytes))

    def issue(self, layer: int, slots: Any, rows_of: Any, x: np.ndarray) -> Any:
        return len(set(slots)), np.zeros((len(slots), x.shape[1]), np.float32)

    def take(self, ticket: Any) -> np.ndarray:
        n, answer = ticket
        self._take(self._experts[1] + self._read_us(self._experts, n * self._slab.slab_bytes))
        return answer

    def mixer(self, spec: Any, into: Any, out: Any) -> Any:
        small = 0 if spec.ba is None else spec.ba.data.nbytes
        return SimpleNamespace(spec=spec, n_bytes=into.n_bytes + out.n_bytes, small=small)

    def new_state(self, mixer: Any) -> Any:
        return SimpleNamespace(reach=lambda positions: None, close=lambda: None)

    def layer(self, index: int, mixer: Any, shared: Any, spec: Any) -> Any:
        return SimpleNamespace(index=index, mixer=mixer, shared=shared, spec=spec)

    def seat(self, layer: int, expert: int, slot: int | None) -> None:
        if slot is None:
            del self._seats[layer, expert]
        else:
            self._seats[layer, expert] = slot

    def head(self, norm: np.ndarray, matrix: Any) -> Any:
        return matrix

    def span(self, layers: Any, head: Any = None) -> Any:
        return SimpleNamespace(layers=list(layers), head=head, max_rows=64)

    def begin_span(self, span: Any, parts: Any, x: np.ndarray, cos: Any, sin: Any, logit_rows: Any = ()) -> Any:
        (part,) = parts
        assert not len(logit_rows) or span.head is not None
        return _Run(self, span, part.position, len(x), len(logit_rows))

    def close(self) -> None:
        self.closed = True


class _Run:
    def __init__(self, card: TimedCard, span: Any, position: int, rows: int, n_logits: int) -> None:
        self.card, self.layers, self.position, self.rows = card, span.layers, position, rows
        self.head, self.n_logits = span.head, n_logits
        self.at = 0
        self.answered = False
        card._take(card._hop_us)

    def ask(self) -> Asked | None:
        card = self.card
        while self.at < len(self.layers):
            layer = self.layers[self.at]
            numbers = layer.mixer.spec.geometry
            seated = [(layer.index, e) in card._seats for e in range(numbers["n_experts"])]
            us = card._layer_us[layer.mixer.spec.is_attention]
            us += card._read_us(card._matrix, layer.mixer.n_bytes + self._beside_bytes(layer))
            experts_us = card._read_us(card._matrix, layer.shared.n_bytes)
            experts_us += card._read_us(card._experts, sum(seated) * card._slab.slab_bytes)
            if layer.mixer.spec.is_attention:
                bytes_of_one = 2 * 2 * numbers["n_kv_heads"] * numbers["head_dim"]
                us += self.position * bytes_of_one / card._kv_gb_s / 1e3
            card._take(us)
            self.at += 1
            card._take(experts_us if all(seated) else max(experts_us, card._ask_us))
            if not all(seated):
                chosen = np.tile(np.arange(numbers["top_k"], dtype=np.int32), (self.rows, 1))
                external = np.array(seated, np.uint8)[chosen]
                return Asked(
                    self.at - 1, np.zeros((self.rows, numbers["hidden_size"]), np.float32), chosen, external, False
                )
        return None

    def _beside_bytes(self, layer: Any) -> int:
        """Small matrices and state: what a prediction counts for a layer of the samples."""
        return self.card.beside_bytes(layer)

    def answer(self, expert_y: np.ndarray, slot_of: np.ndarray, shared_y: Any) -> None:
        assert slot_of.dtype == np.int32 and shared_y is None

    def finish(self, x_out: Any, logits: Any, soon: Any = None) -> np.ndarray:
        assert self.at == len(self.layers) and (logits is None) == (self.n_logits == 0)
        if logits is not None:
            assert logits.shape == (1, self.head.rows)
            self.card._take(self.head.n_bytes / self.card._head_gb_s / 1e3)
        top_k = self.layers[0].mixer.spec.geometry["top_k"]
        return np.tile(np.arange(top_k, dtype=np.int32), (len(self.layers), self.rows, 1))

    def abandon(self) -> None:
        pass
