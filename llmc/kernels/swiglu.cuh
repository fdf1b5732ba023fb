// swiglu.cuh: the activations of Llama's and Nemotron's MLPs: silu(gate) * up (Shazeer
// 2020), and relu(x)^2.
// lesson: llama
//
// A row of the input has F gates, then the F channels that they multiply. One matrix
// product computes both.
//
// defines: swiglu_forward, swiglu_backward, relu2_forward, relu2_backward
#ifndef LLMC_SWIGLU_CUH
#define LLMC_SWIGLU_CUH

#include "llmc/kernels/gelu.cuh"

// A thread takes the same columns of several rows.
static constexpr unsigned SWIGLU_THREADS = 128, SWIGLU_ROWS = 8;

// Computes out[N, F] = silu(gate) * up of inp[N, 2F]. With BACKWARD computes out[N,
// 2F], the gradients of gate and up from dout[N, F].
template <int W, bool BACKWARD>
__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_kernel(floatX *out, const floatX *dout, const floatX *inp, size_t N, size_t F) {
    size_t c = ((size_t)blockIdx.x * SWIGLU_THREADS + threadIdx.x) * W;
    if (c >= F) return;
    for (size_t n = blockIdx.y; n < N; n += gridDim.y) {
        float gate[W], up[W];
        [[maybe_unused]] float d[W];
        load_floats<W>(gate, inp + n * 2 * F + c);
        load_floats<W>(up, inp + n * 2 * F + F + c);
        if constexpr (BACKWARD) load_floats<W>(d, dout + n * F + c);
        for (int k = 0; k < W; k++) {
            // Below -40 the result is nothing. The bound keeps infinity times zero away.
            float g = gate[k] < -40.0f ? -40.0f : gate[k];
            float e = gelu_exp(-g), s = gelu_divide(1.0f, 1.0f + e);
            // e s is 1 - s without the cancellation
            gate[k] = BACKWARD ? d[k] * up[k] * (s + g * s * (e * s)) : g * s * up[k];
            if (BACKWARD) up[k] = d[k] * g * s;
        }
        store_whole_floats<W>(out + n * (BACKWARD ? 2 * F : F) + c, gate);
        if constexpr (BACKWARD) store_whole_floats<W>(out + n * 2 * F + F + c, up);
    }
}

template <bool BACKWARD>
static inline void swiglu_launch(floatX *out, const floatX *dout, const floatX *inp,
                                 size_t N, size_t F, cudaStream_t stream) {
    kernel_cost(KERNEL_EXPONENTIAL, N * F, (BACKWARD ? 5 : 3) * sizeof(floatX),
                BACKWARD ? 12 : 5);
    by_packs(F, [&](auto W) {
        dim3 grid((unsigned)CEIL_DIV(F, (size_t)SWIGLU_THREADS * W),
                  row_strides(N, SWIGLU_ROWS));
        LAUNCH((swiglu_kernel<W, BACKWARD>), grid, SWIGLU_THREADS, stream)
        (out, dout, inp, N, F);
    });
}

// Computes out[N, F] = silu(gate) * up of inp[N, 2F].
static inline void swiglu_forward(floatX *out, const floatX *inp, size_t N, size_t F,
                                  cudaStream_t stream) {
    swiglu_launch<false>(out, NULL, inp, N, F, stream);
}

// Computes dinp[N, 2F] from dout[N, F] and forward's inp[N, 2F].
static inline void swiglu_backward(floatX *dinp, const floatX *dout, const floatX *inp,
                                   size_t N, size_t F, cudaStream_t stream) {
    swiglu_launch<true>(dinp, dout, inp, N, F, stream);
}

// Computes out = relu(inp)^2 if dout is NULL, else out = 2 relu(inp) dout; out may be
// dout.
template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    relu2_kernel(floatX *out, const floatX *dout, const floatX *inp, size_t n) {
    Share s = element_share<W>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float x[W], d[W] = {};
        load_floats<W>(x, inp + i * W);
        if (dout) load_floats<W>(d, dout + i * W);
        for (int k = 0; k < W; k++) {
            x[k] = x[k] < 0.0f ? 0.0f : x[k];  // NaN stays
            x[k] *= dout ? 2.0f * d[k] : x[k];
        }
        store_whole_floats<W>(out + i * W, x);
    }
}

// Computes dinp[n] = dout * 2 relu(inp); dinp may be dout.
static inline void relu2_backward(floatX *dinp, const floatX *dout, const floatX *inp,
                                  size_t n, cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, n, (dout ? 3 : 2) * sizeof(floatX), 2);
    by_packs(n, [&](auto W) {
        LAUNCH(relu2_kernel<W>, element_blocks(n), ELEMENT_THREADS, stream)
        (dinp, dout, inp, n);
    });
}

// Computes out[n] = relu(inp[n])^2.
static inline void relu2_forward(floatX *out, const floatX *inp, size_t n,
                                 cudaStream_t stream) {
    relu2_backward(out, NULL, inp, n, stream);
}

#endif
