// attention_mma.cuh: flash attention on tensor cores: bf16, heads of up to 128 channels, a multiple of 8.
//
// A block of four warps owns 64 rows, 16 a warp: queries, or keys where the gradients of keys and values are made.
// It goes over the other side tile by tile, and the next tile is under way while one is worked at. A product's
// result becomes a factor of the next without leaving the registers of its warp. Each gradient is summed by one
// warp in a fixed order: there are no atomics, and backward makes the scores twice instead.
//
// defines: attention_mma_takes, attention_forward_mma, attention_backward_mma
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include "llmc/kernels/attention_rows.cuh"
#include "llmc/kernels/exponential.cuh"
#include "llmc/kernels/mma.cuh"

static constexpr unsigned ATTENTION_MMA_THREADS = 128;
static constexpr size_t ATTENTION_MMA_ROWS = 64;

// CAPACITY: a multiple of 16, at least HS; the channels between are zero. A tile's rows are 16 bytes longer than
// its channels, so that the 8 rows that an ldmatrix reads lie in different banks.
template <int CAPACITY_>
struct AttentionMma {
    static constexpr int CAPACITY = CAPACITY_, STRIDE = CAPACITY + 8;
    static constexpr int K16 = CAPACITY / 16, N8 = CAPACITY / 8;  // steps and tiles over the channels
    static constexpr int KEYS = CAPACITY <= 64 ? 64 : 32;         // of a tile, as registers and 48 KiB allow
    static constexpr int QUERIES = CAPACITY <= 64 ? 64 : 16;
    // Large heads leave no registers for the block's own values: they are read again, half a row at a time.
    static constexpr bool VALUES_SHARED = CAPACITY > 96;
};

// Where a warp and a lane of it work: rows row and row + 8 are the lane's. Rows are int, as registers are short.
typedef struct {
    size_t head, qkv, out; // b * NH + h; where the head begins in qkv, and in out
    int block_row, warp_row, row;
    int pair;              // first column of the lane in a fragment
    int T;
} MmaPlace;

__device__ __forceinline__ MmaPlace mma_place(const AttentionShape &a, bool last_first) {
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
__device__ __forceinline__ void copy_tile(bfloat16 *tile, const bfloat16 *p, size_t stride, int first,
                                          const AttentionShape &a) {
    constexpr int packs = A::CAPACITY / 8;
    for (int i = (int)threadIdx.x; i < (int)ROWS * packs; i += ATTENTION_MMA_THREADS) {
        int row = i / packs, c = i % packs * 8;
        bool exists = first + row < (int)a.T && c < (int)a.HS;
        copy_async16(tile + row * A::STRIDE + c, exists ? p + (size_t)(first + row) * stride + c : p, exists);
    }
}

// Two neighbouring elements; zeros where there are none.
__device__ __forceinline__ uint32_t load_pair(const bfloat16 *p, bool exists) {
    uint32_t pair = 0;
    if (exists) pair = *reinterpret_cast<const uint32_t *>(p);
    return pair;
}

// The warp's 16 rows of p as a fragments.
template <class A>
__device__ __forceinline__ void load_fragments(uint32_t (&x)[A::K16][4], const bfloat16 *p, size_t stride,
                                               const MmaPlace &at, const AttentionShape &a) {
    UNROLL
    for (int k = 0; k < A::K16; k++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            int row = at.row + i % 2 * 8, c = k * 16 + i / 2 * 8 + at.pair;
            x[k][i] = load_pair(p + (size_t)row * stride + c, row < at.T && c < (int)a.HS);
        }
    }
}

// The same from a tile, of which p is the warp's first row.
template <int K16, int STRIDE>
__device__ __forceinline__ void tile_fragments(uint32_t (&x)[K16][4], const bfloat16 *p) {
    UNROLL
    for (int k = 0; k < K16; k++)
        ldmatrix_x4<false>(x[k], p + threadIdx.x % 16 * STRIDE + k * 16 + threadIdx.x % 32 / 16 * 8);
}

// Writes d fragments, the rows times scale[0] and scale[1].
template <class A>
__device__ __forceinline__ void store_fragments(bfloat16 *p, size_t stride, const MmaPlace &at,
                                                const AttentionShape &a, const float (&d)[A::N8][4], float scale0,
                                                float scale1) {
    UNROLL
    for (int n = 0; n < A::N8; n++) {
        int c = n * 8 + at.pair;
        if (c >= (int)a.HS) continue;
        if (at.row < at.T)
            *reinterpret_cast<uint32_t *>(p + (size_t)at.row * stride + c) =
                pack_bf16(d[n][0] * scale0, d[n][1] * scale0);
        if (at.row + 8 < at.T)
            *reinterpret_cast<uint32_t *>(p + (size_t)(at.row + 8) * stride + c) =
                pack_bf16(d[n][2] * scale1, d[n][3] * scale1);
    }
}

// The d fragments of a product, rounded, as a fragments of the next.
template <int K16>
__device__ __forceinline__ void round_fragments(uint32_t (&a)[K16][4], const float (&d)[2 * K16][4]) {
    UNROLL
    for (int k = 0; k < K16; k++) {
        UNROLL
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16(d[2 * k + i / 2][i % 2 * 2], d[2 * k + i / 2][i % 2 * 2 + 1]);
    }
}

static constexpr float LOG2_E = 1.44269504f;

template <class A>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_forward_mma_kernel(bfloat16 *out, float *lse, const bfloat16 *qkv, AttentionShape a) {
    alignas(16) __shared__ bfloat16 k_tile[2][A::KEYS * A::STRIDE], v_tile[2][A::KEYS * A::STRIDE];
    MmaPlace at = mma_place(a, true);
    size_t C = a.NH * a.HS;
    int end = at.block_row + (int)ATTENTION_MMA_ROWS < at.T ? at.block_row + (int)ATTENTION_MMA_ROWS : at.T;
    const bfloat16 *q = qkv + at.qkv, *k = q + C, *v = k + C;
    copy_tile<A::KEYS, A>(k_tile[0], k, 3 * C, 0, a);
    copy_tile<A::KEYS, A>(v_tile[0], v, 3 * C, 0, a);
    copy_async_commit();
    uint32_t own[A::K16][4];
    load_fragments<A>(own, q, 3 * C, at, a);
    float mixed[A::N8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const float to_log2 = a.scale * LOG2_E;
    for (int first = 0; first < end; first += A::KEYS) {
        int stage = first / A::KEYS % 2;
        if (first + A::KEYS < end) {
            copy_tile<A::KEYS, A>(k_tile[!stage], k, 3 * C, first + A::KEYS, a);
            copy_tile<A::KEYS, A>(v_tile[!stage], v, 3 * C, first + A::KEYS, a);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        float s[A::KEYS / 8][4] = {};
        mma_product<false, A::STRIDE>(s, own, k_tile[stage]);
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
        mma_product<true, A::STRIDE>(mixed, p, v_tile[stage]);
        __syncthreads();
    }
    quad_sum(sum);
    store_fragments<A>(out + at.out, C, at, a, mixed, 1.0f / sum[0], 1.0f / sum[1]);
    if (at.pair == 0) {
        UNROLL
        for (int i = 0; i < 2; i++)
            if (at.row + i * 8 < at.T) lse[at.head * a.T + at.row + i * 8] = max[i] * a.scale + logf(sum[i]);
    }
}

// The gradient of the queries, and dot[B,NH,T] = sum of dout * out, which the other kernel needs too.
template <class A>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_backward_query_mma_kernel(bfloat16 *dqkv, float *dot, const bfloat16 *dout, const bfloat16 *out,
                                        const float *lse, const bfloat16 *qkv, AttentionShape a) {
    alignas(16) __shared__ bfloat16 k_tile[2][A::KEYS * A::STRIDE], v_tile[2][A::KEYS * A::STRIDE];
    MmaPlace at = mma_place(a, true);
    size_t C = a.NH * a.HS;
    int end = at.block_row + (int)ATTENTION_MMA_ROWS < at.T ? at.block_row + (int)ATTENTION_MMA_ROWS : at.T;
    const bfloat16 *q = qkv + at.qkv, *k = q + C, *v = k + C;
    copy_tile<A::KEYS, A>(k_tile[0], k, 3 * C, 0, a);
    copy_tile<A::KEYS, A>(v_tile[0], v, 3 * C, 0, a);
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
            copy_tile<A::KEYS, A>(k_tile[!stage], k, 3 * C, first + A::KEYS, a);
            copy_tile<A::KEYS, A>(v_tile[!stage], v, 3 * C, first + A::KEYS, a);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        float s[A::KEYS / 8][4] = {}, ds[A::KEYS / 8][4] = {};
        mma_product<false, A::STRIDE>(s, own, k_tile[stage]);
        mma_product<false, A::STRIDE>(ds, d, v_tile[stage]);
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
        mma_product<true, A::STRIDE>(dq, rounded, k_tile[stage]);
        __syncthreads();
    }
    store_fragments<A>(dqkv + at.qkv, 3 * C, at, a, dq, a.scale, a.scale);
}

// The gradients of the keys and values: rows are keys, columns of the (transposed) scores are queries.
template <class A>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_backward_key_mma_kernel(bfloat16 *dqkv, const float *dot, const bfloat16 *dout, const float *lse,
                                      const bfloat16 *qkv, AttentionShape a) {
    alignas(16) __shared__ bfloat16 q_tile[2][A::QUERIES * A::STRIDE], d_tile[2][A::QUERIES * A::STRIDE];
    alignas(16) __shared__ bfloat16 own_values[A::VALUES_SHARED ? ATTENTION_MMA_ROWS * A::STRIDE : 8];
    __shared__ float norm[2][A::QUERIES], of_query[2][A::QUERIES];
    MmaPlace at = mma_place(a, false);
    size_t C = a.NH * a.HS;
    const bfloat16 *q = qkv + at.qkv;
    uint32_t k[A::K16][4], v[A::VALUES_SHARED ? 1 : A::K16][4];
    float dk[A::N8][4] = {}, dv[A::N8][4] = {};
    load_fragments<A>(k, q + C, 3 * C, at, a);
    if constexpr (A::VALUES_SHARED)
        copy_tile<ATTENTION_MMA_ROWS, A>(own_values, q + 2 * C, 3 * C, at.block_row, a);
    else
        load_fragments<A>(v, q + 2 * C, 3 * C, at, a);
    const float to_log2 = a.scale * LOG2_E;
    copy_tile<A::QUERIES, A>(q_tile[0], q, 3 * C, at.block_row, a);
    copy_tile<A::QUERIES, A>(d_tile[0], dout + at.out, C, at.block_row, a);
    copy_async_commit();
    for (int first = at.block_row; first < at.T; first += A::QUERIES) {
        int stage = (first - at.block_row) / A::QUERIES % 2;
        int next = first + A::QUERIES;
        if (next < at.T) {
            copy_tile<A::QUERIES, A>(q_tile[!stage], q, 3 * C, next, a);
            copy_tile<A::QUERIES, A>(d_tile[!stage], dout + at.out, C, next, a);
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
        mma_product<false, A::STRIDE>(p, k, q_tile[stage]);
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
        mma_product<true, A::STRIDE>(dv, rounded, d_tile[stage]);
        if constexpr (A::VALUES_SHARED) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                uint32_t part[A::K16 / 2][4];
                int c = half * A::CAPACITY / 2;
                tile_fragments<A::K16 / 2, A::STRIDE>(part, own_values + threadIdx.x / 32 * 16 * A::STRIDE + c);
                mma_product<false, A::STRIDE>(ds, part, d_tile[stage] + c);
            }
        } else {
            mma_product<false, A::STRIDE>(ds, v, d_tile[stage]);
        }
        UNROLL
        for (int n = 0; n < A::QUERIES / 8; n++) {
            UNROLL
            for (int i = 0; i < 4; i++)
                ds[n][i] = p[n][i] * (ds[n][i] - of_query[stage][n * 8 + at.pair + i % 2]);
        }
        round_fragments<A::QUERIES / 16>(rounded, ds);
        mma_product<true, A::STRIDE>(dk, rounded, q_tile[stage]);
        __syncthreads();
    }
    store_fragments<A>(dqkv + at.qkv + C, 3 * C, at, a, dk, a.scale, a.scale);
    store_fragments<A>(dqkv + at.qkv + 2 * C, 3 * C, at, a, dv, 1.0f, 1.0f);
}

// Whether these kernels can: rows of 16-byte packs, registers enough.
static inline bool attention_mma_takes(const AttentionShape &a) { return a.HS % 8 == 0 && a.HS <= 128; }

static inline unsigned attention_mma_blocks(const AttentionShape &a) {
    return (unsigned)(a.B * a.NH * CEIL_DIV(a.T, ATTENTION_MMA_ROWS));
}

template <int CAPACITY>
static inline void attention_forward_mma(bfloat16 *out, float *lse, const bfloat16 *qkv, AttentionShape a,
                                         cudaStream_t stream) {
    LAUNCH((attention_forward_mma_kernel<AttentionMma<CAPACITY>>), attention_mma_blocks(a), ATTENTION_MMA_THREADS, 0,
           stream)
    (out, lse, qkv, a);
}

// dot: [B,NH,T] floats of scratch.
template <int CAPACITY>
static inline void attention_backward_mma(bfloat16 *dqkv, float *dot, const bfloat16 *dout, const bfloat16 *out,
                                          const float *lse, const bfloat16 *qkv, AttentionShape a,
                                          cudaStream_t stream) {
    typedef AttentionMma<CAPACITY> A;
    LAUNCH((attention_backward_query_mma_kernel<A>), attention_mma_blocks(a), ATTENTION_MMA_THREADS, 0, stream)
    (dqkv, dot, dout, out, lse, qkv, a);
    LAUNCH((attention_backward_key_mma_kernel<A>), attention_mma_blocks(a), ATTENTION_MMA_THREADS, 0, stream)
    (dqkv, dot, dout, lse, qkv, a);
}

#endif
