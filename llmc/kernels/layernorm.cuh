// layernorm.cuh: layer normalisation over the channels, alone and after the residual addition that precedes
// it.
//
// defines: layernorm_forward, layernorm_residual_forward, residual_forward, layernorm_backward,
//          layernorm_backward_scratch, reduce_scratch_floats
#ifndef LLMC_LAYERNORM_CUH
#define LLMC_LAYERNORM_CUH

#include "llmc/kernels/bias.cuh"
#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/shares.cuh"

enum {
    LAYERNORM_WARPS = 8,            // most warps of a block: each has a row
    LAYERNORM_MAX_BLOCKS = 264,     // of the backward pass: two for each multiprocessor of an H100
    LAYERNORM_ROWS_PER_BLOCK = 16,  // fewest rows a block of the backward pass is worth
    LAYERNORM_SHARED = 48 << 10,    // bytes of shared memory that any block may have
};
#define LAYERNORM_EPSILON 1e-5f

// residual = inp1 + (inp2 + bias), rounded once: W elements, kept as the floats that a later read of residual
// gives.
template <int W>
__device__ __forceinline__ void add_residual(float (&x)[W], floatX *residual, const floatX *inp1,
                                             const floatX *inp2, const floatX *bias) {
    float y[W], b[W];
    load_floats<W>(x, inp1);
    load_floats<W>(y, inp2);
    load_floats<W>(b, bias);
    for (int k = 0; k < W; k++) x[k] = (float)from_float<floatX>(x[k] + (y[k] + b[k]));
    store_floats<W>(residual, x);
}

// A warp per row. With inp1, the row is first made as residual = inp1 + (inp2 + inp2_bias); each thread reads
// back only what it wrote itself. The variance is of the centred values: no cancellation.
template <int W, int LANES>
__global__ void __launch_bounds__(32 * LAYERNORM_WARPS)
    layernorm_forward_kernel(floatX *out, float *mean, float *rstd, floatX *residual, const floatX *inp1,
                             const floatX *inp2, const floatX *inp2_bias, const floatX *weight,
                             const floatX *bias, size_t N, size_t C) {
    size_t n = (size_t)blockIdx.x * LAYERNORM_WARPS + threadIdx.x / 32;
    if (n >= N || threadIdx.x % 32 >= LANES) return;
    floatX *row = residual + n * C;
    Share s = row_share<LANES>(C / W);
    float x[W], sums[W] = {0.0f};
    for (size_t i = s.begin; i < s.end; i += s.step) {
        if (inp1) {
            add_residual<W>(x, row + i * W, inp1 + n * C + i * W, inp2 + n * C + i * W, inp2_bias + i * W);
        } else {
            load_floats<W>(x, row + i * W);
        }
        for (int k = 0; k < W; k++) sums[k] += x[k];
    }
    float m = row_sum<LANES>(sum_of<W>(sums)) / (float)C;
    for (int k = 0; k < W; k++) sums[k] = 0.0f;
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_floats<W>(x, row + i * W);
        for (int k = 0; k < W; k++) sums[k] += (x[k] - m) * (x[k] - m);
    }
    float r = 1.0f / sqrtf(row_sum<LANES>(sum_of<W>(sums)) / (float)C + LAYERNORM_EPSILON);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float w[W], b[W];
        load_floats<W>(x, row + i * W);
        load_floats<W>(w, weight + i * W);
        load_floats<W>(b, bias + i * W);
        for (int k = 0; k < W; k++) x[k] = (x[k] - m) * r * w[k] + b[k];
        store_floats<W>(out + n * C + i * W, x);
    }
    if (threadIdx.x % 32 == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

template <int W>
__global__ void __launch_bounds__(32 * LAYERNORM_WARPS)
    residual_forward_kernel(floatX *out, const floatX *inp1, const floatX *inp2, const floatX *inp2_bias,
                            size_t N, size_t C) {
    size_t n = (size_t)blockIdx.x * LAYERNORM_WARPS + threadIdx.x / 32;
    if (n >= N) return;
    Share s = row_share<ROW_LANES>(C / W);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t at = n * C + i * W;
        float x[W];
        add_residual<W>(x, out + at, inp1 + at, inp2 + at, inp2_bias + i * W);
    }
}

// First stage of the backward pass. A block takes rows_per_block rows, its warps one each in turn; a
// warp sums its rows' part of dweight and dbias in its own [2, C] floats, of which each thread touches only
// its columns. They are in shared memory, and the block adds its warps' sums to one row of partials [blocks,
// 2, C]; or, if C is too large for that or one thread has the row, the block has one warp and sums in
// partials directly.
template <int W, int LANES>
__global__ void __launch_bounds__(32 * LAYERNORM_WARPS)
    layernorm_backward_kernel(floatX *dinp, float *partials, const floatX *dresidual, const floatX *dout,
                              const floatX *inp, const floatX *weight, const float *mean, const float *rstd,
                              size_t N, size_t C, size_t rows_per_block, bool in_shared) {
    DYNAMIC_SHARED(float, shared);
    if (!in_shared && threadIdx.x % 32 >= LANES) return;
    size_t warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *partial = partials + (size_t)blockIdx.x * 2 * C;
    float *dweight = in_shared ? shared + warp * 2 * C : partial, *dbias = dweight + C;
    size_t first = (size_t)blockIdx.x * rows_per_block;
    size_t end = N - first < rows_per_block ? N : first + rows_per_block;
    Share s = row_share<LANES>(C / W);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float zero[W] = {0.0f};
        store_floats<W>(dweight + i * W, zero);
        store_floats<W>(dbias + i * W, zero);
    }
    for (size_t n = first + warp; n < end; n += warps) {
        const floatX *x_row = inp + n * C, *dout_row = dout + n * C;
        float m = mean[n], r = rstd[n], x[W], d[W], w[W], sums[W] = {0.0f}, dots[W] = {0.0f};
        for (size_t i = s.begin; i < s.end; i += s.step) {
            float dw[W], db[W];
            load_floats<W>(x, x_row + i * W);
            load_floats<W>(d, dout_row + i * W);
            load_floats<W>(w, weight + i * W);
            load_floats<W>(dw, dweight + i * W);
            load_floats<W>(db, dbias + i * W);
            for (int k = 0; k < W; k++) {
                float normal = (x[k] - m) * r, dnormal = d[k] * w[k];
                dw[k] += d[k] * normal;
                db[k] += d[k];
                sums[k] += dnormal;
                dots[k] += dnormal * normal;
            }
            store_floats<W>(dweight + i * W, dw);
            store_floats<W>(dbias + i * W, db);
        }
        float sum = row_sum<LANES>(sum_of<W>(sums)) / (float)C,
              dot = row_sum<LANES>(sum_of<W>(dots)) / (float)C;
        for (size_t i = s.begin; i < s.end; i += s.step) {
            float y[W] = {0.0f};
            load_floats<W>(x, x_row + i * W);
            load_floats<W>(d, dout_row + i * W);
            load_floats<W>(w, weight + i * W);
            if (dresidual) load_floats<W>(y, dresidual + n * C + i * W);
            for (int k = 0; k < W; k++) y[k] += (d[k] * w[k] - sum - (x[k] - m) * r * dot) * r;
            store_floats<W>(dinp + n * C + i * W, y);
        }
    }
    if (!in_shared) return;
    __syncthreads();
    s = share_of(2 * C, threadIdx.x, blockDim.x);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float sum = shared[i];
        for (size_t j = 1; j < warps; j++) sum += shared[j * 2 * C + i];
        partial[i] = sum;
    }
}

// Second stage: a thread per column of partials [blocks, 2, C], of which the first half is dweight's.
__global__ void __launch_bounds__(128)
    layernorm_backward_sum_kernel(float *dweight, float *dbias, const float *partials, size_t blocks,
                                  size_t C, bool accumulate) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 2 * C) return;
    float sum = sum_strided(partials + i, blocks, 2 * C);
    float *out = i < C ? dweight + i : dbias + (i - C);
    *out = accumulate ? *out + sum : sum;
}

// How many blocks the first stage has: it depends on N alone, so that the order of the sums does too.
static inline size_t layernorm_backward_blocks(size_t N) {
    size_t blocks = CEIL_DIV(N, (size_t)LAYERNORM_ROWS_PER_BLOCK);
    return blocks < LAYERNORM_MAX_BLOCKS ? blocks : (size_t)LAYERNORM_MAX_BLOCKS;
}

// With inp1 NULL, residual is only read.
template <int LANES>
static inline void layernorm_forward_launch(floatX *out, float *mean, float *rstd, floatX *residual,
                                            const floatX *inp1, const floatX *inp2, const floatX *inp2_bias,
                                            const floatX *weight, const floatX *bias, size_t N, size_t C,
                                            cudaStream_t stream) {
    if (N == 0) return;
    unsigned blocks = (unsigned)CEIL_DIV(N, (size_t)LAYERNORM_WARPS), threads = 32 * LAYERNORM_WARPS;
    kernel_cost(KERNEL_LAYERNORM_FORWARD, N * C, 2 * sizeof(floatX), 8);
    if (inp1) kernel_cost(KERNEL_RESIDUAL, N * C, 3 * sizeof(floatX), 2);
    if (C % x128::size == 0) {
        LAUNCH((layernorm_forward_kernel<x128::size, LANES>), blocks, threads, 0, stream)
        (out, mean, rstd, residual, inp1, inp2, inp2_bias, weight, bias, N, C);
    } else {
        LAUNCH((layernorm_forward_kernel<1, LANES>), blocks, threads, 0, stream)
        (out, mean, rstd, residual, inp1, inp2, inp2_bias, weight, bias, N, C);
    }
}

// out[N, C] = (inp - mean) * rstd * weight + bias by rows; keeps mean[N] and rstd[N] for the backward pass.
static inline void layernorm_forward(floatX *out, float *mean, float *rstd, const floatX *inp,
                                     const floatX *weight, const floatX *bias, size_t N, size_t C,
                                     cudaStream_t stream) {
    layernorm_forward_launch<ROW_LANES>(out, mean, rstd, (floatX *)inp, NULL, NULL, NULL, weight, bias, N, C,
                                        stream);
}

// residual[N, C] = inp1 + (inp2 + inp2_bias[C]), rounded once to floatX; out = layernorm(residual as stored).
// residual may be inp1 or inp2.
static inline void layernorm_residual_forward(floatX *residual, floatX *out, float *mean, float *rstd,
                                              const floatX *inp1, const floatX *inp2, const floatX *inp2_bias,
                                              const floatX *weight, const floatX *bias, size_t N, size_t C,
                                              cudaStream_t stream) {
    layernorm_forward_launch<ROW_LANES>(out, mean, rstd, residual, inp1, inp2, inp2_bias, weight, bias, N, C,
                                        stream);
}

// The first half of layernorm_residual_forward alone, with the same bits.
static inline void residual_forward(floatX *out, const floatX *inp1, const floatX *inp2,
                                    const floatX *inp2_bias, size_t N, size_t C, cudaStream_t stream) {
    if (N == 0) return;
    unsigned blocks = (unsigned)CEIL_DIV(N, (size_t)LAYERNORM_WARPS), threads = 32 * LAYERNORM_WARPS;
    kernel_cost(KERNEL_RESIDUAL, N * C, 3 * sizeof(floatX), 2);
    if (C % x128::size == 0) {
        LAUNCH(residual_forward_kernel<x128::size>, blocks, threads, 0, stream)
        (out, inp1, inp2, inp2_bias, N, C);
    } else {
        LAUNCH(residual_forward_kernel<1>, blocks, threads, 0, stream)(out, inp1, inp2, inp2_bias, N, C);
    }
}

// Floats of scratch that layernorm_backward wants (aligned to 16 bytes).
static inline size_t layernorm_backward_scratch(size_t N, size_t C) {
    return layernorm_backward_blocks(N) * 2 * C;
}

// Floats of scratch for every sum over rows that a layer's backward pass takes: of N rows, the layernorms' and the
// biases' of C columns, and the biases' of up to F.
static inline size_t reduce_scratch_floats(size_t N, size_t C, size_t F) {
    size_t most = layernorm_backward_scratch(N, C), bias = bias_backward_scratch(N, F > C ? F : C);
    return bias > most ? bias : most;
}

template <int LANES>
static inline void layernorm_backward_launch(floatX *dinp, float *dweight, float *dbias, float *scratch,
                                             const floatX *dresidual, const floatX *dout, const floatX *inp,
                                             const floatX *weight, const float *mean, const float *rstd,
                                             size_t N, size_t C, bool accumulate, cudaStream_t stream) {
    size_t blocks = 0;
    if (N > 0) {
        size_t rows = CEIL_DIV(N, layernorm_backward_blocks(N));
        blocks = CEIL_DIV(N, rows);  // not more than asked for above, and each has a row
        unsigned warps = LANES == 32 ? LAYERNORM_WARPS : 1;
        while (warps > 1 && warps * 2 * C * sizeof(float) > LAYERNORM_SHARED) warps /= 2;
        size_t shared = warps * 2 * C * sizeof(float);
        bool in_shared = LANES == 32 && shared <= LAYERNORM_SHARED;
        if (!in_shared) shared = 0;
        kernel_cost(KERNEL_LAYERNORM_BACKWARD, N * C, (dresidual ? 4 : 3) * sizeof(floatX), 17);
        if (C % x128::size == 0) {
            LAUNCH((layernorm_backward_kernel<x128::size, LANES>), (unsigned)blocks, 32 * warps, shared,
                   stream)
            (dinp, scratch, dresidual, dout, inp, weight, mean, rstd, N, C, rows, in_shared);
        } else {
            LAUNCH((layernorm_backward_kernel<1, LANES>), (unsigned)blocks, 32 * warps, shared, stream)
            (dinp, scratch, dresidual, dout, inp, weight, mean, rstd, N, C, rows, in_shared);
        }
    }
    LAUNCH(layernorm_backward_sum_kernel, (unsigned)CEIL_DIV(2 * C, (size_t)128), 128, 0, stream)
    (dweight, dbias, scratch, blocks, C, accumulate);
}

// dinp[N, C] = dresidual (if not NULL; it may be dinp) + the gradient of layernorm with respect to inp.
// dweight[C] and dbias[C] are overwritten, or added to with accumulate. dout may be dinp as well.
static inline void layernorm_backward(floatX *dinp, float *dweight, float *dbias, float *scratch,
                                      const floatX *dresidual, const floatX *dout, const floatX *inp,
                                      const floatX *weight, const float *mean, const float *rstd, size_t N,
                                      size_t C, bool accumulate, cudaStream_t stream) {
    layernorm_backward_launch<ROW_LANES>(dinp, dweight, dbias, scratch, dresidual, dout, inp, weight, mean,
                                         rstd, N, C, accumulate, stream);
}

#endif
