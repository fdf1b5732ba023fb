// exponential.cuh: exponentials: hardware on a GPU, arithmetic that a compiler vectorises on a CPU.
//
// defines: exponential, exponential_from, exponential_softmax, exponential_fast, exponential2
#ifndef LLMC_EXPONENTIAL_CUH
#define LLMC_EXPONENTIAL_CUH

#include <math.h>

#include "llmc/kernels/cuda_common.cuh"

// Returns p in exp(x) = p 2^n, and n in the low bits of *whole, for x between -104 and 89. A CPU has only a function
// call for one number, so here it is a few multiplications, which vectorise.
__device__ __forceinline__ float exponential_parts(float x, uint32_t *whole) {
    // x = n ln 2 + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer, left in the low bits.
    float shifted = fmaf(x, 1.44269504f, 12582912.0f);
    float n = shifted - 12582912.0f;
    float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
    // exp(r) = 1 + r + r^2 q(r), q interpolated at the Chebyshev nodes
    float q = 1.392617611e-3f;
    q = fmaf(q, r, 8.363173074e-3f);
    q = fmaf(q, r, 4.1666554662e-2f);
    q = fmaf(q, r, 1.66665770255e-1f);
    q = fmaf(q, r, 0.5f);
    memcpy(whole, &shifted, sizeof shifted);
    return fmaf(q, r * r, r) + 1.0f;
}

// Returns exp(x) to about one unit in the last place; 0 and infinity at the ends, NaN for NaN.
__device__ __forceinline__ float exponential(float x) {
#ifdef __CUDA_ARCH__
    return expf(x);
#else
    // exp rounds to 0 from -104 on, and to infinity from 89 on. Written so that NaN stays.
    x = x < -104.0f ? -104.0f : x;
    uint32_t whole;
    float p = exponential_parts(x > 89.0f ? 89.0f : x, &whole);
    // times 2^n in two halves, so that neither leaves the range of a float
    whole -= 0x4B400000u;
    uint32_t half = (uint32_t)((int32_t)whole >> 1);
    uint32_t scale1 = (half + 127u) << 23, scale2 = (whole - half + 127u) << 23;
    float s1, s2;
    memcpy(&s1, &scale1, sizeof s1);
    memcpy(&s2, &scale2, sizeof s2);
    return p * s1 * s2;
#endif
}

// Returns exp(x), but exp(least) below `least`, which is -87 or more. On a CPU it has a third fewer instructions, and
// is infinite from 88.4 on.
__device__ __forceinline__ float exponential_from(float least, float x) {
    x = x < least ? least : x;
#ifdef __CUDA_ARCH__
    return expf(x);
#else
    uint32_t whole;
    float p = exponential_parts(x > 89.0f ? 89.0f : x, &whole), scale;
    whole = (whole << 23) + 0x3F800000u;
    memcpy(&scale, &whole, sizeof scale);
    return p * scale;
#endif
}

// Returns exp(x) as above, but 0 below e^-80, which is nothing beside the sum of a softmax: a CPU is slow at subnormal
// numbers.
__device__ __forceinline__ float exponential_softmax(float x) {
    return x < -80.0f ? 0.0f : exponential_from(-80.0f, x);
}

// Returns 2^x to about two units in the last place; subnormal results are 0.
__device__ __forceinline__ float exponential2(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exponential_softmax(x * 0.693147181f);
#endif
}

// Returns exp(x) in two instructions of a GPU, to about 2 + |x| units in the last place; subnormal results are 0. For
// probabilities p = exp(x): the error is |x| p, small where p is.
__device__ __forceinline__ float exponential_fast(float x) {
#ifdef __CUDA_ARCH__
    return exponential2(x * 1.44269504f);
#else
    return exponential_softmax(x);
#endif
}

#endif
