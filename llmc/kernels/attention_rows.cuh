// attention_rows.cuh: flash attention in fp32 arithmetic, for floatX of either kind and
// heads of any size up to 512. Scores are computed tile by tile and never stored. Forward
// keeps the softmax by its running maximum and sum. Backward computes the probabilities
// again from their log-sum-exp.
//
// A thread owns R rows: queries, or keys for the gradient of keys and values. LANES threads
// share a row by its channels. On a GPU R is 1: a row has one float in each register, 16
// channels a lane, and the block shares the tiles of the other side. A CPU has structs of
// its own beside AttentionRows, with several rows and the same kernels.
//
// defines: Attention, AttentionPlace, place_head, attention_blocks, attention_place,
//          AttentionRows, attention_rows
#ifndef LLMC_ATTENTION_ROWS_CUH
#define LLMC_ATTENTION_ROWS_CUH

#include <math.h>

#include "llmc/masks.h"
#include "llmc/kernels/cuda_common.cuh"
#include "llmc/kernels/exponential.cuh"

// Rows of q, k, v and their gradients are tokens, `stride` elements apart, with heads of HS
// channels side by side. Rows of out and dout are out_stride apart. Sequences follow each
// other without a gap. Each of the KV heads of k and v serves NH / KV neighbouring heads of
// q (Ainslie et al. 2023). Its gradients are sums over these heads, in their order.
struct Attention {
    size_t B, T, NH, KV, HS, stride, out_stride;
    float scale;  // of the scores: 1 / sqrt(HS)
    const floatX *q, *k, *v;
    floatX *out;
    float *lse;  // [B,NH,T] log-sum-exp of each row of scores
    // from here on for the backward pass: the outputs, and their gradients
    const floatX *y, *dout;
    floatX *dq, *dk, *dv;
    float *dot;  // [B,NH,T] dot product of each output and its gradient
    // T queries and Tk keys of each sequence. A sequence has `rows` rows, also in lse and
    // dot. Rows of k and v are k_stride apart. Only AttentionPair (llmc/kernels/context.cuh)
    // has other values here than T and stride. It has results and the names below of its own.
    size_t Tk, rows, k_stride;
    static constexpr bool PAIR = false, full = false;  // full: every query sees every key
    // FIRST: each query sees keys from one of its own on (llmc/kernels/attention_first.cuh).
    // LEAST: the maximum of no score.
    static constexpr bool FIRST = false;
    static constexpr float LEAST = -INFINITY;

    // The generator's block of query q and keys k .. k+7, rows of this launch.
    __device__ __forceinline__ Philox scores_block(const Dropout &d, size_t b, size_t h,
                                                   size_t q, size_t k) const {
        return dropout_probability_block(&d, b, h, q, k, T);
    }
};

// The place of a block's work. Rows are int to save registers.
struct AttentionPlace {
    size_t in, in_k, out;  // where the head begins in q, in k and v, and in out
    size_t stat;           // and in lse and dot
    unsigned b, h;         // sequence and head
    int block_row, row;    // first row of the block and of the thread
    int T, others;         // rows of the block's side, and of the tiles'
    int begin, end;        // of the tiles' rows that meet those of the block
    bool full;             // every query sees every key
};

// Goes to query head h of the place's sequence, and to its keys and values.
__device__ __forceinline__ void place_head(AttentionPlace &p, unsigned h,
                                           const Attention &a) {
    size_t before = p.b * a.rows, channel = h * a.HS;
    p.h = h;
    p.stat = (p.b * a.NH + h) * a.rows;
    p.in = before * a.stride + channel;
    p.out = before * a.out_stride + channel;
    p.in_k = before * a.k_stride + h / (unsigned)(a.NH / a.KV) * a.HS;
}

// Returns how many blocks of `rows` rows a kernel has. keys: the rows are keys, and the
// tiles queries, of their heads one after the other.
static inline unsigned attention_blocks(const Attention &a, bool keys, size_t rows) {
    return (unsigned)(a.B * (keys ? a.KV : a.NH) * CEIL_DIV(keys ? a.Tk : a.T, rows));
}

// Fills in the place of one of these blocks, except the thread's row. The blocks of a head
// are neighbours: their keys and values stay in the L2 cache. Blocks with the most work
// begin first.
template <class A>
__device__ __forceinline__ void attention_place(AttentionPlace &p,
                                                const typename A::Args &a, bool keys,
                                                unsigned rows) {
    unsigned T = (unsigned)(keys ? a.Tk : a.T);
    unsigned heads = (unsigned)(keys ? a.KV : a.NH), blocks = CEIL_DIV(T, rows);
    unsigned head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    p.T = (int)T;
    p.others = (int)(keys ? a.T : a.Tk);
    p.full = a.full;
    p.b = head / heads;
    place_head(p, (head - p.b * heads) * ((unsigned)a.NH / heads), a);
    p.block_row = (int)((keys ? block : blocks - 1 - block) * rows);
    int next = p.block_row + (int)rows;
    p.begin = keys && !p.full ? p.block_row : 0;
    p.end = !keys && !p.full && next < p.others ? next : p.others;
    if constexpr (A::Args::FIRST) a.narrow(p, keys, (int)rows);
}

// The rows of a GPU's threads. CAPACITY: the largest head size, which decides the lanes of
// a row; channels beyond HS are zero. A CPU has the same names in
// llmc/cpu/attention_vectors.h.
template <int CAPACITY_, class Args_ = Attention>
struct AttentionRows {
    typedef Args_ Args;
    static constexpr int CAPACITY = CAPACITY_, R = 1, CHANNELS = 16,
                         LANES = CAPACITY / CHANNELS;  // channels of a lane
    static constexpr int TILE = 8;                     // rows of the other side at a time
    static constexpr int SUMS = 8;  // rows or channels that share a load of the thread's
    static constexpr unsigned THREADS = 128, BLOCK_ROWS = THREADS / LANES;
    typedef float V;  // of R rows
    typedef float Tile[CAPACITY];
    __device__ __forceinline__ static constexpr int channels(const Attention &) {
        return CHANNELS;
    }
    __device__ __forceinline__ static void barrier() { __syncthreads(); }

    // Returns the head's channel that is the lane's channel i: a lane has four in a row,
    // the lanes' fours lie side by side.
    __device__ __forceinline__ static int channel(int i) {
        return (i / 4 * LANES + (int)(threadIdx.x % LANES)) * 4 + i % 4;
    }

    // Loads rows first, first + 1, ... of p[T, stride] as floats; zeros beyond T and HS.
    __device__ __forceinline__ static const Tile *load_tile(Tile *tile, const floatX *p,
                                                            size_t stride, int first, int T,
                                                            const Attention &a) {
        for (unsigned i = threadIdx.x; i < TILE * CAPACITY; i += THREADS) {
            int j = (int)i / CAPACITY;
            size_t c = i % CAPACITY;
            tile[j][c] = first + j < T && c < a.HS ? to_float(p[(first + j) * stride + c])
                                                   : 0.0f;
        }
        return tile;
    }
    // On a CPU, prefetches the tile that begins the given number of rows further.
    __device__ __forceinline__ static void prefetch_tile(const Tile *, size_t,
                                                         const Attention &) {}

    // Loads the thread's row of p[T, stride], times scale; zeros beyond T and HS.
    __device__ __forceinline__ static void load_rows(V (&x)[CHANNELS], Tile *,
                                                     const floatX *p, size_t stride,
                                                     const AttentionPlace &at,
                                                     const Attention &a, float scale) {
        for (int i = 0; i < CHANNELS; i++) {
            size_t c = (size_t)channel(i);
            x[i] = c < a.HS && at.row < at.T ? to_float(p[at.row * stride + c]) : 0.0f;
            x[i] *= scale;
        }
    }

    // Writes the thread's row, times `by`.
    template <class To>
    __device__ __forceinline__ static void store_rows(To *p, size_t stride,
                                                      const AttentionPlace &at,
                                                      const Attention &a,
                                                      const V (&x)[CHANNELS], V by) {
        for (int i = 0; i < CHANNELS; i++) {
            size_t c = (size_t)channel(i);
            if (c < a.HS && at.row < at.T)
                p[at.row * stride + c] = from_float<To>(x[i] * by);
        }
    }
};

// Of a thread's rows and each row of a tile.
template <class A>
using Scores = typename A::V[A::TILE];

template <class A>
__device__ __forceinline__ AttentionPlace row_place(const typename A::Args &a, bool keys) {
    AttentionPlace p;
    attention_place<A>(p, a, keys, A::BLOCK_ROWS);
    p.row = p.block_row + (int)threadIdx.x / A::LANES * A::R;
    return p;
}

// Returns row r of x.
template <class V>
__device__ __forceinline__ float &row_of(V &x, size_t r) {
    return ((float *)&x)[r];
}

template <class A>
__device__ __forceinline__ void zero_rows(typename A::V (&x)[A::CHANNELS],
                                          const Attention &a) {
    for (int i = 0; i < A::channels(a); i++) x[i] = typename A::V{};
}

template <class A>
__device__ __forceinline__ float lanes_sum(float x) {
    for (int offset = A::LANES / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
    return x;
}

__device__ __forceinline__ float add_product(float sum, float x, float y) {
    return sum + x * y;
}

// Computes scores[j][r], the dot product of the thread's row r and the tile's row j.
template <class A, class T>
__device__ __forceinline__ void dot_tile(Scores<A> &scores,
                                         const typename A::V (&own)[A::CHANNELS],
                                         const T &tile, const Attention &a) {
    for (int j0 = 0; j0 < A::TILE; j0 += A::SUMS) {
        typename A::V sum[A::SUMS] = {};
        const float *at[A::SUMS];
        for (int j = 0; j < A::SUMS; j++) at[j] = tile[j0 + j];
        for (int i = 0; i < A::channels(a); i += 4) {
            UNROLL
            for (int e = 0; e < 4; e++) UNROLL
            for (int j = 0; j < A::SUMS; j++)
                sum[j] = add_product(sum[j], own[i + e], at[j][A::channel(i) + e]);
        }
        UNROLL
        for (int j = 0; j < A::SUMS; j++) {
            if constexpr (A::LANES > 1) sum[j] = lanes_sum<A>(sum[j]);
            scores[j0 + j] = sum[j];
        }
    }
}

// Adds to own the sum over j of weights[j] times the tile's row j.
template <class A, class T>
__device__ __forceinline__ void mix_tile(typename A::V (&own)[A::CHANNELS],
                                         const Scores<A> &weights, const T &tile,
                                         const Attention &a) {
    for (int i = 0; i < A::channels(a); i += A::SUMS) {
        typename A::V sum[A::SUMS];
        UNROLL
        for (int e = 0; e < A::SUMS; e++) sum[e] = own[i + e];
        for (int j = 0; j < A::TILE; j++) {
            const float *at = tile[j] + A::channel(i);
            UNROLL
            for (int e = 0; e < A::SUMS; e++)
                sum[e] = add_product(sum[e], weights[j], at[e / 4 * 4 * A::LANES + e % 4]);
        }
        UNROLL
        for (int e = 0; e < A::SUMS; e++) own[i + e] = sum[e];
    }
}

// Sets the scores of keys first + j that query row + r must not see to minus infinity.
template <class A>
__device__ __forceinline__ void hide_keys(Scores<A> &s, const AttentionPlace &at, int first,
                                          const typename A::Args &a) {
    if constexpr (A::Args::FIRST) a.template hide_rows<A>(s, at, first);
    int last = (at.full ? at.others - 1 : at.row) - first;
    int step = at.full ? 0 : 1;  // row + r sees j <= last + r step
    if (last + 1 >= A::TILE) return;
    for (int j = 0; j < A::TILE; j++)
        for (int r = 0; r < A::R; r++)
            row_of(s[j], r) = j <= last + r * step ? row_of(s[j], r) : -INFINITY;
}

// Multiplies the probabilities of queries row + r and keys first + j, or their gradients,
// by dropout's factors. The 8 numbers of a block of Philox belong to 8 neighbouring keys of
// a query.
template <class A>
__device__ __forceinline__ void drop_keys(Scores<A> &s, const Dropout &drop,
                                          const AttentionPlace &at, int first,
                                          const typename A::Args &a) {
    for (int j0 = 0; j0 < A::TILE; j0 += DROPOUT_BLOCK) {
        for (int r = 0; r < A::R; r++) {
            Philox block = a.scores_block(drop, at.b, at.h, at.row + r, first + j0);
            for (int j = 0; j < DROPOUT_BLOCK; j++)
                row_of(s[j0 + j], r) *= dropout_factor(&drop, &block, j);
        }
    }
}

// Computes the factors of queries first + j and keys row + r.
template <class A>
__device__ __forceinline__ void keep_queries(Scores<A> &keep, const Dropout &drop,
                                             const AttentionPlace &at, int first,
                                             const typename A::Args &a) {
    constexpr int COUNT = A::R < DROPOUT_BLOCK ? A::R : DROPOUT_BLOCK;
    for (int j = 0; j < A::TILE; j++) {
        for (int r0 = 0; r0 < A::R; r0 += COUNT) {
            unsigned place = (unsigned)((at.row + r0) % DROPOUT_BLOCK);
            Philox block = a.scores_block(drop, at.b, at.h, first + j, at.row + r0 - place);
            for (int r = 0; r < COUNT; r++)
                row_of(keep[j], r0 + r) = dropout_factor(&drop, &block, place + r);
        }
    }
}

template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1)
    attention_forward_rows_kernel(typename A::Args a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile k_tile[A::TILE], v_tile[A::TILE];
    AttentionPlace at = row_place<A>(a, false);
    typename A::V own[A::CHANNELS], mixed[A::CHANNELS];
    zero_rows<A>(mixed, a);
    A::load_rows(own, k_tile, a.q + at.in, a.stride, at, a, a.scale);
    typename A::V max = typename A::V(A::Args::LEAST), sum = {};
    for (int first = at.begin; first < at.end; first += A::TILE) {
        const auto k = A::load_tile(k_tile, a.k + at.in_k, a.k_stride, first, at.others, a);
        const auto v = A::load_tile(v_tile, a.v + at.in_k, a.k_stride, first, at.others, a);
        A::barrier();
        Scores<A> s;
        A::prefetch_tile(v, 0, a);
        dot_tile<A>(s, own, k, a);
        A::prefetch_tile(k, A::TILE, a);
        hide_keys<A>(s, at, first, a);  // key 0 is always seen: max becomes finite
        typename A::V before = max;
        for (int j = 0; j < A::TILE; j++) max = larger(max, s[j]);
        bool grows = A::R == 1;  // of several rows mostly none finds a larger score
        for (int r = 0; r < A::R; r++) grows |= row_of(max, r) > row_of(before, r);
        typename A::V correction = exponential(before - max);
        sum *= correction;
        for (int j = 0; j < A::TILE; j++) sum += s[j] = exponential(s[j] - max);
        if constexpr (DROP) drop_keys<A>(s, drop, at, first, a);  // the sum has all of them
        for (int i = 0; grows && i < A::channels(a); i++) mixed[i] *= correction;
        mix_tile<A>(mixed, s, v, a);
        A::barrier();
    }
    if constexpr (A::Args::FIRST) sum = larger(sum, typename A::V(1.0f));
    A::store_rows(a.out + at.out, a.out_stride, at, a, mixed, 1.0f / sum);
    if (threadIdx.x % A::LANES == 0)
        for (int r = 0; r < A::R; r++)
            if (at.row + r < at.T)
                a.lse[at.stat + at.row + r] = row_of(max, r) + logf(row_of(sum, r));
}

// Computes the gradient of the queries, and dot, which the other kernel needs too. With
// dropout dot is still the sum over the keys of probability times gradient, as both have
// the same factors.
template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1)
    attention_backward_query_rows_kernel(typename A::Args a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile k_tile[A::TILE], v_tile[A::TILE];
    AttentionPlace at = row_place<A>(a, false);
    typename A::V q[A::CHANNELS], d[A::CHANNELS], dq[A::CHANNELS];
    A::load_rows(dq, k_tile, a.y + at.out, a.out_stride, at, a, 1.0f);
    A::load_rows(d, k_tile, a.dout + at.out, a.out_stride, at, a, 1.0f);
    typename A::V product = {};
    for (int i = 0; i < A::channels(a); i++) product += dq[i] * d[i];
    zero_rows<A>(dq, a);
    if constexpr (A::LANES > 1) product = lanes_sum<A>(product);
    typename A::V norm;
    for (int r = 0; r < A::R; r++) {
        row_of(norm, r) = at.row + r < at.T ? a.lse[at.stat + at.row + r] : 0.0f;
        if (threadIdx.x % A::LANES == 0 && at.row + r < at.T)
            a.dot[at.stat + at.row + r] = row_of(product, r);
    }
    A::load_rows(q, k_tile, a.q + at.in, a.stride, at, a, a.scale);
    for (int first = at.begin; first < at.end; first += A::TILE) {
        const auto k = A::load_tile(k_tile, a.k + at.in_k, a.k_stride, first, at.others, a);
        const auto v = A::load_tile(v_tile, a.v + at.in_k, a.k_stride, first, at.others, a);
        A::barrier();
        Scores<A> s, ds;
        dot_tile<A>(s, q, k, a);
        dot_tile<A>(ds, d, v, a);
        hide_keys<A>(s, at, first, a);
        if constexpr (DROP) drop_keys<A>(ds, drop, at, first, a);
        for (int j = 0; j < A::TILE; j++)
            ds[j] = exponential(s[j] - norm) * (ds[j] - product);
        mix_tile<A>(dq, ds, k, a);
        A::barrier();
    }
    const size_t to = a.PAIR ? at.out : at.in, stride = a.PAIR ? a.out_stride : a.stride;
    A::store_rows(a.dq + to, stride, at, a, dq, a.scale);
}

// Computes the gradients of the keys and values: the rows are keys, the tiles queries and
// their gradients.
template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1)
    attention_backward_key_rows_kernel(typename A::Args a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile q_tile[A::TILE], d_tile[A::TILE];
    AttentionPlace at = row_place<A>(a, true);
    typename A::V k[A::CHANNELS], v[A::CHANNELS], dk[A::CHANNELS], dv[A::CHANNELS];
    zero_rows<A>(dk, a);
    zero_rows<A>(dv, a);
    A::load_rows(k, q_tile, a.k + at.in_k, a.k_stride, at, a, a.scale);
    A::load_rows(v, q_tile, a.v + at.in_k, a.k_stride, at, a, 1.0f);
    const size_t queries = (size_t)at.end;  // not int: the compiler would spill
    for (unsigned h = at.h, end = h + (unsigned)(a.NH / a.KV); h < end; h++) {
        place_head(at, h, a);
        for (size_t first = at.begin; first < queries; first += A::TILE) {
            const auto q = A::load_tile(q_tile, a.q + at.in, a.stride, first, at.others, a);
            const auto d =
                A::load_tile(d_tile, a.dout + at.out, a.out_stride, first, at.others, a);
            A::barrier();
            Scores<A> p, ds, keep;
            dot_tile<A>(p, k, q, a);
            dot_tile<A>(ds, v, d, a);
            if constexpr (DROP) keep_queries<A>(keep, drop, at, first, a);
            for (int j = 0; j < A::TILE; j++) {
                bool exists = first + j < queries;
                float norm = exists ? a.lse[at.stat + first + j] : 0.0f;
                float of_query = exists ? a.dot[at.stat + first + j] : 0.0f;
                // The query sees key row + r if r <= last.
                int last = !exists ? -1 : at.full ? A::R : (int)(first + j) - at.row;
                if (last < A::R)
                    for (int r = 0; r < A::R; r++)
                        row_of(p[j], r) = r <= last ? row_of(p[j], r) : -INFINITY;
                if constexpr (A::Args::FIRST)
                    if (exists) a.template hide_row<A>(p[j], at, (int)(first + j));
                p[j] = exponential(p[j] - norm);
                ds[j] = p[j] * ((DROP ? ds[j] * keep[j] : ds[j]) - of_query);
                if (DROP) p[j] *= keep[j];
            }
            mix_tile<A>(dv, p, d, a);
            mix_tile<A>(dk, ds, q, a);
            A::barrier();
        }
    }
    A::store_rows(a.dk + at.in_k, a.k_stride, at, a, dk, a.scale);
    A::store_rows(a.dv + at.in_k, a.k_stride, at, a, dv, 1.0f);
}

// Queues the forward or the backward pass.
template <class A, bool DROP>
static inline void attention_rows(const typename A::Args &a, const Dropout &drop,
                                  bool backward, cudaStream_t stream) {
    unsigned blocks = attention_blocks(a, false, A::BLOCK_ROWS);
    unsigned key_blocks = attention_blocks(a, true, A::BLOCK_ROWS);
    if (!backward) {
        LAUNCH((attention_forward_rows_kernel<A, DROP>), blocks, A::THREADS, stream)
        (a, drop);
        return;
    }
    LAUNCH((attention_backward_query_rows_kernel<A, DROP>), blocks, A::THREADS, stream)
    (a, drop);
    LAUNCH((attention_backward_key_rows_kernel<A, DROP>), key_blocks, A::THREADS, stream)
    (a, drop);
}

#endif
