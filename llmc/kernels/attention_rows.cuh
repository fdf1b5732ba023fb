// attention_rows.cuh: flash attention in fp32 arithmetic, for floatX of either kind and heads of any size up to 512.
// Scores are made tile by tile and never stored: forward keeps the softmax by its running maximum and sum, backward
// makes the probabilities again from their log-sum-exp.
//
// A thread owns R rows (queries; keys for the gradient of keys and values), and LANES threads share a row by its
// channels. On a GPU a row has one float in each register, 16 channels a lane, and the block shares the tiles of the
// other side. On a CPU a thread takes 16 rows, the lanes of one vector, with all their channels and its own tiles: it
// meets no barrier. Both are the code below.
//
// defines: Attention, AttentionRows, attention_rows
#ifndef LLMC_ATTENTION_ROWS_CUH
#define LLMC_ATTENTION_ROWS_CUH

#include <math.h>

#include "llmc/masks.h"
#include "llmc/kernels/cuda_common.cuh"
#include "llmc/kernels/exponential.cuh"

// Rows of q, k, v and their gradients are tokens, `stride` elements apart, with heads of HS channels side by side. Rows
// of out and dout are out_stride apart. Sequences follow each other without a gap.
typedef struct {
    size_t B, T, NH, HS, stride, out_stride;
    float scale;          // of the scores: 1 / sqrt(HS)
    const floatX *q, *k, *v;
    floatX *out;
    float *lse;           // [B,NH,T] log-sum-exp of each row of scores
    const floatX *dout;   // from here on for the backward pass
    floatX *dq, *dk, *dv;
    float *dot;           // [B,NH,T] dot product of each output and its gradient
} Attention;

template <int R> struct RowVector;
template <> struct RowVector<1> { typedef float type; };
#ifdef __CUDACC__
static constexpr int ATTENTION_ROWS = 1;
#else
static constexpr int ATTENTION_ROWS = 16;
template <> struct RowVector<16> { typedef float type __attribute__((vector_size(64))); };
#endif

// CAPACITY: the largest head size, which decides the registers; channels beyond HS are zero. A thread that is alone
// goes over the HS channels only, and the rows of its tiles do not share cache sets.
template <int CAPACITY_, int R_, int LANES_>
struct AttentionRows {
    static constexpr int CAPACITY = CAPACITY_, R = R_, LANES = LANES_;
    static constexpr int CHANNELS = CAPACITY / LANES;            // of a lane
    static constexpr bool ALONE = LANES == 1 && R > 1;           // each thread has its own tiles
    static constexpr int TILE = ALONE ? 16 : 8;                  // rows of the other side at a time
    static constexpr unsigned THREADS = ALONE ? 4 : 128;
    static constexpr unsigned BLOCK_ROWS = THREADS / LANES * R;
    typedef typename RowVector<R>::type V;
    typedef float Scores[TILE][R];
    static constexpr int STRIDE = CAPACITY + (ALONE ? 16 : 0);   // of a tile's rows
    typedef float Tile[STRIDE];
    static_assert(CHANNELS % 8 == 0 && TILE % 8 == 0 && 32 % LANES == 0, "channels and rows go by 8");
    // Returns the number of channels of a lane that are not all zero.
    __device__ __forceinline__ static int channels(const Attention &a) {
        return ALONE ? (int)((a.HS + 7) / 8 * 8) : CHANNELS;
    }
};

// The work of a thread.
typedef struct {
    size_t b, h, head;      // sequence, head of it, b * NH + h
    size_t row, block_row;  // the thread's and the block's first row
    size_t in, out;         // where sequence and head begin in q, k, v, and in out
} RowPlace;

template <class A>
__device__ __forceinline__ RowPlace row_place(const Attention &a) {
    // The blocks of a head are neighbours: its keys and values stay in the L2 cache.
    unsigned blocks = (unsigned)CEIL_DIV(a.T, (size_t)A::BLOCK_ROWS);
    RowPlace p;
    p.head = blockIdx.x / blocks, p.b = p.head / a.NH, p.h = p.head % a.NH;
    p.block_row = (size_t)(blocks - 1 - blockIdx.x % blocks) * A::BLOCK_ROWS; // those with most keys begin first
    p.row = p.block_row + threadIdx.x / A::LANES * A::R;
    p.in = p.b * a.T * a.stride + p.h * a.HS, p.out = p.b * a.T * a.out_stride + p.h * a.HS;
    return p;
}

// Returns the end of the keys that the thread's, or its block's, queries see.
template <class A>
__device__ __forceinline__ size_t keys_end(const RowPlace &at, const Attention &a) {
    size_t end = A::ALONE ? at.row + A::R : at.block_row + A::BLOCK_ROWS;
    return end < a.T ? end : a.T;
}

// Returns the head's channel that is the lane's channel i: a lane has four in a row, the lanes' fours lie side by side.
template <class A>
__device__ __forceinline__ int channel(int i) {
    return A::LANES == 1 ? i : (i / 4 * A::LANES + (int)(threadIdx.x % A::LANES)) * 4 + i % 4;
}

template <class A>
__device__ __forceinline__ void tile_barrier() {
    if constexpr (!A::ALONE) __syncthreads();
}

// Loads rows first, first + 1, ... of p as floats; zeros beyond T and HS.
template <class A>
__device__ __forceinline__ void load_tile(typename A::Tile *tile, const floatX *p, size_t stride, size_t first,
                                          const Attention &a) {
    if constexpr (A::ALONE) {
        for (int j = 0; j < A::TILE; j++) {
            int n = first + j < a.T ? (int)a.HS : 0, end = A::channels(a);
            const floatX *from = p + (first + j) * stride;
            for (int c = 0; c < n; c++) tile[j][c] = to_float(from[c]);
            for (int c = n; c < end; c++) tile[j][c] = 0.0f;
        }
    } else {
        for (unsigned i = threadIdx.x; i < A::TILE * A::CAPACITY; i += A::THREADS) {
            size_t j = i / A::CAPACITY, c = i % A::CAPACITY;
            tile[j][c] = first + j < a.T && c < a.HS ? to_float(p[(first + j) * stride + c]) : 0.0f;
        }
    }
}

// Loads the thread's rows of p (rows `stride` apart), times scale; zeros beyond T and HS. A thread that is alone reads
// and writes whole rows, by way of a tile.
template <class A>
__device__ __forceinline__ void load_rows(typename A::V (&x)[A::CHANNELS], typename A::Tile *tile, const floatX *p,
                                          size_t stride, size_t row, const Attention &a, float scale) {
    if constexpr (A::ALONE) load_tile<A>(tile, p, stride, row, a);
    for (int i = 0; i < A::channels(a); i++) {
        size_t c = (size_t)channel<A>(i);
        float v[A::R];
        if constexpr (A::ALONE) {
            for (int r = 0; r < A::R; r++) v[r] = tile[r][i];
        } else {
            v[0] = c < a.HS && row < a.T ? to_float(p[row * stride + c]) : 0.0f;
        }
        memcpy(&x[i], v, sizeof v);
        x[i] *= scale;
    }
}

template <class A>
__device__ __forceinline__ void store_rows(floatX *p, typename A::Tile *tile, size_t stride, size_t row,
                                           const Attention &a, const typename A::V (&x)[A::CHANNELS]) {
    for (int i = 0; i < A::channels(a); i++) {
        size_t c = (size_t)channel<A>(i);
        float v[A::R];
        memcpy(v, &x[i], sizeof v);
        if constexpr (A::ALONE) {
            for (int r = 0; r < A::R; r++) tile[r][i] = v[r];
        } else {
            if (c < a.HS && row < a.T) p[row * stride + c] = from_float<floatX>(v[0]);
        }
    }
    if constexpr (A::ALONE) {
        for (size_t r = 0; r < A::R && row + r < a.T; r++)
            for (size_t c = 0; c < a.HS; c++) p[(row + r) * stride + c] = from_float<floatX>(tile[r][c]);
    }
}

template <class A>
__device__ __forceinline__ void zero_rows(typename A::V (&x)[A::CHANNELS], const Attention &a) {
    for (int i = 0; i < A::channels(a); i++) x[i] = typename A::V{};
}

template <class A>
__device__ __forceinline__ void scale_rows(typename A::V (&x)[A::CHANNELS], const Attention &a,
                                           const float (&by)[A::R]) {
    typename A::V v;
    memcpy(&v, by, sizeof v);
    for (int i = 0; i < A::channels(a); i++) x[i] *= v;
}

template <class A>
__device__ __forceinline__ float lanes_sum(float x) {
    for (int offset = A::LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
    return x;
}

// Computes scores[j][r], the dot product of the thread's row r and the tile's row j.
template <class A>
__device__ __forceinline__ void dot_tile(typename A::Scores &scores, const typename A::V (&own)[A::CHANNELS],
                                         const typename A::Tile *tile, const Attention &a) {
    for (int j0 = 0; j0 < A::TILE; j0 += 8) {
        typename A::V sum[8] = {};
        for (int i = 0; i < A::channels(a); i += 4) {
            const float *at = &tile[j0][channel<A>(i)];
            UNROLL
            for (int j = 0; j < 8; j++)
                UNROLL
                for (int e = 0; e < 4; e++) sum[j] += own[i + e] * at[j * A::STRIDE + e];
        }
        UNROLL
        for (int j = 0; j < 8; j++) {
            typename A::V total = sum[j];
            if constexpr (A::LANES > 1) total = lanes_sum<A>(total);
            memcpy(scores[j0 + j], &total, sizeof total);
        }
    }
}

// Adds to own the sum over j of weights[j] times the tile's row j.
template <class A>
__device__ __forceinline__ void mix_tile(typename A::V (&own)[A::CHANNELS], const float (&weights)[A::TILE][A::R],
                                         const typename A::Tile *tile, const Attention &a) {
    for (int i = 0; i < A::channels(a); i += 8) {
        typename A::V sum[8];
        UNROLL
        for (int e = 0; e < 8; e++) sum[e] = own[i + e];
        for (int j = 0; j < A::TILE; j++) {
            const float *at = tile[j] + channel<A>(i);
            typename A::V w;
            memcpy(&w, weights[j], sizeof w);
            UNROLL
            for (int e = 0; e < 8; e++) sum[e] += w * at[e / 4 * 4 * A::LANES + e % 4];
        }
        UNROLL
        for (int e = 0; e < 8; e++) own[i + e] = sum[e];
    }
}

// Returns exp(x), but 0 below e^-80, which is nothing beside the sum of a softmax: a CPU is slow at subnormal numbers.
__device__ __forceinline__ float softmax_exponential(float x) {
    float y = exponential(x < -80.0f ? -80.0f : x);
    return x < -80.0f ? 0.0f : y;
}

// Sets the scores of keys first + j that query row + r must not see to minus infinity.
template <class A>
__device__ __forceinline__ void hide_later(typename A::Scores &s, size_t row, size_t first) {
    if (first + A::TILE <= row + 1) return;
    int seen = row >= first ? (int)(row - first) : -(int)(first - row);
    for (int j = 0; j < A::TILE; j++)
        for (int r = 0; r < A::R; r++) s[j][r] = j <= r + seen ? s[j][r] : -INFINITY;
}

// Multiplies the probabilities of queries row + r and keys first + j, or their gradients, by dropout's factors. The 8
// numbers of a block of Philox belong to 8 neighbouring keys of a query.
template <class A>
__device__ __forceinline__ void drop_keys(typename A::Scores &s, const Dropout &drop, const RowPlace &at, size_t first,
                                          size_t T) {
    for (int j0 = 0; j0 < A::TILE; j0 += DROPOUT_BLOCK) {
        for (int r = 0; r < A::R; r++) {
            Philox block = dropout_probability_block(&drop, at.b, at.h, at.row + r, first + j0, T);
            for (int j = 0; j < DROPOUT_BLOCK; j++) s[j0 + j][r] *= dropout_factor(&drop, &block, j);
        }
    }
}

// Computes the factors of queries first + j and keys row + r.
template <class A>
__device__ __forceinline__ void keep_queries(typename A::Scores &keep, const Dropout &drop, const RowPlace &at,
                                             size_t first, size_t T) {
    constexpr int COUNT = A::R < DROPOUT_BLOCK ? A::R : DROPOUT_BLOCK;
    for (int j = 0; j < A::TILE; j++) {
        for (int r0 = 0; r0 < A::R; r0 += COUNT) {
            unsigned place = (unsigned)((at.row + r0) % DROPOUT_BLOCK);
            Philox block = dropout_probability_block(&drop, at.b, at.h, first + j, at.row + r0 - place, T);
            for (int r = 0; r < COUNT; r++) keep[j][r0 + r] = dropout_factor(&drop, &block, place + r);
        }
    }
}

template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1) attention_forward_rows_kernel(Attention a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile k_tile[A::TILE], v_tile[A::TILE];
    RowPlace at = row_place<A>(a);
    if (A::ALONE && at.row >= a.T) return;
    typename A::V own[A::CHANNELS], mixed[A::CHANNELS];
    zero_rows<A>(mixed, a);
    load_rows<A>(own, k_tile, a.q + at.in, a.stride, at.row, a, a.scale);
    float max[A::R], sum[A::R];
    for (int r = 0; r < A::R; r++) max[r] = -INFINITY, sum[r] = 0.0f;
    size_t end = keys_end<A>(at, a);
    for (size_t first = 0; first < end; first += A::TILE) {
        load_tile<A>(k_tile, a.k + at.in, a.stride, first, a);
        load_tile<A>(v_tile, a.v + at.in, a.stride, first, a);
        tile_barrier<A>();
        typename A::Scores s;
        dot_tile<A>(s, own, k_tile, a);
        hide_later<A>(s, at.row, first); // key 0 is always seen: max becomes finite
        float correction[A::R];
        for (int r = 0; r < A::R; r++) correction[r] = max[r];
        for (int j = 0; j < A::TILE; j++)
            for (int r = 0; r < A::R; r++) max[r] = s[j][r] > max[r] ? s[j][r] : max[r];
        for (int r = 0; r < A::R; r++) correction[r] = softmax_exponential(correction[r] - max[r]);
        for (int r = 0; r < A::R; r++) sum[r] *= correction[r];
        for (int j = 0; j < A::TILE; j++) {
            for (int r = 0; r < A::R; r++) s[j][r] = softmax_exponential(s[j][r] - max[r]);
            for (int r = 0; r < A::R; r++) sum[r] += s[j][r];
        }
        if constexpr (DROP) drop_keys<A>(s, drop, at, first, a.T); // the sum has all of them
        scale_rows<A>(mixed, a, correction);
        mix_tile<A>(mixed, s, v_tile, a);
        tile_barrier<A>();
    }
    float scale[A::R];
    for (int r = 0; r < A::R; r++) scale[r] = 1.0f / sum[r];
    scale_rows<A>(mixed, a, scale);
    store_rows<A>(a.out + at.out, k_tile, a.out_stride, at.row, a, mixed);
    if (threadIdx.x % A::LANES == 0)
        for (int r = 0; r < A::R; r++)
            if (at.row + r < a.T) a.lse[at.head * a.T + at.row + r] = max[r] + logf(sum[r]);
}

// Computes the gradient of the queries, and dot, which the other kernel needs too. With dropout dot is still the sum
// over the keys of probability times gradient, as both have the same factors.
template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1) attention_backward_query_rows_kernel(Attention a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile k_tile[A::TILE], v_tile[A::TILE];
    RowPlace at = row_place<A>(a);
    if (A::ALONE && at.row >= a.T) return;
    typename A::V q[A::CHANNELS], d[A::CHANNELS], dq[A::CHANNELS];
    load_rows<A>(dq, k_tile, a.out + at.out, a.out_stride, at.row, a, 1.0f);
    load_rows<A>(d, k_tile, a.dout + at.out, a.out_stride, at.row, a, 1.0f);
    typename A::V product = {};
    for (int i = 0; i < A::channels(a); i++) product += dq[i] * d[i];
    zero_rows<A>(dq, a);
    if constexpr (A::LANES > 1) product = lanes_sum<A>(product);
    float norm[A::R], of_row[A::R];
    memcpy(of_row, &product, sizeof of_row);
    for (int r = 0; r < A::R; r++) {
        norm[r] = at.row + r < a.T ? a.lse[at.head * a.T + at.row + r] : 0.0f;
        if (threadIdx.x % A::LANES == 0 && at.row + r < a.T) a.dot[at.head * a.T + at.row + r] = of_row[r];
    }
    load_rows<A>(q, k_tile, a.q + at.in, a.stride, at.row, a, a.scale);
    size_t end = keys_end<A>(at, a);
    for (size_t first = 0; first < end; first += A::TILE) {
        load_tile<A>(k_tile, a.k + at.in, a.stride, first, a);
        load_tile<A>(v_tile, a.v + at.in, a.stride, first, a);
        tile_barrier<A>();
        typename A::Scores s, ds;
        dot_tile<A>(s, q, k_tile, a);
        dot_tile<A>(ds, d, v_tile, a);
        hide_later<A>(s, at.row, first);
        if constexpr (DROP) drop_keys<A>(ds, drop, at, first, a.T);
        for (int j = 0; j < A::TILE; j++)
            for (int r = 0; r < A::R; r++) ds[j][r] = softmax_exponential(s[j][r] - norm[r]) * (ds[j][r] - of_row[r]);
        mix_tile<A>(dq, ds, k_tile, a);
        tile_barrier<A>();
    }
    for (int i = 0; i < A::channels(a); i++) dq[i] *= a.scale;
    store_rows<A>(a.dq + at.in, k_tile, a.stride, at.row, a, dq);
}

// Computes the gradients of the keys and values: the rows are keys, the tiles queries and their gradients.
template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1) attention_backward_key_rows_kernel(Attention a, Dropout drop) {
    alignas(64) __shared__ typename A::Tile q_tile[A::TILE], d_tile[A::TILE];
    RowPlace at = row_place<A>(a);
    if (A::ALONE && at.row >= a.T) return;
    typename A::V k[A::CHANNELS], v[A::CHANNELS], dk[A::CHANNELS], dv[A::CHANNELS];
    zero_rows<A>(dk, a), zero_rows<A>(dv, a);
    load_rows<A>(k, q_tile, a.k + at.in, a.stride, at.row, a, a.scale);
    load_rows<A>(v, q_tile, a.v + at.in, a.stride, at.row, a, 1.0f);
    for (size_t first = A::ALONE ? at.row : at.block_row; first < a.T; first += A::TILE) {
        load_tile<A>(q_tile, a.q + at.in, a.stride, first, a);
        load_tile<A>(d_tile, a.dout + at.out, a.out_stride, first, a);
        tile_barrier<A>();
        typename A::Scores p, ds, keep;
        dot_tile<A>(p, k, q_tile, a);
        dot_tile<A>(ds, v, d_tile, a);
        if constexpr (DROP) keep_queries<A>(keep, drop, at, first, a.T);
        // Query first + j sees key row + r if r <= j + seen; there is none after T.
        int seen = at.row <= first ? (int)(first - at.row < A::R ? first - at.row : A::R)
                                   : -(int)(at.row - first);
        for (int j = 0; j < A::TILE; j++) {
            bool exists = first + j < a.T;
            float norm = exists ? a.lse[at.head * a.T + first + j] : 0.0f;
            float of_query = exists ? a.dot[at.head * a.T + first + j] : 0.0f;
            int last = exists ? j + seen : -1;
            for (int r = 0; r < A::R; r++) {
                p[j][r] = softmax_exponential(r <= last ? p[j][r] - norm : -INFINITY);
                ds[j][r] = p[j][r] * ((DROP ? ds[j][r] * keep[j][r] : ds[j][r]) - of_query);
                if (DROP) p[j][r] *= keep[j][r];
            }
        }
        mix_tile<A>(dv, p, d_tile, a);
        mix_tile<A>(dk, ds, q_tile, a);
        tile_barrier<A>();
    }
    for (int i = 0; i < A::channels(a); i++) dk[i] *= a.scale;
    store_rows<A>(a.dk + at.in, q_tile, a.stride, at.row, a, dk);
    store_rows<A>(a.dv + at.in, q_tile, a.stride, at.row, a, dv);
}

// Queues the forward or the backward pass.
template <class A, bool DROP>
static inline void attention_rows(const Attention &a, const Dropout &drop, bool backward, cudaStream_t stream) {
    unsigned blocks = (unsigned)(a.B * a.NH * CEIL_DIV(a.T, (size_t)A::BLOCK_ROWS));
    if (!backward) {
        LAUNCH((attention_forward_rows_kernel<A, DROP>), blocks, A::THREADS, 0, stream)(a, drop);
        return;
    }
    LAUNCH((attention_backward_query_rows_kernel<A, DROP>), blocks, A::THREADS, 0, stream)(a, drop);
    LAUNCH((attention_backward_key_rows_kernel<A, DROP>), blocks, A::THREADS, 0, stream)(a, drop);
}

#endif
