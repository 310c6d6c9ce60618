/* The kernel tables: one translation unit, each instruction set behind function attributes, so that one
 * binary runs everywhere and a table is chosen by what the CPU and the operating system offer. */
#include "dispatch.h"

#include "bench.h"
#include "int_scalar.h"
#include "selftest.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "gemm_amx.h"
#include "int_avx2.h"
#include "int_avx512vnni.h"
#include "int_avxvnni.h"
#elif defined(__aarch64__)
#include "int_neon.h"
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

/* ---- the float half, compiled once per vector width --------------------------------------------- */

#define ISA_NAME scalar
#define ISA_ATTR
#define ISA_LANES 4
#define ISA_HALF HALF_PORTABLE
#include "float_ops.inc"

#if defined(__x86_64__)
#define ISA_NAME avx2
#define ISA_ATTR AVX2
#define ISA_LANES 8
#define ISA_HALF HALF_F16C
#include "float_ops.inc"

#define ISA_NAME avx512vnni
#define ISA_ATTR AVX512
#define ISA_LANES 16
#define ISA_HALF HALF_AVX512
#include "float_ops.inc"
#elif defined(__aarch64__)
#define ISA_NAME neon
#define ISA_ATTR NEON
#define ISA_LANES 4
#define ISA_HALF HALF_NEON
#include "float_ops.inc"
#endif

/* ---- the tables ---------------------------------------------------------------------------------- */

static const coli_kernels table_scalar = {.name = "scalar", COLI_INT_ENTRIES(scalar), COLI_FLOAT_ENTRIES(scalar)};

#if defined(__x86_64__)
static const coli_kernels table_avx2 = {.name = "avx2", COLI_INT_ENTRIES(avx2), COLI_FLOAT_ENTRIES(avx2)};
static const coli_kernels table_avxvnni = {.name = "avxvnni", COLI_INT_ENTRIES(avxvnni), COLI_FLOAT_ENTRIES(avx2)};
static const coli_kernels table_avx512vnni = {
    .name = "avx512vnni", COLI_INT_ENTRIES(avx512vnni), COLI_FLOAT_ENTRIES(avx512vnni)};
/* AMX is for many tokens at once: the same table with another gemm (the later initialiser counts). */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverride-init"
static const coli_kernels table_amx = {
    .name = "amx", COLI_INT_ENTRIES(avx512vnni), COLI_FLOAT_ENTRIES(avx512vnni),
    .gemm = {gemm_i8_row_amx, gemm_i8_group_amx, gemm_i4_row_amx, gemm_i4_group_amx}};
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
static const coli_kernels table_neon = {.name = "neon", COLI_INT_ENTRIES(neon), COLI_FLOAT_ENTRIES(neon)};
#endif

/* ---- what this CPU runs --------------------------------------------------------------------------- */

enum { ALWAYS, HAS_AVX2, HAS_AVXVNNI, HAS_AVX512VNNI, HAS_AMX, HAS_DOTPROD };

#if defined(__x86_64__)
/* Registers that the operating system saves at a context switch; without its bit a set cannot be used. */
#define XCR0_AVX 0x6u
#define XCR0_AVX512 0xE6u
#define XCR0_AMX 0x60000u

/* Linux hands the tile registers out on request, once a process (linux/Documentation/arch/x86/xstate.rst). */
static int tiles_granted(void)
{
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int granted = -1;
    if (granted < 0)
        granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
#else
    return 0;
#endif
}

static uint32_t saved_registers(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return lo;
}

static int cpu_has(int feature)
{
    uint32_t a, b, c, d, b7 = 0, c7 = 0, d7 = 0, a71 = 0, leaves, xcr0;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    const uint32_t base = bit_OSXSAVE | bit_AVX | bit_F16C;
    if ((c & base) != base)
        return 0;
    xcr0 = saved_registers();
    if (__get_cpuid_count(7, 0, &leaves, &b7, &c7, &d7) && leaves >= 1)
        __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    const int avx2 = (xcr0 & XCR0_AVX) == XCR0_AVX && (b7 & bit_AVX2);
    const uint32_t wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    const int avx512 = avx2 && (xcr0 & XCR0_AVX512) == XCR0_AVX512 && (b7 & wide) == wide && (c7 & bit_AVX512VNNI);
    switch (feature) {
    case HAS_AVX2:
        return avx2;
    case HAS_AVXVNNI:
        return avx2 && (a71 & bit_AVXVNNI);
    case HAS_AVX512VNNI:
        return avx512;
    case HAS_AMX:
        return avx512 && (d7 & 1u << 24) && (d7 & 1u << 25) && (xcr0 & XCR0_AMX) == XCR0_AMX && tiles_granted();
    default:
        return 0;
    }
}
#elif defined(__aarch64__)
static int cpu_has(int feature)
{
    if (feature != HAS_DOTPROD)
        return 0;
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & 1ul << 20) != 0; /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has;
#else
    return 0;
#endif
}
#else
static int cpu_has(int feature)
{
    (void)feature;
    return 0;
}
#endif

/* In order of preference. */
static const struct {
    const coli_kernels *table;
    int needs;
    coli_read_xor_fn read_xor;
} sets[] = {
#if defined(__x86_64__)
    {&table_amx, HAS_AMX, read_xor_avx512vnni},
    {&table_avx512vnni, HAS_AVX512VNNI, read_xor_avx512vnni},
    {&table_avxvnni, HAS_AVXVNNI, read_xor_avx2},
    {&table_avx2, HAS_AVX2, read_xor_avx2},
#elif defined(__aarch64__)
    {&table_neon, HAS_DOTPROD, read_xor_neon},
#endif
    {&table_scalar, ALWAYS, read_xor_scalar},
};
#define N_SETS ((int)(sizeof sets / sizeof *sets))

const coli_kernels *coli_kernels_for(const char *name)
{
    for (int i = 0; i < N_SETS; i++)
        if (strcmp(sets[i].table->name, name) == 0)
            return sets[i].needs == ALWAYS || cpu_has(sets[i].needs) ? sets[i].table : NULL;
    return NULL;
}

const coli_kernels *coli_kernels_best(void)
{
    for (int i = 0; i < N_SETS - 1; i++)
        if (cpu_has(sets[i].needs))
            return sets[i].table;
    return &table_scalar;
}

const char *const *coli_kernels_compiled(void)
{
    static const char *names[N_SETS + 1];
    for (int i = 0; i < N_SETS; i++)
        names[i] = sets[i].table->name;
    return names;
}

coli_read_xor_fn coli_read_xor_for(const char *name)
{
    for (int i = 0; i < N_SETS; i++)
        if (strcmp(sets[i].table->name, name) == 0)
            return sets[i].read_xor;
    return NULL;
}

/* ---- rounding mode -------------------------------------------------------------------------------- */

int coli_fp_mode_ok(void)
{
#if defined(__x86_64__)
    const uint32_t rounding_ftz_daz = 0x6000 | 0x8000 | 0x0040;
    return (__builtin_ia32_stmxcsr() & rounding_ftz_daz) == 0;
#elif defined(__aarch64__)
    const uint64_t rounding_fz_fz16 = 3u << 22 | 1u << 24 | 1u << 19;
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return (fpcr & rounding_fz_fz16) == 0;
#else
    return 1;
#endif
}
