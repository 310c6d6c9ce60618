"""Who computes next: many prompts and answers, one engine.

One thread, asleep while there is nothing to do.  A turn of its loop is at most one pass for pieces of prompts, then one
step in which every running answer gets its next token from a single pass over the weights.  The engine gives each row
the bits that it has alone, so batching, the size of the pieces and reused states change the time and nothing else.

It knows ids and answers (`coli.engine.generate.Answer`), and no HTTP, no JSON and no event loop: what happens is handed
to ``deliver``, once a turn.  Invariants: sessions are touched by this thread alone; a cancelled job is not computed
beyond the pass under way; a failure ends the job that caused it and no other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coli.errors import ColiError, RequestError
from coli.log import logger
from coli.server.memory import give_back
from coli.server.prefixes import PrefixCache

if TYPE_CHECKING:
    from coli.engine.generate import Answer, FinishReason, Token
    from coli.engine.sampler import Sample
    from coli.engine.session import Engine, Session
    from coli.server.sampling import PromptScorer

SCORE_ROWS = 32  # rows of a prompt whose logits are wanted at once: 32 x 248,320 float32 are 32 MB
_FIRST_ROWS = 32  # of the first piece of all: how fast this machine is, is not known yet
_MOST_ROWS = 512  # more rows a pass would not read fewer bytes a row worth the wait
_ALONE_S, _BESIDE_S = 0.5, 0.2  # what a piece of a prompt may take, alone and while answers wait for their next token

_log = logger("serve")


class Busy(ColiError):
    """The queue is full.  retry_s : seconds after which it is worth another try."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Stopping(ColiError):
    """The server ends: it computes nothing further and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class Event(NamedTuple):
    """Something that happened to a job: exactly one of a token, scores of its prompt, an end, an error.

    index : the answer it is about.   finish_reason : with an answer's last event.
    """

    index: int = 0
    token: Token | None = None
    scores: Sequence[Sample] | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """A prompt and the answers to it.

    prompt : int32 (n,).   answers : one or more, each with a sampler of its own.
    marks : positions at which a state is worth keeping, ascending.
    scorer : where given, log-probabilities of the prompt's own ids come too, and nothing is reused.
    sink : gets the job's events, on the thread on which `Scheduler`'s ``deliver`` runs it.
    reused_tokens : how much of the prompt came from an earlier state.   *_at : monotonic seconds; *_s : durations.
    """

    prompt: np.ndarray
    answers: Sequence[Answer]
    sink: Callable[[Event], None]
    marks: Sequence[int] = ()
    scorer: PromptScorer | None = None
    reused_tokens: int = 0
    queued_at: float = 0.0
    started_at: float | None = None
    prefill_s: float = 0.0
    first_at: float | None = None
    last_at: float | None = None
    dropped: set[int] = field(default_factory=set)
    cancelled: bool = False


class _Running:
    """One answer that has a slot, and its session."""

    __slots__ = ("job", "index", "session")

    def __init__(self, job: Job, index: int, session: Session) -> None:
        self.job = job
        self.index = index
        self.session = session

    @property
    def answer(self) -> Answer:
        return self.job.answers[self.index]


class _Prefill:
    """A sequence of ids on its way into a session: a prompt, or an answer so far whose state was lost.

    indexes : of the job's answers that sample their next token at its end.
    alone : whether it shares its passes with no other, since a pass that it shared failed.
    """

    __slots__ = ("job", "ids", "indexes", "session", "alone", "scores")

    def __init__(
        self, job: Job, ids: np.ndarray, indexes: list[int], session: Session, *, alone: bool = False
    ) -> None:
        self.alone = alone
        self.job = job
        self.ids = ids
        self.indexes = indexes
        self.session = session
        self.scores: list[Sample] = []


class Scheduler:
    """Runs jobs until it is closed.

    slots : answers that are computed at once.   queue : jobs that may wait.
    prefix_bytes, prefix_every : the budget of kept states, and the distance in tokens at which long prompts leave one.
    deliver : gets the (job, event) pairs of one turn, on the scheduler's thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int,
        queue: int,
        prefix_bytes: int,
        prefix_every: int,
        deliver: Callable[[list[tuple[Job, Event]]], None],
    ) -> None:
        self._engine = engine
        self.slots = slots
        self.queue = queue
        self.prefixes = PrefixCache(prefix_bytes)
        self._every = prefix_every
        self._deliver = deliver
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._prefills: deque[_Prefill] = deque()
        self._running: list[_Running] = []
        self._events: list[tuple[Job, Event]] = []
        self._closing = False
        self._pace = _Pace()
        self._vocab = engine.vocab_size
        self._padded = -(-engine.vocab_size // 16) * 16  # the width that the engine fills without a copy
        self._logits = np.empty((max(slots, 1), self._padded), np.float32)
        self._seconds_a_job = 1.0
        self.counts = {
            name: 0
            for name in (
                "prefill_passes", "decode_passes", "prompt_tokens", "reused_tokens", "tokens", "finished", "cancelled",
                "failed", "refused",
            )
        }  # fmt: skip
        self._thread = threading.Thread(target=self._loop, name="coli-scheduler", daemon=True)
        self._thread.start()

    # ---- from other threads ---------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises Busy where the queue is full, Stopping at the end, RequestError for more answers than there are slots.
        """
        if len(job.answers) > self.slots:
            raise RequestError(
                f"n is {len(job.answers)}; this server computes {self.slots} answers at once (--parallel)", param="n"
            )
        job.queued_at = time.monotonic()
        with self._wake:
            if self._closing:
                raise Stopping()
            if len(self._waiting) >= self.queue + max(self.slots - self._used(), 0):
                self.counts["refused"] += 1
                wait_s = self._seconds_a_job * (1 + len(self._waiting) / self.slots)
                raise Busy(
                    f"{len(self._waiting)} requests are waiting already, which is all that may (--queue)",
                    min(max(int(wait_s + 0.999), 1), 60),
                )
            self._waiting.append(job)
            self._wake.notify()

    def drop(self, job: Job, index: int) -> None:
        """One answer of a job is wanted no more; no event tells of its end."""
        job.dropped.add(index)

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more.  May be called at any time, also after its end."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def stats(self) -> dict[str, Any]:
        """Slots in use, jobs waiting, what was counted since the start, and the kept states."""
        return {
            "slots": self.slots,
            "running": self._used(),
            "waiting": len(self._waiting),
            **self.counts,
            "prefixes": self.prefixes.stats(),
        }

    def stop(self) -> None:
        """Compute nothing beyond the turn under way; what is still running or waiting is told so.  Does not wait."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def close(self) -> None:
        """Stop, and wait for the thread's end.  May be called twice."""
        self.stop()
        self._thread.join()

    # ---- the loop -------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a bug of ours: say so to everybody who waits, and take no more
            _log.error("the scheduler failed: %s: %s", type(error).__name__, error, exc_info=True)
            with self._wake:
                self._closing = True
        self._end_all(Stopping())

    def _turn(self) -> bool:
        with self._wake:
            while not (self._closing or self._waiting or self._prefills or self._running):
                self._wake.wait()
            if self._closing:
                return False
            admitted = self._admit()
        for job in admitted:
            self._start(job)
        self._drop_unwanted()
        if self._prefills:
            self._prefill_step()
        if self._running:
            self._decode_step()
        self._hand_over()
        give_back()
        return True

    def _hand_over(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _emit(self, job: Job, **what: Any) -> None:
        self._events.append((job, Event(**what)))

    def _admit(self) -> list[Job]:
        """Jobs that get slots now, in the order in which they came; cancelled ones are dropped."""
        admitted = []
        used = self._used()
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._count_cancelled(job)
        while self._waiting and used + len(self._waiting[0].answers) <= self.slots:
            job = self._waiting.popleft()
            used += len(job.answers)
            admitted.append(job)
        return admitted

    def _used(self) -> int:
        """Slots in use.  Off the scheduler's thread a snapshot that may be a turn old."""
        return len(self._running) + sum(len(p.indexes) for p in list(self._prefills))

    def _start(self, job: Job) -> None:
        job.started_at = time.monotonic()
        indexes = [i for i, answer in enumerate(job.answers) if answer.finish_reason is None]
        if not indexes and job.scorer is None:
            self._finish_empty(job)
            return
        try:
            session = self._session_for(job)
        except (ColiError, MemoryError) as error:
            self._fail(job, error)
            return
        self.counts["prompt_tokens"] += len(job.prompt)
        self.counts["reused_tokens"] += job.reused_tokens
        self._prefills.append(_Prefill(job, job.prompt, indexes, session))

    def _session_for(self, job: Job) -> Session:
        kept = None if job.scorer is not None else self.prefixes.find(job.prompt)
        if kept is None:
            return self._engine.session()
        job.reused_tokens = len(kept.ids)
        return kept.copy()

    def _finish_empty(self, job: Job) -> None:
        for i, answer in enumerate(job.answers):
            self._emit(job, index=i, finish_reason=answer.finish_reason)
        self.counts["finished"] += 1

    def _drop_unwanted(self) -> None:
        """Take out what nobody waits for.  Its state is whole, and may serve a later prompt."""
        for prefill in [p for p in self._prefills if p.job.cancelled]:
            self._prefills.remove(prefill)
            self.prefixes.keep(prefill.session)
            self._count_cancelled(prefill.job)
        unwanted = [r for r in self._running if r.job.cancelled or r.index in r.job.dropped]
        if unwanted:
            self._running = [r for r in self._running if r not in unwanted]
            for running in unwanted:
                self.prefixes.keep(running.session)
            for job in dict.fromkeys(r.job for r in unwanted):
                if job.cancelled:
                    self._count_cancelled(job)
                else:
                    self._finish_if_done(job)

    def _count_cancelled(self, job: Job) -> None:
        self.counts["cancelled"] += 1
        tokens = sum(len(answer.ids) for answer in job.answers)
        why = "the server is stopping" if self._closing else "the client left"
        _log.info("cancelled: %s; prompt %d tokens, answer %d tokens so far", why, len(job.prompt), tokens)

    # ---- prompts --------------------------------------------------------------------------------------------

    def _prefill_step(self) -> None:
        """One pass for pieces of prompts: as many as its rows allow, so that short ones that come together go together.

        Prompts take turns, so that a short one need not wait for a long one's end.
        """
        pieces = self._pieces()
        parts = [(prefill.session, prefill.ids[len(prefill.session.ids) : end]) for prefill, end in pieces]
        first, scorer = pieces[0][0], pieces[0][0].job.scorer
        if scorer is not None:
            rows = list(range(len(parts[0][1])))
            logits = np.empty((len(rows), self._padded), np.float32)
        else:
            ends = np.cumsum([len(ids) for _, ids in parts]) - 1
            rows = [int(row) for row, (prefill, end) in zip(ends, pieces, strict=True) if end == len(prefill.ids)]
            logits = self._logits
        start = time.monotonic()
        try:
            self._forward(parts, rows, logits)
        except Exception as error:
            self._separate_prefills([prefill for prefill, _ in pieces], error)
            return
        took_s = time.monotonic() - start
        self.counts["prefill_passes"] += 1
        self._pace.note(sum(len(ids) for _, ids in parts), took_s)
        if scorer is not None:
            self._score(first, pieces[0][1], logits)
        wanted = iter(range(len(rows)) if scorer is None else [len(rows) - 1])
        for prefill, end in pieces:
            prefill.job.prefill_s += took_s
            self._prefills.remove(prefill)
            if end == len(prefill.ids):
                self._begin_answers(prefill, logits[next(wanted), : self._vocab])
            else:
                if self._is_cut(prefill.job, end):
                    self._keep_copy(prefill.session)
                self._prefills.append(prefill)

    def _pieces(self) -> list[tuple[_Prefill, int]]:
        """The prompts of the next pass and where each one's piece ends: by the pace, first come first."""
        first = self._prefills[0]
        if first.job.scorer is not None:
            return [(first, min(len(first.session.ids) + SCORE_ROWS, len(first.ids)))]
        # more rows than a card takes at once would go through it layer by layer
        left = min(self._pace.rows(_BESIDE_S if self._running else _ALONE_S), self._engine.chunk_rows)
        pieces = []
        for prefill in self._prefills:
            if prefill.job.scorer is not None or left <= 0 or (prefill.alone and pieces):
                continue
            at = len(prefill.session.ids)
            end = self._piece_end(prefill, at, left)
            pieces.append((prefill, end))
            left -= end - at
            if prefill.alone:
                break
        return pieces

    def _piece_end(self, prefill: _Prefill, at: int, rows: int) -> int:
        """Where a piece of at most some rows ends: not beyond a place at which a state is to be kept."""
        ends = [at + rows, len(prefill.ids)]
        if self.prefixes.budget_bytes:
            ends += [(at // self._every + 1) * self._every, *(mark for mark in prefill.job.marks if mark > at)]
        return min(ends)

    def _score(self, prefill: _Prefill, end: int, logits: np.ndarray) -> None:
        """Log-probabilities of the ids that stand behind a piece's rows; behind the last of a prompt there is none."""
        scorer = prefill.job.scorer
        assert scorer is not None
        begin = end - len(logits)
        for row, token_id in enumerate(prefill.ids[begin + 1 : end + 1].tolist()):
            prefill.scores.append(scorer.score(logits[row, : self._vocab], token_id))

    def _separate_prefills(self, prefills: list[_Prefill], error: Exception) -> None:
        """A pass of prompts failed: alone, its job ends; among others, each begins again and is tried alone."""
        if len(prefills) == 1:
            self._prefills.remove(prefills[0])
            self._fail(prefills[0].job, error)
            return
        _log.warning("a step of %d prompts failed (%s); each is tried alone", len(prefills), error)
        for prefill in prefills:
            self._prefills.remove(prefill)
            session = self._engine.session()
            self._prefills.append(_Prefill(prefill.job, prefill.ids, prefill.indexes, session, alone=True))

    def _is_cut(self, job: Job, position: int) -> bool:
        return job.scorer is None and (position in job.marks or position % self._every == 0)

    def _keep_copy(self, session: Session) -> None:
        if session.size_bytes <= self.prefixes.budget_bytes:
            try:
                self.prefixes.keep(session.copy())
            except MemoryError:  # what is kept for later may be done without
                _log.warning("no memory to keep a prompt's state; lower --prefix-cache")

    def _begin_answers(self, prefill: _Prefill, logits: np.ndarray) -> None:
        """The prompt is in: its answers get sessions of their own and sample their first (or next) token."""
        job = prefill.job
        if job.scorer is not None:
            self._emit(job, scores=prefill.scores)
        if not prefill.indexes:  # nothing but scores was asked for
            self._finish_empty(job)
            return
        try:
            sessions = [prefill.session, *(prefill.session.copy() for _ in prefill.indexes[1:])]
        except MemoryError as error:
            self._fail(job, error)
            return
        for index, session in zip(prefill.indexes, sessions, strict=True):
            running = _Running(job, index, session)
            self._running.append(running)
            if not self._push(running, logits):
                return

    # ---- answers --------------------------------------------------------------------------------------------

    def _decode_step(self) -> None:
        """One pass for all running answers."""
        running = self._running
        parts = [(r.session, np.array([r.answer.ids[-1]], np.int32)) for r in running]
        logits = self._logits[: len(parts)]
        try:
            self._forward(parts, range(len(parts)), logits)
        except Exception as error:
            self._separate(running, error)
            return
        self.counts["decode_passes"] += 1
        for row, one in enumerate(list(running)):
            if one in self._running:  # an answer of the same job may just have failed
                self._push(one, logits[row, : self._vocab])

    def _forward(self, parts: list[tuple[Session, np.ndarray]], rows: Sequence[int], out: np.ndarray) -> None:
        self._engine.on_thread(lambda: self._engine.forward(parts, rows, out))

    def _separate(self, running: list[_Running], error: Exception) -> None:
        """A pass failed.  Alone, its job ends; among others, each goes through a pass of its own to find whose it is.

        The states of all of them are lost with the pass.  They are computed again from the ids, to the same bits.
        """
        self._running = []
        if len(running) == 1:
            self._fail(running[0].job, error)
            return
        _log.warning("a step of %d answers failed (%s); each is tried alone", len(running), error)
        for one in running:
            ids = np.concatenate([one.job.prompt, np.array(one.answer.ids, np.int32)])
            self._prefills.append(_Prefill(one.job, ids, [one.index], self._engine.session(), alone=True))

    def _push(self, running: _Running, logits: np.ndarray) -> bool:
        """Sample one token; False where that failed, which ends the job."""
        job = running.job
        try:
            token = running.answer.push(logits)
        except ColiError as error:
            self._fail(job, error)
            return False
        job.last_at = time.monotonic()
        if job.first_at is None:
            job.first_at = job.last_at
        self.counts["tokens"] += 1
        reason = running.answer.finish_reason
        self._emit(job, index=running.index, token=token, finish_reason=reason)
        if reason is not None:
            self._running.remove(running)
            self.prefixes.keep(running.session)
            self._finish_if_done(job)
        return True

    def _finish_if_done(self, job: Job) -> None:
        if not any(r.job is job for r in self._running) and not any(p.job is job for p in self._prefills):
            self.counts["finished"] += 1
            took_s = time.monotonic() - (job.started_at or job.queued_at)
            self._seconds_a_job += 0.2 * (took_s - self._seconds_a_job)

    def _fail(self, job: Job, error: Exception) -> None:
        self._running = [r for r in self._running if r.job is not job]
        self._prefills = deque(p for p in self._prefills if p.job is not job)
        self.counts["failed"] += 1
        _log.error("a request failed: %s", error if isinstance(error, ColiError) else repr(error))
        self._emit(job, error=error)

    def _end_all(self, error: ColiError) -> None:
        jobs = dict.fromkeys([r.job for r in self._running] + [p.job for p in self._prefills] + [*self._waiting])
        self._running, self._prefills, self._waiting = [], deque(), deque()
        for job in jobs:
            self._emit(job, error=error)
        self._hand_over()


class _Pace:
    """How many rows of a prompt a pass may have, from how long the last passes took."""

    def __init__(self) -> None:
        self._rows_s: float | None = None

    def rows(self, seconds: float) -> int:
        if self._rows_s is None:
            return _FIRST_ROWS
        return min(max(int(self._rows_s * seconds), _FIRST_ROWS), _MOST_ROWS)

    def note(self, rows: int, seconds: float) -> None:
        if rows >= _FIRST_ROWS:  # a short end of a prompt says little about a long piece
            speed = rows / max(seconds, 1e-6)
            self._rows_s = speed if self._rows_s is None else 0.5 * (self._rows_s + speed)
