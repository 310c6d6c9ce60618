/* Weight quantisation: rows of stored weights in, R16 headed blocks out (docs/numerics.md, sections 2 and 3).
 *
 * Runs once per weight, in the converter.  Each block of 16 rows is one unit of work that nothing else
 * touches, and every sum inside it has a written order, so the bytes do not depend on the number of
 * threads or on the instruction set.
 */
#ifndef COLI_SEARCH_H
#define COLI_SEARCH_H

#include <stdint.h>

#include "kernels.h"

/* One matrix to quantise.  src: row-major (rows, cols), no gaps, in source (COLI_F32, COLI_BF16 or COLI_F16).
 * dst: n_blocks * block_bytes of the target format.
 * row_error: rows numbers, sum|w - w'| / sum|w| of each row, where the second sum leaves out the largest weight under
 * each scale (0 for a row of zeros, 1 at most); or NULL. */
typedef struct coli_quantize_job {
    const void *src;
    int32_t source;
    int32_t rows, cols;
    uint8_t *dst;
    float *row_error;
} coli_quantize_job;

/* Instruction sets, best first; the last one runs everywhere.  The name of one, or NULL where this CPU lacks it. */
#define COLI_SEARCH_ISAS 3
const char *coli_search_isa(int isa);

/* Quantise all jobs into one format (0..3) with n_threads threads and an instruction set that the CPU has.
 * Returns 0; 1 when a weight is NaN or infinite (then *bad_job and *bad_row name the first such row);
 * -1 when memory is out. */
int coli_quantize_jobs(const coli_quantize_job *jobs, int n_jobs, int format, int isa, int n_threads, int *bad_job,
                       int *bad_row);

/* Index of the first value that is NaN or infinite, or -1.  source: COLI_F32, COLI_BF16 or COLI_F16. */
int64_t coli_first_nonfinite(const void *src, int source, int64_t n, int n_threads);

/* Widen float8 (e4m3: table of 256 values) rows [row0, row0 + rows) of a (?, cols) matrix times their block scales:
 * dst = table[byte] * scale[row / block_rows][col / block_cols], one rounded product. */
void coli_widen_f8(const uint8_t *src, const float *table, const float *scale, int64_t row0, int64_t rows, int64_t cols,
                   int64_t block_rows, int64_t block_cols, float *dst, int n_threads);

/* First block of n that holds a scale that is NaN or infinite, or a -128, or -1 when all are sound. */
int64_t coli_first_bad_block(const uint8_t *data, int format, int64_t n_blocks, int n_groups, int n_threads);

#endif
