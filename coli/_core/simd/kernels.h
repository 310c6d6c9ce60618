/* The kernel table: every arithmetic step of the forward pass, one entry per instruction set.
 *
 * The contract (docs/numerics.md): for finite input each entry has ONE float32 result, whatever
 * the instruction set.  No fused multiply-add, integer sums free, float sums in a written order.
 * Nothing here knows files, threads, layers or policy; a caller hands over pointers and shapes.
 */
#ifndef COLI_KERNELS_H
#define COLI_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define COLI_GROUP 128      /* columns that share one activation scale (and one group weight scale) */
#define COLI_BLOCK_ROWS 16  /* rows of one R16 block */
#define COLI_STREAMS 4      /* blocks a GEMV walks at once: what fills a core's memory pipeline */

/* Number formats of a matrix.  The first four are R16 blocks, the last three plain row-major. */
enum coli_format {
    COLI_I8_ROW = 0,
    COLI_I8_GROUP = 1,
    COLI_I4_ROW = 2,
    COLI_I4_GROUP = 3,
    COLI_F32 = 4,
    COLI_BF16 = 5,
    COLI_F16 = 6
};

/* A matrix as it lies in memory.  y = W x, W is (rows, cols).
 * R16: n_blocks = ceil(rows/16) headed blocks of block_bytes, columns padded to n_groups * 128.
 * Row-major: block_bytes is the stride of one row, n_blocks = rows, n_groups = ceil(cols/128). */
typedef struct coli_matrix {
    const uint8_t *data;
    int64_t block_bytes;
    int32_t rows, cols;
    int32_t n_blocks, n_groups;
    int32_t format;
} coli_matrix;

/* Quantised activations of several tokens, group-major so that neighbouring tokens of one group
 * are neighbours in memory: q[(g * stride + t) * 128 ..], scale[g * stride + t], sum likewise.
 * sum is the integer sum of the group's q (VNNI and int4 offsets need it). q is 64-byte aligned. */
typedef struct coli_acts {
    int8_t *q;
    float *scale;
    int32_t *sum;
    int32_t stride; /* tokens between two groups, >= number of tokens */
    int32_t n_groups;
} coli_acts;

/* 16 rows of 1..4 blocks times one token: y[s][0..15].  Blocks of one call are the heads of as many
 * streams; each stream continues where its block ends, so the kernel prefetches 1 KB ahead in each. */
typedef void (*coli_gemv_fn)(const uint8_t *const *blocks, int n_blocks, int n_groups,
                             const coli_acts *a, int token, float *const *y);

/* 16 rows of 1..4 blocks times many tokens: y[s][i * y_stride + 0..15] for the i-th token.
 * tokens == NULL means 0..n_tokens-1, else the list of token numbers (gathered expert batches).
 * scratch: coli_gemm_scratch_bytes(n_groups) bytes, 64-byte aligned, private to the thread. */
typedef void (*coli_gemm_fn)(const uint8_t *const *blocks, int n_blocks, int n_groups,
                             const coli_acts *a, const int32_t *tokens, int n_tokens,
                             float *const *y, int64_t y_stride, void *scratch);

typedef struct coli_kernels {
    const char *name;

    /* ---- integer products: indexed by coli_format 0..3 ---- */
    coli_gemv_fn gemv[4];
    coli_gemm_fn gemm[4];

    /* Quantise x[0..n) into token t of a (groups beyond n are zero-filled up to a->n_groups*128).
     * Returns the largest magnitude seen as bits(x) & 0x7fffffff; >= 0x7f800000 means NaN or inf,
     * and such a group gets q = 0, scale = NaN, so that the fault reaches the logits. */
    uint32_t (*quantize)(const float *x, int n, coli_acts *a, int token);
    /* The same for the groups [g0, g1) only; x points at column 0. */
    uint32_t (*quantize_groups)(const float *x, int n, coli_acts *a, int token, int g0, int g1);

    /* ---- float32, 32 lanes (numerics section 4) ---- */
    float (*dot32)(const float *a, const float *b, int n);
    /* y[t * y_stride + r] = dot32(row r of W, x_t) for rows [r0, r1): W row-major f32 / bf16 / f16 */
    void (*dense[3])(const uint8_t *w, int64_t row_bytes, int cols, int r0, int r1, const float *x,
                     int64_t x_stride, int n_tokens, float *y, int64_t y_stride);
    /* Widen n stored values exactly: index by coli_format - COLI_F32. */
    void (*widen[3])(const void *src, float *dst, int64_t n);
    void (*to_f16)(const float *src, uint16_t *dst, int n); /* round to nearest even */

    /* y = (x * (1/sqrt(sum(x*x)/n + eps))) * w */
    void (*rmsnorm)(const float *x, const float *w, int n, float eps, float *y);
    void (*exp_)(const float *x, float *y, int64_t n);
    void (*sigmoid)(const float *x, float *y, int64_t n);
    void (*silu)(const float *x, float *y, int64_t n);
    void (*softplus)(const float *x, float *y, int64_t n);
    void (*silu_mul)(const float *gate, const float *up, float *h, int64_t n); /* h = silu(gate)*up */
    void (*add)(float *x, const float *y, int64_t n);                          /* x = x + y */
    void (*axpy_set)(float w, const float *y, float *out, int64_t n);          /* out = w*y */
    void (*axpy)(float w, const float *y, float *out, int64_t n);              /* out = out + w*y */
    void (*mul_sigmoid)(float *o, const float *gate, int64_t n);               /* o = o*sigmoid(gate) */

    /* Depthwise convolution and silu of channels [c0, c1): taps oldest to newest from +0.
     * rows[j] is the raw row that meets tap j (j = taps-1 is the current token); w is (taps, channels),
     * transposed at load, w_stride floats a tap. y is indexed by channel like the rows. */
    void (*conv_silu)(const float *const *rows, const float *w, int64_t w_stride, int taps, int c0, int c1,
                      float *y);
    /* y = x * (1/sqrt(sum(x*x) + 1e-6)) * scale */
    void (*l2norm)(const float *x, int n, float scale, float *y);
    /* One token of one head.  s is (dk, dv) and is updated; decay = exp(g). o gets dv values. */
    void (*deltanet)(float *s, int dk, int dv, const float *q, const float *k, const float *v,
                     float decay, float beta, float *o);
    /* o = rmsnorm(o; w) * silu(z), in that order */
    void (*gated_rmsnorm)(const float *o, const float *z, const float *w, int n, float eps, float *y);
    /* Rotate the first 2*half elements in place: pairs (i, i+half). */
    void (*rope)(float *x, const float *cos_, const float *sin_, int half);

    /* Attention over one chunk of at most 64 positions; kv is (64, d) f32 (0) or f16 (1). */
    void (*attn_scores[2])(const float *q, const void *k, int n, int d, float scale, float *s);
    /* p = exp(s - max) in place, returns the 32-lane sum of p; o = sum of p_t * v_t ascending from +0 */
    float (*attn_values[2])(float *s, const void *v, int n, int d, float max, float *o);

    /* Choose top_k of n logits (descending, -0 as +0, lower index on ties) and their softmax weights. */
    void (*router)(const float *logits, int n, int top_k, int32_t *idx, float *w);
} coli_kernels;

/* NULL when this build or this CPU lacks it. name: scalar avx2 avxvnni avx512vnni neon; and "amx",
 * which is avx512vnni with AMX tiles in gemm and is no choice of its own for a user. */
const coli_kernels *coli_kernels_for(const char *name);
/* The fastest one that this CPU runs. */
const coli_kernels *coli_kernels_best(void);
/* Names of the sets compiled in, in order of preference, NULL-terminated; each may still be missing on the CPU. */
const char *const *coli_kernels_compiled(void);

/* Decoded int4 blocks and tile staging: enough for 4 blocks of n_groups groups. */
static inline size_t coli_gemm_scratch_bytes(int n_groups)
{
    return (size_t)COLI_STREAMS * COLI_BLOCK_ROWS * COLI_GROUP * (size_t)n_groups + 65536;
}

static inline int64_t coli_header_bytes(int format, int n_groups)
{
    /* group scales [K/128][16] float16, row scales [16] float32; padded to whole 128 bytes */
    int64_t n = (format == COLI_I8_GROUP || format == COLI_I4_GROUP) ? (int64_t)n_groups * 32 : 64;
    return (n + 127) / 128 * 128;
}

static inline int64_t coli_payload_bytes(int format, int n_groups)
{
    int64_t n = (int64_t)n_groups * COLI_GROUP * COLI_BLOCK_ROWS;
    return (format == COLI_I4_ROW || format == COLI_I4_GROUP) ? n / 2 : n;
}

#endif
