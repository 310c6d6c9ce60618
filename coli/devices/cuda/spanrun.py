"""A batch on its way through a span: the host's side of the mailbox, and what it fetches at the end.

Waiting and copying happen without the GIL (``_core/cudalaunch.pyx``); a question costs a few lines of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from coli.devices.base import Asked, DeviceError
from coli.devices.cuda import spanplan
from coli.devices.cuda.spanplan import Launch, Shape

if TYPE_CHECKING:
    from coli.devices.cuda.span import CudaSpan


class Answers:
    """What runs of one shape look at in pinned memory, taken once: every line between two layers costs.

    places : of the asking layers.   always : by layer, 1 where the host computes the shared expert.
    top_idx, missing : as `Mailbox.choices` gives them.   asked : the questions of the asking layers.
    into, shared_into : where an answer goes, and the shared expert's.
    """

    def __init__(self, span: CudaSpan, shape: Shape) -> None:
        mailbox, n, hidden, jobs = span.workspace.mailbox, shape.n_rows, span.hidden, shape.n_rows * span.top_k
        self.places = np.array(shape.asks, np.int32)
        self.always = np.array([layer.shared is None for layer in span.layers], np.uint8)
        self.top_idx, external, self.missing = mailbox.choices(len(span.layers), n, span.top_k)
        self.asked: list[Asked] = []
        if shape.asks:
            xn = mailbox.floats("xn", n, hidden)
            self.asked = [
                Asked(place, xn, self.top_idx[place], external[place], bool(self.always[place])) for place in shape.asks
            ]
            self.into = mailbox.floats("answers", jobs, hidden)
            self.shared_into = mailbox.floats("answers", n, hidden, jobs * hidden)


class SpanRun:
    """A batch on its way through a span: `ask` and `answer` in turn, then `finish`; or `abandon`.

    finite : behind `finish`, whether every logit is neither NaN nor infinite.
    """

    def __init__(self, span: CudaSpan, shape: Shape, logit_rows: Sequence[int], answers: Answers) -> None:
        mailbox = span.workspace.mailbox
        self.finite = True
        self._span = span
        self._workspace = span.workspace
        self._context = span.context
        self._mailbox = mailbox
        self._shape = shape
        self._logit_rows = logit_rows
        self.launch: Launch | None = None
        self._number, self._done = mailbox.asked, mailbox.done  # as no run is under way
        self._next = 0  # of the asking layers
        self._owes = False  # the card waits for an answer
        self._answers = answers
        self._stream = span.stream_address
        self._pieces: Iterator[None] | None = None  # of a batch whose card does not wait for its host

    @property
    def is_stepwise(self) -> bool:
        """Whether nothing on the card waits while the host answers."""
        return self._pieces is not None

    def launched(self) -> None:
        """Launch the batch, which is no graph's: all of it, or up to the first question."""
        if self._shape.asks and self._shape.n_rows >= spanplan.STEP_ROWS:
            self._pieces = self.launch.pieces(stops=True)
            self._go_on()
        else:
            self.launch.run()

    def _go_on(self) -> None:
        """Launch what is behind an answer, up to the next question or the end."""
        try:
            next(self._pieces, None)
        except DeviceError:
            self.abandon()
            raise

    def ask(self) -> Asked | None:
        """Wait for the next layer that lacks something; None once the card needs nobody any more."""
        self._require_open()
        if self._owes:
            raise DeviceError(f"{self._context.name}: asked again before the answer", "launch")
        if self._next >= len(self._shape.asks):
            return None
        views, n = self._answers, len(self._shape.asks)
        while True:
            # a question that is behind a piece which was not launched yet does not come
            places = views.places if self._pieces is None else views.places[: self._next + 1]
            code, at = self._context.launcher.ask(
                self._mailbox.asked_at, self._number + 1 & 0xFFFFFFFF, self._next, places, views.always,
                views.missing, self._stream,
            )  # fmt: skip
            if code != 0:
                raise self._failed(code)
            if at < len(places):
                self._next, self._owes = at + 1, True
                return views.asked[at]
            if self._pieces is None:
                self._next = n
                return None
            self._next = at
            self._go_on()
            if at == n:
                return None

    def answer(self, expert_y: np.ndarray, slot_of: np.ndarray, shared_y: np.ndarray | None) -> None:
        """Give what was asked for; the card goes on.  The arrays are free again on return."""
        self._require_open()
        views = self._answers
        asked = views.asked[self._next - 1]
        if asked.shared and shared_y is None:
            raise DeviceError(f"{self._context.name}: the shared expert of a layer was asked for", "launch")
        self._context.launcher.answer(
            expert_y, slot_of, asked.external, views.into, shared_y, views.shared_into, self._mailbox.answered_at,
            self._number + self._next & 0xFFFFFFFF,
        )  # fmt: skip
        self._owes = False
        if self._pieces is not None:
            self._go_on()

    def finish(
        self, x_out: np.ndarray | None, logits: np.ndarray | None, soon: Callable[[], None] | None = None
    ) -> np.ndarray:
        """Wait for the end: the experts chosen, int32 (layers, T, top_k).

        soon : called where the end is near, a little earlier than it.
        """
        self._require_open()
        if logits is not None:
            self._take_logits(logits, soon)
        else:
            self._wait()
            self._mailbox.n_unwritten = 0
        if self._mailbox.late:
            self._end()
            raise DeviceError(f"{self._context.name}: the host's answer came too late", "launch")
        n, hidden, copy_out = self._shape.n_rows, self._span.hidden, self._context.launcher.copy_out
        if x_out is not None:
            if self._span.head is not None:
                self._fetch_x()
            copy_out(self._mailbox.floats("x_out", n, hidden), x_out)
        chosen = np.array(self._answers.top_idx)
        self._end()
        return chosen

    def _wait(self) -> None:
        """Until the run's end, or what was launched behind it."""
        self._done = self._done + 1 & 0xFFFFFFFF
        code = self._context.launcher.wait(self._mailbox.done_at, self._done, self._stream)
        if code != 0:
            raise self._failed(code)

    def _fetch_x(self) -> None:
        """x to pinned memory: a span with a head does not send it by itself."""
        try:
            self.launch.send_x()
        except DeviceError:
            self.abandon()
            raise
        self._wait()

    def _take_logits(self, out: np.ndarray, soon: Callable[[], None] | None) -> None:
        """Move the logits out; those that did not fit the pinned memory are made now, pass by pass."""
        vocabulary, step = self._span.head.layout.rows, spanplan.HEAD_ROWS
        for at in range(0, len(self._logit_rows), step):
            rows = self._logit_rows[at : at + step]
            if at:
                self._span.put_logit_rows(self._shape, rows)
                try:
                    self.launch.more_logits(len(rows))
                except DeviceError:
                    self.abandon()
                    raise
            self._done = self._done + 1 & 0xFFFFFFFF
            code, finite = self._context.launcher.take_logits(
                self._mailbox.done_at, self._done, self._stream, self._mailbox.at("logits"), vocabulary,
                out[at : at + len(rows)], soon if at + step >= len(self._logit_rows) else None,
            )  # fmt: skip
            if code != 0:
                raise self._failed(code)
            self.finite = self.finite and finite

    def abandon(self) -> None:
        """The host will not answer: let the card run to its end and wait for it.  Safe to call at any time."""
        if self._workspace.open is not self:
            return
        self._mailbox.abort(True)
        self._mailbox.n_unwritten = 0
        try:
            if self._context.lost is None:
                self._context.set_current()
                self._context.synchronize(self._workspace.stream)
        except DeviceError:
            pass  # the card is lost, as every later call will say
        self._end()

    def _failed(self, code: int) -> DeviceError:
        """The run is over; what went wrong."""
        error = self._context.error(code, "a span")
        self.abandon()
        return error

    def _require_open(self) -> None:
        if self._workspace.open is not self:
            self._context.require_alive()
            raise DeviceError(f"{self._context.name}: this run of a span is over", "launch")

    def _end(self) -> None:
        self._workspace.open = None
        self._mailbox.abort(False)
