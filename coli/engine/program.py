"""Who computes what, decided once at load: a token's operations as a list of steps.

With nothing placed the list is one step: all operations of all layers in one region of the CPU team.  Each
matrix that a device holds cuts it: the CPU runs up to the operation, the device answers it, the CPU goes on.
A step whose device fails is answered by the CPU from the container's own bytes, then and from then on; the
contract makes that the same bits, so a failure costs time and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Sequence

import numpy as np

from coli._core import step
from coli.devices.base import Device, DeviceError
from coli.log import logger

if TYPE_CHECKING:
    from coli.config import ModelConfig

_OP = {name: i for i, name in enumerate(step.OPS)}


class Tier(Protocol):
    """What the program asks of the expert tier (``coli.tier.expert_tier`` says more)."""

    def holds(self, layer: int) -> bool: ...
    def note(self, layer: int, top_idx: np.ndarray) -> None: ...
    def issue(self, layer: int, top_idx: np.ndarray, x: np.ndarray, external: np.ndarray) -> Sequence[Any]: ...
    def take(self, group: Any) -> np.ndarray | None: ...
    def quarantine(self, lost: Device, reason: str = ...) -> None: ...
    def drain(self) -> None: ...
    def between_tokens(self) -> None: ...


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
        self, program: Program, device: Device, handle: Any, what: str, src: str, dst: str, cols: int, rows: int, op: int
    ) -> None:
        self.program = program
        self.device = device
        self.handle = handle
        self.what = what
        self.src, self.dst = src, dst
        self.cols, self.rows = cols, rows
        self.op = op

    def run(self, runner: step.Runner) -> None:
        if self.handle is not None:
            try:
                rows = np.asarray(runner.buffer(self.src))[:, : self.cols]
                np.asarray(runner.buffer(self.dst))[:, : self.rows] = self.device.matmul(self.handle, rows)
                return
            except DeviceError as error:
                self.handle = None
                self.program.failed(self.device, self.what, error)
        runner.run(self.op, self.op + 1)


class ExpertsOn:
    """The MoE of one layer with experts, or the shared expert, on devices.

    Devices start first, the CPU computes what they do not hold, then their answers are taken.  All
    contributions are unweighted vectors; COMBINE adds them in rank order whoever made them.
    """

    __slots__ = ("program", "layer", "op", "shared_device", "shared_handle")

    def __init__(self, program: Program, layer: int, shared: tuple[Device, Any] | None) -> None:
        self.program = program
        self.layer = layer
        self.op = layer * step.N_OPS + _OP["MOE"]
        self.shared_device, self.shared_handle = shared or (None, None)

    def run(self, runner: step.Runner) -> None:
        program, tier = self.program, self.program.tier
        hidden_size = program.config.hidden_size
        external = np.asarray(runner.buffer("external"))  # (T, k)
        x = np.asarray(runner.buffer("xn"))[:, :hidden_size]
        groups: Sequence[Any] = ()
        if tier is not None:
            top_idx = np.asarray(runner.buffer("top_idx"))
            if program.decoding:
                tier.note(self.layer, top_idx)
            groups = tier.issue(self.layer, top_idx, x, external)
        runner.shared_external = self.shared_handle is not None
        runner.run(self.op, self.op + 1)
        shared, again = None, False
        if self.shared_handle is not None:
            try:
                shared = self.shared_device.ffn(self.shared_handle, x)
            except DeviceError as error:
                self.shared_handle = None
                program.failed(self.shared_device, f"shexp of layer {self.layer}", error)
                again = True
        answers = []
        for group in groups:
            y = tier.take(group)
            if y is None:
                external[group.rows, group.ranks] = 0
                again = True
            else:
                answers.append((group, y))
        if again:  # slots are numbered anew, so the CPU's part is done again with the failed ones in it
            runner.shared_external = shared is not None
            runner.run(self.op, self.op + 1)
        runner.shared_external = False  # the next layer's shared expert may be the CPU's, inside a longer run
        if answers:
            expert_y = np.asarray(runner.buffer("expert_y"))
            slot_of = np.asarray(runner.buffer("slot_of"))
            for group, y in answers:
                expert_y[slot_of[group.rows, group.ranks], :hidden_size] = y
        if shared is not None:
            np.asarray(runner.buffer("shared_y"))[:, :hidden_size] = shared


class Program:
    """The steps of all layers.  ``decoding`` says whether the batch counts for the heat (prefill does not).

    residents : {(component, layer): (device, handle)}, where attnproj's handle is the pair (in, out).
    fallen : parts that fell back to the CPU, as (component or experts, device, reason).
    """

    def __init__(
        self,
        config: ModelConfig,
        residents: dict[tuple[str, int], tuple[Device, Any]] | None = None,
        tier: Tier | None = None,
    ) -> None:
        self.config = config
        self.tier = tier
        self.decoding = False
        self.lost: set[int] = set()
        self.fallen: list[tuple[str, str, str]] = []
        self._residents = residents or {}
        self.head: MatmulOn | None = None
        self.steps = self._build()

    def _build(self) -> list[Any]:
        config, steps = self.config, []
        start = 0  # first operation that the CPU has not been given yet

        def cut(op: int, by: Any) -> None:
            nonlocal start
            if op > start:
                steps.append(CpuRun(start, op))
            steps.append(by)
            start = op + 1

        for layer, kind in enumerate(config.layer_types):
            base = layer * step.N_OPS
            attention = kind == "full_attention"
            value_dim = config.linear_num_value_heads * config.linear_value_head_dim
            if attention:
                placed = self._residents.get(("attnproj", layer))
                into = (placed[0], placed[1][0]) if placed else None
                out = (placed[0], placed[1][1]) if placed else None
                rows = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
                names, width = ("attnproj", "attnproj"), config.num_attention_heads * config.head_dim
            else:
                into, out = self._residents.get(("dnproj", layer)), self._residents.get(("dnout", layer))
                rows = config.conv_channels + value_dim
                names, width = ("dnproj", "dnout"), value_dim
            if into:
                op = base + _OP["MIX_IN"]
                what = f"{names[0]} of layer {layer}"
                cut(op, MatmulOn(self, *into, what, "xn", "proj", config.hidden_size, rows, op))
            if out:
                op = base + _OP["MIX_OUT"]
                what = f"{names[1]} of layer {layer}"
                cut(op, MatmulOn(self, *out, what, "o", "y", width, config.hidden_size, op))
            shared = self._residents.get(("shexp", layer))
            if shared or (self.tier is not None and self.tier.holds(layer)):
                cut(base + _OP["MOE"], ExpertsOn(self, layer, shared))
        end = config.num_hidden_layers * step.N_OPS
        if end > start:
            steps.append(CpuRun(start, end))
        head = self._residents.get(("lmhead", 0))
        if head:
            self.head = MatmulOn(
                self, *head, "lmhead", "head_x", "logits", config.hidden_size, config.vocab_size, end + 1
            )
        return steps

    def run(self, runner: step.Runner) -> None:
        """All layers of the batch that the runner has begun."""
        try:
            for one in self.steps:
                one.run(runner)
        except BaseException:
            if self.tier is not None:
                self.tier.drain()
            raise
        if self.tier is not None:
            self.tier.between_tokens()

    def failed(self, device: Device, what: str, error: DeviceError) -> None:
        """A device did not answer: say so once, and forget a lost one."""
        if error.kind == "lost":
            if id(device) in self.lost:
                return
            self.lost.add(id(device))
            if self.tier is not None:
                self.tier.quarantine(device, str(error))
            logger("place").warning("%s is lost (%s): everything on it goes to the CPU", device.name, error)
        else:
            logger("place").warning("%s on %s failed (%s): computed on the CPU", what, device.name, error)
        self.fallen.append((what, device.name, str(error)))
