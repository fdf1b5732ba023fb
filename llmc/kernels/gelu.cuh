// gelu.cuh: the activation of GPT-2's MLP, in its tanh form: 0.5 x (1 + tanh(sqrt(2 / pi)
// (x + 0.044715 x^3))).
//
// defines: gelu_exp, gelu_divide, gelu, gelu_gradient (of one float, for other kernels),
//          gelu_forward, gelu_backward
#ifndef LLMC_GELU_CUH
#define LLMC_GELU_CUH

#include "llmc/kernels/bias.cuh"
#include "llmc/kernels/exponential.cuh"
#include "llmc/kernels/packs.cuh"

// (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)): one exponential, and no cancellation where tanh
// is near -1.
#define GELU_SCALE 1.59576912f  // 2 sqrt(2 / pi)
#define GELU_CUBIC 0.044715f

// exp(x) and x / y for results that are rounded to bf16: on a GPU with errors in the last
// bits, in a few instructions.
__device__ __forceinline__ float gelu_exp(float x) {
    return sizeof(floatX) == 2 ? exponential_fast(x) : exponential(x);
}
__device__ __forceinline__ float gelu_divide(float x, float y) {
    return sizeof(floatX) == 2 ? __fdividef(x, y) : x / y;
}

// Returns gelu(x) = x / (1 + exp(-2u)). The exponential may become infinite, and the result
// is then 0 or -0.
__device__ __forceinline__ float gelu(float x) {
    float u2 = GELU_SCALE * x * (1.0f + GELU_CUBIC * x * x);
    return gelu_divide(x, 1.0f + gelu_exp(-u2));
}

// Returns the derivative of gelu at x.
__device__ __forceinline__ float gelu_gradient(float x) {
    // Beyond 10 it is 0 or 1 to the last bit; the clamp keeps infinity times zero away, and
    // NaN passes.
    x = fabsf(x) > 10.0f ? copysignf(10.0f, x) : x;
    float square = GELU_CUBIC * x * x;
    float e = gelu_exp(-GELU_SCALE * x * (1.0f + square));
    float s = gelu_divide(1.0f, 1.0f + e);  // and e s is 1 - s without the cancellation
    return s + x * s * (e * s) * (GELU_SCALE * (1.0f + 3.0f * square));
}

template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    gelu_forward_kernel(floatX *out, const floatX *inp, size_t n) {
    Share s = element_share<W>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float x[W];
        load_floats<W>(x, inp + i * W);
        for (int k = 0; k < W; k++) x[k] = gelu(x[k]);
        store_floats<W>(out + i * W, x);
    }
}

// Computes out[n] = gelu(inp[n]); out may be inp.
static inline void gelu_forward(floatX *out, const floatX *inp, size_t n,
                                cudaStream_t stream) {
    kernel_cost(KERNEL_EXPONENTIAL, n, 2 * sizeof(floatX), 9);
    by_packs<ELEMENT_PACK>(n, [&](auto W) {
        LAUNCH(gelu_forward_kernel<W>, element_blocks(n), ELEMENT_THREADS, stream)
        (out, inp, n);
    });
}

// Rows that a thread reads before it writes them.
static constexpr size_t GELU_BATCH = ROW_LANES > 1 ? 2 : 1;

// Computes dinp[N,F] = dout * gelu'(inp), and the sums of its columns, as stored, over a
// chunk's rows. bias_partial_kernel does the same sums.
template <int W>
__global__ void __launch_bounds__(BIAS_THREADS)
    gelu_backward_kernel(floatX *dinp, float *partial, const floatX *dout,
                         const floatX *inp, size_t N, size_t F, size_t chunk_rows) {
    size_t col = ((size_t)blockIdx.x * BIAS_THREADS + threadIdx.x) * W;
    if (col >= F) return;
    size_t begin = blockIdx.y * chunk_rows;
    size_t end = begin + chunk_rows < N ? begin + chunk_rows : N;
    float sum[W] = {0.0f}, x[W], d[W];
    Late<W> x_rows[GELU_BATCH], d_rows[GELU_BATCH];
    for (size_t row = begin; row < end; row += GELU_BATCH) {
        UNROLL
        for (size_t r = 0; r < GELU_BATCH;
             r++) {  // dinp may be dout: all reads before the writes
            if (row + r >= end) break;
            const floatX *x_at = inp + (row + r) * F + col;
            const floatX *d_at = dout + (row + r) * F + col;
            prefetch(x_at + 4 * W);
            prefetch(d_at + 4 * W);  // for the threads of the next columns
            load_late(x_rows[r], x_at);
            load_late(d_rows[r], d_at);
        }
        UNROLL
        for (size_t r = 0; r < GELU_BATCH; r++) {
            if (row + r >= end) break;
            unpack_late(x, x_rows[r]);
            unpack_late(d, d_rows[r]);
            for (int k = 0; k < W; k++)
                d[k] = to_float(from_float<floatX>(d[k] * gelu_gradient(x[k])));
            store_whole_floats<W>(dinp + (row + r) * F + col, d);
            for (int k = 0; k < W; k++) sum[k] += d[k];
        }
    }
    store_floats<W>(partial + blockIdx.y * F + col, sum);
}

// Computes dinp[N,F] = dout * gelu'(inp). dinp may be dout. The sums of its columns become
// dbias[F] or are added to it: the gradient of the bias that was added to inp. They have
// the bits of bias_backward. scratch: bias_backward_scratch(N, F) floats.
static inline void gelu_backward(floatX *dinp, float *dbias, float *scratch,
                                 const floatX *dout, const floatX *inp, size_t N, size_t F,
                                 bool accumulate, cudaStream_t stream) {
    kernel_cost(KERNEL_EXPONENTIAL, N * F, 3 * sizeof(floatX), 18);
    size_t chunk_rows = bias_chunk_rows(N), chunks = CEIL_DIV(N, chunk_rows);
    by_packs<ELEMENT_PACK>(F, [&](auto W) {
        dim3 grid((unsigned)CEIL_DIV(F, (size_t)BIAS_THREADS * W), (unsigned)chunks);
        LAUNCH(gelu_backward_kernel<W>, grid, BIAS_THREADS, stream)
        (dinp, scratch, dout, inp, N, F, chunk_rows);
    });
    column_sums(dbias, NULL, scratch, chunks, F, F, accumulate, stream);
}

#endif
