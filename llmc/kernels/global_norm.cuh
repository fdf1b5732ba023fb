// global_norm.cuh: the squared norm of every gradient tensor, in double. Summed in the
// table's order they give the global norm. A tensor with a norm that is not finite shows
// where training broke.
//
// defines: global_norm_squared, global_norm_scratch
#ifndef LLMC_GLOBAL_NORM_CUH
#define LLMC_GLOBAL_NORM_CUH

#include "llmc/kernels/packs.cuh"

// A piece is cut into chunks, at most NORM_CHUNKS of at least NORM_ELEMENTS elements. So
// the order of its sum depends on its size alone.
enum { NORM_CHUNKS = 1024, NORM_ELEMENTS = 16384, NORM_WIDTH = 8 };

__host__ __device__ __forceinline__ size_t norm_chunk_elements(size_t size) {
    size_t elements = CEIL_DIV(size, (size_t)NORM_CHUNKS * NORM_WIDTH) * NORM_WIDTH;
    return elements < NORM_ELEMENTS ? (size_t)NORM_ELEMENTS : elements;
}

__host__ __device__ __forceinline__ size_t norm_chunk_count(size_t size) {
    return CEIL_DIV(size, norm_chunk_elements(size));
}

// Returns the sum of squares of a thread's share of the packs at g. Its order does not
// depend on the alignment, only the loads do.
template <bool ALIGNED>
__device__ __forceinline__ double norm_share(const float *g, Share s) {
    double sums[NORM_WIDTH] = {0.0};
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float x[NORM_WIDTH];
        if constexpr (ALIGNED)
            load_floats<NORM_WIDTH>(x, g + i * NORM_WIDTH);
        else
            memcpy(x, g + i * NORM_WIDTH, sizeof x);
        for (int k = 0; k < NORM_WIDTH; k++) sums[k] += (double)x[k] * (double)x[k];
    }
    return sum_of<NORM_WIDTH>(sums);
}

// First stage: the blocks of one blockIdx.x share a piece, and each row of threads takes a
// chunk of it. scratch is [count, max_chunks].
__global__ void __launch_bounds__(ROW_THREADS)
    global_norm_kernel(double *scratch, const float *grads, const Piece *pieces,
                       size_t max_chunks) {
    size_t size = pieces[blockIdx.x].hi - pieces[blockIdx.x].lo;
    size_t chunk = (size_t)blockIdx.y * BLOCK_ROWS + threadIdx.x / ROW_LANES;
    if (chunk >= norm_chunk_count(size)) return;
    size_t elements = norm_chunk_elements(size), first = chunk * elements;
    size_t count = size - first < elements ? size - first : elements;
    const float *g = grads + pieces[blockIdx.x].lo + first;
    Share s = row_share(count / NORM_WIDTH);
    double sum = (uintptr_t)g % 16 == 0 ? norm_share<true>(g, s) : norm_share<false>(g, s);
    if (row_lane() == 0)
        for (size_t i = count - count % NORM_WIDTH; i < count; i++)
            sum += (double)g[i] * (double)g[i];
    sum = row_sum(sum);
    if (row_lane() == 0) scratch[blockIdx.x * max_chunks + chunk] = sum;
}

// Second stage: a warp per piece adds its chunks.
__global__ void __launch_bounds__(32)
    global_norm_sum_kernel(double *out, const double *scratch, const Piece *pieces,
                           size_t max_chunks) {
    const double *chunks = scratch + blockIdx.x * max_chunks;
    double sum = 0.0;
    Share s = share_of(norm_chunk_count(pieces[blockIdx.x].hi - pieces[blockIdx.x].lo),
                       threadIdx.x, 32);
    for (size_t i = s.begin; i < s.end; i += s.step) sum += chunks[i];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Returns the doubles of scratch for global_norm_squared.
static inline size_t global_norm_scratch(size_t count, size_t max_size) {
    return count * norm_chunk_count(max_size);
}

// Computes out[count], the sum of squares of each piece of grads. pieces[count] is on the
// device. max_size, at least 1, is the largest piece, and n the size of all, or a little
// more for padding. A NaN or infinity reaches the sum of its own piece only.
static inline void global_norm_squared(double *out, double *scratch, const float *grads,
                                       const Piece *pieces, size_t count, size_t max_size,
                                       size_t n, cudaStream_t stream) {
    if (count == 0) return;
    size_t max_chunks = norm_chunk_count(max_size);
    // A cluster's optimizer_bytes have it in.
    kernel_cost(KERNEL_NONE, n, sizeof(float), 2);
    dim3 grid((unsigned)count, row_blocks(max_chunks));
    LAUNCH(global_norm_kernel, grid, ROW_THREADS, stream)
    (scratch, grads, pieces, max_chunks);
    LAUNCH(global_norm_sum_kernel, (unsigned)count, 32, stream)
    (out, scratch, pieces, max_chunks);
}

#endif
