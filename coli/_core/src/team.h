/* A fixed team of threads inside one OpenMP region: its barrier, its way to share work, its pinning.
 *
 * libgomp owns the threads; what this adds is a barrier that spins for tens of microseconds and then
 * sleeps (a busy neighbour must not collapse the team), and shares that are walked in order by their
 * owner and, once he is done or held up, by whoever is free.
 */
#ifndef COLI_TEAM_H
#define COLI_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

#define COLI_MAX_THREADS 1024
#define COLI_LINE 128 /* two cache lines: the adjacent-line prefetcher pairs them */

typedef struct coli_share {
    _Alignas(COLI_LINE) _Atomic uint64_t claim; /* phase << 32 | next item of this thread's share */
    _Alignas(COLI_LINE) atomic_int strikes;                       /* long waits for this thread in the present window */
    atomic_uint came_late;                      /* the last barrier at which it found a sleeper, ... */
    _Atomic int64_t came_ns;                    /* ... and when; it was no page from disk that kept it */
    int64_t waits;                              /* how often it had waited for anything when it last looked */
    int rank;                                   /* among the active threads, or -1 while it is parked */
    int cpu;                                    /* where it is pinned, or -1 */
    int64_t thread;                             /* the system's number of it, where it is pinned */
    int64_t parked_until_ns;
} coli_share;

/* Cache lines that a thread will read next, fetched while it waits: four streams, `left` bytes of each. */
typedef struct coli_hint {
    const uint8_t *stream[4];
    int64_t left;
} coli_hint;

typedef struct coli_team {
    int n_threads;
    uint32_t phase; /* last phase number used on the shares */
    int n_active; /* threads that work in the present region; the others are parked */
    int spin_ns;  /* how long a waiter spins before it sleeps */
    int yields;   /* give the CPU away while spinning: workers that nobody pinned may share one */
    int judges;   /* strikes are given: items of this run are far shorter than a long wait */
    int64_t window_ns;    /* start of the window in which strikes count */
    _Atomic int64_t released_ns; /* when the last arrival opened a barrier at which somebody slept */
    int64_t parked_times; /* how often a thread was parked, for the stats */
    _Alignas(COLI_LINE) atomic_int arrived;
    _Alignas(COLI_LINE) atomic_uint epoch; /* futex word: counts barriers, and wraps around */
    atomic_int sleepers;
    atomic_uint reported; /* the last epoch for which somebody gave strikes */
    coli_share shares[COLI_MAX_THREADS];
} coli_team;

/* A team of n threads on the given CPUs (NULL: wherever the system puts them). NULL: out of memory. */
coli_team *coli_team_new(int n_threads);
void coli_team_free(coli_team *t);

/* How many threads a region really gets when it asks for `wanted` (limits, serial builds). */
int coli_team_size(int wanted);
/* Pin thread i of the region to cpus[i] (-1: leave it). Returns 0, or the errno of the first failure.
 * Binding holds for the life of the caller's OpenMP pool. */
int coli_team_pin(coli_team *t, const int *cpus);
/* Which CPU each thread of the region runs on, and how many CPUs its mask holds. */
void coli_team_map(coli_team *t, int *cpu, int *mask_size);
/* 1 when every thread rounds to nearest even and flushes nothing to zero. */
int coli_team_fp_ok(coli_team *t);
/* 1 when this build has OpenMP. */
int coli_has_openmp(void);

/* Called before a region: parks threads that the others had to wait for (their core is somebody else's at the
 * moment), takes back those that have sat out, and numbers the active ones. Who came late because it waited for a
 * page from disk has kept its core and is not parked. Thread 0 starts and ends every region, so it is never parked:
 * it changes cores with a pinned worker, who sits out on the core that was lost. A team of one has nobody who waits. */
void coli_team_begin(coli_team *t);

/* Wait for all active threads; the last one to arrive first runs then(arg), alone, if then is given.
 * hint (or NULL): what to fetch while waiting. */
void coli_barrier(coli_team *t, int tid, coli_hint *hint, void (*then)(void *), void *arg);

/* Next item in [0, count) of the victim's share in this phase, or -1 when it is used up.
 * A share needs no set-up: its counter belongs to a phase number that all threads count alike. */
static inline int coli_claim(coli_team *t, int victim, uint32_t phase, int count)
{
    _Atomic uint64_t *p = &t->shares[victim].claim;
    uint64_t old = atomic_load_explicit(p, memory_order_relaxed);
    for (;;) {
        /* A thread goes on to the next phase only when every share of this one is used up, so a share that
         * is already in a later phase has nothing left here; one in an earlier phase has not begun. */
        int32_t ahead = (int32_t)((uint32_t)(old >> 32) - phase);
        uint32_t next = ahead == 0 ? (uint32_t)old : 0;
        if (ahead > 0 || (int)next >= count)
            return -1;
        uint64_t want = (uint64_t)phase << 32 | (next + 1);
        if (atomic_compare_exchange_weak_explicit(p, &old, want, memory_order_relaxed, memory_order_relaxed))
            return (int)next;
    }
}

/* First item of thread v's share of n items. */
static inline int coli_share_begin(int n, int v, int n_threads) { return (int)((int64_t)n * v / n_threads); }

#endif
