/* Prefill products on AMX int8 tiles: 16 tokens x 16 rows x 64 columns an instruction.
 *
 * A group of one R16 block is 32 lines of 64 bytes, 16 rows x 4 columns each: 16 lines as they lie are a B tile of
 * tdpbssd, so int8 weights need no preparation and int4 ones are decoded to signed bytes once a call. Activations are
 * the A tile, one token a row. A group's int32 sums are stored, converted and added in order; the next group's tiles
 * are issued before that epilogue, so that the tile unit is not idle during it.
 *
 * gcc 12 does not say what its tile intrinsics read: _tile_loadconfig names 8 of 64 bytes, _tile_loadd nothing.
 * AMX_FENCE stands wherever plain stores must be in memory before one of them.
 */
#ifndef COLI_GEMM_AMX_H
#define COLI_GEMM_AMX_H

#include <immintrin.h>

#include "int_avx512vnni.h"

#if !defined(AMX_EMULATED) /* tests/_core/tables/amx.h has these instructions in plain C */
#define AMX __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,avx2")))
#endif
#define AMX_INLINE AMX static inline __attribute__((always_inline))

#define AMX_ROWS 16       /* tokens of a tile */
#define AMX_TOKENS 32     /* tokens a pass: two tiles, so that a tile of weights is loaded once for both */
#define AMX_MIN_TOKENS 9  /* fewer: few_avx512vnni, which reads weights at the speed of memory */
#define AMX_FENCE() __asm__ volatile("" : : : "memory")

/* Palette 1: eight tiles of up to 16 rows of 64 bytes.  tdpbssd takes the time of its A tile's rows. */
struct amx_config {
    uint8_t palette, start_row, zero[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

/* What a pass shares; dots are kept for two groups, the one in the tiles and the one being added. */
struct amx_pass {
    int32_t dots[2][COLI_STREAMS][AMX_TOKENS * 16];
    float sums[COLI_STREAMS][AMX_TOKENS * 16];
    int8_t x[AMX_TOKENS * COLI_GROUP]; /* of a group, when tokens are gathered */
    float scale[2][AMX_TOKENS];
};
_Static_assert(sizeof(struct amx_pass) <= 65536, "scratch beside the decoded blocks: coli_gemm_scratch_bytes");

/* Tiles 0, 1: sums of the first and second 16 tokens.  2, 3 and 4, 5: their activations, both halves of a group.
 * 6, 7: weights, both halves.  A pass of at most 16 tokens has 1, 4 and 5 free, and uses them for every other block. */
AMX static void amx_configure(int m)
{
    const uint8_t first = (uint8_t)(m < AMX_ROWS ? m : AMX_ROWS), second = (uint8_t)(m - first);
    const uint8_t rows[8] = {first, second ? second : first, first, first, second ? second : 16, second ? second : 16,
                             16,    16};
    struct amx_config c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int t = 0; t < 8; t++) {
        c.bytes_per_row[t] = 64;
        c.rows[t] = rows[t];
    }
    __asm__ volatile("" : : "r"(&c) : "memory");
    _tile_loadconfig(&c);
}

/* int4 payload to signed bytes in the lines of an int8 payload; what follows the block is prefetched. */
AMX static void amx_decode(const uint8_t *payload, uint8_t *w, int n_groups)
{
    const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    for (int i = 0; i < n_groups * I4_LINES; i++, payload += LINE, w += 2 * LINE) {
        const __m512i v = load512(payload);
        COLI_PREFETCH(payload + AHEAD_BYTES);
        store512(w, _mm512_sub_epi8(_mm512_and_si512(v, low), eight));
        store512(w + LINE, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), eight));
    }
}

/* Products of one group with up to 16 tokens: the C, A, A, B, B tiles are constants of the instruction. */
#define AMX_PRODUCT(C, A0, A1, B0, B1)                                                                           \
    _tile_dpbssd(C, A0, B0);                                                                                     \
    _tile_dpbssd(C, A1, B1);

#define AMX_LOAD_WEIGHTS(B0, B1)                                                                                 \
    _tile_loadd(B0, lines, LINE);                                                                                \
    _tile_loadd(B1, lines + I8_GROUP_BYTES / 2, LINE);

/* Issue the tiles of group g; x is its activations, a token every 128 bytes. */
AMX_INLINE void amx_issue(const uint8_t *const *w, int n_blocks, int g, const int8_t *x, int m,
                          int32_t (*dots)[AMX_TOKENS * 16], int prefetch)
{
    _tile_loadd(2, x, COLI_GROUP);
    _tile_loadd(3, x + COLI_GROUP / 2, COLI_GROUP);
    if (m > AMX_ROWS) {
        _tile_loadd(4, x + AMX_ROWS * COLI_GROUP, COLI_GROUP);
        _tile_loadd(5, x + AMX_ROWS * COLI_GROUP + COLI_GROUP / 2, COLI_GROUP);
    }
    for (int b = 0; b < n_blocks; b++) {
        const uint8_t *lines = w[b] + (int64_t)g * I8_GROUP_BYTES;
        if (m > AMX_ROWS) {
            AMX_LOAD_WEIGHTS(6, 7)
            _tile_zero(0);
            _tile_zero(1);
            AMX_PRODUCT(0, 2, 3, 6, 7)
            AMX_PRODUCT(1, 4, 5, 6, 7)
            _tile_stored(0, dots[b], LINE);
            _tile_stored(1, dots[b] + AMX_ROWS * 16, LINE);
        } else if (b & 1) {
            AMX_LOAD_WEIGHTS(4, 5)
            _tile_zero(1);
            AMX_PRODUCT(1, 2, 3, 4, 5)
            _tile_stored(1, dots[b], LINE);
        } else {
            AMX_LOAD_WEIGHTS(6, 7)
            _tile_zero(0);
            AMX_PRODUCT(0, 2, 3, 6, 7)
            _tile_stored(0, dots[b], LINE);
        }
        if (prefetch) /* the first pass reads the weights from RAM */
            for (int j = 0; j < I8_GROUP_BYTES; j += LINE)
                COLI_PREFETCH(lines + I8_GROUP_BYTES + j);
    }
}

/* y = y + float(dot) * (s_x [* s_w]) of one group. */
AMX_INLINE void amx_add_group(const int32_t (*dots)[AMX_TOKENS * 16], float (*sums)[AMX_TOKENS * 16],
                              const float *sx, const uint8_t *const *blocks, int n_blocks, int g, int m,
                              const int group_scales)
{
    for (int b = 0; b < n_blocks; b++) {
        __m512 sw = _mm512_setzero_ps();
        if (group_scales)
            sw = _mm512_cvtph_ps(load_halves(blocks[b] + g * 32));
        for (int i = 0; i < m; i++) {
            float *y = sums[b] + i * 16;
            __m512 scale = _mm512_set1_ps(sx[i]);
            if (group_scales)
                scale = _mm512_mul_ps(scale, sw);
            scale = _mm512_mul_ps(_mm512_cvtepi32_ps(load512(dots[b] + i * 16)), scale);
            _mm512_store_ps(y, _mm512_add_ps(_mm512_load_ps(y), scale));
        }
    }
}

AMX_INLINE void gemm_amx(const uint8_t *const *blocks, int n_blocks, int n_groups, const coli_acts *a,
                         const int32_t *tokens, int n_tokens, float *const *y, int64_t y_stride, void *scratch,
                         const int int4, const int group_scales)
{
    const int64_t header = coli_header_bytes(group_scales ? COLI_I8_GROUP : COLI_I8_ROW, n_groups);
    const int64_t payload = (int64_t)n_groups * I8_GROUP_BYTES;
    /* scratch: decoded int4 blocks | the pass */
    struct amx_pass *const pass = (struct amx_pass *)((uint8_t *)scratch + COLI_STREAMS * payload);
    const uint8_t *w[COLI_STREAMS];
    int configured = 0;
    for (int b = 0; b < n_blocks; b++) {
        w[b] = blocks[b] + header;
        if (int4) {
            amx_decode(blocks[b] + header, (uint8_t *)scratch + b * payload, n_groups);
            w[b] = (uint8_t *)scratch + b * payload;
        }
    }
    for (int first = 0; first < n_tokens; first += AMX_TOKENS) {
        const int m = n_tokens - first < AMX_TOKENS ? n_tokens - first : AMX_TOKENS;
        if (m != configured)
            amx_configure(m);
        configured = m;
        for (int b = 0; b < n_blocks; b++)
            memset(pass->sums[b], 0, (size_t)m * 16 * sizeof(float));
        for (int g = 0; g <= n_groups; g++) {
            if (g < n_groups) {
                const int8_t *x = pass->x;
                if (tokens) {
                    for (int i = 0; i < m; i++) {
                        const int64_t at = group_index(a, g, tokens[first + i]);
                        pass->scale[g & 1][i] = a->scale[at];
                        memcpy(pass->x + i * COLI_GROUP, a->q + at * COLI_GROUP, COLI_GROUP);
                    }
                } else {
                    const int64_t at = group_index(a, g, first);
                    memcpy(pass->scale[g & 1], a->scale + at, (size_t)m * sizeof(float));
                    x = a->q + at * COLI_GROUP;
                }
                AMX_FENCE();
                amx_issue(w, n_blocks, g, x, m, pass->dots[g & 1], first == 0 && !int4);
                AMX_FENCE();
            }
            if (g > 0) /* the group before this one, while the tiles work */
                amx_add_group((const int32_t(*)[AMX_TOKENS * 16])pass->dots[(g - 1) & 1], pass->sums,
                              pass->scale[(g - 1) & 1], blocks, n_blocks, g - 1, m, group_scales);
        }
        for (int b = 0; b < n_blocks; b++) {
            const __m512 row = _mm512_loadu_ps(blocks[b]);
            float *to = y[b] + first * y_stride;
            for (int i = 0; i < m; i++, to += y_stride) {
                const __m512 v = _mm512_load_ps(pass->sums[b] + i * 16);
                _mm512_storeu_ps(to, group_scales ? v : _mm512_mul_ps(v, row));
            }
        }
    }
    _tile_release();
}

#define AMX_ENTRY(NAME, INT4, GROUP_SCALES)                                                                      \
    AMX static void gemm_##NAME##_amx(const uint8_t *const *blocks, int n_blocks, int n_groups,                  \
                                      const coli_acts *a, const int32_t *tokens, int n_tokens, float *const *y,  \
                                      int64_t y_stride, void *scratch)                                           \
    {                                                                                                            \
        if (n_tokens < AMX_MIN_TOKENS)                                                                           \
            gemm_##NAME##_avx512vnni(blocks, n_blocks, n_groups, a, tokens, n_tokens, y, y_stride, scratch);     \
        else                                                                                                     \
            gemm_amx(blocks, n_blocks, n_groups, a, tokens, n_tokens, y, y_stride, scratch, INT4, GROUP_SCALES); \
    }
AMX_ENTRY(i8_row, 0, 0)
AMX_ENTRY(i8_group, 0, 1)
AMX_ENTRY(i4_row, 1, 0)
AMX_ENTRY(i4_group, 1, 1)
#undef AMX_ENTRY
#undef AMX_PRODUCT
#undef AMX_LOAD_WEIGHTS

#endif
