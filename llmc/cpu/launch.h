// launch.h: LAUNCH(kernel, grid, block, stream)(args...) on the CPU, and the blocks of a
// launch, one after the other on each OS thread.
//
// The arguments become copies of the kernel's parameter types in the stream's queue. The
// kernel is called through a lambda, so that the compiler inlines it into the loop over the
// threads of a block.
#ifndef LLMC_CPU_LAUNCH_H
#define LLMC_CPU_LAUNCH_H

#include <omp.h>

#include <tuple>
#include <utility>

#include "stream.h"
#include "warp.h"

// Returns the OS thread's own block, set up for the launch.
inline CpuBlock *cpu_enter_grid(const CpuGrid *g) {
    static thread_local CpuBlock of_thread;
    CpuBlock *b = cpu_block = &of_thread;
    b->launch = g;
    b->count = g->block.x * g->block.y * g->block.z;
    b->flat = g->block.y * g->block.z == 1;
    blockDim = g->block;
    gridDim = g->grid;
    threadIdx = {0, 0, 0};
    return b;
}

inline void cpu_run_block(CpuBlock *b, size_t number, Random order) {
    blockIdx = {(unsigned)(number % gridDim.x), (unsigned)(number / gridDim.x % gridDim.y),
                (unsigned)(number / gridDim.x / gridDim.y)};
    b->next = 0;
    b->late = NULL;
    b->blocks++;
    b->order = order;
    b->order.state += number * 0xD1342543DE82EF95u;
    for (unsigned i = 0; order.on && i < b->count; i++) {
        unsigned j = random_next(&b->order) % (i + 1);
        b->shuffled[i] = b->shuffled[j];
        b->shuffled[j] = (uint16_t)i;
    }
    b->launch->run(b);
    cpu_leave(b, true);  // until all threads have ended
}

// Runs every block of the launch. Waking the other OS threads costs some microseconds, and
// far more on a busy machine. So they help only if the launch is long, by the time that a
// thread of the kernel took last time (a few ns at first).
inline void cpu_run_grid(const CpuGrid *g, double *thread_seconds) {
    size_t blocks = (size_t)g->grid.x * g->grid.y * g->grid.z;
    double threads = (double)blocks * g->block.x * g->block.y * g->block.z;
    Random *order = &cpu_runtime().thread_order;
    std::vector<uint32_t> shuffled(order->on ? blocks : 0);
    for (size_t i = 0; i < shuffled.size(); i++) {
        size_t j = random_next(order) % (i + 1);
        shuffled[i] = shuffled[j];
        shuffled[j] = (uint32_t)i;
    }
    double start = seconds_wall(), expected = threads * *thread_seconds;
    bool parallel = blocks > 1 && expected > 30e-6 && omp_get_max_threads() > 1 &&
                    !omp_in_parallel();
    size_t workers = parallel ? (size_t)omp_get_max_threads() : 1;
    size_t chunk = blocks / (workers * 8) + 1;
#pragma omp parallel if (parallel)
    {
        CpuBlock *b = cpu_enter_grid(g);
#pragma omp for schedule(dynamic, chunk) nowait
        for (size_t i = 0; i < blocks; i++)
            cpu_run_block(b, order->on ? shuffled[i] : i, *order);
    }
    *thread_seconds = (seconds_wall() - start) * (double)workers / threads;
}

// A grid or block size, from dim3 or a whole number of any type; 0, which is refused, if
// the number does not fit.
struct CpuDim : dim3 {
    CpuDim(dim3 d) : dim3(d) {}
    template <class T, class = std::enable_if_t<std::is_integral<T>::value ||
                                                std::is_enum<T>::value>>
    CpuDim(T n) : dim3((int64_t)n >= 0 && (uint64_t)n <= 0x7FFFFFFFu ? (unsigned)n : 0) {}
};

template <class Call, class... P>
struct CpuWork : CpuGrid {
    Call call;
    std::tuple<P...> args;
    inline static double thread_seconds = 5e-9;
    // A place that launches counts as a kernel of its own.
    inline static bool launched = false;

    template <size_t... I>
    __attribute__((always_inline)) inline void thread(std::index_sequence<I...>) const {
        call(std::get<I>(args)...);
    }
    static void body(CpuBlock *b) {
        const CpuWork &work = *(const CpuWork *)b->launch;
        while (b->next < b->count) {
            unsigned t = b->next++;
            cpu_set_current(b, b->order.on ? b->shuffled[t] : t);
            work.thread(std::index_sequence_for<P...>());
            if (b->suspended && b->ready_count) return;  // these run first
        }
    }
    void operator()() const { cpu_run_grid(this, &thread_seconds); }
};

// Refuses an impossible launch, which has no result of its own: prints why and keeps the
// error for cudaGetLastError.
inline bool cpu_check_launch(const char *name, const dim3 &g, const dim3 &b) {
    const char *why = NULL;
    if (!b.x || !b.y || !b.z || b.x > CPU_MAX_THREADS || b.y > CPU_MAX_THREADS ||
        b.z > 64 || (size_t)b.x * b.y * b.z > CPU_MAX_THREADS)
        why = "a block has 1 to 1024 threads";
    if (!g.x || !g.y || !g.z || g.x > 0x7FFFFFFFu || g.y > 65535 || g.z > 65535)
        why = "no such grid size";
    if (!why) return true;
    fprintf(stderr, "kernel %s was not launched: %s\n", name, why);
    cpu_runtime().last_error = cudaErrorInvalidConfiguration;
    return false;
}

// Every block has as much dynamic shared memory as a GPU's largest: tensor_core.h.
static inline cudaStream_t cpu_launch_stream(cudaStream_t stream, size_t = 0) {
    return stream;
}

// Returns a function that launches the kernel with its arguments.
template <class Call, class... P>
static inline auto cpu_launcher(void (*)(P...), const char *name, CpuDim grid, CpuDim block,
                                cudaStream_t stream, Call call) {
    static_assert((std::is_trivially_copyable<P>::value && ...),
                  "kernel parameters are copied byte by byte");
    return [=](P... args) {
        typedef CpuWork<Call, P...> Work;
        if (!cpu_check_launch(name, grid, block)) return (void)cpu_take_cost();
        if (!Work::launched) cpu_first_use(name);
        Work::launched = true;
        cpu_enqueue_work(stream, name,
                         Work{{name, grid, block, Work::body}, call, {args...}});
    };
}
#define LAUNCH_UNCHECKED(kernel, grid, block, ...)                     \
    cpu_launcher(                                                      \
        &kernel, #kernel, grid, block, cpu_launch_stream(__VA_ARGS__), \
        [=](auto... cpu_args) __attribute__((always_inline)) { kernel(cpu_args...); })

#endif
