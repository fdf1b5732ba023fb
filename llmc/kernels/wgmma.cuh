// wgmma.cuh: the asynchronous instructions of Hopper (sm_90a), and their barriers.
//   wgmma     products by a warpgroup of 128 threads;
//   TMA       copies of tiles by the copy engine;
//   mbarrier  barriers in shared memory, on which threads wait for a copy or for each other.
// llmc/cpu/warpgroup.h does the same on a CPU, as late as a GPU may.
//
// A tile has rows of HS channels, 64 or 128, in panels of 64. A panel's rows are 128 bytes
// each, and each panel begins at a multiple of 1024 bytes. The copy engine swizzles the
// eight 16-byte pieces of a row: piece i of row r lies at place i ^ r % 8. So eight
// neighbouring rows of a column lie in different banks. Products undo it.
//
// defines: WGMMA_CODE, wgmma_device, device_multiprocessors, shared_address, barrier_init,
//          barriers_ready, barrier_expect, barrier_arrive, barrier_wait, warpgroup_barrier,
//          tensor_map, tile_copy, registers_less, registers_more, wgmma_fence,
//          wgmma_commit, wgmma_wait, pin, fresh, product_rows, product_columns
#ifndef LLMC_WGMMA_CUH
#define LLMC_WGMMA_CUH

#include "llmc/kernels/mma.cuh"

#ifndef __CUDACC__
#define WGMMA_CODE 1
#include "warpgroup.h"
#else
#include <cuda.h>

// Kernels are compiled for every architecture, and have a body on this one only.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_CODE 1
#endif

// True where wgmma runs: GPUs of compute capability 9.0, whose later generations have other
// instructions.
static inline bool wgmma_device(void) {
    int device, major;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major == 9;
}

static inline int device_multiprocessors(void) {
    int device, count;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// ---- barriers: addresses of 8 bytes in shared memory -----------------------------------
// A phase of a barrier ends when `count` threads have arrived and all expected bytes are
// there. Phases are numbered 0, 1, 0, 1, ...: the parity.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count)
                 : "memory");
}

// Shows initialised barriers to the copy engine; __syncthreads must follow.
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives at the barrier. Adds the bytes that copies will bring in this phase.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase of this parity. A phase of the other parity must not end
// meanwhile.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Waits for the 128 threads of warpgroup wg.
__device__ __forceinline__ void warpgroup_barrier(int wg) {
    asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory");
}

// ---- copies by the copy engine ---------------------------------------------------------

// Describes x[B, T, heads, HS] for copies of 64 rows of 64 channels of a head. It takes
// 0.13 us.
static inline CUtensorMap tensor_map(const bfloat16 *x, size_t B, size_t T, size_t heads,
                                     size_t HS) {
    // A function of the driver, to which programs are not linked.
    static decltype(&cuTensorMapEncodeTiled) encode;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault, &found));
#else
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", (void **)&encode,
                                           cudaEnableDefault, &found));
#endif
    }
    CUtensorMap map;
    cuuint64_t size[4] = {HS, heads, T, B};
    cuuint64_t stride[3] = {HS * 2, heads * HS * 2, T * heads * HS * 2};
    cuuint32_t box[4] = {64, 1, 64, 1}, step[4] = {1, 1, 1, 1};
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (encode)
        result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)x, size, stride,
                        box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B,
                        HS > 64 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return map;
    fprintf(stderr,
            "error: cuTensorMapEncodeTiled: error %d; is the driver older than CUDA 12?\n",
            (int)result);
    exit(1);
}

// Starts the copy of 64 rows of 64 channels: 8 KiB that the barrier expects. Rows beyond T
// come as zeros.
__device__ __forceinline__ void tile_copy(uint32_t to, const CUtensorMap *map,
                                          uint32_t barrier, int channel, int head, int row,
                                          int sequence) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(channel), "r"(head), "r"(row), "r"(sequence)
        : "memory");
}

// Gives registers of this warpgroup back, or takes more: N a thread.
template <int N>
__device__ __forceinline__ void registers_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- products --------------------------------------------------------------------------

// Orders this thread's writes to the registers of products before the products.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a group of products.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most LEFT groups are in flight. Before, nothing may touch their registers.
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving uses of registers over a fence or a wait.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N][4]) {
    UNROLL
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&a)[N][4]) {
    UNROLL
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}
// Says that old values are not needed: a product that does not add writes them unread.
template <int N>
__device__ __forceinline__ void fresh(float (&d)[N][4]) {
    UNROLL
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "=f"(d[i / 4][i % 4])::"memory");
}

#define WGMMA_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_D16(i) WGMMA_D4(i), WGMMA_D4(i + 1), WGMMA_D4(i + 2), WGMMA_D4(i + 3)
#define WGMMA_D32 WGMMA_D16(0), WGMMA_D16(4)
#define WGMMA_D64 WGMMA_D32, WGMMA_D16(8), WGMMA_D16(12)
#define WGMMA_32                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, "                                                                       \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_64                                                                    \
    WGMMA_32                                                                        \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
    "%47, "                                                                         \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Computes d[64, 8 N8] = a b^T, or += if `add`. a[64, 16] and b[8 N8, 16] are in shared
// memory, by descriptors.
__device__ __forceinline__ void wgmma_rows(float (&d)[8][4], uint64_t a, uint64_t b,
                                           int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_32
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : WGMMA_D32
        : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_rows(float (&d)[16][4], uint64_t a, uint64_t b,
                                           int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_64
        "}, %64, %65, p, 1, 1, 0, 0;\n}"
        : WGMMA_D64
        : "l"(a), "l"(b), "r"(add));
}
// Computes d[64, 8 N8] += a b. a[64, 16] is fragments in registers, of 16 rows a warp, and
// b[16, 8 N8] is in shared memory.
__device__ __forceinline__ void wgmma_columns(float (&d)[8][4], const uint32_t (&a)[4],
                                              uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_32
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
        : WGMMA_D32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_columns(float (&d)[16][4], const uint32_t (&a)[4],
                                              uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_64
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
        : WGMMA_D64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

// Describes a matrix in shared memory. Its bits are:
//   0-13   address / 16.
//   16-29  If the rows that are not summed over lie along a panel's rows: bytes / 16 to the
//          next 64 of them.
//   32-45  Bytes / 16 from eight rows to the next.
//   62-63  The swizzle.
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, uint32_t next_panel) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(next_panel >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// Computes d = a b^T over HS channels. a has 64 rows from address a on in a tile of A_ROWS
// rows; b is a tile of 8 N8 rows.
template <int HS, int A_ROWS, int N8>
__device__ __forceinline__ void product_rows(float (&d)[N8][4], uint32_t a, uint32_t b) {
    UNROLL
    for (int k = 0; k < HS / 16; k++) {
        const uint32_t in_a = k / 4 * A_ROWS * 128 + k % 4 * 32;
        const uint32_t in_b = k / 4 * N8 * 8 * 128 + k % 4 * 32;
        wgmma_rows(d, wgmma_matrix(a + in_a, 16), wgmma_matrix(b + in_b, 16), k > 0);
    }
}

// Computes d += a b: a as fragments, b a tile of 16 K16 rows of 8 N8 channels.
template <int K16, int N8>
__device__ __forceinline__ void product_columns(float (&d)[N8][4],
                                                const uint32_t (&a)[K16][4], uint32_t b) {
    UNROLL
    for (int k = 0; k < K16; k++)
        wgmma_columns(d, a[k], wgmma_matrix(b + k * 16 * 128, K16 * 16 * 128));
}

#endif
