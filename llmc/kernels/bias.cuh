// bias.cuh: the gradient of a bias: the sums of the columns of a matrix, over chunks of its
// rows and then over the chunks. The order of the sum depends on the number of rows alone.
//
// defines: bias_chunk_rows, column_sums, bias_backward, bias_backward_scratch
#ifndef LLMC_BIAS_CUH
#define LLMC_BIAS_CUH

#include "llmc/kernels/packs.cuh"

static constexpr unsigned BIAS_THREADS = 128, BIAS_MAX_CHUNKS = 256;
// Rows that a thread reads before it adds them: reads that overlap. Of 768 columns a
// multiprocessor has 6 warps, which need that many.
static constexpr size_t BIAS_BATCH = ROW_LANES > 1 ? 12 : 4;

// Returns the rows of a chunk, at least 16 if there are as many. They depend on N alone, and
// so does the order of the sum.
static inline size_t bias_chunk_rows(size_t N, size_t max_chunks = BIAS_MAX_CHUNKS) {
    size_t chunks = CEIL_DIV(N, (size_t)16);
    return CEIL_DIV(N, chunks < max_chunks ? chunks : max_chunks);
}

// Returns the floats of scratch that bias_backward needs.
static inline size_t bias_backward_scratch(size_t N, size_t OC) {
    return CEIL_DIV(N, bias_chunk_rows(N)) * OC;
}

// Computes partial[blockIdx.y, OC], the sum of dout[N, OC] over the chunk's rows. Each
// thread has W columns.
template <int W>
__global__ void __launch_bounds__(BIAS_THREADS, 6)
    bias_partial_kernel(float *partial, const floatX *dout, size_t N, size_t OC,
                        size_t chunk_rows) {
    size_t col = ((size_t)blockIdx.x * BIAS_THREADS + threadIdx.x) * W;
    if (col >= OC) return;
    size_t begin = blockIdx.y * chunk_rows;
    size_t end = begin + chunk_rows < N ? begin + chunk_rows : N;
    float sum[W] = {0.0f}, x[W];
    Late<W> rows[BIAS_BATCH];
    size_t row = begin;
    for (; row + BIAS_BATCH <= end; row += BIAS_BATCH) {
        UNROLL
        for (size_t r = 0; r < BIAS_BATCH; r++) load_late(rows[r], dout + (row + r) * OC + col);
        UNROLL
        for (size_t r = 0; r < BIAS_BATCH; r++) {
            unpack_late(x, rows[r]);
            for (int k = 0; k < W; k++) sum[k] += x[k];
        }
    }
    for (; row < end; row++) {
        load_floats<W>(x, dout + row * OC + col);
        for (int k = 0; k < W; k++) sum[k] += x[k];
    }
    store_floats<W>(partial + blockIdx.y * OC + col, sum);
}

// Adds rows of partials to a column's sum, in batches of BATCH while enough rows are left. A
// lone read waits longer for memory than its addition takes.
template <size_t BATCH>
__device__ __forceinline__ void add_batches(float *sum, const float *partials, size_t *c,
                                            size_t chunks, size_t stride) {
    float x[BATCH];
    for (; *c + BATCH <= chunks; *c += BATCH) {
        UNROLL
        for (size_t k = 0; k < BATCH; k++) x[k] = partials[(*c + k) * stride];
        UNROLL
        for (size_t k = 0; k < BATCH; k++) *sum += x[k];
    }
}

// Second stage: a thread per column of partials [chunks, stride]. The first n sums go to
// `first`, the next n to `second` unless it is NULL.
__global__ void __launch_bounds__(BIAS_THREADS, 1)
    column_sums_kernel(float *first, float *second, const float *partials, size_t chunks,
                       size_t stride, size_t n, bool accumulate) {
    size_t i = (size_t)blockIdx.x * BIAS_THREADS + threadIdx.x, c = 0;
    if (i >= (second ? 2 * n : n)) return;
    float sum = 0.0f;
    if (ROW_LANES > 1) add_batches<64>(&sum, partials + i, &c, chunks, stride);
    add_batches<16>(&sum, partials + i, &c, chunks, stride);
    add_batches<4>(&sum, partials + i, &c, chunks, stride);
    add_batches<1>(&sum, partials + i, &c, chunks, stride);
    float *out = i < n ? first + i : second + (i - n);
    *out = accumulate ? *out + sum : sum;
}

static inline void column_sums(float *first, float *second, const float *partials,
                               size_t chunks, size_t stride, size_t n, bool accumulate,
                               cudaStream_t stream) {
    unsigned blocks = (unsigned)CEIL_DIV(second ? 2 * n : n, (size_t)BIAS_THREADS);
    LAUNCH(column_sums_kernel, blocks, BIAS_THREADS, stream)
    (first, second, partials, chunks, stride, n, accumulate);
}

// Computes dbias[OC] (float) = or += the sum over N of dout[N,OC]. scratch:
// bias_backward_scratch(N, OC) floats.
static inline void bias_backward(float *dbias, const floatX *dout, float *scratch, size_t N,
                                 size_t OC, bool accumulate, cudaStream_t stream) {
    size_t chunk_rows = bias_chunk_rows(N), chunks = CEIL_DIV(N, chunk_rows);
    kernel_cost(KERNEL_ELEMENTWISE, N * OC, sizeof(floatX), 1);
    by_packs<ELEMENT_PACK>(OC, [&](auto W) {
        dim3 grid((unsigned)CEIL_DIV(OC, (size_t)BIAS_THREADS * W), (unsigned)chunks);
        LAUNCH(bias_partial_kernel<W>, grid, BIAS_THREADS, stream)
        (scratch, dout, N, OC, chunk_rows);
    });
    column_sums(dbias, NULL, scratch, chunks, OC, OC, accumulate, stream);
}

#endif
