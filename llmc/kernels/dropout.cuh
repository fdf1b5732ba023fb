// dropout.cuh: dropout of the embedding and of both residual branches; that of attention probabilities is in its
// kernels. The masks are those of llmc/dropout.h: nothing is stored.
//
// defines: dropout_apply
#ifndef LLMC_DROPOUT_CUH
#define LLMC_DROPOUT_CUH

#include "llmc/dropout.h"
#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/shares.cuh"

// Element c of row n is element (n % T) * C + c of sample n / T. W divides a block and C.
template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    dropout_kernel(floatX *out, const floatX *inp, const floatX *bias, Dropout d, size_t rows, size_t row0, size_t T,
                   size_t C) {
    Share s = element_share<W>(rows * C);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t n = row0 + i * W / C, c = i * W % C, element = n % T * C + c;
        Philox block = dropout_block(&d, n / T, element / DROPOUT_BLOCK);
        float x[W], b[W];
        load_floats<W>(x, inp + i * W);
        if (bias) {
            load_floats<W>(b, bias + c);
            for (int k = 0; k < W; k++) x[k] += b[k];
        }
        unsigned first = (unsigned)(element % DROPOUT_BLOCK);
        for (unsigned k = 0; k < W; k++) x[k] *= dropout_factor(&d, &block, first + k);
        store_floats<W>(out + i * W, x);
    }
}

// out[rows, C] = factor * (inp + bias), where rows are rows row0 .. of samples of T tokens each; bias [C] or NULL. out
// may be inp.
static inline void dropout_apply(floatX *out, const floatX *inp, const floatX *bias, Dropout d, size_t rows,
                                 size_t row0, size_t T, size_t C, cudaStream_t stream) {
    if (rows == 0) return;
    bool whole = C % DROPOUT_BLOCK == 0 && aligned16(out) && aligned16(inp) && (!bias || aligned16(bias));
    unsigned blocks = element_blocks(rows * C);
    kernel_cost(KERNEL_ELEMENTWISE, rows * C, 2 * sizeof(floatX), 2);
    if (whole) {
        LAUNCH(dropout_kernel<DROPOUT_BLOCK>, blocks, ELEMENT_THREADS, 0, stream)
        (out, inp, bias, d, rows, row0, T, C);
    } else {
        LAUNCH(dropout_kernel<1>, blocks, ELEMENT_THREADS, 0, stream)(out, inp, bias, d, rows, row0, T, C);
    }
}

#endif
