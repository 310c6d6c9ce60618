#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

int coli_has_openmp(void)
{
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

int coli_team_size(int wanted)
{
    int got = 1;
#ifdef _OPENMP
    omp_set_dynamic(0); /* a barrier counts on every thread it was promised */
#pragma omp parallel num_threads(wanted)
    {
#pragma omp single
        got = omp_get_num_threads();
    }
#else
    (void)wanted;
#endif
    return got;
}

coli_team *coli_team_new(int n_threads)
{
    void *memory = NULL;
    if (posix_memalign(&memory, COLI_LINE, sizeof(coli_team)))
        return NULL;
    memset(memory, 0, sizeof(coli_team));
    coli_team *t = memory;
    t->n_threads = n_threads;
    t->spin_ns = 50000;
    t->yields = 1;
    return t;
}

void coli_team_free(coli_team *t) { free(t); }

/* ---- barrier -------------------------------------------------------------------------------------- */

static void sleep_on(atomic_int *word, int value)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)value;
    (void)word;
    sched_yield();
#endif
}

static void wake_all(atomic_int *word)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static int64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

void coli_barrier(coli_team *t, void (*then)(void *), void *arg)
{
    int epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->n_threads - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        if (then)
            then(arg);
        /* seq_cst with the sleeper's own pair: either he sees the new epoch or we see him asleep */
        atomic_store_explicit(&t->epoch, epoch + 1, memory_order_seq_cst);
        if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst))
            wake_all(&t->epoch);
        return;
    }
    int64_t until = 0;
    for (int spins = 0;; spins++) {
        if (atomic_load_explicit(&t->epoch, memory_order_acquire) != epoch)
            return;
        PAUSE();
        if ((spins & 63) == 63) { /* the clock costs 20 ns: ask it now and then */
            int64_t now = now_ns();
            if (!until)
                until = now + t->spin_ns;
            else if (now > until)
                break;
            if (t->yields)
                sched_yield();
        }
    }
    atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(&t->epoch, memory_order_seq_cst) == epoch)
        sleep_on(&t->epoch, epoch);
    atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
}

/* ---- binding --------------------------------------------------------------------------------------- */

int coli_team_pin(coli_team *t, const int *cpus)
{
    atomic_int failed = 0;
#if defined(__linux__)
    t->yields = 0;
    for (int i = 0; i < t->n_threads; i++)
        t->yields |= cpus[i] < 0;
#ifdef _OPENMP
#pragma omp parallel num_threads(t->n_threads)
#endif
    {
        int cpu = cpus[omp_get_thread_num()];
        if (cpu >= 0) {
            cpu_set_t *set = CPU_ALLOC(cpu + 1);
            size_t size = CPU_ALLOC_SIZE(cpu + 1);
            if (set) {
                CPU_ZERO_S(size, set);
                CPU_SET_S(cpu, size, set);
                if (sched_setaffinity(0, size, set))
                    atomic_store(&failed, errno);
                CPU_FREE(set);
            } else
                atomic_store(&failed, ENOMEM);
        }
    }
#else
    (void)t;
    (void)cpus;
#endif
    return atomic_load(&failed);
}

void coli_team_map(coli_team *t, int *cpu, int *mask_size)
{
#ifdef _OPENMP
#pragma omp parallel num_threads(t->n_threads)
#endif
    {
        int i = omp_get_thread_num();
        cpu[i] = -1;
        mask_size[i] = 0;
#if defined(__linux__)
        cpu_set_t set[16]; /* 16,384 CPUs */
        cpu[i] = sched_getcpu();
        if (sched_getaffinity(0, sizeof set, set) == 0)
            mask_size[i] = CPU_COUNT_S(sizeof set, set);
#endif
    }
}

int coli_team_fp_ok(coli_team *t)
{
    atomic_int bad = 0;
#ifdef _OPENMP
#pragma omp parallel num_threads(t->n_threads)
#endif
    {
#if defined(__x86_64__)
        if (_mm_getcsr() & 0xe040) /* rounding mode, flush to zero, denormals are zero */
            atomic_store(&bad, 1);
#elif defined(__aarch64__)
        uint64_t fpcr;
        __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
        if (fpcr & (7ull << 22))
            atomic_store(&bad, 1);
#endif
    }
    return !atomic_load(&bad);
}
