#include "search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16 /* partial sums of every error: they decide near ties, so they are the same on every instruction set */

#define ROUND_MAGIC 0x1.8p23f /* x + magic - magic rounds |x| < 2^22 to the nearest even integer */

/* The scales tried for int4: absmax / d and -absmax / d for d = 7, 7.5 .. 17.  Both signs, because the range -8..7
 * is longer on one side; d > 8 clips the largest weight, which a long row wants.  Relative error, gaussian / t(5):
 * groups of 128 9.73 / 14.12 %, rows of 2048 10.73 / 17.9 % (400 scales: 9.67 / 14.08 and 10.72 / 17.8), 2026-11.
 * Stale when the error bounds for these two distributions in tests/convert/test_quantize.py no longer hold. */
#define N_DIVISORS 21
#define FIRST_DIVISOR 7.0f
#define DIVISOR_STEP 0.5f

/* ---- float16 ------------------------------------------------------------------------------------ */

/* Round to nearest even; magnitudes past the largest finite float16 become that one. */
static uint16_t to_half(float f)
{
    uint32_t bits = float_to_bits(f), magnitude = bits & 0x7FFFFFFFu;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude >= 0x47800000u - 0x1000u) /* 65520 and above would round to infinity */
        return sign | 0x7BFF;
    if (magnitude < 0x38800000u) { /* below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to */
        float r = bits_to_float(magnitude) + 0.5f;
        return sign | (uint16_t)(float_to_bits(r) - 0x3F000000u);
    }
    magnitude += 0xFFF + (magnitude >> 13 & 1);
    return sign | (uint16_t)((magnitude - 0x38000000u) >> 13);
}

/* ---- one span: a group of 128, or a whole row ----------------------------------------------------- */

/* A span is scaled by a power of two into [1, 2) first, so that no inverse, product or square of it can overflow or
 * lose bits, whatever the weights: the bf16 maximum and denormals go the same way as the rest. */
typedef struct {
    float *x; /* normalised in place */
    int n;    /* a multiple of 128 */
    int is_half;
    float absmax;                /* before and */
    float normal_absmax;         /* after normalisation */
    float to_normal, to_stored;  /* 2^-e and 2^e */
} span;

INLINE span normalize(float *x, int n, float absmax, int is_half)
{
    span p = {x, n, is_half, absmax, 0.0f, 0.0f, 0.0f};
    int e;
    frexpf(absmax, &e); /* absmax = m * 2^e, m in [0.5, 1) */
    e = e - 1 > 126 ? 126 : e - 1 < -126 ? -126 : e - 1; /* both powers stay normal numbers */
    p.to_normal = ldexpf(1.0f, -e);
    p.to_stored = ldexpf(1.0f, e);
    p.normal_absmax = absmax * p.to_normal;
    for (int i = 0; i < n; i++)
        x[i] = x[i] * p.to_normal;
    return p;
}

/* A scale as the container will hold it, seen in the normalised domain (exactly: a power of two apart). */
static float stored_scale(const span *p, float s)
{
    float stored = s * p->to_stored;
    return (p->is_half ? half_to_float(to_half(stored)) : stored) * p->to_normal;
}

/* int8: absmax / 127, rounded to the stored type.  Where that rounding leaves absmax more than half a step past 127
 * (only among denormals), the next larger scale is taken, so |w - w'| <= scale / 2 always. */
static float scale_i8(const span *p)
{
    float s = p->absmax / 127.0f;
    if (p->is_half) {
        uint16_t h = to_half(s);
        h += h < 0x7BFF && p->absmax > 127.5f * half_to_float(h);
        s = half_to_float(h);
    } else if (p->absmax > 127.5f * s) {
        s = bits_to_float(float_to_bits(s) + 1);
    }
    return s * p->to_normal;
}

/* Squared error of the span against one int4 scale, in double: float32's sum cannot settle a near tie. */
static double exact_error_i4(const span *p, float s)
{
    float inverse = 1.0f / s;
    double sum = 0.0;
    for (int i = 0; i < p->n; i++) {
        float t = p->x[i] * inverse;
        t = t < -8.0f ? -8.0f : t > 7.0f ? 7.0f : t;
        double e = (double)p->x[i] - (double)((t + ROUND_MAGIC) - ROUND_MAGIC) * (double)s;
        sum += e * e;
    }
    return sum;
}

/* Over one row: |w - w'|, |w|, and |w| without the largest under each scale. */
typedef struct {
    double error, total, others;
} row_sums;

/* The largest weight is left out, where there are others: an outlier that has rounded them all to zero would be nearly
 * all of a row's magnitude, is itself kept well, and would hide what it did. */
static float relative_error(const row_sums *sums)
{
    double magnitude = sums->others > 0.0 ? sums->others : sums->total;
    return sums->error <= 0.0 ? 0.0f : sums->error < magnitude ? (float)(sums->error / magnitude) : 1.0f;
}

/* ---- one block ---------------------------------------------------------------------------------- */

/* Widen a row into x, padded with zeros to whole groups. */
INLINE void load_row(const coli_quantize_job *job, int64_t row, int padded, float *x)
{
    int cols = job->cols;
    const uint16_t *s = (const uint16_t *)job->src + row * cols;
    if (job->source == COLI_F32)
        memcpy(x, (const float *)job->src + row * cols, (size_t)cols * 4);
    else if (job->source == COLI_BF16)
        for (int i = 0; i < cols; i++)
            x[i] = bits_to_float((uint32_t)s[i] << 16);
    else
        for (int i = 0; i < cols; i++)
            x[i] = half_to_float(s[i]);
    for (int i = cols; i < padded; i++)
        x[i] = 0.0f;
}

/* The largest bits(x) & 0x7fffffff: a NaN or an infinity is seen, where a float maximum would lose it. */
INLINE uint32_t top_bits(const float *x, int n)
{
    uint32_t top = 0;
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = float_to_bits(x[i]) & 0x7FFFFFFFu;
        top = magnitude > top ? magnitude : top;
    }
    return top;
}

/* Lines of 16 rows x 4 columns (int8) or 16 rows x 8 columns (int4), from q[16][padded]. */
INLINE void pack(int is_i8, const int8_t *q, int padded, uint8_t *payload)
{
    if (is_i8) {
        for (int j = 0; j < padded / 4; j++)
            for (int r = 0; r < COLI_BLOCK_ROWS; r++)
                memcpy(payload + j * LINE + r * 4, q + (int64_t)r * padded + j * 4, 4);
        return;
    }
    for (int j = 0; j < padded / 8; j++)
        for (int r = 0; r < COLI_BLOCK_ROWS; r++) {
            uint32_t low, high;
            memcpy(&low, q + (int64_t)r * padded + j * 8, 4);
            memcpy(&high, q + (int64_t)r * padded + j * 8 + 4, 4);
            /* each byte is q in [-8, 7]: its low nibble xor 8 is q + 8 */
            low = ((low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4) ^ 0x88888888u;
            memcpy(payload + j * LINE + r * 4, &low, 4);
        }
}

typedef struct {
    float *x;  /* one row, widened */
    int8_t *q; /* [16][padded] */
} scratch;

/* ---- the vector half, once per instruction set -------------------------------------------------- */

typedef int (*block_fn)(const coli_quantize_job *job, int format, int block, const scratch *t);

#ifdef __x86_64__
#include <immintrin.h>

#define ISA_NAME sse2
#define ISA_ATTR
#define ISA_WIDTH 4
#define ISA_MIN(v, limit) ((VF)_mm_min_ps((__m128)(v), (__m128)(limit)))
#define ISA_MAX(v, limit) ((VF)_mm_max_ps((__m128)(v), (__m128)(limit)))
#include "search_span.inc"

#define ISA_NAME avx2
#define ISA_ATTR __attribute__((target("avx2")))
#define ISA_WIDTH 8
#define ISA_MIN(v, limit) ((VF)_mm256_min_ps((__m256)(v), (__m256)(limit)))
#define ISA_MAX(v, limit) ((VF)_mm256_max_ps((__m256)(v), (__m256)(limit)))
#include "search_span.inc"

#define ISA_NAME avx512
#define ISA_ATTR __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define ISA_WIDTH 16
#define ISA_MIN(v, limit) ((VF)_mm512_min_ps((__m512)(v), (__m512)(limit)))
#define ISA_MAX(v, limit) ((VF)_mm512_max_ps((__m512)(v), (__m512)(limit)))
#include "search_span.inc"

static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static block_fn block_fn_of(int isa)
{
    switch (isa) {
    case 0:
        return has_avx512() ? quantize_block_avx512 : NULL;
    case 1:
        return __builtin_cpu_supports("avx2") ? quantize_block_avx2 : NULL;
    default:
        return quantize_block_sse2;
    }
}

static const char *const isa_names[COLI_SEARCH_ISAS] = {"avx512", "avx2", "sse2"};
#else
#define ISA_NAME portable
#define ISA_ATTR
#define ISA_WIDTH 4
#define ISA_MIN(v, limit) SELECT((v) > (limit), limit, v)
#define ISA_MAX(v, limit) SELECT((v) < (limit), limit, v)
#include "search_span.inc"

static block_fn block_fn_of(int isa) { return isa == COLI_SEARCH_ISAS - 1 ? quantize_block_portable : NULL; }

static const char *const isa_names[COLI_SEARCH_ISAS] = {"", "", "portable"};
#endif

const char *coli_search_isa(int isa) { return block_fn_of(isa) ? isa_names[isa] : NULL; }

/* ---- all jobs ----------------------------------------------------------------------------------- */

/* No more threads than there is work for: on a busy machine, waking one costs milliseconds. */
static int enough_threads(int n_threads, int64_t n_units, int64_t units_a_thread)
{
    int64_t useful = n_units / units_a_thread;
    return useful < 1 ? 1 : useful < n_threads ? (int)useful : n_threads;
}

static int blocks_of(const coli_quantize_job *job)
{
    return (job->rows + COLI_BLOCK_ROWS - 1) / COLI_BLOCK_ROWS;
}

int coli_quantize_jobs(const coli_quantize_job *jobs, int n_jobs, int format, int isa, int n_threads, int *bad_job,
                       int *bad_row)
{
    block_fn quantize = block_fn_of(isa);
    int64_t *first = malloc(((size_t)n_jobs + 1) * sizeof *first); /* block number where each job starts */
    int64_t bad = INT64_MAX;                                      /* job << 32 | row, the lowest */
    int padded = 0, out_of_memory = !first;
    if (!first)
        return -1;
    first[0] = 0;
    for (int i = 0; i < n_jobs; i++) {
        int p = (jobs[i].cols + COLI_GROUP - 1) / COLI_GROUP * COLI_GROUP;
        padded = p > padded ? p : padded;
        first[i + 1] = first[i] + blocks_of(&jobs[i]);
    }
    n_threads = enough_threads(n_threads, first[n_jobs], 16);
#pragma omp parallel num_threads(n_threads)
    {
        scratch t = {malloc((size_t)padded * sizeof(float)), malloc((size_t)padded * COLI_BLOCK_ROWS)};
        if (!t.x || !t.q) {
#pragma omp atomic write
            out_of_memory = 1;
        }
#pragma omp barrier
        if (!out_of_memory) {
#pragma omp for schedule(dynamic, 4)
            for (int64_t n = 0; n < first[n_jobs]; n++) {
                int lo = 0, hi = n_jobs;
                while (hi - lo > 1) { /* the job that block n belongs to */
                    int mid = (lo + hi) / 2;
                    if (first[mid] <= n)
                        lo = mid;
                    else
                        hi = mid;
                }
                int row = quantize(&jobs[lo], format, (int)(n - first[lo]), &t);
                if (row >= 0) {
#pragma omp critical
                    {
                        int64_t key = (int64_t)lo << 32 | row;
                        bad = key < bad ? key : bad;
                    }
                }
            }
        }
        free(t.x);
        free(t.q);
    }
    free(first);
    if (out_of_memory)
        return -1;
    if (bad == INT64_MAX)
        return 0;
    *bad_job = (int)(bad >> 32);
    *bad_row = (int)(bad & 0x7FFFFFFF);
    return 1;
}

/* ---- scans -------------------------------------------------------------------------------------- */

#define SCAN_CHUNK 65536

int64_t coli_first_nonfinite(const void *src, int source, int64_t n, int n_threads)
{
    int64_t chunks = (n + SCAN_CHUNK - 1) / SCAN_CHUNK, found = INT64_MAX;
    /* An all-ones exponent is what infinities and NaNs have and nothing else. */
    n_threads = enough_threads(n_threads, chunks, 8);
    uint32_t exponent = source == COLI_F32 ? 0x7F800000u : source == COLI_BF16 ? 0x7F80u : 0x7C00u;
#pragma omp parallel for schedule(static) reduction(min : found) num_threads(n_threads)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t end = (c + 1) * SCAN_CHUNK < n ? (c + 1) * SCAN_CHUNK : n;
        uint32_t any = 0;
        if (source == COLI_F32)
            for (int64_t i = c * SCAN_CHUNK; i < end; i++)
                any |= (((const uint32_t *)src)[i] & exponent) == exponent;
        else
            for (int64_t i = c * SCAN_CHUNK; i < end; i++)
                any |= (((const uint16_t *)src)[i] & exponent) == exponent;
        for (int64_t i = c * SCAN_CHUNK; any && i < end; i++) {
            uint32_t bits = source == COLI_F32 ? ((const uint32_t *)src)[i] : ((const uint16_t *)src)[i];
            if ((bits & exponent) == exponent) {
                found = i < found ? i : found;
                any = 0;
            }
        }
    }
    return found == INT64_MAX ? -1 : found;
}

void coli_widen_f8(const uint8_t *src, const float *table, const float *scale, int64_t row0, int64_t rows, int64_t cols,
                   int64_t block_rows, int64_t block_cols, float *dst, int n_threads)
{
    int64_t scale_cols = (cols + block_cols - 1) / block_cols;
    n_threads = enough_threads(n_threads, rows * cols, 1 << 20);
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *s = scale + (row0 + r) / block_rows * scale_cols;
        for (int64_t b = 0; b < scale_cols; b++) {
            int64_t end = (b + 1) * block_cols < cols ? (b + 1) * block_cols : cols;
            for (int64_t c = b * block_cols; c < end; c++)
                dst[r * cols + c] = table[src[r * cols + c]] * s[b];
        }
    }
}

int64_t coli_first_bad_block(const uint8_t *data, int format, int64_t n_blocks, int n_groups, int n_threads)
{
    int64_t header = coli_header_bytes(format, n_groups), payload = coli_payload_bytes(format, n_groups);
    int64_t found = INT64_MAX;
    int is_group = has_group_scales(format), is_i8 = format == COLI_I8_ROW || format == COLI_I8_GROUP;
    n_threads = enough_threads(n_threads, n_blocks * payload, 1 << 20);
#pragma omp parallel for schedule(static) reduction(min : found) num_threads(n_threads)
    for (int64_t n = 0; n < n_blocks; n++) {
        const uint8_t *block = data + n * (header + payload);
        int bad = 0;
        for (int i = 0; i < COLI_BLOCK_ROWS * (is_group ? n_groups : 1); i++) {
            uint16_t h;
            uint32_t f;
            if (is_group) {
                memcpy(&h, block + 2 * i, 2);
                bad |= (h & 0x7C00) == 0x7C00;
            } else {
                memcpy(&f, block + 4 * i, 4);
                bad |= (f & BITS_INF) == BITS_INF;
            }
        }
        if (is_i8)
            for (int64_t i = header; i < header + payload; i++)
                bad |= block[i] == 0x80; /* -128 */
        if (bad)
            found = n < found ? n : found;
    }
    return found == INT64_MAX ? -1 : found;
}
