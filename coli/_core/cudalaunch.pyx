"""One round trip to a card without the GIL: copy in, launch a graph, watch a flag in pinned memory, copy out.

Knows no CUDA header and links no CUDA library: the driver's entry points come as integers at run time, so the CPU wheel
is the only wheel.  Every code that the driver returns is handed on; what it means is the caller's business.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
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
    int64_t coli_now_ns() nogil
    ctypedef int (*coli_context_fn)(void *context) nogil
    ctypedef int (*coli_graph_launch_fn)(void *graph, void *stream) nogil
    ctypedef int (*coli_stream_query_fn)(void *stream) nogil

cdef struct Job:  # of contract.cu
    uint64_t slab
    int32_t row
    int32_t out

TIMED_OUT = -1
"""No error and no answer within the limit."""
SILENT = -2
"""The stream is idle, and the flag was never raised."""

cdef int64_t QUERY_NS = 2000000  # how often the driver is asked whether the work failed, while the flag stays down


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
        cdef int64_t start = 0, now, next_query = 0
        cdef int code, spins = 0
        while coli_flag(flag) != expected:
            COLI_RELAX()
            spins += 1
            if spins & 255:
                continue
            now = coli_now_ns()
            if start == 0:
                start, next_query = now, now + QUERY_NS
            if now < next_query:
                continue
            next_query = now + QUERY_NS
            code = self.stream_query(stream)
            if code == 0:
                return 0 if coli_flag(flag) == expected else -2
            if code != 600:  # CUDA_ERROR_NOT_READY: it works
                return code
            if now - start > self.limit_ns:
                return -1
        return 0

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


cdef void _copy_rows(const float[:, :] rows, float *to, int64_t stride) noexcept nogil:
    cdef int64_t i
    for i in range(rows.shape[0]):
        memcpy(to + i * stride, &rows[i, 0], rows.shape[1] * sizeof(float))


cdef void _copy_answer(const float *answer, float[:, :] out) noexcept nogil:
    cdef int64_t i
    for i in range(out.shape[0]):
        memcpy(&out[i, 0], answer + i * out.shape[1], out.shape[1] * sizeof(float))
