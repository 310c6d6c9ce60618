"""Which rows of which checkpoint tensors make which part of the container.

Matches the container's schema with a checkpoint's tensors: every tensor that is needed is there in its shape, and
every tensor that is there is needed; both otherwise an error that names it.  It reads no weight.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from coli.config import ModelConfig
from coli.container.schema import EXPERT_SLABS, MATRIX, PLAIN, SHARED_SLAB, Entry, entries
from coli.convert.checkpoint import Checkpoint, SourceTensor
from coli.errors import ModelError

# Container tensors that are several checkpoint tensors, one below the other.
_STACKED = {
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    "self_attn.qkv_proj": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
}
# Those whose name has no ".weight".
_PARAMETERS = ("linear_attn.A_log", "linear_attn.dt_bias")


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one source tensor."""

    source: SourceTensor
    first_row: int
    n_rows: int


@dataclass(frozen=True)
class Rows:
    """A matrix to be: runs, one below the other.  label : what a report calls it."""

    label: str
    runs: tuple[Run, ...]

    @property
    def n_rows(self) -> int:
        return sum(run.n_rows for run in self.runs)

    @property
    def cols(self) -> int:
        return self.runs[0].source.cols

    @property
    def kind(self) -> str:
        """The type that all runs share, or f32, which holds any of them exactly."""
        kinds = {run.source.value_kind for run in self.runs}
        return kinds.pop() if len(kinds) == 1 else "f32"

    def between(self, first: int, end: int) -> Rows:
        """Rows [first, end) of it."""
        kept, at = [], 0
        for run in self.runs:
            low, high = max(first - at, 0), min(end - at, run.n_rows)
            if low < high:
                kept.append(Run(run.source, run.first_row + low, high - low))
            at += run.n_rows
        return Rows(self.label, tuple(kept))

    def at(self, row: int) -> tuple[SourceTensor, int]:
        """The source tensor and its row that became a row of this matrix."""
        for run in self.runs:
            if row < run.n_rows:
                return run.source, run.first_row + row
            row -= run.n_rows
        raise IndexError(row)


@dataclass(frozen=True)
class Slab:
    """One expert to be."""

    gate: Rows
    up: Rows
    down: Rows

    @property
    def parts(self) -> tuple[Rows, Rows, Rows]:
        return self.gate, self.up, self.down


@dataclass(frozen=True)
class Sources:
    """What one tensor of the container is made from: `rows` for a matrix or a plain tensor, `slabs` for experts."""

    entry: Entry
    rows: Rows | None = None
    slabs: tuple[Slab, ...] = ()

    @property
    def kind(self) -> str:
        return common_kind((self,))


def common_kind(sources: Iterable[Sources]) -> str:
    """The type that all the sources' matrices share, or f32."""
    kinds = {
        part.kind
        for source in sources
        for part in ((source.rows,) if source.rows else (p for slab in source.slabs for p in slab.parts))
    }
    return kinds.pop() if len(kinds) == 1 else "f32"


def plan_sources(checkpoint: Checkpoint) -> tuple[list[Sources], SourceTensor | None]:
    """The sources of every container tensor, lm_head included, and a head that a tied checkpoint stores all the same.

    Raises ModelError naming the tensor that is missing, unknown or of another shape, and its file.
    """
    finder = _Finder(checkpoint)
    made = [_sources(entry, checkpoint.config, finder) for entry in entries(checkpoint.config)]
    spare_head = None
    if checkpoint.config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
        spare_head = finder.take("lm_head.weight", (checkpoint.config.vocab_size, checkpoint.config.hidden_size))
        if spare_head.kind != checkpoint.tensors["embed_tokens.weight"].kind:
            raise other_head(spare_head)
    finder.refuse_leftovers()
    return made, spare_head


def other_head(head: SourceTensor) -> ModelError:
    """A checkpoint that calls its head tied, and stores one that is not the embedding."""
    return ModelError(
        f"{head.path}: tensor {head.name} is not the embedding, though config.json says tie_word_embeddings; "
        "set it to false to use this head"
    )


class _Finder:
    """Hands out source tensors by name and shape, and remembers which."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.path
        self._tensors = checkpoint.tensors
        self._taken: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        found = self._tensors.get(name)
        if found is None:
            left = [other for other in self._tensors if other not in self._taken]
            near = difflib.get_close_matches(name, left, 1, 0.8)
            hint = f" (nearest: {self._tensors[near[0]].name})" if near else ""
            raise ModelError(f"{self._folder}: tensor {name} is missing{hint}")
        if found.shape != shape:
            raise ModelError(
                f"{found.path}: tensor {found.name} has shape {list(found.shape)}; config.json makes it {list(shape)}"
            )
        self._taken[name] = None
        return found

    def refuse_leftovers(self) -> None:
        for name, tensor in self._tensors.items():
            if name not in self._taken:
                near = difflib.get_close_matches(name, self._taken, 1, 0.8)
                hint = f" (nearest known: {near[0]})" if near else ""
                raise ModelError(f"{tensor.path}: tensor {tensor.name} is unknown: no part of the model owns it{hint}")


def _sources(entry: Entry, config: ModelConfig, finder: _Finder) -> Sources:
    if entry.kind == EXPERT_SLABS:
        return Sources(entry, slabs=_experts(entry, finder))
    if entry.kind == SHARED_SLAB:
        intermediate_size, hidden_size = entry.shape
        shapes = {"gate": entry.shape, "up": entry.shape, "down": (hidden_size, intermediate_size)}
        taken = {n: finder.take(f"{entry.name}.{n}_proj.weight", shape) for n, shape in shapes.items()}
        return Sources(entry, slabs=(Slab(**{n: _whole(f"{entry.name}.{n}_proj", (t,)) for n, t in taken.items()}),))
    assert entry.kind in (MATRIX, PLAIN)
    if entry.name == "lm_head" and config.tie_word_embeddings:
        return Sources(entry, _whole("lm_head", (finder.take("embed_tokens.weight", entry.shape),)))
    return Sources(entry, _whole(entry.name, [finder.take(*named) for named in _named(entry, config)]))


def _named(entry: Entry, config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint tensors that a matrix or plain tensor is stacked from."""
    inner = entry.name.split(".", 2)[2] if entry.name.startswith("layers.") else entry.name
    prefix = entry.name.removesuffix(inner)
    if inner in _STACKED:
        rows = {
            "linear_attn.in_proj_qkvz": (config.conv_channels, config.linear_value_dim),
            "linear_attn.in_proj_ba": (config.linear_num_value_heads,) * 2,
            "self_attn.qkv_proj": (2 * config.attention_dim, config.key_value_dim, config.key_value_dim),
        }[inner]
        return [(prefix + n, (r, config.hidden_size)) for n, r in zip(_STACKED[inner], rows, strict=True)]
    if inner == "linear_attn.conv1d":  # stored with the one input channel of a depthwise convolution
        channels, taps = entry.shape
        return [(f"{entry.name}.weight", (channels, 1, taps))]
    return [(entry.name if inner in _PARAMETERS else f"{entry.name}.weight", entry.shape)]


def _whole(label: str, tensors: Iterable[SourceTensor]) -> Rows:
    return Rows(label, tuple(Run(t, 0, t.n_bytes // t.row_bytes) for t in tensors))


def _experts(entry: Entry, finder: _Finder) -> tuple[Slab, ...]:
    """Experts fused into one tensor (gate rows above up rows), or a tensor each; down may be stored the other way."""
    count, intermediate_size, hidden_size = entry.shape
    label = entry.name

    def fused(name: str, rows: int, cols: int, single: str) -> SourceTensor | None:
        if f"{label}.{name}" not in finder and f"{label}.0.{single}_proj.weight" in finder:
            return None
        return finder.take(f"{label}.{name}", (count, rows, cols))

    gate_up = fused("gate_up_proj", 2 * intermediate_size, hidden_size, "gate")
    down = fused("down_proj", hidden_size, intermediate_size, "down")

    def part(expert: int, name: str, whole: SourceTensor | None, first_row: int, rows: int, cols: int) -> Rows:
        if whole is None:
            run = Run(finder.take(f"{label}.{expert}.{name}_proj.weight", (rows, cols)), 0, rows)
        else:
            run = Run(whole, first_row, rows)
        return Rows(f"{label}.{expert}.{name}_proj", (run,))

    wide, tall = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    return tuple(
        Slab(
            gate=part(e, "gate", gate_up, 2 * e * intermediate_size, *wide),
            up=part(e, "up", gate_up, (2 * e + 1) * intermediate_size, *wide),
            down=part(e, "down", down, e * hidden_size, *tall),
        )
        for e in range(count)
    )
