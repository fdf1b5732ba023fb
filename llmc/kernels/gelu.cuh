// gelu.cuh: the activation of GPT-2's MLP, in its tanh form: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715
// x^3))).
//
// defines: gelu, gelu_gradient (of one float, for other kernels), gelu_forward, gelu_backward
#ifndef LLMC_GELU_CUH
#define LLMC_GELU_CUH

#include "llmc/kernels/exponential.cuh"
#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/shares.cuh"

// (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)): one exponential, and no cancellation where tanh is near -1.
#define GELU_SCALE 1.59576912f  // 2 sqrt(2 / pi)
#define GELU_CUBIC 0.044715f

// gelu(x): x / (1 + exp(-2u)). The exponential may become infinite, and the result is then -0.
__device__ __forceinline__ float gelu(float x) {
    float u2 = GELU_SCALE * x * (1.0f + GELU_CUBIC * x * x);
    return x / (1.0f + exponential(-u2));
}

// Derivative of gelu at x.
__device__ __forceinline__ float gelu_gradient(float x) {
    // Beyond 10 it is 0 or 1 to the last bit; the clamp keeps infinity times zero away, and NaN passes.
    x = x < -10.0f ? -10.0f : x;
    x = x > 10.0f ? 10.0f : x;
    float square = GELU_CUBIC * x * x;
    float e = exponential(-GELU_SCALE * x * (1.0f + square));
    float s = 1.0f / (1.0f + e);  // and e s is 1 - s without the cancellation
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
    size_t last = element_tail<W>(n);
    if (last < n) out[last] = from_float<floatX>(gelu(to_float(inp[last])));
}

template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    gelu_backward_kernel(floatX *dinp, const floatX *dout, const floatX *inp, size_t n) {
    Share s = element_share<W>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float x[W], d[W];
        load_floats<W>(x, inp + i * W);
        load_floats<W>(d, dout + i * W);
        for (int k = 0; k < W; k++) d[k] *= gelu_gradient(x[k]);
        store_floats<W>(dinp + i * W, d);
    }
    size_t last = element_tail<W>(n);
    if (last < n) dinp[last] = from_float<floatX>(to_float(dout[last]) * gelu_gradient(to_float(inp[last])));
}

// out[n] = gelu(inp[n]); out may be inp.
static inline void gelu_forward(floatX *out, const floatX *inp, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    kernel_cost(KERNEL_ELEMENTWISE, n, 2 * sizeof(floatX), 9);
    if (aligned16(out) && aligned16(inp)) {
        LAUNCH(gelu_forward_kernel<x128::size>, element_blocks(n), ELEMENT_THREADS, 0, stream)(out, inp, n);
    } else {
        LAUNCH(gelu_forward_kernel<1>, element_blocks(n), ELEMENT_THREADS, 0, stream)(out, inp, n);
    }
}

// dinp[n] = dout[n] * gelu'(inp[n]); dinp may be dout.
static inline void gelu_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t n,
                                 cudaStream_t stream) {
    if (n == 0) return;
    kernel_cost(KERNEL_ELEMENTWISE, n, 3 * sizeof(floatX), 17);
    if (aligned16(dinp) && aligned16(dout) && aligned16(inp)) {
        LAUNCH(gelu_backward_kernel<x128::size>, element_blocks(n), ELEMENT_THREADS, 0, stream)
        (dinp, dout, inp, n);
    } else {
        LAUNCH(gelu_backward_kernel<1>, element_blocks(n), ELEMENT_THREADS, 0, stream)(dinp, dout, inp, n);
    }
}

#endif
