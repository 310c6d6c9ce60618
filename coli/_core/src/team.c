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
#include <sys/resource.h>
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
    for (int i = 0; i < n_threads; i++) {
        t->shares[i].rank = i;
        t->shares[i].cpu = -1;
    }
    t->spin_ns = 50000;
    t->yields = 1;
    return t;
}

void coli_team_free(coli_team *t) { free(t); }

/* ---- barrier -------------------------------------------------------------------------------------- */

static void sleep_on(atomic_uint *word, unsigned value)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)value;
    (void)word;
    sched_yield();
#endif
}

static void wake_all(atomic_uint *word)
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
#ifndef LONG_WAIT_NS /* a test on a busy machine needs more of everything */
#define LONG_WAIT_NS 400000
#define WINDOW_NS 500000000
#endif
#define STRIKES 3              /* in one window, then it is parked */
#define PARK_NS 1000000000     /* then it is tried again: that costs a few long waits, one in a hundred */

static void park(coli_team *t, coli_share *s, int64_t now)
{
    s->parked_until_ns = now + PARK_NS;
    atomic_store_explicit(&s->strikes, 0, memory_order_relaxed);
    t->parked_times++;
}

/* Pin a thread (0: the calling one) to one CPU. Returns 0 or an errno. */
static int pin(int64_t thread, int cpu)
{
#if defined(__linux__)
    cpu_set_t *set = CPU_ALLOC(cpu + 1);
    size_t size = CPU_ALLOC_SIZE(cpu + 1);
    int error = 0;
    if (!set)
        return ENOMEM;
    CPU_ZERO_S(size, set);
    CPU_SET_S(cpu, size, set);
    if (sched_setaffinity((pid_t)thread, size, set))
        error = errno;
    CPU_FREE(set);
    return error;
#else
    (void)thread;
    (void)cpu;
    return ENOSYS;
#endif
}

/* Thread 0, which calls this, changes cores with the last worker that has kept its own. Returns it, or NULL. */
static coli_share *change_cores(coli_team *t, int64_t now)
{
    coli_share *zero = &t->shares[0];
    for (int i = t->n_threads - 1; i > 0; i--) {
        coli_share *s = &t->shares[i];
        if (zero->cpu < 0 || s->cpu < 0 || s->cpu == zero->cpu || s->parked_until_ns > now ||
            atomic_load_explicit(&s->strikes, memory_order_relaxed) >= STRIKES)
            continue;
        if (pin(0, s->cpu)) /* a mask or a cpuset has changed: stay */
            return NULL;
        int cpu = zero->cpu;
        zero->cpu = s->cpu;
        if (!pin(s->thread, cpu))
            s->cpu = cpu;
        return s;
    }
    return NULL;
}

void coli_team_begin(coli_team *t)
{
    if (t->n_threads == 1)
        return;
    int64_t now = now_ns();
    int parked = 0, rank = 0, most = t->n_threads / 2, new_window = now - t->window_ns > WINDOW_NS;
    for (int i = 1; i < t->n_threads; i++)
        parked += t->shares[i].parked_until_ns > now;
    for (int i = 0; i < t->n_threads; i++) {
        coli_share *s = &t->shares[i];
        int strikes = atomic_load_explicit(&s->strikes, memory_order_relaxed);
        if (strikes >= STRIKES && s->parked_until_ns <= now && parked < most) {
            coli_share *out = i ? s : change_cores(t, now);
            if (out) {
                park(t, out, now);
                parked++;
            }
            atomic_store_explicit(&s->strikes, 0, memory_order_relaxed);
        } else if (new_window && strikes)
            atomic_store_explicit(&s->strikes, 0, memory_order_relaxed);
    }
    for (int i = 0; i < t->n_threads; i++)
        t->shares[i].rank = t->shares[i].parked_until_ns > now ? -1 : rank++;
    if (new_window)
        t->window_ns = now;
    t->n_active = rank;
}

/* Whether the calling thread has waited for anything since it last asked. Between two barriers that is a page that has
 * to be read (whoever reads it: faults that find another's read under way are no major ones); a thread that lost its
 * core waits for nothing, the system takes the core away. */
static int has_waited(coli_share *s)
{
#if defined(__linux__)
    struct rusage used;
    if (getrusage(RUSAGE_THREAD, &used) == 0) {
        int more = used.ru_nvcsw != s->waits;
        s->waits = used.ru_nvcsw;
        return more;
    }
#endif
    (void)s;
    return 0;
}

/* Called by a thread that finds somebody asleep at a barrier: when it came, unless it was a page that kept it. */
static void note_late(coli_share *s, unsigned epoch)
{
    if (has_waited(s))
        return;
    atomic_store_explicit(&s->came_ns, now_ns(), memory_order_relaxed);
    atomic_store_explicit(&s->came_late, epoch + 1, memory_order_relaxed);
}

/* A strike for each thread that a waiter (since began) waited long for at the barrier of this epoch. One reports. */
static void report_late(coli_team *t, unsigned epoch, int64_t began)
{
    unsigned seen = atomic_load_explicit(&t->reported, memory_order_relaxed);
    if ((int)(epoch + 1 - seen) <= 0 || /* somebody has reported this one, or one since */
        !atomic_compare_exchange_strong_explicit(&t->reported, &seen, epoch + 1, memory_order_relaxed,
                                                 memory_order_relaxed))
        return;
    for (int i = 0; i < t->n_threads; i++) {
        coli_share *s = &t->shares[i];
        if (s->rank >= 0 && atomic_load_explicit(&s->came_late, memory_order_relaxed) == epoch + 1 &&
            atomic_load_explicit(&s->came_ns, memory_order_relaxed) - began > LONG_WAIT_NS)
            atomic_fetch_add_explicit(&s->strikes, 1, memory_order_relaxed);
    }
}

void coli_barrier(coli_team *t, int tid, coli_hint *hint, void (*then)(void *), void *arg)
{
    unsigned epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    if (t->judges && atomic_load_explicit(&t->sleepers, memory_order_relaxed))
        note_late(&t->shares[tid], epoch); /* before it has arrived: who reports it looks behind that */
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
    atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(&t->epoch, memory_order_seq_cst) == epoch)
        sleep_on(&t->epoch, epoch);
    atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
    has_waited(&t->shares[tid]); /* this sleep is no page */
    /* until the late one came, not until this waiter got its own core back */
    if (t->judges && atomic_load_explicit(&t->released_ns, memory_order_relaxed) - began > LONG_WAIT_NS)
        report_late(t, epoch, began);
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
        coli_share *s = &t->shares[omp_get_thread_num()];
        int cpu = cpus[omp_get_thread_num()], error = cpu < 0 ? 0 : pin(0, cpu);
        if (error)
            atomic_store(&failed, error);
        else
            s->cpu = cpu;
        s->thread = syscall(SYS_gettid);
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
