// linear.cuh: matrix products with weights [OC, IC], as Hugging Face's Linear stores them; matmul.cuh has [IC, OC].
// lesson: llama
//
// defines: linear_forward, linear_backward_input, linear_backward_weight
#ifndef LLMC_LINEAR_CUH
#define LLMC_LINEAR_CUH

#include "llmc/kernels/matmul.cuh"

// out[N,OC] = inp[N,IC] weight[OC,IC]^T (+ bias[OC], unless it is NULL)
static inline void linear_forward(Matmul *mm, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                                  size_t N, size_t IC, size_t OC) {
    GemmArgs g = gemm_args(out, false, inp, false, weight, true, N, OC, IC);
    g.bias = bias;
    gemm(mm, &g);
}

// dinp[N,IC] = dout[N,OC] weight[OC,IC]
static inline void linear_backward_input(Matmul *mm, floatX *dinp, const floatX *dout, const floatX *weight, size_t N,
                                         size_t IC, size_t OC) {
    head_backward_input(mm, dinp, dout, weight, N, IC, OC);
}

// dweight[OC,IC] (float) = or += dout[N,OC]^T inp[N,IC]
static inline void linear_backward_weight(Matmul *mm, float *dweight, const floatX *inp, const floatX *dout, size_t N,
                                          size_t IC, size_t OC, bool accumulate) {
    head_backward_weight(mm, dweight, inp, dout, N, IC, OC, accumulate);
}

#endif
