"""Weight quantisation and scans, over arrays: the checked half of ``src/search.c``.

Every function releases the interpreter lock and uses ``n_threads`` threads; its result does not depend on
their number.  Formats and sources are the numbers of ``enum coli_format`` in ``simd/kernels.h``:
0..3 are R16 blocks (i8_row, i8_group, i4_row, i4_group), 4..6 plain rows (f32, bf16, f16).
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc

import numpy as np

cdef extern from "search.h" nogil:
    ctypedef struct coli_quantize_job:
        const void *src
        int32_t source
        int32_t rows
        int32_t cols
        uint8_t *dst
        float *row_error

    enum:
        COLI_SEARCH_ISAS
    const char *coli_search_isa(int isa)
    int coli_quantize_jobs(const coli_quantize_job *jobs, int n_jobs, int format, int isa, int n_threads, int *bad_job,
                           int *bad_row)
    int64_t coli_first_nonfinite(const void *src, int source, int64_t n, int n_threads)
    void coli_widen_f8(const uint8_t *src, const float *table, const float *scale, int64_t row0, int64_t rows,
                       int64_t cols, int64_t block_rows, int64_t block_cols, float *dst, int n_threads)
    int64_t coli_first_bad_block(const uint8_t *data, int format, int64_t n_blocks, int n_groups, int n_threads)

cdef extern from "kernels.h" nogil:
    int64_t coli_header_bytes(int format, int n_groups)
    int64_t coli_payload_bytes(int format, int n_groups)

cdef enum:
    F32 = 4
    F16 = 6

# {name: number} of the instruction sets that this CPU has, best first.  The bytes are the same with each.
ISAS = {coli_search_isa(i).decode(): i for i in range(COLI_SEARCH_ISAS) if coli_search_isa(i) != NULL}


cdef const uint8_t *_bytes_of(array, int64_t n_bytes, str name) except? NULL:
    """The address of a C-contiguous array that must hold at least n_bytes."""
    if not array.flags.c_contiguous or array.nbytes < n_bytes:
        raise ValueError(f"{name}: expected a contiguous array of {n_bytes} bytes, got {array.nbytes}")
    return <const uint8_t *><size_t>array.ctypes.data


cdef int64_t _value_bytes(int source) except -1:
    if not F32 <= source <= F16:
        raise ValueError(f"source {source} is not one of f32, bf16, f16 (4..6)")
    return 4 if source == F32 else 2


def quantize(list jobs, int source, int format, int n_threads, str isa=None):
    """Quantise matrices into R16 headed blocks.

    jobs : list of (src, dst, row_error).
        src : (rows, cols) C-contiguous, float32, or uint16 holding bf16 or float16 bits, as `source` says.
        dst : uint8, n_blocks * block_bytes of the format; written whole.
        row_error : float32 (rows,) or None; gets sum|w - w'| / sum|w| of each row, the second sum without the
            largest weight under each scale.
    format : 0..3.
    isa : a key of ISAS, or None for the best.

    Returns None, or (job, row) of the first row that holds a NaN or an infinity: dst is then incomplete.
    """
    if not 0 <= format <= 3:
        raise ValueError(f"format {format} is not one of the block formats 0..3")
    cdef int64_t value_bytes = _value_bytes(source), rows, cols
    cdef int isa_number = next(iter(ISAS.values())) if isa is None else ISAS[isa]
    cdef int n_jobs = len(jobs), i, bad_job = -1, bad_row = -1, status, groups
    cdef coli_quantize_job *list_ = <coli_quantize_job *>malloc(max(n_jobs, 1) * sizeof(coli_quantize_job))
    if list_ == NULL:
        raise MemoryError
    try:
        for i, (src, dst, row_error) in enumerate(jobs):
            rows, cols = src.shape
            if src.itemsize != value_bytes:
                raise ValueError(f"src: {src.dtype} does not hold values of {value_bytes} bytes")
            groups = <int>((cols + 127) // 128)
            list_[i].src = _bytes_of(src, rows * cols * value_bytes, "src")
            list_[i].source = source
            list_[i].rows = <int32_t>rows
            list_[i].cols = <int32_t>cols
            list_[i].dst = <uint8_t *>_bytes_of(
                dst, (rows + 15) // 16 * (coli_header_bytes(format, groups) + coli_payload_bytes(format, groups)), "dst"
            )
            list_[i].row_error = NULL
            if row_error is not None:
                if row_error.dtype != np.float32:
                    raise ValueError("row_error: expected float32")
                list_[i].row_error = <float *>_bytes_of(row_error, rows * 4, "row_error")
        with nogil:
            status = coli_quantize_jobs(list_, n_jobs, format, isa_number, n_threads, &bad_job, &bad_row)
    finally:
        free(list_)
    if status < 0:
        raise MemoryError
    return (bad_job, bad_row) if status else None


def first_nonfinite(array, int source, int n_threads):
    """Flat index of the first NaN or infinity of a contiguous array, or -1.  source : 4..6."""
    cdef int64_t n = array.size, found
    if array.itemsize != _value_bytes(source):
        raise ValueError(f"array: {array.dtype} does not hold values of {_value_bytes(source)} bytes")
    cdef const uint8_t *p = _bytes_of(array, array.nbytes, "array")
    with nogil:
        found = coli_first_nonfinite(p, source, n, n_threads)
    return found


def widen_f8(src, table, scale, int64_t first_row, block_shape, dst, int n_threads):
    """Float8 weights times their block scales, into float32: one rounded product each.

    src : uint8 (rows, cols), rows [first_row, first_row + rows) of the tensor.
    table : float32 (256,), what each byte stands for.
    scale : float32 (ceil(all rows / block rows), ceil(cols / block cols)).
    block_shape : (block rows, block cols).   dst : float32 (rows, cols), written.
    """
    cdef int64_t rows = src.shape[0], cols = src.shape[1], block_rows = block_shape[0], block_cols = block_shape[1]
    cdef int64_t scale_rows = (first_row + rows + block_rows - 1) // block_rows
    cdef int64_t scale_cols = (cols + block_cols - 1) // block_cols
    if scale.ndim != 2 or scale.shape[0] < scale_rows or scale.shape[1] != scale_cols:
        raise ValueError(f"scale: {scale.shape} does not cover {scale_rows} x {scale_cols} blocks")
    for array, dtype, name in ((src, np.uint8, "src"), (table, np.float32, "table"), (scale, np.float32, "scale"),
                               (dst, np.float32, "dst")):
        if array.dtype != dtype:
            raise ValueError(f"{name}: expected {np.dtype(dtype)}, got {array.dtype}")
    cdef const uint8_t *s = _bytes_of(src, rows * cols, "src")
    cdef const float *t = <const float *>_bytes_of(table, 1024, "table")
    cdef const float *c = <const float *>_bytes_of(scale, scale_rows * scale_cols * 4, "scale")
    cdef float *d = <float *>_bytes_of(dst, rows * cols * 4, "dst")
    with nogil:
        coli_widen_f8(s, t, c, first_row, rows, cols, block_rows, block_cols, d, n_threads)


def first_bad_block(data, int format, int64_t n_blocks, int n_groups, int n_threads):
    """First of n_blocks R16 blocks that holds a non-finite scale or an int8 weight of -128, or -1.

    data : uint8, at least n_blocks * block_bytes.   format : 0..3.
    """
    if not 0 <= format <= 3:
        raise ValueError(f"format {format} is not one of the block formats 0..3")
    cdef const uint8_t *p = _bytes_of(
        data, n_blocks * (coli_header_bytes(format, n_groups) + coli_payload_bytes(format, n_groups)), "data"
    )
    cdef int64_t found
    with nogil:
        found = coli_first_bad_block(p, format, n_blocks, n_groups, n_threads)
    return found
