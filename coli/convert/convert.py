"""``convert``: a checkpoint becomes a container, in pieces of a few MB, and goes on after a kill."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import coli
from coli.container.layout import BLOCK_ROWS, FORMATS, MatrixLayout, SlabLayout, matrix_layout, slab_layout
from coli.container.manifest import Manifest
from coli.container.reader import STORED_FORMATS, experts_field
from coli.container.schema import EXPERT_SLABS, MATRIX, PLAIN, SHARED_SLAB
from coli.container.verify import usable_cpus
from coli.container.writer import Piece, TensorPlan, check_destination, write_container
from coli.convert.checkpoint import Checkpoint, SourceTensor
from coli.convert.gguf import open_checkpoint
from coli.convert.plan import Rows, Sources, common_kind, other_head, plan_sources
from coli.convert.quantize import Report, matrix_bytes, read_finite, slab_bytes
from coli.errors import RequestError
from coli.log import logger

BITS = (4, 8, 16)
SCALES = ("group", "row")

# Source bytes of one piece: enough to keep all cores busy, little enough that a few of them are all the memory used.
_PIECE_BYTES = 32 << 20

_DTYPES = {format: dtype for dtype, format in STORED_FORMATS.items()}


@dataclass(frozen=True)
class Options:
    """Number formats.  expert_scales : "group" or "row", for 4 bits."""

    trunk_bits: int = 8
    expert_bits: int = 4
    expert_scales: str = "group"

    @classmethod
    def checked(cls, trunk_bits: int, expert_bits: int, expert_scales: str | None) -> Options:
        """Refuse what cannot be: RequestError naming the flag."""
        for flag, bits in (("--trunk-bits", trunk_bits), ("--expert-bits", expert_bits)):
            if bits not in BITS:
                raise RequestError(f"{flag} is {bits}; expected one of {', '.join(map(str, BITS))}", flag)
        if (trunk_bits == 16) != (expert_bits == 16):
            raise RequestError(
                f"--trunk-bits {trunk_bits} --expert-bits {expert_bits}: 16 bits is the unquantised reference path "
                "and is for both or for neither",
                "--expert-bits",
            )
        if expert_scales is not None and expert_bits != 4:
            raise RequestError(
                f"--expert-scales {expert_scales}: only for --expert-bits 4, not {expert_bits}", "--expert-scales"
            )
        if expert_scales not in (None, *SCALES):
            raise RequestError(
                f"--expert-scales is {expert_scales}; expected one of {', '.join(SCALES)}", "--expert-scales"
            )
        return cls(trunk_bits, expert_bits, expert_scales or "group")

    def formats(self, sources: list[Sources]) -> tuple[str, str]:
        """Names of the trunk's and the experts' formats; at 16 bits, the types in which they are stored."""
        if self.trunk_bits == 16:
            trunk = [s for s in sources if s.entry.kind in (MATRIX, SHARED_SLAB)]
            return common_kind(trunk), common_kind(s for s in sources if s.entry.kind == EXPERT_SLABS)
        trunk_format = {4: "i4_group", 8: "i8_row"}[self.trunk_bits]
        return trunk_format, {4: f"i4_{self.expert_scales}", 8: "i8_row"}[self.expert_bits]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    source_bytes : the text model's weights in the checkpoint.   source_bytes_read : by this call; less after a resume.
    resumed_share : of the parts, done by an earlier, interrupted call.
    peak_rss_bytes : the most memory this process has held.
    """

    path: str
    trunk_format: str
    expert_format: str
    n_bytes: int
    source_bytes: int
    source_bytes_read: int
    resumed_share: float
    seconds: float
    peak_rss_bytes: int
    skipped: dict[str, dict[str, int]]
    report: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    trunk_bits: int = 8,
    expert_bits: int = 4,
    expert_scales: str | None = None,
) -> Conversion:
    """Convert a Hugging Face folder, or a GGUF file, into a container at `dst`.

    trunk_bits, expert_bits : 4 (groups of 128), 8 (rows), or 16 for both: as stored.
    expert_scales : "group" (the default) or "row", for 4-bit experts.

    Raises ModelError or RequestError: one line that names the file and the tensor, the field or the flag.  Nothing is
    ever found at `dst` but a whole and verified container; an interrupted call leaves ``DST.partial``, and the same
    call again goes on from there.
    """
    started = time.monotonic()
    options = Options.checked(trunk_bits, expert_bits, expert_scales)
    dst = check_destination(dst)
    with open_checkpoint(src, usable_cpus()) as checkpoint:
        sources, spare_head = plan_sources(checkpoint)
        log = logger("load")
        log.info("%s: %d tensors, %s bytes", checkpoint.path, len(checkpoint.tensors), f"{checkpoint.n_bytes:,}")
        for kind, left_out in checkpoint.skipped.items():
            if left_out["tensors"]:
                log.info("left out: %d %s tensors, %s bytes", left_out["tensors"], kind, f"{left_out['bytes']:,}")

        trunk_format, expert_format = options.formats(sources)
        if options.trunk_bits == 16 and checkpoint.config.tie_word_embeddings:
            sources = [s for s in sources if s.entry.name != "lm_head"]  # the head is the embedding, exactly
        report = Report()
        planned = _Plan(checkpoint, trunk_format, expert_format, report, spare_head)
        tensors = [planned.tensor(source) for source in sources]
        n_bytes = sum(piece.n_bytes for tensor in tensors for piece in tensor.pieces)
        manifest = Manifest(
            coli_version=coli.__version__,
            trunk_format=trunk_format,
            expert_format=expert_format,
            kv_dtype="float32" if options.trunk_bits == 16 else "float16",
            tied=checkpoint.config.tie_word_embeddings,
            source={
                "name": source_name(checkpoint.path),
                "tensors": len(checkpoint.tensors),
                "bytes": checkpoint.n_bytes,
            },
            skipped=checkpoint.skipped,
            matrices={
                s.entry.name: {"format": planned.matrix_format(s), "rows": s.entry.shape[0], "cols": s.entry.shape[1]}
                for s in sources
                if s.entry.kind == MATRIX
            },
            experts=experts_field(
                slab_layout(expert_format, checkpoint.config.hidden_size, checkpoint.config.moe_intermediate_size),
                checkpoint.config.num_experts,
            ),
            files={},
            report={},
        )
        # Written once and read back once; on a terminal only.
        with tqdm(
            total=2 * n_bytes, unit="B", unit_scale=True, desc="convert", leave=False, disable=not sys.stderr.isatty()
        ) as bar:
            written = write_container(
                dst,
                tensors,
                checkpoint.extra_files(),
                manifest,
                identity={"coli": coli.__version__, "options": asdict(options)} | checkpoint.fingerprint(),
                note=report.note,
                restore=report.restore,
                finish=lambda manifest: replace(manifest, report=report.to_dict()),
                progress=bar.update,
            )
        done = Conversion(
            path=str(written.path),
            trunk_format=trunk_format,
            expert_format=expert_format,
            n_bytes=written.n_bytes,
            source_bytes=checkpoint.n_bytes,
            source_bytes_read=checkpoint.bytes_read,
            resumed_share=written.resumed_pieces / max(1, written.n_pieces),
            seconds=time.monotonic() - started,
            peak_rss_bytes=peak_rss_bytes(),
            skipped=checkpoint.skipped,
            report=report.to_dict(),
        )
    for line in summary(done):
        log.info("%s", line)
    return done


def summary(done: Conversion) -> Iterator[str]:
    """A finished conversion in a few lines."""
    resumed = f", {100 * done.resumed_share:.0f} % of the parts were done before" if done.resumed_share else ""
    read, source = done.source_bytes_read, done.source_bytes
    yield (
        f"{done.path}: {done.n_bytes:,} bytes, trunk {done.trunk_format}, experts {done.expert_format}, "
        f"in {done.seconds:.1f} s; checked against a second reading"
    )
    yield (
        f"read {read:,} of {source:,} source bytes ({100 * read / max(1, source):.1f} %){resumed}; "
        f"peak memory {done.peak_rss_bytes / (1 << 20):,.0f} MiB"
    )
    for format, found in done.report.get("formats", {}).items():
        yield (
            f"{format}: rows lose {100 * found['mean_error']:.2f} % on average, {found['rows_above_bound']} of "
            f"{found['rows']} more than {100 * found['bound']:.0f} %"
        )
    for row in done.report.get("worst_rows", ())[:3]:
        yield f"worst: {row['tensor']} row {row['row']}, {100 * row['error']:.1f} %"


def peak_rss_bytes() -> int:
    """The most memory this process has held."""
    try:
        # Not getrusage: on Linux that also remembers what the parent held before it started this program.
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def source_name(path: Path) -> str:
    """The folder's or file's name; for a snapshot in the hub's cache, its repository's."""
    if not path.is_dir():
        return path.name
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


class _Plan:
    """Turns sources into tensors to write: formats, shapes, and the pieces that are made when their turn comes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        trunk_format: str,
        expert_format: str,
        report: Report,
        spare_head: SourceTensor | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._trunk_format = trunk_format
        self._expert_format = expert_format
        self._report = report
        self._spare_head = spare_head

    def matrix_format(self, sources: Sources) -> str:
        """The trunk's format, or at 16 bits the matrix's own type."""
        return self._trunk_format if FORMATS[self._trunk_format].is_blocks else sources.kind

    def tensor(self, sources: Sources) -> TensorPlan:
        entry = sources.entry
        if entry.kind == PLAIN:
            pieces = self._plain(sources)
            return TensorPlan(entry.name, entry.file, _DTYPES[sources.kind], entry.shape, tuple(pieces))
        if entry.kind == MATRIX:
            pieces = self._matrix(sources.rows, matrix_layout(self.matrix_format(sources), *entry.shape))
        else:
            *_, intermediate_size, hidden_size = entry.shape
            format = self._trunk_format if entry.kind == SHARED_SLAB else self._expert_format
            pieces = self._slabs(sources, slab_layout(format, hidden_size, intermediate_size))
        pieces = tuple(pieces)
        return TensorPlan(entry.name, entry.file, "U8", (sum(piece.n_bytes for piece in pieces),), pieces)

    def _plain(self, sources: Sources) -> Iterator[Piece]:
        rows, kind = sources.rows, sources.kind
        row_bytes = rows.cols * FORMATS[kind].bits // 8
        is_tied_embedding = sources.entry.name == "embed_tokens" and self._spare_head is not None
        for first, end in _spans(rows.n_rows, max(1, _PIECE_BYTES // row_bytes)):

            def make(first: int = first, end: int = end) -> np.ndarray:
                values = read_finite(self._checkpoint, rows.between(first, end), kind)
                if is_tied_embedding:
                    self._compare_head(values, first)
                return values

            yield Piece((end - first) * row_bytes, make)

    def _compare_head(self, embedding: np.ndarray, first_row: int) -> None:
        """A tied checkpoint may store its head too, but not another one."""
        head = self._spare_head
        assert head is not None
        values = np.empty_like(embedding)
        self._checkpoint.read_rows(head, first_row, values)
        if not np.array_equal(values.view(np.uint8), embedding.view(np.uint8)):
            raise other_head(head)

    def _matrix(self, rows: Rows, layout: MatrixLayout) -> Iterator[Piece]:
        at_once = max(1, _PIECE_BYTES // (rows.cols * 4) // BLOCK_ROWS) * BLOCK_ROWS
        for first, end in _spans(rows.n_rows, at_once):
            n_blocks = -(-(end - first) // BLOCK_ROWS) if FORMATS[layout.format].is_blocks else end - first
            n_bytes = n_blocks * layout.block_bytes
            if end == rows.n_rows:
                n_bytes += layout.total_bytes - layout.used_bytes

            def make(first: int = first, end: int = end, n_bytes: int = n_bytes) -> np.ndarray:
                return matrix_bytes(self._checkpoint, rows, layout, first, end, n_bytes, self._report)

            yield Piece(n_bytes, make)

    def _slabs(self, sources: Sources, layout: SlabLayout) -> Iterator[Piece]:
        slab_source_bytes = 3 * layout.hidden_size * layout.intermediate_size * 4
        for first, end in _spans(len(sources.slabs), max(1, _PIECE_BYTES // slab_source_bytes)):

            def make(first: int = first, end: int = end) -> np.ndarray:
                return slab_bytes(self._checkpoint, sources.slabs[first:end], layout, self._report)

            yield Piece((end - first) * layout.total_bytes, make)


def _spans(n: int, at_once: int) -> Iterator[tuple[int, int]]:
    for first in range(0, n, at_once):
        yield first, min(first + at_once, n)
