// attention_rows_backward.cuh: the backward pass of attention_rows.cuh.
//
// defines: attention_backward_rows
#ifndef LLMC_ATTENTION_ROWS_BACKWARD_CUH
#define LLMC_ATTENTION_ROWS_BACKWARD_CUH

#include "llmc/kernels/attention_rows.cuh"

// The gradient of the queries, and dot[B,NH,T] = sum of dout * out, which the other kernel needs too. With dropout it
// is still the sum over the keys of probability times gradient, as the same factors stand in both.
template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1)
    attention_backward_query_rows_kernel(floatX *dqkv, float *dot, const floatX *dout, const floatX *out,
                                         const float *lse, const floatX *qkv, AttentionShape a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile k_tile[A::TILE], v_tile[A::TILE];
    RowPlace at = row_place<A>(a);
    if (A::ALONE && at.row >= a.T) return;
    size_t C = a.NH * a.HS, from = at.b * a.T * 3 * C + at.h * a.HS, to = at.b * a.T * C + at.h * a.HS;
    const floatX *k = qkv + from + C, *v = k + C;
    typename A::V q[A::CHANNELS], d[A::CHANNELS], dq[A::CHANNELS];
    load_rows<A>(dq, k_tile, out + to, C, at.row, a, 1.0f);
    load_rows<A>(d, k_tile, dout + to, C, at.row, a, 1.0f);
    typename A::V product = {};
    for (int i = 0; i < A::channels(a); i++) product += dq[i] * d[i];
    zero_rows<A>(dq, a);
    if constexpr (A::LANES > 1) product = lanes_sum<A>(product);
    float norm[A::R], of_row[A::R];
    memcpy(of_row, &product, sizeof of_row);
    for (int r = 0; r < A::R; r++) {
        norm[r] = at.row + r < a.T ? lse[at.head * a.T + at.row + r] : 0.0f;
        if (threadIdx.x % A::LANES == 0 && at.row + r < a.T) dot[at.head * a.T + at.row + r] = of_row[r];
    }
    load_rows<A>(q, k_tile, qkv + from, 3 * C, at.row, a, a.scale);
    size_t end = A::ALONE ? at.row + A::R : at.block_row + A::BLOCK_ROWS;
    if (end > a.T) end = a.T;
    for (size_t first = 0; first < end; first += A::TILE) {
        load_tile<A>(k_tile, k, 3 * C, first, a);
        load_tile<A>(v_tile, v, 3 * C, first, a);
        tile_barrier<A>();
        typename A::Scores s, ds;
        dot_tile<A>(s, q, k_tile, a);
        dot_tile<A>(ds, d, v_tile, a);
        hide_later<A>(s, at.row, first);
        if constexpr (DROP) {
            typename A::Scores keep;
            drop_keys<A>(keep, drop, at, first, a.T);
            for (int j = 0; j < A::TILE; j++)
                for (int r = 0; r < A::R; r++) ds[j][r] *= keep[j][r];
        }
        for (int j = 0; j < A::TILE; j++)
            for (int r = 0; r < A::R; r++) ds[j][r] = softmax_exponential(s[j][r] - norm[r]) * (ds[j][r] - of_row[r]);
        mix_tile<A>(dq, ds, k_tile, a);
        tile_barrier<A>();
    }
    for (int i = 0; i < A::channels(a); i++) dq[i] *= a.scale;
    store_rows<A>(dqkv + from, k_tile, 3 * C, at.row, a, dq);
}

// The gradients of the keys and values: the rows are keys, the tiles queries and their gradients.
template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1)
    attention_backward_key_rows_kernel(floatX *dqkv, const float *dot, const floatX *dout, const float *lse,
                                       const floatX *qkv, AttentionShape a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile q_tile[A::TILE], d_tile[A::TILE];
    RowPlace at = row_place<A>(a);
    if (A::ALONE && at.row >= a.T) return;
    size_t C = a.NH * a.HS, from = at.b * a.T * 3 * C + at.h * a.HS, to = at.b * a.T * C + at.h * a.HS;
    typename A::V k[A::CHANNELS], v[A::CHANNELS], dk[A::CHANNELS], dv[A::CHANNELS];
    zero_rows<A>(dk, a), zero_rows<A>(dv, a);
    load_rows<A>(k, q_tile, qkv + from + C, 3 * C, at.row, a, a.scale);
    load_rows<A>(v, q_tile, qkv + from + 2 * C, 3 * C, at.row, a, 1.0f);
    for (size_t first = A::ALONE ? at.row : at.block_row; first < a.T; first += A::TILE) {
        load_tile<A>(q_tile, qkv + from, 3 * C, first, a);
        load_tile<A>(d_tile, dout + to, C, first, a);
        tile_barrier<A>();
        typename A::Scores p, ds;
        dot_tile<A>(p, k, q_tile, a);
        dot_tile<A>(ds, v, d_tile, a);
        typename A::Scores keep;
        if constexpr (DROP) drop_queries<A>(keep, drop, at, first, a.T);
        // Query first + j sees key row + r if r <= j + seen; there is none after T.
        int seen = at.row <= first ? (int)(first - at.row < A::R ? first - at.row : A::R)
                                   : -(int)(at.row - first);
        for (int j = 0; j < A::TILE; j++) {
            bool exists = first + j < a.T;
            float norm = exists ? lse[at.head * a.T + first + j] : 0.0f;
            float of_query = exists ? dot[at.head * a.T + first + j] : 0.0f;
            int last = exists ? j + seen : -1;
            for (int r = 0; r < A::R; r++) {
                p[j][r] = softmax_exponential(r <= last ? p[j][r] - norm : -INFINITY);
                if constexpr (DROP) ds[j][r] *= keep[j][r];
                ds[j][r] = p[j][r] * (ds[j][r] - of_query);
                if constexpr (DROP) p[j][r] *= keep[j][r];
            }
        }
        mix_tile<A>(dv, p, d_tile, a);
        mix_tile<A>(dk, ds, q_tile, a);
        tile_barrier<A>();
    }
    for (int i = 0; i < A::channels(a); i++) dk[i] *= a.scale;
    store_rows<A>(dqkv + from + C, q_tile, 3 * C, at.row, a, dk);
    store_rows<A>(dqkv + from + 2 * C, q_tile, 3 * C, at.row, a, dv);
}

// dot: [B,NH,T] floats of scratch.
template <class A>
static inline void attention_backward_rows(floatX *dqkv, float *dot, const floatX *dout, const floatX *out,
                                           const float *lse, const floatX *qkv, AttentionShape a,
                                           cudaStream_t stream, Dropout d = Dropout{}) {
    unsigned blocks = attention_rows_blocks<A>(a);
    if (d.threshold) {
        LAUNCH((attention_backward_query_rows_kernel<A, true>), blocks, A::THREADS, 0, stream)
        (dqkv, dot, dout, out, lse, qkv, a, d);
        LAUNCH((attention_backward_key_rows_kernel<A, true>), blocks, A::THREADS, 0, stream)
        (dqkv, dot, dout, lse, qkv, a, d);
        return;
    }
    LAUNCH((attention_backward_query_rows_kernel<A, false>), blocks, A::THREADS, 0, stream)
    (dqkv, dot, dout, out, lse, qkv, a, d);
    LAUNCH((attention_backward_key_rows_kernel<A, false>), blocks, A::THREADS, 0, stream)
    (dqkv, dot, dout, lse, qkv, a, d);
}

#endif
