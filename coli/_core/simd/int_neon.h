/* Integer kernels for Arm's dot product instructions (ARMv8.2 dotprod): 4 rows a vector, four vectors a line. */
#ifndef COLI_INT_NEON_H
#define COLI_INT_NEON_H

#include <arm_neon.h>

#include "layout.h"

#if defined(__clang__)
#define NEON __attribute__((target("dotprod")))
#else
#define NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define NEON_INLINE NEON static inline __attribute__((always_inline))

/* As AVX512_PIN: keeps a load beside its prefetch. */
#define NEON_PIN(v) __asm__ volatile("" : "+w"(v))

/* ---- quantiser ---------------------------------------------------------------------------------- */

NEON_INLINE uint32_t quantize_group_neon(const float *x, int8_t *q, float *scale, int32_t *sum)
{
    const uint32x4_t no_sign = vdupq_n_u32(0x7FFFFFFF);
    uint32x4_t max = vdupq_n_u32(0);
    int32x4_t total = vdupq_n_s32(0);
    float inverse = 0.0f;
    for (int i = 0; i < COLI_GROUP; i += 4)
        max = vmaxq_u32(max, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), no_sign));
    uint32_t magnitude = vmaxvq_u32(max);
    if (!group_scale(magnitude, scale, &inverse)) {
        memset(q, 0, COLI_GROUP);
        *sum = 0;
        return magnitude;
    }
    for (int i = 0; i < COLI_GROUP; i += 16) {
        int32x4_t v[4];
        for (int j = 0; j < 4; j++) { /* vcvtn rounds to nearest even, which is what rint is */
            v[j] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * j), inverse));
            total = vaddq_s32(total, v[j]);
        }
        int16x8_t lo = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1]));
        int16x8_t hi = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
        vst1q_s8(q + i, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
    }
    *sum = vaddvq_s32(total);
    return magnitude;
}

COLI_QUANTIZE_ENTRIES(neon, NEON, quantize_group_neon)

/* ---- GEMV --------------------------------------------------------------------------------------- */

/* 4 rows: y = y + float(dot) * (s_x [* s_w]) */
NEON_INLINE float32x4_t add_group_neon(float32x4_t y, int32x4_t dot, float sx, const uint8_t *half_scales,
                                       int group_scales)
{
    float32x4_t scale = vdupq_n_f32(sx);
    if (group_scales)
        scale = vmulq_f32(scale, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(half_scales))));
    return vaddq_f32(y, vmulq_f32(vcvtq_f32_s32(dot), scale));
}

NEON_INLINE void store_rows_neon(float *y, float32x4_t sum, const uint8_t *row_scales, int group_scales)
{
    if (!group_scales)
        sum = vmulq_f32(sum, vreinterpretq_f32_u8(vld1q_u8(row_scales)));
    vst1q_f32(y, sum);
}

#define GEMV_DECLARE(s)                                                                                          \
    const uint8_t *p##s = blocks[s < n_streams ? s : 0] + header;                                                \
    float32x4_t y##s##0 = vdupq_n_f32(0), y##s##1 = y##s##0, y##s##2 = y##s##0, y##s##3 = y##s##0;

/* d += 4 rows x 4 columns, the columns being dword LANE of x */
#define I8_ROWS(r, LINE_AT, LANE)                                                                                \
    {                                                                                                            \
        int8x16_t w = vld1q_s8((const int8_t *)(LINE_AT) + 16 * r);                                              \
        NEON_PIN(w);                                                                                             \
        d##r = vdotq_laneq_s32(d##r, w, x, LANE);                                                                \
    }

#define I8_LINE(LINE_AT, LANE)                                                                                   \
    I8_ROWS(0, LINE_AT, LANE) I8_ROWS(1, LINE_AT, LANE) I8_ROWS(2, LINE_AT, LANE) I8_ROWS(3, LINE_AT, LANE)      \
    COLI_PREFETCH((LINE_AT) + AHEAD_BYTES);

/* One group of one stream, then of the next: see int_avx512vnni.h.  One register of x serves four lines. */
#define I8_GROUP(s)                                                                                              \
    {                                                                                                            \
        int32x4_t d0 = vdupq_n_s32(0), d1 = d0, d2 = d0, d3 = d0;                                                \
        for (int i = 0; i < COLI_GROUP; i += 16) {                                                               \
            const int8x16_t x = vld1q_s8(q + i);                                                                 \
            I8_LINE(p##s, 0)                                                                                     \
            I8_LINE(p##s + LINE, 1)                                                                              \
            I8_LINE(p##s + 2 * LINE, 2)                                                                          \
            I8_LINE(p##s + 3 * LINE, 3)                                                                          \
            p##s += 4 * LINE;                                                                                    \
        }                                                                                                        \
        GEMV_ADD(s)                                                                                              \
    }

/* Nibbles are 0..15, so the sums start at -8 * sum(x). */
#define I4_ROWS(r, LINE_AT, LANE)                                                                                \
    {                                                                                                            \
        uint8x16_t w = vld1q_u8((LINE_AT) + 16 * r);                                                             \
        NEON_PIN(w);                                                                                             \
        d##r = vdotq_laneq_s32(d##r, vreinterpretq_s8_u8(vandq_u8(w, low)), x, LANE);                            \
        d##r = vdotq_laneq_s32(d##r, vreinterpretq_s8_u8(vshrq_n_u8(w, 4)), x, LANE + 1);                        \
    }

#define I4_LINE(LINE_AT, LANE)                                                                                   \
    I4_ROWS(0, LINE_AT, LANE) I4_ROWS(1, LINE_AT, LANE) I4_ROWS(2, LINE_AT, LANE) I4_ROWS(3, LINE_AT, LANE)      \
    COLI_PREFETCH((LINE_AT) + AHEAD_BYTES);

#define I4_GROUP(s)                                                                                              \
    {                                                                                                            \
        int32x4_t d0 = vdupq_n_s32(-8 * a->sum[at]), d1 = d0, d2 = d0, d3 = d0;                                  \
        for (int i = 0; i < COLI_GROUP; i += 16) {                                                               \
            const int8x16_t x = vld1q_s8(q + i);                                                                 \
            I4_LINE(p##s, 0)                                                                                     \
            I4_LINE(p##s + LINE, 2)                                                                              \
            p##s += 2 * LINE;                                                                                    \
        }                                                                                                        \
        GEMV_ADD(s)                                                                                              \
    }

#define GEMV_ADD(s)                                                                                              \
    y##s##0 = add_group_neon(y##s##0, d0, sx, blocks[s] + g * 32, group_scales);                                 \
    y##s##1 = add_group_neon(y##s##1, d1, sx, blocks[s] + g * 32 + 8, group_scales);                             \
    y##s##2 = add_group_neon(y##s##2, d2, sx, blocks[s] + g * 32 + 16, group_scales);                            \
    y##s##3 = add_group_neon(y##s##3, d3, sx, blocks[s] + g * 32 + 24, group_scales);

#define GEMV_STORE(s)                                                                                            \
    store_rows_neon(y[s], y##s##0, blocks[s], group_scales);                                                     \
    store_rows_neon(y[s] + 4, y##s##1, blocks[s] + 16, group_scales);                                            \
    store_rows_neon(y[s] + 8, y##s##2, blocks[s] + 32, group_scales);                                            \
    store_rows_neon(y[s] + 12, y##s##3, blocks[s] + 48, group_scales);

NEON_INLINE void gemv_neon(const uint8_t *const *blocks, const int n_streams, int n_groups, const coli_acts *a,
                           int token, float *const *y, const int int4, const int group_scales)
{
    const uint8x16_t low = vdupq_n_u8(15);
    const int64_t header = coli_header_bytes(group_scales ? COLI_I8_GROUP : COLI_I8_ROW, n_groups);
    GEMV_DECLARE(0) GEMV_DECLARE(1) GEMV_DECLARE(2) GEMV_DECLARE(3)
    for (int g = 0; g < n_groups; g++) {
        const int64_t at = group_index(a, g, token);
        const int8_t *q = a->q + at * COLI_GROUP;
        const float sx = a->scale[at];
        if (int4) {
            FOR_STREAMS(I4_GROUP)
        } else {
            FOR_STREAMS(I8_GROUP)
        }
    }
    FOR_STREAMS(GEMV_STORE)
    FOR_STREAMS(GEMV_AHEAD)
}

COLI_GEMV_ENTRIES(neon, NEON, gemv_neon)

#undef GEMV_DECLARE
#undef I8_ROWS
#undef I8_LINE
#undef I8_GROUP
#undef I4_ROWS
#undef I4_LINE
#undef I4_GROUP
#undef GEMV_ADD
#undef GEMV_STORE

/* ---- GEMM --------------------------------------------------------------------------------------- */

NEON_INLINE void load_scales_neon(const uint8_t *header, int group, float *scale)
{
    for (int r = 0; r < 4; r++)
        vst1q_f32(scale + 4 * r, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(header + group * 32 + 8 * r))));
}

/* Both formats become 32 lines of bytes: int8 as it is, nibbles unsigned. */
NEON_INLINE void decode_neon(const uint8_t *payload, uint8_t *w, int int4)
{
    const uint8x16_t low = vdupq_n_u8(15);
    if (!int4) {
        for (int j = 0; j < I8_GROUP_BYTES; j += LINE)
            COLI_PREFETCH(payload + I8_GROUP_BYTES + j);
        memcpy(w, payload, I8_GROUP_BYTES);
        return;
    }
    for (int j = 0; j < I4_LINES; j++, payload += LINE, w += 2 * LINE) {
        COLI_PREFETCH(payload + I4_GROUP_BYTES);
        for (int r = 0; r < 4; r++) {
            uint8x16_t v = vld1q_u8(payload + 16 * r);
            vst1q_u8(w + 16 * r, vandq_u8(v, low));
            vst1q_u8(w + LINE + 16 * r, vshrq_n_u8(v, 4));
        }
    }
}

/* The register tile: 16 rows x 6 tokens are 24 sums, with 4 weights and an activation 29 of 32 registers. */
#define TILE_DECLARE(k)                                                                                          \
    const int8_t *x##k = (const int8_t *)t[k < n ? k : 0].x;                                                     \
    int32x4_t a##k##0 = vdupq_n_s32(int4 ? -8 * t[k < n ? k : 0].sum : 0), a##k##1 = a##k##0;                    \
    int32x4_t a##k##2 = a##k##0, a##k##3 = a##k##0;

#define TILE_STEP(k)                                                                                             \
    {                                                                                                            \
        const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(load_dword(x##k + 4 * i)));                         \
        a##k##0 = vdotq_s32(a##k##0, w0, x);                                                                     \
        a##k##1 = vdotq_s32(a##k##1, w1, x);                                                                     \
        a##k##2 = vdotq_s32(a##k##2, w2, x);                                                                     \
        a##k##3 = vdotq_s32(a##k##3, w3, x);                                                                     \
    }

#define TILE_ROWS(k, r)                                                                                          \
    {                                                                                                            \
        float *y = sums + 16 * k + 4 * r;                                                                        \
        float32x4_t s = vdupq_n_f32(t[k].scale);                                                                 \
        if (group_scales)                                                                                        \
            s = vmulq_f32(s, vld1q_f32(scale[0] + 4 * r));                                                       \
        vst1q_f32(y, vaddq_f32(vld1q_f32(y), vmulq_f32(vcvtq_f32_s32(a##k##r), s)));                             \
    }

#define TILE_ADD(k) TILE_ROWS(k, 0) TILE_ROWS(k, 1) TILE_ROWS(k, 2) TILE_ROWS(k, 3)

NEON_INLINE void tile_neon(const uint8_t *w, const int n_blocks, const struct gemm_token *t, const int n,
                           const float (*scale)[16], float *sums, int block_stride, const uint8_t *const *next,
                           const int int4, const int group_scales)
{
    (void)n_blocks, (void)block_stride, (void)next; /* one block a tile, and its decoding prefetches */
    TILE_DECLARE(0) TILE_DECLARE(1) TILE_DECLARE(2) TILE_DECLARE(3) TILE_DECLARE(4) TILE_DECLARE(5)
    for (int i = 0; i < I8_LINES; i++, w += LINE) {
        const int8x16_t w0 = vld1q_s8((const int8_t *)w), w1 = vld1q_s8((const int8_t *)w + 16);
        const int8x16_t w2 = vld1q_s8((const int8_t *)w + 32), w3 = vld1q_s8((const int8_t *)w + 48);
        FOR_TOKENS(TILE_STEP)
    }
    FOR_TOKENS(TILE_ADD)
}

#define GEMM_ISA neon
#define GEMM_ATTR NEON
#define GEMM_TILE_BLOCKS 1
#define GEMM_WIDE 0
#define GEMM_TOKENS 72
#define GEMM_MIN_TOKENS 3
#include "gemm.inc"

#undef TILE_DECLARE
#undef TILE_STEP
#undef TILE_ROWS
#undef TILE_ADD

NEON static uint64_t read_xor_neon(const uint8_t *const *streams, int n_streams, int64_t n_bytes)
{
    uint8x16_t v0 = vdupq_n_u8(0), v1 = v0, v2 = v0, v3 = v0;
#define READ(s)                                                                                                  \
    for (int r = 0; r < LINE; r += 16)                                                                           \
        v##s = veorq_u8(v##s, vld1q_u8(streams[s] + i + r));                                                     \
    COLI_PREFETCH(streams[s] + i + AHEAD_BYTES);
    for (int64_t i = 0; i < n_bytes; i += LINE) {
        FOR_STREAMS(READ)
    }
#undef READ
    const uint64x2_t x = vreinterpretq_u64_u8(veorq_u8(veorq_u8(v0, v1), veorq_u8(v2, v3)));
    return vgetq_lane_u64(x, 0) ^ vgetq_lane_u64(x, 1);
}

#endif
