// launch.h: what LAUNCH(kernel, grid, block, shared, stream)(args...) does on the CPU.
//
// The arguments become copies of the kernel's parameter types and lie in the stream's queue. The kernel is
// called through a lambda, so that the compiler inlines it into the loop over the threads of a block.
#ifndef LLMC_CPU_LAUNCH_H
#define LLMC_CPU_LAUNCH_H

#include <tuple>
#include <utility>

#include "stream.h"
#include "warp.h"

// A grid or block size, from dim3 or a whole number of any type; too large a number does not wrap around.
struct CpuDim {
    dim3 dim;
    bool fits;
    CpuDim(dim3 d) : dim(d), fits(true) {}
    template <class T, class = std::enable_if_t<std::is_integral<T>::value || std::is_enum<T>::value>>
    CpuDim(T n) : dim((unsigned)n), fits((int64_t)n >= 0 && (uint64_t)n <= 0x7FFFFFFFu) {}
};

template <class Call, class... P>
struct CpuWork {
    CpuGrid grid;
    Call call;
    std::tuple<P...> args;
    inline static double thread_seconds = 0;
    inline static bool launched = false;  // a place that launches counts as a kernel of its own

    template <size_t... I>
    __attribute__((always_inline)) inline void thread(std::index_sequence<I...>) const {
        call(std::get<I>(args)...);
    }
    static void body(CpuBlock *b, const void *self) {
        const CpuWork &work = *(const CpuWork *)self;
        while (b->next < b->count) {
            cpu_start_thread(b);
            work.thread(std::index_sequence_for<P...>());
            if (cpu_others_first(b)) return;
        }
    }
    bool operator()() {
        grid.args = this;
        cpu_run_grid(&grid);
        return true;
    }
};

// A launch that cannot be has no result of its own: says why, and keeps the error for cudaGetLastError.
__attribute__((noinline, cold)) inline bool cpu_refuse_launch(const char *name, cudaError_t error,
                                                              const char *why) {
    fprintf(stderr, "kernel %s was not launched: %s\n", name, why);
    cpu_runtime().last_error = error;
    return false;
}

inline bool cpu_check_launch(const char *name, const CpuDim &grid, const CpuDim &block, size_t shared,
                             cudaStream_t stream) {
    const dim3 &g = grid.dim, &b = block.dim;
    const cudaError_t handle = cudaErrorInvalidResourceHandle, configuration = cudaErrorInvalidConfiguration;
    if (!stream) return cpu_refuse_launch(name, handle, "stream 0 is not used here: give it a stream of its own");
    if (!cpu_is_stream(stream)) return cpu_refuse_launch(name, handle, "the stream does not exist");
    if (cpu_capability() < 80)
        return cpu_refuse_launch(name, cudaErrorNoKernelImageForDevice, "there is no code for this device");
    if (!grid.fits || !block.fits)
        return cpu_refuse_launch(name, configuration, "the grid or block size is negative or too large");
    if (!g.x || !g.y || !g.z || g.x > 0x7FFFFFFFu || g.y > 65535 || g.z > 65535)
        return cpu_refuse_launch(name, configuration, "no such grid size");
    if (!b.x || !b.y || !b.z || b.x > CPU_MAX_THREADS || b.y > CPU_MAX_THREADS || b.z > 64 ||
        (size_t)b.x * b.y * b.z > CPU_MAX_THREADS)
        return cpu_refuse_launch(name, configuration, "a block has 1 to 1024 threads");
    if (shared > 48 << 10)
        return cpu_refuse_launch(name, configuration, "more than 48 KiB of dynamic shared memory");
    return true;
}

template <class Call, class... P>
struct CpuLauncher {
    const char *name;
    CpuDim grid, block;
    size_t shared;
    cudaStream_t stream;
    Call call;

    void operator()(P... args) const {
        static_assert((std::is_trivially_copyable<P>::value && ...),
                      "kernel parameters are copied byte by byte");
        typedef CpuWork<Call, P...> Work;
        if (!cpu_check_launch(name, grid, block, shared, stream)) return (void)cpu_take_cost();
        if (!Work::launched) cpu_first_use(name);
        Work::launched = true;
        cpu_enqueue_work(stream, name,
                         Work{{name, grid.dim, block.dim, shared, Work::body, NULL, &Work::thread_seconds},
                              call,
                              {args...}});
    }
};

template <class Call, class... P>
static inline CpuLauncher<Call, P...> cpu_launcher(void (*)(P...), const char *name, CpuDim grid,
                                                   CpuDim block, size_t shared, cudaStream_t stream,
                                                   Call call) {
    return {name, grid, block, shared, stream, call};
}

#endif
