/* Integer kernels for AVX-VNNI: AVX2's vectors of 8 rows with the dot product of four bytes in one instruction.
 * Quantiser, epilogue and decoding of int4 are those of int_avx2.h. */
#ifndef COLI_INT_AVXVNNI_H
#define COLI_INT_AVXVNNI_H

#include "int_avx2.h"

#define AVXVNNI __attribute__((target("avx2,f16c,avxvnni")))
#define AVXVNNI_INLINE AVXVNNI static inline __attribute__((always_inline))

COLI_QUANTIZE_ENTRIES(avxvnni, AVXVNNI, quantize_group_avx2)

/* ---- GEMV --------------------------------------------------------------------------------------- */

AVXVNNI_INLINE __m256i broadcast_dword(const void *p) { return _mm256_set1_epi32(load_dword((const int8_t *)p)); }

#define GEMV_DECLARE(s)                                                                                          \
    const uint8_t *p##s = blocks[s < n_streams ? s : 0] + header;                                                \
    __m256 y##s##0 = _mm256_setzero_ps(), y##s##1 = _mm256_setzero_ps();

/* One group of one stream, then of the next: see int_avx512vnni.h.  dpbusd wants the weight unsigned:
 * w ^ 0x80 is w + 128, so the sum starts at -128 * sum(x). */
#define I8_GROUP(s)                                                                                              \
    {                                                                                                            \
        __m256i d0 = offset, d1 = offset;                                                                        \
        _Pragma("GCC unroll 32") for (int j = 0; j < I8_LINES; j++)                                              \
        {                                                                                                        \
            __m256i w0 = _mm256_xor_si256(load256(p##s + j * LINE), flip);                                       \
            AVX2_PIN(w0);                                                                                        \
            __m256i w1 = _mm256_xor_si256(load256(p##s + j * LINE + 32), flip), x = broadcast_dword(q + 4 * j);  \
            AVX2_PIN(w1);                                                                                        \
            AVX2_PIN(x);                                                                                         \
            d0 = _mm256_dpbusd_avx_epi32(d0, w0, x);                                                             \
            d1 = _mm256_dpbusd_avx_epi32(d1, w1, x);                                                             \
            COLI_PREFETCH(p##s + AHEAD_BYTES + j * LINE);                                                        \
        }                                                                                                        \
        p##s += I8_GROUP_BYTES;                                                                                  \
        GEMV_ADD(s)                                                                                              \
    }

/* High nibbles stay where they are: their sum is 16 times too large, and exactly so. */
#define I4_GROUP(s)                                                                                              \
    {                                                                                                            \
        __m256i d0 = offset, d1 = offset, h0 = _mm256_setzero_si256(), h1 = h0;                                  \
        _Pragma("GCC unroll 16") for (int j = 0; j < I4_LINES; j++)                                              \
        {                                                                                                        \
            __m256i w0 = load256(p##s + j * LINE), w1 = load256(p##s + j * LINE + 32);                           \
            AVX2_PIN(w0);                                                                                        \
            AVX2_PIN(w1);                                                                                        \
            __m256i x = broadcast_dword(q + 8 * j), x_high = broadcast_dword(q + 8 * j + 4);                     \
            AVX2_PIN(x);                                                                                         \
            AVX2_PIN(x_high);                                                                                    \
            d0 = _mm256_dpbusd_avx_epi32(d0, _mm256_and_si256(w0, low), x);                                      \
            d1 = _mm256_dpbusd_avx_epi32(d1, _mm256_and_si256(w1, low), x);                                      \
            h0 = _mm256_dpbusd_avx_epi32(h0, _mm256_andnot_si256(low, w0), x_high);                              \
            h1 = _mm256_dpbusd_avx_epi32(h1, _mm256_andnot_si256(low, w1), x_high);                              \
            COLI_PREFETCH(p##s + AHEAD_BYTES + j * LINE);                                                        \
        }                                                                                                        \
        p##s += I4_GROUP_BYTES;                                                                                  \
        d0 = _mm256_add_epi32(d0, _mm256_srai_epi32(h0, 4));                                                     \
        d1 = _mm256_add_epi32(d1, _mm256_srai_epi32(h1, 4));                                                     \
        GEMV_ADD(s)                                                                                              \
    }

#define GEMV_ADD(s)                                                                                              \
    y##s##0 = add_group_avx2(y##s##0, d0, sx, blocks[s] + g * 32, group_scales);                                 \
    y##s##1 = add_group_avx2(y##s##1, d1, sx, blocks[s] + g * 32 + 16, group_scales);

#define GEMV_STORE(s)                                                                                            \
    store_rows_avx2(y[s], y##s##0, blocks[s], group_scales);                                                     \
    store_rows_avx2(y[s] + 8, y##s##1, blocks[s] + 32, group_scales);

AVXVNNI_INLINE void gemv_avxvnni(const uint8_t *const *blocks, const int n_streams, int n_groups,
                                 const coli_acts *a, int token, float *const *y, const int int4,
                                 const int group_scales)
{
    const __m256i flip = _mm256_set1_epi8((char)0x80), low = _mm256_set1_epi8(15);
    const int64_t header = coli_header_bytes(group_scales ? COLI_I8_GROUP : COLI_I8_ROW, n_groups);
    GEMV_DECLARE(0) GEMV_DECLARE(1) GEMV_DECLARE(2) GEMV_DECLARE(3)
    for (int g = 0; g < n_groups; g++) {
        const int64_t at = group_index(a, g, token);
        const int8_t *q = a->q + at * COLI_GROUP;
        const __m256i offset = _mm256_set1_epi32((int4 ? -8 : -128) * a->sum[at]);
        const __m256 sx = _mm256_set1_ps(a->scale[at]);
        if (int4) {
            FOR_STREAMS(I4_GROUP)
        } else {
            FOR_STREAMS(I8_GROUP)
        }
    }
    FOR_STREAMS(GEMV_STORE)
    FOR_STREAMS(GEMV_AHEAD)
}

COLI_GEMV_ENTRIES(avxvnni, AVXVNNI, gemv_avxvnni)

#undef GEMV_DECLARE
#undef I8_GROUP
#undef I4_GROUP
#undef GEMV_ADD
#undef GEMV_STORE

/* ---- GEMM --------------------------------------------------------------------------------------- */

AVXVNNI_INLINE void load_scales_avxvnni(const uint8_t *header, int group, float *scale)
{
    load_scales_avx2(header, group, scale);
}

/* Both formats become 32 lines of unsigned bytes: w + 128, or nibbles. */
AVXVNNI_INLINE void decode_avxvnni(const uint8_t *payload, uint8_t *w, int int4)
{
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    if (int4) {
        decode_i4_avx2(payload, w);
        return;
    }
    for (int j = 0; j < I8_LINES; j++, payload += LINE, w += LINE) {
        store256(w, _mm256_xor_si256(load256(payload), flip));
        store256(w + 32, _mm256_xor_si256(load256(payload + 32), flip));
        COLI_PREFETCH(payload + I8_GROUP_BYTES);
    }
}

#define TILE_DECLARE(k)                                                                                          \
    const uint8_t *x##k = t[k < n ? k : 0].x;                                                                    \
    __m256i a##k##0 = _mm256_set1_epi32((int4 ? -8 : -128) * t[k < n ? k : 0].sum), a##k##1 = a##k##0;

#define TILE_STEP(k)                                                                                             \
    {                                                                                                            \
        const __m256i x = broadcast_dword(x##k + 4 * i);                                                         \
        a##k##0 = _mm256_dpbusd_avx_epi32(a##k##0, w0, x);                                                       \
        AVX2_PIN(a##k##0);                                                                                       \
        a##k##1 = _mm256_dpbusd_avx_epi32(a##k##1, w1, x);                                                       \
        AVX2_PIN(a##k##1);                                                                                       \
    }

AVXVNNI_INLINE void tile_avxvnni(const uint8_t *w, const int n_blocks, const struct gemm_token *t, const int n,
                                 const float (*scale)[16], float *sums, int block_stride, const uint8_t *const *next,
                                 const int int4, const int group_scales)
{
    (void)n_blocks, (void)block_stride, (void)next; /* one block a tile, and its decoding prefetches */
    TILE_DECLARE(0) TILE_DECLARE(1) TILE_DECLARE(2) TILE_DECLARE(3) TILE_DECLARE(4) TILE_DECLARE(5)
    for (int i = 0; i < I8_LINES; i++, w += LINE) {
        __m256i w0 = load256(w), w1 = load256(w + 32);
        AVX2_PIN(w0);
        AVX2_PIN(w1);
        FOR_TOKENS(TILE_STEP)
    }
    FOR_TOKENS(TILE_ADD_AVX2)
}

#define GEMM_ISA avxvnni
#define GEMM_ATTR AVXVNNI
#define GEMM_TILE_BLOCKS 1
#define GEMM_WIDE 0
#define GEMM_TOKENS 72
#define GEMM_MIN_TOKENS 3
#include "gemm.inc"

#undef TILE_DECLARE
#undef TILE_STEP

#endif
