"""Experts in passing: slabs from host memory through pinned staging into a ring of scratch slots, computed there.

While the host answers a span, threads of the host fill pinned buffers from the container's mapped pages
(the narrowest place: one thread copies about 9 GB/s of the bus' 50), the card's copy engine moves them on, and its
cores compute a wave of experts while the next one comes.  What comes of them they write themselves to where the span
looks for the host's answer, so the host moves none of it.  The kernels are those of every expert group, so the bits are
the CPU's.

Of the span nothing waits on the card meanwhile: a batch of so many rows is launched piece by piece (`spanplan.Launch`),
and the next piece comes when the host has answered.  Behind a kernel that waits for the host nothing here would be sure
to run: kernels that were let start early fill the cores, and a kernel's first launch waits for all others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from threading import Event, Lock
from typing import Any

import numpy as np

from coli._core.cudalaunch import TIMED_OUT
from coli.container.layout import FORMATS, SlabLayout, round_up
from coli.devices.base import Asked, DeviceError
from coli.devices.cuda import plan
from coli.devices.cuda.context import ANSWER_LIMIT_S, Acts, Context, Pinned
from coli.threads.side import SideThread

_THREADS = 2  # the CPUs that a card wants beside the team (device.CudaDevice.host_cpus)
_BUFFERS = 2  # of each thread: one is filled while the other crosses the bus
_PIECE_BYTES = 2 << 20
_MOST_SLOTS, _SLOTS_BYTES = 8, 32 << 20


def _ring(slab_bytes: int) -> int:
    """Slots of the ring: two waves."""
    return 2 * max(1, min(_MOST_SLOTS, _SLOTS_BYTES // slab_bytes) // 2)


def _h_bytes(slab: SlabLayout, max_rows: int) -> int:
    """Scratch of one wave in which every row chose every expert."""
    return plan.acts_at(0, _ring(slab.total_bytes) // 2 * max_rows, slab.down.n_groups)[1]


def _list_bytes(max_rows: int, top_k: int) -> int:
    """A job and, at worst, a tile for every rank."""
    return max_rows * top_k * (plan.JOB.itemsize + plan.TILE.itemsize)


def stream_bytes(slab: SlabLayout, max_rows: int, top_k: int) -> int:
    """Memory of the card that a `Streamer` takes."""
    ring = _ring(slab.total_bytes) * round_up(slab.total_bytes)
    return ring + round_up(_h_bytes(slab, max_rows)) + round_up(_list_bytes(max_rows, top_k))


class Streamer:
    """What the streams of one card use, one after the other.

    slab : of the experts.   max_rows, top_k : of the largest batch.
    Raises DeviceError and takes nothing where the kernels do not take such experts, or memory is short.
    """

    def __init__(self, context: Context, slab: SlabLayout, max_rows: int, top_k: int) -> None:
        if not FORMATS[slab.format].is_blocks:
            raise DeviceError(f"{context.name}: experts of format {slab.format} are not R16 blocks", "launch")
        self.context, self.slab = context, slab
        self.n_slots = _ring(slab.total_bytes)
        self.wave = self.n_slots // 2
        self._stride = round_up(slab.total_bytes)
        self._held = ExitStack()
        self.threads: list[SideThread] = []
        try:
            self._take(max_rows, top_k)
        except BaseException:
            self.close()
            raise

    def _take(self, max_rows: int, top_k: int) -> None:
        context, held, what = self.context, self._held, "experts in passing"

        def room(n_bytes: int) -> int:
            at = context.alloc(n_bytes, what)
            held.callback(context.free, at)
            return at

        def pin(n_bytes: int) -> Pinned:
            pinned = context.pin(n_bytes, what)
            held.callback(context.unpin, pinned)
            return pinned

        def event() -> Any:
            made = context.event()
            held.callback(context.free_event, made)
            return made

        context.set_current()
        list_bytes = _list_bytes(max_rows, top_k)
        self._slots_at = room(self.n_slots * self._stride)
        self._h_at, self._list_at = room(_h_bytes(self.slab, max_rows)), room(list_bytes)
        self._list = pin(list_bytes)
        piece_bytes = min(_PIECE_BYTES, self._stride)
        self._buffers = [[(pin(piece_bytes), event()) for _ in range(_BUFFERS)] for _ in range(_THREADS)]
        self._copied, self._freed = [event(), event()], [event(), event()]  # of even and of odd waves
        self._copies = context.stream()
        held.callback(context.free_stream, self._copies)
        self.stream = context.stream()
        held.callback(context.free_stream, self.stream)
        self.threads = [SideThread(f"coli-stream-{number}") for number in range(_THREADS)]

    def begin(
        self, acts: Acts, answers_at: int, asked: Asked, experts: np.ndarray, slabs: Sequence[np.ndarray]
    ) -> Stream:
        """Start experts, some of those asked for.

        acts : the rows of the batch, quantised, on the card.   answers_at : where rank j of row t goes, as row
        t * top_k + j of float32 (T * top_k, hidden).
        """
        self.context.set_current()
        n = len(slabs)
        if any(slab.size < self.slab.total_bytes for slab in slabs):
            raise DeviceError(f"{self.context.name}: an expert of fewer than {self.slab.total_bytes:,} bytes", "launch")
        turn_of = np.full(int(asked.top_idx.max()) + 1, n, np.intp)
        turn_of[experts] = np.arange(n)
        turns = np.where(asked.external.reshape(-1) == 0, turn_of[asked.top_idx.reshape(-1)], n)
        ranks = np.argsort(turns, kind="stable")[: int(np.count_nonzero(turns < n))]
        turns = turns[ranks]
        jobs = np.empty(len(ranks), plan.JOB)
        jobs["slab"] = self._slots_at + turns.astype(np.uint64) % np.uint64(self.n_slots) * np.uint64(self._stride)
        jobs["row"], jobs["out"] = ranks // asked.top_idx.shape[1], ranks
        tiles, waves = _cut(np.bincount(turns, minlength=n).tolist(), self.wave)
        self._put_list(jobs, tiles)
        return Stream(self, acts, answers_at, asked.external, ranks, slabs, waves, len(jobs))

    # ---- pieces of it ----------------------------------------------------------------------------------------

    def _put_list(self, jobs: np.ndarray, tiles: np.ndarray) -> None:
        """Jobs, and tiles behind them, to the card."""
        n_bytes = jobs.nbytes + tiles.nbytes
        self._list.array[: jobs.nbytes] = jobs.view(np.uint8)
        self._list.array[jobs.nbytes : n_bytes] = tiles.view(np.uint8)
        self.context.copy_in(self._list_at, self._list.address, n_bytes, self.stream)

    def copy(self, slab: np.ndarray, turn: int, thread: int) -> None:
        """Start a slab on its way into the slot of its turn; the bytes have been read when this returns."""
        if turn >= self.n_slots:  # the slot has been in use
            self.context.hold(self._copies, self._freed[turn // self.wave % 2])
        to, buffers = self._slots_at + turn % self.n_slots * self._stride, self._buffers[thread]
        for at in range(0, self.slab.total_bytes, buffers[0][0].n_bytes):
            buffer, event = buffers[0]
            buffers.reverse()
            piece = slab[at : min(at + buffer.n_bytes, self.slab.total_bytes)]
            self.context.wait_event(event)  # at once where it was never recorded
            np.copyto(buffer.array[: piece.size], piece)
            self.context.copy_in(to + at, buffer.address, piece.size, self._copies)
            self.context.record(event, self._copies)

    def launch(self, wave: tuple[int, int, int, int], number: int, acts: Acts, answers_at: int, n_jobs: int) -> None:
        """The kernels of a wave, whose slabs are all on their way.  wave : of `_cut`.   n_jobs : of the whole list."""
        first_job, n, first_tile, n_tiles = wave
        jobs_at = self._list_at + first_job * plan.JOB.itemsize
        tiles_at = self._list_at + n_jobs * plan.JOB.itemsize + first_tile * plan.TILE.itemsize
        self.context.record(self._copied[number % 2], self._copies)
        self.context.hold(self.stream, self._copied[number % 2])
        plan.many_jobs(self, self.slab, jobs_at, n, tiles_at, n_tiles, acts, self._h_at, answers_at)
        self.context.record(self._freed[number % 2], self.stream)

    def settle(self) -> None:
        """Wait for everything that was started.  Does nothing on a lost card."""
        try:
            if self.context.lost is None:
                self.context.synchronize(self._copies)
        finally:
            if self.context.lost is None:
                self.context.synchronize(self.stream)

    def close(self) -> None:
        """Give everything back.  No stream is under way.  Does nothing the second time."""
        threads, self.threads = self.threads, []
        alive = self.context.lost is None
        for thread in threads:
            thread.shutdown(wait=alive)  # a call into a lost card may never end
        with contextlib.suppress(DeviceError), self._held:
            if alive:
                self.context.set_current()
                if threads:
                    self.settle()


class Stream:
    """Experts on their way.   seconds : from the beginning to the last answer, behind `wait`."""

    def __init__(
        self, streamer: Streamer, acts: Acts, answers_at: int, external: np.ndarray, ranks: np.ndarray,
        slabs: Sequence[np.ndarray], waves: list[tuple[int, int, int, int]], n_jobs: int,
    ) -> None:  # fmt: skip
        self.seconds = 0.0
        self._streamer = streamer
        self._acts, self._answers_at, self._n_jobs = acts, answers_at, n_jobs
        self._external, self._ranks = external, ranks
        self._slabs = slabs
        self._waves = waves
        # slabs of each wave that are still to come
        self._left = [min(streamer.wave, len(slabs) - at) for at in range(0, len(slabs), streamer.wave)]
        self._launched = [Event() for _ in waves]
        self._lock = Lock()  # of the turn, the counts, and of launches, whose parameters lie in one place
        self._turn = 0
        self._error: BaseException | None = None
        external.flat[ranks] = 1
        self._start = time.perf_counter()
        self._parts: list[Future] = []
        try:
            for number, thread in enumerate(streamer.threads):
                self._parts.append(thread.submit(self._work, number))
        except BaseException as error:  # the system starts no more threads: those that are there end at once
            self._fail(DeviceError(f"{streamer.context.name}: {error}", "launch"))

    def wait(self) -> None:
        """Until all of them are computed.  Raises DeviceError: nothing is under way, and they are asked for again."""
        context = self._streamer.context
        seen, since = -1, 0.0
        for part in self._parts:
            while not _ended(part):
                if self._turn != seen:  # a disk may be slow, but something comes
                    seen, since = self._turn, time.perf_counter()
                elif time.perf_counter() - since > ANSWER_LIMIT_S:
                    error = context.error(TIMED_OUT, "experts in passing")
                    self._fail(error)
                    raise error
        if self._error is None:
            return
        self._external.flat[self._ranks] = 0
        with contextlib.suppress(DeviceError):  # a card that is lost here is so for the next who asks
            self._streamer.settle()
        context.require_alive()
        raise self._error

    def _fail(self, error: BaseException) -> None:
        """Nothing more is started; nobody waits for what does not come."""
        self._error = self._error or error
        for launched in self._launched:
            launched.set()

    def _work(self, thread: int) -> None:
        """A thread: slab after slab, and the kernels of a wave behind its last one."""
        try:
            self._streamer.context.set_current()
            while (turn := self._next()) is not None:
                self._send(turn, thread)
            if self._error is None:
                self._streamer.context.synchronize(self._streamer.stream)
            self.seconds = time.perf_counter() - self._start
        except BaseException as error:
            self._fail(error)

    def _next(self) -> int | None:
        with self._lock:
            if self._error is not None or self._turn == len(self._slabs):
                return None
            self._turn += 1
            return self._turn - 1

    def _send(self, turn: int, thread: int) -> None:
        streamer = self._streamer
        number = turn // streamer.wave
        if number >= 2:
            self._launched[number - 2].wait()  # or its slots would be written before they are to be read
        if self._error is None:
            streamer.copy(self._slabs[turn], turn, thread)
        with self._lock:
            self._left[number] -= 1
            if self._left[number] == 0 and self._error is None:
                streamer.launch(self._waves[number], number, self._acts, self._answers_at, self._n_jobs)
                self._launched[number].set()


def _ended(part: Future) -> bool:
    """Wait a moment for a thread's end."""
    try:
        part.result(0.1)
    except FutureTimeout:
        return False
    return True


def _cut(jobs_of: Sequence[int], wave: int) -> tuple[np.ndarray, list[tuple[int, int, int, int]]]:
    """TILE (tiles,), and of each wave of experts: first job, jobs, first tile, tiles.

    jobs_of : of each expert, in the order of the list.  A tile counts jobs from its wave's first.
    """
    tiles: list[tuple[int, int]] = []
    waves = []
    first_job = 0
    for at in range(0, len(jobs_of), wave):
        n, first_tile = 0, len(tiles)
        for count in jobs_of[at : at + wave]:
            step = plan.JOBS_OF_TILE
            tiles += [(n + i, min(step, count - i)) for i in range(0, count, step)]
            n += count
        waves.append((first_job, n, first_tile, len(tiles) - first_tile))
        first_job += n
    return np.array(tiles, plan.TILE), waves
