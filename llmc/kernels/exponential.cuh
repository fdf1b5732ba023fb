// exponential.cuh: exponentials of a GPU's hardware. llmc/cpu/vectors.h has a CPU's.
//
// defines: exponential, exponential_fast, exponential2
#ifndef LLMC_EXPONENTIAL_CUH
#define LLMC_EXPONENTIAL_CUH

#include <math.h>

#include "llmc/kernels/cuda_common.cuh"

#ifdef __CUDACC__
// Returns exp(x) to about one unit in the last place, but 0 below e^-80, because a CPU is
// slow at subnormal numbers. Such a number is nothing beside 1 or the sum of a softmax.
// NaN stays.
__device__ __forceinline__ float exponential(float x) {
    return x < -80.0f ? 0.0f : expf(x);
}

// Returns 2^x to about two units in the last place; subnormal results are 0.
__device__ __forceinline__ float exponential2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns exp(x) in two instructions, to about 2 + |x| units in the last place; subnormal
// results are 0. For probabilities p = exp(x): the error is |x| p, small where p is.
__device__ __forceinline__ float exponential_fast(float x) {
    return exponential2(x * 1.44269504f);
}
#endif

#endif
