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

/* High nibbles stay where they are: their sum is 16 times too large, and exactly so. */
#define I4_GROUP(s)                                                                                              \
    {                                                                                                            \
        __m512i d = offset, h = _mm512_setzero_si512();                                                          \
        _Pragma("GCC unroll 16") for (int j = 0; j < I4_LINES; j++)                                              \
        {                                                                                                        \
            __m512i w = _mm512_and_si512(load512(p##s + j * LINE), low);                                         \
            AVX512_PIN(w);                                                                                       \
            __m512i w_high = _mm512_andnot_si512(low, load512(p##s + j * LINE));                                 \
            AVX512_PIN(w_high);                                                                                  \
            d = add_dot(d, w, q + 8 * j);                                                                        \
            h = add_dot(h, w_high, q + 8 * j + 4);                                                               \
            COLI_PREFETCH(p##s + AHEAD_BYTES + j * LINE);                                                        \
        }                                                                                                        \
        p##s += I4_GROUP_BYTES;                                                                                  \
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
            COLI_PREFETCH(payload + I4_GROUP_BYTES);
            store512(w, _mm512_and_si512(v, low));
            store512(w + LINE, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
        }
    } else {
        for (int j = 0; j < I8_LINES; j++, payload += LINE, w += LINE) {
            store512(w, _mm512_xor_si512(load512(payload), flip));
            COLI_PREFETCH(payload + I8_GROUP_BYTES);
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
                                   const float (*scale)[16], float *sums, int block_stride, const int int4,
                                   const int group_scales)
{
    TILE_DECLARE(0) TILE_DECLARE(1) TILE_DECLARE(2) TILE_DECLARE(3) TILE_DECLARE(4) TILE_DECLARE(5)
    for (int i = 0; i < I8_LINES; i++, w += LINE) {
        const __m512i w0 = load512(w), w1 = load512(w + (n_blocks > 1 ? I8_GROUP_BYTES : 0));
        const __m512i w2 = load512(w + (n_blocks > 1 ? 2 * I8_GROUP_BYTES : 0));
        const __m512i w3 = load512(w + (n_blocks > 1 ? 3 * I8_GROUP_BYTES : 0));
        FOR_TOKENS(TILE_STEP)
    }
    FOR_TOKENS(TILE_ADD)
}

#define GEMM_ISA avx512vnni
#define GEMM_ATTR AVX512
#define GEMM_TILE_BLOCKS 4
#define GEMM_WIDE 0
#define GEMM_TOKENS 96
#define GEMM_MIN_TOKENS 3
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
