"""The kernel tables for other modules of coli._core: pointers and shapes, no Python object on the way."""

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

# Types of entries that kernels.h writes out in the table itself.
ctypedef void (*coli_dense_fn)(const uint8_t *w, int64_t row_bytes, int cols, int r0, int r1, const float *x,
                               int64_t x_stride, int n_tokens, float *y, int64_t y_stride) noexcept nogil
ctypedef void (*coli_widen_fn)(const void *src, float *dst, int64_t n) noexcept nogil
ctypedef void (*coli_map_fn)(const float *x, float *y, int64_t n) noexcept nogil
ctypedef void (*coli_scores_fn)(const float *q, const void *k, int n, int d, float scale,
                                float *s) noexcept nogil
ctypedef float (*coli_values_fn)(float *s, const void *v, int n, int d, float max, float *o) noexcept nogil


cdef extern from "kernels.h" nogil:
    enum:
        COLI_GROUP
        COLI_BLOCK_ROWS
        COLI_STREAMS

    enum coli_format:
        COLI_I8_ROW
        COLI_I8_GROUP
        COLI_I4_ROW
        COLI_I4_GROUP
        COLI_F32
        COLI_BF16
        COLI_F16

    ctypedef struct coli_matrix:
        const uint8_t *data
        int64_t block_bytes
        int32_t rows
        int32_t cols
        int32_t n_blocks
        int32_t n_groups
        int32_t format

    ctypedef struct coli_acts:
        int8_t *q
        float *scale
        int32_t *sum
        int32_t stride
        int32_t n_groups

    ctypedef void (*coli_gemv_fn)(const uint8_t *const *blocks, int n_blocks, int n_groups, const coli_acts *a,
                                  int token, float *const *y) noexcept nogil
    ctypedef void (*coli_gemm_fn)(const uint8_t *const *blocks, int n_blocks, int n_groups, const coli_acts *a,
                                  const int32_t *tokens, int n_tokens, float *const *y, int64_t y_stride,
                                  void *scratch) noexcept nogil
    ctypedef struct coli_kernels:
        const char *name
        coli_gemv_fn *gemv
        coli_gemm_fn *gemm
        uint32_t (*quantize)(const float *x, int n, coli_acts *a, int token) noexcept nogil
        uint32_t (*quantize_groups)(const float *x, int n, coli_acts *a, int token, int g0, int g1) noexcept nogil
        float (*dot32)(const float *a, const float *b, int n) noexcept nogil
        coli_dense_fn *dense
        coli_widen_fn *widen
        void (*to_f16)(const float *src, uint16_t *dst, int n) noexcept nogil
        void (*rmsnorm)(const float *x, const float *w, int n, float eps, float *y) noexcept nogil
        coli_map_fn exp_
        coli_map_fn sigmoid
        coli_map_fn silu
        coli_map_fn softplus
        void (*silu_mul)(const float *gate, const float *up, float *h, int64_t n) noexcept nogil
        void (*add)(float *x, const float *y, int64_t n) noexcept nogil
        void (*axpy_set)(float w, const float *y, float *out, int64_t n) noexcept nogil
        void (*axpy)(float w, const float *y, float *out, int64_t n) noexcept nogil
        void (*mul_sigmoid)(float *o, const float *gate, int64_t n) noexcept nogil
        void (*conv_silu)(const float *const *rows, const float *w, int64_t w_stride, int taps, int c0, int c1,
                          float *y) noexcept nogil
        void (*l2norm)(const float *x, int n, float scale, float *y) noexcept nogil
        void (*deltanet)(float *s, int dk, int dv, const float *q, const float *k, const float *v, float decay,
                         float beta, float *o) noexcept nogil
        void (*gated_rmsnorm)(const float *o, const float *z, const float *w, int n, float eps,
                              float *y) noexcept nogil
        void (*rope)(float *x, const float *cos_, const float *sin_, int half) noexcept nogil
        coli_scores_fn *attn_scores
        coli_values_fn *attn_values
        void (*router)(const float *logits, int n, int top_k, int32_t *idx, float *w) noexcept nogil

    const coli_kernels *coli_kernels_for(const char *name)
    const coli_kernels *coli_kernels_best()
    const char *const *coli_kernels_compiled()
    size_t coli_gemm_scratch_bytes(int n_groups)
    int64_t coli_header_bytes(int format, int n_groups)
    int64_t coli_payload_bytes(int format, int n_groups)


cdef extern from "walk.h" nogil:
    void coli_walk_gemv(const coli_kernels *k, const coli_matrix *m, const coli_acts *a, int token, int b0, int b1,
                        float *y)
    void coli_walk_gemm(const coli_kernels *k, const coli_matrix *m, const coli_acts *a, const int32_t *tokens,
                        int n_tokens, int b0, int b1, float *y, int64_t y_stride, void *scratch)


cdef extern from "dispatch.h" nogil:
    int coli_fp_mode_ok()
    enum:
        COLI_SELFTEST_STEPS
    const char *coli_selftest(const coli_kernels *k)
    int coli_selftest_checksums(const coli_kernels *k, uint32_t *out)


cdef extern from "bench.h" nogil:
    ctypedef uint64_t (*coli_read_xor_fn)(const uint8_t *const *streams, int n_streams,
                                          int64_t n_bytes) noexcept nogil
    coli_read_xor_fn coli_read_xor_for(const char *name)


# The table of an instruction set; None is the best one.  ValueError names what this machine can run.
cdef const coli_kernels *table(isa) except NULL

# The read of the ruler that goes with a table.
cdef coli_read_xor_fn reader(const coli_kernels *k) noexcept
