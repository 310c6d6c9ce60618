/* The yardstick of the GEMV: how fast the same walk reads the same bytes and does nothing with them. */
#ifndef COLI_BENCH_H
#define COLI_BENCH_H

#include <stddef.h>
#include <stdint.h>

/* Xor of the n_bytes at each of the 1..4 streams, read side by side, prefetched like a GEMV.
 * n_bytes is a multiple of 64.  name is that of a kernel table; it must be one this CPU runs. */
typedef uint64_t (*coli_read_xor_fn)(const uint8_t *const *streams, int n_streams, int64_t n_bytes);

/* NULL for an unknown name. */
coli_read_xor_fn coli_read_xor_for(const char *name);

#endif
