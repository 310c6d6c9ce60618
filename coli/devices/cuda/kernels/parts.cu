/* What kernels of many rows are made of: copies into shared memory that go on by themselves, and integer tensor cores.
 *
 * Before compute capability 8.0 a copy is made at once, and a product is put together from four smaller ones.
 */

/* Copy 16 bytes, both sides aligned, into shared memory.  They are there for the block after copies_wait and a barrier.
 */
DEVICE void copy16(void *shared, const void *from)
{
#if __CUDA_ARCH__ >= 800
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    *(uint4 *)shared = *(const uint4 *)from;
#endif
}

/* The same of 4 bytes. */
DEVICE void copy4(void *shared, const void *from)
{
#if __CUDA_ARCH__ >= 800
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#else
    *(u32 *)shared = *(const u32 *)from;
#endif
}

/* The copies of this thread since the last time are one batch. */
DEVICE void copies_end()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Have the line of an address on its way into the L2 cache. */
DEVICE void fetch_line(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/* Wait until no more than the last LEFT batches are under way. */
template <int LEFT> DEVICE void copies_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

/* c += A B of a warp, A 16 x 32 and B 32 x 8 in int8.  Lane l has of A rows l/4 (a0, a2) and l/4 + 8 (a1, a3), of B
 * column l/4, both at k = 4 (l%4) .. + 3 (a0, a1, b0) and 16 more (a2, a3, b1); of c row l/4 (0, 1) and l/4 + 8 (2, 3),
 * columns 2 (l%4), + 1. */
DEVICE void mma_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a0), "r"(b0));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a2), "r"(b1));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[2]), "+r"(c[3])
        : "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[2]), "+r"(c[3])
        : "r"(a3), "r"(b1));
#endif
}
