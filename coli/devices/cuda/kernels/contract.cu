/* The numeric contract on a card (docs/numerics.md): what every kernel of this folder is made of.
 *
 * Compiled by NVRTC with --fmad=false and without includes; all files of this folder are one translation unit, this
 * one first.  Float arithmetic is written with the correctly rounded intrinsics and nothing else, so that a flag alone
 * cannot change a bit; tests/devices/cuda/test_ptx.py reads the PTX for what else might have slipped in.
 */
typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__
#define GROUP 128     /* columns that share an activation scale */
#define BLOCK_ROWS 16 /* rows of an R16 block */
#define WARP 32
#define ALL 0xffffffffu

/* Number formats, as in coli_format. */
#define I8_ROW 0
#define I8_GROUP 1
#define I4_ROW 2
#define I4_GROUP 3
#define F32 4
#define BF16 5
#define F16 6

#define BITS_TINY 0x0d800000u /* 2^-100: below it 127/absmax could overflow, and the group becomes zero */
#define BITS_INF 0x7f800000u
#define BITS_NAN 0x7fc00000u

/* A kernel may be launched while the one before it still runs (compute capability 9.0): it then fetches weights first
 * and waits here before it reads what that one writes.  Rule: before the wait read only what was final before the
 * previous kernel could let the next one start. */
DEVICE void wait_for_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE float half_to_float(u16 h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); /* exact, subnormals included */
    return f;
}

DEVICE u16 float_to_half(float f)
{
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

/* ---- the four transcendentals (section 4) --------------------------------------------------------------------- */

DEVICE float exp_(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    const float magic = 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer, ties to even */
    float shifted = __fadd_rn(__fmul_rn(x, 1.44269504088896341f), magic);
    float n = __fsub_rn(shifted, magic);
    int e = __float_as_int(shifted) - __float_as_int(magic);
    float r = __fadd_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, 2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
    p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    return __fmul_rn(p, __int_as_float((e + 127) << 23));
}

DEVICE float sigmoid_(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_(-x))); }

DEVICE float silu_(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, exp_(-x))); }

DEVICE float softplus_(float x)
{
    float t = exp_(__int_as_float(__float_as_int(x) | 0x80000000));
    float s = __fdiv_rn(t, __fadd_rn(2.0f, t));
    float z = __fmul_rn(s, s);
    float q = 2.0f / 15.0f;
    q = __fadd_rn(__fmul_rn(q, z), 2.0f / 13.0f);
    q = __fadd_rn(__fmul_rn(q, z), 2.0f / 11.0f);
    q = __fadd_rn(__fmul_rn(q, z), 2.0f / 9.0f);
    q = __fadd_rn(__fmul_rn(q, z), 2.0f / 7.0f);
    q = __fadd_rn(__fmul_rn(q, z), 2.0f / 5.0f);
    q = __fadd_rn(__fmul_rn(q, z), 2.0f / 3.0f);
    float positive = x > 0.0f ? x : 0.0f;
    return __fadd_rn(positive, __fadd_rn(__fmul_rn(__fmul_rn(s, z), q), __fadd_rn(s, s)));
}

DEVICE float4 add4(float4 a, float4 b)
{
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

/* ---- sums over features: 32 lanes are one warp ---------------------------------------------------------------- */

/* The tree over lanes: a + b = b + a, so with an exchange by xor every lane ends with the value of lane 0's tree. */
DEVICE float tree32(float p)
{
#pragma unroll
    for (int h = 16; h >= 1; h /= 2)
        p = __fadd_rn(p, __shfl_xor_sync(ALL, p, h));
    return p;
}

/* ---- quantised activations ------------------------------------------------------------------------------------ */

/* Activations of several tokens, group-major as on the CPU: q[(g * stride + t) * 128 ..], scale and sum likewise. */
struct Acts {
    i8 *q;
    float *scale;
    int *sum;
    int stride;
    int n_groups;
};

DEVICE u32 warp_max(u32 m)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, m);
#else
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) {
        u32 other = __shfl_xor_sync(ALL, m, h);
        m = other > m ? other : m;
    }
    return m;
#endif
}

DEVICE int warp_sum(int v)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL, v);
#else
#pragma unroll
    for (int h = 16; h >= 1; h /= 2)
        v += __shfl_xor_sync(ALL, v, h);
    return v;
#endif
}

/* One group by one warp: lane l brings x[4l..4l+3] and gets those four q in one word; scale and sum go to all lanes. */
DEVICE u32 quantize_group(float4 x, float *scale, int *sum)
{
    u32 a = __float_as_uint(x.x) & 0x7fffffffu, b = __float_as_uint(x.y) & 0x7fffffffu;
    u32 c = __float_as_uint(x.z) & 0x7fffffffu, d = __float_as_uint(x.w) & 0x7fffffffu;
    a = a > b ? a : b;
    c = c > d ? c : d;
    u32 m = warp_max(a > c ? a : c);
    *sum = 0;
    if (m < BITS_TINY || m >= BITS_INF) { /* the same in every lane */
        *scale = m < BITS_TINY ? 0.0f : __uint_as_float(BITS_NAN);
        return 0;
    }
    float absmax = __uint_as_float(m), inverse = __fdiv_rn(127.0f, absmax);
    *scale = __fdiv_rn(absmax, 127.0f);
    u32 q = (__float2int_rn(__fmul_rn(x.x, inverse)) & 255) | (__float2int_rn(__fmul_rn(x.y, inverse)) & 255) << 8 |
            (__float2int_rn(__fmul_rn(x.z, inverse)) & 255) << 16 | (u32)__float2int_rn(__fmul_rn(x.w, inverse)) << 24;
    *sum = warp_sum(__dp4a((int)q, 0x01010101, 0));
    return q;
}

/* Four values from column k on; what lies past the last column is zero. */
DEVICE float4 load_columns(const float *x, int k, int cols)
{
    if (k + 3 < cols && ((u64)(x + k) & 15) == 0)
        return *(const float4 *)(x + k);
    float4 v;
    v.x = k < cols ? x[k] : 0.0f;
    v.y = k + 1 < cols ? x[k + 1] : 0.0f;
    v.z = k + 2 < cols ? x[k + 2] : 0.0f;
    v.w = k + 3 < cols ? x[k + 3] : 0.0f;
    return v;
}

DEVICE void store_group(const Acts &a, int token, int g, int lane, u32 q, float scale, int sum)
{
    i64 at = (i64)g * a.stride + token;
    ((u32 *)a.q)[at * (GROUP / 4) + lane] = q;
    if (lane == 0) {
        a.scale[at] = scale;
        a.sum[at] = sum;
    }
}

/* ---- R16 blocks ----------------------------------------------------------------------------------------------- */

DEVICE int header_bytes(int format, int n_groups)
{
    int n = format & 1 ? n_groups * 32 : 64; /* group scales [K/128][16] float16, row scales [16] float32 */
    return (n + 127) / 128 * 128;
}

/* Weights are read once: past L1, through the read-only path.  The offset is part of the instruction, so that many
 * loads share one address and the first leaves early. */
template <int OFFSET> DEVICE uint4 load_once(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4+%5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "n"(OFFSET));
    return v;
}

/* One expert, or a row of a resident slab, that a group call computes: which weights, which row of x, which row of y.
 */
struct Job {
    u64 slab;
    int row, out;
};
