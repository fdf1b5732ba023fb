// cuda_common.cuh: shared by every kernel and trainer, for nvcc and for the CPU stand-ins
// alike.
// defines: floatX, FLOATX_NAME, CUDA_CHECK, CUBLAS_CHECK, CEIL_DIV, LAUNCH,
//          LAUNCH_UNCHECKED, UNROLL, ROLLED, to_float, from_float, larger, prefetch,
//          warp_sum, warp_max, block_sum, block_max
#ifndef LLMC_CUDA_COMMON_CUH
#define LLMC_CUDA_COMMON_CUH

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "llmc/kernels/work.cuh"

// The type of weights and activations. Gradients of weights, the optimizer and all sums are
// float or double.
#if defined(PRECISION_FP32)
typedef float floatX;
#define FLOATX_NAME "fp32"
#define CUDA_FLOATX CUDA_R_32F
#elif defined(PRECISION_BF16)
typedef __nv_bfloat16 floatX;
#define FLOATX_NAME "bf16"
#define CUDA_FLOATX CUDA_R_16BF
#else
#error "compile with -DPRECISION_FP32 or -DPRECISION_BF16"
#endif

#define CEIL_DIV(n, d) (((n) + (d)-1) / (d))

static inline void cuda_check(cudaError_t error, const char *file, int line,
                              const char *what) {
    if (error == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, cudaGetErrorString(error));
    exit(1);
}
// Ends the program when a CUDA call fails.
#define CUDA_CHECK(call) cuda_check((call), __FILE__, __LINE__, #call)

static inline void cublas_check(int status, const char *file, int line, const char *what) {
    if (status == 0) return;
    fflush(stdout);
    fprintf(stderr, "%s:%d: %s: cuBLAS status %d\n", file, line, what, status);
    exit(1);
}
// The same for calls that return a cublasStatus_t.
#define CUBLAS_CHECK(call) cublas_check((int)(call), __FILE__, __LINE__, #call)

// Ends the program if the device has refused the launch, at the end of its statement,
// because no later synchronisation would tell. cudaErrorNotReady is the trace of a query of
// unfinished work.
struct LaunchCheck {
    const char *file, *name;
    int line;
    ~LaunchCheck() {
        cudaError_t error = cudaGetLastError();
        if (error != cudaErrorNotReady) cuda_check(error, file, line, name);
    }
};

// LAUNCH(kernel, grid, block, stream)(args...) is kernel<<<grid, block, 0,
// stream>>>(args...), checked. One more argument behind stream: bytes of dynamic shared
// memory. A template's name with commas stands in parentheses. A grid without blocks is
// refused. Every batch has rows, but a rank may have no pieces, no shard, or no keys of a
// pair: callers test for that first. LAUNCH_UNCHECKED leaves the error to cudaGetLastError,
// for tests of refused launches.
#define LAUNCH(kernel, grid, block, ...)                    \
    (LaunchCheck{__FILE__, "launch of " #kernel, __LINE__}, \
     LAUNCH_UNCHECKED(kernel, grid, block, __VA_ARGS__))

template <class T>
__host__ __device__ static inline float to_float(T x) {
    return (float)x;
}

// Rounds to nearest, ties to even: from_float<T>(x).
template <class T>
__host__ __device__ static inline T from_float(float x) {
    return T(x);
}

// Functions for which a GPU has instructions. A CPU has them in llmc/cpu: launch.h,
// vectors.h and warp.h.
#ifdef __CUDACC__
#define LAUNCH_UNCHECKED(kernel, grid, block, ...)                                      \
    [=](auto... args) {                                                                 \
        kernel<<<grid, block, launch_bytes(__VA_ARGS__), launch_stream(__VA_ARGS__)>>>( \
            args...);                                                                   \
    }
static inline size_t launch_bytes(cudaStream_t, size_t bytes = 0) {
    return bytes;
}
static inline cudaStream_t launch_stream(cudaStream_t stream, size_t = 0) {
    return stream;
}

// UNROLL stands before a loop of constant length whose arrays should be registers. The
// other stands before a loop that spills registers if it is unrolled.
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

// Returns the larger of two numbers; a if b is NaN.
__device__ static inline float larger(float a, float b) {
    return fmaxf(a, b);
}
__device__ static inline double larger(double a, double b) {
    return fmax(a, b);
}

// Has a CPU fetch the cache line of p; a GPU has other warps to run while one waits.
__device__ __forceinline__ void prefetch(const void *) {
}

// Returns the sum or the largest of a full warp's 32 values to every lane, in an order that
// never changes.
template <bool SUM, class T>
__device__ static inline T warp_reduce(T x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        T other = __shfl_xor_sync(0xFFFFFFFFu, x, offset);
        x = SUM ? x + other : larger(x, other);
    }
    return x;
}
#endif
template <class T>
__device__ static inline T warp_sum(T x) {
    return warp_reduce<true>(x);
}
template <class T>
__device__ static inline T warp_max(T x) {
    return warp_reduce<false>(x);
}

// Does the same over a block of full warps: each warp, then the warps in their order. Ends
// with a barrier, so that the next call may follow at once.
template <bool SUM, class T>
__device__ static inline T block_reduce(T x) {
    __shared__ T of_warp[32];
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned warps = blockDim.x * blockDim.y * blockDim.z / 32;
    x = warp_reduce<SUM>(x);
    if (thread % 32 == 0) of_warp[thread / 32] = x;
    __syncthreads();
    T total = of_warp[0];
    for (unsigned w = 1; w < warps; w++)
        total = SUM ? total + of_warp[w] : larger(total, of_warp[w]);
    __syncthreads();
    return total;
}
template <class T>
__device__ static inline T block_sum(T x) {
    return block_reduce<true>(x);
}
template <class T>
__device__ static inline T block_max(T x) {
    return block_reduce<false>(x);
}

#endif
