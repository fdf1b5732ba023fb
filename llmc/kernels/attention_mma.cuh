// attention_mma.cuh: flash attention on tensor cores: bf16, heads of up to 256 channels, a
// multiple of 8.
//
// A block of four warps owns 64 rows, 16 a warp: queries, or keys for the gradients of keys
// and values. It goes over the other side tile by tile, and copies the next tile while it
// works at one. A product's result becomes a factor of the next without leaving the
// registers of its warp. Each gradient is summed by one warp in a fixed order: there are no
// atomics, and backward makes the scores twice instead.
//
// DROP: with dropout of the probabilities. Kept probabilities are scaled where it costs
// least: once a row of the output and of the values' gradient, and in the gradient of each
// probability.
//
// defines: attention_mma_takes, attention_mma
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include <algorithm>

#include "llmc/kernels/attention_tiles.cuh"

template <class A, bool DROP>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_forward_mma_kernel(typename A::Args a, Dropout drop) {
    typedef TilePair<A, A::KEYS> Tiles;
    constexpr int M = A::template GROUPS<DROP>;
    alignas(16) __shared__ bfloat16 shared[4 * Tiles::TILE];  // keys and values
    MmaPlace at = mma_place<A, M>(a, false);
    // The keys that the warp's rows see.
    const int of_warp = at.warp_row >= at.T ? 0 : at.full ? at.end : at.warp_row + 16 * M;
    Tiles tiles(shared, a.k + at.in_k, a.k_stride, a.v + at.in_k, a.k_stride, at.begin,
                at.others, a);
    tiles.next(0);
    copy_async_commit();
    uint32_t own[M][A::K16][4];
    float mixed[M][A::CAPACITY / 8][4] = {}, max[M][2], sum[M][2] = {};
    UNROLL
    for (int m = 0; m < M; m++) {
        load_fragments<A>(own[m], a.q + at.in, a.stride, mma_group(at, m), a);
        max[m][0] = max[m][1] = A::Args::LEAST;
    }
    const float to_log2 = a.scale * LOG2_E;
    for (int first = at.begin, stage = 0; first < at.end;
         first += A::KEYS, stage = 2 * Tiles::TILE - stage) {
        if (first + A::KEYS < at.end) tiles.next(2 * Tiles::TILE - stage);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        if (first < of_warp) {
            float s[M][A::KEYS / 8][4] = {};
            uint32_t p[M][A::KEYS / 16][4];
            uint32_t kept[M];
            UNROLL
            for (int m = 0; m < M; m++)
                kept[m] = DROP ? kept_keys<A>(drop, mma_group(at, m), a, first) : 0;
            mma_product<false, A::STRIDE>(s, own, tiles.row + stage);
            UNROLL
            for (int m = 0; m < M; m++) {
                MmaPlace rows = mma_group(at, m);
                hide_fragments<true>(s[m], rows, first);
                if constexpr (A::Args::FIRST)
                    a.template hide_fragments<true>(s[m], rows, first);
                // Key 0 is seen by every query: after the first tile max is finite.
                float largest[2] = {max[m][0], max[m][1]};
                UNROLL
                for (int i = 0; i < A::KEYS / 2; i++)
                    largest[i % 4 / 2] = larger(largest[i % 4 / 2], s[m][i / 4][i % 4]);
                quad_max(largest);
                const float shift[2] = {largest[0] * to_log2, largest[1] * to_log2};
                // A maximum rarely grows; else the correction is 1.
                if (warp_any(largest[0] > max[m][0] || largest[1] > max[m][1])) {
                    float correction[2];
                    UNROLL
                    for (int i = 0; i < 2; i++) {
                        correction[i] = exponential2(max[m][i] * to_log2 - shift[i]);
                        max[m][i] = largest[i];
                        sum[m][i] *= correction[i];
                    }
                    UNROLL
                    for (int i = 0; i < A::CAPACITY / 2; i++)
                        mixed[m][i / 4][i % 4] *= correction[i % 4 / 2];
                }
                UNROLL
                for (int i = 0; i < A::KEYS / 2;
                     i++) {  // the sum is of all probabilities, with dropout too
                    float &x = s[m][i / 4][i % 4];
                    sum[m][i % 4 / 2] += x = exponential2(x * to_log2 - shift[i % 4 / 2]);
                }
                round_fragments<DROP>(p[m], s[m], kept[m]);
            }
            mma_product<true, A::STRIDE>(mixed, p, tiles.column + (stage + Tiles::TILE));
        }
        __syncthreads();
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        MmaPlace rows = mma_group(at, m);
        quad_sum(sum[m]);
        if constexpr (A::Args::FIRST)
            for (float &x : sum[m]) x = larger(x, 1.0f);
        const float up = DROP ? drop.scale : 1.0f, up0 = up / sum[m][0];
        const float up1 = up / sum[m][1];
        store_fragments(a.out + at.out, a.out_stride, 0, rows, a, mixed[m], up0, up1);
        UNROLL
        for (int i = 0; i < 2; i++)
            if (at.pair == 0 && rows.row + i * 8 < at.T)
                a.lse[at.stat + rows.row + i * 8] = max[m][i] * a.scale + logf(sum[m][i]);
    }
}

// Computes the gradient of the queries, and dot, which the other kernel needs too. With
// dropout dot is still the sum over the keys of probability times gradient, as both have
// the same factors.
template <class A, bool DROP>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_backward_query_mma_kernel(typename A::Args a, Dropout drop) {
    typedef TilePair<A, A::KEYS> Tiles;
    alignas(16) __shared__ bfloat16 shared[4 * Tiles::TILE];  // keys and values
    MmaPlace at = mma_place<A>(a, false);
    Tiles tiles(shared, a.k + at.in_k, a.k_stride, a.v + at.in_k, a.k_stride, at.begin,
                at.others, a);
    tiles.next(0);
    copy_async_commit();
    uint32_t own[A::K16][4], d[A::K16][4];
    load_fragments<A>(own, a.q + at.in, a.stride, at, a);
    load_fragments<A>(d, a.dout + at.out, a.out_stride, at, a);
    float of_row[2] = {0.0f, 0.0f}, norm[2];
    UNROLL
    for (int i = 0; i < 4 * A::K16; i++) {
        uint32_t x = load_pair<A>(a.y + at.out, a.out_stride, at, a, i);
        uint32_t y = d[i / 4][i % 4];
        of_row[i % 2] += low_float(x) * low_float(y) + high_float(x) * high_float(y);
    }
    quad_sum(of_row);
    UNROLL
    for (int i = 0; i < 2; i++) {
        size_t row = at.stat + at.row + i * 8;
        bool exists = at.row + i * 8 < at.T;
        norm[i] = exists ? a.lse[row] * LOG2_E : 0.0f;
        if (exists && at.pair == 0 && blockIdx.y == 0) a.dot[row] = of_row[i];
    }
    constexpr int PART = A::CAPACITY / A::template QUERY_PARTS<DROP>;  // channels
    // A constant saves a spill at 192.
    const int part = PART == A::CAPACITY && !DROP ? 0 : (int)blockIdx.y * PART;
    float dq[PART / 8][4] = {};
    const float to_log2 = a.scale * LOG2_E, up = DROP ? drop.scale : 1.0f;
    for (int first = at.begin, stage = 0; first < at.end;
         first += A::KEYS, stage = 2 * Tiles::TILE - stage) {
        if (first + A::KEYS < at.end) tiles.next(2 * Tiles::TILE - stage);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        // Otherwise no query sees these keys.
        if (A::KEYS == ATTENTION_MMA_ROWS || at.full || first < at.warp_row + 16) {
            uint32_t kept = DROP ? kept_keys<A>(drop, at, a, first) : 0;
            float s[A::KEYS / 8][4] = {}, ds[A::KEYS / 8][4] = {};
            mma_product<false, A::STRIDE>(s, own, tiles.row + stage);
            mma_product<false, A::STRIDE>(ds, d, tiles.row + (stage + Tiles::TILE));
            hide_fragments<true>(s, at, first);
            if constexpr (A::Args::FIRST) a.template hide_fragments<true>(s, at, first);
            UNROLL
            for (int i = 0; i < A::KEYS / 2; i++) {
                float p = exponential2(s[i / 4][i % 4] * to_log2 - norm[i % 4 / 2]),
                      &x = ds[i / 4][i % 4];
                x = p * ((stays<DROP>(kept, i) ? x : 0.0f) * up - of_row[i % 4 / 2]);
            }
            uint32_t rounded[A::KEYS / 16][4];
            round_fragments<false>(rounded, ds, 0);
            mma_product<true, A::STRIDE>(dq, rounded, tiles.column + (stage + part));
        }
        __syncthreads();
    }
    const size_t to = a.PAIR ? at.out : at.in, stride = a.PAIR ? a.out_stride : a.stride;
    store_fragments(a.dq + to, stride, part, at, a, dq, a.scale, a.scale);
}

// Computes the gradients of the keys and values: rows are keys, columns of the (transposed)
// scores are queries.
template <class A, bool DROP>
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 1)
    attention_backward_key_mma_kernel(typename A::Args a, Dropout drop) {
    typedef TilePair<A, A::QUERIES> Tiles;
    constexpr int TILE = Tiles::TILE, PART = A::CAPACITY / A::template KEY_PARTS<DROP>;
    // Queries and the gradients of their outputs.
    alignas(16) __shared__ bfloat16 shared[4 * TILE];
    alignas(16) __shared__ bfloat16
        own_values[A::VALUES_SHARED ? ATTENTION_MMA_ROWS * A::STRIDE : 8];
    // lse and dot, of two stages.
    alignas(16) __shared__ float of_query[2][2][ATTENTION_MMA_ROWS];
    MmaPlace at = mma_place<A>(a, true);
    const int part = (int)blockIdx.y * PART;
    uint32_t k[A::K16][4], v[A::VALUES_SHARED ? 1 : A::K16][4];
    float dk[PART / 8][4] = {}, dv[PART / 8][4] = {};
    load_fragments<A>(k, a.k + at.in_k, a.k_stride, at, a);
    if constexpr (A::VALUES_SHARED) {
        TileCopy<A> v_copy(a.v + at.in_k, a.k_stride, at.block_row, at.T, a);
        v_copy.template next<(int)ATTENTION_MMA_ROWS>(v_copy.to(own_values));
    } else {
        load_fragments<A>(v, a.v + at.in_k, a.k_stride, at, a);
    }
    SharedTile values =
        matrix_row<true, A::STRIDE>(own_values + threadIdx.x / 32 * 16 * A::STRIDE);
    const float to_log2 = a.scale * LOG2_E, up = DROP ? drop.scale : 1.0f;
    // With dropout a head of keys has one of queries (attention_launch): the loop would
    // take registers.
    const unsigned head = at.h, group = DROP ? 1 : (unsigned)(a.NH / a.KV);
    for (unsigned i = 0; i < group; i++) {
        if constexpr (!DROP) place_head(at, head + i, a);
        Tiles tiles(shared, a.q + at.in, a.stride, a.dout + at.out, a.out_stride, at.begin,
                    at.others, a);
        // Half of the threads copy lse, the others dot. A query that does not exist has
        // zeros, and so all of its products.
        int of = (int)(threadIdx.x / ATTENTION_MMA_ROWS);
        int query = (int)(threadIdx.x % ATTENTION_MMA_ROWS);
        const float *from = (of == 0 ? a.lse : a.dot) + at.stat + at.begin;
        const auto next = [&](int stage, int first) {
            bool exists = first + query < at.others;
            tiles.next(stage * 2 * TILE);
            if (query < A::QUERIES)
                copy_async4(&of_query[stage][of][query], exists ? from + query : from,
                            exists);
            from += A::QUERIES;
        };
        next(0, at.begin);
        copy_async_commit();
        for (int first = at.begin, stage = 0; first < at.end;
             first += A::QUERIES, stage = !stage) {
            int here = stage * 2 * TILE;
            if (first + A::QUERIES < at.end) next(!stage, first + A::QUERIES);
            copy_async_commit();
            copy_async_wait<1>();
            __syncthreads();
            // Otherwise none of these queries sees the keys.
            if (A::QUERIES == ATTENTION_MMA_ROWS || at.full ||
                first + A::QUERIES > at.warp_row) {
                uint32_t kept = DROP ? kept_queries<A>(drop, at, a, first) : 0;
                float p[A::QUERIES / 8][4] = {}, ds[A::QUERIES / 8][4] = {}, x[2];
                uint32_t rounded[A::QUERIES / 16][4];
                mma_product<false, A::STRIDE>(p, k, tiles.row + here);
                hide_fragments<false>(p, at, first);
                if constexpr (A::Args::FIRST)
                    a.template hide_fragments<false>(p, at, first);
                UNROLL
                for (int n = 0; n < A::QUERIES / 8; n++) {
                    load_two(x, &of_query[stage][0][n * 8 + at.pair]);
                    UNROLL
                    for (int i = 0; i < 4; i++)
                        p[n][i] = exponential2(p[n][i] * to_log2 - x[i % 2] * LOG2_E);
                }
                round_fragments<DROP>(rounded, p, kept);
                mma_product<true, A::STRIDE>(dv, rounded,
                                             tiles.column + (here + TILE + part));
                if constexpr (A::VALUES_SHARED) {
                    UNROLL
                    for (int half = 0; half < 2; half++) {
                        uint32_t of_half[A::K16 / 2][4];
                        int c = half * A::CAPACITY / 2;
                        tile_fragments(of_half, values + c);
                        mma_product<false, A::STRIDE>(ds, of_half,
                                                      tiles.row + (here + TILE + c));
                    }
                } else {
                    mma_product<false, A::STRIDE>(ds, v, tiles.row + (here + TILE));
                }
                UNROLL
                for (int n = 0; n < A::QUERIES / 8; n++) {
                    load_two(x, &of_query[stage][1][n * 8 + at.pair]);
                    UNROLL
                    for (int i = 0; i < 4; i++)
                        ds[n][i] = p[n][i] *
                                   ((stays<DROP>(kept, 4 * n + i) ? ds[n][i] : 0.0f) * up -
                                    x[i % 2]);
                }
                round_fragments<false>(rounded, ds, 0);
                mma_product<true, A::STRIDE>(dk, rounded, tiles.column + (here + part));
            }
            __syncthreads();
        }
    }
    store_fragments(a.dk + at.in_k, a.k_stride, part, at, a, dk, a.scale, a.scale);
    store_fragments(a.dv + at.in_k, a.k_stride, part, at, a, dv, up, up);
}

// Capacities of these kernels. The Makefile gives a CPU's trainers fewer: they compile
// faster.
#ifndef ATTENTION_MMA_CAPACITIES
#define ATTENTION_MMA_CAPACITIES 32, 64, 96, 128, 160, 192, 256
#endif

// True if these kernels can: rows of 16-byte packs, registers enough. With first keys they
// would spill registers beyond 160 channels.
template <class Args>
static inline bool attention_mma_takes(const Args &a) {
    size_t most = std::max({ATTENTION_MMA_CAPACITIES});
    return a.HS % 8 == 0 && a.HS <= most && !(Args::FIRST && a.HS > 160);
}

// Queues the forward or the backward pass.
template <class A, bool DROP>
static inline void attention_mma(const typename A::Args &a, const Dropout &drop,
                                 bool backward, cudaStream_t stream) {
    if (!backward) {
        unsigned blocks =
            attention_blocks(a, false, A::template GROUPS<DROP> * ATTENTION_MMA_ROWS);
        LAUNCH((attention_forward_mma_kernel<A, DROP>), blocks, ATTENTION_MMA_THREADS,
               stream)
        (a, drop);
        return;
    }
    dim3 queries(attention_blocks(a, false, ATTENTION_MMA_ROWS),
                 A::template QUERY_PARTS<DROP>);
    dim3 keys(attention_blocks(a, true, ATTENTION_MMA_ROWS), A::template KEY_PARTS<DROP>);
    LAUNCH((attention_backward_query_mma_kernel<A, DROP>), queries, ATTENTION_MMA_THREADS,
           stream)
    (a, drop);
    LAUNCH((attention_backward_key_mma_kernel<A, DROP>), keys, ATTENTION_MMA_THREADS,
           stream)
    (a, drop);
}

#endif
