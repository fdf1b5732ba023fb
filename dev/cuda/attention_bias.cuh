// attention_bias.cuh: the gradient of the bias of q|k|v, summed by attention's backward kernels: a block has 64 rows of
// a gradient in registers when it writes them, and leaves the sums of their columns. Then a row of floats for 64 tokens
// is read, not the gradient of all tokens again.
//
// defines: AttentionBias, attention_bias_rows, attention_bias_backward
#ifndef DEV_CUDA_ATTENTION_BIAS_CUH
#define DEV_CUDA_ATTENTION_BIAS_CUH

#include "llmc/kernels/attention_mma.cuh"
#include "llmc/kernels/bias.cuh"

// Heads of 33 to 64 channels. Attention.part: the blocks' sums [attention_bias_rows, stride], of the columns of dqkv.
struct AttentionBias : AttentionMma<64> {
    // Writes a gradient as store_fragments does. Each lane adds its two rows, and one thread a column the 32 lanes'
    // sums in their order.
    template <int N8>
    __device__ __forceinline__ static void store(bfloat16 *p, size_t stride, int first, const MmaPlace &at,
                                                 const Attention &a, const float (&d)[N8][4], float scale0,
                                                 float scale1) {
        __shared__ float sums[ATTENTION_MMA_THREADS / 4][CAPACITY + 8];
        store_fragments(p, stride, first, at, a, d, scale0, scale1);
        UNROLL
        for (int i = 0; i < 2 * N8; i++) {  // of the gradients as stored; rows that do not exist have zeros
            float x = to_float(from_float<bfloat16>(d[i / 2][i % 2] * scale0));
            float y = to_float(from_float<bfloat16>(d[i / 2][2 + i % 2] * scale1));
            sums[threadIdx.x / 4][i / 2 * 8 + at.pair + i % 2] = x + y;
        }
        __syncthreads();
        size_t before = at.b * a.T * stride, blocks = CEIL_DIV(a.T, ATTENTION_MMA_ROWS);
        float *row = a.part + (at.b * blocks + (size_t)at.block_row / ATTENTION_MMA_ROWS) * stride;
        int column = (int)threadIdx.x;
        if (column < 8 * N8 && first + column < (int)a.HS) {
            float sum = 0.0f;
            for (unsigned i = 0; i < ATTENTION_MMA_THREADS / 4; i++) sum += sums[i][column];
            row[(size_t)(p - a.dq) - before + (size_t)(first + column)] = sum;
        }
        __syncthreads();  // before the next gradient
    }
};

// Returns the rows of Attention.part.
static inline size_t attention_bias_rows(size_t B, size_t T) { return B * CEIL_DIV(T, ATTENTION_MMA_ROWS); }

// Queues the backward pass that a describes; dbias[a.stride] = the sums of the columns of its dqkv.
static inline void attention_bias_backward(const Attention &a, float *dbias, cudaStream_t stream) {
    attention_mma<AttentionBias, false>(a, Dropout(), true, stream);
    column_sums(dbias, NULL, a.part, attention_bias_rows(a.B, a.T), a.stride, a.stride, false, stream);
}

#endif
