/* A team that meets at barriers, one of whose threads comes late: who is parked, and where everybody is afterwards.
 * The system's answers are scripted: getrusage says that the late thread has waited for pages, or not, and
 * sched_setaffinity notes what it is asked for. Arguments: threads, late thread, 1 if for a page, 1 if pinned.
 * Prints "parked: ...", then "cpus: ..." by thread. */
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "team.h"

enum { MOST = 64 };
static int for_a_page, thread_of[MOST], cpu_of[MOST];
static _Thread_local int is_late;
static _Thread_local long waits;

int getrusage(__rusage_who_t who, struct rusage *used)
{
    (void)who;
    used->ru_nvcsw = is_late && for_a_page ? ++waits : 0;
    return 0;
}

int sched_setaffinity(pid_t thread, size_t size, const cpu_set_t *set)
{
    pid_t wanted = thread ? thread : (pid_t)syscall(SYS_gettid);
    for (int i = 0; i < MOST; i++)
        if (thread_of[i] == wanted)
            for (int cpu = 0; cpu < (int)(8 * size); cpu++)
                if (CPU_ISSET_S(cpu, size, set))
                    cpu_of[i] = cpu;
    return 0;
}

int main(int argc, char **argv)
{
    int n = atoi(argv[1]), late = atoi(argv[2]), pinned = atoi(argv[4]), cpus[MOST];
    (void)argc;
    for_a_page = atoi(argv[3]);
    coli_team *t = coli_team_new(coli_team_size(n));
    if (!t || t->n_threads != n)
        return 2;
#pragma omp parallel num_threads(n)
    {
        thread_of[omp_get_thread_num()] = (int)syscall(SYS_gettid);
        is_late = omp_get_thread_num() == late;
    }
    for (int i = 0; i < n; i++)
        cpus[i] = cpu_of[i] = pinned ? 100 + i : -1;
    if (pinned && coli_team_pin(t, cpus))
        return 3;
    int64_t parked[MOST] = {0};
    for (int region = 0; region < 8; region++) {
        coli_team_begin(t);
        for (int i = 0; i < n; i++)
            parked[i] |= t->shares[i].rank < 0;
        t->judges = 1;
#pragma omp parallel num_threads(n)
        {
            int tid = omp_get_thread_num();
            if (t->shares[tid].rank >= 0) {
                if (tid == late)
                    nanosleep(&(struct timespec){0, 2 * LONG_WAIT_NS}, NULL);
                coli_barrier(t, tid, NULL, NULL, NULL);
            }
        }
    }
    printf("parked:");
    for (int i = 0; i < n; i++)
        if (parked[i])
            printf(" %d", i);
    printf("\ncpus:");
    for (int i = 0; i < n; i++)
        printf(" %d", cpu_of[i]);
    printf("\n");
    coli_team_free(t);
    return 0;
}
