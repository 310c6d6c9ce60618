"""A run of consecutive layers on a card, from residual stream to residual stream, or to the logits.

A decode step (one row a sequence, few of them) is one graph from the rows in pinned memory to the flag; every other
batch makes the same launches one by one.  Which experts are where stands in a table on the card, which `seat` edits in
pinned memory and the next run takes up; a layer that may lack something asks its host through the mailbox.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from coli.container.layout import matrix_layout, slab_layout
from coli.devices.base import DeviceError, LayerSpec, MixerSpec, SpanPart
from coli.devices.cuda import mixer as mixers
from coli.devices.cuda import spanplan
from coli.devices.cuda.batch import CHUNK, parts_of
from coli.devices.cuda.context import Context, Pinned
from coli.devices.cuda.mixer import Mixer
from coli.devices.cuda.spanplan import Head, Launch, Layer, Scratch, Shape
from coli.devices.cuda.spanrun import Answers, SpanRun
from coli.devices.cuda.stream import stream_bytes
from coli.devices.cuda.workspace import Workspace

MAX_ROWS = 512
_GRAPH_ROWS = 8  # decode batches up to this size get a graph
_GRAPHS = 24  # graphs of a span: a longer context, another batch size or a newly seated layer makes another
_LEAST_ROWS = 8  # fewer are not worth a span: the card is full


class Token:
    """A decode batch that is likely to come again, one position further: all that stays the same.

    stamp : what it has addresses of is where it was as long as this is the same.
    """

    __slots__ = ("states", "rows", "shape", "stamp", "graph", "launch", "answers", "x_at", "parts_at", "cos_at",
                 "sin_at", "half")  # fmt: skip

    def __init__(self, span: CudaSpan, shape: Shape, parts: Sequence[SpanPart], logit_rows: Sequence[int],
                 graph: int, launch: Launch, answers: Answers) -> None:  # fmt: skip
        mailbox = span.workspace.mailbox
        self.states = [part.states for part in parts]
        self.rows = tuple(logit_rows)
        self.shape, self.graph, self.launch, self.answers = shape, graph, launch, answers
        self.stamp = span.stamp
        self.x_at = mailbox.at("x")
        batch = launch.list.batch(mailbox.at("list"), 1, shape.chunks)
        self.parts_at, self.cos_at, self.sin_at = batch.parts_at, batch.cos_at, batch.sin_at
        self.half = launch.list.half

    def comes_again(self, parts: Sequence[SpanPart], logit_rows: Sequence[int]) -> bool:
        """Whether these are the same sequences, a row each, wanted alike."""
        return (
            len(parts) == len(self.states)
            and all(part.states is states and part.n_rows == 1 for part, states in zip(parts, self.states, strict=True))
            and tuple(logit_rows) == self.rows
        )


class CudaSpan:
    """Layers, the head behind them where it is given, and which of their experts are where.

    max_rows : rows of a batch.   workspace : shared by the spans of a card.
    """

    def __init__(self, workspace: Workspace, layers: Sequence[Layer], head: Head | None) -> None:
        g = layers[0].mixer.spec.geometry
        self.workspace = workspace
        self.context = workspace.context
        self.layers = tuple(layers)
        self.head = head
        self.top_k, self.hidden = g["top_k"], g["hidden_size"]
        self.graphs: OrderedDict[Shape, tuple[int, Any, Launch]] = OrderedDict()
        self.stream_address = int(workspace.stream)
        self._token: Token | None = None
        self._stride = -(-self.hidden // 4) * 4
        self._dirty = True
        self._table_at = 0
        n_experts = max(layer.router[1].rows for layer in layers)
        self.max_rows = self._take_scratch()
        self._table: Pinned | None = self.context.pin(8 * len(layers) * n_experts, "a span's table of slots")
        self._seats = self._table.array.view(np.uint64).reshape(len(layers), n_experts)
        self._seats[:] = 0
        self._place_of = {layer.index: place for place, layer in enumerate(layers)}
        self._lacking = [layer.router[1].rows for layer in layers]  # experts that are nowhere
        self._asks = self._asking()
        try:
            self._table_at = self.context.alloc(self._seats.nbytes, "a span's table of slots")
        except DeviceError:
            self.context.unpin(self._table)
            raise

    def _take_scratch(self) -> int:
        """Scratch for as many rows as the card has room for.  Returns how many that is."""
        rows = MAX_ROWS
        while True:
            needed = spanplan.scratch_bytes(self.layers, self.head, _largest(rows, len(self.layers)))
            try:
                self.workspace.reserve_scratch(needed)
                return rows
            except DeviceError as error:
                if error.kind != "out of memory" or rows // 2 < _LEAST_ROWS:
                    raise
                rows //= 2

    def close(self) -> None:
        """Give graphs and the table back.  Does nothing the second time, or on a lost card.

        Nothing may be under way.
        """
        if self.context.lost is not None or self._table is None:
            return
        self.context.set_current()
        for _, graph, _ in self.graphs.values():
            self.context.free_graph(graph)
        self.graphs.clear()
        self._token = None
        self.context.unpin(self._table)
        self.context.free(self._table_at)
        self._table = None

    # ---- seats ---------------------------------------------------------------------------------------------

    def seat(self, layer: int, expert: int, slot_at: int) -> None:
        """From the next run on an expert lies at an address of the card, or nowhere (0)."""
        place = self._place_of.get(layer)
        if place is None:
            return
        if not 0 <= expert < self.layers[place].router[1].rows:
            raise IndexError(f"expert {expert} of {self.layers[place].router[1].rows}")
        before = int(self._seats[place, expert])
        self._seats[place, expert] = slot_at
        self._dirty = True
        change = (slot_at == 0) - (before == 0)
        if change:
            lacked, self._lacking[place] = self._lacking[place], self._lacking[place] + change
            if not lacked or not self._lacking[place]:
                self._asks = self._asking()

    def _asking(self) -> tuple[int, ...]:
        """The places of the layers that may lack something."""
        return tuple(
            place for place, layer in enumerate(self.layers) if layer.shared is None or self._lacking[place]
        )

    def _take_seats(self) -> tuple[int, ...]:
        """The table goes up where it has changed.  Returns the places of the layers that may lack something."""
        if self._dirty:
            self.context.copy_in(self._table_at, self._table.address, self._seats.nbytes, self.workspace.stream)
            self._dirty = False
        return self._asks

    def slots_at(self, place: int) -> int:
        """Where a layer's row of the table lies on the card."""
        return self._table_at + place * self._seats.strides[0]

    # ---- runs ------------------------------------------------------------------------------------------------

    def begin(self, parts: Sequence[SpanPart], x: np.ndarray, cos: np.ndarray, sin: np.ndarray,
              logit_rows: Sequence[int]) -> SpanRun:  # fmt: skip
        """Start a batch.  Raises DeviceError, and nothing is under way then."""
        context, workspace, n = self.context, self.workspace, len(x)
        if workspace.open is not None:
            workspace.open.abandon()
        token = self._token
        if (
            token is not None
            and workspace.list_of is token
            and token.stamp == self.stamp
            and token.comes_again(parts, logit_rows)
        ):
            positions = [part.position for part in parts]
            if mixers.covered(max(positions) // CHUNK + 1) == token.shape.chunks:
                if self._dirty:
                    context.set_current()
                if self._take_seats() == token.shape.asks:
                    return self._again(token, positions, x, cos, sin)
        workspace.list_of = self._token = None
        if self._table is None:
            raise DeviceError(f"{context.name}: the span is closed", "launch")
        if n > self.max_rows:
            raise DeviceError(f"{context.name}: {n} rows in a span that takes {self.max_rows}", "launch")
        if len(logit_rows) and self.head is None:
            raise DeviceError(f"{context.name}: logits of a span without a head", "launch")
        context.set_current()
        asks = self._take_seats()
        longest = max(part.n_rows for part in parts)
        chunks = -(-max(part.position + part.n_rows for part in parts) // CHUNK)
        if n <= _GRAPH_ROWS and longest == 1:
            chunks = mixers.covered(chunks)
        shape = Shape(n, len(parts), longest, chunks, asks, min(len(logit_rows), spanplan.HEAD_ROWS))
        vocabulary = self.head.layout.rows if self.head is not None else 0
        workspace.mailbox.reserve(
            len(self.layers), n, self.top_k, self.hidden, spanplan.list_bytes(self.layers, shape),
            4 * shape.n_logits * vocabulary, bool(asks),
        )  # fmt: skip
        self._put_list(shape, parts, cos, sin, logit_rows)
        run = SpanRun(self, shape, list(logit_rows), answers := Answers(self, shape))
        workspace.open = run
        try:
            graph, run.launch = self._start(shape, x)
            if not graph:
                run.launched()
        except BaseException:
            run.abandon()
            raise
        if graph:
            workspace.list_of = self._token = Token(self, shape, parts, logit_rows, graph, run.launch, answers)
        return run

    @property
    def stamp(self) -> tuple[int, int]:
        """Changes with everything that a list or a graph has addresses of."""
        return self.workspace.generation, self.context.moves

    def _again(self, token: Token, positions: list[int], x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> SpanRun:
        """Start a batch whose list is there already."""
        workspace, context = self.workspace, self.context
        if self.head is not None:
            workspace.mailbox.mark_logits(token.shape.n_logits * self.head.layout.rows)
        run = SpanRun(self, token.shape, token.rows, token.answers)
        run.launch = token.launch
        workspace.open = run
        code = context.launcher.again(x, token.x_at, self._stride, positions, token.parts_at, cos, sin, token.cos_at,
                                      token.sin_at, token.half, token.graph, self.stream_address)  # fmt: skip
        if code != 0:
            error = context.error(code, "a span")
            run.abandon()
            raise error
        return run

    def _put_list(self, shape: Shape, parts: Sequence[SpanPart], cos: np.ndarray, sin: np.ndarray,
                  logit_rows: Sequence[int]) -> None:  # fmt: skip
        layout, raw = spanplan.batch_list(self.layers, shape), self.workspace.mailbox.bytes_of("list")
        layout.put_rows(raw, parts_of([(part.n_rows, part.position) for part in parts]), cos, sin)
        pairs = [state.addresses() for states in zip(*(part.states for part in parts), strict=True) for state in states]
        layout.put_states(raw, np.fromiter(chain.from_iterable(pairs), np.uint64, 2 * len(pairs)))
        self.put_logit_rows(shape, logit_rows[: spanplan.HEAD_ROWS])

    def put_logit_rows(self, shape: Shape, rows: Sequence[int]) -> None:
        """Which rows' logits the next pass of the head makes, into the list in pinned memory."""
        at = spanplan.batch_list(self.layers, shape).n_bytes
        self.workspace.mailbox.bytes_of("list")[at : at + 4 * len(rows)].view(np.int32)[:] = rows

    def _start(self, shape: Shape, x: np.ndarray) -> tuple[int, Launch]:
        """Rows into pinned memory; the graph is launched, if it is one."""
        context, workspace = self.context, self.workspace
        if shape.n_rows <= _GRAPH_ROWS and shape.longest == 1:
            graph, launch = self._graph(shape)
        else:
            graph, launch = 0, self._launches(shape)
        code = context.launcher.start(x, workspace.mailbox.at("x"), self._stride, graph, self.stream_address)
        if code != 0:
            raise context.error(code, "a span")
        return graph, launch

    def _launches(self, shape: Shape) -> Launch:
        workspace = self.workspace
        workspace.reserve_scratch(spanplan.scratch_bytes(self.layers, self.head, shape))
        return Launch(self.context, workspace.stream, workspace.mailbox, self.layers, self.head, shape,
                      Scratch(*workspace.scratch), self.slots_at)  # fmt: skip

    def _graph(self, shape: Shape) -> tuple[int, Launch]:
        """The graph of a shape, captured anew where what it has addresses of has moved."""
        known = self.graphs.get(shape)
        if known is not None and known[0] == self.workspace.generation:
            self.graphs.move_to_end(shape)
            return int(known[1]), known[2]
        if known is not None:
            del self.graphs[shape]
            self.context.free_graph(known[1])
        launch = self._launches(shape)
        graph = self.context.capture(self.workspace.stream, launch.run)
        self.graphs[shape] = self.workspace.generation, graph, launch
        if len(self.graphs) > _GRAPHS:
            _, (_, oldest, _) = self.graphs.popitem(last=False)
            self.context.free_graph(oldest)
        return int(graph), launch


def make_layer(context: Context, index: int, mixer: Mixer, experts: Any, shared: tuple[int, Any] | None,
               spec: LayerSpec) -> tuple[Layer, list[int]]:  # fmt: skip
    """A whole layer, and the addresses of the memory that it takes beside the arena.

    Raises DeviceError, and nothing is taken then.
    """
    matrices = [matrix_layout(m.format, m.rows, m.cols) for m in (spec.router, spec.shared_gate)]
    layer = Layer(index, mixer, experts, shared, 0, 0, (0, matrices[0]), (0, matrices[1]))
    spanplan.require_fit(layer)
    arrays = (
        np.ascontiguousarray(spec.norm1, np.float32), np.ascontiguousarray(spec.norm2, np.float32),
        np.ascontiguousarray(spec.router.data), np.ascontiguousarray(spec.shared_gate.data),
    )  # fmt: skip
    taken: list[int] = []
    try:
        for array in arrays:
            taken.append(context.put(array, f"layer {index}"))
    except DeviceError:
        for at in taken:
            context.free(at)
        raise
    norm1, norm2, router, gate = taken
    return Layer(index, mixer, experts, shared, norm1, norm2, (router, matrices[0]), (gate, matrices[1])), taken


def _largest(rows: int, n_layers: int) -> Shape:
    """The batch that takes most scratch: all rows of one sequence, every layer asking."""
    return Shape(rows, 1, rows, mixers.covered(-(-rows // CHUNK)), tuple(range(n_layers)), spanplan.HEAD_ROWS)


def span_bytes(geometry: dict[str, Any], n_layers: int, with_head: bool) -> int:
    """Bytes that a span of so many layers takes of a card beside the arena, at most."""
    g = geometry
    hidden, q_width = g["hidden_size"], g["n_q_heads"] * g["head_dim"]
    dn_width = g["dn_v_heads"] * g["dn_v_dim"]
    slabs = [slab_layout("i8_row", hidden, g[dim]) for dim in ("moe_dim", "shared_dim")]
    router, gate = (matrix_layout("f32", n, hidden) for n in (g["n_experts"], 1))
    layers = []
    for is_attention, rows, width in (
        (True, 2 * q_width + 2 * g["n_kv_heads"] * g["head_dim"], q_width),
        (False, 2 * g["dn_k_heads"] * g["dn_k_dim"] + 2 * dn_width, dn_width),
    ):
        names = ("q_norm", "k_norm") if is_attention else ("conv", "exp_a_log", "dt_bias", "dn_norm")
        ba = None if is_attention else _Ba(2 * g["dn_v_heads"], hidden)
        mixer = Mixer(
            MixerSpec(is_attention, g, {}, ba), (0, matrix_layout("i8_row", rows, hidden)),
            (0, matrix_layout("i8_row", hidden, width)), dict.fromkeys(names, 0),
        )  # fmt: skip
        layers.append(Layer(0, mixer, slabs[0], (0, slabs[1]), 0, 0, (0, router), (0, gate)))
    head = Head(0, 0, matrix_layout("i8_row", g["vocab_size"], hidden)) if with_head else None
    per_layer = router.total_bytes + gate.total_bytes + 8 * hidden + 8 * g["n_experts"] + 1024
    beside = stream_bytes(slabs[0], MAX_ROWS, g["top_k"]) + (4 << 20)
    return spanplan.scratch_bytes(layers, head, _largest(MAX_ROWS, n_layers)) + n_layers * per_layer + beside


class _Ba:
    """Stands for the matrix of b and a where only shapes matter."""

    format = "f32"

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols, self.block_bytes = rows, cols, 4 * cols
