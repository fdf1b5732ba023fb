// exponential.cuh: exponentials: hardware on a GPU, arithmetic that a compiler vectorises on a CPU.
//
// defines: exponential, exponential_fast, exponential2
#ifndef LLMC_EXPONENTIAL_CUH
#define LLMC_EXPONENTIAL_CUH

#include <math.h>

#include "llmc/kernels/cuda_common.cuh"

// Returns exp(x) to about one unit in the last place, but 0 below e^-80, which is nothing beside 1 or the sum of a
// softmax: a CPU is slow at subnormal numbers. NaN stays. A CPU has only a function call for one number: there it is a
// few multiplications, which vectorise, and infinite from 88.4 on.
__device__ __forceinline__ float exponential(float x) {
#ifdef __CUDA_ARCH__
    return x < -80.0f ? 0.0f : expf(x);
#else
    // y = n ln 2 + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer, left in the low bits.
    float y = x < -80.0f ? -80.0f : x > 89.0f ? 89.0f : x;
    float shifted = fmaf(y, 1.44269504f, 12582912.0f), scale;
    float n = shifted - 12582912.0f;
    float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, y));
    // exp(r) = 1 + r + r^2 q(r), q interpolated at the Chebyshev nodes
    float q = 1.392617611e-3f;
    q = fmaf(q, r, 8.363173074e-3f);
    q = fmaf(q, r, 4.1666554662e-2f);
    q = fmaf(q, r, 1.66665770255e-1f);
    q = fmaf(q, r, 0.5f);
    uint32_t whole;
    memcpy(&whole, &shifted, sizeof whole);
    whole = x < -80.0f ? 0 : (whole << 23) + 0x3F800000u;  // 2^n, or 0
    memcpy(&scale, &whole, sizeof scale);
    return (fmaf(q, r * r, r) + 1.0f) * scale;
#endif
}

// Returns 2^x to about two units in the last place; subnormal results are 0.
__device__ __forceinline__ float exponential2(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exponential(x * 0.693147181f);
#endif
}

// Returns exp(x) in two instructions of a GPU, to about 2 + |x| units in the last place; subnormal results are 0. For
// probabilities p = exp(x): the error is |x| p, small where p is.
__device__ __forceinline__ float exponential_fast(float x) {
#ifdef __CUDA_ARCH__
    return exponential2(x * 1.44269504f);
#else
    return exponential(x);
#endif
}

#endif
