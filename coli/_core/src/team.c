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
    t->n_threads = t->n_active = n_threads;
    for (int i = 0; i < n_threads; i++)
        t->shares[i].rank = i;
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

/* A thread that keeps everyone waiting for longer than any item takes has lost its core to somebody else. */
#define LONG_WAIT_NS 400000
#define STRIKES 3              /* in one window, then it is parked */
#define WINDOW_NS 500000000
#define PARK_NS 1000000000     /* then it is tried again: that costs a few long waits, one in a hundred */

void coli_team_begin(coli_team *t)
{
    int64_t now = now_ns();
    int parked = 0, rank = 0, new_window = now - t->window_ns > WINDOW_NS;
    if (t->n_threads == 1)
        return;
    for (int i = 1; i < t->n_threads; i++)
        parked += t->shares[i].parked_until_ns > now;
    for (int i = 0; i < t->n_threads; i++) {
        coli_share *s = &t->shares[i];
        int strikes = atomic_load_explicit(&s->strikes, memory_order_relaxed);
        if (i > 0 && strikes >= STRIKES && s->parked_until_ns <= now && parked < t->n_threads / 2) {
            s->parked_until_ns = now + PARK_NS;
            t->parked_times++;
            parked++;
            strikes = 0;
            atomic_store_explicit(&s->strikes, 0, memory_order_relaxed);
        }
        if (new_window && strikes)
            atomic_store_explicit(&s->strikes, 0, memory_order_relaxed);
        s->rank = s->parked_until_ns > now ? -1 : rank++;
    }
    if (new_window)
        t->window_ns = now;
    t->n_active = rank;
}

/* Who has not come to the barrier of this epoch; strikes for them if the wait was long. One waiter reports. */
static void report_late(coli_team *t, int epoch, const int *late, int n_late)
{
    int seen = atomic_load_explicit(&t->reported, memory_order_relaxed);
    if (epoch + 1 - seen > 0 && /* not one that somebody has reported since */
        atomic_compare_exchange_strong_explicit(&t->reported, &seen, epoch + 1, memory_order_relaxed, memory_order_relaxed))
        for (int i = 0; i < n_late; i++)
            atomic_fetch_add_explicit(&t->shares[late[i]].strikes, 1, memory_order_relaxed);
}

static int find_late(coli_team *t, int epoch, int *late, int most)
{
    int n = 0;
    for (int i = 0; i < t->n_threads && n < most; i++)
        if (t->shares[i].rank >= 0 && atomic_load_explicit(&t->shares[i].at, memory_order_relaxed) != epoch + 1)
            late[n++] = i;
    return n;
}

void coli_barrier(coli_team *t, int tid, coli_hint *hint, void (*then)(void *), void *arg)
{
    int epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    atomic_store_explicit(&t->shares[tid].at, epoch + 1, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->n_active - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        if (then)
            then(arg);
        if (atomic_load_explicit(&t->sleepers, memory_order_relaxed))
            atomic_store_explicit(&t->released_ns, now_ns(), memory_order_relaxed);
        /* seq_cst with the sleeper's own pair: either he sees the new epoch or we see him asleep */
        atomic_store_explicit(&t->epoch, epoch + 1, memory_order_seq_cst);
        if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst))
            wake_all(&t->epoch);
        return;
    }
    int64_t began = 0;
    for (int spins = 0;; spins++) {
        if (atomic_load_explicit(&t->epoch, memory_order_acquire) != epoch)
            return;
        if (hint && hint->left > 0) {
            for (int s = 0; s < 4; s++) {
                __builtin_prefetch(hint->stream[s], 0, 2);
                __builtin_prefetch(hint->stream[s] + 64, 0, 2);
                hint->stream[s] += 128;
            }
            hint->left -= 128;
        } else
            PAUSE();
        if ((spins & 63) == 63) { /* the clock costs 20 ns: ask it now and then */
            int64_t now = now_ns();
            if (!began)
                began = now;
            else if (now - began > t->spin_ns)
                break;
            if (t->yields)
                sched_yield();
        }
    }
    int late[4], n_late = find_late(t, epoch, late, 4);
    atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(&t->epoch, memory_order_seq_cst) == epoch)
        sleep_on(&t->epoch, epoch);
    atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
    /* until the late one came, not until this waiter got its own core back */
    if (t->judges && atomic_load_explicit(&t->released_ns, memory_order_relaxed) - began > LONG_WAIT_NS)
        report_late(t, epoch, late, n_late);
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
