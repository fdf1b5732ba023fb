// layernorm.cuh: layer normalisation over the channels, alone and after the residual addition that precedes it; with it
// comes its backward pass (layernorm_backward.cuh).
//
// defines: Layernorm, layernorm_forward, layernorm_residual_forward, residual_forward
#ifndef LLMC_LAYERNORM_CUH
#define LLMC_LAYERNORM_CUH

#include "llmc/kernels/dropout.cuh"
#include "llmc/kernels/layernorm_backward.cuh"
#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/shares.cuh"

#define LAYERNORM_EPSILON 1e-5f

// residual = inp1 + mask * (inp2 + bias), rounded once: W elements of row n from column c on, kept as the floats that a
// later read of residual gives.
template <int W, Norm NORM, bool DROP>
__device__ __forceinline__ void add_residual(float (&x)[W], floatX *residual, const floatX *inp1, const floatX *inp2,
                                             const floatX *bias, const Dropout &drop, size_t n, size_t c, size_t C) {
    [[maybe_unused]] float y[W], b[W];
    load_floats<W>(x, inp1 + n * C + c);
    load_floats<W>(y, inp2 + n * C + c);
    if constexpr (NORM == NORM_LAYER) {
        load_floats<W>(b, bias + c);
        for (int k = 0; k < W; k++) y[k] += b[k];
    }
    if constexpr (DROP) dropout_mask<W>(y, drop, n, c, C);
    for (int k = 0; k < W; k++) x[k] = (float)from_float<floatX>(x[k] + y[k]);
    store_floats<W>(residual + n * C + c, x);
}

// A warp per row. With inp1, the row is first made by add_residual; each thread reads back only what it wrote itself.
// The variance is of the centred values: no cancellation.
template <int W, Norm NORM, bool DROP>
__global__ void __launch_bounds__(ROW_THREADS)
    layernorm_forward_kernel(floatX *out, float *mean, float *rstd, floatX *residual, const floatX *inp1,
                             const floatX *inp2, const floatX *inp2_bias, const floatX *weight,
                             const floatX *bias, size_t N, size_t C, float epsilon, Dropout drop) {
    size_t n = block_row();
    if (n >= N) return;
    floatX *row = residual + n * C;
    Share s = row_share(C / W);
    float x[W], sums[W] = {0.0f};
    ROLLED
    for (size_t i = s.begin; i < s.end; i += s.step) {
        if (inp1) add_residual<W, NORM, DROP>(x, residual, inp1, inp2, inp2_bias, drop, n, i * W, C);
        else load_floats<W>(x, row + i * W);
        for (int k = 0; k < W; k++) sums[k] += x[k];
    }
    float m = NORM == NORM_RMS ? 0.0f : row_sum(sum_of<W>(sums)) / (float)C;
    for (int k = 0; k < W; k++) sums[k] = 0.0f;
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_floats<W>(x, row + i * W);
        for (int k = 0; k < W; k++) sums[k] += (x[k] - m) * (x[k] - m);
    }
    float r = 1.0f / sqrtf(row_sum(sum_of<W>(sums)) / (float)C + epsilon);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        [[maybe_unused]] float w[W], b[W];
        load_floats<W>(x, row + i * W);
        load_floats<W>(w, weight + i * W);
        if constexpr (NORM == NORM_RMS) {
            for (int k = 0; k < W; k++) x[k] = x[k] * r * w[k];
        } else {
            load_floats<W>(b, bias + i * W);
            for (int k = 0; k < W; k++) x[k] = (x[k] - m) * r * norm_gain<NORM>(w[k]) + b[k];
        }
        store_floats<W>(out + n * C + i * W, x);
    }
    if (row_lane() == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

template <int W, Norm NORM, bool DROP>
__global__ void __launch_bounds__(ROW_THREADS)
    residual_forward_kernel(floatX *out, const floatX *inp1, const floatX *inp2, const floatX *inp2_bias,
                            size_t N, size_t C, Dropout drop) {
    size_t n = block_row();
    if (n >= N) return;
    Share s = row_share(C / W);
    float x[W];
    for (size_t i = s.begin; i < s.end; i += s.step)
        add_residual<W, NORM, DROP>(x, out, inp1, inp2, inp2_bias, drop, n, i * W, C);
}

// residual[N, C] = inp1 + mask * (inp2 + inp2_bias[C]), rounded once to floatX; ln = layernorm(residual as stored).
// residual may be inp1 or inp2, and with inp1 NULL is only read.
template <Norm NORM = NORM_LAYER>
static inline void layernorm_residual_forward(floatX *residual, const Layernorm &ln, const floatX *inp1,
                                              const floatX *inp2, const floatX *inp2_bias, const floatX *weight,
                                              const floatX *bias, size_t N, size_t C, cudaStream_t stream,
                                              Dropout drop, float epsilon = LAYERNORM_EPSILON) {
    if (N == 0) return;
    if (inp1) kernel_cost(KERNEL_RESIDUAL_LAYERNORM, N * C, 4 * sizeof(floatX), 10);
    else kernel_cost(KERNEL_LAYERNORM_FORWARD, N * C, 2 * sizeof(floatX), 8);
    by_packs<ELEMENT_PACK>(C, [&](auto W) {
        by_dropout(drop, [&](auto drops) {
            LAUNCH((layernorm_forward_kernel<W, NORM, drops>), row_blocks(N), ROW_THREADS, 0, stream)
            (ln.out, ln.mean, ln.rstd, residual, inp1, inp2, inp2_bias, weight, bias, N, C, epsilon, drop);
        });
    });
}

// ln.out[N, C] = (inp - mean) * rstd * weight + bias by rows; keeps mean[N] and rstd[N] for the backward pass.
template <Norm NORM = NORM_LAYER>
static inline void layernorm_forward(const Layernorm &ln, const floatX *inp, const floatX *weight, const floatX *bias,
                                     size_t N, size_t C, cudaStream_t stream, float epsilon = LAYERNORM_EPSILON) {
    layernorm_residual_forward<NORM>((floatX *)inp, ln, NULL, NULL, NULL, weight, bias, N, C, stream, Dropout(),
                                     epsilon);
}

// The first half of layernorm_residual_forward alone, with the same bits.
template <Norm NORM = NORM_LAYER>
static inline void residual_forward(floatX *out, const floatX *inp1, const floatX *inp2, const floatX *inp2_bias,
                                    size_t N, size_t C, cudaStream_t stream, Dropout drop) {
    if (N == 0) return;
    kernel_cost(KERNEL_RESIDUAL, N * C, 3 * sizeof(floatX), 2);
    by_packs<ELEMENT_PACK>(C, [&](auto W) {
        by_dropout(drop, [&](auto drops) {
            LAUNCH((residual_forward_kernel<W, NORM, drops>), row_blocks(N), ROW_THREADS, 0, stream)
            (out, inp1, inp2, inp2_bias, N, C, drop);
        });
    });
}

#endif
