// attention_rows.cuh: flash attention in fp32 arithmetic, for floatX of either kind and heads of any size up
// to 512. Scores are made tile by tile and never stored: forward keeps the softmax by its running maximum and
// sum, backward makes the probabilities again from their log-sum-exp.
//
// A thread owns R rows (queries; keys where the gradient of keys and values is made), and LANES threads share
// a row by its channels. On a GPU a row has one float in each register, 16 channels a lane, and the block
// shares the tiles of the other side. On a CPU a thread takes 16 rows, which are the lanes of one vector, with
// all their channels, and its own tiles: it meets no barrier. Both are the code below.
//
// defines: AttentionShape, AttentionRows, attention_forward_rows; attention_rows_backward.cuh has the backward pass
#ifndef LLMC_ATTENTION_ROWS_CUH
#define LLMC_ATTENTION_ROWS_CUH

#include <math.h>

#include "llmc/kernels/attention_dropout.cuh"
#include "llmc/kernels/cuda_common.cuh"
#include "llmc/kernels/exponential.cuh"

// q|k|v are [B,T,3,NH,HS], the output [B,T,NH,HS], log-sum-exp and dot (of output and its gradient) [B,NH,T].
typedef struct {
    size_t B, T, NH, HS;
    float scale; // of the scores: 1 / sqrt(HS)
} AttentionShape;

template <int R> struct RowVector;
template <> struct RowVector<1> { typedef float type; };
#ifdef __CUDACC__
static constexpr int ATTENTION_ROWS = 1;
#else
static constexpr int ATTENTION_ROWS = 16;
template <> struct RowVector<16> { typedef float type __attribute__((vector_size(64))); };
#endif

// CAPACITY: the largest head size, which decides the registers; channels beyond HS are zero. A thread that is
// alone goes over no more channels than there are, and the rows of its tiles do not share cache sets.
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
    // How many channels a lane goes over.
    __device__ __forceinline__ static int channels(const AttentionShape &a) {
        return ALONE ? (int)((a.HS + 7) / 8 * 8) : CHANNELS;
    }
};

// What a thread works at: sequence b, head h, its first row, and the tiles' rows that its block or it needs.
typedef struct {
    size_t b, h, head;          // head = b * NH + h
    size_t row, block_row;      // the thread's and the block's first
} RowPlace;

template <class A>
__device__ __forceinline__ RowPlace row_place(const AttentionShape &a) {
    // The blocks of a head are neighbours: its keys and values stay in the L2 cache.
    unsigned blocks = (unsigned)CEIL_DIV(a.T, (size_t)A::BLOCK_ROWS);
    RowPlace p;
    p.head = blockIdx.x / blocks, p.b = p.head / a.NH, p.h = p.head % a.NH;
    p.block_row = (size_t)(blocks - 1 - blockIdx.x % blocks) * A::BLOCK_ROWS; // those with most keys begin first
    p.row = p.block_row + threadIdx.x / A::LANES * A::R;
    return p;
}

// Channel i of a lane is this one of the head: a lane has four in a row, and the lanes' fours lie side by side.
template <class A>
__device__ __forceinline__ int channel(int i) {
    return A::LANES == 1 ? i : (i / 4 * A::LANES + (int)(threadIdx.x % A::LANES)) * 4 + i % 4;
}

template <class A>
__device__ __forceinline__ void tile_barrier() {
    if constexpr (!A::ALONE) __syncthreads();
}

// Rows first, first + 1, ... of p as floats; zeros beyond T and HS.
template <class A>
__device__ __forceinline__ void load_tile(typename A::Tile *tile, const floatX *p, size_t stride, size_t first,
                                          const AttentionShape &a) {
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

// The thread's rows of p (rows `stride` apart), times scale; zeros beyond T and HS. A thread that is alone reads
// and writes whole rows, by way of a tile.
template <class A>
__device__ __forceinline__ void load_rows(typename A::V (&x)[A::CHANNELS], typename A::Tile *tile, const floatX *p,
                                          size_t stride, size_t row, const AttentionShape &a, float scale) {
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
                                           const AttentionShape &a, const typename A::V (&x)[A::CHANNELS]) {
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
__device__ __forceinline__ void zero_rows(typename A::V (&x)[A::CHANNELS], const AttentionShape &a) {
    for (int i = 0; i < A::channels(a); i++) x[i] = typename A::V{};
}

template <class A>
__device__ __forceinline__ void scale_rows(typename A::V (&x)[A::CHANNELS], const AttentionShape &a,
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

// scores[j][r] = the dot product of the thread's row r and the tile's row j.
template <class A>
__device__ __forceinline__ void dot_tile(typename A::Scores &scores, const typename A::V (&own)[A::CHANNELS],
                                         const typename A::Tile *tile, const AttentionShape &a) {
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

// own += the sum over j of weights[j] times the tile's row j.
template <class A>
__device__ __forceinline__ void mix_tile(typename A::V (&own)[A::CHANNELS], const float (&weights)[A::TILE][A::R],
                                         const typename A::Tile *tile, const AttentionShape &a) {
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

// exp(x), but 0 below e^-80, which is nothing beside the sum of a softmax: a CPU is slow at subnormal numbers.
__device__ __forceinline__ float softmax_exponential(float x) {
    float y = exponential(x < -80.0f ? -80.0f : x);
    return x < -80.0f ? 0.0f : y;
}

// The scores of keys first + j that query row + r must not see become minus infinity.
template <class A>
__device__ __forceinline__ void hide_later(typename A::Scores &s, size_t row, size_t first) {
    if (first + A::TILE <= row + 1) return;
    int seen = row >= first ? (int)(row - first) : -(int)(first - row);
    for (int j = 0; j < A::TILE; j++)
        for (int r = 0; r < A::R; r++) s[j][r] = j <= r + seen ? s[j][r] : -INFINITY;
}

// DROP: with dropout of the probabilities, which the softmax's sum does not see.
template <class A, bool DROP>
__global__ void __launch_bounds__(A::THREADS, 1)
    attention_forward_rows_kernel(floatX *out, float *lse, const floatX *qkv, AttentionShape a, Dropout d) {
    alignas(64) __shared__ typename A::Tile k_tile[A::TILE], v_tile[A::TILE];
    RowPlace at = row_place<A>(a);
    if (A::ALONE && at.row >= a.T) return;
    size_t C = a.NH * a.HS;
    const floatX *q = qkv + at.b * a.T * 3 * C + at.h * a.HS;
    typename A::V own[A::CHANNELS], mixed[A::CHANNELS];
    zero_rows<A>(mixed, a);
    load_rows<A>(own, k_tile, q, 3 * C, at.row, a, a.scale);
    float max[A::R], sum[A::R];
    for (int r = 0; r < A::R; r++) max[r] = -INFINITY, sum[r] = 0.0f;
    size_t end = A::ALONE ? at.row + A::R : at.block_row + A::BLOCK_ROWS;
    if (end > a.T) end = a.T;
    for (size_t first = 0; first < end; first += A::TILE) {
        load_tile<A>(k_tile, q + C, 3 * C, first, a);
        load_tile<A>(v_tile, q + 2 * C, 3 * C, first, a);
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
        if constexpr (DROP) {
            typename A::Scores keep;
            drop_keys<A>(keep, d, at, first, a.T);
            for (int j = 0; j < A::TILE; j++)
                for (int r = 0; r < A::R; r++) s[j][r] *= keep[j][r];
        }
        scale_rows<A>(mixed, a, correction);
        mix_tile<A>(mixed, s, v_tile, a);
        tile_barrier<A>();
    }
    float scale[A::R];
    for (int r = 0; r < A::R; r++) scale[r] = 1.0f / sum[r];
    scale_rows<A>(mixed, a, scale);
    store_rows<A>(out + at.b * a.T * C + at.h * a.HS, k_tile, C, at.row, a, mixed);
    if (threadIdx.x % A::LANES == 0)
        for (int r = 0; r < A::R; r++)
            if (at.row + r < a.T) lse[at.head * a.T + at.row + r] = max[r] + logf(sum[r]);
}

template <class A>
static inline unsigned attention_rows_blocks(const AttentionShape &a) {
    return (unsigned)(a.B * a.NH * CEIL_DIV(a.T, (size_t)A::BLOCK_ROWS));
}

template <class A>
static inline void attention_forward_rows(floatX *out, float *lse, const floatX *qkv, AttentionShape a,
                                          cudaStream_t stream, Dropout d = Dropout{}) {
    unsigned blocks = attention_rows_blocks<A>(a);
    if (d.threshold) {
        LAUNCH((attention_forward_rows_kernel<A, true>), blocks, A::THREADS, 0, stream)(out, lse, qkv, a, d);
    } else {
        LAUNCH((attention_forward_rows_kernel<A, false>), blocks, A::THREADS, 0, stream)(out, lse, qkv, a, d);
    }
}

#endif
