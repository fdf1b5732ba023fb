// cost.cuh: one line beside a LAUNCH says what the kernel must move and compute, for the profile and for the virtual
// clock of the stand-ins (llmc/cpu/clock.h). On a GPU, which has a real clock, it is nothing.
//
// defines: kernel_cost, attention_cost
#ifndef LLMC_COST_CUH
#define LLMC_COST_CUH

#include <cuda_runtime.h>

#include "llmc/sim/kernel.h"

// The work of the next launch: n elements, for each of which it must move so many bytes and does so many FLOPs. Two
// statements before one launch add up.
static inline void kernel_cost(KernelKind kind, size_t n, double bytes, double flops) {
#ifdef CPU_CLOCK
    KernelWork work = KernelWork();
    work.kind = kind, work.elements = (double)n, work.bytes = bytes * (double)n, work.flops = flops * (double)n;
    cpu_state_work(work);
#else
    (void)kind, (void)n, (void)bytes, (void)flops;
#endif
}

// Causal attention over qkv[B, T, 3, NH, HS] of `width` bytes an element, as one kernel or as the two of its backward.
static inline void attention_cost(bool backward, size_t B, size_t T, size_t NH, size_t HS, size_t width) {
#ifdef CPU_CLOCK
    KernelWork work = KernelWork();
    double values = (double)(B * T) * (double)(NH * HS), pairs = values * (double)T;
    work.kind = backward ? KERNEL_ATTENTION_BACKWARD : KERNEL_ATTENTION_FORWARD;
    work.bytes = (backward ? 8 : 4) * values * (double)width, work.flops = (backward ? 5 : 2) * pairs;
    work.B = B, work.T = T, work.NH = NH, work.HS = HS, work.width = width;
    cpu_state_work(work);
#else
    (void)backward, (void)B, (void)T, (void)NH, (void)HS, (void)width;
#endif
}

#endif
