// dropout.cuh: dropout of rows of the residual stream, by the masks of llmc/masks.h:
// nothing is stored. The kernels that add a residual (layernorm.cuh) and attention apply
// their masks themselves.
//
// defines: dropout_mask (of one pack, for other kernels), by_dropout, dropout_forward,
//          dropout_backward
#ifndef LLMC_DROPOUT_CUH
#define LLMC_DROPOUT_CUH

#include "llmc/masks.h"
#include "llmc/kernels/packs.cuh"

// Multiplies the W elements x of row n, column c on, by their factors. W, a power of 2,
// divides C.
template <int W>
__device__ __forceinline__ void dropout_mask(float (&x)[W], const Dropout &d, size_t n,
                                             size_t c, size_t C) {
    constexpr unsigned COUNT = W < DROPOUT_BLOCK ? W : DROPOUT_BLOCK;
    size_t row = d.row + n, element = tokens_position(d.tokens, row % d.T) * C + c;
    for (unsigned k0 = 0; k0 < W; k0 += COUNT, element += COUNT) {
        Philox block = dropout_block(&d, row / d.T, element / DROPOUT_BLOCK);
        unsigned first = (unsigned)(element % DROPOUT_BLOCK);
        for (unsigned k = 0; k < COUNT; k++)
            x[k0 + k] *= dropout_factor(&d, &block, first + k);
    }
}

// Calls launch with a constant: true if d drops anything. A kernel without dropout has
// more registers left.
template <class Launch>
static inline void by_dropout(const Dropout &d, Launch launch) {
    if (d.threshold)
        launch(std::true_type());
    else
        launch(std::false_type());
}

template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    dropout_kernel(floatX *out, const floatX *inp, Dropout d, size_t N, size_t C) {
    Share s = element_share<W>(N * C);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float x[W];
        load_floats<W>(x, inp + i * W);
        dropout_mask<W>(x, d, i * W / C, i * W % C, C);
        store_floats<W>(out + i * W, x);
    }
}

// Returns dout[N, C] * mask in out, which may be dout; without dropout dout itself.
static inline const floatX *dropout_backward(floatX *out, const floatX *dout, Dropout d,
                                             size_t N, size_t C, cudaStream_t stream) {
    if (!d.threshold) return dout;
    kernel_cost(KERNEL_ELEMENTWISE, N * C, 2 * sizeof(floatX), 1);
    by_packs(C, [&](auto W) {
        LAUNCH(dropout_kernel<W>, element_blocks(N * C), ELEMENT_THREADS, stream)
        (out, dout, d, N, C);
    });
    return out;
}

// Multiplies x[N, C] by the mask. Does nothing without dropout.
static inline void dropout_forward(floatX *x, Dropout d, size_t N, size_t C,
                                   cudaStream_t stream) {
    dropout_backward(x, x, d, N, C, stream);
}

#endif
