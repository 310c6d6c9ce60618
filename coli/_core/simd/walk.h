/* A run of blocks times one token or many, as a core's memory wants it: up to four streams, each continuous. */
#ifndef COLI_WALK_H
#define COLI_WALK_H

#include "kernels.h"

/* Blocks at step i of streams that share [b0, b1) as evenly as can be: stream s of S takes
 * [b0 + s*n/S, b0 + (s+1)*n/S).  Returns how many streams still have one; their numbers go to block[]. */
static inline int coli_walk_step(int b0, int b1, int i, int block[COLI_STREAMS])
{
    const int n = b1 - b0, streams = n < COLI_STREAMS ? n : COLI_STREAMS;
    int count = 0;
    for (int s = 0; s < streams; s++) {
        const int from = b0 + (int)((int64_t)s * n / streams), to = b0 + (int)((int64_t)(s + 1) * n / streams);
        if (from + i < to)
            block[count++] = from + i;
    }
    return count;
}

/* Rows of the blocks [b0, b1) of m times one token: row 16*b goes to y[16*b], so y has 16*n_blocks places. */
static inline void coli_walk_gemv(const coli_kernels *k, const coli_matrix *m, const coli_acts *a, int token,
                                  int b0, int b1, float *y)
{
    const uint8_t *blocks[COLI_STREAMS];
    float *rows[COLI_STREAMS];
    int block[COLI_STREAMS], count;
    for (int i = 0; (count = coli_walk_step(b0, b1, i, block)) > 0; i++) {
        for (int s = 0; s < count; s++) {
            blocks[s] = m->data + block[s] * m->block_bytes;
            rows[s] = y + (int64_t)block[s] * COLI_BLOCK_ROWS;
        }
        k->gemv[m->format](blocks, count, m->n_groups, a, token, rows);
    }
}

/* The same for many tokens; tokens == NULL means 0..n_tokens-1, and the i-th one's row r goes to y[i*y_stride + r]. */
static inline void coli_walk_gemm(const coli_kernels *k, const coli_matrix *m, const coli_acts *a,
                                  const int32_t *tokens, int n_tokens, int b0, int b1, float *y, int64_t y_stride,
                                  void *scratch)
{
    const uint8_t *blocks[COLI_STREAMS];
    float *rows[COLI_STREAMS];
    int block[COLI_STREAMS], count;
    for (int i = 0; (count = coli_walk_step(b0, b1, i, block)) > 0; i++) {
        for (int s = 0; s < count; s++) {
            blocks[s] = m->data + block[s] * m->block_bytes;
            rows[s] = y + (int64_t)block[s] * COLI_BLOCK_ROWS;
        }
        k->gemm[m->format](blocks, count, m->n_groups, a, tokens, n_tokens, rows, y_stride, scratch);
    }
}

#endif
