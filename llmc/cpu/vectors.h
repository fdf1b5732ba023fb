// vectors.h: functions of one number that a compiler vectorises. A GPU has instructions for
// them (llmc/kernels/cuda_common.cuh, exponential.cuh).
#ifndef LLMC_CPU_VECTORS_H
#define LLMC_CPU_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

// Returns exp(x) to about one unit in the last place: 0 below e^-80, infinite from 88.4 on,
// NaN for NaN. expf is a function call for one number. This takes a few multiplications,
// which vectorise.
__attribute__((always_inline)) static inline float exponential(float x) {
    // y = n ln 2 + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer, left in
    // the low bits.
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
}

// A CPU has no faster form of these.
__attribute__((always_inline)) static inline float exponential2(float x) {
    return exponential(x * 0.693147181f);
}
__attribute__((always_inline)) static inline float exponential_fast(float x) {
    return exponential(x);
}
static inline float __fdividef(float x, float y) {
    return x / y;
}

// Returns the larger of two numbers; a if b is NaN.
template <class T>
static inline T larger(T a, T b) {
    return b > a ? b : a;
}

// Fetches the cache line of p.
static inline void prefetch(const void *p) {
    __builtin_prefetch(p);
}

#endif
