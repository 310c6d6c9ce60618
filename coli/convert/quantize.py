"""Rows of a checkpoint to the bytes of a container, and the report of what that cost.

The arithmetic is ``_core.quantize``'s; this module reads the rows, lays the parts out and names what is wrong.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from coli._core import quantize as core
from coli.container.layout import FORMATS, MatrixLayout, SlabLayout
from coli.convert.checkpoint import Checkpoint
from coli.convert.plan import Rows, Slab
from coli.errors import ModelError

# A row whose relative error (see Report) is above these is counted in the report.  Gaussian rows lose 0.9 % (int8) and
# 10 % (int4 groups), rows of Student's t(3) 2 and 14 %; a row that one outlier has erased loses nearly everything.
_BOUNDS = {8: 0.05, 4: 0.25}
_WORST = 20


class Report:
    """Relative errors by row: the worst rows, and how many are beyond the bound of their format.

    The error of a row is sum|w - w'| / sum|w|, where the second sum leaves out the largest weight under each scale.
    With it, or with squares, the outlier that rounded a row to zero would also hide that: it is nearly all of the
    row's magnitude and is itself kept well.
    """

    def __init__(self) -> None:
        self._worst: list[tuple[float, str, int]] = []  # a heap, the least of the worst on top
        self._formats: dict[str, dict[str, Any]] = {}

    def add(self, label: str, format: str, first_row: int, errors: np.ndarray) -> None:
        """Take note of consecutive rows of one matrix.  errors : float32 (rows,)."""
        bound = _BOUNDS[FORMATS[format].bits]
        of_format = self._formats.setdefault(
            format, {"bound": bound, "rows": 0, "rows_above_bound": 0, "error_sum": 0.0}
        )
        of_format["rows"] += len(errors)
        of_format["rows_above_bound"] += int((errors > bound).sum())
        of_format["error_sum"] += float(errors.sum(dtype=np.float64))
        floor = self._worst[0][0] if len(self._worst) == _WORST else 0.0
        candidates = np.flatnonzero(errors > floor)
        if len(candidates) > _WORST:
            candidates = candidates[np.argsort(-errors[candidates], kind="stable")[:_WORST]]
        for row in candidates:
            item = (float(errors[row]), label, first_row + int(row))
            (heapq.heappush if len(self._worst) < _WORST else heapq.heappushpop)(self._worst, item)

    def to_dict(self) -> dict[str, Any]:
        """{"formats": {format: {"bound", "rows", "rows_above_bound", "mean_error"}}, "worst_rows": [worst first]}."""
        formats = {
            name: {key: of_format[key] for key in ("bound", "rows", "rows_above_bound")}
            | {"mean_error": of_format["error_sum"] / max(1, of_format["rows"])}
            for name, of_format in sorted(self._formats.items())
        }
        worst = sorted(self._worst, key=lambda item: (-item[0], item[1], item[2]))
        return {
            "formats": formats,
            "worst_rows": [{"tensor": label, "row": row, "error": round(error, 6)} for error, label, row in worst],
        }

    def note(self) -> dict[str, Any]:
        """The state, as JSON: what ``restore`` takes after an interruption."""
        return {"worst": self._worst, "formats": self._formats}

    def restore(self, note: dict[str, Any] | None) -> None:
        """Go on from a note; None is an empty one."""
        if note is not None:
            self._worst = [(error, label, row) for error, label, row in note["worst"]]
            self._formats = note["formats"]


def read(checkpoint: Checkpoint, rows: Rows, kind: str) -> np.ndarray:
    """The rows as (n_rows, cols): float32 for kind f32, else uint16 holding the stored bits of bf16 or f16."""
    values = np.empty((rows.n_rows, rows.cols), np.float32 if kind == "f32" else np.uint16)
    at = 0
    for run in rows.runs:
        checkpoint.read_rows(run.source, run.first_row, values[at : at + run.n_rows])
        at += run.n_rows
    return values


def read_finite(checkpoint: Checkpoint, rows: Rows, kind: str) -> np.ndarray:
    """The same, refused where a value is NaN or infinite: ModelError naming the file, the tensor and the row."""
    values = read(checkpoint, rows, kind)
    bad = core.first_nonfinite(values, FORMATS[kind].code, checkpoint.n_threads)
    if bad >= 0:
        raise _not_finite(rows, bad // rows.cols)
    return values


def matrix_bytes(
    checkpoint: Checkpoint, rows: Rows, layout: MatrixLayout, first_row: int, end_row: int, n_bytes: int, report: Report
) -> np.ndarray:
    """Rows [first_row, end_row) of a matrix as `n_bytes` of the layout (whole blocks, then padding)."""
    part, out = rows.between(first_row, end_row), np.zeros(n_bytes, np.uint8)
    _fill(checkpoint, [(part, out)], layout.format, report, first_row)
    return out


def slab_bytes(checkpoint: Checkpoint, slabs: Sequence[Slab], layout: SlabLayout, report: Report) -> np.ndarray:
    """Experts, one slab after the other."""
    out = np.zeros((len(slabs), layout.total_bytes), np.uint8)
    parts = []
    for slab, place in zip(slabs, out, strict=True):
        for rows, start, part in zip(
            slab.parts,
            (layout.gate_offset, layout.up_offset, layout.down_offset),
            (layout.gate, layout.up, layout.down),
            strict=True,
        ):
            parts.append((rows, place[start : start + part.used_bytes]))
    _fill(checkpoint, parts, layout.format, report, 0)
    return out.reshape(-1)


def _fill(
    checkpoint: Checkpoint, parts: list[tuple[Rows, np.ndarray]], format: str, report: Report, first_row: int
) -> None:
    """Make matrices of one format, all in one parallel call (experts are small), and report their rows."""
    if not FORMATS[format].is_blocks:
        for rows, out in parts:
            values = read_finite(checkpoint, rows, format).view(np.uint8).reshape(-1)
            out[: len(values)] = values
        return
    kinds = {rows.kind for rows, _ in parts}
    kind = kinds.pop() if len(kinds) == 1 else "f32"
    jobs = [(read(checkpoint, rows, kind), out, np.empty(rows.n_rows, np.float32)) for rows, out in parts]
    bad = core.quantize(jobs, FORMATS[kind].code, FORMATS[format].code, checkpoint.n_threads)
    if bad is not None:
        raise _not_finite(parts[bad[0]][0], bad[1])
    for (rows, _), (_, _, errors) in zip(parts, jobs, strict=True):
        report.add(rows.label, format, first_row, errors)


def _not_finite(rows: Rows, row: int) -> ModelError:
    source, at = rows.at(row)
    return ModelError(f"{source.path}: tensor {source.name} holds a value that is NaN or infinite, in row {at}")
