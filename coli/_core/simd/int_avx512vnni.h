/* Integer kernels for AVX512-VNNI: a 64-byte line of 16 rows is one vector. */
#ifndef COLI_INT_AVX512VNNI_H
#define COLI_INT_AVX512VNNI_H

#include <immintrin.h>

#include "layout.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,avx2")))
#define AVX512_INLINE AVX512 static inline __attribute__((always_inline))

/* See AVX2_PIN: without it gcc 12 copies every sum once a step and then has too few registers. */
#define AVX512_PIN(v) __asm__ volatile("" : "+v"(v))

AVX512_INLINE __m512i load512(const void *p) { return _mm512_loadu_si512(p); }
AVX512_INLINE void store512(void *p, __m512i v) { _mm512_storeu_si512(p, v); }

AVX512_INLINE __m512i broadcast512(const void *p)
{
    return _mm512_set1_epi32(load_dword((const int8_t *)p));
}

/* ---- quantiser ---------------------------------------------------------------------------------- */

AVX512_INLINE uint32_t quantize_group_avx512vnni(const float *x, int8_t *q, float *scale, int32_t *sum)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i v[COLI_GROUP / 16], max = _mm512_setzero_si512(), total = max;
    float inverse = 0.0f;
    for (int j = 0; j < COLI_GROUP / 16; j++) {
        v[j] = load512(x + 16 * j);
        max = _mm512_max_epu32(max, _mm512_and_si512(v[j], no_sign));
    }
    uint32_t magnitude = _mm512_reduce_max_epu32(max);
    if (!group_scale(magnitude, scale, &inverse)) {
        memset(q, 0, COLI_GROUP);
        *sum = 0;
        return magnitude;
    }
    const __m512 inv = _mm512_set1_ps(inverse);
    for (int j = 0; j < COLI_GROUP / 16; j++) { /* the conversion rounds to nearest even, which is what rint is */
        v[j] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(v[j]), inv));
        total = _mm512_add_epi32(total, v[j]);
        _mm_storeu_si128((__m128i *)(q + 16 * j), _mm512_cvtepi32_epi8(v[j]));
    }
    *sum = _mm512_reduce_add_epi32(total);
    return magnitude;
}

COLI_QUANTIZE_ENTRIES(avx512vnni, AVX512, quantize_group_avx512vnni)

/* ---- GEMV --------------------------------------------------------------------------------------- */

/* dpbusd with the 4 activations broadcast from memory: with the intrinsic, gcc 12 keeps all activations of a
 * turn in registers, and that is slower from RAM. */
AVX512_INLINE __m512i add_dot(__m512i sum, __m512i w, const int8_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int8_t(*)[4])x));
    return sum;
}

AVX512_INLINE __m256i load_halves(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

#define GEMV_DECLARE(s)                                                                                          \
    const uint8_t *p##s = blocks[s < n_streams ? s : 0] + header;                                                \
    __m512 y##s = _mm512_setzero_ps();

/* One group of one stream, then of the next.  Every stream has its own load instructions, by which the prefetchers
 * of a core tell streams apart (one loop over the streams reads a third slower from RAM, Zen5).  Lines are pinned
 * so that each prefetch stays beside its line: left alone, gcc issues those of a group in one burst, which costs
 * a tenth.
 * dpbusd wants the weight unsigned: w ^ 0x80 is w + 128, so the sum starts at -128 * sum(x). */
#define I8_GROUP(s)                                                                                              \
    {                                                                                                            \
        __m512i d = offset;                                                                                      \
        _Pragma("GCC unroll 32") for (int j = 0; j < I8_LINES; j++)                                              \
        {                                                                                                        \
            __m512i w = _mm512_xor_si512(load512(p##s + j * LINE), flip);                                        \
            AVX512_PIN(w);                                                                                       \
            d = add_dot(d, w, q + 4 * j);                                                                        \
            COLI_PREFETCH(p##s + AHEAD_BYTES + j * LINE);                                                        \
        }                                                                                                        \
        p##s += I8_GROUP_BYTES;                                                                                  \
        GEMV_ADD(s)                                                                                              \
    }

/* High nibbles stay where they are: their sum is 16 times too large, and exactly so.  Not unrolled, which is 2 %
 * faster from RAM (5 % slower from L2); int8 is the other way round. */
#define I4_GROUP(s)                                                                                              \
    {                                                                                                            \
        __m512i d = offset, h = _mm512_setzero_si512();                                                          \
        _Pragma("GCC unroll 1") for (int j = 0; j < I4_LINES; j++, p##s += LINE)                                 \
        {                                                                                                        \
            __m512i w = _mm512_and_si512(load512(p##s), low);                                                    \
            AVX512_PIN(w);                                                                                       \
            __m512i w_high = _mm512_andnot_si512(low, load512(p##s));                                            \
            AVX512_PIN(w_high);                                                                                  \
            d = add_dot(d, w, q + 8 * j);                                                                        \
            h = add_dot(h, w_high, q + 8 * j + 4);                                                               \
            COLI_PREFETCH(p##s + AHEAD_BYTES);                                                                   \
        }                                                                                                        \
        d = _mm512_add_epi32(d, _mm512_srai_epi32(h, 4));                                                        \
        GEMV_ADD(s)                                                                                              \
    }

#define GEMV_ADD(s)                                                                                              \
    __m512 scale = sx;                                                                                           \
    if (group_scales)                                                                                            \
        scale = _mm512_mul_ps(sx, _mm512_cvtph_ps(load_halves(blocks[s] + g * 32)));                             \
    y##s = _mm512_add_ps(y##s, _mm512_mul_ps(_mm512_cvtepi32_ps(d), scale));

#define GEMV_STORE(s)                                                                                            \
    if (!group_scales)                                                                                           \
        y##s = _mm512_mul_ps(y##s, _mm512_loadu_ps(blocks[s]));                                                  \
    _mm512_storeu_ps(y[s], y##s);

AVX512_INLINE void gemv_avx512vnni(const uint8_t *const *blocks, const int n_streams, int n_groups,
                                   const coli_acts *a, int token, float *const *y, const int int4,
                                   const int group_scales)
{
    const __m512i flip = _mm512_set1_epi8((char)0x80), low = _mm512_set1_epi8(15);
    const int64_t header = coli_header_bytes(group_scales ? COLI_I8_GROUP : COLI_I8_ROW, n_groups);
    GEMV_DECLARE(0) GEMV_DECLARE(1) GEMV_DECLARE(2) GEMV_DECLARE(3)
    for (int g = 0; g < n_groups; g++) {
        const int64_t at = group_index(a, g, token);
        const int8_t *q = a->q + at * COLI_GROUP;
        const __m512i offset = _mm512_set1_epi32((int4 ? -8 : -128) * a->sum[at]);
        const __m512 sx = _mm512_set1_ps(a->scale[at]);
        if (int4) {
            FOR_STREAMS(I4_GROUP)
        } else {
            FOR_STREAMS(I8_GROUP)
        }
    }
    FOR_STREAMS(GEMV_STORE)
    FOR_STREAMS(GEMV_AHEAD)
}

COLI_GEMV_ENTRIES(avx512vnni, AVX512, gemv_avx512vnni)

#undef GEMV_DECLARE
#undef I8_GROUP
#undef I4_GROUP
#undef GEMV_ADD
#undef GEMV_STORE

/* ---- few tokens --------------------------------------------------------------------------------- */

/* 2 to 8 tokens: the GEMV's walk, each line multiplied with every token, so that weights come from RAM once and as
 * fast as for one token.  n is 2, 4, 6 or 8; an odd token is padded by a copy of the last one. */
#define FEW_TOKENS(M)                                                                                            \
    M(0)                                                                                                         \
    M(1)                                                                                                         \
    if (n > 2) {                                                                                                 \
        M(2)                                                                                                     \
        M(3)                                                                                                     \
    }                                                                                                            \
    if (n > 4) {                                                                                                 \
        M(4)                                                                                                     \
        M(5)                                                                                                     \
    }                                                                                                            \
    if (n > 6) {                                                                                                 \
        M(6)                                                                                                     \
        M(7)                                                                                                     \
    }

#define FEW_DECLARE(s) const uint8_t *p##s = blocks[s < n_streams ? s : 0] + header;

#define FEW_START(k) __m512i d##k = _mm512_set1_epi32((int4 ? -8 : -128) * t[k < n ? k : 0].sum);
#define FEW_START_HIGH(k) __m512i h##k = _mm512_setzero_si512();
#define FEW_I8(k) d##k = add_dot(d##k, w, (const int8_t *)t[k].x + 4 * j);
#define FEW_I4(k)                                                                                                \
    d##k = add_dot(d##k, w, (const int8_t *)t[k].x + 8 * j);                                                     \
    h##k = add_dot(h##k, w_high, (const int8_t *)t[k].x + 8 * j + 4);
#define FEW_MERGE(k) d##k = _mm512_add_epi32(d##k, _mm512_srai_epi32(h##k, 4));

#define FEW_ADD(k)                                                                                               \
    {                                                                                                            \
        __m512 s = _mm512_set1_ps(t[k].scale);                                                                   \
        if (group_scales)                                                                                        \
            s = _mm512_mul_ps(s, sw);                                                                            \
        sum[k] = _mm512_add_ps(sum[k], _mm512_mul_ps(_mm512_cvtepi32_ps(d##k), s));                              \
    }

#define FEW_GROUP(s)                                                                                             \
    {                                                                                                            \
        FEW_START(0) FEW_START(1) FEW_START(2) FEW_START(3) FEW_START(4) FEW_START(5) FEW_START(6) FEW_START(7)  \
        if (int4) {                                                                                              \
            FEW_START_HIGH(0) FEW_START_HIGH(1) FEW_START_HIGH(2) FEW_START_HIGH(3)                              \
            FEW_START_HIGH(4) FEW_START_HIGH(5) FEW_START_HIGH(6) FEW_START_HIGH(7)                              \
            _Pragma("GCC unroll 4") for (int j = 0; j < I4_LINES; j++, p##s += LINE)                             \
            {                                                                                                    \
                __m512i w = _mm512_and_si512(load512(p##s), low);                                                \
                AVX512_PIN(w);                                                                                   \
                __m512i w_high = _mm512_andnot_si512(low, load512(p##s));                                        \
                AVX512_PIN(w_high);                                                                              \
                FEW_TOKENS(FEW_I4)                                                                               \
                COLI_PREFETCH(p##s + AHEAD_BYTES);                                                               \
            }                                                                                                    \
            FEW_TOKENS(FEW_MERGE)                                                                                \
        } else {                                                                                                 \
            _Pragma("GCC unroll 4") for (int j = 0; j < I8_LINES; j++, p##s += LINE)                             \
            {                                                                                                    \
                __m512i w = _mm512_xor_si512(load512(p##s), flip);                                               \
                AVX512_PIN(w);                                                                                   \
                FEW_TOKENS(FEW_I8)                                                                               \
                COLI_PREFETCH(p##s + AHEAD_BYTES);                                                               \
            }                                                                                                    \
        }                                                                                                        \
        __m512 *const sum = sums[s];                                                                             \
        __m512 sw = _mm512_setzero_ps();                                                                         \
        if (group_scales)                                                                                        \
            sw = _mm512_cvtph_ps(load_halves(blocks[s] + g * 32));                                               \
        FEW_TOKENS(FEW_ADD)                                                                                      \
    }

AVX512_INLINE void few_avx512vnni(const uint8_t *const *blocks, const int n_streams, int n_groups,
                                  const coli_acts *a, const int32_t *tokens, int n_tokens, const int n,
                                  float *const *y, int64_t y_stride, const int int4, const int group_scales)
{
    const __m512i flip = _mm512_set1_epi8((char)0x80), low = _mm512_set1_epi8(15);
    const int64_t header = coli_header_bytes(group_scales ? COLI_I8_GROUP : COLI_I8_ROW, n_groups);
    __m512 sums[COLI_STREAMS][8];
    struct gemm_token t[8];
    FEW_DECLARE(0) FEW_DECLARE(1) FEW_DECLARE(2) FEW_DECLARE(3)
    for (int s = 0; s < n_streams; s++)
        for (int k = 0; k < n; k++)
            sums[s][k] = _mm512_setzero_ps();
    for (int g = 0; g < n_groups; g++) {
        for (int k = 0; k < n; k++) {
            const int i = k < n_tokens ? k : n_tokens - 1;
            const int64_t at = group_index(a, g, tokens ? tokens[i] : i);
            t[k] = (struct gemm_token){(const uint8_t *)a->q + at * COLI_GROUP, a->scale[at], a->sum[at]};
        }
        FOR_STREAMS(FEW_GROUP)
    }
    for (int s = 0; s < n_streams; s++) {
        const __m512 row = _mm512_loadu_ps(blocks[s]);
        for (int k = 0; k < n_tokens; k++)
            _mm512_storeu_ps(y[s] + k * y_stride, group_scales ? sums[s][k] : _mm512_mul_ps(sums[s][k], row));
    }
    FOR_STREAMS(GEMV_AHEAD)
}

/* n_tokens is 2 to 8; four blocks at once, or one by one. */
AVX512_INLINE void few_tokens_avx512vnni(const uint8_t *const *blocks, int n_blocks, int n_groups,
                                         const coli_acts *a, const int32_t *tokens, int n_tokens, float *const *y,
                                         int64_t y_stride, const int int4, const int group_scales)
{
#define FEW(STREAMS, B)                                                                                          \
    switch ((n_tokens + 1) / 2) {                                                                                \
    case 1:                                                                                                      \
        few_avx512vnni(blocks + B, STREAMS, n_groups, a, tokens, n_tokens, 2, y + B, y_stride, int4,             \
                       group_scales);                                                                            \
        break;                                                                                                   \
    case 2:                                                                                                      \
        few_avx512vnni(blocks + B, STREAMS, n_groups, a, tokens, n_tokens, 4, y + B, y_stride, int4,             \
                       group_scales);                                                                            \
        break;                                                                                                   \
    case 3:                                                                                                      \
        few_avx512vnni(blocks + B, STREAMS, n_groups, a, tokens, n_tokens, 6, y + B, y_stride, int4,             \
                       group_scales);                                                                            \
        break;                                                                                                   \
    default:                                                                                                     \
        few_avx512vnni(blocks + B, STREAMS, n_groups, a, tokens, n_tokens, 8, y + B, y_stride, int4,             \
                       group_scales);                                                                            \
    }
    if (n_blocks == COLI_STREAMS) {
        FEW(COLI_STREAMS, 0)
    } else {
        for (int b = 0; b < n_blocks; b++) {
            FEW(1, b)
        }
    }
#undef FEW
}

/* ---- GEMM --------------------------------------------------------------------------------------- */

AVX512_INLINE void load_scales_avx512vnni(const uint8_t *header, int group, float *scale)
{
    _mm512_storeu_ps(scale, _mm512_cvtph_ps(load_halves(header + group * 32)));
}

/* Both formats become 32 lines of unsigned bytes: w + 128, or nibbles. */
AVX512_INLINE void decode_avx512vnni(const uint8_t *payload, uint8_t *w, int int4)
{
    const __m512i flip = _mm512_set1_epi8((char)0x80), low = _mm512_set1_epi8(15);
    if (int4) {
        for (int j = 0; j < I4_LINES; j++, payload += LINE, w += 2 * LINE) {
            const __m512i v = load512(payload);
            store512(w, _mm512_and_si512(v, low));
            store512(w + LINE, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
        }
    } else {
        for (int j = 0; j < I8_LINES; j++, payload += LINE, w += LINE) {
            store512(w, _mm512_xor_si512(load512(payload), flip));
        }
    }
}

/* The register tile: 4 blocks x 6 tokens are 24 sums, 4 weights and an activation of 32 registers;
 * a line of weights is loaded once for six products, a dword of activations once for four. */
#define FOR_TILE_BLOCKS(M, k)                                                                                    \
    M(0, k)                                                                                                      \
    if (n_blocks > 1) {                                                                                          \
        M(1, k)                                                                                                  \
        M(2, k)                                                                                                  \
        M(3, k)                                                                                                  \
    }

#define TILE_DECLARE(k)                                                                                          \
    const uint8_t *x##k = t[k < n ? k : 0].x;                                                                    \
    __m512i c0##k = _mm512_set1_epi32((int4 ? -8 : -128) * t[k < n ? k : 0].sum);                                \
    __m512i c1##k = c0##k, c2##k = c0##k, c3##k = c0##k;

#define TILE_PRODUCT(b, k)                                                                                       \
    c##b##k = _mm512_dpbusd_epi32(c##b##k, w##b, x);                                                             \
    AVX512_PIN(c##b##k);

#define TILE_STEP(k)                                                                                             \
    {                                                                                                            \
        const __m512i x = broadcast512(x##k + 4 * i);                                                            \
        FOR_TILE_BLOCKS(TILE_PRODUCT, k)                                                                         \
    }

#define TILE_SUM(b, k)                                                                                           \
    {                                                                                                            \
        float *y = sums + b * block_stride + 16 * k;                                                             \
        __m512 s = group_scales ? _mm512_mul_ps(sx, _mm512_load_ps(scale[b])) : sx;                              \
        s = _mm512_mul_ps(_mm512_cvtepi32_ps(c##b##k), s);                                                       \
        _mm512_store_ps(y, _mm512_add_ps(_mm512_load_ps(y), s));                                                 \
    }

#define TILE_ADD(k)                                                                                              \
    {                                                                                                            \
        const __m512 sx = _mm512_set1_ps(t[k].scale);                                                            \
        FOR_TILE_BLOCKS(TILE_SUM, k)                                                                             \
    }

AVX512_INLINE void tile_avx512vnni(const uint8_t *w, const int n_blocks, const struct gemm_token *t, const int n,
                                   const float (*scale)[16], float *sums, int block_stride, const uint8_t *const *next,
                                   const int int4, const int group_scales)
{
    TILE_DECLARE(0) TILE_DECLARE(1) TILE_DECLARE(2) TILE_DECLARE(3) TILE_DECLARE(4) TILE_DECLARE(5)
    for (int i = 0; i < I8_LINES; i++, w += LINE) {
        const __m512i w0 = load512(w), w1 = load512(w + (n_blocks > 1 ? I8_GROUP_BYTES : 0));
        const __m512i w2 = load512(w + (n_blocks > 1 ? 2 * I8_GROUP_BYTES : 0));
        const __m512i w3 = load512(w + (n_blocks > 1 ? 3 * I8_GROUP_BYTES : 0));
        if (next) {
            GEMM_PREFETCH(0, i)
            if (n_blocks > 1) {
                GEMM_PREFETCH(1, i)
                GEMM_PREFETCH(2, i)
                GEMM_PREFETCH(3, i)
            }
        }
        FOR_TOKENS(TILE_STEP)
    }
    FOR_TOKENS(TILE_ADD)
}

#define GEMM_ISA avx512vnni
#define GEMM_ATTR AVX512
#define GEMM_TILE_BLOCKS 4
#define GEMM_WIDE 0
#define GEMM_TOKENS 96
#define GEMM_MIN_TOKENS 2
#define GEMM_FEW_TOKENS 8
#include "gemm.inc"

#undef FOR_TILE_BLOCKS
#undef TILE_DECLARE
#undef TILE_PRODUCT
#undef TILE_STEP
#undef TILE_SUM
#undef TILE_ADD

AVX512 static uint64_t read_xor_avx512vnni(const uint8_t *const *streams, int n_streams, int64_t n_bytes)
{
    __m512i v0 = _mm512_setzero_si512(), v1 = v0, v2 = v0, v3 = v0;
#define READ(s)                                                                                                  \
    v##s = _mm512_xor_si512(v##s, load512(streams[s] + i));                                                      \
    COLI_PREFETCH(streams[s] + i + AHEAD_BYTES);
    for (int64_t i = 0; i < n_bytes; i += LINE) {
        FOR_STREAMS(READ)
    }
#undef READ
    v0 = _mm512_xor_si512(_mm512_xor_si512(v0, v1), _mm512_xor_si512(v2, v3));
    uint64_t part[8];
    store512(part, v0);
    for (int j = 1; j < 8; j++)
        part[0] ^= part[j];
    return part[0];
}

#endif
