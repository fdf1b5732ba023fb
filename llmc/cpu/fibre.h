// fibre.h: runs the threads of a block: one OS thread per block, a fibre per waiting
// thread.
//
// A kernel's threads run one after the other as plain calls. A thread that meets a barrier
// stays suspended on its stack, and another one continues: a ready thread, or a fibre that
// starts new threads. Fibres are made by makecontext, pooled by each OS thread, and
// switched by _setjmp and _longjmp, which cost a few ns and no system call.
#ifndef LLMC_CPU_FIBRE_H
#define LLMC_CPU_FIBRE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <utility>
#include <vector>

#include "llmc/cpu/stall.h"

#if defined(__SANITIZE_ADDRESS__)
#define CPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CPU_ASAN 1
#endif
#endif
#ifndef CPU_ASAN
#define CPU_ASAN 0
#endif
#if CPU_ASAN
#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)
        : x(x_), y(y_), z(z_) {}
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

enum {
    CPU_WARP = 32,
    CPU_MAX_THREADS = 1024,
    CPU_STACK = CPU_ASAN ? 256 << 10 : 64 << 10,
    CPU_GUARD = 4096
};

struct CpuFibre {
    jmp_buf where;
    unsigned thread;  // that is suspended on it
    // [size] above a guard page; fibre 0 is the OS thread on its own stack.
    const void *stack;
    size_t size;
    void *fake;  // for the sanitizer
};

// The words of a thread at the rendezvous of its warp. `results` puts results in place of
// the values of all 32 lanes.
struct CpuLane;
typedef void (*CpuResults)(CpuLane *lanes);
struct CpuLane {
    uint64_t value;
    unsigned source;  // the lane whose value it wants
    CpuResults results;
    CpuFibre *fibre;
};

struct CpuBlock;

// A launch, ready to run: run() runs unstarted threads of the OS thread's block until
// others should run first.
struct CpuGrid {
    const char *name;
    dim3 grid, block;
    void (*run)(CpuBlock *);
};

// The block that an OS thread runs, and its pool of fibres.
struct CpuBlock {
    const CpuGrid *launch;
    unsigned count, next,
        current;         // threads; of these started; the running one (x fastest)
    uint64_t blocks;     // that this OS thread has begun
    bool flat;           // one-dimensional: threadIdx.x is the thread's number
    Random order;        // of the block's threads
    unsigned suspended;  // threads left on a stack, waiting or ready
    CpuFibre *running = fibres;
    unsigned created = 1, idle_count, ready_count, barrier_count;
    const char *barrier_file;
    int barrier_line;
    uint32_t waiting[CPU_WARP];  // lanes of each warp that wait for the others
    CpuFibre *idle[CPU_MAX_THREADS + 1], *ready[CPU_MAX_THREADS], *barrier[CPU_MAX_THREADS];
    uint16_t shuffled[CPU_MAX_THREADS];
    CpuLane lanes[CPU_MAX_THREADS];
    CpuFibre fibres[CPU_MAX_THREADS + 1];
    ucontext_t context;  // of the fibre being started; not on a stack that never returns
    bool (*late)(CpuBlock *);  // NULL, or does something for which threads wait; false:
                               // there is nothing

    ~CpuBlock() {
        for (unsigned i = 1; i < created; i++)
            munmap((char *)fibres[i].stack - CPU_GUARD, CPU_GUARD + CPU_STACK);
    }
};

inline thread_local CpuBlock *cpu_block = NULL;

static inline dim3 cpu_thread_index(unsigned t) {
    return {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}
static inline void cpu_set_current(CpuBlock *b, unsigned t) {
    b->current = t;
    if (b->flat)
        threadIdx.x = t;
    else
        threadIdx = cpu_thread_index(t);
}

// Ends the program after misuse that CUDA would not report, or not here: one error message,
// then abort().
[[noreturn]] __attribute__((noinline, cold, format(printf, 1, 2))) inline void cpu_abort(
    const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

// Ends the program with kernel, block, thread and an error message.
[[noreturn]] __attribute__((noinline, cold, format(printf, 2, 3))) inline void
cpu_kernel_abort(unsigned thread, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dim3 i = cpu_thread_index(thread);
    cpu_abort("kernel %s, block (%u,%u,%u), thread (%u,%u,%u): %s", cpu_block->launch->name,
              blockIdx.x, blockIdx.y, blockIdx.z, i.x, i.y, i.z, text);
}

// Ends the program when no thread can continue: names a waiting thread and the one it waits
// for, of its warp or of the block.
[[noreturn]] __attribute__((noinline, cold)) inline void cpu_report_deadlock(CpuBlock *b) {
    enum { EXITED, AT_BARRIER, IN_WARP };
    std::vector<char> state(b->count, EXITED);
    unsigned waits = 0, missing = 0;
    for (unsigned i = 0; i < b->barrier_count; i++)
        state[waits = b->barrier[i]->thread] = AT_BARRIER;
    for (unsigned t = 0; t < b->count; t++)
        if (b->waiting[t / CPU_WARP] >> (t % CPU_WARP) & 1) state[waits = t] = IN_WARP;
    bool in_warp = state[waits] == IN_WARP;
    for (unsigned t = 0; t < b->count; t++)
        if (state[t] != state[waits] && (!in_warp || t / CPU_WARP == waits / CPU_WARP))
            missing = t;
    dim3 m = cpu_thread_index(missing);
    if (in_warp)
        cpu_kernel_abort(
            waits, "waits for ever in a warp operation: thread (%u,%u,%u) %s", m.x, m.y,
            m.z, state[missing] == EXITED ? "has exited" : "waits at a block barrier");
    cpu_kernel_abort(waits,
                     "waits for ever at the barrier %s:%d: thread (%u,%u,%u) has exited",
                     b->barrier_file, b->barrier_line, m.x, m.y, m.z);
}

// Calls the C library's function by its own name: _FORTIFY_SOURCE takes a jump between
// stacks for an error.
extern "C" void cpu_longjmp(jmp_buf where, int value) __asm__("_longjmp")
    __attribute__((noreturn));

// Continues a suspended fibre. AddressSanitizer unpoisons the whole stack before a noreturn
// call and in its own longjmp. That would be most of a switch's time, so the function calls
// libc's _longjmp through a pointer.
static inline void cpu_switch_to([[maybe_unused]] CpuBlock *b, CpuFibre *to) {
#if CPU_ASAN
    static void *const libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    static void *const real = libc ? dlsym(libc, "_longjmp") : NULL;
    __sanitizer_start_switch_fiber(&b->running->fake, to->stack, to->size);
    if (real)
        ((void (*)(jmp_buf, int))real)(to->where, 1);
    else
#endif
        cpu_longjmp(to->where, 1);
}

static inline void cpu_arrive([[maybe_unused]] CpuBlock *b,
                              [[maybe_unused]] CpuFibre *self) {
#if CPU_ASAN
    __sanitizer_finish_switch_fiber(self->fake, &b->running->stack, &b->running->size);
#endif
    b->running = self;
}

inline void cpu_fibre_main();

// Adds a fibre to the pool and continues there.
__attribute__((noinline)) inline void cpu_start_fibre(CpuBlock *b) {
    CpuFibre *f = &b->fibres[b->created++];
    void *p = mmap(NULL, CPU_GUARD + CPU_STACK, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p, CPU_GUARD, PROT_NONE) != 0)
        cpu_abort("no memory for the stack of fibre %u", b->created);
    f->stack = (char *)p + CPU_GUARD;
    // Stacks that all end at the same address modulo the page size would fight for the same
    // cache lines.
    f->size = CPU_STACK - b->created * 7 % 64 * 64;
    getcontext(&b->context);
    b->context.uc_stack.ss_sp = (void *)f->stack;
    b->context.uc_stack.ss_size = f->size;
    b->context.uc_link = NULL;
    makecontext(&b->context, cpu_fibre_main, 0);
#if CPU_ASAN
    __sanitizer_start_switch_fiber(&b->running->fake, f->stack, f->size);
#endif
    setcontext(&b->context);
    abort();
}

// Returns the fibre to continue when the running one cannot, NULL for a new one. Ready
// threads come first: a warp that runs to its end frees its stacks for the next. An idle
// fibre 0 comes last, when all threads of the block have ended.
inline CpuFibre *cpu_next(CpuBlock *b) {
    bool unstarted = b->next < b->count;
    if (b->ready_count && (!b->order.on || !unstarted || random_next(&b->order) % 2)) {
        unsigned last = --b->ready_count;
        if (b->order.on)
            std::swap(b->ready[last], b->ready[random_next(&b->order) % (last + 1)]);
        b->suspended--;
        return b->ready[last];
    }
    if (unstarted) return b->idle_count ? b->idle[--b->idle_count] : NULL;
    if (b->suspended == 0) return b->fibres;
    if (b->late && b->late(b)) return cpu_next(b);
    cpu_report_deadlock(b);
}

// Leaves the running fibre until it is chosen again: either it has no thread (idle), or its
// thread is suspended until it is made ready. One function, because each return after a
// switch of stacks costs a mispredicted branch.
__attribute__((noinline)) inline void cpu_leave(CpuBlock *b, bool idle) {
    CpuFibre *self = b->running;
    if (!idle) {
        self->thread = b->current;
        b->suspended++;
    } else if (self != b->fibres) {
        b->idle[b->idle_count++] = self;
    }
    CpuFibre *to = cpu_next(b);
    if (to == self) return;
    if (_setjmp(self->where) == 0) {
        if (to)
            cpu_switch_to(b, to);
        else
            cpu_start_fibre(b);
    }
    cpu_arrive(b, self);
    if (!idle) cpu_set_current(b, self->thread);
}

// Runs, as the first frame of a pooled fibre, threads of each block of its OS thread
// without end.
inline void cpu_fibre_main() {
    CpuBlock *b = cpu_block;
    cpu_arrive(b, &b->fibres[b->created - 1]);
    for (;;) {
        b->launch->run(b);
        cpu_leave(b, true);
    }
}

static inline void cpu_make_ready(CpuBlock *b, CpuFibre *f) {
    b->ready[b->ready_count++] = f;
}

#endif
