// attention.cuh: causal self-attention, straight on the interleaved q|k|v that the projection wrote.
//
// Flash attention: memory O(T), no matrix of scores; deterministic. bf16 heads of up to 256 channels, a
// multiple of 8, go to the tensor cores; everything else is done in fp32 arithmetic. d: dropout of the probabilities.
// NH may be the heads of one tensor rank; C is then their share of the channels, and HS = C / NH.
//
// defines: attention_forward, attention_backward
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "llmc/host/choices.h"
#include "llmc/kernels/attention_mma.cuh"
#include "llmc/kernels/attention_rows_backward.cuh"

// The fp32 kernels as this machine runs them best: a row of 16 channels a lane, or 16 rows a thread, for which one
// capacity does, as it keeps nothing in registers.
template <int CAPACITY>
using RowsHere = AttentionRows<ATTENTION_ROWS == 1 ? CAPACITY : ATTENTION_MAX_HEAD_SIZE, ATTENTION_ROWS,
                               ATTENTION_ROWS == 1 ? CAPACITY / 16 : 1>;

static inline AttentionShape attention_shape(size_t B, size_t T, size_t C, size_t NH) {
    size_t HS = C / NH;
    if (HS > ATTENTION_MAX_HEAD_SIZE) {
        fprintf(stderr, "error: a head of %zu channels is too large: %d are the most\n", HS, ATTENTION_MAX_HEAD_SIZE);
        exit(1);
    }
    AttentionShape a = {B, T, NH, HS, 1.0f / sqrtf((float)HS)};
    return a;
}

// out[B,T,C] from qkv[B,T,3,NH,HS], and for the backward pass lse[B,NH,T]: the log-sum-exp of each row of scores.
static inline void attention_forward(floatX *out, float *lse, const floatX *qkv, size_t B, size_t T, size_t C,
                                     size_t NH, cudaStream_t stream, Dropout d = Dropout{}) {
    AttentionShape a = attention_shape(B, T, C, NH);
    attention_cost(false, B, T, NH, a.HS, sizeof(floatX));
#ifdef PRECISION_BF16
    if (attention_mma_takes(a)) {
        if (a.HS <= 32) attention_forward_mma<32>(out, lse, qkv, a, stream, d);
        else if (a.HS <= 64) attention_forward_mma<64>(out, lse, qkv, a, stream, d);
        else if (a.HS <= 96) attention_forward_mma<96>(out, lse, qkv, a, stream, d);
        else if (a.HS <= 128) attention_forward_mma<128>(out, lse, qkv, a, stream, d);
        else if (a.HS <= 160) attention_forward_mma<160>(out, lse, qkv, a, stream, d);
        else if (a.HS <= 192) attention_forward_mma<192>(out, lse, qkv, a, stream, d);
        else attention_forward_mma<256>(out, lse, qkv, a, stream, d);
        return;
    }
#endif
    if (a.HS <= 32) attention_forward_rows<RowsHere<32>>(out, lse, qkv, a, stream, d);
    else if (a.HS <= 64) attention_forward_rows<RowsHere<64>>(out, lse, qkv, a, stream, d);
    else if (a.HS <= 128) attention_forward_rows<RowsHere<128>>(out, lse, qkv, a, stream, d);
    else attention_forward_rows<RowsHere<512>>(out, lse, qkv, a, stream, d);
}

// dqkv[B,T,3,NH,HS] from dout[B,T,C] and what forward read (qkv) and wrote (out, lse). dot[B,NH,T] is scratch: the dot
// product of each output and its gradient.
static inline void attention_backward(floatX *dqkv, float *dot, const floatX *dout, const floatX *out,
                                      const float *lse, const floatX *qkv, size_t B, size_t T, size_t C,
                                      size_t NH, cudaStream_t stream, Dropout d = Dropout{}) {
    AttentionShape a = attention_shape(B, T, C, NH);
    attention_cost(true, B, T, NH, a.HS, sizeof(floatX));
#ifdef PRECISION_BF16
    if (attention_mma_takes(a)) {
        if (a.HS <= 32) attention_backward_mma<32>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
        else if (a.HS <= 64) attention_backward_mma<64>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
        else if (a.HS <= 96) attention_backward_mma<96>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
        else if (a.HS <= 128) attention_backward_mma<128>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
        else if (a.HS <= 160) attention_backward_mma<160>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
        else if (a.HS <= 192) attention_backward_mma<192>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
        else attention_backward_mma<256>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
        return;
    }
#endif
    if (a.HS <= 32) attention_backward_rows<RowsHere<32>>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
    else if (a.HS <= 64) attention_backward_rows<RowsHere<64>>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
    else if (a.HS <= 128) attention_backward_rows<RowsHere<128>>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
    else attention_backward_rows<RowsHere<512>>(dqkv, dot, dout, out, lse, qkv, a, stream, d);
}

#endif
