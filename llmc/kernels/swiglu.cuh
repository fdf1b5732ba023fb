// swiglu.cuh: the activations of Llama's and Nemotron's MLPs: silu(gate) * up (Shazeer 2020), and relu(x)^2.
// lesson: llama
//
// A row of the input is F gates, then the F channels that they multiply: one matrix product makes both.
//
// defines: swiglu_forward, swiglu_backward, relu2_forward, relu2_backward
#ifndef LLMC_SWIGLU_CUH
#define LLMC_SWIGLU_CUH

#include "llmc/kernels/gelu.cuh"

static constexpr unsigned SWIGLU_THREADS = 128, SWIGLU_ROWS = 8;  // a thread takes the same columns of several rows

// gate becomes the product with up; with BACKWARD d, the product's gradient, becomes gate's and up gets its own.
template <int W, bool BACKWARD>
__device__ __forceinline__ void swiglu_elements(float (&gate)[W], float (&up)[W], float (&d)[W]) {
    for (int k = 0; k < W; k++) {
        float g = gate[k] < -40.0f ? -40.0f : gate[k];  // below it all is nothing; keeps infinity times zero away
        float e = gelu_exp(-g), s = gelu_divide(1.0f, 1.0f + e);
        gate[k] = g * s * up[k];
        if (!BACKWARD) continue;
        float from = d[k];
        d[k] = from * up[k] * (s + g * s * (e * s));  // e s is 1 - s without the cancellation
        up[k] = from * g * s;
    }
}

template <int W>
__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_forward_kernel(floatX *out, const floatX *inp, size_t N, size_t F) {
    size_t c = ((size_t)blockIdx.x * SWIGLU_THREADS + threadIdx.x) * W;
    size_t first = (size_t)blockIdx.y * SWIGLU_ROWS, end = first + SWIGLU_ROWS < N ? first + SWIGLU_ROWS : N;
    if (c >= F) return;
    for (size_t n = first; n < end; n++) {
        float gate[W], up[W];
        load_floats<W>(gate, inp + n * 2 * F + c);
        load_floats<W>(up, inp + n * 2 * F + F + c);
        swiglu_elements<W, false>(gate, up, gate);
        store_floats<W>(out + n * F + c, gate);
    }
}

template <int W>
__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_backward_kernel(floatX *dinp, const floatX *dout, const floatX *inp, size_t N, size_t F) {
    size_t c = ((size_t)blockIdx.x * SWIGLU_THREADS + threadIdx.x) * W;
    size_t first = (size_t)blockIdx.y * SWIGLU_ROWS, end = first + SWIGLU_ROWS < N ? first + SWIGLU_ROWS : N;
    if (c >= F) return;
    for (size_t n = first; n < end; n++) {
        float gate[W], up[W], d[W];
        load_floats<W>(gate, inp + n * 2 * F + c);
        load_floats<W>(up, inp + n * 2 * F + F + c);
        load_floats<W>(d, dout + n * F + c);
        swiglu_elements<W, true>(gate, up, d);
        store_floats<W>(dinp + n * 2 * F + c, d);
        store_floats<W>(dinp + n * 2 * F + F + c, up);
    }
}

static inline dim3 swiglu_grid(size_t N, size_t F, size_t W) {
    return dim3((unsigned)CEIL_DIV(F, SWIGLU_THREADS * W), (unsigned)CEIL_DIV(N, (size_t)SWIGLU_ROWS));
}

// out[N, F] = silu(gate) * up of inp[N, 2F]
static inline void swiglu_forward(floatX *out, const floatX *inp, size_t N, size_t F, cudaStream_t stream) {
    if (N == 0) return;
    kernel_cost(KERNEL_EXPONENTIAL, N * F, 3 * sizeof(floatX), 5);
    by_packs(aligned16(out, inp) ? F : 1, [&](auto W) {
        LAUNCH(swiglu_forward_kernel<W>, swiglu_grid(N, F, W), SWIGLU_THREADS, 0, stream)(out, inp, N, F);
    });
}

// dinp[N, 2F] from dout[N, F] and forward's inp[N, 2F]
static inline void swiglu_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t N, size_t F,
                                   cudaStream_t stream) {
    if (N == 0) return;
    kernel_cost(KERNEL_EXPONENTIAL, N * F, 5 * sizeof(floatX), 12);
    by_packs(aligned16(dinp, dout, inp) ? F : 1, [&](auto W) {
        LAUNCH(swiglu_backward_kernel<W>, swiglu_grid(N, F, W), SWIGLU_THREADS, 0, stream)(dinp, dout, inp, N, F);
    });
}

// With dout NULL out = relu(inp)^2, else out = 2 relu(inp) dout; out may be dout.
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
        store_floats<W>(out + i * W, x);
    }
}

static inline void relu2_launch(floatX *out, const floatX *dout, const floatX *inp, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    kernel_cost(KERNEL_ELEMENTWISE, n, (dout ? 3 : 2) * sizeof(floatX), 2);
    by_packs(aligned16(out, dout, inp) ? n : 1, [&](auto W) {
        LAUNCH(relu2_kernel<W>, element_blocks(n), ELEMENT_THREADS, 0, stream)(out, dout, inp, n);
    });
}

// out[n] = relu(inp[n])^2
static inline void relu2_forward(floatX *out, const floatX *inp, size_t n, cudaStream_t stream) {
    relu2_launch(out, NULL, inp, n, stream);
}

// dinp[n] = dout * 2 relu(inp); dinp may be dout.
static inline void relu2_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t n, cudaStream_t stream) {
    relu2_launch(dinp, dout, inp, n, stream);
}

#endif
