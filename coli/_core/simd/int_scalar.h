/* Integer kernels in plain C: the contract as it is written, and the path of a CPU that has nothing better. */
#ifndef COLI_INT_SCALAR_H
#define COLI_INT_SCALAR_H

#include <math.h>

#include "layout.h"

static uint32_t quantize_group_scalar(const float *x, int8_t *q, float *scale, int32_t *sum)
{
    uint32_t magnitude = 0;
    float inverse = 0.0f;
    int32_t total = 0;
    for (int i = 0; i < COLI_GROUP; i++) {
        uint32_t m = float_to_bits(x[i]) & 0x7FFFFFFF;
        magnitude = m > magnitude ? m : magnitude;
    }
    if (!group_scale(magnitude, scale, &inverse)) {
        memset(q, 0, COLI_GROUP);
        *sum = 0;
        return magnitude;
    }
    for (int i = 0; i < COLI_GROUP; i++) {
        /* adding 1.5 * 2^23 rounds to an integer, ties to even: |x * inverse| <= 127 (1 + 2^-23) */
        float r = (x[i] * inverse + 12582912.0f) - 12582912.0f;
        q[i] = (int8_t)r;
        total += q[i];
    }
    *sum = total;
    return magnitude;
}

COLI_QUANTIZE_ENTRIES(scalar, , quantize_group_scalar)

/* dot[r] of one group: 16 rows, 128 columns. */
static inline void group_dot_scalar(const uint8_t *payload, const int8_t *x, int32_t sum, int int4, int32_t *dot)
{
    for (int r = 0; r < COLI_BLOCK_ROWS; r++)
        dot[r] = int4 ? -8 * sum : 0;
    if (int4) {
        for (int j = 0; j < I4_LINES; j++)
            for (int r = 0; r < COLI_BLOCK_ROWS; r++)
                for (int b = 0; b < 4; b++) {
                    int w = payload[j * LINE + r * 4 + b];
                    dot[r] += (w & 15) * x[8 * j + b] + (w >> 4) * x[8 * j + 4 + b];
                }
    } else {
        const int8_t *w = (const int8_t *)payload;
        for (int j = 0; j < I8_LINES; j++)
            for (int r = 0; r < COLI_BLOCK_ROWS; r++)
                for (int b = 0; b < 4; b++)
                    dot[r] += w[j * LINE + r * 4 + b] * x[4 * j + b];
    }
}

static inline void gemv_scalar(const uint8_t *const *blocks, int n_streams, int n_groups, const coli_acts *a,
                               int token, float *const *y, int int4, int group_scales)
{
    int64_t header = coli_header_bytes(int4 ? (group_scales ? COLI_I4_GROUP : COLI_I4_ROW)
                                            : (group_scales ? COLI_I8_GROUP : COLI_I8_ROW), n_groups);
    for (int s = 0; s < n_streams; s++) {
        const uint8_t *payload = blocks[s] + header;
        float total[COLI_BLOCK_ROWS] = {0};
        for (int g = 0; g < n_groups; g++) {
            int64_t at = group_index(a, g, token);
            int32_t dot[COLI_BLOCK_ROWS];
            group_dot_scalar(payload, a->q + at * COLI_GROUP, a->sum[at], int4, dot);
            payload += int4 ? I4_GROUP_BYTES : I8_GROUP_BYTES;
            for (int r = 0; r < COLI_BLOCK_ROWS; r++) {
                float scale = a->scale[at];
                if (group_scales) {
                    uint16_t h;
                    memcpy(&h, blocks[s] + (g * COLI_BLOCK_ROWS + r) * 2, 2);
                    scale = scale * half_to_float(h);
                }
                total[r] = total[r] + (float)dot[r] * scale;
            }
        }
        for (int r = 0; r < COLI_BLOCK_ROWS; r++) {
            float w = 1.0f;
            if (!group_scales)
                memcpy(&w, blocks[s] + r * 4, 4);
            y[s][r] = group_scales ? total[r] : total[r] * w;
        }
    }
}

COLI_GEMV_ENTRIES(scalar, , gemv_scalar)

/* A batch is the same per token, so the plain path repeats the GEMV. */
#define COLI_GEMM_BY_TOKEN(NAME, GEMV)                                                                           \
    static void NAME(const uint8_t *const *blocks, int n_blocks, int n_groups, const coli_acts *a,               \
                     const int32_t *tokens, int n_tokens, float *const *y, int64_t y_stride, void *scratch)      \
    {                                                                                                            \
        (void)scratch;                                                                                           \
        for (int i = 0; i < n_tokens; i++) {                                                                     \
            float *row[COLI_STREAMS];                                                                            \
            for (int s = 0; s < n_blocks; s++)                                                                   \
                row[s] = y[s] + i * y_stride;                                                                    \
            GEMV(blocks, n_blocks, n_groups, a, tokens ? tokens[i] : i, row);                                    \
        }                                                                                                        \
    }
COLI_GEMM_BY_TOKEN(gemm_i8_row_scalar, gemv_i8_row_scalar)
COLI_GEMM_BY_TOKEN(gemm_i8_group_scalar, gemv_i8_group_scalar)
COLI_GEMM_BY_TOKEN(gemm_i4_row_scalar, gemv_i4_row_scalar)
COLI_GEMM_BY_TOKEN(gemm_i4_group_scalar, gemv_i4_group_scalar)

static uint64_t read_xor_scalar(const uint8_t *const *streams, int n_streams, int64_t n_bytes)
{
    uint64_t x = 0;
    for (int64_t i = 0; i < n_bytes; i += LINE)
        for (int s = 0; s < n_streams; s++) {
            uint64_t line[LINE / 8];
            memcpy(line, streams[s] + i, LINE);
            COLI_PREFETCH(streams[s] + i + AHEAD_BYTES);
            for (int j = 0; j < LINE / 8; j++)
                x ^= line[j];
        }
    return x;
}

#endif
