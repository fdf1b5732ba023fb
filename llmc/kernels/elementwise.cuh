// elementwise.cuh: what the element and row kernels share: packs of elements read and written as floats,
// which packs a thread takes, and an exponential that a CPU compiler can vectorise.
//
// defines: load_floats, store_floats, sum_of, sum_strided, max_of, Share, share_of, ROW_LANES, LONG_ROW_THREADS,
//          row_share, row_sum, element_share, element_tail, element_blocks, aligned16, exponential
#ifndef LLMC_ELEMENTWISE_CUH
#define LLMC_ELEMENTWISE_CUH

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/kernels/cuda_common.cuh"

// Kernels are templates over W, the elements they treat at a time: x128::size (then every address and every
// row length must be a multiple of it), or 1 for anything else.

template <typename T>
__device__ __forceinline__ void unpack(float *out, const Packed128<T> &pack) {
    for (size_t k = 0; k < pack.size; k++) out[k] = to_float(pack.v[k]);
}
template <typename T>
__device__ __forceinline__ Packed128<T> pack_floats(const float *in) {
    Packed128<T> pack;
    for (size_t k = 0; k < pack.size; k++) pack.v[k] = from_float<T>(in[k]);
    return pack;
}
#ifndef __CUDACC__  // a CPU is slow at eight bfloat16 one by one
template <>
inline void unpack(float *out, const Packed128<__nv_bfloat16> &pack) { bf16x8_to_float(out, &pack.v[0].__x); }
template <>
inline Packed128<__nv_bfloat16> pack_floats<__nv_bfloat16>(const float *in) {
    Packed128<__nv_bfloat16> pack;
    bf16x8_from_float(&pack.v[0].__x, in);
    return pack;
}
#endif

// Reads W elements of type T at p as floats: by 128-bit loads if W fills them.
template <int W, typename T>
__device__ __forceinline__ void load_floats(float (&out)[W], const T *p) {
    constexpr int size = 16 / sizeof(T);
    if constexpr (W % size == 0) {
        for (int i = 0; i < W; i += size) unpack(out + i, load128(p + i));
    } else {
        for (int k = 0; k < W; k++) out[k] = to_float(p[k]);
    }
}

// Writes W floats to p, rounded to T.
template <int W, typename T>
__device__ __forceinline__ void store_floats(T *p, const float (&in)[W]) {
    constexpr int size = 16 / sizeof(T);
    if constexpr (W % size == 0) {
        for (int i = 0; i < W; i += size) store128(p + i, pack_floats<T>(in + i));
    } else {
        for (int k = 0; k < W; k++) p[k] = from_float<T>(in[k]);
    }
}

// The sum of W numbers, by halves: W is a power of two.
template <int W, typename T>
__device__ __forceinline__ T sum_of(const T (&x)[W]) {
    T y[W];
    for (int k = 0; k < W; k++) y[k] = x[k];
    for (int half = W / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) y[k] += y[k + half];
    }
    return y[0];
}

// The sum of x[0], x[stride], ... in that order, by one thread. It reads several before it adds them: a lone read waits
// longer for memory than its addition takes.
__device__ __forceinline__ float sum_strided(const float *x, size_t count, size_t stride) {
    constexpr size_t BATCH = 16;
    float sum = 0.0f, y[BATCH];
    size_t i = 0;
    for (; i + BATCH <= count; i += BATCH) {
        for (size_t k = 0; k < BATCH; k++) y[k] = x[(i + k) * stride];
        for (size_t k = 0; k < BATCH; k++) sum += y[k];
    }
    for (; i < count; i++) sum += x[i * stride];
    return sum;
}

// The largest of W floats; NaNs are passed over.
template <int W>
__device__ __forceinline__ float max_of(const float (&x)[W]) {
    float y[W];
    for (int k = 0; k < W; k++) y[k] = x[k];
    for (int half = W / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) y[k] = y[k + half] > y[k] ? y[k + half] : y[k];
    }
    return y[0];
}

// The packs of one thread: for (size_t i = s.begin; i < s.end; i += s.step).
typedef struct {
    size_t begin, end, step;
} Share;

// Divides n packs among `count` threads. The threads of a GPU run in step, so neighbours take neighbouring
// packs and a warp reads whole cache lines; those of the CPU run one after the other, so each takes a
// contiguous piece.
//
// ROW_LANES of the 32 threads of a warp share a row, and LONG_ROW_THREADS one of tens of thousands of
// elements. On a GPU these are many: a row is read at once, and the long rows at work at one time fit in the
// L2 cache. On the CPU more threads gain nothing, and each must be resumed at every reduction: a row is short
// enough for one.
#ifdef __CUDACC__
static constexpr int ROW_LANES = 32;
static constexpr unsigned LONG_ROW_THREADS = 512;

__device__ __forceinline__ Share share_of(size_t n, size_t index, size_t count) {
    Share s = {index, n, count};
    return s;
}
#else
static constexpr int ROW_LANES = 1;
static constexpr unsigned LONG_ROW_THREADS = 32;

static inline Share share_of(size_t n, size_t index, size_t count) {
    size_t piece = CEIL_DIV(n, count), begin = index * piece < n ? index * piece : n;
    Share s = {begin, n - begin < piece ? n : begin + piece, 1};
    return s;
}
#endif

// A row of n packs divided among the first LANES threads of a warp; the others get none.
template <int LANES>
__device__ __forceinline__ Share row_share(size_t n) {
    size_t lane = threadIdx.x % 32;
    Share none = {n, n, 1};
    return lane < LANES ? share_of(n, lane, LANES) : none;
}

// The sum over the LANES (32 or 1) threads that share a row.
template <int LANES, typename T>
__device__ __forceinline__ T row_sum(T x) {
    static_assert(LANES == 32 || LANES == 1, "a row belongs to a warp or to a thread");
    if constexpr (LANES == 32) x = warp_sum(x);
    return x;
}

// Element kernels: blocks of ELEMENT_THREADS threads, each of which takes about 16 elements.
static constexpr unsigned ELEMENT_THREADS = 256, ELEMENTS_PER_THREAD = 16;

// The packs of the whole array that this thread of an element kernel takes; n counts elements.
template <int W>
__device__ __forceinline__ Share element_share(size_t n) {
    size_t packs = n / W, chunk = (size_t)ELEMENT_THREADS * ELEMENTS_PER_THREAD / W;
    size_t first = blockIdx.x * chunk;
    size_t count = first >= packs ? 0 : packs - first < chunk ? packs - first : chunk;
    Share s = share_of(count, threadIdx.x, ELEMENT_THREADS);
    s.begin += first;
    s.end += first;
    return s;
}

// Which of the last n % W elements this thread treats, n for none: each has a thread of the first block.
template <int W>
__device__ __forceinline__ size_t element_tail(size_t n) {
    return W > 1 && blockIdx.x == 0 && threadIdx.x < n % W ? n - n % W + threadIdx.x : n;
}

static inline unsigned element_blocks(size_t n) {
    return (unsigned)CEIL_DIV(n, (size_t)ELEMENT_THREADS * ELEMENTS_PER_THREAD);
}

static inline bool aligned16(const void *p) { return (uintptr_t)p % 16 == 0; }

// exp(x) to about one unit in the last place; 0 and infinity at the ends, NaN for NaN. A GPU has hardware for
// it. A CPU has only a function call for one number, so here it is a few multiplications, which the compiler
// vectorises.
__device__ __forceinline__ float exponential(float x) {
#ifdef __CUDA_ARCH__
    return expf(x);
#else
    // exp rounds to 0 from -104 on, and to infinity from 89 on. Written so that NaN stays.
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
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
    float p = fmaf(q, r * r, r) + 1.0f;
    // times 2^n in two halves, so that neither leaves the range of a float
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    uint32_t whole = (uint32_t)bits - 0x4B400000u;
    uint32_t half = (uint32_t)((int32_t)whole >> 1);
    uint32_t scale1 = (half + 127u) << 23, scale2 = (whole - half + 127u) << 23;
    float s1, s2;
    memcpy(&s1, &scale1, sizeof s1);
    memcpy(&s2, &scale2, sizeof s2);
    return p * s1 * s2;
#endif
}

#endif
