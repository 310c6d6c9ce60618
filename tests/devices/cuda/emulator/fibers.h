/* Grids on a CPU: blocks run one after another, and the threads of a block are fibers of one host thread.
 *
 * A fiber runs until it has to wait: at a barrier, or where lanes of its warp meet.  Then the next one that can go on
 * does; where none can, that is a deadlock, and said so.  Even blocks take their threads upwards, odd ones downwards,
 * so that a missing barrier shows up as wrong bits.  Shared memory is poisoned for every block, and behind it lies a
 * page that nobody may touch.  Whatever goes wrong ends the grid with a code of the driver and a message; the host
 * goes on.
 *
 * Knows no CUDA word: cuda.h puts them on top.
 */
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "abi.h"

namespace emulator {

constexpr unsigned LANES = 32;
constexpr size_t STACK_BYTES = 128 << 10, PAGE_BYTES = 4096;
constexpr size_t STATIC_SHARED_BYTES = 48 << 10, SHARED_BYTES = 227 << 10; /* of a block: without asking, and at most */
constexpr size_t GAP_BYTES = 64, MOST_SITES = 64; /* poison behind a static variable, and how many a block has */
constexpr size_t ROOM_BYTES = (SHARED_BYTES + 2 * GAP_BYTES * MOST_SITES + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
constexpr int POISON = 0xff; /* a NaN, and an index far outside */

struct Dim {
    unsigned x, y, z;
};

struct Copy { /* one cp.async */
    void *to;
    const void *from;
    unsigned n_bytes, n_read;
    int group;
};

struct Warp;
struct Block;

struct Fiber {
    void *stack_pointer;
    Dim thread;
    unsigned lane;
    Warp *warp;
    Block *block;
    int barrier; /* at which it waits; -1: none */
    bool let_next;
    int groups; /* of asynchronous copies, closed so far */
    std::vector<Copy> copies;
};

using Complete = void (*)(void **data, uint32_t group);

struct Warp {
    Fiber *fibers; /* lane 0 */
    uint32_t alive, ready, meeting, parked;
    uint32_t mask[LANES]; /* of each meeting lane: who else, what for, and its data */
    Complete complete[LANES];
    void *data[LANES];
};

struct Barrier {
    unsigned arrived, expected; /* expected: 0 for every thread that is left */
    const char *file;
    int line;
    int count, all, any, voted[3]; /* of the predicates that threads bring; voted: of the round that ended */
};

/* What the threads of one block run on; kept for the next block. */
struct Room {
    unsigned capacity;
    char *stacks, *shared; /* shared: `SHARED_BYTES`, then a page without access */
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
};

struct Site { /* a static __shared__ variable of this block */
    const void *key;
    char *at;
    size_t n_bytes;
};

struct Grid {
    const Kernel *kernel;
    Dim size, threads;
    unsigned shared_bytes;
    void **arguments;
    Grid *next;       /* the one that may start early while this one runs */
    Block *early;     /* a block that has started before the grid before this one had ended */
};

struct Block {
    Grid *grid;
    Room *room;
    Fiber *outer; /* who goes on when no thread of the block can */
    Dim index;
    unsigned n_threads, n_warps, alive, let_next;
    bool downwards, waits; /* waits: the grid before this one has not ended */
    char *dynamic;
    size_t used; /* bytes of static shared memory */
    std::vector<Site> sites;
    Barrier barriers[16];
};

/* The fiber that runs on this host thread.  Initial-exec: one load, and a few bytes of a thread's static room. */
inline thread_local Fiber *self __attribute__((tls_model("initial-exec"))) = nullptr;

struct Host { /* one host thread that runs grids */
    Fiber base{};
    sigjmp_buf escape;
    unsigned n_grids = 0;
    int code = 0;
    char message[MESSAGE_BYTES];
    std::vector<Room *> rooms, taken;
    char signal_stack[64 << 10];

    ~Host()
    {
        stack_t none{};
        none.ss_flags = SS_DISABLE;
        sigaltstack(&none, nullptr);
        for (Room *room : rooms) {
            munmap(room->stacks, room->capacity * STACK_BYTES);
            munmap(room->shared, ROOM_BYTES + PAGE_BYTES);
            delete room;
        }
    }
};

inline thread_local Host *host __attribute__((tls_model("initial-exec"))) = nullptr;

/* ---- going from fiber to fiber ---------------------------------------------------------------------------------- */

extern "C" void emulator_switch(void **from, void *to);
#ifdef __x86_64__
asm(".text\n.hidden emulator_switch\n.globl emulator_switch\n.type emulator_switch, @function\n"
    "emulator_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size emulator_switch, .-emulator_switch\n");

inline void *prepare_stack(char *top, void (*entry)())
{
    void **sp = (void **)top;
    *--sp = nullptr; /* a return address, so that the entry finds its stack aligned as after a call */
    *--sp = (void *)entry;
    for (int i = 0; i < 6; i++)
        *--sp = nullptr;
    return sp;
}
#else
#error "the emulator switches fibers on x86-64 only"
#endif

inline void switch_to(Fiber *to)
{
    Fiber *from = self;
    self = to;
    emulator_switch(&from->stack_pointer, to->stack_pointer);
}

/* ---- failing ---------------------------------------------------------------------------------------------------- */

[[noreturn]] inline void fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* End the grid: what its threads held is left behind. */
[[noreturn]] inline void fail(int code, const char *format, ...)
{
    char what[MESSAGE_BYTES / 2];
    va_list list;
    va_start(list, format);
    vsnprintf(what, sizeof what, format, list);
    va_end(list);
    host->code = code;
    const Fiber &f = *self;
    const Dim none{}, &block = f.block ? f.block->index : none;
    snprintf(host->message, sizeof host->message, "%s, block (%u, %u, %u), thread (%u, %u, %u): %s",
             f.block ? f.block->grid->kernel->name : "?", block.x, block.y, block.z, f.thread.x, f.thread.y, f.thread.z,
             what);
    siglongjmp(host->escape, 1);
}

[[noreturn]] inline void deadlock(Block &b)
{
    char text[512];
    unsigned at = 0, meeting = 0;
    for (unsigned w = 0; w < b.n_warps; w++)
        meeting += __builtin_popcount(b.room->warps[w].meeting);
    for (const Barrier &barrier : b.barriers)
        if (barrier.arrived && at < sizeof text)
            at += snprintf(text + at, sizeof text - at, ", %u at the barrier of %s:%d", barrier.arrived, barrier.file,
                           barrier.line);
    if (meeting && at < sizeof text)
        snprintf(text + at, sizeof text - at, ", %u for other lanes of their warp", meeting);
    fail(CODE_LAUNCH_FAILED, "deadlock: of %u threads %u have ended%s", b.n_threads, b.n_threads - b.alive, text);
}

/* ---- who runs next ---------------------------------------------------------------------------------------------- */

inline Fiber *take_ready(Warp &w, bool downwards)
{
    unsigned lane = downwards ? 31 - __builtin_clz(w.ready) : __builtin_ctz(w.ready);
    w.ready &= ~(1u << lane);
    return w.fibers + lane;
}

/* A fiber that can go on, of this warp first; null where none can. */
inline Fiber *next_ready(Block &b, Warp *from)
{
    if (from->ready)
        return take_ready(*from, b.downwards);
    Warp *warps = b.room->warps.data();
    int n = b.n_warps, at = from - warps, step = b.downwards ? n - 1 : 1;
    for (int i = 1; i < n; i++) {
        at = (at + step) % n;
        if (warps[at].ready)
            return take_ready(warps[at], b.downwards);
    }
    return nullptr;
}

/* Let others run until somebody has made this fiber ready and its turn comes. */
inline void pause()
{
    Block &b = *self->block;
    Fiber *to = next_ready(b, self->warp);
    if (!to && b.waits)
        to = b.outer;
    if (!to)
        deadlock(b);
    switch_to(to);
}

/* The others of the block first, then the host for a moment: the loop of a kernel that waits for the host. */
inline void nap(unsigned microseconds)
{
    Fiber &me = *self;
    if (Fiber *to = next_ready(*me.block, me.warp)) {
        me.warp->ready |= 1u << me.lane;
        switch_to(to);
    } else
        usleep(microseconds);
}

/* ---- lanes of a warp meet --------------------------------------------------------------------------------------- */

inline bool try_complete(Warp &w, uint32_t mask)
{
    uint32_t group = mask & w.alive;
    if (!group || (w.meeting & group) != group)
        return false;
    Complete complete = w.complete[__builtin_ctz(group)];
    for (uint32_t left = group; left; left &= left - 1) {
        unsigned lane = __builtin_ctz(left);
        if (w.mask[lane] != mask)
            return false;
        if (w.complete[lane] != complete)
            fail(CODE_LAUNCH_FAILED, "lanes of one warp meet in different intrinsics");
    }
    complete(w.data, group);
    w.meeting &= ~group;
    w.ready |= group;
    return true;
}

/* Wait for every lane of the mask that has not ended; whoever comes last computes for all. */
inline void meet(uint32_t mask, Complete complete, void *data)
{
    Fiber &me = *self;
    Warp &w = *me.warp;
    if (!(mask >> me.lane & 1))
        fail(CODE_LAUNCH_FAILED, "lane %u calls an intrinsic with the mask %08x", me.lane, mask);
    w.mask[me.lane] = mask;
    w.complete[me.lane] = complete;
    w.data[me.lane] = data;
    w.meeting |= 1u << me.lane;
    if (try_complete(w, mask))
        w.ready &= ~(1u << me.lane);
    else
        pause();
}

/* ---- barriers --------------------------------------------------------------------------------------------------- */

inline bool try_release(Block &b, int which)
{
    Barrier &barrier = b.barriers[which];
    if (!barrier.arrived || barrier.arrived < (barrier.expected ? barrier.expected : b.alive))
        return false;
    for (unsigned i = 0; i < b.n_threads; i++) {
        Fiber &f = b.room->fibers[i];
        if (f.barrier == which) {
            f.barrier = -1;
            f.warp->ready |= 1u << f.lane;
        }
    }
    barrier.voted[0] = barrier.count, barrier.voted[1] = barrier.all, barrier.voted[2] = barrier.any;
    barrier.arrived = barrier.count = barrier.any = 0;
    barrier.all = 1;
    return true;
}

/* Wait for `expected` threads (0: every one that has not ended).  Returns the votes: count, all, any. */
inline const int *barrier(int which, unsigned expected, bool waits, int predicate, const char *file, int line)
{
    Fiber &me = *self;
    Block &b = *me.block;
    Barrier &barrier = b.barriers[which];
    if (barrier.arrived && expected == 0 && (barrier.line != line || strcmp(barrier.file, file) != 0))
        fail(CODE_LAUNCH_FAILED, "at the barrier of %s:%d while %u threads wait at that of %s:%d", file, line,
             barrier.arrived, barrier.file, barrier.line);
    if (barrier.arrived && barrier.expected != expected)
        fail(CODE_LAUNCH_FAILED, "barrier %d for %u threads while others wait for %u", which, expected,
             barrier.expected);
    barrier.file = file, barrier.line = line, barrier.expected = expected;
    barrier.arrived++;
    barrier.count += predicate != 0, barrier.all &= predicate != 0, barrier.any |= predicate != 0;
    if (waits)
        me.barrier = which;
    if (try_release(b, which))
        me.warp->ready &= ~(1u << me.lane);
    else if (waits)
        pause();
    return barrier.voted;
}

/* ---- asynchronous copies: made as late as the program allows ----------------------------------------------------- */

/* Until at most `pending` closed groups are left; -1: everything. */
inline void finish_copies(int pending)
{
    Fiber &me = *self;
    size_t kept = 0;
    for (size_t i = 0; i < me.copies.size(); i++) {
        const Copy &c = me.copies[i];
        if (pending >= 0 && c.group >= me.groups - pending) {
            me.copies[kept++] = c;
            continue;
        }
        memcpy(c.to, c.from, c.n_read);
        memset((char *)c.to + c.n_read, 0, c.n_bytes - c.n_read);
    }
    me.copies.resize(kept);
}

/* ---- shared memory ---------------------------------------------------------------------------------------------- */

inline void check_poison(Block &b, const char *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)from[i] != POISON) {
            self = &b.room->fibers[0];
            fail(CODE_ILLEGAL_ADDRESS, "the block wrote behind its shared memory");
        }
}

/* The block's own variable of a declaration. */
inline char *static_shared(const void *key, size_t n_bytes, size_t alignment)
{
    Block &b = *self->block;
    for (const Site &site : b.sites)
        if (site.key == key)
            return site.at;
    size_t at = (b.used + alignment - 1) / alignment * alignment;
    b.used = at + n_bytes;
    if (b.used > STATIC_SHARED_BYTES || b.used + b.grid->shared_bytes > SHARED_BYTES || b.sites.size() == MOST_SITES)
        fail(CODE_LAUNCH_FAILED, "%zu bytes of static shared memory beside %u dynamic ones", b.used,
             b.grid->shared_bytes);
    char *from = b.room->shared + at + GAP_BYTES * b.sites.size();
    from += (alignment - (size_t)from % alignment) % alignment;
    memset(from, POISON, n_bytes + GAP_BYTES);
    b.sites.push_back({key, from, n_bytes});
    return from;
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

inline void end_of_fiber()
{
    finish_copies(-1);
    Fiber &me = *self;
    Block &b = *me.block;
    Warp &w = *me.warp;
    w.alive &= ~(1u << me.lane);
    b.alive--;
    for (uint32_t left = w.meeting; left; left &= left - 1)
        if (w.meeting >> __builtin_ctz(left) & 1)
            try_complete(w, w.mask[__builtin_ctz(left)]);
    for (int i = 0; i < 16; i++)
        try_release(b, i);
    Fiber *to = next_ready(b, me.warp);
    if (!to && (b.alive == 0 || b.waits))
        to = b.outer;
    if (!to)
        deadlock(b);
    switch_to(to);
    __builtin_unreachable();
}

inline void thread_body()
{
    const Grid &g = *self->block->grid;
    g.kernel->call(g.arguments);
    end_of_fiber();
}

inline Room *take_room(unsigned n_threads)
{
    for (size_t i = 0; i < host->rooms.size(); i++)
        if (host->rooms[i]->capacity >= n_threads) {
            Room *room = host->rooms[i];
            host->rooms.erase(host->rooms.begin() + i);
            host->taken.push_back(room);
            return room;
        }
    Room *room = new Room;
    room->capacity = n_threads <= 256 ? 256 : 1024;
    room->stacks = (char *)mmap(nullptr, room->capacity * STACK_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    room->shared = (char *)mmap(nullptr, ROOM_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room->stacks == MAP_FAILED || room->shared == MAP_FAILED)
        throw std::bad_alloc();
    mprotect(room->shared + ROOM_BYTES, PAGE_BYTES, PROT_NONE);
    for (unsigned i = 0; i < room->capacity; i++) /* an overflow ends in a page of its own */
        mprotect(room->stacks + i * STACK_BYTES, PAGE_BYTES, PROT_NONE);
    room->fibers.resize(room->capacity);
    room->warps.resize(room->capacity / LANES);
    host->taken.push_back(room);
    return room;
}

inline void give_room(Room *room)
{
    for (size_t i = 0; i < host->taken.size(); i++)
        if (host->taken[i] == room)
            host->taken.erase(host->taken.begin() + i);
    host->rooms.push_back(room);
}

inline void start_block(Block &b, Grid &g, unsigned index, Room *room, bool downwards)
{
    b.grid = &g, b.room = room, b.downwards = downwards, b.waits = false;
    b.index = {index % g.size.x, index / g.size.x % g.size.y, index / g.size.x / g.size.y};
    b.n_threads = b.alive = g.threads.x * g.threads.y * g.threads.z;
    b.n_warps = (b.n_threads + LANES - 1) / LANES;
    b.let_next = 0, b.used = 0;
    b.sites.clear();
    for (Barrier &barrier : b.barriers)
        barrier = {0, 0, "", 0, 0, 1, 0, {0, 1, 0}};
    b.dynamic = room->shared + (ROOM_BYTES - (g.shared_bytes + 15) / 16 * 16);
    memset(b.dynamic, POISON, (g.shared_bytes + 15) / 16 * 16);
    for (unsigned w = 0; w < b.n_warps; w++) {
        Warp &warp = room->warps[w];
        unsigned n = b.n_threads - w * LANES;
        warp.fibers = &room->fibers[w * LANES];
        warp.alive = warp.ready = n >= LANES ? 0xffffffffu : (1u << n) - 1;
        warp.meeting = warp.parked = 0;
    }
    for (unsigned i = 0; i < b.n_threads; i++) {
        Fiber &f = room->fibers[i];
        f.thread = {i % g.threads.x, i / g.threads.x % g.threads.y, i / g.threads.x / g.threads.y};
        f.lane = i % LANES, f.warp = &room->warps[i / LANES], f.block = &b;
        f.barrier = -1, f.let_next = false, f.groups = 0;
        f.copies.clear();
        /* stacks a little apart, or all their tops would share the same few lines of the cache */
        f.stack_pointer = prepare_stack(room->stacks + (i + 1) * STACK_BYTES - i % 61 * 192, thread_body);
    }
}

/* Run a block until all its threads have ended or, where it started early, wait for the grid before it. */
inline void resume_block(Block &b)
{
    b.outer = self;
    Warp *first = &b.room->warps[b.downwards ? b.n_warps - 1 : 0];
    if (Fiber *to = next_ready(b, first))
        switch_to(to);
    if (b.alive)
        return;
    check_poison(b, b.dynamic + b.grid->shared_bytes, -b.grid->shared_bytes % 16);
    for (const Site &site : b.sites)
        check_poison(b, site.at + site.n_bytes, GAP_BYTES);
}

/* ---- grids that start early ------------------------------------------------------------------------------------- */

/* Once every thread of a block has let the next grid start, a block of that one runs as far as it may: what it reads
 * before it waits had better be final already. */
inline void let_next_grid_start()
{
    Fiber &me = *self;
    Block &b = *me.block;
    if (me.let_next)
        return;
    me.let_next = true;
    Grid *next = b.grid->next;
    if (++b.let_next < b.n_threads || !next || next->early)
        return;
    Block *early = new Block;
    next->early = early;
    start_block(*early, *next, 0, take_room(next->threads.x * next->threads.y * next->threads.z), false);
    early->waits = true;
    resume_block(*early);
}

inline void wait_for_previous_grid()
{
    Fiber &me = *self;
    if (!me.block->waits)
        return;
    me.warp->parked |= 1u << me.lane;
    pause();
}

inline void run_grid(Grid &g)
{
    unsigned n_blocks = g.size.x * g.size.y * g.size.z, order = host->n_grids++;
    unsigned n_threads = g.threads.x * g.threads.y * g.threads.z, first = 0;
    if (Block *b = g.early) {
        b->waits = false;
        for (unsigned w = 0; w < b->n_warps; w++) {
            b->room->warps[w].ready |= b->room->warps[w].parked;
            b->room->warps[w].parked = 0;
        }
        if (b->alive)
            resume_block(*b);
        give_room(b->room);
        delete b;
        g.early = nullptr;
        first = 1;
    }
    if (first == n_blocks)
        return;
    Room *room = take_room(n_threads);
    Block b;
    for (unsigned i = first; i < n_blocks; i++) {
        start_block(b, g, i, room, (i + order) & 1);
        resume_block(b);
    }
    give_room(room);
}

/* ---- faults ----------------------------------------------------------------------------------------------------- */

inline struct sigaction old_actions[NSIG];

inline void on_fault(int signal, siginfo_t *info, void *context)
{
    if (self && self->block) {
        /* the instruction's place in its library: driver.py asks for the line */
        size_t pc = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
        Dl_info library{};
        dladdr((void *)pc, &library);
        const char *path = library.dli_fname ? library.dli_fname : "?";
        size_t at = pc - (size_t)library.dli_fbase;
        if (signal == SIGILL) /* a check that the compiler put in, see build.py */
            fail(CODE_MISALIGNED, "a misaligned address, or an index outside its array, at %s+%#zx", path, at);
        if (signal == SIGFPE)
            fail(CODE_LAUNCH_FAILED, "division of an integer by zero at %s+%#zx", path, at);
        fail(CODE_ILLEGAL_ADDRESS, "no access to address %p at %s+%#zx", info->si_addr, path, at);
    }
    const struct sigaction &old = old_actions[signal];
    if (old.sa_flags & SA_SIGINFO)
        old.sa_sigaction(signal, info, context);
    else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN)
        old.sa_handler(signal);
    else
        sigaction(signal, &old, nullptr); /* and the instruction meets it again */
}

inline bool catch_faults()
{
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE})
        sigaction(signal, &action, &old_actions[signal]);
    return true;
}

inline void enter_host_thread()
{
    static bool caught = catch_faults();
    (void)caught;
    static thread_local std::unique_ptr<Host> mine{new Host}; /* a library's static room is small */
    host = mine.get();
    stack_t stack{};
    stack.ss_size = sizeof host->signal_stack;
    stack.ss_sp = host->signal_stack; /* the handler's: a fiber's may be what overflowed */
    sigaltstack(&stack, nullptr);
    self = &host->base;
}

/* Run grids of which all but the first may start early.  Returns a code of the driver. */
inline int run(const Launch *launches, int n, char *message)
{
    if (!host)
        enter_host_thread();
    std::vector<Grid> grids(n);
    for (int i = 0; i < n; i++) {
        const Launch &l = launches[i];
        grids[i] = {l.kernel, {l.grid[0], l.grid[1], l.grid[2]}, {l.threads[0], l.threads[1], l.threads[2]},
                    l.shared_bytes, l.arguments, i + 1 < n ? &grids[i + 1] : nullptr, nullptr};
    }
    if (sigsetjmp(host->escape, 1)) {
        self = &host->base;
        host->rooms.insert(host->rooms.end(), host->taken.begin(), host->taken.end());
        host->taken.clear();
        memcpy(message, host->message, MESSAGE_BYTES);
        return host->code;
    }
    for (Grid &grid : grids)
        run_grid(grid);
    return CODE_SUCCESS;
}

} // namespace emulator
