// work.cuh: bytes and FLOPs of each kernel, declared next to its LAUNCH. The kernel
// laboratory (dev/cuda/bench.h), PROFILE=1 (dev/cuda/kernel_times.cuh), and the virtual
// clock of the stand-ins (llmc/cpu/clock.h) use them.
//
// Bytes: every input read once and every output written once, even if the kernel does so
// more often. They leave out scratch, and vectors beside matrices (biases, means, tokens,
// losses). FLOPs: an exponential, a root or a division is one. Causal attention counts the
// unmasked pairs.
//
// defines: kernel_tally, kernel_state, kernel_cost, attention_cost, gemm_cost
#ifndef LLMC_WORK_CUH
#define LLMC_WORK_CUH

#include <cuda_runtime.h>

#include "llmc/sim/kernel.h"

// The sum of bytes and FLOPs, on a GPU too, or NULL.
inline KernelWork *kernel_tally;

// Declares the work of the next launch. Two declarations before one launch add up.
static inline void kernel_state(const KernelWork &work) {
    if (kernel_tally) {
        kernel_tally->bytes += work.bytes;
        kernel_tally->flops += work.flops;
    }
#ifdef CPU_CLOCK
    cpu_state_work(work);
#endif
}

// Declares n elements, with bytes and FLOPs for each.
static inline void kernel_cost(KernelKind kind, size_t n, double bytes, double flops) {
    KernelWork work = KernelWork();
    work.kind = kind;
    work.elements = (double)n;
    work.bytes = bytes * (double)n;
    work.flops = flops * (double)n;
    kernel_state(work);
}

// Declares causal attention over qkv[B, T, NH + 2 KV, HS], `width` bytes an element; its
// two backward kernels count as one. A query and each of the (T + 1) / 2 keys that it has
// on average are 2 products of HS forward, and 5 backward. Forward reads q, k and v and
// writes out; backward reads all these and dout, and writes dq, dk and dv.
static inline void attention_cost(bool backward, size_t B, size_t T, size_t NH, size_t KV,
                                  size_t HS, size_t width) {
    KernelWork work = KernelWork();
    double values = (double)(B * T) * (double)(NH * HS), keys = (double)(T + 1) / 2;
    double moved = (backward ? 4 : 2) * (double)(B * T) * (double)((NH + KV) * HS);
    work.kind = backward ? KERNEL_ATTENTION_BACKWARD : KERNEL_ATTENTION_FORWARD;
    work.bytes = moved * (double)width;
    work.flops = (backward ? 5 : 2) * 2 * values * keys;
    work.B = B;
    work.T = T;
    work.NH = NH;
    work.HS = HS;
    work.width = width;
    kernel_state(work);
}

// Declares d[M, N] = a[M, K] b[K, N], or d += it: factors of `width` bytes an element, a
// result of `out`.
static inline void gemm_cost(size_t M, size_t N, size_t K, size_t width, size_t out,
                             bool accumulates) {
    KernelWork work = KernelWork();
    work.kind = KERNEL_GEMM;
    work.M = M;
    work.N = N;
    work.K = K;
    work.width = width;
    work.accumulates = accumulates;
    work.bytes = (double)((M + N) * K * width + M * N * out * (accumulates ? 2 : 1));
    work.flops = 2.0 * (double)M * (double)N * (double)K;
    kernel_state(work);
}

#endif
