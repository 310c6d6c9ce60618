/* Every kernel table of this build against the scalar one, bit for bit, without Python: for instruction sets whose
 * machine is not at hand.  Arm: built static and run under an emulator.  AMX: with -include amx.h, tiles in plain C.
 * The golden self-test ties the scalar table of this architecture to the recorded bits of the others.
 * Exit status 0 and a last line "equal" when all bits agree. */
#include "dispatch.c"

#include <stdio.h>

#include "walk.h"

static uint32_t state = 12345;
static int differences, comparisons;

static uint32_t next(void) { return st_random(&state); }

static void compare(const char *table, const char *what, const float *a, const float *b, int64_t n)
{
    comparisons++;
    for (int64_t i = 0; i < n; i++)
        if (float_to_bits(a[i]) != float_to_bits(b[i])) {
            printf("%s %s: value %ld is %08x, scalar has %08x\n", table, what, (long)i, float_to_bits(a[i]),
                   float_to_bits(b[i]));
            differences++;
            return;
        }
}

/* Random bytes; pattern 1 and 2: all weights at one end of their range. */
static void fill_blocks(uint8_t *data, int format, int n_blocks, int n_groups, int pattern)
{
    const int64_t header = coli_header_bytes(format, n_groups), size = header + coli_payload_bytes(format, n_groups);
    const int int4 = format >= COLI_I4_ROW;
    const uint8_t low = int4 ? 0x00 : 0x81, high = int4 ? 0xFF : 0x7F;
    for (int b = 0; b < n_blocks; b++, data += size) {
        for (int64_t i = header; i < size; i++) {
            uint8_t w = (uint8_t)next();
            data[i] = pattern == 1 ? low : pattern == 2 ? high : !int4 && w == 0x80 ? 0 : w;
        }
        for (int64_t i = 0; i < header / 4; i++) { /* subnormal and negative float16 among them */
            float scale;
            st_fill(&state, &scale, 1);
            if (has_group_scales(format)) {
                uint32_t halves = next() | next() << 16;
                halves &= 0xBBFFBBFF;
                memcpy(data + 4 * i, &halves, 4);
            } else {
                memcpy(data + 4 * i, &scale, 4);
            }
        }
    }
}

static void *allocate(size_t n) { return aligned_alloc(64, (n + 63) / 64 * 64); }

static coli_acts new_acts(int n_tokens, int n_groups)
{
    const size_t n = (size_t)n_tokens * n_groups;
    coli_acts a = {allocate(n * COLI_GROUP), allocate(n * 4), allocate(n * 4), n_tokens, n_groups};
    memset(a.q, 0xFF, n * COLI_GROUP);
    return a;
}

static void products(const coli_kernels *k, const coli_kernels *scalar, int rows, int cols, int n_tokens, int pattern)
{
    const int n_blocks = (rows + 15) / 16, n_groups = (cols + 127) / 128, y_stride = n_blocks * 16;
    float *x = allocate((size_t)n_tokens * cols * 4);
    st_fill(&state, x, n_tokens * cols);
    if (pattern) /* every q is 127 */
        for (int i = 0; i < n_tokens * cols; i++)
            x[i] = 1.5f;
    if (cols > 128) /* one group of zeros */
        memset(x + 128, 0, (cols < 256 ? cols - 128 : 128) * sizeof *x);
    coli_acts a = new_acts(n_tokens, n_groups), b = new_acts(n_tokens, n_groups);
    for (int t = 0; t < n_tokens; t++)
        if (k->quantize(x + t * cols, cols, &a, t) != scalar->quantize(x + t * cols, cols, &b, t))
            differences++;
    compare(k->name, "scale", a.scale, b.scale, n_tokens * n_groups);
    comparisons += 2;
    differences += memcmp(a.q, b.q, (size_t)n_tokens * n_groups * COLI_GROUP) != 0;
    differences += memcmp(a.sum, b.sum, (size_t)n_tokens * n_groups * 4) != 0;

    float *y = allocate((size_t)n_tokens * y_stride * 4), *expected = allocate((size_t)n_tokens * y_stride * 4);
    int32_t *tokens = allocate((size_t)n_tokens * 4);
    void *scratch = allocate(coli_gemm_scratch_bytes(n_groups));
    for (int format = COLI_I8_ROW; format <= COLI_I4_GROUP; format++) {
        const int64_t size = coli_header_bytes(format, n_groups) + coli_payload_bytes(format, n_groups);
        uint8_t *data = allocate(size * n_blocks);
        const coli_matrix m = {data, size, rows, cols, n_blocks, n_groups, format, 0};
        fill_blocks(data, format, n_blocks, n_groups, pattern);
        for (int t = 0; t < n_tokens; t++)
            coli_walk_gemv(scalar, &m, &b, t, 0, n_blocks, expected + t * y_stride);
        memset(y, 0xFF, (size_t)n_tokens * y_stride * 4);
        for (int t = 0; t < n_tokens; t++)
            coli_walk_gemv(k, &m, &b, t, 0, n_blocks, y + t * y_stride);
        compare(k->name, "gemv", y, expected, n_tokens * y_stride);
        memset(y, 0xFF, (size_t)n_tokens * y_stride * 4);
        coli_walk_gemm(k, &m, &b, NULL, n_tokens, 0, n_blocks, y, y_stride, scratch);
        compare(k->name, "gemm", y, expected, n_tokens * y_stride);
        for (int t = 0; t < n_tokens; t++) /* a list: reversed, and compared row by row */
            tokens[t] = n_tokens - 1 - t;
        memset(y, 0xFF, (size_t)n_tokens * y_stride * 4);
        coli_walk_gemm(k, &m, &b, tokens, n_tokens, 0, n_blocks, y, y_stride, scratch);
        for (int t = 0; t < n_tokens; t++)
            compare(k->name, "gemm of a list", y + t * y_stride, expected + tokens[t] * y_stride, y_stride);
        free(data);
    }
    free(x), free(y), free(expected), free(tokens), free(scratch);
    free(a.q), free(a.scale), free(a.sum), free(b.q), free(b.scale), free(b.sum);
}

int main(void)
{
    static const int shapes[][2] = {{16, 128}, {50, 300}, {64, 512}, {112, 640}, {80, 2048}};
    static const int batches[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 48, 67};
    const coli_kernels *scalar = coli_kernels_for("scalar");
    for (const char *const *name = coli_kernels_compiled(); *name; name++) {
        const coli_kernels *k = coli_kernels_for(*name);
#ifdef AMX_EMULATED
        if (strcmp(*name, "amx") == 0 && coli_kernels_for("avx512vnni"))
            k = &table_amx;
#endif
        if (!k) {
            printf("%s: not on this CPU\n", *name);
            continue;
        }
        const char *failed = coli_selftest(k);
        printf("%s: self-test %s\n", *name, failed ? failed : "ok");
        differences += failed != NULL;
        for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++)
            for (int j = 0; j < (int)(sizeof batches / sizeof *batches); j++)
                products(k, scalar, shapes[i][0], shapes[i][1], batches[j], (i + j) % 4 == 3 ? 1 + j % 2 : 0);
    }
    printf("%d comparisons, %d differences\n%s\n", comparisons, differences, differences ? "differ" : "equal");
    return differences != 0;
}
