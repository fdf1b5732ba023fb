// attention.cuh: causal self-attention, straight on the interleaved q|k|v that the projection wrote.
//
// Flash attention: memory O(T), no matrix of scores; deterministic. bf16 heads of up to 128 channels, a
// multiple of 8, go to the tensor cores; everything else is done in fp32 arithmetic.
// NH may be the heads of one tensor rank; C is then their share of the channels, and HS = C / NH.
//
// defines: ATTENTION_MAX_HEAD_SIZE, attention_saved_bytes, attention_scratch_bytes, attention_forward,
//          attention_backward
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "llmc/kernels/attention_mma.cuh"
#include "llmc/kernels/attention_rows.cuh"
#include "llmc/kernels/matmul.cuh"

#define ATTENTION_MAX_HEAD_SIZE 512

// Bytes kept from forward to backward, per micro-batch and layer: the log-sum-exp of the scores [B,NH,T].
static inline size_t attention_saved_bytes(size_t B, size_t T, size_t C, size_t NH) {
    (void)C;
    return B * NH * T * sizeof(float);
}

// Bytes of scratch for backward: the dot product of each output and its gradient [B,NH,T].
static inline size_t attention_scratch_bytes(size_t B, size_t T, size_t C, size_t NH) {
    (void)C;
    return B * NH * T * sizeof(float);
}

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

// out[B,T,C] from qkv[B,T,3,NH,HS]; fills saved (attention_saved_bytes) for the backward pass.
static inline void attention_forward(Matmul *mm, floatX *out, void *saved, const floatX *qkv, size_t B,
                                     size_t T, size_t C, size_t NH) {
    AttentionShape a = attention_shape(B, T, C, NH);
    float *lse = (float *)saved; // [B,NH,T]
    cudaStream_t stream = mm->stream;
#ifdef PRECISION_BF16
    if (attention_mma_takes(a)) {
        if (a.HS <= 32) attention_forward_mma<32>(out, lse, qkv, a, stream);
        else if (a.HS <= 64) attention_forward_mma<64>(out, lse, qkv, a, stream);
        else if (a.HS <= 96) attention_forward_mma<96>(out, lse, qkv, a, stream);
        else attention_forward_mma<128>(out, lse, qkv, a, stream);
        return;
    }
#endif
    if (a.HS <= 32) attention_forward_rows<RowsHere<32>>(out, lse, qkv, a, stream);
    else if (a.HS <= 64) attention_forward_rows<RowsHere<64>>(out, lse, qkv, a, stream);
    else if (a.HS <= 128) attention_forward_rows<RowsHere<128>>(out, lse, qkv, a, stream);
    else attention_forward_rows<RowsHere<512>>(out, lse, qkv, a, stream);
}

// dqkv[B,T,3,NH,HS] from dout[B,T,C] and what forward read, wrote and saved. scratch: attention_scratch_bytes.
static inline void attention_backward(Matmul *mm, floatX *dqkv, void *scratch, const floatX *dout,
                                      const floatX *out, const void *saved, const floatX *qkv, size_t B,
                                      size_t T, size_t C, size_t NH) {
    AttentionShape a = attention_shape(B, T, C, NH);
    const float *lse = (const float *)saved;
    float *dot = (float *)scratch; // [B,NH,T]
    cudaStream_t stream = mm->stream;
#ifdef PRECISION_BF16
    if (attention_mma_takes(a)) {
        if (a.HS <= 32) attention_backward_mma<32>(dqkv, dot, dout, out, lse, qkv, a, stream);
        else if (a.HS <= 64) attention_backward_mma<64>(dqkv, dot, dout, out, lse, qkv, a, stream);
        else if (a.HS <= 96) attention_backward_mma<96>(dqkv, dot, dout, out, lse, qkv, a, stream);
        else attention_backward_mma<128>(dqkv, dot, dout, out, lse, qkv, a, stream);
        return;
    }
#endif
    if (a.HS <= 32) attention_backward_rows<RowsHere<32>>(dqkv, dot, dout, out, lse, qkv, a, stream);
    else if (a.HS <= 64) attention_backward_rows<RowsHere<64>>(dqkv, dot, dout, out, lse, qkv, a, stream);
    else if (a.HS <= 128) attention_backward_rows<RowsHere<128>>(dqkv, dot, dout, out, lse, qkv, a, stream);
    else attention_backward_rows<RowsHere<512>>(dqkv, dot, dout, out, lse, qkv, a, stream);
}

#endif
