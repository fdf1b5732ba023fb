// attention_first.cuh: the first version of llmc/kernels/attention_mma.cuh, for the laboratory: the same products in
// 765 instructions a tile instead of 315. It makes the addresses of a copy and asks for its range 16 bytes at a time,
// makes those in shared memory anew in every loop, and selects the larger of two by a comparison; and the blocks of a
// head lie B NH blocks apart. Heads of up to 128 channels, a multiple of 8.
//
// defines: first_forward_mma, first_backward_mma
#ifndef LLMC_ATTENTION_FIRST_CUH
#define LLMC_ATTENTION_FIRST_CUH

#include "llmc/kernels/attention_mma.cuh"

// CAPACITY: a multiple of 16, at least HS; the channels between are zero. A tile's rows are 16 bytes longer than
// its channels, so that the 8 rows that an ldmatrix reads lie in different banks.
template <int CAPACITY_>
struct FirstMma {
    static constexpr int CAPACITY = CAPACITY_, STRIDE = CAPACITY + 8;
    static constexpr int K16 = CAPACITY / 16, N8 = CAPACITY / 8;  // steps and tiles over the channels
    static constexpr int KEYS = CAPACITY <= 64 ? 64 : 32;         // of a tile, as registers and 48 KiB allow
    static constexpr int QUERIES = CAPACITY <= 64 ? 64 : 16;
    // Large heads leave no registers for the block's own values: they are read again, half a row at a time.
    static constexpr bool VALUES_SHARED = CAPACITY > 96;
};

__device__ __forceinline__ MmaPlace first_place(const AttentionShape &a, bool last_first) {
    size_t heads = a.B * a.NH, C = a.NH * a.HS, blocks = CEIL_DIV(a.T, ATTENTION_MMA_ROWS);
    size_t block = blockIdx.x / heads, b, h;
    MmaPlace p;
    p.T = (int)a.T;
    p.head = blockIdx.x % heads, b = p.head / a.NH, h = p.head % a.NH;
    p.qkv = b * a.T * 3 * C + h * a.HS, p.out = b * a.T * C + h * a.HS;
    p.block_row = (int)((last_first ? blocks - 1 - block : block) * ATTENTION_MMA_ROWS); // the longest begin first
    p.warp_row = p.block_row + (int)(threadIdx.x / 32) * 16;
    p.row = p.warp_row + (int)(threadIdx.x % 32) / 4;
    p.pair = (int)(threadIdx.x % 4) * 2;
    return p;
}

// Starts the copy of rows first, ... of p, `stride` apart, into a tile; zeros beyond T and HS.
template <size_t ROWS, class A>
__device__ __forceinline__ void first_copy(bfloat16 *tile, const bfloat16 *p, size_t stride, int first,
                                           const AttentionShape &a) {
    constexpr int packs = A::CAPACITY / 8;
    for (int i = (int)threadIdx.x; i < (int)ROWS * packs; i += ATTENTION_MMA_THREADS) {
        int row = i / packs, c = i % packs * 8;
        bool exists = first + row < (int)a.T && c < (int)a.HS;
        copy_async16(SharedTile(tile + row * A::STRIDE + c), exists ? p + (size_t)(first + row) * stride + c : p,
                     exists);
    }
}

// The same from a tile, of which p is the warp's first row.
template <int K16, int STRIDE>
__device__ __forceinline__ void first_fragments(uint32_t (&x)[K16][4], const bfloat16 *p) {
    UNROLL
    for (int k = 0; k < K16; k++)
        ldmatrix_x4<false>(x[k], SharedTile(p + threadIdx.x % 16 * STRIDE + k * 16 + threadIdx.x % 32 / 16 * 8));
}

template <bool TRANS, int STRIDE, int N8, int K16>
__device__ __forceinline__ void first_product(float (&d)[N8][4], const uint32_t (&a)[K16][4], const bfloat16 *tile) {
    mma_product<TRANS, STRIDE>(d, a, matrix_row<TRANS, STRIDE>(tile));
}

template <class A>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    first_forward_mma_kernel(bfloat16 *out, float *lse, const bfloat16 *qkv, AttentionShape a) {
    alignas(16) __shared__ bfloat16 k_tile[2][A::KEYS * A::STRIDE], v_tile[2][A::KEYS * A::STRIDE];
    MmaPlace at = first_place(a, true);
    size_t C = a.NH * a.HS;
    int end = at.block_row + (int)ATTENTION_MMA_ROWS < at.T ? at.block_row + (int)ATTENTION_MMA_ROWS : at.T;
    const bfloat16 *q = qkv + at.qkv, *k = q + C, *v = k + C;
    first_copy<A::KEYS, A>(k_tile[0], k, 3 * C, 0, a);
    first_copy<A::KEYS, A>(v_tile[0], v, 3 * C, 0, a);
    copy_async_commit();
    uint32_t own[A::K16][4];
    load_fragments<A>(own, q, 3 * C, at, a);
    float mixed[A::N8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const float to_log2 = a.scale * LOG2_E;
    for (int first = 0; first < end; first += A::KEYS) {
        int stage = first / A::KEYS % 2;
        if (first + A::KEYS < end) {
            first_copy<A::KEYS, A>(k_tile[!stage], k, 3 * C, first + A::KEYS, a);
            first_copy<A::KEYS, A>(v_tile[!stage], v, 3 * C, first + A::KEYS, a);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        float s[A::KEYS / 8][4] = {};
        first_product<false, A::STRIDE>(s, own, k_tile[stage]);
        if (first + A::KEYS > at.warp_row + 1) { // some key comes after some query
            int seen = at.row - first;
            UNROLL
            for (int n = 0; n < A::KEYS / 8; n++) {
                UNROLL
                for (int i = 0; i < 4; i++)
                    if (n * 8 + at.pair + i % 2 > seen + i / 2 * 8) s[n][i] = -INFINITY;
            }
        }
        // Key 0 is seen by every query: after the first tile max is finite.
        float largest[2] = {max[0], max[1]}, correction[2];
        UNROLL
        for (int n = 0; n < A::KEYS / 8; n++) {
            UNROLL
            for (int i = 0; i < 4; i++)
                largest[i / 2] = s[n][i] > largest[i / 2] ? s[n][i] : largest[i / 2];
        }
        quad_max(largest);
        UNROLL
        for (int i = 0; i < 2; i++) {
            correction[i] = exponential2((max[i] - largest[i]) * to_log2);
            max[i] = largest[i];
            sum[i] *= correction[i];
        }
        UNROLL
        for (int n = 0; n < A::KEYS / 8; n++) {
            UNROLL
            for (int i = 0; i < 4; i++) s[n][i] = exponential2((s[n][i] - max[i / 2]) * to_log2);
            UNROLL
            for (int i = 0; i < 4; i++) sum[i / 2] += s[n][i];
        }
        UNROLL
        for (int n = 0; n < A::N8; n++) {
            UNROLL
            for (int i = 0; i < 4; i++) mixed[n][i] *= correction[i / 2];
        }
        uint32_t p[A::KEYS / 16][4];
        round_fragments<A::KEYS / 16>(p, s);
        first_product<true, A::STRIDE>(mixed, p, v_tile[stage]);
        __syncthreads();
    }
    quad_sum(sum);
    store_fragments(out + at.out, C, 0, at, a, mixed, 1.0f / sum[0], 1.0f / sum[1]);
    if (at.pair == 0) {
        UNROLL
        for (int i = 0; i < 2; i++)
            if (at.row + i * 8 < at.T) lse[at.head * a.T + at.row + i * 8] = max[i] * a.scale + logf(sum[i]);
    }
}

// The gradient of the queries, and dot[B,NH,T] = sum of dout * out, which the other kernel needs too.
template <class A>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    first_backward_query_mma_kernel(bfloat16 *dqkv, float *dot, const bfloat16 *dout, const bfloat16 *out,
                                        const float *lse, const bfloat16 *qkv, AttentionShape a) {
    alignas(16) __shared__ bfloat16 k_tile[2][A::KEYS * A::STRIDE], v_tile[2][A::KEYS * A::STRIDE];
    MmaPlace at = first_place(a, true);
    size_t C = a.NH * a.HS;
    int end = at.block_row + (int)ATTENTION_MMA_ROWS < at.T ? at.block_row + (int)ATTENTION_MMA_ROWS : at.T;
    const bfloat16 *q = qkv + at.qkv, *k = q + C, *v = k + C;
    first_copy<A::KEYS, A>(k_tile[0], k, 3 * C, 0, a);
    first_copy<A::KEYS, A>(v_tile[0], v, 3 * C, 0, a);
    copy_async_commit();
    uint32_t own[A::K16][4], d[A::K16][4];
    load_fragments<A>(own, q, 3 * C, at, a);
    load_fragments<A>(d, dout + at.out, C, at, a);
    float of_row[2] = {0.0f, 0.0f}, norm[2];
    UNROLL
    for (int k16 = 0; k16 < A::K16; k16++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            int row = at.row + i % 2 * 8, c = k16 * 16 + i / 2 * 8 + at.pair;
            uint32_t o = load_pair(out + at.out + (size_t)row * C + c, row < at.T && c < (int)a.HS);
            of_row[i % 2] += low_float(o) * low_float(d[k16][i]) + high_float(o) * high_float(d[k16][i]);
        }
    }
    quad_sum(of_row);
    UNROLL
    for (int i = 0; i < 2; i++) {
        size_t row = at.head * a.T + at.row + i * 8;
        bool exists = at.row + i * 8 < at.T;
        norm[i] = exists ? lse[row] * LOG2_E : 0.0f;
        if (exists && at.pair == 0) dot[row] = of_row[i];
    }
    float dq[A::N8][4] = {};
    const float to_log2 = a.scale * LOG2_E;
    for (int first = 0; first < end; first += A::KEYS) {
        int stage = first / A::KEYS % 2;
        if (first + A::KEYS < end) {
            first_copy<A::KEYS, A>(k_tile[!stage], k, 3 * C, first + A::KEYS, a);
            first_copy<A::KEYS, A>(v_tile[!stage], v, 3 * C, first + A::KEYS, a);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        float s[A::KEYS / 8][4] = {}, ds[A::KEYS / 8][4] = {};
        first_product<false, A::STRIDE>(s, own, k_tile[stage]);
        first_product<false, A::STRIDE>(ds, d, v_tile[stage]);
        int seen = at.row - first;
        bool all = first + A::KEYS <= at.warp_row + 1;
        UNROLL
        for (int n = 0; n < A::KEYS / 8; n++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                bool visible = all || n * 8 + at.pair + i % 2 <= seen + i / 2 * 8;
                float p = exponential2(visible ? s[n][i] * to_log2 - norm[i / 2] : -INFINITY);
                ds[n][i] = p * (ds[n][i] - of_row[i / 2]);
            }
        }
        uint32_t rounded[A::KEYS / 16][4];
        round_fragments<A::KEYS / 16>(rounded, ds);
        first_product<true, A::STRIDE>(dq, rounded, k_tile[stage]);
        __syncthreads();
    }
    store_fragments(dqkv + at.qkv, 3 * C, 0, at, a, dq, a.scale, a.scale);
}

// The gradients of the keys and values: rows are keys, columns of the (transposed) scores are queries.
template <class A>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    first_backward_key_mma_kernel(bfloat16 *dqkv, const float *dot, const bfloat16 *dout, const float *lse,
                                      const bfloat16 *qkv, AttentionShape a) {
    alignas(16) __shared__ bfloat16 q_tile[2][A::QUERIES * A::STRIDE], d_tile[2][A::QUERIES * A::STRIDE];
    alignas(16) __shared__ bfloat16 own_values[A::VALUES_SHARED ? ATTENTION_MMA_ROWS * A::STRIDE : 8];
    __shared__ float norm[2][A::QUERIES], of_query[2][A::QUERIES];
    MmaPlace at = first_place(a, false);
    size_t C = a.NH * a.HS;
    const bfloat16 *q = qkv + at.qkv;
    uint32_t k[A::K16][4], v[A::VALUES_SHARED ? 1 : A::K16][4];
    float dk[A::N8][4] = {}, dv[A::N8][4] = {};
    load_fragments<A>(k, q + C, 3 * C, at, a);
    if constexpr (A::VALUES_SHARED)
        first_copy<ATTENTION_MMA_ROWS, A>(own_values, q + 2 * C, 3 * C, at.block_row, a);
    else
        load_fragments<A>(v, q + 2 * C, 3 * C, at, a);
    const float to_log2 = a.scale * LOG2_E;
    first_copy<A::QUERIES, A>(q_tile[0], q, 3 * C, at.block_row, a);
    first_copy<A::QUERIES, A>(d_tile[0], dout + at.out, C, at.block_row, a);
    copy_async_commit();
    for (int first = at.block_row; first < at.T; first += A::QUERIES) {
        int stage = (first - at.block_row) / A::QUERIES % 2;
        int next = first + A::QUERIES;
        if (next < at.T) {
            first_copy<A::QUERIES, A>(q_tile[!stage], q, 3 * C, next, a);
            first_copy<A::QUERIES, A>(d_tile[!stage], dout + at.out, C, next, a);
        }
        copy_async_commit();
        if (threadIdx.x < (unsigned)A::QUERIES) { // a query that does not exist gets the probability 2^-inf
            bool exists = first + (int)threadIdx.x < at.T;
            size_t row = at.head * a.T + (size_t)first + threadIdx.x;
            norm[stage][threadIdx.x] = exists ? lse[row] * LOG2_E : INFINITY;
            of_query[stage][threadIdx.x] = exists ? dot[row] : 0.0f;
        }
        copy_async_wait<1>();
        __syncthreads();
        float p[A::QUERIES / 8][4] = {}, ds[A::QUERIES / 8][4] = {};
        uint32_t rounded[A::QUERIES / 16][4];
        first_product<false, A::STRIDE>(p, k, q_tile[stage]);
        // Query first + column sees key row if row <= first + column.
        int hidden = at.row - first;
        bool all = first >= at.warp_row + 15;
        UNROLL
        for (int n = 0; n < A::QUERIES / 8; n++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                int column = n * 8 + at.pair + i % 2;
                bool visible = all || column >= hidden + i / 2 * 8;
                p[n][i] = exponential2(visible ? p[n][i] * to_log2 - norm[stage][column] : -INFINITY);
            }
        }
        round_fragments<A::QUERIES / 16>(rounded, p);
        first_product<true, A::STRIDE>(dv, rounded, d_tile[stage]);
        if constexpr (A::VALUES_SHARED) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                uint32_t part[A::K16 / 2][4];
                int c = half * A::CAPACITY / 2;
                first_fragments<A::K16 / 2, A::STRIDE>(part, own_values + threadIdx.x / 32 * 16 * A::STRIDE + c);
                first_product<false, A::STRIDE>(ds, part, d_tile[stage] + c);
            }
        } else {
            first_product<false, A::STRIDE>(ds, v, d_tile[stage]);
        }
        UNROLL
        for (int n = 0; n < A::QUERIES / 8; n++) {
            UNROLL
            for (int i = 0; i < 4; i++)
                ds[n][i] = p[n][i] * (ds[n][i] - of_query[stage][n * 8 + at.pair + i % 2]);
        }
        round_fragments<A::QUERIES / 16>(rounded, ds);
        first_product<true, A::STRIDE>(dk, rounded, q_tile[stage]);
        __syncthreads();
    }
    store_fragments(dqkv + at.qkv + C, 3 * C, 0, at, a, dk, a.scale, a.scale);
    store_fragments(dqkv + at.qkv + 2 * C, 3 * C, 0, at, a, dv, 1.0f, 1.0f);
}

template <int CAPACITY>
static inline void first_forward_mma(bfloat16 *out, float *lse, const bfloat16 *qkv, AttentionShape a,
                                     cudaStream_t stream) {
    LAUNCH((first_forward_mma_kernel<FirstMma<CAPACITY>>), attention_mma_blocks(a), ATTENTION_MMA_THREADS, 0,
           stream)
    (out, lse, qkv, a);
}

// dot: [B,NH,T] floats of scratch.
template <int CAPACITY>
static inline void first_backward_mma(bfloat16 *dqkv, float *dot, const bfloat16 *dout, const bfloat16 *out,
                                          const float *lse, const bfloat16 *qkv, AttentionShape a,
                                      cudaStream_t stream) {
    typedef FirstMma<CAPACITY> A;
    LAUNCH((first_backward_query_mma_kernel<A>), attention_mma_blocks(a), ATTENTION_MMA_THREADS, 0, stream)
    (dqkv, dot, dout, out, lse, qkv, a);
    LAUNCH((first_backward_key_mma_kernel<A>), attention_mma_blocks(a), ATTENTION_MMA_THREADS, 0, stream)
    (dqkv, dot, dout, lse, qkv, a);
}

#endif
