// encoder.cuh: token and position embedding: out[b, t] = wte[token] + wpe[t], and its gradient.
//
// defines: encoder_forward, encoder_backward
#ifndef LLMC_ENCODER_CUH
#define LLMC_ENCODER_CUH

#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/shares.cuh"

enum { ENCODER_WARPS = 8, ENCODER_OWNERS = 1024, ENCODER_GROUP = 8 };

// A warp per position.
template <int W>
__global__ void __launch_bounds__(32 * ENCODER_WARPS)
    encoder_forward_kernel(floatX *out, const int *tokens, const floatX *wte, const floatX *wpe, size_t N,
                           size_t T, size_t C, size_t v_start, size_t Vl) {
    size_t n = (size_t)blockIdx.x * ENCODER_WARPS + threadIdx.x / 32;
    if (n >= N) return;
    size_t row = (size_t)tokens[n] - v_start;  // wraps around, past every Vl, if the token is below v_start
    bool mine = row < Vl;
    const floatX *token = wte + (mine ? row * C : 0), *position = wpe ? wpe + n % T * C : NULL;
    Share s = row_share<ROW_LANES>(C / W);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float x[W] = {0.0f}, p[W];
        if (mine) load_floats<W>(x, token + i * W);
        if (position) {
            load_floats<W>(p, position + i * W);
            for (int k = 0; k < W; k++) x[k] += p[k];
        }
        store_floats<W>(out + n * C + i * W, x);
    }
}

// Each warp owns the vocabulary rows whose number is its own modulo the count of warps, a power of two. It
// walks all positions in order and adds those whose token it owns: no atomics, no barrier, and always the
// same order. A position without a match costs one comparison, so many owners with little to do are better
// than few.
template <int W>
__global__ void __launch_bounds__(32 * ENCODER_WARPS)
    encoder_backward_wte_kernel(float *dwte, const floatX *dout, const int *tokens, size_t N, size_t C,
                                size_t v_start, size_t Vl) {
    unsigned owner = blockIdx.x * ENCODER_WARPS + threadIdx.x / 32;
    Share s = row_share<ROW_LANES>(C / W);
    if (s.begin >= s.end) return;
    for (size_t first = 0; first < N; first += ENCODER_GROUP) {
        int count = N - first < ENCODER_GROUP ? (int)(N - first) : (int)ENCODER_GROUP;
        bool any = false;
        if (count == ENCODER_GROUP) {  // in 32 bits, whose overflow the modulo does not see
            for (int j = 0; j < ENCODER_GROUP; j++) {
                any |= ((unsigned)tokens[first + j] - (unsigned)v_start) % ENCODER_OWNERS == owner;
            }
        } else {
            any = true;
        }
        if (!any) continue;
        for (int j = 0; j < count; j++) {
            size_t n = first + (size_t)j, row = (size_t)tokens[n] - v_start;
            if (row >= Vl || row % ENCODER_OWNERS != owner) continue;
            for (size_t i = s.begin; i < s.end; i += s.step) {
                float sum[W], d[W];
                load_floats<W>(sum, dwte + row * C + i * W);
                load_floats<W>(d, dout + n * C + i * W);
                for (int k = 0; k < W; k++) sum[k] += d[k];
                store_floats<W>(dwte + row * C + i * W, sum);
            }
        }
    }
}

// A warp per position of the sequence, summing over the batch; positions from T on have no gradient.
template <int W>
__global__ void __launch_bounds__(32 * ENCODER_WARPS)
    encoder_backward_wpe_kernel(float *dwpe, const floatX *dout, size_t B, size_t T, size_t rows, size_t C,
                                bool accumulate) {
    size_t t = (size_t)blockIdx.x * ENCODER_WARPS + threadIdx.x / 32;
    if (t >= rows) return;
    Share s = row_share<ROW_LANES>(C / W);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float sum[W] = {0.0f}, d[W];
        for (size_t b = 0; t < T && b < B; b++) {
            load_floats<W>(d, dout + (b * T + t) * C + i * W);
            for (int k = 0; k < W; k++) sum[k] += d[k];
        }
        if (accumulate) {
            load_floats<W>(d, dwpe + t * C + i * W);
            for (int k = 0; k < W; k++) sum[k] += d[k];
        }
        store_floats<W>(dwpe + t * C + i * W, sum);
    }
}

// out[B, T, C] = wte[token - v_start] + wpe[t]. wte [Vl, C] holds vocabulary rows v_start .. v_start + Vl; a
// token outside of them contributes 0. wpe [maxT, C], or NULL: not added.
static inline void encoder_forward(floatX *out, const int *tokens, const floatX *wte, const floatX *wpe,
                                   size_t B, size_t T, size_t C, size_t v_start, size_t Vl,
                                   cudaStream_t stream) {
    size_t N = B * T;
    if (N == 0) return;
    unsigned blocks = (unsigned)CEIL_DIV(N, (size_t)ENCODER_WARPS);
    kernel_cost(KERNEL_RESIDUAL, N * C, (wpe ? 3 : 2) * sizeof(floatX), 1);
    if (C % x128::size == 0) {
        LAUNCH(encoder_forward_kernel<x128::size>, blocks, 32 * ENCODER_WARPS, 0, stream)
        (out, tokens, wte, wpe, N, T, C, v_start, Vl);
    } else {
        LAUNCH(encoder_forward_kernel<1>, blocks, 32 * ENCODER_WARPS, 0, stream)
        (out, tokens, wte, wpe, N, T, C, v_start, Vl);
    }
}

// Adds dout[B, T, C] to dwte[Vl, C] at the rows of its tokens, and to dwpe[maxT, C], of which accumulate_wpe
// false overwrites all rows, those from T on with 0. dwte or dwpe may be NULL: not wanted.
static inline void encoder_backward(float *dwte, float *dwpe, const floatX *dout, const int *tokens, size_t B,
                                    size_t T, size_t C, size_t maxT, size_t v_start, size_t Vl,
                                    bool accumulate_wpe, cudaStream_t stream) {
    bool wide = C % x128::size == 0;
    if (dwte && B * T > 0) {
        unsigned blocks = ENCODER_OWNERS / ENCODER_WARPS;
        kernel_cost(KERNEL_ELEMENTWISE, B * T * C, 2 * sizeof(float) + sizeof(floatX), 1);
        if (wide) {
            LAUNCH(encoder_backward_wte_kernel<x128::size>, blocks, 32 * ENCODER_WARPS, 0, stream)
            (dwte, dout, tokens, B * T, C, v_start, Vl);
        } else {
            LAUNCH(encoder_backward_wte_kernel<1>, blocks, 32 * ENCODER_WARPS, 0, stream)
            (dwte, dout, tokens, B * T, C, v_start, Vl);
        }
    }
    size_t rows = accumulate_wpe ? T : maxT;
    if (dwpe && rows > 0) {
        unsigned blocks = (unsigned)CEIL_DIV(rows, (size_t)ENCODER_WARPS);
        kernel_cost(KERNEL_ELEMENTWISE, B * T * C, sizeof(floatX), 1);
        kernel_cost(KERNEL_ELEMENTWISE, rows * C, (accumulate_wpe ? 2 : 1) * sizeof(float), 0);
        if (wide) {
            LAUNCH(encoder_backward_wpe_kernel<x128::size>, blocks, 32 * ENCODER_WARPS, 0, stream)
            (dwpe, dout, B, T, rows, C, accumulate_wpe);
        } else {
            LAUNCH(encoder_backward_wpe_kernel<1>, blocks, 32 * ENCODER_WARPS, 0, stream)
            (dwpe, dout, B, T, rows, C, accumulate_wpe);
        }
    }
}

#endif
