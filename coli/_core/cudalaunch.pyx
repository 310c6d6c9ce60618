"""One round trip to a card without the GIL: copy in, launch a graph, watch a flag in pinned memory, copy out.

Knows no CUDA header and links no CUDA library: the driver's entry points come as integers at run time, so the CPU wheel
is the only wheel.  Every code that the driver returns is handed on; what it means is the caller's business.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdint.h>
    #include <time.h>
    #if defined(__x86_64__) || defined(_M_X64)
    #include <immintrin.h>
    #define COLI_RELAX() _mm_pause()
    #elif defined(__aarch64__)
    #define COLI_RELAX() __asm__ __volatile__("yield")
    #else
    #define COLI_RELAX() ((void)0)
    #endif
    static inline uint32_t coli_flag(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    #define COLI_UNWRITTEN 0xffa5c0deu /* a NaN that no kernel makes */
    static __attribute__((noinline)) uint32_t coli_unwritten(const uint32_t *from, int64_t n)
    {
        uint32_t found = 0;
        for (int64_t i = 0; i < n; i++)
            found |= from[i] == COLI_UNWRITTEN;
        return found;
    }
    /* Whether any of them is NaN or infinite. */
    static __attribute__((noinline)) uint32_t coli_move(uint32_t *from, uint32_t *to, int64_t n)
    {
        uint32_t found = 0;
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = from[i];
            to[i] = bits;
            from[i] = COLI_UNWRITTEN;
            found |= (bits & 0x7f800000u) == 0x7f800000u;
        }
        return found;
    }
    static inline void coli_raise(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void coli_add(uint32_t *p) { __atomic_fetch_add(p, 1, __ATOMIC_RELEASE); }
    static inline int64_t coli_now_ns(void)
    {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    typedef int (*coli_context_fn)(void *context);
    typedef int (*coli_graph_launch_fn)(void *graph, void *stream);
    typedef int (*coli_stream_query_fn)(void *stream);
    """
    void COLI_RELAX() nogil
    uint32_t coli_flag(const uint32_t *p) nogil
    void coli_raise(uint32_t *p, uint32_t v) nogil
    uint32_t COLI_UNWRITTEN
    uint32_t coli_unwritten(const uint32_t *p, int64_t n) nogil
    uint32_t coli_move(uint32_t *p, uint32_t *to, int64_t n) nogil
    void coli_add(uint32_t *p) nogil
    int64_t coli_now_ns() nogil
    ctypedef int (*coli_context_fn)(void *context) nogil
    ctypedef int (*coli_graph_launch_fn)(void *graph, void *stream) nogil
    ctypedef int (*coli_stream_query_fn)(void *stream) nogil

cdef struct Job:  # of contract.cu
    uint64_t slab
    int32_t row
    int32_t out

cdef struct Part:  # of deltanet.cu
    int32_t first_row
    int32_t n_rows
    int64_t position

cdef struct Watch:  # of one wait
    int64_t start
    int64_t next_query
    int spins

TIMED_OUT = -1
"""No error and no answer within the limit."""
SILENT = -2
"""The stream is idle, and the flag was never raised."""

cdef int WAITING = -3
cdef int64_t QUERY_NS = 2000000  # how often the driver is asked whether the work failed, while the flag stays down


cdef class Bell:
    """Tells another thread at once, if it listens: waking a thread that sleeps takes long against a token on a card."""

    cdef uint32_t count

    @property
    def rung(self):
        """How often `ring` was called, modulo 2^32."""
        return coli_flag(&self.count)

    def ring(self):
        """Once more."""
        coli_add(&self.count)

    def wait(self, uint32_t heard, double limit_s, Bell first=None):
        """Listen, without the GIL and without sleeping, until it has rung more often than ``heard``.

        first : a bell that is rung as soon as the GIL is free: who hears it wants it at once.
        Returns whether it has, False after ``limit_s``.
        """
        cdef int64_t end
        cdef bint more = False, rings = first is not None
        cdef uint32_t *other = &first.count if rings else &self.count
        with nogil:
            if rings:
                coli_add(other)
            more = coli_flag(&self.count) != heard
            end = coli_now_ns() + <int64_t>(limit_s * 1e9)
            while not more and coli_now_ns() < end:
                COLI_RELAX()
                more = coli_flag(&self.count) != heard
        return more


cdef class Launcher:
    """The entry points of one driver and the context of one card.

    context : the CUcontext that calls run in.   set_context, graph_launch, stream_query : addresses of cuCtxSetCurrent,
    cuGraphLaunch and cuStreamQuery.   limit_s : how long a wait may last before it is given up.
    """

    cdef void *context
    cdef coli_context_fn set_context
    cdef coli_graph_launch_fn graph_launch
    cdef coli_stream_query_fn stream_query
    cdef int64_t limit_ns

    def __init__(self, uintptr_t context, uintptr_t set_context, uintptr_t graph_launch, uintptr_t stream_query,
                 double limit_s):
        self.context = <void *>context
        self.set_context = <coli_context_fn>set_context
        self.graph_launch = <coli_graph_launch_fn>graph_launch
        self.stream_query = <coli_stream_query_fn>stream_query
        self.limit_ns = <int64_t>(limit_s * 1e9)

    cdef int _wait(self, const uint32_t *flag, uint32_t expected, void *stream) noexcept nogil:
        cdef Watch watch = Watch(0, 0, 0)
        cdef int code = WAITING
        while code == WAITING:
            code = self._look(flag, expected, stream, &watch)
        return code

    cdef int _look(self, const uint32_t *flag, uint32_t expected, void *stream, Watch *watch) noexcept nogil:
        """One turn of a wait: 0 once the word has come, WAITING, or what `_wait` fails with."""
        cdef int64_t now
        cdef int code
        if <int32_t>(coli_flag(flag) - expected) >= 0:  # counters go round
            return 0
        COLI_RELAX()
        watch.spins += 1
        if watch.spins & 255:
            return WAITING
        now = coli_now_ns()
        if watch.start == 0:
            watch.start, watch.next_query = now, now + QUERY_NS
        if now < watch.next_query:
            return WAITING
        watch.next_query = now + QUERY_NS
        code = self.stream_query(stream)
        if code == 0:
            return 0 if <int32_t>(coli_flag(flag) - expected) >= 0 else -2
        if code != 600:  # CUDA_ERROR_NOT_READY: it works
            return code
        return -1 if now - watch.start > self.limit_ns else WAITING

    def start(self, const float[:, :] rows, uintptr_t rows_at, int64_t stride, uintptr_t graph, uintptr_t stream):
        """Copy rows (T, n) to pinned memory, ``stride`` floats apart, and launch.  Returns the driver's code."""
        cdef int code
        if rows.shape[0] and rows.strides[1] != sizeof(float):
            raise ValueError("the values of a row must be contiguous")
        with nogil:
            _copy_rows(rows, <float *>rows_at, stride)
            code = self.set_context(self.context)
            if code == 0 and graph != 0:
                code = self.graph_launch(<void *>graph, <void *>stream)
        return code

    def again(self, const float[:, :] rows, uintptr_t rows_at, int64_t stride, list positions, uintptr_t parts_at,
              const float[:, :] cos, const float[:, :] sin, uintptr_t cos_at, uintptr_t sin_at, int64_t half,
              uintptr_t graph, uintptr_t stream):
        """`start` for a list that is there already, of parts of one row each: only their positions are new.

        positions : of each part.   cos, sin : (positions, >= half); their rows go to ``cos_at`` and ``sin_at``.
        IndexError for a position beyond them.
        """
        cdef Part *parts = <Part *>parts_at
        cdef int64_t i, n = rows.shape[0]
        cdef int code
        if len(positions) != n or cos.strides[1] != sizeof(float) or sin.strides[1] != sizeof(float):
            raise ValueError(f"{len(positions)} positions of {n} rows, or values that are not contiguous")
        if rows.shape[0] and rows.strides[1] != sizeof(float) or cos.shape[1] < half or sin.shape[1] < half:
            raise ValueError("the values of a row must be contiguous, and no fewer than half")
        for i in range(n):
            parts[i].position = positions[i]
            if half and not 0 <= parts[i].position < min(cos.shape[0], sin.shape[0]):
                raise IndexError(f"position {positions[i]} of {cos.shape[0]}")
        with nogil:
            if half:
                for i in range(n):
                    memcpy(<float *>cos_at + i * half, &cos[parts[i].position, 0], half * sizeof(float))
                    memcpy(<float *>sin_at + i * half, &sin[parts[i].position, 0], half * sizeof(float))
            _copy_rows(rows, <float *>rows_at, stride)
            code = self.set_context(self.context)
            if code == 0:
                code = self.graph_launch(<void *>graph, <void *>stream)
        return code

    def issue(self, const float[:, :] rows, uintptr_t rows_at, int64_t stride, uintptr_t graph, uintptr_t stream,
              const int32_t[:] slots, const int32_t[:] rows_of, uint64_t first_slot, uint64_t slot_bytes, int n_slots,
              uintptr_t jobs):
        """`start` with a job list: job i is slot ``slots[i]`` applied to row ``rows_of[i]``, answered in row i.

        first_slot, slot_bytes, n_slots : where slots lie, and how many there are; IndexError beyond.   jobs : pinned.
        """
        cdef int64_t i
        cdef Job *job = <Job *>jobs
        if slots.shape[0] != rows_of.shape[0]:
            raise ValueError(f"{slots.shape[0]} slots and {rows_of.shape[0]} rows")
        for i in range(slots.shape[0]):
            if not (0 <= slots[i] < n_slots and 0 <= rows_of[i] < rows.shape[0]):
                raise IndexError(f"slot {slots[i]} of {n_slots}, row {rows_of[i]} of {rows.shape[0]}")
            job[i].slab = first_slot + <uint64_t>slots[i] * slot_bytes
            job[i].row = rows_of[i]
            job[i].out = <int32_t>i
        return self.start(rows, rows_at, stride, graph, stream)

    def take(self, uintptr_t flag, uint32_t expected, uintptr_t stream, uintptr_t answer, float[:, :] out):
        """Until the word at ``flag`` is ``expected``, then copy (T, n) floats from ``answer`` to ``out``.

        Returns 0, the driver's code, TIMED_OUT or SILENT; nothing is copied where it fails.
        """
        cdef int code
        if out.shape[0] and out.strides[1] != sizeof(float):
            raise ValueError("the values of a row must be contiguous")
        with nogil:
            code = self._wait(<const uint32_t *>flag, expected, <void *>stream)
            if code == 0:
                _copy_answer(<const float *>answer, out)
        return code

    def call(self, const float[:, :] rows, uintptr_t rows_at, int64_t stride, uintptr_t graph, uintptr_t stream,
             uintptr_t flag, uint32_t expected, uintptr_t answer, float[:, :] out):
        """`start` and `take` in one."""
        cdef int code
        if rows.shape[0] and rows.strides[1] != sizeof(float) or out.shape[0] and out.strides[1] != sizeof(float):
            raise ValueError("the values of a row must be contiguous")
        with nogil:
            _copy_rows(rows, <float *>rows_at, stride)
            code = self.set_context(self.context)
            if code == 0:
                code = self.graph_launch(<void *>graph, <void *>stream)
            if code == 0:
                code = self._wait(<const uint32_t *>flag, expected, <void *>stream)
            if code == 0:
                _copy_answer(<const float *>answer, out)
        return code

    def take_logits(self, uintptr_t flag, uint32_t expected, uintptr_t stream, uintptr_t answer, int64_t n,
                    float[:, :] out, soon=None):
        """Move rows of n floats from ``answer`` to ``out`` (T, >= n) while the card still writes them.

        All of them are there when the word at ``flag`` is ``expected``.

        answer : (T, n), of which every word was `unwritten` before the card began, and is so again afterwards.
        soon : called once the first of them are there, if given.
        Returns (code as `take`, whether all are finite).
        """
        cdef Watch watch = Watch(0, 0, 0)
        cdef uint32_t *words = <uint32_t *>answer
        cdef uint32_t wrong = 0
        cdef int64_t row, at, left
        cdef int code = WAITING
        cdef bint first = soon is not None
        if out.shape[0] and (out.strides[1] != sizeof(float) or out.shape[1] < n):
            raise ValueError(f"the values of a row must be contiguous, and at least {n}")
        with nogil:
            # a page of `out` at a time; fresh memory gets its pages while there is nothing else to do
            for row in range(out.shape[0]):
                for at in range(0, n, 1024):
                    out[row, at] = 0.0
            for row in range(out.shape[0]):
                for at in range(0, n, 1024):
                    left = min(n - at, 1024)
                    while code == WAITING and coli_unwritten(words + row * n + at, left):
                        code = self._look(<const uint32_t *>flag, expected, <void *>stream, &watch)
                    if code != WAITING and code != 0:
                        break
                    if first:
                        first = False
                        with gil:
                            soon()
                    wrong |= coli_move(words + row * n + at, <uint32_t *>&out[row, at], left)
                if code != WAITING and code != 0:
                    break
            while code == WAITING:
                code = self._look(<const uint32_t *>flag, expected, <void *>stream, &watch)
        return code, wrong == 0

    @staticmethod
    def unwritten(uintptr_t at, int64_t n):
        """Set n words as `take_logits` wants them."""
        cdef int64_t i
        with nogil:
            for i in range(n):
                (<uint32_t *>at)[i] = COLI_UNWRITTEN

    @staticmethod
    def word(uintptr_t at):
        """A word that the card may write."""
        return coli_flag(<const uint32_t *>at)

    def wait(self, uintptr_t flag, uint32_t expected, uintptr_t stream):
        """Until the counter at ``flag`` has reached ``expected``.  Returns 0, the driver's code, TIMED_OUT or SILENT."""
        cdef int code
        with nogil:
            code = self._wait(<const uint32_t *>flag, expected, <void *>stream)
        return code

    def ask(self, uintptr_t asked, uint32_t number, int first, const int32_t[:] places, const uint8_t[:] always,
            const uint32_t[:] missing, uintptr_t stream):
        """Wait for layers that ask, until one of them lacks something.

        asked : the card's counter; it is ``number`` once layer ``places[0]`` of the run has asked.   first : which of
        ``places`` is next.   always, missing : by place, whether the host has to answer anyway, and ranks it lacks.
        Returns (code, index into places), len(places) where nobody is left.
        """
        cdef int code = 0, i = first, n = <int>places.shape[0]
        for i in range(first, n):
            if not 0 <= places[i] < missing.shape[0] or missing.shape[0] > always.shape[0]:
                raise IndexError(f"layer {places[i]} of {missing.shape[0]}")
        with nogil:
            i = first
            while i < n:
                code = self._wait(<const uint32_t *>asked, number + <uint32_t>i, <void *>stream)
                if code != 0 or always[places[i]] or missing[places[i]]:
                    break
                i += 1
        return code, i

    @staticmethod
    def answer(const float[:, :] expert_y, const int32_t[:, :] slot_of, const uint8_t[:, :] external, float[:, :] to,
               const float[:, :] shared_y, float[:, :] shared_to, uintptr_t answered, uint32_t number):
        """Copy what was asked for to where the card looks for it, and say so.

        expert_y (slots, >= n), slot_of (T, k), external (T, k): rank (t, j) goes to row t * k + j of ``to`` unless it
        is external.   shared_y (T, >= n) goes to ``shared_to``, or None.   answered : the counter that becomes
        ``number``.  IndexError for a slot that is not there; nothing is said then.
        """
        cdef int64_t t, j, k = slot_of.shape[1], rows = slot_of.shape[0], bad = -1, slot
        cdef size_t n_bytes = to.shape[1] * sizeof(float)
        cdef bint with_shared = shared_y is not None
        if external.shape[0] != rows or external.shape[1] != k or to.shape[0] < rows * k:
            raise ValueError(f"({rows}, {k}) slots, ({external.shape[0]}, {external.shape[1]}) flags")
        if rows and (expert_y.shape[0] and (expert_y.strides[1] != sizeof(float) or expert_y.shape[1] < to.shape[1])):
            raise ValueError("the experts' vectors are too short, or not contiguous")
        if with_shared and (shared_y.shape[0] < rows or shared_y.shape[1] < to.shape[1]
                            or shared_y.strides[1] != sizeof(float) or shared_to.shape[0] < rows):
            raise ValueError("the shared expert's vectors are too few, too short, or not contiguous")
        with nogil:
            for t in range(rows):
                for j in range(k):
                    if external[t, j]:
                        continue
                    slot = slot_of[t, j]
                    if slot < 0 or slot >= expert_y.shape[0]:
                        bad = slot
                        break
                    memcpy(&to[t * k + j, 0], &expert_y[slot, 0], n_bytes)
                if with_shared:
                    memcpy(&shared_to[t, 0], &shared_y[t, 0], n_bytes)
            if bad < 0:
                coli_raise(<uint32_t *>answered, number)
        if bad >= 0:
            raise IndexError(f"slot {bad} of {expert_y.shape[0]}")

    @staticmethod
    def say(uintptr_t word, uint32_t value):
        """Write a word that the card watches, behind everything written before."""
        coli_raise(<uint32_t *>word, value)

    @staticmethod
    def copy_out(const float[:, :] rows, float[:, :] out):
        """out = rows without the GIL: ``out`` may be wider, and its rows may lie apart."""
        cdef int64_t i
        if out.shape[0] != rows.shape[0] or out.shape[1] < rows.shape[1]:
            raise ValueError(f"({rows.shape[0]}, {rows.shape[1]}) values for ({out.shape[0]}, {out.shape[1]})")
        if rows.shape[0] and (rows.strides[1] != sizeof(float) or out.strides[1] != sizeof(float)):
            raise ValueError("the values of a row must be contiguous")
        with nogil:
            for i in range(rows.shape[0]):
                memcpy(&out[i, 0], &rows[i, 0], rows.shape[1] * sizeof(float))


cdef void _copy_rows(const float[:, :] rows, float *to, int64_t stride) noexcept nogil:
    cdef int64_t i
    for i in range(rows.shape[0]):
        memcpy(to + i * stride, &rows[i, 0], rows.shape[1] * sizeof(float))


cdef void _copy_answer(const float *answer, float[:, :] out) noexcept nogil:
    cdef int64_t i
    for i in range(out.shape[0]):
        memcpy(&out[i, 0], answer + i * out.shape[1], out.shape[1] * sizeof(float))
