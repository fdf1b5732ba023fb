// attention_mma.cuh: flash attention on tensor cores: bf16, heads of up to 256 channels, a multiple of 8.
//
// A block of four warps owns 64 rows, 16 a warp: queries, or keys where the gradients of keys and values are made.
// It goes over the other side tile by tile, and the next tile is under way while one is worked at. A product's
// result becomes a factor of the next without leaving the registers of its warp. Each gradient is summed by one
// warp in a fixed order: there are no atomics, and backward makes the scores twice instead.
//
// DROP: with dropout of the probabilities (attention_dropout.cuh). What stays is scaled where it costs least: once a
// row of the output and of the values' gradient, and in the gradient of each probability.
//
// defines: attention_mma_takes, attention_forward_mma, attention_backward_mma
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include "llmc/kernels/attention_tiles.cuh"
#include "llmc/kernels/exponential.cuh"

static constexpr float LOG2_E = 1.44269504f;

template <class A, bool DROP>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_forward_mma_kernel(bfloat16 *out, float *lse, const bfloat16 *qkv, AttentionShape a, Dropout drop) {
    alignas(16) __shared__ bfloat16 tiles[2][2][A::KEYS * A::STRIDE]; // of two stages, keys and values
    MmaPlace at = mma_place(a, true);
    size_t C = a.NH * a.HS;
    int end = at.block_row + (int)ATTENTION_MMA_ROWS < at.T ? at.block_row + (int)ATTENTION_MMA_ROWS : at.T;
    const bfloat16 *q = qkv + at.qkv, *k = q + C, *v = k + C;
    constexpr int TILE = A::KEYS * A::STRIDE;
    SharedTile row = matrix_row<false, A::STRIDE>(tiles[0][0]), column = matrix_row<true, A::STRIDE>(tiles[0][0]);
    TileCopy<A> k_copy(k, 3 * C, 0, a), v_copy(v, 3 * C, 0, a);
    SharedTile to = k_copy.to(tiles[0][0]);
    k_copy.template next<A::KEYS>(to);
    v_copy.template next<A::KEYS>(to + TILE);
    copy_async_commit();
    uint32_t own[A::K16][4];
    load_fragments<A>(own, q, 3 * C, at, a);
    float mixed[A::CAPACITY / 8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const float to_log2 = a.scale * LOG2_E;
    for (int first = 0, stage = 0; first < end; first += A::KEYS, stage = 2 * TILE - stage) {
        if (first + A::KEYS < end) {
            k_copy.template next<A::KEYS>(to + (2 * TILE - stage));
            v_copy.template next<A::KEYS>(to + (2 * TILE - stage + TILE));
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        if (A::KEYS == ATTENTION_MMA_ROWS || first < at.warp_row + 16) { // else no query of the warp sees these keys
            [[maybe_unused]] uint32_t kept = 0;
            if constexpr (DROP) kept = kept_keys<A>(drop, at, first);
            float s[A::KEYS / 8][4] = {};
            mma_product<false, A::STRIDE>(s, own, row + stage);
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
            float largest[2] = {max[0], max[1]}, shift[2];
            UNROLL
            for (int n = 0; n < A::KEYS / 8; n++) {
                UNROLL
                for (int i = 0; i < 4; i++) largest[i / 2] = larger(largest[i / 2], s[n][i]);
            }
            quad_max(largest);
            UNROLL
            for (int i = 0; i < 2; i++) shift[i] = largest[i] * to_log2;
            if (warp_any(largest[0] > max[0] || largest[1] > max[1])) { // else the correction is 1: a max rarely grows
                float correction[2];
                UNROLL
                for (int i = 0; i < 2; i++) {
                    correction[i] = exponential2(max[i] * to_log2 - shift[i]);
                    max[i] = largest[i];
                    sum[i] *= correction[i];
                }
                UNROLL
                for (int n = 0; n < A::CAPACITY / 8; n++) {
                    UNROLL
                    for (int i = 0; i < 4; i++) mixed[n][i] *= correction[i / 2];
                }
            }
            UNROLL
            for (int n = 0; n < A::KEYS / 8; n++) {
                UNROLL
                for (int i = 0; i < 4; i++) s[n][i] = exponential2(s[n][i] * to_log2 - shift[i / 2]);
                UNROLL
                for (int i = 0; i < 4; i++) sum[i / 2] += s[n][i];
            }
            if constexpr (DROP) drop_fragments(s, s, kept); // the sum has all of them
            uint32_t p[A::KEYS / 16][4];
            round_fragments<A::KEYS / 16>(p, s);
            mma_product<true, A::STRIDE>(mixed, p, column + (stage + TILE));
        }
        __syncthreads();
    }
    quad_sum(sum);
    const float up = DROP ? drop.scale : 1.0f;
    store_fragments(out + at.out, C, 0, at, a, mixed, up / sum[0], up / sum[1]);
    if (at.pair == 0) {
        UNROLL
        for (int i = 0; i < 2; i++)
            if (at.row + i * 8 < at.T) lse[at.head * a.T + at.row + i * 8] = max[i] * a.scale + logf(sum[i]);
    }
}

// The gradient of the queries, and dot[B,NH,T] = sum of dout * out, which the other kernel needs too. With dropout it
// is still the sum over the keys of probability times gradient, as the same factors stand in both.
template <class A, bool DROP>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_backward_query_mma_kernel(bfloat16 *dqkv, float *dot, const bfloat16 *dout, const bfloat16 *out,
                                        const float *lse, const bfloat16 *qkv, AttentionShape a, Dropout drop) {
    alignas(16) __shared__ bfloat16 tiles[2][2][A::KEYS * A::STRIDE]; // of two stages, keys and values
    MmaPlace at = mma_place(a, true);
    size_t C = a.NH * a.HS;
    int end = at.block_row + (int)ATTENTION_MMA_ROWS < at.T ? at.block_row + (int)ATTENTION_MMA_ROWS : at.T;
    const bfloat16 *q = qkv + at.qkv, *k = q + C, *v = k + C;
    constexpr int TILE = A::KEYS * A::STRIDE;
    SharedTile row = matrix_row<false, A::STRIDE>(tiles[0][0]), column = matrix_row<true, A::STRIDE>(tiles[0][0]);
    TileCopy<A> k_copy(k, 3 * C, 0, a), v_copy(v, 3 * C, 0, a);
    SharedTile to = k_copy.to(tiles[0][0]);
    k_copy.template next<A::KEYS>(to);
    v_copy.template next<A::KEYS>(to + TILE);
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
        if (exists && at.pair == 0 && blockIdx.y == 0) dot[row] = of_row[i];
    }
    constexpr int PART = A::CAPACITY / A::QUERY_PARTS / (DROP ? A::DROP_PARTS : 1); // channels
    const int part = (int)blockIdx.y * PART;
    float dq[PART / 8][4] = {};
    const float to_log2 = a.scale * LOG2_E;
    for (int first = 0, stage = 0; first < end; first += A::KEYS, stage = 2 * TILE - stage) {
        if (first + A::KEYS < end) {
            k_copy.template next<A::KEYS>(to + (2 * TILE - stage));
            v_copy.template next<A::KEYS>(to + (2 * TILE - stage + TILE));
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        if (A::KEYS == ATTENTION_MMA_ROWS || first < at.warp_row + 16) { // else no query of the warp sees these keys
            [[maybe_unused]] uint32_t kept = 0;
            if constexpr (DROP) kept = kept_keys<A>(drop, at, first);
            float s[A::KEYS / 8][4] = {}, ds[A::KEYS / 8][4] = {};
            mma_product<false, A::STRIDE>(s, own, row + stage);
            mma_product<false, A::STRIDE>(ds, d, row + (stage + TILE));
            if (first + A::KEYS > at.warp_row + 1) { // some key comes after some query
                int seen = at.row - first;
                UNROLL
                for (int n = 0; n < A::KEYS / 8; n++) {
                    UNROLL
                    for (int i = 0; i < 4; i++)
                        if (n * 8 + at.pair + i % 2 > seen + i / 2 * 8) s[n][i] = -INFINITY;
                }
            }
            if constexpr (DROP) drop_fragments(ds, ds, kept);
            UNROLL
            for (int n = 0; n < A::KEYS / 8; n++) {
                UNROLL
                for (int i = 0; i < 4; i++) {
                    float p = exponential2(s[n][i] * to_log2 - norm[i / 2]);
                    ds[n][i] = p * ((DROP ? ds[n][i] * drop.scale : ds[n][i]) - of_row[i / 2]);
                }
            }
            uint32_t rounded[A::KEYS / 16][4];
            round_fragments<A::KEYS / 16>(rounded, ds);
            mma_product<true, A::STRIDE>(dq, rounded, column + (stage + part));
        }
        __syncthreads();
    }
    store_fragments(dqkv + at.qkv, 3 * C, part, at, a, dq, a.scale, a.scale);
}

// The gradients of the keys and values: rows are keys, columns of the (transposed) scores are queries.
template <class A, bool DROP>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_backward_key_mma_kernel(bfloat16 *dqkv, const float *dot, const bfloat16 *dout, const float *lse,
                                      const bfloat16 *qkv, AttentionShape a, Dropout drop) {
    constexpr int TILE = A::QUERIES * A::STRIDE, PART = A::CAPACITY / A::KEY_PARTS / (DROP ? A::DROP_PARTS : 1);
    alignas(16) __shared__ bfloat16 tiles[2][2][TILE]; // of two stages, queries and the gradients of their outputs
    alignas(16) __shared__ bfloat16 own_values[A::VALUES_SHARED ? ATTENTION_MMA_ROWS * A::STRIDE : 8];
    alignas(16) __shared__ float of_query[2][2][ATTENTION_MMA_ROWS]; // of two stages, lse and dot
    MmaPlace at = mma_place(a, false);
    size_t C = a.NH * a.HS;
    const bfloat16 *q = qkv + at.qkv;
    const int part = (int)blockIdx.y * PART;
    uint32_t k[A::K16][4], v[A::VALUES_SHARED ? 1 : A::K16][4];
    float dk[PART / 8][4] = {}, dv[PART / 8][4] = {};
    load_fragments<A>(k, q + C, 3 * C, at, a);
    if constexpr (A::VALUES_SHARED) {
        TileCopy<A> v_copy(q + 2 * C, 3 * C, at.block_row, a);
        v_copy.template next<(int)ATTENTION_MMA_ROWS>(v_copy.to(own_values));
    } else {
        load_fragments<A>(v, q + 2 * C, 3 * C, at, a);
    }
    SharedTile values = matrix_rows<A::STRIDE>(own_values + threadIdx.x / 32 * 16 * A::STRIDE);
    SharedTile row = matrix_row<false, A::STRIDE>(tiles[0][0]), column = matrix_row<true, A::STRIDE>(tiles[0][0]);
    TileCopy<A> q_copy(q, 3 * C, at.block_row, a), d_copy(dout + at.out, C, at.block_row, a);
    SharedTile to = q_copy.to(tiles[0][0]);
    // Half of the threads copy lse, the others dot. A query that does not exist has zeros, and so all of its products.
    int of = (int)(threadIdx.x / ATTENTION_MMA_ROWS), query = (int)(threadIdx.x % ATTENTION_MMA_ROWS);
    const float *from = (of == 0 ? lse : dot) + at.head * a.T + at.block_row;
    const auto copy_of_query = [&](int stage, int first) {
        bool exists = first + query < at.T;
        if (query < A::QUERIES) copy_async4(&of_query[stage][of][query], exists ? from + query : from, exists);
        from += A::QUERIES;
    };
    const float to_log2 = a.scale * LOG2_E;
    q_copy.template next<A::QUERIES>(to);
    d_copy.template next<A::QUERIES>(to + TILE);
    copy_of_query(0, at.block_row);
    copy_async_commit();
    for (int first = at.block_row, stage = 0; first < at.T; first += A::QUERIES, stage = !stage) {
        int here = stage * 2 * TILE, there = 2 * TILE - here;
        if (first + A::QUERIES < at.T) {
            q_copy.template next<A::QUERIES>(to + there);
            d_copy.template next<A::QUERIES>(to + (there + TILE));
            copy_of_query(!stage, first + A::QUERIES);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        if (A::QUERIES == ATTENTION_MMA_ROWS || first + A::QUERIES > at.warp_row) { // else no query sees them
            [[maybe_unused]] uint32_t kept = 0;
            if constexpr (DROP) kept = kept_queries<A>(drop, at, first);
            float p[A::QUERIES / 8][4] = {}, ds[A::QUERIES / 8][4] = {}, x[2];
            uint32_t rounded[A::QUERIES / 16][4];
            mma_product<false, A::STRIDE>(p, k, row + here);
            if (first < at.warp_row + 15) { // some query comes before some key
                int hidden = at.row - first;
                UNROLL
                for (int n = 0; n < A::QUERIES / 8; n++) {
                    UNROLL
                    for (int i = 0; i < 4; i++)
                        if (n * 8 + at.pair + i % 2 < hidden + i / 2 * 8) p[n][i] = -INFINITY;
                }
            }
            UNROLL
            for (int n = 0; n < A::QUERIES / 8; n++) {
                load_two(x, &of_query[stage][0][n * 8 + at.pair]);
                UNROLL
                for (int i = 0; i < 4; i++) p[n][i] = exponential2(p[n][i] * to_log2 - x[i % 2] * LOG2_E);
            }
            if constexpr (DROP) {
                float stays[A::QUERIES / 8][4];
                drop_fragments(stays, p, kept);
                round_fragments<A::QUERIES / 16>(rounded, stays);
            } else {
                round_fragments<A::QUERIES / 16>(rounded, p);
            }
            mma_product<true, A::STRIDE>(dv, rounded, column + (here + TILE + part));
            if constexpr (A::VALUES_SHARED) {
                UNROLL
                for (int half = 0; half < 2; half++) {
                    uint32_t of_half[A::K16 / 2][4];
                    int c = half * A::CAPACITY / 2;
                    tile_fragments(of_half, values + c);
                    mma_product<false, A::STRIDE>(ds, of_half, row + (here + TILE + c));
                }
            } else {
                mma_product<false, A::STRIDE>(ds, v, row + (here + TILE));
            }
            if constexpr (DROP) drop_fragments(ds, ds, kept);
            UNROLL
            for (int n = 0; n < A::QUERIES / 8; n++) {
                load_two(x, &of_query[stage][1][n * 8 + at.pair]);
                UNROLL
                for (int i = 0; i < 4; i++)
                    ds[n][i] = p[n][i] * ((DROP ? ds[n][i] * drop.scale : ds[n][i]) - x[i % 2]);
            }
            round_fragments<A::QUERIES / 16>(rounded, ds);
            mma_product<true, A::STRIDE>(dk, rounded, column + (here + part));
        }
        __syncthreads();
    }
    store_fragments(dqkv + at.qkv + C, 3 * C, part, at, a, dk, a.scale, a.scale);
    const float up = DROP ? drop.scale : 1.0f;
    store_fragments(dqkv + at.qkv + 2 * C, 3 * C, part, at, a, dv, up, up);
}

// Whether these kernels can: rows of 16-byte packs, registers enough.
static inline bool attention_mma_takes(const AttentionShape &a) { return a.HS % 8 == 0 && a.HS <= 256; }

static inline unsigned attention_mma_blocks(const AttentionShape &a) {
    return (unsigned)(a.B * a.NH * CEIL_DIV(a.T, ATTENTION_MMA_ROWS));
}

template <int CAPACITY>
static inline void attention_forward_mma(bfloat16 *out, float *lse, const bfloat16 *qkv, AttentionShape a,
                                         cudaStream_t stream, Dropout drop) {
    typedef AttentionMma<CAPACITY> A;
    unsigned blocks = attention_mma_blocks(a);
    if (drop.threshold) {
        LAUNCH((attention_forward_mma_kernel<A, true>), blocks, ATTENTION_MMA_THREADS, 0, stream)
        (out, lse, qkv, a, drop);
    } else {
        LAUNCH((attention_forward_mma_kernel<A, false>), blocks, ATTENTION_MMA_THREADS, 0, stream)
        (out, lse, qkv, a, drop);
    }
}

// dot: [B,NH,T] floats of scratch.
template <int CAPACITY>
static inline void attention_backward_mma(bfloat16 *dqkv, float *dot, const bfloat16 *dout, const bfloat16 *out,
                                          const float *lse, const bfloat16 *qkv, AttentionShape a,
                                          cudaStream_t stream, Dropout drop) {
    typedef AttentionMma<CAPACITY> A;
    unsigned blocks = attention_mma_blocks(a), times = drop.threshold ? A::DROP_PARTS : 1;
    dim3 queries(blocks, A::QUERY_PARTS * times), keys(blocks, A::KEY_PARTS * times);
    if (drop.threshold) {
        LAUNCH((attention_backward_query_mma_kernel<A, true>), queries, ATTENTION_MMA_THREADS, 0, stream)
        (dqkv, dot, dout, out, lse, qkv, a, drop);
        LAUNCH((attention_backward_key_mma_kernel<A, true>), keys, ATTENTION_MMA_THREADS, 0, stream)
        (dqkv, dot, dout, lse, qkv, a, drop);
        return;
    }
    LAUNCH((attention_backward_query_mma_kernel<A, false>), queries, ATTENTION_MMA_THREADS, 0, stream)
    (dqkv, dot, dout, out, lse, qkv, a, drop);
    LAUNCH((attention_backward_key_mma_kernel<A, false>), keys, ATTENTION_MMA_THREADS, 0, stream)
    (dqkv, dot, dout, lse, qkv, a, drop);
}

#endif
