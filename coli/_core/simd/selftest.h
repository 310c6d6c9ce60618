/* The golden self-test: every entry that adds or multiplies floats, on fixed input, against bits recorded from the
 * scalar table (which the tests compare with numpy).  It finds a build whose flags or compiler contract a product
 * and a sum, reorder a sum, or approximate a division; it takes microseconds and needs no file.
 *
 * Input has no subnormals, so that a thread with flush-to-zero set is not mistaken for a bad build.
 * To record anew after a change of the contract: tests/_core/test_selftest.py says how.
 */
#ifndef COLI_SELFTEST_H
#define COLI_SELFTEST_H

#include <stdlib.h>

#include "layout.h"

#define ST_GROUPS 2
#define ST_COLS (ST_GROUPS * COLI_GROUP)
#define ST_BLOCKS 4
#define ST_TOKENS 13 /* more than the kernels for few tokens take */
#define ST_BLOCK_BYTES (256 + ST_GROUPS * I8_GROUP_BYTES)
#define ST_N 203 /* odd lengths: whole vectors and a rest at every width */

/* The checksum of each step, in order. */
static const struct {
    const char *entry;
    uint32_t checksum;
} st_golden[] = {
    {"quantize", 0x78E4F43B},
    {"gemv i8_row", 0xF7C2710A},
    {"gemm i8_row", 0x4B356549},
    {"gemv i8_group", 0xB7472F66},
    {"gemm i8_group", 0x27D3C247},
    {"gemv i4_row", 0x1FF25D8B},
    {"gemm i4_row", 0xB2DC7EB5},
    {"gemv i4_group", 0x153089A0},
    {"gemm i4_group", 0x0EE95265},
    {"exp", 0x736A5015},
    {"sigmoid", 0x7995A80E},
    {"silu", 0xBD7FFC10},
    {"softplus", 0x4622E55D},
    {"dot32", 0xF99DA1F6},
    {"dense f32", 0x2EBAE72D},
    {"dense bf16", 0x023E3A51},
    {"dense f16", 0x6262BC90},
    {"rmsnorm", 0xD8059CBA},
    {"l2norm", 0xF9F069A9},
    {"gated_rmsnorm", 0xFFC7FB66},
    {"silu_mul, axpy, mul_sigmoid", 0x5AE7E104},
    {"conv_silu", 0x5D6859D9},
    {"rope", 0xB2CEC558},
    {"deltanet", 0x231506D5},
    {"attention f32", 0x23427473},
    {"attention f16", 0x334D7DE2},
    {"router", 0x29658ECF},
};
#define ST_STEPS ((int)(sizeof st_golden / sizeof *st_golden))

static uint32_t st_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Normal floats in (-4, 4), exact: a 24-bit integer over a power of two. */
static void st_fill(uint32_t *state, float *x, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = ((float)(int32_t)(st_random(state) | 1) - 8388608.0f) * 0x1p-21f;
}

/* FNV-1a over the 32-bit words of a result. */
static uint32_t st_sum(uint32_t h, const void *data, size_t n_words)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < n_words; i++) {
        uint32_t word;
        memcpy(&word, p + 4 * i, 4);
        h = (h ^ word) * 16777619u;
        h ^= h >> 15;
    }
    return h;
}

static void st_blocks(uint32_t *state, uint8_t *blocks, int format)
{
    for (int i = 0; i < ST_BLOCKS * ST_BLOCK_BYTES; i++) {
        blocks[i] = (uint8_t)st_random(state);
        if (blocks[i] == 0x80 && format <= COLI_I8_GROUP)
            blocks[i] = 0x7F;
    }
    for (int b = 0; b < ST_BLOCKS; b++)
        for (int r = 0; r < COLI_BLOCK_ROWS; r++) {
            uint8_t *at = blocks + b * ST_BLOCK_BYTES;
            float scale;
            st_fill(state, &scale, 1);
            if (!has_group_scales(format))
                memcpy(at + 4 * r, &scale, 4);
            for (int g = 0; g < ST_GROUPS && has_group_scales(format); g++) { /* normal float16 of either sign */
                uint16_t half = (uint16_t)(0x2000 | (st_random(state) & 0x83FF));
                memcpy(at + g * 32 + 2 * r, &half, 2);
            }
        }
}

/* Runs the steps; out[i] is the checksum of step i.  Returns how many there are. */
static int st_run(const coli_kernels *k, uint32_t *out)
{
    uint32_t state = 20260101u, seed = 2166136261u;
    int n = 0;
    float x[ST_TOKENS * ST_COLS], y[ST_TOKENS * ST_BLOCKS * COLI_BLOCK_ROWS];
    int8_t q[ST_GROUPS * ST_TOKENS * COLI_GROUP] __attribute__((aligned(64)));
    float scale[ST_GROUPS * ST_TOKENS];
    int32_t sum[ST_GROUPS * ST_TOKENS];
    coli_acts a = {q, scale, sum, ST_TOKENS, ST_GROUPS};
    uint8_t *blocks = aligned_alloc(64, ST_BLOCKS * ST_BLOCK_BYTES);
    void *scratch = aligned_alloc(64, (coli_gemm_scratch_bytes(ST_GROUPS) + 63) / 64 * 64);
    if (!blocks || !scratch) {
        free(blocks);
        free(scratch);
        return 0;
    }

    st_fill(&state, x, ST_TOKENS * ST_COLS);
    for (int t = 0; t < ST_TOKENS; t++)
        k->quantize(x + t * ST_COLS, ST_COLS - 3 * t, &a, t); /* ragged: the rest is zeros */
    out[n++] = st_sum(st_sum(st_sum(seed, q, sizeof q / 4), scale, ST_GROUPS * ST_TOKENS), sum,
                      ST_GROUPS * ST_TOKENS);

    for (int format = COLI_I8_ROW; format <= COLI_I4_GROUP; format++) {
        const uint8_t *at[ST_BLOCKS];
        float *row[ST_BLOCKS];
        st_blocks(&state, blocks, format);
        for (int b = 0; b < ST_BLOCKS; b++) {
            at[b] = blocks + b * ST_BLOCK_BYTES;
            row[b] = y + b * COLI_BLOCK_ROWS;
        }
        k->gemv[format](at, ST_BLOCKS, ST_GROUPS, &a, ST_TOKENS - 1, row);
        out[n++] = st_sum(seed, y, ST_BLOCKS * COLI_BLOCK_ROWS);
        k->gemm[format](at, ST_BLOCKS, ST_GROUPS, &a, NULL, ST_TOKENS, row, ST_BLOCKS * COLI_BLOCK_ROWS, scratch);
        const uint32_t all = st_sum(seed, y, sizeof y / 4);
        const int32_t list[] = {12, 0, 7, 7, 3};
        k->gemm[format](at, ST_BLOCKS, ST_GROUPS, &a, list, 5, row, ST_BLOCKS * COLI_BLOCK_ROWS, scratch);
        out[n++] = st_sum(all, y, 5 * ST_BLOCKS * COLI_BLOCK_ROWS);
    }
    free(blocks);
    free(scratch);

    float *const u = x, *const v = x + 2 * ST_COLS, *const w = x + 4 * ST_COLS, *const z = x + 6 * ST_COLS;
    float r[ST_COLS], s[64];
    for (int i = 0; i < ST_N; i++)
        r[i] = u[i] * 20.0f; /* exp and its kin over most of their range */
    void (*const map[])(const float *, float *, int64_t) = {k->exp_, k->sigmoid, k->silu, k->softplus};
    for (int i = 0; i < 4; i++) {
        float o[ST_N];
        map[i](r, o, ST_N);
        out[n++] = st_sum(seed, o, ST_N);
    }
    r[0] = k->dot32(u, v, ST_N);
    out[n++] = st_sum(seed, r, 1);

    uint16_t half[ST_COLS], bf16[ST_COLS];
    k->to_f16(u, half, ST_COLS);
    for (int i = 0; i < ST_COLS; i++)
        bf16[i] = (uint16_t)(float_to_bits(u[i]) >> 16);
    const void *dense[] = {u, bf16, half};
    for (int i = 0; i < 3; i++) { /* two rows of 100 columns, three tokens */
        float o[6];
        k->dense[i](dense[i], i == 0 ? 400 : 200, 100, 0, 2, v, 101, 3, o, 2);
        out[n++] = st_sum(seed, o, 6);
    }
    k->rmsnorm(u, v, ST_N, 1e-6f, r);
    out[n++] = st_sum(seed, r, ST_N);
    k->l2norm(u, ST_N, 0.125f, r);
    out[n++] = st_sum(seed, r, ST_N);
    k->gated_rmsnorm(u, v, w, ST_N, 1e-6f, r);
    out[n++] = st_sum(seed, r, ST_N);
    k->silu_mul(u, v, r, ST_N);
    k->axpy(0.7f, w, r, ST_N);
    k->mul_sigmoid(r, z, ST_N);
    out[n++] = st_sum(seed, r, ST_N);
    const float *taps[] = {u, v, w, z};
    k->conv_silu(taps, x + ST_COLS, 61, 4, 0, 61, r);
    out[n++] = st_sum(seed, r, 61);
    memcpy(r, u, sizeof r);
    k->rope(r, v, w, 16);
    out[n++] = st_sum(seed, r, 32);
    k->deltanet(w, 17, 19, u, v, z, 0.9f, 0.6f, r); /* the state is w and what follows it, up to z */
    out[n++] = st_sum(st_sum(seed, w, 17 * 19), r, 19);
    for (int i = 0; i < 2; i++) {
        float o[35];
        k->attn_scores[i](v, i ? (void *)half : (void *)u, 7, 35, 0.17f, s);
        float total = k->attn_values[i](s, i ? (void *)half : (void *)u, 7, 35, s[3], o);
        out[n++] = st_sum(st_sum(st_sum(seed, s, 7), o, 35), &total, 1);
    }
    int32_t idx[8];
    k->router(u, 61, 8, idx, s);
    out[n++] = st_sum(st_sum(seed, idx, 8), s, 8);
    return n;
}

int coli_selftest_checksums(const coli_kernels *k, uint32_t out[COLI_SELFTEST_STEPS])
{
    return st_run(k, out);
}

const char *coli_selftest(const coli_kernels *k)
{
    uint32_t found[COLI_SELFTEST_STEPS];
    if (st_run(k, found) != ST_STEPS)
        return "memory";
    for (int i = 0; i < ST_STEPS; i++)
        if (found[i] != st_golden[i].checksum)
            return st_golden[i].entry;
    return NULL;
}

#endif
