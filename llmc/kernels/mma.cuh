// mma.cuh: thin wrappers of the tensor-core instructions for bf16 (sm_80 and later) and
// their companions. All 32 lanes of a warp call them together. Fragments are laid out as
// the PTX ISA documents for m16n8k16. With g = lane / 4 and t = lane % 4:
//
//   a[0]  row g,     columns 2t, 2t+1          a[1]  row g + 8, the same
//   a[2]  row g,     columns 2t+8, 2t+9        a[3]  row g + 8, the same
//   b[0]  rows 2t, 2t+1,     column g          b[1]  rows 2t+8, 2t+9, column g
//   d[0], d[1]  row g, columns 2t, 2t+1        d[2], d[3]  row g + 8, the same
//
// So two neighbouring d fragments, rounded, are an a fragment. llmc/cpu/tensor_core.h does
// the same on a CPU.
//
// defines: DYNAMIC_SHARED, LAUNCH_LARGE, multiprocessor_shared, bfloat16, SharedTile,
//          ldmatrix_x4, matrix_row, mma_product, quad_sum, quad_max, warp_gather, warp_any,
//          pack_bf16, low_float, high_float, copy_async16, copy_async4, copy_async_commit,
//          copy_async_wait
#ifndef LLMC_MMA_CUH
#define LLMC_MMA_CUH

#include "llmc/kernels/cuda_common.cuh"
#ifndef __CUDACC__
#include "tensor_core.h"
#else

// Declares the shared memory whose size the launch gives.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) uint8_t name[]

// Launches a kernel with more dynamic shared memory than the 48 KiB that need no
// permission.
#define LAUNCH_LARGE(kernel, grid, block, stream, bytes)                                  \
    (CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, \
                                     bytes)),                                             \
     LAUNCH(kernel, grid, block, stream, bytes))

// Returns bytes of a multiprocessor's shared memory.
static inline size_t multiprocessor_shared(void) {
    int device, bytes;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                      device));
    return (size_t)bytes;
}
#endif

typedef __nv_bfloat16 bfloat16;

// A place in a tile in shared memory. A GPU's instructions take it as 32 bits. They are
// hidden from the compiler, which would compute a known shared address again in every loop.
struct SharedTile {
#ifdef __CUDACC__
    uint32_t address;
    __device__ __forceinline__ explicit SharedTile(const bfloat16 *p)
        : address((uint32_t)__cvta_generic_to_shared(p)) {
        asm volatile("" : "+r"(address));
    }
    __device__ __forceinline__ SharedTile operator+(int elements) const {
        SharedTile there = *this;
        there.address += 2 * elements;
        return there;
    }
#else
    bfloat16 *address;
    explicit SharedTile(const bfloat16 *p) : address((bfloat16 *)p) {
    }
    SharedTile operator+(int elements) const {
        return SharedTile(address + elements);
    }
#endif
};

// Returns two numbers rounded to bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef __CUDACC__
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
#else
    return (uint32_t)__float2bfloat16_rn(high).__x << 16 | __float2bfloat16_rn(low).__x;
#endif
}

__device__ __forceinline__ float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
// Return the two numbers of a pair.
__device__ __forceinline__ float low_float(uint32_t pair) {
    return bits_float(pair << 16);
}
__device__ __forceinline__ float high_float(uint32_t pair) {
    return bits_float(pair & 0xFFFF0000u);
}

#ifdef __CUDACC__
// Computes d[16,8] += a[16,16] b[16,8].
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, "
        "%6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Loads four 8 x 8 matrices from shared memory. Lane l gives the address, a multiple of 16
// bytes, of row l % 8 of matrix l / 8. Register i gets row g of matrix i, columns 2t and
// 2t+1; with TRANS, column g, rows 2t and 2t+1.
template <bool TRANS>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&registers)[4], SharedTile row) {
#ifdef __CUDACC__
#define LDMATRIX(trans)                                                                  \
    asm volatile(                                                                        \
        "ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4];"      \
        : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3]) \
        : "r"(row.address)                                                               \
        : "memory")
    if constexpr (TRANS)
        LDMATRIX(".trans");
    else
        LDMATRIX("");
#else
    cpu_check_aligned(row.address);
    CpuLdmatrix lane;
    lane.registers = registers;
    lane.row = row.address;
    lane.trans = TRANS;
    cpu_warp_together(&lane);
#endif
}

// Returns the lane's address for the first ldmatrix of a product with a tile. Its rows are
// STRIDE elements apart: b^T as tile[n][k], or with TRANS b itself as tile[k][n].
template <bool TRANS, int STRIDE>
__device__ __forceinline__ SharedTile matrix_row(const bfloat16 *tile) {
    // Matrices 0 and 1 are the two halves of k for one column tile, 2 and 3 those for the
    // next.
    int lane = threadIdx.x % 32, k = lane / 8 % 2 * 8, n = lane / 16 * 8;
    return SharedTile(TRANS ? tile + (k + lane % 8) * STRIDE + n
                            : tile + (n + lane % 8) * STRIDE + k);
}

// Adds to d[m][16, 8 N8] the product a[m][16, 16 K16] b for each m. It reads b once.
// d[m][n] and a[m][k] are fragments, N8 is even, and row is matrix_row of b's tile.
template <bool TRANS, int STRIDE, int M, int N8, int K16>
__device__ __forceinline__ void mma_product(float (&d)[M][N8][4],
                                            const uint32_t (&a)[M][K16][4],
                                            SharedTile row) {
    static_assert(N8 % 2 == 0 && STRIDE % 8 == 0,
                  "two column tiles at a time, rows of 16 bytes");
    constexpr int k_step = TRANS ? 16 * STRIDE : 16, n_step = TRANS ? 16 : 16 * STRIDE;
#ifdef __CUDACC__
    UNROLL
    for (int i = 0; i < K16; i++) {
        UNROLL
        for (int j = 0; j < N8; j += 2) {
            uint32_t b[4];
            ldmatrix_x4<TRANS>(b, row + (i * k_step + j / 2 * n_step));
            UNROLL
            for (int m = 0; m < M; m++) {
                mma_bf16(d[m][j], a[m][i], b[0], b[1]);
                mma_bf16(d[m][j + 1], a[m][i], b[2], b[3]);
            }
        }
    }
#else
    cpu_check_aligned(row.address);
    for (int m = 0; m < M; m++) {
        CpuMmaProduct<N8, K16> product;
        product.d = d[m];
        product.a = a[m];
        product.row = row.address;
        product.trans = TRANS;
        product.k_step = k_step;
        product.n_step = n_step;
        cpu_warp_together(&product);
    }
#endif
}
template <bool TRANS, int STRIDE, int N8, int K16>
__device__ __forceinline__ void mma_product(float (&d)[N8][4], const uint32_t (&a)[K16][4],
                                            SharedTile row) {
    mma_product<TRANS, STRIDE>(reinterpret_cast<float(&)[1][N8][4]>(d),
                               reinterpret_cast<const uint32_t(&)[1][K16][4]>(a), row);
}

// Sums each of the two values, or takes the largest, over the four lanes of a row of d.
template <bool SUM>
__device__ __forceinline__ void quad_reduce(float (&x)[2]) {
    UNROLL
    for (int offset = 1; offset < 4; offset *= 2) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            float other = __shfl_xor_sync(0xFFFFFFFFu, x[i], offset);
            x[i] = SUM ? x[i] + other : fmaxf(x[i], other);
        }
    }
}
__device__ __forceinline__ void quad_sum(float (&x)[2]) {
    quad_reduce<true>(x);
}
__device__ __forceinline__ void quad_max(float (&x)[2]) {
    quad_reduce<false>(x);
}

// Writes to all[i] the x of lane i * STRIDE among the lane's COUNT lanes, which are STRIDE
// apart. <4, 1> are the lanes of a row of d, <8, 4> the lanes of a column.
template <int COUNT, int STRIDE>
__device__ __forceinline__ void warp_gather(uint32_t (&all)[COUNT], uint32_t x) {
    int lane = threadIdx.x % 32, first = lane - lane / STRIDE % COUNT * STRIDE;
    UNROLL
    for (int i = 0; i < COUNT; i++)
        all[i] = __shfl_sync(0xFFFFFFFFu, x, first + i * STRIDE);
}

// True if x is true in any lane. Use it only for work that changes nothing if x is false in
// all lanes. On a CPU asking costs more than such work, so it always returns true.
__device__ __forceinline__ bool warp_any(bool x) {
#ifdef __CUDACC__
    return __any_sync(0xFFFFFFFFu, x);
#else
    (void)x;
    return true;
#endif
}

// Starts a copy of 16 bytes, or of a float, from global to shared memory. It is there after
// copy_async_wait and a barrier. Zeros if not `exists`.
__device__ __forceinline__ void copy_async16(SharedTile to, const void *global,
                                             bool exists) {
#ifdef __CUDACC__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.address),
                 "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
#else
    cpu_check_aligned(to.address);
    if (exists) cpu_check_aligned(global);
    cpu_copy_async(to.address, exists ? global : NULL, 16);
#endif
}
__device__ __forceinline__ void copy_async4(float *to, const float *global, bool exists) {
#ifdef __CUDACC__
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(global), "r"(exists ? 4 : 0)
                 : "memory");
#else
    cpu_copy_async(to, exists ? global : NULL, 4);
#endif
}
__device__ __forceinline__ void copy_async_commit() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    cpu_copies().group++;
#endif
}
// Waits until at most LEFT of the groups that this thread committed are in flight.
template <int LEFT>
__device__ __forceinline__ void copy_async_wait() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#else
    cpu_copy_wait(LEFT);
#endif
}

#endif
