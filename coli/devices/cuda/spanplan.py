"""Which kernels take the rows of a batch through a span: launches on a stream, directly or while a graph is captured.

The same code counts the scratch that a batch takes: it is run with a context that launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from coli.container.layout import FORMATS, GROUP, MatrixLayout, SlabLayout, round_up
from coli.devices.base import DeviceError
from coli.devices.cuda import mixer as mixers
from coli.devices.cuda import plan
from coli.devices.cuda.batch import BatchList
from coli.devices.cuda.context import Acts, Slabs
from coli.devices.cuda.mixer import Mixer

HEAD_ROWS = 8  # rows whose logits one pass makes; pinned memory holds them
MAX_TOP_K, MAX_EXPERTS = 32, 1024  # what choose_experts takes
_WATCHERS = 8  # from more rows on a kernel of its own watches the mailbox
STEP_ROWS = 64
"""From so many rows on nothing on the card waits for the host's answers, which take it milliseconds: the host goes on
when it has answered, and meanwhile other work may run on the card."""
_SHARED_BYTES = 48 << 10
_LIST_BLOCKS = 64


@dataclass(frozen=True, eq=False)
class Layer:
    """A whole layer on a card.

    index : its number in the model.   experts : the slots' slab, None where there are no slots.
    shared : (address, slab) of the resident shared expert, None where the host computes it.
    router, gate : (address, layout) of row-major matrices.
    """

    index: int
    mixer: Mixer
    experts: SlabLayout | None
    shared: tuple[int, SlabLayout] | None
    norm1_at: int
    norm2_at: int
    router: tuple[int, MatrixLayout]
    gate: tuple[int, MatrixLayout]


@dataclass(frozen=True, eq=False)
class Head:
    """The final norm and the resident lm_head."""

    norm_at: int
    address: int
    layout: MatrixLayout


@dataclass(frozen=True)
class Shape:
    """Of a batch, everything that its launches depend on.

    longest : rows of the longest part.   chunks : K/V blocks that grids cover.   asks : places of the layers that may
    lack something.   n_logits : rows whose logits are wanted, at most HEAD_ROWS of them here.
    """

    n_rows: int
    n_parts: int
    longest: int
    chunks: int
    asks: tuple[int, ...]
    n_logits: int


class Post(Protocol):
    """Addresses in pinned memory (``mailbox.Mailbox``)."""

    mail_at: int
    done_at: int
    ask_at: int
    count_at: int

    def at(self, name: str) -> int: ...
    def choice_at(self, place: int, top_k: int) -> tuple[int, int, int]: ...


class Nowhere:
    """A context and a post that are only asked for addresses: launches go nowhere."""

    mail_at = done_at = ask_at = count_at = 0
    multiprocessors = 1

    def launch(self, *arguments: Any, **options: Any) -> None:
        """Nothing."""

    def at(self, name: str) -> int:
        """No address."""
        return 0

    def choice_at(self, place: int, top_k: int) -> tuple[int, int, int]:
        """No addresses."""
        return 0, 0, 0


class Scratch:
    """Addresses in a piece of device memory, one after the other.   most : the bytes that were in use at once."""

    def __init__(self, at: int, n_bytes: int) -> None:
        self.begin = self.at = at
        self.n_bytes = n_bytes
        self.most = 0

    def take(self, n_bytes: int) -> int:
        """Address of so many bytes.  Raises DeviceError("out of memory") at the end."""
        at, self.at = self.at, self.at + round_up(n_bytes)
        self.most = max(self.most, self.at - self.begin)
        if self.most > self.n_bytes:
            raise DeviceError(f"a span's {self.n_bytes:,} bytes of scratch are too few for this batch", "out of memory")
        return at

    def acts(self, n_rows: int, n_groups: int) -> Acts:
        """Room for quantised rows."""
        acts, n_bytes = plan.acts_at(self.at, n_rows, n_groups)
        self.take(n_bytes)
        return acts


@dataclass(frozen=True)
class Rows:
    """Where the rows of a batch lie: x and xn float32 (T, width), and the numbers of the rows wanted at the end."""

    x_at: int
    xn_at: int
    acts: Acts
    logit_rows_at: int


def batch_list(layers: Sequence[Layer], shape: Shape) -> BatchList:
    """The layout of a batch's list; the rows whose logits are wanted follow it."""
    return BatchList(shape.n_rows, shape.n_parts, _rotary_half(tuple(layers)), len(layers))


@lru_cache(maxsize=16)
def _rotary_half(layers: tuple[Layer, ...]) -> int:
    return max((l.mixer.spec.geometry["rotary_half"] for l in layers if l.mixer.spec.is_attention), default=0)


def list_bytes(layers: Sequence[Layer], shape: Shape) -> int:
    """Bytes of the list with those rows."""
    return batch_list(layers, shape).n_bytes + 4 * HEAD_ROWS


def scratch_bytes(layers: Sequence[Layer], head: Head | None, shape: Shape) -> int:
    """Device memory that `Launch` uses for a batch."""
    kinds = tuple({(l.mixer.spec.is_attention, l.shared is None): l for l in layers}.values())
    scratch, nowhere = Scratch(0, 1 << 62), Nowhere()
    Launch(nowhere, None, nowhere, kinds, head, shape, scratch, lambda place: 0).run()
    return scratch.most + list_bytes(layers, shape) - list_bytes(kinds, shape) + 256


class Launch:
    """The launches of one batch.  context, stream : as `plan` asks of a lane.

    slots_at(place) : address of a layer's table of slots.
    """

    def __init__(
        self, context: Any, stream: Any, post: Post, layers: Sequence[Layer], head: Head | None, shape: Shape,
        scratch: Scratch, slots_at: Any,
    ) -> None:  # fmt: skip
        self.context, self.stream, self.post = context, stream, post
        self.layers, self.head, self.shape, self.scratch = layers, head, shape, scratch
        self.slots_at = slots_at
        g = layers[0].mixer.spec.geometry
        n = shape.n_rows
        self.hidden, self.top_k, self.eps = g["hidden_size"], g["top_k"], g["eps"]
        self.n_groups = -(-self.hidden // GROUP)
        self.width = self.n_groups * GROUP
        self.norm_threads = 32 * min(32, self.n_groups)
        self.norm_shared = 4 * (self.hidden + 1)
        self.list_at = scratch.take(list_bytes(layers, shape))
        self.list = batch_list(layers, shape)
        x_at, xn_at = scratch.take(4 * n * self.width), scratch.take(4 * n * self.width)
        self.rows = Rows(x_at, xn_at, scratch.acts(n, self.n_groups), self.list_at + self.list.n_bytes)
        self.y_at = scratch.take(4 * n * self.hidden)
        n_experts = max(layer.router[1].rows for layer in layers)
        self.logits_at, self.gate_at = scratch.take(4 * n * n_experts), scratch.take(4 * n)
        self.gate_w_at, self.top_w_at = scratch.take(4 * n), scratch.take(4 * n * self.top_k)
        self.jobs_at = scratch.take(plan.JOB.itemsize * n * self.top_k)
        self.chosen_at = scratch.take(4 * n * self.top_k)

    def _run(
        self, kernel: str, variant: str, grid: tuple[int, ...], threads: int, shared: int, *arguments: Any
    ) -> None:
        """A kernel that waits itself for the one before it."""
        self.context.launch(kernel, variant, grid, threads, shared, self.stream, *arguments, early=True)

    def run(self) -> None:
        """From the rows in pinned memory to x, or to the logits, and the flag."""
        for _ in self.pieces(stops=False):
            pass

    def pieces(self, *, stops: bool) -> Iterator[None]:
        """The same in pieces, where it ``stops``: each ends where a layer has asked, and the host goes on with the next
        one when the answer is there.  Else the card waits for the answer, and there is one piece.
        """
        mark = self.scratch.at
        self._begin()
        batch = self.list.batch(self.list_at, self.shape.longest, self.shape.chunks)
        for place, layer in enumerate(self.layers):
            asks = place in self.shape.asks
            self.scratch.at = mark
            self._mix(layer, batch, self.list.states_at(self.list_at, place))
            self._norm2(layer, asks)
            self._route(layer, place, asks)
            self.scratch.at = mark
            contributions = self._experts(layer, place)
            if asks and stops:
                yield
            self._combine(layer, place, asks, *contributions, waits=asks and not stops)
        self.scratch.at = mark
        if self.head is not None and self.shape.n_logits:
            self.logits(self.shape.n_logits)
        self.raise_flag()

    def _begin(self) -> None:
        rows, n, words = self.rows, self.shape.n_rows, list_bytes(self.layers, self.shape) // 4
        blocks = min(_LIST_BLOCKS, -(-words // self.norm_threads))
        self.context.launch("begin_rows", "", (n + blocks, 1), self.norm_threads, self.norm_shared, self.stream,
                            self.post.at("x"), plan.x_stride(self.layers[0].mixer.into[1]), rows.x_at,
                            self.layers[0].norm1_at, self.hidden, self.eps, rows.xn_at, rows.acts, n,
                            self.post.at("list"), self.list_at, words)  # fmt: skip

    def _mix(self, layer: Layer, batch: Any, states_at: int) -> None:
        """In-projection, core, out-projection: xn -> y."""
        into, (out_at, out), n = layer.mixer.into[1], layer.mixer.out, self.shape.n_rows
        proj_at, o_at = self.scratch.take(4 * n * into.rows), self.scratch.take(4 * n * out.cols)
        acts_o = self.scratch.acts(n, out.n_groups)
        ba_at = mixers.project(self, layer.mixer, n, self.rows.acts, self.rows.xn_at, self.scratch.take, proj_at)
        mixers.core(self.context, self.stream, layer.mixer, batch, states_at, self.scratch.take, self.rows.xn_at,
                    proj_at, o_at, acts_o, ba_at)  # fmt: skip
        plan.product(self, out_at, out, n, acts_o, self.y_at)

    def _norm2(self, layer: Layer, asks: bool) -> None:
        self._run("residual_norm", "", (self.shape.n_rows,), self.norm_threads, self.norm_shared, self.rows.x_at,
                  self.y_at, self.hidden, layer.norm2_at, self.hidden, self.eps, self.rows.xn_at,
                  self.post.at("xn") if asks else 0, self.hidden, self.rows.acts)  # fmt: skip

    def _route(self, layer: Layer, place: int, asks: bool) -> None:
        (router_at, router), (gate_at, gate), n = layer.router, layer.gate, self.shape.n_rows
        second = gate.rows if gate.format == router.format else 0
        tiles = -(-n // 8)
        self._run("router_logits", router.format, (-(-(router.rows + second) // 2), tiles), 64, 0, router_at,
                  router.rows, self.logits_at, gate_at, second, self.gate_at, router.block_bytes, self.hidden,
                  self.rows.xn_at, self.width, n)  # fmt: skip
        if not second:
            self._run("router_logits", gate.format, (1, tiles), 64, 0, gate_at, gate.rows, self.gate_at, 0, 0, 0,
                      gate.block_bytes, self.hidden, self.rows.xn_at, self.width, n)  # fmt: skip
        per_lane = next(per for per in (8, 16, 32) if router.rows <= 32 * per)
        top_at, external_at, missing_at = self.post.choice_at(place, self.top_k)
        self._run("choose_experts", str(per_lane), (1,), 32 * min(32, n), 8 * router.rows, self.logits_at,
                  self.gate_at, router.rows, self.top_k, n, self.slots_at(place), self.top_w_at, self.gate_w_at,
                  self.jobs_at, self.chosen_at, top_at, external_at, missing_at, self.post.ask_at,
                  self.post.mail_at if asks else 0)  # fmt: skip

    def _experts(self, layer: Layer, place: int) -> tuple[int, int]:
        """What the card has of the experts.  Where the ranks' vectors lie, and the shared expert's."""
        n, jobs = self.shape.n_rows, self.shape.n_rows * self.top_k
        y_at, shared_y_at = self.scratch.take(4 * jobs * self.hidden), self.scratch.take(4 * n * self.hidden)
        compute = self._many_experts if n >= plan.GEMM_TOKENS else self._few_experts
        compute(layer, place, y_at, shared_y_at)
        return y_at, shared_y_at

    def _combine(self, layer: Layer, place: int, asks: bool, y_at: int, shared_y_at: int, *, waits: bool) -> None:
        """The sum over ranks and the next layer's norm.   waits : for the host's answer, on the card."""
        n, post = self.shape.n_rows, self.post
        mail = post.mail_at if waits else 0
        if waits and n > _WATCHERS:
            self._run("await_answer", "", (1,), 32, 0, post.ask_at, mail, layer.shared is None)
            mail = 0
        last = place == len(self.layers) - 1
        answers_at = post.at("answers") if asks else 0
        shared_answers_at = answers_at + 4 * n * self.top_k * self.hidden if layer.shared is None else 0
        self._run("combine_norm", "", (n,), self.norm_threads, self.norm_shared, self.rows.x_at, self.hidden, y_at,
                  shared_y_at, self.top_w_at, self.gate_w_at, self.top_k, self.jobs_at, answers_at, shared_answers_at,
                  post.ask_at, mail, 0 if last else self.layers[place + 1].norm1_at, self.eps, self.rows.xn_at,
                  self.rows.acts, post.at("x_out") if last and self.head is None else 0)  # fmt: skip

    def _few_experts(self, layer: Layer, place: int, y_at: int, shared_y_at: int) -> None:
        """Each rank by itself: weights come from memory, or from the cache, once a rank."""
        n, jobs = self.shape.n_rows, self.shape.n_rows * self.top_k
        experts, shared, shared_at = _slabs(layer.experts), _slabs(None), 0
        slabs = [layer.experts] if layer.experts else []
        if layer.shared is not None:
            shared_at, shared = layer.shared[0], _slabs(layer.shared[1])
            slabs.append(layer.shared[1])
        if not slabs:
            return
        h_at = self.scratch.take(4 * jobs * max(experts.dim, 1))
        shared_h_at = self.scratch.take(4 * n * max(shared.dim, 1))
        half = min(8, -(-self.n_groups // 2))
        blocks = n * shared.gate_blocks + jobs * experts.gate_blocks
        self._run("moe_gate_up", "", (blocks,), 64 * half, 2 * self.n_groups * 64, experts, self.jobs_at, h_at, shared,
                  shared_at, shared_h_at, self.rows.acts, n)  # fmt: skip
        groups = max(slab.down.n_groups for slab in slabs)
        blocks = n * shared.down_blocks + jobs * experts.down_blocks
        self._run("moe_down", "", (blocks,), 32 * min(16, groups), groups * 64, experts, self.jobs_at, h_at, y_at,
                  shared, shared_at, shared_h_at, shared_y_at, self.hidden, n)  # fmt: skip

    def _many_experts(self, layer: Layer, place: int, y_at: int, shared_y_at: int) -> None:
        """Rows ordered by expert on the card: weights are read once for all rows that chose them."""
        n, acts, take = self.shape.n_rows, self.rows.acts, self.scratch.take
        if layer.experts is not None:
            plan.grouped_experts(self, layer.experts, n, self.top_k, layer.router[1].rows, self.chosen_at,
                                 self.slots_at(place), acts, take, y_at)  # fmt: skip
        if layer.shared is not None:
            plan.expert_of_rows(self, layer.shared[1], layer.shared[0], n, acts, take, shared_y_at)

    def logits(self, n: int) -> None:
        """The head of n rows, whose numbers stand behind the list; logits (n, vocabulary) in pinned memory."""
        head, rows = self.head, self.rows
        acts = rows.acts._replace(stride=n)
        self._run("gather_norm", "", (n,), self.norm_threads, self.norm_shared, rows.x_at, rows.logit_rows_at,
                  head.norm_at, self.hidden, self.eps, rows.xn_at, acts)  # fmt: skip
        if FORMATS[head.layout.format].is_blocks:
            plan.product(self, head.address, head.layout, n, acts, self.post.at("logits"))
            return
        self.context.launch("dense", head.layout.format, (-(-head.layout.rows // 8), n), 256, 0, self.stream,
                            head.address, 0, 0, 0, head.layout.block_bytes, head.layout.rows, self.hidden, rows.xn_at,
                            self.width, self.post.at("logits"), head.layout.rows)  # fmt: skip

    def more_logits(self, n: int) -> None:
        """Another pass of the head, over rows whose numbers stand in pinned memory by now; then the flag."""
        at, words = self.list.n_bytes, HEAD_ROWS
        self.context.launch("pull_float", "", (1, 1), 32, 0, self.stream, 0, 0, 0, self.post.at("list") + at,
                            self.rows.logit_rows_at, words)  # fmt: skip
        self.logits(n)
        self.raise_flag()

    def send_x(self) -> None:
        """x to pinned memory, which only a span without a head does by itself; then the flag."""
        n = self.shape.n_rows
        self.context.launch("send_rows", "", (n, 1), 256, 0, self.stream, self.rows.x_at, self.width, self.hidden,
                            self.post.at("x_out"))  # fmt: skip
        self.raise_flag()

    def raise_flag(self) -> None:
        """Tell the host that everything so far is done."""
        self._run("raise_flag", "", (1,), 1, 0, self.post.count_at, self.post.done_at)


def _slabs(slab: SlabLayout | None) -> Slabs:
    if slab is None:
        return Slabs(*[0] * 10)
    return Slabs(slab.gate_offset, slab.up_offset, slab.down_offset, slab.gate.block_bytes, slab.down.block_bytes,
                 FORMATS[slab.format].code, slab.intermediate_size, slab.gate.n_blocks, slab.down.n_blocks,
                 slab.down.n_groups)  # fmt: skip


def require_fit(layer: Layer) -> None:
    """Raises DeviceError where the kernels do not take a layer of this shape."""
    g = layer.mixer.spec.geometry
    n_groups = -(-g["hidden_size"] // GROUP)
    reasons = {
        f"{g['top_k']} experts a token, {MAX_TOP_K} at most": g["top_k"] > MAX_TOP_K,
        f"{layer.router[1].rows} experts, {MAX_EXPERTS} at most": layer.router[1].rows > MAX_EXPERTS,
        f"rows of {g['hidden_size']} values do not fit a block's shared memory": max(
            4 * (g["hidden_size"] + 1), 128 * n_groups
        ) > _SHARED_BYTES,
        "experts that are not R16 blocks": any(
            slab is not None and not FORMATS[slab.format].is_blocks
            for slab in (layer.experts, layer.shared and layer.shared[1])
        ),
        "a router in blocks": any(FORMATS[m.format].is_blocks for _, m in (layer.router, layer.gate)),
    }  # fmt: skip
    for reason, wrong in reasons.items():
        if wrong:
            raise DeviceError(f"layer {layer.index}: {reason}: not on a card", "launch")
