/* CUDA's words for kernels that run on fibers (fibers.h): types, built-in variables, intrinsics.
 *
 * Only what the contract allows is here: an approximate function does not compile.  The rounded operations are plain
 * ones; the build forbids their fusion.
 */
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>
#include <utility>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

#define threadIdx (emulator::self->thread)
#define blockIdx (emulator::self->block->index)
#define blockDim (emulator::self->block->grid->threads)
#define gridDim (emulator::self->block->grid->size)
#define warpSize 32

/* ---- vectors ---------------------------------------------------------------------------------------------------- */

#define EMULATOR_VECTOR(T, NAME, A2, A4)                                                                               \
    struct NAME##1 { T x; };                                                                                           \
    struct __attribute__((aligned(A2))) NAME##2 { T x, y; };                                                           \
    struct NAME##3 { T x, y, z; };                                                                                     \
    struct __attribute__((aligned(A4))) NAME##4 { T x, y, z, w; };                                                     \
    inline NAME##1 make_##NAME##1(T x) { return {x}; }                                                                 \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                                         \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                                                 \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTOR(signed char, char, 2, 4)
EMULATOR_VECTOR(unsigned char, uchar, 2, 4)
EMULATOR_VECTOR(short, short, 4, 8)
EMULATOR_VECTOR(unsigned short, ushort, 4, 8)
EMULATOR_VECTOR(int, int, 8, 16)
EMULATOR_VECTOR(unsigned, uint, 8, 16)
EMULATOR_VECTOR(long long, longlong, 16, 16)
EMULATOR_VECTOR(unsigned long long, ulonglong, 16, 16)
EMULATOR_VECTOR(float, float, 8, 16)
EMULATOR_VECTOR(double, double, 16, 16)
#undef EMULATOR_VECTOR

/* ---- arithmetic ------------------------------------------------------------------------------------------------- */

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

namespace emulator {
template <class To, class From> To bits(From v)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &v, sizeof to);
    return to;
}

/* Out of range is the nearest end, NaN is 0, as on the card. */
template <class To> To to_integer(float rounded, float low, float high)
{
    return rounded != rounded ? 0
           : rounded >= high  ? std::numeric_limits<To>::max()
           : rounded <= low   ? std::numeric_limits<To>::min()
                              : (To)rounded;
}
} // namespace emulator

inline int __float_as_int(float v) { return emulator::bits<int>(v); }
inline unsigned __float_as_uint(float v) { return emulator::bits<unsigned>(v); }
inline float __int_as_float(int v) { return emulator::bits<float>(v); }
inline float __uint_as_float(unsigned v) { return emulator::bits<float>(v); }
inline int __float2int_rn(float v) { return emulator::to_integer<int>(nearbyintf(v), -0x1p31f, 0x1p31f); }
inline int __float2int_rz(float v) { return emulator::to_integer<int>(truncf(v), -0x1p31f, 0x1p31f); }
inline unsigned __float2uint_rn(float v) { return emulator::to_integer<unsigned>(nearbyintf(v), 0.0f, 0x1p32f); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }
inline float __ll2float_rn(long long v) { return (float)v; }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __ffsll(unsigned long long v) { return __builtin_ffsll(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(unsigned long long v) { return v ? __builtin_clzll(v) : 64; }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __brev(unsigned v)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
        r |= (v >> i & 1) << (31 - i);
    return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> 4 * i, byte = both >> 8 * (s & 7) & 255;
        r |= (s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n)
{
    return (unsigned)(((unsigned long long)high << 32 | low) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n)
{
    return (unsigned)(((unsigned long long)high << 32 | low) >> (n & 31));
}

inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8)
        c += (signed char)(a >> i) * (signed char)(b >> i);
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 32; i += 8)
        c += (a >> i & 255) * (b >> i & 255);
    return c;
}

#define EMULATOR_MIN_MAX(T)                                                                                            \
    inline T min(T a, T b) { return a < b ? a : b; }                                                                   \
    inline T max(T a, T b) { return a > b ? a : b; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

/* ---- memory ----------------------------------------------------------------------------------------------------- */

template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldca(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> T __ldcv(const T *p) { return *(const volatile T *)p; }
template <class T> void __stcg(T *p, T v) { *p = v; }
template <class T> void __stcs(T *p, T v) { *p = v; }
template <class T> void __stwt(T *p, T v) { *p = v; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace emulator {
template <class T, class F> T update(T *p, F next)
{
    T old, wanted;
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    do
        wanted = next(old);
    while (!__atomic_compare_exchange(p, &old, &wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
} // namespace emulator

#define EMULATOR_ATOMIC(NAME, EXPRESSION)                                                                              \
    template <class T> T NAME(T *p, std::common_type_t<T> v)                                                           \
    {                                                                                                                  \
        return emulator::update(p, [v](T old) -> T { return EXPRESSION; });                                            \
    }                                                                                                                  \
    template <class T> T NAME##_system(T *p, std::common_type_t<T> v) { return NAME(p, v); }                           \
    template <class T> T NAME##_block(T *p, std::common_type_t<T> v) { return NAME(p, v); }
EMULATOR_ATOMIC(atomicAdd, old + v)
EMULATOR_ATOMIC(atomicSub, old - v)
EMULATOR_ATOMIC(atomicExch, (void(old), v))
EMULATOR_ATOMIC(atomicMin, old < v ? old : v)
EMULATOR_ATOMIC(atomicMax, old > v ? old : v)
EMULATOR_ATOMIC(atomicAnd, old & v)
EMULATOR_ATOMIC(atomicOr, old | v)
EMULATOR_ATOMIC(atomicXor, old ^ v)
EMULATOR_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef EMULATOR_ATOMIC
template <class T> T atomicCAS(T *p, std::common_type_t<T> compare, std::common_type_t<T> v)
{
    return emulator::update(p, [=](T old) -> T { return old == compare ? v : old; });
}

namespace emulator {
template <class T> T &shared(const void *key, size_t alignment)
{
    return *(T *)static_shared(key, sizeof(T), std::max(alignment, alignof(T)));
}
template <class T> T *dynamic_shared() { return (T *)self->block->dynamic; }

/* Shared memory by the 32-bit addresses of its own space. */
inline unsigned shared_address(const void *p) { return (unsigned)((const char *)p - self->block->room->shared); }
inline char *shared_pointer(unsigned address) { return self->block->room->shared + address; }
} // namespace emulator
inline size_t __cvta_generic_to_shared(const void *p) { return emulator::shared_address(p); }

/* ---- barriers and time ------------------------------------------------------------------------------------------ */

#define __syncthreads() ((void)emulator::barrier(0, 0, true, 0, __FILE__, __LINE__))
#define __syncthreads_count(p) (emulator::barrier(0, 0, true, p, __FILE__, __LINE__)[0])
#define __syncthreads_and(p) (emulator::barrier(0, 0, true, p, __FILE__, __LINE__)[1])
#define __syncthreads_or(p) (emulator::barrier(0, 0, true, p, __FILE__, __LINE__)[2])

namespace emulator {
inline unsigned long long nanoseconds()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}
} // namespace emulator
inline void __nanosleep(unsigned ns) { emulator::nap(1 + ns / 1000); }
inline long long clock64() { return (long long)emulator::nanoseconds(); }
[[noreturn]] inline void __trap() { emulator::fail(CODE_LAUNCH_FAILED, "trap"); }

/* ---- lanes of a warp -------------------------------------------------------------------------------------------- */

namespace emulator {
inline void nothing(void **, uint32_t) {}

template <class T> struct Shuffle {
    T in, out;
    unsigned source;
};

/* A lane that is not in the group has nothing to give: poison. */
template <class T> void shuffle_all(void **data, uint32_t group)
{
    for (uint32_t left = group; left; left &= left - 1) {
        auto &s = *(Shuffle<T> *)data[__builtin_ctz(left)];
        if (group >> s.source & 1)
            s.out = ((Shuffle<T> *)data[s.source])->in;
        else
            memset(&s.out, POISON, sizeof s.out);
    }
}

template <class T> T shuffle(uint32_t mask, T v, unsigned source)
{
    Shuffle<T> s{v, v, source};
    meet(mask, shuffle_all<T>, &s);
    return s.out;
}

template <class T> struct Reduce {
    T in, out;
};

template <class T, class Op> void reduce_all(void **data, uint32_t group)
{
    T value = ((Reduce<T> *)data[__builtin_ctz(group)])->in;
    for (uint32_t left = group & (group - 1); left; left &= left - 1)
        value = Op()(value, ((Reduce<T> *)data[__builtin_ctz(left)])->in);
    for (uint32_t left = group; left; left &= left - 1)
        ((Reduce<T> *)data[__builtin_ctz(left)])->out = value;
}

template <class Op, class T> T reduce(uint32_t mask, T v)
{
    Reduce<T> r{v, v};
    meet(mask, reduce_all<T, Op>, &r);
    return r.out;
}

struct Max { template <class T> T operator()(T a, T b) { return a > b ? a : b; } };
struct Min { template <class T> T operator()(T a, T b) { return a < b ? a : b; } };
struct Add { template <class T> T operator()(T a, T b) { return a + b; } };
struct And { template <class T> T operator()(T a, T b) { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) { return a ^ b; } };

template <class T> void match_all(void **data, uint32_t group)
{
    for (uint32_t left = group; left; left &= left - 1) {
        auto &mine = *(std::pair<T, uint32_t> *)data[__builtin_ctz(left)];
        mine.second = 0;
        for (uint32_t others = group; others; others &= others - 1)
            if (((std::pair<T, uint32_t> *)data[__builtin_ctz(others)])->first == mine.first)
                mine.second |= 1u << __builtin_ctz(others);
    }
}
} // namespace emulator

inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::meet(mask, emulator::nothing, nullptr); }

template <class T> T __shfl_sync(unsigned mask, T v, int source, int width = 32)
{
    unsigned lane = emulator::self->lane, first = lane & ~(width - 1);
    return emulator::shuffle(mask, v, first + (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32)
{
    unsigned lane = emulator::self->lane, source = lane ^ lanes;
    return emulator::shuffle(mask, v, source / width > lane / width ? lane : source);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32)
{
    unsigned lane = emulator::self->lane;
    return emulator::shuffle(mask, v, lane % width + by < (unsigned)width ? lane + by : lane);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32)
{
    unsigned lane = emulator::self->lane;
    return emulator::shuffle(mask, v, lane % width >= by ? lane - by : lane);
}
inline unsigned __reduce_max_sync(unsigned m, unsigned v) { return emulator::reduce<emulator::Max>(m, v); }
inline int __reduce_max_sync(unsigned m, int v) { return emulator::reduce<emulator::Max>(m, v); }
inline unsigned __reduce_min_sync(unsigned m, unsigned v) { return emulator::reduce<emulator::Min>(m, v); }
inline int __reduce_min_sync(unsigned m, int v) { return emulator::reduce<emulator::Min>(m, v); }
inline unsigned __reduce_add_sync(unsigned m, unsigned v) { return emulator::reduce<emulator::Add>(m, v); }
inline int __reduce_add_sync(unsigned m, int v) { return emulator::reduce<emulator::Add>(m, v); }
inline unsigned __reduce_and_sync(unsigned m, unsigned v) { return emulator::reduce<emulator::And>(m, v); }
inline unsigned __reduce_or_sync(unsigned m, unsigned v) { return emulator::reduce<emulator::Or>(m, v); }
inline unsigned __reduce_xor_sync(unsigned m, unsigned v) { return emulator::reduce<emulator::Xor>(m, v); }
inline unsigned __ballot_sync(unsigned m, int p)
{
    return emulator::reduce<emulator::Or>(m, p ? 1u << emulator::self->lane : 0u);
}
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }
template <class T> unsigned __match_any_sync(unsigned m, T v)
{
    std::pair<T, uint32_t> mine{v, 0};
    emulator::meet(m, emulator::match_all<T>, &mine);
    return mine.second;
}

/* ---- the table of kernels --------------------------------------------------------------------------------------- */

namespace emulator {
template <auto F> struct Called;
template <class... P, void (*F)(P...)> struct Called<F> {
    static constexpr int n = sizeof...(P);
    static constexpr int sizes[n + 1] = {(int)sizeof(P)..., 0};

    template <size_t... I> static void call_with(void **arguments, std::index_sequence<I...>)
    {
        F(*(std::remove_reference_t<P> *)arguments[I]...);
    }
    static void call(void **arguments) { call_with(arguments, std::make_index_sequence<n>()); }
};
} // namespace emulator

#define EMULATOR_KERNEL(NAME, MAX_THREADS)                                                                             \
    {#NAME, emulator::Called<&NAME>::call, emulator::run, emulator::Called<&NAME>::n, MAX_THREADS,                     \
     emulator::Called<&NAME>::sizes},
