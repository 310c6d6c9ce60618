/* Integer kernels for AVX2 (with F16C, without FMA): 8 rows a vector, activations as a broadcast dword. */
#ifndef COLI_INT_AVX2_H
#define COLI_INT_AVX2_H

#include <immintrin.h>

#include "layout.h"

#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX2_INLINE AVX2 static inline __attribute__((always_inline))

/* gcc 12 loads a vector twice, reassociates additions and spills; an empty asm pins a value to a register. */
#define AVX2_PIN(v) __asm__ volatile("" : "+x"(v))

AVX2_INLINE __m256i load256(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
AVX2_INLINE void store256(void *p, __m256i v) { _mm256_storeu_si256((__m256i *)p, v); }

/* ---- quantiser ---------------------------------------------------------------------------------- */

AVX2_INLINE uint32_t quantize_group_avx2(const float *x, int8_t *q, float *scale, int32_t *sum)
{
    const __m256i no_sign = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i max = _mm256_setzero_si256(), max2 = max;
    float inverse = 0.0f;
    for (int i = 0; i < COLI_GROUP; i += 16) { /* magnitudes are >= 0, so a signed maximum is theirs */
        max = _mm256_max_epi32(max, _mm256_and_si256(load256(x + i), no_sign));
        max2 = _mm256_max_epi32(max2, _mm256_and_si256(load256(x + i + 8), no_sign));
    }
    max = _mm256_max_epi32(max, max2);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    uint32_t magnitude = (uint32_t)_mm_cvtsi128_si32(m);
    if (!group_scale(magnitude, scale, &inverse)) {
        memset(q, 0, COLI_GROUP);
        *sum = 0;
        return magnitude;
    }
    const __m256 inv = _mm256_set1_ps(inverse);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), one8 = _mm256_set1_epi8(1);
    const __m256i one16 = _mm256_set1_epi16(1);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < COLI_GROUP; i += 32) {
        __m256i v[4];
        for (int j = 0; j < 4; j++) /* the conversion rounds to nearest even, which is what rint is */
            v[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8 * j), inv));
        /* both packs work within 128-bit halves: put the dwords back in order */
        __m256i b = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        b = _mm256_permutevar8x32_epi32(b, order);
        store256(q + i, b);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(one8, b), one16));
    }
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4E));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xB1));
    *sum = _mm_cvtsi128_si32(t);
    return magnitude;
}

COLI_QUANTIZE_ENTRIES(avx2, AVX2, quantize_group_avx2)

/* ---- GEMV --------------------------------------------------------------------------------------- */

/* Epilogue of one group and one stream, shared with AVX-VNNI: y = y + float(dot) * (s_x [* s_w]). */
AVX2_INLINE __m256 add_group_avx2(__m256 y, __m256i dot, __m256 sx, const uint8_t *half_scales, int group_scales)
{
    if (group_scales)
        sx = _mm256_mul_ps(sx, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half_scales)));
    return _mm256_add_ps(y, _mm256_mul_ps(_mm256_cvtepi32_ps(dot), sx));
}

AVX2_INLINE void store_rows_avx2(float *y, __m256 sum, const uint8_t *row_scales, int group_scales)
{
    if (!group_scales)
        sum = _mm256_mul_ps(sum, _mm256_loadu_ps((const float *)row_scales));
    _mm256_storeu_ps(y, sum);
}

/* GEMV_BODY is the walk of up to four streams; a vector holds 8 rows, so a line is two of them.  GROUP is the
 * product of one group, which leaves dots in d<s>0, d<s>1 and moves p<s> to the next group. */
#define GEMV_DECLARE(s)                                                                                          \
    const uint8_t *p##s = blocks[s < n_streams ? s : 0] + header;                                                \
    __m256 y##s##0 = _mm256_setzero_ps(), y##s##1 = _mm256_setzero_ps();                                         \
    __m256i d##s##0 = _mm256_setzero_si256(), d##s##1 = d##s##0;

#define GEMV_ADD(s)                                                                                              \
    y##s##0 = add_group_avx2(y##s##0, d##s##0, sx, blocks[s] + g * 32, group_scales);                            \
    y##s##1 = add_group_avx2(y##s##1, d##s##1, sx, blocks[s] + g * 32 + 16, group_scales);

#define GEMV_STORE(s)                                                                                            \
    store_rows_avx2(y[s], y##s##0, blocks[s], group_scales);                                                     \
    store_rows_avx2(y[s] + 8, y##s##1, blocks[s] + 32, group_scales);

/* int8: maddubs wants one unsigned side, so the sign of x moves into w: |x| * (w * sign(x)).
 * A pair is at most 2 * 127 * 127 = 32258: int16 does not saturate, and w = -128 must not occur. */
#define I8_STEP(s)                                                                                               \
    {                                                                                                            \
        __m256i lo = load256(p##s), hi = load256(p##s + 32);                                                     \
        AVX2_PIN(lo);                                                                                            \
        AVX2_PIN(hi);                                                                                            \
        COLI_PREFETCH(p##s + AHEAD_BYTES);                                                                       \
        lo = _mm256_madd_epi16(_mm256_maddubs_epi16(abs_x, _mm256_sign_epi8(lo, x)), one);                       \
        hi = _mm256_madd_epi16(_mm256_maddubs_epi16(abs_x, _mm256_sign_epi8(hi, x)), one);                       \
        d##s##0 = _mm256_add_epi32(d##s##0, lo);                                                                 \
        d##s##1 = _mm256_add_epi32(d##s##1, hi);                                                                 \
        p##s += LINE;                                                                                            \
    }

/* int4: a nibble is 0..15, a pair at most 15 * 127 * 2 = 3810, so eight pairs (four lines, both nibbles)
 * add up in int16 (30480) before one widening. */
#define I4_LINE(k)                                                                                               \
    {                                                                                                            \
        __m256i lo = load256(p + k * LINE), hi = load256(p + k * LINE + 32);                                     \
        AVX2_PIN(lo);                                                                                            \
        AVX2_PIN(hi);                                                                                            \
        COLI_PREFETCH(p + AHEAD_BYTES + k * LINE);                                                               \
        __m256i x0 = _mm256_set1_epi32(load_dword(q + 8 * k)), x1 = _mm256_set1_epi32(load_dword(q + 8 * k + 4)); \
        lo16 = _mm256_add_epi16(lo16, _mm256_maddubs_epi16(_mm256_and_si256(lo, nibble), x0));                   \
        AVX2_PIN(lo16);                                                                                          \
        hi16 = _mm256_add_epi16(hi16, _mm256_maddubs_epi16(_mm256_and_si256(hi, nibble), x0));                   \
        AVX2_PIN(hi16);                                                                                          \
        lo = _mm256_and_si256(_mm256_srli_epi16(lo, 4), nibble);                                                 \
        hi = _mm256_and_si256(_mm256_srli_epi16(hi, 4), nibble);                                                 \
        lo16 = _mm256_add_epi16(lo16, _mm256_maddubs_epi16(lo, x1));                                             \
        AVX2_PIN(lo16);                                                                                          \
        hi16 = _mm256_add_epi16(hi16, _mm256_maddubs_epi16(hi, x1));                                             \
        AVX2_PIN(hi16);                                                                                          \
    }

#define I4_STEP(s)                                                                                               \
    {                                                                                                            \
        const uint8_t *p = p##s;                                                                                 \
        __m256i lo16 = _mm256_setzero_si256(), hi16 = lo16;                                                      \
        I4_LINE(0)                                                                                               \
        I4_LINE(1)                                                                                               \
        I4_LINE(2)                                                                                               \
        I4_LINE(3)                                                                                               \
        d##s##0 = _mm256_add_epi32(d##s##0, _mm256_madd_epi16(lo16, one));                                       \
        d##s##1 = _mm256_add_epi32(d##s##1, _mm256_madd_epi16(hi16, one));                                       \
        p##s += 4 * LINE;                                                                                        \
    }

#define I8_ZERO(s) d##s##0 = d##s##1 = _mm256_setzero_si256();
#define I4_OFFSET(s) d##s##0 = d##s##1 = offset;

AVX2_INLINE void gemv_avx2(const uint8_t *const *blocks, const int n_streams, int n_groups, const coli_acts *a,
                           int token, float *const *y, const int int4, const int group_scales)
{
    const __m256i one = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
    const int64_t header = coli_header_bytes(group_scales ? COLI_I8_GROUP : COLI_I8_ROW, n_groups);
    GEMV_DECLARE(0) GEMV_DECLARE(1) GEMV_DECLARE(2) GEMV_DECLARE(3)
    for (int g = 0; g < n_groups; g++) {
        const int64_t at = group_index(a, g, token);
        const int8_t *q = a->q + at * COLI_GROUP;
        if (int4) {
            const __m256i offset = _mm256_set1_epi32(-8 * a->sum[at]);
            FOR_STREAMS(I4_OFFSET)
            for (int i = 0; i < I4_LINES; i += 4, q += 32) {
                FOR_STREAMS(I4_STEP)
            }
        } else {
            FOR_STREAMS(I8_ZERO)
            for (int i = 0; i < I8_LINES; i++, q += 4) {
                const __m256i x = _mm256_set1_epi32(load_dword(q)), abs_x = _mm256_abs_epi8(x);
                FOR_STREAMS(I8_STEP)
            }
        }
        const __m256 sx = _mm256_set1_ps(a->scale[at]);
        FOR_STREAMS(GEMV_ADD)
    }
    FOR_STREAMS(GEMV_STORE)
    FOR_STREAMS(GEMV_AHEAD)
}

COLI_GEMV_ENTRIES(avx2, AVX2, gemv_avx2)

#undef I8_STEP
#undef I4_LINE
#undef I4_STEP
#undef I8_ZERO
#undef I4_OFFSET

/* ---- GEMM --------------------------------------------------------------------------------------- */

AVX2_INLINE void load_scales_avx2(const uint8_t *header, int group, float *scale)
{
    const __m128i *h = (const __m128i *)(header + group * 32);
    _mm256_storeu_ps(scale, _mm256_cvtph_ps(_mm_loadu_si128(h)));
    _mm256_storeu_ps(scale + 8, _mm256_cvtph_ps(_mm_loadu_si128(h + 1)));
}

/* int4 to 32 lines of unsigned nibbles, in the order of int8 lines; shared with AVX-VNNI. */
AVX2_INLINE void decode_i4_avx2(const uint8_t *payload, uint8_t *w)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int j = 0; j < I4_LINES; j++, payload += LINE, w += 2 * LINE) {
        __m256i lo = load256(payload), hi = load256(payload + 32);
        COLI_PREFETCH(payload + I4_GROUP_BYTES);
        store256(w, _mm256_and_si256(lo, nibble));
        store256(w + 32, _mm256_and_si256(hi, nibble));
        store256(w + 64, _mm256_and_si256(_mm256_srli_epi16(lo, 4), nibble));
        store256(w + 96, _mm256_and_si256(_mm256_srli_epi16(hi, 4), nibble));
    }
}

/* int8 to int16: a line becomes the columns (0, 2) of 16 rows, then the columns (1, 3). */
AVX2_INLINE void decode_avx2(const uint8_t *payload, uint8_t *w, int int4)
{
    if (int4) {
        decode_i4_avx2(payload, w);
        return;
    }
    for (int j = 0; j < I8_LINES; j++, payload += LINE, w += 2 * LINE) {
        __m256i lo = load256(payload), hi = load256(payload + 32);
        COLI_PREFETCH(payload + I8_GROUP_BYTES);
        store256(w, _mm256_srai_epi16(_mm256_slli_epi16(lo, 8), 8));
        store256(w + 32, _mm256_srai_epi16(_mm256_slli_epi16(hi, 8), 8));
        store256(w + 64, _mm256_srai_epi16(lo, 8));
        store256(w + 96, _mm256_srai_epi16(hi, 8));
    }
}

/* The same for 128 activations: dwords (0, 2), (1, 3), (4, 6), (5, 7), ... */
AVX2_INLINE void prepare_x_avx2(const int8_t *q, uint8_t *x)
{
    for (int i = 0; i < COLI_GROUP; i += 32, x += 64) {
        __m256i v = load256(q + i);
        __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
        __m256i a = _mm256_unpacklo_epi32(even, odd), b = _mm256_unpackhi_epi32(even, odd);
        store256(x, _mm256_permute2x128_si256(a, b, 0x20));
        store256(x + 32, _mm256_permute2x128_si256(a, b, 0x31));
    }
}

#define TILE_DECLARE(k)                                                                                          \
    const uint8_t *x##k = t[k < n ? k : 0].x;                                                                    \
    __m256i a##k##0 = _mm256_setzero_si256(), a##k##1 = a##k##0;

#define TILE_ADD_AVX2(k)                                                                                            \
    {                                                                                                            \
        const __m256 sx = _mm256_set1_ps(t[k].scale);                                                            \
        __m256 s0 = sx, s1 = sx;                                                                                 \
        if (group_scales) {                                                                                      \
            s0 = _mm256_mul_ps(sx, _mm256_load_ps(scale[0]));                                                    \
            s1 = _mm256_mul_ps(sx, _mm256_load_ps(scale[0] + 8));                                                \
        }                                                                                                        \
        float *y = sums + 16 * k;                                                                                \
        s0 = _mm256_mul_ps(_mm256_cvtepi32_ps(a##k##0), s0);                                                     \
        s1 = _mm256_mul_ps(_mm256_cvtepi32_ps(a##k##1), s1);                                                     \
        _mm256_store_ps(y, _mm256_add_ps(_mm256_load_ps(y), s0));                                                \
        _mm256_store_ps(y + 8, _mm256_add_ps(_mm256_load_ps(y + 8), s1));                                        \
    }

#define I8_TILE(k)                                                                                               \
    {                                                                                                            \
        __m256i x = _mm256_set1_epi32(load_dword((const int8_t *)x##k + 4 * i));                                 \
        a##k##0 = _mm256_add_epi32(a##k##0, _mm256_madd_epi16(w0, x));                                           \
        AVX2_PIN(a##k##0);                                                                                       \
        a##k##1 = _mm256_add_epi32(a##k##1, _mm256_madd_epi16(w1, x));                                           \
        AVX2_PIN(a##k##1);                                                                                       \
    }

#define I4_TILE(k)                                                                                               \
    {                                                                                                            \
        __m256i x = _mm256_set1_epi32(load_dword((const int8_t *)x##k + 4 * i));                                 \
        a##k##0 = _mm256_add_epi16(a##k##0, _mm256_maddubs_epi16(w0, x));                                        \
        AVX2_PIN(a##k##0);                                                                                       \
        a##k##1 = _mm256_add_epi16(a##k##1, _mm256_maddubs_epi16(w1, x));                                        \
        AVX2_PIN(a##k##1);                                                                                       \
    }

#define I4_TILE_WIDEN(k)                                                                                         \
    wide[2 * k] = _mm256_add_epi32(wide[2 * k], _mm256_madd_epi16(a##k##0, one));                                \
    wide[2 * k + 1] = _mm256_add_epi32(wide[2 * k + 1], _mm256_madd_epi16(a##k##1, one));                        \
    a##k##0 = a##k##1 = _mm256_setzero_si256();

#define I4_TILE_START(k) wide[2 * k] = wide[2 * k + 1] = _mm256_set1_epi32(-8 * t[k].sum);
#define I4_TILE_END(k)                                                                                           \
    a##k##0 = wide[2 * k];                                                                                       \
    a##k##1 = wide[2 * k + 1];

AVX2_INLINE void tile_avx2(const uint8_t *w, const int n_blocks, const struct gemm_token *t, const int n,
                           const float (*scale)[16], float *sums, int block_stride, const uint8_t *const *next,
                           const int int4, const int group_scales)
{
    (void)n_blocks, (void)block_stride, (void)next; /* one block a tile, and its decoding prefetches */
    TILE_DECLARE(0) TILE_DECLARE(1) TILE_DECLARE(2) TILE_DECLARE(3) TILE_DECLARE(4) TILE_DECLARE(5)
    if (int4) { /* eight lines in int16, as in the GEMV, then into int32 sums that live in L1 */
        const __m256i one = _mm256_set1_epi16(1);
        __m256i wide[12];
        FOR_TOKENS(I4_TILE_START)
        for (int c = 0; c < I8_LINES; c += 8) {
            for (int i = c; i < c + 8; i++, w += LINE) {
                __m256i w0 = load256(w), w1 = load256(w + 32);
                AVX2_PIN(w0);
                AVX2_PIN(w1);
                FOR_TOKENS(I4_TILE)
            }
            FOR_TOKENS(I4_TILE_WIDEN)
        }
        FOR_TOKENS(I4_TILE_END)
    } else {
        for (int i = 0; i < 2 * I8_LINES; i++, w += LINE) {
            __m256i w0 = load256(w), w1 = load256(w + 32);
            AVX2_PIN(w0);
            AVX2_PIN(w1);
            FOR_TOKENS(I8_TILE)
        }
    }
    FOR_TOKENS(TILE_ADD_AVX2)
}

#define GEMM_ISA avx2
#define GEMM_ATTR AVX2
#define GEMM_TILE_BLOCKS 1
#define GEMM_WIDE 1
#define GEMM_TOKENS 48
#define GEMM_MIN_TOKENS (int4 ? 4 : 6)
#include "gemm.inc"

#undef GEMV_DECLARE
#undef GEMV_ADD
#undef GEMV_STORE
#undef TILE_DECLARE
#undef I8_TILE
#undef I4_TILE
#undef I4_TILE_WIDEN
#undef I4_TILE_START
#undef I4_TILE_END

AVX2 static uint64_t read_xor_avx2(const uint8_t *const *streams, int n_streams, int64_t n_bytes)
{
    __m256i v00 = _mm256_setzero_si256(), v01 = v00, v10 = v00, v11 = v00, v20 = v00, v21 = v00, v30 = v00, v31 = v00;
#define READ(s)                                                                                                  \
    v##s##0 = _mm256_xor_si256(v##s##0, load256(streams[s] + i));                                                \
    v##s##1 = _mm256_xor_si256(v##s##1, load256(streams[s] + i + 32));                                           \
    COLI_PREFETCH(streams[s] + i + AHEAD_BYTES);
    for (int64_t i = 0; i < n_bytes; i += LINE) {
        FOR_STREAMS(READ)
    }
#undef READ
    v00 = _mm256_xor_si256(_mm256_xor_si256(v00, v01), _mm256_xor_si256(v10, v11));
    v20 = _mm256_xor_si256(_mm256_xor_si256(v20, v21), _mm256_xor_si256(v30, v31));
    uint64_t part[4];
    store256(part, _mm256_xor_si256(v00, v20));
    return part[0] ^ part[1] ^ part[2] ^ part[3];
}

#endif
