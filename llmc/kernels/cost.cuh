// cost.cuh: one line beside a LAUNCH says what the kernel must move and compute: THE figures of a wrapper's work, for
// the kernel laboratory (dev/cuda/bench.h), --trace, and the virtual clock of the stand-ins (llmc/cpu/clock.h).
//
// Bytes are those that a kernel must move: every input read once, every output written once, however often this one
// does so. Beside matrices, what has one number for a row or a column (biases, means, tokens, losses) is left out, and
// so is scratch. FLOPs are those that the kernel does, with an exponential, a root or a division as one; of causal
// attention those of the pairs that it wants.
//
// defines: kernel_tally, kernel_state, kernel_cost, attention_cost, gemm_cost
#ifndef LLMC_COST_CUH
#define LLMC_COST_CUH

#include <cuda_runtime.h>

#include "llmc/sim/kernel.h"

// Where bytes and FLOPs are added up, on a GPU too. NULL: nobody asks.
static inline KernelWork **kernel_tally(void) {
    static KernelWork *tally;
    return &tally;
}

// The work of the next launch. Two statements before one launch add up.
static inline void kernel_state(const KernelWork &work) {
    KernelWork *tally = *kernel_tally();
    if (tally) tally->bytes += work.bytes, tally->flops += work.flops;
#ifdef CPU_CLOCK
    cpu_state_work(work);
#endif
}

// n elements, for each of which the kernel must move so many bytes and does so many FLOPs.
static inline void kernel_cost(KernelKind kind, size_t n, double bytes, double flops) {
    KernelWork work = KernelWork();
    work.kind = kind, work.elements = (double)n, work.bytes = bytes * (double)n, work.flops = flops * (double)n;
    kernel_state(work);
}

// Causal attention over qkv[B, T, 3, NH, HS] of `width` bytes an element, as one kernel or as the two of its backward.
// A query and each of the (T + 1) / 2 keys that it has on average are 2 products of HS forward, and 5 backward. Forward
// reads q, k and v and writes out; backward reads all these and dout, and writes dq, dk and dv.
static inline void attention_cost(bool backward, size_t B, size_t T, size_t NH, size_t HS, size_t width) {
    KernelWork work = KernelWork();
    double values = (double)(B * T) * (double)(NH * HS), keys = (double)(T + 1) / 2;
    work.kind = backward ? KERNEL_ATTENTION_BACKWARD : KERNEL_ATTENTION_FORWARD;
    work.bytes = (backward ? 8 : 4) * values * (double)width, work.flops = (backward ? 5 : 2) * 2 * values * keys;
    work.B = B, work.T = T, work.NH = NH, work.HS = HS, work.width = width;
    kernel_state(work);
}

// d[M, N] = a[M, K] b[K, N], or d += it; factors of `width` bytes an element, a result of `out`.
static inline void gemm_cost(size_t M, size_t N, size_t K, size_t width, size_t out, bool accumulates) {
    KernelWork work = KernelWork();
    work.kind = KERNEL_GEMM, work.M = M, work.N = N, work.K = K, work.width = width, work.accumulates = accumulates;
    work.bytes = (double)((M + N) * K * width + M * N * out * (accumulates ? 2 : 1));
    work.flops = 2.0 * (double)M * (double)N * (double)K;
    kernel_state(work);
}

#endif
