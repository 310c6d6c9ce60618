"""Rows of one run on a card: which sequence each belongs to, and where its state lies.

A batch is consecutive rows of one or more sequences.  Its description travels in one list: the host writes it into
pinned memory, a kernel copies it, and every kernel between two projections reads it.  Nothing of it stands in a launch,
so a captured graph serves other positions and other sequences of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coli.container.layout import round_up

PART = np.dtype([("first_row", "<i4"), ("n_rows", "<i4"), ("position", "<i8")])  # struct Part of deltanet.cu
CHUNK = 64  # positions of a K/V block and of one sum (docs/numerics.md, section 4)
_ALIGN_BYTES = 16  # what the kernels' widest loads want


@dataclass(frozen=True)
class Batch:
    """Addresses in device memory, and the numbers that grids are made of.

    longest : rows of the longest part.
    chunks : K/V blocks of 64 positions that grids cover, at least those that any part has in use.
    parts_at : struct Part [n_parts], in the order of their rows.   part_of_at : int32 [n_rows].
    cos_at, sin_at : float32 (n_rows, half).
    """

    n_rows: int
    n_parts: int
    longest: int
    chunks: int
    parts_at: int
    part_of_at: int
    cos_at: int
    sin_at: int


@dataclass(frozen=True)
class BatchList:
    """Where the list of a batch has what: parts, part_of, cos, sin, then states (n_layers, n_parts, 2).

    half : rotary_half; 0 where no layer is attention.   n_layers : 0 where the states' addresses come from elsewhere.
    """

    n_rows: int
    n_parts: int
    half: int
    n_layers: int = 0

    def _offsets(self) -> tuple[int, ...]:
        turn_bytes = 4 * self.n_rows * self.half
        sizes = (
            PART.itemsize * self.n_parts, 4 * self.n_rows, turn_bytes, turn_bytes, 16 * self.n_layers * self.n_parts
        )  # fmt: skip
        at = [0]
        for n_bytes in sizes:
            at.append(at[-1] + round_up(n_bytes, _ALIGN_BYTES))
        return tuple(at)

    @property
    def n_bytes(self) -> int:
        """Bytes of the list, a multiple of 16."""
        return self._offsets()[-1]

    def batch(self, at: int, longest: int, chunks: int) -> Batch:
        """The batch whose list lies at a device address."""
        parts, part_of, cos, sin = self._offsets()[:4]
        return Batch(self.n_rows, self.n_parts, longest, chunks, at + parts, at + part_of, at + cos, at + sin)

    def states_at(self, at: int, layer: int) -> int:
        """Address of the states (n_parts, 2) of the layer-th layer, of a list at ``at``."""
        return at + self._offsets()[4] + 16 * layer * self.n_parts

    def put_rows(self, raw: np.ndarray, parts: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
        """Write everything but the states.

        raw : uint8, the list in pinned memory.   parts : PART (n_parts,), whose rows follow one another without gaps.
        cos, sin : float32 (positions, half), from position 0 on; not read where ``half`` is 0.
        """
        parts_at, part_of_at, cos_at, sin_at = self._offsets()[:4]
        raw[parts_at : parts_at + parts.nbytes].view(PART)[:] = parts
        part_of = raw[part_of_at : part_of_at + 4 * self.n_rows].view(np.int32)
        turns = [raw[at : at + 4 * self.n_rows * self.half].view(np.float32) for at in (cos_at, sin_at)]
        for i, (first, n, position) in enumerate(parts.tolist()):
            part_of[first : first + n] = i
            for turn, table in zip(turns, (cos, sin), strict=True):
                if self.half:
                    turn.reshape(self.n_rows, self.half)[first : first + n] = table[position : position + n]

    def put_states(self, raw: np.ndarray, states: np.ndarray) -> None:
        """Write the states: uint64 (n_layers, n_parts, 2), each pair as `MixerState.addresses` gives it."""
        at = self._offsets()[4]
        raw[at : at + states.nbytes].view(np.uint64)[:] = states.reshape(-1)


def parts_of(runs: Sequence[tuple[int, int]]) -> np.ndarray:
    """PART (n,) of runs of (rows, first position), one after the other."""
    parts, first = np.empty(len(runs), PART), 0
    for i, (n_rows, position) in enumerate(runs):
        parts[i] = first, n_rows, position
        first += n_rows
    return parts
