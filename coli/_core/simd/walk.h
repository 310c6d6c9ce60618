/* A run of blocks times one token or many, as a core's memory wants it: up to four streams, each continuous. */
#ifndef COLI_WALK_H
#define COLI_WALK_H

#include "kernels.h"

/* How streams share [b0, b1): stream s of S takes [b0 + s*n/S, b0 + (s+1)*n/S). */
typedef struct coli_walk {
    int streams, at[COLI_STREAMS + 1];
} coli_walk;

static inline coli_walk coli_walk_start(int b0, int b1)
{
    const int n = b1 - b0;
    coli_walk w = {n < COLI_STREAMS ? n : COLI_STREAMS, {b0}};
    for (int s = 1; s <= w.streams; s++)
        w.at[s] = b0 + (int)((int64_t)s * n / w.streams);
    return w;
}

/* The blocks at step i, those streams that still have one: their bytes and where their rows go in y. */
static inline int coli_walk_step(const coli_walk *w, const coli_matrix *m, int i, float *y,
                                 const uint8_t *blocks[COLI_STREAMS], float *rows[COLI_STREAMS])
{
    int count = 0;
    for (int s = 0; s < w->streams; s++) {
        const int64_t b = w->at[s] + i;
        if (b < w->at[s + 1]) {
            blocks[count] = m->data + b * m->block_bytes;
            rows[count++] = y + b * COLI_BLOCK_ROWS;
        }
    }
    return count;
}

/* Rows of the blocks [b0, b1) of m times one token: row r goes to y[r], so y has 16 * n_blocks places. */
static inline void coli_walk_gemv(const coli_kernels *k, const coli_matrix *m, const coli_acts *a, int token,
                                  int b0, int b1, float *y)
{
    const coli_walk w = coli_walk_start(b0, b1);
    const uint8_t *blocks[COLI_STREAMS];
    float *rows[COLI_STREAMS];
    for (int i = 0, count; (count = coli_walk_step(&w, m, i, y, blocks, rows)) > 0; i++)
        k->gemv[m->format](blocks, count, m->n_groups, a, token, rows);
}

/* The same for many tokens; tokens == NULL means 0..n_tokens-1, and the i-th one's row r goes to y[i*y_stride + r]. */
static inline void coli_walk_gemm(const coli_kernels *k, const coli_matrix *m, const coli_acts *a,
                                  const int32_t *tokens, int n_tokens, int b0, int b1, float *y, int64_t y_stride,
                                  void *scratch)
{
    const coli_walk w = coli_walk_start(b0, b1);
    const uint8_t *blocks[COLI_STREAMS];
    float *rows[COLI_STREAMS];
    for (int i = 0, count; (count = coli_walk_step(&w, m, i, y, blocks, rows)) > 0; i++)
        k->gemm[m->format](blocks, count, m->n_groups, a, tokens, n_tokens, rows, y_stride, scratch);
}

#endif
