// attention.cuh: causal self-attention. The products are batched GEMMs over the heads, straight on the
// interleaved q|k|v that the projection wrote, so nothing is permuted; the softmax is a kernel with a warp
// per row, which on the CPU is one thread and needs no rendezvous.
// NH may be the heads of one tensor rank; C is then their share of the channels, and HS = C / NH.
//
// defines: attention_saved_bytes, attention_scratch_bytes, attention_forward, attention_backward
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include <math.h>

#include "llmc/matmul.cuh"

static constexpr unsigned SOFTMAX_WARPS = 4;
// Elements at a time, where they divide T: a 128-bit load, or whole vectors for the one thread of a CPU.
static constexpr int SOFTMAX_PACK = ROW_LANES == 1 ? 16 : (int)x128::size;

// Pack i of a row of scores; those after column t become minus infinity, whose exponential is 0.
template <int W>
__device__ __forceinline__ void load_scores(float (&x)[W], const floatX *row, size_t i, size_t t) {
    load_floats<W>(x, row + i * W);
    if (i * W + W > t + 1) {
        int left = (int)(t + 1 - i * W);
        for (int k = 0; k < W; k++) x[k] = k < left ? x[k] : -INFINITY;
    }
}

// Packs first, first + 1, ... of a row of T become zero, by the LANES threads of the row.
template <int W, int LANES>
__device__ __forceinline__ void clear_after(floatX *row, size_t first, size_t T) {
    const float zero[W] = {0.0f};
    Share rest = row_share<LANES>(T / W - first);
    for (size_t i = rest.begin; i < rest.end; i += rest.step) store_floats<W>(row + (first + i) * W, zero);
}

// Row t of each score matrix, att[rows = B*NH*T, T]: in place the softmax of columns 0..t, then exact zeros.
template <int W, int LANES>
__global__ void __launch_bounds__(SOFTMAX_WARPS * 32)
    softmax_forward_kernel(floatX *att, size_t rows, size_t T) {
    size_t row = (size_t)blockIdx.x * SOFTMAX_WARPS + threadIdx.x / 32, t = row % T;
    if (row >= rows || threadIdx.x % 32 >= LANES) return;
    floatX *scores = att + row * T;
    Share s = row_share<LANES>(t / W + 1);
    float x[W], largest[W], sums[W] = {0.0f};
    for (int k = 0; k < W; k++) largest[k] = -INFINITY;
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_scores<W>(x, scores, i, t);
        for (int k = 0; k < W; k++) largest[k] = x[k] > largest[k] ? x[k] : largest[k];
    }
    float max = max_of<W>(largest);
    if constexpr (LANES == 32) max = warp_max(max);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_scores<W>(x, scores, i, t);
        for (int k = 0; k < W; k++) sums[k] += exponential(x[k] - max);
    }
    float scale = 1.0f / row_sum<LANES>(sum_of<W>(sums));
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_scores<W>(x, scores, i, t);
        for (int k = 0; k < W; k++) x[k] = exponential(x[k] - max) * scale;
        store_floats<W>(scores + i * W, x);
    }
    clear_after<W, LANES>(scores, t / W + 1, T);
}

// datt = att * (datt - sum(att * datt)) row by row in place: the gradient of the scores.
// Where att is 0, so is this.
template <int W, int LANES>
__global__ void __launch_bounds__(SOFTMAX_WARPS * 32)
    softmax_backward_kernel(floatX *datt, const floatX *att, size_t rows, size_t T) {
    size_t row = (size_t)blockIdx.x * SOFTMAX_WARPS + threadIdx.x / 32, t = row % T;
    if (row >= rows || threadIdx.x % 32 >= LANES) return;
    const floatX *p_row = att + row * T;
    floatX *d_row = datt + row * T;
    Share s = row_share<LANES>(t / W + 1);
    float p[W], d[W], sums[W] = {0.0f};
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_floats<W>(p, p_row + i * W);
        load_floats<W>(d, d_row + i * W);
        for (int k = 0; k < W; k++) sums[k] += p[k] * d[k];
    }
    float dot = row_sum<LANES>(sum_of<W>(sums));
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_floats<W>(p, p_row + i * W);
        load_floats<W>(d, d_row + i * W);
        for (int k = 0; k < W; k++) d[k] = p[k] * (d[k] - dot);
        store_floats<W>(d_row + i * W, d);
    }
    clear_after<W, LANES>(d_row, t / W + 1, T);
}

// att[rows, T] as softmax_forward_kernel says.
static inline void softmax_forward(floatX *att, size_t rows, size_t T, cudaStream_t stream) {
    unsigned blocks = (unsigned)CEIL_DIV(rows, (size_t)SOFTMAX_WARPS);
    if (T % SOFTMAX_PACK == 0 && aligned16(att)) {
        LAUNCH((softmax_forward_kernel<SOFTMAX_PACK, ROW_LANES>), blocks, SOFTMAX_WARPS * 32, 0, stream)
        (att, rows, T);
    } else {
        LAUNCH((softmax_forward_kernel<1, ROW_LANES>), blocks, SOFTMAX_WARPS * 32, 0, stream)(att, rows, T);
    }
}

// datt[rows, T] as softmax_backward_kernel says.
static inline void softmax_backward(floatX *datt, const floatX *att, size_t rows, size_t T,
                                    cudaStream_t stream) {
    unsigned blocks = (unsigned)CEIL_DIV(rows, (size_t)SOFTMAX_WARPS);
    if (T % SOFTMAX_PACK == 0 && aligned16(datt) && aligned16(att)) {
        LAUNCH((softmax_backward_kernel<SOFTMAX_PACK, ROW_LANES>), blocks, SOFTMAX_WARPS * 32, 0, stream)
        (datt, att, rows, T);
    } else {
        LAUNCH((softmax_backward_kernel<1, ROW_LANES>), blocks, SOFTMAX_WARPS * 32, 0, stream)
        (datt, att, rows, T);
    }
}

// Bytes kept from forward to backward, per micro-batch and layer: the probabilities [B,NH,T,T].
static inline size_t attention_saved_bytes(size_t B, size_t T, size_t C, size_t NH) {
    (void)C;
    return B * NH * T * T * sizeof(floatX);
}

// Bytes of scratch for backward: the gradient of the probabilities of one sequence [NH,T,T].
static inline size_t attention_scratch_bytes(size_t B, size_t T, size_t C, size_t NH) {
    (void)B, (void)C;
    return NH * T * T * sizeof(floatX);
}

// d[T,T] = alpha a[T,HS] b[T,HS]^T for each head; a and b are rows of HS values, lda and ldb apart.
static inline void attention_scores(Matmul *mm, floatX *d, float alpha, const floatX *a, size_t lda,
                                    const floatX *b, size_t ldb, size_t T, size_t HS, size_t NH) {
    GemmArgs g = gemm_args(d, false, a, false, b, true, T, T, HS);
    g.alpha = alpha, g.lda = lda, g.ldb = ldb;
    g.batch = NH, g.stride_a = HS, g.stride_b = HS, g.stride_d = T * T;
    gemm(mm, &g);
}

// d[T,HS] = alpha op(att)[T,T] b[T,HS] for each head.
static inline void attention_mix(Matmul *mm, floatX *d, size_t ldd, float alpha, const floatX *att,
                                 bool trans, const floatX *b, size_t ldb, size_t T, size_t HS, size_t NH) {
    GemmArgs g = gemm_args(d, false, att, trans, b, false, T, HS, T);
    g.alpha = alpha, g.ldb = ldb, g.ldd = ldd;
    g.batch = NH, g.stride_a = T * T, g.stride_b = HS, g.stride_d = HS;
    gemm(mm, &g);
}

// out[B,T,C] from qkv[B,T,3,NH,HS]; fills saved (attention_saved_bytes) for the backward pass.
static inline void attention_forward(Matmul *mm, floatX *out, void *saved, const floatX *qkv, size_t B,
                                     size_t T, size_t C, size_t NH) {
    size_t HS = C / NH;
    floatX *att = (floatX *)saved; // [B,NH,T,T]
    for (size_t b = 0; b < B; b++) {
        const floatX *q = qkv + b * T * 3 * C, *k = q + C;
        attention_scores(mm, att + b * NH * T * T, 1.0f / sqrtf((float)HS), q, 3 * C, k, 3 * C, T, HS, NH);
    }
    softmax_forward(att, B * NH * T, T, mm->stream);
    for (size_t b = 0; b < B; b++) {
        const floatX *v = qkv + b * T * 3 * C + 2 * C;
        attention_mix(mm, out + b * T * C, C, 1.0f, att + b * NH * T * T, false, v, 3 * C, T, HS, NH);
    }
}

// dqkv[B,T,3,NH,HS] from dout[B,T,C] and what forward read and saved. scratch: attention_scratch_bytes,
// aligned to 16. out[B,T,C] is for kernels that keep no probabilities.
static inline void attention_backward(Matmul *mm, floatX *dqkv, void *scratch, const floatX *dout,
                                      const floatX *out, const void *saved, const floatX *qkv, size_t B,
                                      size_t T, size_t C, size_t NH) {
    (void)out;
    size_t HS = C / NH;
    float scale = 1.0f / sqrtf((float)HS);
    floatX *datt = (floatX *)scratch; // [NH,T,T]
    for (size_t b = 0; b < B; b++) {
        const floatX *q = qkv + b * T * 3 * C, *k = q + C, *v = q + 2 * C;
        floatX *dq = dqkv + b * T * 3 * C, *dk = dq + C, *dv = dq + 2 * C;
        const floatX *att = (const floatX *)saved + b * NH * T * T, *dout_b = dout + b * T * C;
        attention_mix(mm, dv, 3 * C, 1.0f, att, true, dout_b, C, T, HS, NH);
        attention_scores(mm, datt, 1.0f, dout_b, C, v, 3 * C, T, HS, NH);
        softmax_backward(datt, att, NH * T, T, mm->stream);
        attention_mix(mm, dq, 3 * C, scale, datt, false, k, 3 * C, T, HS, NH);
        attention_mix(mm, dk, 3 * C, scale, datt, true, q, 3 * C, T, HS, NH);
    }
}

#endif
