// attention.cuh: causal self-attention, straight on the interleaved q|k|v that the
// projection wrote.
//
// Flash attention needs memory O(T) and no matrix of scores. It is deterministic.
//   tensor cores           bf16, heads of up to 256 channels, a multiple of 8.
//   asynchronous products  The same on Hopper, heads of 64 or 128 channels, no dropout.
//   fp32 arithmetic        All others.
// d: dropout of the probabilities. NH may be the heads of one tensor rank. C is then their
// share of the channels, and HS = C / NH.
//
// defines: attention_of, attention_launch, attention_forward, attention_backward
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include <type_traits>

#include "llmc/host/choices.h"
#include "llmc/kernels/attention_mma.cuh"
#include "llmc/kernels/attention_rows.cuh"
#include "llmc/kernels/dropout.cuh"
#if defined(PRECISION_BF16) && defined(__CUDACC__)
#include "llmc/kernels/attention_wgmma.cuh"
#endif

// The rows of this machine's threads in fp32 arithmetic.
#if defined(__CUDACC__) || defined(GPU_SHAPES)
template <int CAPACITY, class Args = Attention>
using RowsOf = AttentionRows<CAPACITY, Args>;
#else
#include "llmc/cpu/attention_vectors.h"
#endif

// Describes qkv[B,T,NH + 2 KV,HS]; the caller adds the outputs. KV 0: NH.
static inline Attention attention_of(const floatX *qkv, size_t B, size_t T, size_t C,
                                     size_t NH, size_t KV = 0) {
    Attention a = Attention();
    a.B = B;
    a.T = a.Tk = a.rows = T;
    a.NH = NH;
    a.KV = KV ? KV : NH;
    a.HS = C / NH;
    a.stride = a.k_stride = C + 2 * a.KV * a.HS;
    a.out_stride = C;
    a.scale = 1.0f / sqrtf((float)a.HS);
    a.q = qkv;
    a.k = qkv + C;
    a.v = a.k + a.KV * a.HS;
    if (a.HS <= ATTENTION_MAX_HEAD_SIZE) return a;
    fprintf(stderr, "error: a head of %zu channels is too large: %d are the most\n", a.HS,
            ATTENTION_MAX_HEAD_SIZE);
    exit(1);
}

// Calls launch with the smallest capacity that holds HS channels.
template <int CAPACITY, int... LARGER, class Launch>
static inline void attention_capacity(size_t HS, Launch launch) {
    if constexpr (sizeof...(LARGER) > 0) {
        if (HS > CAPACITY) return attention_capacity<LARGER...>(HS, launch);
    }
    launch(std::integral_constant<int, CAPACITY>());
}

// Launches the best kernels. Args: Attention, or AttentionPair for the rows of two ranks
// (llmc/kernels/context.cuh).
template <class Args>
static inline void attention_launch(const Args &a, const Dropout &drop, bool backward,
                                    cudaStream_t stream) {
    if (drop.threshold && a.KV != a.NH) {
        fprintf(stderr,
                "error: dropout of attention needs as many heads of keys as of queries\n");
        exit(1);
    }
#if defined(PRECISION_BF16) && defined(__CUDACC__)
    if constexpr (std::is_same_v<Args, Attention>) {
        static const bool hopper = wgmma_device();
        if (hopper && !drop.threshold && attention_wgmma_takes(a))
            return attention_wgmma(a, backward, stream);
    }
#endif
#ifdef PRECISION_BF16
    if (attention_mma_takes(a)) {
        attention_capacity<ATTENTION_MMA_CAPACITIES>(a.HS, [&](auto capacity) {
            constexpr int CAPACITY = decltype(capacity)::value;
            if constexpr (!Args::FIRST || CAPACITY <= 160)
                by_dropout(drop, [&](auto drops) {
                    attention_mma<AttentionMma<CAPACITY, Args>, drops>(a, drop, backward,
                                                                       stream);
                });
        });
        return;
    }
#endif
    attention_capacity<32, 64, 128, 512>(a.HS, [&](auto capacity) {
        typedef RowsOf<decltype(capacity)::value, Args> A;
        by_dropout(
            drop, [&](auto drops) { attention_rows<A, drops>(a, drop, backward, stream); });
    });
}

// Computes out[B,T,C] from qkv[B,T,3,NH,HS]. Also computes lse[B,NH,T] for the backward
// pass: the log-sum-exp of each row of scores. KV: heads of k and of v. Each serves NH / KV
// query heads, and qkv is then [B,T,NH + 2 KV,HS].
static inline void attention_forward(floatX *out, float *lse, const floatX *qkv, size_t B,
                                     size_t T, size_t C, size_t NH, cudaStream_t stream,
                                     Dropout d = Dropout{}, size_t KV = 0) {
    Attention a = attention_of(qkv, B, T, C, NH, KV);
    a.out = out;
    a.lse = lse;
    attention_cost(false, B, T, NH, a.KV, a.HS, sizeof(floatX));
    attention_launch(a, d, false, stream);
}

// Computes dqkv[B,T,3,NH,HS] from dout[B,T,C], forward's input qkv and its outputs.
// dot[B,NH,T] is scratch for the dot product of each output and its gradient.
static inline void attention_backward(floatX *dqkv, float *dot, const floatX *dout,
                                      const floatX *out, const float *lse,
                                      const floatX *qkv, size_t B, size_t T, size_t C,
                                      size_t NH, cudaStream_t stream, Dropout d = Dropout{},
                                      size_t KV = 0) {
    Attention a = attention_of(qkv, B, T, C, NH, KV);
    a.y = out;
    a.lse = (float *)lse;
    a.dout = dout;
    a.dot = dot;  // lse is only read
    a.dq = dqkv;
    a.dk = dqkv + C;
    a.dv = a.dk + a.KV * a.HS;
    attention_cost(true, B, T, NH, a.KV, a.HS, sizeof(floatX));
    attention_launch(a, d, true, stream);
}

#endif
