/* PTX instructions for the emulator.  ptx.py makes of every `asm` a call of the function that is named after its
 * instruction, dots and colons as underscores; of loads, stores and atomics what concerns caches, scopes and order is
 * left out of the name, since here all of them are ordered.  Operands come in the instruction's order, vectors one by
 * one, and [a+b] as one address.  To teach the emulator an instruction, add its function; each starts a line with PTX.
 */
#pragma once

#include "cuda.h"

#define PTX inline void

namespace emulator {
namespace ptx {

struct Address { /* as an operand: of global or generic memory, or of shared memory's own space */
    unsigned long long value;
    template <class T> Address(T *p, long long offset = 0) : value((unsigned long long)p + offset) {}
    template <class T, class = std::enable_if_t<std::is_integral_v<T>>> Address(T p, long long offset = 0)
        : value((unsigned long long)p + offset)
    {
    }
    char *global() const { return (char *)value; }
    char *shared() const { return shared_pointer((unsigned)value); }
};

/* ---- grids, barriers, time -------------------------------------------------------------------------------------- */

PTX griddepcontrol_wait() { wait_for_previous_grid(); }
PTX griddepcontrol_launch_dependents() { let_next_grid_start(); }
PTX bar_sync(unsigned which, unsigned n = 0) { barrier(which, n, true, 0, "barrier", which); }
PTX barrier_sync(unsigned which, unsigned n = 0) { bar_sync(which, n); }
PTX bar_arrive(unsigned which, unsigned n) { barrier(which, n, false, 0, "barrier", which); }
PTX bar_warp_sync(unsigned mask) { __syncwarp(mask); }
PTX nanosleep_u32(unsigned ns) { __nanosleep(ns); }
PTX trap() { __trap(); }
PTX fence() { __threadfence_system(); }
PTX membar() { __threadfence_system(); }

template <class T, class V> PTX mov(T &d, V v) { d = (T)v; }
inline unsigned long long special_globaltimer() { return nanoseconds(); }
inline unsigned special_globaltimer_lo() { return (unsigned)nanoseconds(); }
inline unsigned long long special_clock64() { return nanoseconds(); }
inline unsigned special_clock() { return (unsigned)nanoseconds(); }
inline unsigned special_laneid() { return self->lane; }
inline unsigned special_smid() { return 0; }
inline unsigned special_lanemask_lt() { return (1u << self->lane) - 1; }

/* ---- conversions and bits --------------------------------------------------------------------------------------- */

inline float half_to_float_(unsigned short h)
{
    unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent)
        return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float v = (float)fraction * 0x1p-24f; /* exact */
    return __uint_as_float(sign | __float_as_uint(v));
}

inline unsigned short float_to_half_(float f)
{
    unsigned bits = __float_as_uint(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return 0x7fff;
    if (magnitude >= 0x477ff000u) /* 65520 rounds to infinity */
        return sign | 0x7c00u;
    if (magnitude < 0x38800000u) { /* a subnormal or zero: the sum's last bit is worth 2^-24, and it rounds */
        float aligned = __uint_as_float(magnitude) + 0.5f;
        return sign | (__float_as_uint(aligned) - 0x3f000000u);
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1);
    return sign | (magnitude - 0x38000000u) >> 13;
}

PTX cvt_f32_f16(float &d, unsigned short h) { d = half_to_float_(h); }
PTX cvt_rn_f16_f32(unsigned short &d, float f) { d = float_to_half_(f); }
PTX prmt_b32(unsigned &d, unsigned a, unsigned b, unsigned s) { d = __byte_perm(a, b, s); }
PTX lop3_b32(unsigned &d, unsigned a, unsigned b, unsigned c, unsigned table)
{
    d = 0;
    for (int i = 0; i < 32; i++)
        d |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
}
PTX dp4a_s32_s32(int &d, int a, int b, int c) { d = __dp4a(a, b, c); }

/* ---- loads, stores, atomics ------------------------------------------------------------------------------------- */

#define EMULATOR_WORDS(SPACE, SUFFIX, T)                                                                               \
    template <class D> PTX ld##SUFFIX(D &d, Address p)                                                                 \
    {                                                                                                                  \
        d = (D)__atomic_load_n((T *)p.SPACE(), __ATOMIC_ACQUIRE);                                                      \
    }                                                                                                                  \
    template <class V> PTX st##SUFFIX(Address p, V v)                                                                  \
    {                                                                                                                  \
        __atomic_store_n((T *)p.SPACE(), (T)v, __ATOMIC_RELEASE);                                                      \
    }
EMULATOR_WORDS(global, _u8, unsigned char)
EMULATOR_WORDS(global, _u16, unsigned short)
EMULATOR_WORDS(global, _u32, unsigned)
EMULATOR_WORDS(global, _s32, int)
EMULATOR_WORDS(global, _b32, unsigned)
EMULATOR_WORDS(global, _u64, unsigned long long)
EMULATOR_WORDS(global, _b64, unsigned long long)
EMULATOR_WORDS(shared, _shared_u32, unsigned)
EMULATOR_WORDS(shared, _shared_b32, unsigned)
#undef EMULATOR_WORDS
PTX ld_f32(float &d, Address p) { d = *(const float *)p.global(); }
PTX st_f32(Address p, float v) { *(float *)p.global() = v; }

#define EMULATOR_VECTORS(SPACE, SUFFIX, T, V4)                                                                         \
    template <class D> PTX ld##SUFFIX(D &x, D &y, D &z, D &w, Address p, unsigned long long = 0)                       \
    {                                                                                                                  \
        V4 v = *(const V4 *)p.SPACE();                                                                                 \
        x = v.x, y = v.y, z = v.z, w = v.w;                                                                            \
    }                                                                                                                  \
    template <class D> PTX st##SUFFIX(Address p, D x, D y, D z, D w) { *(V4 *)p.SPACE() = {x, y, z, w}; }
EMULATOR_VECTORS(global, _v4_u32, unsigned, uint4)
EMULATOR_VECTORS(global, _v4_b32, unsigned, uint4)
EMULATOR_VECTORS(global, _v4_s32, int, int4)
EMULATOR_VECTORS(global, _v4_f32, float, float4)
EMULATOR_VECTORS(shared, _shared_v4_u32, unsigned, uint4)
EMULATOR_VECTORS(shared, _shared_v4_b32, unsigned, uint4)
#undef EMULATOR_VECTORS
template <class D> PTX ld_v2_u32(D &x, D &y, Address p)
{
    uint2 v = *(const uint2 *)p.global();
    x = v.x, y = v.y;
}
PTX prefetch(Address) {}

template <class T> PTX atom_add_u32(T &d, Address p, unsigned v) { d = atomicAdd((unsigned *)p.global(), v); }
PTX red_add_u32(Address p, unsigned v) { atomicAdd((unsigned *)p.global(), v); }
PTX red_max_u32(Address p, unsigned v) { atomicMax((unsigned *)p.global(), v); }
PTX redux_sync_max_u32(unsigned &d, unsigned v, unsigned mask) { d = __reduce_max_sync(mask, v); }
PTX redux_sync_add_s32(int &d, int v, unsigned mask) { d = __reduce_add_sync(mask, v); }

/* ---- asynchronous copies into shared memory --------------------------------------------------------------------- */

PTX cp_async(Address to, Address from, unsigned n, unsigned n_read)
{
    if (to.value % n || from.value % n)
        fail(CODE_MISALIGNED, "an asynchronous copy of %u bytes to %#llx from %#llx", n, to.value, from.value);
    self->copies.push_back({to.shared(), from.global(), n, n_read, self->groups});
}
PTX cp_async(Address to, Address from, unsigned n) { cp_async(to, from, n, n); }
PTX cp_async_commit_group() { self->groups++; }
PTX cp_async_wait_group(int pending) { finish_copies(pending); }
PTX cp_async_wait_all() { finish_copies(-1); }

/* ---- tensor cores ----------------------------------------------------------------------------------------------- */

struct Tile { /* what a lane brings to D = A B + C of 8-bit integers */
    const unsigned *a, *b;
    const int *c;
    int *d;
};

/* PTX ISA, "Matrix Fragments for mma.m16n8k32", also with 8 rows and with 16 columns: lane l has rows l/4 and l/4 + 8
 * of A, column l/4 of B, and of C and D rows l/4 (registers 0, 1) and l/4 + 8 (2, 3), columns 2 (l % 4) and the next.
 * A register holds four columns of A or rows of B, 4 (l % 4) .. + 3; behind the rows of A, and behind register 0 of B,
 * come the same of 16 columns further on. */
template <int M, int K, class A, class B> void multiply_tile(void **data, uint32_t group)
{
    if (group != 0xffffffffu)
        fail(CODE_LAUNCH_FAILED, "an mma without all lanes of its warp");
    A a[M][K];
    B b[8][K];
    auto lane = [&](int l) -> const Tile & { return *(const Tile *)data[l]; };
    for (int l = 0; l < 32; l++)
        for (int k = 0; k < K / 16; k++)
            for (int i = 0; i < 4; i++) {
                int column = 16 * k + l % 4 * 4 + i;
                for (int m = 0; m < M / 8; m++)
                    a[8 * m + l / 4][column] = (A)(lane(l).a[M / 8 * k + m] >> 8 * i);
                b[l / 4][column] = (B)(lane(l).b[k] >> 8 * i);
            }
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < M / 4; i++) {
            int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2, sum = lane(l).c[i];
            for (int k = 0; k < K; k++)
                sum += a[row][k] * b[column][k];
            lane(l).d[i] = sum;
        }
}

template <class A, class B>
void mma_k32(int &d0, int &d1, int &d2, int &d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
             unsigned b1, int c0, int c1, int c2, int c3)
{
    unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    int c[4] = {c0, c1, c2, c3}, d[4];
    Tile tile{a, b, c, d};
    meet(0xffffffffu, multiply_tile<16, 32, A, B>, &tile);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

#define EMULATOR_MMA_K32(A, TYPE_A, B, TYPE_B)                                                                         \
    template <class... T> PTX mma_sync_aligned_m16n8k32_row_col_s32_##A##_##B##_s32(T &&...operands)                   \
    {                                                                                                                  \
        mma_k32<TYPE_A, TYPE_B>(operands...);                                                                          \
    }
EMULATOR_MMA_K32(s8, signed char, s8, signed char)
EMULATOR_MMA_K32(u8, unsigned char, s8, signed char)
EMULATOR_MMA_K32(s8, signed char, u8, unsigned char)
EMULATOR_MMA_K32(u8, unsigned char, u8, unsigned char)
#undef EMULATOR_MMA_K32

PTX mma_sync_aligned_m16n8k16_row_col_s32_s8_s8_s32(int &d0, int &d1, int &d2, int &d3, unsigned a0, unsigned a1,
                                                    unsigned b0, int c0, int c1, int c2, int c3)
{
    unsigned a[2] = {a0, a1}, b[1] = {b0};
    int c[4] = {c0, c1, c2, c3}, d[4];
    Tile tile{a, b, c, d};
    meet(0xffffffffu, multiply_tile<16, 16, signed char, signed char>, &tile);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

PTX mma_sync_aligned_m8n8k16_row_col_s32_s8_s8_s32(int &d0, int &d1, unsigned a, unsigned b, int c0, int c1)
{
    int c[2] = {c0, c1}, d[2];
    Tile tile{&a, &b, c, d};
    meet(0xffffffffu, multiply_tile<8, 16, signed char, signed char>, &tile);
    d0 = d[0], d1 = d[1];
}

struct Rows { /* what a lane brings to ldmatrix, and gets */
    const char *row;
    unsigned *words;
    int n;
    bool transposes;
};

/* Matrix i of 8 rows of 16 bytes: lane 8 i + r says where row r lies; lane l gets 32-bit word l % 4 of row l / 4. */
inline void load_matrices(void **data, uint32_t)
{
    for (int l = 0; l < 32; l++) {
        Rows &mine = *(Rows *)data[l];
        for (int i = 0; i < mine.n; i++) {
            auto row = [&](int r) { return ((Rows *)data[8 * i + r])->row; };
            unsigned short half[2];
            for (int j = 0; j < 2; j++)
                memcpy(&half[j], mine.transposes ? row(l % 4 * 2 + j) + l / 4 * 2 : row(l / 4) + l % 4 * 4 + 2 * j, 2);
            mine.words[i] = half[0] | (unsigned)half[1] << 16;
        }
    }
}

inline void ldmatrix(unsigned *words, int n, Address p, bool transposes)
{
    if (p.value % 16)
        fail(CODE_MISALIGNED, "ldmatrix of %#llx", p.value);
    Rows rows{p.shared(), words, n, transposes};
    meet(0xffffffffu, load_matrices, &rows);
}

#define EMULATOR_LDMATRIX(SUFFIX, TRANSPOSES)                                                                          \
    PTX ldmatrix_sync_aligned_m8n8_x1##SUFFIX(unsigned &a, Address p) { ldmatrix(&a, 1, p, TRANSPOSES); }              \
    PTX ldmatrix_sync_aligned_m8n8_x2##SUFFIX(unsigned &a, unsigned &b, Address p)                                     \
    {                                                                                                                  \
        unsigned w[2];                                                                                                 \
        ldmatrix(w, 2, p, TRANSPOSES);                                                                                 \
        a = w[0], b = w[1];                                                                                            \
    }                                                                                                                  \
    PTX ldmatrix_sync_aligned_m8n8_x4##SUFFIX(unsigned &a, unsigned &b, unsigned &c, unsigned &d, Address p)           \
    {                                                                                                                  \
        unsigned w[4];                                                                                                 \
        ldmatrix(w, 4, p, TRANSPOSES);                                                                                 \
        a = w[0], b = w[1], c = w[2], d = w[3];                                                                        \
    }
EMULATOR_LDMATRIX(_b16, false)
EMULATOR_LDMATRIX(_trans_b16, true)
#undef EMULATOR_LDMATRIX

} // namespace ptx
} // namespace emulator
