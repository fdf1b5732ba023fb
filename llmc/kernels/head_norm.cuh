// head_norm.cuh: RMSNorm of each head of q and k (QK-norm, Henry et al. 2020), in place.
// lesson: llama
//
// All heads of q have one weight [HS], and all heads of k another. So their gradients are
// sums over the tokens and over this rank's heads. Forward keeps its input for the backward
// pass, which computes the norm's factor again.
//
// defines: HeadNorm, head_norm_forward, head_norm_backward
#ifndef LLMC_HEAD_NORM_CUH
#define LLMC_HEAD_NORM_CUH

#include "llmc/host/choices.h"
#include "llmc/kernels/layernorm.cuh"

// The heads of N tokens. A row of x is q|k|v, of input q|k.
typedef struct {
    floatX *x;                       // [N, NH + 2 KV, HS]  or its gradient
    floatX *input;                   // [N, NH + KV, HS]    what the norm read
    const floatX *weight_q, *weight_k;  // [HS]
    size_t N, NH, KV, HS;
    float epsilon;
} HeadNorm;

// The head of a warp's turn i: its channels in x and in input, and its weight.
typedef struct {
    floatX *x, *input;
    const floatX *weight;
    bool of_k;
} NormedHead;

__device__ __forceinline__ NormedHead normed_head(const HeadNorm &a, size_t i) {
    size_t heads = a.NH + a.KV, n = i / heads, h = i % heads;
    bool of_k = h >= a.NH;
    return {a.x + (n * (heads + a.KV) + h) * a.HS, a.input + i * a.HS,
            of_k ? a.weight_k : a.weight_q, of_k};
}

// Returns 1 / sqrt(mean(x^2) + epsilon) from a thread's share of the squares.
template <int W>
__device__ __forceinline__ float head_rstd(const float (&squares)[W], const HeadNorm &a) {
    return 1.0f / sqrtf(row_sum(sum_of<W>(squares)) / (float)a.HS + a.epsilon);
}

// A warp per head.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS) head_norm_forward_kernel(HeadNorm a) {
    size_t i = block_row();
    if (i >= a.N * (a.NH + a.KV)) return;
    NormedHead head = normed_head(a, i);
    Share s = row_share(a.HS / W);
    float x[W], w[W], squares[W] = {0.0f};
    for (size_t p = s.begin; p < s.end; p += s.step) {
        load_floats<W>(x, head.x + p * W);
        store_floats<W>(head.input + p * W, x);
        for (int k = 0; k < W; k++) squares[k] += x[k] * x[k];
    }
    float r = head_rstd<W>(squares, a);
    for (size_t p = s.begin; p < s.end; p += s.step) {
        load_floats<W>(x, head.x + p * W);
        load_floats<W>(w, head.weight + p * W);
        for (int k = 0; k < W; k++) x[k] *= r * w[k];
        store_floats<W>(head.x + p * W, x);
    }
}

// A block takes `rows` tokens, and each of its warps every BLOCK_ROWS-th head of them. A
// warp keeps its sums for the weights in shared memory. The block adds them, always in the
// same order, and writes its row of partials [blocks, 2, HS].
template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    head_norm_backward_kernel(HeadNorm a, float *partials, size_t rows) {
    alignas(16) __shared__ float sums[BLOCK_ROWS][2 * ATTENTION_MAX_HEAD_SIZE];
    unsigned warp = threadIdx.x / ROW_LANES;
    size_t heads = a.NH + a.KV, first = blockIdx.x * rows;
    size_t end = a.N - first < rows ? a.N : first + rows;
    Share s = row_share(a.HS / W);
    float x[W], d[W], w[W];
    for (size_t c = row_lane(); c < 2 * a.HS; c += ROW_LANES) sums[warp][c] = 0.0f;
    __syncthreads();

    for (size_t i = first * heads + warp; i < end * heads; i += BLOCK_ROWS) {
        NormedHead head = normed_head(a, i);
        float squares[W] = {0.0f}, dots[W] = {0.0f}, *dw = sums[warp] + head.of_k * a.HS;
        for (size_t p = s.begin; p < s.end; p += s.step) {
            load_floats<W>(x, head.input + p * W);
            load_floats<W>(d, head.x + p * W);
            load_floats<W>(w, head.weight + p * W);
            for (int k = 0; k < W; k++) {
                squares[k] += x[k] * x[k];
                dots[k] += d[k] * w[k] * x[k];
            }
        }
        float r = head_rstd<W>(squares, a);
        float dot = row_sum(sum_of<W>(dots)) * r * r / (float)a.HS;
        for (size_t p = s.begin; p < s.end; p += s.step) {
            load_floats<W>(x, head.input + p * W);
            load_floats<W>(d, head.x + p * W);
            load_floats<W>(w, head.weight + p * W);
            for (int k = 0; k < W; k++) {
                dw[p * W + k] += d[k] * x[k] * r;
                d[k] = (d[k] * w[k] - x[k] * dot) * r;
            }
            store_floats<W>(head.x + p * W, d);
        }
    }
    __syncthreads();

    for (size_t c = threadIdx.x; c < 2 * a.HS; c += ROW_THREADS) {
        float sum = 0.0f;
        for (unsigned g = 0; g < BLOCK_ROWS; g++) sum += sums[g][c];
        partials[blockIdx.x * 2 * a.HS + c] = sum;
    }
}

// Turns q and k in a.x into their norms times weights, and keeps their old values in
// a.input.
static inline void head_norm_forward(const HeadNorm &a, cudaStream_t stream) {
    size_t heads = a.N * (a.NH + a.KV);
    kernel_cost(KERNEL_LAYERNORM_FORWARD, heads * a.HS, 3 * sizeof(floatX), 6);
    by_packs<ELEMENT_PACK>(a.HS, [&](auto W) {
        LAUNCH(head_norm_forward_kernel<W>, row_blocks(heads), ROW_THREADS, stream)(a);
    });
}

// Turns a.x from the gradients of q and k into the gradients of the norms' inputs.
// Overwrites dweight_q[HS] and dweight_k[HS], or adds to them with accumulate. scratch:
// reduce_scratch_floats(N, HS, HS).
static inline void head_norm_backward(const HeadNorm &a, float *dweight_q, float *dweight_k,
                                      float *scratch, bool accumulate,
                                      cudaStream_t stream) {
    size_t rows = layernorm_backward_rows(a.N);
    unsigned blocks = (unsigned)CEIL_DIV(a.N, rows);
    kernel_cost(KERNEL_LAYERNORM_BACKWARD, a.N * (a.NH + a.KV) * a.HS, 3 * sizeof(floatX),
                13);
    by_packs<ELEMENT_PACK>(a.HS, [&](auto W) {
        LAUNCH(head_norm_backward_kernel<W>, blocks, ROW_THREADS, stream)(a, scratch, rows);
    });
    column_sums(dweight_q, dweight_k, scratch, blocks, 2 * a.HS, a.HS, accumulate, stream);
}

#endif
