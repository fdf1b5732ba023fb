// vectors.h: arithmetic in a CPU's vector registers: rows of attention side by side, and functions of one number that a
// compiler vectorises. A GPU's thread has one number in a register, and instructions for these functions
// (llmc/kernels/cuda_common.cuh, exponential.cuh).
#ifndef LLMC_CPU_VECTORS_H
#define LLMC_CPU_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <utility>

#ifdef __FMA__
#include <immintrin.h>
#endif

// ---------------------------------------------------------------------------------------------- attention

// CPU_ROWS: the rows of a thread; CPU_SUMS: those, or channels, that share a load of the thread's.
#if defined(__AVX512F__)
enum { CPU_ROWS = 32, CPU_SUMS = 8 };
#elif defined(__AVX__)
enum { CPU_ROWS = 16, CPU_SUMS = 4 };
#else
enum { CPU_ROWS = 8, CPU_SUMS = 4 };
#endif

// R floats: two vectors, so that each float of a tile is loaded for two products.
template <int R>
struct RowVector {
    typedef RowVector type;
    typedef float Half __attribute__((vector_size(2 * R)));
    Half a, b;
    RowVector() = default;
    RowVector(Half a_, Half b_) : a(a_), b(b_) {}
    RowVector(float x) : a(x - Half{}), b(x - Half{}) {}  // minus zero is no instruction
    void operator+=(const RowVector &y) { a += y.a, b += y.b; }
    void operator*=(const RowVector &y) { a *= y.a, b *= y.b; }
    friend RowVector operator*(const RowVector &x, const RowVector &y) { return {x.a * y.a, x.b * y.b}; }
    friend RowVector operator-(const RowVector &x, const RowVector &y) { return {x.a - y.a, x.b - y.b}; }
    friend RowVector operator/(const RowVector &x, const RowVector &y) { return {x.a / y.a, x.b / y.b}; }
};

// Returns sum + x y, rounded once where the machine has an instruction for it.
template <int R>
__attribute__((always_inline)) inline RowVector<R> add_product(RowVector<R> sum, RowVector<R> x, float y) {
#ifdef __AVX512F__
    if constexpr (sizeof sum.a == 64)
        return {_mm512_fmadd_ps(x.a, _mm512_set1_ps(y), sum.a), _mm512_fmadd_ps(x.b, _mm512_set1_ps(y), sum.b)};
#endif
#ifdef __FMA__
    if constexpr (sizeof sum.a == 32)
        return {_mm256_fmadd_ps(x.a, _mm256_set1_ps(y), sum.a), _mm256_fmadd_ps(x.b, _mm256_set1_ps(y), sum.b)};
#endif
    return {sum.a + x.a * y, sum.b + x.b * y};
}

// Transposes W vectors of W floats: each of log2(W) stages interleaves the first half of them with the second.
template <class V, int... I>
__attribute__((always_inline)) inline void transpose(V *x, std::integer_sequence<int, I...>) {
    constexpr int W = sizeof...(I);
    for (int stage = 1; stage < W; stage *= 2) {
        V y[W];
        for (int i = 0; i < W; i++) y[i] = x[i];
        for (int i = 0; i < W / 2; i++) {
            x[2 * i] = V{y[i + I % 2 * (W / 2)][I / 2]...};
            x[2 * i + 1] = V{y[i + I % 2 * (W / 2)][W / 2 + I / 2]...};
        }
    }
}

// ---------------------------------------------------------------------------------------------- one number

// Returns exp(x) to about one unit in the last place; 0 below e^-80, infinite from 88.4 on, NaN for NaN. expf is a
// function call for one number; this is a few multiplications, which vectorise.
__attribute__((always_inline)) static inline float exponential(float x) {
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
}

// Of these a CPU has no faster form.
__attribute__((always_inline)) static inline float exponential2(float x) { return exponential(x * 0.693147181f); }
__attribute__((always_inline)) static inline float exponential_fast(float x) { return exponential(x); }
static inline float __fdividef(float x, float y) { return x / y; }

// Returns the larger of two numbers; a if b is NaN.
template <class T> static inline T larger(T a, T b) { return b > a ? b : a; }

// Fetches the cache line of p.
static inline void prefetch(const void *p) { __builtin_prefetch(p); }

#endif
