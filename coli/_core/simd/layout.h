/* What every integer kernel knows of an R16 block and of quantised activations (docs/numerics.md, 2 and 3).
 *
 * A block is a header of scales and a payload of 64-byte lines, each 16 rows x 4 consecutive columns
 * (int8) or 16 rows x 8 (int4).  Lanes are rows: nothing is ever summed across the lanes of a vector.
 */
#ifndef COLI_LAYOUT_H
#define COLI_LAYOUT_H

#include <string.h>

#include "kernels.h"

/* Payload of one group of 128 columns: 32 lines of int8, 16 of int4. */
#define I8_LINES 32
#define I4_LINES 16
#define LINE 64
#define I8_GROUP_BYTES (I8_LINES * LINE)
#define I4_GROUP_BYTES (I4_LINES * LINE)

/* How far ahead a GEMV prefetches in each of its streams.  Against reading alone, from RAM, int8 / int4, Zen5,
 * 2026-11-30: 2 KB gives AVX2 0.95 / 0.94 and AVX512-VNNI 0.97 / 0.90, 1 KB 0.85 / 0.86 and 0.94 / 0.88, more less. */
#define AHEAD_BYTES 2048

/* Magnitudes (bits without the sign) that a group of activations may have. */
#define BITS_TINY 0x0D800000u   /* 2^-100: below it 127/absmax could overflow, and the group becomes zero */
#define BITS_INF 0x7F800000u    /* from here on NaN or infinity */
#define BITS_QUIET_NAN 0x7FC00000u

/* Volatile, so that it stays beside the load it is written at: see int_avx512vnni.h, GEMV. */
#if defined(__x86_64__)
#define COLI_PREFETCH(p) __asm__ volatile("prefetcht0 %0" : : "m"(*(const char *)(p)))
#elif defined(__aarch64__)
#define COLI_PREFETCH(p) __asm__ volatile("prfm pldl1keep, %0" : : "Q"(*(const char *)(p)))
#else
#define COLI_PREFETCH(p) __builtin_prefetch((p), 0, 3)
#endif

static inline int has_group_scales(int format)
{
    return format == COLI_I8_GROUP || format == COLI_I4_GROUP;
}

static inline float bits_to_float(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t float_to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* Exact, subnormals included: the bits moved into place are the value scaled by 2^-112. */
static inline float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = (uint32_t)(h & 0x7FFF) << 13;
    if (magnitude >= 0x0F800000u) /* exponent all ones: infinity or NaN */
        return bits_to_float(sign | (magnitude + 0x70000000u));
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p112f));
}

/* The dword of 4 consecutive activations that meets one line. */
static inline int32_t load_dword(const int8_t *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* One group of a token: where its q begin, and the index of its scale and sum. */
static inline int64_t group_index(const coli_acts *a, int group, int token)
{
    return (int64_t)group * a->stride + token;
}

/* ---- quantiser: what is left when an instruction set has done the 128 values ---------------------- */

/* Largest magnitude -> scale and 1/scale.  Returns 0 when the group's q are to be zero. */
static inline int group_scale(uint32_t magnitude, float *scale, float *inverse)
{
    if (magnitude >= BITS_INF) { /* the fault must reach the logits, and q must not be undefined */
        *scale = bits_to_float(BITS_QUIET_NAN);
        return 0;
    }
    if (magnitude < BITS_TINY) {
        *scale = 0.0f;
        return 0;
    }
    float absmax = bits_to_float(magnitude);
    *scale = absmax / 127.0f;
    *inverse = 127.0f / absmax;
    return 1;
}

/* Walk the groups [g0, g1) of x[0..n): whole ones in place, a ragged one through a zero-padded copy.
 * GROUP_FN(const float *x, int8_t *q, float *scale, int32_t *sum) quantises 128 values and returns
 * the largest magnitude. */
#define COLI_QUANTIZE_ENTRIES(ISA, ATTR, GROUP_FN)                                                               \
    ATTR static uint32_t quantize_groups_##ISA(const float *x, int n, coli_acts *a, int token, int g0, int g1)   \
    {                                                                                                            \
        uint32_t largest = 0;                                                                                    \
        for (int g = g0; g < g1; g++) {                                                                          \
            int64_t at = group_index(a, g, token);                                                               \
            int left = n - g * COLI_GROUP;                                                                       \
            const float *from = x + (int64_t)g * COLI_GROUP;                                                     \
            float padded[COLI_GROUP];                                                                            \
            if (left < COLI_GROUP) {                                                                             \
                memset(padded, 0, sizeof padded);                                                                \
                if (left > 0)                                                                                    \
                    memcpy(padded, from, (size_t)left * 4);                                                      \
                from = padded;                                                                                   \
            }                                                                                                    \
            uint32_t magnitude = GROUP_FN(from, a->q + at * COLI_GROUP, a->scale + at, a->sum + at);             \
            largest = magnitude > largest ? magnitude : largest;                                                 \
        }                                                                                                        \
        return largest;                                                                                          \
    }                                                                                                            \
    ATTR static uint32_t quantize_##ISA(const float *x, int n, coli_acts *a, int token)                          \
    {                                                                                                            \
        return quantize_groups_##ISA(x, n, a, token, 0, a->n_groups);                                            \
    }

/* ---- unrolling by names: gcc 12 leaves arrays of vectors in memory -------------------------------- */

/* FOR_STREAMS(M) is M(0) .. M(n_streams - 1) n_streams a constant. */
#define FOR_STREAMS(M)                                                                                           \
    M(0)                                                                                                         \
    if (n_streams > 1) {                                                                                         \
        M(1)                                                                                                     \
    }                                                                                                            \
    if (n_streams > 2) {                                                                                         \
        M(2)                                                                                                     \
    }                                                                                                            \
    if (n_streams > 3) {                                                                                         \
        M(3)                                                                                                     \
    }

/* M(0) .. M(n - 1) for the n = 2, 4 or 6 tokens of a register tile. */
#define FOR_TOKENS(M)                                                                                            \
    M(0)                                                                                                         \
    M(1)                                                                                                         \
    if (n > 2) {                                                                                                 \
        M(2)                                                                                                     \
        M(3)                                                                                                     \
    }                                                                                                            \
    if (n > 4) {                                                                                                 \
        M(4)                                                                                                     \
        M(5)                                                                                                     \
    }

/* The block that follows starts with its header: prefetch the lines that payloads' own prefetches will skip. */
#define GEMV_AHEAD(s)                                                                                            \
    for (int64_t i = 0; i < header; i += LINE)                                                                   \
        COLI_PREFETCH(p##s + AHEAD_BYTES + i);

/* ---- GEMV and GEMM entries ------------------------------------------------------------------------ */

/* Each instruction set writes one always-inlined walker, GEMV(blocks, n_streams, n_groups, a, token, y,
 * int4, group_scales), and here it is compiled for every constant (streams, format). */
#define COLI_GEMV_ENTRY(NAME, ATTR, WALKER, INT4, GROUP_SCALES)                                                  \
    ATTR static void NAME(const uint8_t *const *blocks, int n_blocks, int n_groups, const coli_acts *a,          \
                          int token, float *const *y)                                                            \
    {                                                                                                            \
        switch (n_blocks) {                                                                                      \
        case 4:                                                                                                  \
            WALKER(blocks, 4, n_groups, a, token, y, INT4, GROUP_SCALES);                                        \
            break;                                                                                               \
        case 3:                                                                                                  \
            WALKER(blocks, 3, n_groups, a, token, y, INT4, GROUP_SCALES);                                        \
            break;                                                                                               \
        case 2:                                                                                                  \
            WALKER(blocks, 2, n_groups, a, token, y, INT4, GROUP_SCALES);                                        \
            break;                                                                                               \
        case 1:                                                                                                  \
            WALKER(blocks, 1, n_groups, a, token, y, INT4, GROUP_SCALES);                                        \
            break;                                                                                               \
        }                                                                                                        \
    }

#define COLI_GEMV_ENTRIES(ISA, ATTR, WALKER)                                                                     \
    COLI_GEMV_ENTRY(gemv_i8_row_##ISA, ATTR, WALKER, 0, 0)                                                       \
    COLI_GEMV_ENTRY(gemv_i8_group_##ISA, ATTR, WALKER, 0, 1)                                                     \
    COLI_GEMV_ENTRY(gemv_i4_row_##ISA, ATTR, WALKER, 1, 0)                                                       \
    COLI_GEMV_ENTRY(gemv_i4_group_##ISA, ATTR, WALKER, 1, 1)

/* A token of a prefill pass, for one group: its activations as the tile wants them. */
struct gemm_token {
    const uint8_t *x;
    float scale;
    int32_t sum;
};

/* Beside line i of 32 decoded ones: the line of the next group that takes its turn, int4 having half as many. */
#define GEMM_PREFETCH(b, i)                                                                                      \
    if (!int4 || (i) % 2 == 0)                                                                                   \
        COLI_PREFETCH(next[b] + (int4 ? (i) / 2 : (i)) * LINE);

#define COLI_INT_ENTRIES(isa)                                                                                    \
    .gemv = {gemv_i8_row_##isa, gemv_i8_group_##isa, gemv_i4_row_##isa, gemv_i4_group_##isa},                    \
    .gemm = {gemm_i8_row_##isa, gemm_i8_group_##isa, gemm_i4_row_##isa, gemm_i4_group_##isa},                    \
    .quantize = quantize_##isa, .quantize_groups = quantize_groups_##isa

#endif
