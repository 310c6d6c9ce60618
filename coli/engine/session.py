"""Engine and Session: a bound model that steps, and one conversation's state in it.

An engine owns the engine thread, its team, the network and the runner; it knows token ids and logits and
no text.  A session is a state that moves: ``prefill`` and ``step`` are the same call with other rows, so the
logits of a token do not depend on how the tokens before it were cut.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Callable, Sequence as Ids
from weakref import finalize

import numpy as np

from coli._core import kernels, step
from coli.engine.bind import bind_network
from coli.engine.program import Part, Program
from coli.engine.rope import RopeTable
from coli.engine.states import Held, StateKeeper, StatesLost
from coli.engine.worker import Cancelled, EngineThread, Job
from coli.errors import BackendError, ModelError, RequestError
from coli.log import logger

if TYPE_CHECKING:
    from coli.container.reader import Container

DEFAULT_CONTEXT = 8192
PREFILL_CHUNK = 512  # rows of one pass over the weights; more would not read fewer bytes per row worth the buffers
LOGITS_CHUNK = 32  # rows whose logits are made at once: 32 x 248,320 float32 are 32 MB


def choose_isa(name: str | None) -> str:
    """The kernel path to run: the named one, else the fastest that this CPU has."""
    if name is None:
        return kernels.best()
    runnable = [isa for isa in kernels.available() if isa != "amx"]  # amx is avx512vnni's prefill, not a choice
    if name not in runnable:
        raise BackendError(f"COLI_ISA={name}: this CPU and build run {', '.join(runnable)}; set one of these or none")
    return "amx" if name == "avx512vnni" and kernels.best() == "amx" else name


class Session:
    """The state of one sequence.  Made by ``Engine.session``; freed when nobody holds it.

    ids : the token ids taken in so far, in order.
    """

    def __init__(self, engine: Engine, sequence: step.Sequence, ids: list[int], held: Held) -> None:
        self._engine = engine
        self._sequence = sequence
        self._held = held  # what devices have of the state; the rest is the sequence's
        self.ids = ids
        finalize(self, engine._keeper.bury, held.by).atexit = False

    @property
    def position(self) -> int:
        """Tokens taken in so far."""
        return len(self.ids)

    @property
    def size_bytes(self) -> int:
        """Bytes of the recurrent state and of the K/V so far, wherever they are."""
        return self._sequence.recurrent_bytes + self._sequence.kv_bytes

    @property
    def engine(self) -> Engine:
        """The engine that this session is a state of."""
        return self._engine

    def prefill(self, ids: Ids[int]) -> np.ndarray:
        """Take in ids (at least one); return the logits behind the last, float32 (vocab_size,).

        Raises RequestError for an id out of range or more positions than the context.
        An interrupt leaves the session behind the last whole chunk.
        """
        return self._engine.feed(self, ids, every=False)[0]

    def step(self, token_id: int) -> np.ndarray:
        """Take in one id; return the logits behind it, float32 (vocab_size,)."""
        return self._engine.feed(self, (token_id,), every=False)[0]

    def copy(self) -> Session:
        """An independent session in the same state."""
        return self._engine.copy(self)

    def close(self) -> None:
        """Free the state now.  The session cannot be used afterwards."""
        self._engine._keeper.bury(self._held.by)
        self._sequence = None
        self.ids = []

    def check_open(self) -> None:
        """RequestError where the session was closed: an empty state must not answer for the one that is gone."""
        if self._sequence is None:
            raise RequestError("the session is closed; start a new one with Model.session()", "session")


class Engine:
    """A model bound to this machine.

    container : an open Container; it must stay open as long as the engine.
    threads, cpus : team size, and the CPU each worker is pinned to (None: unpinned).
    context : positions a session may hold; at most the model's max_position_embeddings.
    isa : kernel path, None for the best.
    beside : another engine, whose thread, team and kernel path this one uses instead of its own; it must outlive this
        one.  Two teams would be more threads than cores, which OpenMP answers by letting all of them sleep between
        regions.
    """

    def __init__(
        self,
        container: Container,
        *,
        threads: int | None = None,
        cpus: Ids[int] | None = None,
        context: int | None = None,
        isa: str | None = None,
        beside: Engine | None = None,
    ) -> None:
        config = container.config
        limit = config.max_position_embeddings
        if context is not None and not 1 <= context <= limit:
            raise RequestError(f"context is {context}, this model takes 1 to {limit} positions", "context")
        self.container = container
        self.config = config
        self.vocab_size = config.vocab_size
        self.context = context if context is not None else min(DEFAULT_CONTEXT, limit)
        self._rope = RopeTable(config.rotary_dim, config.rope_theta, self.context)
        self._net = bind_network(container, choose_isa(isa) if beside is None else beside._net.isa)
        self.program = Program(config)
        self._keeper = StateKeeper()
        self.padded_vocab = -(-self.vocab_size // 16) * 16
        self._is_guest = beside is not None
        if beside is not None:
            self._thread, self.team, self.cpus = beside._thread, beside.team, beside.cpus
            self._thread.call(self._settle)
            return
        self._thread = EngineThread()
        try:
            self._thread.call(self._start, threads or (len(cpus) if cpus else 1), cpus)
        except BaseException:
            self._thread.close()
            raise

    def _start(self, job: Job, threads: int, cpus: Ids[int] | None) -> None:
        """On the engine thread: make the team there, since an OpenMP pool belongs to its caller."""
        self.team = step.Team(threads, cpus)
        if not self.team.fp_mode_ok():
            raise BackendError(
                "another library changed this process's floating point mode (rounding, or subnormals flushed to "
                "zero); load coli before it, or without it"
            )
        self.cpus = tuple(cpus or ())
        self._settle(job)

    def _settle(self, job: Job) -> None:
        """On the engine thread: a runner on the team."""
        self.runner = step.Runner(self._net, self.team)
        self.thread_map = self.team.map()

    def leave_cpus(self, n: int) -> None:
        """Go on without the last n threads of the team, whose CPUs others need: uploads, a card's driver."""
        cpus = self.cpus[: len(self.cpus) - n]
        self._thread.call(self._start, max(1, self.team.n_threads - n), cpus or None)

    def begin(self, ids: np.ndarray, positions: int = 64) -> step.Sequence:
        """On the engine thread: a batch of one new sequence, for whoever lets ``runner`` do its operations one by one:
        benches, probes, traces.

        ids : int32, checked.   positions : that the sequence may reach.
        """
        self._rope.reach(len(ids))
        sequence = step.Sequence(self._net, positions)
        self.runner.begin([(sequence, len(ids))], ids, self._rope.cos, self._rope.sin)
        return sequence

    @property
    def is_cancelled(self) -> bool:
        """On the engine thread: whether nobody waits any more for what is being done."""
        return self._thread.job.cancelled

    def on_thread(self, fn: Callable[[], Any]) -> Any:
        """Run something between steps on the engine thread, where devices have their contexts."""
        return self._thread.call(lambda job: fn())

    # ---- sessions ----------------------------------------------------------------------------------

    def session(self) -> Session:
        """A session in the empty state."""
        return Session(self, step.Sequence(self._net, self.context), [], Held())

    def copy(self, session: Session) -> Session:
        """An independent copy of a session."""

        session.check_open()

        def copied(job: Job) -> Session:
            return Session(self, session._sequence.copy(), list(session.ids), self._keeper.copy(session._held))

        return self._thread.call(copied)

    def logits(self, ids: Ids[int]) -> np.ndarray:
        """Teacher-forced logits from an empty state: float32 (len(ids), vocab_size)."""
        return self.feed(self.session(), ids, every=True)

    def check_ids(self, ids: Ids[int], position: int = 0) -> np.ndarray:
        """ids as int32, refused with the place, the value and what would be right."""
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise RequestError(f"token ids must be a flat, non-empty list of integers, found {ids!r:.80}", "ids")
        wrong = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if wrong.size:
            at = int(wrong[0])
            raise RequestError(f"token id {int(array[at])} at place {at} is outside 0..{self.vocab_size - 1}", "ids")
        if position + array.size > self.context:
            raise RequestError(
                f"{position + array.size} tokens do not fit the context of {self.context}; "
                f"shorten the prompt or raise --context (this model takes {self.config.max_position_embeddings})",
                "context",
                "context_length_exceeded",
            )
        return np.ascontiguousarray(array, dtype=np.int32)

    @property
    def chunk_rows(self) -> int:
        """Rows of one pass over the weights."""
        return min(PREFILL_CHUNK, self.program.max_rows or PREFILL_CHUNK)

    def feed(self, session: Session, ids: Ids[int], *, every: bool) -> np.ndarray:
        """Take ids into a session; logits behind the last (1, V), or behind every one (T, V)."""
        session.check_open()
        checked = self.check_ids(ids, session.position)
        return self._thread.call(self._feed, session, checked, every)

    def _feed(self, job: Job, session: Session, ids: np.ndarray, every: bool) -> np.ndarray:
        n, chunk_rows = len(ids), self.chunk_rows
        out = np.empty((n if every else 1, self.vocab_size), np.float32)
        self.program.soon = job.soon
        try:
            for at in range(0, n, chunk_rows):
                if job.cancelled:
                    raise Cancelled
                chunk = ids[at : at + chunk_rows]
                last = at + len(chunk) == n
                rows = range(len(chunk)) if every else (len(chunk) - 1,) if last else ()
                self.forward([(session, chunk)], rows, out[at:] if every else out)
        finally:
            self.program.soon = None  # which holds the job, and so the session
        if n > 1 and not every and self.program.tier is not None:
            self.program.tier.after_prompt()
        return out

    def forward(self, parts: list[tuple[Session, np.ndarray]], rows: Ids[int], out: np.ndarray) -> None:
        """One step, on the engine thread: ids of several sessions at once.

        parts : (session, int32 ids), rows of a part being consecutive positions of its session.
        rows : the rows (over all parts) whose logits are wanted.   out : float32 (>= len(rows), vocab_size).
        Sessions move on only when the whole step succeeded.  After any other end their states are computed again, from
        their ids, when they are next used.
        """
        start = time.perf_counter()
        try:
            is_plain = self._layers(parts, rows, out)
            if self.program.has_logits:
                if not self.program.finite:
                    self._refuse_logits(parts)
                rows = ()
            exact = out.shape[1] == self.padded_vocab and out.flags.c_contiguous
            at_once = len(rows) if exact else LOGITS_CHUNK  # straight into `out`, or through a buffer of bounded size
            for at in range(0, len(rows), max(at_once, 1)):
                some = rows[at : at + at_once]
                target = out[at : at + len(some)] if exact else np.empty((len(some), self.padded_vocab), np.float32)
                if not self.program.run_head(self.runner, some, target):
                    self._refuse_logits(parts)
                if not exact:
                    out[at : at + len(some)] = target[:, : self.vocab_size]
        except BaseException:
            for session, _ in parts:
                session._held.stale = True
            raise
        self.runner.finish()
        for session, part_ids in parts:
            session.ids.extend(part_ids.tolist())
        if self.program.tier is not None and is_plain:
            self.program.tier.stepped(time.perf_counter() - start)

    @staticmethod
    def _refuse_logits(parts: list[tuple[Session, np.ndarray]]) -> None:
        place = max(s.position for s, _ in parts)
        raise ModelError(f"the logits at position {place} are NaN or infinite: the weights are damaged")

    def _layers(self, parts: list[tuple[Session, np.ndarray]], rows: Ids[int], out: np.ndarray) -> bool:
        """All layers of a batch, and its logits (``rows``, ``out``) where the program makes them at once.

        States that a device has lost are computed again first, or in between; False then: it took longer than a step.
        """
        keeper, losses, replayed, start = self._keeper, [], 0, time.monotonic()
        keeper.begin([session._held for session, _ in parts])
        while True:
            try:
                for session, ids in parts:
                    while not self._is_ready(session, len(ids)):
                        replayed += session.position
                        self._replay(session)
                self._pass(parts, rows, out, decoding=all(len(ids) == 1 for _, ids in parts))
                break
            except StatesLost as lost:
                losses.append(self.program.give_up(lost))
                for session, _ in parts:
                    session._held.stale = True
        if losses or replayed:
            again = f"the state of {replayed:,} tokens was computed again in {time.monotonic() - start:.1f} s"
            level = logging.WARNING if losses else logging.INFO
            logger("place").log(level, "%s", "; ".join([*dict.fromkeys(losses), again]))
        return not losses and not replayed

    def _is_ready(self, session: Session, n: int) -> bool:
        """Whether a session's states are where the program wants them, with room for n positions more."""
        held = session._held
        if not self._keeper.fits(held, self.program, session.position):
            return False
        self._keeper.ready(held, self.program, session.position, n)
        if session.position == 0:
            session._sequence.leave(held.layers)
        return not held.stale

    def _replay(self, session: Session) -> None:
        """Compute a session's state again, from its ids.  Raises StatesLost, and Cancelled between two chunks."""
        keeper, ids = self._keeper, np.array(session.ids, np.int32)
        keeper.reset(session._held)
        session._sequence = step.Sequence(self._net, self.context)
        chunk_rows = self.chunk_rows
        for at in range(0, len(ids), chunk_rows):
            if self._thread.job.cancelled:
                raise Cancelled
            chunk = ids[at : at + chunk_rows]
            keeper.ready(session._held, self.program, at, len(chunk))
            if session._held.stale:  # no room after all: from the beginning, with less on the device
                return
            if at == 0:
                session._sequence.leave(session._held.layers)
            self._pass([(session, chunk)], decoding=None)
            self.runner.finish()

    def _pass(
        self,
        parts: list[tuple[Session, np.ndarray]],
        rows: Ids[int] = (),
        out: np.ndarray | None = None,
        *,
        decoding: bool | None,
    ) -> None:
        """All layers of a batch whose states are ready; the sequences stay where they are."""
        runner, program, rope = self.runner, self.program, self._rope
        ids = parts[0][1] if len(parts) == 1 else np.concatenate([p[1] for p in parts])
        rope.reach(max(s._sequence.position + len(i) for s, i in parts))
        runner.begin([(s._sequence, len(i)) for s, i in parts], ids, rope.cos, rope.sin)
        placed, row = [], 0
        for session, part_ids in parts:
            placed.append(Part(row, len(part_ids), session._sequence.position, session._held))
            row += len(part_ids)
        program.begin(runner, placed, rope.cos, rope.sin, rows, out)
        program.decoding = decoding
        program.run(runner)

    # ---- about it ------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What runs here: kernel path, threads and where they are, context, weight bytes read so far."""
        return {
            "isa": "avx512vnni" if self._net.isa == "amx" else self._net.isa,
            "amx": self._net.isa == "amx",  # prefill's products; the same bits
            "threads": self.team.n_threads,
            "openmp": step.has_openmp(),
            "thread_map": self.thread_map,
            "parked_times": self.team.parked_times,
            "context": self.context,
            "weight_bytes_read": self.runner.weight_bytes,
        }

    def close(self) -> None:
        """End the engine thread, where it is this engine's.  Sessions of this engine cannot be used afterwards."""
        if not self._is_guest:
            self._thread.close()
