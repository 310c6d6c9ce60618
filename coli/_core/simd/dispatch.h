/* Choosing a kernel table at run time, and the two checks that guard the contract. */
#ifndef COLI_DISPATCH_H
#define COLI_DISPATCH_H

#include "kernels.h"

/* 1 when the calling thread rounds to nearest and flushes no subnormals; 0 otherwise.
 * Other libraries change this register, so every thread of a team asks once. */
int coli_fp_mode_ok(void);

/* Runs a table on fixed input and compares with results recorded from the contract.  Returns NULL, or
 * the name of the first entry whose bits differ: the build (flags, compiler) breaks the contract. */
const char *coli_selftest(const coli_kernels *k);

/* The checksums that coli_selftest compares, for recording them; returns how many there are. */
#define COLI_SELFTEST_STEPS 64
int coli_selftest_checksums(const coli_kernels *k, uint32_t out[COLI_SELFTEST_STEPS]);

#endif
