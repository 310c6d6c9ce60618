"""Who computes what, decided once at load: a token's operations as a list of steps.

With nothing placed the list is one step: all operations of all layers in one region of the CPU team.  Each
matrix that a device holds cuts it: the CPU runs up to the operation, the device answers it, the CPU goes on.
A layer whose matrices are all on one device is one step there, and its part of a sequence's state is there too; a run
of such layers may be one step, with the head if that is there too (``span``).

A step whose device fails is answered by the CPU from the container's own bytes, then and from then on; the
contract makes that the same bits, so a failure costs time and nothing else.  Where states were lost with it the
batch is given up (`StatesLost`), and whoever runs it computes them again and begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Protocol, Sequence

import numpy as np

from coli._core import step
from coli.devices.base import Device, DeviceError, LayerDevice, LayerState
from coli.engine.experts import ExpertsOn
from coli.engine.span import PlacedSpan, SpanOn
from coli.engine.states import Held, StatesLost
from coli.log import logger

if TYPE_CHECKING:
    from coli.config import ModelConfig

_OP = {name: i for i, name in enumerate(step.OPS)}


class Tier(Protocol):
    """What the program asks of the expert tier (``coli.tier.expert_tier`` says more)."""

    def holds(self, layer: int) -> bool: ...
    def slabs(self, layer: int) -> np.ndarray: ...
    def lacks(self, device: Device, first: int, last: int) -> bool: ...
    def note(self, layer: int, top_idx: np.ndarray, decoding: bool = ...) -> None: ...
    def issue(
        self,
        layer: int,
        top_idx: np.ndarray,
        x: np.ndarray,
        external: np.ndarray,
        skip: Device | None = ...,
        taken: np.ndarray | None = ...,
    ) -> Sequence[Any]: ...
    def take(self, group: Any) -> np.ndarray | None: ...
    def has_others(self, device: Device) -> bool: ...
    def took(self, device: Device, first_layer: int, top_idx: np.ndarray, *, in_passing: int = ...) -> None: ...
    def quarantine(self, lost: Device, reason: str = ...) -> None: ...
    def drain(self) -> None: ...
    def between_tokens(self) -> None: ...
    def stepped(self, seconds: float) -> None: ...
    def after_prompt(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one sequence in a batch.   position : of the first.   held : its states on devices."""

    first_row: int
    n_rows: int
    position: int
    held: Held


class Views:
    """The step's buffers as arrays without padding, taken once for batches alike: every line between steps costs."""

    __slots__ = ("of", "x", "xn", "proj", "o", "y", "top_idx", "external", "slot_of", "expert_y", "shared_y")

    def __init__(self, runner: step.Runner, hidden_size: int) -> None:
        def take(name: str) -> np.ndarray:
            return np.asarray(runner.buffer(name))

        self.x = take("x")[:, :hidden_size]
        self.xn = take("xn")[:, :hidden_size]
        self.y = take("y")[:, :hidden_size]
        self.proj, self.o = take("proj"), take("o")
        self.top_idx, self.external, self.slot_of = take("top_idx"), take("external"), take("slot_of")  # (T, k)
        self.expert_y = take("expert_y")[:, :hidden_size]
        self.shared_y = take("shared_y")[:, :hidden_size]
        self.of = runner, runner.generation, len(self.x)

    def fit(self, runner: step.Runner, n_rows: int) -> bool:
        """Whether they are the buffers of this runner's batch of so many rows."""
        return self.of == (runner, runner.generation, n_rows)


class CpuRun:
    """Operations [first, last) on the CPU team."""

    __slots__ = ("first", "last")

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last

    def run(self, runner: step.Runner) -> None:
        runner.run(self.first, self.last)


class MatmulOn:
    """One matrix product on a device: buffer ``src`` -> buffer ``dst``; operation ``op`` is the CPU's way to it."""

    __slots__ = ("program", "device", "handle", "what", "src", "dst", "cols", "rows", "op")

    def __init__(
        self, program: Program, device: Device, handle: Any, what: str, src: str, dst: str, cols: int, rows: int,
        op: int,
    ) -> None:  # fmt: skip
        self.program = program
        self.device = device
        self.handle = handle
        self.what = what
        self.src, self.dst = src, dst
        self.cols, self.rows = cols, rows
        self.op = op

    def run(self, runner: step.Runner) -> None:
        views = self.program.views
        self.run_on(runner, getattr(views, self.src), getattr(views, self.dst))

    def run_on(self, runner: step.Runner, src: np.ndarray, dst: np.ndarray) -> None:
        """`run` with the two buffers at hand."""
        if self.handle is not None:
            try:
                self.device.matmul(self.handle, src[:, : self.cols], dst[:, : self.rows])
                return
            except DeviceError as error:
                self.handle = None
                self.program.failed(self.device, self.what, error)
        runner.run(self.op, self.op + 1)


class MixerOn:
    """A layer from its in-projection to its out-projection on one device: xn -> y, three operations of the CPU.

    dropped : it failed for good; the CPU computes the layer.
    """

    __slots__ = ("program", "device", "mixer", "what", "is_attention", "op", "dropped")

    def __init__(
        self, program: Program, device: LayerDevice, mixer: Any, what: str, is_attention: bool, op: int
    ) -> None:
        self.program = program
        self.device = device
        self.mixer = mixer
        self.what = what
        self.is_attention = is_attention
        self.op = op
        self.dropped = False

    @property
    def layer(self) -> int:
        """The layer's number."""
        return self.op // step.N_OPS

    def new_state(self) -> LayerState:
        """A sequence's state before its first position."""
        return self.device.new_state(self.mixer)

    def run(self, runner: step.Runner) -> None:
        program = self.program
        on_device = [(part, part.held.by.get(self)) for part in program.parts]
        if any(state is None for _, state in on_device):
            # the CPU works on the whole batch; it has no states of the others, and what it makes of their rows is
            # written over
            runner.run(self.op, self.op + 3)
        for part, state in on_device:
            if state is None:
                continue
            rows = slice(part.first_row, part.first_row + part.n_rows)
            turns = slice(part.position, part.position + part.n_rows)
            try:
                self.device.mix(
                    self.mixer, state, part.position, program.views.xn[rows], program.cos[turns], program.sin[turns],
                    program.views.y[rows],
                )  # fmt: skip
            except DeviceError as error:
                raise StatesLost(self, error) from None


class Program:
    """The steps of all layers.

    decoding : of the batch, for the heat; False in a prompt, None where rows are computed again: no heat.
    residents : {(component, layer): (device, handle)}, where attnproj's handle is the pair (in, out).
    mixers : {layer: (device, mixer)}: layers between whose projections nobody else is needed.
    spans : runs of such layers that their device takes whole, by the first.
    fallen : parts that fell back to the CPU, as (component or experts, device, reason).
    epoch : another object whenever states of sequences no longer fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        residents: dict[tuple[str, int], tuple[Device, Any]] | None = None,
        tier: Tier | None = None,
        mixers: dict[int, tuple[LayerDevice, Any]] | None = None,
        spans: Sequence[PlacedSpan] = (),
    ) -> None:
        self.config = config
        self.tier = tier
        self.decoding: bool | None = None
        self.lost: set[int] = set()
        self.fallen: list[tuple[str, str, str]] = []
        self.mixers: list[MixerOn] = []
        self.epoch = object()
        self._residents = residents or {}
        self._mixers = mixers or {}
        self.head: MatmulOn | None = None
        self.views: Views | None = None  # these and what follows: of the batch that was begun
        self.parts: list[Part] = []
        self.n_rows = 0
        self.cos: np.ndarray
        self.sin: np.ndarray
        self.logit_rows: Sequence[int] = ()  # whose logits will be asked for ...
        self.logits: np.ndarray  # ... and where a span may leave them at once
        self.has_logits = False
        self.finite = True  # those logits are
        self.soon: Callable[[], None] | None = None  # to be called a little before a batch with logits ends
        self.spans: list[SpanOn] = []
        self.steps = self._build(spans)
        self._on_devices = any(not isinstance(one, CpuRun) for one in self.steps)

    @property
    def max_rows(self) -> int | None:
        """Rows of a batch that all spans take; None without spans."""
        return min((span.max_rows for span in self.spans if not span.dropped), default=None)

    def _build(self, spans: Sequence[PlacedSpan]) -> list[Any]:
        config, steps, at = self.config, [], 0
        for placed in spans:
            steps += self._layers(at, placed.first)
            n_before = len(self.mixers)
            alone = self._layers(placed.first, placed.last)
            self.spans.append(SpanOn(self, placed, self.mixers[n_before:], alone))
            steps.append(self.spans[-1])
            at = placed.last
        steps += self._layers(at, config.num_hidden_layers)
        head = self._residents.get(("lmhead", 0))
        if head:
            op = config.num_hidden_layers * step.N_OPS + 1
            self.head = MatmulOn(self, *head, "lmhead", "head_x", "logits", config.hidden_size, config.vocab_size, op)
        return steps

    def _layers(self, first: int, last: int) -> list[Any]:
        """The steps of layers [first, last), one by one."""
        steps: list[Any] = []
        start = first * step.N_OPS  # first operation that the CPU has not been given yet

        def cut(op: int, by: Any, n_ops: int = 1) -> None:
            nonlocal start
            if op > start:
                steps.append(CpuRun(start, op))
            steps.append(by)
            start = op + n_ops

        for layer in range(first, last):
            base = layer * step.N_OPS
            if layer in self._mixers:
                mixer = self._mixer_on(layer)
                self.mixers.append(mixer)
                cut(mixer.op, mixer, 3)
            else:
                for matmul in self._projections(layer):
                    cut(matmul.op, matmul)
            shared = self._residents.get(("shexp", layer))
            if shared or (self.tier is not None and self.tier.holds(layer)):
                cut(base + _OP["MOE"], ExpertsOn(self, layer, shared))
        if last * step.N_OPS > start:
            steps.append(CpuRun(start, last * step.N_OPS))
        return steps

    def _mixer_on(self, layer: int) -> MixerOn:
        attention = self.config.layer_types[layer] == "full_attention"
        what = f"{'attnproj' if attention else 'dnproj and dnout'} of layer {layer}"
        return MixerOn(self, *self._mixers[layer], what, attention, layer * step.N_OPS + _OP["MIX_IN"])

    def _projections(self, layer: int) -> list[MatmulOn]:
        """The products of a layer's two projections that devices take one by one."""
        config, base, made = self.config, layer * step.N_OPS, []
        if config.layer_types[layer] == "full_attention":
            placed = self._residents.get(("attnproj", layer))
            into = (placed[0], placed[1][0]) if placed else None
            out = (placed[0], placed[1][1]) if placed else None
            rows = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
            names, width = ("attnproj", "attnproj"), config.num_attention_heads * config.head_dim
        else:
            into, out = self._residents.get(("dnproj", layer)), self._residents.get(("dnout", layer))
            width = config.linear_num_value_heads * config.linear_value_head_dim
            rows, names = config.conv_channels + width, ("dnproj", "dnout")
        if into:
            what = f"{names[0]} of layer {layer}"
            made.append(MatmulOn(self, *into, what, "xn", "proj", config.hidden_size, rows, base + _OP["MIX_IN"]))
        if out:
            what = f"{names[1]} of layer {layer}"
            made.append(MatmulOn(self, *out, what, "o", "y", width, config.hidden_size, base + _OP["MIX_OUT"]))
        return made

    def begin(
        self,
        runner: step.Runner,
        parts: list[Part],
        cos: np.ndarray,
        sin: np.ndarray,
        logit_rows: Sequence[int] = (),
        logits: np.ndarray | None = None,
    ) -> None:
        """The runner has begun this batch.  cos, sin : float32 (positions, rotary_half), from position 0 on.

        logit_rows : rows whose logits will be wanted.   logits : float32 (>= len(logit_rows), >= vocabulary); where
        ``has_logits`` is set behind `run`, they stand there.
        """
        self.has_logits = False
        if self._on_devices:
            self.parts, self.cos, self.sin = parts, cos, sin
            self.n_rows = parts[-1].first_row + parts[-1].n_rows
            self.logit_rows, self.logits = logit_rows, logits
            if self.views is None or not self.views.fit(runner, self.n_rows):
                self.views = Views(runner, self.config.hidden_size)

    def run(self, runner: step.Runner) -> None:
        """All layers of the batch that the runner and the program have begun.

        Raises StatesLost where a device failed that has states of the batch: none of its sequences' states is of use.
        """
        try:
            for one in self.steps:
                one.run(runner)
        except BaseException:
            runner.shared_external = False
            if self.tier is not None:
                self.tier.drain()
            raise
        if self.tier is not None:
            self.tier.between_tokens()

    def run_head(self, runner: step.Runner, rows: Sequence[int], logits: np.ndarray) -> bool:
        """Logits of some rows of the batch; False when one is NaN or infinite."""
        if self.head is None:
            return runner.head(rows, logits)
        runner.head_begin(rows, logits)
        runner.run(runner.n_ops, runner.n_ops + 1)  # the final norm; the product is the device's
        head_x, padded = np.asarray(runner.buffer("head_x")), np.asarray(runner.buffer("logits"))
        self.head.run_on(runner, head_x, padded)
        return bool(np.isfinite(padded[:, : self.config.vocab_size]).all())

    def failed(self, device: Device, what: str, error: DeviceError) -> None:
        """A device did not answer: say so once, and forget a lost one."""
        if error.kind != "lost":
            logger("place").warning("%s on %s failed (%s): computed on the CPU", what, device.name, error)
        elif self._first_loss(device, error):
            logger("place").warning("%s is lost (%s): everything on it goes to the CPU", device.name, error)
        else:
            return
        self.fallen.append((what, device.name, str(error)))

    def give_up(self, lost: StatesLost) -> str:
        """A device failed in a layer that it takes whole: that layer, or all of a lost device, is the CPU's.  A span
        that failed is not: its layers go on there one by one.

        Returns what happened, for the line that is written when the states have been computed again.
        """
        failed, error = lost.step, lost.error
        gone = error.kind == "lost"
        for mixer in [m for m in self.mixers if m is failed or (gone and m.device is failed.device)]:
            mixer.dropped = True
            self.mixers.remove(mixer)
        for span in self.spans:
            span.dropped |= span is failed or (gone and span.device is failed.device)
        self.epoch = object()
        self.fallen.append((failed.what, failed.device.name, str(error)))
        if not gone:
            how = "computed layer by layer" if failed in self.spans else "computed on the CPU"
            return f"{failed.what} on {failed.device.name} failed ({error}): {how}"
        self._first_loss(failed.device, error)
        return f"{failed.device.name} is lost ({error}): everything on it goes to the CPU"

    def _first_loss(self, device: Device, error: DeviceError) -> bool:
        if id(device) in self.lost:
            return False
        self.lost.add(id(device))
        if self.tier is not None:
            self.tier.quarantine(device, str(error))
        return True
