/* Kernels for tests/devices/cuda/test_emulator.py: right ones, and each thing that kernels do wrong. */
#line 4 "emulated.cu"
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define ALL 0xffffffffu

DEVICE float to_float(u16 h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE u16 to_half(float f)
{
    u16 h;
    asm("cvt.rn.f16.f32 %[to], %[from];" : [to] "=h"(h) : [from] "f"(f));
    return h;
}

KERNEL halves(const u16 *h, const float *f, float *of_halves, u16 *of_floats)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    of_halves[i] = to_float(h[i]);
    of_floats[i] = to_half(f[i]);
}

KERNEL lanes(u32 *out)
{
    u32 lane = threadIdx.x, v = lane * lane;
    out[lane] = __shfl_xor_sync(ALL, v, 5);
    out[32 + lane] = __shfl_sync(ALL, v, lane + 3);
    out[64 + lane] = __shfl_down_sync(ALL, v, 4);
    out[96 + lane] = __shfl_up_sync(ALL, v, 2);
    out[128 + lane] = __shfl_sync(ALL, v, 1, 8);
    out[160 + lane] = __reduce_max_sync(ALL, v);
    out[192 + lane] = __reduce_add_sync(ALL, v);
    out[224 + lane] = __ballot_sync(ALL, lane % 4 == 3);
    out[256 + lane] = __any_sync(ALL, lane == 7) && !__all_sync(ALL, lane == 7);
    u32 half = lane < 16 ? 0xffffu : 0xffff0000u;
    out[288 + lane] = __reduce_add_sync(half, lane);
    out[320 + lane] = __match_any_sync(ALL, lane % 3);
    if (lane >= 20)
        return;
    out[352 + lane] = __reduce_add_sync(ALL, lane);
}

DEVICE void multiply(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* a (16, 32), b (8, 32): c (16, 8) += a b' */
KERNEL tensor(const i8 *a, const i8 *b, int *c)
{
    int row = threadIdx.x / 4, part = threadIdx.x % 4;
    const u32 *x = (const u32 *)a, *y = (const u32 *)b;
    u32 mine[4] = {x[row * 8 + part], x[(row + 8) * 8 + part], x[row * 8 + part + 4], x[(row + 8) * 8 + part + 4]};
    u32 other[2] = {y[row * 8 + part], y[row * 8 + part + 4]};
    int *to[4] = {c + row * 8 + part * 2, c + row * 8 + part * 2 + 1, c + row * 8 + 64 + part * 2,
                  c + row * 8 + 64 + part * 2 + 1};
    int d[4] = {*to[0], *to[1], *to[2], *to[3]};
    multiply(d, mine, other);
    for (int i = 0; i < 4; i++)
        *to[i] = d[i];
}

DEVICE void copy_16(void *to, const void *from)
{
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
}

DEVICE void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE void load_4(u32 (&v)[4], const void *row)
{
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(at));
}

KERNEL tensor_staged(const i8 *a, const i8 *b, int *c)
{
    __shared__ __align__(16) i8 x[16][32], y[8][32];
    int lane = threadIdx.x;
    copy_16(&x[lane / 2][lane % 2 * 16], a + lane * 16);
    if (lane < 16)
        copy_16(&y[lane / 2][lane % 2 * 16], b + lane * 16);
    close_group();
    wait_group<0>();
    __syncthreads();
    u32 mine[4], other[4];
    load_4(mine, &x[lane % 16][lane / 16 * 16]); /* rows 0..7 and 8..15, then the same 16 columns further on */
    load_4(other, &y[lane % 8][lane / 8 % 2 * 16]);
    int row = lane / 4, part = lane % 4;
    int *to[4] = {c + row * 8 + part * 2, c + row * 8 + part * 2 + 1, c + row * 8 + 64 + part * 2,
                  c + row * 8 + 64 + part * 2 + 1};
    int d[4] = {*to[0], *to[1], *to[2], *to[3]};
    u32 two[2] = {other[0], other[1]};
    multiply(d, mine, two);
    for (int i = 0; i < 4; i++)
        *to[i] = d[i];
}

KERNEL late_copy(const u32 *in, u32 *out)
{
    __shared__ __align__(16) volatile u32 here[4];
    copy_16((void *)here, in);
    close_group();
    wait_group<1>();
    for (int i = 0; i < 4; i++)
        out[i] = here[i];
    wait_group<0>();
    for (int i = 0; i < 4; i++)
        out[4 + i] = here[i];
}

template <bool WAITS> DEVICE void turn(u32 *rows)
{
    extern __shared__ u32 row[];
    u32 *mine = rows + blockIdx.x * blockDim.x;
    row[threadIdx.x] = mine[threadIdx.x];
    if (WAITS)
        __syncthreads();
    mine[threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}

KERNEL turn_around(u32 *rows) { turn<true>(rows); }
KERNEL turn_around_racing(u32 *rows) { turn<false>(rows); }

KERNEL votes(u32 *out)
{
    if (threadIdx.x >= 64)
        return;
    int count = __syncthreads_count(threadIdx.x < 32), all = __syncthreads_and(threadIdx.x < 32);
    int any = __syncthreads_or(threadIdx.x == 63);
    if (threadIdx.x == 0)
        out[0] = count, out[1] = all, out[2] = any;
}

DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

KERNEL add_after_wait(u32 *p)
{
    let_next_start();
    wait_for_previous();
    p[blockIdx.x * 32 + threadIdx.x] += 1;
}

KERNEL add_before_wait(u32 *p)
{
    let_next_start();
    u32 v = p[blockIdx.x * 32 + threadIdx.x];
    wait_for_previous();
    p[blockIdx.x * 32 + threadIdx.x] = v + 1;
}

DEVICE u32 load_of_host(const u32 *p)
{
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void rest(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

DEVICE unsigned long long now_ns()
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* word 0 asks, word 1 answers, word 2 counts threads; gives up after 10 s */
KERNEL ask_host(u32 *word)
{
    if (threadIdx.x == 0) {
        unsigned long long start = now_ns();
        u32 n = atomicAdd(word, 1u) + 1;
        __threadfence_system();
        while (load_of_host(word + 1) < n && now_ns() - start < 10000000000ull)
            rest(1000);
    }
    __syncthreads();
    atomicAdd_system(word + 2, 1);
}

/* ---- wrong ones */

KERNEL half_at_a_barrier(u32 *)
{
    if (threadIdx.x <= 32)
        __syncthreads();
    else
        __syncwarp();
}

KERNEL two_barriers(u32 *)
{
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}

KERNEL two_intrinsics(u32 *p)
{
    if (threadIdx.x < 16)
        __syncwarp();
    else
        p[threadIdx.x] = __reduce_add_sync(ALL, threadIdx.x);
}

KERNEL outside_its_mask(u32 *) { __syncwarp(1); }

KERNEL reads_behind_shared(u32 *p)
{
    extern __shared__ u32 words[];
    p[threadIdx.x] = words[threadIdx.x];
}

KERNEL writes_behind_shared(u32 *)
{
    extern __shared__ u32 words[];
    words[15] = 1;
}

KERNEL index_outside(u32 *p)
{
    __shared__ u32 words[16];
    words[threadIdx.x] = 1;
    p[threadIdx.x] = words[threadIdx.x];
}

KERNEL misaligned(u32 *p) { *(uint4 *)(p + 1) = make_uint4(0, 0, 0, 0); }
KERNEL null(u32 *p) { *(volatile u32 *)((unsigned long long)p & 0) = 1; }
KERNEL divides_by_zero(u32 *p) { p[1] = 7 / *(volatile u32 *)p; }
KERNEL traps(u32 *) { __trap(); }
KERNEL __launch_bounds__(64) bounded(u32 *) {}

static __device__ __noinline__ u32 deeper(volatile u32 *p)
{
    volatile u32 here[64];
    here[*p % 64] = *p;
    return deeper(p) + here[1];
}

KERNEL endless_stack(u32 *p) { *p = deeper(p); }
