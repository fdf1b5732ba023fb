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

// Why a launch cannot be, or NULL.
inline const char *cpu_launch_error(const CpuDim &grid, const CpuDim &block, size_t shared,
                                    cudaStream_t stream) {
    const dim3 &g = grid.dim, &b = block.dim;
    if (!stream) return "stream 0 is not used here: give it a stream of its own";
    if (!cpu_is_stream(stream)) return "the stream does not exist";
    if (!grid.fits || !block.fits) return "the grid or block size is negative or too large";
    if (!g.x || !g.y || !g.z || g.x > 0x7FFFFFFFu || g.y > 65535 || g.z > 65535) return "no such grid size";
    if (!b.x || !b.y || !b.z || b.x > CPU_MAX_THREADS || b.y > CPU_MAX_THREADS || b.z > 64 ||
        (size_t)b.x * b.y * b.z > CPU_MAX_THREADS)
        return "a block has 1 to 1024 threads";
    if (shared > 48 << 10) return "more than 48 KiB of dynamic shared memory";
    return NULL;
}

// A launch has no result of its own: the error is printed, and kept for the next call that can return it.
void cpu_refuse_launch(const char *name, const char *why, bool bad_stream);

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
        const char *why = cpu_launch_error(grid, block, shared, stream);
        if (why) return cpu_refuse_launch(name, why, !cpu_is_stream(stream));
        typedef CpuWork<Call, P...> Work;
        cpu_enqueue(stream, name,
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
